"""Parameters of encrypted sums: how large numbers may be, and how small errors are.

Nothing is encrypted here. Why the numbers are what they are: docs/proofs/ckks.md.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from secure_fedclust.errors import ParameterError

TOLERANCE = 0.25
"""How far from a whole number an opened one may be, in grid steps."""

REACH = 32.0
"""Standard deviations of the error that must stay within the tolerance: it is exceeded with a
probability below 2^-58 for each number."""

HEADROOM_BITS = 1
"""Room beyond the bound, in which a sum that is too large shows as such."""

PRECISE_BITS = 46
"""Larger numbers lose whole steps in the transforms, which compute in double precision."""

_OVERHEAD = 1024


@dataclass(frozen=True)
class Preset:
    """Parameters of encryption with 128 bits of security.

    Attributes
    ----------
    degree : int
        Of the polynomials.
    moduli : tuple of int
        Bits of each prime; the last one serves encryption only.
    """

    degree: int
    moduli: tuple[int, ...]

    @property
    def slots(self) -> int:
        """Numbers in a ciphertext, those that fill it up included."""
        return self.degree // 2

    @property
    def used(self) -> int:
        """Numbers of a vector in a ciphertext.

        Sums of more bits show how the transforms of double precision have rounded: there the other
        half is left to random numbers, which nobody can guess.
        """
        return self.slots if len(self.moduli) == 2 else self.slots // 2

    @property
    def bits(self) -> int:
        """What a number, times the scale, must fit in."""
        return sum(self.moduli[:-1])

    @property
    def ciphertext_bytes(self) -> tuple[int, int]:
        """Smallest and largest size: what is random cannot be compressed further."""
        return _sizes(self.degree, self.moduli[:-1])

    @property
    def usual_bytes(self) -> int:
        """About the size of a ciphertext."""
        least, most = self.ciphertext_bytes
        return least + (most - least) // 3

    @property
    def key_bytes(self) -> tuple[int, int]:
        """Smallest and largest size of a public key."""
        return _sizes(self.degree, self.moduli)

    def scale_bits(self, n_clients: int) -> int:
        """Least scale, as a power of two, at which errors stay within the tolerance."""
        return math.ceil(math.log2(REACH * self.degree / 6 / TOLERANCE) + math.log2(n_clients) / 2)

    def capacity(self, n_clients: int) -> int:
        """Largest number of a sum over so many clients."""
        room = self.bits - 1 - HEADROOM_BITS - self.scale_bits(n_clients)
        return 0 if room < 0 else 1 << min(room, PRECISE_BITS)

    def __str__(self) -> str:
        return f"({self.degree}, {list(self.moduli)})"


PRESETS = (Preset(4096, (60, 49)), Preset(4096, (36, 36, 37)))
"""From the smallest to the largest. 109 bits in all are the most that the degree allows."""


@dataclass(frozen=True)
class Parameters:
    """How the vectors of a round are encrypted. Whoever knows the question works them out.

    Attributes
    ----------
    length : int
        Numbers in a vector.
    n_clients : int
        Most vectors that are added up.
    reach : int
        No number of a vector is farther from zero.
    """

    length: int
    n_clients: int
    reach: int

    def __post_init__(self) -> None:
        for name in ("length", "n_clients", "reach"):
            if getattr(self, name) < 1:
                raise ParameterError(f"{name}={getattr(self, name)}: give at least 1")
        self.preset  # noqa: B018 - refuses what does not fit

    @property
    def largest(self) -> int:
        """No number of the sum is farther from zero."""
        return int(self.n_clients) * int(self.reach)

    @cached_property
    def preset(self) -> Preset:
        """The smallest that has room for the sum."""
        for preset in PRESETS:
            if self.largest <= preset.capacity(self.n_clients):
                return preset
        raise ParameterError(
            f"a sum of {self.n_clients} vectors of numbers up to {self.reach} needs "
            f"{self.largest.bit_length() + 1} bits, and encryption has room for "
            f"{PRESETS[-1].capacity(self.n_clients).bit_length()} at most: with a public_size (a "
            "client may hold 16 times as many records), fewer clients or a smaller epsilon there "
            "is less to hold; protection='masking' has more room"
        )

    @cached_property
    def scale(self) -> float:
        """What numbers are multiplied by: a power of two that takes all the room there is."""
        needed = (self.largest - 1).bit_length()
        return math.ldexp(1.0, self.preset.bits - 1 - HEADROOM_BITS - needed)

    @property
    def chunks(self) -> int:
        """Ciphertexts of a vector."""
        return math.ceil(self.length / self.preset.used)

    @property
    def most_bytes(self) -> int:
        """Largest size of an encrypted vector."""
        return self.chunks * self.preset.ciphertext_bytes[1]

    def text(self) -> bytes:
        """Everything that is said of the parameters, in bytes."""
        numbers = (self.length, self.n_clients, self.reach, self.preset.degree, *self.preset.moduli)
        return json.dumps([*numbers, self.scale]).encode()


def _sizes(degree: int, moduli: Sequence[int]) -> tuple[int, int]:
    """Bytes of two polynomials: what is random in them, and as they lie in memory."""
    return degree * sum(moduli) // 4, 16 * degree * len(moduli) + _OVERHEAD
