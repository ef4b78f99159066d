"""Rounds of encrypted sums: exact sums, stages in their order, what is seen, kept and exchanged."""

import base64
import inspect
import json
import shutil
import tracemalloc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import tenseal as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from secure_fedclust import ParameterError, PrivacySpec, ProtocolError
from secure_fedclust.errors import AggregationAborted
from secure_fedclust.messages import KEY_HOLDER, read_envelope
from secure_fedclust.privacy import ckks
from secure_fedclust.privacy.ckks import Aggregator, Encryptor, KeyHolder
from secure_fedclust.privacy.ckks_parameters import Parameters
from secure_fedclust.privacy.ckks_round import (
    Ckks,
    CkksClient,
    IssuedKey,
    KeyHolding,
    OneKeyHolder,
    Opening,
)
from secure_fedclust.privacy.ckks_stages import (
    ENCRYPT,
    KEY,
    OPEN,
    TAKE,
    asked_text,
    certified_text,
    opening_text,
    round_text,
    sealed_text,
    taken_text,
)
from secure_fedclust.privacy.cohort import Rules
from secure_fedclust.privacy.identity import Identity
from secure_fedclust.privacy.secure_sum import Contribution, Question
from secure_fedclust.protocols.key_holder import KeyHolderParty
from secure_fedclust.protocols.session import Session

from .ckks_federation import (
    ANCHOR,
    LITTLE,
    MUCH,
    NOT_SIGNED,
    NOT_THE_ONE,
    QUESTION,
    RUN,
    SMALL,
    Federation,
    World,
    a_channel,
    contexts_of,
    flipped,
    is_exact,
    lax,
    secret_parts,
)

# Exact sums, whoever drops out.


@st.composite
def rounds(draw):
    """A cohort, its rules, and who drops out in the first round, and where."""
    n = draw(st.integers(3, 7))
    colluders = draw(st.integers(0, n - 2))
    threshold = draw(st.integers(max(colluders + 1, 2), n))
    who = draw(st.permutations(range(n)))[: draw(st.integers(0, n - threshold + 1))]
    return n, threshold, colluders, {i: draw(st.sampled_from([TAKE, ENCRYPT])) for i in who}


