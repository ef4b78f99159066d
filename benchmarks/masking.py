"""What secure aggregation by masking takes: against Flower's SecAgg+, bare AES, and as it grows.

    python benchmarks/masking.py [--repeats 3] [--quick] [--check]

One round sums the vectors of all clients so that the server learns the sum alone. Ours is the whole
round in one process, keys, shares and encoded messages included: everybody shares with everybody,
from 100 clients on each with some neighbours, two thirds of the clients and one more must be in the
sum, and nobody drops out. Every sum is compared with the plain one: a round that stopped half-way
would look fast. Times that are compared are taken in turns, and medians are compared.

Flower is the extra "flower", and its simulation needs ``pip install flwr[simulation]``; what is not
installed is left out, with its bars. At 50 clients a round of Flower's takes over half a minute
where everybody shares with everybody; with it all takes about seven minutes on two cores.
"""

import argparse
import gc
import importlib.util
import logging
import math
import os
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from _table import Bar, in_turns, print_bars, print_table
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from secure_fedclust import PrivacySpec
from secure_fedclust.arrays import Ints
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.messages import Bounds, Envelope, Stage, Values
from secure_fedclust.privacy.graph import Graph
from secure_fedclust.privacy.masks import KEY_BYTES, add_masks
from secure_fedclust.privacy.release import ExactSums
from secure_fedclust.privacy.secure_sum import Contribution, Question, Summand
from secure_fedclust.protocols.client import PrivateClient
from secure_fedclust.protocols.session import Session
from secure_fedclust.protocols.sums import ends_for, server_end
from secure_fedclust.result import Exchange

MODULUS = 2**32
VALUES_BELOW = 2**20

FLOWER_CLIENTS = (10, 50)
FLOWER_VALUES = 1_000
SPARSE = ((15, 10), (3, 2))
"""Shares of a secret and how many restore it, where clients have few neighbours."""

MANY_SHARES = 15
"""Flower's fastest round counts with at least so many: two neighbours are soon both colluders."""

FASTER_AT_LEAST = 10
MASKING_AT_MOST = 1.5
ROUND_SECONDS = 10
EXPONENT_AT_MOST = 1.5

# Flower and ray read some of these when they are imported, so they are set before that. The last
# keeps ray on the loopback, on any system; without it, it listens on every interface.
os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

Row = tuple[str, ...]
Part = tuple[str, tuple[str, ...], list[Row], list[Bar]]


def vectors(n_clients: int, n_values: int) -> list[Ints]:
    """What the clients put in: whole numbers, so that sums compare exactly."""
    rng = np.random.default_rng(0)
    return list(rng.integers(0, VALUES_BELOW, (n_clients, n_values)))


def threshold(n_clients: int) -> int:
    """How many shares restore a secret: the least above two thirds."""
    return 2 * n_clients // 3 + 1


def plain_sum(inputs: Sequence[Ints]) -> Ints:
    """What the server would do if it could see all vectors."""
    total = np.zeros_like(inputs[0])
    for vector in inputs:
        total += vector
    return total


class Holder(PrivateClient):
    """Puts a given vector into the sum, without noise or ledger; keeps what it has sent."""

    def __init__(self, vector: Ints, spec: PrivacySpec, summand: Summand | None) -> None:
        rng = np.random.default_rng(0)
        super().__init__(np.zeros((0, 1)), spec, rng, ExactSums(spec), summand)
        self.vector = vector
        self.replies: list[bytes] = []

    def _contribute(
        self, question: bytes, n_clients: int, *, run: str, number: int | None
    ) -> Contribution:
        return Contribution(self.vector, VALUES_BELOW, self._anchor())

    def _keep(self, envelope: Envelope, request: bytes, reply: bytes) -> None:
        self.replies.append(reply)


def our_spec(n_clients: int) -> PrivacySpec:
    """Masking and no noise."""
    return PrivacySpec.none(
        reason="benchmark",
        protection="masking",
        colluders=1,
        min_survivors=threshold(n_clients),
    )


def our_clients(inputs: Sequence[Ints], spec: PrivacySpec | None = None) -> dict[str, Holder]:
    """A client for each vector."""
    spec = spec or our_spec(len(inputs))
    ends = ends_for(spec, [f"client {i}" for i in range(len(inputs))]).clients
    pairs = zip(ends.items(), inputs, strict=True)
    return {name: Holder(vector, spec, end) for (name, end), vector in pairs}


