"""The accountant that made the claim against another one that did not."""

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from secure_fedclust.errors import LedgerError
from secure_fedclust.privacy.accounting import compose, epsilon_of, pld_epsilon

TOLERANCE = 0.01
"""Of epsilon, by which the other accountant may be lower."""

DISCRETISATION = 1e-4
"""By which it may be higher: its grid of losses is so fine, and it rounds up."""

HOW = (
    "Exact composition of Gaussian releases: the squares of mu add up. Checked against the privacy "
    "loss distributions of Google's dp_accounting, which does not know this formula."
)


class AccountingError(LedgerError):
    """Two accountants disagree about what a run has cost."""


def cross_check(mus: Mapping[str, Sequence[float]], delta: float, epsilon: float) -> dict[str, Any]:
    """Epsilon of each client's releases, by exact composition and by dp_accounting's PLD.

    Parameters
    ----------
    mus : mapping of client to sequence of float
        Of its releases in the run.
    delta : float
    epsilon : float
        What is claimed for them together.

    Raises
    ------
    AccountingError
        If the other accountant finds more than we do, beyond its own rounding: then the claim may
        be too small. If it finds far less, too: then one of the two is wrong.
    """
    try:
        version = metadata.version("dp-accounting")
    except metadata.PackageNotFoundError:
        return _not_checked("dp_accounting is not installed: install the extra compare")
    if not mus:
        return _not_checked("the releases are not here, because the ledger is not")
    known: dict[tuple[float, ...], tuple[float, float]] = {}
    clients = {}
    for client, spent in mus.items():
        key = tuple(sorted(spent))
        if key not in known:
            known[key] = epsilon_of(delta, compose(key)), pld_epsilon(key, delta)
        ours, theirs = known[key]
        compare(client, ours, theirs, epsilon)
        clients[client] = {"exact": ours, "pld": theirs, "releases": len(key)}
    return {
        "checked": True,
        "words": HOW,
        "other": f"dp_accounting {version}, PLD",
        "delta": delta,
        "tolerance": TOLERANCE,
        "clients": clients,
        "largest_difference": max(abs(c["exact"] - c["pld"]) for c in clients.values()),
    }


def compare(client: str, ours: float, theirs: float, claimed: float) -> None:
    """Raise unless two accountants agree."""
    words = f"{client}: exact composition gives epsilon {ours:.6g}, dp_accounting {theirs:.6g}"
    if theirs > ours + DISCRETISATION:
        raise AccountingError(f"{words}, which is more: no report is made of a cost in dispute")
    if theirs < ours - max(TOLERANCE * ours, DISCRETISATION):
        raise AccountingError(
            f"{words}, which is less by more than {TOLERANCE:.0%}: one of the two is wrong, and no "
            "report is made of a cost in dispute"
        )
    if theirs > claimed + DISCRETISATION:
        raise AccountingError(f"{words}, which is more than the claim of {claimed:g}")


def _not_checked(why: str) -> dict[str, Any]:
    return {"checked": False, "words": f"Not cross-checked: {why}."}
