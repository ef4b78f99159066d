"""The front door: federated clustering with scikit-learn's manners.

>>> import numpy as np
>>> from secure_fedclust import FKM, PrivacySpec
>>> rng = np.random.default_rng(0)
>>> hospital_a = rng.normal([[0, 0]] * 50 + [[9, 9]] * 50)
>>> hospital_b = rng.normal([[9, 9]] * 50 + [[0, 9]] * 50)
>>> model = FKM(n_clusters=3, privacy=PrivacySpec.none(reason="example"), random_state=0)
>>> model.fit([hospital_a, hospital_b]).n_clusters_
3
>>> model.predict([[8.5, 9.5]]) == model.predict([[9.5, 8.5]])
array([ True])
"""

import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
from sklearn.base import BaseEstimator, ClusterMixin
from sklearn.utils.validation import _check_feature_names, check_is_fitted

from secure_fedclust.algorithms.lloyd import assign
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.engines import Engine, InProcessEngine
from secure_fedclust.errors import FederationWarning, ParameterError
from secure_fedclust.parameters import check_choice, check_counts, check_positive
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.protocols import feca, fedgem, fkm, gold, kfed
from secure_fedclust.protocols.client import Client
from secure_fedclust.protocols.clustering import Clustering
from secure_fedclust.protocols.session import Session
from secure_fedclust.records import Clients, check_clients, check_records
from secure_fedclust.result import FedClustResult, NonPrivate

Progress = Callable[[int, int], None]


