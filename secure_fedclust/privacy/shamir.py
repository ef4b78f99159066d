"""Shamir's secret sharing: any `threshold` shares give a secret back, and fewer say nothing.

Each byte of a secret is shared by itself, as the value at 0 of a random polynomial over the whole
numbers modulo a prime; a share is the polynomial's value at the holder's point, 1 to n. Products
and their sums stay below 2^53, so that a multiplication of matrices in floating point is exact.
Why fewer shares say nothing: docs/proofs/masking.md.
"""

import secrets
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import ParameterError

PRIME = 65521
"""The largest prime below 2^16: a share of a byte fits into two."""

MOST_HOLDERS = 1 << 15
"""More could be had, but nobody shares a secret with that many."""

Shares = NDArray[np.uint16]


def split(secret: bytes, n: int, threshold: int) -> Shares:
    """Shares of a secret for `n` holders, one a row."""
    if not 1 <= threshold <= n <= MOST_HOLDERS:
        raise ParameterError(
            f"threshold={threshold} of {n} shares: give 1 to {n}, for at most {MOST_HOLDERS}"
        )
    coefficients = np.empty((threshold, len(secret)))
    coefficients[0] = np.frombuffer(secret, dtype=np.uint8)
    drawn = _uniform((threshold - 1) * len(secret))
    coefficients[1:] = drawn.reshape(threshold - 1, len(secret))
    return (_product(_powers(n, threshold), coefficients) % PRIME).astype(np.uint16)


def weights(points: Sequence[int] | Ints) -> Floats:
    """What the shares of these holders, counted from 1, are multiplied by to get a secret back.

    Of several lists of holders, one a row, the weights of each.
    """
    x = np.asarray(points, dtype=np.int64)
    ordered = np.sort(x, axis=-1)
    if (np.diff(ordered) == 0).any() or not ((x >= 1) & (x < PRIME)).all():
        raise ParameterError(f"points={x.tolist()}: give different ones from 1 to {PRIME - 1}")
    above, below = np.ones_like(x), np.ones_like(x)
    for i in range(x.shape[-1]):
        other = x[..., i : i + 1]
        rest = np.arange(x.shape[-1]) != i
        above[..., rest] = above[..., rest] * -other % PRIME
        below[..., rest] = below[..., rest] * (x[..., rest] - other) % PRIME
    return np.asarray(above * _inverse(below) % PRIME, dtype=np.float64)


def join(weights: Floats, shares: Shares) -> list[bytes | None]:
    """Secrets from their shares, of shape (holders, secrets, bytes); None for what was none.

    Weights are those of the holders, or one row of them for each secret. Shares that do not belong
    together give wrong bytes, or None: compare with a commitment.
    """
    if weights.ndim == 1:
        flat = shares.reshape(len(shares), -1).astype(np.float64)
        found = (weights @ flat % PRIME).reshape(shares.shape[1:])
    else:
        found = (weights[:, None] @ shares.swapaxes(0, 1).astype(np.float64))[:, 0] % PRIME
    rows = found.astype(np.int64)
    return [bytes(row.tolist()) if (row < 256).all() else None for row in rows]


def _inverse(x: Ints) -> Ints:
    """One over each number, by Fermat: its power of the prime less two."""
    found, square, exponent = np.ones_like(x), x, PRIME - 2
    while exponent:
        if exponent & 1:
            found = found * square % PRIME
        square, exponent = square * square % PRIME, exponent >> 1
    return found


def _product(left: Floats, right: Floats) -> Floats:
    """A product of matrices in pieces small enough for one thread.

    Where other work keeps the cores busy, waiting for a second thread takes longer than all of it.
    """
    rows = max(1, (1 << 18) // max(right.size, 1))
    pieces = [left[i : i + rows] @ right for i in range(0, len(left), rows)]
    return np.concatenate(pieces)


@lru_cache(maxsize=2)
def _powers(n: int, threshold: int) -> Floats:
    powers: Ints = np.ones((n, threshold), dtype=np.int64)
    points = np.arange(1, n + 1)
    for j in range(1, threshold):
        powers[:, j] = powers[:, j - 1] * points % PRIME
    return powers.astype(np.float64)


def _uniform(size: int) -> Ints:
    """Random numbers below the prime, all equally likely: what is not below it is drawn again."""
    drawn = np.zeros(0, dtype=np.int64)
    while len(drawn) < size:
        more = np.frombuffer(secrets.token_bytes(2 * (size - len(drawn))), dtype="<u2")
        drawn = np.concatenate([drawn, more[more < PRIME].astype(np.int64)])
    return drawn
