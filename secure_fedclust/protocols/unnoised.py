"""Sums without noise: for federations that want masking, and no differential privacy.

Nothing but sums over clients is seen, but they are exact, and an exact sum can give a record away.
Where the records lie is not known beforehand: each client says which power of two holds them, in a
sum that only counts how many clients have said so, and the largest is taken for all; then the same
about the mean of all records, which may be far from the origin.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import DataError, ParameterError
from secure_fedclust.messages import Array, Integer, Real, stage, steps
from secure_fedclust.privacy import sensitivity as formulas
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.mechanism import Bounded, Noisy
from secure_fedclust.privacy.queries import Query
from secure_fedclust.privacy.sensitivity import Sensitivity
from secure_fedclust.privacy.terms import Adjacency
from secure_fedclust.protocols.cells import CELLS, answer_cells
from secure_fedclust.protocols.client import answers
from secure_fedclust.protocols.seeding import MOMENTS, SeedingClient, ask_moments
from secure_fedclust.protocols.session import Session

LARGEST_POWER = 140
"""Records are smaller than two to this power: others are refused when they are read."""

_POWERS = 2 * LARGEST_POWER + 1

MAGNITUDES = stage(
    "unnoised/magnitudes",
    request={"center": Array(("d",)), "share": Real(0, 1)},
    reply={"counts": steps("powers")},
    additive=True,
)
REGION = stage(
    "unnoised/region",
    request={"center": Array(("d",)), "power": Integer(-LARGEST_POWER, LARGEST_POWER)},
    reply={},
)


@dataclass(frozen=True)
class Magnitudes(Query):
    """One for the smallest power of two that holds all residuals from a point, none for others."""

    center: Floats

    def sensitivity(self, adjacency: Adjacency, exponent: int | None = None) -> Sensitivity:
        """Of a client's message; a record has no bound of its own."""
        one = 1.0 if exponent is None else math.ldexp(1.0, -exponent)
        return formulas.message(one, adjacency)

    @property
    def coordinates(self) -> int:
        return _POWERS

    def answer(self, X: Floats, adjacency: Adjacency, exponent: int) -> Bounded:
        counts = np.zeros(_POWERS, dtype=np.int64)
        _, power = math.frexp(float(np.abs(X - self.center).max(initial=0.0)))
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

    @answers(MAGNITUDES, after=(None, MOMENTS))
    def magnitudes(self, center: Floats, share: float) -> dict[str, Any]:
        self.leave()
        return self.reply(self.release(Magnitudes(center), share))

    @answers(REGION, after=(MAGNITUDES,))
    def region(self, center: Floats, power: int) -> dict[str, Any]:
        region = _region(center, power)
        if not (np.abs(self.X - region.center) <= region.scale).all():
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
    """The server's side: a cube that holds all clients' records, about their mean."""
    if session.n_features is None:
        raise ParameterError(
            "masking without differential privacy needs to know the number of features beforehand: "
            "pass records instead of an engine"
        )
    _hold(session, np.zeros(session.n_features))
    mean, _ = ask_moments(session, 1.0)
    _hold(session, session.domain.leave(mean))


def _hold(session: Session, center: Floats) -> None:
    query = Magnitudes(center)
    sizes = {"powers": _POWERS}
    [counts] = session.ask_sum(MAGNITUDES, query, 1.0, sizes, query.read, center=center).parts
    power = int(np.flatnonzero(counts > 0.5).max()) - LARGEST_POWER
    session.ask_all(REGION, center=center, power=power)
    session.region = _region(center, power)


def _region(center: Floats, power: int) -> Domain:
    return Domain(center, np.full(len(center), math.ldexp(1.0, power)), True)
