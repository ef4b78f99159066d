"""Align, then aggregate: final centres from one sum over all clients.

A one-shot system finds the global clusters from what clients release one by one, with noise enough
for each. Once the clusters are known their records can be added up over all clients, and the noise
is shared: one round of secure aggregation brings each centre close to the mean of its records.
"""

from collections.abc import Callable
from dataclasses import replace

from secure_fedclust.arrays import Floats
from secure_fedclust.privacy.plan import PlannedRelease
from secure_fedclust.privacy.queries import Cells, CellSums
from secure_fedclust.protocols.cells import ask_cells, moved
from secure_fedclust.protocols.clustering import Clustering
from secure_fedclust.protocols.seeding import round_count_weight, round_radius
from secure_fedclust.protocols.session import Session

SHARE = 0.25
"""Of the budget, for the sum; the rest is for finding the clusters."""

NAME = "refinement"


def refine(session: Session, found: Clustering, share: float) -> Clustering:
    """Move centres to the noisy means of their records, over all clients."""
    d, k = session.domain.n_features, len(found.centers)
    radius, weight = round_radius(d, k), round_count_weight(d, session.spec.adjacency)

    def ask(centers: Floats) -> Cells:
        return ask_cells(session, CellSums(centers, radius, weight), share)[0]

    return refined(session, found, radius, ask)


def refined(
    session: Session, found: Clustering, radius: float, ask: Callable[[Floats], Cells]
) -> Clustering:
    """The same clusters with centres moved to what a question about them gives."""
    domain = session.domain
    working = domain.hold((found.centers - domain.center) / domain.scale)
    centers = domain.leave(moved(ask(working), radius, domain))
    session.note_centers(centers)
    return replace(found, centers=centers)


def planned(n_clusters: int, n_features: int, share: float) -> PlannedRelease:
    """The release of a refinement."""
    return PlannedRelease(NAME, 1, share, n_clusters * (n_features + 1), summed=True)
