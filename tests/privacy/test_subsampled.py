"""What noisy training costs: never less than the truth, and not much more."""

import math
from functools import cache

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri

from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy import subsampled
from secure_fedclust.privacy.accounting import Limit, delta_of, epsilon_of, opacus_epsilon
from secure_fedclust.privacy.bulk_noise import NOISE
from secure_fedclust.privacy.charges import MAX_INPUTS
from secure_fedclust.privacy.subsampled import (
    MAX_PARTS,
    TAIL_SHARE,
    Sampling,
    Training,
    charge_of,
    equivalent_mu,
    opacus_epsilon_of,
    pld_of,
    public_rate,
    tail_rate,
    trained,
    trainings_of,
)

LIMIT = Limit.of(4.0, 1e-5)
RATE = tail_rate([LIMIT])
CASES = [
    (0.1, 2.0, 100),
    (0.1, 1.0, 100),
    (0.01, 1.0, 100),
    (0.05, 1.2, 60),
    (0.5, 17.0, 300),
    (0.9, 0.5, 10),
    (0.3, 4.0, 1),
    (0.02, 0.6, 300),
]


def training(rate, noise, steps):
    return Training(Sampling(rate, steps), noise)


@cache
def curve_of(rate, noise, steps):
    """The privacy loss of a training, by dp_accounting and finer than the costs are found with."""
    return pld_of(training(rate, noise, steps), 5e-4)


@pytest.mark.parametrize(("rate", "noise", "steps"), CASES)
def test_the_cost_covers_the_curve_at_every_epsilon(rate, noise, steps):
    mu = equivalent_mu(training(rate, noise, steps), RATE)
    tail = RATE * mu**2
    curve = curve_of(rate, noise, steps)
    for epsilon in np.linspace(0, 8 * mu + 2 * mu**2, 60):
        found = curve.get_delta_for_epsilon(float(epsilon))
        # The other curve is rounded up, too.
        assert found <= (tail + (1 - tail) * delta_of(epsilon, mu)) * (1 + 1e-3) + 1e-14


@pytest.mark.parametrize(("rate", "noise", "steps"), CASES)
def test_both_ways_of_neighbours_are_covered(rate, noise, steps):
    mu = equivalent_mu(training(rate, noise, steps), RATE)
    tail = RATE * mu**2
    curve = curve_of(rate, noise, steps)
    if rate < 1:
        assert not curve._symmetric
    for way in (curve._pmf_remove, curve._pmf_add):
        for epsilon in np.linspace(0, 6 * mu, 12):
            bound = tail + (1 - tail) * delta_of(epsilon, mu)
            assert way.get_delta_for_epsilon(float(epsilon)) <= bound * (1 + 1e-3) + 1e-14


@pytest.mark.parametrize(("rate", "noise", "steps"), CASES)
def test_a_monte_carlo_of_the_steps_finds_no_more(rate, noise, steps):
    """The privacy loss drawn from the mechanism itself, with nobody's accountant in between."""
    rng = np.random.default_rng(0)
    mu, n = equivalent_mu(training(rate, noise, steps), RATE), 20_000
    for present in (True, False):
        drawn = (rng.random((n, steps)) < rate) & present
        x = rng.normal(drawn / noise, 1.0)
        loss = np.logaddexp(np.log1p(-rate), np.log(rate) + x / noise - 0.5 / noise**2).sum(axis=1)
        loss = loss if present else -loss
        for epsilon in (0.0, mu / 2, mu):
            gain = np.maximum(0.0, -np.expm1(epsilon - loss))
            error = 5 * gain.std() / math.sqrt(n)
            assert gain.mean() - error <= delta_of(epsilon, mu) + 1e-4


@pytest.mark.parametrize(
    ("rate", "noise", "proved", "rdp", "clt"),
    [
        (0.1, 2.0, 2.338, 2.581, 2.141),
        (0.1, 1.0, 7.047, 7.904, 6.007),
        (0.01, 1.0, 0.718, 1.214, 0.458),
    ],
)
def test_known_values_are_found_and_the_normal_approximation_is_not_used(
    rate, noise, proved, rdp, clt
):
    found = training(rate, noise, 100)
    assert curve_of(rate, noise, 100).get_epsilon_for_delta(1e-5) == pytest.approx(proved, abs=1e-3)
    assert opacus_epsilon_of([found], 1e-5) == pytest.approx(rdp, abs=2e-2)
    assert epsilon_of(1e-5, subsampled._limit_mu(rate, 100, noise)) == pytest.approx(clt, abs=2e-3)
    ours = epsilon_of(1e-5, equivalent_mu(found, RATE))
    assert clt < proved < ours
    # What it is charged above the truth is bounded where rates are not tiny.
    assert ours < proved * (1.1 if rate == 0.1 else 2)


