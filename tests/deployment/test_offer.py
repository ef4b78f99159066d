"""What is said before and after a run: read whole, or refused, whatever comes."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fedclust import FKM, PrivacySpec, __version__
from secure_fedclust.deployment.coordinator import enrol
from secure_fedclust.deployment.offer import (
    MOST_GREETING,
    PROTOCOL,
    Ending,
    Offer,
    Reply,
    Stranger,
    both_versions,
    decode,
    is_greeting,
)
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.errors import NotAdmitted, ProtocolError
from secure_fedclust.messages import MAX_BYTES

OFFER = Offer(
    run="0123",
    party="ada",
    role="client",
    algorithm="FKM",
    parameters={"n_clusters": 3},
    privacy={"reason": "test"},
    n_clients=4,
    columns=["a", "b"],
    seed=[1, 2],
    anchor=[3, "ab"],
)
MESSAGES = {
    "offer": OFFER,
    "bare offer": dataclasses.replace(OFFER, columns=None, anchor=None),
    "reply": Reply("0123", "yes", [3, "ab"]),
    "refusal": Reply("0123", "policy", None),
    "ending": Ending("0123", {"centers": [[0.5]]}),
    "given up": Ending("0123", None),
}
GREETING = OFFER.encode().partition(b"\n")[0] + b"\n"

KIND_OF = {"Offer": OFFER, "Reply": MESSAGES["reply"], "Ending": MESSAGES["ending"]}
MAY_BE_NONE = {"columns", "anchor", "result"}
VALUES = {
    "text": "x",
    "number": 5,
    "fraction": 0.5,
    "bool": True,
    "list": [],
    "table": {},
    "nothing": None,
}
KINDS = {str: "text", int: "number", list: "list", dict: "table"}


def content_of(message):
    return json.loads(message.encode().removeprefix(GREETING))


def greeting(content):
    return GREETING + json.dumps(content).encode()


def wrong_fields():
    for kind, message in KIND_OF.items():
        for name, right in dataclasses.asdict(message).items():
            allowed = {KINDS[type(right)]} | ({"nothing"} if name in MAY_BE_NONE else set())
            for label in sorted(set(VALUES) - allowed):
                yield pytest.param(kind, name, VALUES[label], id=f"{kind} {name} {label}")


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_read_as_it_was_written(name):
    data = MESSAGES[name].encode()
    assert is_greeting(data)
    assert decode(data) == MESSAGES[name]


def test_a_message_says_its_version():
    content = content_of(OFFER)
    assert (content["protocol"], content["version"]) == (PROTOCOL, __version__)


@pytest.mark.parametrize(("kind", "name", "value"), list(wrong_fields()))
def test_a_field_of_the_wrong_type_is_refused(kind, name, value):
    with pytest.raises(ProtocolError):
        decode(greeting(content_of(KIND_OF[kind]) | {name: value}))


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, m in KIND_OF.items() for name in (*dataclasses.asdict(m), "kind")],
)
def test_a_message_that_lacks_a_field_is_refused(kind, name):
    content = content_of(KIND_OF[kind])
    del content[name]
    with pytest.raises(ProtocolError):
        decode(greeting(content))


@pytest.mark.parametrize("kind", KIND_OF)
def test_a_message_with_another_field_is_refused(kind):
    with pytest.raises(ProtocolError, match="not the fields"):
        decode(greeting(content_of(KIND_OF[kind]) | {"more": 1}))


@pytest.mark.parametrize("kind", ["Message", "Stranger", "offer", "", None, 3, [], {}])
def test_an_unknown_kind_is_refused(kind):
    with pytest.raises(ProtocolError):
        decode(greeting(content_of(OFFER) | {"kind": kind}))


@pytest.mark.parametrize("name", ["run", "party", "role", "algorithm", "version"])
def test_a_text_that_is_too_long_is_refused(name):
    decode(greeting(content_of(OFFER) | {name: "x" * 256}))
    with pytest.raises(ProtocolError):
        decode(greeting(content_of(OFFER) | {name: "x" * 257}))


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\x1b[2Kb", "a\x00", "a\u2028b", "a\u202eb"])
def test_a_text_that_would_forge_a_line_of_a_log_is_refused(text):
    with pytest.raises(ProtocolError, match="cannot be printed"):
        decode(dataclasses.replace(MESSAGES["offer"], run=text).encode())


def test_a_message_beyond_the_limit_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("it was parsed"))
    for kind, most in ((b"", MOST_GREETING), (b'{"kind": "Ending"', MAX_BYTES)):
        start = GREETING + kind
        with pytest.raises(ProtocolError, match="not a greeting"):
            decode(start + b" " * (most + 1 - len(start)))


def test_a_limit_holds_for_whatever_a_message_says_it_is():
    fields = json.loads(OFFER.encode()[len(GREETING) :])
    twice = json.dumps({"kind": "Ending"})[:-1] + ", " + json.dumps(fields)[1:]
    with pytest.raises(ProtocolError, match="a name is there twice"):
        decode(GREETING + twice.encode())
    with pytest.raises(ProtocolError, match="not a greeting"):
        decode(Ending("r", {"networks": "x" * 1000}).encode(), 1000)


def test_an_ending_may_be_longer_than_an_offer():
    result = {"networks": "x" * MOST_GREETING}
    assert decode(Ending("r", result).encode()) == Ending("r", result)
    with pytest.raises(ProtocolError, match=f"at most {MOST_GREETING}"):
        dataclasses.replace(OFFER, parameters=result).encode()


def test_a_message_beyond_the_limit_is_not_written(monkeypatch):
    monkeypatch.setattr("secure_fedclust.deployment.offer.MOST_GREETING", 200)
    with pytest.raises(ProtocolError, match="at most 200"):
        OFFER.encode()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_not_written(number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        dataclasses.replace(OFFER, parameters={"x": number}).encode()


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, b'{"kind":' + b"[" * 10_000])
def test_deeply_nested_json_is_refused(data):
    with pytest.raises(ProtocolError):
        decode(GREETING + data)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"3", b"null", b'"text"', b"{}", b"{", b"\xff", b"NaN", b"\x00", b"9" * 5000],
)
def test_a_greeting_of_something_else_is_refused(data):
    with pytest.raises(ProtocolError):
        decode(GREETING + data)


@given(st.binary(max_size=200))
def test_bytes_are_refused(data):
    with pytest.raises(ProtocolError):
        decode(data)


@given(st.binary(max_size=200))
def test_bytes_after_the_greeting_are_refused(data):
    with pytest.raises(ProtocolError):
        decode(GREETING + data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(max_examples=200)
@given(st.sampled_from(sorted(KIND_OF)), st.data())
def test_a_message_with_any_values_is_read_or_refused(kind, data):
    content = content_of(KIND_OF[kind])
    for name in data.draw(st.sets(st.sampled_from(sorted(content)), min_size=1)):
        content[name] = data.draw(JSON)
    try:
        decode(greeting(content))
    except ProtocolError:
        pass


@settings(max_examples=200)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_message_is_read_or_refused(place, change):
    data = bytearray(OFFER.encode())
    data[place % len(data)] ^= change
    try:
        decode(bytes(data))
    except ProtocolError:
        pass


@pytest.mark.parametrize("protocol", [0, 2, -1, 10**6])
def test_of_another_protocol_only_its_version_is_read(protocol):
    content = {"kind": "Invitation", "protocol": protocol, "version": "9.1", "new": [1]}
    assert decode(greeting(content)) == Stranger(protocol, "9.1")


@pytest.mark.parametrize(
    "changes",
    [
        *({"protocol": each} for each in ("2", 2.0, True, None)),
        *({"version": each} for each in (9, "9" * 300, None)),
    ],
)
def test_another_protocol_that_does_not_say_which_is_refused(changes):
    content = {"kind": "Offer", "protocol": 2, "version": "9.1"}
    with pytest.raises(ProtocolError):
        decode(greeting(content | changes))


def test_both_versions_are_named():
    said = both_versions(Stranger(7, "9.1"))
    for part in ("9.1 (protocol 7)", f"{__version__} (protocol {PROTOCOL})"):
        assert part in said


def of_another_version(message):
    return greeting(content_of(message) | {"protocol": 7, "version": "9.1"})


@pytest.mark.parametrize(
    "answer",
    [of_another_version(Reply("x", "yes", None)), None],
    ids=["in another form", "in this form"],
)
def test_the_server_says_both_versions(answer):
    if answer is None:  # as a later version would answer, in a form that this one can read
        answer = Reply("", "version", None, version="9.1").encode()
        shown = f"9.1 (protocol {PROTOCOL})"
    else:
        shown = "9.1 (protocol 7)"
    model = FKM(2, privacy=PrivacySpec.none(reason="test"))
    with pytest.raises(NotAdmitted) as error:
        enrol(InProcessEngine({"ada": lambda _: answer}), model, run="r")
    assert f"ada: the other end has secure_fedclust {shown}" in str(error.value)
    assert f"{__version__} (protocol {PROTOCOL})" in str(error.value)


@pytest.mark.parametrize("version", ["\x1b[2J", "x" * 257, "a\nb"])
def test_a_version_that_cannot_be_shown_is_not(version):
    content = {"kind": "Offer", "protocol": PROTOCOL + 1, "version": version}
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode(b"secure_fedclust greeting\n" + json.dumps(content).encode())


def test_an_answer_is_one_of_the_words_there_are():
    said = dataclasses.replace(Reply("run", "yes", None), answer="<img src=x>")
    with pytest.raises(ProtocolError, match="none of the words"):
        decode(said.encode())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_refused(number):
    text = f'{{"kind": "Reply", "protocol": {PROTOCOL}, "version": "1", "run": {number}}}'
    with pytest.raises(ProtocolError, match="is no number"):
        decode(b"secure_fedclust greeting\n" + text.encode())