@settings(max_examples=20)
@given(
    rounds(),
    st.sampled_from([1, 33, 1025, 2048, 2049]),
    st.sampled_from([LITTLE, MUCH]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_the_sum_is_exact_while_enough_are_left_and_else_nothing_is_opened(
    made, length, reach, reached, seed
):
    n, threshold, colluders, drops = made
    rng = np.random.default_rng(seed)
    vectors = rng.integers(-reach, reach, (n, length), endpoint=True)
    vectors[:, 0] = reach * rng.choice([-1, 1])
    f = Federation(n, threshold, colluders=colluders, vectors=vectors)
    f.reach = reach
    gone = {f.names[i]: stage for i, stage in drops.items()}
    if reached:
        f.lost = [(stage, name) for name, stage in gone.items()]
    else:
        f.on_reply = lambda stage, name, reply: None if gone.get(name) is stage else reply
    left = [name for name in f.names if name not in gone]
    if len(left) < threshold:
        with pytest.raises(AggregationAborted, match=f"of at least {threshold}"):
            f.total()
        assert not f.was_asked(OPEN)
        assert f.key_holder._holder.opened == -1
    else:
        total = f.total()
        assert total.survivors == tuple(left) and total.n_clients == n
        assert is_exact(f, total)
        said = f.requests[0, OPEN.name, KEY_HOLDER]
        assert (said["vectors"], said["n_clients"]) == (len(left), n)
    f.lost = []
    f.be_honest()
    total = f.total()
    assert total.survivors == tuple(f.names) and is_exact(f, total)
    # Nobody who has shown that it has the key was given it again.
    assert set(f.was_asked(TAKE, 1)) == set(gone)


@pytest.mark.parametrize("stage", [TAKE, ENCRYPT], ids=lambda stage: stage.name)
def test_as_many_as_may_drop_out_and_one_more_aborts_without_anything_opened(stage):
    for n_dropped in (2, 3):
        f = Federation(6, 4)
        gone = f.names[1 : 1 + n_dropped]
        f.lost = [(stage, name) for name in gone]
        if n_dropped == 2:
            assert is_exact(f, f.total())
            assert len(f.was_asked(OPEN)) == 1
            continue
        with pytest.raises(AggregationAborted, match=r"3 clients have .* missing: client 1") as e:
            f.total()
        said = "This sum was not begun" if stage is TAKE else "No sum was opened"
        assert said in str(e.value)
        assert not f.was_asked(OPEN)
        # Whoever could not take part any more was not asked the question.
        assert len(f.asked_of) == (0 if stage is TAKE else 6)


@pytest.mark.parametrize("silent", ["no key", "no sum", "sum lost"])
def test_without_the_key_holder_there_is_no_sum_and_the_next_round_has_one(silent):
    f = Federation()
    at = KEY if silent == "no key" else OPEN
    if silent == "sum lost":
        f.lost = [(OPEN, KEY_HOLDER)]
    else:
        f.on_reply = lambda stage, name, reply: None if stage is at else reply
    with pytest.raises(AggregationAborted, match=r"the key holder has .* charged"):
        f.total()
    assert len(f.asked_of) == (0 if at is KEY else 5)
    f.lost = []
    f.be_honest()
    assert is_exact(f, f.total())


def test_rounds_may_need_both_keys_in_turns():
    f = Federation()
    for number, reach in enumerate([LITTLE, MUCH, LITTLE, MUCH]):
        f.reach = reach
        assert is_exact(f, f.total())
        wanted = [KEY_HOLDER] if number < 2 else []
        assert f.was_asked(KEY, number) == wanted
        assert f.was_asked(TAKE, number) == (f.names if number < 2 else [])


def test_a_contribution_that_fails_costs_its_client_the_round_and_no_more():
    """E.g. when the budget does not allow it; or when it is not what the client has said."""
    too_far = np.full(6, LITTLE + 1)

    def fails(question, n_clients):
        raise ProtocolError("no budget")

    for contributor in (fails, lambda *_: Contribution(too_far, LITTLE, ANCHOR)):
        f = Federation()
        f.contributors["client 3"] = contributor
        total = f.total()
        assert "client 3" not in total.survivors and is_exact(f, total)
        sent = [stage for stage, name, _ in f.wire if name == "client 3"]
        assert sent == [TAKE.name, TAKE.name, ENCRYPT.name]
        with pytest.raises(ProtocolError, match="round 0 does not come after round 0"):
            f.deliver(ENCRYPT, "client 3", f.requests[0, ENCRYPT.name, "client 3"])
        assert f.asked_of.count(("client 3", QUESTION, 5)) == 1
        del f.contributors["client 3"]
        assert f.total().survivors == tuple(f.names)


# The stage walk.


def test_a_fresh_client_takes_a_key_before_anything_else():
    f, fresh = Federation(), Federation()
    f.total()
    for stage in (KEY, OPEN):
        with pytest.raises(ProtocolError):
            fresh.deliver(stage, "client 0", f.requests[0, stage.name, KEY_HOLDER])
    with pytest.raises(ProtocolError, match="server: this client was given no key for"):
        fresh.deliver(ENCRYPT, "client 0", f.requests[0, ENCRYPT.name, "client 0"])
    assert not fresh.asked_of
    assert is_exact(fresh, fresh.total())


def test_a_fresh_key_holder_opens_nothing_before_it_has_given_out_a_key():
    for pinned in (False, True):
        f = Federation(pinned=pinned)
        f.total()
        fresh = f.key_holder = f.new_key_holder()
        for stage in (TAKE, ENCRYPT):
            with pytest.raises(ProtocolError):
                f.deliver(stage, KEY_HOLDER, f.requests[0, stage.name, "client 0"])
        with pytest.raises(ProtocolError, match="server: it has not asked for a key in this run"):
            f.deliver(OPEN, KEY_HOLDER, f.requests[0, OPEN.name, KEY_HOLDER])
        assert fresh._holder is None


@pytest.mark.parametrize("taking_again", [False, True])
def test_a_round_is_answered_once_and_taking_a_key_again_does_not_change_that(taking_again):
    f = Federation()
    f.total(number=5)
    name = "client 1"
    sealed = f.replies[5, ENCRYPT.name, name]["sealed"]
    if taking_again:
        f.deliver(TAKE, name, f.requests[5, TAKE.name, name])
    for number in (0, 4, 5):
        asked = {**f.requests[5, ENCRYPT.name, name], "number": number}
        with pytest.raises(ProtocolError, match=f"round {number} does not come after round 5"):
            f.deliver(ENCRYPT, name, asked)
    assert len(f.asked_of) == 5
    again = f.deliver(ENCRYPT, name, {**f.requests[5, ENCRYPT.name, name], "number": 6})
    assert again["sealed"] != sealed


def test_a_key_taken_again_comes_with_a_new_channel_and_the_old_one_is_forgotten():
    f = Federation()
    f.lost = [(TAKE, "client 1")]
    assert "client 1" not in f.total().survivors
    f.lost = []
    assert f.total().survivors == tuple(f.names)
    first, second = (f.replies[number, TAKE.name, "client 1"] for number in (0, 1))
    assert first["own"] != second["own"]


def test_a_sum_is_opened_once_and_none_of_an_earlier_round():
    f = Federation()
    f.total(number=3)
    f.total(number=7)
    for number in (3, 7):
        with pytest.raises(ProtocolError, match=f"round {number} is asked for, and round 7 was"):
            f.deliver(OPEN, KEY_HOLDER, f.requests[number, OPEN.name, KEY_HOLDER])
    assert is_exact(f, f.total(number=8))


def test_a_key_holder_gives_the_same_key_for_the_same_preset_and_signs_each_channel():
    f = Federation()
    f.total()
    world = World(f, f.requests[0, KEY.name, KEY_HOLDER])
    first = f.deliver(KEY, KEY_HOLDER, world.request)
    other = f.deliver(KEY, KEY_HOLDER, world.asking(channel=a_channel()))
    assert first["key"] == other["key"] == f.replies[0, KEY.name, KEY_HOLDER]["key"]
    assert first["certificate"] != other["certificate"]
    large = f.deliver(KEY, KEY_HOLDER, world.asking(preset=1))
    assert large["key"] != first["key"]


def test_another_run_needs_other_parties():
    """Keys are fresh in every run, whoever asks for them."""
    f = Federation()
    f.total()
    asked, taken = f.requests[0, KEY.name, KEY_HOLDER], f.requests[0, TAKE.name, "client 0"]
    with pytest.raises(ProtocolError, match="run other asks"):
        f.deliver(KEY, KEY_HOLDER, World(f, asked).asking(run="other"), run="other")
    with pytest.raises(ProtocolError, match="a key of another run"):
        f.deliver(TAKE, "client 0", World(f, taken).certified(run="other"), run="other")
    with pytest.raises(ProtocolError, match="was given no key"):
        f.deliver(ENCRYPT, "client 0", f.requests[0, ENCRYPT.name, "client 0"], run="other")
    with pytest.raises(AggregationAborted, match="the key holder has sent no key"):
        f.total(run="other")
    assert len(f.asked_of) == 5
    assert is_exact(f, f.total())


def test_a_party_answers_the_same_request_with_the_same_bytes_and_no_other_at_that_step():
    f = Federation()
    f.total()
    holding = f.new_key_holder()
    party = KeyHolderParty(holding)

    def message(stage, request, step, run=RUN):
        return lax(stage).encode(request, run=run, step=step)

    world = World(f, f.requests[0, KEY.name, KEY_HOLDER])
    asked = message(KEY, world.request, 0)
    reply = party.handle(asked)
    assert party.handle(asked) == reply
    key = KEY.reply.decode(reply, run=RUN, step=0, bounds={})[0]["key"]
    parts = Encryptor(key, SMALL).encrypt(f.parameters, f.vectors["client 0"])
    opening = World(f, f.requests[0, OPEN.name, KEY_HOLDER]).opening(parts=parts)
    for step, run, match in ((0, RUN, "step 0"), (1, "other", "another run")):
        with pytest.raises(ProtocolError, match=match):
            party.handle(message(OPEN, opening, step, run))
    with pytest.raises(ProtocolError, match="does not take part in"):
        party.handle(message(TAKE, f.requests[0, TAKE.name, "client 0"], 1))
    data = message(OPEN, opening, 1)
    opened = party.handle(data)
    assert party.handle(data) == opened
    with pytest.raises(ProtocolError, match="opened already"):
        party.handle(message(OPEN, opening, 2))
    steps = OPEN.reply.decode(opened, run=RUN, step=1, bounds={})[0]["steps"]
    np.testing.assert_array_equal(steps, f.vectors["client 0"])


# What the parties see.


def big_federation(**given):
    rng = np.random.default_rng(1)
    sizes = rng.integers(1 << 34, 1 << 35, (5, 6))
    f = Federation(vectors=sizes * rng.choice([-1, 1], sizes.shape), **given)
    f.reach = 1 << 35
    return f


def as_bytes(numbers):
    """Whole numbers as they could be seen in a message."""
    for number in np.ravel(numbers):
        for kind in ("<i8", ">i8", "<f8", ">f8"):
            yield np.array(number, dtype=kind).tobytes()
        yield str(int(number)).encode()


def test_no_message_has_a_vector_or_a_secret_in_it(tmp_path):
    f = big_federation(path=tmp_path / "keys")
    total = f.total()
    sent = [data for *_, data in f.wire]
    assert len(sent) == 2 * (1 + 5 + 5 + 1)
    for vector in f.vectors.values():
        for number in as_bytes(vector):
            assert not any(number in data for data in sent)
    # The control: the sum is there to be seen, in one message.
    for number in total.steps:
        assert [number.tobytes() in data for data in sent].count(True) == 1
    secrets = secret_parts(f.key_holder._holder._contexts[SMALL])
    [kept] = json.loads((tmp_path / "keys").read_text())["keys"].values()
    assert all(secret in base64.b64decode(kept) for secret in secrets)  # another control
    channels = [f.channel_key(name) for name in f.names]
    secrets += [f.sum._own.private_bytes_raw(), *channels]
    everybody = [f.server, f.holder, *f.identities.values()]
    secrets += [identity._key.private_bytes_raw() for identity in everybody]
    assert not any(secret in data for secret in secrets for data in sent)
    texts = [repr(each) for each in (f.sum, f.key_holder, *f.clients.values())]
    texts += [str(client._taken) for client in f.clients.values()]
    assert not any(repr(key)[2:-1] in text for key in channels for text in texts)


def test_neither_server_nor_client_ever_holds_a_secret_key():
    f = Federation()
    adders = []

    class Watched(Aggregator):
        def add(self, client, ciphertexts):
            super().add(client, ciphertexts)
            adders.append((self, client, list(ciphertexts)))

    f.sum.aggregator_class = Watched
    f.total()
    assert len(adders) == 5
    held = contexts_of(f.sum, adders)
    assert held and not any(context.has_secret_key() for context in held)
    assert not adders[0][0]._context.has_public_key()
    clients = contexts_of(*f.clients.values())
    assert clients and not any(context.has_secret_key() for context in clients)
    # The control: it can be found where it is.
    assert any(context.has_secret_key() for context in contexts_of(f.key_holder))


def test_what_the_server_unseals_it_cannot_read():
    f = Federation()
    f.total()
    [part] = f.unsealed("client 0")
    for context in (f.clients["client 1"]._taken[0].encryptor._context, server_context(f)):
        with pytest.raises((ValueError, RuntimeError)):
            ts.ckks_vector_from(context, part).decrypt()


def server_context(f):
    return f.sum.aggregator_class(f.parameters, ckks.keyless(f.parameters.preset))._context


def test_a_key_holder_that_listens_on_the_wire_cannot_read_a_vector_but_with_the_server_it_can():
    f = Federation()
    f.total()
    secret = f.key_holder._holder._contexts[SMALL]
    for name in f.names:
        reply = f.replies[0, ENCRYPT.name, name]
        for data in (reply["sealed"], reply["sealed"][:-16]):
            with pytest.raises((ValueError, RuntimeError)):
                ts.ckks_vector_from(secret, data)
        # The control, and what it means that the two do not work together.
        [part] = f.unsealed(name)
        found = np.rint(ts.ckks_vector_from(secret, part).decrypt()[: f.length])
        np.testing.assert_array_equal(found, f.vectors[name])


def test_equal_vectors_do_not_look_equal():
    f = Federation(vectors=[np.full(6, 7)] * 5)
    f.total()
    f.total()
    sent = [reply["sealed"] for (_, stage, _), reply in f.replies.items() if stage == ENCRYPT.name]
    assert len({data[i : i + 64] for data in sent for i in range(0, 4096, 64)}) == 10 * 64
    opened = [f.unsealed(name, number)[0] for name in f.names for number in (0, 1)]
    assert len({part[-64:] for part in opened}) == 10


def test_no_two_vectors_of_a_client_are_sealed_with_the_same_key_stream():
    """What is known of them, where they begin alike, would show where they differ."""
    f = Federation()
    f.total()
    f.total()
    for name in f.names:
        first, second = (f.replies[number, ENCRYPT.name, name]["sealed"] for number in (0, 1))
        assert first[:8] != second[:8]
        [[one], [other]] = f.unsealed(name, 0), f.unsealed(name, 1)
        assert one[:8] == other[:8]  # the control


# Memory.


class LazyEngine:
    """Reaches the parties of a federation, one after the other."""

    def __init__(self, federation, watch):
        self.f, self.watch = federation, watch

    @property
    def clients(self):
        return self.f.names

    def exchange(self, requests):
        for name, data in requests.items():
            party = self.f.key_holder if name == KEY_HOLDER else self.f.clients[name]
            envelope = read_envelope(data)
            stage, step = party.stages[envelope.schema], envelope.step
            fields, _ = stage.request.decode(data, run=self.run, step=step, bounds=party.bounds)
            extra = () if name == KEY_HOLDER else (self.f.contribute(name),)
            reply = party.answer(stage, self.run, fields, *extra)
            self.watch(stage)
            yield name, stage.reply.encode(reply, run=self.run, step=step)


SPEC = PrivacySpec(epsilon=1.0, delta=1e-6, ranges=[(-1, 1)], protection="ckks", min_survivors=4)


def summed_lazily(n, length, watch):
    """One sum through a session, whose replies come one after the other."""
    f = Federation(n, 4, length=length)
    engine = LazyEngine(f, watch)
    session = Session(engine, SPEC, 1, f.sum)
    engine.run = session.run

    def ask(stage, requests, bounds, read=None):
        return session._ask(stage, requests, dict.fromkeys(requests, bounds), read)

    asked = Question(session.run, 0, QUESTION, length, lambda n: LITTLE, lambda n: n * LITTLE)
    total = f.sum.total(ask, f.names, asked)
    assert total.survivors == tuple(f.names) and is_exact(f, total)


def test_the_server_holds_one_running_sum_and_the_ciphertexts_of_one_client(monkeypatch):
    chunks, alive, most = 3, weakref.WeakSet(), []
    load = ckks._load

    def loading(*given):
        vector = load(*given)
        alive.add(vector)
        most.append(len(alive))
        return vector

    monkeypatch.setattr(ckks, "_load", loading)
    summed_lazily(30, chunks * SMALL.slots, lambda stage: None)
    assert len(most) == (30 + 1) * chunks
    assert max(most) == 2 * chunks


def test_what_the_server_keeps_does_not_grow_with_the_number_of_clients():
    length, n = 4 * SMALL.slots, 30
    one = Parameters(length, n, LITTLE).most_bytes
    held = []

    def watch(stage):
        if stage is ENCRYPT:
            held.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        summed_lazily(n, length, watch)
    finally:
        tracemalloc.stop()
    # When a client's reply comes the last one is still there: the message, and what was in it.
    assert len(held) == n
    assert max(held) - held[0] < 3 * one
    assert max(held[1:]) - held[1] < one / 2


# A key holder that is restarted.


def test_a_key_holder_that_was_restarted_goes_on_and_opens_nothing_again(tmp_path):
    f = Federation(path=tmp_path / "keys")
    for number in range(3):
        assert is_exact(f, f.total())
        f.key_holder = f.new_key_holder()
        assert len(f.was_asked(KEY)) == 1 and len(f.was_asked(TAKE)) == 5
        with pytest.raises(ProtocolError, match=f"round {number} was opened already"):
            f.deliver(OPEN, KEY_HOLDER, f.requests[number, OPEN.name, KEY_HOLDER])
    f.reach = MUCH
    assert is_exact(f, f.total())
    f.key_holder = f.new_key_holder()
    assert is_exact(f, f.total())


def test_a_sum_that_was_opened_and_did_not_arrive_is_lost_for_good(tmp_path):
    f = Federation(path=tmp_path / "keys")
    f.lost = [(OPEN, KEY_HOLDER)]
    with pytest.raises(AggregationAborted, match="the key holder has not opened the sum"):
        f.total()
    f.lost = []
    f.key_holder = f.new_key_holder()
    with pytest.raises(ProtocolError, match="opened already"):
        f.deliver(OPEN, KEY_HOLDER, f.requests[0, OPEN.name, KEY_HOLDER])
    assert is_exact(f, f.total())


def test_a_key_holder_without_a_file_cannot_go_on():
    f = Federation()
    f.total()
    f.key_holder = f.new_key_holder()
    with pytest.raises(AggregationAborted, match="has not opened the sum"):
        f.total()
    assert "it has not asked for a key in this run" in str(f.refusals[-1][-1])


@pytest.mark.parametrize("what", ["run", "mode", "cut", "empty", "version"])
def test_an_old_or_damaged_key_file_is_refused_and_nobody_is_asked_anything(what, tmp_path):
    path = tmp_path / "keys"
    KeyHolder("before" if what == "run" else RUN, path).public_key(SMALL)
    content = path.read_text()
    new = {"cut": content[:-10], "empty": "", "version": content.replace("keys 1", "keys 0")}
    path.write_text(new.get(what, content))
    path.chmod(0o644 if what == "mode" else 0o600)
    f = Federation(path=path)
    with pytest.raises(AggregationAborted, match="the key holder has sent no key"):
        f.total()
    [(stage, name, error)] = f.refusals
    assert (stage, name) == (KEY, KEY_HOLDER)
    message = {
        "run": f"{path} has the keys of run before, this is run run",
        "mode": "can be read by others than its owner",
        "version": "was written by another version",
    }.get(what, "is not a key file")
    with pytest.raises(ParameterError, match=message):
        raise error
    assert not f.asked_of and not f.was_asked(TAKE)
    assert path.read_text() == new.get(what, content)
    path.unlink()
    f.key_holder = f.new_key_holder()
    assert is_exact(f, f.total())


def test_a_key_holder_that_was_not_told_knows_its_server_after_a_restart(tmp_path):
    f = Federation(path=tmp_path / "keys", pinned=False)
    f.total()
    f.key_holder = f.new_key_holder()
    world = World(f, f.requests[0, KEY.name, KEY_HOLDER])
    with pytest.raises(ProtocolError, match=NOT_THE_ONE):
        f.deliver(KEY, KEY_HOLDER, world.asking(by=Identity()))
    assert is_exact(f, f.total())


def test_a_key_holder_that_is_told_who_its_server_is_serves_no_stranger_that_came_first(tmp_path):
    f = Federation(path=tmp_path / "keys", pinned=False)
    stranger, honest = Identity(), f.server
    f.server, f.sum._opening = stranger, OneKeyHolder(stranger)
    f.total()
    f.server, f.pinned = honest, True
    f.key_holder = f.new_key_holder()
    opening = World(f, f.requests[0, OPEN.name, KEY_HOLDER]).opening(by=stranger, number=1)
    with pytest.raises(ProtocolError, match="server: "):
        f.deliver(OPEN, KEY_HOLDER, opening)


# Several key holders.

BOTH = (KEY_HOLDER, "second key holder")


class TwoKeyHolders(Opening):
    """A toy: both have the whole key, and must say the same."""

    def __init__(self, identity):
        self.ends = [OneKeyHolder(identity, name) for name in BOTH]

    def key(self, ask, run, preset, channel):
        issued = [end.key(ask, run, preset, channel) for end in self.ends]
        if len({each.key for each in issued}) > 1:
            raise AggregationAborted("the key holders have different keys")
        return IssuedKey(issued[0].key, [each.certificates[0] for each in issued])

    def open(self, ask, run, number, parameters, vectors, ciphertexts):
        found = [end.open(ask, run, number, parameters, vectors, ciphertexts) for end in self.ends]
        if not np.array_equal(*found):
            raise AggregationAborted("the key holders do not agree")
        return found[0]


class TwoHolders(Federation):
    """Two key holders that have the same key, and clients that want a signature of each."""

    def __init__(self, folder):
        path = folder / "first"
        KeyHolder(RUN, path).public_key(SMALL)
        shutil.copy(path, folder / "second")
        super().__init__(path=path)
        self.second_identity = Identity()
        self.second = KeyHolding(
            self.rules, self.second_identity, self.server.public, folder / "second"
        )
        wanted = [self.holder.public, self.second_identity.public]
        self.clients = {
            name: CkksClient(self.rules, self.identities[name], wanted) for name in self.names
        }
        publics = {name: identity.public for name, identity in self.identities.items()}
        self.sum = Ckks(self.rules, TwoKeyHolders(self.server), publics)

    def deliver(self, stage, name, request, run=RUN):
        if name != BOTH[1]:
            return super().deliver(stage, name, request, run)
        first, self.key_holder = self.key_holder, self.second
        try:
            return super().deliver(stage, KEY_HOLDER, request, run)
        finally:
            self.key_holder = first


def test_two_key_holders_can_be_put_behind_the_seam(tmp_path):
    f = TwoHolders(tmp_path)
    for _ in range(2):
        assert is_exact(f, f.total())
    for stage in (KEY, OPEN):
        assert set(f.was_asked(stage)) == set(BOTH)
    assert f.second._holder.opened == f.key_holder._holder.opened == 1


def test_of_two_key_holders_both_must_open(tmp_path):
    f = TwoHolders(tmp_path)
    for lost in BOTH:
        f.lost = [(OPEN, lost)]
        with pytest.raises(AggregationAborted, match=f"the {lost} has not opened the sum"):
            f.total()
    f.lost = []
    f.on_reply = lambda stage, name, reply: (
        {"steps": reply["steps"] + 1} if (stage, name) == (OPEN, BOTH[1]) else reply
    )
    with pytest.raises(AggregationAborted, match="do not agree"):
        f.total()
    f.be_honest()
    assert is_exact(f, f.total())


CERTIFICATES = {
    "the first alone": lambda a, b: a,
    "the second alone": lambda a, b: b,
    "the first twice": lambda a, b: a + a,
    "the second twice": lambda a, b: b + b,
    "in another order": lambda a, b: b + a,
    "a third": lambda a, b: a + b + a,
    "one damaged": lambda a, b: a + flipped(b),
}


@pytest.mark.parametrize("name", CERTIFICATES)
def test_a_client_that_wants_two_signatures_takes_no_key_with_others(name, tmp_path):
    f = TwoHolders(tmp_path)

    def on_request(stage, party, request):
        if stage is TAKE:
            both = request["certificates"]
            request = {**request, "certificates": CERTIFICATES[name](both[:64], both[64:])}
        return request

    f.on_request = on_request
    with pytest.raises(AggregationAborted, match="0 clients have taken the key"):
        f.total()
    assert len(f.refusals) == 5 and all(NOT_SIGNED in str(error) for *_, error in f.refusals)
    assert not f.asked_of
    f.be_honest()
    assert is_exact(f, f.total())


def test_clients_that_know_one_key_holder_do_not_take_a_key_of_two(tmp_path):
    f = TwoHolders(tmp_path)
    f.clients["client 0"] = CkksClient(f.rules, f.identities["client 0"], [f.holder.public])
    assert f.total().survivors == tuple(f.names[1:])


def test_neither_client_nor_key_holder_works_for_more_clients_than_were_asked(tmp_path):
    f = Federation(6, path=tmp_path / "keys.json")
    fewer, name = replace(f.rules, most_clients=5), "client 2"
    f.clients[name] = CkksClient(fewer, f.identities[name], [f.holder.public])
    assert name not in f.total().survivors
    [(_, who, error)] = f.refusals
    assert who == name
    assert "a cohort of 6 clients, where 5 were asked" in str(error)
    f.rules = fewer
    f.key_holder = f.new_key_holder()
    with pytest.raises(AggregationAborted):
        f.total(number=2)
    assert "a cohort of 6 clients, where 5 were asked" in str(f.refusals[-1][-1])


def test_a_client_must_know_some_key_holder():
    with pytest.raises(ParameterError, match="key_holders is empty"):
        CkksClient(Rules(4, 1), Identity(), [])


# What is signed.

TEXTS = {
    asked_text: ({"run": "a", "preset": 0, "channel": b"c"}, {"preset": 1}),
    certified_text: (
        {"run": "a", "agreement": b"s", "preset": 0, "key": b"k", "channel": b"c"},
        {"preset": 1},
    ),
    taken_text: ({"certified": b"c", "own": b"o"}, {}),
    round_text: (
        {"run": "a", "number": 1, "parameters": Parameters(6, 5, 9), "question": b"q"},
        {"number": 2, "parameters": Parameters(6, 5, 8)},
    ),
    sealed_text: ({"round_": b"r", "anchor": ANCHOR}, {"anchor": {**ANCHOR, "ledger_rows": 1}}),
    opening_text: (
        {
            "run": "a",
            "number": 1,
            "parameters": Parameters(6, 5, 9),
            "vectors": 4,
            "ciphertexts": [b"x", b"y"],
        },
        {
            "number": 2,
            "parameters": Parameters(5, 5, 9),
            "vectors": 5,
            "ciphertexts": [b"xy"],
        },
    ),
}


@pytest.mark.parametrize("make", TEXTS, ids=lambda make: make.__name__)
def test_what_is_signed_or_sealed_is_told_by_everything_that_it_is_bound_to(make):
    given, others = TEXTS[make]
    assert list(given) == list(inspect.signature(make).parameters)
    found = {make(**given)}
    for name, value in given.items():
        other = others[name] if name in others else value + type(value)(value[:1])
        found.add(make(**given | {name: other}))
    assert len(found) == len(given) + 1


def test_a_client_that_has_lost_the_key_is_given_it_again():
    f = Federation(4, 2)
    f.total()
    name = f.names[1]
    f.clients[name]._taken.clear()  # as a process that was started anew
    assert name not in f.total().survivors
    assert f.total().survivors == tuple(f.names)
