"""Keys of one round of masking, and the masks that grow from them.

Everything is from `cryptography`: X25519 for agreement, HKDF-SHA256 for derivation, AES-256-CTR for
expansion, AES-256-GCM for messages between clients. A key is derived for one purpose, one round,
one pair and one context, and used once; that is why counters and nonces can start at zero.
"""

import hashlib
from collections.abc import Iterable
from functools import cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from secure_fedclust.errors import ProtocolError

KEY_BYTES = 32
TAG_BYTES = 16

_BLOCK = 1 << 14  # numbers of a mask made at a time, which stay in the processor's cache
_ZEROS = bytes(8 * _BLOCK)

Masked = NDArray[np.uint64]


def digest(*parts: bytes) -> bytes:
    """One hash of several parts, which say how long they are: no two lists of parts are alike."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8) + part for part in parts)).digest()


def public_key(key: X25519PrivateKey) -> bytes:
    """What the others get."""
    return key.public_key().public_bytes_raw()


def is_usable(key: bytes) -> bool:
    """Whether others can agree on something with the owner of this key; some give zero always."""
    try:
        _trial().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:
        return False
    return True


def pair_key(
    ours: X25519PrivateKey, theirs: bytes, purpose: bytes, context: bytes, pair: tuple[int, int]
) -> bytes:
    """A key that only two clients know; both derive the same, whichever comes first in `pair`."""
    try:
        shared = ours.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError as error:
        raise ProtocolError(f"the key of member {pair[1]} is none to agree with") from error
    low, high = sorted(pair)
    return _derived(shared, purpose + low.to_bytes(4) + high.to_bytes(4) + context)


def pair_sign(place: int, other: int) -> int:
    """Whether the client at a place adds the mask that it has with another (1), or subtracts it."""
    return 1 if place < other else -1


def own_key(seed: bytes, context: bytes) -> bytes:
    """The key of a client's own mask."""
    return _derived(seed, b"own" + context)


def add_masks(vector: Masked, keys: Iterable[tuple[bytes, int]]) -> None:
    """Add the mask that grows from each key, or subtract it where its sign is -1, in place."""
    room = bytearray(8 * min(_BLOCK, len(vector)) + 16)
    if len(vector) <= _BLOCK:
        mask = np.frombuffer(room, dtype="<u8", count=len(vector))
        zeros = memoryview(_ZEROS)[: 8 * len(vector)]
        for key, sign in keys:
            _stream(key).update_into(zeros, room)
            (np.add if sign > 0 else np.subtract)(vector, mask, out=vector)
        return
    streams = [(_stream(key), np.add if sign > 0 else np.subtract) for key, sign in keys]
    for start in range(0, len(vector), _BLOCK):
        part = vector[start : start + _BLOCK]
        mask = np.frombuffer(room, dtype="<u8", count=len(part))
        for stream, apply in streams:
            stream.update_into(memoryview(_ZEROS)[: 8 * len(part)], room)
            apply(part, mask, out=part)


def seal(key: bytes, sender: int, receiver: int, text: bytes) -> bytes:
    """Encrypt what one client sends to another under their key, once."""
    return AESGCM(key).encrypt(_nonce(sender, receiver), text, None)


def unseal(key: bytes, sender: int, receiver: int, sealed: bytes) -> bytes:
    """Decrypt it, or refuse what was not made under this key for this direction."""
    try:
        return AESGCM(key).decrypt(_nonce(sender, receiver), sealed, None)
    except InvalidTag as error:
        raise ProtocolError(
            f"what member {sender} sent was changed, or not made for this client in this round"
        ) from error


@cache
def _trial() -> X25519PrivateKey:
    # Keys that give zero do so with every other key, whichever it is.
    return X25519PrivateKey.generate()


def _derived(secret: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"secure_fedclust masking 1 " + info).derive(
        secret
    )


def _stream(key: bytes) -> CipherContext:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()


def _nonce(sender: int, receiver: int) -> bytes:
    # A pair's key encrypts two texts, one in each direction.
    return sender.to_bytes(4) + receiver.to_bytes(4) + bytes(4)
