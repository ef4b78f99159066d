"""Servers, clients and key holders that do not keep to the protocol of encrypted sums."""

import json
import struct
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tenseal as ts
from tenseal import sealapi

from secure_fedclust import ParameterError, ProtocolError
from secure_fedclust.errors import AggregationAborted
from secure_fedclust.messages import KEY_HOLDER
from secure_fedclust.privacy import ckks
from secure_fedclust.privacy.ckks import Encryptor, KeyHolder
from secure_fedclust.privacy.ckks_parameters import PRESETS, Parameters
from secure_fedclust.privacy.ckks_stages import (
    ENCRYPT,
    KEY,
    MOST_KEY,
    OPEN,
    TAKE,
    certified_text,
    cut,
    joined,
    taken_text,
)
from secure_fedclust.privacy.cohort import LARGEST_COHORT
from secure_fedclust.privacy.identity import Identity
from secure_fedclust.privacy.masks import digest, public_key
from secure_fedclust.privacy.secure_sum import MAX_QUESTION, Contribution

from .ckks_federation import (
    ANCHOR,
    LARGE,
    LITTLE,
    LOW_ORDER,
    MUCH,
    NOT_FOR_THIS,
    NOT_SIGNED,
    NOT_THE_ONE,
    RUN,
    SMALL,
    STAGES,
    Federation,
    World,
    a_channel,
    contexts_of,
    flipped,
    is_exact,
    secret_parts,
)

# Lies of a server.


class Lies:
    """One lie for each name: a function of the world in which it is told."""

    def __init__(self):
        self.all = {}

    def __call__(self, stage, match, run=RUN):
        def add(function):
            name = f"{stage.name}: {function.__name__.replace('_', ' ')}"
            assert name not in self.all
            self.all[name] = (stage, function, match, run)
            return function

        return add


lie = Lies()


@lie(KEY, NOT_FOR_THIS)
def asked_with_a_signature_of_somebody_else(world):
    return world.with_(signature=world.asking(by=Identity())["signature"])


@lie(KEY, NOT_THE_ONE)
def asked_by_somebody_else(world):
    return world.asking(by=Identity())


@lie(KEY, NOT_THE_ONE)
def asked_by_a_client(world):
    return world.asking(by=world.f.identities["client 0"])


@lie(KEY, NOT_FOR_THIS)
def asked_with_a_signature_bit_flipped(world):
    return world.with_(signature=flipped(world.request["signature"], 17))


@lie(KEY, NOT_FOR_THIS)
def asked_with_a_channel_changed_on_the_way(world):
    return world.with_(channel=a_channel())


@lie(KEY, NOT_FOR_THIS)
def asked_with_a_preset_changed_on_the_way(world):
    return world.with_(preset=0)


@lie(KEY, NOT_FOR_THIS)
def asked_with_a_signature_for_another_run(world):
    return world.signed_for(world.asking, run="other")


@lie(KEY, NOT_FOR_THIS)
def asked_with_a_signature_for_an_opening(world):
    return world.with_(signature=world.f.requests[0, OPEN.name, KEY_HOLDER]["signature"])


@lie(KEY, "server: run other asks for the keys of run run; they are fresh in every run", "other")
def asked_for_in_another_run(world):
    return world.asking(run="other")


@lie(KEY, "field 'preset' is not a whole number from 0 to 1")
def asked_for_a_preset_that_is_none(world):
    return world.asking(preset=2)


@lie(KEY, "dimension 'channel' is 31")
def asked_with_a_channel_too_short(world):
    return world.asking(channel=a_channel()[:31])


@lie(TAKE, NOT_SIGNED)
def a_key_signed_by_the_server(world):
    return world.certified(by=world.f.server)


@lie(TAKE, NOT_SIGNED)
def a_key_signed_by_nobody(world):
    return world.with_(certificates=bytes(64))


@lie(TAKE, NOT_SIGNED)
def a_key_with_a_signature_bit_flipped(world):
    return world.with_(certificates=flipped(world.request["certificates"], 60))


@lie(TAKE, NOT_SIGNED)
def a_key_signed_for_another_run(world):
    return world.signed_for(world.certified, run="other")


@lie(TAKE, NOT_SIGNED)
def a_key_signed_for_another_spec(world):
    return world.signed_for(world.certified, agreement=b"another spec")


@lie(TAKE, NOT_SIGNED)
def a_key_signed_for_another_server(world):
    return world.signed_for(world.certified, channel=a_channel())


@lie(TAKE, NOT_SIGNED)
def a_key_signed_for_another_preset(world):
    return world.signed_for(world.certified, preset=0)


@lie(TAKE, NOT_SIGNED)
def a_certificate_of_another_key(world):
    return world.signed_for(world.certified, key=KeyHolder(RUN).public_key(LARGE))


@lie(TAKE, NOT_SIGNED)
def a_certificate_of_the_round_before(world):
    before = world.f.requests[0, TAKE.name, "client 0"]["certificates"]
    return world.with_(certificates=before)


@lie(TAKE, NOT_SIGNED)
def a_key_of_the_server(world):
    return world.with_(key=KeyHolder(RUN).public_key(LARGE))


@lie(TAKE, NOT_SIGNED)
def a_key_bit_flipped(world):
    return world.with_(key=flipped(world.request["key"], 50_000))


@lie(TAKE, NOT_SIGNED)
def a_channel_of_somebody_in_the_middle(world):
    return world.with_(channel=a_channel())


@lie(TAKE, NOT_SIGNED)
def a_preset_of_another_key(world):
    return world.with_(preset=0)


@lie(TAKE, NOT_SIGNED)
def two_certificates_where_one_is_due(world):
    return world.with_(certificates=2 * world.request["certificates"])


