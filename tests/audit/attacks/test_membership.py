"""Membership inference: near certain on exact centroids, a guess on released ones."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from secure_fedclust import ParameterError, PrivacySpec
from secure_fedclust.audit.attacks.ceilings import auc_ceiling, claimed_mu, found_at
from secure_fedclust.audit.attacks.membership import Guesses, made_up, membership, unprotected
from secure_fedclust.privacy import release

SPEC = PrivacySpec(epsilon=1.0, delta=1e-5, bound=1.0)
SURE = 0.9999
"""Noise has no seed: with the usual confidence one test in forty would fail by chance."""


@pytest.fixture
def rng():
    return np.random.default_rng(2)


@pytest.fixture
def a_tenth_of_the_noise(monkeypatch):
    full = release.noise
    monkeypatch.setattr(release, "noise", lambda exact, sigma, draw: full(exact, sigma / 10, draw))


def spec_of(**changed):
    return PrivacySpec(**SPEC.to_dict() | changed)


@pytest.mark.parametrize(
    "epsilon, auc, found",
    [
        (0.5, 0.540, 0.014),
        (1, 0.575, 0.020),
        (2, 0.639, 0.034),
        (4, 0.743, 0.081),
        (8, 0.881, 0.255),
    ],
)
def test_ceilings_are_those_of_the_gaussian(epsilon, auc, found):
    mu = claimed_mu(spec_of(epsilon=epsilon))
    assert auc_ceiling(mu) == pytest.approx(auc, abs=6e-4)
    assert found_at(0.01, mu) == pytest.approx(found, abs=6e-4)


@pytest.mark.parametrize("wrong", [(-1.0, 0.5), (math.nan, 0.5), (1.0, 1.5), (1.0, -0.1)])
def test_ceilings_refuse_what_is_no_rate(wrong):
    mu, rate = wrong
    with pytest.raises(ParameterError):
        found_at(rate, mu)


@pytest.mark.parametrize("size, least", [(2, 0.97), (5, 0.885), (20, 0.715), (100, 0.59)])
def test_exact_centroids_give_members_away_the_more_the_smaller_the_cluster(size, least, rng):
    found = unprotected(size=size, trials=3000, rng=rng)
    assert least < found.auc < least + 0.05
    assert found.found > found_at(0.01, 0.2)


def test_the_auc_is_the_usual_one(rng):
    members, others = rng.normal(1, 1, 400), rng.normal(0, 2, 400)
    truth = np.repeat([1, 0], 400)
    found = Guesses.of(members, others, 0.95)
    assert found.auc == pytest.approx(roc_auc_score(truth, np.concatenate([members, others])))
    ties = Guesses.of(np.zeros(200), np.zeros(200), 0.95)
    assert ties.auc == 0.5 and ties.found == 0


@pytest.mark.parametrize("shared", [0.0, 2.0])
def test_intervals_of_the_auc_hold_what_they_should(shared, rng):
    truth, held, games = auc_ceiling(0.7), 0, 300
    if shared:
        truth = auc_ceiling(0.7 / math.sqrt(1 + shared**2))
    for _ in range(games):
        common = rng.normal(0, shared, 300) if shared else 0.0
        members, others = rng.normal(0.7, 1, 300) + common, rng.normal(0, 1, 300) + common
        low, high = Guesses.of(members, others, 0.9).interval
        held += low <= truth <= high
    assert 0.85 * games < held < 0.95 * games


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("size", [1, 2, 20])
def test_released_centroids_stay_below_the_ceiling(adjacency, size, rng):
    found = membership(
        spec_of(adjacency=adjacency), size=size, trials=500, confidence=SURE, rng=rng
    )
    assert found.interval[0] < found.ceiling == pytest.approx(0.575, abs=1e-3)
    assert found.verdict != "FAIL"
    assert found.interval[0] < found.figure < found.interval[1]
    assert found.figure < found.more["AUC on exact centroids"] - 0.1
    # Where 1% is, is found on the same 500 trials, which the interval does not know of.
    assert found.more["found at 1%, low"] < found.more["found at 1%, ceiling"] + 0.01
    assert len(found.curve) <= 62


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_too_little_noise_is_found(adjacency, a_tenth_of_the_noise, rng):
    found = membership(spec_of(adjacency=adjacency), trials=500, rng=rng)
    assert found.verdict == "FAIL"
    assert found.figure > 0.65


def test_it_passes_only_where_half_the_noise_would_have_been_found(rng):
    sure = membership(spec_of(epsilon=4.0), trials=1000, confidence=SURE, rng=rng)
    assert sure.verdict == "PASS"
    assert sure.more["would have refuted half the noise"] == 1
    blunt = membership(spec_of(epsilon=4.0), size=100, trials=200, n_features=2, rng=rng)
    assert blunt.verdict == "INCONCLUSIVE"
    assert blunt.more["would have refuted half the noise"] == 0


@pytest.mark.parametrize("unit", ["record", "client"])
def test_sums_are_attacked_with_the_noise_of_honest_survivors(unit, monkeypatch, rng):
    spec = spec_of(unit=unit, protection="masking", min_survivors=3)
    kinds = {"trials": 150, "n_features": 4, "confidence": SURE, "rng": rng}
    assert membership(spec, **kinds).verdict != "FAIL"
    full = release.noise
    monkeypatch.setattr(release, "noise", lambda exact, sigma, draw: full(exact, sigma / 10, draw))
    assert membership(spec, **kinds).verdict == "FAIL"


def test_made_up_records_are_in_the_region_and_mostly_untouched(rng):
    for d in (1, 2, 16):
        length = np.linalg.norm(made_up(4000, d, rng), axis=1) / math.sqrt(d)
        assert length.max() <= 1 + 1e-12
        assert (length > 1 - 1e-9).mean() < 0.05


@pytest.mark.parametrize(
    "wrong", [{"size": 0}, {"n_features": 0}, {"trials": 99}, {"confidence": 0.0}]
)
def test_what_makes_no_sense_is_refused(wrong, rng):
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        membership(SPEC, **wrong, rng=rng)
