"""The front door: federated clustering with scikit-learn's manners.

>>> import numpy as np
>>> from secure_fedclust import FKM, PrivacySpec
>>> rng = np.random.default_rng(0)
>>> hospital_a = rng.normal([[0, 0]] * 500 + [[9, 9]] * 500)
>>> hospital_b = rng.normal([[9, 9]] * 500 + [[0, 9]] * 500)
>>> spec = PrivacySpec(epsilon=1.0, delta=1e-5, ranges=[(-5, 15), (-5, 15)])
>>> model = FKM(n_clusters=3, privacy=spec, random_state=0).fit([hospital_a, hospital_b])
>>> model.n_clusters_
3
>>> model.predict([[8.5, 9.5]]) == model.predict([[9.5, 8.5]])
array([ True])
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np

from secure_fedclust.base import MODEL_FORMAT, FederatedClusterer, one_per_client
from secure_fedclust.errors import FederationWarning, ParameterError
from secure_fedclust.parameters import (
    check_choice,
    check_counts,
    check_flags,
    check_positive,
)
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.mechanism import SamplerName
from secure_fedclust.privacy.plan import Feasibility, PlannedRelease
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.protocols import feca, fedgem, fkm, gold, kfed, refinement, seeding
from secure_fedclust.protocols.client import Client
from secure_fedclust.protocols.clustering import Clustering
from secure_fedclust.protocols.feasibility import pooled_feasibility
from secure_fedclust.protocols.session import Session
from secure_fedclust.protocols.synopsis import Synopsis, cells_for
from secure_fedclust.protocols.unnoised import UnnoisedClient
from secure_fedclust.result import UNREADABLE

Calibration = Literal["synopsis", "sums", "floor", "theorem9"]


class FKM(FederatedClusterer):
    """Federated k-means (Garst and Reinders): iterative, for a known number of clusters.

    Parameters
    ----------
    n_clusters : int
    n_rounds : int or None
        k-means steps that every client takes after seeding. If None, ten without differential
        privacy, and with it as many as pay: one up to two features, else one or two.
    n_init : int
        Restarts of the server's k-means over the clients' means.
    align : {"kmeans", "index"} or None
        How the server puts local clusters together: by weighted k-means over all local means, as
        in the paper, or by the index of the global centre, which needs only sums. If None, the
        first without differential privacy and the second with it: local means are given for
        clusters of two records or more, which cannot be decided on exact counts.
    one_shot : bool
        With differential privacy: cluster the synopses of all clients, instead of rounds.
    seeding : {"private", "public"}
        With differential privacy: where centres start, from small releases or from an even spread
        that costs nothing and knows nothing.
    privacy, ledger, sampler, random_state
        See `FederatedClusterer`.

    See Also
    --------
    FederatedClusterer : common parameters, and what a fitted model has.
    """

    _client_class = fkm.FKMClient

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        n_rounds: int | None = None,
        n_init: int = 10,
        align: Literal["kmeans", "index"] | None = None,
        one_shot: bool = False,
        seeding: Literal["private", "public"] = "private",
        privacy: PrivacySpec | None = None,
        ledger: Any = None,
        sampler: SamplerName = "secure",
        random_state: Any = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.n_rounds = n_rounds
        self.n_init = n_init
        self.align = align
        self.one_shot = one_shot
        self.seeding = seeding
        self.privacy = privacy
        self.ledger = ledger
        self.sampler = sampler
        self.random_state = random_state

    def _check_parameters(self) -> None:
        check_counts(n_clusters=self.n_clusters, n_init=self.n_init)
        if self.n_rounds is not None:
            check_counts(n_rounds=self.n_rounds)
        if self.align is not None:
            check_choice("align", self.align, ("kmeans", "index"))
        check_choice("seeding", self.seeding, ("private", "public"))
        check_flags(one_shot=self.one_shot)

    def _check_private(self, spec: PrivacySpec) -> None:
        super()._check_private(spec)
        if self.align == "kmeans":
            raise ParameterError(
                "align='kmeans' leaves out local clusters by their exact counts, which no noise "
                "covers: use align='index'"
            )

    def _n_exchanges(self) -> int:
        # A little more than there will be, where the number of features is not known yet.
        private = self.privacy is not None and self.privacy.is_private
        if private and self.one_shot:
            return 1
        if not private and self.privacy is not None and self.privacy.protection != "none":
            return 4 + fkm.N_MICRO_ROUNDS + int(self.n_rounds or 10)
        # Moments and up to five rounds come before the first of two or more.
        return 6 + int(self.n_rounds or 5) if private else 1 + int(self.n_rounds or 10)

    def _check_unprotected(self, spec: PrivacySpec) -> None:
        if spec.protection != "none" and self.align == "kmeans":
            raise ParameterError(
                "align='kmeans' needs each client's means, and with a protection the server sees "
                "only sums: use align='index'"
            )

    def _sums_only(self) -> bool:
        return not self.one_shot

    def _client_for(self, spec: PrivacySpec) -> type[Client]:
        if not spec.is_private and spec.protection != "none":
            return UnnoisedClient
        return super()._client_for(spec)

    def _run(self, session: Session, rng: np.random.Generator) -> Clustering:
        numbers = {
            "n_clusters": int(self.n_clusters),
            "n_rounds": 10 if self.n_rounds is None else int(self.n_rounds),
            "n_init": int(self.n_init),
        }
        if session.spec.protection != "none":
            return fkm.run_unnoised(session, **numbers, rng=rng)
        return fkm.run(session, **numbers, align=self.align or "kmeans", rng=rng)

    def _run_private(self, session: Session, rng: np.random.Generator) -> Clustering:
        if self.one_shot:
            return super()._run_private(session, rng)
        return fkm.run_private(
            session,
            n_clusters=int(self.n_clusters),
            n_init=int(self.n_init),
            recipe=self._recipe(session.spec, session.domain.n_features, len(session.clients)),
            rng=rng,
        )

    def _run_on_synopsis(self, synopsis: Synopsis, rng: np.random.Generator) -> Clustering:
        return fkm.run_on_synopsis(
            synopsis, n_clusters=int(self.n_clusters), n_init=int(self.n_init), rng=rng
        )

    def _clusters_to_tell_apart(self, clients: Sequence[str]) -> dict[str, int]:
        return dict.fromkeys(clients, int(self.n_clusters))

    def _cells(self, n_clusters: int, n_clients: int, n_records: int | None, mu: float) -> int:
        # The server adds up the cells of all clients.
        return cells_for(n_records, n_clusters, n_clients, mu)

    def _recipe(self, spec: PrivacySpec, n_features: int, n_clients: int) -> seeding.Recipe:
        return fkm.recipe(
            n_clusters=int(self.n_clusters),
            n_features=n_features,
            n_clients=n_clients,
            n_records=spec.counted_size,
            noise_terms=spec.noise_terms(n_clients),
            mu=Limit.of(*spec.target()).mu,
            seeding=self.seeding,
            n_rounds=None if self.n_rounds is None else int(self.n_rounds),
        )

    def _releases(self, spec: PrivacySpec, domain: Domain, n_clients: int) -> list[PlannedRelease]:
        if self.one_shot:
            return super()._releases(spec, domain, n_clients)
        recipe = self._recipe(spec, domain.n_features, n_clients)
        summed = spec.protection != "none"
        return seeding.planned(recipe, int(self.n_clusters), domain, summed=summed)

    def _feasibility(
        self, spec: PrivacySpec, n_clients: int, n_features: int, n_records: int
    ) -> Feasibility:
        # One shot looks at each client's synopsis, whose noise is the client's own.
        terms = n_clients if self.one_shot else spec.noise_terms(n_clients)
        return pooled_feasibility(
            Limit.of(*spec.target()),
            n_clients=n_clients,
            n_clusters=int(self.n_clusters),
            n_features=n_features,
            n_records=n_records,
            noise_terms=terms,
            whole_clients=spec.unit == "client",
        )


class KFed(FederatedClusterer):
    """k-FED (Dennis, Li and Smith): one shot, for clients that hold few of the clusters.

    Parameters
    ----------
    n_clusters : int
    n_local_clusters : int or None
        Clusters that each client looks for (k'); the square root of `n_clusters`, rounded up, if
        None.
    privacy, ledger, sampler, random_state
        See `FederatedClusterer`.

    See Also
    --------
    FederatedClusterer : common parameters, and what a fitted model has.
    """

    _client_class = kfed.KFedClient

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        n_local_clusters: int | None = None,
        privacy: PrivacySpec | None = None,
        ledger: Any = None,
        sampler: SamplerName = "secure",
        random_state: Any = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.n_local_clusters = n_local_clusters
        self.privacy = privacy
        self.ledger = ledger
        self.sampler = sampler
        self.random_state = random_state

    def _check_parameters(self) -> None:
        check_counts(n_clusters=self.n_clusters)
        if self.n_local_clusters is not None:
            check_counts(n_local_clusters=self.n_local_clusters)

    def _run(self, session: Session, rng: np.random.Generator) -> Clustering:
        return kfed.run(session, **self._numbers(), rng=rng)

    def _run_on_synopsis(self, synopsis: Synopsis, rng: np.random.Generator) -> Clustering:
        return kfed.run_on_synopsis(synopsis, **self._numbers(), rng=rng)

    def _clusters_to_tell_apart(self, clients: Sequence[str]) -> dict[str, int]:
        return dict.fromkeys(clients, self._numbers()["n_local_clusters"])

    def _numbers(self) -> dict[str, int]:
        local = self.n_local_clusters or math.ceil(math.sqrt(self.n_clusters))
        return {"n_clusters": int(self.n_clusters), "n_local_clusters": int(local)}


class FeCA(FederatedClusterer):
    """Federated centroid aggregation (Xu et al.): one shot, repairs bad local solutions.

    Parameters
    ----------
    n_clusters : int
        Both what each client looks for and the largest number returned.
    n_init : int
        Runs of each client's k-means, of which the best counts.
    radius : {"empirical", "theoretical"}
        How a client chooses the radii of its centroids. The theoretical rule exists for the
        paper's theorem, which assumes disjoint balls.
    privacy, ledger, sampler, random_state
        See `FederatedClusterer`.

    See Also
    --------
    FederatedClusterer : common parameters, and what a fitted model has.
    """

    _client_class = feca.FeCAClient

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        n_init: int = 10,
        radius: Literal["empirical", "theoretical"] = "empirical",
        privacy: PrivacySpec | None = None,
        ledger: Any = None,
        sampler: SamplerName = "secure",
        random_state: Any = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.n_init = n_init
        self.radius = radius
        self.privacy = privacy
        self.ledger = ledger
        self.sampler = sampler
        self.random_state = random_state

    def _check_parameters(self) -> None:
        check_counts(n_clusters=self.n_clusters, n_init=self.n_init)
        check_choice("radius", self.radius, ("empirical", "theoretical"))

    def _run(self, session: Session, rng: np.random.Generator) -> Clustering:
        return feca.run(
            session, n_clusters=int(self.n_clusters), n_init=int(self.n_init), radius=self.radius
        )

    def _run_on_synopsis(self, synopsis: Synopsis, rng: np.random.Generator) -> Clustering:
        return feca.run_on_synopsis(
            synopsis,
            n_clusters=int(self.n_clusters),
            n_init=int(self.n_init),
            radius=self.radius,
            rng=rng,
        )

    def _clusters_to_tell_apart(self, clients: Sequence[str]) -> dict[str, int]:
        return dict.fromkeys(clients, int(self.n_clusters))


SMALLEST_RADIUS = 1e-6
"""Of FedGEM's clusters, in units of half of the ranges."""

SEED_SHARE = 0.3
"""Of the budget of noisy FedGEM rounds, for where they start."""


class FedGEM(FederatedClusterer):
    """Federated generalized EM: finds the global number of clusters by itself.

    Clusters, not features, are taken to have a standard deviation of about one. Standardised
    features usually make clusters far narrower than that, which blurs them: multiply the features
    until a typical cluster has a standard deviation of one or more. `labels_` gives each client's
    records one of the clusters that this client holds; `result_.client_clusters` says which these
    are.

    Parameters
    ----------
    n_local_clusters : int, or one int a client
        How many clusters each client holds (K_g): one number for all, a sequence in the order of
        the clients, or a mapping of client name to number.
    n_rounds : int or None
        Collaborative rounds. If None, ten, or one where each is noised: more add noise.
    n_local_steps : int
        EM steps that a client takes in a round (S). With differential privacy each of them is a
        release, on a synopsis they are free.
    final_radius : float
        Width of the final merging (v): larger finds fewer clusters.
    calibration : {"synopsis", "sums", "floor", "theorem9"}
        With differential privacy, what clients release: one summary on which all rounds run
        (finds the number of clusters best); noisy sums and weights in each round; noisy means
        with a floor under their weights; or these with the noise of the paper's Theorem 9.
    seeding : {"private", "public", "local"}
        Where noisy rounds start from: a synopsis, an even spread, or, without a guarantee, from
        records as in the paper.
    floor : float or None
        Least weight of a component for ``floor`` and ``theorem9``; half of the public size over
        the number of local clusters, if None.
    enforce_floor : bool
        If false, means have no floor, as in the paper, and there is no guarantee.
    allow_unproved : bool
        Run what has no guarantee, with NO DP CLAIM in every output.
    privacy, ledger, sampler, random_state
        See `FederatedClusterer`.

    See Also
    --------
    FederatedClusterer : common parameters, and what a fitted model has.
    """

    _client_class = fedgem.FedGEMClient
    _private_class = fedgem.PrivateFedGEMClient
    _synopsis_rounds = 2

    def __init__(
        self,
        n_local_clusters: int | Sequence[int] | Mapping[str, int] = 8,
        *,
        n_rounds: int | None = None,
        n_local_steps: int = 1,
        final_radius: float = 1.0,
        calibration: Calibration = "synopsis",
        seeding: Literal["private", "public", "local"] = "private",
        floor: float | None = None,
        enforce_floor: bool = True,
        allow_unproved: bool = False,
        privacy: PrivacySpec | None = None,
        ledger: Any = None,
        sampler: SamplerName = "secure",
        random_state: Any = None,
    ) -> None:
        self.n_local_clusters = n_local_clusters
        self.n_rounds = n_rounds
        self.n_local_steps = n_local_steps
        self.final_radius = final_radius
        self.calibration = calibration
        self.seeding = seeding
        self.floor = floor
        self.enforce_floor = enforce_floor
        self.allow_unproved = allow_unproved
        self.privacy = privacy
        self.ledger = ledger
        self.sampler = sampler
        self.random_state = random_state

    def _check_parameters(self) -> None:
        check_counts(n_local_steps=self.n_local_steps)
        if self.n_rounds is not None:
            check_counts(n_rounds=self.n_rounds)
        check_positive(final_radius=self.final_radius)
        check_choice("calibration", self.calibration, ("synopsis", "sums", "floor", "theorem9"))
        check_choice("seeding", self.seeding, ("private", "public", "local"))
        check_flags(enforce_floor=self.enforce_floor, allow_unproved=self.allow_unproved)
        if self.floor is not None:
            check_positive(floor=self.floor)
            if not 1 <= self.floor <= fedgem.LARGEST_FLOOR:
                raise ParameterError(
                    f"floor={self.floor}: give a number from 1 to {fedgem.LARGEST_FLOOR}"
                )

    def _scale(self, domain: Domain) -> list[float] | None:
        return None  # its clusters are round in the caller's coordinates

    def _client_for(self, spec: PrivacySpec) -> type[Client]:
        if spec.is_private and self._unproved() is not None:
            return fedgem.UnprovedFedGEMClient
        return super()._client_for(spec)

    def _unproved(self) -> str | None:
        if self.calibration == "synopsis":
            return None
        if self.seeding == "local":
            return "seeding='local' sends records as the first centres: the start must be public"
        if self.calibration != "sums" and not self.enforce_floor:
            return (
                "enforce_floor=False: without a floor under their weights one record can move "
                "means across the whole region, whatever the formula says"
            )
        return None

    def _check_private(self, spec: PrivacySpec) -> None:
        super()._check_private(spec)
        needs_floor = self.calibration in ("floor", "theorem9")
        if self.calibration == "synopsis" and self.seeding != "private":
            raise ParameterError(
                f"seeding={self.seeding!r} has no effect with calibration='synopsis', which is "
                "its own start: leave it out, or choose another calibration"
            )
        if not needs_floor and (self.floor is not None or not self.enforce_floor):
            raise ParameterError(
                f"floor and enforce_floor have no effect with calibration={self.calibration!r}: "
                "leave them out, or choose 'floor' or 'theorem9'"
            )
        if self.calibration != "synopsis":
            self._check_scale(spec)
        if needs_floor and spec.public_size is None:
            raise ParameterError(
                f"calibration={self.calibration!r} needs public_size in the privacy spec: the "
                "number of records sets the floor and the final radius, and is not released"
            )

    def _check_scale(self, spec: PrivacySpec) -> None:
        domain = Domain.of(spec, spec.n_features or 1)
        if fedgem.component_radius(domain) < SMALLEST_RADIUS:
            raise ParameterError(
                "the ranges or the bound are too wide for FedGEM, whose clusters have a standard "
                "deviation of about one: scale the features, and the ranges with them"
            )

    def _n_exchanges(self) -> int:
        private = self.privacy is not None and self.privacy.is_private
        if private and self.calibration == "synopsis":
            return 1
        return 1 + int(self.n_rounds or (1 if private else 10))

    def _run(self, session: Session, rng: np.random.Generator) -> Clustering:
        return self._check_merging(
            fedgem.run(session, **self._arguments(session.clients, noised=False))
        )

    def _run_on_synopsis(self, synopsis: Synopsis, rng: np.random.Generator) -> Clustering:
        arguments = self._arguments(list(synopsis.cells), noised=False)
        return self._check_merging(fedgem.run_on_synopsis(synopsis, **arguments, rng=rng))

    def _refine(self, session: Session, found: Clustering, share: float) -> Clustering:
        return fedgem.refine(session, found, share)

    def _run_local(self, session: Session, share: float, rng: np.random.Generator) -> Clustering:
        if self.calibration == "synopsis":
            return super()._run_local(session, share, rng)
        arguments = self._arguments(session.clients, noised=True)
        size = session.spec.public_size
        rounds = fedgem.Rounds(
            self.calibration,
            self.seeding,
            share,
            self._seed_share(),
            {client: self._floor(n, size) for client, n in arguments["n_components"].items()},
            self.enforce_floor,
            size,
        )
        return self._check_merging(
            fedgem.run_private(
                session,
                **arguments,
                rounds=rounds,
                collect_seeds=lambda part: self._collect(session, part),
                rng=rng,
            )
        )

    def _arguments(self, clients: Sequence[str], *, noised: bool) -> dict[str, Any]:
        return {
            "n_components": self._clusters_to_tell_apart(clients),
            "n_rounds": int(self.n_rounds or (1 if noised else 10)),
            "n_steps": int(self.n_local_steps),
            "final_radius": float(self.final_radius),
        }

    def _seed_share(self) -> float:
        return SEED_SHARE if self.seeding == "private" else 0.0

    def _floor(self, n_components: int, size: int | None) -> float:
        if self.floor is not None:
            return float(self.floor)
        return min(max(1.0, 0.5 * (size or 0) / n_components), fedgem.LARGEST_FLOOR)

    def _clusters_to_tell_apart(self, clients: Sequence[str]) -> dict[str, int]:
        return one_per_client("n_local_clusters", self.n_local_clusters, clients)

    def _local_releases(
        self, spec: PrivacySpec, domain: Domain, n_clients: int, share: float
    ) -> list[PlannedRelease]:
        if self.calibration == "synopsis":
            return super()._local_releases(spec, domain, n_clients, share)
        releases = []
        seeds = share * self._seed_share()
        if seeds:
            releases = super()._local_releases(spec, domain, n_clients, seeds)
        arguments = self._arguments(self._planned_names(n_clients), noised=True)
        k, d = max(arguments["n_components"].values()), domain.n_features
        n_rounds = arguments["n_rounds"]
        times = n_rounds * arguments["n_steps"]
        if self.calibration == "sums":
            name, coordinates = fedgem.SUMS.name, k * (d + 1)
        else:
            name, coordinates = fedgem.MEANS.name, k * d
        rounds = PlannedRelease(name, times, share - seeds, coordinates, n_rounds, k * d)
        return [*releases, rounds]

    def _refinement_releases(self, coordinates: int, share: float) -> list[PlannedRelease]:
        if self.calibration != "synopsis":
            return super()._refinement_releases(coordinates, share)
        counted = share * fedgem.CONFIRM_SHARE
        name = f"{refinement.NAME}: counts"
        confirm = PlannedRelease(name, 1, counted, coordinates, summed=True)
        return [confirm, *super()._refinement_releases(coordinates, share - counted)]

    def _planned_names(self, n_clients: int) -> list[str]:
        if not isinstance(self.n_local_clusters, Mapping):
            return super()._planned_names(n_clients)
        if len(self.n_local_clusters) != n_clients:
            raise ParameterError(
                f"n_local_clusters: {len(self.n_local_clusters)} numbers for {n_clients} clients; "
                "give one for each"
            )
        return list(self.n_local_clusters)

    def _check_merging(self, found: Clustering) -> Clustering:
        held = list((found.client_clusters or {}).values())
        n_components = sum(map(len, held))
        if len(held) > 2 and len(found.centers) > n_components / 2:
            warnings.warn(
                f"of {n_components} local clusters {len(found.centers)} stayed apart: unless "
                "clients really share few, raise final_radius, or scale the features until a "
                "typical cluster has a standard deviation of one",
                FederationWarning,
                stacklevel=3,
            )
        return found


UNKNOWN_CLUSTERS = 16
"""Clusters that a synopsis is made for where their number is not known."""


class GOLD(FederatedClusterer):
    """Global oriented local distribution learning: one shot, for fragmented clusters.

    Features are compared with each other, so standardise them first.

    Parameters
    ----------
    n_clusters : int or None
        If None, the number at which the server's repeated learning settles. On real data that is
        often far too small: give the number if it is known.
    privacy, ledger, sampler, random_state
        See `FederatedClusterer`.

    See Also
    --------
    FederatedClusterer : common parameters, and what a fitted model has.
    """

    _client_class = gold.GOLDClient

    def __init__(
        self,
        n_clusters: int | None = None,
        *,
        privacy: PrivacySpec | None = None,
        ledger: Any = None,
        sampler: SamplerName = "secure",
        random_state: Any = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.privacy = privacy
        self.ledger = ledger
        self.sampler = sampler
        self.random_state = random_state

    def _check_parameters(self) -> None:
        if self.n_clusters is not None:
            check_counts(n_clusters=self.n_clusters)

    def _run(self, session: Session, rng: np.random.Generator) -> Clustering:
        n_clusters = None if self.n_clusters is None else int(self.n_clusters)
        return gold.run(session, n_clusters=n_clusters, rng=rng)

    def _run_on_synopsis(self, synopsis: Synopsis, rng: np.random.Generator) -> Clustering:
        n_clusters = None if self.n_clusters is None else int(self.n_clusters)
        return gold.run_on_synopsis(synopsis, n_clusters=n_clusters, rng=rng)

    def _clusters_to_tell_apart(self, clients: Sequence[str]) -> dict[str, int]:
        return dict.fromkeys(clients, int(self.n_clusters or UNKNOWN_CLUSTERS))


def load_model(path: str | Path) -> FederatedClusterer:
    """Read a fitted model that `FederatedClusterer.save` wrote."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != MODEL_FORMAT:
            raise ValueError("another format")
        privacy = content["privacy"]
        spec = None if privacy is None else PrivacySpec.from_dict(privacy)
        model = class_named(content["class"])(**content["parameters"], privacy=spec)
        return model._restore(content)
    except UNREADABLE as error:
        raise ParameterError(f"{path} is not a model that this version can read") from error


def class_named(name: str) -> type[FederatedClusterer]:
    """The estimator of this name; those that train networks are imported when first used."""
    if name in NEURAL:
        found: type[FederatedClusterer] = getattr(import_module("secure_fedclust.neural"), name)
        return found
    return _CLASSES[name]


NEURAL = ("FedCRef", "DeepFeCA")

_CLASSES: dict[str, type[FederatedClusterer]] = {
    "FKM": FKM,
    "KFed": KFed,
    "FeCA": FeCA,
    "FedGEM": FedGEM,
    "GOLD": GOLD,
}
