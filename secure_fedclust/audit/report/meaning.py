"""What a claim means to somebody who is in the data."""

import math
from typing import Any

from scipy.special import ndtr, ndtri

from secure_fedclust.audit.report.facts import Facts
from secure_fedclust.privacy.accounting import Limit

FALSE_ALARMS = 0.01
_CURVE = (
    *(0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075),
    *(x / 20 for x in range(2, 21)),
)


def most_found(false_alarms: float, limit: Limit, group: int = 1) -> float:
    """The most members that an attacker finds who accepts so many false alarms.

    The smaller of two bounds: that of the Gaussian noise that stands behind the claim, with what
    discrete noise may differ from it; and that of (epsilon, delta) itself.

    Examples
    --------
    >>> round(most_found(0.01, Limit.of(1.0, 1e-5)), 3)
    0.02
    """
    ratio, tail = math.exp(limit.slack), _tail(limit)
    accepted = min(1.0, ratio * false_alarms + tail)
    gaussian = ratio * float(ndtr(ndtri(accepted) + group * limit.mu)) + tail
    epsilon = limit.epsilon if group == 1 else limit.group_epsilon(group)
    if math.isinf(epsilon):
        return min(1.0, gaussian)
    plain = math.exp(epsilon) * false_alarms + limit.delta
    mirrored = 1 - math.exp(-epsilon) * (1 - limit.delta - false_alarms)
    return min(1.0, gaussian, plain, mirrored)


def largest_auc(limit: Limit, group: int = 1) -> float:
    """How often at most an attacker tells a member from another, where chance is one half.

    Examples
    --------
    >>> round(largest_auc(Limit.of(1.0, 1e-5)), 3)
    0.575
    """
    more = math.expm1(limit.slack) + 2 * _tail(limit)
    return min(1.0, float(ndtr(group * limit.mu / math.sqrt(2))) + more)


def _tail(limit: Limit) -> float:
    """The part of delta that is set aside for the tails of discrete noise."""
    return limit.delta * limit.slack / min(limit.epsilon, 1.0)


def meaning(facts: Facts) -> dict[str, Any] | None:
    """Epsilon in words, and a curve that no attacker gets above; None where nothing is claimed."""
    limit = facts.limit
    if limit is None or not facts.claims:
        return None
    spec = facts.spec
    group = spec.records_per_person or 1
    unit = "client" if spec.unit == "client" else "record"
    if spec.records_per_person is not None:
        unit = "person"
    who = {
        "client": "clients whose data were used",
        "record": "records that were used",
        "person": "persons whose records were used",
    }[unit]
    found, auc = most_found(FALSE_ALARMS, limit, group), largest_auc(limit, group)
    epsilon = limit.epsilon if group == 1 else limit.group_epsilon(group)
    return {
        "unit": unit,
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "delta": limit.delta,
        "mu": group * limit.mu,
        "record_epsilon": limit.epsilon,
        "records_per_person": spec.records_per_person,
        "false_alarms": FALSE_ALARMS,
        "found": found,
        "auc": auc,
        "words": [
            f"Somebody who sees all that the claim covers, knows everything else about the data, "
            f"and accepts {FALSE_ALARMS:.0%} false alarms, finds at most {100 * found:.1f}% of the "
            f"{who}. Without seeing anything, by guessing, it would be {FALSE_ALARMS:.0%}.",
            f"Shown one {unit} that was used and one that was not, they tell the two apart in at "
            f"most {100 * auc:.1f}% of cases. By guessing it would be 50%.",
        ],
        "curve": [[x, most_found(x, limit, group)] for x in _CURVE],
    }
