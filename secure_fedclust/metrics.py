"""How good a clustering is: against true labels, against true centres, and without either.

Scores are computed on raw records or labels and carry no protection: they are for experiments, or
stay with the client.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score, silhouette_score
from sklearn.metrics.cluster import contingency_matrix

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import DataError, ParameterError
from secure_fedclust.records import check_records

_DISTANCES_AT_ONCE = 1 << 20


def adjusted_rand(y: ArrayLike, labels: ArrayLike) -> float:
    """Adjusted Rand index: 1 for equal clusterings, 0 on average for unrelated ones.

    Examples
    --------
    >>> adjusted_rand([0, 0, 1, 1], [7, 7, 3, 3])
    1.0
    """
    return float(adjusted_rand_score(*_check_labels(y, labels)))


def normalized_mutual_info(y: ArrayLike, labels: ArrayLike) -> float:
    """Mutual information over the arithmetic mean of the entropies, 2 I / (H + H).

    Examples
    --------
    >>> normalized_mutual_info([0, 0, 1, 1], [0, 1, 0, 1])
    0.0
    """
    return float(normalized_mutual_info_score(*_check_labels(y, labels)))


def purity(y: ArrayLike, labels: ArrayLike) -> float:
    """Share of records that are of their cluster's most frequent class.

    Examples
    --------
    >>> purity([0, 0, 1, 1], [0, 0, 0, 1])
    0.75
    """
    table = contingency_matrix(*_check_labels(y, labels))
    return float(table.max(axis=0).sum() / table.sum())


def accuracy(y: ArrayLike, labels: ArrayLike) -> float:
    """Share of records that are right under the best one-to-one naming of clusters by classes.

    Clusters beyond the number of classes get no name, and all their records are wrong.

    Examples
    --------
    >>> accuracy([0, 0, 1, 1], [1, 1, 0, 2])
    0.75
    """
    table = contingency_matrix(*_check_labels(y, labels))
    return float(table[linear_sum_assignment(table, maximize=True)].sum() / table.sum())


def estimated_k(labels: ArrayLike) -> int:
    """Number of different labels.

    Examples
    --------
    >>> estimated_k([4, 4, 9])
    2
    """
    return int(_check_label_array(labels, "labels").max()) + 1


def weighted_client_score(
    score: Callable[[ArrayLike, ArrayLike], float],
    truths: Sequence[ArrayLike],
    labels: Sequence[ArrayLike],
) -> float:
    """Mean of the clients' own scores, weighted by their numbers of records (FedGEM, D.3).

    Parameters
    ----------
    score : callable
        A function of true and found labels, such as `adjusted_rand`.
    truths, labels : sequences of arrays
        True and found labels, one array per client, in the same order.

    Examples
    --------
    >>> weighted_client_score(purity, [[0, 0, 1], [0]], [[0, 0, 0], [5]])
    0.75
    """
    if len(truths) != len(labels) or len(truths) == 0:
        raise DataError(
            f"true labels of {len(truths)} clients and found labels of {len(labels)}: pass one "
            "array per client in both, and at least one"
        )
    scores = [score(y, found) for y, found in zip(truths, labels, strict=True)]
    return float(np.average(scores, weights=[np.size(y) for y in truths]))


def silhouette(
    X: ArrayLike,
    labels: ArrayLike,
    *,
    sample_size: int | None = None,
    seed: int | np.random.Generator | None = None,
) -> float:
    """Mean silhouette: how much nearer records are to their own cluster than to the next.

    Parameters
    ----------
    X : array of shape (n, d)
    labels : array of shape (n,)
        Between 2 and n - 1 different labels.
    sample_size : int, optional
        Score this many records drawn at random instead of all, because the time grows as their
        square.
    seed : int or numpy Generator, optional
        For the draw.

    Examples
    --------
    >>> round(silhouette([[0.0], [0.1], [9.0], [9.1]], [0, 0, 1, 1]), 3)
    0.989
    """
    records = check_records(X, "X")
    codes = _check_label_array(labels, "labels")
    if len(codes) != len(records):
        raise DataError(f"X has {len(records)} records and labels {len(codes)}: they must match")
    if sample_size is not None and sample_size < 3:
        raise ParameterError(f"sample_size={sample_size!r}: two clusters take at least 3 records")
    if sample_size is not None and sample_size < len(records):
        chosen = np.random.default_rng(seed).choice(len(records), sample_size, replace=False)
        records, codes = records[chosen], codes[chosen]
    if not 2 <= len(np.unique(codes)) < len(codes):
        raise DataError(
            f"{len(np.unique(codes))} clusters among {len(codes)} records have no silhouette: it "
            "takes at least 2 clusters and fewer than records"
        )
    return float(silhouette_score(records, codes))


def simplified_silhouette(X: ArrayLike, centers: ArrayLike) -> float:
    """Mean of ``1 - a / b``, a and b a record's distances to its nearest and next centre.

    The silhouette with centres in place of the clusters' records, so that it needs no distances
    between records (FKM, 4.5).

    Examples
    --------
    >>> simplified_silhouette([[0.0], [1.0]], [[0.0], [3.0]])
    0.75
    """
    total, count = client_simplified_silhouette(X, centers)
    return total / count


def client_simplified_silhouette(X: ArrayLike, centers: ArrayLike) -> tuple[float, int]:
    """One client's sum over records and their number; each record adds between 0 and 1.

    Both are exact. To send them out under differential privacy takes noise and a charge.
    """
    records, places = _check_pair_of_points(X, centers)
    if len(places) < 2:
        raise DataError("the simplified silhouette compares two centres: pass at least 2")
    total = 0.0
    for block in _blocks(records, len(places)):
        nearest, following = np.partition(cdist(block, places), 1, axis=1)[:, :2].T
        # A record on which two centres coincide is as near to either: a / b counts as 1.
        ratio = np.divide(nearest, following, out=np.ones(len(block)), where=following > 0)
        total += float((1.0 - ratio).sum())
    return total, len(records)


def server_simplified_silhouette(sums: Sequence[float], counts: Sequence[int]) -> float:
    """The score over all clients' records from each client's sum and count."""
    if len(sums) != len(counts) or sum(counts) <= 0:
        raise DataError(
            f"{len(sums)} sums and {len(counts)} counts: pass one of each per client, for at "
            "least one record"
        )
    return float(sum(sums) / sum(counts))


def matched_center_distance(found: ArrayLike, true: ArrayLike) -> float:
    """Frobenius norm of found minus true centres, matched one to one at the least cost.

    Tables 1 and 7 to 9 of FeCA print this divided by 10,000.

    Parameters
    ----------
    found : array of shape (m, d)
    true : array of shape (k, d)

    Notes
    -----
    With more found than true centres, the surplus ones are ignored. With fewer, every true centre
    that stays without a partner counts with its distance to the nearest found one. (FeCA's
    Appendix E leaves such centres out, which makes a method look better the more it loses.)

    Examples
    --------
    >>> matched_center_distance([[5.0, 0.0], [0.0, 3.0]], [[0.0, 0.0], [5.0, 4.0]])
    5.0
    """
    ours, theirs = _check_pair_of_points(found, true, ("found", "true"))
    squared = cdist(ours, theirs, "sqeuclidean")
    rows, columns = linear_sum_assignment(squared)
    per_center = squared.min(axis=0)
    per_center[columns] = squared[rows, columns]
    return float(np.sqrt(per_center.sum()))


def nicv(X: ArrayLike, centers: ArrayLike) -> float:
    """Normalised intra-cluster variance: mean squared distance to the nearest centre.

    Examples
    --------
    >>> nicv([[0.0], [1.0], [4.0]], [[0.0], [5.0]])
    0.6666666666666666
    """
    records, places = _check_pair_of_points(X, centers)
    blocks = _blocks(records, len(places))
    return sum(
        float(cdist(block, places, "sqeuclidean").min(axis=1).sum()) for block in blocks
    ) / len(records)


def _blocks(X: Floats, n_centers: int) -> Iterator[Floats]:
    """Consecutive rows, few enough that their distances to all centres fit into memory."""
    rows = max(1, _DISTANCES_AT_ONCE // n_centers)
    return (X[start : start + rows] for start in range(0, len(X), rows))


def _check_labels(y: ArrayLike, labels: ArrayLike) -> tuple[Ints, Ints]:
    truth, found = _check_label_array(y, "y"), _check_label_array(labels, "labels")
    if len(truth) != len(found):
        raise DataError(f"y has {len(truth)} entries and labels {len(found)}: they must match")
    return truth, found


def _check_label_array(labels: ArrayLike, name: str) -> Ints:
    array = np.asarray(labels)
    if array.ndim != 1 or len(array) == 0:
        raise DataError(f"{name} has shape {array.shape}: pass one label per record, at least one")
    return np.unique(array, return_inverse=True)[1].astype(np.int64)


def _check_pair_of_points(
    first: ArrayLike, second: ArrayLike, names: tuple[str, str] = ("X", "centers")
) -> tuple[Floats, Floats]:
    points = check_records(first, names[0])
    return points, check_records(second, names[1], n_features=points.shape[1])
