"""A party's end: what it refuses, what it keeps, and that it goes on after it was killed."""

import csv
import dataclasses
import errno
import json
import shutil

import numpy as np
import pandas as pd
import pytest

from secure_fedclust import FKM, Ledger, PrivacySpec, __version__
from secure_fedclust.deployment import participant as module
from secure_fedclust.deployment.config import Region
from secure_fedclust.deployment.coordinator import end, enrol
from secure_fedclust.deployment.offer import (
    PROTOCOL,
    Ending,
    Offer,
    Reply,
    decode,
    is_greeting,
)
from secure_fedclust.deployment.participant import ClientParticipant, KeyHolderParticipant
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.errors import (
    CheckpointError,
    LedgerError,
    NotAdmitted,
    ProtocolError,
    SecureFedClustError,
)
from secure_fedclust.messages import read_envelope
from secure_fedclust.protocols.client import PrivateClient
from secure_fedclust.records import Clients

from .world import HOLDER, LENIENT, Parties, new_ledger, quietly

SPEC = PrivacySpec(epsilon=5.0, delta=1e-5, ranges=[(0, 1)] * 2, public_size=60)
NONE = PrivacySpec.none(reason="test")
COLUMNS = ["f0", "f1"]
X = np.random.default_rng(3).random((60, 2))


@pytest.fixture(scope="module")
def parties(tmp_path_factory):
    return Parties(tmp_path_factory.mktemp("parties"), ("ada",))


class Home:
    """One client's folder, from which processes are started one after the other."""

    def __init__(self, parties, folder, spec=SPEC, budget=100.0):
        self.keys, self.folder, self.spec = parties.keys["ada"], folder, spec
        self.path = folder / "ledger.sqlite"
        if spec.is_private:
            new_ledger(self.path, spec, budget).close()

    def start(self, **options):
        spec, ledger = self.spec, None
        if spec.is_private:
            ledger = Ledger.open(self.path)
        policy = options.pop("policy", LENIENT)
        found = ClientParticipant(
            self.keys,
            lambda: policy,
            self.folder / "state",
            **{
                "records": Clients({"ada": X}, COLUMNS),
                "region": lambda spec, columns: None,
                "ledger": ledger,
                "key_holder": HOLDER,
                "out": self.folder / "out",
            }
            | options,
        )
        found.resume()
        return found

    def rows(self):
        with Ledger.open(self.path, read_only=True) as ledger:
            return ledger.anchor().rows

    def files(self):
        return {each.name for each in (self.folder / "state").iterdir()}


@pytest.fixture
def home(parties, tmp_path):
    return Home(parties, tmp_path)


def offer(spec=SPEC, **changes):
    given = Offer(
        run="run 1",
        party="ada",
        role="client",
        algorithm="FKM",
        parameters={"n_clusters": 2, "n_rounds": 2},
        privacy=spec.to_dict(),
        n_clients=4,
        columns=COLUMNS,
        seed=[1],
        anchor=None,
    )
    return dataclasses.replace(given, **changes)


def answer(party, given):
    return decode(party.handle(given.encode()))


def recorded(party, spec=SPEC, run="run 1"):
    """Fit on one client, and give the requests and its replies."""
    pairs = []

    def handle(data):
        reply = party.handle(data)
        pairs.append((data, reply))
        return reply

    model = FKM(2, n_rounds=2, privacy=spec, random_state=0)
    with quietly():
        federation = enrol(InProcessEngine({"ada": handle}), model, run=run, columns=COLUMNS)
        model.fit(federation)
    return pairs, model, federation


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_run_within_everything_is_taken(home):
    found = answer(home.start(), offer())
    assert (found.run, found.answer) == ("run 1", "yes")
    assert found.anchor[0] == 0


