"""Training whose every step is noised: DP-SGD with Opacus (extra ``deep``).

Opacus refuses networks that cannot be trained privately, takes the noisy steps and counts them.
What it would add up and noise in floating point is done here in whole numbers, on a grid on which
the noise has a standard deviation of 2^24 steps: the gradient of each record is shortened and
truncated towards zero, so that it is no longer than the norm that was charged for; the sum is
exact, whatever the order; and the noise is a discrete Gaussian. Gradients are computed record by
record, because in a batch the last bits of one record's gradient depend on how many others there
are: then one record more would move all gradients, if only a little. The proof is in
docs/proofs/training.md.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import ParameterError, TrainingError
from secure_fedclust.parameters import check_positive
from secure_fedclust.privacy.bulk_noise import NOISE, randomness
from secure_fedclust.privacy.mechanism import SamplerName
from secure_fedclust.privacy.subsampled import Training
from secure_fedclust.threads import one_thread

if TYPE_CHECKING:
    import torch

_MARGIN = 1 - 1e-9
"""Norms are sums of squares in double precision: off by less than this, for up to 2^22 weights."""

_MOST_WEIGHTS = 1 << 22
_LARGEST_RATE = 1e3

Loss = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""Of outputs and targets, the loss of each record."""


def check_trainable(module: "torch.nn.Module") -> None:
    """Refuse a network that no guarantee can be given for, in the words of Opacus' validator."""
    import torch
    from opacus.validators import ModuleValidator

    with _in_training(module):
        problems = [str(problem) for problem in ModuleValidator.validate(module, strict=False)]
    problems += [
        f"{name} is kept by the network without noise" for name, _ in module.named_buffers()
    ]
    problems += [
        f"{name} draws from a generator that all records share"
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p > 0
    ]
    weights = sum(p.numel() for p in module.parameters() if p.requires_grad)
    if not 1 <= weights <= _MOST_WEIGHTS:
        problems.append(f"it has {weights} weights to train, and 1 to {_MOST_WEIGHTS} can be")
    if problems:
        raise ParameterError(
            f"the network cannot be trained with differential privacy: {'; '.join(problems)}. "
            "Leave such layers out, or use ones that look at each record by itself, such as "
            "GroupNorm"
        )


def train(
    module: "torch.nn.Module",
    X: Floats,
    targets: Any,
    loss: Loss,
    training: Training,
    *,
    clip: float,
    expected_batch: float,
    learning_rate: float,
    sampler: SamplerName = "secure",
) -> None:
    """Train a network in place, by steps that were paid for, with Adam.

    Privacy unit: a record of X.
    Sensitivity: `clip`, as the training was charged.
    Who sees it: every step may be seen.

    Parameters
    ----------
    module : torch.nn.Module
    X : array of shape (n, d)
    targets : array, one entry a record
    loss : function
        Called with one record at a time, as a batch of one.
    training : Training
        Rate, steps and noise. It is used up: another call needs another payment.
    clip : float
        Norm that the gradient of each record is shortened to. A gradient that is not finite
        counts for nothing.
    expected_batch : float
        What noisy sums are divided by; public, and not the number of records drawn.
    learning_rate : float
    sampler : {"secure", "fast"}

    Raises
    ------
    TrainingError
        Where the steps that Opacus has counted are not those that were paid for, or the weights
        are no numbers any more. Nothing may be sent then.
    """
    import torch
    from opacus.accountants import RDPAccountant

    check_positive(clip=clip, expected_batch=expected_batch, learning_rate=learning_rate)
    if learning_rate > _LARGEST_RATE:
        raise ParameterError(f"learning_rate={learning_rate:g}: give at most {_LARGEST_RATE:g}")
    check_trainable(module)
    rate, steps = training.sampling.rate, training.sampling.steps
    drawing = randomness(sampler)
    weights = [p for p in module.parameters() if p.requires_grad]
    optimizer = _optimizer(weights, training.noise, clip, expected_batch, learning_rate)
    accountant = RDPAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=rate))
    with np.errstate(over="ignore"):  # what is too large for a number counts for nothing
        records = torch.from_numpy(np.array(X, dtype=np.float32))
    wanted = torch.from_numpy(np.array(targets))
    total = np.zeros(sum(p.numel() for p in weights), dtype=np.int64)
    # One place for all, since alignment in memory can decide the order of additions.
    row = records.new_empty((1, *records.shape[1:]))
    target = wanted.new_empty((1, *wanted.shape[1:]))
    try:
        with _in_training(module), one_thread():
            for _ in range(steps):
                total[:] = 0
                for i in drawing.choose(len(X), rate).tolist():
                    row[0], target[0] = records[i], wanted[i]
                    cost = loss(module(row), target).sum()
                    add_clipped(_gradient(cost, weights), total, clip, training.noise)
                total += drawing.noise(len(total))
                optimizer.noisy = total
                optimizer.step()
    finally:
        for p in weights:
            p.grad = None
            for name in ("grad_sample", "summed_grad"):
                if hasattr(p, name):
                    delattr(p, name)
    if accountant.history != [(training.noise, rate, steps)]:
        raise TrainingError(
            f"Opacus has counted {accountant.history}, and {steps} steps with noise "
            f"{training.noise:.6g} at rate {rate:.6g} were paid for"
        )
    if not all(bool(torch.isfinite(p).all()) for p in weights):
        raise TrainingError(
            f"the weights are no numbers after {steps} noisy steps: lower "
            f"learning_rate={learning_rate:g}"
        )


