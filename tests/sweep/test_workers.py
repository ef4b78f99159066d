import csv
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe, get_context

import numpy as np
import pytest

from secure_fedclust import ParameterError
from secure_fedclust.cli import main
from secure_fedclust.sweep import SweepConfig, sweep, workers
from secure_fedclust.sweep.cells import cells_of

TOML = """
seeds = 4
[grid]
algorithm = "FedGEM"
epsilon = ["none", 2, 4]
clients = 4
[parameters.FedGEM]
n_local_clusters = 3
[privacy]
delta = 1e-4
ranges = [[-14, 14], [-14, 14]]
[data]
generator = "rmin_blobs"
n_samples = 1200
n_features = 2
n_clusters = 3
r_min = 6
"""
N_RUNS = 12


def arguments(folder, jobs):
    return ["sweep", f"{folder}/sweep.toml", "--out", f"{folder}/out", "--jobs", str(jobs)]


def command(folder):
    program = "import sys; from secure_fedclust.cli import main; sys.exit(main())"
    return [sys.executable, "-c", program, *arguments(folder, 2)]


def start(folder, seeds=4):
    (folder / "sweep.toml").write_text(TOML.replace("seeds = 4", f"seeds = {seeds}"))
    return subprocess.Popen(  # noqa: S603
        command(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_runs(folder, number, process):
    lines = folder / "out" / "cells.jsonl"
    for _ in range(3000):
        if lines.exists() and lines.read_bytes().count(b"\n") >= number:
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    raise AssertionError("the sweep has not begun")


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def table(folder):
    with (folder / "out" / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="looks processes up in /proc")
def test_a_sweep_that_is_killed_leaves_no_process_and_goes_on_where_it_was(tmp_path, capsys):
    process = start(tmp_path)
    wait_for_runs(tmp_path, 3, process)
    started = children(process.pid)
    assert len(started) >= 2
    process.kill()
    process.communicate()
    for _ in range(250):
        if all(map(gone, started)):
            break
        time.sleep(0.02)
    assert all(map(gone, started)), "workers end with the process that started them"
    lines = tmp_path / "out" / "cells.jsonl"
    kept = lines.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    n_kept = kept.count(b"\n")
    assert 3 <= n_kept < N_RUNS
    assert main(arguments(tmp_path, 1)) == 0
    assert f"{N_RUNS} runs, of which {N_RUNS - n_kept} now" in capsys.readouterr().out
    assert lines.read_bytes().startswith(kept)
    cells = [json.dumps(json.loads(line)["cell"]) for line in lines.read_text().splitlines()]
    assert len(cells) == len(set(cells)) == N_RUNS == len(table(tmp_path))


def test_ctrl_c_says_how_to_go_on(tmp_path):
    process = start(tmp_path, seeds=100)  # so that it is not over before the signal comes
    wait_for_runs(tmp_path, 1, process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "the same command goes on" in said and "Traceback" not in said


def test_processes_side_by_side_find_what_one_alone_finds(content, tmp_path):
    content["grid"]["epsilon"] = "none"
    config = SweepConfig.from_dict(content)
    before = dict(os.environ)
    rows = [sweep(config, tmp_path / str(jobs), jobs=jobs).rows for jobs in (1, 2)]
    for row in (*rows[0], *rows[1]):
        del row["seconds"]
    assert rows[0] == rows[1]
    assert dict(os.environ) == before, "that workers have one thread is no business of others"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_data_that_change_while_a_sweep_runs_stop_it(content, tmp_path, monkeypatch):
    # A process that only loads data may be forked, which takes no time.
    monkeypatch.setattr(workers, "get_context", lambda kind: get_context("fork"))
    content |= {"seeds": 1, "data": {"benchmark": "set"}}
    content["grid"]["epsilon"] = 8
    rng = np.random.default_rng(0)
    X, y = rng.uniform(-10, 10, (400, 2)), np.arange(400) % 3
    np.savez(tmp_path / "set.npz", X=X, y=y)

    def change(*progress):
        np.savez(tmp_path / "set.npz", X=X, y=(y + 1) % 3)

    config = SweepConfig.from_dict(content)
    out = tmp_path / "out"
    with pytest.raises(ParameterError, match=r"data were changed while the sweep .*other records"):
        sweep(config, out, jobs=2, data_dir=tmp_path, on_progress=change)
    assert (out / "cells.jsonl").read_bytes() == b""


def test_a_function_call_stays_in_its_process_unless_told_otherwise(content, tmp_path, monkeypatch):
    monkeypatch.setattr("secure_fedclust.sweep.study.run_side_by_side", None)
    content |= {"seeds": 1}
    assert sweep(SweepConfig.from_dict(content), tmp_path).n_run == 2


class Dead:
    """A worker's process that has ended."""

    exitcode = -9

    def join(self):
        pass


def test_a_process_that_dies_is_named_with_its_run(content):
    [cell, *_] = cells_of(SweepConfig.from_dict(content))
    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises(workers.WorkerDied, match=r"exit code -9\) in the run KFed, ep") as raised:
        workers._receive(workers._Worker(Dead(), ours, cell))
    assert 'needs `if __name__ == "__main__":`' in str(raised.value)
