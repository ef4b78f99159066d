import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from secure_fedclust.datasets import (
    cluster_subset_partition,
    dirichlet_partition,
    distance_partition,
    fkm_grid,
    iid_partition,
    load_benchmark,
    rmin_blobs,
)
from secure_fedclust.errors import DataError, ParameterError

PARTITIONS = {
    "iid": iid_partition,
    "dirichlet": lambda X, y, m, *, seed: dirichlet_partition(X, y, m, 0.5, seed=seed),
    "distance": lambda X, y, m, *, seed: distance_partition(X, y, m, 1.0, seed=seed),
    "subset": cluster_subset_partition,
    "shares": lambda X, y, m, *, seed: cluster_subset_partition(
        X, y, m, client_shares=np.full(m, 1 / m), cluster_imbalance=True, seed=seed
    ),
}


def each_partition(names=tuple(PARTITIONS)):
    return pytest.mark.parametrize("partition", [PARTITIONS[n] for n in names], ids=names)


@each_partition()
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), m=st.integers(1, 8))
def test_every_client_has_records_and_no_row_goes_to_two(partition, seed, m):
    X, y, _ = rmin_blobs(300, 2, 5, 2.0, seed=seed)
    parts = partition(X, y, m, seed=seed)
    assert len(parts) == m
    assert all(part.dtype == np.int64 and len(part) for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)
    rows = np.concatenate(parts)
    assert len(np.unique(rows)) == len(rows)
    assert rows.min() >= 0
    assert rows.max() < 300


@each_partition(("iid", "dirichlet", "distance"))
def test_every_row_is_given_to_somebody(partition):
    X, y, _ = fkm_grid(seed=0)
    assert sum(map(len, partition(X, y, 7, seed=1))) == len(X)


@each_partition()
def test_the_seed_decides(partition):
    X, y, _ = fkm_grid(seed=0)
    one, same, other = (partition(X, y, 5, seed=s) for s in (1, np.random.default_rng(1), 2))
    assert all(map(np.array_equal, one, same))
    assert not all(map(np.array_equal, one, other))


@each_partition(("iid", "dirichlet", "distance", "subset"))
@pytest.mark.parametrize("m", [0, -1, 2.0, True, 801])
def test_impossible_numbers_of_clients_are_refused(partition, m):
    X, y, _ = fkm_grid(seed=0)
    with pytest.raises(ParameterError, match="n_clients"):
        partition(X, y, m, seed=0)


@each_partition()
def test_labels_that_do_not_match_the_records_are_refused(partition):
    X, y, _ = fkm_grid(seed=0)
    with pytest.raises(DataError, match=r"800 rows and y has shape \(799,\)"):
        partition(X, y[:-1], 3, seed=0)


@each_partition(("dirichlet", "subset"))
def test_partitions_by_class_need_labels(partition):
    with pytest.raises(DataError, match="y is None"):
        partition(np.zeros((9, 2)), None, 3, seed=0)


@each_partition(("iid", "distance"))
def test_partitions_that_ignore_labels_need_none(partition):
    X, _, _ = fkm_grid(seed=0)
    assert len(partition(X, None, 3, seed=0)) == 3


def test_iid_sizes_differ_by_one_at_most_and_classes_are_mixed():
    y = np.repeat([0, 1], 5000)
    parts = iid_partition(np.zeros((10_000, 1)), y, 7, seed=0)
    assert {len(part) for part in parts} == {1428, 1429}
    # Six standard deviations of a hypergeometric share.
    assert all(abs(y[part].mean() - 0.5) < 6 * 0.5 / np.sqrt(1428) for part in parts)


def test_dirichlet_shares_have_the_dirichlet_distribution():
    n_classes, m, alpha = 200, 4, 0.5
    y = np.repeat(np.arange(n_classes), 500)
    parts = dirichlet_partition(np.zeros((len(y), 1)), y, m, alpha, seed=0)
    shares = np.bincount(y[parts[2]], minlength=n_classes) / 500
    # A client's share of a class is Beta(alpha, (m - 1) alpha), up to rounding to 1/500.
    marginal = stats.beta(alpha, (m - 1) * alpha)
    grid = np.array([0.05, 0.1, 0.3, 0.6, 0.9])
    found = (shares[:, None] <= grid).mean(axis=0)
    assert np.abs(found - marginal.cdf(grid)).max() < 0.12
    assert abs(shares.mean() - 1 / m) < 0.08


