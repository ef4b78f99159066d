"""The graph of masks: how many neighbours, how many shares, and what can go wrong by chance."""

import itertools
import math
import secrets

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from scipy.stats import hypergeom

from secure_fedclust import ParameterError
from secure_fedclust.privacy import graph as graphs
from secure_fedclust.privacy.cohort import LARGEST_COHORT, LARGEST_FEDERATION, Rules
from secure_fedclust.privacy.graph import SPARSE_FROM, Graph, sparse_parameters

SECURITY, CORRECTNESS = 2.0**-40, 2.0**-30


def sparse(n, colluders=None, dropouts=None):
    """The graph of n clients; a tenth of them may collude and a tenth drop out, if not said."""
    colluders = n // 10 if colluders is None else colluders
    dropouts = n // 10 if dropouts is None else dropouts
    return Graph.of(n, Rules(n - dropouts, colluders))


def edges(graph):
    """Who is whose neighbour, as a matrix over places."""
    found = np.zeros((graph.n_clients,) * 2, dtype=bool)
    for place in range(graph.n_clients):
        found[place, graph.circle(graph.start(place))] = True
    np.fill_diagonal(found, False)
    return found


def n_parts(matrix, present):
    kept = np.flatnonzero(present)
    return connected_components(csr_array(matrix[np.ix_(kept, kept)]), directed=False)[0]


# The figures.


def incorrectness(n_clients, dropouts, degree, threshold):
    """Bound on the probability of an order on which some secret cannot be opened."""
    return n_clients * graphs.tail(n_clients - 1, dropouts, degree, degree - threshold + 1)


@pytest.mark.parametrize(
    ("n", "percent", "degree"),
    [
        *[(100, 5, 12), (100, 10, 22), (100, 20, 42)],
        *[(1000, 5, 34), (1000, 10, 52), (1000, 20, 112)],
        *[(10_000, 5, 38), (10_000, 10, 60), (10_000, 20, 134)],
    ],
)
def test_degrees_are_those_that_are_published_for_colluders_and_dropouts(n, percent, degree):
    each = n * percent // 100
    found = sparse(n, each, each)
    assert found.degree == degree
    assert not found.is_complete


def test_fourteen_neighbours_of_a_hundred_are_too_few_for_a_tenth_of_each():
    failures = [
        float(graphs.insecurity(100, 10, 10, 14, t) + incorrectness(100, 10, 14, t))
        for t in range(1, 15)
    ]
    assert min(failures) == pytest.approx(2.1e-3, rel=0.02)
    assert sparse(100).degree == 22


# Every figure again, by other means.


def failures_of(n, colluders, dropouts, degree, threshold):
    """Security and correctness by floating point, and runs of empty places one by one."""
    opened = (n - colluders) * hypergeom.sf(threshold - 1, n - 1, colluders, degree)
    lost = n * hypergeom.sf(degree - threshold, n - 1, dropouts, degree)
    gone = colluders + dropouts
    all_gone = hypergeom.pmf(degree, n, gone, degree)
    return opened + n * (n - degree + 1) / 2 * all_gone, lost


