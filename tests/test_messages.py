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


def forge(content):
    body = msgpack.packb(content)
    return struct.pack(">4sI", b"SFC1", zlib.crc32(body)) + body


def forge_fields(**changes):
    schema, run, step, fields = msgpack.unpackb(DATA[8:])
    return forge([schema, run, step, fields | changes])


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
        ({"centers": [[3, 2], bytes(8)]}, "'centers' has 8 bytes"),
        ({"centers": [[-3, 2], bytes(48)]}, "'centers' is not an array"),
        ({"centers": [[2**40, 2**40], b""]}, "'centers' has 0 bytes"),
        ({"centers": [[6], bytes(48)]}, "'centers' has 1 dimensions"),
        ({"centers": "text"}, "'centers' is not an array"),
        ({"centers": [[3, 2], np.full(6, np.nan).tobytes()]}, "'centers' holds .* not finite"),
        ({"centers": [[3, 2], np.full(6, -np.inf).tobytes()]}, "'centers' holds .* not finite"),
        ({"centers": [[2, 2], bytes(32)]}, "'counts': dimension 'k' is 3 here and 2 elsewhere"),
        ({"centers": [[3, 2], np.full(6, 1e300).tobytes()]}, "'centers' holds values beyond 1e"),
        ({"counts": [[3], np.full(3, 2**62).tobytes()]}, "'counts' holds values beyond 1"),
        ({"counts": [[3], np.full(3, -(2**63)).tobytes()]}, "'counts' holds values b"),
        ({"counts": [[3], np.array([1, -1, 1]).tobytes()]}, "'counts' holds values below 0"),
        ({"n": 11}, "'n' is not a whole number from 1 to 10"),
        ({"n": True}, "'n' is not a whole number"),
        ({"n": 2.0}, "'n' is not a whole number"),
        ({"v": -1.0}, "'v' is not a number"),
        ({"v": float("nan")}, "'v' is not a number"),
        ({"v": 1}, "'v' is not a number"),
        ({"rule": "other"}, "'rule' is none of this, that"),
        ({"rule": 5}, "'rule' is none of"),
        ({"surplus": 1}, "1 unknown"),
    ],
)
def test_a_field_that_breaks_the_schema_is_named(changes, message):
    with pytest.raises(ProtocolError, match=message):
        decode(forge_fields(**changes))


def test_a_missing_field_is_named():
    schema, run, step, fields = msgpack.unpackb(DATA[8:])
    del fields["v"]
    with pytest.raises(ProtocolError, match="missing fields \\['v'\\]"):
        decode(forge([schema, run, step, fields]))


@pytest.mark.parametrize("content", [5, [], ["a", "b", 1], ["a", "b", "c", {}], [1, "b", 2, {}]])
def test_a_body_of_another_form_is_refused(content):
    with pytest.raises(ProtocolError, match="list of schema"):
        decode(forge(content))


def test_the_sender_refuses_what_the_receiver_would():
    with pytest.raises(ProtocolError, match="'centers' holds values that are not finite"):
        SCHEMA.encode(VALUES | {"centers": np.full((3, 2), np.nan)}, run="r", step=0)
    with pytest.raises(ProtocolError, match="missing fields"):
        SCHEMA.encode({}, run="r", step=0)


def test_refusals_quote_no_values():
    secret = 123456.789
    data = forge_fields(centers=[[1, 1], struct.pack("<d", secret)])
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
