"""A first look: every system on one small federation, with and without privacy, in a picture."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.audit.report.folder import AUDIT, LEDGER, RESULT, write_report, write_run
from secure_fedclust.base import FederatedClusterer
from secure_fedclust.datasets import cluster_subset_partition, rmin_blobs
from secure_fedclust.estimators import FKM, GOLD, FeCA, FedGEM, KFed
from secure_fedclust.metrics import adjusted_rand
from secure_fedclust.privacy.ledger import Ledger
from secure_fedclust.privacy.spec import PrivacySpec

N_CLUSTERS = 8
N_LOCAL = 5
N_CLIENTS = 5
N_RECORDS = 6000
EPSILONS = (None, 8.0, 2.0, 1.0)
DELTA = 1e-5
REPORTED = 4.0
TRIALS = 600
"""Enough to pass or fail at that epsilon."""


@dataclass(frozen=True)
class Federation:
    """Clients that hold some of the clusters each, and what nobody knows: the truth."""

    clients: dict[str, Floats]
    truth: Ints
    centers: Floats
    reach: float
    """No value is farther from zero: known beforehand."""


def make_federation(seed: int = 7) -> Federation:
    """Five clients, each with five of eight round clusters."""
    X, y, centers = rmin_blobs(N_RECORDS, 2, N_CLUSTERS, 5.0, seed=seed)
    parts = cluster_subset_partition(X, y, N_CLIENTS, n_local_clusters=N_LOCAL, seed=seed)
    names = ("Aachen", "Bergen", "Como", "Delft", "Essen")
    clients = {name: X[part] for name, part in zip(names, parts, strict=True)}
    truth = np.concatenate([y[part] for part in parts])
    return Federation(clients, truth, centers, float(np.ceil(np.abs(X).max())))


def models() -> list[tuple[FederatedClusterer, float]]:
    """All systems, told as little as each needs, and the scale each wants the features in.

    FedGEM's clusters have a standard deviation of one, as they do here; GOLD wants features that
    have one themselves.
    """
    return [
        (FKM(N_CLUSTERS), 1.0),
        (KFed(N_CLUSTERS, n_local_clusters=N_LOCAL), 1.0),
        (FeCA(N_CLUSTERS), 1.0),
        (FedGEM(N_LOCAL), 1.0),
        (GOLD(N_CLUSTERS), 1 / 6),
    ]


def spec_for(epsilon: float | None, reach: float) -> PrivacySpec:
    """The promise of one row of the picture."""
    if epsilon is None:
        return PrivacySpec.none(reason="demo on generated data")
    size = N_RECORDS // N_CLIENTS
    return PrivacySpec(epsilon=epsilon, delta=DELTA, ranges=[(-reach, reach)] * 2, public_size=size)


@dataclass(frozen=True)
class Panel:
    """One fitted model, with its features back in the federation's scale."""

    name: str
    epsilon: float | None
    centers: Floats
    labels: Ints
    score: float


def run_demo(out: Path, on_progress: Callable[[str, int, int], None]) -> list[dict[str, Any]]:
    """Fit every system, write results and the picture to a folder that exists, return the table."""
    federation = make_federation()
    rows, panels = [], []
    for epsilon in EPSILONS:
        for model, scale in models():
            name = type(model).__name__
            model.set_params(privacy=spec_for(epsilon, scale * federation.reach), random_state=0)
            model.fit(
                {client: scale * X for client, X in federation.clients.items()},
                on_progress=partial(on_progress, name),
            )
            ending = "none" if epsilon is None else f"epsilon{epsilon:g}"
            model.result_.save(out / f"{name}-{ending}.json")
            labels = np.concatenate(model.labels_)
            score = adjusted_rand(federation.truth, labels)
            panels.append(Panel(name, epsilon, model.cluster_centers_ / scale, labels, score))
            rows.append(_row(model, epsilon, score))
    figure = draw(federation, panels)
    for ending in ("png", "svg"):
        figure.savefig(out / f"demo.{ending}", dpi=110)
    plt.close(figure)
    return rows


def report_demo(out: Path, on_progress: Callable[[str, int, int], None]) -> Path:
    """Run one system with masked sums, audit it, and return where the report is.

    Parameters
    ----------
    out : Path
        A folder that exists and has no ledger yet.
    on_progress : function
    """
    federation = make_federation()
    spec = replace(spec_for(REPORTED, federation.reach), protection="masking")
    epsilon, delta = spec.target()
    with Ledger.create(out / LEDGER, epsilon=epsilon, delta=delta) as ledger:
        model = FKM(N_CLUSTERS, privacy=spec, ledger=ledger, random_state=0)
        model.fit(federation.clients).result_.save(out / RESULT)
    model.audit(trials=TRIALS, on_progress=partial(on_progress, "audit")).save(out / AUDIT)
    write_run(out, command=f"secure-fedclust demo --out {out.parent}")
    return write_report(out)


def _row(model: FederatedClusterer, epsilon: float | None, score: float) -> dict[str, Any]:
    result = model.result_
    up = sum(exchange.bytes_up for exchange in result.history)
    return {
        "system": result.algorithm,
        "epsilon": "none" if epsilon is None else f"{epsilon:g}",
        "clusters": result.n_clusters,
        "ARI": score,
        "exchanges": len(result.history),
        "KB sent by a client": up / 1000 / N_CLIENTS,
        "seconds": result.seconds,
    }


def draw(federation: Federation, panels: list[Panel]) -> Any:
    """What each system made of the federation, one row for each epsilon."""
    columns = len(panels) // len(EPSILONS)
    figure, axes = plt.subplots(
        len(EPSILONS),
        columns,
        figsize=(2.7 * columns, 2.6 * len(EPSILONS)),
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    pooled = np.concatenate(list(federation.clients.values()))
    for axis, panel in zip(axes.flat, panels, strict=True):
        colors = plt.get_cmap("tab10")(panel.labels % 10)
        axis.scatter(*pooled.T, c=colors, s=2, alpha=0.4, linewidths=0, rasterized=True)
        axis.scatter(
            *federation.centers.T, marker="o", s=110, facecolors="none", edgecolors="black"
        )
        axis.scatter(*panel.centers.T, marker="x", s=45, c="black", linewidths=1.8)
        text = f"{panel.name}: {len(panel.centers)} clusters, ARI {panel.score:.2f}"
        axis.set_title(text, fontsize=9)
        axis.set(xticks=[], yticks=[], aspect="equal")
    for row, epsilon in zip(axes, EPSILONS, strict=True):
        label = "no privacy\nNO DP CLAIM" if epsilon is None else f"epsilon {epsilon:g}"
        row[0].set_ylabel(label, fontsize=11)
    figure.suptitle(
        f"{N_CLIENTS} clients with {N_LOCAL} of {N_CLUSTERS} clusters each; crosses: centres found,"
        f" circles: true centres; epsilon protects each record, at delta {DELTA:g}",
        fontsize=10,
    )
    return figure
