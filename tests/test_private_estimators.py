"""Private runs through the front door: what they promise, refuse, say, keep and save."""

import json
import logging
import math
import pickle
import re
import sqlite3
import warnings

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

from secure_fedclust import (
    FKM,
    GOLD,
    DataError,
    FeCA,
    FedClustResult,
    FederationWarning,
    FedGEM,
    KFed,
    Ledger,
    LedgerError,
    ParameterError,
    PrivacySpec,
    PrivacyWarning,
    load_model,
    noisy_nicv,
    private_ranges,
    release_synopsis,
)
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.privacy import mechanism
from secure_fedclust.privacy.accounting import epsilon_of
from secure_fedclust.privacy.release import Releases
from secure_fedclust.protocols import fedgem
from secure_fedclust.protocols.clustering import Clustering
from secure_fedclust.protocols.session import Session
from secure_fedclust.run import open_run

TRUTH = np.array([[0.0, 0], [12, 0], [0, 12], [12, 12]])
NONE = PrivacySpec.none(reason="public data")


def estimators():
    return {
        "FKM": FKM(4),
        "FKM one_shot": FKM(4, one_shot=True),
        "FKM public": FKM(4, seeding="public"),
        "KFed": KFed(4, n_local_clusters=4),
        "FeCA": FeCA(4, n_init=3),
        "GOLD": GOLD(4),
        "FedGEM synopsis": FedGEM(4),
        "FedGEM sums": FedGEM(4, calibration="sums"),
        "FedGEM floor": FedGEM(4, calibration="floor"),
        "FedGEM theorem9": FedGEM(4, calibration="theorem9"),
    }


NAMES = list(estimators())
each = pytest.mark.parametrize("name", NAMES)
UNPROVED = {
    "seeding='local'": FedGEM(3, calibration="sums", seeding="local"),
    "enforce_floor=False": FedGEM(3, calibration="theorem9", enforce_floor=False),
}
each_unproved = pytest.mark.parametrize(("condition", "model"), UNPROVED.items(), ids=UNPROVED)


def spec_of(**changed):
    values = {"epsilon": 4.0, "delta": 1e-5, "ranges": [(-6, 18)] * 2, "public_size": 2000}
    return PrivacySpec(**values | changed)


def make_clients(n=2000, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(TRUTH[np.arange(n) % 4]) for name in ("ada", "bob", "cy")}


CLIENTS = make_clients()
FEW = make_clients(30)


def model_of(name, spec=None, **changed):
    common = {"privacy": spec or spec_of(), "sampler": "fast", "random_state": 0}
    return estimators()[name].set_params(**common | changed)


