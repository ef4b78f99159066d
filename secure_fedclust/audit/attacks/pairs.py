"""Two worlds that differ by one unit, as far apart as we know how to make them.

Nobody's records are used: points are corners of the public region, points beyond it (which clipping
must bring back) and random ones; the other records, if any, lie opposite. The best of many pairs is
kept. For means with a floor under their weight there is a pair of which it is proved that none is
worse (docs/proofs/sensitivity.md).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.audit.attacks.ceilings import least_honest
from secure_fedclust.audit.attacks.rehearsal import MADE_UP, Outlets, Rehearsal, flat, made_up
from secure_fedclust.privacy.queries import CellSums, FloorMeans, SoftSums
from secure_fedclust.privacy.terms import Adjacency

BEYOND = 5.0
"""How far beyond the region some records lie, in its half-widths."""

MANY = 1000
"""Records of a client whose data as a whole are to be found out."""

_CORNERS = 16
_RANDOM = 8
_CENTERS = 8
_SIZES = 1, 7, 50


@dataclass(frozen=True)
class Pair:
    """Records of one client in two worlds.

    Attributes
    ----------
    without, present : arrays of shape (n, d)
    mu : float
        How far apart the releases of a run are, in units of their noise.
    excess : float
        The largest distance of a release's exact answers over its stated sensitivity: above 1 the
        sensitivity is wrong.
    """

    without: Floats = field(repr=False)
    present: Floats = field(repr=False)
    mu: float
    excess: float


def worst_pair(rehearsal: Rehearsal, rng: np.random.Generator) -> Pair:
    """The pair that is told apart best by what a run releases, of all that are tried."""
    outlets = Outlets(rehearsal.spec)
    pairs = [_measured(rehearsal, outlets, *worlds) for worlds in _worlds(rehearsal, rng)]
    best = max(pairs, key=lambda pair: pair.mu)
    return Pair(best.without, best.present, best.mu, max(pair.excess for pair in pairs))


def floor_pair(
    floor: int, radius: float, adjacency: Adjacency, angle: float = 1e-3
) -> tuple[FloorMeans, Floats, Floats]:
    """A query for means with a floor, and two data sets that no others are farther apart than.

    Under ``add_remove`` one record joins `floor` others that lie opposite. Under ``replace_one`` it
    moves from one of two clusters to the other, each of which has `floor` records that lie opposite
    to it, nearly: the angle lets responsibilities tell the clusters apart.
    """
    # Everything lies on a sphere of this radius around both centres, which almost coincide: far
    # out, the halves above and below belong to one cluster each.
    across, up = radius * math.cos(angle), radius * math.sin(angle)
    centers = np.array([[0.0, up], [0.0, -up]])
    steep = 60.0 / up**2
    scale = np.full(2, math.sqrt(steep))
    query = FloorMeans(SoftSums(centers, scale, radius, 1.0), float(floor))
    above, below = np.array([[-across, up]]), np.array([[-across, -up]])
    others = np.repeat(np.concatenate([above, below]), floor, axis=0)
    new = np.array([[across, up]])
    if adjacency == "add_remove":
        return query, others, np.concatenate([others, new])
    moved = np.array([[across, -up]])
    return query, np.concatenate([others, new]), np.concatenate([others, moved])


def _measured(rehearsal: Rehearsal, outlets: Outlets, without: Floats, present: Floats) -> Pair:
    """Play once, and see how far apart the exact answers are."""
    outlet = outlets.fresh()
    seen = rehearsal.play(present, outlet)
    here, there = (rehearsal.client(X, outlets.fresh()).X for X in (without, present))
    squared, excess = 0.0, 0.0
    for released in seen:
        first, second = (released.exact(X, rehearsal.spec) for X in (here, there))
        steps = flat(second.fields).astype(float) - flat(first.fields)
        distance = float(np.sqrt(np.square(steps).sum()))
        terms = 1 if released.n_clients is None else least_honest(rehearsal.spec)
        squared += (distance / released.noisy.sigma) ** 2 / terms
        excess = max(excess, distance / first.sensitivity.value)
    return Pair(without, present, math.sqrt(squared), excess)


def _worlds(rehearsal: Rehearsal, rng: np.random.Generator) -> Iterator[tuple[Floats, Floats]]:
    domain, spec = rehearsal.domain, rehearsal.spec
    none = np.empty((0, domain.n_features))
    if spec.unit == "record":
        for center, radius, copies in _places(rehearsal, rng):
            way = rng.normal(size=domain.n_features)
            way *= radius / np.sqrt(np.square(way).sum())
            x, opposite = (domain.leave((center + step)[None]) for step in (way, -way))
            yield _neighbours(spec.adjacency, x, opposite, copies)
    for point in _points(domain.n_features, rng):
        x, opposite = (domain.leave(place[None]) for place in (point, -point))
        if spec.unit == "client":
            yield _either(none if spec.adjacency == "add_remove" else opposite, x)
            continue
        yield _neighbours(spec.adjacency, x, opposite, 0)
    if spec.unit == "record":
        for size in _SIZES:
            others, point = (
                made_up(domain, size, rng),
                domain.leave(-np.ones((1, domain.n_features))),
            )
            new = [] if spec.adjacency == "add_remove" else [domain.leave(np.ones_like(point))]
            yield np.concatenate([others, *new]), np.concatenate([others, point])


def _neighbours(
    adjacency: Adjacency, x: Floats, opposite: Floats, copies: int
) -> tuple[Floats, Floats]:
    """One record among others that all lie opposite to it."""
    others = np.repeat(opposite, copies, axis=0)
    if adjacency == "add_remove":
        return others, np.concatenate([others, x])
    return np.concatenate([others, opposite]), np.concatenate([others, x])


def _places(rehearsal: Rehearsal, rng: np.random.Generator) -> Iterator[tuple[Floats, float, int]]:
    """Centres that are asked about, how far a record counts there, and how many stand under it."""
    outlet = Outlets(rehearsal.spec).fresh()
    for released in rehearsal.play(made_up(rehearsal.domain, MADE_UP, rng), outlet):
        query: Any = released.query
        floor = math.ceil(query.floor) if isinstance(query, FloorMeans) else 0
        query = query.soft if isinstance(query, FloorMeans) else query
        if isinstance(query, SoftSums | CellSums):
            for k in rng.permutation(len(query.centers))[:_CENTERS]:
                yield query.centers[k], query.radius, floor


def _either(first: Floats, second: Floats) -> tuple[Floats, Floats]:
    return np.repeat(first, MANY, axis=0), np.repeat(second, MANY, axis=0)


def _points(n_features: int, rng: np.random.Generator) -> Iterator[Floats]:
    """Places in working coordinates, in and beyond the region."""
    if 2**n_features <= _CORNERS:
        corners = np.array(list(product((-1.0, 1.0), repeat=n_features)))
    else:
        corners = rng.choice((-1.0, 1.0), (_CORNERS, n_features))
    yield from corners
    yield from BEYOND * corners[:4]
    yield from rng.uniform(-1, 1, (_RANDOM, n_features))
