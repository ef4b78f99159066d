import pytest

from secure_fedclust.engines import Engine, Fault, InProcessEngine
from secure_fedclust.errors import ProtocolError


def echo(request):
    return b"re:" + request


def engine(*faults, **handlers):
    return InProcessEngine({"a": echo, "b": echo} | handlers, faults=faults)


def test_every_client_gets_its_own_request():
    assert dict(engine().exchange({"a": b"1", "b": b"2"})) == {"a": b"re:1", "b": b"re:2"}


def test_it_is_an_engine():
    assert isinstance(engine(), Engine)
    assert engine().clients == ("a", "b")


def test_a_client_that_refuses_is_absent(caplog):
    def refuse(request):
        raise ProtocolError("not like this")

    assert dict(engine(b=refuse).exchange({"a": b"1", "b": b"2"})) == {"a": b"re:1"}
    assert "b did not answer: not like this" in caplog.text


def test_a_bug_in_a_client_is_not_hidden():
    def broken(request):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        dict(engine(b=broken).exchange({"b": b"2"}))


def test_a_dropped_reply_is_absent_once():
    e = engine(Fault("a", 0, "drop"))
    assert dict(e.exchange({"a": b"1"})) == {}
    assert dict(e.exchange({"a": b"2"})) == {"a": b"re:2"}


def test_a_delayed_reply_comes_in_place_of_the_next():
    e = engine(Fault("a", 0, "delay"))
    assert dict(e.exchange({"a": b"1"})) == {}
    assert dict(e.exchange({"a": b"2"})) == {"a": b"re:1"}
    assert dict(e.exchange({"a": b"3"})) == {"a": b"re:3"}


def test_a_corrupt_or_truncated_reply_differs():
    corrupt = dict(engine(Fault("a", 0, "corrupt")).exchange({"a": b"1"}))["a"]
    assert corrupt != b"re:1" and len(corrupt) == 4
    assert dict(engine(Fault("a", 0, "truncate")).exchange({"a": b"1"})) == {"a": b"re"}


def test_every_call_is_reported():
    seen = []
    e = InProcessEngine({"a": echo, "b": echo}, on_reply=seen.append)
    list(e.exchange({"a": b"1", "b": b"2"}))
    assert seen == ["a", "b"]
