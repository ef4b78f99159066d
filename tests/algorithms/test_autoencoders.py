import subprocess
import sys

import numpy as np
import pytest

from secure_fedclust.algorithms.autoencoders import Autoencoder, errors, train
from secure_fedclust.errors import TrainingError

torch = pytest.importorskip("torch")

SMALL = Autoencoder(6, hidden=(5, 3))
SETTINGS = {"epochs": 3, "batch_size": 4, "learning_rate": 0.01}


def models(shape, n, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([shape.initial(rng) for _ in range(n)])


def records(n, shape=SMALL, seed=0):
    return np.random.default_rng(seed).uniform(size=(n, shape.n_features))


def train_alone(shape, weights, X, rng, epochs, batch_size, learning_rate):
    """One model, by autograd and torch's plain Adam."""
    module = shape.module(weights)
    optimiser = torch.optim.Adam(module.parameters(), lr=learning_rate)
    X = torch.from_numpy(X).float()
    for _ in range(epochs):
        for batch in torch.from_numpy(rng.permutation(len(X))).split(batch_size):
            optimiser.zero_grad()
            torch.nn.functional.mse_loss(module(X[batch]), X[batch]).backward()
            optimiser.step()
    return shape.weights_of(module)


def test_the_decoder_mirrors_the_encoder():
    assert Autoencoder(196).widths == (196, 100, 64, 32, 64, 100, 196)
    assert Autoencoder(4, hidden=(2,)).widths == (4, 2, 4)


def test_a_module_holds_the_weights_it_was_given():
    weights = models(SMALL, 1)[0].astype(np.float32).astype(np.float64)
    assert weights.shape == (SMALL.n_parameters,)
    assert np.array_equal(SMALL.weights_of(SMALL.module(weights)), weights)


def test_a_module_shares_no_memory_with_its_weights():
    weights = models(SMALL, 1)[0]
    before = weights.copy()
    module = SMALL.module(weights)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert np.array_equal(weights, before)


def test_making_a_module_draws_nothing_from_torch():
    before = torch.get_rng_state()
    SMALL.module(models(SMALL, 1)[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_initial_weights_are_spread_like_those_of_torch():
    shape = Autoencoder(200, hidden=(100,))
    first = shape.initial(np.random.default_rng(0))[: 201 * 100]
    theirs = torch.nn.Linear(200, 100).weight.detach().numpy()
    assert first.std() == pytest.approx(theirs.std(), rel=0.03)
    assert np.abs(first).max() == pytest.approx(np.abs(theirs).max(), rel=0.01)


def test_stacked_models_learn_what_each_would_learn_alone():
    """Among them short last batches, a model with few records and one with a single one."""
    sizes = [9, 16, 3, 21, 1, 16]
    weights = models(SMALL, len(sizes))
    data = [records(n, seed=i) for i, n in enumerate(sizes)]
    found = train(SMALL, weights, data, rng=np.random.default_rng(7), **SETTINGS)
    seeds = np.random.default_rng(7).integers(1 << 63, size=len(sizes))
    for i, seed in enumerate(seeds):
        alone = train_alone(SMALL, weights[i], data[i], np.random.default_rng(seed), **SETTINGS)
        assert np.allclose(found[i], alone, atol=2e-5)
        assert np.abs(found[i] - weights[i]).max() > 1e-3


def test_training_lowers_the_error_of_every_model():
    weights = models(SMALL, 3)
    data = [records(n, seed=n) for n in (40, 60, 80)]
    found = train(
        SMALL,
        weights,
        data,
        epochs=30,
        batch_size=8,
        learning_rate=0.01,
        rng=np.random.default_rng(0),
    )
    for i, X in enumerate(data):
        assert (
            errors(SMALL, found[i : i + 1], X).mean()
            < errors(SMALL, weights[i : i + 1], X).mean() / 2
        )


def test_a_model_without_records_stays_as_it_is():
    weights = models(SMALL, 3)
    data = [records(8), records(0), records(5)]
    found = train(SMALL, weights, data, rng=np.random.default_rng(0), **SETTINGS)
    assert np.array_equal(found[1], weights[1])
    assert not np.array_equal(found[0], weights[0])


def test_nothing_to_do_changes_nothing():
    weights = models(SMALL, 2)
    rng = np.random.default_rng(0)
    assert np.array_equal(train(SMALL, weights, [records(0)] * 2, rng=rng, **SETTINGS), weights)
    none = {**SETTINGS, "epochs": 0}
    assert np.array_equal(train(SMALL, weights, [records(4)] * 2, rng=rng, **none), weights)
    assert train(SMALL, weights[:0], [], rng=rng, **SETTINGS).shape == (0, SMALL.n_parameters)


def test_training_leaves_its_input_and_torch_as_they_were():
    weights, X = models(SMALL, 1), records(8)
    before = weights.copy(), X.copy(), torch.get_num_threads(), torch.get_rng_state()
    train(SMALL, weights, [X], rng=np.random.default_rng(0), **SETTINGS)
    assert np.array_equal(weights, before[0])
    assert np.array_equal(X, before[1])
    assert torch.get_num_threads() == before[2]
    assert torch.equal(torch.get_rng_state(), before[3])


def test_training_repeats_itself_from_the_same_seed():
    weights, data = models(SMALL, 2), [records(9), records(5)]
    found = [
        train(SMALL, weights, data, rng=np.random.default_rng(seed), **SETTINGS)
        for seed in (1, 1, 2)
    ]
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


def test_a_diverged_model_is_named_and_never_returned():
    weights, data = models(SMALL, 3), [records(8), records(5) * 1e30, records(9)]
    with pytest.raises(TrainingError, match=r"1 of 3 .* model 1 with 5 .* learning_rate"):
        train(SMALL, weights, data, rng=np.random.default_rng(0), **SETTINGS)


def test_errors_are_those_of_the_modules():
    weights, X = models(SMALL, 4), records(30)
    found = errors(SMALL, weights, X)
    assert found.shape == (30, 4)
    for i, row in enumerate(weights):
        with torch.no_grad():
            made = SMALL.module(row).double()(torch.from_numpy(X)).numpy()
        # The module's weights went through float32.
        assert np.allclose(found[:, i], np.square(made - X).mean(axis=1), rtol=1e-5)


@pytest.mark.parametrize("shape", [SMALL, Autoencoder(37, hidden=(19, 11))])
def test_a_records_errors_do_not_depend_on_other_records_by_a_single_bit(shape):
    rng = np.random.default_rng(0)
    weights, X = models(shape, 3), records(101, shape)
    whole = errors(shape, weights, X)
    for n in (101, 100, 64, 17, 8, 7, 1):
        kept = rng.permutation(101)[:n]
        assert np.array_equal(errors(shape, weights, X[kept]), whole[kept])


def test_a_models_errors_do_not_depend_on_other_models():
    weights, X = models(SMALL, 4), records(10)
    assert np.array_equal(errors(SMALL, weights[2:3], X), errors(SMALL, weights, X)[:, 2:3])


def test_a_model_that_makes_no_numbers_is_never_the_best():
    weights = models(SMALL, 3)
    weights[1] = np.nan
    weights[2] = 1e200
    found = errors(SMALL, weights, records(5))
    assert np.isfinite(found[:, 0]).all()
    assert np.isinf(found[:, 1:]).all()


def test_there_may_be_no_records_or_no_models():
    assert errors(SMALL, models(SMALL, 2), records(0)).shape == (0, 2)
    assert errors(SMALL, models(SMALL, 2)[:0], records(3)).shape == (3, 0)


def test_importing_the_algorithms_does_not_import_torch():
    code = (
        "import sys, secure_fedclust.algorithms.autoencoders, secure_fedclust.algorithms.fedcref;"
        "print({'torch', 'numba'} & set(sys.modules))"
    )
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
