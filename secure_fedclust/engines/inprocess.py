"""All clients in this process, called one after the other: simulations, sweeps and tests."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from secure_fedclust.errors import SecureFedClustError

Handler = Callable[[bytes], bytes]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong with one reply, to test what the protocols make of it.

    Parameters
    ----------
    client : str
    exchange : int
        Which exchange of the engine, counted from 0.
    kind : {"drop", "delay", "corrupt", "truncate"}
        A delayed reply arrives one exchange late, in place of the reply that is due then.
    """

    client: str
    exchange: int
    kind: Literal["drop", "delay", "corrupt", "truncate"]


class InProcessEngine:
    """Calls each client's handler.

    A handler that refuses a request by one of this package's errors leaves its client absent;
    the reason goes to the log of the client's side. Any other exception is a bug and propagates.

    Parameters
    ----------
    handlers : mapping of client name to function
        Each takes a request and returns the reply.
    others : mapping of name to function
        Parties that are no clients.
    faults : sequence of Fault
    on_reply : function, optional
        Called with the client's name after each call.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        others: Mapping[str, Handler] | None = None,
        faults: Sequence[Fault] = (),
        on_reply: Callable[[str], None] | None = None,
    ) -> None:
        self._clients = tuple(handlers)
        self._handlers = {**handlers, **(others or {})}
        self._faults = {(fault.client, fault.exchange): fault.kind for fault in faults}
        self._on_reply = on_reply
        self._exchanges = 0
        self._late: dict[str, bytes] = {}

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients, in the order given."""
        return self._clients

    def exchange(self, requests: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """Deliver each party its request and give the replies of those that answer."""
        number, self._exchanges = self._exchanges, self._exchanges + 1
        for client, request in requests.items():
            if client not in self._handlers:
                _log.warning("%s cannot be reached", client)
                continue
            try:
                reply = self._handlers[client](request)
            except SecureFedClustError as error:
                _log.warning("%s did not answer: %s", client, error)
            else:
                received = self._receive(client, number, reply)
                if received is not None:
                    yield client, received
            if self._on_reply is not None:
                self._on_reply(client)

    def _receive(self, client: str, number: int, reply: bytes) -> bytes | None:
        late = self._late.pop(client, None)
        match self._faults.get((client, number)):
            case "drop":
                return late
            case "delay":
                self._late[client] = reply
                return late
            case "corrupt":
                middle = len(reply) // 2
                return reply[:middle] + bytes([reply[middle] ^ 0x10]) + reply[middle + 1 :]
            case "truncate":
                return reply[: len(reply) // 2]
        return late or reply
