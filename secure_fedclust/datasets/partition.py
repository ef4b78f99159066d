"""Ways to divide one data set among clients, as the papers' experiments do.

Each function takes records `X` and labels `y` (``None`` where it does not look at them) and
returns one increasing array of row numbers per client. No row is given to two clients, and no
client is left without records: a draw that does so is drawn again.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import DataError, ParameterError
from secure_fedclust.parameters import Seed, check_counts, check_positive
from secure_fedclust.records import check_records

_DRAWS = 200


def iid_partition(X: ArrayLike, y: ArrayLike | None, n_clients: int, *, seed: Seed) -> list[Ints]:
    """Equal parts (sizes differ by one at most) of the shuffled rows.

    Examples
    --------
    >>> import numpy as np
    >>> [len(part) for part in iid_partition(np.zeros((10, 2)), None, 3, seed=0)]
    [4, 3, 3]
    """
    n = _check_sizes(X, y, n_clients)
    order = np.random.default_rng(seed).permutation(n)
    return [np.sort(part) for part in np.array_split(order, n_clients)]


def dirichlet_partition(
    X: ArrayLike,
    y: ArrayLike | None,
    n_clients: int,
    alpha: float,
    *,
    min_size: int = 1,
    seed: Seed,
) -> list[Ints]:
    """For each class draw the clients' shares from Dirichlet(alpha) and split its rows by them.

    Parameters
    ----------
    X : array of shape (n, d)
        Only its length matters.
    y : array of shape (n,)
        Classes.
    n_clients : int
    alpha : float
        Small: each class sits with few clients. Large: every client has a bit of every class.
    min_size : int, default=1
        Draw again until every client has at least this many records.
    seed : int or numpy Generator

    Raises
    ------
    DataError
        If 200 draws all left some client with fewer than `min_size` records.

    Examples
    --------
    >>> import numpy as np
    >>> y = np.repeat([0, 1, 2], 100)
    >>> parts = dirichlet_partition(np.zeros((300, 2)), y, 4, 0.5, seed=0)
    >>> sum(len(part) for part in parts)
    300
    """
    n = _check_sizes(X, y, n_clients)
    classes = _class_rows(y)
    check_positive(alpha=alpha)
    check_counts(min_size=min_size)
    if n_clients * min_size > n:
        raise ParameterError(
            f"{n_clients} clients of at least {min_size} records need more than {n}: lower one"
        )
    rng = np.random.default_rng(seed)

    def draw() -> Ints:
        owner = np.empty(n, dtype=np.int64)
        for rows in classes:
            shares = rng.dirichlet(np.full(n_clients, alpha))
            owner[rng.permutation(rows)] = np.repeat(np.arange(n_clients), _cut(shares, len(rows)))
        return owner

    return _draw_until_filled(draw, n_clients, min_size, "lower n_clients or raise alpha")


def distance_partition(
    X: ArrayLike,
    y: ArrayLike | None,
    n_clients: int,
    beta: float,
    *,
    locations: ArrayLike | None = None,
    seed: Seed,
) -> list[Ints]:
    """Clients have a place in the data field and take mostly what is near (FKM, 4.1).

    A client at distance d accepts a record with probability ``1 - exp(-beta / d)``. A record that
    several clients accept goes to one of them at random, one that none accepts to the nearest.

    Parameters
    ----------
    X : array of shape (n, d)
    y : array of shape (n,) or None
        Not looked at.
    n_clients : int
    beta : float
        Small: clients hold their own region. Large: nearly everything is accepted by all, and
        clients look alike.
    locations : array of shape (n_clients, d), optional
        The clients' places; drawn uniformly from the records' bounding box if not given.
    seed : int or numpy Generator

    Examples
    --------
    >>> from secure_fedclust.datasets import fkm_grid
    >>> X, y, _ = fkm_grid(seed=0)
    >>> parts = distance_partition(X, y, 5, beta=0.1, seed=0)
    >>> sum(len(part) for part in parts)
    800
    """
    n = _check_sizes(X, y, n_clients)
    records = check_records(X, "X")
    check_positive(beta=beta)
    rng = np.random.default_rng(seed)
    given = None if locations is None else np.asarray(locations, dtype=np.float64)
    if given is not None and given.shape != (n_clients, records.shape[1]):
        raise ParameterError(
            f"locations has shape {given.shape}: it needs one row per client and one column per "
            f"feature, {(n_clients, records.shape[1])}"
        )
    low, high = records.min(axis=0), records.max(axis=0)

    def draw() -> Ints:
        places = rng.uniform(low, high, (n_clients, len(low))) if given is None else given
        distance = np.column_stack([np.linalg.norm(records - place, axis=1) for place in places])
        with np.errstate(divide="ignore"):
            accepted = rng.random((n, n_clients)) < -np.expm1(-beta / distance)
        one_of_them = np.where(accepted, rng.random((n, n_clients)), -1.0).argmax(axis=1)
        owner: Ints = np.where(accepted.any(axis=1), one_of_them, distance.argmin(axis=1))
        return owner

    return _draw_until_filled(draw, n_clients, 1, "lower n_clients, raise beta or move locations")


def cluster_subset_partition(
    X: ArrayLike,
    y: ArrayLike | None,
    n_clients: int,
    *,
    n_local_clusters: int | Sequence[int] | None = None,
    client_shares: Sequence[float] | None = None,
    cluster_imbalance: bool = False,
    seed: Seed,
) -> list[Ints]:
    """Each client holds records of some of the clusters only (FedGEM, Section 6 and D.6).

    Clusters are dealt to clients at random such that each is held by at least one, provided that
    clients together hold as many as there are; rows of a cluster that nobody holds are not used.

    Parameters
    ----------
    X : array of shape (n, d)
        Only its length matters.
    y : array of shape (n,)
        True clusters.
    n_clients : int
    n_local_clusters : int or sequence of int, optional
        How many clusters a client holds (K_g), for all or for each; drawn uniformly from 2 to
        K - 1 for each client if not given.
    client_shares : sequence of float, optional
        Each client's share of the rows in use, adding up to 1; see Notes.
    cluster_imbalance : bool, default=False
        Draw random proportions (uniform, then normalised) of a client's clusters instead of
        equal ones.
    seed : int or numpy Generator

    Notes
    -----
    Without `client_shares` all rows of a held cluster are divided among the clients that hold it,
    equally or, with `cluster_imbalance`, by the clients' random proportions. How many records a
    client has then follows from what it holds.

    With `client_shares` sizes are exact up to rounding: client g has its share of the rows in use,
    divided over its clusters equally or by its random proportions. As many rows are in use as the
    scarcest cluster allows; the others go to nobody. Equal shares make the setting that the paper
    calls nominal, balanced across clients and clusters, where the data need not all be used.

    Examples
    --------
    >>> import numpy as np
    >>> y = np.repeat(np.arange(5), 40)
    >>> parts = cluster_subset_partition(np.zeros((200, 2)), y, 4, n_local_clusters=2, seed=0)
    >>> [len(np.unique(y[part])) for part in parts]
    [2, 2, 2, 2]
    >>> sum(len(part) for part in parts)
    200
    """
    n = _check_sizes(X, y, n_clients)
    classes = _class_rows(y)
    sizes = np.array([len(rows) for rows in classes])
    shares = None if client_shares is None else _check_shares(client_shares, n_clients)
    rng = np.random.default_rng(seed)
    held_numbers = _local_cluster_numbers(n_local_clusters, n_clients, len(classes), rng)

    def draw() -> Ints:
        weights = _deal_clusters(held_numbers, len(classes), rng).astype(np.float64)
        if cluster_imbalance:
            weights *= 1.0 - rng.random(weights.shape)
        if shares is None:
            counts = np.column_stack([_cut(w, m) for w, m in zip(weights.T, sizes, strict=True)])
        else:
            demand = shares[:, None] * weights / weights.sum(axis=1, keepdims=True)
            asked = demand.sum(axis=0)
            in_use = (sizes[asked > 0] / asked[asked > 0]).min()
            counts = np.floor(in_use * demand + 1e-9).astype(np.int64)
        owner = np.full(n, -1)
        for rows, count in zip(classes, counts.T, strict=True):
            owner[rng.permutation(rows)[: count.sum()]] = np.repeat(np.arange(n_clients), count)
        return owner

    return _draw_until_filled(
        draw, n_clients, 1, "lower n_clients or raise n_local_clusters or the smallest share"
    )


def _local_cluster_numbers(
    given: int | Sequence[int] | None, n_clients: int, n_clusters: int, rng: np.random.Generator
) -> Ints:
    if given is None:
        if n_clusters < 3:
            raise DataError(
                f"2 <= K_g < K cannot be drawn from {n_clusters} clusters: pass n_local_clusters"
            )
        return rng.integers(2, n_clusters, n_clients)
    numbers = np.asarray(given)
    if numbers.ndim == 0:
        numbers = np.full(n_clients, numbers)
    if (
        numbers.shape != (n_clients,)
        or numbers.dtype.kind not in "iu"
        or numbers.min() < 1
        or numbers.max() > n_clusters
    ):
        raise ParameterError(
            f"n_local_clusters={given!r}: pass an integer from 1 to {n_clusters}, or one for each "
            f"of the {n_clients} clients"
        )
    return numbers.astype(np.int64)


def _deal_clusters(
    held_numbers: Ints, n_clusters: int, rng: np.random.Generator
) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Who holds what, one row per client: each cluster is dealt once, then hands are filled up."""
    n_clients = len(held_numbers)
    hands = rng.permutation(np.repeat(np.arange(n_clients), held_numbers))[:n_clusters]
    held = np.zeros((n_clients, n_clusters), dtype=np.bool_)
    held[hands, rng.permutation(n_clusters)[: len(hands)]] = True
    for hand, number in zip(held, held_numbers, strict=True):
        hand[rng.choice(np.flatnonzero(~hand), number - hand.sum(), replace=False)] = True
    return held


