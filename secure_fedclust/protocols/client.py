"""The client's end of a protocol."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import ProtocolError
from secure_fedclust.messages import Bounds, Envelope, Stage, read_envelope
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.mechanism import Noisy
from secure_fedclust.privacy.queries import Query
from secure_fedclust.privacy.release import Releases
from secure_fedclust.privacy.spec import PrivacySpec

MAX_CLUSTERS = 1 << 20
"""A client does not work on requests about more centres than this."""

Answer = TypeVar("Answer", bound=Callable[..., dict[str, Any]])


def answers(stage: Stage, *, after: tuple[Stage | None, ...]) -> Callable[[Answer], Answer]:
    """Mark the method that answers a stage, and say after which stages it may be asked.

    None stands for the beginning of the run.
    """

    def mark(method: Answer) -> Answer:
        method.stage = stage  # type: ignore[attr-defined]
        method.after = after  # type: ignore[attr-defined]
        return method

    return mark


class Client:
    """Holds one client's records and answers the requests of one run.

    Subclasses have one method a stage, marked by `answers`; it takes the request's fields and
    returns the reply's.

    Requests must belong to one run and come in the order that the stages allow. The very same
    request again gets the very same bytes again; anything else that is not newer than the last
    request is refused.

    Parameters
    ----------
    X : array of shape (n, d)
        The client's records.
    spec : PrivacySpec
        What the client agreed to.
    rng : numpy.random.Generator
        Randomness of the algorithm.
    """

    max_clusters: ClassVar[int] = MAX_CLUSTERS
    _stages: ClassVar[dict[str, tuple[Stage, tuple[Stage | None, ...], str]]] = {}

    def __init__(self, X: Floats, spec: PrivacySpec, rng: np.random.Generator) -> None:
        self.X = X
        self.spec = spec
        self.rng = rng
        self._run: str | None = None
        self._step = -1
        self._stage: Stage | None = None
        self._last: tuple[bytes, bytes] | None = None

    def __init_subclass__(cls) -> None:
        cls._stages = cls._stages | {
            method.stage.request.name: (method.stage, method.after, name)
            for name, method in vars(cls).items()
            if hasattr(method, "stage")
        }

    def handle(self, data: bytes) -> bytes:
        """Answer one request, or raise a `ProtocolError` and compute nothing."""
        if self._last is not None and data == self._last[0]:
            return self._last[1]
        envelope = read_envelope(data)
        if (kept := self._sent(envelope, data)) is not None:
            return kept
        run, step = envelope.run, envelope.step
        if self._run not in (None, run):
            raise ProtocolError("the request belongs to another run than the last one")
        if step <= self._step:
            raise ProtocolError(f"the request is for step {step}, step {self._step} is answered")
        if envelope.schema not in self._stages:
            raise ProtocolError("the request is for a stage that this client does not take part in")
        stage, after, method = self._stages[envelope.schema]
        if self._stage not in after:
            before = "at the beginning" if self._stage is None else f"after {self._stage.name}"
            raise ProtocolError(f"{stage.name} may not be asked {before}")
        bounds: Bounds = {"d": self.X.shape[1], "k": (1, self.max_clusters), "edges": (2, 1 << 16)}
        request, _ = stage.request.decode(data, run=run, step=step, bounds=bounds)
        self._asked = envelope
        reply = stage.reply.encode(getattr(self, method)(**request), run=run, step=step)
        self._keep(envelope, data, reply)
        self._run, self._step, self._stage, self._last = run, step, stage, (data, reply)
        return reply

    def _sent(self, envelope: Envelope, request: bytes) -> bytes | None:
        """What was sent for this very request before, by an earlier process perhaps."""
        return None

    def _keep(self, envelope: Envelope, request: bytes, reply: bytes) -> None:
        """Remember a reply before it is sent."""


class PrivateClient(Client):
    """A client whose every reply is a release.

    Its records are brought into the public region that the spec states, and leave only through
    `release`. Replies are kept in the ledger's outbox before they are sent: the same request gets
    the same bytes, whatever happened in between. Nothing that others can see, the length of a
    reply and errors included, depends on the records but for their noisy sums.

    Parameters
    ----------
    X : array of shape (n, d)
        The client's records; there may be none.
    spec : PrivacySpec
    rng : numpy.random.Generator
        Randomness of what is computed from released values; noise never comes from it.
    releases : Releases
    """

    # Room for one block of records' distances is set aside whatever the number of records is.
    max_clusters = 1 << 16

    def __init__(
        self, X: Floats, spec: PrivacySpec, rng: np.random.Generator, releases: Releases
    ) -> None:
        self.domain = Domain.of(spec, X.shape[1])
        working, self.share_clipped = self.domain.enter(X)
        super().__init__(working, spec, rng)
        self.releases = releases

    def release(self, query: Query, share: float) -> Noisy:
        """Answer a query with noise, for a share of the run's budget."""
        asked = self._asked
        message = asked.schema.removesuffix("/request")
        return self.releases.release(
            query, self.X, share, run=asked.run, step=asked.step, message=message
        )

    def reply(self, noisy: Noisy, **more: Any) -> dict[str, Any]:
        """The fields of a reply of a private stage."""
        anchor = self.releases.anchor
        return {
            **noisy.fields,
            "exponent": noisy.exponent,
            "sigma": noisy.sigma,
            "ledger_rows": anchor.rows,
            "ledger_head": anchor.head,
            **more,
        }

    def _sent(self, envelope: Envelope, request: bytes) -> bytes | None:
        ledger, client = self.releases.ledger, self.releases.client
        return ledger.sent(client, envelope.run, envelope.step, request)

    def _keep(self, envelope: Envelope, request: bytes, reply: bytes) -> None:
        ledger, client = self.releases.ledger, self.releases.client
        ledger.keep(client, envelope.run, envelope.step, request, reply)
