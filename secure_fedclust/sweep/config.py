"""The file that describes a sweep: read, checked key by key, and brought into one form."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args

from secure_fedclust import datasets
from secure_fedclust.config import (
    ALGORITHMS,
    N_CLIENTS,
    PARTITIONS,
    algorithm_of,
    parameter_names,
    read_toml,
    refuse_unknown,
    table_of,
)
from secure_fedclust.errors import ParameterError
from secure_fedclust.estimators import Calibration
from secure_fedclust.parameters import check_choice, check_counts, check_positive
from secure_fedclust.privacy.terms import PROTECTIONS

GENERATORS: dict[str, Callable[..., Any]] = {
    "rmin_blobs": datasets.rmin_blobs,
    "fkm_grid": datasets.fkm_grid,
    "stochastic_balls": datasets.stochastic_balls,
}
BASELINES = ("none", "central", "diffprivlib")
CENTRAL = ("central", "diffprivlib")
"""Baselines that need all records in one place, and know nothing of clients."""

TRUTH = "truth"
"""In place of a number of clusters: the true one, of all records or of each client."""

DATA = "data"
"""In place of what must be public: as it is in the data, as if that were public."""

AUTO = "auto"
"""In place of a number of rounds: the system's own choice."""

KEYS = {"seeds", "sampler", "baselines", "grid", "parameters", "scale", "privacy", "data"}
GRID_KEYS = {"algorithm", "epsilon", "protection", "calibration", "rounds", "clients", "partition"}
PRIVACY_KEYS = {
    "delta",
    "ranges",
    "bound",
    "center",
    "unit",
    "adjacency",
    "colluders",
    "min_survivors",
    "active_server",
    "public_size",
}
GRIDDED = {"n_rounds": "rounds", "calibration": "calibration"}
"""Parameters of systems that the grid can vary, and what it calls them."""


@dataclass(frozen=True)
class Grid:
    """What is crossed with what. None: not varied, and left to the parameters of the systems.

    Attributes
    ----------
    algorithm : tuple of str
    epsilon : tuple of float or None
        None is a run without differential privacy.
    protection : tuple of str
    calibration : tuple of str, or None
    rounds : tuple of int or "auto", or None
    clients : tuple of int
    partition : mapping of label to (name, arguments)
    """

    algorithm: tuple[str, ...]
    epsilon: tuple[float | None, ...]
    protection: tuple[str, ...]
    calibration: tuple[str, ...] | None
    rounds: tuple[int | str, ...] | None
    clients: tuple[int, ...]
    partition: Mapping[str, tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class SweepConfig:
    """A sweep, each key of which is known and of the right kind.

    Whether its combinations can be run is another question, which `sweep` asks before it runs any.

    Attributes
    ----------
    grid : Grid
    seeds : tuple of int
        Of partition and algorithm. Noise has none.
    sampler : {"fast", "secure"}
    baselines : tuple of str
    parameters : mapping of system to parameters
    scale : mapping of system to float
        What records and ranges are divided by before the system sees them.
    privacy : mapping
        The arguments of `PrivacySpec` that all private runs share.
    data : mapping

    Examples
    --------
    >>> config = SweepConfig.from_dict({
    ...     "seeds": 3,
    ...     "grid": {"algorithm": "FKM", "epsilon": [0.5, 2]},
    ...     "parameters": {"FKM": {"n_clusters": 16}},
    ...     "privacy": {"delta": 1e-5, "ranges": "data", "public_size": "data"},
    ...     "data": {"generator": "fkm_grid"},
    ... })
    >>> config.grid.epsilon, config.seeds, config.sampler
    ((0.5, 2.0), (0, 1, 2), 'fast')
    """

    grid: Grid
    seeds: tuple[int, ...]
    sampler: str
    baselines: tuple[str, ...]
    parameters: Mapping[str, Mapping[str, Any]]
    scale: Mapping[str, float]
    privacy: Mapping[str, Any]
    data: Mapping[str, Any]

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a TOML file, or raise an error that names what to change."""
        return cls.from_dict(read_toml(Path(path), KEYS))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Read what a file holds, or what `to_dict` gave."""
        refuse_unknown(content, KEYS, "the sweep")
        grid = _grid(table_of(content, "grid"))
        baselines = _words("baselines", content.get("baselines", []), BASELINES)
        if "diffprivlib" in baselines and set(grid.epsilon) == {None}:
            raise ParameterError("baselines: diffprivlib needs an epsilon in [grid]")
        sampler = content.get("sampler", "fast")
        check_choice("sampler", sampler, ("fast", "secure"))
        return cls(
            grid=grid,
            seeds=_seeds(content.get("seeds")),
            sampler=sampler,
            baselines=baselines,
            parameters=_parameters(content, grid, baselines),
            scale=_scale(content, grid),
            privacy=_privacy(content, grid),
            data=_data(table_of(content, "data")),
        )

    def taken_from_data(self, algorithm: str) -> tuple[str, ...]:
        """What the private runs of a system are told that only the data or their labels say.

        No run that is told any of it has a claim to differential privacy.
        """
        public = [name for name in ("ranges", "public_size") if self.privacy.get(name) == DATA]
        given = self.parameters[algorithm].items()
        known = [name for name, value in given if isinstance(value, str) and value == TRUTH]
        return (*public, *known)

    def to_dict(self) -> dict[str, Any]:
        """The sweep in plain values, the same for files that mean the same."""
        grid = self.grid
        varied = {
            "algorithm": list(grid.algorithm),
            "epsilon": ["none" if epsilon is None else epsilon for epsilon in grid.epsilon],
            "protection": list(grid.protection),
            "calibration": None if grid.calibration is None else list(grid.calibration),
            "rounds": None if grid.rounds is None else list(grid.rounds),
            "clients": list(grid.clients),
            "partition": [
                {"name": name, **arguments} for name, arguments in grid.partition.values()
            ],
        }
        return {
            "seeds": list(self.seeds),
            "sampler": self.sampler,
            "baselines": list(self.baselines),
            "grid": {key: values for key, values in varied.items() if values is not None},
            "parameters": {name: dict(table) for name, table in self.parameters.items()},
            "scale": dict(self.scale),
            "privacy": dict(self.privacy),
            "data": dict(self.data),
        }


def partition_label(name: str, arguments: Mapping[str, Any]) -> str:
    """A partition and its arguments in one line.

    Examples
    --------
    >>> partition_label("dirichlet", {"alpha": 0.3})
    'dirichlet(alpha=0.3)'
    """
    if not arguments:
        return name
    return f"{name}({', '.join(f'{key}={_short(arguments[key])}' for key in sorted(arguments))})"


def _short(value: Any) -> str:
    # 1 and 1.0 are the same alpha.
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value, default=str)


