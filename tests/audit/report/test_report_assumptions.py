from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from secure_fedclust import FKM, FedGEM, PrivacySpec
from secure_fedclust.audit.report.assumptions import assumptions
from secure_fedclust.audit.report.content import report_of
from secure_fedclust.audit.report.facts import gather
from secure_fedclust.audit.report.remarks import unnoised
from secure_fedclust.privacy.plan import MANY

from .report_world import SYSTEMS, audit_of, finding, fit, fitted, new_ledger, spec


def facts_of(model, **given):
    return gather(model.result_, given.get("ledger", model.ledger_), given.get("audit"))


def lines(facts):
    return {line.name: line for line in assumptions(facts)}


def status(facts):
    return {name: line.status for name, line in lines(facts).items()}


def changed(facts, **given):
    """The same facts about another result."""
    return replace(facts, result=replace(facts.result, **given))


def with_rows(facts, rows):
    return replace(facts, ledger=replace(facts.ledger, rows=rows))


@cache
def stepped():
    """FedGEM with three steps in each of two rounds."""
    return fit(FedGEM(2, calibration="floor", n_local_steps=3, n_rounds=2), spec())


def test_a_run_with_local_noise_assumes_what_no_program_can_know():
    found = status(facts_of(fitted("FKM")))
    assert found == {
        "bound": "assumed",
        "clipping": "enforced",
        "sizes": "assumed",
        "persons": "assumed",
        "one client": "assumed",
        "correlated": "assumed",
        "start": "enforced",
        "questions": "enforced",
        "tuning": "assumed",
        "sampling": "enforced",
        "randomness": "enforced",
        "grid": "enforced",
        "charged": "enforced",
        "ledger holds": "enforced",
        "only ledger": "assumed",
        "other releases": "assumed",
        "computers": "assumed",
        "code": "assumed",
    }


def test_masks_enforce_the_quorum_and_assume_honest_clients():
    found = status(facts_of(fitted("FKM", "masking")))
    assert found["survivors"] == "enforced"
    assert found["honest"] == found["noise in sums"] == found["server"] == "assumed"
    active = fit(FKM(2), spec(protection="masking", active_server=True))
    assert status(facts_of(active))["server"] == "enforced"


def test_many_clients_take_the_servers_word_for_the_quorum_and_for_who_shares_keys_with_whom():
    rng = np.random.default_rng(0)
    clients = {f"site {i}": rng.uniform(0, 9, (3, 2)) for i in range(100)}
    model = FKM(2, seeding="public", n_rounds=1)
    facts = facts_of(fit(model, spec(protection="masking"), clients=clients))
    assert MANY in facts.result.guarantee and MANY.endswith("probability of 2^-40 each")
    found = lines(facts)
    assert found["survivors"].status == "assumed" and "server's word" in found["survivors"].why
    assert found["neighbours"].status == "assumed" and "2^-40" in found["neighbours"].why
    signed = replace(facts, spec=replace(facts.spec, active_server=True))
    for others in (signed, facts_of(fitted("FKM", "masking"))):
        assert "neighbours" not in status(others) and status(others)["survivors"] == "enforced"


def test_a_run_between_organisations_says_whether_connections_were_encrypted():
    facts = facts_of(fitted("FKM"))
    assert "connections" not in status(facts)
    given = {"run": "ab", "encrypted": True, "refused": {"site 9": "policy"}}
    there = changed(facts, federation=given)
    assert status(there)["connections"] == "enforced"
    open_ = changed(facts, federation=given | {"encrypted": False})
    assert status(open_)["connections"] == "assumed"
    assert "--insecure" in lines(open_)["connections"].why
    (part,) = [each for each in unnoised(there, str, False) if each["name"] == "part"]
    assert "and 1 more that did not take part (policy)" in part["words"]


def test_encryption_takes_the_servers_word_for_the_quorum():
    found = lines(facts_of(fitted("FKM", "ckks")))
    assert found["survivors"].status == "assumed" and "server's word" in found["survivors"].why
    assert found["key holder"].status == "assumed"
    assert "argued, not proved" in found["key holder"].why
    assert found["server"].status == "assumed"


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_sensitivities_of_every_system_can_be_worked_out_anew(name, adjacency):
    model = fit(SYSTEMS[name](), spec(adjacency=adjacency))
    found = lines(facts_of(model))
    assert found["clipping"].status == "enforced" and "worked out anew" in found["clipping"].why
    public = "public" in found["sizes"].statement
    assert public == (adjacency == "replace_one")


def test_a_run_without_a_declared_size_uses_none():
    assert status(facts_of(fit(FKM(2), spec(public_size=None))))["sizes"] == "enforced"


def test_no_privacy_is_a_violation_with_its_reason():
    found = lines(facts_of(fit(FKM(2), PrivacySpec.none(reason="public data"))))
    assert found["noise"].status == "violated" and "public data" in found["noise"].why


def test_noise_that_can_be_predicted_is_a_violation():
    model = fit(FKM(2, sampler="fast"), spec())
    found = status(facts_of(model))
    assert found["randomness"] == found["declared"] == "violated"
    lying = changed(facts_of(fitted("FKM")), sampler=None)
    assert status(lying)["randomness"] == "violated"


def test_records_as_seeds_are_a_violation():
    model = fit(
        FedGEM(2, calibration="sums", seeding="local", allow_unproved=True),
        spec(),
    )
    found = lines(facts_of(model))
    assert found["start"].status == found["questions"].status == "violated"
    assert found["declared"].status == "violated"
    assert "fedgem/local_seed" in found["questions"].why


