"""Whole runs under masking: what the server sees, what is charged, and what goes wrong."""

import math
import warnings
from unittest import mock

import numpy as np
import pytest
from sklearn.base import clone

import secure_fedclust.run
from secure_fedclust import (
    FKM,
    GOLD,
    AggregationAborted,
    BudgetExceeded,
    FeCA,
    FedClustResult,
    FederationWarning,
    FedGEM,
    KFed,
    Ledger,
    ParameterError,
    PrivacySpec,
    PrivacyWarning,
    ProtocolError,
    load_model,
    noisy_nicv,
    release_synopsis,
)
from secure_fedclust.algorithms import fkm as algorithm
from secure_fedclust.engines import Fault, InProcessEngine
from secure_fedclust.messages import read_envelope
from secure_fedclust.privacy import mechanism
from secure_fedclust.privacy.accounting import Limit, epsilon_of
from secure_fedclust.privacy.grid import SumGrid
from secure_fedclust.privacy.queries import CellSums
from secure_fedclust.privacy.release import ExactSums, Releases
from secure_fedclust.privacy.secure_sum import PlainSum, PlainSummand
from secure_fedclust.protocols import sums
from secure_fedclust.protocols.cells import CELLS, ask_cells
from secure_fedclust.protocols.fedgem import PrivateFedGEMClient
from secure_fedclust.protocols.seeding import SeedingClient
from secure_fedclust.protocols.synopsis import MICRO, SynopsisClient

N_CLIENTS = 5
SUMS_ONLY = {"FKM": FKM(3), "FKM public": FKM(3, seeding="public")}
ALIGNED = {
    "FKM one_shot": FKM(3, one_shot=True),
    "KFed": KFed(3),
    "FeCA": FeCA(3, n_init=2),
    "GOLD": GOLD(3),
    "FedGEM synopsis": FedGEM(3),
    "FedGEM sums": FedGEM(3, calibration="sums"),
    "FedGEM floor": FedGEM(3, calibration="floor"),
}
MODELS = SUMS_ONLY | ALIGNED

each_model = pytest.mark.parametrize("name", MODELS)
each_width = pytest.mark.parametrize("d", [2, 4])
each_trust = pytest.mark.parametrize("active", [False, True], ids=["honest", "active"])


def spec_of(d, **changed):
    values = {
        "epsilon": 2.0,
        "delta": 1e-5,
        "ranges": [(-4, 4)] * d,
        "public_size": 80,
        "protection": "masking",
        "min_survivors": 4,
    }
    return PrivacySpec(**values | changed)


def records(d, n=80, seed=0):
    spread = np.random.default_rng(100).uniform(-3, 3, (3, d))
    rng = np.random.default_rng(seed)
    return {
        f"c{i}": np.array([rng.normal(spread[j % 3], 0.3) for j in range(n)])
        for i in range(N_CLIENTS)
    }


def fit(model, clients, spec, *, faults=(), sampler="fast", ledger=None, engine=InProcessEngine):
    """Fit over an engine in which something goes wrong."""

    class Faulty(engine):
        def __init__(self, handlers, **given):
            super().__init__(handlers, faults=faults, **given)

    model = clone(model).set_params(privacy=spec, sampler=sampler, random_state=0, ledger=ledger)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.simplefilter("ignore", FederationWarning)
        with mock.patch.object(secure_fedclust.run, "InProcessEngine", Faulty):
            return model.fit(clients)


@pytest.fixture
def no_noise(monkeypatch):
    monkeypatch.setattr(mechanism, "fast_noise", lambda sigma, size: np.zeros(size, np.int64))


# What the server sees.


@each_width
@each_trust
@each_model
def test_the_server_sees_no_answer_of_a_client_to_a_question_about_sums(name, d, active):
    result = fit(MODELS[name], records(d), spec_of(d, active_server=active)).result_
    view = result.server_view()
    forms = {sight.stage: sight.form for sight in view.saw}
    stages = {"masking/advertise", "masking/share", "masking/mask", "masking/unmask"}
    stages |= {"masking/confirm"} if active else set()
    local = set(forms) - stages
    assert stages <= set(forms)
    assert (local == set()) == (name in SUMS_ONLY)
    assert {forms[stage] for stage in local} <= {"noisy"}
    assert [opened.stage for opened in view.sums] and len(view.sums[-1].survivors) == N_CLIENTS
    assert "the sum over 5 of 5 clients" in str(view)


