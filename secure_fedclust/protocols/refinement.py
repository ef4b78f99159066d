"""Align, then aggregate: final centres from one sum over all clients.

A one-shot system finds the global clusters from what clients release one by one, with noise enough
for each. Once the clusters are known their records can be added up over all clients, and the noise
is shared: one round of secure aggregation brings each centre close to the mean of its records.
"""

from dataclasses import replace

from secure_fedclust.privacy.queries import CellSums
from secure_fedclust.protocols.cells import ask_cells, moved
from secure_fedclust.protocols.clustering import Clustering
from secure_fedclust.protocols.seeding import round_count_weight, round_radius
from secure_fedclust.protocols.session import Session

SHARE = 0.25
"""Of the budget, for the sum; the rest is for finding the clusters."""

NAME = "refinement"


def refine(session: Session, found: Clustering, share: float) -> Clustering:
    """Move centres to the noisy means of their records, over all clients."""
    domain = session.domain
    d, k = domain.n_features, len(found.centers)
    radius, weight = round_radius(d, k), round_count_weight(d, session.spec.adjacency)
    working = domain.hold((found.centers - domain.center) / domain.scale)
    cells, _ = ask_cells(session, CellSums(working, radius, weight), share)
    centers = domain.leave(moved(cells, radius, domain))
    session.note_centers(centers)
    return replace(found, centers=centers)
