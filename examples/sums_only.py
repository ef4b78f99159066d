"""Twelve clinics share one noise: the server sees sums over all of them, and nothing else.

The same epsilon as in a run in which the server sees each clinic's noisy answers, and a fraction
of the noise. Clinics that drop out do not stop the run, until too many have.
"""

import numpy as np

from secure_fedclust import FKM, AggregationAborted, Fault, PrivacySpec

rng = np.random.default_rng(2)
centers = np.array([[20.0, 30.0], [45.0, 20.0], [60.0, 60.0], [80.0, 35.0], [30.0, 75.0]])
clinics = {
    f"clinic {i:02}": rng.normal(centers[rng.integers(len(centers), size=150)], 4.0)
    for i in range(12)
}

promise = {"epsilon": 0.3, "delta": 1e-5, "ranges": [(0, 100), (0, 100)], "public_size": 150}
local = PrivacySpec(**promise)
masked = PrivacySpec(**promise, protection="masking", colluders=1, min_survivors=9)


def error(model: FKM) -> float:
    """Mean distance of the true centres to the nearest found."""
    gaps = np.linalg.norm(centers[:, None] - model.cluster_centers_[None], axis=2)
    return float(gaps.min(axis=1).mean())


for name, spec in (("local", local), ("masked", masked)):
    model = FKM(n_clusters=5, privacy=spec, random_state=0).fit(clinics)
    print(f"{name}: centres are {error(model):.1f} off on average")

print()
print(model.guarantee_)
print(model.result_.fallback)

# Three clinics are gone when they should send their vectors (the third exchange of the first sum).
faults = [Fault(f"clinic {i:02}", exchange=2, kind="drop") for i in range(3)]
model.fit(clinics, faults=faults)
print()
print(model.result_.server_view())

try:
    model.fit(clinics, faults=[*faults, Fault("clinic 07", exchange=2, kind="drop")])
except AggregationAborted as error:
    print()
    print(error)
