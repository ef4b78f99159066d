"""FKM: iterative k-means over all clients.

Without protection the server sees each client's means and counts:

1. Every client seeds its own k-means and reports local means and counts.
2. Each round, every client takes one k-means step from the global centres; the server aligns the
   local means by weighted k-means (``align="kmeans"``, the paper), or adds up the sums of each
   global centre (``align="index"``), which is all that secure aggregation would need.

With differential privacy local seeds, which are records, and local means of clusters that hold at
least two records, which tell counts apart, are out of the question:

1. Small releases decide where centres start (`seeding`).
2. Each round, every client answers for all global centres with noisy residual sums and counts; the
   server adds up, and moves the centres whose noisy count stands out.

Or, in one shot, the server clusters the points of all clients' synopses.

With masking or encryption it sees none of these answers but their sums over clients, and the noise
is shared.
Masking without differential privacy goes the same way, with exact sums.
"""

import math
from typing import Any, Literal

import numpy as np

from secure_fedclust.algorithms import fkm
from secure_fedclust.arrays import Floats
from secure_fedclust.errors import DataError
from secure_fedclust.messages import Array, Integer, stage
from secure_fedclust.protocols.client import MAX_CLUSTERS, Client, answers
from secure_fedclust.protocols.clustering import Clustering, stack
from secure_fedclust.protocols.seeding import (
    GRID_FEATURES,
    Recipe,
    n_cells,
    private_seeds,
    run_rounds,
)
from secure_fedclust.protocols.session import Replies, Session
from secure_fedclust.protocols.synopsis import MICRO_FACTOR, Synopsis
from secure_fedclust.protocols.unnoised import agree_on_region

_MEANS = {
    "means": Array(("m", "d")),
    "counts": Array(("m",), "int64", minimum=fkm.MIN_COUNT),
}
_SUMS = {
    "sums": Array(("k", "d")),
    "counts": Array(("k",), "int64", minimum=0),
}

SEED = stage("fkm/seed", request={"n_clusters": Integer(1, MAX_CLUSTERS)}, reply=_MEANS)
MEANS = stage("fkm/means", request={"centers": Array(("k", "d"))}, reply=_MEANS)
SUMS = stage("fkm/sums", request={"centers": Array(("k", "d"))}, reply=_SUMS)


class FKMClient(Client):
    """Reports means, or sums, and counts of its records.

    Privacy unit: none, the message is unprotected.
    Sensitivity: unbounded.
    Who sees it: the server.
    """

    @answers(SEED, after=(None,))
    def seed(self, n_clusters: int) -> dict[str, Any]:
        means, counts = fkm.client_seed(self.X, n_clusters, self.rng)
        return {"means": means, "counts": counts}

    @answers(MEANS, after=(None, SEED, MEANS))
    def means(self, centers: Floats) -> dict[str, Any]:
        means, counts = fkm.client_step(self.X, centers)
        return {"means": means, "counts": counts}

    @answers(SUMS, after=(None, SEED, SUMS))
    def sums(self, centers: Floats) -> dict[str, Any]:
        sums, counts = fkm.client_sums(self.X, centers)
        return {"sums": sums, "counts": counts}


def run(
    session: Session,
    *,
    n_clusters: int,
    n_rounds: int,
    n_init: int,
    align: Literal["kmeans", "index"],
    rng: np.random.Generator,
) -> Clustering:
    """The server's side."""

    def aligned(replies: Replies) -> Floats:
        means, counts = stack(replies, "means"), stack(replies, "counts")
        if not len(means):
            raise DataError(
                f"no client has {fkm.MIN_COUNT} records in one cluster, and clusters of one "
                "sample are not reported: lower n_clusters"
            )
        return fkm.server_align(means, counts, n_clusters, rng, n_init)

    at_most = {"m": (0, n_clusters)}
    centers = aligned(session.ask_all(SEED, at_most, n_clusters=n_clusters))
    session.note_centers(centers)
    for _ in range(n_rounds):
        if align == "kmeans":
            centers = aligned(session.ask_all(MEANS, at_most, centers=centers))
        else:
            replies = session.ask_all(SUMS, centers=centers)
            sums = np.sum([reply["sums"] for reply in replies.values()], axis=0)
            counts = np.sum([reply["counts"] for reply in replies.values()], axis=0)
            centers = fkm.server_add(sums, counts, centers)
        session.note_centers(centers)
    return Clustering(centers)


