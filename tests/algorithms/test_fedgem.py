import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax

from secure_fedclust.algorithms import fedgem


def responsibilities(X, centers):
    return softmax(-0.5 * np.square(X[:, None] - centers).sum(axis=2), axis=1)


def expected_log_likelihood(X, gamma, center):
    return -0.5 * gamma @ np.square(X - center).sum(axis=1)


@st.composite
def data_and_centers(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, k, d = draw(st.integers(2, 30)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return rng.normal(scale=2, size=(n, d)), rng.normal(scale=2, size=(k, d)), rng


@given(data_and_centers())
def test_the_maximiser_maximises_the_expected_likelihood(case):
    X, centers, rng = case
    gamma = responsibilities(X, centers)
    maximisers, _ = fedgem.client_maximise(X, centers)
    np.testing.assert_allclose(
        maximisers, (gamma.T @ X) / gamma.sum(axis=0)[:, None], rtol=1e-9, atol=1e-9
    )
    for k, best in enumerate(maximisers):
        other = best + rng.normal(scale=0.1, size=best.shape)
        at_best = expected_log_likelihood(X, gamma[:, k], best)
        assert at_best >= expected_log_likelihood(X, gamma[:, k], other)


@given(data_and_centers())
def test_the_closed_form_radius_solves_problem_3(case):
    """Bisection over the radius, with the worst point of each ball found from its definition."""
    X, centers, _ = case
    gamma = responsibilities(X, centers)
    maximisers, squared_radii = fedgem.client_maximise(X, centers)
    for k, (center, best) in enumerate(zip(centers, maximisers, strict=True)):
        floor = expected_log_likelihood(X, gamma[:, k], center)
        direction = (center - best) / max(np.linalg.norm(center - best), 1e-12)

        def feasible(radius, k=k, best=best, direction=direction, floor=floor):
            # The likelihood is a downward paraboloid around its maximiser, so that the worst
            # points are on the sphere; all of these are equal, which the test below checks.
            worst = expected_log_likelihood(X, gamma[:, k], best + radius * direction)
            return worst >= floor - 1e-12 * abs(floor)

        low, high = 0.0, 2 * np.linalg.norm(center - best) + 1
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if feasible(middle) else (low, middle)
        assert low == pytest.approx(np.sqrt(squared_radii[k]), rel=1e-4, abs=1e-4)


@given(data_and_centers(), st.floats(0.1, 3))
def test_the_likelihood_is_equal_all_over_a_sphere_around_the_maximiser(case, radius):
    X, centers, rng = case
    gamma = responsibilities(X, centers)[:, 0]
    best = fedgem.client_maximise(X, centers)[0][0]
    steps = rng.normal(size=(10, len(best)))
    steps *= radius / np.linalg.norm(steps, axis=1, keepdims=True)
    values = [expected_log_likelihood(X, gamma, best + step) for step in steps]
    np.testing.assert_allclose(values, values[0], rtol=1e-9)


@st.composite
def overlapping_balls(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    d = draw(st.integers(1, 5))
    a, b = rng.normal(size=(2, 50, d))
    distance = np.linalg.norm(a - b, axis=1)
    share = rng.uniform(0, 1.2, 50)
    radius_a = share * distance * rng.uniform(1, 2, 50)
    radius_b = np.maximum(0, distance - radius_a) * rng.uniform(1, 2, 50)
    return a, b, radius_a, radius_b


@given(overlapping_balls())
def test_the_agreed_point_lies_in_both_balls_and_nearest_to_the_middle(balls):
    a, b, radius_a, radius_b = balls
    agreed = fedgem.agreed_points(a, b, radius_a, radius_b)
    assert (np.linalg.norm(agreed - a, axis=1) <= radius_a + 1e-9).all()
    assert (np.linalg.norm(agreed - b, axis=1) <= radius_b + 1e-9).all()
    middle = (a + b) / 2
    for share in np.linspace(0, 1, 21):
        other = a + share * (b - a)
        inside = (np.linalg.norm(other - a, axis=1) <= radius_a) & (
            np.linalg.norm(other - b, axis=1) <= radius_b
        )
        nearer = np.linalg.norm(other - middle, axis=1) < np.linalg.norm(agreed - middle, axis=1)
        assert not (inside & nearer & (np.linalg.norm(other - agreed, axis=1) > 1e-9)).any()


def test_balls_on_one_spot_agree_on_it():
    spot = np.ones((1, 2))
    assert fedgem.agreed_points(spot, spot, np.zeros(1), np.zeros(1)).tolist() == [[1, 1]]


@given(overlapping_balls())
def test_an_updated_centre_stays_in_its_own_ball(balls):
    a, b, radius_a, radius_b = balls
    centers = np.concatenate([a, b])
    radii = np.concatenate([radius_a, radius_b])
    owners = np.repeat([0, 1], len(a))
    updated = fedgem.server_update(centers, radii**2, owners)
    assert (np.linalg.norm(updated - centers, axis=1) <= radii + 1e-9).all()


def test_two_clients_meet_in_the_middle():
    centers = np.array([[0.0], [1.0], [50.0]])
    updated = fedgem.server_update(centers, np.full(3, 0.36), np.array([0, 1, 1]))
    # Each is the mean of itself and the agreed point .5.
    np.testing.assert_allclose(updated.ravel(), [0.25, 0.75, 50])


def test_a_component_that_explains_nothing_stays():
    X = np.zeros((5, 1))
    maximisers, squared_radii = fedgem.client_maximise(X, np.array([[0.0], [1e3]]))
    assert maximisers.ravel().tolist() == [0, 1e3]
    assert squared_radii.tolist() == [0, 0]


def test_final_radii_scale_with_the_features():
    maximisers = np.array([[0.0, 0], [3, 4], [30, 40]])
    radii = np.sqrt(fedgem.client_final_radii(maximisers, 3600, v=2.0))
    np.testing.assert_allclose(radii, 2 * 5 * 3 / 60)
    scaled = np.sqrt(fedgem.client_final_radii(7 * maximisers, 3600, v=2.0))
    np.testing.assert_allclose(scaled, 7 * radii)


def test_final_balls_of_one_client_never_reach_each_other():
    maximisers = np.array([[0.0, 0], [3, 4], [30, 40]])
    np.testing.assert_allclose(fedgem.client_final_radii(maximisers, 3, v=1e6), 2.5**2)
    assert fedgem.client_final_radii(maximisers[:1], 100, v=2.0).tolist() == [0]


def test_merging_averages_groups_and_counts_them():
    maximisers = np.array([[0.0], [1.0], [10.0], [1.2]])
    centers, groups = fedgem.server_merge(maximisers, np.full(4, 0.3**2), np.array([0, 1, 1, 2]))
    assert len(centers) == 3
    assert groups[1] == groups[3] != groups[0]
    np.testing.assert_allclose(centers[groups].ravel(), [0, 1.1, 10, 1.1])


def test_an_em_step_is_as_exact_far_from_the_origin():
    rng = np.random.default_rng(0)
    X, centers = rng.normal(size=(100, 2)), rng.normal(size=(3, 2))
    near, radii = fedgem.client_maximise(X, centers)
    far, far_radii = fedgem.client_maximise(X + 1e9, centers + 1e9)
    np.testing.assert_allclose(far - 1e9, near, atol=1e-5)
    np.testing.assert_allclose(far_radii, radii, atol=1e-5)
