"""Double masking under attack: exact sums, dropouts, lies of servers and clients, and mutants."""

import contextlib
import gc
import logging
import math
import secrets
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, kstest

from secure_fedclust import (
    FederationWarning,
    Ledger,
    ParameterError,
    PrivacySpec,
    ProtocolError,
)
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.engines.inprocess import Fault
from secure_fedclust.errors import AggregationAborted
from secure_fedclust.messages import private_stage, steps
from secure_fedclust.privacy import masking, masks, mechanism, shamir
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.grid import SumGrid
from secure_fedclust.privacy.identity import Identity
from secure_fedclust.privacy.masking import (
    ADVERTISE,
    CONFIRM,
    LARGEST_COHORT,
    MASK,
    SHARE,
    UNMASK,
    Masking,
    MaskingClient,
    Rules,
)
from secure_fedclust.privacy.masks import KEY_BYTES, digest, pair_key, public_key
from secure_fedclust.privacy.queries import CellSums, Moments
from secure_fedclust.privacy.release import Releases, exact_sum
from secure_fedclust.privacy.secure_sum import Question
from secure_fedclust.protocols.cells import CELLS, _request
from secure_fedclust.protocols.client import answers
from secure_fedclust.protocols.seeding import SeedingClient
from secure_fedclust.protocols.session import Session
from secure_fedclust.protocols.sums import client_ends, server_end

UNLIKELY = 1e-7
"""How often a statistical test may fail although all is well."""

RUN = "run"
QUESTION = b"what do your records add up to?"
NOTHING = b"nothing, please"
"""A question that clients answer with zeros."""

PASSIVE, ACTIVE = (ADVERTISE, SHARE, MASK, UNMASK), (ADVERTISE, SHARE, MASK, CONFIRM, UNMASK)
ANCHOR = {"ledger_rows": 0, "ledger_head": "0" * 64}

each_mode = pytest.mark.parametrize("active", [False, True], ids=["passive", "active"])


class ByStage(dict):
    """Keys are number, stage and client; stages are not hashable, but their names are."""

    def __setitem__(self, key, value):
        super().__setitem__(self._named(key), value)

    def __getitem__(self, key):
        return super().__getitem__(self._named(key))

    def __contains__(self, key):
        return super().__contains__(self._named(key))

    def get(self, key, default=None):
        return super().get(self._named(key), default)

    def items(self):
        stages = {stage.name: stage for stage in ACTIVE}
        return [
            ((number, stages[name], client), v) for (number, name, client), v in super().items()
        ]

    @staticmethod
    def _named(key):
        number, stage, client = key
        return number, stage.name, client


class Federation:
    """Clients with a vector each, and an exchange that encodes and checks as the real one does.

    Attributes
    ----------
    lost : list of (stage, client)
        Replies that do not arrive; the server does not see them, though `replies` has them.
    on_request : function of stage, client, request
        What the server sends in place of a request.
    on_reply : function of stage, client, reply
        What a client sends in place of a reply; None for nothing.
    requests, replies : mappings of (number, stage, client) to fields
    view : list of (stage, client, bytes)
        What arrives at the server.
    """

    def __init__(
        self,
        n=5,
        threshold=4,
        *,
        colluders=1,
        active=False,
        length=6,
        client_class=MaskingClient,
        vectors=None,
        agreements=(),
        seed=0,
    ):
        self.rules = Rules(threshold, colluders, b"the spec", active)
        self.names = [f"client {i}" for i in range(n)]
        self.identities = {name: Identity() for name in self.names} if active else {}
        registered = frozenset(identity.public for identity in self.identities.values())
        rules = dict.fromkeys(self.names, self.rules)
        for name, agreement in dict(agreements).items():
            rules[name] = replace(self.rules, agreement=agreement)
        self.clients = {
            name: client_class(rules[name], self.identities.get(name), registered)
            for name in self.names
        }
        rng = np.random.default_rng(seed)
        if vectors is None:
            vectors = {name: rng.integers(-1000, 1000, length) for name in self.names}
        self.vectors = vectors
        self.length = len(vectors[self.names[0]])
        self.contributors = {}
        self.lost = []
        self.on_request = lambda stage, name, request: request
        self.on_reply = lambda stage, name, reply: reply
        self.requests, self.replies, self.view = ByStage(), ByStage(), []
        self.refusals, self.asked_of = [], []
        self.number = -1

    def contribute(self, name):
        def answer(question, n_clients):
            self.asked_of.append((name, question, n_clients))
            if name in self.contributors:
                return self.contributors[name](question, n_clients)
            vector = self.vectors[name]
            return (0 * vector if question == NOTHING else vector), ANCHOR

        return answer

    def deliver(self, stage, name, request, run=RUN):
        """Let a client answer one request that goes over the wire."""
        client = self.clients[name]
        data = stage.request.encode(request, run=run, step=0)
        if stage.request.name not in client.stages:
            raise ProtocolError("no stage of this client")
        bounds = client.bounds
        decoded, _ = stage.request.decode(data, run=run, step=0, bounds=bounds)
        return client.answer(stage, run, decoded, self.contribute(name))

    def ask(self, stage, requests, bounds):
        found = {}
        for name, honest in requests.items():
            request = self.on_request(stage, name, honest)
            self.requests[self.number, stage, name] = request
            try:
                reply = self.on_reply(stage, name, self.deliver(stage, name, request))
                if reply is None:
                    continue
                self.replies[self.number, stage, name] = reply
                if (stage, name) in self.lost:
                    continue
                data = stage.reply.encode(reply, run=RUN, step=0)
                allowed = {**bounds, **stage.request.sizes(honest, {})}
                found[name] = stage.reply.decode(data, run=RUN, step=0, bounds=allowed)[0]
            except ProtocolError as error:
                self.refusals.append((stage, name, error))
                continue
            self.view.append((stage.name, name, data))
        return found

    def total(self, question=QUESTION, largest=1 << 20, number=None, ask=None):
        self.number = self.number + 1 if number is None else number
        asked = Question(RUN, self.number, question, self.length, lambda n: largest)
        return Masking(self.rules).total(ask or self.ask, self.names, asked)

    def sum_over(self, names):
        return np.sum([self.vectors[name] for name in names], axis=0)

    def stages(self):
        return ACTIVE if self.rules.active_server else PASSIVE


def is_exact(federation, total):
    return np.array_equal(total.steps, federation.sum_over(total.survivors))


# Exact sums, whoever drops out.


