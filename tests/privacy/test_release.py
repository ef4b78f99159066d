"""A client's only way out: charged first, then noised."""

import numpy as np
import pytest

from secure_fedclust import (
    BudgetExceeded,
    Ledger,
    LedgerError,
    ParameterError,
    PrivacySpec,
    ProtocolError,
)
from secure_fedclust.privacy import mechanism
from secure_fedclust.privacy.accounting import Limit, slack_of
from secure_fedclust.privacy.bulk_noise import NOISE
from secure_fedclust.privacy.mechanism import Bounded
from secure_fedclust.privacy.queries import CellSums, Cost, Histograms, Moments
from secure_fedclust.privacy.release import Releases
from secure_fedclust.privacy.subsampled import (
    TAIL_SHARE,
    Sampling,
    equivalent_mu,
    tail_rate,
    trainings_of,
)

SPEC = PrivacySpec(epsilon=1.0, delta=1e-5, ranges=[(-1, 1)] * 2)
X = np.random.default_rng(0).uniform(-1, 1, (30, 2))
QUERY = CellSums(np.array([[0.5, 0.5], [-0.5, -0.5]]), 1.0, 0.7)
PLACE = {"run": "r", "step": 0, "message": "cells"}


def ledger_of(**changed):
    return Ledger.create(None, **{"epsilon": 1.0, "delta": 1e-5} | changed)


def releases(spec=SPEC, ledger=None, sampler="fast", client="a"):
    return Releases(client, spec, ledger or ledger_of(), sampler)


def test_a_release_is_charged_as_it_is_noised():
    out = releases()
    noisy = out.release(QUERY, X, 0.25, **PLACE)
    [row] = out.ledger.rows()
    charge = row.charge
    assert (charge.client, charge.run, charge.step, charge.message) == ("a", "r", 0, "cells")
    assert charge.formula == "sums_and_counts/add_remove"
    assert charge.coordinates == 2 * 3 == sum(field.size for field in noisy.fields.values())
    assert charge.sigma == noisy.sigma
    assert charge.mu == pytest.approx(out.limit.mu / 2)
    assert charge.sensitivity == QUERY.sensitivity("add_remove", noisy.exponent).value
    assert charge.slack == slack_of(noisy.sigma, 6)
    assert out.anchor == out.ledger.anchor() == (1, row.hash)


@pytest.mark.parametrize(
    "query", [QUERY, Moments(2), Histograms(np.array([[-1.0, 0, 1]] * 2)), Cost(X[:2], X[0], 1.0)]
)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_neither_grid_nor_noise_nor_charge_depends_on_the_records(query, adjacency):
    spec = PrivacySpec(**SPEC.to_dict() | {"adjacency": adjacency})
    found = []
    for data in (X, X[:1], X[:0], 1e6 * X):
        out = releases(spec, ledger_of(adjacency=adjacency))
        noisy = out.release(query, data, 0.5, **PLACE)
        shapes = {name: field.shape for name, field in noisy.fields.items()}
        found.append((noisy.exponent, noisy.sigma, shapes, out.ledger.rows()[0].charge))
    assert found == found[:1] * 4


def test_what_comes_out_is_what_went_in_and_the_noise(monkeypatch):
    monkeypatch.setattr(mechanism, "fast_noise", lambda sigma, size: np.arange(size))
    noisy = releases().release(QUERY, X, 1.0, **PLACE)
    exact = QUERY.answer(X, "add_remove", noisy.exponent)
    np.testing.assert_array_equal(noisy.fields["sums"] - exact.fields["sums"], [[0, 1], [2, 3]])
    np.testing.assert_array_equal(noisy.fields["counts"] - exact.fields["counts"], [4, 5])


def refuse(sigma, size):
    raise AssertionError("noise was drawn")


def test_what_the_plan_does_not_allow_is_neither_charged_nor_noised(monkeypatch):
    out = releases(ledger=ledger_of(epsilon=10.0))
    out.release(QUERY, X, 0.6, **PLACE)
    before = out.anchor
    monkeypatch.setattr(mechanism, "fast_noise", refuse)
    with pytest.raises(BudgetExceeded, match=r"spent .* asked .* limit .* the plan of run 'r'"):
        out.release(QUERY, X, 0.6, run="r", step=1, message="cells")
    assert out.ledger.anchor() == before


def test_the_plan_is_for_each_run_and_the_lifetime_for_all():
    out = releases(ledger=ledger_of(epsilon=1.4))
    assert Limit.of(1.4, 1e-5).mu ** 2 < 2 * out.limit.mu**2
    out.release(QUERY, X, 1.0, **PLACE)
    with pytest.raises(BudgetExceeded, match="the lifetime budget"):
        out.release(QUERY, X, 1.0, run="s", step=0, message="cells")


@pytest.mark.parametrize("share", [0.0, 1e-320, 1e-40, 2.0])
def test_a_share_that_makes_no_sense_is_refused_by_a_typed_error(share):
    out = releases(ledger=ledger_of(epsilon=10.0))
    with pytest.raises((ParameterError, BudgetExceeded)):
        out.release(QUERY, X, share, **PLACE)
    assert out.ledger.rows() == []


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"unit": "client"}, "unit='client', the run for unit='record'"),
        ({"adjacency": "replace_one"}, "adjacency='replace_one', the run for adjacency='add_"),
    ],
)
def test_a_ledger_for_something_else_is_refused(header, message):
    with pytest.raises(LedgerError, match=message):
        releases(ledger=ledger_of(**header))


