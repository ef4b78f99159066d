import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.special import log_ndtr, logsumexp

from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.accounting import (
    MAX_COORDINATES,
    MAX_EPSILON,
    MIN_DELTA,
    MIN_EPSILON,
    MIN_NOISE,
    TAIL,
    Limit,
    classical_sigma,
    compose,
    delta_of,
    epsilon_of,
    mu_of,
    opacus_epsilon,
    pld_epsilon,
    slack_of,
    split,
)

TEN_SIGMAS = [3, 4, 5, 6, 7, 8, 9, 10, 15, 20]

epsilons = st.floats(math.log(MIN_EPSILON * 1.01), math.log(MAX_EPSILON / 1.01)).map(math.exp)
deltas = st.floats(math.log(MIN_DELTA * 1.01), math.log(0.5)).map(math.exp)
mus = st.floats(math.log(1e-6), math.log(50)).map(math.exp)


def log_tail():
    """Logarithm of what lies beyond TAIL on both sides, for either law, generously."""
    return math.log(4) + float(log_ndtr(-TAIL))


@pytest.mark.parametrize(
    ("mu", "epsilon", "delta"),
    [
        # Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu), from tables.
        (1.0, 0.0, 0.3829249225480262),
        (1.0, 1.0, 0.1269367378213585),
        (0.5, 1.0, 0.0068295),
    ],
)
def test_the_curve_has_known_values(mu, epsilon, delta):
    assert delta_of(epsilon, mu) == pytest.approx(delta, rel=2e-5)


def test_known_figures():
    assert epsilon_of(1e-5, compose([0.1] * 100)) == pytest.approx(4.3772, abs=5e-5)
    assert compose([0.1] * 100) == pytest.approx(1.0, rel=1e-12)
    assert 1 / mu_of(1.0, 1e-5) == pytest.approx(3.7306, abs=5e-5)


def test_composition_agrees_with_privacy_loss_distributions():
    pytest.importorskip("dp_accounting")
    parts = [1 / sigma for sigma in TEN_SIGMAS]
    exact = epsilon_of(1e-5, compose(parts))
    assert pld_epsilon(parts, 1e-5) == pytest.approx(exact, rel=5e-4)
    assert pld_epsilon([0.1] * 100, 1e-5) == pytest.approx(4.3772, rel=5e-4)


def test_renyi_accounting_is_above_and_not_far():
    pytest.importorskip("opacus")
    parts = [1 / sigma for sigma in TEN_SIGMAS]
    exact = epsilon_of(1e-5, compose(parts))
    assert exact < opacus_epsilon(parts, 1e-5) < 1.2 * exact


def test_the_curve_is_right_where_numbers_nearly_cancel():
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        for epsilon in (1e-6, 1e-3, 1.0, 100.0):
            for delta in (1e-30, 1e-10, 1e-3, 0.9):
                mu = mu_of(epsilon, delta)
                e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
                true = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
                # A hundredth of what Limit.of keeps back.
                assert abs(true / delta - 1) < 1e-6


@given(epsilons, mus, st.floats(1.001, 3))
def test_delta_falls_with_epsilon_and_grows_with_mu(epsilon, mu, factor):
    delta = delta_of(epsilon, mu)
    assert 0 <= delta <= 1
    # Where delta is tiny its last digits are rounding.
    assert delta_of(epsilon * factor, mu) <= delta * (1 + 1e-5)
    assert delta_of(epsilon, mu * factor) >= delta * (1 - 1e-5)


@given(epsilons, deltas)
def test_mu_and_epsilon_and_delta_invert_one_another(epsilon, delta):
    mu = mu_of(epsilon, delta)
    assert delta_of(epsilon, mu) <= delta
    assert delta_of(epsilon, mu * (1 + 1e-6)) > delta
    found = epsilon_of(delta, mu)
    assert delta_of(found, mu) <= delta
    assert found <= epsilon * (1 + 1e-6)
    assert found == pytest.approx(epsilon, rel=1e-4, abs=1e-4 * mu)


@given(mus, deltas, st.floats(1.001, 3))
def test_epsilon_grows_with_mu_and_falls_with_delta(mu, delta, factor):
    epsilon = epsilon_of(delta, mu)
    assert epsilon_of(delta, mu * factor) >= epsilon * (1 - 1e-6)
    assert epsilon_of(delta * factor, mu) <= epsilon * (1 + 1e-6)


