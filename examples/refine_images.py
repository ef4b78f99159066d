"""Twelve post offices sort handwritten digits without showing them to each other: FedCRef.

Each has images of two to five digits, 150 of each, sorted by k-means. Autoencoders that reconstruct
each other's piles link them: nobody says how many digits there are, or which piles are the same.
Needs extra ``deep``, and MNIST in the data folder: a few images of 28x28 pixels as
``mnist_train10k.npz``. Takes a minute on two cores.

    python examples/refine_images.py [--data-dir DIR] [--out pictures]
"""

import argparse
import os
import sys
from pathlib import Path

import matplotlib
import numpy as np
from tqdm import tqdm

from secure_fedclust import DataError, FedCRef, PrivacySpec
from secure_fedclust.datasets import load_benchmark

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"
parser = argparse.ArgumentParser(description="FedCRef on MNIST.")
parser.add_argument("--data-dir", default=os.environ.get("SECURE_FEDCLUST_DATA", FOLDER))
parser.add_argument("--out", type=Path, default=Path("pictures"), help="where the picture goes")
given = parser.parse_args()
try:
    mnist = load_benchmark("mnist_train10k", given.data_dir)
except DataError as error:
    sys.exit(f"This example needs MNIST: {error}")

# Half as many pixels each way, from 0 to 1.
images = mnist.X.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)).reshape(-1, 196) / 255
rng = np.random.default_rng(0)
piles = [list(rng.permutation(np.flatnonzero(mnist.y == digit))) for digit in range(10)]
offices, truth = {}, {}
for i in range(12):
    # Every third digit from another one on: each is at two offices or more.
    digits = [(i + 3 * step) % 10 for step in range(rng.integers(2, 6))]
    rows = [piles[digit].pop() for digit in digits for _ in range(150)]
    offices[f"office {i:02}"], truth[f"office {i:02}"] = images[rows], mnist.y[rows]

model = FedCRef(
    {name: len(set(digits)) for name, digits in truth.items()},
    local_epochs=4,
    privacy=PrivacySpec.none(reason="an example on public images"),
    random_state=0,
)
with tqdm(desc="FedCRef", unit=" replies") as bar:

    def show(done: int, expected: int) -> None:
        """Move the bar."""
        bar.total = expected
        bar.update(done - bar.n)

    model.fit(offices, on_progress=show)

labels, digits = np.concatenate(model.labels_), np.concatenate(list(truth.values()))
print(f"{model.n_clusters_} groups; {np.mean(labels < 0):.0%} of the images are in none")
titles = []
for group in range(model.n_clusters_):
    inside = np.bincount(digits[labels == group], minlength=10)
    digit, share = inside.argmax(), inside.max() / inside.sum()
    holders = sum(group in held for held in model.result_.client_clusters.values())
    titles.append(f"{share:.0%} are {digit}s\n{holders} offices")
    print(f"group {group} of {holders} offices: {share:.0%} of {inside.sum()} are {digit}s")
sent = sum(exchange.bytes_up for exchange in model.result_.history) / 1e6
print(f"every office sent {sent / 12:.0f} MB, of models and counts, and no image")

columns = 5
rows = -(-model.n_clusters_ // columns)
figure, axes = plt.subplots(rows, columns, figsize=(8, 1.9 * rows + 0.6), squeeze=False)
for axis in axes.flat:
    axis.axis("off")
for axis, center, title in zip(axes.flat, model.cluster_centers_, titles, strict=False):
    axis.imshow(center.reshape(14, 14), cmap="gray_r")
    axis.set_title(title, fontsize=9)
figure.suptitle("Means of the groups that twelve offices have found together")
figure.tight_layout()
given.out.mkdir(parents=True, exist_ok=True)
figure.savefig(given.out / "refined_groups.png", dpi=120)
print(f"picture in {given.out / 'refined_groups.png'}")
