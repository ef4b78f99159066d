"""What all estimators share: checking input, running the protocol, keeping the result."""

import json
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, ClusterMixin
from sklearn.utils.validation import _check_feature_names, check_is_fitted

from secure_fedclust.algorithms.lloyd import assign
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.engines import Fault
from secure_fedclust.errors import FederationWarning, ParameterError, PrivacyWarning
from secure_fedclust.parameters import check_counts
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.plan import (
    Feasibility,
    Plan,
    PlannedRelease,
    check_room,
    fallback,
    on_sums,
)
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.protocols import refinement
from secure_fedclust.protocols.checkpoint import Journal, Memory
from secure_fedclust.protocols.client import Client
from secure_fedclust.protocols.clustering import Clustering
from secure_fedclust.protocols.feasibility import client_feasibility
from secure_fedclust.protocols.session import Session
from secure_fedclust.protocols.sums import with_quorum
from secure_fedclust.protocols.synopsis import Synopsis, SynopsisClient, cells_for, collect, planned
from secure_fedclust.records import Clients, check_records
from secure_fedclust.released import ReleasedSynopsis
from secure_fedclust.result import FedClustResult, NonPrivate
from secure_fedclust.run import Progress, Run, check_available, generator, open_run, require_spec

if TYPE_CHECKING:
    from secure_fedclust.audit.auditing import Subject
    from secure_fedclust.audit.findings import Audit

MODEL_FORMAT = "secure_fedclust model 1"


