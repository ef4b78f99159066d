"""The command line.

Exit codes: 0 done, 2 a parameter or the configuration is not usable, 3 the data are not, 4 the
clients did not answer as they should, 5 the privacy budget does not allow it, 6 the privacy ledger
cannot be used or does not hold.
"""

import argparse
import csv
import json
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fedclust import __version__
from secure_fedclust.errors import (
    BudgetExceeded,
    DataError,
    FederationWarning,
    LedgerError,
    ParameterError,
    PrivacyWarning,
    ProtocolError,
    SecureFedClustError,
)

if TYPE_CHECKING:
    from secure_fedclust.arrays import Ints
    from secure_fedclust.base import FederatedClusterer
    from secure_fedclust.privacy.ledger import Anchor, Ledger

EXIT_CODES: dict[type[SecureFedClustError], int] = {
    ParameterError: 2,
    DataError: 3,
    ProtocolError: 4,
    BudgetExceeded: 5,
    LedgerError: 6,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    code = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FederationWarning)
        warnings.simplefilter("always", PrivacyWarning)
        try:
            arguments.command(arguments)
        except SecureFedClustError as error:
            print(f"secure-fedclust: {error}", file=sys.stderr)
            code = next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
    for warning in caught:
        print(f"secure-fedclust: warning: {warning.message}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="secure-fedclust", description="Cluster data that may not be pooled."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--quiet", action="store_true", help="no progress bar and no table")
    output.add_argument("--json", action="store_true", help="print the table as JSON")

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
    _add_ledger(commands)
    return parser


def _add_ledger(commands: Any) -> None:
    ledger = commands.add_parser("ledger", help="make, show or verify a privacy ledger")
    actions = ledger.add_subparsers(required=True, metavar="ACTION")

    init = actions.add_parser("init", help="make a ledger, and fix the lifetime budget in it")
    init.add_argument("file", type=Path, metavar="FILE")
    init.add_argument("--epsilon", type=float, required=True, help="lifetime budget of a client")
    init.add_argument("--delta", type=float, required=True)
    init.add_argument("--unit", choices=["record", "client"], default="record")
    init.add_argument("--adjacency", choices=["add_remove", "replace_one"], default="add_remove")
    init.add_argument("--dataset", default="", metavar="NAME", help="a name for the data")
    init.set_defaults(command=_ledger_init)

    show = actions.add_parser("show", help="print what was spent and what is left")
    show.add_argument("file", type=Path, metavar="FILE")
    show.add_argument("--rows", action="store_true", help="print each release too")
    show.add_argument("--json", action="store_true", help="print it as JSON")
    show.set_defaults(command=_ledger_show)

    verify = actions.add_parser("verify", help="check every row, and against what others saw")
    verify.add_argument("file", type=Path, metavar="FILE")
    verify.add_argument(
        "--anchor",
        action="append",
        default=[],
        metavar="ROWS:HEAD",
        help="number of rows and hash of the last, as in a report; may be repeated",
    )
    verify.add_argument(
        "--against",
        action="append",
        default=[],
        type=Path,
        metavar="RESULT.json",
        help="the anchors in a result; may be repeated",
    )
    verify.add_argument(
        "--client",
        action="append",
        metavar="NAME",
        help="of those, only this client's, where each client has its own ledger; may be repeated",
    )
    verify.set_defaults(command=_ledger_verify)


