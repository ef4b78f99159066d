import numpy as np

from secure_fedclust.algorithms import kfed


def test_farthest_first_takes_the_outermost_points():
    points = np.array([[0.0], [1.0], [5.0], [11.0], [10.0]])
    assert kfed.farthest_first(points, np.array([0]), 3).tolist() == [0, 3, 2]


def test_a_start_larger_than_asked_is_thinned():
    points = np.array([[0.0], [0.1], [9.0], [50.0]])
    assert kfed.farthest_first(points, np.array([0, 1, 2]), 2).tolist() == [0, 2]


def test_clients_with_different_clusters_are_put_together():
    rng = np.random.default_rng(0)
    truth = np.array([[0.0, 0], [20, 0], [0, 20], [20, 20]])
    held = [(0, 1), (1, 2), (2, 3), (3, 0)]
    local = [
        kfed.client_cluster(
            np.repeat(truth[list(h)], 30, axis=0) + rng.normal(size=(60, 2)), 2, rng
        )
        for h in held
    ]
    owners = np.repeat(np.arange(4), 2)
    centers = kfed.server_cluster(np.concatenate(local), owners, 4, rng)
    distances = np.linalg.norm(centers[:, None] - truth, axis=2)
    assert sorted(distances.argmin(axis=1)) == [0, 1, 2, 3]
    assert distances.min(axis=1).max() < 1


def test_equal_local_centres_give_fewer_clusters_and_no_nan():
    same = np.ones((4, 2))
    centers = kfed.server_cluster(same, np.array([0, 0, 1, 1]), 3, np.random.default_rng(0))
    np.testing.assert_array_equal(centers, [[1, 1]])


def test_the_search_may_start_from_any_client():
    local = np.array([[0.0], [1.0], [10.0], [12.0], [30.0], [33.0]])
    owners = np.array([0, 0, 1, 1, 2, 2])
    found = {
        tuple(np.sort(kfed.server_cluster(local, owners, 2, np.random.default_rng(s)).ravel()))
        for s in range(20)
    }
    assert len(found) == 3
