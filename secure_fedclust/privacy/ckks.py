"""Sums under homomorphic encryption (CKKS, by TenSEAL): three roles, and what each may hold.

- `KeyHolder`: the secret key. It opens one sum a round, and is sent nothing but these sums.
- `Encryptor`: the public key. A client's.
- `Aggregator`: no key at all. It adds ciphertexts up, and can read none.

CKKS computes with errors, and says nothing when a number is too large for it: the result is another
number then. Both are excluded beforehand: `Parameters` has room for the vectors of all clients at
their bound, and errors so small that a sum, rounded, is the exact one (docs/proofs/ckks.md). What
the roles say to each other: `ckks_round.py`.

>>> import numpy as np
>>> from secure_fedclust.privacy.ckks_parameters import Parameters
>>> parameters = Parameters(length=3, n_clients=2, reach=1000)
>>> holder = KeyHolder(run="today")
>>> encryptor = Encryptor(holder.public_key(parameters.preset), parameters.preset)
>>> aggregator = Aggregator(parameters, keyless(parameters.preset))
>>> aggregator.add("Aachen", encryptor.encrypt(parameters, np.array([1, 2, 3])))
>>> aggregator.add("Bergen", encryptor.encrypt(parameters, np.array([10, 20, 30])))
>>> holder.open(0, parameters, aggregator.total())
array([11, 22, 33])
"""

import base64
import ctypes
import hashlib
import json
import os
import secrets
import struct
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import tenseal as ts

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import AggregationAborted, ParameterError, ProtocolError
from secure_fedclust.privacy.ckks_parameters import PRESETS, TOLERANCE, Parameters, Preset

_FORMAT = "secure_fedclust ckks keys 1"


class Encryptor:
    """Encrypts a client's vectors, and can read none of them.

    Parameters
    ----------
    key : bytes
        The public key, as `KeyHolder.public_key` gives it.
    preset : Preset
        `Parameters.preset`, of the parameters that vectors will have.
    """

    def __init__(self, key: bytes, preset: Preset) -> None:
        least, most = preset.key_bytes
        if not least <= len(key) <= most:
            raise ProtocolError(
                f"a public key of {len(key)} bytes: those for {preset} have {least} to {most}"
            )
        self.preset = preset
        self._context = _public_context(key, preset)

    def encrypt(self, parameters: Parameters, vector: Ints) -> list[bytes]:
        """Encrypt a vector, in chunks of exactly as many numbers as a ciphertext holds.

        What a vector does not use is filled with random numbers. All numbers of a chunk decide how
        its encoding is rounded, which a key holder can see: it must not be able to tell which
        vector that fits.
        """
        vector = np.asarray(vector)
        self._check(parameters, vector)
        used = self.preset.used
        chunks = [vector[i : i + used] for i in range(0, len(vector), used)]
        return [
            ts.ckks_vector(
                self._context, self._filled(chunk, parameters.reach), parameters.scale
            ).serialize()
            for chunk in chunks
        ]

    def _filled(self, chunk: Ints, reach: int) -> Floats:
        filled = np.empty(self.preset.slots)
        filled[: len(chunk)] = chunk
        drawn = np.frombuffer(secrets.token_bytes(8 * (len(filled) - len(chunk))), dtype=np.uint64)
        filled[len(chunk) :] = (drawn % (2 * reach + 1)).astype(np.int64) - reach
        return filled

    def _check(self, parameters: Parameters, vector: Ints) -> None:
        if parameters.preset != self.preset:
            raise ProtocolError(f"the sum needs {parameters.preset}, the key is for {self.preset}")
        if vector.shape != (parameters.length,) or vector.dtype.kind != "i":
            raise ParameterError(
                f"an array of shape {vector.shape} and type {vector.dtype}: give "
                f"{parameters.length} whole numbers"
            )
        if ((vector > parameters.reach) | (vector < -parameters.reach)).any():
            raise ParameterError(
                f"a vector with numbers beyond {parameters.reach}: the sum could be too large to "
                "be opened, and nobody would notice"
            )

    def __repr__(self) -> str:
        return f"Encryptor({self.preset})"


