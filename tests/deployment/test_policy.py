"""What a client's policy demands of a run, and what a policy file may say."""

import dataclasses

import pytest

from secure_fedclust import PrivacySpec
from secure_fedclust.deployment.policy import Policy
from secure_fedclust.errors import ParameterError, PolicyRefusal

CONTENT = {
    "max_epsilon": 2.0,
    "max_delta": 1e-5,
    "protocols": ["FKM", "KFed"],
    "protections": ["none", "masking", "ckks"],
    "min_cohort": 3,
    "max_cohort": 100,
}
SPEC = PrivacySpec(epsilon=2.0, delta=1e-5, ranges=[(0, 1)])
MASKED = dataclasses.replace(SPEC, protection="masking", min_survivors=3)


def policy(**changes):
    return Policy.of(CONTENT | changes, "policy.toml")


def refusal(asked, algorithm="FKM", n_clients=4, **demands):
    with pytest.raises(PolicyRefusal) as error:
        policy(**demands).check(algorithm, asked, n_clients)
    return str(error.value)


def changed(spec, **changes):
    return dataclasses.replace(spec, **changes)


@pytest.mark.parametrize("spec", [SPEC, MASKED], ids=["none", "masking"])
def test_a_run_within_every_demand_is_allowed(spec):
    policy().check("FKM", spec, 3)
    policy().check("KFed", spec, 100)


def test_more_epsilon_than_allowed_is_refused():
    said = refusal(changed(SPEC, epsilon=2.1))
    assert "epsilon 2.1" in said
    assert "allows 2 " in said


def test_more_delta_than_allowed_is_refused():
    said = refusal(changed(SPEC, delta=1.1e-5))
    assert "delta 1.1e-05" in said
    assert "allows 1e-05 " in said


def test_epsilon_is_that_of_a_person_where_a_run_is_about_persons():
    spec = changed(SPEC, epsilon=1.5, records_per_person=3)
    assert spec.person_epsilon() > 2.0
    said = refusal(spec, max_records_per_person=3)
    assert f"epsilon {spec.person_epsilon():g}" in said
    assert "allows 2 " in said
    policy(max_epsilon=spec.person_epsilon(), max_records_per_person=3).check("FKM", spec, 4)


def test_one_record_of_a_person_costs_what_a_record_costs():
    limited = changed(SPEC, epsilon=1.99, records_per_person=1)
    policy(max_records_per_person=1).check("FKM", limited, 4)


def test_another_protocol_is_refused():
    said = refusal(SPEC, algorithm="GOLD")
    assert "GOLD" in said
    assert "allows FKM, KFed" in said


@pytest.mark.parametrize("asked", ["none", "masking", "ckks"])
def test_another_protection_is_refused(asked):
    allowed = [each for each in CONTENT["protections"] if each != asked]
    spec = changed(SPEC, protection=asked, min_survivors=None if asked == "none" else 3)
    said = refusal(spec, protections=allowed)
    assert repr(asked) in said
    assert f"allows {', '.join(allowed)}" in said


def test_a_smaller_cohort_is_refused_without_a_protection():
    said = refusal(SPEC, n_clients=2)
    assert "2 clients are asked" in said
    assert "demands 3" in said


def test_a_cohort_is_as_small_as_a_sum_may_become():
    said = refusal(changed(MASKED, min_survivors=2), n_clients=50)
    assert "2 clients may be left in a sum (min_survivors)" in said
    assert "demands 3" in said


def test_a_cohort_is_not_larger_than_those_who_are_asked():
    assert "4 clients may be left" in refusal(
        changed(MASKED, min_survivors=9), min_cohort=5, n_clients=4
    )


def test_a_larger_cohort_is_refused():
    policy(max_cohort=4).check("FKM", SPEC, 4)
    said = refusal(SPEC, max_cohort=4, n_clients=5)
    assert said.startswith("5 clients are asked")
    assert "allows 4 at most" in said


def test_a_sum_without_a_quorum_is_refused():
    assert "0 clients may be left" in refusal(changed(MASKED, min_survivors=None))


@pytest.mark.parametrize("n_clients", [0, -1])
def test_a_run_of_nobody_is_refused(n_clients):
    assert f"{n_clients} clients are asked" in refusal(SPEC, n_clients=n_clients, min_cohort=1)


@pytest.mark.parametrize("protection", ["masking", "ckks"])
def test_sums_that_withstand_fewer_colluders_are_refused(protection):
    said = refusal(changed(MASKED, protection=protection), min_colluders=2)
    assert "withstand 1 colluders" in said
    assert "demands 2" in said


def test_without_a_protection_nobody_has_to_collude():
    policy(min_colluders=5).check("FKM", SPEC, 4)


