"""A party's end of a federation: takes part in runs that its owner's policy allows.

What a party needs to go on after it was killed is on its disk: the offer that it has accepted, what
its protocol's client knows (`protocols/checkpoint.py`), the ledger with what was charged and sent,
and where the ledger stood, apart from the ledger.
"""

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from secure_fedclust import __version__
from secure_fedclust.arrays import Ints
from secure_fedclust.base import FederatedClusterer
from secure_fedclust.config import algorithm_of, parameter_names
from secure_fedclust.deployment.keys import SERVER, Keys
from secure_fedclust.deployment.offer import (
    Answer,
    Ending,
    Offer,
    Reply,
    Stranger,
    anchor_of,
    both_versions,
    decode,
    is_greeting,
)
from secure_fedclust.deployment.policy import Policy
from secure_fedclust.errors import (
    BudgetExceeded,
    CheckpointError,
    DataError,
    LedgerError,
    NotAdmitted,
    ParameterError,
    PolicyRefusal,
    ProtocolError,
    SecureFedClustError,
)
from secure_fedclust.messages import read_envelope
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.ledger import Anchor, Ledger
from secure_fedclust.privacy.plan import fallback, on_sums
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.protocols.checkpoint import Memory, replace_file
from secure_fedclust.protocols.client import Client, PrivateClient
from secure_fedclust.protocols.party import Party
from secure_fedclust.protocols.sums import client_end, key_holder_end, with_quorum
from secure_fedclust.records import Clients
from secure_fedclust.result import UNREADABLE, FedClustResult
from secure_fedclust.run import check_available, new_client

RUN: Final = "run.json"
MEMORY: Final = "memory.npz"
ANCHOR: Final = "anchor.json"
HOLDER_KEYS: Final = "keys.json"
LEFT: Final = "left.json"
ENDED: Final = "ended {}.json"
RESULT: Final = "result.json"
LABELS: Final = "labels.csv"

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _-]{0,63}")
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, OverflowError)
_log = logging.getLogger(__name__)


