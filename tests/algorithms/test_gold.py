import subprocess
import sys

import numpy as np
import pytest

from secure_fedclust.algorithms import gold
from secure_fedclust.algorithms.competitive import LEARNING_RATE, compete, feature_importance
from secure_fedclust.algorithms.lloyd import assign
from secure_fedclust.datasets.non_icd import non_icd_partition
from secure_fedclust.errors import DataError, ParameterError
from secure_fedclust.metrics import purity


def literal_importance(X, labels, cluster):
    """Eqs. 16-21 for one cluster; not a number where they are not defined."""
    inside, outside = X[labels == cluster], X[labels != cluster]
    if len(inside) < 2 or len(outside) == 0:
        return np.full(X.shape[1], np.nan)
    product = []
    for a, b in zip(inside.T, outside.T, strict=True):
        s, t = (np.std(side, ddof=1) if np.ptp(side) > 0 else 0.0 for side in (a, b))
        if s == t == 0:
            product.append(0.0)
            continue
        overlap = np.sqrt(2 * s * t / (s**2 + t**2))
        overlap *= np.exp(-((a.mean() - b.mean()) ** 2) / (4 * (s**2 + t**2)))
        product.append(np.sqrt(1 - overlap) * np.exp(-0.5 * (a - a.mean()) ** 2).mean())
    return np.array(product) / np.sum(product)


def literal_contest(X, seeds):
    """Competitive penalised learning as one would read it out; also how many passes it took."""
    n, d = X.shape
    k = len(seeds)
    owner = np.full(n, -1)
    owner[seeds] = np.arange(k)
    importance = np.full((k, d), 1 / d)
    credit, wins = np.ones(k), np.ones(k)
    passes = 0
    while passes < 31:
        passes += 1
        before = owner.copy()
        defined = np.isfinite(importance).all(axis=1)
        for i in range(n):
            member = owner == np.arange(k)[:, None]
            mean = member @ X / np.maximum(member.sum(axis=1), 1)[:, None]
            similarity = np.exp(-0.5 * np.sum(importance * (X[i] - mean) ** 2, axis=1))
            score = (1 - wins / wins.sum()) / (1 + np.exp(5 - 10 * credit)) * similarity
            score[~defined | ~member.any(axis=1)] = -1
            winner = score.argmax()
            others = np.where(np.arange(k) == winner, -1, score)
            rival = others.argmax()
            credit[winner] += LEARNING_RATE
            if others[rival] >= 0:
                credit[rival] -= LEARNING_RATE * score[rival] / score[winner]
            wins[winner] += 1
            owner[i] = winner
        if (owner == before).all():
            break
        importance = np.array([literal_importance(X, owner, j) for j in range(k)])
        if not np.isfinite(importance).all(axis=1).any():
            break
    return np.unique(owner, return_inverse=True)[1], passes


def literal_merge(encoding, modes):
    """Eqs. 24-29 with loops over centroids, clusters and levels."""
    levels = encoding.shape[1]
    k = len(modes)
    modes = modes.copy()
    u = np.full((k, levels), 1 / levels)

    def matched(row):
        return np.argmax([sum(u[j][row == modes[j]]) for j in range(k)])

    labels = np.array([matched(row) for row in encoding])
    for _ in range(31):
        for j in range(k):
            inside, outside = encoding[labels == j], encoding[labels != j]
            if len(inside) == 0:
                continue
            product = np.zeros(levels)
            for level in range(levels):
                values = range(encoding[:, level].max() + 1)
                share = np.array([(inside[:, level] == v).mean() for v in values])
                rest = np.array([(outside[:, level] == v).sum() for v in values])
                rest = rest / max(len(outside), 1)
                modes[j, level] = share.argmax()
                alpha = np.sqrt(((share - rest) ** 2).sum()) / np.sqrt(2)
                product[level] = alpha * np.mean([share[v] for v in inside[:, level]])
            u[j] = product / product.sum() if product.sum() > 0 else 1 / levels
        before, labels = labels, np.array([matched(row) for row in encoding])
        if (labels == before).all():
            break
    return np.unique(labels, return_inverse=True)[1]


def blobs(rng, centers, n_each, sd=0.1):
    centers = np.asarray(centers, dtype=float)
    return np.repeat(centers, n_each, axis=0) + rng.normal(
        0, sd, (len(centers) * n_each, centers.shape[1])
    )


def run(parts, n_clusters, seed):
    rng = np.random.default_rng(seed)
    centroids = np.vstack([gold.client_micro_clusters(part, rng) for part in parts])
    return gold.server_cluster(centroids, n_clusters, rng)


def both_contests(X, n_seeds, seed):
    first_of_each = np.unique(X, axis=0, return_index=True)[1]
    seeds = np.random.default_rng(seed).permutation(first_of_each)[:n_seeds]
    expected, passes = literal_contest(X, seeds)
    return compete(X, n_seeds, np.random.default_rng(seed)), expected, passes


