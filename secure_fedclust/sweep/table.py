"""The tables of a sweep: one row a run, and means over seeds with their intervals."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from secure_fedclust.sweep.cells import Cell
from secure_fedclust.sweep.config import SweepConfig
from secure_fedclust.sweep.runs import FIGURES, Outcome, trust_of

LEVEL = 0.95
SETTING = (
    "algorithm",
    "epsilon",
    "protection",
    "trust",
    "calibration",
    "rounds",
    "clients",
    "partition",
)
COLUMNS = (*SETTING, "seed", *FIGURES, "n_clusters_true", "claim", "error")
SUMMARY_COLUMNS = (*SETTING, "figure", "n", "failed", "mean", "sd", "low", "high")

Row = dict[str, Any]


def setting_row(cell: Cell, config: SweepConfig) -> Row:
    """What a run is, without its seed."""
    row: Row = {name: getattr(cell, name) for name in SETTING if name != "trust"}
    row |= {"trust": trust_of(cell, config)}
    row["epsilon"] = "none" if cell.epsilon is None else cell.epsilon
    return {name: row[name] for name in SETTING}


def tidy(
    finished: Mapping[Cell, Outcome], cells: Iterable[Cell], config: SweepConfig, true_k: int
) -> list[Row]:
    """One row a run, always in the same order."""
    rows = []
    for cell in sorted(cells, key=lambda cell: cell.order):
        row = setting_row(cell, config) | {"seed": cell.seed, "n_clusters_true": true_k}
        rows.append({name: (row | finished[cell])[name] for name in COLUMNS})
    return rows


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Mean, standard deviation and t-interval of each figure over the seeds of a setting."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in SETTING), []).append(row)
    summary = []
    for setting, members in groups.items():
        good = [row for row in members if row["error"] is None]
        for figure in FIGURES:
            values = [row[figure] for row in good if row[figure] is not None]
            if not values and good:
                continue  # a baseline in one place sends nothing
            summary.append(
                dict(zip(SETTING, setting, strict=True))
                | {"figure": figure, "n": len(values), "failed": len(members) - len(good)}
                | interval(values)
            )
    return summary


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and its 95% t-interval; of a single value, or of none, only what there is.

    Examples
    --------
    >>> interval([1.0, 2.0, 3.0])["mean"]
    2.0
    >>> interval([1.0])
    {'mean': 1.0, 'sd': None, 'low': None, 'high': None}
    """
    if not values:
        return dict.fromkeys(("mean", "sd", "low", "high"))
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return {"mean": mean, "sd": None, "low": None, "high": None}
    sd = float(np.std(values, ddof=1))
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * sd / math.sqrt(len(values))
    return {"mean": mean, "sd": sd, "low": mean - half, "high": mean + half}


def to_csv(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Rows as CSV; what does not apply is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
