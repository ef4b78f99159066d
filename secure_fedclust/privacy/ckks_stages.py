"""The stages of an encrypted sum, and what is signed and sealed in them.

What is done in them: `ckks_round.py`.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from secure_fedclust.arrays import Ints
from secure_fedclust.errors import ProtocolError
from secure_fedclust.messages import (
    ANCHOR,
    MAX_BYTES,
    Array,
    Blob,
    Bounds,
    Integer,
    Values,
    stage,
    steps,
)
from secure_fedclust.privacy.ckks_parameters import PRESETS, Parameters
from secure_fedclust.privacy.cohort import LARGEST_COHORT
from secure_fedclust.privacy.identity import SIGNATURE_BYTES
from secure_fedclust.privacy.masks import KEY_BYTES, TAG_BYTES, digest
from secure_fedclust.privacy.secure_sum import MAX_LENGTH, MAX_QUESTION

MOST_SEALED = MAX_BYTES - (1 << 16)
"""Most bytes of an encrypted vector, which must fit into a message."""

_PRESET = Integer(0, len(PRESETS) - 1)
_CHANNEL = Blob("channel")
_IDENTITY = Blob("identity")
_SIGNATURE = Blob("signature")
_SIZES = Array(("chunks",), "int64", minimum=0, largest=MAX_BYTES)

KEY = stage(
    "ckks/key",
    request={
        "preset": _PRESET,
        "channel": _CHANNEL,
        "identity": _IDENTITY,
        "signature": _SIGNATURE,
    },
    reply={"key": Blob("key"), "certificate": Blob("certificate")},
    form="key",
)
TAKE = stage(
    "ckks/take",
    request={
        "preset": _PRESET,
        "key": Blob("key"),
        "channel": _CHANNEL,
        "certificates": Blob("certificates"),
    },
    reply={
        "agreement": Blob("agreement"),
        "own": Blob("own"),
        "identity": _IDENTITY,
        "signature": _SIGNATURE,
    },
    form="key",
)
ENCRYPT = stage(
    "ckks/encrypt",
    request={
        "number": Integer(),
        "preset": _PRESET,
        "n_clients": Integer(1, LARGEST_COHORT),
        "question": Blob("bytes"),
    },
    reply={"sizes": _SIZES, "sealed": Blob("sealed"), **ANCHOR},
    form="encrypted",
)
OPEN = stage(
    "ckks/open",
    request={
        "number": Integer(),
        "length": Integer(1, MAX_LENGTH),
        "n_clients": Integer(1, LARGEST_COHORT),
        "reach": Integer(1),
        "vectors": Integer(1, LARGEST_COHORT),
        "sizes": _SIZES,
        "ciphertexts": Blob("ciphertexts"),
        "signature": _SIGNATURE,
    },
    reply={"steps": steps("length")},
    form="opened",
)

MOST_KEY = max(preset.key_bytes[1] for preset in PRESETS)

CLIENT_BOUNDS: Bounds = {
    "key": (1, MOST_KEY),
    "channel": KEY_BYTES,
    "certificates": (SIGNATURE_BYTES, 64 * SIGNATURE_BYTES),
    "bytes": (0, MAX_QUESTION),
}
"""Sizes of what a client is sent."""

HOLDER_BOUNDS: Bounds = {
    "channel": KEY_BYTES,
    "identity": KEY_BYTES,
    "signature": SIGNATURE_BYTES,
    "chunks": (1, MOST_SEALED // min(preset.ciphertext_bytes[0] for preset in PRESETS)),
    "ciphertexts": (1, MOST_SEALED),
}
"""Sizes of what a key holder is sent."""

TAKEN_BOUNDS: Bounds = {
    "agreement": KEY_BYTES,
    "own": KEY_BYTES,
    "identity": KEY_BYTES,
    "signature": SIGNATURE_BYTES,
}
"""Sizes of a client's answer to a key."""


def sealed_bounds(parameters: Parameters) -> Bounds:
    """Sizes of an encrypted vector, from a client."""
    least, most = (size + TAG_BYTES for size in parameters.preset.ciphertext_bytes)
    chunks = parameters.chunks
    return {"chunks": chunks, "sealed": (chunks * least, chunks * most)}


def asked_text(run: str, preset: int, channel: bytes) -> bytes:
    """What an aggregator signs when it asks for a key."""
    return digest(b"ckks/key", run.encode(), preset.to_bytes(4), channel)


def certified_text(run: str, agreement: bytes, preset: int, key: bytes, channel: bytes) -> bytes:
    """What a key holder signs of a key: for which run, spec and aggregator it is."""
    return digest(b"ckks/certificate", run.encode(), agreement, preset.to_bytes(4), key, channel)


def taken_text(certified: bytes, own: bytes) -> bytes:
    """What a client signs when it takes a key."""
    return digest(b"ckks/take", certified, own)


def round_text(run: str, number: int, parameters: Parameters, question: bytes) -> bytes:
    """What the encrypted vectors of a round are bound to."""
    return digest(b"ckks/encrypt", run.encode(), number.to_bytes(8), parameters.text(), question)


def sealed_text(round_: bytes, anchor: Values) -> bytes:
    """What an encrypted vector is bound to: the round, and where the client's ledger stands."""
    return round_ + int(anchor["ledger_rows"]).to_bytes(8) + str(anchor["ledger_head"]).encode()


def opening_text(
    run: str, number: int, parameters: Parameters, vectors: int, ciphertexts: Sequence[bytes]
) -> bytes:
    """What an aggregator signs when it asks for a sum to be opened."""
    place = run.encode(), number.to_bytes(8), parameters.text(), vectors.to_bytes(8)
    return digest(b"ckks/open", *place, *ciphertexts)


def joined(parts: Sequence[bytes]) -> tuple[Ints, bytes]:
    """Sizes of some ciphertexts, and all of them in a row."""
    return np.array([len(part) for part in parts]), b"".join(parts)


def cut(party: str, sizes: Ints, row: bytes) -> list[memoryview]:
    """What `joined` has put together."""
    ends = list(accumulate(sizes.tolist(), initial=0))
    if ends[-1] != len(row):
        raise ProtocolError(f"{party}: ciphertexts of {ends[-1]} bytes, and {len(row)} were sent")
    view = memoryview(row)
    return [view[a:b] for a, b in pairwise(ends)]
