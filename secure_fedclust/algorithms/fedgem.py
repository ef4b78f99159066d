"""Federated generalized EM with an unknown number of components, FedGEM.

The model is a mixture of Gaussians with identity covariance and equal weights at each client, so
features should be scaled until clusters have a standard deviation of about one. A client sends the
maximiser of each of its components and the squared radius of the ball around it in which the
likelihood does not fall; the server moves overlapping balls towards each other, and at the end
merges components that are closer than a final radius.

Departures from the print:

- The radius problem (3) has the closed form ``||M - theta||^2``, a squared radius. The printed
  reformulation (7), (11) and (61) is not equivalent: its constant term is w U where w (U - V) is
  needed.
- The point that two overlapping balls agree on lies between their centres. The text and Algorithm 2
  have the sign of the difference reversed, which puts it outside at least one ball.
- The radius is taken at the centre the step started from; line 15 of Algorithm 1 would look at the
  data a second time.
- The final v R_min / (pi sqrt(N)) is a radius, not a squared one: only so does it scale with the
  features. Its pi is the mixing weight of a component, 1/K_g. It is limited to half of R_min.
- Starting centres are the best of ten draws of k-means++, by squared distance. The paper takes the
  best of three whole runs, by true labels that nobody has.
- Only components of different clients are compared (section 4.2; Algorithms 2 and 3 also compare
  a client's components with each other).
"""

import numpy as np
from scipy.spatial.distance import cdist, pdist

from secure_fedclust.algorithms.grouping import overlapping_groups, overlapping_pairs
from secure_fedclust.algorithms.lloyd import group_means, kmeans_seeds, mean_of
from secure_fedclust.arrays import Floats, Ints

N_DRAWS = 10
"""Draws of starting centres, of which a client takes the one nearest to its records."""


def client_seed(X: Floats, n_components: int, rng: np.random.Generator) -> Floats:
    """Starting centres by k-means++ (line 3 of Algorithm 1), the best of several draws."""
    draws = [kmeans_seeds(X, n_components, rng) for _ in range(N_DRAWS)]
    return min(draws, key=lambda centers: cdist(X, centers, "sqeuclidean").min(axis=1).sum())


def client_maximise(
    X: Floats, centers: Floats, *, weights: Floats | None = None
) -> tuple[Floats, Floats]:
    """One EM step: maximisers (Eqs. 1 and 6b) and squared radii (problem 3).

    Parameters
    ----------
    X : array of shape (n, d)
    centers : array of shape (k, d)
        The paper's theta of the round before.
    weights : array of shape (n,), optional
        How many records each row stands for; one if not given.

    Returns
    -------
    maximisers : array of shape (k, d)
        A component without any responsibility stays where it was.
    squared_radii : array of shape (k,)
    """
    # Squared norms drown differences far from the origin: compute from the middle of the centres.
    middle = centers.mean(axis=0)
    records, start = X - middle, centers - middle
    logits = records @ start.T
    logits -= np.square(start).sum(axis=1) / 2
    logits -= logits.max(axis=1, keepdims=True)
    responsibilities = np.exp(logits, out=logits)
    responsibilities /= responsibilities.sum(axis=1, keepdims=True)
    if weights is not None:
        responsibilities *= weights[:, None]
    found = mean_of(responsibilities.T @ records, responsibilities.sum(axis=0), otherwise=start)
    return found + middle, np.square(found - start).sum(axis=1)


def client_final_radii(maximisers: Floats, n_records: float, v: float) -> Floats:
    """Squares of the final radii v R_min / (pi sqrt(N)) (appendix D.3).

    R_min is the smallest distance between the client's components; with one component, a case
    that the paper excludes, the radius is 0 and the component joins balls that reach it.

    No radius is more than half of R_min. A client knows its components to be different clusters,
    and without this limit a client of a few records would merge everybody's.
    """
    k = len(maximisers)
    r_min = pdist(maximisers).min() if k > 1 else 0.0
    return np.full(k, np.square(r_min * min(v * k / np.sqrt(n_records), 0.5)))


def server_update(maximisers: Floats, squared_radii: Floats, owners: Ints) -> Floats:
    """Move each component to the mean of what it agreed on with those it overlaps (Algorithm 2).

    Parameters
    ----------
    maximisers : array of shape (m, d)
        Of all clients, one after the other.
    squared_radii, owners : arrays of shape (m,)

    Returns
    -------
    centers : array of shape (m, d)
        The new centre of each component; it lies in the component's own ball.
    """
    radii = np.sqrt(squared_radii)
    sums = maximisers.copy()
    counts = np.ones(len(maximisers))
    for i, j in overlapping_pairs(maximisers, radii, owners):
        agreed = agreed_points(maximisers[i], maximisers[j], radii[i], radii[j])
        for side in (i, j):
            np.add.at(sums, side, agreed)
            np.add.at(counts, side, 1)
    return sums / counts[:, None]


def agreed_points(a: Floats, b: Floats, radius_a: Floats, radius_b: Floats) -> Floats:
    """The point in both balls that is nearest to the middle of their centres (nu*)."""
    distance = np.linalg.norm(b - a, axis=1)
    nearest = np.maximum(0, distance - radius_b)  # to a, within the ball around b
    from_a = np.clip(distance / 2, nearest, np.minimum(radius_a, distance))
    share = np.divide(from_a, distance, out=np.zeros_like(distance), where=distance > 0)
    return np.asarray(a + share[:, None] * (b - a))


def server_merge(maximisers: Floats, squared_radii: Floats, owners: Ints) -> tuple[Floats, Ints]:
    """Merge components whose final balls overlap (Algorithm 3).

    Returns
    -------
    centers : array of shape (k, d)
        The mean of each group; k is the estimated number of clusters.
    groups : array of shape (m,)
        The cluster that each component became part of.
    """
    groups = overlapping_groups(maximisers, np.sqrt(squared_radii), owners)
    return group_means(maximisers, groups), groups
