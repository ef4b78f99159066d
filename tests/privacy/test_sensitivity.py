"""A numerical adversary for every sensitivity, and the pairs that reach it.

Contributions are written down again here, in plain floating point, so that a slip in the package
cannot hide itself.
"""

import inspect
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy import sensitivity as formulas
from secure_fedclust.privacy.accounting import delta_of, mu_of
from secure_fedclust.privacy.sensitivity import ADJACENCIES

FLOORS = [1.0, 1.3, 2.0, 1 + math.sqrt(2), 3.0, 5.0, 20.0, 100.0]
lengths = st.floats(1e-3, 1e3)


def ball(vectors, radius):
    """Shorten vectors to a radius, which may differ from one to the next."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors * np.minimum(1, np.expand_dims(radius, -1) / np.maximum(norms, 1e-300))


def part_of_one(numbers):
    """Make numbers add up to at most one."""
    numbers = np.abs(numbers)
    return numbers / np.maximum(1, numbers.sum(axis=-1, keepdims=True))


def flat(array):
    return array.reshape(len(array), -1)


def soft_contribution(shares, vectors, count_weight):
    return np.hstack([flat(shares[..., None] * vectors), count_weight * shares])


def cell_contribution(second_cell, vectors, radius, count_weight, square_weight):
    squares = np.sum(vectors**2, axis=-1, keepdims=True) - radius**2 / 2
    counts = np.full_like(squares, count_weight)
    one = np.hstack([vectors, counts, square_weight * squares])
    return np.hstack([one * ~second_cell[:, None], one * second_cell[:, None]])


def moment_contribution(vectors, count_weight, sum_weight, square_weight):
    rows, columns = np.triu_indices(vectors.shape[1])
    weight = np.where(rows == columns, square_weight, math.sqrt(2) * square_weight)
    products = weight * vectors[:, rows] * vectors[:, columns]
    return np.hstack([np.full((len(vectors), 1), count_weight), sum_weight * vectors, products])


def floored(sums, weights, floor):
    return flat(sums / np.maximum(weights, floor)[..., None])


def take(numbers, *shapes):
    """Cut a batch of parameters into arrays of the shapes asked for."""
    parts, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        parts.append(numbers[:, start : start + size].reshape(len(numbers), *shape))
        start += size
    return parts


def soft_pair(numbers, radius, count_weight):
    g, v, other_g, other_v = take(numbers, (3,), (3, 2), (3,), (3, 2))
    return (
        soft_contribution(part_of_one(g), ball(v, radius), count_weight),
        soft_contribution(part_of_one(other_g), ball(other_v, radius), count_weight),
    )


def cell_pair(numbers, radius, count_weight, square_weight):
    cells, v, other_v = take(numbers, (2,), (3,), (3,))
    weights = radius, count_weight, square_weight
    return (
        cell_contribution(cells[:, 0] > 0, ball(v, radius), *weights),
        cell_contribution(cells[:, 1] > 0, ball(other_v, radius), *weights),
    )


def moment_pair(numbers, bound, *weights):
    v, other_v = take(numbers, (3,), (3,))
    return (
        moment_contribution(ball(v, bound), *weights),
        moment_contribution(ball(other_v, bound), *weights),
    )


def histogram_pair(numbers, weight, n_histograms):
    bins = np.clip(np.floor(numbers), 0, 2).reshape(len(numbers), 2, n_histograms)
    counts = weight * (bins[..., None] == np.arange(3))
    return flat(counts[:, 0]), flat(counts[:, 1])


def cost_pair(numbers, cap, count_weight):
    values = np.clip(numbers, 0, cap) - cap / 2
    counts = np.full(len(numbers), count_weight)
    return np.column_stack([values[:, 0], counts]), np.column_stack([values[:, 1], counts])


def message_pair(numbers, norm):
    v, other_v = take(numbers, (5,), (5,))
    return ball(v, norm), ball(other_v, norm)


def floor_mean_pair(numbers, radius, floor):
    """The other records of three clusters may be anything that bounded records can add up to."""
    w, s, *pair = take(numbers, (3,), (3, 2), (3,), (3, 2), (3,), (3, 2))
    w = floor * np.abs(w)
    s = ball(s * floor, w * radius)

    def means(shares, vectors):
        shares = part_of_one(shares)
        sums = s + shares[..., None] * ball(vectors, radius)
        return floored(sums, w + shares, floor)

    none = np.zeros_like(pair[0]), np.zeros_like(pair[1])
    return means(*pair[:2]), means(*pair[2:]), means(*none)


def neighbours(pair, adjacency):
    """The answers with the first record, and with the other record or with none."""
    if len(pair) == 3:
        return pair[0], pair[1] if adjacency == "replace_one" else pair[2]
    return pair[0], pair[1] if adjacency == "replace_one" else np.zeros_like(pair[1])


def climb(distance, size, rng):
    """The largest distance that a random search, followed by an evolution, can find."""
    points = 2 * rng.normal(size=(3000, size))
    scale = 1.0
    for _ in range(100):
        points = points[np.argsort(distance(points))[-40:]]
        moves = rng.normal(size=(25, *points.shape)) * (rng.random((25, *points.shape)) < 0.4)
        points = np.vstack([points, (points + scale * moves).reshape(-1, size)])
        scale *= 0.93
    return distance(points).max()


def mark_contribution(second_cell, marks, weight):
    one = np.hstack([np.full((len(marks), 1), weight), np.where(marks > 0, weight, -weight) / 2])
    return np.hstack([one * ~second_cell[:, None], one * second_cell[:, None]])


def mark_pair(numbers, weight, n_marks):
    cells, marks, other_marks = take(numbers, (2,), (n_marks,), (n_marks,))
    return (
        mark_contribution(cells[:, 0] > 0, marks, weight),
        mark_contribution(cells[:, 1] > 0, other_marks, weight),
    )


SEARCHES = [
    # formula, arguments without adjacency, pairs of contributions, number of parameters
    (formulas.sums, (1.5,), lambda u: soft_pair(u, 1.5, 0.0), 18),
    *(
        (formulas.sums_and_counts, (1.5, w), lambda u, w=w: soft_pair(u, 1.5, w), 18)
        for w in (0.3, 1.5, 4.0)
    ),
    *(
        (formulas.synopsis, (1.5, c, s), lambda u, c=c, s=s: cell_pair(u, 1.5, c, s), 8)
        for c, s in ((1.0, 0.5), (0.2, 2 / 3), (3.0, 0.1), (0.0, 0.0))
    ),
    *(
        (formulas.moments, (1.5, *w), lambda u, w=w: moment_pair(u, 1.5, *w), 6)
        for w in ((1.0, 1.0, 0.0), (1.0, 2.0, 0.3), (0.5, 1.0, 1.0), (0.0, 0.0, 1.0), (1, 1, 0.471))
    ),
    *(
        (formulas.histogram, (2.0, "", n), lambda u, n=n: histogram_pair(u, 2.0, n), 2 * n)
        for n in (1, 4)
    ),
    *((formulas.cost, (3.0, w), lambda u, w=w: cost_pair(u, 3.0, w), 2) for w in (0.0, 0.75, 5.0)),
    *(
        (formulas.marks, (2.0, m), lambda u, m=m: mark_pair(u, 2.0, m), 2 + 2 * m)
        for m in (0, 1, 3, 4, 5, 12)
    ),
    (formulas.message, (2.5,), lambda u: message_pair(u, 2.5), 10),
    *(
        (formulas.floor_mean, (1.5, b), lambda u, b=b: floor_mean_pair(u, 1.5, b), 27)
        for b in FLOORS
    ),
]


def stated(formula, arguments, adjacency):
    if "" in arguments:
        arguments = [adjacency if given == "" else given for given in arguments]
        return formula(*arguments).value
    return formula(*arguments, adjacency).value


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize(
    ("formula", "arguments", "pairs", "size"),
    SEARCHES,
    ids=[f"{formula.__name__}{arguments}" for formula, arguments, *_ in SEARCHES],
)
def test_no_pair_that_a_search_finds_exceeds_the_bound(formula, arguments, pairs, size, adjacency):
    def distance(numbers):
        first, second = neighbours(pairs(numbers), adjacency)
        return np.linalg.norm(first - second, axis=1)

    found = climb(distance, size, np.random.default_rng(7))
    bound = stated(formula, arguments, adjacency)
    assert found <= bound * (1 + 1e-12)
    # A weak search would prove nothing.
    assert found >= 0.9 * bound


def one(shares, *vectors):
    return np.array([shares], float), np.array([vectors], float)


NOTHING = one([0, 0], [0, 0], [0, 0])


def worst_soft(adjacency, radius, count_weight):
    first = one([1, 0], [radius, 0], [0, 0])
    second = NOTHING
    if adjacency == "replace_one":
        opposite = one([1, 0], [-radius, 0], [0, 0])
        elsewhere = one([0, 1], [0, 0], [radius, 0])
        second = opposite if count_weight <= radius else elsewhere
    return soft_contribution(*first, count_weight), soft_contribution(*second, count_weight)


def worst_cells(adjacency, radius, count_weight, square_weight):
    def cell(which, *vector):
        given = radius, count_weight, square_weight
        return cell_contribution(np.array([which]), np.array([vector], float), *given)

    first = cell(False, radius, 0)
    if adjacency == "add_remove":
        return first, 0 * first
    both = cell(False, -radius, 0), cell(True, radius, 0)
    return first, max(both, key=lambda second: np.linalg.norm(first - second))


def worst_moments(adjacency, bound, count_weight, sum_weight, square_weight):
    weights = count_weight, sum_weight, square_weight
    first = moment_contribution(np.array([[bound, 0.0]]), *weights)
    if adjacency == "add_remove":
        return first, 0 * first
    cosine = -1.0
    if square_weight:
        cosine = max(-1.0, -((sum_weight / square_weight / bound) ** 2) / 2)
    other = bound * np.array([[cosine, math.sqrt(1 - cosine**2)]])
    return first, moment_contribution(other, *weights)


def worst_means(adjacency, radius, floor):
    """Clusters as heavy as the floor whose records all lie opposite to the one that changes."""
    right, left, nil = [radius, 0], [-radius, 0], [0, 0]
    if adjacency == "replace_one" and floor < 1 + math.sqrt(2):
        weights = np.array([[floor - 1, 0.0]])
        first, second = one([1, 0], right, nil), one([1, 0], left, nil)
    else:
        weights = np.array([[floor, floor]])
        first = one([1, 0], right, nil)
        second = one([0, 1], nil, right) if adjacency == "replace_one" else NOTHING
    others = weights[..., None] * np.array([[left, left]])

    def means(shares, vectors):
        return floored(others + shares[..., None] * vectors, weights + shares, floor)

    return means(*first), means(*second)


def worst_histograms(adjacency, weight, n_histograms):
    pair = histogram_pair(np.repeat([[0.0, 1.0]], n_histograms, axis=1), weight, n_histograms)
    return neighbours(pair, adjacency)


def worst_cost(adjacency, cap, count_weight):
    return neighbours(cost_pair(np.array([[0.0, cap]]), cap, count_weight), adjacency)


def worst_marks(adjacency, weight, n_marks):
    """Either all marks are others, or the cell is another: the second where marks are few."""
    all_marks, nowhere = np.ones((1, n_marks)), np.array([False])
    first = mark_contribution(nowhere, all_marks, weight)
    if adjacency == "add_remove":
        return first, 0 * first
    if n_marks > 4:
        return first, mark_contribution(nowhere, -all_marks, weight)
    return first, mark_contribution(~nowhere, all_marks, weight)


def worst_message(adjacency, norm):
    first = np.array([[norm, 0.0]])
    return first, -first if adjacency == "replace_one" else 0 * first


WORST = [
    (formulas.sums, (1.5,), lambda a: worst_soft(a, 1.5, 0.0)),
    *(
        (formulas.sums_and_counts, (1.5, w), lambda a, w=w: worst_soft(a, 1.5, w))
        for w in (0.3, 1.5, 4.0)
    ),
    *(
        (formulas.synopsis, (1.5, c, s), lambda a, c=c, s=s: worst_cells(a, 1.5, c, s))
        for c, s in ((1.0, 0.5), (0.2, 2 / 3), (3.0, 0.1))
    ),
    *(
        (formulas.moments, (1.5, *w), lambda a, w=w: worst_moments(a, 1.5, *w))
        for w in ((1.0, 1.0, 0.0), (1.0, 2.0, 0.3), (0.5, 1.0, 1.0), (0.0, 0.0, 1.0))
    ),
    *((formulas.floor_mean, (1.5, b), lambda a, b=b: worst_means(a, 1.5, b)) for b in FLOORS),
    *(
        (formulas.histogram, (2.0, "", n), lambda a, n=n: worst_histograms(a, 2.0, n))
        for n in (1, 4)
    ),
    *((formulas.cost, (3.0, w), lambda a, w=w: worst_cost(a, 3.0, w)) for w in (0.0, 0.75, 5.0)),
    *((formulas.marks, (2.0, m), lambda a, m=m: worst_marks(a, 2.0, m)) for m in (0, 1, 4, 5, 12)),
    (formulas.message, (2.5,), lambda a: worst_message(a, 2.5)),
]


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize(
    ("formula", "arguments", "pair"),
    WORST,
    ids=[f"{formula.__name__}{arguments}" for formula, arguments, _ in WORST],
)
def test_a_worst_pair_reaches_the_bound_so_that_half_of_it_would_be_wrong(
    formula, arguments, pair, adjacency
):
    first, second = pair(adjacency)
    distance = np.linalg.norm(first - second)
    bound = stated(formula, arguments, adjacency)
    assert bound / 2 < 0.99 * bound <= distance <= bound


def test_every_public_formula_has_a_worst_pair_and_a_search():
    public = {
        function
        for name, function in inspect.getmembers(formulas, inspect.isfunction)
        if function.__module__ == formulas.__name__
        and not name.startswith("_")
        and inspect.signature(function).return_annotation is formulas.Sensitivity
    }
    # The printed bound is loose by design: its value is pinned instead.
    assert public - {formulas.theorem9} == {formula for formula, *_ in WORST}
    assert public - {formulas.theorem9} == {formula for formula, *_ in SEARCHES}


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_the_printed_bound_is_as_printed(adjacency):
    # sqrt(9) * (3 * 2 / 4 + 2 * 2 / 4^2)
    assert formulas.theorem9(2.0, 4.0, 9, adjacency).value == pytest.approx(5.25, rel=1e-12)


@given(lengths, st.floats(1, 1e6), st.integers(1, 100), st.sampled_from(ADJACENCIES))
def test_the_printed_bound_is_never_below_the_exact_one(radius, floor, n_clusters, adjacency):
    exact = formulas.floor_mean(radius, floor, adjacency).value
    assert formulas.theorem9(radius, floor, n_clusters, adjacency).value > exact


def responsibilities(X, centers):
    logits = -0.5 * ((X[:, None] - centers) ** 2).sum(axis=2)
    logits -= logits.max(axis=1, keepdims=True)
    weights = np.exp(logits)
    return weights / weights.sum(axis=1, keepdims=True)


def mixture_means(X, centers, floor):
    shares = responsibilities(X, centers)
    return shares.T @ X / np.maximum(shares.sum(axis=0), floor)[:, None]


@pytest.mark.parametrize(
    ("n", "k", "radius", "bound"),
    [(1000, 2, 5, 0.0472), (1000, 3, 5, 0.0868), (10000, 5, 6, 0.0224)],
)
def test_without_a_floor_one_record_moves_empty_clusters_across_the_domain(n, k, radius, bound):
    floor = 0.9 * n / k  # what one may hope for, and nothing enforces
    centers = radius * np.array([[-1.0, 0.0]] + [[1.0, 1e-6 * j] for j in range(k - 1)])
    X = np.tile([-radius, 0.0], (n, 1))
    other = X.copy()
    other[0] = radius, 0.0
    moved = np.linalg.norm(mixture_means(X, centers, 0) - mixture_means(other, centers, 0))
    assert moved == pytest.approx(2 * math.sqrt(k - 1) * radius, rel=1e-3)
    claimed = formulas.theorem9(radius, floor, k, "replace_one").value
    assert claimed == pytest.approx(bound, rel=2e-3)
    sigma = claimed / mu_of(1.0, 1e-5)
    assert delta_of(1.0, moved / sigma) > 0.9999
    # With the floor, the same pair is harmless.
    moved = np.linalg.norm(mixture_means(X, centers, floor) - mixture_means(other, centers, floor))
    assert moved <= formulas.floor_mean(radius, floor, "replace_one").value


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("floor", [5, 20, 100])
@pytest.mark.parametrize(("angle", "share"), [(0.1, 0.99500), (0.01, 0.99995), (0.001, 0.99999)])
def test_a_mixture_of_gaussians_comes_as_close_to_the_floor_bound_as_one_likes(
    angle, share, floor, adjacency
):
    radius = 2.0
    right_up = radius * np.array([math.cos(angle), math.sin(angle)])
    right_down, left_up = right_up * [1, -1], right_up * [-1, 1]
    others = np.vstack([np.tile(right_up, (floor, 1)), np.tile(right_down, (floor, 1))])
    # Two centres so far off that the side of the x axis alone decides.
    centers = np.array([[0.0, 1e6], [0.0, -1e6]])
    second = np.vstack([others, -right_up]) if adjacency == "replace_one" else others
    moved = np.linalg.norm(
        mixture_means(np.vstack([others, left_up]), centers, floor)
        - mixture_means(second, centers, floor)
    )
    bound = formulas.floor_mean(radius, floor, adjacency).value
    assert share * (1 - 1e-5) <= moved / bound <= 1


@pytest.mark.parametrize("floor", FLOORS)
def test_the_inequality_behind_the_floor_bound_holds_on_a_grid(floor):
    a, b = np.meshgrid(np.linspace(0, 1, 201), np.linspace(0, 1, 201))
    a, b = np.minimum(a, b), np.maximum(a, b)
    # One cluster: the closed form is the largest over the weight of the other records ...
    closed = np.maximum((a + b) / floor, 2 * b / (floor + b - a))
    for weight in np.linspace(0, floor + 1, 101):
        without, having = np.maximum(weight + a, floor), np.maximum(weight + b, floor)
        moved = weight * (1 / without - 1 / having) + a / without + b / having
        assert np.all(moved <= closed + 1e-12)
    # ... and its square is at most linear in the shares, so clusters add up.
    for value, shares in (
        (formulas.floor_mean(1, floor, "replace_one").value, (a + b) / 2),
        (formulas.floor_mean(1, floor, "add_remove").value, np.where(a == 0, b, np.inf)),
    ):
        assert np.all(closed**2 <= value**2 * shares + 1e-12)


@given(lengths, lengths, st.integers(1, 100))
def test_the_best_count_weight_is_best(radius, offset, n_features):
    def error(weight, adjacency):
        noise = formulas.sums_and_counts(radius, weight, adjacency).value
        return noise**2 * (n_features + (offset / weight) ** 2)

    for adjacency in ADJACENCIES:
        if adjacency == "replace_one" and offset > radius:
            continue  # no mean is longer than the vectors it is taken of
        best = formulas.best_count_weight(radius, offset, n_features, adjacency)
        for factor in (0.5, 0.9, 1.1, 2.0):
            assert error(best, adjacency) <= error(best * factor, adjacency) * (1 + 1e-9)


@given(lengths, lengths)
def test_counts_are_free_when_a_record_is_replaced(radius, weight):
    free = formulas.sums_and_counts(radius, min(weight, radius), "replace_one").value
    assert free == pytest.approx(formulas.sums(radius, "replace_one").value, rel=1e-12)


@given(st.floats(1e-100, 1e100), st.floats(0.01, 100), st.sampled_from(ADJACENCIES))
def test_bounds_are_rounded_up_and_scale_with_the_unit(radius, unit, adjacency):
    for formula in (formulas.sums, formulas.message):
        true = 2 * radius if adjacency == "replace_one" else radius
        assert formula(radius, adjacency).value > true
    for formula in (
        lambda r: formulas.sums_and_counts(r, 0.7 * r, adjacency),
        lambda r: formulas.synopsis(r, 0.7 * r, 0.5 / r, adjacency),
        lambda r: formulas.moments(r, 0.7 * r, 1.0, 0.8 / r, adjacency),
        lambda r: formulas.floor_mean(r, 3.0, adjacency),
        lambda r: formulas.theorem9(r, 3.0, 4, adjacency),
        lambda r: formulas.histogram(r, adjacency, 3),
        lambda r: formulas.cost(r, 0.7 * r, adjacency),
        lambda r: formulas.marks(r, 3, adjacency),
    ):
        scaled = formula(radius * unit).value
        assert scaled == pytest.approx(unit * formula(radius).value, rel=1e-9)


def test_a_bound_names_its_formula_and_what_it_was_given():
    found = formulas.synopsis(2.0, 1.0, 0.25, "replace_one")
    assert found.formula == "synopsis/replace_one"
    assert found.inputs == {"radius": 2.0, "count_weight": 1.0, "square_weight": 0.25}


@pytest.mark.parametrize("floor", [0.999, 0.0, -1.0, math.nan])
def test_a_floor_below_one_is_refused(floor):
    for adjacency in ADJACENCIES:
        with pytest.raises(ParameterError, match=r"floor=.*at least 1"):
            formulas.floor_mean(1.0, floor, adjacency)
        with pytest.raises(ParameterError, match=r"floor=.*at least 1"):
            formulas.theorem9(1.0, floor, 3, adjacency)


@pytest.mark.parametrize("radius", [-1.0, math.inf, math.nan])
def test_a_length_that_is_none_is_refused(radius):
    for formula in (formulas.sums, formulas.message):
        with pytest.raises(ParameterError, match="finite number of at least 0"):
            formula(radius, "add_remove")


def test_an_unknown_adjacency_is_refused():
    for call in (
        lambda: formulas.sums(1.0, "swap"),
        lambda: formulas.floor_mean(1.0, 2.0, "swap"),
        lambda: formulas.theorem9(1.0, 2.0, 3, "swap"),
    ):
        with pytest.raises(ParameterError, match="adjacency='swap'"):
            call()


def test_squares_may_not_outweigh_sums():
    with pytest.raises(ParameterError, match=r"square_weight=.*at most 1 / radius = 0\.5"):
        formulas.synopsis(2.0, 1.0, 0.51, "replace_one")
    # Where that matters: squares so heavy that vectors of unequal length are the worst.
    radius, weight = 1.0, 3.0
    first = np.array([radius, weight * radius**2])
    second = np.array([-radius / 4, weight * (radius / 4) ** 2])
    assert np.linalg.norm(first - second) > 2 * radius
