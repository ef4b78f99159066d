import csv
import json
import shutil

import pytest

from secure_fedclust import KFed, ParameterError, PrivacyWarning, ProtocolError
from secure_fedclust.sweep import SweepConfig, sweep
from secure_fedclust.sweep.folder import SweepFolder
from secure_fedclust.sweep.runs import FIGURES
from secure_fedclust.sweep.table import COLUMNS, SUMMARY_COLUMNS

from .conftest import CONTENT


def run(content, out, **options):
    return sweep(SweepConfig.from_dict(content), out, jobs=1, **options)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def lines(folder):
    return (folder / "cells.jsonl").read_bytes().splitlines()


@pytest.fixture(autouse=True)
def no_luck(monkeypatch):
    """Noise decides whether ARI falls by chance, of which there would be a warning."""
    monkeypatch.setattr("secure_fedclust.sweep.study.falling", lambda rows: [])


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with a sweep of four runs."""
    folder = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secure_fedclust.sweep.study.falling", lambda rows: [])
        patch.setattr("secure_fedclust.sweep.plots.draw_all", lambda *given: ())
        run(CONTENT, folder)
    return folder


@pytest.fixture
def finished(original, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(original, tmp_path / "copy")


def test_a_sweep_leaves_a_tidy_table_a_summary_and_pictures(content, tmp_path, pictures):
    seen = []
    content["baselines"] = ["none"]
    result = run(content, tmp_path, on_progress=lambda *now: seen.append(now))
    assert seen == [(i, 6) for i in range(7)]
    table = read(tmp_path / "table.csv")
    assert list(table[0]) == list(COLUMNS) == list(result.table.columns)
    assert [(row["epsilon"], row["seed"]) for row in table] == [
        ("none", "0"), ("none", "1"), ("1.0", "0"), ("1.0", "1"), ("8.0", "0"), ("8.0", "1"),
    ]  # fmt: skip
    assert [row["trust"] for row in table] == ["none"] * 2 + ["local"] * 4
    assert {row["claim"] for row in table} == {"NO DP CLAIM"}
    assert {row["n_clusters_true"] for row in table} == {"3"}
    for row in table:
        assert 0 < float(row["ari"]) <= 1 and 0 < float(row["nmi"]) <= 1
        assert float(row["bytes_up"]) > 100 and int(row["exchanges"]) >= 1
        assert row["error"] == row["calibration"] == row["rounds"] == ""
    summary = read(tmp_path / "summary.csv")
    assert list(summary[0]) == list(SUMMARY_COLUMNS)
    [ari] = [r for r in summary if r["figure"] == "ari" and r["epsilon"] == "8.0"]
    assert float(ari["mean"]) == pytest.approx(
        (float(table[4]["ari"]) + float(table[5]["ari"])) / 2
    )
    assert float(ari["low"]) <= float(ari["mean"]) <= float(ari["high"]) and ari["n"] == "2"
    assert sorted(path.name for path in result.pictures) == sorted(pictures)
    assert all((tmp_path / name).stat().st_size > 5000 for name in pictures)
    assert result.n_run == 6 and result.n_failed == 0 and result.warnings == ()


def test_a_finished_sweep_is_not_run_again_and_its_pictures_are_drawn_again(
    content, finished, pictures, monkeypatch
):
    before = (finished / "table.csv").read_bytes()
    (finished / "table.csv").unlink()
    monkeypatch.setattr(KFed, "fit", None)
    result = run(content, finished)
    assert result.n_run == 0
    assert (finished / "table.csv").read_bytes() == before
    assert all((finished / name).exists() for name in pictures)


def test_more_epsilons_seeds_and_systems_only_add_runs(content, finished):
    before = lines(finished)
    rows = (finished / "table.csv").read_text().splitlines()
    content["seeds"] = 3
    content["grid"] |= {"algorithm": ["GOLD", "KFed"], "epsilon": [8, 4, 1]}
    content["parameters"]["GOLD"] = {"n_clusters": 3}
    result = run(content, finished)
    assert result.n_run == 18 - 4
    assert lines(finished)[:4] == before
    assert set(rows) <= set((finished / "table.csv").read_text().splitlines())
    assert len({json.dumps(json.loads(line)["cell"]) for line in lines(finished)}) == 18


@pytest.mark.parametrize(
    "path, value, said",
    [
        ("privacy.delta", 1e-5, "privacy.delta was 0.0001 and is 1e-05"),
        ("privacy.colluders", 0, "privacy.colluders was None and is 0"),
        ("parameters.KFed.n_clusters", 4, "parameters.KFed.n_clusters was 3 and is 4"),
        ("scale.KFed", 2, "scale.KFed was 1.0 and is 2.0"),
        ("sampler", "secure", "sampler was 'fast' and is 'secure'"),
        ("grid.epsilon", [1, 2], "2 runs are not in it, e.g. KFed, epsilon 8"),
        ("seeds", [0], "2 runs are not in it"),
        ("data.seed", 1, "data.seed was 0 and is 1"),
    ],
)
def test_another_sweep_into_the_same_folder_is_refused(content, finished, path, value, said):
    *above, key = path.split(".")
    table = content
    for name in above:
        table = table.setdefault(name, {})
    table[key] = value
    before = lines(finished), (finished / "sweep.json").read_bytes()
    with pytest.raises(ParameterError, match=said) as raised:
        run(content, finished)
    assert "give another folder" in str(raised.value)
    assert (lines(finished), (finished / "sweep.json").read_bytes()) == before


@pytest.mark.parametrize(
    "key, value",
    [
        ("version", "0.0"),
        ("format", "secure_fedclust sweep 0"),
        ("format", "else"),
        ("data_sha256", "0" * 64),
    ],
)
def test_a_folder_of_another_version_or_format_or_data_is_refused(content, finished, key, value):
    kept = json.loads((finished / "sweep.json").read_text())
    (finished / "sweep.json").write_text(json.dumps(kept | {key: value}))
    with pytest.raises(ParameterError, match="give another folder"):
        run(content, finished)


def test_runs_without_their_sweep_are_refused(content, finished):
    (finished / "sweep.json").unlink()
    with pytest.raises(ParameterError, match=r"has runs, but no sweep\.json"):
        run(content, finished)


def test_a_torn_last_line_is_made_again(content, finished):
    whole = lines(finished)
    torn = b"\n".join(whole)[:-20]
    (finished / "cells.jsonl").write_bytes(torn)
    result = run(content, finished)
    assert result.n_run == 1
    assert lines(finished)[:3] == whole[:3] and len(lines(finished)) == 4
    assert json.loads(lines(finished)[3])["cell"] == json.loads(whole[3])["cell"]


def test_a_line_in_the_middle_that_is_no_run_is_named(content, finished):
    kept = lines(finished)
    (finished / "cells.jsonl").write_bytes(b"\n".join([kept[0], b"{}", *kept[2:]]) + b"\n")
    with pytest.raises(ParameterError, match=r"line 2, is not a run .*: remove it"):
        run(content, finished)


def rewrite(folder, *contents):
    text = "".join(json.dumps(content) + "\n" for content in contents)
    (folder / "cells.jsonl").write_text(text)


def parsed(folder):
    return [json.loads(line) for line in lines(folder)]


FAILED = dict.fromkeys(FIGURES) | {"claim": "NO DP CLAIM", "error": "E: nothing"}


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda outcome: {}, "its outcome lacks 'ari', 'bytes_down'"),
        (lambda outcome: None, "its outcome is None"),
        (lambda outcome: "good", "its outcome is 'good'"),
        (lambda outcome: [1], "its outcome is"),
        (lambda outcome: {k: v for k, v in outcome.items() if k != "nmi"}, "lacks 'nmi'"),
        (lambda outcome: outcome | {"more": 1}, "has also 'more'"),
        (lambda outcome: outcome | {"ari": float("nan")}, "ari = nan"),
        (lambda outcome: outcome | {"seconds": float("inf")}, "seconds = inf"),
        (lambda outcome: outcome | {"bytes_up": 10**400}, "bytes_up = "),
        (lambda outcome: outcome | {"ari": "high"}, "ari = 'high'"),
        (lambda outcome: outcome | {"ari": True}, "ari = True"),
        (lambda outcome: outcome | {"ari": 1.5}, r"ari = 1\.5"),
        (lambda outcome: outcome | {"n_clusters": 2.5}, r"n_clusters = 2\.5"),
        (lambda outcome: outcome | {"seconds": -1.0}, r"seconds = -1\.0"),
        (lambda outcome: outcome | {"bytes_up": None}, "bytes_up = None"),
        (lambda outcome: outcome | {"claim": None}, "no text"),
        (lambda outcome: outcome | {"error": 3}, "no text"),
        (lambda outcome: FAILED | {"ari": 0.5}, r"ari = 0\.5"),
    ],
)
def test_a_line_whose_outcome_is_not_that_of_a_run_is_named(content, finished, change, said):
    kept = parsed(finished)
    kept[2]["outcome"] = change(kept[2]["outcome"])
    rewrite(finished, *kept)
    before = (finished / "cells.jsonl").read_bytes()
    with pytest.raises(ParameterError, match=rf"line 3, is not a run \(.*{said}.*: remove it"):
        run(content, finished)
    assert (finished / "cells.jsonl").read_bytes() == before


@pytest.mark.parametrize("change", [{"epsilon": [1]}, {"seed": True}, {"epsilon": "1"}])
def test_a_line_whose_cell_is_no_cell_is_named(content, finished, change):
    kept = parsed(finished)
    kept[0]["cell"] |= change
    rewrite(finished, *kept)
    with pytest.raises(ParameterError, match=r"line 1, is not a run \(its cell has"):
        run(content, finished)


def test_two_lines_of_one_run_that_differ_are_named(content, finished):
    kept = parsed(finished)
    rewrite(finished, *kept, kept[1])
    assert run(content, finished).n_run == 0, "the same line twice does no harm"
    other = {"cell": kept[1]["cell"], "outcome": kept[1]["outcome"] | {"ari": -0.5}}
    rewrite(finished, *kept, other)
    with pytest.raises(ParameterError, match=r"lines 2 and 5, are of the same run \(KFed, eps"):
        run(content, finished)


def test_a_run_whose_score_is_not_a_number_has_failed(content, tmp_path, monkeypatch):
    monkeypatch.setattr("secure_fedclust.sweep.runs.adjusted_rand", lambda *given: float("nan"))
    with pytest.warns(PrivacyWarning, match="4 of 4 runs failed.*ari = nan"):
        result = run(content, tmp_path)
    assert [row["ari"] for row in result.rows] == [None] * 4
    with pytest.warns(PrivacyWarning, match="4 of 4 runs failed"):
        assert run(content, tmp_path).n_run == 0, "what was kept can be read again"


@pytest.mark.parametrize("name", ["numpy", "scipy", "scikit-learn", "opendp"])
def test_other_versions_of_libraries_are_refused(content, finished, name):
    kept = json.loads((finished / "sweep.json").read_text())
    here = kept["libraries"][name]
    kept["libraries"][name] = "0.1"
    (finished / "sweep.json").write_text(json.dumps(kept))
    with pytest.raises(ParameterError) as raised:
        run(content, finished)
    assert f"made with {name} 0.1 (here {here}), and one table is of one" in str(raised.value)


def test_a_library_counts_where_it_is_used(content, finished):
    pytest.importorskip("diffprivlib")

    def libraries():
        return json.loads((finished / "sweep.json").read_text())["libraries"]

    assert "diffprivlib" not in libraries() and "tenseal" not in libraries()
    content["baselines"] = ["diffprivlib"]
    assert run(content, finished).n_run == 4
    assert "diffprivlib" in libraries()


@pytest.mark.parametrize("key", ["libraries", "config"])
def test_a_folder_that_does_not_say_what_it_is_of_is_refused(content, finished, key):
    kept = json.loads((finished / "sweep.json").read_text())
    (finished / "sweep.json").write_text(json.dumps(kept | {key: None}))
    with pytest.raises(ParameterError, match="is not of a sweep: give another folder"):
        run(content, finished)


def test_two_processes_do_not_share_a_folder(content, finished):
    with SweepFolder(finished).opened(), pytest.raises(ParameterError, match="another sweep is"):
        run(content, finished)


def test_a_folder_that_cannot_be_made_is_named(content, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ParameterError, match="file/out cannot be"):
        run(content, tmp_path / "file" / "out")


def test_without_noise_two_sweeps_agree_but_for_the_seconds(content, tmp_path):
    content["grid"]["epsilon"] = "none"
    tables = [run(content, tmp_path / name).rows for name in ("a", "b")]
    for row in (*tables[0], *tables[1]):
        assert row.pop("seconds") > 0
    assert tables[0] == tables[1]


def test_a_run_that_fails_is_kept_with_its_error_and_stops_no_other(content, tmp_path, monkeypatch):
    fit = KFed.fit

    def fails(model, clients):
        if model.random_state == 1 and model.privacy.epsilon == 8:
            raise ProtocolError("nobody answered")
        return fit(model, clients)

    monkeypatch.setattr(KFed, "fit", fails)
    with pytest.warns(PrivacyWarning, match="1 of 4 runs failed.*nobody answered"):
        result = run(content, tmp_path)
    [failed] = [row for row in result.rows if row["error"] is not None]
    assert failed["error"] == "ProtocolError: nobody answered"
    assert (failed["epsilon"], failed["seed"], failed["ari"]) == (8.0, 1, None)
    [ari] = [r for r in result.summary if r["figure"] == "ari" and r["epsilon"] == 8.0]
    assert (ari["n"], ari["failed"], ari["sd"]) == (1, 1, None)
    with pytest.warns(PrivacyWarning, match="1 of 4 runs failed"):
        assert run(content, tmp_path).n_run == 0, "it counts as finished"


def test_the_secure_sampler_makes_a_claim(content, tmp_path):
    content |= {"sampler": "secure", "seeds": 1}
    content["grid"]["epsilon"] = 2
    [row] = run(content, tmp_path).rows
    assert row["claim"] == "(epsilon=2, delta=0.0001)"


@pytest.mark.parametrize(
    "table, key, value",
    [
        ("privacy", "ranges", "data"),
        ("privacy", "public_size", "data"),
        ("parameters", "n_clusters", "truth"),
        ("parameters", "n_local_clusters", "truth"),
    ],
)
def test_a_run_that_was_told_something_of_the_data_claims_nothing(
    content, tmp_path, table, key, value
):
    content |= {"sampler": "secure", "seeds": 1}
    content["grid"] |= {"algorithm": ["KFed", "GOLD"], "epsilon": 2}
    content["parameters"]["GOLD"] = {"n_clusters": 3}
    (content["privacy"] if table == "privacy" else content["parameters"]["KFed"])[key] = value
    claims = {row["algorithm"]: row["claim"] for row in run(content, tmp_path).rows}
    assert claims["KFed"] == "NO DP CLAIM"
    # Privacy is shared by all systems, parameters are not.
    told = "NO DP CLAIM" if table == "privacy" else "(epsilon=2, delta=0.0001)"
    assert claims["GOLD"] == told


def test_trust_says_who_sees_what(content, tmp_path):
    content |= {"seeds": 1, "baselines": ["none"]}
    content["grid"] |= {
        "algorithm": ["FKM", "KFed"],
        "epsilon": 8,
        "protection": ["none", "masking"],
    }
    content["parameters"]["FKM"] = {"n_clusters": 3}
    rows = run(content, tmp_path).rows
    assert {(r["algorithm"], r["protection"], str(r["epsilon"])): r["trust"] for r in rows} == {
        ("FKM", "none", "none"): "none",
        ("FKM", "none", "8.0"): "local",
        ("FKM", "masking", "8.0"): "distributed",
        ("KFed", "none", "none"): "none",
        ("KFed", "none", "8.0"): "local",
        ("KFed", "masking", "8.0"): "local+distributed",
    }


def test_encrypted_sums_count_the_bytes_of_clients_and_not_of_the_key_holder(content, tmp_path):
    content |= {"seeds": 1}
    content["grid"] |= {"algorithm": "FKM", "epsilon": 8, "protection": "ckks"}
    content["parameters"] = {"FKM": {"n_clusters": 3}}
    [row] = run(content, tmp_path).rows
    assert row["trust"] == "distributed" and row["error"] is None
    # Two sums of one ciphertext of 66 kB, and keys; a key holder would get as much on top.
    assert 60_000 < row["bytes_up"] < 150_000


def test_scaled_records_are_clustered_alike(content, tmp_path):
    content |= {"seeds": 1, "scale": {"KFed": 1000}}
    [small, large] = run(content, tmp_path).rows
    assert large["ari"] > 0.9 and small["error"] is None


def test_the_true_numbers_of_clusters_can_stand_for_a_number(content, tmp_path):
    content |= {"seeds": 1}
    content["grid"] |= {
        "algorithm": ["FedGEM", "KFed"],
        "epsilon": 8,
        "partition": {"name": "cluster_subset", "n_local_clusters": 2},
    }
    content["parameters"] = {
        "FedGEM": {"n_local_clusters": "truth"},
        "KFed": {"n_clusters": "truth", "n_local_clusters": "truth"},
    }
    content["privacy"] |= {"ranges": "data", "public_size": "data"}
    rows = run(content, tmp_path).rows
    assert [row["error"] for row in rows] == [None, None]
    assert rows[0]["algorithm"] == "KFed" and rows[0]["n_clusters"] == 3
