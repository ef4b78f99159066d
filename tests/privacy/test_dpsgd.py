"""Noisy training: each record counts for no more than was charged, and the noise is as charged."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from torch import nn

from secure_fedclust.errors import ParameterError, TrainingError
from secure_fedclust.privacy import dpsgd
from secure_fedclust.privacy.bulk_noise import NOISE, Secret
from secure_fedclust.privacy.dpsgd import add_clipped, check_trainable, train
from secure_fedclust.privacy.subsampled import Sampling, Training, pld_of

X = np.random.default_rng(0).normal(size=(40, 6))
FLOAT32 = np.finfo(np.float32)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 6))


def squared_error(outputs, targets):
    return (outputs - targets).square().mean(dim=1)


def fit(module, data=X, *, rate=0.5, steps=3, noise=1.0, **given):
    options = {"clip": 1.0, "expected_batch": 20.0, "learning_rate": 0.01, "sampler": "fast"}
    train(
        module,
        data,
        data.astype(np.float32),
        squared_error,
        Training(Sampling(rate, steps), noise),
        **options | given,
    )
    return module


def flat(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()


class Watched:
    """In place of randomness: no noise, and the records that one likes; remembers the sums."""

    def __init__(self, *batches):
        self.batches, self.asked, self.noise_asked = list(batches), [], []

    def choose(self, n, rate):
        self.asked.append((n, rate))
        return np.array(self.batches.pop(0), dtype=np.int64)

    def noise(self, size):
        self.noise_asked.append(size)
        return np.zeros(size, dtype=np.int64)


def sums_of(monkeypatch, module, data, *batches, noise=1.0, clip=1.0, loss=squared_error):
    """Exact sums of shortened gradients, one a step in which the weights stay as they are."""
    watched, found = Watched(*batches), []
    monkeypatch.setattr(dpsgd, "randomness", lambda name: watched)
    original = dpsgd._optimizer

    def still(*given):
        optimizer = original(*given)
        add = optimizer.add_noise

        def add_noise():
            found.append(optimizer.noisy.copy())
            add()
            for p in optimizer.params:
                p.grad.zero_()

        optimizer.add_noise = add_noise
        return optimizer

    monkeypatch.setattr(dpsgd, "_optimizer", still)
    train(
        module,
        data,
        np.asarray(data, dtype=np.float32),
        loss,
        Training(Sampling(0.5, len(batches)), noise),
        clip=clip,
        expected_batch=1.0,
        learning_rate=0.1,
    )
    return found


def noisy_sums(monkeypatch, data, *, rate, steps, noise, weaker=1.0):
    """Noisy sums of many steps in which the weights stay as they are, in standard deviations."""
    found = []
    original = dpsgd._optimizer

    def still(*given):
        optimizer = original(*given)

        def add_noise():
            found.append(optimizer.noisy / NOISE)
            for p in optimizer.params:
                p.grad = torch.zeros_like(p)

        optimizer.add_noise = add_noise
        return optimizer

    class Weaker(Secret):
        def noise(self, size):
            return (super().noise(size) * weaker).astype(np.int64)

    monkeypatch.setattr(dpsgd, "_optimizer", still)
    monkeypatch.setattr(dpsgd, "randomness", lambda name: Weaker())
    fit(nn.Linear(6, 1, bias=False), data, rate=rate, steps=steps, noise=noise)
    monkeypatch.undo()
    return np.array(found)


def game(monkeypatch, weaker=1.0):
    """Two neighbours, as seen by somebody who knows everything but whether a record is there."""
    rate, noise, steps = 0.5, 0.8, 1000
    canary = np.zeros((1, 6))
    canary[0, 0] = 50.0
    # The others' gradients are about nothing in the direction of the one that is looked for.
    others = np.zeros((3, 6))
    others[:, 1:] = 0.01
    options = {"rate": rate, "steps": steps, "noise": noise, "weaker": weaker}
    absent = noisy_sums(monkeypatch, others, **options)
    present = noisy_sums(monkeypatch, np.concatenate([others, canary]), **options)
    sign = np.sign(present[:, 0].mean())
    return rate, noise, sign * absent[:, 0], sign * present[:, 0]


def excess(rate, noise, absent, present):
    """By how much two neighbours are told apart better than was charged for, for certain."""
    curve = pld_of(Training(Sampling(rate, 1), noise), 1e-3)
    found = []
    for epsilon in (0.0, 0.3, 0.7, 1.2):
        allowed = curve.get_delta_for_epsilon(epsilon)
        for threshold in np.linspace(-2, 4, 13):
            for one, other in ((present, absent), (-absent, -present)):
                wins = stats.binomtest(int((one > threshold).sum()), len(one))
                losses = stats.binomtest(int((other > threshold).sum()), len(other))
                least = wins.proportion_ci(1 - 1e-6).low
                most = losses.proportion_ci(1 - 1e-6).high
                found.append(least - np.exp(epsilon) * most - allowed)
    return max(found)


def test_a_game_on_single_steps_finds_what_was_charged_and_no_more(monkeypatch):
    rate, noise, absent, present = game(monkeypatch)
    assert excess(rate, noise, absent, present) <= 0
    # And the laws are those of the proof: noise alone, and the record in every second step.
    assert stats.kstest(absent, "norm").pvalue > 1e-6

    def mixture(x):
        return (1 - rate) * stats.norm.cdf(x) + rate * stats.norm.cdf(x - 1 / noise)

    assert stats.kstest(present, mixture).pvalue > 1e-6


def test_the_game_would_have_found_half_the_noise(monkeypatch):
    assert excess(*game(monkeypatch, weaker=0.5)) > 0


def squared_length(total):
    return sum(int(value) ** 2 for value in total.tolist())


def shortened(gradient, noise=1.0, clip=1.0):
    total = np.zeros(len(gradient), dtype=np.int64)
    add_clipped(np.asarray(gradient), total, clip, noise)
    return total


HARD = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


@given(
    arrays(np.float32, st.integers(1, 30), elements=HARD),
    st.floats(0.01, 1e5),
    st.floats(1e-6, 1e6),
)
def test_no_record_counts_for_more_than_the_norm_whatever_its_gradient(gradient, noise, clip):
    assert squared_length(shortened(gradient, noise, clip)) <= (NOISE / noise) ** 2


@pytest.mark.parametrize("size", [1, 100_000, 1_000_000])
@pytest.mark.parametrize(
    "kind", ["equal", "largest", "spread", "normal", "long tail", "subnormal", "one and many small"]
)
def test_it_holds_for_a_million_weights_to_the_last_step(size, kind):
    rng = np.random.default_rng(size)
    gradient = {
        "equal": np.full(size, 0.1),
        "largest": np.full(size, FLOAT32.max),
        "spread": np.logspace(-38, 38, size),
        "normal": rng.normal(size=size),
        "long tail": rng.standard_cauchy(size) ** 3,
        "subnormal": np.full(size, FLOAT32.smallest_subnormal),
        "one and many small": np.r_[1.0, np.full(size - 1, 1e-4)],
    }[kind].astype(np.float32)
    for noise in (0.3, 1.0, 7.77):
        total = shortened(gradient, noise)
        most = (NOISE / noise) ** 2
        assert squared_length(total) <= most
        if kind in ("normal", "largest") and size > 1:  # and not much is lost
            assert squared_length(total) > 0.99 * most


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_no_number_counts_for_nothing(bad):
    assert not shortened(np.array([1.0, bad, 0.1], dtype=np.float32)).any()


def test_a_short_gradient_is_not_made_longer_and_is_truncated_towards_zero():
    step = 1 / NOISE
    gradient = np.array([2.5, -2.5, 0.9, -0.9, 1e-30, -7.0]) * step
    assert shortened(gradient).tolist() == [2, -2, 0, 0, 0, -7]


def test_a_record_s_part_in_a_sum_is_the_same_whoever_else_is_in_it(monkeypatch):
    rng = np.random.default_rng(1)
    data, module = rng.normal(size=(40, 6)), network()
    alone = [[i] for i in range(40)]
    batches = [list(range(n)) for n in (0, 1, 2, 3, 5, 17, 40)]
    found = sums_of(monkeypatch, module, data, *alone, *batches)
    for batch, total in zip(batches, found[40:], strict=True):
        expected = np.sum([found[i] for i in batch], axis=0) if batch else np.zeros(58)
        np.testing.assert_array_equal(total, expected)


def test_the_sum_is_that_of_the_shortened_gradients(monkeypatch):
    module = network()
    [total] = sums_of(monkeypatch, module, X, [3, 8], clip=0.5, noise=2.0)
    expected = np.zeros(58)
    for i in (3, 8):
        record = torch.tensor(X[i : i + 1], dtype=torch.float32)
        loss = squared_error(module(record), record).sum()
        parts = torch.autograd.grad(loss, list(module.parameters()))
        gradient = torch.cat([part.reshape(-1) for part in parts]).double().numpy()
        expected += gradient * min(1.0, 0.5 / np.linalg.norm(gradient))
    # Noise of 2 * 0.5 is 2^24 steps.
    np.testing.assert_allclose(total / NOISE, expected, atol=3 / NOISE, rtol=1e-6)


def test_records_that_are_no_numbers_do_not_stop_the_training_nor_show(monkeypatch):
    data = X.copy()
    data[5] = np.nan
    data[6] = 1e300
    with np.errstate(over="ignore"):  # of the targets
        with_them, without = sums_of(monkeypatch, network(), data, [1, 5, 6, 9], [1, 9])
    np.testing.assert_array_equal(with_them, without)


def test_of_records_that_are_all_no_numbers_noise_is_learned():
    assert np.isfinite(flat(fit(network(), np.full((8, 6), np.nan)))).all()


def test_an_empty_batch_is_a_step_like_any_other(monkeypatch):
    watched = Watched([], [0, 1], [])
    monkeypatch.setattr(dpsgd, "randomness", lambda name: watched)
    fit(network(), steps=3, rate=0.25)
    assert watched.asked == [(40, 0.25)] * 3 and watched.noise_asked == [58] * 3


def test_without_records_there_is_a_network_of_noise():
    before = flat(network())
    for sampler in ("fast", "secure"):
        after = flat(fit(network(), np.zeros((0, 6)), sampler=sampler))
        assert np.isfinite(after).all() and (after != before).all()


@pytest.mark.parametrize("sampler", ["secure", "fast"])
def test_the_noise_of_a_step_is_noise_times_clip_over_the_expected_batch(sampler, monkeypatch):
    monkeypatch.setattr(torch.optim, "Adam", lambda given, lr: torch.optim.SGD(given, lr=lr))
    torch.manual_seed(0)
    module = nn.Linear(300, 200)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    fit(
        module,
        np.zeros((0, 300)),
        steps=1,
        noise=3.0,
        clip=0.7,
        expected_batch=16.5,
        learning_rate=1.0,
        sampler=sampler,
    )
    drawn = flat(module) / (3.0 * 0.7 / 16.5)
    assert drawn.std() == pytest.approx(1, abs=0.015) and abs(drawn.mean()) < 0.025
    assert abs(stats.kurtosis(drawn)) < 0.12
    assert stats.kstest(drawn, "norm").pvalue > 1e-6


@pytest.mark.parametrize("sampler", ["secure", "fast"])
def test_seeds_do_not_repeat_noise_or_batches(sampler):
    found = []
    for _ in range(2):
        np.random.seed(0)
        found.append(flat(fit(network(), sampler=sampler)))  # which sets torch's seed
    assert (found[0] != found[1]).mean() > 0.9


def test_noise_and_batches_are_drawn_anew_in_every_step_and_call():
    totals = []
    original = dpsgd._optimizer

    def watching(*given):
        optimizer = original(*given)
        add = optimizer.add_noise

        def add_noise():
            totals.append(optimizer.noisy.copy())
            add()

        optimizer.add_noise = add_noise
        return optimizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpsgd, "_optimizer", watching)
        module = network()
        for _ in range(2):
            fit(module, np.zeros((0, 6)), steps=4, sampler="secure")
    assert len(np.unique(np.concatenate(totals))) > 0.999 * 8 * 58


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(4), "BatchNorm cannot support training with differential privacy"),
        (nn.BatchNorm1d(4, affine=False), "running_mean is kept by the network without noise"),
        (nn.Dropout(0.5), "draws from a generator that all records share"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "kept by the network without noise"),
    ],
)
def test_networks_without_a_guarantee_are_refused_in_opacus_words(layer, message):
    module = nn.Sequential(nn.Linear(6, 4), layer, nn.Linear(4, 6))
    before = flat(module)
    for attempt in (lambda: check_trainable(module), lambda: fit(module)):
        with pytest.raises(ParameterError, match=message):
            attempt()
    np.testing.assert_array_equal(flat(module), before)


def test_a_network_without_weights_to_train_is_refused():
    with pytest.raises(ParameterError, match="0 weights to train"):
        check_trainable(nn.ReLU())
    check_trainable(nn.Sequential(network(), nn.Dropout(0.0)))


def test_frozen_weights_stay_as_they_are():
    module = network()
    module[0].weight.requires_grad_(False)
    before = module[0].weight.detach().clone()
    last = module[2].weight.detach().clone()
    fit(module)
    assert torch.equal(module[0].weight, before) and not torch.equal(module[2].weight, last)


@pytest.mark.parametrize(
    "given",
    [
        {"clip": 0.0},
        {"clip": np.inf},
        {"expected_batch": 0.0},
        {"learning_rate": -1.0},
        {"learning_rate": 1e30},
    ],
)
def test_parameters_that_make_no_sense_are_refused(given):
    with pytest.raises(ParameterError, match=f"{next(iter(given))}="):
        fit(network(), **given)


def test_weights_that_are_no_numbers_are_not_sent_and_the_error_tells_of_no_record(monkeypatch):
    huge = {"lr": 1e38}
    monkeypatch.setattr(torch.optim, "Adam", lambda given, lr: torch.optim.SGD(given, **huge))
    said = set()
    for data in (X, 1e6 * X, X[:1], X[:0]):
        with pytest.raises(
            TrainingError, match=r"after 4 noisy steps: lower learning_rate=0.01"
        ) as caught:
            fit(network(), data, clip=1000.0, steps=4)
        said.add(str(caught.value))
    assert len(said) == 1


def test_steps_that_were_not_paid_for_are_found(monkeypatch):
    from opacus.accountants import RDPAccountant

    def half(self, sample_rate):
        return lambda optimizer: self.step(noise_multiplier=0.5, sample_rate=sample_rate)

    monkeypatch.setattr(RDPAccountant, "get_optimizer_hook_fn", half)
    with pytest.raises(TrainingError, match=r"Opacus has counted \[\(0.5, 0.5, 3\)\], and 3 steps"):
        fit(network())


def test_opacus_counts_what_was_paid_for(monkeypatch):
    from opacus.accountants import RDPAccountant

    made = []
    original = RDPAccountant.__init__

    def init(self):
        original(self)
        made.append(self)

    monkeypatch.setattr(RDPAccountant, "__init__", init)
    fit(network(), rate=0.3, steps=7, noise=1.25)
    assert [each.history for each in made] == [[(1.25, 0.3, 7)]]


def test_a_trained_network_is_an_ordinary_one():
    module = network().eval()
    threads = torch.get_num_threads()
    for _ in range(2):
        fit(module)
    assert not module.training and torch.get_num_threads() == threads
    for p in module.parameters():
        assert p.grad is None
        assert not hasattr(p, "grad_sample") and not hasattr(p, "summed_grad")
    assert not module._forward_hooks and not module[0]._forward_hooks
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301
        np.testing.assert_array_equal(flat(twin), flat(module))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = flat(module)
    squared_error(module(torch.ones(2, 6)), torch.zeros(2, 6)).sum().backward()
    optimizer.step()
    assert (flat(module) != before).any()


def test_an_error_in_the_loss_leaves_the_network_usable():
    module = network()

    def broken(outputs, targets):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        train(
            module,
            X,
            X,
            broken,
            Training(Sampling(1.0, 1), 1.0),
            clip=1.0,
            expected_batch=40.0,
            learning_rate=0.1,
        )
    fit(module)


def test_the_records_are_left_as_they_are_and_may_be_read_only():
    data = X.copy()
    data.setflags(write=False)
    fit(network(), data)
    np.testing.assert_array_equal(data, X)


def test_with_little_noise_it_learns():
    rng = np.random.default_rng(0)
    data = rng.normal(size=(200, 1)) * np.ones(6)
    module = network()
    record = torch.tensor(data, dtype=torch.float32)
    before = squared_error(module(record), record).mean().item()
    fit(module, data, rate=0.25, steps=80, noise=0.3, expected_batch=50.0, learning_rate=0.02)
    assert squared_error(module(record), record).mean().item() < 0.5 * before


def test_classes_can_be_targets():
    labels = (X[:, 0] > 0).astype(np.int64)
    module = nn.Linear(6, 2)
    train(
        module,
        X,
        labels,
        nn.CrossEntropyLoss(reduction="none"),
        Training(Sampling(0.5, 3), 1.0),
        clip=1.0,
        expected_batch=20.0,
        learning_rate=0.01,
    )
    assert np.isfinite(flat(module)).all()
