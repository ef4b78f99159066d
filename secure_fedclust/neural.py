"""Estimators of systems that train networks: `FedCRef` and `DeepFeCA` (extra ``deep``)."""

import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from sklearn.utils.validation import _check_feature_names, check_is_fitted

from secure_fedclust.algorithms.backbones import Backbone
from secure_fedclust.algorithms.deepfeca import probe
from secure_fedclust.algorithms.lloyd import assign
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.base import FederatedClusterer, one_per_client
from secure_fedclust.engines import Engine, Fault
from secure_fedclust.errors import DataError, FederationWarning, ParameterError
from secure_fedclust.parameters import check_choice, check_counts, check_flags, check_positive
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.ledger import Anchor, Ledger
from secure_fedclust.privacy.mechanism import SamplerName
from secure_fedclust.privacy.plan import Feasibility, PlannedRelease
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.protocols import (
    deepfeca,
    deepfeca_private,
    fedcref,
    fedcref_client,
    fedcref_private,
)
from secure_fedclust.protocols.checkpoint import Journal
from secure_fedclust.protocols.client import Client
from secure_fedclust.protocols.clustering import Clustering
from secure_fedclust.protocols.session import Session
from secure_fedclust.protocols.synopsis import Synopsis
from secure_fedclust.records import check_records
from secure_fedclust.result import FedClustResult
from secure_fedclust.run import Progress, Run

LARGEST_RATE = 10.0
LARGE = 20.0
"""Networks have been tried on records of the order of one; beyond this a user is warned."""

_NEEDED = ("torch", "opacus", "dp_accounting")


class NeuralClusterer(FederatedClusterer):
    """What estimators that train networks share.

    See Also
    --------
    FederatedClusterer : common parameters, and what a fitted model has.
    """

    _checkpointed = False

    def fit(
        self,
        clients: Any,
        y: None = None,
        *,
        client_column: str | None = None,
        person_column: str | None = None,
        on_progress: Progress | None = None,
        faults: Sequence[Fault] = (),
        checkpoint: str | Path | None = None,
    ) -> Self:
        """Cluster the clients' records without pooling them; see `FederatedClusterer.fit`."""
        _require_packages(self)
        self._look_at(clients)
        self._checkpointed = checkpoint is not None
        try:
            return super().fit(
                clients,
                y,
                client_column=client_column,
                person_column=person_column,
                on_progress=on_progress,
                faults=faults,
                checkpoint=checkpoint,
            )
        finally:
            self._checkpointed = False

    def _prepare(self, journal: Journal | None, name: str, client: Client) -> None:
        super()._prepare(journal, name, client)
        # With differential privacy records are brought into a region, and whoever is out is told.
        if not client.spec.is_private and np.abs(client.X).max(initial=0.0) > LARGE:
            _warn(
                f"there are records beyond {LARGE:g}: networks learn from numbers of the order of "
                "one; divide pixels by 255, or standardise the features"
            )

    def _keep_run(self, clustering: Clustering, run: Run, seconds: float) -> None:
        super()._keep_run(clustering, run, seconds)
        run.finish()  # how many exchanges there are depends on what is found

    def _entered(self, X: Floats) -> Floats:
        """Records as the networks have seen them."""
        spec = PrivacySpec.from_dict(dict(self.result_.privacy))
        return Domain.of(spec, X.shape[1]).enter(X)[0] if spec.is_private else X

    def _look_at(self, clients: Any) -> None:
        """Look at what `fit` was given, before anything else is done with it."""

    def _check_private(self, spec: PrivacySpec) -> None:
        super()._check_private(spec)
        if spec.adjacency != "add_remove":
            raise ParameterError(
                f"adjacency={spec.adjacency!r}: noisy training samples records at random, which "
                "is accounted for under adjacency='add_remove' only"
            )
        if spec.records_per_person is not None:
            raise ParameterError(
                "records_per_person: what noisy training costs a person with several records is "
                "not worked out; leave it out, and read the guarantee as one for each record"
            )

    def _check_unprotected(self, spec: PrivacySpec) -> None:
        if spec.protection != "none":
            raise ParameterError(
                f"protection={spec.protection!r} without epsilon: {type(self).__name__} shows the "
                "server what each client has trained or found, before anything is added up; give "
                "an epsilon, or use FKM, which needs only sums"
            )

    def _run_on_synopsis(self, synopsis: Synopsis, rng: np.random.Generator) -> Clustering:
        raise ParameterError(
            f"{type(self).__name__} trains networks on records, and a synopsis has none: fit it "
            "on clients' records"
        )

    def _feasibility(
        self, spec: PrivacySpec, n_clients: int, n_features: int, n_records: int
    ) -> Feasibility | None:
        return None

    def _clusters_to_tell_apart(self, clients: Sequence[str]) -> dict[str, int]:
        raise ParameterError(f"{type(self).__name__} makes no synopsis of records")

    def _journal(self, folder: str | Path, spec: PrivacySpec, clients: Any) -> Journal:
        charged_here = spec.is_private and not isinstance(clients, Engine)
        if charged_here and not isinstance(self.ledger, str | Path):
            raise ParameterError(
                "checkpoint with differential privacy needs a ledger in a file, or what a killed "
                "run has spent would be forgotten: make one with `secure-fedclust ledger init`"
            )
        parameters = self._public_parameters()
        for name in ("privacy", "ledger", "random_state"):
            del parameters[name]
        plain = {name: repr(value) for name, value in parameters.items()}
        if charged_here:
            with Ledger.open(self.ledger, read_only=True) as ledger:
                plain["ledger"] = ledger.origin
                journal = Journal(folder, {**_of(self, spec), **plain})
                # What an earlier process has seen of the ledger must still be there.
                ledger.verify(Anchor(*each) for each in journal.anchors())
            return journal
        return Journal(folder, {**_of(self, spec), **plain})

    def _subject(self, n_clients: int | None, n_features: int | None) -> Any:
        raise ParameterError(
            f"{type(self).__name__} cannot be audited by attacks: a distinguishing game would "
            "train thousands of networks. Its report recomputes every charge, and "
            "tests/privacy/test_dpsgd.py plays the game on single steps"
        )


