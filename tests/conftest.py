import os
from pathlib import Path

import pytest
from hypothesis import settings

# The machine may be busy, and CI must not find something new in an unrelated change.
settings.register_profile("default", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("default")

DEFAULT_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser):
    parser.addoption("--data-dir", default=None, help="folder with the real data sets (*.npz)")


@pytest.fixture(scope="session")
def data_dir(request):
    given = request.config.getoption("--data-dir") or os.environ.get("SECURE_FEDCLUST_DATA")
    folder = Path(given) if given else DEFAULT_DATA
    if not (folder / "s1.npz").is_file():
        pytest.skip(f"real data sets not found in {folder}: pass --data-dir")
    return folder
