"""The most that a claim allows an attacker, whatever the attack.

A release that is mu-GDP is no easier to tell from one without the record than a normal variable of
mean mu from one of mean 0. That limits how many members an attacker finds for so many false alarms,
the area under that curve, and how often a guess about a record is right: being right is an event
like any other, and without the record in the data it happens as often as for a blind guess.
"""

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri
from scipy.stats import norm

from secure_fedclust.audit.findings import Verdict
from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.privacy.terms import Adjacency


def claimed_mu(spec: PrivacySpec) -> float:
    """The mu of a spec's claim, worked out anew.

    The largest for which ``Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu) <= delta``.
    Nothing of the accounting that set the noise goes into it, which may be wrong.

    Examples
    --------
    >>> round(claimed_mu(PrivacySpec(epsilon=1.0, delta=1e-5, bound=1.0)), 3)
    0.268
    """
    epsilon, delta = spec.target()

    def beyond(mu: float) -> float:
        first, second = norm.logcdf([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu])
        return float(np.exp(first) - np.exp(epsilon + second) - delta)

    return float(brentq(beyond, 1e-9, 1e3, xtol=1e-12))


def least_honest(spec: PrivacySpec) -> int:
    """Clients whose noise an attacker cannot know, in the smallest sum that may be opened."""
    return 1 if spec.protection == "none" else (spec.min_survivors or 0) - spec.colluders


def auc_ceiling(mu: float) -> float:
    """Largest area under the curve of right alarms over false alarms.

    Examples
    --------
    >>> round(auc_ceiling(0.268), 3)
    0.575
    """
    _check(mu=mu)
    return float(ndtr(mu / 2**0.5))


def found_at(false_alarms: float, mu: float) -> float:
    """Largest rate of right alarms at a rate of false alarms.

    Examples
    --------
    >>> round(found_at(0.01, 1.6679), 3)
    0.255
    """
    _check(mu=mu, false_alarms=false_alarms)
    return float(ndtr(ndtri(false_alarms) + mu))


def reconstruction_ceiling(blind: float, mu: float) -> float:
    """Largest probability of a success that has the probability `blind` without the record.

    Examples
    --------
    >>> round(reconstruction_ceiling(0.25, 0.268), 3)
    0.342
    """
    _check(mu=mu, blind=blind)
    return float(ndtr(ndtri(blind) + mu))


def naming_ceiling(values: int, mu: float, adjacency: Adjacency) -> float:
    """Largest probability of naming which of some equally likely values a record has.

    Under ``add_remove`` a release without the record names each value now and then, and all of them
    together at most always. Under ``replace_one`` releases with different values are neighbours:
    the rate p of right answers is bounded by that of each wrong one, (1 - p) / (values - 1).

    Examples
    --------
    >>> [round(naming_ceiling(2, 1.0, way), 3) for way in ("add_remove", "replace_one")]
    [0.841, 0.691]
    """
    _check(mu=mu)
    if values < 2:
        raise ParameterError(f"values={values}: give at least 2")
    if adjacency == "add_remove":
        return reconstruction_ceiling(1 / values, mu)
    low, high = 1 / values, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if middle <= reconstruction_ceiling((1 - middle) / (values - 1), mu):
            low = middle
        else:
            high = middle
    return high


STRONG = 0.9
"""An attack passes what it does not refute if it would have refuted half the noise so often."""


def verdict(low: float, power: float, ceiling: float) -> Verdict:
    """What a lower end says, of an attack that would refute half the noise with some probability.

    Examples
    --------
    >>> verdict(0.6, 0.9, ceiling=0.575), verdict(0.5, 0.9, ceiling=0.575)
    ('FAIL', 'PASS')
    >>> verdict(0.5, 0.5, ceiling=0.575)
    'INCONCLUSIVE'
    """
    if low > ceiling:
        return "FAIL"
    return "PASS" if power >= STRONG else "INCONCLUSIVE"


def check_confidence(confidence: float) -> None:
    """Raise unless it is a probability that an interval can have."""
    if not 0 < confidence < 1:
        raise ParameterError(f"confidence={confidence}: give a number above 0 and below 1")


def _check(mu: float, **rates: float) -> None:
    if not mu >= 0:
        raise ParameterError(f"mu={mu}: give a number of at least 0")
    for name, rate in rates.items():
        if not 0 <= rate <= 1:
            raise ParameterError(f"{name}={rate}: give a number from 0 to 1")
