"""What is claimed, and what would make a claim untrue."""

import os

import numpy as np
import pytest

from secure_fedclust import (
    FKM,
    FederationWarning,
    FedGEM,
    KFed,
    Ledger,
    LedgerError,
    ParameterError,
    PrivacySpec,
    PrivacyWarning,
    load_model,
)
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.metrics import adjusted_rand
from secure_fedclust.privacy.release import Releases
from secure_fedclust.protocols.seeding import SeedingClient

RANGES = [(-10, 10), (-10, 10)]
SPEC = PrivacySpec(epsilon=2.0, delta=1e-5, ranges=RANGES, public_size=400)


def blobs(seed, n=400):
    rng = np.random.default_rng(seed)
    return rng.normal(np.array([[-5.0, 0.0], [5.0, 0.0]])[rng.integers(2, size=n)], 0.7)


@pytest.fixture
def clients():
    return {name: blobs(i) for i, name in enumerate(("oslo", "bergen", "como"))}


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "site.ledger"
    Ledger.create(path, epsilon=5.0, delta=1e-5).close()
    return path


def test_with_a_ledger_the_claim_is_for_the_run_and_for_all_runs(clients, ledger):
    first = FKM(2, privacy=SPEC, ledger=ledger, random_state=0).fit(clients)
    assert first.guarantee_.endswith(
        "all runs so far on the ledger together (epsilon=5, delta=1e-05)"
    )
    assert "(epsilon=2, delta=1e-05)-differential privacy for each record" in first.guarantee_
    second = FKM(2, privacy=SPEC, ledger=ledger, random_state=0).fit(clients)
    assert first.result_.anchors["oslo"][0] < second.result_.anchors["oslo"][0]
    with Ledger.open(ledger) as book:
        book.verify(first.result_.anchors.values())


def test_without_a_guarantee_nothing_is_charged_to_a_ledger(clients, ledger):
    unproved = FedGEM(2, calibration="sums", seeding="local", allow_unproved=True)
    for model in (FKM(2, sampler="fast"), unproved):
        model.set_params(privacy=SPEC, ledger=ledger)
        with pytest.raises(ParameterError, match="leave the ledger out"):
            model.fit(clients)
    with Ledger.open(ledger) as book:
        assert book.rows() == []


def test_clients_without_names_cannot_be_charged(clients, ledger):
    with pytest.raises(ParameterError, match="keeps count by the clients' names"):
        FKM(2, privacy=SPEC, ledger=ledger).fit(list(clients.values()))


def test_a_ledger_with_two_names_is_refused(clients, ledger, tmp_path):
    os.link(ledger, tmp_path / "other.ledger")
    for path in (ledger, tmp_path / "other.ledger"):
        with pytest.raises(LedgerError, match="hard link"):
            FKM(2, privacy=SPEC, ledger=path).fit(clients)


def engine_of(clients, specs):
    handlers = {}
    for (name, X), spec in zip(clients.items(), specs, strict=True):
        book = Ledger.create(None, epsilon=spec.epsilon, delta=spec.delta)
        releases = Releases(name, spec, book, "fast")
        handlers[name] = SeedingClient(X, spec, np.random.default_rng(0), releases).handle
    return InProcessEngine(handlers)


def test_a_client_with_less_noise_than_was_promised_is_left_out(clients):
    careless = PrivacySpec(epsilon=20.0, delta=1e-5, ranges=RANGES, public_size=400)
    model = FKM(2, privacy=SPEC, random_state=0)
    with pytest.warns(FederationWarning, match="less noise than the privacy spec asks for"):
        model.fit(engine_of(clients, [SPEC, careless, SPEC]))
    assert set(model.result_.history[0].rejected) == {"bergen"}


def test_a_client_with_more_noise_than_was_promised_takes_part(clients):
    careful = PrivacySpec(epsilon=1.0, delta=1e-5, ranges=RANGES, public_size=400)
    model = FKM(2, privacy=SPEC, random_state=0)
    model.fit(engine_of(clients, [SPEC, careful, SPEC]))
    assert not any(exchange.rejected for exchange in model.result_.history)
    assert "provided that every client enforces the same spec" in model.guarantee_


def test_labels_and_predictions_measure_distances_as_the_run_did(tmp_path):
    """Age against income: in raw units income alone would decide."""
    rng = np.random.default_rng(0)
    truth = rng.integers(3, size=3000)
    centers = np.array([[20.0, 50e3], [80.0, 50e3], [50.0, 150e3]])
    X = rng.normal(centers[truth], [4.0, 9e3])
    spec = PrivacySpec(epsilon=2.0, delta=1e-5, ranges=[(0, 100), (0, 200e3)], public_size=3000)
    model = FKM(3, privacy=spec, random_state=0).fit({"oslo": X})
    assert adjusted_rand(truth, model.labels_[0]) > 0.95
    model.save(tmp_path / "model.json")
    for fitted in (model, load_model(tmp_path / "model.json")):
        assert adjusted_rand(truth, fitted.predict(X)) > 0.95


@pytest.mark.filterwarnings("ignore::secure_fedclust.errors.FederationWarning")
def test_noise_that_drowns_the_clusters_is_warned_about_without_a_public_size():
    spec = PrivacySpec(epsilon=0.5, delta=1e-5, ranges=RANGES)
    for model in (FKM(8, privacy=spec), KFed(8, privacy=spec)):
        with pytest.warns(PrivacyWarning, match="would do"):
            model.fit({"oslo": blobs(0, 20), "bergen": blobs(1, 0)})


def test_what_has_no_effect_is_refused():
    for parameters, word in (
        ({"seeding": "local", "allow_unproved": True}, "seeding"),
        ({"enforce_floor": False}, "floor"),
        ({"calibration": "sums", "floor": 3.0}, "floor"),
    ):
        with pytest.raises(ParameterError, match=f"{word}.*no effect"):
            FedGEM(2, privacy=SPEC, **parameters).fit({"oslo": blobs(0)})
