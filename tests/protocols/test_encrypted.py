"""Whole runs whose sums are encrypted: what is seen, what is charged, and what goes wrong."""

import json
import math
import subprocess
import sys
import warnings
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from sklearn.base import clone

import secure_fedclust.run
from secure_fedclust import (
    FKM,
    GOLD,
    AggregationAborted,
    FeCA,
    FedClustResult,
    FederationWarning,
    FedGEM,
    KFed,
    Ledger,
    LedgerError,
    ParameterError,
    PrivacySpec,
    PrivacyWarning,
    ProtocolError,
    load_model,
    noisy_nicv,
    private_ranges,
    release_synopsis,
)
from secure_fedclust.cli import main
from secure_fedclust.engines import Fault, InProcessEngine
from secure_fedclust.messages import KEY_HOLDER, read_envelope
from secure_fedclust.privacy import mechanism
from secure_fedclust.privacy.accounting import Limit, epsilon_of
from secure_fedclust.privacy.ckks_parameters import PRESETS
from secure_fedclust.privacy.ckks_round import CkksClient, KeyHolding
from secure_fedclust.privacy.ckks_stages import ENCRYPT, KEY, TAKE, asked_text
from secure_fedclust.privacy.cohort import Rules
from secure_fedclust.privacy.grid import SumGrid
from secure_fedclust.privacy.identity import Identity
from secure_fedclust.privacy.queries import CellSums
from secure_fedclust.privacy.release import Releases, exact_sum
from secure_fedclust.privacy.secure_sum import PlainSum, PlainSummand
from secure_fedclust.protocols import sums
from secure_fedclust.protocols.cells import CELLS, _request
from secure_fedclust.protocols.key_holder import KeyHolderParty
from secure_fedclust.protocols.seeding import SeedingClient
from secure_fedclust.protocols.session import Session
from secure_fedclust.protocols.synopsis import SynopsisClient

N_CLIENTS = 5
UNLIKELY = 1e-7
SMALL, LARGE = PRESETS
SUMS_ONLY = {"FKM": FKM(3), "FKM public": FKM(3, seeding="public")}
ALIGNED = {
    "FKM one_shot": FKM(3, one_shot=True),
    "KFed": KFed(3),
    "FeCA": FeCA(3, n_init=2),
    "GOLD": GOLD(3),
    "FedGEM synopsis": FedGEM(3, n_local_steps=2),
    "FedGEM sums": FedGEM(3, calibration="sums"),
    "FedGEM floor": FedGEM(3, calibration="floor"),
}
MODELS = SUMS_ONLY | ALIGNED

each_model = pytest.mark.parametrize("name", MODELS)


def spec_of(d, **changed):
    values = {
        "epsilon": 2.0,
        "delta": 1e-5,
        "ranges": [(-4, 4)] * d,
        "public_size": 40,
        "protection": "ckks",
        "min_survivors": 4,
    }
    return PrivacySpec(**values | changed)


def records(d, n=40, seed=0, n_clients=N_CLIENTS):
    spread = np.random.default_rng(100).uniform(-3, 3, (3, d))
    rng = np.random.default_rng(seed)
    return {f"c{i}": rng.normal(spread[np.arange(n) % 3], 0.3) for i in range(n_clients)}


def fit(model, clients, spec, *, faults=(), sampler="fast", ledger=None, engine=InProcessEngine):
    """Fit where something goes wrong."""
    model = clone(model).set_params(privacy=spec, sampler=sampler, random_state=0, ledger=ledger)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        warnings.simplefilter("ignore", FederationWarning)
        with mock.patch.object(secure_fedclust.run, "InProcessEngine", engine):
            return model.fit(clients, faults=faults)


def fit_plainly(model, clients, spec):
    """The same run, whose sums are not hidden at all."""

    def ends_for(spec, names):
        return sums.Ends(PlainSum(), {name: PlainSummand(len(names)) for name in names})

    with mock.patch.object(secure_fedclust.run, "ends_for", ends_for):
        return fit(model, clients, spec)


@pytest.fixture
def no_noise(monkeypatch):
    monkeypatch.setattr(mechanism, "fast_noise", lambda sigma, size: np.zeros(size, np.int64))


def presets_of(result):
    """Of the vectors that clients have sent, by their sizes."""
    sizes = [
        size for e in result.history if e.stage == ENCRYPT.name for size in e.up.values() if size
    ]
    assert sizes
    found = set()
    for size in sizes:
        [preset] = [p for p in PRESETS if p.ciphertext_bytes[0] < size < p.ciphertext_bytes[1]]
        found.add(preset)
    return found


def in_all_ways(model, clients, spec):
    """Centres with sums encrypted, under masks and in the clear, which are one and the same."""
    encrypted = fit(model, clients, spec)
    masked = fit(model, clients, PrivacySpec(**spec.to_dict() | {"protection": "masking"}))
    plain = fit_plainly(model, clients, spec)
    np.testing.assert_array_equal(encrypted.cluster_centers_, masked.cluster_centers_)
    np.testing.assert_array_equal(encrypted.cluster_centers_, plain.cluster_centers_)
    stages = [{e.stage for e in each.result_.history} for each in (encrypted, masked, plain)]
    assert {"ckks/key", "ckks/take", "ckks/encrypt", "ckks/open"} <= stages[0]
    assert "masking/mask" in stages[1] and "sum/plain" in stages[2]
    assert not any(name.startswith("ckks/") for name in stages[1] | stages[2])
    return encrypted.result_


# Sums are those of the other paths, to the bit.


