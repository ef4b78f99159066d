"""Runs that are killed and begun again: at every exchange, with every protection."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from secure_fedclust import (
    FKM,
    CheckpointError,
    Ledger,
    LedgerError,
    ParameterError,
)
from secure_fedclust.audit.report.folder import write_report
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.messages import read_envelope
from secure_fedclust.privacy import mechanism
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.protocols import fedcref_private
from secure_fedclust.protocols.checkpoint import Journal, Memory, load_arrays, save_arrays

from .neural_world import (
    ENCRYPTED,
    MASKED,
    NONE,
    SPEC,
    WHOLE,
    deepfeca,
    fedcref,
    federation,
    overheard,
    quietly,
    squared_mus,
    stage_of,
)

CLIENTS = federation(30)


@pytest.fixture(autouse=True)
def many_features(monkeypatch):
    """Have the clients' records take part in all that is done with many features."""
    monkeypatch.setattr(fedcref_private, "DIRECTIONS", 3)


QUICK = {"start_epochs": 2, "n_rounds": 1, "theta": 50.0, "alpha": 0.1, "n_local_clusters": 2}
MAKERS = {
    "FedCRef": lambda spec=NONE, **changed: fedcref(spec, **QUICK | changed),
    "DeepFeCA": lambda spec=NONE, **changed: deepfeca(spec, **{"n_clusters": 2} | changed),
}
each_system = pytest.mark.parametrize("system", MAKERS)


class Killed(Exception):
    """Nobody in the package knows this, so that nobody holds it up."""


def fit(model, folder, *, after=None, clients=CLIENTS):
    """Fit in a folder; if told so, as long as so many replies have come."""
    seen = 0

    def count(done, total):
        nonlocal seen
        seen += 1
        if seen == after:
            raise Killed

    quietly(model.fit, clients, checkpoint=folder, on_progress=count)
    return model, seen


def killed(model, folder, after):
    with pytest.raises(Killed):
        fit(model, folder, after=after)


def same(first, second):
    np.testing.assert_array_equal(first.cluster_centers_, second.cluster_centers_)
    for a, b in zip(first.labels_, second.labels_, strict=True):
        np.testing.assert_array_equal(a, b)
    assert first.result_.networks.keys() == second.result_.networks.keys()
    for name, array in first.result_.networks.items():
        np.testing.assert_array_equal(array, second.result_.networks[name])
    stages = [(x.stage, x.asked, x.absent, dict(x.up)) for x in first.result_.history]
    assert stages == [(x.stage, x.asked, x.absent, dict(x.up)) for x in second.result_.history]


# Without protection.


@each_system
def test_a_run_killed_at_any_exchange_ends_as_if_it_had_not_been(system, tmp_path):
    whole, replies = fit(MAKERS[system](), tmp_path / "whole")
    for after in range(1, replies + 1, 2):
        folder = tmp_path / str(after)
        killed(MAKERS[system](), folder, after)
        same(fit(MAKERS[system](), folder)[0], whole)


@each_system
def test_a_run_that_is_killed_again_and_again_gets_there(system, tmp_path):
    whole, _ = fit(MAKERS[system](), tmp_path / "whole")
    for _ in range(60):
        try:
            model, _ = fit(MAKERS[system](), tmp_path / "often", after=4)
        except Killed:
            continue
        same(model, whole)
        return
    raise AssertionError("no progress was made")


@each_system
def test_a_folder_makes_no_difference_to_the_result(system, tmp_path):
    first, _ = fit(MAKERS[system](), tmp_path / "one")
    second, _ = fit(MAKERS[system](), tmp_path / "two")
    same(first, second)


@each_system
def test_a_run_that_is_over_is_read_and_nobody_is_asked(system, tmp_path):
    whole, _ = fit(MAKERS[system](), tmp_path)
    again, asked = fit(MAKERS[system](), tmp_path)
    assert asked <= 1  # that all is done
    same(again, whole)


@each_system
def test_the_first_run_decides_on_chance(system, tmp_path):
    whole, _ = fit(MAKERS[system](random_state=1), tmp_path / "whole")
    killed(MAKERS[system](random_state=1), tmp_path / "cut", 4)
    same(fit(MAKERS[system](random_state=2), tmp_path / "cut")[0], whole)


