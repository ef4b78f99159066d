"""DeepFeCA between server and clients: who may ask what, what leaves a client, what it costs."""

import dataclasses
import math
from unittest import mock

import numpy as np
import pytest

from secure_fedclust import BudgetExceeded, Ledger, ProtocolError
from secure_fedclust.algorithms.backbones import Backbone
from secure_fedclust.engines import Fault
from secure_fedclust.errors import SecureFedClustError
from secure_fedclust.messages import read_envelope
from secure_fedclust.privacy import dpsgd
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.secure_sum import PlainSummand
from secure_fedclust.protocols import deepfeca as protocol
from secure_fedclust.protocols import deepfeca_private as private
from secure_fedclust.protocols.averages import AVERAGE
from secure_fedclust.protocols.deepfeca import DeepFeCAClient
from secure_fedclust.protocols.deepfeca_private import (
    MOMENTS_OF,
    NOISY_TRAIN,
    SEE,
    UPDATE_OF,
    WHITEN,
    PrivateDeepFeCAClient,
    digest_of,
)
from secure_fedclust.protocols.seeding import MOMENTS
from secure_fedclust.protocols.synopsis import MICRO

from .neural_world import (
    ENCRYPTED,
    MASKED,
    NONE,
    SPEC,
    WHOLE,
    Rehearsal,
    asked,
    asked_for_a_sum,
    deepfeca,
    federation,
    outcome,
    overheard,
    private_client,
    quietly,
    records,
    silence,
    squared_mus,
    stage_of,
    values_of,
)

STAGES = ["moments", "centers", "train", "moments", "centers"]
OTHER_RECORDS = {
    "none": np.empty((0, 4)),
    "one": records(1),
    "many": records(300, seed=9),
    "all the same": np.full((40, 4), 0.5),
    "far outside": 1e9 * (records(30) - 0.5),
    "as far as numbers go": np.full((5, 4), 1e300),
    "tiny": np.full((5, 4), 5e-324),
}
SHAPE = Backbone(4, "dense", (4,), 3)
INITIAL = SHAPE.initial(np.random.default_rng(0))
NETWORK = {"weights": INITIAL, "kind": "dense", "hidden": np.array([4]), "n_out": 3}
TRAINING = {"epochs": 1, "batch_size": 16, "learning_rate": 0.01}


# Without protection.


def test_stages_come_in_the_order_of_the_paper():
    heard = overheard(deepfeca(), federation())
    assert [stage_of(request) for client, request, _ in heard if client == "ada"] == [
        f"deepfeca/{stage}" for stage in STAGES
    ]


@pytest.mark.parametrize("place", range(len(STAGES)))
@pytest.mark.parametrize("kind", ["drop", "delay", "corrupt", "truncate"])
def test_a_reply_that_is_lost_or_damaged_does_not_end_the_run(place, kind):
    model = deepfeca()
    quietly(model.fit, federation(), faults=[Fault("bob", place, kind)])
    assert np.isfinite(model.cluster_centers_).all()
    assert [len(labels) for labels in model.labels_] == [60, 60, 60]


@pytest.mark.parametrize("place", range(len(STAGES)))
def test_all_clients_absent_is_an_error_that_names_the_stage(place):
    faults = [Fault(name, place, "drop") for name in federation()]
    with pytest.raises(ProtocolError, match=f"deepfeca/{STAGES[place]}: no usable reply"):
        quietly(deepfeca().fit, federation(), faults=faults)


def test_training_that_diverges_sends_nothing_that_is_no_number(caplog):
    wild = {name: 1e30 * X for name, X in federation().items()}
    try:
        heard = overheard(deepfeca(learning_rate=10.0, local_epochs=20), wild)
    except SecureFedClustError:
        return
    for _, _, reply in heard:
        for value in values_of(DeepFeCAClient, reply).values():
            assert np.isfinite(value).all()


def whitened(kind, X, spec=SPEC, summand=None, **options):
    """A client that is ready to be asked for clusters."""
    client = private_client(kind, X, spec, summand=summand, **options)
    asked(client, SEE, 0, **NETWORK)
    asked(client, WHITEN, 1, mean=np.zeros(3), matrix=np.eye(3))
    return client


