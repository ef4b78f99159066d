"""FedCRef with differential privacy: every model, score, count and mean is a release.

What a record's neighbours are must not decide where it belongs, or else one record could move all
others to other clusters, and noise on a cluster's model would hide nothing. So every assignment
here is a function of one record and of values that were released before:

- the start: a noisy synopsis of each client's records, clustered by the server. There is noise in
  every feature: many are therefore seen from a few directions, those in which all clients' records
  lie most by their noisy moments;
- models: autoencoders trained by DP-SGD, each on the records of its cluster, at a public rate that
  follows from the cluster's noisy count;
- scores: noisy numbers of records that a model is close for, relative to the own model's error of
  the same record (the paper's normalisation looks at all records, and is not available);
- rounds of a group: DP-SGD again, from the group's average. With masking or encryption the server
  learns the weighted sums of models, and not the models;
- refinement: by noisy counts of the records that each model is best for.

A record is in one cluster: training all clusters costs what the dearest of them costs. Whether a
client's clusters have settled would tell of its records, so that all clients go on to the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from secure_fedclust.algorithms import fedcref as algorithm
from secure_fedclust.algorithms.autoencoders import Autoencoder
from secure_fedclust.algorithms.lloyd import kmeans
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import ParameterError, ProtocolError
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.plan import PlannedRelease
from secure_fedclust.privacy.queries import Marks
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.protocols import synopsis
from secure_fedclust.protocols.averages import ask_averages
from secure_fedclust.protocols.cells import moved, pooled
from secure_fedclust.protocols.checkpoint import Results
from secure_fedclust.protocols.clustering import Clustering
from secure_fedclust.protocols.feature_space import FeatureSpace, digest
from secure_fedclust.protocols.fedcref import (
    Federation,
    Settings,
    associate,
    clustering,
    pieces,
)
from secure_fedclust.protocols.fedcref_client import (
    BEGIN,
    DIRECTIONS,
    MAX_LOCAL,
    MOST_SEEN,
    NOISY_GROUP,
    NOISY_LOCAL,
    NOISY_MEANS,
    NOISY_REFINE,
    NOISY_SCORES,
    PROJECT,
    counting,
    group_sums,
    picked_and_sizes,
)
from secure_fedclust.protocols.seeding import MOMENTS, ask_moments, moments_size, round_count_weight
from secure_fedclust.protocols.session import Session

SYNOPSIS_ROUNDS = 3
N_INIT = 10

MOST_NUMBERS = 1 << 22
"""In a message that says how to look at records."""

START_SHARE, MEANS_SHARE = 0.45, 0.05
SEEING_PART = 0.25
"""Of what the start has, for the directions that many features are seen from."""

LOCAL_PART, SCORES_PART, GROUPS_PART, COUNTS_PART = 0.35, 0.15, 0.42, 0.08
"""Of what is left for an iteration."""


@dataclass(frozen=True)
class Shares:
    """How a run's budget is divided; shares are of mu squared and add up to one.

    Attributes
    ----------
    start, means : float
    local, scores, group, counts : float
        In each iteration; `group` in each round of it.
    """

    start: float
    means: float
    local: float
    scores: float
    group: float
    counts: float

    @classmethod
    def of(cls, settings: Settings, *, spare: bool = False) -> "Shares":
        """The shares of a run; with one training to spare, where it may be cut off."""
        each = (1 - START_SHARE - MEANS_SHARE) / settings.max_iter
        longest = max(START_SHARE, each * LOCAL_PART, each * GROUPS_PART / settings.n_rounds)
        scale = 1 / (1 + longest) if spare else 1.0
        return cls(
            START_SHARE * scale,
            MEANS_SHARE * scale,
            each * LOCAL_PART * scale,
            each * SCORES_PART * scale,
            each * GROUPS_PART / settings.n_rounds * scale,
            each * COUNTS_PART * scale,
        )


def run_private(
    session: Session,
    *,
    n_local_clusters: Mapping[str, int],
    settings: Settings,
    clip: float,
    shares: Shares,
    rng: np.random.Generator,
) -> Clustering:
    """The server's side of a private run."""
    if (most := max(n_local_clusters.values())) > MAX_LOCAL:
        raise ParameterError(
            f"n_local_clusters={most}: with differential privacy at most {MAX_LOCAL}"
        )
    domain = session.domain
    shape = Autoencoder(domain.n_features, settings.hidden)
    initial = shape.initial(rng).astype(np.float32).astype(np.float64)
    sizes = _start(session, n_local_clusters, settings, shares.start, rng)
    history: list[tuple[float, float]] = []
    for _ in range(settings.max_iter):
        request = {
            "initial": initial,
            **settings.training(settings.start_epochs),
            "clip": clip,
            "share": shares.local,
        }
        replies = session.ask_once(
            NOISY_LOCAL,
            dict.fromkeys(sizes, request),
            {client: {"k": len(own)} for client, own in sizes.items()},
        )
        models = {client: reply["models"].astype(np.float64) for client, reply in replies.items()}
        found = _ask_scores(session, models, settings, shares.scores)
        groups = _federate(session, found, sizes, initial, settings, clip, shares.group)
        chosen = _ask_refine(session, found, groups, n_local_clusters, shares.counts)
        held = {client: found.of_client(client) for client in models}
        for client, (picked, size) in chosen.items():
            places = np.concatenate([found.of_client(client), np.arange(len(groups))])
            models[client] = np.concatenate([found.models[client], groups])[picked]
            held[client], sizes[client] = places[picked], size
        sizes = {client: sizes[client] for client in chosen}
        history.append(found.outcome())
        if algorithm.settled(history):
            break
    means = np.zeros((0, domain.n_features))
    if len(groups):
        means = _ask_means(session, len(groups), shares.means)
        session.note_centers(domain.leave(means))
    return clustering(shape, found, groups, models, held, history, domain.leave(means))


