"""What commands print: tables, JSON, and a bar while they work."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from secure_fedclust.errors import ParameterError


def print_rows(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Rows of a table, or as JSON, or nothing, as the options say."""
    if arguments.json:
        print(json.dumps(rows, indent=1))
    elif not arguments.quiet:
        print_table(list(rows[0]), [list(row.values()) for row in rows])


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns as wide as what is in them."""
    cells = [list(header)] + [[_format(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class ProgressBar:
    """One bar, reused by each system in turn; none where nobody watches."""

    def __init__(self, quiet: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(disable=quiet or None, unit=" replies", leave=False)
        self._name: str | None = None

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, name: str, done: int, total: int) -> None:
        """How far something with a name has come."""
        if name != self._name or done < self._bar.n:
            self._bar.reset(total)
        self._name, self._bar.total = name, total
        self._bar.set_description(name, refresh=False)
        self._bar.update(done - self._bar.n)


def make_folder(path: Path) -> None:
    """The folder of ``--out``, with its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError(f"--out {path} cannot be made: {error.strerror}") from error


def known(name: str, given: int | None, read: int | None) -> int:
    """A number that an option or the file must give."""
    number = read if given is None else given
    if number is None:
        raise ParameterError(f"the file does not say how many {name} there are: give --{name} N")
    return number
