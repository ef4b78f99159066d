"""An audit: every attack and check on one kind of run, on made-up data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from secure_fedclust.audit.attacks.canaries import one_run
from secure_fedclust.audit.attacks.ceilings import claimed_mu, least_honest
from secure_fedclust.audit.attacks.differencing import differencing, singletons
from secure_fedclust.audit.attacks.exhibits import afcl
from secure_fedclust.audit.attacks.game import (
    distinguish,
    judge,
    ordinary_noise,
    release_once,
    threat,
)
from secure_fedclust.audit.attacks.membership import membership
from secure_fedclust.audit.attacks.noise import judge_noise
from secure_fedclust.audit.attacks.pairs import floor_pair, worst_pair
from secure_fedclust.audit.attacks.rehearsal import Outlets, Rehearsal, Serve, made_up, rehearse
from secure_fedclust.audit.attacks.structure import inspect
from secure_fedclust.audit.findings import GAME, Audit, Finding
from secure_fedclust.audit.report.content import installed_versions
from secure_fedclust.errors import ParameterError
from secure_fedclust.parameters import check_counts
from secure_fedclust.privacy.queries import FloorMeans
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.protocols.client import Client, PrivateClient

TRIALS = 5000
"""Runs of a client that a distinguishing game plays, unless told otherwise."""

_FEWEST = 100
_ATTACK_TRIALS = 2000
_DRAWING = 8
_GAMES, _ATTACKS = 0.4, 0.05
"""Of what the confidence of an audit leaves to chance, the parts of each of two games, and of each
of four attacks. What looks at the noise itself takes next to nothing: see `noise.SURE`."""


@dataclass(frozen=True)
class Subject:
    """A kind of run, which can be played without anybody's records.

    Attributes
    ----------
    algorithm : str
    parameters : mapping
    client_class : subclass of Client
        One of `PrivateClient`: nothing else has a way out that can be watched.
    serve : function
        The server's side of a private run.
    spec : PrivacySpec
    clients : sequence of str
    n_features : int
    """

    algorithm: str
    parameters: Mapping[str, Any] = field(repr=False)
    client_class: type[Client]
    serve: Serve = field(repr=False)
    spec: PrivacySpec
    clients: Sequence[str]
    n_features: int

    def unplayed(self) -> Audit:
        """An audit of it that has found nothing yet."""
        return Audit(
            algorithm=self.algorithm,
            parameters=self.parameters,
            privacy=self.spec.to_dict(),
            n_clients=len(self.clients),
            n_features=self.n_features,
            trials=0,
            findings=(),
            versions=installed_versions(),
        )


def audit_runs(
    subject: Subject,
    *,
    trials: int = TRIALS,
    confidence: float = 0.95,
    jobs: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Attack a kind of run, on made-up data.

    Parameters
    ----------
    subject : Subject
    trials : int
        Runs of one client in the distinguishing game, half of them in each of two worlds.
    confidence : float
        That correct code passes, whatever chance does.
    jobs : int
        Processes.
    on_progress : function, optional
        Called with the number of trials done and of all.
    """
    check_counts(trials=trials, jobs=jobs)
    if trials < _FEWEST:
        raise ParameterError(f"trials={trials}: give at least {_FEWEST}")
    if not 0.5 <= confidence < 1:
        raise ParameterError(f"confidence={confidence}: give a number from 0.5 to below 1")
    if not issubclass(subject.client_class, PrivateClient):
        raise TypeError(f"{subject.client_class.__name__} does not protect what it sends")
    rng = np.random.default_rng()
    rehearsal = rehearse(
        subject.client_class,
        subject.serve,
        subject.spec,
        clients=subject.clients,
        n_features=subject.n_features,
        rng=rng,
    )
    games, attacks = (1 - part * (1 - confidence) for part in (_GAMES, _ATTACKS))
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        if on_progress is not None:
            on_progress(done, trials)

    pair = worst_pair(rehearsal, rng)
    game, noise = distinguish(rehearsal, pair, trials, games, jobs, count)
    findings = [
        game,
        *_floor_game(rehearsal, trials, games, rng),
        *judge_noise(noise.plus(ordinary_noise(rehearsal, rng))),
        *inspect(rehearsal, pair, rng),
        *_attacks(rehearsal.spec, _fewer(rehearsal.spec, trials), attacks, rng),
    ]
    return replace(subject.unplayed(), trials=trials, findings=tuple(findings))


def _fewer(spec: PrivacySpec, trials: int) -> int:
    """Trials of attacks that know less than the game's: where many share the noise, fewer."""
    drawing = least_honest(spec)
    return max(_FEWEST, min(trials, _ATTACK_TRIALS * _DRAWING // max(_DRAWING, drawing)))


def _attacks(
    spec: PrivacySpec, trials: int, confidence: float, rng: np.random.Generator
) -> Iterator[Finding]:
    """Attacks on what every system releases: sums and counts of clusters."""
    epsilon, delta = spec.target()
    yield membership(spec, trials=trials, confidence=confidence, rng=rng)
    yield one_run(spec, confidence=confidence, rng=rng)
    yield differencing(spec, trials=trials, confidence=confidence, rng=rng)
    yield singletons(spec, trials=trials, confidence=confidence, rng=rng)
    yield afcl(epsilon=epsilon, delta=delta, confidence=confidence, rng=rng)


def _floor_game(
    rehearsal: Rehearsal, trials: int, confidence: float, rng: np.random.Generator
) -> Iterator[Finding]:
    """For means with a floor under their weight: the pair than which none is worse."""
    outlet = Outlets(rehearsal.spec).fresh()
    records = made_up(rehearsal.domain, 1, rng)
    queries = [r.query for r in rehearsal.play(records, outlet) if isinstance(r.query, FloorMeans)]
    if not queries or rehearsal.spec.unit == "client":
        return
    asked, spec = queries[0], rehearsal.spec
    plain, without, present = floor_pair(
        round(asked.floor), asked.soft.radius, rehearsal.spec.adjacency
    )
    query = replace(plain, printed_bound=asked.printed_bound, enforced=asked.enforced)
    mu = claimed_mu(spec)
    stated, exact = (q.sensitivity(spec.adjacency).value for q in (query, plain))
    yield judge(
        *release_once(query, without, present, spec, trials // 2),
        spec,
        confidence,
        attained=mu * exact / stated,
        name=f"{GAME}, worst pair of a floor",
        threat=threat(spec),
    )
