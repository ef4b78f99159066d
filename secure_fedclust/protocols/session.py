"""The server's end of a protocol: asks the clients, checks what comes back, keeps the record."""

import math
import secrets
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.engines.base import Engine
from secure_fedclust.errors import (
    FederationWarning,
    ParameterError,
    ProtocolError,
    SecureFedClustError,
)
from secure_fedclust.messages import Bounds, Stage, Values
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.grid import SumGrid
from secure_fedclust.privacy.mechanism import Noisy
from secure_fedclust.privacy.queries import Query
from secure_fedclust.privacy.secure_sum import Question, SecureSum, Total
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.protocols.checkpoint import Journal, Results
from secure_fedclust.result import Exchange, OpenedSum

Replies = dict[str, Values]

MAX_FEATURES = 1 << 20

_GRID_ROUNDING = 1e-3


class Region(Protocol):
    """A region that clients did not know beforehand."""

    @property
    def domain(self) -> Domain:
        """The region that clients bring their records into."""

    def within(self, asked: Stage, request: Values) -> tuple[Stage, Values]:
        """A question about records in this region, instead of one in a region that all know."""


@dataclass(frozen=True)
class Answers:
    """Noisy answers that are to be added up, and how many clients they come from.

    There is one of each client under local trust, and one for all where sums are protected.
    """

    parts: tuple[Any, ...]
    n_clients: int