def test_a_run_that_trusts_the_server_is_refused_where_it_must_not():
    strict = {"active_server": True, "protections": ["none", "masking"]}
    said = refusal(MASKED, **strict)
    assert "trusts the server" in said
    assert "policy" in said
    policy(**strict).check("FKM", changed(MASKED, active_server=True), 4)


def test_a_policy_that_trusts_no_server_does_not_allow_what_trusts_it():
    with pytest.raises(ParameterError, match="encrypted sums trust the server"):
        policy(active_server=True)


@pytest.mark.parametrize("protection", ["masking", "ckks"])
def test_how_many_share_the_noise_is_not_left_to_the_server(protection):
    content = {key: value for key, value in CONTENT.items() if key != "max_cohort"}
    with pytest.raises(ParameterError, match="max_cohort is missing"):
        Policy.of(content | {"protections": [protection]}, "policy.toml")
    Policy.of(content | {"protections": ["none"]}, "policy.toml")
    Policy.of(content | {"protections": ["masking"], "active_server": True}, "policy.toml")


def test_how_many_records_of_a_person_a_run_uses_is_not_left_to_the_server():
    limited = changed(SPEC, epsilon=0.1, records_per_person=3)
    assert "3 records of a person, the policy allows 0" in refusal(limited)
    assert "allows 2" in refusal(limited, max_records_per_person=2)
    policy(max_records_per_person=3).check("FKM", limited, 4)


def test_a_run_without_privacy_is_refused_unless_it_is_allowed():
    spec = PrivacySpec.none(reason="test")
    assert "no differential privacy, which the policy demands" in refusal(spec)
    policy(without_privacy=True).check("FKM", spec, 4)


def test_the_other_demands_hold_without_privacy():
    spec = PrivacySpec.none(reason="test")
    assert "GOLD" in refusal(spec, algorithm="GOLD", without_privacy=True)
    assert "2 clients are asked" in refusal(spec, n_clients=2, without_privacy=True)


@pytest.mark.parametrize("name", CONTENT)
def test_a_policy_that_leaves_out_a_demand_is_refused(tmp_path, name):
    path = written(tmp_path, {key: value for key, value in CONTENT.items() if key != name})
    with pytest.raises(ParameterError, match=f"{name} is missing"):
        Policy.read(path)


@pytest.mark.parametrize(
    "name", [*CONTENT, "min_colluders", "active_server", "without_privacy", "unknown"]
)
def test_a_misspelt_key_is_named(tmp_path, name):
    path = written(tmp_path, CONTENT | {f"{name}x": 1})
    with pytest.raises(ParameterError, match=rf"policy\.toml: unknown {name}x; there are"):
        Policy.read(path)


def test_a_policy_is_read_as_it_was_written(tmp_path):
    content = CONTENT | {"min_colluders": 2, "without_privacy": True, "max_records_per_person": 2}
    assert Policy.read(written(tmp_path, content)) == Policy(**content)


def test_what_is_not_said_is_not_lenient(tmp_path):
    found = Policy.read(written(tmp_path, CONTENT))
    assert (found.min_colluders, found.without_privacy) == (1, False)


@pytest.mark.parametrize("content", [b"\xff", b"max_epsilon =", b"[a\n"])
def test_a_file_that_is_no_toml_is_refused(tmp_path, content):
    path = tmp_path / "policy.toml"
    path.write_bytes(content)
    with pytest.raises(ParameterError, match="not valid TOML"):
        Policy.read(path)


def test_a_policy_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ParameterError, match=r"gone\.toml cannot be read"):
        Policy.read(tmp_path / "gone.toml")


WRONG = {
    "max_epsilon": [True, float("nan"), "1", 0, -1.0, [1.0]],
    "max_delta": [True, float("nan"), "1e-5", 0, -1e-5],
    "protocols": ["FKM", [], ["FKN"], ["FKM", 3], [""]],
    "protections": ["none", [], ["mask"], ["none", True]],
    "min_cohort": [True, 2.0, 0, -1, "2", float("nan"), float("inf")],
    "max_cohort": [True, 2.0, 0, -1, "2"],
    "max_records_per_person": [True, 2.0, 0, -1, "2"],
    "min_colluders": [True, 1.0, -1, "1", float("inf")],
    "active_server": [1, 0, "true", 1.0],
    "without_privacy": [1, 0, "false", []],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_value_of_the_wrong_kind_is_named(name, value):
    with pytest.raises(ParameterError, match=rf"^policy\.toml: {name} = .*: give "):
        policy(**{name: value})


def written(tmp_path, content):
    path = tmp_path / "policy.toml"
    lines = [f"{name} = {toml(value)}" for name, value in content.items()]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def toml(value):
    return str(value).lower() if isinstance(value, bool) else repr(value)
