"""Small autoencoders, many at a time.

A federation of clusters has one autoencoder a cluster, all of one shape and each with few
records. One by one, most of the time would go into starting small operations; here the models are
stacked, and one batched matrix product serves them all.

Weights travel as one row of numbers a model: for each layer the weight matrix, (out, in) as torch
has it, then the bias.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import TrainingError
from secure_fedclust.threads import one_thread

if TYPE_CHECKING:
    import torch

_RECORDS_AT_A_TIME = 8  # as many as share one pass over a model's weights


@dataclass(frozen=True)
class Autoencoder:
    """The shape of an autoencoder: linear layers, ReLU between them, a linear output.

    Parameters
    ----------
    n_features : int
    hidden : tuple of int
        Widths of the encoder, the last of which is the code; the decoder mirrors it.

    Examples
    --------
    >>> shape = Autoencoder(4, hidden=(3, 2))
    >>> shape.widths
    (4, 3, 2, 3, 4)
    >>> shape.n_parameters
    48
    """

    n_features: int
    hidden: tuple[int, ...] = (100, 64, 32)

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of every layer, the input and the output among them."""
        return (self.n_features, *self.hidden, *self.hidden[-2::-1], self.n_features)

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of every linear layer."""
        return tuple(zip(self.widths[:-1], self.widths[1:], strict=True))

    @property
    def n_parameters(self) -> int:
        """Length P of a row of weights."""
        return sum((inputs + 1) * outputs for inputs, outputs in self.layers)

    def initial(self, rng: np.random.Generator) -> Floats:
        """Random weights, distributed as torch's own: uniform, as wide as 1 / sqrt(inputs)."""
        return np.concatenate(
            [
                rng.uniform(-1, 1, (inputs + 1) * outputs) / np.sqrt(inputs)
                for inputs, outputs in self.layers
            ]
        )

    def module(self, weights: Floats) -> "torch.nn.Sequential":
        """A torch module of its own with these weights, in float32."""
        import torch

        parts: list[torch.nn.Module] = []
        for (inputs, outputs), (matrix, bias) in zip(
            self.layers, self._split(weights), strict=True
        ):
            # Not initialised by torch, which would draw from its global generator.
            linear = torch.nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
            with torch.no_grad():
                linear.weight.copy_(torch.from_numpy(matrix))
                linear.bias.copy_(torch.from_numpy(bias))
            parts += [linear, torch.nn.ReLU()]
        return torch.nn.Sequential(*parts[:-1])

    def weights_of(self, module: "torch.nn.Module") -> Floats:
        """The weights of such a module as one row."""
        return np.concatenate(
            [p.detach().numpy().astype(np.float64).ravel() for p in module.parameters()]
        )

    def _split(self, weights: Any) -> Iterator[tuple[Any, Any]]:
        """Views (..., out, in) and (..., out) of each layer's weights and bias."""
        start = 0
        for inputs, outputs in self.layers:
            middle = start + inputs * outputs
            matrix = weights[..., start:middle]
            yield (
                matrix.reshape(*matrix.shape[:-1], outputs, inputs),
                weights[..., middle : middle + outputs],
            )
            start = middle + outputs


def train(
    shape: Autoencoder,
    weights: Floats,
    data: Sequence[Floats],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    rng: np.random.Generator,
) -> Floats:
    """Train every model on its own records: Adam on the mean squared reconstruction error.

    Each model takes the steps that it would take alone, with its own shuffles, last batches and
    Adam state; only the products are done together. Computed in float32.

    Parameters
    ----------
    shape : Autoencoder
    weights : array of shape (m, P)
        Where the models start.
    data : m arrays of shape (n_i, d)
        A model without records stays as it is.
    epochs, batch_size, learning_rate
        As usual.
    rng : numpy Generator
        Shuffles records.

    Returns
    -------
    array of shape (m, P)

    Raises
    ------
    TrainingError
        If a model has diverged.
    """
    trained = weights.copy()
    sizes = np.array([len(records) for records in data], dtype=np.int64)
    # The models that still have records in an epoch are always the first ones in this order.
    order = np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes)]
    seeds = rng.integers(1 << 63, size=len(data))
    if not epochs or not len(order):
        return trained
    # On products this small, threads wait for each other longer than they work, and where they
    # share cores with another process a hundred times longer.
    with one_thread():
        found = _train_stacked(
            shape,
            weights[order],
            [data[i] for i in order],
            [np.random.default_rng(seeds[i]) for i in order],
            epochs,
            batch_size,
            learning_rate,
        )
    astray = np.sort(order[~np.isfinite(found).all(axis=1)])
    if len(astray):
        raise TrainingError(
            f"{len(astray)} of {len(data)} autoencoders diverged, the first of them model "
            f"{astray[0]} with {sizes[astray[0]]} records: use a learning_rate lower than "
            f"{learning_rate}, and records that are finite and of the order of 1"
        )
    trained[order] = found
    return trained


