"""What accuracy is left under differential privacy, with the server seeing every message.

    python benchmarks/utility.py [--data-dir DIR] [--seeds 10] [--only one_shot,systems,fedgem,sets]
                                 [--sampler secure] [--check]

Records are at ten clients unless said, adjacency is add/remove, delta 1e-5 unless said, and ranges
are those of the whole data set, as if they were public. Figures are means and standard deviations
over seeds of partition and algorithm; noise is never seeded, so they differ from run to run.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from _table import Bar, mean_sd, print_bars, print_table
from tqdm import tqdm

from secure_fedclust import (
    FKM,
    GOLD,
    DataError,
    FeCA,
    FederationWarning,
    FedGEM,
    KFed,
    PrivacySpec,
    PrivacyWarning,
)
from secure_fedclust.algorithms.baselines import central_kmeans
from secure_fedclust.algorithms.lloyd import assign
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.base import FederatedClusterer
from secure_fedclust.datasets import (
    cluster_subset_partition,
    dirichlet_partition,
    iid_partition,
    load_benchmark,
    rmin_blobs,
)
from secure_fedclust.metrics import adjusted_rand

EPSILONS = (0.5, 1.0, 2.0, 4.0)
UNPROTECTED = PrivacySpec.none(reason="benchmark")


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    data_dir: str | None
    seeds: int
    sampler: str


@dataclass(frozen=True)
class Setting:
    """A data set, divided among clients."""

    name: str
    data: str
    n_clusters: int
    n_clients: int = 10
    alpha: float | None = None
    delta: float = 1e-5
    at_least: float | None = None
    """Bar for pooled weighted k-means on the synopsis at epsilon 1."""


ONE_SHOT = (
    Setting("s1, 10 x 500", "s1", 15, delta=1e-6, at_least=0.97),
    Setting("s1, Dirichlet(.3)", "s1", 15, alpha=0.3, delta=1e-6, at_least=0.97),
    Setting("s1, 50 x 100", "s1", 15, n_clients=50, delta=1e-6),
    Setting("birch2, 10 x 10,000", "birch2", 100, at_least=0.69),
    Setting("mnist_vae_emb10, 10 x 7,000", "mnist_vae_emb10", 10, at_least=0.59),
)
SETS = (
    ("s3", 15),
    ("s4", 15),
    ("unbalance", 8),
    ("adult_numeric6", 3),
    ("letter", 26),
    ("satellite", 6),
    ("waveform_v1", 3),
)
FEDGEM = ((2, 500), (8, 500), (8, 2000))
FEDGEM_EPSILONS = (1.0, 2.0, 4.0, 8.0)
CALIBRATIONS = ("synopsis", "sums", "floor", "theorem9")
FEDGEM_BARS = ((2, 500, 2.0), (8, 2000, 1.0))

Part = tuple[list[tuple[str, Sequence[str], list[list[str]]]], list[Bar]]


@dataclass(frozen=True)
class Federation:
    """Clients' records, and what nobody knows: the truth."""

    clients: list[Floats]
    truth: list[Ints]
    spec: dict[str, Any]

    def score(self, model: FederatedClusterer) -> float:
        """ARI of all records together."""
        return adjusted_rand(np.concatenate(self.truth), np.concatenate(model.labels_))

    def central_score(self, n_clusters: int, seed: int) -> float:
        """ARI of k-means on all records, with ranges scaled as private runs scale them."""
        X = self.scaled(np.concatenate(self.clients))
        centers = central_kmeans(X, n_clusters, np.random.default_rng(seed))
        return adjusted_rand(np.concatenate(self.truth), assign(X, centers))

    def scaled(self, X: Floats) -> Floats:
        """Ranges to [-1, 1]."""
        low, high = np.asarray(self.spec["ranges"]).T
        return np.asarray((X - low) / (high - low) * 2 - 1)

    def nicv(self, scaled_centers: Floats) -> float:
        """Mean squared distance to the nearest centre, with ranges scaled to [-1, 1]."""
        X = self.scaled(np.concatenate(self.clients))
        nearest = scaled_centers[assign(X, scaled_centers)]
        return float(np.square(X - nearest).sum(axis=1).mean())


