"""Discrete Gaussian noise by the million: exact, secret, and the same however it is asked for."""

import math

import numpy as np
import pytest
from scipy import stats

from secure_fedclust.privacy import bulk_noise
from secure_fedclust.privacy.bulk_noise import NOISE, Secret, randomness

MOST = 2**64 - 1


def words(*given):
    return np.array(given, dtype=np.uint64)


def fill(given, size=1):
    """What the sampler makes of these words, uncompiled."""
    drawn = np.zeros(size, dtype=np.int64)
    done, used = bulk_noise._fill(
        given, drawn, bulk_noise._THRESHOLDS, bulk_noise._HALF, bulk_noise._CUBE
    )
    return drawn[:done].tolist(), used


def exact(s, most):
    """Probabilities of a discrete Gaussian, from -most to most."""
    x = np.arange(-most, most + 1)
    weights = np.exp(-(x**2) / (2 * s * s))
    return x, weights / weights.sum()


def test_noise_is_normal_with_the_stated_deviation_out_to_the_tails():
    drawn = Secret().noise(1_000_000) / NOISE
    edges = np.array([-np.inf, -4.2, *np.arange(-3.5, 3.6, 0.25), 4.2, np.inf])
    seen = np.histogram(drawn, edges)[0]
    expected = np.diff(stats.norm.cdf(edges)) * len(drawn)
    assert stats.chisquare(seen, expected).pvalue > 1e-6
    assert abs(drawn.mean()) < 6e-3 and abs(drawn.std() - 1) < 5e-3
    assert abs(stats.kurtosis(drawn)) < 0.03


@pytest.mark.parametrize("bits", [1, 3])
def test_on_a_coarse_grid_every_value_has_the_probability_of_the_discrete_gaussian(
    bits, monkeypatch
):
    monkeypatch.setattr(bulk_noise, "NOISE_BITS", bits)
    monkeypatch.setattr(bulk_noise, "NOISE", 1 << bits)
    found, _ = fill(Secret().words(600_000), 100_000)
    assert len(found) == 100_000
    x, p = exact(1 << bits, 9 << bits)
    often = p * len(found) > 5
    seen = np.bincount(np.array(found) + x[-1], minlength=len(x))
    counts = [*seen[often], seen[~often].sum()]
    expected = [*p[often] * len(found), p[~often].sum() * len(found)]
    assert stats.chisquare(counts, expected).pvalue > 1e-6


def test_the_coins_have_the_stated_probabilities():
    weights = [1.0, math.exp(-0.5), math.exp(-2), math.exp(-4.5) / (1 - math.exp(-3))]
    thresholds = np.cumsum(weights) / sum(weights)
    assert bulk_noise._THRESHOLDS.dtype == np.uint64
    np.testing.assert_allclose(bulk_noise._THRESHOLDS / 2.0**64, thresholds[:3], rtol=1e-14)
    assert int(bulk_noise._HALF) / 2**64 == pytest.approx(math.exp(-0.5), rel=1e-15)
    assert int(bulk_noise._CUBE) / 2**64 == pytest.approx(math.exp(-3), rel=1e-15)


def test_numbers_far_out_are_reached_coin_by_coin():
    # Beyond the table, twice further, stop; four coins for that; place 5, plus; coins; stays.
    place = 5 << (64 - bulk_noise.NOISE_BITS)
    given = [MOST, 0, 0, MOST, *[0] * 4, place, *[0] * 5, 0]
    assert fill(words(*given)) == ([5 * NOISE + 5], len(given))
    # The third of the four coins says no: all is drawn anew, here a zero with a plus.
    again = [MOST, 0, 0, MOST, 0, 0, MOST, 0, 0, 0]
    assert fill(words(*again)) == ([0], len(again))


def test_there_are_no_two_zeros():
    assert fill(words(0, 1, 0, 2, 0)) == ([0], 5)  # minus zero is drawn anew


@pytest.mark.parametrize("size", range(15))
def test_a_number_that_the_words_do_not_suffice_for_takes_none(size):
    given = words(MOST, 0, 0, MOST, *[0] * 4, 0, *[0] * 5, 0)
    assert fill(given[:size]) == ([], 0)


def test_it_does_not_matter_how_numbers_are_asked_for():
    stream = Secret().words(40_000)
    together, apart = Secret(), Secret()
    together._left = apart._left = stream
    found = together.noise(3000)
    pieces = [apart.noise(n) for n in (1, 2, 7, 990, 2000)]
    np.testing.assert_array_equal(found, np.concatenate(pieces))
    np.testing.assert_array_equal(together._left[:5], apart._left[:5])


def test_nobody_s_seed_has_a_say():
    np.random.seed(0)
    first = [randomness(name).noise(50) for name in ("secure", "fast")]
    np.random.seed(0)
    second = [randomness(name).noise(50) for name in ("secure", "fast")]
    for ours, theirs in zip(first, second, strict=True):
        assert (ours != theirs).mean() > 0.9


def test_no_word_is_used_twice():
    secret = Secret()
    found = np.concatenate([secret.words(n) for n in (1, 100_000, 3, 40_000)])
    assert len(np.unique(found)) == len(found)


@pytest.mark.parametrize("name", ["secure", "fast"])
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.97])
def test_records_are_drawn_one_by_one_at_the_rate(name, rate):
    source = randomness(name)
    drawn = np.zeros((400, 500), dtype=bool)
    for row in drawn:
        chosen = source.choose(500, rate)
        assert (np.diff(chosen) > 0).all()
        row[chosen] = True
    assert stats.binomtest(int(drawn.sum()), drawn.size, rate).pvalue > 1e-6
    # Numbers drawn vary as those of independent records do, and neighbours do not go together.
    sizes = drawn.sum(axis=1)
    assert 0.7 < sizes.var() / (500 * rate * (1 - rate)) < 1.4
    both = (drawn[:, 1:] & drawn[:, :-1]).mean()
    assert both == pytest.approx(rate**2, abs=0.01)


def test_at_rate_one_all_are_drawn_and_of_none_none():
    for name in ("secure", "fast"):
        np.testing.assert_array_equal(randomness(name).choose(7, 1.0), np.arange(7))
        assert len(randomness(name).choose(0, 0.3)) == 0


def test_the_least_rate_draws_no_more_often_than_it_says():
    assert len(Secret().choose(100_000, 1e-30)) == 0


def test_a_number_that_takes_many_words_is_drawn_all_the_same():
    """Coins that come up the same hundreds of times are asked for again, and more each time."""
    source = Secret()
    source._left = np.zeros(500, dtype=np.uint64)
    source._left[0] = np.uint64(2**64 - 1)  # beyond the table: then three e-folds a word
    assert len(source.noise(1)) == 1
