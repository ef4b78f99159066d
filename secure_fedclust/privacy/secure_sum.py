"""The seam for sums: how a server learns what clients' vectors add up to, and nothing else.

A vector is whole numbers of grid steps. Whoever wants another way to add them in secret writes the
two ends below in one file, and names the pair in `protocols/sums.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from secure_fedclust.arrays import Ints
from secure_fedclust.errors import AggregationAborted, ParameterError
from secure_fedclust.messages import ANCHOR, Array, Bounds, Integer, Stage, Values, stage

MAX_QUESTION = 1 << 25
"""Most bytes of a question."""

MAX_LENGTH = 1 << 23
"""Most numbers in a vector."""


class Ask(Protocol):
    """Asks a stage's question."""

    def __call__(
        self,
        stage: Stage,
        requests: Mapping[str, Values],
        bounds: Bounds,
        read: Callable[[str, Values], Any] | None = None,
        /,
    ) -> dict[str, Any]:
        """Ask each party its own; who does not answer, or wrongly, is left out.

        A reply is given to `read` as soon as it has come, and what that makes of it is returned in
        its place: of large replies no more than one is held at a time.
        """


class Contribution(NamedTuple):
    """What a client adds to a sum.

    Attributes
    ----------
    vector : array of whole numbers
    reach : int
        No number of it can be farther from zero, whatever the records are.
    anchor : fields of a reply
        Where the client's ledger stands.
    """

    vector: Ints
    reach: int
    anchor: Values


Contribute = Callable[[bytes, int], Contribution]
"""Computes what a client adds to the sum that a question asks for, among so many clients. It is
called once a round, when all else is in order."""


@dataclass(frozen=True)
class Question:
    """What clients' vectors are to answer.

    Attributes
    ----------
    run, number : str, int
        No two rounds of a run have the same number.
    text : bytes
    length : int
        Of the vectors.
    reach, largest : functions of the number of clients
        How far from zero a number of one vector, and one of the sum, can be.
    """

    run: str
    number: int
    text: bytes
    length: int
    reach: Callable[[int], int]
    largest: Callable[[int], int]

    def __post_init__(self) -> None:
        if not 1 <= self.length <= MAX_LENGTH or len(self.text) > MAX_QUESTION:
            raise ParameterError(
                f"a sum of {self.length} numbers, asked for in {len(self.text)} bytes: from 1 to "
                f"{MAX_LENGTH} numbers, in up to {MAX_QUESTION} bytes, are possible"
            )


@dataclass(frozen=True)
class Total:
    """A sum that was opened.

    Attributes
    ----------
    steps : array of whole numbers
    n_clients : int
        Size of the cohort that the grid was chosen for.
    survivors : tuple of str
        Clients whose vectors are in the sum.
    """

    steps: Ints
    n_clients: int
    survivors: tuple[str, ...]


class SecureSum(ABC):
    """The server's end."""

    @abstractmethod
    def total(self, ask: Ask, clients: Sequence[str], question: Question) -> Total:
        """The sum of the vectors with which clients answer a question.

        Raises
        ------
        AggregationAborted
            When too few clients are left. Nothing was opened then.
        """


class Summand(ABC):
    """A client's end.

    Attributes
    ----------
    stages : mapping of the request schema's name to Stage
        The stages that it answers.
    bounds : mapping
        Sizes of what it may be sent.
    """

    stages: Mapping[str, Stage]
    bounds: Bounds

    @abstractmethod
    def answer(self, stage: Stage, run: str, request: Values, contribute: Contribute) -> Values:
        """Answer one stage, or raise a `ProtocolError`."""


def check_range(steps: Ints, largest: int) -> None:
    """Refuse what cannot be a sum of what clients may send."""
    if ((steps > largest) | (steps < -largest)).any():
        raise AggregationAborted(
            f"numbers beyond {largest} grid steps are no sum of clients' vectors: some client did "
            "not agree on the question, the privacy spec or the cohort, or did not follow the "
            "protocol"
        )


PLAIN = stage(
    "sum/plain",
    request={"number": Integer(), "question": Array(("bytes",), "uint8")},
    reply={"vector": Array(("length",), "int64", largest=1 << 62), **ANCHOR},
)


class PlainSum(SecureSum):
    """No protection at all: the server sees every vector. For comparisons only."""

    def total(self, ask: Ask, clients: Sequence[str], question: Question) -> Total:
        """See `SecureSum`."""
        text = np.frombuffer(question.text, dtype=np.uint8)
        request = {"number": question.number, "question": text}
        replies = ask(PLAIN, dict.fromkeys(clients, request), {"length": question.length})
        steps = np.zeros(question.length, dtype=np.int64)
        for reply in replies.values():
            steps += reply["vector"]
        check_range(steps, question.largest(len(clients)))
        return Total(steps, len(clients), tuple(replies))


class PlainSummand(Summand):
    """Sends its vector as it is. For comparisons only.

    Parameters
    ----------
    n_clients : int
    """

    def __init__(self, n_clients: int) -> None:
        self.n_clients = n_clients
        self.stages = {PLAIN.request.name: PLAIN}
        self.bounds = {"bytes": (0, MAX_QUESTION)}

    def answer(self, stage: Stage, run: str, request: Values, contribute: Contribute) -> Values:
        """See `Summand`."""
        given = contribute(request["question"].tobytes(), self.n_clients)
        return {"vector": given.vector, **given.anchor}
