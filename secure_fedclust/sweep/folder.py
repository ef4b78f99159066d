"""The folder of a sweep: what it is of, and the runs that are finished.

``cells.jsonl`` has a line for each finished run, written and synced to disk before the next one is
counted; a line that a crash has torn is the last one, and is not counted. ``sweep.json`` says what
the runs are of, so that those of two sweeps do not end up in one table.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from secure_fedclust import __version__
from secure_fedclust.errors import ParameterError
from secure_fedclust.sweep.cells import Cell, cells_of
from secure_fedclust.sweep.config import SweepConfig
from secure_fedclust.sweep.runs import Outcome, check_outcome

FORMAT = "secure_fedclust sweep 2"
LIBRARIES = ("numpy", "scipy", "scikit-learn", "numba", "opendp")
OTHER_FOLDER = "give another folder, or make it the same again"


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


class SweepFolder:
    """A folder that holds one sweep, and is open to one process at a time.

    Parameters
    ----------
    path : Path
        Made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = path / "cells.jsonl"
        self._remembered = path / "sweep.json"

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """The file of finished runs, for this process only."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = self._lines.open("ab+")
        except OSError as error:
            raise ParameterError(f"{self.path} cannot be written to: {error.strerror}") from error
        with file:
            _lock(file, self.path)
            file.truncate(len(self._whole_lines()))
            yield file

    def require_same(self, config: SweepConfig, digest: str) -> None:
        """Refuse another sweep than the one that the folder is of, unless it only adds runs."""
        if self._remembered.exists():
            self._compare(_identity(digest), config)
        elif self._whole_lines():
            raise ParameterError(
                f"{self.path} has runs, but no sweep.json that says of what: give another folder"
            )

    def remember(self, config: SweepConfig, digest: str) -> None:
        """Write down what the folder is of."""
        self.require_same(config, digest)
        content = {
            **_identity(digest),
            "libraries": libraries_of(config),
            "config": config.to_dict(),
        }
        write_text(self._remembered, json.dumps(content, indent=1) + "\n")

    def finished(self) -> dict[Cell, Outcome]:
        """The runs of all whole lines."""
        found: dict[Cell, Outcome] = {}
        numbers: dict[Cell, int] = {}
        for number, line in enumerate(self._whole_lines().splitlines(), start=1):
            try:
                cell, outcome = _run_of(line)
            except ParameterError as error:
                raise ParameterError(
                    f"{self._lines}, line {number}, is not a run ({error}): remove it, and it will "
                    "be made again"
                ) from error
            # The same line twice does no harm.
            if found.setdefault(cell, outcome) != outcome:
                raise ParameterError(
                    f"{self._lines}, lines {numbers[cell]} and {number}, are of the same run "
                    f"({cell}), with different figures: remove the one that is not its own, or "
                    "both, and it will be made again"
                )
            numbers.setdefault(cell, number)
        return found

    def append(self, file: IO[bytes], cell: Cell, outcome: Outcome) -> None:
        """Keep a run for good."""
        line = json.dumps({"cell": asdict(cell), "outcome": outcome})
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())

    def _whole_lines(self) -> bytes:
        try:
            text = self._lines.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except OSError as error:
            raise ParameterError(f"{self._lines} cannot be read: {error.strerror}") from error
        return text[: text.rfind(b"\n") + 1]

    def _read_remembered(self) -> dict[str, Any]:
        try:
            kept: dict[str, Any] = json.loads(self._remembered.read_text(encoding="utf-8"))
            if not str(kept["format"]).startswith("secure_fedclust sweep "):
                raise ValueError("another format")
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ParameterError(
                f"{self._remembered} is not of a sweep: give another folder"
            ) from error
        return kept

    def _compare(self, identity: Mapping[str, str], config: SweepConfig) -> None:
        kept = self._read_remembered()
        for key in ("format", "version"):
            if kept.get(key) != identity[key]:
                raise ParameterError(
                    f"{self.path} holds a sweep of {key} {kept.get(key)!r}, and this one is of "
                    f"{identity[key]!r}: give another folder"
                )
        if not all(isinstance(kept.get(key), dict) for key in ("libraries", "config")):
            raise ParameterError(f"{self._remembered} is not of a sweep: give another folder")
        libraries = kept["libraries"]
        # Only what both use: another baseline or protection may need one more.
        others = [
            f"{name} {libraries[name]} (here {version})"
            for name, version in libraries_of(config).items()
            if libraries.get(name, version) != version
        ]
        if others:
            raise ParameterError(
                f"{self.path} holds a sweep that was made with {', '.join(others)}, and one table "
                "is of one environment: give another folder, or install what it was made with"
            )
        before = SweepConfig.from_dict(kept["config"])
        differences = list(_differences(before, config))
        if not differences:
            lost = set(cells_of(before)) - set(cells_of(config))
            if lost:
                differences.append(
                    f"{len(lost)} runs are not in it, e.g. {min(lost, key=lambda cell: cell.order)}"
                )
        if not differences and kept.get("data_sha256") != identity["data_sha256"]:
            differences.append("the data set has the same name, but other records or labels")
        if differences:
            raise ParameterError(
                f"{self.path} holds another sweep, to which this one would have to add only: "
                f"{'; '.join(differences)}: {OTHER_FOLDER}"
            )


def libraries_of(config: SweepConfig) -> dict[str, str]:
    """Versions of the libraries that the figures of a sweep come from."""
    names = [*LIBRARIES]
    if "ckks" in config.grid.protection:
        names.append("tenseal")
    if "diffprivlib" in config.baselines:
        names.append("diffprivlib")
    found = {}
    for name in names:
        # That one is missing is said where it is needed.
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _run_of(line: bytes) -> tuple[Cell, Outcome]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ParameterError("it cannot be read as JSON") from error
    if not isinstance(content, dict) or set(content) != {"cell", "outcome"}:
        raise ParameterError("it has not cell and outcome")
    cell = Cell.from_dict(content["cell"])
    check_outcome(cell, content["outcome"])
    return cell, content["outcome"]


def _identity(digest: str) -> dict[str, str]:
    return {"format": FORMAT, "version": __version__, "data_sha256": digest}


def _differences(before: SweepConfig, now: SweepConfig) -> Iterator[str]:
    """What both have, and have differently."""
    for name in ("sampler", "data", "privacy"):
        yield from _differing(name, getattr(before, name), getattr(now, name))
    for name in ("parameters", "scale"):
        old, new = getattr(before, name), getattr(now, name)
        for system in old:
            if system in new:
                yield from _differing(f"{name}.{system}", old[system], new[system])


def _differing(name: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted({*before, *now}):
            yield from _differing(f"{name}.{key}", before.get(key), now.get(key))
    # A file has lists where a caller may have tuples.
    elif json.dumps(before) != json.dumps(now) and before != now:
        yield f"{name} was {before!r} and is {now!r}"


def _lock(file: IO[bytes], folder: Path) -> None:
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ParameterError(
            f"another sweep is running in {folder}: wait for it, or give another folder"
        ) from error
