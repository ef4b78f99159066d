"""Results that were edited, beside a ledger that was not."""

import copy
import json
from functools import cache

import pytest

from secure_fedclust import FKM, FedGEM, Ledger, ParameterError, PrivacySpec
from secure_fedclust.audit.report.content import report_of
from secure_fedclust.audit.report.page import render
from secure_fedclust.engines import Fault
from secure_fedclust.privacy.plan import ALSO_SEEN
from secure_fedclust.result import FedClustResult
from secure_fedclust.run import ALL_RUNS, NO_LEDGER, OWN_LEDGERS

from .report_world import SITES, SYSTEMS, fit, fitted, new_ledger, spec


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs on ledgers of their own: what their files would hold, and where the ledgers are."""
    folder = tmp_path_factory.mktemp("edited")

    @cache
    def run(name, protection):
        path = new_ledger(folder / f"{name} {protection}.sqlite")
        model = fit(SYSTEMS[name](), spec(protection=protection), path)
        model.ledger_.close()
        return model.result_.to_dict(), path

    return lambda name="FKM", protection="none": copy.deepcopy(run(name, protection))


def report(content, ledger=None, **given):
    return report_of(
        FedClustResult.from_dict(json.loads(json.dumps(content))), ledger=ledger, **given
    )


def refused(content, ledger, message):
    with pytest.raises(ParameterError, match=message):
        report(content, ledger)


def respec(content, **changes):
    """Edit the spec, and the guarantee along with it."""
    before = PrivacySpec.from_dict(content["privacy"]).describe()
    content["privacy"] |= changes
    after = PrivacySpec.from_dict(content["privacy"]).describe()
    content["guarantee"] = content["guarantee"].replace(before, after)


@pytest.mark.parametrize("protection", ["none", "masking", "ckks"])
@pytest.mark.parametrize("name", ["FKM", "FedGEM"])
def test_the_claim_that_is_put_together_anew_is_that_of_the_run(runs, name, protection):
    content, ledger = runs(name, protection)
    found = report(content, ledger)
    assert found["claim"] == content["guarantee"] and ALL_RUNS in found["claim"]
    assert found["fallback"] == content["fallback"]
    assert (ALSO_SEEN in found["claim"]) == (protection != "none" and name != "FKM")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (ALL_RUNS, f"; certified, and safe to publish{ALL_RUNS}"),
        ("on the ledger together", "on the ledger together, and all others"),
        ("(epsilon=8, delta", "(epsilon=0.01, delta"),
        (ALL_RUNS, "; for this run, and for all runs ever"),
    ],
)
def test_words_put_into_a_guarantee_are_refused(runs, old, new):
    content, ledger = runs()
    content["guarantee"] = content["guarantee"].replace(old, new)
    refused(content, ledger, "guarantee .*edited")


def test_words_put_behind_a_guarantee_are_refused(runs):
    content, ledger = runs()
    refused(content | {"guarantee": content["guarantee"] + ". Really"}, ledger, "guarantee ends")
    for ending in (NO_LEDGER, OWN_LEDGERS):
        content["guarantee"] = fitted("FKM").result_.guarantee.replace(NO_LEDGER, ending) + "!"
        refused(content, None, "guarantee is not what")


def test_a_reason_for_no_privacy_cannot_be_followed_by_a_claim():
    content = fit(FKM(2), PrivacySpec.none(reason="test")).result_.to_dict()
    content["guarantee"] += "; (epsilon=0.1, delta=1e-05)-differential privacy"
    refused(content, None, "guarantee is not what")


def test_what_a_run_without_a_claim_says_of_itself_is_not_quoted():
    content = fit(FKM(2, sampler="fast"), spec()).result_.to_dict()
    content["guarantee"] = "NO DP CLAIM needed: (epsilon=0.1)-differential privacy"
    found = report(content)
    assert found["claim"] == (
        "NO DP CLAIM: sampler='fast' is for experiments: its noise can be predicted"
    )
    assert "0.1" not in json.dumps(found["reasons"])


def test_a_guarantee_that_hides_what_else_was_seen_is_refused(runs):
    content, ledger = runs("FedGEM", "masking")
    content["guarantee"] = content["guarantee"].replace(ALSO_SEEN, "")
    refused(content, ledger, "guarantee is not what")


def test_later_runs_on_the_ledger_change_what_holds_for_all_of_them(tmp_path):
    path = new_ledger(tmp_path / "l.sqlite", epsilon=20)
    first = fit(FKM(2), spec(), path)
    weaker = "; all of them together only against the server and up to 1 client"
    assert report_of(first.result_, ledger=path)["claim"] == first.guarantee_
    fit(FKM(2), spec(protection="masking"), path)
    now = report_of(first.result_, ledger=path)["claim"]
    assert now.startswith(f"{first.guarantee_}; all of them together only against ")
    third = fit(FKM(2), spec(), path)
    assert now == third.guarantee_ and weaker[:40] in now
    content = third.result_.to_dict()
    content["guarantee"] = first.guarantee_
    refused(content, path, "guarantee ends")


def test_experiments_that_came_later_end_the_claim_for_all_runs():
    book = Ledger.create(None, epsilon=20, delta=1e-5)
    first = fit(FKM(2), spec(), book)
    fit(FKM(2, sampler="fast"), spec(), book)
    claim = report_of(first.result_, ledger=book)["claim"]
    assert claim.endswith("for this run alone: others on the ledger have no guarantee")


@pytest.mark.parametrize("words", ["nothing changes", None])
def test_a_fallback_that_does_not_follow_is_refused(runs, words):
    content, ledger = runs("FedGEM", "masking")
    refused(content | {"fallback": words}, ledger, "fallback is not what")
    content, ledger = runs()
    refused(content | {"fallback": "nothing changes"}, ledger, "fallback, which only")


def test_costs_that_are_not_those_of_the_rows_are_refused(runs):
    content, ledger = runs("FedGEM", "masking")
    costs = content["costs"]
    refused(content | {"costs": costs | {"local": 0.0}}, ledger, "costs are")
    refused(content | {"costs": {}}, ledger, "costs are")
    less = {"local": costs["local"] * 1.3, "sums": costs["sums"] / 4}
    with pytest.raises(ParameterError, match="fallback is not what"):
        report(content | {"costs": less}, ledger)
    from secure_fedclust.privacy.accounting import Limit
    from secure_fedclust.privacy.plan import fallback

    limit, privacy = Limit.of(4, 1e-5), PrivacySpec.from_dict(content["privacy"])
    shares = [(less[name] / limit.mu) ** 2 for name in ("local", "sums")]
    edited = content | {"costs": less, "fallback": fallback(privacy, limit, *shares)}
    refused(edited, ledger, "in 'sums', and the ledger")
    little = {name: cost / 9 for name, cost in costs.items()}
    refused(content | {"costs": little}, ledger, "more than the .* of its costs")


def test_a_masked_run_that_calls_itself_local_is_refused(runs):
    content, ledger = runs(protection="masking")
    for name in ("protection", "min_survivors"):
        content["privacy"].pop(name)
    privacy = PrivacySpec.from_dict(content["privacy"])
    end = f"{ALL_RUNS} (epsilon=8, delta=1e-05)"
    content |= {"guarantee": privacy.describe() + end, "fallback": None, "costs": {}}
    refused(content, ledger, r"form 'key'.*protection='none'")
    for exchange in content["history"]:
        exchange["form"] = "noisy"
    refused(content, ledger, "sums that were opened")
    content["sums"] = []
    refused(content, ledger, "row 1 of the ledger is of a release in a sum")


def test_a_local_run_that_calls_itself_masked_is_refused(runs):
    content, ledger = runs()
    content["history"][0]["form"] = "masked"
    refused(content, ledger, "form 'masked'")


def test_a_masked_run_that_calls_itself_encrypted_is_refused(runs):
    content, ledger = runs(protection="masking")
    respec(content, protection="ckks")
    refused(content, ledger, "protection='ckks'")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"colluders": 3}, "colluders"),
        ({"active_server": True}, "active_server"),
        ({"min_survivors": 5}, "min_survivors"),
    ],
)
def test_a_spec_that_withstands_more_than_was_charged_is_refused(runs, change, name):
    from secure_fedclust.privacy.accounting import Limit
    from secure_fedclust.privacy.plan import fallback

    content, ledger = runs(protection="masking")
    respec(content, **change)
    limit, privacy = Limit.of(4, 1e-5), PrivacySpec.from_dict(content["privacy"])
    content["fallback"] = fallback(privacy, limit, 0.0, (content["costs"]["sums"] / limit.mu) ** 2)
    refused(content, ledger, f"charged for {name}=")


def test_anchors_of_nothing_are_refused(runs):
    content, ledger = runs()
    respec(content, epsilon=0.1)
    with Ledger.open(ledger, read_only=True) as book:
        origin = book.rows()[0].previous
    content["anchors"] = {site: [0, origin] for site in SITES}
    content["spent"] = dict.fromkeys(SITES, 0.0)
    refused(content, ledger, "'Aachen' answered, and its anchor says that nothing was charged")
    refused(content | {"history": []}, ledger, "nothing was charged, and there was a run")
    del content["anchors"]["Como"]
    content["history"][0]["rejected"] = {site: "?" for site in SITES if site != "Como"}
    for exchange in content["history"][1:]:
        exchange["rejected"] = dict.fromkeys(SITES, "?")
    refused(content, ledger, "'Como' answered, and the result has no anchor")


def test_swapped_anchors_are_refused(runs):
    content, ledger = runs()
    anchors = content["anchors"]
    respec(content, epsilon=0.1)
    content["anchors"] = {s: anchors[t] for s, t in zip(SITES, SITES[1:] + SITES[:1], strict=True)}
    content["spent"] = dict.fromkeys(SITES, 0.0)
    refused(content, ledger, "the anchor of 'Aachen' is row .* which is of 'Bergen'")


def test_a_result_that_leaves_clients_out_of_what_was_spent_is_refused(runs):
    content, ledger = runs()
    refused(content | {"spent": {}}, ledger, "'Aachen' is among the ones")
    spent = content["spent"]
    less = {site: each for site, each in spent.items() if site != "Como"}
    refused(content | {"spent": less}, ledger, "'Como' is among the ones")
    refused(content | {"spent": spent | {"Zagreb": 0.0}}, ledger, "'Zagreb' is among the ones")
    for site in ("history", "anchors"):
        assert "Como" in json.dumps(content[site])
    for exchange in content["history"]:
        exchange["asked"] = [client for client in exchange["asked"] if client != "Como"]
        exchange["up"].pop("Como")
        exchange["down"].pop("Como")
    refused(content | {"spent": less}, ledger, "anchor of 'Como'")
    del content["anchors"]["Como"]
    refused(content | {"spent": less}, ledger, "rows of 'Como' in this run")


def test_a_run_turned_into_one_of_clients_ledgers_may_not_say_less(runs):
    content, ledger = runs()
    privacy = PrivacySpec.from_dict(content["privacy"])
    content["guarantee"] = privacy.describe() + OWN_LEDGERS
    assert report(content, ledger)["claim"].endswith(OWN_LEDGERS)
    content["spent"] = dict.fromkeys(SITES, 1e-3)
    refused(content, ledger, "spent epsilon 0.001 in this run, and the ledger")


@pytest.mark.parametrize(
    "change",
    [
        {"spent": dict.fromkeys(SITES, "0")},
        {"spent": dict.fromkeys(SITES, -1.0)},
        {"spent": list(SITES)},
        {"costs": {"local": None}},
        {"guarantee": 3},
        {"feature_names": "ab"},
        {"client_clusters": [1]},
    ],
    ids=str,
)
def test_values_of_other_types_are_refused(runs, change):
    content, ledger = runs()
    refused(content | change, ledger, f"the result's {next(iter(change))}")


@pytest.mark.parametrize("anchor", [[True, "0" * 64], [1, "x" * 64], [-1, "0" * 64], 7])
def test_anchors_that_are_none_are_refused(anchor):
    from dataclasses import replace

    model = fitted("FKM")
    edited = replace(model.result_, anchors=dict.fromkeys(SITES, anchor))
    with pytest.raises(ParameterError, match="the result's anchors have"):
        report_of(edited)


@pytest.mark.parametrize(
    "change", [{"form": "magic"}, {"up": {"Zagreb": 3}}, {"asked": [["x"]]}, {"rejected": [1]}]
)
def test_an_exchange_that_cannot_be_one_is_refused(runs, change):
    content, ledger = runs()
    content["history"][0] |= change
    refused(content, ledger, "history has something at 0")


def test_sums_that_were_dropped_are_noticed(runs):
    for protection in ("masking", "ckks"):
        content, ledger = runs(protection=protection)
        refused(content | {"sums": []}, ledger, "no sum is said to have been opened")


@pytest.mark.parametrize(
    ("survivors", "message"),
    [
        (["Aachen"] * 5, "'Aachen' is in it more than once"),
        ([*SITES[:4], "Zagreb"], "'Zagreb' is said to be in it, and was not asked"),
    ],
)
def test_survivors_are_distinct_and_were_asked(runs, survivors, message):
    for protection in ("masking", "ckks"):
        content, ledger = runs(protection=protection)
        for opened in content["sums"]:
            opened["survivors"] = survivors
        refused(content, ledger, message)


def test_who_has_sent_nothing_is_in_no_sum():
    faults = [Fault("Bergen", exchange=2, kind="drop")]
    model = fit(FKM(2), spec(protection="masking"), faults=faults)
    assert report_of(model.result_, ledger=model.ledger_)["verdict"] == "DP CLAIM"
    content = model.result_.to_dict()
    few = next(opened for opened in content["sums"] if "Bergen" not in opened["survivors"])
    few["survivors"] = list(SITES)
    refused(content, model.ledger_, "'Bergen' is said to be in it, and has sent nothing")
    few["survivors"], few["n_clients"] = few["survivors"][2:], 9
    refused(content, model.ledger_, "9 clients are said to have taken part")
    content["sums"] = content["sums"][::-1] if len(content["sums"]) > 1 else content["sums"] * 2
    refused(content, model.ledger_, "not at places of its history")


def test_of_an_unknown_start_the_report_says_that_it_does_not_know(runs):
    def start(content, ledger):
        lines = report(content, ledger)["assumptions"]
        (line,) = [line for line in lines if line["name"] == "start"]
        return line["status"], line["why"]

    content, ledger = runs()
    content["parameters"]["seeding"] = "stars"
    words = "how FKM starts with seeding='stars', this report does not know"
    assert start(content, ledger) == ("assumed", words)
    content["parameters"]["seeding"] = "private"
    words = "how Magic starts, this report does not know"
    assert start(content | {"algorithm": "Magic"}, ledger) == ("assumed", words)


def test_the_page_says_that_its_files_are_not_signed(runs):
    assert "result.json and audit.json are not signed" in render(report(*runs()))


def test_no_epsilon_is_on_the_first_lines_of_a_report_without_a_claim():
    unproved = FedGEM(2, calibration="sums", seeding="local", allow_unproved=True)
    for model in (FKM(2, sampler="fast"), unproved):
        content = report_of(fit(model, spec()).result_)
        assert content["verdict"] == "NO DP CLAIM"
        assert "epsilon" not in content["claim"] + json.dumps(content["reasons"])
        assert "epsilon" not in render(content).split("<header>")[1].split("</header>")[0]
