"""Sensitivities worked out anew, from what a ledger says they were worked out from."""

import inspect
from collections.abc import Callable, Mapping

from secure_fedclust.audit.report import trainings
from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy import sensitivity
from secure_fedclust.privacy.ledger import Row
from secure_fedclust.privacy.subsampled import FORMULA, trainings_of

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
        sensitivity.marks,
        sensitivity.message,
    )
}


def states_enough(row: Row, adjacency: str) -> bool:
    """Whether a row's sensitivity is at least what its formula gives for its inputs."""
    name, _, relation = row.charge.formula.partition("/")
    if trainings.is_training(row):
        return relation == adjacency and trainings.states_enough(row)
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


def described(formula: str, inputs: Mapping[str, float]) -> str:
    """A row's formula and what was put into it, in a line."""
    if formula == FORMULA:
        try:
            parts = [
                f"{part.sampling.steps} steps at rate {part.sampling.rate:.6g} with noise "
                f"{part.noise:.6g}"
                for part in trainings_of(inputs)
            ]
        except ParameterError:
            parts = []
        if parts:
            clip, tail = inputs.get("clip", 0.0), inputs.get("tail", 0.0)
            rest = f"gradients clipped to {clip:.6g}, tail {tail:.3g} times mu squared"
            return f"{formula} ({'; or '.join(parts)}; {rest})"
    return f"{formula} ({', '.join(f'{name} {value:.6g}' for name, value in inputs.items())})"
