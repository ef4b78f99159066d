"""The privacy ledger: what was spent of a data set's lifetime budget, and on what.

Its owner fixes the budget, the unit, the adjacency and the data set when it is made; after that
rows are only added, one a release, before the release's noise is drawn. Each row carries the hash
of the row before it and the running totals of its client, so that a charge reads a few rows
however many there are, and `Ledger.verify` finds what was changed. What it can and cannot find:
docs/ledger.md.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from types import TracebackType
from typing import Any, NamedTuple, Self

from secure_fedclust.errors import LedgerError, ParameterError
from secure_fedclust.parameters import check_choice, check_positive
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.charges import (
    Charge,
    Totals,
    canonical,
    check_key,
    check_text,
    exceeded,
)
from secure_fedclust.privacy.store import KEEP_IT, Layout, Store
from secure_fedclust.privacy.terms import ADJACENCIES, UNITS

__all__ = ["Anchor", "Charge", "Ledger", "Row", "Totals"]

_FORMAT = 1
_INSERT = f"INSERT INTO releases VALUES ({', '.join('?' * 20)})"  # noqa: S608
_CHECKED_ON_OPEN = 16

_LAYOUT = Layout(
    application=0x53464C47,
    version=_FORMAT,
    tables={
        "header": """CREATE TABLE header (
            only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
            content TEXT NOT NULL, hash TEXT NOT NULL)""",
        "releases": """CREATE TABLE releases (
            number INTEGER PRIMARY KEY,
            client TEXT NOT NULL, run TEXT NOT NULL, step INTEGER NOT NULL, message TEXT NOT NULL,
            formula TEXT NOT NULL, inputs TEXT NOT NULL,
            sensitivity REAL NOT NULL, sigma REAL NOT NULL,
            mu REAL NOT NULL, slack REAL NOT NULL, coordinates INTEGER NOT NULL,
            client_squared_mu REAL NOT NULL, client_slack REAL NOT NULL,
            client_coordinates INTEGER NOT NULL,
            run_squared_mu REAL NOT NULL, run_slack REAL NOT NULL,
            run_coordinates INTEGER NOT NULL,
            previous TEXT NOT NULL, hash TEXT NOT NULL)""",
        "outbox": """CREATE TABLE outbox (
            client TEXT NOT NULL, run TEXT NOT NULL, step INTEGER NOT NULL,
            request TEXT NOT NULL, reply BLOB NOT NULL, hash TEXT NOT NULL,
            UNIQUE (client, run, step))""",
    },
    indexes={
        "of_client": "CREATE INDEX of_client ON releases (client)",
        "of_run": "CREATE INDEX of_run ON releases (client, run)",
    },
)


IN_A_SUM = " in a sum"
"""Ends the message of a release whose noise is shared: its inputs say with how many clients."""


class Quorum(NamedTuple):
    """What releases in sums assume."""

    min_survivors: int
    colluders: int
    active_server: bool
    key_holder: bool

    @property
    def trusts_server(self) -> bool:
        """Whether they are under masks, and the server is taken to keep to the protocol."""
        return not self.active_server and not self.key_holder


class Anchor(NamedTuple):
    """How many rows a ledger had and the hash of the last: it cannot go back behind that."""

    rows: int
    head: str


@dataclass(frozen=True)
class Row:
    """One release, as the ledger has it.

    Attributes
    ----------
    number : int
        Counted from 1, over all clients.
    charge : Charge
    client_totals, run_totals : Totals
        Of the charge's client, and of that client in the charge's run, this release included.
    previous, hash : str
        Hash of the row before (of the ledger's header for the first row), and of this one.
    """

    number: int
    charge: Charge
    client_totals: Totals
    run_totals: Totals
    previous: str
    hash: str

    @property
    def cumulative_mu(self) -> float:
        """What the client has spent with this release, over all runs."""
        return self.client_totals.mu


class _Stored(NamedTuple):
    """A row whose charge has not been looked into."""

    number: int
    columns: list[Any]
    client_totals: Totals
    run_totals: Totals
    previous: str
    hash: str


class Ledger:
    """The releases made from one data set, and the filter that keeps them within its budget.

    Make one with `create`, use it later with `open`, and close it when done; it is a context
    manager too. Any number of processes may have the same file open: each charge is a transaction
    of its own. An object holds one connection, which threads use in turns; it does not survive a
    fork, after which the ledger has to be opened anew.

    The budget is per client: where a ledger has rows of several clients, as in a simulation, no
    record may belong to two of them.

    Attributes
    ----------
    limit : Limit
        The lifetime budget of each client.
    unit, adjacency, dataset : str
    path : Path or None
        None for a ledger in memory.
    has_experiments : bool
        Whether a run without a guarantee was charged to it, which only one in memory allows.

    Examples
    --------
    >>> with Ledger.create(None, epsilon=1.0, delta=1e-5) as ledger:
    ...     anchor = ledger.charge(
    ...         Charge("oslo", "run 1", 0, "fkm/sums", "ball sum", {"bound": 1.0},
    ...                sensitivity=4096.0, sigma=40960.0, mu=0.1, slack=1e-9, coordinates=3)
    ...     )
    ...     anchor.rows, round(ledger.spent("oslo"), 6)
    (1, 0.1)
    """

    limit: Limit
    unit: str
    adjacency: str
    dataset: str
    path: Path | None
    has_experiments: bool

    def __init__(self, store: Store) -> None:
        self._store = store
        self.has_experiments = False
        self.path = store.path
        with store.reading() as connection:
            header, self._origin = self._header(connection)
            self.limit = Limit.of(header["epsilon"], header["delta"])
            self.unit, self.adjacency = header["unit"], header["adjacency"]
            self.dataset = header["dataset"]
            self._seen = self._check_latest(connection)
            # Totals as of `_seen`, so that a charge need not read what this object has written.
            self._known: dict[tuple[str, ...], Totals] = {}

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str] | None,
        *,
        epsilon: float,
        delta: float,
        unit: str = "record",
        adjacency: str = "add_remove",
        dataset: str = "",
    ) -> Self:
        """Make a new ledger; what is fixed here cannot be changed later.

        Parameters
        ----------
        path : path or None
            A file that does not exist yet, on a local disk; None keeps the ledger in memory.
        epsilon, delta : float
            Lifetime budget of each client.
        unit : {"record", "client"}
        adjacency : {"add_remove", "replace_one"}
        dataset : str
            A name for the data.
        """
        header = {
            "format": _FORMAT,
            "id": secrets.token_hex(16),
            "epsilon": epsilon,
            "delta": delta,
            "unit": unit,
            "adjacency": adjacency,
            "dataset": dataset,
        }
        _check_header(header)
        content = canonical(header | {"epsilon": float(epsilon), "delta": float(delta)})
        first = ("INSERT INTO header VALUES (1, ?, ?)", (content, _sha256(content.encode())))
        place = None if path is None else Path(path).absolute()
        return cls(Store.create(place, _LAYOUT, [first]))

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, read_only: bool = False) -> Self:
        """Use a ledger that exists.

        Its header and its last rows are checked; `verify` checks all rows.

        Parameters
        ----------
        path : path
        read_only : bool
            Only look at it; that works where the file or its folder cannot be written, too.
        """
        store = Store.open(Path(path).absolute(), _LAYOUT, read_only=read_only)
        try:
            return cls(store)
        except BaseException:
            store.close()
            raise

    def charge(self, charge: Charge | Sequence[Charge], *, plan: Limit | None = None) -> Anchor:
        """Book releases, all or none, before their noise is drawn.

        Once this returns, the rows are on disk. If it raises, nothing may be released.

        Parameters
        ----------
        charge : Charge or sequence of Charge
            Several share one transaction, e.g. all clients of a round in a simulation.
        plan : Limit, optional
            The run's own limit, for each client in it.

        Returns
        -------
        Anchor
            Goes into the reply.

        Raises
        ------
        BudgetExceeded
            If a client would exceed its lifetime limit, or the plan in its run.
        LedgerError
            If the ledger cannot be written, or does not hold.
        """
        charges = [charge] if isinstance(charge, Charge) else list(charge)
        if not charges or not all(isinstance(each, Charge) for each in charges):
            raise ParameterError("charge: give a Charge, or a sequence of at least one")
        # One lock for all of it: threads must not see totals that are not those of `_seen`.
        with self._store.lock:
            before: dict[tuple[str, ...], Totals] = {}
            after: dict[tuple[str, ...], Totals] = {}
            with self._store.writing() as connection:
                number, previous = self._head(connection)
                for each in charges:
                    of_client, of_run = (each.client,), (each.client, each.run)
                    if of_run not in after:
                        for key, totals in self._known_totals(connection, each.client, each.run):
                            before.setdefault(key, totals)
                            after.setdefault(key, totals)
                    for key, limit in ((of_client, self.limit), (of_run, plan)):
                        after[key] = after[key].plus(each)
                        if limit is not None and not limit.allows(*after[key]):
                            raise exceeded(each, before[key], after[key], limit, key)
                    number += 1
                    values = [number, *each.columns(), *after[of_client], *after[of_run], previous]
                    previous = _digest(values)
                    connection.execute(_INSERT, (*values, previous))
            self._seen = Anchor(number, previous)
            self._known.update(after)
            return self._seen

    def keep(self, client: str, run: str, step: int, request: bytes, reply: bytes) -> None:
        """Put a reply into the outbox, before it is sent.

        Only a hash of the request is stored. Keeping the same pair again changes nothing.
        """
        check_key(client, run, step)
        if not isinstance(reply, bytes):
            raise ParameterError(f"reply: give bytes, not {type(reply).__name__}")
        with self._store.writing() as connection:
            kept = self._kept(connection, client, run, step, request)
            if kept is None:
                key = [client, run, int(step), _sha256(request)]
                row = (*key, reply, _digest([*key, _sha256(reply), self._origin]))
                connection.execute("INSERT INTO outbox VALUES (?, ?, ?, ?, ?, ?)", row)
            elif kept != reply:
                raise LedgerError(
                    f"{self._store.name}: client {client!r} has answered step {step} of run "
                    f"{run!r} otherwise: send the reply that `sent` returns"
                )

    def sent(self, client: str, run: str, step: int, request: bytes) -> bytes | None:
        """The reply kept for exactly this request, to be sent again; None if there is none.

        Raises
        ------
        LedgerError
            If another request was answered at that step.
        """
        check_key(client, run, step)
        with self._store.reading() as connection:
            return self._kept(connection, client, run, step, request)

    def rows(self, client: str | None = None) -> list[Row]:
        """All rows in order, or those of one client."""
        where, given = ("", ()) if client is None else ("WHERE client = ?", (client,))
        with self._store.reading() as connection:
            return list(self._rows(connection, f"{where} ORDER BY number", *given))

    def clients(self) -> list[str]:
        """Whoever has rows here, in the order of their first."""
        query = "SELECT client FROM releases GROUP BY client ORDER BY min(number)"
        with self._store.reading() as connection:
            return [client for (client,) in connection.execute(query)]

    def quorums(self) -> set[Quorum]:
        """What the releases in sums assume, over all runs and clients; none where all are local."""
        query = "SELECT DISTINCT inputs FROM releases WHERE message LIKE ?"
        with self._store.reading() as connection:
            found = [json.loads(text) for (text,) in connection.execute(query, (f"%{IN_A_SUM}",))]
        return {
            # What a row does not say is taken for the least.
            Quorum(
                int(inputs.get("min_survivors", 0)),
                int(inputs.get("colluders", 0)),
                inputs.get("active_server", 0) > 0,
                inputs.get("key_holder", 0) > 0,
            )
            for inputs in found
        }

    def totals(self, client: str, run: str | None = None) -> Totals:
        """What a client has spent, over all runs or in one."""
        with self._store.reading() as connection:
            return self._totals(connection, client, run or "")[run is not None]

    def spent(self, client: str) -> float:
        """The mu that a client has spent."""
        return self.totals(client).mu

    @property
    def origin(self) -> str:
        """Hash of the header: tells this ledger from others."""
        return self._origin

    def anchor(self) -> Anchor:
        """Where the ledger stands."""
        with self._store.reading() as connection:
            return self._head(connection)

    def verify(self, anchors: Iterable[Anchor] = ()) -> None:
        """Check every row, and that the ledger still has what others saw of it.

        Parameters
        ----------
        anchors : iterable of Anchor
            From replies, results and reports of runs that used this ledger.

        Raises
        ------
        LedgerError
            Names the first row that does not hold.
        """
        wanted = sorted(_anchor(anchor) for anchor in anchors)
        seen = dict.fromkeys(anchor.rows for anchor in wanted)
        totals: dict[tuple[str, ...], Totals] = {}
        with self._store.reading() as connection:
            number, previous = 0, self._header(connection)[1]
            if previous != self._origin:
                raise LedgerError(f"{self._store.name}: its header was changed: {KEEP_IT}")
            seen[0] = previous
            for row in self._rows(connection, "ORDER BY number", follows=Anchor(0, previous)):
                number, previous = row.number, row.hash
                of_client, of_run = (row.charge.client,), (row.charge.client, row.charge.run)
                for key, stated in ((of_client, row.client_totals), (of_run, row.run_totals)):
                    totals[key] = totals.get(key, Totals()).plus(row.charge)
                    if stated != totals[key]:
                        raise self._broken(number, "its totals are not those of the rows so far")
                if not self.limit.allows(*row.client_totals):
                    raise self._broken(number, "it exceeds the lifetime budget")
                if number in seen:
                    seen[number] = previous
            for _ in self._replies(connection, ""):
                pass
            self._store.check_soundness(connection)
        for anchor in wanted:
            if anchor.rows > number:
                what = f"an anchor saw {anchor.rows} rows; this is an older copy, or was cut short"
                raise self._broken(number + 1, what)
            if anchor.head != seen[anchor.rows]:
                what = "an anchor saw another one, here or in another ledger"
                raise self._broken(anchor.rows, what)

    def close(self) -> None:
        """Let go of the file."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: Any) -> Self:
        """The same ledger: there is only one, whoever holds it."""
        return self

    def __repr__(self) -> str:
        return (
            f"<{self._store.name}: epsilon={self.limit.epsilon:g}, delta={self.limit.delta:g}, "
            f"unit={self.unit!r}, adjacency={self.adjacency!r}, dataset={self.dataset!r}>"
        )

    def _header(self, connection: Connection) -> tuple[dict[str, Any], str]:
        """What the owner fixed, and its hash."""
        found = connection.execute("SELECT content, hash FROM header").fetchall()
        try:
            [(content, digest)] = found
            header = json.loads(content)
            _check_header(header)
            if _sha256(content.encode()) == digest:
                return header, digest
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        raise LedgerError(f"{self._store.name}: its header was changed: {KEEP_IT}")

    def _check_latest(self, connection: Connection) -> Anchor:
        """Check what takes no time: that no row is missing, and the first and the last rows."""
        head = Anchor(0, self._origin)
        for row in self._stored(connection, "ORDER BY number LIMIT 1", follows=head):
            head = Anchor(row.number, row.hash)
        [(count, last)] = connection.execute("SELECT count(*), max(number) FROM releases")
        if count != (last or 0):
            raise LedgerError(f"{self._store.name}: of {last} rows, {count} are here: {KEEP_IT}")
        where = "WHERE number > ? ORDER BY number"
        start = max(1, count - _CHECKED_ON_OPEN)
        for row in self._stored(connection, where, start, follows=head if start == 1 else None):
            head = Anchor(row.number, row.hash)
        return head

    def _head(self, connection: Connection) -> Anchor:
        """The last row, with whatever others added since this object looked last checked."""
        last = "SELECT number, hash FROM releases ORDER BY number DESC LIMIT 1"
        if connection.execute(last).fetchone() != self._seen:
            rows, head = self._seen
            same = "SELECT hash FROM releases WHERE number = ?"
            if rows and connection.execute(same, (rows,)).fetchone() != (head,):
                raise self._broken(rows, "it changed while the ledger was in use")
            where = "WHERE number > ? ORDER BY number"
            for row in self._stored(connection, where, rows, follows=self._seen):
                self._seen = Anchor(row.number, row.hash)
                client, run = row.columns[:2]
                self._known |= {(client,): row.client_totals, (client, run): row.run_totals}
        return self._seen

    def _known_totals(
        self, connection: Connection, client: str, run: str
    ) -> Iterable[tuple[tuple[str, ...], Totals]]:
        """Of a client and of its run, as of `_seen`; from the file where nothing is known yet."""
        of_client, of_run = (client,), (client, run)
        if of_run not in self._known:
            # A client that is known already may have rows in the file that are not committed yet.
            for key, totals in zip(
                (of_client, of_run), self._totals(connection, client, run), strict=True
            ):
                self._known.setdefault(key, totals)
        return (of_client, self._known[of_client]), (of_run, self._known[of_run])

    def _totals(self, connection: Connection, client: str, run: str) -> tuple[Totals, Totals]:
        """Of a client, and of a client in a run: they are in the last row of each."""
        last = "WHERE client = ? {} ORDER BY number DESC LIMIT 1"
        of_client = Totals()
        for row in self._stored(connection, last.format(""), client):
            of_client = row.client_totals
            if row.columns[1] == run:
                return of_client, row.run_totals
        for row in self._stored(connection, last.format("AND run = ?"), client, run):
            return of_client, row.run_totals
        return of_client, Totals()

    def _rows(
        self, connection: Connection, where: str, *given: Any, follows: Anchor | None = None
    ) -> Iterator[Row]:
        for row in self._stored(connection, where, *given, follows=follows):
            try:
                charge = Charge.of_columns(row.columns)
            except (ValueError, TypeError) as error:
                raise self._broken(row.number, "it is not one that could be charged") from error
            yield Row(row.number, charge, *row[2:])

    def _stored(
        self, connection: Connection, where: str, *given: Any, follows: Anchor | None = None
    ) -> Iterator["_Stored"]:
        """Rows that are as they were hashed, and in an unbroken chain if one is to follow."""
        for found in connection.execute(f"SELECT * FROM releases {where}", given):  # noqa: S608
            number, *values, previous, digest = found
            if follows is not None and number != follows.rows + 1:
                raise self._broken(follows.rows + 1, "it is missing")
            if not _is_hash(digest, found[:-1]):
                raise self._broken(number, "it was changed")
            if follows is not None:
                if previous != follows.head:
                    raise self._broken(number, "it does not follow from the one before it")
                follows = Anchor(number, digest)
            totals = Totals(*values[-6:-3]), Totals(*values[-3:])
            yield _Stored(number, values[:-6], *totals, previous, digest)

    def _broken(self, number: int, what: str) -> LedgerError:
        return LedgerError(f"{self._store.name}: row {number} does not hold, {what}: {KEEP_IT}")

    def _kept(
        self, connection: Connection, client: str, run: str, step: int, request: bytes
    ) -> bytes | None:
        where = "WHERE client = ? AND run = ? AND step = ?"
        for asked, reply in self._replies(connection, where, client, run, int(step)):
            if asked != _sha256(request):
                raise LedgerError(
                    f"{self._store.name}: client {client!r} has answered another request at step "
                    f"{step} of run {run!r}: ask the same again, or take a new step"
                )
            return reply
        return None

    def _replies(
        self, connection: Connection, where: str, *given: Any
    ) -> Iterator[tuple[str, bytes]]:
        """Hash of the request, and reply, of what was kept and is as it was."""
        for *key, reply, digest in connection.execute(
            f"SELECT * FROM outbox {where}",  # noqa: S608
            given,
        ):
            known = isinstance(reply, bytes)
            if not known or not _is_hash(digest, [*key, _sha256(reply), self._origin]):
                raise LedgerError(
                    f"{self._store.name}: the reply kept for client {key[0]!r}, run {key[1]!r}, "
                    f"step {key[2]!r} was changed and is not sent: {KEEP_IT}"
                )
            yield key[3], reply


def _check_header(header: Mapping[str, Any]) -> None:
    check_positive(epsilon=header["epsilon"], delta=header["delta"])
    Limit.of(header["epsilon"], header["delta"])
    check_choice("unit", header["unit"], UNITS)
    check_choice("adjacency", header["adjacency"], ADJACENCIES)
    if header["dataset"] != "":
        check_text(dataset=header["dataset"])


def _anchor(given: Any) -> Anchor:
    try:
        rows, head = given
        if type(rows) is int and rows >= 0 and len(head) == 2 * len(bytes.fromhex(head)) == 64:
            return Anchor(rows, head.lower())
    except (TypeError, ValueError):
        pass
    raise ParameterError(f"anchor {given!r}: give a number of rows and 64 hexadecimal digits")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest(values: Sequence[Any]) -> str:
    return _sha256(canonical(list(values)).encode())


def _is_hash(digest: Any, values: Sequence[Any]) -> bool:
    """Whether these are the values that were hashed; an edit may have made them anything."""
    try:
        return bool(digest == _digest(values))
    except (TypeError, ValueError):
        return False
