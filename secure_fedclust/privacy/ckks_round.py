"""Encrypted sums: what key holder, clients and server say to each other.

1. *Key*, once in a run: the server asks the key holder for a public key. The key holder signs it,
   for this run, this privacy spec and this server.
2. *Take*, once in a run: each client checks who signed the key, and agrees with the server on
   another one, under which it will send what it encrypts: the key holder, who could open it, must
   not read it on the way, and the server must know whose it is.
3. *Encrypt*, once a sum: each client sends its vector, its share of the noise inside, encrypted.
   The server adds it to what it has as soon as it comes.
4. *Open*, once a sum: the key holder opens the sum, once, and sends the numbers.

That there are `min_survivors` vectors in a sum is the server's word: a ciphertext does not show how
many were added up. Server and key holder together can open every client's vector. What is left to
clients then is the noise in it: docs/threat_model.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_fedclust.arrays import Ints
from secure_fedclust.errors import AggregationAborted, ParameterError, ProtocolError
from secure_fedclust.messages import KEY_HOLDER, Bounds, Stage, Values
from secure_fedclust.privacy.ckks import Aggregator, Encryptor, KeyHolder, keyless
from secure_fedclust.privacy.ckks_parameters import PRESETS, Parameters, Preset
from secure_fedclust.privacy.ckks_stages import (
    CLIENT_BOUNDS,
    ENCRYPT,
    HOLDER_BOUNDS,
    KEY,
    MOST_KEY,
    MOST_SEALED,
    OPEN,
    TAKE,
    TAKEN_BOUNDS,
    asked_text,
    certified_text,
    cut,
    joined,
    opening_text,
    round_text,
    sealed_bounds,
    sealed_text,
    taken_text,
)
from secure_fedclust.privacy.cohort import Rules
from secure_fedclust.privacy.identity import SIGNATURE_BYTES, Identity, is_signed
from secure_fedclust.privacy.masks import digest, is_usable, pair_key, public_key
from secure_fedclust.privacy.secure_sum import (
    Ask,
    Contribute,
    Question,
    SecureSum,
    Summand,
    Total,
    check_range,
)


class KeyHolding:
    """The key holder's end: gives out the keys of one run, and opens one sum a round.

    Parameters
    ----------
    rules : Rules
    identity : Identity
        By which clients know that a key is this key holder's.
    aggregator : bytes, optional
        The public key of the server's identity. If not given, the first that asks for a key is
        taken for it.
    path : path, optional
        Where keys are kept during the run; see `KeyHolder`.
    """

    stages: Mapping[str, Stage] = {stage.request.name: stage for stage in (KEY, OPEN)}
    bounds: Bounds = HOLDER_BOUNDS

    def __init__(
        self,
        rules: Rules,
        identity: Identity,
        aggregator: bytes | None = None,
        path: str | Path | None = None,
    ) -> None:
        self.rules = rules
        self._identity = identity
        self._registered = aggregator
        self._path = None if path is None else Path(path)
        self._holder: KeyHolder | None = None

    def answer(self, stage: Stage, run: str, request: Values) -> Values:
        """Answer one stage, or raise a `ProtocolError`."""
        return self._key(run, **request) if stage is KEY else self._open(run, **request)

    def _key(
        self, run: str, preset: int, channel: bytes, identity: bytes, signature: bytes
    ) -> Values:
        _check_signed(identity, signature, asked_text(run, preset, channel))
        _check_server(identity, self._registered)
        keys = self._keys(run, first=True)
        _check_server(identity, self._server(keys))
        keys.serve(identity)
        key = keys.public_key(PRESETS[preset])
        text = certified_text(run, self.rules.agreement, preset, key, channel)
        return {"key": key, "certificate": self._identity.sign(text)}

    def _open(
        self,
        run: str,
        number: int,
        length: int,
        n_clients: int,
        reach: int,
        vectors: int,
        sizes: Ints,
        ciphertexts: bytes,
        signature: bytes,
    ) -> Values:
        keys = self._keys(run)
        parts = [bytes(part) for part in cut("server", sizes, ciphertexts)]
        try:
            self.rules.check(n_clients)
            parameters = Parameters(length, n_clients, reach)
        except ParameterError as error:
            raise ProtocolError(f"server: {error}") from error
        if not self.rules.min_survivors <= vectors <= n_clients:
            raise ProtocolError(
                f"server: a sum of {vectors} vectors of {n_clients}, this key holder opens sums of "
                f"{self.rules.min_survivors} or more (min_survivors)"
            )
        text = opening_text(run, number, parameters, vectors, parts)
        _check_signed(self._server(keys), signature, text)
        return {"steps": keys.open(number, parameters, parts)}

    def _server(self, keys: KeyHolder) -> bytes | None:
        """The server that sums are opened for: one that was named, or else the first that asked."""
        return keys.aggregator if self._registered is None else self._registered

    def _keys(self, run: str, *, first: bool = False) -> KeyHolder:
        """The keys of this run, which are made when they are first asked for."""
        if self._holder is None and self._path is not None and self._path.exists():
            self._holder = KeyHolder.load(self._path, run)
        if self._holder is None and first:
            self._holder = KeyHolder(run, self._path)
        if self._holder is None:
            raise ProtocolError("server: it has not asked for a key in this run")
        if self._holder.run != run:
            raise ProtocolError(
                f"server: run {run} asks for the keys of run {self._holder.run}; they are fresh in "
                "every run"
            )
        return self._holder

    def forget(self) -> None:
        """Throw the keys away when the run has ended; see `KeyHolder.forget`."""
        if self._holder is not None:
            self._holder.forget()

    def __repr__(self) -> str:
        return f"KeyHolding({self._holder!r})"


@dataclass
class _Taken:
    """A key that a client has taken, and the one under which it sends what it encrypts."""

    key: bytes
    encryptor: Encryptor
    channel: AESGCM = field(repr=False)


class CkksClient(Summand):
    """A client's end.

    Parameters
    ----------
    rules : Rules
    identity : Identity
        By which the server knows whose a vector is.
    key_holders : sequence of bytes
        Public keys of the identities that must have signed a key: one, or several that open sums
        together. Known from somewhere that the server cannot change.
    """

    bounds = CLIENT_BOUNDS
    encryptor_class = Encryptor

    def __init__(self, rules: Rules, identity: Identity, key_holders: Sequence[bytes]) -> None:
        if not key_holders:
            raise ParameterError("key_holders is empty: anybody's key would be taken")
        self.rules = rules
        self.stages: Mapping[str, Stage] = {each.request.name: each for each in (TAKE, ENCRYPT)}
        self._identity = identity
        self._key_holders = tuple(key_holders)
        self._taken: dict[int, _Taken] = {}
        self._run: str | None = None
        self._last = -1

    def answer(self, stage: Stage, run: str, request: Values, contribute: Contribute) -> Values:
        """Answer one stage; a round that is not newer than the last one is refused."""
        if stage is TAKE:
            return self._take(run, **request)
        return self._encrypt(run, **request, contribute=contribute)

    def _take(
        self, run: str, preset: int, key: bytes, channel: bytes, certificates: bytes
    ) -> Values:
        text = certified_text(run, self.rules.agreement, preset, key, channel)
        if len(certificates) != SIGNATURE_BYTES * len(self._key_holders) or not all(
            is_signed(holder, certificates[i * SIGNATURE_BYTES :][:SIGNATURE_BYTES], text)
            for i, holder in enumerate(self._key_holders)
        ):
            raise ProtocolError(
                "key holder: it did not sign this key, or not for this run, privacy spec and server"
            )
        if not is_usable(channel):
            raise ProtocolError("server: its key is none to agree with")
        if self._run not in (None, run):
            raise ProtocolError("server: it gives out a key of another run than the last one")
        taken = self._taken.get(preset)
        if taken is not None and taken.key != key:
            raise ProtocolError("key holder: it gives out a second key in one run")
        own = X25519PrivateKey.generate()
        encryptor = self.encryptor_class(key, PRESETS[preset])
        self._taken[preset] = _Taken(key, encryptor, _channel(own, channel, text))
        self._run = run
        return {
            "agreement": digest(self.rules.agreement),
            "own": public_key(own),
            "identity": self._identity.public,
            "signature": self._identity.sign(taken_text(text, public_key(own))),
        }

    def _encrypt(
        self,
        run: str,
        number: int,
        preset: int,
        n_clients: int,
        question: bytes,
        contribute: Contribute,
    ) -> Values:
        taken = self._taken.get(preset)
        if taken is None or run != self._run:
            raise ProtocolError(f"server: this client was given no key for {PRESETS[preset]}")
        if number <= self._last:
            raise ProtocolError(f"server: round {number} does not come after round {self._last}")
        try:
            self.rules.check(n_clients)
        except ParameterError as error:
            raise ProtocolError(f"server: {error}") from error
        self._last = number
        given = contribute(question, n_clients)
        parameters = Parameters(len(given.vector), n_clients, given.reach)
        text = sealed_text(round_text(run, number, parameters, question), given.anchor)
        sizes, sealed = joined(
            [
                taken.channel.encrypt(_nonce(number, i), part, text)
                for i, part in enumerate(taken.encryptor.encrypt(parameters, given.vector))
            ]
        )
        return {"sizes": sizes, "sealed": sealed, **given.anchor}

    def __repr__(self) -> str:
        return f"CkksClient({self._identity!r})"


@dataclass(frozen=True)
class IssuedKey:
    """A public key, with the signatures of all who hold a part of the secret one."""

    key: bytes
    certificates: Sequence[bytes]


class Opening(ABC):
    """How the server gets a key, and has a sum opened: the seam for several key holders.

    One key holder can open whatever it is given. Where that is too much trust, several can hold
    parts of the key. Whoever adds that writes one file: a subclass of this class, which asks all of
    them by `ask`; their end of the stages it asks; and, if the library is another one,
    `Encryptor` and `Aggregator` for it (`CkksClient.encryptor_class`, `Ckks.aggregator_class`).
    Clients check one signature of each key holder already. Partial decryptions need noise of their
    own (docs/threat_model.md).
    """

    @abstractmethod
    def key(self, ask: Ask, run: str, preset: Preset, channel: bytes) -> IssuedKey:
        """A public key for a run.

        Parameters
        ----------
        ask : Ask
        run : str
        preset : Preset
        channel : bytes
            The server's key for agreeing on others with clients, to be signed with it.
        """

    @abstractmethod
    def open(
        self,
        ask: Ask,
        run: str,
        number: int,
        parameters: Parameters,
        vectors: int,
        ciphertexts: Sequence[bytes],
    ) -> Ints:
        """The sum of so many vectors, in whole steps, or an `AggregationAborted`."""


class OneKeyHolder(Opening):
    """One party has the secret key.

    Parameters
    ----------
    identity : Identity
        The server's, by which the key holder knows it.
    name : str
        By which the engine reaches the key holder.
    """

    def __init__(self, identity: Identity, name: str = KEY_HOLDER) -> None:
        self.name = name
        self._identity = identity

    def key(self, ask: Ask, run: str, preset: Preset, channel: bytes) -> IssuedKey:
        """See `Opening`."""
        index = PRESETS.index(preset)
        request = {
            "preset": index,
            "channel": channel,
            "identity": self._identity.public,
            "signature": self._identity.sign(asked_text(run, index, channel)),
        }
        sizes: Bounds = {"key": (1, MOST_KEY), "certificate": SIGNATURE_BYTES}
        reply = self._asked(ask, KEY, request, sizes, "has sent no key")
        return IssuedKey(reply["key"], [reply["certificate"]])

    def open(
        self,
        ask: Ask,
        run: str,
        number: int,
        parameters: Parameters,
        vectors: int,
        ciphertexts: Sequence[bytes],
    ) -> Ints:
        """See `Opening`."""
        sizes, row = joined(ciphertexts)
        text = opening_text(run, number, parameters, vectors, ciphertexts)
        request = {
            "number": number,
            "length": parameters.length,
            "n_clients": parameters.n_clients,
            "reach": parameters.reach,
            "vectors": vectors,
            "sizes": sizes,
            "ciphertexts": row,
            "signature": self._identity.sign(text),
        }
        found = self._asked(
            ask, OPEN, request, {"length": parameters.length}, "has not opened the sum"
        )
        return np.asarray(found["steps"], dtype=np.int64)

    def _asked(self, ask: Ask, stage: Stage, request: Values, sizes: Bounds, failed: str) -> Values:
        replies = ask(stage, {self.name: request}, sizes)
        if self.name not in replies:
            raise AggregationAborted(
                f"the {self.name} {failed}: it cannot be reached, it has refused (its log says "
                "why), or its answer was set aside (a warning says why). "
                + ("Nothing was" if stage is KEY else "What was charged for the sum stays")
                + " charged: run again when that is mended"
            )
        found: Values = replies[self.name]
        return found


class Ckks(SecureSum):
    """The server's end: gives out the key, adds ciphertexts up, has the sum opened.

    Parameters
    ----------
    rules : Rules
    opening : Opening
    registered : mapping of client to bytes, optional
        The public key of each client's identity. That of a client that is not in it is the one
        that it names first.
    """

    aggregator_class = Aggregator

    def __init__(
        self, rules: Rules, opening: Opening, registered: Mapping[str, bytes] | None = None
    ) -> None:
        self.rules = rules
        self._opening = opening
        self._identities = dict(registered or {})
        self._own = X25519PrivateKey.generate()
        self._issued: dict[tuple[str, Preset], IssuedKey] = {}
        self._channels: dict[tuple[str, str, Preset], AESGCM] = {}

    def total(self, ask: Ask, clients: Sequence[str], question: Question) -> Total:
        """See `SecureSum`."""
        n = len(clients)
        self.rules.check(n)
        parameters = Parameters(question.length, n, question.reach(n))
        if parameters.most_bytes > MOST_SEALED:
            raise ParameterError(
                f"a vector of {question.length} numbers would be encrypted in "
                f"{parameters.most_bytes} bytes, more than a message holds ({MOST_SEALED}): use "
                "fewer clusters, or protection='masking'"
            )
        run, preset = question.run, parameters.preset
        holders = self._with_key(ask, clients, run, preset)
        self.rules.enough(holders, clients, "have taken the key", charged=False)
        adder = self.aggregator_class(parameters, keyless(preset))
        bound = round_text(run, question.number, parameters, question.text)

        def add(client: str, reply: Values) -> None:
            channel, text = self._channels[run, client, preset], sealed_text(bound, reply)
            parts = cut(client, reply["sizes"], reply["sealed"])
            try:
                opened = [
                    channel.decrypt(_nonce(question.number, i), part, text)
                    for i, part in enumerate(parts)
                ]
            except InvalidTag:
                raise ProtocolError(
                    f"{client}: what it sent was changed on the way, or was made for another "
                    "round, question, key or number of clients"
                ) from None
            adder.add(client, opened)

        request = {
            "number": question.number,
            "preset": PRESETS.index(preset),
            "n_clients": n,
            "question": question.text,
        }
        found = ask(ENCRYPT, dict.fromkeys(holders, request), sealed_bounds(parameters), add)
        for client in set(holders) - set(found):
            # It may have lost the key with its process: it is given to it again.
            del self._channels[run, client, preset]
        survivors = self.rules.enough(list(found), clients, "have sent a vector")
        steps = self._opening.open(
            ask, run, question.number, parameters, len(survivors), adder.total()
        )
        check_range(steps, question.largest(n))
        return Total(steps, n, tuple(survivors))

    def _with_key(self, ask: Ask, clients: Sequence[str], run: str, preset: Preset) -> list[str]:
        """Clients that have the key, which those that have not are given."""
        missing = [client for client in clients if (run, client, preset) not in self._channels]
        if missing:
            issued, own = self._issued_key(ask, run, preset), public_key(self._own)
            index = PRESETS.index(preset)
            request = {
                "preset": index,
                "key": issued.key,
                "channel": own,
                "certificates": b"".join(issued.certificates),
            }
            text = certified_text(run, self.rules.agreement, index, issued.key, own)

            def agree(client: str, reply: Values) -> None:
                self._channels[run, client, preset] = self._agreed(client, reply, text)

            ask(TAKE, dict.fromkeys(missing, request), TAKEN_BOUNDS, agree)
        return [client for client in clients if (run, client, preset) in self._channels]

    def _issued_key(self, ask: Ask, run: str, preset: Preset) -> IssuedKey:
        if (run, preset) not in self._issued:
            own = public_key(self._own)
            self._issued[run, preset] = self._opening.key(ask, run, preset, own)
        return self._issued[run, preset]

    def _agreed(self, client: str, reply: Values, text: bytes) -> AESGCM:
        """The key under which a client sends what it encrypts."""
        names = "agreement", "own", "identity", "signature"
        agreement, own, identity, signature = (reply[name] for name in names)
        if agreement != digest(self.rules.agreement):
            raise ProtocolError(f"{client}: it has agreed on another privacy spec")
        known = self._identities.get(client, identity) == identity
        others = {key for name, key in self._identities.items() if name != client}
        if (
            not known
            or identity in others
            or not is_signed(identity, signature, taken_text(text, own))
        ):
            raise ProtocolError(f"{client}: its answer is not signed by the client of that name")
        if not is_usable(own):
            raise ProtocolError(f"{client}: its key is none to agree with")
        self._identities[client] = identity
        return _channel(self._own, own, text)


def _check_server(server: bytes, known: bytes | None) -> None:
    if known not in (None, server):
        raise ProtocolError("server: it is not the one that this key holder opens sums for")


def _check_signed(server: bytes | None, signature: bytes, text: bytes) -> None:
    if server is None or not is_signed(server, signature, text):
        raise ProtocolError(
            "server: its request was changed on the way, or is not for this run and round"
        )


def _channel(ours: X25519PrivateKey, theirs: bytes, context: bytes) -> AESGCM:
    return AESGCM(pair_key(ours, theirs, b"ckks", context, (0, 1)))


def _nonce(number: int, chunk: int) -> bytes:
    # A key lasts for a run, in which a client answers a round once.
    return number.to_bytes(8) + chunk.to_bytes(4)
