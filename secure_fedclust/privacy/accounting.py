"""What Gaussian noise costs: exact composition, and the budget that a filter can enforce.

A release of sensitivity Delta with Gaussian noise of standard deviation sigma is mu-GDP with
mu = Delta / sigma; releases compose to the root of the sum of their squares, adaptively chosen
ones included, and mu-GDP is (epsilon, delta)-DP for every pair on one curve. All of that is exact
for the Gaussian. Our noise is a discrete Gaussian, which differs by a slack that is counted here
too. Proofs: docs/proofs/accounting.md and docs/proofs/discrete_noise.md.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scipy.special import log_ndtr

from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.terms import MAX_EPSILON, MIN_DELTA, MIN_EPSILON

TAIL = 21.0
"""Discrete and rounded Gaussian are compared up to this many standard deviations; beyond them lies
less than e^-MAX_EPSILON * MIN_DELTA, even over `MAX_COORDINATES`."""

MAX_COORDINATES = 1 << 40
"""More noisy numbers than this are not released under one budget."""

MIN_NOISE = 1 << 12
"""Least standard deviation of the noise, in units of the grid."""

_SLACK_SHARE = 1e-4
_ROUNDING = 1e-9


def delta_of(epsilon: float, mu: float) -> float:
    """The least delta for which mu-GDP is (epsilon, delta)-DP.

    Examples
    --------
    >>> round(delta_of(1.0, 0.5), 5)
    0.00683
    """
    if mu <= 0:
        return 0.0
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return math.exp(first) * -math.expm1(min(0.0, second - first))


def epsilon_of(delta: float, mu: float) -> float:
    """The least epsilon for which mu-GDP is (epsilon, delta)-DP; 0 where delta alone suffices.

    Examples
    --------
    >>> round(epsilon_of(1e-5, 0.3), 4)
    1.1318
    """
    if mu <= 0 or delta_of(0.0, mu) <= delta:
        return 0.0
    high = 1.0
    while delta_of(high, mu) > delta:
        high *= 2
    return _bisect(lambda epsilon: delta_of(epsilon, mu) <= delta, high, 0.0)


def mu_of(epsilon: float, delta: float) -> float:
    """The largest mu for which mu-GDP is (epsilon, delta)-DP: the analytic Gaussian mechanism.

    Examples
    --------
    >>> round(1 / mu_of(1.0, 1e-5), 2)
    3.73
    """
    high = 1.0
    while delta_of(epsilon, high) <= delta:
        high *= 2
    return _bisect(lambda mu: delta_of(epsilon, mu) <= delta, 0.0, high)


def compose(mus: Iterable[float]) -> float:
    """The mu of several releases together."""
    return math.sqrt(math.fsum(mu * mu for mu in mus))


def split(mu: float, shares: Sequence[float]) -> list[float]:
    """Divide a total mu among releases by shares of mu squared, which is what adds up.

    Examples
    --------
    >>> [round(part, 3) for part in split(1.0, [1, 3])]
    [0.5, 0.866]
    """
    if not shares or not all(0 < share < math.inf for share in shares):
        raise ParameterError(f"shares={list(shares)}: give a positive number for each release")
    total = math.fsum(shares)
    return [mu * math.sqrt(share / total) for share in shares]


def slack_of(noise: float, coordinates: int) -> float:
    """How far discrete noise may depart from the Gaussian it stands for, as a log ratio.

    Parameters
    ----------
    noise : float
        Standard deviation of the noise in units of the grid.
    coordinates : int
        Numbers that the noise is added to.
    """
    return coordinates * TAIL**2 / (24 * noise**2)


@dataclass(frozen=True)
class Limit:
    """What (epsilon, delta) leaves for releases: a total mu, a total slack, a number of values.

    A filter that refuses the release that would exceed any of the three enforces the pair,
    however the releases are chosen. Shares of the slack and of delta are set aside beforehand, so
    that the three can be counted separately.
    """

    epsilon: float
    delta: float
    mu: float
    slack: float
    coordinates: int = MAX_COORDINATES

    @classmethod
    def of(cls, epsilon: float, delta: float) -> "Limit":
        """The limit for a target, which must be one that accounting can handle."""
        if not MIN_EPSILON <= epsilon <= MAX_EPSILON:
            raise ParameterError(
                f"epsilon={epsilon}: give a number from {MIN_EPSILON} to {MAX_EPSILON:g}"
            )
        if not MIN_DELTA <= delta < 1:
            raise ParameterError(f"delta={delta}: give a number from {MIN_DELTA} to below 1")
        slack = _SLACK_SHARE * min(epsilon, 1.0)
        mu = mu_of(epsilon - 2 * slack, delta * (1 - _SLACK_SHARE) * math.exp(-slack))
        return cls(epsilon, delta, mu * (1 - _ROUNDING), slack)

    def allows(self, squared_mu: float, slack: float, coordinates: int) -> bool:
        """Whether these totals stay within the limit; rounding of the sums is allowed for."""
        return (
            squared_mu <= (self.mu * (1 + _ROUNDING / 2)) ** 2
            and slack <= self.slack
            and coordinates <= self.coordinates
        )

    def group_epsilon(self, size: float) -> float:
        """Epsilon for a group of so many records at one client, at the same delta.

        Infinity beyond `MAX_EPSILON`: larger ones are not proved, and would protect nobody.
        """
        delta = self.delta * (1 - _SLACK_SHARE) * math.exp(-self.slack)
        epsilon = epsilon_of(delta, size * self.mu) + 2 * self.slack
        return epsilon if epsilon <= MAX_EPSILON else math.inf


def classical_sigma(epsilon: float, delta: float) -> float:
    """Textbook noise for sensitivity 1, to show the difference: never used for a release.

    It is proved for epsilon below 1, where it wastes noise, and breaks its promise at about 8.
    """
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def pld_epsilon(mus: Sequence[float], delta: float) -> float:
    """Epsilon by dp_accounting's PLD, as a cross-check (extra ``compare``)."""
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    # Equal releases together, which is what takes the time.
    for mu, times in Counter(mus).items():
        accountant.compose(dp_event.GaussianDpEvent(1 / mu), times)
    return float(accountant.get_epsilon(delta))


def opacus_epsilon(mus: Sequence[float], delta: float) -> float:
    """Epsilon by Opacus' RDP accountant, an upper bound, as a cross-check (extra ``deep``)."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for mu in mus:
        accountant.step(noise_multiplier=1 / mu, sample_rate=1.0)
    return float(accountant.get_epsilon(delta))


def _bisect(holds: Callable[[float], bool], good: float, bad: float) -> float:
    """The last value found on the side where it holds."""
    for _ in range(200):
        middle = (good + bad) / 2
        if middle in (good, bad):
            break
        if holds(middle):
            good = middle
        else:
            bad = middle
    return good