def _train_stacked(
    shape: Autoencoder,
    weights: Floats,
    data: Sequence[Floats],
    rngs: Sequence[np.random.Generator],
    epochs: int,
    batch_size: int,
    learning_rate: float,
) -> Floats:
    """`train` for models with records, those with most records first."""
    import torch

    sizes = np.array([len(records) for records in data])
    n = int(sizes.sum())
    starts = np.cumsum(sizes) - sizes
    # Row n is the padding of short batches.
    records = torch.zeros(n + 1, shape.n_features)
    records[:n] = torch.from_numpy(np.concatenate(data))
    stacked = torch.from_numpy(weights).to(torch.float32)
    gradients = torch.empty_like(stacked)
    # Models are parameters of one optimiser, which leaves those without a gradient alone.
    models, rows = list(stacked), list(gradients)
    optimiser = torch.optim.Adam(models, lr=learning_rate, fused=True)
    for _ in range(epochs):
        schedule = np.full((len(data), -(-int(sizes[0]) // batch_size) * batch_size), n)
        for i, rng in enumerate(rngs):
            schedule[i, : sizes[i]] = starts[i] + rng.permutation(sizes[i])
        for start in range(0, int(sizes[0]), batch_size):
            active = int(np.count_nonzero(sizes > start))
            for i, model in enumerate(models):
                model.grad = rows[i] if i < active else None
            batch = torch.from_numpy(schedule[:active, start : start + batch_size])
            _gradients(shape, stacked[:active], records[batch], batch < n, gradients[:active])
            optimiser.step()
    return stacked.numpy().astype(np.float64)


def _gradients(
    shape: Autoencoder,
    weights: "torch.Tensor",
    X: "torch.Tensor",
    present: "torch.Tensor",
    out: "torch.Tensor",
) -> None:
    """Gradient of each model's mean squared error over its batch, written into `out`.

    By hand, because autograd would copy all weights once a layer to gather a stacked gradient.
    """
    import torch

    layers = list(shape._split(weights))
    inputs = [X]
    for matrix, bias in layers:
        inputs.append(torch.baddbmm(bias[:, None], inputs[-1], matrix.transpose(1, 2)))
        if len(inputs) <= len(layers):
            inputs[-1].relu_()
    factor = present * (2 / shape.n_features / present.sum(dim=1, keepdim=True))
    delta = (inputs.pop() - X) * factor[:, :, None]
    for (matrix, _), (matrix_out, bias_out) in zip(
        reversed(layers), reversed(list(shape._split(out))), strict=True
    ):
        below = inputs.pop()
        torch.bmm(delta.transpose(1, 2), below, out=matrix_out)
        torch.sum(delta, dim=1, out=bias_out)
        if inputs:
            delta = torch.bmm(delta, matrix).mul_(below > 0)


def errors(shape: Autoencoder, weights: Floats, X: Floats) -> Floats:
    """Mean squared reconstruction error of every record under every model.

    A record's errors depend on this record alone, to the last bit, whatever other records there
    are and wherever it stands among them. Matrix products do not promise that: which kernel a row
    goes through may depend on its place. Privacy needs it, because counts of the models that fit
    best change by one record at most only if no other record's errors move.

    Parameters
    ----------
    shape : Autoencoder
    weights : array of shape (m, P)
    X : array of shape (n, d)

    Returns
    -------
    array of shape (n, m)
        In float64; infinite where a model's output is not a number.
    """
    found = np.empty((len(X), len(weights)))
    X = np.ascontiguousarray(X, dtype=np.float64)
    widths = np.array(shape.widths)
    for i, row in enumerate(weights):
        packed = np.concatenate(
            [part for matrix, bias in shape._split(row) for part in (matrix.T.ravel(), bias)]
        )
        _compiled_errors()(widths, packed, X, found[:, i])
    found[np.isnan(found)] = np.inf
    return found


@cache
def _compiled_errors() -> Any:
    """Compiled when first used, so that importing this file needs no numba.

    No fast maths: sums are then done in the order that is written here, a record for itself.
    """
    import numba

    return numba.njit(_errors, cache=True, nogil=True)


def _errors(widths: Any, packed: Any, X: Any, out: Any) -> None:
    below = np.empty((_RECORDS_AT_A_TIME, widths.max()))
    above = np.empty((_RECORDS_AT_A_TIME, widths.max()))
    n_features = widths[0]
    for first in range(0, len(X), _RECORDS_AT_A_TIME):
        n = min(_RECORDS_AT_A_TIME, len(X) - first)
        for r in range(n):
            for j in range(n_features):
                below[r, j] = X[first + r, j]
        start = 0
        for layer in range(len(widths) - 1):
            n_in, n_out = widths[layer], widths[layer + 1]
            bias = start + n_in * n_out
            for r in range(n):
                for j in range(n_out):
                    above[r, j] = packed[bias + j]
            for k in range(n_in):
                row = packed[start + k * n_out : start + (k + 1) * n_out]
                for r in range(n):
                    x = below[r, k]
                    target = above[r]
                    for j in range(n_out):
                        target[j] += x * row[j]
            if layer < len(widths) - 2:
                for r in range(n):
                    for j in range(n_out):
                        above[r, j] = max(above[r, j], 0.0)
            below, above = above, below
            start = bias + n_out
        for r in range(n):
            total = 0.0
            for j in range(n_features):
                total += (below[r, j] - X[first + r, j]) ** 2
            out[first + r] = total / n_features
