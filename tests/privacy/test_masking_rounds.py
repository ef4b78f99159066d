"""Rounds of masking: exact sums whoever drops out, stages in their order, sessions and engines."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fedclust import FederationWarning, Ledger, ParameterError, ProtocolError
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.engines.inprocess import Fault
from secure_fedclust.errors import AggregationAborted
from secure_fedclust.messages import private_stage, steps
from secure_fedclust.privacy import masks, mechanism
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.cohort import Rules
from secure_fedclust.privacy.grid import SumGrid
from secure_fedclust.privacy.identity import Identity
from secure_fedclust.privacy.masking import ADVERTISE, MASK, SHARE, UNMASK
from secure_fedclust.privacy.masking_client import MaskingClient
from secure_fedclust.privacy.queries import CellSums, Moments
from secure_fedclust.privacy.release import Releases, exact_sum
from secure_fedclust.privacy.secure_sum import Question
from secure_fedclust.protocols.cells import CELLS, _request
from secure_fedclust.protocols.client import answers
from secure_fedclust.protocols.seeding import SeedingClient
from secure_fedclust.protocols.session import Session
from secure_fedclust.protocols.sums import ends_for, server_end

from .masking_federation import (
    ACTIVE,
    RUN,
    UNLIKELY,
    X_SPEC,
    Federation,
    byte_uniformity,
    each_mode,
    is_exact,
    stages_of,
)

EACH_STAGE = [(active, stage) for active in (False, True) for stage in stages_of(active)]
STAGE_IDS = [f"{'active' if active else 'passive'}-{stage.name}" for active, stage in EACH_STAGE]
EACH_PLACE = [(active, at) for active in (False, True) for at in range(len(stages_of(active)))]


# Exact sums, whoever drops out.


@st.composite
def rounds(draw):
    """A cohort, its rules, and who drops out at which stage."""
    n, active = draw(st.integers(3, 9)), draw(st.booleans())
    colluders = draw(st.integers(0, n - 2))
    least = max(colluders + 1, 2, (n + colluders) // 2 + 1 if active else 0)
    threshold = draw(st.integers(least, n))
    who = draw(st.permutations(range(n)))[: draw(st.integers(0, n - threshold + 1))]
    drops = {i: draw(st.sampled_from(stages_of(active))) for i in who}
    return n, threshold, colluders, active, drops


def left_after(n, drops, active):
    """Places of those that are left after each stage."""
    left, found = set(range(n)), {}
    for stage in stages_of(active):
        left = {i for i in left if drops.get(i) is not stage}
        found[stage.name] = left
    return found


@settings(max_examples=60)
@given(rounds(), st.integers(1, 33), st.integers(0, 2**32 - 1))
def test_the_sum_is_exact_while_enough_are_left_at_every_stage_and_else_there_is_none(
    made, length, seed
):
    n, threshold, colluders, active, drops = made
    bound = ((1 << 62) - 1) // n
    rng = np.random.default_rng(seed)
    vectors = rng.integers(-bound, bound, (n, length), endpoint=True)
    vectors[:, 0] = bound * rng.choice([-1, 1])
    f = Federation(n, threshold, colluders=colluders, active=active, vectors=vectors)
    f.lost = [(stage, f.names[i]) for i, stage in drops.items()]
    left = left_after(n, drops, active)
    enough = (
        all(len(each) >= threshold for each in left.values()) and len(left[ADVERTISE.name]) >= 3
    )
    if not enough:
        with pytest.raises(AggregationAborted):
            f.total(largest=1 << 62)
        return
    total = f.total(largest=1 << 62)
    assert set(total.survivors) == {f.names[i] for i in left[MASK.name]}
    assert total.n_clients == len(left[ADVERTISE.name])
    assert is_exact(f, total)


@pytest.mark.parametrize(("active", "stage"), EACH_STAGE, ids=STAGE_IDS)
@pytest.mark.parametrize("reached", [False, True], ids=["unasked", "reply lost"])
def test_as_many_as_may_drop_out_at_one_stage_and_one_more_aborts(stage, active, reached):
    for n_dropped in (2, 3):
        f = Federation(6, 4, active=active)
        gone = f.names[1 : 1 + n_dropped]
        if reached:
            f.lost = [(stage, name) for name in gone]
        else:

            def refuse(asked, name, request, gone=gone):
                return {**request, "number": 99} if asked is stage and name in gone else request

            f.on_request = refuse
        if stage is ADVERTISE and not reached:
            f.on_reply = lambda s, c, r, gone=gone: None if s is stage and c in gone else r
        if n_dropped == 3:
            with pytest.raises(AggregationAborted, match="of at least 4"):
                f.total()
            continue
        total = f.total()
        expected = set(f.names) - (set(gone) if stage in (ADVERTISE, SHARE, MASK) else set())
        assert set(total.survivors) == expected
        assert is_exact(f, total)


@each_mode
def test_rounds_of_one_run_give_exact_sums_one_after_the_other(active):
    f = Federation(5, 4, active=active)
    for i, stage in enumerate([None, MASK, SHARE, UNMASK, None]):
        f.lost = [(stage, f.names[i])]
        assert is_exact(f, f.total())


def test_vectors_longer_than_a_block_are_masked_throughout():
    f = Federation(3, 2, length=2 * masks._BLOCK + 5)
    f.lost = [(MASK, f.names[1])]
    assert is_exact(f, f.total())
    masked = f.replies[0, MASK, f.names[0]]["masked"]
    for start in (0, masks._BLOCK):
        assert byte_uniformity(masked[start : start + masks._BLOCK].tobytes()) > UNLIKELY
    differences = masked[: masks._BLOCK] - masked[masks._BLOCK : 2 * masks._BLOCK]
    assert byte_uniformity(differences.tobytes()) > UNLIKELY


@pytest.mark.parametrize(
    ("length", "question", "match"), [(0, b"", "a sum of 0"), (1, bytes(1 << 25) + b"1", "bytes")]
)
def test_a_sum_of_no_size_or_of_no_end_is_refused_before_anybody_is_asked(length, question, match):
    f = Federation()
    f.length = length
    with pytest.raises(ParameterError, match=match):
        f.total(question)
    assert not f.requests


@pytest.mark.parametrize(
    ("n", "threshold", "colluders", "active"),
    [(2, 2, 0, False), (3, 4, 0, False), (5, 1, 0, False), (5, 2, 2, False), (5, 3, 1, True)],
)
def test_rules_that_protect_nobody_are_refused_before_anybody_is_asked(
    n, threshold, colluders, active
):
    f = Federation(n, threshold, colluders=colluders, active=active)
    with pytest.raises(ParameterError):
        f.total()
    assert not f.requests


def test_a_client_takes_no_part_in_a_cohort_of_more_than_were_asked():
    rules = Rules(3, 1, most_clients=5)
    rules.check(5)
    with pytest.raises(ParameterError, match="a cohort of 6 clients, where 5 were asked"):
        rules.check(6)
    f = Federation(6, 3)
    name = f.names[2]
    f.clients[name] = MaskingClient(replace(f.rules, most_clients=5), f.identities.get(name))
    assert name not in f.total().survivors
    [(_, who, error)] = f.refusals
    assert who == name
    assert "a cohort of 6 clients, where 5 were asked" in str(error)


def test_an_active_server_needs_clients_with_registered_identities():
    rules, mine = Rules(4, 1, active_server=True), Identity()
    for identity, registered in ((None, frozenset()), (mine, frozenset({Identity().public}))):
        with pytest.raises(ParameterError, match="active_server=True needs an identity"):
            MaskingClient(rules, identity, registered)


# The stage walk.


@each_mode
def test_from_every_state_only_the_stages_that_are_due_are_answered(active):
    """Before each stage, and after the last, all the others are tried; the round goes on as if not.

    Requests are those of an earlier round, with this round's number: well formed, and out of turn.
    """
    f = Federation(4, 4, active=active)
    f.total(number=4)
    victim, tried = f.names[1], []

    def attempt(due, number):
        for stage in ACTIVE:
            if stage is due:
                continue
            request = dict(f.requests.get((4, stage, victim), {"survivors": np.arange(4)}))
            before = repr(vars(f.clients[victim])), len(f.asked_of)
            with pytest.raises(ProtocolError):
                f.deliver(stage, victim, {**request, "number": number})
            assert before == (repr(vars(f.clients[victim])), len(f.asked_of))
            tried.append((due, stage))

    def ask(stage, requests, bounds, read=None):
        # Before a round has begun, the one before is all that could be meant.
        attempt(stage, 4 if stage is ADVERTISE else 9)
        return f.ask(stage, requests, bounds, read)

    assert is_exact(f, f.total(number=9, ask=ask))
    attempt(None, 9)
    assert len(tried) == 4 * len(f.stages()) + 5
    assert is_exact(f, f.total(number=10))


@each_mode
def test_a_fresh_client_takes_no_stage_but_the_first(active):
    f, fresh = Federation(4, 4, active=active), Federation(4, 4, active=active)
    f.total()
    name = f.names[0]
    for stage in f.stages()[1:]:
        with pytest.raises(ProtocolError, match="round 0 is not under way"):
            fresh.deliver(stage, name, f.requests[0, stage, name])
    assert is_exact(fresh, fresh.total())


@pytest.mark.parametrize(("active", "until"), EACH_STAGE, ids=STAGE_IDS)
def test_a_new_round_may_begin_at_any_time_and_ends_the_one_before(active, until):
    f = Federation(4, 4, active=active)
    f.on_reply = lambda stage, name, reply: None if stage is until else reply
    with pytest.raises(AggregationAborted):
        f.total()
    f.on_reply = lambda stage, name, reply: reply
    assert is_exact(f, f.total())
    for stage in f.stages():
        request = f.requests.get((0, stage, f.names[0]))
        if request is not None:
            with pytest.raises(ProtocolError):
                f.deliver(stage, f.names[0], request)


@each_mode
def test_a_round_of_another_run_or_number_is_not_under_way(active):
    f = Federation(4, 4, active=active)

    def ask(stage, requests, bounds, read=None):
        if stage is not ADVERTISE:
            for run, number in (("other", 3), (RUN, 2), (RUN, 4)):
                with pytest.raises(ProtocolError, match=f"round {number} is not under way"):
                    request = {**requests[f.names[0]], "number": number}
                    f.deliver(stage, f.names[0], request, run=run)
        return f.ask(stage, requests, bounds, read)

    assert is_exact(f, f.total(number=3, ask=ask))


@pytest.mark.parametrize("number", [0, 4, 5])
@pytest.mark.parametrize("run", [RUN, "other"])
def test_a_round_number_is_never_used_again_in_whatever_run(number, run):
    f = Federation(3, 2)
    f.total(number=5)
    with pytest.raises(ProtocolError, match=f"round {number} does not come after round 5"):
        f.deliver(ADVERTISE, f.names[0], {"number": number}, run=run)


def test_a_contribution_that_fails_leaves_the_round_open_and_nothing_sent():
    """E.g. when the budget does not allow it: the vector was never masked."""
    f = Federation(3, 2)
    f.contributors[f.names[0]] = mock.Mock(side_effect=ProtocolError("no budget"))
    total = f.total()
    assert total.survivors == tuple(f.names[1:])
    assert is_exact(f, total)
    assert f.contributors[f.names[0]].call_count == 1


# Through sessions and engines.

NAMES = [f"site {i}" for i in range(6)]
SESSION_QUERY = CellSums(np.array([[0.5, 0.5], [-0.5, -0.5]]), 1.0, 0.7)


@pytest.fixture
def no_noise(monkeypatch):
    monkeypatch.setattr(mechanism, "fast_noise", lambda sigma, size: np.zeros(size, np.int64))


def session_of(spec, faults=(), client_class=SeedingClient):
    """A session over real clients, and the clients."""
    ledger = Ledger.create(None, epsilon=10.0, delta=1e-6)
    ends = ends_for(spec, NAMES).clients
    rng = np.random.default_rng(0)
    members = {
        name: client_class(
            rng.uniform(-1, 1, (30, 2)),
            spec,
            np.random.default_rng(0),
            Releases(name, spec, ledger, "fast"),
            ends[name],
        )
        for name in NAMES
    }
    engine = InProcessEngine({name: c.handle for name, c in members.items()}, faults=faults)
    return Session(engine, spec, 2, server_end(spec)), members, ledger


def session_spec(active):
    return replace(X_SPEC, min_survivors=4, active_server=active)


def ask(session):
    """One sum; noise-free in steps, as the server reads it."""
    sizes = {"k": 2, "d": 2, "q": 0}
    [noisy] = session.ask_sum(
        CELLS, SESSION_QUERY, 0.1, sizes, lambda found: found, **_request(SESSION_QUERY)
    ).parts
    return noisy


def exact_over(session, members, names, n_clients):
    limit = Limit.of(*session.spec.target())
    grid = SumGrid.of(SESSION_QUERY, session.spec, limit, 0.1, n_clients)
    sums = [exact_sum(SESSION_QUERY, members[name].X, session.spec, grid).fields for name in names]
    return {name: sum(each[name] for each in sums) for name in sums[0]}


@pytest.mark.parametrize("kind", ["drop", "corrupt", "truncate", "delay"])
@pytest.mark.parametrize(("active", "at"), EACH_PLACE)
@pytest.mark.filterwarnings("ignore::secure_fedclust.FederationWarning")
def test_faults_of_an_engine_leave_exact_sums_over_those_that_are_left(no_noise, active, kind, at):
    n_stages = len(stages_of(active))
    faults = [Fault(NAMES[1], at, kind), Fault(NAMES[4], (at + 2) % n_stages, kind)]
    session, members, ledger = session_of(session_spec(active), faults)
    for number in range(2):
        found = ask(session)
        opened = session.sums[-1]
        expected = exact_over(session, members, opened.survivors, opened.n_clients)
        assert set(found.fields) >= set(expected)
        for name, field in expected.items():
            np.testing.assert_array_equal(found.fields[name], field)
        assert opened.exchange == number * n_stages
        assert len(opened.survivors) >= 4
    if kind != "delay":  # a late reply spoils the next round's too
        assert opened.survivors == tuple(NAMES)
    ledger.verify()


@pytest.mark.parametrize(("active", "at"), EACH_PLACE)
@pytest.mark.filterwarnings("ignore::secure_fedclust.FederationWarning")
def test_one_fault_too_many_aborts_and_the_next_round_works(no_noise, active, at):
    kinds = ["drop", "corrupt", "truncate"]
    faults = [Fault(name, at, kind) for name, kind in zip(NAMES[1:4], kinds, strict=True)]
    session, members, ledger = session_of(session_spec(active), faults)
    with pytest.raises(AggregationAborted, match="of at least 4"):
        ask(session)
    assert not session.sums
    charged = len(ledger.rows())
    assert charged == (6 if at >= 2 else 0)
    found = ask(session)
    assert session.sums[-1].survivors == tuple(NAMES)
    np.testing.assert_array_equal(
        found.fields["counts"], exact_over(session, members, NAMES, 6)["counts"]
    )
    assert len(ledger.rows()) == charged + 6


def test_a_session_says_who_was_left_out_and_why(no_noise):
    session, *_ = session_of(session_spec(False), [Fault(NAMES[2], 2, "corrupt")])
    with pytest.warns(FederationWarning, match=r"site 2: reply to masking/mask set aside"):
        ask(session)
    assert "site 2" in session.history[2].rejected
    assert [e.form for e in session.history] == ["key", "sealed", "masked", "share"]
    assert NAMES[2] not in session.sums[0].survivors


def test_a_repeated_request_gets_the_same_bytes_and_nothing_new_is_drawn(no_noise):
    spec = session_spec(False)
    session, members, ledger = session_of(spec)
    sent = {}
    engine = session._engine
    real = engine.exchange

    def exchange(requests):
        replies = dict(real(requests))
        rows = len(ledger.rows())
        for name, request in requests.items():
            assert members[name].handle(request) == replies[name]
        assert len(ledger.rows()) == rows
        sent.update(requests)
        return replies.items()

    engine.exchange = exchange
    ask(session)
    assert set(sent) == set(NAMES)


ALONE = private_stage("test/alone", request={}, reply={"count": steps("one")})


class AnswersAlone(SeedingClient):
    """Has a question, too, whose answer is not for a sum."""

    @answers(ALONE, after=(None,))
    def alone(self, share):
        return self.reply(self.release(Moments(2), share))


def cells_question(run):
    return CELLS.request.encode({**_request(SESSION_QUERY), "share": 0.1}, run=run, step=0)


QUESTIONS = {
    "empty": lambda run: b"",
    "no message": lambda run: b"garbage",
    "a stage of masking itself": lambda run: ADVERTISE.request.encode(
        {"number": 1}, run=run, step=0
    ),
    "not for a sum": lambda run: ALONE.request.encode({"share": 0.1}, run=run, step=0),
    "of another run": lambda run: cells_question("other"),
    "damaged": lambda run: cells_question(run)[:-1],
}


@pytest.mark.parametrize("what", [*QUESTIONS, None])
def test_a_question_that_is_not_for_a_sum_of_this_run_is_not_answered(no_noise, what):
    spec = session_spec(False)
    session, _, ledger = session_of(spec, client_class=AnswersAlone)
    question = QUESTIONS.get(what, cells_question)(session.run)

    def total():
        return server_end(spec).total(
            lambda stage, requests, bounds, read=None: session._ask(
                stage, requests, dict.fromkeys(requests, bounds), read
            ),
            NAMES,
            Question(session.run, 0, question, 6, lambda n: 1 << 35, lambda n: 1 << 40),
        )

    if what is None:  # the control
        assert total().survivors == tuple(NAMES)
        return
    with pytest.raises(AggregationAborted):
        total()
    assert not ledger.rows()


def test_what_too_few_would_begin_is_not_begun_and_says_who_is_missing():
    f = Federation(3, 2)
    f.lost = [(ADVERTISE, "client 1")]
    with pytest.raises(AggregationAborted) as error:
        f.total()
    said = str(error.value)
    assert "of at least 3 (no fewer begin a sum); missing: client 1" in said
    assert "This sum was not begun, and costs nothing; what others cost stays charged" in said
    f.lost = [(SHARE, "client 1")]  # it has begun: two are enough then
    assert is_exact(f, f.total())
