import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from secure_fedclust import ParameterError, PrivacySpec

RANGES = [(0, 120), (0, 300)]


def test_no_privacy_needs_a_reason():
    for reason in ("", "  ", None):
        with pytest.raises(ParameterError, match="needs a reason"):
            PrivacySpec.none(reason=reason)
    with pytest.raises(ParameterError, match=r"PrivacySpec.none\(reason="):
        PrivacySpec()


def test_the_reason_and_the_missing_claim_are_stated():
    text = PrivacySpec.none(reason="public data").describe()
    assert text.startswith("NO DP CLAIM") and "public data" in text


def test_a_reason_and_an_epsilon_do_not_go_together():
    with pytest.raises(ParameterError, match="epsilon is given, and so is a reason"):
        PrivacySpec(reason="public data", epsilon=1.0)


def test_a_spec_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PrivacySpec.none(reason="test").reason = "other"


def test_a_reason_cannot_look_like_a_claim_on_a_line_of_its_own():
    with pytest.raises(ParameterError, match="one line"):
        PrivacySpec.none(reason="x)\nGUARANTEED epsilon 1")


def test_everything_wrong_is_said_at_once():
    with pytest.raises(ParameterError) as caught:
        PrivacySpec(
            epsilon=-1, delta=2, unit="row", protection="masking", colluders=-1, public_size=0
        )
    text = str(caught.value)
    assert "6 problems" in text
    for part in ("epsilon=-1", "delta=2", "unit='row'", "colluders=-1", "public_size=0", "ranges"):
        assert part in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epsilon": 0}, "epsilon=0"),
        ({"epsilon": 1e-9}, "epsilon=1e-09: give a number from 1e-06 to 100"),
        ({"epsilon": 1e9}, "epsilon=1000000000.0: give a number from"),
        ({"epsilon": float("nan")}, "epsilon=nan"),
        ({"epsilon": "1"}, "epsilon='1'"),
        ({"epsilon": True}, "epsilon=True"),
        ({"delta": None}, "delta is missing"),
        ({"delta": 0}, "delta=0"),
        ({"delta": 1e-3, "public_size": 1000}, "give less than 0.001"),
        ({"ranges": None}, "both missing"),
        ({"bound": 1.0}, "one or the other"),
        ({"ranges": None, "bound": 0}, "bound=0"),
        ({"ranges": None, "bound": float("inf")}, "bound=inf"),
        ({"ranges": None, "center": [0, 0]}, "center is given without bound"),
        ({"ranges": None, "bound": 1, "center": [0, float("nan")]}, "center="),
        ({"ranges": []}, "for each feature"),
        ({"ranges": [(0, 1), (2, 2)]}, r"ranges\[1\]"),
        ({"ranges": [(0, 1), (5, 2)]}, "low must be below high"),
        ({"ranges": [(0, float("inf"))]}, "two finite numbers"),
        ({"ranges": [(1e15, 1e15 + 1e-3)]}, "low must be below high|too narrow"),
        ({"ranges": [0, 1]}, r"ranges\[0\]=0"),
        ({"min_survivors": 1, "colluders": 1}, "above colluders"),
        ({"records_per_person": 0}, "records_per_person=0"),
        ({"records_per_person": 2, "adjacency": "replace_one"}, "add_remove' only"),
        ({"protection": "magic"}, "protection='magic'"),
        ({"adjacency": "add"}, "adjacency='add'"),
    ],
)
def test_what_is_not_usable_is_named(values, message):
    with pytest.raises(ParameterError, match=message):
        PrivacySpec(**({"epsilon": 1.0, "delta": 1e-5, "ranges": RANGES} | values))


def test_the_guarantee_is_one_sentence_that_names_unit_and_adversary():
    text = PrivacySpec(epsilon=1.0, delta=1e-5, ranges=RANGES).describe()
    for part in ("epsilon=1,", "delta=1e-05", "each record", "server included", "removing"):
        assert part in text
    assert "\n" not in text and "NO DP CLAIM" not in text
    other = PrivacySpec(epsilon=1, delta=1e-5, bound=2, adjacency="replace_one").describe()
    assert "sizes are public" in other


def test_a_persons_guarantee_is_weaker_and_stated():
    spec = PrivacySpec(epsilon=1.0, delta=1e-5, ranges=RANGES, records_per_person=3)
    assert 3 < spec.person_epsilon() < 5
    assert "at most 3 records" in spec.describe()
    one = PrivacySpec(epsilon=1.0, delta=1e-5, ranges=RANGES, records_per_person=1)
    assert one.person_epsilon() == pytest.approx(1.0, abs=1e-3)


specs = st.builds(
    PrivacySpec,
    epsilon=st.floats(1e-6, 100),
    delta=st.floats(1e-30, 1e-7),
    ranges=st.lists(st.tuples(st.floats(-1e6, 0), st.floats(1e-3, 1e6)), min_size=1, max_size=4),
    protection=st.sampled_from(["none", "masking", "ckks"]),
    public_size=st.none() | st.integers(1, 10**6),
    records_per_person=st.none() | st.integers(1, 100),
)


others = st.builds(
    PrivacySpec,
    epsilon=st.just(1.0),
    delta=st.just(1e-5),
    bound=st.floats(1e-3, 1e6),
    adjacency=st.sampled_from(["add_remove", "replace_one"]),
    unit=st.sampled_from(["record", "client"]),
)


@given(specs | others)
def test_specs_survive_json_and_toml(spec):
    assert PrivacySpec.from_json(spec.to_json()) == spec
    assert PrivacySpec.from_toml(spec.to_toml()) == spec


def test_specs_of_numpy_numbers_survive_too():
    spec = PrivacySpec(
        epsilon=np.float64(1),
        delta=1e-5,
        bound=np.float32(2),
        center=np.zeros(3),
        public_size=np.int64(100),
    )
    assert PrivacySpec.from_toml(spec.to_toml()) == spec
    none = PrivacySpec.none(reason='say "why"')
    assert PrivacySpec.from_toml(none.to_toml()) == none


@pytest.mark.parametrize("text", ["[1", "[1]", '{"epsilon": 1, "colour": 2}'])
def test_files_that_are_no_spec_are_refused(text):
    with pytest.raises(ParameterError):
        PrivacySpec.from_json(text)
    with pytest.raises(ParameterError):
        PrivacySpec.from_toml(text)


def test_the_repr_shows_only_what_was_given():
    spec = PrivacySpec(epsilon=1.0, delta=1e-5, bound=2.0)
    assert repr(spec) == "PrivacySpec(epsilon=1.0, delta=1e-05, bound=2.0)"
