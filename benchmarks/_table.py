"""Tables of text, the bars that a benchmark is held to, and times that are taken in turns."""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm


@dataclass(frozen=True)
class Bar:
    """A figure and the least or the most that it may be."""

    what: str
    figure: float
    at_least: float = -np.inf
    at_most: float = np.inf

    @property
    def met(self) -> bool:
        """Whether the figure is between the two, as printed: to three significant digits."""
        return self.at_least <= float(f"{self.figure:.3g}") <= self.at_most

    def __str__(self) -> str:
        limits = []
        if np.isfinite(self.at_least):
            limits.append(f"at least {self.at_least:.3g}")
        if np.isfinite(self.at_most):
            limits.append(f"at most {self.at_most:.3g}")
        state = "met    " if self.met else "NOT MET"
        return f"{state}  {self.what}: {self.figure:.3g} ({', '.join(limits)})"


def mean_sd(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation, as the papers print them."""
    return f"{np.mean(values):.{digits}f}±{np.std(values):.{digits}f}"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be; a cell that repeats the one above is left blank."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    above: Sequence[str] = [""] * len(header)
    for row in [header, ["-" * width for width in widths], *rows]:
        shown = [" " if i == 0 and row[0] == above[0] else cell for i, cell in enumerate(row)]
        cells = zip(shown, widths, strict=True)
        print("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
        above = row


def print_bars(bars: Sequence[Bar]) -> bool:
    """List the bars and say whether all are met."""
    print("\nBars")
    for bar in bars:
        print(f"  {bar}")
    return all(bar.met for bar in bars)


def in_turns(title: str, repeats: int, *jobs: Callable[[], object]) -> list[float]:
    """Median seconds of each job; they take turns."""
    times: list[list[float]] = [[] for _ in jobs]
    for _ in tqdm(range(repeats), title, file=sys.stderr):
        for job, taken in zip(jobs, times, strict=True):
            start = time.perf_counter()
            job()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]
