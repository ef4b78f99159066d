"""Data from files: the benchmark sets, and users' own records, one array per client."""

import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import DataError, ParameterError
from secure_fedclust.records import (
    Clients,
    by_name,
    check_clients,
    clients_from_frame,
    clients_from_frames,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Benchmark",
    "benchmark_names",
    "clients_from_frame",
    "load_benchmark",
    "read_client",
    "read_clients",
]

DATA_VARIABLE = "SECURE_FEDCLUST_DATA"
"""The environment variable that says where the benchmark sets are."""

_SUFFIXES = (".csv", ".npz")


@dataclass(frozen=True, eq=False)
class Benchmark:
    """A labelled data set.

    Attributes
    ----------
    name : str
    X : array of shape (n, d)
    y : array of shape (n,)
    centers : array of shape (k, d) or None
        The published true centres, where there are any.
    extras : mapping of str to array
        What else the file holds.
    """

    name: str
    X: Floats
    y: Ints
    centers: Floats | None
    extras: Mapping[str, NDArray[Any]]


def load_benchmark(name: str, data_dir: str | os.PathLike[str] | None = None) -> Benchmark:
    """Load one of the benchmark sets, neither scaled nor shuffled.

    Parameters
    ----------
    name : str
        A file name without its ending; `benchmark_names` lists them.
    data_dir : path, optional
        The folder with the sets. If not given, the environment variable ``SECURE_FEDCLUST_DATA``
        says where it is, and without that it is ``../shared/data``.

    Raises
    ------
    DataError
        If there is no such folder or set.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> np.savez(f"{folder.name}/tiny.npz", X=np.eye(3), y=np.arange(3))
    >>> load_benchmark("tiny", folder.name).X.shape
    (3, 3)
    >>> folder.cleanup()
    """
    names = benchmark_names(data_dir)
    folder = _benchmark_folder(data_dir)
    if name not in names:
        raise DataError(f"no data set {name!r} in {folder}; there are {', '.join(names)}")
    arrays = _load_npz(folder / f"{name}.npz")
    if missing := {"X", "y"} - set(arrays):
        raise DataError(f"{folder / name}.npz has no array {', '.join(sorted(missing))}")
    X, y = arrays.pop("X"), arrays.pop("y")
    centers = arrays.pop("centers", None)
    return Benchmark(
        name,
        np.ascontiguousarray(X, dtype=np.float64),
        y.astype(np.int64),
        None if centers is None else np.ascontiguousarray(centers, dtype=np.float64),
        MappingProxyType(arrays),
    )


