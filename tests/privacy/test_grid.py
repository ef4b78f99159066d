"""The grid of a sum: room for every client at its bound, and noise fine enough for the plan."""

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from secure_fedclust import Ledger, ParameterError, PrivacySpec
from secure_fedclust.privacy import grid as grids
from secure_fedclust.privacy import mechanism
from secure_fedclust.privacy.accounting import MIN_NOISE, TAIL, Limit, slack_of
from secure_fedclust.privacy.grid import (
    COARSE_BITS,
    EXACT_BITS,
    MOST_BITS,
    TIMES_PUBLIC_SIZE,
    UNKNOWN_SIZE,
    WANTED_BITS,
    SumGrid,
    unit_sensitivity,
)
from secure_fedclust.privacy.queries import CellSums, Cost, Histograms, Moments, SoftSums
from secure_fedclust.privacy.release import ExactSums, Releases, exact_sum

ROUNDING = 1e-12
"""Of sums of floating-point numbers in the tests themselves."""

SPEC = PrivacySpec(
    epsilon=2.0,
    delta=1e-6,
    ranges=[(-1, 1)] * 2,
    protection="masking",
    min_survivors=4,
    public_size=50,
)


@st.composite
def specs(draw, private=None):
    """Specs of every kind that sums are asked under."""
    colluders = draw(st.integers(0, 3))
    sums = {
        "protection": "masking",
        "colluders": colluders,
        "min_survivors": colluders + draw(st.integers(1, 30)),
        "public_size": draw(st.sampled_from([None, 1, 20, 1000, 100_000])),
        "unit": draw(st.sampled_from(["record", "client"])),
        "adjacency": draw(st.sampled_from(["add_remove", "replace_one"])),
    }
    if not (draw(st.booleans()) if private is None else private):
        return PrivacySpec(reason="a test", **sums | {"unit": "record"})
    epsilon = math.exp(draw(st.floats(math.log(0.01), math.log(90))))
    return PrivacySpec(epsilon=epsilon, delta=1e-7, bound=1.0, **sums)


@st.composite
def queries(draw):
    d, k = draw(st.integers(1, 12)), draw(st.sampled_from([1, 4, 60, 700]))
    centers = np.zeros((k, d))
    radius = math.exp(draw(st.floats(-3, 3)))
    weight = draw(st.floats(0.05, 2))
    return draw(
        st.sampled_from(
            [
                CellSums(centers, radius, weight),
                CellSums(centers, radius, weight, 1.0),
                SoftSums(centers, np.ones(d), radius, weight),
                Moments(d),
                Histograms(np.tile(np.linspace(-1, 1, k + 1), (d, 1))),
                Cost(centers, np.ones(d), radius),
            ]
        )
    )


asked = {
    "query": queries(),
    "share": st.sampled_from([1.0, 0.5, 0.1, 0.003]),
    "more_clients": st.integers(0, 2000),
}


def limit_of(spec):
    return Limit.of(*spec.target()) if spec.is_private else None


def cohort(spec, more_clients):
    return max(3, spec.min_survivors) + more_clients


def grid_of(query, spec, share, n_clients):
    return SumGrid.of(query, spec, limit_of(spec), share, n_clients)


def grid_if_any(query, spec, share, n_clients):
    try:
        return grid_of(query, spec, share, n_clients)
    except ParameterError:
        assume(False)


def records_of(spec):
    if spec.unit == "client":
        return 1
    known = spec.public_size
    return UNKNOWN_SIZE if known is None else TIMES_PUBLIC_SIZE * known


# Room.


@given(spec=specs(), **asked)
def test_a_sum_of_clients_at_their_bound_is_within_what_the_server_takes(
    spec, query, share, more_clients
):
    n = cohort(spec, more_clients)
    grid = grid_if_any(query, spec, share, n)
    steps = unit_sensitivity(query, spec, grid.exponent).value
    exact = n * math.floor(steps * records_of(spec))
    noise = 15 * grid.client_sigma * math.sqrt(n)
    assert exact + noise <= grid.largest * (1 + ROUNDING)
    assert grid.largest < 1 << MOST_BITS


@given(spec=specs(), **asked)
@example(  # Without noise there is no room that rounding could hide in.
    spec=PrivacySpec(reason="a test", protection="masking", min_survivors=3, public_size=1),
    query=CellSums(np.zeros((3, 2)), 1.0, 0.7),
    share=0.5,
    more_clients=0,
)
def test_a_sum_of_clients_that_are_all_held_back_is_within_what_the_server_takes(
    spec, query, share, more_clients
):
    n = cohort(spec, more_clients)
    grid = grid_if_any(query, spec, share, n)
    assert n * grid.client_largest <= grid.largest