def test_a_smaller_alpha_leaves_clients_with_fewer_classes(data_dir):
    s1 = load_benchmark("s1", data_dir)

    def classes(alpha):
        parts = dirichlet_partition(s1.X, s1.y, 10, alpha, seed=0)
        return np.mean([len(np.unique(s1.y[part])) for part in parts])

    assert classes(0.1) < 9
    assert 10 < classes(0.3) < 14
    assert classes(100.0) == 15


def test_dirichlet_draws_again_until_every_client_has_enough():
    y = np.repeat(np.arange(5), 40)
    for seed in range(20):
        parts = dirichlet_partition(np.zeros((200, 1)), y, 10, 0.3, min_size=5, seed=seed)
        assert min(map(len, parts)) >= 5


def test_dirichlet_says_what_to_change_when_no_draw_will_do():
    y = np.zeros(50, dtype=int)
    with pytest.raises(DataError, match="lower n_clients or raise alpha"):
        dirichlet_partition(np.zeros((50, 1)), y, 40, 0.001, seed=0)


@pytest.mark.parametrize("bad", [0, -1.0, np.nan, np.inf, "1"])
def test_alpha_and_beta_must_be_positive(bad):
    X, y, _ = fkm_grid(seed=0)
    with pytest.raises(ParameterError, match="alpha"):
        dirichlet_partition(X, y, 5, bad, seed=0)
    with pytest.raises(ParameterError, match="beta"):
        distance_partition(X, y, 5, bad, seed=0)


def test_min_size_must_fit_the_data():
    X, y, _ = fkm_grid(seed=0)
    with pytest.raises(ParameterError, match="more than 800"):
        dirichlet_partition(X, y, 5, 1.0, min_size=161, seed=0)


def clusters_a_client(beta, seed):
    X, y, _ = fkm_grid(seed=seed)
    parts = distance_partition(X, y, 5, beta, seed=seed)
    return np.mean([len(np.unique(y[part])) for part in parts])


def test_beta_of_a_tenth_gives_a_client_eight_to_eleven_clusters_of_the_grid():
    assert 8 < np.mean([clusters_a_client(0.1, seed) for seed in range(30)]) < 11
    assert np.mean([clusters_a_client(10.0, seed) for seed in range(5)]) == 16


def test_a_tiny_beta_gives_each_record_to_the_nearest_client():
    X, _, _ = fkm_grid(seed=0)
    places = np.array([[-5.0, -5.0], [5.0, 5.0], [5.0, -5.0]])
    parts = distance_partition(X, None, 3, 1e-9, locations=places, seed=0)
    nearest = np.linalg.norm(X[:, None] - places, axis=2).argmin(axis=1)
    assert all(np.array_equal(part, np.flatnonzero(nearest == c)) for c, part in enumerate(parts))


def test_acceptance_follows_the_papers_formula():
    # All records at distance 2 from client 0 and 4 from client 1, which is worked out by hand.
    X = np.zeros((20_000, 1))
    beta = 1.5
    accept = 1 - np.exp(-beta / np.array([2.0, 4.0]))
    both, none = accept.prod(), (1 - accept).prod()
    expected = accept[0] * (1 - accept[1]) + both / 2 + none
    parts = distance_partition(X, None, 2, beta, locations=[[2.0], [-4.0]], seed=0)
    assert abs(len(parts[0]) / len(X) - expected) < 6 * 0.5 / np.sqrt(len(X))


def test_a_record_at_a_clients_own_place_is_always_accepted():
    X = np.array([[0.0], [1.0], [1.0], [1.0]])
    parts = distance_partition(X, None, 2, 1e-12, locations=[[0.0], [1.0]], seed=0)
    assert [part.tolist() for part in parts] == [[0], [1, 2, 3]]


def test_locations_must_have_a_row_per_client():
    X, _, _ = fkm_grid(seed=0)
    with pytest.raises(ParameterError, match=r"\(5, 2\)"):
        distance_partition(X, None, 5, 1.0, locations=np.zeros((4, 2)), seed=0)


def test_a_client_out_of_reach_is_an_error_that_says_what_to_change():
    X, _, _ = fkm_grid(seed=0)
    with pytest.raises(DataError, match="move locations"):
        distance_partition(X, None, 2, 1e-9, locations=[[0.0, 0.0], [1e6, 0.0]], seed=0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), m=st.integers(3, 12), k=st.integers(3, 9))
