"""DeepFeCA with differential privacy: moments, clusters and networks are releases.

Features are functions of one record and of a network that was released before, and so are
pseudo-labels. Each round:

1. Noisy moments of the features, in a sum over clients where there is a protection.
2. A noisy synopsis of each client's whitened features, on which FeCA runs; with a protection one
   noisy sum more brings its centroids closer.
3. Each client trains the network by DP-SGD, at a public rate. With a protection the server learns
   the weighted sum of networks only.

For the unit ``client`` the server may see nothing but sums: FKM's rounds find the clusters instead
of FeCA, and clients train without noise; the whole change of a client's network is shortened to a
public length, and the noise is in the sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from secure_fedclust.algorithms import deepfeca
from secure_fedclust.algorithms.backbones import Backbone, features, fill, flatten, linear
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import DataError, ProtocolError, TrainingError
from secure_fedclust.messages import (
    ANCHOR,
    Array,
    Integer,
    Real,
    private_stage,
    stage,
    steps,
)
from secure_fedclust.privacy import dpsgd
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.plan import PlannedRelease
from secure_fedclust.privacy.queries import nearest
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.privacy.subsampled import Sampling, public_rate
from secure_fedclust.privacy.updates import WholeUpdate
from secure_fedclust.protocols import feca, fkm, refinement, synopsis
from secure_fedclust.protocols.averages import AVERAGE, Held, ask_averages
from secure_fedclust.protocols.cells import CELLS
from secure_fedclust.protocols.checkpoint import Results
from secure_fedclust.protocols.client import answers
from secure_fedclust.protocols.clustering import Clustering
from secure_fedclust.protocols.deepfeca import (
    NETWORK,
    TRAINING,
    WHITENING,
    Settings,
    backbone_for,
    check_training,
    networks,
    single,
)
from secure_fedclust.protocols.feature_space import FeatureSpace, digest, of_features
from secure_fedclust.protocols.seeding import (
    MOMENTS,
    Recipe,
    ask_moments_and_count,
    moments_size,
    planned,
    private_seeds,
    run_rounds,
)
from secure_fedclust.protocols.session import Session
from secure_fedclust.protocols.synopsis import MICRO, SynopsisClient

FINAL_SHARE = 0.2
MOMENTS_PART, CLUSTERS_PART, TRAINING_PART = 0.1, 0.3, 0.6
"""Of what is left for a round; the last clustering has no training."""

SYNOPSIS_ROUNDS = 3
FEW_FEATURES, MOST_LOOKS = 64, 1000
SHRINK = 1.0
"""Part of the mean variance that is added to all variances: clusters are noisy, too, and are found
more easily where the features differ most."""

SEE = stage(
    "deepfeca/see",
    request=NETWORK,
    reply=ANCHOR,
    form="receipt",
)
"""Hands over a network; the reply says nothing about records."""

WHITEN = stage("deepfeca/whiten", request=WHITENING, reply=ANCHOR, form="receipt")

NOISY_TRAIN = stage(
    "deepfeca/noisy_train",
    request={
        **TRAINING,
        "rate": Real(1e-9, 1),
        "clip": Real(1e-6, 1e6),
        "weight": Real(0, 1),
        "hold": Integer(0, 1),
        "share": Real(1e-9, 1),
    },
    reply={"weights": Array(("sent",), "float32", largest=1e6), **ANCHOR},
    form="noisy",
)
UPDATE = private_stage(
    "deepfeca/update",
    request={**TRAINING, "clip": Real(1e-6, 1e6)},
    reply={"update": steps("p")},
    additive=True,
)


MOMENTS_OF, CELLS_OF, UPDATE_OF = (of_features(each) for each in (MOMENTS, CELLS, UPDATE))
"""The same for sums, naming the network and the whitening: all clients must have the same."""


@dataclass(frozen=True)
class Shares:
    """How a run's budget is divided; shares are of mu squared and add up to one.

    Attributes
    ----------
    moments, clusters, training : float
        In each round.
    last_moments, last_clusters : float
    """

    moments: float
    clusters: float
    training: float
    last_moments: float
    last_clusters: float

    @classmethod
    def of(cls, n_rounds: int, *, spare: bool = False) -> "Shares":
        """The shares of a run; with its dearest step to spare, where it may be cut off."""
        each = (1 - FINAL_SHARE) / n_rounds if n_rounds else 0.0
        last = FINAL_SHARE if n_rounds else 1.0
        alone = MOMENTS_PART + CLUSTERS_PART
        longest = max(each * TRAINING_PART, last * CLUSTERS_PART / alone)
        scale = 1 / (1 + longest) if spare else 1.0
        return cls(
            each * MOMENTS_PART * scale,
            each * CLUSTERS_PART * scale,
            each * TRAINING_PART * scale,
            last * MOMENTS_PART / alone * scale,
            last * CLUSTERS_PART / alone * scale,
        )


def digest_of(backbone: Backbone, weights: Floats, mean: Floats, matrix: Floats) -> str:
    """Tells what makes features from everything else."""
    shape = backbone.kind, backbone.hidden, backbone.n_out
    return digest(shape, single(weights), mean, matrix)


class PrivateDeepFeCAClient(SynopsisClient):
    """Everything that DeepFeCA's clients do, with noise.

    Privacy unit: a record of the client, or all of its data.
    Sensitivity: ``moments``, ``sums_and_counts`` and ``synopsis`` in docs/proofs/sensitivity.md,
    ``dp_sgd`` in docs/proofs/training.md; ``message`` for the unit client.
    Who sees it: the server; with a protection, sums over clients in place of moments and networks.
    """

    backbone: Backbone

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.records = self.X
        self.weights = self.mean = self.matrix = np.zeros(0)
        self.looks = 0
        self.held = Held(np.zeros((0, 0)), np.zeros(0), np.zeros(0, dtype=np.int64))
        self._seed = int(self.rng.integers(1 << 63))

    def state(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("weights", "mean", "matrix", "looks")}
        held = {f"held {name}": value for name, value in vars(self.held).items()}
        shape = self.backbone
        named = {"kind": shape.kind, "hidden": np.asarray(shape.hidden), "n_out": shape.n_out}
        return kept | held | named

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in ("weights", "mean", "matrix"):
            setattr(self, name, state[name])
        self.looks = int(state["looks"])
        self.held = Held(*(state[f"held {name}"] for name in ("weights", "shares", "groups")))
        shape = str(state["kind"]), state["hidden"], int(state["n_out"])
        self.backbone = backbone_for(self.records.shape[1], *shape, self.weights)
        self._look()

    @answers(SEE, after=(None, WHITEN, NOISY_TRAIN, AVERAGE, UPDATE_OF))
    def see(self, weights: Floats, **shape: Any) -> dict[str, Any]:
        found = backbone_for(self.records.shape[1], weights=weights, **shape)
        # Looking is free, and must take no more room than records do, nor time without end.
        if found.n_out > max(found.n_features, FEW_FEATURES) or self.looks >= MOST_LOOKS:
            raise ProtocolError(
                f"{found.n_out} features of {found.n_features} inputs, look {self.looks + 1}: at "
                f"most as many features as inputs, or {FEW_FEATURES}, and {MOST_LOOKS} looks a run"
            )
        self.backbone, self.looks = found, self.looks + 1
        self.weights = np.asarray(weights, dtype=np.float64)
        self.mean = self.matrix = np.zeros(0)
        self._look()
        return self._anchor()

    @answers(MOMENTS, after=(SEE, WHITEN))
    def moments(self, share: float) -> dict[str, Any]:
        self._refuse_in_a_sum()
        return super().moments(share)

    @answers(MOMENTS_OF, after=(SEE, WHITEN))
    def moments_of(self, share: float, made_by: str) -> dict[str, Any]:
        self._check_made_by(made_by)
        return super().moments(share)

    @answers(WHITEN, after=(SEE, MOMENTS, MOMENTS_OF))
    def whiten(self, mean: Floats, matrix: Floats) -> dict[str, Any]:
        if len(mean) != self.backbone.n_out:
            raise ProtocolError(f"field 'mean' is not for {self.backbone.n_out} features")
        self.mean, self.matrix = mean, matrix
        self._look()
        return self._anchor()

    @answers(MICRO, after=(WHITEN,))
    def micro(self, n_micro: int, n_rounds: int, share: float) -> dict[str, Any]:
        return super().micro(n_micro, n_rounds, share)

    @answers(CELLS, after=(WHITEN,))
    def cells(self, **request: Any) -> dict[str, Any]:
        self._refuse_in_a_sum()
        return super().cells(**request)

    @answers(CELLS_OF, after=(WHITEN, MOMENTS_OF, MICRO, CELLS, CELLS_OF))
    def cells_of(self, made_by: str, **request: Any) -> dict[str, Any]:
        self._check_made_by(made_by)
        return super().cells(**request)

    def _refuse_in_a_sum(self) -> None:
        if self._n_clients is not None:
            raise ProtocolError("a question for a sum must name what features are made by")

    def _check_made_by(self, made_by: str) -> None:
        made = self.backbone, self.weights, self.mean, self.matrix
        if made_by != digest_of(*made):
            raise ProtocolError("field 'made_by' names another network or whitening")

    @answers(NOISY_TRAIN, after=(MICRO, CELLS, CELLS_OF))
    def train(
        self,
        centers: Floats,
        head: Floats,
        epochs: int,
        batch_size: int,
        learning_rate: float,
        rate: float,
        clip: float,
        weight: float,
        hold: int,
        share: float,
    ) -> dict[str, Any]:
        if bool(hold) != (self._summand is not None):
            raise ProtocolError("field 'hold' must be 1 where networks are added up, and else 0")
        check_training(self.backbone, centers, head)
        from torch import nn

        network = self.backbone.module(self.weights)
        classifier = linear(self.backbone.n_out, len(centers))
        fill(classifier, head)
        model = nn.Sequential(network, classifier)
        sampling = Sampling(rate, max(1, round(epochs / rate)))
        numbers = self.backbone.n_parameters + len(head)
        [training] = self.pay_for_training([sampling], share, clip, numbers)
        dpsgd.train(
            model,
            self.records,
            self._labels(centers),
            nn.CrossEntropyLoss(reduction="none"),
            training,
            clip=clip,
            expected_batch=batch_size,
            learning_rate=learning_rate,
            sampler=self.sampler,
        )
        trained = flatten(network)
        if hold:
            self.held = Held(trained[None], np.array([weight]), np.zeros(1, dtype=np.int64))
        return {"weights": trained[: 0 if hold else None], **self._anchor()}

    @answers(AVERAGE, after=(NOISY_TRAIN, AVERAGE))
    def average(self, first: int, n_groups: int, n_numbers: int) -> dict[str, Any]:
        return self.held.part(self.weight_grid(), first, n_groups, n_numbers)

    @answers(UPDATE_OF, after=(WHITEN, MOMENTS_OF, CELLS_OF))
    def update(
        self,
        centers: Floats,
        head: Floats,
        clip: float,
        share: float,
        made_by: str,
        **training: Any,
    ) -> dict[str, Any]:
        self._check_made_by(made_by)
        if self.spec.unit != "client":
            raise ProtocolError("one record can turn a whole update around: unit='client' only")
        check_training(self.backbone, centers, head)

        def update_of(_: Floats) -> Floats:
            return self._change(centers, head, **training)

        query = WholeUpdate(self.backbone.n_parameters, clip, update_of)
        return self.reply(self.release(query, share))

    def _change(self, centers: Floats, head: Floats, **training: Any) -> Floats:
        """How training without noise moves the network; not at all, if that goes astray."""
        rng = np.random.default_rng([self._seed, self._asked.step])
        try:
            weights, _ = deepfeca.train(
                self.backbone,
                self.weights,
                head.astype(np.float64),
                self.records,
                self._labels(centers),
                len(centers),
                rng=rng,
                **training,
            )
        except (TrainingError, DataError):
            # Whether there are records, or what they are like, is nothing that others may see.
            return np.zeros(self.backbone.n_parameters)
        return weights - self.weights

    def _labels(self, centers: Floats) -> Ints:
        return nearest(self.X, centers)

    def _look(self) -> None:
        """Have features in place of records, whitened if it is known how."""
        found = features(self.backbone, self.weights, self.records, refuse=False)
        if len(self.mean):
            found = deepfeca.whitened(found, self.mean, self.matrix)
        self.domain = FeatureSpace(self.backbone.n_out).domain
        self.X, _ = self.domain.enter(found)


def run_private(
    session: Session,
    *,
    settings: Settings,
    clip: float,
    shares: Shares,
    rng: np.random.Generator,
) -> Clustering:
    """The server's side of a private run."""
    weights = single(settings.backbone.initial(rng))
    for _ in range(settings.n_rounds):
        # Of their own for each step, so that a run that is resumed asks the same.
        of_clusters, of_head = rng.spawn(2)
        _, _, size = _look(session, settings, weights, shares.moments)
        centers = _clusters(session, settings.n_labels, settings, shares.clusters, of_clusters)
        request = settings.training(centers * np.sqrt(settings.backbone.n_out), of_head)
        weights = _train(session, settings, weights, request, size, clip, shares.training)
    mean, matrix, size = _look(session, settings, weights, shares.last_moments)
    centers = _clusters(session, settings.n_clusters, settings, shares.last_clusters, rng)
    session.note_centers(centers)
    kept = networks(settings.backbone, weights, mean, matrix)
    return Clustering(centers, n_records=size, networks=kept)