SMALL = {
    "cells": CellSums(np.zeros((1, 2)), 1.0, 0.7),
    "cells with squares": CellSums(np.zeros((1, 2)), 1.0, 0.7, 0.5),
    "soft cells": SoftSums(np.zeros((1, 2)), np.ones(2), 1.0, 0.7),
    "moments": Moments(2),
    "histograms": Histograms(np.array([[-1.0, 0, 1]] * 2)),
    "cost": Cost(np.zeros((1, 2)), np.ones(2), 1.0),
}


def test_whole_messages_in_shares_of_a_step_are_refused():
    spec = PrivacySpec(
        epsilon=1.0,
        delta=1e-5,
        bound=1.0,
        unit="client",
        protection="masking",
        min_survivors=4,
    )
    with pytest.raises(ParameterError, match="unit='client': SoftSums needs a grid too fine"):
        grid_of(SMALL["soft cells"], spec, 1.0, 5)


@pytest.mark.parametrize(
    ("name", "unit"),
    [(n, u) for n in SMALL for u in ("record", "client") if (n, u) != ("soft cells", "client")],
)
@settings(max_examples=15)
@given(spec=specs(), place=st.sampled_from([-1.0, 1.0]), n_records=st.integers(0, 40))
def test_what_clients_send_is_within_the_grid_however_many_records_they_have(
    name, unit, spec, place, n_records
):
    assume(spec.is_private or unit == "record")
    spec = replace(spec, public_size=1, unit=unit)
    grid = grid_of(SMALL[name], spec, 1.0, max(3, spec.min_survivors))
    X = np.full((n_records, 2), place)
    for field in exact_sum(SMALL[name], X, spec, grid).fields.values():
        assert np.abs(field).max() <= grid.client_largest


def finest_that_fits(query, spec, share, n, wanted):
    """An exponent whose sums fit the bits wanted and whose noise is enough, by trying all."""
    limit = limit_of(spec)
    real = unit_sensitivity(query, spec).value
    found = None
    for exponent in range(math.floor(math.log2(real)) - 30, math.ceil(math.log2(real))):
        try:
            steps = unit_sensitivity(query, spec, exponent).value
        except ParameterError:
            continue
        most, enough = n * records_of(spec), steps >= 2.0 ** (EXACT_BITS + query.extra_bits)
        if limit is not None:
            mu = limit.mu * math.sqrt(share)
            most += 16 * math.sqrt(n / spec.honest_survivors) / mu
            sigma = steps / mu
            enough = (
                steps * 2.0**-query.extra_bits >= 2.0**COARSE_BITS * (1 + 1e-3)
                and sigma * 2.0**-query.extra_bits >= MIN_NOISE * (1 + 1e-3)
                and slack_of(sigma * 2.0**-query.extra_bits, query.coordinates)
                <= share * limit.slack * (1 - 1e-2)
            )
        # A part in a thousand is left to rounding.
        if enough and steps * most * (1 + 1e-3) < 1 << (wanted - 1):
            found = exponent if found is None else min(found, exponent)
    return found


@given(spec=specs(), **asked)
def test_the_sum_fits_the_bits_wanted_whenever_a_grid_with_enough_noise_does(
    spec, query, share, more_clients
):
    n = cohort(spec, more_clients)
    assume(spec.unit == "record" or not query.extra_bits)
    for wanted in WANTED_BITS:
        if finest_that_fits(query, spec, share, n, wanted) is not None:
            assert grid_of(query, spec, share, n).largest <= 1 << (wanted - 1)
            break


def test_where_there_is_room_the_grid_is_as_fine_as_a_single_release_has_it():
    query, spec = CellSums(np.zeros((2, 2)), 1.0, 0.7), replace(SPEC, public_size=1)
    grid = grid_of(query, spec, 1.0, 5)
    assert unit_sensitivity(query, spec, grid.exponent).value >= 2**mechanism.FINE_BITS * 0.999


