"""What a run leaves behind."""

import base64
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from secure_fedclust.errors import ParameterError
from secure_fedclust.messages import KEY_HOLDER

UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What goes wrong when a file is missing, or is not what it should be."""

_FORMAT = "secure_fedclust result 4"


@dataclass(eq=False)
class Exchange:
    """One question to the clients and what came back.

    Attributes
    ----------
    stage : str
        What was asked, e.g. ``"fkm/means"``.
    asked, absent : tuple of str
        Clients that were asked, and those of them that did not answer.
    rejected : mapping of client to reason
        Clients whose reply was set aside.
    down, up : mapping of client to int
        Bytes sent to and received from each client.
    form : str
        What the replies are to the server: ``plain``, ``noisy``, ``masked``, ``encrypted`` (for a
        key holder), ``sealed`` (encrypted for another client), ``key`` (a public one), ``share``
        (of a key that opens a sum) or ``opened`` (a sum).
    seconds : float or None
        From the first request to the last reply, as the server saw it.
    centers : array or None
        The global centres that the server made of it.
    """

    stage: str
    asked: tuple[str, ...]
    absent: tuple[str, ...]
    rejected: Mapping[str, str]
    down: Mapping[str, int]
    up: Mapping[str, int]
    seconds: float | None
    form: str = "plain"
    centers: NDArray[np.float64] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        centers = None if self.centers is None else self.centers.tolist()
        return vars(self) | {"centers": centers, "down": dict(self.down), "up": dict(self.up)}

    @property
    def bytes_down(self) -> int:
        """Bytes sent to everybody."""
        return sum(self.down.values())

    @property
    def bytes_up(self) -> int:
        """Bytes received from everybody."""
        return sum(self.up.values())


@dataclass(frozen=True)
class OpenedSum:
    """A sum over clients that was opened to the server.

    Attributes
    ----------
    stage : str
        What was asked, e.g. ``"cells"``.
    exchange : int
        Position in the history of the first exchange of its round.
    n_clients : int
        Clients that took part at first.
    survivors : tuple of str
        Clients whose vectors, and whose noise, are in it. More than the spec's `min_survivors`
        mean more noise than was promised; nothing is refunded for it.
    share : float
        Of the run's mu squared; 0 without differential privacy.
    numbers : int
    noisy : bool
        Whether there is noise in it.
    """

    stage: str
    exchange: int
    n_clients: int
    survivors: tuple[str, ...]
    share: float
    numbers: int
    noisy: bool


MEANING = {
    "plain": "as they are",
    "noisy": "with noise enough for each",
    "masked": "under masks",
    "encrypted": "encrypted under the key holder's key",
    "sealed": "encrypted for other clients",
    "key": "public keys, hashes or signatures",
    "share": "parts of keys that open a sum",
    "opened": "sums over clients that the key holder opens, noise inside",
    "receipt": "that something was heard, and where the client's ledger stands",
}
"""Forms of what a party saw, in words."""


class Sight(NamedTuple):
    """Messages of one kind that a party saw.

    Attributes
    ----------
    stage, form : str
        As in `Exchange`.
    senders : set of str
    messages, bytes : int
    """

    stage: str
    form: str
    senders: frozenset[str]
    messages: int
    bytes: int


@dataclass(frozen=True, repr=False)
class View:
    """What one party saw of a run.

    Attributes
    ----------
    party : str
    saw : tuple of Sight
        The messages it got, each from the client that sent it.
    sums : tuple of OpenedSum
        What it could put together: sums over clients.
    """

    party: str
    saw: tuple[Sight, ...]
    sums: tuple[OpenedSum, ...]

    def __repr__(self) -> str:
        lines = [
            f"{sight.stage}: {sight.messages} message{'s' * (sight.messages > 1)} of "
            f"{_who(sight.senders)}, "
            f"{sight.bytes} bytes, {MEANING[sight.form]}"
            for sight in self.saw
        ]
        kinds = Counter(
            f"{opened.stage}: the {'noisy' if opened.noisy else 'EXACT'} sum over "
            f"{len(opened.survivors)} of {opened.n_clients} clients, {opened.numbers} numbers"
            for opened in self.sums
        )
        lines += [f"{line}{f', {times} times' * (times > 1)}" for line, times in kinds.items()]
        return "\n".join([f"seen by the {self.party}:", *lines])


@dataclass(frozen=True)
class NonPrivate:
    """Computed from records without protection: stays with the clients, and out of files.

    Attributes
    ----------
    labels : mapping of client to array
        The global cluster of each record.
    clipped : mapping of client to float
        Share of the records that lay outside the public ranges or bound.
    left_out : mapping of client to int
        Records left out because their person has too many.
    """

    labels: Mapping[str, NDArray[np.int64]] = field(default_factory=dict, repr=False)
    clipped: Mapping[str, float] = field(default_factory=dict, repr=False)
    left_out: Mapping[str, int] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False, repr=False)
class FedClustResult:
    """The outcome of a federated clustering run.

    Attributes
    ----------
    algorithm : str
    parameters : mapping
        The parameters of the algorithm.
    guarantee : str
        What may be claimed about the privacy of the run, in one sentence.
    centers : array of shape (n_clusters, n_features)
    client_clusters : mapping of client to list of int, or None
        For systems that know it: which of the global clusters each client holds.
    feature_names : sequence of str or None
        Names of the features, in the order of the centres' columns, where the records had names.
    history : tuple of Exchange
    seconds : float or None
        Duration of the whole run; not kept in files of private runs.
    scale : sequence of float or None
        What each feature is divided by before distances are measured: half of its range in a
        private run. None where features are compared as they are.
    privacy : mapping
        The privacy spec, as `PrivacySpec.from_dict` reads it.
    spent : mapping of client to float
        Epsilon that the run has cost each client, at the spec's delta. Information: the claim is
        `guarantee`.
    anchors : mapping of client to (int, str)
        Number of rows and last hash of each client's ledger when it last replied.
    sampler : str or None
        Where noise came from: ``secure``, or ``fast`` for experiments; None without noise.
    sums : tuple of OpenedSum
        Where a protection is used: the sums over clients that the server has seen.
    costs : mapping
        The run's mu, as asked for, or as charged where that is more: ``local`` in what the server
        saw of each client, ``sums`` in sums whose noise is shared; squares add up. Empty without a
        protection.
    fallback : str or None
        What is left of the guarantee if fewer clients were honest than it assumes.
    networks : mapping of name to array, or None
        Weights of the networks that were trained, and what else it takes to use them.
    association : mapping or None
        FedCRef's graph in the last iteration: ``clusters`` (client and place), the ``groups`` they
        are in (-1 if isolated), ``links`` between them as pairs of places in that list, and numbers
        of groups and isolated clusters in all ``iterations``.
    federation : mapping or None
        Of a run between organisations: its ``run``, whether connections were ``encrypted``, and who
        ``refused``, with the word that the server was told.
    nonprivate : NonPrivate
    """

    algorithm: str
    parameters: Mapping[str, Any]
    guarantee: str
    centers: NDArray[np.float64]
    history: tuple[Exchange, ...]
    seconds: float | None
    client_clusters: Mapping[str, list[int]] | None = None
    feature_names: Sequence[str] | None = None
    scale: Sequence[float] | None = None
    privacy: Mapping[str, Any] = field(default_factory=dict)
    spent: Mapping[str, float] = field(default_factory=dict)
    anchors: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    sampler: str | None = None
    sums: tuple[OpenedSum, ...] = ()
    costs: Mapping[str, float] = field(default_factory=dict)
    fallback: str | None = None
    networks: Mapping[str, NDArray[Any]] | None = field(default=None, repr=False)
    association: Mapping[str, Any] | None = field(default=None, repr=False)
    federation: Mapping[str, Any] | None = None
    nonprivate: NonPrivate = field(default_factory=NonPrivate)

    def __repr__(self) -> str:
        return f"FedClustResult({self.algorithm}: {self.n_clusters} clusters; {self.guarantee})"

    @property
    def n_clusters(self) -> int:
        """Number of global clusters found."""
        return len(self.centers)

    def bytes_per_stage(self) -> dict[str, tuple[int, int]]:
        """Bytes down to and up from everybody, by stage."""
        total: dict[str, tuple[int, int]] = {}
        for exchange in self.history:
            down, up = total.get(exchange.stage, (0, 0))
            total[exchange.stage] = (down + exchange.bytes_down, up + exchange.bytes_up)
        return total

    def transcript(self) -> list[dict[str, Any]]:
        """Messages and bytes by stage and client, the key holder among them, for printing."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for exchange in self.history:
            for client in exchange.asked:
                row = rows.setdefault(
                    (exchange.stage, client),
                    {
                        "stage": exchange.stage,
                        "client": client,
                        "requests": 0,
                        "bytes down": 0,
                        "replies": 0,
                        "bytes up": 0,
                    },
                )
                row["requests"] += 1
                row["bytes down"] += exchange.down[client]
                row["replies"] += client in exchange.up
                row["bytes up"] += exchange.up.get(client, 0)
        return list(rows.values())

    def server_view(self) -> View:
        """What the server saw, in the order in which it came."""
        seen = [(exchange.stage, exchange.form, exchange.up) for exchange in self.history]
        return View("server", _sights(seen), self.sums)

    def key_holder_view(self) -> View | None:
        """What the key holder saw; None where there is none.

        It knows neither what was asked nor whose vectors are in a sum; how many there are is what
        the server has told it.
        """
        if self.privacy.get("protection") != "ckks":
            return None
        asked = [exchange for exchange in self.history if KEY_HOLDER in exchange.down]
        # It is asked for keys, and sent sums to be opened.
        seen = [
            (exchange.stage, exchange.form, {"server": exchange.down[KEY_HOLDER]})
            for exchange in asked
        ]
        return View(KEY_HOLDER, _sights(seen), ())

    def save(self, path: str | Path) -> None:
        """Write the result as JSON, without anything under `nonprivate`."""
        content = {"format": _FORMAT, **self.to_dict()}
        Path(path).write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Everything but what is under `nonprivate`, as plain values.

        How long a private run took depends on how many records there are, and is left out too.
        """
        timed = "epsilon" not in self.privacy
        return {
            "algorithm": self.algorithm,
            "parameters": dict(self.parameters),
            "guarantee": self.guarantee,
            "centers": self.centers.tolist(),
            "client_clusters": self.client_clusters,
            "feature_names": self.feature_names,
            "scale": None if self.scale is None else list(self.scale),
            "privacy": dict(self.privacy),
            "spent": dict(self.spent),
            "anchors": {client: list(anchor) for client, anchor in self.anchors.items()},
            "sampler": self.sampler,
            "sums": [vars(opened) | {"survivors": list(opened.survivors)} for opened in self.sums],
            "costs": dict(self.costs),
            "fallback": self.fallback,
            "networks": None
            if self.networks is None
            else {name: _packed(array) for name, array in self.networks.items()},
            "association": self.association,
            "federation": self.federation,
            "seconds": self.seconds if timed else None,
            "history": [
                exchange.to_dict() | ({} if timed else {"seconds": None})
                for exchange in self.history
            ],
        }

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            found = content.pop("format")
            if found != _FORMAT:
                raise ParameterError(
                    f"{path} is not a result that this version can read: its format is "
                    f"{str(found)[:60]!r}, and this version reads {_FORMAT!r}"
                )
            return cls.from_dict(content)
        except ParameterError:
            raise
        except UNREADABLE as error:
            raise ParameterError(f"{path} is not a result that this version can read") from error

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Read what `to_dict` gave."""
        values = dict(content)
        networks = values.pop("networks")
        if networks is not None:
            networks = {str(name): _unpacked(packed) for name, packed in networks.items()}
        centers = np.asarray(values.pop("centers"), dtype=np.float64)
        if not len(centers) and networks is not None:
            centers = np.zeros((0, int(networks["n_features"])))  # nothing was found
        elif centers.ndim != 2 or not centers.size or not np.isfinite(centers).all():
            raise ValueError("centres that are none")
        history = tuple(exchange_from_dict(exchange) for exchange in values.pop("history"))
        anchors = {
            client: (int(n), str(head)) for client, (n, head) in values.pop("anchors").items()
        }
        sums = tuple(
            OpenedSum(**opened | {"survivors": tuple(opened["survivors"])})
            for opened in values.pop("sums")
        )
        return cls(
            centers=centers,
            history=history,
            anchors=anchors,
            sums=sums,
            networks=networks,
            **values,
        )