def _look(
    session: Session, settings: Settings, weights: Floats, share: float
) -> tuple[Floats, Floats, float]:
    """Hand over a network, and whiten what it makes of the records by noisy moments.

    Returns
    -------
    mean, matrix : arrays
        As in `algorithms.deepfeca`.
    size : float
        About how many records a client holds.
    """
    f = settings.backbone.n_out
    named = digest_of(settings.backbone, weights, np.zeros(0), np.zeros(0))
    session.n_features, session.region = f, FeatureSpace(f, named)

    def moments() -> Results:
        session.ask_all(SEE, **settings.network(weights))
        mean, covariance, n_records = ask_moments_and_count(session, share)
        return {"moments": {"mean": mean, "covariance": covariance, "n_records": n_records}}

    found = session.once(moments)["moments"]
    mean = session.domain.leave(found["mean"])
    try:
        matrix = deepfeca.whitening(found["covariance"] / f, SHRINK)
    except TrainingError:
        matrix = np.eye(f)  # noise has left no direction to tell from others
    request = {"mean": mean, "matrix": matrix}
    session.ask_once(WHITEN, dict.fromkeys(session.clients, request))
    named = digest_of(settings.backbone, weights, mean, matrix)
    session.region = FeatureSpace(f, named)
    size = session.spec.public_size or found["n_records"]
    return mean, matrix, float(size)


