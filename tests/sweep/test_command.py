import json
import os

import pytest

from secure_fedclust.cli import main
from secure_fedclust.sweep.workers import WorkerDied

TOML = """
seeds = [3, 5]
baselines = ["none"]
[grid]
algorithm = "KFed"
epsilon = [1, 8]
clients = 4
[parameters.KFed]
n_clusters = 3
[privacy]
delta = 1e-4
ranges = [[-14, 14], [-14, 14]]
[data]
generator = "rmin_blobs"
n_samples = 400
n_features = 2
n_clusters = 3
r_min = 6
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "sweep.toml").write_text(TOML)
    return tmp_path / "sweep.toml"


def run(path, *options):
    return main(["sweep", str(path), "--out", str(path.parent / "out"), "--jobs", "1", *options])


def test_a_sweep_prints_its_summary_and_where_the_rest_is(path, capsys):
    assert run(path) == 0
    printed = capsys.readouterr()
    header, *rows = printed.out.splitlines()
    assert header.split()[:4] == ["algorithm", "epsilon", "protection", "trust"]
    assert "calibration" not in header and "ARI low" in header
    assert [row.split()[1] for row in rows[:3]] == ["none", "1", "8"]
    assert "NO DP CLAIM" in rows[3] and "6 runs, of which 6 now" in rows[4]
    assert str(path.parent / "out") in rows[5]
    assert run(path) == 0
    assert "6 runs, of which 0 now" in capsys.readouterr().out


def test_every_reason_why_there_is_no_claim_is_printed(path, capsys):
    text = TOML.replace("[[-14, 14], [-14, 14]]", '"data"').replace(
        "= 3\n[priv", '= "truth"\n[priv'
    )
    path.write_text('sampler = "secure"\n' + text.replace("epsilon = [1, 8]", "epsilon = 8"))
    assert run(path) == 0
    reasons = [line for line in capsys.readouterr().out.splitlines() if "NO DP CLAIM" in line]
    assert [line.split(": ", 1)[0] for line in reasons] == ["NO DP CLAIM", "NO DP CLAIM for KFed"]


def test_the_command_uses_all_processors(path, monkeypatch):
    given = []

    def spy(*arguments, jobs, **options):
        given.append(jobs)
        raise WorkerDied("enough")

    monkeypatch.setattr("secure_fedclust.sweep.sweep", spy)
    with pytest.raises(SystemExit):
        main(["sweep", str(path), "--out", str(path.parent / "out")])
    assert given == [os.cpu_count()]


def test_json_is_all_that_is_printed(path, capsys):
    assert run(path, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["epsilon"] for row in rows] == ["none", 1.0, 8.0]
    assert {"ARI", "ARI low", "ARI high", "clusters", "KB up", "seconds", "n"} <= set(rows[0])


def test_quiet_prints_nothing(path, capsys):
    # One epsilon: where there are two, noise decides whether there is a warning that ARI falls.
    path.write_text(TOML.replace("epsilon = [1, 8]", "epsilon = 8"))
    assert run(path, "--quiet") == 0
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == ""


def test_what_cannot_be_run_is_said_with_exit_code_2(path, capsys):
    path.write_text(TOML + "nonsense = 1\n")
    assert run(path) == 2
    said = capsys.readouterr().err
    assert "nonsense" in said and "Traceback" not in said
    path.write_text(TOML.replace("clients = 4", 'clients = 2\nprotection = "masking"'))
    assert run(path) == 2
    assert "no run was made" in capsys.readouterr().err


def test_a_process_that_dies_is_said_with_exit_code_1(path, capsys, monkeypatch):
    def die(*given, **options):
        raise WorkerDied("a process ended")

    monkeypatch.setattr("secure_fedclust.sweep.sweep", die)
    with pytest.raises(SystemExit) as stopped:
        run(path)
    assert stopped.value.code == 1
    assert capsys.readouterr().err == "secure-fedclust: a process ended\n"


def test_data_that_are_not_there_are_exit_code_3(path, capsys):
    path.write_text(TOML.split("[data]")[0] + '[data]\nbenchmark = "s1"\n')
    assert run(path, "--data-dir", str(path.parent)) == 3
    assert "no data sets" in capsys.readouterr().err
