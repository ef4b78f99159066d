import dataclasses
import hashlib
import json
import math
import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fedclust.errors import BudgetExceeded, LedgerError, ParameterError
from secure_fedclust.privacy import store
from secure_fedclust.privacy.accounting import Limit, compose, epsilon_of
from secure_fedclust.privacy.ledger import Anchor, Charge, Ledger

PROCESSES = Path(__file__).with_name("ledger_processes.py")
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "ledger.py"


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


def stored(path):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT * FROM releases ORDER BY number").fetchall()


def test_charges_are_rows_in_order_with_the_hash_of_the_row_before(path):
    with Ledger.open(path) as ledger:
        rows = ledger.rows()
        assert [row.number for row in rows] == [1, 2, 3, 4, 5, 6]
        assert [row.previous for row in rows[1:]] == [row.hash for row in rows[:-1]]
        assert rows[2].charge == make_charge(step=1)
        assert ledger.clients() == ["oslo", "bergen"]
        assert [row.number for row in ledger.rows("bergen")] == [2, 4, 6]
        assert ledger.anchor() == Anchor(6, rows[-1].hash)
        assert ledger.path == path and ledger.dataset == "ward 7"
        assert (ledger.unit, ledger.adjacency) == ("record", "add_remove")
        assert ledger.limit == Limit.of(1.0, 1e-5)
        ledger.verify([ledger.anchor()])


