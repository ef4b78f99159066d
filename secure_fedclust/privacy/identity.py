"""Signing keys, by which clients know each other for longer than a round."""

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE_BYTES = 64
KEY_BYTES = 32


class Identity:
    """A client's signing key (Ed25519).

    The others must know its public part from somewhere that the server cannot change.
    """

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self.public = self._key.public_key().public_bytes_raw()
        """What others know the client by."""

    def sign(self, message: bytes) -> bytes:
        """A signature that only the holder of this key can make."""
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"Identity({self.public.hex()[:16]}...)"


def is_signed(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether the holder of a public key has signed a message."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
