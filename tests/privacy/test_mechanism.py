"""Statistical tests fail by chance less than once in a million runs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.accounting import MIN_NOISE, slack_of
from secure_fedclust.privacy.mechanism import (
    FINE_BITS,
    LARGEST_RADIUS,
    USEFUL_NOISE,
    Bounded,
    Noisy,
    add_up,
    clip_rows,
    exponent_for,
    fast_noise,
    noise,
    noise_level,
    sampler_named,
    secure_noise,
)
from secure_fedclust.privacy.queries import CellSums
from secure_fedclust.privacy.sensitivity import sums

SIX = 6.0
"""Standard errors: a normal number is further off once in five hundred million times."""


def bounded(sensitivity=2.0**20, **fields):
    exact = {name: np.asarray(field, dtype=np.int64) for name, field in fields.items()}
    return Bounded(exact, sums(sensitivity, "add_remove"), -20)


@pytest.fixture(scope="module")
def drawn():
    """Noise of both samplers, many draws and all at once."""
    sigma = 2.0**13 + 0.3
    return sigma, {"secure": secure_noise(sigma, 60_000), "fast": fast_noise(sigma, 400_000)}


@pytest.mark.parametrize("name", ["secure", "fast"])
def test_noise_is_whole_unbiased_and_as_wide_as_asked_for(drawn, name):
    sigma, draws = drawn[0], drawn[1][name]
    n = len(draws)
    assert draws.dtype == np.int64
    assert abs(draws.mean()) < SIX * sigma / math.sqrt(n)
    assert abs(np.mean((draws / sigma) ** 2) - 1) < SIX * math.sqrt(2 / n)


@pytest.mark.parametrize("name", ["secure", "fast"])
def test_noise_has_the_tails_of_a_normal_law(drawn, name):
    sigma, draws = drawn[0], drawn[1][name]
    n = len(draws)
    # The fourth power of a standard normal has variance 105 - 9.
    assert abs(np.mean((draws / sigma) ** 4) - 3) < 1.5 * SIX * math.sqrt(96 / n)
    assert stats.kstest(draws / sigma, "norm").pvalue > 1e-7
    # Among n draws the largest is beyond 7 sigma with probability below n * 2.6e-12.
    assert 3.0 < np.abs(draws).max() / sigma < 7.0


@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_the_secure_sampler_draws_from_the_discrete_gaussian(sigma):
    draws = secure_noise(sigma, 30_000)
    values = np.arange(-60, 61)
    pmf = np.exp(-(values**2) / (2 * sigma**2))
    pmf /= pmf.sum()
    # Values too rare for a bin of their own share one.
    common = len(draws) * pmf > 50
    expected = len(draws) * np.append(pmf[common], pmf[~common].sum())
    found = [*(np.sum(draws == value) for value in values[common])]
    found.append(len(draws) - sum(found))
    assert expected.min() > 5
    assert stats.chisquare(found, expected).pvalue > 1e-7


def test_a_wrong_width_would_be_noticed():
    """The margins above are no wider than they need be."""
    draws = fast_noise(2.0**13 * 1.05, 60_000)
    assert abs(np.mean((draws / 2.0**13) ** 2) - 1) > SIX * math.sqrt(2 / 60_000)


def correlation(first, second):
    return np.corrcoef(first.ravel(), second.ravel())[0, 1]


@pytest.mark.parametrize("name", ["secure", "fast"])
def test_noise_of_fields_releases_and_clients_is_independent(name):
    n = 12_000
    sampler = sampler_named(name)
    one, other = bounded(sums=np.zeros((n // 3, 3)), counts=np.zeros(n)), bounded(sums=np.zeros(n))
    sigma = 5000.0
    first, again = noise(one, sigma, sampler), noise(other, sigma, sampler)
    noises = [first.fields["sums"], first.fields["counts"], again.fields["sums"]]
    for i in range(3):
        for j in range(i):
            assert abs(correlation(noises[i], noises[j])) < SIX / math.sqrt(n)
        lagged = noises[i].ravel()
        assert abs(correlation(lagged[1:], lagged[:-1])) < SIX / math.sqrt(n)


@pytest.mark.parametrize("name", ["secure", "fast"])
def test_a_seed_set_by_somebody_does_not_repeat_noise(name):
    np.random.seed(1)
    first = sampler_named(name)(5000.0, 20)
    np.random.seed(1)
    assert np.any(first != sampler_named(name)(5000.0, 20))


def test_every_number_gets_a_draw_of_its_own():
    def counting(sigma, size):
        assert sigma == 4321.5
        return np.arange(1000, 1000 + size)

    exact = bounded(sums=[[1, 2], [3, 4], [0, 0]], counts=[7, 0, 0], empty=[])
    noisy = noise(exact, 4321.5, counting)
    assert isinstance(noisy, Noisy)
    assert exact.coordinates == 9
    assert (noisy.exponent, noisy.sigma) == (-20, 4321.5)
    assert noisy.fields["sums"].tolist() == [[1001, 1003], [1005, 1007], [1004, 1005]]
    assert noisy.fields["counts"].tolist() == [1013, 1007, 1008]
    assert noisy.fields["empty"].tolist() == []
    assert exact.fields["counts"].tolist() == [7, 0, 0]


@pytest.mark.parametrize("name", ["secure", "fast"])
def test_empty_cells_are_noised_and_everything_released_is_whole(name):
    query = CellSums(np.arange(100.0)[:, None], 0.4, 1.0)
    exponent = exponent_for(query.sensitivity("add_remove").value, 0.5)
    exact = query.answer(np.zeros((3, 1)), "add_remove", exponent)
    sigma, _ = noise_level(exact, 0.5)
    noisy = noise(exact, sigma, sampler_named(name))
    assert noisy.fields.keys() == {"sums", "counts"}
    for field in noisy.fields.values():
        assert field.dtype == np.int64
        empty = field[1:].ravel() / sigma
        # One draw is 0 with probability 2e-7.
        assert np.sum(empty == 0) <= 2
        assert 0.5 < np.mean(empty**2) < 2.1  # chi-square with 99 degrees of freedom


def test_noise_is_added_to_bounded_statistics_only():
    exact = bounded(sums=[1, 2])
    for wrong in (exact.fields, exact.fields["sums"], [1.0], 3, noise(exact, 5000.0, fast_noise)):
        with pytest.raises(TypeError, match="noise is added to Bounded statistics, not to"):
            noise(wrong, 5000.0, fast_noise)


def test_the_level_of_noise_is_sensitivity_over_mu_and_its_slack_counts_every_number():
    exact = bounded(sums=np.zeros((4, 5)), counts=np.zeros(4))
    sigma, slack = noise_level(exact, 0.25)
    assert sigma == exact.sensitivity.value / 0.25
    assert slack == slack_of(sigma, 24) == pytest.approx(24 * 21**2 / 24 / sigma**2)


@pytest.mark.parametrize("mu", [256.01, 1e9, math.inf, math.nan, -1.0])
def test_noise_too_fine_for_the_grid_is_refused(mu):
    with pytest.raises(ParameterError, match="from 4096 to"):
        noise_level(bounded(sums=[0]), mu)
    assert noise_level(bounded(sums=[0]), 255.9)[0] >= MIN_NOISE


@given(st.floats(1e-9, 1e9), st.floats(1e-6, 1e4))
def test_the_grid_is_fine_enough_and_not_much_finer(sensitivity, mu):
    exponent = exponent_for(sensitivity, mu)
    steps = math.ldexp(sensitivity, -exponent)
    room = min(steps / 2**FINE_BITS, steps / mu / MIN_NOISE)
    noise = steps / mu
    assert room < 2 + 1e-12 and noise < 2 * USEFUL_NOISE * (1 + 1e-12)
    assert room >= 1 - 1e-12 or noise >= USEFUL_NOISE * (1 - 1e-12)


rows = arrays(
    float, st.tuples(st.integers(0, 5), st.integers(1, 4)), elements=st.floats(-1e12, 1e12)
)


@given(rows, st.integers(1, LARGEST_RADIUS))
def test_rows_are_never_longer_than_the_radius_and_lose_no_more_than_truncation(X, radius):
    clipped = clip_rows(X, radius)
    assert clipped.dtype == np.int64
    assert clipped.shape == X.shape
    for row, short in zip(X, clipped, strict=True):
        assert sum(int(value) ** 2 for value in short) <= radius**2
        length = math.sqrt(math.fsum(row**2))
        wanted = row * min(1, radius / max(length, 1.0))
        assert np.all(np.abs(short) <= np.abs(wanted) * (1 + 1e-9))
        assert np.all(np.abs(wanted - short) <= 2 + 1e-9 * np.abs(wanted))


@given(rows, st.integers(1, LARGEST_RADIUS))
def test_a_row_is_clipped_alike_wherever_it_stands(X, radius):
    clipped = clip_rows(X, radius)
    np.testing.assert_array_equal(clip_rows(X[::-1], radius), clipped[::-1])
    for i in range(len(X)):
        np.testing.assert_array_equal(clip_rows(X[i : i + 1], radius)[0], clipped[i])


def test_rows_whose_length_rounds_up_are_cut_back():
    # In floats the length of the second is 2^30 as well: its square needs 61 bits.
    clipped = clip_rows(np.array([[2.0**30, 0.0], [2.0**30, 1.0]]), 2**30)
    assert clipped.tolist() == [[2**30, 0], [2**30 - 1, 0]]
    # Sixteen equal parts of a length that is no whole number.
    clipped = clip_rows(np.full((1, 16), 1e12), LARGEST_RADIUS)
    assert clipped.tolist() == [[LARGEST_RADIUS // 4] * 16]
    # Nothing but truncation happens inside.
    assert clip_rows(np.array([[2.9, -2.9, 5e-324]]), 5).tolist() == [[2, -2, 0]]


@pytest.mark.parametrize("radius", [0, -1, LARGEST_RADIUS + 1])
def test_a_radius_that_exact_squares_cannot_handle_is_refused(radius):
    with pytest.raises(ParameterError, match=f"radius={radius}: give 1 to"):
        clip_rows(np.zeros((1, 1)), radius)


@given(arrays(np.int64, (7, 2), elements=st.integers(-(2**50), 2**50)), st.randoms())
def test_sums_by_cell_are_exact_in_any_order(contributions, random):
    cells = np.array([random.randrange(4) for _ in range(7)])
    expected = [
        [sum(int(v) for v in contributions[cells == cell, j]) for j in range(2)]
        for cell in range(4)
    ]
    assert add_up(contributions, cells, 4).tolist() == expected
    order = random.sample(range(7), 7)
    assert add_up(contributions[order], cells[order], 4).tolist() == expected
    assert add_up(contributions[:0], cells[:0], 4).tolist() == [[0, 0]] * 4
