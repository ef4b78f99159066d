import json
import math
from importlib import resources

import pytest
from jsonschema import Draft202012Validator

from secure_fedclust import FKM, ParameterError, PrivacySpec, release_synopsis
from secure_fedclust.audit.findings import CHECKS
from secure_fedclust.audit.report import crosscheck
from secure_fedclust.audit.report.content import report_of
from secure_fedclust.audit.report.crosscheck import AccountingError
from secure_fedclust.audit.report.page import render
from secure_fedclust.privacy.accounting import Limit

from .report_world import (
    EXHIBIT,
    RANGES,
    SITES,
    SYSTEMS,
    audit_of,
    finding,
    fit,
    fitted,
    new_ledger,
    sites,
    spec,
    unprotected,
)

SCHEMA = json.loads(
    resources.files("secure_fedclust.audit.report").joinpath("schema.json").read_text()
)


def check_schema(content):
    Draft202012Validator.check_schema(SCHEMA)
    Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(content, allow_nan=False)))


def report(model, **given):
    content = report_of(model.result_, **{"ledger": model.ledger_} | given)
    check_schema(content)
    return content


@pytest.mark.parametrize("protection", ["none", "masking", "ckks"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_has_a_report_whatever_protects_it(name, protection):
    model = fitted(name, protection)
    content = report(model)
    assert content["verdict"] == "DP CLAIM" and content["reasons"] == []
    assert content["claim"] == model.guarantee_
    assert content["audited"] == "not audited"
    assert {row["party"] for row in content["saw"]} >= {"server", "every client", "public"}
    assert ("key holder" in {row["party"] for row in content["saw"]}) == (protection == "ckks")
    assert bool(content["sums"]) == (protection != "none")
    assert bool(content["fallback"]) == (protection != "none")
    assert len(content["clients"]["clients"]) == 5
    page = render(content)
    assert 'id="verdict" data-verdict="DP CLAIM"' in page
    assert_no_names(page, json.dumps(content))


@pytest.mark.parametrize("name", SYSTEMS)
def test_without_differential_privacy_there_is_no_claim_and_a_reason(name):
    model = unprotected(name)
    content = report(model)
    assert content["verdict"] == "NO DP CLAIM" and content["claim"].startswith("NO DP CLAIM")
    assert [reason["name"] for reason in content["reasons"]] == ["noise"]
    assert "generated data, of client 2 too" in content["claim"]
    assert content["meaning"] is None and content["ledger"]["book"] is None
    page = render(content)
    assert 'data-verdict="NO DP CLAIM"' in page and "epsilon is not given" in page
    assert_no_names(page, json.dumps(content))


def test_exact_sums_under_masks_make_no_claim_and_are_shown_as_exact():
    privacy = PrivacySpec.none(reason="test", protection="masking")
    content = report(fit(FKM(2, n_rounds=1), privacy))
    assert content["verdict"] == "NO DP CLAIM"
    assert all(not opened["noisy"] for opened in content["sums"])
    assert any("EXACT" in row["meaning"] for row in content["saw"])


def assert_no_names(*texts):
    for text in texts:
        for site in SITES:
            assert site.casefold() not in text.casefold(), site


def test_the_words_say_what_epsilon_one_means():
    model = fit(FKM(2), spec(epsilon=1))
    means = report(model)["meaning"]
    assert means["found"] == pytest.approx(0.020, abs=5e-4)
    assert means["auc"] == pytest.approx(0.575, abs=1e-3)
    assert "finds at most 2.0% of the records" in means["words"][0]
    assert "at most 57.5% of cases" in means["words"][1]


def test_the_curve_of_the_claim_is_within_both_of_its_bounds():
    means = report(fitted("FKM"))["meaning"]
    limit = Limit.of(4, 1e-5)
    for x, y in means["curve"]:
        assert x <= y + 1e-12 and y <= math.exp(4) * x + 1e-5 + 1e-12
        assert 1 - y >= math.exp(-4) * (1 - 1e-5 - x) - 1e-12
    assert means["mu"] == limit.mu
    assert means["curve"][0][1] < 2e-5 and means["curve"][-1] == [1.0, 1.0]


def test_a_person_is_given_the_figures_of_all_their_records():
    import pandas as pd

    frame = pd.concat(
        [
            pd.DataFrame(X, columns=["x", "y"]).assign(site=site, who=range(len(X)))
            for site, X in sites().items()
        ]
    )
    model = fit(
        FKM(2),
        spec(records_per_person=3),
        clients=frame,
        client_column="site",
        person_column="who",
    )
    content = report(model)
    means = content["meaning"]
    assert means["unit"] == "person" and means["mu"] == pytest.approx(3 * Limit.of(4, 1e-5).mu)
    assert means["epsilon"] == pytest.approx(Limit.of(4, 1e-5).group_epsilon(3))
    assert means["found"] > report(fitted("FKM"))["meaning"]["found"]
    assert content["clients"]["clients"][0]["person_spent"] > 12
    assert "persons whose records" in means["words"][0]


def test_a_protected_client_is_called_a_client():
    model = fit(FKM(2), spec(unit="client", protection="masking", public_size=None))
    content = report(model)
    assert content["meaning"]["unit"] == "client"
    assert "clients whose data" in content["meaning"]["words"][0]
    assert "for each client" in render(content)


def test_the_server_and_others_are_said_to_have_seen_what_the_result_says():
    model = fitted("FedGEM", "masking")
    content = report(model)
    server = [row for row in content["saw"] if row["party"] == "server"]
    for sight in model.result_.server_view().saw:
        (row,) = [r for r in server if (r["message"], r["form"]) == (sight.stage, sight.form)]
        assert (row["messages"], row["bytes"]) == (sight.messages, sight.bytes)
    sealed = [row for row in content["saw"] if row["party"] == "every client"]
    assert any(row["form"] == "sealed" and row["message"] == "masking/mask" for row in sealed)
    assert content["trust"]["model"] == "local and distributed"
    assert sum(row["bytes"] for row in sealed) == content["run"]["bytes_down"]


def test_the_key_holder_is_said_to_have_seen_sums():
    model = fitted("FKM", "ckks")
    content = report(model)
    rows = [row for row in content["saw"] if row["party"] == "key holder"]
    view = model.result_.key_holder_view()
    assert [row["bytes"] for row in rows] == [sight.bytes for sight in view.saw]
    assert rows[-1]["form"] == "encrypted sum"
    assert content["trust"]["model"] == "distributed"


def test_the_ledger_is_there_row_by_row_with_what_is_left(tmp_path):
    path = new_ledger(tmp_path / "l.sqlite", epsilon=8, dataset="letters <1>")
    fit(FKM(2), spec(), path)
    model = fit(FKM(2), spec(epsilon=1), path)
    content = report(model)
    book = content["ledger"]["book"]
    rows = model.ledger_.rows()
    assert [row["row"] for row in book["rows"]] == [row.number for row in rows]
    assert [row["mu"] for row in book["rows"]] == [row.charge.mu for row in rows]
    assert [row["cumulative_mu"] for row in book["rows"]] == [row.cumulative_mu for row in rows]
    assert [row["hash"] for row in book["rows"]] == [row.hash[:12] for row in rows]
    assert [row["inputs"] for row in book["rows"]] == [dict(row.charge.inputs) for row in rows]
    assert sum(row["this_run"] for row in book["rows"]) == len(rows) // 2
    assert book["runs"] == 2 and book["verified"] == "every row, 5 anchors"
    assert book["anchor"] == "{}:{}".format(*model.ledger_.anchor())
    lifetime = book["lifetime"][0]
    limit = Limit.of(8, 1e-5)
    assert lifetime["mu"] ** 2 + lifetime["mu_left"] ** 2 == pytest.approx(limit.mu**2)
    assert 4 < lifetime["spent"] < 5 and lifetime["left"] > 5
    assert content["clients"]["largest_spent"] == pytest.approx(1, rel=1e-3)
    page = render(content)
    assert "letters &lt;1&gt;" in page and f"--anchor {book['anchor']}" in page


def test_of_a_long_ledger_the_page_shows_both_ends_and_says_so():
    content = report(fitted("FKM"))
    row = content["ledger"]["book"]["rows"][0]
    content["ledger"]["book"]["rows"] = [row | {"row": i, "hash": f"{i:012x}"} for i in range(1000)]
    page = render(content)
    assert "The first 100 and the last 100 of 1000 rows" in page
    assert f"{99:012x}" in page and f"{900:012x}" in page
    assert f"{100:012x}" not in page and f"{899:012x}" not in page


def test_two_accountants_agree_about_a_run():
    checked = report(fitted("FKM"))["accountants"]
    assert checked["checked"] and len(checked["clients"]) == 5
    assert checked["largest_difference"] < 1e-4
    assert "dp_accounting" in checked["other"]


@pytest.mark.parametrize("theirs", [4.1, 3.5])
def test_a_disagreement_of_the_accountants_is_an_error(theirs, monkeypatch):
    monkeypatch.setattr(crosscheck, "pld_epsilon", lambda mus, delta: theirs)
    with pytest.raises(AccountingError, match="dispute"):
        report(fitted("FKM"))


def test_a_little_more_than_the_other_accountants_rounding_is_too_much():
    crosscheck.compare("client 1", 1.0, 1.00005, 1.0)
    with pytest.raises(AccountingError, match="which is more"):
        crosscheck.compare("client 1", 1.0, 1.0002, 2.0)
    crosscheck.compare("client 1", 1.0, 0.995, 1.0)
    with pytest.raises(AccountingError, match="more than the claim"):
        crosscheck.compare("client 1", 1.0, 1.0, 0.9)


def test_without_the_other_accountant_the_report_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise crosscheck.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(crosscheck.metadata, "version", missing)
    checked = crosscheck.cross_check({"client 1": [0.1]}, 1e-5, 1.0)
    assert checked == {
        "checked": False,
        "words": "Not cross-checked: dp_accounting is not installed: install the extra compare.",
    }


def test_findings_are_shown_beside_the_claim_and_exhibits_apart():
    model = fitted("FKM")
    content = report(model, audit=audit_of(model))
    assert content["audited"] == "PASS" and content["verdict"] == "DP CLAIM"
    assert [f["name"] for f in content["audit"]["findings"]] == [
        "distinguishing game",
        *CHECKS,
    ]
    assert [f["name"] for f in content["audit"]["exhibits"]] == ["AFCL's message"]
    page = render(content)
    assert "A lower bound never certifies" in page and "says only that the test was weak" in page
    assert "epsilon 1.5 (1.5 to 4.2, with 95% confidence)" in page
    assert page.count('<circle class="dots"') >= 10 and 'class="curve"' in page
    assert "These say nothing about this run" in page


def test_a_lower_bound_has_no_upper_end():
    model = fitted("FKM")
    bound = finding(figure=0.81, interval=(0.81, None), confidence=0.993)
    point = finding("one-run audit", measure="x", figure=0.9, interval=(0.7, None), curve=())
    content = report(model, audit=audit_of(model, bound, point))
    assert content["audit"]["findings"][0]["interval"] == [0.81, None]
    page = render(content)
    assert "epsilon at least 0.81, with 99.3% confidence" in page
    assert "x 0.9 (at least 0.7, with 95% confidence)" in page
    assert page.count('class="interval open"') == 2 and "no upper end is known" in page
    closed = render(report(model, audit=audit_of(model)))
    assert 'class="interval"' in closed and "interval open" not in closed


def test_a_failed_audit_takes_the_claim_away():
    model = fitted("FKM")
    failed = finding(figure=9.0, interval=(9.0, 11.0), verdict="FAIL", words="Epsilon is above 9.")
    content = report(model, audit=audit_of(model, failed, EXHIBIT))
    assert content["verdict"] == "NO DP CLAIM" and content["audited"] == "FAIL"
    assert content["claim"].endswith("distinguishing game: more was found than the claim allows")
    assert content["meaning"] is None and "Epsilon is above 9" in render(content)
    assert "nothing is claimed" in json.dumps(content["saw"])


def test_names_in_what_an_attack_says_are_hidden_too():
    model = fitted("FKM")
    said = {"words": "Of Bergen.", "threat": "knows Como", "more": {"Essen": 1.0, "x": "Delft"}}
    failed = finding(figure=9.0, interval=(9.0, 11.0), verdict="FAIL", **said)
    content = report(model, audit=audit_of(model, failed))
    assert content["audit"]["findings"][0]["words"] == "Of client 2."
    assert_no_names(json.dumps(content), render(content))


def test_a_failed_exhibit_does_not():
    model = fitted("FKM")
    content = report(model, audit=audit_of(model, finding(), EXHIBIT))
    assert content["verdict"] == "DP CLAIM" and content["audited"] == "PASS"


def test_an_inconclusive_audit_says_so():
    model = fitted("FKM")
    content = report(model, audit=audit_of(model, finding(verdict="INCONCLUSIVE")))
    assert content["verdict"] == "DP CLAIM" and content["audited"] == "INCONCLUSIVE"
    assert "Attacked: INCONCLUSIVE" in render(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "GOLD"}, "algorithm differs"),
        ({"parameters": {"n_clusters": 3}}, "parameters differs"),
        ({"privacy": {"epsilon": 3, "delta": 1e-5, "ranges": RANGES}}, "privacy spec differs"),
        ({"n_clients": 4}, "number of clients differs"),
        ({"n_features": 3}, "number of features differs"),
    ],
)
def test_an_audit_of_another_kind_of_run_is_refused(change, message):
    model = fitted("FKM")
    with pytest.raises(ParameterError, match=message):
        report(model, audit=audit_of(model, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"curve": ((0.1, 1.2),)}, "no two rates"),
        ({"curve": ((0.1, math.nan),)}, "no two rates"),
        ({"curve": ((0.1,),)}, "no two rates"),
        ({"curve": ()}, "no curve"),
        ({"verdict": "FINE"}, "verdict 'FINE'"),
        ({"figure": math.inf}, "finite"),
        ({"interval": (5.0, 6.0)}, "PASS, though 5 is beyond the ceiling of 4"),
        ({"interval": (5.0, None)}, "PASS, though 5 is beyond the ceiling of 4"),
        ({"interval": (5.0, None), "ceiling": 99.0}, "the ceiling is not the claim's epsilon of 4"),
        ({"more": {"would have refuted half the noise": 0.2}}, "too weak to tell"),
        (
            {"more": {"would have refuted half the noise": 1.0, "epsilon at least (any)": 99.0}},
            "one of its bounds is beyond the claim",
        ),
        ({"trials": 0}, "it was not played"),
        ({"kind": "exhibit"}, "an exhibit cannot have that name"),
        (
            {"name": "noise as charged", "measure": "ratio", "interval": (0.09, 0.11)},
            "the noise is smaller than charged",
        ),
        (
            {"name": "order of charging", "kind": "structural", "measure": "violations"}
            | {"figure": 3.0, "interval": None, "ceiling": None},
            "PASS without a ceiling",
        ),
        ({"interval": (None, 6.0)}, "no lower end"),
        ({"interval": (1.0, math.inf)}, "finite"),
    ],
)
def test_an_audit_that_cannot_be_right_is_refused(change, message):
    model = fitted("FKM")
    with pytest.raises(ParameterError, match=message):
        report(model, audit=audit_of(model, finding(**change)))