class Participant(ABC):
    """Answers what a server asks of this party, one run at a time.

    Parameters
    ----------
    keys : Keys
    policy : function
        Gives the policy as it is now: it is asked for at every offer.
    state : path
        A folder that is this party's alone, on a disk that outlives the process.
    """

    role: str

    def __init__(self, keys: Keys, policy: Callable[[], Policy], state: str | Path) -> None:
        self.keys = keys
        self.policy = policy
        self.state = Path(state)
        try:
            self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ParameterError(f"{state} cannot be made: {error.strerror}") from error
        self.on_end: Callable[[], None] = lambda: None
        """Called when a run that this party was in has ended."""
        self._offer: Offer | None = None
        self._party: Party | None = None

    def resume(self) -> None:
        """Go on with the run that an earlier process was in, if there is one."""
        path = self.state / RUN
        if not path.exists():
            return
        try:
            offer = decode(path.read_bytes())
        except (OSError, ProtocolError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): remove it to take no further part in its run"
            ) from error
        if not isinstance(offer, Offer):
            raise CheckpointError(f"{path} is no run of this version: remove it")
        self._offer = offer
        try:
            self._admit(offer)
        except NotAdmitted as error:
            _log.error("the policy does not allow run %s any more: %s", offer.run, error)
            self.leave()
            return
        self._party = self._open(offer)
        self._remember(self._party)
        _log.info("going on with run %s", offer.run)

    def handle(self, data: bytes) -> bytes:
        """Answer one request, or raise an error of this package: nothing is sent then."""
        try:
            return self._greet(data) if is_greeting(data) else self._work(data)
        except OSError as error:
            # A reply that could not be kept is not sent; what was charged for it stays charged.
            raise CheckpointError(
                f"{self.state} or the ledger cannot be written ({error.strerror}): make room; "
                "nothing was sent"
            ) from error

    def leave(self) -> None:
        """Take no further part in the run that goes on."""
        if self._offer is None:
            return
        run = self._offer.run
        self._forget()  # which needs no room on a disk, and is what matters
        try:
            replace_file(self.state / LEFT, json.dumps([*self._left(), run]).encode())
        except OSError as error:
            raise CheckpointError(
                f"left run {run}, but {self.state / LEFT} cannot be written ({error.strerror}): if "
                "the run is offered again, this party would take part"
            ) from error
        _log.info("left run %s", run)

    def _left(self) -> list[str]:
        path = self.state / LEFT
        try:
            return list(map(str, json.loads(path.read_bytes()))) if path.exists() else []
        except _UNREADABLE as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def _work(self, data: bytes) -> bytes:
        envelope = read_envelope(data)
        if self._offer is None or self._party is None or envelope.run != self._offer.run:
            left = ", and has left" if envelope.run in self._left() else ""
            raise ProtocolError(f"the request belongs to a run that this party is not in{left}")
        reply = self._party.handle(data)
        self._after()
        _log.info("answered %s", envelope.schema.removesuffix("/request"))
        return reply

    def _greet(self, data: bytes) -> bytes:
        message = decode(data)
        if isinstance(message, Offer):
            return self._consider(message).encode()
        if isinstance(message, Ending):
            self._end(message)
            return Reply(message.run, "yes", None).encode()
        if isinstance(message, Stranger):
            _log.error("refused: %s", both_versions(message))
            return Reply("", "version", None).encode()
        raise ProtocolError("a reply came where a request was expected")

    def _consider(self, offer: Offer) -> Reply:
        """Take part, or say in a word why not; the log says it in full."""
        if offer.version != __version__:
            _log.info("the server has version %s, this is %s", offer.version, __version__)
        try:
            spec = self._admit(offer)
            self._join(offer)
        except SecureFedClustError as error:
            word = next(word for kind, word in _WORDS.items() if isinstance(error, kind))
            _log.error("refused run %s (%s): %s", offer.run[:40], word, error)
            under_way = self._offer is not None and offer.run == self._offer.run
            if under_way and isinstance(error, NotAdmitted):
                self.leave()
            return Reply(offer.run, word, None)
        _log.info(
            "take part in run %s: %s of %d clients; %s%s",
            offer.run,
            offer.algorithm,
            offer.n_clients,
            spec.describe(),
            on_sums(spec, offer.n_clients, self._is_seen_alone(offer, spec)),
        )
        if spec.is_private and spec.protection != "none":
            _log.info("%s", fallback(spec, Limit.of(*spec.target()), local=0.0, sums=1.0))
        return Reply(offer.run, "yes", self._anchor())

    def _admit(self, offer: Offer) -> PrivacySpec:
        """The privacy spec of a run that is for this party, and within its policy."""
        if offer.party != self.keys.card.name or offer.role != self.role:
            raise PolicyRefusal(
                f"the server takes this party for the {offer.role} {offer.party[:80]!r}, it is "
                f"the {self.role} {self.keys.card.name!r}"
            )
        if not _RUN_NAME.fullmatch(offer.run):
            raise ProtocolError(f"run {offer.run[:80]!r}: a folder cannot be called that")
        spec = PrivacySpec.from_dict(offer.privacy)
        check_available(spec)
        spec = with_quorum(spec, offer.n_clients)
        self.policy().check(offer.algorithm, spec, offer.n_clients)
        return spec

    def _join(self, offer: Offer) -> None:
        if self._offer is not None and offer.run == self._offer.run:
            # A server that was killed offers its run again, and may have forgotten the last of what
            # it has heard: this party goes on from where it would, had it been killed as well.
            known = {name: getattr(self._offer, name) for name in ("seed", "anchor", "version")}
            if replace(offer, **known) != self._offer:
                raise ProtocolError("the run is offered again, and is another one")
            party = self._open(self._offer)
            self._remember(party)
            self._party = party
            return
        if offer.run in self._left():
            raise PolicyRefusal("this party has left that run")
        party, kept = self._open(offer), offer.encode()
        self._forget()
        replace_file(self.state / RUN, kept)
        self._remember(party)
        self._offer, self._party = offer, party

    def _end(self, ending: Ending) -> None:
        """Forget the run. Nothing is made of its result here, since the reply tells when."""
        if self._offer is None or ending.run != self._offer.run:
            raise ProtocolError("the end of a run that this party is not in")
        if ending.result is None:
            _log.warning("the server has given up run %s", ending.run)
        else:
            _log.info("run %s has ended", ending.run)
            said = [self._offer.encode().decode(), ending.encode().decode()]
            replace_file(self.state / ENDED.format(ending.run), json.dumps(said).encode())
        self._forget()
        self.on_end()

    def finish(self) -> None:
        """Make something of the results of runs that have ended: when the reply is on its way.

        What is computed from records here stays here. Neither the reply nor its time may depend on
        it, and so nothing that goes wrong does either.
        """
        for path in sorted(self.state.glob(ENDED.format("*"))):
            try:
                offer, ending = (decode(said.encode()) for said in json.loads(path.read_bytes()))
                if not isinstance(offer, Offer) or not isinstance(ending, Ending):
                    raise ProtocolError(f"{path} is of another version")
                self._keep_result(offer, ending.result or {})
            except OSError as error:
                _log.error("no result yet: %s; make room, and start again: %s waits", error, path)
                continue
            except SecureFedClustError as error:
                _log.error("the result is not kept: %s", error)
            except Exception:  # there is no end of what a server could send
                _log.exception("the result is not kept: it cannot be used")
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _forget(self) -> None:
        for name in (RUN, MEMORY):
            (self.state / name).unlink(missing_ok=True)
        self._offer = self._party = None

    def _remember(self, party: Party) -> None:
        """Have a party go on from what an earlier process has kept, and keep what comes."""
        return None

    def _after(self) -> None:
        """Do what there is to do before a reply is sent."""
        return None

    def _anchor(self) -> list[Any] | None:
        return None

    def _is_seen_alone(self, offer: Offer, spec: PrivacySpec) -> bool:
        """Whether the server sees answers of this party besides sums that they are in."""
        return False

    def _keep_result(self, offer: Offer, result: dict[str, Any]) -> None:
        """Keep what came of a run."""
        return None

    @abstractmethod
    def _open(self, offer: Offer) -> Party:
        """The party's end of a run, or an error of this package; nothing is kept of it yet."""


