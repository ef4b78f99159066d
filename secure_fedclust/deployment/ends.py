"""The two ends as processes: a server for one run, and a party that waits for runs."""

import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from secure_fedclust.base import FederatedClusterer
from secure_fedclust.datasets import read_client
from secure_fedclust.deployment.config import ClientConfig, ServerConfig, address_of, is_loopback
from secure_fedclust.deployment.coordinator import Anchors, check_secure, end, enrol, fewest
from secure_fedclust.deployment.keys import SERVER, Keys, fingerprint_of
from secure_fedclust.deployment.participant import (
    ClientParticipant,
    KeyHolderParticipant,
    Participant,
)
from secure_fedclust.deployment.policy import Policy
from secure_fedclust.errors import (
    NotAdmitted,
    ParameterError,
    SecureFedClustError,
)
from secure_fedclust.messages import KEY_HOLDER
from secure_fedclust.privacy.ledger import Ledger
from secure_fedclust.protocols.checkpoint import lock_file, run_in
from secure_fedclust.protocols.federation import Federation
from secure_fedclust.protocols.sums import with_quorum
from secure_fedclust.run import check_available, generator, require_spec

if TYPE_CHECKING:
    from flwr.serverapp import Grid

ANCHORS: Final = "anchors.json"
_LOOK: Final = 0.1
_FAREWELL: Final = 10.0
"""Seconds that the others have to hear of the end of a run once the first one has."""

_LAST_RESULT: Final = 10.0
"""Seconds that a client which is told to stop still takes for a result. The next start goes on."""

_log = logging.getLogger(__name__)


def run_server(
    config: ServerConfig,
    *,
    insecure: bool = False,
    checkpoint: str | Path | None = None,
    on_listening: Callable[[int], None] = lambda port: None,
    on_result: Callable[[FederatedClusterer], None] = lambda model: None,
) -> FederatedClusterer:
    """Wait for the clients, run, and tell them what came of it.

    Parameters
    ----------
    config : ServerConfig
    insecure : bool
        Nothing is encrypted; on this machine only.
    checkpoint : path, optional
        See `FederatedClusterer.fit`.
    on_listening : function of the port, optional
        Called when clients can connect.
    on_result : function of the model, optional
        Called when the run is over, before anybody is told of it: what was paid for is kept first.
    """
    from secure_fedclust.engines.flower import FlowerEngine
    from secure_fedclust.engines.flower_link import SuperLink

    _check_insecure(insecure, config.host)
    keys = Keys.read(config.keys)
    if keys.card.name != SERVER:
        raise ParameterError(
            f"{config.keys} has the keys of {keys.card.name}: give those of a server, which `keys "
            "init DIR --host HOST` makes"
        )
    parties = _parties(config, keys)
    _check_model(config, len(parties) - (config.key_holder is not None))
    if not insecure:
        for name in ("server.key", "ca.key", "identity.key"):
            keys.secret(name)  # as it is for others: readable by its owner only
    certificate = None if insecure else keys.folder / "server.pem"
    key = None if insecure else keys.folder / "server.key"
    link = SuperLink(config.host, config.port, certificate=certificate, key=key)
    nodes = {name: link.register(card.node_key()) for name, card in parties.items()}
    try:
        config.state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError(f"{config.state} cannot be made: {error.strerror}") from error
    anchors = Anchors(config.state / ANCHORS)
    known = anchors.read()
    run = (None if checkpoint is None else run_in(checkpoint)) or secrets.token_hex(8)
    with link, _as_interrupt(signal.SIGTERM):
        on_listening(link.port)
        grid = link.grid()
        _wait(grid, nodes, config)
        holder = nodes.pop(config.key_holder) if config.key_holder in nodes else None

        reach = partial(
            FlowerEngine, grid, nodes, others={} if holder is None else {KEY_HOLDER: holder}
        )
        everybody = (*nodes, *(() if holder is None else (KEY_HOLDER,)))
        farewell = Federation(
            reach(timeout=config.timeout, patience=_FAREWELL), [], run, parties=everybody
        )
        try:
            federation = enrol(
                reach(
                    timeout=config.timeout,
                    min_replies=config.min_clients or len(nodes),
                    patience=config.patience,
                ),
                config.model,
                run=run,
                columns=config.columns,
                key_holder=config.key_holder,
                min_clients=config.min_clients,
                identity=keys.identity,
                identities={name: parties[name].identity for name in nodes},
                anchors=known,
            )
            federation.keep_anchors, federation.encrypted = anchors.keep, not insecure
            anchors.keep(federation.anchors)
            farewell.parties = federation.parties
            config.model.fit(federation, checkpoint=checkpoint)
        except BaseException as error:
            if isinstance(error, NotAdmitted):
                farewell.parties = [p for p in farewell.parties if p not in error.refused]
            if checkpoint is None or run_in(checkpoint) is None:  # else it can be gone on with
                _log.warning("giving up run %s, and telling those that were asked", run)
                farewell.engine = reach(timeout=min(config.timeout, _FAREWELL))
                with suppress(SecureFedClustError):
                    end(farewell, None)
            raise
        try:
            on_result(config.model)
        finally:
            try:
                end(farewell, config.model)
            except SecureFedClustError as error:
                _log.error("the clients could not be told of the result: %s", error)
    return config.model


