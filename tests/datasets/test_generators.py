import numpy as np
import pytest
from scipy.spatial.distance import pdist, squareform
from scipy.stats import kstest

from secure_fedclust.datasets import fkm_grid, rmin_blobs, stochastic_balls
from secure_fedclust.errors import ParameterError


def test_grid_neighbours_are_five_apart_and_the_grid_is_centred():
    X, y, centers = fkm_grid(seed=0)
    assert X.shape == (800, 2)
    np.testing.assert_array_equal(np.bincount(y), 50)
    np.testing.assert_array_equal(centers.mean(axis=0), 0)
    distances = squareform(pdist(centers)) + 100 * np.eye(16)
    np.testing.assert_allclose(distances.min(axis=1), 5)
    assert len(np.unique(centers[:, 0])) == len(np.unique(centers[:, 1])) == 4


@pytest.mark.parametrize("std", [1.0, 1.5])
def test_grid_clusters_have_the_asked_standard_deviation(std):
    X, y, centers = fkm_grid(2000, std, seed=1)
    noise = X - centers[y]
    # Four standard errors of a standard deviation and of a mean over 32,000 records.
    np.testing.assert_allclose(noise.std(axis=0), std, rtol=4 / np.sqrt(2 * 32_000))
    np.testing.assert_allclose(noise.mean(axis=0), 0, atol=4 * std / np.sqrt(32_000))


def test_rows_come_shuffled():
    _, y, _ = fkm_grid(seed=0)
    assert len(np.unique(y[:50])) > 10


@pytest.mark.parametrize("d", [2, 5, 15])
@pytest.mark.parametrize("r_min", [1.0, 2.0, 4.0, 6.0])
def test_closest_centres_are_exactly_r_min_apart(d, r_min):
    for seed in range(5):
        X, y, centers = rmin_blobs(205, d, 10, r_min, seed=seed)
        assert X.shape == (205, d)
        assert set(np.bincount(y)) == {20, 21}
        assert pdist(centers).min() == pytest.approx(r_min, rel=1e-12)
        assert np.abs(centers).max() <= 10


def test_the_box_grows_when_centres_do_not_fit():
    _, _, centers = rmin_blobs(10, 1, 10, 6.0, seed=0)
    assert pdist(centers).min() == pytest.approx(6.0)
    assert np.abs(centers).max() > 10


def test_one_cluster_needs_no_separation():
    _, y, centers = rmin_blobs(7, 3, 1, 2.0, seed=0)
    assert centers.shape == (1, 3)
    assert not y.any()


def test_blobs_have_the_asked_standard_deviation():
    X, y, centers = rmin_blobs(20_000, 3, 4, 2.0, std=0.5, seed=0)
    np.testing.assert_allclose((X - centers[y]).std(axis=0), 0.5, rtol=4 / np.sqrt(40_000))


@pytest.mark.parametrize("d", [1, 2, 5])
def test_balls_are_uniform_and_disjoint(d):
    X, y, centers = stochastic_balls(4000, d, 4, 3.5, radius=1.5, seed=0)
    distance = np.linalg.norm(X - centers[y], axis=1)
    assert distance.max() <= 1.5 * (1 + 1e-12)
    assert pdist(centers).min() == pytest.approx(3.5)
    # Uniform in the ball: the share of the volume within each record's distance is uniform.
    assert kstest((distance / 1.5) ** d, "uniform").pvalue > 1e-4
    # And no direction is preferred.
    assert np.abs(((X - centers[y]) / 1.5).mean(axis=0)).max() < 6 / np.sqrt(4000)


def test_touching_balls_are_refused():
    with pytest.raises(ParameterError, match=r"separation=2\.0"):
        stochastic_balls(10, 2, 3, 2.0, seed=0)


@pytest.mark.parametrize(
    ("generate", "name"),
    [
        (lambda: fkm_grid(0, seed=0), "n_per_cluster"),
        (lambda: fkm_grid(5, 0.0, seed=0), "std"),
        (lambda: rmin_blobs(10, 2, 3, -1.0, seed=0), "r_min"),
        (lambda: rmin_blobs(10, 2, 0, 1.0, seed=0), "n_clusters"),
        (lambda: rmin_blobs(2.5, 2, 3, 1.0, seed=0), "n_samples"),
        (lambda: stochastic_balls(10, 0, 3, 5.0, seed=0), "n_features"),
        (lambda: stochastic_balls(10, 2, 3, 5.0, radius=np.nan, seed=0), "radius"),
    ],
)
def test_impossible_parameters_are_named(generate, name):
    with pytest.raises(ParameterError, match=f"^{name}="):
        generate()


@pytest.mark.parametrize(
    "generate",
    [
        lambda seed: fkm_grid(5, seed=seed),
        lambda seed: rmin_blobs(30, 2, 5, 1.0, seed=seed),
        lambda seed: stochastic_balls(30, 2, 5, 3.0, seed=seed),
    ],
)
def test_the_seed_decides(generate):
    one, same, other = generate(1), generate(np.random.default_rng(1)), generate(2)
    assert all(map(np.array_equal, one, same))
    assert not np.array_equal(one[0], other[0])
