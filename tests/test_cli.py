import json
import warnings

import numpy as np
import pytest

from secure_fedclust.cli import main
from secure_fedclust.result import FedClustResult

FILES = """
algorithm = "FKM"
[parameters]
n_clusters = 2
random_state = 0
[privacy]
none = "test"
[data]
source = "sites.csv"
client_column = "site"
columns = ["age", "bmi"]
"""


@pytest.fixture
def config(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["site,age,bmi,note"]
    for site in ("oslo", "bergen"):
        for center in (30, 70):
            lines += [f"{site},{rng.normal(center):.3f},{rng.normal(25):.3f},x" for _ in range(20)]
    (tmp_path / "sites.csv").write_text("\n".join(lines) + "\n")
    path = tmp_path / "run.toml"
    path.write_text(FILES)
    return path


def test_a_run_writes_its_result_and_prints_a_table(config, tmp_path, capsys):
    assert main(["run", str(config), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "age" in printed and "bmi" in printed
    assert "FKM" in printed and "NO DP CLAIM" in printed and "(test)" in printed
    result = FedClustResult.load(tmp_path / "out" / "result.json")
    np.testing.assert_allclose(np.sort(result.centers[:, 0]), [30, 70], atol=1)
    assert result.feature_names == ["age", "bmi"]
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"result.json", "run.json", "report.json", "report.html"}


def test_labels_are_written_only_when_asked_for(config, tmp_path, capsys):
    assert main(["run", str(config), "--out", str(tmp_path / "out"), "--labels"]) == 0
    folder = tmp_path / "out" / "labels"
    assert folder.joinpath("clients.csv").read_text().split() == [
        "file,client",
        "labels0.csv,oslo",
        "labels1.csv,bergen",
    ]
    lines = folder.joinpath("labels0.csv").read_text().split()
    assert lines[0] == "label" and len(lines) == 41
    assert main(["run", str(config), "--labels"]) == 2
    assert "give --out DIR" in capsys.readouterr().err


def test_scripts_get_json_or_nothing(config, capsys):
    assert main(["run", str(config), "--json", "--quiet"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["guarantee"].startswith("NO DP CLAIM") and len(row["centers"]) == 2
    assert row["system"] == "FKM" and row["clusters"] == 2 and row["clients"] == 2
    assert main(["run", str(config), "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == ""


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (('"FKM"', '"KMeans"'), 2, "algorithm = 'KMeans': give one of FKM, KFed"),
        (("n_clusters = 2", "n_clusters = 0"), 2, "n_clusters=0"),
        (("n_clusters = 2", "clusters = 2"), 2, "unknown clusters; there are"),
        (('none = "test"', "epsilon = 1.0"), 2, "delta is missing"),
        (('none = "test"', 'none = ""'), 2, "needs a reason"),
        (('none = "test"', 'none = "test"\nepsilon = 1.0'), 2, "unknown epsilon"),
        (('none = "test"', "colour = 1"), 2, "unknown colour"),
        (('none = "test"', ""), 2, "the file needs a table [privacy]"),
        (('algorithm = "FKM"', 'algorithm = "FKM"\nledger = 5'), 2, "ledger = 5"),
        (("[privacy]", "[secrecy]"), 2, "unknown secrecy"),
        (('source = "sites.csv"', 'benchmark = "s1"\nsource = "sites.csv"'), 2, "either source or"),
        (('source = "sites.csv"', 'source = "absent.csv"'), 3, "there is no file"),
        (('columns = ["age", "bmi"]', 'columns = ["age", "note"]'), 3, "'note' is not numeric"),
        (('client_column = "site"', 'client_column = "city"'), 3, "no client column 'city'"),
        (("algorithm =", "algorithm"), 2, "not valid TOML"),
        (('algorithm = "FKM"', 'algorithm = ["FKM"]'), 2, "algorithm = ['FKM']"),
        (('source = "sites.csv"', "source = 5"), 2, "source = 5: give text"),
        (('columns = ["age", "bmi"]', "columns = 3"), 2, "columns = 3: give text"),
        (("random_state = 0", "random_state = -1"), 2, "random_state=-1"),
        (("random_state = 0", 'random_state = "a"'), 2, "random_state='a'"),
    ],
)
def test_a_bad_file_is_refused_with_advice(config, change, code, message, capsys):
    config.write_text(config.read_text().replace(*change))
    assert main(["run", str(config)]) == code
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused_before_the_run(config, tmp_path, capsys):
    assert main(["run", str(config), "--out", str(config)]) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_a_file_without_a_header_does_not_show_its_first_record(config, tmp_path, capsys):
    path = tmp_path / "sites.csv"
    path.write_text("\n".join(path.read_text().split("\n")[1:]))
    assert main(["run", str(config)]) == 3
    error = capsys.readouterr().err
    assert "no client column" in error and "(a number)" in error
    assert not any(character.isdigit() for character in error)


def test_a_missing_file_is_refused(tmp_path, capsys):
    assert main(["run", str(tmp_path / "absent.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_benchmark_is_partitioned_and_scored(data_dir, tmp_path, capsys):
    path = tmp_path / "s1.toml"
    path.write_text(
        'algorithm = "FKM"\n[parameters]\nn_clusters = 15\nrandom_state = 0\n'
        '[privacy]\nnone = "public data"\n'
        '[data]\nbenchmark = "s1"\npartition = "dirichlet"\nn_clients = 5\nalpha = 0.5\n'
    )
    assert main(["run", str(path), "--data-dir", str(data_dir), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["clients"] == 5 and row["ARI"] > 0.9 and row["purity"] > 0.9
    path.write_text(path.read_text().replace("alpha = 0.5", "beta = 0.5"))
    assert main(["run", str(path), "--data-dir", str(data_dir)]) == 2
    assert "beta" in capsys.readouterr().err
    path.write_text(path.read_text().replace("beta = 0.5", "alpha = 0.5\nseed = -1"))
    assert main(["run", str(path), "--data-dir", str(data_dir)]) == 2
    path.write_text(path.read_text().replace("dirichlet", "alphabetical"))
    assert main(["run", str(path), "--data-dir", str(data_dir)]) == 2


def test_too_few_clusters_are_warned_about(tmp_path, capsys):
    np.savez(tmp_path / "same.npz", a=np.ones((5, 2)), b=np.ones((5, 2)))
    config = tmp_path / "run.toml"
    config.write_text(
        'algorithm = "KFed"\n[parameters]\nn_clusters = 3\n[privacy]\nnone = "test"\n'
        '[data]\nsource = "same.npz"\n'
    )
    assert main(["run", str(config)]) == 0
    assert "warning: found 1 clusters where 3 were asked for" in capsys.readouterr().err


def test_the_demo_draws_a_picture_and_prints_all_systems(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for system in ("FKM", "KFed", "FeCA", "FedGEM", "GOLD"):
        assert system in printed
        for ending in ("none", "epsilon1", "epsilon2", "epsilon8"):
            assert (tmp_path / f"{system}-{ending}.json").is_file()
    assert "NO DP CLAIM" in printed
    assert (tmp_path / "demo.png").stat().st_size > 50_000
    assert (tmp_path / "demo.svg").is_file()
    page = tmp_path / "report" / "report.html"
    assert str(page) in printed and "Attacked: PASS" in page.read_text()


def test_usage_errors_exit_with_two(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["demo"])
    assert caught.value.code == 2


PRIVATE = """
epsilon = 4.0
delta = 1e-5
ranges = [[0, 100], [15, 35]]
public_size = 40
"""


@pytest.fixture
def private_config(config):
    config.write_text(config.read_text().replace('none = "test"', PRIVATE))
    return config


def test_a_private_run_leaves_a_ledger_that_holds_against_its_result(
    private_config, tmp_path, capsys
):
    out = tmp_path / "out"
    assert main(["run", str(private_config), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "(epsilon=4, delta=1e-05)-differential privacy for each record" in printed
    assert "NO DP CLAIM" not in printed and "this run alone" not in printed
    ledger, result = str(out / "ledger.sqlite"), str(out / "result.json")
    assert main(["ledger", "verify", ledger, "--against", result]) == 0
    assert main(["ledger", "show", ledger]) == 0
    assert "oslo" in capsys.readouterr().out


def test_a_second_run_on_a_used_up_budget_is_refused(private_config, tmp_path, capsys):
    arguments = ["run", str(private_config), "--out", str(tmp_path / "out"), "--quiet"]
    assert main(arguments) == 0
    before = (tmp_path / "out" / "result.json").read_text()
    assert main(arguments) == 5
    assert "spent" in capsys.readouterr().err
    assert (tmp_path / "out" / "result.json").read_text() == before


def test_runs_share_the_ledger_that_their_files_name(private_config, tmp_path, capsys):
    path = str(tmp_path / "sites.ledger")
    assert main(["ledger", "init", path, "--epsilon", "5", "--delta", "1e-5"]) == 0
    content = private_config.read_text()
    private_config.write_text('ledger = "sites.ledger"\n' + content)
    assert main(["run", str(private_config), "--quiet"]) == 0
    assert main(["run", str(private_config), "--quiet"]) == 5
    private_config.write_text('ledger = "absent.ledger"\n' + content)
    capsys.readouterr()
    assert main(["run", str(private_config), "--quiet"]) == 6
    assert "absent.ledger" in capsys.readouterr().err


def test_a_plan_needs_no_data(private_config, tmp_path, capsys):
    (tmp_path / "sites.csv").unlink()
    assert main(["plan", str(private_config)]) == 2
    assert "--clients N" in capsys.readouterr().err
    assert main(["plan", str(private_config), "--clients", "2"]) == 0
    printed = capsys.readouterr().out
    assert "cells" in printed and "feasibility: signal" in printed and "epsilon=4" in printed
    assert main(["plan", str(private_config), "--clients", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert sum(release["share of mu^2"] for release in plan["releases"]) == pytest.approx(1)


def test_there_is_no_plan_without_privacy(config, capsys):
    assert main(["plan", str(config), "--clients", "2"]) == 2
    assert "without differential privacy" in capsys.readouterr().err


def test_a_person_column_is_read_and_enforced(private_config, tmp_path, capsys):
    table = (tmp_path / "sites.csv").read_text().split()
    rows = [f"{row},p{i // 3}" for i, row in enumerate(table[1:])]
    (tmp_path / "sites.csv").write_text("\n".join([f"{table[0]},patient", *rows]))
    text = private_config.read_text().replace("public_size", "records_per_person = 2\npublic_size")
    private_config.write_text(text)
    assert main(["run", str(private_config), "--quiet"]) == 2
    assert "person_column" in capsys.readouterr().err
    private_config.write_text(text + 'person_column = "patient"\n')
    assert main(["run", str(private_config), "--json"]) == 0
    assert "at most 2 records" in capsys.readouterr().out


@pytest.fixture
def masked_config(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["site,age,bmi"]
    for site in ("oslo", "bergen", "tromso", "bodo"):
        for center in (30, 70):
            lines += [f"{site},{rng.normal(center):.3f},{rng.normal(25):.3f}" for _ in range(60)]
    (tmp_path / "sites.csv").write_text("\n".join(lines) + "\n")
    privacy = (
        "epsilon = 4.0\ndelta = 1e-5\nranges = [[0, 100], [10, 40]]\npublic_size = 120\n"
        'protection = "masking"\nmin_survivors = 3'
    )
    path = tmp_path / "masked.toml"
    path.write_text(FILES.replace('none = "test"', privacy))
    return path


def test_a_masked_run_says_what_it_assumes_and_so_do_its_plan_and_its_ledger(
    masked_config, tmp_path, capsys
):
    assert main(["plan", str(masked_config), "--clients", "4"]) == 0
    planned = capsys.readouterr().out
    out = tmp_path / "out"
    assert main(["run", str(masked_config), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    result = FedClustResult.load(out / "result.json")
    assert result.fallback in planned and result.fallback in printed
    assert "if every sum is over 3 clients or more" in printed
    assert "cost (mu, of which squares add up): 0 in answers of single clients" in printed
    assert main(["ledger", "show", str(out / "ledger.sqlite")]) == 0
    shown = capsys.readouterr().out
    assert "in sums over 3 clients or more, and hold against the server" in shown
    assert "sums over 100 clients or more assume besides" in shown
    assert main(["ledger", "show", str(out / "ledger.sqlite"), "--json"]) == 0
    [quorum] = json.loads(capsys.readouterr().out)["sums"]
    assert quorum == {
        "min_survivors": 3,
        "colluders": 1,
        "active_server": False,
        "key_holder": False,
    }
    assert main(["run", str(masked_config), "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["mu"]["local"] == 0 and row["fallback"] == result.fallback


def test_masking_without_privacy_is_configured_and_labelled(masked_config, capsys):
    text = masked_config.read_text()
    start, end = text.index("epsilon"), text.index("protection")
    masked_config.write_text(text[:start] + 'none = "public data"\n' + text[end:])
    assert main(["run", str(masked_config)]) == 0
    assert "NO DP CLAIM: sums over clients are exact" in capsys.readouterr().out


PRIVATE_NETWORKS = """
algorithm = "DeepFeCA"
[parameters]
n_clusters = 2
hidden = [3]
n_features_out = 3
local_epochs = 1
[privacy]
epsilon = 8.0
delta = 1e-5
ranges = [[0, 100], [0, 50]]
public_size = 40
[data]
source = "sites.csv"
client_column = "site"
columns = ["age", "bmi"]
"""


def test_a_run_with_a_checkpoint_is_gone_on_with_by_the_same_command(
    config, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("torch")
    config.write_text(PRIVATE_NETWORKS)
    out, kept = tmp_path / "out", tmp_path / "kept"
    command = ["run", str(config), "--out", str(out), "--checkpoint", str(kept)]
    with monkeypatch.context() as cut, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def interrupt(self, what, done, total):
            if done > 8:
                raise KeyboardInterrupt

        cut.setattr("secure_fedclust.commands.printing.ProgressBar.show", interrupt)
        assert main(command) == 130
    assert kept.joinpath("run.json").exists() and not out.joinpath("result.json").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(command) == 0
    assert "epsilon=8" in capsys.readouterr().out
    made_by = json.loads(out.joinpath("run.json").read_text())["command"]
    assert made_by.endswith(f"--checkpoint {kept}")


def test_a_checkpoint_is_for_systems_that_take_long(config, tmp_path, capsys):
    assert main(["run", str(config), "--checkpoint", str(tmp_path / "kept")]) == 2
    assert "FKM is over in seconds" in capsys.readouterr().err
