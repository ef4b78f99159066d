"""What leaves a client besides its releases: nothing that depends on its records.

A client is played on two data sets that have nothing in common, and is handed the same noisy
numbers in both after it has charged, computed and drawn its own. Whatever it asks of its records
next, and every byte that it sends, must then be the same: else something got past the noise.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.audit.attacks.rehearsal import MADE_UP, Outlets, Rehearsal, Watched, made_up
from secure_fedclust.audit.findings import Finding, structural
from secure_fedclust.errors import SecureFedClustError
from secure_fedclust.privacy.ledger import Anchor
from secure_fedclust.privacy.mechanism import Noisy

_SIZES = 0, 1, 5, 30, 100, 500
_NOWHERE = Anchor(0, "0" * 64)


@dataclass
class _Echo(Watched):
    """Releases what it is told to, once the client has done its part."""

    script: list[Noisy] = field(default_factory=list, repr=False)

    def release(self, *given: Any, **more: Any) -> Noisy:
        return self._told(super().release(*given, **more))

    def contribute(self, *given: Any, **more: Any) -> Noisy:
        return self._told(super().contribute(*given, **more))

    def _told(self, noisy: Noisy) -> Noisy:
        self.anchor = _NOWHERE  # where a ledger stands depends on which ledger it is
        number = len(self.seen) - 1
        return self.script[number] if number < len(self.script) else noisy


def nothing_else_leaves(rehearsal: Rehearsal, rng: np.random.Generator) -> Finding:
    """Whether questions and replies depend on records through releases only."""
    outlets = Outlets(rehearsal.spec)
    first = _Echo(*outlets.account())
    told = _play(rehearsal, made_up(rehearsal.domain, MADE_UP, rng), first)
    script = [released.noisy for released in first.seen]
    problems = []
    for X in _others(rehearsal, rng):
        other = _Echo(*outlets.account(), script=script)
        heard = _play(rehearsal, X, other)
        asked = [(r.message, r.share, r.n_clients, r.query) for r in first.seen]
        instead = [(r.message, r.share, r.n_clients, r.query) for r in other.seen]
        if not same(asked, instead):
            problems.append("what is asked of the records depends on them beyond what was released")
        stated = [(r.noisy.sigma, r.noisy.exponent) for r in first.seen]
        if stated != [(r.noisy.sigma, r.noisy.exponent) for r in other.seen]:
            problems.append("the size of the noise depends on the records")
        if heard != told:
            problems.append("what is sent depends on the records beyond what was released")
    return structural(
        "nothing else leaves",
        "reads every byte that is sent, and subtracts what was released",
        problems,
        "Replies are the same bytes for all records that give the same releases.",
        len(told),
    )


def _others(rehearsal: Rehearsal, rng: np.random.Generator) -> Iterator[Floats]:
    """Data of other kinds: none, few, many, all alike, at the edge, and beyond it."""
    domain = rehearsal.domain
    for size in _SIZES:
        yield made_up(domain, size, rng)
    corner = np.ones((1, domain.n_features))
    for place in (0.3 * corner, corner, 5 * corner):
        yield np.repeat(domain.leave(place), 40, axis=0)
    yield domain.leave(rng.uniform(-3, 3, (60, domain.n_features)))


def _play(rehearsal: Rehearsal, X: Floats, outlet: Watched) -> list[bytes | str]:
    """Replies, and what was said where there was none."""
    client = rehearsal.client(X, outlet)
    sent: list[bytes | str] = []
    for request in rehearsal.requests:
        try:
            sent.append(client.handle(request))
        except SecureFedClustError as error:
            sent.append(f"{type(error).__name__}: {error}")
    return sent


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal, arrays within them included."""
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        return bool(np.array_equal(first, second))
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if is_dataclass(first):
        return all(same(getattr(first, f.name), getattr(second, f.name)) for f in fields(first))
    return bool(first == second)
