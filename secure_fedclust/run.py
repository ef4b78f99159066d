"""A run over clients, from what the caller gave: their records, or an engine that reaches them."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.engines import Engine, Fault, InProcessEngine
from secure_fedclust.errors import ParameterError, PrivacyWarning
from secure_fedclust.parameters import check_choice
from secure_fedclust.privacy.accounting import Limit, epsilon_of
from secure_fedclust.privacy.grid import most_records
from secure_fedclust.privacy.ledger import IN_A_SUM, Ledger, Quorum
from secure_fedclust.privacy.mechanism import SamplerName
from secure_fedclust.privacy.plan import MANY, MANY_ELSEWHERE, fallback, on_sums
from secure_fedclust.privacy.release import ExactSums, Releases
from secure_fedclust.privacy.secure_sum import Summand
from secure_fedclust.privacy.spec import PrivacySpec, adversary
from secure_fedclust.protocols.client import Client, PrivateClient
from secure_fedclust.protocols.federation import Federation
from secure_fedclust.protocols.session import Session
from secure_fedclust.protocols.sums import check_names, ends_for, server_end, with_quorum
from secure_fedclust.records import Clients, check_clients

Progress = Callable[[int, int], None]

NO_LEDGER = "; for this run alone, as no ledger was given"
OWN_LEDGERS = "; for this run, provided that every client enforces the same spec"
EXPERIMENTS = "; for this run alone: others on the ledger have no guarantee"
FEWER_RECORDS = "; for this run alone: others on the ledger have trained for fewer records a person"
ALL_RUNS = "; for this run, and for all runs so far on the ledger together"
"""How guarantees end: by where the run was charged, and what else was charged there."""

MAX_NAME = 256
"""Characters of a client's name, which a ledger keeps."""

MANY_CLIPPED = 0.5
"""A client is warned when this share of its records, or more, lies outside the public region."""


@dataclass
class Run:
    """A session, and what only the caller's side knows.

    Attributes
    ----------
    session : Session
    records : Clients
        Empty where an engine reaches the clients.
    ledger : Ledger or None
        None without differential privacy, and where clients keep their own.
    sampler : {"secure", "fast"}
    own_ledger : bool
        Whether the ledger was made for this run, and knows of no other.
    clipped, left_out : mappings of client to share and number of records
        Computed from records without protection.
    finish : function
        Says that all is done, whatever was expected.
    federation : mapping or None
        See `FedClustResult`.
    """

    session: Session
    records: Clients = field(repr=False)
    ledger: Ledger | None = None
    sampler: SamplerName = "secure"
    own_ledger: bool = False
    clipped: Mapping[str, float] = field(default_factory=dict, repr=False)
    left_out: Mapping[str, int] = field(default_factory=dict, repr=False)
    finish: Callable[[], None] = field(default=lambda: None, repr=False)
    federation: Mapping[str, Any] | None = None

    def guarantee(self, unproved: str | None = None) -> str:
        """What may be claimed about the run, in one sentence."""
        spec = self.session.spec
        if unproved is not None:
            return f"NO DP CLAIM: {unproved}"
        if spec.is_private and self.sampler == "fast":
            return (
                "NO DP CLAIM: noise from a generator that can be predicted (sampler='fast'), for "
                f"experiments; sampler='secure' would give {spec.describe()}"
            )
        each = bool(self.costs().get("local"))
        n_clients = len(self.session.clients)
        sentence = spec.describe() + on_sums(spec, n_clients, each)
        if not spec.is_private:
            return sentence
        if self.ledger is None:
            return sentence + OWN_LEDGERS
        if self.own_ledger:
            return sentence + NO_LEDGER
        if self.ledger.has_experiments:
            return sentence + EXPERIMENTS
        if (persons := spec.records_per_person or 1) > 1 and any(
            row.charge.inputs.get("records", persons) < persons for row in self.ledger.rows()
        ):
            return sentence + FEWER_RECORDS
        return sentence + on_the_ledger(spec, self.ledger.limit, self.ledger.quorums(), n_clients)

    def spent(self) -> dict[str, float]:
        """Epsilon that the run has cost each client, at the spec's delta: information, no claim.

        Where clients keep their own ledgers it is what they were asked to spend.
        """
        spec = self.session.spec
        if not spec.is_private:
            return {}
        if self.ledger is None:
            limit = self.session.limit
            mus = {
                client: limit.mu * math.sqrt(share) for client, share in self.session.shares.items()
            }
        else:
            run = self.session.run
            mus = {client: self.ledger.totals(client, run).mu for client in self.session.clients}
        return {client: epsilon_of(spec.target()[1], mu) for client, mu in mus.items()}

    def costs(self) -> dict[str, float]:
        """The run's mu in what the server saw of each client, and in sums; the largest of each."""
        session = self.session
        if not session.spec.is_private or session.spec.protection == "none":
            return {}
        local, sums = self._shares()
        return {
            "local": session.limit.mu * math.sqrt(local),
            "sums": session.limit.mu * math.sqrt(sums),
        }

    def fallback(self) -> str | None:
        """What is left if the noise of no other honest client is in the sums."""
        session = self.session
        if not self.costs():
            return None
        return fallback(session.spec, session.limit, *self._shares())

    def _shares(self) -> tuple[float, float]:
        """Shares of mu squared in answers of single clients and in sums; the largest of each.

        As asked for, or more where the ledger has more: what was cut off and drawn again.
        """
        session, limit = self.session, self.session.limit
        local = max(session.shares[c] - session.sum_shares[c] for c in session.clients)
        sums = max(session.sum_shares.values())
        if self.ledger is not None:
            for client in session.clients:
                asked = limit.mu * math.sqrt(session.shares[client])
                if self.ledger.totals(client, session.run).mu <= asked:
                    continue
                paid = {True: 0.0, False: 0.0}
                for charge in (row.charge for row in self.ledger.rows(client)):
                    if charge.run == session.run:
                        paid[charge.message.endswith(IN_A_SUM)] += (charge.mu / limit.mu) ** 2
                local, sums = max(local, paid[False]), max(sums, paid[True])
        return max(local, 0.0), sums


