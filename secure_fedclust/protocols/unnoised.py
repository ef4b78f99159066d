"""Sums without noise: for federations that want masking, and no differential privacy.

Nothing but sums over clients is seen, but they are exact, and an exact sum can give a record away.
Where the records lie is not known beforehand: each client says which power of two holds them, in a
sum that only counts how many clients have said so, and the largest is taken for all; then the same
about the mean of all records, which may be far from the origin. Every later question says which
region it is about: clients that were told different ones have masks that do not cancel.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import FederationWarning, ParameterError
from secure_fedclust.messages import Array, Integer, Real, Stage, Values, stage, steps
from secure_fedclust.privacy import sensitivity as formulas
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.mechanism import Bounded, Noisy
from secure_fedclust.privacy.queries import Moments, Query
from secure_fedclust.privacy.sensitivity import Sensitivity
from secure_fedclust.privacy.terms import Adjacency
from secure_fedclust.protocols.cells import CELLS, answer_cells
from secure_fedclust.protocols.client import PrivateClient, answers
from secure_fedclust.protocols.seeding import MOMENTS, ask_moments
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


def _within(asked: Stage) -> Stage:
    """The same question, about records in a cube that it names."""
    cube = {"center": Array(("d",)), "power": Integer(-LARGEST_POWER, LARGEST_POWER)}
    return stage(
        f"unnoised/{asked.name.split('/')[-1]}",
        request={**asked.request.fields, **cube},
        reply=asked.reply.fields,
        additive=True,
    )


MOMENTS_WITHIN, CELLS_WITHIN = _within(MOMENTS), _within(CELLS)
_WITHIN = {MOMENTS.name: MOMENTS_WITHIN, CELLS.name: CELLS_WITHIN}


@dataclass(frozen=True)
class Cube:
    """A cube of side two to the power of `power` plus one about a point."""

    center: Floats
    power: int

    @property
    def domain(self) -> Domain:
        """Working coordinates, in which it reaches from -1 to 1."""
        return Domain(self.center, np.full(len(self.center), math.ldexp(1.0, self.power)), True)

    def within(self, asked: Stage, request: Values) -> tuple[Stage, Values]:
        """A question about records in this cube."""
        return _WITHIN[asked.name], {**request, "center": self.center, "power": self.power}


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
        largest = float(np.abs(X - self.center).max(initial=0.0))
        power = math.frexp(largest)[1] if largest else -LARGEST_POWER
        place = min(max(power, -LARGEST_POWER), LARGEST_POWER) + LARGEST_POWER
        counts[place] = round(math.ldexp(1.0, -exponent))
        return Bounded({"counts": counts}, self.sensitivity(adjacency, exponent), exponent)

    def read(self, noisy: Noisy) -> Floats:
        """How many clients have named each power."""
        return np.asarray(noisy.fields["counts"] * math.ldexp(1.0, noisy.exponent))


class UnnoisedClient(PrivateClient):
    """Answers in sums only, exactly.

    Privacy unit: none.
    Sensitivity: unbounded.
    Who sees it: nobody; the server sees the sum over clients.
    """

    @answers(MAGNITUDES, after=(None, MOMENTS_WITHIN))
    def magnitudes(self, center: Floats, share: float) -> dict[str, Any]:
        self.leave()
        return self.reply(self.release(Magnitudes(center), share))

    # Each question says all that it depends on: a client that was killed answers the next one.

    @answers(MOMENTS_WITHIN, after=(None, MAGNITUDES))
    def moments(self, center: Floats, power: int, share: float) -> dict[str, Any]:
        self.enter(Cube(center, power).domain)
        return self.reply(self.release(Moments(len(center)), share))

    @answers(CELLS_WITHIN, after=(None, MOMENTS_WITHIN, CELLS_WITHIN))
    def cells(self, center: Floats, power: int, **request: Any) -> dict[str, Any]:
        self.enter(Cube(center, power).domain)
        return answer_cells(self, **request)


def agree_on_region(session: Session) -> None:
    """The server's side: a cube that holds all clients' records, about their mean."""
    if session.n_features is None:
        raise ParameterError(
            "masking without differential privacy needs to know the number of features beforehand: "
            "pass records instead of an engine"
        )
    session.region = _cube(session, np.zeros(session.n_features))
    mean, _ = ask_moments(session, 1.0)
    center = session.domain.leave(mean)
    session.region = None
    session.region = _cube(session, center)
    # Nobody knows whether the cube holds the records of a client that was not asked about them.
    session.participants = session.sums[-1].survivors
    if left_out := [c for c in session.clients if c not in session.participants]:
        warnings.warn(
            f"{', '.join(left_out)}: left out of the run, for lack of a reply when the region of "
            "all records was agreed on",
            FederationWarning,
            stacklevel=3,
        )


def _cube(session: Session, center: Floats) -> Cube:
    query = Magnitudes(center)
    sizes = {"powers": _POWERS}
    [counts] = session.ask_sum(MAGNITUDES, query, 1.0, sizes, query.read, center=center).parts
    return Cube(center, int(np.flatnonzero(counts > 0.5).max()) - LARGEST_POWER)