def federation(X: Floats, y: Ints, parts: list[Ints], delta: float) -> Federation:
    ranges = [(float(low), float(high)) for low, high in zip(X.min(0), X.max(0), strict=True)]
    size = round(np.mean([len(part) for part in parts]))
    spec = {"delta": delta, "ranges": ranges, "public_size": size}
    return Federation([X[part] for part in parts], [y[part] for part in parts], spec)


def divided(setting: Setting, options: Options, seed: int) -> Federation:
    data = load_benchmark(setting.data, options.data_dir)
    if setting.alpha is None:
        parts = iid_partition(data.X, data.y, setting.n_clients, seed=seed)
    else:
        parts = dirichlet_partition(
            data.X, data.y, setting.n_clients, alpha=setting.alpha, seed=seed
        )
    return federation(data.X, data.y, parts, setting.delta)


def fitted(
    model: FederatedClusterer, federated: Federation, epsilon: float, options: Options, seed: int
) -> FederatedClusterer:
    spec = PrivacySpec(epsilon=epsilon, **federated.spec)
    model.set_params(privacy=spec, sampler=options.sampler, random_state=seed)
    return model.fit(federated.clients)


def one_shot(options: Options) -> Part:
    """Pooled weighted k-means on a synopsis of each client."""
    rows, bars = [], []
    for setting in tqdm(ONE_SHOT, desc="one shot", leave=False):
        scores: dict[float, list[float]] = {epsilon: [] for epsilon in EPSILONS}
        central = []
        for seed in range(options.seeds):
            federated = divided(setting, options, seed)
            central.append(federated.central_score(setting.n_clusters, seed))
            for epsilon in EPSILONS:
                model = FKM(setting.n_clusters, one_shot=True)
                scores[epsilon].append(
                    federated.score(fitted(model, federated, epsilon, options, seed))
                )
        rows.append([setting.name, *(mean_sd(scores[e], 3) for e in EPSILONS), mean_sd(central, 3)])
        if setting.at_least is not None:
            what = f"FKM(one_shot=True) on {setting.name}, epsilon 1, ARI"
            bars.append(Bar(what, float(np.mean(scores[1.0])), setting.at_least))
    header = ["data", *(f"epsilon {e:g}" for e in EPSILONS), "central k-means"]
    return [("One shot, local trust: ARI of FKM(one_shot=True)", header, rows)], bars


def systems(options: Options) -> Part:
    """What else the same budget buys."""
    kinds: dict[str, Callable[[int], FederatedClusterer]] = {
        "FKM(one_shot=True)": lambda k: FKM(k, one_shot=True),
        "FKM": lambda k: FKM(k),
        "FKM(seeding='public')": lambda k: FKM(k, seeding="public"),
        "KFed, k' = k": lambda k: KFed(k, n_local_clusters=k),
        "FeCA": lambda k: FeCA(k),
        "GOLD": lambda k: GOLD(k),
    }
    settings = [s for s in ONE_SHOT if s.data != "birch2"]
    rows = []
    for name, make in tqdm(kinds.items(), desc="systems", leave=False):
        row = [name]
        for setting in settings:
            scores = []
            for seed in range(options.seeds):
                federated = divided(setting, options, seed)
                model = fitted(make(setting.n_clusters), federated, 1.0, options, seed)
                scores.append(federated.score(model))
            row.append(mean_sd(scores, 3))
        rows.append(row)
    header = ["system", *(setting.name for setting in settings)]
    return [("All systems, local trust, epsilon 1: ARI", header, rows)], []


def fedgem(options: Options) -> Part:
    """FedGEM on a synopsis, and its other calibrations."""
    rows, bars = [], []
    for d, n in tqdm(FEDGEM, desc="FedGEM", leave=False):
        row = [f"d={d}, {n}"]
        for epsilon in (*FEDGEM_EPSILONS, None):
            found, scores = fedgem_scores(d, n, epsilon, options)
            row.append(f"{np.mean(found):.1f} / {mean_sd(scores, 3)}")
            if (d, n, epsilon) in FEDGEM_BARS:
                what = f"FedGEM(calibration='synopsis'), d={d}, {n} records, epsilon {epsilon:g}"
                bars.append(Bar(f"{what}, pooled ARI", float(np.mean(scores)), 0.97))
                bars.append(Bar(f"{what}, K found", float(np.mean(found)), 9, 11))
        rows.append(row)
    others = []
    for calibration in CALIBRATIONS:
        row = [calibration]
        for d, n, epsilon in ((2, 500, 2.0), (8, 2000, 1.0), (8, 2000, 4.0)):
            found, scores = fedgem_scores(d, n, epsilon, options, calibration=calibration)
            row.append(f"{np.mean(found):.1f} / {mean_sd(scores, 3)}")
        others.append(row)
    header = ["records a client", *(f"epsilon {e:g}" for e in FEDGEM_EPSILONS), "non-private"]
    return [
        ("FedGEM on a synopsis, K = 10, R_min = 6, v = 1: K found / pooled ARI", header, rows),
        (
            "FedGEM's calibrations: K found / pooled ARI",
            ["calibration", "d=2, 500, eps 2", "d=8, 2000, eps 1", "d=8, 2000, eps 4"],
            others,
        ),
    ], bars