@each_model
@pytest.mark.parametrize(("d", "size"), [(1, None), (2, 40), (5, None)])
def test_encrypted_masked_and_plain_sums_give_the_same_centres(name, d, size, no_noise):
    if name == "FedGEM floor":
        size = 40  # which it needs
    result = in_all_ways(MODELS[name], records(d), spec_of(d, public_size=size))
    assert presets_of(result) == {LARGE if size is None else SMALL}


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("size", [40, None])
def test_so_they_do_whatever_is_protected(d, unit, adjacency, size, no_noise):
    spec = spec_of(d, unit=unit, adjacency=adjacency, public_size=size)
    result = in_all_ways(FKM(2, seeding="public", n_rounds=1), records(d), spec)
    # A client that counts for one needs no room for many records.
    assert presets_of(result) == {LARGE if size is None and unit == "record" else SMALL}


@st.composite
def cohorts(draw):
    n = draw(st.integers(3, 7))
    colluders = draw(st.integers(0, n - 2))
    least = draw(st.integers(max(colluders + 1, 2), n))
    return n, colluders, least


@settings(max_examples=10)
@given(
    cohorts(),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([0.01, 1.0, 100.0]),
    st.sampled_from([None, 1, 30]),
    st.lists(st.integers(0, 25), min_size=7, max_size=7),
)
def test_so_they_do_for_cohorts_of_any_shape(cohort, d, k, epsilon, size, counts):
    n, colluders, least = cohort
    rng = np.random.default_rng(0)
    clients = {f"c{i}": rng.uniform(-5, 5, (counts[i], d)) for i in range(n)}
    spec = spec_of(
        d, epsilon=epsilon, public_size=size, colluders=colluders, min_survivors=least, delta=1e-6
    )
    with mock.patch.object(mechanism, "fast_noise", lambda s, n: np.zeros(n, np.int64)):
        in_all_ways(FKM(k, seeding="public", n_rounds=1), clients, spec)


# Sums over those that are left.

NAMES = [f"site {i}" for i in range(6)]
QUERY = CellSums(np.random.default_rng(7).uniform(-1, 1, (200, 2)), 1.0, 0.7)
SHARE = 0.1


class Federation:
    """A session over real clients; `parts` are the noise that each has drawn, in order."""

    def __init__(self, spec, *, faults=(), X=None, sampler="fast", engine=InProcessEngine):
        self.spec = spec
        self.ledger = Ledger.create(None, epsilon=10.0, delta=1e-5)
        ends = sums.ends_for(spec, NAMES)
        rng = np.random.default_rng(0)
        self.members = {
            name: SeedingClient(
                rng.uniform(-1, 1, (30, 2)) if X is None else X,
                spec,
                np.random.default_rng(0),
                Releases(name, spec, self.ledger, sampler),
                ends.clients[name],
            )
            for name in NAMES
        }
        handlers = {name: client.handle for name, client in self.members.items()}
        self.engine = engine(handlers, others=ends.others, faults=faults)
        self.session = Session(self.engine, spec, 2, ends.server)

    def ask(self):
        sizes = {"k": 200, "d": 2, "q": 0}
        [found] = self.session.ask_sum(
            CELLS, QUERY, SHARE, sizes, lambda noisy: noisy, **_request(QUERY)
        ).parts
        return found

    @property
    def grid(self):
        limit = Limit.of(*self.spec.target())
        return SumGrid.of(QUERY, self.spec, limit, SHARE, len(NAMES))

    def exact(self, names):
        found = [exact_sum(QUERY, self.members[n].X, self.spec, self.grid).fields for n in names]
        return {field: sum(each[field] for each in found) for field in found[0]}

    def check(self, found, survivors):
        assert self.session.sums[-1].survivors == tuple(survivors)
        for field, exact in self.exact(survivors).items():
            np.testing.assert_array_equal(found.fields[field], exact)


def session_spec(**changed):
    return spec_of(2, ranges=[(-1, 1)] * 2, public_size=30, **changed)


@pytest.mark.parametrize("kind", ["drop", "corrupt", "truncate"])
@pytest.mark.parametrize("at", [1, 2], ids=["take", "encrypt"])
@pytest.mark.filterwarnings("ignore::secure_fedclust.FederationWarning")
def test_whoever_fails_at_a_stage_is_left_out_of_the_sum_and_is_in_the_next(at, kind, no_noise):
    f = Federation(session_spec(), faults=[Fault(NAMES[i], at, kind) for i in (1, 4)])
    gone = {NAMES[1], NAMES[4]}
    f.check(f.ask(), [name for name in NAMES if name not in gone])
    failed = f.session.history[at]
    assert gone <= set(failed.absent) | set(failed.rejected)
    assert len(f.ledger.rows()) == (4 if at == 1 else 6)
    f.check(f.ask(), NAMES)
    stages = [e.stage.removeprefix("ckks/") for e in f.session.history]
    # Whoever did not encrypt may have lost the key.
    assert stages == ["key", "take", "encrypt", "open", "take", "encrypt", "open"]
    f.ledger.verify()


@pytest.mark.filterwarnings("ignore::secure_fedclust.FederationWarning")
def test_some_may_fail_at_one_stage_and_others_at_another(no_noise):
    faults = [Fault(NAMES[0], 1, "drop"), Fault(NAMES[5], 2, "corrupt")]
    f = Federation(session_spec(), faults=faults)
    f.check(f.ask(), NAMES[1:5])


def test_a_late_reply_is_set_aside_and_the_client_takes_part_in_a_later_sum(no_noise):
    model = fit(FKM(3, n_rounds=4), records(2), spec_of(2), faults=[Fault("c1", 2, "delay")])
    # What is late takes the place of the next reply, and is none to that question.
    there = ["c1" in each.survivors for each in model.result_.sums]
    assert there[:2] == [False, False] and all(there[2:]) and len(there) > 2
    assert "at most 928 were expected" in model.result_.history[4].rejected["c1"]


