"""FedCRef between server and clients: who may ask what, what leaves a client, what it costs."""

import math
import warnings
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest

import secure_fedclust.run
from secure_fedclust import BudgetExceeded, FederationWarning, Ledger, ProtocolError
from secure_fedclust.engines import Fault, InProcessEngine
from secure_fedclust.errors import SecureFedClustError
from secure_fedclust.messages import Schema, read_envelope
from secure_fedclust.privacy import dpsgd
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.secure_sum import PlainSummand
from secure_fedclust.protocols import fedcref as protocol
from secure_fedclust.protocols import fedcref_client as noisy
from secure_fedclust.protocols import fedcref_private as private
from secure_fedclust.protocols.averages import AVERAGE
from secure_fedclust.protocols.fedcref import FedCRefClient
from secure_fedclust.protocols.fedcref_client import (
    MAX_LOCAL,
    NOISY_GROUP,
    NOISY_LOCAL,
    NOISY_MEANS,
    NOISY_REFINE,
    NOISY_SCORES,
    PrivateFedCRefClient,
)

from .neural_world import (
    ENCRYPTED,
    MASKED,
    NONE,
    SPEC,
    Rehearsal,
    asked,
    asked_for_a_sum,
    fedcref,
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

FIRST = ["start", "local", "scores", "group", "group", "refine"]
MOST_EXCHANGES = 11
RELEASES = [NOISY_LOCAL, NOISY_SCORES, NOISY_GROUP, NOISY_REFINE, NOISY_MEANS]
OTHER_RECORDS = {
    "none": np.empty((0, 4)),
    "one": records(1),
    "two of one kind": np.tile(records(1), (2, 1)),
    "many": records(300, seed=9),
    "all the same": np.full((40, 4), 0.5),
    "far outside": 1e9 * (records(30) - 0.5),
    "as far as numbers go": np.full((5, 4), 1e300),
    "tiny": np.full((5, 4), 5e-324),
}


# Without protection.


def test_stages_come_in_the_order_of_the_paper():
    heard = overheard(fedcref(), federation())
    stages = [stage_of(request) for client, request, _ in heard if client == "ada"]
    assert stages[: len(FIRST)] == [f"fedcref/{stage}" for stage in FIRST]
    assert stages[-1] == "fedcref/means"
    assert len(stages) <= MOST_EXCHANGES


@pytest.mark.parametrize("place", range(MOST_EXCHANGES))
@pytest.mark.parametrize("kind", ["drop", "delay", "corrupt"])
def test_a_reply_that_is_lost_or_damaged_does_not_end_the_run(place, kind):
    model = fedcref(max_iter=2, start_epochs=2, theta=20.0)
    quietly(model.fit, federation(30), faults=[Fault("bob", place, kind)])
    assert np.isfinite(model.cluster_centers_).all()
    assert [len(labels) for labels in model.labels_] == [30, 30, 30]
    assert "bob" in {name for x in model.result_.history for name in (*x.absent, *x.rejected)}


@pytest.mark.parametrize("since", range(1, MOST_EXCHANGES))
@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_a_client_that_dies_does_not_end_the_run_of_the_others(since, tau):
    model = fedcref(max_iter=2, start_epochs=2, theta=20.0, tau=tau)
    faults = [Fault("bob", exchange, "drop") for exchange in range(since, 40)]
    quietly(model.fit, federation(30), faults=faults)
    assert model.n_clusters_ >= 1
    assert "ada" in model.result_.association["clusters"][0]


def test_a_client_whose_model_was_lost_is_asked_for_it_again():
    model = fedcref(max_iter=2, start_epochs=5, theta=20.0, tau=1.0)
    with mock.patch.object(protocol.fedcref, "agreement", lambda old, new: 0.5):
        quietly(model.fit, federation(30), faults=[Fault("bob", 1, "drop")])
    assert "models of bob" in model.result_.networks


@pytest.mark.parametrize("place", range(len(FIRST)), ids=range(len(FIRST)))
def test_all_clients_absent_is_an_error_that_names_the_stage(place):
    faults = [Fault(name, place, "drop") for name in federation()]
    with pytest.raises(ProtocolError, match=f"fedcref/{FIRST[place]}: no usable reply"):
        quietly(fedcref(start_epochs=5, theta=20.0).fit, federation(30), faults=faults)


def lying(stage, change):
    """An engine in which one client changes what it says in one stage."""

    def lie(honest, data):
        reply = honest(data)
        envelope = read_envelope(data)
        if envelope.schema != stage.request.name:
            return reply
        values = change(values_of(FedCRefClient, reply))
        # The schema is what the receiving end has to check.
        fields = {name: _unchecked(kind) for name, kind in stage.reply.fields.items()}
        loose = Schema(stage.reply.name, fields)
        return loose.encode(values, run=envelope.run, step=envelope.step)

    class Lying(InProcessEngine):
        def __init__(self, handlers, **options):
            super().__init__({**handlers, "cy": partial(lie, handlers["cy"])}, **options)

    return mock.patch.object(secure_fedclust.run, "InProcessEngine", Lying)


def _unchecked(kind):
    class Loose(type(kind)):
        def _check(self, name, array):
            pass

        def pack(self, name, value):
            return value if isinstance(value, float | int) else super().pack(name, value)

    return Loose(**vars(kind))


LIES = {
    "models that are not numbers": (protocol.LOCAL, "models", lambda m: m * np.nan),
    "models that are infinite": (protocol.LOCAL, "models", lambda m: m + np.inf),
    "models that are huge": (protocol.LOCAL, "models", lambda m: m + 1e7),
    "models of another network": (protocol.LOCAL, "models", lambda m: m[:, :-1]),
    "fewer models than clusters": (protocol.LOCAL, "models", lambda m: m[:-1]),
    "shares above one": (protocol.SCORES, "shares", lambda s: s + 1.5),
    "shares below zero": (protocol.SCORES, "shares", lambda s: s - 1.5),
    "shares of fewer models": (protocol.SCORES, "shares", lambda s: s[:, :-1]),
    "a group's models that are none": (protocol.GROUP, "models", lambda m: m * np.nan),
    "a group's models of another size": (protocol.GROUP, "models", lambda m: m[:, 1:]),
    "models that were not offered": (protocol.REFINE, "chosen", lambda c: c + 1000),
    "models before the first": (protocol.REFINE, "chosen", lambda c: c * 0 - 1),
    "negative counts": (protocol.REFINE, "counts", lambda c: -1 - c),
    "agreement beyond all": (protocol.REFINE, "agreement", lambda a: 1.5),
    "sums of other groups": (protocol.MEANS, "sums", lambda s: np.vstack([s, s])),
    "sums that are not numbers": (protocol.MEANS, "sums", lambda s: s * np.nan),
    "more clusters than asked for": (protocol.START, "counts", lambda c: np.ones(9, np.int64)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_reply_that_cannot_be_is_set_aside_with_a_warning(lie):
    stage, field, change = LIES[lie]
    model = fedcref(start_epochs=5, theta=20.0)
    with lying(stage, lambda values: values | {field: change(values[field])}):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model.fit(federation(30))
    said = [str(each.message) for each in found if each.category is FederationWarning]
    assert any(text.startswith(f"cy: reply to {stage.name} set aside") for text in said)
    assert np.isfinite(model.cluster_centers_).all()


WILD = {
    "huge models": (protocol.LOCAL, "models", lambda m: np.full_like(m, 1e6)),
    "huge models of a group": (protocol.GROUP, "models", lambda m: np.full_like(m, -1e6)),
    "all shares": (protocol.SCORES, "shares", np.ones_like),
    "one model many times": (protocol.REFINE, "chosen", np.zeros_like),
    "no records": (protocol.REFINE, "counts", np.zeros_like),
    "a great many records": (protocol.START, "counts", lambda c: np.full_like(c, 2**40)),
    "sums without records": (protocol.MEANS, "counts", np.zeros_like),
    "huge sums": (protocol.MEANS, "sums", lambda s: np.full_like(s, 1e100)),
}


@pytest.mark.parametrize("lie", WILD)
def test_a_wild_reply_within_the_schema_makes_nothing_infinite(lie):
    stage, field, change = WILD[lie]
    model = fedcref(start_epochs=5, theta=20.0, max_iter=2)
    with lying(stage, lambda values: values | {field: change(values[field])}):
        try:
            quietly(model.fit, federation(30))
        except SecureFedClustError:
            return  # a poisoned group has no model
    assert np.isfinite(model.cluster_centers_).all()


@pytest.mark.parametrize("rate", [1e3, 9.9])
def test_training_that_diverges_sends_nothing_that_is_no_number(rate, caplog):
    model = fedcref(learning_rate=min(rate, 10.0), start_epochs=40, batch_size=4)
    clients = federation(30) if rate > 10 else {n: 1e8 * X for n, X in federation(30).items()}
    try:
        heard = overheard(model, clients)
    except SecureFedClustError as error:
        assert "fedcref/local" in str(error)
        assert "diverged" in caplog.text or "1e+06" in caplog.text
        return
    for _, _, reply in heard:
        for value in values_of(FedCRefClient, reply).values():
            assert np.isfinite(value).all()


def test_the_server_may_not_ask_for_clusters_that_a_client_does_not_have():
    client = FedCRefClient(records(), NONE, np.random.default_rng(0))
    asked(client, protocol.START, 0, n_clusters=2, hidden=np.array([2]))
    training = {"epochs": 1, "batch_size": 8, "learning_rate": 0.01}
    n = client.shape.n_parameters
    asked(client, protocol.LOCAL, 1, initial=np.zeros(n), **training)
    both = np.zeros((2, n))
    asked(client, protocol.SCORES, 2, models=both, theta=1.0, normalisation="relative")
    with pytest.raises(ProtocolError, match="'clusters'"):
        asked(client, protocol.GROUP, 3, clusters=[0, 2], models=both, **training)
    with pytest.raises(ProtocolError, match="weights, this network has"):
        asked(client, protocol.GROUP, 3, clusters=[0], models=np.zeros((1, n + 1)), **training)
    with pytest.raises(ProtocolError, match="may not be asked after"):
        asked(client, protocol.START, 3, n_clusters=2, hidden=np.array([2]))


def test_a_client_makes_no_room_for_more_clusters_than_there_may_be():
    client = private_client(PrivateFedCRefClient, records(), SPEC)
    n, d = MAX_LOCAL + 1, records().shape[1]
    with pytest.raises(ProtocolError, match=f"'sizes' has {n} clusters, at most {MAX_LOCAL}"):
        client.begin(centers=np.zeros((n, d)), sizes=np.zeros(n), hidden=np.array([2]))


# With differential privacy: what leaves.


SEEING = {
    "few features": {},
    "many": {"DIRECTIONS": 3},
    "very many": {"DIRECTIONS": 3, "MOST_SEEN": 3},
}


@pytest.fixture(params=SEEING)
def seen(request, monkeypatch):
    """Records are clustered as they are, or as seen from fewer directions than features."""
    for name, value in SEEING[request.param].items():
        monkeypatch.setattr(private, name, value)
    return request.param


@pytest.fixture(scope="module", params=SEEING)
def rehearsed(request):
    with mock.patch.dict(vars(private), SEEING[request.param]):
        found = Rehearsal(fedcref(SPEC, max_iter=2))
    found.seen = request.param
    return found


@pytest.fixture
def rehearsal(rehearsed, monkeypatch):
    return rehearsed.within(monkeypatch)


def test_the_rehearsal_has_all_stages(rehearsal):
    stages = [stage_of(request) for name, request, _ in rehearsal.heard if name == "bob"]
    assert {stage.name for stage in RELEASES} <= set(stages)
    looking = [noisy.PROJECT.name, noisy.MOMENTS.name, noisy.PROJECT.name]
    assert stages[: stages.index("synopsis/micro")] == looking * (rehearsal.seen != "few features")


@pytest.mark.parametrize("name", OTHER_RECORDS)
def test_nothing_leaves_a_client_but_noisy_answers_whatever_its_records_are(rehearsal, name):
    client = rehearsal.again("bob", OTHER_RECORDS[name])
    for request, reply in rehearsal.requests("bob"):
        assert client.handle(request) == reply


@pytest.mark.parametrize("place", [0, 17, 60])
def test_one_record_more_moves_no_other_to_another_cluster(rehearsal, place):
    X = records(60, seed=1)
    more = np.insert(X, place, records(1, seed=77)[0] ** 2, axis=0)
    others = np.delete(np.arange(61), place)
    without = rehearsal.again("bob", X)
    labels = []
    for request, _ in rehearsal.requests("bob"):
        without.handle(request)
        labels.append(without.labels.copy())
    assert len({label.tobytes() for label in labels}) >= 2
    having = rehearsal.again("bob", more)
    for (request, _), expected in zip(rehearsal.requests("bob"), labels, strict=True):
        having.handle(request)
        np.testing.assert_array_equal(having.labels[others], expected)


def test_one_record_more_changes_no_other_records_gradient(monkeypatch):
    """What clipping and noise of a step rely on, bit for bit."""
    found = []
    add = dpsgd.add_clipped
    silence(monkeypatch)
    monkeypatch.setattr(
        dpsgd,
        "add_clipped",
        lambda gradient, total, *rest: (
            found.append(np.array(gradient)),
            add(gradient, total, *rest),
        ),
    )
    rng = np.random.default_rng(0)
    shape = noisy.Autoencoder(50, (17, 5))
    initial = shape.initial(rng)
    X = rng.normal(size=(20, 50))

    def gradients(records):
        found.clear()
        dpsgd.train(
            shape.module(initial),
            records,
            records.astype(np.float32),
            noisy.reconstruction_loss,
            dpsgd.Training(noisy.Sampling(1.0, 1), 1.0),
            clip=1.0,
            expected_batch=8,
            learning_rate=0.01,
            sampler="fast",
        )
        return np.array(found)

    alone = gradients(X)
    for more in range(1, 9):
        together = gradients(np.vstack([rng.normal(size=(more, 50)), X]))
        np.testing.assert_array_equal(together[more:], alone)


def crafted(stage, fields):
    """Requests that an honest server does not make."""
    n = len(fields["models"][0]) if len(fields.get("models", ())) else 0
    if stage is NOISY_SCORES:
        yield {"models": np.zeros((1, n + 1))}
        yield {"models": np.zeros((0, n))}
        yield {"models": np.full((2, n), 1e6)}
        yield {"theta": 0.0}
        yield {"theta": 1e6, "models": -fields["models"]}
    if stage is NOISY_GROUP:
        some = {"groups": np.zeros(2, np.int64), "weights": np.ones(2), "models": np.zeros((2, n))}
        yield {"clusters": np.array([0, 0]), **some}
        yield {"clusters": np.array([0, 99]), **some}
        yield {name: fields[name][:0] for name in ("clusters", "groups", "weights", "models")}
        yield {"hold": 1}
        yield {"epochs": 100_000}
        yield {"learning_rate": 10.0, "clip": 1e6}
        yield {"learning_rate": 1e-9, "clip": 1e-6}
        yield {"share": 1.0}
    if stage is NOISY_REFINE:
        yield {"groups": fields["groups"][:-1]}
        yield {"models": np.zeros((0, n))}
        yield {"models": np.full((3, n), -1e6), "n_clusters": 20}
    if stage is NOISY_MEANS:
        yield {"n_groups": 1}
        yield {"n_groups": 5000, "count_weight": 1e3}
    if stage is NOISY_LOCAL:
        yield {"initial": np.zeros(3)}
        yield {"batch_size": 1, "epochs": 100_000}


@pytest.mark.parametrize(
    "stage",
    [NOISY_LOCAL, NOISY_SCORES, NOISY_GROUP, NOISY_REFINE, NOISY_MEANS],
    ids=lambda s: s.name,
)
def test_whether_a_crafted_request_is_answered_does_not_depend_on_records(rehearsal, stage):
    before = rehearsal.until("bob", stage)
    honest = next(r for r, _ in rehearsal.requests("bob") if stage_of(r) == stage.name)
    fields = values_of(PrivateFedCRefClient, honest)
    at = read_envelope(honest)

    def seen(X, changed):
        client = rehearsal.again("bob", X)
        for request in before:
            client.handle(request)
        # What is asked may be something that was not rehearsed, and has no answer ready.
        with (
            mock.patch.multiple("secure_fedclust.privacy.release", noise=rehearsal._noise),
            mock.patch.object(dpsgd, "train", lambda *_, **__: None),
        ):
            request = stage.request.encode({**fields, **changed}, run=at.run, step=at.step)
            found = outcome(lambda: client.handle(request))
        return (found if isinstance(found, str) else len(found)), client.releases.anchor.rows

    for changed in crafted(stage, fields):
        first, *rest = (seen(OTHER_RECORDS[name], changed) for name in ("none", "one", "many"))
        assert rest == [first, first], changed


def test_a_cluster_cannot_be_trained_on_twice_for_one_charge(rehearsal):
    client = rehearsal.again("bob", records())
    for request in rehearsal.until("bob", NOISY_GROUP):
        client.handle(request)
    rows = client.releases.ledger.anchor().rows
    n = client.shape.n_parameters
    twice = {"clusters": np.array([0, 0]), "models": np.zeros((2, n)), "groups": np.zeros(2, int)}
    training = {"epochs": 1, "batch_size": 8, "learning_rate": 0.1, "clip": 1.0, "share": 0.01}
    request = NOISY_GROUP.request.encode(
        {**twice, "weights": np.ones(2), "hold": 0, **training}, run=client._run, step=500
    )
    with pytest.raises(ProtocolError, match="each once"):
        client.handle(request)
    assert client.releases.ledger.anchor().rows == rows


def holding(rehearsal):
    """A client that takes part in sums and holds what it has trained."""
    client = private_client(
        PrivateFedCRefClient, records(seed=1), MASKED, summand=PlainSummand(3), seed=1
    )
    fresh = rehearsal.again("bob", records(seed=1))
    client.__dict__.update({k: v for k, v in vars(fresh).items() if k not in ("_summand", "spec")})
    for request in rehearsal.until("bob", NOISY_GROUP):
        client.handle(request)
    honest = next(r for r, _ in rehearsal.requests("bob") if stage_of(r) == NOISY_GROUP.name)
    fields = {**values_of(PrivateFedCRefClient, honest), "hold": 1}
    at = read_envelope(honest)
    reply = client.handle(NOISY_GROUP.request.encode(fields, run=at.run, step=at.step))
    return client, fields, reply


def test_models_that_are_held_leave_only_in_a_sum(rehearsal):
    client, fields, reply = holding(rehearsal)
    assert values_of(PrivateFedCRefClient, reply)["models"].shape[0] == 0
    n = client.shape.n_parameters
    asks = {"first": 0, "n_groups": 1, "n_numbers": n}
    with pytest.raises(ProtocolError, match="part of a sum only"):
        client.handle(AVERAGE.request.encode(asks, run=client._run, step=client._step + 1))
    assert len(client.held.weights) == len(fields["clusters"])


def test_a_stage_that_is_not_additive_cannot_be_asked_for_a_sum(rehearsal):
    client = private_client(PrivateFedCRefClient, records(), MASKED, summand=PlainSummand(3))
    with pytest.raises(ProtocolError, match="not a question that can be asked for a sum"):
        asked_for_a_sum(client, noisy.PROJECT, 0, directions=np.eye(4))


def test_a_sum_of_moments_is_for_clients_who_see_records_from_the_same_directions():
    spec = replace(MASKED, min_survivors=3)
    client = private_client(PrivateFedCRefClient, records(), spec, summand=PlainSummand(3))
    asked(client, noisy.PROJECT, 0, directions=np.eye(4)[:3])
    with pytest.raises(ProtocolError, match="must name the directions"):
        asked_for_a_sum(client, noisy.MOMENTS, 1, share=0.1)
    others = noisy.digest((), np.eye(4)[1:])
    with pytest.raises(ProtocolError, match="names other directions"):
        asked_for_a_sum(client, noisy.MOMENTS_OF, 1, share=0.1, made_by=others)
    assert client.releases.anchor.rows == 0
    asked_for_a_sum(client, noisy.MOMENTS_OF, 1, share=0.1, made_by=noisy.digest((), np.eye(4)[:3]))
    assert client.releases.anchor.rows == 1


def test_looking_is_free_for_records_of_so_many_features_and_not_without_end():
    client = private_client(PrivateFedCRefClient, records(), SPEC)
    with pytest.raises(ProtocolError, match="'directions'"):
        asked(client, noisy.PROJECT, 0, directions=np.eye(5))
    asked(client, noisy.PROJECT, 0, directions=np.eye(4))
    asked(client, noisy.MOMENTS, 1, share=0.1)
    for look in range(1, noisy.MOST_LOOKS):
        asked(client, noisy.PROJECT, 1 + look, directions=np.eye(4)[:2])
    assert client.X.shape == (60, 2) and client.records.shape == (60, 4)
    assert client.releases.anchor.rows == 1
    with pytest.raises(ProtocolError, match="at most 8"):
        asked(client, noisy.PROJECT, 20, directions=np.eye(4))


def test_cells_of_what_is_seen_are_no_question_for_a_sum():
    """Or others could be told to see nothing, and the sum be about one client alone."""
    spec = replace(MASKED, min_survivors=3)
    client = private_client(PrivateFedCRefClient, records(), spec, summand=PlainSummand(3))
    asked(client, noisy.PROJECT, 0, directions=np.eye(4)[:3])
    cells = {"centers": np.zeros((1, 3)), "radius": 1.0, "count_weight": 1.0, "square_weight": 0.0}
    with pytest.raises(ProtocolError, match="not added up"):
        asked_for_a_sum(client, noisy.CELLS, 1, share=0.1, **cells)
    assert client.releases.anchor.rows == 0


@pytest.mark.parametrize("exchange", range(1, 6))
def test_a_message_lost_in_the_sum_of_moments_loses_nobody_for_good(monkeypatch, exchange):
    monkeypatch.setattr(private, "DIRECTIONS", 3)
    model = fedcref(replace(MASKED, min_survivors=3), n_rounds=1)
    names = ("ada", "bob", "cy", "dee")
    quietly(model.fit, federation(names=names), faults=[Fault("bob", exchange, "drop")])
    assert [x.stage for x in model.result_.history][:2] == [noisy.PROJECT.name, "masking/advertise"]
    asked_for = {x.stage: "bob" in x.asked for x in model.result_.history}
    lost = model.result_.history[exchange].stage == noisy.PROJECT.name
    assert asked_for["synopsis/micro"] == asked_for[NOISY_LOCAL.name] == (not lost)
    assert not any(x.rejected for x in model.result_.history)


def test_many_features_are_seen_where_the_records_differ(monkeypatch):
    silence(monkeypatch)
    rng = np.random.default_rng(3)
    lines = np.linalg.qr(rng.normal(size=(300, 4)))[0].T
    federation = {
        name: np.clip(
            0.5 + 2 * lines[rng.integers(4, size=90)] + rng.normal(0, 0.01, (90, 300)), 0, 1
        )
        for name in ("ada", "bob", "cy")
    }
    spec = replace(SPEC, ranges=[(0, 1)] * 300, public_size=90)
    found = []
    looked = private.principal_directions
    monkeypatch.setattr(
        private, "principal_directions", lambda *given: found.append(looked(*given)) or found[0]
    )
    quietly(fedcref(spec, n_local_clusters=4).fit, federation)
    [seen] = found
    assert seen.shape == (private.DIRECTIONS, 300)
    # All but a little of every line is seen; of a line of chance, a 25th part.
    basis = np.linalg.qr(seen.T)[0]
    assert (np.linalg.norm(lines @ basis, axis=1) > 0.8).all()


# With differential privacy: what it costs.


@pytest.mark.parametrize("spec", [SPEC, MASKED, ENCRYPTED], ids=["local", "masking", "ckks"])
def test_every_release_is_in_the_ledger_before_it_is_sent_and_all_are_within_the_budget(seen, spec):
    ledger = Ledger.create(None, epsilon=20.0, delta=1e-5)
    model = fedcref(spec, ledger=ledger, sampler="fast")
    charged = {}

    def look(number, total):
        for client in federation():
            charged.setdefault(client, []).append(len(ledger.rows(client)))

    heard = overheard(model, federation(), on_progress=look)
    limit = Limit.of(20.0, 1e-5)
    names = {stage.name for stage in RELEASES}
    for client in federation():
        rows = [row.charge for row in ledger.rows(client)]
        assert squared_mus(model, client) <= limit.mu**2 * (1 + 1e-9)
        assert squared_mus(model, client) >= 0.99 * limit.mu**2
        told = [(r, a) for who, r, a in heard if who == client and stage_of(r) in names]
        for request, _ in told:
            at = read_envelope(request)
            paid = [row for row in rows if (row.run, row.step) == (at.run, at.step)]
            assert [row.message for row in paid] == [stage_of(request)]
        assert charged[client] == sorted(charged[client])
        summed = {row.message for row in rows if row.message.endswith("in a sum")}
        assert bool(summed) == (spec is not SPEC)
    assert {stage_of(request) for _, request, _ in heard} & names >= names - {NOISY_MEANS.name}


@pytest.mark.parametrize("stage", [NOISY_LOCAL, NOISY_SCORES, NOISY_REFINE], ids=lambda s: s.name)
def test_without_budget_nothing_is_computed_and_nothing_is_sent(rehearsal, stage):
    client = rehearsal.again("bob", records())
    for request in rehearsal.until("bob", stage):
        client.handle(request)
    honest = next(r for r, _ in rehearsal.requests("bob") if stage_of(r) == stage.name)
    at, fields = read_envelope(honest), values_of(PrivateFedCRefClient, honest)
    rows, step = client.releases.ledger.anchor().rows, client._step
    with mock.patch.object(dpsgd, "train", side_effect=AssertionError("trained")):
        with pytest.raises(BudgetExceeded, match="spent"):
            client.handle(stage.request.encode({**fields, "share": 1.0}, run=at.run, step=at.step))
    assert (client.releases.ledger.anchor().rows, client._step) == (rows, step)


def test_shares_of_the_budget_add_up_to_one_and_leave_room_for_one_step_more():
    for n_rounds, max_iter in ((1, 1), (10, 1), (3, 4)):
        settings = fedcref(n_rounds=n_rounds, max_iter=max_iter)._settings(private=True)

        def spent(shares, settings=settings):
            each = shares.local + shares.scores + settings.n_rounds * shares.group + shares.counts
            return shares.start + shares.means + settings.max_iter * each

        assert spent(private.Shares.of(settings)) == pytest.approx(1)
        spare = private.Shares.of(settings, spare=True)
        dearest = max(
            spare.start, spare.local, spare.scores, spare.group, spare.counts, spare.means
        )
        assert spent(spare) + dearest <= 1 + 1e-12


def test_the_sum_of_what_was_planned_is_what_is_spent(seen):
    model = fedcref(SPEC)
    quietly(model.fit, federation())
    planned = {release.message for release in model.plan(SPEC, n_clients=3, n_features=4).releases}
    assert (noisy.MOMENTS.name in planned) == (seen != "few features")
    rows = {row.charge.message for row in model.ledger_.rows("ada")}
    assert {message.split(":")[0] for message in planned} >= rows
    assert math.isclose(squared_mus(model, "ada"), Limit.of(20.0, 1e-5).mu ** 2, rel_tol=1e-2)


# Sums that some clients have nothing to add to.


def isolating(*lonely):
    """Links between all clusters but those of some clients."""
    honest = private.associate

    def associate(models, shares, alpha):
        made = {
            client: np.zeros_like(part) if client in lonely else np.ones_like(part)
            for client, part in shares.items()
        }
        return honest(models, made, alpha)

    return mock.patch.object(private, "associate", associate)


@pytest.mark.parametrize("spec", [MASKED, ENCRYPTED], ids=["masking", "ckks"])
def test_a_client_without_a_group_does_not_stop_the_sums_of_the_others(spec):
    with isolating("cy"):
        model = fedcref(spec, alpha=0.5)
        quietly(model.fit, federation())
    assert model.n_clusters_ == 1
    assert set(model.labels_[2].tolist()) <= {-1, 0}


def test_a_reply_that_is_lost_does_not_make_the_average_of_what_was_held_wrong(monkeypatch):
    silence(monkeypatch)
    model = fedcref(MASKED, n_rounds=1)
    names = ("ada", "bob", "cy", "dee")
    with isolating():
        quietly(model.fit, federation(names=names))
        at = [x.stage for x in model.result_.history].index(NOISY_GROUP.name)
        whole = model.result_.networks["groups"]
        lost = fedcref(MASKED, n_rounds=1)
        quietly(lost.fit, federation(names=names), faults=[Fault("bob", at, "drop")])
    np.testing.assert_allclose(lost.result_.networks["groups"], whole, atol=0.2)
