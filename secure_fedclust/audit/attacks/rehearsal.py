"""A run without anybody's records: the requests that a client gets, and a client to ask them again.

The server's side of a run is played once, over clients with made-up records, and what it asks one
of them is kept. Asking a fresh client the same, on whatever data, then exercises everything between
a request and the noise: the region, the queries, the sensitivity, the charge, the sampler. Where
sums are protected they are asked for as they are, without masks or encryption, which change no sum.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.errors import FederationWarning, PrivacyWarning
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.grid import SumGrid
from secure_fedclust.privacy.ledger import Ledger
from secure_fedclust.privacy.mechanism import Bounded, Noisy, Sampler
from secure_fedclust.privacy.queries import Query
from secure_fedclust.privacy.release import Releases, exact_sum
from secure_fedclust.privacy.secure_sum import PlainSum, PlainSummand
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.protocols.client import PrivateClient
from secure_fedclust.protocols.session import Session
from secure_fedclust.protocols.sums import with_quorum

MADE_UP = 200
"""Records of each client in a rehearsal, unless the spec says how many clients hold."""

Serve = Callable[[Session, np.random.Generator], Any]
"""The server's side of a private run."""


@dataclass(frozen=True)
class Released:
    """One release, as it left.

    Attributes
    ----------
    message : str
    query : Query
    share : float
    n_clients : int or None
        Of the sum that it goes into; None where it is seen by itself.
    noisy : Noisy
    """

    message: str
    query: Query
    share: float
    n_clients: int | None
    noisy: Noisy

    def exact(self, X: Floats, spec: PrivacySpec) -> Bounded:
        """What the answer would have been without noise, on these records."""
        if self.n_clients is None:
            return self.query.answer(X, spec.adjacency, self.noisy.exponent)
        limit = Limit.of(*spec.target())
        grid = SumGrid.of(self.query, spec, limit, self.share, self.n_clients)
        return exact_sum(self.query, X, spec, grid)

    def noise(self, exact: Mapping[str, Ints]) -> dict[str, Ints]:
        """What was added to the exact numbers of each field."""
        return {name: self.noisy.fields[name] - numbers for name, numbers in exact.items()}

    @property
    def steps(self) -> Ints:
        """All noisy numbers."""
        return flat(self.noisy.fields)


@dataclass
class Watched(Releases):
    """Releases that are noted, with the order in which things were done.

    Attributes
    ----------
    seen : list of Released
    events : list of (str, int)
        ``("charge", numbers)`` and ``("draw", numbers)``, in the order in which they were done.
    """

    seen: list[Released] = field(default_factory=list, init=False, repr=False)
    events: list[tuple[str, int]] = field(default_factory=list, init=False, repr=False)

    def release(
        self, query: Query, X: Floats, share: float, *, run: str, step: int, message: str
    ) -> Noisy:
        """See `Releases`."""
        noisy = super().release(query, X, share, run=run, step=step, message=message)
        self.seen.append(Released(message, query, share, None, noisy))
        return noisy

    def contribute(
        self,
        query: Query,
        X: Floats,
        share: float,
        *,
        n_clients: int,
        run: str,
        step: int,
        message: str,
    ) -> Noisy:
        """See `Releases`."""
        noisy = super().contribute(
            query, X, share, n_clients=n_clients, run=run, step=step, message=message
        )
        self.seen.append(Released(message, query, share, n_clients, noisy))
        return noisy

    def _sampler(self) -> Sampler:
        sampler = super()._sampler()

        def draw(sigma: float, size: int) -> Ints:
            self.events.append(("draw", size))
            return sampler(sigma, size)

        return draw

    def _charge(self, exact: Bounded, *given: Any, **more: Any) -> None:
        super()._charge(exact, *given, **more)
        self.events.append(("charge", exact.coordinates))