class FederatedClusterer(ClusterMixin, BaseEstimator, ABC):  # type: ignore[misc]
    """What all estimators share: checking input, running the protocol, keeping the result.

    Attributes
    ----------
    cluster_centers_ : array of shape (n_clusters_, n_features_in_)
    n_clusters_ : int
        Number of global clusters found.
    client_names_ : list of str
        The clients, in the order given.
    labels_ : list of arrays
        For each client, in that order, the global cluster of each of its records. Not there when
        `fit` was given an engine: labels then stay with the clients. Back into a DataFrame they go
        client by client: ``frame.loc[frame["site"] == name, "label"] = labels``.
    result_ : FedClustResult
        Centres, history of the exchanges, bytes and timings.
    guarantee_ : str
        What may be claimed about the privacy of the run.
    """

    _client_class: ClassVar[type[Client]]

    privacy: PrivacySpec | None
    random_state: Any

    def fit(
        self,
        clients: Any,
        y: None = None,
        *,
        client_column: str | None = None,
        on_progress: Progress | None = None,
    ) -> Self:
        """Cluster the clients' records without pooling them.

        Parameters
        ----------
        clients : list of arrays, mapping of name to array, DataFrame, or Engine
            One array of shape (n_records, n_features) a client. A DataFrame needs
            `client_column`. An engine reaches clients that hold their records elsewhere.
        y : ignored
        client_column : str, optional
            The column of a DataFrame that says which client a row belongs to.
        on_progress : function, optional
            Called with the number of client replies so far and the number expected. Not called
            when `clients` is an engine.
        """
        spec = _require_spec(self.privacy)
        self._check_parameters()
        rng = _generator(self.random_state)
        started = time.perf_counter()
        engine: Engine
        if isinstance(clients, Engine):
            engine, records = clients, Clients({})
        else:
            records = check_clients(clients, client_column)
            engine = self._simulate(records, spec, rng, on_progress)
        session = Session(engine, spec, records.n_features)
        clustering = self._run(session, rng)
        self._keep(clustering, session, records, time.perf_counter() - started)
        if records.feature_names is not None:
            self.feature_names_in_ = np.asarray(records.feature_names, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        return self

    def predict(self, X: Any) -> Ints:
        """Index of the nearest global centre of each record.

        For FedGEM this may differ from `labels_`, which are chosen among the clusters that the
        record's client holds.
        """
        check_is_fitted(self)
        _check_feature_names(self, X, reset=False)
        return assign(check_records(X, "X", self.n_features_in_), self.cluster_centers_)

    def _simulate(
        self,
        records: Mapping[str, Floats],
        spec: PrivacySpec,
        rng: np.random.Generator,
        on_progress: Progress | None,
    ) -> InProcessEngine:
        handlers = {
            name: self._client_class(X, spec, child).handle
            for (name, X), child in zip(records.items(), rng.spawn(len(records)), strict=True)
        }
        total = len(records) * self._n_exchanges()
        done = 0

        def count(_: str) -> None:
            nonlocal done
            done += 1
            if on_progress is not None:
                on_progress(done, total)

        return InProcessEngine(handlers, on_reply=count)

    def _keep(
        self,
        clustering: Clustering,
        session: Session,
        records: Clients,
        seconds: float,
    ) -> None:
        centers = clustering.centers
        held = clustering.client_clusters or {}
        everything = range(len(centers))
        labels = {
            client: _nearest(X, centers, held.get(client, everything))
            for client, X in records.items()
        }
        parameters = self.get_params(deep=False)
        del parameters["privacy"]
        self.result_ = FedClustResult(
            algorithm=type(self).__name__,
            parameters={name: _plain(value) for name, value in parameters.items()},
            guarantee=session.spec.describe(),
            centers=centers,
            history=tuple(session.history),
            seconds=seconds,
            client_clusters=clustering.client_clusters,
            feature_names=records.feature_names,
            nonprivate=NonPrivate(labels=labels),
        )
        self.guarantee_ = self.result_.guarantee
        self.client_names_ = list(session.clients)
        self.cluster_centers_ = centers
        self.n_clusters_ = len(centers)
        self.n_features_in_ = centers.shape[1]
        if records:
            self.labels_ = list(labels.values())
        elif hasattr(self, "labels_"):
            del self.labels_
        asked = getattr(self, "n_clusters", None)
        if asked is not None and self.n_clusters_ < asked:
            warnings.warn(
                f"found {self.n_clusters_} clusters where {asked} were asked for",
                FederationWarning,
                stacklevel=3,
            )

    @abstractmethod
    def _check_parameters(self) -> None:
        """Raise a `ParameterError` for the first parameter that is not usable."""

    @abstractmethod
    def _run(self, session: Session, rng: np.random.Generator) -> Clustering:
        """Run the server's side of the protocol."""

    def _n_exchanges(self) -> int:
        return 1


class FKM(FederatedClusterer):
    """Federated k-means (Garst and Reinders): iterative, for a known number of clusters.

    Parameters
    ----------
    n_clusters : int
    n_rounds : int
        k-means steps that every client takes after seeding.
    n_init : int
        Restarts of the server's k-means over the clients' means.
    align : {"kmeans", "index"}
        How the server puts local clusters together: by weighted k-means over all local means, as
        in the paper, or by the index of the global centre, which needs only sums.
    privacy : PrivacySpec
        Required. `PrivacySpec.none(reason=...)` runs without protection.
    random_state : int, numpy.random.Generator or None

    See Also
    --------
    FederatedClusterer : what a fitted model has.
    """

    _client_class = fkm.FKMClient

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        n_rounds: int = 10,
        n_init: int = 10,
        align: Literal["kmeans", "index"] = "kmeans",
        privacy: PrivacySpec | None = None,
        random_state: Any = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.n_rounds = n_rounds
        self.n_init = n_init
        self.align = align
        self.privacy = privacy
        self.random_state = random_state

    def _check_parameters(self) -> None:
        check_counts(n_clusters=self.n_clusters, n_rounds=self.n_rounds, n_init=self.n_init)
        check_choice("align", self.align, ("kmeans", "index"))

    def _n_exchanges(self) -> int:
        return 1 + self.n_rounds

    def _run(self, session: Session, rng: np.random.Generator) -> Clustering:
        return fkm.run(
            session,
            n_clusters=int(self.n_clusters),
            n_rounds=int(self.n_rounds),
            n_init=int(self.n_init),
            align=self.align,
            rng=rng,
        )


class KFed(FederatedClusterer):
    """k-FED (Dennis, Li and Smith): one shot, for clients that hold few of the clusters.

    Parameters
    ----------
    n_clusters : int
    n_local_clusters : int or None
        Clusters that each client looks for (k'); the square root of `n_clusters`, rounded up, if
        None.
    privacy : PrivacySpec
        Required. `PrivacySpec.none(reason=...)` runs without protection.
    random_state : int, numpy.random.Generator or None

    See Also
    --------
    FederatedClusterer : what a fitted model has.
    """

    _client_class = kfed.KFedClient

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        n_local_clusters: int | None = None,
        privacy: PrivacySpec | None = None,
        random_state: Any = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.n_local_clusters = n_local_clusters
        self.privacy = privacy
        self.random_state = random_state

    def _check_parameters(self) -> None:
        check_counts(n_clusters=self.n_clusters)
        if self.n_local_clusters is not None:
            check_counts(n_local_clusters=self.n_local_clusters)

    def _run(self, session: Session, rng: np.random.Generator) -> Clustering:
        n_local_clusters = int(self.n_local_clusters or math.ceil(math.sqrt(self.n_clusters)))
        return kfed.run(
            session, n_clusters=int(self.n_clusters), n_local_clusters=n_local_clusters, rng=rng
        )


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
    privacy : PrivacySpec
        Required. `PrivacySpec.none(reason=...)` runs without protection.
    random_state : int, numpy.random.Generator or None

    See Also
    --------
    FederatedClusterer : what a fitted model has.
    """

    _client_class = feca.FeCAClient

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        n_init: int = 10,
        radius: Literal["empirical", "theoretical"] = "empirical",
        privacy: PrivacySpec | None = None,
        random_state: Any = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.n_init = n_init
        self.radius = radius
        self.privacy = privacy
        self.random_state = random_state

    def _check_parameters(self) -> None:
        check_counts(n_clusters=self.n_clusters, n_init=self.n_init)
        check_choice("radius", self.radius, ("empirical", "theoretical"))

    def _run(self, session: Session, rng: np.random.Generator) -> Clustering:
        return feca.run(
            session, n_clusters=int(self.n_clusters), n_init=int(self.n_init), radius=self.radius
        )


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
    n_rounds : int
        Collaborative rounds.
    final_radius : float
        Width of the final merging (v): larger finds fewer clusters.
    privacy : PrivacySpec
        Required. `PrivacySpec.none(reason=...)` runs without protection.
    random_state : int, numpy.random.Generator or None

    See Also
    --------
    FederatedClusterer : what a fitted model has.
    """

    _client_class = fedgem.FedGEMClient

    def __init__(
        self,
        n_local_clusters: int | Sequence[int] | Mapping[str, int] = 8,
        *,
        n_rounds: int = 10,
        final_radius: float = 1.0,
        privacy: PrivacySpec | None = None,
        random_state: Any = None,
    ) -> None:
        self.n_local_clusters = n_local_clusters
        self.n_rounds = n_rounds
        self.final_radius = final_radius
        self.privacy = privacy
        self.random_state = random_state

    def _check_parameters(self) -> None:
        check_counts(n_rounds=self.n_rounds)
        check_positive(final_radius=self.final_radius)

    def _n_exchanges(self) -> int:
        return 1 + self.n_rounds

    def _run(self, session: Session, rng: np.random.Generator) -> Clustering:
        numbers = _one_per_client("n_local_clusters", self.n_local_clusters, session.clients)
        found = fedgem.run(
            session,
            n_components=numbers,
            n_rounds=int(self.n_rounds),
            final_radius=float(self.final_radius),
        )
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


class GOLD(FederatedClusterer):
    """Global oriented local distribution learning: one shot, for fragmented clusters.

    Features are compared with each other, so standardise them first.

    Parameters
    ----------
    n_clusters : int or None
        If None, the number at which the server's repeated learning settles. On real data that is
        often far too small: give the number if it is known.
    privacy : PrivacySpec
        Required. `PrivacySpec.none(reason=...)` runs without protection.
    random_state : int, numpy.random.Generator or None

    See Also
    --------
    FederatedClusterer : what a fitted model has.
    """

    _client_class = gold.GOLDClient

    def __init__(
        self,
        n_clusters: int | None = None,
        *,
        privacy: PrivacySpec | None = None,
        random_state: Any = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.privacy = privacy
        self.random_state = random_state

    def _check_parameters(self) -> None:
        if self.n_clusters is not None:
            check_counts(n_clusters=self.n_clusters)

    def _run(self, session: Session, rng: np.random.Generator) -> Clustering:
        n_clusters = None if self.n_clusters is None else int(self.n_clusters)
        return gold.run(session, n_clusters=n_clusters, rng=rng)


def _require_spec(privacy: Any) -> PrivacySpec:
    if isinstance(privacy, PrivacySpec):
        return privacy
    raise ParameterError(
        f"privacy={privacy!r}: there is no default; pass PrivacySpec.none(reason=...) "
        "to run without differential privacy"
    )


def _generator(random_state: Any) -> np.random.Generator:
    try:
        rng = np.random.default_rng(random_state)
        if isinstance(rng.bit_generator.seed_seq, np.random.SeedSequence):
            return rng
        return np.random.default_rng(rng.integers(2**63))  # one that can have children
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"random_state={random_state!r}: give a whole number of at least 0, a numpy "
            "Generator or None"
        ) from error


def _one_per_client(name: str, value: Any, clients: Sequence[str]) -> dict[str, int]:
    if isinstance(value, Mapping):
        if set(value) != set(clients):
            raise ParameterError(f"{name}: give one number for each of {sorted(clients)}")
        numbers = dict(value)
    elif isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        if len(value) != len(clients):
            raise ParameterError(
                f"{name}: {len(value)} numbers for {len(clients)} clients; give one for each"
            )
        numbers = dict(zip(clients, value, strict=True))
    else:
        numbers = dict.fromkeys(clients, value)
    for client, number in numbers.items():
        check_counts(**{f"{name} of {client}": number})
    return {client: int(number) for client, number in numbers.items()}


def _nearest(X: Floats, centers: Floats, allowed: Sequence[int]) -> Ints:
    candidates = np.unique(np.asarray(allowed, dtype=np.int64))
    return candidates[assign(X, centers[candidates])]


def _plain(value: Any) -> Any:
    """Turn a parameter into what JSON can hold."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else repr(value)
