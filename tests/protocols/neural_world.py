"""Small federations for the systems that train networks, and ways to look at what they send."""

import dataclasses
import functools
import math
import warnings
from unittest import mock

import numpy as np
import pytest

import secure_fedclust.run
from secure_fedclust import (
    DeepFeCA,
    FedCRef,
    FederationWarning,
    Ledger,
    PrivacySpec,
    PrivacyWarning,
)
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.errors import SecureFedClustError
from secure_fedclust.messages import read_envelope
from secure_fedclust.privacy import bulk_noise, dpsgd, mechanism, release
from secure_fedclust.privacy.release import Releases
from secure_fedclust.privacy.secure_sum import PLAIN
from secure_fedclust.protocols.client import PrivateClient

CORNERS = np.array([[0.1, 0.1, 0.9, 0.9], [0.9, 0.9, 0.1, 0.1], [0.9, 0.1, 0.9, 0.1]])
NONE = PrivacySpec.none(reason="test")
SPEC = PrivacySpec(epsilon=20.0, delta=1e-5, ranges=[(0, 1)] * 4, public_size=60)
MASKED = dataclasses.replace(SPEC, protection="masking")
ENCRYPTED = dataclasses.replace(SPEC, protection="ckks")
WHOLE = dataclasses.replace(MASKED, unit="client")


def records(n=60, seed=0, which=(0, 1, 2)):
    rng = np.random.default_rng([7, seed])
    middle = CORNERS[np.array(which)[np.arange(n) % len(which)]]
    return np.clip(middle + 0.03 * rng.normal(size=(n, 4)), 0, 1)


def federation(n=60, names=("ada", "bob", "cy")):
    return {name: records(n, seed) for seed, name in enumerate(names)}


def fedcref(privacy=NONE, **changed):
    easy = {"start_epochs": 60, "learning_rate": 0.01, "local_epochs": 5, "theta": 1.5}
    quick = {"start_epochs": 1, "local_epochs": 1, "theta": 1e6, "alpha": 0.0, "batch_size": 64}
    common = {"hidden": (3, 2), "n_rounds": 2, "batch_size": 16, "max_iter": 1, "privacy": privacy}
    given = common | (quick if privacy.is_private else easy) | changed
    return FedCRef(**{"n_local_clusters": 3, "sampler": _sampler(given), **given})


def deepfeca(privacy=NONE, **changed):
    given = {"hidden": (4,), "n_features_out": 3, "n_init": 1, "privacy": privacy, **changed}
    if privacy.is_private:
        given = {"local_epochs": 1, "batch_size": 64} | given
    return DeepFeCA(**{"n_clusters": 3, "n_rounds": 1, "sampler": _sampler(given), **given})


def _sampler(given):
    """Fast noise is not charged to files."""
    in_memory = given.get("ledger") is None and "sampler" not in given
    return "fast" if given["privacy"].is_private and in_memory else given.get("sampler", "secure")


