"""Competitive penalised learning: clusters contend for records, and the losers run empty.

GOLD (Zhang et al., 2026) runs it on clients and on the server. It starts from many more clusters
than there can be. Each record in turn goes to the cluster that scores highest on it; that cluster
gains weight and the runner-up loses some, so that of two clusters in one place only one lives on.
"""

import numpy as np
from numba import njit

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import DataError

LEARNING_RATE = 0.05
"""What a win adds to a cluster's weight before the sigmoid (the paper's eta)."""

MAX_PASSES = 31
"""The contest need not settle: weights go on changing, and records with them."""


def compete(X: Floats, n_seeds: int, rng: np.random.Generator) -> Ints:
    """Cluster by competitive penalised learning (Algorithm A.1).

    Parameters
    ----------
    X : array of shape (n, d)
        Records, in the order in which they are contended for.
    n_seeds : int
        Clusters to start with, each from one record (the paper's k_0). No two start from equal
        records, so there may be fewer.

    Returns
    -------
    labels : array of shape (n,)
        Cluster of each record; the k clusters that survive are numbered from 0 to k - 1.
    """
    X = np.ascontiguousarray(X, dtype=np.float64)
    if X.ndim != 2 or X.size == 0:
        raise DataError(f"records of shape {X.shape}: pass a table of at least one row and column")
    if not np.isfinite(X).all():
        raise DataError("records hold values that are not finite: drop or impute them first")
    n, d = X.shape
    first_of_each = np.unique(X, axis=0, return_index=True)[1]
    seeds = rng.permutation(first_of_each)[:n_seeds]
    k = len(seeds)
    labels = np.zeros(n, dtype=np.int64)
    if k == 1:
        return labels

    owners = np.full(n, -1)
    owners[seeds] = np.arange(k)
    importance = np.full((k, d), 1 / d)
    credit, wins, all_wins = np.ones(k), np.ones(k), k
    for _ in range(MAX_PASSES):
        moved = _contend(X, owners, importance, credit, wins, all_wins)
        present, labels = np.unique(owners, return_inverse=True)
        importance = feature_importance(X, labels)
        contenders = importance.any(axis=1)
        if not moved or not contenders.any():
            break
        # A cluster without importance never contends again: its records are free to be taken.
        owners = np.where(contenders, np.cumsum(contenders) - 1, -1)[labels]
        importance = importance[contenders]
        credit, wins = credit[present][contenders], wins[present][contenders]
        all_wins += n
    return labels


def feature_importance(X: Floats, labels: Ints) -> Floats:
    """How much each feature tells a cluster from the rest, normalised (H; Eqs. 16-21).

    A feature that is constant inside the cluster and constant outside it weighs nothing. A cluster
    of one record, or of all, or without a feature that weighs anything, gets a row of zeros.

    Parameters
    ----------
    X : array of shape (n, d)
    labels : array of shape (n,)
        Every number from 0 to k - 1 occurs.

    Returns
    -------
    importance : array of shape (k, d)
    """
    n = len(X)
    counts = np.bincount(labels)
    starts = np.cumsum(counts) - counts
    inside, outside = counts[:, None], n - counts[:, None]

    def sum_by_cluster(values: Floats) -> Floats:
        return np.asarray(np.add.reduceat(values, starts, axis=0))

    # Differences from a record of the same group are exactly zero where a feature is constant.
    rows = X[np.argsort(labels, kind="stable")] - X[0]
    anchors = rows[starts]
    rows -= np.repeat(anchors, counts, axis=0)
    offsets = sum_by_cluster(rows) / inside
    rows -= np.repeat(offsets, counts, axis=0)
    scatter = sum_by_cluster(rows**2)
    similarity = sum_by_cluster(np.exp(-0.5 * rows**2)) / inside

    # What lies outside follows from the whole: no second pass over the records per cluster.
    whole = X - X[0]
    center = whole.mean(axis=0)
    whole_scatter = ((whole - center) ** 2).sum(axis=0)
    from_center = anchors + offsets - center
    gap = from_center * n / np.maximum(outside, 1)
    outside_scatter = whole_scatter - scatter - inside * from_center * gap
    outside_scatter[outside_scatter < 1e-12 * whole_scatter] = 0  # rounding, not variance

    variance = scatter / np.maximum(inside - 1, 1)
    outside_variance = outside_scatter / np.maximum(outside - 1, 1)
    both = variance + outside_variance
    constant = both == 0
    both[constant] = 1
    overlap = np.sqrt(2 * np.sqrt(variance) * np.sqrt(outside_variance) / both)
    overlap *= np.exp(-(gap**2) / (4 * both))
    difference = np.sqrt(np.maximum(1 - overlap, 0))

    importance = difference * similarity
    importance[constant] = 0
    importance[(counts == 1) | (counts == n)] = 0
    total = importance.sum(axis=1, keepdims=True)
    return np.asarray(importance / np.where(total > 0, total, 1))


@njit(cache=True, nogil=True)
def _contend(X, owners, importance, credit, wins, all_wins):  # type: ignore[no-untyped-def]
    """One pass over the records; updates owners, credit and wins, and says how many moved.

    Scores are compared by their logarithms, so that a far outlier does not score zero everywhere.
    """
    n, d = X.shape
    k = len(credit)
    counts = np.zeros(k)
    sums = np.zeros((k, d))
    for i in range(n):
        if owners[i] >= 0:
            counts[owners[i]] += 1
            sums[owners[i]] += X[i]
    means = sums / counts.reshape(-1, 1)
    log_weight = np.empty(k)
    for j in range(k):
        log_weight[j] = _log_sigmoid(10 * credit[j] - 5)

    moved = 0
    for i in range(n):
        home = owners[i]
        winner, rival = -1, -1
        best, second = -np.inf, -np.inf
        # The present owner goes first: it nearly always sets a bar that cuts the others short.
        for turn in range(-1, k):
            j = home if turn < 0 else turn
            if j < 0 or counts[j] == 0 or (turn == home and turn >= 0):
                continue
            # Half the distance can only lower a score from the weight: past this, j is no rival.
            limit = 2 * (log_weight[j] - second) * (1 + 1e-12) + 1e-12
            distance = 0.0
            for m in range(d):
                distance += importance[j, m] * (X[i, m] - means[j, m]) ** 2
                if distance > limit:
                    break
            if distance > limit:
                continue
            score = np.log1p(-wins[j] / all_wins) + log_weight[j] - 0.5 * distance
            if winner < 0 or score > best or (score == best and j < winner):
                winner, rival = j, winner
                best, second = score, best
            elif rival < 0 or score > second or (score == second and j < rival):
                rival, second = j, score

        credit[winner] += LEARNING_RATE
        log_weight[winner] = _log_sigmoid(10 * credit[winner] - 5)
        if rival >= 0:
            credit[rival] -= LEARNING_RATE * np.exp(second - best)
            log_weight[rival] = _log_sigmoid(10 * credit[rival] - 5)
        wins[winner] += 1
        all_wins += 1
        if winner != home:
            moved += 1
            owners[i] = winner
            counts[winner] += 1
            for m in range(d):
                sums[winner, m] += X[i, m]
                means[winner, m] = sums[winner, m] / counts[winner]
            if home >= 0:
                counts[home] -= 1
                for m in range(d):
                    sums[home, m] -= X[i, m]
                    means[home, m] = sums[home, m] / max(counts[home], 1)
    return moved


@njit(cache=True, nogil=True)
def _log_sigmoid(z):  # type: ignore[no-untyped-def]
    return -np.log1p(np.exp(-z)) if z > 0 else z - np.log1p(np.exp(z))