@pytest.mark.parametrize(("rate", "noise", "steps"), CASES)
def test_it_is_never_cheaper_than_the_truth_nor_dearer_than_without_sampling(rate, noise, steps):
    mu = equivalent_mu(training(rate, noise, steps), RATE)
    assert mu <= math.sqrt(steps) / noise
    for delta in (1e-3, 1e-5, 1e-7):
        room = epsilon_of(delta - RATE * mu**2, mu)
        assert curve_of(rate, noise, steps).get_epsilon_for_delta(delta) <= room * (1 + 1e-3)


def test_all_records_in_every_step_cost_what_gaussian_releases_do():
    assert equivalent_mu(training(1.0, 4.0, 25), RATE) == 1.25
    assert trained(Sampling(1.0, 25), 1.25, RATE).noise == pytest.approx(4.0)
    assert equivalent_mu(trained(Sampling(1.0, 25), 1.25, RATE), RATE) <= 1.25
    assert opacus_epsilon_of([training(1.0, 4.0, 25)], 1e-5) == pytest.approx(
        opacus_epsilon([0.25] * 25, 1e-5)
    )


@settings(max_examples=12)
@given(
    st.floats(0.02, 0.8),
    st.floats(0.7, 8.0),
    st.integers(1, 200),
    st.floats(1.05, 2.0),
)
def test_more_noise_costs_less_and_more_records_or_steps_more(rate, noise, steps, more):
    here = equivalent_mu(training(rate, noise, steps), RATE) * (1 + 2e-3)
    assert equivalent_mu(training(rate, noise * more, steps), RATE) <= here
    assert equivalent_mu(training(rate / more, noise, steps), RATE) <= here
    assert equivalent_mu(training(rate, noise, max(1, int(steps / more))), RATE) <= here


@pytest.mark.parametrize("limit", [LIMIT, Limit.of(1.0, 1e-5), Limit.of(8.0, 1e-6)])
@pytest.mark.parametrize(("rate", "steps"), [(0.05, 60), (0.1, 300), (0.5, 100), (0.9, 10), (1, 9)])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_a_training_costs_what_was_asked_or_a_little_less(limit, rate, steps, share):
    mu, tails = limit.mu * math.sqrt(share), tail_rate([limit])
    found = trained(Sampling(rate, steps), mu, tails)
    assert found.sampling == Sampling(rate, steps)
    assert mu * (1 - 3e-3) <= equivalent_mu(found, tails) <= mu
    # And not less than the truth, at the delta of the whole.
    distribution = pld_of(found, 1e-3)
    assert distribution.get_epsilon_for_delta(limit.delta) <= epsilon_of(limit.delta, mu) + 1e-3


def test_noise_is_worked_out_once():
    subsampled._noise_for.cache_clear()
    for _ in range(40):
        trained(Sampling(0.0625, 64), 0.4, RATE)
    assert subsampled._noise_for.cache_info().misses == 1


def test_a_budget_that_is_nothing_is_refused():
    with pytest.raises(ParameterError, match="leaves nothing to learn from"):
        trained(Sampling(0.5, 100), 1e-9, RATE)
    with pytest.raises(ParameterError, match="mu="):
        trained(Sampling(0.5, 100), 0.0, RATE)


def test_where_delta_is_too_small_to_work_with_it_is_said_so():
    tiny = tail_rate([Limit.of(1.0, 1e-14)])
    with pytest.raises(ParameterError, match="too small for what can be worked out"):
        trained(Sampling(0.05, 300), 0.05, tiny)
    with pytest.raises(ParameterError, match="too small for what can be worked out"):
        equivalent_mu(training(0.05, 3.0, 300), 0.0)
    assert trained(Sampling(1.0, 300), 0.05, tiny).noise > 0


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("steps", [30, 300, 3000])
def test_the_error_of_the_other_library_s_transform_is_allowed_for(mu, steps):
    """Of Gaussian steps the truth is known, out to where delta is that of a tail."""
    interval = min(max(0.05 * mu / math.sqrt(steps), 5e-5), 2e-3)
    found = pld.from_gaussian_mechanism(
        math.sqrt(steps) / mu, value_discretization_interval=interval
    ).self_compose(steps)
    allowed = subsampled._FFT_ERROR * (steps + 10)
    for deviations in np.linspace(0, 9, 30):
        epsilon = mu * deviations
        assert found.get_delta_for_epsilon(epsilon) + allowed / 4 >= delta_of(epsilon, mu)


