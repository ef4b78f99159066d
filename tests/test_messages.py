import contextlib
import struct
import zlib

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from secure_fedclust.errors import ProtocolError
from secure_fedclust.messages import (
    MAX_BYTES,
    Array,
    Choice,
    Integer,
    Real,
    Schema,
    read_envelope,
    stage,
)

SCHEMA = Schema(
    "test/reply",
    {
        "centers": Array(("k", "d")),
        "counts": Array(("k",), "int64", minimum=0),
        "n": Integer(1, 10),
        "v": Real(minimum=0),
        "rule": Choice(("this", "that")),
    },
)
VALUES = {
    "centers": np.arange(6.0).reshape(3, 2),
    "counts": np.array([4, 0, 2]),
    "n": 3,
    "v": 0.5,
    "rule": "that",
}
DATA = SCHEMA.encode(VALUES, run="run", step=7)


def decode(data, **changes):
    arguments = {"run": "run", "step": 7, "bounds": {"k": (0, 5), "d": 2}} | changes
    return SCHEMA.decode(data, **arguments)


def forge(*row):
    body = b"".join(map(msgpack.packb, row))
    return struct.pack(">4sI", b"SFC1", zlib.crc32(body)) + body


def fields_of(data):
    unpacker = msgpack.Unpacker()
    unpacker.feed(data[8:])
    head, rest = (row := list(unpacker))[:3], row[3:]
    return head, dict(zip(rest[::2], rest[1::2], strict=True))


def forge_fields(**changes):
    head, fields = fields_of(DATA)
    return forge(*head, *(part for field in (fields | changes).items() for part in field))


def packed(array, *shape):
    """An array as it travels, with a shape that need not be its own."""
    shape = shape or array.shape
    return struct.pack(f"<B{len(shape)}Q", len(shape), *shape) + array.tobytes()


def test_what_was_encoded_is_decoded():
    values, sizes = decode(DATA)
    assert sizes == {"k": 3, "d": 2}
    np.testing.assert_array_equal(values["centers"], VALUES["centers"])
    np.testing.assert_array_equal(values["counts"], VALUES["counts"])
    assert values["counts"].dtype == np.int64
    assert {name: values[name] for name in ("n", "v", "rule")} == {"n": 3, "v": 0.5, "rule": "that"}


@given(
    arrays(
        np.float64,
        st.tuples(st.integers(0, 4), st.integers(1, 3)),
        elements=st.floats(-1e100, 1e100),
    )
)
def test_every_finite_array_arrives_bit_for_bit(array):
    schema = Schema("a", {"x": Array(("k", "d"))})
    values, _ = schema.decode(
        schema.encode({"x": array}, run="r", step=0), run="r", step=0, bounds={}
    )
    assert values["x"].tobytes() == array.tobytes()
    assert values["x"].shape == array.shape


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_no_flipped_byte_goes_unnoticed(position, change):
    corrupt = bytearray(DATA)
    corrupt[position] ^= change
    with pytest.raises(ProtocolError):
        decode(bytes(corrupt))


@given(st.integers(0, len(DATA) - 1))
def test_no_truncated_message_is_accepted(length):
    with pytest.raises(ProtocolError):
        decode(DATA[:length])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise_anything_but_a_protocol_error(data):
    with pytest.raises(ProtocolError):
        decode(data)
    body = struct.pack(">4sI", b"SFC1", zlib.crc32(data)) + data
    with pytest.raises(ProtocolError):
        decode(body)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "another"}, "another run"),
        ({"step": 8}, "step 7, this is step 8"),
        ({"bounds": {"d": 3}}, "dimension 'd' is 2, expected 3"),
        ({"bounds": {"k": (4, 9)}}, "dimension 'k' is 3, expected 4 to 9"),
    ],
)
def test_a_message_for_another_place_is_refused(changes, message):
    with pytest.raises(ProtocolError, match=message):
        decode(DATA, **changes)


def test_a_message_of_another_schema_is_refused():
    other = Schema("other", SCHEMA.fields)
    with pytest.raises(ProtocolError, match="another schema"):
        decode(other.encode(VALUES, run="run", step=7))


