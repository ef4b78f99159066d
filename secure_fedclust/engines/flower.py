"""Carries requests over Flower: the bytes of each in a record of a message of its own.

It needs nothing of Flower but a `Grid`, which a `ServerApp` is given, and which `flower_link.py`
makes for a server that is not started by Flower.
"""

import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

RECORD: Final = "secure_fedclust"
FIELD: Final = "bytes"
SALT: Final = "salt"
MESSAGE_TYPE: Final = "query"

_MISSING: Final = {
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "does not answer; its log says why",
    ErrorCode.MESSAGE_UNAVAILABLE: "did not answer in time",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "did not answer in time",
    ErrorCode.NODE_UNAVAILABLE: "is gone",
}
"""In words of our own: those that come with an error are the node's."""

_log = logging.getLogger(__name__)


class FlowerEngine:
    """Reaches clients that are nodes of a Flower federation.

    An exchange is over when everybody that can be reached has answered, or when its time is up.
    Nodes that have gone offline are not waited for. What comes later than that is not read.

    Parameters
    ----------
    grid : flwr.serverapp.Grid
    nodes : mapping of client name to node id
        From whoever knows which key belongs to whom: a node cannot choose its name.
    others : mapping of name to node id
        Parties that are no clients.
    timeout : float
        Seconds that an exchange may take.
    min_replies : int
        Once so many parties have answered, the others have `patience` seconds left.
    patience : float, optional
        Without one the others have until the timeout.
    poll : float
        Seconds between two looks at what has come.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[str, int],
        *,
        others: Mapping[str, int] | None = None,
        timeout: float = 600.0,
        min_replies: int = 1,
        patience: float | None = None,
        poll: float = 0.1,
    ) -> None:
        self._grid = grid
        self._clients = tuple(nodes)
        self._nodes = {**nodes, **(others or {})}
        self._timeout = timeout
        self._min_replies = min_replies
        self._patience = timeout if patience is None else patience
        self._poll = poll
        self.messages = 0
        """Messages sent so far."""

    @property
    def clients(self) -> Sequence[str]:
        """Names of the clients, in the order given."""
        return self._clients

    def exchange(self, requests: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """Deliver each party its request and give the replies of those that answer in time."""
        waiting = self._send(requests)
        deadline = time.monotonic() + self._timeout
        answered = 0
        late = False
        while waiting and not late:
            late = time.monotonic() > deadline  # and what has come by now is read all the same
            for message in self._grid.pull_messages(list(waiting)):
                party = waiting.pop(message.metadata.reply_to_message_id, None)
                if party is None:
                    continue
                if (reply := self._content(party, message)) is not None:
                    answered += 1
                    if answered == self._min_replies:
                        deadline = min(deadline, time.monotonic() + self._patience)
                    yield party, reply
            if waiting and not late:
                time.sleep(self._poll)
        for party in waiting.values():
            _log.warning("%s did not answer in time", party)

    def _send(self, requests: Mapping[str, bytes]) -> dict[str, str]:
        """Send each request; the parties they went to, by the number of the message."""
        known = {party: self._nodes[party] for party in requests if party in self._nodes}
        for party in set(requests) - set(known):
            _log.warning("%s cannot be reached", party)
        messages = [_message(node, requests[party], self._timeout) for party, node in known.items()]
        numbers = self._grid.push_messages(messages) if messages else []
        sent = dict(zip(known, numbers, strict=True))
        for party in [party for party, number in sent.items() if not number]:
            _log.warning("%s is not connected", party)
            del sent[party]
        self.messages += len(sent)
        return {number: party for party, number in sent.items()}

    def _content(self, party: str, message: Message) -> bytes | None:
        if message.has_error():
            _log.warning("%s %s", party, _MISSING.get(message.error.code, "did not answer"))
            return None
        try:
            content = message.content[RECORD][FIELD]
        except (KeyError, TypeError, ValueError):
            content = None
        if type(content) is not bytes:
            _log.warning("%s has answered something that is no reply", party)
            return b""  # it was heard, and what it said will be set aside
        return content


def packed(content: bytes) -> RecordDict:
    """The record that carries some bytes.

    Flower stores records and messages under their hashes. Whoever could guess one could answer the
    message, or be there first with a record that cannot be read: so there is something in it that
    nobody can guess.
    """
    return RecordDict({RECORD: ConfigRecord({FIELD: content, SALT: secrets.token_bytes(16)})})


def _message(node: int, request: bytes, seconds: float) -> Message:
    return Message(packed(request), dst_node_id=node, message_type=MESSAGE_TYPE, ttl=seconds)
