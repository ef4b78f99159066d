"""What travels between server and clients: schema-checked binary messages, never pickle.

A `Stage` is one question of the server and the answer to it. Both are checked field by field when
they are decoded; whatever does not fit raises a `ProtocolError` that names the field.

On the wire a message is four bytes of magic, a CRC-32 of the rest, and a flat row of msgpack
values: schema name, run, step, then name and value of each field. Nothing is nested, so that no
message can unfold into more than it weighs. An array travels as bytes: number of dimensions, their
sizes, little-endian values; its type is in the schema. The checksum finds accidents; who sent a
message is for the engine to authenticate.
"""

import math
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import msgpack
import numpy as np

from secure_fedclust.errors import ProtocolError

MAX_BYTES = 1 << 26
"""No message is larger, whatever its schema would allow."""

KEY_HOLDER = "key holder"
"""The name by which an engine reaches the party that opens encrypted sums."""

_MAGIC = b"SFC1"
_HEADER = struct.Struct(">4sI")
_OVERHEAD = 512
_LARGEST = 1e100
_LARGEST_REQUEST = 1e120
_LARGEST_OF = {"float64": _LARGEST, "float32": 1e15, "int64": 1 << 40}
_LARGEST_STEPS = 1 << 62
_LARGEST_NOISE = 1 << 56
_SMALLEST_SHARE = 1e-9

Bounds = Mapping[str, int | tuple[int, int]]
"""What a named dimension may be: exactly one size, or any from a first to a last."""


class Field(ABC):
    """One value of a message."""

    @abstractmethod
    def pack(self, name: str, value: Any) -> Any:
        """Turn a value into what msgpack can carry, or refuse it."""

    @abstractmethod
    def unpack(self, name: str, packed: Any) -> Any:
        """Turn what msgpack carried into a value, or refuse it."""

    def dimensions(self, value: Any) -> list[tuple[str, int]]:
        """Name and size of each dimension of a value; none unless it is an array."""
        return []

    def max_bytes(self, bounds: Bounds) -> int:
        """Return the largest size that a value within the bounds has on the wire."""
        return 64


@dataclass(frozen=True)
class Array(Field):
    """A numeric array whose dimensions have names; equal names mean equal sizes."""

    shape: tuple[str, ...]
    dtype: Literal["float64", "float32", "int64", "uint64", "uint16", "uint8"] = "float64"
    minimum: float | None = None
    largest: float | None = None

    def pack(self, name: str, value: Any) -> bytes:
        array = np.ascontiguousarray(value, dtype=np.dtype(self.dtype).newbyteorder("<"))
        self._check(name, array)
        return struct.pack(f"<B{array.ndim}Q", array.ndim, *array.shape) + array.tobytes()

    def unpack(self, name: str, packed: Any) -> np.ndarray[Any, Any]:
        ndim = len(self.shape)
        start = 1 + 8 * ndim
        if type(packed) is not bytes or len(packed) < start or packed[0] != ndim:
            raise ProtocolError(f"field {name!r} is not an array of {ndim} dimensions")
        shape = struct.unpack_from(f"<{ndim}Q", packed, 1)
        size = np.dtype(self.dtype).itemsize
        if max(shape) > MAX_BYTES or len(packed) != start + size * math.prod(shape):
            raise ProtocolError(f"field {name!r} does not have the length that its shape needs")
        array = np.frombuffer(packed, dtype=np.dtype(self.dtype).newbyteorder("<"), offset=start)
        array = array.reshape(shape).astype(self.dtype)
        self._check(name, array)
        return array

    def dimensions(self, value: Any) -> list[tuple[str, int]]:
        return list(zip(self.shape, np.shape(value), strict=True))

    def max_bytes(self, bounds: Bounds) -> int:
        sizes = (_span(bounds.get(name, (0, MAX_BYTES)))[1] for name in self.shape)
        return 64 + np.dtype(self.dtype).itemsize * math.prod(sizes)

    def _check(self, name: str, array: np.ndarray[Any, Any]) -> None:
        if array.ndim != len(self.shape):
            raise ProtocolError(
                f"field {name!r} has {array.ndim} dimensions, expected {len(self.shape)}"
            )
        if not np.isfinite(array).all():
            raise ProtocolError(f"field {name!r} holds values that are not finite")
        largest = _LARGEST_OF.get(self.dtype) if self.largest is None else self.largest
        if largest is not None and ((array > largest) | (array < -largest)).any():
            raise ProtocolError(
                f"field {name!r} holds values beyond {largest:g}, whose sums or squares overflow"
            )
        if self.minimum is not None and (array < self.minimum).any():
            raise ProtocolError(f"field {name!r} holds values below {self.minimum}")