class FedCRef(NeuralClusterer):
    """Federated cluster refinement (Nardi, Valerio and Passarella): finds the number of clusters.

    Clients train one autoencoder for each of their clusters; clusters that reconstruct each other's
    records are linked, linked ones train together, and clients hand their records to the models
    that fit best. `n_clusters_` is the number of groups of linked clusters. `labels_` has -1 where
    a record's cluster is linked to no other; `clusters_` has the clusters that each client has
    ended with, linked or not. Records should be of the order of one, e.g. pixels from 0 to 1.

    Parameters
    ----------
    n_local_clusters : int, or one int a client
        How many clusters each client holds: one number for all, a sequence in the order of the
        clients, or a mapping of client name to number. Clients end with fewer where a model fits
        no record best.
    initial : "kmeans", or one array of labels a client
        Where clients start. With differential privacy ``"kmeans"`` runs on a noisy synopsis of each
        client; labels of one's own then have no guarantee.
    n_rounds, local_epochs : int
        Rounds of federated averaging in which a group trains its model, and epochs in each.
    normalisation : {"relative", "minmax"}
        How differences of reconstruction errors are judged: relative to the own model's error of
        the same record, or, as the paper prints it, scaled to their own smallest and largest, which
        links little, and has no guarantee.
    start_epochs : int
        Epochs in which a client trains the model of a cluster by itself; many more make models so
        much their own that none links.
    hidden : tuple of int
        Widths of the encoder; the decoder mirrors it.
    batch_size : int
        With differential privacy, about how many records are drawn into a step.
    learning_rate : float or None
        Of Adam. If None, 0.001, or 0.01 with differential privacy: a lower one leaves models alike.
    alpha, theta, tau : float
        Clusters are linked where, both ways, for a share `alpha` of records the normalised
        difference of errors is at most `theta`; a client is settled when a share `tau` of its
        records stays where it is.
    max_iter : int or None
        Most iterations. If None, five, or one with differential privacy: more add noise.
    clip : float
        With differential privacy: length that a record's gradient is shortened to.
    allow_unproved : bool
        Run what has no guarantee, with NO DP CLAIM in every output.
    privacy, ledger, sampler, random_state
        See `FederatedClusterer`.

    See Also
    --------
    FederatedClusterer : common parameters, and what a fitted model has.
    """

    _client_class = fedcref.FedCRefClient
    _private_class: ClassVar[Any] = fedcref_client.PrivateFedCRefClient

    def __init__(
        self,
        n_local_clusters: int | Sequence[int] | Mapping[str, int] = 3,
        *,
        initial: Any = "kmeans",
        n_rounds: int = 10,
        local_epochs: int = 1,
        normalisation: Literal["relative", "minmax"] = "relative",
        start_epochs: int = 8,
        hidden: tuple[int, ...] = (100, 64, 32),
        batch_size: int = 32,
        learning_rate: float | None = None,
        alpha: float = 0.75,
        theta: float = 0.2,
        tau: float = 0.8,
        max_iter: int | None = None,
        clip: float = 0.1,
        allow_unproved: bool = False,
        privacy: PrivacySpec | None = None,
        ledger: Any = None,
        sampler: SamplerName = "secure",
        random_state: Any = 0,
    ) -> None:
        self.n_local_clusters = n_local_clusters
        self.initial = initial
        self.n_rounds = n_rounds
        self.local_epochs = local_epochs
        self.normalisation = normalisation
        self.start_epochs = start_epochs
        self.hidden = hidden
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.alpha = alpha
        self.theta = theta
        self.tau = tau
        self.max_iter = max_iter
        self.clip = clip
        self.allow_unproved = allow_unproved
        self.privacy = privacy
        self.ledger = ledger
        self.sampler = sampler
        self.random_state = random_state

    @property
    def clusters_(self) -> list[Ints]:
        """For each client, the local cluster of each of its records. Not private."""
        check_is_fitted(self)
        if not hasattr(self, "_clusters"):
            raise AttributeError(
                "clusters are not kept in files, and stay with an engine's clients"
            )
        return self._clusters

    def predict(self, X: Any) -> Ints:
        """Index of the group whose model reconstructs each record best."""
        check_is_fitted(self)
        _check_feature_names(self, X, reset=False)
        records = check_records(X, "X", self.n_features_in_)
        return fedcref.assigned(self.result_.networks or {}, self._entered(records))

    def _check_parameters(self) -> None:
        check_counts(
            n_rounds=self.n_rounds,
            local_epochs=self.local_epochs,
            start_epochs=self.start_epochs,
            batch_size=self.batch_size,
        )
        _check_widths(self.hidden)
        if not len(self.hidden):
            raise ParameterError("hidden=(): give the width of one layer or more")
        if self.max_iter is not None:
            check_counts(max_iter=self.max_iter)
        _check_learning_rate(self.learning_rate)
        check_positive(clip=self.clip)
        for name, lowest in (("alpha", 0.0), ("theta", 0.0), ("tau", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise ParameterError(f"{name}={value!r}: give a number")
            highest = 1.0 if name != "theta" else np.inf
            if not lowest <= value <= highest:
                raise ParameterError(f"{name}={value!r}: give a number from {lowest} to {highest}")
        check_choice("normalisation", self.normalisation, ("relative", "minmax"))
        check_flags(allow_unproved=self.allow_unproved)
        if isinstance(self.initial, str):
            check_choice("initial", self.initial, ("kmeans",))

    def _unproved(self) -> str | None:
        if self.privacy is None or not self.privacy.is_private:
            return None
        if not isinstance(self.initial, str):
            return (
                "initial clusters that were given may depend on all records, so that one record "
                "could move the others: use initial='kmeans', which starts from released values"
            )
        if self.normalisation == "minmax":
            return (
                "normalisation='minmax' judges a record by all others: use 'relative', which "
                "looks at one record at a time"
            )
        return None

    def _check_private(self, spec: PrivacySpec) -> None:
        super()._check_private(spec)
        if self.normalisation == "minmax":
            raise ParameterError(
                "normalisation='minmax' has no noisy form: its scale is a single record's; use "
                "'relative'"
            )

    def _client_for(self, spec: PrivacySpec) -> type[Client]:
        if spec.is_private and not isinstance(self.initial, str):
            return fedcref_client.UnprovedFedCRefClient
        return super()._client_for(spec)

    def _public_parameters(self) -> dict[str, Any]:
        parameters = super()._public_parameters()
        if not isinstance(self.initial, str):
            # Labels are computed from records.
            parameters["initial"] = "labels"
        return parameters

    def _prepare(self, journal: Journal | None, name: str, client: Client) -> None:
        if not isinstance(self.initial, str):
            if name not in self._given:
                raise ParameterError(f"initial: no labels for {name}; give some for each client")
            labels = self._given[name]
            if len(labels) != len(client.X):
                raise DataError(
                    f"initial: {len(labels)} labels for the {len(client.X)} records of {name}"
                )
            client.begin_with(labels)  # type: ignore[attr-defined]
        super()._prepare(journal, name, client)

    def _look_at(self, clients: Any) -> None:
        if isinstance(self.initial, str):
            return
        if isinstance(clients, Engine):
            raise ParameterError(
                "initial: clients that an engine reaches have their labels with them; leave it "
                "out here"
            )
        self._given = _labels_by_client(self.initial, clients)

    def _settings(self, *, private: bool) -> fedcref.Settings:
        rate = self.learning_rate or (1e-2 if private else 1e-3)
        return fedcref.Settings(
            hidden=tuple(int(width) for width in self.hidden),
            n_rounds=int(self.n_rounds),
            local_epochs=int(self.local_epochs),
            start_epochs=int(self.start_epochs),
            batch_size=int(self.batch_size),
            learning_rate=float(rate),
            alpha=float(self.alpha),
            theta=float(self.theta),
            tau=float(self.tau),
            normalisation=self.normalisation,
            max_iter=int(self.max_iter or (1 if private else 5)),
        )

    def _numbers(self, clients: Sequence[str]) -> dict[str, int]:
        if len(clients) < 2:
            raise ParameterError("FedCRef links clusters of different clients: give two or more")
        return one_per_client("n_local_clusters", self.n_local_clusters, clients)

    def _run(self, session: Session, rng: np.random.Generator) -> Clustering:
        _n_features(session)
        return self._checked(
            fedcref.run(
                session,
                n_local_clusters=self._numbers(session.clients),
                settings=self._settings(private=False),
                rng=rng,
            )
        )

    def _run_private(self, session: Session, rng: np.random.Generator) -> Clustering:
        numbers = self._numbers(session.clients)
        settings = self._settings(private=True)
        shares = fedcref_private.Shares.of(settings, spare=self._checkpointed)
        return self._checked(
            fedcref_private.run_private(
                session,
                n_local_clusters=numbers,
                settings=settings,
                clip=float(self.clip),
                shares=shares,
                rng=rng,
            )
        )

    def _releases(self, spec: PrivacySpec, domain: Domain, n_clients: int) -> list[PlannedRelease]:
        numbers = self._numbers(self._planned_names(n_clients))
        settings = self._settings(private=True)
        shares = fedcref_private.Shares.of(settings, spare=self._checkpointed)
        return fedcref_private.planned_releases(
            domain,
            n_local_clusters=numbers,
            settings=settings,
            spec=spec,
            limit=Limit.of(*spec.target()),
            shares=shares,
        )

    def _planned_names(self, n_clients: int) -> list[str]:
        if isinstance(self.n_local_clusters, Mapping):
            return list(self.n_local_clusters)
        return super()._planned_names(n_clients)

    def _n_exchanges(self) -> int:
        private = self.privacy is not None and self.privacy.is_private
        settings = self._settings(private=private)
        first, iterations = (6, settings.max_iter) if private else (4, settings.max_iter + 1)
        return first + iterations * (3 + settings.n_rounds)

    def _expected_exchanges(self, spec: PrivacySpec) -> int:
        if spec.protection == "none":
            return self._n_exchanges()
        settings = self._settings(private=True)
        averages = settings.max_iter * settings.n_rounds
        keys = 1 if spec.protection == "ckks" else 0
        # With many features moments are a sum, too, and means are always one.
        return keys + self._n_exchanges() + (averages + 2) * spec.exchanges_per_sum

    def _checked(self, found: Clustering) -> Clustering:
        if not len(found.centers):
            _warn(
                "no clusters of different clients were linked: raise theta, or see whether clients "
                "share clusters at all"
            )
            return found
        groups = np.array((found.association or {})["groups"])
        if 2 * np.count_nonzero(groups < 0) > len(groups):
            _warn(
                f"{np.count_nonzero(groups < 0)} of {len(groups)} clusters are linked to no other: "
                "raise theta, or see whether clients share clusters at all"
            )
        return found

    def _label(
        self,
        client: str,
        X: Floats,
        clustering: Clustering,
        scale: Sequence[float] | None,
        held: Sequence[int] | None,
        session: Session,
    ) -> Ints:
        if session.spec.is_private:
            X = session.domain.enter(X)[0]
        networks = clustering.networks or {}
        if f"models of {client}" not in networks:
            return np.full(len(X), -1, dtype=np.int64)
        return fedcref.assigned(networks, X, client)

    def _keep_run(self, clustering: Clustering, run: Run, seconds: float) -> None:
        super()._keep_run(clustering, run, seconds)
        networks = clustering.networks or {}
        self._clusters = [
            fedcref.clusters_of(networks, self._entered(X), client)
            if f"models of {client}" in networks
            else np.zeros(len(X), dtype=np.int64)
            for client, X in run.records.items()
        ]


class DeepFeCA(NeuralClusterer):
    """DeepFeCA (Xu et al.): a network learns features from the clusters that FeCA finds in them.

    `cluster_centers_` are centres of features, which `transform` makes of records. Records should
    be of the order of one, e.g. pixels from 0 to 1.

    Parameters
    ----------
    n_clusters : int
        Clusters to find at the end.
    n_labels : int or None
        Clusters whose numbers the network learns to tell apart, more than one hopes to find. If
        None, five times `n_clusters`, or twice with differential privacy.
    n_rounds : int or None
        If None, six, or one with differential privacy: more add noise. With 0 the network stays
        as it is made by chance.
    local_epochs : int
        Epochs of each client in a round.
    backbone : {"dense", "conv"}
        Kind of network; "conv" takes records as square images of one channel, row by row.
    hidden : tuple of int
        Units of the dense layers between input and features.
    n_features_out : int
        Features that the network makes.
    n_init : int
        Runs of each client's k-means for the clusters at the end, of which the best counts.
    batch_size : int
        With differential privacy, about how many records are drawn into a step.
    learning_rate : float or None
        Of Adam. If None, 0.001.
    clip : float
        With differential privacy: length that a record's gradient is shortened to; for
        ``unit="client"``, a client's whole update.
    privacy, ledger, sampler, random_state
        See `FederatedClusterer`.

    See Also
    --------
    FederatedClusterer : common parameters, and what a fitted model has.
    """

    _client_class = deepfeca.DeepFeCAClient
    _private_class: ClassVar[Any] = deepfeca_private.PrivateDeepFeCAClient

    def __init__(
        self,
        n_clusters: int = 10,
        *,
        n_labels: int | None = None,
        n_rounds: int | None = None,
        local_epochs: int = 3,
        backbone: Literal["dense", "conv"] = "dense",
        hidden: tuple[int, ...] = (256,),
        n_features_out: int = 16,
        n_init: int = 10,
        batch_size: int = 64,
        learning_rate: float | None = None,
        clip: float = 1.0,
        privacy: PrivacySpec | None = None,
        ledger: Any = None,
        sampler: SamplerName = "secure",
        random_state: Any = 0,
    ) -> None:
        self.n_clusters = n_clusters
        self.n_labels = n_labels
        self.n_rounds = n_rounds
        self.local_epochs = local_epochs
        self.backbone = backbone
        self.hidden = hidden
        self.n_features_out = n_features_out
        self.n_init = n_init
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.clip = clip
        self.privacy = privacy
        self.ledger = ledger
        self.sampler = sampler
        self.random_state = random_state

    def transform(self, X: Any) -> Floats:
        """Whitened features of records, of length one."""
        check_is_fitted(self)
        _require_packages(self)
        _check_feature_names(self, X, reset=False)
        records = check_records(X, "X", self.n_features_in_)
        return deepfeca.features_of(self.result_.networks or {}, self._entered(records))

    def predict(self, X: Any) -> Ints:
        """Index of the nearest centre of each record's features."""
        return assign(self.transform(X), self.cluster_centers_)

    def probe(self, X: Any, y: Any, X_test: Any, y_test: Any) -> float:
        """Accuracy of a linear classifier on the features: needs true labels, for experiments."""
        return probe(self.transform(X), np.asarray(y), self.transform(X_test), np.asarray(y_test))

    def _check_parameters(self) -> None:
        check_counts(
            n_clusters=self.n_clusters,
            local_epochs=self.local_epochs,
            n_features_out=self.n_features_out,
            n_init=self.n_init,
            batch_size=self.batch_size,
        )
        if self.n_labels is not None:
            check_counts(n_labels=self.n_labels)
        if self.n_rounds is not None and self.n_rounds != 0:
            check_counts(n_rounds=self.n_rounds)
        _check_learning_rate(self.learning_rate)
        check_positive(clip=self.clip)
        check_choice("backbone", self.backbone, ("dense", "conv"))
        _check_widths(self.hidden)

    def _settings(self, n_features: int, *, private: bool) -> deepfeca.Settings:
        shape = Backbone(
            n_features,
            self.backbone,
            tuple(int(width) for width in self.hidden),
            int(self.n_features_out),
        )
        labels = self.n_labels or (2 if private else 5) * self.n_clusters
        rounds = self.n_rounds if self.n_rounds is not None else (1 if private else 6)
        return deepfeca.Settings(
            backbone=shape,
            n_clusters=int(self.n_clusters),
            n_labels=int(labels),
            n_rounds=int(rounds),
            n_init=int(self.n_init),
            local_epochs=int(self.local_epochs),
            batch_size=int(self.batch_size),
            learning_rate=float(self.learning_rate or 1e-3),
        )

    def _sums_only(self) -> bool:
        return self.privacy is not None and self.privacy.unit == "client"

    def _run(self, session: Session, rng: np.random.Generator) -> Clustering:
        settings = self._settings(_n_features(session), private=False)
        return deepfeca.run(session, settings=settings, rng=rng)

    def _run_private(self, session: Session, rng: np.random.Generator) -> Clustering:
        settings = self._settings(session.domain.n_features, private=True)
        return deepfeca_private.run_private(
            session,
            settings=settings,
            clip=float(self.clip),
            shares=deepfeca_private.Shares.of(settings.n_rounds, spare=self._checkpointed),
            rng=rng,
        )

    def _releases(self, spec: PrivacySpec, domain: Domain, n_clients: int) -> list[PlannedRelease]:
        settings = self._settings(domain.n_features, private=True)
        shares = deepfeca_private.Shares.of(settings.n_rounds, spare=self._checkpointed)
        limit = Limit.of(*spec.target())
        return deepfeca_private.planned_releases(settings, shares, spec, limit, n_clients)

    def _n_exchanges(self) -> int:
        private = self.privacy is not None and self.privacy.is_private
        rounds = self.n_rounds if self.n_rounds is not None else (1 if private else 6)
        return 2 + rounds * (5 if private else 3) + (2 if private else 0)

    def _width(self, result: FedClustResult) -> int:
        return int((result.networks or {})["n_features"])

    def _center_names(self, names: Sequence[str] | None) -> Sequence[str] | None:
        return None  # centres are of features that the network makes

    def _keep_run(self, clustering: Clustering, run: Run, seconds: float) -> None:
        super()._keep_run(clustering, run, seconds)
        if run.records.feature_names is not None:
            self.feature_names_in_ = np.asarray(run.records.feature_names, dtype=object)

    def _expected_exchanges(self, spec: PrivacySpec) -> int:
        if spec.protection == "none":
            return self._n_exchanges()
        rounds = 1 if self.n_rounds is None else int(self.n_rounds)
        each, keys = spec.exchanges_per_sum, 1 if spec.protection == "ckks" else 0
        # Moments, refined clusters and the average are sums.
        return keys + rounds * (4 + 3 * each) + 3 + 2 * each

    def _scale(self, domain: Domain) -> list[float] | None:
        return None

    def _label(
        self,
        client: str,
        X: Floats,
        clustering: Clustering,
        scale: Sequence[float] | None,
        held: Sequence[int] | None,
        session: Session,
    ) -> Ints:
        if session.spec.is_private:
            X = Domain.of(session.spec, X.shape[1]).enter(X)[0]
        found = deepfeca.features_of(clustering.networks or {}, X)
        return assign(found, clustering.centers) if len(X) else np.zeros(0, dtype=np.int64)


def _n_features(session: Session) -> int:
    if session.n_features is None:
        raise ParameterError(
            "the number of features is not known beforehand: pass records, name the columns, or "
            "give ranges"
        )
    return session.n_features


def _require_packages(model: NeuralClusterer) -> None:
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ParameterError(
            f"{type(model).__name__} needs {', '.join(missing)}: install the extra, pip install -c "
            "constraints.txt '.[deep]'"
        )


def _of(model: NeuralClusterer, spec: PrivacySpec) -> dict[str, Any]:
    return {"algorithm": type(model).__name__, "privacy": spec.to_dict()}


def _check_learning_rate(value: float | None) -> None:
    if value is not None:
        check_positive(learning_rate=value)
        if value > LARGEST_RATE:
            raise ParameterError(f"learning_rate={value!r}: give at most {LARGEST_RATE:g}")


def _check_widths(hidden: Any) -> None:
    if not isinstance(hidden, list | tuple):
        raise ParameterError(f"hidden={hidden!r}: give a tuple of widths, e.g. (100, 32)")
    for width in hidden:
        check_counts(hidden=width)


def _labels_by_client(initial: Any, clients: Any) -> dict[str, Ints]:
    """Labels under the clients' names."""
    if isinstance(initial, Mapping):
        found = {str(name): np.asarray(labels) for name, labels in initial.items()}
    else:
        names = list(clients) if isinstance(clients, Mapping) else None
        if names is None and isinstance(clients, list | tuple):
            names = [f"client {i}" for i in range(len(clients))]
        if names is None or not hasattr(initial, "__len__") or len(names) != len(initial):
            raise ParameterError(
                "initial: give a mapping of client name to labels, or one array for each client"
            )
        found = {name: np.asarray(labels) for name, labels in zip(names, initial, strict=True)}
    for name, labels in found.items():
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or (labels < 0).any():
            raise ParameterError(f"initial of {name}: give one whole number of at least 0 a record")
    return found


def _warn(text: str) -> None:
    warnings.warn(text, FederationWarning, stacklevel=4)
