"""What large federations take: ten thousand clients in one process, and what each of them costs.

    python benchmarks/scale.py [--part kfed,fkm,masked] [--quick] [--check]

Every row is measured in a process of its own, and its memory is the most that this process had at a
time. All clients are in it, one after the other, so that seconds are those of everybody's work.

- `kfed`: 10,000 clients, k-FED with noise: a summary of each client, and one sum over all under
  masks. Noise is from the system's randomness, and once more, so labelled, from numpy's.
- `fkm`: 1,000 clients, FKM: every round is a sum under masks.
- `masked`: one sum of 10,000 numbers over 1,000 clients without noise, on the sparse graph that so
  many clients have, with and without dropouts; and on the complete graph, from fewer clients.

One client in a hundred may collude (in `masked` one in twenty), and one in ten drop out. A client
has 200 records of three of eight clusters, in four dimensions. On two cores all takes about six
minutes.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import numpy as np
from _parts import Part, print_parts
from _table import Bar
from masking import opened, our_clients, plain_sum, server_memory, vectors
from tqdm import tqdm

import secure_fedclust.run
from secure_fedclust import FKM, KFed, PrivacySpec
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.engines.inprocess import Fault, Handler
from secure_fedclust.privacy import graph
from secure_fedclust.privacy.cohort import Rules
from secure_fedclust.protocols.session import Session
from secure_fedclust.result import Exchange

FEATURES, CLUSTERS, HELD, RECORDS = 4, 8, 3, 200
EPSILON, DELTA = 4.0, 1e-6

KFED_CLIENTS, KFED_SECONDS, KFED_GIGABYTES = 10_000, 300.0, 4.0
FKM_CLIENTS = 1_000
MASKED_CLIENTS, MASKED_VALUES, MASKED_SECONDS = 1_000, 10_000, 30.0
COMPLETE_CLIENTS = (200, 400)

MASK_EXCHANGE = 2
"""The exchange in which clients send their vectors, counted from 0."""

Job = Callable[[int], dict[str, Any]]


class TimedEngine(InProcessEngine):
    """Knows what each exchange took, and how much of it clients, in seconds of the processor."""

    exchanges: ClassVar[list[float]]
    clients_own: ClassVar[list[float]]

    def __init__(self, handlers: Mapping[str, Handler], **more: Any) -> None:
        super().__init__({name: self._timed(each) for name, each in handlers.items()}, **more)
        TimedEngine.exchanges, TimedEngine.clients_own = [], []

    def exchange(self, requests: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """See `InProcessEngine`."""
        self.clients_own.append(0.0)
        started = time.process_time()
        yield from super().exchange(requests)
        self.exchanges.append(time.process_time() - started)

    def _timed(self, handle: Handler) -> Handler:
        def timed(request: bytes) -> bytes:
            started = time.process_time()
            try:
                return handle(request)
            finally:
                self.clients_own[-1] += time.process_time() - started

        return timed


def private_spec(n_clients: int) -> PrivacySpec:
    """Noise, masks, and what may go wrong."""
    return PrivacySpec(
        epsilon=EPSILON,
        delta=DELTA,
        ranges=[(-1.0, 1.0)] * FEATURES,
        protection="masking",
        colluders=max(1, n_clients // 100),
        min_survivors=n_clients - n_clients // 10,
        public_size=RECORDS,
    )


def masked_spec(n_clients: int) -> PrivacySpec:
    """Masks without noise."""
    return PrivacySpec.none(
        reason="benchmark",
        protection="masking",
        colluders=max(1, n_clients // 20),
        min_survivors=n_clients - n_clients // 10,
    )


def records(n_clients: int) -> tuple[list[Floats], Floats]:
    """Each client's records, of some of the clusters, and where those are."""
    rng = np.random.default_rng(0)
    centers = rng.uniform(-0.8, 0.8, (CLUSTERS, FEATURES))
    clients = []
    for _ in range(n_clients):
        held = rng.choice(CLUSTERS, HELD, replace=False)
        points = centers[rng.choice(held, RECORDS)] + 0.05 * rng.normal(size=(RECORDS, FEATURES))
        clients.append(np.clip(points, -1, 1))
    return clients, centers


