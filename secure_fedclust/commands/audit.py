"""``secure-fedclust audit``: attack the kind of run that a file describes."""

import argparse
import os
from pathlib import Path
from typing import Any

from secure_fedclust.commands.printing import known, make_folder, print_rows
from secure_fedclust.errors import AuditFailed


def add(commands: Any, output: argparse.ArgumentParser) -> None:
    """Add the command."""
    audit = commands.add_parser(
        "audit",
        parents=[output],
        help="attack the kind of run that a TOML file describes, on made-up data",
    )
    audit.add_argument("config", type=Path, metavar="CONFIG.toml")
    audit.add_argument(
        "--trials", type=int, default=5000, metavar="N", help="runs of a client (default 5000)"
    )
    audit.add_argument("--clients", type=int, metavar="N", help="number of clients")
    audit.add_argument("--features", type=int, metavar="N", help="number of features")
    audit.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write audit.json there; if it is the folder of a run, its report as well",
    )
    audit.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a core)")
    audit.set_defaults(command=_audit)


def _audit(arguments: argparse.Namespace) -> None:
    from tqdm import tqdm

    from secure_fedclust.audit.report import folder
    from secure_fedclust.config import PlanConfig

    config = PlanConfig.read(arguments.config)
    n_clients = known("clients", arguments.clients, config.n_clients)
    n_features = known("features", arguments.features, config.n_features)
    with tqdm(
        total=arguments.trials, disable=arguments.quiet or None, unit="trial", leave=False
    ) as bar:
        audit = config.estimator.audit(
            trials=arguments.trials,
            jobs=arguments.jobs or os.cpu_count() or 1,
            n_clients=n_clients,
            n_features=n_features,
            on_progress=lambda done, _: bar.update(done - bar.n),
        )
    rows = [
        {
            "finding": finding.name,
            "kind": finding.kind,
            "measure": finding.measure,
            "figure": finding.figure,
            "allowed": "" if finding.ceiling is None else finding.ceiling,
            "verdict": finding.verdict,
        }
        for finding in audit.findings
    ]
    print_rows(rows, arguments)
    said = [f"audit: {audit.verdict}"]
    if arguments.out is not None:
        make_folder(arguments.out)
        audit.save(arguments.out / folder.AUDIT)
        if (arguments.out / folder.RESULT).exists():
            said.append(f"report: {folder.write_report(arguments.out)}")
        else:
            said.append(
                f"written: {arguments.out / folder.AUDIT}; the report needs the run as well: "
                f"secure-fedclust run {arguments.config} --out {arguments.out}"
            )
    if not arguments.json and not arguments.quiet:
        print("\n".join(said))
    if audit.verdict == "FAIL":
        failed = [f.name for f in audit.findings if f.verdict == "FAIL" and f.kind != "exhibit"]
        raise AuditFailed(f"the claim is refuted by: {', '.join(failed)}")