@pytest.mark.parametrize(
    ("query", "changed", "n_clients"),
    [
        (SoftSums(np.zeros((30, 5)), np.ones(5), 1.0, 0.7), {"public_size": None}, 1000),
        (CellSums(np.zeros((700, 20)), 1.0, 0.7), {"public_size": 1 << 18, "epsilon": 90.0}, 4096),
    ],
)
def test_what_cannot_fit_is_refused_and_says_what_to_change(query, changed, n_clients):
    spec = replace(SPEC, **{"epsilon": 60.0, "delta": 1e-7} | changed)
    with mock.patch.object(grids, "TIMES_PUBLIC_SIZE", 1 << 22):
        with pytest.raises(ParameterError, match=r"bits, and 63 are there: give a public_size"):
            grid_of(query, spec, 0.1, n_clients)


@given(spec=specs(), **asked)
def test_a_grid_is_found_or_refused_by_a_typed_error(spec, query, share, more_clients):
    n = cohort(spec, more_clients)
    try:
        grid = grid_of(query, spec, share, n)
    except ParameterError:
        return
    assert 0 < grid.client_largest <= grid.largest < 1 << MOST_BITS
    assert (grid.sigma > 0) == (grid.client_sigma > 0) == spec.is_private


# Noise.


@given(spec=specs(private=True), **asked)
@example(  # More coordinates than the finest grid that is usual allows for.
    spec=replace(SPEC, epsilon=95.0, unit="client", min_survivors=3),
    query=CellSums(np.zeros((20_000, 20)), 1.0, 0.7),
    share=1.0,
    more_clients=1,
)
def test_a_release_takes_no_more_slack_than_its_share(spec, query, share, more_clients):
    n, limit = cohort(spec, more_clients), limit_of(spec)
    grid = grid_if_any(query, spec, share, n)
    assert slack_of(grid.sigma, query.coordinates) <= share * limit.slack * (1 + ROUNDING)


@given(spec=specs(private=True), **asked)
def test_noise_is_at_least_so_many_steps(spec, query, share, more_clients):
    n = cohort(spec, more_clients)
    grid = grid_if_any(query, spec, share, n)
    assert grid.sigma >= MIN_NOISE


def on_the_edge(spec, share, k, weight):
    """A question whose coarsest grid step with enough noise is a power of two, all but exactly."""
    limit = limit_of(spec)
    unscaled = CellSums(np.zeros((k, 2)), 1.0, weight)
    mu = limit.mu * math.sqrt(share)
    slack = TAIL * math.sqrt(unscaled.coordinates / (24 * share * limit.slack))
    needed = max(2.0**COARSE_BITS, mu * max(MIN_NOISE, slack))
    ratio = needed / unscaled.sensitivity(spec.adjacency).value
    radius = ratio * 2.0 ** -math.floor(math.log2(ratio)) * (1 + 1e-6)
    return CellSums(unscaled.centers, radius, weight)


@given(
    epsilon=st.floats(0.5, 50),
    public_size=st.integers(1, 400),
    n_clients=st.integers(4, 100),
    share=st.sampled_from([1.0, 0.5, 0.1]),
    k=st.sampled_from([2, 30, 300]),
    weight=st.floats(0.05, 2),
)
@example(4.055185617680813, 240, 56, 0.5, 2, 0.20902760385884978)
@example(2.3145158505061953, 159, 72, 0.1, 30, 0.17158167934225743)
def test_rounding_to_the_grid_takes_nothing_off_the_noise_that_was_reckoned_with(
    epsilon, public_size, n_clients, share, k, weight
):
    spec = replace(SPEC, epsilon=epsilon, public_size=public_size, min_survivors=3)
    query, limit = on_the_edge(spec, share, k, weight), limit_of(spec)
    grid = grid_of(query, spec, share, n_clients)
    assert grid.sigma >= MIN_NOISE
    assert slack_of(grid.sigma, query.coordinates) <= share * limit.slack * (1 + ROUNDING)


@given(spec=specs(private=True), **asked)
def test_noise_in_real_terms_is_what_spec_and_share_say_whatever_the_cohort(
    spec, query, share, more_clients
):
    real = unit_sensitivity(query, spec).value
    wanted = real / (limit_of(spec).mu * math.sqrt(share))
    for n in (cohort(spec, 0), cohort(spec, more_clients)):
        grid = grid_if_any(query, spec, share, n)
        assert math.ldexp(grid.sigma, grid.exponent) == pytest.approx(wanted, rel=2e-2)
        assert grid.client_sigma**2 * spec.honest_survivors == pytest.approx(grid.sigma**2)


@given(spec=specs(private=True), **asked)
def test_noise_is_that_of_the_sensitivity_on_the_very_grid(spec, query, share, more_clients):
    """Not of the sensitivity before rounding, which may be smaller."""
    grid = grid_if_any(query, spec, share, cohort(spec, more_clients))
    steps = unit_sensitivity(query, spec, grid.exponent).value
    assert grid.sigma * limit_of(spec).mu * math.sqrt(share) == pytest.approx(steps, rel=1e-12)


