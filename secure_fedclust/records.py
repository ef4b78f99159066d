"""Records as callers give them, turned into one float64 array a client, or a clear error.

Messages name the client, the column and how many records are concerned, never a value: they
may end up in a log that others read. Nothing here imports pandas or scikit-learn.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import DataError, ParameterError

if TYPE_CHECKING:
    import pandas as pd

MAX_VALUE = 1e40
"""Records of larger values are refused, so that sums of their squares fit into any message."""

_NAMES_SHOWN = 5


class NotNumericError(DataError, TypeError):
    """Records hold objects that are no numbers; a `TypeError` too, as scikit-learn expects."""


class Clients(dict[str, Floats]):
    """Records by client name, all with the same columns.

    Attributes
    ----------
    feature_names : tuple of str or None
        The columns' names, where the source had names.
    persons : mapping of client to array of int, or None
        Which person each record is about, where the source had a column for that: a number that
        means nothing beyond the client.
    """

    def __init__(
        self,
        records: Mapping[str, Floats],
        feature_names: Sequence[str] | None = None,
        persons: Mapping[str, Ints] | None = None,
    ) -> None:
        super().__init__(records)
        self.feature_names = None if feature_names is None else tuple(feature_names)
        self.persons = persons

    def __repr__(self) -> str:
        """Names and sizes, no records."""
        return f"Clients({', '.join(f'{name}: {len(X)} records' for name, X in self.items())})"

    @property
    def n_features(self) -> int | None:
        """The width that all records have; None without any."""
        return next((X.shape[1] for X in self.values()), None)

    def select(self, columns: Sequence[str]) -> "Clients":
        """The same records with these columns only, in this order."""
        names = self.feature_names or ()
        if missing := [name for name in columns if name not in names]:
            raise ParameterError(
                f"column {_listed(map(str, missing))}: there are {_listed(names)} only"
            )
        if len(set(columns)) != len(columns):
            raise ParameterError(f"columns={list(columns)}: give each once")
        places = [names.index(name) for name in columns]
        chosen = {client: np.ascontiguousarray(X[:, places]) for client, X in self.items()}
        return Clients(chosen, columns, self.persons)

    def limit_persons(self, most: int) -> tuple["Clients", dict[str, int]]:
        """Keep the first `most` records of each person, and say how many each client left out."""
        if self.persons is None:
            raise ParameterError(
                f"records_per_person={most} needs to know who is who: name the person_column"
            )
        kept, left_out = {}, {}
        for client, X in self.items():
            rank = _rank_within(self.persons[client])
            kept[client] = np.ascontiguousarray(X[rank < most])
            left_out[client] = int((rank >= most).sum())
        return Clients(kept, self.feature_names), left_out


def check_records(
    X: Any, client: str, n_features: int | None = None, *, allow_none: bool = False
) -> Floats:
    """One client's records as a C-contiguous float64 array of two dimensions.

    Parameters
    ----------
    X : array-like of shape (n, d) or DataFrame
    client : str
        The name that errors start with.
    n_features : int, optional
        The number of columns that others have.
    allow_none : bool
        Whether a table without any record will do.

    Returns
    -------
    array of shape (n, d)
        `X` itself where it already fits.

    Raises
    ------
    DataError
        If `X` is not a table of finite real numbers with at least one record and one feature,
        not of the wanted width, or so large that squares would overflow.

    Examples
    --------
    >>> check_records([[1, 2], [3, 4]], "berlin")
    array([[1., 2.],
           [3., 4.]])
    >>> check_records([[1, 2], [3, float("nan")]], "berlin")
    Traceback (most recent call last):
    ...
    secure_fedclust.errors.DataError: berlin: 1 of 2 records contain NaN or infinity, in column \
