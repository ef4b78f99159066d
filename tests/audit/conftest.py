import numpy as np
import pytest

from secure_fedclust import FKM, PrivacySpec
from secure_fedclust.audit.attacks.rehearsal import rehearse


@pytest.fixture(scope="session")
def rehearsed():
    """A rehearsal of a small run, for a few numbers a release."""
    kept = {}

    def make(model=None, *, n_clients=5, n_features=2, epsilon=8.0, **spec):
        key = (repr(model), n_clients, n_features, epsilon, tuple(sorted(spec.items())))
        if key not in kept:
            model = model or FKM(4, seeding="public", n_rounds=2)
            privacy = PrivacySpec(
                epsilon=epsilon,
                delta=1e-5,
                ranges=[(-1, 1)] * n_features,
                public_size=500,
                **spec,
            )
            kept[key] = rehearse(
                model._private_class,
                model._run_private,
                privacy,
                clients=[f"client {i}" for i in range(n_clients)],
                n_features=n_features,
                rng=np.random.default_rng(0),
            )
        return kept[key]

    return make
