"""Discrete Gaussian noise by the million: for training, where OpenDP's sampler would take hours.

The sampler is Karney's, on a grid: a whole number of standard deviations, a uniform place behind
it, and coins that decide whether both stay. Every coin is a comparison of 64 random bits, or more
of them one after the other, so that the probability of every value up to 21 standard deviations is
that of the discrete Gaussian but for a factor within 1e-14 of one: far below the slack that
discrete noise is charged for anyway (docs/proofs/training.md). The bits are those of AES-256 in
counter mode, under a key from the operating system that is used once.
"""

import secrets
from decimal import Decimal, localcontext
from functools import cache
from typing import Any, Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from secure_fedclust.arrays import Ints
from secure_fedclust.privacy.mechanism import SamplerName

NOISE_BITS = 24
NOISE = 1 << NOISE_BITS
"""Standard deviation of the noise, in steps of the grid that it is on."""

Words = NDArray[np.uint64]

_BLOCK = 1 << 15
"""Words that are made at a time, so many that they stay in the processor's cache."""

_ZEROS = bytes(8 * _BLOCK)
_TABLE = 3
"""Whole standard deviations from which on they are found coin by coin."""


class Randomness(Protocol):
    """What a noisy training has to draw."""

    def noise(self, size: int) -> Ints:
        """Independent noise with a standard deviation of `NOISE`."""

    def choose(self, n: int, rate: float) -> Ints:
        """Which of n records are drawn, each by itself with probability `rate`, in order."""


def randomness(sampler: SamplerName) -> Randomness:
    """``secure``: a stream cipher's, under a fresh key. ``fast``: numpy's, no basis for a claim."""
    return Secret() if sampler == "secure" else _Quick()


class Secret:
    """Noise and choices that nobody can predict or repeat."""

    def __init__(self) -> None:
        key = algorithms.AES256(secrets.token_bytes(32))
        self._cipher = Cipher(key, modes.CTR(bytes(16))).encryptor()
        self._left = np.empty(0, dtype=np.uint64)

    def words(self, size: int) -> Words:
        """So many times 64 random bits."""
        parts = [self._left]
        missing = size - len(self._left)
        while missing > 0:
            parts.append(np.frombuffer(self._cipher.update(_ZEROS), dtype=np.uint64))
            missing -= _BLOCK
        found = np.concatenate(parts)
        self._left = found[size:]
        return found[:size]

    def noise(self, size: int) -> Ints:
        """Discrete Gaussian noise with a standard deviation of `NOISE`."""
        drawn = np.empty(size, dtype=np.int64)
        done = wanted = 0
        while done < size:
            # More each time in vain: a number may take any number of words.
            wanted = max(min(6 * (size - done) + 64, _BLOCK), 2 * wanted if wanted else 0)
            words = self.words(wanted)
            more, used = _sampler()(words, drawn[done:], _THRESHOLDS, _HALF, _CUBE)
            done += more
            wanted = 0 if more else wanted
            # What an unfinished number has looked at is read again with what follows: thrown
            # away, it would make numbers rarer that take long to draw.
            self._left = np.concatenate([words[used:], self._left])
        return drawn

    def choose(self, n: int, rate: float) -> Ints:
        """Which of n records are drawn; the probability is `rate`, rounded down to 64 bits."""
        if rate >= 1:
            return np.arange(n)
        below = np.uint64(int(rate * 2.0**64))
        return np.flatnonzero(self.words(n) < below)


class _Quick:
    """For experiments without a claim."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng()

    def noise(self, size: int) -> Ints:
        return np.rint(self._generator.standard_normal(size) * NOISE).astype(np.int64)

    def choose(self, n: int, rate: float) -> Ints:
        return np.flatnonzero(self._generator.random(n) < rate)


def _in_64_bits(probability: Decimal) -> np.uint64:
    return np.uint64(int(probability * 2**64))


def _coins() -> tuple[Words, np.uint64, np.uint64]:
    """Probabilities that are compared with 64 bits: of 0, 1, 2 deviations; e^-1/2; e^-3."""
    with localcontext() as context:
        context.prec = 60
        weights = [(Decimal(-k * k) / 2).exp() for k in range(_TABLE + 1)]
        ratio = Decimal(-_TABLE).exp()
        # What is beyond the table is proposed more often than it stays: as a geometric series.
        weights[_TABLE] /= 1 - ratio
        total = sum(weights[1:], weights[0])
        thresholds = [_in_64_bits(sum(weights[:k], weights[k]) / total) for k in range(_TABLE)]
        return np.array(thresholds), _in_64_bits(weights[1]), _in_64_bits(ratio)


_THRESHOLDS, _HALF, _CUBE = _coins()


@cache
def _sampler() -> Any:
    """Compiled when first used, so that importing this file needs no numba."""
    import numba

    return numba.njit(_fill, cache=True, nogil=True)


def _fill(
    words: Words, drawn: Ints, thresholds: Words, half: np.uint64, cube: np.uint64
) -> tuple[int, int]:
    """Fill `drawn` as far as the words go; how many were drawn, and how many words they took."""
    n_words, kept, i = len(words), 0, 0
    for done in range(len(drawn)):
        while True:
            # A number needs a few words; with fewer than these the caller brings more.
            if i + 2 > n_words:
                return done, kept
            word = words[i]
            i += 1
            k = 0
            while k < _TABLE and word >= thresholds[k]:
                k += 1
            if k == _TABLE:
                # exp(-(3 + j)^2 / 2) is exp(-9/2) times exp(-3)^j times exp(-1/2)^(j * j).
                j = 0
                while i < n_words and words[i] < cube:
                    j += 1
                    i += 1
                i += 1
                stays, coin = True, 0
                while stays and coin < j * j:
                    if i >= n_words:
                        return done, kept
                    stays = words[i] < half
                    i += 1
                    coin += 1
                if not stays:
                    continue
                k = _TABLE + j
            if i >= n_words:
                return done, kept
            word = words[i]
            i += 1
            place = np.int64(word >> np.uint64(64 - NOISE_BITS))
            negative = (word & np.uint64(1)) == np.uint64(1)
            if negative and k == 0 and place == 0:
                continue  # or there would be two zeros
            v = place / NOISE
            # exp(-v (2k + v) / 2): k coins of exp(-v), and one of exp(-v^2 / 2).
            stays, coin = True, 0
            while stays and coin <= k:
                if i >= n_words:
                    return done, kept
                stays = words[i] * 2.0**-64 < np.exp(-v if coin < k else -v * v / 2)
                i += 1
                coin += 1
            if stays:
                break
        size = k * NOISE + place
        drawn[done] = -size if negative else size
        kept = i
    return len(drawn), kept