'1' (1 records): drop these records or fill them in
    """
    names: Sequence[str] | None = None
    if _is_frame(X) and len(X) > 0:  # columns without records have no type to speak of
        _refuse_non_numeric(X, f"{client}: ")
        names = [str(name) for name in X.columns]
        records = X.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        records = _as_floats(X, client)
    if records.ndim < 2:
        raise DataError(
            f"{client}: Expected 2D array, got {records.ndim}D array instead. Reshape your data "
            "with reshape(-1, 1) if they have one feature or reshape(1, -1) if they are one "
            "record; several clients are a list of 2-D arrays"
        )
    if records.ndim > 2:
        raise DataError(
            f"{client}: Found array with dim {records.ndim} (shape={records.shape}), while dim 2 "
            "is required: flatten each record with reshape(len(X), -1)"
        )
    for what, number in zip(("sample", "feature"), records.shape, strict=True):
        if number == 0 and not (allow_none and what == "sample"):
            raise DataError(
                f"{client}: Found array with 0 {what}(s) (shape={records.shape}) while a minimum "
                "of 1 is required. Leave the client out or give it data"
            )
    if n_features is not None and records.shape[1] != n_features:
        raise DataError(
            f"{client}: X has {records.shape[1]} features, but secure_fedclust is expecting "
            f"{n_features} features as input: pass the same columns in the same order everywhere"
        )
    _refuse_non_finite(records, client, names)
    if np.abs(records).max(initial=0) > MAX_VALUE:
        raise DataError(
            f"{client}: values beyond {MAX_VALUE:g} overflow when they are squared: rescale them"
        )
    return np.ascontiguousarray(records)


def check_clients(
    clients: Any,
    client_column: str | None = None,
    person_column: str | None = None,
    *,
    allow_none: bool = False,
) -> Clients:
    """Every client's records by name, all of one width.

    Parameters
    ----------
    clients : list or tuple of arrays, mapping of name to array, or DataFrame
        A list's clients are called ``client 0``, ``client 1`` and so on. Where all are DataFrames,
        columns are matched by name.
    client_column : str, optional
        The column of a DataFrame that says whose record it is.
    person_column : str, optional
        The column of DataFrames that says which person a record is about.
    allow_none : bool
        Whether clients without any record will do.

    Returns
    -------
    Clients
        A dict of arrays in the order given.

    Examples
    --------
    >>> check_clients([[[1, 2]], [[3, 4], [5, 6]]])["client 1"]
    array([[3., 4.],
           [5., 6.]])
    """
    if _is_frame(clients):
        if client_column is None:
            raise ParameterError(
                "a DataFrame holds several clients: pass client_column, the name of the column "
                "that says whose record it is, or a list with one DataFrame per client"
            )
        return clients_from_frame(clients, client_column, person_column=person_column)
    if client_column is not None:
        raise ParameterError(
            f"client_column={client_column!r} needs a DataFrame, got {type(clients).__name__}: "
            "leave it out"
        )
    if isinstance(clients, Mapping):
        named = [(str(name), X) for name, X in clients.items()]
    elif isinstance(clients, list | tuple):
        named = [(f"client {i}", X) for i, X in enumerate(clients)]
    else:
        raise DataError(
            f"clients came as a bare {type(clients).__name__}: pass a list with one 2-D array per "
            "client ([X] if there is only one), a mapping from name to array, or a DataFrame with "
            "client_column"
        )
    tables = by_name(named)
    if all(_is_frame(X) for X in tables.values()):
        return clients_from_frames(tables, person_column=person_column, allow_none=allow_none)
    if person_column is not None:
        raise ParameterError(
            f"person_column={person_column!r} needs DataFrames, which have named columns"
        )
    records = _same_width(
        {name: check_records(X, name, allow_none=allow_none) for name, X in tables.items()}
    )
    if isinstance(clients, Clients):
        return Clients(records, clients.feature_names, clients.persons)
    return Clients(records)


def clients_from_frame(
    frame: "pd.DataFrame",
    client_column: str,
    columns: Sequence[str] | None = None,
    person_column: str | None = None,
) -> Clients:
    """Split a DataFrame into clients by the values of one of its columns.

    Parameters
    ----------
    frame : DataFrame
    client_column : str
        The column that says whose record it is; its values, as strings, name the clients.
    columns : sequence of str, optional
        The features to use, in this order; all other columns if not given.
    person_column : str, optional
        The column that says which person a record is about; not a feature.

    Returns
    -------
    Clients
        Clients in the order in which they first appear.

    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"site": ["a", "b", "a"], "age": [30, 40, 50], "bmi": [20., 25., 30.]})
    >>> clients = clients_from_frame(frame, "site")
    >>> clients.feature_names
    ('age', 'bmi')
    >>> clients["a"]
    array([[30., 20.],
           [50., 30.]])
    """
    if not isinstance(client_column, str) or client_column not in frame.columns:
        raise DataError(
            f"there is no client column {client_column!r}; the columns are "
            f"{_listed(map(str, frame.columns))}"
        )
    if columns is None:
        columns = [name for name in frame.columns if name not in (client_column, person_column)]
    elif client_column in columns:
        raise ParameterError(
            f"{client_column!r} is both the client column and a feature: take it out of columns"
        )
    if person_column is not None:
        _select(frame, [person_column], "")
        if person_column == client_column:
            raise ParameterError(
                f"{client_column!r} is both the client column and the person column: name two"
            )
    features = _select(frame, columns, "")
    _refuse_non_numeric(features, "")
    if person_column is not None:
        features = _select(frame, [*columns, person_column], "")
    owner = _select(frame, [client_column], "")[client_column]
    if nameless := int(owner.isna().sum()):
        raise DataError(
            f"{nameless} of {len(frame)} records have nothing in the client column "
            f"{client_column!r}: fill it in or drop them"
        )
    # Equal names that were different values (1 and "1") would silently become one client.
    groups = features.groupby(owner, sort=False, observed=True)
    tables = by_name((str(name), table) for name, table in groups)
    return clients_from_frames(tables, person_column=person_column)


def clients_from_frames(
    frames: Mapping[str, "pd.DataFrame"],
    columns: Sequence[str] | None = None,
    person_column: str | None = None,
    *,
    allow_none: bool = False,
) -> Clients:
    """One DataFrame per client into arrays whose columns are matched by name.

    Parameters
    ----------
    frames : mapping of client name to DataFrame
    columns : sequence of str, optional
        The features to use, in this order; if not given, all columns in the first client's order,
        and then all clients must have the same.
    person_column : str, optional
        The column that says which person a record is about; not a feature.
    allow_none : bool
        Whether clients without any record will do.
    """
    persons = None
    if person_column is not None:
        if columns is not None and person_column in columns:
            raise ParameterError(
                f"{person_column!r} is both the person column and a feature: take it out of columns"
            )
        persons = {
            client: _persons(frame, person_column, f"{client}: ")
            for client, frame in frames.items()
        }
        frames = {client: frame.drop(columns=person_column) for client, frame in frames.items()}
    first = next(iter(frames))
    wanted = list(frames[first].columns) if columns is None else columns
    records = {}
    for client, frame in frames.items():
        table = _select(frame, wanted, f"{client}: ")
        if columns is None and (extra := [name for name in frame.columns if name not in wanted]):
            raise DataError(
                f"{client}: column {_listed(map(str, extra))} is not in {first}: name the columns "
                "to use in columns, or give every client the same"
            )
        records[client] = check_records(table, client, allow_none=allow_none)
    return Clients(records, [str(name) for name in wanted], persons)


def by_name(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Dict of what each client has, refusing a name that comes twice and an empty federation."""
    result: dict[str, Any] = {}
    for name, value in named:
        if name in result:
            raise DataError(f"two clients are called {name!r}: give each its own name")
        result[name] = value
    if not result:
        raise DataError("there are no clients: pass at least one client's records")
    return result