class Outlets:
    """Fresh ways out, each with its whole budget, as many as one likes.

    The budget of a ledger is per client, so each outlet has a client's name of its own.
    """

    _PER_BOOK = 4096

    def __init__(self, spec: PrivacySpec) -> None:
        self.spec = spec
        self._numbers = count()
        self._book: Ledger | None = None

    def fresh(self) -> Watched:
        """A way out that has released nothing yet."""
        return Watched(*self.account())

    def account(self) -> tuple[str, PrivacySpec, Ledger]:
        """A client that has spent nothing, the spec, and the ledger that it is charged to."""
        number = next(self._numbers)
        if self._book is None or number % self._PER_BOOK == 0:
            epsilon, delta = self.spec.target()
            self._book = Ledger.create(
                None,
                epsilon=epsilon,
                delta=delta,
                unit=self.spec.unit,
                adjacency=self.spec.adjacency,
            )
        return f"client {number}", self.spec, self._book


@dataclass(frozen=True)
class Rehearsal:
    """What one client of a run is asked.

    Attributes
    ----------
    spec : PrivacySpec
        With the number of survivors that it asks for.
    client_class : subclass of PrivateClient
    requests : tuple of bytes
    n_clients, n_features : int
    """

    spec: PrivacySpec
    client_class: type[PrivateClient]
    requests: tuple[bytes, ...]
    n_clients: int
    n_features: int

    @property
    def domain(self) -> Domain:
        """The public region."""
        return Domain.of(self.spec, self.n_features)

    def client(self, X: Floats, outlet: Watched) -> PrivateClient:
        """A fresh client with these records."""
        summand = None if self.spec.protection == "none" else PlainSummand(self.n_clients)
        return self.client_class(X, self.spec, np.random.default_rng(0), outlet, summand)

    def play(self, X: Floats, outlet: Watched) -> list[Released]:
        """Ask a fresh client everything, and return what it released."""
        client = self.client(X, outlet)
        for request in self.requests:
            client.handle(request)
        return outlet.seen


def rehearse(
    client_class: type[PrivateClient],
    serve: Serve,
    spec: PrivacySpec,
    *,
    clients: Sequence[str],
    n_features: int,
    rng: np.random.Generator,
) -> Rehearsal:
    """Play a run over clients with made-up records, and keep what the first of them is asked.

    Parameters
    ----------
    client_class : subclass of PrivateClient
    serve : function
        The server's side.
    spec : PrivacySpec
    clients : sequence of str
    n_features : int
    rng : numpy.random.Generator
        For the made-up records; noise never comes from it.
    """
    spec = with_quorum(spec, len(clients))
    rehearsal = Rehearsal(spec, client_class, (), len(clients), n_features)
    outlets = Outlets(spec)
    size = min(spec.public_size or MADE_UP, 10 * MADE_UP)
    members = {
        name: rehearsal.client(made_up(rehearsal.domain, size, rng), outlets.fresh())
        for name in clients
    }
    engine = _Recorder({name: member.handle for name, member in members.items()}, clients[0])
    secure_sum = None if spec.protection == "none" else PlainSum()
    session = Session(engine, spec, n_features, secure_sum)
    with warnings.catch_warnings():
        # That made-up records do not cluster well is nobody's concern.
        warnings.simplefilter("ignore", FederationWarning)
        warnings.simplefilter("ignore", PrivacyWarning)
        serve(session, rng)
    return replace(rehearsal, requests=tuple(engine.requests))


def made_up(domain: Domain, size: int, rng: np.random.Generator) -> Floats:
    """Records in a few lumps within the region, as the caller's data would be given."""
    centers = rng.uniform(-0.8, 0.8, (4, domain.n_features))
    working = centers[rng.integers(4, size=size)]
    return domain.leave(domain.hold(rng.normal(working, 0.1)))


def flat(fields: Mapping[str, Ints]) -> Ints:
    """All numbers of a release in one row."""
    return np.concatenate([np.ravel(numbers) for numbers in fields.values()])


class _Recorder:
    """An engine that keeps what one client is asked."""

    def __init__(self, handlers: Mapping[str, Callable[[bytes], bytes]], whom: str) -> None:
        self._engine = InProcessEngine(handlers)
        self._whom = whom
        self.requests: list[bytes] = []

    @property
    def clients(self) -> tuple[str, ...]:
        """See `Engine`."""
        return tuple(self._engine.clients)

    def exchange(self, requests: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """See `Engine`."""
        if self._whom in requests:
            self.requests.append(requests[self._whom])
        return iter(self._engine.exchange(requests))
