"""The one-run audit: a valid test, that finds what is wrong and nothing else."""

import numpy as np
import pytest

from secure_fedclust import ParameterError, PrivacySpec
from secure_fedclust.audit.attacks.canaries import GUESSED, lower_epsilon, one_run, p_value
from secure_fedclust.privacy import release

SPEC = PrivacySpec(epsilon=1.0, delta=1e-5, bound=1.0)


@pytest.fixture
def rng():
    return np.random.default_rng(4)


@pytest.fixture
def a_tenth_of_the_noise(monkeypatch):
    full = release.noise
    monkeypatch.setattr(release, "noise", lambda exact, sigma, draw: full(exact, sigma / 10, draw))


def spec_of(**changed):
    return PrivacySpec(**SPEC.to_dict() | changed)


def test_the_p_value_of_pure_privacy_is_a_binomial_tail():
    assert p_value(10, 10, 10, 0.0, 0.0) == pytest.approx(2**-10)
    assert p_value(10, 4, 3, np.log(3), 0.0) == pytest.approx(0.75**4 + 4 * 0.75**3 * 0.25)
    assert p_value(10, 4, 0, 1.0, 0.1) == 1.0


def test_delta_adds_what_giving_coins_away_can_add():
    # By hand: two guesses at one half each, both right.
    assert p_value(2, 2, 2, 0.0, 0.01) == pytest.approx(0.25 + 2 * 2 * 0.01 * 0.5)
    assert p_value(1000, 100, 75, 1.0, 1e-4) > p_value(1000, 100, 75, 1.0, 0.0)
    p_values = [p_value(1000, 200, 150, epsilon, 1e-5) for epsilon in np.linspace(0, 4, 30)]
    assert p_values == sorted(p_values)


def respond(inside, epsilon, delta, rng):
    """Scores of a mechanism that is (epsilon, delta)-DP, and nothing better, for each coin."""
    m = len(inside)
    truth = rng.random(m) < 1 / (1 + np.exp(-epsilon))
    scores = np.where(inside == truth, 1.0, -1.0) + rng.normal(0, 1e-3, m)
    given_away = rng.random(m) < delta
    return np.where(given_away, np.where(inside, 10.0, -10.0), scores)


@pytest.mark.parametrize("epsilon", [0.2, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_a_mechanism_that_keeps_its_promise_exactly_is_refuted_in_at_most_1_of_20_audits(
    epsilon, delta, rng
):
    audits, refuted = 200, 0
    for _ in range(audits):
        inside = rng.random(100) < 0.5
        scores = respond(inside, epsilon, delta, rng)
        refuted += lower_epsilon(scores, inside, delta=delta, confidence=0.95)[0] > epsilon
    # Four standard deviations above one in twenty.
    assert refuted <= audits * 0.05 + 4 * np.sqrt(audits * 0.05 * 0.95)


def test_a_single_number_of_guesses_has_the_level_it_says(rng):
    m, epsilon, runs = 300, 1.0, 20000
    right = rng.binomial(m, 1 / (1 + np.exp(-epsilon)), runs)
    table = np.array([p_value(m, m, v, epsilon, 0.0) for v in range(m + 1)])
    rejected = (table[right] <= 0.05).mean()
    assert 0.03 < rejected < 0.055


def test_giving_everything_away_with_probability_delta_is_within_the_level(rng):
    m, delta, runs = 100, 0.02, 20000
    right = np.where(rng.random(runs) < delta, m, rng.binomial(m, 0.5, runs))
    table = np.array([p_value(m, m, v, 0.0, delta) for v in range(m + 1)])
    for level in (0.05, 0.2, 0.5):
        assert (table[right] <= level).mean() <= level + 0.01


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_the_release_stays_below_its_claim_and_is_far_above_without_noise(adjacency, rng):
    found = one_run(spec_of(adjacency=adjacency, epsilon=2.0), canaries=2000, rng=rng)
    assert 0 < found.figure < found.ceiling == 2.0
    assert found.verdict != "FAIL"
    assert found.more["epsilon without noise"] > 4
    assert found.more["right guesses"] > found.more["guesses"] / 2
    assert found.trials == 2000 and len(found.curve) > 10


def test_more_canaries_tell_more(rng):
    spec = spec_of(epsilon=4.0)
    few, many = (one_run(spec, canaries=m, rng=rng).figure for m in (100, 5000))
    assert few < many and 1.3 < many < 4


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_too_little_noise_is_found(adjacency, a_tenth_of_the_noise, rng):
    found = one_run(spec_of(adjacency=adjacency), rng=rng)
    assert found.verdict == "FAIL"
    assert found.figure > 1.5


@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_sums_are_audited_with_the_noise_of_honest_survivors(unit, adjacency, monkeypatch, rng):
    spec = spec_of(unit=unit, adjacency=adjacency, protection="masking", min_survivors=4)
    honest = one_run(spec, canaries=300, rng=rng)
    assert honest.figure < 1 and honest.verdict != "FAIL"
    full = release.noise
    monkeypatch.setattr(release, "noise", lambda exact, sigma, draw: full(exact, sigma / 10, draw))
    assert one_run(spec, canaries=300, rng=rng).verdict == "FAIL"


def test_the_numbers_of_guesses_are_fixed_beforehand():
    scores = np.arange(1000.0)
    inside = scores >= 500
    bound, guesses, right = lower_epsilon(scores, inside, delta=1e-5, confidence=0.95)
    assert guesses == right and guesses in [round(share * 1000) for share in GUESSED]
    assert 4 < bound < np.log(1000)


@pytest.mark.parametrize(
    "wrong", [{"canaries": 5}, {"canaries": 0}, {"canaries": 1.5}, {"confidence": 1.0}]
)
def test_what_makes_no_sense_is_refused(wrong, rng):
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        one_run(SPEC, **wrong, rng=rng)


def test_a_spec_without_a_claim_has_nothing_to_audit(rng):
    with pytest.raises(ParameterError, match="NO DP CLAIM"):
        one_run(PrivacySpec.none(reason="public data"), rng=rng)


def test_what_the_audit_could_tell_does_not_depend_on_the_noise_that_was_drawn(
    a_tenth_of_the_noise, rng
):
    # A thousand canaries cannot refute half the noise; that less was drawn must not hide it.
    found = one_run(SPEC, canaries=1000, rng=rng)
    assert found.more["would have refuted half the noise"] < 0.5