def _clusters(
    session: Session, n_clusters: int, settings: Settings, share: float, rng: np.random.Generator
) -> Floats:
    """Global centroids of the whitened features."""

    def found() -> Results:
        if session.spec.unit == "client":
            n_clients = len(session.clients)
            recipe = _recipe(settings, n_clusters, session.spec, session.limit, n_clients)
            recipe = recipe.scaled(share)
            centers = private_seeds(session, n_clusters, recipe, settings.n_init, rng)
            centers, _ = run_rounds(session, centers, recipe.shares)
            return {"clusters": {"centers": session.domain.leave(centers)}}
        summed = session.spec.protection != "none"
        local = share * (1 - refinement.SHARE) if summed else share
        kept = synopsis.collect(
            session,
            n_clusters=dict.fromkeys(session.clients, n_clusters),
            n_rounds=SYNOPSIS_ROUNDS,
            cells=synopsis.cells_for(session.spec.public_size, n_clusters, 1, session.limit.mu),
            share=local,
        )
        clusters = feca.run_on_synopsis(
            kept, n_clusters=n_clusters, n_init=settings.n_init, radius="empirical", rng=rng
        )
        if summed:
            clusters = refinement.refine(session, clusters, share - local)
        return {"clusters": {"centers": clusters.centers}}

    return np.asarray(session.once(found)["clusters"]["centers"])


