"""Federations of images: digits of MNIST at 14x14 pixels, and Fashion-MNIST."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from secure_fedclust.algorithms import fedcref
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.datasets import dirichlet_partition, iid_partition, load_benchmark

SIDE = 14
N_CLASSES = 10
N_CLIENTS = 12
PER_CLASS = 200


@dataclass(frozen=True, eq=False)
class Images:
    """Clients' images, and what nobody knows: their classes."""

    clients: list[Floats]
    classes: list[Ints]

    @property
    def truth(self) -> list[Ints]:
        """Classes of each client, counted from 0."""
        return [np.unique(classes, return_inverse=True)[1] for classes in self.classes]

    @property
    def n_local(self) -> list[int]:
        """Classes at each client."""
        return [len(np.unique(classes)) for classes in self.classes]

    def accuracy(self, clusters: Sequence[Ints]) -> float:
        """ACC, the mean over clients."""
        pairs = zip(self.truth, clusters, strict=True)
        return float(np.mean([fedcref.agreement(true, found) for true, found in pairs]))


@cache
def mnist(data_dir: str | None) -> tuple[Floats, Ints]:
    parts = [load_benchmark(f"mnist_{part}10k", data_dir) for part in ("train", "test")]
    X = np.concatenate([part.X for part in parts]).reshape(-1, SIDE, 2, SIDE, 2).mean(axis=(2, 4))
    return X.reshape(len(X), SIDE**2) / 255, np.concatenate([part.y for part in parts])


@cache
def mnist_clients(data_dir: str | None, seed: int) -> Images:
    X, y = mnist(data_dir)
    rng = np.random.default_rng([seed, 1])
    most = np.bincount(y).min() // PER_CLASS
    while True:
        held = [rng.choice(N_CLASSES, rng.integers(2, 6), replace=False) for _ in range(N_CLIENTS)]
        times = np.bincount(np.concatenate(held), minlength=N_CLASSES)
        if times.min() >= 2 and times.max() <= most:
            break
    pools = [list(rng.permutation(np.flatnonzero(y == c))) for c in range(N_CLASSES)]
    rows = [
        rng.permutation(np.concatenate([[pools[c].pop() for _ in range(PER_CLASS)] for c in own]))
        for own in held
    ]
    return Images([X[each] for each in rows], [y[each] for each in rows])


def dirty_labels(images: Images, dirtiness: float, seed: int) -> list[Ints]:
    rng = np.random.default_rng([seed, 4])
    pairs = zip(images.truth, images.n_local, strict=True)
    return [fedcref.dirty(labels, dirtiness, rng, k) for labels, k in pairs]


@cache
def fashion(data_dir: str | None) -> tuple[Floats, Ints, Floats, Ints]:
    train, test = (load_benchmark(f"fmnist_{part}10k", data_dir) for part in ("train", "test"))
    return train.X / 255, train.y, test.X / 255, test.y


def fashion_parts(data_dir: str | None, split: str, seed: int) -> list[Ints]:
    X, y, _, _ = fashion(data_dir)
    if split == "IID":
        return iid_partition(X, y, 10, seed=seed)
    return dirichlet_partition(X, y, 10, 0.3, seed=seed)