@st.composite
def federations(draw):
    n = draw(st.integers(SPARSE_FROM, LARGEST_FEDERATION))
    return n, draw(st.integers(0, n // 5)), draw(st.integers(0, n // 3))


@settings(max_examples=150)
@given(federations())
def test_no_graph_is_less_safe_than_it_should_be_and_none_is_larger_than_needed(made):
    n, colluders, dropouts = made
    graph = sparse(n, colluders, dropouts)
    degree, threshold = graph.degree, graph.threshold
    security, correctness = failures_of(n, colluders, dropouts, degree, threshold)
    assert not graph.is_complete
    assert degree % 2 == 0 and 2 <= threshold <= degree
    assert security <= SECURITY * (1 + 1e-6)
    assert correctness <= CORRECTNESS * (1 + 1e-6)
    # A larger threshold would not be correct, and two neighbours fewer not safe with any.
    if threshold < degree:
        assert failures_of(n, colluders, dropouts, degree, threshold + 1)[1] > CORRECTNESS / 1.001
    smaller = [failures_of(n, colluders, dropouts, degree - 2, t) for t in range(2, degree - 1)]
    assert not any(s < SECURITY / 1.001 and c < CORRECTNESS / 1.001 for s, c in smaller)


@settings(max_examples=50)
@given(st.data())
def test_tails_are_those_of_drawing_without_putting_back(data):
    population = data.draw(st.integers(1, 400))
    marked, drawn = (data.draw(st.integers(0, population)) for _ in range(2))
    least = data.draw(st.integers(0, population + 1))
    exact = float(graphs.tail(population, marked, drawn, least))
    assert exact == pytest.approx(
        hypergeom.sf(least - 1, population, marked, drawn), rel=1e-8, abs=1e-300
    )


def test_a_tail_is_what_counting_all_draws_says():
    for marked, drawn, least in itertools.product(range(7), range(7), range(8)):
        draws = list(itertools.combinations(range(6), drawn))
        hits = sum(sum(i < marked for i in each) >= least for each in draws)
        assert graphs.tail(6, marked, drawn, least) * len(draws) == hits


@pytest.mark.parametrize(("n", "gone", "degree"), [(12, 6, 4), (11, 7, 4), (10, 5, 2), (13, 8, 6)])
def test_the_bound_on_being_parted_holds_when_all_orders_are_counted(n, gone, degree):
    graph = Graph(n, degree, 2, 3)
    matrix, parted, orders = edges(graph), 0, 0
    for places in itertools.combinations(range(n), gone):
        present = np.ones(n, dtype=bool)
        present[list(places)] = False
        orders += 1
        parts = n_parts(matrix, present)
        parted += parts > 1
        assert graph.hangs_together(present) == (parts == 1)
    assert 0 < parted / orders <= graphs.parted(n, gone, degree)


def test_orders_that_are_drawn_go_wrong_about_as_often_as_the_bounds_say():
    """With too few neighbours, so that something happens at all."""
    n, colluders, dropouts, degree, threshold, rounds = 60, 9, 9, 10, 5, 3000
    graph = Graph(n, degree, threshold, threshold + 1)
    matrix = edges(graph).astype(int)
    opened = lost = parted = 0
    for _ in range(rounds):
        places = np.array(graph.order())
        bad, gone = (np.zeros(n, dtype=int) for _ in range(2))
        bad[places[:colluders]], gone[places[colluders : colluders + dropouts]] = 1, 1
        opened += ((matrix @ bad >= threshold) & (bad == 0)).any()
        lost += ((matrix @ (1 - gone)) < threshold).any()
        parted += not graph.hangs_together((bad + gone) == 0)
    seen = np.array([opened, lost, parted]) / rounds
    security = graphs.parted(n, colluders + dropouts, degree)
    bounds = np.array(
        [
            graphs.insecurity(n, colluders, dropouts, degree, threshold) - security,
            incorrectness(n, dropouts, degree, threshold),
            security,
        ],
        dtype=float,
    )
    margin = 5 * np.sqrt(np.minimum(bounds, 1) / rounds) + 5 / rounds
    assert (seen <= bounds + margin).all()
    # Neighbours of one client are those of others, too: union bounds give something away.
    assert seen[0] > bounds[0] / 8


# The shape.


@pytest.mark.parametrize("n", [3, 7, SPARSE_FROM - 1])
def test_few_clients_are_all_neighbours_with_the_quorum_as_threshold(n):
    graph = Graph.of(n, Rules(max(2, n - 1), 0))
    assert graph.is_complete and graph.threshold == graph.least == max(2, n - 1)
    assert graph.order() == list(range(n))
    for place in range(n):
        assert graph.start(place) == 0
        assert graph.circle(0).tolist() == list(range(n))
        assert graph.index(place, n - 1) == n - 1


@pytest.mark.parametrize("n", [SPARSE_FROM, 101, 250])
def test_a_sparse_graph_is_regular_and_whoever_is_a_neighbour_has_one(n):
    graph = sparse(n)
    matrix = edges(graph)
    assert (matrix.sum(axis=1) == graph.degree).all()
    assert (matrix == matrix.T).all()
    for place in (0, 1, n // 2, n - 1):
        circle = graph.circle(graph.start(place))
        assert len(set(circle.tolist())) == graph.size
        assert circle[graph.index(place, place)] == place
        for other in circle.tolist():
            assert circle[graph.index(place, other)] == other
        owners = np.array(circle)
        indices = graph.index(owners, place)
        for owner, index in zip(owners.tolist(), indices.tolist(), strict=True):
            assert graph.circle(graph.start(owner))[index] == place


def test_an_order_is_a_new_permutation_every_time_from_the_systems_randomness(monkeypatch):
    graph = sparse(200)
    orders = [graph.order() for _ in range(5)]
    assert all(sorted(order) == list(range(200)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5
    drawn, real = [], secrets.SystemRandom

    def watched():
        drawn.append(real())
        return drawn[-1]

    monkeypatch.setattr(secrets, "SystemRandom", watched)
    graph.order()
    assert len(drawn) == 1


def test_every_place_is_as_likely_for_a_client():
    graph = Graph(10, 4, 2, 3)
    counts = np.zeros((10, 10))
    for _ in range(5000):
        counts[np.arange(10), graph.order()] += 1
    assert abs(counts - 500).max() < 7 * math.sqrt(500)


# Who has which graph.


def test_an_active_server_gets_no_sparse_graph():
    for n in (SPARSE_FROM, 500, LARGEST_COHORT):
        assert Graph.of(n, Rules(n - n // 10, 1, active_server=True)).is_complete
    n = LARGEST_COHORT + 1
    with pytest.raises(ParameterError, match="protects nobody from this server"):
        Graph.of(n, Rules(n - 100, 1, active_server=True))


@pytest.mark.parametrize("n", [1, 2, LARGEST_FEDERATION + 1])
def test_cohorts_beyond_the_limits_are_refused(n):
    with pytest.raises(ParameterError, match=f"a cohort of {n} clients"):
        Graph.of(n, Rules(2, 1))


def test_where_nearly_all_would_have_to_be_neighbours_all_are():
    rules = Rules(130, 129)
    assert sparse_parameters(200, 129, 70) is None
    graph = Graph.of(200, rules)
    assert graph.is_complete and graph.threshold == 130
    n = LARGEST_COHORT + 1
    with pytest.raises(ParameterError, match="each would have to share keys with more than 4096"):
        Graph.of(n, Rules(n // 2, n // 2 - 1))


def test_the_limit_is_where_a_client_adds_the_least_noise_that_is_fine_enough():
    from secure_fedclust.privacy.accounting import MIN_NOISE
    from secure_fedclust.privacy.mechanism import MIN_CLIENT_NOISE

    assert MIN_NOISE / math.sqrt(LARGEST_FEDERATION) == MIN_CLIENT_NOISE
