import pytest

from secure_fedclust import ParameterError
from secure_fedclust.sweep import SweepConfig


def changed(content, path, value):
    *above, key = path.split(".")
    table = content
    for name in above:
        table = table.setdefault(name, {})
    table[key] = value
    return content


def test_a_file_means_the_same_after_it_was_written_down(content):
    config = SweepConfig.from_dict(content)
    assert SweepConfig.from_dict(config.to_dict()) == config
    assert config.seeds == (0, 1) and config.sampler == "fast" and config.baselines == ()
    assert config.grid.epsilon == (1.0, 8.0) and list(config.grid.partition) == ["iid"]


def test_numbers_that_are_equal_make_equal_configurations(content):
    config = SweepConfig.from_dict(
        changed(content, "grid.partition", {"name": "dirichlet", "alpha": 1})
    )
    other = SweepConfig.from_dict(
        changed(content, "grid.partition", {"name": "dirichlet", "alpha": 1.0})
    )
    assert list(config.grid.partition) == list(other.grid.partition) == ["dirichlet(alpha=1)"]


@pytest.mark.parametrize(
    "path",
    [
        "nonsense",
        "grid.nonsense",
        "parameters.nonsense",
        "parameters.FKM",
        "parameters.KFed.nonsense",
        "parameters.KFed.random_state",
        "parameters.KFed.privacy",
        "scale.nonsense",
        "privacy.nonsense",
        "privacy.records_per_person",
    ],
)
def test_an_unknown_key_is_refused_at_every_level(content, path):
    with pytest.raises(ParameterError, match=f"unknown {path.split('.')[-1]}; there are"):
        SweepConfig.from_dict(changed(content, path, {}))


@pytest.mark.parametrize(
    "path, value, said",
    [
        ("seeds", 0, "seeds=0"),
        ("seeds", [1, 1], "different whole numbers"),
        ("seeds", [-1], "different whole numbers"),
        ("sampler", "quick", "sampler='quick'"),
        ("baselines", "central", "give a list"),
        ("baselines", ["nothing"], "baselines='nothing'"),
        ("grid", [], r"table \[grid\]"),
        ("grid.algorithm", "kmeans", "algorithm = 'kmeans'"),
        ("grid.algorithm", ["KFed", "KFed"], "'KFed' twice"),
        ("grid.algorithm", [["KFed"]], "algorithm = "),
        ("grid.epsilon", [], "epsilon is empty"),
        ("grid.epsilon", ["1"], 'give numbers, or "none"'),
        ("grid.epsilon", [True], 'give numbers, or "none"'),
        ("grid.epsilon", [1, 1.0], "twice"),
        ("grid.protection", "tls", "protection='tls'"),
        ("grid.calibration", "sums", "calibration is for FedGEM only"),
        ("grid.rounds", 3, "rounds is for FKM, FedGEM, FedCRef, DeepFeCA only"),
        ("grid.clients", 0, "clients=0"),
        ("grid.partition", "even", "partition = 'even'"),
        ("grid.partition", {"name": ["iid"]}, "partition = "),
        ("grid.partition", {"name": "iid", "seed": 1}, "seed is given by seeds"),
        ("parameters", {}, r"\[parameters.KFed\] needs n_clusters"),
        ("scale.KFed", -1, "KFed=-1"),
        ("privacy", {}, r"needs a table \[privacy\]"),
        ("privacy.epsilon", 1, r"belongs into \[grid\]"),
        ("privacy.protection", "none", r"belongs into \[grid\]"),
        ("privacy.ranges", "all", "ranges = 'all'"),
        ("data", {}, "either benchmark or generator"),
        ("data", {"source": "hospitals.csv"}, "true labels; it has source"),
        ("data", {"benchmark": 1}, "benchmark = 1"),
        ("data", {"benchmark": "s1", "seed": 1}, "unknown seed"),
        ("data.generator", "moons", "generator='moons'"),
        ("data.seed", "x", "seed = 'x'"),
    ],
)
def test_a_value_that_is_not_usable_is_named(content, path, value, said):
    with pytest.raises(ParameterError, match=said):
        SweepConfig.from_dict(changed(content, path, value))


def test_a_grid_refuses_what_the_parameters_of_a_system_give_too(content):
    content["grid"] |= {"algorithm": "FedGEM", "calibration": ["sums", "floor"]}
    content["parameters"] = {"FedGEM": {"n_local_clusters": 3, "calibration": "sums"}}
    with pytest.raises(ParameterError, match="calibration gives it too; leave one out"):
        SweepConfig.from_dict(content)
    del content["parameters"]["FedGEM"]["calibration"]
    content["grid"]["calibration"] = ["sums", "exact"]
    with pytest.raises(ParameterError, match="calibration='exact'"):
        SweepConfig.from_dict(content)


def test_diffprivlib_without_an_epsilon_is_refused(content):
    content["grid"]["epsilon"] = "none"
    with pytest.raises(ParameterError, match="diffprivlib needs an epsilon"):
        SweepConfig.from_dict(content | {"baselines": ["diffprivlib"]})


def test_a_file_that_is_not_toml_or_not_there_is_named(tmp_path):
    (tmp_path / "broken.toml").write_text("[grid")
    with pytest.raises(ParameterError, match=r"broken.toml is not valid TOML"):
        SweepConfig.read(tmp_path / "broken.toml")
    with pytest.raises(ParameterError, match=r"absent.toml cannot be read"):
        SweepConfig.read(tmp_path / "absent.toml")
