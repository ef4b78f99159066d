"""One release, many questions: how many clusters there are, which algorithm, how good it is.

The budget is spent once, on a summary of each client's records. Everything after that is free,
but for the quality figure at the end, which looks at records again and is charged.
"""

import tempfile
from pathlib import Path

import numpy as np

from secure_fedclust import (
    FKM,
    FeCA,
    KFed,
    Ledger,
    PrivacySpec,
    noisy_nicv,
    private_ranges,
    release_synopsis,
    suggest_k,
)

rng = np.random.default_rng(1)
centers = np.array([[0.0, 0.0], [60.0, 10.0], [30.0, 80.0], [90.0, 70.0]])
names = ("Aachen", "Bergen", "Como", "Delft")
clients = {name: rng.normal(centers[rng.integers(4, size=2000)], 6.0) for name in names}

with tempfile.TemporaryDirectory() as folder:
    ledger = Path(folder) / "measurements.ledger"
    Ledger.create(ledger, epsilon=2.0, delta=1e-5, dataset="measurements").close()

    # Nobody knows the ranges: buy them.
    found = private_ranges(clients, epsilon=0.5, delta=1e-6, largest=1e6, ledger=ledger)
    print("ranges bought:", [(round(low), round(high)) for low, high in found.ranges])

    spec = PrivacySpec(epsilon=1.0, delta=5e-6, ranges=found.ranges, public_size=2000)
    synopsis = release_synopsis(clients, privacy=spec, n_clusters=8, ledger=ledger, random_state=0)
    k = suggest_k(synopsis, largest=8, random_state=0).best
    print("clusters:", k)
    for model in (
        FKM(k, random_state=0),
        KFed(k, n_local_clusters=k, random_state=0),
        FeCA(k, random_state=0),
    ):
        model.fit(synopsis)
        print(type(model).__name__, np.sort(model.cluster_centers_[:, 0]).round(1))

    best = FKM(k, random_state=0).fit(synopsis).cluster_centers_
    small = PrivacySpec(epsilon=0.4, delta=1e-6, ranges=found.ranges)
    quality = noisy_nicv(clients, best, privacy=small, cap=500, ledger=ledger)
    print(f"mean squared distance: {quality.value:.0f} ± {quality.standard_error:.0f}")

    with Ledger.open(ledger) as book:
        releases, spent = len(book.rows("Como")), book.spent("Como")
        print(f"{releases} releases of Como, total mu {spent:.3f}")
        book.verify()
