"""Runs that outlive their process.

The server's end keeps the outcome of every finished step in a folder, and a client's end keeps what
it has sent last and what it knows, before it sends. A run that was killed is begun again with the
same folder: the server's code runs from the start, but steps that are there are read and not asked
for, and the step that was cut off is asked for again with the same bytes. A client that had
answered it sends the same bytes again; one that had not computes its answer, and what it computes
with noise is charged anew. A sum that was cut off is asked for under a new number, because its keys
are lost; that is a new release if its noise is in the sum.

Nothing is pickled. A folder belongs to one run, with one set of parameters.
"""

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO
from zipfile import BadZipFile

import numpy as np

from secure_fedclust.errors import CheckpointError
from secure_fedclust.result import OpenedSum, exchange_from_dict

if TYPE_CHECKING:
    from secure_fedclust.protocols.session import Session

Results = dict[str, dict[str, Any]]
"""What a step came to: for each client, or whatever else there is one of each, named values."""

_FORMAT = "secure_fedclust checkpoint 3"
_LOCK = "lock"
_MANIFEST = "run.json"
_UNREADABLE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, EOFError),
    *(BadZipFile, NotImplementedError, RuntimeError, struct.error, zlib.error),
)
"""What comes of reading a file that is cut off or damaged."""


class Journal:
    """The server's folder; within ``with`` no other process can have it.

    Parameters
    ----------
    folder : path
    settings : mapping
        What the run is about, as plain values: a folder of another run is refused.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{folder} is a file: give a folder")
        self._steps = 0
        self._manifest = self.folder / _MANIFEST
        self.settings = json.loads(json.dumps({"format": _FORMAT, **settings}))
        self.seed: int | None = None
        self.run: str | None = None
        self.floor: dict[str, int] = {}
        """Rows that each client's ledger had when the run was begun."""
        self._locked: TextIO | None = None
        if self._manifest.exists():
            self._read_manifest()
        elif self.folder.exists() and any(each.name != _LOCK for each in self.folder.iterdir()):
            raise CheckpointError(f"{folder} holds something else: give a new or an empty folder")
        self._asked = self.folder / "asked"
        self.asked = self._read_asked()
        """Number of the last exchange that was begun."""

    def _read_asked(self) -> int:
        if not self._asked.exists():
            return -1
        try:
            return int(self._asked.read_text(encoding="utf-8"))
        except _UNREADABLE as error:
            raise CheckpointError(f"{self._asked} cannot be read: {error}") from error

    def _read_manifest(self) -> None:
        try:
            found = json.loads(self._manifest.read_text(encoding="utf-8"))
            settings, self.seed, self.run = found["settings"], int(found["seed"]), str(found["run"])
            self._clients = [str(client) for client in found["clients"]]
            self.floor = {str(name): int(rows) for name, rows in found["ledgers"].items()}
            settings.get("format")
        except _UNREADABLE as error:
            raise CheckpointError(f"{self._manifest} cannot be read: {error}") from error
        for name in sorted(set(settings) | set(self.settings)):
            if settings.get(name) != self.settings.get(name):
                raise CheckpointError(
                    f"{self.folder} belongs to a run with another {name}: give another folder, or "
                    f"the {name} that it was begun with"
                )

    def begin(
        self, seed: int, run: str, clients: Sequence[str], floor: Mapping[str, int] | None = None
    ) -> None:
        """Write down what the run is about; if it is there, it must be about the same clients."""
        if self.run is not None and list(clients) != self._clients:
            raise CheckpointError(
                f"{self.folder} belongs to a run of the clients {', '.join(self._clients)}: give "
                "another folder, or the same clients in the same order"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be made: {error.strerror}") from error
        if self._locked is None:
            self._lock()
        if self.run is None:
            self.seed, self.run, self.floor = seed, run, dict(floor or {})
            content = {
                "settings": self.settings,
                "seed": seed,
                "run": run,
                "clients": list(clients),
                "ledgers": self.floor,
            }
            replace_file(self._manifest, json.dumps(content, indent=1).encode())

    def __enter__(self) -> Self:
        if self.folder.exists():
            self._lock()
        return self

    def __exit__(self, *_: object) -> None:
        if self._locked is not None:
            self._locked.close()
            self._locked = None

    def _lock(self) -> None:
        """Keep other processes away until this one is over, or lets go."""
        self._locked = lock_file(
            self.folder / _LOCK,
            f"another process is at the run in {self.folder}: wait until it is over, or end it",
        )
        self.asked = self._read_asked()

    def anchors(self) -> list[tuple[int, str]]:
        """Where the clients' ledgers stood after the last step that was finished."""
        steps = sorted(self.folder.glob("step-*.npz"))
        if not steps:
            return []
        try:
            state = json.loads(str(load_arrays(steps[-1].read_bytes())["session"]))
            return [(int(rows), str(head)) for rows, head in state["anchors"].values()]
        except _UNREADABLE as error:
            raise CheckpointError(f"{steps[-1]} cannot be read: {error}") from error

    def note_asked(self, step: int) -> None:
        """Remember that an exchange was begun."""
        if step > self.asked:
            replace_file(self._asked, str(step).encode())
            self.asked = step

    def step(self, session: "Session", compute: Callable[[], Results]) -> Results:
        """The outcome of the next step: the one that is there, or what `compute` finds."""
        path = self.folder / f"step-{self._steps:05d}.npz"
        self._steps += 1
        if path.exists():
            try:
                arrays = load_arrays(path.read_bytes())
                state = json.loads(str(arrays.pop("session")))
                names = json.loads(str(arrays.pop("names")))
                found: Results = {name: {} for name in names}
                for key, value in arrays.items():
                    place, field = key.split(" ", 1)
                    found[names[int(place)]][field] = value if value.ndim else value.item()
                _restore(session, state)
            except _UNREADABLE as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            return found
        if later := sorted(each for each in self.folder.glob("step-*.npz") if each > path):
            raise CheckpointError(
                f"{path} is missing, and {later[0].name} is there: give a new folder"
            )
        found = compute()
        content = {
            f"{place} {field}": value
            for place, fields in enumerate(found.values())
            for field, value in fields.items()
        }
        content["session"] = json.dumps(_state(session))
        content["names"] = json.dumps(list(found))
        replace_file(path, save_arrays(content))
        return found


class Memory:
    """A client's file: its last reply, and what it knows.

    Parameters
    ----------
    path : path
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> dict[str, Any] | None:
        """What was kept last; None if nothing was."""
        if not self.path.exists():
            return None
        try:
            return load_arrays(self.path.read_bytes())
        except _UNREADABLE as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error

    def keep(self, content: Mapping[str, Any]) -> None:
        """Replace what was kept, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, save_arrays(content))

    @classmethod
    def of(cls, folder: Path, client: str) -> "Memory":
        """The file of a client, whatever its name is."""
        return cls(folder / "clients" / f"{hashlib.sha256(client.encode()).hexdigest()[:32]}.npz")