class FederatedClusterer(ClusterMixin, BaseEstimator, ABC):  # type: ignore[misc]
    """What all estimators share: checking input, running the protocol, keeping the result.

    Parameters
    ----------
    privacy : PrivacySpec
        Required. `PrivacySpec.none(reason=...)` runs without protection.
    ledger : path, Ledger or None
        Where a private run charges its releases; made beforehand by ``secure-fedclust ledger
        init`` or `Ledger.create`. Without one the guarantee is for each run by itself.
    sampler : {"secure", "fast"}
        ``fast`` noise is for experiments: the result then makes no claim.
    random_state : int, numpy.random.Generator or None
        Randomness of the algorithm; noise never comes from it.

    Attributes
    ----------
    cluster_centers_ : array of shape (n_clusters_, n_features_in_)
    n_clusters_ : int
        Number of global clusters found.
    client_names_ : list of str
        The clients, in the order given.
    labels_ : list of arrays
        For each client, in that order, the global cluster of each of its records. Not there when
        `fit` was given an engine or a synopsis: labels then stay with the clients. Back into a
        DataFrame they go client by client: ``frame.loc[frame["site"] == name, "label"] = labels``.
        Computed from records without noise: not private.
    result_ : FedClustResult
        Centres, history of the exchanges, bytes and timings.
    guarantee_ : str
        What may be claimed about the privacy of the run: the budget that was enforced.
    privacy_spent_ : dict of client to float
        Epsilon that the run has cost each client, at the spec's delta; information, no claim.
    ledger_ : Ledger or None
        What was charged.
    """

    _client_class: ClassVar[type[Client]]
    _private_class: ClassVar[type[SynopsisClient]] = SynopsisClient
    _synopsis_rounds: ClassVar[int] = 3

    privacy: PrivacySpec | None
    ledger: Any
    sampler: Any
    random_state: Any

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
        """Cluster the clients' records without pooling them.

        Parameters
        ----------
        clients : list of arrays, mapping of name to array, DataFrame, Engine or ReleasedSynopsis
            One array of shape (n_records, n_features) a client. A DataFrame needs
            `client_column`. An engine reaches clients that hold their records elsewhere. On a
            synopsis that was released before, everything is free: `privacy` is not needed then.
        y : ignored
        client_column : str, optional
            The column of a DataFrame that says which client a row belongs to.
        person_column : str, optional
            The column of DataFrames that says which person a row is about; not a feature. Needed
            where `privacy` has `records_per_person`.
        on_progress : function, optional
            Called with the number of client replies so far and the number expected. Not called
            when `clients` is an engine.
        faults : sequence of Fault, optional
            What is to go wrong in a run on records, to see what becomes of it: e.g.
            ``Fault("Bergen", exchange=2, kind="drop")``.
        checkpoint : path, optional
            A folder that the run is kept in while it goes on, for the systems that train networks.
            A run that was killed is resumed by calling `fit` again with the same folder.
        """
        self._check_parameters()
        rng = generator(self.random_state)
        started = time.perf_counter()
        if isinstance(clients, ReleasedSynopsis):
            if faults or checkpoint is not None:
                raise ParameterError(
                    "faults and checkpoint are for runs on records, not for a synopsis"
                )
            clustering = self._run_on_synopsis(clients.synopsis, rng)
            self._keep_released(clustering, clients, time.perf_counter() - started)
            self._warn_few()
            return self
        spec = require_spec(self.privacy)
        if spec.is_private:
            self._check_private(spec)
        else:
            self._check_unprotected(spec)
        journal = None
        if checkpoint is not None:
            journal = self._journal(checkpoint, spec, clients)
            seed = int(rng.integers(2**63)) if journal.seed is None else journal.seed
            rng = generator(seed)
        with nullcontext() if journal is None else journal:
            run = open_run(
                clients,
                spec=spec,
                client_class=self._client_for(spec),
                rng=rng,
                ledger=self.ledger,
                sampler=self.sampler,
                client_column=client_column,
                person_column=person_column,
                on_progress=on_progress,
                faults=faults,
                n_exchanges=self._expected_exchanges(spec),
                experiment=self._unproved() is not None,
                sums_only=self._in_sums_only(spec),
                prepare=partial(self._prepare, journal),
                resumed=None if journal is None else journal.run,
            )
            if journal is not None:
                journal.begin(seed, run.session.run, run.session.clients, run.session.floor)
                run.session.run, run.session.journal = str(journal.run), journal
                run.session.floor = dict(journal.floor)
            if spec.is_private:
                clustering = self._fit_private(run, rng)
            else:
                clustering = self._run(run.session, rng)
            self._keep_run(clustering, run, time.perf_counter() - started)
        self._warn_few()
        return self

    def predict(self, X: Any) -> Ints:
        """Index of the nearest global centre of each record.

        Where the run scaled features by their ranges, so does this. For FedGEM it may differ from
        `labels_`, which are chosen among the clusters that the record's client holds.
        """
        check_is_fitted(self)
        _check_feature_names(self, X, reset=False)
        records = check_records(X, "X", self.n_features_in_)
        return _nearest(records, self.cluster_centers_, self.result_.scale)

    def plan(
        self,
        privacy: PrivacySpec,
        *,
        n_clients: int,
        n_features: int,
        n_records: int | None = None,
    ) -> Plan:
        """What a private run would release, and whether it can work; see `PrivacySpec.plan`."""
        self._check_parameters()
        check_available(privacy)
        self._check_private(privacy)
        check_counts(n_clients=n_clients, n_features=n_features)
        if n_records is not None:
            check_counts(n_records=n_records)
        if privacy.unit == "client":
            n_records = privacy.counted_size
        spec = with_quorum(privacy, n_clients)
        limit = Limit.of(*spec.target())
        domain = Domain.of(spec, n_features)
        feasibility = None
        if n_records is not None:
            feasibility = self._feasibility(spec, n_clients, n_features, n_records)
        releases = self._releases(spec, domain, n_clients)
        check_room(releases, spec, limit, n_clients)
        summed = math.fsum(release.share for release in releases if release.summed)
        each = spec.protection != "none" and not all(release.summed for release in releases)
        return Plan(
            guarantee=spec.describe() + on_sums(spec, n_clients, each),
            limit=limit,
            releases=releases,
            n_clients=n_clients,
            feasibility=feasibility,
            spec=spec,
            fallback=fallback(spec, limit, max(0.0, 1 - summed), summed),
            n_records=n_records,
        )

    def audit(
        self,
        *,
        trials: int = 5000,
        confidence: float = 0.95,
        jobs: int = 1,
        n_clients: int | None = None,
        n_features: int | None = None,
        on_progress: Progress | None = None,
    ) -> "Audit":
        """Attack runs like this one, and see whether the claim stands.

        No record is used: every attack is played on made-up data, through the code that releases,
        so that what is found can be shown to anybody and costs no budget. docs/audit.md says what
        is played, and what it can and cannot tell.

        Parameters
        ----------
        trials : int
            Runs of one client in the distinguishing game, half of them in each of two worlds.
        confidence : float
            That a correct run passes, whatever chance does.
        jobs : int
            Processes. More than one need a script that can be imported: its work is under
            ``if __name__ == "__main__"``.
        n_clients, n_features : int, optional
            For a model that is not fitted.
        on_progress : function, optional
            Called with the number of trials done and of all.
        """
        from secure_fedclust.audit.auditing import audit_runs

        return audit_runs(
            self._subject(n_clients, n_features),
            trials=trials,
            confidence=confidence,
            jobs=jobs,
            on_progress=on_progress,
        )

    def _subject(self, n_clients: int | None, n_features: int | None) -> "Subject":
        from secure_fedclust.audit.auditing import Subject

        self._check_parameters()
        fitted = hasattr(self, "result_")
        if fitted and not self.result_.history:
            raise ParameterError(
                "the model was fitted on a synopsis, which was released by other means: audit the "
                "model that is fitted on records"
            )
        spec = require_spec(self.privacy)
        if not spec.is_private:
            raise ParameterError(f"there is no claim to audit: {spec.describe()}")
        check_available(spec)
        self._check_private(spec)
        clients = self.client_names_ if fitted and n_clients is None else None
        if clients is None:
            if n_clients is None:
                raise ParameterError("how many clients are there? Fit the model, or give n_clients")
            check_counts(n_clients=n_clients)
            clients = self._planned_names(n_clients)
        if n_features is None:
            n_features = self.n_features_in_ if fitted else spec.n_features
        if n_features is None:
            raise ParameterError("how many features are there? Fit the model, or give n_features")
        check_counts(n_features=n_features)
        return Subject(
            algorithm=type(self).__name__,
            parameters=plain_parameters(self),
            client_class=self._client_for(spec),
            serve=self._run_private,
            spec=spec,
            clients=clients,
            n_features=n_features,
        )

    def save(self, path: str | Path) -> None:
        """Write the fitted model as JSON, for `load_model`; labels stay out."""
        check_is_fitted(self)
        parameters = plain_parameters(self)
        if not isinstance(parameters["random_state"], int | None):
            parameters["random_state"] = None  # a generator's state is not kept
        privacy = None if self.privacy is None else self.privacy.to_dict()
        content = {
            "format": MODEL_FORMAT,
            "class": type(self).__name__,
            "parameters": parameters,
            "privacy": privacy,
            "clients": self.client_names_,
            "result": self.result_.to_dict(),
        }
        Path(path).write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")

    def _public_parameters(self) -> dict[str, Any]:
        """The parameters, without what was computed from records."""
        return dict(self.get_params(deep=False))

    def _restore(self, content: Mapping[str, Any]) -> Self:
        result = FedClustResult.from_dict(content["result"])
        self._keep(result, list(content["clients"]), None)
        return self

    def _fit_private(self, run: Run, rng: np.random.Generator) -> Clustering:
        session, spec = run.session, run.session.spec
        n_clients, n_features = len(session.clients), session.domain.n_features
        releases = self._releases(spec, session.domain, n_clients)
        check_room(releases, spec, session.limit, n_clients)
        size = spec.counted_size
        if size is not None:
            _warn_poor(self._feasibility(spec, n_clients, n_features, size))
        clustering = self._run_private(session, rng)
        if size is None and clustering.n_records is not None:
            size = max(1, round(clustering.n_records))
            _warn_poor(self._feasibility(spec, n_clients, n_features, size))
        return clustering

    def _keep_run(self, clustering: Clustering, run: Run, seconds: float) -> None:
        session, records = run.session, run.records
        held = clustering.client_clusters or {}
        scale = self._scale(session.domain) if session.spec.is_private else None
        labels = {
            client: self._label(client, X, clustering, scale, held.get(client), session)
            for client, X in records.items()
        }
        unproved = self._unproved() if session.spec.is_private else None
        result = FedClustResult(
            algorithm=type(self).__name__,
            parameters=plain_parameters(self),
            guarantee=run.guarantee(unproved),
            centers=clustering.centers,
            history=tuple(session.history),
            seconds=seconds,
            client_clusters=clustering.client_clusters,
            feature_names=self._center_names(records.feature_names),
            scale=scale,
            privacy=session.spec.to_dict(),
            spent=run.spent(),
            anchors=dict(session.anchors),
            sampler=run.sampler if session.spec.is_private else None,
            sums=tuple(session.sums),
            costs=run.costs(),
            fallback=run.fallback(),
            networks=clustering.networks,
            association=clustering.association,
            federation=run.federation,
            nonprivate=NonPrivate(labels, run.clipped, run.left_out),
        )
        self._keep(result, list(session.clients), run.ledger, records)

    def _keep_released(
        self, clustering: Clustering, released: ReleasedSynopsis, seconds: float
    ) -> None:
        result = FedClustResult(
            algorithm=type(self).__name__,
            parameters=plain_parameters(self),
            guarantee=released.guarantee,
            centers=clustering.centers,
            history=(),
            seconds=seconds,
            client_clusters=clustering.client_clusters,
            feature_names=released.feature_names,
            scale=self._scale(released.synopsis.domain),
            privacy=released.privacy,
            spent=released.spent,
            anchors=released.anchors,
            sampler=released.sampler,
        )
        self._keep(result, list(released.synopsis.cells), None)

    def _keep(
        self,
        result: FedClustResult,
        clients: list[str],
        ledger: Any,
        records: Clients | None = None,
    ) -> None:
        self.result_ = result
        self.guarantee_ = result.guarantee
        self.privacy_spent_ = dict(result.spent)
        self.ledger_ = ledger
        self.client_names_ = clients
        self.cluster_centers_ = result.centers
        self.n_clusters_ = result.n_clusters
        self.n_features_in_ = self._width(result)
        for name in ("labels_", "feature_names_in_"):
            if hasattr(self, name):
                delattr(self, name)
        if records:
            self.labels_ = list(result.nonprivate.labels.values())
        if result.feature_names is not None:
            self.feature_names_in_ = np.asarray(result.feature_names, dtype=object)

    def _center_names(self, names: Sequence[str] | None) -> Sequence[str] | None:
        """Names of the centres' columns, given those of the records'."""
        return names

    def _width(self, result: FedClustResult) -> int:
        """How many features records have."""
        return int(result.centers.shape[1])

    def _label(
        self,
        client: str,
        X: Floats,
        clustering: Clustering,
        scale: Sequence[float] | None,
        held: Sequence[int] | None,
        session: Session,
    ) -> Ints:
        """Global cluster of each record of a client."""
        return _nearest(X, clustering.centers, scale, held)

    def _prepare(self, journal: Journal | None, name: str, client: Client) -> None:
        """Do with a client what there is to do before it is asked anything."""
        if journal is not None:
            client.remember(Memory.of(journal.folder, name))

    def _journal(self, folder: str | Path, spec: PrivacySpec, clients: Any) -> Journal:
        """The folder that a run is kept in, if it is one of this run."""
        raise ParameterError(
            f"checkpoint: {type(self).__name__} is over in seconds, and is not kept"
        )

    def _warn_few(self) -> None:
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

    def _check_private(self, spec: PrivacySpec) -> None:
        """Raise a `ParameterError` where a parameter does not go with differential privacy."""
        if (unproved := self._unproved()) is not None and not getattr(
            self, "allow_unproved", False
        ):
            raise ParameterError(
                f"{unproved}; change that, or set allow_unproved=True to run with NO DP CLAIM"
            )

        if spec.unit == "client" and not self._sums_only():
            raise ParameterError(
                f"unit='client' with {type(self).__name__}: the server looks at what each client "
                "releases, and noise that hides a whole client would leave nothing of it; use FKM "
                "with protection='masking' or 'ckks', which needs only sums"
            )

    def _check_unprotected(self, spec: PrivacySpec) -> None:
        """Raise a `ParameterError` where a protection without noise would hide nothing."""
        if spec.protection != "none":
            raise ParameterError(
                f"protection={spec.protection!r} without epsilon: {type(self).__name__} sends what "
                "the server must look at client by client, which nothing would hide; use FKM, "
                "which needs only sums, or give an epsilon"
            )

    def _sums_only(self) -> bool:
        """Whether the server needs nothing but sums over clients."""
        return False

    def _in_sums_only(self, spec: PrivacySpec) -> bool:
        """Whether clients answer nothing but as parts of sums."""
        return spec.protection != "none" and self._sums_only()

    def _scale(self, domain: Domain) -> list[float] | None:
        """What features are divided by before a private run measures distances."""
        return [float(value) for value in domain.scale]

    def _client_for(self, spec: PrivacySpec) -> type[Client]:
        return self._private_class if spec.is_private else self._client_class

    def _unproved(self) -> str | None:
        """Say which condition of the guarantee the parameters violate, if any."""
        return None

    @abstractmethod
    def _run(self, session: Session, rng: np.random.Generator) -> Clustering:
        """Run the server's side of the protocol without protection."""

    def _run_private(self, session: Session, rng: np.random.Generator) -> Clustering:
        """Run the server's side of the private protocol.

        Unless overridden the server looks at what each client releases; where sums are protected
        the clusters that it finds are refined by one of these.
        """
        if session.spec.protection == "none":
            return self._run_local(session, 1.0, rng)
        found = self._run_local(session, 1 - refinement.SHARE, rng)
        return self._refine(session, found, refinement.SHARE)

    def _run_local(self, session: Session, share: float, rng: np.random.Generator) -> Clustering:
        """Cluster what each client releases for a share of the budget: a synopsis of each."""
        synopsis = self._collect(session, share)
        found = self._run_on_synopsis(synopsis, rng)
        session.note_centers(found.centers)
        return replace(found, n_records=synopsis.n_records())

    def _refine(self, session: Session, found: Clustering, share: float) -> Clustering:
        return refinement.refine(session, found, share)

    @abstractmethod
    def _run_on_synopsis(self, synopsis: Synopsis, rng: np.random.Generator) -> Clustering:
        """Cluster what was released."""

    @abstractmethod
    def _clusters_to_tell_apart(self, clients: Sequence[str]) -> dict[str, int]:
        """How many clusters the synopsis of each client must resolve."""

    def _collect(self, session: Session, share: float) -> Synopsis:
        numbers = self._clusters_to_tell_apart(session.clients)
        mu = session.limit.mu * np.sqrt(share)
        cells = self._cells(max(numbers.values()), len(numbers), session.spec.public_size, mu)
        return collect(
            session, n_clusters=numbers, n_rounds=self._synopsis_rounds, cells=cells, share=share
        )

    def _cells(self, n_clusters: int, n_clients: int, n_records: int | None, mu: float) -> int:
        # The server looks at each client's cells by themselves.
        return cells_for(n_records, n_clusters, 1, mu)

    def _releases(self, spec: PrivacySpec, domain: Domain, n_clients: int) -> list[PlannedRelease]:
        """The releases of a private run."""
        if spec.protection == "none":
            return self._local_releases(spec, domain, n_clients, 1.0)
        local = self._local_releases(spec, domain, n_clients, 1 - refinement.SHARE)
        # How many clusters there will be is not known to all systems: about as many as at a client.
        numbers = self._clusters_to_tell_apart(self._planned_names(n_clients)).values()
        k = int(getattr(self, "n_clusters", None) or max(numbers))
        size = k * (domain.n_features + 1)
        return [*local, *self._refinement_releases(size, refinement.SHARE)]

    def _refinement_releases(self, coordinates: int, share: float) -> list[PlannedRelease]:
        return [PlannedRelease(refinement.NAME, 1, share, coordinates, summed=True)]

    def _local_releases(
        self, spec: PrivacySpec, domain: Domain, n_clients: int, share: float
    ) -> list[PlannedRelease]:
        """The releases that the server looks at one by one: of a synopsis, unless overridden."""
        names = self._planned_names(n_clients)
        n_clusters = max(self._clusters_to_tell_apart(names).values())
        mu = Limit.of(*spec.target()).mu * share**0.5
        cells = self._cells(n_clusters, n_clients, spec.public_size, mu)
        return planned(
            domain,
            n_clusters=n_clusters,
            n_rounds=self._synopsis_rounds,
            cells=cells,
            share=share,
        )

    def _planned_names(self, n_clients: int) -> list[str]:
        return [f"client {i}" for i in range(n_clients)]

    def _feasibility(
        self, spec: PrivacySpec, n_clients: int, n_features: int, n_records: int
    ) -> Feasibility | None:
        """Whether the signal stands out, if that is known; of each client, unless overridden."""
        return client_feasibility(Limit.of(*spec.target()), n_features, n_records)

    def _n_exchanges(self) -> int:
        return 1

    def _expected_exchanges(self, spec: PrivacySpec) -> int:
        n = self._n_exchanges()
        if spec.protection == "none":
            return n
        each = spec.exchanges_per_sum
        refined = len(self._refinement_releases(1, 1.0))
        keys = 1 if spec.protection == "ckks" else 0
        return keys + (n * each if self._sums_only() else n + refined * each)


