import contextlib
import datetime
import http.client
import http.server
import itertools
import ssl
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is the extra 'flower'")

import httpx
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.app.message import message as flower_message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime_version_compatibility import (
    get_runtime_version_incompatibility_exit_message,
)
from flwr.supercore.task_identity import TaskIdentity

from secure_fedclust.deployment.keys import Keys
from secure_fedclust.engines import Engine, flower, flower_link, flower_node
from secure_fedclust.engines.flower import FIELD, RECORD, SALT, FlowerEngine
from secure_fedclust.engines.flower_link import SuperLink
from secure_fedclust.engines.flower_node import FlowerNode, _Client
from secure_fedclust.errors import NotAdmitted, ParameterError, ProtocolError

from ..deployment.world import World

NODES = {"a": 1, "b": 2, "c": 3}
IDENTITY = ("_run_id", "_node_id", "_task_id")
SECRET = "the patient is called Rumpelstiltskin"  # noqa: S105


class Clock:
    """Time that goes on only while somebody sleeps."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class FakeGrid(Grid):
    """Gives whatever has come so far, whether it was asked for or not, and gives it again.

    `answers` has for each node that is connected a function of the message, which gives pairs of
    the seconds that a reply takes and of what it holds.
    """

    def __init__(self, clock, answers):
        self.clock, self.answers = clock, answers
        self.sent, self.coming = [], []
        self._numbers = (f"message {i}" for i in itertools.count())

    def push_messages(self, messages):
        return [self._push(message) for message in messages]

    def _push(self, message):
        node = message.metadata.dst_node_id
        if node not in self.answers:
            return ""
        message.metadata.__dict__["_message_id"] = number = next(self._numbers)
        self.sent.append(message)
        for seconds, content in self.answers[node](message):
            self.coming.append((self.clock.now + seconds, Message(content, reply_to=message)))
        return number

    def pull_messages(self, message_ids):
        return [reply for due, reply in self.coming if due <= self.clock.now]

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *_, **__):
        raise NotImplementedError

    def get_node_ids(self):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError


def record(content):
    return RecordDict({RECORD: ConfigRecord({FIELD: content})})


def after(*seconds):
    """Answer after so long; each time, if there is more than one."""
    return lambda message: [(s, record(b"re:" + message.content[RECORD][FIELD])) for s in seconds]


def holding(content):
    return lambda message: [(0, content)]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for name in IDENTITY:
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(flower, "time", clock)
    return clock


@pytest.fixture
def engine(clock):
    def make(answers, **options):
        grid = FakeGrid(clock, {NODES[party]: answer for party, answer in answers.items()})
        return FlowerEngine(grid, NODES, **{"timeout": 600.0, **options}), grid

    return make


def test_it_is_an_engine_whose_clients_do_not_include_the_others(clock):
    found = FlowerEngine(FakeGrid(clock, {9: after(0)}), NODES, others={"holder": 9})
    assert isinstance(found, Engine)
    assert found.clients == ("a", "b", "c")
    assert dict(found.exchange({"holder": b"1"})) == {"holder": b"re:1"}


def test_answers_in_whatever_order_are_given_as_those_of_who_has_sent_them(engine):
    found, _ = engine({"a": after(3), "b": after(1), "c": after(2)})
    replies = list(found.exchange({"a": b"1", "b": b"2", "c": b"3"}))
    assert replies == [("b", b"re:2"), ("c", b"re:3"), ("a", b"re:1")]


def test_an_exchange_is_over_when_everybody_has_answered(engine, clock):
    found, _ = engine({"a": after(1), "b": after(2)}, poll=0.5)
    assert len(list(found.exchange({"a": b"1", "b": b"2"}))) == 2
    assert clock.now == 1002


def test_an_answer_after_the_timeout_is_read_by_no_exchange(engine, clock, caplog):
    found, _ = engine({"a": after(5), "b": after(1)}, timeout=2.0)
    assert list(found.exchange({"a": b"1", "b": b"1"})) == [("b", b"re:1")]
    assert 1002 <= clock.now < 1003
    assert "a did not answer in time" in caplog.text
    clock.sleep(2)
    assert list(found.exchange({"a": b"2", "b": b"2"})) == [("b", b"re:2")]


def test_an_answer_that_comes_twice_counts_once(engine):
    found, _ = engine({"a": after(0, 0, 1), "b": after(2)})
    replies = list(found.exchange({"a": b"1", "b": b"2"}))
    assert replies == [("a", b"re:1"), ("b", b"re:2")]


def test_an_answer_that_comes_twice_does_not_make_others_hurry(engine):
    found, _ = engine({"a": after(0, 0), "b": after(3), "c": after(4)}, min_replies=2, patience=2.0)
    assert len(list(found.exchange(dict.fromkeys("abc", b"1")))) == 3


def test_who_answers_with_an_error_is_absent_at_once(engine, clock, caplog):
    found, _ = engine({"a": holding(Error(0, "no thanks")), "b": after(0)})
    assert list(found.exchange({"a": b"1", "b": b"2"})) == [("b", b"re:2")]
    assert clock.now == 1000
    assert "a did not answer" in caplog.text
    assert "no thanks" not in caplog.text


def test_an_error_is_no_answer_that_others_would_have_to_hurry_for(engine):
    found, _ = engine(
        {"a": holding(Error(0, "no thanks")), "b": after(5)}, min_replies=1, patience=1.0
    )
    assert list(found.exchange({"a": b"1", "b": b"2"})) == [("b", b"re:2")]


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({RECORD: ConfigRecord()}),
        RecordDict({RECORD: ConfigRecord({FIELD: "bytes"})}),
        RecordDict({RECORD: ConfigRecord({FIELD: [b"bytes"]})}),
        RecordDict({RECORD: MetricRecord({FIELD: 1})}),
        RecordDict({"other": ConfigRecord({FIELD: b"bytes"})}),
    ],
    ids=["no record", "no field", "text", "list", "metric", "other record"],
)
def test_an_answer_without_bytes_is_given_as_an_empty_one(engine, caplog, content):
    found, _ = engine({"a": holding(content)})
    assert list(found.exchange({"a": b"1"})) == [("a", b"")]
    assert "a has answered something that is no reply" in caplog.text


def test_who_is_unknown_or_not_connected_is_absent_at_once(engine, clock, caplog):
    found, _ = engine({"a": after(0)})
    assert list(found.exchange({"x": b"1", "b": b"2", "a": b"3"})) == [("a", b"re:3")]
    assert clock.now == 1000
    assert "x cannot be reached" in caplog.text
    assert "b is not connected" in caplog.text
    assert list(found.exchange({"x": b"1"})) == []


def test_once_enough_have_answered_the_others_have_some_patience_left(engine, clock, caplog):
    answers = {"a": after(1), "b": after(3), "c": after(10)}
    found, _ = engine(answers, min_replies=2, patience=5.0)
    assert dict(found.exchange(dict.fromkeys("abc", b"1"))) == {"a": b"re:1", "b": b"re:1"}
    assert 1008 <= clock.now < 1009
    assert "c did not answer in time" in caplog.text


def test_patience_does_not_outlast_the_timeout(engine, clock):
    found, _ = engine({"a": after(1), "b": after(10)}, timeout=2.0, patience=50.0)
    assert len(list(found.exchange({"a": b"1", "b": b"1"}))) == 1
    assert clock.now < 1003


def test_without_a_patience_the_others_have_until_the_timeout(engine):
    found, _ = engine({"a": after(1), "b": after(599)})
    assert len(list(found.exchange({"a": b"1", "b": b"1"}))) == 2


def test_who_answers_in_time_is_heard_however_long_the_caller_takes(engine, clock):
    found, _ = engine({"a": after(0), "b": after(1)}, patience=5.0)
    heard = []
    for party, _ in found.exchange({"a": b"1", "b": b"1"}):
        heard.append(party)
        clock.sleep(10)
    assert heard == ["a", "b"]


def test_messages_counts_what_was_sent(engine):
    found, grid = engine({"a": after(0), "b": holding(Error(0, ""))})
    list(found.exchange({"a": b"1", "b": b"2", "x": b"3"}))
    list(found.exchange({"a": b"1"}))
    assert found.messages == len(grid.sent) == 3


def test_a_message_that_could_not_be_sent_is_not_counted(engine):
    found, _ = engine({"a": after(0)})
    list(found.exchange({"a": b"1", "b": b"2"}))
    assert found.messages == 1


def test_the_number_of_a_message_cannot_be_guessed_from_what_it_says(engine):
    found, grid = engine({"a": after(0), "b": after(0)})
    for _ in range(2):
        list(found.exchange({"a": b"1", "b": b"1"}))
    salts = {message.content[RECORD][SALT] for message in grid.sent}
    assert len(salts) == 4
    assert all(len(salt) == 16 for salt in salts)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        keep_identity(patch)
        world = World(tmp_path_factory.mktemp("world"), ("ada", "bob"))
        yield world
        world.close()


def keep_identity(monkeypatch):
    """Afterwards Flower is to know the run that it knows now: a process has but one."""
    for name in IDENTITY:
        monkeypatch.setattr(TaskIdentity, name, getattr(TaskIdentity, name))


@pytest.fixture
def world(shared):
    shared.handlers = dict.fromkeys(shared.names, echo)
    return shared


@pytest.fixture
def guest(world, tmp_path):
    """Keys of a node that is registered, and that a test itself starts."""
    keys = Keys.create(tmp_path / "guest", "guest")
    world.ids["guest"] = world.link.register(keys.card.node_key())
    return keys


def echo(data):
    return b"re:" + data


def no_matter():
    pass


def made(world, keys):
    return FlowerNode(world.address, keys.node_key, world.parties.certificate)


@contextlib.contextmanager
def serving(world, keys, handle):
    node, connected = made(world, keys), threading.Event()
    thread = threading.Thread(target=node.serve, args=(handle, connected.set), name="guest")
    thread.start()
    try:
        assert connected.wait(10)
        yield
    finally:
        node.stop()
        thread.join(10)
    assert not thread.is_alive()


@contextlib.contextmanager
def by_hand(world, keys):
    """A node whose every call a test makes itself."""
    node = made(world, keys)
    with node._client() as client:
        node._activate(client)
        yield node, client
        client.DeactivateNode(DeactivateNodeRequest(node_id=node._node.node_id))


def serve_briefly(node, on_connect=no_matter, seconds=5.0):
    """Serve for some seconds at most, for nodes that are not to get that far."""
    timer = threading.Timer(seconds, node.stop)
    timer.start()
    try:
        node.serve(echo, on_connect)
    finally:
        timer.cancel()
        timer.join()


def asked(world, *names, seconds=40.0, **options):
    """Replies of parties that are asked, none of whom may be waited for in vain."""
    started = time.monotonic()
    engine = world.engine(names, timeout=seconds, **options)
    replies = dict(engine.exchange({name: name.encode() for name in names}))
    assert time.monotonic() - started < seconds / 2
    return replies


def test_each_node_answers_its_own_request(world):
    assert asked(world, "ada", "bob") == {"ada": b"re:ada", "bob": b"re:bob"}


def test_nodes_that_say_the_same_are_all_heard(world):
    world.handlers = dict.fromkeys(world.names, lambda data: b"yes")
    for _ in range(5):
        assert asked(world, "ada", "bob") == {"ada": b"yes", "bob": b"yes"}


def test_a_long_request_and_a_long_reply_arrive_whole(world):
    request = bytes(range(256)) * 20_000
    found = dict(world.engine(["ada"]).exchange({"ada": request}))
    assert found == {"ada": b"re:" + request}


@pytest.mark.parametrize("error", [ProtocolError, RuntimeError])
def test_a_node_that_fails_is_absent_at_once_and_answers_the_next(world, error, caplog):
    def fail(data):
        raise error(SECRET)

    world.handlers["bob"] = fail
    assert asked(world, "ada", "bob") == {"ada": b"re:ada"}
    assert "bob does not answer; its log says why" in caplog.text
    world.handlers["bob"] = echo
    assert asked(world, "ada", "bob") == {"ada": b"re:ada", "bob": b"re:bob"}


@pytest.mark.parametrize("error", [ProtocolError, RuntimeError])
def test_what_went_wrong_is_in_the_nodes_log_and_is_not_sent(
    world, guest, error, caplog, monkeypatch
):
    sent = []

    class Tapped(flower_node._Client):
        def _unary_unary(self, *, request, **options):
            sent.append(request.SerializeToString())
            return super()._unary_unary(request=request, **options)

    def handle(data):
        if replies:
            return replies.pop()
        raise error(SECRET)

    replies = [b"something to be found"]
    monkeypatch.setattr(flower_node, "_Client", Tapped)
    with serving(world, guest, handle):
        assert "guest" in asked(world, "guest")
        assert asked(world, "guest") == {}
    assert b"something to be found" in b"".join(sent)
    assert SECRET.encode() not in b"".join(sent)
    assert error.__name__.encode() not in b"".join(sent)
    logs = {record.name for record in caplog.records if SECRET in caplog.handler.format(record)}
    assert logs == {flower_node.__name__}


@contextlib.contextmanager
def connection(world):
    trusted = ssl.create_default_context(cafile=world.parties.certificate)
    found = http.client.HTTPSConnection(world.address, context=trusted, timeout=10)
    with contextlib.closing(found):
        yield found


def status(world, path, method="POST", headers=(("Content-Length", "0"),), body=b"", signed=None):
    """What the server answers, to ada if nobody else has signed."""
    if signed is None:
        signed = signature(world.parties.keys["ada"])
    with connection(world) as found:
        found.putrequest(method, path, skip_accept_encoding=True)
        for header in (*headers, *signed.items()):
            found.putheader(*header)
        found.endheaders(body)
        return found.getresponse().status


def signature(keys):
    """Headers by which the server knows a node."""
    context = SimpleNamespace(request=SimpleNamespace(headers={}))
    signing = flower_node._Signing(keys.node_key, public_key_to_bytes(keys.node_key.public_key()))
    signing.intercept(context, lambda context: httpx.Response(200))
    return context.request.headers


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1/fleet",
        "/v1/control/list-nodes",
        "/v1/control/register-node",
        "//v1/control/list-nodes",
        "//v1/fleet/pull-messages",
        "/v1/fleet/../control/list-nodes",
        "/v1/fleet/%2e%2e/control/list-nodes",
        "/v1/fleet/..%2fcontrol/list-nodes",
        "/v1/./control/list-nodes",
        "/V1/CONTROL/list-nodes",
        "https://127.0.0.1/v1/control/list-nodes",
        "/v1/runtime/push-messages",
        "/health",
        "/openapi.json",
        "/docs",
    ],
)
def test_only_what_nodes_need_is_served(world, path, method):
    assert status(world, path, method) == 404


FLEET = "/v1/fleet/pull-messages"


def test_what_is_too_long_is_refused(world, monkeypatch):
    assert (
        status(world, FLEET, headers=[("Content-Length", f"{flower_link.MOST_BYTES + 1}")]) == 413
    )
    monkeypatch.setattr(flower_link, "MOST_BYTES", 10)
    assert status(world, FLEET, headers=[("Content-Length", "11")], body=b"1" * 11) == 413
    assert status(world, FLEET, headers=[("Content-Length", "10")], body=b"1" * 10) != 413


def test_what_does_not_say_how_long_it_is_is_refused(world):
    chunked = ("Transfer-Encoding", "chunked")
    assert status(world, FLEET, headers=[chunked], body=b"1\r\nx\r\n0\r\n\r\n") == 413
    assert status(world, FLEET, headers=[]) == 413
    both = [chunked, ("Content-Length", "1")]
    assert status(world, FLEET, headers=both, body=b"1\r\nx\r\n0\r\n\r\n") in (400, 413)


def test_who_signs_is_looked_at_before_anything_is_read(world, tmp_path):
    announced = [("Content-Length", "1000")]
    ada = signature(world.parties.keys["ada"])
    another = signature(Keys.create(tmp_path / "stranger", "stranger"))
    for signed in (
        {},
        another,
        ada | {FLEET_HTTP_SIGNATURE_HEADER: another[FLEET_HTTP_SIGNATURE_HEADER]},
        ada | {FLEET_HTTP_SIGNATURE_HEADER: "no base64"},
        ada | {FLEET_HTTP_PUBLIC_KEY_HEADER: another[FLEET_HTTP_PUBLIC_KEY_HEADER]},
        ada | {TIMESTAMP_HEADER: "2020-01-01T00:00:00+00:00"},
    ):
        assert status(world, FLEET, headers=announced, signed=signed) == 401
    assert status(world, FLEET) != 401


def test_a_key_that_is_not_registered_is_not_admitted_and_cannot_register_itself(world, tmp_path):
    node = made(world, Keys.create(tmp_path / "stranger", "stranger"))
    with node._client() as client, pytest.raises(httpx.HTTPStatusError):
        client.RegisterNode(RegisterNodeFleetRequest(public_key=node._public))
    with pytest.raises(NotAdmitted, match="its key is not registered there"):
        serve_briefly(node)


def test_a_server_that_another_authority_vouches_for_is_not_talked_to(world, guest, tmp_path):
    other = Keys.create_server(tmp_path / "other", ["127.0.0.1"])
    node = FlowerNode(world.address, guest.node_key, other.folder / "ca.pem")
    connected = []
    with pytest.raises(NotAdmitted, match=r"is not the server that .*ca\.pem is for"):
        serve_briefly(node, lambda: connected.append(1))
    assert not connected


@pytest.fixture
def off(monkeypatch):
    """The seconds that the guest's clock is off, which a test sets."""
    off, right = [0.0], flower_message.now

    def of_guest():
        here = threading.current_thread().name == "guest"
        return datetime.timedelta(seconds=off[0] if here else 0)

    class Wrong(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + of_guest()

    monkeypatch.setattr(flower_node, "datetime", Wrong)
    monkeypatch.setattr(flower_message, "now", lambda: right() + of_guest())
    return off


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_a_node_whose_clock_is_off_goes_by_the_servers(world, guest, seconds, off, caplog):
    off[0] = seconds
    with serving(world, guest, echo):
        assert asked(world, "guest") == {"guest": b"re:guest"}
    (line,) = [each for each in caplog.messages if "clock" in each]
    assert abs(float(line.split("clock is ")[1].split()[0]) - seconds) <= 2
    assert "no connection" not in caplog.text


def test_a_node_whose_clock_is_set_meanwhile_goes_on(world, guest, off):
    with serving(world, guest, echo):
        for off[0] in (0, 3600, -3600):
            assert asked(world, "guest") == {"guest": b"re:guest"}


def test_a_node_that_goes_away_is_not_waited_for_and_answers_when_it_is_back(world, guest):
    for _ in range(2):
        with serving(world, guest, echo):
            assert asked(world, "guest") == {"guest": b"re:guest"}
        assert asked(world, "guest") == {}


def test_a_node_that_was_killed_is_let_back_in_at_once(world, guest):
    killed = made(world, guest)
    with killed._client() as client:
        killed._activate(client)
    with serving(world, guest, echo):
        assert asked(world, "guest") == {"guest": b"re:guest"}


def test_a_node_that_leaves_while_it_is_asked_is_absent_at_once(world, guest):
    with by_hand(world, guest) as (node, client):
        engine = world.engine(["guest"], timeout=10.0)
        waiting = engine.exchange({"guest": b"1"})
        engine._grid = Interrupting(
            engine._grid,
            lambda: client.DeactivateNode(DeactivateNodeRequest(node_id=node._node.node_id)),
        )
        started = time.monotonic()
        assert list(waiting) == []
        assert time.monotonic() - started < 5
        node._activate(client)


class Interrupting:
    """A grid at which something happens once messages were sent, and once only."""

    def __init__(self, grid, happen):
        self._grid, self._happen = grid, happen
        self.sent = []

    def push_messages(self, messages):
        numbers = self._grid.push_messages(messages)
        self.sent = messages
        return numbers

    def pull_messages(self, message_ids):
        if self._happen is not None:
            happen, self._happen = self._happen, None
            happen()
        return self._grid.pull_messages(message_ids)


def push(node, client, head, tree, objects):
    """Push a reply of which every part is chosen."""
    found = client.PushMessages(
        PushMessagesRequest(
            node=node._node,
            messages_list=[message_to_proto(head)],
            message_object_trees=[tree],
        )
    )
    for number in set(found.objects_to_push) & set(objects):
        client.PushObject(
            PushObjectRequest(
                node=node._node,
                run_id=head.metadata.run_id,
                session_id=found.session_id,
                object_id=number,
                object_content=objects[number],
            )
        )


def parts(message):
    """The tree of a message, and what each object of it is as bytes."""
    message.metadata.__dict__["_message_id"] = message.object_id
    with no_object_id_recompute():
        objects = get_all_nested_objects(message)
        return get_object_tree(message), {n: each.deflate() for n, each in objects.items()}


def head(own, number):
    """What the server is told of a reply, which is to have that number."""
    reply = flower_node._reply(RecordDict(), own)
    reply.metadata.__dict__["_message_id"] = number
    return reply


def as_itself(own, others):
    reply = flower_node._reply(record(b"forged"), others)
    reply.metadata.__dict__["_src_node_id"] = own.metadata.dst_node_id
    tree, objects = parts(reply)
    return remove_content_from_message(reply), tree, objects


def as_the_other(own, others):
    reply = flower_node._reply(record(b"forged"), others)
    tree, objects = parts(reply)
    return remove_content_from_message(reply), tree, objects


def within_its_own(own, others):
    tree, objects = parts(flower_node._reply(record(b"forged"), others))
    return head(own, tree.object_id), tree, objects


@pytest.mark.parametrize(
    "forged",
    [
        as_itself,
        as_the_other,
        within_its_own,
    ],
)
def test_a_node_cannot_answer_what_another_was_asked(world, guest, forged):
    def attack():
        others = next(m for m in grid.sent if m.metadata.dst_node_id == world.ids["ada"])
        with contextlib.suppress(httpx.HTTPStatusError):
            push(node, client, *forged(pulled(node, client), others))
        attacked.set()

    attacked = threading.Event()
    world.handlers["ada"] = lambda data: attacked.wait(10) and b"honest"
    with by_hand(world, guest) as (node, client):
        engine = world.engine(["ada", "guest"], timeout=20.0, patience=3.0)
        engine._grid = grid = Interrupting(engine._grid, attack)
        replies = dict(engine.exchange({"ada": b"1", "guest": b"1"}))
    assert replies["ada"] == b"honest"


def pulled(node, client):
    found = client.PullMessages(PullMessagesRequest(node=node._node))
    return message_from_proto(found.messages_list[0])


def of_another_number(own):
    tree, objects = parts(flower_node._reply(record(b"x"), own))
    return head(own, "0" * 64), tree, objects


def not_a_message(own):
    tree, objects = parts(flower_node._reply(record(b"x"), own))
    (tree,) = tree.children
    return head(own, tree.object_id), tree, objects


def without_a_part(own):
    tree, objects = parts(flower_node._reply(record(b"x"), own))
    del tree.children[:]
    return head(own, tree.object_id), tree, objects


def one_object(own, content):
    number = get_object_id(content)
    return head(own, number), ObjectTree(object_id=number), {number: content}


def garbage(own):
    return one_object(own, b"Message  3\0\xff\xff\xff")


def empty(own):
    return one_object(own, b"Message  0\0")


def half_sent(own):
    tree, _ = parts(flower_node._reply(record(b"x"), own))
    return head(own, tree.object_id), tree, {}


@pytest.mark.parametrize(
    "reply",
    [half_sent, of_another_number, not_a_message, without_a_part, garbage, empty],
)
def test_a_reply_that_cannot_be_read_is_of_no_consequence_for_others(
    world, guest, reply, monkeypatch
):
    keep_identity(monkeypatch)
    monkeypatch.setattr(world, "grid", world.link.grid())
    with by_hand(world, guest) as (node, client):
        engine = world.engine(["ada", "guest"], timeout=20.0, patience=3.0)
        engine._grid = Interrupting(
            engine._grid, lambda: push(node, client, *reply(pulled(node, client)))
        )
        replies = dict(engine.exchange({"ada": b"1", "guest": b"1"}))
        assert replies.pop("guest", b"") == b""
        assert replies == {"ada": b"re:1"}
        assert asked(world, "ada") == {"ada": b"re:ada"}


def of_many_parts(own):
    tree, _ = parts(flower_node._reply(record(b"x"), own))
    tree.children.extend(ObjectTree(object_id=f"{i:064x}") for i in range(3))
    return head(own, tree.object_id), tree


def of_many_levels(own):
    tree, _ = parts(flower_node._reply(record(b"x"), own))
    (innermost,) = tree.children[0].children
    innermost.children.append(ObjectTree(object_id="1" * 64))
    return head(own, tree.object_id), tree


def of_what_is_anothers(own):
    tree, _ = parts(flower_node._reply(record(b"x"), own))
    return head(own, "0" * 64), tree


@pytest.mark.parametrize("reply", [of_many_parts, of_many_levels, of_what_is_anothers])
def test_a_node_registers_nothing_but_the_parts_of_its_reply(world, guest, reply):
    with by_hand(world, guest) as (node, client):
        engine = world.engine(["guest"], timeout=1.0)

        def attack():
            message, tree = reply(pulled(node, client))
            request = PushMessagesRequest(
                node=node._node,
                messages_list=[message_to_proto(message)],
                message_object_trees=[tree],
            )
            taken.extend(client.PushMessages(request).objects_to_push)

        taken = []
        engine._grid = Interrupting(engine._grid, attack)
        assert dict(engine.exchange({"guest": b"1"})) == {}
    assert taken == []


def test_a_node_cannot_ask_another_in_the_servers_name(world, guest):
    heard = []
    world.handlers["ada"] = lambda data: heard.append(data) or b""
    tree, objects = parts(message := flower._message(world.ids["ada"], b"injected", 30.0))
    with by_hand(world, guest) as (node, client):
        push(node, client, remove_content_from_message(message), tree, objects)
    asked(world, "ada")
    assert heard == [b"ada"]


@pytest.mark.parametrize(
    "content", [ConfigRecord({FIELD: b"x"}).deflate(), b"ConfigRecord  5\0\xff\xff\xff\xff\xff"]
)
def test_a_request_that_cannot_be_read_does_not_end_a_node(world, content, caplog):
    message = flower._message(world.ids["ada"], b"x", 30.0)
    number = get_object_id(content)
    message.metadata.__dict__["_message_id"] = number
    state, run = world.link._state, world.grid.run.run_id
    session = state.start_session(run)
    with no_object_id_recompute():
        tree = ObjectTree(object_id=number)
        assert world.link._store(remove_content_from_message(message), tree, session)[0]
    state.store_object(run, session, number, content)
    assert asked(world, "ada") == {"ada": b"re:ada"}
    assert "a message that is no request was not answered" in caplog.text


def test_a_request_without_bytes_does_not_end_a_node(world, caplog):
    world.grid.push_messages(
        [Message(record("text"), dst_node_id=world.ids["ada"], message_type="query", ttl=30.0)]
    )
    until = time.monotonic() + 10
    while "was not answered" not in caplog.text and time.monotonic() < until:
        time.sleep(0.02)
    assert asked(world, "ada") == {"ada": b"re:ada"}
    assert "was not answered: the request is not bytes" in caplog.text


@pytest.fixture
def elsewhere():
    """A server that sends whoever asks to another path, and notes what it was asked for.

    A test can have it answer something else: a status and a body.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            paths.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = answer
            self.send_response(status)
            self.send_header("Location", "/another")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    paths, answer = [], [307, b""]
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}", paths, answer
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_node_does_not_go_where_it_is_sent(elsewhere, guest):
    address, paths, _ = elsewhere
    serve_briefly(FlowerNode(address, guest.node_key), seconds=0.3)
    assert set(paths) == {"/v1/fleet/activate-node"}


def test_a_server_cannot_end_a_node_by_a_word_about_versions(elsewhere, guest):
    address, paths, answer = elsewhere
    answer[:] = 503, b'{"code": 1001, "detail": "another version of Flower"}'
    assert get_runtime_version_incompatibility_exit_message(answer[1].decode()) is not None
    serve_briefly(FlowerNode(address, guest.node_key), seconds=1.0)
    assert len(paths) > 1  # it has tried again


def test_a_server_cannot_end_a_node_by_an_answer_that_is_none(elsewhere, guest, caplog):
    address, paths, answer = elsewhere
    answer[:] = 200, b"\xff" * 100
    serve_briefly(FlowerNode(address, guest.node_key), seconds=1.0)
    assert len(paths) > 1  # it has tried again
    assert "its answer cannot be read; waiting for it" in caplog.text


def test_a_clock_that_no_server_can_have_is_not_gone_by(guest):
    signing = FlowerNode("127.0.0.1:9", guest.node_key)._signing
    for date in ("Fri, 31 Dec 9999 23:59:59 GMT", "Mon, 01 Jan 1900 00:00:00 GMT"):
        assert not signing._correct(
            datetime.timedelta(), httpx.Response(401, headers={"date": date})
        )
    signing._sign(httpx.Request("POST", "http://127.0.0.1:9"), signing._ahead)


def test_a_server_cannot_end_a_node_by_asking_for_what_it_has_not(world, guest, monkeypatch):
    push = _Client.PushMessages

    def asks_for_more(client, request):
        found = push(client, request)
        found.objects_to_push.append("deadbeef")
        return found

    monkeypatch.setattr(_Client, "PushMessages", asks_for_more)
    assert asked(world, "ada") == {"ada": b"re:ada"}


def test_a_node_without_encryption_goes_by_way_of_nobody(elsewhere, guest, monkeypatch):
    address, paths, _ = elsewhere
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://{address}")
    serve_briefly(FlowerNode("127.0.0.1:9", guest.node_key), seconds=0.3)
    assert paths == []


def test_a_reply_that_was_given_up_halfway_is_of_no_consequence_later(world, guest, monkeypatch):
    keep_identity(monkeypatch)
    monkeypatch.setattr(world, "grid", world.link.grid())
    monkeypatch.setattr(in_memory_corestate, "OBJECT_PUSH_SESSION_TTL_SECONDS", 1)
    with by_hand(world, guest) as (node, client):
        engine = world.engine(["guest"], timeout=0.5)
        engine._grid = Interrupting(
            engine._grid, lambda: push(node, client, *half_sent(pulled(node, client)))
        )
        assert dict(engine.exchange({"guest": b"1"})) == {}
        time.sleep(1)
    for _ in range(3):
        assert asked(world, "ada") == {"ada": b"re:ada"}


@pytest.mark.parametrize("path", ["/v1/fleet/pull-messages", "/v1/fleet/pull-object"])
def test_a_request_is_pulled_again_when_the_connection_breaks(world, guest, monkeypatch, path):
    breaks, handled = [path], []

    class Breaking(flower_node._Client):
        def _unary_unary(self, **options):
            found = super()._unary_unary(**options)
            if options["path"] in breaks and getattr(found, "messages_list", True):
                breaks.clear()
                raise httpx.ReadError("broken")
            return found

    monkeypatch.setattr(flower_node, "_Client", Breaking)
    with serving(world, guest, lambda data: handled.append(data) or echo(data)):
        assert asked(world, "guest") == {"guest": b"re:guest"}
    assert not breaks
    assert len(handled) == 1


def test_a_process_that_takes_the_place_of_a_killed_one_is_asked_at_once(world, guest):
    with contextlib.ExitStack() as later, by_hand(world, guest) as (node, client):
        engine = world.engine(["guest"], timeout=10.0)

        def killed():
            pulled(node, client)
            later.enter_context(serving(world, guest, echo))

        engine._grid = Interrupting(engine._grid, killed)
        started = time.monotonic()
        assert dict(engine.exchange({"guest": b"1"})) == {"guest": b"re:1"}
        assert time.monotonic() - started < 5


def test_a_process_that_was_killed_half_way_through_its_reply_is_asked_again(world, guest):
    with contextlib.ExitStack() as later, by_hand(world, guest) as (node, client):
        engine = world.engine(["guest"], timeout=10.0)

        def killed():
            push(node, client, *half_sent(pulled(node, client)))
            later.enter_context(serving(world, guest, echo))

        engine._grid = Interrupting(engine._grid, killed)
        started = time.monotonic()
        assert dict(engine.exchange({"guest": b"1"})) == {"guest": b"re:1"}
        assert time.monotonic() - started < 5


def test_what_was_asked_before_is_not_answered_any_more(world, guest):
    engine = world.engine(["guest"], timeout=0.3)
    with by_hand(world, guest):
        assert dict(engine.exchange({"guest": b"old"})) == {}
    with serving(world, guest, echo):
        assert asked(world, "guest") == {"guest": b"re:guest"}
    left = world.link._state.message_ins_store.values()
    assert world.ids["guest"] not in {each.metadata.dst_node_id for each in left}


@pytest.mark.parametrize("arrives", [False, True], ids=["lost", "taken"])
@pytest.mark.parametrize("path", ["/v1/fleet/push-messages", "/v1/fleet/push-object"])
def test_a_reply_is_sent_again_when_the_connection_breaks(world, guest, monkeypatch, path, arrives):
    breaks, handled = [path], []

    class Breaking(flower_node._Client):
        def _unary_unary(self, **options):
            if options["path"] not in breaks:
                return super()._unary_unary(**options)
            breaks.clear()
            if arrives:
                super()._unary_unary(**options)
            raise httpx.ReadError("broken")

    def handle(data):
        handled.append(data)
        return echo(data)

    monkeypatch.setattr(flower_node, "_Client", Breaking)
    with serving(world, guest, handle):
        assert asked(world, "guest") == {"guest": b"re:guest"}
        assert asked(world, "guest") == {"guest": b"re:guest"}
    assert not breaks
    assert len(handled) == 2


def test_a_request_whose_parts_come_after_it_is_answered(world, monkeypatch):
    store = world.link._state.store_object

    def slowly(*args):
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.3)
        return store(*args)

    monkeypatch.setattr(world.link._state, "store_object", slowly)
    assert dict(world.engine(["ada"], timeout=20.0).exchange({"ada": b"1"})) == {"ada": b"re:1"}


def test_a_reply_that_begins_to_come_while_the_server_looks_is_not_lost(world, monkeypatch):
    look = world.link._state.get_message_res

    def slowly(**given):
        time.sleep(0.05)
        return look(**given)

    monkeypatch.setattr(world.link._state, "get_message_res", slowly)
    for _ in range(10):
        assert asked(world, *world.names) == {n: f"re:{n}".encode() for n in world.names}


def test_two_runs_at_once_do_not_get_in_each_others_way(world, monkeypatch):
    keep_identity(monkeypatch)
    before, after = world.engine(["ada"]), world.engine(["bob"])
    after._grid = world.link.grid()
    assert dict(after.exchange({"bob": b"2"})) == {"bob": b"re:2"}
    assert dict(before.exchange({"ada": b"1"})) == {"ada": b"re:1"}


def test_a_port_that_is_taken_is_said_to_be(world):
    place = world.parties.server.folder
    link = SuperLink(
        "127.0.0.1", world.link.port, certificate=place / "server.pem", key=place / "server.key"
    )
    with pytest.raises(ParameterError, match=f"127.0.0.1:{world.link.port} cannot be listened on"):
        link.__enter__()
    assert asked(world, "ada") == {"ada": b"re:ada"}


@pytest.mark.parametrize("bad", ["garbage", "missing", "another's"])
def test_a_certificate_that_its_key_does_not_fit_is_refused(world, tmp_path, bad):
    place = world.parties.server.folder
    key = tmp_path / "server.key"
    if bad == "garbage":
        key.write_text("no key")
    elif bad == "another's":
        key = Keys.create_server(tmp_path / "other", ["127.0.0.1"]).folder / "server.key"
    with pytest.raises(ParameterError, match="no certificate and its key"):
        SuperLink("127.0.0.1", 0, certificate=place / "server.pem", key=key)
