"""How far attacks on releases get, beside what the claim allows.

    python benchmarks/attacks.py [--repeats 5] [--quick] [--check]

Every attack is played on made-up records, through the way out that clients have. "expected" is what
an independent measurement found; its attacker on exact centroids compared by inner products, ours
takes the likelihood ratio and finds more. A figure above "at most" by more than chance is a mistake
in the noise, and fails the check.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from _table import Bar, print_bars, print_table
from tqdm import tqdm

from secure_fedclust import PrivacySpec
from secure_fedclust.audit.attacks.canaries import one_run
from secure_fedclust.audit.attacks.differencing import differencing, singletons
from secure_fedclust.audit.attacks.exhibits import afcl
from secure_fedclust.audit.attacks.membership import membership, unprotected
from secure_fedclust.audit.attacks.rehearsal import Outlets
from secure_fedclust.audit.attacks.rounds import watched_rounds
from secure_fedclust.audit.findings import Finding

DELTA = 1e-5
CONFIDENCE = 0.999
"""Of each interval: there are many, and the check is not to fail by chance."""

UNPROTECTED = {2: (0.973, 0.595), 5: (0.888, 0.236), 20: (0.723, 0.079), 100: (0.612, 0.024)}
"""Size of a cluster: AUC, and members found at 1% false alarms."""

CEILINGS = {0.5: 0.540, 1.0: 0.575, 2.0: 0.639, 4.0: 0.743, 8.0: 0.881}
ONE_RUN = {
    1000: {1.0: 0.20, 2.0: 0.55, 4.0: 1.36, 8.0: 2.66},
    10_000: {1.0: 0.42, 2.0: 0.98, 4.0: 1.93, 8.0: 3.26},
}
ROUNDS = {50: 5.4, 200: 6.5, 1000: 4.4, 5000: 3.1}
"""Records of a client: how many exact rounds of k-means give away."""

HEADER = ("what", "how", "ours", "interval", "expected", "at most")


class Line(NamedTuple):
    """A line of the table, and the bars it is held to."""

    cells: tuple[str, str, str, str, str, str]
    bars: tuple[Bar, ...] = ()


def spec_of(epsilon: float) -> PrivacySpec:
    """A claim about records."""
    return PrivacySpec(epsilon=epsilon, delta=DELTA, bound=1.0)


def below(what: str, how: str, found: Finding, expected: str = "") -> Line:
    """A line for a finding with an interval, which must not be above its ceiling."""
    if found.interval is None or found.ceiling is None:
        raise ValueError(f"{what} has no interval or ceiling")
    low, high = found.interval
    bar = Bar(f"{what}, {how}: low end", low, at_most=found.ceiling)
    cells = (f"{found.figure:.3f}", f"{low:.3f} to {high:.3f}", expected, f"{found.ceiling:.3f}")
    return Line((what, how, *cells), (bar,))


def membership_exact(trials: int, rng: np.random.Generator) -> Iterator[Line]:
    """What exact centroids give away."""
    for size, (auc, found) in UNPROTECTED.items():
        ours = unprotected(size=size, trials=trials, confidence=CONFIDENCE, rng=rng)
        bar = Bar(f"AUC, exact centroids of {size}", ours.auc, auc - 0.02, auc + 0.05)
        low, high = ours.interval
        yield Line(
            (
                "membership, exact: AUC (found at 1%)",
                f"clusters of {size}",
                f"{ours.auc:.3f} ({ours.found:.3f})",
                f"{low:.3f} to {high:.3f}",
                f"{auc:.3f} ({found:.3f})",
                "",
            ),
            (bar,),
        )


def membership_released(trials: int, rng: np.random.Generator) -> Iterator[Line]:
    """What released ones do."""
    what = "membership, released: AUC"
    kinds = {"trials": trials, "confidence": CONFIDENCE, "rng": rng}
    for size in UNPROTECTED:
        found = membership(spec_of(1.0), size=size, **kinds)
        yield below(what, f"epsilon 1, clusters of {size}", found, "0.50 to 0.53")
    for epsilon, ceiling in CEILINGS.items():
        line = below(
            what, f"epsilon {epsilon:g}, clusters of 2", membership(spec_of(epsilon), **kinds)
        )
        stated = Bar(f"AUC ceiling, epsilon {epsilon:g}", float(line.cells[-1]), ceiling, ceiling)
        yield Line(line.cells, (*line.bars, stated))


def canaries(sizes: tuple[int, ...], repeats: int, rng: np.random.Generator) -> Iterator[Line]:
    """Lower bounds on epsilon, the median of several."""
    for m in sizes:
        for epsilon, expected in ONE_RUN[m].items():
            bounds = [one_run(spec_of(epsilon), canaries=m, rng=rng).figure for _ in range(repeats)]
            median, how = float(np.median(bounds)), f"{m:,} canaries, epsilon {epsilon:g}"
            # A bound varies by a quarter of an epsilon and more.
            far = 0.25 + 0.25 * expected
            bars = (
                Bar(f"one run, {how}: highest", max(bounds), at_most=epsilon),
                Bar(f"one run, {how}", median, expected - far, expected + far),
            )
            between = f"{min(bounds):.2f} to {max(bounds):.2f}"
            cells = (f"{median:.2f}", between, f"{expected:.2f}", f"{epsilon:g}")
            yield Line(("one run: lower bound on epsilon", how, *cells), bars)


def reconstruction(
    trials: int, sizes: tuple[int, ...], runs: int, rng: np.random.Generator
) -> Iterator[Line]:
    """What sums give away."""
    for n in sizes:
        outlets = Outlets(spec_of(1.0))
        exact, released = watched_rounds(outlets, n_records=n, runs=runs, rng=rng)
        what, how = "rounds of k-means: records found", f"{n:,} records"
        bar = Bar(f"exact rounds, {how}", exact, ROUNDS[n] / 2.5, ROUNDS[n] * 2.5)
        yield Line((what, f"exact, {how}", f"{exact:.1f}", "", f"{ROUNDS[n]:.1f}", ""), (bar,))
        bar = Bar(f"released rounds, {how}", released, at_most=0)
        yield Line((what, f"epsilon 1, {how}", f"{released:.1f}", "", "0.0", "0"), (bar,))
    for epsilon in (1.0, 8.0):
        for what, attack in (("singletons", singletons), ("differencing", differencing)):
            found = attack(spec_of(epsilon), trials=trials, confidence=CONFIDENCE, rng=rng)
            yield below(f"{what}: yes or no named rightly", f"epsilon {epsilon:g}", found)


def exhibit(rng: np.random.Generator) -> Iterator[Line]:
    """AFCL's message."""
    found = afcl(rng=rng)
    error, seeds = float(found.more["largest error"]), float(found.more["seeds that are records"])
    bars = (
        Bar("AFCL: share of records found", found.figure, at_least=1),
        Bar("AFCL: largest error", error, at_most=1e-15),
        Bar("AFCL: seeds that are records", seeds, at_least=10),
    )
    what = "AFCL: records found (error), seeds"
    ours = f"{found.figure * found.trials:.0f} ({error:.1e}), {seeds:.0f}"
    yield Line((what, "500 records, 10 seeds", ours, "", "500 (1.1e-16), 10", ""), bars)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if a bar is missed under --check."""
    parser = argparse.ArgumentParser(description="How far attacks on releases get.")
    parser.add_argument("--repeats", type=int, default=5, help="one-run audits each (default 5)")
    parser.add_argument("--quick", action="store_true", help="fewer trials, wider intervals")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is not met")
    given = parser.parse_args(arguments)
    if given.repeats < 1:
        parser.error(f"--repeats {given.repeats}: at least 1")
    rng = np.random.default_rng(0)
    trials, runs = (1000, 20) if given.quick else (5000, 60)
    parts = [
        membership_exact(trials, rng),
        membership_released(trials, rng),
        canaries(tuple(ONE_RUN)[: 1 if given.quick else 2], given.repeats, rng),
        reconstruction(trials, tuple(ROUNDS)[: 2 if given.quick else 4], runs, rng),
        exhibit(rng),
    ]
    lines = [line for part in tqdm(parts, "attacks", file=sys.stderr) for line in part]
    print_table("Attacks", HEADER, [line.cells for line in lines])
    all_met = print_bars([bar for line in lines for bar in line.bars])
    return 1 if given.check and not all_met else 0


if __name__ == "__main__":
    sys.exit(main())