@each_model
def test_costs_of_both_kinds_add_up_to_the_budget_and_are_in_the_ledger(name):
    spec = spec_of(2)
    model = fit(MODELS[name], records(2), spec)
    limit, costs = Limit.of(2.0, 1e-5), model.result_.costs
    assert math.hypot(*costs.values()) == pytest.approx(limit.mu)
    assert (costs["local"] == 0) == (name in SUMS_ONLY)
    for client in model.client_names_:
        rows = [row.charge for row in model.ledger_.rows(client)]
        summed = [row for row in rows if row.message.endswith("in a sum")]
        assert math.fsum(row.mu**2 for row in summed) == pytest.approx(costs["sums"] ** 2)
        assert math.fsum(row.mu**2 for row in rows) == pytest.approx(limit.mu**2)
        for row in summed:
            assert (row.inputs["min_survivors"], row.inputs["colluders"]) == (4, 1)
    # If a client's noise were the only one: its variance is a third of what is promised.
    alone = math.hypot(costs["local"], math.sqrt(3) * costs["sums"])
    epsilon = epsilon_of(1e-5, alone)
    assert f"epsilon={epsilon:.2f}" in model.result_.fallback
    assert "3 or more clients" in model.result_.fallback


def test_the_guarantee_names_colluders_survivors_and_what_the_server_may_do():
    said = fit(FKM(3), records(2), spec_of(2), sampler="secure").guarantee_
    assert "the server, which keeps to the protocol, with up to one client on its side" in said
    assert "in sums over 4 clients or more" in said
    assert "whatever it does" in spec_of(2, active_server=True).describe()
    assert "no client on its side" in spec_of(2, colluders=0).describe()


def test_two_thirds_must_survive_unless_the_spec_says_otherwise():
    model = fit(FKM(3), records(2), spec_of(2, min_survivors=None))
    assert model.result_.privacy["min_survivors"] == 4
    assert model.privacy.min_survivors is None


# Sums are those of the plain path, to the bit.


@each_width
@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_masked_sums_and_plain_sums_give_the_same_centres(d, unit, adjacency, no_noise):
    spec = spec_of(d, unit=unit, adjacency=adjacency)
    masked = fit(FKM(3), records(d), spec)
    with (
        mock.patch.object(secure_fedclust.run, "server_end", lambda spec: PlainSum()),
        mock.patch.object(
            secure_fedclust.run,
            "client_ends",
            lambda spec, names: {name: PlainSummand(len(names)) for name in names},
        ),
    ):
        plain = fit(FKM(3), records(d), spec)
    np.testing.assert_array_equal(masked.cluster_centers_, plain.cluster_centers_)
    assert {e.stage for e in plain.result_.history} == {"sum/plain"}


STAGES = ("masking/advertise", "masking/share", "masking/mask", "masking/unmask")


