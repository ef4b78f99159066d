import re
import runpy
import sys
from pathlib import Path

import pytest

from secure_fedclust.cli import main

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ON_DATA = ("learn_features", "refine_images")
PICTURES = {
    "learn_features": "learned_clusters.png",
    "refine_images": "refined_groups.png",
    "noisy_networks": "noisy_groups.png",
}
SCRIPTS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in ON_DATA else [])
    for path in sorted(EXAMPLES.glob("*.py"))
]
CONFIGS = sorted(EXAMPLES.glob("*.toml"))


# Noise is not seeded: once in a while it leaves a cluster less, with a warning.
@pytest.mark.filterwarnings("ignore::secure_fedclust.errors.FederationWarning")
@pytest.mark.filterwarnings("ignore::secure_fedclust.errors.PrivacyWarning")
@pytest.mark.parametrize("path", SCRIPTS)
def test_the_script_runs_as_it_stands(path, request, tmp_path, monkeypatch, capsys):
    if path.stem in ON_DATA:
        monkeypatch.setenv("SECURE_FEDCLUST_DATA", str(request.getfixturevalue("data_dir")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 3
    if path.stem in PICTURES:
        assert (tmp_path / "pictures" / PICTURES[path.stem]).stat().st_size > 10_000


@pytest.mark.parametrize("name", ON_DATA)
def test_a_script_says_which_data_it_needs_and_where_it_looked(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--data-dir", str(tmp_path)])
    with pytest.raises(SystemExit, match=f"needs (Fashion-)?MNIST: .*{re.escape(str(tmp_path))}"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.slow
def test_a_federation_of_processes_loses_a_hospital_and_ends_with_a_report(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("flwr")
    path = EXAMPLES / "deployment" / "run.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--out", str(tmp_path / "federation")])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert "1: aachen, bergen, cork\n  2: aachen, bergen\n" in printed
    assert "PRIVATE KEY" not in printed
    assert (tmp_path / "federation" / "server" / "out" / "report.html").stat().st_size > 10_000
    for hospital, there in (("aachen", True), ("bergen", True), ("cork", False)):
        found = list((tmp_path / "federation" / hospital).glob("out/*/labels.csv"))
        assert bool(found) == there


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configuration_runs_as_it_stands(path, tmp_path, capsys):
    assert main(["run", str(path), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "-differential privacy for each record" in printed and "NO DP CLAIM" not in printed


def test_the_readme_shows_the_quickstart_and_what_it_prints(capsys):
    readme = (EXAMPLES.parent / "README.md").read_text()
    blocks = [block for block in readme.split("```") if block.startswith(("python", "text"))]
    code, shown, masked = (block.split("\n", 1)[1].strip() for block in blocks)
    names = {}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102
    printed = capsys.readouterr().out.strip()
    # Noise is not seeded: words must agree, and centres nearly.
    number = re.compile(r"[-+]?\d+\.\d*")
    words = [re.sub(r"[\[\]\s]+", " ", number.sub("x", text)) for text in (printed, shown)]
    assert words[0] == words[1]
    ours, theirs = (list(map(float, number.findall(text))) for text in (printed, shown))
    assert ours == pytest.approx(theirs, abs=4)
    exec(compile(masked, "README.md", "exec"), names)  # noqa: S102
    assert names["masked"].protection == "masking"