def on_the_ledger(spec: PrivacySpec, limit: Limit, quorums: Set[Quorum], n_clients: int) -> str:
    """How the guarantee of a run ends that was charged to a ledger which others use, too.

    Parameters
    ----------
    spec : PrivacySpec
        Of the run.
    limit : Limit
        The ledger's.
    quorums : set of Quorum
        What the releases on the ledger assume that are in sums.
    n_clients : int
        Clients of the run.
    """
    persons = spec.records_per_person
    epsilon = limit.epsilon if persons is None else limit.group_epsilon(persons)
    ending = f"{ALL_RUNS} (epsilon={epsilon:.4g}, delta={limit.delta:g})"
    if persons is not None:
        ending += f", if none uses more than {persons} records of a person"
    trusting = any(quorum.trusts_server for quorum in quorums)
    # Where all assume what this run does, its own sentence has said it; but a ledger does not know
    # how many clients there were in other runs.
    if not quorums or (spec.protection != "none" and quorums == {quorum_of(spec)}):
        said = on_sums(spec, n_clients, each=False)
        return ending + MANY_ELSEWHERE * (trusting and not said)
    colluders = min(quorum.colluders for quorum in quorums)
    active = all(quorum.active_server for quorum in quorums)
    key_holder = any(quorum.key_holder for quorum in quorums)
    against = adversary(colluders, active, key_holder) + MANY * trusting
    return f"{ending}; all of them together only against {against}"


def quorum_of(spec: PrivacySpec) -> Quorum:
    """What the releases in sums of a run assume."""
    return Quorum(
        spec.min_survivors or 0, spec.colluders, spec.active_server, spec.protection == "ckks"
    )


