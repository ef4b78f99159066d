"""What a server could learn from masking, and attacks that get at it where something is missing."""

import contextlib
import gc
import logging
import secrets
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from scipy.stats import kstest

from secure_fedclust import ProtocolError
from secure_fedclust.errors import AggregationAborted
from secure_fedclust.privacy import masking, masking_client, masking_stages, masks, shamir
from secure_fedclust.privacy.cohort import Rules
from secure_fedclust.privacy.masking import ADVERTISE, MASK, SHARE, UNMASK
from secure_fedclust.privacy.masking_client import MaskingClient
from secure_fedclust.privacy.masks import KEY_BYTES, digest, pair_key, public_key

from .masking_federation import (
    RUN,
    UNLIKELY,
    Federation,
    asks_nothing_of,
    byte_uniformity,
    claims_to_agree,
    each_mode,
    is_exact,
    stranger,
)
from .test_masking_lies import World, lie

# What the server sees can be made from the sum.


def run_view(vectors, threshold, drops, active=False):
    """Everything a server sees of one round: stage, client, and reply."""
    f = Federation(len(vectors), threshold, active=active, vectors=vectors)
    f.lost = [(stage, f.names[i]) for i, stage in drops.items()]
    total = f.total(largest=1 << 62)
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


DROPS = {
    "nobody": {},
    "one before its vector": {1: SHARE},
    "one without its vector": {2: MASK},
    "one before unmasking": {3: UNMASK},
}


@each_mode
@pytest.mark.parametrize("who", DROPS)
def test_a_view_made_from_the_sum_alone_has_the_same_form(active, who):
    drops = DROPS[who]
    rng = np.random.default_rng(0)
    real = np.outer(np.arange(5), np.ones(12, dtype=np.int64))
    f, total, seen = run_view(real, 4, drops, active)
    made = simulated_vectors(total.steps, 5, drops, rng)
    g, simulated, made_seen = run_view(made, 4, drops, active)
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


def masked_vectors(n_runs, vectors):
    """Vectors under masks of several independent rounds, of shape (runs, clients, length)."""
    found = []
    for _ in range(n_runs):
        _, _, seen = run_view(vectors, 2, {})
        found.append([reply["masked"] for stage, _, reply in seen if stage is MASK])
    return np.array(found)


def test_masked_vectors_are_uniform_and_tell_real_from_simulated_by_nothing():
    real = np.zeros((3, 100), dtype=np.int64)
    real[1] = 7
    rng = np.random.default_rng(1)
    made = simulated_vectors(real.sum(axis=0), 3, {}, rng)
    for vectors in (real, made):
        masked = masked_vectors(25, vectors)
        assert byte_uniformity(masked.tobytes()) > UNLIKELY
        for place in range(3):
            assert byte_uniformity(masked[:, place].tobytes()) > UNLIKELY
        assert kstest(masked.ravel() / 2.0**64, "uniform").pvalue > UNLIKELY
        # Any two of three together, too: only the sum of all is known.
        assert byte_uniformity((masked[:, 0] + masked[:, 2]).tobytes()) > UNLIKELY
        assert byte_uniformity((masked[:, 0] - masked[:, 1]).tobytes()) > UNLIKELY


def test_differences_between_rounds_with_equal_vectors_are_uniform():
    f = Federation(3, 2, vectors=[np.full(2000, i) for i in range(3)])
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
        "n_clients": 3,
        "roster": masking_stages.roster_digest(keys, identities),
    }
    changed = {
        "run": "other",
        "number": 2,
        "rules": Rules(2, 1, b"other"),
        "n_clients": 4,
        "roster": masking_stages.roster_digest(keys + np.eye(3, 64, dtype=np.uint8), identities),
    }
    found = [masking_stages.cohort_digest(**given | {name: changed[name]}) for name in changed]
    other = given | {"roster": masking_stages.roster_digest(keys, identities[:0])}
    found.append(masking_stages.cohort_digest(**other))
    assert len({masking_stages.cohort_digest(**given), *found}) == 7


