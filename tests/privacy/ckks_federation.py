"""A federation that encrypts, to be lied to, broken and looked into by the tests of its sums."""

import gc
import types
from dataclasses import replace

import numpy as np
import tenseal as ts
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_fedclust import ProtocolError
from secure_fedclust.errors import SecureFedClustError
from secure_fedclust.messages import KEY_HOLDER, Array, Blob, Integer, Schema
from secure_fedclust.privacy import ckks
from secure_fedclust.privacy.ckks_parameters import PRESETS, Parameters
from secure_fedclust.privacy.ckks_round import Ckks, CkksClient, KeyHolding, OneKeyHolder
from secure_fedclust.privacy.ckks_stages import (
    ENCRYPT,
    KEY,
    OPEN,
    TAKE,
    asked_text,
    certified_text,
    cut,
    joined,
    opening_text,
    round_text,
    sealed_text,
)
from secure_fedclust.privacy.cohort import Rules
from secure_fedclust.privacy.identity import Identity
from secure_fedclust.privacy.masks import pair_key, public_key
from secure_fedclust.privacy.secure_sum import Contribution, Question

RUN = "run"
QUESTION = b"what do your records add up to?"
ANCHOR = {"ledger_rows": 0, "ledger_head": "0" * 64}
STAGES = (KEY, TAKE, ENCRYPT, OPEN)

SMALL, LARGE = PRESETS
LITTLE, MUCH = 1 << 20, 1 << 42
"""Numbers of a vector for which each of the presets is needed, among a few clients."""


_P = 2**255 - 19
LOW_ORDER = [
    number.to_bytes(32, "little")
    for number in (
        0,
        1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
        _P - 1,
        _P,
        _P + 1,
    )
]
"""Points with which everybody agrees on zero."""


NOT_THE_ONE = "server: it is not the one that this key holder opens sums for"
NOT_FOR_THIS = "server: its request was changed on the way, or is not for this run and round"
NOT_SIGNED = "key holder: it did not sign this key"


def lax(stage):
    """The stage's request as somebody writes it who does not check what is in it."""
    loose = {
        Integer: lambda kind: Integer(-(1 << 62), 1 << 62),
        Array: lambda kind: replace(kind, minimum=None, largest=1 << 62),
        Blob: lambda kind: kind,
    }
    fields = {name: loose[type(kind)](kind) for name, kind in stage.request.fields.items()}
    return Schema(stage.request.name, fields)


