"""The privacy that a run promises."""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, Self

from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.terms import (
    ADJACENCIES,
    MAX_EPSILON,
    MIN_DELTA,
    MIN_EPSILON,
    PROTECTIONS,
    UNITS,
    Adjacency,
    Protection,
    Unit,
)

if TYPE_CHECKING:
    from secure_fedclust.privacy.plan import Plan

_LARGEST_VALUE = 1e40


class Plannable(Protocol):
    """A model that can say beforehand what a private run of it will release."""

    def plan(
        self, privacy: "PrivacySpec", *, n_clients: int, n_features: int, n_records: int | None
    ) -> "Plan":
        """The plan of such a run."""


@dataclass(frozen=True, repr=False)
class PrivacySpec:
    """What is promised about the messages that leave a client.

    Parameters
    ----------
    epsilon, delta : float
        The guarantee. Smaller is more private; delta should be far below one in the number of
        records.
    ranges : sequence of (low, high), one for each feature
        Values that features can have, known without looking at the records. Features are scaled
        to [-1, 1]; values outside are moved to the nearest end.
    bound : float
        Instead of ranges: records are clipped to a ball of this radius around `center`.
    center : sequence of float, optional
        The middle of that ball, the origin if not given.
    unit : {"record", "client"}
        What is protected: one record, or all of a client's data (that it takes part is visible).
    adjacency : {"add_remove", "replace_one"}
        Whether data sets that must look alike differ by one record more or less, or by one
        record changed; in the latter case the clients' sizes are public.
    protection : {"none", "masking", "ckks"}
        How messages are hidden from the server beyond their noise.
    colluders : int
        Clients that may share what they know with the server, where noise is shared.
    min_survivors : int, optional
        Clients whose vectors must be in a sum before it is opened, where noise is shared: fewer
        mean more noise and more tolerance for clients that drop out. If not given, in a run on
        their records: two thirds of the clients, and at least two more than `colluders`.
    active_server : bool
        With masking: whether the promise holds for a server that does not keep to the protocol,
        too. Clients then sign, and check what others were shown.
    public_size : int, optional
        About how many records a client holds, if that is no secret. Never taken from the data.
    records_per_person : int, optional
        Of each person at most so many records at a client are used, the first ones. What is
        claimed is then the privacy of a person, whose epsilon is larger: `epsilon` is what one
        record costs.
    reason : str, optional
        Why there is no differential privacy; see `PrivacySpec.none`.

    Examples
    --------
    >>> spec = PrivacySpec(epsilon=1.0, delta=1e-5, ranges=[(0, 120), (0, 300)])
    >>> PrivacySpec.from_toml(spec.to_toml()) == spec
    True
    >>> PrivacySpec(epsilon=0, delta=1e-5)
    Traceback (most recent call last):
    ...
    secure_fedclust.errors.ParameterError: the privacy spec has 2 problems:
    - epsilon=0: give a number from 1e-06 to 100
    - ranges and bound are both missing: give the range of each feature, or the radius of a ball \
that holds the records; if you know neither, private_ranges() buys them
    """

    epsilon: float | None = None
    delta: float | None = None
    ranges: Sequence[tuple[float, float]] | None = None
    bound: float | None = None
    center: Sequence[float] | None = None
    unit: Unit = "record"
    adjacency: Adjacency = "add_remove"
    protection: Protection = "none"
    colluders: int = 1
    min_survivors: int | None = None
    public_size: int | None = None
    records_per_person: int | None = None
    active_server: bool = False
    reason: str | None = None

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            number = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
            lines = "".join(f"\n- {problem}" for problem in problems)
            raise ParameterError(f"the privacy spec has {number}:{lines}")
        if self.ranges is not None:
            ranges = tuple((float(low), float(high)) for low, high in self.ranges)
            object.__setattr__(self, "ranges", ranges)
        object.__setattr__(self, "active_server", bool(self.active_server))
        if self.center is not None:
            object.__setattr__(self, "center", tuple(float(value) for value in self.center))

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items())
        return f"PrivacySpec({given})"

    @classmethod
    def none(
        cls,
        *,
        reason: str,
        protection: Protection = "none",
        colluders: int = 1,
        min_survivors: int | None = None,
        active_server: bool = False,
    ) -> Self:
        """No differential privacy, for the reason given, which every result repeats.

        Parameters
        ----------
        reason : str
        protection, colluders, min_survivors, active_server
            As in `PrivacySpec`.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise ParameterError(
                "running without differential privacy needs a reason: "
                "PrivacySpec.none(reason='simulation on public data')"
            )
        return cls(
            reason=reason,
            protection=protection,
            colluders=colluders,
            min_survivors=min_survivors,
            active_server=active_server,
        )

    @property
    def is_private(self) -> bool:
        """Whether there is a guarantee at all."""
        return self.reason is None

    @property
    def honest_survivors(self) -> int:
        """Clients whose noise is in every sum and unknown to server and colluders."""
        if self.min_survivors is None:
            raise ParameterError(
                f"protection={self.protection!r} needs min_survivors in the privacy spec: how many "
                "clients' vectors must be in a sum before it is opened"
            )
        return self.min_survivors - self.colluders

    @property
    def counted_size(self) -> int | None:
        """Records that a client counts for: one where its whole message is bounded."""
        return 1 if self.unit == "client" else self.public_size

    @property
    def exchanges_per_sum(self) -> int:
        """How often each client is asked before a sum is opened."""
        if self.protection == "ckks":
            return 1
        return 5 if self.active_server else 4

    def noise_terms(self, n_clients: int) -> float:
        """Variance of the noise in a sum over so many clients, in units of that of one release."""
        return n_clients if self.protection == "none" else n_clients / self.honest_survivors

    def agreement(self) -> bytes:
        """The spec in bytes: equal specs have equal bytes, and others have others."""
        content = self.to_dict()
        for name in {"epsilon", "delta", "bound"} & set(content):
            content[name] = float(content[name])
        return json.dumps(content, sort_keys=True, allow_nan=False).encode()

    @property
    def n_features(self) -> int | None:
        """How many features the spec was written for, where it says so."""
        given = self.ranges if self.ranges is not None else self.center
        return None if given is None else len(given)

    def describe(self) -> str:
        """Say the guarantee in one sentence."""
        if not self.is_private:
            how = "messages leave the clients unprotected"
            if self.protection != "none":
                how = f"sums over clients are exact; nothing else is seen by {self.adversary()}"
            return f"NO DP CLAIM: {how} ({self.reason})"
        epsilon = self.epsilon
        if self.records_per_person is not None:
            what = (
                f"person at one client, of whom at most {self.records_per_person} records are used"
            )
            change = "adding or removing all records of one"
            epsilon = float(f"{self.person_epsilon():.4g}")
        else:
            what = "record" if self.unit == "record" else "client's data"
            change = {
                ("record", "add_remove"): "adding or removing one",
                ("record", "replace_one"): "changing one (clients' sizes are public)",
                ("client", "add_remove"): "leaving them all out",
                ("client", "replace_one"): "exchanging them all",
            }[self.unit, self.adjacency]
        who = "everybody who sees what clients send, the server included"
        if self.protection != "none":
            who = self.adversary()
        return (
            f"(epsilon={epsilon:g}, delta={self.delta:g})-differential privacy for each "
            f"{what}, against {who}: {change} makes nothing they can see more than "
            f"e^{epsilon:g} times as likely, but for a probability of {self.delta:g}"
        )

    def adversary(self) -> str:
        """Against whom a protection of sums holds, and what that assumes."""
        return adversary(self.colluders, self.active_server, self.protection == "ckks") + (
            ""
            if self.min_survivors is None
            else f", if every sum is over {self.min_survivors} clients or more"
        )

    def person_epsilon(self) -> float:
        """Epsilon for a person with `records_per_person` records at one client, at this delta."""
        from secure_fedclust.privacy.accounting import Limit

        return Limit.of(*self.target()).group_epsilon(self.records_per_person or 1)

    def target(self) -> tuple[float, float]:
        """Epsilon and delta, which a spec without a guarantee does not have."""
        if self.epsilon is None or self.delta is None:
            raise ParameterError(f"there is no epsilon to work with: {self.describe()}")
        return float(self.epsilon), float(self.delta)

    def plan(
        self, model: Plannable, *, n_clients: int, n_features: int, n_records: int | None = None
    ) -> "Plan":
        """What a private run of a model will release, and whether it can work, without any data.

        Parameters
        ----------
        model : estimator
            E.g. ``FKM(n_clusters=15)``.
        n_clients, n_features : int
        n_records : int, optional
            About how many records a client holds; `public_size` if not given.
        """
        if isinstance(model, type):
            raise ParameterError(f"model is the class {model.__name__}: give one, with its numbers")
        records = self.counted_size if n_records is None else n_records
        return model.plan(self, n_clients=n_clients, n_features=n_features, n_records=records)

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, as plain values."""
        content: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                content[field.name] = _plain(value)
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote, or a table of a configuration file."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(content) - known):
            raise ParameterError(
                f"privacy: unknown {', '.join(unknown)}; there are {', '.join(sorted(known))}"
            )
        return cls(**content)

    def to_json(self) -> str:
        """The spec as JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ParameterError(f"the privacy spec is not valid JSON: {error}") from error
        return cls.from_dict(_table(content))

    def to_toml(self) -> str:
        """The spec as lines of TOML."""
        lines = (f"{name} = {json.dumps(value)}" for name, value in self.to_dict().items())
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Read what `to_toml` wrote."""
        try:
            return cls.from_dict(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ParameterError(f"the privacy spec is not valid TOML: {error}") from error

    def _problems(self) -> Iterator[str]:
        for name, words in (
            ("unit", UNITS),
            ("adjacency", ADJACENCIES),
            ("protection", PROTECTIONS),
        ):
            if getattr(self, name) not in words:
                yield f"{name}={getattr(self, name)!r}: give one of {', '.join(words)}"
        for name, least in (
            ("colluders", 0),
            ("min_survivors", 1),
            ("public_size", 1),
            ("records_per_person", 1),
        ):
            value = getattr(self, name)
            if (value is not None or name == "colluders") and not _is_count(value, least):
                yield f"{name}={value!r}: give a whole number of at least {least}"
        if self.records_per_person is not None and (self.unit, self.adjacency) != (
            "record",
            "add_remove",
        ):
            yield (
                "records_per_person goes with unit='record' and adjacency='add_remove' only: who a "
                "record is about decides how many are used"
            )
        if self.active_server not in (True, False):
            yield f"active_server={self.active_server!r}: give True or False"
        elif self.active_server and self.protection != "masking":
            yield (
                "active_server=True goes with protection='masking' only: nothing else withstands "
                "a server that does not keep to the protocol"
            )
        if self.protection == "none":
            for name, default in (("colluders", 1), ("min_survivors", None)):
                if getattr(self, name) != default:
                    yield f"{name} goes with a protection of sums only: leave it out"
        survivors = self.min_survivors
        counts = _is_count(survivors, 1) and _is_count(self.colluders, 0)
        if survivors is not None and counts and survivors <= self.colluders:
            yield (
                f"min_survivors={survivors}: must be above colluders={self.colluders}, or nobody's "
                "noise is left"
            )
        if self.reason is not None:
            yield from self._problems_without_privacy()
        else:
            yield from self._problems_of_target()
            yield from self._problems_of_region()

    def _problems_without_privacy(self) -> Iterator[str]:
        if not isinstance(self.reason, str) or not self.reason.strip():
            yield f"reason={self.reason!r}: say in words why there is no differential privacy"
        elif not self.reason.isprintable():
            yield "the reason must be one line of printable text"
        if self.unit == "client":
            yield "unit='client' goes with an epsilon only: without, nothing is bounded"
        if self.protection == "ckks":
            yield (
                "protection='ckks' goes with an epsilon only: what is opened must have noise in it "
                "that nobody knows; use protection='masking' for exact sums"
            )
        for name in ("epsilon", "delta", "ranges", "bound", "center", "records_per_person"):
            if getattr(self, name) is not None:
                yield f"{name} is given, and so is a reason to have no differential privacy"

    def _problems_of_target(self) -> Iterator[str]:
        if self.epsilon is None:
            yield (
                "epsilon is missing: give one, or use PrivacySpec.none(reason=...) to run without "
                "differential privacy"
            )
        elif not _is_number(self.epsilon, MIN_EPSILON, MAX_EPSILON):
            yield (
                f"epsilon={self.epsilon!r}: give a number from {MIN_EPSILON:g} to {MAX_EPSILON:g}"
            )
        if self.delta is None:
            yield "delta is missing: give a number far below one in the number of records"
        elif not _is_number(self.delta, MIN_DELTA, 0.5):
            yield f"delta={self.delta!r}: give a number from {MIN_DELTA:g} to 0.5"
        elif self.public_size is not None and _is_count(self.public_size, 1):
            if self.delta >= 1 / self.public_size:
                yield (
                    f"delta={self.delta:g} would allow one of {self.public_size} records to be "
                    f"published as it is: give less than {1 / self.public_size:.3g}"
                )

    def _problems_of_region(self) -> Iterator[str]:
        if self.ranges is None and self.bound is None:
            yield (
                "ranges and bound are both missing: give the range of each feature, or the radius "
                "of a ball that holds the records; if you know neither, private_ranges() buys them"
            )
        if self.ranges is not None and (self.bound is not None or self.center is not None):
            yield "ranges are given together with bound or center: give one or the other"
        if self.ranges is not None:
            yield from _problems_of_ranges(self.ranges)
        if self.bound is not None and not _is_number(self.bound, 1 / _LARGEST_VALUE):
            yield f"bound={self.bound!r}: give a finite number above 0"
        if self.center is not None:
            if self.bound is None and self.ranges is None:
                yield "center is given without bound, the radius around it"
            if not _is_sequence(self.center) or not all(
                _is_number(value, -_LARGEST_VALUE) for value in self.center
            ):
                yield f"center={self.center!r}: give a finite number for each feature"


def adversary(colluders: int, active_server: bool, key_holder: bool) -> str:
    """The server, the key holder if there is one, and those on their side, in words."""
    side = {0: "no client", 1: "up to one client"}.get(colluders, f"up to {colluders} clients")
    if key_holder:
        return (
            "the server or the key holder, which keep to the protocol and do not work together, "
            f"with {side} on their side"
            + (", who keep to it, too" if colluders else "")
            + " (as to the key holder, this is argued and not proved)"
        )
    server = "which keeps to the protocol"
    if active_server:
        server = "whatever it does (clients knowing each other's signing keys from elsewhere)"
    return f"the server, {server}, with {side} on its side"


def _problems_of_ranges(ranges: Any) -> Iterator[str]:
    if not _is_sequence(ranges) or not len(ranges):
        yield f"ranges={ranges!r}: give (low, high) for each feature"
        return
    for i, pair in enumerate(ranges):
        if (
            not _is_sequence(pair)
            or len(pair) != 2
            or not all(_is_number(end, -_LARGEST_VALUE) for end in pair)
        ):
            yield f"ranges[{i}]={pair!r}: give (low, high), two finite numbers"
        elif not pair[0] < pair[1]:
            yield f"ranges[{i}]={tuple(pair)!r}: low must be below high"
        elif pair[1] - pair[0] < max(1e-12 * max(abs(pair[0]), abs(pair[1])), 1 / _LARGEST_VALUE):
            yield f"ranges[{i}]={tuple(pair)!r}: too narrow for its place; subtract an offset"


def _is_number(value: Any, low: float, high: float = _LARGEST_VALUE) -> bool:
    try:
        return not isinstance(value, bool | str) and low <= float(value) <= high
    except (TypeError, ValueError, OverflowError):
        return False


def _is_count(value: Any, least: int) -> bool:
    # numpy's integers are whole numbers too, without importing numpy here.
    return hasattr(value, "__index__") and not isinstance(value, bool) and value >= least


def _is_sequence(value: Any) -> bool:
    return (
        hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str)
    )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | bool):
        return value
    return int(value) if hasattr(value, "__index__") else float(value)


def _table(content: Any) -> Mapping[str, Any]:
    if not isinstance(content, dict):
        raise ParameterError(f"the privacy spec is a {type(content).__name__}, not a table")
    return content
