"""K-means pieces that several systems share: seeds, one local step, weighted k-means."""

import warnings
from contextlib import nullcontext
from functools import cache

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from sklearn.cluster import KMeans, kmeans_plusplus
from sklearn.cluster._k_means_lloyd import lloyd_iter_chunked_dense
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils._openmp_helpers import _openmp_effective_n_threads
from threadpoolctl import ThreadpoolController

from secure_fedclust.arrays import Floats, Ints

_MANY_RECORDS = 1 << 15
_FAR = 1e4


def assign(X: Floats, centers: Floats) -> Ints:
    """Index of the nearest centre of each record."""
    return _lloyd_iteration(X, centers, average=False)[0].astype(np.int64)


def assign_and_sum(X: Floats, centers: Floats) -> tuple[Floats, Ints]:
    """Sum and number of the records nearest to each centre: one Lloyd step, not yet averaged.

    Parameters
    ----------
    X : array of shape (n, d)
        Records, C-contiguous.
    centers : array of shape (k, d)

    Returns
    -------
    sums : array of shape (k, d)
    counts : array of shape (k,)
        A centre that attracts nothing has a zero sum and a zero count.
    """
    k = len(centers)
    # scikit-learn's fused iteration is the fastest way to sum, but moves empty centres
    # elsewhere; where a centre came out empty its averages are of no use.
    fused = len(X) >= max(_MANY_RECORDS, 2 * k)
    labels, means = _lloyd_iteration(X, centers, average=fused)
    counts = np.bincount(labels, minlength=k)
    if fused and counts.all():
        return means * counts[:, None], counts
    one_hot = sp.csc_array((np.ones(len(X)), labels, np.arange(len(X) + 1)), shape=(k, len(X)))
    return one_hot @ X, counts


def mean_of(sums: Floats, counts: Ints | Floats, otherwise: Floats) -> Floats:
    """Sum over count, row by row; rows without any count are taken from `otherwise`."""
    filled = counts > 0
    means = otherwise.copy()
    means[filled] = sums[filled] / counts[filled, None]
    return means


def group_means(points: Floats, labels: Ints) -> Floats:
    """Mean of the points of each label, in the order of the labels that occur."""
    found, positions, counts = np.unique(labels, return_inverse=True, return_counts=True)
    sums = np.zeros((len(found), points.shape[1]))
    np.add.at(sums, positions, points)
    return np.asarray(sums / counts[:, None])


def kmeans_seeds(X: Floats, n_clusters: int, rng: np.random.Generator) -> Floats:
    """Up to `n_clusters` distinct records chosen by greedy k-means++."""
    n_clusters = min(n_clusters, count_distinct(X, n_clusters))
    return np.asarray(kmeans_plusplus(X, n_clusters, random_state=_seed(rng))[0])


def kmeans(
    X: Floats,
    n_clusters: int,
    rng: np.random.Generator,
    *,
    weights: Floats | Ints | None = None,
    n_init: int = 1,
) -> tuple[Floats, Ints]:
    """Centres and labels of weighted k-means, run to convergence from k-means++ seeds.

    Where there are fewer distinct points than `n_clusters`, each of them is a centre; every
    centre has at least one point.
    """
    n_clusters = min(n_clusters, count_distinct(X, n_clusters))
    model = KMeans(n_clusters, n_init=n_init, random_state=_seed(rng))
    weights = None if weights is None else np.asarray(weights, dtype=np.float64)
    # On few points threads wait for each other far longer than they work.
    threads = _threadpools().limit(limits=1) if len(X) < _MANY_RECORDS else nullcontext()
    with threads, warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(X, sample_weight=weights)
    # Points that differ by less than rounding can leave a centre without any.
    found, labels = np.unique(model.labels_, return_inverse=True)
    return np.asarray(model.cluster_centers_[found]), labels


def count_distinct(X: Floats, at_most: int) -> int:
    """Return how many different rows there are, without looking further than `at_most`."""
    # The first rows of real data nearly always suffice, and sorting a million is slow.
    head = len(np.unique(X[: 4 * at_most], axis=0))
    return at_most if head >= at_most else min(at_most, len(np.unique(X, axis=0)))


def _lloyd_iteration(
    X: Floats, centers: Floats, *, average: bool
) -> tuple[NDArray[np.int32], Floats]:
    # Distances are computed from squared norms, which drown differences far from the origin.
    offset = centers.mean(axis=0)
    if np.abs(offset).max() > _FAR * np.abs(centers - offset).max():
        labels, means = _lloyd_step(X - offset, centers - offset, average=average)
        return labels, means + offset
    return _lloyd_step(X, centers, average=average)


def _lloyd_step(X: Floats, centers: Floats, *, average: bool) -> tuple[NDArray[np.int32], Floats]:
    n, k = len(X), len(centers)
    labels = np.empty(n, dtype=np.int32)
    means = np.zeros_like(centers)
    threads = _openmp_effective_n_threads() if n >= _MANY_RECORDS else 1
    arguments = (X, np.ones(n), centers, means, np.zeros(k), labels, np.zeros(k), threads)
    if threads == 1:
        lloyd_iter_chunked_dense(*arguments, update_centers=average)
    else:
        # Each OpenMP thread calls BLAS; BLAS must not start threads of its own.
        with _threadpools().limit(limits=1, user_api="blas"):
            lloyd_iter_chunked_dense(*arguments, update_centers=average)
    return labels, means


@cache
def _threadpools() -> ThreadpoolController:
    return ThreadpoolController()


def _seed(rng: np.random.Generator) -> int:
    """Draw a seed for scikit-learn, which takes no numpy Generator."""
    return int(rng.integers(2**31))
