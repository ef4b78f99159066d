"""DeepFeCA: a network learns from the clusters that FeCA finds in what it makes of the records.

Each round:

1. Clients send the moments of their features, by which all whiten them.
2. FeCA: clients send refined centroids of their features, with radii; the server makes global ones.
3. Each client labels its records by the nearest of them, and trains the network with a fresh linear
   head; the server averages the networks.

At the end FeCA runs once more, for the clusters that are asked for. Without protection the server
sees moments, centroids and networks. With differential privacy (`deepfeca_private.py`) every one of
them is a release.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from secure_fedclust.algorithms import deepfeca, feca
from secure_fedclust.algorithms.backbones import Backbone, features
from secure_fedclust.algorithms.lloyd import assign
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import ParameterError, ProtocolError, TrainingError
from secure_fedclust.messages import Array, Choice, Integer, Real, stage
from secure_fedclust.protocols.checkpoint import Results
from secure_fedclust.protocols.client import MAX_CLUSTERS, Client, answers
from secure_fedclust.protocols.clustering import Clustering, stack
from secure_fedclust.protocols.feca import MAX_INIT
from secure_fedclust.protocols.session import Session

MAX_WIDTH = 1 << 16
MAX_FEATURES = 1 << 10

NETWORK = {
    "weights": Array(("p",), "float32", largest=1e6),
    "kind": Choice(("dense", "conv")),
    "hidden": Array(("layers",), "int64", minimum=1, largest=MAX_WIDTH),
    "n_out": Integer(1, MAX_FEATURES),
}
WHITENING = {"mean": Array(("f",)), "matrix": Array(("f", "f"))}
TRAINING = {
    "centers": Array(("k", "f")),
    "head": Array(("h",), "float32", largest=1e6),
    "epochs": Integer(1, 100_000),
    "batch_size": Integer(1, 1 << 20),
    "learning_rate": Real(1e-9, 10.0),
}

MOMENTS = stage(
    "deepfeca/moments",
    request=NETWORK,
    reply={"count": Integer(1), "sums": Array(("f",)), "squares": Array(("f", "f"))},
)
CENTERS = stage(
    "deepfeca/centers",
    request={
        **WHITENING,
        "n_clusters": Integer(1, MAX_CLUSTERS),
        "n_init": Integer(1, MAX_INIT),
    },
    reply={"centers": Array(("k", "f")), "radii": Array(("k",), minimum=0)},
)
TRAIN = stage(
    "deepfeca/train",
    request=TRAINING,
    reply={"weights": Array(("p",), "float32", largest=1e6), "count": Integer(1)},
)


@dataclass(frozen=True)
class Settings:
    """What a run of DeepFeCA is told; see the estimator."""

    backbone: Backbone
    n_clusters: int
    n_labels: int
    n_rounds: int
    n_init: int  # for the clusters at the end; pseudo-labels make do with one run
    local_epochs: int
    batch_size: int
    learning_rate: float

    def network(self, weights: Floats) -> dict[str, Any]:
        """The fields of a request that names a network."""
        return {
            "weights": weights,
            "kind": self.backbone.kind,
            "hidden": np.asarray(self.backbone.hidden, dtype=np.int64),
            "n_out": self.backbone.n_out,
        }

    def training(self, centers: Floats, rng: np.random.Generator) -> dict[str, Any]:
        """The fields of a request for training, with a fresh head that all begin with."""
        return {
            "centers": centers,
            "head": deepfeca.initial_head(self.backbone.n_out, len(centers), rng),
            "epochs": self.local_epochs,
            "batch_size": self.batch_size,
            "learning_rate": self.learning_rate,
        }


def backbone_for(n_features: int, kind: str, hidden: Ints, n_out: int, weights: Floats) -> Backbone:
    """The network that a request names, which must be one that its weights fit."""
    try:
        found = Backbone(n_features, kind, tuple(map(int, hidden)), int(n_out))  # type: ignore[arg-type]
    except ParameterError as error:
        raise ProtocolError(f"the request names no network for these records: {error}") from error
    if len(weights) != found.n_parameters:
        raise ProtocolError(
            f"field 'weights' has {len(weights)} numbers, the network has {found.n_parameters}"
        )
    return found


class DeepFeCAClient(Client):
    """Sends moments and centroids of its features, and the network that it has trained.

    Privacy unit: none, the messages are unprotected.
    Sensitivity: unbounded.
    Who sees it: the server.
    """

    backbone: Backbone

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._seed = int(self.rng.integers(1 << 63))
        self.weights = self.mean = self.matrix = np.zeros(0)

    def state(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("weights", "mean", "matrix")}
        shape = self.backbone
        return kept | {"kind": shape.kind, "hidden": np.asarray(shape.hidden), "n_out": shape.n_out}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in ("weights", "mean", "matrix"):
            setattr(self, name, state[name])
        self.backbone = backbone_for(
            self.X.shape[1], str(state["kind"]), state["hidden"], state["n_out"], self.weights
        )

    @answers(MOMENTS, after=(None, TRAIN))
    def moments(self, weights: Floats, **shape: Any) -> dict[str, Any]:
        self.backbone = backbone_for(self.X.shape[1], weights=weights, **shape)
        self.weights = np.asarray(weights, dtype=np.float64)
        found = features(self.backbone, self.weights, self.X)
        return {"count": len(found), "sums": found.sum(axis=0), "squares": found.T @ found}

    @answers(CENTERS, after=(MOMENTS,))
    def centers(self, mean: Floats, matrix: Floats, n_clusters: int, n_init: int) -> dict[str, Any]:
        self.mean, self.matrix = mean, matrix
        rng = np.random.default_rng([self._seed, self._asked.step])
        found = feca.client_cluster(self._whitened(), n_clusters, rng, n_init)
        found = feca.client_refine(found)
        return {"centers": found.centers, "radii": feca.client_empirical_radii(found)}

    @answers(TRAIN, after=(CENTERS,))
    def train(self, centers: Floats, head: Floats, **training: Any) -> dict[str, Any]:
        check_training(self.backbone, centers, head)
        rng = np.random.default_rng([self._seed, self._asked.step])
        labels = assign(self._whitened(), centers)
        weights, _ = deepfeca.train(
            self.backbone,
            self.weights,
            head.astype(np.float64),
            self.X,
            labels,
            len(centers),
            rng=rng,
            **training,
        )
        return {"weights": weights, "count": len(self.X)}

    def _whitened(self) -> Floats:
        found = features(self.backbone, self.weights, self.X)
        return deepfeca.whitened(found, self.mean, self.matrix)


def check_training(backbone: Backbone, centers: Floats, head: Floats) -> None:
    """Refuse centres and a head that are for other features, before any record is looked at."""
    if centers.shape[1] != backbone.n_out:
        raise ProtocolError(f"field 'centers' is not for {backbone.n_out} features")
    wanted = len(centers) * (backbone.n_out + 1)
    if len(head) != wanted:
        raise ProtocolError(f"field 'head' has {len(head)} numbers, expected {wanted}")


def run(session: Session, *, settings: Settings, rng: np.random.Generator) -> Clustering:
    """The server's side."""
    weights = single(settings.backbone.initial(rng))
    for _ in range(settings.n_rounds):
        mean, matrix = _ask_moments(session, settings, weights)
        centers = _ask_centers(session, mean, matrix, settings.n_labels, 1)
        request = settings.training(centers, rng)
        weights = _ask_training(session, len(weights), request)
    mean, matrix = _ask_moments(session, settings, weights)
    centers = _ask_centers(session, mean, matrix, settings.n_clusters, settings.n_init)
    session.note_centers(centers)
    return Clustering(centers, networks=networks(settings.backbone, weights, mean, matrix))


