import numpy as np
import pytest

from secure_fedclust.algorithms import deepfeca, feca
from secure_fedclust.algorithms.backbones import Backbone, features, outputs
from secure_fedclust.algorithms.lloyd import assign
from secure_fedclust.errors import DataError, ParameterError, TrainingError

torch = pytest.importorskip("torch")

BACKBONE = Backbone(20, hidden=(32,), n_out=6)


def correlated(n, f, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, f)) @ rng.normal(size=(f, f)) + 5 * rng.normal(size=f)


def blobs(n=200, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=n)
    return np.random.default_rng(99).random((4, 20))[labels] + 0.05 * rng.normal(
        size=(n, 20)
    ), labels


def started(n_labels, seed=0):
    rng = np.random.default_rng(seed)
    return BACKBONE.initial(rng), deepfeca.initial_head(BACKBONE.n_out, n_labels, rng)


def loss(weights, head, X, labels):
    made = outputs(BACKBONE, weights, X)
    k = len(head) // (BACKBONE.n_out + 1)
    scores = made @ head[: k * BACKBONE.n_out].reshape(k, -1).T + head[k * BACKBONE.n_out :]
    scores -= scores.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(X)), labels]))


def test_whitening_makes_features_uncorrelated():
    made = correlated(500, 5)
    matrix = deepfeca.whitening(np.cov(made.T))
    np.testing.assert_allclose(matrix, matrix.T)
    np.testing.assert_allclose(
        np.cov(((made - made.mean(axis=0)) @ matrix).T), np.eye(5), atol=1e-8
    )


def test_shrinking_bounds_how_far_whitening_stretches_what_may_be_noise():
    noise = np.diag([1.0, 0.1, -0.3])
    plain, shrunk = (np.linalg.eigvalsh(deepfeca.whitening(noise, s))[-1] for s in (0.0, 1.0))
    assert plain == pytest.approx(1 / np.sqrt(deepfeca.FLOOR))
    assert shrunk == pytest.approx(1 / np.sqrt(deepfeca.FLOOR + (1.1 + deepfeca.FLOOR) / 3))


def test_whitened_rows_point_where_the_whitened_features_do_and_have_length_one():
    made = correlated(50, 5)
    mean, matrix = made.mean(axis=0), deepfeca.whitening(np.cov(made.T))
    rows = deepfeca.whitened(made, mean, matrix)
    expected = (made - mean) @ matrix
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(rows, expected, atol=1e-12)


@pytest.mark.parametrize("f", [1, 3, 16, 33])
def test_whitened_rows_are_the_same_bits_wherever_they_stand(f):
    made = correlated(101, f)
    mean, matrix = made.mean(axis=0), deepfeca.whitening(np.atleast_2d(np.cov(made.T)))
    rows = deepfeca.whitened(made, mean, matrix)
    order = np.random.default_rng(1).permutation(101)
    np.testing.assert_array_equal(deepfeca.whitened(made[order], mean, matrix), rows[order])
    np.testing.assert_array_equal(deepfeca.whitened(made[7:], mean, matrix), rows[7:])
    for i in (0, 50, 100):
        alone = deepfeca.whitened(made[i : i + 1], mean, matrix)
        np.testing.assert_array_equal(alone[0], rows[i])


def test_a_row_has_length_one_whatever_its_size():
    made = np.array([[0.0, 0.0], [1e-200, 0.0], [3e200, 4e200], [0.0, -1e-310]])
    rows = deepfeca.whitened(made, np.zeros(2), np.eye(2))
    np.testing.assert_allclose(rows, [[1, 0], [1, 0], [0.6, 0.8], [0, -1]])


def test_a_noisy_covariance_still_whitens_and_stretches_only_so_far():
    covariance = np.diag([4.0, 1e-9, -3.0])
    matrix = deepfeca.whitening(covariance)
    most = 1 / np.sqrt(deepfeca.FLOOR * 4)
    np.testing.assert_allclose(matrix, np.diag([0.5, most, most]))


@pytest.mark.parametrize("covariance", [np.zeros((3, 3)), -np.eye(3), np.full((3, 3), np.nan)])
def test_features_that_do_not_vary_are_refused(covariance):
    with pytest.raises(TrainingError, match="lower the learning rate"):
        deepfeca.whitening(covariance)


