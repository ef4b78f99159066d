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
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import ParameterError
from secure_fedclust.parameters import check_positive
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.bulk_noise import NOISE
from secure_fedclust.privacy.sensitivity import Sensitivity

TAIL_SHARE = 0.5e-4
"""Part of delta that the tails of all trainings under one limit may take: half of what is set
aside."""

MAX_STEPS = 100_000
MAX_PARTS = 20
"""Parts of the records that are trained on side by side, at most: a ledger's row names each."""

MIN_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER = 1e-2, 1e6

FORMULA = "dp_sgd/add_remove"

_GRID = 4000
_CLOSE = 2e-3
_TRIES = 40
_RATES = 8
_FFT_ERROR = 2.0**-51
"""What a step may add to the error of a convolution by Fourier transform, several times what is
measured; ten steps' worth are for the mass that dp_accounting cuts off."""


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
        if not isinstance(self.steps, int) or not 1 <= self.steps <= MAX_STEPS:
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

    def __post_init__(self) -> None:
        if not MIN_NOISE_MULTIPLIER <= self.noise <= MAX_NOISE_MULTIPLIER:
            raise ParameterError(
                f"noise={self.noise}: give {MIN_NOISE_MULTIPLIER:g} to {MAX_NOISE_MULTIPLIER:g} "
                "times the clipping norm"
            )


def public_rate(expected_batch: float, noisy_count: float) -> float:
    """A rate at which about `expected_batch` records are drawn, if there are `noisy_count`.

    Rates are powers of 2^(1/8), rounded up, and 1 where there are no more records than that: so
    few different ones occur in a federation, and the noise for each is worked out once.

    Parameters
    ----------
    expected_batch : float
    noisy_count : float
        A number of records that was released, or is public; never a true one.

    Examples
    --------
    >>> [round(public_rate(32, count), 4) for count in (-5.0, 30.0, 100.0, 101.0, 1000.0)]
    [1.0, 1.0, 0.3242, 0.3242, 0.0341]
    """
    check_positive(expected_batch=expected_batch)
    if not math.isfinite(noisy_count):
        raise ParameterError(f"noisy_count={noisy_count}: give a finite number")
    if noisy_count <= expected_batch:
        return 1.0
    return float(2.0 ** (-math.floor(_RATES * math.log2(noisy_count / expected_batch)) / _RATES))


def tail_rate(limits: Iterable[Limit], records: int = 1) -> float:
    """Tail that a charge of mu = 1 may have; others may have this times mu squared.

    Filters keep the sum of squared mus below each limit's, and so the sum of tails below
    `TAIL_SHARE` of its delta.

    Parameters
    ----------
    limits : iterable of Limit
        All that are to hold.
    records : int
        So many records together are protected with so many times mu: a group's tails grow with
        its size, and have to be the smaller for it.
    """
    return min(_largest_tail(limit, records) / limit.mu**2 for limit in limits)


def _largest_tail(limit: Limit, records: int) -> float:
    share = TAIL_SHARE * limit.delta / records
    return share if records == 1 else float(ndtr(ndtri(share) - (records - 1) * limit.mu))


def equivalent_mu(training: Training, rate_of_tails: float) -> float:
    """The least mu for which a mu-GDP release, but for its tail, is no harder to tell apart.

    Parameters
    ----------
    training : Training
    rate_of_tails : float
        See `tail_rate`.
    """
    sampling, noise = training.sampling, training.noise
    return _equivalent_mu(sampling.rate, sampling.steps, noise, float(rate_of_tails))


@lru_cache(maxsize=4096)
def _equivalent_mu(rate: float, steps: int, noise: float, rate_of_tails: float) -> float:
    # Records that are there in every step are no harder to find than those that are drawn.
    high = math.sqrt(steps) / noise
    if rate == 1:
        return high
    error = _FFT_ERROR * (steps + 10)
    # A tail that is no larger than the error of the curve would cover nothing.
    low = max(
        min(_limit_mu(rate, steps, noise), high) / 2,
        math.sqrt(4 * error / rate_of_tails) if rate_of_tails > 0 else math.inf,
    )
    if low >= high:
        raise ParameterError(
            f"rate={rate:g}, steps={steps}, noise={noise:g}: this delta, or this part of the "
            "budget, is too small for what can be worked out about sampled steps; give more, use "
            "fewer records of a person, or a batch size that holds all records (rate 1)"
        )
    epsilons, deltas = _curve(rate, steps, noise, rate_of_tails * low**2, error)

    def covers(mu: float) -> bool:
        tail = rate_of_tails * mu * mu
        # Between two points of the grid the curve is below its value at the first.
        bound = tail + (1 - tail) * _gaussian_deltas(epsilons[1:], mu)
        return bool((deltas[:-1] <= bound).all() and deltas[-1] <= tail)

    if not covers(high):
        return high
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if covers(middle) else (middle, high)
    return high


def trained(sampling: Sampling, mu: float, rate_of_tails: float) -> Training:
    """The training with the least noise, to within a fifth of a percent, that costs at most `mu`.

    Parameters
    ----------
    sampling : Sampling
    mu : float
    rate_of_tails : float
        See `tail_rate`.
    """
    check_positive(mu=mu)
    noise = _noise_for(sampling.rate, sampling.steps, float(mu), float(rate_of_tails))
    return Training(sampling, noise)


