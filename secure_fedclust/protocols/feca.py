"""FeCA without protection: the server sees each client's refined centroids and radii, once."""

from typing import Any, Literal

from secure_fedclust.algorithms import feca
from secure_fedclust.messages import Array, Choice, Integer, stage
from secure_fedclust.protocols.client import MAX_CLUSTERS, Client, answers
from secure_fedclust.protocols.clustering import Clustering, stack
from secure_fedclust.protocols.session import Session

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
        clusters = feca.client_refine(clusters)
        if radius == "empirical":
            radii = feca.client_empirical_radii(clusters)
        else:
            radii = feca.client_theoretical_radii(clusters)
        return {"centers": clusters.centers, "radii": radii}


def run(
    session: Session, *, n_clusters: int, n_init: int, radius: Literal["empirical", "theoretical"]
) -> Clustering:
    """The server's side."""
    replies = session.ask_all(
        CENTERS, {"k": (1, n_clusters)}, n_clusters=n_clusters, n_init=n_init, radius=radius
    )
    centers = feca.server_aggregate(stack(replies, "centers"), stack(replies, "radii"), n_clusters)
    session.note_centers(centers)
    return Clustering(centers)
