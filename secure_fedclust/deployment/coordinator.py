"""The server's end of a federation: who takes part, one run, and what clients are told of it."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np

from secure_fedclust import __version__
from secure_fedclust.base import FederatedClusterer, plain_parameters
from secure_fedclust.deployment.offer import (
    MOST_GREETING,
    Answer,
    Ending,
    Offer,
    Reply,
    Stranger,
    anchor_of,
    both_versions,
    decode,
)
from secure_fedclust.engines.base import Engine
from secure_fedclust.errors import LedgerError, NotAdmitted, ParameterError, ProtocolError
from secure_fedclust.messages import KEY_HOLDER
from secure_fedclust.privacy.cohort import SMALLEST_COHORT
from secure_fedclust.privacy.identity import Identity
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.protocols.checkpoint import replace_file
from secure_fedclust.protocols.federation import Federation
from secure_fedclust.protocols.sums import with_quorum
from secure_fedclust.result import FedClustResult
from secure_fedclust.run import check_available, generator, require_spec

NOT_SENT: Final = ("random_state", "sampler")
"""Parameters that are no business of the clients."""

_log = logging.getLogger(__name__)


def enrol(
    engine: Engine,
    model: FederatedClusterer,
    *,
    run: str,
    columns: Sequence[str] | None = None,
    key_holder: str | None = None,
    min_clients: int | None = None,
    identity: Identity | None = None,
    identities: Mapping[str, bytes] | None = None,
    anchors: Mapping[str, tuple[int, str]] | None = None,
) -> Federation:
    """Offer a run to everybody, and say who takes part.

    Parameters
    ----------
    engine : Engine
    model : FederatedClusterer
        Its privacy spec gets the quorum that such a cohort has.
    run : str
    columns : sequence of str, optional
    key_holder : str, optional
        The name of the party that the engine reaches as the key holder.
    min_clients : int, optional
        With fewer there is no run; nor with fewer than a sum needs.
    identity, identities, anchors
        As in `Federation`; anchors from earlier runs.

    Raises
    ------
    NotAdmitted
        When too few take part; says who does not, and why in a word.
    """
    names = list(engine.clients)
    spec = with_quorum(require_spec(model.privacy), len(names))
    check_available(spec)
    check_secure(model)
    model.set_params(privacy=spec)
    seeds = generator(model.random_state).spawn(len(names))
    parameters = {
        name: value for name, value in plain_parameters(model).items() if name not in NOT_SENT
    }
    seen = dict(anchors or {})

    def offer(party: str, place: int, role: Any) -> bytes:
        return Offer(
            run=run,
            party=party,
            role=role,
            algorithm=type(model).__name__,
            parameters=parameters,
            privacy=spec.to_dict(),
            n_clients=len(names),
            columns=None if columns is None else list(columns),
            seed=_seed(seeds[place]),
            anchor=list(seen[party]) if party in seen and spec.is_private else None,
        ).encode()

    offers = {name: offer(name, i, "client") for i, name in enumerate(names)}
    if spec.protection == "ckks":
        if key_holder is None:
            raise ParameterError("protection='ckks' needs a key holder: name one in [server]")
        offers[KEY_HOLDER] = offer(key_holder, 0, "key holder")
    answers = dict.fromkeys(offers, "no answer")
    members: dict[str, tuple[int, str] | None] = {}
    for party, data in engine.exchange(offers):
        answers[party], anchor = _answer(party, run, data, seen.get(party))
        if answers[party] == "yes":
            members[party] = anchor
    missing = {party: answer for party, answer in answers.items() if answer != "yes"}
    for party, answer in missing.items():
        _log.warning("%s does not take part: %s", party, answer)
    clients = [name for name in names if name in members]
    least = fewest(spec, min_clients)
    if len(clients) < least or KEY_HOLDER in missing:
        why = "; ".join(f"{party}: {answer}" for party, answer in missing.items())
        error = NotAdmitted(
            f"{len(clients)} of {len(names)} clients take part, {least} are needed"
            + (", and a key holder" if spec.protection == "ckks" else "")
            + f" ({why}). Their logs say more; nothing was charged"
        )
        error.refused = tuple(p for p, answer in missing.items() if answer in get_args(Answer))
        raise error
    _log.info("run %s: %s take part", run, ", ".join(members))
    found = {name: anchor for name, anchor in members.items() if anchor is not None}
    return Federation(
        engine,
        clients,
        run,
        parties=tuple(members),
        columns=None if columns is None else tuple(columns),
        identity=identity,
        identities=identities or {},
        anchors=found,
        refused=missing,
    )


def fewest(spec: PrivacySpec, min_clients: int | None) -> int:
    """With fewer clients that take part there is no run."""
    least = min_clients or 1
    if spec.protection != "none":
        least = max(least, spec.min_survivors or 1, SMALLEST_COHORT)
    return least


def check_secure(model: FederatedClusterer) -> None:
    """Refuse noise that can be predicted."""
    if model.sampler != "secure":
        raise ParameterError("sampler='fast' is for experiments; clients draw secure noise")


def end(federation: Federation, model: FederatedClusterer | None) -> None:
    """Tell everybody what came of a run; without a model, that it was given up."""
    endings = {
        party: Ending(federation.run, None if model is None else _share(model.result_, party))
        for party in federation.parties
    }
    messages = {party: ending.encode() for party, ending in endings.items()}
    told = {party for party, _ in federation.engine.exchange(messages)}
    for party in set(endings) - told:
        _log.warning("%s has not said that it knows of the end of the run", party)


class Anchors:
    """Where clients' ledgers stood when this server last heard of them, in a file.

    A client whose ledger is restored from an old backup, and whose own note of it too, is found
    out by this.

    Parameters
    ----------
    path : path
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def read(self) -> dict[str, tuple[int, str]]:
        """What was kept, by client."""
        if not self._path.exists():
            return {}
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            return {str(name): anchor_of(anchor) for name, anchor in content.items()}
        except (OSError, ValueError, AttributeError, ProtocolError) as error:
            raise LedgerError(f"{self._path} cannot be read: {error}") from error

    def keep(self, anchors: Mapping[str, tuple[int, str]]) -> None:
        """Keep the later one of each client; on a disk that is full the older ones stay."""
        known = self.read()
        later = {
            name: anchor
            for name, anchor in anchors.items()
            if name not in known or (anchor[0] >= known[name][0] and anchor != known[name])
        }
        if not later:
            return
        try:
            replace_file(self._path, json.dumps(known | later, indent=1).encode())
        except OSError as error:
            _log.error("%s cannot be kept: %s; make room", self._path, error.strerror)