@lie(TAKE, "dimension 'certificates' is 0")
def no_certificate(world):
    return world.with_(certificates=b"")


@lie(TAKE, "dimension 'certificates' is 63")
def a_certificate_too_short(world):
    return world.with_(certificates=world.request["certificates"][:-1])


@lie(TAKE, "server: it gives out a key of another run than the last one", "other")
def a_key_of_another_run(world):
    return world.certified(run="other", key=KeyHolder("other").public_key(LARGE))


@lie(TAKE, "key holder: it gives out a second key in one run")
def a_second_key_in_one_run(world):
    return world.certified(preset=0, key=KeyHolder(RUN).public_key(SMALL))


@lie(TAKE, "not a public key for")
def a_key_for_another_preset_that_is_signed_for_this_one(world):
    return world.certified(key=world.f.requests[0, TAKE.name, "client 0"]["key"])


@lie(TAKE, "not a public key")
def bytes_that_are_no_key_though_signed(world):
    return world.certified(key=np.random.default_rng(0).bytes(130_000))


@lie(TAKE, "a public key of 1000 bytes")
def a_short_key_though_signed(world):
    return world.certified(key=world.request["key"][:1000])


@lie(TAKE, "at most")
def a_key_that_comes_with_its_secret_though_signed(world):
    context = world.f.key_holder._holder._contexts[LARGE]
    return world.certified(key=ckks._serialized(context, secret=True))


@lie(TAKE, "at most|dimension 'key'")
def a_key_too_large_to_be_one(world):
    return world.certified(key=bytes(MOST_KEY + 1))


@lie(TAKE, "field 'preset'")
def a_key_for_a_preset_that_is_none(world):
    return world.certified(preset=2)


@lie(ENCRYPT, "round 0 does not come after round 0")
def the_number_of_the_round_before(world):
    return world.with_(number=0)


@lie(ENCRYPT, "field 'number'")
def a_number_below_zero(world):
    return world.with_(number=-1)


@lie(ENCRYPT, "a cohort of 1 clients")
def a_cohort_of_one(world):
    return world.with_(n_clients=1)


@lie(ENCRYPT, "a cohort of 2 clients")
def a_cohort_of_two(world):
    return world.with_(n_clients=2)


@lie(ENCRYPT, "min_survivors=4 of 3 clients")
def a_cohort_below_min_survivors(world):
    return world.with_(n_clients=3)


@lie(ENCRYPT, "field 'n_clients'")
def a_cohort_above_the_limit(world):
    return world.with_(n_clients=LARGEST_COHORT + 1)


@lie(ENCRYPT, "was given no key", "other")
def a_question_of_another_run(world):
    return world.request


@lie(ENCRYPT, "field 'preset'")
def a_question_for_a_preset_that_is_none(world):
    return world.with_(preset=2)


@lie(ENCRYPT, "at most|dimension 'bytes'")
def a_question_without_end(world):
    return world.with_(question=bytes(MAX_QUESTION + 1))


@lie(OPEN, r"server: a sum of 3 vectors of 5, .* sums of 4 or more \(min_survivors\)")
def fewer_vectors_than_must_survive(world):
    return world.opening(vectors=3)


@lie(OPEN, "server: a sum of 1 vectors of 5")
def one_vector(world):
    return world.opening(vectors=1)


@lie(OPEN, "server: a sum of 6 vectors of 5")
def more_vectors_than_clients(world):
    return world.opening(vectors=6)


@lie(OPEN, "field 'vectors'")
def no_vectors(world):
    return world.opening(vectors=0)


@lie(OPEN, "server: a cohort of 2 clients")
def vectors_of_two_clients(world):
    return world.opening(n_clients=2, vectors=2)


@lie(OPEN, "server: min_survivors=4 of 3 clients")
def vectors_of_fewer_clients_than_must_survive(world):
    return world.opening(n_clients=3, vectors=3)


@lie(OPEN, "field 'n_clients'")
def vectors_of_more_clients_than_there_may_be(world):
    return world.with_(n_clients=LARGEST_COHORT + 1, vectors=LARGEST_COHORT + 1)


@lie(OPEN, NOT_FOR_THIS)
def opening_signed_by_somebody_else(world):
    return world.opening(by=Identity())


@lie(OPEN, NOT_FOR_THIS)
def opening_signed_by_the_key_holder(world):
    return world.opening(by=world.f.holder)


@lie(OPEN, NOT_FOR_THIS)
def opening_signed_by_a_client(world):
    return world.opening(by=world.f.identities["client 0"])


@lie(OPEN, NOT_FOR_THIS)
def opening_with_a_signature_bit_flipped(world):
    return world.with_(signature=flipped(world.request["signature"], 3))


@lie(OPEN, NOT_FOR_THIS)
def opening_signed_for_another_run(world):
    return world.signed_for(world.opening, run="other")


@lie(OPEN, NOT_FOR_THIS)
def opening_signed_for_another_round(world):
    return world.signed_for(world.opening, number=7)


@lie(OPEN, NOT_FOR_THIS)
def opening_signed_for_fewer_vectors(world):
    return world.signed_for(world.opening, vectors=4)


@lie(OPEN, NOT_FOR_THIS)
def opening_signed_for_more_clients(world):
    return world.signed_for(world.opening, n_clients=6)


@lie(OPEN, NOT_FOR_THIS)
def opening_signed_for_another_length(world):
    return world.signed_for(world.opening, length=5)


@lie(OPEN, NOT_FOR_THIS)
def opening_signed_for_another_reach(world):
    return world.signed_for(world.opening, reach=MUCH - 1)


@lie(OPEN, NOT_FOR_THIS)
def opening_signed_for_other_ciphertexts(world):
    other = world.parts()
    other[0] = flipped(other[0], -1)
    return world.signed_for(world.opening, parts=other)


