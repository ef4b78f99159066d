"""One-shot federated k-means, k-FED (Dennis, Li and Smith, ICML 2021).

Each client clusters its records into k' clusters, fewer than the federation has; the server picks
k well separated local centres, gathers every local centre at the nearest of them, and averages.
"""

import numpy as np

from secure_fedclust.algorithms.lloyd import assign_and_sum, kmeans
from secure_fedclust.arrays import Floats, Ints


def client_cluster(
    X: Floats, n_local_clusters: int, rng: np.random.Generator, *, weights: Floats | None = None
) -> Floats:
    """Local centres by k-means, on records or on weighted points that stand for them."""
    return kmeans(X, n_local_clusters, rng, weights=weights, n_init=1 if weights is None else 10)[0]


def server_cluster(
    local_centers: Floats, owners: Ints, n_clusters: int, rng: np.random.Generator
) -> Floats:
    """Global centres from all local centres.

    Parameters
    ----------
    local_centers : array of shape (m, d)
    owners : array of shape (m,)
        Which client sent each of them.
    n_clusters : int
    rng : numpy.random.Generator
        Chooses the client whose centres start the farthest-first search.

    Returns
    -------
    array of shape (k, d)
        k is `n_clusters`, or fewer if fewer different local centres were sent.
    """
    first = rng.choice(np.unique(owners))
    seeds = farthest_first(local_centers, np.flatnonzero(owners == first), n_clusters)
    sums, counts = assign_and_sum(local_centers, local_centers[seeds])
    found = counts > 0  # of equal seeds only one has members
    return sums[found] / counts[found, None]


def farthest_first(points: Floats, start: Ints, n_clusters: int) -> Ints:
    """Indices of `n_clusters` points, each farthest from those before, beginning with `start`.

    A start of more than `n_clusters` points is thinned by the same rule.
    """
    candidates = start if len(start) > n_clusters else np.arange(len(points))
    chosen = list(start[:1] if len(start) > n_clusters else start)
    nearest = np.full(len(candidates), np.inf)
    for index in chosen:
        nearest = np.minimum(nearest, _squared_distances(points[candidates], points[index]))
    while len(chosen) < n_clusters and nearest.max() > 0:
        chosen.append(candidates[np.argmax(nearest)])
        nearest = np.minimum(nearest, _squared_distances(points[candidates], points[chosen[-1]]))
    return np.asarray(chosen, dtype=np.int64)


def _squared_distances(points: Floats, point: Floats) -> Floats:
    return np.asarray(np.square(points - point).sum(axis=1))
