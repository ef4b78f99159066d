import os
from pathlib import Path

import pytest

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