def _persons(frame: "pd.DataFrame", person_column: str, where: str) -> Ints:
    """A number for each record that is the same for records of one person."""
    import pandas as pd

    column = _select(frame, [person_column], where)[person_column]
    if nameless := int(column.isna().sum()):
        raise DataError(
            f"{where}{nameless} of {len(frame)} records have nothing in the person column "
            f"{person_column!r}: fill it in or drop them"
        )
    if column.dtype == object and len({isinstance(value, str) for value in column}) > 1:
        raise DataError(
            f"{where}the person column {person_column!r} holds both numbers and text, so that one "
            "person may look like two: make it one or the other"
        )
    return np.asarray(pd.factorize(column)[0], dtype=np.int64)


def _rank_within(groups: Ints) -> Ints:
    """How many earlier members its group has, for each position."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    sizes = np.diff(np.append(starts, len(groups)))
    ranks = np.empty(len(groups), dtype=np.int64)
    ranks[order] = np.arange(len(groups)) - np.repeat(starts, sizes)
    return ranks


def _as_floats(X: Any, client: str) -> Floats:
    import scipy.sparse as sp

    if sp.issparse(X):
        raise DataError(f"{client}: Sparse data are not supported: pass X.toarray()")
    # What numpy says when it cannot convert quotes the value, so that its exceptions are left
    # behind before ours are raised.
    try:
        array = np.asanyarray(X)
    except ValueError:
        array = None
    if array is None:
        raise DataError(
            f"{client}: records of unequal length do not make a 2-D array: every record needs "
            "the same features"
        )
    if array.dtype.kind == "c":
        raise DataError(f"{client}: Complex data not supported: pass real and imaginary parts")
    if array.dtype.kind in "mMV":
        raise NotNumericError(
            f"{client}: records of type {array.dtype.name} are not numbers: convert them first"
        )
    try:
        # A masked value is a missing one.
        return np.asarray(np.ma.filled(array.astype(np.float64, copy=False), np.nan))
    except TypeError:
        problem: DataError = NotNumericError(
            f"{client}: {type(X).__name__} with something that is no number: each argument must "
            "be a string that reads as a real number or a number; encode or drop the rest"
        )
    except (ValueError, OverflowError):
        problem = DataError(
            f"{client}: some values do not read as numbers: encode text columns or drop them"
        )
    raise problem


def _is_frame(X: Any) -> TypeGuard["pd.DataFrame"]:
    # Nobody can hold a DataFrame without having imported pandas.
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(X, pandas.DataFrame)


def _select(frame: "pd.DataFrame", columns: Sequence[str], where: str) -> "pd.DataFrame":
    if isinstance(columns, str):
        raise ParameterError(f"columns={columns!r} is a string: pass a list of column names")
    if missing := [name for name in columns if name not in frame.columns]:
        raise DataError(
            f"{where}column {_listed(map(str, missing))} is missing; there are "
            f"{_listed(map(str, frame.columns))}"
        )
    table = frame[list(columns)]
    if not table.columns.is_unique:
        twice = table.columns[table.columns.duplicated()].unique()
        raise DataError(f"{where}column {_listed(map(str, twice))} comes twice: rename one")
    return table


def _refuse_non_numeric(frame: "pd.DataFrame", where: str) -> None:
    from pandas.api.types import is_complex_dtype, is_numeric_dtype

    kinds = list(zip(map(str, frame.columns), frame.dtypes, strict=True))
    if text := [name for name, dtype in kinds if not is_numeric_dtype(dtype)]:
        raise DataError(
            f"{where}column {_listed(text)} is not numeric: encode it as numbers, or leave it out "
            "by naming the columns to use"
        )
    if imaginary := [name for name, dtype in kinds if is_complex_dtype(dtype)]:
        raise DataError(f"{where}Complex data not supported, in column {_listed(imaginary)}")


def _refuse_non_finite(records: Floats, client: str, names: Sequence[str] | None) -> None:
    bad = ~np.isfinite(records)
    per_column = bad.sum(axis=0)
    if not per_column.any():
        return
    columns = names or [str(j) for j in range(records.shape[1])]
    places = [f"{c!r} ({m} records)" for c, m in zip(columns, per_column, strict=True) if m]
    raise DataError(
        f"{client}: {bad.any(axis=1).sum()} of {len(records)} records contain NaN or infinity, in "
        f"column {_joined(places)}: drop these records or fill them in"
    )


def _same_width(records: dict[str, Floats]) -> dict[str, Floats]:
    first = next(iter(records))
    for client, X in records.items():
        if X.shape[1] != records[first].shape[1]:
            raise DataError(
                f"{first} has {records[first].shape[1]} features and {client} has {X.shape[1]}: "
                "give every client the same columns in the same order"
            )
    return records


def _listed(names: Iterable[str]) -> str:
    """Names for a message, but for those that read as numbers.

    In a file without a header line the first record takes the place of the names.
    """
    return _joined([repr(name) if not _is_number(name) else "(a number)" for name in names])


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _joined(places: list[str]) -> str:
    rest = len(places) - _NAMES_SHOWN
    return ", ".join(places[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
