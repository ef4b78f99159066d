"""The two ends before and after they talk: whose files may be read by whom, what is kept when."""

import logging
import threading
import time

import pytest

pytest.importorskip("flwr", reason="Flower is the extra 'flower'")

from secure_fedclust import FKM
from secure_fedclust.commands.federation import _Lines
from secure_fedclust.deployment import ends
from secure_fedclust.deployment.config import ClientConfig, ServerConfig
from secure_fedclust.deployment.coordinator import Anchors
from secure_fedclust.deployment.ends import _Aside, participant_of, run_server, take_part
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.errors import CheckpointError, NotAdmitted, ParameterError, ProtocolError
from secure_fedclust.protocols.checkpoint import lock_file
from secure_fedclust.protocols.federation import Federation

from .world import Parties

SERVER = """
algorithm = "FKM"
[parameters]
n_clusters = 2
[privacy]
none = "test"
[server]
address = "127.0.0.1:0"
keys = "server"
clients = ["ada"]
wait = 0.1
"""


@pytest.mark.parametrize("name", ["server.key", "ca.key", "identity.key"])
def test_a_server_whose_secrets_others_can_read_does_not_listen(tmp_path, name):
    folder = Parties(tmp_path, ("ada",)).server.folder
    (tmp_path / "server.toml").write_text(SERVER, encoding="utf-8")
    (folder / name).chmod(0o644)
    listening = []
    with pytest.raises(ParameterError, match=f"{name} can be read by others than its owner"):
        run_server(ServerConfig.read(tmp_path / "server.toml"), on_listening=listening.append)
    assert not listening


@pytest.mark.parametrize("error", [KeyboardInterrupt, ProtocolError])
def test_a_result_is_kept_before_anybody_is_told_of_it(tmp_path, monkeypatch, error):
    Parties(tmp_path, ("ada",))
    (tmp_path / "server.toml").write_text(SERVER, encoding="utf-8")
    config, happened = ServerConfig.read(tmp_path / "server.toml"), []

    def tell(*_):
        happened.append("told")
        raise error("disk full")

    monkeypatch.setattr(ends, "_wait", lambda *_: None)
    monkeypatch.setattr(ends, "enrol", lambda *_, **__: Federation(InProcessEngine({}), [], "run"))
    monkeypatch.setattr(FKM, "fit", lambda *_, **__: happened.append("fitted"))
    monkeypatch.setattr(ends, "end", tell)
    options = {"on_result": lambda model: happened.append("kept"), "insecure": True}
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            run_server(config, **options)
    else:
        run_server(config, **options)  # what was paid for is there, and the rest is in the log
    assert happened == ["fitted", "kept", "told"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("n_clusters = 2", 'n_clusters = "2"', "n_clusters"),
        ("wait = 0.1", "wait = 0.1\nmin_clients = 2", "1 clients are registered"),
        ('none = "test"', 'none = "test"\nprotection = "masking"', "cohort of 1"),
    ],
)
def test_what_is_wrong_with_a_run_is_said_before_anybody_is_waited_for(tmp_path, old, new, said):
    Parties(tmp_path, ("ada",))
    (tmp_path / "server.toml").write_text(SERVER.replace(old, new), encoding="utf-8")
    listening = []
    with pytest.raises(ParameterError, match=said):
        run_server(ServerConfig.read(tmp_path / "server.toml"), on_listening=listening.append)
    assert not listening


def test_where_ledgers_stood_is_kept_after_every_exchange(tmp_path):
    anchors, path = Anchors(tmp_path / "anchors.json"), tmp_path / "anchors.json"
    engine = InProcessEngine({"ada": bytes.upper})
    federation = Federation(engine, ["ada"], "run", keep_anchors=anchors.keep)
    for rows in (1, 2):
        for name, _ in federation.exchange({"ada": b"x"}):
            federation.anchors[name] = (rows, "ab" * 32)
        assert Anchors(path).read() == {"ada": (rows, "ab" * 32)}
    federation.anchors["ada"] = (1, "ab" * 32)
    list(federation.exchange({}))
    assert Anchors(path).read() == {"ada": (2, "ab" * 32)}


def test_a_note_that_cannot_be_written_does_not_end_a_run(tmp_path, caplog):
    Anchors(tmp_path / "missing" / "anchors.json").keep({"ada": (1, "ab")})
    assert "cannot be kept" in caplog.text


