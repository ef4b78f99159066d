"""Reports of ledgers with noisy training: what it costs, worked out anew and by others."""

import json
from dataclasses import replace
from functools import cache
from importlib import resources

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from secure_fedclust import Ledger
from secure_fedclust.audit.report import crosscheck, trainings
from secure_fedclust.audit.report.content import report_of
from secure_fedclust.audit.report.crosscheck import AccountingError, cross_check
from secure_fedclust.audit.report.formulas import described, states_enough
from secure_fedclust.audit.report.page import render
from secure_fedclust.audit.report.trainings import Paid
from secure_fedclust.privacy.accounting import compose, epsilon_of
from secure_fedclust.privacy.charges import Charge
from secure_fedclust.privacy.queries import CellSums
from secure_fedclust.privacy.release import Releases
from secure_fedclust.privacy.subsampled import Sampling, Training, equivalent_mu, tail_rate
from secure_fedclust.result import Exchange

from .report_world import SITES, fitted, spec

SCHEMA = json.loads(
    resources.files("secure_fedclust.audit.report").joinpath("schema.json").read_text()
)
X = np.random.default_rng(0).uniform(-1, 1, (30, 2))
QUERY = CellSums(np.array([[0.5, 0.5], [-0.5, -0.5]]), 1.0, 0.7)
SAMPLINGS = [Sampling(0.1, 40), Sampling(0.25, 20)]


def charged(ledger, privacy, changed=None):
    """All sites have released sums, and paid for two trainings; some rows may be changed."""
    for site in SITES:
        out = Releases(site, privacy, ledger, "fast")
        out.release(QUERY, X, 0.3, run="r", step=0, message="cells")
        for step, share in ((1, 0.4), (2, 0.2)):
            if changed is None:
                pay(out, step, share)
            else:
                other = Ledger.create(None, epsilon=4.0, delta=1e-5)
                pay(Releases(site, privacy, other, "fast"), step, share)
                given = vars(other.rows()[0].charge)
                ledger.charge(Charge(**given | changed(given)))


def pay(out, step, share):
    out.pay_for_training(
        SAMPLINGS, share, clip=0.5, numbers=700, run="r", step=step, message="train"
    )


def result_of(ledger, privacy):
    """A result to which the ledger belongs: three noisy answers of every client."""
    base = fitted("FKM").result_
    rows = ledger.rows()
    totals = {row.charge.client: row.run_totals for row in rows}
    last = {row.charge.client: (row.number, row.hash) for row in rows}
    up = dict.fromkeys(SITES, 100)
    history = tuple(
        Exchange(stage, SITES, (), {}, up, up, 0.0, form="noisy")
        for stage in ("cells", "train", "train")
    )
    return replace(
        base,
        privacy=privacy.to_dict(),
        sampler="secure",
        history=history,
        anchors=last,
        spent={site: epsilon_of(1e-5, total.mu) for site, total in totals.items()},
    )


@cache
def ledger_with_training():
    ledger = Ledger.create(None, epsilon=4.0, delta=1e-5)
    charged(ledger, spec())
    return ledger


def report(ledger=None, privacy=None, **given):
    ledger = ledger or ledger_with_training()
    privacy = privacy or spec()
    result = replace(result_of(ledger, privacy), **given)
    content = report_of(result, ledger=ledger)
    Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(content, allow_nan=False)))
    return content


def line(content, name):
    [found] = [each for each in content["assumptions"] if each["name"] == name]
    return found


def test_training_has_a_report_that_says_what_it_rests_on():
    content = report()
    assert content["verdict"] == "DP CLAIM"
    assert line(content, "clipping")["status"] == "enforced"
    assert "all 15 rows" in line(content, "clipping")["why"]
    assert line(content, "grid")["status"] == "enforced"
    assert line(content, "tails")["status"] == "enforced"
    assert "10 rows" in line(content, "tails")["why"]
    assert "every record is drawn by itself" in line(content, "sampling")["statement"]
    assert line(content, "batches")["status"] == "assumed"
    assert "in training from AES-256" in line(content, "randomness")["why"]
    page = render(content)
    assert "dp_sgd/add_remove (40 steps at rate 0.1 with noise" in page
    assert "; or 20 steps at rate 0.25 with noise" in page
    assert "gradients clipped to 0.5" in page
    assert "by three accountants" in page and "Opacus, RDP" in page


