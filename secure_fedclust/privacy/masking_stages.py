"""The stages of a round of masking, the rules that hold in it, and what its keys depend on.

What is done in them: `masking.py`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from secure_fedclust.arrays import Ints
from secure_fedclust.errors import ParameterError
from secure_fedclust.messages import ANCHOR, Array, Bounds, Integer, stage
from secure_fedclust.privacy import shamir
from secure_fedclust.privacy.identity import SIGNATURE_BYTES
from secure_fedclust.privacy.masks import KEY_BYTES, TAG_BYTES, digest
from secure_fedclust.privacy.secure_sum import MAX_QUESTION

SMALLEST_COHORT = 3
"""Of two clients, each could subtract its own vector from the sum and see the other's."""

LARGEST_COHORT = 1 << 12
"""Everybody shares with everybody: beyond a few thousand that is too much to send."""

SEALED_BYTES = 2 * 2 * KEY_BYTES + TAG_BYTES
"""Two shared secrets, two bytes for the share of a byte, and a tag."""

Bytes = NDArray[np.uint8]

_ROUND = {"number": Integer()}
_SIGNATURES = Array(("signed", "signature"), "uint8")


def _places_of(dimension: str) -> Array:
    """Places in the cohort, counted from 0."""
    return Array((dimension,), "int64", minimum=0, largest=LARGEST_COHORT)


ADVERTISE = stage(
    "masking/advertise",
    request=_ROUND,
    reply={
        "keys": Array(("keys",), "uint8"),
        "commitment": Array(("commitment",), "uint8"),
        "agreement": Array(("agreement",), "uint8"),
        "identity": Array(("identity",), "uint8"),
        "signature": Array(("signature",), "uint8"),
    },
    form="key",
)
SHARE = stage(
    "masking/share",
    request={
        **_ROUND,
        "keys": Array(("n", "keys"), "uint8"),
        "identities": Array(("signed", "identity"), "uint8"),
        "signatures": _SIGNATURES,
    },
    reply={"sealed": Array(("n", "sealed"), "uint8")},
    form="sealed",
)
MASK = stage(
    "masking/mask",
    request={
        **_ROUND,
        "members": _places_of("members"),
        "sealed": Array(("members", "sealed"), "uint8"),
        "question": Array(("bytes",), "uint8"),
    },
    reply={"masked": Array(("length",), "uint64"), **ANCHOR},
    form="masked",
)
CONFIRM = stage(
    "masking/confirm",
    request={**_ROUND, "survivors": _places_of("members")},
    reply={"signature": Array(("signature",), "uint8")},
    form="key",
)
UNMASK = stage(
    "masking/unmask",
    request={
        **_ROUND,
        "survivors": _places_of("members"),
        "dropped": _places_of("others"),
        "signers": _places_of("signed"),
        "signatures": _SIGNATURES,
    },
    reply={"shares": Array(("shares", "share"), "uint16", largest=shamir.PRIME - 1)},
    form="share",
)

BOUNDS: Bounds = {
    "n": (SMALLEST_COHORT, LARGEST_COHORT),
    "members": (0, LARGEST_COHORT),
    "others": (0, LARGEST_COHORT),
    "signed": (0, LARGEST_COHORT),
    "keys": 2 * KEY_BYTES,
    "identity": KEY_BYTES,
    "signature": SIGNATURE_BYTES,
    "sealed": SEALED_BYTES,
    "bytes": (0, MAX_QUESTION),
}
"""Sizes of what a client is sent."""


@dataclass(frozen=True)
class Rules:
    """What all clients have agreed on beforehand; no number of it comes from the server.

    Parameters
    ----------
    min_survivors : int
        Vectors that must be in a sum, and shares that open it.
    colluders : int
        Clients that may share what they know with the server.
    agreement : bytes
        The privacy spec, in bytes: it goes into the derivation of keys.
    active_server : bool
        Whether clients sign, and check what the server shows to others.
    least_honest : int
        Vectors of honest clients that a sum must have: two where there is no noise in them.
    """

    min_survivors: int
    colluders: int
    agreement: bytes = b""
    active_server: bool = False
    least_honest: int = 1

    def check(self, n_clients: int) -> None:
        """Refuse a cohort that is too small, or too large to keep apart two sets of survivors."""
        n, threshold, colluders = n_clients, self.min_survivors, self.colluders
        check_cohort(n)
        if threshold > n:
            raise ParameterError(f"min_survivors={threshold} of {n} clients: give at most {n}")
        least = max(colluders + self.least_honest, 2)
        if threshold < least:
            raise ParameterError(
                f"min_survivors={threshold} with {colluders} colluders: one client's vector could "
                f"be seen; give at least {least}"
            )
        if self.active_server and 2 * threshold <= n + colluders:
            raise ParameterError(
                f"min_survivors={threshold} of {n} clients with {colluders} colluders: a server "
                "that does not keep to the protocol could open two sums of one round; give at "
                f"least {(n + colluders) // 2 + 1}"
            )


def check_cohort(n_clients: int) -> None:
    """Refuse a number of clients that cannot be masked."""
    if not SMALLEST_COHORT <= n_clients <= LARGEST_COHORT:
        raise ParameterError(
            f"a cohort of {n_clients} clients: masking needs {SMALLEST_COHORT} to "
            f"{LARGEST_COHORT}; without it (protection='none') there may be any number"
        )


def cohort_digest(run: str, number: int, rules: Rules, keys: Bytes, identities: Bytes) -> bytes:
    """What a client was shown of the cohort, and what it has agreed on, in 32 bytes."""
    shown = keys.tobytes(), identities.tobytes()
    return digest(run.encode(), number.to_bytes(8), rules.agreement, *shown)


def context_of(cohort: bytes, members: Ints, question: bytes) -> bytes:
    """What masks depend on besides keys: the cohort, who is in it still, and the question."""
    return digest(cohort, members.astype("<i8").tobytes(), question)


def advertised_text(run: str, number: int, keys: bytes) -> bytes:
    """What a client signs of its keys."""
    return digest(b"masking/advertise", run.encode(), number.to_bytes(8), keys)


def confirmed_text(context: bytes, survivors: tuple[int, ...]) -> bytes:
    """What a client signs of whose vectors have arrived, and for which question."""
    return digest(b"masking/confirm", context, np.array(survivors, dtype="<i8").tobytes())
