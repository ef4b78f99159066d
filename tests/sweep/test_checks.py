import sys

import pytest

from secure_fedclust import DataError, ParameterError
from secure_fedclust.sweep import SweepConfig, sweep, workers


@pytest.fixture(autouse=True)
def no_run(monkeypatch):
    """A sweep that is refused makes no run."""

    def run(*given):
        raise AssertionError("a run was made")

    monkeypatch.setattr(workers, "run_cell", run)


def refuse(content, tmp_path, said):
    with pytest.raises(ParameterError, match=said) as raised:
        sweep(SweepConfig.from_dict(content), tmp_path / "out", jobs=1)
    assert not (tmp_path / "out").exists(), "nothing is left of a sweep that was refused"
    return str(raised.value)


def with_fkm(content, **grid):
    content["grid"] |= {"algorithm": "FKM"} | grid
    content["parameters"] = {"FKM": {"n_clusters": 3}}
    return content


def test_client_level_privacy_of_single_messages_is_refused(content, tmp_path):
    content["privacy"]["unit"] = "client"
    said = refuse(with_fkm(content), tmp_path, "unit='client' is not available")
    assert "FKM, epsilon 1, protection none, 4 clients, partition iid, seed 0" in said


def test_client_level_privacy_of_a_system_that_needs_more_than_sums_is_refused(content, tmp_path):
    content["privacy"]["unit"] = "client"
    content["grid"]["protection"] = "masking"
    refuse(content, tmp_path, "use FKM with protection='masking'")


@pytest.mark.parametrize("protection", ["ckks", "masking"])
def test_protection_without_epsilon_is_refused_with_a_way_out(content, tmp_path, protection):
    content["grid"] |= {"epsilon": [1, "none"], "protection": ["none", protection]}
    said = refuse(content, tmp_path, f"KFed, epsilon none, protection {protection}")
    assert "put it into baselines" in said


def test_masked_sums_of_two_clients_are_refused(content, tmp_path):
    content["grid"] |= {"protection": ["none", "masking"], "clients": [4, 2]}
    said = refuse(content, tmp_path, "a cohort of 2 clients")
    assert "protection masking, 2 clients" in said


def test_more_survivors_than_clients_are_refused(content, tmp_path):
    content["privacy"]["min_survivors"] = 7
    refuse(with_fkm(content, protection="masking"), tmp_path, "min_survivors=7 of 4 clients")


@pytest.mark.parametrize(
    "partition, said",
    [
        ("dirichlet", "alpha"),
        ({"name": "dirichlet", "alpha": -1}, "alpha=-1"),
        ({"name": "iid", "alpha": 1}, "unexpected keyword argument 'alpha'"),
        ({"name": "cluster_subset", "n_local_clusters": 9}, "n_local_clusters=9"),
    ],
)
def test_a_partition_that_cannot_be_made_is_refused(content, tmp_path, partition, said):
    content["grid"]["partition"] = ["iid", partition]
    refuse(content, tmp_path, said)


def test_more_clients_than_records_are_refused(content, tmp_path):
    content["grid"]["clients"] = [4, 401]
    refuse(content, tmp_path, "401 clients.*n_clients=401 is more than the 400 records")


@pytest.mark.parametrize("name, number", [("n_clusters", 401), ("n_local_clusters", 101)])
def test_more_clusters_than_records_are_refused(content, tmp_path, name, number):
    content["parameters"]["KFed"][name] = number
    refuse(content, tmp_path, f"{name}={number}: .* records; give fewer")


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("ranges", [[0, 1]], "for 1 features; the data have 2"),
        ("ranges", [[1, 0], [0, 1]], "low must be below high"),
        ("delta", 0.5, "delta=0.5 would allow"),
        ("public_size", "few", "public_size = 'few'"),
        ("colluders", "one", "colluders='one'"),
    ],
)
def test_a_promise_that_cannot_be_made_is_refused(content, tmp_path, key, value, said):
    content["grid"]["protection"] = "masking"
    content["privacy"][key] = value
    refuse(content, tmp_path, said)


def test_an_epsilon_out_of_range_is_refused_before_the_good_ones_are_run(content, tmp_path):
    content["grid"]["epsilon"] = [1, 1000]
    refuse(content, tmp_path, "(?s)epsilon 1000.*epsilon=1000.0: give a number")


def test_a_parameter_of_a_system_that_is_wrong_is_refused(content, tmp_path):
    content["parameters"]["KFed"]["n_clusters"] = "many"
    refuse(content, tmp_path, "n_clusters='many'")


def test_a_generator_that_lacks_an_argument_is_refused(content, tmp_path):
    del content["data"]["r_min"]
    refuse(content, tmp_path, "r_min")


def test_an_unknown_benchmark_is_refused(content, tmp_path):
    content["data"] = {"benchmark": "absent"}
    with pytest.raises(DataError, match="no data"):
        sweep(SweepConfig.from_dict(content), tmp_path / "out", data_dir=tmp_path)


def test_diffprivlib_is_refused_where_it_is_not_installed(content, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffprivlib", None)
    said = refuse(content | {"baselines": ["diffprivlib"]}, tmp_path, "diffprivlib is not")
    assert "pip install 'secure-fedclust[compare]'" in said


def test_diffprivlib_is_refused_without_ranges(content, tmp_path):
    pytest.importorskip("diffprivlib")
    del content["privacy"]["ranges"]
    content["privacy"]["bound"] = 20
    refuse(content | {"baselines": ["diffprivlib"]}, tmp_path, "diffprivlib needs ranges")


def test_a_number_of_jobs_that_is_none_is_refused(content, tmp_path):
    with pytest.raises(ParameterError, match="jobs=0"):
        sweep(SweepConfig.from_dict(content), tmp_path / "out", jobs=0)
