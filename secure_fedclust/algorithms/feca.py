"""Federated centroid aggregation, FeCA (Xu et al., "Jigsaw Game: Federated Clustering").

Each client runs k-means, drops the centroids that seem to sit between several true clusters, and
gives each remaining one a radius; the server gathers centroids by these radii, the largest first.

How the print is read:

- The "standard deviation" of a cluster is the root mean square distance to its centroid.
- Algorithm 2 removes the suspect centroid and its records, and nothing else; the two close
  centroids are merged only to compare objectives. It stops below three centroids.
- Algorithm 5 picks the largest radius among the centroids that are still there.
- Fewer than k groups give fewer than k centres.
- Local k-means is the best of several runs from k-means++ seeds; the paper does not say. From a
  single run the server often merges two true clusters around one bad centroid.
"""

from typing import NamedTuple

import numpy as np
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist

from secure_fedclust.algorithms.lloyd import kmeans
from secure_fedclust.arrays import Floats, Ints

REACH = 0.9
"""Part of a cluster's weight that lies within its reach, where only a summary is known."""


class Clusters(NamedTuple):
    """What FeCA needs to know of local clusters."""

    centers: Floats
    counts: Ints | Floats
    sse: Floats
    """Sum of squared distances of each cluster's records to its centre (the paper's G)."""
    reach: Floats
    """Largest distance of a cluster's records to its centre."""

    def keep(self, kept: Ints) -> "Clusters":
        """Only some of the clusters."""
        return Clusters(self.centers[kept], self.counts[kept], self.sse[kept], self.reach[kept])


def client_cluster(
    X: Floats, n_clusters: int, rng: np.random.Generator, n_init: int = 10
) -> Clusters:
    """Local k-means (line 2 of Algorithm 2), the best of `n_init` runs."""
    centers, labels = kmeans(X, n_clusters, rng, n_init=n_init)
    k = len(centers)
    counts = np.bincount(labels, minlength=k)
    squared = np.square(X - centers[labels]).sum(axis=1)
    sse = np.bincount(labels, squared, k).astype(np.float64)
    reach = np.zeros(k)
    np.maximum.at(reach, labels, np.sqrt(squared))
    return Clusters(centers, counts, sse, reach)


def summary_clusters(
    points: Floats,
    weights: Floats,
    spreads: Floats,
    n_clusters: int,
    rng: np.random.Generator,
    n_init: int = 10,
) -> Clusters:
    """The same from weighted points that stand for a client's records.

    Parameters
    ----------
    points : array of shape (m, d)
    weights : array of shape (m,)
        How many records each point stands for, not necessarily a whole number.
    spreads : array of shape (m,)
        Their mean squared distance to it.
    n_clusters, rng, n_init
        As in `client_cluster`.

    Returns
    -------
    Clusters
        The reach is a weighted quantile over points: where weights are noisy, noise would decide
        which point is farthest.
    """
    centers, labels = kmeans(points, n_clusters, rng, weights=weights, n_init=n_init)
    squared = np.square(points - centers[labels]).sum(axis=1) + spreads
    k = len(centers)
    counts = np.bincount(labels, weights, k).astype(np.float64)
    sse = np.bincount(labels, weights * squared, k).astype(np.float64)
    reach = np.array(
        [
            np.sqrt(_weighted_quantile(squared[labels == j], weights[labels == j], REACH))
            for j in range(k)
        ]
    )
    return Clusters(centers, counts, sse, reach)


def client_refine(clusters: Clusters) -> Clusters:
    """Drop centroids that fit many true clusters (lines 3-13 of Algorithm 2)."""
    while len(clusters.centers) >= 3:
        centers, counts, sse, _ = clusters
        suspect = np.argmax(sse / counts)
        distances = _distances_to_others(centers)
        p, q = np.unravel_index(np.argmin(distances), distances.shape)
        merged = counts[p] * counts[q] / (counts[p] + counts[q]) * distances[p, q] ** 2
        if sse[suspect] < sse[p] + sse[q] + merged:
            break
        clusters = clusters.keep(np.delete(np.arange(len(centers)), suspect))
    return clusters


def client_empirical_radii(clusters: Clusters) -> Floats:
    """A radius for each centroid: its reach or half the way to the next one (Algorithm 4)."""
    halfway = _distances_to_others(clusters.centers).min(axis=1) / 2
    return np.asarray(np.minimum(clusters.reach, halfway))


def client_theoretical_radii(clusters: Clusters) -> Floats:
    """One radius for all centroids, which the paper's theorem needs (Algorithm 3).

    It is half the smallest distance between centroids whose clusters do not overlap. Where
    fewer than two such centroids are left, which the theorem excludes, all centroids count.
    """
    alone = np.ones(len(clusters.centers), dtype=bool)
    for i in range(len(alone)):
        if not alone[i] or alone.sum() < 2:
            continue
        distances = np.linalg.norm(clusters.centers - clusters.centers[i], axis=1)
        distances[~alone] = np.inf
        distances[i] = np.inf
        j = int(np.argmin(distances))
        if clusters.reach[i] + clusters.reach[j] > distances[j]:
            alone[i] = alone[j] = False
    if alone.sum() < 2:
        alone[:] = True
    smallest = _distances_to_others(clusters.centers[alone]).min()
    radius = smallest / 2 if np.isfinite(smallest) else clusters.reach[0]
    return np.full(len(alone), radius)


def server_aggregate(centers: Floats, radii: Floats, n_clusters: int) -> Floats:
    """Global centres: means of the `n_clusters` largest groups of centroids (Algorithm 5).

    Centroids within the largest radius of its centroid form a group and leave; the rest goes on
    the same way. Groups are found through a spatial index.
    """
    tree = cKDTree(centers)
    present = np.ones(len(centers), dtype=bool)
    groups = []
    for i in np.argsort(-radii, kind="stable"):
        if present[i]:
            near = np.asarray(tree.query_ball_point(centers[i], radii[i]), dtype=np.int64)
            group = np.union1d(near[present[near]], [i])
            present[group] = False
            groups.append(group)
    groups.sort(key=len, reverse=True)
    return np.stack([centers[group].mean(axis=0) for group in groups[:n_clusters]])


def _weighted_quantile(values: Floats, weights: Floats, part: float) -> float:
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(cumulative, part * cumulative[-1])]])


def _distances_to_others(centers: Floats) -> Floats:
    distances = cdist(centers, centers)
    np.fill_diagonal(distances, np.inf)
    return np.asarray(distances)
