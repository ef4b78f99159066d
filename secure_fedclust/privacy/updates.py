"""Weights of networks in sums over clients.

Weights that were trained with noise enough are added up as they are: masks or encryption hide whose
they are, and no more noise is needed. Weights that were trained without are hidden client by client
(``unit="client"``): a client's whole update is shortened to a public length, and the noise is in
the sum.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import TrainingError
from secure_fedclust.privacy import sensitivity as formulas
from secure_fedclust.privacy.mechanism import Bounded, Noisy, clip_rows
from secure_fedclust.privacy.queries import Query, in_steps
from secure_fedclust.privacy.sensitivity import Sensitivity
from secure_fedclust.privacy.terms import Adjacency

LARGEST_WEIGHT = 16.0
"""Networks whose weights are larger have gone astray."""

_SUM_BITS = 35
"""Sums have so many bits and a sign, which the smallest parameters of encryption hold."""


@dataclass(frozen=True)
class WeightGrid:
    """The grid that clients' weights are added up on; it follows from the number of clients.

    Attributes
    ----------
    exponent : int
        The grid step is two to this power.
    reach : int
        No number of a client is farther from zero, in steps.
    n_clients : int
    """

    exponent: int
    reach: int
    n_clients: int

    @classmethod
    def of(cls, n_clients: int) -> Self:
        """The grid for a cohort."""
        bits = math.floor(_SUM_BITS - math.log2(n_clients))
        return cls(round(math.log2(LARGEST_WEIGHT)) - bits, 1 << bits, n_clients)

    @property
    def largest(self) -> int:
        """No number of the sum is farther from zero."""
        return self.n_clients * self.reach

    def steps(self, weights: Floats | float) -> Any:
        """Weights in whole steps, rounded; those of a network gone astray are refused."""
        if not (np.abs(weights) <= LARGEST_WEIGHT).all():
            raise TrainingError(
                f"weights beyond {LARGEST_WEIGHT:g} are not added up: lower the learning rate"
            )
        return np.rint(np.ldexp(weights, -self.exponent)).astype(np.int64)

    def weights(self, steps: Ints) -> Floats:
        """Whole steps as weights."""
        return np.ldexp(steps.astype(np.float64), self.exponent)


@dataclass(frozen=True)
class WholeUpdate(Query):
    """All that a client has to say, as one vector shortened to a public length.

    For the unit ``client`` only: one record can turn it around.

    Parameters
    ----------
    length : int
    norm : float
    update_of : function
        The vector, from the client's records.
    """

    length: int
    norm: float
    update_of: Callable[[Floats], Floats]

    def sensitivity(self, adjacency: Adjacency, exponent: int | None = None) -> Sensitivity:
        return formulas.message(in_steps(self.norm, exponent), adjacency)

    @property
    def coordinates(self) -> int:
        return self.length

    def answer(self, X: Floats, adjacency: Adjacency, exponent: int) -> Bounded:
        steps = np.ldexp(self.update_of(X), -exponent)[None]
        short = clip_rows(steps, int(in_steps(self.norm, exponent)))[0]
        return Bounded({"update": short}, self.sensitivity(adjacency, exponent), exponent)

    def read(self, noisy: Noisy) -> Floats:
        """The noisy vector, or sum of vectors, in real terms."""
        return np.ldexp(noisy.fields["update"].astype(np.float64), noisy.exponent)
