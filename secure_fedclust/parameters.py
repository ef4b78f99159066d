"""Checks of parameters that many functions share; each error names the parameter and its value."""

from typing import Any

import numpy as np

from secure_fedclust.errors import ParameterError

Seed = int | np.random.Generator


def check_counts(**counts: Any) -> None:
    """Raise unless every value is a whole number of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ParameterError(f"{name}={value!r}: give a whole number of at least 1")


def check_positive(**values: Any) -> None:
    """Raise unless every value is a finite number above 0."""
    for name, value in values.items():
        real = isinstance(value, int | float | np.integer | np.floating)
        if isinstance(value, bool) or not real or not 0 < value < 1e300:
            raise ParameterError(f"{name}={value!r}: give a finite number above 0")


def check_choice(name: str, value: Any, words: tuple[str, ...]) -> None:
    """Raise unless the value is one of a few words."""
    if not isinstance(value, str) or value not in words:
        raise ParameterError(f"{name}={value!r}: give one of {', '.join(words)}")


def check_flags(**flags: Any) -> None:
    """Raise unless every value is true or false."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise ParameterError(f"{name}={value!r}: give True or False")
