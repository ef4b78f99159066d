import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from secure_fedclust.algorithms import fedcref

# Few different values, so that ties are common.
ERRORS = arrays(
    np.float64,
    array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12),
    elements=st.integers(0, 4).map(float),
)


def algorithm_2(errors, n_clusters):
    """Model of each record, by the steps of Algorithm 2 in the order in which they are printed."""
    models = list(range(errors.shape[1]))
    left = list(range(len(errors)))
    taken, found = [], {}
    for _ in range(min(n_clusters, len(models))):
        best = {k: min(models, key=lambda j: errors[k, j]) for k in left}
        most = max(models, key=lambda j: list(best.values()).count(j))
        for k in [k for k in left if best[k] == most]:
            found[k] = most
            left.remove(k)
        taken.append(most)
        models.remove(most)
        if not left:
            break
    for k in left:
        found[k] = min(sorted(taken), key=lambda j: errors[k, j])
    return sorted(taken), [found[k] for k in range(len(errors))]


@given(ERRORS, st.integers(1, 6))
def test_refinement_by_counts_is_algorithm_2(errors, n_clusters):
    chosen, labels = fedcref.refine(errors, n_clusters)
    taken, models = algorithm_2(errors, n_clusters)
    assert chosen.tolist() == taken
    assert chosen[labels].tolist() == models


def test_a_model_that_is_best_for_no_record_is_not_chosen():
    assert fedcref.choose(np.array([5, 0, 3, 0]), 3).tolist() == [0, 2]


def test_among_equal_counts_the_first_models_are_chosen():
    assert fedcref.choose(np.array([1, 2, 2, 2]), 2).tolist() == [1, 2]


def test_one_model_is_chosen_even_if_noise_leaves_no_count_positive():
    assert fedcref.choose(np.array([-3.0, -0.5, -2.0]), 2).tolist() == [1]


def test_relative_closeness_compares_with_the_records_own_error():
    own = np.array([1.0, 10.0])
    others = np.array([[1.3, 0.7, 1.1], [11.3, 10.7, 13.0]])
    found = fedcref.close(own, others, 0.2, "relative")
    assert found.tolist() == [[False, False, True], [True, True, False]]


def test_relative_closeness_of_a_record_does_not_depend_on_other_records():
    rng = np.random.default_rng(0)
    own, others = rng.random(30), rng.random((30, 5))
    whole = fedcref.close(own, others, 0.2, "relative")
    for i in range(30):
        alone = fedcref.close(own[i : i + 1], others[i : i + 1], 0.2, "relative")
        assert np.array_equal(alone[0], whole[i])


def test_minmax_closeness_maps_the_differences_of_each_model_to_the_unit_range():
    own = np.zeros(4)
    others = np.array([[5.0, 50], [6, 10], [10, 20], [15, 11]])
    found = fedcref.close(own, others, 0.2, "minmax")
    assert found.T.tolist() == [[True, True, False, False], [False, True, False, True]]


@pytest.mark.parametrize("normalisation", ["relative", "minmax"])
def test_a_model_is_close_to_itself(normalisation):
    own = np.random.default_rng(0).random(10)
    assert fedcref.close(own, own[:, np.newaxis], 0.2, normalisation).all()


@pytest.mark.parametrize("normalisation", ["relative", "minmax"])
def test_an_infinite_error_is_never_close(normalisation):
    own = np.array([1.0, np.inf])
    found = fedcref.close(own, np.array([[np.inf, 1.0], [np.inf, 1.0]]), 0.2, normalisation)
    assert not found[:, 0].any()
    assert not found[1].any()


@pytest.mark.parametrize("normalisation", ["relative", "minmax"])
def test_an_empty_cluster_has_no_close_records(normalisation):
    assert fedcref.close(np.empty(0), np.empty((0, 3)), 0.2, normalisation).shape == (0, 3)


def test_links_are_two_way_and_between_clients():
    shares = np.array([[1, 0.9, 0.8, 0.75], [0.9, 1, 0.1, 0.7], [0.75, 0.9, 1, 0.9], [0.9] * 4])
    found = fedcref.links(shares, np.array([0, 0, 1, 2]), 0.75)
    assert np.argwhere(found).tolist() == [[0, 2], [0, 3], [2, 0], [2, 3], [3, 0], [3, 2]]


def test_groups_are_components_numbered_as_they_appear():
    links = np.zeros((7, 7), dtype=bool)
    for a, b in ((1, 6), (2, 5), (5, 4)):
        links[a, b] = links[b, a] = True
    assert fedcref.groups(links).tolist() == [-1, 0, 1, -1, 1, 1, 0]


def test_without_links_every_cluster_is_isolated():
    assert fedcref.groups(np.zeros((3, 3), dtype=bool)).tolist() == [-1, -1, -1]


def test_agreement_ignores_names():
    old = np.array([0, 0, 1, 1, 2, 2])
    assert fedcref.agreement(old, (old + 1) % 3) == 1
    assert fedcref.agreement(old, np.array([0, 0, 1, 1, 1, 1])) == pytest.approx(4 / 6)


def test_agreement_allows_different_numbers_of_labels():
    old = np.array([0, 0, 0, 1])
    assert fedcref.agreement(old, np.array([0, 1, 2, 3])) == 0.5
    assert fedcref.agreement(np.array([0, 1, 2, 3]), old) == 0.5


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([(10, 0), (10, 0)], False),
        ([(10, 0), (10, 0), (10, 0)], True),
        ([(3, 9), (10, 0), (9, 0), (10, 0)], True),
        ([(10, 0), (8, 0), (10, 0)], False),
        ([(10, 1), (10, 0), (10, 0)], False),
        ([(10, 0), (10, 0), (10, 0), (10, 5)], False),
    ],
)
def test_a_federation_has_settled_after_three_like_iterations(history, expected):
    assert fedcref.settled(history) is expected


def test_dirt_replaces_labels_by_others_with_its_probability():
    labels = np.repeat(np.arange(4), 5000)
    found = fedcref.dirty(labels, 0.3, np.random.default_rng(0), 4)
    wrong = found != labels
    assert abs(wrong.mean() - 0.3) < 5 * np.sqrt(0.3 * 0.7 / 20000)
    steps = np.bincount((found - labels)[wrong] % 4, minlength=4)
    assert steps[0] == 0
    assert steps[1:].min() > 0.9 * steps[1:].max()


def test_total_dirt_leaves_no_label_and_none_leaves_all():
    labels = np.arange(100) % 3
    assert (fedcref.dirty(labels, 1, np.random.default_rng(0), 3) != labels).all()
    assert (fedcref.dirty(labels, 0, np.random.default_rng(0), 3) == labels).all()


def test_a_single_cluster_cannot_be_dirtied():
    labels = np.zeros(10, dtype=np.int64)
    assert (fedcref.dirty(labels, 1, np.random.default_rng(0), 1) == 0).all()
