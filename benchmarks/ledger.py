"""What a charge to the privacy ledger takes, against a bare commit that is as safe.

    python benchmarks/ledger.py [--dir DIR] [--charges 1000] [--repeats 9] [--check]

A bare commit is one row of two columns in a transaction of its own, in a SQLite file with the
same settings (WAL, synchronous=FULL). Charges and bare commits take turns of fifty in files of
their own, so that a busy moment of the disk hits both; the ratio is the median over repeats. On a
disk in memory nothing is synced, and it says nothing: name a folder on a real one with --dir.
"""

import argparse
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _table import Bar, print_bars, print_table
from tqdm import tqdm

from secure_fedclust.privacy.ledger import Charge, Ledger

AT_MOST = 1.5
CLIENTS = 10
TURN = 50
HEADER = ("what", "how", "median time", "a piece", "ratio")


def charge(number: int) -> Charge:
    """One of many small releases of ten clients."""
    return Charge(
        client=f"client {number % CLIENTS}",
        run="benchmark",
        step=number // CLIENTS,
        message="fkm/sums",
        formula="ball sums",
        inputs={"bound": 1.0, "weight": 0.5},
        sensitivity=4096.0,
        sigma=4096e6,
        mu=1e-6,
        slack=1e-12,
        coordinates=30,
    )


def measure(folder: Path, n: int) -> list[float]:
    """Seconds for n bare commits, n charges, and n charges of which a round's share a commit."""
    bare = sqlite3.connect(folder / "bare.sqlite", isolation_level=None)
    bare.execute("PRAGMA journal_mode = WAL")
    bare.execute("PRAGMA synchronous = FULL")
    bare.execute("CREATE TABLE bare (number INTEGER PRIMARY KEY, content TEXT)")
    singles, batches = (
        Ledger.create(folder / f"{name}.sqlite", epsilon=1.0, delta=1e-5)
        for name in ("singles", "batches")
    )

    def commit(numbers: range) -> None:
        for number in numbers:
            bare.execute("BEGIN IMMEDIATE")
            bare.execute("INSERT INTO bare VALUES (?, ?)", (number, "fkm/sums"))
            bare.execute("COMMIT")

    def one_by_one(numbers: range) -> None:
        for number in numbers:
            singles.charge(charges[number])

    def by_round(numbers: range) -> None:
        for start in numbers[::CLIENTS]:
            batches.charge(charges[start : start + CLIENTS])

    charges = [charge(number) for number in range(n)]
    jobs: list[Callable[[range], None]] = [commit, one_by_one, by_round]
    seconds = [0.0] * len(jobs)
    for start in range(0, n, TURN):
        for i, job in enumerate(jobs):
            began = time.perf_counter()
            job(range(start, start + TURN))
            seconds[i] += time.perf_counter() - began
    bare.close()
    for ledger in (singles, batches):
        ledger.verify()
        ledger.close()
    return seconds


def main(arguments: list[str] | None = None) -> int:
    """Print the times; 1 if the bar is missed under --check."""
    parser = argparse.ArgumentParser(description="Time of charges to the privacy ledger.")
    parser.add_argument("--dir", default=".", help="folder on the disk to measure (default .)")
    parser.add_argument("--charges", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--repeats", type=int, default=9, help="how often to measure (default 9)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the bar is not met")
    given = parser.parse_args(arguments)
    if given.repeats < 1 or given.charges < TURN or given.charges % TURN:
        parser.error(f"give at least 1 repeat, and a multiple of {TURN} charges")
    times = []
    for _ in tqdm(range(given.repeats), "ledger", file=sys.stderr):
        with tempfile.TemporaryDirectory(dir=given.dir) as folder:
            times.append(measure(Path(folder), given.charges))
    names = ("bare commits", "charges", f"charges, {CLIENTS} clients a commit")
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    ratios = [statistics.median(row[i] / row[0] for row in times) for i in range(len(names))]
    rows = [
        (
            f"{given.charges:,} on disk",
            name,
            f"{seconds * 1e3:.0f} ms",
            f"{seconds / given.charges * 1e6:.0f} us",
            f"{ratio:.2f}",
        )
        for name, seconds, ratio in zip(names, medians, ratios, strict=True)
    ]
    print_table("Ledger", HEADER, rows)
    met = print_bars([Bar("charges over bare commits", ratios[1], at_most=AT_MOST)])
    return 1 if given.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