class Aggregator:
    """Adds up what clients have encrypted, one after the other, and can read none of it.

    It holds one running sum, and the ciphertexts of one client at a time.

    Parameters
    ----------
    parameters : Parameters
    context : bytes
        The parameters of encryption without any key, as `keyless` gives them.
    """

    def __init__(self, parameters: Parameters, context: bytes) -> None:
        if context != keyless(parameters.preset):
            raise ProtocolError(
                f"the aggregator was given a context of {len(context)} bytes with keys in it, or "
                f"with other parameters than {parameters.preset}: it takes one without any key"
            )
        self.parameters = parameters
        self.clients: list[str] = []
        """Whose vectors are in the sum."""
        place = context, parameters.preset
        self._context = _contexts.get(place) or _kept(place, ts.context_from(context, 1))
        self._sum: list[Any] = []
        self._spoilt_by: str | None = None

    def add(self, client: str, ciphertexts: Sequence[bytes]) -> None:
        """Add a client's vector to the sum, or refuse it."""
        if client in self.clients:
            raise ProtocolError(f"{client}: its vector is in the sum already")
        if len(self.clients) == self.parameters.n_clients:
            raise ProtocolError(
                f"{client}: the sum has room for {self.parameters.n_clients} vectors, and as many "
                "are in it"
            )
        check_ciphertexts(client, self.parameters, ciphertexts)
        loaded = [_load(client, self._context, self.parameters, data) for data in ciphertexts]
        try:
            for so_far, more in zip(self._sum, loaded, strict=bool(self._sum)):
                so_far.add_(more)
        except (ValueError, RuntimeError) as error:
            self._spoilt_by = client
            raise ProtocolError(f"{client}: its ciphertexts cannot be added to others'") from error
        self._sum = self._sum or loaded
        self.clients.append(client)

    def total(self) -> list[bytes]:
        """The encrypted sum."""
        if self._spoilt_by is not None:
            raise AggregationAborted(f"{self._spoilt_by}: its ciphertexts have spoilt the sum")
        if not self._sum:
            raise ProtocolError("the aggregator has no vector to add up")
        return [part.serialize() for part in self._sum]

    def __repr__(self) -> str:
        return f"Aggregator({len(self.clients)} of {self.parameters.n_clients} vectors)"