def _grid(table: dict[str, Any]) -> Grid:
    refuse_unknown(table, GRID_KEYS, "[grid]")
    for key in ("algorithm", "epsilon"):
        if key not in table:
            raise ParameterError(f"[grid] needs {key}")
    algorithms = _listed(table, "algorithm")
    kinds = {name: algorithm_of(name) for name in algorithms}
    for parameter, key in GRIDDED.items():
        users = [name for name, kind in ALGORITHMS.items() if parameter in parameter_names(kind)]
        if key in table and not set(users) & set(kinds):
            raise ParameterError(
                f"[grid] {key} is for {', '.join(users)} only: leave it out, or add one to "
                "algorithm"
            )
    rounds = _listed(table, "rounds") if "rounds" in table else None
    for number in rounds or ():
        if number != AUTO:
            check_counts(**{"[grid] rounds": number})
    clients = _listed({"clients": N_CLIENTS} | table, "clients")
    for number in clients:
        check_counts(**{"[grid] clients": number})
    protections = _listed({"protection": "none"} | table, "protection")
    calibrations = None
    if "calibration" in table:
        words = get_args(Calibration)
        calibrations = _words("[grid] calibration", _listed(table, "calibration"), words)
    partitions = [_partition(item) for item in _listed({"partition": "iid"} | table, "partition")]
    labels = [partition_label(*item) for item in partitions]
    _refuse_twice("partition", labels)
    return Grid(
        algorithm=tuple(algorithms),
        epsilon=_unique("epsilon", [_epsilon(value) for value in _listed(table, "epsilon")]),
        protection=_words("[grid] protection", protections, PROTECTIONS),
        calibration=calibrations,
        rounds=None if rounds is None else tuple(rounds),
        clients=tuple(clients),
        partition=dict(zip(labels, partitions, strict=True)),
    )


def _listed(table: Mapping[str, Any], key: str) -> list[Any]:
    """The values of a key, which is one or a list, without repetition."""
    values = table[key] if isinstance(table[key], list) else [table[key]]
    if not values:
        raise ParameterError(f"[grid] {key} is empty: give a value, or leave it out")
    _refuse_twice(key, values)
    return values


def _unique(key: str, values: list[Any]) -> tuple[Any, ...]:
    _refuse_twice(key, values)
    return tuple(values)


def _refuse_twice(key: str, values: list[Any]) -> None:
    for i, value in enumerate(values):
        if value in values[:i]:
            raise ParameterError(f"[grid] {key} has {value!r} twice")


def _epsilon(value: Any) -> float | None:
    if value == "none":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterError(f'[grid] epsilon = {value!r}: give numbers, or "none"')
    return float(value)