@st.composite
def rounds(draw):
    """A cohort, its rules, and who drops out at which stage."""
    n, active = draw(st.integers(3, 9)), draw(st.booleans())
    colluders = draw(st.integers(0, n - 2))
    least = max(colluders + 1, 2, (n + colluders) // 2 + 1 if active else 0)
    threshold = draw(st.integers(least, n))
    who = draw(st.permutations(range(n)))[: draw(st.integers(0, n - threshold + 1))]
    stages = ACTIVE if active else PASSIVE
    drops = {i: draw(st.sampled_from(stages)) for i in who}
    return n, threshold, colluders, active, drops


def left_after(n, drops, active):
    """Places of those that are left after each stage."""
    left, found = set(range(n)), {}
    for stage in ACTIVE if active else PASSIVE:
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
    f = Federation(n, threshold, colluders=colluders, active=active, vectors=None)
    f.vectors, f.length = dict(zip(f.names, vectors, strict=True)), length
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


@each_mode
@pytest.mark.parametrize("stage", ACTIVE, ids=lambda stage: stage.name)
@pytest.mark.parametrize("reached", [False, True], ids=["unasked", "reply lost"])
def test_as_many_as_may_drop_out_at_one_stage_and_one_more_aborts(stage, active, reached):
    if stage not in (ACTIVE if active else PASSIVE):
        return
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

    def ask(stage, requests, bounds):
        # Before a round has begun, the one before is all that could be meant.
        attempt(stage, 4 if stage is ADVERTISE else 9)
        return f.ask(stage, requests, bounds)

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


@each_mode
@pytest.mark.parametrize("until", ACTIVE, ids=lambda stage: stage.name)
def test_a_new_round_may_begin_at_any_time_and_ends_the_one_before(active, until):
    f = Federation(4, 4, active=active)
    if until not in f.stages():
        return
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

    def ask(stage, requests, bounds):
        if stage is not ADVERTISE:
            for run, number in (("other", 3), (RUN, 2), (RUN, 4)):
                with pytest.raises(ProtocolError, match=f"round {number} is not under way"):
                    request = {**requests[f.names[0]], "number": number}
                    f.deliver(stage, f.names[0], request, run=run)
        return f.ask(stage, requests, bounds)

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


# Lies of a server.


class Lies:
    """One lie for each name: a function of the world in which it is told.

    The world has the honest request, the federation, this round's number, and everything of an
    earlier round of the same clients. The lie is told to the first client.
    """

    def __init__(self):
        self.all = {}

    def __call__(self, stage, modes, match=""):
        def add(function):
            for mode in modes.split():
                name = f"{mode}: {function.__name__.replace('_', ' ')}"
                self.all[name] = (stage, mode == "active", function, match)
            return function

        return add


class World:
    def __init__(self, federation, request):
        self.federation, self.request = federation, dict(request)
        self.me = federation.names[0]

    def earlier(self, stage):
        return self.federation.requests[0, stage, self.me]

    def keys(self, change):
        keys = self.request["keys"].copy()
        change(keys)
        return {**self.request, "keys": keys}

    def sealed(self, change):
        sealed = self.request["sealed"].copy()
        change(sealed)
        return {**self.request, "sealed": sealed}

    def with_(self, **changed):
        changed = {
            name: np.array(value, dtype=np.int64) if isinstance(value, list) else value
            for name, value in changed.items()
        }
        return {**self.request, **changed}

    def context(self, question=QUESTION, rules=None, number=1, members=range(5)):
        f = self.federation
        roster = f.requests[1, SHARE, self.me]
        cohort = masking.cohort_digest(
            RUN, number, rules or f.rules, roster["keys"], roster["identities"]
        )
        return masking.context_of(cohort, np.array(members), question)

    def signed(self, context, survivors, signers=range(5)):
        """What these clients sign who were shown this."""
        text = masking._confirmed(context, tuple(survivors))
        found = [self.federation.identities[self.federation.names[i]].sign(text) for i in signers]
        return np.stack([np.frombuffer(each, dtype=np.uint8) for each in found])


def stranger(number, run=RUN):
    """Keys, and a signature by somebody unknown."""
    identity = Identity()
    keys = public_key(X25519PrivateKey.generate()) + public_key(X25519PrivateKey.generate())
    signature = identity.sign(masking._advertised(run, number, keys))
    return tuple(np.frombuffer(x, dtype=np.uint8) for x in (keys, identity.public, signature))


lie = Lies()
BOTH = "passive active"


@lie(SHARE, BOTH, "keys that this client has sent are not in the cohort|did not sign")
def own_key_changed(world):
    return world.keys(lambda keys: keys.__setitem__((0, 0), keys[0, 0] ^ 1))


@lie(SHARE, BOTH, "keys that this client has sent are not in the cohort|did not sign")
def own_mask_key_changed(world):
    return world.keys(lambda keys: keys.__setitem__((0, 40), keys[0, 40] ^ 1))


@lie(SHARE, BOTH, "not in the cohort|dimension 'n'|different identity")
def own_row_left_out(world):
    return world.with_(keys=world.request["keys"][1:])


@lie(SHARE, BOTH, "have one key")
def two_clients_with_one_row(world):
    return world.keys(lambda keys: keys.__setitem__(2, keys[1]))


@lie(SHARE, BOTH, "have one key")
def two_clients_with_one_mask_key(world):
    return world.keys(lambda keys: keys.__setitem__((2, slice(32, 64)), keys[1, 32:]))


@lie(SHARE, BOTH, "have one key")
def two_clients_with_one_channel_key(world):
    return world.keys(lambda keys: keys.__setitem__((2, slice(0, 32)), keys[1, :32]))


@lie(SHARE, BOTH, "have one key")
def a_channel_key_as_mask_key(world):
    return world.keys(lambda keys: keys.__setitem__((2, slice(32, 64)), keys[2, :32]))


@lie(SHARE, BOTH, "have one key")
def own_channel_key_as_mask_key_of_another(world):
    return world.keys(lambda keys: keys.__setitem__((3, slice(32, 64)), keys[0, :32]))


@lie(SHARE, BOTH, "dimension 'n'")
def cohort_of_one(world):
    return world.with_(keys=world.request["keys"][:1])


@lie(SHARE, BOTH, "dimension 'n'")
def cohort_of_two(world):
    return world.with_(keys=world.request["keys"][:2])


@lie(SHARE, BOTH, "min_survivors=4 of 3 clients")
def cohort_below_min_survivors(world):
    return world.with_(keys=world.request["keys"][:3])


@lie(SHARE, BOTH, "dimension 'n'|bytes")
def cohort_too_large_to_share_with(world):
    more = np.random.default_rng(0).integers(0, 256, (LARGEST_COHORT - 4, 64), dtype=np.uint8)
    return world.with_(keys=np.concatenate([world.request["keys"], more]))


@lie(SHARE, "active", "could open two sums of one round")
def cohort_too_large_to_keep_survivor_sets_apart(world):
    rows = [stranger(1) for _ in range(2)]
    names = ("keys", "identities", "signatures")
    return world.with_(
        **{
            name: np.concatenate([world.request[name], np.stack([row[i] for row in rows])])
            for i, name in enumerate(names)
        }
    )


@lie(SHARE, "passive", "key of member 3 is none to agree with")
def channel_key_of_low_order(world):
    return world.keys(lambda keys: keys.__setitem__((3, slice(0, 32)), 0))


@lie(SHARE, "passive", "key of member 3 is none to agree with")
def channel_key_of_another_low_order(world):
    low = np.frombuffer((1).to_bytes(32, "little"), dtype=np.uint8)
    return world.keys(lambda keys: keys.__setitem__((3, slice(0, 32)), low))


@lie(SHARE, BOTH, "not in the cohort")
def cohort_of_an_earlier_round(world):
    return {**world.earlier(SHARE), "number": world.request["number"]}


@lie(SHARE, BOTH, "round 0 is not under way")
def number_of_an_earlier_round(world):
    return world.with_(number=0)


@lie(SHARE, "active", "did not sign")
def keys_changed_after_signing(world):
    return world.keys(lambda keys: keys.__setitem__((3, 5), keys[3, 5] ^ 1))


def replaced(world, place, keys, identity, signature):
    request = {name: world.request[name].copy() for name in ("keys", "identities", "signatures")}
    for name, value in zip(request, (keys, identity, signature), strict=True):
        request[name][place] = value
    return world.with_(**request)


@lie(SHARE, "active", "not registered")
def unregistered_client(world):
    return replaced(world, 3, *stranger(1))


@lie(SHARE, "active", "did not sign")
def keys_of_a_stranger_under_a_known_identity(world):
    keys, _, signature = stranger(1)
    return replaced(world, 3, keys, world.request["identities"][3], signature)


@lie(SHARE, "active", "a different identity for each client")
def one_identity_twice(world):
    identity = world.request["identities"][2]
    keys, *_ = stranger(1)
    signature = world.federation.identities[world.federation.names[2]].sign(
        masking._advertised(RUN, 1, keys.tobytes())
    )
    return replaced(world, 3, keys, identity, np.frombuffer(signature, dtype=np.uint8))


@lie(SHARE, "active", "did not sign")
def forged_signature(world):
    signatures = world.request["signatures"].copy()
    signatures[4, 10] ^= 1
    return world.with_(signatures=signatures)


@lie(SHARE, "active", "did not sign")
def signature_of_another_client(world):
    signatures = world.request["signatures"].copy()
    signatures[[3, 4]] = signatures[[4, 3]]
    return world.with_(signatures=signatures)


@lie(SHARE, "active", "a different identity for each client")
def no_signatures(world):
    empty = {"identities": 32, "signatures": 64}
    return world.with_(**{k: np.zeros((0, w), dtype=np.uint8) for k, w in empty.items()})


@lie(SHARE, "active", "a different identity for each client")
def one_signature_too_few(world):
    return world.with_(**{k: world.request[k][:4] for k in ("identities", "signatures")})


@lie(SHARE, "active", "did not sign")
def keys_and_signature_of_an_earlier_round(world):
    old = world.earlier(SHARE)
    return replaced(world, 2, old["keys"][2], old["identities"][2], old["signatures"][2])


@lie(SHARE, "active", "did not sign")
def keys_signed_for_another_run(world):
    identity = world.federation.identities[world.federation.names[2]]
    keys, *_ = stranger(1)
    signature = identity.sign(masking._advertised("other", 1, keys.tobytes()))
    return replaced(
        world,
        2,
        keys,
        world.request["identities"][2],
        np.frombuffer(signature, dtype=np.uint8),
    )


@lie(MASK, BOTH, "in order and once")
def members_out_of_order(world):
    order = [1, 0, 2, 3, 4]
    return world.with_(members=order, sealed=world.request["sealed"][order])


@lie(MASK, BOTH, "in order and once")
def a_member_twice(world):
    again = [0, 1, 2, 3, 3]
    return world.with_(members=again, sealed=world.request["sealed"][again])


@lie(MASK, BOTH, "in order and once")
def a_member_beyond_the_cohort(world):
    return world.with_(members=[0, 1, 2, 3, 5])


@lie(MASK, BOTH, "below 0")
def a_member_before_the_cohort(world):
    return world.with_(members=[-1, 0, 1, 2, 3])


@lie(MASK, BOTH, "not among the members")
def members_without_this_client(world):
    return world.with_(members=[1, 2, 3, 4], sealed=world.request["sealed"][1:])


@lie(MASK, BOTH, "3 clients are left, this one goes on from 4")
def too_few_members(world):
    return world.with_(members=[0, 1, 2], sealed=world.request["sealed"][:3])


@lie(MASK, BOTH, "3 clients are left, this one goes on from 4|0 clients are left|not among")
def no_members(world):
    return world.with_(members=[], sealed=world.request["sealed"][:0])


@lie(MASK, BOTH, "dimension 'members'")
def fewer_envelopes_than_members(world):
    return world.with_(sealed=world.request["sealed"][:4])


@lie(MASK, BOTH, "what member 2 sent was changed")
def bit_flipped_in_an_envelope(world):
    return world.sealed(lambda sealed: sealed.__setitem__((2, 17), sealed[2, 17] ^ 4))


@lie(MASK, BOTH, "what member 2 sent was changed")
def bit_flipped_in_a_tag(world):
    return world.sealed(lambda sealed: sealed.__setitem__((2, -1), sealed[2, -1] ^ 4))


@lie(MASK, BOTH, "what member [23] sent was changed")
def envelopes_swapped_between_senders(world):
    return world.sealed(lambda sealed: sealed.__setitem__([2, 3], sealed[[3, 2]]))


@lie(MASK, BOTH, "what member 3 sent was changed")
def envelope_of_an_earlier_round(world):
    old = world.earlier(MASK)["sealed"][3]
    return world.sealed(lambda sealed: sealed.__setitem__(3, old))


@lie(MASK, BOTH, "what member 3 sent was changed")
def envelope_for_another_client(world):
    f = world.federation
    other = f.replies[1, SHARE, f.names[3]]["sealed"][1]
    return world.sealed(lambda sealed: sealed.__setitem__(3, other))


@lie(MASK, BOTH, "what member 3 sent was changed")
def envelope_reflected_to_its_sender(world):
    mine = world.federation.replies[1, SHARE, world.me]["sealed"][3]
    return world.sealed(lambda sealed: sealed.__setitem__(3, mine))


@lie(MASK, BOTH, "what member 3 sent was changed")
def envelope_left_empty(world):
    return world.sealed(lambda sealed: sealed.__setitem__(3, 0))


@lie(CONFIRM, "active", "this client among them")
def confirming_without_this_client(world):
    return world.with_(survivors=[1, 2, 3, 4])


@lie(CONFIRM, "active", "3 clients are left")
def confirming_too_few(world):
    return world.with_(survivors=[0, 1, 2])


@lie(CONFIRM, "active", "in order and once")
def confirming_somebody_twice(world):
    return world.with_(survivors=[0, 1, 2, 2])


@lie(CONFIRM, "active", "in order and once")
def confirming_somebody_beyond_the_cohort(world):
    return world.with_(survivors=[0, 1, 2, 3, 7])


@lie(UNMASK, BOTH, "among the survivors and among the dropped|that this client has confirmed")
def a_survivor_that_dropped_out_as_well(world):
    return world.with_(dropped=[4])


@lie(UNMASK, BOTH, "are not the members|that this client has confirmed")
def a_member_that_is_neither(world):
    return world.with_(survivors=[0, 1, 2, 3], dropped=[])


@lie(UNMASK, BOTH, "in order and once")
def a_dropped_client_beyond_the_cohort(world):
    return world.with_(dropped=[5])


@lie(UNMASK, BOTH, "in order and once")
def survivors_out_of_order(world):
    return world.with_(survivors=[1, 0, 2, 3, 4])


@lie(UNMASK, BOTH, "this client among them")
def survivors_without_this_client(world):
    return world.with_(survivors=[1, 2, 3, 4], dropped=[0])


@lie(UNMASK, BOTH, "3 clients are left|has confirmed")
def too_few_survivors(world):
    return world.with_(survivors=[0, 1, 2], dropped=[3, 4])


@lie(UNMASK, "active", "that this client has confirmed")
def other_survivors_than_confirmed(world):
    signatures = world.signed(world.context(), [0, 1, 2, 3], range(4))
    return world.with_(
        survivors=[0, 1, 2, 3], dropped=[4], signers=[0, 1, 2, 3], signatures=signatures
    )


@lie(UNMASK, "active", "3 clients are left")
def too_few_confirmations(world):
    return world.with_(signers=[0, 1, 2], signatures=world.request["signatures"][:3])


@lie(UNMASK, "active", "0 clients are left")
def no_confirmations(world):
    return world.with_(signers=[], signatures=world.request["signatures"][:0])


@lie(UNMASK, "active", "in order and once")
def one_confirmation_four_times(world):
    same = np.stack([world.request["signatures"][0]] * 4)
    return world.with_(signers=[0, 0, 0, 0], signatures=same)


@lie(UNMASK, "active", "has not confirmed")
def one_confirmation_for_all(world):
    same = np.stack([world.request["signatures"][0]] * 5)
    return world.with_(signatures=same)


@lie(UNMASK, "active", "member 3 has not confirmed")
def forged_confirmation(world):
    signatures = world.request["signatures"].copy()
    signatures[3, 3] ^= 1
    return world.with_(signatures=signatures)


@lie(UNMASK, "active", "has not confirmed")
def confirmations_of_other_survivors(world):
    return world.with_(signatures=world.signed(world.context(), [0, 1, 2, 3]))


@lie(UNMASK, "active", "has not confirmed")
def confirmations_of_another_question(world):
    return world.with_(signatures=world.signed(world.context(NOTHING), range(5)))


@lie(UNMASK, "active", "has not confirmed")
def confirmations_of_other_members(world):
    return world.with_(signatures=world.signed(world.context(members=range(4)), range(5)))


@lie(UNMASK, "active", "has not confirmed")
def confirmations_under_another_spec(world):
    rules = replace(world.federation.rules, agreement=b"another")
    return world.with_(signatures=world.signed(world.context(rules=rules), range(5)))


@lie(UNMASK, "active", "has not confirmed")
def confirmations_of_another_round(world):
    return world.with_(signatures=world.earlier(UNMASK)["signatures"])


@lie(UNMASK, "active", "in order and once")
def a_confirmation_by_nobody_of_the_cohort(world):
    return world.with_(signers=[0, 1, 2, 3, 9])


@pytest.mark.parametrize("name", lie.all)
def test_a_lying_server_is_refused_and_learns_nothing(name):
    """The first client refuses the lie, contributes nothing on its account, and goes on."""
    at, active, tell, match = lie.all[name]
    f = Federation(5, 4, active=active)
    f.total()
    told = []

    def on_request(stage, client, request):
        if stage is at and client == f.names[0]:
            f.requests[1, stage, client] = request
            told.append(stage)
            contributed = len(f.asked_of)
            with pytest.raises(ProtocolError, match=match):
                f.deliver(stage, client, tell(World(f, request)))
            assert len(f.asked_of) == contributed
        return request

    f.on_request = on_request
    total = f.total()
    assert told == [at]
    assert total.survivors == tuple(f.names)
    assert is_exact(f, total)


def test_confirmations_as_the_lies_make_them_are_those_of_the_clients():
    """The lies above are refused for what they say, not for how they are signed."""
    f = Federation(5, 4, active=True)
    f.total()
    f.total()
    request = f.requests[1, UNMASK, f.names[0]]
    world = World(f, request)
    np.testing.assert_array_equal(request["signatures"], world.signed(world.context(), range(5)))
    keys, identity, signature = stranger(1)
    assert masking.is_signed(
        identity.tobytes(), signature.tobytes(), masking._advertised(RUN, 1, keys.tobytes())
    )


def test_a_mask_key_of_low_order_is_refused_before_anything_is_contributed():
    """The shared secret would be known to everybody: all zeros."""
    f = Federation(5, 4)

    def on_request(stage, name, request):
        if stage is not SHARE or name == f.names[3]:
            return request
        keys = request["keys"].copy()
        keys[3, 32:] = 0
        return {**request, "keys": keys}

    f.on_request = on_request
    with pytest.raises(AggregationAborted):
        f.total()
    assert {name for name, *_ in f.asked_of} <= {f.names[3]}


def test_a_client_that_was_not_masked_with_is_no_survivor():
    """Who dropped out before vectors were sent may not be called a survivor afterwards."""
    f = Federation(6, 4)
    f.lost = [(SHARE, f.names[5])]
    refused = []

    def on_request(stage, name, request):
        if stage is UNMASK and not refused:
            for survivors, dropped in (([0, 1, 2, 3, 4, 5], []), ([0, 1, 2, 3, 4], [5])):
                lists = {"survivors": np.array(survivors), "dropped": np.array(dropped, np.int64)}
                with pytest.raises(ProtocolError):
                    f.deliver(stage, name, {**request, **lists})
            refused.append(name)
        return request

    f.on_request = on_request
    assert is_exact(f, f.total())
    assert refused


def test_a_client_that_was_not_masked_with_is_not_confirmed_either():
    f = Federation(6, 4, active=True)
    f.lost = [(SHARE, f.names[5])]
    refused = []

    def on_request(stage, name, request):
        if stage is CONFIRM:
            with pytest.raises(ProtocolError, match="survivors are members of the round"):
                f.deliver(stage, name, {**request, "survivors": np.arange(6)})
            refused.append(name)
        return request

    f.on_request = on_request
    assert is_exact(f, f.total())
    assert refused == f.names[:5]


@each_mode
def test_a_sum_is_opened_once_with_one_set_of_survivors(active):
    """Another set, or the same again, would give both secrets of somebody away."""
    f = Federation(6, 5, active=active)
    total = f.total()
    assert is_exact(f, total)
    for name in f.names:
        request = f.requests[0, UNMASK, name]
        other = {"survivors": np.arange(5), "dropped": np.array([5])}
        for again in (request, {**request, **other}):
            with pytest.raises(ProtocolError, match="round 0 is not under way"):
                f.deliver(UNMASK, name, again)


def test_only_survivors_can_confirm_who_has_survived():
    f = Federation(6, 5, active=True)
    f.lost = [(MASK, f.names[5])]
    refused = []

    def on_request(stage, name, request):
        if stage is UNMASK and not refused:
            extra = request["signatures"][:1]
            more = {
                "signers": np.append(request["signers"], 5),
                "signatures": np.concatenate([request["signatures"], extra]),
            }
            with pytest.raises(ProtocolError, match="only survivors confirm"):
                f.deliver(stage, name, {**request, **more})
            refused.append(name)
        return request

    f.on_request = on_request
    assert is_exact(f, f.total())
    assert refused


# Clients that were shown different things.


@each_mode
@pytest.mark.parametrize("half", [1, 2, 3, 5])
def test_clients_that_were_asked_different_questions_do_not_open_a_sum(active, half):
    f = Federation(6, 4, active=active, length=3)

    def on_request(stage, name, request):
        if stage is MASK and name in f.names[:half]:
            return {**request, "question": np.frombuffer(NOTHING, dtype=np.uint8)}
        return request

    f.on_request = on_request
    with pytest.raises(AggregationAborted):
        f.total(largest=1 << 30)


def test_for_a_trusted_server_it_is_the_range_that_tells():
    f = Federation(6, 4, length=3)

    def on_request(stage, name, request):
        if stage is MASK and name in f.names[:3]:
            return {**request, "question": np.frombuffer(NOTHING, dtype=np.uint8)}
        return request

    f.on_request = on_request
    with pytest.raises(AggregationAborted, match="are no sum of clients' vectors"):
        f.total(largest=1 << 30)


@each_mode
def test_clients_with_different_specs_do_not_open_a_sum(active):
    loose = {f"client {i}": b"another spec" for i in range(3)}
    f = Federation(6, 4, active=active, agreements=loose)
    with pytest.raises(AggregationAborted):
        f.total(largest=1 << 30)
    assert not f.asked_of


def claims_to_agree(f):
    """What a server does, or a client, that would have specs mixed."""

    def on_reply(stage, name, reply):
        if stage is ADVERTISE:
            agreed = np.frombuffer(digest(f.rules.agreement), dtype=np.uint8)
            return {**reply, "agreement": agreed}
        return reply

    return on_reply


def test_a_client_with_another_spec_is_left_out():
    f = Federation(5, 2, agreements={"client 1": b"another spec"})
    total = f.total()
    assert set(total.survivors) == set(f.names) - {"client 1"}
    assert is_exact(f, total)
    assert "client 1" not in {name for name, *_ in f.asked_of}


@each_mode
def test_clients_with_different_specs_contribute_nothing_though_they_were_brought_together(active):
    """Their envelopes cannot be opened, so that no noise is drawn and nothing is charged."""
    f = Federation(5, 4, active=active, agreements={"client 1": b"another spec"})
    f.on_reply = claims_to_agree(f)
    with pytest.raises(AggregationAborted):
        f.total()
    assert not f.asked_of
    assert {name for *_, name, _ in f.refusals} == set(f.names)
    assert all("member" in str(error) for *_, error in f.refusals)


@pytest.mark.parametrize(
    "changed",
    [
        {"epsilon": 2.0000001},
        {"delta": 2e-6},
        {"ranges": [(-1, 1), (-1, 2)]},
        {"unit": "client"},
        {"adjacency": "replace_one"},
        {"min_survivors": 8},
        {"colluders": 2},
        {"public_size": 21},
        {"active_server": True},
        {"records_per_person": 2},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_specs_that_differ_in_anything_do_not_agree(changed):
    assert replace(X_SPEC, **changed).agreement() != X_SPEC.agreement()


@pytest.mark.parametrize(
    "written",
    [
        {"epsilon": 2},
        {"epsilon": np.float64(2.0)},
        {"ranges": ((-1, 1), [-1.0, 1.0])},
        {"min_survivors": np.int64(9)},
    ],
)
def test_specs_that_are_equal_agree_however_their_numbers_were_written(written):
    """E.g. ``epsilon = 2`` in the file of one site, and ``epsilon = 2.0`` in another's."""
    other = replace(X_SPEC, **written)
    assert other == X_SPEC
    assert other.agreement() == X_SPEC.agreement()


def test_clients_that_were_shown_different_members_do_not_open_a_sum():
    f = Federation(6, 4, length=3)

    def on_request(stage, name, request):
        if stage is MASK and name in f.names[:3]:
            return {**request, "members": np.arange(5), "sealed": request["sealed"][:5]}
        return request

    f.on_request = on_request
    with pytest.raises(AggregationAborted):
        f.total(largest=1 << 30)


# Wrong clients.


def changed(field, change):
    def wrong(f, reply):
        value = reply[field].copy()
        return {**reply, field: change(value)}

    return wrong


def flipped(value):
    value.flat[-1] ^= 1
    return value


def of_the_round_before(stage):
    return lambda f, reply: f.replies[0, stage, f.names[2]]


def like_another(stage, *fields):
    """Replies of earlier clients in this round are known by then."""

    def wrong(f, reply):
        other = f.replies[1, stage, f.names[1]]
        return {**reply, **{field: other[field] for field in fields or reply}}

    return wrong


WRONG = {
    "keys too short": (ADVERTISE, changed("keys", lambda x: x[:-1])),
    "keys all zeros": (ADVERTISE, changed("keys", np.zeros_like)),
    "keys bit-flipped": (ADVERTISE, changed("keys", flipped)),
    "keys of the round before": (ADVERTISE, of_the_round_before(ADVERTISE)),
    "keys of another": (ADVERTISE, like_another(ADVERTISE, "keys")),
    "everything of another": (ADVERTISE, like_another(ADVERTISE)),
    "identity of another": (ADVERTISE, like_another(ADVERTISE, "identity")),
    "one key for both": (
        ADVERTISE,
        changed("keys", lambda x: np.concatenate([x[:32], x[:32]])),
    ),
    "mask key of low order": (
        ADVERTISE,
        changed("keys", lambda x: np.concatenate([x[:32], np.zeros(32, np.uint8)])),
    ),
    "commitment bit-flipped": (ADVERTISE, changed("commitment", flipped)),
    "commitment of another": (ADVERTISE, like_another(ADVERTISE, "commitment")),
    "commitment too long": (ADVERTISE, changed("commitment", lambda x: np.append(x, x))),
    "agreement bit-flipped": (ADVERTISE, changed("agreement", flipped)),
    "agreement empty": (ADVERTISE, changed("agreement", lambda x: x[:0])),
    "signature bit-flipped": (ADVERTISE, changed("signature", lambda x: x ^ 1)),
    "signature missing": (ADVERTISE, changed("signature", lambda x: x[:0])),
    "envelopes bit-flipped": (SHARE, changed("sealed", flipped)),
    "envelopes too few": (SHARE, changed("sealed", lambda x: x[:-1])),
    "envelopes too short": (SHARE, changed("sealed", lambda x: x[:, :-1])),
    "envelopes of the round before": (SHARE, of_the_round_before(SHARE)),
    "envelopes of another": (SHARE, like_another(SHARE)),
    "envelopes out of order": (SHARE, changed("sealed", lambda x: x[::-1])),
    "vector too short": (MASK, changed("masked", lambda x: x[:-1])),
    "vector too long": (MASK, changed("masked", lambda x: np.append(x, x))),
    "vector empty": (MASK, changed("masked", lambda x: x[:0])),
    "vector bit-flipped": (MASK, changed("masked", lambda x: x ^ np.uint64(1 << 60))),
    "vector of the round before": (MASK, of_the_round_before(MASK)),
    "vector of another": (MASK, like_another(MASK)),
    "vector of zeros": (MASK, changed("masked", np.zeros_like)),
    "confirmation bit-flipped": (CONFIRM, changed("signature", flipped)),
    "confirmation of another": (CONFIRM, like_another(CONFIRM)),
    "confirmation of the round before": (CONFIRM, of_the_round_before(CONFIRM)),
    "confirmation too short": (CONFIRM, changed("signature", lambda x: x[:-1])),
    "shares out of the field": (
        UNMASK,
        changed("shares", lambda x: np.full_like(x, shamir.PRIME)),
    ),
    "shares bit-flipped": (UNMASK, changed("shares", flipped)),
    "shares of zeros": (UNMASK, changed("shares", np.zeros_like)),
    "shares too few": (UNMASK, changed("shares", lambda x: x[:-1])),
    "shares too short": (UNMASK, changed("shares", lambda x: x[:, :-1])),
    "shares of another": (UNMASK, like_another(UNMASK)),
    "shares of the round before": (UNMASK, of_the_round_before(UNMASK)),
}

GOES_ON = {
    "agreement bit-flipped",
    "agreement empty",
    "keys too short",
    "keys of the round before",
    "one key for both",
    "commitment too long",
    "signature missing",
    "envelopes too few",
    "envelopes too short",
    "vector too short",
    "vector too long",
    "vector empty",
    "confirmation too short",
    "shares out of the field",
    "shares too few",
    "shares too short",
}
"""What is recognised as wrong at once, so that the round goes on without its sender."""


@each_mode
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_client_is_left_out_or_stops_the_round_and_never_makes_a_wrong_sum(name, active):
    at, wrong = WRONG[name]
    f = Federation(6, 4, active=active)
    if at not in f.stages() or (not active and name.startswith(("signature", "identity"))):
        return
    f.total()
    culprit = f.names[2]

    def on_reply(stage, client, reply):
        return wrong(f, reply) if stage is at and client == culprit else reply

    f.on_reply = on_reply
    try:
        total = f.total()
    except AggregationAborted:
        # Signed keys are checked by clients, all of whom then refuse the cohort.
        assert name not in GOES_ON or (active and name == "keys of the round before")
        return
    assert is_exact(f, total)
    if at in (ADVERTISE, MASK):
        assert culprit not in total.survivors


@pytest.mark.parametrize("name", sorted(GOES_ON))
def test_a_reply_of_the_wrong_form_costs_its_sender_only(name):
    at, wrong = WRONG[name]
    active = at is CONFIRM or name.startswith("signature")
    f = Federation(6, 4, active=active)
    f.total()
    f.on_reply = lambda stage, client, reply: (
        wrong(f, reply) if stage is at and client == f.names[2] else reply
    )
    total = f.total()
    assert is_exact(f, total)
    assert len(total.survivors) >= 5


class Garbage(MaskingClient):
    """Shares something else than its keys; `value` is one share of it."""

    value = None

    def _share(self, *given, **fields):
        def split(secret, n, threshold):
            if self.value is not None:
                return np.full((n, len(secret)), self.value, dtype=np.uint16)
            return shamir_split(secrets.token_bytes(len(secret)), n, threshold)

        shamir_split = shamir.split
        with mock.patch.object(shamir, "split", split):
            return super()._share(*given, **fields)


@each_mode
@pytest.mark.parametrize("value", [None, 0, 255, 1000, shamir.PRIME - 1, shamir.PRIME, 65535])
@pytest.mark.parametrize("drops_out", [False, True])
def test_garbage_instead_of_shares_stops_the_round(active, value, drops_out):
    f = Federation(6, 4, active=active)
    culprit = f.names[2]
    honest = f.clients[culprit]
    f.clients[culprit] = Garbage(honest.rules, honest._identity, honest._registered)
    f.clients[culprit].value = value
    f.lost = [(MASK, culprit)] if drops_out else []
    # Whatever comes out would be in range: it is what was sent before that tells.
    with pytest.raises(AggregationAborted):
        f.total(largest=(1 << 63) - 1)


@each_mode
def test_two_clients_that_are_one_are_both_left_out(active):
    """One client that answers under two names, with the same keys."""
    f = Federation(7, 5, active=active)
    twin, other = f.names[2], f.names[5]

    def on_reply(stage, name, reply):
        if stage is ADVERTISE and name == other:
            return f.replies[f.number, ADVERTISE, twin]
        return reply

    f.on_reply = on_reply
    total = f.total()
    assert set(total.survivors) == set(f.names) - {twin, other}
    assert is_exact(f, total)


def test_one_identity_under_two_names_is_left_out_though_the_keys_differ():
    f = Federation(7, 5, active=True)
    twin = f.clients[f.names[2]]
    f.clients[f.names[5]] = MaskingClient(twin.rules, twin._identity, twin._registered)
    total = f.total()
    assert set(total.survivors) == set(f.names) - {f.names[2], f.names[5]}
    assert is_exact(f, total)


# What the server sees can be made from the sum.


def run_view(vectors, n, rules, drops, number=0):
    """Everything a server sees of one round: stage, client, and reply."""
    f = Federation(
        n,
        rules.min_survivors,
        colluders=rules.colluders,
        active=rules.active_server,
        vectors=None,
    )
    f.vectors = dict(zip(f.names, vectors, strict=True))
    f.length = vectors.shape[1]
    f.lost = [(stage, f.names[i]) for i, stage in drops.items()]
    total = f.total(largest=1 << 62, number=number)
    replies = [
        (stage, name, reply)
        for (_, stage, name), reply in f.replies.items()
        if (stage, name) not in f.lost
    ]
    return f, total, replies


def simulated_vectors(total, n, drops, rng):
    """Vectors that have nothing in common with the real ones but the sum of the survivors."""
    vectors = rng.integers(0, 1 << 64, (n, len(total)), dtype=np.uint64)
    alive = [i for i in range(n) if drops.get(i) not in (ADVERTISE, SHARE, MASK)]
    rest = vectors[alive[1:]].sum(axis=0, dtype=np.uint64)
    vectors[alive[0]] = total.view(np.uint64) - rest
    return vectors.view(np.int64)


def byte_uniformity(content):
    """Probability of bytes at least this uneven, were they uniform."""
    counts = np.bincount(np.frombuffer(content, dtype=np.uint8), minlength=256)
    expected = counts.sum() / 256
    return chi2.sf(np.square(counts - expected).sum() / expected, 255)


DROPS = {
    "nobody": {},
    "one before its vector": {1: SHARE},
    "one without its vector": {2: MASK},
    "one before unmasking": {3: UNMASK},
}


@each_mode
@pytest.mark.parametrize("who", DROPS)
def test_a_view_made_from_the_sum_alone_has_the_same_form(active, who):
    rules, drops = Rules(4, 1, active_server=active), DROPS[who]
    rng = np.random.default_rng(0)
    real = np.outer(np.arange(5), np.ones(12, dtype=np.int64))
    f, total, seen = run_view(real, 5, rules, drops)
    made = simulated_vectors(total.steps, 5, drops, rng)
    g, simulated, made_seen = run_view(made, 5, rules, drops)
    np.testing.assert_array_equal(total.steps, simulated.steps)
    assert total.survivors == simulated.survivors

    def forms(replies):
        return [
            (
                stage.name,
                name,
                [
                    (k, getattr(v, "shape", v), str(getattr(v, "dtype", "")))
                    for k, v in reply.items()
                ],
            )
            for stage, name, reply in replies
        ]

    assert forms(seen) == forms(made_seen)
    lengths = [[(stage, name, len(data)) for stage, name, data in each.view] for each in (f, g)]
    assert lengths[0] == lengths[1]


def masked_vectors(n_runs, vectors, rules, drops=None):
    """Vectors under masks of several independent rounds, of shape (runs, clients, length)."""
    found = []
    for _ in range(n_runs):
        _, _, seen = run_view(vectors, len(vectors), rules, drops or {})
        found.append([reply["masked"] for stage, _, reply in seen if stage is MASK])
    return np.array(found)


def test_masked_vectors_are_uniform_and_tell_real_from_simulated_by_nothing():
    rules = Rules(2, 1)
    real = np.zeros((3, 100), dtype=np.int64)
    real[1] = 7
    rng = np.random.default_rng(1)
    made = simulated_vectors(real.sum(axis=0), 3, {}, rng)
    for vectors in (real, made):
        masked = masked_vectors(25, vectors, rules)
        assert byte_uniformity(masked.tobytes()) > UNLIKELY
        for place in range(3):
            assert byte_uniformity(masked[:, place].tobytes()) > UNLIKELY
        assert kstest(masked.ravel() / 2.0**64, "uniform").pvalue > UNLIKELY
        # Any two of three together, too: only the sum of all is known.
        assert byte_uniformity((masked[:, 0] + masked[:, 2]).tobytes()) > UNLIKELY
        assert byte_uniformity((masked[:, 0] - masked[:, 1]).tobytes()) > UNLIKELY


def test_differences_between_rounds_with_equal_vectors_are_uniform():
    f = Federation(3, 2, vectors={f"client {i}": np.full(2000, i) for i in range(3)})
    for _ in range(3):
        f.total()
    for name in f.names:
        first, second, third = (f.replies[i, MASK, name]["masked"] for i in range(3))
        for one, other in ((first, second), (second, third), (first, third)):
            assert byte_uniformity((one - other).tobytes()) > UNLIKELY
            assert byte_uniformity((one ^ other).tobytes()) > UNLIKELY


def test_keys_envelopes_and_shares_are_uniform_and_never_the_same():
    f = Federation(4, 3)
    for _ in range(40):
        f.total()
    envelopes, keys, shares = [], [], []
    for (_, stage, name), reply in f.replies.items():
        if stage is SHARE:
            own = f.names.index(name)
            assert not reply["sealed"][own].any()
            envelopes.append(np.delete(reply["sealed"], own, axis=0))
        elif stage is ADVERTISE:
            keys += [reply["keys"][:32].tobytes(), reply["keys"][32:].tobytes()]
            keys.append(reply["commitment"].tobytes())
        elif stage is UNMASK:
            shares.append(reply["shares"])
    assert len(set(keys)) == len(keys)
    assert byte_uniformity(np.stack(envelopes).tobytes()) > UNLIKELY
    assert byte_uniformity((np.stack(shares) & 255).astype(np.uint8).tobytes()) > 1e-12


# What keys depend on.


def test_a_cohort_is_told_by_run_number_agreement_keys_and_identities():
    keys, identities = np.zeros((3, 64), np.uint8), np.zeros((3, 32), np.uint8)
    given = {
        "run": RUN,
        "number": 1,
        "rules": Rules(2, 1, b"spec"),
        "keys": keys,
        "identities": identities,
    }
    changed = {
        "run": "other",
        "number": 2,
        "rules": Rules(2, 1, b"other"),
        "keys": keys + np.eye(3, 64, dtype=np.uint8),
        "identities": identities[:0],
    }
    found = [masking.cohort_digest(**given | {name: changed[name]}) for name in changed]
    assert len({masking.cohort_digest(**given), *found}) == 6


def test_a_context_is_told_by_cohort_members_and_question():
    found = {
        masking.context_of(cohort, np.array(members), question)
        for cohort in (b"a", b"b")
        for members in ([0, 1], [0, 2], [0])
        for question in (b"", b"a", b"b")
    }
    assert len(found) == 2 * 3 * 3


def test_both_of_a_pair_find_one_key_for_each_purpose_context_and_pair():
    mine, yours = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    found = set()
    for purpose in (b"mask", b"channel"):
        for context in (b"a", b"b"):
            for pair in ((0, 1), (0, 2), (1, 2)):
                key = pair_key(mine, public_key(yours), purpose, context, pair)
                assert key == pair_key(yours, public_key(mine), purpose, context, pair[::-1])
                found.add(key)
    assert len(found) == 2 * 2 * 3


def test_an_own_mask_is_for_one_seed_and_one_context():
    found = {masks.own_key(seed, context) for seed in (b"a", b"b") for context in (b"c", b"d")}
    assert len(found) == 4


def test_parts_of_a_digest_cannot_be_moved_into_one_another():
    lists = [(b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b""), (b"", b"abc")]
    assert len({digest(*parts) for parts in lists}) == len(lists)


# Attacks. Each returns the vector of the first client where it has got at it, or at what hides it.


def opened_secrets(f, number):
    """What the shares that a server got in a round give, for each member."""
    request = f.requests[number, UNMASK, f.names[-1]]
    survivors, dropped = request["survivors"], request["dropped"]
    members = sorted([*survivors.tolist(), *dropped.tolist()])
    holders = [i for i in survivors if (number, UNMASK, f.names[i]) in f.replies]
    holders = holders[: f.rules.min_survivors]
    weights = shamir.weights([int(i) + 1 for i in holders])
    shares = np.stack([f.replies[number, UNMASK, f.names[i]]["shares"] for i in holders])
    return dict(zip(members, shamir.join(weights, shares), strict=True))


def context_seen(f, number, name):
    roster, asked = f.requests[number, SHARE, name], f.requests[number, MASK, name]
    cohort = masking.cohort_digest(RUN, number, f.rules, roster["keys"], roster["identities"])
    return masking.context_of(cohort, asked["members"], asked["question"].tobytes())


def without_pair_masks(f, number, place, secret, vector):
    """Take the pair masks of a client off, given its mask key."""
    if secret is None:
        return vector
    key, name = X25519PrivateKey.from_private_bytes(secret), f.names[place]
    keys, context = f.requests[number, SHARE, name]["keys"], context_seen(f, number, name)
    found = [
        (
            pair_key(key, keys[other, KEY_BYTES:].tobytes(), b"mask", context, (place, other)),
            -1 if place < other else 1,
        )
        for other in f.requests[number, MASK, name]["members"].tolist()
        if other != place
    ]
    vector = vector.copy()
    masks.add_masks(vector, found)
    return vector


def without_own_mask(f, number, place, seed, vector):
    """Take a client's own mask off, given its seed."""
    if seed is None:
        return vector
    context, vector = context_seen(f, number, f.names[place]), vector.copy()
    masks.add_masks(vector, [(masks.own_key(seed, context), -1)])
    return vector


def attempted(f, **given):
    with contextlib.suppress(AggregationAborted):
        return f.total(**given)
    return None


def late_vector(f):
    """A vector comes late: the server has said that its client dropped out, and knows its key."""
    f.lost = [(MASK, f.names[0])]
    attempted(f)
    masked = f.replies[0, MASK, f.names[0]]["masked"]
    return without_pair_masks(f, 0, 0, opened_secrets(f, 0)[0], masked)


def opened_seed(f):
    """The server has opened a survivor's own mask, as it does in every round."""
    attempted(f)
    masked = f.replies[0, MASK, f.names[0]]["masked"]
    return without_own_mask(f, 0, 0, opened_secrets(f, 0)[0], masked)


def survive_then_drop(f):
    """The own mask of one round, and the mask key of the next."""
    attempted(f)
    f.lost = [(MASK, f.names[0])]
    attempted(f)
    masked = f.replies[0, MASK, f.names[0]]["masked"]
    masked = without_own_mask(f, 0, 0, opened_secrets(f, 0)[0], masked)
    return without_pair_masks(f, 0, 0, opened_secrets(f, 1)[0], masked)


def ask_twice(f):
    """The same clients are asked for both secrets of a survivor, one after the other."""
    attempted(f)
    seed = opened_secrets(f, 0)[0]
    lists = {"survivors": np.arange(1, len(f.names)), "dropped": np.array([0])}
    for name in f.names[1:]:
        request = {**f.requests[0, UNMASK, name], **lists}
        f.requests[0, UNMASK, name] = request
        try:
            f.replies[0, UNMASK, name] = f.deliver(UNMASK, name, request)
        except ProtocolError:
            return None
    key = opened_secrets(f, 0)[0]
    masked = f.replies[0, MASK, f.names[0]]["masked"]
    masked = without_own_mask(f, 0, 0, seed, masked)
    return without_pair_masks(f, 0, 0, key, masked)


def both_halves(f):
    """Shares of everything in one reply."""
    attempted(f)
    secret = opened_secrets(f, 0)[0]
    if secret is None or len(secret) != 2 * KEY_BYTES:
        return None
    masked = f.replies[0, MASK, f.names[0]]["masked"]
    masked = without_own_mask(f, 0, 0, secret[KEY_BYTES:], masked)
    return without_pair_masks(f, 0, 0, secret[:KEY_BYTES], masked)


def ask_others_for_nothing(f):
    """Model inconsistency: the sum is the victim's vector if all others contribute zeros."""

    def on_request(stage, name, request):
        if stage is MASK and name != f.names[0]:
            return {**request, "question": np.frombuffer(NOTHING, dtype=np.uint8)}
        return request

    f.on_request = on_request
    total = attempted(f)
    return None if total is None else total.steps


def mix_specs(f):
    """Others have agreed on less noise than the victim counts on."""
    others = f.names[1:]
    for name in others:
        f.clients[name].rules = replace(f.rules, agreement=b"a spec with no noise at all")
        f.vectors[name] = 0 * f.vectors[name]
    f.on_reply = claims_to_agree(f)
    total = attempted(f)
    return None if total is None else total.steps


def mix_cohorts(f):
    """The victim believes that there is one client more than there is, and so a coarser grid."""
    keys, *_ = stranger(0)

    def on_request(stage, name, request):
        if stage is SHARE and name == f.names[0]:
            return {**request, "keys": np.concatenate([request["keys"], keys[None]])}
        return request

    def on_reply(stage, name, reply):
        if stage is SHARE and name == f.names[0]:
            return {"sealed": reply["sealed"][: len(f.names)]}
        return reply

    f.on_request, f.on_reply = on_request, on_reply
    f.vectors |= {name: 0 * f.vectors[name] for name in f.names[1:]}
    total = attempted(f)
    sizes = {n for _, _, n in f.asked_of}
    return None if total is None or len(sizes) < 2 else total.steps


def same_pad_twice(f):
    """Envelopes of one pair in both directions, under one key and one nonce."""
    attempted(f)
    one, other = (f.replies[0, SHARE, f.names[i]]["sealed"][1 - i] for i in range(2))
    held = f.seen_texts
    texts = [held[i][1 - i].astype("<u2").view(np.uint8) for i in range(2)]
    length = len(texts[0])
    if np.array_equal(one[:length] ^ other[:length], texts[0] ^ texts[1]):
        return f.vectors[f.names[0]]
    return None


def reflect(f):
    """The victim's own envelopes come back to it as if the others had sent them."""

    def on_request(stage, name, request):
        if stage is MASK and name == f.names[0]:
            mine = f.replies[0, SHARE, name]["sealed"]
            return {**request, "sealed": mine}
        return request

    f.on_request = on_request
    attempted(f)
    asked = [name for name, *_ in f.asked_of]
    return f.vectors[f.names[0]] if f.names[0] in asked else None


def few_seeds(f):
    """Bits that are the same in all seeds that the server has opened."""
    seeds = []
    for number in range(15):
        attempted(f)
        seeds += [seed for seed in opened_secrets(f, number).values() if seed is not None]
    bits = np.unpackbits(np.frombuffer(b"".join(seeds), dtype=np.uint8).reshape(len(seeds), -1), 1)
    constant = (bits == bits[0]).all(axis=0).sum()
    return f.vectors[f.names[0]] if constant or len(set(seeds)) < len(seeds) else None


def little_randomness(f):
    """Fewer bytes are drawn from the system than seeds and shares need."""
    drawn, real = [], secrets.token_bytes
    with mock.patch.object(secrets, "token_bytes", lambda n: drawn.append(n) or real(n)):
        f.deliver(ADVERTISE, f.names[0], {"number": 0})
    return f.vectors[f.names[0]] if sum(drawn) < KEY_BYTES else None


class NoOwnMask(MaskingClient):
    def _mask(self, *given, **fields):
        with mock.patch.object(masking, "add_masks", lambda v, k: masks.add_masks(v, list(k)[1:])):
            return super()._mask(*given, **fields)


class NoPairMasks(MaskingClient):
    def _mask(self, *given, **fields):
        with mock.patch.object(masking, "add_masks", lambda v, k: masks.add_masks(v, list(k)[:1])):
            return super()._mask(*given, **fields)


class SameMaskKey(MaskingClient):
    kept = None

    def _advertise(self, run, number):
        reply = super()._advertise(run, number)
        self.kept = self._round.mask = self.kept or self._round.mask
        return {**reply, "keys": np.frombuffer(self._round.public, dtype=np.uint8)}


class AnswersTwice(MaskingClient):
    def answer(self, stage, run, request, contribute):
        before = self._round
        reply = super().answer(stage, run, request, contribute)
        if stage is UNMASK:
            self._round, before.answered = before, self._after[UNMASK.name]
        return reply


class SendsBothShares(MaskingClient):
    def _unmask(self, round_, **request):
        super()._unmask(round_, **request)
        return {"shares": np.stack([round_.held[member] for member in round_.members])}


def no_question():
    real = masking.context_of
    return mock.patch.object(masking, "context_of", lambda cohort, m, q: real(cohort, m, b""))


def no_agreement():
    real = masking.cohort_digest

    def mutant(run, number, rules, keys, identities):
        return real(run, number, replace(rules, agreement=b""), keys, identities)

    return mock.patch.object(masking, "cohort_digest", mutant)


def no_cohort():
    def mutant(run, number, rules, keys, identities):
        return digest(run.encode(), number.to_bytes(8), rules.agreement)

    return mock.patch.object(masking, "cohort_digest", mutant)


def small_seeds():
    real = secrets.token_bytes

    def mutant(size):
        return real(4) + bytes(28) if size == KEY_BYTES else real(size)

    return mock.patch.object(secrets, "token_bytes", mutant)


def stretched_seeds():
    real = secrets.token_bytes

    class Stretched:
        @staticmethod
        def token_bytes(size):
            return digest(secrets.token_bytes(4)) if size == KEY_BYTES else real(size)

    return mock.patch.object(masking, "secrets", Stretched)


def one_nonce():
    return mock.patch.object(masks, "_nonce", lambda sender, receiver: bytes(12))


def shipped():
    return contextlib.nullcontext()


MUTANTS = {
    "without its own mask": (NoOwnMask, shipped, late_vector),
    "without pair masks": (NoPairMasks, shipped, opened_seed),
    "with the mask key of the round before": (SameMaskKey, shipped, survive_then_drop),
    "without the question in the context": (MaskingClient, no_question, ask_others_for_nothing),
    "without the agreement in the context": (MaskingClient, no_agreement, mix_specs),
    "without the cohort in the context": (MaskingClient, no_cohort, mix_cohorts),
    "that opens twice": (AnswersTwice, shipped, ask_twice),
    "that sends both shares": (SendsBothShares, shipped, both_halves),
    "with seeds of 32 bits": (MaskingClient, small_seeds, few_seeds),
    "with seeds grown from 32 bits": (MaskingClient, stretched_seeds, little_randomness),
    "with one nonce for both directions": (MaskingClient, one_nonce, same_pad_twice),
    "that takes its own envelopes back": (MaskingClient, one_nonce, reflect),
}


def attacked(client_class, mutation, attack):
    """Whether an attack gets at the victim's vector."""
    texts, real = [], shamir.split

    def split(*given):
        texts.append(real(*given))
        return texts[-1]

    f = Federation(5, 3, client_class=client_class, length=8, seed=5)
    f.seen_texts = texts
    victim = f.vectors[f.names[0]].copy()
    with mutation(), mock.patch.object(shamir, "split", split):
        found = attack(f)
    return found is not None and np.array_equal(found.view(np.int64), victim)


@pytest.mark.parametrize("name", MUTANTS)
def test_an_attack_reads_the_vector_of_a_client(name):
    assert attacked(*MUTANTS[name])


@pytest.mark.parametrize("name", MUTANTS)
def test_and_no_vector_of_the_shipped_clients(name):
    assert not attacked(MaskingClient, shipped, MUTANTS[name][2])


def uniform_under_masks(client_class):
    f = Federation(
        3,
        2,
        client_class=client_class,
        vectors={f"client {i}": np.zeros(3000, int) for i in range(3)},
    )
    attempted(f)
    return all(
        byte_uniformity(f.replies[0, MASK, n]["masked"].tobytes()) > UNLIKELY for n in f.names
    )


def test_uniformity_is_lost_without_any_mask():
    class NoMasks(MaskingClient):
        def _mask(self, *given, **fields):
            with mock.patch.object(masking, "add_masks", lambda vector, keys: None):
                return super()._mask(*given, **fields)

    assert uniform_under_masks(MaskingClient)
    assert not uniform_under_masks(NoMasks)


def test_two_rounds_are_told_from_one_by_masks_that_are_used_again():
    """Equal keys and equal questions would give equal masks: the difference would be zero."""

    class Frozen(MaskingClient):
        frozen = None

        def _advertise(self, run, number):
            reply = super()._advertise(run, number)
            if self.frozen is None:
                self.frozen = self._round.mask, self._round.seed
            self._round.mask, self._round.seed = self.frozen
            return {
                **reply,
                "keys": np.frombuffer(self._round.public, dtype=np.uint8),
                "commitment": np.frombuffer(digest(self._round.seed), dtype=np.uint8),
            }

    def constant(run, number, rules, keys, identities):
        return digest(rules.agreement)

    def difference(client_class, mutation):
        f = Federation(3, 2, client_class=client_class, length=500)
        with mutation:
            f.total()
            f.total()
        one, other = (f.replies[i, MASK, f.names[0]]["masked"] for i in range(2))
        return byte_uniformity((one - other).tobytes())

    assert difference(Frozen, mock.patch.object(masking, "cohort_digest", constant)) < UNLIKELY
    assert difference(Frozen, shipped()) > UNLIKELY
    assert difference(MaskingClient, shipped()) > UNLIKELY


# Noise that protects the difference of two sums.

X_SPEC = PrivacySpec(
    epsilon=2.0,
    delta=1e-6,
    ranges=[(-1, 1)] * 2,
    protection="masking",
    min_survivors=9,
    colluders=1,
    public_size=20,
)
CENTERS = np.random.default_rng(7).uniform(-1, 1, (150, 2))
CELL_QUERY = CellSums(CENTERS, 1.0, 0.7)
SHARE_OF_BUDGET = 0.25


class Noisy:
    """A federation whose vectors are real contributions, charged to a ledger."""

    def __init__(self, n, spec=X_SPEC, sampler="secure"):
        self.spec, self.n = spec, n
        survivors = spec.honest_survivors + spec.colluders
        self.federation = Federation(n, survivors, colluders=spec.colluders)
        self.federation.length = CELL_QUERY.coordinates
        self.ledger = Ledger.create(None, epsilon=10.0, delta=1e-6)
        self.records, self.exact, self.noise = {}, {}, {}
        rng = np.random.default_rng(3)
        for name in self.federation.names:
            self.records[name] = rng.uniform(-1, 1, (20, 2))
            outlet = Releases(name, spec, self.ledger, sampler)
            self.federation.contributors[name] = self.contributor(name, outlet)

    def contributor(self, name, outlet):
        def contribute(question, n_clients):
            number = self.federation.number
            noisy = outlet.contribute(
                CELL_QUERY,
                self.records[name],
                SHARE_OF_BUDGET,
                n_clients=n_clients,
                run=RUN,
                step=number,
                message="cells",
            )
            grid = self.grid(n_clients)
            exact = flat(exact_sum(CELL_QUERY, self.records[name], self.spec, grid).fields)
            self.exact[number, name] = exact * 2.0**grid.exponent
            self.noise[number, name] = (flat(noisy.fields) - exact) * 2.0**grid.exponent
            anchor = outlet.anchor
            return flat(noisy.fields), {"ledger_rows": anchor.rows, "ledger_head": anchor.head}

        return contribute

    def grid(self, n_clients):
        limit = Limit.of(*self.spec.target())
        return SumGrid.of(CELL_QUERY, self.spec, limit, SHARE_OF_BUDGET, n_clients)

    def opened(self, lost=()):
        """One round: its sum in real terms, its survivors, and the noise that is claimed."""
        self.federation.lost = list(lost)
        total = self.federation.total(largest=1 << 62)
        grid = self.grid(total.n_clients)
        return total.steps * 2.0**grid.exponent, total.survivors, grid.sigma * 2.0**grid.exponent


def flat(fields):
    return np.concatenate([np.ravel(field) for field in fields.values()])


def same_noise_every_time(noisy):
    """A sampler that gives each client the noise it had before; clients come in order."""
    known, calls = {}, []

    def sampler(sigma, size):
        name = noisy.federation.asked_of[-1][0]
        calls.append(name)
        if name not in known:
            known[name] = np.random.default_rng(len(known)).normal(0, 1, size)
        return np.rint(sigma * known[name]).astype(np.int64)

    return mock.patch.object(mechanism, "secure_noise", sampler)


@pytest.mark.parametrize("stage", [ADVERTISE, SHARE, MASK], ids=lambda stage: stage.name)
def test_two_sums_that_differ_by_one_client_hide_it_behind_the_claimed_noise(stage):
    noisy = Noisy(10)
    everybody, _, sigma = noisy.opened()
    gone = noisy.federation.names[4]
    others, survivors, sigma_again = noisy.opened([(stage, gone)])
    assert set(survivors) == set(noisy.federation.names) - {gone}
    assert sigma_again == pytest.approx(sigma, rel=1e-2)
    exact = noisy.exact[0, gone]
    difference = everybody - others
    # What the server knows best is still as far off as one release would be, and more.
    spread = np.std(difference - exact)
    assert spread >= sigma
    assert spread == pytest.approx(sigma * math.sqrt((10 + 9) / 8), rel=0.2)


def test_the_same_noise_in_both_rounds_would_give_the_client_away():
    """The control: a third of the noise would be left, that of the client itself."""
    noisy = Noisy(10)
    gone = noisy.federation.names[4]
    with same_noise_every_time(noisy):
        everybody, _, sigma = noisy.opened()
        others, *_ = noisy.opened([(MASK, gone)])
    spread = np.std(everybody - others - noisy.exact[0, gone])
    assert spread == pytest.approx(0.354 * sigma, rel=0.2)


def test_a_retry_after_an_abort_draws_new_noise_and_is_charged_again():
    noisy = Noisy(10)
    names = noisy.federation.names
    with pytest.raises(AggregationAborted):
        noisy.opened([(UNMASK, name) for name in names[:2]])
    rows = noisy.ledger.rows()
    assert [row.charge.client for row in rows] == names
    gone = names[4]
    others, *_ = noisy.opened([(MASK, gone)])
    after = noisy.ledger.rows()
    assert [row.hash for row in after[:10]] == [row.hash for row in rows]
    assert len(after) == 20
    mu = Limit.of(*X_SPEC.target()).mu
    for name in names:
        assert noisy.ledger.totals(name).mu == pytest.approx(mu * math.sqrt(2 * SHARE_OF_BUDGET))
        one, other = (noisy.noise[number, name] for number in range(2))
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.3
    # Even if the aborted round's vectors were known in full, but for their noise.
    aborted = sum(noisy.exact[0, name] + noisy.noise[0, name] for name in names)
    sigma = noisy.grid(10).sigma * 2.0 ** noisy.grid(10).exponent
    assert np.std(aborted - others - noisy.exact[0, gone]) >= sigma


# Shares of the noise.


@pytest.mark.parametrize(("n", "least", "colluders"), [(6, 4, 1), (5, 4, 0), (7, 5, 3)])
def test_the_fewest_survivors_less_the_colluders_carry_the_claimed_noise(n, least, colluders):
    spec = replace(X_SPEC, min_survivors=least, colluders=colluders)
    noisy = Noisy(n, spec, sampler="secure" if colluders == 1 else "fast")
    names = noisy.federation.names
    left = []
    for number in range(3):
        found, survivors, sigma = noisy.opened([(MASK, name) for name in names[least:]])
        assert len(survivors) == least
        known = sum(noisy.exact[number, name] for name in survivors)
        known = known + sum(noisy.noise[number, name] for name in survivors[:colluders])
        left.append((found - known) / sigma)
    squares = np.square(left).sum()
    assert squares >= chi2.ppf(UNLIKELY, np.size(left))
    assert squares <= chi2.isf(UNLIKELY, np.size(left))


def test_a_client_finds_its_noise_from_its_own_spec_whatever_the_server_sends():
    """In units of the sensitivity; the grid is all that the size of the cohort can change."""
    used = []

    def sampler(sigma, size):
        used.append(sigma)
        return np.zeros(size, dtype=np.int64)

    limit = Limit.of(*X_SPEC.target())
    X = np.random.default_rng(0).uniform(-1, 1, (20, 2))
    with mock.patch.object(mechanism, "secure_noise", sampler):
        for n_clients in (3, 9, 100, 4096):
            for radius in (0.01, 1.0, 50.0):
                for share in (0.01, 0.1):
                    for step in (0, 7, 1 << 40):
                        ledger = Ledger.create(None, epsilon=10.0, delta=1e-6)
                        outlet = Releases("a", X_SPEC, ledger)
                        query = CellSums(CENTERS[:3], radius, 0.7)
                        noisy = outlet.contribute(
                            query, X, share, n_clients=n_clients, run=RUN, step=step, message="m"
                        )
                        real = query.sensitivity("add_remove").value
                        wanted = real / (limit.mu * math.sqrt(share * 8))
                        found = math.ldexp(used[-1], noisy.exponent)
                        assert found == pytest.approx(wanted, rel=2e-3)
                        assert noisy.sigma == used[-1]
                        [row] = ledger.rows()
                        assert row.charge.sigma == pytest.approx(math.sqrt(8) * used[-1])
                        assert row.charge.inputs["min_survivors"] == 9
                        assert row.charge.inputs["colluders"] == 1


def test_nothing_that_a_masking_round_says_changes_a_clients_noise():
    """Number, members, and how many take part: the question's grid may change, the noise not."""
    found = []
    for n, number, lost in ((9, 0, ()), (12, 5, (3,)), (30, 1 << 40, (2, 3, 20))):
        noisy = Noisy(n, sampler="fast")
        f = noisy.federation
        f.number = number
        noisy.opened([(SHARE, f.names[i]) for i in lost])
        name = f.names[0]
        [row] = noisy.ledger.rows(name)
        grid = noisy.grid(n)
        found.append(math.ldexp(row.charge.sigma, grid.exponent))
        assert row.charge.inputs["min_survivors"] == 9
    assert found == pytest.approx(found[:1] * 3, rel=2e-3)


def test_a_charge_stands_when_noise_cannot_be_drawn():
    noisy = Noisy(10)
    fails = mock.Mock(side_effect=ProtocolError("no randomness"))
    with mock.patch.object(mechanism, "secure_noise", fails), pytest.raises(AggregationAborted):
        noisy.opened()
    assert [row.charge.client for row in noisy.ledger.rows()] == noisy.federation.names
    assert fails.call_count == 10


def test_the_charge_comes_before_the_noise():
    noisy, order = Noisy(10, sampler="fast"), []
    real_charge, real_noise = noisy.ledger.charge, mechanism.fast_noise
    noisy.ledger.charge = lambda *a, **k: order.append("charge") or real_charge(*a, **k)
    with mock.patch.object(
        mechanism, "fast_noise", lambda s, n: order.append("noise") or real_noise(s, n)
    ):
        noisy.opened()
    assert order == ["charge", "noise"] * 10


def test_nothing_is_charged_before_all_else_is_in_order():
    """Bad envelopes, too few members: refused before anything is drawn."""
    noisy = Noisy(10)
    f = noisy.federation

    def on_request(stage, name, request):
        if stage is MASK:
            sealed = request["sealed"].copy()
            sealed[3, 3] ^= 1
            sealed[4, 3] ^= 1
            return {**request, "sealed": sealed}
        return request

    f.on_request = on_request
    with pytest.raises(AggregationAborted):
        noisy.opened()
    assert not noisy.ledger.rows()


# Through sessions and engines.

NAMES = [f"site {i}" for i in range(6)]
SESSION_QUERY = CellSums(np.array([[0.5, 0.5], [-0.5, -0.5]]), 1.0, 0.7)


@pytest.fixture
def no_noise(monkeypatch):
    monkeypatch.setattr(mechanism, "fast_noise", lambda sigma, size: np.zeros(size, np.int64))


def session_of(spec, faults=(), client_class=SeedingClient):
    """A session over real clients, and the clients."""
    ledger = Ledger.create(None, epsilon=10.0, delta=1e-6)
    ends = client_ends(spec, NAMES)
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


@each_mode
@pytest.mark.parametrize("kind", ["drop", "corrupt", "truncate", "delay"])
@pytest.mark.parametrize("at", range(5))
@pytest.mark.filterwarnings("ignore::secure_fedclust.FederationWarning")
def test_faults_of_an_engine_leave_exact_sums_over_those_that_are_left(no_noise, active, kind, at):
    n_stages = 5 if active else 4
    if at >= n_stages:
        return
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


@each_mode
@pytest.mark.parametrize("at", range(5))
@pytest.mark.filterwarnings("ignore::secure_fedclust.FederationWarning")
def test_one_fault_too_many_aborts_and_the_next_round_works(no_noise, active, at):
    n_stages = 5 if active else 4
    if at >= n_stages:
        return
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
        replies = real(requests)
        rows = len(ledger.rows())
        for name, request in requests.items():
            assert members[name].handle(request) == replies[name]
        assert len(ledger.rows()) == rows
        sent.update(requests)
        return replies

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
            lambda stage, requests, bounds: session._ask(
                stage, requests, dict.fromkeys(requests, bounds)
            ),
            NAMES,
            Question(session.run, 0, question, 6, lambda n: 1 << 40),
        )

    if what is None:  # the control
        assert total().survivors == tuple(NAMES)
        return
    with pytest.raises(AggregationAborted):
        total()
    assert not ledger.rows()


# Secrets stay where they are.


def secrets_of(client):
    """Every secret that a client holds now."""
    round_ = client._round
    found = [round_.seed, round_.mask.private_bytes_raw(), round_.channel.private_bytes_raw()]
    found += list(round_.channels.values())
    found += [held.tobytes() for held in round_.held.values()]
    if client._identity is not None:
        found.append(client._identity._key.private_bytes_raw())
    return found


def holds(text, secret):
    """Whether a text has a secret in one of the ways in which it could be written."""
    ways = [secret.hex(), repr(secret)[2:-1], repr(list(secret))[1:-1]]
    ways += [repr(np.frombuffer(secret, dtype=kind))[7:60] for kind in (np.uint8, np.uint16)]
    ways.append(str(int.from_bytes(secret, "little")))
    ways.append(secret.decode("latin-1"))
    return any(way in text or way[:16] in text for way in ways if len(way) >= 16)


def test_the_search_for_secrets_finds_them():
    secret = secrets.token_bytes(32)
    for text in (secret.hex(), repr(secret), f"x{list(secret)}", secret.decode("latin-1")):
        assert holds(text, secret)
    assert not holds(secrets.token_bytes(32).hex(), secret)


@each_mode
def test_no_representation_error_or_log_holds_a_secret(active, caplog):
    caplog.set_level(logging.DEBUG)
    f = Federation(5, 4, active=active)
    f.total()
    texts, held = [], []

    def on_request(stage, name, request):
        client = f.clients[name]
        if stage is not ADVERTISE:
            held.extend(secrets_of(client))
            texts.extend([repr(client), str(client), repr(client._round), str(client._round)])
            texts.append(repr(client._identity) + str(client._identity))
        for at, is_active, tell, _ in lie.all.values():
            if at is stage and is_active == active and name == f.names[0]:
                f.requests[1, stage, name] = request
                try:
                    f.deliver(stage, name, tell(World(f, request)))
                except ProtocolError as error:
                    while error is not None:
                        texts.append(f"{error!r} {error}")
                        error = error.__cause__ or error.__context__
        return request

    f.on_request = on_request
    assert is_exact(f, f.total())
    assert len(texts) > 60
    text = "\n".join([*texts, caplog.text])
    assert not any(holds(text, secret) for secret in set(held))


def test_keys_of_a_round_are_gone_when_it_is_over():
    f = Federation(3, 2)
    f.total()
    for client in f.clients.values():
        assert client._round is None
        assert not [each for each in gc.get_referents(client) if isinstance(each, masking._Round)]
