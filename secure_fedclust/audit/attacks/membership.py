"""Membership inference on a centroid: whether a record is among those that it is the mean of.

The attacker knows the distribution that records come from and nothing about the others in the
cluster. Of a small cluster an exact centroid tells him nearly for certain; the noise of a release
leaves him a guess, and `ceilings` says how good it may be.

Two worlds are compared, and they are neighbours in the sense of the claim, or its ceiling would say
nothing about them. Under ``replace_one`` the record is in the cluster, or a fresh one is in its
place. Under ``add_remove`` it is there or is not; an exact count would then give it away by itself,
so the attacker does not know how many records there are, and looks at sums only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri
from scipy.stats import rankdata

from secure_fedclust.arrays import Floats
from secure_fedclust.audit.attacks.bounds import clopper_pearson, rates
from secure_fedclust.audit.attacks.ceilings import (
    auc_ceiling,
    check_confidence,
    claimed_mu,
    found_at,
    verdict,
)
from secure_fedclust.audit.attacks.rehearsal import Outlets
from secure_fedclust.audit.attacks.views import See, View, look_at_clusters, power
from secure_fedclust.audit.findings import Finding
from secure_fedclust.errors import ParameterError
from secure_fedclust.parameters import check_counts
from secure_fedclust.privacy.mechanism import squared_lengths
from secure_fedclust.privacy.queries import Cells
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.protocols.seeding import round_count_weight

FALSE_ALARMS = 0.01
FEWEST = 100

_ROOM = 1.4
"""The region ends so many standard deviations beyond the usual length of made-up records."""


@dataclass(frozen=True)
class Guesses:
    """How well scores tell members.

    Attributes
    ----------
    auc : float
    interval : (float, float)
        Of the AUC, by DeLong's variance; both scores of a trial may depend on each other.
    found : float
        Members found at a rate of false alarms of `FALSE_ALARMS`.
    found_interval : (float, float)
        Clopper-Pearson, for the threshold as it is.
    """

    auc: float
    interval: tuple[float, float]
    found: float
    found_interval: tuple[float, float]

    @classmethod
    def of(cls, members: Floats, others: Floats, confidence: float) -> "Guesses":
        """From the scores of a member and of a record that is none, trial by trial."""
        n = len(members)
        ranks = rankdata(np.concatenate([members, others]))
        above = (ranks[:n] - rankdata(members)) / n
        below = 1 - (ranks[n:] - rankdata(others)) / n
        auc = float(above.mean())
        error = float(np.std(above + below, ddof=1)) / math.sqrt(n)
        margin = float(ndtri((1 + confidence) / 2)) * error
        threshold = np.sort(others)[n - 1 - math.floor(FALSE_ALARMS * n)]
        found = int((members > threshold).sum())
        return cls(
            auc,
            (max(0.0, auc - margin), min(1.0, auc + margin)),
            found / n,
            clopper_pearson(found, n, confidence),
        )


def membership(
    spec: PrivacySpec,
    *,
    size: int = 2,
    n_features: int = 16,
    trials: int = 2000,
    confidence: float = 0.95,
    rng: np.random.Generator,
) -> Finding:
    """Tell members of a made-up cluster from others, by its sum and count as released.

    Parameters
    ----------
    spec : PrivacySpec
        The claim.
    size : int
        Records in the cluster; for the unit ``client``, clients with one record each.
    n_features : int
    trials : int
        Clusters, each released with the record and without.
    confidence : float
    rng : numpy.random.Generator
        For the records; noise never comes from it.
    """
    check_counts(size=size, n_features=n_features, trials=trials)
    check_confidence(confidence)
    if trials < FEWEST:
        raise ParameterError(f"trials={trials}: give at least {FEWEST}")
    mu, swapped = claimed_mu(spec), spec.adjacency == "replace_one"
    drawn = made_up(trials * (size + 1), n_features, rng).reshape(trials, size + 1, n_features)
    records, others = drawn[:, 0], drawn[:, 2:]
    # With the record, and with another or none in its place.
    worlds = drawn[:, [0, *range(2, size + 1)]], drawn[:, 1:] if swapped else others
    outlets, weight = Outlets(spec), round_count_weight(n_features, spec.adjacency)
    views = [look_at_clusters(outlets, world, weight) for world in worlds]

    def scores(see: See) -> tuple[Floats, Floats]:
        present, without = (
            _scores([see(view) for view in seen], records, size, swapped) for seen in views
        )
        return present, without

    def refuted(see: See) -> bool:
        return Guesses.of(*scores(see), confidence).interval[0] > ceiling

    ceiling = auc_ceiling(mu)
    present, without = scores(View.released)
    found, strength = Guesses.of(present, without, confidence), power(refuted, rng)
    exact = unprotected(size=size, n_features=n_features, trials=trials, rng=rng)
    return Finding(
        name=f"membership in a cluster of {size}",
        kind="statistical",
        threat=(
            "knows the distribution of records but none of the others, sees a cluster's sum as "
            "released, and says whether a record is in it"
        ),
        measure="AUC",
        figure=found.auc,
        interval=found.interval,
        ceiling=ceiling,
        verdict=verdict(found.interval[0], strength, ceiling),
        words=(
            f"The AUC is {found.auc:.3f}, of at most {ceiling:.3f} under the claim; an exact "
            f"centroid gives {exact.auc:.3f}, and finds {exact.found:.1%} of all members at "
            f"{FALSE_ALARMS:.0%} false alarms."
        ),
        trials=trials,
        confidence=confidence,
        more={
            "size": size,
            "found at 1% false alarms": found.found,
            "found at 1%, low": found.found_interval[0],
            "found at 1%, high": found.found_interval[1],
            "found at 1%, ceiling": found_at(FALSE_ALARMS, mu),
            "would have refuted half the noise": strength,
            "AUC on exact centroids": exact.auc,
            "found at 1% on exact centroids": exact.found,
        },
        curve=rates(without, present),
    )


def unprotected(
    *,
    size: int = 2,
    n_features: int = 16,
    trials: int = 2000,
    confidence: float = 0.95,
    rng: np.random.Generator,
) -> Guesses:
    """The same on exact centroids of clusters of a known size: what leaks without protection.

    Parameters
    ----------
    size, n_features, trials, confidence, rng
        As in `membership`.
    """
    check_counts(size=size, n_features=n_features, trials=trials)
    member, instead = made_up(2 * trials, n_features, rng).reshape(2, trials, n_features)
    sums = np.zeros((trials, n_features))
    for _ in range(size - 1):
        sums += made_up(trials, n_features, rng)
    variance = spread(n_features) ** 2
    present, without = (
        _log_ratio(sums + last, member, (size - 1) * variance, size * variance)
        for last in (member, instead)
    )
    return Guesses.of(present, without, confidence)


def spread(n_features: int) -> float:
    """Standard deviation of each coordinate of made-up records."""
    root = math.sqrt(n_features)
    return root / (root + _ROOM)


def made_up(n: int, n_features: int, rng: np.random.Generator) -> Floats:
    """Normal records about the origin, most of them well within the region."""
    records = rng.normal(0, spread(n_features), (n, n_features))
    length = np.sqrt(squared_lengths(records) / n_features)
    return np.asarray(records / np.maximum(length, 1.0)[:, None])


def _scores(seen: Sequence[Cells], records: Floats, size: int, swapped: bool) -> Floats:
    """Log likelihood ratios of the records, one a cluster."""
    sums = np.concatenate([cells.sums for cells in seen])
    variance = spread(records.shape[1]) ** 2
    present = seen[0].sum_sigma ** 2 + (size - 1) * variance
    return _log_ratio(sums, records, present, present + variance if swapped else present)


def _log_ratio(sums: Floats, records: Floats, present: float, without: float) -> Floats:
    """Of a sum with this record, to one without; given are the variances of the rest."""
    if present == 0:
        return np.asarray(-squared_lengths(sums - records))
    away = squared_lengths(sums) / without - squared_lengths(sums - records) / present
    return np.asarray(away / 2)
