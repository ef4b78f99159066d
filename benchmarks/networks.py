"""What systems that train networks reach, with controls beside them, and how long they take.

    python benchmarks/networks.py [--data-dir DIR] [--seeds 3] [--check]
                                  [--part fedcref,speed,deepfeca,averages]

FedCRef: MNIST at 14x14 pixels, 12 clients of 2 to 5 classes, 200 images a class. It starts from
true labels of which a part was replaced ("dirty"), as the paper does, or from k-means. Clusters
become cleaner by local training alone, too: so every start has a control that links nothing
(theta = 0), once with the same local training and once with as many epochs as the model of a group
sees in 10 x 4. DeepFeCA: 10,000 images of Fashion-MNIST, ten clients. Training on any labels
improves a probe of the features: so there is a control whose pseudo-labels are at the wrong
records. What noise leaves of both: `noisy_networks.py`.

Figures are means and standard deviations over seeds from 10 on, which nothing was tuned on.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from _images import (
    N_CLASSES,
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
    mean_of,
    probes,
    run_parts,
)
from _parts import Part, Table
from _table import Bar, in_turns, mean_sd
from sklearn.decomposition import PCA
from tqdm import tqdm

from secure_fedclust import DeepFeCA, FeCA, FedCRef, KFed, PrivacySpec
from secure_fedclust.algorithms import autoencoders, deepfeca, fedcref
from secure_fedclust.algorithms.baselines import matched_averaging
from secure_fedclust.algorithms.lloyd import assign, kmeans
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.metrics import normalized_mutual_info
from secure_fedclust.privacy.updates import WeightGrid
from secure_fedclust.protocols.averages import AVERAGE, Held, ask_averages
from secure_fedclust.protocols.client import PrivateClient, answers
from secure_fedclust.protocols.deepfeca import TRAIN, DeepFeCAClient
from secure_fedclust.run import open_run

FIRST_SEED = 10

DIRTINESS = (0.0, 0.3, 0.5)
PAPER = {0.0: (0.948, 10.1, 0.0, 17.3), 0.3: (0.879, 9.8, 5.1, 16.1), 0.5: (0.711, 10.2, 6.9, 48.0)}
"""Tables 3 and 4, EMNIST digits, 25 clients, about 88 clusters: ACC, groups, clusters in the wrong
group in percent, isolated clusters."""
PAPER_CLUSTERS = 88

WEIGHTS = 100_000
AVERAGING_CLIENTS = 20


def graph_figures(model: FedCRef, images: Images) -> Figures:
    """Groups and links of the clusters that clients have ended with, in percent where shares."""
    graph = model.result_.association
    place = {name: i for i, name in enumerate(model.client_names_)}
    majority = np.array(
        [
            np.bincount(images.classes[i][model.clusters_[i] == q], minlength=N_CLASSES).argmax()
            for i, q in ((place[client], q) for client, q in graph["clusters"])
        ]
    )
    groups, links = np.array(graph["groups"]), np.array(graph["links"]).reshape(-1, 2)
    classes = [np.bincount(majority[groups == group]).argmax() for group in range(groups.max() + 1)]
    inside = groups >= 0
    astray = majority[inside] != np.array(classes, dtype=np.int64)[groups[inside]]
    return {
        "groups": float(len(classes)),
        "classes": float(len(set(classes))),
        "wrong links": 100 * float((majority[links[:, 0]] != majority[links[:, 1]]).mean())
        if len(links)
        else 0.0,
        "wrong clusters": 100 * float(astray.mean()) if inside.any() else 0.0,
        "isolated": 100 * float((~inside).mean()),
        "iterations": float(len(graph["iterations"]) - 1),
    }


GRAPH = {
    "ACC start": 3,
    "ACC": 3,
    "groups": 1,
    "classes": 1,
    "wrong links": 1,
    "wrong clusters": 1,
    "isolated": 1,
    "iterations": 1,
    "seconds": 0,
}
"""Figures of FedCRef, and how many decimals are printed."""

TRAININGS: dict[str, dict[str, Any]] = {
    "10 x 1": {},
    "10 x 4": {"local_epochs": 4},
    "alone, 8 epochs": {"theta": 0.0},
    "alone, 40 epochs": {"theta": 0.0, "start_epochs": 40},
}


def fedcref_part(options: Options) -> Part:
    """What clusters FedCRef ends with, and what is left of it without federation."""
    wanted = [(d, name, more) for d in DIRTINESS for name, more in TRAININGS.items()]
    wanted += [("kmeans", name, more) for name, more in TRAININGS.items()]
    minmax = {"normalisation": "minmax"}
    wanted += [(d, "10 x 1, minmax", minmax) for d in (0.0, 0.3)]
    found: dict[tuple[Any, str], list[Figures]] = {}
    jobs = [(job, seed) for job in wanted for seed in options.numbers]
    for (start, name, more), seed in tqdm(jobs, "FedCRef", leave=False):
        run = fedcref_run(mnist_clients(options.data_dir, seed), start, seed, more)
        found.setdefault((start, name), []).append(run)
    rows = [
        [start if start == "kmeans" else f"dirty {start:g}", name]
        + [mean_sd([run[figure] for run in runs], digits) for figure, digits in GRAPH.items()]
        for (start, name), runs in sorted(found.items(), key=lambda item: str(item[0][0]))
    ]
    header = ["start", "rounds x epochs", *(f"{name}{' %' * (name in SHARES)}" for name in GRAPH)]
    title = "FedCRef on MNIST 14x14, 12 clients, 10 classes; alone: nothing is linked (theta = 0)"
    return [(title, header, rows), beside_the_paper(found)], fedcref_bars(found)


SHARES = ("wrong links", "wrong clusters", "isolated")


def fedcref_run(images: Images, start: Any, seed: int, more: Mapping[str, Any]) -> Figures:
    if start == "kmeans":
        initial: Any = start
        pairs = zip(images.clients, images.n_local, strict=True)
        first = [kmeans(X, k, np.random.default_rng(seed), n_init=10)[1] for X, k in pairs]
    else:
        initial = first = dirty_labels(images, start, seed)
    model = FedCRef(images.n_local, initial=initial, privacy=UNPROTECTED, **more)
    seconds = fitted(model, images.clients, seed)
    return {
        "ACC start": images.accuracy(first),
        "ACC": images.accuracy(model.clusters_),
        "seconds": seconds,
        **graph_figures(model, images),
    }


def beside_the_paper(found: Mapping[tuple[Any, str], list[Figures]]) -> Table:
    rows = []
    for dirtiness, (accuracy, groups, wrong, isolated) in PAPER.items():
        runs, longer = found[dirtiness, "10 x 1"], found[dirtiness, "10 x 4"]
        rows += [
            [
                f"dirty {dirtiness:g}",
                f"ours, {name}",
                *(
                    f"{mean_of(each, figure):.{GRAPH[figure]}f}"
                    for figure in ("ACC", "groups", "wrong clusters", "isolated")
                ),
            ]
            for name, each in (("10 x 1", runs), ("10 x 4", longer))
        ]
        share = 100 * isolated / PAPER_CLUSTERS
        paper = [f"{accuracy:.3f}", f"{groups}", f"{wrong}", f"{share:.1f}"]
        rows.append([f"dirty {dirtiness:g}", "paper, EMNIST", *paper])
    header = ["start", "who", "ACC", "groups", "wrong clusters %", "isolated %"]
    return "FedCRef beside the paper's 25 clients with 500 images a class", header, rows


def fedcref_bars(found: Mapping[tuple[Any, str], list[Figures]]) -> list[Bar]:
    bars = []
    for dirtiness in (0.0, 0.3):
        runs, what = found[dirtiness, "10 x 1"], f"FedCRef, dirty {dirtiness:g}, 10 x 1"
        bars += [
            Bar(f"{what}, groups", mean_of(runs, "groups"), 9, 11),
            Bar(f"{what}, classes covered", mean_of(runs, "classes"), 9),
            Bar(f"{what}, wrong links in percent", mean_of(runs, "wrong links"), at_most=5),
            Bar(f"{what}, isolated clusters in percent", mean_of(runs, "isolated"), at_most=10),
        ]
    accuracy = {key: mean_of(runs, "ACC") for key, runs in found.items()}
    alone = max(accuracy[0.3, f"alone, {epochs} epochs"] for epochs in (8, 40))
    gain = accuracy[0.3, "10 x 4"] - alone
    return [
        *bars,
        Bar("FedCRef, dirty 0.3, 10 x 4, ACC", accuracy[0.3, "10 x 4"], 0.90),
        Bar("the same above the better control without federation", gain, 0.015),
        Bar("FedCRef, dirty 0, 10 x 4, ACC", accuracy[0.0, "10 x 4"], 0.93),
        Bar("FedCRef, dirty 0.5, 10 x 1, ACC", accuracy[0.5, "10 x 1"], 0.78),
    ]


def speed_part(options: Options) -> Part:
    """How long iterations take, and what training autoencoders together is worth."""
    images = mnist_clients(options.data_dir, FIRST_SEED)
    rows, bars = [], []
    for epochs in (1, 4):
        model = FedCRef(
            images.n_local,
            initial=dirty_labels(images, 0.3, FIRST_SEED),
            local_epochs=epochs,
            max_iter=5,
            tau=1.0,
            privacy=UNPROTECTED,
        )
        # Otherwise it stops after three, when groups stay as they are.
        with mock.patch.object(fedcref, "settled", lambda history: False):
            seconds = fitted(model, images.clients, FIRST_SEED)
        done = len(model.result_.association["iterations"]) - 1
        what = f"FedCRef, {done} iterations and the last links, 10 x {epochs}"
        rows.append([what, f"{seconds:.0f} s", ""])
        bars.append(Bar(f"minutes of {what}", seconds / 60, at_most=3))
    return [("Speed", ["what", "measured", "ratio"], rows + stacking(images, bars))], bars


def stacking(images: Images, bars: list[Bar]) -> list[list[str]]:
    """Training many autoencoders stacked, and one after the other."""
    pairs = zip(images.clients, images.truth, strict=True)
    data = [X[labels == q] for X, labels in pairs for q in range(labels.max() + 1)]
    shape = autoencoders.Autoencoder(SIDE**2)
    start = np.repeat(shape.initial(np.random.default_rng(0))[None], len(data), axis=0)
    settings = {"epochs": 3, "batch_size": 32, "learning_rate": 1e-3}

    def stacked() -> Floats:
        rng = np.random.default_rng(1)
        return autoencoders.train(shape, start, data, rng=rng, **settings)

    def loop(fused: bool) -> Floats:
        return one_by_one(shape, start, data, fused=fused, **settings)

    np.testing.assert_allclose(stacked(), loop(False), atol=1e-3)
    ours, plain, fused = in_turns(
        "stacking", 5, stacked, lambda: loop(fused=False), lambda: loop(fused=True)
    )
    what = f"3 epochs of {len(data)} autoencoders"
    bars.append(Bar(f"{what}, a plain loop over stacked", plain / ours, at_least=3))
    return [
        [f"{what}, stacked", f"{ours:.2f} s", ""],
        [f"{what}, a loop, Adam", f"{plain:.2f} s", f"{plain / ours:.1f} x stacked"],
        [f"{what}, a loop, fused Adam", f"{fused:.2f} s", f"{fused / ours:.1f} x stacked"],
    ]


def one_by_one(
    shape: autoencoders.Autoencoder,
    weights: Floats,
    data: Sequence[Floats],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    fused: bool,
) -> Floats:
    """The same steps with a torch module and an optimiser for each model, on one thread."""
    import torch

    seeds = np.random.default_rng(1).integers(1 << 63, size=len(data))
    found = []
    with torch_threads(1):
        for row, X, seed in zip(weights, data, seeds, strict=True):
            module, rng = shape.module(row), np.random.default_rng(seed)
            optimiser = torch.optim.Adam(module.parameters(), lr=learning_rate, fused=fused)
            records = torch.from_numpy(X.astype(np.float32))
            for _ in range(epochs):
                order = torch.from_numpy(rng.permutation(len(X)))
                for first in range(0, len(X), batch_size):
                    batch = records[order[first : first + batch_size]]
                    optimiser.zero_grad()
                    (module(batch) - batch).square().mean().backward()
                    optimiser.step()
            found.append(shape.weights_of(module))
    return np.array(found)


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ShuffledClient(DeepFeCAClient):
    """Trains on the right pseudo-labels at the wrong records."""

    def _whitened(self) -> Floats:
        found = super()._whitened()
        if not self._asked.schema.startswith(TRAIN.name):
            return found
        return np.random.default_rng([self._seed, self._asked.step, 1]).permutation(found)


class ShuffledDeepFeCA(DeepFeCA):
    """DeepFeCA whose pseudo-labels say nothing about the records."""

    _client_class = ShuffledClient


AGAIN = "FeCA, drawn again"


def clustered(features: Sequence[Floats], truth: Ints, seed: int) -> dict[str, float]:
    """NMI of other ways to find ten clusters of the same features."""
    pooled, rng = np.concatenate(features), np.random.default_rng([seed, 9])

    def score(centers: Floats) -> float:
        return normalized_mutual_info(truth, assign(pooled, centers))

    def fit(model: Any) -> float:
        model.set_params(privacy=UNPROTECTED, random_state=seed).fit(list(features))
        return score(model.cluster_centers_)

    drawn = [pooled[rng.choice(len(pooled), N_CLASSES, replace=False)] for _ in range(10)]
    return {
        "random centroids": float(np.mean([score(centers) for centers in drawn])),
        "k-FED, k' = 10": fit(KFed(N_CLASSES, n_local_clusters=N_CLASSES)),
        "k-FED, k' = 4": fit(KFed(N_CLASSES)),
        "matched averaging": score(matched_averaging(features, N_CLASSES, rng)),
        AGAIN: fit(FeCA(N_CLASSES)),
    }


def deepfeca_part(options: Options) -> Part:
    """Whether DeepFeCA's features are better than those of a network made by chance."""
    kinds: dict[str, Callable[[], DeepFeCA]] = {
        "round 0": lambda: DeepFeCA(N_CLASSES, n_rounds=0),
        "DeepFeCA": lambda: DeepFeCA(N_CLASSES),
        "shuffled labels": lambda: ShuffledDeepFeCA(N_CLASSES),
    }
    rows, others, bars = [], [], []
    for split in ("IID", "Dirichlet(.3)"):
        runs: dict[str, list[Figures]] = {}
        by_others: dict[str, list[float]] = {}
        for seed in tqdm(options.numbers, f"DeepFeCA, {split}", leave=False):
            parts = fashion_parts(options.data_dir, split, seed)
            X, y, X_test, y_test = fashion(options.data_dir)
            truth = np.concatenate([y[part] for part in parts])
            for name, make in kinds.items():
                model = make().set_params(privacy=UNPROTECTED)
                seconds = fitted(model, [X[part] for part in parts], seed)
                figures = deepfeca_figures(model, parts, options.data_dir)
                runs.setdefault(name, []).append({**figures, "seconds": seconds})
                if name == "DeepFeCA":
                    features = [model.transform(X[part]) for part in parts]
                    for how, score in clustered(features, truth, seed).items():
                        by_others.setdefault(f"DeepFeCA's features, {how}", []).append(score)
            pca = principal(X)
            of_pca = clustered([pca(X[part]) for part in parts], truth, seed)
            figures = {**probes(pca(X), y, pca(X_test), y_test), "NMI": of_pca.pop(AGAIN)}
            runs.setdefault("PCA, 16 features", []).append(figures)
            for how, score in of_pca.items():
                by_others.setdefault(f"PCA's features, {how}", []).append(score)
        rows += [
            [split, name]
            + [mean_sd([run[f] for run in each], 3) for f in ("probe", "ten labels", "NMI")]
            + [mean_sd([run["seconds"] for run in each], 0) if "seconds" in each[0] else "-"]
            for name, each in runs.items()
        ]
        others += [[split, how, mean_sd(scores, 3)] for how, scores in by_others.items()]
        bars += deepfeca_bars(split, runs, by_others)
    header = ["split", "features", "probe", "ten labels a class", "NMI, k = 10", "seconds"]
    title = "DeepFeCA on Fashion-MNIST, 10 clients: accuracy of linear probes, NMI of FeCA's labels"
    another = "Other ways to find ten clusters of the features: NMI"
    return [(title, header, rows), (another, ["split", "how", "NMI"], others)], bars


