"""The client's end of a protocol."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, ClassVar, TypeVar

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import CheckpointError, ProtocolError
from secure_fedclust.messages import Bounds, Envelope, Stage, Values, read_envelope
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.mechanism import Noisy, SamplerName
from secure_fedclust.privacy.queries import Query
from secure_fedclust.privacy.release import ExactSums, Releases
from secure_fedclust.privacy.secure_sum import Contribution, Summand
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.privacy.subsampled import Sampling, Training
from secure_fedclust.privacy.updates import WeightGrid
from secure_fedclust.protocols.checkpoint import Memory
from secure_fedclust.protocols.party import Party

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


class Client(Party):
    """Holds one client's records and answers the requests of one run.

    Subclasses have one method a stage, marked by `answers`; it takes the request's fields and
    returns the reply's. Requests must come in the order that the stages allow.

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
    more_bounds: ClassVar[Bounds] = {}
    """Sizes of other things that it is sent: what it takes for a record must have a limit."""
    _stages: ClassVar[dict[str, tuple[Stage, tuple[Stage | None, ...], str]]] = {}

    def __init__(self, X: Floats, spec: PrivacySpec, rng: np.random.Generator) -> None:
        super().__init__()
        self.X = self._given = X
        self.spec = spec
        self.rng = rng
        self._stage: Stage | None = None
        self._reached: Stage | None = None
        self._memory: Memory | None = None

    def remember(self, memory: Memory) -> None:
        """Go on from what an earlier process has kept there, and keep there what comes."""
        self._memory = memory
        if (kept := memory.load()) is None:
            return
        try:
            self._run, self._step = str(kept.pop("run")), int(kept.pop("step"))
            self._last = kept.pop("asked").tobytes(), kept.pop("reply").tobytes()
            self._stage = self._stages[str(kept.pop("stage"))][0]
            if kept.pop("records").tobytes() != self._digest():
                raise ProtocolError("it was begun with other records, or in another order")
            self.restore(kept)
        except (LookupError, ValueError, TypeError, AttributeError, ProtocolError) as error:
            raise CheckpointError(
                f"{memory.path} is not what this client has kept: {error}"
            ) from error

    def state(self) -> dict[str, Any]:
        """What another process needs to go on: named arrays and numbers."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave."""

    def __init_subclass__(cls) -> None:
        cls._stages = cls._stages | {
            method.stage.request.name: (method.stage, method.after, name)
            for name, method in vars(cls).items()
            if hasattr(method, "stage")
        }

    def handle(self, data: bytes) -> bytes:
        """See `Party`."""
        before = self._step
        self._reached = self._stage
        reply = super().handle(data)
        if self._step != before:
            self._stage = self._reached
        return reply

    def _keep(self, envelope: Envelope, request: bytes, reply: bytes) -> None:
        # What is asked for sums begins anew after a crash, and changes nothing.
        if self._memory is None or envelope.schema not in self._stages:
            return
        self._memory.keep(
            {
                "run": envelope.run,
                "step": envelope.step,
                "stage": envelope.schema,
                "asked": np.frombuffer(sha256(request).digest(), dtype=np.uint8),
                "reply": np.frombuffer(reply, dtype=np.uint8),
                "records": np.frombuffer(self._digest(), dtype=np.uint8),
                **self.state(),
            }
        )

    def _digest(self) -> bytes:
        """Tells other records from these, in a file that stays with the client."""
        records = np.ascontiguousarray(self._given)
        return sha256(repr(records.shape).encode() + records.tobytes()).digest()

    def _answer(self, envelope: Envelope, data: bytes) -> tuple[Stage, Values]:
        stage, request, method = self._read(envelope, data)
        self._asked = envelope
        values = getattr(self, method)(**request)
        self._reached = stage
        return stage, values

    def _read(self, envelope: Envelope, data: bytes) -> tuple[Stage, Values, str]:
        """The stage, the fields of the request, and the method that answers it now."""
        if envelope.schema not in self._stages:
            raise ProtocolError("the request is for a stage that this client does not take part in")
        stage, after, method = self._stages[envelope.schema]
        if self._stage not in after:
            before = "at the beginning" if self._stage is None else f"after {self._stage.name}"
            raise ProtocolError(f"{stage.name} may not be asked {before}")
        bounds: Bounds = {
            "d": self.X.shape[1],
            "inputs": self._given.shape[1],
            "k": (1, self.max_clusters),
            "edges": (2, 1 << 16),
            **self.more_bounds,
        }
        request, _ = stage.request.decode(data, run=envelope.run, step=envelope.step, bounds=bounds)
        return stage, request, method


