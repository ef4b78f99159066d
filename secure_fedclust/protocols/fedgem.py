"""FedGEM: local components with a ball each, merged into clusters whose number is found.

1. Every client seeds its components and takes an EM step.
2. In each collaborative round the server moves components whose balls overlap towards each other,
   and every client takes a step from where its components were put.
3. After the last round the balls are those of the final radius; components whose balls overlap are
   one global cluster.

A client that misses a round goes on from where it was left; one that misses the first or the
last exchange has no part in the result.

Without protection the server sees maximisers and radii. With differential privacy there are four
calibrations:

- ``synopsis``: clients release one summary each, and all rounds run on it (`run_on_synopsis`);
- ``sums``: in each round clients release noisy sums and weights of their components;
- ``floor``: in each round clients release noisy means with a floor under their weights;
- ``theorem9``: the same means with as much noise as the paper's Theorem 9 asks for.

In all of them radii are computed from released maximisers and the public centres that a step
started from, less what the noise adds to them on average, and so cost nothing. Centres start from
a private synopsis or from a public spread, not from records as line 3 of Algorithm 1 has it; a
client's further local steps are noised and charged like the first (docs/proofs/fedgem.md).

With masking or encryption the server still looks at each client's components, under local noise.
Once it has merged them, two sums over all clients confirm the clusters and give the final centres.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import cdist

from secure_fedclust.algorithms import fedgem
from secure_fedclust.algorithms.lloyd import assign, kmeans
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import ProtocolError
from secure_fedclust.messages import (
    Array,
    Bounds,
    Choice,
    Integer,
    Real,
    Values,
    private_stage,
    stage,
    steps,
)
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.queries import Cells, CellSums, FloorMeans, SoftSums
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.protocols.cells import CELLS, Summary, moved, pooled
from secure_fedclust.protocols.client import MAX_CLUSTERS, Client, answers
from secure_fedclust.protocols.clustering import Clustering
from secure_fedclust.protocols.seeding import padded, public_spread, round_count_weight
from secure_fedclust.protocols.session import Replies, Session
from secure_fedclust.protocols.synopsis import MAX_ROUNDS, MICRO, Synopsis, SynopsisClient

LARGEST_FLOOR = 1 << 15
"""Higher floors would need a finer grid than fits into 64 bits."""

N_STARTS = 40
"""Restarts of k-means where it places components on released points; they cost nothing."""

REFINED_RADIUS = 0.75
"""How far records count in a refinement, in units of what counts in a round: its centres are near
the means, so that little is cut off, and less noise is needed."""

CONFIRM_SHARE, COUNTS_ONLY = 0.12, 100.0
"""Part of a refinement's budget for counting records, and the weight of counts over sums in it."""

FEWER = 0.5
"""A cluster with less than this part of the records it was thought to have is none."""

PARTS_APART = 2.5
"""The means of two parts of a unit Gaussian cut by a plane are closer together than this, unless
one has less than a fiftieth of it; those of two unit Gaussians, cut between them, are farther
apart, unless the Gaussians are so close (2.2) that they have hardly more than one mode."""

DOUBTFUL = 4.0
"""Standard deviations of its noise below which a component is a false one."""

_BALLS = {"maximisers": Array(("k", "d")), "squared_radii": Array(("k",), minimum=0)}
_STEPS = Integer(1, MAX_ROUNDS)

SEED = stage(
    "fedgem/seed",
    request={"n_components": Integer(1, MAX_CLUSTERS), "n_steps": _STEPS},
    reply=_BALLS,
)
STEP = stage("fedgem/step", request={"centers": Array(("k", "d")), "n_steps": _STEPS}, reply=_BALLS)
FINAL = stage(
    "fedgem/final",
    request={"centers": Array(("k", "d")), "n_steps": _STEPS, "v": Real(minimum=0)},
    reply=_BALLS,
)


