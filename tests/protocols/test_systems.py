"""What each system's protocol says to whom, and what it refuses to hear."""

import numpy as np
import pytest

from secure_fedclust import FKM, GOLD, FeCA, FederationWarning, FedGEM, KFed, PrivacySpec
from secure_fedclust.engines import Fault, InProcessEngine
from secure_fedclust.errors import ProtocolError
from secure_fedclust.messages import read_envelope
from secure_fedclust.protocols import feca, fedgem, fkm, gold, kfed

NONE = PrivacySpec.none(reason="test")
RNG = np.random.default_rng(0)
RECORDS = {name: RNG.normal(size=(40, 2)) for name in "abc"}
CENTERS = RECORDS["a"][:3]
FECA = {"n_clusters": 2, "n_init": 1, "radius": "empirical"}


def client_of(kind, records=RECORDS["a"]):
    return kind(records, NONE, np.random.default_rng(0))


def engine_of(model, *faults, **forged):
    handlers = {n: client_of(model._client_class, X).handle for n, X in RECORDS.items()}
    return InProcessEngine(handlers | forged, faults=faults)


def forge(stage, **values):
    """A client that gives this answer to this stage, and none to others."""

    def handle(data):
        envelope = read_envelope(data)
        if envelope.schema != stage.request.name:
            raise ProtocolError("not that one")
        return stage.reply.encode(values, run=envelope.run, step=envelope.step)

    return handle


SEQUENCES = [
    (FKM(3, n_rounds=2), ["fkm/seed", "fkm/means", "fkm/means"]),
    (FKM(3, n_rounds=2, align="index"), ["fkm/seed", "fkm/sums", "fkm/sums"]),
    (KFed(3), ["kfed/centers"]),
    (FeCA(3), ["feca/centers"]),
    (FedGEM(2, n_rounds=3), ["fedgem/seed", "fedgem/step", "fedgem/step", "fedgem/final"]),
    (GOLD(3), ["gold/centroids"]),
]


@pytest.mark.parametrize(("model", "stages"), SEQUENCES, ids=lambda v: str(v)[:24])
def test_stages_come_in_the_order_of_the_paper(model, stages):
    model.set_params(privacy=NONE, random_state=0).fit(engine_of(model))
    assert [exchange.stage for exchange in model.result_.history] == stages
    assert model._n_exchanges() == len(stages)


@pytest.mark.parametrize(
    ("kind", "requests"),
    [
        (kfed.KFedClient, [(kfed.CENTERS, {"n_local_clusters": 2})] * 2),
        (gold.GOLDClient, [(gold.CENTROIDS, {})] * 2),
        (
            feca.FeCAClient,
            [(feca.CENTERS, {"n_clusters": 2, "n_init": 1, "radius": "empirical"})] * 2,
        ),
        (fkm.FKMClient, [(fkm.SEED, {"n_clusters": 2})] * 2),
        (fkm.FKMClient, [(fkm.MEANS, {"centers": CENTERS}), (fkm.SEED, {"n_clusters": 2})]),
        (fkm.FKMClient, [(fkm.MEANS, {"centers": CENTERS}), (fkm.SUMS, {"centers": CENTERS})]),
        (fedgem.FedGEMClient, [(fedgem.STEP, {"centers": CENTERS, "n_steps": 1})]),
        (fedgem.FedGEMClient, [(fedgem.FINAL, {"centers": CENTERS, "n_steps": 1, "v": 1.0})]),
        (
            fedgem.FedGEMClient,
            [
                (fedgem.SEED, {"n_components": 3, "n_steps": 1}),
                (fedgem.FINAL, {"centers": CENTERS, "n_steps": 1, "v": 1.0}),
                (fedgem.STEP, {"centers": CENTERS, "n_steps": 1}),
            ],
        ),
    ],
)
def test_a_client_answers_no_stage_out_of_order(kind, requests):
    client = client_of(kind)
    *before, (last, values) = requests
    for step, (stage, fields) in enumerate(before):
        client.handle(stage.request.encode(fields, run="r", step=step))
    with pytest.raises(ProtocolError, match="may not be asked"):
        client.handle(last.request.encode(values, run="r", step=len(before)))


@pytest.mark.parametrize(
    ("kind", "stage", "fields", "message"),
    [
        (fkm.FKMClient, fkm.SUMS, {"centers": np.zeros((0, 2))}, "'k' is 0"),
        (fkm.FKMClient, fkm.MEANS, {"centers": np.zeros((0, 2))}, "'k' is 0"),
        (kfed.KFedClient, kfed.CENTERS, {"n_local_clusters": 2**30}, "'n_local_clusters'"),
        (feca.FeCAClient, feca.CENTERS, FECA | {"n_init": 10**6}, "'n_init'"),
        (fkm.FKMClient, fkm.SUMS, {"centers": np.zeros((2, 3))}, "'d' is 3"),
    ],
)
def test_a_client_refuses_what_it_could_not_compute(kind, stage, fields, message):
    with pytest.raises(ProtocolError, match=message):
        client_of(kind).handle(stage.request.encode(fields, run="r", step=0))


