import numpy as np
import pytest
from scipy import stats

from secure_fedclust import PrivacyWarning
from secure_fedclust.sweep import SweepConfig, sweep, workers
from secure_fedclust.sweep.table import COLUMNS
from secure_fedclust.sweep.trends import _p_of_a_fall, falling

EPSILONS = (0.5, 1.0, 2.0, 4.0)


def rows_of(means, *, n=10, sd=0.01, seed=0, **setting):
    """A table in which ARI has these means."""
    rng = np.random.default_rng(seed)
    setting = {
        "algorithm": "FKM",
        "protection": "masking",
        "clients": 10,
        "partition": "iid",
    } | setting
    return [
        dict.fromkeys(COLUMNS)
        | setting
        | {"epsilon": epsilon, "seed": i, "ari": mean + sd * rng.standard_normal()}
        for epsilon, mean in zip(EPSILONS, means, strict=True)
        for i in range(n)
    ]


def test_a_fall_is_named_with_system_protection_epsilons_and_figures():
    lines = falling(rows_of([0.5, 0.9, 0.8, 0.95]))
    assert len(lines) == 1
    assert "FKM, protection masking, 10 clients, iid: ARI falls from 0.895" in lines[0]
    assert "at epsilon 1 to 0.800" in lines[0] and "at epsilon 2 (" in lines[0]


def test_a_slow_fall_over_many_epsilons_is_found():
    assert "at epsilon 0.5 to" in falling(rows_of([0.93, 0.92, 0.91, 0.90], n=20, sd=0.02))[0]


def test_a_table_that_rises_is_silent():
    assert falling(rows_of([0.5, 0.7, 0.8, 0.9])) == []
    assert falling(rows_of([1.0] * 4, sd=0)) == []


def test_noise_alone_hardly_ever_warns_over_many_tables():
    flat = [falling(rows_of([0.9] * 4, seed=seed)) for seed in range(100)]
    # Five in a hundred are allowed.
    assert sum(map(bool, flat)) <= 11


def test_comparisons_are_corrected_for_their_number():
    one = rows_of([0.9, 0.9, 0.9, 0.885], n=10, sd=0.01, seed=3)
    others = [row for k in range(300) for row in rows_of([0.9] * 4, seed=100 + k, clients=k)]
    assert falling(one) != []
    assert falling([*one, *others]) == []


def test_a_fall_that_is_the_same_for_every_seed_is_found():
    assert len(falling(rows_of([0.9, 0.9, 0.9, 0.8], sd=0))) == 3


@pytest.mark.parametrize("change", [{"epsilon": "none"}, {"ari": None}, {"seed": 0}])
def test_what_cannot_be_compared_is_left_out(change):
    rows = [row | change for row in rows_of([0.9, 0.5, 0.5, 0.5])]
    if "seed" in change:
        rows = rows[::10]
    assert falling(rows) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_never_significant(bad):
    rows = rows_of([0.9] * 4, sd=0)
    rows[0]["ari"] = rows[-1]["ari"] = bad
    assert falling(rows) == []
    assert len(falling([*rows, *rows_of([0.9, 0.9, 0.9, 0.8], sd=0, clients=5)])) == 3


def test_the_test_is_that_of_scipy():
    rng = np.random.default_rng(0)
    before, after = rng.normal(size=(2, 12))
    p = stats.ttest_rel(after, before, alternative="less").pvalue
    assert _p_of_a_fall(before, after) == pytest.approx(p, rel=1e-12)


def test_a_sweep_warns_and_keeps_the_line(content, tmp_path, monkeypatch):
    def run(cell, config, data):
        ari = 0.9 + 0.001 * cell.seed - 0.1 * (cell.epsilon == 8)
        figures = {"ari": ari, "nmi": ari, "n_clusters": 3, "bytes_up": 1.0, "bytes_down": 1.0}
        return figures | {"exchanges": 1, "seconds": 0.1, "claim": "NO DP CLAIM", "error": None}

    monkeypatch.setattr(workers, "run_cell", run)
    with pytest.warns(PrivacyWarning, match="KFed, protection none, 4 clients, iid: ARI falls"):
        result = sweep(SweepConfig.from_dict(content), tmp_path, jobs=1)
    assert len(result.warnings) == 1 and "at epsilon 8" in result.warnings[0]


def test_a_fall_too_small_to_matter_is_passed_over():
    assert falling(rows_of([0.998, 0.995, 0.993, 0.991], n=20, sd=1e-5)) == []
