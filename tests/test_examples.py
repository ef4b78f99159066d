import runpy
from pathlib import Path

import pytest

from secure_fedclust.cli import main

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
CONFIGS = sorted(EXAMPLES.glob("*.toml"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_runs_as_it_stands(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configuration_runs_as_it_stands(path, tmp_path, capsys):
    assert main(["run", str(path), "--out", str(tmp_path)]) == 0
    assert "NO DP CLAIM" in capsys.readouterr().out


def test_the_readme_shows_the_quickstart_and_what_it_prints(capsys):
    readme = (EXAMPLES.parent / "README.md").read_text()
    blocks = [
        block.strip() for block in readme.split("```") if block.startswith(("python", "text"))
    ]
    code = next(b.removeprefix("python").strip() for b in blocks if b.startswith("python"))
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102
    printed = capsys.readouterr().out.strip()
    assert printed and printed in readme
