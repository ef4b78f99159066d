"""Records that move between clusters in rounds of k-means, and what gives them away.

From one round to the next a record leaves a cluster, or is left alone in one. Whoever sees exact
sums and counts of every round reads such records off; a server that leaves out clusters of one
record, as FKM's paper does, stops the second and not the first.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.spatial.distance import cdist

from secure_fedclust.algorithms.lloyd import assign_and_sum, mean_of
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.audit.attacks.rehearsal import Outlets
from secure_fedclust.audit.attacks.views import anywhere, look
from secure_fedclust.parameters import check_counts
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.queries import CellSums
from secure_fedclust.protocols.cells import moved
from secure_fedclust.protocols.seeding import round_count_weight, round_radius

Round = tuple[Floats, Ints]
"""Sums and counts of every cluster."""

EXACTLY = 1e-4
"""A record is found to the last bit if it is this close, in units of the region's radius: what
clients send is on a grid, which is finer."""

_LUMPS = 8
_LUMP = 0.15


def watched_rounds(
    outlets: Outlets | None,
    *,
    n_records: int,
    n_clusters: int = 8,
    n_rounds: int = 12,
    n_features: int = 4,
    runs: int = 10,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """Records of a client that are found to the last bit in a run of k-means, on average.

    First where the server sees exact sums and counts in every round, then where it sees them as
    released; 0 without a way out.

    Parameters
    ----------
    outlets : Outlets or None
    n_records, n_clusters, n_rounds, n_features, runs : int
    rng : numpy.random.Generator
        For records and public centres; noise never comes from it.
    """
    check_counts(n_records=n_records, n_clusters=n_clusters, n_rounds=n_rounds, runs=runs)
    found = np.zeros((runs, 2))
    for i in range(runs):
        X = lumps(n_records, n_features, rng)
        start = anywhere(n_clusters, n_features, rng)
        found[i, 0] = _found(X, list(_exact_rounds(X, start, n_rounds)))
        if outlets is not None:
            found[i, 1] = _found(X, list(_released_rounds(outlets, X, start, n_rounds)))
    exact, released = found.mean(axis=0)
    return float(exact), float(released)


def given_away(rounds: Sequence[Round]) -> Floats:
    """What an observer of rounds takes for records: sums of one, and differences by one."""
    candidates = []
    for before, (sums, counts) in zip([None, *rounds[:-1]], rounds, strict=True):
        candidates.append(sums[counts == 1])
        if before is not None:
            change = counts - before[1]
            one = np.abs(change) == 1
            candidates.append((sums - before[0])[one] * change[one, None])
    return np.concatenate(candidates)


def lumps(n: int, n_features: int, rng: np.random.Generator) -> Floats:
    """Records in a few lumps, within the region."""
    centers = anywhere(_LUMPS, n_features, rng)
    records = rng.normal(centers[rng.integers(_LUMPS, size=n)], _LUMP * n_features**0.5)
    return _region(n_features).hold(records)


def _region(n_features: int) -> Domain:
    return Domain(np.zeros(n_features), np.ones(n_features), box=False)


def _exact_rounds(X: Floats, centers: Floats, n_rounds: int) -> Iterator[Round]:
    for _ in range(n_rounds):
        sums, counts = assign_and_sum(X, centers)
        yield sums, counts
        centers = mean_of(sums, counts, centers)


def _released_rounds(
    outlets: Outlets, X: Floats, centers: Floats, n_rounds: int
) -> Iterator[Round]:
    """The same with noise, each round for its share of the budget of a run."""
    k, d = centers.shape
    domain, radius = _region(d), round_radius(d, k)
    weight = round_count_weight(d, outlets.spec.adjacency)
    for _ in range(n_rounds):
        query = CellSums(centers, radius, weight)
        cells = look(outlets, query, [X], 1 / n_rounds).released()
        counts = np.rint(cells.counts).astype(np.int64)
        yield cells.sums + counts[:, None] * centers, counts
        centers = moved(cells, radius, domain)


def _found(X: Floats, rounds: Sequence[Round]) -> int:
    candidates = given_away(rounds)
    if not len(candidates):
        return 0
    closest = cdist(X, candidates).min(axis=1)
    return int((closest < EXACTLY * X.shape[1] ** 0.5).sum())
