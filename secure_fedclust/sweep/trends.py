"""More epsilon should not mean less utility: where it does, somebody should look."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtr

from secure_fedclust.sweep.table import SETTING, Row

ALPHA = 0.05
WORTH_A_WORD = 0.01
"""Falls of ARI that are smaller are passed over, however sure."""
FIXED = tuple(name for name in SETTING if name != "epsilon")


class _Comparison(NamedTuple):
    setting: dict[str, Any]
    low: float
    high: float
    before: float
    after: float
    n: int
    p: float


def falling(rows: Sequence[Row]) -> list[str]:
    """Say where a larger epsilon gave a significantly lower ARI.

    One-sided t-tests of the differences seed by seed, as runs of one seed share partition and
    start, for all pairs of epsilons of a setting; corrected after Holm for all of them together.
    """
    return [_sentence(found) for found in _significant(_comparisons(rows))]


def _comparisons(rows: Sequence[Row]) -> list[_Comparison]:
    groups: dict[tuple[Any, ...], dict[float, dict[int, float]]] = {}
    for row in rows:
        if row["epsilon"] != "none" and row["ari"] is not None and math.isfinite(row["ari"]):
            by_epsilon = groups.setdefault(tuple(row[name] for name in FIXED), {})
            by_epsilon.setdefault(row["epsilon"], {})[row["seed"]] = row["ari"]
    found = []
    for setting, by_epsilon in groups.items():
        for low, high in combinations(sorted(by_epsilon), 2):
            seeds = sorted(set(by_epsilon[low]) & set(by_epsilon[high]))
            if len(seeds) < 2:
                continue
            before = np.array([by_epsilon[low][seed] for seed in seeds])
            after = np.array([by_epsilon[high][seed] for seed in seeds])
            found.append(
                _Comparison(
                    dict(zip(FIXED, setting, strict=True)),
                    low,
                    high,
                    float(before.mean()),
                    float(after.mean()),
                    len(seeds),
                    _p_of_a_fall(before, after),
                )
            )
    return found


def _p_of_a_fall(before: Any, after: Any) -> float:
    difference = after - before
    spread = float(np.std(difference, ddof=1))
    # Differences that are all the same leave the test without a spread to compare with.
    if spread <= 1e-12:
        return 1.0 if difference.mean() >= 0 else 0.0
    n = len(difference)
    return float(stdtr(n - 1, difference.mean() / (spread / math.sqrt(n))))


def _significant(comparisons: list[_Comparison]) -> list[_Comparison]:
    found = []
    ordered = sorted(comparisons, key=lambda comparison: comparison.p)
    for i, comparison in enumerate(ordered):
        # Said so that NaN is never significant.
        if not comparison.p <= ALPHA / (len(ordered) - i):
            break
        if comparison.before - comparison.after >= WORTH_A_WORD:
            found.append(comparison)
    return sorted(found, key=lambda c: (tuple(map(str, c.setting.values())), c.low, c.high))


def _sentence(found: _Comparison) -> str:
    setting = found.setting
    names = [setting["algorithm"], f"protection {setting['protection']}"]
    for name, text in (("calibration", "{}"), ("rounds", "{} rounds"), ("clients", "{} clients")):
        if setting[name] is not None:
            names.append(text.format(setting[name]))
    if setting["partition"] is not None:
        names.append(setting["partition"])
    return (
        f"{', '.join(names)}: ARI falls from {found.before:.3f} at epsilon {found.low:g} to "
        f"{found.after:.3f} at epsilon {found.high:g} (means of {found.n} seeds, p = {found.p:.2g} "
        "before Holm's correction): more noise should not help, so look at the parameters"
    )