def test_a_head_has_weights_and_a_bias_for_each_label():
    head = deepfeca.initial_head(6, 9, np.random.default_rng(0))
    assert head.shape == (9 * 7,) and np.abs(head).max() <= 1 / np.sqrt(6)
    np.testing.assert_array_equal(head, deepfeca.initial_head(6, 9, np.random.default_rng(0)))


def test_training_learns_labels_that_follow_from_the_records():
    X, labels = blobs()
    weights, head = started(4)
    trained, classifier = deepfeca.train(
        BACKBONE,
        weights,
        head,
        X,
        labels,
        4,
        epochs=30,
        learning_rate=0.01,
        rng=np.random.default_rng(0),
    )
    assert trained.shape == weights.shape and classifier.shape == head.shape
    assert loss(weights, head, X, labels) > 1.0
    assert loss(trained, classifier, X, labels) < 0.1


def test_training_is_repeatable_and_leaves_its_arguments_and_global_generators_alone():
    X, labels = blobs()
    weights, head = started(4)
    copies = [a.copy() for a in (X, labels, weights, head)]
    for array in (X, labels, weights, head):
        array.flags.writeable = False
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    runs = [
        deepfeca.train(BACKBONE, weights, head, X, labels, 4, rng=np.random.default_rng(seed))
        for seed in (5, 5, 6)
    ]
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    np.testing.assert_array_equal(runs[0][1], runs[1][1])
    assert (runs[0][0] != runs[2][0]).any(), "another order of the records"
    for array, copy in zip((X, labels, weights, head), copies, strict=True):
        np.testing.assert_array_equal(array, copy)
    assert torch.equal(torch_before, torch.get_rng_state())
    np.testing.assert_array_equal(numpy_before, np.random.get_state()[1])


def test_fewer_records_than_a_batch_are_one_batch():
    X, labels = blobs(10)
    weights, head = started(4)
    first, second = (
        deepfeca.train(
            BACKBONE,
            weights,
            head,
            X,
            labels,
            4,
            epochs=1,
            batch_size=size,
            rng=np.random.default_rng(0),
        )[0]
        for size in (10, 1000)
    )
    np.testing.assert_array_equal(first, second)
    # Adam's first step is as long as the learning rate, wherever there is a gradient.
    moved = np.abs(second - weights)
    assert deepfeca.LEARNING_RATE * 0.99 < moved.max() < deepfeca.LEARNING_RATE * 1.01


def test_the_last_batch_may_be_shorter_and_one_record_is_enough():
    X, labels = blobs(65)
    weights, head = started(4)
    deepfeca.train(
        BACKBONE, weights, head, X, labels, 4, batch_size=64, rng=np.random.default_rng(0)
    )
    alone, _ = deepfeca.train(
        BACKBONE, weights, head, X[:1], labels[:1], 4, rng=np.random.default_rng(0)
    )
    assert np.isfinite(alone).all() and (alone != weights).any()


