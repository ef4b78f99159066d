"""What the benchmarks of systems that train networks share."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from _images import fashion
from _parts import Part, print_parts

from secure_fedclust import DeepFeCA, PrivacySpec
from secure_fedclust.algorithms import deepfeca
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.metrics import normalized_mutual_info
from secure_fedclust.neural import NeuralClusterer

UNPROTECTED = PrivacySpec.none(reason="benchmark")

N_LABELLED = 10
"""Images of a class that the small probe gets."""
DRAWS = 5

Figures = dict[str, float]


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    data_dir: str | None
    numbers: range
    """The seeds."""


def fitted(model: NeuralClusterer, clients: Sequence[Floats], seed: int) -> float:
    """Fit, and give the seconds it took."""
    started = time.perf_counter()
    model.set_params(random_state=seed).fit(list(clients))
    return time.perf_counter() - started


def mean_of(runs: Sequence[Figures], name: str) -> float:
    return float(np.mean([run[name] for run in runs]))


def probes(features: Floats, y: Ints, test: Floats, y_test: Ints) -> Figures:
    """Accuracy of a linear classifier that has seen all labels, and ten of each class."""
    small = []
    for draw in range(DRAWS):
        rng = np.random.default_rng([77, draw])
        rows = np.concatenate(
            [rng.choice(np.flatnonzero(y == c), N_LABELLED, replace=False) for c in np.unique(y)]
        )
        small.append(deepfeca.probe(features[rows], y[rows], test, y_test))
    return {"probe": deepfeca.probe(features, y, test, y_test), "ten labels": float(np.mean(small))}


def deepfeca_figures(model: DeepFeCA, parts: Sequence[Ints], data_dir: str | None) -> Figures:
    X, y, X_test, y_test = fashion(data_dir)
    truth = np.concatenate([y[part] for part in parts])
    found = probes(model.transform(X), y, model.transform(X_test), y_test)
    return {**found, "NMI": normalized_mutual_info(truth, np.concatenate(model.labels_))}


def run_parts(
    parts: Mapping[str, Callable[[Options], Part]],
    first_seed: int,
    description: str,
    arguments: list[str] | None = None,
) -> int:
    """Print the tables; 1 if a bar is missed under --check, 2 without data."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data-dir", help="folder with the data sets (*.npz)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default 3)")
    parser.add_argument("--part", default=",".join(parts), help="which parts, by comma")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is not met")
    given = parser.parse_args(arguments)
    if given.seeds < 1:
        parser.error(f"--seeds {given.seeds}: at least 1")
    if unknown := set(given.part.split(",")) - set(parts):
        parser.error(f"--part {','.join(sorted(unknown))}: there are {', '.join(parts)}")
    options = Options(given.data_dir, range(first_seed, first_seed + given.seeds))
    return print_parts(parts, given.part.split(","), options, check=given.check)
