"""Three hospitals cluster their records together, without pooling or exposing them."""

import numpy as np

from secure_fedclust import FKM, PrivacySpec

rng = np.random.default_rng(0)
aachen = rng.normal([[35, 22]] * 500 + [[60, 31]] * 500, [4, 1.5])  # age, body mass index
bergen = rng.normal([[60, 31]] * 500 + [[75, 24]] * 500, [4, 1.5])
como = rng.normal([[75, 24]] * 500 + [[35, 22]] * 500, [4, 1.5])

spec = PrivacySpec(epsilon=1.0, delta=1e-5, ranges=[(0, 110), (10, 60)], public_size=1000)
print(spec.plan(FKM(n_clusters=3), n_clients=3, n_features=2))

model = FKM(n_clusters=3, privacy=spec, random_state=0)
model.fit({"Aachen": aachen, "Bergen": bergen, "Como": como})

print()
print(model.guarantee_)
print("centres (age, body mass index):")
print(model.cluster_centers_.round(1))
print("epsilon spent:", {client: round(e, 3) for client, e in model.privacy_spent_.items()})
for row in model.ledger_.rows("Aachen"):
    charge = row.charge
    print(f"row {row.number}: {charge.message}, {charge.formula}, mu {charge.mu:.3f}")