def test_means_without_a_floor_are_a_violation():
    given = {"calibration": "theorem9", "n_rounds": 1}
    model = fit(FedGEM(2, enforce_floor=False, allow_unproved=True, **given), spec())
    found = status(facts_of(model))
    assert found["floor"] == found["declared"] == "violated"
    held = fit(FedGEM(2, **given), spec())
    assert status(facts_of(held))["floor"] == "enforced"
    assert "floor" not in status(facts_of(fitted("FedGEM")))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (FKM(2, seeding="public"), "even spread"),
        (FKM(2, one_shot=True), "noisy summaries"),
        (FKM(2), "noisy release"),
        (FedGEM(2), "noisy summary"),
    ],
)
def test_where_a_run_starts_is_read_from_its_parameters(model, why):
    line = lines(facts_of(fit(model, spec())))["start"]
    assert line.status == "enforced" and why in line.why


def test_of_a_system_that_it_does_not_know_the_report_takes_the_start_on_trust():
    facts = changed(facts_of(fitted("GOLD")), algorithm="NEWS")
    assert lines(facts)["start"].status == "assumed"


def test_every_local_step_must_have_been_charged():
    facts = facts_of(stepped())
    line = lines(facts)["steps"]
    assert line.status == "enforced" and "each of 3 steps" in line.why
    fewer = [row for row in facts.ledger.rows if row.number != facts.ledger.rows[-1].number]
    assert status(with_rows(facts, fewer))["steps"] == "violated"
    assert status(facts_of(fitted("FedGEM")))["steps"] == "enforced"


def test_an_answer_without_a_row_is_a_violation():
    for protection in ("none", "masking", "ckks"):
        facts = facts_of(fitted("FKM", protection))
        assert status(facts)["charged"] == "enforced"
        assert status(with_rows(facts, facts.ledger.rows[:-1]))["charged"] == "violated"


def test_a_row_with_coarse_noise_is_a_violation():
    facts = facts_of(fitted("FKM"))
    first, *rest = facts.ledger.rows
    charge = first.charge
    coarse = replace(charge, sigma=4000.0, mu=charge.sensitivity / 4000)
    found = lines(with_rows(facts, [replace(first, charge=coarse), *rest]))
    assert found["grid"].status == "violated" and "row 1" in found["grid"].why


@pytest.mark.parametrize("change", ["value", "name", "relation", "inputs"])
def test_a_row_that_states_too_small_a_sensitivity_is_a_violation(change):
    facts = facts_of(fitted("FKM"))
    first, *rest = facts.ledger.rows
    charge = first.charge
    other = {
        "value": {"sensitivity": charge.sensitivity / 2, "mu": charge.mu / 2},
        "name": {"formula": "guess/add_remove"},
        "relation": {"formula": charge.formula.replace("add_remove", "replace_one")},
        "inputs": {"inputs": {}},
    }[change]
    found = lines(with_rows(facts, [replace(first, charge=replace(charge, **other)), *rest]))
    assert found["clipping"].status == "violated"


def test_a_sum_over_too_few_clients_is_a_violation():
    for protection in ("masking", "ckks"):
        facts = facts_of(fitted("FKM", protection))
        first, *rest = facts.result.sums
        few = changed(facts, sums=(replace(first, survivors=first.survivors[:2]), *rest))
        assert status(few)["survivors"] == "violated"


def test_a_sum_without_noise_is_a_violation():
    facts = facts_of(fitted("FKM", "masking"))
    first, *rest = facts.result.sums
    exact = changed(facts, sums=(replace(first, noisy=False), *rest))
    assert status(exact)["noise in sums"] == "violated"


def test_code_is_assumed_until_an_attack_succeeds():
    model = fitted("FKM")

    def found(verdict):
        line = lines(facts_of(model, audit=audit_of(model, finding(verdict=verdict))))["code"]
        return line.status, line.why

    assert found("PASS") == ("assumed", "attacked without success")
    assert found("INCONCLUSIVE")[0] == "assumed"
    assert found("FAIL")[0] == "violated" and "distinguishing game" in found("FAIL")[1]


def test_a_ledger_that_is_not_here_leaves_its_lines_on_trust():
    facts = facts_of(fitted("FKM"), ledger=None)
    found = lines(facts)
    assert facts.kept == "in memory"
    for name in ("clipping", "grid", "charged"):
        assert found[name].status == "assumed" and "not here" in found[name].why
    assert "two runs cost both" in found["only ledger"].why


def test_a_ledger_in_a_file_is_verified_and_still_assumed_to_be_the_only_one(tmp_path):
    model = fit(FKM(2), spec(), new_ledger(tmp_path / "l.sqlite"))
    found = lines(facts_of(model))
    assert found["ledger holds"].status == "enforced" and "5 anchors" in found["ledger holds"].why
    assert found["only ledger"].status == "assumed"


@pytest.mark.parametrize(
    "change", [{"sampler": "fast"}, {"sums": "few"}, {"history": "plain"}], ids=str
)
def test_any_violation_replaces_the_claim_of_a_run_that_made_one(change):
    model = fitted("FKM", "masking")
    result = model.result_
    if "sums" in change:
        few = replace(result.sums[0], survivors=result.sums[0].survivors[:1])
        change = {"sums": (few, *result.sums[1:])}
    if "history" in change:
        change = {"history": (replace(result.history[0], form="plain"), *result.history[1:])}
    content = report_of(replace(result, **change), ledger=model.ledger_)
    assert content["verdict"] == "NO DP CLAIM" and content["claim"].startswith("NO DP CLAIM: ")
    assert "differential privacy for each" not in content["claim"]
    assert len(content["reasons"]) == 1 and content["meaning"] is None
