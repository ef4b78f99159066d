"""k-FED: one shot, local centres to global ones.

Without protection the server sees each client's local centres. With differential privacy it sees
a synopsis of each client, and takes the client's step on it too.
"""

from typing import Any

import numpy as np

from secure_fedclust.algorithms import kfed
from secure_fedclust.messages import Array, Integer, stage
from secure_fedclust.protocols.client import MAX_CLUSTERS, Client, answers
from secure_fedclust.protocols.clustering import Clustering, owners_of, stack
from secure_fedclust.protocols.session import Session
from secure_fedclust.protocols.synopsis import Synopsis

CENTERS = stage(
    "kfed/centers",
    request={"n_local_clusters": Integer(1, MAX_CLUSTERS)},
    reply={"centers": Array(("k", "d"))},
)


class KFedClient(Client):
    """Reports local centres of its records.

    Privacy unit: none, the message is unprotected.
    Sensitivity: unbounded.
    Who sees it: the server.
    """

    @answers(CENTERS, after=(None,))
    def centers(self, n_local_clusters: int) -> dict[str, Any]:
        return {"centers": kfed.client_cluster(self.X, n_local_clusters, self.rng)}


def run(
    session: Session, *, n_clusters: int, n_local_clusters: int, rng: np.random.Generator
) -> Clustering:
    """The server's side."""
    replies = session.ask_all(
        CENTERS, {"k": (1, n_local_clusters)}, n_local_clusters=n_local_clusters
    )
    local_centers, owners = stack(replies, "centers"), owners_of(replies, "centers")
    centers = kfed.server_cluster(local_centers, owners, n_clusters, rng)
    session.note_centers(centers)
    return Clustering(centers)


def run_on_synopsis(
    synopsis: Synopsis, *, n_clusters: int, n_local_clusters: int, rng: np.random.Generator
) -> Clustering:
    """Both sides, from what was released."""
    local = [
        kfed.client_cluster(part.points, n_local_clusters, rng, weights=part.weights)
        for part in synopsis.summaries(n_local_clusters).values()
    ]
    owners = np.repeat(np.arange(len(local)), [len(centers) for centers in local])
    centers = kfed.server_cluster(np.concatenate(local), owners, n_clusters, rng)
    return Clustering(synopsis.domain.leave(centers))
