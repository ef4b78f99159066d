"""Averages of networks' weights over clients.

Where the server sees every client's weights it averages them itself. With a protection clients
weight their own, and the server learns the sum, many groups of networks in one vector; vectors are
cut into pieces that fit into a message. What networks were multiplied by is in the sum as well: who
has trained, and who is in the sum, need not be the same clients.
"""

from typing import Any

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import AggregationAborted
from secure_fedclust.messages import Array, Integer, stage, steps
from secure_fedclust.privacy.updates import WeightGrid
from secure_fedclust.protocols.checkpoint import Results
from secure_fedclust.protocols.session import Session

MAX_GROUPS = 1 << 16
PIECE = 1 << 19
"""Numbers of a sum, about: as many as one message carries in encrypted form, and to spare."""

WEIGHTS = Array(("m", "p"), "float32", largest=1e6)
"""Weights of networks, one in each row."""

AVERAGE = stage(
    "weights/average",
    request={
        "first": Integer(0, MAX_GROUPS),
        "n_groups": Integer(1, MAX_GROUPS),
        "n_numbers": Integer(1, PIECE * 64),
    },
    reply={"weights": steps("g", "p"), "shares": steps("g")},
    form="noisy",
    additive=True,
)
"""Asks for the sum of weights that are private by themselves."""


class Held:
    """Weighted networks that a client holds until they are asked for in a sum.

    Attributes
    ----------
    weights : array of shape (c, p)
    shares : array of shape (c,)
        What each is multiplied by.
    groups : int array of shape (c,)
        The group that each belongs to.
    """

    def __init__(self, weights: Floats, shares: Floats, groups: Any) -> None:
        self.weights, self.shares, self.groups = weights, shares, groups

    def part(self, grid: WeightGrid, first: int, n_groups: int, n_numbers: int) -> dict[str, Any]:
        """What the client adds for some of the groups."""
        total = np.zeros((n_groups, n_numbers), dtype=np.int64)
        shares = np.zeros(n_groups, dtype=np.int64)
        for weights, share, group in zip(self.weights, self.shares, self.groups, strict=True):
            if first <= group < first + n_groups and len(weights) == n_numbers:
                total[group - first] += grid.steps(share * weights)
                shares[group - first] += grid.steps(share)
        return {"weights": total, "shares": shares}


def _ask_piece(session: Session, first: int, n_groups: int, p: int) -> list[Floats | None]:
    def ask() -> Results:
        fields, total = session.ask_exact_sum(
            AVERAGE,
            {"g": n_groups, "p": p},
            reach=lambda n_clients: WeightGrid.of(n_clients).reach,
            first=first,
            n_groups=n_groups,
            n_numbers=p,
        )
        grid = WeightGrid.of(total.n_clients)
        return {"sums": {name: grid.weights(steps) for name, steps in fields.items()}}

    found = session.once(ask)["sums"]
    return [
        row / share if share > 0 else None
        for row, share in zip(found["weights"], found["shares"], strict=True)
    ]


def ask_averages(session: Session, before: Floats) -> Floats:
    """Averages over the clients of each group, under the spec's protection.

    Parameters
    ----------
    session : Session
    before : array of shape (g, p)
        What a group's network stays at if none of its clients is left.

    Returns
    -------
    array of shape (g, p)
    """
    n_groups, p = before.shape
    found = before.copy()
    at_once = max(1, PIECE // p)
    for first in range(0, n_groups, at_once):
        n = min(at_once, n_groups - first)
        for group, row in enumerate(_ask_piece(session, first, n, p), first):
            # Where none of a group's clients is left there is nothing to divide.
            if row is not None:
                found[group] = row
    if not np.isfinite(found).all():
        raise AggregationAborted("an average of weights is not finite")
    return found
