"""Noisy counts and sums about centres: the one message that most private protocols share.

A client assigns each record to the nearest of the centres it is given, and answers with the count,
the sum of residuals and, if asked for, the sum of squared residuals of each cell, all with noise.
The answer is additive: where the server needs no single client's, it may see only the sum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from secure_fedclust.arrays import Floats
from secure_fedclust.messages import Array, Real, Values, private_stage, steps
from secure_fedclust.privacy.domain import Domain
from secure_fedclust.privacy.queries import Cells, CellSums
from secure_fedclust.protocols.client import PrivateClient
from secure_fedclust.protocols.session import Session

KEEP = 2.0
"""Cells whose noisy count is below so many standard deviations are left alone."""

CELLS = private_stage(
    "cells",
    request={
        "centers": Array(("k", "d")),
        "radius": Real(1e-9, 1e9),
        "count_weight": Real(1e-3, 1e3),
        "square_weight": Real(0, 1),
    },
    reply={"counts": steps("k"), "sums": steps("k", "d"), "squares": steps("q")},
    additive=True,
)

_NO_SQUARES = {"squares": np.zeros(0, dtype=np.int64)}


def answer_cells(client: PrivateClient, share: float, **request: Any) -> dict[str, Any]:
    """The client's side of `CELLS`."""
    noisy = client.release(CellSums(**request), share)
    return client.reply(noisy, **({} if request["square_weight"] else _NO_SQUARES))


def ask_cells(session: Session, query: CellSums, share: float) -> tuple[Cells, int]:
    """Noisy counts and sums about centres, over all clients, and how many clients these are."""
    k, d = query.centers.shape
    sizes = {"k": k, "d": d, "q": k if query.square_weight else 0}
    answers = session.ask_sum(CELLS, query, share, sizes, query.read, **_request(query))
    return pooled(answers.parts), answers.n_clients


def ask_each(session: Session, query: CellSums, share: float) -> dict[str, Cells]:
    """The same, client by client, each with noise enough for itself."""
    return session.ask_all(
        CELLS,
        {"q": len(query.centers) if query.square_weight else 0},
        lambda _, reply: read_cells(session, query, reply, share),
        share=share,
        **_request(query),
    )


def _request(query: CellSums) -> Values:
    return {
        "centers": query.centers,
        "radius": query.radius,
        "count_weight": query.count_weight,
        "square_weight": query.square_weight,
    }


def read_cells(session: Session, query: CellSums, reply: Values, share: float) -> Cells:
    """A reply to `CELLS` in real terms."""
    return query.read(session.noisy(reply, ("counts", "sums", "squares"), query, share))


def pooled(parts: Sequence[Cells]) -> Cells:
    """Sums over clients of cells about the same centres."""
    squares = [part.squares for part in parts if part.squares is not None]
    return Cells(
        parts[0].centers,
        np.sum([part.counts for part in parts], axis=0),
        np.sum([part.sums for part in parts], axis=0),
        np.sum(squares, axis=0) if squares else None,
        math.hypot(*(part.count_sigma for part in parts)),
        math.hypot(*(part.sum_sigma for part in parts)),
        math.hypot(*(part.square_sigma for part in parts)),
    )


def moved(cells: Cells, radius: float, domain: Domain) -> Floats:
    """Centres moved to the noisy means of their cells; those of doubtful cells stay."""
    floor = np.maximum(cells.counts, max(cells.count_sigma, 1e-9))
    move = cells.sums / floor[:, None]
    length = np.linalg.norm(move, axis=1)
    move *= np.minimum(1.0, radius / np.maximum(length, 1e-300))[:, None]
    move[cells.counts < KEEP * cells.count_sigma] = 0
    return domain.hold(cells.centers + move)


@dataclass(frozen=True, eq=False)
class Summary:
    """Weighted points that stand for records, in working coordinates.

    Attributes
    ----------
    points : array of shape (m, d)
    weights : array of shape (m,)
        Noisy numbers of records.
    spreads : array of shape (m,)
        Noisy mean squared distances of a point's records to it.
    noise : float
        Standard deviation of the weights.
    """

    points: Floats
    weights: Floats
    spreads: Floats
    noise: float

    def keep(self, kept: NDArray[np.bool_]) -> "Summary":
        """Only some of the points."""
        return Summary(self.points[kept], self.weights[kept], self.spreads[kept], self.noise)


def summarise(
    cells: Cells, radius: float, domain: Domain, *, keep: float = KEEP, at_least: int = 1
) -> Summary:
    """The cells that stand out from the noise, as weighted points.

    Parameters
    ----------
    cells : Cells
    radius : float
    domain : Domain
    keep : float
        Standard deviations of its noise that a count must exceed.
    at_least : int
        How many cells are needed; where fewer stand out, some that stand out less are taken too.
    """
    found = cells.counts > keep * cells.count_sigma
    while found.sum() < at_least and keep > 1:
        keep -= 0.5
        found = cells.counts > keep * cells.count_sigma
    if not found.any():
        found[np.argmax(cells.counts)] = True
    points = moved(cells, radius, domain)
    weights = np.maximum(cells.counts, cells.count_sigma)
    spreads = np.zeros(len(points))
    if cells.squares is not None:
        spreads = cells.squares / weights - np.square(points - cells.centers).sum(axis=1)
    spreads = np.clip(spreads, 0, radius**2)
    return Summary(points, weights, spreads, cells.count_sigma).keep(found)
