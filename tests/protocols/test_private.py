"""What leaves a private client, what it costs, and what a hostile server or client can do."""

import functools
import math
import secrets
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from sklearn.base import clone

import secure_fedclust.run
from secure_fedclust import (
    FKM,
    GOLD,
    BudgetExceeded,
    FeCA,
    FederationWarning,
    FedGEM,
    KFed,
    Ledger,
    LedgerError,
    PrivacySpec,
    PrivacyWarning,
    ProtocolError,
    SecureFedClustError,
    noisy_nicv,
    private_ranges,
    release_synopsis,
)
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.messages import Real, Schema, Stage, read_envelope
from secure_fedclust.privacy import mechanism, release
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.mechanism import Noisy
from secure_fedclust.privacy.release import Releases
from secure_fedclust.protocols import cells, fedgem, quality, ranges, seeding, synopsis
from secure_fedclust.protocols.client import PrivateClient

MODELS = {
    "FKM": FKM(3),
    "FKM one_shot": FKM(3, one_shot=True),
    "FKM public": FKM(3, seeding="public"),
    "KFed": KFed(3),
    "FeCA": FeCA(3, n_init=2),
    "GOLD": GOLD(3),
    "FedGEM synopsis": FedGEM(3, n_local_steps=2),
    "FedGEM sums": FedGEM(3, calibration="sums", n_rounds=2, n_local_steps=2),
    "FedGEM floor": FedGEM(3, calibration="floor", n_rounds=2, n_local_steps=2),
    "FedGEM theorem9": FedGEM(3, calibration="theorem9", n_rounds=2, n_local_steps=2),
}
SYSTEMS = [*MODELS, "private_ranges", "noisy_nicv", "release_synopsis"]

each_system = pytest.mark.parametrize("system", SYSTEMS)
each_width = pytest.mark.parametrize("d", [2, 4])

CLIENT_CLASSES = (
    fedgem.PrivateFedGEMClient,
    synopsis.SynopsisClient,
    ranges.RangesClient,
    quality.QualityClient,
)
STAGES = {name: entry for kind in CLIENT_CLASSES for name, entry in kind._stages.items()}


def spec_for(system, d, **changed):
    values = {"epsilon": 2.0, "delta": 1e-5, "ranges": [(-4, 4)] * d}
    if system.endswith(("floor", "theorem9")):
        values["public_size"] = 60
    return PrivacySpec(**values | changed)


def records(d, n=60, seed=0):
    """Three clients with three clusters each; of equal seeds, larger data hold the smaller."""
    spread = np.random.default_rng(100).uniform(-3, 3, (3, d))
    made = {}
    for i, name in enumerate("abc"):
        rng = np.random.default_rng([seed, i])
        made[name] = np.array([rng.normal(spread[j % 3], 0.4) for j in range(n)]).reshape(n, d)
    return made


def perform(system, clients, spec, *, sampler=None, ledger=None, random_state=0):
    """Run one system; what comes back is what may be published.

    Fast noise is not charged to files.
    """
    in_file = isinstance(ledger, str | Path) or (ledger is not None and ledger.path is not None)
    given = {"sampler": sampler or ("secure" if in_file else "fast"), "ledger": ledger}
    with warnings.catch_warnings():
        # Sixty records are too few for most of them, which is not what is tested here.
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.simplefilter("ignore", FederationWarning)
        if system in MODELS:
            model = clone(MODELS[system])
            model.set_params(privacy=spec, random_state=random_state, **given)
            return model.fit(clients).result_
        if system == "private_ranges":
            target = {"epsilon": spec.epsilon, "delta": spec.delta, "adjacency": spec.adjacency}
            return private_ranges(clients, **target, largest=100.0, **given)
        if system == "noisy_nicv":
            width = next(iter(clients.values())).shape[1]
            return noisy_nicv(clients, np.zeros((2, width)), privacy=spec, **given)
        return release_synopsis(
            clients, privacy=spec, n_clusters=3, random_state=random_state, **given
        )


def published(outcome):
    """Everything that a result says, but for what only its own client may see and for timings."""
    content = {name: value for name, value in vars(outcome).items() if name != "nonprivate"}
    content.pop("seconds", None)
    for exchange in content.get("history", ()):
        exchange.seconds = 0.0
    if "synopsis" in content:
        found = content.pop("synopsis")
        content |= {"radius": found.radius, "cells": {c: vars(x) for c, x in found.cells.items()}}
    return repr(content)