def test_an_audit_may_leave_the_quorum_to_be_worked_out():
    model = fitted("FKM", "masking")
    without = {k: v for k, v in model.result_.privacy.items() if k != "min_survivors"}
    assert report(model, audit=audit_of(model, privacy=without))["audited"] == "PASS"


def test_a_run_on_a_released_synopsis_is_reported_with_the_releases_it_rests_on(tmp_path):
    path = new_ledger(tmp_path / "l.sqlite")
    released = release_synopsis(sites(), privacy=spec(), n_clusters=2, ledger=path)
    model = FKM(2, random_state=0).fit(released)
    content = report(model, ledger=path)
    assert content["verdict"] == "DP CLAIM" and content["run"]["exchanges"] == 0
    assert [row["party"] for row in content["saw"]] == ["public"]
    assert all(row["this_run"] for row in content["ledger"]["book"]["rows"])


def test_the_report_lists_what_came_out_without_noise():
    content = report(fitted("FKM"))
    names = [line["name"] for line in content["unnoised"]]
    assert names == [
        *("labels", "timings", "lengths", "part", "errors", "warnings", "metrics", "standing")
    ]
    assert "stay with the client" in content["unnoised"][0]["words"]
    written = report(fitted("FKM"), labels=True)
    assert "must not be passed on" in written["unnoised"][0]["words"]


