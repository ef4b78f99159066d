"""A SQLite file that is only added to, and whose commits are on disk before they return.

Nothing here knows what is stored. Whatever is wrong with the file or its disk is a `LedgerError`
that says what to do; SQLite's own texts are left out of it, since they may quote what is stored.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from secure_fedclust.errors import LedgerError

BUSY_SECONDS = 30.0
"""How long to wait for another process that writes."""

KEEP_IT = (
    "restore it from a backup that holds against the latest anchor; do not start a new one, "
    "which would forget what was spent"
)
"""What to do about a ledger that does not hold."""

_WRITABLE = "make the file and its folder writable"
_ADVICE = {
    sqlite3.SQLITE_FULL: "the disk is full: free some space and try again",
    sqlite3.SQLITE_READONLY: f"it cannot be written: {_WRITABLE}",
    sqlite3.SQLITE_PERM: f"it cannot be written: {_WRITABLE}",
    sqlite3.SQLITE_CANTOPEN: f"it cannot be opened: {_WRITABLE}",
    sqlite3.SQLITE_BUSY: "another process has locked it: let that finish and try again",
    sqlite3.SQLITE_NOTADB: f"it is damaged or not a ledger: {KEEP_IT}",
    sqlite3.SQLITE_CORRUPT: f"it is damaged: {KEEP_IT}",
    sqlite3.SQLITE_IOERR: "the disk reports an error: check it and try again",
}


class Store:
    """One connection to such a file, whose use by several threads takes turns.

    Parameters
    ----------
    connection : sqlite3.Connection
    path : Path or None
        None if it is in memory.
    layout : Layout
    read_only : bool
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path | None,
        layout: "Layout",
        *,
        read_only: bool = False,
    ) -> None:
        self.path = path
        self._layout = layout
        self._connection = connection
        self._read_only = read_only
        self._closed = False
        self._process = os.getpid()
        self.lock = threading.RLock()
        self._file = self._identity()

    @classmethod
    def create(
        cls, path: Path | None, layout: "Layout", first: Sequence[tuple[str, Sequence[Any]]]
    ) -> Self:
        """Make a file that only its owner can read, with some first statements in it."""
        if path is None:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            layout.write(connection, first)
            return cls(connection, None, layout)
        for name in _files(path):
            if os.path.lexists(name):
                raise LedgerError(f"{name} is there already: use that ledger, or give another name")
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except OSError as error:
            raise LedgerError(f"ledger {path} cannot be made: {error.strerror}") from error
        try:
            with _errors(path):
                connection = _connect(path, "rw")
                try:
                    _make_durable(connection, path)
                    layout.write(connection, first)
                finally:
                    connection.close()
            _sync_folder(path)
            return cls.open(path, layout)
        except BaseException:
            for name in _files(path):
                name.unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, path: Path, layout: "Layout", *, read_only: bool = False) -> Self:
        """Connect to a file of this layout."""
        if not path.is_file():
            raise LedgerError(
                f"there is no ledger {path}: make one with `secure-fedclust ledger init`, "
                "or restore the one that was there"
            )
        with _errors(path):
            connection = _connect(path, "rw")
            try:
                if read_only:
                    connection = _readable(connection, path)
                layout.check(connection, path)
                if not read_only:
                    _make_durable(connection, path)
                return cls(connection, path, layout, read_only=read_only)
            except BaseException:
                connection.close()
                raise

    @property
    def name(self) -> str:
        """How errors call it."""
        return _name(self.path)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One consistent view of the file."""
        with self.lock, _errors(self.path):
            self._check_place()
            self._connection.execute("BEGIN")
            try:
                yield self._connection
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction in which nobody else writes, all or nothing, on disk when this ends."""
        with self.lock, _errors(self.path):
            self._check_place()
            if self._read_only:
                raise LedgerError(f"{self.name} was opened for reading: open it for writing")
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def check_soundness(self, connection: sqlite3.Connection) -> None:
        """Check the layout and every page."""
        self._layout.check(connection, self.path)
        if connection.execute("PRAGMA integrity_check(1)").fetchall() != [("ok",)]:
            raise LedgerError(f"{self.name}: SQLite finds it damaged: {KEEP_IT}")

    def close(self) -> None:
        """Let go of the file; what a fork took over is left to the process that opened it."""
        with self.lock:
            if not self._closed and self._process == os.getpid():
                self._closed = True
                self._connection.close()

    def _check_place(self) -> None:
        if self._closed:
            raise LedgerError(f"{self.name} is closed: open it again")
        if self._process != os.getpid():
            raise LedgerError(f"{self.name} was opened in another process: open it in this one")
        if self.path is not None and _links(self.path) > 1:
            raise LedgerError(
                f"{self.name} has a second name (a hard link), under which others would spend the "
                "same budget again: remove one, and mount folders, not single files"
            )
        if self._identity() != self._file:
            raise LedgerError(f"{self.name} was removed or replaced while in use: {KEEP_IT}")

    def _identity(self) -> tuple[int, int] | None:
        """Which file has the name. What is written to one that has lost it would be lost."""
        if self.path is None:
            return None
        try:
            found = os.stat(self.path)
        except OSError:
            return (-1, -1)
        return (found.st_dev, found.st_ino)


