"""What accuracy is left under differential privacy.

    python benchmarks/utility.py [--data-dir DIR] [--seeds 10] [--sampler secure] [--check]
                                 [--only one_shot,systems,fedgem,sets,distributed,refined]

Local trust: the server sees every message, so that each is private by itself. Distributed: it sees
sums only (masking), and ten clients of which seven must survive, one colluding, share the noise.

Records are at ten clients unless said, adjacency is add/remove, delta 1e-5 unless said, and ranges
are those of the whole data set, as if they were public. Figures are means and standard deviations
over seeds of partition and algorithm; noise is never seeded, so they differ from run to run.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from _parts import Part, print_parts
from _table import Bar, mean_sd
from scipy.spatial.distance import cdist
from tqdm import tqdm

from secure_fedclust import (
    FKM,
    GOLD,
    FeCA,
    FedGEM,
    KFed,
    PrivacySpec,
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
DISTRIBUTED_EPSILONS = (0.1, 0.5, 1.0, 2.0)
UNPROTECTED = PrivacySpec.none(reason="benchmark")
MASKED_ANY = {"protection": "masking"}
MASKED = {"protection": "masking", "colluders": 1, "min_survivors": 7}
NOBODY_DROPS = {"protection": "masking", "colluders": 0, "min_survivors": 10}


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
    model: FederatedClusterer,
    federated: Federation,
    epsilon: float,
    options: Options,
    seed: int,
    **protected: Any,
) -> FederatedClusterer:
    spec = PrivacySpec(epsilon=epsilon, **federated.spec, **protected)
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
    runs = [(name, make, {}) for name, make in kinds.items()]
    runs += [(f"{name}, masking", make, MASKED_ANY) for name, make in kinds.items()]
    for name, make, protected in tqdm(runs, desc="systems", leave=False):
        row = [name]
        for setting in settings:
            scores = []
            for seed in range(options.seeds):
                federated = divided(setting, options, seed)
                model = make(setting.n_clusters)
                fitted(model, federated, 1.0, options, seed, **protected)
                scores.append(federated.score(model))
            row.append(mean_sd(scores, 3))
        rows.append(row)
    header = ["system", *(setting.name for setting in settings)]
    title = "All systems, epsilon 1, with masking two thirds of the clients survive: ARI"
    return [(title, header, rows)], []


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
        federated, _ = blobs(d, n, seed)
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
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "FKM": ({}, {}),
        "FKM(one_shot=True)": ({"one_shot": True}, {}),
        "FKM, masking": ({}, MASKED),
    }
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    for name, k in tqdm(SETS, desc="sets", leave=False):
        setting = Setting(name, name, k)
        found: dict[str, list[float]] = {kind: [] for kind in ratios}
        for seed in range(options.seeds):
            federated = divided(setting, options, seed)
            pooled = federated.scaled(np.concatenate(federated.clients))
            best = central_kmeans(pooled, k, np.random.default_rng(seed))
            reference = federated.nicv(best)
            for kind, (parameters, protected) in kinds.items():
                model = FKM(k, **parameters)
                fitted(model, federated, 1.0, options, seed, **protected)
                centers = model.cluster_centers_
                found[kind].append(federated.nicv(federated.scaled(centers)) / reference)
        rows.append([name, *(mean_sd(found[kind], 3) for kind in ratios)])
        for kind in ratios:
            ratios[kind].append(float(np.mean(found[kind])))
    means = {kind: float(np.exp(np.mean(np.log(values)))) for kind, values in ratios.items()}
    rows.append(["geometric mean", *(f"{mean:.3f}" for mean in means.values())])
    title = "Other data sets, epsilon 1: mean squared distance over central k-means"
    what = "FKM with masking on sets not used for tuning, epsilon 1, mean ratio"
    return [(title, ["data", *ratios], rows)], [Bar(what, means["FKM, masking"], at_most=1.10)]


@dataclass(frozen=True)
class Target:
    """What distributed k-means must reach on a data set."""

    data: str
    n_clusters: int
    delta: float = 1e-5
    ari: dict[float, float] = field(default_factory=dict)
    """Least ARI, by epsilon."""
    nicv: float | None = None
    """Largest mean squared distance, at epsilon 1."""
    ari_nobody_drops: float | None = None
    """Least ARI at epsilon .1 if nobody drops out or colludes."""


TARGETS = (
    Target("s1", 15, ari={0.1: 0.87, 1.0: 0.98}, ari_nobody_drops=0.90),
    Target("s2", 15, ari={0.1: 0.76, 1.0: 0.93}, ari_nobody_drops=0.80),
    Target("birch2", 100, ari={1.0: 0.72}),
    Target("mnist_vae_emb10", 10, ari={1.0: 0.57}, nicv=0.371),
    Target("adult_numeric6", 3, nicv=0.246),
)


def distributed(options: Options) -> Part:
    """FKM on masked sums, beside what needs all records in one place."""
    scores: list[list[str]] = []
    costs: list[list[str]] = []
    bars: list[Bar] = []
    for target in tqdm(TARGETS, desc="distributed", leave=False):
        setting = Setting(target.data, target.data, target.n_clusters, delta=target.delta)
        columns = [*DISTRIBUTED_EPSILONS, "nobody drops", "diffprivlib", "central"]
        ari: dict[Any, list[float]] = {column: [] for column in columns}
        nicv: dict[Any, list[float]] = {column: [] for column in columns}
        for seed in range(options.seeds):
            federated = divided(setting, options, seed)
            centers: dict[Any, Floats] = {}
            runs = [(e, e, MASKED) for e in DISTRIBUTED_EPSILONS]
            for column, epsilon, protected in [*runs, ("nobody drops", 0.1, NOBODY_DROPS)]:
                model = FKM(target.n_clusters)
                fitted(model, federated, epsilon, options, seed, **protected)
                centers[column] = federated.scaled(model.cluster_centers_)
            X = federated.scaled(np.concatenate(federated.clients))
            generator = np.random.default_rng(seed)
            centers["central"] = central_kmeans(X, target.n_clusters, generator)
            if (others := diffprivlib_centers(X, target.n_clusters, 1.0, seed)) is not None:
                centers["diffprivlib"] = others
            for column, found in centers.items():
                labels = assign(X, found)
                ari[column].append(adjusted_rand(np.concatenate(federated.truth), labels))
                nicv[column].append(federated.nicv(found))
        for rows, figures, digits in ((scores, ari, 3), (costs, nicv, 4)):
            cells = [mean_sd(figures[c], digits) if figures[c] else "-" for c in columns]
            rows.append([target.data, *cells])
        for epsilon, least in target.ari.items():
            what = f"FKM with masking on {target.data}, epsilon {epsilon:g}, ARI"
            bars.append(Bar(what, float(np.mean(ari[epsilon])), least))
        if target.nicv is not None:
            what = f"FKM with masking on {target.data}, epsilon 1, mean squared distance"
            bars.append(Bar(what, float(np.mean(nicv[1.0])), at_most=target.nicv))
        if target.ari_nobody_drops is not None:
            what = f"the same on {target.data}, epsilon 0.1, no colluders and no dropouts, ARI"
            figure = float(np.mean(ari["nobody drops"]))
            bars.append(Bar(what, figure, target.ari_nobody_drops))
    header = [
        "data",
        *(f"epsilon {e:g}" for e in DISTRIBUTED_EPSILONS),
        "0.1, nobody drops",
        "diffprivlib, 1",
        "central k-means",
    ]
    return [
        ("FKM on masked sums: ARI", header, scores),
        ("FKM on masked sums: mean squared distance", header, costs),
    ], bars


def diffprivlib_centers(X: Floats, k: int, epsilon: float, seed: int) -> Floats | None:
    """Centres by diffprivlib's k-means on all records in one place; None if it is not installed.

    It spends more than the epsilon it is given: 1.2 times at 10 features.
    """
    try:
        from diffprivlib.models import KMeans
    except ImportError:
        return None
    d = X.shape[1]
    model = KMeans(k, epsilon=epsilon, bounds=(-np.ones(d), np.ones(d)), random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.asarray(model.fit(X).cluster_centers_)


def refined(options: Options) -> Part:
    """FedGEM, whose clusters are found under local noise and refined by one masked sum."""
    rows, bars = [], []
    for d, n in ((2, 2000), (8, 2000), (8, 4000)):
        plain = [r[0] for r in refined_scores(d, n, None, options)]
        row = [f"d={d}, {n}"]
        for epsilon in (1.0, 2.0, 4.0):
            found = refined_scores(d, n, epsilon, options)
            error, k, ari = (float(np.mean(column)) for column in zip(*found, strict=True))
            sd = float(np.std([r[0] for r in found]))
            row.append(f"{error:.3f}±{sd:.3f} / {k:.1f} / {ari:.3f}")
            if epsilon == 1.0:
                what = f"FedGEM refined, d={d}, {n} records, epsilon 1, centre error over plain"
                bars.append(Bar(what, error / float(np.mean(plain)), at_most=1.5))
        rows.append([*row, mean_sd(plain, 3)])
    header = ["records a client", "epsilon 1", "epsilon 2", "epsilon 4", "non-private"]
    title = "FedGEM refined by a masked sum: error of centres / K found / pooled ARI"
    return [(title, header, rows)], bars


def refined_scores(
    d: int, n: int, epsilon: float | None, options: Options
) -> list[tuple[float, int, float]]:
    """Root mean squared distance of true centres to the nearest found, K found, and ARI."""
    results = []
    for seed in range(options.seeds):
        federated, centers = blobs(d, n, seed)
        model = FedGEM([len(np.unique(truth)) for truth in federated.truth])
        if epsilon is None:
            model.set_params(privacy=UNPROTECTED, random_state=seed).fit(federated.clients)
        else:
            fitted(model, federated, epsilon, options, seed, **MASKED)
        squared = cdist(centers, model.cluster_centers_, "sqeuclidean").min(axis=1)
        error = math.sqrt(float(squared.mean()))
        results.append((error, model.n_clusters_, federated.score(model)))
    return results


def blobs(d: int, n: int, seed: int) -> tuple[Federation, Floats]:
    """Ten clients with n records each of some of ten clusters, and the clusters' centres."""
    X, y, centers = rmin_blobs(10 * n, d, 10, 6.0, seed=seed)
    parts = cluster_subset_partition(X, y, 10, seed=seed)
    return federation(X, y, parts, 1 / (n * math.log(n))), centers


PARTS: dict[str, Callable[[Options], Part]] = {
    "one_shot": one_shot,
    "systems": systems,
    "fedgem": fedgem,
    "sets": sets,
    "distributed": distributed,
    "refined": refined,
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
    return print_parts(PARTS, given.only.split(","), options, check=given.check)


if __name__ == "__main__":
    sys.exit(main())
