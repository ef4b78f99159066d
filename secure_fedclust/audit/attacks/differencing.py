"""Reconstruction: records worked out from sums, or from what two of them do not have in common.

A sum over one record is that record. So is the difference of two sums of which one has a record
more, and k-means produces such pairs by itself: from one round to the next a record leaves a
cluster, and its count falls by one. Whoever sees exact sums and counts reads those records off,
to the last bit.

Under a claim an attacker may guess as he likes. Made-up records have one of a few values, spread
over the region, and he says which: one of two is a question of yes or no. A blind guess is right
now and then; how much more often one can be that sees a release is limited, see
`ceilings.naming_ceiling`. The record is in one run, which is what the claim is about.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.audit.attacks.bounds import clopper_pearson
from secure_fedclust.audit.attacks.ceilings import (
    check_confidence,
    claimed_mu,
    naming_ceiling,
    verdict,
)
from secure_fedclust.audit.attacks.rehearsal import Outlets
from secure_fedclust.audit.attacks.rounds import watched_rounds
from secure_fedclust.audit.attacks.views import See, View, anywhere, look_at_clusters, power
from secure_fedclust.audit.findings import Finding
from secure_fedclust.errors import ParameterError
from secure_fedclust.parameters import check_counts
from secure_fedclust.privacy.spec import PrivacySpec

FEWEST = 20

_COUNT_WEIGHT = 0.25


def singletons(
    spec: PrivacySpec,
    *,
    values: int = 2,
    n_features: int = 1,
    trials: int = 2000,
    confidence: float = 0.95,
    rng: np.random.Generator,
) -> Finding:
    """Reconstruct records that are alone in their cluster, from its sum as released.

    The attacker knows that the cluster has one record, and which values it may have.

    Parameters
    ----------
    spec : PrivacySpec
        The claim.
    values : int
        How many there are, evenly spaced on a line across the region: a record is found if it is
        named to within one in `values - 1` of the region's radius.
    n_features : int
    trials : int
        Records, each alone in its cluster.
    confidence : float
    rng : numpy.random.Generator
        For the records; noise never comes from it.
    """
    _check(values, confidence, n_features=n_features, trials=trials)
    secrets = rng.integers(values, size=trials)
    records = _on_a_line(secrets, values, n_features)
    views = look_at_clusters(Outlets(spec), records[:, None], _COUNT_WEIGHT)
    return _finding(
        spec,
        secrets,
        lambda see: _sums(views, see),
        values,
        confidence,
        rng,
        name="reconstruction of a singleton",
        threat="knows that a cluster has one record, sees its sum as released, and names its value",
    )


def differencing(
    spec: PrivacySpec,
    *,
    values: int = 2,
    n_features: int = 1,
    size: int = 2,
    trials: int = 2000,
    n_records: int = 200,
    runs: int = 10,
    confidence: float = 0.95,
    rng: np.random.Generator,
) -> Finding:
    """Reconstruct a record from two sums, one with it and one without.

    The attacker sees a run on a cluster's records, and another after one of them has gone: a record
    that was deleted, or a client that did not take part again. He takes one sum from the other. The
    other records are the same, and he knows none of them.

    Beside that, rounds of k-means are watched, exact and as released, for records that move: see
    `rounds`. Should any be found to the last bit in what was released, the claim fails.

    Parameters
    ----------
    spec : PrivacySpec
        The claim.
    values, n_features, trials, confidence
        As in `singletons`.
    size : int
        Records in a cluster.
    n_records, runs : int
        Of the k-means that is watched.
    rng : numpy.random.Generator
        For records and public centres; noise never comes from it.
    """
    _check(values, confidence, n_features=n_features, size=size, trials=trials, runs=runs)
    secrets = rng.integers(values, size=trials)
    members = anywhere(trials * size, n_features, rng).reshape(trials, size, n_features)
    members[:, 0] = _on_a_line(secrets, values, n_features)
    outlets = Outlets(spec)
    views = look_at_clusters(outlets, members, _COUNT_WEIGHT)
    without = look_at_clusters(outlets, members[:, 1:], _COUNT_WEIGHT)
    exact, released = watched_rounds(outlets, n_records=n_records, runs=runs, rng=rng)
    found = _finding(
        spec,
        secrets,
        lambda see: np.asarray(_sums(views, see) - _sums(without, see)),
        values,
        confidence,
        rng,
        name="differencing",
        threat="sees a sum with a record and the same sum without it, as released, and names it",
    )
    if released:
        words = f"{released:g} records a run were found to the last bit in what was released."
        found = replace(found, verdict="FAIL", words=words)
    return replace(
        found,
        more={
            **found.more,
            "records of a client": n_records,
            "found a run, exact rounds": exact,
            "found a run, as released": released,
        },
    )


def _sums(views: Sequence[View], see: See) -> Floats:
    return np.concatenate([see(view).sums for view in views])


def _on_a_line(secrets: Ints, values: int, n_features: int) -> Floats:
    """Records whose first feature tells which value they have."""
    records = np.zeros((len(secrets), n_features))
    records[:, 0] = np.linspace(-1, 1, values)[secrets] * n_features**0.5
    return records


def _finding(
    spec: PrivacySpec,
    secrets: Ints,
    seen: Callable[[See], Floats],
    values: int,
    confidence: float,
    rng: np.random.Generator,
    *,
    name: str,
    threat: str,
) -> Finding:
    """Name the value of every record by what is seen of it, and count."""
    trials = len(secrets)

    def right(see: See) -> int:
        sums = seen(see)
        place = (sums[:, 0] / sums.shape[1] ** 0.5 + 1) / 2 * (values - 1)
        return int((np.clip(np.rint(place), 0, values - 1) == secrets).sum())

    def refuted(see: See) -> bool:
        return clopper_pearson(right(see), trials, confidence)[0] > ceiling

    ceiling = naming_ceiling(values, claimed_mu(spec), spec.adjacency)
    found, exact = right(View.released), right(View.without_noise)
    interval, strength = clopper_pearson(found, trials, confidence), power(refuted, rng)
    return Finding(
        name=name,
        kind="statistical",
        threat=threat,
        measure="records found",
        figure=found / trials,
        interval=interval,
        ceiling=ceiling,
        verdict=verdict(interval[0], strength, ceiling),
        words=(
            f"Of records with one of {values} values, {found / trials:.1%} are named rightly, of "
            f"at most {ceiling:.1%} under the claim; blind guesses get {1 / values:.1%}, and from "
            f"exact sums {exact / trials:.1%} are found."
        ),
        trials=trials,
        confidence=confidence,
        more={
            "values": values,
            "blind guesses": 1 / values,
            "would have refuted half the noise": strength,
            "from exact sums": exact / trials,
        },
    )


def _check(values: int, confidence: float, **counts: int) -> None:
    check_counts(values=values, **counts)
    check_confidence(confidence)
    if values < 2:
        raise ParameterError(f"values={values}: give at least 2")
    if counts["trials"] < FEWEST:
        raise ParameterError(f"trials={counts['trials']}: give at least {FEWEST}")