def _demo(arguments: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from secure_fedclust.demo import run_demo

    _make_folder(arguments.out)
    with _ProgressBar(arguments.quiet) as bar:
        rows = run_demo(arguments.out, bar.show)
    _print_rows(rows, arguments)
    if not arguments.quiet and not arguments.json:
        print("epsilon protects each record, at delta 1e-05; none: NO DP CLAIM.")
        print("One run each: scores jump about. docs/results.md has averages.")
        print(f"Picture: {arguments.out / 'demo.png'}   results: {arguments.out}/*.json")


def _run(arguments: argparse.Namespace) -> None:
    import numpy as np

    from secure_fedclust.config import RunConfig
    from secure_fedclust.metrics import adjusted_rand, purity

    if arguments.labels and arguments.out is None:
        raise ParameterError("--labels writes to a folder: give --out DIR too")
    if arguments.out is not None:
        _make_folder(arguments.out)
    config = RunConfig.read(arguments.config, arguments.data_dir)
    model = config.estimator
    if arguments.out is not None:
        _give_ledger(model, arguments.out / "ledger.sqlite")
    name = type(model).__name__
    with _ProgressBar(arguments.quiet) as bar:
        model.fit(config.clients, on_progress=lambda done, total: bar.show(name, done, total))
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
    _print_rows([row], arguments)
    if not arguments.quiet and not arguments.json:
        names = list(result.feature_names or map(str, range(result.centers.shape[1])))
        print("centres")
        _print_table(names, result.centers.tolist())
        print(result.guarantee)
        if result.fallback is not None:
            print(result.fallback)
            local, sums = result.costs["local"], result.costs["sums"]
            print(
                f"cost (mu, of which squares add up): {local:.3g} in answers of single clients, "
                f"{sums:.3g} in sums, {math.hypot(local, sums):.3g} in all"
            )


def _ledger_init(arguments: argparse.Namespace) -> None:
    from secure_fedclust.privacy.ledger import Ledger

    with Ledger.create(
        arguments.file,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        unit=arguments.unit,
        adjacency=arguments.adjacency,
        dataset=arguments.dataset,
    ) as ledger:
        print(_budget(ledger))
        print(_standing(ledger.anchor()))


def _ledger_show(arguments: argparse.Namespace) -> None:
    from secure_fedclust.privacy.ledger import Ledger
    from secure_fedclust.privacy.spec import adversary

    with Ledger.open(arguments.file, read_only=True) as ledger:
        rows, anchor = ledger.rows(), ledger.anchor()
        clients = [_spending(ledger, client) for client in ledger.clients()]
        releases = [
            {"row": row.number, **vars(row.charge), "cumulative mu": row.cumulative_mu}
            | {"previous": row.previous, "hash": row.hash}
            for row in rows
        ]
        if arguments.json:
            content: dict[str, Any] = {
                "epsilon": ledger.limit.epsilon,
                "delta": ledger.limit.delta,
                "mu": ledger.limit.mu,
                "unit": ledger.unit,
                "adjacency": ledger.adjacency,
                "dataset": ledger.dataset,
                "rows": anchor.rows,
                "head": anchor.head,
                "sums": [quorum._asdict() for quorum in sorted(ledger.quorums())],
                "clients": clients,
            }
            print(
                json.dumps(content | ({"releases": releases} if arguments.rows else {}), indent=1)
            )
            return
        print(_budget(ledger))
        print(_standing(anchor))
        for quorum in sorted(ledger.quorums()):
            print(
                f"some releases are in sums over {quorum.min_survivors} clients or more, and hold "
                f"against {adversary(*quorum[1:])}"
            )
        if clients:
            _print_table(list(clients[0]), [list(client.values()) for client in clients])
        if arguments.rows and releases:
            hidden = ("inputs", "previous", "hash")
            names = [name for name in releases[0] if name not in hidden]
            _print_table(
                [*names, "hash"],
                [[*(row[name] for name in names), row["hash"][:12]] for row in releases],
            )


def _ledger_verify(arguments: argparse.Namespace) -> None:
    from secure_fedclust.privacy.ledger import Ledger

    anchors = [_parse_anchor(text) for text in arguments.anchor]
    for path in arguments.against:
        anchors += _anchors_of(path, arguments.client)
    with Ledger.open(arguments.file, read_only=True) as ledger:
        ledger.verify(anchors)
        number = len(anchors)
        print(f"every row holds, and {number} {'anchor' if number == 1 else 'anchors'}")
        print(_standing(ledger.anchor()))


def _budget(ledger: "Ledger") -> str:
    of = f", data set {ledger.dataset!r}" if ledger.dataset else ""
    return (
        f"budget of each client: epsilon {ledger.limit.epsilon:g}, delta {ledger.limit.delta:g}, "
        f"unit {ledger.unit}, adjacency {ledger.adjacency}{of}"
    )


def _standing(anchor: "Anchor") -> str:
    return f"anchor: {anchor.rows}:{anchor.head}"


def _spending(ledger: "Ledger", client: str) -> dict[str, Any]:
    """What a client spent; what is left is what one more run could have at the same delta."""
    from secure_fedclust.privacy.accounting import epsilon_of

    limit, totals = ledger.limit, ledger.totals(client)
    left = math.sqrt(max(0.0, limit.mu**2 - totals.squared_mu))
    return {
        "client": client,
        "rows": len(ledger.rows(client)),
        "epsilon spent": epsilon_of(limit.delta, totals.mu),
        "epsilon left": epsilon_of(limit.delta, left),
        "mu spent": totals.mu,
        "mu left": left,
        "slack spent": totals.slack,
        "slack left": max(0.0, limit.slack - totals.slack),
    }


def _parse_anchor(text: str) -> "Anchor":
    from secure_fedclust.privacy.ledger import Anchor

    rows, _, head = text.partition(":")
    if not rows.isdecimal():
        raise ParameterError(f"--anchor {text}: give ROWS:HEAD, e.g. 12 and 64 hexadecimal digits")
    return Anchor(int(rows), head)


def _anchors_of(path: Path, clients: Sequence[str] | None) -> "list[Anchor]":
    """The anchors that a result holds: of all clients, or of those named."""
    from secure_fedclust.privacy.ledger import Anchor

    try:
        anchors = json.loads(path.read_text(encoding="utf-8"))["anchors"]
        found = {client: Anchor(*anchor) for client, anchor in anchors.items()}
    except OSError as error:
        raise ParameterError(f"--against {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ParameterError(f"--against {path} is not a result with anchors") from error
    for client in clients or ():
        if client not in found:
            raise ParameterError(f"--client {client}: {path} has no anchor of that name")
    return [found[client] for client in clients or found]


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
        n_clients=_known("clients", arguments.clients, config.n_clients),
        n_features=_known("features", arguments.features, config.n_features),
        n_records=arguments.records,
    )
    if arguments.json:
        print(json.dumps(plan.to_dict(), indent=1))
        return
    print(plan.guarantee)
    _print_rows(plan.rows(), arguments)
    for line in plan.notes():
        print(line)


def _known(name: str, given: int | None, read: int | None) -> int:
    number = read if given is None else given
    if number is None:
        raise ParameterError(f"the file does not say how many {name} there are: give --{name} N")
    return number


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError(f"--out {path} cannot be made: {error.strerror}") from error


def _write_labels(folder: Path, labels: "Mapping[str, Ints]") -> None:
    """One file a client, and a table of which is whose: names need not be file names."""
    _make_folder(folder)
    with (folder / "clients.csv").open("w", encoding="utf-8", newline="") as table:
        writer = csv.writer(table)
        writer.writerow(["file", "client"])
        for i, (client, found) in enumerate(labels.items()):
            name = f"labels{i}.csv"
            writer.writerow([name, client])
            lines = "\n".join(map(str, found.tolist()))
            (folder / name).write_text(f"label\n{lines}\n", encoding="utf-8")


def _print_rows(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(rows, indent=1))
    elif not arguments.quiet:
        _print_table(list(rows[0]), [list(row.values()) for row in rows])


def _print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    cells = [list(header)] + [[_format(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class _ProgressBar:
    """One bar, reused by each system in turn; none where nobody watches."""

    def __init__(self, quiet: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(disable=quiet or None, unit="reply", leave=False)

    def __enter__(self) -> "_ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, name: str, done: int, total: int) -> None:
        if done == 1:
            self._bar.reset(total)
            self._bar.set_description(name)
        self._bar.update(1)