def _train(
    session: Session,
    settings: Settings,
    weights: Floats,
    request: dict[str, Any],
    size: float,
    clip: float,
    share: float,
) -> Floats:
    """The average of the clients' networks."""
    p, spec = len(weights), session.spec
    if spec.unit == "client":
        query = WholeUpdate(p, clip, lambda X: X)

        def updated() -> Results:
            answers = session.ask_sum(
                UPDATE, query, share, {"p": p}, query.read, **request, clip=clip
            )
            change = np.sum(answers.parts, axis=0) / answers.n_clients
            return {"network": {"weights": single(weights + change)}}

        return np.asarray(session.once(updated)["network"]["weights"])
    hold = spec.protection != "none"
    each = {
        **request,
        "rate": public_rate(settings.batch_size, size),
        "clip": clip,
        "weight": 1 / len(session.clients),
        "hold": int(hold),
        "share": share,
    }
    replies = session.once(lambda: session.ask_all(NOISY_TRAIN, {"sent": 0 if hold else p}, **each))
    if not hold:
        return single(np.mean([reply["weights"] for reply in replies.values()], axis=0))
    return single(ask_averages(session, weights[None])[0])


def planned_releases(
    settings: Settings, shares: Shares, spec: PrivacySpec, limit: Limit, n_clients: int
) -> list[PlannedRelease]:
    """The releases of a run."""
    summed, whole = spec.protection != "none", spec.unit == "client"
    domain = FeatureSpace(settings.backbone.n_out).domain

    def looked(moments: float, clusters: float, n_clusters: int) -> list[PlannedRelease]:
        first = PlannedRelease(
            MOMENTS.name, 1, moments, moments_size(settings.backbone.n_out), summed=summed
        )
        if whole:
            recipe = _recipe(settings, n_clusters, spec, limit, n_clients).scaled(clusters)
            return [first, *planned(recipe, n_clusters, domain, summed=True)]
        local = clusters * (1 - refinement.SHARE) if summed else clusters
        found = synopsis.planned(
            domain,
            n_clusters=n_clusters,
            n_rounds=SYNOPSIS_ROUNDS,
            cells=synopsis.cells_for(spec.public_size, n_clusters, 1, limit.mu),
            share=local,
        )
        refined = PlannedRelease(
            refinement.NAME, 1, clusters - local, n_clusters * (domain.n_features + 1), summed=True
        )
        return [first, *found, *([refined] if summed else [])]

    name = UPDATE.name if whole else NOISY_TRAIN.name
    training = PlannedRelease(
        name,
        1,
        shares.training,
        settings.backbone.n_parameters,
        summed=whole,
        averaged=summed and not whole,
    )
    rounds = [*looked(shares.moments, shares.clusters, settings.n_labels), training]
    times = settings.n_rounds
    return [
        *(_repeated(release, times) for release in (rounds if times else [])),
        *looked(shares.last_moments, shares.last_clusters, settings.n_clusters),
    ]


def _repeated(release: PlannedRelease, times: int) -> PlannedRelease:
    replies = None if release.replies is None else times * release.replies
    return replace(
        release, times=times * release.times, share=times * release.share, replies=replies
    )


def _recipe(
    settings: Settings, n_clusters: int, spec: PrivacySpec, limit: Limit, n_clients: int
) -> Recipe:
    """How sums alone find clusters of features."""
    return fkm.recipe(
        n_clusters=n_clusters,
        n_features=settings.backbone.n_out,
        n_clients=n_clients,
        n_records=spec.counted_size,
        noise_terms=spec.noise_terms(n_clients),
        mu=limit.mu,
        seeding="private",
        n_rounds=None,
    )
