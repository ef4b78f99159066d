"""Ten shops learn to see clothes without showing them to each other: DeepFeCA.

A network turns images into 16 features. Shops cluster the features and train the network to tell
the clusters apart, round by round; what they send is weights and centres. How good the features are
is measured with labels that training has not seen: by a linear classifier, before and after.
Needs extra ``deep``, and Fashion-MNIST in the data folder, ``fmnist_train10k.npz`` and
``fmnist_test10k.npz``. Takes half a minute on two cores.

    python examples/learn_features.py [--data-dir DIR] [--out pictures]
"""

import argparse
import os
import sys
from pathlib import Path

import matplotlib
import numpy as np
from tqdm import tqdm

from secure_fedclust import DataError, DeepFeCA, PrivacySpec
from secure_fedclust.datasets import iid_partition, load_benchmark
from secure_fedclust.metrics import normalized_mutual_info

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CLOTHES = "T-shirt trousers pullover dress coat sandal shirt sneaker bag boot".split()
FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data"
parser = argparse.ArgumentParser(description="DeepFeCA on Fashion-MNIST.")
parser.add_argument("--data-dir", default=os.environ.get("SECURE_FEDCLUST_DATA", FOLDER))
parser.add_argument("--out", type=Path, default=Path("pictures"), help="where the picture goes")
given = parser.parse_args()
try:
    train, test = (
        load_benchmark(f"fmnist_{part}10k", given.data_dir) for part in ("train", "test")
    )
except DataError as error:
    sys.exit(f"This example needs Fashion-MNIST: {error}")

images, test_images = train.X / 255, test.X / 255
parts = iid_partition(images, train.y, 10, seed=0)
shops = {f"shop {i}": images[part] for i, part in enumerate(parts)}
truth = np.concatenate([train.y[part] for part in parts])


def learned(n_rounds: int) -> DeepFeCA:
    """DeepFeCA after so many rounds; the network of round 0 is made by chance."""
    model = DeepFeCA(
        n_clusters=10,
        n_rounds=n_rounds,
        privacy=PrivacySpec.none(reason="an example on public images"),
        random_state=0,
    )
    with tqdm(desc=f"DeepFeCA, {n_rounds} rounds", unit=" replies") as bar:

        def show(done: int, expected: int) -> None:
            """Move the bar."""
            bar.total = expected
            bar.update(done - bar.n)

        model.fit(shops, on_progress=show)
    return model


for n_rounds in (0, 6):
    model = learned(n_rounds)
    accuracy = model.probe(images, train.y, test_images, test.y)
    agreement = normalized_mutual_info(truth, np.concatenate(model.labels_))
    print(
        f"after {n_rounds} rounds a linear classifier on the features is right on {accuracy:.1%} "
        f"of the test images; clusters and kinds of clothes agree by {agreement:.2f} (NMI)"
    )

# Nobody could draw this in a real federation: it takes everybody's images in one place.
pooled, labels = np.concatenate(list(shops.values())), np.concatenate(model.labels_)
columns = model.n_clusters_
figure, axes = plt.subplots(4, columns, figsize=(1.1 * columns + 0.4, 5.6))
rng = np.random.default_rng(0)
for group, column in enumerate(axes.T):
    members = np.flatnonzero(labels == group)
    kinds = np.bincount(truth[members], minlength=10)
    shown = [pooled[members].mean(axis=0), *pooled[rng.choice(members, 3, replace=False)]]
    for axis, image in zip(column, shown, strict=True):
        axis.imshow(image.reshape(28, 28), cmap="gray_r", vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[])
    share = kinds.max() / kinds.sum()
    column[0].set_title(f"{CLOTHES[kinds.argmax()]}\n{share:.0%} of {len(members)}", fontsize=9)
axes[0, 0].set_ylabel("mean")
for axis in axes[1:, 0]:
    axis.set_ylabel("image")
figure.suptitle("Clusters that ten shops have found together, and what most images in them are")
figure.tight_layout()
given.out.mkdir(parents=True, exist_ok=True)
figure.savefig(given.out / "learned_clusters.png", dpi=120)
print(f"picture in {given.out / 'learned_clusters.png'}")
