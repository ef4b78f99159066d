import json
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import estimator_checks_generator

from secure_fedclust import (
    FKM,
    GOLD,
    DataError,
    FeCA,
    FedClustResult,
    FederationWarning,
    FedGEM,
    KFed,
    ParameterError,
    PrivacySpec,
    ProtocolError,
)
from secure_fedclust.engines import Fault, InProcessEngine
from secure_fedclust.metrics import adjusted_rand

NONE = PrivacySpec.none(reason="test")
TRUTH = np.array([[0.0, 0], [12, 0], [0, 12], [12, 12]])


def make_clients(seed=0, n=60):
    """Three clients that hold three of four clusters each."""
    rng = np.random.default_rng(seed)
    held = [(0, 1, 2), (1, 2, 3), (2, 3, 0)]
    labels = [np.repeat(h, n) for h in held]
    return [rng.normal(TRUTH[y]) for y in labels], labels


def estimators():
    common = {"privacy": NONE, "random_state": 0}
    return [
        FKM(4, **common),
        FKM(4, align="index", **common),
        KFed(4, n_local_clusters=3, **common),
        FeCA(4, **common),
        FeCA(4, radius="theoretical", **common),
        FedGEM(3, **common),
        GOLD(4, **common),
    ]


each = pytest.mark.parametrize("estimator", estimators(), ids=lambda e: repr(e).split(", priv")[0])


@pytest.fixture(scope="module")
def clients():
    return make_clients()


def scaled(estimator, records):
    """Records on the scale that the system is made for: GOLD wants features of variance one."""
    return [X / 6 if isinstance(estimator, GOLD) else X for X in records]


def assert_finds_the_truth(model):
    """Each true centre has a cluster of its own."""
    truth = scaled(model, [TRUTH])[0]
    assert np.isfinite(model.cluster_centers_).all()
    assert len(set(model.predict(truth).tolist())) == len(truth)


@each
def test_separated_clusters_are_found_across_clients(estimator, clients):
    records, truth = clients
    model = clone(estimator).fit(scaled(estimator, records))
    assert model.cluster_centers_.shape == (model.n_clusters_, 2)
    assert adjusted_rand(np.concatenate(truth), np.concatenate(model.labels_)) > 0.95
    assert_finds_the_truth(model)
    assert [len(labels) for labels in model.labels_] == [180, 180, 180]


@each
def test_the_result_says_that_nothing_is_claimed(estimator, clients):
    result = clone(estimator).fit(clients[0]).result_
    assert result.guarantee.startswith("NO DP CLAIM")
    assert "test" in result.guarantee
    assert set(result.nonprivate.labels) == {"client 0", "client 1", "client 2"}


@each
def test_a_run_is_repeatable_and_leaves_the_global_generator_alone(estimator, clients):
    before = np.random.get_state()[1].tolist()
    first = clone(estimator).fit(clients[0])
    second = clone(estimator).fit(clients[0])
    np.testing.assert_array_equal(first.cluster_centers_, second.cluster_centers_)
    assert np.random.get_state()[1].tolist() == before


@each
def test_a_result_survives_a_file_without_anything_nonprivate(estimator, clients, tmp_path):
    result = clone(estimator).fit(clients[0]).result_
    result.save(tmp_path / "result.json")
    loaded = FedClustResult.load(tmp_path / "result.json")
    np.testing.assert_array_equal(loaded.centers, result.centers)
    assert loaded.bytes_per_stage() == result.bytes_per_stage()
    assert loaded.client_clusters == result.client_clusters
    assert loaded.parameters == result.parameters
    for ours, theirs in zip(loaded.history, result.history, strict=True):
        assert ours.stage == theirs.stage and ours.asked == theirs.asked
        assert (ours.centers is None) == (theirs.centers is None)
    assert loaded.nonprivate.labels == {}
    assert "labels" not in json.loads((tmp_path / "result.json").read_text())


