"""Clients that have agreed to take part in a run, wherever they are."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from secure_fedclust.engines.base import Engine
from secure_fedclust.errors import ProtocolError
from secure_fedclust.messages import read_envelope
from secure_fedclust.privacy.identity import Identity

_log = logging.getLogger(__name__)


@dataclass
class Federation:
    """An engine whose clients know of the run, and what the server knows of them.

    Attributes
    ----------
    engine : Engine
    clients : sequence of str
        Those that take part.
    run : str
        The run that they have agreed to.
    parties : sequence of str
        Everybody that takes part, a key holder included.
    columns : sequence of str, optional
        Names of the features.
    identity : Identity, optional
        The server's, by which a key holder knows it.
    identities : mapping of client to bytes
        The public parts of the clients' identities.
    anchors : dict of client to (rows, hash)
        Where each client's ledger stood when it was last heard of.
    refused : mapping of party to str
        Who was asked and does not take part, and why in a word.
    encrypted : bool
        Whether connections are, and nodes have shown that they have the keys they are known by.
    keep_anchors : function
        Called with them after each exchange, so that a server that is killed knows them still.
    """

    engine: Engine
    clients: Sequence[str]
    run: str
    parties: Sequence[str] = ()
    columns: Sequence[str] | None = None
    identity: Identity | None = None
    identities: Mapping[str, bytes] = field(default_factory=dict)
    anchors: dict[str, tuple[int, str]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    encrypted: bool = True
    keep_anchors: Callable[[Mapping[str, tuple[int, str]]], None] = lambda anchors: None

    def exchange(self, requests: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """Deliver each party its request, and give its name and reply as they come."""
        started, answered = time.monotonic(), 0
        for party, reply in self.engine.exchange(requests):
            answered += 1
            yield party, reply
        self.keep_anchors(self.anchors)
        _log.info(
            "%s: %d of %d answered in %.1f s",
            _named(requests),
            answered,
            len(requests),
            time.monotonic() - started,
        )


def _named(requests: Mapping[str, bytes]) -> str:
    for request in requests.values():
        try:
            envelope = read_envelope(request)
        except ProtocolError:
            break
        return f"step {envelope.step}, {envelope.schema.removesuffix('/request')}"
    return "an exchange"
