"""How fast the parts that must be fast are, as ratios measured in one run where that is possible.

    python benchmarks/speed.py [--data-dir DIR] [--repeats 5] [--check]

Times that are compared are taken in turns, and medians are compared, so that a busy moment of the
machine hits both sides. Parts that need data sets are left out where there are none.
"""

import argparse
import statistics
import subprocess
import sys
from functools import partial

import numpy as np
from _table import Bar, in_turns, print_bars, print_table
from sklearn.cluster._k_means_lloyd import lloyd_iter_chunked_dense
from sklearn.utils._openmp_helpers import _openmp_effective_n_threads
from threadpoolctl import threadpool_limits

from secure_fedclust import GOLD, DataError, FedGEM, PrivacySpec
from secure_fedclust.algorithms.feca import server_aggregate
from secure_fedclust.algorithms.fedgem import client_final_radii
from secure_fedclust.algorithms.grouping import overlapping_groups
from secure_fedclust.algorithms.lloyd import assign_and_sum
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.datasets import (
    benchmark_names,
    cluster_subset_partition,
    load_benchmark,
    non_icd_partition,
    rmin_blobs,
)

UNPROTECTED = PrivacySpec.none(reason="benchmark")
HEADER = ("what", "how", "median time", "ratio")

LLOYD_AT_MOST = 1.3
GROUPING_AT_MOST = 15
FEDGEM_SECONDS = 10
GOLD_SECONDS = 60
PRIVATE_SECONDS = 20
IMPORT_SECONDS = 1
HEAVY = ("torch", "sklearn", "scipy", "numba", "pandas")

Row = tuple[str, str, str, str]
Part = tuple[list[Row], list[Bar]]


def local_step(repeats: int) -> Part:
    """Assign and sum against an iteration of scikit-learn's Lloyd, 1e6 records of 16 features.

    The reference is the compiled iteration that ``KMeans.fit`` repeats, with new centres, on as
    many threads as there, and as there with BLAS held to one thread and buffers made beforehand.
    Seeding and the checking of input are in neither.
    """
    n, d, k = 1_000_000, 16, 16
    X = np.random.default_rng(0).normal(size=(n, d))
    centers = X[:k].copy()
    means, sizes, shift = np.zeros((k, d)), np.zeros(k), np.zeros(k)
    ones, labels = np.ones(n), np.empty(n, dtype=np.int32)
    buffers = (ones, centers, means, sizes, labels, shift, _openmp_effective_n_threads())

    def reference() -> None:
        lloyd_iter_chunked_dense(X, *buffers, update_centers=True)

    with threadpool_limits(limits=1, user_api="blas"):
        ours, theirs = in_turns(
            "local step", 5 * repeats, partial(assign_and_sum, X, centers), reference
        )
    what, ratio = "local step, 1,000,000 x 16, K=16", ours / theirs
    rows = [
        (what, "scikit-learn", f"{theirs * 1e3:.0f} ms", ""),
        (what, "ours", f"{ours * 1e3:.0f} ms", f"{ratio:.2f}"),
    ]
    return rows, [Bar("local step over scikit-learn's iteration", ratio, at_most=LLOYD_AT_MOST)]


def server_grouping(repeats: int) -> Part:
    """Ten times the balls, in ten features, with radii as FedGEM's clients choose them.

    Crowded: clients grow in number and hold the same ten clusters. Spread: the clusters grow in
    number too, and each client holds ten of them. The radius decides how hard the work is. Spread
    clusters at v=.5 touch more of each other the more they are, and balls that nearly touch are
    what an index in ten dimensions cannot tell apart quickly: that ratio is shown, without a bar.
    """
    rows: list[Row] = []
    bars: list[Bar] = []
    few, many = 10_000, 100_000
    for regime, v in (("crowded", 0.5), ("crowded", 1.0), ("spread", 0.1), ("spread", 0.5)):
        sizes = [balls(n, regime, v) for n in (few, many)]
        work = {
            "FedGEM": [partial(overlapping_groups, *size) for size in sizes],
            "FeCA": [partial(server_aggregate, *size[:2], n_clusters=100) for size in sizes],
        }
        for name, jobs in work.items():
            what = f"{name}'s server, {regime} balls, v={v:g}"
            quick, slow = in_turns(what, repeats, *jobs)
            rows += [
                (what, f"{few:,}", f"{quick * 1e3:.0f} ms", ""),
                (what, f"{many:,}", f"{slow * 1e3:.0f} ms", f"{slow / quick:.1f}"),
            ]
            if (regime, v) != ("spread", 0.5):
                figure = Bar(f"{what}, ten times as many", slow / quick, at_most=GROUPING_AT_MOST)
                bars.append(figure)
    return rows, bars


def balls(n: int, regime: str, v: float) -> tuple[Floats, Floats, Ints]:
    """Centres, radii and owners of what n / 10 clients send, 500 records and ten clusters each.

    Local centres are off their cluster's by what 50 records of variance 1 leave. Clusters lie in a
    box that grows with their number.
    """
    rng = np.random.default_rng(0)
    d, held, n_records, n_clients = 10, 10, 500, n // 10
    n_clusters = held if regime == "crowded" else n // 100
    half = 10.0 * (n_clusters / held) ** (1 / d)
    clusters = rng.uniform(-half, half, (n_clusters, d))
    hands = [rng.choice(n_clusters, held, replace=False) for _ in range(n_clients)]
    centers = clusters[np.stack(hands)] + rng.normal(
        0, (n_records / held) ** -0.5, (n_clients, held, d)
    )
    radii = [np.sqrt(client_final_radii(local, n_records, v)) for local in centers]
    owners = np.repeat(np.arange(n_clients), held)
    return centers.reshape(-1, d), np.concatenate(radii), owners