def quietly(call, *given, **options):
    """Without warnings of poor results, of which tests are too small to be without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.simplefilter("ignore", FederationWarning)
        return call(*given, **options)


class Listener(InProcessEngine):
    """Keeps who was asked what, and what came back."""

    heard = None

    def exchange(self, requests):
        for client, reply in super().exchange(requests):
            self.heard.append((client, requests[client], reply))
            yield client, reply


def overheard(model, clients, **options):
    """Fit, and give all requests and replies."""
    heard = []
    listener = type("Listening", (Listener,), {"heard": heard})
    with mock.patch.object(secure_fedclust.run, "InProcessEngine", listener):
        quietly(model.fit, clients, **options)
    return heard


def stage_of(data):
    return read_envelope(data).schema.removesuffix("/request").removesuffix("/reply")


def values_of(kind, data):
    """The fields of a request or reply to a client class."""
    envelope = read_envelope(data)
    stage = kind._stages[envelope.schema.rsplit("/", 1)[0] + "/request"][0]
    schema = stage.request if envelope.schema.endswith("/request") else stage.reply
    return schema.decode(data, run=envelope.run, step=envelope.step, bounds={})[0]


def silence(monkeypatch):
    """No noise, and every record in every step."""
    monkeypatch.setattr(mechanism, "fast_noise", lambda sigma, size: np.zeros(size, np.int64))
    monkeypatch.setattr(bulk_noise._Quick, "noise", lambda self, size: np.zeros(size, np.int64))
    monkeypatch.setattr(bulk_noise._Quick, "choose", lambda self, n, rate: np.arange(n))


def private_client(kind, X, spec=SPEC, *, seed=0, summand=None, epsilon=100.0):
    ledger = Ledger.create(
        None, epsilon=epsilon, delta=1e-5, unit=spec.unit, adjacency=spec.adjacency
    )
    releases = Releases("ada", spec, ledger, "fast")
    return kind(X, spec, np.random.default_rng(seed), releases, summand)


def asked(client, stage, step, **fields):
    return client.handle(stage.request.encode(fields, run="run", step=step))


def asked_for_a_sum(client, stage, step, **fields):
    """What a client with a plain summand adds to a sum, as whole steps."""
    question = stage.request.encode(fields, run="run", step=step)
    request = {"number": step, "question": np.frombuffer(question, dtype=np.uint8)}
    reply = client.handle(PLAIN.request.encode(request, run="run", step=step))
    return PLAIN.reply.decode(reply, run="run", step=step, bounds={})[0]["vector"]


def outcome(call):
    """What others can see of a request: the bytes that come back, or that none do."""
    try:
        return call()
    except SecureFedClustError as error:
        return type(error).__name__


class Rehearsal:
    """A run whose requests can be put again to clients with other records.

    Noisy answers and trained weights are then those of the rehearsal, whatever the records are:
    what a client sends may not differ by a bit, and neither may where it puts a record.
    """

    def __init__(self, model, spec=SPEC):
        self._kind, self._spec = type(model)._private_class, spec
        self._answers, self._weights = {}, {}
        self._noise, self._train = release.noise, dpsgd.train
        clients = {name: self._client(i, X) for i, (name, X) in enumerate(federation().items())}
        with pytest.MonkeyPatch.context() as patched:
            silence(patched)
            patched.setattr(PrivateClient, "_anchor", _plain_anchor)
            self.heard = []
            handlers = {
                name: functools.partial(self._listen, name, client)
                for name, client in clients.items()
            }
            patched.setattr(release, "noise", self._remember_noise)
            patched.setattr(dpsgd, "train", self._remember_weights)
            quietly(model.fit, InProcessEngine(handlers))
        self.names = list(clients)

    def within(self, monkeypatch):
        """For one test."""
        self._patch = monkeypatch
        monkeypatch.setattr(PrivateClient, "_anchor", _plain_anchor)
        return self

    def _client(self, place, X):
        return private_client(self._kind, X, self._spec, seed=place)

    def _listen(self, name, client, request):
        self._now = self._answers.setdefault(name, []), self._weights.setdefault(name, [])
        reply = client.handle(request)
        self.heard.append((name, request, reply))
        return reply

    def _remember_noise(self, exact, sigma, sampler):
        noisy = self._noise(exact, sigma, sampler)
        self._now[0].append(noisy)
        return noisy

    def _remember_weights(self, module, *given, **options):
        self._train(module, *given, **options)
        self._now[1].append([p.detach().clone() for p in module.parameters()])

    def requests(self, name):
        return [(request, reply) for who, request, reply in self.heard if who == name]

    def until(self, name, stage):
        """Requests before the first of a stage."""
        found = []
        for request, _ in self.requests(name):
            if stage_of(request) == stage.name:
                return found
            found.append(request)
        raise AssertionError(f"{stage.name} was not asked")

    def again(self, name, X):
        """A client in the place of another, with other records and the same answers."""
        client = self._client(self.names.index(name), X)
        noises, weights = iter(self._answers[name]), iter(self._weights[name])

        def train(module, *given, **options):
            for p, kept in zip(module.parameters(), next(weights), strict=True):
                p.data.copy_(kept)

        self._patch.setattr(release, "noise", lambda *_: next(noises))
        self._patch.setattr(dpsgd, "train", train)
        return client


def _plain_anchor(self):
    return {"ledger_rows": self.releases.anchor.rows, "ledger_head": "0" * 64}


def squared_mus(model, client):
    return math.fsum(row.charge.mu**2 for row in model.ledger_.rows(client))