@pytest.mark.parametrize("wrong", ["centers", "head"])
def test_centres_and_heads_of_other_features_are_refused(wrong):
    fields = {"centers": np.zeros((2, 3)), "head": np.zeros(8), **TRAINING}
    fields |= {"centers": {"centers": np.zeros((2, 5))}, "head": {"head": np.zeros(9)}}[wrong]
    client = DeepFeCAClient(records(), NONE, np.random.default_rng(0))
    asked(client, protocol.MOMENTS, 0, **NETWORK)
    whiten = {"mean": np.zeros(3), "matrix": np.eye(3)}
    asked(client, protocol.CENTERS, 1, **whiten, n_clusters=2, n_init=1)
    with pytest.raises(ProtocolError, match=f"field '{wrong}'"):
        asked(client, protocol.TRAIN, 2, **fields)


def test_a_network_that_is_not_for_these_records_is_refused():
    client = DeepFeCAClient(records(), NONE, np.random.default_rng(0))
    for wrong in ({"weights": INITIAL[:-1]}, {"kind": "conv"}, {"hidden": np.array([5])}):
        with pytest.raises(ProtocolError, match=r"names no network|'weights' has"):
            asked(client, protocol.MOMENTS, 0, **NETWORK | wrong)


# With differential privacy: what leaves.


@pytest.fixture(scope="module")
def rehearsed():
    return Rehearsal(deepfeca(SPEC, n_rounds=2))


@pytest.fixture
def rehearsal(rehearsed, monkeypatch):
    return rehearsed.within(monkeypatch)


@pytest.mark.parametrize("name", OTHER_RECORDS)
def test_nothing_leaves_a_client_but_noisy_answers_whatever_its_records_are(rehearsal, name):
    client = rehearsal.again("bob", OTHER_RECORDS[name])
    for request, reply in rehearsal.requests("bob"):
        assert client.handle(request) == reply


@pytest.mark.parametrize("place", [0, 17, 60])
def test_one_record_more_changes_neither_features_nor_label_of_another(rehearsal, place):
    X = records(60, seed=1)
    more = np.insert(X, place, records(1, seed=77)[0] ** 2, axis=0)
    others = np.delete(np.arange(61), place)
    without = rehearsal.again("bob", X)
    expected = []
    for request, _ in rehearsal.requests("bob"):
        without.handle(request)
        expected.append(without.X.copy())
    having = rehearsal.again("bob", more)
    trained = 0
    for (request, _), before in zip(rehearsal.requests("bob"), expected, strict=True):
        having.handle(request)
        np.testing.assert_array_equal(having.X[others], before)
        if stage_of(request) == NOISY_TRAIN.name:
            trained += 1
            centers = values_of(PrivateDeepFeCAClient, request)["centers"]
            without.X = before
            np.testing.assert_array_equal(having._labels(centers)[others], without._labels(centers))
    assert trained == 2


CRAFTED = {
    "centres of other features": {"centers": np.zeros((6, 5))},
    "a head that is too long": {"head": np.zeros(99)},
    "one label": {"centers": np.zeros((1, 3)), "head": np.zeros(4)},
    "held without sums": {"hold": 1},
    "a tiny rate": {"rate": 1e-9},
    "many epochs": {"epochs": 100_000, "rate": 0.5},
    "wild steps": {"learning_rate": 10.0, "clip": 1e6},
    "tiny steps": {"learning_rate": 1e-9, "clip": 1e-6},
    "centres at the end of the world": {"centers": np.full((6, 3), 1e120)},
}


