"""The accountant that made the claim against another one that did not."""

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from secure_fedclust.audit.report import trainings as noisy
from secure_fedclust.audit.report.trainings import Paid
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


HOW_TRAINED = (
    "Releases are composed exactly: the squares of mu add up. Noisy training is charged as the "
    "Gaussian release that is no harder to see through, but for a probability set aside in delta; "
    "so it costs less than it is charged for. Checked against the privacy loss distributions of "
    "Google's dp_accounting, in which the same releases and all steps of training are composed "
    "as they are; each training by itself against Opacus' PRV accountant, which works otherwise; "
    "and all of it against Opacus' RDP accountant, which proves less and must find more."
)


class AccountingError(LedgerError):
    """Two accountants disagree about what a run has cost."""


def cross_check(
    mus: Mapping[str, Sequence[float]],
    delta: float,
    epsilon: float,
    trainings: Mapping[str, Sequence[Paid]] | None = None,
) -> dict[str, Any]:
    """Epsilon of each client's releases, by exact composition and by dp_accounting's PLD.

    Parameters
    ----------
    mus : mapping of client to sequence of float
        Of its releases in the run.
    delta : float
    epsilon : float
        What is claimed for them together.
    trainings : mapping of client to sequence of Paid, optional
        Rows for noisy training, which are not among the releases.

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
    trained = trainings or {}
    everybody = dict.fromkeys([*mus, *trained])
    if not everybody:
        return _not_checked("the releases are not here, because the ledger is not")
    known: dict[Any, dict[str, Any]] = {}
    clients = {}
    for client in everybody:
        spent, paid = tuple(sorted(mus.get(client, ()))), tuple(trained.get(client, ()))
        if (spent, paid) not in known:
            known[spent, paid] = (
                _with_training(client, spent, paid, delta) if paid else _gaussian(spent, delta)
            )
        found = known[spent, paid]
        least = epsilon_of(delta, compose(spent)) if paid else found["exact"]
        compare(client, found["exact"], found["pld"], epsilon, least)
        clients[client] = found
    return {
        "checked": True,
        "words": HOW_TRAINED if any(trained.values()) else HOW,
        "other": f"dp_accounting {version}, PLD",
        "delta": delta,
        "tolerance": TOLERANCE,
        "clients": clients,
        "largest_difference": max(abs(c["exact"] - c["pld"]) for c in clients.values()),
    }


def _gaussian(mus: Sequence[float], delta: float) -> dict[str, Any]:
    return {
        "exact": epsilon_of(delta, compose(mus)),
        "pld": pld_epsilon(mus, delta),
        "releases": len(mus),
    }


def _with_training(
    client: str, mus: Sequence[float], trainings: Sequence[Paid], delta: float
) -> dict[str, Any]:
    for each in dict.fromkeys(trainings):
        if problem := noisy.refuted(each, delta):
            raise AccountingError(f"{client}: {problem}: no report is made of a cost in dispute")
    theirs = noisy.pld_epsilon(mus, trainings, delta)
    rdp = noisy.rdp_epsilon(mus, trainings, delta)
    if rdp is not None and rdp < theirs - DISCRETISATION:
        raise AccountingError(
            f"{client}: Opacus' RDP accountant gives epsilon {rdp:.6g}, which proves less and "
            f"should give more than dp_accounting's {theirs:.6g}: one of the two is wrong, and no "
            "report is made of a cost in dispute"
        )
    return {
        "exact": epsilon_of(delta, compose([*mus, *(each.mu for each in trainings)])),
        "pld": theirs,
        "rdp": rdp,
        "releases": len(mus) + len(trainings),
        "trainings": len(trainings),
    }


def compare(
    client: str, ours: float, theirs: float, claimed: float, least: float | None = None
) -> None:
    """Raise unless two accountants agree.

    Parameters
    ----------
    client : str
    ours, theirs, claimed : float
    least : float, optional
        What the other must find about; ours, unless training makes ours larger than need be.
    """
    least = ours if least is None else least
    words = f"{client}: exact composition gives epsilon {ours:.6g}, dp_accounting {theirs:.6g}"
    if theirs > ours + DISCRETISATION:
        raise AccountingError(f"{words}, which is more: no report is made of a cost in dispute")
    if theirs < least - max(TOLERANCE * least, DISCRETISATION):
        raise AccountingError(
            f"{words}, which is less than {least:.6g} by more than {TOLERANCE:.0%}: one of the two "
            "is wrong, and no report is made of a cost in dispute"
        )
    if theirs > claimed + DISCRETISATION:
        raise AccountingError(f"{words}, which is more than the claim of {claimed:g}")


def _not_checked(why: str) -> dict[str, Any]:
    return {"checked": False, "words": f"Not cross-checked: {why}."}
