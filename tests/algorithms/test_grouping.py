from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from secure_fedclust.algorithms import grouping
from secure_fedclust.algorithms.grouping import overlapping_groups, overlapping_pairs


def literal_pairs(centers, radii, owners):
    return {
        (i, j)
        for i in range(len(centers))
        for j in range(i + 1, len(centers))
        if owners[i] != owners[j] and np.linalg.norm(centers[i] - centers[j]) <= radii[i] + radii[j]
    }


def partition(groups):
    return {frozenset(np.flatnonzero(groups == g)) for g in np.unique(groups)}


@st.composite
def balls(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, d = draw(st.integers(1, 60)), draw(st.integers(1, 4))
    spread = draw(st.sampled_from([0.0, 0.5, 3.0]))
    radii = rng.exponential(0.3, n) * 10.0 ** -rng.integers(0, draw(st.integers(1, 9)), n)
    radii[rng.random(n) < draw(st.sampled_from([0.0, 0.2, 1.0]))] = 0
    return spread * rng.normal(size=(n, d)), radii, rng.integers(0, draw(st.integers(1, n)), n)


@given(balls())
def test_exactly_the_overlapping_pairs_are_found_once(b):
    found = [
        (int(i), int(j)) for block in overlapping_pairs(*b) for i, j in zip(*block, strict=True)
    ]
    assert len(found) == len(set(found))
    assert set(found) == literal_pairs(*b)


@given(balls(), st.booleans())
def test_groups_are_the_connected_components_of_the_overlaps(b, as_if_large):
    n = len(b[0])
    pairs = np.array(sorted(literal_pairs(*b)), dtype=int).reshape(-1, 2)
    graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(n, n))
    _, expected = connected_components(graph, directed=False)
    # Few balls never need the ways by which many are searched, unless the limits are lowered.
    limits = {"_FEW_PAIRS": 0, "_PATIENCE": 0, "_FRONTIER": 2} if as_if_large else {}
    with patch.multiple(grouping, **limits) if limits else nullcontext():
        assert partition(overlapping_groups(*b)) == partition(expected)


def test_groups_are_numbered_without_gaps():
    centers = np.array([[0.0], [0.5], [9.0], [50.0]])
    groups = overlapping_groups(centers, np.full(4, 1.0), np.arange(4))
    assert sorted(set(groups)) == [0, 1, 2]
    assert groups[0] == groups[1]


def test_a_crowd_on_one_spot_is_one_group():
    rng = np.random.default_rng(0)
    n = 5000
    spots = rng.integers(0, 4, n)
    centers = 100.0 * np.eye(4)[spots] + rng.normal(scale=0.1, size=(n, 4))
    groups = overlapping_groups(centers, np.full(n, 1.0), np.arange(n))
    assert partition(groups) == partition(spots)


def test_balls_of_one_client_join_only_through_others():
    centers = np.array([[0.0], [1.0], [2.0]])
    radii = np.full(3, 0.6)
    assert len(set(overlapping_groups(centers, radii, np.array([0, 0, 0])))) == 3
    assert len(set(overlapping_groups(centers, radii, np.array([0, 1, 0])))) == 1