def fedgem_scores(
    d: int, n: int, epsilon: float | None, options: Options, **parameters: Any
) -> tuple[list[int], list[float]]:
    found, scores = [], []
    for seed in range(options.seeds):
        X, y, _ = rmin_blobs(10 * n, d, 10, 6.0, seed=seed)
        parts = cluster_subset_partition(X, y, 10, seed=seed)
        federated = federation(X, y, parts, 1 / (n * math.log(n)))
        numbers = [len(np.unique(truth)) for truth in federated.truth]
        model = FedGEM(numbers, **parameters)
        if epsilon is None:
            model.set_params(privacy=UNPROTECTED, random_state=seed).fit(federated.clients)
        else:
            fitted(model, federated, epsilon, options, seed)
        found.append(model.n_clusters_)
        scores.append(federated.score(model))
    return found, scores


def sets(options: Options) -> Part:
    """Data sets that no constant was chosen on: cost over that of central k-means."""
    rows: list[list[str]] = []
    ratios: dict[str, list[float]] = {"FKM": [], "FKM(one_shot=True)": []}
    for name, k in tqdm(SETS, desc="sets", leave=False):
        setting = Setting(name, name, k)
        found: dict[str, list[float]] = {kind: [] for kind in ratios}
        for seed in range(options.seeds):
            federated = divided(setting, options, seed)
            pooled = federated.scaled(np.concatenate(federated.clients))
            best = central_kmeans(pooled, k, np.random.default_rng(seed))
            reference = federated.nicv(best)
            for kind in ratios:
                model = FKM(k, one_shot=kind != "FKM")
                centers = fitted(model, federated, 1.0, options, seed).cluster_centers_
                found[kind].append(federated.nicv(federated.scaled(centers)) / reference)
        rows.append([name, *(mean_sd(found[kind], 3) for kind in ratios)])
        for kind in ratios:
            ratios[kind].append(float(np.mean(found[kind])))
    means = [f"{np.exp(np.mean(np.log(values))):.3f}" for values in ratios.values()]
    rows.append(["geometric mean", *means])
    title = "Other data sets, local trust, epsilon 1: mean squared distance over central k-means"
    return [(title, ["data", *ratios], rows)], []


PARTS: dict[str, Callable[[Options], Part]] = {
    "one_shot": one_shot,
    "systems": systems,
    "fedgem": fedgem,
    "sets": sets,
}


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; 1 if a bar is missed under --check, 2 without data."""
    parser = argparse.ArgumentParser(description="Accuracy under differential privacy.")
    parser.add_argument("--data-dir", help="folder with the data sets (*.npz)")
    parser.add_argument("--seeds", type=int, default=10, help="how many (default 10)")
    parser.add_argument("--only", default=",".join(PARTS), help="which tables, by comma")
    parser.add_argument("--sampler", default="secure", choices=("secure", "fast"))
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is not met")
    given = parser.parse_args(arguments)
    if given.seeds < 1:
        parser.error(f"--seeds {given.seeds}: at least 1")
    if unknown := set(given.only.split(",")) - set(PARTS):
        parser.error(f"--only {','.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    options = Options(given.data_dir, given.seeds, given.sampler)
    bars: list[Bar] = []
    left_out = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.simplefilter("ignore", FederationWarning)
        for name in given.only.split(","):
            try:
                tables, its_bars = PARTS[name](options)
            except DataError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                left_out = True
                continue
            for title, header, rows in tables:
                print_table(title, header, rows)
            bars += its_bars
    met = print_bars(bars)
    return 1 if given.check and not met else 2 if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
