from typing import Any

import numpy as np
import pytest

from secure_fedclust import FederationWarning, PrivacySpec, ProtocolError
from secure_fedclust.engines import Fault, InProcessEngine
from secure_fedclust.messages import Array, Integer, read_envelope, stage
from secure_fedclust.protocols.client import Client, answers
from secure_fedclust.protocols.session import Session

SPEC = PrivacySpec.none(reason="test")
COUNT = stage("test/count", request={"n": Integer(1)}, reply={"x": Array(("d",))})
SHIFT = stage("test/shift", request={"c": Array(("k", "d"))}, reply={"c": Array(("k", "d"))})
OTHER = stage("test/other", request={}, reply={})


class ShiftClient(Client):
    calls = 0

    @answers(COUNT, after=(None, COUNT, SHIFT))
    def count(self, n: int) -> dict[str, Any]:
        self.calls += 1
        return {"x": self.X.sum(axis=0) * n}

    @answers(SHIFT, after=(None, COUNT, SHIFT))
    def shift(self, c: Any) -> dict[str, Any]:
        return {"c": c + self.X[0]}


def client(width=2, value=1.0):
    return ShiftClient(np.full((3, width), value), SPEC, np.random.default_rng(0))


def session(*faults, **clients):
    everyone = {"a": client(), "b": client(value=2.0)} | clients
    return Session(InProcessEngine({n: c.handle for n, c in everyone.items()}, faults=faults), SPEC)


def test_all_replies_arrive_checked():
    replies = session().ask_all(COUNT, n=2)
    np.testing.assert_array_equal(replies["a"]["x"], [6, 6])
    np.testing.assert_array_equal(replies["b"]["x"], [12, 12])


def test_each_client_can_be_asked_something_else():
    requests = {"a": {"c": np.zeros((1, 2))}, "b": {"c": np.zeros((4, 2))}}
    replies = session().ask(SHIFT, requests)
    assert [len(replies[name]["c"]) for name in "ab"] == [1, 4]


@pytest.mark.parametrize("kind", ["corrupt", "truncate"])
def test_a_damaged_reply_is_set_aside_and_the_others_go_on(kind):
    s = session(Fault("a", 0, kind))
    with pytest.warns(FederationWarning, match="a: reply to test/count set aside: .*checksum"):
        replies = s.ask_all(COUNT, n=1)
    assert list(replies) == ["b"]
    assert "checksum" in s.history[0].rejected["a"]


def test_a_reply_of_an_earlier_step_is_set_aside():
    s = session(Fault("a", 0, "delay"))
    assert list(s.ask_all(COUNT, n=1)) == ["b"]
    assert s.history[0].absent == ("a",)
    with pytest.warns(FederationWarning, match="step 0, this is step 1"):
        assert list(s.ask_all(COUNT, n=1)) == ["b"]
    assert list(s.ask_all(COUNT, n=1)) == ["a", "b"]


def forged(reply):
    """A client that answers what it likes, correctly framed."""

    class Forger:
        def handle(self, data):
            envelope = read_envelope(data)
            schema, values = reply
            return schema.encode(values, run=envelope.run, step=envelope.step)

    return Forger()


def test_a_reply_of_another_schema_is_set_aside():
    s = session(c=forged((OTHER.reply, {})))
    with pytest.warns(FederationWarning, match="c: .*another schema"):
        assert list(s.ask_all(COUNT, n=1)) == ["a", "b"]


def test_an_oversized_reply_is_set_aside():
    s = session(c=forged((COUNT.reply, {"x": np.zeros(100_000)})))
    with pytest.warns(FederationWarning, match="c: .*100000 features where most clients have 2"):
        s.ask_all(COUNT, n=1)
    with pytest.warns(FederationWarning, match="c: .*bytes, at most"):
        assert list(s.ask_all(COUNT, n=1)) == ["a", "b"]


def test_a_reply_must_have_the_shape_of_its_request():
    s = session(c=forged((SHIFT.reply, {"c": np.zeros((3, 2))})))
    with pytest.warns(FederationWarning, match="c: .*dimension 'k' is 3, expected 2"):
        assert list(s.ask_all(SHIFT, c=np.zeros((2, 2)))) == ["a", "b"]


def test_a_client_of_another_width_is_set_aside():
    with pytest.warns(FederationWarning, match="c: .*3 features where most clients have 2"):
        assert list(session(c=client(width=3)).ask_all(COUNT, n=1)) == ["a", "b"]


def test_a_tie_between_widths_is_an_error():
    with pytest.raises(ProtocolError, match="disagree on the number of features"):
        session(b=client(width=3)).ask_all(COUNT, n=1)


def test_without_any_usable_reply_the_run_ends():
    s = session(Fault("a", 0, "drop"), Fault("b", 0, "corrupt"))
    with (
        pytest.warns(FederationWarning),
        pytest.raises(ProtocolError, match="no usable reply from any of 2 clients"),
    ):
        s.ask_all(COUNT, n=1)


def test_bytes_and_time_of_every_exchange_are_kept():
    s = session()
    s.ask_all(COUNT, n=1)
    exchange = s.history[0]
    assert exchange.stage == "test/count"
    assert exchange.asked == ("a", "b")
    assert exchange.bytes_up > 2 * 2 * 8
    assert exchange.bytes_down > 0
    assert exchange.seconds > 0


def test_the_same_request_again_gets_the_same_bytes_and_no_new_computation():
    c = client()
    request = COUNT.request.encode({"n": 1}, run="r", step=0)
    assert c.handle(request) == c.handle(request)
    assert c.calls == 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (COUNT.request.encode({"n": 2}, run="r", step=3), "step 3 is answered"),
        (COUNT.request.encode({"n": 1}, run="r", step=2), "step 3 is answered"),
        (COUNT.request.encode({"n": 1}, run="other", step=4), "another run"),
        (OTHER.request.encode({}, run="r", step=4), "does not take part in"),
        (SHIFT.request.encode({"c": np.zeros((1, 5))}, run="r", step=4), "'d' is 5, expected 2"),
        (SHIFT.request.encode({"c": np.zeros((0, 2))}, run="r", step=4), "'k' is 0, expected 1"),
        (b"nonsense", "not a message"),
        (b"", "truncated"),
    ],
)
def test_a_client_refuses_what_does_not_fit(request_, message):
    c = client()
    c.handle(COUNT.request.encode({"n": 1}, run="r", step=3))
    with pytest.raises(ProtocolError, match=message):
        c.handle(request_)
    assert c.calls == 1


def test_a_refused_request_leaves_the_client_as_it_was():
    c = client()
    with pytest.raises(ProtocolError):
        c.handle(SHIFT.request.encode({"c": np.zeros((1, 5))}, run="r", step=9))
    c.handle(COUNT.request.encode({"n": 1}, run="q", step=0))
    assert c.calls == 1