class Transcript(list):
    """Requests and replies of every exchange, in order."""

    def shapes(self):
        """What somebody who only counts bytes sees."""
        return [
            [
                (name, read_envelope(sent[name]).schema, len(sent[name]), len(got.get(name, b"")))
                for name in sent
            ]
            for sent, got in self
        ]

    def replies(self):
        """Client, stage and fields of every reply."""
        for sent, got in self:
            for name, reply in got.items():
                envelope = read_envelope(sent[name])
                stage = STAGES[envelope.schema][0]
                place = {"run": envelope.run, "step": envelope.step}
                yield name, stage, stage.reply.decode(reply, **place, bounds={})[0]


def listen(system, *given, **options):
    """Run something; return what it returns, and what was said."""
    transcript = Transcript()

    class Tapped(InProcessEngine):
        def exchange(self, requests):
            replies = dict(super().exchange(requests))
            transcript.append((dict(requests), replies))
            return replies.items()

    with mock.patch.object(secure_fedclust.run, "InProcessEngine", Tapped):
        return perform(system, *given, **options), transcript


@functools.cache
def heard_once(system, d):
    """An ordinary run that several tests look at: what was said, and a ledger with room left."""
    ledger = Ledger.create(None, epsilon=4.0, delta=1e-5)
    return listen(system, records(d), spec_for(system, d), ledger=ledger)[1], ledger


@pytest.fixture
def fixed_names(monkeypatch):
    """Runs and ledgers that are all called alike, so that nothing but content can differ."""
    monkeypatch.setattr(secrets, "token_hex", lambda n=8: "ab" * n)


@pytest.fixture
def no_noise(monkeypatch):
    monkeypatch.setattr(mechanism, "fast_noise", lambda sigma, size: np.zeros(size, np.int64))


def others(d):
    """A neighbour of `records(d)`, and data sets that have little in common with it."""
    base = records(d)
    return {
        "one record more": {**base, "a": records(d, 61)["a"]},
        "no records": {name: np.zeros((0, d)) for name in base},
        "records out of range": {name: 1e30 * X[:40] for name, X in base.items()},
    }


# What leaves a client.


@each_width
@each_system
def test_whatever_leaves_depends_on_records_through_noisy_values_only(
    system, d, fixed_names, monkeypatch
):
    """Noisy values of a first run are released again for other data: nothing else may differ."""
    spec = spec_for(system, d)
    released = []
    original = release.noise

    def record(exact, sigma, sampler):
        released.append(original(exact, sigma, sampler))
        return released[-1]

    monkeypatch.setattr(release, "noise", record)
    ledger = Ledger.create(None, epsilon=2.0, delta=1e-5)
    outcome, heard = listen(system, records(d), spec, ledger=ledger)
    assert released and heard

    for what, data in others(d).items():
        again = iter(released)

        def replay(exact, sigma, sampler, again=again):
            noisy = next(again)
            assert (sigma, exact.exponent) == (noisy.sigma, noisy.exponent)
            return noisy

        monkeypatch.setattr(release, "noise", replay)
        fresh = Ledger.create(None, epsilon=2.0, delta=1e-5)
        repeated, overheard = listen(system, data, spec, ledger=fresh)
        assert overheard == heard, what
        assert next(again, None) is None, what
        assert [row.charge for row in fresh.rows()] == [row.charge for row in ledger.rows()], what
        assert published(repeated) == published(outcome), what


@each_width
@each_system
def test_one_record_more_or_none_at_all_changes_no_stage_and_no_length(system, d):
    heard, ledger = heard_once(system, d)
    charged = [(row.charge.client, row.charge.message, row.charge.mu) for row in ledger.rows()]
    for what in ("one record more", "no records"):
        fresh = Ledger.create(None, epsilon=2.0, delta=1e-5)
        _, overheard = listen(system, others(d)[what], spec_for(system, d), ledger=fresh)
        assert overheard.shapes() == heard.shapes(), what
        rows = [(row.charge.client, row.charge.message, row.charge.mu) for row in fresh.rows()]
        assert [row[:2] for row in rows] == [row[:2] for row in charged], what
        np.testing.assert_allclose([row[2] for row in rows], [row[2] for row in charged])