class KeyHolder:
    """Holds the secret keys of one run, and opens one sum a round.

    Keys are made when they are first asked for, one for each preset that the run needs. They are
    thrown away by `forget`, and when what was opened turns out to be no sum of clients' vectors:
    whoever sent that could go on to learn from what is refused.

    Parameters
    ----------
    run : str
    path : path, optional
        Where keys are kept, for a key holder that may be restarted during the run. The file is
        readable by its owner only. What was opened is noted in it before it is opened.
    """

    def __init__(self, run: str, path: str | Path | None = None) -> None:
        self.run = run
        self.opened = -1
        """Number of the last round whose sum was opened."""
        self.aggregator: bytes | None = None
        """Public key of the server that sums are opened for, where it is known."""
        self.has_forgotten = False
        self._contexts: dict[Preset, Any] = {}
        self._path: Path | None = None
        if path is not None:
            self._path = Path(path)
            self._save(first=True)

    @classmethod
    def load(cls, path: str | Path, run: str) -> Self:
        """Go on with a run after a restart.

        Parameters
        ----------
        path : path
            What this class has written.
        run : str
            The run that the keys must be for.
        """
        path = Path(path)
        problem = holder = None
        try:
            if path.stat().st_mode & 0o077:
                problem = (
                    "can be read by others than its owner: the keys in it are not secret any more, "
                    "delete it and begin a new run"
                )
            else:
                content = json.loads(path.read_text(encoding="utf-8"))
                problem = "was written by another version"
                if content["format"] == _FORMAT:
                    holder = cls._read(content)
        except FileNotFoundError:
            problem = "does not exist"
        except Exception as error:
            problem = f"is not a key file, or damaged ({type(error).__name__})"
        # Here, where nothing of the file hangs on to the error.
        if holder is None:
            raise ParameterError(f"key holder: {path} {problem}")
        if holder.run != run:
            raise ParameterError(
                f"key holder: {path} has the keys of run {holder.run}, this is run {run}: keys are "
                "fresh in every run; delete the old file"
            )
        holder._path = path
        return holder

    @classmethod
    def _read(cls, content: dict[str, Any]) -> Self:
        if content.pop("checksum") != _checksum(content):
            raise ValueError("another checksum")
        holder = cls(content["run"])
        holder.opened, holder.has_forgotten = content["opened"], content["has_forgotten"]
        server = content["aggregator"]
        holder.aggregator = None if server is None else bytes.fromhex(server)
        for index, key in content["keys"].items():
            context = ts.context_from(base64.b64decode(key, validate=True), 1)
            complete = context.has_secret_key() and context.has_public_key()
            if not complete or _serialized(context) != keyless(PRESETS[int(index)]):
                raise ValueError("not the keys that it says")
            holder._contexts[PRESETS[int(index)]] = context
        return holder

    def public_key(self, preset: Preset) -> bytes:
        """What clients encrypt with."""
        self._check_keys()
        if preset not in self._contexts:
            if preset not in PRESETS:
                raise ProtocolError(f"key holder: there are no keys for {preset}")
            before = self._contexts
            self._contexts = {**before, preset: _new_context(preset)}
            try:
                self._save()
            except ParameterError:
                self._contexts = before  # a key that is not kept is not given out
                raise
        return _serialized(self._contexts[preset], public=True)

    def serve(self, aggregator: bytes) -> None:
        """Open sums for this server from now on, and for no other."""
        if self.aggregator != aggregator:
            self.aggregator = aggregator
            self._save()

    def forget(self) -> None:
        """Throw the keys away, on disk too: nothing that was encrypted can be opened any more."""
        self._contexts, self.has_forgotten = {}, True
        self._save()

    def open(self, number: int, parameters: Parameters, ciphertexts: Sequence[bytes]) -> Ints:
        """Open the sum of a round: the numbers that are used, rounded to whole steps.

        Parameters
        ----------
        number : int
            Of the round, 0 or more, and larger than that of the last one that was opened.
        parameters : Parameters
            Those that the vectors were encrypted with.
        ciphertexts : sequence of bytes
            What `Aggregator.total` gives.

        Raises
        ------
        ProtocolError
            When a sum of this round, or a later one, was opened already, or for ciphertexts that
            are none. Nothing is opened then.
        AggregationAborted
            When what was opened is no sum of clients' vectors. It is not given out, and the keys
            are thrown away.
        """
        self._check_keys()
        if number <= self.opened:
            raise ProtocolError(
                f"key holder: a sum of round {number} is asked for, and round {self.opened} was "
                "opened already: one sum a round is opened, and once"
            )
        context = self._contexts.get(parameters.preset)
        if context is None:
            raise ProtocolError(f"key holder: nobody was given a key for {parameters.preset}")
        check_ciphertexts("aggregator", parameters, ciphertexts)
        loaded = [_load("aggregator", context, parameters, data) for data in ciphertexts]
        self.opened = number
        self._save()
        # What fills a ciphertext up is whole numbers within the bound, too.
        values = np.array([part.decrypt() for part in loaded])
        steps = np.rint(values)
        off = np.abs(values - steps).max()
        if not off <= TOLERANCE or np.abs(steps).max() > parameters.largest:
            self.forget()
            raise AggregationAborted(
                f"key holder: what was opened in round {number} is no sum of clients' vectors: it "
                "was encrypted under another key or with other parameters, or some client's "
                "numbers were too large. The keys are thrown away"
            )
        used = steps[:, : parameters.preset.used].ravel()[: parameters.length]
        return np.asarray(used, dtype=np.int64)

    def _check_keys(self) -> None:
        if self.has_forgotten:
            raise ProtocolError(
                f"key holder: the keys of run {self.run} were thrown away, and there are no others"
            )

    def _save(self, *, first: bool = False) -> None:
        if self._path is None:
            return
        content: dict[str, Any] = {
            "format": _FORMAT,
            "run": self.run,
            "opened": self.opened,
            "aggregator": None if self.aggregator is None else self.aggregator.hex(),
            "has_forgotten": self.has_forgotten,
            "keys": {
                str(PRESETS.index(preset)): base64.b64encode(
                    _serialized(context, secret=True)
                ).decode()
                for preset, context in self._contexts.items()
            },
        }
        content["checksum"] = _checksum(content)
        _write_secret(self._path, json.dumps(content).encode(), first=first)

    def __repr__(self) -> str:
        return f"KeyHolder(run={self.run!r}, opened={self.opened})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key holder is not copied or pickled: its keys stay where they are")


def check_ciphertexts(party: str, parameters: Parameters, ciphertexts: Sequence[bytes]) -> None:
    """Refuse what has not the form of an encrypted vector, before it is deserialised.

    TenSEAL takes an empty text for a vector without numbers, and takes any number of ciphertexts.
    """
    if len(ciphertexts) != parameters.chunks:
        raise ProtocolError(
            f"{party}: {len(ciphertexts)} ciphertexts, a vector of {parameters.length} numbers has "
            f"{parameters.chunks}"
        )
    least, most = parameters.preset.ciphertext_bytes
    for data in ciphertexts:
        if not least <= len(data) <= most:
            raise ProtocolError(
                f"{party}: a ciphertext of {len(data)} bytes, those of {parameters.preset} have "
                f"{least} to {most}: it is truncated, or of other parameters"
            )
        first, last = _frame(parameters.preset.slots, parameters.scale, len(data))
        if not (data.startswith(first) and data.endswith(last)):
            raise ProtocolError(
                f"{party}: not one ciphertext of {parameters.preset.slots} numbers at scale "
                f"{parameters.scale:g}: damaged, or of other parameters"
            )