def recipe(
    *,
    n_clusters: int,
    n_features: int,
    n_clients: int,
    n_records: int | None,
    noise_terms: float,
    mu: float,
    seeding: Literal["private", "public"],
    n_rounds: int | None,
) -> Recipe:
    """How a private run divides its budget.

    Parameters
    ----------
    n_clusters, n_features, n_clients : int
    n_records : int or None
        About how many records a client holds, if that is public.
    noise_terms : float
        Variance of the noise in a sum, in units of that of one release.
    mu : float
        What each client may spend.
    seeding : {"private", "public"}
    n_rounds : int or None
        Rounds with the clusters themselves; as many as pay, if None.
    """
    noisy_mu = mu / math.sqrt(noise_terms)
    total = None if n_records is None else n_records * n_clients
    strength = 100.0 if total is None else total * noisy_mu / (n_clusters * math.sqrt(n_features))
    low, high = strength < WEAK, strength > STRONG
    if seeding == "public":
        return Recipe("public", 0, (), _growing(n_rounds or 5))
    if n_features <= GRID_FEATURES:
        seed = WEAK_GRID_SHARE if low else GRID_SHARE
        cells = n_cells(total, n_clusters, noisy_mu * math.sqrt(seed))
        rounds = tuple((1 - seed) * share for share in _growing(n_rounds or 1))
        return Recipe("grid", cells, (seed,), rounds)
    n_micro_rounds = 1 if low else N_MICRO_ROUNDS if high else 3
    each = SEED_SHARE * (1 - MOMENTS_SHARE) / n_micro_rounds
    shares = _growing(n_rounds or (1 if low else 2))
    return Recipe(
        "moments",
        (2 * MICRO_FACTOR if high else MICRO_FACTOR) * n_clusters,
        (SEED_SHARE * MOMENTS_SHARE, *[each] * n_micro_rounds),
        tuple((1 - SEED_SHARE) * share for share in shares),
    )


WEAK, STRONG = 20.0, 200.0
"""Signal to noise below which one round of each kind is best, and above which more pay."""

GRID_SHARE, WEAK_GRID_SHARE = 0.5, 0.7
SEED_SHARE, MOMENTS_SHARE = 0.6, 0.3

N_MICRO_ROUNDS = 5
"""Rounds with micro-clusters, where noise is no concern."""


def _growing(n_rounds: int) -> tuple[float, ...]:
    """Shares of rounds, the last twice as large as the others."""
    parts = [1.0] * (n_rounds - 1) + [2.0]
    return tuple(part / sum(parts) for part in parts)


def run_private(
    session: Session,
    *,
    n_clusters: int,
    n_init: int,
    recipe: Recipe,
    rng: np.random.Generator,
) -> Clustering:
    """The server's side of a private run."""
    centers = private_seeds(session, n_clusters, recipe, n_init, rng)
    if session.history:
        session.note_centers(session.domain.leave(centers))
    centers, n_records = run_rounds(session, centers, recipe.shares)
    return Clustering(session.domain.leave(centers), n_records=n_records)


def run_unnoised(
    session: Session, *, n_clusters: int, n_rounds: int, n_init: int, rng: np.random.Generator
) -> Clustering:
    """The server's side where it sees exact sums, and nothing else."""
    agree_on_region(session)
    n_shares = 1 + N_MICRO_ROUNDS + n_rounds
    # Shares of a budget that there is none of.
    shares = (1 / n_shares,) * n_shares
    ended = 1 + N_MICRO_ROUNDS
    recipe = Recipe("moments", 2 * MICRO_FACTOR * n_clusters, shares[:ended], shares[ended:])
    centers = private_seeds(session, n_clusters, recipe, n_init, rng)
    session.note_centers(session.domain.leave(centers))
    centers, _ = run_rounds(session, centers, recipe.shares, radius=2 * session.domain.bound)
    return Clustering(session.domain.leave(centers))


def run_on_synopsis(
    synopsis: Synopsis, *, n_clusters: int, n_init: int, rng: np.random.Generator
) -> Clustering:
    """Weighted k-means over the points of all clients, from what was released."""
    found = synopsis.pooled(n_clusters)
    centers = fkm.server_align(found.points, found.weights, n_clusters, rng, n_init)
    return Clustering(synopsis.domain.leave(centers))