@each_width
@each_system
def test_the_order_of_records_changes_not_a_bit(system, d, fixed_names, no_noise):
    spec = spec_for(system, d)
    base = records(d)
    outcome, heard = listen(system, base, spec)
    order = np.random.default_rng(5).permutation(60)
    shuffled, overheard = listen(system, {name: X[order] for name, X in base.items()}, spec)
    assert overheard == heard
    assert published(shuffled) == published(outcome)


@pytest.mark.parametrize("system", ["FKM", "KFed", "FedGEM sums", "FedGEM floor", "noisy_nicv"])
def test_the_order_of_very_many_records_changes_not_a_bit(system, fixed_names, no_noise):
    X = np.random.default_rng(6).normal(size=(20_000, 4))
    spec = spec_for(system, 4)
    _, heard = listen(system, {"a": X}, spec)
    _, overheard = listen(system, {"a": X[::-1]}, spec)
    assert overheard == heard


@each_width
@each_system
def test_every_noisy_number_is_a_whole_number_of_grid_steps(system, d):
    heard, ledger = heard_once(system, d)
    sigmas = {row.charge.sigma for row in ledger.rows()}
    odd = []
    for _, stage, reply in heard.replies():
        noisy = {name: value for name, value in reply.items() if name in NOISY[stage.name]}
        assert noisy and all(value.dtype == np.int64 for value in noisy.values())
        odd += [value.ravel() % 2 for value in noisy.values()]
        assert isinstance(reply["exponent"], int) and reply["sigma"] in sigmas
        assert reply["sigma"] >= 2**12
        floats = {name for name, value in reply.items() if np.asarray(value).dtype.kind == "f"}
        assert floats <= {"sigma", "centers", "radius", "start"}
    # Only even ones would show that the grid is coarser than stated.
    odd = np.concatenate(odd)
    assert len(odd) < 40 or abs(odd.mean() - 0.5) < 3 / math.sqrt(len(odd))


NOISY = {
    "seeding/moments": {"count", "sums", "squares"},
    "cells": {"counts", "sums", "squares"},
    "synopsis/micro": {"counts", "sums", "squares"},
    "fedgem/sums": {"counts", "sums"},
    "fedgem/means": {"means"},
    "fedgem/refine": {"counts", "sums"},
    "ranges/histograms": {"counts"},
    "quality/cost": {"cost", "count"},
}


def test_the_table_of_noisy_fields_leaves_out_no_private_stage():
    private = {stage.name for stage, _, _ in STAGES.values()} - {"fedgem/local_seed"}
    assert private == set(NOISY)
    for stage, _, _ in STAGES.values():
        whole = {n for n, k in stage.reply.fields.items() if getattr(k, "dtype", "") == "int64"}
        assert whole == NOISY.get(stage.name, set())


@each_width
@each_system
def test_replies_hold_no_number_of_any_record(system, d):
    """Searched for as bytes, in the caller's coordinates and in working ones."""
    sent = b"".join(reply for _, got in heard_once(system, d)[0] for reply in got.values())
    for X in records(d).values():
        for value in np.concatenate([X.ravel(), X.ravel() / 4]):
            assert value.tobytes() not in sent


# What it costs.


@each_width
@each_system
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_run_spends_all_of_its_budget_and_no_more(system, d, adjacency):
    spec = spec_for(system, d, adjacency=adjacency)
    ledger = Ledger.create(None, epsilon=3.0, delta=1e-5, adjacency=adjacency)
    outcome = perform(system, records(d), spec, ledger=ledger)
    limit = Limit.of(spec.epsilon, spec.delta)
    for name in "abc":
        rows = [row.charge for row in ledger.rows(name)]
        total = sum((charge.sensitivity / charge.sigma) ** 2 for charge in rows)
        assert total == pytest.approx(limit.mu**2, rel=1e-6)
        assert limit.allows(*ledger.totals(name))
        assert outcome.spent[name] == pytest.approx(spec.epsilon, abs=1e-3)
        assert all(charge.formula.endswith(adjacency) for charge in rows)
    ledger.verify(outcome.anchors.values())


@each_width
@each_system
def test_every_release_is_in_the_ledger_before_its_noise_is_drawn(system, d, monkeypatch):
    ledger = Ledger.create(None, epsilon=2.0, delta=1e-5)
    drawn = 0

    def sampler(sigma, size):
        nonlocal drawn
        drawn += 1
        rows = ledger.rows()
        assert len(rows) == drawn
        assert (rows[-1].charge.sigma, rows[-1].charge.coordinates) == (sigma, size)
        return original(sigma, size)

    original = mechanism.fast_noise
    monkeypatch.setattr(mechanism, "fast_noise", sampler)
    perform(system, records(d), spec_for(system, d), ledger=ledger)
    assert drawn == len(ledger.rows()) > 0


