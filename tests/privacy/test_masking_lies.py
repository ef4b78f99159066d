"""Servers and clients that do not keep to the protocol of masking, one lie after the other."""

import secrets
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from secure_fedclust import ProtocolError
from secure_fedclust.errors import AggregationAborted
from secure_fedclust.privacy import masking_stages, masks, shamir
from secure_fedclust.privacy.cohort import LARGEST_COHORT
from secure_fedclust.privacy.identity import is_signed
from secure_fedclust.privacy.masking import (
    ADVERTISE,
    CONFIRM,
    MASK,
    SHARE,
    UNMASK,
)
from secure_fedclust.privacy.masking_client import MaskingClient, _Round
from secure_fedclust.privacy.masks import KEY_BYTES

from .masking_federation import (
    NOTHING,
    QUESTION,
    RUN,
    X_SPEC,
    Federation,
    advertised,
    asks_nothing_of,
    claims_to_agree,
    each_mode,
    is_exact,
    stranger,
)

# Lies of a server.


class Lies:
    """One lie for each name: a function of the world in which it is told.

    The world has the honest request, the federation, and everything of an earlier round of the
    same clients. The lie is told to the first client.
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

    def identity(self, place):
        return self.federation.identities[self.federation.names[place]]

    def earlier(self, stage):
        return self.federation.requests[0, stage, self.me]

    def put(self, field, place, value):
        """The request with something else in one place of a field."""
        changed = self.request[field].copy()
        changed[place] = value
        return {**self.request, field: changed}

    def flip(self, field, place, bit=1):
        return self.put(field, place, self.request[field][place] ^ bit)

    def with_(self, **changed):
        changed = {
            name: np.array(value, dtype=np.int64) if isinstance(value, list) else value
            for name, value in changed.items()
        }
        return {**self.request, **changed}

    def consistent(self, told):
        """A lie whose numbers and digests fit its lists, unless it is about those."""
        told = dict(told)
        for field, derived in (("keys", of_keys), ("members", of_members), ("survivors", counted)):
            if field in told and told[field] is not self.request[field]:
                told |= {
                    name: value
                    for name, value in derived(told).items()
                    if np.array_equal(told[name], self.request[name])
                }
        return told

    def context(self, question=QUESTION, rules=None, members=range(5)):
        f = self.federation
        roster = f.requests[1, SHARE, self.me]
        everybody = masking_stages.roster_digest(roster["keys"], roster["identities"])
        cohort = masking_stages.cohort_digest(RUN, 1, rules or f.rules, 5, everybody)
        roll = masking_stages.roll_digest(np.array(members))
        return masking_stages.context_of(cohort, roll, question)

    def signed(self, context, survivors, signers=range(5)):
        """What these clients sign who were shown this."""
        text = masking_stages.confirmed_text(context, tuple(survivors))
        found = [self.identity(i).sign(text) for i in signers]
        return np.stack([np.frombuffer(each, dtype=np.uint8) for each in found])


def of_keys(told):
    digest = masking_stages.roster_digest(told["keys"], told["identities"])
    return {"n_clients": len(told["keys"]), "roster": np.frombuffer(digest, dtype=np.uint8)}


def of_members(told):
    digest = masking_stages.roll_digest(told["members"])
    return {"n_members": len(told["members"]), "roll": np.frombuffer(digest, dtype=np.uint8)}


def counted(told):
    return {"n_survivors": len(told["survivors"])} if "n_survivors" in told else {}


lie = Lies()
BOTH = "passive active"


@lie(SHARE, BOTH, "the roster is not that of the keys")
def a_roster_of_others(world):
    return world.with_(roster=world.request["roster"] ^ 1)


@lie(SHARE, BOTH, "the keys of 5 clients were shown to this one, which shares with 5 of 6")
def a_cohort_larger_than_shown(world):
    return world.with_(n_clients=6)


@lie(SHARE, BOTH, "off its place")
def a_circle_that_starts_elsewhere(world):
    return world.with_(start=1)


@lie(MASK, BOTH, "the roll is not that of the members")
def a_roll_of_others(world):
    return world.with_(roll=world.request["roll"] ^ 1)


@lie(MASK, BOTH, "4 clients are said to be left, of whom this one sees 5")
def fewer_members_than_shown(world):
    return world.with_(n_members=4)


@lie(MASK, BOTH, "6 clients are said to be left, of whom this one sees 5")
def more_members_than_shown(world):
    return world.with_(n_members=6)


@lie(UNMASK, BOTH, "6 clients are said to be left, of whom this one sees 5")
def more_survivors_than_shown(world):
    return world.with_(n_survivors=6)


@lie(SHARE, BOTH, "keys that this client has sent are not in the cohort|did not sign")
def own_key_changed(world):
    return world.flip("keys", (0, 0))


@lie(SHARE, BOTH, "keys that this client has sent are not in the cohort|did not sign")
def own_mask_key_changed(world):
    return world.flip("keys", (0, 40))


@lie(SHARE, BOTH, "not in the cohort|dimension 'circle'|different identity")
def own_row_left_out(world):
    return world.with_(keys=world.request["keys"][1:])


@lie(SHARE, BOTH, "have one key")
def two_clients_with_one_row(world):
    return world.put("keys", 2, world.request["keys"][1])


@lie(SHARE, BOTH, "have one key")
def two_clients_with_one_mask_key(world):
    return world.put("keys", (2, slice(32, 64)), world.request["keys"][1, 32:])


@lie(SHARE, BOTH, "have one key")
def two_clients_with_one_channel_key(world):
    return world.put("keys", (2, slice(0, 32)), world.request["keys"][1, :32])


@lie(SHARE, BOTH, "have one key")
def a_channel_key_as_mask_key(world):
    return world.put("keys", (2, slice(32, 64)), world.request["keys"][2, :32])


@lie(SHARE, BOTH, "have one key")
def own_channel_key_as_mask_key_of_another(world):
    return world.put("keys", (3, slice(32, 64)), world.request["keys"][0, :32])


@lie(SHARE, BOTH, "dimension 'circle'")
def cohort_of_one(world):
    return world.with_(keys=world.request["keys"][:1])


@lie(SHARE, BOTH, "dimension 'circle'")
def cohort_of_two(world):
    return world.with_(keys=world.request["keys"][:2])


@lie(SHARE, BOTH, "min_survivors=4 of 3 clients")
def cohort_below_min_survivors(world):
    return world.with_(keys=world.request["keys"][:3])


@lie(SHARE, BOTH, "dimension 'circle'|bytes")
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
    return world.put("keys", (3, slice(0, 32)), 0)


@lie(SHARE, "passive", "key of member 3 is none to agree with")
def channel_key_of_another_low_order(world):
    low = np.frombuffer((1).to_bytes(32, "little"), dtype=np.uint8)
    return world.put("keys", (3, slice(0, 32)), low)


@lie(SHARE, BOTH, "not in the cohort")
def cohort_of_an_earlier_round(world):
    return {**world.earlier(SHARE), "number": world.request["number"]}


@lie(SHARE, BOTH, "round 0 is not under way")
def number_of_an_earlier_round(world):
    return world.with_(number=0)


@lie(SHARE, "active", "did not sign")
def keys_changed_after_signing(world):
    return world.flip("keys", (3, 5))


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
    return replaced(world, 3, *advertised(world.identity(2), 1))


@lie(SHARE, "active", "did not sign")
def forged_signature(world):
    return world.flip("signatures", (4, 10))


@lie(SHARE, "active", "did not sign")
def signature_of_another_client(world):
    return world.put("signatures", [3, 4], world.request["signatures"][[4, 3]])


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
    return replaced(world, 2, *advertised(world.identity(2), 1, run="other"))


@lie(SHARE, "active", "under another identity")
def own_keys_under_the_identity_of_another(world):
    kept = [0, 1, 2, 4]
    told = {name: world.request[name][kept] for name in ("keys", "identities", "signatures")}
    told["identities"][0] = world.request["identities"][3]
    text = masking_stages.advertised_text(RUN, 1, told["keys"][0].tobytes())
    told["signatures"][0] = np.frombuffer(world.identity(3).sign(text), dtype=np.uint8)
    return world.with_(**told)


@lie(MASK, BOTH, "what member 3 sent are no shares")
def shares_that_are_no_numbers_of_the_field(world):
    key = world.federation.clients[world.me]._round.channels[3]
    sealed = masks.seal(key, 3, 0, np.full(64, shamir.PRIME, dtype="<u2").tobytes())
    return world.put("sealed", 3, np.frombuffer(sealed, dtype=np.uint8))


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
    return world.flip("sealed", (2, 17), 4)


@lie(MASK, BOTH, "what member 2 sent was changed")
def bit_flipped_in_a_tag(world):
    return world.flip("sealed", (2, -1), 4)


@lie(MASK, BOTH, "what member [23] sent was changed")
def envelopes_swapped_between_senders(world):
    return world.put("sealed", [2, 3], world.request["sealed"][[3, 2]])


@lie(MASK, BOTH, "what member 3 sent was changed")
def envelope_of_an_earlier_round(world):
    old = world.earlier(MASK)["sealed"][3]
    return world.put("sealed", 3, old)


@lie(MASK, BOTH, "what member 3 sent was changed")
def envelope_for_another_client(world):
    f = world.federation
    other = f.replies[1, SHARE, f.names[3]]["sealed"][1]
    return world.put("sealed", 3, other)


@lie(MASK, BOTH, "what member 3 sent was changed")
def envelope_reflected_to_its_sender(world):
    mine = world.federation.replies[1, SHARE, world.me]["sealed"][3]
    return world.put("sealed", 3, mine)


@lie(MASK, BOTH, "what member 3 sent was changed")
def envelope_left_empty(world):
    return world.put("sealed", 3, 0)


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
    return world.flip("signatures", (3, 3))


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
            world = World(f, request)
            with pytest.raises(ProtocolError, match=match):
                f.deliver(stage, client, world.consistent(tell(world)))
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
    assert is_signed(
        identity.tobytes(),
        signature.tobytes(),
        masking_stages.advertised_text(RUN, 1, keys.tobytes()),
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
    f.on_request = asks_nothing_of(f.names[:half])
    with pytest.raises(AggregationAborted):
        f.total(largest=1 << 30)


def test_for_a_trusted_server_it_is_the_range_that_tells():
    f = Federation(6, 4, length=3)
    f.on_request = asks_nothing_of(f.names[:3])
    with pytest.raises(AggregationAborted, match="are no sum of clients' vectors"):
        f.total(largest=1 << 30)


@each_mode
def test_clients_with_different_specs_do_not_open_a_sum(active):
    loose = {f"client {i}": b"another spec" for i in range(3)}
    f = Federation(6, 4, active=active, agreements=loose)
    with pytest.raises(AggregationAborted):
        f.total(largest=1 << 30)
    assert not f.asked_of


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

CULPRIT = "client 2"


def sends_wrong(f, at, wrong):
    """What the culprit sends in place of one reply."""

    def on_reply(stage, client, reply):
        return wrong(f, reply) if stage is at and client == CULPRIT else reply

    return on_reply


def changed(field, change):
    def wrong(f, reply):
        value = reply[field].copy()
        return {**reply, field: change(value)}

    return wrong


def flipped(value):
    value.flat[-1] ^= 1
    return value


def of_the_round_before(stage):
    return lambda f, reply: f.replies[0, stage, CULPRIT]


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
    "keys all zeros",
    "keys bit-flipped",
    "mask key of low order",
    "identity of another",
    "signature bit-flipped",
    "shares bit-flipped",
    "shares of zeros",
    "shares of another",
    "shares of the round before",
}
"""What is recognised as wrong at once, so that the round goes on without its sender."""

EACH_WRONG = [
    (name, active)
    for name, (at, _) in WRONG.items()
    for active in (False, True)
    if active or not (at is CONFIRM or name.startswith(("signature", "identity")))
]


@pytest.mark.parametrize(("name", "active"), EACH_WRONG)
def test_a_wrong_client_is_left_out_or_stops_the_round_and_never_makes_a_wrong_sum(name, active):
    at, wrong = WRONG[name]
    f = Federation(6, 4, active=active)
    f.total()
    f.on_reply = sends_wrong(f, at, wrong)
    try:
        total = f.total()
    except AggregationAborted:
        assert name not in GOES_ON
        return
    assert is_exact(f, total)
    if at in (ADVERTISE, MASK):
        assert CULPRIT not in total.survivors


@pytest.mark.parametrize("name", sorted(GOES_ON))
def test_a_reply_of_the_wrong_form_costs_its_sender_only(name):
    at, wrong = WRONG[name]
    active = at is CONFIRM or name.startswith(("signature", "identity"))
    f = Federation(6, 4, active=active)
    f.total()
    f.on_reply = sends_wrong(f, at, wrong)
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
    honest = f.clients[CULPRIT]
    f.clients[CULPRIT] = Garbage(honest.rules, honest._identity, honest._registered)
    f.clients[CULPRIT].value = value
    f.lost = [(MASK, CULPRIT)] if drops_out else []
    # Whatever comes out would be in range: it is what was sent before that tells.
    with pytest.raises(AggregationAborted):
        f.total(largest=(1 << 63) - 1)


class _LowOrderRound(_Round):
    @property
    def public(self):
        return super().public[:KEY_BYTES] + bytes(KEY_BYTES)


class LowOrder(MaskingClient):
    """Has a mask key with which everybody agrees on zero, and goes on with it."""

    def _advertise(self, run, number):
        reply = super()._advertise(run, number)
        self._round.__class__ = _LowOrderRound
        return reply | {"keys": np.frombuffer(self._round.public, dtype=np.uint8)}


def test_a_mask_key_that_others_would_refuse_costs_its_owner_only():
    f = Federation(6, 4)
    f.clients[CULPRIT] = LowOrder(f.rules)
    total = f.total()
    assert is_exact(f, total)
    assert set(total.survivors) == set(f.names) - {CULPRIT}
    assert not f.refusals


@each_mode
@pytest.mark.parametrize("liar", [0, 31, 32, 39, 40, 58])
def test_one_holder_of_wrong_shares_is_done_without_wherever_it_stands(active, liar):
    f = Federation(60, 40, active=active, length=1)
    # As few stay as leave one to spare, or all of them.
    f.lost = [(UNMASK, name) for name in f.names[41:]] if liar < 41 else []
    f.on_reply = sends_wrong_shares(f.names[liar])
    assert is_exact(f, f.total())


@each_mode
def test_one_holder_of_wrong_shares_stops_a_sum_that_nobody_can_be_spared_for(active):
    f = Federation(60, 40, active=active, length=1)
    f.lost = [(UNMASK, name) for name in f.names[40:]]
    f.on_reply = sends_wrong_shares(f.names[7])
    with pytest.raises(AggregationAborted, match="did not follow the protocol"):
        f.total()


def sends_wrong_shares(liar):
    def on_reply(stage, name, reply):
        if stage is UNMASK and name == liar:
            return {"shares": (reply["shares"] + 1) % shamir.PRIME}
        return reply

    return on_reply


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
