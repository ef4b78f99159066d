"""What the papers compare with: matched averaging, federated fuzzy c-means, and pooled data.

- Matched averaging (M-Avg; FeCA, section 6): clients run k-means once; the server matches their
  centroids one to one and averages matches.
- FFCM (Stallmann and Wilbik, 2022): clients run fuzzy c-means from the global centres; the server
  averages centres of the same index (avg1, or v1), or runs k-means on all of them (avg2, or v2).
- K-means and a Gaussian mixture on the pooled records, which no federation has.

Where the papers leave a choice:

- Centroids are matched to those of the client that has the most of them, the first such client:
  one that has fewer records than clusters sends fewer centroids and is no good reference.
- FFCM starts from k-means on the k-means++ seeds of all clients, and clients run fuzzy c-means
  until it settles. A centre weighs the sum of its memberships to the power m, as in fuzzy c-means
  itself, so that averaging after every single step would be fuzzy c-means on the union.
- The server's k-means is the best of ten runs, as in FKM. From one run it often gets stuck.

FeCA's Table 1 has FFCM far worse off IID, above all avg2; the paper does not say how it was run.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from sklearn.mixture import GaussianMixture

from secure_fedclust.algorithms.lloyd import kmeans, kmeans_seeds, mean_of
from secure_fedclust.arrays import Floats

MAX_STEPS = 100
"""Steps of a client's fuzzy c-means in one round."""

TOLERANCE = 1e-4
"""Fuzzy c-means has settled when no centre moves farther than this part of the records' spread."""

_RUNS = 10


def matched_averaging(
    clients: Sequence[Floats], n_clusters: int, rng: np.random.Generator
) -> Floats:
    """M-Avg over clients in memory: global centres from one message of each.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> clients = [np.array([[0.0], [10.0]]), np.array([[12.0], [2.0]])]
    >>> np.sort(matched_averaging(clients, 2, rng), axis=0)
    array([[ 1.],
           [11.]])
    """
    return server_match([kmeans(X, n_clusters, rng)[0] for X in clients])


def server_match(local_centers: Sequence[Floats]) -> Floats:
    """Means of centroids matched one to one by the least total distance.

    Parameters
    ----------
    local_centers : sequence of arrays of shape (k_g, d)
        One array a client.

    Returns
    -------
    array of shape (k, d)
        As many as the client with the most centroids sent, in its order.
    """
    reference = max(local_centers, key=len)
    sums, counts = np.zeros_like(reference), np.zeros(len(reference))
    for centers in local_centers:
        rows, columns = linear_sum_assignment(cdist(reference, centers))
        sums[rows] += centers[columns]
        counts[rows] += 1
    return np.asarray(sums / counts[:, None])


def ffcm(
    clients: Sequence[Floats],
    n_clusters: int,
    rng: np.random.Generator,
    *,
    n_rounds: int = 10,
    average: Literal["centers", "kmeans"] = "centers",
) -> Floats:
    """FFCM over clients in memory: avg1 with ``average="centers"``, avg2 with ``"kmeans"``."""
    seeds = np.concatenate([kmeans_seeds(X, n_clusters, rng) for X in clients])
    centers = server_kmeans(seeds, n_clusters, rng)
    for _ in range(n_rounds):
        replies = [client_fuzzy_cmeans(X, centers) for X in clients]
        if average == "kmeans":
            local = np.concatenate([local for local, _ in replies])
            centers = server_kmeans(local, n_clusters, rng)
        else:
            centers = server_average([r[0] for r in replies], [r[1] for r in replies], centers)
    return centers


def client_fuzzy_step(X: Floats, centers: Floats, m: float = 2.0) -> tuple[Floats, Floats]:
    """One step of fuzzy c-means.

    Parameters
    ----------
    X : array of shape (n, d)
    centers : array of shape (k, d)
    m : float
        Fuzziness, above 1; towards 1 it becomes k-means.

    Returns
    -------
    centers : array of shape (k, d)
        A centre without any membership stays where it was.
    weights : array of shape (k,)
        Sum over the records of the membership to the power m.
    """
    squared = cdist(X, centers, "sqeuclidean")
    nearest = squared.min(axis=1, keepdims=True)
    # A record that coincides with centres belongs to these alone, in equal parts.
    closeness = np.where(squared == 0, 1.0, 0.0)
    np.divide(nearest, squared, out=closeness, where=squared > 0)
    memberships = closeness ** (1 / (m - 1))
    memberships /= memberships.sum(axis=1, keepdims=True)
    powers = memberships**m
    weights = powers.sum(axis=0)
    return mean_of(powers.T @ X, weights, otherwise=centers), weights


def client_fuzzy_cmeans(X: Floats, centers: Floats, m: float = 2.0) -> tuple[Floats, Floats]:
    """Fuzzy c-means from the given centres until it settles; returns what a step returns."""
    tolerance = TOLERANCE * np.sqrt(X.var(axis=0).sum())
    for _ in range(MAX_STEPS):
        before = centers
        centers, weights = client_fuzzy_step(X, before, m)
        if np.linalg.norm(centers - before, axis=1).max() <= tolerance:
            break
    return centers, weights


def server_average(
    local_centers: Sequence[Floats], weights: Sequence[Floats], centers: Floats
) -> Floats:
    """Weighted means of the clients' centres of the same index (avg1).

    A centre that weighs nothing at any client stays where it is in `centers`.
    """
    total = np.sum(weights, axis=0)
    sums = np.sum([w[:, None] * c for w, c in zip(weights, local_centers, strict=True)], axis=0)
    return mean_of(sums, total, otherwise=centers)


def server_kmeans(local_centers: Floats, n_clusters: int, rng: np.random.Generator) -> Floats:
    """K-means on the centres of all clients, whatever their order and weight (avg2)."""
    return kmeans(local_centers, n_clusters, rng, n_init=_RUNS)[0]


def central_kmeans(
    X: Floats, n_clusters: int, rng: np.random.Generator, n_init: int = 10
) -> Floats:
    """Centres of k-means on the pooled records, the best of `n_init` runs."""
    return kmeans(X, n_clusters, rng, n_init=n_init)[0]


def central_gmm(X: Floats, n_clusters: int, rng: np.random.Generator) -> GaussianMixture:
    """Gaussian mixture on the pooled records, fitted by EM from k-means++ seeds.

    FedGEM does not say which covariances its central mixture has. They are spherical here, one
    variance a component: nearest to FedGEM's own model, but without its assumption that it is 1.
    """
    seed = int(rng.integers(2**31))
    model = GaussianMixture(
        n_clusters, covariance_type="spherical", init_params="k-means++", random_state=seed
    )
    return model.fit(X)