def test_a_lock_that_cannot_be_made_is_said_to_be(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(CheckpointError, match="lock cannot be written"):
        lock_file(tmp_path / "lock", "taken")


CLIENT = """
server = "127.0.0.1:1"
keys = "ada"
policy = "policy.toml"
[data]
person_column = "who"
"""
POLICY = """
max_epsilon = 1
max_delta = 1e-5
protocols = ["FKM"]
protections = ["none"]
min_cohort = 1
"""


def test_where_records_are_about_persons_a_policy_must_limit_them(tmp_path):
    keys = Parties(tmp_path, ("ada",)).keys["ada"]
    (tmp_path / "client.toml").write_text(CLIENT, encoding="utf-8")
    (tmp_path / "data.csv").write_text("who,x\n1,2\n", encoding="utf-8")
    policy, config = tmp_path / "policy.toml", ClientConfig.read(tmp_path / "client.toml")
    policy.write_text(POLICY, encoding="utf-8")
    with pytest.raises(ParameterError, match="max_records_per_person is missing"):
        participant_of(config, keys, tmp_path / "data.csv")
    policy.write_text(POLICY + "max_records_per_person = 2\n", encoding="utf-8")
    found = participant_of(config, keys, tmp_path / "data.csv")
    # The policy is the file as it is now.
    policy.write_text(POLICY + "max_records_per_person = 1\n", encoding="utf-8")
    assert found.policy().max_records_per_person == 1


def test_a_file_without_records_is_taken(tmp_path, caplog):
    keys = Parties(tmp_path, ("ada",)).keys["ada"]
    client = CLIENT.replace('person_column = "who"', "")
    (tmp_path / "client.toml").write_text(client, encoding="utf-8")
    (tmp_path / "policy.toml").write_text(POLICY, encoding="utf-8")
    (tmp_path / "data.csv").write_text("x,y\n", encoding="utf-8")
    participant_of(ClientConfig.read(tmp_path / "client.toml"), keys, tmp_path / "data.csv")
    assert "data.csv has no records: this client takes part all the same" in caplog.text


def test_what_others_say_is_one_line_of_the_log():
    record = logging.makeLogRecord(
        {"msg": "refused: %s", "args": ("x\n2026-01-01 INFO all is well\x1b[2K\u2028",)}
    )
    line = _Lines("%(levelname)s %(message)s").format(record)
    assert line.isprintable()
    assert line.endswith(r"refused: x\n2026-01-01 INFO all is well\x1b[2K\u2028")


def test_a_line_of_the_log_is_not_as_long_as_others_like():
    line = _Lines("%(message)s").format(logging.makeLogRecord({"msg": "x" * 10_000_000}))
    assert len(line) < 5000 and line.endswith("... (10000000 characters)")


def test_what_is_done_aside_is_done_for_all_that_asked_before_the_end():
    done, first, go_on = [], threading.Event(), threading.Event()

    def job():
        done.append(len(done))
        first.set()
        assert go_on.wait(30)

    aside = _Aside(job)
    aside.again()
    assert first.wait(30)
    aside.again()  # while it is being done
    go_on.set()
    aside.finish(30)
    assert len(done) >= 2


def test_a_job_aside_does_not_keep_a_process():
    aside = _Aside(threading.Event().wait)
    aside.again()
    started = time.monotonic()
    aside.finish(0.2)
    assert time.monotonic() - started < 20


def test_keys_of_the_other_end_are_refused(tmp_path):
    Parties(tmp_path, ("ada",))
    (tmp_path / "server.toml").write_text(SERVER.replace('"server"', '"ada"'), encoding="utf-8")
    with pytest.raises(ParameterError, match="has the keys of ada: give those of a server"):
        run_server(ServerConfig.read(tmp_path / "server.toml"), insecure=True)
    (tmp_path / "client.toml").write_text(CLIENT.replace('"ada"', '"server"'), encoding="utf-8")
    with pytest.raises(ParameterError, match="has the keys of a server: give those of a client"):
        take_part(ClientConfig.read(tmp_path / "client.toml"), None, insecure=True)


def test_a_server_that_has_waited_says_how_many_a_sum_needs(tmp_path):
    names = ("ada", "bob", "cy")
    Parties(tmp_path, names)
    text = SERVER.replace('none = "test"', 'none = "test"\nprotection = "masking"')
    text = text.replace('["ada"]', '["ada", "bob", "cy"]')
    (tmp_path / "server.toml").write_text(text, encoding="utf-8")
    with pytest.raises(NotAdmitted, match="0 clients are there, of at least 3"):
        run_server(ServerConfig.read(tmp_path / "server.toml"), insecure=True)
