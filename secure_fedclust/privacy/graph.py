"""Who shares keys with whom in a round of masking: all with all, or each with some neighbours.

Where clients are many, each agrees on masks with `degree` others only, and gives shares of its
secrets to them (Bell et al. 2020). Clients stand on a ring, in an order that the server draws anew
for every round, and neighbours are those at most half the degree away. The complete graph is the
one where everybody is a neighbour.

Nobody chooses a degree or a threshold. Both follow from the number of clients and from what all
have agreed on, so that a client knows which to expect. Over the drawing of the order,

- no client of those that share with nobody what they know has `threshold` colluders among its
  neighbours, and those of them whose vectors are in the sum hang together, but for a probability of
  2^-40 in a round;
- every client has `threshold` neighbours that stay to the end, but for 2^-30, if no more drop out
  than the round survives anyhow.

Probabilities are computed in whole numbers, so that all find the same. Why this is enough:
docs/proofs/masking.md.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb, prod
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from secure_fedclust.arrays import Ints
from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.cohort import LARGEST_COHORT, LARGEST_FEDERATION, Rules

Place = TypeVar("Place", int, Ints)
"""A place on the ring, counted from 0, or several."""

INSECURE = Fraction(1, 1 << 40)
"""How likely an order may be on which masks protect less than they should."""

INCORRECT = Fraction(1, 1 << 30)
"""How likely one may be on which a sum cannot be opened."""

SPARSE_FROM = 100
"""Fewer clients than this share with everybody: a round takes a second then, and clients count the
others themselves."""


@dataclass(frozen=True)
class Graph:
    """A circle for each client: its neighbours and itself, in the order of the ring.

    Attributes
    ----------
    n_clients : int
    degree : int
        Neighbours of a client.
    threshold : int
        Shares, of one from each of a client's circle, that open a secret of it.
    least : int
        How many of a client's circle must be there, itself included, for it to go on.
    """

    n_clients: int
    degree: int
    threshold: int
    least: int

    @classmethod
    def of(cls, n_clients: int, rules: Rules) -> Self:
        """The graph of a cohort; an error where these rules do not allow so many clients."""
        rules.check(n_clients, LARGEST_COHORT if rules.active_server else LARGEST_FEDERATION)
        least, colluders = rules.min_survivors, rules.colluders
        found = None
        if not rules.active_server and n_clients >= SPARSE_FROM:
            found = sparse_parameters(n_clients, colluders, n_clients - least)
        if found is not None:
            degree, threshold = found
            return cls(n_clients, degree, threshold, threshold + 1)
        if n_clients > LARGEST_COHORT:
            raise ParameterError(
                f"{n_clients} clients, of which {colluders} may collude and "
                f"{n_clients - least} drop out: each would have to share keys with more than "
                f"{LARGEST_COHORT}; give fewer colluders, or a higher min_survivors"
            )
        return cls(n_clients, n_clients - 1, least, least)

    @property
    def is_complete(self) -> bool:
        """Whether everybody is a neighbour."""
        return self.degree == self.n_clients - 1

    @property
    def size(self) -> int:
        """How many are in a circle."""
        return self.degree + 1

    def order(self) -> list[int]:
        """A place on the ring for each client, drawn anew where it matters."""
        places = list(range(self.n_clients))
        if not self.is_complete:
            secrets.SystemRandom().shuffle(places)
        return places

    def start(self, place: Place) -> Place:
        """Where the circle of the client at a place begins."""
        return 0 * place if self.is_complete else (place - self.degree // 2) % self.n_clients

    def circle(self, start: int) -> Ints:
        """The places of a circle, in order."""
        return np.asarray((start + np.arange(self.size)) % self.n_clients, dtype=np.int64)

    def index(self, owner: Place, other: int) -> Place:
        """Where in the circle of one client another stands, counted from 0."""
        return (other - self.start(owner)) % self.n_clients

    def hangs_together(self, present: NDArray[np.bool_]) -> bool:
        """Whether those that are present at their places are joined by edges between them."""
        places = np.flatnonzero(present)
        if self.is_complete or len(places) < 2:
            return True
        gaps = np.diff(places, append=places[0] + self.n_clients)
        # Two gaps that no edge spans part the ring; one leaves a way around.
        return int(np.sum(gaps > self.degree // 2)) < 2


@lru_cache(maxsize=256)
def sparse_parameters(n_clients: int, colluders: int, dropouts: int) -> tuple[int, int] | None:
    """An even degree that is safe, and its threshold; None if nearly all would be neighbours.

    The threshold is the largest that dropouts allow. The degree is found by halving: the next
    smaller even one is not safe.
    """
    most = min(n_clients - 2, LARGEST_COHORT - 1) // 2
    high = 1
    while high < most and not _threshold(n_clients, colluders, dropouts, 2 * high):
        high = min(2 * high, most)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if _threshold(n_clients, colluders, dropouts, 2 * middle):
            high = middle
        else:
            low = middle
    threshold = _threshold(n_clients, colluders, dropouts, 2 * high)
    return (2 * high, threshold) if threshold else None


def _threshold(n_clients: int, colluders: int, dropouts: int, degree: int) -> int:
    """The largest threshold that dropouts allow with a degree; 0 if it is not safe."""
    others = n_clients - 1
    allowed = INCORRECT / n_clients
    threshold = degree + 1 - _unlikely(others, dropouts, degree, allowed)
    # One share alone must not open anything, even where nobody is taken to collude.
    if threshold < 2 or insecurity(n_clients, colluders, dropouts, degree, threshold) > INSECURE:
        return 0
    return threshold


def insecurity(
    n_clients: int, colluders: int, dropouts: int, degree: int, threshold: int
) -> Fraction:
    """Bound on the probability of an order on which masks protect less than they should."""
    opened = (n_clients - colluders) * tail(n_clients - 1, colluders, degree, threshold)
    return opened + parted(n_clients, colluders + dropouts, degree)


def parted(n_clients: int, gone: int, degree: int) -> Fraction:
    """Bound on the probability that those left on the ring do not hang together.

    For that half the degree of consecutive places must be empty, twice. There are so many pairs of
    such runs, and all their places are among those that are gone.
    """
    pairs = Fraction(n_clients * max(n_clients - degree + 1, 0), 2)
    return pairs * Fraction(
        prod(max(gone - i, 0) for i in range(degree)), prod(n_clients - i for i in range(degree))
    )


def tail(population: int, marked: int, drawn: int, least: int) -> Fraction:
    """Probability that so many, or more, of those drawn without putting back are marked ones."""
    total = 0
    for count, ways in _ways(population, marked, drawn):
        if count < least:
            break
        total += ways
    return Fraction(total, comb(population, drawn))


def _unlikely(population: int, marked: int, drawn: int, allowed: Fraction) -> int:
    """The least number of marked ones that are drawn with no more than a probability."""
    room, total = allowed * comb(population, drawn), 0
    for count, ways in _ways(population, marked, drawn):
        total += ways
        if total > room:
            return count + 1
    return 0


def _ways(population: int, marked: int, drawn: int) -> Iterator[tuple[int, int]]:
    """In how many ways each number of marked ones is drawn, from the most down."""
    count = min(marked, drawn)
    ways = comb(marked, count) * comb(population - marked, drawn - count)
    while ways:
        yield count, ways
        # One marked one less, and one other more.
        ways *= count * (population - marked - drawn + count)
        ways //= (marked - count + 1) * (drawn - count + 1)
        count -= 1