@each_system
def test_who_has_replied_is_not_asked_to_compute_again(system, tmp_path):
    whole = overheard(MAKERS[system](), CLIENTS, checkpoint=tmp_path / "whole")
    folder = tmp_path / "cut"
    killed(MAKERS[system](), folder, 5)
    heard = overheard(MAKERS[system](), CLIENTS, checkpoint=folder)
    # The exchange that was cut off is asked again; all before it are read.
    first = read_envelope(heard[0][1]).step
    assert first == read_envelope(whole[4][1]).step
    for (client, _, reply), (who, _, expected) in zip(heard, whole[-len(heard) :], strict=True):
        assert client == who
        assert len(reply) == len(expected)


SCRIPT = """
import importlib, sys
sys.path.insert(0, sys.argv[2])
world = importlib.import_module("protocols.test_checkpoint")
world.MAKERS["FedCRef"]().fit(
    world.CLIENTS, checkpoint=sys.argv[1], on_progress=lambda *_: print("reply", flush=True)
)
"""


def test_a_process_that_is_killed_leaves_a_run_that_can_be_resumed(tmp_path):
    tests = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "cut"), tests]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:  # noqa: S603
        for _ in range(5):
            assert process.stdout.readline() == "reply\n"
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    whole, _ = fit(MAKERS["FedCRef"](), tmp_path / "whole")
    resumed, asked = fit(MAKERS["FedCRef"](), tmp_path / "cut")
    assert asked > 0
    same(resumed, whole)


# With differential privacy: nothing is paid for twice but what is drawn twice.


def new_ledger(path, spec, epsilon=100.0):
    Ledger.create(path, epsilon=epsilon, delta=1e-5, unit=spec.unit).close()
    return path


PRIVATE = {
    "FedCRef local": ("FedCRef", SPEC),
    "FedCRef masking": ("FedCRef", MASKED),
    "DeepFeCA local": ("DeepFeCA", SPEC),
    "DeepFeCA masking": ("DeepFeCA", MASKED),
    "DeepFeCA client": ("DeepFeCA", WHOLE),
}
ENCRYPTING = {"FedCRef ckks": ("FedCRef", ENCRYPTED), "DeepFeCA ckks": ("DeepFeCA", ENCRYPTED)}


def private_run(name, folder, ledger, after=None):
    system, spec = (PRIVATE | ENCRYPTING)[name]
    model = MAKERS[system](spec, ledger=ledger)
    return fit(model, folder, after=after, clients=federation(60))


@pytest.fixture
def clear(monkeypatch):
    """Sums without noise, which is charged all the same: few records would drown in it."""
    monkeypatch.setattr(mechanism, "secure_noise", lambda sigma, size: np.zeros(size, np.int64))


def check_resumed(name, tmp_path, after, whole_rows):
    folder = tmp_path / f"run {after}"
    ledger = new_ledger(tmp_path / f"ledger {after}", (PRIVATE | ENCRYPTING)[name][1])
    with pytest.raises(Killed):
        private_run(name, folder, ledger, after)
    before = {c: len(Ledger.open(ledger).rows(c)) for c in CLIENTS}
    model, _ = private_run(name, folder, ledger)
    # Nobody was lost by it, and no exchange was left out.
    assert not [x.absent for x in model.result_.history if x.absent]
    limit = Limit.of(20.0, 1e-5)
    for client in CLIENTS:
        rows = model.ledger_.rows(client)
        assert len({row.charge.run for row in rows}) == 1
        assert len(rows) >= before[client]
        # At most one step is drawn again: a synopsis and its refinement, or FKM's rounds.
        assert whole_rows <= len(rows) <= whole_rows + 8
        assert squared_mus(model, client) <= limit.mu**2 * (1 + 1e-9)
    model.ledger_.verify(model.result_.anchors.values())
    # What was drawn again is in what the result says of its costs, or there would be no report.
    (reported := tmp_path / f"report {after}").mkdir()
    model.result_.save(reported / "result.json")
    write_report(reported, ledger=ledger)


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_run_killed_anywhere_is_resumed_within_its_budget(name, tmp_path, clear):
    whole, replies = private_run(name, tmp_path / "w", new_ledger(tmp_path / "l", SPEC_OF(name)))
    rows = len(whole.ledger_.rows("ada"))
    step = 4 if PRIVATE[name][1].protection == "none" else 7
    for after in range(2, replies + 1, step):
        check_resumed(name, tmp_path, after, rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIVATE | ENCRYPTING)
