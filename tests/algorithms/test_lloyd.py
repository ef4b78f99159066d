import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from secure_fedclust.algorithms import lloyd


def literal_step(X, centers):
    labels = ((X[:, None] - centers) ** 2).sum(axis=2).argmin(axis=1)
    sums = np.stack([X[labels == k].sum(axis=0) for k in range(len(centers))])
    return labels, sums, np.bincount(labels, minlength=len(centers))


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 6), st.integers(1, 4))
def test_a_step_sums_the_records_nearest_to_each_centre(seed, n, k, d):
    rng = np.random.default_rng(seed)
    X, centers = rng.normal(size=(n, d)), rng.normal(size=(k, d))
    labels, sums, counts = literal_step(X, centers)
    found_sums, found_counts = lloyd.assign_and_sum(X, centers)
    np.testing.assert_array_equal(lloyd.assign(X, centers), labels)
    np.testing.assert_array_equal(found_counts, counts)
    np.testing.assert_allclose(found_sums, sums, atol=1e-12)


@pytest.mark.parametrize("far_away", [False, True])
def test_a_large_step_gives_the_same_also_with_an_empty_centre(far_away):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40_000, 3))
    centers = X[:5].copy()
    centers[2] += 100 * far_away
    _, sums, counts = literal_step(X, centers)
    found_sums, found_counts = lloyd.assign_and_sum(X, centers)
    assert (counts[2] == 0) == far_away
    np.testing.assert_array_equal(found_counts, counts)
    np.testing.assert_allclose(found_sums, sums, atol=1e-9)


def test_weights_count_like_repeated_points():
    points = np.array([[0.0], [1.0], [10.0]])
    centers, labels = lloyd.kmeans(points, 2, np.random.default_rng(0), weights=np.array([3, 1, 1]))
    assert sorted(centers.ravel()) == [0.25, 10.0]
    assert labels[0] == labels[1] != labels[2]


@pytest.mark.parametrize("n_clusters", [1, 2, 3, 50])
def test_there_are_never_more_centres_than_different_points(n_clusters):
    X = np.repeat([[0.0, 0.0], [1.0, 1.0]], 20, axis=0)
    rng = np.random.default_rng(0)
    assert len(lloyd.kmeans(X, n_clusters, rng)[0]) == min(n_clusters, 2)
    assert len(lloyd.kmeans_seeds(X, n_clusters, rng)) == min(n_clusters, 2)


def test_different_points_are_found_behind_many_equal_ones():
    X = np.zeros((100, 1))
    X[-1] = 1
    assert lloyd.count_distinct(X, 2) == 2
    assert lloyd.count_distinct(X, 5) == 2
    assert lloyd.count_distinct(np.arange(100.0)[:, None], 5) == 5


@pytest.mark.parametrize("offset", [0.0, 1e6, 1e9, 1e12])
def test_a_step_is_as_exact_far_from_the_origin(offset):
    rng = np.random.default_rng(0)
    X, centers = rng.normal(size=(200, 2)), rng.normal(size=(4, 2))
    labels, _, counts = literal_step(X, centers)
    np.testing.assert_array_equal(lloyd.assign(X + offset, centers + offset), labels)
    sums, found = lloyd.assign_and_sum(X + offset, centers + offset)
    np.testing.assert_array_equal(found, counts)
    np.testing.assert_allclose(sums.sum(axis=0), (X + offset).sum(axis=0))
