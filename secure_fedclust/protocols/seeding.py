"""Where centres start, decided by small releases instead of raw records.

In one or two dimensions every client counts and sums its records in the cells of a public grid.
Above that, a grid would be empty: clients release their moments, the server draws points from the
Gaussian that has them, places several times more micro-clusters than there are clusters, moves
these by a few rounds of private k-means, and clusters what it finds.

Both need only sums over clients. All messages are answers to two questions: `MOMENTS` and `CELLS`.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from secure_fedclust.algorithms.lloyd import assign, kmeans
from secure_fedclust.arrays import Floats
from secure_fedclust.messages import private_stage, steps
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.plan import PlannedRelease
from secure_fedclust.privacy.queries import CellSums, Moments
from secure_fedclust.privacy.sensitivity import best_count_weight
from secure_fedclust.privacy.terms import Adjacency
from secure_fedclust.protocols.cells import (
    CELLS,
    answer_cells,
    ask_cells,
    moved,
    summarise,
)
from secure_fedclust.protocols.client import PrivateClient, answers
from secure_fedclust.protocols.session import Session

GRID_FEATURES = 2
"""Records of up to so many features are seeded from a grid."""

MOST_CELLS = 4096
FEWEST_CELLS = 64
MOST_ROUND_CELLS = 400

GRID_COUNT_WEIGHT = {"add_remove": 1.5, "replace_one": 1.0}
"""Which cells hold records matters more than where in them; under the second adjacency counts of
weight one cost nothing."""

MANY_SEEDS = 500

N_SYNTHETIC = 4000
"""Points drawn from the Gaussian that has the released moments."""


MOMENTS = private_stage(
    "seeding/moments",
    request={},
    reply={"count": steps("one"), "sums": steps("d"), "squares": steps("pairs")},
    additive=True,
)


class SeedingClient(PrivateClient):
    """Answers with noisy moments of its records, and noisy sums about centres that it is given.

    Privacy unit: a record of the client.
    Sensitivity: ``moments``, ``sums_and_counts`` and ``synopsis`` in docs/proofs/sensitivity.md.
    Who sees it: the server; with a protection, only the sum over clients.
    """

    @answers(MOMENTS, after=(None,))
    def moments(self, share: float) -> dict[str, Any]:
        return self.reply(self.release(Moments(self.X.shape[1]), share))

    @answers(CELLS, after=(None, MOMENTS, CELLS))
    def cells(self, **request: Any) -> dict[str, Any]:
        return answer_cells(self, **request)


@dataclass(frozen=True)
class Recipe:
    """How a run's budget is divided; shares are of mu squared and add up to one.

    Attributes
    ----------
    seed : {"grid", "moments", "public"}
    n_seeds : int
        Cells or micro-clusters to start from.
    seed_shares : tuple of float
        For the grid; or for the moments and each round with micro-clusters.
    shares : tuple of float
        For each round with the clusters themselves.
    """

    seed: str
    n_seeds: int
    seed_shares: tuple[float, ...]
    shares: tuple[float, ...]

    def scaled(self, share: float) -> "Recipe":
        """The same for a part of a run's budget."""
        parts = (tuple(share * part for part in parts) for parts in (self.seed_shares, self.shares))
        return Recipe(self.seed, self.n_seeds, *parts)


def planned(
    recipe: Recipe, n_clusters: int, domain: Domain, *, summed: bool = False
) -> list[PlannedRelease]:
    """The releases of seeding and of the rounds after it; seen in sums only if `summed`."""
    d = domain.n_features
    releases = []
    if recipe.seed == "grid":
        cells = len(public_partition(domain, recipe.n_seeds)[0])
        releases.append(
            PlannedRelease(f"{CELLS.name}: seeding", 1, recipe.seed_shares[0], cells * (d + 1))
        )
    elif recipe.seed == "moments":
        releases.append(PlannedRelease(MOMENTS.name, 1, recipe.seed_shares[0], moments_size(d)))
        rounds = recipe.seed_shares[1:]
        releases.append(
            PlannedRelease(
                f"{CELLS.name}: seeding", len(rounds), sum(rounds), recipe.n_seeds * (d + 1)
            )
        )
    releases += [
        PlannedRelease(f"{CELLS.name}: round", 1, share, n_clusters * (d + 1))
        for share in recipe.shares
    ]
    return [replace(release, summed=summed) for release in releases]


