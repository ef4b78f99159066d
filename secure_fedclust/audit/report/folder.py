"""The folder of a run: what is in it, and the report that is made of it."""

import json
import secrets
from pathlib import Path
from typing import Any

from secure_fedclust.audit.findings import Audit
from secure_fedclust.audit.report.agreement import NO_CLAIM, check_result
from secure_fedclust.audit.report.content import installed_versions, report_of
from secure_fedclust.audit.report.facts import check_same_kind
from secure_fedclust.audit.report.page import render
from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.result import UNREADABLE, FedClustResult

RUN_FORMAT = "secure_fedclust run 1"

RESULT, LEDGER, AUDIT, RUN = "result.json", "ledger.sqlite", "audit.json", "run.json"
REPORT, PAGE, LABELS = "report.json", "report.html", "labels"


def write_run(folder: str | Path, *, command: str, ledger: str | None = None) -> None:
    """Note in a run's folder how the run was made; a report of an earlier one is removed.

    Parameters
    ----------
    folder : path
    command : str
        The command line that makes it again.
    ledger : str, optional
        Where the ledger is, if not in the folder.
    """
    versions = installed_versions()
    content = {
        "format": RUN_FORMAT,
        "version": versions.get("secure-fedclust", "unknown"),
        "versions": versions,
        "command": command,
        "ledger": ledger,
    }
    remove_report(folder)
    _replace({Path(folder) / RUN: json.dumps(content, indent=1)})


def remove_report(folder: str | Path) -> None:
    """Take away a report that is no longer one of what is in the folder."""
    for name in (PAGE, REPORT):
        (Path(folder) / name).unlink(missing_ok=True)


def read_result(folder: str | Path) -> FedClustResult | None:
    """The result of the run whose folder it is; None if it is none's."""
    path = Path(folder) / RESULT
    return FedClustResult.load(path) if path.is_file() else None


def check_fits(audit: Audit, result: FedClustResult) -> None:
    """Refuse an audit that a report of this result would refuse, whatever it finds.

    Parameters
    ----------
    audit : Audit
        Findings need not be there yet.
    result : FedClustResult
    """
    check_result(result, PrivacySpec.from_dict(result.privacy))
    check_same_kind(audit, result)


def write_report(
    folder: str | Path, *, ledger: str | Path | None = None, names: bool = False
) -> Path:
    """Make ``report.html`` and ``report.json`` of what is in a run's folder.

    Parameters
    ----------
    folder : path
        With ``result.json``; ``ledger.sqlite``, ``audit.json`` and ``run.json`` are used if there.
    ledger : path, optional
        Where the ledger is, if neither in the folder nor where ``run.json`` says.
    names : bool
        Whether clients are called by their names.

    Returns
    -------
    Path
        Of ``report.html``.

    Raises
    ------
    ParameterError
        If something in the folder cannot be used, or is of another run. Nothing is written then.
    LedgerError
        If the ledger does not hold.
    """
    place = Path(folder)
    result = read_result(place)
    if result is None:
        raise ParameterError(
            f"{place} has no {RESULT}: give the folder that `secure-fedclust run --out` has made"
        )
    run = _read_run(place / RUN)
    audit = Audit.load(place / AUDIT) if (place / AUDIT).exists() else None
    content = report_of(
        result,
        ledger=_find_ledger(place, result, ledger, run.get("ledger")),
        audit=audit,
        command=run.get("command"),
        names=names,
        versions=run.get("versions"),
        labels=(place / LABELS).exists(),
    )
    _replace(
        {
            place / REPORT: json.dumps(content, indent=1, allow_nan=False),
            place / PAGE: render(content),
        }
    )
    return place / PAGE


def _read_run(path: Path) -> dict[str, Any]:
    """How the run was made; empty where nobody noted it."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content["format"]
    except UNREADABLE as error:
        raise ParameterError(f"{path} does not say how a run was made: remove it") from error
    if found != RUN_FORMAT:
        raise ParameterError(f"{path} is of format {found!r}, this version reads {RUN_FORMAT!r}")
    texts = {"command": str, "version": str, "versions": dict, "ledger": str | None}
    for name, kind in texts.items():
        if name not in content or not isinstance(content[name], kind):
            raise ParameterError(f"{path}: {name} is missing, or is not what it should be")
    if not all(isinstance(item, str) for item in content["versions"].values()):
        raise ParameterError(f"{path}: versions is not what it should be")
    return dict(content)


def _find_ledger(
    folder: Path, result: FedClustResult, given: str | Path | None, noted: str | None
) -> Path | None:
    if given is not None:
        return Path(given)
    if result.guarantee.startswith(NO_CLAIM):
        return None  # one in the folder is of an earlier run
    places = [folder / LEDGER] + ([] if noted is None else [Path(noted)])
    return next((place for place in places if place.exists()), None)


def _replace(files: dict[Path, str]) -> None:
    """Write files as wholes: each is there as it was, or as it should be."""
    end = secrets.token_hex(4)
    written = {path: path.with_name(f".{path.name}.{end}") for path in files}
    try:
        for path, text in files.items():
            with written[path].open("x", encoding="utf-8") as file:
                file.write(text)
        for path, temporary in written.items():
            temporary.replace(path)
    except OSError as error:
        raise ParameterError(f"{next(iter(files))} cannot be written: {error.strerror}") from error
    finally:
        for temporary in written.values():
            temporary.unlink(missing_ok=True)