def test_extreme_values_are_handled():
    assert delta_of(1.0, 0.0) == 0.0
    assert epsilon_of(1e-5, 0.0) == 0.0
    assert epsilon_of(0.5, 0.1) == 0.0
    assert delta_of(0.0, 100.0) == 1.0
    assert delta_of(100.0, 1e-6) == 0.0
    assert delta_of(0.0, 1e-9) == pytest.approx(1e-9 / math.sqrt(2 * math.pi), rel=1e-6)
    # By arithmetic with fifty digits.
    assert epsilon_of(1e-5, 100.0) == pytest.approx(5425.50984614743, rel=1e-12)
    assert epsilon_of(1e-5, math.inf) == math.inf


@given(st.lists(mus, min_size=1, max_size=20), st.randoms())
def test_composition_adds_squares_in_any_order(parts, random):
    total = compose(parts)
    assert total == pytest.approx(math.hypot(*parts), rel=1e-12)
    assert compose(random.sample(parts, len(parts))) == total
    assert compose([*parts, 0.0]) == total
    assert max(parts) * (1 - 1e-12) <= total <= sum(parts) * (1 + 1e-12)
    assert compose([]) == 0.0


@given(mus, st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_a_split_composes_to_the_whole(mu, shares):
    parts = split(mu, shares)
    assert compose(parts) == pytest.approx(mu, rel=1e-12)
    assert (parts[0] / mu) ** 2 == pytest.approx(shares[0] / sum(shares), rel=1e-9)


@pytest.mark.parametrize("shares", [[], [1, 0], [1, -1], [1, math.inf], [math.nan]])
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(ParameterError, match="give a positive number for each release"):
        split(1.0, shares)


@given(epsilons, deltas)
def test_a_limit_keeps_its_promise_with_slack_and_tails_all_used_up(epsilon, delta):
    limit = Limit.of(epsilon, delta)
    left = epsilon - 2 * limit.slack
    gaussian = math.exp(limit.slack) * delta_of(left, limit.mu * (1 + 5e-10))
    log_tails = math.log(limit.coordinates) + log_tail()
    tails = math.exp(log_tails) + math.exp(log_tails + left + limit.slack)
    assert gaussian + tails <= delta
    assert (limit.epsilon, limit.delta, limit.coordinates) == (epsilon, delta, MAX_COORDINATES)
    # What is kept back costs next to nothing.
    assert mu_of(epsilon, delta) * (1 - 1e-3) <= limit.mu < mu_of(epsilon, delta)


def test_tails_are_negligible_for_every_target():
    beyond = math.log(MAX_COORDINATES) + log_tail() + math.log1p(math.exp(MAX_EPSILON))
    assert beyond < math.log(1e-4 * MIN_DELTA) - 10


def test_a_limit_allows_exactly_its_totals():
    limit = Limit.of(1.0, 1e-5)
    assert limit.allows(limit.mu**2, limit.slack, limit.coordinates)
    assert limit.allows(0, 0, 0)
    assert not limit.allows(limit.mu**2 * (1 + 1e-8), 0, 0)
    assert not limit.allows(0, limit.slack * (1 + 1e-12), 0)
    assert not limit.allows(0, 0, limit.coordinates + 1)
    assert not limit.allows(math.nan, 0, 0)
    # A plan that uses all of it is not refused for the rounding of a sum.
    parts = split(limit.mu, list(range(1, 1001)))
    assert limit.allows(sum(part**2 for part in parts), 0, 0)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 9e-7, 100.1, math.inf, math.nan])
def test_an_epsilon_out_of_range_is_refused(epsilon):
    with pytest.raises(ParameterError, match="epsilon="):
        Limit.of(epsilon, 1e-5)


@pytest.mark.parametrize("delta", [0.0, -1.0, 9e-31, 1.0, math.nan])
def test_a_delta_out_of_range_is_refused(delta):
    with pytest.raises(ParameterError, match="delta="):
        Limit.of(1.0, delta)


@given(epsilons, deltas, st.integers(1, 20))
def test_a_group_pays_for_the_sum_of_its_records(epsilon, delta, size):
    limit = Limit.of(epsilon, delta)
    group = limit.group_epsilon(size)
    if size == 1:
        assert group == pytest.approx(epsilon, rel=1e-3)
    assume(group <= MAX_EPSILON)  # what lies beyond the tails is set aside up to there
    gaussian = delta_of(group - 2 * limit.slack, size * limit.mu)
    assert math.exp(limit.slack) * gaussian <= delta * (1 - 0.9e-4)
    assert group >= epsilon * (1 - 1e-3)


def discrete_logs(s, reach):
    """Logarithms of the discrete Gaussian and of the rounded one, up to so many deviations."""
    x = np.arange(math.floor(reach * s) + 1)
    weights = -(np.arange(-40 * math.ceil(s), 40 * math.ceil(s) + 1) ** 2) / (2 * s**2)
    discrete = -(x**2) / (2 * s**2) - logsumexp(weights)
    near, far = log_ndtr((0.5 - x) / s), log_ndtr((-0.5 - x) / s)
    return discrete, near + np.log(-np.expm1(far - near))