@dataclass(frozen=True)
class Blob(Field):
    """Bytes that mean nothing here, such as keys and ciphertexts; how many has a name."""

    size: str

    def pack(self, name: str, value: Any) -> bytes:
        return self.unpack(name, value)

    def unpack(self, name: str, packed: Any) -> bytes:
        if type(packed) is not bytes:
            raise ProtocolError(f"field {name!r} is not bytes")
        return packed

    def dimensions(self, value: Any) -> list[tuple[str, int]]:
        return [(self.size, len(value))]

    def max_bytes(self, bounds: Bounds) -> int:
        return 64 + _span(bounds.get(self.size, (0, MAX_BYTES)))[1]


@dataclass(frozen=True)
class Integer(Field):
    """A whole number in a range."""

    minimum: int = 0
    maximum: int = 2**53

    def pack(self, name: str, value: Any) -> int:
        return self.unpack(name, int(value))

    def unpack(self, name: str, packed: Any) -> int:
        if type(packed) is not int or not self.minimum <= packed <= self.maximum:
            raise ProtocolError(
                f"field {name!r} is not a whole number from {self.minimum} to {self.maximum}"
            )
        return packed


@dataclass(frozen=True)
class Real(Field):
    """A finite number in a range."""

    minimum: float = -math.inf
    maximum: float = math.inf

    def pack(self, name: str, value: Any) -> float:
        return self.unpack(name, float(value))

    def unpack(self, name: str, packed: Any) -> float:
        finite = type(packed) is float and math.isfinite(packed)
        if not finite or not self.minimum <= packed <= self.maximum:
            limits = f"from {self.minimum:g} to {self.maximum:g}"
            raise ProtocolError(f"field {name!r} is not a finite number {limits}")
        return float(packed)


@dataclass(frozen=True)
class Choice(Field):
    """One of a few words."""

    words: tuple[str, ...]

    def pack(self, name: str, value: Any) -> str:
        return self.unpack(name, value)

    def unpack(self, name: str, packed: Any) -> str:
        if type(packed) is not str or packed not in self.words:
            raise ProtocolError(f"field {name!r} is none of {', '.join(self.words)}")
        return packed


@dataclass(frozen=True)
class Digest(Field):
    """A SHA-256 as 64 hexadecimal digits."""

    def pack(self, name: str, value: Any) -> str:
        return self.unpack(name, value)

    def unpack(self, name: str, packed: Any) -> str:
        if type(packed) is not str or len(packed) != 64 or set(packed) - set("0123456789abcdef"):
            raise ProtocolError(f"field {name!r} is not 64 hexadecimal digits")
        return packed

    def max_bytes(self, bounds: Bounds) -> int:
        return 128


def steps(*shape: str) -> Array:
    """Whole numbers of grid steps, with noise."""
    return Array(shape, "int64", largest=_LARGEST_STEPS)


Values = dict[str, Any]


@dataclass(frozen=True)
class Envelope:
    """Which message this is: the schema's name, the run and the step within the run."""

    schema: str
    run: str
    step: int


