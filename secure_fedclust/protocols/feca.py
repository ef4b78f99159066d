"""FeCA: one shot, refined centroids and radii.

Without protection the server sees each client's. With differential privacy it sees a synopsis of
each client: refinement and radii are computed from its noisy counts, sums and squares.
"""

from typing import Any, Literal

import numpy as np

from secure_fedclust.algorithms import feca
from secure_fedclust.arrays import Floats
from secure_fedclust.messages import Array, Choice, Integer, stage
from secure_fedclust.protocols.client import MAX_CLUSTERS, Client, answers
from secure_fedclust.protocols.clustering import Clustering, stack
from secure_fedclust.protocols.session import Session
from secure_fedclust.protocols.synopsis import Synopsis

Radius = Literal["empirical", "theoretical"]

MAX_INIT = 1000
"""A client does not run k-means more often than this."""

CENTERS = stage(
    "feca/centers",
    request={
        "n_clusters": Integer(1, MAX_CLUSTERS),
        "n_init": Integer(1, MAX_INIT),
        "radius": Choice(("empirical", "theoretical")),
    },
    reply={"centers": Array(("k", "d")), "radii": Array(("k",), minimum=0)},
)


class FeCAClient(Client):
    """Reports refined centroids of its records and a radius for each.

    Privacy unit: none, the message is unprotected.
    Sensitivity: unbounded.
    Who sees it: the server.
    """

    @answers(CENTERS, after=(None,))
    def centers(self, n_clusters: int, n_init: int, radius: str) -> dict[str, Any]:
        clusters = feca.client_cluster(self.X, n_clusters, self.rng, n_init)
        centers, radii = _refined(clusters, radius)
        return {"centers": centers, "radii": radii}


def run(session: Session, *, n_clusters: int, n_init: int, radius: Radius) -> Clustering:
    """The server's side."""
    replies = session.ask_all(
        CENTERS, {"k": (1, n_clusters)}, n_clusters=n_clusters, n_init=n_init, radius=radius
    )
    centers = feca.server_aggregate(stack(replies, "centers"), stack(replies, "radii"), n_clusters)
    session.note_centers(centers)
    return Clustering(centers)


def run_on_synopsis(
    synopsis: Synopsis,
    *,
    n_clusters: int,
    n_init: int,
    radius: Radius,
    rng: np.random.Generator,
) -> Clustering:
    """Both sides, from what was released."""
    parts = [
        _refined(
            feca.summary_clusters(part.points, part.weights, part.spreads, n_clusters, rng, n_init),
            radius,
        )
        for part in synopsis.summaries(n_clusters).values()
    ]
    centers, radii = (np.concatenate(stacked) for stacked in zip(*parts, strict=True))
    return Clustering(synopsis.domain.leave(feca.server_aggregate(centers, radii, n_clusters)))


def _refined(clusters: feca.Clusters, radius: str) -> tuple[Floats, Floats]:
    clusters = feca.client_refine(clusters)
    if radius == "empirical":
        return clusters.centers, feca.client_empirical_radii(clusters)
    return clusters.centers, feca.client_theoretical_radii(clusters)
