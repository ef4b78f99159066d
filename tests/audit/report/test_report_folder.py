import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from secure_fedclust import FKM, LedgerError, ParameterError, PrivacySpec
from secure_fedclust.audit.report.content import installed_versions, report_of
from secure_fedclust.audit.report.folder import (
    check_fits,
    read_result,
    remove_report,
    write_report,
    write_run,
)
from secure_fedclust.audit.report.page import render
from secure_fedclust.cli import main
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.privacy.ledger import Ledger
from secure_fedclust.privacy.release import Releases
from secure_fedclust.protocols.synopsis import SynopsisClient

from .report_world import (
    SITES,
    audit_of,
    finding,
    fit,
    fitted,
    new_ledger,
    sites,
    spec,
    unprotected,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder as `run --out` leaves it, and its model."""
    folder = tmp_path_factory.mktemp("made")
    model = fit(FKM(2), spec(), new_ledger(folder / "ledger.sqlite"))
    model.ledger_.close()
    model.result_.save(folder / "result.json")
    write_run(folder, command="secure-fedclust run a.toml --out b")
    return folder, model


@pytest.fixture
def folder(made, tmp_path):
    """A copy of it to be damaged."""
    return shutil.copytree(made[0], tmp_path / "run")


def edit(path, **changes):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


def refused(folder, error, message, **given):
    """The report is refused, and nothing is written."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(error, match=message):
        write_report(folder, **given)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(after) - set(before) <= {"ledger.sqlite-wal", "ledger.sqlite-shm"}
    assert {name: after[name] for name in before} == before


def test_a_folder_becomes_a_page_and_its_json(folder, made):
    page = write_report(folder)
    content = json.loads((folder / "report.json").read_text())
    assert page == folder / "report.html" and page.read_text() == render(content)
    assert content["verdict"] == "DP CLAIM"
    assert content["reproduce"]["command"] == "secure-fedclust run a.toml --out b"
    assert content["claim"] == made[1].guarantee_
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_report_without_a_folder_says_the_same(folder):
    write_report(folder)
    from secure_fedclust.result import FedClustResult

    content = report_of(
        FedClustResult.load(folder / "result.json"),
        ledger=folder / "ledger.sqlite",
        command="secure-fedclust run a.toml --out b",
    )
    assert json.loads(json.dumps(content)) == json.loads((folder / "report.json").read_text())


def test_an_audit_in_the_folder_is_used_and_labels_are_noticed(folder, made):
    audit_of(made[1]).save(folder / "audit.json")
    (folder / "labels").mkdir()
    write_report(folder)
    content = json.loads((folder / "report.json").read_text())
    assert content["audited"] == "PASS"
    assert "written to the folder labels" in content["unnoised"][0]["words"]


def test_a_report_replaces_an_older_one(folder):
    (folder / "report.html").write_text("old")
    assert "old" != write_report(folder).read_text()


def test_a_new_run_removes_the_report_of_an_earlier_one(folder):
    write_report(folder)
    write_run(folder, command="another")
    assert not (folder / "report.html").exists() and not (folder / "report.json").exists()


def test_whether_an_audit_fits_is_known_before_it_has_findings(folder, made, tmp_path):
    result = read_result(folder)
    assert result.guarantee == made[1].guarantee_ and read_result(tmp_path / "x") is None
    check_fits(replace(audit_of(made[1]), findings=()), result)
    with pytest.raises(ParameterError, match="number of clients differs"):
        check_fits(replace(audit_of(made[1]), findings=(), n_clients=3), result)
    with pytest.raises(ParameterError, match="the result's spent"):
        check_fits(audit_of(made[1]), replace(result, spent={}))


def test_a_report_that_no_longer_holds_can_be_removed(folder):
    page = write_report(folder)
    remove_report(folder)
    assert not page.exists() and not (folder / "report.json").exists()
    remove_report(folder)
    assert (folder / "result.json").exists()


def test_without_a_result_there_is_nothing_to_report(tmp_path):
    refused(tmp_path, ParameterError, "has no result.json")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"algorithm": "FKM"}', '"x"'])
def test_a_file_that_is_no_result_is_refused(folder, text):
    (folder / "result.json").write_text(text)
    refused(folder, ParameterError, "result.json is not a result")


def test_a_result_of_another_format_names_both(folder):
    edit(folder / "result.json", format="secure_fedclust result 2")
    refused(folder, ParameterError, "'secure_fedclust result 2'.*'secure_fedclust result 4'")


def test_a_note_of_another_format_names_both(folder):
    edit(folder / "run.json", format="secure_fedclust run 7")
    refused(folder, ParameterError, "'secure_fedclust run 7'.*'secure_fedclust run 1'")