def test_without_a_guarantee_there_is_nothing_to_release():
    with pytest.raises(ParameterError, match="no epsilon to work with: NO DP CLAIM"):
        releases(PrivacySpec.none(reason="test"))


def test_only_a_query_can_be_released():
    class Raw:
        """Answers with what it was given, unbounded."""

        def exponent(self, adjacency, mu):
            return -20

        def answer(self, X, adjacency, exponent):
            return X

    out = releases()
    with pytest.raises((TypeError, AttributeError)):
        out.release(Raw(), X, 1.0, **PLACE)
    assert out.ledger.rows() == []


def test_exact_statistics_do_not_show_in_a_repr():
    exact = QUERY.answer(X, "add_remove", -20)
    assert isinstance(exact, Bounded)
    for field in exact.fields.values():
        for value in field.ravel():
            assert str(value) not in repr(exact)


SAMPLINGS = [Sampling(0.1, 50), Sampling(0.5, 20), Sampling(1.0, 10)]


def pay(out, share=0.5, samplings=SAMPLINGS, **given):
    return out.pay_for_training(
        samplings,
        share,
        **{"clip": 0.5, "numbers": 1000, "run": "r", "step": 3, "message": "train"} | given,
    )


def test_training_is_charged_once_for_all_parts_and_gets_the_noise_that_was_paid_for():
    out = releases()
    trainings = pay(out)
    assert [training.sampling for training in trainings] == SAMPLINGS
    [row] = out.ledger.rows()
    charge, mu = row.charge, out.limit.mu * 0.5**0.5
    assert (charge.step, charge.message, charge.formula) == (3, "train", "dp_sgd/add_remove")
    assert trainings_of(charge.inputs) == trainings
    rate = charge.inputs["tail"]
    assert rate == tail_rate([out.limit, out.ledger.limit])
    costs = [equivalent_mu(training, rate) for training in trainings]
    assert charge.mu == max(costs) and mu * (1 - 3e-3) <= min(costs) <= max(costs) <= mu
    assert charge.sigma == NOISE and charge.coordinates == 1000 * 50
    assert charge.slack == slack_of(NOISE, 1000 * 50) > 0
    assert out.anchor == out.ledger.anchor() == (1, row.hash)


def test_trainings_and_releases_share_one_budget():
    out = releases()
    pay(out, 0.6)
    out.release(QUERY, X, 0.4, **PLACE)
    spent = out.ledger.totals("a")
    assert 0.99 * out.limit.mu**2 < spent.squared_mu <= out.limit.mu**2 * (1 + 1e-9)
    before = out.ledger.anchor()
    with pytest.raises(BudgetExceeded, match=r"spent .* asked .* limit"):
        pay(out, 0.1)
    assert out.ledger.anchor() == before


def test_tails_of_all_trainings_fit_into_half_of_what_either_limit_sets_aside():
    out = releases(ledger=ledger_of(epsilon=3.0, delta=1e-7))
    for _ in range(4):
        pay(out, 0.25, SAMPLINGS[:1])
    tails = sum(row.charge.inputs["tail"] * row.charge.mu**2 for row in out.ledger.rows())
    assert tails <= TAIL_SHARE * 1e-7 * 1.000001


def test_tails_are_smaller_where_a_person_has_several_records():
    spec = PrivacySpec(**SPEC.to_dict() | {"records_per_person": 3})
    out, alone = releases(spec), releases()
    pay(out)
    pay(alone)
    charges = [each.ledger.rows()[0].charge for each in (out, alone)]
    assert [charge.inputs["records"] for charge in charges] == [3, 1]
    assert charges[0].inputs["tail"] < charges[1].inputs["tail"] / 3
    assert charges[0].inputs["noise 0"] > charges[1].inputs["noise 0"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"samplings": []}, ParameterError, "0 clusters are trained on"),
        ({"samplings": SAMPLINGS * 7}, ParameterError, "21 clusters are trained on"),
        ({"share": 0.0}, ParameterError, "share=0"),
        ({"share": 1.5}, ParameterError, "share=1.5"),
        ({"clip": 0.0}, ParameterError, "clip=0"),
        ({"numbers": 0}, ParameterError, "numbers=0"),
    ],
)
def test_training_that_makes_no_sense_is_not_charged(given, error, message):
    out = releases()
    with pytest.raises(error, match=message):
        pay(out, **given)
    assert out.ledger.rows() == []


def test_training_is_not_for_other_units_or_neighbours():
    spec = PrivacySpec(**SPEC.to_dict() | {"adjacency": "replace_one"})
    out = releases(spec, ledger_of(adjacency="replace_one"))
    with pytest.raises(ProtocolError, match="single records that are added or removed"):
        pay(out)
    assert out.ledger.rows() == []


def test_what_is_charged_for_training_does_not_depend_on_who_pays_first():
    first, second = releases(client="a"), releases(client="b")
    assert pay(first) == pay(second)
    charges = [each.ledger.rows()[0].charge for each in (first, second)]
    assert charges[0].inputs == charges[1].inputs and charges[0].mu == charges[1].mu