ABORTS = {
    "ckks/take": (r"3 clients have taken the key, of at least 4 .* missing: c0, c3", 0),
    "ckks/encrypt": (r"3 clients have sent a vector, of at least 4 .* missing: c0, c3", 5),
    "ckks/key": (r"the key holder has sent no key", 0),
    "ckks/open": (r"the key holder has not opened the sum: .* stays charged", 5),
}


@pytest.mark.parametrize("name", ["FKM", "KFed", "FedGEM synopsis"])
@pytest.mark.parametrize("stage", ABORTS)
def test_one_dropout_too_many_aborts_the_run_and_the_charge_stands(name, stage):
    ledger = Ledger.create(None, epsilon=9.0, delta=1e-5)
    match, charged = ABORTS[stage]
    seen = []

    class Quitting(InProcessEngine):
        def exchange(self, requests):
            replies = dict(super().exchange(requests))
            seen.append(read_envelope(next(iter(requests.values()))).schema)
            if seen[-1] == f"{stage}/request":
                for gone in ("c0", "c3", KEY_HOLDER):
                    replies.pop(gone, None)
            return replies.items()

    spec = spec_of(2, epsilon=1.0)
    with pytest.raises(AggregationAborted, match=match):
        fit(MODELS[name], records(2), spec, engine=Quitting, ledger=ledger)
    assert seen[-1] == f"{stage}/request"
    assert ("ckks/open/request" in seen) == (stage == "ckks/open")
    summed = [row for row in ledger.rows() if row.charge.message.endswith("in a sum")]
    assert len(summed) == charged
    before = ledger.totals("c1").mu
    model = fit(MODELS[name], records(2), spec, ledger=ledger)
    assert model.result_.sums[-1].survivors == tuple(records(2))
    assert ledger.totals("c1").mu ** 2 == pytest.approx(before**2 + Limit.of(1.0, 1e-5).mu ** 2)


@pytest.mark.parametrize("kind", ["drop", "delay", "corrupt", "truncate"])
@pytest.mark.parametrize("exchange", [0, 3, 5])
def test_a_key_holder_that_fails_stops_the_run(exchange, kind):
    with pytest.raises(AggregationAborted, match="the key holder has"):
        fit(FKM(3), records(2), spec_of(2), faults=[Fault(KEY_HOLDER, exchange, kind)])


def test_who_it_was_that_failed_is_in_the_history():
    model = fit(FKM(3), records(2), spec_of(2), faults=[Fault("c1", 2, "corrupt")])
    exchange = model.result_.history[2]
    assert exchange.stage == "ckks/encrypt" and "checksum" in exchange.rejected["c1"]
    assert [len(opened.survivors) for opened in model.result_.sums] == [4, 5]


def test_a_client_that_holds_another_spec_has_no_part_in_a_sum_and_draws_no_noise():
    given = sums.ends_for

    def differing(spec, names):
        ends = given(spec, names)
        client = ends.clients["c2"]
        other = Rules(4, 1, spec_of(2, delta=2e-5).agreement())
        ends.clients["c2"] = CkksClient(other, client._identity, client._key_holders)
        return ends

    with mock.patch.object(secure_fedclust.run, "ends_for", differing):
        model = fit(FKM(3), records(2), spec_of(2))
    assert {opened.survivors for opened in model.result_.sums} == {("c0", "c1", "c3", "c4")}
    assert not model.ledger_.rows("c2") and model.ledger_.rows("c1")


class Repeating(InProcessEngine):
    """c1 sends what c0 has sent last."""

    kept = ()

    def exchange(self, requests):
        envelope = read_envelope(next(iter(requests.values())))
        place = {"run": envelope.run, "step": envelope.step}
        for name, data in super().exchange(requests):
            for stage in (TAKE, ENCRYPT):
                if envelope.schema == stage.request.name and name in ("c0", "c1"):
                    fields, _ = stage.reply.decode(data, **place, bounds={})
                    self.kept = {**dict(self.kept), (stage.name, name): fields}
                    data = stage.reply.encode(self.kept[stage.name, "c0"], **place)
            yield name, data


def test_in_a_simulation_the_server_knows_who_its_clients_are():
    """A client that repeats what another has sent is left out, and nobody counts twice."""
    model = fit(FKM(3), records(2), spec_of(2), engine=Repeating)
    assert {opened.survivors for opened in model.result_.sums} == {("c0", "c2", "c3", "c4")}
    reason = model.result_.history[1].rejected["c1"]
    assert reason == "c1: its answer is not signed by the client of that name"


def test_in_a_simulation_a_client_of_another_identity_is_a_stranger():
    given = sums.ends_for

    def differing(spec, names):
        ends = given(spec, names)
        client = ends.clients["c2"]
        ends.clients["c2"] = CkksClient(client.rules, Identity(), client._key_holders)
        return ends

    with mock.patch.object(secure_fedclust.run, "ends_for", differing):
        model = fit(FKM(3), records(2), spec_of(2))
    assert {opened.survivors for opened in model.result_.sums} == {("c0", "c1", "c3", "c4")}
    assert "is not signed by the client" in model.result_.history[1].rejected["c2"]


def test_in_a_simulation_the_key_holder_knows_who_its_server_is():
    spec = spec_of(2)
    ends = sums.ends_for(spec, ["c0", "c1", "c2", "c3", "c4"])
    stranger, channel = Identity(), bytes(32)
    request = {
        "preset": 0,
        "channel": channel,
        "identity": stranger.public,
        "signature": stranger.sign(asked_text("run", 0, channel)),
    }
    with pytest.raises(ProtocolError, match="not the one that this key holder opens sums for"):
        ends.others[KEY_HOLDER](KEY.request.encode(request, run="run", step=0))


# Resending.