@pytest.mark.parametrize("name", CRAFTED)
def test_whether_a_crafted_request_is_answered_does_not_depend_on_records(rehearsal, name):
    before = rehearsal.until("bob", NOISY_TRAIN)
    honest = next(r for r, _ in rehearsal.requests("bob") if stage_of(r) == NOISY_TRAIN.name)
    fields, at = values_of(PrivateDeepFeCAClient, honest), read_envelope(honest)
    changed = {**fields, **CRAFTED[name]}
    if "centers" in CRAFTED[name] and "head" not in CRAFTED[name]:
        changed["head"] = np.zeros(6 * 4)
    seen = []
    for records_of in ("none", "one", "many"):
        client = rehearsal.again("bob", OTHER_RECORDS[records_of])
        for request in before:
            client.handle(request)
        request = NOISY_TRAIN.request.encode(changed, run=at.run, step=at.step)
        with mock.patch.object(dpsgd, "train", lambda *_, **__: None):
            found = outcome(lambda c=client, r=request: c.handle(r))
        seen.append((found if isinstance(found, str) else len(found), client.releases.anchor.rows))
    assert seen == [seen[0]] * 3


def test_a_network_that_is_held_leaves_only_in_a_sum():
    client = whitened(PrivateDeepFeCAClient, records(), MASKED, PlainSummand(3))
    asked(client, MICRO, 2, n_micro=6, n_rounds=1, share=0.1)
    train = {"centers": np.zeros((2, 3)), "head": np.zeros(8), **TRAINING, "rate": 1.0}
    rest = {"clip": 1.0, "weight": 0.5, "hold": 1, "share": 0.1}
    reply = asked(client, NOISY_TRAIN, 3, **train, **rest)
    assert len(values_of(PrivateDeepFeCAClient, reply)["weights"]) == 0
    asks = {"first": 0, "n_groups": 1, "n_numbers": SHAPE.n_parameters}
    with pytest.raises(ProtocolError, match="part of a sum only"):
        asked(client, AVERAGE, 4, **asks)
    vector = asked_for_a_sum(client, AVERAGE, 4, **asks)
    assert len(vector) == SHAPE.n_parameters + 1
    assert client.releases.ledger.rows("ada")[-1].charge.step == 3  # the sum costs nothing more


def test_features_that_are_no_numbers_count_as_zero():
    client = private_client(PrivateDeepFeCAClient, records())
    wild = np.full(SHAPE.n_parameters, 1e6, dtype=np.float32)
    big = Backbone(4, "dense", (2,) * 12, 3)
    network = {"weights": np.full(big.n_parameters, 1e6), "kind": "dense", "n_out": 3}
    asked(client, SEE, 0, **NETWORK | {"weights": wild})
    assert np.isfinite(client.X).all()
    client = private_client(PrivateDeepFeCAClient, records())
    asked(client, SEE, 0, **network, hidden=np.full(12, 2))
    assert np.isfinite(client.X).all()
    asked(client, MOMENTS, 1, share=0.1)


@pytest.mark.parametrize("size", [0.0, 1e-120, 1e-60, 1e60, 1e119])
def test_whitening_with_any_matrix_keeps_features_on_the_sphere(size):
    client = private_client(PrivateDeepFeCAClient, records())
    asked(client, SEE, 0, **NETWORK)
    asked(client, WHITEN, 1, mean=np.full(3, size), matrix=np.full((3, 3), size))
    np.testing.assert_allclose(np.linalg.norm(client.X, axis=1), math.sqrt(3), rtol=1e-9)


# The unit "client".


def updating(X, change=None, **fields):
    """What a client of which all is protected adds to the sum of updates, without noise."""
    client = whitened(PrivateDeepFeCAClient, X, WHOLE_OF_THREE, PlainSummand(3))
    if change is not None:
        client._change = lambda *_, **__: change
    given = {"centers": np.eye(3)[:2], "head": np.zeros(8), **TRAINING, "clip": 0.5, "share": 0.1}
    given["made_by"] = made_by(client)
    return asked_for_a_sum(client, UPDATE_OF, 2, **given | fields), client


def made_by(client):
    """The digest of what a client makes features by."""
    return digest_of(client.backbone, client.weights, client.mean, client.matrix)


