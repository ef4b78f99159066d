"""Whole runs under masking: what the server sees, what is charged, and what goes wrong."""

import math
import warnings
from dataclasses import replace
from unittest import mock

import numpy as np
import pandas as pd
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
from secure_fedclust.privacy import masking, masking_stages, mechanism
from secure_fedclust.privacy.accounting import Limit, epsilon_of, slack_of
from secure_fedclust.privacy.grid import SumGrid
from secure_fedclust.privacy.identity import Identity
from secure_fedclust.privacy.masking import MASK
from secure_fedclust.privacy.plan import MANY, MANY_ELSEWHERE
from secure_fedclust.privacy.queries import CellSums
from secure_fedclust.privacy.release import ExactSums, Releases
from secure_fedclust.privacy.secure_sum import PlainSum, PlainSummand
from secure_fedclust.protocols import sums
from secure_fedclust.protocols.cells import CELLS, ask_cells
from secure_fedclust.protocols.fedgem import PrivateFedGEMClient
from secure_fedclust.protocols.seeding import SeedingClient
from secure_fedclust.protocols.synopsis import MICRO, SynopsisClient
from secure_fedclust.protocols.unnoised import MOMENTS_WITHIN

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
    """Fit where something goes wrong."""
    model = clone(model).set_params(privacy=spec, sampler=sampler, random_state=0, ledger=ledger)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.simplefilter("ignore", FederationWarning)
        with mock.patch.object(secure_fedclust.run, "InProcessEngine", engine):
            return model.fit(clients, faults=faults)


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
    assert "the noisy sum over 5 of 5 clients" in str(view)


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
    assert "if every sum is over 4 clients or more" in said
    assert MANY not in said, "five clients share keys with all others"
    assert "signing keys from elsewhere" in spec_of(2, active_server=True).describe()
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
        mock.patch.object(
            secure_fedclust.run,
            "ends_for",
            lambda spec, names: sums.Ends(
                PlainSum(), {name: PlainSummand(len(names)) for name in names}
            ),
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
            replies = dict(super().exchange(requests))
            asked.append(read_envelope(next(iter(requests.values()))).schema)
            if asked[-1] == f"{stage}/request":
                del replies["c0"], replies["c3"]
            return replies.items()

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
            first = list(super().exchange(requests))
            self._exchanges -= 1
            again = list(super().exchange(requests))
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


def contribute(client, question, run="run", number=0):
    return client._contribute(question, 5, run=run, number=number)


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
        contribute(client, asked(MICRO, n_micro=4, n_rounds=2, share=0.5))
    assert ledger.rows() == []
    for kind in (SynopsisClient, PrivateFedGEMClient):
        additive = {s.name for s, _, _ in kind._stages.values() if s.additive}
        assert additive <= {"cells", "seeding/moments", "fedgem/refine"}


def test_after_a_question_that_fails_inside_a_sum_noise_is_whole_again():
    client, ledger = masked_client()
    contribute(client, asked(CELLS, **CELLS_REQUEST | {"share": 0.9}))
    with pytest.raises(BudgetExceeded):
        contribute(client, asked(CELLS, **CELLS_REQUEST))
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


@pytest.mark.parametrize("hostile", ["another cube", "another centre"])
def test_a_client_that_is_asked_about_another_region_opens_no_sum(hostile):
    """A server could look at one client alone, if the others' records were made to vanish."""
    spec = PrivacySpec.none(reason="test", protection="masking", active_server=True)

    class Singling(InProcessEngine):
        def exchange(self, requests):
            changed = dict(requests)
            for name, data in requests.items():
                envelope = read_envelope(data)
                if envelope.schema != "masking/mask/request" or name == "c2":
                    continue
                place = {"run": envelope.run, "step": envelope.step}
                fields, _ = MASK.request.decode(data, **place, bounds={})
                inner = read_envelope(fields["question"].tobytes())
                if inner.schema != MOMENTS_WITHIN.request.name:
                    continue
                place = {"run": inner.run, "step": inner.step}
                asked_, _ = MOMENTS_WITHIN.request.decode(
                    fields["question"].tobytes(), **place, bounds={}
                )
                if hostile == "another cube":
                    asked_["power"] = 100
                else:
                    asked_["center"] = asked_["center"] + 1.0
                question = MOMENTS_WITHIN.request.encode(asked_, **place)
                fields["question"] = np.frombuffer(question, dtype=np.uint8)
                changed[name] = MASK.request.encode(fields, run=inner.run, step=envelope.step)
            return super().exchange(changed)

    with pytest.raises(AggregationAborted):
        fit(FKM(3), records(2), spec, engine=Singling)


def test_a_client_without_any_spread_does_not_blur_the_others():
    rng = np.random.default_rng(0)
    clients = {f"c{i}": rng.normal([[-3.0], [3.0]] * 50) * 1e-8 for i in range(5)}
    clients["flat"] = np.zeros((50, 1))
    spec = PrivacySpec.none(reason="test", protection="masking")
    found = np.sort(fit(FKM(3), clients, spec).cluster_centers_.ravel())
    np.testing.assert_allclose(found, [-3e-8, 0, 3e-8], atol=1e-8)


@pytest.mark.parametrize("exchange", [2, 10])
def test_a_client_whose_magnitude_was_not_counted_is_not_cut_off_unseen(exchange):
    """What the cube was chosen without may lie outside it."""
    rng = np.random.default_rng(0)
    clients = {f"c{i}": rng.normal([[-3.0], [3.0]] * 50) for i in range(6)}
    clients["c0"] = clients["c0"] + 1000.0
    spec = PrivacySpec.none(reason="test", protection="masking")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = FKM(3, privacy=spec, random_state=0)
        model.fit(clients, faults=[Fault("c0", exchange, "drop")])
    there = "c0" in model.result_.sums[-1].survivors
    assert there == (exchange == 2)
    assert any("c0: left out of the run" in str(w.message) for w in caught) == (not there)
    far = np.abs(model.cluster_centers_ - 1000).min()
    assert far < 5 if there else np.abs(model.cluster_centers_).max() < 6


@pytest.mark.parametrize("offset", [0.0, 1e5])
@each_width
def test_sums_without_noise_are_exact_and_say_so(d, offset):
    clients = {name: X + offset for name, X in records(d).items()}
    spec = PrivacySpec.none(reason="test", protection="masking")
    model = fit(FKM(3), clients, spec)
    assert model.guarantee_ == (
        "NO DP CLAIM: sums over clients are exact; nothing else is seen by the server, which keeps "
        "to the protocol, with up to one client on its side, if every sum is over 4 clients or "
        "more (test)"
    )
    X = np.concatenate(list(clients.values()))
    expected = model.cluster_centers_
    sums_, counts = algorithm.client_sums(X, expected)
    np.testing.assert_allclose(expected, sums_ / counts[:, None], atol=1e-3)
    forms = {sight.form for sight in model.result_.server_view().saw}
    assert forms == {"key", "sealed", "masked", "share"}
    assert "the EXACT sum over 5 of 5 clients" in str(model.result_.server_view())
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
        (1, {"min_survivors": None}, "a cohort of 1 clients: .* for 3 to"),
        (2, {"min_survivors": None}, "a cohort of 2 clients: .* for 3 to"),
        (5, {"min_survivors": 6}, "min_survivors=6 of 5 clients: give at most 5"),
        (5, {"min_survivors": 1, "colluders": 0}, "min_survivors=1 .*; give at least 2"),
        (5, {"min_survivors": None, "colluders": 5}, "colluders=5 of 5 clients: give at most 4"),
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
    given = sums.ends_for

    def differing(spec, names):
        ends = given(spec, names)
        ends.clients["c2"] = given(spec_of(2, delta=2e-5), ["c2"]).clients["c2"]
        return ends

    with mock.patch.object(secure_fedclust.run, "ends_for", differing):
        model = fit(FKM(3), records(2), spec_of(2))
    assert {opened.survivors for opened in model.result_.sums} == {("c0", "c1", "c3", "c4")}


# Clients that do not follow the protocol.


def rewriting(stage, change):
    """An engine in which the reply of c1 to a stage is another one."""

    class Rewriting(InProcessEngine):
        def exchange(self, requests):
            replies = dict(super().exchange(requests))
            envelope = read_envelope(next(iter(requests.values())))
            if envelope.schema == stage.request.name and "c1" in replies:
                place = {"run": envelope.run, "step": envelope.step}
                decoded = {
                    name: stage.reply.decode(data, **place, bounds={})[0]
                    for name, data in replies.items()
                }
                replies["c1"] = stage.reply.encode(change(decoded, **place), **place)
            return replies.items()

    return Rewriting


def wrong_shares(replies, **_):
    return {"shares": (replies["c1"]["shares"] + 1) % 65521}


def another_identity(replies, **_):
    return replies["c1"] | {"identity": replies["c3"]["identity"]}


def unknown_identity(replies, run, step):
    stranger = Identity()
    text = masking_stages.advertised_text(run, step, replies["c1"]["keys"].tobytes())
    return replies["c1"] | {
        "identity": np.frombuffer(stranger.public, np.uint8),
        "signature": np.frombuffer(stranger.sign(text), np.uint8),
    }


def test_one_holder_of_wrong_shares_does_not_stop_a_sum_that_enough_others_can_open(no_noise):
    honest = fit(FKM(3), records(2), spec_of(2))
    engine = rewriting(masking.UNMASK, wrong_shares)
    model = fit(FKM(3), records(2), spec_of(2), engine=engine)
    assert {opened.survivors for opened in model.result_.sums} == {tuple(records(2))}
    np.testing.assert_array_equal(model.cluster_centers_, honest.cluster_centers_)
    with pytest.raises(AggregationAborted, match="do not fit what it has sent before"):
        fit(FKM(3), records(2), spec_of(2, min_survivors=5), engine=engine)


def all_of_another(replies, **_):
    return replies["c3"]


@pytest.mark.parametrize("change", [another_identity, unknown_identity, all_of_another])
def test_a_false_identity_throws_nobody_out_but_its_bearer(change):
    engine = rewriting(masking.ADVERTISE, change)
    model = fit(FKM(3), records(2), spec_of(2, active_server=True), engine=engine)
    assert {opened.survivors for opened in model.result_.sums} == {("c0", "c2", "c3", "c4")}


# What a result and a ledger say of it.


def test_the_slack_of_a_sum_is_charged_and_no_more_than_its_share():
    model = fit(FKM(3), records(4), spec_of(4))
    limit = Limit.of(2.0, 1e-5)
    for row in model.ledger_.rows("c0"):
        charge = row.charge
        assert charge.slack == pytest.approx(slack_of(charge.sigma, charge.coordinates))
        assert 0 < charge.slack <= (charge.mu / limit.mu) ** 2 * limit.slack * (1 + 1e-9)


def test_all_runs_together_claim_no_more_than_the_weakest_of_them(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=9.0, delta=1e-5).close()
    given = {"sampler": "secure", "ledger": path}
    trusting = spec_of(2, epsilon=1.0, colluders=0, min_survivors=5)
    local = PrivacySpec(epsilon=1.0, delta=1e-5, ranges=[(-4, 4)] * 2)
    together = "all of them together only against the server, which keeps to the protocol, with "
    before = fit(FKM(3), records(2), local, **given).guarantee_
    assert "all of them together" not in before
    active = spec_of(2, epsilon=1.0, active_server=True)
    said = fit(FKM(3), records(2), active, **given).guarantee_
    assert "against the server, whatever it does" in said and "up to one client" in said
    assert "all of them together only" not in said, "its own sentence says it"
    for spec in (trusting, local, active, spec_of(2, epsilon=1.0, colluders=2)):
        said = fit(FKM(3), records(2), spec, **given).guarantee_
        assert f"{together}no client on its side" in said
        assert said.endswith(MANY), "nobody knows how many clients there were in those runs"


def test_a_ledger_does_not_know_how_many_clients_there_were_in_other_runs(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=9.0, delta=1e-5).close()
    spec = spec_of(2, epsilon=1.0)
    said = fit(FKM(3), records(2), spec, sampler="secure", ledger=path).guarantee_
    assert said.endswith(MANY_ELSEWHERE) and MANY not in said


def test_several_records_of_a_person_count_in_the_fallback_too():
    frame = pd.concat(
        pd.DataFrame({"site": name, "who": np.arange(len(X)) // 3, "x": X[:, 0], "y": X[:, 1]})
        for name, X in records(2).items()
    )
    spec = spec_of(2, records_per_person=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        model = FKM(3, privacy=spec, sampler="fast", random_state=0)
        model.fit(frame, client_column="site", person_column="who")
    alone = 3 * math.sqrt(3) * Limit.of(2.0, 1e-5).mu
    assert f"epsilon={epsilon_of(1e-5, alone):.1f}" in model.result_.fallback


@pytest.mark.parametrize("n", [3, 4, 5, 9, 10])
@pytest.mark.parametrize("colluders", [0, 1, 2])
@each_trust
def test_the_default_quorum_is_one_that_clients_accept(n, colluders, active):
    spec = spec_of(2, min_survivors=None, colluders=colluders, active_server=active)
    found = sums.with_quorum(spec, n).min_survivors
    assert min(colluders + 2, n) <= found <= n and found >= 2 * n / 3
    assert not active or 2 * found > n + colluders


@each_width
def test_a_plan_says_what_falls_back_and_what_else_is_seen(d):
    spec = spec_of(d)
    for model in (FKM(3), KFed(3)):
        plan = spec.plan(model, n_clients=N_CLIENTS, n_features=d)
        fitted = fit(model, records(d), spec, sampler="secure")
        assert "noise enough" not in fit(model, records(d), spec, sampler="fast").guarantee_
        assert plan.fallback == fitted.result_.fallback
        assert plan.fallback in str(plan)
        also = "the server also sees each client's answers"
        assert (also in plan.guarantee) == (also in fitted.guarantee_) == isinstance(model, KFed)


def test_whole_clients_are_planned_as_they_are_run_and_more_of_them_would_help():
    spec = spec_of(2, unit="client")
    numbers = {"n_clients": N_CLIENTS, "n_features": 2, "n_records": 10**6}
    for plan in (spec.plan(FKM(3), **numbers), FKM(3).plan(spec, **numbers)):
        assert plan.feasibility.verdict == "poor"
        assert f"{plan.feasibility.records} clients" in str(plan)


def test_a_ledger_that_experiments_were_charged_to_claims_nothing_for_all_runs():
    ledger = Ledger.create(None, epsilon=9.0, delta=1e-5)
    local = PrivacySpec(epsilon=1.0, delta=1e-5, ranges=[(-4, 4)] * 2)
    assert (
        "all runs so far"
        in fit(FKM(3), records(2), local, sampler="secure", ledger=ledger).guarantee_
    )
    fit(FKM(3), records(2), local, sampler="fast", ledger=ledger)
    said = fit(FKM(3), records(2), local, sampler="secure", ledger=ledger).guarantee_
    assert said.endswith("for this run alone: others on the ledger have no guarantee")


def test_what_a_row_does_not_say_is_taken_for_the_least():
    ledger = Ledger.create(None, epsilon=9.0, delta=1e-5)
    fit(FKM(3), records(2), spec_of(2), ledger=ledger, sampler="secure")
    charge = ledger.rows()[0].charge
    assert ledger.quorums() == {(4, 1, False, False)}
    ledger.charge(replace(charge, inputs={"radius": 1.0}))
    assert ledger.quorums() == {(4, 1, False, False), (0, 0, False, False)}


def test_clusters_of_clients_that_dropped_out_of_the_count_are_kept():
    rng = np.random.default_rng(0)
    corners = np.array([[-15.0, -15.0], [15.0, -15.0], [-15.0, 15.0], [15.0, 15.0]])
    clients = {
        f"c{i}": rng.normal(corners[(0, 1) if i > 1 else (2, 3), :].repeat(300, axis=0))
        for i in range(8)
    }
    spec = spec_of(2, epsilon=8.0, ranges=[(-20, 20)] * 2, public_size=600, min_survivors=5)
    # The synopsis is the first exchange; vectors of the count are the fourth.
    faults = [Fault(name, 3, "drop") for name in ("c0", "c1")]
    model = fit(FedGEM(2), clients, spec, faults=faults)
    assert [len(opened.survivors) for opened in model.result_.sums] == [6, 8]
    gaps = np.linalg.norm(corners[:, None] - model.cluster_centers_[None], axis=2).min(axis=1)
    assert gaps.max() < 0.5


def test_a_run_without_noise_is_not_charged_to_a_ledger():
    ledger = Ledger.create(None, epsilon=2.0, delta=1e-5)
    for protection in ("none", "masking"):
        spec = PrivacySpec.none(reason="test", protection=protection)
        with pytest.raises(ParameterError, match="not charged to a ledger"):
            fit(FKM(3), records(2), spec, ledger=ledger)


def test_faults_are_for_clients_that_are_there():
    with pytest.raises(ParameterError, match="there is no client 'z'"):
        fit(FKM(3), records(2), spec_of(2), faults=[Fault("z", 0, "drop")])
    with pytest.raises(ParameterError, match="not for an engine"):
        FKM(3, privacy=spec_of(2)).fit(
            InProcessEngine({"a": lambda b: b}), faults=[Fault("a", 0, "drop")]
        )


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


def test_a_client_whose_totals_are_held_back_is_told_and_nobody_hears_how_many_it_has():
    rng = np.random.default_rng(0)
    clients = {f"c{i}": rng.uniform(-1, 1, (20, 2)) for i in range(N_CLIENTS)}
    clients["c3"] = rng.uniform(-1, 1, (10 * 16 + 7, 2))
    for size, told in ((10, ["c3"]), (11, [])):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            FKM(3, privacy=spec_of(2, public_size=size), random_state=0).fit(clients)
        held = [str(w.message) for w in caught if "totals in a sum" in str(w.message)]
        assert [text.split(":")[0] for text in held] == told
        assert not any("167" in text for text in held)