def moments_size(n_features: int) -> int:
    """How many numbers the moments are."""
    return 1 + n_features + n_features * (n_features + 1) // 2


def n_cells(n_records: float | None, n_clusters: int, mu: float) -> int:
    """Cells of a grid, enough to tell clusters apart and few enough to hold more than noise.

    Parameters
    ----------
    n_records : float or None
        Number of records behind the sums, if that is public.
    n_clusters : int
    mu : float
        What the release costs, over the root of the number of noisy clients that are added.
    """
    wanted = 5.0 * n_clusters if n_records is None else n_records * mu / 4
    return round(min(max(wanted, FEWEST_CELLS), MOST_CELLS))


def public_partition(domain: Domain, cells: int) -> tuple[Floats, float]:
    """Centres of about so many cells that divide the region, and how far records count in one.

    Up to a few hundred cells are those of k-means on points spread evenly over the region, which
    are rounder than squares; above that, squares.
    """
    d, reach = domain.n_features, 1.0 if domain.box else domain.bound
    if cells <= MOST_ROUND_CELLS:
        return _round_cells(d, domain.box, cells)
    per_side = max(2, round(cells ** (1 / d)))
    ticks = reach * ((np.arange(per_side) + 0.5) / per_side * 2 - 1)
    centers = np.stack(np.meshgrid(*[ticks] * d, indexing="ij"), axis=-1).reshape(-1, d)
    radius = reach / per_side * math.sqrt(d)
    if not domain.box:
        centers = centers[np.linalg.norm(centers, axis=1) <= domain.bound + radius]
    return centers, 0.9 * radius


@cache
def _round_cells(d: int, box: bool, cells: int) -> tuple[Floats, float]:
    rng = np.random.default_rng(0)  # public: everybody may know the partition
    reach = 1.0 if box else math.sqrt(d)
    points = rng.uniform(-reach, reach, (40 * cells, d))
    if not box:
        points = points[np.linalg.norm(points, axis=1) <= reach]
    centers, labels = kmeans(points, cells, rng)
    distances = np.linalg.norm(points - centers[labels], axis=1)
    return centers, float(np.quantile(distances, 0.98))


def public_spread(domain: Domain, n_clusters: int, rng: np.random.Generator) -> Floats:
    """Centres spread evenly over the region: they depend on no record and cost nothing."""
    points = domain.hold(rng.uniform(-1, 1, (max(N_SYNTHETIC, 50 * n_clusters), domain.n_features)))
    return kmeans(points, n_clusters, rng)[0]


def gaussian_spread(
    domain: Domain, mean: Floats, covariance: Floats, n_seeds: int, rng: np.random.Generator
) -> tuple[Floats, float]:
    """Centres spread over a Gaussian, and the root mean square distance of its points to them."""
    values, vectors = np.linalg.eigh(covariance)
    spread = np.sqrt(np.clip(values, 1e-6, 4.0))
    size = max(N_SYNTHETIC, 20 * n_seeds if n_seeds <= MANY_SEEDS else 2 * n_seeds)
    points = rng.normal(size=(size, domain.n_features)) * spread @ vectors.T
    points = domain.hold(points + domain.hold(mean[None]))
    # K-means for very many centres takes minutes, and places them hardly better than chance.
    centers = kmeans(points, n_seeds, rng)[0] if n_seeds <= MANY_SEEDS else points[:n_seeds]
    some = points[-N_SYNTHETIC:]
    rms = math.sqrt(np.square(some - centers[assign(some, centers)]).sum(axis=1).mean())
    if len(centers) < n_seeds:  # points on one spot: reply lengths must not tell
        repeats = np.resize(np.arange(len(centers)), n_seeds)
        centers = centers[repeats]
    return centers, max(rms, 1e-3)


