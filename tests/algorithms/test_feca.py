import numpy as np
import pytest

from secure_fedclust.algorithms import feca
from secure_fedclust.datasets import iid_partition, stochastic_balls
from secure_fedclust.metrics import matched_center_distance


def clusters_of(*groups):
    centers = np.stack([g.mean(axis=0) for g in groups])
    squared = [np.square(g - c).sum(axis=1) for g, c in zip(groups, centers, strict=True)]
    return feca.Clusters(
        centers,
        np.array([len(g) for g in groups]),
        np.array([s.sum() for s in squared]),
        np.array([np.sqrt(s.max()) for s in squared]),
    )


def blob(x, y=0.0, n=20, seed=0):
    return np.array([x, y]) + np.random.default_rng(seed).uniform(-1, 1, (n, 2))


def test_a_centroid_between_two_clusters_is_dropped():
    between = np.concatenate([blob(0), blob(20)])
    split = blob(40, n=40)
    found = feca.client_refine(clusters_of(between, split[:20], split[20:], blob(60)))
    assert len(found.centers) == 3
    assert not np.any(np.abs(found.centers[:, 0] - 10) < 2)


def test_a_good_solution_is_left_alone():
    good = clusters_of(blob(0), blob(20), blob(40))
    assert len(feca.client_refine(good).centers) == 3


def test_the_merged_objective_is_that_of_the_union():
    """Refinement decides from counts, centres and sums of squares alone."""
    between = np.concatenate([blob(0, n=5), blob(30, n=5)])
    near = blob(40, n=10), blob(41, n=30, seed=1)
    union = np.concatenate(near)
    objective = np.square(union - union.mean(axis=0)).sum()
    found = clusters_of(between, *near, blob(90))
    for factor, left in ((1 - 1e-9, 4), (1 + 1e-9, 3)):
        boundary = found._replace(sse=np.array([objective * factor, *found.sse[1:]]))
        assert len(feca.client_refine(boundary).centers) == left


def test_two_centroids_are_never_refined_away():
    far = clusters_of(np.concatenate([blob(0), blob(90)]), blob(91))
    assert len(feca.client_refine(far).centers) == 2


def test_empirical_radii_are_reach_or_half_way():
    wide = feca.Clusters(
        np.array([[0.0], [10.0], [14.0]]), np.ones(3, int), np.zeros(3), np.array([1.0, 9, 9])
    )
    assert feca.client_empirical_radii(wide).tolist() == [1, 2, 2]


def test_theoretical_radius_leaves_out_overlapping_clusters():
    found = feca.Clusters(
        np.array([[0.0], [30.0], [31.0], [70.0]]), np.ones(4, int), np.zeros(4), np.ones(4)
    )
    assert feca.client_theoretical_radii(found).tolist() == [35] * 4


@pytest.mark.parametrize("radii", [feca.client_empirical_radii, feca.client_theoretical_radii])
def test_a_single_centroid_has_the_radius_of_its_cluster(radii):
    assert radii(clusters_of(blob(0)))[0] == pytest.approx(clusters_of(blob(0)).reach[0])


def test_theoretical_radius_is_finite_when_everything_overlaps():
    found = feca.Clusters(np.array([[0.0], [1.0]]), np.ones(2, int), np.zeros(2), np.ones(2))
    assert feca.client_theoretical_radii(found).tolist() == [0.5, 0.5]


def test_the_server_groups_by_the_largest_radius_first():
    centers = np.array([[0.0], [1.0], [2.0], [50.0], [51.0], [90.0]])
    radii = np.array([0.5, 3.0, 0.1, 2.0, 0.1, 0.0])
    found = feca.server_aggregate(centers, radii, 2)
    assert found.ravel().tolist() == [1.0, 50.5]
    assert len(feca.server_aggregate(centers, radii, 9)) == 3


@pytest.mark.parametrize("radii", [feca.client_empirical_radii, feca.client_theoretical_radii])
def test_separated_balls_are_recovered_with_either_radius(radii):
    X, y, truth = stochastic_balls(2000, 2, 6, 6.0, seed=3)
    rng = np.random.default_rng(3)
    sent = []
    for part in iid_partition(X, y, 5, seed=3):
        clusters = feca.client_refine(feca.client_cluster(X[part], 6, rng))
        sent.append((clusters.centers, radii(clusters)))
    centers = feca.server_aggregate(*(np.concatenate(s) for s in zip(*sent, strict=True)), 6)
    assert matched_center_distance(centers, truth) < 0.3


def test_clusters_describe_the_records():
    X = np.concatenate([blob(0), blob(20)])
    found = feca.client_cluster(X, 2, np.random.default_rng(0))
    expected = clusters_of(blob(0), blob(20)).keep(
        np.array([0, 1] if found.centers[0, 0] < 10 else [1, 0])
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs)


def test_the_suspect_is_the_widest_cluster_not_the_largest():
    # The first has the largest sum of squares, the second the largest mean square, and the last
    # two merged are in between: looking at the first would drop it.
    found = feca.Clusters(
        np.array([[0.0], [50.0], [100.0], [100.5]]),
        np.array([1000, 4, 10, 10]),
        np.array([1000.0, 400.0, 250.0, 250.0]),
        np.ones(4),
    )
    assert len(feca.client_refine(found).centers) == 4


def test_the_largest_groups_are_kept_not_the_first():
    centers = np.array([[0.0], [50.0], [50.1], [50.2], [90.0], [90.1]])
    radii = np.array([9.0, 1, 1, 1, 2, 2])
    found = feca.server_aggregate(centers, radii, 2).ravel()
    np.testing.assert_allclose(np.sort(found), [50.1, 90.05])
