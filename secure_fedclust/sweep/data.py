"""The labelled data of a sweep: loaded once, divided among clients again for every seed."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from secure_fedclust import datasets
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.config import divide
from secure_fedclust.errors import ParameterError, SecureFedClustError
from secure_fedclust.sweep.cells import Cell
from secure_fedclust.sweep.config import GENERATORS, SweepConfig

KEPT = 4
"""Federations that are kept: runs that share one come one after the other."""


@dataclass(frozen=True, eq=False)
class Federation:
    """Records by client, and what nobody knows: the truth."""

    clients: list[Floats] = field(repr=False)
    truth: list[Ints] = field(repr=False)

    @cached_property
    def mean_size(self) -> int:
        """Records that a client holds, on average."""
        return round(sum(map(len, self.clients)) / len(self.clients))

    @cached_property
    def largest(self) -> int:
        """Records of the client that has the most."""
        return max(map(len, self.clients))

    @cached_property
    def held(self) -> list[int]:
        """True clusters that each client holds."""
        return [len(np.unique(labels)) for labels in self.truth]


class LabelledData:
    """The records of a sweep, with true labels.

    Parameters
    ----------
    config : SweepConfig
    data_dir : path, optional
        Where benchmark sets are, as for `load_benchmark`.
    """

    def __init__(self, config: SweepConfig, data_dir: str | Path | None = None) -> None:
        self.X, self.y = _load(config.data, data_dir)
        self.n_clusters = len(np.unique(self.y))
        self.n_features = self.X.shape[1]
        self._partitions = config.grid.partition
        self._divided = lru_cache(KEPT)(self._divide)

    def ranges(self) -> list[tuple[float, float]]:
        """Least and largest value of each feature: taken from the data, and not private."""
        ends = zip(self.X.min(axis=0), self.X.max(axis=0), strict=True)
        return [(float(low), float(high)) for low, high in ends]

    def federation(self, cell: Cell) -> Federation:
        """The clients of a run."""
        if cell.clients is None or cell.partition is None:
            raise ParameterError(f"{cell}: a baseline has no clients")
        return self._divided(cell.clients, cell.partition, cell.seed)

    def digest(self) -> str:
        """A hash of records and labels, to know them again."""
        text = hashlib.sha256(repr((self.X.shape, self.X.dtype.str)).encode())
        text.update(np.ascontiguousarray(self.X).tobytes())
        text.update(np.ascontiguousarray(self.y).tobytes())
        return text.hexdigest()

    def _divide(self, clients: int, partition: str, seed: int) -> Federation:
        name, arguments = self._partitions[partition]
        arguments = dict(arguments) | {"n_clients": clients, "seed": seed}
        records, truth = divide(self.X, self.y, name, arguments)
        return Federation(list(records.values()), list(truth.values()))


def _load(table: Mapping[str, Any], data_dir: str | Path | None) -> tuple[Floats, Ints]:
    if "benchmark" in table:
        benchmark = datasets.load_benchmark(table["benchmark"], data_dir)
        return benchmark.X, benchmark.y
    arguments = {key: value for key, value in table.items() if key != "generator"}
    try:
        X, y, _ = GENERATORS[table["generator"]](**arguments)
    except SecureFedClustError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ParameterError(f"[data] generator = {table['generator']!r}: {error}") from error
    return X, y
