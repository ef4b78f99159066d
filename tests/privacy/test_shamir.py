"""Sharing a secret: enough shares give it back, and one fewer says nothing at all."""

import secrets
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from secure_fedclust import ParameterError
from secure_fedclust.privacy import shamir

UNLIKELY = 1e-7
"""How often a statistical test may fail although all is well."""


@st.composite
def sharings(draw):
    """A secret, how it is shared, and who comes together again."""
    n = draw(st.integers(2, 40))
    threshold = draw(st.integers(2, n))
    order = draw(st.permutations(range(1, n + 1)))
    more = draw(st.integers(threshold, n))
    return draw(st.binary(min_size=1, max_size=64)), n, threshold, order[:more]


def joined(shares, points):
    """The secret that the holders of these points find."""
    rows = shares[np.asarray(points) - 1]
    [found] = shamir.join(shamir.weights(points), rows[:, None])
    return found


def uniformity(values, n_values):
    """Probability of counts at least this uneven, were all values equally likely."""
    counts = np.bincount(values, minlength=n_values)
    expected = len(values) / n_values
    return chi2.sf(np.square(counts - expected).sum() / expected, n_values - 1)


@given(sharings())
def test_any_holders_that_are_enough_get_the_secret_back(sharing):
    secret, n, threshold, points = sharing
    shares = shamir.split(secret, n, threshold)
    assert (shares.shape, shares.dtype) == ((n, len(secret)), np.uint16)
    assert shares.max() < shamir.PRIME
    assert joined(shares, points) == secret


def test_every_subset_of_a_small_cohort_opens_the_secret_if_it_is_large_enough():
    secret = bytes(range(32))
    shares = shamir.split(secret, 6, 4)
    for size in range(1, 7):
        for points in combinations(range(1, 7), size):
            assert (joined(shares, points) == secret) == (size >= 4)


@pytest.mark.parametrize("threshold", [2, 700, 1500])
def test_large_cohorts_are_shared_exactly(threshold):
    secret = secrets.token_bytes(64)
    shares = shamir.split(secret, 1500, threshold)
    points = np.random.default_rng(0).permutation(1500)[:threshold] + 1
    assert joined(shares, points.tolist()) == secret


def test_floating_point_products_stay_exact_at_the_largest_size():
    n = shamir.MOST_HOLDERS
    worst = np.full((n, 1, 1), shamir.PRIME - 1, dtype=np.uint16)
    weights = np.full(n, shamir.PRIME - 1.0)
    exact = n * (shamir.PRIME - 1) ** 2
    assert exact < 2**53
    assert shamir.join(weights, worst) == [
        bytes([exact % shamir.PRIME]) if exact % shamir.PRIME < 256 else None
    ]


def test_a_secret_is_joined_with_many_others_at_once():
    together = [secrets.token_bytes(32) for _ in range(5)]
    shares = np.stack([shamir.split(secret, 7, 3) for secret in together], axis=1)
    points = [2, 7, 5]
    found = shamir.join(shamir.weights(points), shares[np.array(points) - 1])
    assert found == together


def test_a_threshold_of_one_gives_the_secret_to_everybody():
    shares = shamir.split(b"for all", 3, 1)
    assert {joined(shares, [point]) for point in (1, 2, 3)} == {b"for all"}


def test_secrets_without_bytes_are_shared_like_any_other():
    shares = shamir.split(b"", 3, 2)
    assert joined(shares, [1, 3]) == b""


# What too few shares say.


PRIME = 7


@pytest.fixture
def small_prime(monkeypatch):
    """Over a small prime every polynomial there is can be tried."""
    monkeypatch.setattr(shamir, "PRIME", PRIME)
    shamir._powers.cache_clear()
    yield monkeypatch
    shamir._powers.cache_clear()


def occurrences(monkeypatch, secret, n, threshold, n_shares):
    """How often each list of shares occurs, for each set of holders, over all coefficients."""
    seen = {holders: Counter() for holders in combinations(range(n), n_shares)}
    for drawn in product(range(PRIME), repeat=threshold - 1):
        monkeypatch.setattr(shamir, "_uniform", lambda size, drawn=drawn: np.array(drawn))
        shares = shamir.split(bytes([secret]), n, threshold)[:, 0]
        for holders, counter in seen.items():
            counter[tuple(shares[list(holders)].tolist())] += 1
    return seen