def test_a_question_for_a_sum_must_name_the_network_that_the_client_has():
    """Or one client could be handed a network of its own, and the sum be about it alone."""
    for change in ("weights", "mean", "matrix"):
        client = whitened(PrivateDeepFeCAClient, records(), WHOLE_OF_THREE, PlainSummand(3))
        other = made_by(client)
        setattr(client, change, getattr(client, change) + 1.0)
        with pytest.raises(ProtocolError, match="another network"):
            asked_for_a_sum(client, MOMENTS_OF, 2, share=0.1, made_by=other)
    client = whitened(PrivateDeepFeCAClient, records(), WHOLE_OF_THREE, PlainSummand(3))
    with pytest.raises(ProtocolError, match="must name"):
        asked_for_a_sum(client, MOMENTS, 2, share=0.1)
    assert len(asked_for_a_sum(client, MOMENTS_OF, 3, share=0.1, made_by=made_by(client)))


def test_looking_at_features_is_not_without_end():
    client = private_client(PrivateDeepFeCAClient, records())
    wide = Backbone(4, "dense", (), 65)
    network = {"weights": np.zeros(wide.n_parameters), "kind": "dense", "n_out": 65}
    with pytest.raises(ProtocolError, match="65 features of 4 inputs"):
        asked(client, SEE, 0, **network, hidden=np.zeros(0, dtype=np.int64))
    client.looks = 1000
    with pytest.raises(ProtocolError, match="1000 looks a run"):
        asked(client, SEE, 1, **NETWORK)


WHOLE_OF_THREE = dataclasses.replace(WHOLE, min_survivors=3, public_size=None)


def test_a_client_moves_the_sum_of_updates_by_no_more_than_the_clip(monkeypatch):
    silence(monkeypatch)
    size = SHAPE.n_parameters
    (short, client) = updating(records(), np.full(size, 1e-3))
    row = client.releases.ledger.rows("ada")[-1].charge
    assert row.formula == "message/add_remove"
    for change in (np.full(size, 1e9), np.eye(size)[0] * 1e30, -np.full(size, 7.0)):
        vector, _ = updating(records(), change)
        assert math.sqrt(sum(int(v) ** 2 for v in vector)) <= row.sensitivity
    assert math.sqrt(sum(int(v) ** 2 for v in vector)) >= 0.99 * row.sensitivity
    assert 0 < np.abs(short).max() < np.abs(vector).max()


@pytest.mark.parametrize("fields", [{"centers": np.zeros((2, 5))}, {"head": np.zeros(99)}])
def test_a_crafted_question_does_not_tell_whether_there_are_records(fields):
    seen = [outcome(lambda X=X: len(updating(X, **fields)[0])) for X in OTHER_RECORDS.values()]
    assert set(seen) == {"ProtocolError"}


@pytest.mark.parametrize("name", OTHER_RECORDS)
def test_an_update_is_given_whatever_the_records_are(name, monkeypatch):
    silence(monkeypatch)
    vector, _ = updating(OTHER_RECORDS[name], learning_rate=10.0, epochs=20)
    assert len(vector) == SHAPE.n_parameters
    if name == "none":
        assert not vector.any()


def test_single_records_are_not_protected_by_clipping_a_whole_update():
    spec = dataclasses.replace(MASKED, min_survivors=3)
    client = whitened(PrivateDeepFeCAClient, records(), spec, PlainSummand(3))
    given = {"centers": np.eye(3)[:2], "head": np.zeros(8), **TRAINING, "clip": 0.5, "share": 0.1}
    with pytest.raises(ProtocolError, match="unit='client' only"):
        asked_for_a_sum(client, UPDATE_OF, 2, **given, made_by=made_by(client))


@pytest.mark.parametrize("stage", [MICRO, NOISY_TRAIN, MOMENTS, UPDATE_OF], ids=lambda s: s.name)
def test_a_client_of_which_all_is_protected_answers_in_sums_only(stage):
    client = whitened(PrivateDeepFeCAClient, records(), WHOLE_OF_THREE, PlainSummand(3))
    train = {"centers": np.zeros((2, 3)), "head": np.zeros(8), **TRAINING, "clip": 1.0}
    more = {"rate": 1.0, "weight": 0.5, "hold": 1}
    fields = {
        MICRO.name: {"n_micro": 6, "n_rounds": 1},
        NOISY_TRAIN.name: train | more,
        MOMENTS.name: {},
        UPDATE_OF.name: train | {"made_by": made_by(client)},
    }[stage.name]
    if stage is NOISY_TRAIN:
        client._stage = MICRO
    with pytest.raises(ProtocolError):
        asked(client, stage, 2, **fields, share=0.1)
    assert not client.releases.ledger.rows("ada")


