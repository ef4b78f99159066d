import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from secure_fedclust.sweep import SweepConfig, sweep
from secure_fedclust.sweep.cells import cells_of
from secure_fedclust.sweep.checks import check_sweep
from secure_fedclust.sweep.data import LabelledData

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples" / "sweeps").glob("*.toml"))


def test_there_are_examples():
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_run_of_the_example_can_be_made_and_needs_no_file(path):
    config = SweepConfig.read(path)
    assert "generator" in config.data
    check_sweep(cells_of(config), config, LabelledData(config))


# Noise is not seeded: with one seed, and so few runs, anything may fall.
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_part_of_the_example_runs(path, tmp_path):
    content = tomllib.loads(path.read_text())
    content["seeds"] = 1
    content["grid"]["epsilon"] = content["grid"]["epsilon"][-1:]
    content["grid"].pop("clients", None)
    result = sweep(SweepConfig.from_dict(content), tmp_path, jobs=1)
    assert result.n_failed == 0
    assert min(row["ari"] for row in result.rows) > 0.5


@pytest.mark.slow
def test_the_benchmark_meets_its_bars_with_one_seed(data_dir, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES[0].parents[2] / "benchmarks")
    arguments = ["--seeds", "1", "--data-dir", str(data_dir), "--check"]
    assert import_module("sweep").main(arguments) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::secure_fedclust.errors.PrivacyWarning")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs_as_it_stands(path, tmp_path, pictures):
    result = sweep(SweepConfig.read(path), tmp_path, jobs=2)
    assert result.n_failed == 0 and all((tmp_path / name).exists() for name in pictures)
