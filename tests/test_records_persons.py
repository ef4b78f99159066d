"""Persons with several records: a limit that is enforced, and a guarantee that is theirs."""

import json
import math
import re

import numpy as np
import pandas as pd
import pytest

from secure_fedclust import (
    FKM,
    GOLD,
    DataError,
    Ledger,
    ParameterError,
    PrivacySpec,
    PrivacyWarning,
    noisy_nicv,
    private_ranges,
    release_synopsis,
)
from secure_fedclust.datasets import read_clients
from secure_fedclust.privacy import release
from secure_fedclust.records import check_clients, clients_from_frames

COMMON = {"sampler": "fast", "random_state": 0}


def spec_of(most=2, **changed):
    values = {"epsilon": 20.0, "delta": 1e-5, "ranges": [(-8, 8)] * 2, "records_per_person": most}
    return PrivacySpec(**values | changed)


def make_frame(seed=0):
    """Persons 0 to 19 at two sites; person i has i % 5 + 1 records at each, not in a row."""
    rng = np.random.default_rng(seed)
    persons = np.concatenate([[f"p{i}"] * (i % 5 + 1) for i in range(20)])
    parts = []
    for site in ("oslo", "bergen"):
        order = rng.permutation(len(persons))
        points = rng.normal(size=(len(persons), 2))
        parts.append(
            pd.DataFrame({"x": points[:, 0], "site": site, "patient": persons, "y": points[:, 1]})
            .iloc[order]
            .reset_index(drop=True)
        )
    return pd.concat(parts, ignore_index=True)


FRAME = make_frame()
LEFT_OUT = 4 * (0 + 0 + 1 + 2 + 3)


def given_as(form, frame, folder):
    """The same records in each of the forms that have a column for persons, and fit's arguments."""
    by_site = {site: part.drop(columns="site") for site, part in frame.groupby("site", sort=False)}
    if form == "frame":
        return frame, {"client_column": "site", "person_column": "patient"}
    if form == "mapping":
        return by_site, {"person_column": "patient"}
    if form == "list":
        return list(by_site.values()), {"person_column": "patient"}
    if form == "one csv":
        frame.to_csv(folder / "all.csv", index=False)
        return read_clients(folder / "all.csv", "site", person_column="patient"), {}
    for site, part in by_site.items():
        part.to_csv(folder / f"{site}.csv", index=False)
    return read_clients(folder, person_column="patient"), {}


each_form = pytest.mark.parametrize("form", ["frame", "mapping", "list", "one csv", "csv folder"])


@each_form
def test_each_person_counts_with_the_first_records_at_each_client(form, tmp_path):
    clients, columns = given_as(form, FRAME, tmp_path)
    model = FKM(3, privacy=spec_of(2), **COMMON).fit(clients, **columns)
    left_out = model.result_.nonprivate.left_out
    assert list(left_out.values()) == [LEFT_OUT, LEFT_OUT]
    assert [len(labels) for labels in model.labels_] == [60 - LEFT_OUT] * 2
    assert list(model.feature_names_in_) == ["x", "y"]


@each_form
def test_the_records_kept_are_the_same_in_every_form(form, tmp_path):
    clients, columns = given_as(form, FRAME, tmp_path)
    kept, _ = check_clients(clients, **columns).limit_persons(3)
    first = FRAME.groupby(["site", "patient"], sort=False).head(3)
    for records, site in zip(
        (kept.values() if form != "csv folder" else (kept["oslo"], kept["bergen"])),
        ("oslo", "bergen"),
        strict=True,
    ):
        wanted = first.loc[first["site"] == site, ["x", "y"]].to_numpy()
        np.testing.assert_allclose(records, wanted)


@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_nobody_has_more_records_than_the_limit_and_nobody_loses_all(most):
    clients = check_clients(FRAME, "site", "patient")
    kept, left_out = clients.limit_persons(most)
    for site in clients:
        part = FRAME[FRAME["site"] == site]
        owner = {tuple(row): who for *row, who in part[["x", "y", "patient"]].to_numpy().tolist()}
        counts = pd.Series([owner[tuple(row)] for row in kept[site].tolist()]).value_counts()
        assert len(counts) == 20 and counts.max() <= most
        assert counts.sum() + left_out[site] == len(part)


def test_one_person_at_two_clients_is_limited_at_each_of_them():
    frame = pd.DataFrame({"site": ["a", "b", "a", "b"], "x": [1.0, 2, 3, 4], "who": "ada"})
    kept, left_out = check_clients(frame, "site", "who").limit_persons(1)
    assert [X.tolist() for X in kept.values()] == [[[1.0]], [[2.0]]]
    assert left_out == {"a": 1, "b": 1}


def test_the_guarantee_for_a_person_is_stated_and_weaker():
    spec = spec_of(3, epsilon=1.0, public_size=60)
    model = FKM(3, privacy=spec, **{**COMMON, "sampler": "secure"})
    with pytest.warns(PrivacyWarning, match="noise drowns the clusters"):
        model.fit(FRAME, client_column="site", person_column="patient")
    claim = model.guarantee_
    assert claim.startswith(f"(epsilon={spec.person_epsilon():.4g}, delta=1e-05)-differential")
    assert "for each person at one client, of whom at most 3 records are used" in claim
    assert "for each record" not in claim
    assert spec.person_epsilon() > 3
    assert claim in repr(model.result_)