def test_a_request_again_gets_the_same_bytes_and_no_new_noise():
    seen, drawn = [], []

    class Twice(InProcessEngine):
        def exchange(self, requests):
            first = list(super().exchange(requests))
            number = len(drawn)
            self._exchanges -= 1
            seen.append(first == list(super().exchange(requests)))
            assert len(drawn) == number
            return first

    real = mechanism.fast_noise
    with mock.patch.object(mechanism, "fast_noise", lambda s, n: drawn.append(n) or real(s, n)):
        model = fit(FKM(3), records(2), spec_of(2), engine=Twice)
    assert len(seen) == len(model.result_.history) == 6 and all(seen)
    assert len(drawn) == len(model.ledger_.rows()) == 2 * N_CLIENTS


def test_another_request_at_the_same_step_is_not_answered():
    """E.g. the same round with another question: the noise would be another, the charge not."""
    refused = []

    class Asking(InProcessEngine):
        def exchange(self, requests):
            replies = list(super().exchange(requests))
            data = next(iter(requests.values()))
            envelope = read_envelope(data)
            place = {"run": envelope.run, "step": envelope.step}
            if envelope.schema == ENCRYPT.request.name:
                fields, _ = ENCRYPT.request.decode(data, **place, bounds={})
                other = {**fields, "n_clients": fields["n_clients"] + 1}
                for name in requests:
                    with pytest.raises((LedgerError, ProtocolError), match="answered"):
                        self._handlers[name](ENCRYPT.request.encode(other, **place))
                    refused.append(name)
            return replies

    model = fit(FKM(3), records(2), spec_of(2), engine=Asking)
    assert len(refused) == len(model.ledger_.rows()) == 2 * N_CLIENTS


# Noise.


@pytest.mark.parametrize(("least", "colluders"), [(4, 1), (5, 0), (6, 3)])
@pytest.mark.filterwarnings("ignore::secure_fedclust.FederationWarning")
def test_the_fewest_survivors_less_the_colluders_carry_the_claimed_noise(least, colluders):
    """Nobody has records, so that what is opened is noise; that of the colluders is known."""
    parts = []
    real = mechanism.fast_noise

    def noise(sigma, size):
        parts.append(real(sigma, size))
        return parts[-1]

    spec = session_spec(min_survivors=least, colluders=colluders)
    faults = [Fault(name, 2, "drop") for name in NAMES[least:]]
    f = Federation(spec, faults=faults, X=np.zeros((0, 2)))
    with mock.patch.object(mechanism, "fast_noise", noise):
        found = f.ask()
    assert f.session.sums[-1].survivors == tuple(NAMES[:least])
    opened = np.concatenate([np.ravel(found.fields[field]) for field in f.exact(NAMES)])
    known = sum(parts[:colluders], np.zeros(len(opened)))
    left = (opened - known) / f.grid.sigma
    assert chi2.ppf(UNLIKELY, len(left)) <= np.square(left).sum() <= chi2.isf(UNLIKELY, len(left))
    # What the ledger says of it is that noise, in steps.
    assert [row.charge.sigma for row in f.ledger.rows()] == pytest.approx([f.grid.sigma] * 6)
    promised = QUERY.sensitivity("add_remove").value / (f.session.limit.mu * math.sqrt(SHARE))
    assert f.grid.sigma * 2.0**f.grid.exponent >= promised * (1 - 1e-3)


def ask_of_a_cohort(n_clients):
    """Have a server say that there are so many clients; what came of it, and the noise drawn."""
    drawn = []

    class Lying(InProcessEngine):
        def exchange(self, requests):
            data = next(iter(requests.values()))
            envelope = read_envelope(data)
            if envelope.schema == ENCRYPT.request.name:
                place = {"run": envelope.run, "step": envelope.step}
                fields, _ = ENCRYPT.request.decode(data, **place, bounds={})
                said = ENCRYPT.request.encode({**fields, "n_clients": n_clients}, **place)
                requests = dict.fromkeys(requests, said)
            return super().exchange(requests)

    def noise(sigma, size):
        drawn.append(sigma)
        return np.zeros(size, dtype=np.int64)

    f = Federation(session_spec(), engine=Lying)
    with mock.patch.object(mechanism, "fast_noise", noise), warnings.catch_warnings():
        warnings.simplefilter("ignore", FederationWarning)
        if n_clients == len(NAMES):
            f.ask()
        else:
            with pytest.raises(AggregationAborted, match="0 clients have sent a vector"):
                f.ask()
    return f, drawn


@pytest.mark.parametrize("n_clients", [4, 5, 6])
def test_a_client_finds_its_noise_from_its_own_spec_whatever_the_server_sends(n_clients):
    """The size of the cohort is all that a server says, and it changes the grid only."""
    f, drawn = ask_of_a_cohort(n_clients)
    if n_clients != len(NAMES):
        # What was encrypted for another cohort is in no sum.
        assert all("number of clients" in r for r in f.session.history[2].rejected.values())
    limit = Limit.of(*f.spec.target())
    grid = SumGrid.of(QUERY, f.spec, limit, SHARE, n_clients)
    wanted = QUERY.sensitivity("add_remove").value / (limit.mu * math.sqrt(SHARE * 3))
    assert len(drawn) == len(NAMES)
    assert [math.ldexp(sigma, grid.exponent) for sigma in drawn] == pytest.approx(
        [wanted] * len(NAMES), rel=2e-3
    )
    for row in f.ledger.rows():
        assert row.charge.sigma == pytest.approx(math.sqrt(3) * drawn[0])
        assert row.charge.mu == pytest.approx(limit.mu * math.sqrt(SHARE))


