from secure_fedclust.sweep import SweepConfig
from secure_fedclust.sweep.cells import Cell, cells_of

EVERYTHING = {
    "seeds": 2,
    "baselines": ["none", "central", "diffprivlib"],
    "grid": {
        "algorithm": ["FKM", "KFed", "FedGEM"],
        "epsilon": ["none", 0.5, 2],
        "calibration": ["sums", "floor"],
        "rounds": ["auto", 3],
        "clients": [5, 10],
        "partition": ["iid", {"name": "dirichlet", "alpha": 0.3}],
    },
    "parameters": {
        "FKM": {"n_clusters": 3},
        "KFed": {"n_clusters": 3},
        "FedGEM": {"n_local_clusters": 3},
    },
    "privacy": {"delta": 1e-4, "ranges": "data"},
    "data": {"generator": "fkm_grid"},
}


def of(cells, algorithm):
    return [cell for cell in cells if cell.algorithm == algorithm]


def test_a_key_multiplies_only_the_runs_that_it_applies_to():
    cells = cells_of(SweepConfig.from_dict(EVERYTHING))
    federations = 2 * 2 * 2  # seeds, clients, partitions
    assert len(of(cells, "KFed")) == federations * 3
    assert len(of(cells, "FKM")) == federations * 3 * 2
    assert len(of(cells, "FedGEM")) == federations * 2 * (1 + 2 * 2)
    assert {cell.calibration for cell in cells if cell.epsilon is None} == {None}
    assert len(of(cells, "central")) == 2
    assert len(of(cells, "diffprivlib")) == 2 * 2
    assert len(set(cells)) == len({str(cell) for cell in cells}) == len(cells)


def test_one_shot_runs_are_not_multiplied_by_rounds():
    content = EVERYTHING | {
        "parameters": EVERYTHING["parameters"] | {"FKM": {"n_clusters": 3, "one_shot": True}}
    }
    runs = of(cells_of(SweepConfig.from_dict(content)), "FKM")
    assert {cell.rounds for cell in runs if cell.epsilon is not None} == {None}
    assert {cell.rounds for cell in runs if cell.epsilon is None} == {"auto", 3}


def test_the_baseline_none_is_the_run_with_epsilon_none():
    without = EVERYTHING | {"baselines": []}
    with_baseline = EVERYTHING | {"baselines": ["none"]}
    cells = cells_of(SweepConfig.from_dict(with_baseline))
    assert set(cells) == set(cells_of(SweepConfig.from_dict(without)))


def test_a_run_is_known_by_what_it_is_and_not_by_its_place():
    grown = {
        **EVERYTHING,
        "seeds": 3,
        "grid": EVERYTHING["grid"] | {"epsilon": [2, 1, 0.5, "none"]},
    }
    before = cells_of(SweepConfig.from_dict(EVERYTHING))
    after = cells_of(SweepConfig.from_dict(grown))
    assert set(before) < set(after)
    assert [c for c in sorted(after, key=lambda c: c.order) if c in set(before)] == sorted(
        before, key=lambda c: c.order
    )


def test_a_run_in_words_names_every_coordinate():
    cell = Cell("FedGEM", 0.5, "masking", "sums", 3, 5, "iid", 7)
    assert str(cell) == (
        "FedGEM, epsilon 0.5, protection masking, calibration sums, rounds 3, 5 clients, "
        "partition iid, seed 7"
    )
    assert str(Cell("central", None, "none", None, None, None, None, 1)) == (
        "central, epsilon none, seed 1"
    )