@pytest.fixture
def no_draw(monkeypatch):
    def refuse(sigma, size):
        raise AssertionError("noise was drawn")

    monkeypatch.setattr(mechanism, "fast_noise", refuse)
    monkeypatch.setattr(mechanism, "secure_noise", refuse)


@each_width
@each_system
def test_without_budget_no_noise_is_drawn_and_nobody_answers(system, d, no_draw):
    ledger = Ledger.create(None, epsilon=1e-6, delta=1e-5)
    with pytest.raises((ProtocolError, BudgetExceeded)):
        perform(system, records(d), spec_for(system, d), ledger=ledger)
    assert ledger.rows() == []


def test_a_ledger_that_cannot_be_written_means_no_answer(tmp_path, no_draw):
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=2.0, delta=1e-5).close()
    with Ledger.open(path, read_only=True) as ledger:
        with pytest.raises((ProtocolError, LedgerError)):
            perform("FKM", records(2), spec_for("FKM", 2), ledger=ledger)
        assert ledger.rows() == []


def engine_of(model, spec, ledgers, d):
    """Clients that keep their own ledgers, as they would elsewhere."""
    members = {
        name: client_of(model._client_for(spec), d, ledger=ledger, name=name, epsilon=spec.epsilon)
        for name, ledger in ledgers.items()
    }
    return InProcessEngine({name: member.handle for name, member in members.items()})


def new_ledgers():
    return {name: Ledger.create(None, epsilon=2.0, delta=1e-5) for name in "abc"}


@each_width
def test_a_client_whose_budget_is_used_up_meanwhile_is_absent_and_the_others_go_on(d):
    spec, ledgers = spec_for("KFed", d), new_ledgers()
    model = clone(MODELS["KFed"]).set_params(privacy=spec, random_state=0)
    first, second = (engine_of(model, spec, ledgers, d) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.simplefilter("ignore", FederationWarning)
        # Somebody else asks only b, between the start of the run and its first request.
        only_b = InProcessEngine({"b": first._handlers["b"]})
        model.fit(only_b)
        before = ledgers["b"].totals("b")
        outcome = model.fit(second).result_
    assert [exchange.absent for exchange in outcome.history] == [("b",)]
    assert ledgers["b"].totals("b") == before
    assert set(outcome.anchors) == {"a", "c"}


def test_releases_of_a_reply_that_could_not_be_finished_stay_charged():
    """Four releases are behind a summary; another run has left room for two of them."""
    ledger = Ledger.create(None, epsilon=2.0, delta=1e-5)
    one, two = (
        client_of(synopsis.SynopsisClient, 4, ledger=ledger, epsilon=epsilon)
        for epsilon in (1.0, 2.0)
    )
    request = {"n_micro": 4, "n_rounds": 3}
    one.handle(synopsis.MICRO.request.encode({**request, "share": 1.0}, run="one", step=0))
    with pytest.raises(BudgetExceeded, match=r"spent mu=.* asked mu=.* limit mu=.* lifetime"):
        two.handle(synopsis.MICRO.request.encode({**request, "share": 1.0}, run="two", step=0))
    assert [row.charge.run for row in ledger.rows()] == ["one"] * 4 + ["two"] * 2
    assert ledger.limit.allows(*ledger.totals("a"))


@pytest.fixture
def spent(tmp_path):
    """A ledger file whose budget one run has used up."""
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=2.0, delta=1e-5).close()
    perform("KFed", records(2), spec_for("KFed", 2), ledger=path)
    return path


@each_system
def test_a_second_run_is_refused_with_what_was_spent_asked_and_allowed(system, spent, no_draw):
    with Ledger.open(spent) as ledger:
        before = ledger.anchor()
    with pytest.raises(BudgetExceeded, match="spent epsilon 2 of 2, and the run may spend 2,"):
        perform(system, records(2), spec_for(system, 2), ledger=str(spent))
    with Ledger.open(spent) as ledger:
        assert ledger.anchor() == before


