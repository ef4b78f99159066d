"""Noisy training in a ledger: what its rows say, worked out anew, and by accountants of others."""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.accounting import Limit, epsilon_of
from secure_fedclust.privacy.bulk_noise import NOISE
from secure_fedclust.privacy.ledger import Row
from secure_fedclust.privacy.subsampled import (
    FORMULA,
    Training,
    charge_of,
    opacus_epsilon_of,
    pld_of,
    tail_rate,
    trainings_of,
)

SYSTEMS = ("FedCRef", "DeepFeCA")
"""Systems whose clients train."""

_INTERVAL = 2e-4
_ROUNDING = 1e-9
_FAR = 1e-3


@dataclass(frozen=True)
class Paid:
    """One row of a ledger that is for training.

    Attributes
    ----------
    mu : float
        What was charged.
    tail : float
        The probability that it is not covered by mu.
    parts : tuple of Training
        Of which a record is in one.
    """

    mu: float
    tail: float
    parts: tuple[Training, ...]


def is_training(row: Row) -> bool:
    """Whether a row is for noisy training."""
    return row.charge.formula == FORMULA


def paid(row: Row) -> Paid:
    """What a row for training says."""
    mu, inputs = row.charge.mu, row.charge.inputs
    return Paid(mu, inputs.get("tail", 1.0) * mu**2, tuple(trainings_of(inputs)))


def can_be_checked() -> bool:
    """Whether the library is here that knows what sampled steps cost."""
    return find_spec("dp_accounting") is not None


def states_enough(row: Row) -> bool:
    """Whether a row for training was charged at least what its trainings cost."""
    charge = row.charge
    try:
        found = trainings_of(charge.inputs)
        least = charge_of(found, charge.inputs.get("clip", 0.0), charge.inputs.get("tail", 0.0))
    except ParameterError:
        return False
    return charge.sigma == NOISE and charge.sensitivity >= least.value * (1 - _ROUNDING)


def fits_into_delta(row: Row, limits: Sequence[Limit], records: int) -> bool:
    """Whether there is room in delta for the tail of a row, for a person with so many records."""
    most = tail_rate(limits, records)
    return bool(0 < row.charge.inputs.get("tail", 1.0) <= most * (1 + _ROUNDING))


def pld_epsilon(mus: Sequence[float], trainings: Sequence[Paid], delta: float) -> float:
    """Epsilon of Gaussian releases and trainings together, by dp_accounting's PLD.

    Of each training the part counts that costs most by itself.
    """
    from dp_accounting.pld import privacy_loss_distribution

    total = privacy_loss_distribution.identity(_INTERVAL)
    for mu, times in Counter(mus).items():
        one = privacy_loss_distribution.from_gaussian_mechanism(
            1 / mu, value_discretization_interval=_INTERVAL
        )
        total = total.compose(one.self_compose(times))
    for each in trainings:
        worst = max(each.parts, key=lambda part: _alone(part, delta))
        total = total.compose(_pld(worst))
    return float(total.get_epsilon_for_delta(delta))


def rdp_epsilon(mus: Sequence[float], trainings: Sequence[Paid], delta: float) -> float | None:
    """The same by Opacus' RDP accountant, which proves less; None if it is not installed."""
    if find_spec("opacus") is None:
        return None
    worst = [max(each.parts, key=lambda part: _alone(part, delta)) for each in trainings]
    return opacus_epsilon_of(worst, delta, mus)


def refuted(training: Paid, delta: float) -> str | None:
    """What Opacus' PRV accountant has against a row, by another method than ours; None if nothing.

    It brackets epsilon at two deltas. If even the lower end is above what the row's mu and tail
    allow there, the row was charged too little.
    """
    if find_spec("opacus") is None:
        return None
    for part in dict.fromkeys(training.parts):
        for at in (delta, _FAR):
            rest = (at - training.tail) / (1 - training.tail)
            if rest <= 0:
                continue
            allowed = epsilon_of(rest, training.mu)
            error = max(1e-3, 0.01 * allowed)
            least = _prv(part, at, error) - 2 * error
            if least > allowed:
                return (
                    f"{part.sampling.steps} steps at rate {part.sampling.rate:g} with noise "
                    f"{part.noise:.4g} cost epsilon {least:.4g} or more at delta {at:g} by Opacus' "
                    f"PRV accountant, and {allowed:.4g} by the row's mu of {training.mu:.4g}"
                )
    return None


@lru_cache(maxsize=256)
def _pld(training: Training) -> Any:
    return pld_of(training, _INTERVAL)


@lru_cache(maxsize=1024)
def _alone(training: Training, delta: float) -> float:
    return float(_pld(training).get_epsilon_for_delta(delta))


@lru_cache(maxsize=1024)
def _prv(training: Training, delta: float, error: float) -> float:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(training.noise, training.sampling.rate, training.sampling.steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about divisions by zero where there is no mass
        return float(accountant.get_epsilon(delta, eps_error=error))
