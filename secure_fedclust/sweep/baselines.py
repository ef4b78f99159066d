"""What a sweep is measured against: k-means on all records in one place, with and without noise."""

import math
import time
import warnings
from importlib import import_module
from importlib.util import find_spec

import numpy as np

from secure_fedclust.algorithms.baselines import central_kmeans
from secure_fedclust.algorithms.lloyd import assign
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import ParameterError
from secure_fedclust.sweep.cells import Cell
from secure_fedclust.sweep.config import DATA, TRUTH, SweepConfig
from secure_fedclust.sweep.data import LabelledData

_RHO = 0.225


def overspending(n_features: int) -> float:
    """What diffprivlib's k-means (0.6.6) spends for each epsilon of 1 that it is given.

    Each of its rounds divides the budget into one part for a cluster's count and one for each
    coordinate of its sum, in the proportion of the cube root of ``4 d rho^2`` to 1, and then uses
    the one in the place of the other.

    Examples
    --------
    >>> [round(overspending(d), 2) for d in (2, 10, 50)]
    [0.91, 1.21, 2.09]
    """
    count = math.cbrt(4 * n_features * _RHO**2)
    return (1 + n_features * count) / (count + n_features)


def check_baseline(cell: Cell, config: SweepConfig, data: LabelledData) -> None:
    """Raise where a baseline cannot be run."""
    k = _n_clusters(cell, config, data)
    if k > len(data.X):
        raise ParameterError(
            f"[parameters.{cell.algorithm}] n_clusters = {k}: there are {len(data.X)} records"
        )
    if cell.algorithm != "diffprivlib":
        return
    if find_spec("diffprivlib") is None:
        raise ParameterError(
            "baselines: diffprivlib is not installed; leave it out, or "
            "pip install 'secure-fedclust[compare]'"
        )
    if "ranges" not in config.privacy:
        raise ParameterError(
            "baselines: diffprivlib needs ranges in [privacy], as it knows no other bound"
        )


def run_baseline(cell: Cell, config: SweepConfig, data: LabelledData) -> tuple[Ints, float]:
    """Labels of all records, and seconds; features are scaled by their ranges, if there are any."""
    X = _scaled(config, data)
    k = _n_clusters(cell, config, data)
    started = time.perf_counter()
    if cell.algorithm == "central":
        centers = central_kmeans(X, k, np.random.default_rng(cell.seed))
    else:
        centers = _diffprivlib_centers(X, k, cell)
    seconds = time.perf_counter() - started
    return assign(X, centers), seconds


def _diffprivlib_centers(X: Floats, k: int, cell: Cell) -> Floats:
    # It is not among the dependencies, and comes without types.
    kind = import_module("diffprivlib.models").KMeans
    box = np.ones(X.shape[1])
    # A seed would be that of its noise, too.
    model = kind(k, epsilon=cell.epsilon, bounds=(-box, box))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(model.fit(X).cluster_centers_, dtype=np.float64)


def _n_clusters(cell: Cell, config: SweepConfig, data: LabelledData) -> int:
    given = config.parameters[cell.algorithm]["n_clusters"]
    return data.n_clusters if given == TRUTH else int(given)


def _scaled(config: SweepConfig, data: LabelledData) -> Floats:
    given = config.privacy.get("ranges")
    if given is None:
        return data.X
    low, high = np.asarray(data.ranges() if given == DATA else given, dtype=np.float64).T
    return np.ascontiguousarray(np.clip((data.X - low) / (high - low) * 2 - 1, -1, 1))