class FedGEMClient(Client):
    """Reports the maximiser and the squared radius of each of its components.

    Privacy unit: none, the message is unprotected.
    Sensitivity: unbounded.
    Who sees it: the server.
    """

    @answers(SEED, after=(None,))
    def seed(self, n_components: int, n_steps: int) -> dict[str, Any]:
        return self.step(fedgem.client_seed(self.X, n_components, self.rng), n_steps)

    @answers(STEP, after=(SEED, STEP))
    def step(self, centers: Floats, n_steps: int) -> dict[str, Any]:
        for _ in range(n_steps):
            centers, squared_radii = fedgem.client_maximise(self.X, centers)
        return {"maximisers": centers, "squared_radii": squared_radii}

    @answers(FINAL, after=(SEED, STEP))
    def final(self, centers: Floats, n_steps: int, v: float) -> dict[str, Any]:
        maximisers = self.step(centers, n_steps)["maximisers"]
        squared_radii = fedgem.client_final_radii(maximisers, len(self.X), v)
        return {"maximisers": maximisers, "squared_radii": squared_radii}


def run(
    session: Session,
    *,
    n_components: Mapping[str, int],
    n_rounds: int,
    n_steps: int,
    final_radius: float,
) -> Clustering:
    """The server's side without protection.

    Parameters
    ----------
    session : Session
    n_components : mapping of client to int
        How many components each client has (the paper's K_g).
    n_rounds : int
        Collaborative rounds.
    n_steps : int
        EM steps of a client in a round (the paper's S).
    final_radius : float
        The paper's v.
    """
    requests = {
        client: {"n_components": n_components[client], "n_steps": n_steps}
        for client in session.clients
    }
    at_most: dict[str, Bounds] = {client: {"k": (1, n)} for client, n in n_components.items()}
    replies = session.ask(SEED, requests, at_most)
    centers = _updated(replies)

    def ask_from_centers(**more: Any) -> Replies:
        asked = {c: {"centers": rows, "n_steps": n_steps, **more} for c, rows in centers.items()}
        return session.ask(FINAL if more else STEP, asked)

    for _ in range(n_rounds - 1):
        centers |= _updated(ask_from_centers())
    return _merged(session, ask_from_centers(v=final_radius))


_START = {"centers": Array(("k", "d")), "radius": Real(1e-9, 1e9), "n_steps": _STEPS}

SUMS = private_stage(
    "fedgem/sums",
    request=_START,
    reply={"start": Array(("k", "d")), "counts": steps("k"), "sums": steps("k", "d")},
)
MEANS = private_stage(
    "fedgem/means",
    request={
        **_START,
        "floor": Real(1, LARGEST_FLOOR),
        "enforced": Choice(("yes", "no")),
        "bound": Choice(("exact", "theorem9")),
    },
    reply={"start": Array(("k", "d")), "means": steps("k", "d")},
)
REFINE = private_stage(
    "fedgem/refine",
    request={
        "centers": Array(("k", "d")),
        "radius": Real(1e-9, 1e9),
        "count_weight": Real(1e-3, 1e3),
    },
    reply={"counts": steps("k"), "sums": steps("k", "d")},
    additive=True,
)
LOCAL_SEED = stage(
    "fedgem/local_seed",
    request={"n_components": Integer(1, MAX_CLUSTERS)},
    reply={"centers": Array(("k", "d"))},
)