def take_part(
    config: ClientConfig,
    data: str | Path | None,
    *,
    out: str | Path | None = None,
    insecure: bool = False,
    once: bool = False,
) -> None:
    """Connect to the server, and take part in the runs that it offers until told to stop.

    Ctrl-C leaves the run that goes on. A process that is killed, or ended by SIGTERM, does not: the
    next one goes on where it was.

    Parameters
    ----------
    config : ClientConfig
    data : path, optional
        The records; a key holder has none.
    out : path, optional
        A folder for results, and for the labels of this client's records.
    insecure : bool
        Nothing is encrypted; on this machine only.
    once : bool
        Stop after one run.
    """
    from secure_fedclust.engines.flower_node import FlowerNode

    host, port = address_of(config.server, "server")
    _check_insecure(insecure, host)
    if config.certificate is None and not insecure:
        raise ParameterError("certificate is missing: ask the server's operator for ca.pem")
    if config.certificate is not None and not config.certificate.is_file():
        raise ParameterError(f"there is no file {config.certificate}: ask for the server's ca.pem")
    keys = Keys.read(config.keys)
    if keys.card.name == SERVER:
        raise ParameterError(
            f"{config.keys} has the keys of a server: give those of a client, which `keys init DIR "
            "--name NAME` makes"
        )
    _ = keys.identity, keys.roster  # to find out now what is wrong with them
    if not insecure and config.certificate is not None:
        authority = fingerprint_of(config.certificate)
        _log.info("the server's authority has the fingerprint %s", authority)
        keys.bind(authority)
    participant = participant_of(config, keys, data, out)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    node = FlowerNode(address, keys.node_key, None if insecure else config.certificate)
    if once:
        participant.on_end = node.stop
    with lock_file(
        participant.state / "lock",
        f"another process takes part for {keys.card.name} from {participant.state}: end it, or "
        "wait until it has ended",
    ):
        participant.resume()
        # What a result is good for is found out aside: the server sees when this node looks again.
        results = _Aside(participant.finish)
        with _signals(node.stop) as caught:
            results.again()  # those that an earlier process has left
            try:
                node.serve(
                    participant.handle,
                    lambda: _log.info(
                        "connected to %s%s", config.server, " WITHOUT ENCRYPTION" * insecure
                    ),
                    results.again,
                )
            finally:
                if signal.SIGINT in caught:
                    participant.leave()
            results.finish(_LAST_RESULT if caught else None)


def participant_of(
    config: ClientConfig, keys: Keys, data: str | Path | None, out: str | Path | None = None
) -> Participant:
    """The party that a file describes."""
    policy = partial(Policy.read, config.policy)
    asked = policy()  # to find out now what is wrong with the file
    name = keys.card.name
    if config.key_holder == name:
        if data is not None:
            raise ParameterError(f"{name} is the key holder, which must have no records")
        return KeyHolderParticipant(keys, policy, config.state)
    if data is None:
        raise ParameterError("where are the records? Give --data FILE")

    if config.person_column is not None and asked.max_records_per_person is None:
        raise ParameterError(
            f"{config.policy}: max_records_per_person is missing, and [data] has a person_column: "
            "say how many records of one person a run may use at most"
        )
    # Read once: whether a client takes part in a run must not depend on its records.
    records = read_client(data, name, config.columns, config.person_column, allow_none=True)
    ledger = None if config.ledger is None else Ledger.open(config.ledger)
    if ledger is None:
        _log.warning("no ledger is named: runs with differential privacy will be refused")
    if not any(map(len, records.values())):
        _log.warning("%s has no records: this client takes part all the same, and pays", data)
    return ClientParticipant(
        keys,
        policy,
        config.state,
        records=records,
        region=config.region.check,
        ledger=ledger,
        key_holder=config.key_holder,
        out=out,
    )


