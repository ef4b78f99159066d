"""From bounded statistics to a release: exact sums on a grid, and discrete Gaussian noise.

Statistics are whole numbers of grid steps. Noise is added to a `Bounded` only, which says how far
one record can move it; a plain array has no way to be released. Why floating-point sums and noise
would not do: docs/proofs/discrete_noise.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.accounting import MIN_NOISE, slack_of
from secure_fedclust.privacy.sensitivity import Sensitivity

FINE_BITS = 20
"""A sensitivity is at least two to this power of grid steps: truncating records then costs nothing
visible."""

LARGEST_RADIUS = 1 << 31
"""Grid steps in a radius, at most: exact squared lengths then fit into 64 bits."""

MIN_CLIENT_NOISE = 16
"""Least noise of one client in a sum, in grid steps: several such are one discrete Gaussian, but
for less than any slack that is counted."""

USEFUL_NOISE = 1 << 36

MAX_NOISE = 1 << 56
"""Most noise, in grid steps: what it is added to still fits into 64 bits, and into a message."""

_HUGE = 2.0**100

SamplerName = Literal["secure", "fast"]


@dataclass(frozen=True)
class Bounded:
    """Exact sums of bounded contributions, in whole grid steps, and how far one record moves them.

    Made by the queries of `secure_fedclust.privacy.queries`, which bound each record themselves.

    Attributes
    ----------
    fields : mapping of name to int64 array
    sensitivity : Sensitivity
        Of all fields together, in grid steps.
    exponent : int
        The grid step is two to this power.
    """

    fields: Mapping[str, Ints] = field(repr=False)
    sensitivity: Sensitivity
    exponent: int

    @property
    def coordinates(self) -> int:
        """How many numbers there are."""
        return sum(field.size for field in self.fields.values())

    def held(self, largest: int) -> "Bounded":
        """The same with no number beyond `largest`, which brings neighbours no farther apart."""
        fields = {name: np.clip(field, -largest, largest) for name, field in self.fields.items()}
        return Bounded(fields, self.sensitivity, self.exponent)


@dataclass(frozen=True)
class Noisy:
    """What may be seen: whole grid steps, with noise of `sigma` steps standard deviation.

    No number of what goes into a sum is farther from zero than `reach`.
    """

    fields: Mapping[str, Ints]
    exponent: int
    sigma: float
    reach: int | None = None


class Sampler(Protocol):
    """Draws discrete Gaussian noise."""

    def __call__(self, sigma: float, size: int) -> Ints:
        """Independent draws of standard deviation `sigma`."""


def exponent_for(sensitivity: float, mu: float, fine_bits: int = FINE_BITS) -> int:
    """Exponent of a grid step fine enough for a release of this sensitivity and cost.

    The noise, sensitivity / mu, is at least 2^12 steps, and the sensitivity at least two to the
    power of `fine_bits`, unless the noise would be more than 2^37 steps then.
    """
    fine = math.floor(math.log2(min(sensitivity / mu / MIN_NOISE, sensitivity / 2**fine_bits)))
    # Where noise is huge, a grid that fine is of no use, and noise must fit into 64 bits.
    return max(fine, math.floor(math.log2(sensitivity / mu / USEFUL_NOISE)))


def noise_level(bounded: Bounded, mu: float) -> tuple[float, float]:
    """Standard deviation of the noise for a release that costs `mu`, in steps, and its slack."""
    sigma = bounded.sensitivity.value / mu
    if not MIN_NOISE <= sigma <= MAX_NOISE:
        raise ParameterError(
            f"noise of {sigma:g} grid steps: from {MIN_NOISE} to {MAX_NOISE} can be drawn and sent"
        )
    return sigma, slack_of(sigma, bounded.coordinates)


def noise(bounded: Bounded, sigma: float, sampler: Sampler) -> Noisy:
    """Add independent noise to every number, empty clusters' included."""
    if not isinstance(bounded, Bounded):
        raise TypeError(f"noise is added to Bounded statistics, not to {type(bounded).__name__}")
    drawn = sampler(sigma, bounded.coordinates)
    fields = {}
    start = 0
    for name, exact in bounded.fields.items():
        end = start + exact.size
        fields[name] = exact + drawn[start:end].reshape(exact.shape)
        start = end
    return Noisy(fields, bounded.exponent, sigma)


def sampler_named(name: SamplerName) -> Sampler:
    """``secure``: exact, from the system's randomness. ``fast``: numpy's, for sweeps only."""
    return {"secure": secure_noise, "fast": fast_noise}[name]


def secure_noise(sigma: float, size: int) -> Ints:
    """Exact discrete Gaussian draws by OpenDP, from the operating system's randomness."""
    return np.asarray(_opendp_measurement(sigma)([0] * size), dtype=np.int64)


def fast_noise(sigma: float, size: int) -> Ints:
    """Rounded normal draws by numpy, fifty times as fast and no basis for a claim.

    Not seeded: equal noise in two releases would cancel in their difference.
    """
    return np.rint(np.random.default_rng().normal(0, sigma, size)).astype(np.int64)


def clip_rows(rows: Floats, radius: int) -> Ints:
    """Rows in grid steps, shortened to `radius` and truncated towards zero.

    Each row of the result depends on that row alone, bit for bit, wherever it stands: there are
    only element-wise operations. Its length is checked in whole numbers, so that no rounding can
    leave it too long.
    """
    if not 0 < radius <= LARGEST_RADIUS:
        raise ParameterError(f"radius={radius}: give 1 to {LARGEST_RADIUS} grid steps")
    # Whatever could not be computed counts for nothing, and squares must not overflow.
    rows = np.clip(np.nan_to_num(rows), -_HUGE, _HUGE)
    length = np.sqrt(squared_lengths(rows))
    shrink = np.minimum(1.0, radius / np.maximum(length, 1.0))
    clipped = np.trunc(rows * shrink[:, None]).astype(np.int64)
    while (long := np.flatnonzero(squared_lengths(clipped) > radius * radius)).size:
        clipped[long] -= np.sign(clipped[long])
    return np.asarray(clipped)


def add_up(contributions: Ints, cells: Ints, n_cells: int) -> Ints:
    """Exact sums by cell, of shape (n_cells, width); the order of records does not matter."""
    import scipy.sparse as sp

    n = len(contributions)
    one_hot = sp.csc_array(
        (np.ones(n, dtype=np.int64), cells, np.arange(n + 1)), shape=(n_cells, n)
    )
    return np.asarray(one_hot @ contributions, dtype=np.int64)


def squared_lengths(rows: Any) -> Any:
    """Squared length of each row, column by column: what other rows there are does not matter."""
    total = np.zeros(len(rows), dtype=rows.dtype)
    for column in rows.T:
        total += column * column
    return total


@cache
def _opendp() -> Any:
    import opendp.prelude as dp

    dp.enable_features("contrib")
    return dp


def _opendp_measurement(sigma: float) -> Any:
    dp = _opendp()
    domain = dp.vector_domain(dp.atom_domain(T="i64"))
    return dp.m.make_gaussian(domain, dp.l2_distance(T=float), scale=sigma)