def quietly(model, clients, **given):
    """Fit, without warnings of poor results: they are not what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.simplefilter("ignore", FederationWarning)
        return model.fit(clients, **given)


@pytest.fixture(scope="module")
def fitted():
    """Each estimator fitted once, with noise that counts."""
    return {name: quietly(model_of(name, sampler="secure"), CLIENTS) for name in NAMES}


@pytest.fixture
def no_draw(monkeypatch):
    def refuse(sigma, size):
        raise AssertionError("noise was drawn")

    monkeypatch.setattr(mechanism, "fast_noise", refuse)
    monkeypatch.setattr(mechanism, "secure_noise", refuse)


# What it finds.


@pytest.mark.parametrize("name", ["FKM", "FKM one_shot", "FKM public", "KFed", "FeCA"])
def test_separated_clusters_are_found_in_spite_of_the_noise(name, fitted):
    centers = fitted[name].cluster_centers_
    distances = np.linalg.norm(TRUTH[:, None] - centers[None], axis=2)
    assert (distances.min(axis=1) < 2.5).all()
    assert len(set(fitted[name].predict(TRUTH).tolist())) == 4


def test_fedgem_finds_the_number_of_clusters_on_a_synopsis():
    model = FedGEM(4, final_radius=3.0, privacy=spec_of(epsilon=8.0), random_state=0)
    assert quietly(model.set_params(sampler="fast"), CLIENTS).n_clusters_ == 4


@each
def test_a_fitted_model_has_what_is_documented(name, fitted):
    model = fitted[name]
    assert model.client_names_ == ["ada", "bob", "cy"]
    assert model.cluster_centers_.shape == (model.n_clusters_, 2)
    assert np.isfinite(model.cluster_centers_).all()
    assert set(model.privacy_spent_) == set(CLIENTS)
    assert all(spent == pytest.approx(4.0, abs=1e-2) for spent in model.privacy_spent_.values())
    assert [len(labels) for labels in model.labels_] == [2000] * 3
    assert model.ledger_.clients() == ["ada", "bob", "cy"]
    model.ledger_.verify(model.result_.anchors.values())
    assert model.result_.sampler == "secure"
    assert PrivacySpec.from_dict(model.result_.privacy) == model.privacy


# What it promises.


@each
def test_the_guarantee_is_the_specs_sentence_and_says_what_it_covers(name, fitted):
    model = fitted[name]
    assert model.guarantee_ == spec_of().describe() + (
        "; for this run alone, as no ledger was given"
    )
    assert model.guarantee_ == model.result_.guarantee


def test_a_ledger_that_was_given_is_not_said_to_be_missing():
    ledger = Ledger.create(None, epsilon=9.0, delta=1e-5)
    model = model_of("FKM", sampler="secure", ledger=ledger).fit(CLIENTS)
    assert "no ledger was given" not in model.guarantee_


def test_with_a_ledger_the_guarantee_is_not_for_this_run_alone(tmp_path):
    Ledger.create(tmp_path / "l", epsilon=4.0, delta=1e-5).close()
    model = model_of("FKM", sampler="secure", ledger=tmp_path / "l").fit(CLIENTS)
    assert model.guarantee_ == spec_of().describe() + (
        "; for this run, and for all runs so far on the ledger together (epsilon=4, delta=1e-05)"
    )


@each
def test_a_result_is_one_line_with_its_guarantee(name, fitted):
    for text in (repr(fitted[name].result_), str(fitted[name].result_)):
        assert "\n" not in text
        assert fitted[name].guarantee_ in text


def everything_said(model, folder):
    """All places where a claim could be read."""
    model.result_.save(folder / "result.json")
    model.save(folder / "model.json")
    return [
        model.guarantee_,
        model.result_.guarantee,
        repr(model.result_),
        json.loads((folder / "result.json").read_text())["guarantee"],
        json.loads((folder / "model.json").read_text())["result"]["guarantee"],
        FedClustResult.load(folder / "result.json").guarantee,
        load_model(folder / "model.json").guarantee_,
    ]


@each
def test_fast_noise_is_no_basis_for_a_claim_anywhere(name, tmp_path):
    model = quietly(model_of(name), FEW)
    for text in everything_said(model, tmp_path):
        assert "NO DP CLAIM" in text and "sampler='fast'" in text
    assert json.loads((tmp_path / "result.json").read_text())["sampler"] == "fast"


def test_fast_noise_is_no_basis_for_a_claim_of_single_releases():
    for released in (
        release_synopsis(CLIENTS, privacy=spec_of(), n_clusters=3, sampler="fast"),
        noisy_nicv(CLIENTS, TRUTH, privacy=spec_of(), sampler="fast"),
        private_ranges(CLIENTS, epsilon=4, delta=1e-5, largest=100, sampler="fast"),
    ):
        assert released.guarantee.startswith("NO DP CLAIM") and released.sampler == "fast"


def test_without_privacy_the_reason_is_repeated(tmp_path):
    model = quietly(FKM(4, privacy=NONE, random_state=0), FEW)
    for text in everything_said(model, tmp_path):
        assert "NO DP CLAIM" in text and "public data" in text
    assert model.privacy_spent_ == {} and model.ledger_ is None
    assert model.result_.sampler is None


@each_unproved
def test_what_is_not_proved_is_refused_before_anything_is_charged(condition, model, no_draw):
    ledger = Ledger.create(None, epsilon=4.0, delta=1e-5)
    model = clone(model).set_params(privacy=spec_of(), ledger=ledger)
    with pytest.raises(ParameterError) as caught:
        model.fit(CLIENTS)
    assert str(caught.value).startswith(condition)
    assert "allow_unproved=True" in str(caught.value) and "NO DP CLAIM" in str(caught.value)
    assert ledger.rows() == []
    assert not hasattr(model, "result_")


@each_unproved
@pytest.mark.parametrize("sampler", ["secure", "fast"])
def test_what_is_not_proved_runs_on_demand_with_no_claim(condition, model, sampler, tmp_path):
    model = clone(model).set_params(privacy=spec_of(), allow_unproved=True, sampler=sampler)
    quietly(model.set_params(random_state=0), FEW)
    for text in everything_said(model, tmp_path):
        assert text.startswith(("NO DP CLAIM", "FedClustResult(")) and "NO DP CLAIM" in text
        assert condition in text


@pytest.mark.parametrize("word", ["no", "false", 0.5, None])
def test_running_what_is_not_proved_takes_a_plain_yes(word):
    """A word from a configuration file that reads "no" must not count as yes."""
    model = clone(UNPROVED["seeding='local'"])
    model.set_params(privacy=spec_of(), allow_unproved=word, sampler="fast", random_state=0)
    with pytest.raises(ParameterError):
        quietly(model, FEW)


@pytest.mark.parametrize("word", ["no", "false", 0.5])
def test_a_floor_is_enforced_or_not_by_a_plain_word(word):
    model = FedGEM(3, calibration="floor", enforce_floor=word, privacy=spec_of(), sampler="fast")
    with pytest.raises(ParameterError):
        quietly(model, FEW)
    with pytest.raises(ParameterError):
        quietly(FKM(3, one_shot=word, privacy=spec_of(), sampler="fast"), FEW)


def test_an_engine_s_clients_are_said_to_be_taken_at_their_word():
    spec = spec_of()
    model = model_of("FKM", sampler="secure")
    handlers = {}
    for name, X in CLIENTS.items():
        ledger = Ledger.create(None, epsilon=4.0, delta=1e-5)
        releases = Releases(name, spec, ledger, "secure")
        handlers[name] = model._client_for(spec)(X, spec, np.random.default_rng(), releases).handle
    model.fit(InProcessEngine(handlers))
    assert "provided that every client enforces the same spec" in model.guarantee_
    assert model.privacy_spent_["ada"] == pytest.approx(4.0, abs=1e-2)


def test_a_ledger_file_is_not_charged_for_what_has_no_guarantee(tmp_path, no_draw):
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=4.0, delta=1e-5).close()
    unproved = clone(UNPROVED["seeding='local'"]).set_params(
        privacy=spec_of(), ledger=path, allow_unproved=True
    )
    for model in (model_of("FKM", ledger=path), unproved):
        with pytest.raises(ParameterError, match=r"a run without a guarantee .* leave the ledger"):
            model.fit(CLIENTS)
    with Ledger.open(path) as ledger:
        assert ledger.rows() == []


def test_a_ledger_file_needs_clients_with_names(tmp_path, no_draw):
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=4.0, delta=1e-5).close()
    with pytest.raises(ParameterError, match="pass a mapping from names to records"):
        model_of("FKM", ledger=path, sampler="secure").fit(list(CLIENTS.values()))


# What it refuses.


@pytest.mark.parametrize(
    ("model", "spec", "message"),
    [
        (FKM(4, align="kmeans"), {}, "exact counts, which no noise covers: use align='index'"),
        (FKM(4), {"unit": "client"}, "unit='client' is not available .* protection='masking'"),
        (FKM(4), {"ranges": [(0, 1)]}, "ranges: 1 given, the records have 2 features; give one"),
        (FKM(4), {"ranges": [(0, 1)] * 3}, "ranges: 3 given, the records have 2 features"),
        (
            FKM(4),
            {"ranges": None, "bound": 1.0, "center": [0.0] * 3},
            "center: 3 given, the records have 2 features",
        ),
        (
            FedGEM(4, calibration="floor"),
            {"public_size": None},
            "calibration='floor' needs public_size in the privacy spec",
        ),
        (
            FedGEM(4, calibration="theorem9"),
            {"public_size": None},
            "calibration='theorem9' needs public_size",
        ),
        (FedGEM(4, calibration="floor", floor=0.5), {}, "floor=0.5: give a number from 1"),
        (FedGEM(4, calibration="noise"), {}, "calibration='noise': give one of synopsis"),
        (FKM(4, seeding="local"), {}, "seeding='local': give one of private, public"),
        (FedGEM(4, seeding="local"), {}, "seeding='local' has no effect with calibration='syn"),
        (FedGEM(4, floor=9), {}, "floor and enforce_floor have no effect with calibration='syn"),
        (FedGEM(4, calibration="sums", enforce_floor=False), {}, "enforce_floor have no effect"),
        (FKM(4, sampler="numpy"), {}, "sampler='numpy': give one of secure, fast"),
        (FKM(4, ledger=7), {}, "ledger=7: give a path, a Ledger or None"),
    ],
)
def test_what_cannot_be_private_is_refused_with_advice(model, spec, message, no_draw):
    model = clone(model).set_params(privacy=spec_of(**spec))
    if model.ledger is None:
        model.set_params(ledger=Ledger.create(None, epsilon=4.0, delta=1e-5))
    with pytest.raises(ParameterError, match=message):
        model.fit(CLIENTS)
    if isinstance(model.ledger, Ledger):
        assert model.ledger.rows() == []


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"unit": "client"}, "the ledger is for unit='client', the run for unit='record'"),
        ({"adjacency": "replace_one"}, "adjacency='replace_one', .* use the ledger's, or another"),
    ],
)
def test_a_ledger_for_something_else_is_refused(header, message, tmp_path, no_draw):
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=4.0, delta=1e-5, **header).close()
    with pytest.raises(LedgerError, match=message):
        model_of("FKM", ledger=path, sampler="secure").fit(CLIENTS)


def test_a_ledger_that_is_not_there_is_not_made_on_the_way(tmp_path, no_draw):
    path = tmp_path / "nowhere.sqlite"
    with pytest.raises(LedgerError, match=r"nowhere\.sqlite"):
        model_of("FKM", ledger=path, sampler="secure").fit(CLIENTS)
    assert not path.exists()


def test_a_file_that_is_no_ledger_is_refused(tmp_path, no_draw):
    path = tmp_path / "notes.txt"
    path.write_text("not a ledger")
    with pytest.raises(LedgerError):
        model_of("FKM", ledger=path, sampler="secure").fit(CLIENTS)
    assert path.read_text() == "not a ledger"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["FKM", "KFed", "FedGEM sums"])
def test_missing_values_are_refused_at_load_with_advice_and_nothing_is_charged(name, bad, no_draw):
    ledger = Ledger.create(None, epsilon=4.0, delta=1e-5)
    spoiled = {**CLIENTS, "bob": np.vstack([CLIENTS["bob"], [bad, 1.0]])}
    with pytest.raises(DataError, match=r"bob: 1 of 2001 records .* drop these records or fill"):
        model_of(name, ledger=ledger).fit(spoiled)
    assert ledger.rows() == []


@pytest.mark.parametrize("name", ["a\nb", "", "x" * 300])
def test_a_client_with_an_impossible_name_is_refused_by_an_error_that_says_so(name):
    with pytest.raises((ParameterError, DataError), match=r"name|client"):
        model_of("FKM").fit({name: CLIENTS["ada"]})


def test_ranges_too_wide_for_fedgems_scale_are_refused_before_anything_is_charged():
    ledger = Ledger.create(None, epsilon=4.0, delta=1e-5)
    spec = spec_of(ranges=[(0, 1e12)] * 2)
    model = FedGEM(3, calibration="sums", privacy=spec, sampler="fast", ledger=ledger)
    with pytest.raises(ParameterError, match=r"ranges|scale"):
        quietly(model, CLIENTS)
    assert ledger.rows() == []


# Awkward data.


@each
def test_a_bound_smaller_than_every_record_warns_and_still_runs(name):
    spec = spec_of(ranges=None, bound=0.01, center=[-20.0, -20.0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = model_of(name, spec).fit(FEW)
    told = [str(w.message) for w in caught if "outside the ranges or the bound" in str(w.message)]
    assert len(told) == 3 and told[0].startswith("ada: 100% of the records")
    assert all(issubclass(w.category, PrivacyWarning | FederationWarning) for w in caught)
    assert model.result_.nonprivate.clipped == dict.fromkeys(FEW, 1.0)
    assert np.isfinite(model.cluster_centers_).all()
    distance = np.linalg.norm(model.cluster_centers_ + 20, axis=1)
    assert (distance <= 0.01 * math.sqrt(2) + 1e-9).all()


def test_a_warning_about_clipping_names_the_line_that_called_fit():
    spec = spec_of(ranges=[(-6, 0), (-6, 0)])
    with pytest.warns(PrivacyWarning, match="9.% of the records lie outside") as caught:
        model_of("FKM", spec).fit(CLIENTS)
    assert {w.filename for w in caught} == {__file__}


def test_a_few_records_outside_are_not_worth_a_warning():
    spec = spec_of(ranges=[(-1, 14)] * 2)
    model = model_of("FKM", spec).fit(CLIENTS)
    assert 0 < model.result_.nonprivate.clipped["ada"] < 0.5


@each
@pytest.mark.parametrize(("n", "d"), [(0, 1), (0, 2), (0, 4), (1, 2), (2, 4)])
def test_fewer_records_than_clusters_or_none_at_all_run_to_the_end(name, n, d):
    spec = spec_of(ranges=[(-6, 18)] * d)
    clients = {name: X[:n].repeat(d, axis=1)[:, :d] for name, X in CLIENTS.items()}
    model = quietly(model_of(name, spec), clients)
    assert model.cluster_centers_.shape[1] == d
    assert np.isfinite(model.cluster_centers_).all()
    assert [len(labels) for labels in model.labels_] == [n] * 3
    assert not any(exchange.absent or exchange.rejected for exchange in model.result_.history)


@pytest.mark.parametrize("d", [1, 3])
def test_a_ball_is_as_good_as_ranges(d):
    spec = PrivacySpec(epsilon=4.0, delta=1e-5, bound=20.0, public_size=2000)
    rng = np.random.default_rng(0)
    clients = [rng.normal([[-9.0] * d] * 1000 + [[9.0] * d] * 1000) for _ in range(3)]
    for name in ("FKM", "KFed", "FedGEM sums"):
        model = quietly(model_of(name, spec), clients)
        assert np.isfinite(model.cluster_centers_).all()
    centers = FKM(2, privacy=spec, sampler="fast", random_state=0).fit(clients).cluster_centers_
    assert sorted(np.sign(centers[:, 0])) == [-1, 1]


@each
@pytest.mark.parametrize("epsilon", [1e-6, 100.0])
def test_the_smallest_and_the_largest_epsilon_run(name, epsilon):
    model = quietly(model_of(name, spec_of(epsilon=epsilon)), CLIENTS)
    assert np.isfinite(model.cluster_centers_).all()
    assert not any(exchange.absent or exchange.rejected for exchange in model.result_.history)


@pytest.mark.parametrize("epsilon", [1e-9, 1e9])
def test_epsilons_beyond_reason_are_refused_by_the_spec(epsilon):
    with pytest.raises(ParameterError, match="give a number from 1e-06 to 100"):
        spec_of(epsilon=epsilon)


@pytest.mark.parametrize("name", ["FKM", "KFed", "FedGEM sums"])
def test_whatever_a_spec_accepts_can_run(name):
    """The smallest epsilon and delta need the most noise; numbers must still fit a message."""
    spec = spec_of(epsilon=1e-6, delta=1e-30)
    model = quietly(model_of(name, spec, sampler="secure"), FEW)
    assert not any(exchange.absent or exchange.rejected for exchange in model.result_.history)


@each
def test_every_system_runs_for_changed_records_too(name):
    spec = spec_of(adjacency="replace_one")
    model = quietly(model_of(name, spec, sampler="secure"), FEW)
    assert "changing one (clients' sizes are public)" in model.guarantee_
    formulas = {row.charge.formula for row in model.ledger_.rows()}
    assert all(formula.endswith("/replace_one") for formula in formulas)


@pytest.mark.parametrize("size", [30, None])
def test_a_poor_signal_is_warned_about_with_what_would_do(size):
    """Without a public size the noisy number of records is as good."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model_of("KFed", spec_of(epsilon=0.1, public_size=size)).fit(FEW)
    told = "\n".join(str(w.message) for w in caught if w.category is PrivacyWarning)
    assert re.search(r"noise drowns the clusters: signal .* records a client.* would do", told)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("d", [2, 4])
