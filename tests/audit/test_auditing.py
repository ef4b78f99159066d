"""Audits as users have them: of a model, and from the command line."""

import json

import numpy as np
import pytest

from secure_fedclust import (
    FKM,
    GOLD,
    Audit,
    FeCA,
    FedGEM,
    KFed,
    ParameterError,
    PrivacySpec,
    release_synopsis,
)
from secure_fedclust.audit.findings import CHECKS, GAME, Finding
from secure_fedclust.cli import main

from .attacks.planted_bugs import BUGS

RANGES = [(-1, 1)] * 2
CONFIG = """
algorithm = "FKM"
[parameters]
n_clusters = 2
seeding = "public"
n_rounds = 1
[privacy]
epsilon = 8.0
delta = 1e-5
ranges = [[-1, 1], [-1, 1]]
public_size = 300
[data]
source = ["a.csv", "b.csv", "c.csv"]
"""


def private(**more):
    return PrivacySpec(epsilon=8.0, delta=1e-5, ranges=RANGES, public_size=300, **more)


def records(n_clients=4):
    rng = np.random.default_rng(0)
    return {f"site {i}": rng.normal([[-0.5, 0]] * 90 + [[0.5, 0.3]] * 90, 0.1) for i in range(4)}


@pytest.fixture(autouse=True)
def surely(monkeypatch):
    """Audits of correct code that fail by chance less than once in ten thousand times."""
    defaults = FKM.audit.__kwdefaults__ | {"confidence": 0.9999}
    monkeypatch.setattr(FKM.audit, "__kwdefaults__", defaults)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audited")
    for name, X in zip("abc", records().values(), strict=False):
        np.savetxt(folder / f"{name}.csv", X, delimiter=",", header="x,y", comments="")
    (folder / "run.toml").write_text(CONFIG)
    return folder / "run.toml"


@pytest.fixture(scope="module")
def audit():
    model = FKM(2, seeding="public", n_rounds=1, privacy=private())
    return model.fit(records()).audit(trials=400, confidence=0.9999)


def test_a_fitted_model_audits_itself_and_spends_nothing(audit):
    model = FKM(2, seeding="public", n_rounds=1, privacy=private()).fit(records())
    before = model.ledger_.anchor()
    model.audit(trials=100)
    assert model.ledger_.anchor() == before
    assert audit.n_clients == 4 and audit.n_features == 2
    assert audit.algorithm == "FKM" and audit.privacy["epsilon"] == 8.0


def test_every_finding_has_a_figure_and_what_it_may_be(audit):
    kinds = {finding.kind for finding in audit.findings}
    assert kinds == {"statistical", "structural", "exhibit"}
    for finding in audit.findings:
        assert np.isfinite(finding.figure)
        assert finding.verdict in ("PASS", "FAIL", "INCONCLUSIVE")
        assert finding.words and finding.threat and finding.trials > 0
        assert (finding.ceiling is None) == (finding.name in ("noise as charged", "shape of noise"))
    assert {GAME, *CHECKS} <= {finding.name for finding in audit.findings}
    assert [f.name for f in audit.findings if f.kind == "exhibit"] == ["AFCL's message"]


def test_an_audit_is_the_same_after_saving(audit, tmp_path):
    audit.save(tmp_path / "audit.json")
    assert Audit.load(tmp_path / "audit.json") == audit


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": "secure_fedclust audit 0"}', "no json"])
def test_another_file_is_no_audit(text, tmp_path):
    (tmp_path / "audit.json").write_text(text)
    with pytest.raises(ParameterError, match="not an audit that this version can read"):
        Audit.load(tmp_path / "audit.json")


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (KFed(2), {}),
        (FeCA(2), {"protection": "masking"}),
        (GOLD(2), {"protection": "ckks"}),
        (FedGEM(2, calibration="floor"), {}),
        (FKM(2), {"protection": "masking", "unit": "client"}),
    ],
    ids=["KFed", "FeCA-masked", "GOLD-encrypted", "FedGEM-floor", "client"],
)
def test_every_system_and_protection_can_be_audited(model, more):
    found = model.set_params(privacy=private(**more)).audit(trials=100, n_clients=5)
    assert found.verdict != "FAIL"
    names = [finding.name for finding in found.findings]
    assert ("distinguishing game, worst pair of a floor" in names) == (type(model) is FedGEM)


def test_client_names_in_parameters_are_those_of_the_rehearsal():
    model = FedGEM({f"site {i}": 2 for i in range(4)}, privacy=private())
    assert model.audit(trials=100, n_clients=4).verdict != "FAIL"


def test_a_setting_that_breaks_the_proof_fails():
    model = FedGEM(
        2, calibration="floor", enforce_floor=False, allow_unproved=True, privacy=private()
    )
    found = {f.name: f for f in model.audit(trials=100, n_clients=3).findings}
    assert found["sensitivity"].verdict == "FAIL"
    assert found["sensitivity"].figure > 2