@pytest.mark.parametrize("kind", ["drop", "corrupt", "truncate"])
@pytest.mark.parametrize("exchange", range(8), ids=[f"{s} {r}" for r in (0, 1) for s in STAGES])
def test_a_client_that_fails_at_any_stage_is_left_out_and_the_others_are_added_up(
    exchange, kind, no_noise
):
    model = fit(FKM(3), records(2), spec_of(2), faults=[Fault("c1", exchange, kind)])
    opened = model.result_.sums
    in_time = exchange % 4 == 3  # its vector had arrived when it failed to unmask
    for i, each in enumerate(opened):
        assert ("c1" in each.survivors) == (exchange // 4 != i or in_time)
        assert len(each.survivors) >= 4
    failed = model.result_.history[exchange]
    assert "c1" in failed.absent or "c1" in failed.rejected


def test_a_late_reply_is_set_aside_and_the_client_takes_part_in_a_later_sum(no_noise):
    faults = [Fault("c1", 2, "delay")]
    model = fit(FKM(3, n_rounds=3), records(2), spec_of(2), faults=faults)
    assert ["c1" in each.survivors for each in model.result_.sums] == [False, False, True, True]
    assert "bytes, at most" in model.result_.history[4].rejected["c1"]


@each_model
@pytest.mark.parametrize("stage", STAGES)
def test_one_dropout_too_many_aborts_the_run_and_the_charge_stands(name, stage, tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger.create(path, epsilon=9.0, delta=1e-5)
    asked = []

    class Quitting(InProcessEngine):
        def exchange(self, requests):
            replies = super().exchange(requests)
            asked.append(read_envelope(next(iter(requests.values()))).schema)
            if asked[-1] == f"{stage}/request":
                del replies["c0"], replies["c3"]
            return replies

    with pytest.raises(AggregationAborted, match=r"3 clients have .* of at least 4"):
        fit(MODELS[name], records(2), spec_of(2), engine=Quitting, sampler="secure", ledger=ledger)
    summed = [row for row in ledger.rows() if row.charge.message.endswith("in a sum")]
    # Before the question came nothing was charged for the sum; after it, all of it.
    assert len(summed) == (N_CLIENTS if stage in STAGES[2:] else 0)
    before = ledger.totals("c1").mu
    fit(MODELS[name], records(2), spec_of(2), sampler="secure", ledger=ledger)
    assert ledger.totals("c1").mu ** 2 == pytest.approx(before**2 + Limit.of(2.0, 1e-5).mu ** 2)


def test_a_masked_request_again_gets_the_same_bytes_and_no_new_noise():
    seen = []

    class Twice(InProcessEngine):
        def exchange(self, requests):
            first = super().exchange(requests)
            self._exchanges -= 1
            again = super().exchange(requests)
            seen.append(first == again)
            return first

    model = fit(FKM(3), records(2), spec_of(2), engine=Twice)
    assert len(seen) == 8 and all(seen)
    assert len(model.ledger_.rows("c0")) == 2


# What a client refuses.


def masked_client(kind=SynopsisClient, outlet=None, **changed):
    """A client in the middle of a round, and what its question is asked with."""
    spec = spec_of(2, **changed) if outlet is None else outlet.spec
    ledger = Ledger.create(None, epsilon=2.0, delta=1e-5, unit=spec.unit)
    releases = outlet or Releases("c0", spec, ledger, "fast")
    X = records(2)["c0"]
    return kind(X, spec, np.random.default_rng(0), releases, PlainSummand(5)), ledger


def asked(stage, **request):
    return stage.request.encode(request, run="run", step=0)


CELLS_REQUEST = {
    "centers": np.zeros((2, 2)),
    "radius": 1.0,
    "count_weight": 1.0,
    "square_weight": 0.0,
    "share": 0.5,
}


def test_what_is_not_additive_is_refused_inside_a_sum():
    """Its steps would be noised for a sum and seen one by one."""
    client, ledger = masked_client()
    with pytest.raises(ProtocolError, match=r"synopsis/micro is not a question .* for a sum"):
        client._contribute(asked(MICRO, n_micro=4, n_rounds=2, share=0.5), 5)
    assert ledger.rows() == []
    for kind in (SynopsisClient, PrivateFedGEMClient):
        additive = {s.name for s, _, _ in kind._stages.values() if s.additive}
        assert additive <= {"cells", "seeding/moments", "fedgem/refine"}


def test_after_a_question_that_fails_inside_a_sum_noise_is_whole_again():
    client, ledger = masked_client()
    client._contribute(asked(CELLS, **CELLS_REQUEST | {"share": 0.9}), 5)
    with pytest.raises(BudgetExceeded):
        client._contribute(asked(CELLS, **CELLS_REQUEST), 5)
    with mock.patch.object(mechanism, "fast_noise", wraps=mechanism.fast_noise) as noise:
        client.handle(asked(CELLS, **CELLS_REQUEST | {"share": 0.1}))
    assert noise.call_args.args[0] == ledger.rows()[-1].charge.sigma


def test_whole_clients_are_protected_in_sums_only():
    client, ledger = masked_client(unit="client")
    with pytest.raises(ProtocolError, match="as part of a sum only"):
        client.handle(asked(CELLS, **CELLS_REQUEST))
    assert ledger.rows() == []
    for model in ALIGNED.values():
        with pytest.raises(ParameterError, match="unit='client'"):
            fit(model, records(2), spec_of(2, unit="client"))


def test_without_noise_nothing_leaves_but_in_a_sum():
    spec = PrivacySpec.none(reason="test", protection="masking", min_survivors=4)
    client, _ = masked_client(SeedingClient, ExactSums(spec))
    with pytest.raises(ProtocolError, match="without noise is given as part of a sum only"):
        client.handle(asked(CELLS, **CELLS_REQUEST))


# The data of a whole client.


def test_a_whole_client_moves_its_vector_by_no_more_than_one_record_of_another_unit():
    rng = np.random.default_rng(0)
    query = CellSums(rng.uniform(-1, 1, (4, 2)), 0.7, 0.8)
    for adjacency, most in (("add_remove", 1), ("replace_one", 2)):
        spec = spec_of(2, unit="client", adjacency=adjacency)
        ledger = Ledger.create(None, epsilon=2.0, delta=1e-5, unit="client", adjacency=adjacency)
        releases = Releases("c", spec, ledger, "fast")
        limit = releases.limit
        grid = SumGrid.of(query, spec, limit, 0.5, 20)
        norms = []
        with mock.patch.object(mechanism, "fast_noise", lambda s, n: np.zeros(n, np.int64)):
            for step, n in enumerate((0, 1, 3, 500, 20_000)):
                X = rng.uniform(-1, 1, (n, 2))
                place = {"n_clients": 20, "run": "r", "step": step, "message": "m"}
                fields = releases.contribute(query, X, 0.01, **place).fields
                norms.append(
                    math.sqrt(sum(float((f.astype(float) ** 2).sum()) for f in fields.values()))
                )
        row = ledger.rows()[-1].charge
        assert norms[0] == 0
        assert max(norms) <= row.sensitivity / most * (1 + 1e-9)
        assert norms[-1] > 0.99 * row.sensitivity / most
        assert row.formula == f"message/{adjacency}"
        assert row.sigma >= row.sensitivity / (limit.mu * 0.1) * (1 - 1e-9)
        assert grid.sigma > 0


@pytest.mark.slow
def test_many_clients_can_be_protected_as_wholes():
    rng = np.random.default_rng(0)
    centers = np.array([[-2.0, -2.0], [2.0, 2.0], [2.0, -2.0]])
    clients = [rng.normal(centers[rng.integers(3, size=20)], 0.3) for _ in range(150)]
    spec = spec_of(2, unit="client", epsilon=8.0, min_survivors=140, colluders=5)
    model = fit(FKM(3), clients, spec)
    gaps = np.linalg.norm(centers[:, None] - model.cluster_centers_[None], axis=2).min(axis=1)
    assert gaps.max() < 0.5
    assert "for each client's data" in spec.describe()


# Masking without differential privacy.


@pytest.mark.parametrize("offset", [0.0, 1e5])
@each_width
def test_sums_without_noise_are_exact_and_say_so(d, offset):
    clients = {name: X + offset for name, X in records(d).items()}
    spec = PrivacySpec.none(reason="test", protection="masking")
    model = fit(FKM(3), clients, spec)
    assert model.guarantee_ == (
        "NO DP CLAIM: sums over clients are exact, though nothing but these sums is seen (test)"
    )
    X = np.concatenate(list(clients.values()))
    expected = model.cluster_centers_
    sums_, counts = algorithm.client_sums(X, expected)
    np.testing.assert_allclose(expected, sums_ / counts[:, None], atol=1e-3)
    forms = {sight.form for sight in model.result_.server_view().saw}
    assert forms == {"key", "sealed", "masked", "share", "plain"}
    plain = [s for s in model.result_.server_view().saw if s.form == "plain"]
    assert [s.stage for s in plain] == ["unnoised/region"]  # empty replies
    assert model.ledger_ is None and model.result_.costs == {} and model.result_.fallback is None


def test_what_the_server_looks_at_one_by_one_cannot_be_masked_without_noise():
    spec = PrivacySpec.none(reason="test", protection="masking")
    for model in (KFed(3), FeCA(3), GOLD(3), FedGEM(3)):
        with pytest.raises(ParameterError, match="which nothing would hide; use FKM"):
            fit(model, records(2), spec)
    with pytest.raises(ParameterError, match="use align='index'"):
        fit(FKM(3, align="kmeans"), records(2), spec)
    alone = PrivacySpec.none(reason="test", protection="masking", min_survivors=2)
    with pytest.raises(ParameterError, match="one client's vector could be seen; give at least 3"):
        fit(FKM(3), records(2), alone)


# What cannot be.


@pytest.mark.parametrize(
    ("n", "changed", "message"),
    [
        (1, {"min_survivors": None}, "a cohort of 1 clients: masking needs 3"),
        (2, {"min_survivors": None}, "a cohort of 2 clients: masking needs 3"),
        (5, {"min_survivors": 6}, "min_survivors=6 of 5 clients: give at most 5"),
        (5, {"min_survivors": 1, "colluders": 0}, "min_survivors=1: give more than"),
        (5, {"min_survivors": 3, "active_server": True}, "could open two sums .* at least 4"),
    ],
)
def test_cohorts_that_protect_nobody_are_refused_before_anything_is_charged(n, changed, message):
    ledger = Ledger.create(None, epsilon=2.0, delta=1e-5)
    clients = dict(list(records(2).items())[:n])
    with pytest.raises(ParameterError, match=message):
        fit(FKM(3), clients, spec_of(2, **changed), ledger=ledger)
    assert ledger.rows() == []
    with pytest.raises(ParameterError, match=message):
        spec_of(2, **changed).plan(FKM(3), n_clients=n, n_features=2)


def test_a_spec_for_live_clients_must_say_how_many_survive():
    with pytest.raises(ParameterError, match="needs min_survivors in the privacy spec"):
        FKM(3, privacy=spec_of(2, min_survivors=None)).fit(InProcessEngine({"a": lambda b: b}))


def test_a_synopsis_is_not_masked_and_a_figure_is():
    with pytest.raises(ParameterError, match="a synopsis is looked at client by client"):
        release_synopsis(records(2), privacy=spec_of(2), n_clusters=3)
    figure = noisy_nicv(records(2), np.zeros((1, 2)), privacy=spec_of(2, epsilon=50.0))
    truth = float(np.mean([np.square(X).sum(axis=1).mean() for X in records(2).values()]))
    assert figure.value == pytest.approx(truth, abs=6 * figure.standard_error)
    assert "on the server's side" in figure.fallback


def test_a_client_that_holds_another_spec_has_no_part_in_a_sum():
    given = sums.client_ends

    def differing(spec, names):
        ends = given(spec, names)
        ends["c2"] = given(spec_of(2, delta=2e-5), ["c2"])["c2"]
        return ends

    with mock.patch.object(secure_fedclust.run, "client_ends", differing):
        model = fit(FKM(3), records(2), spec_of(2))
    assert {opened.survivors for opened in model.result_.sums} == {("c0", "c1", "c3", "c4")}


# What is kept.


@pytest.mark.parametrize("name", ["FKM", "FedGEM synopsis"])
def test_sums_costs_and_bytes_of_each_party_survive_saving(name, tmp_path):
    model = fit(MODELS[name], records(2), spec_of(2), faults=[Fault("c1", 0, "drop")])
    result = model.result_
    result.save(tmp_path / "result.json")
    loaded = FedClustResult.load(tmp_path / "result.json")
    assert loaded.sums == result.sums and loaded.costs == result.costs
    assert loaded.fallback == result.fallback
    assert loaded.transcript() == result.transcript()
    assert str(loaded.server_view()) == str(result.server_view())
    rows = {(row["stage"], row["client"]): row for row in result.transcript()}
    total = sum(row["bytes up"] for row in rows.values())
    assert total == sum(exchange.bytes_up for exchange in result.history)
    first = result.history[0].stage
    assert rows[first, "c1"]["replies"] == rows[first, "c0"]["replies"] - 1
    model.save(tmp_path / "model.json")
    assert load_model(tmp_path / "model.json").result_.sums == result.sums


@each_width
def test_noise_in_a_sum_is_that_of_its_survivors(d):
    """With all clients there, more than was promised: n over the honest ones that must survive."""
    clients = {f"c{i}": np.zeros((0, d)) for i in range(N_CLIENTS)}
    centers = np.random.default_rng(0).uniform(-1, 1, (200, d))
    spec = spec_of(d)
    drawn = []
    for _ in range(3):
        run = secure_fedclust.run.open_run(
            clients, spec=spec, client_class=SeedingClient, rng=np.random.default_rng(0)
        )
        query = CellSums(centers, 0.5, 1.0)
        cells, n = ask_cells(run.session, query, 0.5)
        assert n == N_CLIENTS
        drawn.append(cells.counts / cells.count_sigma)
        promised = query.sensitivity("add_remove").value / (0.5 * run.session.limit.mu * 2**0.5)
        assert cells.sum_sigma == pytest.approx(promised * math.sqrt(N_CLIENTS / 3), rel=1e-3)
    values = np.concatenate(drawn)
    assert values.std() == pytest.approx(1, abs=5 / math.sqrt(2 * len(values)))
