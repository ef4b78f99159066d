"""The stages of a round of masking, and what its keys depend on.

What is done in them: `masking.py`.
"""

import numpy as np
from numpy.typing import NDArray

from secure_fedclust.arrays import Ints
from secure_fedclust.messages import ANCHOR, Array, Bounds, Integer, stage
from secure_fedclust.privacy import shamir
from secure_fedclust.privacy.cohort import (
    LARGEST_COHORT,
    LARGEST_FEDERATION,
    SMALLEST_COHORT,
    Rules,
)
from secure_fedclust.privacy.identity import SIGNATURE_BYTES
from secure_fedclust.privacy.masks import KEY_BYTES, TAG_BYTES, digest
from secure_fedclust.privacy.secure_sum import MAX_QUESTION

SEALED_BYTES = 2 * 2 * KEY_BYTES + TAG_BYTES
"""Two shared secrets, two bytes for the share of a byte, and a tag."""

Bytes = NDArray[np.uint8]

_ROUND = {"number": Integer()}
_SIGNATURES = Array(("signed", "signature"), "uint8")
_DIGEST = Array(("digest",), "uint8")
_NUMBER = Integer(0, LARGEST_FEDERATION)


def _places_of(dimension: str) -> Array:
    """Places in a client's circle, counted from 0."""
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
        "n_clients": _NUMBER,
        "roster": _DIGEST,
        "start": _NUMBER,
        "keys": Array(("circle", "keys"), "uint8"),
        "identities": Array(("signed", "identity"), "uint8"),
        "signatures": _SIGNATURES,
    },
    reply={"sealed": Array(("circle", "sealed"), "uint8")},
    form="sealed",
)
MASK = stage(
    "masking/mask",
    request={
        **_ROUND,
        "n_members": _NUMBER,
        "roll": _DIGEST,
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
        "n_survivors": _NUMBER,
        "survivors": _places_of("members"),
        "dropped": _places_of("others"),
        "signers": _places_of("signed"),
        "signatures": _SIGNATURES,
    },
    reply={"shares": Array(("shares", "share"), "uint16", largest=shamir.PRIME - 1)},
    form="share",
)

BOUNDS: Bounds = {
    "circle": (SMALLEST_COHORT, LARGEST_COHORT),
    "members": (0, LARGEST_COHORT),
    "others": (0, LARGEST_COHORT),
    "signed": (0, LARGEST_COHORT),
    "digest": KEY_BYTES,
    "keys": 2 * KEY_BYTES,
    "identity": KEY_BYTES,
    "signature": SIGNATURE_BYTES,
    "sealed": SEALED_BYTES,
    "bytes": (0, MAX_QUESTION),
}
"""Sizes of what a client is sent."""


def as_bytes(content: bytes) -> Bytes:
    """Bytes as they travel."""
    return np.frombuffer(content, dtype=np.uint8)


def roster_digest(keys: Bytes, identities: Bytes) -> bytes:
    """Everybody's keys, in the order of their places, in 32 bytes."""
    return digest(keys.tobytes(), identities.tobytes())


def roll_digest(members: Ints) -> bytes:
    """The places of all members, in order, in 32 bytes."""
    return digest(members.astype("<i8").tobytes())


def cohort_digest(run: str, number: int, rules: Rules, n_clients: int, roster: bytes) -> bytes:
    """What a client was told of the cohort, and what it has agreed on, in 32 bytes."""
    told = number.to_bytes(8), n_clients.to_bytes(8), roster
    return digest(run.encode(), rules.agreement, *told)


def context_of(cohort: bytes, roll: bytes, question: bytes) -> bytes:
    """What masks depend on besides keys: the cohort, who is in it still, and the question."""
    return digest(cohort, roll, question)


def advertised_text(run: str, number: int, keys: bytes) -> bytes:
    """What a client signs of its keys."""
    return digest(b"masking/advertise", run.encode(), number.to_bytes(8), keys)


def confirmed_text(context: bytes, survivors: tuple[int, ...]) -> bytes:
    """What a client signs of whose vectors have arrived, and for which question."""
    return digest(b"masking/confirm", context, np.array(survivors, dtype="<i8").tobytes())
