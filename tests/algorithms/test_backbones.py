import subprocess
import sys

import numpy as np
import pytest

from secure_fedclust.algorithms.backbones import Backbone, features, outputs
from secure_fedclust.errors import DataError, ParameterError, TrainingError

torch = pytest.importorskip("torch")

DENSE = Backbone(64, hidden=(50, 20), n_out=7)
CONV = Backbone(64, "conv", hidden=(30,), n_out=5)
BOTH = pytest.mark.parametrize("backbone", [DENSE, CONV, Backbone(49, "conv", hidden=())])


def records(n, d, seed=1):
    return np.random.default_rng(seed).random((n, d))


@BOTH
def test_weights_go_into_a_network_and_come_out_again(backbone):
    weights = backbone.initial(np.random.default_rng(0))
    assert weights.shape == (backbone.n_parameters,) and weights.dtype == np.float64
    network = backbone.module(weights)
    assert sum(p.numel() for p in network.parameters()) == backbone.n_parameters
    np.testing.assert_array_equal(backbone.weights_of(network), weights.astype(np.float32))


def test_a_dense_network_is_matrices_with_what_is_positive_between():
    weights = DENSE.initial(np.random.default_rng(0))
    X = records(9, 64)
    rows, used = X, 0
    for a, b in [(64, 50), (50, 20), (20, 7)]:
        matrix = weights[used : used + a * b].reshape(b, a)
        bias = weights[used + a * b : used + a * b + b]
        rows, used = np.maximum(rows, 0) @ matrix.T + bias, used + a * b + b
    assert used == DENSE.n_parameters
    np.testing.assert_allclose(outputs(DENSE, weights, X), rows, atol=1e-6)


def test_a_convolution_looks_at_the_record_as_an_image():
    backbone = Backbone(64, "conv", hidden=(), n_out=3)
    weights = backbone.initial(np.random.default_rng(0))
    X = records(4, 64)
    first, second, last = (
        torch.tensor(part, dtype=torch.float32)
        for part in np.split(weights, [8 * 10, 8 * 10 + 16 * 73])
    )
    rows = torch.tensor(X, dtype=torch.float32).reshape(4, 1, 8, 8)
    for part, a, b in [(first, 1, 8), (second, 8, 16)]:
        kernel, bias = part[:-b].reshape(b, a, 3, 3), part[-b:]
        rows = torch.nn.functional.conv2d(rows, kernel, bias, padding=1).relu()
        rows = torch.nn.functional.max_pool2d(rows, 2)
    made = rows.reshape(4, -1) @ last[:-3].reshape(3, -1).T + last[-3:]
    np.testing.assert_allclose(outputs(backbone, weights, X), made.numpy(), atol=1e-6)


@BOTH
@pytest.mark.parametrize("n", [1, 31, 32, 101])
def test_features_are_the_same_bits_wherever_a_record_stands(backbone, n):
    rng = np.random.default_rng(n)
    weights = backbone.initial(rng)
    X = records(n, backbone.n_features)
    made = features(backbone, weights, X)
    assert made.shape == (n, backbone.n_out) and made.dtype == np.float64
    order = rng.permutation(n)
    np.testing.assert_array_equal(features(backbone, weights, X[order]), made[order])
    for gone in {0, n // 2, n - 1}:
        left = np.delete(np.arange(n), gone)
        np.testing.assert_array_equal(features(backbone, weights, X[left]), made[left])
    others = records(n, backbone.n_features, seed=2) * 1e6
    others[n // 2] = X[n // 2]
    np.testing.assert_array_equal(features(backbone, weights, others)[n // 2], made[n // 2])


def test_features_of_a_wide_network_are_the_same_bits_at_any_number_of_threads():
    backbone = Backbone(784)
    weights = backbone.initial(np.random.default_rng(0))
    X = records(100, 784)
    made = features(backbone, weights, X)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        np.testing.assert_array_equal(features(backbone, weights, X[::-1]), made[::-1])
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_records_go_one_at_a_time(monkeypatch):
    class RoundsByPlace(torch.nn.Module):
        def forward(self, x):
            return x[:, : DENSE.n_out] + 1e-6 * torch.arange(len(x))[:, None]

    monkeypatch.setattr(Backbone, "module", lambda *_: RoundsByPlace())
    X = records(64, 64)
    made = outputs(DENSE, np.zeros(DENSE.n_parameters), X)
    np.testing.assert_array_equal(made, X[:, : DENSE.n_out].astype(np.float32))


def test_no_records_have_no_features():
    weights = DENSE.initial(np.random.default_rng(0))
    assert features(DENSE, weights, np.empty((0, 64))).shape == (0, 7)


def test_records_and_weights_may_be_read_only():
    weights, X = DENSE.initial(np.random.default_rng(0)), records(3, 64)
    made = features(DENSE, weights, X)
    weights.flags.writeable = X.flags.writeable = False
    np.testing.assert_array_equal(features(DENSE, weights, X), made)


def test_initial_weights_come_from_the_generator_and_leave_global_ones_alone():
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = CONV.initial(np.random.default_rng(3))
    CONV.module(first)
    np.testing.assert_array_equal(first, CONV.initial(np.random.default_rng(3)))
    assert (first != CONV.initial(np.random.default_rng(4))).all()
    assert torch.equal(torch_before, torch.get_rng_state())
    np.testing.assert_array_equal(numpy_before, np.random.get_state()[1])


@BOTH
def test_a_network_can_be_trained_with_gradients_of_single_records(backbone):
    validators = pytest.importorskip("opacus.validators")
    network = backbone.module(backbone.initial(np.random.default_rng(0)))
    assert validators.ModuleValidator.validate(network, strict=False) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"n_features": 0}, "n_features=0"),
        ({"n_features": 9, "n_out": 0}, "n_out=0"),
        ({"n_features": 9, "hidden": (4, -1)}, "hidden=-1"),
        ({"n_features": 16, "kind": "deep"}, "kind='deep'"),
        ({"n_features": 15, "kind": "conv"}, "n_features=15 is no square"),
        ({"n_features": 9, "kind": "conv"}, "n_features=9 is no square"),
    ],
)
def test_a_network_that_cannot_be_built_is_refused(arguments, said):
    with pytest.raises(ParameterError, match=said):
        Backbone(**arguments)


def test_weights_of_another_network_are_refused():
    weights = CONV.initial(np.random.default_rng(0))
    with pytest.raises(ParameterError, match=rf"needs \({DENSE.n_parameters},\)"):
        DENSE.module(weights)
    with pytest.raises(ParameterError, match=f"has {DENSE.n_parameters}"):
        DENSE.weights_of(CONV.module(weights))


def test_records_of_another_width_are_refused():
    with pytest.raises(DataError, match=r"\(3, 63\)"):
        features(DENSE, DENSE.initial(np.random.default_rng(0)), records(3, 63))


@pytest.mark.parametrize("size", [1e30, np.nan])
def test_features_that_are_not_finite_are_refused(size):
    with pytest.raises(TrainingError, match="not finite"):
        features(DENSE, np.full(DENSE.n_parameters, size), records(3, 64))


def test_importing_does_not_import_torch():
    code = "import sys; import secure_fedclust.algorithms.deepfeca; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == "False"