@pytest.mark.parametrize("s", [1.0, 1.5, 2.0, 5.3, 40.0, 300.0])
def test_discrete_and_rounded_gaussian_are_as_close_as_the_slack_says(s):
    discrete, rounded = discrete_logs(s, TAIL)
    apart = rounded - discrete
    slack = slack_of(s, 1)
    assert np.abs(apart).max() <= slack
    assert apart.min() >= -1 / (24 * s**2) - 1e-11
    if s >= 40:  # and no closer
        assert apart.max() >= 0.99 * slack
    assert slack_of(s, 12) == pytest.approx(12 * slack)


def discrete_delta(epsilon, s, shift):
    """Delta of the discrete Gaussian, summed up term by term."""
    x = np.arange(-math.ceil(15 * s), math.ceil(15 * s) + shift + 1)
    weights = np.exp(-(x**2) / (2 * s**2))
    shifted = np.exp(-((x - shift) ** 2) / (2 * s**2))
    excess = np.maximum(0, shifted - math.exp(epsilon) * weights)
    return math.fsum(excess) / math.fsum(weights)


@pytest.mark.parametrize(("s", "shift"), [(8, 4), (64, 32), (64, 100), (4096, 2048), (4096, 7000)])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_discrete_noise_stays_within_what_the_slack_claims(s, shift, epsilon):
    slack = slack_of(s, 1)
    claim = math.exp(slack) * delta_of(epsilon, shift / s)
    tails = math.exp(log_tail()) * (1 + math.exp(epsilon + slack))
    assert discrete_delta(epsilon + 2 * slack, s, shift) <= (claim + tails) * (1 + 1e-9)


def test_discrete_noise_without_a_fine_grid_is_not_as_private_as_the_gaussian():
    assert discrete_delta(3.2, 1, 1) > 1.5 * delta_of(3.2, 1.0)
    assert discrete_delta(1.0, MIN_NOISE, 2048) == pytest.approx(delta_of(1.0, 0.5), rel=1e-6)


def test_discrete_noise_as_dp_accounting_sees_it():
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    for s, shift in ((64, 32), (MIN_NOISE, 2048)):
        loss = pld.from_discrete_gaussian_mechanism(s, shift, value_discretization_interval=1e-4)
        slack = slack_of(s, 1)
        for epsilon in (0.5, 1.0, 2.0):
            claim = math.exp(slack) * delta_of(epsilon, shift / s)
            # Its own rounding of losses makes it a little pessimistic.
            found = loss.get_delta_for_epsilon(epsilon + 2 * slack)
            assert found <= claim * (1 + 1e-3) + 1e-12
            exact = discrete_delta(epsilon, s, shift)
            assert loss.get_delta_for_epsilon(epsilon) == pytest.approx(exact, rel=1e-3)


def test_the_textbook_formula_breaks_its_promise():
    def true_delta(epsilon, delta):
        return delta_of(epsilon, 1 / classical_sigma(epsilon, delta))

    assert true_delta(10, 1e-5) == pytest.approx(2.3e-5, rel=0.02)
    assert true_delta(20, 1e-5) == pytest.approx(1.5e-3, rel=0.05)
    assert true_delta(50, 1e-5) == pytest.approx(0.586, rel=0.01)
    for delta, first in ((1e-5, 8.420), (1e-6, 8.782), (0.01, 6.772), (0.1, 5.743)):
        assert true_delta(first - 0.002, delta) < delta < true_delta(first + 0.002, delta)
    # Where it holds it wastes noise.
    assert classical_sigma(1.0, 1e-5) * mu_of(1.0, 1e-5) == pytest.approx(1.299, abs=1e-3)
    assert classical_sigma(0.1, 1e-5) * mu_of(0.1, 1e-5) == pytest.approx(1.576, abs=1e-3)


def test_adaptively_chosen_noise_composes_as_if_it_had_been_fixed():
    """The sum of the losses of a two-step choice is normal, whatever the first step showed."""
    rng = np.random.default_rng(9)
    n, budget = 400_000, 1.0
    first = rng.normal(size=n)
    # Spend much after a high value and little after a low one, then all that is left.
    second = np.where(first > 0, 0.7, 0.1)
    third = np.sqrt(budget - 0.2 - second)
    steps = rng.normal(size=(2, n))
    total = math.sqrt(0.2) * first + np.sqrt(second) * steps[0] + third * steps[1]
    assert abs(total.mean()) < 6 / math.sqrt(n)
    assert abs((total**2).mean() - 1) < 6 * math.sqrt(2 / n)
    assert abs((total**4).mean() - 3) < 9 * math.sqrt(96 / n)
