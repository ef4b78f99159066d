"""``secure-fedclust demo``, ``run`` and ``plan``."""

import argparse
import csv
import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fedclust.commands.printing import (
    ProgressBar,
    known,
    make_folder,
    print_rows,
    print_table,
)
from secure_fedclust.errors import ParameterError

if TYPE_CHECKING:
    from secure_fedclust.arrays import Ints
    from secure_fedclust.base import FederatedClusterer

WIDEST = 20
"""Columns of centres that are printed; more are in result.json."""


def add(commands: Any, output: argparse.ArgumentParser) -> None:
    """Add the commands."""
    demo = commands.add_parser(
        "demo",
        parents=[output],
        help="run every system on generated data, with and without privacy, and draw it",
    )
    demo.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for results")
    demo.set_defaults(command=_demo)

    run = commands.add_parser("run", parents=[output], help="run what a TOML file describes")
    run.add_argument("config", type=Path, metavar="CONFIG.toml")
    run.add_argument("--out", type=Path, metavar="DIR", help="folder for results")
    run.add_argument("--data-dir", type=Path, metavar="DIR", help="folder with benchmark sets")
    run.add_argument(
        "--labels",
        action="store_true",
        help="also write every record's label, which is not private, to DIR/labels",
    )
    run.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="folder that keeps a run of FedCRef or DeepFeCA while it goes on, clients' labels "
        "included: the same command goes on where a killed run was",
    )
    run.set_defaults(command=_run)

    plan = commands.add_parser(
        "plan",
        parents=[output],
        help="say what a private run would release, and whether it can work, without any data",
    )
    plan.add_argument("config", type=Path, metavar="CONFIG.toml")
    plan.add_argument("--clients", type=int, metavar="N", help="number of clients")
    plan.add_argument("--features", type=int, metavar="N", help="number of features")
    plan.add_argument("--records", type=int, metavar="N", help="about how many a client holds")
    plan.set_defaults(command=_plan)


