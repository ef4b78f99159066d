"""A whole sweep on S1, killed half way and gone on with: how long it takes, and that it agrees.

    python benchmarks/sweep.py [--data-dir DIR] [--jobs N] [--seeds 10] [--out DIR] [--check]

Five systems, six epsilons, with and without masking, ten seeds: 600 runs of ten clients. The first
command is killed (SIGKILL) when half of them are finished, the second makes the others. Seconds are
those of both, with everything that starting twice costs.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _table import Bar, print_bars, print_table

TOML = """
seeds = {seeds}
[grid]
algorithm = ["FKM", "KFed", "FeCA", "FedGEM", "GOLD"]
epsilon = [0.1, 0.25, 0.5, 1, 2, 4]
protection = ["none", "masking"]
clients = 10
[parameters]
FKM = {{ n_clusters = 15 }}
KFed = {{ n_clusters = 15, n_local_clusters = 15 }}
FeCA = {{ n_clusters = 15 }}
FedGEM = {{ n_local_clusters = 15 }}
GOLD = {{ n_clusters = 15 }}
[scale]
FedGEM = 30_000     # a cluster's standard deviation
GOLD = 240_000      # a feature's
[privacy]
delta = 1e-5
ranges = "data"
public_size = "data"
[data]
benchmark = "s1"
"""
RUNS_OF_A_SEED = 5 * 6 * 2
SECONDS_AT_MOST = 300.0


def command(folder: Path, jobs: int, data_dir: str | None) -> list[str]:
    program = "import sys; from secure_fedclust.cli import main; sys.exit(main())"
    options = ["--jobs", str(jobs), "--quiet", "--out", str(folder / "out")]
    options += [] if data_dir is None else ["--data-dir", data_dir]
    return [sys.executable, "-c", program, "sweep", str(folder / "sweep.toml"), *options]


def finished_lines(folder: Path) -> list[bytes]:
    """Whole lines, without one that is being written."""
    path = folder / "out" / "cells.jsonl"
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def killed_half_way(words: list[str], folder: Path, half: int) -> list[bytes]:
    """Start the sweep, kill it when half of the runs are there, and return their lines."""
    process = subprocess.Popen(words)
    while len(finished_lines(folder)) < half:
        if process.poll() is not None:
            raise SystemExit(f"the sweep ended by itself, with exit code {process.returncode}")
        time.sleep(0.05)
    process.kill()
    process.wait()
    return [line for line in finished_lines(folder) if line.endswith(b"\n")]


def _same(kept: list[bytes], lines: list[bytes]) -> int:
    """How many lines are where they were, byte for byte."""
    return sum(before == after for before, after in zip(kept, lines, strict=False))


def table_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "out" / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def measure(folder: Path, jobs: int, seeds: int, data_dir: str | None) -> list[Bar]:
    (folder / "sweep.toml").write_text(TOML.format(seeds=seeds))
    words = command(folder, jobs, data_dir)
    n_runs = seeds * RUNS_OF_A_SEED
    started = time.perf_counter()
    kept = killed_half_way(words, folder, n_runs // 2)
    first = time.perf_counter() - started
    subprocess.run(words, check=True)
    seconds = time.perf_counter() - started
    lines = finished_lines(folder)
    cells = {json.dumps(json.loads(line)["cell"]) for line in lines}
    rows = table_rows(folder)
    by_system = {
        name: [float(row["seconds"]) for row in rows if row["algorithm"] == name]
        for name in dict.fromkeys(row["algorithm"] for row in rows)
    }
    print_table(
        f"{n_runs} runs on S1 with {jobs} jobs; load of the machine {os.getloadavg()[0]:.1f}",
        ["what", "seconds"],
        [
            ["until half of them, and killed", f"{first:.1f}"],
            ["the others, tables and pictures", f"{seconds - first:.1f}"],
            *([f"mean of a run of {n}", f"{sum(v) / len(v):.3f}"] for n, v in by_system.items()),
        ],
    )
    return [
        Bar(f"seconds of {n_runs} runs", seconds, at_most=SECONDS_AT_MOST),
        Bar("runs in the table", len(rows), n_runs, n_runs),
        Bar("different runs among the lines", len(cells), len(lines), len(lines)),
        Bar("lines kept as they were", _same(kept, lines), len(kept), len(kept)),
        Bar("runs that failed", sum(row["error"] != "" for row in rows), at_most=0),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if a bar is missed under --check."""
    parser = argparse.ArgumentParser(description="A sweep on S1, killed and gone on with.")
    parser.add_argument("--data-dir", help="folder with the data sets (*.npz)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seeds", type=int, default=10, help="how many (default 10)")
    parser.add_argument("--out", type=Path, help="folder to keep; a new one, removed, if left out")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is not met")
    given = parser.parse_args(arguments)
    if given.out is not None:
        given.out.mkdir(parents=True)
        bars = measure(given.out, given.jobs, given.seeds, given.data_dir)
    else:
        with tempfile.TemporaryDirectory() as folder:
            bars = measure(Path(folder), given.jobs, given.seeds, given.data_dir)
    met = print_bars(bars)
    return 1 if given.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