def test_clients_that_failed_are_counted_without_their_names():
    from secure_fedclust.engines import Fault

    faults = [Fault("Bergen", exchange=2, kind="drop")]
    model = fit(FKM(2), spec(protection="masking"), faults=faults)
    content = report(model)
    assert "client 2 did not always answer" in content["unnoised"][3]["words"]
    assert any(opened["in_it"] == 4 for opened in content["sums"])
    assert_no_names(json.dumps(content))


def test_limits_fallback_versions_and_the_command_are_there():
    content = report(fitted("FKM", "masking"), command="secure-fedclust run a.toml --out b")
    assert any("g times mu" in line for line in content["limits"])
    assert any("sqrt(c) times mu" in line and "c times mu" in line for line in content["limits"])
    assert "own noise were the only one" in content["fallback"]
    assert content["reproduce"]["command"] == "secure-fedclust run a.toml --out b"
    assert {"python", "numpy", "opendp"} <= set(content["reproduce"]["versions"])
    assert "not seeded" in content["reproduce"]["noise"]
    page = render(content)
    assert content["fallback"][10:60] in page and "secure-fedclust run a.toml" in page


def test_the_page_is_made_of_the_json_alone():
    model = fitted("FedGEM", "ckks")
    content = report(model)
    assert render(json.loads(json.dumps(content))) == render(content)
    with pytest.raises(ParameterError, match=r"'secure_fedclust report 9'.*report 1"):
        render(content | {"format": "secure_fedclust report 9"})