def run_in(folder: str | Path) -> str | None:
    """The run that a folder was made for; None if it is new."""
    path = Path(folder) / _MANIFEST
    if not path.exists():
        return None
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["run"])
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def lock_file(path: Path, taken: str) -> TextIO:
    """Have a file for this process alone, until it is closed.

    Parameters
    ----------
    path : Path
    taken : str
        What a `CheckpointError` says where another process has it.
    """
    import fcntl  # not there on every system, and needed only here

    try:
        locked = path.open("w", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        locked.close()
        raise CheckpointError(taken) from error
    return locked


def _state(session: "Session") -> dict[str, Any]:
    return {
        # How long a private run takes depends on records.
        "history": [
            exchange.to_dict() | ({"seconds": None} if session.spec.is_private else {})
            for exchange in session.history
        ],
        "sums": [asdict(opened) for opened in session.sums],
        "anchors": session.anchors,
        "shares": session.shares,
        "sum_shares": session.sum_shares,
        "participants": session.participants,
        "n_features": session.n_features,
        "skipped": session.skipped,
    }


def _restore(session: "Session", state: Mapping[str, Any]) -> None:
    session.history[:] = [exchange_from_dict(exchange) for exchange in state["history"]]
    session.sums[:] = [
        OpenedSum(**opened | {"survivors": tuple(opened["survivors"])}) for opened in state["sums"]
    ]
    # Whoever else has them looks on; and what was heard since is not forgotten.
    for client, (rows, head) in state["anchors"].items():
        session.floor[client] = rows
        if rows >= session.anchors.get(client, (0, ""))[0]:
            session.anchors[client] = (rows, head)
    session.shares, session.sum_shares = dict(state["shares"]), dict(state["sum_shares"])
    session.participants = tuple(state["participants"])
    session.n_features, session.skipped = state["n_features"], state["skipped"]


def save_arrays(content: Mapping[str, Any]) -> bytes:
    """Named arrays, numbers and texts as bytes."""
    buffer = BytesIO()
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in content.items()}
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def load_arrays(data: bytes) -> dict[str, Any]:
    """What `save_arrays` was given."""
    if not data.startswith(b"PK"):  # numpy would advise to unpickle it
        raise ValueError("it is no npz file")
    with np.load(BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    # For the owner's eyes: a client's file has what nobody else may see.
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
