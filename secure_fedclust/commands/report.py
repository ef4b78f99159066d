"""``secure-fedclust report``: say what there is to know about the privacy of a run."""

import argparse
import json
from pathlib import Path
from typing import Any

from secure_fedclust.errors import LedgerError


def add(commands: Any) -> None:
    """Add the command."""
    report = commands.add_parser(
        "report", help="make report.html and report.json of what is in a run's folder"
    )
    report.add_argument("folder", type=Path, metavar="RUN_DIR")
    report.add_argument(
        "--ledger", type=Path, metavar="FILE", help="the ledger of the run, if not in the folder"
    )
    report.add_argument(
        "--names", action="store_true", help="call clients by their names, not by numbers"
    )
    report.add_argument("--json", action="store_true", help="print verdict and claim as JSON")
    report.set_defaults(command=_report)


def _report(arguments: argparse.Namespace) -> None:
    from secure_fedclust.audit.report.folder import PAGE, REPORT, write_report

    try:
        page = write_report(arguments.folder, ledger=arguments.ledger, names=arguments.names)
    except LedgerError as error:
        if (arguments.folder / PAGE).exists():
            raise LedgerError(f"{error}; {PAGE} there is older, and no longer holds") from error
        raise
    content = json.loads((page.parent / REPORT).read_text(encoding="utf-8"))
    if arguments.json:
        said = {name: content[name] for name in ("verdict", "claim", "reasons", "audited")}
        print(json.dumps(said | {"report": str(page)}, indent=1))
        return
    print(content["claim"])
    print(f"audit: {content['audited']}")
    print(f"report: {page}")
