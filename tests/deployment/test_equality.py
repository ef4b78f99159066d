"""A run over Flower gives what a run in one process gives, bit for bit, when noise is off."""

import numpy as np
import pytest

from secure_fedclust import FKM, GOLD, FeCA, FedGEM, KFed, PrivacySpec

from .world import NAMES, NETWORKS, fit_here, fit_over, silence, with_protection

NONE = PrivacySpec.none(reason="test")
SPEC = PrivacySpec(epsilon=20.0, delta=1e-5, ranges=[(0, 1)] * 4, public_size=60)
CORNERS = np.array([[0.1, 0.1, 0.9, 0.9], [0.9, 0.9, 0.1, 0.1], [0.9, 0.1, 0.9, 0.1]])

MODELS = {
    "FKM": FKM(3, n_rounds=2),
    "FKM one shot": FKM(3, one_shot=True),
    "KFed": KFed(3, n_local_clusters=3),
    "FeCA": FeCA(3),
    "FedGEM": FedGEM(3),
    "FedGEM sums": FedGEM(3, calibration="sums"),
    "GOLD": GOLD(),
}
PRIVATE_ONLY = {"FKM one shot", "FedGEM sums"}
"""Which are ways to spend a budget."""


def records(n=60):
    clients = {}
    for seed, name in enumerate(NAMES):
        rng = np.random.default_rng([7, seed])
        middle = CORNERS[np.arange(n) % 3]
        clients[name] = np.clip(middle + 0.03 * rng.normal(size=(n, 4)), 0, 1)
    return clients


def assert_equal(model, expected):
    found, wanted = model.result_, expected.result_
    assert found.centers.tobytes() == wanted.centers.tobytes()
    assert found.centers.shape == wanted.centers.shape
    assert found.client_clusters == wanted.client_clusters
    assert [each.stage for each in found.history] == [each.stage for each in wanted.history]
    for name, array in (wanted.networks or {}).items():
        assert found.networks[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("name", [name for name in MODELS | NETWORKS if name not in PRIVATE_ONLY])
def test_without_protection(world, tmp_path, name):
    if name in NETWORKS:
        pytest.importorskip("torch")
    model = (MODELS | NETWORKS)[name]
    found, _ = fit_over(world, model, records(), NONE, tmp_path)
    assert_equal(found, fit_here(model, records(), NONE))


@pytest.mark.parametrize("active", [False, True], ids=["honest", "active"])
def test_exact_sums_under_masks(world, tmp_path, active):
    spec = PrivacySpec.none(reason="test", protection="masking", active_server=active)
    found, _ = fit_over(world, MODELS["FKM"], records(), spec, tmp_path)
    assert_equal(found, fit_here(MODELS["FKM"], records(), spec))


@pytest.mark.parametrize("protection", ["none", "masking", "ckks"])
@pytest.mark.parametrize("name", MODELS | NETWORKS)
def test_with_noise_off(world, tmp_path, monkeypatch, name, protection):
    if name in NETWORKS:
        pytest.importorskip("torch")
    silence(monkeypatch)
    model, spec = (MODELS | NETWORKS)[name], with_protection(SPEC, protection)
    found, _ = fit_over(world, model, records(), spec, tmp_path)
    assert_equal(found, fit_here(model, records(), spec))