class Federation:
    """Clients with a vector each, a key holder, and an exchange that encodes as the real one does.

    Attributes
    ----------
    lost : list of (stage, party)
        Replies that do not arrive; `replies` has them.
    on_request : function of stage, party, request
        What the server sends in place of a request.
    on_reply : function of stage, party, reply
        What a party sends in place of a reply; None for nothing.
    requests, replies : mappings of (number, stage name, party) to fields
    wire : list of (stage name, party, bytes)
        All messages to and from each party.
    refusals : list of (stage, party, error)
        What parties, or the server, did not take.
    asked_of : list of (client, question, number of clients)
        What was contributed to.
    """

    def __init__(
        self,
        n=5,
        threshold=4,
        *,
        colluders=1,
        length=6,
        vectors=None,
        agreements=(),
        registered=True,
        pinned=True,
        path=None,
    ):
        self.rules = Rules(threshold, colluders, b"the spec")
        self.names = [f"client {i}" for i in range(n)]
        self.server, self.holder = Identity(), Identity()
        self.identities = {name: Identity() for name in self.names}
        rules = dict.fromkeys(self.names, self.rules)
        for name, agreement in dict(agreements).items():
            rules[name] = replace(self.rules, agreement=agreement)
        self.clients = {
            name: CkksClient(rules[name], self.identities[name], [self.holder.public])
            for name in self.names
        }
        self.pinned, self.path = pinned, path
        self.key_holder = self.new_key_holder()
        publics = {name: identity.public for name, identity in self.identities.items()}
        self.sum = Ckks(self.rules, OneKeyHolder(self.server), publics if registered else None)
        if vectors is None:
            vectors = np.random.default_rng(0).integers(-LITTLE, LITTLE, (n, length))
        self.vectors = dict(zip(self.names, vectors, strict=True))
        self.length = len(vectors[0])
        self.reach = LITTLE
        self.contributors = {}
        self.lost = []
        self.be_honest()
        self.requests, self.replies, self.wire = {}, {}, []
        self.refusals, self.asked_of = [], []
        self.number = -1

    def new_key_holder(self):
        """One that knows what its file says, and else nothing."""
        aggregator = self.server.public if self.pinned else None
        return KeyHolding(self.rules, self.holder, aggregator, self.path)

    def be_honest(self):
        self.on_request = lambda stage, name, request: request
        self.on_reply = lambda stage, name, reply: reply

    def contribute(self, name):
        def answer(question, n_clients):
            self.asked_of.append((name, question, n_clients))
            if name in self.contributors:
                return self.contributors[name](question, n_clients)
            return Contribution(self.vectors[name], self.reach, ANCHOR)

        return answer

    def deliver(self, stage, name, request, run=RUN):
        """Let a party answer one request that goes over the wire."""
        party = self.key_holder if name == KEY_HOLDER else self.clients[name]
        data = lax(stage).encode(request, run=run, step=0)
        self.wire.append((stage.name, name, data))
        if stage.request.name not in party.stages:
            raise ProtocolError("no stage of this party")
        decoded, _ = stage.request.decode(data, run=run, step=0, bounds=party.bounds)
        if name == KEY_HOLDER:
            return party.answer(stage, run, decoded)
        return party.answer(stage, run, decoded, self.contribute(name))

    def ask(self, stage, requests, bounds, read=None):
        found = {}
        for name, honest in requests.items():
            request = self.on_request(stage, name, honest)
            self.requests[self.number, stage.name, name] = request
            try:
                reply = self.on_reply(stage, name, self.deliver(stage, name, request))
                if reply is None:
                    continue
                self.replies[self.number, stage.name, name] = reply
                data = stage.reply.encode(reply, run=RUN, step=0)
                self.wire.append((stage.name, name, data))
                if (stage, name) in self.lost:
                    continue
                allowed = {**bounds, **stage.request.sizes(honest, {})}
                decoded, _ = stage.reply.decode(data, run=RUN, step=0, bounds=allowed)
                found[name] = decoded if read is None else read(name, decoded)
            except SecureFedClustError as error:
                self.refusals.append((stage, name, error))
        return found

    def total(self, number=None, ask=None, text=QUESTION, run=RUN):
        self.number = self.number + 1 if number is None else number
        asked = Question(
            run, self.number, text, self.length, lambda n: self.reach, lambda n: n * self.reach
        )
        return self.sum.total(ask or self.ask, self.names, asked)

    @property
    def parameters(self):
        return Parameters(self.length, len(self.names), self.reach)

    def channel_key(self, name):
        """What a client and the server have agreed on, and nobody else knows, for sums of now."""
        preset = PRESETS.index(self.parameters.preset)
        taken = [
            (self.requests[place], reply)
            for place, reply in self.replies.items()
            if place[1:] == (TAKE.name, name) and self.requests[place]["preset"] == preset
        ]
        asked, reply = taken[-1]
        fields = (asked[field] for field in ("preset", "key", "channel"))
        text = certified_text(RUN, self.rules.agreement, *fields)
        return pair_key(self.sum._own, reply["own"], b"ckks", text, (0, 1))

    def sealed(self, name, ciphertexts, *, number=None, parameters=None, text=QUESTION, run=RUN):
        """What a client sends that has encrypted these, for a round and a question."""
        number = self.number if number is None else number
        bound = sealed_text(round_text(run, number, parameters or self.parameters, text), ANCHOR)
        channel = AESGCM(self.channel_key(name))
        parts = [
            channel.encrypt(nonce(number, i), part, bound) for i, part in enumerate(ciphertexts)
        ]
        sizes, row = joined(parts)
        return {"sizes": sizes, "sealed": row, **ANCHOR}

    def unsealed(self, name, number=0):
        """What the server gets at, and nobody else."""
        reply, channel = self.replies[number, ENCRYPT.name, name], AESGCM(self.channel_key(name))
        bound = sealed_text(round_text(RUN, number, self.parameters, QUESTION), reply)
        return [
            channel.decrypt(nonce(number, i), part, bound)
            for i, part in enumerate(cut(name, reply["sizes"], reply["sealed"]))
        ]

    def sum_over(self, names):
        return np.sum([self.vectors[name] for name in names], axis=0)

    def was_asked(self, stage, number=None):
        """Parties that were asked in a round, or in any."""
        return [
            name
            for each, asked, name in self.requests
            if asked == stage.name and number in (None, each)
        ]


