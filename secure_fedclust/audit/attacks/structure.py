"""What can be seen by looking at how a client works, rather than by guessing from its answers.

A run is rehearsed with everything noted: what was charged, what was drawn, and in which order. No
chance is involved, but for coincidences that would take longer than the universe has had.
"""

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.audit.attacks.ceilings import claimed_mu, least_honest
from secure_fedclust.audit.attacks.echo import nothing_else_leaves
from secure_fedclust.audit.attacks.pairs import Pair
from secure_fedclust.audit.attacks.rehearsal import (
    MADE_UP,
    Outlets,
    Rehearsal,
    Released,
    Watched,
    made_up,
)
from secure_fedclust.audit.findings import Finding, structural
from secure_fedclust.errors import BudgetExceeded, SecureFedClustError
from secure_fedclust.privacy import mechanism
from secure_fedclust.privacy.accounting import MIN_NOISE
from secure_fedclust.privacy.ledger import Charge, Ledger
from secure_fedclust.privacy.release import Releases
from secure_fedclust.privacy.terms import MIN_EPSILON

COINCIDENCE = 1e-9
"""Equal stretches of noise that are less probable than this are taken for the same noise."""

_PLAYS = 3
_TIMEOUT = 120.0

_FIRST_DRAWS = (
    "from secure_fedclust.privacy.mechanism import sampler_named;"
    "print(sampler_named('secure')(4096.0, 8).tolist())"
)


def inspect(rehearsal: Rehearsal, pair: Pair, rng: np.random.Generator) -> list[Finding]:
    """All structural checks."""
    outlets = Outlets(rehearsal.spec)
    played = []
    # On the worst data, where most clusters are empty, and on such as clients have.
    for records in (pair.present, made_up(rehearsal.domain, MADE_UP, rng)):
        X = rehearsal.client(records, outlets.fresh()).X
        for _ in range(_PLAYS):
            outlet = outlets.fresh()
            rehearsal.play(records, outlet)
            played.append(Played(outlet, X))
    return [
        sensitivity_holds(rehearsal, pair),
        order_of_charging(rehearsal, pair, played[0].outlet),
        replies_are_kept(rehearsal, pair, outlets),
        source_of_noise(outlets),
        fresh_noise(played),
        noise_everywhere(played[:_PLAYS], played[_PLAYS:]),
        nothing_else_leaves(rehearsal, rng),
    ]


@dataclass(frozen=True)
class Played:
    """A run that was played, and the records that it was played on, as the client has them."""

    outlet: Watched
    X: Floats

    def noise(self) -> list[list[Ints]]:
        """What was added to each field of each release."""
        added = []
        for released in self.outlet.seen:
            exact = released.exact(self.X, self.outlet.spec).fields
            added.append([np.ravel(drawn) for drawn in released.noise(exact).values()])
        return added


def sensitivity_holds(rehearsal: Rehearsal, pair: Pair) -> Finding:
    """Whether some pair of worlds is farther apart than stated, or than the noise is made for."""
    farthest = max(pair.excess, pair.mu / claimed_mu(rehearsal.spec))
    # Sums of squares of rounded numbers.
    holds = farthest <= 1 + 1e-6
    return Finding(
        name="sensitivity",
        kind="structural",
        threat="tries many pairs of neighbouring data sets, the worst known among them",
        measure="distance over distance allowed",
        figure=farthest,
        interval=None,
        ceiling=1.0,
        verdict="PASS" if holds else "FAIL",
        words=(
            "No pair that was tried moves exact answers farther than the noise is made for."
            if holds
            else "A pair of neighbouring data sets moves exact answers farther than the noise is "
            "made for."
        ),
        trials=1,
    )


def order_of_charging(rehearsal: Rehearsal, pair: Pair, outlet: Watched) -> Finding:
    """Whether every draw of noise was charged before, for as many numbers and as much noise."""
    problems: list[str] = []
    paid: int | None = None
    for event, numbers in outlet.events:
        if event == "charge":
            paid = numbers
        elif paid != numbers:
            problems.append("noise was drawn before it was charged")
        else:
            paid = None
    rows = [row.charge for row in outlet.ledger.rows(outlet.client)]
    drawn = [numbers for event, numbers in outlet.events if event == "draw"]
    if [row.coordinates for row in rows] != drawn:
        problems.append("the ledger's rows are not those of what was drawn")
    elif any(not _as_charged(*both, rehearsal) for both in zip(rows, outlet.seen, strict=True)):
        problems.append("the noise stated is not the noise charged")
    if _answers_unpaid(rehearsal, pair):
        problems.append("a client without budget answers")
    if outlet.seen and _answers_again(rehearsal, outlet):
        problems.append("a client that has spent its budget answers in another run")
    return structural(
        "order of charging",
        "stops a client between any two steps",
        problems,
        "Noise is drawn after its charge is booked, and not at all where there is no budget.",
        len(drawn),
    )


def replies_are_kept(rehearsal: Rehearsal, pair: Pair, outlets: Outlets) -> Finding:
    """Whether asking again gives the same bytes, for no new charge."""
    outlet = outlets.fresh()
    first = rehearsal.client(pair.present, outlet)
    sent = [first.handle(request) for request in rehearsal.requests]
    drawn = len(outlet.events)
    problems = []
    # The same client, and one that was started anew and has only the ledger to remember.
    for client in (first, rehearsal.client(pair.present, outlet)):
        try:
            again = [client.handle(request) for request in rehearsal.requests]
        except SecureFedClustError:
            again = []
        if again != sent:
            problems.append("a request that is repeated is not answered with the same bytes")
    if len(outlet.events) != drawn:
        problems.append("noise is drawn again for a request that is repeated")
    return structural(
        "answers to repeated requests",
        "asks everything twice, to average the noise out",
        problems,
        "A request that is repeated gets the same bytes.",
        len(rehearsal.requests),
    )


