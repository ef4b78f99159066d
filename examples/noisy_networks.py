"""Six schools train networks on pupils' handwriting, with noise in every step: FedCRef, epsilon 8.

Each school has two digits, and shares each with another one. Every step of training is noised
(DP-SGD), under masks the server learns the sums of networks only, and even the means in the picture
are releases. Halfway the power fails; the run goes on where it was, and pays for nothing twice.
Needs extra ``deep``.

    python examples/noisy_networks.py [--out pictures]
"""

import argparse
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

from secure_fedclust import FedCRef, Ledger, PrivacySpec

matplotlib.use("Agg")
import matplotlib.pyplot as plt

parser = argparse.ArgumentParser(description="FedCRef with differential privacy.")
parser.add_argument("--out", type=Path, default=Path("pictures"), help="where the picture goes")
given = parser.parse_args()

X, y = load_digits(return_X_y=True)
X = X / 16
schools, truth = {}, {}
held = [(0, 1), (1, 3), (3, 4), (4, 6), (6, 7), (7, 0)]
for i, digits in enumerate(held):
    # The first half of a digit's images is at one school, the second at another.
    rows = [np.flatnonzero(y == digit)[place::2] for place, digit in enumerate(digits)]
    schools[f"school {i}"] = X[np.concatenate(rows)]
    truth[f"school {i}"] = y[np.concatenate(rows)]

spec = PrivacySpec(
    epsilon=8.0,
    delta=1e-5,
    ranges=[(0, 1)] * 64,
    public_size=180,
    protection="masking",
)


class PowerCut(Exception):
    """Nobody has seen it coming."""


def fit(model: FedCRef, folder: Path, *, cut_at: float) -> None:
    """Fit, until a part of the replies has come."""
    with tqdm(desc="FedCRef with noise", unit=" replies") as bar:

        def show(done: int, expected: int) -> None:
            bar.total = expected
            bar.update(done - bar.n)
            if done > cut_at * expected:
                raise PowerCut

        model.fit(schools, checkpoint=folder, on_progress=show)


with tempfile.TemporaryDirectory() as folder:
    ledger = Path(folder) / "schools.ledger"
    Ledger.create(ledger, epsilon=8.0, delta=1e-5, dataset="handwriting").close()
    model = FedCRef(
        n_local_clusters=2,
        hidden=(32, 8),
        start_epochs=15,
        n_rounds=2,
        theta=0.5,
        privacy=spec,
        ledger=ledger,
        random_state=0,
    )
    try:
        fit(model, Path(folder) / "run", cut_at=0.4)
    except PowerCut:
        with Ledger.open(ledger) as book:
            print(
                f"the power fails; {len(book.rows('school 0'))} releases of school 0 are paid for"
            )
    fit(model, Path(folder) / "run", cut_at=1.0)
    with Ledger.open(ledger) as book:
        print(f"{len(book.rows('school 0'))} releases of school 0 in the end, and in the ledger:")
        for row in book.rows("school 0"):
            print(f"  {row.charge.message}: mu {row.charge.mu:.2f}")
        book.verify()

print(model.guarantee_)
print("epsilon spent:", {name: round(spent, 2) for name, spent in model.privacy_spent_.items()})
print(model.result_.server_view())

# What digits groups are of takes the schools' own labels: nobody else knows it.
digits, labels = np.concatenate(list(truth.values())), np.concatenate(model.labels_)
images = np.concatenate(list(schools.values()))
print(f"\n{model.n_clusters_} groups; {np.mean(labels < 0):.0%} of the images are in none")
groups = [group for group in range(model.n_clusters_) if (labels == group).any()]
figure, axes = plt.subplots(
    2, max(len(groups), 2), figsize=(1.6 * max(len(groups), 2) + 1.2, 4.4), squeeze=False
)
for group, column in zip(groups, axes.T, strict=False):
    inside = np.bincount(digits[labels == group], minlength=10)
    share = inside.max() / inside.sum()
    print(f"group {group}: {share:.0%} of {inside.sum()} images are {inside.argmax()}s")
    means = model.cluster_centers_[group], images[labels == group].mean(axis=0)
    for axis, mean in zip(column, means, strict=True):
        axis.imshow(mean.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
    column[0].set_title(f"{share:.0%} are {inside.argmax()}s", fontsize=10)
for axis in axes.flat:
    axis.set(xticks=[], yticks=[], frame_on=False)
axes[0, 0].set_ylabel("released, with noise")
axes[1, 0].set_ylabel("exact, not released")
figure.suptitle("Means of groups of handwriting, epsilon 8")
figure.tight_layout()
given.out.mkdir(parents=True, exist_ok=True)
figure.savefig(given.out / "noisy_groups.png", dpi=120)
print(f"picture in {given.out / 'noisy_groups.png'}")
