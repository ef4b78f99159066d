"""Sums under homomorphic encryption (CKKS, by TenSEAL): three roles, and what each may hold.

- `KeyHolder`: the secret key. It opens one sum a round, and sees nothing but these sums.
- `Encryptor`: the public key. A client's.
- `Aggregator`: no key at all. It adds ciphertexts up, and can read none.

CKKS computes with errors, and says nothing when a number is too large for it: the result is another
number then. Both are excluded beforehand: `Parameters` has room for the vectors of all clients at
their bound, and errors so small that a sum, rounded, is the exact one (docs/proofs/ckks.md). What
the roles say to each other: `ckks_round.py`.
"""

import base64
import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import tenseal as ts

from secure_fedclust.arrays import Ints
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
        """Encrypt a vector, in chunks of exactly as many numbers as a ciphertext holds."""
        self._check(parameters, vector)
        slots = self.preset.slots
        padded = np.zeros(parameters.chunks * slots)
        padded[: len(vector)] = vector
        return [
            ts.ckks_vector(self._context, padded[i : i + slots], parameters.scale).serialize()
            for i in range(0, len(padded), slots)
        ]

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
        self._context = _keyless_context(context)
        self._sum: list[Any] = []

    def add(self, client: str, ciphertexts: Sequence[bytes]) -> None:
        """Add a client's vector to the sum, or refuse it and leave the sum as it was."""
        if client in self.clients:
            raise ProtocolError(f"{client}: its vector is in the sum already")
        if len(self.clients) == self.parameters.n_clients:
            raise ProtocolError(
                f"{client}: the sum has room for {self.parameters.n_clients} vectors, and as many "
                "are in it"
            )
        check_ciphertexts(client, self.parameters, ciphertexts)
        loaded = [_load(client, self._context, self.parameters, data) for data in ciphertexts]
        if self._sum:
            for so_far, more in zip(self._sum, loaded, strict=True):
                so_far.add_(more)
        else:
            self._sum = loaded
        self.clients.append(client)

    def total(self) -> list[bytes]:
        """The encrypted sum."""
        if not self._sum:
            raise ProtocolError("the aggregator has no vector to add up")
        return [part.serialize() for part in self._sum]

    def __repr__(self) -> str:
        return f"Aggregator({len(self.clients)} of {self.parameters.n_clients} vectors)"


