import dataclasses

import pytest

from secure_fedclust import ParameterError, PrivacySpec


def test_no_privacy_needs_a_reason():
    for reason in ("", "  ", None):
        with pytest.raises(ParameterError, match="needs a reason"):
            PrivacySpec.none(reason=reason)
    with pytest.raises(ParameterError, match="needs a reason"):
        PrivacySpec()


def test_the_reason_and_the_missing_claim_are_stated():
    text = PrivacySpec.none(reason="public data").describe()
    assert text.startswith("NO DP CLAIM") and "public data" in text


def test_a_promise_that_cannot_be_kept_is_refused():
    with pytest.raises(
        ParameterError, match=r"epsilon=1\.0: this version has no private protocols"
    ):
        PrivacySpec(epsilon=1.0)


def test_a_spec_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PrivacySpec.none(reason="test").reason = "other"


def test_a_reason_cannot_look_like_a_claim_on_a_line_of_its_own():
    with pytest.raises(ParameterError, match="one line"):
        PrivacySpec.none(reason="x)\nGUARANTEED epsilon 1")
