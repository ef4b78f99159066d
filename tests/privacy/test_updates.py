"""Weights on the grid of a sum, and whole updates of a bounded length."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from secure_fedclust.errors import ParameterError, TrainingError
from secure_fedclust.privacy.mechanism import Noisy
from secure_fedclust.privacy.sensitivity import ADJACENCIES
from secure_fedclust.privacy.updates import LARGEST_WEIGHT, WeightGrid, WholeUpdate

weights = arrays(float, 6, elements=st.floats(-LARGEST_WEIGHT, LARGEST_WEIGHT))


@pytest.mark.parametrize("n_clients", [1, 2, 3, 7, 8, 100, 1000, 1023, 1025])
def test_a_sum_over_the_whole_cohort_fits_and_the_grid_is_fine(n_clients):
    grid = WeightGrid.of(n_clients)
    assert grid.n_clients == n_clients
    assert grid.largest <= 2**35
    assert grid.reach * 2.0**grid.exponent == LARGEST_WEIGHT
    assert 2.0**grid.exponent <= 2.0 * n_clients * LARGEST_WEIGHT / 2**35
    ends = grid.steps(np.array([-LARGEST_WEIGHT, LARGEST_WEIGHT]))
    assert ends.tolist() == [-grid.reach, grid.reach]


@given(weights, st.integers(1, 1000))
def test_weights_come_back_from_the_grid_to_within_half_a_step(given_weights, n_clients):
    grid = WeightGrid.of(n_clients)
    steps = grid.steps(given_weights)
    assert steps.dtype == np.int64
    error = np.abs(grid.weights(steps) - given_weights)
    assert error.max() <= 2.0 ** (grid.exponent - 1)


@given(st.lists(weights, min_size=2, max_size=5))
def test_a_sum_on_the_grid_is_exact_in_any_order(vectors):
    grid = WeightGrid.of(len(vectors))
    steps = [grid.steps(vector) for vector in vectors]
    there, back = grid.weights(sum(steps)), grid.weights(sum(steps[::-1]))
    np.testing.assert_array_equal(there, back)
    assert np.abs(sum(steps)).max() <= grid.largest


@pytest.mark.parametrize("weight", [np.nextafter(16.0, 17), -1e9, np.inf, -np.inf, np.nan])
def test_a_weight_that_is_too_large_is_refused(weight):
    with pytest.raises(TrainingError, match="lower the learning rate"):
        WeightGrid.of(3).steps(np.array([0.0, weight]))


def answer(update, norm, adjacency="add_remove", exponent=-20):
    query = WholeUpdate(len(update), norm, lambda _: np.asarray(update, dtype=float))
    return query.answer(np.zeros((1, 1)), adjacency, exponent)


def squared_length(steps):
    return sum(int(step) ** 2 for step in steps)


@given(
    arrays(float, 5, elements=st.floats(-1e30, 1e30)), st.floats(1e-3, 100), st.integers(-24, -15)
)
def test_no_update_is_longer_than_stated(update, norm, exponent):
    found = answer(update, norm, exponent=exponent)
    bound = Fraction(found.sensitivity.value)
    assert squared_length(found.fields["update"]) <= bound**2
    opposite = answer(-update, norm, "replace_one", exponent)
    first = answer(update, norm, "replace_one", exponent)
    apart = first.fields["update"].astype(object) - opposite.fields["update"].astype(object)
    assert squared_length(apart) <= Fraction(first.sensitivity.value) ** 2


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("long", [1.0, 7.0, 1e12])
def test_a_worst_pair_reaches_the_bound_so_that_half_of_it_would_be_wrong(adjacency, long):
    first = answer([long, 0, 0], 1.0, adjacency)
    second = answer([-long if adjacency == "replace_one" else 0.0, 0, 0], 1.0, adjacency)
    apart = math.sqrt(squared_length(first.fields["update"] - second.fields["update"]))
    assert first.sensitivity.value / 2 < 0.99 * first.sensitivity.value <= apart
    assert apart <= first.sensitivity.value


def test_a_short_update_is_read_as_it_was():
    update = np.array([0.25, -0.125, 0.5])
    query = WholeUpdate(3, 1.0, lambda _: update)
    found = query.answer(np.zeros((0, 2)), "add_remove", -20)
    np.testing.assert_array_equal(query.read(Noisy(found.fields, -20, 1.0)), update)
    assert query.coordinates == 3
    assert found.sensitivity.formula == "message/add_remove"


def test_a_length_that_is_no_step_long_is_refused():
    with pytest.raises(ParameterError, match="grid steps"):
        answer([1.0], 1e-9, exponent=-10)
