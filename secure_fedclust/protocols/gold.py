"""GOLD: one shot, micro-clusters to global clusters.

Without protection the server sees the centroids of each client's micro-clusters. With differential
privacy it sees a synopsis of each client, whose points take the place of these centroids.
"""

from typing import Any

import numpy as np

from secure_fedclust.algorithms import gold
from secure_fedclust.messages import Array, stage
from secure_fedclust.protocols.client import Client, answers
from secure_fedclust.protocols.clustering import Clustering, stack
from secure_fedclust.protocols.session import Session
from secure_fedclust.protocols.synopsis import Synopsis

MAX_CENTROIDS = 1 << 14
"""More micro-clusters than this are not taken from one client: the server's time grows as their
square, and one client could otherwise keep it busy for hours."""

CENTROIDS = stage("gold/centroids", request={}, reply={"centroids": Array(("k", "d"))})


class GOLDClient(Client):
    """Reports the centroids of its micro-clusters.

    Privacy unit: none, the message is unprotected.
    Sensitivity: unbounded.
    Who sees it: the server.
    """

    @answers(CENTROIDS, after=(None,))
    def centroids(self) -> dict[str, Any]:
        return {"centroids": gold.client_micro_clusters(self.X, self.rng)}


def run(session: Session, *, n_clusters: int | None, rng: np.random.Generator) -> Clustering:
    """The server's side."""
    replies = session.ask_all(CENTROIDS, {"k": (1, MAX_CENTROIDS)})
    centers = gold.server_cluster(stack(replies, "centroids"), n_clusters, rng)
    session.note_centers(centers)
    return Clustering(centers)


def run_on_synopsis(
    synopsis: Synopsis, *, n_clusters: int | None, rng: np.random.Generator
) -> Clustering:
    """The server's side, from what was released.

    GOLD wants features of unit variance. That of the released points costs nothing to know.
    """
    points = np.concatenate([part.points for part in synopsis.summaries(n_clusters or 1).values()])
    spread = np.maximum(points.std(axis=0), 1e-9)
    centers = gold.server_cluster(points / spread, n_clusters, rng) * spread
    return Clustering(synopsis.domain.leave(centers))