def exact_answers(frame, spec, monkeypatch):
    """What a client would send without noise, as one vector, with sensitivity and guarantee."""
    seen = []
    original = release.noise

    def watch(exact, sigma, sampler):
        seen.append(exact)
        return original(exact, sigma, sampler)

    with monkeypatch.context() as patched:
        patched.setattr(release, "noise", watch)
        released = release_synopsis(
            {"a": frame}, privacy=spec, n_clusters=2, person_column="who", random_state=0
        )
    [exact] = seen
    flat = np.concatenate([field.ravel() for field in exact.fields.values()]).astype(float)
    return flat, exact.sensitivity.value, released.guarantee


def test_where_privacy_of_records_is_claimed_one_record_moves_no_more_than_was_charged(
    monkeypatch,
):
    """Without its first record a person counts with the next: that is two changes, not one."""
    frame = pd.DataFrame({"x": [7.0, -7, 0], "y": [7.0, -7, 0], "who": ["ada", "ada", "bob"]})
    (one, sensitivity, claim), (two, _, _) = (
        exact_answers(table, spec_of(1), monkeypatch) for table in (frame, frame.iloc[1:])
    )
    assert np.linalg.norm(one - two) > sensitivity
    assert "record, against" not in claim


def test_the_privacy_of_a_record_is_not_claimed_for_all_runs_together_either(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=20.0, delta=1e-5).close()
    model = FKM(3, privacy=spec_of(2), ledger=path, random_state=0)
    model.fit(FRAME, client_column="site", person_column="patient")
    assert not re.search(r"\(epsilon=20, delta=1e-05\) (a|for each) record", model.guarantee_)


def test_a_claim_for_persons_says_that_it_is_about_one_client():
    """Where a person is at two clients, what they release adds up to the root of two as much."""
    claim = spec_of(2).describe()
    assert re.search(r"one client|at each client|no(body| person) .*two|only one", claim)


@pytest.mark.parametrize("changed", [{"adjacency": "replace_one"}, {"unit": "client"}])
def test_a_limit_of_records_goes_with_records_added_or_removed(changed):
    with pytest.raises(ParameterError, match="records_per_person goes with unit='record'"):
        spec_of(2, **changed)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_person_moves_no_more_than_its_records_were_charged_for(most, monkeypatch):
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(rng.uniform(-8, 8, (12, 2)), columns=["x", "y"])
    frame["who"] = [f"p{i % 3}" for i in range(12)]
    everybody, sensitivity, _ = exact_answers(frame, spec_of(most), monkeypatch)
    without, _, _ = exact_answers(frame[frame["who"] != "p1"], spec_of(most), monkeypatch)
    moved = np.linalg.norm(everybody - without)
    assert 0 < moved <= most * sensitivity
    assert moved > math.sqrt(most) * sensitivity / 10


def test_how_many_were_left_out_stays_with_the_client(tmp_path):
    model = FKM(3, privacy=spec_of(2), **COMMON)
    model.fit(FRAME, client_column="site", person_column="patient")
    assert set(model.result_.nonprivate.left_out.values()) == {LEFT_OUT}
    model.result_.save(tmp_path / "result.json")
    model.save(tmp_path / "model.json")
    for text in (
        (tmp_path / "result.json").read_text(),
        (tmp_path / "model.json").read_text(),
        repr(model),
        repr(model.result_),
        repr(model.result_.nonprivate),
        str(model.result_),
    ):
        assert "left_out" not in text and "patient" not in text and "p13" not in text
    assert "nonprivate" not in json.loads((tmp_path / "result.json").read_text())


def test_the_ledger_knows_nothing_of_persons(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=20.0, delta=1e-5).close()
    model = FKM(3, privacy=spec_of(2), ledger=path, random_state=0)
    model.fit(FRAME, client_column="site", person_column="patient")
    model.ledger_.close()
    stored = path.read_bytes()
    assert b"oslo" in stored
    assert b"p13" not in stored and b"patient" not in stored


@pytest.mark.parametrize("missing", [None, np.nan, pd.NA])
@pytest.mark.parametrize("form", ["frame", "mapping"])
def test_records_of_nobody_are_refused_and_nothing_is_charged(form, missing, tmp_path):
    frame = FRAME.copy()
    frame["patient"] = frame["patient"].astype(object)
    frame.loc[[3, 7], "patient"] = missing
    clients, columns = given_as(form, frame, tmp_path)
    ledger = Ledger.create(None, epsilon=20.0, delta=1e-5)
    with pytest.raises(DataError, match="oslo: 2 of 60 records have nothing in the person column"):
        FKM(3, privacy=spec_of(2), ledger=ledger, **COMMON).fit(clients, **columns)
    assert ledger.rows() == []


