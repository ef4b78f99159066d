"""The audit report as plain values: what there is to know about the privacy of one run.

`report_of` gathers them, `secure_fedclust.audit.report.page.render` makes a page of them, and
`schema.json` says how they are laid out.
"""

import math
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from secure_fedclust.audit.findings import Audit
from secure_fedclust.audit.report.agreement import NO_CLAIM
from secure_fedclust.audit.report.assumptions import Assumption, assumptions
from secure_fedclust.audit.report.crosscheck import cross_check
from secure_fedclust.audit.report.facts import Facts, gather
from secure_fedclust.audit.report.meaning import meaning
from secure_fedclust.audit.report.pseudonyms import Names
from secure_fedclust.audit.report.remarks import limits, unnoised
from secure_fedclust.audit.report.sights import opened, sights, trust
from secure_fedclust.audit.report.trainings import Paid, is_training, paid
from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.accounting import Limit, epsilon_of, mu_of
from secure_fedclust.privacy.charges import Totals
from secure_fedclust.privacy.ledger import Ledger
from secure_fedclust.result import FedClustResult

FORMAT = "secure_fedclust report 1"
NOT_AUDITED = "not audited"
COMMAND_LEFT_OUT = "left out, because it names clients; --names shows it"
HASH = 12
"""Digits of a row's hash that are shown."""

_SAME = ("secure-fedclust", "opendp", "numpy", "scipy")
"""Packages of which run and audit must have the same versions."""

_PACKAGES = (
    *("secure-fedclust", "numpy", "scipy", "scikit-learn", "opendp"),
    *("cryptography", "tenseal", "msgpack", "dp-accounting", "torch", "opacus", "flwr"),
)


def report_of(
    result: FedClustResult,
    *,
    ledger: Ledger | str | Path | None = None,
    audit: Audit | None = None,
    command: str | None = None,
    names: bool = False,
    versions: Mapping[str, str] | None = None,
    labels: bool = False,
) -> dict[str, Any]:
    """Everything that a report says about a run, as plain values.

    Parameters
    ----------
    result : FedClustResult
    ledger : Ledger or path, optional
        What the run was charged to; required where it was a file.
    audit : Audit, optional
        Attacks on the same kind of run.
    command : str, optional
        The command that makes the run again.
    names : bool
        Whether clients are called by their names.
    versions : mapping of package to version, optional
        That the run was made with; those installed, if not given.
    labels : bool
        Whether records' labels were written next to the result.

    Raises
    ------
    ParameterError
        If ledger or audit do not belong to the result.
    LedgerError
        If the ledger was changed, or the accountants disagree.
    """
    facts = gather(result, ledger, audit)
    if audit is not None and versions is not None:
        _check_versions(audit.versions, versions)
    called = _names(facts, names)
    lines = [_without_names(line, facts, called) for line in assumptions(facts)]
    violated = [line for line in lines if line.status == "violated"]
    verdict = NO_CLAIM if violated or not facts.claims else "DP CLAIM"
    claim = _user_text(facts.claim, facts, called)
    if violated and facts.spec.is_private:
        # That it says so itself is the reason only where nothing else is known.
        known = [line.why for line in violated if line.name != "declared"]
        claim = f"{NO_CLAIM}: " + "; ".join(known or [line.why for line in violated])
    return {
        "format": FORMAT,
        "made": datetime.now(UTC).date().isoformat(),
        "verdict": verdict,
        "claim": claim,
        "reasons": [
            {"statement": line.statement, "why": line.why, "name": line.name} for line in violated
        ],
        "audited": NOT_AUDITED if facts.audit is None else facts.audit.verdict,
        "run": _run(facts, called),
        "privacy": _privacy(facts, called),
        "meaning": None if violated else meaning(facts),
        "trust": trust(facts, claimed=verdict != NO_CLAIM),
        "saw": sights(facts, claimed=verdict != NO_CLAIM),
        "sums": opened(facts, called),
        "clients": _clients(facts, called),
        "ledger": _ledger(facts, called),
        "assumptions": [vars(line) for line in lines],
        "accountants": _accountants(facts, called),
        "audit": _audit(facts, called),
        "unnoised": unnoised(facts, called, labels),
        "limits": limits(facts, called),
        "fallback": result.fallback,
        "reproduce": {
            **_command(command, called),
            "noise": "Noise is not seeded: the same run again gives other centres, with the same "
            "guarantee, and is charged anew; on a ledger whose budget is spent it is refused. With "
            "a checkpoint that is still there it is not run again, but read."
            if facts.spec.is_private
            else "There is no noise; with the same random_state the centres are the same.",
            "verify": _verify_command(facts),
            "versions": dict(versions or installed_versions()),
        },
    }


