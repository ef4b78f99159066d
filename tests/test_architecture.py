import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "secure_fedclust"
LEAVES = {"errors", "arrays", "parameters", "messages", "threads"}
ALLOWED = {
    "algorithms": LEAVES,
    "privacy": LEAVES,
    "engines": {"errors"},
    "datasets": LEAVES | {"records", "algorithms"},
    "records": LEAVES,
    "result": LEAVES,
    "metrics": LEAVES | {"records"},
    "protocols": LEAVES | {"algorithms", "privacy", "engines", "result"},
    "run": LEAVES | {"privacy", "protocols", "engines", "records"},
    "released": LEAVES | {"algorithms", "privacy", "protocols", "records", "result", "run"},
    "base": LEAVES
    | {"algorithms", "privacy", "protocols", "engines", "records", "result", "released", "run"}
    | {"audit"},  # a model audits itself, and an audit knows no model
    "audit": LEAVES
    | {"algorithms", "privacy", "protocols", "engines", "records", "result", "run", "datasets"},
    "estimators": LEAVES | {"privacy", "protocols", "result", "base"},
    "neural": LEAVES
    | {"algorithms", "privacy", "protocols", "engines", "records", "result", "base", "run"},
    "config": LEAVES | {"privacy", "records", "datasets", "base", "estimators"},
    "deployment": LEAVES
    | {"privacy", "protocols", "engines", "records", "result", "run", "base", "config", "datasets"}
    | {"__version__"},
    "sweep": LEAVES
    | {"algorithms", "privacy", "protocols", "datasets", "records", "result", "metrics"}
    | {"base", "estimators", "config", "__version__"},
}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Tests have no package of their own, so that what they share is named by its place.
            assert node.level == 0 or ROOT / "tests" in path.parents, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(name):
    folder = PACKAGE / name
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@pytest.mark.parametrize("layer", ALLOWED)
def test_dependencies_point_one_way(layer):
    for path in files(layer):
        for name in imports_of(path):
            if name.startswith("secure_fedclust."):
                used = name.split(".")[1]
                assert used in ALLOWED[layer] | {layer}, f"{path.name} imports {name}"


@pytest.mark.parametrize("name", ["privacy", "protocols"])
def test_the_root_shows_the_parts_people_come_for_as_links(name):
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("secure_fedclust") / name


def test_nothing_imports_the_links():
    for folder in ("secure_fedclust", "tests", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in imports_of(path):
                assert name.split(".")[0] not in ("privacy", "protocols"), f"{path}: {name}"


def test_importing_the_package_is_quick_and_pulls_in_nothing_heavy():
    code = (
        "import sys, secure_fedclust;"
        "print({'torch', 'sklearn', 'numba', 'pandas', 'matplotlib'} & set(sys.modules))"
    )
    started = time.perf_counter()
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
    assert time.perf_counter() - started < 5, "a whole second is the goal, a busy machine the limit"


def test_no_module_unpickles_or_seeds_the_global_generator():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert "import pickle" not in text and "allow_pickle=True" not in text, path
        assert "np.random.seed" not in text and "RandomState" not in text, path