class PrivateFedGEMClient(SynopsisClient):
    """Reports noisy sums or means of its components.

    Privacy unit: a record of the client.
    Sensitivity: ``sums_and_counts``, ``floor_mean`` or ``theorem9`` in
    docs/proofs/sensitivity.md; further steps are releases of their own.
    Who sees it: the server sees the last step and the centres it started from.

    Means without a floor under their weights have no guarantee: only `UnprovedFedGEMClient` gives
    them.
    """

    gives_means_without_floor: ClassVar[bool] = False

    @answers(SUMS, after=(None, CELLS, MICRO, LOCAL_SEED, SUMS))
    def sums(self, centers: Floats, radius: float, n_steps: int, share: float) -> dict[str, Any]:
        centers = self.domain.hold(centers)
        for _ in range(n_steps):
            query = _soft_sums(centers, radius, self.domain, self.spec)
            noisy = self.release(query, share / n_steps)
            start, centers = centers, moved(query.read(noisy), radius, self.domain)
        return self.reply(noisy, start=start)

    @answers(MEANS, after=(None, CELLS, MICRO, LOCAL_SEED, MEANS))
    def means(
        self,
        centers: Floats,
        radius: float,
        n_steps: int,
        floor: float,
        enforced: str,
        bound: str,
        share: float,
    ) -> dict[str, Any]:
        if enforced == "no" and not self.gives_means_without_floor:
            raise ProtocolError("means without a floor have no guarantee: this client gives none")
        centers = self.domain.hold(centers)
        for _ in range(n_steps):
            soft = _soft_sums(centers, radius, self.domain, self.spec)
            query = FloorMeans(soft, floor, bound == "theorem9", enforced == "yes")
            noisy = self.release(query, share / n_steps)
            start, centers = centers, self.domain.hold(centers + query.read(noisy)[0])
        return self.reply(noisy, start=start)

    @answers(REFINE, after=(CELLS, MICRO, SUMS, MEANS, REFINE))
    def refine(self, share: float, **request: Any) -> dict[str, Any]:
        return self.reply(self.release(CellSums(**request, scale=self.domain.scale), share))


class UnprovedFedGEMClient(PrivateFedGEMClient):
    """Also gives what has no guarantee, for experiments with the paper's own protocol.

    Privacy unit: none.
    Sensitivity: unbounded.
    Who sees it: the server.
    """

    gives_means_without_floor = True

    @answers(LOCAL_SEED, after=(None,))
    def local_seed(self, n_components: int) -> dict[str, Any]:
        X = self.X * self.domain.scale
        seeds = fedgem.client_seed(X, n_components, self.rng) / self.domain.scale
        return {"centers": padded(seeds, n_components, self.domain, self.rng)}


@dataclass(frozen=True)
class Rounds:
    """How the rounds of a private run other than on a synopsis are calibrated.

    Attributes
    ----------
    calibration : {"sums", "floor", "theorem9"}
    seeding : {"private", "public", "local"}
    share : float
        Of the budget, for all of it.
    seed_share : float
        Of that, for private seeding; the rest is for the rounds, in equal parts.
    floor : mapping of client to float
        Least weight of a component, for ``floor`` and ``theorem9``.
    enforced : bool
        Whether the floor is put under the weights, or only into the formula.
    n_records : int or None
        About how many records a client holds, where the number is public and not released.
    """

    calibration: Literal["sums", "floor", "theorem9"]
    seeding: Literal["private", "public", "local"]
    share: float
    seed_share: float
    floor: Mapping[str, float]
    enforced: bool
    n_records: int | None


def run_private(
    session: Session,
    *,
    n_components: Mapping[str, int],
    n_rounds: int,
    n_steps: int,
    final_radius: float,
    rounds: Rounds,
    collect_seeds: Callable[[float], Synopsis],
    rng: np.random.Generator,
) -> Clustering:
    """The server's side of a private run with noisy rounds.

    Parameters
    ----------
    session, n_components, n_rounds, n_steps, final_radius
        As in `run`.
    rounds : Rounds
    collect_seeds : function
        Collects a synopsis for a share of the budget.
    rng : numpy.random.Generator
    """
    domain = session.domain
    centers = _private_seeds(session, n_components, rounds, collect_seeds, rng)
    share = rounds.share * (1 - rounds.seed_share) / n_rounds
    radius = component_radius(domain)
    found: dict[str, _Components] = {}
    for _ in range(n_rounds):
        requests = {
            client: {"centers": rows, "radius": radius, "n_steps": n_steps, "share": share}
            for client, rows in centers.items()
        }
        if rounds.calibration == "sums":
            found = _ask_sums(session, requests)
        else:
            found = _ask_means(session, requests, rounds)
        balls = [component.ball(domain) for component in found.values()]
        centers |= {
            client: domain.hold((rows - domain.center) / domain.scale)
            for client, rows in zip(found, _update(balls), strict=True)
        }
    final = []
    for client, component in found.items():
        maximisers, _ = component.ball(domain)
        n = rounds.n_records if component.n_records is None else component.n_records
        radii = fedgem.client_final_radii(maximisers, max(float(n or 1), 1.0), final_radius)
        final.append((client, maximisers, radii))
    released = [part.n_records for part in found.values() if part.n_records is not None]
    n_records = max(float(np.mean(released)), 1.0) if released else None
    return replace(_merge(session, final), n_records=n_records)