@dataclass(frozen=True)
class Schema:
    """The fields of one kind of message."""

    name: str
    fields: Mapping[str, Field] = field(default_factory=dict)

    def encode(self, values: Mapping[str, Any], *, run: str, step: int) -> bytes:
        """Turn values into bytes, refusing what the other side would refuse."""
        self._check_names(values)
        packer = msgpack.Packer()
        row: list[Any] = [self.name, run, step]
        for name, kind in self.fields.items():
            row += [name, kind.pack(name, values[name])]
        body = b"".join(map(packer.pack, row))
        if len(body) + _HEADER.size > MAX_BYTES:
            raise ProtocolError(f"{self.name}: {len(body)} bytes are more than {MAX_BYTES}")
        return _HEADER.pack(_MAGIC, zlib.crc32(body)) + body

    def decode(
        self, data: bytes, *, run: str, step: int, bounds: Bounds
    ) -> tuple[Values, dict[str, int]]:
        """Turn bytes into checked values.

        Parameters
        ----------
        data : bytes
        run, step : str, int
            The run and step that the message must belong to.
        bounds : mapping
            Sizes allowed for named dimensions; names left out are free.

        Returns
        -------
        values : dict
        sizes : dict
            The size of every named dimension.
        """
        limit = _OVERHEAD + sum(kind.max_bytes(bounds) for kind in self.fields.values())
        if type(data) is bytes and len(data) > min(limit, MAX_BYTES):
            raise ProtocolError(f"{self.name}: {len(data)} bytes, at most {limit} were expected")
        envelope, row = _open(data)
        if envelope.schema != self.name:
            raise ProtocolError(f"expected {self.name}, got a message of another schema")
        if envelope.run != run:
            raise ProtocolError(f"{self.name}: the message belongs to another run")
        if envelope.step != step:
            raise ProtocolError(
                f"{self.name}: the message belongs to step {envelope.step}, this is step {step}"
            )
        packed = self._fields(row)
        self._check_names(packed)
        values = {name: kind.unpack(name, packed[name]) for name, kind in self.fields.items()}
        return values, self.sizes(values, bounds)

    def _fields(self, row: Iterator[Any]) -> dict[str, Any]:
        # One more than there may be, so that a surplus shows and a million are not read.
        values = list(islice(row, 2 * len(self.fields) + 1))
        names = values[::2]
        if len(values) % 2 or not all(type(name) is str for name in names):
            raise ProtocolError(f"{self.name}: not a row of names and values")
        return dict(zip(names, values[1::2], strict=True))

    def _check_names(self, values: Mapping[str, Any]) -> None:
        if set(values) != set(self.fields):
            missing = sorted(set(self.fields) - set(values))
            surplus = len(set(values) - set(self.fields))
            raise ProtocolError(f"{self.name}: missing fields {missing}, {surplus} unknown fields")

    def sizes(self, values: Mapping[str, Any], bounds: Bounds) -> dict[str, int]:
        """Size of every named dimension, which must agree between fields and with the bounds."""
        sizes: dict[str, int] = {}
        for name, kind in self.fields.items():
            for dimension, size in kind.dimensions(values[name]):
                first, last = _span(bounds.get(dimension, (0, MAX_BYTES)))
                if not first <= size <= last:
                    raise ProtocolError(
                        f"field {name!r}: dimension {dimension!r} is {size}, "
                        f"expected {first}" + (f" to {last}" if last > first else "")
                    )
                if sizes.setdefault(dimension, size) != size:
                    raise ProtocolError(
                        f"field {name!r}: dimension {dimension!r} is {size} here "
                        f"and {sizes[dimension]} elsewhere"
                    )
        return sizes


Form = Literal[
    "plain", "noisy", "masked", "encrypted", "sealed", "key", "share", "opened", "receipt"
]
"""What a reply is to whoever sees it: as computed, with noise, under masks, encrypted for a key
holder, encrypted for another client, a public key, a share of a key that opens a sum, or a sum."""


