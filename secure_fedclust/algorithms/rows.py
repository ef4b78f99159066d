"""Functions of rows, each of which depends on that row alone, bit for bit.

Matrix products may round a row otherwise where other rows differ: these go column by column.
"""

import numpy as np

from secure_fedclust.arrays import Floats


def times(rows: Floats, matrix: Floats) -> Floats:
    """Each row times a matrix.

    Examples
    --------
    >>> times(np.array([[1.0, 2.0]]), np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]]))
    array([[2., 1., 3.]])
    """
    found = np.zeros((len(rows), matrix.shape[1]))
    for column, weights in zip(rows.T, matrix, strict=True):
        found += column[:, None] * weights
    return found


def directions_of(rows: Floats) -> Floats:
    """Each row scaled to length one; a row of zeros has no direction, and becomes the first axis.

    Examples
    --------
    >>> directions_of(np.array([[3.0, 4.0], [0.0, 0.0]]))
    array([[0.6, 0.8],
           [1. , 0. ]])
    """
    found = rows / np.maximum(np.abs(rows).max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    found[~found.any(axis=1), 0] = 1.0
    squared = np.zeros(len(found))
    for column in found.T:
        squared += column * column
    return np.asarray(found / np.sqrt(squared)[:, None])
