"""Real client processes on loopback, with TLS and node authentication, that are killed."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest

from secure_fedclust import FKM, AggregationAborted, Fault, Ledger, PrivacySpec
from secure_fedclust.deployment.coordinator import end
from secure_fedclust.deployment.keys import AUTHORITY, Keys
from secure_fedclust.messages import read_envelope
from secure_fedclust.protocols.sums import with_quorum

from .world import NAMES, Parties, offered, quietly

pytest.importorskip("flwr", reason="Flower is the extra 'flower'")

COMMAND = [sys.executable, "-c", "from secure_fedclust.cli import main; raise SystemExit(main())"]
STAGES = ("masking/advertise", "masking/share", "masking/mask", "masking/unmask")
EXACT = PrivacySpec.none(reason="test", protection="masking", min_survivors=3)
PRIVATE = PrivacySpec(
    epsilon=1.0, delta=1e-5, ranges=[(-4, 4)] * 2, protection="masking", min_survivors=3
)
POLICY = """
max_epsilon = 2.0
max_delta = 1e-4
protocols = ["FKM", "FedCRef"]
protections = ["masking", "none"]
min_cohort = 3
max_cohort = 4
without_privacy = true
"""
CLIENT = """
server = "127.0.0.1:{port}"
certificate = "{certificate}"
keys = "{keys}"
ledger = "ledger.sqlite"
policy = "policy.toml"
[data.ranges]
x = [-4, 4]
y = [-4, 4]
"""


def records():
    middle = np.array([[-2.0, -2.0], [2.0, 2.0], [-2.0, 2.0]])
    return {
        name: middle[np.arange(90) % 3] + 0.2 * np.random.default_rng(i).normal(size=(90, 2))
        for i, name in enumerate(NAMES)
    }


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(arguments, log):
    with log.open("a") as file:
        return subprocess.Popen(  # noqa: S603
            [*COMMAND, *map(str, arguments)], stdout=file, stderr=file, env=os.environ
        )


def until(holds, seconds=60.0):
    stop = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < stop, "it did not happen"
        time.sleep(0.02)


class Organisations:
    """A folder for each client, and a process in it."""

    def __init__(self, folder):
        self.folder, self.parties, self.port = folder, Parties(folder / "keys"), free_port()
        self.processes = {}
        for name, X in records().items():
            place = folder / name
            place.mkdir()
            (place / "policy.toml").write_text(POLICY)
            (place / "client.toml").write_text(
                CLIENT.format(
                    port=self.port,
                    certificate=self.parties.certificate,
                    keys=self.parties.keys[name].folder,
                )
            )
            lines = [f"{y!r},{x!r}" for x, y in X.tolist()]
            (place / "data.csv").write_text("\n".join(["y,x", *lines]) + "\n")
            Ledger.create(
                place / "ledger.sqlite",
                epsilon=10.0,
                delta=1e-4,
                unit="record",
                adjacency="add_remove",
            ).close()

    def start(self, name, *more):
        place = self.folder / name
        self.processes[name] = start(
            ["client", "--data", place / "data.csv", "--config", place / "client.toml", *more],
            place / "log",
        )

    def kill(self, name, number=signal.SIGKILL):
        self.processes[name].send_signal(number)
        self.processes[name].wait(30)

    def log(self, name):
        path = self.folder / name / "log"
        return path.read_text() if path.exists() else ""

    def ledger(self, name):
        return Ledger.open(self.folder / name / "ledger.sqlite", read_only=True)

    def close(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(30)


class Killing:
    """An engine at whose exchanges something happens."""

    def __init__(self, engine, before):
        self._engine, self._before = engine, before
        self.clients = engine.clients
        self.stages = []

    def exchange(self, requests):
        with contextlib.suppress(Exception):
            envelope = read_envelope(next(iter(requests.values())))
            self.stages.append(envelope.schema.removesuffix("/request"))
            self._before(self.stages)
        yield from self._engine.exchange(requests)


class Office:
    """A server in this process for clients that are processes."""

    def __init__(self, organisations):
        from secure_fedclust.engines.flower_link import SuperLink

        self.organisations = organisations
        keys = organisations.parties.server
        self.link = SuperLink(
            "127.0.0.1",
            organisations.port,
            certificate=keys.folder / "server.pem",
            key=keys.folder / "server.key",
        )
        self.ids = {
            name: self.link.register(organisations.parties.keys[name].card.node_key())
            for name in NAMES
        }
        self.link.__enter__()
        self.grid = self.link.grid()

    def everybody(self):
        for name in NAMES:
            process = self.organisations.processes.get(name)
            if process is None or process.poll() is not None:
                self.organisations.start(name)
        # Who was killed counts as connected for a while, but cannot answer.
        echo = self.engine(timeout=2.0, min_replies=4)
        until(lambda: len(list(echo.exchange(dict.fromkeys(NAMES, HELLO)))) == len(NAMES))

    def engine(self, **options):
        from secure_fedclust.engines.flower import FlowerEngine

        return FlowerEngine(self.grid, self.ids, **{**HURRY, **options})

    def fit(self, model, spec, before=lambda stages: None, **options):
        model.set_params(privacy=with_quorum(spec, len(NAMES)), random_state=0)
        engine = Killing(self.engine(**options), before)
        with quietly():
            federation = offered(
                engine, self.organisations.parties, model, columns=["x", "y"], min_clients=3
            )
            try:
                model.fit(federation)
            except BaseException:
                end(federation, None)
                raise
            end(federation, model)
        return model, engine


HURRY = {"timeout": 30.0, "min_replies": 3, "patience": 2.5, "poll": 0.02}

# Of another version, so that it is answered and changes nothing.
HELLO = (
    b"secure_fedclust greeting\n"
    + json.dumps({"kind": "Offer", "protocol": 0, "version": "0.0"}).encode()
)


@pytest.fixture(scope="module")
def organisations(tmp_path_factory):
    found = Organisations(tmp_path_factory.mktemp("organisations"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def office(organisations):
    found = Office(organisations)
    yield found
    found.link.__exit__()


def simulated(spec, faults=()):
    with quietly():
        model = FKM(3, n_rounds=1, privacy=with_quorum(spec, len(NAMES)), random_state=0)
        return model.fit(records(), faults=faults)


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_killed_in_a_stage_is_missing_and_the_sum_is_exact(office, stage):
    office.everybody()
    victim = NAMES[STAGES.index(stage)]
    at = []

    def before(stages):
        if stages[-1] == stage and not at:
            at.append(len(stages) - 1)
            office.organisations.kill(victim)

    model, engine = office.fit(FKM(3, n_rounds=1), EXACT, before)
    # The client is gone from then on.
    faults = [Fault(victim, i, "drop") for i in range(at[0], len(engine.stages))]
    expected = simulated(EXACT, faults)
    assert model.cluster_centers_.tobytes() == expected.cluster_centers_.tobytes()
    assert [s.survivors for s in model.result_.sums] == [s.survivors for s in expected.result_.sums]
    last = model.result_.sums[-1].survivors
    assert set(last) == set(NAMES) - {victim}


def test_below_the_threshold_there_is_a_typed_abort_and_no_result(office):
    office.everybody()

    def before(stages):
        if stages[-1] == "masking/mask" and stages.count("masking/mask") == 1:
            office.organisations.kill("ada")
            office.organisations.kill("bob")

    model = FKM(3, n_rounds=1)
    with pytest.raises(AggregationAborted, match="2 clients have sent a vector, of at least 3"):
        office.fit(model, EXACT, before, min_replies=2)
    assert not hasattr(model, "result_")


def test_a_private_round_over_the_network_takes_one_message_a_stage(office):
    office.everybody()
    model, engine = office.fit(FKM(3, n_rounds=1), PRIVATE)
    asked = [each for each in engine.stages if each in STAGES]
    sums = len(model.result_.sums)
    assert Counter(asked) == dict.fromkeys(STAGES, sums)
    for name in NAMES:
        with office.organisations.ledger(name) as ledger:
            ledger.verify()
            charges = [row.charge for row in ledger.rows()]
        assert [charge.run for charge in charges].count(charges[-1].run) == sums


def test_a_client_that_withdraws_between_rounds_is_not_waited_for(office, caplog):
    office.everybody()

    def before(stages):
        if stages[-1] == "masking/advertise" and stages.count("masking/advertise") == 2:
            office.organisations.kill("dee", signal.SIGINT)

    model, _ = office.fit(FKM(3, n_rounds=2), EXACT, before)
    assert "dee did not answer in time" not in caplog.text
    assert "left run" in office.organisations.log("dee")
    assert len(model.result_.sums[0].survivors) == 4
    assert {len(each.survivors) for each in model.result_.sums[1:]} == {3}


def test_a_policy_below_the_epsilon_asked_for_refuses_and_the_others_go_on(office):
    organisations = office.organisations
    organisations.kill("cy") if organisations.processes["cy"].poll() is None else None
    policy = organisations.folder / "cy" / "policy.toml"
    policy.write_text(POLICY.replace("max_epsilon = 2.0", "max_epsilon = 0.5"))
    try:
        office.everybody()
        with organisations.ledger("cy") as ledger:
            before = ledger.anchor()
        model, _ = office.fit(FKM(3, n_rounds=1), PRIVATE)
        with organisations.ledger("cy") as ledger:
            assert ledger.anchor() == before
    finally:
        policy.write_text(POLICY)
        organisations.kill("cy")
    assert set(model.client_names_) == set(NAMES) - {"cy"}
    assert "asks for epsilon 1, the policy allows 0.5 at most" in organisations.log("cy")


def test_unknown_keys_and_wrong_authorities_end_a_client(office, tmp_path):
    organisations = office.organisations
    stranger = Keys.create(tmp_path / "stranger", "stranger")
    other = Keys.create_server(tmp_path / "other", ["127.0.0.1"])
    place = organisations.folder / "ada"
    # As they were before ada has first used them: then they are for one authority only.
    keys_of_ada = shutil.copytree(
        organisations.parties.keys["ada"].folder,
        tmp_path / "ada",
        ignore=shutil.ignore_patterns(AUTHORITY),
    )
    found = {}
    for name, keys, certificate in (
        ("unknown key", stranger.folder, organisations.parties.certificate),
        ("wrong authority", keys_of_ada, other.folder / "ca.pem"),
    ):
        here = tmp_path / name
        here.mkdir()
        (here / "policy.toml").write_text(POLICY)
        (here / "client.toml").write_text(
            CLIENT.format(port=organisations.port, certificate=certificate, keys=keys).replace(
                'ledger = "ledger.sqlite"', ""
            )
        )
        options = ["--data", place / "data.csv", "--config", here / "client.toml"]
        found[name] = start(["client", *options], here / "log")
    assert {process.wait(60) for process in found.values()} == {10}
    assert "its key is not registered" in (tmp_path / "unknown key" / "log").read_text()
    assert "is not the server that" in (tmp_path / "wrong authority" / "log").read_text()


def test_what_is_changed_on_the_way_is_not_taken(office):
    from secure_fedclust.engines.flower_node import FlowerNode

    organisations, heard = office.organisations, []

    def connected():
        heard.append("connected")

    with meddling_proxy(organisations.port) as port:
        keys = organisations.parties.keys["ada"]
        node = FlowerNode(f"127.0.0.1:{port}", keys.node_key, organisations.parties.certificate)
        thread = threading.Thread(target=node.serve, args=(heard.append, connected), daemon=True)
        thread.start()
        time.sleep(1.5)
        node.stop()
        thread.join(20)
    assert heard == []
    with meddling_proxy(organisations.port, lambda data: data) as port:  # leaves all as it is
        node = FlowerNode(f"127.0.0.1:{port}", keys.node_key, organisations.parties.certificate)
        thread = threading.Thread(target=node.serve, args=(heard.append, connected), daemon=True)
        thread.start()
        until(lambda: heard)
        node.stop()
        thread.join(20)
    assert heard == ["connected"]


@contextlib.contextmanager
def meddling_proxy(port, meddle=lambda data: data[:-1] + bytes([data[-1] ^ 1])):
    """Changes a byte of whatever the server sends once the client's part of the handshake is over.

    A client that has sent something for the second time has all of the server's part.
    """
    over, threads = threading.Event(), []

    def carry(source, target, flights, change):
        while not over.is_set():
            try:
                data = source.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                break
            if not data:
                break
            if change and len(flights) > 1:
                data = meddle(data)
            elif not change:
                flights.append(len(data))
            with contextlib.suppress(OSError):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def pair(near):
        with near, socket.create_connection(("127.0.0.1", port)) as far:
            near.settimeout(0.1), far.settimeout(0.1)
            flights = []
            up = threading.Thread(target=carry, args=(near, far, flights, False))
            up.start()
            carry(far, near, flights, True)
            up.join()

    def serve(listening):
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                thread = threading.Thread(target=pair, args=(listening.accept()[0],))
                threads.append(thread)
                thread.start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.1)
        threads.append(threading.Thread(target=serve, args=(listening,)))
        threads[0].start()
        yield listening.getsockname()[1]
        over.set()
        for thread in threads:
            thread.join(10)


SERVER = """
algorithm = "FKM"
[parameters]
n_clusters = 3
n_rounds = 2
[privacy]
epsilon = 1.0
delta = 1e-5
ranges = [[-4, 4], [-4, 4]]
protection = "masking"
min_survivors = 3
[server]
address = "127.0.0.1:{port}"
keys = "{keys}"
clients = ["ada", "bob", "cy", "dee"]
timeout = 5
wait = 60
[data]
columns = ["x", "y"]
"""


def test_a_server_killed_and_started_again_aborts_cleanly(tmp_path):
    organisations = Organisations(tmp_path)
    config, out, log = tmp_path / "server.toml", tmp_path / "out", tmp_path / "server.log"
    config.write_text(
        SERVER.format(port=organisations.port, keys=organisations.parties.server.folder)
    )
    servers = []
    try:
        for name in NAMES:
            organisations.start(name)
        servers.append(start(["server", config, "--out", out], log))
        until(lambda: "masking/mask" in log.read_text())
        servers[0].kill()
        servers[0].wait(30)
        assert not (out / "result.json").exists()
        anchors = json.loads((tmp_path / "state" / "anchors.json").read_text())
        assert all(rows > 0 for rows, _ in anchors.values()) and set(anchors) <= set(NAMES)
        servers.append(start(["server", config, "--out", out], log))
        assert servers[1].wait(120) == 0, log.read_text()
    finally:
        organisations.close()
        for server in servers:
            server.kill() if server.poll() is None else None
    assert (out / "report.html").exists()
    runs = set()
    for name in NAMES:
        sent = Counter(re.findall(r"answered (masking/mask)", organisations.log(name)))
        with organisations.ledger(name) as ledger:
            ledger.verify()
            charges = [row.charge for row in ledger.rows()]
        assert len({(c.run, c.step) for c in charges}) == len(charges), "charged twice"
        # What was charged when the server was killed may not have been sent any more.
        assert sent["masking/mask"] <= len(charges) <= sent["masking/mask"] + 1
        runs |= {c.run for c in charges}
    assert len(runs) == 2


@pytest.mark.slow
def test_the_servers_command_ends_with_4_and_without_a_result_when_too_few_are_left(tmp_path):
    organisations = Organisations(tmp_path)
    config, out, log = tmp_path / "server.toml", tmp_path / "out", tmp_path / "server.log"
    config.write_text(
        SERVER.format(port=organisations.port, keys=organisations.parties.server.folder)
    )
    try:
        for name in NAMES:
            organisations.start(name)
        server = start(["server", config, "--out", out], log)
        until(lambda: "masking/share" in log.read_text())
        organisations.kill("ada")
        organisations.kill("bob")
        assert server.wait(120) == 4, log.read_text()
    finally:
        organisations.close()
    assert "of at least 3 (min_survivors)" in log.read_text()
    assert list(out.iterdir()) == []
    for name in NAMES:
        sent = organisations.log(name).count("answered masking/mask")
        with organisations.ledger(name) as ledger:
            ledger.verify()
            assert sent <= len(ledger.rows()) <= sent + 1


NETWORKS = """
algorithm = "FedCRef"
[parameters]
n_local_clusters = 3
hidden = [3, 2]
n_rounds = 2
max_iter = 2
start_epochs = 5
local_epochs = 2
theta = 1e6
alpha = 0.0
random_state = 0
[privacy]
none = "test"
[server]
address = "127.0.0.1:{port}"
keys = "{keys}"
clients = ["ada", "bob", "cy", "dee"]
timeout = 60
wait = 60
[data]
columns = ["x", "y"]
"""


@pytest.mark.slow
def test_a_run_with_a_checkpoint_goes_on_after_server_and_client_were_killed(tmp_path):
    pytest.importorskip("torch")
    results = []
    for attempt in ("whole", "killed"):
        folder = tmp_path / attempt
        folder.mkdir()
        organisations = Organisations(folder)
        config, out, log = folder / "server.toml", folder / "out", folder / "server.log"
        config.write_text(
            NETWORKS.format(port=organisations.port, keys=organisations.parties.server.folder)
        )
        words = ["server", config, "--out", out, "--checkpoint", folder / "kept"]
        servers = []
        try:
            for name in NAMES:
                organisations.start(name)
            servers.append(start(words, log))
            if attempt == "killed":
                until(lambda log=log: log.exists() and "step 3," in log.read_text())
                servers[0].kill()
                servers[0].wait(30)
                organisations.kill("bob")
                organisations.start("bob")
                servers.append(start(words, log))
            assert servers[-1].wait(120) == 0, log.read_text()
        finally:
            organisations.close()
            for server in servers:
                server.kill() if server.poll() is None else None
        results.append(json.loads((out / "result.json").read_text()))
    assert results[0]["centers"] == results[1]["centers"]
    assert results[0]["networks"] == results[1]["networks"]