def round_radius(n_features: int, n_clusters: int) -> float:
    """How far records count in a round with the clusters themselves."""
    return 0.8 * math.sqrt(n_features) / float(n_clusters ** (1 / n_features))


def round_count_weight(n_features: int, adjacency: Adjacency) -> float:
    """Weight of counts in a round, in units of its radius: means half a radius off are typical."""
    return best_count_weight(1.0, 0.5, n_features, adjacency)


def ask_moments(session: Session, share: float) -> tuple[Floats, Floats]:
    """Mean and covariance of all clients' records together."""
    return ask_moments_and_count(session, share)[:2]


def ask_moments_and_count(session: Session, share: float) -> tuple[Floats, Floats, float]:
    """The same, and the noisy number of records of a client, on average."""
    d = session.domain.n_features
    query = Moments(d)
    sizes = {"one": 1, "d": d, "pairs": d * (d + 1) // 2}
    found = session.ask_sum(MOMENTS, query, share, sizes, query.totals)
    totals = tuple(sum(column) for column in zip(*found.parts, strict=True))
    return *query.mean_and_covariance(*totals), max(float(totals[0]) / found.n_clients, 1.0)


def private_seeds(
    session: Session, n_clusters: int, recipe: Recipe, n_init: int, rng: np.random.Generator
) -> Floats:
    """The server's side of seeding: centres in working coordinates."""
    domain = session.domain
    if recipe.seed == "public":
        return public_spread(domain, n_clusters, rng)
    if recipe.seed == "grid":
        centers, radius = public_partition(domain, recipe.n_seeds)
        weight = GRID_COUNT_WEIGHT[session.spec.adjacency]
        cells, _ = ask_cells(session, CellSums(centers, radius, weight), recipe.seed_shares[0])
    else:
        mean, covariance = ask_moments(session, recipe.seed_shares[0])
        centers, rms = gaussian_spread(domain, mean, covariance, recipe.n_seeds, rng)
        radius = 1.5 * rms
        weight = round_count_weight(domain.n_features, session.spec.adjacency)
        for share in recipe.seed_shares[1:]:
            cells, _ = ask_cells(session, CellSums(centers, radius, weight), share)
            centers = moved(cells, radius, domain)
    found = summarise(cells, radius, domain, at_least=2 * n_clusters)
    centers, _ = kmeans(found.points, n_clusters, rng, weights=found.weights, n_init=n_init)
    return padded(centers, n_clusters, domain, rng)


def padded(centers: Floats, n_clusters: int, domain: Domain, rng: np.random.Generator) -> Floats:
    """As many centres as asked for: the noise may leave fewer cells than that."""
    missing = n_clusters - len(centers)
    if missing <= 0:
        return centers
    return np.concatenate([centers, public_spread(domain, missing, rng)])


def run_rounds(
    session: Session, centers: Floats, shares: tuple[float, ...], radius: float | None = None
) -> tuple[Floats, float]:
    """Private k-means rounds from given centres, one for each share.

    Records count up to `radius` from their centre; as far as pays under noise, if not given.

    Returns
    -------
    centers : array of shape (k, d)
    n_records : float
        The noisy number of records of a client, on average.
    """
    domain = session.domain
    k, d = centers.shape
    radius = round_radius(d, k) if radius is None else radius
    weight = round_count_weight(d, session.spec.adjacency)
    for share in shares:
        cells, n_clients = ask_cells(session, CellSums(centers, radius, weight), share)
        centers = moved(cells, radius, domain)
        session.note_centers(domain.leave(centers))
    return centers, max(float(cells.counts.sum()) / n_clients, 1.0)