def principal(X: Floats, n: int = 16) -> Callable[[Floats], Floats]:
    """PCA of all records together, whitened and scaled to length one, as DeepFeCA's features."""
    pca = PCA(n, random_state=0).fit(X)
    matrix = deepfeca.whitening(np.diag(pca.explained_variance_))
    return lambda records: deepfeca.whitened(pca.transform(records), np.zeros(n), matrix)


def deepfeca_bars(
    split: str, runs: Mapping[str, list[Figures]], others: Mapping[str, list[float]]
) -> list[Bar]:
    mean = {
        (name, figure): mean_of(each, figure) for name, each in runs.items() for figure in each[0]
    }
    what, figure = f"DeepFeCA, {split}", mean["DeepFeCA", "NMI"]
    chance = float(np.mean(others["DeepFeCA's features, random centroids"]))
    bars = [
        Bar(f"{what}, NMI, k = 10", figure, 0.48 if split == "IID" else 0.40),
        Bar(f"{what}, NMI above random centroids", figure - chance, 0.10),
    ]
    if split != "IID":
        return bars

    def points(other: str, figure: str) -> float:
        return 100 * (mean["DeepFeCA", figure] - mean[other, figure])

    return [
        Bar(f"{what}, points of the probe over round 0", points("round 0", "probe"), 7),
        Bar(f"{what}, points over shuffled labels", points("shuffled labels", "probe"), 2),
        Bar(f"{what}, ten labels a class, over round 0", points("round 0", "ten labels"), 5),
        *bars,
    ]