def _demo(arguments: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from secure_fedclust.audit.report.folder import LEDGER
    from secure_fedclust.demo import report_demo, run_demo

    reported = arguments.out / "report"
    make_folder(reported)
    (reported / LEDGER).unlink(missing_ok=True)  # of an earlier demo, whose budget is spent
    with ProgressBar(arguments.quiet) as bar:
        rows = run_demo(arguments.out, bar.show)
        page = report_demo(reported, bar.show)
    print_rows(rows, arguments)
    if not arguments.quiet and not arguments.json:
        print("epsilon protects each record, at delta 1e-05; none: NO DP CLAIM.")
        print("One run each: scores jump about. docs/results.md has averages.")
        print(f"Picture: {arguments.out / 'demo.png'}   results: {arguments.out}/*.json")
        print(f"Report of one more run, with masked sums, and its audit: {page}")


def _run(arguments: argparse.Namespace) -> None:
    import numpy as np

    from secure_fedclust.config import RunConfig
    from secure_fedclust.metrics import adjusted_rand, purity

    if arguments.labels and arguments.out is None:
        raise ParameterError("--labels writes to a folder: give --out DIR too")
    if arguments.out is not None:
        make_folder(arguments.out)
    config = RunConfig.read(arguments.config, arguments.data_dir)
    model = config.estimator
    if arguments.out is not None:
        _give_ledger(model, arguments.out / "ledger.sqlite")
    name = type(model).__name__
    with ProgressBar(arguments.quiet) as bar:
        model.fit(
            config.clients,
            on_progress=lambda done, total: bar.show(name, done, total),
            checkpoint=arguments.checkpoint,
        )
    result = model.result_
    row = {
        "system": name,
        "clients": len(config.clients),
        "clusters": result.n_clusters,
        "exchanges": len(result.history),
        "KB up": sum(exchange.bytes_up for exchange in result.history) / 1000,
        "KB down": sum(exchange.bytes_down for exchange in result.history) / 1000,
        "seconds": result.seconds,
    }
    if arguments.json:
        row |= {"guarantee": result.guarantee, "fallback": result.fallback}
        row |= {"mu": dict(result.costs), "centers": result.centers.tolist()}
    if config.truth is not None:
        truth, found = (np.concatenate(list(d)) for d in (config.truth.values(), model.labels_))
        row |= {"ARI": adjusted_rand(truth, found), "purity": purity(truth, found)}
    if arguments.out is not None:
        result.save(arguments.out / "result.json")
        if arguments.labels:
            _write_labels(arguments.out / "labels", result.nonprivate.labels)
        _note_run(arguments, model)
    print_rows([row], arguments)
    if not arguments.quiet and not arguments.json:
        names = list(result.feature_names or map(str, range(result.centers.shape[1])))
        if len(names) <= WIDEST:
            print("centres")
            print_table(names, result.centers.tolist())
        print(result.guarantee)
        if result.fallback is not None:
            print(result.fallback)
            local, sums = result.costs["local"], result.costs["sums"]
            print(
                f"cost (mu, of which squares add up): {local:.3g} in answers of single clients, "
                f"{sums:.3g} in sums, {math.hypot(local, sums):.3g} in all"
            )
    if arguments.out is not None:
        from secure_fedclust.audit.report.folder import write_report

        page = write_report(arguments.out)
        if not arguments.quiet and not arguments.json:
            print(f"report: {page}")


def _note_run(arguments: argparse.Namespace, model: "FederatedClusterer") -> None:
    """Keep with the result how it was made."""
    from secure_fedclust.audit.report.folder import LEDGER, write_run

    command = ["secure-fedclust", "run", str(arguments.config), "--out", str(arguments.out)]
    if arguments.data_dir is not None:
        command += ["--data-dir", str(arguments.data_dir)]
    if arguments.labels:
        command.append("--labels")
    if arguments.checkpoint is not None:
        command += ["--checkpoint", str(arguments.checkpoint)]
    ledger = None if model.ledger is None else Path(model.ledger).absolute()
    if ledger == (arguments.out / LEDGER).absolute():
        ledger = None
    write_run(
        arguments.out,
        command=shlex.join(command),
        ledger=None if ledger is None else str(ledger),
    )


def _give_ledger(model: "FederatedClusterer", path: Path) -> None:
    """Charge a private run without a ledger of its own to one in the run's folder.

    The folder's budget is the run's: a second run into it is refused.
    """
    from secure_fedclust.privacy.ledger import Ledger

    spec = model.privacy
    if spec is None or not spec.is_private or model.ledger is not None:
        return
    if model.sampler != "secure" or model._unproved() is not None:
        return  # without a guarantee there is nothing to charge
    if not path.exists():
        epsilon, delta = spec.target()
        Ledger.create(
            path, epsilon=epsilon, delta=delta, unit=spec.unit, adjacency=spec.adjacency
        ).close()
    model.set_params(ledger=str(path))


def _plan(arguments: argparse.Namespace) -> None:
    from secure_fedclust.config import PlanConfig

    config = PlanConfig.read(arguments.config)
    spec = config.estimator.privacy
    if spec is None or not spec.is_private:
        raise ParameterError(f"{arguments.config} describes a run without differential privacy")
    plan = spec.plan(
        config.estimator,
        n_clients=known("clients", arguments.clients, config.n_clients),
        n_features=known("features", arguments.features, config.n_features),
        n_records=arguments.records,
    )
    if arguments.json:
        print(json.dumps(plan.to_dict(), indent=1))
        return
    print(plan.guarantee)
    print_rows(plan.rows(), arguments)
    for line in plan.notes():
        print(line)


def _write_labels(folder: Path, labels: "Mapping[str, Ints]") -> None:
    """One file a client, and a table of which is whose: names need not be file names."""
    make_folder(folder)
    with (folder / "clients.csv").open("w", encoding="utf-8", newline="") as table:
        writer = csv.writer(table)
        writer.writerow(["file", "client"])
        for i, (client, found) in enumerate(labels.items()):
            name = f"labels{i}.csv"
            writer.writerow([name, client])
            lines = "\n".join(map(str, found.tolist()))
            (folder / name).write_text(f"label\n{lines}\n", encoding="utf-8")
