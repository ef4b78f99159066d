"""AFCL's message is the records."""

import numpy as np
import pytest

from secure_fedclust import ParameterError
from secure_fedclust.audit.attacks.exhibits import afcl, afcl_message


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def test_every_record_and_every_seed_is_found(rng):
    found = afcl(rng=rng)
    assert found.kind == "exhibit" and found.verdict == "FAIL"
    assert found.figure == 1.0 and found.trials == 500
    assert found.more["largest error"] < 1e-14
    assert found.more["seeds that are records"] == found.more["seeds"] == 10
    assert found.ceiling < 1e-6
    assert "500 of 500" in found.words


def test_a_row_is_the_weighted_difference_from_the_nearest_centre():
    X = np.array([[0.0, 1.0], [4.0, 4.0]])
    centers = np.array([[5.0, 5.0], [1.0, 1.0]])
    rows, winners = afcl_message(X, centers, np.array([2.0, 0.5]))
    assert winners.tolist() == [1, 0]
    assert rows.tolist() == [[-2.0, 0.0], [-2.0, -0.5]]


def test_weights_that_the_server_does_not_have_would_hide_the_records(rng, monkeypatch):
    from secure_fedclust.audit.attacks import exhibits

    def other(X, centers, weights):
        return afcl_message(X, centers, 2 * weights)

    monkeypatch.setattr(exhibits, "afcl_message", other)
    # Only the seeds, whose rows are zero, are still found.
    assert afcl(rng=rng).figure == pytest.approx(10 / 500)


@pytest.mark.parametrize(
    "wrong", [{"n_records": 0}, {"n_seeds": 501}, {"epsilon": 0}, {"delta": 2}, {"confidence": 1}]
)
def test_what_makes_no_sense_is_refused(wrong, rng):
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        afcl(**wrong, rng=rng)
