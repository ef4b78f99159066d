"""What a masked round takes over the network: real client processes, TLS, node authentication.

    python benchmarks/deployment.py [--rounds 10] [--quick] [--check]

Four clients are processes of their own, connected over loopback; the server is in this one. FKM
with masked sums runs over them, and then in one process. A round is one sum: four stages, each of
which needs one message to every client. To see what dominates, messages are sent as well that
clients answer without computing anything, and the server looks for the replies ten times a second,
as it does in a run, and a hundred times.
"""

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from _table import Bar, print_bars, print_table

from secure_fedclust import FKM, Ledger, PrivacySpec
from secure_fedclust.deployment.coordinator import end, enrol
from secure_fedclust.deployment.keys import Keys
from secure_fedclust.engines.flower import FlowerEngine
from secure_fedclust.engines.flower_link import SuperLink

NAMES = ("ada", "bob", "cy", "dee")
STAGES = 4
POLLS = (0.1, 0.01)
EMPTY_EXCHANGES = 20

# An offer of another version, which a client answers by naming its own.
HELLO = b'secure_fedclust greeting\n{"kind": "Offer", "protocol": 0, "version": "0.0"}'
COMMAND = [sys.executable, "-c", "from secure_fedclust.cli import main; raise SystemExit(main())"]
SPEC = PrivacySpec(
    epsilon=1.0, delta=1e-5, ranges=[(-4, 4)] * 2, protection="masking", min_survivors=3
)
POLICY = """
max_epsilon = 1.0
max_delta = 1e-4
protocols = ["FKM"]
protections = ["masking"]
min_cohort = 3
max_cohort = 4
"""
CLIENT = """
server = "127.0.0.1:{port}"
certificate = "{certificate}"
keys = "keys"
ledger = "ledger.sqlite"
policy = "policy.toml"
[data.ranges]
x = [-4, 4]
y = [-4, 4]
"""


class Timed:
    """An engine whose exchanges are timed."""

    def __init__(self, engine: FlowerEngine) -> None:
        self.engine, self.seconds = engine, list[float]()
        self.clients = engine.clients

    def exchange(self, requests: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """Pass on, and note how long it took."""
        start = time.perf_counter()
        yield from self.engine.exchange(requests)
        self.seconds.append(time.perf_counter() - start)


def records(place: int) -> np.ndarray:
    rng = np.random.default_rng(place)
    return np.clip(rng.normal(rng.choice([-2.0, 2.0], (1000, 2)), 0.3), -4, 4)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    options = parser.parse_args(arguments)
    n_rounds = 2 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        timed, empty, sums, messages = over_network(Path(folder), n_rounds, stack)
    here = in_process(n_rounds)
    each = sum(timed) / sums
    rows = [
        ["one masked round (4 stages), mean", f"{each:.2f} s", f"{1000 * here:.1f} ms"],
        ["one exchange, median", _ms(timed), ""],
        *(
            [f"one with nothing to compute, looking every {poll:g} s", _ms(seconds), ""]
            for poll, seconds in empty.items()
        ),
        ["messages a round and client", f"{messages / sums / len(NAMES):.2f}", ""],
        ["of a round, not computing", f"{100 * (1 - here / each):.0f}%", ""],
    ]
    print_table("FKM with masking, 4 clients", ["what", "over Flower", "in one process"], rows)
    bars = [
        Bar("messages for what stages need", messages / (sums * STAGES * len(NAMES)), at_most=1.5),
        Bar("seconds of a masked round", each, at_most=30.0),
    ]
    return 1 if not print_bars(bars) and options.check else 0


def _ms(seconds: Sequence[float]) -> str:
    return f"{1000 * statistics.median(seconds):.0f} ms"


def over_network(
    folder: Path, n_rounds: int, stack: ExitStack
) -> tuple[list[float], dict[float, list[float]], int, int]:
    """Seconds of each exchange of a run, and of empty ones; sums opened, and messages sent."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = Keys.create_server(folder / "server", ["127.0.0.1"])
    link = SuperLink(
        "127.0.0.1",
        port,
        certificate=server.folder / "server.pem",
        key=server.folder / "server.key",
    )
    nodes = {}
    for place, name in enumerate(NAMES):
        keys = Keys.create(folder / name / "keys", name)
        nodes[name] = link.register(keys.card.node_key())
        prepare(folder / name, place, port, server.folder / "ca.pem")
    stack.enter_context(link)
    for name in NAMES:
        place = folder / name
        words = ["client", "--data", place / "data.npz", "--config", place / "client.toml"]
        process = subprocess.Popen(
            [*COMMAND, *map(str, words), "--once", "--quiet"], stderr=subprocess.DEVNULL
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
    grid = link.grid()
    while set(grid.get_node_ids()) != set(nodes.values()):
        time.sleep(0.1)
    empty = {}
    for poll in POLLS:
        engine = Timed(FlowerEngine(grid, nodes, timeout=60.0, poll=poll))
        for _ in range(EMPTY_EXCHANGES):
            list(engine.exchange(dict.fromkeys(NAMES, HELLO)))
        empty[poll] = engine.seconds
    engine = Timed(FlowerEngine(grid, nodes, timeout=60.0, poll=POLLS[0]))
    model = FKM(4, n_rounds=n_rounds, privacy=SPEC, random_state=0)
    federation = enrol(engine, model, run="benchmark", columns=["x", "y"])
    before, engine.seconds = engine.engine.messages, []
    model.fit(federation)
    messages, seconds = engine.engine.messages - before, list(engine.seconds)
    end(federation, model)
    return seconds, empty, len(model.result_.sums), messages


def prepare(folder: Path, place: int, port: int, certificate: Path) -> None:
    X = records(place)
    np.savez(folder / "data.npz", x=X[:, 0], y=X[:, 1])
    (folder / "policy.toml").write_text(POLICY)
    (folder / "client.toml").write_text(CLIENT.format(port=port, certificate=certificate))
    Ledger.create(
        folder / "ledger.sqlite", epsilon=2.0, delta=1e-5, unit="record", adjacency="add_remove"
    ).close()


def in_process(n_rounds: int) -> float:
    """Seconds of a masked round with all clients in this process, their ledger in a file."""
    clients = {name: records(place) for place, name in enumerate(NAMES)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ledger.sqlite")
        Ledger.create(path, epsilon=2.0, delta=1e-5, unit="record", adjacency="add_remove").close()
        model = FKM(4, n_rounds=n_rounds, privacy=SPEC, random_state=0, ledger=str(path))
        start = time.perf_counter()
        model.fit(clients)
        return (time.perf_counter() - start) / len(model.result_.sums)


if __name__ == "__main__":
    sys.exit(main())