@pytest.mark.parametrize(
    ("privacy", "arguments", "message"),
    [
        (PrivacySpec.none(reason="test"), {"n_clients": 3}, "no claim to audit"),
        (private(), {}, "how many clients"),
        (PrivacySpec(epsilon=1, delta=1e-5, bound=1.0), {"n_clients": 3}, "how many features"),
        (private(), {"n_clients": 3, "trials": 7}, "trials=7: give at least 100"),
        (private(), {"n_clients": 3, "confidence": 1.0}, "confidence=1.0"),
        (private(), {"n_clients": 0}, "n_clients"),
        (private(), {"n_clients": 3, "jobs": 0}, "jobs"),
    ],
)
def test_what_cannot_be_audited_is_refused_at_once(privacy, arguments, message):
    with pytest.raises(ParameterError, match=message):
        FKM(2, privacy=privacy).audit(**arguments)


def test_a_model_on_a_synopsis_is_not_audited():
    synopsis = release_synopsis(records(), privacy=private(), n_clusters=2)
    model = KFed(2, privacy=private()).fit(synopsis)
    with pytest.raises(ParameterError, match="fitted on a synopsis"):
        model.audit(trials=100)


def test_the_verdict_needs_the_game_and_every_check():
    def audit_of(*verdicts, left_out=()):
        kinds = ((GAME, "statistical"), ("fresh noise", "structural"))
        kinds += (("one-run audit", "statistical"), ("AFCL", "exhibit"))
        given = [(*kind, verdict) for kind, verdict in zip(kinds, verdicts, strict=True)]
        given += [(name, "structural", "PASS") for name in CHECKS if name not in left_out]
        findings = tuple(
            Finding(name, kind, "", "", 0.0, None, None, verdict, "", 1)
            for name, kind, verdict in given
        )
        return Audit("FKM", {}, {}, 1, 1, 1, findings).verdict

    weak = "INCONCLUSIVE"
    assert audit_of("PASS", "PASS", weak, "FAIL") == "PASS"
    assert audit_of("PASS", "PASS", weak, "FAIL", left_out=("nothing else leaves",)) == weak
    assert audit_of(weak, "PASS", "PASS", "FAIL") == weak
    assert audit_of("PASS", "PASS", "FAIL", "FAIL") == "FAIL"
    assert audit_of("PASS", "FAIL", "PASS", "FAIL") == "FAIL"
    assert Audit("FKM", {}, {}, 1, 1, 1, ()).verdict == weak


def test_the_command_audits_without_data_and_writes_to_the_folder_of_a_run(
    config, tmp_path, capsys
):
    common = [str(config), "--out", str(tmp_path), "--quiet"]
    assert main(["run", *common]) == 0
    before = json.loads((tmp_path / "report.json").read_text())
    for name in "abc":
        (config.parent / f"{name}.csv").rename(config.parent / f"{name}.kept")
    try:
        assert main(["audit", *common, "--trials", "400", "--jobs", "1"]) == 0
    finally:
        for name in "abc":
            (config.parent / f"{name}.kept").rename(config.parent / f"{name}.csv")
    after = json.loads((tmp_path / "report.json").read_text())
    assert before["audited"] == "not audited" and after["audited"] in ("PASS", "INCONCLUSIVE")
    assert Audit.load(tmp_path / "audit.json").n_clients == 3
    assert after["ledger"] == before["ledger"]


def test_the_command_prints_a_table_or_json(config, capsys):
    assert main(["audit", str(config), "--trials", "100", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "distinguishing game" in printed and "audit: " in printed
    [exhibit] = [line for line in printed.splitlines() if "AFCL" in line]
    assert "not of this run" in exhibit and "FAIL" not in exhibit
    assert main(["audit", str(config), "--trials", "100", "--jobs", "1", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["verdict"] in ("PASS", "INCONCLUSIVE")
    kinds = {finding["kind"] for finding in content["findings"]}
    assert kinds == {"statistical", "structural", "exhibit"}


def test_an_audit_that_does_not_fit_a_run_is_refused_before_it_is_played(config, tmp_path, capsys):
    assert main(["run", str(config), "--out", str(tmp_path), "--quiet"]) == 0
    (tmp_path / "audit.json").write_text("kept")
    assert main(["audit", str(config), "--out", str(tmp_path), "--clients", "5"]) == 2
    assert "number of clients" in capsys.readouterr().err
    assert (tmp_path / "audit.json").read_text() == "kept"


def test_a_refuted_claim_does_not_stay_on_the_page(config, tmp_path, capsys, monkeypatch):
    common = [str(config), "--out", str(tmp_path), "--quiet"]
    assert main(["run", *common]) == 0
    next(bug for bug in BUGS if bug.name == "no charge").plant(monkeypatch)
    played = [*common, "--trials", "100", "--jobs", "1"]
    assert main(["audit", *played]) == 7
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "NO DP CLAIM"
    (tmp_path / "ledger.sqlite").unlink()
    assert main(["audit", *played]) == 7
    assert "no report" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_claim_that_is_refuted_has_an_exit_code_of_its_own(config, capsys, monkeypatch):
    next(bug for bug in BUGS if bug.name == "no charge").plant(monkeypatch)
    assert main(["audit", str(config), "--trials", "100", "--jobs", "1"]) == 7
    assert "the claim is refuted by: order of charging" in capsys.readouterr().err


def test_several_processes_find_the_same_kind_of_thing(config, capsys):
    assert main(["audit", str(config), "--trials", "200", "--jobs", "2", "--json"]) == 0
    game = json.loads(capsys.readouterr().out)["findings"][0]
    assert game["name"] == GAME and game["ceiling"] == 8.0 and game["trials"] == 200
