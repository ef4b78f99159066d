"""Signing keys, by which clients know each other for longer than a round."""

from typing import Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

SIGNATURE_BYTES = 64
KEY_BYTES = 32


class Identity:
    """A client's signing key (Ed25519).

    The others must know its public part from somewhere that the server cannot change.

    Parameters
    ----------
    key : Ed25519PrivateKey, optional
        A new one if not given.
    """

    def __init__(self, key: Ed25519PrivateKey | None = None) -> None:
        self._key = Ed25519PrivateKey.generate() if key is None else key
        self.public = self._key.public_key().public_bytes_raw()
        """What others know the client by."""

    def sign(self, message: bytes) -> bytes:
        """A signature that only the holder of this key can make."""
        return self._key.sign(message)

    def to_pem(self) -> bytes:
        """The private key, for a file that nobody else can read."""
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @classmethod
    def from_pem(cls, content: bytes) -> Self:
        """What `to_pem` has given; a ValueError if it is something else."""
        try:
            key = load_pem_private_key(content, None)
        except (TypeError, UnsupportedAlgorithm) as error:
            raise ValueError("not an Ed25519 key") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError("not an Ed25519 key")
        return cls(key)

    def __repr__(self) -> str:
        return f"Identity({self.public.hex()[:16]}...)"


def is_signed(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether the holder of a public key has signed a message."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