class PrivateClient(Client):
    """A client whose every reply is a release, or a part of a sum that is.

    Its records are brought into the public region that the spec states, and leave only through
    `release`. Replies are kept in the ledger's outbox before they are sent: the same request gets
    the same bytes, whatever happened in between. Nothing that others can see, the length of a
    reply and errors included, depends on the records but for their noisy sums.

    Questions whose answers are additive can be asked for a sum over clients too, in the stages of
    secure aggregation: the client then adds its part of the noise only, and the server gets
    nothing but the sum.

    Parameters
    ----------
    X : array of shape (n, d)
        The client's records; there may be none.
    spec : PrivacySpec
    rng : numpy.random.Generator
        Randomness of what is computed from released values; noise never comes from it.
    releases : Releases or ExactSums
    summand : Summand, optional
        The client's end of secure aggregation, where the spec has a protection.
    """

    # Room for one block of records' distances is set aside whatever the number of records is.
    max_clusters = 1 << 16

    def __init__(
        self,
        X: Floats,
        spec: PrivacySpec,
        rng: np.random.Generator,
        releases: Releases | ExactSums,
        summand: Summand | None = None,
    ) -> None:
        super().__init__(X, spec, rng)
        self.releases = releases
        self._summand = summand
        self._n_clients: int | None = None
        self._reach = 0
        self.share_clipped = 0.0
        if spec.is_private:
            self.enter(Domain.of(spec, X.shape[1]))

    def enter(self, domain: Domain) -> None:
        """Bring the records into a public region."""
        self.domain = domain
        self.X, self.share_clipped = domain.enter(self._given)

    def leave(self) -> None:
        """Have the records as they were given."""
        self.X = self._given

    def release(self, query: Query, share: float) -> Noisy:
        """Answer a query with noise, for a share of the run's budget."""
        asked = self._asked
        message = asked.schema.removesuffix("/request")
        if self._n_clients is None:
            return self.releases.release(
                query, self.X, share, run=asked.run, step=asked.step, message=message
            )
        noisy = self.releases.contribute(
            query,
            self.X,
            share,
            n_clients=self._n_clients,
            run=asked.run,
            step=asked.step,
            message=message,
        )
        self._reach = noisy.reach or 0
        return noisy

    def pay_for_training(
        self, samplings: Sequence[Sampling], share: float, clip: float, numbers: int
    ) -> list[Training]:
        """Pay for noisy training on parts of the records; see `Releases.pay_for_training`."""
        if not isinstance(self.releases, Releases):
            raise ProtocolError("there is no budget for noisy training without an epsilon")
        asked = self._asked
        return self.releases.pay_for_training(
            samplings,
            share,
            clip=clip,
            numbers=numbers,
            run=asked.run,
            step=asked.step,
            message=asked.schema.removesuffix("/request"),
        )

    @property
    def sampler(self) -> SamplerName:
        """Where noise comes from."""
        return self.releases.sampler if isinstance(self.releases, Releases) else "secure"

    def weight_grid(self) -> WeightGrid:
        """The grid of weights that this client adds to a sum without more noise."""
        if self._n_clients is None:
            raise ProtocolError("weights that are held are given as part of a sum only")
        grid = WeightGrid.of(self._n_clients)
        self._reach = grid.reach
        return grid

    def reply(self, noisy: Noisy, **more: Any) -> dict[str, Any]:
        """The fields of a reply of a private stage."""
        return {
            **noisy.fields,
            "exponent": noisy.exponent,
            "sigma": noisy.sigma,
            **self._anchor(),
            **more,
        }

    def _answer(self, envelope: Envelope, data: bytes) -> tuple[Stage, Values]:
        stages = {} if self._summand is None else self._summand.stages
        if self._summand is None or envelope.schema not in stages:
            return super()._answer(envelope, data)
        stage = stages[envelope.schema]
        request, _ = stage.request.decode(
            data, run=envelope.run, step=envelope.step, bounds=self._summand.bounds
        )
        contribute = partial(self._contribute, run=envelope.run, number=request.get("number"))
        return stage, self._summand.answer(stage, envelope.run, request, contribute)

    def _contribute(
        self, question: bytes, n_clients: int, *, run: str, number: int | None
    ) -> Contribution:
        """What this client adds to the sum that a question asks for in a round."""
        envelope = read_envelope(question)
        if (envelope.run, envelope.step) != (run, number):
            raise ProtocolError("the question belongs to another run or round")
        stage, request, method = self._read(envelope, question)
        if not stage.additive:
            raise ProtocolError(f"{stage.name} is not a question that can be asked for a sum")
        self._asked, self._n_clients = envelope, n_clients
        try:
            values = getattr(self, method)(**request)
        finally:
            self._n_clients = None
        self._reached = stage
        parts = [np.ravel(values[name]) for name in stage.noisy_fields]
        return Contribution(np.concatenate(parts), self._reach, self._anchor())

    def _anchor(self) -> Values:
        anchor = self.releases.anchor
        return {"ledger_rows": anchor.rows, "ledger_head": anchor.head}

    def _sent(self, envelope: Envelope, request: bytes) -> bytes | None:
        return self.releases.sent(envelope.run, envelope.step, request)

    def _keep(self, envelope: Envelope, request: bytes, reply: bytes) -> None:
        super()._keep(envelope, request, reply)
        self.releases.keep(envelope.run, envelope.step, request, reply)
