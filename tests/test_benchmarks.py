import os
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.metrics import normalized_mutual_info_score

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    """A function that imports one of the scripts."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module


def run_papers(*arguments, cwd):
    environment = {k: v for k, v in os.environ.items() if k != "SECURE_FEDCLUST_DATA"}
    command = [sys.executable, str(BENCHMARKS / "papers.py"), *arguments]
    return subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, cwd=cwd, env=environment
    )


def test_papers_prints_a_table_and_its_bars_without_any_data_folder(tmp_path):
    done = run_papers("--quick", "--only", "fkm", "--check", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    [header] = [line for line in lines if line.startswith("setting")]
    assert header.split() == ["setting", "method", "paper", "expected", "ours"]
    assert any("k-FED k'=16" in line and "±" in line for line in lines)
    assert any(line.lstrip().startswith("met") and "FKM" in line for line in lines)
    assert "NOT MET" not in done.stdout


@pytest.mark.slow
def test_papers_runs_a_setting_of_every_table(tmp_path, data_dir):
    done = run_papers("--quick", "--data-dir", str(data_dir), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for title in ("FeCA, Table 1", "FKM, synthetic", "FedGEM, synthetic", "GOLD, Table III"):
        assert title in done.stdout


def test_papers_says_where_it_looked_for_data_and_returns_2(module, tmp_path, capsys):
    assert module("papers").main(["--quick", "--data-dir", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert str(tmp_path) in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("wrong", [("--only", "feca,nonsense"), ("--seeds", "0")])
def test_papers_refuses_what_it_cannot_do(module, wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        module("papers").main([*wrong])
    assert stopped.value.code == 2
    assert " ".join(wrong).replace("feca,", "") in capsys.readouterr().err


def test_papers_fails_a_check_only_when_a_bar_is_missed(module, monkeypatch, capsys):
    papers = module("papers")

    def outcome(figure):
        bar = papers.Bar("score", figure, at_least=0.5)
        return lambda options: papers.Outcome("title", [("s", "m", "", "", "1")], [bar])

    monkeypatch.setitem(papers.TABLES, "fkm", (outcome(0.6),))
    assert papers.main(["--only", "fkm", "--check"]) == 0
    monkeypatch.setitem(papers.TABLES, "fkm", (outcome(0.4),))
    assert papers.main(["--only", "fkm", "--check"]) == 1
    assert papers.main(["--only", "fkm"]) == 0


def test_a_bar_is_met_at_its_limit_as_printed_and_missed_beyond(module, capsys):
    table = module("_table")
    assert table.Bar("x", 1.3004, at_most=1.3).met
    assert not table.Bar("x", 1.31, at_most=1.3).met
    assert not table.Bar("x", float("nan"), at_most=1.3).met
    bars = [table.Bar("low", 0.5, at_least=0.4), table.Bar("high", 0.3, at_least=0.4)]
    assert not table.print_bars(bars)
    low, high = capsys.readouterr().out.splitlines()[-2:]
    assert low.split()[0] == "met"
    assert high.strip() == "NOT MET  high: 0.3 (at least 0.4)"


def test_balls_of_the_speed_benchmark_make_as_many_groups_as_there_are_clusters(module):
    speed = module("speed")
    for regime, v, n_clusters in (("crowded", 0.5, 10), ("spread", 0.1, 30)):
        centers, radii, owners = speed.balls(3000, regime, v)
        assert len(centers) == len(radii) == len(owners) == 3000
        assert speed.overlapping_groups(centers, radii, owners).max() + 1 == n_clusters


def test_timed_jobs_take_turns(module):
    order = []
    jobs = [lambda: order.append("a"), lambda: order.append("b")]
    times = module("speed").in_turns("test", 3, *jobs)
    assert order == ["a", "b"] * 3
    assert len(times) == 2


def test_utility_prints_fedgem_without_any_data_folder(module, monkeypatch, capsys):
    utility = module("utility")
    monkeypatch.setattr(utility, "FEDGEM", ((2, 500),))
    monkeypatch.setattr(utility, "FEDGEM_EPSILONS", (2.0,))
    monkeypatch.setattr(utility, "CALIBRATIONS", ("sums",))
    arguments = ["--only", "fedgem", "--seeds", "2", "--sampler", "fast", "--check"]
    assert utility.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "d=2, 500" in printed and "±" in printed and "NOT MET" not in printed


def test_utility_says_where_it_looked_for_data_and_returns_2(module, tmp_path, capsys):
    assert module("utility").main(["--only", "sets", "--data-dir", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [("--only", "nonsense"), ("--seeds", "0")])
def test_utility_refuses_what_it_cannot_do(module, wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        module("utility").main([*wrong])
    assert stopped.value.code == 2
    assert " ".join(wrong) in capsys.readouterr().err


@pytest.mark.slow
def test_utility_meets_its_bars_on_the_small_sets(module, monkeypatch, data_dir, capsys):
    utility = module("utility")
    small = tuple(setting for setting in utility.ONE_SHOT if setting.data == "s1")
    monkeypatch.setattr(utility, "ONE_SHOT", small)
    arguments = ["--only", "one_shot", "--seeds", "5", "--data-dir", str(data_dir), "--check"]
    assert utility.main(arguments) == 0, capsys.readouterr().out


def test_masking_prints_its_tables_without_flower_and_fails_a_check_on_a_missed_bar(
    module, monkeypatch, capsys
):
    masking = module("masking")
    assert masking.main(["--quick", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    for title in ("A round, all parties", "Masks alone", "Growth of a round", "Memory of the"):
        assert title in printed
    monkeypatch.setattr(masking, "EXPONENT_AT_MOST", 0.0)
    assert masking.main(["--quick", "--repeats", "1", "--check"]) == 1
    assert "NOT MET  exponent" in capsys.readouterr().out


def test_scale_runs_each_part_in_a_process_of_its_own_and_fails_a_check_on_a_missed_bar(
    module, monkeypatch, capsys
):
    scale = module("scale")
    monkeypatch.setattr(scale, "alone", cache(scale.alone))
    assert scale.main(["--quick", "--part", "masked", "--check"]) == 0
    printed = capsys.readouterr().out
    assert "sparse graph, a tenth drops out  120      18" in printed
    assert "complete graph, as the square    120      119" in printed
    assert printed.count("masking/unmask") == 2 and printed.count("met  ") == 3
    monkeypatch.setattr(scale, "MASKED_SECONDS", 0.0)
    assert scale.main(["--quick", "--part", "masked", "--check"]) == 1
    assert "NOT MET  seconds of a sum" in capsys.readouterr().out


@pytest.mark.parametrize("job", ["k-FED, sampler='fast'", "FKM"])
def test_scale_counts_the_bytes_work_and_memory_of_a_client(module, job):
    scale = module("scale")
    found = scale.JOBS[job](100)
    assert (found["degree"], found["threshold"]) == scale.graph.sparse_parameters(100, 1, 10)
    rows = scale.units(found, 100)
    assert [row[0] for row in rows if row[0].startswith("masking/")] == [
        f"masking/{stage}" for stage in ("advertise", "share", "mask", "unmask")
    ]
    assert all(each["clients"] > 0 and each["up"] > 0 for each in found["stages"])
    spent = sum(each["clients"] + each["server"] for each in found["stages"])
    assert 0 < spent < found["cpu"]


def test_scale_refuses_a_part_that_there_is_not(module, capsys):
    with pytest.raises(SystemExit):
        module("scale").main(["--part", "nonsense"])
    assert "--part nonsense: give some of kfed,fkm,masked" in capsys.readouterr().err


@pytest.mark.slow
def test_deployment_measures_client_processes_beside_exchanges_that_compute_nothing(module, capsys):
    pytest.importorskip("flwr")
    assert module("deployment").main(["--quick", "--check"]) == 0
    printed = capsys.readouterr().out
    assert "one with nothing to compute, looking every 0.01 s" in printed
    assert "met      messages for what stages need: 1 (at most 1.5)" in printed


def test_ckks_prints_what_was_asked_beside_what_was_measured(module, capsys):
    ckks = module("ckks")
    assert ckks.main(["--quick", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"TenSEAL {ckks.ts.__version__}" in lines[1]
    assert lines[2].split() == ["what", "how", "measured", "ratio", "asked"]
    starts = ("client", "kB of a client", "server, decoding too", "server, no decoding")
    starts += ("key holder", "6,100 values, 10 clients", "FKM, 20 clients")
    assert [start for start in starts if not any(line.startswith(start) for line in lines)] == []
    sizes = [line for line in lines if "kB of a client, 2,048 values, sums to 2^30" in line]
    assert sizes[0].endswith("at most 66 kB")
    assert sizes[1].split()[0] == "met"
    assert any("have no bar" in line for line in lines)


@pytest.mark.parametrize("size, code", [(65.0, 0), (67.0, 1)])
def test_ckks_fails_a_check_only_when_a_bar_is_missed(module, monkeypatch, capsys, size, code):
    ckks = module("ckks")
    for part in ("opening", "many_ciphertexts", "server_memory", "fkm_run"):
        monkeypatch.setattr(ckks, part, lambda *given: [])
    line = ckks.Line("message", "ours", f"{size} kB", bar=ckks.Bar("kB", size, at_most=66))
    monkeypatch.setattr(ckks, "one_ciphertext", lambda *given: [line])
    assert ckks.main(["--check"]) == code
    assert ("NOT MET" in capsys.readouterr().out) == bool(code)
    assert ckks.main([]) == 0


def test_ckks_holds_no_parameters_but_the_usual_ones_to_the_server_bar(module):
    ckks = module("ckks")
    lines = ckks.one_ciphertext(ckks.SUM_BITS, 3, 1)
    held = [line.how for line in lines if line.what.startswith("server") and line.bar]
    assert held == [ckks.USUAL]
    assert not any(line.bar for line in ckks.one_ciphertext(ckks.LARGE_SUM_BITS, 3, 1))


def test_ckks_measures_no_sum_that_is_wrong(module):
    parties = module("ckks").Parties(3, 10, 20)
    parties.plain_sum[4] += 1

    def work(send, receive):
        for name in parties.vectors:
            receive(name, send(name))

    with pytest.raises(AssertionError):
        parties.sum(work)


def test_networks_averages_are_exact_under_masks_and_encryption(module, monkeypatch, capsys):
    networks = module("networks")
    monkeypatch.setattr(networks, "WEIGHTS", 300)
    monkeypatch.setattr(networks, "AVERAGING_CLIENTS", 5)
    assert networks.main(["--part", "averages", "--seeds", "1", "--check"]) == 0
    printed = capsys.readouterr().out
    assert "largest difference from the plain average: 0 (at most 0)" in printed
    assert printed.count("met") == 3 and "NOT MET" not in printed


@pytest.mark.parametrize("wrong", [("--part", "nonsense"), ("--seeds", "0")])
def test_networks_refuses_what_it_cannot_do(module, wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        module("networks").main([*wrong])
    assert stopped.value.code == 2
    assert " ".join(wrong) in capsys.readouterr().err


def test_networks_says_where_it_looked_for_data_and_returns_2(module, tmp_path, capsys):
    arguments = ["--part", "fedcref,speed,deepfeca", "--data-dir", str(tmp_path)]
    assert module("networks").main(arguments) == 2
    assert capsys.readouterr().err.count(str(tmp_path)) == 3


def test_noisy_networks_says_where_it_looked_for_data_and_returns_2(module, tmp_path, capsys):
    assert module("noisy_networks").main(["--data-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count(str(tmp_path)) == 2


@pytest.fixture
def corners():
    rng = np.random.default_rng(0)
    truth = [rng.integers(2, size=400) for _ in range(2)]
    return truth, [np.eye(14)[own] + 0.05 * rng.random((400, 14)) for own in truth]


def test_noisy_networks_controls_link_nothing_and_train_alone_with_the_budget_of_groups(
    module, corners
):
    noisy = module("noisy_networks")
    truth, clients = corners
    images = noisy.Images(clients, truth)
    trained, shares = {}, {}
    for noise in (noisy.NOISES[0], *noisy.ALONE[:2]):
        noise = replace(noise, epsilon=100.0)
        small = {"hidden": (3,), "start_epochs": 1, "theta": 1e6}
        model = noisy.WatchedFedCRef(2, **small)
        noise.applied(model, 2.0, 400, n_rounds=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with noisy.mock.patch.dict(vars(noisy.fedcref_private), noise.parts):
                noisy.fitted(model, clients, 0)
        # With so little noise both corners are found at the start, whatever training makes of them.
        assert images.accuracy(model.first_clusters(images, 0)) == 1
        assert (noisy.noisy_figures(model, images)["in groups %"] == 0) == bool(noise.remark)
        rows = [row.charge for row in model.ledger_.rows("client 0")]
        [local] = [row for row in rows if row.message == "fedcref/noisy_local"]
        trained[str(noise)] = local.mu**2
        shares[str(noise)] = {row.message for row in rows}
    linked, alone, all_of_it = trained.values()
    # Rates are those of noisy counts, which differ a little from run to run.
    assert linked == pytest.approx(alone, rel=1e-2)
    assert all_of_it == pytest.approx(alone * 0.91 / 0.35, rel=1e-2)
    assert ["fedcref/noisy_group" in messages for messages in shares.values()] == [
        True,
        False,
        False,
    ]


def test_noisy_networks_shuffled_control_has_the_same_labels_at_other_records(
    module, monkeypatch, corners
):
    noisy = module("noisy_networks")
    given = []

    def remember(model, X, labels, *_, **__):
        given.append(labels)

    monkeypatch.setattr("secure_fedclust.privacy.dpsgd.train", remember)
    clients = corners[1]
    for kind in (noisy.DeepFeCA, noisy.ShuffledDeepFeCA):
        model = kind(2, hidden=(4,), n_features_out=3)
        noisy.Noise(100.0).applied(model, 2.0, 400)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            noisy.fitted(model, clients, 0)
    right, wrong = given[0], given[len(clients)]
    corner = corners[0][0]
    # Noise puts a record or two into another cluster than the rest of its corner.
    told = [normalized_mutual_info_score(corner, labels) for labels in (right, wrong)]
    assert told[0] > told[1]


def test_networks_counts_wrong_links_isolated_clusters_and_classes(module):
    networks = module("networks")
    classes = [np.array([0, 0, 1, 1]), np.array([0, 0, 2, 2]), np.array([1, 1, 2, 2])]
    model = SimpleNamespace(
        client_names_=["a", "b", "c"],
        clusters_=[np.array([0, 0, 1, 1])] * 3,
        result_=SimpleNamespace(
            association={
                "clusters": [["a", 0], ["a", 1], ["b", 0], ["b", 1], ["c", 0], ["c", 1]],
                "groups": [0, 0, 0, -1, 0, -1],
                "links": [[0, 2], [1, 4], [0, 4]],
                "iterations": [{}, {}],
            }
        ),
    )
    found = networks.graph_figures(model, networks.Images([], classes))
    assert found["groups"] == found["classes"] == found["iterations"] == 1
    assert found["wrong links"] == pytest.approx(100 / 3)
    assert found["wrong clusters"] == 50  # two of 0 and two of 1; 0 comes first
    assert found["isolated"] == pytest.approx(100 / 3)


def test_networks_shuffled_control_has_the_same_labels_at_other_records(module, monkeypatch):
    networks = module("networks")
    given = []

    def remember(backbone, weights, head, X, labels, n_labels, **settings):
        given.append(labels)
        return weights, head

    monkeypatch.setattr(networks.deepfeca, "train", remember)
    X = np.random.default_rng(0).random((60, 4))
    small = {"n_rounds": 1, "hidden": (4,), "n_features_out": 3, "privacy": networks.UNPROTECTED}
    for kind in (networks.DeepFeCA, networks.ShuffledDeepFeCA):
        kind(3, **small).fit([X])
    right, wrong = given
    assert sorted(right) == sorted(wrong) and (right != wrong).mean() > 0.4


def test_networks_loop_takes_the_steps_of_the_stacked_training(module):
    networks = module("networks")
    rng = np.random.default_rng(0)
    shape = networks.autoencoders.Autoencoder(5, (3, 2))
    start = np.repeat(shape.initial(rng)[None], 3, axis=0)
    data = [rng.random((n, 5)) for n in (40, 33, 7)]
    settings = {"epochs": 3, "batch_size": 16, "learning_rate": 1e-2}
    stacked = networks.autoencoders.train(
        shape, start, data, rng=np.random.default_rng(1), **settings
    )
    for fused in (False, True):
        looped = networks.one_by_one(shape, start, data, fused=fused, **settings)
        np.testing.assert_allclose(looped, stacked, atol=1e-5)


@pytest.fixture
def noisy_model(module):
    networks = module("networks")
    spec = networks.PrivacySpec(epsilon=8.0, delta=1e-5, ranges=[(0, 1)] * 4, public_size=60)
    rng = np.random.default_rng(0)
    small = {"hidden": (4,), "n_features_out": 3, "local_epochs": 2, "batch_size": 20}
    model = networks.DeepFeCA(3, privacy=spec, sampler="fast", **small)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.fit([rng.random((60, 4)) for _ in range(2)])


def test_networks_claim_is_what_the_ledger_says(module, noisy_model):
    claim = module("_claims").Claim.of("small", noisy_model)
    assert [str(bar) for bar in claim.bars if not bar.met] == []
    title, _, rows = module("_claims").rates(claim)
    assert "client 0" in title and len(rows) == 1


def test_networks_claim_finds_a_training_that_was_charged_too_little(module, noisy_model):
    claims = module("_claims")

    class Cheap:
        def rows(self, client):
            return [replace(row, charge=self.cheaper(row.charge)) for row in noisy_rows(client)]

        def cheaper(self, charge):
            less = 0.9 if claims.trainings(charge) else 1.0
            return replace(charge, sensitivity=less * charge.sensitivity, mu=less * charge.mu)

    noisy_rows = noisy_model.ledger_.rows
    noisy_model.ledger_ = Cheap()
    missed = [bar.what for bar in claims.Claim.of("cheap", noisy_model).bars if not bar.met]
    assert missed == ["cheap, charged too little by"]


def test_networks_own_mu_of_steps_that_see_all_records_is_exact(module):
    sampled = module("_claims").Sampled
    assert sampled(1.0, 4, 2.0).least_mu(1e-9) == pytest.approx(1.0, rel=1e-2)
    assert sampled(0.1, 4, 2.0).least_mu(1e-9) < 0.5