def test_progress_does_not_pass_its_total(name, d):
    calls = []
    spec = spec_of(ranges=[(-6, 18)] * d, public_size=2000)
    clients = [np.tile(X, 2)[:200, :d] for X in CLIENTS.values()]
    model = model_of(name, spec)
    quietly(model, clients, on_progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == list(range(1, len(calls) + 1))
    assert max(done / total for done, total in calls) <= 1


# What it keeps to itself.


def numbers_in(text):
    return {float(x) for x in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", text)}


@each
def test_nothing_secret_shows_in_what_is_printed_saved_or_logged(name, tmp_path, caplog, capsys):
    caplog.set_level(logging.DEBUG)
    rng = np.random.default_rng(3)
    clients = {"ada": rng.normal(5, 9, (437, 2)), "bob": rng.normal(5, 9, (523, 2))}
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=4.0, delta=1e-5).close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = model_of(name, ledger=path, sampler="secure").fit(clients)
    model.result_.save(tmp_path / "result.json")
    model.save(tmp_path / "model.json")
    texts = [
        *(repr(x) for x in (model, model.result_, model.result_.nonprivate, model.ledger_)),
        *(str(x) for x in (model, model.result_, model.result_.nonprivate, model.ledger_)),
        *(path.read_text() for path in tmp_path.glob("*.json")),
        *(str(w.message) for w in caught),
        caplog.text,
        capsys.readouterr().out,
        repr([row.charge for row in model.ledger_.rows()]),
    ]
    values = {float(value) for X in clients.values() for value in X.ravel()}
    clipped = model.result_.nonprivate.clipped
    assert all(0 < share < 0.5 for share in clipped.values())
    for text in (text.replace(str(tmp_path), "") for text in texts):
        assert not values & numbers_in(text)
        assert not re.search(r"\b(437|523|960)\b", text)
        for share in clipped.values():
            assert str(share) not in text and f"{share:.0%}" not in text
    stored = json.loads((tmp_path / "result.json").read_text())
    assert not {"nonprivate", "labels", "clipped", "left_out"} & set(stored)
    loaded = FedClustResult.load(tmp_path / "result.json")
    assert not (loaded.nonprivate.labels or loaded.nonprivate.clipped or loaded.nonprivate.left_out)


def test_the_ledger_file_holds_no_record_and_no_exact_sum(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=4.0, delta=1e-5).close()
    model = model_of("FKM", ledger=path, sampler="secure").fit(CLIENTS)
    model.ledger_.close()
    stored = path.read_bytes()
    for value in CLIENTS["ada"][:200].ravel():
        assert value.tobytes() not in stored and repr(float(value)).encode() not in stored
    with sqlite3.connect(path) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(releases)")]
    connection.close()
    assert {"client", "mu", "sigma", "sensitivity"} <= set(columns)
    assert not {"value", "records", "labels", "n_records", "noise"} & set(columns)


def test_what_only_the_callers_side_knows_does_not_show_in_the_repr_of_a_run():
    model = model_of("FKM")
    spec = spec_of(ranges=[(-6, 14)] * 2)
    run = open_run(
        {"ada": CLIENTS["ada"][:1999]},
        spec=spec,
        client_class=model._client_for(spec),
        rng=np.random.default_rng(0),
    )
    text = repr(run)
    assert 0 < run.clipped["ada"] < 1
    assert str(run.clipped["ada"]) not in text
    assert "1999" not in text


# Files.


@each
def test_a_result_survives_a_file(name, fitted, tmp_path):
    result = fitted[name].result_
    result.save(tmp_path / "result.json")
    loaded = FedClustResult.load(tmp_path / "result.json")
    np.testing.assert_array_equal(loaded.centers, result.centers)
    assert json.dumps(loaded.to_dict()) == json.dumps(result.to_dict())
    assert loaded.anchors == result.anchors and loaded.spent == result.spent
    assert repr(loaded) == repr(result)
    fitted[name].ledger_.verify(loaded.anchors.values())


@each
def test_a_model_survives_a_file_and_predicts(name, fitted, tmp_path):
    model = fitted[name]
    model.save(tmp_path / "model.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FederationWarning)
        loaded = load_model(tmp_path / "model.json")
    assert type(loaded) is type(model)
    np.testing.assert_array_equal(loaded.predict(CLIENTS["ada"]), model.predict(CLIENTS["ada"]))
    assert loaded.get_params() == model.get_params()
    for attribute in ("guarantee_", "privacy_spent_", "client_names_", "n_features_in_"):
        assert getattr(loaded, attribute) == getattr(model, attribute)
    assert not hasattr(loaded, "labels_")
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "model.json").read_text()


def test_a_saved_model_can_be_fitted_again(tmp_path):
    model_of("FKM").fit(CLIENTS).save(tmp_path / "model.json")
    loaded = load_model(tmp_path / "model.json")
    assert loaded.fit(CLIENTS).n_clusters_ == 4


def test_a_loaded_model_can_be_fitted_whatever_the_random_state_was(tmp_path):
    for state in (None, 7, np.random.default_rng(0), np.random.RandomState(0)):
        model_of("FKM", random_state=state).fit(CLIENTS).save(tmp_path / "model.json")
        loaded = load_model(tmp_path / "model.json")
        assert loaded.fit(CLIENTS).n_clusters_ == 4


def test_names_of_features_survive_a_file(tmp_path):
    frame = pd.DataFrame(CLIENTS["ada"], columns=["age", "bmi"])
    model_of("FKM").fit([frame]).save(tmp_path / "model.json")
    loaded = load_model(tmp_path / "model.json")
    assert list(loaded.feature_names_in_) == ["age", "bmi"]
    loaded.predict(frame)
    with pytest.raises(ValueError, match="feature names"):
        loaded.predict(frame[["bmi", "age"]])


GARBAGE = {
    "empty": "",
    "not json": "{",
    "a number": "7",
    "a list": "[1, 2]",
    "nothing": "null",
    "an empty table": "{}",
    "only a format": '{"format": "secure_fedclust model 1"}',
    "another format": '{"format": "secure_fedclust result 1", "centers": []}',
    "very deep": "[" * 100_000,
    "very deep table": '{"format":' * 100_000,
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=list(GARBAGE))
def test_files_that_are_something_else_are_refused(content, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(content)
    for load in (FedClustResult.load, load_model):
        with pytest.raises(ParameterError, match=r"file\.json is not a (result|model)"):
            load(path)


def test_a_pickle_is_not_unpacked(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("it was unpacked",))

    path = tmp_path / "model.json"
    path.write_bytes(pickle.dumps(Bomb()))
    for load in (FedClustResult.load, load_model):
        with pytest.raises(ParameterError):
            load(path)


DAMAGES = {
    "centres in words": lambda c: c["result"].update(centers="many"),
    "ragged centres": lambda c: c["result"].update(centers=[[1, 2], [3]]),
    "no centres": lambda c: c["result"].update(centers=[]),
    "missing numbers": lambda c: c["result"].update(centers=[[None, 1]] * 4),
    "half an exchange": lambda c: c["result"].update(history=[{"stage": "cells"}]),
    "half an anchor": lambda c: c["result"].update(anchors={"ada": [1]}),
    "no guarantee": lambda c: c["result"].pop("guarantee"),
    "another class": lambda c: c.update({"class": "Exception"}),
    "an unknown parameter": lambda c: c["parameters"].update(colour="red"),
    "an impossible spec": lambda c: c.update(privacy={"epsilon": -1}),
    "no parameters": lambda c: c.update(parameters=None),
    "a number of clients": lambda c: c.update(clients=7),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_model_is_refused(damage, tmp_path):
    model = model_of("FKM").fit(CLIENTS)
    model.save(tmp_path / "model.json")
    content = json.loads((tmp_path / "model.json").read_text())
    damage(content)
    (tmp_path / "model.json").write_text(json.dumps(content))
    with pytest.raises(ParameterError, match=r"model\.json is not a model"):
        load_model(tmp_path / "model.json")


# scikit-learn's manners.


@pytest.mark.parametrize("name", ["FKM", "KFed", "FeCA", "GOLD", "FedGEM sums"])
def test_estimators_can_be_cloned_with_a_ledger_file(name, tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=20.0, delta=1e-5).close()
    model = quietly(model_of(name, ledger=path, sampler="secure"), FEW)
    twin = clone(model)
    assert twin.get_params() == model.get_params() and twin.ledger == path
    assert not hasattr(twin, "result_")
    quietly(twin, FEW)
    assert len(twin.ledger_.rows()) == 2 * len(model.result_.spent) * (
        len(model.ledger_.rows("ada")) // 2
    )


def test_estimators_can_be_cloned_with_an_open_ledger():
    ledger = Ledger.create(None, epsilon=20.0, delta=1e-5)
    model = model_of("FKM", ledger=ledger)
    assert clone(model).ledger is ledger


@each
def test_parameters_can_be_read_and_set(name):
    model = estimators()[name]
    parameters = model.get_params()
    assert {"privacy", "ledger", "sampler", "random_state"} <= set(parameters)
    assert type(model)(**parameters).get_params() == parameters
    spec = spec_of()
    assert model.set_params(privacy=spec).privacy is spec
    with pytest.raises(ValueError, match="Invalid parameter"):
        model.set_params(epsilon=1)


@each
def test_nothing_of_a_private_fit_outlives_one_without_privacy(name, tmp_path):
    model = quietly(model_of(name), FEW)
    private = set(vars(model))
    quietly(model.set_params(privacy=NONE), FEW)
    assert set(vars(model)) == private
    assert model.privacy_spent_ == {} and model.ledger_ is None
    assert model.guarantee_ == NONE.describe()
    assert model.result_.anchors == {} and model.result_.sampler is None
    quietly(model.set_params(privacy=spec_of()), FEW)
    assert set(model.privacy_spent_) == set(FEW) and model.ledger_ is not None


def test_labels_do_not_outlive_the_fit_they_are_of():
    model = model_of("FKM").fit(CLIENTS)
    synopsis = release_synopsis(CLIENTS, privacy=spec_of(), n_clusters=4, sampler="fast")
    model.fit(synopsis)
    assert not hasattr(model, "labels_") and model.ledger_ is None


def test_a_seed_fixes_the_algorithm_and_not_the_noise():
    one, two = (model_of("FKM", random_state=0).fit(CLIENTS).cluster_centers_ for _ in range(2))
    assert not np.array_equal(one, two)


# Figures.


def test_the_radius_of_fedgem_is_right_on_average_where_it_is_large():
    """One component starts a known way off; noise adds to its squared radius on average."""
    rng = np.random.default_rng(0)
    spec = spec_of(epsilon=0.5, ranges=[(-10, 10)] * 2)
    X = rng.normal([3.0, 0.0], 0.1, (2000, 2))
    truth = float(np.square(X.mean(axis=0)).sum())
    assert truth == pytest.approx(9, abs=0.1)
    rounds = fedgem.Rounds("floor", "public", 1.0, 0.0, {"a": 1000.0}, True, 2000)
    radii = {"sums": [], "floor": [], "floor, noise left in": []}
    for _ in range(250):
        for calibration in ("sums", "floor"):
            ledger = Ledger.create(None, epsilon=0.5, delta=1e-5)
            releases = Releases("a", spec, ledger, "fast")
            client = fedgem.PrivateFedGEMClient(X, spec, rng, releases)
            session = Session(InProcessEngine({"a": client.handle}), spec, 2)
            request = {"centers": np.zeros((1, 2)), "radius": 1.0, "n_steps": 1, "share": 0.01}
            if calibration == "sums":
                found = fedgem._ask_sums(session, {"a": request})["a"]
            else:
                found = fedgem._ask_means(session, {"a": request}, rounds)["a"]
                moved = (found.maximisers - found.start) * session.domain.scale
                radii["floor, noise left in"].append(float(np.square(moved).sum()))
            radii[calibration].append(float(found.ball(session.domain)[1][0]))
    off = {
        name: (np.mean(values) - truth) / (np.std(values) / math.sqrt(250))
        for name, values in radii.items()
    }
    # A little too large, because what would be negative counts as zero.
    assert abs(off["sums"]) < 5 and -5 < off["floor"] < 6
    assert off["floor, noise left in"] > off["floor"] + 2


def test_what_was_spent_is_what_the_ledger_says(fitted):
    for model in fitted.values():
        for client, spent in model.privacy_spent_.items():
            totals = model.ledger_.totals(client)
            assert spent == pytest.approx(epsilon_of(1e-5, totals.mu), rel=1e-6)


def test_a_clustering_says_how_many_records_only_if_that_was_released():
    assert Clustering(TRUTH).n_records is None