def fit(make: Callable[..., Any], sampler: str, n_clients: int) -> dict[str, Any]:
    """One run of a system over so many clients."""
    clients, centers = records(n_clients)
    model = make(CLUSTERS, privacy=private_spec(n_clients), sampler=sampler, random_state=0)
    with mock.patch.object(secure_fedclust.run, "InProcessEngine", TimedEngine):
        measured = _measured(lambda: model.fit(clients))
    apart = np.linalg.norm(model.cluster_centers_[:, None] - centers, axis=2).min(axis=0)
    return measured | {
        "stages": stages(model.result_.history),
        "found": float(np.mean(apart < 0.1)),
        **neighbours(private_spec(n_clients), n_clients),
    }


def masked(n_clients: int, *, dropped: float = 0.0, complete: bool = False) -> dict[str, Any]:
    """One sum over clients, without noise; some are lost before their vectors arrive."""
    n_values = MASKED_VALUES
    inputs = vectors(n_clients, n_values)
    spec = masked_spec(n_clients)
    holders = our_clients(inputs, spec)
    lost = list(holders)[: round(dropped * n_clients)]
    handlers = {name: holder.handle for name, holder in holders.items()}
    faults = [Fault(name, MASK_EXCHANGE, "drop") for name in lost]
    session = Session(TimedEngine(handlers, faults=faults), spec, n_features=1)
    found: list[Ints] = []
    with mock.patch.object(graph, "SPARSE_FROM", np.inf if complete else graph.SPARSE_FROM):
        measured = _measured(lambda: found.append(opened(session, n_values)))
        around = neighbours(spec, n_clients)
    np.testing.assert_array_equal(found[0], plain_sum(inputs[len(lost) :]))
    return measured | {"stages": stages(session.history), **around}


def _measured(job: Callable[[], object]) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, worked = time.perf_counter(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job()
    return {
        "seconds": time.perf_counter() - started,
        "cpu": time.process_time() - worked,
        "gigabytes": _gigabytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss),
        "before": _gigabytes(before),
    }


def _gigabytes(maxrss: int) -> float:
    return maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def neighbours(spec: PrivacySpec, n_clients: int) -> dict[str, int]:
    """The degree and the threshold of such a cohort."""
    found = graph.Graph.of(n_clients, Rules(spec.honest_survivors + spec.colluders, spec.colluders))
    return {"degree": found.degree, "threshold": found.threshold}


def stages(history: Sequence[Exchange]) -> list[dict[str, Any]]:
    """What each exchange took."""
    return [
        {
            "stage": exchange.stage,
            "asked": len(exchange.asked),
            "server": cpu - own,
            "clients": own,
            "up": exchange.bytes_up,
            "down": exchange.bytes_down,
        }
        for exchange, cpu, own in zip(
            history, TimedEngine.exchanges, TimedEngine.clients_own, strict=True
        )
    ]


JOBS: dict[str, Job] = {
    "k-FED": partial(fit, partial(KFed, n_local_clusters=HELD), "secure"),
    "k-FED, sampler='fast'": partial(fit, partial(KFed, n_local_clusters=HELD), "fast"),
    "FKM": partial(fit, FKM, "secure"),
    "sparse graph": masked,
    "sparse graph, a tenth drops out": partial(masked, dropped=0.1),
    "complete graph": partial(masked, complete=True),
}


