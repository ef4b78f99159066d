"""What noisy training costs: many Gaussian steps on random parts of the records, as one release.

A step of DP-SGD looks at records drawn independently with a public rate, adds up their clipped
gradients, and noises the sum. Such steps are not mu-GDP, whatever the mu; but together they are
no easier to tell apart than a mu-GDP release, but for a probability `tail`: that is what a ledger
is charged, mu by mu like everything else, and the tails of all charges have room in the part of
delta that `Limit` sets aside. The proof is in docs/proofs/training.md.

The curve of the steps is that of Google's dp_accounting (extra ``deep``), rounded up; Opacus' RDP
accountant, which proves less, must not find less. The normal approximation (GDP-CLT) under-reports
and is not used.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import log_ndtr

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.sensitivity import Sensitivity

TAIL_SHARE = 0.5e-4
"""Part of delta that the tails of all trainings under one limit may take: half of what is set
aside."""

MAX_STEPS = 100_000
MAX_PARTS = 20
"""Parts of the records that are trained on side by side, at most: a ledger's row names each."""

FORMULA = "dp_sgd/add_remove"

_GRID = 4000
_CLOSE = 2e-3
_TRIES = 24
_LARGEST_NOISE = 1e6


@dataclass(frozen=True)
class Sampling:
    """How often a part of the records is looked at.

    Attributes
    ----------
    rate : float
        Public probability with which each record is drawn into a step, independently.
    steps : int
    """

    rate: float
    steps: int

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ParameterError(f"rate={self.rate}: give a probability, above 0 and up to 1")
        if not 1 <= self.steps <= MAX_STEPS:
            raise ParameterError(f"steps={self.steps}: give from 1 to {MAX_STEPS}")


@dataclass(frozen=True)
class Training:
    """A training that was charged: it may be done once, with this noise.

    Attributes
    ----------
    sampling : Sampling
    noise : float
        Standard deviation of the noise in a step, in units of the clipping norm.
    """

    sampling: Sampling
    noise: float


def tail_rate(limits: Iterable[Limit]) -> float:
    """Tail that a charge of mu = 1 may have; others may have this times mu squared.

    Filters keep the sum of squared mus below each limit's, and so the sum of tails below
    `TAIL_SHARE` of its delta.
    """
    return TAIL_SHARE * min(limit.delta / limit.mu**2 for limit in limits)


def equivalent_mu(training: Training, rate_of_tails: float) -> float:
    """The least mu for which a mu-GDP release, but for its tail, is no harder to tell apart.

    Parameters
    ----------
    training : Training
    rate_of_tails : float
        See `tail_rate`.
    """
    sampling, noise = training.sampling, training.noise
    if sampling.rate == 1:
        return math.sqrt(sampling.steps) / noise
    return _equivalent_mu(sampling.rate, sampling.steps, noise, rate_of_tails)


@lru_cache(maxsize=4096)
def _equivalent_mu(rate: float, steps: int, noise: float, rate_of_tails: float) -> float:
    low = _limit_mu(rate, steps, noise) / 2
    high = math.sqrt(steps) / noise
    epsilons, deltas = _curve(rate, steps, noise, rate_of_tails * low**2)

    def covers(mu: float) -> bool:
        tail = rate_of_tails * mu * mu
        # Between two points of the grid the curve is below its value at the first.
        bound = tail + (1 - tail) * _gaussian_deltas(epsilons[1:], mu)
        return bool((deltas[:-1] <= bound).all() and deltas[-1] <= tail)

    if not covers(high):
        # Rounded up, the curve can be above even that of all records in every step.
        return high * (1 + _CLOSE) if covers(high * (1 + _CLOSE)) else _too_small(rate, steps)
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if covers(middle) else (middle, high)
    return high


def _too_small(rate: float, steps: int) -> float:
    raise ParameterError(
        f"rate={rate:g}, steps={steps}: this delta is too small for what can be worked out about "
        "sampled steps; give a larger delta, or a batch size that holds all records (rate 1)"
    )


def trained(sampling: Sampling, mu: float, rate_of_tails: float) -> Training:
    """The training with the least noise, to within a fifth of a percent, that costs at most `mu`.

    Parameters
    ----------
    sampling : Sampling
    mu : float
    rate_of_tails : float
        See `tail_rate`.
    """
    return Training(sampling, _noise_for(sampling.rate, sampling.steps, float(mu), rate_of_tails))


