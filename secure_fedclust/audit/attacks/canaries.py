"""Many canaries in one run: a lower bound on epsilon from a single release.

Steinke, Nasr and Jagielski (2023). Each of m canaries goes in or stays out by the toss of a coin;
the attacker guesses which of them are in, and need not guess about all. Were the release
epsilon-DP, each guess would be right with a probability of at most e^epsilon / (1 + e^epsilon),
whatever came out and whatever the other coins showed, so right guesses would be no more than
binomial. With a delta, a coin may be given away: all m have that chance, each from both sides, and
the worst use of it is to lift unlucky outcomes over the number that was reached.

The theorem is about coins whose flip makes a neighbouring data set. Under ``add_remove`` a canary
is there or is not. Under ``replace_one`` it is always there, on one side of its centre or the
other. For the unit ``client`` a canary is all the data of a client, and there are several sums, of
which each client is in one.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import binom

from secure_fedclust.arrays import Floats
from secure_fedclust.audit.attacks.bounds import rates
from secure_fedclust.audit.attacks.ceilings import check_confidence, verdict
from secure_fedclust.audit.attacks.rehearsal import Outlets
from secure_fedclust.audit.attacks.views import See, View, apart, look, power
from secure_fedclust.audit.findings import Finding
from secure_fedclust.errors import ParameterError
from secure_fedclust.parameters import check_counts
from secure_fedclust.privacy.queries import Cells, CellSums
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.privacy.terms import MAX_EPSILON, Adjacency

GUESSED = 1.0, 0.5, 0.2, 0.05, 0.01
"""Shares of the canaries that are guessed about, chosen before anything is seen. The best counts,
and the confidence of each is so high that it may."""

FEWEST = 10

_RADIUS = 1.0
_COUNT_WEIGHT = 0.25
_CLIENTS_AT_ONCE = 100


def one_run(
    spec: PrivacySpec,
    *,
    canaries: int = 1000,
    confidence: float = 0.95,
    rng: np.random.Generator,
) -> Finding:
    """Bound epsilon from below by how many canaries of one release can be told.

    The attacker knows every canary and every other record, and lacks the coins only. Each canary
    is alone in its cell and as far from its centre as it can be, so that it is worth the whole
    sensitivity.

    Parameters
    ----------
    spec : PrivacySpec
        The claim.
    canaries : int
    confidence : float
    rng : numpy.random.Generator
        For the coins; noise never comes from it.
    """
    check_counts(canaries=canaries)
    check_confidence(confidence)
    if canaries < FEWEST:
        raise ParameterError(f"canaries={canaries}: give at least {FEWEST}")
    epsilon, delta = spec.target()
    inside = rng.random(canaries) < 0.5
    views = list(_release(Outlets(spec), inside))

    def scores(see: See) -> Floats:
        return np.concatenate([_scores(see(view), spec.adjacency) for view in views])

    def bound(see: See, at_least: float = 0.0) -> tuple[float, int, int]:
        return lower_epsilon(
            scores(see), inside, delta=delta, confidence=confidence, at_least=at_least
        )

    figure, guesses, right = bound(View.released)
    strength = power(lambda see: bound(see, epsilon)[0] > epsilon, rng)
    seen = scores(View.released)
    return Finding(
        name="one-run audit",
        kind="statistical",
        threat=(
            "knows all canaries, sees what is released, and guesses which of them are in"
            if spec.adjacency == "add_remove"
            else "knows the two records that each canary may be, sees what is released, and guesses"
        ),
        measure="epsilon",
        figure=figure,
        interval=(figure, None),
        ceiling=epsilon,
        verdict=verdict(figure, strength, epsilon),
        words=(
            f"{right} of {guesses} guesses were right, so epsilon is at least {figure:.2f} "
            f"(at delta {delta:g}); {epsilon:g} is claimed. One release bounds it loosely: a bound "
            "far below the claim certifies nothing."
        ),
        trials=canaries,
        confidence=confidence,
        more={
            "guesses": guesses,
            "right guesses": right,
            "would have refuted half the noise": strength,
            "epsilon without noise": bound(View.without_noise)[0],
        },
        curve=rates(seen[~inside], seen[inside]),
    )


def lower_epsilon(
    scores: Floats,
    inside: NDArray[np.bool_],
    *,
    delta: float,
    confidence: float,
    at_least: float = 0.0,
) -> tuple[float, int, int]:
    """The best bound over `GUESSED`, its number of guesses, and how many of them were right.

    Parameters
    ----------
    scores : array of shape (m,)
        Higher ones speak for a canary's being in.
    inside : array of shape (m,)
    delta, confidence : float
    at_least : float
        Smaller bounds are of no interest.
    """
    m, alpha = len(scores), (1 - confidence) / len(GUESSED)
    ordered = inside[np.argsort(scores)]
    best = (at_least, 0, 0)
    for share in GUESSED:
        each = max(1, math.floor(share * m / 2))
        right = int(ordered[m - each :].sum() + (~ordered[:each]).sum())
        refuted = _largest_refuted(m, 2 * each, right, delta, alpha, at_least=best[0])
        if refuted > best[0] or not best[1]:
            best = (refuted, 2 * each, right)
    return best


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Largest probability of so many right guesses if the release is (epsilon, delta)-DP.

    Examples
    --------
    >>> round(p_value(100, 100, 75, math.log(3), 0.0), 3)
    0.553
    """
    chance = float(expit(epsilon))
    tail = float(binom.sf(right - 1, guesses, chance))
    if right == 0 or delta == 0:
        return min(1.0, tail)
    # The probability of falling short by at most i, for the price of i coins given away.
    short = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, chance))
    lifted = float((short / np.arange(1, right + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * lifted)


def _largest_refuted(
    m: int, guesses: int, right: int, delta: float, alpha: float, at_least: float
) -> float:
    """The largest epsilon that so many right guesses refute, or `at_least`."""
    low, high = at_least, MAX_EPSILON
    if p_value(m, guesses, right, low, delta) > alpha:
        return low
    for _ in range(32):
        middle = (low + high) / 2
        if p_value(m, guesses, right, middle, delta) <= alpha:
            low = middle
        else:
            high = middle
    return low


def _release(outlets: Outlets, inside: NDArray[np.bool_]) -> Iterator[View]:
    """What is seen of the canaries, in their order."""
    whole = outlets.spec.unit == "client"
    at_once = _CLIENTS_AT_ONCE if whole else len(inside)
    for start in range(0, len(inside), at_once):
        coins = inside[start : start + at_once]
        query = CellSums(apart(len(coins), 1, _RADIUS), _RADIUS, _COUNT_WEIGHT)
        if outlets.spec.adjacency == "replace_one":
            records = query.centers + np.where(coins, _RADIUS, -_RADIUS)[:, None]
            parts = np.split(records, len(records))
        else:
            records = query.centers + _RADIUS
            parts = [records[i : i + int(coin)] for i, coin in enumerate(coins)]
        yield look(outlets, query, parts if whole else [np.concatenate(parts)])


def _scores(cells: Cells, adjacency: Adjacency) -> Floats:
    """Log likelihood ratio of every canary, but for a constant."""
    sums = cells.sums[:, 0] * _RADIUS
    if adjacency == "replace_one" or cells.sum_sigma == 0:
        return sums
    return np.asarray(sums + cells.counts * (cells.sum_sigma / cells.count_sigma) ** 2)
