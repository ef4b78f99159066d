import pytest

from .world import World


# Its threads log and allocate, which tests of other modules look at: it ends with the module.
@pytest.fixture(scope="module")
def shared_world(tmp_path_factory):
    pytest.importorskip("flwr", reason="Flower is the extra 'flower'")
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


@pytest.fixture
def world(shared_world):
    shared_world.handlers = {}
    return shared_world
