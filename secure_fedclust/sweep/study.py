"""A sweep from beginning to end: check, run what is missing, make tables and pictures."""

import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fedclust.errors import PrivacyWarning
from secure_fedclust.parameters import check_counts
from secure_fedclust.sweep.cells import cells_of
from secure_fedclust.sweep.checks import check_sweep
from secure_fedclust.sweep.config import SweepConfig
from secure_fedclust.sweep.data import LabelledData
from secure_fedclust.sweep.folder import SweepFolder, write_text
from secure_fedclust.sweep.table import COLUMNS, SUMMARY_COLUMNS, Row, summarise, tidy, to_csv
from secure_fedclust.sweep.trends import falling
from secure_fedclust.sweep.workers import run_here, run_side_by_side

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class SweepResult:
    """What a finished sweep has.

    Attributes
    ----------
    folder : Path
        With ``table.csv``, ``summary.csv`` and the pictures.
    rows : list of dict
        One a run, as in ``table.csv``.
    summary : list of dict
        Means over seeds with their intervals, one row for each setting and figure.
    warnings : tuple of str
        Where more epsilon gave less, and runs that failed.
    n_run : int
        Runs that were made now; the others were there.
    pictures : tuple of Path
    """

    folder: Path
    rows: list[Row] = field(repr=False)
    summary: list[Row] = field(repr=False)
    warnings: tuple[str, ...]
    n_run: int
    pictures: tuple[Path, ...] = field(repr=False)

    @property
    def n_failed(self) -> int:
        """Runs that ended with an error."""
        return sum(row["error"] is not None for row in self.rows)

    @property
    def table(self) -> "pd.DataFrame":
        """The rows, as a DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=list(COLUMNS))


def sweep(
    config: SweepConfig,
    out: str | Path,
    *,
    jobs: int = 1,
    data_dir: str | Path | None = None,
    on_progress: Progress | None = None,
) -> SweepResult:
    """Run what is missing of a sweep, and make its tables and pictures.

    Everything is checked before the first run. Finished runs are kept in the folder at once: after
    a crash, or to add runs to the grid, call it again.

    Parameters
    ----------
    config : SweepConfig
    out : path
        A folder; that of the same sweep, or of a part of it, to go on with.
    jobs : int, default=1
        Processes side by side. 1 runs in this process. With more they are spawned, and a script
        that calls this needs ``if __name__ == "__main__":``.
    data_dir : path, optional
        Where benchmark sets are, as for `load_benchmark`.
    on_progress : function, optional
        Called with the number of finished runs and of all, first with those that were there.

    Raises
    ------
    ParameterError
        If a run of the sweep cannot be made, the folder holds another sweep or one of other
        versions of libraries, or its finished runs are not what they should be.
    """
    # Workers import this file, and need no pictures.
    from secure_fedclust.sweep.plots import draw_all

    check_counts(jobs=jobs)
    data = LabelledData(config, data_dir)
    cells = cells_of(config)
    folder = SweepFolder(Path(out))
    digest = data.digest()
    folder.require_same(config, digest)
    there = folder.finished()
    check_sweep([cell for cell in cells if cell not in there], config, data)
    with folder.opened() as file:
        folder.remember(config, digest)
        finished = folder.finished()
        missing = [cell for cell in cells if cell not in finished]
        progress = on_progress or _ignore
        progress(len(cells) - len(missing), len(cells))
        if jobs == 1:
            runs = run_here(missing, config, data)
        else:
            runs = run_side_by_side(missing, config, data_dir, digest, jobs)
        with closing(runs):
            for i, (cell, outcome) in enumerate(runs, start=1):
                folder.append(file, cell, outcome)
                finished[cell] = outcome
                progress(len(cells) - len(missing) + i, len(cells))
        rows = tidy(finished, cells, config, data.n_clusters)
        summary = summarise(rows)
        write_text(folder.path / "table.csv", to_csv(rows, COLUMNS))
        write_text(folder.path / "summary.csv", to_csv(summary, SUMMARY_COLUMNS))
        pictures = draw_all(folder.path, summary, config, data)
    said = (*_failures(rows), *falling(rows))
    for line in said:
        warnings.warn(line, PrivacyWarning, stacklevel=2)
    return SweepResult(folder.path, rows, summary, said, len(missing), pictures)


def _failures(rows: list[Row]) -> list[str]:
    failed = [row for row in rows if row["error"] is not None]
    if not failed:
        return []
    return [
        f"{len(failed)} of {len(rows)} runs failed, and are in table.csv with their errors, the "
        f"first with {failed[0]['error']}"
    ]


def _ignore(*_: Any) -> None:
    pass
