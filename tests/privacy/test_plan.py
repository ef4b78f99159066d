"""What a plan says is what a run then does."""

import json
import math
import warnings

import numpy as np
import pytest

from secure_fedclust import (
    FKM,
    GOLD,
    FeCA,
    FederationWarning,
    FedGEM,
    KFed,
    ParameterError,
    PrivacySpec,
    PrivacyWarning,
)
from secure_fedclust.privacy.plan import MANY

MODELS = {
    "FKM": FKM(5),
    "FKM, rounds given": FKM(5, n_rounds=3),
    "FKM one_shot": FKM(5, one_shot=True),
    "FKM public": FKM(5, seeding="public"),
    "KFed": KFed(9),
    "FeCA": FeCA(4, n_init=2),
    "GOLD": GOLD(4),
    "GOLD, number unknown": GOLD(),
    "FedGEM synopsis": FedGEM(4, n_local_steps=2),
    "FedGEM sums": FedGEM(4, calibration="sums", n_rounds=2, n_local_steps=2),
    "FedGEM sums, public": FedGEM(4, calibration="sums", seeding="public"),
    "FedGEM floor": FedGEM(4, calibration="floor", n_rounds=2),
    "FedGEM theorem9": FedGEM(4, calibration="theorem9", n_local_steps=2),
}
N_CLIENTS = 3
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
each_width = pytest.mark.parametrize("d", [2, 5])


def spec_of(d, **changed):
    return PrivacySpec(**{"epsilon": 1.0, "delta": 1e-6, "ranges": [(-4, 4)] * d} | changed)