def _parties(config: ServerConfig, keys: Keys) -> dict[str, Any]:
    """The cards of everybody that takes part, the clients first and in their order."""
    roster = keys.roster
    names = list(config.clients or (n for n in sorted(roster) if n != config.key_holder))
    if config.key_holder in names:
        raise ParameterError(f"{config.key_holder} cannot be a client and the key holder")
    wanted = names + ([] if config.key_holder is None else [config.key_holder])
    if missing := [name for name in wanted if name not in roster or name == SERVER]:
        raise ParameterError(
            f"{', '.join(missing)}: no card in {keys.folder}/roster; register it with "
            "`secure-fedclust keys register`"
        )
    if not names:
        raise ParameterError(f"{keys.folder}/roster is empty: register the clients' cards")
    return {name: roster[name] for name in wanted}


def _wait(grid: "Grid", nodes: dict[str, int], config: ServerConfig) -> None:
    """Wait until everybody is there, or until the time is up and enough are."""
    until = time.monotonic() + config.wait
    before: list[str] | None = None
    while True:
        there = set(grid.get_node_ids())
        missing = [name for name, node in nodes.items() if node not in there]
        if not missing:
            return
        if time.monotonic() > until:
            break
        if missing != before:
            _log.info("waiting up to %g s for %s", config.wait, ", ".join(missing))
            before = missing
        time.sleep(_LOOK)
    clients = [name for name in nodes if name not in (*missing, config.key_holder)]
    n_clients = len(nodes) - (config.key_holder is not None)
    spec = with_quorum(require_spec(config.model.privacy), n_clients)
    least = fewest(spec, config.min_clients)
    if len(clients) < least or config.key_holder in missing:
        needed = f"{len(clients)} clients are there, of at least {least}"
        if config.key_holder in missing:
            needed = f"{config.key_holder} is the key holder"
        raise NotAdmitted(
            f"{', '.join(missing)} did not connect within {config.wait:g} s: {needed}. Nothing was "
            "asked"
        )
    _log.warning("%s did not connect; going on without", ", ".join(missing))


def _check_model(config: ServerConfig, n_clients: int) -> None:
    """Find out what is wrong with the run before anybody is waited for."""
    spec = with_quorum(require_spec(config.model.privacy), n_clients)
    check_available(spec)
    generator(config.model.random_state)
    check_secure(config.model)
    if spec.protection == "ckks" and config.key_holder is None:
        raise ParameterError("protection='ckks' needs a key holder: name one in [server]")
    width = spec.n_features
    if None not in (width, config.columns) and width != len(config.columns or ()):
        raise ParameterError(
            f"[data] columns names {len(config.columns or ())} features, [privacy] has {width}"
        )
    config.model._check_parameters()
    if spec.is_private:
        config.model._check_private(spec)
    else:
        config.model._check_unprotected(spec)
    if config.min_clients is not None and config.min_clients > n_clients:
        raise ParameterError(
            f"[server] min_clients = {config.min_clients}: {n_clients} clients are registered"
        )


class _Aside:
    """Does a job again whenever that is asked for, in a thread that ends with this process."""

    def __init__(self, job: Callable[[], object]) -> None:
        self._job, self._wake, self._over = job, threading.Event(), False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def again(self) -> None:
        """Have it done once more, when it is not being done."""
        self._wake.set()

    def finish(self, seconds: float | None) -> None:
        """Have it done for the last time, and wait so long for that."""
        self._over = True
        self._wake.set()
        self._thread.join(seconds)

    def _work(self) -> None:
        last = False
        while not last:
            self._wake.wait()
            self._wake.clear()
            last = self._over
            self._job()


@contextmanager
def _as_interrupt(number: int) -> Iterator[None]:
    """Take a signal for Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


def _check_insecure(insecure: bool, host: str) -> None:
    if insecure and not is_loopback(host):
        raise ParameterError(
            f"--insecure with {host}: without encryption only on this machine (127.0.0.1)"
        )


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[set[int]]:
    """Stop at the next message, not in the middle of one."""
    caught: set[int] = set()

    def note(number: int, _: Any) -> None:
        if number in caught:
            raise KeyboardInterrupt
        caught.add(number)
        stop()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