def test_without_training_nothing_is_said_of_it():
    model = fitted("FKM")
    content = report_of(model.result_, ledger=model.ledger_)
    assert "only some records or clients took part" in line(content, "sampling")["statement"]
    assert not any(each["name"] in ("tails", "batches", "parts") for each in content["assumptions"])
    page = render(content)
    assert "Opacus" not in page.split('id="accountants"')[1].split("<section")[0]
    assert all(set(c) == {"exact", "pld", "releases"} for c in clients_of(content))


def clients_of(content):
    return list(content["accountants"]["clients"].values())


def test_three_accountants_agree_about_releases_and_training_together():
    found = report()["accountants"]
    assert found["checked"] and "PRV" in found["words"]
    for client in found["clients"].values():
        assert client["releases"] == 3 and client["trainings"] == 2
        assert 0.8 * client["exact"] < client["pld"] <= client["exact"] < client["rdp"]


def test_the_other_accountant_composes_what_was_done_and_not_what_was_charged():
    rows = [row for row in ledger_with_training().rows("Aachen") if trainings.is_training(row)]
    paid = [trainings.paid(row) for row in rows]
    mu = compose(each.mu for each in paid)
    # Were the trainings the Gaussian releases that they are charged as, they would cost more.
    alone = trainings.pld_epsilon((), paid, 1e-5)
    assert alone < epsilon_of(1e-5, mu)
    assert alone > max(trainings._alone(part, 1e-5) for each in paid for part in each.parts)
    with_release = trainings.pld_epsilon((0.5,), paid, 1e-5)
    assert alone < with_release <= epsilon_of(1e-5, compose([0.5, mu])) + 1e-4
    # Of records that are there in every step the cost is that of Gaussian releases.
    full = [Paid(1.0, 0.0, (Training(Sampling(1.0, 25), 5.0),))]
    assert trainings.pld_epsilon((), full, 1e-5) == pytest.approx(epsilon_of(1e-5, 1.0), abs=1e-4)


def cheaper(given):
    return {name: given[name] * 0.8 for name in ("sensitivity", "mu")}


@pytest.mark.parametrize(
    "changed",
    [
        cheaper,
        lambda given: {"inputs": given["inputs"] | {"noise 1": given["inputs"]["noise 1"] * 0.7}},
        lambda given: {"inputs": given["inputs"] | {"rate 0": 0.2}},
        lambda given: {"inputs": given["inputs"] | {"steps 0": 80.0}},
        lambda given: {"inputs": {"clip": 0.5, "tail": given["inputs"]["tail"]}},
        lambda given: {name: given[name] / 2 for name in ("sensitivity", "sigma")},
        lambda given: {"formula": "dp_sgd/replace_one"},
    ],
)
def test_a_row_that_was_charged_too_little_is_found_from_its_inputs(changed):
    ledger = Ledger.create(None, epsilon=4.0, delta=1e-5)
    charged(ledger, spec(), changed)
    rows = ledger.rows("Aachen")
    assert [states_enough(row, "add_remove") for row in rows] == [True, False, False]
    assert "dp_sgd/" in described(rows[1].charge.formula, rows[1].charge.inputs)


def test_the_report_makes_no_claim_of_a_row_that_was_charged_too_little(monkeypatch):
    monkeypatch.setattr(crosscheck.noisy, "refuted", lambda training, delta: None)
    ledger = Ledger.create(None, epsilon=4.0, delta=1e-5)

    def a_little(given):
        return {name: given[name] * 0.99 for name in ("sensitivity", "mu")}

    charged(ledger, spec(), a_little)
    content = report(ledger)
    assert content["verdict"] == "NO DP CLAIM"
    assert [reason["name"] for reason in content["reasons"]] == ["clipping"]


