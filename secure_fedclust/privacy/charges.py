"""What a release costs, and what several cost together."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self

import numpy as np

from secure_fedclust.errors import BudgetExceeded, ParameterError
from secure_fedclust.parameters import check_counts, check_positive
from secure_fedclust.privacy.accounting import Limit, epsilon_of

MAX_TEXT = 256
"""Most characters of a name in a ledger."""

MAX_INPUTS = 64
"""Most inputs of a sensitivity formula."""

_LARGEST_INTEGER = 1 << 53
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class Charge:
    """What one release costs.

    Parameters
    ----------
    client, run : str
        Whose data, in which run.
    step : int
        Which step of the run.
    message : str
        What is released, e.g. ``"fkm/sums"``.
    formula : str
        Which sensitivity formula was used.
    inputs : mapping of str to float
        What was put into it.
    sensitivity, sigma : float
        Sensitivity and standard deviation of the noise, both in units of the grid.
    mu : float
        ``sensitivity / sigma``.
    slack : float
        How far the discrete noise may depart from the Gaussian (`accounting.slack_of`).
    coordinates : int
        How many numbers are released.
    """

    client: str
    run: str
    step: int
    message: str
    formula: str
    inputs: Mapping[str, float] = field(hash=False)
    sensitivity: float
    sigma: float
    mu: float
    slack: float
    coordinates: int

    def __post_init__(self) -> None:
        check_key(self.client, self.run, self.step)
        check_text(message=self.message, formula=self.formula)
        check_positive(sensitivity=self.sensitivity, sigma=self.sigma, mu=self.mu)
        if not _is_real(self.slack) or not 0 <= self.slack < math.inf:
            raise ParameterError(f"slack={self.slack!r}: give a finite number of at least 0")
        check_counts(coordinates=self.coordinates)
        if self.coordinates > _LARGEST_INTEGER:
            raise ParameterError(f"coordinates={self.coordinates}: give at most 2**53")
        if not isinstance(self.inputs, Mapping) or len(self.inputs) > MAX_INPUTS:
            raise ParameterError(f"inputs: give a mapping of at most {MAX_INPUTS} names to numbers")
        for name, value in self.inputs.items():
            check_text(**{"a name in inputs": name})
            if not _is_real(value) or not math.isfinite(value):
                raise ParameterError(f"inputs[{name!r}]={value!r}: give a finite number")
        exact = float(self.sensitivity) / float(self.sigma)
        if not math.isclose(self.mu, exact, rel_tol=1e-9):
            raise ParameterError(f"mu={self.mu}: give sensitivity / sigma, which is {exact}")
        # Numbers of numpy become plain ones, and -0.0 becomes 0.0, which is all SQLite can store.
        for name in ("sensitivity", "sigma", "mu", "slack"):
            object.__setattr__(self, name, float(getattr(self, name)) + 0.0)
        for name in ("step", "coordinates"):
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "inputs", {name: float(x) for name, x in self.inputs.items()})

    def columns(self) -> list[Any]:
        """The fields in order, as text and numbers."""
        return [
            canonical(self.inputs) if name == "inputs" else getattr(self, name) for name in _FIELDS
        ]

    @classmethod
    def of_columns(cls, columns: Sequence[Any]) -> Self:
        """What `columns` came from; a ValueError or TypeError if it cannot be."""
        found = dict(zip(_FIELDS, columns, strict=True))
        return cls(**found | {"inputs": json.loads(found["inputs"])})


_FIELDS = tuple(field.name for field in fields(Charge))


class Totals(NamedTuple):
    """What several releases of a client cost together."""

    squared_mu: float = 0.0
    slack: float = 0.0
    coordinates: int = 0

    @property
    def mu(self) -> float:
        """The mu of all of them."""
        return math.sqrt(self.squared_mu)

    def plus(self, charge: Charge) -> "Totals":
        """The totals with one more, rounded up, so that however many are not under-counted."""
        mu = max(charge.mu, charge.sensitivity / charge.sigma)
        squared_mu = self.squared_mu + math.nextafter(mu * mu, math.inf)
        return Totals(
            math.nextafter(squared_mu, math.inf),
            math.nextafter(self.slack + charge.slack, math.inf),
            self.coordinates + charge.coordinates,
        )


def exceeded(
    charge: Charge, before: Totals, after: Totals, limit: Limit, key: tuple[str, ...]
) -> BudgetExceeded:
    """The error that says what was spent, asked and allowed, by a client or in a run of it."""
    asked = math.sqrt(max(0.0, after.squared_mu - before.squared_mu))
    spent, more = (
        f"mu={mu:.6g} (epsilon {epsilon_of(limit.delta, mu):.6g})" for mu in (before.mu, asked)
    )
    whose = "the lifetime budget" if len(key) == 1 else f"the plan of run {charge.run!r}"
    text = (
        f"client {charge.client!r}, {charge.message}: spent {spent}, asked {more}, limit "
        f"mu={limit.mu:.6g} (epsilon {limit.epsilon:.6g}) of {whose}, at delta {limit.delta:g}"
    )
    if after.slack > limit.slack:
        text += (
            f"; slack of discrete noise: spent {before.slack:.6g}, asked "
            f"{after.slack - before.slack:.6g}, limit {limit.slack:.6g}, which a finer grid lowers"
        )
    if after.coordinates > limit.coordinates:
        text += (
            f"; numbers released: spent {before.coordinates}, asked "
            f"{after.coordinates - before.coordinates}, limit {limit.coordinates}"
        )
    return BudgetExceeded(f"{text}. Nothing was charged: use more noise, or fewer releases")


def check_key(client: Any, run: Any, step: Any) -> None:
    """Raise unless these can tell one step of one client's run from all others."""
    check_text(client=client, run=run)
    whole = isinstance(step, int | np.integer) and not isinstance(step, bool)
    if not whole or not 0 <= step <= _LARGEST_INTEGER:
        raise ParameterError(f"step={step!r}: give a whole number from 0 to 2**53")


def check_text(**texts: Any) -> None:
    """Raise unless every value is a short line of text."""
    for name, text in texts.items():
        if not isinstance(text, str) or not text or not text.isprintable():
            raise ParameterError(f"{name}={text!r}: give one line of printable text")
        if len(text) > MAX_TEXT:
            raise ParameterError(f"{name} has {len(text)} characters: give at most {MAX_TEXT}")


def _is_real(value: Any) -> bool:
    real = isinstance(value, int | float | np.integer | np.floating)
    return real and not isinstance(value, bool)


def canonical(content: Any) -> str:
    """The one way to write this as JSON."""
    return _ENCODER.encode(content)
