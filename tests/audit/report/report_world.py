"""Small runs, and an audit made by hand, for tests of the report."""

import warnings
from functools import cache

import numpy as np

from secure_fedclust import FKM, GOLD, FeCA, FedGEM, KFed, Ledger, PrivacySpec
from secure_fedclust.audit.findings import CHECKS, Audit, Finding
from secure_fedclust.audit.report.content import installed_versions

SITES = ("Aachen", "Bergen", "Como", "Delft", "Essen")
RANGES = [(-5, 15), (-5, 15)]
SYSTEMS = {
    "FKM": lambda: FKM(2),
    "KFed": lambda: KFed(2, n_local_clusters=2),
    "FeCA": lambda: FeCA(2),
    "FedGEM": lambda: FedGEM(dict.fromkeys(SITES, 2)),
    "GOLD": lambda: GOLD(2),
}


def sites(n=60):
    """Five clients with the same two clusters."""
    rng = np.random.default_rng(0)
    return {site: rng.normal([[0, 0]] * n + [[9, 9]] * n) for site in SITES}


def spec(**given):
    return PrivacySpec(
        **{"epsilon": 4, "delta": 1e-5, "ranges": RANGES, "public_size": 120} | given
    )


def fit(model, privacy, ledger=None, clients=None, **given):
    """A fitted model, whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.set_params(privacy=privacy, ledger=ledger, random_state=0)
        return model.fit(sites() if clients is None else clients, **given)


@cache
def fitted(name, protection="none"):
    """A private run of a system, made once."""
    return fit(SYSTEMS[name](), spec(protection=protection))


@cache
def unprotected(name):
    return fit(SYSTEMS[name](), PrivacySpec.none(reason="generated data, of Bergen too"))


def new_ledger(path, **given):
    Ledger.create(path, **{"epsilon": 8, "delta": 1e-5} | given).close()
    return str(path)


def finding(name="distinguishing game", **given):
    return Finding(
        **{
            "name": name,
            "kind": "statistical",
            "threat": "knows all other records, and sees what the server sees",
            "measure": "epsilon",
            "figure": 1.5,
            "interval": (1.5, 4.2),
            "ceiling": 4.0,
            "verdict": "PASS",
            "words": "No more was found than the claim allows.",
            "trials": 2000,
            "confidence": 0.95,
            "more": {"epsilon if Gaussian": 3.1, "would have refuted half the noise": 0.97},
            "curve": tuple((x / 10, min(1.0, x / 10 + 0.1)) for x in range(10)),
        }
        | given
    )


EXHIBIT = finding(
    "AFCL's message",
    kind="exhibit",
    measure="records found",
    figure=500,
    interval=None,
    ceiling=None,
    verdict="FAIL",
    confidence=None,
    more={},
    curve=(),
    words="Every record was read off the message.",
)
ALL_CHECKS = tuple(
    finding(
        name,
        kind="structural",
        measure="violations",
        figure=0,
        interval=(0, 1.01) if name == "noise as charged" else None,
        ceiling=0,
        confidence=None,
        more={},
        curve=(),
    )
    for name in CHECKS
)


def audit_of(model, *findings, **given):
    """An audit that belongs to a run."""
    result = model.result_
    return Audit(
        **{
            "algorithm": result.algorithm,
            "parameters": dict(result.parameters),
            "privacy": dict(result.privacy),
            "n_clients": len(SITES),
            "n_features": 2,
            "trials": 2000,
            "findings": (*(findings or (finding(), EXHIBIT)), *ALL_CHECKS),
            "versions": installed_versions(),
        }
        | given
    )