class ClientParticipant(Participant):
    """A client with records.

    Parameters
    ----------
    keys, policy, state
        As in `Participant`.
    records : Clients
        This client's records, with all columns that there may be runs on.
    region : function
        Raises an error if a privacy spec has another region than the owner of the data says.
    ledger : Ledger, optional
        Where releases are charged. Without one there are no runs with differential privacy.
    key_holder : str, optional
        The name of the key holder whose keys are taken.
    out : path, optional
        A folder for results and for the labels of this client's records: in it, one for each run.
    """

    role = "client"

    def __init__(
        self,
        keys: Keys,
        policy: Callable[[], Policy],
        state: str | Path,
        *,
        records: Clients,
        region: Callable[[PrivacySpec, Sequence[str]], None],
        ledger: Ledger | None = None,
        key_holder: str | None = None,
        out: str | Path | None = None,
    ) -> None:
        super().__init__(keys, policy, state)
        self._records = records
        self._region = region
        self._ledger = ledger
        self._key_holder = key_holder
        self._out = None if out is None else Path(out)
        self.check_ledger(None)

    def check_ledger(self, seen: Anchor | None) -> None:
        """Refuse a ledger that has lost rows which this party, or the server, has seen.

        And one with rows of others: each name has a budget there, and who changes its name has
        not got another one.
        """
        if self._ledger is None:
            return
        name = self.keys.card.name
        if others := set(self._ledger.clients()) - {name}:
            raise LedgerError(
                f"the ledger has releases of {sorted(others)[0]}, this is {name}: a client has a "
                "ledger of its own, and keeps its name as long as its records"
            )
        path = self.state / ANCHOR
        anchors = [] if seen is None else [seen]
        if path.exists():
            try:
                rows, head = json.loads(path.read_text(encoding="utf-8"))
                anchors.append(Anchor(int(rows), str(head)))
            except _UNREADABLE as error:
                raise LedgerError(f"{path} cannot be read: {error}") from error
        self._ledger.verify(anchors)

    def _admit(self, offer: Offer) -> PrivacySpec:
        spec = super()._admit(offer)
        if spec.is_private:
            self.check_ledger(None if offer.anchor is None else Anchor(*anchor_of(offer.anchor)))
        return spec

    def _open(self, offer: Offer) -> Party:
        spec = with_quorum(PrivacySpec.from_dict(offer.privacy), offer.n_clients)
        model = _model(offer, spec)
        name = self.keys.card.name
        records = self._records_for(offer)
        self._region(spec, records.feature_names or ())
        if spec.is_private:
            if self._ledger is None:
                raise ParameterError("a run with differential privacy needs a ledger")
        if spec.records_per_person is not None:
            records, _ = records.limit_persons(spec.records_per_person)
        elif spec.is_private and records.persons is not None:
            raise ParameterError(
                "person_column says who records are about, and the run does not limit them"
            )
        cards = self.keys.roster
        others = [c for c in cards.values() if c.name not in (SERVER, self._key_holder)]
        if spec.active_server and len(others) < offer.n_clients - 1:
            raise ParameterError(
                f"the roster has the cards of {len(others)} other clients, the run "
                f"{offer.n_clients - 1}: register the cards of all"
            )
        holder = cards.get(self._key_holder or "")
        (X,) = records.values()
        if not spec.is_private and not len(X):
            raise DataError(f"{name} has no records")
        client = new_client(
            model._client_for(spec),
            name,
            X,
            spec,
            _generator(offer.seed),
            ledger=self._ledger if spec.is_private else None,
            summand=client_end(
                spec,
                offer.n_clients,
                self.keys.identity,
                [card.identity for card in others],
                None if holder is None else holder.identity,
            ),
            sums_only=model._in_sums_only(spec),
            resumed=offer.run,
        )
        if isinstance(client, PrivateClient) and client.share_clipped > 0:
            _log.info(
                "%.1f%% of the records lie outside of the region and were moved to its edge (this "
                "is not private)",
                100 * client.share_clipped,
            )
        return client

    def _is_seen_alone(self, offer: Offer, spec: PrivacySpec) -> bool:
        return spec.protection != "none" and not _model(offer, spec)._in_sums_only(spec)

    def _records_for(self, offer: Offer) -> Clients:
        return self._records if offer.columns is None else self._records.select(offer.columns)

    def _remember(self, party: Party) -> None:
        if isinstance(party, Client):
            party.remember(Memory(self.state / MEMORY))

    def _after(self) -> None:
        if self._ledger is not None and (anchor := self._anchor()) is not None:
            replace_file(self.state / ANCHOR, json.dumps(anchor).encode())

    def _anchor(self) -> list[Any] | None:
        return None if self._ledger is None else list(self._ledger.anchor())

    def _keep_result(self, offer: Offer, result: dict[str, Any]) -> None:
        if self._out is None:
            return
        try:
            found = FedClustResult.from_dict(result)
        except UNREADABLE as error:
            raise ProtocolError("what the server sends as the result is none") from error
        if len(found.centers) > PrivateClient.max_clusters:
            raise ProtocolError(
                f"the server's result has {len(found.centers)} clusters, at most "
                f"{PrivateClient.max_clusters} are looked at"
            )
        folder = self._out / offer.run
        if (folder / RESULT).exists():
            raise ProtocolError(f"{folder} has a result already, which stays")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        model = _model(offer, PrivacySpec.from_dict(offer.privacy))
        (X,) = self._records_for(offer).values()
        labels = _labels(model, self.keys.card.name, result, X) if len(X) else ()
        lines = ["label", *(str(int(label)) for label in labels)]
        replace_file(folder / LABELS, ("\n".join(lines) + "\n").encode())
        replace_file(folder / RESULT, json.dumps(result, indent=1, allow_nan=False).encode())
        _log.info("wrote %s and %s", folder / RESULT, folder / LABELS)