def _answer(
    party: str, run: str, data: bytes, seen: tuple[int, str] | None
) -> tuple[str, tuple[int, str] | None]:
    """What a party says to an offer, and where its ledger stands."""
    try:
        reply = decode(data, MOST_GREETING)
    except ProtocolError as error:
        return str(error), None
    if isinstance(reply, Stranger):
        return both_versions(reply), None
    if not isinstance(reply, Reply) or (reply.answer != "version" and reply.run != run):
        return "it has answered something else", None
    if reply.answer == "version":
        theirs = Stranger(reply.protocol, reply.version)
        return both_versions(theirs), None
    if reply.version != __version__:
        _log.info("%s has version %s, this is %s", party, reply.version, __version__)
    if reply.anchor is None:
        return reply.answer, None
    try:
        anchor = anchor_of(reply.anchor)
    except ProtocolError as error:
        return f"it has answered something else: {error}", None
    if seen is not None and anchor[0] < seen[0]:
        return f"its ledger has {anchor[0]} rows, and had {seen[0]}: an old copy", None
    return reply.answer, anchor


def _seed(rng: np.random.Generator) -> list[int]:
    sequence = rng.bit_generator.seed_seq
    entropy = sequence.entropy  # type: ignore[attr-defined]
    return [int(entropy), *map(int, sequence.spawn_key)]  # type: ignore[attr-defined]


def _share(result: FedClustResult, party: str) -> dict[str, Any] | None:
    """What a party is told of a result: the clusters, and of other parties nothing."""
    if party == KEY_HOLDER:
        return {}
    clusters, networks, own = result.client_clusters, result.networks, f"models of {party}"
    return replace(
        result,
        history=(),
        sums=(),
        anchors={},
        association=None,
        federation=None if result.federation is None else {**result.federation, "refused": {}},
        spent={name: spent for name, spent in result.spent.items() if name == party},
        client_clusters=None
        if clusters is None
        else {name: held for name, held in clusters.items() if name == party},
        networks=None
        if networks is None
        else {
            name: weights
            for name, weights in networks.items()
            if name == own or not name.startswith("models of ")
        },
    ).to_dict()
