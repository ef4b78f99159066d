"""GOLD: one-shot clustering when clients hold fragments of clusters (Zhang et al., 2026).

Each client finds micro-clusters by competitive learning and sends their centroids. The server
learns on all of them at several granularities, describes every centroid by the cluster it is in
at each, and merges centroids with similar descriptions. Distances weigh all features alike to
begin with, so the caller must bring them to one scale first: the paper's scores are for features
z-scored over the full data set, which is no part of these functions.

The print does not determine the algorithm. Departures from it:

- Similarity is exp(-1/2 sum_m h_m (x_m - c_m)^2) on clients and server (Eqs. 7, 8 and 22).
- A rival is penalised by the ratio of full scores, not of similarities (Eq. 14).
- The sigmoid is 1 / (1 + exp(5 - 10 W)), from W = 1 and not from a weight of 1/k_0 (Eq. 15).
- Compactness beta is a plain mean, without the root (Eq. 20).
- A cluster is eliminated by running empty, not by a threshold on its weight; a cluster whose
  importance is undefined, such as one of a single record, gives its records up.
- Learning stops when no record moved, or after 31 passes; granularities stop when k repeats,
  whatever the objective.
- Matching levels are added up, without the norm (Eq. 25).
- With k* unknown, which the paper's experiments never try, k* is the k that repeated.
"""

import numpy as np

from secure_fedclust.algorithms.lloyd import group_means
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import ParameterError

MAX_UPDATES = 31
"""Updates of the modes; nothing guarantees that merging settles."""

MAX_RESTARTS = 10
"""How often the server learns again when the levels tell too few centroids apart."""


def client_micro_clusters(X: Floats, rng: np.random.Generator) -> Floats:
    """Centroids of a client's micro-clusters (FCPL, Section III-B).

    Parameters
    ----------
    X : array of shape (n, d)
        Records, on a scale common to all clients. They are shuffled first: learning is online.

    Returns
    -------
    centroids : array of shape (k, d)
        How many is for the contest to decide, at most half the records, rounded.
    """
    X = rng.permutation(X)
    return group_means(X, _compete(X, _half(len(X)), rng))


def server_granularities(centroids: Floats, rng: np.random.Generator) -> Ints:
    """Cluster of each micro-centroid at each granularity (MCPL, Eq. 23).

    Learning starts from half as many seeds as there are centroids, then again from as many fresh
    seeds as clusters were found, until it finds as many as it started from.

    Returns
    -------
    encoding : array of shape (n_centroids, n_levels)
        Levels from fine to coarse; in each, clusters are numbered from 0.
    """
    levels: list[Ints] = []
    n_seeds = _half(len(centroids))
    while True:
        labels = _compete(centroids, n_seeds, rng)
        found = int(labels.max()) + 1
        if levels and found == n_seeds:
            return np.column_stack(levels)
        levels.append(labels)
        n_seeds = found


def server_merge(encoding: Ints, n_clusters: int, rng: np.random.Generator) -> Ints:
    """Merge centroids whose levels match, each level weighted per cluster (REMC, Eqs. 24-29).

    Returns
    -------
    labels : array of shape (n_centroids,)
        Numbered from 0 without gaps. There are fewer than `n_clusters` where the encoding has
        fewer distinct rows, or where a cluster ran empty.
    """
    if n_clusters < 1:
        raise ParameterError(f"n_clusters is {n_clusters}: ask for at least one, or None")
    modes = rng.permutation(np.unique(encoding, axis=0))[:n_clusters]
    weights = np.full(modes.shape, 1 / encoding.shape[1])
    labels = _best_match(encoding, modes, weights)
    for _ in range(MAX_UPDATES):
        modes, weights = _describe(encoding, labels, modes, weights)
        before, labels = labels, _best_match(encoding, modes, weights)
        if np.array_equal(labels, before):
            break
    return np.unique(labels, return_inverse=True)[1]


def server_centers(centroids: Floats, labels: Ints) -> Floats:
    """Unweighted mean of the centroids of each cluster, in the order of the labels."""
    return group_means(centroids, labels)


def server_cluster(centroids: Floats, n_clusters: int | None, rng: np.random.Generator) -> Floats:
    """Global centres from the micro-centroids of all clients.

    Parameters
    ----------
    centroids : array of shape (n_centroids, d)
        Those of all clients, stacked.
    n_clusters : int or None
        Number of clusters (the paper's k*). None takes as many as the coarsest granularity has,
        which is the number that learning from fresh seeds could not reduce any further.

    Returns
    -------
    centers : array of shape (k, d)
        Fewer than `n_clusters` when there are too few distinct micro-clusters, see `server_merge`.
    """
    encoding = server_granularities(centroids, rng)
    if n_clusters is None:
        n_clusters = int(encoding[:, -1].max()) + 1
    for _ in range(MAX_RESTARTS):
        if len(np.unique(encoding, axis=0)) >= n_clusters:
            break
        encoding = server_granularities(centroids, rng)
    return server_centers(centroids, server_merge(encoding, n_clusters, rng))


def _compete(X: Floats, n_seeds: int, rng: np.random.Generator) -> Ints:
    # Its compiled loop needs numba, for which users of other systems should not have to wait.
    from secure_fedclust.algorithms.competitive import compete

    return compete(X, n_seeds, rng)


def _half(n: int) -> int:
    return max(1, round(0.5 * n))


def _best_match(encoding: Ints, modes: Ints, weights: Floats) -> Ints:
    """Cluster whose mode agrees with each row in levels of the greatest weight (Eqs. 24-25)."""
    matches = np.zeros((len(encoding), len(modes)))
    for level in range(encoding.shape[1]):
        matches += weights[:, level] * (encoding[:, level, None] == modes[:, level])
    return np.asarray(matches.argmax(axis=1))


def _describe(encoding: Ints, labels: Ints, modes: Ints, weights: Floats) -> tuple[Ints, Floats]:
    """Mode and level weights of each cluster (Eqs. 26-29); an empty one keeps what it had."""
    n, n_levels = encoding.shape
    k = len(modes)
    inside = np.bincount(labels, minlength=k)[:, None]
    common = np.empty_like(modes)
    worth = np.empty_like(weights)
    for level in range(n_levels):
        codes = encoding[:, level]
        n_codes = int(codes.max()) + 1
        counts = np.bincount(labels * n_codes + codes, minlength=k * n_codes).reshape(k, n_codes)
        share = counts / np.maximum(inside, 1)
        outside_share = (counts.sum(axis=0) - counts) / np.maximum(n - inside, 1)
        difference = np.sqrt(((share - outside_share) ** 2).sum(axis=1) / 2)
        common[:, level] = counts.argmax(axis=1)
        worth[:, level] = difference * (share**2).sum(axis=1)
    total = worth.sum(axis=1, keepdims=True)
    # A cluster that is a sample of the whole at every level prefers none of them.
    new_weights = np.where(total > 0, worth / np.where(total > 0, total, 1), 1 / n_levels)
    return np.where(inside > 0, common, modes), np.where(inside > 0, new_weights, weights)
