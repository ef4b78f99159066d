"""Federations over Flower in one process: TLS, node authentication and all, nodes in threads."""

import contextlib
import dataclasses
import secrets
import threading
import time
import warnings
from pathlib import Path

import numpy as np
from sklearn.base import clone

from secure_fedclust import DeepFeCA, FedCRef, FederationWarning, Ledger, PrivacyWarning
from secure_fedclust.deployment.coordinator import end, enrol
from secure_fedclust.deployment.keys import SERVER, Keys
from secure_fedclust.deployment.participant import ClientParticipant, KeyHolderParticipant
from secure_fedclust.deployment.policy import PROTECTIONS, Policy
from secure_fedclust.errors import ProtocolError
from secure_fedclust.messages import KEY_HOLDER
from secure_fedclust.privacy import bulk_noise, mechanism
from secure_fedclust.protocols.sums import with_quorum
from secure_fedclust.records import Clients

NAMES = ("ada", "bob", "cy", "dee")
HOLDER = "notary"
SYSTEMS = ("FKM", "KFed", "FeCA", "FedGEM", "GOLD", "FedCRef", "DeepFeCA")
NETWORKS = {
    "FedCRef": FedCRef(
        3, hidden=(3, 2), n_rounds=2, max_iter=1, start_epochs=1, local_epochs=1, batch_size=64,
        theta=1e6, alpha=0.0,
    ),
    "DeepFeCA": DeepFeCA(
        3, hidden=(4,), n_features_out=3, n_init=1, n_rounds=1, local_epochs=1, batch_size=64
    ),
}  # fmt: skip
"""Small ones, for four features."""

LENIENT = Policy(
    max_epsilon=100.0,
    max_delta=1e-4,
    protocols=SYSTEMS,
    protections=PROTECTIONS,
    min_cohort=1,
    max_cohort=1000,
    max_records_per_person=100,
    min_colluders=0,
    without_privacy=True,
)


class Parties:
    """Keys of a server, of clients and of a key holder, all of whom know each other."""

    def __init__(self, folder: Path, names=NAMES):
        self.folder = folder
        self.server = Keys.create_server(folder / SERVER, ["127.0.0.1", "localhost"])
        self.keys = {name: Keys.create(folder / name, name) for name in (*names, HOLDER)}
        cards = [
            keys.folder / f"{keys.card.name}.card" for keys in (self.server, *self.keys.values())
        ]
        for keys in (self.server, *self.keys.values()):
            for card in cards:
                if card.stem != keys.card.name:
                    keys.register(card)

    @property
    def certificate(self):
        return self.server.folder / "ca.pem"


class World:
    """A SuperLink and connected nodes, whose handlers a test sets."""

    def __init__(self, folder, names=NAMES):
        from secure_fedclust.engines.flower_link import SuperLink
        from secure_fedclust.engines.flower_node import FlowerNode

        self.names = tuple(names)
        self.parties = Parties(folder, names)
        place = self.parties.server.folder
        self.link = SuperLink(
            "127.0.0.1", 0, certificate=place / "server.pem", key=place / "server.key"
        )
        self.handlers = {}
        self.ids = {
            name: self.link.register(keys.card.node_key())
            for name, keys in self.parties.keys.items()
        }
        self.link.__enter__()
        self.address = f"127.0.0.1:{self.link.port}"
        self.nodes = {
            name: FlowerNode(self.address, keys.node_key, self.parties.certificate)
            for name, keys in self.parties.keys.items()
        }
        self.threads = [
            threading.Thread(
                target=node.serve, args=(self._handler(name), lambda: None), daemon=True
            )
            for name, node in self.nodes.items()
        ]
        for thread in self.threads:
            thread.start()
        self.grid = self.link.grid()
        until = time.monotonic() + 30
        while set(self.grid.get_node_ids()) < set(self.ids.values()):
            assert time.monotonic() < until, "nodes did not connect"
            time.sleep(0.02)

    def _handler(self, name):
        def handle(data):
            if name not in self.handlers:
                raise ProtocolError("nobody is here")
            return self.handlers[name](data)

        return handle

    def engine(self, names=None, **options):
        from secure_fedclust.engines.flower import FlowerEngine

        names = self.names if names is None else names
        return FlowerEngine(
            self.grid,
            {name: self.ids[name] for name in names},
            others={KEY_HOLDER: self.ids[HOLDER]},
            **{"timeout": 30.0, "poll": 0.02, **options},
        )

    def close(self):
        for node in self.nodes.values():
            node.stop()
        for thread in self.threads:
            thread.join(10)
        self.link.__exit__()


def participants(parties, clients, spec, state, *, policy=LENIENT, ledgers=None, out=None):
    """An end for each client, and one for the key holder."""
    state = Path(state)
    found = {}
    for name, X in clients.items():
        place = state / name
        ledger = None
        if spec.is_private:
            ledger = (ledgers or {}).get(name) or new_ledger(place / "ledger.sqlite", spec)
        columns = [f"f{i}" for i in range(np.shape(X)[1])]
        found[name] = ClientParticipant(
            parties.keys[name],
            lambda name=name: policy[name] if isinstance(policy, dict) else policy,
            place / "state",
            records=Clients({name: X}, columns),
            region=lambda spec, columns: None,
            ledger=ledger,
            key_holder=HOLDER,
            out=None if out is None else Path(out) / name,
        )
    found[HOLDER] = KeyHolderParticipant(parties.keys[HOLDER], lambda: LENIENT, state / HOLDER)
    return found


def new_ledger(path, spec, epsilon=100.0):
    path.parent.mkdir(parents=True, exist_ok=True)
    return Ledger.create(
        path, epsilon=epsilon, delta=1e-4, unit=spec.unit, adjacency=spec.adjacency
    )


def offered(engine, parties, model, **options):
    """A federation of those that take part."""
    names = list(engine.clients)
    return enrol(
        engine,
        model,
        **{
            "run": secrets.token_hex(8),
            "key_holder": HOLDER,
            "identity": parties.server.identity,
            "identities": {name: parties.keys[name].card.identity for name in names},
            **options,
        },
    )


def fit_over(world, model, clients, spec, state, *, policy=LENIENT, out=None, **options):
    """Fit over Flower, and give the model and the federation."""
    found = participants(world.parties, clients, spec, state, policy=policy, out=out)
    world.handlers = {name: each.handle for name, each in found.items()}
    model = clone(model).set_params(privacy=spec, random_state=0)
    with quietly():
        width = np.shape(next(iter(clients.values())))[1]
        options = {"columns": [f"f{i}" for i in range(width)], **options}
        federation = offered(world.engine(list(clients)), world.parties, model, **options)
        model.fit(federation)
        end(federation, model)
    return model, federation


def fit_here(model, clients, spec):
    """The same in this process."""
    model = clone(model).set_params(privacy=with_quorum(spec, len(clients)), random_state=0)
    with quietly():
        return model.fit(clients)


@contextlib.contextmanager
def quietly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.simplefilter("ignore", FederationWarning)
        yield


def silence(monkeypatch):
    """No noise, and every record in every step of training."""
    monkeypatch.setattr(mechanism, "secure_noise", lambda sigma, size: np.zeros(size, np.int64))
    monkeypatch.setattr(bulk_noise.Secret, "noise", lambda self, size: np.zeros(size, np.int64))
    monkeypatch.setattr(bulk_noise.Secret, "choose", lambda self, n, rate: np.arange(n))


def with_protection(spec, protection, **changed):
    return dataclasses.replace(spec, protection=protection, **changed)
