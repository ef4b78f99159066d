"""What the two ends say to each other before a run, and after it.

These messages do not change their form from version to version, so that ends of different versions
can tell each other so: a line that says what they are, and JSON.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal, Self, get_args

from secure_fedclust import __version__
from secure_fedclust.errors import ProtocolError
from secure_fedclust.messages import ANCHOR, MAX_BYTES

PROTOCOL: Final = 1
"""Changes whenever ends of an older version would misunderstand what they are sent."""

_GREETING = b"secure_fedclust greeting\n"

MOST_GREETING = 1 << 22
"""Bytes of a message other than an ending, which has a result."""

Role = Literal["client", "key holder"]
Answer = Literal["yes", "version", "policy", "ledger", "configuration", "failed"]
"""Whether a party takes part; if not, why, in a word. The rest is in its log."""


@dataclass(frozen=True)
class Message:
    """What all of these messages have."""

    protocol: int = field(default=PROTOCOL, kw_only=True)
    version: str = field(default=__version__, kw_only=True)

    def encode(self) -> bytes:
        """The message as bytes."""
        content = {"kind": type(self).__name__} | asdict(self)
        data = _GREETING + json.dumps(content, allow_nan=False).encode()
        if len(data) > _most(data):
            raise ProtocolError(f"{type(self).__name__}: {len(data)} bytes, at most {_most(data)}")
        return data

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> Self:
        known = {each.name: each.type for each in fields(cls)}
        if set(content) != set(known):
            raise ProtocolError(f"{cls.__name__}: not the fields {', '.join(sorted(known))}")
        return cls(**content)


@dataclass(frozen=True)
class Offer(Message):
    """A run that the server asks a party to take part in.

    Attributes
    ----------
    run : str
    party : str
        The name that the server knows the party by.
    role : {"client", "key holder"}
    algorithm, parameters : str, mapping
        What is to be run.
    privacy : mapping
        The privacy spec.
    n_clients : int
        Clients that are asked to take part.
    columns : list of str, or None
        The features, in the order of the ranges.
    seed : list of int
        Where the randomness of the algorithm begins, for this client. Noise never comes from it.
    anchor : [rows, hash] or None
        Where the party's ledger stood when the server last heard of it.
    """

    run: str
    party: str
    role: Role
    algorithm: str
    parameters: dict[str, Any]
    privacy: dict[str, Any]
    n_clients: int
    columns: list[str] | None
    seed: list[int]
    anchor: list[Any] | None


@dataclass(frozen=True)
class Reply(Message):
    """Whether a party takes part.

    Attributes
    ----------
    run : str
    answer : str
    anchor : [rows, hash] or None
        Where its ledger stands.
    """

    run: str
    answer: Answer
    anchor: list[Any] | None


@dataclass(frozen=True)
class Ending(Message):
    """What came of a run.

    Attributes
    ----------
    run : str
    result : mapping or None
        As `FedClustResult.to_dict` gives it; None where the run was given up.
    """

    run: str
    result: dict[str, Any] | None


_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Offer, Reply, Ending)}
_TYPES: dict[str, Any] = {
    "run": str,
    "party": str,
    "role": str,
    "algorithm": str,
    "parameters": dict,
    "privacy": dict,
    "n_clients": int,
    "columns": list | None,
    "seed": list,
    "anchor": list | None,
    "answer": str,
    "result": dict | None,
    "protocol": int,
    "version": str,
}
_LONGEST = 256


def is_greeting(data: bytes) -> bool:
    """Whether these bytes are one of these messages."""
    return data.startswith(_GREETING)


@dataclass(frozen=True)
class Stranger:
    """A message of an end that speaks another version of the protocol."""

    protocol: int
    version: str


def decode(data: bytes, most: int = MAX_BYTES) -> Offer | Reply | Ending | Stranger:
    """Read a message of so many bytes; of another version only which it is can be told."""
    try:
        if not is_greeting(data) or len(data) > min(most, _most(data)):
            raise ValueError("not a greeting")
        content = json.loads(
            data[len(_GREETING) :], parse_constant=_no_number, object_pairs_hook=_each_once
        )
        kind, protocol, version = content.pop("kind"), content["protocol"], content["version"]
        if type(protocol) is not int or not (type(version) is str and _can_be_shown(version)):
            raise ValueError("no version")
        if protocol != PROTOCOL:
            return Stranger(protocol, version)
        message = _KINDS[kind]._of(content)
        for name in content:
            value = getattr(message, name)
            if not isinstance(value, _TYPES[name]) or isinstance(value, bool):
                raise ValueError(f"{name} is not what it should be")
            if name == "answer" and value not in get_args(Answer):
                raise ValueError("answer is none of the words there are")
            if isinstance(value, str) and not _can_be_shown(value):
                raise ValueError(f"{name} is too long, or cannot be printed")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"a greeting that cannot be read: {error}") from error
    return message  # type: ignore[return-value]


def _most(data: bytes) -> int:
    """How long a message may be, before any of it is read."""
    return MAX_BYTES if data.startswith(_GREETING + b'{"kind": "Ending"') else MOST_GREETING


def anchor_of(given: Any) -> tuple[int, str]:
    """Where a ledger stands, as the other end says: how many rows it has, and the last one's hash.

    Raises
    ------
    ProtocolError
        If it could not be: it is kept, and sent back.
    """
    if not isinstance(given, list) or len(given) != len(ANCHOR):
        raise ProtocolError("the anchor is not a number of rows and a hash")
    rows, head = (
        field.unpack(name, each) for (name, field), each in zip(ANCHOR.items(), given, strict=True)
    )
    return rows, head


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _can_be_shown(text: str) -> bool:
    return len(text) <= _LONGEST and text.isprintable()


def both_versions(theirs: Stranger) -> str:
    """Which two versions have met."""
    return (
        f"the other end has secure_fedclust {theirs.version} (protocol {theirs.protocol}), this "
        f"one {__version__} (protocol {PROTOCOL}): install the same version at both"
    )