def test_a_run_in_which_one_client_has_no_room_costs_nobody_anything(spent, no_draw):
    with Ledger.open(spent) as ledger:
        before = ledger.anchor()
    with pytest.raises(BudgetExceeded, match="a: the ledger has spent"):
        perform("FKM", {"new": records(2)["b"], **records(2)}, spec_for("FKM", 2), ledger=spent)
    with Ledger.open(spent) as ledger:
        assert ledger.anchor() == before


def test_the_budget_of_one_client_is_not_that_of_another(spent):
    outcome = perform("FKM", {"d": records(2)["a"]}, spec_for("FKM", 2), ledger=spent)
    assert outcome.spent["d"] == pytest.approx(2, abs=1e-3)


# A server that does not keep to the protocol.


def client_of(kind, d=2, n=50, *, ledger=None, name="a", **changed):
    spec = spec_for("", d, **changed)
    ledger = ledger or Ledger.create(None, epsilon=spec.epsilon, delta=spec.delta)
    rng = np.random.default_rng(7)
    return kind(rng.normal(size=(n, d)), spec, rng, Releases(name, spec, ledger, "fast"))


def origin(k=2, d=2, value=0.0):
    return np.full((k, d), value)


CELLS = {"centers": origin(), "radius": 1.0, "count_weight": 1.0, "square_weight": 0.0}
SUMS = {"centers": origin(), "radius": 1.0, "n_steps": 1}
MEANS = {**SUMS, "floor": 5.0, "enforced": "yes", "bound": "exact"}
HOSTILE = {
    "one centre": (cells.CELLS, {**CELLS, "centers": origin(1)}),
    "many centres": (cells.CELLS, {**CELLS, "centers": origin(3000)}),
    "far centres": (cells.CELLS, {**CELLS, "centers": origin(value=1e119)}),
    "tiny radius": (cells.CELLS, {**CELLS, "radius": 1e-9}),
    "huge radius": (cells.CELLS, {**CELLS, "radius": 1e9}),
    "far centres, tiny radius": (
        cells.CELLS,
        {**CELLS, "centers": origin(value=-1e119), "radius": 1e-9, "square_weight": 1.0},
    ),
    "light counts": (cells.CELLS, {**CELLS, "count_weight": 1e-3, "square_weight": 1.0}),
    "heavy counts": (cells.CELLS, {**CELLS, "count_weight": 1e3, "square_weight": 1.0}),
    "squares of hardly any weight": (cells.CELLS, {**CELLS, "square_weight": 5e-324}),
    "moments": (seeding.MOMENTS, {}),
    "one micro-cluster": (synopsis.MICRO, {"n_micro": 1, "n_rounds": 1}),
    "a hundred rounds": (synopsis.MICRO, {"n_micro": 3, "n_rounds": 100}),
    "sums of far components": (fedgem.SUMS, {**SUMS, "centers": origin(value=1e99)}),
    "sums of components beyond a reply": (fedgem.SUMS, {**SUMS, "centers": origin(value=1e119)}),
    "sums in a hundred steps": (fedgem.SUMS, {**SUMS, "n_steps": 100}),
    "sums, tiny radius": (fedgem.SUMS, {**SUMS, "radius": 1e-9}),
    "sums, huge radius": (fedgem.SUMS, {**SUMS, "radius": 1e9}),
    "means": (fedgem.MEANS, MEANS),
    "means, lowest floor": (fedgem.MEANS, {**MEANS, "floor": 1.0, "bound": "theorem9"}),
    "means, high floor": (fedgem.MEANS, {**MEANS, "floor": 2.0**15}),
    "means, higher floor": (fedgem.MEANS, {**MEANS, "floor": 1e9}),
    "means, floor below one": (fedgem.MEANS, {**MEANS, "floor": 0.5}),
    "sums, no radius": (fedgem.SUMS, {**SUMS, "radius": 0.0}),
    "sums, negative radius": (fedgem.SUMS, {**SUMS, "radius": -1.0}),
    "radius beyond its limit": (cells.CELLS, {**CELLS, "radius": 1e300}),
    "negative counts": (cells.CELLS, {**CELLS, "count_weight": -1.0}),
    "no counts": (cells.CELLS, {**CELLS, "count_weight": 0.0}),
    "squares of too much weight": (cells.CELLS, {**CELLS, "square_weight": 2.0}),
    "no cap": (quality.COST, {"centers": origin(1), "cap": 0.0}),
    "means, highest floor": (fedgem.MEANS, {**MEANS, "floor": 1e300, "bound": "theorem9"}),
    "means of far components": (fedgem.MEANS, {**MEANS, "centers": origin(value=-1e99)}),
    "means without a floor": (fedgem.MEANS, {**MEANS, "enforced": "no"}),
    "two bins": (ranges.HISTOGRAMS, {"edges": np.array([[-1.0, 0, 1]] * 2)}),
    "equal edges": (ranges.HISTOGRAMS, {"edges": np.zeros((2, 5))}),
    "edges out of order": (ranges.HISTOGRAMS, {"edges": np.array([[1e119, 0, -1e119]] * 2)}),
    "one edge": (ranges.HISTOGRAMS, {"edges": np.zeros((2, 1))}),
    "no edge": (ranges.HISTOGRAMS, {"edges": np.zeros((2, 0))}),
    "tiny cap": (quality.COST, {"centers": origin(1), "cap": 1e-30}),
    "huge cap": (quality.COST, {"centers": origin(1, value=1e119), "cap": 1e80}),
}
each_request = pytest.mark.parametrize(("stage", "fields"), HOSTILE.values(), ids=list(HOSTILE))


