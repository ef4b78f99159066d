"""Federated cluster refinement, FedCRef (Nardi, Valerio and Passarella, "Federated Clustering").

Clients train one autoencoder a local cluster. Two clusters are linked when the model of each
reconstructs the other's records about as well as the other's own model does; linked clusters form
groups, each of which trains one model together; clients then hand their records to the models
that reconstruct them best, and so on until little changes.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from secure_fedclust.arrays import Floats, Ints

Bools = NDArray[np.bool_]
Normalisation = Literal["relative", "minmax"]


def close(own: Floats, others: Floats, theta: float, normalisation: Normalisation) -> Bools:
    """For which of a cluster's records other models do about as well as its own (Equation 2).

    Parameters
    ----------
    own : array of shape (n,)
        Errors of the cluster's records under the cluster's own model.
    others : array of shape (n, m)
        Errors of the same records under other models.
    theta : float
        Largest normalised difference of the two.
    normalisation : {"relative", "minmax"}
        "relative" divides a difference by the record's error under the own model, so that the
        answer for a record depends on this record alone. "minmax" is the paper's: it maps the
        differences of all records to [0, 1], for each other model by itself.

    Returns
    -------
    bool array of shape (n, m)
        Never true where an error is infinite.
    """
    with np.errstate(invalid="ignore"):  # a difference of infinities is not close
        differences = np.abs(own[:, np.newaxis] - others)
        if normalisation == "relative":
            return np.asarray(differences <= theta * own[:, np.newaxis]) & np.isfinite(differences)
        smallest = differences.min(axis=0, initial=np.inf)
        spread = differences.max(axis=0, initial=0) - smallest
        return np.asarray(differences - smallest <= theta * spread) & np.isfinite(differences)


def links(shares: Floats, owners: Ints, alpha: float) -> Bools:
    """Which clusters are linked: both ways, and between different clients only.

    Parameters
    ----------
    shares : array of shape (m, m)
        ``shares[a, b]`` is the share of cluster a's records for which model b is close.
    owners : int array of shape (m,)
        The client of each cluster.
    alpha : float
        The share that makes a link.

    Returns
    -------
    symmetric bool array of shape (m, m)
    """
    enough = shares >= alpha
    return np.asarray(enough & enough.T & (owners[:, np.newaxis] != owners))


def groups(links: Bools) -> Ints:
    """Number of each cluster's connected component, in order of appearance; -1 if alone."""
    _, components = connected_components(csr_array(links), directed=False)
    _, first, inverse, sizes = np.unique(
        components, return_index=True, return_inverse=True, return_counts=True
    )
    shared = np.flatnonzero(sizes >= 2)
    numbers = np.full(len(sizes), -1, dtype=np.int64)
    numbers[shared[np.argsort(first[shared])]] = np.arange(len(shared))
    return numbers[inverse]


def choose(counts: Floats | Ints, n_clusters: int) -> Ints:
    """The models a client keeps: those that are best for most of its records.

    Parameters
    ----------
    counts : array of shape (M,)
        For how many records each model is the best, perhaps with noise.
    n_clusters : int
        At most so many are kept.

    Returns
    -------
    sorted int array
        A model that is best for no record is not kept, which leaves the client with fewer
        clusters; the model with the largest count always is. Among equals, the first.
    """
    ranked = np.argsort(-counts, kind="stable")[:n_clusters]
    return np.sort(ranked[: max(1, np.count_nonzero(counts[ranked] > 0))])


def best(errors: Floats) -> Ints:
    """The model, among columns, that reconstructs each record best; among equals, the first."""
    return np.asarray(errors.argmin(axis=1), dtype=np.int64)


def refine(errors: Floats, n_clusters: int) -> tuple[Ints, Ints]:
    """Cluster a client's records anew by the models that reconstruct them best (Algorithm 2).

    The paper takes the model that is best for most of the records left, removes these records,
    and goes on. Removing them changes no other model's count, so that the models taken are those
    with the largest counts; and a record goes to the best of the models taken either way.

    Parameters
    ----------
    errors : array of shape (n, M)
        Error of each record under each model, the client's own and the groups'.
    n_clusters : int

    Returns
    -------
    chosen : sorted int array
        At most `n_clusters` models, see `choose`.
    labels : int array of shape (n,)
        Which of the chosen each record belongs to, as an index into `chosen`.
    """
    chosen = choose(np.bincount(best(errors), minlength=errors.shape[1]), n_clusters)
    return chosen, best(errors[:, chosen])


def agreement(old: Ints, new: Ints) -> float:
    """Share of records with the same label, after the best renaming (ACC, Equation 4)."""
    table = np.zeros((int(old.max()) + 1, int(new.max()) + 1), dtype=np.int64)
    np.add.at(table, (old, new), 1)
    return float(table[linear_sum_assignment(table, maximize=True)].sum() / len(old))


def settled(history: Sequence[tuple[float, float]]) -> bool:
    """Whether the federation has come to rest.

    Parameters
    ----------
    history : sequence of (number of groups, number of isolated clusters)
        One pair an iteration.

    Returns
    -------
    bool
        True if, over the last three iterations, the smallest of either number is within 10 % of
        the largest.
    """
    recent = np.array(history[-3:])
    if len(recent) < 3:
        return False
    return bool(np.all(10 * np.ptp(recent, axis=0) <= recent.max(axis=0)))


def dirty(labels: Ints, dirtiness: float, rng: np.random.Generator, n_clusters: int) -> Ints:
    """The paper's controlled start: each label is replaced by another one with a probability."""
    if n_clusters < 2:
        return labels.copy()
    others = (labels + rng.integers(1, n_clusters, len(labels))) % n_clusters
    return np.where(rng.random(len(labels)) < dirtiness, others, labels)
