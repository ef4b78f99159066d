"""Single releases that a user may ask for by themselves, and what can be made of them.

>>> import numpy as np
>>> from secure_fedclust import FKM, KFed, PrivacySpec
>>> from secure_fedclust.released import release_synopsis
>>> rng = np.random.default_rng(0)
>>> clients = [rng.normal([[-5, 0]] * 400 + [[5, 0]] * 400) for _ in range(3)]
>>> spec = PrivacySpec(epsilon=2.0, delta=1e-5, ranges=[(-10, 10), (-10, 10)])
>>> synopsis = release_synopsis(clients, privacy=spec, n_clusters=2, random_state=0)
>>> [model.fit(synopsis).n_clusters_ for model in (FKM(2), KFed(2))]  # charged once, above
[2, 2]
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from secure_fedclust.algorithms.lloyd import kmeans
from secure_fedclust.arrays import Floats
from secure_fedclust.errors import ParameterError
from secure_fedclust.parameters import check_counts, check_positive
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.mechanism import SamplerName
from secure_fedclust.privacy.queries import Cells
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.privacy.terms import Adjacency
from secure_fedclust.protocols import quality, ranges
from secure_fedclust.protocols.synopsis import Synopsis, SynopsisClient, cells_for, collect
from secure_fedclust.records import check_clients, check_records
from secure_fedclust.result import UNREADABLE
from secure_fedclust.run import Run, generator, open_run, require_spec

_FORMAT = "secure_fedclust synopsis 1"


@dataclass(frozen=True, eq=False)
class Released:
    """What every release says of itself.

    Attributes
    ----------
    guarantee : str
        What may be claimed about its privacy.
    privacy : mapping
        The privacy spec, as `PrivacySpec.from_dict` reads it.
    spent : mapping of client to float
        Epsilon that it has cost each client, at the spec's delta.
    anchors : mapping of client to (int, str)
        Number of rows and last hash of each client's ledger.
    sampler : str
    fallback : str or None
        What is left of the guarantee if fewer clients were honest than it assumes, where sums are
        protected.
    """

    guarantee: str
    privacy: Mapping[str, Any] = field(repr=False)
    spent: Mapping[str, float] = field(repr=False)
    anchors: Mapping[str, tuple[int, str]] = field(repr=False)
    sampler: str = field(repr=False)
    fallback: str | None = field(default=None, repr=False, kw_only=True)


@dataclass(frozen=True, eq=False)
class ReleasedSynopsis(Released):
    """Summaries of all clients' records: every estimator's `fit` takes it, at no further cost.

    Attributes
    ----------
    synopsis : Synopsis
    feature_names : sequence of str or None
    """

    synopsis: Synopsis = field(repr=False)
    feature_names: Sequence[str] | None = None

    def points(self) -> tuple[Floats, Floats]:
        """Weighted points that stand for all clients' records, in the caller's coordinates."""
        found = self.synopsis.pooled()
        return self.synopsis.domain.leave(found.points), found.weights

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        synopsis = self.synopsis
        content = {
            "format": _FORMAT,
            "guarantee": self.guarantee,
            "privacy": dict(self.privacy),
            "spent": dict(self.spent),
            "anchors": {client: list(anchor) for client, anchor in self.anchors.items()},
            "sampler": self.sampler,
            "feature_names": self.feature_names,
            "shared": synopsis.shared,
            "domain": _listed(vars(synopsis.domain)),
            "radius": dict(synopsis.radius),
            "cells": {client: _listed(vars(cells)) for client, cells in synopsis.cells.items()},
        }
        Path(path).write_text(json.dumps(content, allow_nan=False), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content.pop("format") != _FORMAT:
                raise ValueError("another format")
            synopsis = Synopsis(
                {client: Cells(**_arrays(cells)) for client, cells in content.pop("cells").items()},
                content.pop("radius"),
                Domain(**_arrays(content.pop("domain"))),
                content.pop("shared"),
            )
            _check_synopsis(synopsis)
            anchors = {c: (int(n), str(head)) for c, (n, head) in content.pop("anchors").items()}
            return cls(synopsis=synopsis, anchors=anchors, **content)
        except UNREADABLE as error:
            raise ParameterError(f"{path} is not a synopsis that this version can read") from error


def release_synopsis(
    clients: Any,
    *,
    privacy: PrivacySpec,
    n_clusters: int,
    n_rounds: int = 3,
    ledger: Any = None,
    sampler: SamplerName = "secure",
    random_state: Any = None,
    client_column: str | None = None,
    person_column: str | None = None,
) -> ReleasedSynopsis:
    """Spend the budget once, on a summary that any algorithm can run on.

    Privacy unit: a record of a client.
    Sensitivity: ``synopsis``, ``sums_and_counts`` and ``moments`` in docs/proofs/sensitivity.md.
    Who sees it: the server, client by client.

    Parameters
    ----------
    clients, client_column, person_column
        As in `FederatedClusterer.fit`.
    privacy : PrivacySpec
    n_clusters : int
        How many clusters the summary should be able to tell apart; more than there are does little
        harm.
    n_rounds : int
        Rounds in which each client moves its micro-clusters, above two features.
    ledger, sampler, random_state
        As in `FederatedClusterer`.
    """
    spec = _require_private(privacy)
    if spec.protection != "none":
        raise ParameterError(
            f"protection={spec.protection!r}: a synopsis is looked at client by client, which no "
            "protection of sums would hide; leave it out"
        )
    check_counts(n_clusters=n_clusters, n_rounds=n_rounds)
    run = open_run(
        clients,
        spec=spec,
        client_class=SynopsisClient,
        rng=generator(random_state),
        ledger=ledger,
        sampler=sampler,
        client_column=client_column,
        person_column=person_column,
    )
    session = run.session
    cells = cells_for(spec.public_size, n_clusters, len(session.clients), session.limit.mu)
    numbers = dict.fromkeys(session.clients, int(n_clusters))
    synopsis = collect(session, n_clusters=numbers, n_rounds=int(n_rounds), cells=cells)
    return ReleasedSynopsis(
        synopsis=synopsis, feature_names=run.records.feature_names, **_release_of(run)
    )


@dataclass(frozen=True)
class KSuggestion:
    """Numbers of clusters, and how well each separates a synopsis.

    Attributes
    ----------
    best : int
    scores : dict of int to float
        Simplified silhouette, from -1 to 1; higher is better.
    """

    best: int
    scores: dict[int, float]


def suggest_k(
    synopsis: ReleasedSynopsis,
    *,
    smallest: int = 2,
    largest: int = 20,
    random_state: Any = None,
) -> KSuggestion:
    """Which number of clusters fits a synopsis best; costs nothing more.

    Parameters
    ----------
    synopsis : ReleasedSynopsis
        It should have been released for about `largest` clusters.
    smallest, largest : int
        The numbers to try.
    random_state : int, numpy.random.Generator or None
    """
    if not isinstance(synopsis, ReleasedSynopsis):
        raise ParameterError(
            f"synopsis is a {type(synopsis).__name__}: give what release_synopsis(...) returned"
        )
    check_counts(smallest=smallest, largest=largest)
    if smallest < 2 or largest < smallest:
        raise ParameterError(
            f"smallest={smallest}, largest={largest}: give 2 <= smallest <= largest"
        )
    rng = generator(random_state)
    found = synopsis.synopsis.pooled()
    scores: dict[int, float] = {}
    for k in range(smallest, min(largest, len(found.points) - 1) + 1):
        centers, _ = kmeans(found.points, k, rng, weights=found.weights, n_init=10)
        if len(centers) < k:
            break
        squared = np.square(found.points[:, None] - centers[None]).sum(axis=2)
        own, other = np.sort(squared, axis=1)[:, :2].T + found.spreads
        scores[k] = float(
            np.average(1 - np.sqrt(own / np.maximum(other, 1e-300)), weights=found.weights)
        )
    if not scores:
        raise ParameterError(
            f"{len(found.points)} cells stand out from the noise, too few for {smallest} clusters: "
            "more epsilon or more records are needed"
        )
    return KSuggestion(max(scores, key=lambda k: scores[k]), scores)


@dataclass(frozen=True, eq=False)
class ReleasedRanges(Released):
    """Noisy ranges of the features.

    Attributes
    ----------
    ranges : list of (low, high)
        For `PrivacySpec`.
    feature_names : sequence of str or None
    """

    ranges: list[tuple[float, float]]
    feature_names: Sequence[str] | None = None


def private_ranges(
    clients: Any,
    *,
    epsilon: float,
    delta: float,
    largest: float,
    coverage: float = 0.98,
    adjacency: Adjacency = "add_remove",
    records_per_person: int | None = None,
    ledger: Any = None,
    sampler: SamplerName = "secure",
    client_column: str | None = None,
    person_column: str | None = None,
) -> ReleasedRanges:
    """Buy the ranges of features that nobody knows: noisy quantiles of all clients together.

    What it costs comes on top of what is done with the ranges; a ledger keeps count.

    Privacy unit: a record of a client.
    Sensitivity: ``histogram`` in docs/proofs/sensitivity.md.
    Who sees it: the server, client by client.

    Parameters
    ----------
    clients, client_column, person_column
        As in `FederatedClusterer.fit`; not an engine.
    epsilon, delta : float
    largest : float
        No value is farther from zero than this, whatever the feature: generous, and not taken
        from the data. Resolution ends at about a millionth of a millionth of it, and is relative
        to the distance from zero: subtract an offset that you know.
    coverage : float
        About which part of the records lies within each range.
    adjacency, records_per_person
        As in `PrivacySpec`.
    ledger, sampler
        As in `FederatedClusterer`.
    """
    check_positive(largest=largest)
    if not 0.5 <= coverage < 1:
        raise ParameterError(f"coverage={coverage}: give a number from 0.5 to below 1")
    records = check_clients(clients, client_column, person_column, allow_none=True)
    spec = PrivacySpec(
        epsilon=epsilon,
        delta=delta,
        ranges=[(-float(largest), float(largest))] * (records.n_features or 1),
        adjacency=adjacency,
        records_per_person=records_per_person,
    )
    run = open_run(
        clients,
        spec=spec,
        client_class=ranges.RangesClient,
        rng=generator(None),
        ledger=ledger,
        sampler=sampler,
        client_column=client_column,
        person_column=person_column,
    )
    domain = run.session.domain
    ends = ranges.run(run.session, coverage) * domain.scale[:, None] + domain.center[:, None]
    return ReleasedRanges(
        ranges=[(float(low), float(high)) for low, high in ends],
        feature_names=run.records.feature_names,
        **_release_of(run),
    )


@dataclass(frozen=True, eq=False)
class ReleasedFigure(Released):
    """A noisy figure and its standard error, which the noise alone accounts for."""

    value: float
    standard_error: float


def noisy_nicv(
    clients: Any,
    centers: Any,
    *,
    privacy: PrivacySpec,
    cap: float | None = None,
    ledger: Any = None,
    sampler: SamplerName = "secure",
    client_column: str | None = None,
    person_column: str | None = None,
) -> ReleasedFigure:
    """Buy the mean squared distance of records to their nearest centre.

    Privacy unit: a record of a client.
    Sensitivity: ``cost`` in docs/proofs/sensitivity.md.
    Who sees it: the server, client by client; with a protection, the sum over clients only.

    Parameters
    ----------
    clients, client_column, person_column
        As in `FederatedClusterer.fit`.
    centers : array of shape (k, d)
        E.g. a model's ``cluster_centers_``.
    privacy : PrivacySpec
        Comes on top of what the centres have cost; a ledger keeps count.
    cap : float, optional
        Larger squared distances count as this much; that of the public region's edge from its
        middle, if not given. Smaller means less noise.
    ledger, sampler
        As in `FederatedClusterer`.
    """
    spec = _require_private(privacy)
    points = check_records(centers, "centers", spec.n_features)
    if cap is not None:
        check_positive(cap=cap)
    run = open_run(
        clients,
        spec=spec,
        client_class=quality.QualityClient,
        rng=generator(None),
        ledger=ledger,
        sampler=sampler,
        client_column=client_column,
        person_column=person_column,
    )
    domain = run.session.domain
    if points.shape[1] != domain.n_features:
        raise ParameterError(
            f"centers have {points.shape[1]} features, records have {domain.n_features}"
        )
    if cap is None:
        cap = float(np.square(domain.scale).sum())
    value, error = quality.run(run.session, points, float(cap))
    return ReleasedFigure(value=value, standard_error=error, **_release_of(run))


def _require_private(privacy: Any) -> PrivacySpec:
    spec = require_spec(privacy)
    spec.target()
    return spec


def _release_of(run: Run) -> dict[str, Any]:
    return {
        "guarantee": run.guarantee(),
        "privacy": run.session.spec.to_dict(),
        "spent": run.spent(),
        "anchors": dict(run.session.anchors),
        "sampler": run.sampler,
        "fallback": run.fallback(),
    }


def _check_synopsis(synopsis: Synopsis) -> None:
    """Raise a `ValueError` unless all parts of a synopsis fit together."""
    d = synopsis.domain.n_features
    if not synopsis.cells or set(synopsis.radius) != set(synopsis.cells):
        raise ValueError("clients that do not match")
    for cells in synopsis.cells.values():
        k = len(cells.counts)
        shapes = [np.shape(part) for part in (cells.centers, cells.counts, cells.sums)]
        if k < 1 or shapes != [(k, d), (k,), (k, d)]:
            raise ValueError("cells that do not match")
        if cells.squares is not None and np.shape(cells.squares) != (k,):
            raise ValueError("squares that do not match")
        parts = [cells.centers, cells.counts, cells.sums, cells.squares]
        if not all(np.isfinite(part).all() for part in parts if part is not None):
            raise ValueError("numbers that are not finite")
        if not (cells.count_sigma > 0 and cells.sum_sigma > 0):
            raise ValueError("no noise")
    for radius in synopsis.radius.values():
        if not 0 < radius < np.inf:
            raise ValueError("a radius that is none")


def _listed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


def _arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: np.asarray(value, dtype=np.float64) if isinstance(value, list) else value
        for name, value in values.items()
    }