def class_for(stage: Stage) -> type[PrivateClient]:
    return next(kind for kind in CLIENT_CLASSES if stage.request.name in kind._stages)


def outcome_of(client, request):
    """What the server can tell: the length of the reply, or that there is none, and why."""
    try:
        return len(client.handle(request))
    except Exception as error:
        return error


@pytest.fixture
def fixed_noise(monkeypatch):
    def draw(sigma, size):
        drawn = np.random.default_rng(3).normal(0, sigma, size)
        return np.rint(np.clip(drawn, -(2.0**59), 2.0**59)).astype(np.int64)

    monkeypatch.setattr(mechanism, "fast_noise", draw)


def request_of(stage, fields, share=1.0, step=0):
    """A request as somebody would forge it who does not care for limits."""
    given = fields if stage is fedgem.LOCAL_SEED else {**fields, "share": share}
    lax = {
        name: Real() if isinstance(kind, Real) else kind
        for name, kind in stage.request.fields.items()
    }
    return Schema(stage.request.name, lax).encode(given, run="r", step=step)


@each_request
def test_no_request_tells_by_its_fate_whether_there_are_records(stage, fields, fixed_noise):
    fates = []
    for n in (0, 1, 2, 50):
        client = client_of(class_for(stage), n=n)
        fate = outcome_of(client, request_of(stage, fields))
        fates.append((repr(fate), len(client.releases.ledger.rows())))
    assert fates == fates[:1] * 4


@each_request
def test_every_refusal_is_typed(stage, fields, fixed_noise):
    for n in (0, 50):
        fate = outcome_of(client_of(class_for(stage), n=n), request_of(stage, fields))
        assert isinstance(fate, int | SecureFedClustError), repr(fate)


@pytest.mark.parametrize("share", [-1.0, 0.0, 5e-324, 1e-30, 1.0001, 1e300])
def test_a_share_that_makes_no_sense_is_refused_and_not_charged(share, no_draw):
    client = client_of(seeding.SeedingClient)
    with pytest.raises(SecureFedClustError):
        client.handle(request_of(cells.CELLS, CELLS, share))
    assert client.releases.ledger.rows() == []


@each_request
def test_asking_for_everything_thrice_gets_no_more_than_the_budget(stage, fields, fixed_noise):
    client = client_of(class_for(stage))
    ledger, limit = client.releases.ledger, client.releases.limit
    for step in range(3):
        outcome_of(client, request_of(stage, fields, step=step))
        assert limit.allows(*ledger.totals("a", "r"))


