"""How much of the truth an audit finds, and how long it takes.

    python benchmarks/audit.py [--check] [--only ideal,released,time]

Lower bounds at 95% each, delta 1e-5, and so many trials in each of two worlds. "ideal" takes scores
from two normal distributions, as a perfect Gaussian mechanism would give them; "released" plays the
game on what is released, on the pair of docs/proofs/sensitivity.md for means with a floor. The
reference figures choose the threshold with half of the trials; we choose it with a quarter.
"""

import argparse
import os
import sys
import time

import numpy as np
from _table import Bar, print_bars, print_table
from tqdm import tqdm

from secure_fedclust import FKM, PrivacySpec
from secure_fedclust.audit.attacks.bounds import LowerBounds, lower_bounds
from secure_fedclust.audit.attacks.game import release_once
from secure_fedclust.audit.attacks.pairs import floor_pair
from secure_fedclust.privacy.accounting import mu_of

DELTA = 1e-5
EPSILONS = (1.0, 2.0, 4.0, 8.0)
TRIALS = (1000, 5000, 20_000, 100_000)
REPEATS = 15
REFERENCE = {
    1.0: ((0.00, 0.02), (0.20, 0.71), (0.37, 0.76), (0.50, 0.90)),
    2.0: ((0.46, 1.20), (0.56, 1.47), (0.87, 1.74), (1.15, 1.87)),
    4.0: ((0.99, 2.53), (1.40, 3.31), (2.00, 3.71), (2.31, 3.87)),
    8.0: ((2.25, 6.25), (3.12, 7.20), (3.57, 7.60), (4.29, 7.81)),
}
"""Medians of fifteen, Clopper-Pearson and Gaussian."""


def medians(found: list[LowerBounds]) -> tuple[float, float]:
    return (
        float(np.median([bounds.epsilon for bounds in found])),
        float(np.median([bounds.gaussian_epsilon for bounds in found])),
    )


def ideal() -> list[Bar]:
    rng = np.random.default_rng(0)
    rows, bars = [], []
    for epsilon in EPSILONS:
        mu = mu_of(epsilon, DELTA)
        cells = []
        for trials, reference in zip(TRIALS, REFERENCE[epsilon], strict=True):
            found = medians(
                [
                    lower_bounds(rng.normal(size=trials), rng.normal(mu, size=trials), DELTA, 0.95)
                    for _ in range(REPEATS)
                ]
            )
            cells.append("{:.2f}/{:.2f} ({:.2f}/{:.2f})".format(*found, *reference))
        rows.append([f"{epsilon:g}", *cells])
        bars.append(Bar(f"epsilon {epsilon:g}, 100,000 trials", found[1], at_least=0.85 * epsilon))
    header = ["true epsilon", *(f"{trials:,}" for trials in TRIALS)]
    title = "Ideal scores: Clopper-Pearson/Gaussian (reference)"
    print_table(title, header, rows)
    return bars


def released() -> list[Bar]:
    rows, bars = [], []
    for epsilon in tqdm(EPSILONS, "released", file=sys.stderr):
        spec = PrivacySpec(epsilon=epsilon, delta=DELTA, ranges=[(-1, 1)] * 2)
        query, without, present = floor_pair(20, 1.0, "add_remove")
        cells = []
        for trials, repeats in ((1000, 5), (5000, 1)):
            found = [
                lower_bounds(*release_once(query, without, present, spec, trials), DELTA, 0.95)
                for _ in range(repeats)
            ]
            cells.append("{:.2f}/{:.2f}".format(*medians(found)))
            bars.append(
                Bar(
                    f"epsilon {epsilon:g}, {trials} trials, largest bound",
                    max(bounds.gaussian_epsilon for bounds in found),
                    at_most=1.1 * epsilon,
                )
            )
        rows.append([f"{epsilon:g}", *cells])
    header = ["true epsilon", "1,000 (median of 5)", "5,000 (once)"]
    print_table("Played on releases: Clopper-Pearson/Gaussian", header, rows)
    return bars


def duration() -> list[Bar]:
    rows, bars = [], []
    for protection in ("none", "masking", "ckks"):
        spec = PrivacySpec(
            epsilon=1.0,
            delta=DELTA,
            ranges=[(-1, 1)] * 2,
            public_size=500,
            protection=protection,
        )
        started = time.perf_counter()
        audit = FKM(15, privacy=spec).audit(n_clients=10, trials=5000, jobs=os.cpu_count() or 1)
        seconds = time.perf_counter() - started
        game = audit.findings[0]
        rows.append([protection, f"{seconds:.1f}", audit.verdict, f"{game.figure:.2f}"])
        bars.append(Bar(f"audit of 10 clients, 5,000 trials, {protection}", seconds, at_most=120))
    header = ["protection", "seconds", "verdict", "epsilon at least"]
    print_table("Audit of FKM with 15 clusters, 10 clients, 5,000 trials, epsilon 1", header, rows)
    return bars


PARTS = {"ideal": ideal, "released": released, "time": duration}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a bar is not met")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    arguments = parser.parse_args()
    bars = [bar for name in arguments.only.split(",") for bar in PARTS[name]()]
    met = print_bars(bars)
    return 0 if met or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
