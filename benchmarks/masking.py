"""What a round of secure aggregation takes in Flower's SecAgg+.

    python benchmarks/masking.py [--clients 10 50] [--values 1000] [--repeats 3]

One round sums the vectors of all clients so that the server learns the sum alone. The graph is
complete, every secret is shared among all clients, two thirds of them and one more can restore it,
and nobody drops out. Every sum is compared with the plain one: a round that stopped half-way would
look fast. Flower is the extra "flower", and its simulation needs ``pip install flwr[simulation]``;
what is not installed is left out. At 50 clients a round of Flower's takes over half a minute.
"""

import argparse
import importlib.util
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np
from _table import print_table
from tqdm import tqdm

from secure_fedclust.arrays import Ints

HEADER = ("what", "how", "median time", "range")
MODULUS = 2**32
VALUES_BELOW = 2**20

# Flower and ray read some of these when they are imported, so they are set before that. The last
# keeps ray on the loopback, on any system; without it, it listens on every interface.
os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

Row = tuple[str, str, str, str]


def vectors(n_clients: int, n_values: int) -> list[Ints]:
    """What the clients put in: whole numbers, so that sums compare exactly."""
    rng = np.random.default_rng(0)
    return list(rng.integers(0, VALUES_BELOW, (n_clients, n_values)))


def threshold(n_clients: int) -> int:
    """How many shares restore a secret: the least above two thirds."""
    return 2 * n_clients // 3 + 1


def flower_functions(inputs: Sequence[Ints]) -> Ints:
    """The work of all parties, with Flower's functions called one after the other in one process.

    As in its client and its workflow: two key pairs a client, shares of the private mask's seed and
    of the first private key, encrypted for each of the others; masks from both ends of every pair;
    the server restores each seed. Left out are its messages, its state between them and its
    quantisation. In its favour, a client's own private keys are not read from text again for each
    neighbour, and the server combines only as many shares as it needs.
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
    needed = threshold(len(inputs))
    shapes = [inputs[0].shape]

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
        of_seed = shamir.create_shares(seeds[i], needed, len(clients))
        secret = asymmetric.private_key_to_bytes(mask_keys[i][0])
        of_key = shamir.create_shares(secret, needed, len(clients))
        held[i][i] = of_seed[i]
        for j in clients:
            if i != j:
                key = box_shared[i, j] = shared_key(box_keys[i][0], box_public[j])
                plain = share_keys_plaintext_concat(i, j, of_seed[j], of_key[j])
                boxes[i, j] = symmetric_encryption.encrypt(key, plain)

    masked = []
    for i in clients:
        vector = [inputs[i]]
        for j in clients:
            if i != j:
                plain = symmetric_encryption.decrypt(box_shared[i, j], boxes[j, i])
                _, _, held[i][j], _ = share_keys_plaintext_separate(plain)
        vector = arithmetic.parameters_addition(vector, pseudo_rand_gen(seeds[i], MODULUS, shapes))
        for j in clients:
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
        seed = shamir.combine_shares([held[j][i] for j in clients[:needed]])
        total = arithmetic.parameters_subtraction(total, pseudo_rand_gen(seed, MODULUS, shapes))
    return arithmetic.parameters_mod(total, MODULUS)[0]


def flower_simulation(inputs: Sequence[Ints], n_rounds: int) -> list[float]:
    """Seconds of each round of Flower's SecAgg+ workflow, in its simulation on ray.

    The clock runs around the workflow of a round, inside the server: ray's start, the registration
    of the nodes and a first round, in which ray's workers import Flower, are not counted. What is:
    four stages of messages to and from all clients, quantisation, and the waits of the server,
    which looks for answers every tenth of a second. Training is a look-up of the vector.
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
    seconds: list[float] = []

    class Holder(NumPyClient):
        def __init__(self, vector: np.ndarray) -> None:
            self.vector = vector

        def fit(self, parameters: object, config: object) -> tuple[list[np.ndarray], int, dict]:
            return [self.vector], 1, {}

    def client(context: Context) -> Client:
        return Holder(scaled[int(context.node_config["partition-id"])]).to_client()

    client_app = ClientApp(client_fn=client, mods=[secaggplus_mod])
    server_app = ServerApp()
    secure = SecAggPlusWorkflow(n_clients, threshold(n_clients), max_weight=1.0)

    def timed(grid: Grid, context: LegacyContext) -> None:
        # A round that stops half-way leaves the parameters as they were, and says nothing.
        context.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord([np.zeros_like(expected)])
        start = time.perf_counter()
        secure(grid, context)
        seconds.append(time.perf_counter() - start)
        [mean] = context.state.array_records[MAIN_PARAMS_RECORD].to_numpy_ndarrays()
        # Quantisation rounds each value to 16 / 2**22.
        np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-5)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_evaluate=0.0,
            min_fit_clients=n_clients,
            min_available_clients=n_clients,
            initial_parameters=ndarrays_to_parameters([np.zeros_like(expected)]),
        )
        config = ServerConfig(num_rounds=1 + n_rounds)
        legacy = LegacyContext(context=context, config=config, strategy=strategy)
        DefaultWorkflow(fit_workflow=timed)(grid, legacy)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["FLWR_HOME"] = folder
        run_simulation(
            server_app,
            client_app,
            num_supernodes=n_clients,
            backend_config={"client_resources": {"num_cpus": 1}},
        )
    return seconds[1:]


def missing(*packages: str) -> list[str]:
    """Which of the packages are not installed."""
    return [package for package in packages if importlib.util.find_spec(package) is None]


def main(arguments: list[str] | None = None) -> int:
    """Print the times."""
    parser = argparse.ArgumentParser(description="Time of a round of secure aggregation.")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 50], help="how many")
    parser.add_argument("--values", type=int, default=1000, help="of each client (default 1000)")
    parser.add_argument("--repeats", type=int, default=3, help="how often to measure (default 3)")
    given = parser.parse_args(arguments)
    if given.repeats < 1 or given.values < 1 or min(given.clients) < 4:
        parser.error("give at least 1 repeat, 1 value and 4 clients")
    no_functions, no_simulation = missing("flwr"), missing("flwr", "ray")
    if no_functions:
        print("Flower's functions are left out: flwr is not installed", file=sys.stderr)
    if no_simulation:
        names = " and ".join(no_simulation)
        print(f"Flower's simulation is left out: {names} not installed", file=sys.stderr)
    rows: list[Row] = []
    for n_clients in given.clients:
        inputs = vectors(n_clients, given.values)
        what = f"{n_clients} clients x {given.values:,} values"
        if not no_functions:
            # The first call imports Flower; it is not timed.
            np.testing.assert_array_equal(flower_functions(inputs[:4]), sum(inputs[:4]))
            seconds = []
            for _ in tqdm(range(given.repeats), what, file=sys.stderr):
                start = time.perf_counter()
                total = flower_functions(inputs)
                seconds.append(time.perf_counter() - start)
                np.testing.assert_array_equal(total, sum(inputs))
            rows.append(row(what, "Flower's functions, one process", seconds))
        if not no_simulation:
            seconds = flower_simulation(inputs, given.repeats)
            rows.append(row(what, "Flower's simulation", seconds))
    if rows:
        print_table("Secure aggregation, one round", HEADER, rows)
    return 0


def row(what: str, how: str, seconds: Sequence[float]) -> Row:
    """A line of the table."""
    spread = f"{min(seconds):.2f} s to {max(seconds):.2f} s"
    return what, how, f"{statistics.median(seconds):.2f} s", spread


if __name__ == "__main__":
    sys.exit(main())
