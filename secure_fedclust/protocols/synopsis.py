"""One private summary of each client's records, on which any algorithm runs for free.

A summary is a set of cells with noisy counts, means and spreads. In one or two dimensions all
clients use the cells of one public grid, so that the same cells can be added up. Above that each
client places micro-clusters of its own: it releases its moments to itself, so to speak, spreads
centres over the Gaussian that has them, and moves them by a few rounds of private k-means. Every
step is charged, and only the last one is sent.

Whatever is computed from summaries afterwards, with however many restarts, costs nothing more.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from secure_fedclust.messages import Array, Integer, Real, Values, private_stage, steps
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.plan import PlannedRelease
from secure_fedclust.privacy.queries import Cells, CellSums, Moments
from secure_fedclust.protocols.cells import (
    CELLS,
    KEEP,
    Summary,
    ask_each,
    moved,
    pooled,
    read_cells,
    summarise,
)
from secure_fedclust.protocols.client import PrivateClient, answers
from secure_fedclust.protocols.seeding import (
    GRID_FEATURES,
    MOMENTS,
    SeedingClient,
    gaussian_spread,
    moments_size,
    n_cells,
    public_partition,
    round_count_weight,
)
from secure_fedclust.protocols.session import Session

MICRO_FACTOR = 4
"""Micro-clusters for each cluster."""

MOMENTS_SHARE = 0.2
RADIUS_FACTOR = 1.2
SQUARE_WEIGHT = 0.25
KEEP_OF_MANY = 3.0
MAX_ROUNDS = 100

MICRO = private_stage(
    "synopsis/micro",
    request={"n_micro": Integer(1, PrivateClient.max_clusters), "n_rounds": Integer(1, MAX_ROUNDS)},
    reply={
        "centers": Array(("k", "d")),
        "radius": Real(1e-9, 1e9),
        "counts": steps("k"),
        "sums": steps("k", "d"),
        "squares": steps("k"),
    },
)


class SynopsisClient(SeedingClient):
    """Answers with a noisy summary of its records.

    Privacy unit: a record of the client.
    Sensitivity: ``moments``, ``sums_and_counts`` and ``synopsis`` in docs/proofs/sensitivity.md.
    Who sees it: the server sees the last round and the centres it started from; what came before
    is charged all the same.
    """

    @answers(CELLS, after=(None, MOMENTS, CELLS, MICRO))
    def cells(self, **request: Any) -> dict[str, Any]:
        return super().cells(**request)

    @answers(MICRO, after=(None, MOMENTS, CELLS))
    def micro(self, n_micro: int, n_rounds: int, share: float) -> dict[str, Any]:
        domain = self.domain
        query = Moments(domain.n_features)
        noisy = self.release(query, MOMENTS_SHARE * share)
        mean, covariance = query.mean_and_covariance(*query.totals(noisy))
        centers, rms = gaussian_spread(domain, mean, covariance, n_micro, self.rng)
        radius = RADIUS_FACTOR * rms
        weight = round_count_weight(domain.n_features, self.spec.adjacency)
        each = (1 - MOMENTS_SHARE) / n_rounds * share
        for _ in range(n_rounds - 1):
            sums = CellSums(centers, radius, weight)
            centers = moved(sums.read(self.release(sums, each)), radius, domain)
        noisy = self.release(CellSums(centers, radius, weight, SQUARE_WEIGHT), each)
        return self.reply(noisy, centers=centers, radius=radius)


@dataclass(frozen=True, eq=False)
class Synopsis:
    """The summaries of all clients.

    Attributes
    ----------
    cells : mapping of client to Cells
    radius : mapping of client to float
        How far records count in a cell.
    domain : Domain
    shared : bool
        Whether all clients have the same cells.
    """

    cells: Mapping[str, Cells]
    radius: Mapping[str, float]
    domain: Domain
    shared: bool

    def summaries(self, n_clusters: int | Mapping[str, int] = 1) -> dict[str, Summary]:
        """What each client released, for telling so many clusters apart."""
        # Most cells of a public partition are empty at one client, and some look as if not.
        keep = KEEP_OF_MANY if self.shared else KEEP
        numbers = (
            n_clusters if isinstance(n_clusters, Mapping) else dict.fromkeys(self.cells, n_clusters)
        )
        return {
            client: summarise(
                cells, self.radius[client], self.domain, keep=keep, at_least=numbers[client]
            )
            for client, cells in self.cells.items()
        }

    def n_records(self) -> float:
        """The noisy number of records of a client, on average."""
        counts = [float(np.sum(cells.counts)) for cells in self.cells.values()]
        return max(float(np.mean(counts)), 1.0)

    def pooled(self, n_clusters: int = 1) -> Summary:
        """All clients together; equal cells are added before noise decides which to keep."""
        if self.shared:
            client = next(iter(self.cells))
            total = pooled(list(self.cells.values()))
            return summarise(total, self.radius[client], self.domain, at_least=2 * n_clusters)
        parts = self.summaries().values()
        return Summary(
            np.concatenate([part.points for part in parts]),
            np.concatenate([part.weights for part in parts]),
            np.concatenate([part.spreads for part in parts]),
            max(part.noise for part in parts),
        )


def collect(
    session: Session,
    *,
    n_clusters: Mapping[str, int],
    n_rounds: int,
    cells: int,
    share: float = 1.0,
) -> Synopsis:
    """The server's side: one exchange.

    Parameters
    ----------
    session : Session
    n_clusters : mapping of client to int
        How many clusters the summary of each client should tell apart; above two features others
        are not asked.
    n_rounds : int
        Rounds with micro-clusters, above two features.
    cells : int
        Cells of the grid, up to two features.
    share : float
        Of the run's budget.
    """
    domain = session.domain
    if domain.n_features <= GRID_FEATURES:
        centers, radius = public_partition(domain, cells)
        query = CellSums(centers, radius, 1.0, SQUARE_WEIGHT)
        found = ask_each(session, query, share)
        return Synopsis(found, dict.fromkeys(found, radius), domain, shared=True)
    n_micro = {client: MICRO_FACTOR * n for client, n in n_clusters.items()}

    def read(_: str, reply: Values) -> tuple[Cells, float]:
        radius = min(reply["radius"], 2 * RADIUS_FACTOR * domain.bound)
        weight = round_count_weight(domain.n_features, session.spec.adjacency)
        query = CellSums(domain.hold(reply["centers"]), radius, weight, SQUARE_WEIGHT)
        last = (1 - MOMENTS_SHARE) / n_rounds * share
        return read_cells(session, query, reply, last), radius

    replies = session.ask(
        MICRO,
        {
            client: {"n_micro": n, "n_rounds": n_rounds, "share": share}
            for client, n in n_micro.items()
        },
        {client: {"k": n} for client, n in n_micro.items()},
        read,
    )
    return Synopsis(
        {client: cells for client, (cells, _) in replies.items()},
        {client: radius for client, (_, radius) in replies.items()},
        domain,
        shared=False,
    )


def planned(
    domain: Domain, *, n_clusters: int, n_rounds: int, cells: int, share: float = 1.0
) -> list[PlannedRelease]:
    """The releases of a synopsis."""
    d = domain.n_features
    if d <= GRID_FEATURES:
        n = len(public_partition(domain, cells)[0])
        return [PlannedRelease(CELLS.name, 1, share, n * (d + 2))]
    n_micro, name = MICRO_FACTOR * n_clusters, MICRO.name
    each, rounds = (1 - MOMENTS_SHARE) * share / n_rounds, n_rounds - 1
    moments = PlannedRelease(f"{name}: moments", 1, MOMENTS_SHARE * share, moments_size(d), 0)
    moves = PlannedRelease(f"{name}: rounds", rounds, each * rounds, n_micro * (d + 1), 0)
    summary = PlannedRelease(f"{name}: summary", 1, each, n_micro * (d + 2), 1, n_micro * d + 1)
    return [moments, *([moves] if rounds else []), summary]


def cells_for(n_records: int | None, n_clusters: int, n_clients: int, mu: float) -> int:
    """Cells of a shared grid, for clients of about so many records each."""
    total = None if n_records is None else n_records * n_clients
    return n_cells(total, n_clusters, mu / math.sqrt(n_clients))