def _draw_until_filled(
    draw: Callable[[], Ints], n_clients: int, min_size: int, advice: str
) -> list[Ints]:
    for _ in range(_DRAWS):
        owner = draw()
        parts = [np.flatnonzero(owner == client) for client in range(n_clients)]
        if min(map(len, parts)) >= min_size:
            return parts
    raise DataError(
        f"all of {_DRAWS} draws left some of the {n_clients} clients with fewer than {min_size} "
        f"records: {advice}"
    )


def _cut(weights: Floats, n: int) -> Ints:
    """Whole numbers in proportion to the weights that add up to n."""
    total = weights.sum()
    if total == 0:
        return np.zeros(len(weights), dtype=np.int64)
    counts: Ints = np.diff(np.rint(np.cumsum(weights) / total * n).astype(np.int64), prepend=0)
    return counts


def _class_rows(y: ArrayLike | None) -> list[Ints]:
    if y is None:
        raise DataError("y is None: this partition divides classes and needs the labels")
    classes, codes = np.unique(np.asarray(y), return_inverse=True)
    return [np.flatnonzero(codes == c) for c in range(len(classes))]


def _check_sizes(X: ArrayLike, y: ArrayLike | None, n_clients: int) -> int:
    check_counts(n_clients=n_clients)
    n = np.shape(X)[0] if np.ndim(X) else 0
    if y is not None and np.shape(y) != (n,):
        raise DataError(f"X has {n} rows and y has shape {np.shape(y)}: they must match")
    if n_clients > n:
        raise ParameterError(f"n_clients={n_clients} is more than the {n} records: lower it")
    return n


def _check_shares(shares: Sequence[float], n_clients: int) -> Floats:
    array = np.asarray(shares, dtype=np.float64)
    if array.shape != (n_clients,) or not (array > 0).all() or abs(array.sum() - 1) > 1e-6:
        raise ParameterError(
            f"client_shares={shares!r}: pass one positive share for each of the {n_clients} "
            "clients, adding up to 1"
        )
    return array
