"""FKM without protection: the server sees each client's means and counts.

1. Every client seeds its own k-means and reports local means and counts.
2. Each round, every client takes one k-means step from the global centres; the server aligns the
   local means by weighted k-means (``align="kmeans"``, the paper), or adds up the sums of each
   global centre (``align="index"``), which is all that secure aggregation would need.
"""

from typing import Any, Literal

import numpy as np

from secure_fedclust.algorithms import fkm
from secure_fedclust.arrays import Floats
from secure_fedclust.errors import DataError
from secure_fedclust.messages import Array, Integer, stage
from secure_fedclust.protocols.client import MAX_CLUSTERS, Client, answers
from secure_fedclust.protocols.clustering import Clustering, stack
from secure_fedclust.protocols.session import Replies, Session

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