# What it costs.


@pytest.mark.parametrize(
    "spec", [SPEC, MASKED, ENCRYPTED, WHOLE], ids=["local", "masking", "ckks", "client"]
)
def test_every_release_is_in_the_ledger_and_all_are_within_the_budget(spec, monkeypatch):
    silence(monkeypatch)  # what is charged is the same, and three clients would drown in it
    ledger = Ledger.create(None, epsilon=20.0, delta=1e-5, unit=spec.unit)
    model = deepfeca(spec, ledger=ledger, sampler="fast")
    heard = overheard(model, federation(200))
    limit = Limit.of(20.0, 1e-5)
    for client in federation():
        rows = [row.charge for row in ledger.rows(client)]
        assert 0.99 * limit.mu**2 <= squared_mus(model, client) <= limit.mu**2 * (1 + 1e-9)
        local = [r for who, r, _ in heard if who == client and stage_of(r) != SEE.name]
        local = [r for r in local if stage_of(r) not in (WHITEN.name,) and "/" in stage_of(r)]
        for request in local:
            if stage_of(request).startswith(("masking", "ckks")):
                continue
            at = read_envelope(request)
            assert [row for row in rows if (row.run, row.step) == (at.run, at.step)]
        summed = [row for row in rows if row.message.endswith("in a sum")]
        assert bool(summed) == (spec.protection != "none")
        assert (len(summed) == len(rows)) == (spec.unit == "client")
    whole = {row.charge.formula for row in ledger.rows("ada")} == {"message/add_remove"}
    assert whole == (spec.unit == "client")


def test_without_budget_nothing_is_computed_and_nothing_is_sent(rehearsal):
    client = rehearsal.again("bob", records())
    for request in rehearsal.until("bob", NOISY_TRAIN):
        client.handle(request)
    honest = next(r for r, _ in rehearsal.requests("bob") if stage_of(r) == NOISY_TRAIN.name)
    at, fields = read_envelope(honest), values_of(PrivateDeepFeCAClient, honest)
    rows = client.releases.ledger.anchor().rows
    with mock.patch.object(dpsgd, "train", side_effect=AssertionError("trained")):
        with pytest.raises(BudgetExceeded, match="spent"):
            client.handle(
                NOISY_TRAIN.request.encode({**fields, "share": 1.0}, run=at.run, step=at.step)
            )
    assert client.releases.ledger.anchor().rows == rows


@pytest.mark.parametrize("n_rounds", [0, 1, 2, 6, 50])
def test_shares_of_the_budget_add_up_to_one_and_leave_room_for_one_step_more(n_rounds):
    def spent(s):
        return n_rounds * (s.moments + s.clusters + s.training) + s.last_moments + s.last_clusters

    assert spent(private.Shares.of(n_rounds)) == pytest.approx(1)
    spare = private.Shares.of(n_rounds, spare=True)
    assert spent(spare) + max(dataclasses.astuple(spare)) <= 1 + 1e-12


def test_a_reply_that_is_lost_does_not_make_the_average_of_what_was_held_wrong(monkeypatch):
    silence(monkeypatch)
    names = ("ada", "bob", "cy", "dee")
    whole = deepfeca(MASKED)
    quietly(whole.fit, federation(names=names))
    at = [x.stage for x in whole.result_.history].index(NOISY_TRAIN.name)
    lost = deepfeca(MASKED)
    quietly(lost.fit, federation(names=names), faults=[Fault("bob", at, "drop")])
    np.testing.assert_allclose(
        lost.result_.networks["weights"], whole.result_.networks["weights"], atol=0.02
    )