class AveragingClient(PrivateClient):
    """Holds weights, and gives them as part of a sum."""

    held: Held

    @answers(AVERAGE, after=(None, AVERAGE))
    def average(self, first: int, n_groups: int, n_numbers: int) -> dict[str, Any]:
        """Its part of the sum."""
        return self.held.part(self.weight_grid(), first, n_groups, n_numbers)


def averages_part(options: Options) -> Part:
    """How long an average of weights takes under masks or encryption, and whether it is exact."""
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.1, (AVERAGING_CLIENTS, WEIGHTS))
    names = [f"client {i}" for i in range(AVERAGING_CLIENTS)]
    share, grid = np.array([1 / AVERAGING_CLIENTS]), WeightGrid.of(AVERAGING_CLIENTS)
    steps = np.sum([grid.steps(share * row) for row in weights], axis=0)
    plain = steps / (AVERAGING_CLIENTS * grid.steps(share))

    def average(protection: str) -> Floats:
        def hold(name: str, client: Any) -> None:
            own = weights[names.index(name)][None]
            client.held = Held(own, share, np.zeros(1, dtype=np.int64))

        run = open_run(
            dict.fromkeys(names, np.zeros((1, 1))),
            # An epsilon must be there to encrypt; nothing that needs noise is asked.
            spec=PrivacySpec(epsilon=1.0, delta=1e-5, bound=1.0, protection=protection),
            client_class=AveragingClient,
            rng=np.random.default_rng(0),
            prepare=hold,
        )
        found = ask_averages(run.session, np.zeros((1, WEIGHTS)))[0]
        differences.append(float(np.abs(found - plain).max()))
        sent[protection] = sum(exchange.bytes_up for exchange in run.session.history)
        return found

    differences: list[float] = []
    sent: dict[str, int] = {}
    masking, ckks = in_turns(
        "averages", len(options.numbers), lambda: average("masking"), lambda: average("ckks")
    )
    what = f"average of {WEIGHTS:,} weights over {AVERAGING_CLIENTS} clients"
    rows = [
        [f"{what}, {name}", f"{seconds:.2f} s", f"{sent[name] / AVERAGING_CLIENTS / 1e6:.2f} MB"]
        for name, seconds in (("masking", masking), ("ckks", ckks))
    ]
    rows.append(["largest difference from the plain average", f"{max(differences):g}", ""])
    bars = [
        Bar(f"seconds of an {what}, masking", masking, at_most=3),
        Bar(f"seconds of an {what}, ckks", ckks, at_most=20),
        Bar("largest difference from the plain average", max(differences), at_most=0),
    ]
    header = ["what", "measured", "a client sends"]
    return [("Averages of networks, all parties in one process, no noise", header, rows)], bars


PARTS: dict[str, Callable[[Options], Part]] = {
    "fedcref": fedcref_part,
    "speed": speed_part,
    "deepfeca": deepfeca_part,
    "averages": averages_part,
}


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; 1 if a bar is missed under --check, 2 without data."""
    return run_parts(PARTS, FIRST_SEED, "Systems that train networks.", arguments)


if __name__ == "__main__":
    sys.exit(main())
