"""The grid that clients share when their vectors are added up.

All clients, and the server, work it out from the privacy spec, the question and the number of
clients; nobody is told. It is the same whatever adds the vectors up. Three things decide:

- noise must be so many steps that its being discrete costs the release no more than its share of
  the slack that the run has (docs/proofs/discrete_noise.md), and a record's contribution so many
  that truncating it does not show;
- the sum should fit into 36 bits, since the smallest parameters of encryption hold no more, or
  else into the 46 or 47 that the next ones hold (`ckks_parameters.py`);
- it must fit into 62 bits, or there is no grid.
"""

import math
from dataclasses import dataclass
from typing import Self

from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.accounting import MIN_NOISE, TAIL, Limit
from secure_fedclust.privacy.mechanism import FINE_BITS
from secure_fedclust.privacy.queries import Query
from secure_fedclust.privacy.sensitivity import Sensitivity, message
from secure_fedclust.privacy.spec import PrivacySpec

MOST_BITS = 62
WANTED_BITS = 36, 46, 47, MOST_BITS
"""Sums have the fewest of these bits that leave a grid fine enough."""

COARSE_BITS = 10
"""A sensitivity is at least two to this power of steps."""

EXACT_BITS = 25
"""The same where there is no noise for truncation to hide in."""

TIMES_PUBLIC_SIZE = 16
"""A client may hold so many times the public size before its totals are held back."""

UNKNOWN_SIZE = 1 << 24
"""Most records of a client that are counted where no size is public."""

_NOISE_REACH = 16.0
"""Standard deviations beyond which noise is not expected in the life of the universe."""


@dataclass(frozen=True)
class SumNeeds:
    """What a sum needs of a grid, whatever is asked.

    Attributes
    ----------
    mu : float
        What it may cost; 0 without differential privacy.
    steps : float
        Least sensitivity, in steps.
    records : int
        Most records of a client.
    client_reach, reach : float
        How far noise moves a number of a client, and one of the sum, in units of the sensitivity.
    n_clients : int
    """

    mu: float
    steps: float
    records: int
    client_reach: float
    reach: float
    n_clients: int

    @classmethod
    def of(
        cls,
        coordinates: int,
        spec: PrivacySpec,
        limit: Limit | None,
        share: float,
        n_clients: int,
    ) -> Self:
        """The needs of a sum of so many numbers; the other parameters as in `SumGrid.of`."""
        records = 1 if spec.unit == "client" else most_records(spec)
        if limit is None:
            return cls(0.0, 2.0**EXACT_BITS, records, 0.0, 0.0, n_clients)
        mu = limit.mu * math.sqrt(share)
        slack = TAIL * math.sqrt(coordinates / (24 * share * limit.slack))
        steps = max(2.0**COARSE_BITS, mu * max(MIN_NOISE, slack))
        alone = _NOISE_REACH / math.sqrt(spec.honest_survivors) / mu
        return cls(mu, steps, records, alone, math.sqrt(n_clients) * alone, n_clients)

    @property
    def each(self) -> float:
        """Largest number of a client, in units of the sensitivity."""
        return self.records + self.client_reach

    @property
    def bits(self) -> int:
        """How many are wanted for sums, about."""
        least = math.log2(self.steps * self.n_clients * self.each) + 1
        return next((bits for bits in WANTED_BITS if least <= bits), MOST_BITS)

    @property
    def usual(self) -> int:
        """How far from zero a number of a client is on the grid that is taken, about."""
        fitting = 2.0 ** (self.bits - 1) / (self.n_clients * self.each)
        # The grid step is a power of two.
        steps = min(fitting, 2.0 ** (FINE_BITS + 1)) / math.sqrt(2)
        return math.ceil(max(self.steps, steps) * self.each)

    @property
    def worst(self) -> int:
        """How far from zero it is on the coarsest grid that can be taken, at most."""
        # The grid step is a power of two: the next finer one, if need be.
        return math.ceil(2 * self.steps * self.each)


@dataclass(frozen=True)
class SumGrid:
    """How a sum over clients is quantised and noised.

    Attributes
    ----------
    exponent : int
        The grid step is two to this power.
    sigma : float
        Standard deviation in steps of the noise that server and colluders do not know, at least:
        that of `honest_survivors` clients. 0 without differential privacy.
    client_sigma : float
        Standard deviation of each client's noise.
    client_largest : int
        Each client's totals are held to this, in steps, before noise.
    client_reach : int
        No number that a client sends is farther from zero than this.
    largest : int
        No number of the sum is farther from zero than this.
    """

    exponent: int
    sigma: float
    client_sigma: float
    client_largest: int
    client_reach: int
    largest: int

    @classmethod
    def of(
        cls, query: Query, spec: PrivacySpec, limit: Limit | None, share: float, n_clients: int
    ) -> Self:
        """The grid of one question.

        Parameters
        ----------
        query : Query
        spec : PrivacySpec
        limit : Limit or None
            What the run may spend; None without differential privacy.
        share : float
            Of the run's mu squared, for this question.
        n_clients : int
            Clients whose vectors may be in the sum.
        """
        if spec.unit == "client" and query.extra_bits:
            raise ParameterError(
                f"unit='client': {type(query).__name__} needs a grid too fine for whole messages"
            )
        real = unit_sensitivity(query, spec).value
        needs = SumNeeds.of(query.coordinates, spec, limit, share, n_clients)
        finest = math.floor(math.log2(real / 2.0**FINE_BITS))
        coarsest = math.floor(math.log2(real / needs.steps)) - query.extra_bits
        most = math.log2(real * n_clients * needs.each * (1 + 2.0 ** (1 - COARSE_BITS)))
        fitting = (math.ceil(most) - bits + 1 for bits in WANTED_BITS)
        fits = next((exponent for exponent in fitting if exponent <= coarsest), coarsest)
        exponent = min(coarsest, max(finest, fits))
        while (steps := unit_sensitivity(query, spec, exponent).value) < needs.steps:
            exponent -= 1  # rounding to whole steps has taken something off
        client_largest = math.ceil(steps) * needs.records
        largest = n_clients * client_largest + math.ceil(steps * needs.reach)
        if largest >= 1 << MOST_BITS:
            raise ParameterError(
                f"a sum over {n_clients} clients of {query.coordinates} numbers would need "
                f"{largest.bit_length() + 1} bits, and {MOST_BITS + 1} are there: give a "
                "public_size, a larger epsilon, or fewer clusters"
            )
        sigma = 0.0 if limit is None else steps / needs.mu
        client_sigma = sigma / math.sqrt(spec.honest_survivors) if sigma else 0.0
        client_reach = client_largest + math.ceil(_NOISE_REACH * client_sigma)
        return cls(exponent, sigma, client_sigma, client_largest, client_reach, largest)


def unit_sensitivity(query: Query, spec: PrivacySpec, exponent: int | None = None) -> Sensitivity:
    """How far a record, or the data of a client, moves what a client adds to a sum.

    For the unit ``client`` the whole message is shortened to what one record could contribute:
    every client then counts the same, however many records it has.
    """
    if spec.unit == "record":
        return query.sensitivity(spec.adjacency, exponent)
    norm = query.sensitivity("add_remove", exponent).value
    return message(math.floor(norm) if exponent is not None else norm, spec.adjacency)


def most_records(spec: PrivacySpec) -> int:
    """Most records of a client that a sum has room for."""
    return UNKNOWN_SIZE if spec.public_size is None else TIMES_PUBLIC_SIZE * spec.public_size