def one_per_client(name: str, value: Any, clients: Sequence[str]) -> dict[str, int]:
    """A number for each client, given as one for all, a sequence, or a mapping of names."""
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


def _warn_poor(feasibility: Feasibility | None) -> None:
    if feasibility is not None and feasibility.verdict == "poor":
        warnings.warn(f"the noise drowns the clusters: {feasibility}", PrivacyWarning, stacklevel=4)


def _nearest(
    X: Floats,
    centers: Floats,
    scale: Sequence[float] | None,
    allowed: Sequence[int] | None = None,
) -> Ints:
    """Nearest of the centres that are allowed, for each record."""
    candidates = np.unique(np.arange(len(centers)) if allowed is None else np.asarray(allowed))
    if not len(X):
        return np.zeros(0, dtype=np.int64)
    if scale is not None:
        X, centers = np.ascontiguousarray(X / np.asarray(scale)), centers / np.asarray(scale)
    return candidates[assign(X, centers[candidates])]


def plain_parameters(model: FederatedClusterer) -> dict[str, Any]:
    """The parameters of a model as JSON can hold them, without what is its owner's business."""
    parameters = model._public_parameters()
    del parameters["privacy"]
    # Where a ledger lies is no business of whoever reads a result.
    del parameters["ledger"]
    return {name: _plain(value) for name, value in parameters.items()}


def _plain(value: Any) -> Any:
    """Turn a parameter into what JSON can hold."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else repr(value)