def test_no_record_is_in_a_report():
    model = fitted("FKM")
    text = json.dumps(report(model))
    for X in sites().values():
        assert not any(repr(float(value)) in text for value in X.ravel())


EVIL = "<script>alert(1)</script>"


def test_whatever_users_write_is_escaped(tmp_path):
    clients = {f"{EVIL} {i}": X for i, X in enumerate(sites().values())}
    path = new_ledger(tmp_path / "l.sqlite", dataset=EVIL)
    model = fit(FKM(2), spec(), path, clients)
    found = audit_of(model, finding(EVIL, words=EVIL, threat=EVIL, measure=EVIL, more={EVIL: EVIL}))
    content = report(model, names=True, command=EVIL, audit=found, versions={EVIL: EVIL})
    content["run"]["feature_names"] = [EVIL, '"><img src=x onerror=alert(1)>']
    content["fallback"] = EVIL
    page = render(content)
    assert "<script" not in page and "<img" not in page
    assert page.count("&lt;script&gt;") > 20
    none = fit(FKM(2), PrivacySpec.none(reason=EVIL))
    assert "<script" not in render(report(none))


def test_the_page_allows_itself_nothing_but_its_own_style():
    page = render(report(fitted("FKM")))
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert f'http-equiv="Content-Security-Policy" content="{policy}"' in page
    assert "<script" not in page and "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page and '<html lang="en">' in page