def single(weights: Floats) -> Floats:
    """Weights as they travel: in single precision, which is what they are trained in."""
    return weights.astype(np.float32).astype(np.float64)


def networks(backbone: Backbone, weights: Floats, mean: Floats, matrix: Floats) -> dict[str, Any]:
    """What a result keeps of the network."""
    return {
        "weights": weights,
        "mean": mean,
        "matrix": matrix,
        "hidden": np.asarray(backbone.hidden, dtype=np.int64),
        "n_features": np.asarray(backbone.n_features),
        "conv": np.asarray(int(backbone.kind == "conv")),
    }


def backbone_of(kept: Mapping[str, Any], n_features: int) -> Backbone:
    """The shape of the network that a result keeps."""
    return Backbone(
        n_features,
        "conv" if int(kept["conv"]) else "dense",
        tuple(int(n) for n in kept["hidden"]),
        len(kept["mean"]),
    )


def features_of(kept: Mapping[str, Any], X: Floats) -> Floats:
    """Whitened features of records, by the network that a result keeps."""
    found = features(backbone_of(kept, X.shape[1]), np.asarray(kept["weights"]), X)
    return deepfeca.whitened(found, np.asarray(kept["mean"]), np.asarray(kept["matrix"]))


def _ask_moments(session: Session, settings: Settings, weights: Floats) -> tuple[Floats, Floats]:
    f = settings.backbone.n_out
    replies = session.once(lambda: session.ask_all(MOMENTS, {"f": f}, **settings.network(weights)))
    n = sum(reply["count"] for reply in replies.values())
    mean = np.sum([reply["sums"] for reply in replies.values()], axis=0) / n
    squares = np.sum([reply["squares"] for reply in replies.values()], axis=0) / n
    return mean, deepfeca.whitening(squares - np.outer(mean, mean))


def _ask_centers(
    session: Session, mean: Floats, matrix: Floats, n_clusters: int, n_init: int
) -> Floats:
    replies = session.once(
        lambda: session.ask_all(
            CENTERS,
            {"k": (1, n_clusters)},
            mean=mean,
            matrix=matrix,
            n_clusters=n_clusters,
            n_init=n_init,
        )
    )
    return feca.server_aggregate(stack(replies, "centers"), stack(replies, "radii"), n_clusters)


def _ask_training(session: Session, p: int, request: dict[str, Any]) -> Floats:
    found = session.once(lambda: _averaged(session.ask_all(TRAIN, {"p": p}, **request)))
    return np.asarray(found["network"]["weights"])


def _averaged(replies: Mapping[str, Any]) -> Results:
    weights = deepfeca.average(
        [reply["weights"].astype(np.float64) for reply in replies.values()],
        [reply["count"] for reply in replies.values()],
    )
    if not np.isfinite(weights).all():
        raise TrainingError("an average of weights is not finite: lower learning_rate")
    return {"network": {"weights": single(weights)}}