@pytest.mark.parametrize("n_clients", [7, 100, 4096])
def test_a_cohort_of_more_than_were_asked_is_refused_before_anything_is_charged(n_clients):
    f, drawn = ask_of_a_cohort(n_clients)
    assert drawn == []
    assert list(f.ledger.rows()) == []


def test_the_charge_comes_before_the_noise_and_stands_when_there_is_none():
    f = Federation(session_spec())
    fails = mock.Mock(side_effect=ProtocolError("no randomness"))
    with (
        mock.patch.object(mechanism, "fast_noise", fails),
        pytest.raises(AggregationAborted, match="0 clients have sent a vector"),
    ):
        f.ask()
    assert [row.charge.client for row in f.ledger.rows()] == NAMES == NAMES[: fails.call_count]


# What is seen.


@each_model
def test_the_server_sees_ciphertexts_and_sums_and_the_key_holder_sums_alone(name):
    result = fit(MODELS[name], records(2), spec_of(2)).result_
    view, other = result.server_view(), result.key_holder_view()
    stages = {"ckks/key": "key", "ckks/take": "key", "ckks/encrypt": "encrypted"}
    forms = {sight.stage: sight.form for sight in view.saw}
    assert {stage: forms.pop(stage) for stage in stages} == stages
    assert forms.pop("ckks/open") == "opened"
    assert (forms == {}) == (name in SUMS_ONLY) and set(forms.values()) <= {"noisy"}
    assert view.sums == result.sums and other.sums == ()
    assert {(s.stage, s.form, *s.senders) for s in other.saw} == {
        ("ckks/key", "key", "server"),
        ("ckks/open", "opened", "server"),
    }
    assert [s.messages for s in other.saw] == [1, len(result.sums)]
    assert "the noisy sum over 5 of 5 clients" in str(view)
    assert "ckks/encrypt" not in str(other) and "seen by the key holder" in str(other)
    for sight in view.saw:
        wanted = {KEY_HOLDER} if sight.stage in ("ckks/key", "ckks/open") else set(records(2))
        assert sight.senders == wanted


def test_without_a_key_holder_nobody_sees_what_one_would():
    assert (
        fit(FKM(3), records(2), spec_of(2, protection="masking")).result_.key_holder_view() is None
    )