def test_a_row_states_the_hash_of_all_its_other_columns(path):
    *values, digest = stored(path)[3]
    text = json.dumps(values, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == digest


@given(st.lists(st.tuples(st.floats(1e-9, 0.08), st.booleans()), min_size=1, max_size=10))
def test_what_is_spent_composes_per_client_and_is_never_below_the_exact_sum(spending):
    with Ledger.create(None, epsilon=1.0, delta=1e-5) as ledger:
        for mu, oslo in spending:
            ledger.charge(make_charge(mu, "oslo" if oslo else "bergen"))
        for client in ledger.clients():
            mus = [mu for mu, oslo in spending if oslo == (client == "oslo")]
            assert ledger.spent(client) == pytest.approx(compose(mus), rel=1e-12)
            assert ledger.totals(client).squared_mu >= math.fsum(mu * mu for mu in mus)
            assert ledger.rows(client)[-1].cumulative_mu == ledger.spent(client)
        assert ledger.spent("nobody") == 0.0
        ledger.verify()


def test_a_mu_that_was_rounded_down_counts_in_full(fresh):
    exact = 0.1
    fresh.charge(make_charge(exact, mu=exact * (1 - 5e-10)))
    assert fresh.spent("oslo") >= exact


def test_many_equal_shares_fill_a_budget_exactly(fresh):
    share = fresh.limit.mu / math.sqrt(200)
    fresh.charge([make_charge(share, step=step) for step in range(200)])
    with pytest.raises(BudgetExceeded):
        fresh.charge(make_charge(fresh.limit.mu * 1e-3))
    assert epsilon_of(1e-5, fresh.spent("oslo")) <= 1.0


def test_a_release_beyond_the_lifetime_budget_is_refused_with_all_figures(fresh):
    fresh.charge(make_charge(0.2))
    before = fresh.anchor()
    with pytest.raises(BudgetExceeded) as caught:
        fresh.charge(make_charge(0.25))
    for part in (
        "client 'oslo', fkm/sums",
        f"spent mu=0.2 (epsilon {epsilon_of(1e-5, 0.2):.6g})",
        f"asked mu=0.25 (epsilon {epsilon_of(1e-5, 0.25):.6g})",
        f"limit mu={fresh.limit.mu:.6g} (epsilon 1) of the lifetime budget, at delta 1e-05",
        "Nothing was charged",
    ):
        assert part in str(caught.value)
    assert fresh.anchor() == before
    fresh.charge(make_charge(0.25, "bergen"))
    fresh.charge(make_charge(0.1))


def test_the_lifetime_budget_holds_over_runs_and_reopenings(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=1.0, delta=1e-5).close()
    for run in ("a", "b"):
        with Ledger.open(path) as ledger:
            ledger.charge(make_charge(0.15, run=run))
    with Ledger.open(path) as ledger:
        with pytest.raises(BudgetExceeded, match="lifetime"):
            ledger.charge(make_charge(0.17, run="c"))
        assert ledger.totals("oslo", "b").mu == pytest.approx(0.15)
        assert ledger.totals("oslo", "c").mu == 0


def test_a_plan_limits_each_client_in_its_run_and_nothing_else():
    plan = Limit.of(1.0, 1e-5)
    with Ledger.create(None, epsilon=5.0, delta=1e-5) as ledger:
        ledger.charge(make_charge(0.2), plan=plan)
        ledger.charge(make_charge(0.2, run="run 2"), plan=plan)
        with pytest.raises(BudgetExceeded, match=r"asked mu=0.2 .* of the plan of run 'run 1'"):
            ledger.charge(make_charge(0.2), plan=plan)
        ledger.charge(make_charge(0.2, "bergen"), plan=plan)
        ledger.charge(make_charge(0.2))
        with pytest.raises(BudgetExceeded, match="plan of run 'run 1'"):
            ledger.charge(make_charge(1e-3), plan=plan)


def test_runs_that_take_turns_have_totals_of_their_own(fresh):
    for step in range(3):
        for run in ("a", "b"):
            fresh.charge(make_charge(0.01, run=run, step=step))
    assert fresh.totals("oslo", "a").mu == pytest.approx(0.01 * math.sqrt(3))
    assert fresh.totals("oslo").mu == pytest.approx(0.01 * math.sqrt(6))
    assert fresh.totals("oslo").coordinates == 180
    fresh.verify()


def test_a_batch_is_charged_whole_or_not_at_all(fresh):
    start = fresh.anchor()
    batch = [make_charge(0.2, "bergen"), make_charge(0.2), make_charge(0.2)]
    with pytest.raises(BudgetExceeded, match=r"'oslo', fkm/sums: spent mu=0 .* asked mu=0.282843"):
        fresh.charge(batch)
    assert fresh.anchor() == start and fresh.rows() == []
    assert fresh.charge(batch[:2]).rows == 2
    with pytest.raises(ParameterError, match="at least one"):
        fresh.charge([])
    with pytest.raises(ParameterError, match="give a Charge"):
        fresh.charge([0.1])


def test_a_refused_batch_of_several_runs_is_forgotten_entirely(fresh):
    fresh.charge(make_charge(0.1))
    with pytest.raises(BudgetExceeded):
        fresh.charge([make_charge(0.1), make_charge(0.1, run="run 2"), make_charge(0.25)])
    fresh.charge([make_charge(0.1), make_charge(0.1, run="run 2")])
    assert fresh.spent("oslo") == pytest.approx(0.1 * math.sqrt(3))
    fresh.verify()


def test_slack_and_numbers_released_are_limited_too(fresh):
    with pytest.raises(BudgetExceeded, match=r"slack.*asked 0.1, limit 0.0001.*finer grid"):
        fresh.charge(make_charge(slack=0.1))
    with pytest.raises(BudgetExceeded, match=f"numbers released.*asked {1 << 41}"):
        fresh.charge(make_charge(coordinates=1 << 41))
    for mu in (10.0, 1e9, 1e160):
        with pytest.raises(BudgetExceeded, match="asked mu="):
            fresh.charge(make_charge(mu=mu, sigma=1.0, sensitivity=mu))
    assert fresh.anchor().rows == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mu": 0.0}, "mu=0.0"),
        ({"mu": math.nan}, "mu=nan"),
        ({"mu": 0.0100001}, "give sensitivity / sigma, which is 0.01"),
        ({"sigma": math.inf}, "sigma=inf"),
        ({"sigma": -1.0}, "sigma=-1.0"),
        ({"sensitivity": True}, "sensitivity=True"),
        ({"slack": -1e-9}, "slack=-1e-09"),
        ({"slack": math.inf}, "slack=inf"),
        ({"slack": "0"}, "slack='0'"),
        ({"coordinates": 0}, "coordinates=0"),
        ({"coordinates": 1.0}, "coordinates=1.0"),
        ({"coordinates": 1 << 60}, r"2\*\*53"),
        ({"step": -1}, "step=-1"),
        ({"step": True}, "step=True"),
        ({"step": 1 << 60}, "step="),
        ({"client": ""}, "client=''"),
        ({"client": "a\nb"}, r"client='a\\nb'"),
        ({"client": "\ud800"}, "client="),
        ({"run": "r" * 257}, "run has 257 characters"),
        ({"message": None}, "message=None"),
        ({"formula": ""}, "formula=''"),
        ({"inputs": {"a": math.nan}}, r"inputs\['a'\]=nan"),
        ({"inputs": {"": 1.0}}, "a name in inputs=''"),
        ({"inputs": {str(i): 1.0 for i in range(65)}}, "at most 64"),
        ({"inputs": 3}, "give a mapping"),
    ],
)
def test_a_charge_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ParameterError, match=message):
        make_charge(**changes)