def test_drawn_numbers_of_local_clusters_lie_in_two_to_k_less_one(seed, m, k):
    y = np.repeat(np.arange(k), 40)
    parts = cluster_subset_partition(np.zeros((len(y), 1)), y, m, seed=seed)
    held = [len(np.unique(y[part])) for part in parts]
    assert min(held) >= 2
    assert max(held) < k
    if sum(held) >= k:
        assert sum(map(len, parts)) == len(y)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_cluster_is_held_wherever_the_hands_suffice(seed):
    y = np.repeat(np.arange(10), 30)
    parts = cluster_subset_partition(
        np.zeros((300, 1)), y, 4, n_local_clusters=[2, 2, 3, 3], seed=seed
    )
    assert [len(np.unique(y[part])) for part in parts] == [2, 2, 3, 3]
    assert sum(map(len, parts)) == 300


def test_holders_of_a_cluster_get_equal_parts_of_it():
    y = np.repeat(np.arange(6), [50, 51, 52, 53, 54, 55])
    parts = cluster_subset_partition(np.zeros((len(y), 1)), y, 8, seed=3)
    counts = np.array([np.bincount(y[part], minlength=6) for part in parts])
    for column in counts.T:
        sizes = column[column > 0]
        assert sizes.max() - sizes.min() <= 1


def test_too_few_hands_leave_clusters_out():
    y = np.repeat(np.arange(10), 30)
    parts = cluster_subset_partition(np.zeros((300, 1)), y, 2, n_local_clusters=3, seed=0)
    assert sum(map(len, parts)) == 6 * 30


SHARES = [0.4, 0.24, 0.16, 0.16, 0.04]


@pytest.mark.parametrize("seed", range(10))
def test_client_shares_are_met_and_local_clusters_balanced(seed):
    X, y, _ = rmin_blobs(25_000, 2, 10, 4.0, seed=seed)
    parts = cluster_subset_partition(X, y, 5, client_shares=SHARES, seed=seed)
    sizes = np.array([len(part) for part in parts])
    np.testing.assert_allclose(sizes / sizes.sum(), SHARES, atol=0.002)
    for part in parts:
        counts = np.unique(y[part], return_counts=True)[1]
        assert counts.max() - counts.min() <= 1
    used = np.bincount(y[np.concatenate(parts)], minlength=10)
    # One cluster is used up: no more rows could be given out in these proportions.
    assert (2500 - used).min() <= 5


def local_spread(**arguments):
    X, y, _ = rmin_blobs(25_000, 2, 10, 4.0, seed=0)
    parts = cluster_subset_partition(X, y, 5, n_local_clusters=5, seed=0, **arguments)
    counts = [np.unique(y[part], return_counts=True)[1] for part in parts]
    return np.mean([c.std() / c.mean() for c in counts])


def test_cluster_imbalance_makes_local_clusters_unequal():
    assert local_spread(client_shares=[0.2] * 5) < 0.01
    # Uniform proportions have a coefficient of variation of 1/sqrt(3).
    assert 0.35 < local_spread(client_shares=[0.2] * 5, cluster_imbalance=True) < 0.8
    assert local_spread(cluster_imbalance=True) > local_spread() + 0.1


@pytest.mark.parametrize(
    "shares", [[0.5, 0.5], [0.5, 0.3, 0.3], [1.0, 0.5, -0.5], [0.5, 0.5, 0.0], [np.nan] * 3]
)
def test_shares_that_are_no_shares_are_refused(shares):
    with pytest.raises(ParameterError, match="client_shares"):
        cluster_subset_partition(
            np.zeros((9, 1)), np.arange(9) % 3, 3, client_shares=shares, seed=0
        )


@pytest.mark.parametrize("number", [0, 4, 1.5, [1, 2], [1, 2, 4], [[1, 1, 1]]])
def test_impossible_numbers_of_local_clusters_are_refused(number):
    with pytest.raises(ParameterError, match="n_local_clusters"):
        cluster_subset_partition(
            np.zeros((9, 1)), np.arange(9) % 3, 3, n_local_clusters=number, seed=0
        )


def test_two_clusters_leave_nothing_to_draw():
    with pytest.raises(DataError, match="pass n_local_clusters"):
        cluster_subset_partition(np.zeros((8, 1)), np.arange(8) % 2, 2, seed=0)


def test_waveform_clients_hold_two_of_the_three_classes(data_dir):
    waveform = load_benchmark("waveform_v1", data_dir)
    parts = cluster_subset_partition(waveform.X, waveform.y, 5, seed=0)
    assert [len(np.unique(waveform.y[part])) for part in parts] == [2] * 5
    assert sum(map(len, parts)) == 5000