def test_opacus_finds_such_rows_by_another_way():
    good = Training(Sampling(0.1, 100), 2.0)
    rate = tail_rate([ledger_with_training().limit])
    mu = equivalent_mu(good, rate)
    assert trainings.refuted(Paid(mu, rate * mu**2, (good,)), 1e-5) is None
    low = Paid(0.85 * mu, rate * (0.85 * mu) ** 2, (good,))
    assert "100 steps at rate 0.1 with noise 2 cost" in (trainings.refuted(low, 1e-5) or "")
    with pytest.raises(AccountingError, match=r"PRV accountant.*no report is made"):
        cross_check({}, 1e-5, 4.0, {"a": [low]})


def test_a_cost_that_the_pld_finds_too_small_is_in_dispute(monkeypatch):
    monkeypatch.setattr(crosscheck.noisy, "refuted", lambda training, delta: None)
    good = Training(Sampling(0.1, 100), 2.0)
    with pytest.raises(AccountingError, match="which is more: no report"):
        cross_check({"a": [0.1]}, 1e-5, 4.0, {"a": [Paid(0.5, 1e-10, (good,))]})


def test_an_rdp_that_is_below_the_pld_is_in_dispute(monkeypatch):
    monkeypatch.setattr(crosscheck.noisy, "rdp_epsilon", lambda *given: 0.5)
    good = Training(Sampling(0.1, 100), 2.0)
    with pytest.raises(AccountingError, match=r"RDP accountant gives epsilon 0\.5"):
        cross_check({}, 1e-5, 4.0, {"a": [Paid(0.65, 1e-10, (good,))]})


def test_without_opacus_the_rest_is_checked(monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(trainings, "find_spec", lambda name: None if name == "opacus" else found)
    good = Training(Sampling(0.1, 100), 2.0)
    checked = cross_check({}, 1e-5, 4.0, {"a": [Paid(0.65, 1e-10, (good,))]})
    assert checked["clients"]["a"]["rdp"] is None and checked["checked"]


def test_without_dp_accounting_the_cost_of_training_is_taken_on_trust(monkeypatch):
    from importlib import metadata

    monkeypatch.setattr(trainings, "can_be_checked", lambda: False)

    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(crosscheck.metadata, "version", version)
    ledger = ledger_with_training()
    content = report_of(result_of(ledger, spec()), ledger=ledger, versions={"python": "3"})
    assert line(content, "clipping")["status"] == "assumed"
    assert "install the extra deep" in line(content, "clipping")["why"]
    assert not content["accountants"]["checked"]


@pytest.mark.parametrize("factor", [1.5, 0.0, -1.0])
def test_a_tail_that_has_no_room_is_a_violation(factor):
    ledger = Ledger.create(None, epsilon=4.0, delta=1e-5)

    def larger(given):
        inputs = given["inputs"]
        return {"inputs": inputs | {"tail": inputs["tail"] * factor}}

    charged(ledger, spec(), larger if factor > 0 else None)
    rows = ledger.rows("Aachen")
    limit = ledger.limit
    if factor > 0:
        assert not trainings.fits_into_delta(rows[1], [limit], 1)
        content = report(ledger)
        assert content["verdict"] == "NO DP CLAIM"
        assert line(content, "tails")["status"] == "violated"
        assert "row 2 of the ledger" in line(content, "tails")["why"]
    else:
        inputs = dict(rows[1].charge.inputs) | {"tail": factor}
        row = replace(rows[1], charge=replace(rows[1].charge, inputs=inputs))
        assert not trainings.fits_into_delta(row, [limit], 1)


def test_tails_chosen_for_one_record_do_not_do_for_persons_with_several():
    rows = ledger_with_training().rows("Aachen")
    limit = ledger_with_training().limit
    assert trainings.fits_into_delta(rows[1], [limit], 1)
    assert not trainings.fits_into_delta(rows[1], [limit], 2)
    persons = spec(epsilon=1, records_per_person=2)
    ledger = Ledger.create(None, epsilon=1.0, delta=1e-5)
    charged(ledger, persons)
    assert all(
        trainings.fits_into_delta(row, [ledger.limit], 2) for row in ledger.rows("Aachen")[1:]
    )


def test_a_training_that_was_not_charged_is_missed():
    ledger = ledger_with_training()
    result = result_of(ledger, spec())
    more = replace(result.history[0], stage="train")
    content = report(history=(*result.history, more))
    assert line(content, "charged")["status"] == "violated"
