"""How the server opens a sum: secrets from shares, and the masks that are left in it.

What is asked for, and when: `masking.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from secure_fedclust.arrays import Ints
from secure_fedclust.errors import AggregationAborted, ProtocolError
from secure_fedclust.privacy import shamir
from secure_fedclust.privacy.graph import Graph
from secure_fedclust.privacy.masking_stages import Bytes
from secure_fedclust.privacy.masks import (
    KEY_BYTES,
    digest,
    own_key,
    pair_key,
    pair_sign,
    public_key,
)

MOST_TRIES = 128
"""Sets of holders that secrets are put together from, in search of one without wrong shares."""

_AT_A_TIME = 1 << 21  # numbers that secrets are joined from

Flags = NDArray[np.bool_]


@dataclass
class Opening:
    """What comes in to open one sum. All is in the order of places on the ring.

    Attributes
    ----------
    graph : Graph
    names : sequence of str
    keys, commitments : arrays of bytes, one row a client
        What each has advertised.
    member, alive : arrays of bool
        Who has sent shares, and who of them a vector.
    """

    graph: Graph
    names: Sequence[str]
    keys: Bytes
    commitments: Bytes
    member: Flags
    alive: Flags
    _shares: shamir.Shares = field(init=False)
    _held: Flags = field(init=False)

    def __post_init__(self) -> None:
        shape = self.graph.n_clients, self.graph.size
        self._shares = np.zeros((*shape, KEY_BYTES), dtype=np.uint16)
        self._held = np.zeros(shape, dtype=np.bool_)

    def keep(self, place: int, shares: shamir.Shares) -> None:
        """Take the shares that a client holds of those members that are in its circle."""
        circle = self.graph.circle(self.graph.start(place))
        owners = circle[self.member[circle]]
        if len(shares) != len(owners):
            raise ProtocolError(f"{len(shares)} shares came, of {len(owners)} members")
        rows = owners, self.graph.index(owners, place)
        self._shares[rows], self._held[rows] = shares, True

    def left_over(self, context: bytes) -> Iterator[tuple[bytes, int]]:
        """Keys of masks that do not cancel: survivors' own, and theirs with those that dropped."""
        found = self._secrets()
        for place in np.flatnonzero(self.alive).tolist():
            yield own_key(found[place], context), -1
        for place in np.flatnonzero(self.member & ~self.alive).tolist():
            key = X25519PrivateKey.from_private_bytes(found[place])
            circle = self.graph.circle(self.graph.start(place))
            for other in circle[self.alive[circle]].tolist():
                pair = place, other
                yield pair_key(key, self._mask_key(other), b"mask", context, pair), pair_sign(*pair)

    def _secrets(self) -> dict[int, bytes]:
        """The secrets that are opened, one of each member, which must fit what it has sent before.

        Where one does not, a holder's shares are wrong. All holders are left out in turn, as many
        at a time as can be spared: one that is wrong is done without, if there are turns enough.
        """
        least, found = self.graph.threshold, dict[int, bytes]()
        wanted = np.flatnonzero(self.member)
        few = wanted[self._held[wanted].sum(axis=1) < least]
        if len(few):
            raise AggregationAborted(
                f"fewer than {least} clients that hold shares of the keys of "
                f"{self.names[few[0]]} are left. No sum was opened, and what was charged for it "
                "stays charged: run again when they are back"
            )
        for turn in range(MOST_TRIES):
            spare = self._held[wanted].sum(axis=1) - least
            # The first turn leaves out the last holders, the others all that are before those.
            wanted = wanted[(turn == 0) | ((turn - 1) * spare < least * (spare > 0))]
            if not len(wanted):
                break
            for place, secret in zip(wanted.tolist(), self._joined(wanted, turn), strict=True):
                if secret is not None and self._fits(place, secret):
                    found[place] = secret
            wanted = np.array([place for place in wanted if place not in found], dtype=np.int64)
        for place in np.flatnonzero(self.member).tolist():
            if place not in found:
                raise AggregationAborted(
                    f"the shares of the keys of {self.names[place]} do not fit what it has sent "
                    "before: it, or clients that hold them, did not follow the protocol. No sum "
                    "was opened, and what was charged for it stays charged"
                )
        return found

    def _joined(self, owners: Ints, turn: int) -> Iterator[bytes | None]:
        """A secret of each owner, from as few of its holders as are needed, others in each turn."""
        least, held = self.graph.threshold, self._held[owners]
        there = held.sum(axis=1, keepdims=True)
        # Those that are there come first, in order.
        holders = np.argsort(~held, axis=1, kind="stable")
        chosen = (turn * (there - least) + np.arange(least)) % there
        holders = np.take_along_axis(holders, chosen, axis=1)
        # On a complete graph all have the same holders.
        distinct, which = np.unique(holders + 1, axis=0, return_inverse=True)
        weights = shamir.weights(distinct)
        pieces = -(-len(owners) * least * KEY_BYTES // _AT_A_TIME)
        for part in np.array_split(np.arange(len(owners)), pieces):
            shares = self._shares[owners[part, None], holders[part]].swapaxes(0, 1)
            own = weights[0] if len(distinct) == 1 else weights[which.ravel()[part]]
            yield from shamir.join(own, shares)

    def _fits(self, place: int, secret: bytes) -> bool:
        """Whether a secret is the seed, or the mask key, that fits what was advertised."""
        if self.alive[place]:
            return digest(secret) == bytes(self.commitments[place])
        return public_key(X25519PrivateKey.from_private_bytes(secret)) == self._mask_key(place)

    def _mask_key(self, place: int) -> bytes:
        return bytes(self.keys[place, KEY_BYTES:])