def test_a_charge_is_frozen_and_keeps_its_own_plain_numbers(fresh):
    inputs = {"n": 5}
    charge = make_charge(
        np.float64(0.01), inputs=inputs, slack=-0.0, step=np.int64(3), coordinates=np.int32(2)
    )
    inputs["n"] = 6
    fresh.charge(charge)
    [row] = fresh.rows()
    assert row.charge == charge and row.charge.inputs == {"n": 5.0}
    assert type(charge.mu) is float and type(charge.step) is int
    fresh.verify()
    with pytest.raises(dataclasses.FrozenInstanceError):
        charge.mu = 0.0


def test_odd_names_and_small_and_large_numbers_survive_storing(tmp_path):
    path = tmp_path / "odd ?name#100%.sqlite"
    tiny = {"mu": 1e-200, "sensitivity": 1e-100, "sigma": 1e100}
    odd = make_charge(client="Ålesund ✓ 'x' \"y\"", inputs={"b": 1e308, "a": -0.0}, **tiny)
    with Ledger.create(path, epsilon=1.0, delta=1e-5, dataset="Ærø") as ledger:
        ledger.charge([odd, odd])
    with Ledger.open(path) as ledger:
        ledger.verify()
        assert ledger.rows()[0].charge == odd
        assert 0 < ledger.spent(odd.client) < 1e-150
        assert ledger.dataset == "Ærø"
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon=0.0"),
        ({"epsilon": 1000.0}, "epsilon=1000.0"),
        ({"epsilon": "1"}, "epsilon='1'"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"delta": math.nan}, "delta=nan"),
        ({"unit": "person"}, "unit='person'"),
        ({"adjacency": "swap"}, "adjacency='swap'"),
        ({"dataset": "a\nb"}, "dataset="),
    ],
)
def test_a_budget_that_makes_no_sense_leaves_no_file(tmp_path, changes, message):
    given = {"epsilon": 1.0, "delta": 1e-5} | changes
    with pytest.raises(ParameterError, match=message):
        Ledger.create(tmp_path / "ledger.sqlite", **given)
    assert list(tmp_path.iterdir()) == []


def test_a_new_ledger_never_takes_the_place_of_another(path):
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="is there already"):
        Ledger.create(path, epsilon=9.0, delta=1e-5)
    assert path.read_bytes() == before
    path.rename(path.with_name("moved"))
    Path(f"{path}-wal").write_bytes(b"rows that were not written back yet")
    with pytest.raises(LedgerError, match="-wal is there already"):
        Ledger.create(path, epsilon=9.0, delta=1e-5)


