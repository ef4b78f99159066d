"""FedCRef and DeepFeCA through the front door: what they find, refuse, say, keep and save."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.metrics import adjusted_rand_score

from secure_fedclust import (
    BudgetExceeded,
    DataError,
    DeepFeCA,
    FedClustResult,
    FedCRef,
    FederationWarning,
    Ledger,
    ParameterError,
    PrivacySpec,
    PrivacyWarning,
    SecureFedClustError,
    load_model,
)

CORNERS = np.array([[0.1, 0.1, 0.9, 0.9], [0.9, 0.9, 0.1, 0.1], [0.9, 0.1, 0.9, 0.1]])
NONE = PrivacySpec.none(reason="test")
SPEC = PrivacySpec(epsilon=20.0, delta=1e-5, ranges=[(0, 1)] * 4, public_size=60)


def truth(n=60):
    return np.arange(n) % 3


def records(n=60, seed=0):
    rng = np.random.default_rng([8, seed])
    return np.clip(CORNERS[truth(n)] + 0.03 * rng.normal(size=(n, 4)), 0, 1)


CLIENTS = {name: records(seed=seed) for seed, name in enumerate(("ada", "bob", "cy"))}
EASY = {"hidden": (3, 2), "start_epochs": 60, "n_rounds": 4, "local_epochs": 5, "batch_size": 16}
QUICK = {"hidden": (2,), "start_epochs": 1, "n_rounds": 1, "theta": 1e6, "alpha": 0.0}


def fedcref(**changed):
    common = {"learning_rate": 0.01, "theta": 1.5, "max_iter": 2, "privacy": NONE}
    return FedCRef(**{"n_local_clusters": 3, **EASY, **common, **changed})


def quick(**changed):
    common = {"max_iter": 1, "batch_size": 64, "privacy": NONE}
    return FedCRef(**{"n_local_clusters": 3, **QUICK, **common, **changed})


def deepfeca(**changed):
    common = {"hidden": (8,), "n_features_out": 4, "n_rounds": 2, "n_init": 2, "privacy": NONE}
    return DeepFeCA(**{"n_clusters": 3, **common, **changed})


def fast(**changed):
    """For private runs, whose noise is not what is tested."""
    return {"privacy": SPEC, "sampler": "fast", **changed}


def quietly(model, clients=CLIENTS, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.simplefilter("ignore", FederationWarning)
        return model.fit(clients, **options)


@pytest.fixture(scope="module")
def fitted():
    return {"FedCRef": fedcref().fit(CLIENTS), "DeepFeCA": deepfeca().fit(CLIENTS)}


each = pytest.mark.parametrize("name", ["FedCRef", "DeepFeCA"])


# What it finds.


@each
def test_separated_clusters_are_found(name, fitted):
    model = fitted[name]
    assert model.n_clusters_ == 3
    labels = np.concatenate(model.labels_)
    assert adjusted_rand_score(np.tile(truth(), 3), labels) == 1
    fresh = model.predict(records(90, seed=50))
    assert adjusted_rand_score(truth(90), fresh) == 1


def test_groups_links_and_labels_of_fedcref_say_the_same(fitted):
    model = fitted["FedCRef"]
    graph = model.result_.association
    clusters = [tuple(each) for each in graph["clusters"]]
    assert len(set(clusters)) == len(clusters) == len(graph["groups"])
    assert {client for client, _ in clusters} == set(CLIENTS)
    for a, b in graph["links"]:
        assert a < b
        assert clusters[a][0] != clusters[b][0]
        assert graph["groups"][a] == graph["groups"][b] >= 0
    linked = {place for link in graph["links"] for place in link}
    assert linked == {place for place, group in enumerate(graph["groups"]) if group >= 0}
    assert max(graph["groups"]) + 1 == model.n_clusters_ == graph["iterations"][-1]["groups"]
    assert len(model.cluster_centers_) == 3
    for client, labels, places in zip(CLIENTS, model.labels_, model.clusters_, strict=True):
        group_of = dict(zip(clusters, graph["groups"], strict=True))
        assert labels.tolist() == [group_of[client, place] for place in places]


def test_centres_of_fedcref_are_means_of_the_groups_records(fitted):
    model = fitted["FedCRef"]
    X, labels = np.concatenate(list(CLIENTS.values())), np.concatenate(model.labels_)
    for group, center in enumerate(model.cluster_centers_):
        np.testing.assert_allclose(center, X[labels == group].mean(axis=0))


def test_deepfeca_makes_features_of_length_one_and_probes_them(fitted):
    model = fitted["DeepFeCA"]
    found = model.transform(records(30, seed=3))
    assert found.shape == (30, 4)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1)
    assert model.n_features_in_ == 4
    X, test = records(60, seed=4), records(60, seed=5)
    assert model.probe(X, truth(), test, truth()) > 0.9


def test_a_network_that_is_not_trained_finds_clusters_all_the_same():
    assert deepfeca(n_rounds=0).fit(CLIENTS).n_clusters_ == 3


def test_convolutions_take_records_as_images():
    images = {name: np.tile(X, 4) for name, X in CLIENTS.items()}
    assert deepfeca(backbone="conv", hidden=(), n_rounds=1).fit(images).n_clusters_ == 3
    with pytest.raises(ParameterError, match="no square image"):
        deepfeca(backbone="conv").fit({name: X[:, :3] for name, X in CLIENTS.items()})


def test_clusters_that_are_linked_to_none_are_said_to_be_none():
    model = quick(theta=0.0, alpha=1.0, start_epochs=9)
    with pytest.warns(FederationWarning, match="no clusters of different clients were linked"):
        model.fit(CLIENTS)
    assert model.n_clusters_ == 0
    assert {int(label) for labels in model.labels_ for label in labels} == {-1}
    with pytest.raises(DataError, match="no clusters were linked"):
        model.predict(records(3))


def test_a_model_that_has_found_nothing_can_be_kept(tmp_path):
    model = quietly(quick(theta=0.0, alpha=1.0, start_epochs=9))
    model.save(tmp_path / "model.json")
    assert load_model(tmp_path / "model.json").n_clusters_ == 0


@pytest.mark.parametrize(
    "numbers",
    [2, np.int64(2), [3, 2, 1], (1, 2, 3), np.array([2, 2, 2]), dict.fromkeys(CLIENTS, 2)],
)
def test_numbers_of_local_clusters_are_given_in_many_ways(numbers):
    model = quietly(quick(n_local_clusters=numbers))
    most = np.broadcast_to(list(numbers.values()) if isinstance(numbers, dict) else numbers, 3)
    for places, k in zip(model.clusters_, most, strict=True):
        assert places.max() < k


# Small and awkward clients.


@pytest.mark.parametrize("make", [fedcref, deepfeca])
def test_pixels_up_to_255_are_warned_of(make):
    clients = {name: 255 * X for name, X in CLIENTS.items()}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        make().fit(clients)
    assert any("divide pixels by 255" in str(each.message) for each in heard)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("make", [quick, deepfeca], ids=["FedCRef", "DeepFeCA"])
def test_a_client_with_fewer_records_than_a_batch_takes_part(make, n):
    model = quietly(make(), CLIENTS | {"few": records(n, seed=9)})
    assert len(model.labels_[3]) == n
    assert np.isfinite(model.cluster_centers_).all()


@pytest.mark.parametrize("make", [quick, deepfeca], ids=["FedCRef", "DeepFeCA"])
def test_clients_whose_records_are_all_the_same_break_nothing(make):
    model = quietly(make(), CLIENTS | {"flat": np.full((30, 4), 0.5)})
    assert np.isfinite(model.cluster_centers_).all()


def test_a_model_that_is_best_for_no_record_leaves_no_cluster():
    labels = [np.arange(60) % 5 for _ in CLIENTS]
    model = quietly(fedcref(n_local_clusters=5, initial=labels, start_epochs=10, max_iter=3))
    for client, places in zip(CLIENTS, model.clusters_, strict=True):
        n_models = len(model.result_.networks[f"models of {client}"])
        assert n_models <= 5
        assert places.max() < n_models
        assert np.isfinite(model.result_.networks[f"models of {client}"]).all()


@pytest.mark.parametrize("wild", [1e-300, 1e20, 1e200])
@pytest.mark.parametrize("make", [quick, deepfeca], ids=["FedCRef", "DeepFeCA"])
def test_records_out_of_all_proportion_end_in_finite_results_or_typed_errors(make, wild):
    try:
        model = quietly(make(), {name: wild * X for name, X in CLIENTS.items()})
    except SecureFedClustError:
        return
    assert np.isfinite(model.cluster_centers_).all()
    for array in model.result_.networks.values():
        assert np.isfinite(array).all()


# What it is given.


WRONG = [
    (fedcref, "n_local_clusters", 0, "n_local_clusters of ada=0"),
    (fedcref, "n_local_clusters", 2.5, "n_local_clusters of ada=2.5"),
    (fedcref, "n_local_clusters", [3, 3], "2 numbers for 3 clients"),
    (fedcref, "n_local_clusters", {"ada": 3}, "give one number for each of"),
    (fedcref, "n_local_clusters", "three", "n_local_clusters of ada='three'"),
    (fedcref, "n_rounds", 0, "n_rounds=0"),
    (fedcref, "local_epochs", True, "local_epochs=True"),
    (fedcref, "start_epochs", -1, "start_epochs=-1"),
    (fedcref, "batch_size", 1.5, r"batch_size=1\.5"),
    (fedcref, "hidden", (), r"hidden=\(\)"),
    (fedcref, "hidden", 8, "hidden=8"),
    (fedcref, "hidden", (8, 0), "hidden=0"),
    (fedcref, "hidden", ("8",), "hidden='8'"),
    (fedcref, "learning_rate", 0.0, r"learning_rate=0\.0"),
    (fedcref, "learning_rate", np.nan, "learning_rate=nan"),
    (fedcref, "learning_rate", "fast", "learning_rate='fast'"),
    (fedcref, "alpha", 1.5, r"alpha=1\.5"),
    (fedcref, "alpha", None, "alpha=None"),
    (fedcref, "theta", -0.1, r"theta=-0\.1"),
    (fedcref, "theta", np.nan, "theta=nan"),
    (fedcref, "tau", True, "tau=True"),
    (fedcref, "tau", 2, "tau=2"),
    (fedcref, "normalisation", "max", "normalisation='max'"),
    (fedcref, "max_iter", 0, "max_iter=0"),
    (fedcref, "clip", 0, "clip=0"),
    (fedcref, "clip", np.inf, "clip=inf"),
    (fedcref, "allow_unproved", "yes", "allow_unproved='yes'"),
    (fedcref, "initial", "random", "initial='random'"),
    (fedcref, "initial", None, "initial"),
    (fedcref, "initial", 5, "initial"),
    (fedcref, "sampler", "slow", "sampler='slow'"),
    (deepfeca, "n_clusters", 0, "n_clusters=0"),
    (deepfeca, "n_labels", 0, "n_labels=0"),
    (deepfeca, "n_rounds", -1, "n_rounds=-1"),
    (deepfeca, "n_rounds", 1.5, r"n_rounds=1\.5"),
    (deepfeca, "local_epochs", 0, "local_epochs=0"),
    (deepfeca, "backbone", "transformer", "backbone='transformer'"),
    (deepfeca, "hidden", "256", "hidden='256'"),
    (deepfeca, "n_features_out", 0, "n_features_out=0"),
    (deepfeca, "n_init", 0, "n_init=0"),
    (deepfeca, "batch_size", 0, "batch_size=0"),
    (deepfeca, "learning_rate", -1.0, r"learning_rate=-1\.0"),
    (deepfeca, "clip", np.nan, "clip=nan"),
    (deepfeca, "privacy", None, "privacy=None"),
]


@pytest.mark.parametrize(
    ("make", "name", "value", "named"),
    WRONG,
    ids=[f"{make.__name__} {name}={value!r}" for make, name, value, _ in WRONG],
)
def test_a_parameter_that_cannot_be_is_named_with_its_value(make, name, value, named):
    with pytest.raises(ParameterError, match=named):
        make(**{name: value}).fit(CLIENTS)


@pytest.mark.parametrize("value", [1e5, 1e300])
@pytest.mark.parametrize("make", [quick, deepfeca], ids=["FedCRef", "DeepFeCA"])
def test_a_rate_beyond_what_clients_accept_is_a_typed_error(make, value):
    with pytest.raises(SecureFedClustError, match="learning_rate"):
        quietly(make(learning_rate=value))


LABELS = {name: truth() for name in CLIENTS}


@pytest.mark.parametrize("initial", [LABELS, list(LABELS.values()), tuple(LABELS.values())])
def test_a_run_begins_with_the_clusters_that_it_was_given(initial):
    model = fedcref(initial=initial).fit(CLIENTS)
    assert model.n_clusters_ == 3
    assert adjusted_rand_score(np.tile(truth(), 3), np.concatenate(model.labels_)) == 1


def test_clients_in_a_list_have_their_labels_in_a_list():
    model = quietly(quick(initial=list(LABELS.values())), list(CLIENTS.values()))
    assert len(model.labels_) == 3


@pytest.mark.parametrize(
    ("initial", "kind", "named"),
    [
        (LABELS | {"bob": truth(59)}, DataError, "59 labels for the 60 records of bob"),
        (LABELS | {"bob": truth() - 1}, ParameterError, "initial of bob"),
        (LABELS | {"bob": truth() * 1.0}, ParameterError, "initial of bob"),
        (LABELS | {"bob": truth()[:, None]}, ParameterError, "initial of bob"),
        (LABELS | {"bob": ["a"] * 60}, ParameterError, "initial of bob"),
        ({"ada": truth()}, ParameterError, "no labels for bob"),
        ([truth(), truth()], ParameterError, "one array for each client"),
        ([truth(), truth(), truth(), truth()], ParameterError, "one array for each client"),
        ([truth(), truth(10), truth()], DataError, "10 labels for the 60 records of bob"),
    ],
)
def test_labels_that_do_not_fit_are_refused(initial, kind, named):
    with pytest.raises(kind, match=named):
        quick(initial=initial).fit(CLIENTS)


def test_labels_that_were_given_are_in_no_file(tmp_path):
    odd = {name: np.where(truth() == 0, 987_654_321, truth()) for name in CLIENTS}
    model = quietly(quick(initial=odd))
    model.save(tmp_path / "model.json")
    model.result_.save(tmp_path / "result.json")
    for name in ("model.json", "result.json"):
        text = (tmp_path / name).read_text()
        assert "987654321" not in text
    assert '"labels"' in (tmp_path / "model.json").read_text()


def test_parameters_are_stored_as_given_and_a_clone_is_the_same():
    for model in (fedcref(initial=LABELS, n_local_clusters=[3, 3, 3]), deepfeca(n_labels=9)):
        again = clone(model)
        for name, value in model.get_params().items():
            np.testing.assert_equal(again.get_params()[name], value)
    hidden = [3, 2]
    assert FedCRef(hidden=hidden).hidden is hidden


@each
def test_fitting_again_gives_the_same(name, fitted):
    model = fitted[name]
    again = clone(model).fit(CLIENTS)
    np.testing.assert_array_equal(again.cluster_centers_, model.cluster_centers_)
    other = clone(model).set_params(random_state=5).fit(CLIENTS)
    first = next(iter(model.result_.networks.values()))
    assert not np.array_equal(first, next(iter(other.result_.networks.values())))


# What it keeps.


@each
def test_a_model_is_saved_and_loaded_without_a_pickle(name, fitted, tmp_path):
    model = fitted[name]
    model.save(tmp_path / "model.json")
    json.loads((tmp_path / "model.json").read_text())
    again = load_model(tmp_path / "model.json")
    X = records(40, seed=20)
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert again.result_.association == model.result_.association
    assert again.n_features_in_ == 4
    for key, array in model.result_.networks.items():
        np.testing.assert_array_equal(again.result_.networks[key], array)
        assert again.result_.networks[key].dtype.kind == array.dtype.kind
    model.result_.save(tmp_path / "result.json")
    assert FedClustResult.load(tmp_path / "result.json").n_clusters == 3


@pytest.mark.parametrize("change", ["dtype", "data", "shape", "finite"])
@each
def test_weights_that_were_tampered_with_are_not_loaded(name, change, fitted, tmp_path):
    fitted[name].save(tmp_path / "model.json")
    content = json.loads((tmp_path / "model.json").read_text())
    key = {"FedCRef": "groups", "DeepFeCA": "weights"}[name]
    packed = content["result"]["networks"][key]
    nan = np.full(np.prod(packed["shape"]), np.nan).tobytes()
    packed |= {
        "dtype": {"dtype": "|O"},
        "data": {"data": packed["data"][:-8]},
        "shape": {"shape": [2, 2]},
        "finite": {"data": __import__("base64").b64encode(nan).decode()},
    }[change]
    (tmp_path / "model.json").write_text(json.dumps(content))
    with pytest.raises(ParameterError, match="not a model that this version can read"):
        load_model(tmp_path / "model.json")


@each
def test_records_of_another_width_are_refused(name, fitted):
    with pytest.raises(DataError, match="4"):
        fitted[name].predict(np.zeros((3, 5)))


# With differential privacy.


@pytest.mark.parametrize("make", [quick, deepfeca], ids=["FedCRef", "DeepFeCA"])
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"adjacency": "replace_one"}, "adjacency='replace_one'"),
        ({"records_per_person": 2}, "records_per_person"),
        ({"unit": "client"}, "unit='client'"),
    ],
)
def test_what_has_no_proof_is_refused_in_words(make, changed, named):
    spec = dataclasses.replace(SPEC, **changed)
    clients = CLIENTS
    with pytest.raises(ParameterError, match=named):
        make(privacy=spec).fit(clients)


def test_fedcref_cannot_hide_whole_clients():
    spec = dataclasses.replace(SPEC, unit="client", protection="masking")
    with pytest.raises(ParameterError, match="unit='client'"):
        quick(privacy=spec).fit(CLIENTS)


@pytest.mark.parametrize("make", [quick, deepfeca], ids=["FedCRef", "DeepFeCA"])
def test_masks_without_noise_are_refused(make):
    with pytest.raises(ParameterError, match="protection='masking' without epsilon"):
        make(privacy=PrivacySpec.none(reason="test", protection="masking")).fit(CLIENTS)


def test_labels_of_ones_own_have_no_guarantee():
    with pytest.raises(ParameterError, match="allow_unproved"):
        quick(**fast(initial=LABELS)).fit(CLIENTS)
    model = quietly(quick(**fast(initial=LABELS, allow_unproved=True)))
    assert model.guarantee_.startswith("NO DP CLAIM")
    assert "NO DP CLAIM" in repr(model.result_)


def test_the_papers_normalisation_has_no_noisy_form():
    for allowed in (False, True):
        with pytest.raises(ParameterError, match="minmax"):
            quick(**fast(normalisation="minmax", allow_unproved=allowed)).fit(CLIENTS)


def test_more_local_clusters_than_a_row_of_the_ledger_has_room_for_are_refused():
    with pytest.raises(ParameterError, match="n_local_clusters=21"):
        quietly(quick(**fast(n_local_clusters=21)))


@pytest.mark.parametrize("make", [quick, deepfeca], ids=["FedCRef", "DeepFeCA"])
def test_a_private_run_with_secure_noise_has_a_guarantee(make):
    model = quietly(make(privacy=SPEC), {name: np.tile(X, (4, 1)) for name, X in CLIENTS.items()})
    assert model.guarantee_.startswith(SPEC.describe())
    model.ledger_.verify(model.result_.anchors.values())
    assert all(0 < spent <= 20.0 + 1e-6 for spent in model.privacy_spent_.values())


@pytest.mark.parametrize("make", [quick, deepfeca], ids=["FedCRef", "DeepFeCA"])
def test_a_ledger_with_too_little_left_stops_the_run_before_it_begins(make):
    ledger = Ledger.create(None, epsilon=5.0, delta=1e-5)
    with pytest.raises(BudgetExceeded, match="Nothing was charged"):
        make(privacy=SPEC, ledger=ledger, sampler="fast").fit(CLIENTS)
    assert not ledger.rows()


@pytest.mark.parametrize("make", [quick, deepfeca], ids=["FedCRef", "DeepFeCA"])
def test_a_private_model_predicts_and_is_saved(make, tmp_path):
    many = {name: np.tile(X, (5, 1)) for name, X in CLIENTS.items()}
    model = quietly(make(**fast()), many)
    X = np.vstack([records(20, seed=20), 100 + records(3)])
    labels = model.predict(X)
    assert labels.min() >= 0 and labels.max() < model.n_clusters_
    model.save(tmp_path / "model.json")
    np.testing.assert_array_equal(load_model(tmp_path / "model.json").predict(X), labels)


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("make", [quick, deepfeca], ids=["FedCRef", "DeepFeCA"])
def test_a_private_client_without_records_takes_part_like_any_other(make, n):
    many = {name: np.tile(X, (5, 1)) for name, X in CLIENTS.items()}
    model = quietly(make(**fast()), many | {"few": records(n)})
    assert not [x for x in model.result_.history if "few" in (*x.absent, *x.rejected)]
    assert len(model.labels_[3]) == n
    assert len(model.ledger_.rows("few")) == len(model.ledger_.rows("ada"))


@pytest.mark.parametrize("make", [quick, deepfeca], ids=["FedCRef", "DeepFeCA"])
def test_networks_cannot_be_trained_on_a_synopsis(make):
    from secure_fedclust import release_synopsis

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        kept = release_synopsis(CLIENTS, privacy=SPEC, n_clusters=3, sampler="fast")
    with pytest.raises(ParameterError, match="a synopsis has none"):
        make().fit(kept)
