import copy

import pytest

CONTENT = {
    "seeds": 2,
    "grid": {"algorithm": "KFed", "epsilon": [1, 8], "clients": 4},
    "parameters": {"KFed": {"n_clusters": 3, "n_local_clusters": 3}},
    "privacy": {"delta": 1e-4, "ranges": [[-14, 14]] * 2, "public_size": 100},
    "data": {
        "generator": "rmin_blobs",
        "n_samples": 400,
        "n_features": 2,
        "n_clusters": 3,
        "r_min": 6,
    },
}


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """Pictures take a second, and only tests that ask for them look at them."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("secure_fedclust.sweep.plots.draw_all", lambda *given: ())


@pytest.fixture
def pictures():
    """The files that a sweep draws."""
    names = ("utility", "n_clusters", "bytes", "seconds")
    return [f"{name}.{ending}" for name in names for ending in ("png", "svg")]


@pytest.fixture
def content():
    """What a small file holds, to be changed."""
    return copy.deepcopy(CONTENT)