def add_clipped(gradient: NDArray[Any], total: Ints, clip: float, noise: float) -> None:
    """Add one record's gradient to a sum, no longer than `clip` and in whole grid steps.

    Parameters
    ----------
    gradient : float array of shape (P,)
    total : int64 array of shape (P,)
    clip, noise : float
        The grid is such that noise of `noise` times `clip` is `NOISE` steps.
    """
    longest = NOISE / noise
    _adder()(gradient, total, longest / clip, longest * _MARGIN)


def _gradient(cost: "torch.Tensor", weights: "Sequence[torch.Tensor]") -> NDArray[Any]:
    import torch

    parts = torch.autograd.grad(cost, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([part.reshape(-1) for part in parts]).numpy()


@cache
def _adder() -> Any:
    """Compiled when first used, so that importing this file needs no numba."""
    import numba

    return numba.njit(_add_clipped, cache=True, nogil=True)


def _add_clipped(gradient: NDArray[Any], total: Ints, per_step: float, longest: float) -> None:
    squares = 0.0
    for value in gradient:
        squares += np.float64(value) * np.float64(value)
    norm = np.sqrt(squares)
    # What is not a number, or too large for one, counts for nothing.
    if not norm < np.inf:
        return
    factor = per_step
    if norm * per_step > longest:
        factor = longest / norm
    for i in range(len(gradient)):
        total[i] += np.int64(np.trunc(np.float64(gradient[i]) * factor))


def _optimizer(
    weights: "Sequence[torch.Tensor]",
    noise: float,
    clip: float,
    expected_batch: float,
    learning_rate: float,
) -> Any:
    import torch
    from opacus.optimizers import DPOptimizer

    class ExactSums(DPOptimizer):  # type: ignore[misc]
        """Opacus' optimizer, for sums that were added up and noised in whole grid steps."""

        noisy: Ints

        def step(self, closure: Any = None) -> Any:
            # Opacus wants to see gradients of records; there are none to be seen any more.
            for p in self.params:
                p.grad_sample = p.new_zeros((0, *p.shape))
            return super().step(closure)

        def clip_and_accumulate(self) -> None:
            """Done, record by record."""

        def add_noise(self) -> None:
            grid_step = self.noise_multiplier * self.max_grad_norm / NOISE
            sums = torch.from_numpy(self.noisy * grid_step)
            sizes = [p.numel() for p in self.params]
            for p, part in zip(self.params, torch.split(sums, sizes), strict=True):
                p.grad = part.reshape(p.shape).to(p.dtype)

    inner = torch.optim.Adam(weights, lr=learning_rate)
    return ExactSums(
        inner,
        noise_multiplier=noise,
        max_grad_norm=clip,
        expected_batch_size=expected_batch,
        loss_reduction="mean",
    )


@contextmanager
def _in_training(module: "torch.nn.Module") -> Iterator[None]:
    """Every part of a network as it is when it learns, and afterwards as it was."""
    before = [(part, part.training) for part in module.modules()]
    module.train()
    try:
        yield
    finally:
        for part, was in before:
            part.training = was