@lru_cache(maxsize=4096)
def _noise_for(rate: float, steps: int, mu: float, rate_of_tails: float) -> float:
    # With this much it is enough even if all records are there in every step.
    enough = math.sqrt(steps) / mu * (1 + 1e-12)
    if enough > MAX_NOISE_MULTIPLIER:
        raise ParameterError(
            f"mu={mu:.3g} for {steps} steps: noise of {enough:.3g} times the clipping norm leaves "
            "nothing to learn from; use fewer steps, or more of the budget"
        )
    if rate == 1:
        return max(enough, MIN_NOISE_MULTIPLIER)
    least = MIN_NOISE_MULTIPLIER
    clt = 1 / math.sqrt(math.log1p((mu / rate) ** 2 / steps))
    noise = min(max(1.1 * clt, least), enough)
    wanted, slope = math.log(mu * (1 - _CLOSE / 2)), -1.5
    before: tuple[float, float] | None = None
    for _ in range(_TRIES):
        cost = _equivalent_mu(rate, steps, noise, rate_of_tails)
        if cost <= mu:
            enough = noise
            if cost >= mu * (1 - _CLOSE) or noise <= MIN_NOISE_MULTIPLIER:
                break
        else:
            least = noise
        here = math.log(noise), math.log(cost)
        if before is not None and here[0] != before[0]:
            slope = min(max((here[1] - before[1]) / (here[0] - before[0]), -8.0), -0.5)
        before = here
        # More noise costs less: on a straight line between logarithms, about.
        noise *= math.exp((wanted - here[1]) / slope)
        if not least < noise < enough:
            noise = math.sqrt(least * enough)
    return enough


def charge_of(
    trainings: Sequence[Training], clip: float, rate_of_tails: float, records: int = 1
) -> Sensitivity:
    """What a ledger's row says of trainings on parts of the records that have none in common.

    A record is in one part, so that the most costly part is what all of them cost. The value is
    that of a Gaussian release with the noise of one step, in grid steps.

    Parameters
    ----------
    trainings : sequence of Training
        One a part.
    clip : float
    rate_of_tails : float
        See `tail_rate`.
    records : int
        The size of groups that the tails were chosen for.
    """
    if not 1 <= len(trainings) <= MAX_PARTS:
        raise ParameterError(
            f"{len(trainings)} clusters are trained on at once: with differential privacy a client "
            f"may have 1 to {MAX_PARTS}"
        )
    check_positive(clip=clip)
    inputs = {"clip": clip, "tail": rate_of_tails, "records": float(records)}
    for i, training in enumerate(dict.fromkeys(trainings)):
        inputs[f"rate {i}"] = training.sampling.rate
        inputs[f"steps {i}"] = float(training.sampling.steps)
        inputs[f"noise {i}"] = training.noise
    value = max(equivalent_mu(training, rate_of_tails) for training in trainings)
    return Sensitivity(value * NOISE, FORMULA, inputs)


def trainings_of(inputs: Mapping[str, float]) -> list[Training]:
    """The trainings that a ledger's row names."""
    found: list[Training] = []
    while f"rate {len(found)}" in inputs:
        i = len(found)
        rate, steps, noise = (inputs.get(f"{name} {i}", 0.0) for name in _NAMES)
        if steps != int(steps):
            raise ParameterError(f"steps={steps}: give a whole number")
        found.append(Training(Sampling(rate, int(steps)), noise))
    if not found or len(inputs) != len(_OTHERS) + len(_NAMES) * len(found):
        raise ParameterError("the row does not say which trainings it is for")
    return found


_NAMES = ("rate", "steps", "noise")
_OTHERS = ("clip", "tail", "records")


def pld_of(training: Training, interval: float = 1e-4) -> Any:
    """The privacy loss distribution of a training, by dp_accounting, rounded up."""
    return _distribution(training.sampling.rate, training.sampling.steps, training.noise, interval)


def opacus_epsilon_of(
    trainings: Sequence[Training], delta: float, mus: Sequence[float] = ()
) -> float:
    """Epsilon of trainings one after the other, by Opacus' RDP accountant.

    Parameters
    ----------
    trainings : sequence of Training
    delta : float
    mus : sequence of float
        Gaussian releases besides.
    """
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [
        *((each.noise, each.sampling.rate, each.sampling.steps) for each in trainings),
        *((1 / mu, 1.0, 1) for mu in mus),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the order that fits best being the largest tried
        return float(accountant.get_epsilon(delta))


def _curve(
    rate: float, steps: int, noise: float, least: float, error: float
) -> tuple[Floats, Floats]:
    """Delta of a training at many epsilons, up to one at which it is `least`, rounded up."""
    interval = 0.05 * _limit_mu(rate, steps, noise) / math.sqrt(steps)
    distribution = _distribution(rate, steps, noise, min(max(interval, 5e-5), 2e-3))
    last = distribution.get_epsilon_for_delta(least - error)
    epsilons = np.linspace(0.0, max(last, 1e-3), _GRID)
    return epsilons, np.asarray(distribution.get_delta_for_epsilon(list(epsilons))) + error


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