def test_a_private_run_killed_at_every_reply_is_resumed_within_its_budget(name, tmp_path, clear):
    whole, replies = private_run(name, tmp_path / "w", new_ledger(tmp_path / "l", SPEC_OF(name)))
    rows = len(whole.ledger_.rows("ada"))
    for after in range(1, replies + 1):
        check_resumed(name, tmp_path, after, rows)


def SPEC_OF(name):
    return (PRIVATE | ENCRYPTING)[name][1]


@each_system
def test_what_was_sent_is_sent_again_and_not_paid_for_again(system, tmp_path, clear):
    ledger = new_ledger(tmp_path / "ledger", SPEC)

    def run(**options):
        return overheard(
            MAKERS[system](SPEC, ledger=ledger), CLIENTS, checkpoint=tmp_path / "run", **options
        )

    sent = {}
    handle = InProcessEngine.exchange

    def listen(self, requests):
        for client, reply in handle(self, requests):
            sent.setdefault((client, requests[client]), reply)
            if len(sent) == 11:
                raise Killed
            yield client, reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessEngine, "exchange", listen)
        with pytest.raises(Killed):
            run()
    paid = {client: len(Ledger.open(ledger).rows(client)) for client in CLIENTS}
    heard = run()
    again = [(who, request) for who, request, _ in heard if (who, request) in sent]
    assert again
    for who, request, reply in heard:
        assert sent.get((who, request), reply) == reply
    rows = Ledger.open(ledger).rows("ada")
    keys = [(row.charge.step, row.charge.message) for row in rows]
    assert paid["ada"] <= len(rows)
    if system == "FedCRef":
        # A synopsis is several releases of one step.
        assert len(set(keys)) >= len(keys) - 3


@each_system
def test_a_sum_that_was_cut_off_is_asked_for_under_a_new_number(system, tmp_path, clear):
    ledger = new_ledger(tmp_path / "ledger", MASKED)
    heard = []
    exchange = InProcessEngine.exchange

    def listen(self, requests):
        for client, reply in exchange(self, requests):
            heard.append(requests[client])
            if stage_of(requests[client]) == "masking/mask":
                raise Killed
            yield client, reply

    model = MAKERS[system](MASKED, ledger=ledger)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessEngine, "exchange", listen)
        with pytest.raises(Killed):
            fit(model, tmp_path / "run", clients=federation(60))
    first = {read_envelope(r).step for r in heard if stage_of(r).startswith("masking")}
    again = overheard(
        MAKERS[system](MASKED, ledger=ledger), federation(60), checkpoint=tmp_path / "run"
    )
    second = {read_envelope(r).step for _, r, _ in again if stage_of(r).startswith("masking")}
    assert first and second
    assert not first & second
    assert max(first) < min(second)


def test_a_run_is_not_resumed_on_another_ledger_or_an_older_copy(tmp_path):
    ledger = new_ledger(tmp_path / "ledger", SPEC)
    early = (tmp_path / "ledger").read_bytes()
    with pytest.raises(Killed):
        private_run("FedCRef local", tmp_path / "run", ledger, 20)
    other = new_ledger(tmp_path / "other", SPEC)
    with pytest.raises(CheckpointError, match="another ledger"):
        private_run("FedCRef local", tmp_path / "run", other)
    assert not Ledger.open(other).rows()
    for path in tmp_path.glob("ledger-*"):
        path.unlink()
    (tmp_path / "ledger").write_bytes(early)
    with pytest.raises(LedgerError):
        private_run("FedCRef local", tmp_path / "run", ledger)