def test_a_ledger_needs_a_folder_and_a_file(tmp_path):
    with pytest.raises(LedgerError, match="cannot be made: No such file"):
        Ledger.create(tmp_path / "absent" / "ledger.sqlite", epsilon=1.0, delta=1e-5)
    for name in (tmp_path, tmp_path / "absent"):
        with pytest.raises(LedgerError, match=r"there is no ledger .*secure-fedclust ledger init"):
            Ledger.open(name)
    assert list(tmp_path.iterdir()) == []


def test_only_the_owner_can_read_any_of_its_files(tmp_path):
    path = tmp_path / "ledger.sqlite"
    old = os.umask(0)
    try:
        with Ledger.create(path, epsilon=1.0, delta=1e-5) as ledger:
            ledger.charge(make_charge())
            files = sorted(tmp_path.iterdir())
            assert [f.name[len(path.name) :] for f in files] == ["", "-shm", "-wal"]
            assert {stat.S_IMODE(f.stat().st_mode) for f in files} == {0o600}
    finally:
        os.umask(old)


def test_commits_are_synced_and_logged_ahead(path):
    with Ledger.open(path) as ledger:
        connection = ledger._store._connection
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_file_that_was_set_to_another_journal_is_set_back(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    test_commits_are_synced_and_logged_ahead(path)


def test_a_disk_on_which_commits_cannot_be_made_durable_is_refused(path):
    with closing(sqlite3.connect(":memory:")) as connection:
        with pytest.raises(LedgerError, match=r"journal_mode=memory.*put it on a local disk"):
            store._make_durable(connection, path)


def test_a_closed_ledger_says_so(path):
    ledger = Ledger.open(path)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="is closed: open it again"):
        ledger.charge(make_charge())
    with pytest.raises(LedgerError, match="is closed"):
        ledger.spent("oslo")


def test_the_repr_tells_the_budget_and_no_client(path):
    with Ledger.open(path) as ledger:
        text = repr(ledger)
    assert str(path) in text and "epsilon=1," in text and "ward 7" in text
    assert "oslo" not in text and "run" not in text


def test_threads_take_turns_on_one_ledger(path):
    with Ledger.open(path) as ledger:

        def work():
            for step in range(20):
                ledger.charge(make_charge(1e-3, threading.current_thread().name, step=step))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ledger.verify()
        assert ledger.anchor().rows == 6 + 80


def test_two_objects_on_one_file_see_each_other(path):
    with Ledger.open(path) as one, Ledger.open(path) as other:
        one.charge(make_charge(0.2, "bergen"))
        assert other.spent("bergen") == one.spent("bergen")
        with pytest.raises(BudgetExceeded):
            other.charge(make_charge(0.2, "bergen"))
        assert other.charge(make_charge()).rows == 8
        assert one.anchor() == other.anchor()
        one.verify([other.anchor()])


names = st.sampled_from(["a", "b"])
batches = st.lists(
    st.tuples(names, names, st.sampled_from([0.02, 0.05, 0.1])), min_size=1, max_size=4
)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 1), batches, st.booleans()), max_size=12))
def test_objects_that_take_turns_on_one_file_agree_with_a_plain_count(turns):
    plan = Limit.of(0.6, 1e-5)
    spent = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        with Ledger.create(path, epsilon=1.0, delta=1e-5) as one, Ledger.open(path) as other:
            for turn, batch, planned in turns:
                ledger = (one, other)[turn]
                more = Counter()
                for client, run, mu in batch:
                    more += Counter({(client,): mu * mu, (client, run): mu * mu})
                limits = {1: one.limit.mu, 2: plan.mu if planned else math.inf}
                fits = all(
                    spent[key] + more[key] <= limits[len(key)] ** 2 * (1 + 1e-12) for key in more
                )
                charges = [make_charge(mu, client, run=run) for client, run, mu in batch]
                try:
                    ledger.charge(charges, plan=plan if planned else None)
                except BudgetExceeded:
                    assert not fits
                else:
                    assert fits
                    spent += more
            for key, squared in spent.items():
                for ledger in (one, other):
                    assert ledger.totals(*key).squared_mu == pytest.approx(squared, rel=1e-12)
            one.verify([other.anchor()])