def benchmark_names(data_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Names of the benchmark sets in the folder that `load_benchmark` would look in."""
    folder = _benchmark_folder(data_dir)
    names = sorted(path.stem for path in folder.glob("*.npz"))
    if not names:
        raise DataError(
            f"no data sets (*.npz) in {folder}: pass data_dir (--data-dir) or set {DATA_VARIABLE} "
            "to the folder that has them"
        )
    return names


def read_clients(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    client_column: str | None = None,
    columns: Sequence[str] | None = None,
    person_column: str | None = None,
) -> Clients:
    r"""Read users' records from files, one array per client.

    Parameters
    ----------
    source : path or sequence of paths
        One of: a CSV file with all clients, told apart by `client_column`; an npz file in which
        each array is a client; a folder, or a list of files, with one client a file, named by the
        file's stem. A list holds CSV files or npz files, not both.
    client_column : str, optional
        The column that says whose record it is; for a single CSV file.
    columns : sequence of str, optional
        The features to use, in this order; for CSV files. All columns if not given.
    person_column : str, optional
        The column that says which person a record is about; for CSV files.

    Returns
    -------
    Clients
        A dict of arrays whose columns have the same order everywhere (CSV columns are matched by
        name), with their ``feature_names``.

    Raises
    ------
    DataError
        If a file cannot be read, a column is absent or not numeric, values are missing or
        infinite, a client has no records, or two clients have one name.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> folder = tempfile.TemporaryDirectory()
    >>> _ = Path(folder.name, "oslo.csv").write_text("age,bmi\n30,20\n50,25\n")
    >>> _ = Path(folder.name, "bergen.csv").write_text("bmi,age\n22,40\n")
    >>> clients = read_clients(folder.name, columns=["age", "bmi"])
    >>> clients["bergen"], clients.feature_names
    (array([[40., 22.]]), ('age', 'bmi'))
    >>> folder.cleanup()
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.is_dir():
            files = sorted(p for p in path.iterdir() if p.suffix.lower() in _SUFFIXES)
            if not files:
                raise DataError(f"no .csv or .npz files in {path}: put one file per client there")
            return _one_client_a_file(files, client_column, columns, person_column)
        if _suffix(path) == ".csv":
            if client_column is None:
                raise ParameterError(
                    f"{path} holds several clients: pass client_column, the name of the column "
                    "that says whose record it is, or [path] if it is a single client"
                )
            frame = _read_csv(path, client_column)
            return clients_from_frame(frame, client_column, columns, person_column)
        _refuse_column_names(path, client_column or person_column, columns)
        return check_clients(_load_npz(path))
    return _one_client_a_file([Path(p) for p in source], client_column, columns, person_column)


def read_client(
    path: str | os.PathLike[str],
    name: str,
    columns: Sequence[str] | None = None,
    person_column: str | None = None,
    *,
    allow_none: bool = False,
) -> Clients:
    r"""Read one client's records from a file with named columns.

    Parameters
    ----------
    path : path
        A CSV file, or an npz file with one array a column, or with an array ``X`` and its column
        names in ``columns``.
    name : str
        The client's.
    columns : sequence of str, optional
        The features to use, in this order; all if not given.
    person_column : str, optional
        The column that says which person a record is about.
    allow_none : bool
        Whether a file without any record will do.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> np.savez(f"{folder.name}/oslo.npz", age=[30, 50], bmi=[20, 25])
    >>> read_client(f"{folder.name}/oslo.npz", "Oslo", ["bmi", "age"])["Oslo"]
    array([[20., 30.],
           [25., 50.]])
    >>> folder.cleanup()
    """
    place = Path(path)
    csv = _suffix(place) == ".csv"
    frame = _read_csv(place, allow_none=allow_none) if csv else _frame_of(place)
    return clients_from_frames({name: frame}, columns, person_column, allow_none=allow_none)


def _frame_of(path: Path) -> "pd.DataFrame":
    import pandas as pd

    arrays = _load_npz(path)
    if set(arrays) == {"X", "columns"} and arrays["X"].ndim == 2:
        names = [str(each) for each in np.ravel(arrays["columns"])]
        if len(names) == arrays["X"].shape[1] and len(set(names)) == len(names):
            return pd.DataFrame(arrays["X"], columns=names)
    elif arrays and len({array.shape for array in arrays.values()}) == 1:
        if next(iter(arrays.values())).ndim == 1:
            return pd.DataFrame(arrays)
    raise DataError(
        f"{path} has no named columns: save one array of numbers a column, all of one length, or X "
        "and columns, the names of its columns"
    )


def _one_client_a_file(
    files: Iterable[Path],
    client_column: str | None,
    columns: Sequence[str] | None,
    person_column: str | None,
) -> Clients:
    paths: dict[str, Path] = by_name((path.stem, path) for path in files)
    suffixes = {_suffix(path) for path in paths.values()}
    if len(suffixes) > 1:
        raise DataError(
            "the files are both .csv and .npz: npz arrays have no column names to match, use one "
            "kind"
        )
    if client_column is not None:
        raise ParameterError(
            f"client_column={client_column!r} is for a single CSV file with all clients; here "
            "each file is a client: leave it out"
        )
    if suffixes == {".csv"}:
        frames = {name: _read_csv(p) for name, p in paths.items()}
        return clients_from_frames(frames, columns, person_column)
    _refuse_column_names(next(iter(paths.values())), person_column, columns)
    return check_clients({name: _only_array(path) for name, path in paths.items()})


def _only_array(path: Path) -> NDArray[Any]:
    arrays = _load_npz(path)
    if len(arrays) != 1 and "X" not in arrays:
        raise DataError(
            f"{path} holds {len(arrays)} arrays: one client a file needs one array, or one called X"
        )
    return arrays["X"] if "X" in arrays else next(iter(arrays.values()))


def _read_csv(
    path: Path, client_column: str | None = None, *, allow_none: bool = False
) -> "pd.DataFrame":
    import pandas as pd

    _must_exist(path)
    # Read as text, a client called 007 keeps its name.
    dtype = None if client_column is None else {client_column: str}
    # What pandas says of a file that it cannot read may quote it.
    try:
        frame = pd.read_csv(path, dtype=dtype, low_memory=False)
    except (ValueError, pd.errors.ParserError, OSError):
        frame = None
    if frame is None:
        raise DataError(
            f"{path} cannot be read as CSV: it needs a header line, the same number of fields in "
            "each line, and UTF-8"
        )
    if any(str(name).startswith("Unnamed: ") for name in frame.columns):
        raise DataError(
            f"{path} has a column without a name, as tables saved with their index have: name it, "
            "or save without the index"
        )
    if frame.empty:
        if not allow_none:
            raise DataError(f"{path} has a header line and no records")
        frame = frame.astype(float)
    if not isinstance(frame.index, pd.RangeIndex):
        raise DataError(f"{path} has more fields in its records than in its header: name them all")
    return frame


def _load_npz(path: Path) -> dict[str, NDArray[Any]]:
    _must_exist(path)
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.lib.npyio.NpzFile):
                return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile):
        pass
    raise DataError(f"{path} cannot be read: save plain numeric arrays with numpy.savez")


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise DataError(f"{path} is neither a folder nor a .csv or .npz file")
    return suffix


def _must_exist(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"there is no file {path} (looked from {Path.cwd()})")


def _refuse_column_names(
    path: Path, client_column: str | None, columns: Sequence[str] | None
) -> None:
    if client_column is not None or columns is not None:
        raise ParameterError(
            f"{path} has no column names: leave out client_column, person_column and columns, or "
            "use CSV files"
        )


def _benchmark_folder(data_dir: str | os.PathLike[str] | None) -> Path:
    return Path(data_dir or os.environ.get(DATA_VARIABLE) or Path("..", "shared", "data")).resolve()
