import pytest

from secure_fedclust.sweep import SweepConfig, sweep
from secure_fedclust.sweep.baselines import overspending
from secure_fedclust.sweep.notes import footnotes


def summary_row(**given):
    return {"figure": "ari", "n": 2, "failed": 0, "trust": "local"} | given


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
    notes = footnotes(SweepConfig.from_dict(content), 10, [summary_row()])
    assert "NO DP CLAIM: noise is from a fast generator" in notes
    assert "NOT PRIVATE, but taken from the whole data set as if public: ranges and" in notes
    assert "With 10 features it spends 1.21 times the epsilon" in notes
    assert "delta 0.0001" in notes


def test_footnotes_do_not_say_what_is_not_so(content):
    notes = footnotes(SweepConfig.from_dict(content | {"sampler": "secure"}), 2, [summary_row()])
    for words in ("NO DP CLAIM", "NOT PRIVATE", "diffprivlib", "true", "FAILED", "Hollow"):
        assert words not in notes
    assert "over 2 seeds" in notes


def test_footnotes_say_that_known_numbers_of_clusters_leave_no_claim(content):
    content |= {"sampler": "secure"}
    content["grid"]["algorithm"] = ["KFed", "GOLD"]
    content["parameters"] = {"KFed": {"n_clusters": "truth"}, "GOLD": {"n_clusters": 3}}
    notes = footnotes(SweepConfig.from_dict(content), 2, [summary_row()])
    assert "NO DP CLAIM for KFed: NOT PRIVATE" in notes
    content["grid"]["epsilon"] = "none"
    notes = footnotes(SweepConfig.from_dict(content), 2, [summary_row()])
    assert "NO DP CLAIM" not in notes and "clusters are the true ones" in notes


@pytest.mark.parametrize(
    "numbers, said",
    [
        ([4, 1], ["over 1 to 4 seeds", "3 of 8 runs FAILED", "behind a mean is 1 of 4", "Hollow"]),
        ([3, 3], ["over 3 seeds", "2 of 8 runs FAILED", "behind a mean is 3 of 4"]),
        ([4, 0], ["over 0 to 4 seeds", "4 of 8 runs FAILED", "mean is 4 of 4", "not drawn"]),
        ([0, 0], ["over 0 seeds", "8 of 8 runs FAILED", "not drawn"]),
    ],
)
def test_footnotes_say_how_many_runs_failed_and_what_is_left(content, numbers, said):
    summary = [summary_row(n=n, failed=4 - n) for n in numbers]
    notes = footnotes(SweepConfig.from_dict(content | {"seeds": 4}), 2, summary)
    for words in said:
        assert words in notes
    assert ("Hollow" in notes) == ("Hollow" in said)