def source_of_noise(outlets: Outlets) -> Finding:
    """Whether noise comes from the sampler that is meant for releases, and does not repeat."""
    problems = []
    name, spec, ledger = outlets.account()
    sampler: Any = Releases(name, spec, ledger)._sampler()
    source = f"{getattr(sampler, '__module__', '')}.{getattr(sampler, '__qualname__', '')}"
    if source != f"{mechanism.__name__}.secure_noise":
        problems.append(f"noise comes from {source}")
    if len({tuple(sampler(float(MIN_NOISE), 8)) for _ in range(3)}) < 3:
        problems.append("the sampler repeats itself")
    first = [_first_draws() for _ in range(2)]
    if all(first) and first[0] == first[1]:
        problems.append("two processes begin with the same noise")
    found = structural(
        "source of noise",
        "starts the program anew, and hopes for the noise that it has seen",
        problems,
        "Noise comes from the sampler for releases, and two processes draw other noise.",
        len(first),
    )
    if problems or all(first):
        return found
    words = "Noise comes from the sampler for releases, but no second process could be started."
    return replace(found, verdict="INCONCLUSIVE", words=words)


def _first_draws() -> str:
    """What the sampler of this very package draws first in a process of its own, if it can."""
    place = str(Path(mechanism.__file__).parents[2])
    paths = os.pathsep.join(filter(None, [place, os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(  # noqa: S603
            [sys.executable or "python", "-c", _FIRST_DRAWS],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            env={**os.environ, "PYTHONPATH": paths},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def fresh_noise(played: Sequence[Played]) -> Finding:
    """Whether any noise was used twice: in two fields, two rounds or by two clients."""
    noises = [noise for each in played for release in each.noise() for noise in release]
    sigma = min(released.noisy.sigma for each in played for released in each.outlet.seen)
    # Two draws are equal with a probability of one in this, and so are any two of all stretches.
    odds = 2 * math.sqrt(math.pi) * sigma
    pairs = sum(map(len, noises)) ** 2 / 2
    length = math.ceil(math.log(pairs / COINCIDENCE) / math.log(odds))
    runs = Counter(run for noise in noises for run in _in_a_row(noise, length))
    again = sum(times - 1 for times in runs.values())
    problems = [f"{again} stretches of noise occur more than once"] if again else []
    return structural(
        "fresh noise",
        "subtracts answers from each other",
        problems,
        "No stretch of noise occurs in two fields, two rounds or two runs.",
        sum(runs.values()),
    )


def noise_everywhere(*played: Sequence[Played]) -> Finding:
    """Whether every number has noise, empty clusters' included, in each of some series of runs."""
    bare = 0
    for series in played:
        runs = [np.concatenate([n for release in each.noise() for n in release]) for each in series]
        bare += int((np.stack(runs) == 0).all(axis=0).sum())
    problems = [f"{bare} numbers never have noise"] if bare else []
    return structural(
        "noise on every number",
        "looks for numbers that are exact, such as those of empty clusters",
        problems,
        "Every number that is released has noise, those of empty clusters too.",
        sum(released.query.coordinates for released in played[0][0].outlet.seen),
    )


def _as_charged(charge: Charge, released: Released, rehearsal: Rehearsal) -> bool:
    terms = 1 if released.n_clients is None else least_honest(rehearsal.spec)
    return released.noisy.sigma * math.sqrt(terms) >= charge.sigma * (1 - 1e-9)


def _answers_unpaid(rehearsal: Rehearsal, pair: Pair) -> bool:
    """Whether a client whose ledger allows next to nothing answers, or draws noise."""
    spec = rehearsal.spec
    epsilon, delta = spec.target()
    if epsilon <= 2 * MIN_EPSILON:
        return False  # no ledger allows less
    with Ledger.create(
        None, epsilon=MIN_EPSILON, delta=delta, unit=spec.unit, adjacency=spec.adjacency
    ) as ledger:
        outlet = Watched("poor client", spec, ledger)
        try:
            rehearsal.play(pair.present, outlet)
        except BudgetExceeded:
            return any(event == "draw" for event, _ in outlet.events)
        return True


def _answers_again(rehearsal: Rehearsal, spent: Watched) -> bool:
    """Whether a client that has spent all it may gives one more answer, in a run of its own."""
    released, nobody = spent.seen[0], np.empty((0, rehearsal.n_features))
    outlet = Watched(spent.client, rehearsal.spec, spent.ledger)
    more: dict[str, Any] = {"run": "another", "step": 0, "message": released.message}
    try:
        if released.n_clients is None:
            outlet.release(released.query, nobody, 1.0, **more)
        else:
            outlet.contribute(released.query, nobody, 1.0, n_clients=released.n_clients, **more)
    except BudgetExceeded:
        return False
    return True


def _in_a_row(noise: Ints, length: int) -> Iterable[tuple[int, ...]]:
    """All stretches of so many numbers; those of nothing but zeros are no noise at all."""
    numbers = noise.tolist()
    for start in range(len(numbers) - length + 1):
        run = tuple(numbers[start : start + length])
        if any(run):
            yield run
