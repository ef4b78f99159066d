"""Lower bounds on what was lost, from how well two worlds can be told apart.

An attacker says "with" when a score is at least a threshold. In the world without, that is a false
alarm; in the world with, a find. (epsilon, delta)-DP and mu-GDP both limit how many finds there can
be for so many false alarms, so rates that were measured refute every claim that does not allow
them. Some of the trials choose the threshold and the others measure the rates: figures that were
chosen to be good prove nothing.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri
from scipy.stats import beta

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.accounting import epsilon_of

CHOOSING = 4
"""One trial in so many chooses thresholds: which one is best hardly matters, the rates do."""

_THRESHOLDS = 200


@dataclass(frozen=True)
class LowerBounds:
    """What the rates refute, each with the confidence asked for.

    Attributes
    ----------
    epsilon : float
        Clopper-Pearson: holds whatever the mechanism is.
    mu : float
        No mechanism that is mu-GDP for less has such rates. That refutes a claim of mu-GDP, which
        is what the ledger enforces, whatever the mechanism is.
    gaussian_epsilon : float
        The epsilon of `mu`, at the same delta: a bound on epsilon if the mechanism is Gaussian.
    curve : sequence of (float, float)
        Rates of false alarms and finds among the trials that chose no threshold.
    """

    epsilon: float
    mu: float
    gaussian_epsilon: float
    curve: tuple[tuple[float, float], ...]


def lower_bounds(without: Floats, present: Floats, delta: float, confidence: float) -> LowerBounds:
    """Bounds from scores in two worlds, of trials that are independent.

    Parameters
    ----------
    without, present : arrays
        Scores; higher ones speak for the world `present`.
    delta : float
    confidence : float
        Of each of the two bounds.
    """
    if min(len(without), len(present)) < 2 * CHOOSING:
        raise ParameterError(
            f"{min(len(without), len(present))} trials in a world: give at least {2 * CHOOSING}"
        )
    choosing = (without[::CHOOSING], present[::CHOOSING])
    measuring = (np.delete(without, np.s_[::CHOOSING]), np.delete(present, np.s_[::CHOOSING]))
    pooled = np.concatenate(choosing)
    thresholds = np.quantile(pooled, np.linspace(0, 1, _THRESHOLDS))
    # Just above a score that is met exactly, too: what is not noised at all makes such scores.
    thresholds = np.unique(np.concatenate([thresholds, np.nextafter(thresholds, np.inf)]))
    alpha = 1 - confidence
    choice = _at(*choosing, thresholds, delta, alpha)
    best = thresholds[[_best(choice.epsilon), _best(choice.mu)]]
    found = _at(*measuring, best, delta, alpha)
    mu = float(found.mu[1])
    return LowerBounds(float(found.epsilon[0]), mu, epsilon_of(delta, mu), rates(*measuring))


def rates(without: Floats, present: Floats, points: int = 60) -> tuple[tuple[float, float], ...]:
    """False alarms and finds at thresholds from high to low, both ends included."""
    pooled = np.sort(np.concatenate([without, present]))
    thresholds = np.quantile(pooled, np.linspace(1, 0, points))
    found = [
        (float((without >= t).mean()), float((present >= t).mean())) for t in thresholds.tolist()
    ]
    return tuple(dict.fromkeys([(0.0, 0.0), *found, (1.0, 1.0)]))


def clopper_pearson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """Exact interval of a rate, each end with half of what the confidence leaves.

    Examples
    --------
    >>> [round(end, 4) for end in clopper_pearson(0, 100, 0.95)]
    [0.0, 0.0362]
    """
    low, high = _ends(np.array([successes]), trials, (1 - confidence) / 2)
    return float(low[0]), float(high[0])


def power(mu: float, claimed: float, trials: int, confidence: float, repeats: int = 100) -> float:
    """How often so many trials in a world would refute a claim, were a Gaussian's true mu this one.

    By simulation, with a fixed seed: no release is involved.
    """
    rng = np.random.default_rng(20)
    found = 0
    for _ in range(repeats):
        without, present = rng.normal(size=trials), rng.normal(mu, size=trials)
        found += lower_bounds(without, present, 0.0, confidence).mu > claimed
    return found / repeats


@dataclass(frozen=True)
class _Bounds:
    epsilon: Floats
    mu: Floats


def _at(
    without: Floats, present: Floats, thresholds: Floats, delta: float, alpha: float
) -> _Bounds:
    """Lower bounds on epsilon and mu at each threshold."""
    alarms = len(without) - np.searchsorted(np.sort(without), thresholds)
    finds = len(present) - np.searchsorted(np.sort(present), thresholds)
    # Two rates are used at a time, and either may be off.
    most_alarms = _ends(alarms, len(without), alpha / 2)[1]
    fewest_finds = _ends(finds, len(present), alpha / 2)[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        forward = np.log(np.maximum(fewest_finds - delta, 0) / most_alarms)
        backward = np.log(np.maximum(1 - most_alarms - delta, 0) / (1 - fewest_finds))
        mu = ndtri(fewest_finds) - ndtri(most_alarms)
    return _Bounds(_held(np.maximum(forward, backward)), _held(mu))


def _best(bounds: Floats) -> int:
    """Where a bound is largest; in the middle, if it is zero everywhere."""
    return int(np.argmax(bounds)) if bounds.any() else len(bounds) // 2


_MOST = 1e3


def _held(values: Floats) -> Floats:
    return np.clip(np.nan_to_num(values, nan=0.0, posinf=_MOST, neginf=0.0), 0.0, _MOST)


def _ends(successes: Any, trials: int, alpha: float) -> tuple[Floats, Floats]:
    """Lower and upper ends, each wrong with a probability of at most alpha."""
    failures = trials - successes
    low = np.where(successes > 0, beta.ppf(alpha, np.maximum(successes, 1), failures + 1), 0.0)
    high = np.where(failures > 0, beta.ppf(1 - alpha, successes + 1, np.maximum(failures, 1)), 1.0)
    return low, high