def installed_versions() -> dict[str, str]:
    """Python, and the packages that a run depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _check_versions(audited: Mapping[str, str], made: Mapping[str, str]) -> None:
    for package in _SAME:
        found, wanted = audited.get(package), made.get(package)
        if wanted is not None and found != wanted:
            raise ParameterError(
                f"audited with {package} {found}, the run was made with {package} {wanted}: audit "
                "again"
            )


def _names(facts: Facts, shown: bool) -> Names:
    """Everybody whose name could occur: the run's clients first."""
    others = [row.charge.client for row in facts.ledger.rows] if facts.ledger is not None else []
    given = facts.result.parameters.values()
    mapped = [str(name) for value in given if isinstance(value, Mapping) for name in value]
    return Names([*facts.clients, *(facts.result.client_clusters or ()), *others, *mapped], shown)


def _user_text(text: str, facts: Facts, called: Names) -> str:
    """Text of the program's, in which the only words of a user's are the reason for no privacy."""
    reason = facts.spec.reason
    return text if reason is None else text.replace(reason, called.text(reason))


def _without_names(line: Assumption, facts: Facts, called: Names) -> Assumption:
    why = _user_text(line.why, facts, called)
    if line.name == "code":  # which quotes what an attack is called
        why = called.words(why)
    return Assumption(line.name, line.statement, line.status, why)


def _privacy(facts: Facts, called: Names) -> dict[str, Any]:
    """The spec, in which the only words of a user's are the reason."""
    content, reason = facts.spec.to_dict(), facts.spec.reason
    return content if reason is None else content | {"reason": called.text(reason)}


def _command(command: str | None, called: Names) -> dict[str, Any]:
    """The command, unless it could name clients: with other names it would not be the command."""
    if command is not None and called.could_be_in(command):
        return {"command": None, "left_out": COMMAND_LEFT_OUT}
    return {"command": command, "left_out": None}


def _run(facts: Facts, called: Names) -> dict[str, Any]:
    result = facts.result
    features = result.feature_names
    held = result.client_clusters
    return {
        "algorithm": result.algorithm,
        "parameters": {name: called.keys(value) for name, value in result.parameters.items()},
        "n_clients": len(facts.clients),
        "n_features": result.centers.shape[1],
        "n_clusters": result.n_clusters,
        "feature_names": None if features is None else [called.text(str(f)) for f in features],
        "centers": result.centers.tolist(),
        "client_clusters": None
        if held is None
        else {called(client): [int(k) for k in found] for client, found in held.items()},
        "sampler": result.sampler,
        "exchanges": len(result.history),
        "bytes_up": sum(exchange.bytes_up for exchange in result.history),
        "bytes_down": sum(exchange.bytes_down for exchange in result.history),
    }


def _clients(facts: Facts, called: Names) -> dict[str, Any]:
    """What was claimed for each client, and what the run has cost it."""
    limit, spec = facts.limit, facts.spec
    rows: list[dict[str, Any]] = []
    booked = facts.run_totals()
    for client in facts.clients:
        if limit is None:
            break
        spent = float(facts.result.spent.get(client, 0.0))
        mu = booked[client].mu if client in booked else _mu(spent, limit)
        anchor = facts.result.anchors.get(client)
        rows.append(
            {
                "client": called(client),
                "epsilon": limit.epsilon,
                "delta": limit.delta,
                "spent": spent,
                "mu": mu,
                "mu_limit": limit.mu,
                "person_spent": None
                if spec.records_per_person is None
                else epsilon_of(limit.delta, spec.records_per_person * mu),
                "anchor": None if anchor is None else f"{anchor[0]}:{anchor[1]}",
            }
        )
    return {
        "names_shown": called.shown,
        "clients": rows,
        "largest_spent": max((row["spent"] for row in rows), default=None),
        "largest_mu": max((row["mu"] for row in rows), default=None),
        "colluders": spec.colluders if spec.protection != "none" else None,
        "costs": dict(facts.result.costs),
    }