def test_a_file_that_is_no_result_is_refused(tmp_path):
    for content in ("{}", "[]", "nonsense", '{"format": "other"}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ParameterError, match="not a result"):
            FedClustResult.load(tmp_path / "x.json")


def test_bytes_and_centres_are_kept_round_by_round(clients):
    result = FKM(4, n_rounds=3, privacy=NONE, random_state=0).fit(clients[0]).result_
    assert [exchange.stage for exchange in result.history] == ["fkm/seed"] + ["fkm/means"] * 3
    assert all(exchange.centers.shape == (4, 2) for exchange in result.history)
    down, up = result.bytes_per_stage()["fkm/means"]
    assert down >= 3 * 3 * 4 * 2 * 8
    assert up >= 3 * 3 * 3 * 3 * 8


def test_fedgem_finds_the_number_of_clusters_and_who_holds_which(clients):
    records, _ = clients
    model = FedGEM([3, 3, 3], final_radius=1.0, privacy=NONE, random_state=1).fit(records)
    assert model.n_clusters_ == 4
    held = model.result_.client_clusters
    for i, labels in enumerate(model.labels_):
        assert set(labels) <= set(held[f"client {i}"])
        assert len(held[f"client {i}"]) == 3


def test_gold_finds_a_number_of_clusters_by_itself(clients):
    model = GOLD(privacy=NONE, random_state=0).fit(clients[0])
    assert 2 <= model.n_clusters_ <= 60
    assert model.result_.parameters["n_clusters"] is None


@pytest.mark.parametrize("form", ["mapping", "frame", "frames", "lists"])
def test_clients_may_come_in_several_forms(form, clients):
    records, _ = clients
    model = FKM(4, privacy=NONE, random_state=0)
    expected = clone(model).fit(records).cluster_centers_
    if form == "mapping":
        model.fit({"a": records[0], "b": records[1], "c": records[2]})
    elif form == "frame":
        frame = pd.DataFrame(np.concatenate(records), columns=["age", "bmi"])
        frame["site"] = np.repeat(["a", "b", "c"], [len(X) for X in records])
        model.fit(frame, client_column="site")
        assert model.feature_names_in_.tolist() == ["age", "bmi"]
        assert len(model.predict(frame[["age", "bmi"]])) == len(frame)
    elif form == "frames":
        model.fit([pd.DataFrame(X, columns=["age", "bmi"]) for X in records])
    else:
        model.fit([X.tolist() for X in records])
    np.testing.assert_array_equal(model.cluster_centers_, expected)


def engine_of(model, records, *faults):
    spec, rng = model.privacy, np.random.default_rng(0)
    handlers = {
        f"client {i}": model._client_class(X, spec, child).handle
        for i, (X, child) in enumerate(zip(records, rng.spawn(len(records)), strict=True))
    }
    return InProcessEngine(handlers, faults=faults)


@each
def test_an_engine_with_live_clients_gives_the_same_centres_and_no_labels(estimator, clients):
    model = clone(estimator).fit(clients[0])
    live = clone(estimator).fit(engine_of(estimator, clients[0]))
    np.testing.assert_array_equal(live.cluster_centers_, model.cluster_centers_)
    assert not hasattr(live, "labels_")
    assert live.result_.nonprivate.labels == {}


@each
@pytest.mark.parametrize("kind", ["drop", "corrupt", "truncate", "delay"])
@pytest.mark.parametrize("exchange", [0, 1, 2])
def test_one_bad_reply_does_not_stop_or_poison_the_others(estimator, kind, exchange, clients):
    records = scaled(estimator, clients[0])
    engine = engine_of(estimator, records, Fault("client 1", exchange, kind))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = clone(estimator).fit(engine)
    assert all(isinstance(w.message, FederationWarning) for w in caught)
    assert_finds_the_truth(model)  # clients 0 and 2 hold all four clusters
    if exchange < len(model.result_.history):
        hit = model.result_.history[exchange]
        assert "client 1" in (*hit.absent, *hit.rejected)


@each
def test_a_run_that_nobody_answers_ends_with_a_typed_error(estimator, clients):
    faults = [Fault(f"client {i}", 0, "drop") for i in range(3)]
    with pytest.raises(ProtocolError, match="no usable reply"):
        clone(estimator).fit(engine_of(estimator, clients[0], *faults))


def test_labels_of_an_earlier_fit_do_not_outlive_it(clients):
    model = FKM(4, privacy=NONE, random_state=0).fit(clients[0])
    model.fit(engine_of(model, clients[0]))
    assert not hasattr(model, "labels_")


def test_who_was_absent_survives_a_file(clients, tmp_path):
    model = FKM(4, privacy=NONE, random_state=0)
    faults = [Fault("client 1", 0, "drop"), Fault("client 2", 1, "corrupt")]
    with pytest.warns(FederationWarning):
        model.fit(engine_of(model, clients[0], *faults))
    model.result_.save(tmp_path / "result.json")
    history = FedClustResult.load(tmp_path / "result.json").history
    assert history[0].absent == ("client 1",)
    assert list(history[1].rejected) == ["client 2"]


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32])
def test_numbers_of_clusters_may_be_of_any_integer_type(kind, clients):
    # 4 * 100 does not fit into eight bits.
    for system in (FKM, KFed, FeCA, GOLD):
        models = [system(n, privacy=NONE, random_state=0) for n in (100, kind(100))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FederationWarning)
            first, second = (model.fit(clients[0]).cluster_centers_ for model in models)
        np.testing.assert_array_equal(first, second)


