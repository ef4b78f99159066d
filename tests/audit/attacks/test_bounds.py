import numpy as np
import pytest

from secure_fedclust import ParameterError
from secure_fedclust.audit.attacks.bounds import clopper_pearson, lower_bounds, power, rates
from secure_fedclust.privacy.accounting import mu_of

DELTA = 1e-5


def worlds(mu, trials, rng):
    return rng.normal(size=trials), rng.normal(mu, size=trials)


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_bounds_exceed_the_truth_no_more_often_than_their_confidence_allows(epsilon):
    rng = np.random.default_rng(0)
    mu = mu_of(epsilon, DELTA)
    found = [lower_bounds(*worlds(mu, 400, rng), DELTA, 0.95) for _ in range(400)]
    # At most 5% in the long run; 37 of 400 would be four standard deviations more.
    assert sum(bounds.mu > mu for bounds in found) < 37
    assert sum(bounds.epsilon > epsilon for bounds in found) < 37


# Medians of fifteen: docs/results.md has the whole table.
@pytest.mark.parametrize(
    ("epsilon", "trials", "any_mechanism", "gaussian"),
    [(2.0, 5000, 0.56, 1.47), (4.0, 5000, 1.40, 3.31), (8.0, 1000, 2.25, 6.25)],
)
def test_bounds_are_about_as_good_as_published(epsilon, trials, any_mechanism, gaussian):
    rng = np.random.default_rng(1)
    mu = mu_of(epsilon, DELTA)
    found = [lower_bounds(*worlds(mu, trials, rng), DELTA, 0.95) for _ in range(15)]
    assert np.median([b.epsilon for b in found]) >= any_mechanism - 0.15
    assert np.median([b.gaussian_epsilon for b in found]) >= gaussian - 0.3


def test_randomised_response_is_bounded_without_assuming_a_gaussian():
    rng = np.random.default_rng(2)
    right = np.exp(1) / (1 + np.exp(1))
    bounds = []
    for _ in range(200):
        without = (rng.random(1000) > right).astype(float)
        present = (rng.random(1000) < right).astype(float)
        bounds.append(lower_bounds(without, present, 0.0, 0.95).epsilon)
    assert sum(bound > 1 for bound in bounds) < 24
    assert np.median(bounds) > 0.7


def test_worlds_that_never_overlap_give_a_large_finite_bound():
    bounds = lower_bounds(np.zeros(1000), np.ones(1000), DELTA, 0.95)
    assert 4 < bounds.epsilon < 10
    assert np.isfinite([bounds.mu, bounds.gaussian_epsilon]).all()


def test_a_score_that_is_met_exactly_is_noticed():
    rng = np.random.default_rng(3)
    exact, noisy = np.full(1000, -0.5), rng.normal(0.5, 1, 1000)
    assert lower_bounds(exact, noisy, DELTA, 0.95).epsilon > 3


def test_equal_worlds_give_nothing():
    rng = np.random.default_rng(4)
    bounds = lower_bounds(*worlds(0.0, 1000, rng), DELTA, 0.95)
    assert bounds.epsilon == bounds.mu == 0


def test_too_few_trials_are_refused():
    with pytest.raises(ParameterError, match="3 trials in a world"):
        lower_bounds(np.zeros(3), np.zeros(30), DELTA, 0.95)


def test_clopper_pearson_covers_what_it_should():
    rng = np.random.default_rng(5)
    for rate in (0.01, 0.3, 0.99):
        intervals = [clopper_pearson(n, 80, 0.9) for n in rng.binomial(80, rate, 500)]
        assert np.mean([low <= rate <= high for low, high in intervals]) > 0.87
    assert clopper_pearson(80, 80, 0.9)[1] == 1.0


def test_power_grows_with_trials_and_is_small_on_a_claim_that_holds():
    mu = mu_of(1.0, DELTA)
    assert power(mu, mu, 1000, 0.95) < 0.2
    assert power(2 * mu, mu, 500, 0.95) < power(2 * mu, mu, 5000, 0.95) == 1.0


def test_rates_go_from_nothing_to_everything():
    rng = np.random.default_rng(6)
    curve = rates(*worlds(1.0, 500, rng))
    assert curve[0] == (0.0, 0.0) and curve[-1] == (1.0, 1.0)
    assert sorted(curve) == list(curve)
