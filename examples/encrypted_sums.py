"""Twelve clinics encrypt what they send, and the server adds up what it cannot read.

A key holder, a party that the clinics chose and that is not the server's, opens one sum a round.
The clinics share one noise, as with masking. What they have to trust is that the server and the key
holder do not work together; what is left if they do is printed, too.
"""

import numpy as np

from secure_fedclust import FKM, AggregationAborted, Fault, KFed, PrivacySpec

rng = np.random.default_rng(3)
centers = np.array([[20.0, 30.0], [45.0, 20.0], [60.0, 60.0], [80.0, 35.0], [30.0, 75.0]])
clinics = {
    f"clinic {i:02}": rng.normal(centers[rng.integers(len(centers), size=1000)], 4.0)
    for i in range(12)
}

spec = PrivacySpec(
    epsilon=1.0,
    delta=1e-5,
    ranges=[(0, 100), (0, 100)],
    public_size=1000,
    protection="ckks",
    colluders=1,
    min_survivors=9,
)

# Clinic 07 is gone when it should send its first vector: exchange 0 is for the key, 1 for handing
# it out, 2 for the vectors, 3 for opening their sum. It has no part in that sum, and in the next it
# has.
model = FKM(n_clusters=5, privacy=spec, random_state=0)
model.fit(clinics, faults=[Fault("clinic 07", exchange=2, kind="drop")])
print(model.cluster_centers_.round(1))
print(model.guarantee_)
print(model.result_.fallback)
print()
print(model.result_.server_view())
print(model.result_.key_holder_view())

# k-FED looks at each clinic's noisy answers to find the clusters, and then asks for one encrypted
# sum, by which it puts their centres right.
refined = KFed(n_clusters=5, n_local_clusters=5, privacy=spec, random_state=0).fit(clinics)
print()
print(refined.cluster_centers_.round(1))
print(refined.result_.server_view())

# Without the key holder there is no sum.
try:
    model.fit(clinics, faults=[Fault("key holder", exchange=3, kind="drop")])
except AggregationAborted as error:
    print()
    print(error)
