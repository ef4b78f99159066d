"""Checks of parameters that partitions and generators share."""

import numpy as np

from secure_fedclust.errors import ParameterError

Seed = int | np.random.Generator


def check_counts(**counts: int) -> None:
    """Raise unless every value is an integer of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ParameterError(f"{name}={value!r} must be an integer of at least 1")


def check_positive(**values: float) -> None:
    """Raise unless every value is a finite number above 0."""
    for name, value in values.items():
        if not (isinstance(value, int | float | np.number) and np.isfinite(value) and value > 0):
            raise ParameterError(f"{name}={value!r} must be a finite number above 0")
