"""Reconstruction from sums: exact ones give records away, released ones no more than claimed."""

import numpy as np
import pytest
from scipy.stats import norm

from secure_fedclust import ParameterError, PrivacySpec
from secure_fedclust.audit.attacks.ceilings import naming_ceiling, reconstruction_ceiling
from secure_fedclust.audit.attacks.differencing import differencing, singletons
from secure_fedclust.audit.attacks.rehearsal import Outlets
from secure_fedclust.audit.attacks.rounds import given_away, watched_rounds
from secure_fedclust.privacy import release

SPEC = PrivacySpec(epsilon=1.0, delta=1e-5, bound=1.0)
SURE = 0.9999
"""Noise has no seed: with the usual confidence one test in forty could fail by chance."""

ATTACKS = [singletons, differencing]


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def spec_of(**changed):
    return PrivacySpec(**SPEC.to_dict() | changed)


def reduce_noise(monkeypatch, factor):
    full = release.noise
    less = lambda exact, sigma, draw: full(exact, sigma, lambda s, n: draw(s, n) // factor)  # noqa: E731
    monkeypatch.setattr(release, "noise", less)


def test_a_gaussian_that_names_one_of_two_values_reaches_the_ceiling():
    mu = 0.8
    # Without the record the sum is 0; records are -1 and 1, noise is 1 / mu.
    assert naming_ceiling(2, mu, "add_remove") == pytest.approx(norm.cdf(mu))
    # Records are neighbours of each other: they are one sensitivity, 2, apart.
    assert naming_ceiling(2, mu, "replace_one") == pytest.approx(norm.cdf(mu / 2))


@pytest.mark.parametrize("values", [2, 3, 10])
def test_no_gaussian_exceeds_the_ceiling_of_replacing(values, rng):
    mu, n = 1.5, 200_000
    secrets = rng.integers(values, size=n)
    seen = secrets / (values - 1) * mu + rng.normal(size=n)
    guesses = np.clip(np.rint(seen / mu * (values - 1)), 0, values - 1)
    assert (guesses == secrets).mean() < naming_ceiling(values, mu, "replace_one") + 0.004
    assert naming_ceiling(values, mu, "replace_one") <= naming_ceiling(values, mu, "add_remove")


def test_ceilings_without_anything_released_are_those_of_blind_guesses():
    assert reconstruction_ceiling(0.1, 0.0) == pytest.approx(0.1)
    for way in ("add_remove", "replace_one"):
        assert naming_ceiling(5, 0.0, way) == pytest.approx(0.2)
    with pytest.raises(ParameterError, match="values=1"):
        naming_ceiling(1, 1.0, "add_remove")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_exact_sums_give_everything_away_and_released_ones_do_not(attack, adjacency, rng):
    found = attack(spec_of(adjacency=adjacency), confidence=SURE, rng=rng)
    assert found.more["from exact sums"] == 1.0
    assert 0.5 <= found.interval[1] and found.interval[0] < found.ceiling < 0.61
    assert found.verdict != "FAIL"


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_too_little_noise_is_found(attack, adjacency, monkeypatch, rng):
    reduce_noise(monkeypatch, 10)
    found = attack(spec_of(adjacency=adjacency), trials=500, rng=rng)
    assert found.verdict == "FAIL"
    assert found.figure > 0.7


def test_a_claim_that_half_the_noise_would_break_passes(rng):
    sure = singletons(spec_of(epsilon=4.0), confidence=SURE, rng=rng)
    assert sure.verdict == "PASS" and sure.more["would have refuted half the noise"] == 1
    unsure = singletons(spec_of(epsilon=0.1), trials=20, confidence=SURE, rng=rng)
    assert unsure.verdict == "INCONCLUSIVE"


def test_finer_questions_are_harder_to_answer(rng):
    yes_or_no, finer = (singletons(SPEC, values=n, rng=rng) for n in (2, 50))
    assert finer.figure < 0.1 < yes_or_no.figure
    assert finer.more["from exact sums"] == 1.0
    assert finer.more["blind guesses"] == 0.02


@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_sums_over_clients_are_attacked_too(unit, attack, monkeypatch, rng):
    spec = spec_of(unit=unit, protection="masking", min_survivors=3)
    few = {"trials": 200, "confidence": SURE, "rng": rng} | (
        {"runs": 1} if attack is differencing else {}
    )
    assert attack(spec, **few).verdict != "FAIL"
    reduce_noise(monkeypatch, 10)
    assert attack(spec, **few).verdict == "FAIL"


def test_an_observer_takes_sums_of_one_and_differences_by_one_for_records():
    first = np.array([[1.0, 2], [9, 9]]), np.array([1, 5])
    second = np.array([[4.0, 2], [6, 9]]), np.array([2, 4])
    third = np.array([[4.0, 2], [6, 9]]), np.array([2, 4])
    assert given_away([first, second, third]).tolist() == [[1, 2], [3, 0], [3, 0]]


@pytest.mark.parametrize("n_records, least, most", [(50, 2, 9), (200, 2, 11), (1000, 2, 9)])
def test_rounds_of_exact_sums_give_some_records_away_and_released_ones_none(
    n_records, least, most, rng
):
    exact, released = watched_rounds(Outlets(SPEC), n_records=n_records, runs=12, rng=rng)
    assert least < exact < most
    assert released == 0


def test_rounds_that_are_released_without_noise_are_found_out(monkeypatch, rng):
    reduce_noise(monkeypatch, 1 << 60)
    found = differencing(spec_of(epsilon=8.0), trials=100, runs=5, rng=rng)
    assert found.more["found a run, as released"] > 0
    assert found.verdict == "FAIL" and "to the last bit" in found.words


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(
    "wrong", [{"values": 1}, {"values": 0}, {"trials": 5}, {"n_features": 0}, {"confidence": 2}]
)
def test_what_makes_no_sense_is_refused(attack, wrong, rng):
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        attack(SPEC, **wrong, rng=rng)