@pytest.mark.parametrize("records", [1, 2, 5])
def test_tails_have_room_in_delta_for_groups_too(records):
    limits = [Limit.of(0.5, 1e-5), Limit.of(3.0, 1e-6)]
    rate = tail_rate(limits, records)
    for limit in limits:
        tail = rate * limit.mu**2
        grown = sum(ndtr(ndtri(tail) + i * limit.mu) for i in range(records))
        assert grown <= TAIL_SHARE * limit.delta * (1 + 1e-9)
    assert records > 1 or rate == min(TAIL_SHARE * each.delta / each.mu**2 for each in limits)


def test_tails_and_all_else_that_delta_is_set_aside_for_fit_into_it():
    for epsilon, delta in ((0.1, 1e-6), (1.0, 1e-5), (8.0, 1e-3)):
        limit = Limit.of(epsilon, delta)
        tails = tail_rate([limit]) * limit.mu**2
        gaussian = delta_of(epsilon - 2 * limit.slack, limit.mu)
        spent = math.exp(limit.slack) * (gaussian + tails)
        assert spent <= delta * (1 - 0.4e-4)


def test_a_group_is_protected_as_its_tails_were_chosen_for():
    """Two records: the curve of two that are added together, by convolution of both steps."""
    limit, records = Limit.of(1.0, 1e-5), 2
    tails = tail_rate([limit], records)
    found = trained(Sampling(0.2, 50), limit.mu, tails)
    # Both in the same direction: none, one or both are drawn.
    rate = 0.2
    group = pld.from_mixture_gaussian_mechanism(
        found.noise,
        sensitivities=[0.0, 1.0, 2.0],
        sampling_probs=[(1 - rate) ** 2, 2 * rate * (1 - rate), rate**2],
        value_discretization_interval=1e-3,
    ).self_compose(50)
    assert group.get_epsilon_for_delta(limit.delta) <= limit.group_epsilon(records)


def test_a_row_names_its_trainings_and_costs_what_the_dearest_does():
    parts = [training(0.1, 2.0, 100), training(0.2, 5.0, 50), training(0.1, 2.0, 100)]
    charge = charge_of(parts, 0.5, RATE, records=3)
    assert charge.formula == "dp_sgd/add_remove"
    assert charge.value == max(equivalent_mu(part, RATE) for part in parts) * NOISE
    assert charge.inputs["clip"] == 0.5 and charge.inputs["tail"] == RATE
    assert charge.inputs["records"] == 3
    assert trainings_of(charge.inputs) == parts[:2]


def test_a_row_has_room_for_as_many_parts_as_are_allowed():
    parts = [training(1.0, 1.0 + i, 4) for i in range(MAX_PARTS)]
    charge = charge_of(parts, 1.0, RATE)
    assert len(charge.inputs) <= MAX_INPUTS and trainings_of(charge.inputs) == parts
    for wrong in ([], [*parts, training(1.0, 0.5, 4)]):
        with pytest.raises(ParameterError, match="clusters are trained on at once"):
            charge_of(wrong, 1.0, RATE)


@pytest.mark.parametrize(
    "changed",
    [{"rate 0": 0.0}, {"steps 0": 1.5}, {"noise 0": 0.0}, {"more": 1.0}, {"rate 1": 0.5}],
)
def test_a_row_that_names_no_trainings_is_refused(changed):
    inputs = dict(charge_of([training(1.0, 2.0, 9)], 1.0, RATE).inputs) | changed
    with pytest.raises(ParameterError):
        trainings_of(inputs)
    with pytest.raises(ParameterError):
        trainings_of({"clip": 1.0})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sampling(0.0, 1),
        lambda: Sampling(1.1, 1),
        lambda: Sampling(float("nan"), 1),
        lambda: Sampling(0.5, 0),
        lambda: Sampling(0.5, 2.5),
        lambda: Sampling(0.5, 10**6),
        lambda: Training(Sampling(0.5, 1), 0.0),
        lambda: Training(Sampling(0.5, 1), float("nan")),
        lambda: public_rate(0.0, 10.0),
        lambda: public_rate(8.0, float("nan")),
    ],
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(ParameterError):
        make()


@given(st.floats(1, 1e3), st.floats(-1e6, 1e6))
def test_public_rates_are_few_and_draw_at_least_as_many_as_expected(expected, count):
    rate = public_rate(expected, count)
    assert 0 < rate <= 1
    assert math.log2(rate) * 8 == pytest.approx(round(math.log2(rate) * 8), abs=1e-9)
    if count > expected:
        wanted = expected / count
        assert wanted * (1 - 1e-9) <= rate <= wanted * 2 ** (1 / 8) * (1 + 1e-9)
    else:
        assert rate == 1.0


def test_public_rates_of_many_clusters_are_few():
    counts = np.random.default_rng(0).uniform(60, 900, 200)
    assert len({public_rate(32, count) for count in counts}) <= 33