def test_a_ledger_that_stays_locked_is_given_up_on(path, monkeypatch):
    monkeypatch.setattr(store, "BUSY_SECONDS", 0.05)
    with Ledger.open(path) as ledger, closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="another process has locked it"):
            ledger.charge(make_charge())
        other.execute("ROLLBACK")
        assert ledger.charge(make_charge()).rows == 7


def test_a_kept_reply_is_sent_again_verbatim_and_only_for_its_request(path):
    with Ledger.open(path) as ledger:
        assert ledger.sent("oslo", "run 1", 0, b"request") == b"reply"
        for other in (("oslo", "run 1", 1), ("oslo", "run 2", 0), ("bergen", "run 1", 0)):
            assert ledger.sent(*other, b"request") is None
        with pytest.raises(LedgerError, match="'oslo' has answered another request at step 0"):
            ledger.sent("oslo", "run 1", 0, b"another")
        ledger.keep("oslo", "run 1", 0, b"request", b"reply")
        with pytest.raises(LedgerError, match="send the reply that `sent` returns"):
            ledger.keep("oslo", "run 1", 0, b"request", b"drawn again")
        with pytest.raises(LedgerError, match="another request"):
            ledger.keep("oslo", "run 1", 0, b"another", b"reply")
        assert ledger.sent("oslo", "run 1", 0, b"request") == b"reply"
        with pytest.raises(ParameterError, match="reply: give bytes, not str"):
            ledger.keep("oslo", "run 1", 5, b"request", "reply")
        with pytest.raises(ParameterError, match="step=-1"):
            ledger.sent("oslo", "run 1", -1, b"request")


def test_the_request_itself_is_not_stored(path):
    with Ledger.open(path) as ledger:
        ledger.keep("oslo", "run 1", 7, b"what the server asked", b"the answer")
    content = path.read_bytes()
    assert b"the answer" in content and b"what the server asked" not in content


def test_keeping_a_reply_does_not_move_the_anchor(path):
    with Ledger.open(path) as ledger:
        before = ledger.anchor()
        ledger.keep("oslo", "run 1", 8, b"", bytes(100_000))
        assert ledger.anchor() == before
        assert ledger.sent("oslo", "run 1", 8, b"") == bytes(100_000)


def run(script, *arguments):
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_client_killed_at_any_of_200_points_has_charged_and_kept_all_it_released(tmp_path):
    report = json.loads(run(PROCESSES, "kill", tmp_path, 200))
    assert sum(report["phases"].values()) == 200
    assert {"charge", "keep", "release"} <= set(report["phases"]), "kills hit every phase"
    assert report["charged"] >= report["released"] > 20


def test_of_two_processes_that_race_for_the_last_of_a_budget_exactly_one_gets_it(tmp_path):
    assert len(json.loads(run(PROCESSES, "race", tmp_path, 20))["wins"]) == 20


def test_processes_that_charge_until_nothing_is_left_leave_exactly_nothing(tmp_path):
    assert sum(json.loads(run(PROCESSES, "crowd", tmp_path))["taken"]) == 60


def test_a_ledger_does_not_survive_a_fork(tmp_path):
    assert json.loads(run(PROCESSES, "fork", tmp_path))["code"] == 0


def test_the_benchmark_compares_charges_with_bare_commits(tmp_path):
    printed = run(BENCHMARK, "--dir", tmp_path, "--charges", 50, "--repeats", 1)
    assert "bare commits" in printed and "10 clients a commit" in printed
    assert "charges over bare commits" in printed.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
