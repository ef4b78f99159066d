import pytest

from secure_fedclust.sweep import SweepConfig, sweep
from secure_fedclust.sweep.baselines import overspending
from secure_fedclust.sweep.notes import footnotes


def test_baselines_stand_beside_the_systems(content, tmp_path):
    pytest.importorskip("diffprivlib")
    content |= {"seeds": 3, "baselines": ["none", "central", "diffprivlib"]}
    content["grid"] |= {"epsilon": 8, "clients": [4, 8]}
    content["data"] |= {"n_clusters": 8, "r_min": 2}
    rows = sweep(SweepConfig.from_dict(content), tmp_path, jobs=1).rows
    central = [row for row in rows if row["algorithm"] == "central"]
    noisy = [row for row in rows if row["algorithm"] == "diffprivlib"]
    assert len(central) == len(noisy) == 3, "clients make no difference to them"
    for row in (*central, *noisy):
        assert row["clients"] is row["partition"] is row["bytes_up"] is row["error"] is None
        assert row["claim"] == "NO DP CLAIM"
    assert {row["trust"] for row in central} == {"none"}
    assert {row["trust"] for row in noisy} == {"central"}
    assert min(row["ari"] for row in central) > 0.6
    assert len({row["ari"] for row in noisy}) > 1, "its noise differs from run to run"
    assert sum(row["trust"] == "none" and row["algorithm"] == "KFed" for row in rows) == 6


@pytest.mark.parametrize("d", [2, 10, 50])
def test_what_diffprivlib_overspends_is_what_its_own_noise_adds_up_to(d):
    models = pytest.importorskip("diffprivlib.models")
    n_rounds, epsilon = 5, 1.0
    # As its update of centres unpacks them: of a count, and of each coordinate of a sum.
    count, coordinate = models.KMeans(3, epsilon=epsilon)._split_epsilon(d, n_rounds)
    spent = n_rounds * (count + d * coordinate)
    assert overspending(d) == pytest.approx(spent / epsilon)


def test_footnotes_say_loudly_what_is_not_private(content):
    content["privacy"] |= {"ranges": "data", "public_size": "data"}
    content |= {"baselines": ["diffprivlib"]}
    notes = footnotes(SweepConfig.from_dict(content), 10)
    assert "NO DP CLAIM: noise is from a fast generator" in notes
    assert "NOT PRIVATE, but taken from the whole data set as if public: ranges and" in notes
    assert "With 10 features it spends 1.21 times the epsilon" in notes
    assert "delta 0.0001" in notes


def test_footnotes_do_not_say_what_is_not_so(content):
    notes = footnotes(SweepConfig.from_dict(content | {"sampler": "secure"}), 2)
    for words in ("NO DP CLAIM", "NOT PRIVATE", "diffprivlib", "true ones"):
        assert words not in notes
