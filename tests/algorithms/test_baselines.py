import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from secure_fedclust.algorithms.baselines import (
    central_gmm,
    central_kmeans,
    client_fuzzy_cmeans,
    client_fuzzy_step,
    ffcm,
    matched_averaging,
    server_average,
    server_kmeans,
    server_match,
)
from secure_fedclust.datasets import dirichlet_partition, iid_partition, stochastic_balls
from secure_fedclust.metrics import adjusted_rand, matched_center_distance


@pytest.fixture(scope="module")
def balls():
    return stochastic_balls(1200, 2, 5, 6.0, seed=1)


def divided(X, parts):
    return [X[part] for part in parts]


def fuzzy_objective(X, centers, m):
    """The least sum of memberships^m times squared distances that these centres allow."""
    squared = np.maximum(cdist(X, centers, "sqeuclidean"), 1e-300)
    return float(np.sum(np.sum(squared ** (-1 / (m - 1)), axis=1) ** (1 - m)))


def test_matched_averaging_recovers_balls_that_all_clients_hold(balls):
    X, y, true = balls
    clients = divided(X, iid_partition(X, y, 4, seed=0))
    distances = [
        matched_center_distance(matched_averaging(clients, 5, np.random.default_rng(s)), true)
        for s in range(5)
    ]
    assert np.median(distances) < 0.5


def test_matching_averages_centroids_whatever_their_order():
    rng = np.random.default_rng(0)
    places = 100 * rng.normal(size=(6, 3))
    sent = [places + rng.normal(size=(6, 3)) for _ in range(4)]
    shuffled = [sent[0], *(rng.permutation(centers) for centers in sent[1:])]
    np.testing.assert_allclose(server_match(shuffled), np.mean(sent, axis=0))


def test_a_client_with_fewer_centroids_is_matched_to_some_and_is_no_reference():
    full = np.array([[0.0], [10.0], [20.0]])
    found = server_match([np.array([[21.0]]), full, full + 2])
    np.testing.assert_allclose(found, [[1.0], [11.0], [21.0]])


def test_baselines_cope_with_clients_that_have_fewer_records_than_clusters(balls):
    X, _, true = balls
    clients = [X[:1], X[1:3], X[3:600], X[600:]]
    rng = np.random.default_rng(0)
    assert matched_averaging(clients, 5, rng).shape == true.shape
    assert matched_center_distance(ffcm(clients, 5, rng, average="kmeans"), true) < 1
    assert np.isfinite(ffcm(clients, 5, rng)).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(1.2, 4))
def test_a_fuzzy_step_never_raises_the_objective(seed, m):
    rng = np.random.default_rng(seed)
    X, centers = rng.normal(size=(40, 3)), rng.normal(size=(4, 3))
    stepped, _ = client_fuzzy_step(X, centers, m)
    before = fuzzy_objective(X, centers, m)
    assert fuzzy_objective(X, stepped, m) <= before * (1 + 1e-9)


def test_a_fuzzy_step_follows_the_formula():
    X, centers = np.array([[0.0], [1.0], [4.0]]), np.array([[-1.0], [3.0]])
    u = np.array([[9 / 10, 1 / 10], [4 / 8, 4 / 8], [1 / 26, 25 / 26]])
    stepped, weights = client_fuzzy_step(X, centers)
    np.testing.assert_allclose(weights, (u**2).sum(axis=0))
    np.testing.assert_allclose(stepped[:, 0], (u**2 * X).sum(axis=0) / (u**2).sum(axis=0))


def test_records_on_a_centre_belong_to_it_alone_and_coincident_centres_share_them():
    X = np.array([[0.0], [0.0], [6.0]])
    stepped, weights = client_fuzzy_step(X, np.array([[0.0], [0.0], [6.0], [99.0]]))
    np.testing.assert_array_equal(stepped, [[0.0], [0.0], [6.0], [99.0]])
    np.testing.assert_array_equal(weights, [0.5, 0.5, 1.0, 0.0])


def test_fuzzy_cmeans_settles_where_another_step_moves_little(balls):
    X, _, true = balls
    centers, weights = client_fuzzy_cmeans(X, true + 1.0)
    again, _ = client_fuzzy_step(X, centers)
    assert np.abs(again - centers).max() < 1e-3
    assert matched_center_distance(centers, true) < 0.5
    assert 0 < weights.sum() <= len(X)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5))
def test_averaging_after_a_single_step_is_a_step_on_the_union(seed, n_clients):
    rng = np.random.default_rng(seed)
    X, centers = rng.normal(size=(60, 2)), rng.normal(size=(3, 2))
    replies = [client_fuzzy_step(part, centers) for part in np.array_split(X, n_clients)]
    averaged = server_average([c for c, _ in replies], [w for _, w in replies], centers)
    np.testing.assert_allclose(averaged, client_fuzzy_step(X, centers)[0])


def test_a_centre_that_weighs_nothing_anywhere_stays_in_the_average():
    local = [np.array([[1.0], [5.0]]), np.array([[3.0], [7.0]])]
    weights = [np.array([1.0, 0.0]), np.array([3.0, 0.0])]
    averaged = server_average(local, weights, np.array([[0.0], [9.0]]))
    np.testing.assert_allclose(averaged, [[2.5], [9.0]])


def test_kmeans_on_centres_does_not_look_at_their_order(balls):
    _, _, true = balls
    rng = np.random.default_rng(0)
    local = np.concatenate([true + 0.1 * rng.normal(size=true.shape) for _ in range(6)])
    one = server_kmeans(local, 5, np.random.default_rng(1))
    other = server_kmeans(rng.permutation(local), 5, np.random.default_rng(2))
    assert matched_center_distance(one, other) < 1e-9


def test_kmeans_on_centres_recovers_balls_that_clients_hold_unequally(balls):
    X, y, true = balls
    clients = divided(X, dirichlet_partition(X, y, 6, 0.2, seed=3))
    rng = np.random.default_rng(0)
    by_kmeans = matched_center_distance(ffcm(clients, 5, rng, average="kmeans"), true)
    by_index = matched_center_distance(ffcm(clients, 5, rng, average="centers"), true)
    assert by_kmeans < 1 < by_index


def test_ffcm_is_the_same_for_the_same_seed(balls):
    X, y, _ = balls
    clients = divided(X, iid_partition(X, y, 3, seed=0))
    first, second = (ffcm(clients, 5, np.random.default_rng(7), n_rounds=2) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_central_baselines_find_well_separated_balls(balls):
    X, y, true = balls
    rng = np.random.default_rng(0)
    assert matched_center_distance(central_kmeans(X, 5, rng), true) < 0.5
    scores = [adjusted_rand(y, central_gmm(X, 5, rng).predict(X)) for _ in range(5)]
    assert max(scores) > 0.99
