"""Everything that could be wrong with a sweep, found before its first run."""

from collections.abc import Iterable
from typing import Any

from secure_fedclust.errors import ParameterError, SecureFedClustError
from secure_fedclust.sweep.cells import Cell
from secure_fedclust.sweep.config import SweepConfig
from secure_fedclust.sweep.data import LabelledData
from secure_fedclust.sweep.runs import check_run


def check_sweep(cells: Iterable[Cell], config: SweepConfig, data: LabelledData) -> None:
    """Make every partition and plan every run, and say what is wrong with the first that cannot be.

    Raises
    ------
    ParameterError
        Which names the run.
    """
    ranges = config.privacy.get("ranges", config.privacy.get("center"))
    if isinstance(ranges, list) and len(ranges) != data.n_features:
        raise ParameterError(
            f"[privacy] has ranges or a center for {len(ranges)} features; the data have "
            f"{data.n_features}"
        )
    seen: set[Any] = set()
    for cell in cells:
        try:
            check_run(cell, config, data, seen)
        except SecureFedClustError as error:
            raise ParameterError(
                f"no run was made, because one of the sweep cannot be: {cell}: {error}"
                + _advice(cell)
            ) from error


def _advice(cell: Cell) -> str:
    if cell.epsilon is None and cell.protection != "none":
        return (
            ' (to compare with runs without privacy, leave "none" out of epsilon in [grid] and put '
            "it into baselines)"
        )
    return ""