def _packed(array: NDArray[Any]) -> dict[str, Any]:
    """An array as JSON can hold it, without a digit for each number."""
    kind = "<i8" if array.dtype.kind in "iu" else "<f8"
    data = base64.b64encode(np.ascontiguousarray(array, dtype=kind).tobytes()).decode()
    return {"dtype": kind, "shape": list(array.shape), "data": data}


def _unpacked(packed: Mapping[str, Any]) -> NDArray[Any]:
    if packed["dtype"] not in ("<i8", "<f8"):
        raise ValueError("an array of another kind")
    flat = np.frombuffer(base64.b64decode(packed["data"], validate=True), dtype=packed["dtype"])
    array = flat.reshape(packed["shape"]).astype(packed["dtype"][1:])
    if not np.isfinite(array).all():
        raise ValueError("weights that are no numbers")
    return array


def _sights(seen: Iterable[tuple[str, str, Mapping[str, int]]]) -> tuple[Sight, ...]:
    """Messages by kind: stage, form, and bytes from each sender."""
    found: dict[tuple[str, str], Sight] = {}
    for stage, form, sent in seen:
        so_far = found.get((stage, form), Sight(stage, form, frozenset(), 0, 0))
        found[stage, form] = Sight(
            stage,
            form,
            so_far.senders | set(sent),
            so_far.messages + len(sent),
            so_far.bytes + sum(sent.values()),
        )
    return tuple(found.values())


def _who(senders: frozenset[str]) -> str:
    if senders and senders <= {KEY_HOLDER, "server"}:
        return f"the {' and the '.join(sorted(senders))}"
    return f"{len(senders)} clients"


def exchange_from_dict(content: Mapping[str, Any]) -> Exchange:
    """Read what `Exchange.to_dict` gave."""
    values = dict(content)
    asked, absent, centers = (values.pop(name) for name in ("asked", "absent", "centers"))
    return Exchange(
        asked=tuple(asked),
        absent=tuple(absent),
        centers=None if centers is None else np.asarray(centers, dtype=np.float64),
        **values,
    )