@dataclass(frozen=True)
class Stage:
    """One question of the server and its answer.

    Attributes
    ----------
    name : str
    request, reply : Schema
    form : str
        What the reply is to the server.
    additive : bool
        Whether the reply is a release whose sum over clients is all that the server needs.
    """

    name: str
    request: Schema
    reply: Schema
    form: Form = "plain"
    additive: bool = False

    @property
    def noisy_fields(self) -> dict[str, tuple[str, ...]]:
        """The reply's arrays of grid steps, with the names of their dimensions."""
        return {
            name: kind.shape
            for name, kind in self.reply.fields.items()
            if isinstance(kind, Array) and kind.dtype == "int64"
        }


def stage(
    name: str,
    *,
    request: Mapping[str, Field],
    reply: Mapping[str, Field],
    form: Form = "plain",
    additive: bool = False,
) -> Stage:
    """Define a stage by the fields of its request and of its reply.

    The arrays of a request may hold larger values than those of a reply, because the server
    computes requests from sums over replies: no reply can make a request impossible.
    """
    larger = {
        key: replace(kind, largest=_LARGEST_REQUEST)
        if isinstance(kind, Array) and kind.dtype == "float64" and kind.largest is None
        else kind
        for key, kind in request.items()
    }
    schemas = Schema(f"{name}/request", larger), Schema(f"{name}/reply", reply)
    return Stage(name, *schemas, form=form, additive=additive)


ANCHOR: Mapping[str, Field] = {"ledger_rows": Integer(), "ledger_head": Digest()}
"""Where a client's ledger stands: how many rows it has, and the hash of the last."""


def private_stage(
    name: str,
    *,
    request: Mapping[str, Field],
    reply: Mapping[str, Field],
    additive: bool = False,
) -> Stage:
    """Define a stage whose reply is a release.

    The request says which share of the run's budget it may cost (of mu squared); the reply, how
    large grid and noise are, and where the client's ledger stands.
    """
    return stage(
        name,
        request={**request, "share": Real(_SMALLEST_SHARE, 1)},
        reply={
            **reply,
            "exponent": Integer(-300, 300),
            "sigma": Real(1, _LARGEST_NOISE),
            **ANCHOR,
        },
        form="noisy",
        additive=additive,
    )


def read_envelope(data: bytes) -> Envelope:
    """Tell which message this is, without looking at its fields."""
    return _open(data)[0]


def _open(data: bytes) -> tuple[Envelope, Iterator[Any]]:
    if type(data) is not bytes:
        raise ProtocolError(f"a message is bytes, not {type(data).__name__}")
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes, at most {MAX_BYTES} are allowed")
    if len(data) < _HEADER.size:
        raise ProtocolError(f"a message of {len(data)} bytes is truncated")
    magic, checksum = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError("not a message of this protocol, or of another version of it")
    body = memoryview(data)[_HEADER.size :]
    if zlib.crc32(body) != checksum:
        raise ProtocolError("the checksum does not match: the message is truncated or corrupt")
    unpacker = msgpack.Unpacker(
        read_size=1024,  # it is fed, and need not set room aside for reading
        max_buffer_size=MAX_BYTES,
        max_str_len=256,
        max_array_len=0,
        max_map_len=0,
        max_ext_len=0,
    )
    unpacker.feed(body)
    row = _values(unpacker)
    match list(islice(row, 3)):
        case [str(schema), str(run), int(step)]:
            return Envelope(schema, run, step), row
        case _:
            raise ProtocolError("the message does not begin with schema, run and step")


def _values(unpacker: msgpack.Unpacker) -> Iterator[Any]:
    try:
        yield from unpacker
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError("the message is not a row of plain msgpack values") from error


def _span(bound: int | tuple[int, int]) -> tuple[int, int]:
    return (bound, bound) if isinstance(bound, int) else bound