@pytest.mark.parametrize(
    ("model", "forged", "message"),
    [
        (KFed(4, n_local_clusters=2), forge(kfed.CENTERS, centers=np.zeros((3, 2))), "'k' is 3"),
        (KFed(4, n_local_clusters=2), forge(kfed.CENTERS, centers=np.zeros((0, 2))), "'k' is 0"),
        (
            FedGEM({"a": 9, "b": 9, "c": 2}),
            forge(fedgem.SEED, maximisers=np.zeros((3, 2)), squared_radii=np.zeros(3)),
            "'k' is 3",
        ),
        (GOLD(3), forge(gold.CENTROIDS, centroids=np.zeros((gold.MAX_CENTROIDS + 1, 2))), "16385"),
        (GOLD(3), forge(gold.CENTROIDS, centroids=np.zeros((0, 2))), "'k' is 0"),
        (FeCA(3), forge(feca.CENTERS, centers=np.zeros((4, 2)), radii=np.zeros(4)), "'k' is 4"),
        (FKM(3), forge(fkm.SEED, means=np.zeros((4, 2)), counts=np.full(4, 5)), "'m' is 4"),
    ],
)
def test_a_reply_with_more_than_was_asked_for_is_set_aside(model, forged, message):
    model.set_params(privacy=NONE, random_state=0)
    with pytest.warns(FederationWarning, match=f"c: .*{message}"):
        model.fit(engine_of(model, c=forged))
    assert "c" in model.result_.history[0].rejected


def test_a_count_below_the_least_is_not_taken():
    values = {"means": np.zeros((1, 2)), "counts": np.array([1])}
    with pytest.raises(ProtocolError, match="'counts' holds values below 2"):
        fkm.SEED.reply.encode(values, run="r", step=0)


def test_bytes_of_rejected_replies_are_counted():
    model = KFed(3, n_local_clusters=2, privacy=NONE, random_state=0)
    whole = model.fit(engine_of(model)).result_.history[0].bytes_up
    with pytest.warns(FederationWarning):
        model.fit(engine_of(model, Fault("a", 0, "corrupt")))
    assert model.result_.history[0].bytes_up == whole


def test_a_client_that_misses_a_round_of_fedgem_goes_on_from_where_it_was_left():
    asked = {}

    def watch(name, handle):
        def handler(data):
            envelope = read_envelope(data)
            if envelope.schema == fedgem.STEP.request.name:
                place = {"run": envelope.run, "step": envelope.step, "bounds": {}}
                values, _ = fedgem.STEP.request.decode(data, **place)
                asked[name, envelope.step] = values["centers"]
            return handle(data)

        return handler

    model = FedGEM(2, n_rounds=4, privacy=NONE, random_state=0)
    handlers = {
        name: watch(name, client_of(fedgem.FedGEMClient, X).handle) for name, X in RECORDS.items()
    }
    model.fit(InProcessEngine(handlers, faults=[Fault("b", 1, "drop")]))
    np.testing.assert_array_equal(asked["b", 1], asked["b", 2])
    assert not np.array_equal(asked["a", 1], asked["a", 2])
    assert "b" in model.result_.client_clusters


def test_a_client_that_misses_the_first_exchange_of_fedgem_has_no_part():
    model = FedGEM(2, n_rounds=2, privacy=NONE, random_state=0)
    model.fit(engine_of(model, Fault("b", 0, "drop")))
    assert set(model.result_.client_clusters) == {"a", "c"}
    assert model.result_.history[1].asked == ("a", "c")


@pytest.mark.parametrize("reply", [None, 5, "text", [b"x"]])
def test_a_reply_that_is_not_bytes_is_set_aside_or_absent(reply):
    model = KFed(3, n_local_clusters=2, privacy=NONE, random_state=0)
    engine = engine_of(model, c=lambda data: reply)
    if reply is None:
        model.fit(engine)
    else:
        with pytest.warns(FederationWarning, match="a message is bytes"):
            model.fit(engine)
    assert np.isfinite(model.cluster_centers_).all()


def test_an_engine_without_clients_is_refused():
    for model in (FKM(2), FedGEM(2), GOLD()):
        with pytest.raises(ProtocolError, match="no clients"):
            model.set_params(privacy=NONE).fit(InProcessEngine({}))
