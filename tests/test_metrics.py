import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fedclust import metrics
from secure_fedclust.datasets import fkm_grid
from secure_fedclust.errors import DataError, ParameterError
from secure_fedclust.metrics import (
    accuracy,
    adjusted_rand,
    client_simplified_silhouette,
    estimated_k,
    matched_center_distance,
    nicv,
    normalized_mutual_info,
    purity,
    server_simplified_silhouette,
    silhouette,
    simplified_silhouette,
    weighted_client_score,
)

LABEL_SCORES = [adjusted_rand, normalized_mutual_info, purity, accuracy]

pairs = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40)
seeds = st.integers(0, 10**6)


def columns(pair):
    return np.array(pair).T


@pytest.mark.parametrize("score", LABEL_SCORES)
@given(pair=pairs, seed=seeds)
def test_renaming_labels_changes_no_score(score, pair, seed):
    y, labels = columns(pair)
    names = np.random.default_rng(seed).permutation(100)[:5]
    assert score(y, names[labels]) == pytest.approx(score(y, labels), abs=1e-12)
    assert score(names[y], labels) == pytest.approx(score(y, labels), abs=1e-12)


@pytest.mark.parametrize("score", LABEL_SCORES)
@given(pair=pairs)
def test_scores_stay_in_their_range_and_reach_one(score, pair):
    y, labels = columns(pair)
    low = -0.5 if score is adjusted_rand else 0.0
    assert low - 1e-12 <= score(y, labels) <= 1 + 1e-12
    assert score(y, y) == pytest.approx(1.0)


@given(pair=pairs)
def test_accuracy_is_the_best_naming_found_by_trying_all(pair):
    y, labels = columns(pair)
    best = max((np.array(name)[labels] == y).mean() for name in itertools.permutations(range(5)))
    assert accuracy(y, labels) == pytest.approx(best)
    assert accuracy(y, labels) <= purity(y, labels) + 1e-12


@given(pair=pairs)
def test_mutual_information_is_normalised_by_the_mean_entropy(pair):
    y, labels = columns(pair)

    def entropy(values):
        p = np.unique(values, return_counts=True, axis=0)[1] / len(values)
        return -(p * np.log(p)).sum()

    h_y, h_labels, joint = entropy(y), entropy(labels), entropy(np.array(pair))
    expected = 1.0 if h_y + h_labels == 0 else 2 * (h_y + h_labels - joint) / (h_y + h_labels)
    assert normalized_mutual_info(y, labels) == pytest.approx(expected, abs=1e-9)


def test_scores_worked_out_by_hand():
    y, labels = [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]
    assert purity(y, labels) == pytest.approx(5 / 6)
    assert accuracy(y, labels) == pytest.approx(4 / 6)
    # Agreeing pairs 2, expected 3 * 6 / 15, highest (3 + 6) / 2.
    assert adjusted_rand(y, labels) == pytest.approx((2 - 1.2) / (4.5 - 1.2))


def test_labels_may_be_names_or_floats():
    assert adjusted_rand(["a", "a", "b"], [0.5, 0.5, 1.5]) == 1.0


def test_estimated_k_counts_different_labels():
    assert estimated_k([3, 3, 9, -1]) == 3
    assert estimated_k(["a"]) == 1


@settings(deadline=None)
@given(clients=st.lists(pairs, min_size=1, max_size=4))
def test_the_weighted_client_score_is_weighted_by_size(clients):
    truths, labels = zip(*map(columns, clients), strict=True)
    expected = sum(purity(y, x) * len(y) for y, x in zip(truths, labels, strict=True))
    expected /= sum(map(len, truths))
    assert weighted_client_score(purity, truths, labels) == pytest.approx(expected)