def test_a_run_may_be_resumed_on_a_ledger_that_has_room_for_one_run(tmp_path):
    ledger = new_ledger(tmp_path / "ledger", SPEC, epsilon=20.0)
    with pytest.raises(Killed):
        private_run("FedCRef local", tmp_path / "run", ledger, 8)
    private_run("FedCRef local", tmp_path / "run", ledger)


# Folders that are of no use.


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"n_local_clusters": 3}, "n_local_clusters"),
        ({"theta": 49.0}, "theta"),
        ({"hidden": (4, 2)}, "hidden"),
        ({"batch_size": 17}, "batch_size"),
        ({"max_iter": 2}, "max_iter"),
        ({"privacy": type(NONE).none(reason="another reason")}, "privacy"),
    ],
)
def test_a_folder_of_a_run_with_other_parameters_is_refused(changed, named, tmp_path):
    killed(MAKERS["FedCRef"](), tmp_path, 4)
    model = MAKERS["FedCRef"]().set_params(**changed)
    with pytest.raises(CheckpointError, match=f"another {named}"):
        fit(model, tmp_path)


def test_a_folder_of_another_system_is_refused(tmp_path):
    killed(MAKERS["FedCRef"](), tmp_path, 4)
    with pytest.raises(CheckpointError, match="another algorithm"):
        fit(MAKERS["DeepFeCA"](), tmp_path)


@pytest.mark.parametrize("names", [("ada", "bob"), ("ada", "bob", "dee"), ("bob", "ada", "cy")])
def test_a_folder_of_a_run_of_other_clients_is_refused(names, tmp_path):
    killed(MAKERS["FedCRef"](), tmp_path, 4)
    clients = {name: CLIENTS.get(name, CLIENTS["cy"]) for name in names}
    with pytest.raises(CheckpointError, match="clients ada, bob, cy"):
        fit(MAKERS["FedCRef"](), tmp_path, clients=clients)


def test_two_processes_cannot_have_a_folder_at_a_time(tmp_path):
    folder = tmp_path / "run"
    model, _ = fit(MAKERS["DeepFeCA"](), folder)
    begun = Journal(folder, json.loads((folder / "run.json").read_text())["settings"])
    with begun, pytest.raises(CheckpointError, match="another process is at the run"):
        fit(MAKERS["DeepFeCA"](), folder)
    same(fit(MAKERS["DeepFeCA"](), folder)[0], model)


def test_a_step_that_is_missing_is_named(tmp_path):
    folder = tmp_path / "run"
    fit(MAKERS["DeepFeCA"](), folder)
    (folder / "step-00001.npz").unlink()
    with pytest.raises(CheckpointError, match=r"step-00001.npz is missing"):
        fit(MAKERS["DeepFeCA"](), folder)


def test_a_folder_that_is_none_or_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        fit(MAKERS["DeepFeCA"](), tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be made"):
        fit(MAKERS["DeepFeCA"](), tmp_path / "file" / "run")


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("draft")
    with pytest.raises(CheckpointError, match="holds something else"):
        fit(MAKERS["FedCRef"](), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "draft"


DAMAGE = {
    "nothing": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "all but the end": lambda data: data[:-30],
    "noise": lambda data: bytes(len(data)),
    "text": lambda data: b"not what it was",
    "another archive": lambda data: save_arrays({"something": np.arange(3)}),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["run.json", "asked", "step-00000.npz", "step-00001.npz"])
def test_a_damaged_file_is_named(name, damage, tmp_path):
    killed(MAKERS["FedCRef"](), tmp_path, 8)
    path = tmp_path / name
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    if name == "asked" and damage == "half":
        return  # half of a number may be a number
    with pytest.raises(CheckpointError, match=name):
        fit(MAKERS["FedCRef"](), tmp_path)


@pytest.mark.parametrize("damage", DAMAGE)
@each_system
def test_a_damaged_file_of_a_client_is_named(system, damage, tmp_path):
    killed(MAKERS[system](), tmp_path, 5)
    path = Memory.of(tmp_path, "ada").path
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(CheckpointError, match=path.name):
        fit(MAKERS[system](), tmp_path)


def test_no_flipped_bit_gets_through_as_another_error(tmp_path):
    killed(MAKERS["FedCRef"](), tmp_path, 8)
    path = Memory.of(tmp_path, "bob").path
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.choice(len(good), 40, replace=False):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x55]) + good[place + 1 :])
        try:
            Memory(path).load()
        except CheckpointError:
            continue
    path.write_bytes(good)
    fit(MAKERS["FedCRef"](), tmp_path)