def _mu(spent: float, limit: Limit) -> float:
    return mu_of(spent, limit.delta) if spent > 0 else 0.0


_KEPT = {
    "verified": "Every row was checked: none was changed, none is missing.",
    "in memory": "The ledger of this run was in memory and is gone: its rows cannot be shown. A "
    "ledger in a file would have been kept.",
    "by the clients": "Each client keeps its own ledger. It can check it against its anchor below, "
    "which is under its name in result.json.",
    "none": "Without differential privacy nothing is charged.",
}


def _ledger(facts: Facts, called: Names) -> dict[str, Any]:
    ledger = facts.ledger
    if ledger is None:
        return {"kept": facts.kept, "words": _KEPT[facts.kept], "book": None}
    limit = ledger.limit
    return {
        "kept": facts.kept,
        "words": _KEPT[facts.kept],
        "book": {
            "epsilon": limit.epsilon,
            "delta": limit.delta,
            "mu": limit.mu,
            "unit": ledger.unit,
            "adjacency": ledger.adjacency,
            "dataset": called.text(ledger.dataset),
            "anchor": f"{ledger.anchor.rows}:{ledger.anchor.head}",
            "verified": f"every row, {ledger.n_anchors} anchor{'s' * (ledger.n_anchors != 1)}",
            "n_anchors": ledger.n_anchors,
            "runs": len({row.charge.run for row in ledger.rows}),
            "rows": [
                {
                    "row": row.number,
                    "this_run": row.charge.run == ledger.run,
                    "run": row.charge.run,
                    "round": row.charge.step,
                    "client": called(row.charge.client),
                    "message": row.charge.message,
                    "formula": row.charge.formula,
                    "inputs": dict(row.charge.inputs),
                    "sensitivity": row.charge.sensitivity,
                    "sigma": row.charge.sigma,
                    "mu": row.charge.mu,
                    "cumulative_mu": row.cumulative_mu,
                    "numbers": row.charge.coordinates,
                    "hash": row.hash[:HASH],
                }
                for row in ledger.rows
            ],
            "lifetime": [
                {"client": called(client), **_lifetime(totals, limit)}
                for client, totals in ledger.totals().items()
            ],
        },
    }


def _lifetime(totals: Totals, limit: Limit) -> dict[str, float]:
    left = math.sqrt(max(0.0, limit.mu**2 - totals.squared_mu))
    return {
        "spent": epsilon_of(limit.delta, totals.mu),
        "left": epsilon_of(limit.delta, left),
        "mu": totals.mu,
        "mu_left": left,
    }


def _accountants(facts: Facts, called: Names) -> dict[str, Any]:
    limit = facts.limit
    if limit is None or not facts.claims:
        return {"checked": False, "words": "Nothing is claimed, so there is nothing to check."}
    mus: dict[str, list[float]] = {}
    trained: dict[str, list[Paid]] = {}
    for row in facts.rows:
        client = called(row.charge.client)
        if is_training(row):
            trained.setdefault(client, []).append(paid(row))
        else:
            mus.setdefault(client, []).append(row.charge.mu)
    return cross_check(mus, limit.delta, limit.epsilon, trained)


def _audit(facts: Facts, called: Names) -> dict[str, Any] | None:
    audit = facts.audit
    if audit is None:
        return None
    found = [
        finding.to_dict()
        | {
            "name": called.words(finding.name),
            "words": called.words(finding.words),
            "threat": called.words(finding.threat),
            "more": {
                called.words(name): called.words(value) if isinstance(value, str) else value
                for name, value in finding.more.items()
            },
        }
        for finding in audit.findings
    ]
    return {
        "verdict": audit.verdict,
        "trials": audit.trials,
        "findings": [finding for finding in found if finding["kind"] != "exhibit"],
        "exhibits": [finding for finding in found if finding["kind"] == "exhibit"],
        "versions": dict(audit.versions),
    }


def _verify_command(facts: Facts) -> str | None:
    if facts.kept == "by the clients":
        return "secure-fedclust ledger verify FILE --against result.json --client NAME"
    if facts.ledger is None:
        return None
    anchor = facts.ledger.anchor
    return f"secure-fedclust ledger verify FILE --anchor {anchor.rows}:{anchor.head}"