def our_round(
    inputs: Sequence[Ints],
    handlers: Mapping[str, Callable[[bytes], bytes]] | None = None,
    run: str | None = None,
) -> Session:
    """One round of ours, with new clients unless handlers are given; checks the sum."""
    if handlers is None:
        handlers = {name: client.handle for name, client in our_clients(inputs).items()}
    session = Session(InProcessEngine(handlers), our_spec(len(inputs)), n_features=1)
    session.run = run or session.run
    np.testing.assert_array_equal(opened(session, len(inputs[0])), plain_sum(inputs))
    return session


def opened(session: Session, n_values: int) -> Ints:
    """The sum of what the clients of a session hold, as its spec says."""

    def ask(
        stage: Stage,
        requests: Mapping[str, Values],
        bounds: Bounds,
        read: Callable[[str, Values], Any] | None = None,
    ) -> dict[str, Any]:
        return session.ask(stage, requests, dict.fromkeys(requests, bounds), read)

    question = Question(
        session.run,
        0,
        b"benchmark",
        n_values,
        reach=lambda n: VALUES_BELOW,
        largest=lambda n: n * VALUES_BELOW,
    )
    return server_end(session.spec).total(ask, session.clients, question).steps


def flower_functions(inputs: Sequence[Ints], shares: int, needed: int) -> None:
    """The work of all parties, with Flower's functions called one after the other in one process.

    As in its client and its workflow: two key pairs a client, shares of the private mask's seed and
    of the first private key, encrypted for each of the others; masks from both ends of every pair;
    the server restores each seed. Left out are its messages, its state between them and its
    quantisation. In its favour, a client's own private keys are not read from text again for each
    neighbour, and the server combines only as many shares as it needs. With fewer shares than
    clients, neighbours are those next on a ring.
    """
    from flwr.common.secure_aggregation import ndarrays_arithmetic as arithmetic
    from flwr.common.secure_aggregation.crypto import shamir, symmetric_encryption
    from flwr.common.secure_aggregation.secaggplus_utils import (
        pseudo_rand_gen,
        share_keys_plaintext_concat,
        share_keys_plaintext_separate,
    )
    from flwr.supercore.primitives import asymmetric

    clients = range(len(inputs))
    shapes = [inputs[0].shape]
    ring = range(-(shares // 2), shares - shares // 2)
    near = [sorted((i + step) % len(inputs) for step in ring) for i in clients]

    mask_keys, box_keys = ([asymmetric.generate_key_pairs() for _ in clients] for _ in range(2))
    mask_public, box_public = (
        [asymmetric.public_key_to_bytes(public) for _, public in keys]
        for keys in (mask_keys, box_keys)
    )

    def shared_key(private: object, public: bytes) -> bytes:
        return symmetric_encryption.generate_shared_key(
            private, asymmetric.bytes_to_public_key(public)
        )

    seeds = [os.urandom(32) for _ in clients]
    boxes: dict[tuple[int, int], bytes] = {}
    box_shared: dict[tuple[int, int], bytes] = {}
    held: list[dict[int, bytes]] = [{} for _ in clients]
    for i in clients:
        of_seed = shamir.create_shares(seeds[i], needed, shares)
        secret = asymmetric.private_key_to_bytes(mask_keys[i][0])
        of_key = shamir.create_shares(secret, needed, shares)
        for j, seed_share, key_share in zip(near[i], of_seed, of_key, strict=True):
            if i == j:
                held[i][i] = seed_share
            else:
                key = box_shared[i, j] = shared_key(box_keys[i][0], box_public[j])
                plain = share_keys_plaintext_concat(i, j, seed_share, key_share)
                boxes[i, j] = symmetric_encryption.encrypt(key, plain)

    masked = []
    for i in clients:
        vector = [inputs[i]]
        for j in near[i]:
            if i != j:
                plain = symmetric_encryption.decrypt(box_shared[i, j], boxes[j, i])
                _, _, held[i][j], _ = share_keys_plaintext_separate(plain)
        vector = arithmetic.parameters_addition(vector, pseudo_rand_gen(seeds[i], MODULUS, shapes))
        for j in near[i]:
            if i != j:
                key = shared_key(mask_keys[i][0], mask_public[j])
                mask = pseudo_rand_gen(key, MODULUS, shapes)
                if i > j:
                    vector = arithmetic.parameters_addition(vector, mask)
                else:
                    vector = arithmetic.parameters_subtraction(vector, mask)
        masked.append(arithmetic.parameters_mod(vector, MODULUS))

    total = masked[0]
    for vector in masked[1:]:
        total = arithmetic.parameters_addition(total, vector)
    for i in clients:
        seed = shamir.combine_shares([held[j][i] for j in near[i][:needed]])
        total = arithmetic.parameters_subtraction(total, pseudo_rand_gen(seed, MODULUS, shapes))
    [found] = arithmetic.parameters_mod(total, MODULUS)
    np.testing.assert_array_equal(found, plain_sum(inputs))


def flower_simulation(
    inputs: Sequence[Ints],
    shares: int,
    needed: int,
    title: str,
    repeats: int,
    *jobs: Callable[[], object],
) -> list[float]:
    """Median seconds of each job, and of a round of Flower's SecAgg+ workflow simulated on ray.

    They take turns inside Flower's server: ray's start, the registration of the nodes and a first
    round, in which ray's workers import Flower, are not counted. What is: four stages of messages
    to and from all clients, quantisation, and the waits of the server, which looks for answers
    every tenth of a second. Training is a look-up of the vector. As many clients work at a time as
    there are cores; the other jobs have one process.
    """
    from flwr.app import ArrayRecord, Context
    from flwr.client import Client, NumPyClient
    from flwr.client.mod import secaggplus_mod
    from flwr.clientapp import ClientApp
    from flwr.common import ndarrays_to_parameters
    from flwr.server import LegacyContext, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
    from flwr.server.workflow.constant import MAIN_PARAMS_RECORD
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    n_clients = len(inputs)
    scaled = [vector / VALUES_BELOW for vector in inputs]
    expected = np.mean(scaled, axis=0)
    medians: list[float] = []

    class Owner(NumPyClient):
        def __init__(self, vector: np.ndarray) -> None:
            self.vector = vector

        def fit(self, parameters: object, config: object) -> tuple[list[np.ndarray], int, dict]:
            return [self.vector], 1, {}

    def client(context: Context) -> Client:
        return Owner(scaled[int(context.node_config["partition-id"])]).to_client()

    client_app = ClientApp(client_fn=client, mods=[secaggplus_mod])
    server_app = ServerApp()
    secure = SecAggPlusWorkflow(shares, needed, max_weight=1.0)

    def fit(grid: Grid, context: LegacyContext) -> None:
        def one_round() -> None:
            # A round that stops half-way leaves the parameters as they were, and says nothing.
            context.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord([np.zeros_like(expected)])
            secure(grid, context)
            [mean] = context.state.array_records[MAIN_PARAMS_RECORD].to_numpy_ndarrays()
            # Quantisation rounds each value to 16 / 2**22.
            np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-5)

        one_round()
        medians.extend(in_turns(title, repeats, *jobs, one_round))

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_evaluate=0.0,
            min_fit_clients=n_clients,
            min_available_clients=n_clients,
            initial_parameters=ndarrays_to_parameters([np.zeros_like(expected)]),
        )
        config = ServerConfig(num_rounds=1)
        legacy = LegacyContext(context=context, config=config, strategy=strategy)
        DefaultWorkflow(fit_workflow=fit)(grid, legacy)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["FLWR_HOME"] = folder
        run_simulation(
            server_app,
            client_app,
            num_supernodes=n_clients,
            backend_config={"client_resources": {"num_cpus": 1}},
        )
    return medians