def test_a_file_with_pickled_objects_is_not_opened(tmp_path):
    killed(MAKERS["FedCRef"](), tmp_path, 8)
    path = tmp_path / "step-00000.npz"
    np.savez(path, session=np.array([{"a": 1}], dtype=object), names="[]")
    with pytest.raises(CheckpointError, match=path.name):
        fit(MAKERS["FedCRef"](), tmp_path)


@each_system
def test_no_file_is_a_pickle_and_no_partial_file_is_left(system, tmp_path):
    fit(MAKERS[system](), tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 4
    for path in files:
        if path.suffix == ".npz":
            load_arrays(path.read_bytes())
        elif path.suffix == ".json":
            json.loads(path.read_text())
        else:
            assert path.name in ("asked", "lock")


@pytest.mark.parametrize("name", ["../../x", "a/b", "ä ö\t", "client 1", "x" * 200, "CON", "🙂"])
def test_names_with_odd_characters_are_no_trouble(name, tmp_path):
    names = ("ada", name, "cy")
    folder = tmp_path / "deep" / "run"
    with pytest.raises(Killed):
        fit(MAKERS["FedCRef"](), folder, after=8, clients=federation(30, names))
    model, _ = fit(MAKERS["FedCRef"](), folder, clients=federation(30, names))
    assert name in model.client_names_
    inside = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*.npz")}
    assert inside == {("deep", "run")}


def test_a_private_run_needs_a_ledger_that_outlives_it(tmp_path):
    for ledger in (None, Ledger.create(None, epsilon=99.0, delta=1e-5)):
        model = MAKERS["FedCRef"](SPEC, ledger=ledger, sampler="secure")
        with pytest.raises(ParameterError, match="needs a ledger in a file"):
            fit(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_systems_that_are_over_in_seconds_are_not_kept(tmp_path):
    with pytest.raises(ParameterError, match="checkpoint: FKM is over in seconds"):
        FKM(2, privacy=NONE).fit(CLIENTS, checkpoint=tmp_path)


@each_system
def test_labels_that_were_given_are_in_no_file_of_the_server(system, tmp_path):
    if system == "DeepFeCA":
        return
    labels = {name: np.arange(30) % 2 for name in CLIENTS}
    fit(MAKERS[system](initial=labels), tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["initial"] == "'labels'"


def test_a_journal_reads_back_what_a_step_came_to(tmp_path):
    class Stub:
        history, sums, anchors, shares, sum_shares = [], [], {}, {}, {}
        participants, n_features, skipped = (), 3, 0

    found = {"a b": {"counts": np.arange(3), "one": 1.5, "text": "word"}, "é": {}}
    with Journal(tmp_path / "run", {"x": 1}) as first:
        first.begin(7, "run", ["a b"])
        assert first.step(Stub(), lambda: found) is found
    again = Journal(tmp_path / "run", {"x": 1})
    read = again.step(Stub(), lambda: pytest.fail("computed again"))
    assert list(read) == list(found)
    assert read["a b"]["counts"].tolist() == [0, 1, 2]
    assert (read["a b"]["one"], read["a b"]["text"], read["é"]) == (1.5, "word", {})
    assert (again.seed, again.run) == (7, "run")


@each_system
@pytest.mark.parametrize(
    "change",
    [lambda X: X[:20], lambda X: X[::-1], lambda X: X + 1e-9],
    ids=["fewer", "other", "moved"],
)
def test_a_run_is_not_resumed_on_other_records(system, change, tmp_path):
    killed(MAKERS[system](), tmp_path, 8)
    with pytest.raises(CheckpointError, match="other records"):
        fit(MAKERS[system](), tmp_path, clients=CLIENTS | {"bob": change(CLIENTS["bob"])})