def test_a_message_larger_than_its_bounds_allow_is_refused_unopened():
    large = VALUES | {"centers": np.zeros((1000, 2)), "counts": np.zeros(1000, dtype=int)}
    with pytest.raises(ProtocolError, match="bytes, at most"):
        decode(SCHEMA.encode(large, run="run", step=7))
    with pytest.raises(ProtocolError, match="at most"):
        read_envelope(bytes(MAX_BYTES + 100))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"centers": packed(np.zeros(1), 3, 2)}, "'centers' does not have the length"),
        ({"centers": packed(np.zeros(0), 0, 2**62)}, "'centers' does not have the length"),
        ({"centers": packed(np.zeros(0), 2**63, 0)}, "'centers' does not have the length"),
        ({"centers": packed(np.zeros(0), 2**40, 2**40)}, "'centers' does not have the length"),
        ({"centers": packed(np.zeros(6))}, "'centers' is not an array of 2 dimensions"),
        ({"centers": b"\xff" * 600}, "'centers' is not an array"),
        ({"centers": b""}, "'centers' is not an array"),
        ({"centers": "text"}, "'centers' is not an array"),
        ({"centers": [1, 2]}, "plain msgpack"),
        ({"centers": {"a": 1}}, "plain msgpack"),
        ({"centers": packed(np.full((3, 2), np.nan))}, "'centers' holds .* not finite"),
        ({"centers": packed(np.full((3, 2), -np.inf))}, "'centers' holds .* not finite"),
        (
            {"centers": packed(np.zeros((2, 2)))},
            "'counts': dimension 'k' is 3 here and 2 elsewhere",
        ),
        ({"centers": packed(np.full((3, 2), 1e300))}, "'centers' holds values beyond 1e"),
        ({"counts": packed(np.full(3, 2**62))}, "'counts' holds values beyond 1"),
        ({"counts": packed(np.full(3, -(2**63)))}, "'counts' holds values b"),
        ({"counts": packed(np.array([1, -1, 1]))}, "'counts' holds values below 0"),
        ({"n": 11}, "'n' is not a whole number from 1 to 10"),
        ({"n": True}, "'n' is not a whole number"),
        ({"n": 2.0}, "'n' is not a whole number"),
        ({"v": -1.0}, "'v' is not a finite number"),
        ({"v": float("nan")}, "'v' is not a finite number"),
        ({"v": 1}, "'v' is not a finite number"),
        ({"rule": "other"}, "'rule' is none of this, that"),
        ({"rule": 5}, "'rule' is none of"),
        ({"surplus": 1}, "not a row of names and values"),
    ],
)
def test_a_field_that_breaks_the_schema_is_named(changes, message):
    with pytest.raises(ProtocolError, match=message):
        decode(forge_fields(**changes))


def test_a_missing_field_is_named():
    head, fields = fields_of(DATA)
    del fields["v"]
    with pytest.raises(ProtocolError, match="missing fields \\['v'\\]"):
        decode(forge(*head, *(part for field in fields.items() for part in field)))


def test_an_unknown_field_in_place_of_another_is_refused():
    head, fields = fields_of(DATA)
    fields["w"] = fields.pop("v")
    with pytest.raises(ProtocolError, match="1 unknown"):
        decode(forge(*head, *(part for field in fields.items() for part in field)))


@pytest.mark.parametrize("row", [(), (5,), ("a", "b"), ("a", "b", "c"), (1, "b", 2), (["a"],)])
def test_a_body_of_another_form_is_refused(row):
    with pytest.raises(ProtocolError, match=r"begin with schema|plain msgpack"):
        decode(forge(*row))


def test_a_message_cannot_unfold_into_more_than_it_weighs():
    """Nested lists and maps cost many times their bytes, so they are not even looked into."""
    head = [SCHEMA.name, "run", 7]
    for bomb in (b"\x80" * 1000, b"\x90" * 1000, b"\xc0" * 1000, b"\x9f" * 1000, b"\x81" * 1000):
        body = b"".join(map(msgpack.packb, head)) + bomb
        with pytest.raises(ProtocolError):
            decode(struct.pack(">4sI", b"SFC1", zlib.crc32(body)) + body)


@pytest.mark.parametrize("data", [None, 5, "text", bytearray(DATA), [DATA]])
def test_what_is_not_bytes_is_refused(data):
    with pytest.raises(ProtocolError, match="a message is bytes"):
        decode(data)
    with pytest.raises(ProtocolError, match="a message is bytes"):
        read_envelope(data)


@given(st.dictionaries(st.sampled_from(list(VALUES)), st.binary(max_size=80), min_size=1))
def test_arbitrary_bytes_in_fields_never_raise_anything_but_a_protocol_error(changes):
    with contextlib.suppress(ProtocolError):
        decode(forge_fields(**changes))


def test_the_sender_refuses_what_the_receiver_would():
    with pytest.raises(ProtocolError, match="'centers' holds values that are not finite"):
        SCHEMA.encode(VALUES | {"centers": np.full((3, 2), np.nan)}, run="r", step=0)
    with pytest.raises(ProtocolError, match="missing fields"):
        SCHEMA.encode({}, run="r", step=0)


def test_refusals_quote_no_values():
    secret = 123456.789
    data = forge_fields(centers=packed(np.full((1, 1), secret)))
    with pytest.raises(ProtocolError) as caught:
        decode(data)
    assert "123456" not in str(caught.value)


def test_no_reply_can_make_the_next_request_impossible():
    fields = {"x": Array(("k",))}
    both = stage("s", request=fields, reply=fields)
    sum_of_replies = {"x": np.full(1, 1e100) * 1_000_000}
    both.request.encode(sum_of_replies, run="r", step=0)
    with pytest.raises(ProtocolError, match="beyond 1e\\+100"):
        both.reply.encode(sum_of_replies, run="r", step=0)