@lru_cache(maxsize=4096)
def _noise_for(rate: float, steps: int, mu: float, rate_of_tails: float) -> float:
    if rate == 1:
        return math.sqrt(steps) / mu * (1 + 1e-12)
    noise = max(rate * math.sqrt(steps) / mu, 0.3)
    wanted = math.log(mu * (1 - _CLOSE / 2))
    enough = math.inf
    slope, before = -1.0, None
    for _ in range(_TRIES):
        if noise > _LARGEST_NOISE:
            break
        cost = _equivalent_mu(rate, steps, noise, rate_of_tails)
        if cost <= mu:
            enough = min(enough, noise)
            if cost >= mu * (1 - _CLOSE):
                break
        here = math.log(noise), math.log(cost)
        if before is not None and here[0] != before[0]:
            slope = min(max((here[1] - before[1]) / (here[0] - before[0]), -6.0), -0.5)
        before = here
        # More noise costs less: on a straight line between logarithms, about.
        noise *= math.exp((wanted - here[1]) / slope)
    if math.isinf(enough):
        raise ParameterError(
            f"mu={mu:.3g} for {steps} steps at rate {rate:g}: no noise does; use fewer steps, or "
            "more of the budget"
        )
    return enough


def charge_of(trainings: Sequence[Training], clip: float, rate_of_tails: float) -> Sensitivity:
    """What a ledger's row says of trainings on parts of the records that have none in common.

    A record is in one part, so that the most costly part is what all of them cost. The value is
    that of a Gaussian release with noise of standard deviation one.
    """
    if not 1 <= len(trainings) <= MAX_PARTS:
        raise ParameterError(
            f"{len(trainings)} clusters are trained on at once: with differential privacy a client "
            f"may have 1 to {MAX_PARTS}"
        )
    inputs = {"clip": clip, "tail": rate_of_tails}
    for i, training in enumerate(dict.fromkeys(trainings)):
        inputs[f"rate {i}"] = training.sampling.rate
        inputs[f"steps {i}"] = float(training.sampling.steps)
        inputs[f"noise {i}"] = training.noise
    value = max(equivalent_mu(training, rate_of_tails) for training in trainings)
    return Sensitivity(value, FORMULA, inputs)


def trainings_of(inputs: Mapping[str, float]) -> list[Training]:
    """The trainings that a ledger's row names."""
    found: list[Training] = []
    while f"rate {len(found)}" in inputs:
        i = len(found)
        sampling = Sampling(inputs[f"rate {i}"], int(inputs[f"steps {i}"]))
        found.append(Training(sampling, inputs[f"noise {i}"]))
    if not found:
        raise ParameterError("the row names no training")
    return found


def pld_of(training: Training, interval: float = 1e-4) -> Any:
    """The privacy loss distribution of a training, by dp_accounting, rounded up."""
    return _distribution(training.sampling.rate, training.sampling.steps, training.noise, interval)


def opacus_epsilon_of(trainings: Sequence[Training], delta: float) -> float:
    """Epsilon of trainings one after the other, by Opacus' RDP accountant."""
    import warnings

    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [
        (each.noise, each.sampling.rate, each.sampling.steps) for each in trainings
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the order that fits best being the largest tried
        return float(accountant.get_epsilon(delta))


def _curve(rate: float, steps: int, noise: float, least: float) -> tuple[Floats, Floats]:
    """Delta of a training at many epsilons, up to one at which it is `least`, rounded up."""
    interval = 1e-3 if _limit_mu(rate, steps, noise) > 0.5 else 1e-4
    distribution = _distribution(rate, steps, noise, interval)
    last = distribution.get_epsilon_for_delta(least)
    if not math.isfinite(last):
        _too_small(rate, steps)
    epsilons = np.linspace(0.0, max(last, 1e-3), _GRID)
    return epsilons, np.asarray(distribution.get_delta_for_epsilon(list(epsilons)))


def _distribution(rate: float, steps: int, noise: float, interval: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution

    found = privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=interval
    )
    return found.self_compose(steps) if steps > 1 else found


def _limit_mu(rate: float, steps: int, noise: float) -> float:
    """Where mu tends for many steps: too small to be charged, a place to start from."""
    return rate * math.sqrt(steps * math.expm1(min(1 / noise**2, 50.0)))


def _gaussian_deltas(epsilons: Floats, mu: float) -> Floats:
    first = log_ndtr(mu / 2 - epsilons / mu)
    second = epsilons + log_ndtr(-mu / 2 - epsilons / mu)
    return np.asarray(np.exp(first) * -np.expm1(np.minimum(0.0, second - first)))
