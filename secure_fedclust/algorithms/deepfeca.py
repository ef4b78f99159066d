"""DeepFeCA (Xu et al., section 5): a network learns from the clusters that FeCA finds.

A round has two halves. FeCA runs on the features that the network makes at present, and each
record's nearest global centroid becomes its pseudo-label. Then each client trains the network,
with a linear classifier (the head) on top, to tell the pseudo-labels apart, and the server
averages the networks by the clients' numbers of records (Algorithm 6).

Where the paper leaves a choice:

- Features have length one, are whitened with the moments over all clients and scaled to length one
  again before they are clustered, much as DeepCluster does. Otherwise a few directions of a random
  network decide everything.
- Pseudo-labels are more than the classes one hopes to find, five times as many by default.
- The head starts afresh each round, the same for all clients, because labels of one round have
  nothing to do with those of the next. It is thrown away: only the network is averaged.
- Clients train with Adam, started afresh as well, on batches of a reshuffled order.
"""

import warnings
from collections.abc import Sequence

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from secure_fedclust.algorithms.backbones import (
    Backbone,
    check_width,
    fill,
    flatten,
    linear,
    uniform_layer,
)
from secure_fedclust.algorithms.rows import directions_of, times
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import DataError, ParameterError, TrainingError
from secure_fedclust.parameters import check_counts, check_positive
from secure_fedclust.threads import one_thread

EPOCHS = 3
BATCH_SIZE = 64
LEARNING_RATE = 1e-3

FLOOR = 1e-4
"""Directions whose variance is below this part of the largest are stretched no further."""


def whitening(covariance: Floats, shrink: float = 0.0) -> Floats:
    """Symmetric matrix that makes features of this covariance uncorrelated, of variance one.

    Parameters
    ----------
    covariance : array of shape (f, f)
        May be noisy: it is made symmetric, and variances below `FLOOR` times the largest,
        negative ones among them, count as that much.
    shrink : float
        Part of the mean variance that is added to all variances, lest noise is taken for a
        direction and stretched.

    Raises
    ------
    TrainingError
        If the features do not vary.
    """
    if not np.isfinite(covariance).all():
        raise TrainingError("the features' covariance is not finite: lower the learning rate")
    variances, axes = np.linalg.eigh((covariance + covariance.T) / 2)
    if variances[-1] <= 0:
        raise TrainingError(
            "all records have the same features: lower the learning rate, start from other "
            "weights, or, if the covariance is noisy, add less noise"
        )
    variances = np.maximum(variances, FLOOR * variances[-1])
    stretched = axes / np.sqrt(variances + shrink * variances.mean())
    return np.asarray(stretched @ axes.T)


def whitened(features: Floats, mean: Floats, matrix: Floats) -> Floats:
    """Features less their mean, times a whitening matrix, scaled to length one.

    Each row depends on its own features alone, bit for bit. One that coincides with the mean has
    no direction; it becomes the first axis.
    """
    return directions_of(times(features - mean, matrix))


def initial_head(n_out: int, n_labels: int, rng: np.random.Generator) -> Floats:
    """Flat random weights of a linear classifier from `n_out` features to `n_labels` labels."""
    check_counts(n_out=n_out, n_labels=n_labels)
    return uniform_layer((n_labels, n_out), rng)


def train(
    backbone: Backbone,
    weights: Floats,
    head: Floats,
    X: Floats,
    labels: Ints,
    n_labels: int,
    *,
    epochs: int = EPOCHS,
    batch_size: int = BATCH_SIZE,
    learning_rate: float = LEARNING_RATE,
    rng: np.random.Generator,
) -> tuple[Floats, Floats]:
    """Train network and head on pseudo-labels by cross-entropy (line 8 of Algorithm 6).

    Parameters
    ----------
    backbone : Backbone
    weights : array of shape (P,)
        Where the network starts.
    head : array of shape (n_labels * (n_out + 1),)
        Where the head starts, from `initial_head`.
    X : array of shape (n, d)
    labels : array of shape (n,)
        Pseudo-labels from 0 to ``n_labels - 1``.
    n_labels : int
    epochs : int, default=3
    batch_size : int, default=64
        Fewer records are one batch.
    learning_rate : float, default=1e-3
    rng : numpy.random.Generator
        Shuffles the records.

    Returns
    -------
    weights, head : arrays
        After training.

    Raises
    ------
    TrainingError
        If the loss or a weight is not a finite number.
    """
    import torch
    from torch import nn

    check_counts(n_labels=n_labels, epochs=epochs, batch_size=batch_size)
    check_positive(learning_rate=learning_rate)
    check_width(backbone, X)
    _check_labels(X, labels, n_labels)
    if learning_rate > _LARGEST_STEP:
        raise TrainingError(_ASTRAY.format(learning_rate))
    network = backbone.module(weights)
    classifier = linear(backbone.n_out, n_labels)
    fill(classifier, head)
    model = nn.Sequential(network, classifier)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    records = torch.from_numpy(X.astype(np.float32))
    targets = torch.from_numpy(labels.astype(np.int64))
    with one_thread():
        for _ in range(epochs):
            order = torch.from_numpy(rng.permutation(len(X)))
            for start in range(0, len(X), batch_size):
                batch = order[start : start + batch_size]
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(records[batch]), targets[batch])
                if not torch.isfinite(loss):
                    raise TrainingError(_ASTRAY.format(learning_rate))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    trained = backbone.weights_of(network), flatten(classifier)
    if not all(np.isfinite(part).all() for part in trained):
        raise TrainingError(_ASTRAY.format(learning_rate))
    return trained


_LARGEST_STEP = 1e37  # ten times as much is still a number in single precision, as Adam needs
_ASTRAY = (
    "training went astray at learning_rate={!r}: lower it, and check that records are finite and "
    "scaled to about 0 to 1"
)


def average(updates: Sequence[Floats] | Floats, weights: Sequence[float] | Floats) -> Floats:
    """Weighted mean of the clients' vectors (line 10 of Algorithm 6).

    Examples
    --------
    >>> average([np.array([0.0, 1.0]), np.array([4.0, 1.0])], [300, 100])
    array([1., 1.])
    """
    shares = np.asarray(weights, dtype=np.float64)
    if shares.shape != (len(updates),) or not (shares >= 0).all() or not 0 < shares.sum() < np.inf:
        raise ParameterError(
            f"weights={weights!r}: give one for each of the {len(updates)} updates, none negative "
            "and not all zero"
        )
    return np.asarray(np.average(np.asarray(updates), axis=0, weights=shares))


def probe(
    train_features: Floats, train_labels: Ints, test_features: Floats, test_labels: Ints
) -> float:
    """Accuracy on the test set of a linear classifier fitted to the training set.

    It needs true labels and is for experiments only. Features are standardised by the training
    set's moments; logistic regression stops after 1000 steps, settled or not.
    """
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(train_features, train_labels)
    return float(model.score(test_features, test_labels))


def _check_labels(X: Floats, labels: Ints, n_labels: int) -> None:
    if len(X) == 0 or np.shape(labels) != (len(X),):
        raise DataError(
            f"{len(X)} records and labels of shape {np.shape(labels)}: give one for each record, "
            "and at least one"
        )
    if labels.min() < 0 or labels.max() >= n_labels:
        raise ParameterError(
            f"labels go from {labels.min()} to {labels.max()}: n_labels={n_labels} allows 0 to "
            f"{n_labels - 1}"
        )