def test_records_of_nobody_are_refused_in_files_too(tmp_path):
    frame = FRAME.copy()
    frame.loc[[3, 7], "patient"] = ""
    with pytest.raises(DataError, match="2 of 60 records have nothing in the person column"):
        given_as("one csv", frame, tmp_path)


@pytest.mark.parametrize(
    "clients",
    [
        [np.zeros((5, 2))],
        {"a": np.zeros((5, 2))},
        [pd.DataFrame({"x": [1.0], "y": [2.0]})],
    ],
    ids=["list", "mapping", "frames"],
)
def test_a_limit_without_a_column_for_persons_is_refused(clients):
    ledger = Ledger.create(None, epsilon=20.0, delta=1e-5)
    for model in (FKM(2), GOLD(2)):
        model.set_params(privacy=spec_of(2), ledger=ledger, **COMMON)
        with pytest.raises(ParameterError, match=r"records_per_person=2 .* name the person_column"):
            model.fit(clients)
    with pytest.raises(ParameterError, match=r"records_per_person=2 .* name the person_column"):
        release_synopsis(clients, privacy=spec_of(2), n_clusters=2, ledger=ledger)
    assert ledger.rows() == []


def test_a_column_for_persons_needs_named_columns():
    model = FKM(2, privacy=spec_of(2), **COMMON)
    with pytest.raises(ParameterError, match="person_column='who' needs DataFrames"):
        model.fit([np.zeros((5, 2))], person_column="who")


def test_a_column_for_persons_that_is_not_there_is_named():
    model = FKM(2, privacy=spec_of(2), **COMMON)
    with pytest.raises(DataError, match="'who' is missing"):
        model.fit(FRAME[["x", "y", "site"]], client_column="site", person_column="who")
    with pytest.raises(ParameterError, match="both the person column and a feature"):
        clients_from_frames({"a": FRAME}, columns=["x", "patient"], person_column="patient")


def test_a_column_for_persons_without_a_limit_is_refused():
    """Who names it expects more than a promise about single records."""
    ledger = Ledger.create(None, epsilon=20.0, delta=1e-5)
    model = FKM(3, privacy=spec_of(None), ledger=ledger, **COMMON)
    with pytest.raises(ParameterError, match="give records_per_person too"):
        model.fit(FRAME, client_column="site", person_column="patient")
    assert ledger.rows() == []


def test_a_run_without_privacy_uses_all_records_of_all_persons():
    model = FKM(3, privacy=PrivacySpec.none(reason="test"), random_state=0)
    model.fit(FRAME, client_column="site", person_column="patient")
    assert [len(labels) for labels in model.labels_] == [60, 60]


def test_a_figure_can_be_bought_for_persons_too(tmp_path):
    """From files, which know who is who, and from tables, with the column named."""
    clients, _ = given_as("one csv", FRAME, tmp_path)
    common = {"privacy": spec_of(2), "sampler": "fast"}
    figure = noisy_nicv(clients, [[0, 0]], **common)
    assert "at most 2 records are used" in figure.guarantee
    assert not hasattr(figure, "left_out")
    columns = {"client_column": "site", "person_column": "patient"}
    assert (
        "at most 2 records are used" in noisy_nicv(FRAME, [[0, 0]], **columns, **common).guarantee
    )


def test_ranges_of_persons_can_be_bought_or_the_advice_can_be_followed(tmp_path):
    """There is no privacy spec in which `private_ranges` could be told a limit."""
    clients, _ = given_as("one csv", FRAME, tmp_path)
    try:
        private_ranges(clients, epsilon=50, delta=1e-5, largest=10.0, sampler="fast")
    except ParameterError as error:
        assert "privacy spec" not in str(error)


def test_persons_are_told_apart_by_value_and_not_by_type():
    frame = pd.DataFrame({"x": [1.0, 2, 3, 4], "who": pd.Categorical(["a", "a", "b", "b"])})
    kept, _ = clients_from_frames({"a": frame}, person_column="who").limit_persons(1)
    assert kept["a"].ravel().tolist() == [1, 3]
    frame["who"] = [7, 7, 8, 8]
    kept, _ = clients_from_frames({"a": frame}, person_column="who").limit_persons(1)
    assert kept["a"].ravel().tolist() == [1, 3]


def test_one_person_written_as_number_and_as_text_is_one_person_or_refused():
    frame = pd.DataFrame({"x": [1.0, 2, 3], "who": pd.Series([7, "7", "8"], dtype=object)})
    try:
        clients = clients_from_frames({"a": frame}, person_column="who")
    except DataError:
        return
    assert clients.limit_persons(1)[0]["a"].ravel().tolist() == [1, 3]


def test_a_table_without_records_is_a_client_too_in_a_private_run():
    frames = {"a": FRAME[["x", "y", "patient"]], "b": FRAME[["x", "y", "patient"]].iloc[:0]}
    model = FKM(3, privacy=spec_of(2), **COMMON).fit(frames, person_column="patient")
    assert [len(labels) for labels in model.labels_][1] == 0
