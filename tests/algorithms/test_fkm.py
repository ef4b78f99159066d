import numpy as np

from secure_fedclust.algorithms import fkm, lloyd
from secure_fedclust.datasets import fkm_grid, iid_partition
from secure_fedclust.metrics import adjusted_rand


def test_a_step_by_index_is_a_k_means_step_on_the_union():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 3))
    centers = X[:6]
    parts = [X[i] for i in iid_partition(X, None, 4, seed=0)]
    reports = [fkm.client_sums(part, centers) for part in parts]
    federated = fkm.server_add(sum(s for s, _ in reports), sum(n for _, n in reports), centers)
    sums, counts = lloyd.assign_and_sum(X, centers)
    np.testing.assert_allclose(federated, sums / counts[:, None])


def test_a_centre_that_nobody_reports_stays():
    centers = np.array([[0.0, 0.0], [50.0, 50.0]])
    sums, counts = fkm.client_sums(np.ones((3, 2)), centers)
    np.testing.assert_array_equal(fkm.server_add(sums, counts, centers), [[1, 1], [50, 50]])


def test_small_clusters_are_not_reported():
    X = np.array([[0.0], [0.1], [9.0]])
    means, counts = fkm.client_step(X, np.array([[0.0], [9.0], [99.0]]))
    np.testing.assert_allclose(means, [[0.05]])
    assert counts.tolist() == [2]


def test_the_server_weighs_local_means_by_their_counts():
    means = np.array([[0.0], [1.0], [10.0]])
    centers = fkm.server_align(means, np.array([3, 1, 5]), 2, np.random.default_rng(0))
    np.testing.assert_allclose(np.sort(centers.ravel()), [0.25, 10.0])


def test_seeds_come_as_means_of_what_they_attract():
    X, _, _ = fkm_grid(seed=0)
    means, counts = fkm.client_seed(X, 16, np.random.default_rng(0))
    assert counts.sum() <= len(X)
    np.testing.assert_allclose((means * counts[:, None]).sum(axis=0), X.sum(axis=0), rtol=0.05)


def test_rounds_approach_central_k_means_on_the_papers_grid():
    X, y, _ = fkm_grid(seed=1)
    rng = np.random.default_rng(1)
    parts = [X[i] for i in iid_partition(X, y, 5, seed=1)]

    def align(reports):
        means, counts = (np.concatenate(column) for column in zip(*reports, strict=True))
        return fkm.server_align(means, counts, 16, rng)

    centers = align([fkm.client_seed(part, 16, rng) for part in parts])
    for _ in range(5):
        centers = align([fkm.client_step(part, centers) for part in parts])
    assert adjusted_rand(y, lloyd.assign(X, centers)) > 0.93
