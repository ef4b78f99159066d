"""Reports of runs that have trained networks, from their files, as the command line makes them."""

import json
import warnings
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from secure_fedclust import DeepFeCA, FedCRef, Ledger, PrivacySpec
from secure_fedclust.audit.report.folder import write_report
from secure_fedclust.protocols import fedcref_private

pytest.importorskip("torch")

CORNERS = np.array([[0.1, 0.1, 0.9, 0.9], [0.9, 0.9, 0.1, 0.1]])
LOCAL = PrivacySpec(epsilon=20.0, delta=1e-5, ranges=[(0, 1)] * 4, public_size=40)
MASKED, ENCRYPTED = (replace(LOCAL, protection=name) for name in ("masking", "ckks"))
WHOLE = replace(MASKED, unit="client")

MODELS = {
    "FedCRef": lambda: FedCRef(
        2, hidden=(3, 2), start_epochs=1, n_rounds=1, theta=1e6, alpha=0.0, batch_size=64
    ),
    "DeepFeCA": lambda: DeepFeCA(
        2, hidden=(4,), n_features_out=3, n_init=1, local_epochs=1, batch_size=64
    ),
}
RUNS = [(name, spec) for name in MODELS for spec in (LOCAL, MASKED, ENCRYPTED)]


@pytest.mark.parametrize(
    ("name", "spec"),
    [*RUNS, ("DeepFeCA", WHOLE)],
    ids=lambda given: given if isinstance(given, str) else f"{given.protection}, {given.unit}",
)
def test_a_run_with_networks_has_a_report_with_its_claim(tmp_path, name, spec):
    rng = np.random.default_rng(0)
    clients = {
        site: np.clip(CORNERS[rng.integers(2, size=40)] + 0.05 * rng.normal(size=(40, 4)), 0, 1)
        for site in ("Aachen", "Bergen", "Como")
    }
    ledger = tmp_path / "ledger.sqlite"
    Ledger.create(ledger, epsilon=20.0, delta=1e-5, unit=spec.unit).close()
    model = MODELS[name]().set_params(privacy=spec, ledger=str(ledger))
    with (
        warnings.catch_warnings(),
        mock.patch.object(fedcref_private, "DIRECTIONS", 3),
    ):
        warnings.simplefilter("ignore")
        model.fit(clients)
    model.result_.save(tmp_path / "result.json")
    page = write_report(tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert "NO DP CLAIM" not in page.read_text()
    assert report["claim"].startswith("(epsilon=20, delta=1e-05)-differential privacy")
    sights = {(row["message"], row["form"]) for row in report["saw"]}
    looking = {"FedCRef": "fedcref/project", "DeepFeCA": "deepfeca/see"}[name]
    assert {(looking, "receipt"), (looking, "released")} <= sights
    assert "Aachen" not in page.read_text()