def test_a_context_is_told_by_cohort_members_and_question():
    found = {
        masking_stages.context_of(cohort, masking_stages.roll_digest(np.array(members)), question)
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


def sent_by_victim(f):
    return f.replies[0, MASK, f.names[0]]["masked"].copy()


def context_seen(f):
    """What the masks of the victim depend on in the first round."""
    roster, asked = (f.requests[0, stage, f.names[0]] for stage in (SHARE, MASK))
    everybody, roll = roster["roster"].tobytes(), asked["roll"].tobytes()
    cohort = masking_stages.cohort_digest(RUN, 0, f.rules, roster["n_clients"], everybody)
    return masking_stages.context_of(cohort, roll, asked["question"].tobytes())


def take_pair_masks_off(f, secret, vector):
    """Given the victim's mask key, where there is one."""
    if secret is None:
        return
    key, context = X25519PrivateKey.from_private_bytes(secret), context_seen(f)
    keys = f.requests[0, SHARE, f.names[0]]["keys"][:, KEY_BYTES:]
    # The victim comes first, so that it has added all masks that it shares with others.
    found = [
        (pair_key(key, keys[other].tobytes(), b"mask", context, (0, other)), -1)
        for other in f.requests[0, MASK, f.names[0]]["members"].tolist()
        if other != 0
    ]
    masks.add_masks(vector, found)


def take_own_mask_off(f, seed, vector):
    """Given the victim's seed, where there is one."""
    if seed is not None:
        masks.add_masks(vector, [(masks.own_key(seed, context_seen(f)), -1)])


def attempted(f):
    with contextlib.suppress(AggregationAborted):
        return f.total()
    return None


def late_vector(f):
    """A vector comes late: the server has said that its client dropped out, and knows its key."""
    f.lost = [(MASK, f.names[0])]
    attempted(f)
    vector = sent_by_victim(f)
    take_pair_masks_off(f, opened_secrets(f, 0)[0], vector)
    return vector


def opened_seed(f):
    """The server has opened a survivor's own mask, as it does in every round."""
    attempted(f)
    vector = sent_by_victim(f)
    take_own_mask_off(f, opened_secrets(f, 0)[0], vector)
    return vector


def survive_then_drop(f):
    """The own mask of one round, and the mask key of the next."""
    attempted(f)
    f.lost = [(MASK, f.names[0])]
    attempted(f)
    vector = sent_by_victim(f)
    take_own_mask_off(f, opened_secrets(f, 0)[0], vector)
    take_pair_masks_off(f, opened_secrets(f, 1)[0], vector)
    return vector


def ask_twice(f):
    """The same clients are asked for both secrets of a survivor, one after the other."""
    attempted(f)
    seed = opened_secrets(f, 0)[0]
    others = np.arange(1, len(f.names))
    lists = {"n_survivors": len(others), "survivors": others, "dropped": np.array([0])}
    for name in f.names[1:]:
        request = {**f.requests[0, UNMASK, name], **lists}
        f.requests[0, UNMASK, name] = request
        try:
            f.replies[0, UNMASK, name] = f.deliver(UNMASK, name, request)
        except ProtocolError:
            return None
    key = opened_secrets(f, 0)[0]
    vector = sent_by_victim(f)
    take_own_mask_off(f, seed, vector)
    take_pair_masks_off(f, key, vector)
    return vector


def both_halves(f):
    """Shares of everything in one reply."""
    attempted(f)
    secret = opened_secrets(f, 0)[0]
    if secret is None or len(secret) != 2 * KEY_BYTES:
        return None
    vector = sent_by_victim(f)
    take_own_mask_off(f, secret[KEY_BYTES:], vector)
    take_pair_masks_off(f, secret[:KEY_BYTES], vector)
    return vector


def ask_others_for_nothing(f):
    """Model inconsistency: the sum is the victim's vector if all others contribute zeros."""
    f.on_request = asks_nothing_of(f.names[1:])
    total = attempted(f)
    return None if total is None else total.steps


def mix_specs(f):
    """Others have agreed on less noise than the victim counts on."""
    for name in f.names[1:]:
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
            more = np.concatenate([request["keys"], keys[None]])
            everybody = masking_stages.roster_digest(more, request["identities"])
            told = {"n_clients": len(more), "roster": np.frombuffer(everybody, dtype=np.uint8)}
            return {**request, **told, "keys": more}
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
    texts = [f.seen_texts[i][1 - i].astype("<u2").view(np.uint8) for i in range(2)]
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


class NoMasks(MaskingClient):
    """Adds only some of its masks: its own comes first."""

    added = slice(0)

    def _mask(self, *given, **fields):
        def add_some(vector, keys):
            masks.add_masks(vector, list(keys)[self.added])

        with mock.patch.object(masking_client, "add_masks", add_some):
            return super()._mask(*given, **fields)


class NoOwnMask(NoMasks):
    added = slice(1, None)


class NoPairMasks(NoMasks):
    added = slice(1)


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


@contextlib.contextmanager
def at_both_ends(name, mutant):
    ends = (masking, masking_client)
    with contextlib.ExitStack() as stack:
        for end in ends:
            stack.enter_context(mock.patch.object(end, name, mutant))
        yield


def no_question():
    real = masking_stages.context_of
    return at_both_ends("context_of", lambda cohort, roll, question: real(cohort, roll, b""))


def no_agreement():
    real = masking_stages.cohort_digest

    def mutant(run, number, rules, n_clients, roster):
        return real(run, number, replace(rules, agreement=b""), n_clients, roster)

    return at_both_ends("cohort_digest", mutant)


def no_cohort():
    def mutant(run, number, rules, n_clients, roster):
        return digest(run.encode(), number.to_bytes(8), rules.agreement)

    return at_both_ends("cohort_digest", mutant)


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

    return mock.patch.object(masking_client, "secrets", Stretched)


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
    f = Federation(3, 2, client_class=client_class, vectors=np.zeros((3, 3000), int))
    attempted(f)
    return all(
        byte_uniformity(f.replies[0, MASK, n]["masked"].tobytes()) > UNLIKELY for n in f.names
    )


def test_uniformity_is_lost_without_any_mask():
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

    def constant(run, number, rules, n_clients, roster):
        return digest(rules.agreement)

    def difference(client_class, mutation):
        f = Federation(3, 2, client_class=client_class, length=500)
        with mutation:
            f.total()
            f.total()
        one, other = (f.replies[i, MASK, f.names[0]]["masked"] for i in range(2))
        return byte_uniformity((one - other).tobytes())

    assert difference(Frozen, at_both_ends("cohort_digest", constant)) < UNLIKELY
    assert difference(Frozen, shipped()) > UNLIKELY
    assert difference(MaskingClient, shipped()) > UNLIKELY


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
        assert not [
            each for each in gc.get_referents(client) if isinstance(each, masking_client._Round)
        ]
