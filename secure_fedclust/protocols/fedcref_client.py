"""FedCRef's client with differential privacy: the stages it answers, and how.

What each of them is for, and why assignments look at one record at a time: `fedcref_private.py`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from secure_fedclust.algorithms import fedcref as algorithm
from secure_fedclust.algorithms.autoencoders import Autoencoder, errors
from secure_fedclust.algorithms.rows import directions_of, times
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import ProtocolError
from secure_fedclust.messages import (
    ANCHOR,
    Array,
    Bounds,
    Integer,
    Real,
    private_stage,
    stage,
    steps,
)
from secure_fedclust.privacy import dpsgd
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.queries import AssignedSums, Marks, nearest
from secure_fedclust.privacy.subsampled import Sampling, public_rate
from secure_fedclust.protocols.averages import AVERAGE, WEIGHTS, Held
from secure_fedclust.protocols.cells import CELLS
from secure_fedclust.protocols.client import answers
from secure_fedclust.protocols.feature_space import FeatureSpace, digest, of_features
from secure_fedclust.protocols.fedcref import (
    INDICES,
    MOST_MODELS,
    SHAPE,
    TRAINING,
)
from secure_fedclust.protocols.seeding import MOMENTS
from secure_fedclust.protocols.synopsis import MICRO, SynopsisClient

DIRECTIONS = 12
"""Records of more features are clustered, at the start, by what is seen from so many directions."""

MOST_SEEN = 256
"""Features whose moments are looked at to find these; of more, as many random mixtures."""

MOST_LOOKS = 8
"""Looking is free: once at features, once from the directions found, and again after a crash."""

MAX_PARAMETERS = 1 << 22

MAX_LOCAL = 20
"""Clusters of a client, at most: a row of the ledger names the training of each."""

_COST = {"share": Real(1e-9, 1)}
_NOISY_TRAINING = {**TRAINING, "clip": Real(1e-6, 1e6), **_COST}

PROJECT = stage(
    "fedcref/project",
    request={"directions": Array(("directions", "inputs"), largest=1)},
    reply=ANCHOR,
    form="receipt",
)
"""Says how to look at records; the reply says nothing about them."""

MOMENTS_OF = of_features(MOMENTS)
"""The question for a sum, naming the directions: all clients must have the same."""

BEGIN = stage(
    "fedcref/begin",
    request={
        "centers": Array(("k", "d")),
        "sizes": Array(("k",), minimum=1, largest=1e12),
        **SHAPE,
    },
    reply=ANCHOR,
    form="receipt",
)
"""Hands over the clusters to begin with, found in what the client has released."""

NOISY_LOCAL = stage(
    "fedcref/noisy_local",
    request={"initial": Array(("p",), "float32", largest=1e6), **_NOISY_TRAINING},
    reply={"models": Array(("k", "p"), "float32", largest=1e6), **ANCHOR},
    form="noisy",
)
NOISY_SCORES = private_stage(
    "fedcref/noisy_scores",
    request={"models": WEIGHTS, "theta": Real(0, 1e6)},
    reply={"counts": steps("k"), "marks": steps("k", "m")},
)
NOISY_GROUP = stage(
    "fedcref/noisy_group",
    request={
        "clusters": Array(("m",), "int64", minimum=0),
        "models": WEIGHTS,
        "groups": Array(("m",), "int64", minimum=0),
        "weights": Array(("m",), minimum=0, largest=1),
        "hold": Integer(0, 1),
        **_NOISY_TRAINING,
    },
    reply={"models": Array(("sent", "p"), "float32", largest=1e6), **ANCHOR},
    form="noisy",
)
NOISY_REFINE = private_stage(
    "fedcref/noisy_refine",
    request={"models": WEIGHTS, "groups": INDICES, "n_clusters": Integer(1, MAX_LOCAL)},
    reply={"counts": steps("c"), "marks": steps("c", "none")},
)
NOISY_MEANS = private_stage(
    "fedcref/noisy_means",
    request={"n_groups": Integer(1, 1 << 16), "count_weight": Real(1e-3, 1e3)},
    reply={"counts": steps("g"), "sums": steps("g", "d")},
    additive=True,
)


_KEPT = ("directions", "looks", "models", "sizes", "groups", "labels")


class PrivateFedCRefClient(SynopsisClient):
    """Everything that FedCRef's clients do, with noise.

    Privacy unit: a record of the client.
    Sensitivity: ``marks``, ``moments``, ``synopsis`` and ``sums_and_counts`` in
    docs/proofs/sensitivity.md, ``dp_sgd`` in docs/proofs/training.md.
    Who sees it: the server; of models every other client. With a protection, the server sees
    moments, the rounds of groups and the means in sums only.
    """

    more_bounds: ClassVar[Bounds] = {
        "directions": (1, MOST_SEEN),
        "m": (0, MOST_MODELS),
        "layers": (1, 16),
        "p": (1, MAX_PARAMETERS),
    }
    shape: Autoencoder

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.records = self.X
        self.directions, self.looks = np.zeros((0, 0)), 0
        self.models = np.zeros((0, 0))
        self.sizes = np.zeros(0)
        self.groups = np.zeros(0, dtype=np.int64)
        self.labels = np.zeros(len(self.X), dtype=np.int64)
        self.held = Held(np.zeros((0, 0)), np.zeros(0), np.zeros(0, dtype=np.int64))

    def state(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in _KEPT}
        held = {f"held {name}": value for name, value in vars(self.held).items()}
        # Before the start there is no network yet.
        hidden = self.shape.hidden if hasattr(self, "shape") else ()
        return {**kept, **held, "hidden": np.asarray(hidden, dtype=np.int64)}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in _KEPT:
            setattr(self, name, state[name])
        self.looks = int(self.looks)
        self.held = Held(*(state[f"held {name}"] for name in ("weights", "shares", "groups")))
        if len(state["hidden"]):
            self.shape = Autoencoder(self.records.shape[1], tuple(map(int, state["hidden"])))
        elif len(self.directions):
            self._look()

    # A client that was lost in the sum of moments, or is resumed, has only looked.
    @answers(PROJECT, after=(None, PROJECT, MOMENTS, MOMENTS_OF))
    def project(self, directions: Floats) -> dict[str, Any]:
        if self.looks >= MOST_LOOKS:
            raise ProtocolError(f"look {self.looks + 1}: at most {MOST_LOOKS} in a run")
        self.directions, self.looks = directions, self.looks + 1
        self._look()
        return self._anchor()

    @answers(MOMENTS, after=(PROJECT,))
    def moments(self, share: float) -> dict[str, Any]:
        if self._n_clients is not None:
            raise ProtocolError("a question for a sum must name the directions")
        return super().moments(share)

    @answers(MOMENTS_OF, after=(PROJECT,))
    def moments_of(self, share: float, made_by: str) -> dict[str, Any]:
        if made_by != digest((), self.directions):
            raise ProtocolError("field 'made_by' names other directions")
        return super().moments(share)

    @answers(MICRO, after=(None, PROJECT))
    def micro(self, n_micro: int, n_rounds: int, share: float) -> dict[str, Any]:
        return super().micro(n_micro, n_rounds, share)

    @answers(CELLS, after=(None, PROJECT))
    def cells(self, **request: Any) -> dict[str, Any]:
        if self._n_clients is not None:
            raise ProtocolError("cells of what is seen are not added up")
        return super().cells(**request)

    @answers(BEGIN, after=(MICRO, CELLS))
    def begin(self, centers: Floats, sizes: Floats, hidden: Ints) -> dict[str, Any]:
        if len(sizes) > MAX_LOCAL:
            raise ProtocolError(f"field 'sizes' has {len(sizes)} clusters, at most {MAX_LOCAL}")
        shape = Autoencoder(self.records.shape[1], tuple(map(int, hidden)))
        if shape.n_parameters > MAX_PARAMETERS:
            raise ProtocolError(f"field 'hidden': a network of {shape.n_parameters} weights")
        self.shape = shape
        self.labels, self.sizes = self._first(centers), sizes
        self.models = np.zeros((len(sizes), self.shape.n_parameters))
        self.enter(Domain.of(self.spec, self.records.shape[1]))
        return self._anchor()

    def _first(self, centers: Floats) -> Ints:
        """The cluster that each record starts in."""
        return nearest(self.X, centers)

    def _look(self) -> None:
        """Have, in place of records, where they lie as seen from a few directions, not how far."""
        self.domain = FeatureSpace(len(self.directions)).domain
        self.X, _ = self.domain.enter(directions_of(times(self.records, self.directions.T)))

    @answers(NOISY_LOCAL, after=(BEGIN, NOISY_REFINE))
    def local(self, initial: Floats, **training: Any) -> dict[str, Any]:
        k = len(self.sizes)
        # Who has no cluster in a group has nothing to add to its sums.
        self.held = Held(np.zeros((0, 0)), np.zeros(0), np.zeros(0, dtype=np.int64))
        start = np.repeat(self._checked(initial[None]), k, axis=0)
        self.models = self._trained(start, np.arange(k), **training)
        return {"models": self.models, **self._anchor()}

    @answers(NOISY_SCORES, after=(NOISY_LOCAL, NOISY_SCORES))
    def scores(self, models: Floats, theta: float, share: float) -> dict[str, Any]:
        models = self._checked(models)
        labels, own_models, shape = self.labels, self.models, self.shape

        def marks_of(X: Floats) -> tuple[Ints, Any]:
            own = errors(shape, own_models, X)[np.arange(len(X)), labels]
            return labels, algorithm.close(own, errors(shape, models, X), theta, "relative")

        return self.reply(self.release(Marks(len(self.models), len(models), marks_of), share))

    @answers(NOISY_GROUP, after=(NOISY_SCORES, NOISY_GROUP, AVERAGE))
    def group(
        self,
        clusters: Ints,
        models: Floats,
        groups: Ints,
        weights: Floats,
        hold: int,
        **training: Any,
    ) -> dict[str, Any]:
        if not (clusters < len(self.sizes)).all() or len(np.unique(clusters)) != len(clusters):
            raise ProtocolError("field 'clusters' does not name this client's clusters, each once")
        if bool(hold) != (self._summand is not None):
            raise ProtocolError("field 'hold' must be 1 where networks are added up, and else 0")
        trained = self._trained(self._checked(models), clusters, **training)
        if hold:
            self.held = Held(trained, weights, groups)
        return {"models": trained[: 0 if hold else None], **self._anchor()}

    @answers(AVERAGE, after=(NOISY_SCORES, NOISY_GROUP, AVERAGE))
    def average(self, first: int, n_groups: int, n_numbers: int) -> dict[str, Any]:
        return self.held.part(self.weight_grid(), first, n_groups, n_numbers)

    @answers(NOISY_REFINE, after=(NOISY_SCORES, NOISY_GROUP, AVERAGE))
    def refine(self, models: Floats, groups: Ints, n_clusters: int, share: float) -> dict[str, Any]:
        if len(groups) != len(self.models):
            raise ProtocolError("field 'groups' must have one entry for each cluster")
        candidates = np.concatenate([self.models, self._checked(models)])
        found = errors(self.shape, candidates, self.X)
        query = counting(len(candidates), lambda _: algorithm.best(found))
        noisy = self.release(query, share)
        chosen, self.sizes = picked_and_sizes(query.read(noisy)[0], n_clusters)
        self.models = candidates[chosen]
        self.groups = np.concatenate([groups, np.arange(len(models))])[chosen]
        self.labels = algorithm.best(found[:, chosen])
        return self.reply(noisy)

    @answers(NOISY_MEANS, after=(NOISY_REFINE,))
    def means(self, n_groups: int, count_weight: float, share: float) -> dict[str, Any]:
        of = self.groups[self.labels]
        # Records of isolated clusters are in a cell of their own.
        cells = np.where((of < 0) | (of >= n_groups), n_groups, of)
        query = group_sums(self.X.shape[1], n_groups, count_weight, lambda _: cells)
        return self.reply(self.release(query, share))

    def _trained(
        self,
        start: Floats,
        clusters: Ints,
        *,
        epochs: int,
        batch_size: int,
        learning_rate: float,
        clip: float,
        share: float,
    ) -> Floats:
        """Train a model for each of some clusters, paid for together: a record is in one."""
        rates = [public_rate(batch_size, size) for size in self.sizes[clusters]]
        samplings = [Sampling(rate, max(1, round(epochs / rate))) for rate in rates]
        trainings = self.pay_for_training(samplings, share, clip, self.shape.n_parameters)
        trained = np.empty_like(start)
        for i, (q, training) in enumerate(zip(clusters, trainings, strict=True)):
            module = self.shape.module(start[i])
            records = self.X[self.labels == q]
            dpsgd.train(
                module,
                records,
                records.astype(np.float32),
                reconstruction_loss,
                training,
                clip=clip,
                expected_batch=batch_size,
                learning_rate=learning_rate,
                sampler=self.sampler,
            )
            trained[i] = self.shape.weights_of(module)
        return trained

    def _checked(self, models: Floats) -> Floats:
        if models.shape[1] != self.shape.n_parameters:
            raise ProtocolError(
                f"models have {models.shape[1]} weights, this network has {self.shape.n_parameters}"
            )
        return np.asarray(models, dtype=np.float64)


class UnprovedFedCRefClient(PrivateFedCRefClient):
    """Starts from clusters that it was given, which may depend on all records at once.

    Privacy unit: none, one record may move all others to other clusters.
    Sensitivity: as stated, if the clusters given do not depend on the records.
    Who sees it: as for `PrivateFedCRefClient`.
    """

    def begin_with(self, labels: Ints) -> None:
        """Take these clusters to begin with."""
        self.given = labels

    def _first(self, centers: Floats) -> Ints:
        return np.minimum(self.given, len(centers) - 1)


def reconstruction_loss(outputs: Any, targets: Any) -> Any:
    """Mean squared error of each record."""
    return (outputs - targets).square().mean(dim=1)


def counting(n_cells: int, cells_of: Any) -> Marks:
    """A query that counts records by cell."""
    return Marks(n_cells, 0, lambda X: (cells_of(X), np.zeros((len(X), 0), dtype=bool)))


def picked_and_sizes(counts: Floats, n_clusters: int) -> tuple[Ints, Floats]:
    """The cells kept by noisy counts, and about how many records each will have.

    Records of the other cells go to those kept, in proportion as far as anybody knows.
    """
    picked = algorithm.choose(counts, n_clusters)
    kept = np.maximum(counts[picked], 1.0)
    return picked, kept * max(1.0, float(np.maximum(counts, 0).sum() / kept.sum()))


def group_sums(n_features: int, n_groups: int, count_weight: float, cells_of: Any) -> AssignedSums:
    """Sums of a group's records about the middle of the region, and counts."""
    centers = np.zeros((n_groups + 1, n_features))
    return AssignedSums(centers, np.sqrt(n_features), count_weight, cells_of=cells_of)
