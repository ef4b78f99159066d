"""Training whose every step is noised: DP-SGD with Opacus (extra ``deep``).

Opacus computes the gradient of each record, refuses networks that mix records, and counts the
steps. What it adds up and noises in floating point is done here in whole numbers: the gradient of
each record is shortened, brought to a grid and truncated towards zero, so that it is no longer
than the norm that was charged for; the sum is exact, whatever the order; and the noise is a normal
number rounded to the grid, which is post-processing of the Gaussian mechanism. Randomness, of the
noise and of which records are drawn, is that of ChaCha20 under a fresh key.
"""

import math
import secrets
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import ParameterError, TrainingError
from secure_fedclust.privacy.mechanism import SamplerName
from secure_fedclust.privacy.subsampled import Training

if TYPE_CHECKING:
    import torch

GRID_BITS = 24
"""The clipping norm is two to this power of grid steps: sums of up to 2^28 records are exact."""

_MARGIN = 1 - 1e-5
"""Norms of gradients are computed in single precision, and may be off by less than this."""

Loss = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""Of outputs and targets, the loss of each record."""


def check_trainable(module: "torch.nn.Module") -> None:
    """Refuse a network that no guarantee can be given for, in the words of Opacus' validator."""
    from opacus.validators import ModuleValidator

    problems = ModuleValidator.validate(module, strict=False)
    if problems:
        words = "; ".join(str(problem) for problem in problems)
        raise ParameterError(
            f"the network cannot be trained with differential privacy: {words}. Leave such layers "
            "out, or use ones that look at each record by itself, such as GroupNorm"
        )


def secret_generator(sampler: SamplerName) -> np.random.Generator:
    """Randomness for noise: a stream cipher's, or, for experiments without a claim, numpy's."""
    if sampler == "fast":
        return np.random.default_rng()
    from randomgen import ChaCha

    return np.random.Generator(ChaCha(key=secrets.randbits(256), rounds=20))


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
    """Train a network in place, by steps that were paid for.

    Privacy unit: a record of X.
    Sensitivity: `clip`, as the training was charged.
    Who sees it: every step may be seen.

    Parameters
    ----------
    module : torch.nn.Module
    X : array of shape (n, d)
    targets : array, one entry a record
    loss : function
    training : Training
        Rate, steps and noise. It is used up: another call needs another payment.
    clip : float
        Norm that the gradient of each record is shortened to.
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
    from opacus import GradSampleModule
    from opacus.accountants import RDPAccountant

    check_trainable(module)
    rate, steps = training.sampling.rate, training.sampling.steps
    generator = secret_generator(sampler)
    network = GradSampleModule(module, loss_reduction="sum")
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = _optimizer(parameters, training.noise, clip, expected_batch, learning_rate)
    optimizer.secret = generator
    accountant = RDPAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=rate))
    records = torch.from_numpy(np.ascontiguousarray(X, dtype=np.float32))
    wanted = torch.from_numpy(np.ascontiguousarray(targets))
    network.train()
    try:
        for _ in range(steps):
            drawn = torch.from_numpy(np.flatnonzero(generator.random(len(X)) < rate))
            optimizer.zero_grad()
            if len(drawn):
                with warnings.catch_warnings():
                    # About hooks that fire for inputs that need no gradient, as ours do not.
                    warnings.simplefilter("ignore")
                    total = loss(network(records[drawn]), wanted[drawn]).sum()
                    total.backward()  # type: ignore[no-untyped-call]
            else:
                for p in parameters:
                    p.grad_sample = torch.zeros((0, *p.shape))
            optimizer.step()
    finally:
        network.remove_hooks()
        for p in parameters:
            p.grad_sample = p.summed_grad = p.grad = None
    if accountant.history != [(training.noise, rate, steps)]:
        raise TrainingError(
            f"Opacus has counted {accountant.history}, and {steps} steps with noise "
            f"{training.noise:.6g} at rate {rate:.6g} were paid for"
        )
    if not all(bool(torch.isfinite(p).all()) for p in parameters):
        raise TrainingError(
            f"the weights are no numbers after {steps} noisy steps: lower "
            f"learning_rate={learning_rate:g}"
        )


def _optimizer(
    parameters: Any, noise: float, clip: float, expected_batch: float, learning_rate: float
) -> Any:
    import torch
    from opacus.optimizers import DPOptimizer

    class ExactSums(DPOptimizer):  # type: ignore[misc]
        """Opacus' optimizer, with sums and noise in whole numbers of grid steps."""

        secret: np.random.Generator

        def clip_and_accumulate(self) -> None:
            samples = [g.flatten(start_dim=1) for g in self.grad_samples]
            norms = [torch.linalg.vector_norm(g, dim=1) for g in samples]
            norm = torch.linalg.vector_norm(torch.stack(norms, dim=1), dim=1)
            shorter = torch.clamp(clip / torch.clamp(norm, min=1e-30), max=1.0)
            factor = (_MARGIN * 2.0**GRID_BITS / clip) * shorter
            # What is not a number, or too large for one, counts for nothing.
            if not bool((lost := ~torch.isfinite(norm)).logical_not().all()):
                samples = [torch.where(lost[:, None], 0.0, g) for g in samples]
                factor[lost] = 0.0
            for p, g in zip(self.params, samples, strict=True):
                # Up to 2^24 single precision has all whole numbers; sums are exact in double.
                whole = (g * factor[:, None]).trunc_()
                p.summed_grad = whole.sum(dim=0, dtype=torch.float64).reshape(p.shape)
                p.grad_sample._processed = True

        def add_noise(self) -> None:
            step = clip / 2.0**GRID_BITS
            sigma = self.noise_multiplier * 2.0**GRID_BITS
            for p in self.params:
                drawn = np.rint(self.secret.standard_normal(p.numel()) * sigma)
                noisy = p.summed_grad + torch.from_numpy(drawn).reshape(p.shape)
                p.grad = (noisy * step).to(p.dtype)
                p.summed_grad._processed = True

    inner = torch.optim.Adam(parameters, lr=learning_rate)
    return ExactSums(
        inner,
        noise_multiplier=noise,
        max_grad_norm=clip,
        expected_batch_size=max(1, math.ceil(expected_batch)),
        loss_reduction="mean",
    )
