"""Sums without noise: for federations that want masking, and no differential privacy.

Nothing but sums over clients is seen, but they are exact, and an exact sum can give a record away.
Where the records lie is not known beforehand: each client says which power of two holds them, in a
sum that only counts how many clients have said so, and the largest is taken for all.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import DataError
from secure_fedclust.messages import Integer, Real, stage, steps
from secure_fedclust.privacy import sensitivity as formulas
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.mechanism import Bounded, Noisy
from secure_fedclust.privacy.queries import Query
from secure_fedclust.privacy.sensitivity import Sensitivity
from secure_fedclust.privacy.terms import Adjacency
from secure_fedclust.protocols.cells import CELLS, answer_cells
from secure_fedclust.protocols.client import answers
from secure_fedclust.protocols.seeding import MOMENTS, SeedingClient
from secure_fedclust.protocols.session import Session

LARGEST_POWER = 140
"""Records are smaller than two to this power: others are refused when they are read."""

_POWERS = 2 * LARGEST_POWER + 1

MAGNITUDES = stage(
    "unnoised/magnitudes",
    request={"share": Real(0, 1)},
    reply={"counts": steps("powers")},
    additive=True,
)
REGION = stage(
    "unnoised/region",
    request={"power": Integer(-LARGEST_POWER, LARGEST_POWER)},
    reply={},
)


@dataclass(frozen=True)
class Magnitudes(Query):
    """One for the smallest power of two that holds all values, none for the others."""

    def sensitivity(self, adjacency: Adjacency, exponent: int | None = None) -> Sensitivity:
        """Of a client's message; a record has no bound of its own."""
        one = 1.0 if exponent is None else math.ldexp(1.0, -exponent)
        return formulas.message(one, adjacency)

    @property
    def coordinates(self) -> int:
        return _POWERS

    def answer(self, X: Floats, adjacency: Adjacency, exponent: int) -> Bounded:
        counts = np.zeros(_POWERS, dtype=np.int64)
        _, power = math.frexp(float(np.abs(X).max(initial=0.0)))
        place = min(max(power, -LARGEST_POWER), LARGEST_POWER) + LARGEST_POWER
        counts[place] = round(math.ldexp(1.0, -exponent))
        return Bounded({"counts": counts}, self.sensitivity(adjacency, exponent), exponent)

    def read(self, noisy: Noisy) -> Floats:
        """How many clients have named each power."""
        return np.asarray(noisy.fields["counts"] * math.ldexp(1.0, noisy.exponent))


class UnnoisedClient(SeedingClient):
    """Answers in sums only, exactly.

    Privacy unit: none.
    Sensitivity: unbounded.
    Who sees it: nobody; the server sees the sum over clients.
    """

    @answers(MAGNITUDES, after=(None,))
    def magnitudes(self, share: float) -> dict[str, Any]:
        return self.reply(self.release(Magnitudes(), share))

    @answers(REGION, after=(MAGNITUDES,))
    def region(self, power: int) -> dict[str, Any]:
        region = _region(power, self.X.shape[1])
        if not (np.abs(self.X) <= region.scale).all():
            raise DataError(f"there are values beyond 2^{power}, which were not announced")
        self.enter(region)
        return {}

    @answers(MOMENTS, after=(REGION,))
    def moments(self, share: float) -> dict[str, Any]:
        return super().moments(share)

    @answers(CELLS, after=(MOMENTS, CELLS))
    def cells(self, **request: Any) -> dict[str, Any]:
        return answer_cells(self, **request)


def agree_on_region(session: Session) -> None:
    """The server's side: a cube about the origin that holds all clients' records."""
    query = Magnitudes()
    sizes = {"powers": _POWERS}
    [counts] = session.ask_sum(MAGNITUDES, query, 1.0, sizes, query.read).parts
    power = int(np.flatnonzero(counts > 0.5).max()) - LARGEST_POWER
    session.ask_all(REGION, power=power)
    if session.n_features is None:
        raise DataError("the number of features is not known: pass records, or an engine that says")
    session.region = _region(power, session.n_features)


def _region(power: int, n_features: int) -> Domain:
    return Domain(np.zeros(n_features), np.full(n_features, math.ldexp(1.0, power)), True)