@pytest.mark.parametrize(
    ("scale", "learning_rate"),
    [(1.0, 1e30), (1.0, 1e39), (1e38, 1e-3), (np.nan, 1e-3), (np.inf, 1e-3)],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_training_that_goes_astray_says_what_to_change(scale, learning_rate):
    X, labels = blobs()
    with pytest.raises(TrainingError, match=r"learning_rate=.*lower it"):
        deepfeca.train(
            BACKBONE,
            *started(4),
            X * scale,
            labels,
            4,
            epochs=1,
            learning_rate=learning_rate,
            rng=np.random.default_rng(0),
        )


def test_a_last_step_that_goes_astray_is_noticed():
    X, labels = blobs(10)
    weights, head = started(4)
    weights[: 20 * 32] = 0  # records do not move the loss, but their gradient is beyond all bounds
    with pytest.raises(TrainingError, match="went astray"):
        deepfeca.train(
            BACKBONE,
            weights,
            1e3 * head,
            np.full_like(X, 3e38),
            labels,
            4,
            epochs=1,
            batch_size=10,
            rng=np.random.default_rng(0),
        )


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"labels": np.full(200, 4)}, ParameterError, "labels go from 4 to 4"),
        ({"labels": np.full(200, -1)}, ParameterError, "labels go from -1"),
        ({"labels": np.zeros(199, dtype=int)}, DataError, "200 records"),
        ({"X": np.empty((0, 20)), "labels": np.empty(0, dtype=int)}, DataError, "0 records"),
        ({"X": np.zeros((200, 19))}, DataError, r"\(200, 19\)"),
        ({"n_labels": 5}, ParameterError, r"needs \(35,\)"),
        ({"epochs": 0}, ParameterError, "epochs=0"),
        ({"batch_size": 0}, ParameterError, "batch_size=0"),
        ({"learning_rate": 0.0}, ParameterError, "learning_rate=0.0"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(change, error, said):
    X, labels = blobs()
    weights, head = started(4)
    arguments = {"X": X, "labels": labels, "n_labels": 4} | change
    with pytest.raises(error, match=said):
        deepfeca.train(BACKBONE, weights, head, **arguments, rng=np.random.default_rng(0))


def test_an_average_weighs_clients_by_their_records():
    updates = np.random.default_rng(0).normal(size=(3, 8))
    expected = (2 * updates[0] + 5 * updates[1]) / 7
    np.testing.assert_allclose(deepfeca.average(list(updates), [2, 5, 0]), expected)


@pytest.mark.parametrize("weights", [[1, 1], [0, 0, 0], [1, 1, -1], [1, 1, np.nan], [1, 1, np.inf]])
def test_weights_that_average_nothing_are_refused(weights):
    with pytest.raises(ParameterError, match="each of the 3 updates"):
        deepfeca.average(np.ones((3, 8)), weights)


def test_a_probe_reads_what_is_linear_and_guesses_the_rest():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 4)) * [1, 1e6, 1, 1]
    linear, unrelated = (X[:, 1] > 0).astype(int), rng.integers(2, size=600)
    assert deepfeca.probe(X[:300], linear[:300], X[300:], linear[300:]) > 0.95
    assert 0.35 < deepfeca.probe(X[:300], unrelated[:300], X[300:], unrelated[300:]) < 0.65


def probed(seed, rounds, shuffled=False):
    """How well four classes are told apart by what the network makes of them after some rounds."""
    rng = np.random.default_rng([seed, 0])
    y = rng.integers(4, size=1200)
    X = rng.random((4, 20))[y] + 0.35 * rng.normal(size=(1200, 20))
    clients = np.array_split(np.arange(600), 4)
    rng = np.random.default_rng([seed, 1])
    weights = BACKBONE.initial(rng)
    settings = {"epochs": 5, "batch_size": 16, "rng": rng}
    for _ in range(rounds):
        made = features(BACKBONE, weights, X[:600])
        mean, matrix = made.mean(axis=0), deepfeca.whitening(np.cov(made.T))
        parts = [deepfeca.whitened(made[rows], mean, matrix) for rows in clients]
        found = [feca.client_refine(feca.client_cluster(part, 12, rng, 3)) for part in parts]
        centers = feca.server_aggregate(
            np.concatenate([clusters.centers for clusters in found]),
            np.concatenate([feca.client_empirical_radii(clusters) for clusters in found]),
            12,
        )
        head = deepfeca.initial_head(BACKBONE.n_out, 12, rng)
        updates = []
        for rows, part in zip(clients, parts, strict=True):
            labels = assign(part, centers)
            labels = rng.permutation(labels) if shuffled else labels
            trained = deepfeca.train(BACKBONE, weights, head, X[rows], labels, 12, **settings)
            updates.append(trained[0])
        weights = deepfeca.average(updates, [len(rows) for rows in clients])
    made = outputs(BACKBONE, weights, X)
    return deepfeca.probe(made[:600], y[:600], made[600:], y[600:])


def test_rounds_make_networks_tell_classes_apart_and_shuffled_labels_do_not():
    seeds = range(3)
    after = np.mean([probed(seed, 6) for seed in seeds])
    assert after > np.mean([probed(seed, 0) for seed in seeds]) + 0.05
    assert after > np.mean([probed(seed, 6, shuffled=True) for seed in seeds]) + 0.05