class Session:
    """One run over one engine.

    A reply that is truncated, oversized, of another step, of another schema or out of its bounds
    is set aside with a `FederationWarning`; the run goes on with the replies of the others, and
    `history` says who was left out and why.

    Parameters
    ----------
    engine : Engine
    spec : PrivacySpec
    n_features : int, optional
        Number of features, where it is known beforehand.
    secure_sum : SecureSum, optional
        How sums over clients are learned, where the spec has a protection.
    """

    def __init__(
        self,
        engine: Engine,
        spec: PrivacySpec,
        n_features: int | None = None,
        secure_sum: SecureSum | None = None,
    ) -> None:
        self.clients = tuple(engine.clients)
        if not self.clients:
            raise ProtocolError("the engine reaches no clients")
        self.participants = self.clients
        """Clients that are asked for sums: all, unless some could not be counted in."""
        self.spec = spec
        self.history: list[Exchange] = []
        self.n_features = n_features
        self.anchors: dict[str, tuple[int, str]] = {}
        """Where each client's ledger stood when it last replied: number of rows, last hash."""
        # Rows that each ledger has had at the last reply. In a run that is gone on with replies
        # can be what clients had sent before, when their ledgers were shorter than they are now.
        self.floor: dict[str, int] = {}
        self.shares: dict[str, float] = dict.fromkeys(self.clients, 0.0)
        """Share of the run's budget that each client was asked to spend so far."""
        self.sum_shares: dict[str, float] = dict.fromkeys(self.clients, 0.0)
        """The part of it that went into sums whose noise is shared."""
        self.sums: list[OpenedSum] = []
        """The sums that were opened."""
        self.region: Region | None = None
        """The region, where the spec does not state one; every question then names it."""
        self.run = secrets.token_hex(8)
        self.journal: Journal | None = None
        """Where finished steps are kept, if anywhere."""
        self.skipped = 0
        """Numbers of steps that were begun by an earlier process, and are not used again."""
        self._engine = engine
        self._secure_sum = secure_sum

    @property
    def next_step(self) -> int:
        """Number of the next exchange."""
        return len(self.history) + self.skipped

    def once(self, compute: Callable[[], Results]) -> Results:
        """A step whose outcome is kept: a run that is resumed does not ask for it again."""
        return compute() if self.journal is None else self.journal.step(self, compute)

    def ask_once(
        self,
        stage: Stage,
        requests: Mapping[str, Values],
        bounds: Mapping[str, Bounds] | None = None,
        read: Callable[[str, Values], Any] | None = None,
    ) -> Results:
        """`ask`, as a step whose outcome is kept."""
        return self.once(lambda: self.ask(stage, requests, bounds, read))

    def _number_for_a_sum(self) -> int:
        # Masks and keys of a round that was cut off are lost; its number must not come again.
        if self.journal is not None and self.journal.asked >= self.next_step:
            self.skipped += self.journal.asked + 1 - self.next_step
        return self.next_step

    @property
    def limit(self) -> Limit:
        """What each client may spend in this run."""
        return Limit.of(*self.spec.target())

    @property
    def domain(self) -> Domain:
        """The region that clients bring their records into."""
        if self.region is not None:
            return self.region.domain
        n_features = self.n_features or self.spec.n_features
        if n_features is None:
            raise ParameterError(
                "the number of features is not known beforehand: give ranges or center in the "
                "privacy spec"
            )
        return Domain.of(self.spec, n_features)

    def ask_all(
        self,
        stage: Stage,
        bounds: Bounds | None = None,
        read: Callable[[str, Values], Any] | None = None,
        /,
        **request: Any,
    ) -> dict[str, Any]:
        """Ask every client the same question."""
        everyone = dict.fromkeys(self.clients, bounds or {})
        return self.ask(stage, dict.fromkeys(self.clients, request), everyone, read)

    def ask(
        self,
        stage: Stage,
        requests: Mapping[str, Values],
        bounds: Mapping[str, Bounds] | None = None,
        read: Callable[[str, Values], Any] | None = None,
    ) -> dict[str, Any]:
        """Ask each client its own question and return the replies that hold what they must.

        Parameters
        ----------
        stage : Stage
        requests : mapping of client to fields
        bounds : mapping of client to bounds, optional
            Sizes allowed for named dimensions of its reply. Dimensions of the request hold for
            its reply without being named here, and ``d``, the number of features, is fixed for
            all by what most of the first replies say.
        read : function of client and fields, optional
            Makes of a reply what is returned in its place; a reply that it refuses by an error of
            this package is set aside.

        Raises
        ------
        ProtocolError
            When no client is left.
        """
        found = self._ask(stage, requests, bounds, read)
        if not found:
            raise ProtocolError(
                f"{stage.name}: no usable reply from any of {len(requests)} clients "
                f"({len(self.history[-1].rejected)} set aside); see the clients' logs"
            )
        return found

    def _ask(
        self,
        stage: Stage,
        requests: Mapping[str, Values],
        bounds: Mapping[str, Bounds] | None = None,
        read: Callable[[str, Values], Any] | None = None,
    ) -> dict[str, Any]:
        step = self.next_step
        if self.journal is not None:
            self.journal.note_asked(step)
        started = time.perf_counter()
        for client, request in requests.items():
            if "share" in request:
                self.shares[client] += request["share"]
        # Many clients are often asked the very same: those bytes are made, and held, once.
        distinct = {id(request): request for request in requests.values()}
        encoded = {
            key: stage.request.encode(request, run=self.run, step=step)
            for key, request in distinct.items()
        }
        sent = {client: encoded[id(request)] for client, request in requests.items()}
        width: Bounds = {"d": self.n_features or (1, MAX_FEATURES)}
        found: dict[str, Any] = {}
        rejected: dict[str, str] = {}
        received: set[str] = set()
        up: dict[str, int] = {}
        waiting: Replies = {}
        widths: dict[str, int] = {}

        def accept(client: str, reply: Values) -> None:
            try:
                self._check_anchor(client, reply)
                found[client] = reply if read is None else read(client, reply)
            except SecureFedClustError as error:
                rejected[client] = str(error)
                return
            if "ledger_head" in reply and self.spec.is_private:
                rows = self.floor[client] = reply["ledger_rows"]
                if client not in self.anchors or rows >= self.anchors[client][0]:
                    self.anchors[client] = (rows, reply["ledger_head"])

        for client, data in self._engine.exchange(sent):
            if client not in sent or client in received:
                continue
            received.add(client)
            if type(data) is bytes:
                up[client] = len(data)
            try:
                asked = stage.request.sizes(requests[client], width)
                allowed = {**(bounds or {}).get(client, {}), **asked, **width}
                reply, sizes = stage.reply.decode(data, run=self.run, step=step, bounds=allowed)
            except ProtocolError as error:
                rejected[client] = str(error)
                continue
            if self.n_features is None:
                waiting[client], widths[client] = reply, sizes.get("d", 0)
            else:
                accept(client, reply)
        self._agree_on_width(waiting, widths, rejected)
        for client, reply in waiting.items():
            accept(client, reply)
        self.history.append(
            Exchange(
                stage=stage.name,
                asked=tuple(sent),
                absent=tuple(client for client in sent if client not in received),
                rejected=rejected,
                down={client: len(request) for client, request in sent.items()},
                up={client: up[client] for client in sent if client in up},
                form=stage.form,
                seconds=time.perf_counter() - started,
            )
        )
        for client, reason in rejected.items():
            warnings.warn(
                f"{client}: reply to {stage.name} set aside: {reason}",
                FederationWarning,
                stacklevel=3,
            )
        # In the order of asking: who answers first must not decide in which order parts are added.
        return {client: found[client] for client in sent if client in found}

    def _check_anchor(self, client: str, reply: Values) -> None:
        """Refuse a reply of a client whose ledger has lost rows since its last one."""
        floor = self.floor.get(client, 0) if self.spec.is_private else 0
        if reply.get("ledger_rows", math.inf) < floor:
            raise ProtocolError(
                f"its ledger has {reply['ledger_rows']} rows, and had {floor}: it was exchanged "
                "for an older copy"
            )

    def ask_sum(
        self,
        stage: Stage,
        query: Query,
        share: float,
        sizes: Mapping[str, int],
        read: Callable[[Noisy], Any],
        **request: Any,
    ) -> Answers:
        """Ask for what the server needs only the sum of.

        Where the spec has a protection the server gets the sum over clients and nothing else;
        where not, each client's answer with noise enough for itself.

        Parameters
        ----------
        stage : Stage
            An additive one.
        query : Query
        share : float
            Of the run's budget.
        sizes : mapping
            Size of each dimension of the reply.
        read : function
            Makes of a noisy answer what is returned in its place.
        **request
            The other fields of the request.
        """
        names = tuple(stage.noisy_fields)
        if self._secure_sum is None:
            replies = self.ask_all(
                stage,
                sizes,
                lambda _, reply: read(self.noisy(reply, names, query, share)),
                share=share,
                **request,
            )
            return Answers(tuple(replies.values()), len(replies))
        found, n_clients = self._opened(self._secure_sum, stage, query, share, sizes, request)
        return Answers((read(found),), n_clients)

    def _opened(
        self,
        secure_sum: SecureSum,
        stage: Stage,
        query: Query,
        share: float,
        sizes: Mapping[str, int],
        request: Values,
    ) -> tuple[Noisy, int]:
        if self.region is not None:
            stage, request = self.region.within(stage, request)
        limit = self.limit if self.spec.is_private else None

        def grid_for(n_clients: int) -> SumGrid:
            return SumGrid.of(query, self.spec, limit, share, n_clients)

        fields, total = self._total(
            secure_sum,
            stage,
            sizes,
            {**request, "share": share},
            reach=lambda n: grid_for(n).client_reach,
            largest=lambda n: grid_for(n).largest,
            share=share,
            noisy=limit is not None,
        )
        grid = grid_for(total.n_clients)
        sigma = grid.client_sigma * math.sqrt(len(total.survivors))
        return Noisy(fields, grid.exponent, sigma), len(total.survivors)

    def ask_exact_sum(
        self,
        stage: Stage,
        sizes: Mapping[str, int],
        *,
        reach: Callable[[int], int],
        **request: Any,
    ) -> tuple[dict[str, Any], Total]:
        """Ask for a sum of what needs no noise any more, under masks or encryption.

        Parameters
        ----------
        stage : Stage
            An additive one. Clients answer it with values that are private by themselves.
        sizes : mapping
            Size of each dimension of the reply.
        reach : function of the number of clients
            How far from zero a number of one client can be.
        **request
            The fields of the request.

        Returns
        -------
        fields : mapping of name to array of whole steps
        total : Total
            Who is in the sum.
        """
        if self._secure_sum is None:
            raise ProtocolError(f"{stage.name}: the privacy spec has no protection for sums")
        return self._total(
            self._secure_sum, stage, sizes, request, reach=reach, largest=lambda n: n * reach(n)
        )

    def _total(
        self,
        secure_sum: SecureSum,
        stage: Stage,
        sizes: Mapping[str, int],
        request: Values,
        *,
        reach: Callable[[int], int],
        largest: Callable[[int], int],
        share: float = 0.0,
        noisy: bool = True,
    ) -> tuple[dict[str, Any], Total]:
        """A sum that was opened, field by field; a share of the budget is spent on it, if any."""
        number, place = self._number_for_a_sum(), len(self.history)
        shapes = {
            name: tuple(sizes[dimension] for dimension in dimensions)
            for name, dimensions in stage.noisy_fields.items()
        }

        def ask(
            part: Stage,
            requests: Mapping[str, Values],
            bounds: Bounds,
            read: Callable[[str, Values], Any] | None = None,
        ) -> dict[str, Any]:
            if "question" in part.request.fields:
                for client in requests:
                    self.shares[client] += share
                    self.sum_shares[client] += share
            return self._ask(part, requests, dict.fromkeys(requests, bounds), read)

        question = Question(
            self.run,
            number,
            stage.request.encode(request, run=self.run, step=number),
            length=sum(map(math.prod, shapes.values())),
            reach=reach,
            largest=largest,
        )
        total = secure_sum.total(ask, self.participants, question)
        ends = np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1]
        parts = np.split(total.steps, ends)
        fields = {
            name: part.reshape(shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }
        self.sums.append(
            OpenedSum(
                stage.name,
                place,
                total.n_clients,
                total.survivors,
                share if noisy else 0.0,
                len(total.steps),
                noisy=noisy,
            )
        )
        return fields, total

    def noisy(
        self, reply: Values, names: tuple[str, ...], query: Query, share: float = 1.0
    ) -> Noisy:
        """The noisy part of a reply of a private stage, which must be as noisy as the spec asks.

        Parameters
        ----------
        reply : fields of the reply
        names : tuple of str
            Those that are noisy.
        query : Query
            What was asked.
        share : float
            Of the run's budget, that it was asked for.
        """
        sensitivity = query.sensitivity(self.spec.adjacency).value
        wanted = sensitivity / (self.limit.mu * math.sqrt(share))
        if math.ldexp(reply["sigma"], reply["exponent"]) < wanted * (1 - _GRID_ROUNDING):
            raise ProtocolError("the reply has less noise than the privacy spec asks for")
        return Noisy({name: reply[name] for name in names}, reply["exponent"], reply["sigma"])

    def note_centers(self, centers: Floats) -> None:
        """Keep the global centres that came out of the last exchange."""
        self.history[-1].centers = centers

    def _agree_on_width(
        self, replies: Replies, widths: Mapping[str, int], rejected: dict[str, str]
    ) -> None:
        if self.n_features is not None or not replies:
            return
        votes = Counter(widths[client] for client in replies).most_common(2)
        if len(votes) > 1 and votes[0][1] == votes[1][1]:
            raise ProtocolError(
                f"clients disagree on the number of features: {votes[0][0]} and {votes[1][0]} "
                "are equally common; give every client the same columns"
            )
        self.n_features = votes[0][0]
        for client in [client for client in replies if widths[client] != self.n_features]:
            del replies[client]
            rejected[client] = (
                f"{widths[client]} features where most clients have {self.n_features}"
            )
