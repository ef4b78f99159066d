"""The command line.

Exit codes: 0 done, 2 a parameter or the configuration is not usable, 3 the data are not, 4 the
clients did not answer as they should.
"""

import argparse
import csv
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fedclust import __version__
from secure_fedclust.errors import (
    DataError,
    FederationWarning,
    ParameterError,
    ProtocolError,
    SecureFedClustError,
)

if TYPE_CHECKING:
    from secure_fedclust.arrays import Ints

EXIT_CODES: dict[type[SecureFedClustError], int] = {
    ParameterError: 2,
    DataError: 3,
    ProtocolError: 4,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    code = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FederationWarning)
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
        "demo", parents=[output], help="run every system on generated data and draw what they find"
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
    return parser


def _demo(arguments: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from secure_fedclust.demo import run_demo

    _make_folder(arguments.out)
    with _ProgressBar(arguments.quiet) as bar:
        rows = run_demo(arguments.out, bar.show)
    _print_rows(rows, arguments)
    if not arguments.quiet and not arguments.json:
        print("NO DP CLAIM: the demo protects nothing.")
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
        row |= {"guarantee": result.guarantee, "centers": result.centers.tolist()}
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