def open_run(
    clients: Any,
    *,
    spec: PrivacySpec,
    client_class: type[Client],
    rng: np.random.Generator,
    ledger: Ledger | str | Path | None = None,
    sampler: SamplerName = "secure",
    client_column: str | None = None,
    person_column: str | None = None,
    on_progress: Progress | None = None,
    faults: Sequence[Fault] = (),
    n_exchanges: int = 1,
    experiment: bool = False,
    sums_only: bool = False,
    prepare: Callable[[str, Client], None] | None = None,
    resumed: str | None = None,
) -> Run:
    """Check what the caller gave, and make it ready to be asked.

    Parameters
    ----------
    clients : Engine, or records as `check_clients` takes them
    spec : PrivacySpec
    client_class : subclass of Client
        Of `PrivateClient` where the spec has a guarantee.
    rng : numpy.random.Generator
    ledger : Ledger or path, optional
        Where releases are charged; in memory, for this run alone, if not given.
    sampler : {"secure", "fast"}
    client_column, person_column : str, optional
    on_progress : function, optional
    faults : sequence of Fault
        What is to go wrong, in a run on records.
    n_exchanges : int
        How many exchanges to expect, for the progress.
    experiment : bool
        Whether the run has no guarantee, whatever the spec says.
    sums_only : bool
        Whether clients are to answer nothing but as parts of sums.
    prepare : function of name and client, optional
        What is to be done with each client before it is asked anything.
    resumed : str, optional
        The run that is gone on with.
    """
    check_choice("sampler", sampler, ("secure", "fast"))
    check_available(spec)
    if ledger is not None and not spec.is_private:
        raise ParameterError(
            "a run without differential privacy is not charged to a ledger, which would look as if "
            "nothing else had been seen of the data: leave the ledger out"
        )
    if isinstance(clients, Engine):
        if faults:
            raise ParameterError("faults are for runs on records, not for an engine")
        if spec.protection == "ckks":
            check_names(clients.clients)
        rng.spawn(len(clients.clients))  # what the clients begin with, as in a run on records
        if not isinstance(clients, Federation):
            session = Session(clients, spec, spec.n_features, server_end(spec))
            return Run(session, Clients({}), sampler=sampler)
        secure_sum = server_end(spec, clients.identity, clients.identities)
        width = spec.n_features if clients.columns is None else len(clients.columns)
        session = Session(clients, spec, width, secure_sum)
        session.run, session.anchors = clients.run, clients.anchors
        session.floor = {name: rows for name, (rows, _) in clients.anchors.items()}
        facts = {
            "run": clients.run,
            "encrypted": clients.encrypted,
            "refused": dict(clients.refused),
        }
        empty = Clients({}, clients.columns)
        return Run(session, empty, sampler=sampler, federation=facts)
    records = check_clients(clients, client_column, person_column, allow_none=spec.is_private)
    left_out: dict[str, int] = {}
    if spec.records_per_person is not None:
        records, left_out = records.limit_persons(spec.records_per_person)
    elif spec.is_private and records.persons is not None:
        raise ParameterError(
            "person_column says who records are about, but not how many of them may be used: give "
            "records_per_person too, with the epsilon, or leave person_column out"
        )
    if spec.is_private:
        _check_names(records)
    spec = with_quorum(spec, len(records))
    ends = ends_for(spec, list(records))
    children = rng.spawn(len(records))
    members: dict[str, Client] = {}
    book = _open_ledger(ledger, spec) if spec.is_private else None
    if book is not None and book.path is not None:
        _check_chargeable(clients, sampler, experiment)
    if book is not None and (sampler == "fast" or experiment):
        book.has_experiments = True
    for (name, X), child in zip(records.items(), children, strict=True):
        members[name] = new_client(
            client_class,
            name,
            X,
            spec,
            child,
            ledger=book,
            sampler=sampler,
            summand=ends.clients[name],
            sums_only=sums_only,
            resumed=resumed,
        )
    if prepare is not None:
        for name, member in members.items():
            prepare(name, member)
    done = 0

    def count(party: str) -> None:
        nonlocal done
        if party not in members:
            return
        expected = len(records) * n_exchanges
        done = min(done + 1, expected)
        if on_progress is not None:
            on_progress(done, expected)

    if unknown := {fault.client for fault in faults} - set(members) - set(ends.others):
        raise ParameterError(f"faults: there is no client {sorted(unknown)[0]!r}")
    handlers = {name: client.handle for name, client in members.items()}
    engine = InProcessEngine(handlers, others=ends.others, faults=faults, on_reply=count)
    clipped = {n: c.share_clipped for n, c in members.items() if isinstance(c, PrivateClient)}
    _warn_clipped(clipped)
    _warn_held(records, spec)
    session = Session(engine, spec, records.n_features, ends.server)

    def finish() -> None:
        expected = len(records) * n_exchanges
        if on_progress is not None and done < expected:
            on_progress(expected, expected)

    return Run(session, records, book, sampler, ledger is None, clipped, left_out, finish)


