"""Pictures of a sweep: utility, number of clusters, bytes and time against epsilon."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    StrMethodFormatter,
)

from secure_fedclust.arrays import Floats
from secure_fedclust.sweep.config import CENTRAL, SweepConfig
from secure_fedclust.sweep.data import LabelledData
from secure_fedclust.sweep.notes import footnotes
from secure_fedclust.sweep.table import Row

# Okabe and Ito's colours, which colour-blind readers tell apart.
COLORS = {
    "FKM": "#0072B2",
    "KFed": "#E69F00",
    "FeCA": "#009E73",
    "FedGEM": "#CC79A7",
    "GOLD": "#D55E00",
    "central": "#000000",
    "diffprivlib": "#707070",
}
DASHES: dict[str, Any] = {
    "local": (0, (4, 1.5)),
    "distributed": "solid",
    "local+distributed": (0, (6, 1.5, 1, 1.5)),
    "central": (0, (1, 1)),
    "none": (0, (1, 2.5)),
}
MARKERS = {"none": "o", "masking": "s", "ckks": "^"}
CENTRAL_MARKER = "D"
FACETS = ("partition", "clients", "calibration", "rounds")
MANY_LINES = 4
"""With more systems than this a panel has only one protection."""

COLUMNS_AT_MOST = 4


@dataclass(frozen=True)
class Picture:
    """A figure of the table, and how it is drawn."""

    name: str
    figure: str
    label: str
    unit: float = 1.0
    log: bool = False
    least: float = 0.0
    most: float = np.inf


PICTURES = (
    Picture("utility", "ari", "adjusted Rand index", least=-0.5, most=1.0),
    Picture("n_clusters", "n_clusters", "clusters found"),
    Picture("bytes", "bytes_up", "kB that a client sends (log scale)", unit=1000, log=True),
    Picture("seconds", "seconds", "seconds of a run, all parties (log scale)", log=True),
)


def draw_all(
    folder: Path, summary: Sequence[Row], config: SweepConfig, data: LabelledData
) -> tuple[Path, ...]:
    """Draw every picture as PNG and SVG, and say where they are."""
    notes = footnotes(config, data.n_features, summary)
    written = []
    with mpl.rc_context({"svg.hashsalt": "sweep", "font.size": 9}):
        for picture in PICTURES:
            figure = draw(picture, summary, config, notes, data.n_clusters)
            for ending in ("png", "svg"):
                path = folder / f"{picture.name}.{ending}"
                metadata = {"Date": None} if ending == "svg" else None
                figure.savefig(path, dpi=200, metadata=metadata)
                written.append(path)
    return tuple(written)


def draw(
    picture: Picture, summary: Sequence[Row], config: SweepConfig, notes: str, true_k: int
) -> Figure:
    """One panel for each value of what the grid varies beside system and epsilon."""
    settings = [row for row in summary if row["figure"] == picture.figure]
    rows = [row for row in settings if row["n"]]
    panels = list(_panels(rows, config))
    columns = min(len(panels), COLUMNS_AT_MOST)
    lines = -(-len(panels) // columns)
    size = (2.3 + max(3.1 * columns, 4.4), 0.9 + 2.9 * lines)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, picture, [row for row in rows if _belongs(row, panel)], true_k)
        title = ", ".join(_title(key, value) for key, value in panel.items())
        axis.set_title("\n".join(textwrap.wrap(title, 38)), fontsize=9)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis in axes[:, 0]:
        axis.set_ylabel(picture.label)
    _set_epsilons(axes, settings)
    figure.legend(
        handles=_legend(rows, picture),
        loc="outside right upper",
        frameon=False,
        fontsize=8,
        handlelength=3.2,
    )
    width = int(size[0] * 18.5)
    text = "\n".join(line for note in notes.splitlines() for line in textwrap.wrap(note, width))
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7, color="#404040")
    return figure


def _panels(rows: Sequence[Row], config: SweepConfig) -> Iterator[dict[str, Any]]:
    keys = list(FACETS)
    if len(config.grid.algorithm) > MANY_LINES:
        keys.append("protection")
    values: dict[str, list[Any]] = {}
    for key in keys:
        # In the order of the file.
        found = [v for v in getattr(config.grid, key) or () if any(row[key] == v for row in rows)]
        if len(found) > 1:
            values[key] = found
    for combination in product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def _belongs(row: Row, panel: Mapping[str, Any]) -> bool:
    """What a key of the panel does not apply to is in all panels; so are baselines."""
    for key, value in panel.items():
        everywhere = row[key] is None or (
            key == "protection" and row["trust"] in ("none", "central")
        )
        if not everywhere and row[key] != value:
            return False
    return True


def _title(key: str, value: Any) -> str:
    return {"clients": f"{value} clients", "partition": str(value)}.get(key, f"{key} {value}")


def _draw_panel(axis: Axes, picture: Picture, rows: Sequence[Row], true_k: int) -> None:
    axis.grid(color="#e6e6e6", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xscale("log")
    if picture.log:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_locator(NullLocator())
    if picture.figure == "n_clusters":
        axis.axhline(true_k, color="black", linewidth=0.8)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    series: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        series.setdefault((row["algorithm"], row["protection"], row["trust"]), []).append(row)
    dodges = _dodges(rows, [key for key in series if key[2] != "none"])
    for key, members in series.items():
        system, protection, trust = key
        color, dashes = COLORS[system], DASHES[trust]
        if trust == "none":
            for row in members:
                axis.axhline(
                    row["mean"] / picture.unit, color=color, linestyle=dashes, linewidth=1.3
                )
            continue
        members = sorted(members, key=lambda row: row["epsilon"])
        x = np.array([row["epsilon"] * dodges[key] for row in members])
        middle = np.array([row["mean"] for row in members]) / picture.unit
        low, high = (
            np.array([np.nan if row[end] is None else row[end] for row in members]) / picture.unit
            for end in ("low", "high")
        )
        # An interval may reach to where no value can be.
        low = np.maximum(low, middle / 10 if picture.log else picture.least)
        high = np.minimum(high, picture.most)
        known = ~np.isnan(low)
        style: dict[str, Any] = {
            "color": color,
            "marker": CENTRAL_MARKER if trust == "central" else MARKERS[protection],
            "markersize": 4,
        }
        axis.plot(x, middle, linestyle=dashes, linewidth=1.4, markevery=known.tolist(), **style)
        if not known.all():
            axis.plot(x[~known], middle[~known], linestyle="none", markerfacecolor="white", **style)
        _draw_intervals(axis, x, low, high, color)


def _draw_intervals(axis: Axes, x: Floats, low: Floats, high: Floats, color: str) -> None:
    """A band where neighbours have an interval, and a bar where one has it alone."""
    known = ~np.isnan(low)
    beside = np.zeros_like(known)
    beside[1:] |= known[:-1]
    beside[:-1] |= known[1:]
    banded, alone = known & beside, known & ~beside
    if banded.any():
        axis.fill_between(x, low, high, where=banded, color=color, alpha=0.15, linewidth=0)
    if alone.any():
        axis.vlines(x[alone], low[alone], high[alone], color=color, alpha=0.4, linewidth=4)


def _dodges(rows: Sequence[Row], keys: Sequence[Any]) -> dict[Any, float]:
    """Factors that keep apart, by a little, the markers of lines that lie on each other."""
    epsilons = [row["epsilon"] for row in rows if row["epsilon"] != "none"] or [1.0]
    step = max(np.log(max(epsilons) / min(epsilons)), 0.5) * 0.01
    return {key: float(np.exp(step * (i - (len(keys) - 1) / 2))) for i, key in enumerate(keys)}


def _set_epsilons(axes: Any, rows: Sequence[Row]) -> None:
    epsilons = sorted({row["epsilon"] for row in rows if row["epsilon"] != "none"})
    every = max(1, -(-len(epsilons) // 8))
    for axis in axes.flat:
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xticks(epsilons[::every], [f"{epsilon:g}" for epsilon in epsilons[::every]])
        axis.tick_params(labelbottom=True)
    for axis in axes[-1]:
        axis.set_xlabel("epsilon (log scale)" if epsilons else "no privacy")


def _legend(rows: Sequence[Row], picture: Picture) -> list[Line2D]:
    """Colours are systems; dashes and markers say who is trusted, and by what."""
    systems = dict.fromkeys(row["algorithm"] for row in rows)
    handles = [
        Line2D([], [], color=COLORS[name], linewidth=3, label=name)
        for name in systems
        if name not in CENTRAL
    ]
    styles = {(row["trust"], row["protection"]) for row in rows}
    for trust, protection in sorted(
        styles, key=lambda style: (list(DASHES).index(style[0]), style[1])
    ):
        if trust in ("none", "central"):
            continue
        label = f"{trust.replace('+', ' + ')} trust"
        label += f"\n({protection})" if protection != "none" else ""
        handles.append(_sample("#404040", DASHES[trust], MARKERS[protection], label))
    if any(row["trust"] == "none" and row["algorithm"] not in CENTRAL for row in rows):
        handles.append(_sample("#404040", DASHES["none"], "", "no privacy\n(colour of system)"))
    if "central" in systems:
        handles.append(
            _sample(COLORS["central"], DASHES["none"], "", "central k-means,\nno privacy")
        )
    if "diffprivlib" in systems:
        label = "diffprivlib, central\n(see note on epsilon)"
        handles.append(_sample(COLORS["diffprivlib"], DASHES["central"], CENTRAL_MARKER, label))
    if picture.figure == "n_clusters":
        handles.append(_sample("black", "solid", "", "true number"))
    return handles


def _sample(color: str, dashes: Any, marker: str, label: str) -> Line2D:
    return Line2D(
        [],
        [],
        color=color,
        linestyle=dashes,
        marker=marker,
        markersize=4,
        linewidth=1.4,
        label=label,
    )