@pytest.mark.parametrize(
    "change", [{"command": 3}, {"versions": ["numpy"]}, {"ledger": 1}, {"versions": {"a": 1}}]
)
def test_a_note_that_is_not_what_it_should_be_is_refused(folder, change):
    edit(folder / "run.json", **change)
    refused(folder, ParameterError, f"run.json: {next(iter(change))}")
    (folder / "run.json").write_text("{")
    refused(folder, ParameterError, "run.json does not say")


def test_without_a_note_the_report_has_no_command(folder):
    (folder / "run.json").unlink()
    write_report(folder)
    assert json.loads((folder / "report.json").read_text())["reproduce"]["command"] is None


def change_ledger(path, command):
    """Change a ledger behind its back, and put up its fences again."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
        fences = connection.execute(query).fetchall()
        for name, _ in fences:
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute(command)
        for _, sql in fences:
            connection.execute(sql)


def test_an_edited_ledger_is_refused_and_the_row_named(folder):
    change_ledger(folder / "ledger.sqlite", "UPDATE releases SET mu = mu / 2 WHERE number = 3")
    refused(folder, LedgerError, "row 3 does not hold")


def test_a_ledger_that_was_cut_short_is_refused(folder):
    change_ledger(folder / "ledger.sqlite", "DELETE FROM releases WHERE number > 8")
    change_ledger(folder / "ledger.sqlite", "DELETE FROM outbox")
    refused(folder, LedgerError, "row 9 does not hold, an anchor saw 9 rows")


def test_another_ledger_is_refused(folder, tmp_path):
    other = tmp_path / "other.sqlite"
    fit(FKM(2), spec(), new_ledger(other)).ledger_.close()
    refused(folder, LedgerError, "an anchor saw another one", ledger=other)
    refused(folder, LedgerError, "there is no ledger", ledger=tmp_path / "x")


def test_a_ledger_that_is_elsewhere_has_to_be_given(folder, tmp_path):
    moved = shutil.move(folder / "ledger.sqlite", tmp_path / "site.ledger")
    refused(folder, ParameterError, "--ledger FILE")
    assert write_report(folder, ledger=moved).exists()
    (folder / "report.html").unlink()
    edit(folder / "run.json", ledger=str(moved))
    assert write_report(folder).exists()


def test_a_result_that_promises_less_than_was_spent_is_refused(folder, made):
    privacy = dict(made[1].result_.privacy) | {"epsilon": 1}
    said, before = made[1].guarantee_, PrivacySpec.from_dict(made[1].result_.privacy).describe()
    guarantee = said.replace(before, PrivacySpec.from_dict(privacy).describe())
    edit(folder / "result.json", privacy=privacy, guarantee=guarantee)
    refused(folder, ParameterError, "promises epsilon 1, and the ledger has 4 for 'Aachen'")


def test_a_result_that_says_it_spent_less_is_refused(folder):
    edit(folder / "result.json", spent=dict.fromkeys(SITES, 1.0))
    refused(folder, ParameterError, "says that 'Aachen' spent epsilon 1 in this run")


def test_a_guarantee_that_is_not_that_of_the_spec_is_refused(folder):
    edit(folder / "result.json", guarantee="(epsilon=0.1, delta=1e-05)-differential privacy")
    refused(folder, ParameterError, "not what its privacy spec and its history say")


def test_a_ledger_for_another_adjacency_is_refused(folder, tmp_path):
    other = new_ledger(tmp_path / "o.sqlite", adjacency="replace_one")
    refused(folder, ParameterError, "adjacency='replace_one'", ledger=other)


def test_an_audit_of_another_run_or_without_a_curve_is_refused(folder, made):
    model = made[1]
    audit_of(model, n_clients=3).save(folder / "audit.json")
    refused(folder, ParameterError, "number of clients")
    audit_of(model, finding(curve=())).save(folder / "audit.json")
    refused(folder, ParameterError, "no curve")
    audit_of(model).save(folder / "audit.json")
    content = json.loads((folder / "audit.json").read_text())
    del content["findings"][0]["curve"]
    (folder / "audit.json").write_text(json.dumps(content))
    refused(folder, ParameterError, "audit.json is not an audit")


def test_an_audit_of_other_versions_is_refused(folder, made):
    versions = installed_versions()
    for package in ("secure-fedclust", "opendp", "numpy", "scipy"):
        audit_of(made[1], versions=versions | {package: "0.0.1"}).save(folder / "audit.json")
        made_with = f"{package} {versions[package]}"
        message = f"audited with {package} 0.0.1, the run was made with {made_with}: audit again"
        refused(folder, ParameterError, message)
    audit_of(made[1], versions={}).save(folder / "audit.json")
    refused(folder, ParameterError, "audited with secure-fedclust None")
    audit_of(made[1], versions=versions | {"python": "2.7"}).save(folder / "audit.json")
    assert write_report(folder).exists()


def test_a_run_without_a_claim_needs_no_ledger_and_takes_none(folder):
    unprotected("FKM").result_.save(folder / "result.json")
    write_report(folder)
    assert json.loads((folder / "report.json").read_text())["verdict"] == "NO DP CLAIM"
    with pytest.raises(ParameterError, match="leave the ledger out"):
        write_report(folder, ledger=folder / "ledger.sqlite")


def test_a_run_whose_ledger_was_in_memory_says_so(tmp_path):
    fitted("FKM").result_.save(tmp_path / "result.json")
    write_report(tmp_path)
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["verdict"] == "DP CLAIM" and content["ledger"]["kept"] == "in memory"
    assert "not cross-checked" in content["accountants"]["words"].casefold()


def test_clients_that_keep_their_own_ledgers_are_told_their_anchors(tmp_path):
    privacy, books, handlers = spec(), {}, {}
    rng = np.random.default_rng(0)
    for site, X in sites().items():
        books[site] = Ledger.create(tmp_path / f"{site}.sqlite", epsilon=5, delta=1e-5)
        outlet = Releases(site, privacy, books[site])
        handlers[site] = SynopsisClient(X, privacy, rng.spawn(1)[0], outlet).handle
    model = fit(FKM(2), privacy, clients=InProcessEngine(handlers))
    content = report_of(model.result_)
    assert content["ledger"]["kept"] == "by the clients"
    assert content["ledger"]["book"] is None
    anchors = [row["anchor"] for row in content["clients"]["clients"]]
    assert anchors == ["{}:{}".format(*books[site].anchor()) for site in SITES]
    assert anchors[2] in render(content)
    own = report_of(model.result_, ledger=books["Como"])
    assert own["ledger"]["book"]["n_anchors"] == 1
    assert {row["client"] for row in own["ledger"]["book"]["rows"]} == {"client 3"}
    with pytest.raises(ParameterError, match="no anchor of this ledger"):
        report_of(model.result_, ledger=Ledger.create(None, epsilon=5, delta=1e-5))
    for book in books.values():
        book.close()


def test_a_result_put_together_from_two_runs_is_refused(tmp_path):
    path = new_ledger(tmp_path / "l.sqlite", epsilon=20)
    first, second = fit(FKM(2), spec(), path), fit(FKM(2), spec(), path)
    mixed = dict(second.result_.anchors) | {"Aachen": first.result_.anchors["Aachen"]}
    with pytest.raises(ParameterError, match="several runs"):
        report_of(replace(second.result_, anchors=mixed), ledger=path)


def test_the_command_writes_the_report_and_says_where(folder, capsys):
    assert main(["report", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "differential privacy for each record" in printed and "audit: not audited" in printed
    assert f"report: {folder / 'report.html'}" in printed
    assert main(["report", str(folder), "--names", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] == "DP CLAIM" and said["report"].endswith("report.html")
    assert "Bergen" in (folder / "report.html").read_text()


def test_the_command_says_what_is_wrong_by_its_exit_code(folder, tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    change_ledger(folder / "ledger.sqlite", "UPDATE releases SET mu = mu / 2 WHERE number = 3")
    assert main(["report", str(folder)]) == 6
    assert "row 3" in capsys.readouterr().err


CONFIG = """
algorithm = "FKM"
[parameters]
n_clusters = 2
[privacy]
epsilon = 4.0
delta = 1e-5
ranges = [[-5, 15], [-5, 15]]
[data]
source = "sites.csv"
client_column = "site"
"""


def test_a_run_into_a_folder_leaves_a_report_there(tmp_path, capsys):
    lines = ["site,x,y"]
    for site, X in sites().items():
        lines += [f"{site},{x:.3f},{y:.3f}" for x, y in X]
    (tmp_path / "sites.csv").write_text("\n".join(lines))
    config, out = tmp_path / "run.toml", tmp_path / "out"
    config.write_text(CONFIG)
    assert main(["run", str(config), "--out", str(out)]) == 0
    assert f"report: {out / 'report.html'}" in capsys.readouterr().out
    note = json.loads((out / "run.json").read_text())
    assert note["format"] == "secure_fedclust run 1" and note["ledger"] is None
    assert note["command"] == f"secure-fedclust run {config} --out {out}"
    content = json.loads((out / "report.json").read_text())
    assert content["verdict"] == "DP CLAIM" and content["ledger"]["kept"] == "verified"
    new_ledger(tmp_path / "site.ledger")
    config.write_text('ledger = "site.ledger"\n' + CONFIG)
    assert main(["run", str(config), "--out", str(tmp_path / "two"), "--quiet"]) == 0
    note = json.loads((tmp_path / "two" / "run.json").read_text())
    assert note["ledger"] == str(tmp_path / "site.ledger")
    assert (tmp_path / "two" / "report.html").exists()
