"""Federated k-means, FKM (Garst and Reinders, ICPR 2024).

Each client takes one k-means step from the global centres and reports a mean and a count per
cluster; the server clusters all local means, weighted by their counts, into new global centres.

Departures from the print:

- With ``align="index"`` the server adds up what clients report for the same global centre instead
  of clustering the local means. A client's cluster keeps the index of the centre it started from
  because it takes a single step, so this is k-means on the union, and needs only sums.
- The text speaks of four clients in its synthetic experiment, its figures show five.
"""

import numpy as np

from secure_fedclust.algorithms.lloyd import assign_and_sum, kmeans, kmeans_seeds, mean_of
from secure_fedclust.arrays import Floats, Ints

MIN_COUNT = 2
"""Clusters of fewer records are not reported one by one (the paper's p)."""


def client_seed(X: Floats, n_clusters: int, rng: np.random.Generator) -> tuple[Floats, Ints]:
    """Local means and counts after k-means++ seeding (lines 2-5 of Algorithm 1)."""
    return client_step(X, kmeans_seeds(X, n_clusters, rng))


def client_step(X: Floats, centers: Floats) -> tuple[Floats, Ints]:
    """Means and counts of one k-means step from the global centres (lines 13-18).

    Centres that attract fewer than `MIN_COUNT` records are left out. Leaving out the empty
    ones changes no assignment, so one pass over the records does for lines 14 and 17.
    """
    sums, counts = assign_and_sum(X, centers)
    kept = counts >= MIN_COUNT
    return sums[kept] / counts[kept, None], counts[kept]


def client_sums(X: Floats, centers: Floats) -> tuple[Floats, Ints]:
    """Sums and counts of the same step for every global centre, in the order given."""
    return assign_and_sum(X, centers)


def server_align(
    means: Floats,
    counts: Ints | Floats,
    n_clusters: int,
    rng: np.random.Generator,
    n_init: int = 10,
) -> Floats:
    """Global centres by k-means over all local means, weighted by their counts (lines 7-10)."""
    return kmeans(means, n_clusters, rng, weights=counts, n_init=n_init)[0]


def server_add(sums: Floats, counts: Ints, centers: Floats) -> Floats:
    """Global centres from sums over all clients; a centre that nobody reported stays."""
    return mean_of(sums, counts, otherwise=centers)