class KeyHolder:
    """Holds the secret keys of one run, and opens one sum a round.

    Keys are made when they are first asked for, one for each preset that the run needs.

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
        self._contexts: dict[Preset, Any] = {}
        self._path = None if path is None else Path(path)
        if self._path is not None and self._path.exists():
            raise ParameterError(
                f"key holder: {self._path} exists; keys are fresh in every run: KeyHolder.load "
                "goes on with a run, delete the file for a new one"
            )

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
        try:
            if path.stat().st_mode & 0o077:
                raise ParameterError(
                    f"key holder: {path} can be read by others than its owner: the keys in it are "
                    "not secret any more, delete it and begin a new run"
                )
            content = json.loads(path.read_text(encoding="utf-8"))
            found = content["format"], content["run"], content["opened"], content["keys"]
            if found[0] != _FORMAT:
                raise ParameterError(f"key holder: {path} was written by another version")
            holder = cls(str(found[1]))
            holder.opened = int(found[2])
            holder._contexts = {
                PRESETS[int(index)]: ts.context_from(base64.b64decode(key, validate=True))
                for index, key in found[3].items()
            }
        except ParameterError:
            raise
        except Exception as error:
            # Whatever is wrong with it, nothing of the content may get into a message.
            raise ParameterError(
                f"key holder: {path} is not a key file ({type(error).__name__})"
            ) from None
        if holder.run != run:
            raise ParameterError(
                f"key holder: {path} has the keys of run {holder.run}, this is run {run}: keys are "
                "fresh in every run; delete the old file"
            )
        for preset, context in holder._contexts.items():
            if not context.has_secret_key() or _without_keys(context) != keyless(preset):
                raise ParameterError(f"key holder: {path} does not have the keys that it says")
        holder._path = path
        return holder

    def public_key(self, preset: Preset) -> bytes:
        """What clients encrypt with."""
        if preset not in self._contexts:
            if preset not in PRESETS:
                raise ProtocolError(f"key holder: there are no keys for {preset}")
            self._contexts[preset] = _new_context(preset)
            self._save()
        return _serialized(self._contexts[preset], public=True)

    def open(self, number: int, parameters: Parameters, ciphertexts: Sequence[bytes]) -> Ints:
        """Open the sum of a round: the numbers that are used, rounded to whole steps.

        Raises
        ------
        ProtocolError
            When a sum of this round, or a later one, was opened already, or for ciphertexts that
            are none. Nothing is opened then.
        AggregationAborted
            When what was opened is no sum of clients' vectors. It is not given out.
        """
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
        values = np.concatenate([part.decrypt() for part in loaded])[: parameters.length]
        steps = np.rint(values)
        off = np.abs(values - steps).max()
        if not off <= TOLERANCE or np.abs(steps).max() > parameters.largest:
            raise AggregationAborted(
                f"key holder: what was opened in round {number} is no sum of clients' vectors: it "
                "was encrypted under another key or with other parameters, or some client's "
                "numbers were too large"
            )
        return np.asarray(steps, dtype=np.int64)

    def _save(self) -> None:
        if self._path is None:
            return
        content = {
            "format": _FORMAT,
            "run": self.run,
            "opened": self.opened,
            "keys": {
                PRESETS.index(preset): base64.b64encode(_serialized(context, secret=True)).decode()
                for preset, context in self._contexts.items()
            },
        }
        _write_secret(self._path, json.dumps(content).encode())

    def __repr__(self) -> str:
        return f"KeyHolder(run={self.run!r}, opened={self.opened})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key holder is not copied or pickled: its keys stay where they are")


def check_ciphertexts(party: str, parameters: Parameters, ciphertexts: Sequence[bytes]) -> None:
    """Refuse what does not have the size of an encrypted vector, before anything reads it."""
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


@lru_cache(maxsize=len(PRESETS))
def keyless(preset: Preset) -> bytes:
    """The parameters of encryption, without any key: all that an aggregator needs."""
    # TenSEAL has no other way to write them down than with keys, which are thrown away here.
    return _serialized(_new_context(preset))


def _load(party: str, context: Any, parameters: Parameters, data: bytes) -> Any:
    try:
        vector = ts.ckks_vector_from(context, data)
        [inner] = vector.ciphertext()
        found = vector.size(), inner.scale
    except (ValueError, RuntimeError) as error:
        raise ProtocolError(
            f"{party}: not a ciphertext of {parameters.preset}: damaged, or of other parameters"
        ) from error
    if found != (parameters.preset.slots, parameters.scale):
        raise ProtocolError(
            f"{party}: a ciphertext of {found[0]} numbers at scale {found[1]:g}, where "
            f"{parameters.preset.slots} at {parameters.scale:g} were agreed on"
        )
    return vector


# A context has threads of its own, and many clients of a simulation have the same public one.
@lru_cache(maxsize=8)
def _public_context(key: bytes, preset: Preset) -> Any:
    try:
        context = ts.context_from(key)
        usable = context.has_public_key() and not context.has_secret_key()
    except (ValueError, RuntimeError) as error:
        raise ProtocolError("not a public key: damaged, or of another version") from error
    if not usable or _without_keys(context) != keyless(preset):
        raise ProtocolError(f"not a public key for {preset}, or one that comes with other keys")
    return context


@lru_cache(maxsize=len(PRESETS))
def _keyless_context(context: bytes) -> Any:
    return ts.context_from(context)


def _new_context(preset: Preset) -> Any:
    return ts.context(
        ts.SCHEME_TYPE.CKKS, preset.degree, coeff_mod_bit_sizes=list(preset.moduli), n_threads=1
    )


def _without_keys(context: Any) -> bytes:
    return _serialized(context)


def _serialized(context: Any, *, public: bool = False, secret: bool = False) -> bytes:
    return bytes(
        context.serialize(
            save_public_key=public or secret,
            save_secret_key=secret,
            save_galois_keys=False,
            save_relin_keys=False,
        )
    )


def _write_secret(path: Path, content: bytes) -> None:
    """Replace a file that only its owner may read, whole or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise ParameterError(f"key holder: cannot write {path}: {error.strerror}") from error