def refine(session: Session, found: Clustering, share: float) -> Clustering:
    """The same clusters, confirmed and moved by two sums over all clients.

    The first counts the records that are nearest to each centre. A cluster that has far fewer than
    the synopses had for it was none: noise made it, or it lay between two others at a client that
    could not tell them apart. The second moves centres to the noisy means of their records. Those
    that come to lie as close together as the parts of one cluster do are one cluster.
    """
    if found.weights is not None:
        counted = _ask_refine(session, found.centers, CONFIRM_SHARE * share, COUNTS_ONLY)
        # Those that dropped out had clusters too, of which the sum says nothing.
        there = session.sums[-1].survivors if session.sums else session.clients
        wanted = sum(w for client, w in found.weights.items() if client in there)
        found = _without(found, np.asarray((wanted > 0) & (counted.counts < FEWER * wanted)))
        share *= 1 - CONFIRM_SHARE
    domain = session.domain
    weight = round_count_weight(domain.n_features, session.spec.adjacency)
    cells = _ask_refine(session, found.centers, share, weight)
    moved_ = domain.leave(moved(cells, _refined_radius(domain), domain))
    refined = _together(replace(found, centers=moved_), np.maximum(cells.counts, 1.0))
    session.note_centers(refined.centers)
    return refined


def _ask_refine(session: Session, centers: Floats, share: float, count_weight: float) -> Cells:
    domain = session.domain
    working = domain.hold((centers - domain.center) / domain.scale)
    query = CellSums(working, _refined_radius(domain), count_weight, scale=domain.scale)
    request = {"centers": working, "radius": query.radius, "count_weight": count_weight}
    sizes = {"k": len(centers), "d": domain.n_features}
    return pooled(session.ask_sum(REFINE, query, share, sizes, query.read, **request).parts)


def _refined_radius(domain: Domain) -> float:
    return REFINED_RADIUS * component_radius(domain)


def _without(found: Clustering, none: NDArray[np.bool_]) -> Clustering:
    """Clusters but for some, whose clients are left with the nearest of the others."""
    if none.all():
        return found
    kept = np.flatnonzero(~none)
    return _renumbered(found, found.centers[kept], assign(found.centers, found.centers[kept]))


def _together(found: Clustering, counts: Floats) -> Clustering:
    """Clusters of which those that are one have one centre, the mean of all their records."""
    near = cdist(found.centers, found.centers) < PARTS_APART
    n, groups = connected_components(near)
    weights = np.zeros((n, len(counts)))
    weights[groups, np.arange(len(counts))] = counts
    centers = weights @ found.centers / weights.sum(axis=1, keepdims=True)
    return _renumbered(found, centers, groups)


def _renumbered(found: Clustering, centers: Floats, new: Ints) -> Clustering:
    held = {
        client: new[clusters].tolist() for client, clusters in (found.client_clusters or {}).items()
    }
    return replace(found, centers=centers, client_clusters=held, weights=None)


def component_radius(domain: Domain) -> float:
    """How far records count: twice their root mean square distance in a cluster of unit covariance.

    In working coordinates, and never more than the region is wide.
    """
    return min(2 * float(np.sqrt(np.square(1 / domain.scale).sum())), 2 * domain.bound)


