"""Single releases: a synopsis, ranges, a figure of quality, and what is made of them."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest

from secure_fedclust import (
    FKM,
    GOLD,
    DataError,
    FeCA,
    FederationWarning,
    FedGEM,
    KFed,
    Ledger,
    ParameterError,
    PrivacySpec,
    PrivacyWarning,
    noisy_nicv,
    private_ranges,
    release_synopsis,
    suggest_k,
)
from secure_fedclust.released import ReleasedSynopsis

TRUTH = np.array([[0.0, 0], [12, 0], [0, 12], [12, 12]])
MODELS = [FKM(4), KFed(4, n_local_clusters=4), FeCA(4, n_init=2), GOLD(4), FedGEM(4)]


def spec_of(d=2, **changed):
    values = {"epsilon": 4.0, "delta": 1e-5, "ranges": [(-6, 18)] * d}
    return PrivacySpec(**values | changed)


def make_clients(d=2, n=1500, seed=0):
    """Four clusters, in as many features as wanted."""
    rng = np.random.default_rng(seed)
    truth = np.tile(TRUTH, (1, 3))[:, :d]
    return {name: rng.normal(truth[np.arange(n) % 4]) for name in ("ada", "bob", "cy")}


@pytest.fixture(scope="module")
def synopses():
    return {
        d: release_synopsis(make_clients(d), privacy=spec_of(d), n_clusters=6, random_state=0)
        for d in (2, 4)
    }


def quietly(model, synopsis):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FederationWarning)
        return model.fit(synopsis)


each_width = pytest.mark.parametrize("d", [2, 4])


# The synopsis.


@each_width
def test_every_system_runs_on_one_synopsis_for_nothing(d, synopses):
    ledger = Ledger.create(None, epsilon=4.0, delta=1e-5)
    clients = make_clients(d)
    synopsis = release_synopsis(
        clients, privacy=spec_of(d), n_clusters=6, ledger=ledger, sampler="fast", random_state=0
    )
    charged = len(ledger.rows())
    for model in MODELS:
        quietly(model.set_params(random_state=0), synopsis)
        assert np.isfinite(model.cluster_centers_).all()
        assert model.guarantee_ == synopsis.guarantee
        assert model.privacy_spent_ == synopsis.spent
        assert model.client_names_ == list(clients)
        assert model.ledger_ is None and not hasattr(model, "labels_")
        assert model.result_.history == () and model.result_.anchors == synopsis.anchors
    assert len(ledger.rows()) == charged


@each_width
def test_clusters_are_found_in_a_synopsis(d, synopses):
    model = FKM(4, random_state=0).fit(synopses[d])
    truth = np.tile(TRUTH, (1, 3))[:, :d]
    distances = np.linalg.norm(truth[:, None] - model.cluster_centers_[None], axis=2)
    assert (distances.min(axis=1) < 1.5).all()
    points, weights = synopses[d].points()
    assert weights.sum() == pytest.approx(4500, rel=0.25)
    assert points.shape == (len(weights), d)


@each_width
def test_a_synopsis_survives_a_file_bit_by_bit(d, synopses, tmp_path):
    before = synopses[d]
    before.save(tmp_path / "synopsis.json")
    after = ReleasedSynopsis.load(tmp_path / "synopsis.json")
    for name in ("guarantee", "privacy", "spent", "anchors", "sampler", "feature_names"):
        assert getattr(after, name) == getattr(before, name)
    assert after.synopsis.radius == before.synopsis.radius
    assert after.synopsis.shared == before.synopsis.shared
    for client, cells in before.synopsis.cells.items():
        for name, value in vars(cells).items():
            np.testing.assert_array_equal(getattr(after.synopsis.cells[client], name), value)
    after.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "synopsis.json").read_text()
    for model in (FKM(15), KFed(4), GOLD(4), FedGEM(4), FeCA(4)):
        one = quietly(model.set_params(random_state=3), before).cluster_centers_
        two = quietly(model, after).cluster_centers_
        np.testing.assert_array_equal(one, two)
    assert suggest_k(after, random_state=0) == suggest_k(before, random_state=0)


def test_a_synopsis_keeps_names_of_features(tmp_path):
    frames = {n: pd.DataFrame(X, columns=["age", "bmi"]) for n, X in make_clients().items()}
    released = release_synopsis(frames, privacy=spec_of(), n_clusters=4, sampler="fast")
    released.save(tmp_path / "synopsis.json")
    loaded = ReleasedSynopsis.load(tmp_path / "synopsis.json")
    model = FKM(4, random_state=0).fit(loaded)
    assert list(model.feature_names_in_) == ["age", "bmi"]
    model.save(tmp_path / "model.json")
    assert json.loads((tmp_path / "model.json").read_text())["privacy"] is None


def test_the_guarantee_of_a_synopsis_goes_with_its_models(tmp_path):
    secure, fast = (
        release_synopsis(make_clients(n=50), privacy=spec_of(), n_clusters=4, sampler=sampler)
        for sampler in ("secure", "fast")
    )
    assert secure.guarantee.startswith("(epsilon=4, delta=1e-05)-differential privacy")
    # What a model's own parameters say does not matter: it ran on what was released.
    model = FKM(4, privacy=PrivacySpec.none(reason="test"), sampler="secure", random_state=0)
    assert quietly(model, secure).guarantee_ == secure.guarantee
    assert quietly(model, fast).guarantee_.startswith("NO DP CLAIM")
    fast.save(tmp_path / "synopsis.json")
    assert "NO DP CLAIM" in (tmp_path / "synopsis.json").read_text()


def test_what_is_released_is_all_that_is_saved_or_shown(tmp_path):
    rng = np.random.default_rng(1)
    clients = {"ada": rng.normal(5, 9, (437, 2)), "bob": rng.normal(5, 9, (523, 2))}
    synopsis = release_synopsis(clients, privacy=spec_of(), n_clusters=4, sampler="fast")
    synopsis.save(tmp_path / "synopsis.json")
    figure = noisy_nicv(clients, TRUTH, privacy=spec_of(), sampler="fast")
    ranges = private_ranges(clients, epsilon=50, delta=1e-5, largest=1e3, sampler="fast")
    texts = [(tmp_path / "synopsis.json").read_text(), *map(repr, (synopsis, figure, ranges))]
    for text in texts:
        for number in ("437", "523", "960"):
            assert f" {number}," not in text and f"={number}," not in text
        for X in clients.values():
            assert not any(repr(float(value)) in text for value in X[:50].ravel())
        assert "clipped" not in text and "left_out" not in text
    assert "\n" not in "".join(texts[1:])


GARBAGE = {
    "empty": "",
    "not json": "{",
    "a number": "7",
    "a list": "[1, 2]",
    "an empty table": "{}",
    "only a format": '{"format": "secure_fedclust synopsis 1"}',
    "another format": '{"format": "secure_fedclust model 1"}',
    "very deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=list(GARBAGE))
def test_files_that_are_no_synopsis_are_refused(content, tmp_path):
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(ParameterError, match=r"file\.json is not a synopsis"):
        ReleasedSynopsis.load(tmp_path / "file.json")


DAMAGES = {
    "no radius of a client": lambda c: c["radius"].pop("ada"),
    "counts in words": lambda c: c["cells"]["ada"].update(counts="many"),
    "counts of another length": lambda c: c["cells"]["ada"].update(counts=[1.0]),
    "missing counts": lambda c: c["cells"]["ada"].update(counts=[None] * 4),
    "no cells": lambda c: c.update(cells={}),
    "another width": lambda c: c["domain"].update(center=[0.0], scale=[1.0]),
    "no guarantee": lambda c: c.pop("guarantee"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_synopsis_is_refused(damage, synopses, tmp_path):
    synopses[2].save(tmp_path / "file.json")
    content = json.loads((tmp_path / "file.json").read_text())
    damage(content)
    (tmp_path / "file.json").write_text(json.dumps(content))
    with pytest.raises(ParameterError, match=r"file\.json is not a synopsis"):
        ReleasedSynopsis.load(tmp_path / "file.json")


def test_a_synopsis_of_nobody_is_a_synopsis():
    empty = {name: np.zeros((0, 2)) for name in "ab"}
    released = release_synopsis(empty, privacy=spec_of(), n_clusters=4, random_state=0)
    assert np.isfinite(quietly(FKM(2, random_state=0), released).cluster_centers_).all()


# The number of clusters.


@each_width
def test_the_right_number_of_separated_clusters_is_suggested(d, synopses):
    found = suggest_k(synopses[d], largest=6, random_state=0)
    assert found.best == 4
    assert set(found.scores) <= set(range(2, 7)) and found.scores[4] > found.scores[3]


@pytest.mark.parametrize(
    "given", [{"smallest": 1}, {"smallest": 5, "largest": 4}, {"largest": 0}, {"largest": 2.5}]
)
def test_numbers_that_cannot_be_tried_are_refused(given, synopses):
    with pytest.raises(ParameterError, match=r"smallest|largest"):
        suggest_k(synopses[2], **given)


# Ranges.


@pytest.mark.parametrize("place", [0.0, 500.0, -3e4])
def test_ranges_cover_about_what_was_asked_for(place):
    rng = np.random.default_rng(2)
    X = [place + rng.normal(0, [1, 30], (10_000, 2)) for _ in range(2)]
    found = private_ranges(
        X, epsilon=1.0, delta=1e-5, largest=1e6, coverage=0.98, sampler="fast"
    ).ranges
    every = np.concatenate(X)
    for (low, high), column, sd in zip(found, every.T, (1, 30), strict=True):
        assert ((column >= low) & (column <= high)).mean() > 0.96
        # Not so wide that most of the region is empty.
        assert high - low < max(20 * sd, 2.5 * abs(place))


def test_ranges_can_be_used_in_a_spec():
    clients = make_clients()
    bought = private_ranges(clients, epsilon=1.0, delta=1e-5, largest=1e3, sampler="fast")
    spec = PrivacySpec(epsilon=4.0, delta=1e-5, ranges=bought.ranges)
    model = FKM(4, privacy=spec, sampler="fast", random_state=0).fit(clients)
    distances = np.linalg.norm(TRUTH[:, None] - model.cluster_centers_[None], axis=2)
    assert (distances.min(axis=1) < 2).all()


def test_ranges_of_nobody_say_no_more_than_was_known():
    empty = {"a": np.zeros((0, 3))}
    with pytest.warns(PrivacyWarning, match="too few records for this much noise"):
        found = private_ranges(empty, epsilon=0.1, delta=1e-5, largest=50.0, sampler="fast")
    assert len(found.ranges) == 3
    for low, high in found.ranges:
        assert -50 <= low < high <= 50


def test_ranges_of_too_few_records_hold_most_of_them_or_come_with_a_warning():
    """A range that leaves out most records, with nothing said, would be worse than none."""
    silent = [1.0]
    for seed in range(20):
        clients = make_clients(n=100, seed=seed)
        every = np.concatenate(list(clients.values()))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = private_ranges(clients, epsilon=1.0, delta=1e-5, largest=100.0, sampler="fast")
        low, high = np.array(found.ranges).T
        inside = ((every >= low) & (every <= high)).mean(axis=0)
        silent += [] if caught else inside.tolist()
    assert np.mean(np.array(silent) < 0.5) < 0.1


@pytest.mark.parametrize("value", [0.0, -7.0, 1e-9, 1e6])
def test_equal_values_have_a_range_that_a_spec_accepts(value):
    X = np.full((5000, 1), value)
    found = private_ranges([X], epsilon=1.0, delta=1e-5, largest=1e6, sampler="fast").ranges
    spec = PrivacySpec(epsilon=1.0, delta=1e-5, ranges=found)
    [(low, high)] = spec.ranges
    assert low <= value <= high


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"largest": 0.0}, "largest=0.0"),
        ({"largest": float("inf")}, "largest=inf"),
        ({"coverage": 1.0}, "coverage=1.0: give a number from 0.5 to below 1"),
        ({"coverage": 0.2}, "coverage=0.2"),
        ({"epsilon": 0.0}, "epsilon=0.0"),
        ({"delta": 2.0}, "delta=2.0"),
        ({"adjacency": "both"}, "adjacency='both'"),
        ({"sampler": "numpy"}, "sampler='numpy'"),
    ],
)
def test_ranges_cannot_be_bought_on_impossible_terms(given, message):
    terms = {"epsilon": 1.0, "delta": 1e-5, "largest": 10.0, "sampler": "fast"} | given
    with pytest.raises(ParameterError, match=message):
        private_ranges([np.zeros((5, 1))], **terms)


def test_values_beyond_the_largest_count_at_the_edge():
    X = np.full((5000, 1), 300.0)
    terms = {"epsilon": 1.0, "delta": 1e-5, "largest": 100.0, "sampler": "fast"}
    with pytest.warns(PrivacyWarning, match="client 0: 100% of the records"):
        [(low, high)] = private_ranges([X], **terms).ranges
    assert low < high == 100.0


# The figure.


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@each_width
def test_the_figure_is_within_its_standard_error_of_the_truth(d, adjacency):
    clients = make_clients(d)
    centers = np.tile(TRUTH, (1, 3))[:, :d] + 0.5
    spec = spec_of(d, epsilon=1.0, adjacency=adjacency)
    every = np.concatenate(list(clients.values()))
    truth = np.square(every[:, None] - centers[None]).sum(axis=2).min(axis=1).mean()
    off = []
    for _ in range(60):
        figure = noisy_nicv(clients, centers, privacy=spec, cap=60.0, sampler="fast")
        assert 0 <= figure.value <= 60
        off.append((figure.value - truth) / figure.standard_error)
    assert np.abs(off).max() < 5
    # Nor is the error overstated: deviations are those of a standard normal law.
    assert 0.7 < np.std(off) < 1.35 and abs(np.mean(off)) < 5 / np.sqrt(60)


def test_by_default_squared_distances_up_to_the_edge_of_the_region_count():
    clients = make_clients()
    figure = noisy_nicv(clients, [[6.0, 6.0]], privacy=spec_of(epsilon=50.0), sampler="fast")
    every = np.concatenate(list(clients.values()))
    truth = np.square(every - 6).sum(axis=1).mean()
    assert abs(figure.value - truth) < 5 * figure.standard_error + 1e-3


def test_the_figure_is_about_the_centres_given_and_not_about_others():
    """A centre beyond the ranges is as far away as it is."""
    clients = {"a": np.full((3000, 2), 17.0)}
    spec = spec_of(epsilon=50.0)
    figure = noisy_nicv(clients, [[27.0, 17.0]], privacy=spec, cap=1000.0, sampler="fast")
    assert figure.value == pytest.approx(100, rel=0.05)


def test_a_smaller_cap_means_less_noise():
    clients = make_clients()
    errors = [
        noisy_nicv(clients, TRUTH, privacy=spec_of(), cap=cap, sampler="fast").standard_error
        for cap in (10.0, 100.0, 1000.0)
    ]
    assert errors == sorted(errors) and errors[2] > 10 * errors[0]


def test_the_figure_of_nobody_is_a_number():
    empty = {name: np.zeros((0, 2)) for name in "ab"}
    with pytest.warns(PrivacyWarning, match="the figure means nothing"):
        figure = noisy_nicv(empty, TRUTH, privacy=spec_of(), cap=10.0, sampler="fast")
    assert 0 <= figure.value <= 10 and np.isfinite(figure.standard_error)


@pytest.mark.parametrize(
    ("centers", "given", "message"),
    [
        ([[1.0]], {}, "centers: X has 1 features"),
        ([[1.0, np.nan]], {}, "centers: 1 of 1 records contain NaN"),
        ([[1.0, 2.0], [3.0]], {}, "centers"),
        (np.zeros((0, 2)), {}, "centers"),
        ("many", {}, "centers"),
        (TRUTH, {"cap": 0.0}, "cap=0.0"),
        (TRUTH, {"cap": float("nan")}, "cap=nan"),
    ],
)
def test_a_figure_of_something_impossible_is_refused_and_costs_nothing(centers, given, message):
    ledger = Ledger.create(None, epsilon=4.0, delta=1e-5)
    with pytest.raises((ParameterError, DataError), match=message):
        noisy_nicv(make_clients(n=5), centers, privacy=spec_of(), ledger=ledger, **given)
    assert ledger.rows() == []


# All of them.


def test_without_a_guarantee_there_is_nothing_to_buy():
    none = PrivacySpec.none(reason="test")
    clients = make_clients(n=5)
    with pytest.raises(ParameterError, match="no epsilon to work with: NO DP CLAIM"):
        release_synopsis(clients, privacy=none, n_clusters=2)
    with pytest.raises(ParameterError, match="no epsilon to work with"):
        noisy_nicv(clients, TRUTH, privacy=none)
    with pytest.raises(ParameterError, match="there is no default"):
        release_synopsis(clients, privacy=None, n_clusters=2)


def test_what_is_bought_adds_up_in_one_ledger(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=4.0, delta=1e-5).close()
    clients = make_clients()
    common = {"ledger": path, "sampler": "secure"}
    ranges = private_ranges(clients, epsilon=1.0, delta=1e-5, largest=100.0, **common)
    spec = PrivacySpec(epsilon=2.0, delta=1e-5, ranges=ranges.ranges)
    synopsis = release_synopsis(clients, privacy=spec, n_clusters=4, **common)
    small = PrivacySpec(epsilon=0.5, delta=1e-5, ranges=ranges.ranges)
    figure = noisy_nicv(clients, TRUTH, privacy=small, **common)
    with Ledger.open(path) as ledger:
        messages = [row.charge.message for row in ledger.rows("ada")]
        assert messages == ["ranges/histograms"] * 2 + ["cells", "quality/cost"]
        spent = [ranges.spent, synopsis.spent, figure.spent]
        assert [round(part["ada"], 2) for part in spent] == [1.0, 2.0, 0.5]
        ledger.verify(a for part in (ranges, synopsis, figure) for a in part.anchors.values())
        assert 2 < ledger.spent("ada") / ledger.limit.mu * 4 < 4
