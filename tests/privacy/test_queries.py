"""Neighbouring data sets through the very path that is released: whole numbers of grid steps."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.spatial.distance import cdist

from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy import sensitivity as formulas
from secure_fedclust.privacy.mechanism import Bounded, Noisy, exponent_for
from secure_fedclust.privacy.queries import (
    AssignedSums,
    CellSums,
    Cost,
    FloorMeans,
    Histograms,
    Marks,
    Moments,
    SoftSums,
    clip_message,
    nearest,
    responsibilities,
)
from secure_fedclust.privacy.sensitivity import ADJACENCIES

BLOCK = 1 << 14
RADIUS = 0.6
FLOOR = 5
# Cells are far apart, so that a residual of the whole radius can point anywhere.
CENTERS = np.array([[0.0, 0.0], [0.0, 3.0], [3.0, 0.0]])
SCALE = np.array([20.0, 30.0])
SOFT = SoftSums(CENTERS, SCALE, RADIUS, 1.0)


def turned(X):
    """Cells that have nothing to do with distances, yet with each record by itself."""
    return np.where(np.abs(X[:, 1]) > 1, 2, 0)


def marked(n_marks):
    """Marks by how far a record lies to the right: none on the left, all beyond the last."""

    def marks_of(X):
        return nearest(X, CENTERS), X[:, :1] > np.arange(n_marks) / 100

    return Marks(3, n_marks, marks_of)


QUERIES = {
    "cells": CellSums(CENTERS, RADIUS, 0.5),
    "cells, heavy counts": CellSums(CENTERS, RADIUS, 1.5),
    "cells, squares": CellSums(CENTERS, RADIUS, 0.2, 0.8),
    "cells, all of weight one": CellSums(CENTERS, RADIUS, 1.0, 1.0),
    "soft": SOFT,
    "soft, heavy counts": SoftSums(CENTERS, SCALE, RADIUS, 1.5),
    "soft, vague": SoftSums(CENTERS, np.ones(2), RADIUS, 1.0),
    "moments": Moments(2),
    "moments, mostly sums": Moments(2, (0.1, 0.8, 0.1)),
    "histograms": Histograms(np.array([[-1.0, -0.5, 0.0, 1.0], [0.0, 0.1, 0.2, 0.3]])),
    "cost": Cost(CENTERS, SCALE, 4.0),
    "assigned": AssignedSums(CENTERS, RADIUS, 0.5, cells_of=turned),
    "assigned, squares": AssignedSums(CENTERS, RADIUS, 0.2, 0.8, cells_of=turned),
    "marks, none": marked(0),
    "marks, few": marked(3),
    "marks, many": marked(12),
}
MEANS = {
    "means": FloorMeans(SOFT, FLOOR),
    "means, low floor": FloorMeans(SOFT, 2),
    "means, vague": FloorMeans(QUERIES["soft, vague"], FLOOR),
    "means, printed bound": FloorMeans(SOFT, FLOOR, printed_bound=True),
}
LOOSE = {"soft, vague", "means, vague", "means, printed bound"}


def grid(query, adjacency, mu=0.5):
    return exponent_for(query.sensitivity(adjacency).value, mu) - query.extra_bits


def answers(query, adjacency, *data):
    exponent = grid(query, adjacency)
    return [query.answer(np.asarray(X, dtype=float), adjacency, exponent) for X in data]


def vector(bounded):
    return np.concatenate([field.ravel() for field in bounded.fields.values()])


def squared_distance(first, second):
    """In whole numbers, which cannot overflow."""
    steps = vector(first).astype(object) - vector(second).astype(object)
    return sum(int(step) ** 2 for step in steps)


def assert_within(first, second):
    assert first.sensitivity == second.sensitivity
    assert squared_distance(first, second) <= Fraction(first.sensitivity.value) ** 2


def share_of_bound(first, second):
    return math.sqrt(squared_distance(first, second)) / first.sensitivity.value


def near(center, *offset):
    return CENTERS[center] + RADIUS * np.array(offset, dtype=float)


def worst_pair(name, adjacency):
    """Data sets that are as far apart as the bound says."""
    replaced = adjacency == "replace_one"
    query = (QUERIES | MEANS)[name]
    first = near(0, 1, 0)
    if isinstance(query, FloorMeans):
        if replaced and query.floor < 1 + math.sqrt(2):
            return [first], [near(0, -1, 0)]
        others = [near(0, -1, 0)] * int(query.floor) + [near(1, -1, 0)] * int(query.floor)
        return [*others, first], [*others, near(1, 1, 0)] if replaced else others
    if isinstance(query, Moments):
        _, sums, squares = query.shares
        cosine = max(-1.0, -sums / squares / 2)
        bound = math.sqrt(2)
        first = [bound, 0.0]
        second = [bound * cosine, bound * math.sqrt(1 - cosine**2)]
    elif isinstance(query, Histograms):
        first, second = [-2.0, -2.0], [0.5, 0.15]
    elif isinstance(query, Cost):
        first, second = CENTERS[0], near(0, 50, 50)
    elif isinstance(query, Marks):
        second = near(0, -1, 0) if query.n_marks > 4 else near(1, 1, 0)
    else:
        squares = getattr(query, "square_weight", 0.0)
        other_cell = 2 * (query.count_weight**2 + 1 + squares**2 / 4) > 4
        second = near(1, 1, 0) if other_cell else near(0, -1, 0)
    return [first], ([second] if replaced else np.empty((0, 2)))


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("name", [name for name in QUERIES | MEANS if name not in LOOSE])
def test_a_worst_pair_reaches_the_stated_sensitivity_and_no_more(name, adjacency):
    first, second = answers((QUERIES | MEANS)[name], adjacency, *worst_pair(name, adjacency))
    assert_within(first, second)
    assert share_of_bound(first, second) >= 0.99


def awkward_records(rng, n):
    """Records at the bound and just off it, on borders, far away, tiny, and anywhere."""
    angles = rng.uniform(0, 2 * math.pi, n)
    circle = np.column_stack([np.cos(angles), np.sin(angles)])
    at = CENTERS[rng.integers(3, size=n)]
    kinds = np.stack(
        [
            at + RADIUS * circle,
            at + np.nextafter(RADIUS, 1) * circle,
            at + RADIUS * np.round(circle),
            at + rng.uniform(0, 2, (n, 1)) * circle,
            CENTERS[[0]] + [0.0, 1.5] + np.outer(rng.normal(size=n), [1, 0]),
            math.sqrt(2) * circle,
            1e6 * rng.normal(size=(n, 2)),
            1e140 * circle,
            5e-324 * rng.integers(-9, 9, (n, 2)),
            1e-310 * circle,
            np.full((n, 2), 1 / math.sqrt(2)),
            rng.normal(size=(n, 2)),
        ]
    )
    return kinds[rng.integers(len(kinds), size=n), np.arange(n)]


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("name", QUERIES)
def test_no_pair_of_awkward_records_exceeds_the_sensitivity(name, adjacency):
    query = QUERIES[name]
    rng = np.random.default_rng(3)
    X = awkward_records(rng, 120)
    (empty,) = answers(query, adjacency, np.empty((0, 2)))
    single = answers(query, adjacency, *X[:, None])
    if adjacency == "add_remove":
        for bounded in single:
            assert_within(bounded, empty)
        return
    # These answers are sums over records: what others there are makes no difference.
    steps = np.array([vector(bounded) for bounded in single])
    apart = ((steps[:, None] - steps).astype(float) ** 2).sum(axis=2)
    i, j = np.unravel_index(apart.argmax(), apart.shape)
    assert_within(single[i], single[j])
    best, record, other = apart[i, j], X[i], X[j]
    for scale in np.geomspace(0.3, 1e-6, 100):
        moved = record + scale * rng.normal(size=2), other + scale * rng.normal(size=2)
        first, second = answers(query, adjacency, *np.array(moved)[:, None])
        assert_within(first, second)
        if squared_distance(first, second) > best:
            best, (record, other) = squared_distance(first, second), moved


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("name", MEANS)
def test_no_neighbouring_data_sets_move_floored_means_too_far(name, adjacency):
    query = MEANS[name]
    rng = np.random.default_rng(4)
    for _ in range(150):
        others = awkward_records(rng, rng.integers(0, 16))
        if rng.random() < 0.5:  # all on one side of their centres
            others = CENTERS[rng.integers(3, size=len(others))] - [RADIUS, 0]
        record, replacement = awkward_records(rng, 2)
        first = np.vstack([others, record])
        second = np.vstack([others, replacement]) if adjacency == "replace_one" else others
        assert_within(*answers(query, adjacency, first, second))


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("name", QUERIES | MEANS)
def test_truncation_is_allowed_for_however_coarse_the_grid(name, adjacency):
    query = (QUERIES | MEANS)[name]
    rng = np.random.default_rng(5)
    for exponent in (-4, -5, -7):
        for _ in range(40):
            records = awkward_records(rng, 2)
            others = near(0, -1, 0) + rng.uniform(-0.1, 0.1, (rng.integers(7), 2))
            if rng.random() < 0.5:
                records[0] = near(0, *rng.uniform(-1, 1, 2))
            first = np.vstack([others, records[:1]])
            second = np.vstack([others, records[1:]]) if adjacency == "replace_one" else others
            pair = (
                query.answer(X, adjacency, exponent - query.extra_bits) for X in (first, second)
            )
            assert_within(*pair)


@pytest.mark.parametrize("printed", [False, True])
def test_means_of_very_many_records_keep_their_bound(printed):
    """Sums of products must not wrap around: means are no linear function of them."""
    query = FloorMeans(SoftSums(np.zeros((1, 1)), np.ones(1), 1.0, 1.0), 1000, printed)
    radius = math.floor(math.ldexp(1.0, -grid(query, "add_remove")))
    n = 2**63 // (radius * (2**16 - 1))
    X = np.full((n + 1, 1), 2.0)
    first, second = answers(query, "add_remove", X[:-1], X)
    assert_within(first, second)
    assert second.fields["means"].tolist() == [[radius]]


def test_means_without_the_floor_do_not_keep_the_bound_they_state():
    """What the floor is for; nothing but a demonstration asks for them."""
    for printed in (False, True):
        query = FloorMeans(SOFT, 50, printed, enforced=False)
        others = np.tile(near(0, -1, 0), (200, 1))
        with_one, without = answers(query, "add_remove", [*others, near(1, 1, 0)], others)
        assert share_of_bound(with_one, without) > 5


def test_means_can_be_asked_for_with_a_high_floor():
    query = FloorMeans(SOFT, 1000)
    for adjacency, second in (("add_remove", np.empty((0, 2))), ("replace_one", [near(0, -1, 0)])):
        assert_within(*answers(query, adjacency, [near(0, 1, 0)], second))


@pytest.mark.parametrize("far", [1e9, 1e40, 1e100])
def test_centres_and_records_as_far_away_as_messages_allow_break_nothing(far):
    centers = far * np.array([[1.0, 0.0], [0.0, -1.0], [0.0, 0.0]])
    soft = SoftSums(centers, SCALE, RADIUS, 1.0)
    for query in (
        CellSums(centers, RADIUS, 0.5, 1.0),
        CellSums(centers[:2], RADIUS, 0.5),
        soft,
        FloorMeans(soft, FLOOR),
        Cost(centers, SCALE, 4.0),
        Moments(2),
    ):
        pool = np.vstack([centers, -centers[:2], awkward_records(np.random.default_rng(1), 8)])
        nothing = np.empty((0, 2))
        for record in pool[:, None]:
            assert_within(*answers(query, "add_remove", record, nothing))
            assert_within(*answers(query, "replace_one", record, pool[:1]))


records = arrays(float, (2, 2), elements=st.floats(-1e9, 1e9, allow_subnormal=True))


@settings(max_examples=40)
@given(records, st.sampled_from(ADJACENCIES), st.floats(1e-4, 30))
def test_whatever_the_records_and_the_cost_the_bound_holds(pair, adjacency, mu):
    for name, query in (QUERIES | MEANS).items():
        exponent = grid(query, adjacency, mu)
        first = query.answer(pair[:1], adjacency, exponent)
        second = pair[1:] if adjacency == "replace_one" else np.empty((0, 2))
        assert_within(first, query.answer(second, adjacency, exponent))
        real = query.sensitivity(adjacency).value
        steps = math.ldexp(first.sensitivity.value, exponent)
        assert steps == pytest.approx(real, rel=1e-4), name


@pytest.mark.parametrize("name", QUERIES)
@pytest.mark.parametrize("n", [0, 1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_record_adds_its_own_contribution_whatever_others_there_are(name, n):
    rng = np.random.default_rng(n)
    query = QUERIES[name]
    X = awkward_records(rng, n + 1)
    more, less, alone = answers(query, "add_remove", X, X[:-1], X[-1:])
    np.testing.assert_array_equal(vector(more) - vector(less), vector(alone))


@pytest.mark.parametrize("n", [0, 3, BLOCK - 1, BLOCK, BLOCK + 1])
def test_sums_behind_means_are_those_of_single_records(n):
    X = awkward_records(np.random.default_rng(n), n + 1)
    for more, less, alone in zip(
        *(QUERIES["soft, vague"].exact(data, -20) for data in (X, X[:-1], X[-1:])), strict=True
    ):
        np.testing.assert_array_equal(more - less, alone)


def test_moments_in_several_blocks_are_those_of_single_records():
    d = 80
    block = (1 << 22) // (d * (d + 1) // 2)
    X = np.random.default_rng(0).normal(size=(block + 2, d))
    for n in (block - 1, block, block + 1):
        more, less, alone = answers(Moments(d), "add_remove", X[: n + 1], X[:n], X[n : n + 1])
        np.testing.assert_array_equal(vector(more) - vector(less), vector(alone))


@pytest.mark.parametrize("name", QUERIES | MEANS)
def test_the_order_of_records_does_not_matter(name):
    rng = np.random.default_rng(5)
    X = awkward_records(rng, BLOCK + 77)
    first, *rest = answers(
        (QUERIES | MEANS)[name], "add_remove", X, X[::-1], rng.permutation(X), np.asfortranarray(X)
    )
    for other in rest:
        np.testing.assert_array_equal(vector(first), vector(other))


@pytest.mark.parametrize("d", [1, 2, 3, 5, 8, 16, 33])
def test_libraries_compute_every_distance_and_exponential_by_itself(d):
    """What queries rely on, bit for bit; a new version of scipy or numpy could break it."""
    rng = np.random.default_rng(d)
    X, centers = rng.normal(size=(61, d)), rng.normal(size=(7, d))
    together = cdist(X, centers, "sqeuclidean")
    exponentials = np.exp(-together)
    for i in range(len(X)):
        alone = cdist(X[i : i + 1], centers, "sqeuclidean")
        np.testing.assert_array_equal(alone[0], together[i])
        np.testing.assert_array_equal(np.exp(-alone)[0], exponentials[i])


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("name", QUERIES | MEANS)
def test_no_records_give_zeros_of_the_same_shape(name, adjacency):
    query = (QUERIES | MEANS)[name]
    full, empty = answers(query, adjacency, np.ones((5, 2)), np.empty((0, 2)))
    assert full.fields.keys() == empty.fields.keys()
    assert full.coordinates == empty.coordinates
    assert full.sensitivity == empty.sensitivity
    for field, exact in empty.fields.items():
        assert exact.shape == full.fields[field].shape
        assert exact.dtype == full.fields[field].dtype == np.int64
        assert not exact.any()


def read(query, X):
    """The answer in real terms, as if it were noisy, and the length of a grid step."""
    (bounded,) = answers(query, "add_remove", X)
    noisy = Noisy(bounded.fields, bounded.exponent, 100.0)
    return query.read(noisy), math.ldexp(1, bounded.exponent)


def shorten(rows, radius):
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * np.minimum(1, radius / np.maximum(lengths, 1e-300))


def some_records(n=200):
    return np.random.default_rng(6).normal(scale=1.2, size=(n, 2))


@pytest.mark.parametrize("name", ["cells", "cells, squares"])
def test_cells_are_read_as_they_were(name):
    query, X = QUERIES[name], some_records()
    cells, step = read(query, X)
    own = ((X[:, None] - CENTERS) ** 2).sum(axis=2).argmin(axis=1)
    residuals = shorten(X - CENTERS[own], RADIUS)
    for j in range(3):
        mine = residuals[own == j]
        assert cells.counts[j] == pytest.approx(len(mine), rel=1e-12)
        np.testing.assert_allclose(cells.sums[j], mine.sum(axis=0), atol=2 * len(mine) * step)
        if query.square_weight:
            error = 4 * len(mine) * step * RADIUS / query.square_weight
            assert cells.squares[j] == pytest.approx((mine**2).sum(), abs=error)
    assert (cells.squares is None) == (not query.square_weight)
    assert cells.sum_sigma == 100 * step
    assert cells.count_sigma == pytest.approx(100 * step / (RADIUS * query.count_weight), rel=1e-4)
    if query.square_weight:
        squares = 100 * step * RADIUS / query.square_weight
        assert cells.square_sigma == pytest.approx(squares, rel=1e-12)


def float_shares(X, query):
    logits = -0.5 * (((X[:, None] - CENTERS) * query.scale) ** 2).sum(axis=2)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("name", ["soft", "soft, vague"])
def test_soft_sums_are_read_as_they_were(name):
    query, X = QUERIES[name], some_records()
    cells, step = read(query, X)
    shares = float_shares(X, query)
    coarse = step * 2**16
    np.testing.assert_allclose(cells.counts, shares.sum(axis=0), atol=len(X) * 2**-15)
    for j in range(3):
        sums = shares[:, j] @ shorten(X - CENTERS[j], RADIUS)
        error = len(X) * (RADIUS * 2**-15 + 2 * coarse)
        np.testing.assert_allclose(cells.sums[j], sums, atol=error)
    assert cells.sum_sigma == 100 * step
    assert cells.count_sigma == pytest.approx(100 * step / RADIUS, rel=1e-4)


def test_means_are_those_of_residuals_with_a_floor():
    query, X = MEANS["means, vague"], some_records(20)
    (means, sigma), step = read(query, X)
    assert sigma == 100 * step
    shares = float_shares(X, query.soft)
    assert shares.sum(axis=0).min() < FLOOR < shares.sum(axis=0).max()
    for j in range(3):
        sums = shares[:, j] @ shorten(X - CENTERS[j], RADIUS)
        mean = sums / max(shares[:, j].sum(), FLOOR)
        np.testing.assert_allclose(means[j], mean, atol=1e-4)


def test_moments_are_read_as_they_were():
    X = np.random.default_rng(8).uniform(-1, 1, (500, 3)) @ np.diag([1, 0.5, 0.1])
    for shares in ((0.1, 0.3, 0.6), (1, 1, 1)):
        query = Moments(3, shares)
        (bounded,) = answers(query, "add_remove", X)
        step = math.ldexp(1, bounded.exponent)
        count, variance, sums, squares = query.totals(Noisy(bounded.fields, bounded.exponent, 100))
        assert count == pytest.approx(500, rel=1e-12)
        share = shares[0] / sum(shares)
        assert variance == pytest.approx((100 * step) ** 2 / 3 / share, rel=1e-4)
        np.testing.assert_allclose(sums, X.sum(axis=0), atol=5 * len(X) * step)
        np.testing.assert_allclose(squares, X.T @ X, atol=20 * len(X) * step)
        mean, covariance = query.mean_and_covariance(count, variance, sums, squares)
        np.testing.assert_allclose(mean, X.mean(axis=0), atol=5 * step)
        np.testing.assert_allclose(covariance, np.cov(X.T, bias=True), atol=30 * step)


def test_histograms_count_records_on_their_edges_and_beyond():
    query = QUERIES["histograms"]
    on_edges = [[-1.0, 0.0], [-0.5, 0.1], [0.0, 0.2], [1.0, 0.3]]
    beyond = [[-9.0, np.nextafter(0.1, 0)], [9.0, np.nextafter(0.2, 0)]]
    (counts, sigma), step = read(query, on_edges + beyond)
    np.testing.assert_allclose(counts, [[2, 1, 3], [2, 2, 2]], rtol=1e-12)
    assert sigma == pytest.approx(100 * step, rel=1e-4)


@pytest.mark.parametrize("name", ["marks, none", "marks, few", "marks, many"])
def test_marks_are_read_as_they_were(name):
    query, X = QUERIES[name], some_records()
    (counts, marks, sigma), step = read(query, X)
    cells, carried = query.marks_of(X)
    np.testing.assert_allclose(counts, np.bincount(cells, minlength=3), rtol=1e-12)
    for j in range(3):
        np.testing.assert_allclose(marks[j], carried[cells == j].sum(axis=0), atol=1e-9)
    assert sigma == pytest.approx(100 * step, rel=1e-4)


def test_sums_of_assigned_cells_are_about_the_centres_of_these_cells():
    query, X = QUERIES["assigned"], some_records()
    cells, step = read(query, X)
    own = turned(X)
    for j in range(3):
        mine = shorten(X[own == j] - CENTERS[j], RADIUS)
        assert cells.counts[j] == pytest.approx(len(mine), rel=1e-12)
        np.testing.assert_allclose(cells.sums[j], mine.sum(axis=0), atol=2 * len(mine) * step)


def test_costs_are_read_as_they_were():
    query, X = QUERIES["cost"], CENTERS[0] + 0.1 * some_records()
    (total, total_sigma, count, count_sigma), step = read(query, X)
    squared = (((X[:, None] - CENTERS) * SCALE) ** 2).sum(axis=2).min(axis=1)
    assert squared.min() < query.cap < squared.max()
    assert count == pytest.approx(200, rel=1e-12)
    assert total == pytest.approx(np.minimum(squared, query.cap).sum(), abs=2 * 200 * step)
    assert total_sigma == 100 * step
    assert count_sigma == pytest.approx(100 * step / (query.cap * query.count_weight), rel=1e-4)


def message_of(*values):
    steps = np.array(values, dtype=np.int64)
    fields = {"first": steps[:2].reshape(1, 2), "second": steps[2:]}
    return Bounded(fields, formulas.message(1.0, "add_remove"), -20)


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("long", [2**30, 2**45, 2**62])
def test_a_worst_pair_of_messages_reaches_the_stated_sensitivity(long, adjacency):
    second = (
        message_of(-long, 0, -long, 0) if adjacency == "replace_one" else message_of(0, 0, 0, 0)
    )
    pair = [
        clip_message(message, 3 << 20, adjacency)
        for message in (message_of(long, 0, long, 0), second)
    ]
    assert_within(*pair)
    assert share_of_bound(*pair) >= 0.99


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=5, max_size=5),
    st.lists(st.integers(-(2**21), 2**21), min_size=5, max_size=5),
    st.integers(2**10, 2**25),
)
def test_no_pair_of_messages_exceeds_the_sensitivity(values, others, norm):
    nothing = clip_message(message_of(0, 0, 0, 0, 0), norm, "add_remove")
    assert not vector(nothing).any()
    for given_values in (values, others):
        message = message_of(*given_values)
        clipped = clip_message(message, norm, "add_remove")
        assert_within(clipped, nothing)
        assert norm <= clipped.sensitivity.value <= norm * (1 + 1e-12)
        assert {name: part.shape for name, part in clipped.fields.items()} == {
            name: part.shape for name, part in message.fields.items()
        }
        if sum(value**2 for value in given_values) < 0.999 * norm**2 - 1:
            np.testing.assert_array_equal(vector(clipped), given_values)
    assert_within(
        clip_message(message_of(*values), norm, "replace_one"),
        clip_message(message_of(*others), norm, "replace_one"),
    )


def test_a_record_on_a_border_goes_to_the_first_of_equally_near_centres():
    X = np.array([[0.0, 1.5], [1.5, 0.0], [1.5, 1.5], [0.0, np.nextafter(1.5, 2)]])
    np.testing.assert_array_equal(nearest(X, CENTERS), [0, 0, 0, 1])


@given(
    arrays(float, (4, 3), elements=st.floats(-1e6, 1e6)),
    arrays(float, st.tuples(st.integers(1, 40), st.just(3)), elements=st.floats(-1e3, 1e3)),
)
def test_responsibilities_never_add_up_to_more_than_one(X, centers):
    shares = responsibilities(X, centers)
    assert shares.min() >= 0
    assert shares.sum(axis=1).max() <= 2**16
    assert shares.sum(axis=1).min() >= 2**16 - len(centers) - 1


def test_responsibilities_of_very_many_equal_components_do_not_exceed_one():
    for k in (2, 3, 2**10, 2**16, 100_000):
        total = responsibilities(np.zeros((1, 1)), np.zeros((k, 1))).sum()
        assert 0 <= total <= 2**16


def test_a_floor_below_one_is_refused():
    query = FloorMeans(SOFT, 0.99)
    with pytest.raises(ParameterError, match="floor="):
        query.sensitivity("add_remove")
    with pytest.raises(ParameterError, match="floor="):
        query.answer(np.zeros((3, 2)), "add_remove", -20)
