"""Processes that share a ledger, race for its budget, and are killed.

    python ledger_processes.py kill FOLDER TIMES | race FOLDER TIMES | crowd FOLDER | fork FOLDER

A script of its own, so that children are forked from a process that has no other threads and has
everything imported, which makes 200 of them cheap. It prints what happened as JSON and fails
where something does not hold.
"""

import itertools
import json
import math
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections import Counter
from pathlib import Path

from secure_fedclust.errors import BudgetExceeded, LedgerError
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.ledger import Charge, Ledger

RECORD = struct.Struct("<q32s")
PHASES = ("open", "charge", "sample", "keep", "release")
LIFE = 25
LONGEST = 0.02


def charge(mu, step=0):
    return Charge("client", "run", step, "sums", "ball", {}, 4096.0, 4096.0 / mu, mu, 1e-9, 1)


def fork(job):
    """Run a job in a child whose exit code it returns; whatever it raises is 99."""
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        code = job()
    except BaseException as error:
        print(repr(error), file=sys.stderr)
    finally:
        os._exit(code)


def exit_code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def answer_steps(folder, phase):
    """What a client does: the last step again, in case its reply was lost, and then new ones."""
    released = read_released(folder)
    with (
        Ledger.open(folder / "ledger.sqlite") as ledger,
        (folder / "released").open("ab", buffering=0) as out,
    ):
        for step in itertools.count(released[-1][0] if released else 0):
            request = b"step %d" % step
            reply = ledger.sent("client", "run", step, request)
            if reply is None:
                phase[0] = PHASES.index("charge")
                ledger.charge(charge(1e-3, step))
                phase[0] = PHASES.index("sample")
                reply = os.urandom(32)
                phase[0] = PHASES.index("keep")
                ledger.keep("client", "run", step, request, reply)
            phase[0] = PHASES.index("release")
            out.write(RECORD.pack(step, reply))
            os.fsync(out.fileno())


def read_released(folder):
    content = (folder / "released").read_bytes()
    assert len(content) % RECORD.size == 0, "a record is released at once"
    return list(RECORD.iter_unpack(content))


def check(folder, anchor):
    """What was released is in the outbox, and was charged; nothing went back."""
    released = read_released(folder)
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        ledger.verify([anchor])
        replies = {}
        for step, reply in released:
            replies.setdefault(step, set()).add(reply)
        charges = Counter(row.charge.step for row in ledger.rows())
        for step, drawn in replies.items():
            assert drawn == {ledger.sent("client", "run", step, b"step %d" % step)}
            assert charges[step] >= len(drawn)
        drawn = sum(map(len, replies.values()))
        assert ledger.spent("client") >= math.sqrt(drawn * 1e-3**2)
        return ledger.anchor(), drawn


def kill(folder, times):
    rng = random.Random(time.time_ns())  # noqa: S311
    phase = mmap.mmap(-1, 1)
    phases, charged, released = Counter(), 0, 0
    for start in range(0, times, LIFE):
        life = folder / str(start)
        life.mkdir()
        (life / "released").touch()
        with Ledger.create(life / "ledger.sqlite", epsilon=1.0, delta=1e-5) as ledger:
            anchor = ledger.anchor()
        for i in range(min(LIFE, times - start)):
            phase[0] = PHASES.index("open")
            child = fork(lambda life=life: answer_steps(life, phase))
            # Every other one gets to work however busy the machine is.
            deadline = time.monotonic() + 30
            while i % 2 and not phase[0] and time.monotonic() < deadline:
                time.sleep(1e-4)
            time.sleep(rng.uniform(0, LONGEST))
            os.kill(child, signal.SIGKILL)
            assert exit_code(child) == -signal.SIGKILL, "it works until it is killed"
            phases[PHASES[phase[0]]] += 1
            anchor, drawn = check(life, anchor)
        charged += anchor.rows
        released += drawn
    return {"phases": phases, "charged": charged, "released": released}


def together(jobs):
    """Start jobs at the same moment, as nearly as that can be done."""
    reader, writer = os.pipe()

    def wait_and(job):
        os.close(writer)
        return job(lambda: os.read(reader, 1))

    children = [fork(lambda job=job: wait_and(job)) for job in jobs]
    time.sleep(0.01)
    os.close(writer)
    codes = [exit_code(child) for child in children]
    os.close(reader)
    return codes


def race(folder, times):
    """Two processes for the last of a budget, the ledger's and the plan's in turn."""
    wins = []
    for i in range(times):
        path = folder / f"{i}.sqlite"
        with Ledger.create(path, epsilon=1.0, delta=1e-5) as ledger:
            share = 0.6 * ledger.limit.mu
            plan = None
        if i % 2:
            plan, path = Limit.of(1.0, 1e-5), folder / f"{i}-wide.sqlite"
            Ledger.create(path, epsilon=10.0, delta=1e-5).close()
        with Ledger.open(path) as ledger:
            ledger.charge(charge(share), plan=plan)

        def take(ready, path=path, share=share, plan=plan):
            with Ledger.open(path) as ledger:
                ready()
                try:
                    ledger.charge(charge(share), plan=plan)
                except BudgetExceeded:
                    return 5
            return 0

        codes = together([take, take])
        assert sorted(codes) == [0, 5], codes
        wins.append(codes.index(0))
        with Ledger.open(path) as ledger:
            ledger.verify()
            assert ledger.anchor().rows == 2
    return {"wins": wins}


def crowd(folder):
    """Four processes that charge until nothing is left leave exactly nothing."""
    path = folder / "ledger.sqlite"
    with Ledger.create(path, epsilon=1.0, delta=1e-5) as ledger:
        share = ledger.limit.mu / math.sqrt(60.5)

    def take_all(ready):
        with Ledger.open(path) as ledger:
            ready()
            for step in itertools.count():
                try:
                    ledger.charge(charge(share, step))
                except BudgetExceeded:
                    return step
        return None

    codes = together([take_all] * 4)
    with Ledger.open(path) as ledger:
        ledger.verify()
        assert ledger.anchor().rows == sum(codes) == 60, codes
    return {"taken": codes}


def use_after_fork(folder):
    """A child that goes on with its parent's ledger is refused, and does no harm to it."""
    with Ledger.create(folder / "ledger.sqlite", epsilon=1.0, delta=1e-5) as ledger:

        def go_on():
            try:
                ledger.charge(charge(0.1))
            except LedgerError as error:
                ledger.close()
                return 0 if "opened in another process" in str(error) else 1
            return 2

        code = exit_code(fork(go_on))
        ledger.charge(charge(0.1))
    return {"code": code}


if __name__ == "__main__":
    what, folder, *more = sys.argv[1:]
    job = {"kill": kill, "race": race, "crowd": crowd, "fork": use_after_fork}[what]
    print(json.dumps(job(Path(folder), *map(int, more))))
