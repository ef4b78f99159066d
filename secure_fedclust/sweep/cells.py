"""The runs of a sweep, each known by what it is and not by its place in the file."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, Self

from secure_fedclust.config import ALGORITHMS, parameter_names
from secure_fedclust.errors import ParameterError
from secure_fedclust.sweep.config import CENTRAL, SweepConfig

NOTHING = type(None)
KINDS: dict[str, tuple[type, ...]] = {
    "algorithm": (str,),
    "epsilon": (float, int, NOTHING),
    "protection": (str,),
    "calibration": (str, NOTHING),
    "rounds": (int, str, NOTHING),
    "clients": (int, NOTHING),
    "partition": (str, NOTHING),
    "seed": (int,),
}


@dataclass(frozen=True)
class Cell:
    """One run. What does not apply to its system is None.

    Attributes
    ----------
    algorithm : str
        A system, or a baseline on all records in one place.
    epsilon : float or None
        None without differential privacy.
    protection : str
    calibration : str or None
    rounds : int, "auto" or None
    clients : int or None
    partition : str or None
        Label of a partition of the grid.
    seed : int
    """

    algorithm: str
    epsilon: float | None
    protection: str
    calibration: str | None
    rounds: int | str | None
    clients: int | None
    partition: str | None
    seed: int

    def __str__(self) -> str:
        parts = [
            self.algorithm,
            f"epsilon {'none' if self.epsilon is None else f'{self.epsilon:g}'}",
        ]
        if self.clients is not None:
            parts.append(f"protection {self.protection}")
        if self.calibration is not None:
            parts.append(f"calibration {self.calibration}")
        if self.rounds is not None:
            parts.append(f"rounds {self.rounds}")
        if self.clients is not None:
            parts += [f"{self.clients} clients", f"partition {self.partition}"]
        return ", ".join([*parts, f"seed {self.seed}"])

    @property
    def order(self) -> tuple[Any, ...]:
        """Where the run stands in every table."""
        names = [*ALGORITHMS, *CENTRAL]
        rounds = -1 if self.rounds is None else 0 if isinstance(self.rounds, str) else self.rounds
        return (
            names.index(self.algorithm),
            -1.0 if self.epsilon is None else self.epsilon,
            self.protection,
            self.calibration or "",
            rounds,
            self.clients or 0,
            self.partition or "",
            self.seed,
        )

    @property
    def setting(self) -> Self:
        """The run without its seed, as if that were 0: what is averaged over seeds."""
        return replace(self, seed=0)

    @classmethod
    def from_dict(cls, content: Any) -> Self:
        """Read what `dataclasses.asdict` gave."""
        if not isinstance(content, dict) or set(content) != {field.name for field in fields(cls)}:
            raise ParameterError("its cell has other keys than a run of a sweep")
        for name, kinds in KINDS.items():
            if type(content[name]) not in kinds:
                raise ParameterError(f"its cell has {name} = {content[name]!r}")
        return cls(**content)


def cells_of(config: SweepConfig) -> list[Cell]:
    """All runs, none twice; seed by seed, so that a sweep that is stopped has some of each."""
    found = dict.fromkeys(cell for seed in config.seeds for cell in _of_seed(config, seed))
    return list(found)


def _of_seed(config: SweepConfig, seed: int) -> Iterator[Cell]:
    grid = config.grid
    pairs = [*product(grid.epsilon, grid.protection)]
    if "none" in config.baselines:
        pairs.append((None, "none"))
    for name in config.baselines:
        if name == "central":
            yield Cell(name, None, "none", None, None, None, None, seed)
        elif name == "diffprivlib":
            for epsilon in grid.epsilon:
                if epsilon is not None:
                    yield Cell(name, epsilon, "none", None, None, None, None, seed)
    for partition, clients in product(grid.partition, grid.clients):
        for algorithm, (epsilon, protection) in product(grid.algorithm, pairs):
            for calibration, rounds in _variants(config, algorithm, epsilon):
                yield Cell(
                    algorithm, epsilon, protection, calibration, rounds, clients, partition, seed
                )


def _variants(
    config: SweepConfig, algorithm: str, epsilon: float | None
) -> Iterator[tuple[str | None, int | str | None]]:
    """Calibrations and rounds, where they make a difference."""
    names, grid = parameter_names(ALGORITHMS[algorithm]), config.grid
    calibrations: tuple[str | None, ...] = (None,)
    rounds: tuple[int | str | None, ...] = (None,)
    private = epsilon is not None
    if "calibration" in names and private and grid.calibration is not None:
        calibrations = grid.calibration
    one_shot = private and config.parameters[algorithm].get("one_shot", False)
    if "n_rounds" in names and not one_shot and grid.rounds is not None:
        rounds = grid.rounds
    yield from product(calibrations, rounds)
