"""Nobody knows how many clusters there are in all: FedGEM finds out.

Each client knows only how many kinds of machine fault it has seen itself, and releases one private
summary of its records.
"""

from secure_fedclust import FedGEM, PrivacySpec
from secure_fedclust.datasets import cluster_subset_partition, rmin_blobs
from secure_fedclust.metrics import adjusted_rand, weighted_client_score

X, y, _ = rmin_blobs(12000, n_features=5, n_clusters=10, r_min=6.0, seed=2)
parts = cluster_subset_partition(X, y, n_clients=6, seed=2)
kinds_seen = [len(set(y[part])) for part in parts]

spec = PrivacySpec(epsilon=2.0, delta=1e-5, ranges=[(-25, 25)] * 5, public_size=2000)
model = FedGEM(kinds_seen, privacy=spec, random_state=2)
model.fit([X[part] for part in parts])

score = weighted_client_score(adjusted_rand, [y[part] for part in parts], model.labels_)
print(model.guarantee_)
print(f"kinds of fault seen by each client: {kinds_seen}")
print(f"kinds of fault in all: {model.n_clusters_} found, {len(set(y))} true")
print(f"agreement with the truth (ARI, mean over clients): {score:.3f}")
for client, clusters in model.result_.client_clusters.items():
    print(f"{client} holds clusters {sorted(set(clusters))}")