@pytest.mark.parametrize("seed", range(12))
def test_the_compiled_contest_gives_the_partition_that_the_literal_one_gives(seed):
    rng = np.random.default_rng(seed)
    n, d = rng.integers(4, 45), rng.integers(1, 7)
    X = rng.normal(size=(n, d)) + 2 * rng.integers(0, 3, (n, 1))
    if seed % 3 == 0:
        X[:, 0] = 1.7
    labels, expected, _ = both_contests(X, max(1, n // 2), seed)
    np.testing.assert_array_equal(labels, expected)


@pytest.mark.parametrize("seed", range(4))
def test_the_compiled_contest_follows_the_literal_one_through_many_passes(seed):
    X = np.random.default_rng(seed).normal(size=(400, 3))
    labels, expected, passes = both_contests(X, 100, seed)
    assert passes > 10
    np.testing.assert_array_equal(labels, expected)


@pytest.mark.parametrize("seed", range(5))
def test_importance_computed_from_totals_equals_importance_computed_cluster_by_cluster(seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(5, 2, (40, 6))
    X[:, 1] = 0.1  # constant everywhere
    X[:, 2] = rng.integers(0, 2, 40)
    labels = np.concatenate([np.arange(4), rng.integers(0, 4, 36)])
    X[labels == 2, 3] = 0.3  # constant in one cluster
    X[labels == 1, 4], X[labels != 1, 4] = 0.7, 0.9  # constant on both sides of one cluster

    found = feature_importance(X, labels)

    expected = [literal_importance(X, labels, cluster) for cluster in range(4)]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert (found[:, 1] == 0).all()
    assert found[1, 4] == 0


def test_a_cluster_of_one_record_and_a_cluster_of_all_have_no_importance():
    X = np.random.default_rng(0).normal(size=(6, 2))
    lone = feature_importance(X, np.array([0, 1, 1, 1, 2, 2]))
    assert not lone[0].any()
    assert lone[1:].sum(axis=1) == pytest.approx([1, 1])
    assert not feature_importance(X, np.zeros(6, dtype=np.int64)).any()


def test_an_outlier_too_far_for_any_similarity_still_finds_a_cluster():
    X = np.random.default_rng(0).normal(size=(50, 2))
    X[7] = 1e5
    centroids = gold.client_micro_clusters(X, np.random.default_rng(1))
    assert np.isfinite(centroids).all()
    labels = compete(X, 25, np.random.default_rng(1))
    assert labels.min() == 0
    assert len(np.unique(labels)) == labels.max() + 1


def test_micro_clusters_do_not_straddle_well_separated_groups():
    rng = np.random.default_rng(3)
    truth = np.array([[-3, -3], [0, 3], [3, -3]])
    centroids = gold.client_micro_clusters(blobs(rng, truth, 60), rng)
    distance = np.linalg.norm(centroids[:, None] - truth, axis=2)
    assert (distance.min(axis=1) < 0.4).all()
    assert set(distance.argmin(axis=1)) == {0, 1, 2}
    assert 3 <= len(centroids) <= 90


def test_granularities_grow_coarser_and_number_their_clusters_without_gaps():
    rng = np.random.default_rng(0)
    encoding = gold.server_granularities(rng.normal(size=(200, 4)), rng)
    sizes = [len(np.unique(level)) for level in encoding.T]
    assert sizes == list(encoding.max(axis=0) + 1)
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[0] <= 100
    assert len(sizes) > 1


@pytest.mark.parametrize("seed", range(8))
def test_merging_gives_the_labels_that_the_literal_equations_give(seed):
    rng = np.random.default_rng(seed)
    fine = rng.integers(0, 12, 80)
    encoding = np.column_stack([fine, rng.permutation(12)[fine] // 2, rng.integers(0, 3, 80)])
    modes = np.random.default_rng(seed).permutation(np.unique(encoding, axis=0))[:5]

    labels = gold.server_merge(encoding, 5, np.random.default_rng(seed))

    np.testing.assert_array_equal(labels, literal_merge(encoding, modes))


def test_centers_are_unweighted_means_and_skip_numbers_that_nobody_has():
    centroids = np.array([[0.0, 0], [2, 2], [10, 0], [4, 4]])
    centers = gold.server_centers(centroids, np.array([0, 0, 5, 0]))
    np.testing.assert_allclose(centers, [[2, 2], [10, 0]])


def test_fragments_of_clusters_at_different_clients_are_put_together():
    rng = np.random.default_rng(0)
    truth = np.array([[-4.0, 0], [4, 0], [0, 6]])
    X = blobs(rng, truth, 200, sd=0.4)
    y = np.repeat([0, 1, 2], 200)
    left = X[:, 0] < truth[y, 0]
    parts = [X[left & (y != 2)], X[~left & (y != 0)], X[left ^ (y == 1)]]
    scores = [purity(y, assign(X, run(parts, 3, seed))) for seed in range(10)]
    assert np.mean(scores) > 0.85


def test_with_an_unknown_number_of_clusters_the_coarsest_granularity_decides():
    centroids = np.random.default_rng(5).normal(size=(120, 3))
    encoding = gold.server_granularities(centroids, np.random.default_rng(9))
    unknown = gold.server_cluster(centroids, None, np.random.default_rng(9))
    known = gold.server_cluster(centroids, encoding[:, -1].max() + 1, np.random.default_rng(9))
    np.testing.assert_array_equal(unknown, known)


def test_a_run_is_repeated_by_its_seed():
    X = np.random.default_rng(0).normal(size=(80, 3))
    np.testing.assert_array_equal(run([X, X + 1], 4, 7), run([X, X + 1], 4, 7))


def test_clients_records_are_left_as_they_were():
    X = np.random.default_rng(0).normal(size=(30, 3))
    copy = X.copy()
    run([X], 2, 0)
    np.testing.assert_array_equal(X, copy)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("n_clusters", [None, 1, 2, 9])
def test_a_few_records_give_a_few_finite_centers(n, n_clusters):
    X = np.random.default_rng(n).normal(size=(n, 2))
    for seed in range(5):
        centers = run([X], n_clusters, seed)
        assert 1 <= len(centers) <= n
        assert np.isfinite(centers).all()
        assert (centers >= X.min(axis=0) - 1e-9).all()
        assert (centers <= X.max(axis=0) + 1e-9).all()


@pytest.mark.parametrize("n_clusters", [None, 1, 4])
def test_equal_records_give_one_center(n_clusters):
    X = np.full((20, 3), 0.1)
    np.testing.assert_allclose(run([X, X[:7]], n_clusters, 0), X[:1])


def test_two_different_values_are_two_micro_clusters():
    X = np.repeat([[0.1, 5.0], [0.2, 6.0]], 10, axis=0)
    centroids = gold.client_micro_clusters(X, np.random.default_rng(0))
    np.testing.assert_allclose(centroids[np.argsort(centroids[:, 0])], X[[0, -1]])


def test_constant_features_stay_constant_and_give_no_nan():
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=(60, 2)), np.full(60, 0.1), np.zeros(60)])
    centers = run([X[:30], X[30:]], 3, 0)
    assert np.isfinite(centers).all()
    np.testing.assert_allclose(centers[:, 2:], np.tile([0.1, 0], (len(centers), 1)))


def test_more_clusters_than_micro_clusters_can_tell_apart_give_fewer_centers():
    centroids = np.random.default_rng(0).normal(size=(8, 2))
    centers = gold.server_cluster(centroids, 50, np.random.default_rng(0))
    assert 1 <= len(centers) <= 8


@pytest.mark.parametrize("n_clusters", [0, -3])
def test_fewer_than_one_cluster_is_refused(n_clusters):
    with pytest.raises(ParameterError, match=str(n_clusters)):
        gold.server_merge(np.zeros((3, 1), dtype=np.int64), n_clusters, np.random.default_rng(0))


@pytest.mark.parametrize("bad", [np.zeros((0, 2)), np.zeros((3, 0)), np.array([[0.0, np.nan]])])
def test_records_that_cannot_be_clustered_are_refused(bad):
    with pytest.raises(DataError, match="records"):
        gold.client_micro_clusters(bad, np.random.default_rng(0))


def test_importing_the_algorithm_does_not_import_its_compiler():
    code = "import sys, secure_fedclust.algorithms.gold; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603


def mean_purity(data_dir, name, n_splits=10):
    with np.load(data_dir / f"{name}.npz") as data:
        X, y = data["X"].astype(float), data["y"]
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    k = len(np.unique(y))
    scores = []
    for seed in range(n_splits):
        parts = non_icd_partition(X, y, 8, seed=seed)
        scores.append(purity(y, assign(X, run([X[rows] for rows in parts], k, 100 + seed))))
    return np.mean(scores)


@pytest.mark.parametrize(("name", "expected"), [("ecoli", 0.784), ("vehicle", 0.389)])
def test_purity_on_fragmented_data_is_near_that_reproduced_on_the_authors_splits(
    data_dir, name, expected
):
    assert mean_purity(data_dir, name) == pytest.approx(expected, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"), [("user_knowledge", 0.456), ("yeast", 0.489), ("satellite", 0.631)]
)
def test_purity_on_larger_sets_is_near_that_reproduced_on_the_authors_splits(
    data_dir, name, expected
):
    assert mean_purity(data_dir, name) == pytest.approx(expected, abs=0.05)