def test_no_message_of_a_run_has_a_clients_numbers_in_it():
    sent, parts = [], []

    class Listening(InProcessEngine):
        def exchange(self, requests):
            sent.extend(requests.values())
            for name, data in super().exchange(requests):
                sent.append(data)
                yield name, data

    contribute = Releases.contribute

    def watched(*given, **named):
        found = contribute(*given, **named)
        parts.append(np.concatenate([np.ravel(field) for field in found.fields.values()]))
        return found

    with mock.patch.object(Releases, "contribute", watched):
        model = fit(FKM(3), records(2), spec_of(2), engine=Listening)
    numbers = sorted({int(n) for part in parts for n in part if abs(n) > 1 << 20})
    assert len(numbers) > 50 and len(parts) == 2 * N_CLIENTS
    everything = b"".join(sent)
    for number in numbers[:: len(numbers) // 50]:
        for kind in ("<i8", ">i8", "<f8", ">f8"):
            assert np.array(number, dtype=kind).tobytes() not in everything
    # The control: sums over clients are there.
    total = sum(parts[:N_CLIENTS])
    assert sum(total[:1].astype("<i8").tobytes() in data for data in sent) == 1
    assert len(model.result_.sums) == 2


@pytest.mark.parametrize(("name", "exchange"), [("FKM", 2), ("FedGEM synopsis", 3)])
def test_sums_costs_views_and_bytes_survive_saving(name, exchange, tmp_path):
    model = fit(MODELS[name], records(2), spec_of(2), faults=[Fault("c1", exchange, "drop")])
    result = model.result_
    result.save(tmp_path / "result.json")
    loaded = FedClustResult.load(tmp_path / "result.json")
    assert loaded.sums == result.sums and loaded.costs == result.costs
    assert loaded.fallback == result.fallback and loaded.guarantee == result.guarantee
    assert loaded.transcript() == result.transcript()
    assert str(loaded.server_view()) == str(result.server_view())
    assert loaded.key_holder_view() == result.key_holder_view()
    model.save(tmp_path / "model.json")
    again = load_model(tmp_path / "model.json")
    assert again.result_.sums == result.sums
    np.testing.assert_array_equal(again.cluster_centers_, model.cluster_centers_)
    rows = {(row["stage"], row["client"]): row for row in result.transcript()}
    assert (rows["ckks/key", KEY_HOLDER]["requests"], rows["ckks/take", "c1"]["requests"]) == (1, 2)
    total = sum(row["bytes up"] for row in rows.values())
    assert total == sum(exchange.bytes_up for exchange in result.history)
    sums_ = len(result.sums)
    assert rows["ckks/open", KEY_HOLDER]["replies"] == sums_
    assert result.bytes_per_stage()["ckks/encrypt"][1] > 60_000 * (N_CLIENTS * sums_ - 1)
    assert KEY_HOLDER not in model.client_names_ and KEY_HOLDER not in result.spent
    assert KEY_HOLDER not in result.anchors


def test_progress_counts_what_clients_answer_and_not_the_key_holder():
    calls = []
    model = FKM(3, privacy=spec_of(2), sampler="fast", random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        model.fit(records(2), on_progress=lambda *given: calls.append(given))
    asked = [set(e.asked) for e in model.result_.history if KEY_HOLDER not in e.asked]
    assert len(calls) == sum(map(len, asked)) == 3 * N_CLIENTS
    assert all(done <= expected for done, expected in calls)
    assert [done for done, _ in calls] == list(range(1, len(calls) + 1))


# What may be claimed.


@each_model
def test_costs_of_both_kinds_add_up_to_the_budget_and_are_in_the_ledger(name):
    model = fit(MODELS[name], records(2), spec_of(2))
    limit, costs = Limit.of(2.0, 1e-5), model.result_.costs
    assert math.hypot(*costs.values()) == pytest.approx(limit.mu)
    assert (costs["local"] == 0) == (name in SUMS_ONLY)
    assert model.ledger_.quorums() == {(4, 1, False, True)}
    for client in model.client_names_:
        rows = [row.charge for row in model.ledger_.rows(client)]
        summed = [row for row in rows if row.message.endswith(" in a sum")]
        assert math.fsum(row.mu**2 for row in summed) == pytest.approx(costs["sums"] ** 2)
        assert math.fsum(row.mu**2 for row in rows) == pytest.approx(limit.mu**2)
        for row in summed:
            assert row.inputs["key_holder"] == 1 and row.inputs["active_server"] == 0
            assert (row.inputs["min_survivors"], row.inputs["colluders"]) == (4, 1)
        assert not any("key_holder" in row.inputs for row in rows if row not in summed)
    alone = math.hypot(costs["local"], math.sqrt(3) * costs["sums"])
    assert f"epsilon={epsilon_of(1e-5, alone):.2f}" in model.result_.fallback


def test_the_guarantee_and_what_is_left_of_it_name_server_and_key_holder():
    model = fit(FKM(3), records(2), spec_of(2), sampler="secure")
    who = (
        "against the server or the key holder, which keep to the protocol and do not work "
        "together, with up to one client on their side, who keep to it, too (as to the key holder, "
        "this is argued and not proved), if every sum is over 4 clients or more"
    )
    assert who in model.guarantee_ and "NO DP CLAIM" not in model.guarantee_
    left = model.result_.fallback
    assert left.startswith("assumed: in every sum there is the noise of 3 or more clients")
    assert "not on the server's or the key holder's side" in left
    assert "how many there are is the server's word" in left
    assert "these two do not work together" in left
    assert "NO DP CLAIM" in fit(FKM(3), records(2), spec_of(2)).guarantee_


def test_a_plan_says_the_same():
    spec = spec_of(2)
    for model in (FKM(3), KFed(3)):
        plan = spec.plan(model, n_clients=N_CLIENTS, n_features=2)
        fitted = fit(model, records(2), spec, sampler="secure")
        assert plan.fallback == fitted.result_.fallback and plan.fallback in str(plan)
        assert fitted.guarantee_.startswith(plan.guarantee)


def test_all_runs_together_claim_no_more_than_the_weakest_of_them(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, epsilon=9.0, delta=1e-5).close()
    given = {"sampler": "secure", "ledger": path}
    both = "all of them together only against the server or the key holder, which keep to the"
    masking = spec_of(2, epsilon=1.0, protection="masking")
    before = fit(FKM(3), records(2), masking, **given).guarantee_
    assert "against the server, which keeps" in before
    assert "all of them together only" not in before, "its own sentence says it"
    said = fit(FKM(3), records(2), spec_of(2, epsilon=1.0), **given).guarantee_
    assert both in said and "with up to one client on their side" in said.split(both)[1]
    # Whatever comes later: what was encrypted once depends on the key holder.
    for spec in (masking, spec_of(2, epsilon=1.0, protection="masking", active_server=True)):
        assert both in fit(FKM(3), records(2), spec, **given).guarantee_
    local = PrivacySpec(epsilon=1.0, delta=1e-5, ranges=[(-4, 4)] * 2)
    said = fit(FKM(3), records(2), local, **given).guarantee_
    assert both in said
    trusting = spec_of(2, epsilon=1.0, colluders=0, min_survivors=5)
    said = fit(FKM(3), records(2), trusting, **given).guarantee_
    assert "with no client on their side" in said.split(both)[1]
    with Ledger.open(path) as ledger:
        ledger.verify()
        assert {q.key_holder for q in ledger.quorums()} == {False, True}


# Plans.

PLANNED = MODELS | {
    "FKM, rounds given": FKM(5, n_rounds=3),
    "GOLD, number unknown": GOLD(),
    "FedGEM sums, more rounds": FedGEM(4, calibration="sums", n_rounds=2, n_local_steps=2),
}


@pytest.mark.parametrize(("d", "size"), [(2, None), (5, 20_000)])
def test_bytes_and_exchanges_are_planned_within_a_fifth(d, size):
    wrong = []
    for name, model in PLANNED.items():
        if size is None and name in ("FedGEM floor", "GOLD, number unknown"):
            continue
        spec = spec_of(d, epsilon=1.0, delta=1e-6, public_size=size, min_survivors=None)
        plan = spec.plan(model, n_clients=3, n_features=d)
        history = fit(model, records(d, n_clients=3), spec).result_.history
        sent = sum(e.up[client] for e in history for client in e.up if client != KEY_HOLDER) / 3
        if not 0.8 < 1000 * plan.kilobytes_up / sent < 1.25:
            wrong.append(f"{name}: {1000 * plan.kilobytes_up:.0f} bytes planned, {sent:.0f} sent")
        asked = sum("c0" in exchange.asked for exchange in history)
        if plan.exchanges != asked:
            wrong.append(f"{name}: asked {plan.exchanges} times in the plan, {asked} really")
    assert not wrong, "\n".join(wrong)


@each_model
def test_a_run_charges_exactly_what_was_planned(name):
    model, spec = MODELS[name], spec_of(2)
    plan = spec.plan(model, n_clients=N_CLIENTS, n_features=2)
    planned = [
        plan.limit.mu * math.sqrt(release.share / release.times)
        for release in plan.releases
        for _ in range(release.times)
    ]
    fitted = fit(model, records(2), spec)
    for client in fitted.client_names_:
        charged = [row.charge.mu for row in fitted.ledger_.rows(client)]
        np.testing.assert_allclose(charged, planned)


# What cannot be.


def test_without_noise_nothing_is_encrypted():
    with pytest.raises(ParameterError, match=r"goes with an epsilon only: .* use protection='mask"):
        PrivacySpec.none(reason="test", protection="ckks")


def test_a_server_that_does_not_keep_to_the_protocol_is_no_promise_of_encryption():
    with pytest.raises(ParameterError, match="active_server=True goes with protection='masking'"):
        spec_of(2, active_server=True)


@pytest.mark.parametrize(
    ("n", "changed", "message"),
    [
        (1, {"min_survivors": None}, "a cohort of 1 clients: .* for 3 to"),
        (2, {"min_survivors": None}, "a cohort of 2 clients: .* for 3 to"),
        (5, {"min_survivors": 6}, "min_survivors=6 of 5 clients: give at most 5"),
        (5, {"min_survivors": 1, "colluders": 0}, "min_survivors=1 .*; give at least 2"),
        (5, {"min_survivors": None, "colluders": 5}, "colluders=5 of 5 clients: give at most 4"),
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


def test_a_client_may_not_have_the_name_of_the_key_holder():
    clients = records(2)
    clients[KEY_HOLDER] = clients.pop("c0")
    ledger = Ledger.create(None, epsilon=2.0, delta=1e-5)
    with pytest.raises(ParameterError, match="a client has the name 'key holder'"):
        fit(FKM(3), clients, spec_of(2), ledger=ledger)
    assert ledger.rows() == []
    fit(FKM(3), clients, spec_of(2, protection="masking"))


TOO_LARGE = {"public_size": 10**9, "delta": 1e-12}


def test_a_sum_that_fits_no_parameters_is_refused_before_anything_is_charged():
    ledger = Ledger.create(None, epsilon=2.0, delta=1e-11)
    with pytest.raises(
        ParameterError, match=r"encryption has room for .* protection='masking' has more"
    ):
        fit(FKM(3), records(2), spec_of(2, **TOO_LARGE), ledger=ledger)
    assert ledger.rows() == []
    fit(FKM(3), records(2), spec_of(2, **TOO_LARGE, protection="masking"), ledger=ledger)


@pytest.mark.parametrize("name", ["KFed", "FedGEM synopsis", "FedGEM sums"])
def test_so_it_is_where_sums_come_last(name):
    ledger = Ledger.create(None, epsilon=2.0, delta=1e-11)
    with pytest.raises(ParameterError, match="encryption has room for"):
        fit(MODELS[name], records(2), spec_of(2, **TOO_LARGE), ledger=ledger)
    assert ledger.rows() == []


def test_what_fits_no_parameters_cannot_be_planned_either():
    with pytest.raises(ParameterError, match="encryption has room for"):
        spec_of(2, **TOO_LARGE).plan(FKM(3), n_clients=N_CLIENTS, n_features=2)


def test_whole_clients_are_protected_in_sums_only():
    for model in ALIGNED.values():
        with pytest.raises(ParameterError, match="unit='client'"):
            fit(model, records(2), spec_of(2, unit="client"))


def test_two_thirds_must_survive_unless_the_spec_says_otherwise():
    model = fit(FKM(3), records(2), spec_of(2, min_survivors=None))
    assert model.result_.privacy["min_survivors"] == 4
    with pytest.raises(ParameterError, match="needs min_survivors in the privacy spec"):
        FKM(3, privacy=spec_of(2, min_survivors=None)).fit(InProcessEngine({"a": lambda b: b}))


# Engines of the user's own.


def own_engine(spec, clients, *, key_holder=True, **given):
    """What people set up who run clients and key holder elsewhere, and the clients' ledger."""
    rules = Rules(spec.min_survivors, spec.colluders, spec.agreement())
    ledger = Ledger.create(None, epsilon=spec.epsilon, delta=spec.delta)
    holder = Identity()
    members = {
        name: SynopsisClient(
            X,
            spec,
            np.random.default_rng(0),
            Releases(name, spec, ledger, "fast"),
            CkksClient(rules, Identity(), [holder.public]),
        )
        for name, X in clients.items()
    }
    party = KeyHolderParty(KeyHolding(rules, holder, **given))
    return InProcessEngine(
        {name: client.handle for name, client in members.items()},
        others={KEY_HOLDER: party.handle} if key_holder else {},
    ), ledger


def test_clients_and_a_key_holder_may_be_reached_by_an_engine(no_noise, tmp_path):
    spec = spec_of(2)
    engine, ledger = own_engine(spec, records(2), path=tmp_path / "keys")
    model = FKM(3, privacy=spec, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        model.fit(engine)
    expected = fit(FKM(3), records(2), spec)
    np.testing.assert_array_equal(model.cluster_centers_, expected.cluster_centers_)
    assert "provided that every client enforces the same spec" in model.guarantee_
    assert "the server or the key holder" in model.guarantee_
    assert model.result_.key_holder_view().saw
    assert ledger.quorums() == {(4, 1, False, True)}
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    # The next run has other keys: this key holder is for one.
    with warnings.catch_warnings(), pytest.raises(AggregationAborted, match="has sent no key"):
        warnings.simplefilter("ignore", PrivacyWarning)
        model.fit(engine)


def test_a_server_that_is_not_the_key_holders_own_gets_no_key():
    spec = spec_of(2)
    engine, ledger = own_engine(spec, records(2), aggregator=Identity().public)
    with warnings.catch_warnings(), pytest.raises(AggregationAborted, match="has sent no key"):
        warnings.simplefilter("ignore", PrivacyWarning)
        FKM(3, privacy=spec, random_state=0).fit(engine)
    assert ledger.rows() == []


def test_an_engine_that_reaches_no_key_holder_is_told_so():
    spec = spec_of(2)
    engine, ledger = own_engine(spec, records(2), key_holder=False)
    with warnings.catch_warnings(), pytest.raises(AggregationAborted, match="has sent no key"):
        warnings.simplefilter("ignore", PrivacyWarning)
        FKM(3, privacy=spec, random_state=0).fit(engine)
    assert ledger.rows() == []


# Figures, synopses, ranges, and the command line.


def test_a_figure_is_encrypted_and_a_synopsis_is_not():
    with pytest.raises(ParameterError, match="a synopsis is looked at client by client"):
        release_synopsis(records(2), privacy=spec_of(2), n_clusters=3)
    spec = spec_of(2, epsilon=50.0)
    ledger = Ledger.create(None, epsilon=60.0, delta=1e-5)
    figure = noisy_nicv(records(2), np.zeros((1, 2)), privacy=spec, ledger=ledger)
    truth = float(np.mean([np.square(X).sum(axis=1).mean() for X in records(2).values()]))
    assert figure.value == pytest.approx(truth, abs=6 * figure.standard_error)
    assert "the server's or the key holder's side" in figure.fallback
    assert "the server or the key holder" in figure.guarantee
    assert ledger.quorums() == {(4, 1, False, True)}


def test_a_figure_that_is_encrypted_and_one_under_masks_are_the_same(no_noise):
    found = {
        protection: noisy_nicv(
            records(2),
            np.zeros((1, 2)),
            privacy=spec_of(2, protection=protection, epsilon=50.0),
            sampler="fast",
        ).value
        for protection in ("ckks", "masking")
    }
    assert found["ckks"] == found["masking"]


def test_ranges_that_were_bought_can_be_used_and_the_ledger_knows_both():
    ledger = Ledger.create(None, epsilon=60.0, delta=1e-5)
    given = {"epsilon": 20.0, "delta": 1e-6, "ledger": ledger}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        bought = private_ranges(records(2), largest=100.0, **given)
    spec = spec_of(2, ranges=bought.ranges, epsilon=20.0)
    model = fit(FKM(3), records(2), spec, ledger=ledger, sampler="secure")
    assert len(ledger.rows("c0")) == 2 + len(model.result_.sums)
    assert ledger.quorums() == {(4, 1, False, True)}


CONFIG = """
algorithm = "FKM"
[parameters]
n_clusters = 2
random_state = 0
[privacy]
epsilon = 4.0
delta = 1e-5
ranges = [[0, 100], [10, 40]]
public_size = 120
protection = "ckks"
min_survivors = 3
[data]
source = "sites.csv"
client_column = "site"
columns = ["age", "bmi"]
"""


@pytest.fixture
def config(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["site,age,bmi"]
    for site in ("oslo", "bergen", "tromso", "bodo"):
        for center in (30, 70):
            lines += [f"{site},{rng.normal(center):.3f},{rng.normal(25):.3f}" for _ in range(60)]
    (tmp_path / "sites.csv").write_text("\n".join(lines) + "\n")
    path = tmp_path / "encrypted.toml"
    path.write_text(CONFIG)
    return path


def test_a_file_can_ask_for_encryption_and_plan_run_and_ledger_say_so(config, tmp_path, capsys):
    assert main(["plan", str(config), "--clients", "4"]) == 0
    planned = capsys.readouterr().out
    out = tmp_path / "out"
    assert main(["run", str(config), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    result = FedClustResult.load(out / "result.json")
    np.testing.assert_allclose(np.sort(result.centers[:, 0]), [30, 70], atol=5)
    assert result.fallback in planned and result.fallback in printed
    assert "the server or the key holder" in printed
    assert result.key_holder_view() is not None
    ledger = str(out / "ledger.sqlite")
    assert main(["ledger", "verify", ledger, "--against", str(out / "result.json")]) == 0
    assert main(["ledger", "show", ledger]) == 0
    shown = capsys.readouterr().out
    assert "in sums over 3 clients or more, and hold against the server or the key holder" in shown
    assert main(["ledger", "show", ledger, "--json"]) == 0
    [quorum] = json.loads(capsys.readouterr().out)["sums"]
    assert quorum == {
        "min_survivors": 3,
        "colluders": 1,
        "active_server": False,
        "key_holder": True,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("min_survivors = 3", "min_survivors = 3\nactive_server = true"), "active_server=True"),
        (("min_survivors = 3", "min_survivors = 5"), "min_survivors=5 of 4 clients"),
        (('"ckks"', '"bfv"'), "protection='bfv': give one of none, masking, ckks"),
    ],
)
def test_what_a_file_asks_for_that_cannot_be_is_refused_with_advice(
    config, change, message, capsys
):
    config.write_text(config.read_text().replace(*change))
    assert main(["run", str(config), "--quiet"]) == 2
    assert message in capsys.readouterr().err


# What is imported.

IMPORTS = """
import sys, warnings
import secure_fedclust
assert "tenseal" not in sys.modules
import numpy as np
from secure_fedclust import FKM, PrivacySpec
warnings.simplefilter("ignore")
clients = [np.zeros((5, 1))] * 3
for protection in ("none", "masking", "ckks"):
    spec = PrivacySpec(epsilon=1, delta=1e-5, ranges=[(-1, 1)], protection=protection)
    spec.plan(FKM(1), n_clients=3, n_features=1).exchanges
    assert "tenseal" not in sys.modules, protection
    FKM(1, privacy=spec).fit(clients)
    assert ("tenseal" in sys.modules) == (protection == "ckks"), protection
print("done")
"""


def test_the_library_for_encryption_is_imported_only_where_sums_are_encrypted():
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "done", done.stderr