def test_records_far_from_the_origin_are_clustered_as_well(clients):
    records, truth = clients
    for model in (FKM(4), KFed(4, n_local_clusters=3), FeCA(4), FedGEM(3)):
        model.set_params(privacy=NONE, random_state=0).fit([X + 1e9 for X in records])
        assert adjusted_rand(np.concatenate(truth), np.concatenate(model.labels_)) > 0.95


def test_every_kind_of_generator_may_be_the_random_state(clients):
    for state in (np.random.default_rng(0), np.random.RandomState(0), np.random.PCG64(0), None):
        assert FKM(4, privacy=NONE, random_state=state).fit(clients[0]).n_clusters_ == 4


def test_labels_go_back_into_a_frame_client_by_client(clients):
    records, truth = clients
    frame = pd.DataFrame(np.concatenate(records), columns=["age", "bmi"])
    frame["site"] = np.repeat(["a", "b", "c"], [len(X) for X in records])
    frame["truth"] = np.concatenate(truth)
    frame = frame.sample(frac=1, random_state=0)
    model = FKM(4, privacy=NONE, random_state=0)
    model.fit(frame[["age", "bmi", "site"]], client_column="site")
    for name, labels in zip(model.client_names_, model.labels_, strict=True):
        frame.loc[frame["site"] == name, "label"] = labels
    assert adjusted_rand(frame["truth"], frame["label"]) > 0.95


def test_clusters_that_stay_apart_are_warned_about(clients):
    with pytest.warns(FederationWarning, match="9 local clusters . stayed apart"):
        FedGEM(3, final_radius=1e-9, privacy=NONE, random_state=0).fit(clients[0])


def test_neither_records_nor_labels_show_in_a_repr(clients):
    model = KFed(4, privacy=NONE, random_state=0).fit(clients[0])
    assert repr(model.result_.nonprivate) == "NonPrivate()"
    assert "labels" not in repr(model.result_)
    client = model._client_class(clients[0][0], NONE, np.random.default_rng(0))
    assert "array" not in repr(client)


def test_progress_reaches_its_total(clients):
    seen = []
    FKM(4, n_rounds=2, privacy=NONE).fit(clients[0], on_progress=lambda *p: seen.append(p))
    assert seen == [(i, 9) for i in range(1, 10)]