def fitted(model, spec, d):
    rng = np.random.default_rng(0)
    clients = [rng.normal(size=(50, d)) for _ in range(N_CLIENTS)]
    model.set_params(privacy=spec, sampler="fast", random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.simplefilter("ignore", FederationWarning)
        return model.fit(clients)


def planned(plan):
    """Mu and number of values of each release, in order."""
    return [
        (plan.limit.mu * math.sqrt(release.share / release.times), release.coordinates)
        for release in plan.releases
        for _ in range(release.times)
    ]


def charged(model, client):
    return [(row.charge.mu, row.charge.coordinates) for row in model.ledger_.rows(client)]


@each_width
@each_model
@pytest.mark.parametrize("size", [300, 20_000])
@pytest.mark.parametrize("protection", ["none", "masking"])
def test_a_run_charges_exactly_what_was_planned(model, d, size, protection):
    spec = spec_of(d, public_size=size, protection=protection)
    plan = spec.plan(model, n_clients=N_CLIENTS, n_features=d)
    assert math.fsum(release.share for release in plan.releases) == pytest.approx(1, abs=1e-12)
    fitted(model, spec, d)
    for client in model.client_names_:
        rows = charged(model, client)
        expected = [n for _, n in planned(plan)]
        n_refined = sum(r.message.startswith("refinement") for r in plan.releases)
        if n_refined:
            # How many clusters there are to refine is found by the run.
            expected[-n_refined:] = [n for _, n in rows[-n_refined:]]
        assert [n for _, n in rows] == expected
        np.testing.assert_allclose([mu for mu, _ in rows], [mu for mu, _ in planned(plan)])
    # The rows of a plan say the same in words.
    for row, release in zip(plan.rows(), plan.releases, strict=True):
        assert row["mu each"] * row["noise / sensitivity"] == pytest.approx(1)
        assert row["values each"] == release.coordinates
    assert plan.draws == sum(n for _, n in planned(plan))


@each_width
@pytest.mark.parametrize("name", ["FKM", "FKM one_shot", "KFed", "GOLD", "FedGEM synopsis"])
def test_a_run_without_a_public_size_charges_what_was_planned(name, d):
    model, spec = MODELS[name], spec_of(d)
    plan = spec.plan(model, n_clients=N_CLIENTS, n_features=d)
    assert plan.feasibility is None and "unknown" in str(plan)
    rows = charged(fitted(model, spec, d), "client 0")
    assert [n for _, n in rows] == [n for _, n in planned(plan)]


@each_width
def test_saying_how_many_records_there_are_does_not_change_what_is_planned(d):
    """The run does not hear of that number: only the spec's public size reaches it."""
    for name in ("FKM", "FKM one_shot", "KFed", "GOLD", "FedGEM synopsis"):
        model, spec = MODELS[name], spec_of(d)
        plan = spec.plan(model, n_clients=N_CLIENTS, n_features=d, n_records=20_000)
        rows = charged(fitted(model, spec, d), "client 0")
        assert [n for _, n in rows] == [n for _, n in planned(plan)], name


MASKED = [{}, {"protection": "masking"}, {"protection": "masking", "active_server": True}]


@each_width
@pytest.mark.parametrize("protected", MASKED, ids=["local", "masking", "active server"])
def test_bytes_and_exchanges_are_planned_within_a_fifth(d, protected):
    wrong = []
    for name, model in MODELS.items():
        spec = spec_of(d, public_size=20_000, **protected)
        plan = spec.plan(model, n_clients=N_CLIENTS, n_features=d)
        history = fitted(model, spec, d).result_.history
        sent = sum(exchange.bytes_up for exchange in history) / N_CLIENTS
        if not 0.8 < 1000 * plan.kilobytes_up / sent < 1.25:
            wrong.append(f"{name}: {1000 * plan.kilobytes_up:.0f} bytes planned, {sent:.0f} sent")
        if plan.exchanges != len(history):
            wrong.append(f"{name}: asked {plan.exchanges} times in the plan, {len(history)} really")
    assert not wrong, "\n".join(wrong)


def test_every_client_may_have_its_own_number_of_clusters():
    spec = spec_of(5)
    model = FedGEM([2, 3, 4])
    plan = spec.plan(model, n_clients=3, n_features=5)
    fitted(model, spec, 5)
    most = max(sum(n for _, n in charged(model, client)) for client in model.client_names_)
    assert plan.draws == most


def test_clients_may_be_named_in_a_plan_too():
    model = FedGEM({"oslo": 2, "bergen": 3})
    plan = spec_of(2).plan(model, n_clients=2, n_features=2)
    assert plan.draws > 0


FEASIBLE = [FKM(5), FKM(5, one_shot=True), KFed(9), FeCA(4), GOLD(4), FedGEM(4)]


@each_width
@pytest.mark.parametrize("model", FEASIBLE, ids=lambda m: repr(m)[:24])
@pytest.mark.parametrize("n_records", [3, 40, 700])
def test_with_the_records_advised_the_verdict_is_good(model, d, n_records):
    spec = spec_of(d, epsilon=0.5)
    given = {"n_clients": N_CLIENTS, "n_features": d}
    found = spec.plan(model, **given, n_records=n_records).feasibility
    assert found.verdict in ("poor", "partial") or n_records == 700
    assert spec.plan(model, **given, n_records=found.records).feasibility.verdict == "good"
    one_less = spec.plan(model, **given, n_records=max(1, found.records - 1)).feasibility
    assert one_less.verdict != "good" or found.records == 1


@each_width
def test_with_the_epsilon_advised_the_verdict_is_good(d):
    for model in FEASIBLE:
        given = {"n_clients": N_CLIENTS, "n_features": d, "n_records": 700}
        found = spec_of(d, epsilon=0.05).plan(model, **given).feasibility
        assert found.verdict != "good"
        better = spec_of(d, epsilon=found.epsilon).plan(model, **given).feasibility
        assert better.verdict == "good", repr(model)


def test_what_the_advice_says_in_words_would_do_as_well():
    for n_records in range(150, 250, 10):
        given = {"n_clients": N_CLIENTS, "n_features": 2, "n_records": n_records}
        text = str(spec_of(2, epsilon=0.05).plan(FKM(5), **given).feasibility)
        _, _, advised = text.partition("or epsilon ")
        epsilon = float(advised.split(",")[0])
        better = spec_of(2, epsilon=epsilon).plan(FKM(5), **given).feasibility
        assert better.verdict == "good", f"{text}: {better}"


def test_an_epsilon_that_no_spec_accepts_is_not_advised():
    given = {"n_clients": 1, "n_features": 50, "n_records": 1}
    found = spec_of(50).plan(FKM(5), **given).feasibility
    assert "epsilon" not in str(found) or found.epsilon <= 100


def test_a_plan_can_be_read_and_stored():
    plan = spec_of(2, public_size=20_000).plan(FKM(5), n_clients=10, n_features=2)
    text = str(plan)
    assert text.startswith("(epsilon=1, delta=1e-06)-differential privacy")
    assert "10 clients" in text and "feasibility: signal" in text
    assert json.loads(json.dumps(plan.to_dict())) == plan.to_dict()


@pytest.mark.parametrize(
    ("model", "spec", "given", "message"),
    [
        (FKM(5), {}, {"n_clients": 0}, "n_clients=0"),
        (FKM(5), {}, {"n_features": 3}, "ranges: 2 given, the records have 3"),
        (FKM(5), {}, {"n_records": 0.5}, "n_records=0.5"),
        (FKM(0), {}, {}, "n_clusters=0"),
        (FKM(5, align="kmeans"), {}, {}, "align='kmeans' leaves out"),
        (FedGEM(4, calibration="floor"), {}, {}, "needs public_size"),
        (FedGEM(4, calibration="sums", seeding="local"), {}, {}, "seeding='local'"),
        (FedGEM([1, 2]), {}, {}, "2 numbers for 3 clients"),
    ],
)
def test_what_could_not_run_cannot_be_planned(model, spec, given, message):
    given = {"n_clients": N_CLIENTS, "n_features": 2} | given
    with pytest.raises(ParameterError, match=message):
        spec_of(2, **spec).plan(model, **given)


def test_what_fit_refuses_cannot_be_planned_either():
    spec = spec_of(2, unit="client")
    with pytest.raises(ParameterError, match="not available"):
        FKM(5, privacy=spec).fit([np.zeros((5, 2))])
    with pytest.raises(ParameterError, match="not available"):
        spec.plan(FKM(5), n_clients=3, n_features=2)


def test_without_a_guarantee_there_is_nothing_to_plan():
    with pytest.raises(ParameterError, match="no epsilon to work with"):
        PrivacySpec.none(reason="test").plan(FKM(5), n_clients=3, n_features=2)


@pytest.mark.parametrize(("n", "active", "said"), [(99, False, 0), (100, False, 1), (100, True, 0)])
def test_what_a_guarantee_assumes_where_not_all_share_keys_with_all_is_in_the_plan(n, active, said):
    spec = spec_of(2, protection="masking", active_server=active)
    assert spec.plan(FKM(5), n_clients=n, n_features=2).guarantee.count(MANY) == said