@dataclass(frozen=True)
class _Components:
    """Released maximisers of a client, in working coordinates."""

    start: Floats
    maximisers: Floats
    noise: Floats
    """Standard deviation of each maximiser's coordinates."""
    n_records: float | None

    def ball(self, domain: Domain) -> tuple[Floats, Floats]:
        """Maximisers and squared radii in the caller's coordinates.

        The noise adds its variance to the squared distance of a maximiser from where it started;
        that much is taken off again.
        """
        squared = np.square((self.maximisers - self.start) * domain.scale).sum(axis=1)
        bias = np.square(domain.scale).sum() * np.square(self.noise)
        return domain.leave(self.maximisers), np.maximum(0, squared - bias)


def _ask_sums(session: Session, requests: dict[str, Values]) -> dict[str, _Components]:
    domain = session.domain

    def read(client: str, reply: Values) -> _Components:
        radius = requests[client]["radius"]
        query = _soft_sums(domain.hold(reply["start"]), radius, domain, session.spec)
        share = requests[client]["share"] / requests[client]["n_steps"]
        cells = query.read(session.noisy(reply, ("counts", "sums"), query, share))
        weights = np.maximum(cells.counts, cells.count_sigma)
        n = float(np.maximum(cells.counts, 0).sum())
        maximisers = moved(cells, radius, domain)
        return _Components(query.centers, maximisers, cells.sum_sigma / weights, n)

    return session.ask(SUMS, requests, read=read)


def _ask_means(
    session: Session, requests: dict[str, Values], rounds: Rounds
) -> dict[str, _Components]:
    domain = session.domain
    asked = {
        client: {
            **request,
            "floor": rounds.floor[client],
            "enforced": "yes" if rounds.enforced else "no",
            "bound": "theorem9" if rounds.calibration == "theorem9" else "exact",
        }
        for client, request in requests.items()
    }

    def read(client: str, reply: Values) -> _Components:
        start = domain.hold(reply["start"])
        request = asked[client]
        soft = _soft_sums(start, request["radius"], domain, session.spec)
        query = FloorMeans(soft, request["floor"], request["bound"] == "theorem9")
        share = request["share"] / request["n_steps"]
        means, sigma = query.read(session.noisy(reply, ("means",), query, share))
        noise = np.full(len(start), sigma)
        return _Components(start, domain.hold(start + means), noise, None)

    return session.ask(MEANS, asked, read=read)


def _soft_sums(centers: Floats, radius: float, domain: Domain, spec: PrivacySpec) -> SoftSums:
    weight = round_count_weight(domain.n_features, spec.adjacency)
    return SoftSums(centers, domain.scale, radius, weight)


def _private_seeds(
    session: Session,
    n_components: Mapping[str, int],
    rounds: Rounds,
    collect_seeds: Callable[[float], Synopsis],
    rng: np.random.Generator,
) -> dict[str, Floats]:
    domain = session.domain
    if rounds.seeding == "public":
        return {c: public_spread(domain, n_components[c], rng) for c in session.clients}
    if rounds.seeding == "local":
        requests = {client: {"n_components": n_components[client]} for client in session.clients}
        bounds: dict[str, Bounds] = {client: {"k": n} for client, n in n_components.items()}
        replies = session.ask(LOCAL_SEED, requests, bounds)
        return {client: domain.hold(reply["centers"]) for client, reply in replies.items()}
    return {
        client: _seeds_of(part, n_components[client], domain, rng)
        for client, part in collect_seeds(rounds.share * rounds.seed_share)
        .summaries(n_components)
        .items()
    }


def _seeds_of(part: Summary, n: int, domain: Domain, rng: np.random.Generator) -> Floats:
    # Clusters are round in the caller's coordinates, not in working ones.
    scaled = replace(part, points=part.points * domain.scale)
    centers = _place(scaled, n, rng)[0] / domain.scale
    return padded(centers, n, domain, rng)