@lie(OPEN, NOT_FOR_THIS)
def ciphertexts_changed_on_the_way(world):
    return world.with_(ciphertexts=flipped(world.request["ciphertexts"], 40_000))


@lie(OPEN, "server: run other asks for the keys of run run", "other")
def an_opening_of_this_run_in_another(world):
    return world.request


@lie(OPEN, "server: run other asks for the keys of run run", "other")
def an_opening_in_another_run(world):
    return world.opening(run="other")


@lie(OPEN, "round 0 is asked for, and round 0 was opened already")
def a_round_that_was_opened(world):
    return world.opening(number=0)


@lie(OPEN, "round 0 is asked for, and round 0 was opened already")
def the_very_request_of_the_round_before(world):
    return world.f.requests[0, OPEN.name, KEY_HOLDER]


@lie(OPEN, "aggregator: not one ciphertext of 2048 numbers at scale")
def a_reach_that_does_not_fit_the_ciphertexts(world):
    return world.opening(reach=MUCH // 4)


@lie(OPEN, "aggregator: not one ciphertext of 2048 numbers at scale")
def clients_that_do_not_fit_the_ciphertexts(world):
    return world.opening(n_clients=10)


@lie(OPEN, "aggregator: a ciphertext of .* bytes, those of")
def a_preset_that_does_not_fit_the_ciphertexts(world):
    return world.opening(reach=LITTLE)


@lie(OPEN, "aggregator: 1 ciphertexts, a vector of 2049 numbers has 3")
def a_length_that_does_not_fit_the_ciphertexts(world):
    return world.opening(length=2049)


@lie(OPEN, "server: a sum of 5 vectors of numbers up to .* encryption has room for")
def a_reach_for_which_there_is_no_room(world):
    return world.with_(reach=1 << 50)


@lie(OPEN, "field 'reach'")
def a_reach_of_nothing(world):
    return world.with_(reach=0)


@lie(OPEN, "field 'length'")
def a_length_of_nothing(world):
    return world.with_(length=0)


@lie(OPEN, "aggregator: 2 ciphertexts, a vector of 6 numbers has 1")
def one_ciphertext_too_many(world):
    return world.opening(parts=2 * world.parts())


@lie(OPEN, "aggregator: 2 ciphertexts")
def one_ciphertext_cut_in_two(world):
    [part] = world.parts()
    return world.opening(parts=[part[:50], part[50:]])


@lie(OPEN, "aggregator: a ciphertext of 50000 bytes")
def a_ciphertext_cut_short(world):
    return world.opening(parts=[world.parts()[0][:50_000]])


@lie(OPEN, "aggregator: not one ciphertext of")
def bytes_that_are_no_ciphertext(world):
    return world.opening(parts=[np.random.default_rng(0).bytes(88_000)])


@lie(OPEN, "aggregator: not one ciphertext of")
def what_a_client_has_sealed(world):
    sealed = world.f.replies[1, ENCRYPT.name, "client 0"]["sealed"]
    return world.opening(parts=[sealed])


@lie(OPEN, "aggregator: not one ciphertext of 2048 numbers at scale")
def a_ciphertext_of_fewer_numbers(world):
    context = world.f.clients["client 0"]._taken[1].encryptor._context
    part = ts.ckks_vector(context, [1.0] * 6, world.f.parameters.scale).serialize()
    return world.opening(parts=[part])


@lie(OPEN, "server: ciphertexts of .* bytes, and .* were sent")
def sizes_that_are_not_those_of_the_ciphertexts(world):
    return world.with_(sizes=world.request["sizes"] - 1)


@lie(OPEN, "field 'sizes' holds values below 0")
def sizes_below_zero(world):
    whole = len(world.request["ciphertexts"])
    return world.with_(sizes=np.array([whole + 7, -7]))


@lie(OPEN, "dimension 'ciphertexts' is 0")
def nothing_to_open(world):
    return world.with_(sizes=np.array([0]), ciphertexts=b"")


def state(f, name):
    """Everything that a request could change at a party."""
    if name == KEY_HOLDER:
        keys = f.key_holder._holder
        return keys.aggregator, keys.run, keys.opened, keys.has_forgotten, list(keys._contexts)
    client = f.clients[name]
    return dict(client._taken), client._run, client._last


@pytest.mark.parametrize("name", lie.all)
def test_a_lying_server_is_refused_and_learns_nothing(name):
    """Nothing is contributed, opened or kept on account of the lie, and the round goes on."""
    at, tell, match, run = lie.all[name]
    f = Federation()
    f.total()
    f.reach = MUCH  # for which keys are asked for anew
    told = []

    def on_request(stage, party, request):
        if stage is at and party in ("client 0", KEY_HOLDER):
            f.requests[1, stage.name, party] = request
            told.append(stage)
            before = state(f, party), len(f.asked_of)
            with pytest.raises(ProtocolError, match=match):
                f.deliver(stage, party, tell(World(f, request)), run)
            assert (state(f, party), len(f.asked_of)) == before
        return request

    f.on_request = on_request
    total = f.total()
    assert told == [at] and not f.refusals
    assert total.survivors == tuple(f.names) and is_exact(f, total)


def test_what_the_lies_are_made_of_is_accepted_where_it_is_true():
    """They are refused for what they say, not for how they are signed."""
    f = Federation()
    f.total()
    asked, taken = f.requests[0, KEY.name, KEY_HOLDER], f.requests[0, TAKE.name, "client 0"]
    assert World(f, asked).asking() == asked
    assert World(f, taken).certified() == taken
    encryptor = Encryptor(taken["key"], SMALL)
    parts = encryptor.encrypt(f.parameters, f.vectors["client 0"])
    opening = World(f, f.requests[0, OPEN.name, KEY_HOLDER]).opening(number=1, parts=parts)
    found = f.deliver(OPEN, KEY_HOLDER, opening)["steps"]
    # And this is why the number of vectors is the server's word: it was one, and five were said.
    np.testing.assert_array_equal(found, f.vectors["client 0"])


@pytest.mark.parametrize("channel", LOW_ORDER, ids=lambda key: key[:1].hex() + key[-1:].hex())
def test_a_channel_that_anybody_could_read_is_not_taken_though_it_is_signed(channel):
    f = Federation()
    f.total()
    f.reach = MUCH
    told = []

    def on_request(stage, name, request):
        if stage is TAKE and name == "client 0":
            before = state(f, name)
            with pytest.raises(ProtocolError, match="server: its key is none to agree"):
                f.deliver(stage, name, World(f, request).certified(channel=channel))
            assert state(f, name) == before
            told.append(name)
        return request

    f.on_request = on_request
    assert f.total().survivors == tuple(f.names) and told


def test_without_a_key_for_it_no_sum_of_other_parameters_is_opened_or_encrypted():
    f = Federation()
    f.total()
    opening = World(f, f.requests[0, OPEN.name, KEY_HOLDER]).opening(number=1, reach=MUCH)
    with pytest.raises(ProtocolError, match="key holder: nobody was given a key for"):
        f.deliver(OPEN, KEY_HOLDER, opening)
    asked = {**f.requests[0, ENCRYPT.name, "client 0"], "number": 1, "preset": 1}
    with pytest.raises(ProtocolError, match="server: this client was given no key for"):
        f.deliver(ENCRYPT, "client 0", asked)
    assert len(f.asked_of) == 5
    assert is_exact(f, f.total())


def test_a_preset_that_does_not_fit_the_question_is_seen_before_anything_is_sent():
    """The client has contributed by then, and is charged: what a sum needs it works out itself."""
    f = Federation()
    f.total()
    f.reach = MUCH
    f.total()
    asked = {**f.requests[1, ENCRYPT.name, "client 0"], "number": 2, "preset": 0}
    with pytest.raises(ProtocolError, match="the sum needs"):
        f.deliver(ENCRYPT, "client 0", asked)
    assert len(f.asked_of) == 11
    assert is_exact(f, f.total(number=3))


def goes_on_or_is_over(f):
    """After something was refused: the next round has its sum, or there are no keys any more."""
    f.be_honest()
    if not f.key_holder._holder.has_forgotten:
        total = f.total()
        assert total.survivors == tuple(f.names) and is_exact(f, total)
        return
    is_over(f)


def is_over(f):
    for reach in (LITTLE, MUCH):
        f.reach = reach
        with pytest.raises(AggregationAborted, match="the key holder has"):
            f.total()
        assert "the keys of run run were thrown away" in str(f.refusals[-1][-1])
    assert not contexts_of(f.key_holder)


@pytest.mark.parametrize("place", [0.0, 0.02, 0.25, 0.5, 0.75, 0.98])
@pytest.mark.parametrize("bit", [1, 0x80])
def test_a_damaged_sum_that_the_server_signs_is_not_given_out(place, bit):
    """Either it is no ciphertext, or what comes out is no sum; and then no other is opened."""
    f = Federation()
    f.total()

    def on_request(stage, name, request):
        if stage is not OPEN:
            return request
        world = World(f, request)
        [part] = world.parts()
        return world.opening(parts=[flipped(part, int(place * len(part)), bit)])

    f.on_request = on_request
    with pytest.raises(AggregationAborted, match="the key holder has not opened the sum"):
        f.total()
    [(stage, name, error)] = f.refusals
    assert (stage, name) == (OPEN, KEY_HOLDER)
    assert f.key_holder._holder.has_forgotten == ("is no sum of clients' vectors" in str(error))
    goes_on_or_is_over(f)


# Whom a key holder serves.


def test_whoever_asks_first_is_the_server_of_a_key_holder_that_was_not_told():
    f = Federation(pinned=False)
    f.total()
    world = World(f, f.requests[0, KEY.name, KEY_HOLDER])
    with pytest.raises(ProtocolError, match=NOT_THE_ONE):
        f.deliver(KEY, KEY_HOLDER, world.asking(by=Identity()))
    with pytest.raises(ProtocolError, match=NOT_FOR_THIS):
        request = World(f, f.requests[0, OPEN.name, KEY_HOLDER]).opening(by=Identity(), number=1)
        f.deliver(OPEN, KEY_HOLDER, request)
    assert is_exact(f, f.total())


def test_who_does_not_sign_rightly_is_not_taken_for_the_first():
    f = Federation(pinned=False)
    stranger, request = Identity(), {"preset": 0, "channel": a_channel()}
    asked = World(f, request).asking(by=stranger)
    for wrong in ({"signature": bytes(64)}, {"channel": a_channel()}):
        with pytest.raises(ProtocolError, match=NOT_FOR_THIS):
            f.deliver(KEY, KEY_HOLDER, {**asked, **wrong})
    assert is_exact(f, f.total())


# Those who have agreed on something else.


def test_a_client_with_another_spec_takes_no_key_and_is_left_out():
    f = Federation(5, 4, agreements={"client 1": b"another spec"})
    total = f.total()
    assert set(total.survivors) == set(f.names) - {"client 1"} and is_exact(f, total)
    assert "client 1" not in {name for name, *_ in f.asked_of}
    [(stage, name, error)] = f.refusals
    assert (stage, name) == (TAKE, "client 1") and NOT_SIGNED in str(error)


@pytest.mark.parametrize("who", ["key holder", "server"])
def test_a_key_holder_or_a_server_with_another_spec_gets_no_answers(who):
    f = Federation()
    other = replace(f.rules, agreement=b"another spec")
    if who == "server":
        f.sum.rules = other
    else:
        f.key_holder.rules = other
    with pytest.raises(AggregationAborted, match="0 clients have taken the key"):
        f.total()
    assert not f.asked_of and not f.was_asked(ENCRYPT)
    match = "client .: it has agreed on another privacy spec" if who == "server" else NOT_SIGNED
    for *_, error in f.refusals:
        with pytest.raises(ProtocolError, match=match):
            raise error


@pytest.mark.parametrize("n", [1, 2, LARGEST_COHORT + 1])
def test_cohorts_that_protect_nobody_are_refused_before_anybody_is_asked(n):
    f = Federation()
    f.names = [f"client {i}" for i in range(n)]
    with pytest.raises(ParameterError, match=f"a cohort of {n} clients"):
        f.total()
    assert not f.requests


def test_a_sum_that_fits_no_parameters_or_no_message_is_refused_before_anybody_is_asked():
    f = Federation()
    f.reach = 1 << 45
    with pytest.raises(ParameterError, match="encryption has room for"):
        f.total()
    f.reach, f.length = LITTLE, 1 << 22
    with pytest.raises(ParameterError, match="more than a message holds"):
        f.total()
    assert not f.requests


# Wrong clients.

CULPRIT = "client 2"


def changed(**given):
    return lambda f, reply: {**reply, **given}


def change(field, how):
    return lambda f, reply: {**reply, field: how(reply[field])}


def signed(by, **given):
    """An answer to a key with other fields, signed by somebody for what is in it."""

    def wrong(f, reply):
        said = {**reply, **given}
        identity = {"culprit": f.identities[CULPRIT], "stranger": Identity()}.get(by)
        identity = identity or f.identities[by]
        asked = f.requests[f.number, TAKE.name, CULPRIT]
        fields = (asked[name] for name in ("preset", "key", "channel"))
        text = taken_text(certified_text(RUN, b"the spec", *fields), said["own"])
        return {**said, "identity": identity.public, "signature": identity.sign(text)}

    return wrong


def before(stage):
    return lambda f, reply: f.replies[0, stage.name, CULPRIT]


def of_another(stage, *fields):
    def wrong(f, reply):
        other = f.replies[f.number, stage.name, "client 1"]
        return {**reply, **{name: other[name] for name in fields or reply}}

    return wrong


def encrypted(f, *, key=None, parameters=None, vector=None):
    preset = (parameters or f.parameters).preset
    key = key or f.requests[f.number, TAKE.name, CULPRIT]["key"]
    given = f.vectors[CULPRIT] if vector is None else vector
    return Encryptor(key, preset).encrypt(parameters or f.parameters, given)


def sealing(make, **bound):
    """Other ciphertexts, sealed as the culprit would."""
    return lambda f, reply: f.sealed(CULPRIT, make(f), **bound)


def at_another_scale(f):
    return encrypted(f, parameters=Parameters(f.length, 5, f.reach // 2))


def of_another_size(f):
    context = f.clients[CULPRIT]._taken[1].encryptor._context
    return [ts.ckks_vector(context, [1.0] * 100, f.parameters.scale).serialize()]


def of_the_other_preset(f):
    key = f.requests[0, TAKE.name, CULPRIT]["key"]
    small = Encryptor(key, SMALL).encrypt(Parameters(f.length, 5, LITTLE), f.vectors[CULPRIT])
    return [small[0] + bytes(10_000)]


def random_bytes(f):
    return [np.random.default_rng(0).bytes(88_000)]


CHANGED_ON_THE_WAY = "client 2: what it sent was changed on the way, or was made for another"
NOT_ITS_SIGNATURE = "client 2: its answer is not signed by the client of that name"
WRONG = {
    "another spec": (TAKE, changed(agreement=digest(b"other")), "client 2: it has agreed on anoth"),
    "agreement too short": (TAKE, changed(agreement=b""), "dimension 'agreement' is 0"),
    "own key changed": (TAKE, change("own", flipped), NOT_ITS_SIGNATURE),
    "own key too short": (TAKE, change("own", lambda x: x[:-1]), "dimension 'own' is 31"),
    "own key of the round before": (
        TAKE,
        lambda f, reply: {**reply, "own": f.replies[0, TAKE.name, CULPRIT]["own"]},
        NOT_ITS_SIGNATURE,
    ),
    "all of the round before": (TAKE, before(TAKE), NOT_ITS_SIGNATURE),
    "own key of another": (TAKE, of_another(TAKE, "own"), NOT_ITS_SIGNATURE),
    "own key and signature of another": (
        TAKE,
        of_another(TAKE, "own", "signature"),
        NOT_ITS_SIGNATURE,
    ),
    "all of another": (TAKE, of_another(TAKE), NOT_ITS_SIGNATURE),
    "identity of another": (TAKE, of_another(TAKE, "identity"), NOT_ITS_SIGNATURE),
    "signed by another": (TAKE, signed("client 1"), NOT_ITS_SIGNATURE),
    "signed by a stranger": (TAKE, signed("stranger"), NOT_ITS_SIGNATURE),
    "signature bit-flipped": (TAKE, change("signature", flipped), NOT_ITS_SIGNATURE),
    "signature missing": (TAKE, changed(signature=b""), "dimension 'signature' is 0"),
    "identity none": (TAKE, changed(identity=bytes(32)), NOT_ITS_SIGNATURE),
    "vector bit-flipped first": (ENCRYPT, change("sealed", flipped), CHANGED_ON_THE_WAY),
    "vector bit-flipped in the middle": (
        ENCRYPT,
        change("sealed", lambda x: flipped(x, len(x) // 2, 0x40)),
        CHANGED_ON_THE_WAY,
    ),
    "vector bit-flipped last": (
        ENCRYPT,
        change("sealed", lambda x: flipped(x, -1)),
        CHANGED_ON_THE_WAY,
    ),
    "vector bit-flipped before its tag": (
        ENCRYPT,
        change("sealed", lambda x: flipped(x, -17)),
        CHANGED_ON_THE_WAY,
    ),
    "vector cut short": (
        ENCRYPT,
        change("sealed", lambda x: x[:-1]),
        "client 2: ciphertexts of .* bytes, and .* were sent",
    ),
    "vector cut to nothing": (ENCRYPT, changed(sealed=b""), "dimension 'sealed' is 0"),
    "vector too long": (
        ENCRYPT,
        change("sealed", lambda x: x + b"\0"),
        "client 2: ciphertexts of .* bytes, and .* were sent",
    ),
    "vector twice": (ENCRYPT, change("sealed", lambda x: 2 * x), "dimension 'sealed'|at most"),
    "sizes changed": (
        ENCRYPT,
        change("sizes", lambda x: x + 1),
        "client 2: ciphertexts of .* bytes, and .* were sent",
    ),
    "rows of its ledger changed": (ENCRYPT, changed(ledger_rows=7), CHANGED_ON_THE_WAY),
    "head of its ledger changed": (ENCRYPT, changed(ledger_head="f" * 64), CHANGED_ON_THE_WAY),
    "sizes cut in two": (
        ENCRYPT,
        change("sizes", lambda x: np.array([1, x[0] - 1])),
        "dimension 'chunks' is 2",
    ),
    "no sizes": (ENCRYPT, change("sizes", lambda x: x[:0]), "dimension 'chunks' is 0"),
    "vector of another": (ENCRYPT, of_another(ENCRYPT), CHANGED_ON_THE_WAY),
    "vector for another round": (
        ENCRYPT,
        sealing(encrypted, number=0),
        CHANGED_ON_THE_WAY,
    ),
    "vector for another run": (ENCRYPT, sealing(encrypted, run="other"), CHANGED_ON_THE_WAY),
    "vector for another question": (ENCRYPT, sealing(encrypted, text=b"?"), CHANGED_ON_THE_WAY),
    "vector among more clients": (
        ENCRYPT,
        sealing(encrypted, parameters=Parameters(6, 6, MUCH)),
        CHANGED_ON_THE_WAY,
    ),
    "vector of another reach": (
        ENCRYPT,
        sealing(encrypted, parameters=Parameters(6, 5, MUCH - 1)),
        CHANGED_ON_THE_WAY,
    ),
    "vector of another length": (
        ENCRYPT,
        sealing(encrypted, parameters=Parameters(7, 5, MUCH)),
        CHANGED_ON_THE_WAY,
    ),
    "ciphertext at another scale": (
        ENCRYPT,
        sealing(at_another_scale),
        "client 2: not one ciphertext of 2048 numbers at scale",
    ),
    "ciphertext of another size": (
        ENCRYPT,
        sealing(of_another_size),
        "client 2: not one ciphertext of 2048 numbers at scale",
    ),
    "ciphertext of the other preset": (
        ENCRYPT,
        sealing(of_the_other_preset),
        "client 2: not one ciphertext of",
    ),
    "random bytes": (ENCRYPT, sealing(random_bytes), "client 2: not one ciphertext of"),
    "ciphertext as it is": (
        ENCRYPT,
        lambda f, reply: {
            **reply,
            "sizes": np.array([len(part := encrypted(f)[0]) + 16]),
            "sealed": part + bytes(16),
        },
        CHANGED_ON_THE_WAY,
    ),
} | {
    f"own key of low order {i}": (TAKE, signed("culprit", own=key), "client 2: its key is none")
    for i, key in enumerate(LOW_ORDER)
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_client_is_left_out_and_takes_part_again_when_it_is_right(name):
    at, wrong, match = WRONG[name]
    f = Federation()
    f.total()
    f.reach = MUCH  # for which keys are taken anew
    f.on_reply = lambda stage, client, reply: (
        wrong(f, reply) if stage is at and client == CULPRIT else reply
    )
    total = f.total()
    assert set(total.survivors) == set(f.names) - {CULPRIT}
    assert is_exact(f, total)
    [(stage, client, error)] = f.refusals
    assert (stage, client) == (at, CULPRIT)
    with pytest.raises(ProtocolError, match=match):
        raise error
    f.be_honest()
    total = f.total()
    assert total.survivors == tuple(f.names) and is_exact(f, total)


def test_a_vector_of_an_earlier_round_is_not_taken_in_a_later_one():
    f = Federation()
    f.total()
    f.on_reply = lambda stage, name, reply: (
        f.replies[0, ENCRYPT.name, name] if (stage, name) == (ENCRYPT, CULPRIT) else reply
    )
    total = f.total()
    assert CULPRIT not in total.survivors and is_exact(f, total)
    [(*_, error)] = f.refusals
    assert CHANGED_ON_THE_WAY in str(error)


@pytest.mark.parametrize("field", ["number", "n_clients", "question"])
def test_a_client_that_was_asked_something_else_is_not_in_the_sum(field):
    """Whoever sits between server and client, and changes the request: the server notices."""
    f = Federation()
    f.total()
    other = {"number": 7, "n_clients": 6, "question": b"something else"}[field]
    f.on_request = lambda stage, name, request: (
        {**request, field: other} if (stage, name) == (ENCRYPT, CULPRIT) else request
    )
    total = f.total()
    assert CULPRIT not in total.survivors and is_exact(f, total)
    [(*_, error)] = f.refusals
    assert CHANGED_ON_THE_WAY in str(error)


def test_a_vector_among_other_numbers_than_its_neighbours_is_not_in_the_sum():
    """A client whose own spec gives another reach, though it has said that it agrees."""
    f = Federation()
    f.contributors[CULPRIT] = lambda *_: Contribution(f.vectors[CULPRIT], LITTLE + 1, ANCHOR)
    total = f.total()
    assert CULPRIT not in total.survivors and is_exact(f, total)


def shifted(by):
    def change_sizes(f, reply):
        sizes = reply["sizes"]
        return {**reply, "sizes": np.array([sizes[0] + by(sizes), sizes[1] - by(sizes)])}

    return change_sizes


def swapped(f, reply):
    first, second = cut(CULPRIT, reply["sizes"], reply["sealed"])
    return {**reply, "sizes": reply["sizes"][::-1], "sealed": bytes(second) + bytes(first)}


def first_twice(f, reply):
    first, _ = cut(CULPRIT, reply["sizes"], reply["sealed"])
    return {**reply, "sizes": reply["sizes"][[0, 0]], "sealed": 2 * bytes(first)}


def first_of_the_round_before(f, reply):
    old, new = f.replies[0, ENCRYPT.name, CULPRIT], reply
    first, _ = cut(CULPRIT, old["sizes"], old["sealed"])
    _, second = cut(CULPRIT, new["sizes"], new["sealed"])
    sizes, row = joined([bytes(first), bytes(second)])
    return {**reply, "sizes": sizes, "sealed": row}


@pytest.mark.parametrize(
    "wrong",
    [
        swapped,
        first_twice,
        first_of_the_round_before,
        shifted(lambda sizes: 1),
        shifted(lambda sizes: -sizes[0]),
        shifted(lambda sizes: 5 - sizes[0]),
        shifted(lambda sizes: sizes[1]),
    ],
)
def test_the_ciphertexts_of_a_long_vector_are_not_exchanged_or_cut_otherwise(wrong):
    f = Federation(length=SMALL.used + 1)
    f.total()
    f.on_reply = lambda stage, name, reply: (
        wrong(f, reply) if (stage, name) == (ENCRYPT, CULPRIT) else reply
    )
    total = f.total()
    assert CULPRIT not in total.survivors and is_exact(f, total)
    [(*_, error)] = f.refusals
    assert CHANGED_ON_THE_WAY in str(error)
    goes_on_or_is_over(f)


def culprits_context(f):
    return f.clients[CULPRIT]._taken[1].encryptor._context


def vector_of(f, place, number, scale=None):
    """Somebody's own encryption of one number, which need not be one that the client may send."""
    padded = np.zeros(f.parameters.preset.slots)
    padded[place] = number
    vector = ts.ckks_vector(culprits_context(f), padded, scale or f.parameters.scale)
    return vector.serialize()


def under_another_key(f):
    return encrypted(f, key=KeyHolder(RUN).public_key(LARGE))


def beyond_all_bounds(f):
    return [vector_of(f, 0, 1.5 * f.parameters.largest)]


def not_whole(f):
    return [vector_of(f, 3, 0.4)]


def of_another_scale_than_it_says(f):
    scale = f.parameters.scale
    return [vector_of(f, 0, 1.0, 4 * scale)[:-8] + struct.pack("<d", scale)]


def varint(number):
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def with_a_prime_less(f):
    """As sums of such are: of half the size, which is made up for by what nobody reads."""
    context = culprits_context(f)
    [inner] = ts.ckks_vector_from(context, vector_of(f, 0, 1.0)).ciphertext()
    sealapi.Evaluator(context.seal_context().data).mod_switch_to_next_inplace(inner)
    with tempfile.NamedTemporaryFile() as file:
        inner.save(file.name)
        raw = Path(file.name).read_bytes()
    slots, padding = varint(f.parameters.preset.slots), bytes(50_000)
    start = b"\x0a" + varint(len(slots)) + slots + b"\x12" + varint(len(raw)) + raw
    unread = b"\x7a" + varint(len(padding)) + padding
    return [start + unread + b"\x19" + struct.pack("<d", f.parameters.scale)]


@pytest.mark.parametrize(
    "make",
    [
        under_another_key,
        beyond_all_bounds,
        not_whole,
        with_a_prime_less,
        of_another_scale_than_it_says,
    ],
    ids=lambda make: make.__name__.replace("_", " "),
)
@pytest.mark.parametrize("culprit_first", [False, True])
def test_a_hostile_ciphertext_stops_the_round_or_is_left_out_and_never_makes_a_wrong_sum(
    make, culprit_first
):
    """What is in a ciphertext the server does not see, and the key holder sees too late."""
    f = Federation()
    if culprit_first:
        f.names.sort(key=lambda name: name != CULPRIT)
    f.total()
    f.reach = MUCH
    f.on_reply = lambda stage, name, reply: (
        sealing(make)(f, reply) if (stage, name) == (ENCRYPT, CULPRIT) else reply
    )
    try:
        total = f.total()
    except AggregationAborted as aborted:
        assert "the key holder has not opened the sum" in str(aborted)
        [(stage, name, error)] = f.refusals
        assert (stage, name) == (OPEN, KEY_HOLDER)
        assert "is no sum of clients' vectors" in str(error)
    else:
        assert CULPRIT not in total.survivors and is_exact(f, total)
        assert not f.key_holder._holder.has_forgotten
        assert make in (with_a_prime_less, of_another_scale_than_it_says)
    goes_on_or_is_over(f)


def test_a_client_is_known_by_the_key_that_it_named_first_where_none_is_registered():
    f = Federation(registered=False)
    f.total()
    f.reach = MUCH
    f.on_reply = lambda stage, name, reply: (
        signed("stranger")(f, reply) if (stage, name) == (TAKE, CULPRIT) else reply
    )
    assert CULPRIT not in f.total().survivors
    assert NOT_ITS_SIGNATURE in str(f.refusals[0][-1])
    f.be_honest()
    assert f.total().survivors == tuple(f.names)


def test_one_client_is_not_counted_twice_under_two_names_where_none_is_registered():
    """The culprit repeats what another has sent: whose records would weigh, and show, twice."""
    f = Federation(registered=False)
    f.on_reply = lambda stage, name, reply: (
        f.replies[f.number, stage.name, "client 1"]
        if stage in (TAKE, ENCRYPT) and name == CULPRIT
        else reply
    )
    try:
        total = f.total()
    except AggregationAborted:
        return
    assert is_exact(f, total)


# Wrong key holders.


def mine(f):
    return KeyHolder(RUN).public_key(SMALL)


HOLDER_WRONG = {
    "key empty": (KEY, changed(key=b""), "has sent no key"),
    "key too large": (KEY, changed(key=bytes(MOST_KEY + 1)), "has sent no key"),
    "certificate too short": (KEY, changed(certificate=b"a"), "has sent no key"),
    "certificate bit-flipped": (KEY, change("certificate", flipped), "0 clients have taken"),
    "key of somebody in the middle": (
        KEY,
        lambda f, reply: {**reply, "key": mine(f)},
        "0 clients have taken",
    ),
    "key and certificate of somebody else": (
        KEY,
        lambda f, reply: {
            "key": (key := mine(f)),
            "certificate": Identity().sign(
                certified_text(RUN, b"the spec", 0, key, public_key(f.sum._own))
            ),
        },
        "0 clients have taken",
    ),
    "key for another preset": (
        KEY,
        lambda f, reply: f.key_holder._key(
            RUN, **World(f, f.requests[0, KEY.name, KEY_HOLDER]).asking(preset=1)
        ),
        "0 clients have taken",
    ),
    "sum too short": (OPEN, change("steps", lambda x: x[:-1]), "has not opened the sum"),
    "sum too long": (OPEN, change("steps", lambda x: np.append(x, 0)), "has not opened the sum"),
    "sum empty": (OPEN, change("steps", lambda x: x[:0]), "has not opened the sum"),
    "sum out of range": (
        OPEN,
        change("steps", lambda x: x + 5 * LITTLE + 1),
        "are no sum of clients' vectors",
    ),
    "sum far out of range": (
        OPEN,
        change("steps", lambda x: np.full_like(x, -(1 << 62))),
        "are no sum of clients' vectors",
    ),
}


@pytest.mark.parametrize("name", HOLDER_WRONG)
def test_a_wrong_key_holder_stops_the_round_and_a_wrong_key_reaches_no_vector(name):
    at, wrong, match = HOLDER_WRONG[name]
    f = Federation()
    f.on_reply = lambda stage, party, reply: wrong(f, reply) if stage is at else reply
    with pytest.raises(AggregationAborted, match=match):
        f.total()
    assert len(f.asked_of) == (0 if at is KEY else 5)
    f.be_honest()
    if match == "0 clients have taken":
        # A key is asked for once in a run: this one is over.
        with pytest.raises(AggregationAborted, match="0 clients have taken"):
            f.total()
        assert all(NOT_SIGNED in str(error) for *_, error in f.refusals)
    else:
        assert is_exact(f, f.total())


def test_numbers_in_range_are_the_key_holders_word():
    """What nobody can check, and what is assumed therefore: that it keeps to the protocol."""
    f = Federation()
    f.on_reply = lambda stage, name, reply: (
        {"steps": reply["steps"] + 1} if stage is OPEN else reply
    )
    assert np.array_equal(f.total().steps, f.sum_over(f.names) + 1)


# What was no sum.


def test_keys_that_were_thrown_away_are_gone_for_good(tmp_path):
    """Whoever has sent what is no sum could learn from what is refused next."""
    f = Federation(path=tmp_path / "keys")
    f.total()
    secrets = secret_parts(f.key_holder._holder._contexts[SMALL])
    key = f.requests[0, TAKE.name, "client 0"]["key"]
    parts = [
        ts.ckks_vector(ts.context_from(key), [0.5] * SMALL.slots, f.parameters.scale).serialize()
    ]
    opening = World(f, f.requests[0, OPEN.name, KEY_HOLDER]).opening(number=1, parts=parts)
    with pytest.raises(AggregationAborted, match=r"is no sum .* The keys are thrown away"):
        f.deliver(OPEN, KEY_HOLDER, opening)
    content = json.loads((tmp_path / "keys").read_text())
    assert content["keys"] == {} and content["opened"] == 1
    assert not any(secret in (tmp_path / "keys").read_bytes() for secret in secrets)
    for _ in range(2):
        is_over(f)
        f.key_holder = f.new_key_holder()


# All of it.


def test_all_stages_are_walked_and_lied_about():
    """So that whoever adds a stage, or a field, adds lies."""
    assert {at.name for at, *_ in lie.all.values()} == {stage.name for stage in STAGES}
    assert len(PRESETS) == 2
    assert {name: set(stage.request.fields) for stage in STAGES for name in [stage.name]} == {
        "ckks/key": {"preset", "channel", "identity", "signature"},
        "ckks/take": {"preset", "key", "channel", "certificates"},
        "ckks/encrypt": {"number", "preset", "n_clients", "question"},
        "ckks/open": {
            "number",
            "length",
            "n_clients",
            "reach",
            "vectors",
            "sizes",
            "ciphertexts",
            "signature",
        },
    }