def _partition(value: Any) -> tuple[str, dict[str, Any]]:
    table = {"name": value} if isinstance(value, str) else value
    name = table.get("name") if isinstance(table, dict) else None
    if not isinstance(name, str) or name not in PARTITIONS:
        raise ParameterError(
            f"[grid] partition = {value!r}: give one of {', '.join(PARTITIONS)}, or with arguments "
            '{ name = "dirichlet", alpha = 0.3 }'
        )
    arguments = {key: item for key, item in table.items() if key != "name"}
    for key, where in (("n_clients", "clients in [grid]"), ("seed", "seeds")):
        if key in arguments:
            raise ParameterError(f"[grid] partition: {key} is given by {where}")
    return name, arguments


def _words(key: str, values: Any, words: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ParameterError(f"{key} = {values!r}: give a list of {', '.join(words)}")
    for value in values:
        check_choice(key, value, words)
    return tuple(dict.fromkeys(values))


def _seeds(value: Any) -> tuple[int, ...]:
    if isinstance(value, list):
        good = [isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value]
        if not value or not all(good) or len(set(value)) < len(value):
            raise ParameterError(f"seeds = {value!r}: give different whole numbers of at least 0")
        return tuple(value)
    check_counts(seeds=value)
    return tuple(range(value))


def _parameters(
    content: Mapping[str, Any], grid: Grid, baselines: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    given = table_of(content, "parameters") if "parameters" in content else {}
    central = [name for name in CENTRAL if name in baselines]
    refuse_unknown(given, {*grid.algorithm, *central}, "[parameters]")
    tables: dict[str, dict[str, Any]] = {}
    for name in grid.algorithm:
        table = table_of(given, name) if name in given else {}
        kind = ALGORITHMS[name]
        refuse_unknown(
            table, parameter_names(kind) - {"sampler", "random_state"}, f"[parameters.{name}]"
        )
        for parameter, key in GRIDDED.items():
            if parameter in table and getattr(grid, key) is not None:
                raise ParameterError(
                    f"[parameters.{name}] {parameter}: [grid] {key} gives it too; leave one out"
                )
        for key, default in kind().get_params().items():
            if key in ("n_clusters", "n_local_clusters") and default is not None:
                if key not in table:
                    raise ParameterError(
                        f'[parameters.{name}] needs {key}: give a number, or "{TRUTH}"'
                    )
        tables[name] = dict(table)
    for name in central:
        table = table_of(given, name) if name in given else {}
        refuse_unknown(table, {"n_clusters"}, f"[parameters.{name}]")
        tables[name] = {"n_clusters": TRUTH} | table
        if tables[name]["n_clusters"] != TRUTH:
            check_counts(**{f"[parameters.{name}] n_clusters": tables[name]["n_clusters"]})
    return tables


def _scale(content: Mapping[str, Any], grid: Grid) -> dict[str, float]:
    given = table_of(content, "scale") if "scale" in content else {}
    refuse_unknown(given, set(grid.algorithm), "[scale]")
    check_positive(**{f"[scale] {name}": value for name, value in given.items()})
    return {name: float(given.get(name, 1.0)) for name in grid.algorithm}


def _privacy(content: Mapping[str, Any], grid: Grid) -> dict[str, Any]:
    given = table_of(content, "privacy") if "privacy" in content else {}
    for key in ("epsilon", "protection"):
        if key in given:
            raise ParameterError(f"[privacy] {key}: it belongs into [grid]")
    refuse_unknown(given, PRIVACY_KEYS, "[privacy]")
    if not given and any(epsilon is not None for epsilon in grid.epsilon):
        raise ParameterError(
            "the file needs a table [privacy] with delta and with ranges or bound; for data that "
            f'are no secret, ranges = "{DATA}"'
        )
    for key in ("ranges", "public_size"):
        if isinstance(given.get(key), str) and given[key] != DATA:
            raise ParameterError(f'[privacy] {key} = {given[key]!r}: give numbers, or "{DATA}"')
    return dict(given)


def _data(table: Mapping[str, Any]) -> dict[str, Any]:
    if ("benchmark" in table) == ("generator" in table):
        raise ParameterError(
            "[data] needs either benchmark or generator, as a sweep compares with true labels; it "
            f"has {', '.join(table) or 'nothing'}"
        )
    if "benchmark" in table:
        refuse_unknown(table, {"benchmark"}, "[data]")
        if not isinstance(table["benchmark"], str):
            raise ParameterError(f"[data] benchmark = {table['benchmark']!r}: give its name")
        return dict(table)
    check_choice("[data] generator", table["generator"], tuple(GENERATORS))
    seed = table.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ParameterError(f"[data] seed = {seed!r}: give a whole number of at least 0")
    return dict(table) | {"seed": seed}