def against_flower(clients: Sequence[int], repeats: int, flower: bool = True) -> Part:
    """A round of ours against Flower's: the same graph, and for the most clients sparser ones."""
    no_functions, no_simulation = missing("flwr"), missing("flwr", "ray")
    if not flower:
        no_functions = no_simulation = ["flower"]
    for what, packages in (("functions", no_functions), ("simulation", no_simulation)):
        if packages and flower:
            names = " and ".join(packages)
            print(f"Flower's {what} left out: {names} not installed", file=sys.stderr)
    rows: list[Row] = []
    bars: list[Bar] = []
    for n_clients in clients:
        inputs = vectors(n_clients, FLOWER_VALUES)
        mine = {"plain sum": partial(plain_sum, inputs), "ours": partial(our_round, inputs)}
        sparse = SPARSE if n_clients == max(clients) and not no_functions else ()
        faster: dict[int, float] = {}
        for shares, needed in ((n_clients, threshold(n_clients)), *sparse):
            what = f"{n_clients} x {FLOWER_VALUES:,}"
            jobs = dict(mine)
            if not no_functions:
                what += f", Flower with {shares} shares"
                flower_functions(inputs[:4], 4, 3)  # The first call imports Flower.
                jobs["Flower's functions"] = partial(flower_functions, inputs, shares, needed)
            if no_simulation:
                medians = in_turns(what, repeats, *jobs.values())
            else:
                medians = flower_simulation(inputs, shares, needed, what, repeats, *jobs.values())
            names = [*jobs, *([] if no_simulation else ["Flower's simulation"])]
            taken = dict(zip(names, medians, strict=True))
            over = {name: seconds / taken["ours"] for name, seconds in taken.items()}
            rows += [(what, name, in_units(taken[name]), f"{over[name]:.3g}") for name in taken]
            if "Flower's simulation" in over:
                faster[shares] = over["Flower's simulation"]
            if "Flower's functions" in over and shares == n_clients == max(clients):
                times = over["Flower's functions"]
                bars.append(Bar(f"Flower's functions over ours, {what}", times, at_least=1))
        if faster and n_clients == max(clients):
            fastest = min((shares for shares in faster if shares >= MANY_SHARES), key=faster.get)
            for shares in sorted({fastest, n_clients}):
                what = f"{n_clients} x {FLOWER_VALUES:,}, Flower with {shares} shares"
                name = f"Flower's simulation over ours, {what}"
                bars.append(Bar(name, faster[shares], at_least=FASTER_AT_LEAST))
    header = ("what", "how", "median time", "over ours")
    return "A round, all parties", header, rows, bars


