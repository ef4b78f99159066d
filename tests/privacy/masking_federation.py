"""A federation that masks, to be lied to, broken and looked into by the tests of masking."""

from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from scipy.stats import chi2

from secure_fedclust import PrivacySpec, ProtocolError
from secure_fedclust.privacy.cohort import Rules
from secure_fedclust.privacy.identity import Identity
from secure_fedclust.privacy.masking import (
    ADVERTISE,
    CONFIRM,
    MASK,
    SHARE,
    UNMASK,
    Masking,
)
from secure_fedclust.privacy.masking_client import MaskingClient
from secure_fedclust.privacy.masking_stages import advertised_text
from secure_fedclust.privacy.masks import digest, public_key
from secure_fedclust.privacy.secure_sum import Contribution, Question

UNLIKELY = 1e-7
"""How often a statistical test may fail although all is well."""

RUN = "run"
QUESTION = b"what do your records add up to?"
NOTHING = b"nothing, please"
"""A question that clients answer with zeros."""

PASSIVE, ACTIVE = (ADVERTISE, SHARE, MASK, UNMASK), (ADVERTISE, SHARE, MASK, CONFIRM, UNMASK)
ANCHOR = {"ledger_rows": 0, "ledger_head": "0" * 64}

each_mode = pytest.mark.parametrize("active", [False, True], ids=["passive", "active"])

X_SPEC = PrivacySpec(
    epsilon=2.0,
    delta=1e-6,
    ranges=[(-1, 1)] * 2,
    protection="masking",
    min_survivors=9,
    colluders=1,
    public_size=20,
)


def stages_of(active):
    return ACTIVE if active else PASSIVE


class ByStage(dict):
    """Keys are number, stage and client; stages are not hashable, but their names are."""

    def __setitem__(self, key, value):
        super().__setitem__(self._named(key), value)

    def __getitem__(self, key):
        return super().__getitem__(self._named(key))

    def __contains__(self, key):
        return super().__contains__(self._named(key))

    def get(self, key, default=None):
        return super().get(self._named(key), default)

    def items(self):
        stages = {stage.name: stage for stage in ACTIVE}
        return [
            ((number, stages[name], client), v) for (number, name, client), v in super().items()
        ]

    @staticmethod
    def _named(key):
        number, stage, client = key
        return number, stage.name, client


class Federation:
    """Clients with a vector each, and an exchange that encodes and checks as the real one does.

    Attributes
    ----------
    lost : list of (stage, client)
        Replies that do not arrive; the server does not see them, though `replies` has them.
    on_request : function of stage, client, request
        What the server sends in place of a request.
    on_reply : function of stage, client, reply
        What a client sends in place of a reply; None for nothing.
    requests, replies : mappings of (number, stage, client) to fields
    view : list of (stage, client, bytes)
        What arrives at the server.
    """

    def __init__(
        self,
        n=5,
        threshold=4,
        *,
        colluders=1,
        active=False,
        length=6,
        client_class=MaskingClient,
        vectors=None,
        agreements=(),
        seed=0,
    ):
        self.rules = Rules(threshold, colluders, b"the spec", active)
        self.names = [f"client {i}" for i in range(n)]
        self.identities = {name: Identity() for name in self.names} if active else {}
        registered = frozenset(identity.public for identity in self.identities.values())
        rules = dict.fromkeys(self.names, self.rules)
        for name, agreement in dict(agreements).items():
            rules[name] = replace(self.rules, agreement=agreement)
        self.clients = {
            name: client_class(rules[name], self.identities.get(name), registered)
            for name in self.names
        }
        rng = np.random.default_rng(seed)
        if vectors is None:
            vectors = rng.integers(-1000, 1000, (n, length))
        self.vectors = dict(zip(self.names, vectors, strict=True))
        self.length = len(vectors[0])
        self.contributors = {}
        self.lost = []
        self.on_request = lambda stage, name, request: request
        self.on_reply = lambda stage, name, reply: reply
        self.requests, self.replies, self.view = ByStage(), ByStage(), []
        self.refusals, self.asked_of = [], []
        self.number = -1

    def contribute(self, name):
        def answer(question, n_clients):
            self.asked_of.append((name, question, n_clients))
            if name in self.contributors:
                return self.contributors[name](question, n_clients)
            vector = self.vectors[name]
            return Contribution(0 * vector if question == NOTHING else vector, 1 << 40, ANCHOR)

        return answer

    def deliver(self, stage, name, request, run=RUN):
        """Let a client answer one request that goes over the wire."""
        client = self.clients[name]
        data = stage.request.encode(request, run=run, step=0)
        if stage.request.name not in client.stages:
            raise ProtocolError("no stage of this client")
        bounds = client.bounds
        decoded, _ = stage.request.decode(data, run=run, step=0, bounds=bounds)
        return client.answer(stage, run, decoded, self.contribute(name))

    def ask(self, stage, requests, bounds, read=None):
        found = {}
        for name, honest in requests.items():
            request = self.on_request(stage, name, honest)
            self.requests[self.number, stage, name] = request
            try:
                reply = self.on_reply(stage, name, self.deliver(stage, name, request))
                if reply is None:
                    continue
                self.replies[self.number, stage, name] = reply
                if (stage, name) in self.lost:
                    continue
                data = stage.reply.encode(reply, run=RUN, step=0)
                allowed = {**bounds, **stage.request.sizes(honest, {})}
                decoded = stage.reply.decode(data, run=RUN, step=0, bounds=allowed)[0]
                found[name] = decoded if read is None else read(name, decoded)
            except ProtocolError as error:
                self.refusals.append((stage, name, error))
                continue
            self.view.append((stage.name, name, data))
        return found

    def total(self, question=QUESTION, largest=1 << 20, number=None, ask=None):
        self.number = self.number + 1 if number is None else number
        asked = Question(
            RUN, self.number, question, self.length, lambda n: largest // n, lambda n: largest
        )
        return Masking(self.rules).total(ask or self.ask, self.names, asked)

    def sum_over(self, names):
        return np.sum([self.vectors[name] for name in names], axis=0)

    def stages(self):
        return stages_of(self.rules.active_server)


def is_exact(federation, total):
    return np.array_equal(total.steps, federation.sum_over(total.survivors))


def asks_nothing_of(names):
    """What a server sends that asks some clients another question than the others."""

    def on_request(stage, name, request):
        if stage is MASK and name in names:
            return {**request, "question": np.frombuffer(NOTHING, dtype=np.uint8)}
        return request

    return on_request


def claims_to_agree(f):
    """What a server does, or a client, that would have specs mixed."""

    def on_reply(stage, name, reply):
        if stage is ADVERTISE:
            agreed = np.frombuffer(digest(f.rules.agreement), dtype=np.uint8)
            return {**reply, "agreement": agreed}
        return reply

    return on_reply


def advertised(identity, number, run=RUN):
    """New keys, whose they are, and a signature for them."""
    keys = public_key(X25519PrivateKey.generate()) + public_key(X25519PrivateKey.generate())
    signature = identity.sign(advertised_text(run, number, keys))
    return tuple(np.frombuffer(x, dtype=np.uint8) for x in (keys, identity.public, signature))


def stranger(number):
    """Keys, and a signature by somebody unknown."""
    return advertised(Identity(), number)


def byte_uniformity(content):
    """Probability of bytes at least this uneven, were they uniform."""
    counts = np.bincount(np.frombuffer(content, dtype=np.uint8), minlength=256)
    expected = counts.sum() / 256
    return chi2.sf(np.square(counts - expected).sum() / expected, 255)
