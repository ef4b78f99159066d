"""Three hospitals cluster their records together without pooling them."""

import numpy as np

from secure_fedclust import FKM, PrivacySpec

rng = np.random.default_rng(0)
aachen = rng.normal([[35, 22]] * 80 + [[60, 31]] * 80, [4, 1.5])  # age, body mass index
bergen = rng.normal([[60, 31]] * 90 + [[75, 24]] * 70, [4, 1.5])
como = rng.normal([[75, 24]] * 60 + [[35, 22]] * 50, [4, 1.5])

model = FKM(n_clusters=3, privacy=PrivacySpec.none(reason="made-up records"), random_state=0)
model.fit({"Aachen": aachen, "Bergen": bergen, "Como": como})

print(model.guarantee_)
print("centres (age, body mass index):")
print(model.cluster_centers_.round(1))
for client, labels in model.result_.nonprivate.labels.items():
    print(f"{client}: records per cluster {np.bincount(labels, minlength=3).tolist()}")
for stage, (down, up) in model.result_.bytes_per_stage().items():
    print(f"{stage}: {down} bytes to the clients, {up} bytes back")
