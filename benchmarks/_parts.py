"""Benchmarks that consist of parts."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from _table import Bar, print_bars, print_table

from secure_fedclust import DataError, FederationWarning, PrivacyWarning

Table = tuple[str, Sequence[str], list[list[str]]]
Part = tuple[list[Table], list[Bar]]
Options = TypeVar("Options")


def print_parts(
    parts: Mapping[str, Callable[[Options], Part]],
    wanted: Sequence[str],
    options: Options,
    *,
    check: bool,
) -> int:
    """Print the tables of some parts; 1 if a bar is missed under `check`, 2 without data."""
    bars: list[Bar] = []
    left_out = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.simplefilter("ignore", FederationWarning)
        for name in wanted:
            try:
                tables, its_bars = parts[name](options)
            except DataError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                left_out = True
                continue
            for title, header, rows in tables:
                print_table(title, header, rows)
            bars += its_bars
    met = print_bars(bars)
    return 1 if check and not met else 2 if left_out else 0
