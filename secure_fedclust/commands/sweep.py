"""``secure-fedclust sweep``."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fedclust.commands.printing import print_rows

if TYPE_CHECKING:
    from secure_fedclust.sweep import SweepResult

SHOWN = {"ari": "ARI", "n_clusters": "clusters", "bytes_up": "KB up", "seconds": "seconds"}


def add(commands: Any, output: argparse.ArgumentParser) -> None:
    """Add the command."""
    sweep = commands.add_parser(
        "sweep",
        parents=[output],
        help="run a grid of systems and budgets on labelled data, and draw it",
    )
    sweep.add_argument("config", type=Path, metavar="CONFIG.toml")
    sweep.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for results; one that is not finished is gone on with",
    )
    sweep.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes side by side (default: one a processor)",
    )
    sweep.add_argument("--data-dir", type=Path, metavar="DIR", help="folder with benchmark sets")
    sweep.set_defaults(command=_sweep)


def _sweep(arguments: argparse.Namespace) -> None:
    from tqdm import tqdm

    from secure_fedclust.sweep import SweepConfig, sweep
    from secure_fedclust.sweep.notes import without_claim
    from secure_fedclust.sweep.workers import WorkerDied

    config = SweepConfig.read(arguments.config)
    bar = tqdm(disable=True)

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar.total is None:
            if not arguments.quiet:
                print(f"secure-fedclust: {total} runs, {done} of them done", file=sys.stderr)
            # What was there already says nothing about how long the rest will take.
            quiet = arguments.quiet or None
            bar = tqdm(total=total, initial=done, disable=quiet, unit="run", leave=False)
            bar.total = total
        else:
            bar.update(1)

    try:
        result = sweep(
            config,
            arguments.out,
            jobs=arguments.jobs,
            data_dir=arguments.data_dir,
            on_progress=show,
        )
    except KeyboardInterrupt:
        bar.close()
        print(
            f"secure-fedclust: stopped. Finished runs are in {arguments.out}; the same command "
            "goes on with the others",
            file=sys.stderr,
        )
        raise SystemExit(130) from None
    except WorkerDied as error:
        bar.close()
        print(f"secure-fedclust: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    finally:
        bar.close()
    _report(result, list(without_claim(config)), arguments)


def _report(result: "SweepResult", notes: list[str], arguments: argparse.Namespace) -> None:
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in result.summary:
        setting = {
            key: line[key]
            for key in ("algorithm", "epsilon", "protection", "trust", "calibration", "rounds")
        } | {"clients": line["clients"], "partition": line["partition"]}
        row = rows.setdefault(tuple(setting.values()), setting)
        if line["figure"] in SHOWN:
            row |= {"n": line["n"], "failed": line["failed"]}
            row[SHOWN[line["figure"]]] = line["mean"]
            if line["figure"] == "ari":
                row |= {"ARI low": line["low"], "ARI high": line["high"]}
    for row in rows.values():
        if row.setdefault("KB up", None) is not None:
            row["KB up"] /= 1000
    columns = ["n", "failed", "ARI", "ARI low", "ARI high", "clusters", "KB up", "seconds"]
    shown = [
        {key: row.get(key) for key in [*row, *columns] if key not in columns}
        | {key: row.get(key) for key in columns}
        for row in rows.values()
    ]
    if arguments.json:
        print_rows(shown, arguments)
        return
    # What no run has is not worth a column.
    used = [key for key in shown[0] if any(row[key] is not None for row in shown)]
    print_rows([{key: _dash(row[key]) for key in used} for row in shown], arguments)
    if arguments.quiet:
        return
    for note in notes:
        print(note)
    print(
        f"{len(result.rows)} runs, of which {result.n_run} now; ARI low and high: 95% t-interval."
    )
    print(f"Tables and pictures: {result.folder}/table.csv, summary.csv, *.png, *.svg")


def _dash(value: Any) -> Any:
    return "-" if value is None else value