def alone(job: str, n_clients: int) -> dict[str, Any]:
    """A job in a process of its own."""
    command = [sys.executable, __file__, "--job", job, "--clients", str(n_clients)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{job} with {n_clients} clients failed:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


HEADER = ("what", "clients", "neighbours", "threshold", "seconds", "peak memory", "clusters found")


def row(name: str, n_clients: int, found: Mapping[str, Any]) -> list[str]:
    """One line of a table."""
    return [
        name,
        f"{n_clients:,}",
        str(found["degree"]),
        str(found["threshold"]),
        f"{found['seconds']:.1f}",
        f"{found['gigabytes']:.2f} GB",
        f"{found['found']:.0%}" if "found" in found else "",
    ]


UNIT_HEADER = ("stage", "a client sends", "it receives", "its work", "the server's work for it")


def units(found: Mapping[str, Any], n_clients: int) -> list[list[str]]:
    """What a client costs in each stage, summed over rounds; memory and the rest at the end.

    The server's work in a stage is what it does with replies. What it makes of them, and requests,
    is between exchanges.
    """
    by_stage: dict[str, np.ndarray] = {}
    for each in found["stages"]:
        figures = [each[name] for name in ("up", "down", "clients", "server")]
        before = by_stage.get(each["stage"], np.zeros(4))
        by_stage[each["stage"]] = before + np.array(figures) / n_clients
    rows = [
        [stage, f"{up:,.0f} B", f"{down:,.0f} B", _ms(own), _ms(server)]
        for stage, (up, down, own, server) in by_stage.items()
    ]
    rest = found["cpu"] - sum(each["clients"] + each["server"] for each in found["stages"])
    held = (found["gigabytes"] - found["before"]) * 1e6 / n_clients
    rows.append(["between exchanges", "", "", "", _ms(rest / n_clients)])
    rows.append(["memory, both ends", "", "", "", f"{held:.0f} kB"])
    return rows


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def kfed_part(quick: bool) -> Part:
    """Ten thousand clients."""
    n = 150 if quick else KFED_CLIENTS
    tables, rows, bars = [], [], []
    for name in ("k-FED", "k-FED, sampler='fast'"):
        found = alone(name, n)
        rows.append(row(name, n, found))
        if name == "k-FED":
            tables.append((f"A client of {n:,}, k-FED", UNIT_HEADER, units(found, n)))
            bars = [
                Bar(f"seconds of k-FED, {n:,} clients", found["seconds"], at_most=KFED_SECONDS),
                Bar(f"GB of k-FED, {n:,} clients", found["gigabytes"], at_most=KFED_GIGABYTES),
            ]
    return [("Ten thousand clients", HEADER, rows), *tables], bars


def fkm_part(quick: bool) -> Part:
    """FKM, whose rounds are sums."""
    n = 120 if quick else FKM_CLIENTS
    found = alone("FKM", n)
    sums = sum(each["stage"] == "masking/mask" for each in found["stages"])
    title = f"A client of {n:,}, FKM, {sums} sums"
    tables = [
        ("FKM, every round a sum", HEADER, [row("FKM", n, found)]),
        (title, UNIT_HEADER, units(found, n)),
    ]
    return tables, []


def masked_part(quick: bool) -> Part:
    """One sum, on both graphs."""
    n, few = (120, (20, 40)) if quick else (MASKED_CLIENTS, COMPLETE_CLIENTS)
    rows, tables, bars = [], [], []
    for name in ("sparse graph", "sparse graph, a tenth drops out"):
        found = alone(name, n)
        rows.append(row(name, n, found))
        what = f"seconds of a sum of {MASKED_VALUES:,} over {n:,} clients, {name}"
        bars.append(Bar(what, found["seconds"], at_most=MASKED_SECONDS))
        tables.append((f"A client of {n:,}, {name}", UNIT_HEADER, units(found, n)))
    for fewer in few:
        found = alone("complete graph", fewer)
        rows.append(row("complete graph", fewer, found))
    times = (n / few[-1]) ** 2
    longer = [f"{found['seconds'] * times:.0f}", "", ""]
    rows.append(["complete graph, as the square", f"{n:,}", str(n - 1), "", *longer])
    title, header, memory, [bar] = server_memory((n // 4, n), MASKED_VALUES)
    tables.append((f"{title} alone, two thirds of the clients must stay", header, memory))
    return [(f"A sum of {MASKED_VALUES:,} numbers", HEADER, rows), *tables], [*bars, bar]


PARTS: dict[str, Callable[[bool], Part]] = {
    "kfed": kfed_part,
    "fkm": fkm_part,
    "masked": masked_part,
}


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; 1 if a bar is missed under --check."""
    parser = argparse.ArgumentParser(description="What large federations take.")
    parser.add_argument("--part", default=",".join(PARTS), help="parts to run, after commas")
    parser.add_argument("--quick", action="store_true", help="about a hundred clients")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is not met")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--clients", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.job:
        print(json.dumps(JOBS[given.job](given.clients)))
        return 0
    wanted = given.part.split(",")
    if not set(wanted) <= set(PARTS):
        parser.error(f"--part {given.part}: give some of {','.join(PARTS)}")
    parts = tqdm(wanted, "scale", file=sys.stderr)
    return print_parts(PARTS, parts, given.quick, check=given.check)


if __name__ == "__main__":
    sys.exit(main())
