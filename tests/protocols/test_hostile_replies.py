"""Well-formed replies of one client with the wildest values that the schema lets through."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fedclust import FKM, GOLD, FeCA, FederationWarning, FedGEM, KFed, PrivacySpec
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.errors import SecureFedClustError
from secure_fedclust.messages import read_envelope

NONE = PrivacySpec.none(reason="test")
MODELS = [
    FKM(3, n_rounds=2, n_init=1, privacy=NONE, random_state=0),
    FKM(3, n_rounds=2, n_init=1, align="index", privacy=NONE, random_state=0),
    KFed(3, n_local_clusters=3, privacy=NONE, random_state=0),
    FeCA(3, n_init=1, privacy=NONE, random_state=0),
    FedGEM(3, n_rounds=2, privacy=NONE, random_state=0),
    GOLD(3, privacy=NONE, random_state=0),
]
EXTREMES = {
    np.dtype(np.float64): [0.0, -0.0, 1e100, -1e100, 1e-300, 1.0],
    np.dtype(np.int64): [0, 1, 2, 2**40, -1, -(2**40)],
}


class Liar:
    """Answers as an honest client would, then overwrites parts of every array."""

    def __init__(self, client, seed):
        self.client = client
        self.rng = np.random.default_rng(seed)

    def handle(self, data):
        reply = self.client.handle(data)
        envelope = read_envelope(data)
        stage, _, _ = self.client._stages[envelope.schema]
        place = {"run": envelope.run, "step": envelope.step}
        values, _ = stage.reply.decode(reply, **place, bounds={})
        for array in values.values():
            hit = self.rng.random(array.shape) < self.rng.choice([0.2, 1.0])
            array[hit] = self.rng.choice(EXTREMES[array.dtype], hit.sum())
        if self.rng.random() < 0.2:
            rows = self.rng.integers(0, 4)
            values = {name: array[:rows] for name, array in values.items()}
        try:
            return stage.reply.encode(values, **place)
        except SecureFedClustError:
            return b"what it wanted to say breaks the schema"


@pytest.mark.parametrize("model", MODELS, ids=lambda m: type(m).__name__)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_a_lying_client_neither_crashes_the_run_nor_makes_it_infinite(model, seed):
    rng = np.random.default_rng(seed)
    records = [rng.normal(size=(20, 2)) for _ in range(3)]
    clients = [model._client_class(X, NONE, rng) for X in records]
    handlers = {"a": clients[0].handle, "b": clients[1].handle, "c": Liar(clients[2], seed).handle}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FederationWarning)
        model.fit(InProcessEngine(handlers))
    assert np.isfinite(model.cluster_centers_).all()
