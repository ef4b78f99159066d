import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from secure_fedclust import ParameterError, PrivacySpec
from secure_fedclust.privacy.domain import Domain

TARGET = {"epsilon": 1.0, "delta": 1e-5}
BOX = Domain.of(PrivacySpec(**TARGET, ranges=[(0, 120), (-3, 1)]), 2)
BALL = Domain.of(PrivacySpec(**TARGET, bound=10.0, center=[5.0, 0, 0, 0]), 4)

values = st.floats(-1e40, 1e40)


def test_ranges_become_the_unit_box():
    working, share = BOX.enter(np.array([[0.0, -3], [120, 1], [60, -1]]))
    np.testing.assert_array_equal(working, [[-1, -1], [1, 1], [0, 0]])
    assert share == 0


def test_a_ball_becomes_one_of_radius_root_d():
    working, share = BALL.enter(np.array([[5.0, 0, 0, 10], [5, 0, 0, 0]]))
    np.testing.assert_allclose(np.linalg.norm(working, axis=1), [2, 0])
    assert share == 0 and BALL.bound == 2


def test_a_ball_without_a_centre_is_about_the_origin():
    domain = Domain.of(PrivacySpec(**TARGET, bound=3.0), 9)
    np.testing.assert_array_equal(domain.center, np.zeros(9))
    np.testing.assert_allclose(domain.scale, 1.0)


def test_what_lies_outside_moves_to_the_nearest_place_inside():
    working, _ = BOX.enter(np.array([[200.0, -1], [60, -100]]))
    np.testing.assert_array_equal(working, [[1, 0], [0, -1]])
    working, _ = BALL.enter(np.array([[5.0, 0, 0, 40], [35, 40, 0, 0]]))
    np.testing.assert_allclose(BALL.leave(working), [[5, 0, 0, 10], [11, 8, 0, 0]])


def test_the_share_of_records_outside_is_told():
    assert BOX.enter(np.array([[200.0, 0], [60, 0], [60, 5], [1, 1]]))[1] == 0.5
    assert BALL.enter(np.full((3, 4), 100.0))[1] == 1.0
    assert BOX.enter(np.zeros((0, 2)))[1] == 0.0


@pytest.mark.parametrize("domain", [BOX, BALL], ids=["box", "ball"])
@given(data=st.data())
def test_no_record_stays_longer_than_the_bound(domain, data):
    d = domain.n_features
    X = data.draw(arrays(np.float64, st.tuples(st.integers(0, 4), st.just(d)), elements=values))
    working, _ = domain.enter(X)
    assert working.shape == X.shape and working.flags.c_contiguous
    assert np.isfinite(working).all()
    lengths = np.sqrt(np.square(working).sum(axis=1))
    assert (lengths <= math.sqrt(d) * (1 + 1e-12)).all()
    assert not domain.box or (np.abs(working) <= 1).all()


@pytest.mark.parametrize("domain", [BOX, BALL], ids=["box", "ball"])
@given(data=st.data())
def test_a_record_is_moved_alike_whatever_others_there_are(domain, data):
    d = domain.n_features
    X = data.draw(arrays(np.float64, (3, d), elements=st.floats(-1e3, 1e3)))
    together = domain.enter(X)[0]
    np.testing.assert_array_equal(together[1], domain.enter(X[1:2])[0][0])
    np.testing.assert_array_equal(together[::-1], domain.enter(X[::-1])[0])


@pytest.mark.parametrize("domain", [BOX, BALL], ids=["box", "ball"])
def test_records_inside_come_back_as_they_were(domain):
    rng = np.random.default_rng(0)
    working = domain.hold(rng.uniform(-1, 1, (50, domain.n_features)))
    X = domain.leave(working)
    again, _ = domain.enter(X)
    np.testing.assert_allclose(again, working, atol=1e-12)
    np.testing.assert_allclose(domain.leave(again), X)


def test_entering_leaves_the_callers_records_alone():
    X = np.full((3, 4), 100.0)
    X.flags.writeable = False
    BALL.enter(X)
    Domain.of(PrivacySpec(**TARGET, ranges=[(0, 1)] * 4), 4).enter(X)
    np.testing.assert_array_equal(X, 100.0)


@pytest.mark.parametrize(
    ("region", "n_features", "message"),
    [
        ({"ranges": [(0, 1)] * 3}, 2, "ranges: 3 given, the records have 2 features"),
        ({"ranges": [(0, 1)]}, 2, "ranges: 1 given, the records have 2 features"),
        ({"bound": 1.0, "center": [0, 0, 0]}, 2, "center: 3 given, the records have 2"),
    ],
)
def test_a_region_of_another_width_is_refused(region, n_features, message):
    with pytest.raises(ParameterError, match=message):
        Domain.of(PrivacySpec(**TARGET, **region), n_features)


def test_a_spec_without_a_region_is_refused():
    with pytest.raises(ParameterError, match="no bound"):
        Domain.of(PrivacySpec.none(reason="test"), 2)


@pytest.mark.parametrize("tiny", [1e-30, 1e-300, 5e-324])
def test_records_far_beyond_a_tiny_region_are_brought_in_without_a_numeric_warning(tiny):
    """A spec either refuses the ranges or works with them."""
    try:
        spec = PrivacySpec(**TARGET, ranges=[(0, tiny)])
    except ParameterError:
        return
    working, share = Domain.of(spec, 1).enter(np.array([[0.0], [1e40]]))
    np.testing.assert_allclose(working, [[-1], [1]])
    assert share == 0.5