class KeyHolderParticipant(Participant):
    """The party that has the secret key of encrypted sums, and no records."""

    role = "key holder"

    def _open(self, offer: Offer) -> Party:
        spec = with_quorum(PrivacySpec.from_dict(offer.privacy), offer.n_clients)
        if spec.protection != "ckks":
            raise PolicyRefusal(f"protection {spec.protection!r} has no use for a key holder")
        server = self.keys.roster.get(SERVER)
        if server is None:
            raise ParameterError(f"the card of the {SERVER} is not registered: register it")
        path = self.state / HOLDER_KEYS
        return key_holder_end(spec, offer.n_clients, self.keys.identity, server.identity, path)

    def _forget(self) -> None:
        super()._forget()
        (self.state / HOLDER_KEYS).unlink(missing_ok=True)


_WORDS: dict[type[SecureFedClustError], Answer] = {
    NotAdmitted: "policy",
    BudgetExceeded: "ledger",
    LedgerError: "ledger",
    ParameterError: "configuration",
    SecureFedClustError: "failed",
}


def _model(offer: Offer, spec: PrivacySpec) -> FederatedClusterer:
    """What is to be run, which must be what the guarantee is proved for."""
    kind = algorithm_of(offer.algorithm)
    if unknown := set(offer.parameters) - parameter_names(kind):
        raise ParameterError(f"{offer.algorithm}: unknown parameters {sorted(unknown)[:5]}")
    model = kind(privacy=spec)
    model.set_params(**offer.parameters)
    model._check_parameters()
    if spec.is_private:
        model._check_private(spec)
        if model._unproved() is not None:
            raise PolicyRefusal(f"the run has no guarantee: {model._unproved()}")
    else:
        model._check_unprotected(spec)
    return model


def _labels(model: FederatedClusterer, name: str, result: dict[str, Any], X: Any) -> Ints:
    model._restore({"result": result | {"feature_names": None}, "clients": [name]})
    return model.predict(X)


def _generator(seed: Sequence[Any]) -> np.random.Generator:
    if not seed or not all(type(part) is int and 0 <= part < 2**128 for part in seed):
        raise ProtocolError("the seed is not a list of whole numbers")
    entropy, *key = seed
    return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=key))