@pytest.mark.parametrize(("n", "threshold"), [(3, 2), (5, 2), (4, 3), (4, 4)])
def test_one_share_too_few_is_distributed_alike_whatever_the_secret(small_prime, n, threshold):
    found = [occurrences(small_prime, s, n, threshold, threshold - 1) for s in range(PRIME)]
    assert found == found[:1] * PRIME
    for counter in found[0].values():
        assert set(counter.values()) == {1}
        assert len(counter) == PRIME ** (threshold - 1)


def test_as_many_shares_as_the_threshold_do_depend_on_the_secret(small_prime):
    """The test above would see it if they did."""
    found = [occurrences(small_prime, s, 4, 3, 3) for s in range(PRIME)]
    assert all(one != other for one, other in combinations(found, 2))


@pytest.mark.parametrize("secret", [0, 255])
def test_too_few_real_shares_of_two_secrets_are_equally_uniform(secret):
    """A joint chi-square of two shares of three that are needed, 16 by 16 cells."""
    shares = shamir.split(bytes([secret]) * 60_000, 5, 3)
    for first, second in ((0, 1), (1, 4)):
        cells = [shares[i].astype(np.int64) * 16 // shamir.PRIME for i in (first, second)]
        assert uniformity(16 * cells[0] + cells[1], 256) > UNLIKELY


# Randomness.


def test_coefficients_are_uniform_below_the_prime():
    drawn = shamir._uniform(1_000_000)
    assert drawn.max() < shamir.PRIME
    assert uniformity(drawn, shamir.PRIME) > UNLIKELY
    # Reduced modulo the prime, the fifteen smallest would come twice as often.
    assert uniformity(drawn[drawn < 256], 256) > UNLIKELY


def test_what_is_not_below_the_prime_is_drawn_again_not_reduced(monkeypatch):
    queue = [65535, 65521, 65520, 7, 65530, 3, 4]

    def scripted(size):
        taken = [queue.pop(0) for _ in range(size // 2)]
        return np.array(taken, dtype="<u2").tobytes()

    monkeypatch.setattr(secrets, "token_bytes", scripted)
    assert shamir._uniform(4).tolist() == [65520, 7, 3, 4]
    assert queue == []


def test_randomness_is_of_the_system_fresh_and_enough_for_every_coefficient(monkeypatch):
    asked = []
    real = secrets.token_bytes
    monkeypatch.setattr(secrets, "token_bytes", lambda size: asked.append(size) or real(size))
    first, second = (shamir.split(bytes(32), 5, 4) for _ in range(2))
    assert sum(asked) >= 2 * (2 * 3 * 32)
    assert (first != second).mean() > 0.99


def test_bytes_of_one_secret_are_shared_independently():
    shares = shamir.split(bytes(64), 4, 3)
    assert len(set(shares[0].tolist())) > 50


# What is refused, and what is not a secret.


@pytest.mark.parametrize(
    ("n", "threshold"), [(3, 0), (3, 4), (3, -1), (0, 0), (0, 1), (shamir.MOST_HOLDERS + 1, 2)]
)
def test_a_threshold_that_cannot_be_is_refused(n, threshold):
    with pytest.raises(ParameterError, match=rf"threshold={threshold} of {n} shares"):
        shamir.split(b"secret", n, threshold)


@pytest.mark.parametrize("points", [[1, 1], [0, 1], [-1, 2], [1, shamir.PRIME], [1, 1 << 20]])
def test_points_that_nobody_holds_are_refused(points):
    with pytest.raises(ParameterError, match="points="):
        shamir.weights(points)


@given(sharings(), st.integers(0, 2**32 - 1))
def test_foreign_shares_give_other_bytes_or_none_and_never_an_error(sharing, seed):
    secret, n, _, points = sharing
    rng = np.random.default_rng(seed)
    foreign = rng.integers(0, 1 << 16, (n, len(secret)), dtype=np.uint16)
    found = joined(foreign, points)
    assert found is None or len(found) == len(secret)


@settings(max_examples=50)
@given(st.integers(2, 9), st.integers(0, 1 << 16))
def test_one_wrong_share_among_right_ones_never_gives_the_secret(threshold, change):
    secret = bytes(range(32))
    shares = shamir.split(secret, threshold, threshold)
    wrong = (shares[0].astype(np.int64) + 1 + change % (shamir.PRIME - 1)) % shamir.PRIME
    shares[0] = wrong.astype(np.uint16)
    assert joined(shares, list(range(1, threshold + 1))) != secret


def test_shares_of_two_secrets_do_not_mix():
    one, other = (shamir.split(bytes(32), 3, 2) for _ in range(2))
    mixed = np.stack([one[0], other[1], one[2]])
    assert joined(mixed, [1, 2]) != bytes(32)