def fedgem_run(repeats: int, data_dir: str | None) -> Part:
    """Ten rounds over the MNIST embeddings, 70,000 x 10, at a hundred clients."""
    data = load_benchmark("mnist_vae_emb10", data_dir)
    parts = cluster_subset_partition(data.X, data.y, 100, seed=0)
    clients = [data.X[part] for part in parts]
    held = [len(np.unique(data.y[part])) for part in parts]
    model = FedGEM(held, n_rounds=10, final_radius=1.0, privacy=UNPROTECTED, random_state=0)
    [seconds] = in_turns("FedGEM", min(repeats, 3), partial(model.fit, clients))
    what = "FedGEM, MNIST embeddings, 100 clients, 10 rounds"
    return [(what, "fit", f"{seconds:.2f} s", "")], [
        Bar(f"{what}, s", seconds, at_most=FEDGEM_SECONDS)
    ]


def private_run(repeats: int) -> Part:
    """Private FedGEM, 10 clients x 2,000 records x 8 features, 5 rounds, secure noise."""
    X, y, _ = rmin_blobs(20_000, 8, 10, 6.0, seed=0)
    parts = cluster_subset_partition(X, y, 10, seed=0)
    clients = [X[part] for part in parts]
    held = [len(np.unique(y[part])) for part in parts]
    spec = PrivacySpec(epsilon=2.0, delta=1e-5, ranges=[(-20, 20)] * 8, public_size=2000)
    what = "private FedGEM, 10 x 2,000 x 8, 5 rounds"
    rows, bars = [], []
    for calibration in ("synopsis", "sums", "floor"):
        model = FedGEM(held, n_rounds=5, calibration=calibration, privacy=spec, random_state=0)
        [seconds] = in_turns("private FedGEM", min(repeats, 3), partial(model.fit, clients))
        rows.append((what, calibration, f"{seconds:.2f} s", ""))
        bars.append(Bar(f"{what}, {calibration}, s", seconds, at_most=PRIVATE_SECONDS))
    return rows, bars


def gold_run(repeats: int, data_dir: str | None) -> Part:
    """GOLD on Letter, 20,000 x 16, at eight clients; compilation apart."""
    data = load_benchmark("letter", data_dir)
    X = (data.X - data.X.mean(axis=0)) / data.X.std(axis=0)
    clients = [X[part] for part in non_icd_partition(X, data.y, 8, seed=0)]
    model = GOLD(26, privacy=UNPROTECTED, random_state=0)
    few = GOLD(2, privacy=UNPROTECTED, random_state=0)
    [compilation] = in_turns("GOLD, first call", 1, partial(few.fit, [X[:40]]))
    [seconds] = in_turns("GOLD", 1, partial(model.fit, clients))
    what = f"GOLD, Letter, 8 clients ({sum(map(len, clients)):,} records)"
    rows = [
        (what, "first call (compiles, or loads what was)", f"{compilation:.2f} s", ""),
        (what, "fit", f"{seconds:.1f} s", ""),
    ]
    return rows, [Bar(f"{what}, s", seconds, at_most=GOLD_SECONDS)]


def import_time(repeats: int) -> Part:
    """Import in a fresh interpreter, and which heavy packages that brings along."""
    measure = (
        "import sys, time; start = time.perf_counter(); {0}; print(time.perf_counter() - start); "
        "print(len(set({1}) & set(sys.modules)))"
    )

    def fresh(statement: str) -> tuple[float, int]:
        command = [sys.executable, "-c", measure.format(statement, HEAVY)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, heavy = done.stdout.split()
        return float(seconds), int(heavy)

    package = [fresh("import secure_fedclust") for _ in range(repeats)]
    estimator = [fresh("from secure_fedclust import FKM") for _ in range(repeats)]
    seconds = statistics.median(seconds for seconds, _ in package)
    with_estimator = statistics.median(seconds for seconds, _ in estimator)
    heavy = package[0][1]
    rows = [
        ("import in a fresh interpreter", "secure_fedclust", f"{seconds * 1e3:.0f} ms", ""),
        ("import in a fresh interpreter", "an estimator", f"{with_estimator * 1e3:.0f} ms", ""),
    ]
    bars = [
        Bar("import of secure_fedclust in s", seconds, at_most=IMPORT_SECONDS),
        Bar(f"how many of {', '.join(HEAVY)} that imports", heavy, at_most=0),
    ]
    return rows, bars


def main(arguments: list[str] | None = None) -> int:
    """Print the times; 1 if a bar is missed under --check."""
    parser = argparse.ArgumentParser(description="Times of the parts that must be fast.")
    parser.add_argument("--data-dir", help="folder with the data sets (*.npz)")
    parser.add_argument("--repeats", type=int, default=5, help="how often to measure (default 5)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is not met")
    given = parser.parse_args(arguments)
    if given.repeats < 1:
        parser.error(f"--repeats {given.repeats}: at least 1")
    parts = [import_time, local_step, server_grouping, private_run]
    try:
        benchmark_names(given.data_dir)
        parts += [partial(run, data_dir=given.data_dir) for run in (fedgem_run, gold_run)]
    except DataError as error:
        print(f"FedGEM and GOLD are left out: {error}", file=sys.stderr)
    rows: list[Row] = []
    bars: list[Bar] = []
    for part in parts:
        more_rows, more_bars = part(given.repeats)
        rows += more_rows
        bars += more_bars
    print_table("Speed", HEADER, rows)
    all_met = print_bars(bars)
    return 1 if given.check and not all_met else 0


if __name__ == "__main__":
    sys.exit(main())