def _links(path: Path) -> int:
    try:
        return os.stat(path).st_nlink
    except OSError:
        return 0


class Layout:
    """The tables of a file, and fences around them that forbid all but adding.

    Parameters
    ----------
    application, version : int
        What marks a file as one of these.
    tables : mapping of table to SQL
        Each is fenced.
    indexes : mapping of index to SQL
    """

    def __init__(
        self,
        application: int,
        version: int,
        tables: Mapping[str, str],
        indexes: Mapping[str, str],
    ) -> None:
        self._application = application
        self._version = version
        fences = {
            f"{table}_{change}": f"CREATE TRIGGER {table}_{change} BEFORE {change} ON {table} "
            "BEGIN SELECT RAISE(ABORT, 'only added to'); END"
            for table in tables
            for change in ("update", "delete")
        }
        self._statements = {**tables, **indexes, **fences}

    def write(
        self, connection: sqlite3.Connection, first: Sequence[tuple[str, Sequence[Any]]]
    ) -> None:
        """Make all of it in one transaction, with some first statements."""
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(f"PRAGMA application_id = {self._application}")
        connection.execute(f"PRAGMA user_version = {self._version}")
        for statement in self._statements.values():
            connection.execute(statement)
        for statement, values in first:
            connection.execute(statement, values)
        connection.execute("COMMIT")

    def check(self, connection: sqlite3.Connection, path: Path | None) -> None:
        """Refuse a file of another kind or version, or with tables that are not ours."""
        name = _name(path)
        [application] = connection.execute("PRAGMA application_id").fetchone()
        [version] = connection.execute("PRAGMA user_version").fetchone()
        if application != self._application:
            raise LedgerError(
                f"{path} is not a ledger: give the path of one; if one was there, restore it"
            )
        if version > self._version:
            raise LedgerError(
                f"{name} is of format {version}, and this version knows formats up to "
                f"{self._version}: update secure-fedclust"
            )
        query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
        found = dict(connection.execute(query).fetchall())
        # A trigger or a view that is not ours could drop rows, or hide them.
        if version != self._version or found != self._statements:
            raise LedgerError(f"{name}: its tables were changed: {KEEP_IT}")


@contextmanager
def _errors(path: Path | None) -> Iterator[None]:
    try:
        yield
    # The module that speaks to SQLite fails to decode an error that quotes a damaged schema.
    except (sqlite3.Error, UnicodeDecodeError) as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        advice = _ADVICE.get(code, f"SQLite reports {getattr(error, 'sqlite_errorname', code)}")
        raise LedgerError(f"{_name(path)}: {advice}") from error


def _name(path: Path | None) -> str:
    return "ledger in memory" if path is None else f"ledger {path}"


def _files(path: Path) -> list[Path]:
    return [path.with_name(path.name + end) for end in ("", "-wal", "-shm")]


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    # What is not UTF-8 was not written by us: let a hash say so, of the row that it is in.
    connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    return connection


def _make_durable(connection: sqlite3.Connection, path: Path) -> None:
    """Have every commit on disk before it returns, or refuse."""
    connection.execute("PRAGMA fullfsync = ON")
    connection.execute("PRAGMA synchronous = FULL")
    [mode] = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    [synchronous] = connection.execute("PRAGMA synchronous").fetchone()
    if (mode, synchronous) != ("wal", 2):
        raise LedgerError(
            f"ledger {path}: SQLite gives journal_mode={mode} and synchronous={synchronous} "
            "instead of wal and 2: put it on a local disk"
        )
    # A file that may not be written is opened for reading, and only the first write tells.
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("PRAGMA user_version = 0")
    connection.execute("ROLLBACK")


def _readable(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    """The connection, if it can read; else one that can where the folder cannot be written."""
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        log = _files(path)[1]
        # Without a lock the log cannot be read, so there must be nothing in it.
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CANTOPEN or (
            log.exists() and log.stat().st_size
        ):
            raise
        return _connect(path, "ro&immutable=1")
    return connection


def _sync_folder(path: Path) -> None:
    """Make the file's name as durable as its content, where folders can be synced."""
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