def new_client(
    client_class: type[Client],
    name: str,
    X: Floats,
    spec: PrivacySpec,
    rng: np.random.Generator,
    *,
    ledger: Ledger | None = None,
    sampler: SamplerName = "secure",
    summand: Summand | None = None,
    sums_only: bool = False,
    resumed: str | None = None,
) -> Client:
    """A client's end of a run, which must have room for it on its ledger.

    Parameters
    ----------
    client_class : subclass of Client
    name : str
    X : array of shape (n, d)
    spec : PrivacySpec
    rng : numpy.random.Generator
        Randomness of the algorithm.
    ledger : Ledger, optional
        Where releases are charged, with differential privacy.
    sampler : {"secure", "fast"}
    summand : Summand, optional
        Its end of secure aggregation.
    sums_only : bool
        Whether the server is to see nothing of this client but as a part of sums.
    resumed : str, optional
        The run that is gone on with.
    """
    if issubclass(client_class, PrivateClient):
        outlet: Releases | ExactSums = ExactSums(spec)
        if ledger is not None:
            outlet = Releases(name, spec, ledger, sampler, sums_only)
            outlet.require_room(resumed)
        return client_class(X, spec, rng, outlet, summand)
    if ledger is None and spec.protection == "none":
        return client_class(X, spec, rng)
    raise TypeError(f"{client_class.__name__} does not protect what it sends")


def check_available(spec: PrivacySpec) -> None:
    """Refuse a promise that this version has no protocols for."""
    if spec.unit == "client" and spec.protection == "none":
        raise ParameterError(
            "unit='client' is not available with protection='none': noise that hides a whole "
            "client would leave nothing of its message; use protection='masking' or 'ckks', or "
            "unit='record'"
        )


def _check_names(records: Clients) -> None:
    for name in records:
        if not name or not name.isprintable() or len(name) > MAX_NAME:
            raise ParameterError(
                f"client {name[:40]!r}: a name is one line of 1 to {MAX_NAME} printable characters"
            )


def _check_chargeable(clients: Any, sampler: str, experiment: bool) -> None:
    """Refuse to charge a ledger for what it could not stand for."""
    if sampler == "fast" or experiment:
        raise ParameterError(
            "a run without a guarantee (sampler='fast' or allow_unproved=True) is not charged to a "
            "ledger, which would look as if it had one: leave the ledger out"
        )
    if isinstance(clients, list | tuple):
        raise ParameterError(
            "a ledger keeps count by the clients' names: pass a mapping from names to records, "
            "with the same name for the same data every time"
        )


def _open_ledger(ledger: Ledger | str | Path | None, spec: PrivacySpec) -> Ledger:
    if isinstance(ledger, Ledger):
        return ledger
    if isinstance(ledger, str | Path):
        return Ledger.open(ledger)
    if ledger is not None:
        raise ParameterError(f"ledger={ledger!r}: give a path, a Ledger or None")
    epsilon, delta = spec.target()
    return Ledger.create(
        None, epsilon=epsilon, delta=delta, unit=spec.unit, adjacency=spec.adjacency
    )


def _warn_clipped(clipped: Mapping[str, float]) -> None:
    for client, share in clipped.items():
        if share >= MANY_CLIPPED:
            warnings.warn(
                f"{client}: {share:.0%} of the records lie outside the ranges or the bound and "
                "were moved to their edge: check units, or widen them (this share is not private)",
                PrivacyWarning,
                stacklevel=4,
            )


def _warn_held(records: Clients, spec: PrivacySpec) -> None:
    most = most_records(spec)
    for client, X in records.items():
        if spec.protection != "none" and spec.unit == "record" and len(X) > most:
            warnings.warn(
                f"{client}: it holds more than {most} records (16 times public_size), and its "
                "totals in a sum are held to what so many could have: give a larger public_size, "
                "or centres may be off (that it holds more is not private)",
                PrivacyWarning,
                stacklevel=4,
            )


def require_spec(privacy: Any) -> PrivacySpec:
    """The spec given, which has no default."""
    if isinstance(privacy, PrivacySpec):
        return privacy
    raise ParameterError(
        f"privacy={privacy!r}: there is no default; pass PrivacySpec(epsilon=..., delta=..., "
        "ranges=...), or PrivacySpec.none(reason=...) to run without differential privacy"
    )


def generator(random_state: Any) -> np.random.Generator:
    """A generator that can have children."""
    try:
        rng = np.random.default_rng(random_state)
        if isinstance(rng.bit_generator.seed_seq, np.random.SeedSequence):
            return rng
        return np.random.default_rng(rng.integers(2**63))
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"random_state={random_state!r}: give a whole number of at least 0, a numpy "
            "Generator or None"
        ) from error
