"""What noisy training leaves of systems that train networks, and whether the ledger says its cost.

    python benchmarks/noisy_networks.py [--data-dir DIR] [--seeds 3] [--check]
                                        [--part fedcref,deepfeca]

The federations of `networks.py`, at epsilon 8 and 2. There are no bars for what is found, but
controls. FedCRef: clusters are those of the noisy start, or become what they are by each client's
noisy training alone, as in a run with groups, or with the epochs and the budget of groups and their
scores besides. DeepFeCA: the same network before it was trained, where all of the budget goes into
clusters, and not a fifth of it; and trained on pseudo-labels at the wrong records.
The claims of the first seed are worked out anew from the ledger.

Figures are means and standard deviations over seeds from 20 on, which nothing was tuned on. Noise
is never seeded. On two cores all takes about three quarters of an hour.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import numpy as np
from _claims import Claim, rates
from _images import (
    N_CLASSES,
    PER_CLASS,
    SIDE,
    Images,
    dirty_labels,
    fashion,
    fashion_parts,
    mnist_clients,
)
from _networks import (
    UNPROTECTED,
    Figures,
    Options,
    deepfeca_figures,
    fitted,
    run_parts,
)
from _parts import Part, Table
from _table import mean_sd
from tqdm import tqdm

from secure_fedclust import DeepFeCA, FedCRef, PrivacySpec
from secure_fedclust.algorithms.lloyd import kmeans
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.neural import NeuralClusterer
from secure_fedclust.protocols import fedcref_private
from secure_fedclust.protocols.client import Client
from secure_fedclust.protocols.deepfeca_private import PrivateDeepFeCAClient
from secure_fedclust.protocols.fedcref_client import PrivateFedCRefClient

FIRST_SEED = 20
DELTA = 1e-5
EPSILONS = (8.0, 2.0)
PROTECTIONS = ("none", "masking")
NOISY_ROUNDS = 3
NOISY_BOUND = float(SIDE)
"""No image of so many pixels a side, from 0 to 1 each, can be longer."""


@dataclass(frozen=True)
class Noise:
    """How a run is noised, and what else is asked of it.

    Attributes
    ----------
    epsilon : float or None
        None: no noise.
    protection : str
    remark : str
        What is different from a run as it is by default.
    more : mapping
        Parameters of the model that make the difference.
    parts : mapping
        Constants of FedCRef's budget that do.
    """

    epsilon: float | None = None
    protection: str = "none"
    remark: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        local = "local" if self.protection == "none" else self.protection
        name = "no noise" if self.epsilon is None else f"epsilon {self.epsilon:g}, {local}"
        return f"{name}{self.remark}"

    def applied(self, model: NeuralClusterer, bound: float, size: int, **noisy: Any) -> None:
        """Tell the model, which takes `noisy` parameters where there is noise."""
        model.set_params(privacy=UNPROTECTED, **self.more)
        if self.epsilon is not None:
            spec = PrivacySpec(
                epsilon=self.epsilon,
                delta=DELTA,
                bound=bound,
                public_size=size,
                protection=self.protection,
            )
            model.set_params(privacy=spec, sampler="fast", **noisy)

    @property
    def has_a_claim(self) -> bool:
        """Whether its ledger is looked at."""
        return self.epsilon is not None and not self.remark


NOISES = [Noise(epsilon, protection) for epsilon in EPSILONS for protection in PROTECTIONS]

# A share of all records, or else noise alone would link clusters now and then.
NO_LINKS = {"theta": 0.0, "alpha": 1.0}
ALL_TO_LOCAL = {"LOCAL_PART": 0.91, "SCORES_PART": 0.01}
ALONE = [
    Noise(epsilon, "none", f", alone{remark}", NO_LINKS | more, parts)
    for epsilon in EPSILONS
    for remark, more, parts in (
        ("", {}, {}),
        (", all of the budget", {"start_epochs": 8 + NOISY_ROUNDS}, ALL_TO_LOCAL),
    )
]
ROUND_0 = [
    Noise(epsilon, protection, ", round 0", {"n_rounds": 0})
    for epsilon in (None, *EPSILONS)
    for protection in (PROTECTIONS if epsilon else ("none",))
]
SHUFFLED = [Noise(epsilon, "none", ", shuffled labels") for epsilon in EPSILONS]


class WatchedClient(PrivateFedCRefClient):
    """Remembers which clusters it was given to begin with."""

    def _first(self, centers: Floats) -> Ints:
        self.first = super()._first(centers)
        return self.first


class WatchedFedCRef(FedCRef):
    """Remembers its clients."""

    _private_class: ClassVar[Any] = WatchedClient

    def _prepare(self, journal: Any, name: str, client: Client) -> None:
        super()._prepare(journal, name, client)
        self.watched = {**getattr(self, "watched", {}), name: client}

    def first_clusters(self, images: Images, seed: int) -> list[Ints]:
        """The clusters that clients began with; without noise, what k-means finds as well."""
        if not isinstance(self.initial, str):
            return list(self.initial)
        if self.privacy.is_private:
            return [self.watched[name].first for name in self.client_names_]
        pairs = zip(images.clients, images.n_local, strict=True)
        return [kmeans(X, k, np.random.default_rng(seed), n_init=10)[1] for X, k in pairs]


NOISY = {
    "ACC start": 3,
    "ACC": 3,
    "groups": 1,
    "classes": 1,
    "in groups %": 0,
    "purity of groups": 3,
    "seconds": 0,
}
"""Figures of FedCRef, and how many decimals are printed."""


def fedcref_part(options: Options) -> Part:
    """What clusters are left of FedCRef."""
    starts = {"k-means": None, "true labels (NO DP CLAIM)": 0.0}
    rows, checked = [], []
    jobs = [(start, noise) for start in starts for noise in (Noise(), *NOISES, *ALONE)]
    for start, noise in tqdm(jobs, "FedCRef with noise", leave=False):
        runs: list[Figures] = []
        for seed in options.numbers:
            images = mnist_clients(options.data_dir, seed)
            dirty = starts[start]
            initial = "kmeans" if dirty is None else dirty_labels(images, dirty, seed)
            model = WatchedFedCRef(
                images.n_local, initial=initial, allow_unproved=dirty is not None
            )
            noise.applied(model, NOISY_BOUND, 3 * PER_CLASS, n_rounds=NOISY_ROUNDS)
            with mock.patch.dict(vars(fedcref_private), noise.parts):
                seconds = fitted(model, images.clients, seed)
            first = images.accuracy(model.first_clusters(images, seed))
            figures = noisy_figures(model, images)
            runs.append({"ACC start": first, **figures, "seconds": seconds})
            if noise.has_a_claim and dirty is None and seed == FIRST_SEED:
                checked.append(Claim.of(f"FedCRef, {noise}", model))
        rows.append(
            [start, str(noise)]
            + [mean_sd([run[f] for run in runs], digits) for f, digits in NOISY.items()]
        )
    title = (
        f"FedCRef with noise (sampler='fast'), MNIST 14x14, 12 clients, {NOISY_ROUNDS} rounds of "
        "groups; without noise, as it is by default; alone: nothing is linked"
    )
    return with_claims((title, ["start", "noise", *NOISY], rows), checked)


def noisy_figures(model: FedCRef, images: Images) -> Figures:
    labels, classes = np.concatenate(model.labels_), np.concatenate(images.classes)
    tables = [np.bincount(classes[labels == g]) for g in range(model.n_clusters_)]
    filled = [table for table in tables if len(table)]
    inside = int((labels >= 0).sum())
    return {
        "ACC": images.accuracy(model.clusters_),
        "groups": float(model.n_clusters_),
        "classes": float(len({int(table.argmax()) for table in filled})),
        "in groups %": 100 * inside / len(labels),
        "purity of groups": sum(int(table.max()) for table in filled) / max(inside, 1),
    }


class ShuffledClient(PrivateDeepFeCAClient):
    """Trains on the right pseudo-labels at the wrong records."""

    def _labels(self, centers: Floats) -> Ints:
        return np.random.default_rng(self._seed).permutation(super()._labels(centers))


class ShuffledDeepFeCA(DeepFeCA):
    """DeepFeCA whose pseudo-labels say nothing about the records."""

    _private_class: ClassVar[Any] = ShuffledClient


def deepfeca_part(options: Options) -> Part:
    """What features and clusters are left of DeepFeCA."""
    X = fashion(options.data_dir)[0]
    rows, checked = [], []
    jobs = [(DeepFeCA, noise) for noise in (Noise(), *NOISES, *ROUND_0)]
    jobs += [(ShuffledDeepFeCA, noise) for noise in SHUFFLED]
    for kind, noise in tqdm(jobs, "DeepFeCA with noise", leave=False):
        runs: list[Figures] = []
        for seed in options.numbers:
            parts = fashion_parts(options.data_dir, "IID", seed)
            model = kind(N_CLASSES)
            noise.applied(model, math.sqrt(X.shape[1]), len(X) // 10)
            seconds = fitted(model, [X[part] for part in parts], seed)
            figures = deepfeca_figures(model, parts, options.data_dir)
            runs.append({**figures, "seconds": seconds})
            if noise.has_a_claim and seed == FIRST_SEED:
                checked.append(Claim.of(f"DeepFeCA, {noise}", model))
        rows.append(
            [str(noise)]
            + [mean_sd([run[f] for run in runs], 3) for f in ("probe", "ten labels", "NMI")]
            + [mean_sd([run["seconds"] for run in runs], 0)]
        )
    header = ["noise", "probe", "ten labels a class", "NMI, k = 10", "seconds"]
    title = "DeepFeCA with noise (sampler='fast'), Fashion-MNIST, 10 clients, IID"
    return with_claims((title, header, rows), checked)


def with_claims(table: Table, checked: list[Claim]) -> Part:
    """The claims beside the figures."""
    header = [
        "run",
        "clients",
        "releases",
        "trainings",
        "charged over our own mu",
        "mu over limit",
        "epsilon by PLD",
    ]
    title = "The claim, worked out anew from the ledger by dp_accounting; the dearest client"
    claims: Table = (title, header, [claim.cells for claim in checked])
    return [table, claims, rates(checked[0])], [bar for claim in checked for bar in claim.bars]


PARTS: dict[str, Callable[[Options], Part]] = {"fedcref": fedcref_part, "deepfeca": deepfeca_part}


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; 1 if a bar is missed under --check, 2 without data."""
    return run_parts(PARTS, FIRST_SEED, "Systems that train networks, with noise.", arguments)


if __name__ == "__main__":
    sys.exit(main())
