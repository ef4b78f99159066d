"""Sensitivities worked out anew, from what a ledger says they were worked out from."""

import inspect
from collections.abc import Callable

from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy import sensitivity
from secure_fedclust.privacy.ledger import Row

_FORMULAS: dict[str, Callable[..., sensitivity.Sensitivity]] = {
    formula.__name__: formula
    for formula in (
        sensitivity.sums,
        sensitivity.sums_and_counts,
        sensitivity.synopsis,
        sensitivity.moments,
        sensitivity.floor_mean,
        sensitivity.theorem9,
        sensitivity.histogram,
        sensitivity.cost,
        sensitivity.message,
    )
}


def states_enough(row: Row, adjacency: str) -> bool:
    """Whether a row's sensitivity is at least what its formula gives for its inputs."""
    name, _, relation = row.charge.formula.partition("/")
    formula = _FORMULAS.get(name)
    if formula is None or relation != adjacency:
        return False
    wanted = set(inspect.signature(formula).parameters) - {"adjacency"}
    inputs = {key: value for key, value in row.charge.inputs.items() if key in wanted}
    try:
        least = formula(**inputs, adjacency=adjacency).value
    except (ParameterError, TypeError):
        return False
    # A row may have more, for what rounding to the grid adds.
    return row.charge.sensitivity >= least * (1 - 1e-9)
