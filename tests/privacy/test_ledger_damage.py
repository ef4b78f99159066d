"""What becomes of a ledger that was edited, damaged, rolled back, or cannot be written."""

import hashlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
from contextlib import closing

import pytest

from secure_fedclust.errors import BudgetExceeded, LedgerError, ParameterError
from secure_fedclust.privacy.ledger import Anchor, Charge, Ledger

COLUMNS = (
    *("number", "client", "run", "step", "message", "formula", "inputs", "sensitivity", "sigma"),
    *("mu", "slack", "coordinates", "client_squared_mu", "client_slack", "client_coordinates"),
    *("run_squared_mu", "run_slack", "run_coordinates", "previous", "hash"),
)


def make_charge(size=0.01, client="oslo", **changes):
    fields = {
        "client": client,
        "run": "run 1",
        "step": 0,
        "message": "fkm/sums",
        "formula": "ball sums",
        "inputs": {"bound": 1.0, "weight": 0.5},
        "sensitivity": 4096.0,
        "sigma": 4096.0 / size,
        "mu": size,
        "slack": 1e-9,
        "coordinates": 30,
    }
    return Charge(**fields | changes)


@pytest.fixture
def path(tmp_path):
    """A ledger of six rows of two clients in two runs, and one kept reply."""
    path = tmp_path / "ledger.sqlite"
    with Ledger.create(path, epsilon=1.0, delta=1e-5, dataset="ward 7") as ledger:
        for step in range(2):
            ledger.charge([make_charge(client=name, step=step) for name in ("oslo", "bergen")])
        ledger.charge([make_charge(0.02, name, run="run 2") for name in ("oslo", "bergen")])
        ledger.keep("oslo", "run 1", 0, b"request", b"reply")
    return path


@pytest.fixture
def fresh():
    with Ledger.create(None, epsilon=1.0, delta=1e-5) as ledger:
        yield ledger


def anchor_of(path):
    with Ledger.open(path) as ledger:
        return ledger.anchor()


