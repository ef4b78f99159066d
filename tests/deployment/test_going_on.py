"""Runs whose clients, or whose server, were killed while sums were asked for, and that go on."""

import numpy as np
import pytest
from sklearn.base import clone

from secure_fedclust import FKM, PrivacySpec
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.messages import KEY_HOLDER, read_envelope
from secure_fedclust.privacy.ledger import Anchor
from secure_fedclust.protocols.checkpoint import run_in
from secure_fedclust.protocols.sums import with_quorum

from .world import (
    HOLDER,
    NAMES,
    NETWORKS,
    Parties,
    new_ledger,
    offered,
    participants,
    quietly,
    with_protection,
)

COLUMNS = ["f0", "f1", "f2", "f3"]
EXACT = PrivacySpec.none(reason="test", protection="masking", min_survivors=3)
SPEC = PrivacySpec(epsilon=20.0, delta=1e-5, ranges=[(0, 1)] * 4, public_size=60)
SUMS = ("masking/mask", "ckks/encrypt")


@pytest.fixture(scope="module")
def parties(tmp_path_factory):
    return Parties(tmp_path_factory.mktemp("parties"), NAMES)


def records():
    return {name: np.random.default_rng([5, i]).random((60, 4)) for i, name in enumerate(NAMES)}


class Happening(InProcessEngine):
    """Says of each exchange which it is, before it begins; what is raised ends the server."""

    def __init__(self, found, before):
        handlers = {name: found[name].handle for name in NAMES}
        super().__init__(handlers, others={KEY_HOLDER: found[HOLDER].handle})
        self.found, self.before, self.stages = found, before, []

    def exchange(self, requests):
        data = next(iter(requests.values()))
        if data.startswith(b"SFC1"):
            self.stages.append(read_envelope(data).schema.removesuffix("/request"))
            self.before(self)
        yield from super().exchange(requests)


def fit(parties, found, model, spec, before=lambda engine: None, folder=None):
    """Fit over participants; with a folder, go on with the run that is there."""
    model = clone(model).set_params(privacy=with_quorum(spec, len(NAMES)), random_state=0)
    engine = Happening(found, before)
    run = None if folder is None else run_in(folder)
    with quietly():
        named = {} if run is None else {"run": run}
        federation = offered(engine, parties, model, columns=COLUMNS, **named)
        model.fit(federation, checkpoint=folder)
    return model, engine


@pytest.mark.parametrize("lost", [1, 5], ids=["while the region is agreed on", "later"])
def test_a_client_killed_between_exact_sums_is_in_the_next_one(parties, tmp_path, lost):
    found = participants(parties, records(), EXACT, tmp_path)

    def before(engine):
        begun = engine.stages.count("masking/advertise")
        if begun == lost and engine.stages[-1] == "masking/share":
            found["bob"].resume()  # as a new process does

    model, _ = fit(parties, found, FKM(3, n_rounds=3), EXACT, before)
    survivors = [each.survivors for each in model.result_.sums]
    assert "bob" not in survivors.pop(lost - 1)
    assert all(set(each) == set(NAMES) for each in survivors)
    assert len(survivors) > 5


class Killed(Exception):
    """Of the server."""


@pytest.mark.parametrize("protection", ["masking", "ckks"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_server_killed_in_the_middle_of_a_sum_asks_for_it_again(
    parties, tmp_path, name, protection
):
    stages = whole(parties, tmp_path, name, protection)
    sums = [i for i, stage in enumerate(stages) if stage in SUMS]
    assert len(sums) > 1
    # Clients have answered, and nobody has opened what they have answered.
    for at in (sums[0] + 1, sums[-1] + 1):
        goes_on(parties, tmp_path / f"killed {at}", name, protection, at)


@pytest.mark.slow
@pytest.mark.parametrize("protection", ["none", "masking", "ckks"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_server_killed_before_any_exchange_goes_on(parties, tmp_path, name, protection):
    for at in range(len(whole(parties, tmp_path, name, protection))):
        goes_on(parties, tmp_path / f"killed {at}", name, protection, at)


def whole(parties, folder, name, protection):
    """The exchanges of a run that nobody disturbs."""
    pytest.importorskip("torch")
    spec = with_protection(SPEC, protection)
    found = participants(parties, records(), spec, folder / "whole")
    _, engine = fit(parties, found, NETWORKS[name], spec, folder=folder / "whole" / "kept")
    return engine.stages


def goes_on(parties, folder, name, protection, at):
    """Kill the server before an exchange, and go on with the same clients, who are still there."""
    spec = with_protection(SPEC, protection)
    found = participants(parties, records(), spec, folder)

    def before(engine):
        if len(engine.stages) == at + 1:
            raise Killed

    with pytest.raises(Killed):
        fit(parties, found, NETWORKS[name], spec, before, folder / "kept")
    model, _ = fit(parties, found, NETWORKS[name], spec, folder=folder / "kept")
    assert not any(each.absent or each.rejected for each in model.result_.history)
    for client in NAMES:
        ledger = found[client]._ledger
        ledger.verify([Anchor(*model.result_.anchors[client])])
        assert model.result_.anchors[client][0] == ledger.anchor().rows
        assert len({row.charge.run for row in ledger.rows()}) == 1


def swapped(found, folder, spec):
    """Give bob a ledger without any row, when the client does not look any more."""
    older = new_ledger(folder / "older.sqlite", spec)
    found["bob"]._party.releases.ledger = found["bob"]._ledger = older
    found["bob"]._party.releases.anchor = older.anchor()


@pytest.mark.parametrize("at", [1, 3], ids=["after the offer", "later"])
def test_a_ledger_that_loses_rows_during_a_run_is_noticed_by_the_server(parties, tmp_path, at):
    spec = with_protection(SPEC, "none")
    found = participants(parties, records(), spec, tmp_path)
    fit(parties, found, FKM(3, n_rounds=3), spec)

    def before(engine):
        if len(engine.stages) == at:
            swapped(found, tmp_path, spec)

    model, _ = fit(parties, found, FKM(3, n_rounds=3), spec, before)
    assert "it was exchanged for an older copy" in model.result_.history[at - 1].rejected["bob"]


@pytest.mark.parametrize("at", [1, -2], ids=["begun", "nearly over"])
def test_a_ledger_that_loses_rows_is_noticed_in_a_run_that_is_gone_on_with(parties, tmp_path, at):
    pytest.importorskip("torch")
    spec, model = with_protection(SPEC, "none"), NETWORKS["FedCRef"]
    found = participants(parties, records(), spec, tmp_path)
    fit(parties, found, FKM(3, n_rounds=3), spec)
    stages = whole(parties, tmp_path, "FedCRef", "none")
    at = at % len(stages)

    def killed(engine):
        if len(engine.stages) == at + 1:
            raise Killed

    with pytest.raises(Killed):
        fit(parties, found, model, spec, killed, tmp_path / "kept")

    def before(engine):
        if len(engine.stages) == 1:
            swapped(found, tmp_path, spec)

    again, _ = fit(parties, found, model, spec, before, tmp_path / "kept")
    said = [each.rejected["bob"] for each in again.result_.history if "bob" in each.rejected]
    assert "it was exchanged for an older copy" in said[0]