@lru_cache(maxsize=len(PRESETS))
def keyless(preset: Preset) -> bytes:
    """The parameters of encryption, without any key: all that an aggregator needs."""
    # TenSEAL has no other way to write them down than with keys, which are thrown away here.
    return _serialized(_new_context(preset))


def _load(party: str, context: Any, parameters: Parameters, data: bytes) -> Any:
    preset = parameters.preset
    try:
        vector = ts.ckks_vector_from(context, data)
        [inner] = vector.ciphertext()
        found = vector.size(), inner.size(), inner.coeff_modulus_size(), inner.scale
        wanted = preset.slots, 2, len(preset.moduli) - 1, parameters.scale
        if found != wanted or not inner.is_ntt_form() or inner.is_transparent():
            raise ValueError(f"{found} instead of {wanted}, or not encrypted")
        return vector
    except (ValueError, RuntimeError) as error:
        raise ProtocolError(
            f"{party}: not a ciphertext of {preset}: damaged, or of other parameters"
        ) from error


def _frame(slots: int, scale: float, size: int) -> tuple[bytes, bytes]:
    """How TenSEAL's bytes begin and end, if they are one ciphertext and nothing else.

    They are a protocol buffer: sizes (field 1), ciphertexts (field 2), scale (field 3).
    """
    numbers = _varint(slots)
    first, last = b"\x0a" + _varint(len(numbers)) + numbers, b"\x19" + struct.pack("<d", scale)
    # A tag, and how many bytes are left for the ciphertext: all sizes in use take three to say.
    return first + b"\x12" + _varint(size - len(first) - len(last) - 4), last


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low]) if rest == 0 else bytes([low | 0x80]) + _varint(rest)


def _public_context(key: bytes, preset: Preset) -> Any:
    if (key, preset) in _contexts:
        return _contexts[key, preset]
    try:
        context = ts.context_from(key, 1)
        usable = context.has_public_key() and not context.has_secret_key()
    except (ValueError, RuntimeError) as error:
        raise ProtocolError("not a public key: damaged, or of another version") from error
    if not usable or _serialized(context) != keyless(preset):
        raise ProtocolError(f"not a public key for {preset}, or one that comes with other keys")
    return _kept((key, preset), context)


_MOST_CONTEXTS = 8
_contexts: dict[tuple[bytes, Preset], Any] = {}


def _kept(place: tuple[bytes, Preset], context: Any) -> Any:
    """Share a context without a secret key, which has a thread of its own, among all who ask."""
    if len(_contexts) == _MOST_CONTEXTS:
        del _contexts[next(iter(_contexts))]
    _contexts[place] = context
    return context


def _leave_inherited() -> None:
    # The child of a fork has no such threads, and would wait for them for ever if it dropped a
    # context, at its end too.
    for context in _contexts.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(context.data))
    _contexts.clear()


os.register_at_fork(after_in_child=_leave_inherited)


def _new_context(preset: Preset) -> Any:
    return ts.context(
        ts.SCHEME_TYPE.CKKS, preset.degree, coeff_mod_bit_sizes=list(preset.moduli), n_threads=1
    )


def _serialized(context: Any, *, public: bool = False, secret: bool = False) -> bytes:
    return bytes(
        context.serialize(
            save_public_key=public or secret,
            save_secret_key=secret,
            save_galois_keys=False,
            save_relin_keys=False,
        )
    )


def _checksum(content: dict[str, Any]) -> str:
    """Finds accidents: who can change the file can change this."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write_secret(path: Path, content: bytes, *, first: bool) -> None:
    """Replace a file that only its owner may read, whole or not at all; at first there is none."""
    scratch = None
    try:
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if first:
            os.link(scratch, path)
        else:
            os.replace(scratch, path)
            scratch = None
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except FileExistsError:
        raise ParameterError(
            f"key holder: {path} exists; keys are fresh in every run: KeyHolder.load goes on with "
            "a run, delete the file for a new one"
        ) from None
    except OSError as error:
        raise ParameterError(f"key holder: cannot write {path}: {error.strerror}") from error
    finally:
        if scratch is not None:
            os.unlink(scratch)
