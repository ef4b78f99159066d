"""Clusters fragmented over clients, and a measure of how fragmented they are (GOLD paper).

The paper calls clients "Non-ICD" (not independently and completely distributed) when each holds
pieces of some clusters, cut at its own granularity.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans

from secure_fedclust.algorithms.lloyd import count_distinct
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import DataError
from secure_fedclust.parameters import Seed, check_counts

MIN_PIECES, MAX_PIECES = 2, 5
"""Range of the number of pieces that a cluster is cut into; the paper leaves k_sub open."""

_MIN_RECORDS = 2
_DRAWS = 200
_MAX_POINTS = 500
_BANDWIDTHS = np.geomspace(0.05, 2.0, 9)


def non_icd_partition(X: ArrayLike, y: ArrayLike, n_clients: int, *, seed: Seed) -> list[Ints]:
    """Each client holds a sample of some pieces of some clusters (GOLD, Section IV-A).

    A client draws how many clusters it sees, and which. It cuts each into 2 to 5 pieces by k-means
    from random starts and keeps some of them, at least one. Of the records in these it holds a
    quarter to three quarters, drawn at random.

    Parameters
    ----------
    X : array of shape (n, d)
        Records. Scale features first: the cuts are made by distance.
    y : array of shape (n,)
        True clusters.
    n_clients : int
    seed : int or numpy Generator

    Returns
    -------
    list of arrays
        Increasing row numbers per client, at least two: a draw that gives fewer is drawn again.
        Clients draw independently of each other, so **one row may be held by several clients**
        and some rows by none.

    Raises
    ------
    DataError
        If X and y do not match, or 200 draws gave a client fewer than two records.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(300, 2))
    >>> parts = non_icd_partition(X, np.repeat([0, 1, 2], 100), 4, seed=0)
    >>> len(parts), all(len(part) < 225 for part in parts)
    (4, True)
    """
    records, clusters = np.asarray(X, dtype=np.float64), np.asarray(y)
    if records.ndim != 2 or clusters.shape != records.shape[:1]:
        raise DataError(f"X has shape {records.shape} and y {clusters.shape}: rows must match")
    check_counts(n_clients=n_clients)
    rng = np.random.default_rng(seed)
    names, codes = np.unique(clusters, return_inverse=True)
    members = [np.flatnonzero(codes == c) for c in range(len(names))]
    return [_draw_client(records, members, rng) for _ in range(n_clients)]


def _draw_client(X: Floats, members: list[Ints], rng: np.random.Generator) -> Ints:
    for _ in range(_DRAWS):
        n_seen = rng.integers(1, len(members), endpoint=True)
        seen = rng.choice(len(members), n_seen, replace=False)
        pool = np.concatenate([_some_pieces(X, members[cluster], rng) for cluster in seen])
        least, most = -(-len(pool) // 4), 3 * len(pool) // 4
        if most >= least:
            size = rng.integers(least, most, endpoint=True)
            if size >= _MIN_RECORDS:
                return np.sort(rng.choice(pool, size, replace=False))
    raise DataError(
        f"all of {_DRAWS} draws gave a client fewer than {_MIN_RECORDS} records: "
        "the clusters are too small to be cut and sampled, use larger ones"
    )


def _some_pieces(X: Floats, rows: Ints, rng: np.random.Generator) -> Ints:
    n_pieces = int(rng.integers(MIN_PIECES, MAX_PIECES, endpoint=True))
    n_pieces = count_distinct(X[rows], n_pieces)
    start = int(rng.integers(2**31))
    piece_of = KMeans(n_pieces, init="random", n_init=1, random_state=start).fit_predict(X[rows])
    n_kept = rng.integers(1, n_pieces, endpoint=True)
    kept = rng.choice(n_pieces, n_kept, replace=False)
    return rows[np.isin(piece_of, kept)]


def non_icd_degree(parts: Sequence[ArrayLike]) -> float:
    """Mean divergence between the densities of two clients' records, from 0 to 1 (lambda, Eq. 1).

    Zero when all clients hold the same records, one when no two have a region in common.

    Parameters
    ----------
    parts : sequence of arrays of shape (n_l, d)
        Each client's records, at least two. Scale features first: the kernel is round.

    Notes
    -----
    The formula as printed is not well defined. Departures from it:

    - Eq. 1 divides the sum over pairs a < b by L(L-1), which halves the mean; here it is the mean.
    - Eq. 2 is for one feature (with h twice); here the Gaussian kernel is round, in d features.
    - Eq. 3 adds up densities taken at different points, each client's own; here both densities
      are known at the records of either.
    - Eq. 4 weighs a client's records by their density a second time, and the weights do not add
      up to one; here it is the mean over the records, which estimates the divergence it names.
    - A client's record is left out of its density at this record. In many features its own kernel
      would outweigh all others, and samples of one distribution would seem to be disjoint.
    - "Cross-validated likelihood" is that of which of two clients a record left out belongs to,
      and one bandwidth, of nine from 1/20 to twice the pooled standard deviation, serves both.
      With the likeliest bandwidth of each density the estimate is mostly noise where features
      are many. Any bandwidth gives a lower bound, up to chance, so the largest value is taken.
    - Of a larger client 500 evenly spaced rows stand for all.

    Examples
    --------
    >>> import numpy as np
    >>> near, far = np.random.default_rng(0).normal(size=(2, 50, 2)) + [[[0, 0]], [[50, 0]]]
    >>> round(non_icd_degree([near, near]), 3), round(non_icd_degree([near, far]), 3)
    (0.0, 1.0)
    """
    samples = [_thin(np.asarray(part, dtype=np.float64)) for part in parts]
    if len(samples) < 2 or len({sample.shape[1:] for sample in samples}) > 1:
        shapes = [np.shape(part) for part in parts]
        raise DataError(f"parts of shapes {shapes}: pass two or more, with the same features")
    points = np.vstack(samples)
    spread = float(np.sqrt(points.var(axis=0).mean()))
    if spread == 0:
        return 0.0
    densities = [_log_densities(points, sample, spread * _BANDWIDTHS) for sample in samples]
    owners = np.repeat(np.arange(len(samples)), [len(sample) for sample in samples])
    pairs = combinations(range(len(samples)), 2)
    return float(np.mean([_divergence(densities[a], densities[b], owners, a, b) for a, b in pairs]))


def _divergence(log_p: Floats, log_q: Floats, owners: Ints, a: int, b: int) -> float:
    """Jensen-Shannon divergence in bits by the best bandwidth (Eqs. 3-4)."""
    ratio = log_p - log_q
    # log2 of p / ((p + q) / 2) is 1 - log2(1 + q / p)
    nats = np.logaddexp(0, -ratio[:, owners == a]).mean(axis=1)
    nats += np.logaddexp(0, ratio[:, owners == b]).mean(axis=1)
    return max(0.0, 1 - float(nats.min() / (2 * np.log(2))))


def _log_densities(points: Floats, sample: Floats, bandwidths: Floats) -> Floats:
    """Log density of the sample at each point by each bandwidth, up to a constant of the latter.

    Where a point is in the sample, it is left out (once).
    """
    squared = np.asarray(cdist(points, sample, "sqeuclidean"))
    rows, nearest = np.arange(len(points)), squared.argmin(axis=1)
    own = squared[rows, nearest] == 0
    squared[rows[own], nearest[own]] = np.inf
    least = squared.min(axis=1)
    squared -= least[:, None]
    n_others = len(sample) - own
    return np.array(
        [
            np.log(np.exp(squared / (-2 * h**2)).sum(axis=1) / n_others) - least / (2 * h**2)
            for h in bandwidths
        ]
    )


def _thin(records: Floats) -> Floats:
    if records.ndim != 2 or len(records) < _MIN_RECORDS or not np.isfinite(records).all():
        raise DataError(
            f"a client's records of shape {records.shape}: pass at least two rows of finite values"
        )
    n = len(records)
    return records[np.linspace(0, n - 1, min(n, _MAX_POINTS)).round().astype(np.int64)]