def against_aes(n_clients: int, n_values: int, repeats: int) -> Part:
    """All clients' masks, keys given: bare expansions, and ours, which are added up too."""
    keys = [[os.urandom(KEY_BYTES) for _ in range(n_clients)] for _ in range(n_clients)]
    signed = [[(key, (-1) ** i) for i, key in enumerate(each)] for each in keys]
    zeros, room = bytes(8 * n_values), bytearray(8 * n_values + 16)
    vector = np.zeros(n_values, dtype=np.uint64)

    def bare() -> None:
        for each in keys:
            for key in each:
                stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
                stream.update_into(zeros, room)

    def ours() -> None:
        for each in signed:
            add_masks(vector, each)

    what = f"{n_clients} clients, {n_clients} masks each of {n_values:,}"
    aes, masks = in_turns(what, 3 * repeats, bare, ours)
    rows: list[Row] = [
        (what, "bare AES-256-CTR", in_units(aes), ""),
        (what, "ours", in_units(masks), f"{masks / aes:.2f}"),
    ]
    bar = Bar(f"masks over bare AES, {what}", masks / aes, at_most=MASKING_AT_MOST)
    return "Masks alone", ("what", "how", "median time", "ratio"), rows, [bar]


def growth(sizes: Sequence[tuple[int, int]], repeats: int) -> Part:
    """A round of ours by clients and values: all parties, each stage, and the bytes of a client.

    What the stages do not add up to is the server's opening of the sum.
    """
    rows: list[Row] = []
    bars: list[Bar] = []
    for n_clients, n_values in sizes:
        inputs = vectors(n_clients, n_values)
        what = f"{n_clients} x {n_values:,}"
        rounds: list[list[Exchange]] = []
        [seconds] = in_turns(
            what, repeats, lambda kept=rounds, given=inputs: kept.append(our_round(given).history)
        )
        stages = np.median([[stage.seconds for stage in each] for each in rounds], axis=0)
        up = sum(stage.bytes_up for stage in rounds[0]) / n_clients
        down = sum(stage.bytes_down for stage in rounds[0]) / n_clients
        times = [in_units(each) for each in (seconds, *stages)]
        sent = [f"{each / 1e3:,.1f} kB" for each in (up, down)]
        rows.append((f"{n_values:,}", str(n_clients), *times, *sent))
        if (n_clients, n_values) == max(sizes):
            bars = [Bar(f"seconds of a round, {what}", seconds, at_most=ROUND_SECONDS)]
    header = ("values", "clients", "all", "advertise", "share", "mask", "unmask", "up", "down")
    return "Growth of a round", header, rows, bars


