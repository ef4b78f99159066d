"""FedCRef: clients refine their clusters with the help of each other's autoencoders.

Each iteration:

1. Every client trains one autoencoder for each of its clusters.
2. The server hands all models to all clients, and each says for how many of its records a model
   does about as well as the cluster's own: that links clusters, and linked clusters are groups.
3. The clusters of a group train one model together, by rounds of federated averaging.
4. Every client clusters its records anew, by the models that reconstruct them best.

Clients whose clusters hardly change train once more, and then stop training and refining, but stay
in exchange and groups. It ends when none is left, or when groups and isolated clusters stay as they
are; steps 1 to 3 for the clusters that clients have ended with then say which of them are one.

Without protection the server sees models, shares, counts and averages. With differential privacy
(`fedcref_private.py`) every one of them is a release.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from secure_fedclust.algorithms import fedcref
from secure_fedclust.algorithms.autoencoders import Autoencoder, errors, train
from secure_fedclust.algorithms.fedcref import Bools, Normalisation
from secure_fedclust.algorithms.lloyd import kmeans
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import DataError, ProtocolError, TrainingError
from secure_fedclust.messages import Array, Choice, Integer, Real, stage
from secure_fedclust.protocols.averages import WEIGHTS
from secure_fedclust.protocols.checkpoint import Results
from secure_fedclust.protocols.client import MAX_CLUSTERS, Client, answers
from secure_fedclust.protocols.clustering import Clustering
from secure_fedclust.protocols.session import Session

MAX_WIDTH = 1 << 16
MODELS_AT_ONCE = 1 << 23
"""Weights in a request, about."""

MOST_MODELS = 1024
"""Models in a request."""

N_INIT = 10
"""Runs of a client's k-means, of which the best counts."""

SHAPE = {"hidden": Array(("layers",), "int64", minimum=1, largest=MAX_WIDTH)}
TRAINING = {
    "epochs": Integer(1, 100_000),
    "batch_size": Integer(1, 1 << 20),
    "learning_rate": Real(1e-9, 10.0),
}
_COUNTS = {"counts": Array(("k",), "int64", minimum=0)}
INDICES = Array(("k",), "int64", minimum=-1, largest=MAX_CLUSTERS)

START = stage(
    "fedcref/start",
    request={"n_clusters": Integer(1, MAX_CLUSTERS), **SHAPE},
    reply=_COUNTS,
)
LOCAL = stage(
    "fedcref/local",
    request={"initial": Array(("p",), "float32", largest=1e6), **TRAINING},
    reply={"models": Array(("k", "p"), "float32", largest=1e6)},
)
SCORES = stage(
    "fedcref/scores",
    request={
        "models": WEIGHTS,
        "theta": Real(0, 1e6),
        "normalisation": Choice(("relative", "minmax")),
    },
    reply={"shares": Array(("k", "m"), minimum=0, largest=1)},
)
GROUP = stage(
    "fedcref/group",
    request={"clusters": Array(("m",), "int64", minimum=0), "models": WEIGHTS, **TRAINING},
    reply={"models": WEIGHTS},
)
REFINE = stage(
    "fedcref/refine",
    request={"models": WEIGHTS, "n_clusters": Integer(1, MAX_CLUSTERS)},
    reply={"chosen": INDICES, "agreement": Real(0, 1), **_COUNTS},
)
MEANS = stage(
    "fedcref/means",
    request={"groups": INDICES, "n_groups": Integer(1, MAX_CLUSTERS)},
    reply={"sums": Array(("g", "d")), "counts": Array(("g",), "int64", minimum=0)},
)


@dataclass(frozen=True)
class Settings:
    """What a run of FedCRef is told; see the estimator."""

    hidden: tuple[int, ...]
    n_rounds: int
    local_epochs: int
    start_epochs: int
    batch_size: int
    learning_rate: float
    alpha: float
    theta: float
    tau: float
    normalisation: Normalisation
    max_iter: int

    def training(self, epochs: int) -> dict[str, Any]:
        """The fields of a request for training."""
        return {
            "epochs": epochs,
            "batch_size": self.batch_size,
            "learning_rate": self.learning_rate,
        }


