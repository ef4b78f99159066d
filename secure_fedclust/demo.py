"""A first look: every system on the same small federation, as a table and a picture."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.base import FederatedClusterer
from secure_fedclust.datasets import cluster_subset_partition, rmin_blobs
from secure_fedclust.estimators import FKM, GOLD, FeCA, FedGEM, KFed
from secure_fedclust.metrics import adjusted_rand
from secure_fedclust.privacy.spec import PrivacySpec

N_CLUSTERS = 8
N_LOCAL = 5
N_CLIENTS = 5


@dataclass(frozen=True)
class Federation:
    """Clients that hold some of the clusters each, and what nobody knows: the truth."""

    clients: dict[str, Floats]
    truth: Ints
    centers: Floats


def make_federation(seed: int = 7) -> Federation:
    """Five clients, each with five of eight round clusters."""
    X, y, centers = rmin_blobs(2000, 2, N_CLUSTERS, 5.0, seed=seed)
    parts = cluster_subset_partition(X, y, N_CLIENTS, n_local_clusters=N_LOCAL, seed=seed)
    names = ("Aachen", "Bergen", "Como", "Delft", "Essen")
    clients = {name: X[part] for name, part in zip(names, parts, strict=True)}
    return Federation(clients, np.concatenate([y[part] for part in parts]), centers)


def models() -> list[tuple[FederatedClusterer, float]]:
    """All systems, told as little as each needs, and the scale each wants the features in.

    FedGEM's clusters have a standard deviation of one, as they do here; GOLD wants features that
    have one themselves.
    """
    common: dict[str, Any] = {
        "privacy": PrivacySpec.none(reason="demo on generated data"),
        "random_state": 0,
    }
    return [
        (FKM(N_CLUSTERS, **common), 1.0),
        (KFed(N_CLUSTERS, n_local_clusters=N_LOCAL, **common), 1.0),
        (FeCA(N_CLUSTERS, **common), 1.0),
        (FedGEM(N_LOCAL, **common), 1.0),
        (GOLD(N_CLUSTERS, **common), 1 / 6),
    ]


def run_demo(out: Path, on_progress: Callable[[str, int, int], None]) -> list[dict[str, Any]]:
    """Fit every system, write results and the picture to a folder that exists, return the table."""
    federation = make_federation()
    fitted = models()
    rows = []
    for model, scale in fitted:
        name = type(model).__name__
        model.fit(
            {client: scale * X for client, X in federation.clients.items()},
            on_progress=partial(on_progress, name),
        )
        model.result_.save(out / f"{name}.json")
        up = sum(exchange.bytes_up for exchange in model.result_.history)
        rows.append(
            {
                "system": name,
                "clusters": model.n_clusters_,
                "ARI": adjusted_rand(federation.truth, np.concatenate(model.labels_)),
                "exchanges": len(model.result_.history),
                "KB sent by a client": up / 1000 / N_CLIENTS,
                "seconds": model.result_.seconds,
                "guarantee": "NO DP CLAIM",
            }
        )
    figure = draw(federation, fitted)
    for ending in ("png", "svg"):
        figure.savefig(out / f"demo.{ending}", dpi=150)
    plt.close(figure)
    return rows


def draw(federation: Federation, fitted: list[tuple[FederatedClusterer, float]]) -> Any:
    """Who holds what, and what each system made of it."""
    figure, axes = plt.subplots(2, 3, figsize=(12, 8), layout="constrained")
    first, *others = axes.flat
    for name, X in federation.clients.items():
        first.scatter(*X.T, s=4, alpha=0.6, label=name, rasterized=True)
    first.set_title(f"{N_CLIENTS} clients with {N_LOCAL} of {N_CLUSTERS} clusters each")
    first.legend(markerscale=4, fontsize=8, loc="lower right")
    pooled = np.concatenate(list(federation.clients.values()))
    for axis, (model, scale) in zip(others, fitted, strict=True):
        labels = np.concatenate(model.labels_)
        colors = plt.get_cmap("tab10")(labels % 10)
        axis.scatter(*pooled.T, c=colors, s=3, alpha=0.5, rasterized=True)
        axis.scatter(
            *federation.centers.T, marker="o", s=130, facecolors="none", edgecolors="black"
        )
        axis.scatter(*(model.cluster_centers_.T / scale), marker="x", s=60, c="black", linewidths=2)
        score = adjusted_rand(federation.truth, labels)
        axis.set_title(f"{type(model).__name__}: {model.n_clusters_} clusters, ARI {score:.2f}")
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[], aspect="equal")
    figure.suptitle("crosses: centres found    circles: true centres    NO DP CLAIM", fontsize=10)
    return figure
