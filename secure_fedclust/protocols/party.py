"""What answers requests: a client, or a party that helps with sums."""

from abc import ABC, abstractmethod
from hashlib import sha256

from secure_fedclust.errors import ProtocolError
from secure_fedclust.messages import Envelope, Stage, Values, read_envelope


class Party(ABC):
    """Answers the requests of one run, each once.

    Requests must belong to one run. The very same request again gets the very same bytes again;
    anything else that is not newer than the last request is refused.
    """

    def __init__(self) -> None:
        self._run: str | None = None
        self._step = -1
        self._last: tuple[bytes, bytes] | None = None
        """Digest of the last request, and the reply to it."""

    def handle(self, data: bytes) -> bytes:
        """Answer one request, or raise a `ProtocolError` and compute nothing."""
        envelope = read_envelope(data)
        asked = sha256(data).digest()
        if self._last is not None and asked == self._last[0]:
            return self._last[1]
        if (kept := self._sent(envelope, data)) is not None:
            return kept
        run, step = envelope.run, envelope.step
        if self._run not in (None, run):
            raise ProtocolError("the request belongs to another run than the last one")
        if step <= self._step:
            raise ProtocolError(f"the request is for step {step}, step {self._step} is answered")
        stage, values = self._answer(envelope, data)
        reply = stage.reply.encode(values, run=run, step=step)
        self._keep(envelope, data, reply)
        self._run, self._step, self._last = run, step, (asked, reply)
        return reply

    @abstractmethod
    def _answer(self, envelope: Envelope, data: bytes) -> tuple[Stage, Values]:
        """The stage that is asked for, and the fields of the reply."""

    def _sent(self, envelope: Envelope, request: bytes) -> bytes | None:
        """What was sent for this very request before, by an earlier process perhaps."""
        return None

    def _keep(self, envelope: Envelope, request: bytes, reply: bytes) -> None:
        """Remember a reply before it is sent."""
        return None