def edit(path, *statements):
    """Change a ledger behind its back, around its fences, and put the fences up again."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
        fences = connection.execute(query).fetchall()
        for name, _ in fences:
            connection.execute(f"DROP TRIGGER {name}")
        for statement, *values in statements:
            connection.execute(statement, values)
        for _, sql in fences:
            connection.execute(sql)


def stored(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.text_factory = lambda text: text.decode(errors="surrogateescape")
        return connection.execute("SELECT * FROM releases ORDER BY number").fetchall()


def rehash(path, first=1):
    """Do what an editor does who knows how hashes are made."""
    with closing(sqlite3.connect(path)) as connection:
        [(previous,)] = connection.execute("SELECT hash FROM header")
    changes = []
    for *values, _, digest in stored(path):
        if values[0] >= first:
            text = json.dumps([*values, previous], separators=(",", ":"))
            digest = hashlib.sha256(text.encode()).hexdigest()
            where = "UPDATE releases SET previous = ?, hash = ? WHERE number = ?"
            changes.append((where, previous, digest, values[0]))
        previous = digest
    edit(path, *changes)


def refuses(path, message=None, anchors=()):
    """No use of the ledger goes unnoticed: it is refused on opening, charging or verifying."""
    before = stored(path)
    with pytest.raises(LedgerError, match=message) as caught:
        with Ledger.open(path) as ledger:
            ledger.verify(anchors)
    assert stored(path) == before
    return str(caught.value)


def cannot_be_charged(path, message=None):
    with pytest.raises(LedgerError, match=message):
        with Ledger.open(path) as ledger:
            ledger.charge(make_charge())


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("client", "bergen"),
        ("run", "run 9"),
        ("step", 4),
        ("request", hashlib.sha256(b"another").hexdigest()),
        ("reply", b"replx"),
        ("reply", "reply"),
        ("hash", "0" * 64),
    ],
)
def test_an_edited_outbox_is_found(path, column, value):
    edit(path, (f"UPDATE outbox SET {column} = ?", value))  # noqa: S608
    with Ledger.open(path) as ledger:
        if column not in ("client", "run", "step"):
            with pytest.raises(LedgerError, match="was changed and is not sent"):
                ledger.sent("oslo", "run 1", 0, b"request")
            with pytest.raises(LedgerError, match="was changed and is not sent"):
                ledger.keep("oslo", "run 1", 0, b"request", b"reply")
        else:
            assert ledger.sent("oslo", "run 1", 0, b"request") is None
    refuses(path, "the reply kept for client .* was changed")


def test_a_reply_taken_out_of_the_outbox_only_costs_a_new_charge(path):
    edit(path, ("DELETE FROM outbox",))
    with Ledger.open(path) as ledger:
        ledger.verify()
        assert ledger.sent("oslo", "run 1", 0, b"request") is None


def test_a_reply_of_another_ledger_is_not_sent(path, tmp_path):
    other = tmp_path / "other.sqlite"
    with Ledger.create(other, epsilon=1.0, delta=1e-5) as ledger:
        ledger.keep("oslo", "run 1", 3, b"request", b"reply")
    edit(
        path,
        ("ATTACH ? AS other", str(other)),
        ("INSERT INTO outbox SELECT * FROM other.outbox",),
    )
    refuses(path, "step 3 was changed")


def test_rows_cannot_be_changed_or_removed_by_accident(path):
    with closing(sqlite3.connect(path)) as connection:
        for table, column in (("releases", "mu"), ("header", "content"), ("outbox", "step")):
            for statement in (f"UPDATE {table} SET {column} = 1", f"DELETE FROM {table}"):  # noqa: S608
                with pytest.raises(sqlite3.IntegrityError, match="only added to"):
                    connection.execute(statement)


@pytest.mark.parametrize("column", COLUMNS)
def test_an_edit_of_any_column_of_any_row_is_found_and_named(path, column, tmp_path):
    rows = stored(path)
    for row in rows:
        old = row[COLUMNS.index(column)]
        news = [old + 100, "x", b"x"] if isinstance(old, int | float) else [old + "0", 7, b"\xff"]
        if column == "number":
            news = [old + 100]
        for new in news:
            copy = tmp_path / "copy.sqlite"
            shutil.copy(path, copy)
            change = f"UPDATE releases SET {column} = ? WHERE number = ?"  # noqa: S608
            edit(copy, (change, new, row[0]))
            # A row that has lost its number is missed by count before any row is read.
            named = "of 1.. rows, 6 are here|it is missing" if column == "number" else None
            refuses(copy, named or f"row {row[0]} does not hold, it was changed")
            cannot_be_charged(copy)
            copy.unlink()


def test_text_that_is_not_text_is_an_edit_like_others(path):
    edit(path, ("UPDATE releases SET message = CAST(x'ff' AS TEXT) WHERE number = 2",))
    refuses(path, "row 2 does not hold, it was changed")


def test_an_edit_deep_down_is_found_by_verify(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger.create(path, epsilon=1.0, delta=1e-5) as ledger:
        ledger.charge([make_charge(1e-3, step=step) for step in range(100)])
    edit(path, ("UPDATE releases SET mu = mu / 2 WHERE number = 50",))
    assert "row 50" in refuses(path)


def test_a_row_edited_under_a_ledger_in_use_does_not_count(path):
    with Ledger.open(path) as ledger:
        # bergen has the last row; oslo's last is the one before.
        edit(path, ("UPDATE releases SET client_squared_mu = 0 WHERE number = 5",))
        with pytest.raises(LedgerError, match="row 5 does not hold"):
            ledger.charge(make_charge())
        with pytest.raises(LedgerError, match="row 5 does not hold"):
            ledger.spent("oslo")
    assert len(stored(path)) == 6


def test_an_edit_under_a_ledger_that_has_charged_gives_nothing_back(path):
    with Ledger.open(path) as ledger:
        ledger.charge(make_charge(0.2))
        edit(path, ("UPDATE releases SET client_squared_mu = 0, run_squared_mu = 0",))
        with pytest.raises(BudgetExceeded):
            ledger.charge(make_charge(0.2))
        with pytest.raises(LedgerError, match="row 1 does not hold"):
            ledger.verify()


@pytest.mark.parametrize("first", [1, 2, 4])
def test_an_edit_with_its_own_hash_mended_breaks_the_chain(path, first):
    edit(path, ("UPDATE releases SET mu = 0.001, sigma = 4096000 WHERE number = ?", first))
    *values, previous, _ = stored(path)[first - 1]
    digest = hashlib.sha256(json.dumps([*values, previous], separators=(",", ":")).encode())
    edit(path, ("UPDATE releases SET hash = ? WHERE number = ?", digest.hexdigest(), first))
    refuses(path, f"row {first + 1} does not hold, it does not follow")


def test_an_edit_with_all_hashes_mended_is_found_by_its_totals_or_by_an_anchor(path):
    anchor = anchor_of(path)
    edit(path, ("UPDATE releases SET mu = 0.001, sigma = 4096000 WHERE number = 3",))
    rehash(path)
    refuses(path, "row 3 does not hold, its totals are not those of the rows so far")
    edit(path, ("UPDATE releases SET message = 'x', mu = 0.01, sigma = 409600 WHERE number = 3",))
    rehash(path)
    refuses(path, "row 6 does not hold, an anchor saw another one", [anchor])
    with Ledger.open(path) as ledger:
        ledger.verify()


def test_a_row_that_no_charge_could_have_made_is_found(path):
    edit(path, ("UPDATE releases SET sigma = 1 WHERE number = 6",))
    rehash(path)
    refuses(path, "row 6 does not hold, it is not one that could be charged")


def test_a_row_beyond_the_budget_is_found(tmp_path):
    path = tmp_path / "small.sqlite"
    with Ledger.create(tmp_path / "large.sqlite", epsilon=10.0, delta=1e-5) as ledger:
        ledger.charge([make_charge(0.2), make_charge(0.2)])
    Ledger.create(path, epsilon=1.0, delta=1e-5).close()
    edit(
        path,
        ("ATTACH ? AS large", str(tmp_path / "large.sqlite")),
        ("INSERT INTO releases SELECT * FROM large.releases",),
    )
    refuses(path, "row 1 does not hold, it does not follow")
    rehash(path)
    refuses(path, "row 2 does not hold, it exceeds the lifetime budget")


@pytest.mark.parametrize("empty", [False, True])
def test_an_edited_header_is_found(path, tmp_path, empty):
    if empty:
        path = tmp_path / "empty.sqlite"
        Ledger.create(path, epsilon=1.0, delta=1e-5).close()
    anchor = anchor_of(path)
    with closing(sqlite3.connect(path)) as connection:
        [(content,)] = connection.execute("SELECT content FROM header")
    header = json.loads(content)
    changes = {
        "epsilon": [2.0, "1", None, -1.0],
        "delta": [1e-4],
        "unit": ["client", "person"],
        "adjacency": ["replace_one"],
        "dataset": ["another", 5],
        "id": ["0" * 32],
        "format": [0],
    }
    for name, values in changes.items():
        for value in values:
            assert value != header[name]
            text = json.dumps(header | {name: value}, sort_keys=True, separators=(",", ":"))
            edit(path, ("UPDATE header SET content = ?", text))
            refuses(path, "its header was changed")
            mended = hashlib.sha256(text.encode()).hexdigest()
            edit(path, ("UPDATE header SET content = ?, hash = ?", text, mended))
            refuses(path, "header was changed|row [01] does not hold", [anchor])
            edit(
                path,
                ("UPDATE header SET content = ?", content),
                ("UPDATE header SET hash = ?", hashlib.sha256(content.encode()).hexdigest()),
            )
    with Ledger.open(path) as ledger:
        ledger.verify([anchor])
    for statement in ("DELETE FROM header", "UPDATE header SET content = x'00'"):
        edit(path, (statement,))
        refuses(path, "its header was changed")


def test_a_header_exchanged_under_a_ledger_in_use_does_not_widen_its_budget(path):
    with Ledger.open(path) as ledger:
        with closing(sqlite3.connect(path)) as connection:
            [(content,)] = connection.execute("SELECT content FROM header")
        text = content.replace('"epsilon":1.0', '"epsilon":9.0')
        mended = hashlib.sha256(text.encode()).hexdigest()
        edit(path, ("UPDATE header SET content = ?, hash = ?", text, mended))
        with pytest.raises(LedgerError, match="its header was changed"):
            ledger.verify()
        with pytest.raises(BudgetExceeded):
            ledger.charge(make_charge(0.4))


@pytest.mark.parametrize("swap", [(1, 2), (3, 6), (5, 6)])
def test_swapped_rows_are_found(path, swap):
    anchor = anchor_of(path)
    one, two = swap
    move = "UPDATE releases SET number = ? WHERE number = ?"
    edit(path, (move, 99, one), (move, one, two), (move, two, 99))
    refuses(path, f"row {one} does not hold, it was changed")
    rehash(path)
    refuses(path, "its totals are not|an anchor saw another one", [anchor])


def test_a_missing_row_is_found(path, tmp_path):
    for number in (1, 3, 5):
        copy = tmp_path / f"{number}.sqlite"
        shutil.copy(path, copy)
        edit(copy, ("DELETE FROM releases WHERE number = ?", number))
        refuses(copy, rf"row {number} does not hold, it is missing|of 6 rows, 5 are here")


@pytest.mark.parametrize("left", [0, 3, 5])
def test_missing_last_rows_are_found_against_an_anchor(path, left):
    with Ledger.open(path) as ledger:
        anchors = [Anchor(row.number, row.hash) for row in ledger.rows()]
    edit(path, ("DELETE FROM releases WHERE number > ?", left))
    refuses(path, f"row {left + 1} does not hold, an anchor saw 6 rows", anchors[-1:])
    with Ledger.open(path) as ledger:
        ledger.verify(anchors[:left])


def test_an_older_copy_is_found_against_an_anchor_even_when_it_went_on_differently(path, tmp_path):
    copy = tmp_path / "copy.sqlite"
    shutil.copy(path, copy)
    with Ledger.open(path) as ledger:
        later = ledger.charge(make_charge(step=5))
    refuses(copy, "row 7 does not hold, an anchor saw 7 rows", [later])
    with Ledger.open(copy) as ledger:
        ledger.charge([make_charge(step=6), make_charge(step=7)])
    refuses(copy, "row 7 does not hold, an anchor saw another one", [later])


def test_a_crash_leaves_the_last_rows_in_the_log_and_losing_that_is_found(path, tmp_path):
    crashed, without_log = tmp_path / "crashed", tmp_path / "without_log"
    for folder in (crashed, without_log):
        folder.mkdir()
    with Ledger.open(path) as ledger:
        anchor = ledger.charge(make_charge())
        for end in ("", "-wal"):
            shutil.copy(f"{path}{end}", crashed)
        shutil.copy(path, without_log)
    with Ledger.open(crashed / path.name) as ledger:
        ledger.verify([anchor])
        assert ledger.anchor() == anchor
    refuses(without_log / path.name, "row 7 does not hold, an anchor saw 7 rows", [anchor])


def test_rows_lost_under_a_ledger_in_use_are_found_at_the_next_charge(path):
    with Ledger.open(path) as ledger:
        ledger.charge(make_charge())
        edit(path, ("DELETE FROM releases WHERE number = 7",))
        for use in (ledger.anchor, lambda: ledger.charge(make_charge())):
            with pytest.raises(LedgerError, match="row 7 does not hold, it changed while"):
                use()
    assert len(stored(path)) == 6


def test_rows_that_others_add_are_checked_before_they_are_built_on(path):
    with Ledger.open(path) as ledger:
        row = list(stored(path)[-1])
        row[0] = 7
        marks = ", ".join("?" * len(row))
        edit(path, (f"INSERT INTO releases VALUES ({marks})", *row))  # noqa: S608
        with pytest.raises(LedgerError, match="row 7 does not hold, it was changed"):
            ledger.charge(make_charge())


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_removed_or_replaced_while_in_use_is_not_charged(path, tmp_path, how):
    copy = tmp_path / "copy.sqlite"
    shutil.copy(path, copy)
    with Ledger.open(path) as ledger:
        if how == "removed":
            path.unlink()
        else:
            os.replace(copy, path)
        with pytest.raises(LedgerError, match="removed or replaced while in use"):
            ledger.charge(make_charge())


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TRIGGER releases_delete",
        "DROP INDEX of_run",
        "CREATE TRIGGER forget AFTER INSERT ON releases BEGIN SELECT 1; END",
        "ALTER TABLE releases ADD COLUMN more",
        "CREATE VIEW other AS SELECT * FROM releases",
    ],
)
def test_changed_tables_are_found(path, statement):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
    refuses(path, "its tables were changed")


def test_an_index_that_disagrees_with_its_table_is_found(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        change = "UPDATE sqlite_master SET sql = replace(sql, '{}', '{}') WHERE name = 'of_client'"
        connection.execute(change.format("(client)", "(run)"))
        connection.execute("PRAGMA writable_schema = RESET")
        connection.execute("REINDEX of_client")
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(change.format("(run)", "(client)"))
    refuses(path, "SQLite finds it damaged")


@pytest.mark.parametrize(
    "anchor", [(1,), (-1, "0" * 64), (1, "0" * 63), (1, "x" * 64), (True, "0" * 64), "12", 5]
)
def test_an_anchor_that_cannot_be_one_is_refused(fresh, anchor):
    with pytest.raises(ParameterError, match="64 hexadecimal digits"):
        fresh.verify([anchor])


def test_a_file_cut_short_anywhere_is_found(path, tmp_path):
    with Ledger.open(path) as ledger:
        anchor = ledger.charge([make_charge(1e-4, step=step) for step in range(40)])
    content = path.read_bytes()
    pages = range(0, len(content), 4096)
    assert len(pages) > 10
    cut = tmp_path / "cut.sqlite"
    for size in (*pages, 1, 50, 100, 1000, len(content) - 1):
        cut.write_bytes(content[:size])
        if size in pages:
            cannot_be_charged(cut, "is damaged|is not a ledger")
        with pytest.raises(LedgerError):
            with Ledger.open(cut) as ledger:
                ledger.verify([anchor])
        assert cut.stat().st_size == size


@pytest.mark.parametrize(
    "content", [b"", b"garbage", bytes(range(256)) * 64, b"SQLite format 3\0" + bytes(5000)]
)
def test_a_file_that_is_not_a_ledger_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    for read_only in (False, True):
        with pytest.raises(LedgerError, match=r"not a ledger|damaged"):
            Ledger.open(path, read_only=read_only)
    assert path.read_bytes() == content


def test_another_database_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE releases (number)")
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="is not a ledger"):
        Ledger.open(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("version", "message"), [(2, "update secure-fedclust"), (0, "changed")])
def test_a_ledger_of_another_format_is_refused(path, version, message):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    cannot_be_charged(path, message)
    assert len(stored(path)) == 6


def test_a_flipped_bit_is_found_or_changes_nothing(path, tmp_path):
    with Ledger.open(path) as ledger:
        rows, anchor = ledger.rows(), ledger.anchor()
    content = path.read_bytes()
    rng = random.Random(0)  # noqa: S311
    found = 0
    for _ in range(400):
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        copy = tmp_path / "flipped.sqlite"
        copy.write_bytes(flipped)
        try:
            with Ledger.open(copy) as ledger:
                ledger.verify([anchor])
                assert ledger.rows() == rows
                assert ledger.sent("oslo", "run 1", 0, b"request") == b"reply"
        except LedgerError:
            found += 1
        for name in tmp_path.glob("flipped*"):
            name.unlink()
    assert found > 50


def test_errors_quote_neither_requests_nor_replies(path):
    edit(path, ("UPDATE outbox SET reply = ?", b"secret reply"))
    text = refuses(path)
    with Ledger.open(path) as ledger:
        for use in (ledger.sent, lambda *key: ledger.keep(*key, b"a secret too")):
            with pytest.raises(LedgerError) as caught:
                use("oslo", "run 1", 0, b"secret request")
            text += str(caught.value)
    assert "secret" not in text


@pytest.fixture
def lock_down():
    """A function that makes a file or folder read-only, for root too."""
    locked = []

    def lock(place):
        if os.geteuid():
            place.chmod(place.stat().st_mode & ~0o222)
        elif subprocess.run(["chattr", "+i", place], capture_output=True).returncode:  # noqa: S603, S607
            pytest.skip("root can write everything here")
        locked.append(place)

    yield lock
    for place in locked:
        if os.geteuid():
            place.chmod(place.stat().st_mode | 0o200)
        else:
            subprocess.run(["chattr", "-i", place], check=True)  # noqa: S603, S607


def test_a_ledger_that_cannot_be_written_can_be_read(path, lock_down):
    lock_down(path)
    cannot_be_charged(path, "make the file and its folder writable")
    with Ledger.open(path, read_only=True) as ledger:
        ledger.verify()
        with pytest.raises(LedgerError, match="opened for reading"):
            ledger.charge(make_charge())
        with pytest.raises(LedgerError, match="opened for reading"):
            ledger.keep("oslo", "run 1", 9, b"", b"")
        assert ledger.anchor().rows == 6


def test_a_ledger_in_a_folder_that_cannot_be_written_can_be_read(path, lock_down):
    lock_down(path.parent)
    cannot_be_charged(path, "make the file and its folder writable")
    with pytest.raises(LedgerError, match="cannot be made"):
        Ledger.create(path.parent / "new.sqlite", epsilon=1.0, delta=1e-5)
    with Ledger.open(path, read_only=True) as ledger:
        ledger.verify()
        assert ledger.anchor().rows == 6


def test_rows_in_a_log_that_cannot_be_read_are_not_overlooked(path, tmp_path, lock_down):
    folder = tmp_path / "copy"
    folder.mkdir()
    with Ledger.open(path) as ledger:
        ledger.charge(make_charge())
        for end in ("", "-wal"):
            shutil.copy(f"{path}{end}", folder)
    lock_down(folder)
    with pytest.raises(LedgerError, match="cannot be opened"):
        Ledger.open(folder / path.name, read_only=True)


def test_reading_leaves_no_files_behind(path):
    with Ledger.open(path, read_only=True) as ledger:
        ledger.verify()
    assert list(path.parent.iterdir()) == [path]


def test_nothing_is_charged_or_lost_when_pages_run_out(path):
    with Ledger.open(path) as ledger:
        connection = ledger._store._connection
        [pages] = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(LedgerError, match="the disk is full: free some space"):
            ledger.keep("oslo", "run 1", 5, b"request", bytes(10_000))
        charged = 0
        with pytest.raises(LedgerError, match="the disk is full"):
            while True:
                ledger.charge([make_charge(1e-4, step=step) for step in range(3)])
                charged += 3
        assert ledger.anchor().rows == 6 + charged
        connection.execute(f"PRAGMA max_page_count = {pages + 100}")
        assert ledger.charge(make_charge(1e-4)).rows == 6 + charged + 1
        ledger.verify()
        assert ledger.sent("oslo", "run 1", 5, b"request") is None


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder]
    try:
        done = subprocess.run(command, capture_output=True)  # noqa: S603
    except OSError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)  # noqa: S603, S607


def test_nothing_is_charged_or_lost_when_the_disk_runs_full(small_disk):
    path = small_disk / "ledger.sqlite"
    with Ledger.create(path, epsilon=1.0, delta=1e-5) as ledger:
        rows = 0
        with pytest.raises(LedgerError, match="the disk is full"):
            while rows < 10_000:
                rows = ledger.charge(make_charge(1e-4, step=rows)).rows
        assert ledger.anchor().rows == rows > 0
        with pytest.raises(LedgerError, match="the disk is full"):
            ledger.keep("oslo", "run 1", 0, b"request", bytes(200_000))
        files = set(small_disk.iterdir())
        with pytest.raises(LedgerError, match="the disk is full"):
            Ledger.create(small_disk / "another.sqlite", epsilon=1.0, delta=1e-5)
        assert set(small_disk.iterdir()) == files
    shutil.copy(path, path.parent.parent)
    with Ledger.open(path.parent.parent / path.name) as ledger:
        ledger.verify([Anchor(rows, ledger.anchor().head)])
