"""FedGEM without protection: the server sees maximisers and radii of each client's components.

1. Every client seeds its components and takes one EM step.
2. In each collaborative round the server moves components whose balls overlap towards each other,
   and every client takes one EM step from where its components were put.
3. After the last round the balls are those of the final radius; components whose balls overlap are
   one global cluster.

A client that misses a round goes on from where it was left; one that misses the first or the
last exchange has no part in the result.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from secure_fedclust.algorithms import fedgem
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.messages import Array, Bounds, Integer, Real, stage
from secure_fedclust.protocols.client import MAX_CLUSTERS, Client, answers
from secure_fedclust.protocols.clustering import Clustering, owners_of, stack
from secure_fedclust.protocols.session import Replies, Session

Rows = TypeVar("Rows", Floats, Ints)

_BALLS = {"maximisers": Array(("k", "d")), "squared_radii": Array(("k",), minimum=0)}

SEED = stage("fedgem/seed", request={"n_components": Integer(1, MAX_CLUSTERS)}, reply=_BALLS)
STEP = stage("fedgem/step", request={"centers": Array(("k", "d"))}, reply=_BALLS)
FINAL = stage(
    "fedgem/final", request={"centers": Array(("k", "d")), "v": Real(minimum=0)}, reply=_BALLS
)


class FedGEMClient(Client):
    """Reports the maximiser and the squared radius of each of its components.

    Privacy unit: none, the message is unprotected.
    Sensitivity: unbounded.
    Who sees it: the server.
    """

    @answers(SEED, after=(None,))
    def seed(self, n_components: int) -> dict[str, Any]:
        return self.step(fedgem.client_seed(self.X, n_components, self.rng))

    @answers(STEP, after=(SEED, STEP))
    def step(self, centers: Floats) -> dict[str, Any]:
        maximisers, squared_radii = fedgem.client_maximise(self.X, centers)
        return {"maximisers": maximisers, "squared_radii": squared_radii}

    @answers(FINAL, after=(SEED, STEP))
    def final(self, centers: Floats, v: float) -> dict[str, Any]:
        maximisers, _ = fedgem.client_maximise(self.X, centers)
        squared_radii = fedgem.client_final_radii(maximisers, len(self.X), v)
        return {"maximisers": maximisers, "squared_radii": squared_radii}


def run(
    session: Session, *, n_components: Mapping[str, int], n_rounds: int, final_radius: float
) -> Clustering:
    """The server's side.

    Parameters
    ----------
    session : Session
    n_components : mapping of client to int
        How many components each client has (the paper's K_g).
    n_rounds : int
        Collaborative rounds.
    final_radius : float
        The paper's v.
    """
    requests = {client: {"n_components": n_components[client]} for client in session.clients}
    at_most: dict[str, Bounds] = {client: {"k": (1, n)} for client, n in n_components.items()}
    replies = session.ask(SEED, requests, at_most)
    centers = _updated(replies)
    for _ in range(n_rounds - 1):
        replies = session.ask(STEP, {client: {"centers": c} for client, c in centers.items()})
        centers |= _updated(replies)
    replies = session.ask(
        FINAL, {client: {"centers": c, "v": final_radius} for client, c in centers.items()}
    )
    global_centers, groups = fedgem.server_merge(*_balls(replies))
    session.note_centers(global_centers)
    return Clustering(
        global_centers,
        {client: held.tolist() for client, held in _by_client(groups, replies).items()},
    )


def _updated(replies: Replies) -> dict[str, Floats]:
    return _by_client(fedgem.server_update(*_balls(replies)), replies)


def _balls(replies: Replies) -> tuple[Floats, Floats, Ints]:
    maximisers = stack(replies, "maximisers")
    return maximisers, stack(replies, "squared_radii"), owners_of(replies, "maximisers")


def _by_client(rows: Rows, replies: Replies) -> dict[str, Rows]:
    ends = np.cumsum([len(reply["maximisers"]) for reply in replies.values()])
    return dict(zip(replies, np.split(rows, ends[:-1]), strict=True))
