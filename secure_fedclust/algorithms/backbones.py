"""Small networks that make features of records.

A network is described by a `Backbone`, and its weights travel as one flat vector. PyTorch is
imported only where a network is built or run.

There is no batch normalisation: it mixes records, and a record's features must depend on nothing
but the record and the weights. `outputs` keeps that bit for bit: records go through the network
one at a time. A product over many of them may add in an order that depends on where a record stands
and how many there are, and so let a record move the features of others by a rounding error, which
no sensitivity bound accounts for.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np

from secure_fedclust.algorithms.rows import directions_of
from secure_fedclust.arrays import Floats
from secure_fedclust.errors import DataError, ParameterError, TrainingError
from secure_fedclust.parameters import check_choice, check_counts
from secure_fedclust.threads import one_thread

if TYPE_CHECKING:
    from torch import nn

_CHANNELS = (8, 16)
_KERNEL = 3


@dataclass(frozen=True)
class Backbone:
    """What a network looks like, without its weights.

    Parameters
    ----------
    n_features : int
        Numbers in a record.
    kind : {"dense", "conv"}, default="dense"
        "conv" takes a record as a square image of one channel, row by row, and puts two
        convolutions of 8 and 16 channels, each followed by pooling over 2 x 2, before the dense
        layers.
    hidden : tuple of int, default=(256,)
        Units of the dense layers between input and output; may be empty.
    n_out : int, default=16
        Features of a record.

    Examples
    --------
    >>> Backbone(784).n_parameters
    205072
    >>> Backbone(784, "conv", hidden=()).n_parameters
    13808
    """

    n_features: int
    kind: Literal["dense", "conv"] = "dense"
    hidden: tuple[int, ...] = (256,)
    n_out: int = 16

    def __post_init__(self) -> None:
        check_counts(n_features=self.n_features, n_out=self.n_out)
        check_choice("kind", self.kind, ("dense", "conv"))
        object.__setattr__(self, "hidden", tuple(self.hidden))
        for units in self.hidden:
            check_counts(hidden=units)
        if self.kind == "conv" and (self._side**2 != self.n_features or self._side < 4):
            raise ParameterError(
                f"n_features={self.n_features!r} is no square image of at least 4 x 4 pixels: "
                'use kind="dense"'
            )

    @property
    def n_parameters(self) -> int:
        """Length of the vector of weights."""
        return sum(math.prod(shape) + shape[0] for shape in self._layers)

    def initial(self, rng: np.random.Generator) -> Floats:
        """Random weights and biases, uniform up to one over the root of a unit's inputs."""
        return np.concatenate([uniform_layer(shape, rng) for shape in self._layers])

    def module(self, weights: Floats) -> "nn.Sequential":
        """Return a PyTorch network with these weights, in single precision."""
        from torch import nn

        layers: list[nn.Module] = []
        if self.kind == "conv":
            layers.append(nn.Unflatten(1, (1, self._side, self._side)))
            for shape in self._layers[: len(_CHANNELS)]:
                convolution = _empty(nn.Conv2d, shape[1], shape[0], _KERNEL, padding=_KERNEL // 2)
                layers += [convolution, nn.ReLU(), nn.MaxPool2d(2)]
            layers.append(nn.Flatten())
        for shape in self._dense_layers:
            layers += [linear(shape[1], shape[0]), nn.ReLU()]
        network = nn.Sequential(*layers[:-1])
        fill(network, weights)
        return network

    def weights_of(self, module: "nn.Module") -> Floats:
        """Take the weights out of a network that `module` made."""
        weights = flatten(module)
        if len(weights) != self.n_parameters:
            raise ParameterError(
                f"the network has {len(weights)} weights and {self} has {self.n_parameters}: pass "
                "a network that module() of the same backbone made"
            )
        return weights

    @property
    def _side(self) -> int:
        return math.isqrt(self.n_features)

    @property
    def _layers(self) -> list[tuple[int, ...]]:
        """Shapes of the weight arrays, outputs first; each layer has a bias for each output."""
        if self.kind == "dense":
            return self._dense_layers
        inputs = (1, *_CHANNELS[:-1])
        convolutions = [(b, a, _KERNEL, _KERNEL) for a, b in zip(inputs, _CHANNELS, strict=True)]
        return [*convolutions, *self._dense_layers]

    @property
    def _dense_layers(self) -> list[tuple[int, ...]]:
        n_in = self.n_features
        if self.kind == "conv":
            n_in = _CHANNELS[-1] * (self._side // 2 // 2) ** 2
        units = (n_in, *self.hidden, self.n_out)
        return [(b, a) for a, b in pairwise(units)]


def features(backbone: Backbone, weights: Floats, X: Floats, *, refuse: bool = True) -> Floats:
    """Where records lie in what the network makes of them: its outputs, scaled to length one.

    How long outputs are says more about the network than about a record, and before a network is
    trained there is no telling; features of length one need no bound. Parameters and errors are
    those of `outputs`.
    """
    return directions_of(outputs(backbone, weights, X, refuse=refuse))


def outputs(backbone: Backbone, weights: Floats, X: Floats, *, refuse: bool = True) -> Floats:
    """What the network makes of records, of each by itself.

    Parameters
    ----------
    backbone : Backbone
    weights : array of shape (P,)
    X : array of shape (n, d)
    refuse : bool
        If false, outputs that are not finite count as zero, instead of an error.

    Returns
    -------
    array of shape (n, n_out)
        Bit for bit the same for a record wherever it stands and whatever stands beside it.

    Raises
    ------
    TrainingError
        If an output is not a finite number.
    """
    import torch

    check_width(backbone, X)
    network = backbone.module(weights)
    made = np.empty((len(X), backbone.n_out))
    with one_thread(), torch.inference_mode():
        # One buffer for all, since alignment in memory can decide the order of additions.
        row = torch.empty((1, backbone.n_features))
        for i, record in enumerate(X.astype(np.float32)):
            row[0] = torch.from_numpy(record)
            made[i] = network(row)[0].numpy()
    if not refuse:
        return np.nan_to_num(made, posinf=0.0, neginf=0.0)
    if not np.isfinite(made).all():
        raise TrainingError(
            "the network gives features that are not finite: scale the records to about 0 to 1, "
            "or lower the learning rate that its weights come from"
        )
    return made


def uniform_layer(shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Draw flat weights and biases of a layer whose weights have this shape, outputs first."""
    reach = 1 / math.sqrt(math.prod(shape[1:]))
    return rng.uniform(-reach, reach, math.prod(shape) + shape[0])


def linear(n_in: int, n_out: int) -> "nn.Module":
    """Make a linear layer whose weights are still to be filled in."""
    from torch import nn

    return _empty(nn.Linear, n_in, n_out)


def fill(network: "nn.Module", weights: Floats) -> None:
    """Write a flat vector into the weights of a network."""
    import torch

    sizes = [p.numel() for p in network.parameters()]
    if np.shape(weights) != (sum(sizes),):
        raise ParameterError(
            f"weights have shape {np.shape(weights)}: this network needs ({sum(sizes)},)"
        )
    parts = np.split(weights.astype(np.float32), np.cumsum(sizes)[:-1])
    with torch.no_grad():
        for p, part in zip(network.parameters(), parts, strict=True):
            p.copy_(torch.from_numpy(part).reshape(p.shape))


def flatten(network: "nn.Module") -> Floats:
    """All weights of a network as one vector."""
    parts = [p.detach().cpu().numpy().ravel() for p in network.parameters()]
    return np.concatenate(parts).astype(np.float64)


def check_width(backbone: Backbone, X: Floats) -> None:
    """Raise unless the records are as wide as the network's input."""
    if np.ndim(X) != 2 or np.shape(X)[1] != backbone.n_features:
        raise DataError(
            f"records have shape {np.shape(X)} and the network takes {backbone.n_features} "
            "features: change one"
        )


def _empty(kind: "type[nn.Module]", *arguments: int, **options: int) -> "nn.Module":
    """Make a layer without drawing weights, which would take them from the global generator."""
    from torch.nn import utils

    made: nn.Module = utils.skip_init(kind, *arguments, **options)  # type: ignore[no-untyped-call]
    return made