@each
@pytest.mark.parametrize("privacy", [None, "none", 1.0])
def test_privacy_has_no_default(estimator, privacy, clients):
    with pytest.raises(ParameterError, match="there is no default"):
        clone(estimator).set_params(privacy=privacy).fit(clients[0])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (FKM(0), "n_clusters=0: give a whole number of at least 1"),
        (FKM(-3), "n_clusters=-3"),
        (FKM(2.5), r"n_clusters=2\.5"),
        (FKM(True), "n_clusters=True"),
        (FKM("3"), "n_clusters='3'"),
        (FKM(3, n_rounds=0), "n_rounds=0"),
        (FKM(3, n_init=0), "n_init=0"),
        (FKM(3, align="best"), "align='best': give one of kmeans, index"),
        (KFed(0), "n_clusters=0"),
        (KFed(3, n_local_clusters=0), "n_local_clusters=0"),
        (FeCA(0), "n_clusters=0"),
        (FeCA(3, n_init=-1), "n_init=-1"),
        (FeCA(3, radius="large"), "radius='large'"),
        (FedGEM(0), "n_local_clusters of client 0=0"),
        (FedGEM([2, 3]), "2 numbers for 3 clients"),
        (FedGEM({"client 0": 2}), "one number for each of"),
        (FedGEM(2, n_rounds=0), "n_rounds=0"),
        (FedGEM(2, final_radius=-1), "final_radius=-1"),
        (FedGEM(2, final_radius=float("nan")), "final_radius=nan"),
        (GOLD(0), "n_clusters=0"),
        (FKM(3, random_state=-1), "random_state=-1"),
        (FKM(3, random_state="a"), "random_state='a'"),
        (FKM(3, align=["kmeans"]), "align="),
        (FedGEM([[1, 2], [3], [4]]), "n_local_clusters of client 0"),
        (FedGEM("abc"), "n_local_clusters of client 0='abc'"),
        (FedGEM(2, final_radius=10**400), "final_radius=1"),
        (FedGEM(2, final_radius=1 + 2j), "final_radius="),
    ],
    ids=str,
)
def test_a_bad_parameter_is_named(model, message, clients):
    with pytest.raises(ParameterError, match=message):
        model.set_params(privacy=NONE).fit(clients[0])


GOOD = np.random.default_rng(0).normal(size=(20, 2))