def test_a_greedy_server_gets_at_most_the_budget_by_any_sequence(fixed_noise):
    rng = np.random.default_rng(8)
    requests = [
        (stage, fields)
        for stage, fields in HOSTILE.values()
        if class_for(stage) is fedgem.PrivateFedGEMClient and len(fields.get("centers", ())) < 10
    ]
    answered = refused = 0
    for _ in range(20):
        ledger = Ledger.create(None, epsilon=2.0, delta=1e-5)
        # Another object does not know which stages were asked; the ledger does.
        same = [client_of(fedgem.PrivateFedGEMClient, ledger=ledger) for _ in range(4)]
        limit = same[0].releases.limit
        for step in range(20):
            stage, fields = requests[rng.integers(len(requests))]
            share = float(rng.choice([1.0, 0.5, 0.3, 0.1]))
            fate = outcome_of(same[step // 5], request_of(stage, fields, share, step))
            answered += isinstance(fate, int)
            refused += isinstance(fate, BudgetExceeded)
            assert limit.allows(*ledger.totals("a"))
    assert answered > 20 and refused > 20


def test_unproved_stages_are_refused_by_a_client_that_did_not_agree(no_draw):
    seeds = fedgem.LOCAL_SEED.request.encode({"n_components": 2}, run="r", step=0)
    for request, what in (
        (request_of(*HOSTILE["means without a floor"]), "means without a floor have no guarantee"),
        (seeds, "a stage that this client does not take part in"),
    ):
        client = client_of(fedgem.PrivateFedGEMClient)
        with pytest.raises(ProtocolError, match=what):
            client.handle(request)
        assert client.releases.ledger.rows() == []


@each_width
@each_system
def test_a_request_sent_again_gets_the_same_bytes_and_costs_nothing(system, d):
    heard, ledger = heard_once(system, d)
    before = ledger.anchor()
    for sent, got in heard:
        for name, request in sent.items():
            # Another object, as in a process that was started anew; its data have changed.
            kind = class_for(STAGES[read_envelope(request).schema][0])
            fresh = client_of(kind, d, 5, ledger=ledger, name=name)
            assert fresh.handle(request) == got[name]
            assert fresh.handle(request) == got[name]
    assert ledger.anchor() == before


@each_width
@each_system
def test_another_request_for_an_answered_step_is_refused(system, d, request):
    heard, ledger = heard_once(system, d)
    request.getfixturevalue("no_draw")
    before = ledger.anchor()
    for sent, _ in heard:
        envelope = read_envelope(sent["a"])
        stage = STAGES[envelope.schema][0]
        place = {"run": envelope.run, "step": envelope.step}
        fields, _ = stage.request.decode(sent["a"], **place, bounds={})
        fields["share"] /= 2
        fresh = client_of(class_for(stage), d, ledger=ledger)
        with pytest.raises(LedgerError, match="answered another request"):
            fresh.handle(stage.request.encode(fields, **place))
    assert ledger.anchor() == before


@pytest.mark.parametrize("system", ["FKM", "FedGEM sums"])
def test_a_client_started_anew_goes_on_with_a_run_that_has_begun(system):
    """With a ledger that holds just this run, as most will."""
    model = clone(MODELS[system])
    spec = spec_for(system, 2)
    ledgers = new_ledgers()

    class Restarted:
        """Every client is another object at every request."""

        clients = tuple(ledgers)

        def exchange(self, requests):
            return engine_of(model, spec, ledgers, 2).exchange(requests)

    model.set_params(privacy=spec, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FederationWarning)
        warnings.simplefilter("ignore", PrivacyWarning)
        model.fit(Restarted())
    assert not any(exchange.absent for exchange in model.result_.history)


ANOTHER_PROCESS = """
import sys, numpy as np
from secure_fedclust import Ledger, PrivacySpec
from secure_fedclust.privacy.release import Releases
from secure_fedclust.protocols.synopsis import SynopsisClient

spec = PrivacySpec(epsilon=2.0, delta=1e-5, ranges=[(-4, 4)] * 4)
with Ledger.open(sys.argv[1]) as ledger:
    client = SynopsisClient(
        np.zeros((3, 4)), spec, np.random.default_rng(), Releases("a", spec, ledger)
    )
    sys.stdout.buffer.write(client.handle(sys.stdin.buffer.read()))
"""


def test_another_process_sends_what_was_sent_before(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=2.0, delta=1e-5).close()
    _, heard = listen("KFed", records(4), spec_for("KFed", 4), ledger=path)
    [(sent, got)] = heard
    with Ledger.open(path) as ledger:
        before = ledger.anchor()
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", ANOTHER_PROCESS, path],
        input=sent["a"],
        capture_output=True,
        check=True,
    )
    assert done.stdout == got["a"]
    with Ledger.open(path) as ledger:
        assert ledger.anchor() == before


# Noise.


def test_noise_is_independent_over_clients_rounds_and_fields(monkeypatch):
    """Without records replies are nothing but noise, in every one of the empty clusters."""
    monkeypatch.setitem(MODELS, "noise", FKM(400, seeding="public", n_rounds=3, n_init=1))
    empty = {name: np.zeros((0, 2)) for name in "abc"}
    _, heard = listen("noise", empty, spec_for("", 2), sampler="secure")
    drawn = []
    for _, _, reply in heard.replies():
        for field in (reply["counts"], *reply["sums"].T):
            assert (field != 0).all()
            drawn.append(field / reply["sigma"])
    assert len(drawn) == 3 * 3 * 3
    correlations = np.corrcoef(drawn)
    np.fill_diagonal(correlations, 0)
    assert np.abs(correlations).max() < 6 / math.sqrt(400)
    # Nor does noise repeat at another place, which correlations would not show.
    assert len(np.unique(np.concatenate([np.round(x, 12) for x in drawn]))) > 0.999 * 27 * 400
    pooled = np.concatenate(drawn)
    assert abs(pooled.mean()) < 6 / math.sqrt(len(pooled))
    assert abs(np.square(pooled).mean() - 1) < 6 * math.sqrt(2 / len(pooled))


@each_width
@each_system
def test_two_runs_on_equal_data_share_no_noise(system, d):
    _, second = listen(system, records(d), spec_for(system, d))
    replies = zip(heard_once(system, d)[0].replies(), second.replies(), strict=True)
    for (_, stage, one), (_, _, two) in replies:
        for field in NOISY[stage.name] - {"squares"}:
            assert (one[field] != two[field]).mean() > 0.9


# A client that lies.


class Liar:
    """Answers like an honest client, then changes what it says of its grid or of its numbers."""

    def __init__(self, client, **lies):
        self.client = client
        self.lies = lies

    def handle(self, data):
        envelope = read_envelope(data)
        stage = self.client._stages[envelope.schema][0]
        place = {"run": envelope.run, "step": envelope.step}
        values, _ = stage.reply.decode(self.client.handle(data), **place, bounds={})
        for name, value in self.lies.items():
            for field in NOISY[stage.name] if name == "noisy" else {name} & set(values):
                lie = np.full_like(values[field], value) if name == "noisy" else value
                values[field] = lie
        return stage.reply.encode(values, **place)


LIES = {
    "coarsest grid": {"exponent": 300},
    "finest grid": {"exponent": -300},
    "no noise": {"sigma": 0.0},
    "largest noise": {"sigma": 2.0**61},
    "largest numbers": {"noisy": 2**61},
    "smallest numbers": {"noisy": -(2**61)},
    "largest numbers, coarsest grid": {"noisy": 2**61, "exponent": 300},
    "smallest radius": {"radius": 0.0},
    "largest radius": {"radius": 1e300},
}


@each_width
@pytest.mark.parametrize("lies", LIES.values(), ids=list(LIES))
def test_a_lying_client_neither_crashes_a_private_run_nor_makes_it_infinite(lies, d):
    for system in ("FKM", "KFed", "FedGEM sums", "FedGEM floor"):
        spec = spec_for(system, d)
        model = clone(MODELS[system]).set_params(privacy=spec, random_state=0)
        members = {name: client_of(model._client_for(spec), d, name=name) for name in "abc"}
        handlers = {name: member.handle for name, member in members.items()}
        handlers["c"] = Liar(members["c"], **lies).handle
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)
            warnings.simplefilter("ignore", FederationWarning)
            model.fit(InProcessEngine(handlers))
        assert np.isfinite(model.cluster_centers_).all()


def test_replayed_noise_would_be_noticed(monkeypatch, fixed_names):
    """The first test of this file can fail: here a client sends a float of its own."""
    spec = spec_for("KFed", 4)
    released = []
    original = release.noise
    monkeypatch.setattr(
        release, "noise", lambda *given: released.append(original(*given)) or released[-1]
    )
    honest = synopsis.SynopsisClient.reply

    def leaky(self, noisy: Noisy, **more):
        return honest(self, noisy, **more | {"radius": more["radius"] + 1e-9 * len(self.X)})

    monkeypatch.setattr(synopsis.SynopsisClient, "reply", leaky)
    _, heard = listen("KFed", records(4), spec)
    again = iter(released)
    monkeypatch.setattr(release, "noise", lambda *given: next(again))
    _, overheard = listen("KFed", records(4, 61), spec)
    assert overheard != heard