def server_memory(clients: Sequence[int], n_values: int) -> Part:
    """Most bytes that the server's side holds at a time.

    It gets, encoded, what the clients of an honest round have sent; their work is over by then, and
    only allocations from there on are counted: replies as received and as decoded, requests, and
    the sum. Masked vectors are added up one by one as they come. Everybody's keys are 64 bytes a
    client, shown to all up to 99 clients and held once then. For each pair there are encrypted
    shares of keys, 144 bytes that go up and down again, held twice when the vectors come, and the
    shares that open the sum, 64 bytes: on a complete graph that is quadratic in the clients. From
    100 clients on each has some neighbours only. The exponent is taken from a quarter of the most
    clients to the most.
    """
    rows: list[Row] = []
    peaks = []
    for n_clients in clients:
        inputs = vectors(n_clients, n_values)
        holders = our_clients(inputs)
        # What was sent fits the places that clients had when they sent it.
        with mock.patch.object(Graph, "order", lambda graph: list(range(graph.n_clients))):
            run = our_round(inputs, {name: each.handle for name, each in holders.items()}).run
            replies = {name: each.replies for name, each in holders.items()}
            del holders
            gc.collect()
            tracemalloc.start()
            our_round(inputs, {name: again(each) for name, each in replies.items()}, run)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        vectors_alone = 8 * n_values * n_clients
        rows.append(
            (
                f"{n_values:,}",
                str(n_clients),
                f"{peaks[-1] / 1e6:.1f} MB",
                f"{peaks[-1] / n_clients / 1e3:.0f} kB",
                f"{peaks[-1] / vectors_alone:.2f}",
            )
        )
    few, most = clients[-1] // 4, clients[-1]
    exponent = math.log(peaks[-1] / peaks[clients.index(few)], 4)
    what = f"exponent of the server's memory, {few} to {most} x {n_values:,}"
    header = ("values", "clients", "peak", "a client", "over the vectors")
    bar = Bar(what, exponent, at_most=EXPONENT_AT_MOST)
    return "Memory of the server", header, rows, [bar]


def again(replies: Sequence[bytes]) -> Callable[[bytes], bytes]:
    """A handler that gives copies of earlier replies, one after the other."""
    copies = (bytes(memoryview(reply)) for reply in replies)
    return lambda request: next(copies)


def missing(*packages: str) -> list[str]:
    """Which of the packages are not installed."""
    return [package for package in packages if importlib.util.find_spec(package) is None]


def in_units(seconds: float) -> str:
    """Seconds, milliseconds or microseconds."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; 1 if a bar is missed under --check."""
    parser = argparse.ArgumentParser(description="What a round of secure aggregation takes.")
    parser.add_argument("--repeats", type=int, default=3, help="how often to measure (default 3)")
    parser.add_argument("--quick", action="store_true", help="small sizes, without Flower")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is not met")
    given = parser.parse_args(arguments)
    if given.repeats < 1:
        parser.error(f"--repeats {given.repeats}: at least 1")
    if given.quick:
        parts = [
            against_flower((10,), given.repeats, flower=False),
            against_aes(20, 10_000, given.repeats),
            growth([(10, 1_000), (20, 1_000), (10, 10_000)], given.repeats),
            server_memory((10, 40), 10_000),
        ]
    else:
        by_clients = [(n, values) for values in (1_000, 10_000) for n in (10, 20, 50, 100, 200)]
        parts = [
            against_flower(FLOWER_CLIENTS, given.repeats),
            against_aes(100, 10_000, given.repeats),
            growth([*by_clients, (10, 100_000), (10, 1_000_000)], given.repeats),
            server_memory((25, 50, 100, 200), 10_000),
        ]
    for title, header, rows, _ in parts:
        print_table(title, header, rows)
    all_met = print_bars([bar for *_, bars in parts for bar in bars])
    return 1 if given.check and not all_met else 0


if __name__ == "__main__":
    sys.exit(main())
