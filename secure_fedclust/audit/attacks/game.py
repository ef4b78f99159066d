"""The distinguishing game: tell from what a client released which of two worlds it lives in.

The attacker knows everything but the world: both data sets, every request, every intermediate
release, and the noise of colluding clients. The score is the log-likelihood ratio for Gaussian
noise of the charged size, which no test beats if the noise is what it should be.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.audit.attacks.bounds import lower_bounds, power
from secure_fedclust.audit.attacks.ceilings import STRONG, claimed_mu, least_honest
from secure_fedclust.audit.attacks.noise import Noise
from secure_fedclust.audit.attacks.pairs import Pair
from secure_fedclust.audit.attacks.rehearsal import (
    MADE_UP,
    Outlets,
    Rehearsal,
    Released,
    flat,
    made_up,
)
from secure_fedclust.audit.findings import GAME, Finding, Verdict
from secure_fedclust.privacy.accounting import epsilon_of
from secure_fedclust.privacy.mechanism import Bounded, noise, sampler_named
from secure_fedclust.privacy.queries import Query
from secure_fedclust.privacy.sensitivity import Sensitivity
from secure_fedclust.privacy.spec import PrivacySpec

_BATCH = 50

Progress = Callable[[int], None]
"""Called with how many more trials are done."""


@dataclass(frozen=True)
class Scores:
    """Log-likelihood ratios, and the noise that was seen.

    Attributes
    ----------
    ratios : array
        One a trial; positive ones speak for the world with.
    noise : Noise
    """

    ratios: Floats
    noise: Noise


def play(rehearsal: Rehearsal, pair: Pair, present: bool, trials: int) -> Scores:
    """Play a run so often in one of the two worlds."""
    outlets = Outlets(rehearsal.spec)
    given = pair.present if present else pair.without
    worlds = [rehearsal.client(X, outlets.fresh()).X for X in (pair.without, pair.present)]
    ratios, seen = np.empty(trials), Noise()
    others = least_honest(rehearsal.spec) - 1
    for trial in range(trials):
        outlet = outlets.fresh()
        ratio, drawn = 0.0, []
        for released in rehearsal.play(given, outlet):
            steps, sigma = released.steps, released.noisy.sigma
            answers = [released.exact(X, rehearsal.spec).fields for X in worlds]
            drawn.append((sigma, released.noise(answers[present])))
            exact = [flat(fields) for fields in answers]
            # Where the worlds agree there is nothing to be told apart.
            apart = np.flatnonzero(exact[0] != exact[1])
            numbers = steps[apart].astype(float)
            if released.n_clients is not None:
                numbers += _others(released, others, apart.size)
                sigma *= np.sqrt(1 + others)
            ratio += _ratio(numbers, exact[0][apart], exact[1][apart], sigma)
        ratios[trial] = ratio
        seen.note("worst", drawn)
    return Scores(ratios, seen)


def ordinary_noise(rehearsal: Rehearsal, rng: np.random.Generator, plays: int = 20) -> Noise:
    """The noise of a client that has records like others."""
    outlets, seen = Outlets(rehearsal.spec), Noise()
    records = made_up(rehearsal.domain, MADE_UP, rng)
    X = rehearsal.client(records, outlets.fresh()).X
    for _ in range(plays):
        released = rehearsal.play(records, outlets.fresh())
        exact = [each.exact(X, rehearsal.spec).fields for each in released]
        seen.note(
            "ordinary",
            [(r.noisy.sigma, r.noise(fields)) for r, fields in zip(released, exact, strict=True)],
        )
    return seen


def release_once(
    query: Query, without: Floats, present: Floats, spec: PrivacySpec, trials: int
) -> tuple[Floats, Floats]:
    """Ratios of one release by itself, for the whole budget, in both worlds.

    Records are in working coordinates.
    """
    outlets = Outlets(spec)
    found = []
    for X in (without, present):
        ratios = np.empty(trials)
        for trial in range(trials):
            outlet = outlets.fresh()
            outlet.release(query, X, 1.0, run="game", step=0, message="game")
            [released] = outlet.seen
            first, second = (flat(released.exact(x, spec).fields) for x in (without, present))
            ratios[trial] = _ratio(released.steps, first, second, released.noisy.sigma)
        found.append(ratios)
    return found[0], found[1]


def distinguish(
    rehearsal: Rehearsal,
    pair: Pair,
    trials: int,
    confidence: float,
    jobs: int,
    on_progress: Progress | None = None,
) -> tuple[Finding, Noise]:
    """Play the game, and judge the claim by it; and return the noise that was seen.

    Parameters
    ----------
    rehearsal : Rehearsal
    pair : Pair
    trials : int
        In both worlds together.
    confidence : float
        Of the verdict.
    jobs : int
        Processes; 1 for none but this one.
    on_progress : function, optional
    """
    worlds = (False, True)
    played = _play_all(rehearsal, pair, max(1, trials // 2), jobs, on_progress)
    without, present = (
        np.concatenate([scores.ratios for scores in played[world]]) for world in worlds
    )
    game = judge(
        without,
        present,
        rehearsal.spec,
        confidence,
        attained=pair.mu,
        name=GAME,
        threat=threat(rehearsal.spec),
    )
    noise = Noise()
    for scores in (*played[False], *played[True]):
        noise = noise.plus(scores.noise)
    return game, noise


def judge(
    without: Floats,
    present: Floats,
    spec: PrivacySpec,
    confidence: float,
    *,
    attained: float,
    name: str,
    threat: str,
) -> Finding:
    """What scores in two worlds say about the claim of a spec.

    Parameters
    ----------
    without, present : arrays
    spec : PrivacySpec
    confidence : float
        Of the verdict; each of the two bounds has half of what it leaves.
    attained : float
        The mu that the two worlds are worth, if the noise is what it should be.
    name, threat : str
    """
    epsilon, delta = spec.target()
    claimed = claimed_mu(spec)
    each = 1 - (1 - confidence) / 2
    found = lower_bounds(without, present, delta, each)
    trials = min(len(without), len(present))
    strength = power(2 * attained, claimed, trials, each)
    refuted = found.mu > claimed or max(found.epsilon, found.gaussian_epsilon) > epsilon
    verdict: Verdict = "FAIL" if refuted else "PASS" if strength >= STRONG else "INCONCLUSIVE"
    return Finding(
        name=name,
        kind="statistical",
        threat=threat,
        measure="epsilon",
        figure=found.gaussian_epsilon,
        interval=(found.gaussian_epsilon, None),
        ceiling=epsilon,
        verdict=verdict,
        words=_GAME_WORDS[verdict],
        trials=len(without) + len(present),
        confidence=confidence,
        more={
            "epsilon at least (Clopper-Pearson, any mechanism)": found.epsilon,
            "epsilon at least (if the noise is Gaussian)": found.gaussian_epsilon,
            "mu at least": found.mu,
            "mu claimed": claimed,
            "mu of these two worlds": attained,
            "epsilon of these two worlds": epsilon_of(delta, attained),
            "would have refuted half the noise": strength,
        },
        curve=found.curve,
    )


_GAME_WORDS = {
    "FAIL": "The attacker does better than the claim allows: the claim is refuted.",
    "PASS": (
        "The attacker does no better than the claim allows. With half the noise he would have. "
        "That does not prove the claim: the proofs do, if the code does what they say."
    ),
    "INCONCLUSIVE": (
        "The attacker does no better than the claim allows, but so few trials might not have "
        "shown half the noise either: play more."
    ),
}


def threat(spec: PrivacySpec) -> str:
    """What the attacker knows, in words."""
    unit = "all records but one" if spec.unit == "record" else "everybody's data but one client's"
    text = f"knows {unit}, sees every release of a run, and chose the data to be the worst"
    if spec.protection == "none":
        return text
    return (
        f"{text}; of sums, sees those with the noise of no more than {least_honest(spec)} "
        "honest clients"
    )


def _play_all(
    rehearsal: Rehearsal, pair: Pair, each: int, jobs: int, on_progress: Progress | None
) -> dict[bool, list[Scores]]:
    """Scores of both worlds, in batches that take turns."""
    sizes = [min(_BATCH, each - start) for start in range(0, each, _BATCH)]
    batches = [(world, size) for size in sizes for world in (False, True)]
    found: dict[bool, list[Scores]] = {False: [], True: []}

    def note(scores: Iterable[Scores]) -> None:
        for (world, size), played in zip(batches, scores, strict=True):
            found[world].append(played)
            if on_progress is not None:
                on_progress(size)

    worlds, numbers = zip(*batches, strict=True)
    task = partial(play, rehearsal, pair)
    if jobs == 1:
        note(map(task, worlds, numbers))
    else:
        # Forked processes would share what must not be shared.
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            note(pool.map(task, worlds, numbers))
    return found


def _others(released: Released, number: int, size: int) -> Floats:
    """The noise of other honest clients in a sum, as the mechanism that they share adds it."""
    nothing = Bounded(
        {"numbers": np.zeros(size, dtype=np.int64)},
        Sensitivity(1.0, "none", {}),
        released.noisy.exponent,
    )
    total = np.zeros(size)
    for _ in range(number):
        total += flat(noise(nothing, released.noisy.sigma, sampler_named("secure")).fields)
    return total


def _ratio(steps: Any, without: Any, present: Any, sigma: float) -> float:
    """Log-likelihood ratio of the world `present`, for Gaussian noise."""
    # Only differences of grid steps are squared: they are small where the steps are huge.
    apart = (present - without).astype(float)
    middle = steps - (present + without) / 2
    return float(apart @ middle / sigma**2)
