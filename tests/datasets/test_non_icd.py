import numpy as np
import pytest

from secure_fedclust.datasets.non_icd import non_icd_degree, non_icd_partition
from secure_fedclust.errors import DataError, ParameterError


@pytest.fixture(scope="module")
def labelled():
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(5), 120)
    return rng.normal(size=(600, 3)) + 8 * y[:, None], y


def test_each_client_gets_increasing_rows_that_exist_and_no_row_twice(labelled):
    X, y = labelled
    parts = non_icd_partition(X, y, 20, seed=1)
    assert len(parts) == 20
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
        assert 0 <= part[0] and part[-1] < len(X)
        assert 2 <= len(part) <= 0.75 * len(X)


def test_clients_draw_independently_so_rows_may_be_shared(labelled):
    parts = non_icd_partition(*labelled, 20, seed=1)
    assert len(np.unique(np.concatenate(parts))) < sum(map(len, parts))


def test_clients_see_different_numbers_of_clusters(labelled):
    X, y = labelled
    seen = {len(np.unique(y[part])) for part in non_icd_partition(X, y, 40, seed=2)}
    assert seen == {1, 2, 3, 4, 5}


def test_clients_hold_pieces_of_a_cluster_and_not_samples_of_the_whole():
    X = np.linspace(0, 1, 400)[:, None]
    parts = non_icd_partition(X, np.zeros(400), 15, seed=0)
    gaps = [np.diff(X[part, 0], prepend=0, append=1).max() for part in parts]
    # A sample of a quarter of the whole leaves no gap near a fifth of it; a missing piece does.
    assert np.mean(np.array(gaps) > 0.1) > 0.5


def test_a_partition_is_repeated_by_its_seed(labelled):
    first, again, other = (non_icd_partition(*labelled, 4, seed=s) for s in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_clients_of_tiny_clusters_still_get_two_records():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(12, 2)), np.repeat(np.arange(4), 3)
    assert all(len(part) >= 2 for part in non_icd_partition(X, y, 30, seed=0))


def test_equal_records_are_one_piece():
    parts = non_icd_partition(np.ones((40, 2)), np.zeros(40), 5, seed=0)
    assert all(10 <= len(part) <= 30 for part in parts)


def test_labels_may_be_names():
    X = np.random.default_rng(0).normal(size=(40, 2))
    assert len(non_icd_partition(X, np.repeat(["cat", "dog"], 20), 3, seed=0)) == 3


def test_data_too_small_to_be_sampled_are_refused():
    with pytest.raises(DataError, match="fewer than 2 records"):
        non_icd_partition(np.eye(2), [0, 1], 1, seed=0)


def test_labels_that_do_not_fit_the_records_are_refused():
    with pytest.raises(DataError, match="rows must match"):
        non_icd_partition(np.eye(3), [0, 1], 1, seed=0)


def test_no_clients_are_refused(labelled):
    with pytest.raises(ParameterError, match="n_clients"):
        non_icd_partition(*labelled, 0, seed=0)


def test_degree_is_zero_for_equal_clients_and_one_for_distant_ones():
    X = np.random.default_rng(0).normal(size=(60, 3))
    assert non_icd_degree([X, X, X]) == pytest.approx(0, abs=1e-12)
    assert non_icd_degree([X, X + 100, X - 100]) == pytest.approx(1, abs=1e-6)


def test_degree_is_a_mean_over_pairs():
    X = np.random.default_rng(0).normal(size=(60, 2))
    assert non_icd_degree([X, X, X + 100]) == pytest.approx(2 / 3, abs=1e-6)


def test_degree_depends_neither_on_the_order_of_clients_nor_on_the_unit_of_measurement():
    rng = np.random.default_rng(0)
    parts = [rng.normal(m, 1, (50, 2)) for m in (0, 1, 2)]
    degree = non_icd_degree(parts)
    assert non_icd_degree(parts[::-1]) == pytest.approx(degree)
    assert non_icd_degree([1000 * part + 7 for part in parts]) == pytest.approx(degree, rel=1e-6)


def test_degree_grows_as_clients_move_apart():
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(2, 200, 2))
    degrees = [non_icd_degree([X, Y + shift]) for shift in (0, 1, 2, 4, 8)]
    assert degrees == sorted(degrees)
    assert degrees[0] < 0.1
    assert degrees[-1] > 0.99


@pytest.mark.parametrize("d", [2, 10, 30])
def test_fragmented_clients_score_above_random_ones_in_few_and_many_features(d):
    rng = np.random.default_rng(d)
    y = np.repeat(np.arange(4), 200)
    X = rng.normal(size=(800, d)) + rng.normal(0, 2, (4, d))[y]
    random_parts = np.array_split(rng.permutation(800), 6)
    fragments = non_icd_partition(X, y, 6, seed=d)
    at_random = non_icd_degree([X[part] for part in random_parts])
    assert at_random < 0.02
    assert non_icd_degree([X[part] for part in fragments]) > 0.1


def test_degree_of_equal_records_is_a_number():
    assert non_icd_degree([np.full((3, 2), 0.1), np.full((5, 2), 0.1)]) == pytest.approx(0)
    assert non_icd_degree([np.zeros((3, 2)), np.ones((5, 2))]) == pytest.approx(1)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [np.eye(3)],
        [np.eye(3), np.eye(2)],
        [np.eye(3), np.ones((1, 3))],
        [np.eye(3), np.full((2, 3), np.nan)],
    ],
)
def test_parts_without_comparable_densities_are_refused(parts):
    with pytest.raises(DataError):
        non_icd_degree(parts)
