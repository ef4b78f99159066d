"""``secure-fedclust audit``: attack the kind of run that a file describes."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fedclust.commands.printing import known, make_folder, print_rows
from secure_fedclust.errors import AuditFailed, SecureFedClustError

if TYPE_CHECKING:
    from secure_fedclust.audit.findings import Audit
    from secure_fedclust.config import PlanConfig
    from secure_fedclust.result import FedClustResult


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
    result = None if arguments.out is None else folder.read_result(arguments.out)
    n_clients, n_features = _sizes(arguments, config, result)
    if result is not None:
        # Before hours are spent on what does not belong there.
        folder.check_fits(config.estimator._subject(n_clients, n_features).unplayed(), result)
    with tqdm(
        total=arguments.trials, disable=arguments.quiet or None, unit="trial", leave=False
    ) as bar:
        audit = config.estimator.audit(
            trials=arguments.trials,
            jobs=(os.cpu_count() or 1) if arguments.jobs is None else arguments.jobs,
            n_clients=n_clients,
            n_features=n_features,
            on_progress=lambda done, _: bar.update(done - bar.n),
        )
    if arguments.json:
        print(json.dumps(audit.to_dict(), indent=1))
    else:
        print_rows(audit.rows(), arguments)
    said = [f"audit: {audit.verdict}"]
    problem = None
    if arguments.out is not None:
        make_folder(arguments.out)
        audit.save(arguments.out / folder.AUDIT)
        try:
            said.append(_report(arguments, result))
        except SecureFedClustError as error:
            folder.remove_report(arguments.out)
            problem = error
    if not arguments.json and not arguments.quiet:
        print("\n".join(said))
    if audit.verdict == "FAIL":
        raise AuditFailed(_refuted(audit) + ("" if problem is None else f"; no report: {problem}"))
    if problem is not None:
        raise problem


def _sizes(
    arguments: argparse.Namespace, config: "PlanConfig", result: "FedClustResult | None"
) -> tuple[int, int]:
    """Numbers of clients and features: as told, or as in the file, or as in the run."""
    from secure_fedclust.audit.report.facts import participants

    n_clients, n_features = config.n_clients, config.n_features
    if result is not None:
        n_clients, n_features = len(participants(result)), result.centers.shape[1]
    return (
        known("clients", arguments.clients, n_clients),
        known("features", arguments.features, n_features),
    )


def _report(arguments: argparse.Namespace, result: "FedClustResult | None") -> str:
    from secure_fedclust.audit.report import folder

    if result is not None:
        return f"report: {folder.write_report(arguments.out)}"
    return (
        f"written: {arguments.out / folder.AUDIT}; the report needs the run as well: "
        f"secure-fedclust run {arguments.config} --out {arguments.out}"
    )


def _refuted(audit: "Audit") -> str:
    failed = [f.name for f in audit.findings if f.verdict == "FAIL" and f.kind != "exhibit"]
    return f"the claim is refuted by: {', '.join(failed)}"