def n_seen(n_features: int) -> int:
    """Features, or mixtures of them, whose moments are looked at: as many as there is room for."""
    return min(n_features, MOST_SEEN, MOST_NUMBERS // n_features)


def principal_directions(session: Session, share: float, rng: np.random.Generator) -> Floats:
    """Directions in which all clients' records lie most, by their noisy moments.

    Of records only where they lie is looked at, not how far out: a bound has to be generous, and
    noise that hides a record of that length would hide all others, too.
    """
    n_features = session.domain.n_features
    first = np.eye(n_features)
    if (n := n_seen(n_features)) < n_features:
        first = np.linalg.qr(rng.normal(size=(n_features, n)))[0].T
    session.n_features, session.region = n, FeatureSpace(n, digest((), first))

    def found() -> Results:
        session.ask_all(PROJECT, directions=first)
        mean, covariance = ask_moments(session, share)
        _, axes = np.linalg.eigh(covariance + np.outer(mean, mean))
        return {"moments": {"directions": axes[:, -DIRECTIONS:].T @ first}}

    return np.asarray(session.once(found)["moments"]["directions"])


def _start(
    session: Session,
    n_local_clusters: Mapping[str, int],
    settings: Settings,
    share: float,
    rng: np.random.Generator,
) -> dict[str, Floats]:
    """Have every client begin with clusters found in a synopsis of it; about how large they are."""
    n_features = session.domain.n_features
    chance = rng.spawn(1)[0]
    if n_features > DIRECTIONS:
        seen = principal_directions(session, SEEING_PART * share, rng)
        requests = {client: {"directions": seen} for client in session.clients}
        # Who has not heard of them sees records otherwise, and would answer for nothing.
        n_local_clusters = {
            client: n_local_clusters[client] for client in session.ask_once(PROJECT, requests)
        }
        session.n_features, session.region = len(seen), FeatureSpace(len(seen))
        share *= 1 - SEEING_PART

    def found() -> Results:
        kept = synopsis.collect(
            session,
            n_clusters=n_local_clusters,
            n_rounds=SYNOPSIS_ROUNDS,
            cells=_cells(n_local_clusters, session.spec, session.limit),
            share=share,
        )
        begun: Results = {}
        for client, part in kept.summaries(n_local_clusters).items():
            k = min(n_local_clusters[client], len(part.points))
            centers, labels = kmeans(part.points, k, chance, weights=part.weights, n_init=N_INIT)
            sizes = np.bincount(labels, part.weights, len(centers))
            begun[client] = {"centers": centers, "sizes": np.maximum(sizes, 1.0)}
        return begun

    begun = session.once(found)
    hidden = np.asarray(settings.hidden)
    replies = session.ask_once(
        BEGIN, {client: {**fields, "hidden": hidden} for client, fields in begun.items()}
    )
    session.n_features, session.region = n_features, None
    return {client: begun[client]["sizes"] for client in replies}


def _cells(n_local_clusters: Mapping[str, int], spec: PrivacySpec, limit: Limit) -> int:
    return synopsis.cells_for(spec.public_size, max(n_local_clusters.values()), 1, limit.mu)


def _ask_scores(
    session: Session, models: Mapping[str, Floats], settings: Settings, share: float
) -> Federation:
    everyone = np.concatenate(list(models.values()))
    parts = []
    for piece in pieces(everyone):
        part = share * len(piece) / len(everyone)
        request = {"models": piece, "theta": settings.theta, "share": part}
        bounds = {client: {"k": len(own)} for client, own in models.items()}
        read = partial(_read_scores, session, models, len(piece), part)
        parts.append(session.ask_once(NOISY_SCORES, dict.fromkeys(models, request), bounds, read))
    whole = [client for client in models if all(client in part for part in parts)]
    found = {c: np.concatenate([part[c]["shares"] for part in parts], axis=1) for c in whole}
    return associate(models, found, settings.alpha)


def _read_scores(
    session: Session,
    models: Mapping[str, Floats],
    n_models: int,
    share: float,
    client: str,
    reply: dict[str, Any],
) -> dict[str, Any]:
    query = Marks(len(models[client]), n_models, _unasked)
    noisy = session.noisy(reply, ("counts", "marks"), query, share)
    counts, marks, sigma = query.read(noisy)
    # A share of a cluster that noise has made small is no share of anything.
    return {"shares": np.clip(marks / np.maximum(counts, 3 * sigma)[:, None], 0, 1)}


def _unasked(X: Floats) -> Any:
    """What only clients can answer."""
    raise ProtocolError("the server has no records to put a question to")


def _federate(
    session: Session,
    found: Federation,
    sizes: Mapping[str, Floats],
    initial: Floats,
    settings: Settings,
    clip: float,
    share: float,
) -> Floats:
    """One model a group, trained by rounds of federated averaging of noisy models."""
    groups = np.repeat(initial[None], found.n_groups, axis=0)
    asked = {client: mine for client in found.models if len(mine := found.members(client))}
    weights = _weights(found, sizes, asked)
    hold = session.spec.protection != "none"
    for _ in range(settings.n_rounds if asked else 0):
        requests = {
            client: {
                "clusters": mine,
                "models": groups[found.of_client(client)[mine]],
                "groups": found.of_client(client)[mine],
                "weights": weights[client],
                "hold": int(hold),
                **settings.training(settings.local_epochs),
                "clip": clip,
                "share": share,
            }
            for client, mine in asked.items()
        }
        bounds = {client: {"sent": 0 if hold else len(mine)} for client, mine in asked.items()}
        replies = session.ask_once(NOISY_GROUP, requests, bounds)
        told = [
            {
                client: float(weights[client][found.of_client(client)[mine] == group].sum())
                for client, mine in asked.items()
                if client in replies
            }
            for group in range(len(groups))
        ]
        if hold:
            groups = ask_averages(session, groups)
        else:
            groups = _averaged(replies, found, weights, told, groups)
    return groups


def _weights(
    found: Federation, sizes: Mapping[str, Floats], asked: Mapping[str, Ints]
) -> dict[str, Floats]:
    """What each cluster in a group counts: its share of the group's records, as far as known."""
    total = np.zeros(found.n_groups)
    for client, mine in asked.items():
        np.add.at(total, found.of_client(client)[mine], sizes[client][mine])
    return {
        client: sizes[client][mine] / total[found.of_client(client)[mine]]
        for client, mine in asked.items()
    }


def _averaged(
    replies: Mapping[str, Any],
    found: Federation,
    weights: Mapping[str, Floats],
    told: Sequence[Mapping[str, float]],
    before: Floats,
) -> Floats:
    total = np.zeros_like(before)
    for client, reply in replies.items():
        mine = found.members(client)
        for weight, group, model in zip(
            weights[client], found.of_client(client)[mine], reply["models"], strict=True
        ):
            total[group] += weight * model.astype(np.float64)
    present = np.array([sum(each.values()) for each in told])
    return np.where(present[:, None] > 0, total / np.maximum(present, 1e-300)[:, None], before)


def _ask_refine(
    session: Session,
    found: Federation,
    groups: Floats,
    n_local_clusters: Mapping[str, int],
    share: float,
) -> dict[str, tuple[Ints, Floats]]:
    requests = {
        client: {
            "models": groups,
            "groups": found.of_client(client),
            "n_clusters": n_local_clusters[client],
            "share": share,
        }
        for client in found.models
    }
    n = {client: len(own) + len(groups) for client, own in found.models.items()}

    def read(client: str, reply: dict[str, Any]) -> dict[str, Any]:
        query = counting(n[client], _unasked)
        noisy = session.noisy(reply, ("counts", "marks"), query, share)
        return {"counts": query.read(noisy)[0]}

    bounds = {client: {"c": n[client], "none": 0} for client in requests}
    replies = session.ask_once(NOISY_REFINE, requests, bounds, read)
    return {
        client: picked_and_sizes(reply["counts"], n_local_clusters[client])
        for client, reply in replies.items()
    }


def _ask_means(session: Session, n_groups: int, share: float) -> Floats:
    domain = session.domain
    d = domain.n_features
    weight = round_count_weight(d, session.spec.adjacency)
    query = group_sums(d, n_groups, weight, _unasked)

    def ask() -> Results:
        parts = session.ask_sum(
            NOISY_MEANS,
            query,
            share,
            {"g": n_groups + 1, "d": d},
            query.read,
            n_groups=n_groups,
            count_weight=weight,
        ).parts
        return {"means": {"centers": moved(pooled(parts), domain.bound, domain)[:n_groups]}}

    return np.asarray(session.once(ask)["means"]["centers"])


def planned_releases(
    domain: Domain,
    *,
    n_local_clusters: Mapping[str, int],
    settings: Settings,
    spec: PrivacySpec,
    limit: Limit,
    shares: Shares,
) -> list[PlannedRelease]:
    """The releases of a run: as many clusters, models and groups as there can be."""
    most, all_clusters = max(n_local_clusters.values()), sum(n_local_clusters.values())
    n_groups = all_clusters // 2
    p = Autoencoder(domain.n_features, settings.hidden).n_parameters
    iterations, rounds = settings.max_iter, settings.max_iter * settings.n_rounds
    # Training is released step by step; how many steps there are depends on noisy counts.
    return [
        *_planned_start(domain, most, _cells(n_local_clusters, spec, limit), spec, shares.start),
        PlannedRelease(NOISY_LOCAL.name, iterations, iterations * shares.local, most * p),
        PlannedRelease(
            NOISY_SCORES.name, iterations, iterations * shares.scores, most * (1 + all_clusters)
        ),
        PlannedRelease(
            NOISY_GROUP.name,
            rounds,
            rounds * shares.group,
            most * p,
            averaged=spec.protection != "none",
        ),
        PlannedRelease(NOISY_REFINE.name, iterations, iterations * shares.counts, most + n_groups),
        PlannedRelease(
            NOISY_MEANS.name,
            1,
            shares.means,
            (n_groups + 1) * (domain.n_features + 1),
            summed=spec.protection != "none",
        ),
    ]


def _planned_start(
    domain: Domain, n_clusters: int, cells: int, spec: PrivacySpec, share: float
) -> list[PlannedRelease]:
    seeing, n_features = 0.0, domain.n_features
    releases = []
    if n_features > DIRECTIONS:
        seeing, size = SEEING_PART * share, moments_size(n_seen(n_features))
        summed = spec.protection != "none"
        releases.append(PlannedRelease(MOMENTS.name, 1, seeing, size, summed=summed))
        domain = FeatureSpace(DIRECTIONS).domain
    return releases + synopsis.planned(
        domain,
        n_clusters=n_clusters,
        n_rounds=SYNOPSIS_ROUNDS,
        cells=cells,
        share=share - seeing,
    )
