"""What leaks where nothing protects it.

AFCL's clients send a row for every record: its difference from the centre that won it, weighted
feature by feature with weights that the server has, too. They send records as seeds besides. That
is no statistic, and no noise could make it one: the server takes the weights off, adds the centre,
and has the records.
"""

import numpy as np
from scipy.spatial.distance import cdist

from secure_fedclust.algorithms.lloyd import assign, kmeans_seeds
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.audit.attacks.bounds import clopper_pearson
from secure_fedclust.audit.attacks.ceilings import check_confidence, reconstruction_ceiling
from secure_fedclust.audit.findings import Finding
from secure_fedclust.errors import ParameterError
from secure_fedclust.parameters import check_counts
from secure_fedclust.privacy.accounting import Limit

TOLERANCE = 1e-9
"""A record is found if each feature is this close, of features that are from -1 to 1."""


def afcl(
    *,
    epsilon: float = 1.0,
    delta: float = 1e-5,
    n_records: int = 500,
    n_features: int = 8,
    n_seeds: int = 10,
    confidence: float = 0.95,
    rng: np.random.Generator,
) -> Finding:
    """Invert AFCL's message, on made-up records.

    The server knows the centres and the weights, both of which it sent, and sees a row a record.

    Parameters
    ----------
    epsilon, delta : float
        A claim to compare with; AFCL makes none.
    n_records, n_features, n_seeds : int
    confidence : float
    rng : numpy.random.Generator
        For records and weights.
    """
    check_counts(n_records=n_records, n_features=n_features, n_seeds=n_seeds)
    check_confidence(confidence)
    if n_seeds > n_records:
        raise ParameterError(f"n_seeds={n_seeds}: give at most n_records={n_records}")
    mu = Limit.of(epsilon, delta).mu
    X = rng.uniform(-1, 1, (n_records, n_features))
    weights = rng.uniform(0.1, 1, n_features)
    seeds = kmeans_seeds(X, n_seeds, rng)
    rows, winners = afcl_message(X, seeds, weights)
    guesses = rows / weights + seeds[winners]
    error = np.abs(guesses - X).max(axis=1)
    found = int((error <= TOLERANCE).sum())
    raw_seeds = int((cdist(seeds, X, "chebyshev").min(axis=1) == 0).sum())
    ceiling = reconstruction_ceiling(TOLERANCE**n_features, mu)
    return Finding(
        name="AFCL's message",
        kind="exhibit",
        threat="is the server: knows centres and weights, and sees what AFCL's clients send",
        measure="records found",
        figure=found / n_records,
        interval=clopper_pearson(found, n_records, confidence),
        ceiling=ceiling,
        verdict="FAIL" if found > ceiling * n_records else "PASS",
        words=(
            f"{found} of {n_records} records are found, the worst to {error.max():.1e}, and "
            f"{raw_seeds} of {n_seeds} seeds are records: what AFCL sends are the records "
            "themselves, which is why there is no AFCL here."
        ),
        trials=n_records,
        confidence=confidence,
        more={
            "largest error": float(error.max()),
            "seeds": n_seeds,
            "seeds that are records": raw_seeds,
        },
    )


def afcl_message(X: Floats, centers: Floats, weights: Floats) -> tuple[Floats, Ints]:
    """A weighted row for every record, and the centre that it is about."""
    winners = assign(X, centers)
    return np.asarray(weights * (X - centers[winners])), winners