MASKED = dataclasses.replace(SPEC, protection="masking", min_survivors=4, colluders=1)
PUBLIC = dataclasses.replace(LENIENT, max_epsilon=1.0)
REFUSED = {
    "another name": (offer(party="bob"), {}, "policy", "the client 'bob', it is the client 'ada'"),
    "more survivors than clients": (
        offer(dataclasses.replace(MASKED, min_survivors=5)),
        {},
        "configuration",
        "min_survivors=5 of 4 clients",
    ),
    "more clients than the policy allows": (
        offer(MASKED),
        {"policy": dataclasses.replace(LENIENT, max_cohort=3)},
        "policy",
        "4 clients are asked, the policy allows 3",
    ),
    "another role": (offer(role="key holder"), {}, "policy", "the key holder 'ada'"),
    "unknown algorithm": (offer(algorithm="KMeans"), {}, "policy", "KMeans"),
    "unknown parameters": (
        offer(parameters={"n_clusters": 2, "k": 3}),
        {},
        "configuration",
        "unknown parameters ['k']",
    ),
    "another ledger": (
        offer(parameters={"n_clusters": 2, "ledger": "x"}),
        {},
        "configuration",
        "unknown parameters ['ledger']",
    ),
    "wrong parameters": (offer(parameters={"n_clusters": 0}), {}, "configuration", "n_clusters"),
    "unknown privacy": (offer(privacy={"eps": 1}), {}, "configuration", "unknown eps"),
    "no privacy": (offer(privacy={}), {}, "configuration", "epsilon is missing"),
    "beyond the policy": (offer(), {"policy": PUBLIC}, "policy", "epsilon 5, the policy allows 1"),
    "other ranges": (
        offer(),
        {"region": Region({"f0": (0.0, 1.0), "f1": (0.0, 2.0)}, None, None).check},
        "configuration",
        "this client's are ((0.0, 1.0), (0.0, 2.0))",
    ),
    "no ledger": (offer(), {"ledger": None}, "configuration", "needs a ledger"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_run_is_refused_in_a_word_and_the_log_says_it_all(home, caplog, why):
    given, options, word, said = REFUSED[why]
    found = answer(home.start(**options), given)
    assert found == Reply("run 1", word, None)
    assert f"refused run run 1 ({word})" in caplog.text
    assert said in caplog.text
    assert home.rows() == 0
    assert "run.json" not in home.files()


def test_a_run_without_a_guarantee_is_refused(home, caplog):
    given = offer(
        algorithm="FedCRef", parameters={"n_clusters": 2, "hidden": [2], "allow_unproved": True}
    )
    pytest.importorskip("torch")
    assert answer(home.start(), given).answer in ("policy", "configuration")
    assert "refused" in caplog.text
    assert home.rows() == 0


def test_a_run_beyond_the_ledgers_budget_is_refused(parties, tmp_path, caplog):
    home = Home(parties, tmp_path, budget=1.0)
    assert answer(home.start(), offer()).answer == "ledger"
    assert "(ledger)" in caplog.text
    assert home.rows() == 0


def test_a_key_holder_refuses_a_run_that_has_no_use_for_one(parties, tmp_path, caplog):
    party = KeyHolderParticipant(parties.keys[HOLDER], lambda: LENIENT, tmp_path)
    given = offer(party=HOLDER, role="key holder")
    assert answer(party, given).answer == "policy"
    assert "has no use for a key holder" in caplog.text


def test_a_refused_run_is_not_worked_for(home, tmp_path, parties):
    (request, _), *_ = after_offer(home)
    other = Home(parties, tmp_path / "other")
    party = other.start(policy=PUBLIC)
    answer(party, offer())
    with pytest.raises(ProtocolError, match="a run that this party is not in"):
        party.handle(request)
    assert other.rows() == 0


def after_offer(home):
    """Requests and replies of a run, and nothing else of it."""
    pairs, *_ = recorded(home.start())
    return pairs[1:]


def test_a_request_before_any_offer_is_refused(home, tmp_path, parties):
    (request, _), *_ = after_offer(home)
    other = Home(parties, tmp_path / "other")
    with pytest.raises(ProtocolError, match="not in"):
        other.start().handle(request)
    assert other.rows() == 0


def test_a_request_of_another_run_is_refused(home, tmp_path, parties):
    (request, _), *_ = after_offer(home)
    other = Home(parties, tmp_path / "other")
    party = other.start()
    answer(party, offer(run="run 2"))
    with pytest.raises(ProtocolError, match="not in"):
        party.handle(request)
    assert other.rows() == 0


@pytest.mark.parametrize("data", [b"", b"x", b"\x00" * 100, b"secure_fedclust greeting\n{"])
@pytest.mark.parametrize("offered", [False, True])
def test_garbage_is_refused(home, data, offered):
    party = home.start()
    if offered:
        answer(party, offer())
    with pytest.raises(ProtocolError):
        party.handle(data)
    assert home.rows() == 0


def test_a_reply_is_no_request(home):
    with pytest.raises(ProtocolError, match="a reply came"):
        home.start().handle(Reply("run 1", "yes", None).encode())


def test_another_version_is_answered_so_and_both_are_logged(home, caplog):
    content = {"kind": "Offer", "protocol": 7, "version": "9.1"}
    found = decode(
        home.start().handle(b"secure_fedclust greeting\n" + json.dumps(content).encode())
    )
    assert (found.answer, found.version) == ("version", __version__)
    assert "9.1 (protocol 7)" in caplog.text
    assert f"{__version__} (protocol {PROTOCOL})" in caplog.text


def test_another_version_that_speaks_the_same_protocol_is_named(home, caplog):
    caplog.set_level("INFO")
    assert answer(home.start(), offer(version="9.1")).answer == "yes"
    assert f"the server has version 9.1, this is {__version__}" in caplog.text


def test_an_offer_repeated_changes_nothing(home):
    party = home.start()
    pairs, *_ = recorded(party)
    rows = home.rows()
    given = decode(pairs[0][0])
    assert answer(party, given).answer == "yes"
    assert party.handle(pairs[-1][0]) == pairs[-1][1]
    assert home.rows() == rows


@pytest.mark.parametrize(
    "changes",
    [
        {"parameters": {"n_clusters": 2, "n_rounds": 9}},
        {"privacy": dataclasses.replace(SPEC, epsilon=6.0).to_dict()},
        {"n_clients": 5},
        {"columns": None},
        {"algorithm": "KFed"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_same_run_with_something_changed_is_refused(home, caplog, changes):
    party = home.start()
    assert answer(party, offer()).answer == "yes"
    assert answer(party, offer(**changes)).answer == "failed"
    assert "is another one" in caplog.text
    assert answer(party, offer()).answer == "yes"


def test_a_killed_party_goes_on_and_pays_once(parties, tmp_path):
    whole = after_offer(Home(parties, tmp_path / "whole"))
    home = Home(parties, tmp_path / "killed")
    party = home.start()
    answer(party, offer())
    for n, (request, _) in enumerate(whole):
        reply = party.handle(request)
        rows = home.rows()
        assert rows > n or n == 0
        party = home.start()
        assert party.handle(request) == reply
        assert home.rows() == rows
    assert home.rows() == Home.rows(_at(tmp_path / "whole"))


def _at(folder):
    home = object.__new__(Home)
    home.path = folder / "ledger.sqlite"
    return home


def test_a_killed_party_without_privacy_goes_on(parties, tmp_path):
    home = Home(parties, tmp_path, NONE)
    whole = recorded(home.start(), NONE)[0]
    shutil.rmtree(home.folder / "state")
    party = home.start()
    for data, reply in whole:
        assert party.handle(data) == reply or data == whole[0][0]
        party = home.start()
        if data != whole[0][0]:
            assert party.handle(data) == reply


def test_a_party_that_left_takes_no_further_part(home):
    party = home.start()
    pairs, *_ = recorded(party)
    party.leave()
    assert not home.files() & {"run.json", "memory.npz"}
    for each in (party, home.start()):
        with pytest.raises(ProtocolError, match="not in"):
            each.handle(pairs[-1][0])


def test_a_run_that_was_left_is_not_joined_again(home, caplog):
    party = home.start()
    answer(party, offer())
    party.leave()
    for each in (party, home.start()):
        assert answer(each, offer()).answer == "policy"
    assert "this party has left that run" in caplog.text
    assert answer(home.start(), offer(run="run 2")).answer == "yes"


@pytest.mark.parametrize("content", [b"", b"3", b"{", b"\xff"])
def test_a_damaged_note_of_what_was_left_is_refused(home, content):
    party = home.start()
    (home.folder / "state" / "left.json").write_bytes(content)
    assert answer(party, offer()).answer == "failed"


def test_a_refused_offer_does_not_end_the_run_that_goes_on(home):
    party = home.start()
    pairs, *_ = recorded(party)
    files = home.files()
    assert answer(party, offer(run="run 2", seed=[])).answer != "yes"
    assert home.files() == files
    for each in (party, home.start()):
        assert each.handle(pairs[-1][0]) == pairs[-1][1]


def test_a_ledger_with_releases_of_others_is_refused(home, parties):
    recorded(home.start())
    with (
        Ledger.open(home.path) as ledger,
        pytest.raises(LedgerError, match="releases of ada, this"),
    ):
        ClientParticipant(
            dataclasses.replace(parties.keys["ada"], card=parties.keys[HOLDER].card),
            lambda: LENIENT,
            home.folder / "another",
            records=Clients({HOLDER: X}, COLUMNS),
            region=lambda spec, columns: None,
            ledger=ledger,
        )


def test_a_party_that_is_in_no_run_can_leave(home):
    home.start().leave()


def older(home):
    """Put a copy of the ledger from before a run in its place."""
    shutil.copy(home.path, home.folder / "backup")
    party = home.start()
    _, _, federation = recorded(party)
    end(federation, None)
    party._ledger.close()
    for each in home.folder.glob("ledger.sqlite*"):
        each.unlink()
    shutil.copy(home.folder / "backup", home.path)
    return federation.anchors["ada"]


def test_an_older_ledger_is_noticed_at_the_start(home):
    older(home)
    with pytest.raises(LedgerError, match="older copy"):
        home.start()


def test_an_older_ledger_is_noticed_by_the_servers_anchor(home, caplog):
    rows, head = older(home)
    (home.folder / "state" / "anchor.json").unlink()
    party = home.start()
    assert answer(party, offer(run="run 2", anchor=[rows, head])).answer == "ledger"
    assert "older copy" in caplog.text


def test_an_older_ledger_is_noticed_by_the_server(home):
    """Even if the client does not look at the anchor in the offer."""
    rows, head = older(home)
    (home.folder / "state" / "anchor.json").unlink()
    party = home.start()

    def handle(data):
        return party.handle(dataclasses.replace(decode(data), anchor=None).encode())

    model = FKM(2, privacy=SPEC)
    with pytest.raises(NotAdmitted, match=rf"ada: its ledger has 0 rows, and had {rows}"):
        enrol(InProcessEngine({"ada": handle}), model, run="2", anchors={"ada": (rows, head)})


@pytest.mark.parametrize("anchor", [[], [1], ["1", "x"], [0, 0], [1, "x", 2], [None, None]])
def test_an_anchor_that_is_none_is_refused(home, anchor):
    assert answer(home.start(), offer(anchor=anchor)).answer == "failed"
    assert home.rows() == 0


@pytest.mark.parametrize("content", ["", "{}", "[1]", '["x", "y"]', "null", "\x00"])
def test_a_damaged_note_of_the_ledger_is_refused(home, content):
    home.start()
    (home.folder / "state" / "anchor.json").write_text(content, encoding="utf-8")
    with pytest.raises(LedgerError, match=r"anchor\.json cannot be read"):
        home.start()


@pytest.mark.parametrize("seed", [[], [-1], ["x"], [1.5], [True, None], [2**128]])
def test_a_seed_that_is_none_is_refused(home, seed):
    assert answer(home.start(), offer(seed=seed)).answer == "failed"


def test_a_full_disk_sends_nothing_and_the_charge_stays(parties, tmp_path, monkeypatch):
    (request, _), *_ = after_offer(Home(parties, tmp_path / "whole"))
    home = Home(parties, tmp_path / "full")
    party = home.start()
    answer(party, offer())
    with monkeypatch.context() as patch:
        patch.setattr("secure_fedclust.protocols.checkpoint.replace_file", no_space)
        with pytest.raises(CheckpointError, match=r"No space left on device.*nothing was sent"):
            party.handle(request)
    paid = home.rows()
    assert paid > 0
    assert read_envelope(party.handle(request)).run == "run 1"
    assert home.rows() >= paid


def test_a_full_disk_after_the_reply_was_kept_sends_it_later(parties, tmp_path, monkeypatch):
    (request, _), *_ = after_offer(Home(parties, tmp_path / "whole"))
    home = Home(parties, tmp_path / "full")
    party = home.start()
    answer(party, offer())
    with monkeypatch.context() as patch:
        patch.setattr(module, "replace_file", no_space)
        with pytest.raises(CheckpointError, match="nothing was sent"):
            party.handle(request)
    paid = home.rows()
    assert paid > 0
    assert party.handle(request) == home.start().handle(request)
    assert home.rows() == paid


def test_a_run_that_cannot_be_noted_is_not_taken(home, monkeypatch):
    party = home.start()
    with monkeypatch.context() as patch:
        patch.setattr(module, "replace_file", no_space)
        with pytest.raises(CheckpointError, match="make room"):
            party.handle(offer().encode())
    assert "run.json" not in home.files()
    assert answer(party, offer()).answer == "yes"


@pytest.mark.parametrize("content", [b"", b"x", b"secure_fedclust greeting\n{", b"\xff" * 50])
def test_a_damaged_note_of_the_run_is_refused(home, content):
    answer(home.start(), offer())
    (home.folder / "state" / "run.json").write_bytes(content)
    with pytest.raises(SecureFedClustError):
        home.start()


def test_a_note_of_something_else_than_a_run_is_refused(home):
    home.start()
    (home.folder / "state" / "run.json").write_bytes(Ending("run 1", None).encode())
    with pytest.raises(CheckpointError, match=r"run\.json is no run"):
        home.start()


def test_damaged_memory_is_refused(home):
    recorded(home.start())
    (home.folder / "state" / "memory.npz").write_bytes(b"PK damaged")
    with pytest.raises(CheckpointError, match=r"memory\.npz cannot be read"):
        home.start()


def test_a_run_is_not_gone_on_with_on_other_records(home):
    recorded(home.start())
    with pytest.raises(CheckpointError, match="other records"):
        home.start(records=Clients({"ada": X[::-1]}, COLUMNS))


@pytest.mark.parametrize("spec", [SPEC, NONE], ids=["private", "not private"])
def test_the_result_is_written_and_the_labels_are_those_of_predict(parties, tmp_path, spec):
    home = Home(parties, tmp_path, spec)
    party = home.start()
    ended = []
    party.on_end = lambda: ended.append(True)
    _, model, federation = recorded(party, spec)
    end(federation, model)
    assert not (home.folder / "out").exists()  # the reply is not out yet
    party.finish()
    out = home.folder / "out" / "run 1"
    written = json.loads((out / "result.json").read_text(encoding="utf-8"))
    np.testing.assert_array_equal(written["centers"], model.result_.centers)
    with (out / "labels.csv").open(encoding="utf-8", newline="") as file:
        head, *labels = csv.reader(file)
    assert head == ["label"]
    wanted = model.predict(pd.DataFrame(X, columns=COLUMNS))
    np.testing.assert_array_equal([int(label) for (label,) in labels], wanted)
    assert ended == [True]
    assert not home.files() & {"run.json", "memory.npz"}


def test_a_run_that_was_given_up_leaves_no_result(home, caplog):
    party = home.start()
    *_, federation = recorded(party)
    end(federation, None)
    assert "given up run run 1" in caplog.text
    assert not (home.folder / "out").exists()
    assert "run.json" not in home.files()


def test_the_end_of_another_run_is_refused(home):
    party = home.start()
    answer(party, offer())
    with pytest.raises(ProtocolError, match="not in"):
        party.handle(Ending("run 2", None).encode())
    assert "run.json" in home.files()


@pytest.mark.parametrize("result", [{}, {"centers": 3}, {"centers": [[0.5, 0.5]]}])
def test_a_result_that_is_none_is_not_written_and_the_run_is_over(home, result, caplog):
    party = home.start()
    over = []
    party.on_end = lambda: over.append(1)
    answer(party, offer())
    party.handle(Ending("run 1", result).encode())
    party.finish()
    assert "the result is not kept: what the server sends as the result is none" in caplog.text
    assert not (home.folder / "out").exists()
    assert over
    assert not (home.folder / "state" / "run.json").exists()


def test_a_result_with_more_clusters_than_are_looked_at_is_not_kept(home, monkeypatch, caplog):
    party = home.start()
    _, model, _ = recorded(party)
    given = json.loads(json.dumps(model.result_.to_dict()))
    monkeypatch.setattr(PrivateClient, "max_clusters", 2)
    party.handle(Ending("run 1", given | {"centers": [[0.5, 0.5]] * 3}).encode())
    party.finish()
    assert "the server's result has 3 clusters, at most 2" in caplog.text
    assert not (home.folder / "out").exists()


def test_a_party_without_records_gets_the_result_too(home):
    party = home.start(records=Clients({"ada": X[:0]}, COLUMNS))
    _, model, _ = recorded(party)
    given = json.loads(json.dumps(model.result_.to_dict()))
    party.handle(Ending("run 1", given).encode())
    party.finish()
    folder = home.folder / "out" / "run 1"
    assert (folder / "labels.csv").read_text() == "label\n"
    assert (folder / "result.json").exists()


def test_results_outlive_the_process_and_each_other(home):
    party = home.start()
    _, model, _ = recorded(party)
    party._forget()
    given = json.loads(json.dumps(model.result_.to_dict()))
    for run in ("run 2", "run 3"):
        answer(party, offer(run=run))
        party.handle(Ending(run, given).encode())
    home.start().finish()  # killed before it made anything of them
    kept = {path.parent.name for path in (home.folder / "out").glob("*/labels.csv")}
    assert kept == {"run 2", "run 3"}
    assert not [name for name in home.files() if name.startswith("ended")]


def test_a_result_that_there_is_no_room_for_waits(home, caplog):
    party = home.start()
    _, model, _ = recorded(party)
    given = json.loads(json.dumps(model.result_.to_dict()))
    party.handle(Ending("run 1", given).encode())
    (home.folder / "out").write_text("in the way")
    party.finish()
    assert "no result yet" in caplog.text
    (home.folder / "out").unlink()
    home.start().finish()
    assert (home.folder / "out" / "run 1" / "result.json").exists()


def test_a_result_that_is_there_is_not_replaced(home, caplog):
    party = home.start()
    _, model, _ = recorded(party)
    party._forget()
    given = json.loads(json.dumps(model.result_.to_dict()))
    for centers in (given["centers"], [[0.5, 0.5], [0.1, 0.1]]):
        answer(party, offer(run="run 2"))
        party.handle(Ending("run 2", given | {"centers": centers}).encode())
        party.finish()
    written = json.loads((home.folder / "out" / "run 2" / "result.json").read_text())
    assert written["centers"] == given["centers"]
    assert "has a result already" in caplog.text


def test_a_run_offered_again_beyond_the_policy_is_left(home):
    pairs, *_ = recorded(home.start())
    party = home.start()
    party.policy = lambda: dataclasses.replace(LENIENT, max_epsilon=1.0)
    assert answer(party, offer()).answer == "policy"
    with pytest.raises(ProtocolError, match="not in, and has left"):
        party.handle(first_question(pairs))


def test_the_servers_note_is_looked_at_when_a_run_is_offered_again(home):
    party = home.start()
    assert answer(party, offer()).answer == "yes"
    assert answer(party, offer(anchor=[7, "ab" * 32])).answer == "ledger"


def test_a_full_disk_does_not_keep_a_party_in_a_run(home, monkeypatch):
    party = home.start()
    answer(party, offer())

    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "replace_file", full)
    with pytest.raises(CheckpointError, match="left run run 1, but"):
        party.leave()
    assert "run.json" not in home.files()


def first_question(pairs):
    return next(request for request, _ in pairs if not is_greeting(request))


def hostile_results(given):
    """Results with which what is computed from records fails, or not, as the records are."""
    scales = ([[1.0, 1.0]] * n for n in (1, 59, 60, 61))
    yield from (given | {"scale": scale} for scale in scales)
    yield given | {"centers": [[1.0] * 7]}
    yield given | {"centers": []}
    yield {"centers": "x"}
    yield {}


@pytest.mark.parametrize("n", [0, 1, 60])
def test_the_reply_to_the_end_of_a_run_says_nothing_of_records(parties, tmp_path, n):
    home = Home(parties, tmp_path)
    party = home.start(records=Clients({"ada": X[:n]}, COLUMNS))
    _, model, _ = recorded(party)
    given = json.loads(json.dumps(model.result_.to_dict()))
    for number, result in enumerate(hostile_results(given), start=2):
        answer(party, offer(run=f"run {number}"))
        party._records = None  # nothing is made of them before the reply
        reply = party.handle(Ending(f"run {number}", result).encode())
        assert reply == Reply(f"run {number}", "yes", None).encode()
        assert "run.json" not in home.files()
        party._records = Clients({"ada": X[:n]}, COLUMNS)
        party.finish()  # and whatever happens now, it goes on


def test_a_client_that_was_promised_sums_answers_nothing_by_itself(parties, tmp_path):
    spec = dataclasses.replace(SPEC, protection="masking")
    home = Home(parties, tmp_path, spec)
    pairs, *_ = recorded(Home(parties, tmp_path / "alone").start())
    party = home.start()
    assert answer(party, offer(spec)).answer == "yes"
    with pytest.raises(ProtocolError, match="as part of a sum only"):
        party.handle(first_question(pairs))
    assert home.rows() == 0


@pytest.mark.parametrize(("algorithm", "alone"), [("FKM", False), ("KFed", True)])
def test_the_log_says_whether_the_server_sees_more_than_sums(
    parties, tmp_path, caplog, algorithm, alone
):
    caplog.set_level("INFO")
    spec = dataclasses.replace(SPEC, protection="masking")
    party = Home(parties, tmp_path, spec).start()
    given = offer(spec, algorithm=algorithm, parameters={"n_clusters": 2})
    assert answer(party, given).answer == "yes"
    assert ("the server also sees each client's answers" in caplog.text) == alone
    assert "if a client's own noise were the only one" in caplog.text


def test_a_policy_made_stricter_holds_from_the_next_offer_on(home):
    policies = [LENIENT]
    party = home.start()
    party.policy = lambda: policies[-1]
    assert answer(party, offer()).answer == "yes"
    policies.append(dataclasses.replace(LENIENT, max_epsilon=1.0))
    assert answer(party, offer(run="run 2")).answer == "policy"


def test_a_run_that_the_policy_does_not_allow_any_more_is_left_at_the_next_start(home, caplog):
    pairs, *_ = recorded(home.start())
    assert home.rows() > 0
    party = home.start()
    answer(party, offer(run="run 2"))
    party = home.start(policy=dataclasses.replace(LENIENT, max_epsilon=1.0))
    assert "does not allow run run 2 any more" in caplog.text
    assert "run.json" not in home.files()
    with pytest.raises(ProtocolError, match="not in"):
        party.handle(first_question(pairs))


@pytest.mark.parametrize("run", ["", ".", "..", "../x", "a/b", "a.b", "-x", "x" * 65])
def test_a_run_that_cannot_be_a_folder_is_refused(home, run):
    assert answer(home.start(), offer(run=run)).answer == "failed"


def test_columns_and_ranges_are_those_of_one_list(home):
    income_first = Clients({"ada": X}, ["income", "age"])
    region = Region({"age": (0, 120), "income": (0, 1000)}, None, None)
    party = home.start(records=income_first, region=region.check)
    in_order = dataclasses.replace(SPEC, ranges=[(0, 1000), (0, 120)])
    swapped = dataclasses.replace(SPEC, ranges=[(0, 120), (0, 1000)])
    assert answer(party, offer(swapped, columns=None)).answer == "configuration"
    assert answer(party, offer(in_order, columns=["age", "income"])).answer == "configuration"
    assert answer(party, offer(swapped, columns=["age", "income"])).answer == "yes"
    assert answer(party, offer(in_order, columns=None, run="run 2")).answer == "yes"


@pytest.mark.parametrize("columns", [["f0", "f0"], ["f0", "other"], []])
def test_columns_that_there_are_not_are_refused(home, columns):
    assert answer(home.start(), offer(columns=columns)).answer == "configuration"


def test_what_a_party_keeps_is_for_its_owner_only(home):
    recorded(home.start())
    state = home.folder / "state"
    assert state.stat().st_mode & 0o077 == 0
    for name in ("run.json", "memory.npz", "anchor.json"):
        assert (state / name).stat().st_mode & 0o077 == 0, name


def test_labels_are_for_the_owner_only(home):
    party = home.start()
    _, model, _ = recorded(party)
    party.handle(Ending("run 1", json.loads(json.dumps(model.result_.to_dict()))).encode())
    party.finish()
    folder = home.folder / "out" / "run 1"
    for path in (folder, folder / "labels.csv", folder / "result.json"):
        assert path.stat().st_mode & 0o077 == 0, path
