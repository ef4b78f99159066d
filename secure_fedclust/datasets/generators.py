"""Synthetic data of the papers' experiments: a grid, blobs at a set separation, balls.

Each function returns records, labels and true centres. Clusters are equally large (sizes differ by
one at most) and the rows come shuffled, so that nothing depends on their order.
"""

import numpy as np

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import ParameterError
from secure_fedclust.parameters import Seed, check_counts, check_positive

_HALF_WIDTH = 10.0
_REJECTIONS = 1000
_ATTEMPTS = 10
_GROWTH = 1.25


def fkm_grid(
    n_per_cluster: int = 50, std: float = 1.0, *, seed: Seed
) -> tuple[Floats, Ints, Floats]:
    """Sixteen normal clusters on a 4 x 4 grid whose neighbours are 5 apart (FKM, 4.1).

    Parameters
    ----------
    n_per_cluster : int, default=50
    std : float, default=1.0
        Standard deviation in each direction; the paper goes from 1 to 1.5.
    seed : int or numpy Generator

    Returns
    -------
    X : array of shape (16 * n_per_cluster, 2)
    y : array of shape (16 * n_per_cluster,)
    centers : array of shape (16, 2)
        Row c is the centre of the records with ``y == c``.

    Examples
    --------
    >>> X, y, centers = fkm_grid(seed=0)
    >>> X.shape, centers[0], centers[-1]
    ((800, 2), array([-7.5, -7.5]), array([7.5, 7.5]))
    """
    check_counts(n_per_cluster=n_per_cluster)
    check_positive(std=std)
    rng = np.random.default_rng(seed)
    ticks = 5.0 * (np.arange(4) - 1.5)
    centers = np.stack(np.meshgrid(ticks, ticks, indexing="ij"), axis=-1).reshape(16, 2)
    y = _labels(16 * n_per_cluster, 16, rng)
    return rng.normal(centers[y], std), y, centers


def rmin_blobs(
    n_samples: int,
    n_features: int,
    n_clusters: int,
    r_min: float,
    *,
    std: float = 1.0,
    seed: Seed,
) -> tuple[Floats, Ints, Floats]:
    """Isotropic normal clusters whose closest centres are exactly `r_min` apart (FedGEM, D.2.2).

    Centres lie in the box (-10, 10) of each feature, which is scikit-learn's for ``make_blobs``:
    the first anywhere, the second at distance `r_min` from it in a random direction, the others
    anywhere at least `r_min` from all before. The box grows only where they do not fit.

    Parameters
    ----------
    n_samples, n_features, n_clusters : int
    r_min : float
        The smallest distance between two centres (R_min).
    std : float, default=1.0
    seed : int or numpy Generator

    Returns
    -------
    X : array of shape (n_samples, n_features)
    y : array of shape (n_samples,)
    centers : array of shape (n_clusters, n_features)

    Examples
    --------
    >>> from scipy.spatial.distance import pdist
    >>> X, y, centers = rmin_blobs(2500, 2, 10, 4.0, seed=0)
    >>> print(round(pdist(centers).min(), 9))
    4.0
    """
    check_counts(n_samples=n_samples, n_features=n_features, n_clusters=n_clusters)
    check_positive(r_min=r_min, std=std)
    rng = np.random.default_rng(seed)
    centers = _separated_centers(n_clusters, n_features, r_min, rng)
    y = _labels(n_samples, n_clusters, rng)
    return rng.normal(centers[y], std), y, centers


def stochastic_balls(
    n_samples: int,
    n_features: int,
    n_clusters: int,
    separation: float,
    *,
    radius: float = 1.0,
    seed: Seed,
) -> tuple[Floats, Ints, Floats]:
    """Uniform clusters in disjoint balls of one radius (FeCA, Appendix A).

    Parameters
    ----------
    n_samples, n_features, n_clusters : int
    separation : float
        The smallest distance between two centres (Delta_min), more than twice the radius. Centres
        are drawn as in `rmin_blobs`.
    radius : float, default=1.0
    seed : int or numpy Generator

    Returns
    -------
    X : array of shape (n_samples, n_features)
    y : array of shape (n_samples,)
    centers : array of shape (n_clusters, n_features)

    Examples
    --------
    >>> X, y, centers = stochastic_balls(300, 3, 4, 5.0, seed=0)
    >>> bool((((X - centers[y]) ** 2).sum(axis=1) <= 1).all())
    True
    """
    check_counts(n_samples=n_samples, n_features=n_features, n_clusters=n_clusters)
    check_positive(separation=separation, radius=radius)
    if separation <= 2 * radius:
        raise ParameterError(
            f"separation={separation!r} lets balls of radius {radius!r} touch: raise it above "
            f"{2 * radius!r}"
        )
    rng = np.random.default_rng(seed)
    centers = _separated_centers(n_clusters, n_features, separation, rng)
    y = _labels(n_samples, n_clusters, rng)
    # The volume within distance s of the centre grows as s ** d.
    distance = radius * rng.random(n_samples) ** (1 / n_features)
    return centers[y] + distance[:, None] * _directions(n_samples, n_features, rng), y, centers


def _separated_centers(k: int, d: int, apart: float, rng: np.random.Generator) -> Floats:
    # Two centres in a box are no farther apart than its diagonal.
    half = max(_HALF_WIDTH, apart / (2 * d**0.5))
    while True:
        for _ in range(_ATTEMPTS):
            centers = _fill_box(k, d, apart, half, rng)
            if centers is not None:
                return centers
        half *= _GROWTH


def _fill_box(k: int, d: int, apart: float, half: float, rng: np.random.Generator) -> Floats | None:
    """Centres by rejection; None when that takes too long because the box is nearly full."""
    centers = np.empty((k, d))
    placed = 0
    for _ in range(k + _REJECTIONS):
        if placed == 1:
            candidate = centers[0] + apart * _directions(1, d, rng)[0]
            fits = bool((np.abs(candidate) <= half).all())
        else:
            candidate = rng.uniform(-half, half, d)
            fits = bool((np.linalg.norm(centers[:placed] - candidate, axis=1) >= apart).all())
        if fits:
            centers[placed] = candidate
            placed += 1
            if placed == k:
                return centers
    return None


def _directions(n: int, d: int, rng: np.random.Generator) -> Floats:
    normal = rng.standard_normal((n, d))
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    return normal


def _labels(n: int, k: int, rng: np.random.Generator) -> Ints:
    return rng.permutation(np.arange(n) % k)