def nonce(number, chunk):
    return number.to_bytes(8) + chunk.to_bytes(4)


def is_exact(federation, total):
    return np.array_equal(total.steps, federation.sum_over(total.survivors))


def flipped(data, place=0, bit=1):
    changed = bytearray(data)
    changed[place] ^= bit
    return bytes(changed)


class World:
    """The honest request, everything of an earlier round, and the keys of whoever is needed.

    What is made here is signed by those who would sign it, for what is in it: lies are refused
    for what they say, not for how they are signed.
    """

    def __init__(self, federation, request):
        self.f, self.request = federation, dict(request)

    def with_(self, **changed):
        return {**self.request, **changed}

    def asking(self, *, by=None, run=RUN, **changed):
        """A request for a key, signed for what is in it."""
        said = self.with_(**changed)
        by = by or self.f.server
        text = asked_text(run, said["preset"], said["channel"])
        return {**said, "identity": by.public, "signature": by.sign(text)}

    def certified(self, *, by=None, run=RUN, agreement=b"the spec", **changed):
        """A key to be taken, signed for what is in it."""
        said = self.with_(**changed)
        fields = (said[name] for name in ("preset", "key", "channel"))
        text = certified_text(run, agreement, *fields)
        return {**said, "certificates": (by or self.f.holder).sign(text)}

    def opening(self, *, by=None, run=RUN, parts=None, **changed):
        """A sum to be opened, signed for what is in it."""
        said = self.with_(**changed)
        if parts is not None:
            said["sizes"], said["ciphertexts"] = joined(parts)
        parameters = Parameters(*(said[name] for name in ("length", "n_clients", "reach")))
        parts = cut("test", said["sizes"], said["ciphertexts"])
        text = opening_text(run, said["number"], parameters, said["vectors"], parts)
        return {**said, "signature": (by or self.f.server).sign(text)}

    def parts(self):
        return [
            bytes(part) for part in cut("test", self.request["sizes"], self.request["ciphertexts"])
        ]

    def signed_for(self, make, **changed):
        """The request as it is, with a signature for another one."""
        field = "certificates" if make == self.certified else "signature"
        return self.with_(**{field: make(**changed)[field]})


def a_channel():
    return public_key(X25519PrivateKey.generate())


def secret_parts(context):
    """Bytes that only those have who have the secret key."""
    public = ckks._serialized(context, public=True)
    whole = ckks._serialized(context, secret=True)
    windows = [whole[i : i + 32] for i in range(0, len(whole) - 32, 160)]
    found = [window for window in windows if window not in public]
    assert len(found) > 100
    return found


def objects_of(*roots):
    """Everything that can be reached from here, but code."""
    seen, todo = {}, list(roots)
    code = type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType
    while todo:
        one = todo.pop()
        if id(one) not in seen and not isinstance(one, code):
            seen[id(one)] = one
            todo += gc.get_referents(one)
    return list(seen.values())


def contexts_of(*roots):
    """Every context that can be reached, ciphertexts' included, and every one that bytes hold."""
    found = []
    for one in objects_of(*roots):
        if isinstance(one, ts.Context):
            found.append(one)
        elif isinstance(one, ts.CKKSVector):
            found.append(one.context())
        elif type(one) is bytes and len(one) > 1000:
            try:
                found.append(ts.context_from(one))
            except (ValueError, RuntimeError):
                continue
    return found