def _place(part: Summary, n: int, rng: np.random.Generator) -> tuple[Floats, Summary]:
    """Components on the points of a summary, and the points that are more than noise.

    A component that weighs no more than noise is a false one: noise has kept points far from all
    records, and a true cluster goes without. Such points are left out, as long as enough remain.
    """
    while True:
        centers, labels = kmeans(part.points, n, rng, weights=part.weights, n_init=N_STARTS)
        noise = part.noise * np.sqrt(np.bincount(labels))
        false = (np.bincount(labels, part.weights) < DOUBTFUL * noise)[labels]
        if not false.any() or (~false).sum() < n:
            return centers, part
        part = part.keep(~false)


def run_on_synopsis(
    synopsis: Synopsis,
    *,
    n_components: Mapping[str, int],
    n_rounds: int,
    n_steps: int,
    final_radius: float,
    rng: np.random.Generator,
) -> Clustering:
    """Both sides, from what was released: all rounds on the points of each client's summary."""
    domain = synopsis.domain
    parts, centers = {}, {}
    for client, part in synopsis.summaries(n_components).items():
        ours = replace(part, points=domain.leave(part.points))
        centers[client], parts[client] = _place(ours, n_components[client], rng)

    def stepped() -> list[tuple[Floats, Floats]]:
        balls = []
        for client, part in parts.items():
            maximisers = centers[client]
            for _ in range(n_steps):
                maximisers, squared_radii = fedgem.client_maximise(
                    part.points, maximisers, weights=part.weights
                )
            balls.append((maximisers, squared_radii))
        return balls

    for _ in range(n_rounds):
        centers = dict(zip(parts, _update(stepped()), strict=True))
    final = [
        (
            client,
            maximisers,
            fedgem.client_final_radii(maximisers, float(part.weights.sum()), final_radius),
        )
        for (client, part), (maximisers, _) in zip(parts.items(), stepped(), strict=True)
    ]
    found = _merge(None, final)
    weights = {}
    for (client, maximisers, _), part in zip(final, parts.values(), strict=True):
        held = np.asarray((found.client_clusters or {})[client])
        clusters = held[assign(part.points, maximisers)]
        counts = np.bincount(clusters, part.weights, len(found.centers))
        weights[client] = np.asarray(counts, dtype=np.float64)
    return replace(found, weights=weights)


def _merged(session: Session, replies: Replies) -> Clustering:
    final = [
        (client, reply["maximisers"], reply["squared_radii"]) for client, reply in replies.items()
    ]
    return _merge(session, final)


def _merge(session: Session | None, final: list[tuple[str, Floats, Floats]]) -> Clustering:
    """Global clusters from each client's maximisers and squared final radii."""
    centers, groups = fedgem.server_merge(*_stacked([(rows, radii) for _, rows, radii in final]))
    if session is not None:
        session.note_centers(centers)
    ends = np.cumsum([len(rows) for _, rows, _ in final])[:-1]
    held = np.split(groups, ends)
    return Clustering(
        centers,
        {client: ours.tolist() for (client, _, _), ours in zip(final, held, strict=True)},
    )


def _stacked(balls: list[tuple[Floats, Floats]]) -> tuple[Floats, Floats, Ints]:
    maximisers, squared_radii = (np.concatenate(rows) for rows in zip(*balls, strict=True))
    owners = np.repeat(np.arange(len(balls)), [len(rows) for rows, _ in balls])
    return maximisers, squared_radii, owners


def _updated(replies: Replies) -> dict[str, Floats]:
    balls = [(reply["maximisers"], reply["squared_radii"]) for reply in replies.values()]
    return dict(zip(replies, _update(balls), strict=True))


def _update(balls: list[tuple[Floats, Floats]]) -> list[Floats]:
    """Where the server moves each client's components."""
    ends = np.cumsum([len(maximisers) for maximisers, _ in balls])[:-1]
    return np.split(fedgem.server_update(*_stacked(balls)), ends)