def test_all_the_shares_of_a_run_can_be_spent():
    """Ten sums, each for a tenth, with as many coordinates as make slack the scarcest."""
    spec = replace(SPEC, min_survivors=3)
    with Ledger.create(None, epsilon=2.0, delta=1e-6) as ledger:
        outlet = Releases("a", spec, ledger, "fast")
        for step in range(10):
            query = on_the_edge(spec, 0.1, 300, 0.1 + 0.07 * step)
            place = {"run": "r", "step": step, "message": "m"}
            outlet.contribute(query, np.zeros((3, 2)), 0.1, n_clients=20, **place)
        spent = ledger.totals("a")
    assert spent.squared_mu == pytest.approx(outlet.limit.mu**2)
    assert spent.slack <= outlet.limit.slack


# One grid for all.


@settings(max_examples=30)
@given(spec=specs(), more_clients=st.integers(0, 50), share=st.sampled_from([1.0, 0.1]))
def test_server_and_clients_find_the_same_grid_by_themselves(spec, more_clients, share):
    n, X = cohort(spec, more_clients), np.random.default_rng(0).uniform(-0.5, 0.5, (5, 2))
    query = CellSums(np.array([[0.5, 0.5], [-0.5, -0.5]]), 1.0, 0.7)
    of_server = grid_if_any(query, spec, share, n)
    if spec.is_private:
        ledger = Ledger.create(
            None, epsilon=spec.epsilon, delta=1e-7, unit=spec.unit, adjacency=spec.adjacency
        )
        outlet = Releases("a", spec, ledger, "fast")
    else:
        outlet = ExactSums(PrivacySpec.from_json(spec.to_json()))
    place = {"run": "r", "step": 0, "message": "m"}
    for data in (X, X[:0], 1e9 * X):
        noisy = outlet.contribute(query, data, share / 3, n_clients=n, **place)
        again = SumGrid.of(query, spec, limit_of(spec), share / 3, n)
        assert (noisy.exponent, noisy.sigma) == (again.exponent, again.client_sigma)
    assert of_server == grid_of(query, PrivacySpec.from_json(spec.to_json()), share, n)


# Holding totals back.


@given(
    seed=st.integers(0, 1000),
    n_records=st.integers(1, 60),
    adjacency=st.sampled_from(["add_remove", "replace_one"]),
    unit=st.sampled_from(["record", "client"]),
    public_size=st.sampled_from([1, 2, None]),
)
def test_holding_back_brings_neighbours_no_farther_apart(
    seed, n_records, adjacency, unit, public_size
):
    spec = replace(SPEC, adjacency=adjacency, unit=unit, public_size=public_size)
    rng = np.random.default_rng(seed)
    X = np.where(rng.random((n_records, 1)) < 0.7, 1.0, rng.uniform(-1, 1, (n_records, 2)))
    if unit == "client":
        other = X[:0] if adjacency == "add_remove" else -X[: n_records // 2 + 1]
    else:
        other = X[1:] if adjacency == "add_remove" else np.concatenate([-X[:1], X[1:]])
    for query in (CellSums(X[:1] / 2, 1.0, 0.9), Moments(2), Cost(X[:1], np.ones(2), 2.0)):
        grid = grid_of(query, spec, 1.0, 5)
        # Much less room than there is, so that most totals are held back.
        tight = replace(grid, client_largest=grid.client_largest // 7)
        for each in (grid, tight):
            a, b = (exact_sum(query, data, spec, each) for data in (X, other))
            apart = [(a.fields[name] - b.fields[name]).ravel() for name in a.fields]
            distance = np.linalg.norm(np.concatenate(apart).astype(float))
            assert distance <= a.sensitivity.value
            assert a.sensitivity == b.sensitivity
            steps = unit_sensitivity(query, spec, grid.exponent).value
            assert a.sensitivity.value == pytest.approx(steps, rel=1e-12)


def test_only_totals_beyond_the_bound_are_changed_by_holding_back():
    bounded = mechanism.Bounded(
        {"a": np.array([[-9, 3], [10, 0]])}, unit_sensitivity(Moments(2), SPEC), 0
    )
    held = bounded.held(5)
    np.testing.assert_array_equal(held.fields["a"], [[-5, 3], [5, 0]])
    assert held.sensitivity == bounded.sensitivity