class FedCRefClient(Client):
    """Trains autoencoders on its clusters, compares others with them, and refines its clusters.

    Privacy unit: none, the messages are unprotected.
    Sensitivity: unbounded.
    Who sees it: the server, and of models every other client.
    """

    labels: Ints
    models: Floats
    shape: Autoencoder

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.given: Ints | None = None
        self._seed = int(self.rng.integers(1 << 63))

    def begin_with(self, labels: Ints) -> None:
        """Take these clusters to begin with, instead of finding some."""
        self.given = labels

    def state(self) -> dict[str, Any]:
        state = {"labels": self.labels, "hidden": np.asarray(self.shape.hidden)}
        return state | ({"models": self.models} if hasattr(self, "models") else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        self.labels = state["labels"]
        self.shape = Autoencoder(self.X.shape[1], tuple(map(int, state["hidden"])))
        if "models" in state:
            self.models = state["models"]

    @answers(START, after=(None,))
    def start(self, n_clusters: int, hidden: Ints) -> dict[str, Any]:
        self.shape = Autoencoder(self.X.shape[1], tuple(map(int, hidden)))
        if self.given is not None:
            labels = self.given
        else:
            k = min(n_clusters, len(self.X))
            labels = kmeans(self.X, k, self.rng, n_init=N_INIT)[1]
        # An empty cluster has nothing to train on.
        _, self.labels = np.unique(labels, return_inverse=True)
        return {"counts": np.bincount(self.labels)}

    @answers(LOCAL, after=(START, LOCAL, REFINE))
    def local(self, initial: Floats, **training: Any) -> dict[str, Any]:
        k = int(self.labels.max()) + 1
        start = np.repeat(self._checked(initial[None]), k, axis=0)
        self.models = self._trained(start, range(k), **training)
        return {"models": self.models}

    @answers(SCORES, after=(LOCAL, SCORES, GROUP, REFINE))
    def scores(self, models: Floats, theta: float, normalisation: Normalisation) -> dict[str, Any]:
        found = errors(self.shape, self._checked(models), self.X)
        shares = np.empty((len(self.models), len(models)))
        for q, model in enumerate(self.models):
            mine = self.labels == q
            own = errors(self.shape, model[None], self.X[mine])[:, 0]
            shares[q] = fedcref.close(own, found[mine], theta, normalisation).mean(axis=0)
        return {"shares": shares}

    @answers(GROUP, after=(SCORES, GROUP))
    def group(self, clusters: Ints, models: Floats, **training: Any) -> dict[str, Any]:
        if not (clusters < len(self.models)).all():
            raise ProtocolError("field 'clusters' names clusters that this client does not have")
        return {"models": self._trained(self._checked(models), clusters, **training)}

    @answers(REFINE, after=(SCORES, GROUP))
    def refine(self, models: Floats, n_clusters: int) -> dict[str, Any]:
        candidates = np.concatenate([self.models, self._checked(models)])
        chosen, labels = fedcref.refine(errors(self.shape, candidates, self.X), n_clusters)
        agreement = fedcref.agreement(self.labels, labels)
        # A model that is best for none among those chosen leaves no cluster.
        kept, labels = np.unique(labels, return_inverse=True)
        self.labels, self.models = labels, candidates[chosen[kept]]
        return {
            "chosen": chosen[kept],
            "agreement": agreement,
            "counts": np.bincount(labels),
        }

    @answers(MEANS, after=(REFINE, SCORES, GROUP))
    def means(self, groups: Ints, n_groups: int) -> dict[str, Any]:
        if len(groups) <= self.labels.max():
            raise ProtocolError("field 'groups' has too few entries for this client's clusters")
        of = groups[self.labels]
        sums = np.zeros((n_groups, self.X.shape[1]))
        inside = (of >= 0) & (of < n_groups)
        np.add.at(sums, of[inside], self.X[inside])
        return {"sums": sums, "counts": np.bincount(of[inside], minlength=n_groups)}

    def _trained(self, start: Floats, clusters: Sequence[int] | Ints, **training: Any) -> Floats:
        # Of its own for each step, so that a run that is resumed draws the same.
        rng = np.random.default_rng([self._seed, self._asked.step])
        data = [self.X[self.labels == q] for q in clusters]
        return _single(train(self.shape, start, data, rng=rng, **training))

    def _checked(self, models: Floats) -> Floats:
        if models.shape[1] != self.shape.n_parameters:
            raise ProtocolError(
                f"models have {models.shape[1]} weights, this network has {self.shape.n_parameters}"
            )
        return np.asarray(models, dtype=np.float64)


def _single(weights: Floats) -> Floats:
    """As they travel: in single precision, which is what they are trained in."""
    return weights.astype(np.float32).astype(np.float64)


@dataclass(eq=False)
class Federation:
    """What the server knows of everybody's clusters in an iteration.

    Attributes
    ----------
    models : mapping of client to array of shape (k, p)
    graph : bool array of shape (m, m)
        Links between clusters, those of one client after those of another.
    numbers : int array of shape (m,)
        Group of each cluster; -1 if isolated.
    """

    models: dict[str, Floats]
    graph: Bools
    numbers: Ints

    @property
    def clusters(self) -> list[tuple[str, int]]:
        """Client and place of each cluster."""
        return [(client, q) for client, models in self.models.items() for q in range(len(models))]

    @property
    def n_groups(self) -> int:
        """Number of groups."""
        return int(self.numbers.max(initial=-1)) + 1

    def of_client(self, client: str) -> Ints:
        """Groups of a client's clusters."""
        owners = np.array([owner for owner, _ in self.clusters])
        return np.asarray(self.numbers[owners == client])

    def members(self, client: str) -> Ints:
        """A client's clusters that are in a group."""
        return np.flatnonzero(self.of_client(client) >= 0)

    def outcome(self) -> tuple[float, float]:
        """Numbers of groups and of isolated clusters."""
        return float(self.n_groups), float(np.count_nonzero(self.numbers < 0))


def associate(
    models: Mapping[str, Floats], shares: Mapping[str, Floats], alpha: float
) -> Federation:
    """Links and groups, from the share of each cluster's records that each model is close for."""
    rows = [
        shares[client] if client in shares else np.zeros((len(own), sum(map(len, models.values()))))
        for client, own in models.items()
    ]
    owners = np.repeat(np.arange(len(models)), [len(own) for own in models.values()])
    graph = fedcref.links(np.concatenate(rows), owners, alpha)
    return Federation(dict(models), graph, fedcref.groups(graph))


def pieces(models: Floats) -> list[Floats]:
    """All models, in parts that fit into a request."""
    at_once = min(max(1, MODELS_AT_ONCE // models.shape[1]), MOST_MODELS)
    return [models[first : first + at_once] for first in range(0, len(models), at_once)]


def run(
    session: Session,
    *,
    n_local_clusters: Mapping[str, int],
    settings: Settings,
    rng: np.random.Generator,
) -> Clustering:
    """The server's side."""
    hidden = np.asarray(settings.hidden)
    sizes = session.ask_once(
        START,
        {c: {"n_clusters": k, "hidden": hidden} for c, k in n_local_clusters.items()},
        {c: {"k": (1, k)} for c, k in n_local_clusters.items()},
    )
    n_features = session.n_features
    if n_features is None:
        raise ProtocolError("the number of features is not known: pass records, or ranges")
    shape = Autoencoder(n_features, settings.hidden)
    initial = _single(shape.initial(rng))
    counts = {client: reply["counts"] for client, reply in sizes.items()}
    models: dict[str, Floats] = {}
    makers: dict[str, Floats] = {}
    active = changed = list(counts)
    history: list[tuple[float, float]] = []
    for _ in range(settings.max_iter):
        models |= _ask_local(session, changed, counts, initial, settings)
        found = _ask_scores(session, models, settings)
        groups = _federate(session, found, counts, initial, settings)
        chosen = _ask_refine(session, active, found, groups, n_local_clusters)
        for client, reply in chosen.items():
            makers[client] = np.concatenate([found.models[client], groups])[reply["chosen"]]
            counts[client] = reply["counts"]
        # A client that has settled trains once more, on the clusters that it has ended with.
        changed = [c for c in counts if c in chosen or c not in models]
        active = [c for c in active if c not in chosen or chosen[c]["agreement"] < settings.tau]
        history.append(found.outcome())
        # Clients that are lost are waited for as long as others have something left to do.
        if not any(client in chosen for client in active) or fedcref.settled(history):
            break
    models |= _ask_local(session, changed, counts, initial, settings)
    found = _ask_scores(session, models, settings)
    groups = _federate(session, found, counts, initial, settings)
    held = {client: found.of_client(client) for client in found.models}
    history.append(found.outcome())
    return _outcome(session, shape, found, groups, makers, held, history)


def _ask_local(
    session: Session,
    active: Sequence[str],
    counts: Mapping[str, Ints],
    initial: Floats,
    settings: Settings,
) -> dict[str, Floats]:
    request = {"initial": initial, **settings.training(settings.start_epochs)}
    replies = session.ask_once(
        LOCAL,
        dict.fromkeys(active, request),
        {client: {"k": len(counts[client])} for client in active},
    )
    return {client: reply["models"].astype(np.float64) for client, reply in replies.items()}


def _ask_scores(session: Session, models: Mapping[str, Floats], settings: Settings) -> Federation:
    everyone = np.concatenate(list(models.values()))
    parts = []
    for piece in pieces(everyone):
        request = {
            "models": piece,
            "theta": settings.theta,
            "normalisation": settings.normalisation,
        }
        bounds = {client: {"k": len(own)} for client, own in models.items()}
        parts.append(session.ask_once(SCORES, dict.fromkeys(models, request), bounds))
    # Who has missed a part is linked to nobody.
    whole = [client for client in models if all(client in part for part in parts)]
    shares = {c: np.concatenate([part[c]["shares"] for part in parts], axis=1) for c in whole}
    return associate(models, shares, settings.alpha)


def _federate(
    session: Session,
    found: Federation,
    counts: Mapping[str, Ints],
    initial: Floats,
    settings: Settings,
) -> Floats:
    """One model a group, trained by rounds of federated averaging."""
    groups = np.repeat(initial[None], found.n_groups, axis=0)
    asked = {client: mine for client in found.models if len(mine := found.members(client))}
    for _ in range(settings.n_rounds if asked else 0):
        requests = {
            client: {
                "clusters": mine,
                "models": groups[found.of_client(client)[mine]],
                **settings.training(settings.local_epochs),
            }
            for client, mine in asked.items()
        }
        groups = _ask_round(session, requests, found, counts, groups)
    return groups


def _ask_round(
    session: Session,
    requests: Mapping[str, Any],
    found: Federation,
    counts: Mapping[str, Ints],
    before: Floats,
) -> Floats:
    averaged = session.once(lambda: _averaged(session.ask(GROUP, requests), found, counts, before))
    return np.asarray(averaged["groups"]["models"])


def _averaged(
    replies: Mapping[str, Any], found: Federation, counts: Mapping[str, Ints], before: Floats
) -> Results:
    total, weight = np.zeros_like(before), np.zeros(len(before))
    for client, reply in replies.items():
        mine = found.members(client)
        for q, group, model in zip(
            mine, found.of_client(client)[mine], reply["models"], strict=True
        ):
            total[group] += counts[client][q] * model.astype(np.float64)
            weight[group] += counts[client][q]
    averaged = np.where(weight[:, None] > 0, total / np.maximum(weight, 1)[:, None], before)
    if not np.isfinite(averaged).all():
        raise TrainingError("an average of weights is not finite: lower learning_rate")
    return {"groups": {"models": _single(averaged)}}


def _ask_refine(
    session: Session,
    active: Sequence[str],
    found: Federation,
    groups: Floats,
    n_local_clusters: Mapping[str, int],
) -> Results:
    present = [client for client in active if client in found.models]

    def sensible(client: str, reply: dict[str, Any]) -> dict[str, Any]:
        chosen = reply["chosen"]
        if chosen.min() < 0 or chosen.max() >= len(found.models[client]) + len(groups):
            raise ProtocolError("field 'chosen' names models that were not offered")
        return reply

    return session.ask_once(
        REFINE,
        {c: {"models": groups, "n_clusters": n_local_clusters[c]} for c in present},
        {c: {"k": (1, n_local_clusters[c])} for c in present},
        sensible,
    )


def _outcome(
    session: Session,
    shape: Autoencoder,
    found: Federation,
    groups: Floats,
    models: Mapping[str, Floats],
    held: Mapping[str, Ints],
    history: Sequence[tuple[float, float]],
) -> Clustering:
    """Means of the groups' records, and everything else that the result has."""
    centers = np.zeros((0, shape.n_features))
    if len(groups):
        replies = session.ask_once(
            MEANS,
            {c: {"groups": held[c], "n_groups": len(groups)} for c in held},
            {c: {"g": len(groups)} for c in held},
        )
        sums = np.sum([reply["sums"] for reply in replies.values()], axis=0)
        counts = np.sum([reply["counts"] for reply in replies.values()], axis=0)
        centers = sums / np.maximum(counts, 1)[:, None]
        session.note_centers(centers)
    return clustering(shape, found, groups, models, held, history, centers)


def clustering(
    shape: Autoencoder,
    found: Federation,
    groups: Floats,
    models: Mapping[str, Floats],
    held: Mapping[str, Ints],
    history: Sequence[tuple[float, float]],
    centers: Floats,
) -> Clustering:
    """What a run returns.

    Parameters
    ----------
    shape : Autoencoder
    found : Federation
        Of the last iteration.
    groups : array of shape (g, p)
        Models of the groups.
    models, held : mappings of client
        To the models that its clusters are made by, and to the group of each, -1 if isolated.
    history : sequence of (number of groups, number of isolated clusters)
    centers : array of shape (g, d)
    """
    graph = {
        "clusters": [[client, q] for client, q in found.clusters],
        "groups": found.numbers.tolist(),
        "links": np.argwhere(np.triu(found.graph)).tolist(),
        "iterations": [{"groups": int(g), "isolated": int(i)} for g, i in history],
    }
    networks = {
        "groups": groups,
        "hidden": np.asarray(shape.hidden),
        "n_features": np.asarray(shape.n_features),
    }
    for client in models:
        networks[f"models of {client}"] = models[client]
        networks[f"groups of {client}"] = held[client]
    return Clustering(
        centers,
        client_clusters={c: sorted({int(g) for g in held[c] if g >= 0}) for c in models},
        networks=networks,
        association=graph,
    )


def assigned(networks: Mapping[str, Any], X: Floats, client: str | None = None) -> Ints:
    """Group of each record, by the models that reconstruct it best; -1 for an isolated cluster's.

    Parameters
    ----------
    networks : mapping
        Of a result.
    X : array of shape (n, d)
    client : str, optional
        Whose clusters count; the groups' models, if not given.
    """
    labels = clusters_of(networks, X, client)
    own = client is not None and f"groups of {client}" in networks
    return np.asarray(networks[f"groups of {client}"])[labels] if own else labels


def clusters_of(networks: Mapping[str, Any], X: Floats, client: str | None = None) -> Ints:
    """The same, as places among the models of the client or of the groups."""
    shape = Autoencoder(X.shape[1], tuple(int(n) for n in networks["hidden"]))
    models = np.asarray(networks.get(f"models of {client}", networks["groups"]))
    if not len(models):
        raise DataError("no clusters were linked, so that there is no model to assign records by")
    return fedcref.best(errors(shape, models, X))