def test_a_clients_score_does_not_depend_on_the_others_labels():
    truths = [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert weighted_client_score(adjusted_rand, truths, [[0, 0, 1, 1], [1, 1, 0, 0]]) == 1.0


@settings(deadline=None)
@given(seed=seeds, n_clients=st.integers(1, 5), k=st.integers(2, 6), d=st.integers(1, 4))
def test_the_federated_simplified_silhouette_equals_the_pooled_one(seed, n_clients, k, d):
    rng = np.random.default_rng(seed)
    clients = [rng.normal(size=(rng.integers(1, 30), d)) for _ in range(n_clients)]
    centers = rng.normal(size=(k, d))
    sums, counts = zip(*(client_simplified_silhouette(X, centers) for X in clients), strict=True)
    pooled = simplified_silhouette(np.vstack(clients), centers)
    assert server_simplified_silhouette(sums, counts) == pytest.approx(pooled, abs=1e-12)
    assert 0 <= pooled <= 1


@given(seed=seeds)
def test_the_simplified_silhouette_follows_its_definition(seed):
    rng = np.random.default_rng(seed)
    X, centers = rng.normal(size=(20, 2)), rng.normal(size=(4, 2))
    distances = np.linalg.norm(X[:, None] - centers, axis=2)
    own = distances.argmin(axis=1)
    a = distances[np.arange(20), own]
    distances[np.arange(20), own] = np.inf
    b = distances.min(axis=1)
    assert simplified_silhouette(X, centers) == pytest.approx(((b - a) / np.maximum(a, b)).mean())


def test_centres_that_coincide_with_a_record_score_nothing():
    assert simplified_silhouette([[1.0, 2.0]], [[1.0, 2.0], [1.0, 2.0]]) == 0.0


def test_silhouettes_tell_good_clusters_from_bad():
    X, y, centers = fkm_grid(20, 0.3, seed=0)
    assert silhouette(X, y) > 0.8
    assert simplified_silhouette(X, centers) > 0.8
    assert silhouette(X, np.arange(len(X)) % 16) < 0
    assert simplified_silhouette(X, centers + 2.5) < 0.3


def test_a_sampled_silhouette_is_near_the_full_one_and_repeats():
    X, y, _ = fkm_grid(50, 0.5, seed=0)
    sampled = silhouette(X, y, sample_size=400, seed=3)
    assert sampled != silhouette(X, y)
    assert sampled == pytest.approx(silhouette(X, y), abs=0.03)
    assert sampled == silhouette(X, y, sample_size=400, seed=np.random.default_rng(3))
    assert silhouette(X, y, sample_size=10**6) == silhouette(X, y)


def test_a_sample_too_small_for_two_clusters_is_refused():
    with pytest.raises(ParameterError, match="sample_size=-1"):
        silhouette(np.ones((9, 1)), np.arange(9) % 2, sample_size=-1)


@given(seed=seeds, k=st.integers(1, 8))
def test_the_order_of_found_centres_does_not_matter(seed, k):
    rng = np.random.default_rng(seed)
    true, found = rng.normal(size=(2, k, 2))
    shuffled = matched_center_distance(rng.permutation(found), true)
    assert shuffled == pytest.approx(matched_center_distance(found, true))
    assert matched_center_distance(rng.permutation(true), true) == 0.0


@given(seed=seeds)
def test_centres_are_matched_at_the_least_cost(seed):
    true, found = np.random.default_rng(seed).normal(size=(2, 4, 2))
    best = min(np.linalg.norm(found[list(p)] - true) for p in itertools.permutations(range(4)))
    assert matched_center_distance(found, true) == pytest.approx(best)


def test_surplus_centres_are_ignored_and_lost_ones_count_to_the_nearest():
    true = np.array([[0.0, 0.0], [10.0, 0.0], [13.0, 0.0]])
    assert matched_center_distance(np.vstack([[[50.0, 50.0]], true]), true) == 0.0
    assert matched_center_distance(true[:2], true) == pytest.approx(3.0)
    assert matched_center_distance(true[:1], true) == pytest.approx(np.hypot(10, 13))


@given(seed=seeds, k=st.integers(1, 6))
def test_nicv_is_the_mean_squared_distance_to_the_nearest_centre(seed, k):
    rng = np.random.default_rng(seed)
    X, centers = rng.normal(size=(30, 3)), rng.normal(size=(k, 3))
    expected = ((X[:, None] - centers) ** 2).sum(axis=2).min(axis=1).mean()
    assert nicv(X, centers) == pytest.approx(expected)


def test_nicv_does_not_lose_digits_far_from_the_origin():
    assert nicv([[1e8 + 1.0], [1e8 - 1.0]], [[1e8]]) == 1.0


def test_block_borders_change_nothing(monkeypatch):
    X, _, centers = fkm_grid(10, seed=0)
    whole = nicv(X, centers), simplified_silhouette(X, centers)
    monkeypatch.setattr(metrics, "_DISTANCES_AT_ONCE", 16 * 7)
    assert (nicv(X, centers), simplified_silhouette(X, centers)) == pytest.approx(whole)


@pytest.mark.parametrize("score", LABEL_SCORES)
@pytest.mark.parametrize(
    ("y", "labels", "fragment"),
    [
        ([0, 1], [0], "y has 2 entries and labels 1"),
        ([], [], r"y has shape \(0,\)"),
        ([[0, 1]], [0, 1], r"y has shape \(1, 2\)"),
        ([0], 0, r"labels has shape \(\)"),
    ],
)
def test_labels_that_do_not_match_are_refused(score, y, labels, fragment):
    with pytest.raises(DataError, match=fragment):
        score(y, labels)


@pytest.mark.parametrize(
    ("compute", "fragment"),
    [
        (lambda: estimated_k([]), "labels has shape"),
        (lambda: weighted_client_score(purity, [], []), "0 clients"),
        (lambda: weighted_client_score(purity, [[0]], [[0], [0]]), "1 clients.*of 2"),
        (lambda: weighted_client_score(purity, [[0], []], [[0], []]), "y has shape"),
        (lambda: nicv(np.ones((0, 2)), np.ones((1, 2))), "^X: .*0 sample"),
        (lambda: nicv(np.ones((3, 2)), np.ones((0, 2))), "^centers: .*0 sample"),
        (lambda: nicv(np.ones((3, 2)), np.ones((1, 3))), "^centers: X has 3 features.*2"),
        (lambda: nicv([[np.nan]], [[0.0]]), "^X: .*NaN"),
        (lambda: matched_center_distance([[1.0]], [[1.0, 2.0]]), "^true: .*"),
        (lambda: simplified_silhouette([[1.0]], [[1.0]]), "at least 2"),
        (lambda: server_simplified_silhouette([1.0], [1, 2]), "1 sums and 2 counts"),
        (lambda: server_simplified_silhouette([], []), "at least one record"),
        (lambda: silhouette(np.ones((3, 2)), [0, 1]), "3 records and labels 2"),
        (lambda: silhouette(np.ones((3, 2)), [0, 0, 0]), "1 clusters among 3"),
        (lambda: silhouette(np.ones((3, 2)), [0, 1, 2]), "3 clusters among 3"),
    ],
)
def test_inputs_without_a_score_are_refused(compute, fragment):
    with pytest.raises(DataError, match=fragment):
        compute()