@each
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([GOOD, np.array([[1.0, np.nan]])], "client 1: 1 of 1 records contain NaN"),
        ([GOOD, np.array([[1.0, np.inf]])], "client 1: 1 of 1 records contain NaN or infinity"),
        ([GOOD, np.array([[1.0, 1e200]])], "client 1: values beyond 1e\\+40 overflow"),
        ([GOOD, np.empty((0, 2))], "client 1: Found array with 0 sample"),
        ([GOOD, np.empty((5, 0))], "client 1: Found array with 0 feature"),
        ([GOOD, np.ones((5, 3))], "client 0 has 2 features and client 1 has 3"),
        ([GOOD, np.ones(5)], "client 1: Expected 2D array, got 1D"),
        ([GOOD, np.array([["a", "b"]])], "client 1: some values do not read as numbers"),
        ([GOOD, np.array([[{}, 1]], dtype=object)], "client 1: .*no number"),
        ({"x": GOOD, "y": [[1, None]]}, "y: "),
        (GOOD, "pass a list with one 2-D array per client"),
        ([], "there are no clients"),
        ("data.csv", "pass a list"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_records_get_an_error_that_names_the_client(estimator, bad, message):
    with pytest.raises(DataError, match=message):
        clone(estimator).fit(bad)


@each
def test_one_client_alone_is_clustered(estimator):
    rng = np.random.default_rng(0)
    X = rng.normal(np.repeat(TRUTH, 50, axis=0))
    model = clone(estimator)
    if isinstance(model, KFed | FedGEM):
        model.set_params(n_local_clusters=4)
    assert model.fit([X]).n_clusters_ == 4


@each
@pytest.mark.filterwarnings("ignore::secure_fedclust.FederationWarning")
def test_equal_records_make_one_cluster(estimator):
    model = clone(estimator).fit([np.ones((10, 3)), np.ones((5, 3))])
    np.testing.assert_allclose(model.cluster_centers_, np.ones((1, 3)))


@each
@pytest.mark.filterwarnings("ignore::secure_fedclust.FederationWarning")
def test_a_client_with_fewer_records_than_clusters_takes_part(estimator, clients):
    everyone = [*clients[0], TRUTH[:1] + 0.3, TRUTH[2:] + 0.1]
    model = clone(estimator).fit(scaled(estimator, everyone))
    assert [len(labels) for labels in model.labels_[-2:]] == [1, 2]
    assert_finds_the_truth(model)


@each
@pytest.mark.filterwarnings("ignore::secure_fedclust.FederationWarning")
def test_huge_and_tiny_scales_stay_finite(estimator, clients):
    for scale in (1e-150, 1e38):
        model = clone(estimator).fit([scale * X for X in clients[0]])
        assert np.isfinite(model.cluster_centers_).all()


@pytest.mark.parametrize(
    "bad", [[["J. Doe", 1]], [61.5, 32.1], [[1.0, np.nan]], [[1.0, 2.0, 77.25]], [[1e300, 1.0]]]
)
def test_predict_refuses_bad_records_without_quoting_them(bad, clients):
    model = FKM(4, privacy=NONE, random_state=0).fit(clients[0])
    with pytest.raises(DataError) as caught:
        model.predict(bad)
    for secret in ("Doe", "61.5", "77.25", "1e300"):
        assert secret not in str(caught.value)


def test_results_can_be_compared_without_trouble(clients):
    result = KFed(4, privacy=NONE, random_state=0).fit(clients[0]).result_
    assert result == result
    assert (result == "something else") is False


def test_fewer_clusters_than_asked_for_come_with_a_warning():
    with pytest.warns(FederationWarning, match="found 1 clusters where 4 were asked for"):
        FKM(4, privacy=NONE).fit([np.ones((10, 2))] * 2)


def test_a_federation_whose_clusters_are_all_too_small_to_report_says_so():
    with pytest.raises(DataError, match="no client has 2 records in one cluster"):
        FKM(4, privacy=NONE).fit([np.eye(4), -np.eye(4)])


class AsOneDataSet:
    """Let scikit-learn's checks, which know only single data sets, drive a federation of two."""

    def fit(self, X, y=None):
        if not hasattr(X, "__len__") or len(X) < 2 or np.ndim(X) != 2:
            return super().fit([X])
        X = np.asarray(X) if not hasattr(X, "tocsr") else X
        halves = [X[::2], X[1::2]] if not hasattr(X, "tocsr") else [X]
        super().fit(halves)
        labels = np.empty(len(X), dtype=int)
        labels[::2], labels[1::2] = self.labels_
        self.labels_ = labels
        return self


class OneFKM(AsOneDataSet, FKM):
    pass


class OneKFed(AsOneDataSet, KFed):
    pass


class OneFeCA(AsOneDataSet, FeCA):
    pass


class OneFedGEM(AsOneDataSet, FedGEM):
    pass


class OneGOLD(AsOneDataSet, GOLD):
    pass


CHECKED = [
    OneFKM(3, privacy=NONE, random_state=0),
    OneKFed(3, n_local_clusters=3, privacy=NONE, random_state=0),
    OneFeCA(3, privacy=NONE, random_state=0),
    OneFedGEM(3, privacy=NONE, random_state=0),
    OneGOLD(3, privacy=NONE, random_state=0),
]
CHECKS = [
    pytest.param(model, check, id=f"{type(model).__name__}-{check.func.__name__}")
    for estimator in CHECKED
    for model, check in estimator_checks_generator(estimator)
]


@pytest.mark.filterwarnings("ignore::secure_fedclust.FederationWarning")
@pytest.mark.parametrize(("estimator", "check"), CHECKS)
def test_scikit_learns_own_checks_pass(estimator, check):
    check(estimator)


@each
def test_parameters_can_be_read_set_and_cloned(estimator):
    assert clone(estimator).get_params() == estimator.get_params()
    assert clone(estimator).set_params(random_state=5).random_state == 5
