"""Secure aggregation by double masking (Bonawitz et al. 2017), on a complete graph.

Each client adds to its vector one mask of its own and one for every other client, which that
client subtracts; in the sum only the clients' own masks are left. The server gets the own masks of
clients whose vectors arrived, and the pair masks of those whose did not, never both of one client,
from shares that clients hold of each other's keys. All of it lasts one round: four exchanges, or
five where the server is not trusted to keep to the protocol.

1. *Advertise*: every client makes two key pairs, one for messages to other clients and one for
   masks, and a seed for its own mask.
2. *Share*: it gets everybody's keys, and sends shares of its mask key and of its seed to everybody,
   encrypted for them.
3. *Mask*: it gets the shares for it, and the question; it sends its vector under masks.
4. *Confirm*, if the server is not trusted: it signs who has sent a vector, and the question.
5. *Unmask*: for each client it reveals one share: of the seed if the client's vector has arrived,
   of the mask key if not.

The masks of clients that were shown another question, spec or cohort do not cancel, since all of
it goes into the derivation of keys. Who is protected from whom: docs/threat_model.md; thresholds:
docs/proofs/masking.md.
"""

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from secure_fedclust.arrays import Ints
from secure_fedclust.errors import AggregationAborted, ParameterError, ProtocolError
from secure_fedclust.messages import Bounds, Stage, Values
from secure_fedclust.privacy import shamir
from secure_fedclust.privacy.cohort import Rules
from secure_fedclust.privacy.identity import SIGNATURE_BYTES, Identity, is_signed
from secure_fedclust.privacy.masking_stages import (
    ADVERTISE,
    BOUNDS,
    CONFIRM,
    MASK,
    SEALED_BYTES,
    SHARE,
    UNMASK,
    Bytes,
    advertised_text,
    cohort_digest,
    confirmed_text,
    context_of,
)
from secure_fedclust.privacy.masks import (
    KEY_BYTES,
    add_masks,
    digest,
    is_usable,
    own_key,
    pair_key,
    public_key,
    seal,
    unseal,
)
from secure_fedclust.privacy.secure_sum import (
    Ask,
    Contribute,
    Question,
    SecureSum,
    Summand,
    Total,
    check_range,
)

MOST_TRIES = 32
"""Holders that are left out, one after the other, in search of one whose shares are wrong."""


@dataclass
class _Round:
    """A client's state in one round: what only it may know, and what it was shown."""

    run: str
    number: int
    channel: X25519PrivateKey = field(repr=False)
    mask: X25519PrivateKey = field(repr=False)
    seed: bytes = field(repr=False)
    answered: Stage = ADVERTISE
    keys: list[bytes] = field(default_factory=list)
    identities: list[bytes] = field(default_factory=list)
    place: int = -1
    cohort: bytes = b""
    channels: dict[int, bytes] = field(default_factory=dict, repr=False)
    held: dict[int, shamir.Shares] = field(default_factory=dict, repr=False)
    members: tuple[int, ...] = ()
    context: bytes = b""
    survivors: tuple[int, ...] | None = None

    @property
    def public(self) -> bytes:
        return public_key(self.channel) + public_key(self.mask)


class MaskingClient(Summand):
    """A client's end: answers each stage of a round once, and in order.

    Parameters
    ----------
    rules : Rules
    identity : Identity, optional
        Needed where the server is not trusted.
    registered : set of bytes
        Public keys of all clients' identities, the client's own included.
    """

    bounds = BOUNDS

    def __init__(
        self,
        rules: Rules,
        identity: Identity | None = None,
        registered: frozenset[bytes] = frozenset(),
    ) -> None:
        if rules.active_server and (identity is None or identity.public not in registered):
            raise ParameterError(
                "active_server=True needs an identity that is among the registered ones"
            )
        self.rules = rules
        self._identity = identity
        self._registered = registered
        self._last = -1
        self._round: _Round | None = None
        self._after = {SHARE.name: ADVERTISE, MASK.name: SHARE, UNMASK.name: MASK}
        if rules.active_server:
            self._after |= {CONFIRM.name: MASK, UNMASK.name: CONFIRM}
        stages = (ADVERTISE, SHARE, MASK, CONFIRM, UNMASK)
        self.stages: Mapping[str, Stage] = {
            each.request.name: each
            for each in stages
            if each is ADVERTISE or each.name in self._after
        }

    def answer(self, stage: Stage, run: str, request: Values, contribute: Contribute) -> Values:
        """Answer one stage; a stage out of order, or of another round, is refused."""
        number = request.pop("number")
        if stage is ADVERTISE:
            return self._advertise(run, number)
        round_ = self._round
        if round_ is None or (run, number) != (round_.run, round_.number):
            raise ProtocolError(f"{stage.name}: round {number} is not under way at this client")
        if round_.answered is not self._after.get(stage.name):
            raise ProtocolError(f"{stage.name} may not be asked after {round_.answered.name}")
        if stage is SHARE:
            reply = self._share(round_, **request)
        elif stage is MASK:
            reply = self._mask(round_, **request, contribute=contribute)
        elif stage is CONFIRM:
            reply = self._confirm(round_, **request)
        else:
            reply = self._unmask(round_, **request)
            self._round = None  # its keys have served
        round_.answered = stage
        return reply

    def _advertise(self, run: str, number: int) -> Values:
        if number <= self._last:
            raise ProtocolError(f"round {number} does not come after round {self._last}")
        seed = secrets.token_bytes(KEY_BYTES)
        keys = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        round_ = self._round = _Round(run, number, *keys, seed)
        self._last = number
        identity = signature = b""
        if self._identity is not None and self.rules.active_server:
            identity = self._identity.public
            signature = self._identity.sign(advertised_text(run, number, round_.public))
        return {
            "keys": _array(round_.public),
            "commitment": _array(digest(seed)),
            "agreement": _array(digest(self.rules.agreement)),
            "identity": _array(identity),
            "signature": _array(signature),
        }

    def _share(self, round_: _Round, keys: Bytes, identities: Bytes, signatures: Bytes) -> Values:
        rows = [row.tobytes() for row in keys]
        self._check_cohort(round_, rows, identities, signatures)
        n, place = len(rows), rows.index(round_.public)
        cohort = cohort_digest(round_.run, round_.number, self.rules, keys, identities)
        channels = {
            other: pair_key(round_.channel, row[:KEY_BYTES], b"channel", cohort, (place, other))
            for other, row in enumerate(rows)
            if other != place
        }
        secret = round_.mask.private_bytes_raw() + round_.seed
        shares = shamir.split(secret, n, self.rules.min_survivors)
        sealed = np.zeros((n, SEALED_BYTES), dtype=np.uint8)
        for other, key in channels.items():
            text = shares[other].astype("<u2").tobytes()
            sealed[other] = _array(seal(key, place, other, text))
        round_.keys, round_.place, round_.cohort = rows, place, cohort
        round_.identities = [row.tobytes() for row in identities]
        round_.channels, round_.held = channels, {place: shares[place]}
        return {"sealed": sealed}

    def _mask(
        self,
        round_: _Round,
        members: Ints,
        sealed: Bytes,
        question: Bytes,
        contribute: Contribute,
    ) -> Values:
        place, n = round_.place, len(round_.keys)
        present = _places("members", members, n)
        if place not in present:
            raise ProtocolError("this client is not among the members of the round")
        self._check_number(len(present))
        held, asked = dict(round_.held), question.tobytes()
        context = context_of(round_.cohort, members, asked)
        masks = [(own_key(round_.seed, context), 1)]
        for other, envelope in zip(present, sealed, strict=True):
            if other != place:
                text = unseal(round_.channels[other], other, place, envelope.tobytes())
                held[other] = np.frombuffer(text, dtype="<u2").astype(np.uint16)
                if (held[other] >= shamir.PRIME).any():
                    raise ProtocolError(f"what member {other} sent are no shares")
                theirs = round_.keys[other][KEY_BYTES:]
                key = pair_key(round_.mask, theirs, b"mask", context, (place, other))
                masks.append((key, _sign(place, other)))
        given = contribute(asked, n)
        masked = given.vector.astype(np.int64).view(np.uint64)
        add_masks(masked, masks)
        round_.members, round_.held, round_.context = present, held, context
        return {"masked": masked, **given.anchor}

    def _confirm(self, round_: _Round, survivors: Ints) -> Values:
        round_.survivors = self._survivors(round_, survivors)
        if self._identity is None:
            raise ProtocolError("this client has no identity to sign with")
        text = confirmed_text(round_.context, round_.survivors)
        return {"signature": _array(self._identity.sign(text))}

    def _unmask(
        self,
        round_: _Round,
        survivors: Ints,
        dropped: Ints,
        signers: Ints,
        signatures: Bytes,
    ) -> Values:
        alive = self._survivors(round_, survivors)
        lost = _places("dropped", dropped, len(round_.keys))
        if set(alive) & set(lost):
            raise ProtocolError("a client is among the survivors and among the dropped")
        if set(alive) | set(lost) != set(round_.members):
            raise ProtocolError("survivors and dropped together are not the members of the round")
        if self.rules.active_server:
            self._check_confirmations(round_, alive, signers, signatures)
        # The first half opens pair masks, the second a client's own: never both of one client.
        opens = {True: slice(KEY_BYTES, None), False: slice(None, KEY_BYTES)}
        shares = [round_.held[member][opens[member in alive]] for member in round_.members]
        return {"shares": np.stack(shares)}

    def _survivors(self, round_: _Round, survivors: Ints) -> tuple[int, ...]:
        alive = _places("survivors", survivors, len(round_.keys))
        if round_.place not in alive or not set(alive) <= set(round_.members):
            raise ProtocolError("survivors are members of the round, this client among them")
        if round_.survivors is not None and alive != round_.survivors:
            raise ProtocolError("these are not the survivors that this client has confirmed")
        self._check_number(len(alive))
        return alive

    def _check_number(self, n: int) -> None:
        least = self.rules.min_survivors
        if n < least:
            raise ProtocolError(f"{n} clients are left, this one goes on from {least} only")

    def _check_cohort(
        self, round_: _Round, rows: list[bytes], identities: Bytes, signatures: Bytes
    ) -> None:
        try:
            self.rules.check(len(rows))
        except ParameterError as error:
            raise ProtocolError(str(error)) from error
        halves = {half for row in rows for half in (row[:KEY_BYTES], row[KEY_BYTES:])}
        if len(halves) != 2 * len(rows):
            raise ProtocolError("two clients of the cohort have one key")
        if round_.public not in rows:
            raise ProtocolError("the keys that this client has sent are not in the cohort")
        if not self.rules.active_server:
            return
        known = [row.tobytes() for row in identities]
        if not len(rows) == len(known) == len(set(known)):
            raise ProtocolError("the cohort needs a different identity for each client")
        for row, identity, signature in zip(rows, known, signatures, strict=True):
            if identity not in self._registered:
                raise ProtocolError("the cohort has a client that is not registered")
            text = advertised_text(round_.run, round_.number, row)
            if not is_signed(identity, signature.tobytes(), text):
                raise ProtocolError("the cohort has keys that their owner did not sign")

    def _check_confirmations(
        self, round_: _Round, alive: tuple[int, ...], signers: Ints, signatures: Bytes
    ) -> None:
        who = _places("signers", signers, len(round_.keys))
        if not set(who) <= set(alive):
            raise ProtocolError("only survivors confirm who has survived")
        self._check_number(len(who))
        text = confirmed_text(round_.context, alive)
        for member, signature in zip(who, signatures, strict=True):
            if not is_signed(round_.identities[member], signature.tobytes(), text):
                raise ProtocolError(
                    f"member {member} has not confirmed these survivors, question and cohort"
                )


class Masking(SecureSum):
    """The server's end: the exchanges of a round, and the opening of its sum.

    Parameters
    ----------
    rules : Rules
        To know beforehand what clients would refuse; they keep to their own.
    registered : mapping of client to bytes, optional
        The public key of each client's identity, where clients sign. A client with another would
        stop the others, and is left out.
    """

    def __init__(self, rules: Rules, registered: Mapping[str, bytes] | None = None) -> None:
        self.rules = rules
        self._registered = registered or {}

    def total(self, ask: Ask, clients: Sequence[str], question: Question) -> Total:
        """See `SecureSum`."""
        self.rules.check(len(clients))
        round_ = {"number": question.number}

        advertised = self._advertised(ask, clients, question)
        cohort = self.rules.enough(
            list(advertised), clients, "have sent keys that others can use", charged=False
        )
        place = {client: i for i, client in enumerate(cohort)}
        roster = self._roster(list(advertised.values()))
        sealed = ask(
            SHARE,
            dict.fromkeys(cohort, round_ | roster),
            {"n": len(cohort), "sealed": SEALED_BYTES},
        )

        members = self.rules.enough(
            [c for c in cohort if c in sealed], cohort, "have sent shares", charged=False
        )
        places = _ints(place[c] for c in members)
        requests = {
            client: round_
            | {"members": places, "question": _array(question.text)}
            | {"sealed": np.stack([sealed[c]["sealed"][place[client]] for c in members])}
            for client in members
        }
        masked = ask(MASK, requests, {"length": question.length})

        survivors = self.rules.enough(
            [c for c in members if c in masked], members, "have sent a vector"
        )
        dropped = [c for c in members if c not in masked]
        lists = {
            "survivors": _ints(place[c] for c in survivors),
            "dropped": _ints(place[c] for c in dropped),
        }
        ready, signatures = self._confirmed(ask, survivors, place, round_ | lists)
        opened = ask(
            UNMASK,
            dict.fromkeys(ready, round_ | lists | signatures),
            {"shares": len(members), "share": KEY_BYTES},
        )

        holders = self.rules.enough(
            [c for c in ready if c in opened], ready, "have sent shares that open it"
        )
        found = self._join(members, holders, place, opened, advertised, dropped)
        seen = cohort_digest(
            question.run, question.number, self.rules, roster["keys"], roster["identities"]
        )
        context = context_of(seen, places, question.text)
        steps = np.zeros(question.length, dtype=np.uint64)
        for reply in masked.values():
            steps += reply["masked"]
        add_masks(steps, _left_over(found, survivors, dropped, advertised, place, context))
        total = steps.view(np.int64)
        check_range(total, question.largest(len(cohort)))
        return Total(total, len(cohort), tuple(survivors))

    def _advertised(
        self, ask: Ask, clients: Sequence[str], question: Question
    ) -> dict[str, Values]:
        """What each client has sent, but for those that others would refuse to go on with.

        These are keys that two clients have or that nobody can agree with, another privacy spec,
        and signatures that do not fit.
        """
        signed = self.rules.active_server
        sizes: Bounds = {
            "keys": 2 * KEY_BYTES,
            "commitment": KEY_BYTES,
            "agreement": KEY_BYTES,
            "identity": KEY_BYTES if signed else 0,
            "signature": SIGNATURE_BYTES if signed else 0,
        }
        request = {"number": question.number}
        replies = ask(ADVERTISE, dict.fromkeys(clients, request), sizes)
        agreed = digest(self.rules.agreement)
        # Signatures first: who copies another's identity must not throw that client out.
        parts = {
            client: _parts(reply)
            for client, reply in replies.items()
            if reply["agreement"].tobytes() == agreed
            and (not signed or self._is_signed(client, reply, question))
        }
        times = Counter(part for each in parts.values() for part in each)
        return {
            client: replies[client]
            for client, each in parts.items()
            if all(times[part] == 1 for part in each) and all(map(is_usable, each[:2]))
        }

    def _is_signed(self, client: str, advertised: Values, question: Question) -> bool:
        keys, identity, signature = (
            advertised[name].tobytes() for name in ("keys", "identity", "signature")
        )
        known = self._registered.get(client, identity) == identity
        return known and is_signed(
            identity, signature, advertised_text(question.run, question.number, keys)
        )

    def _roster(self, replies: list[Values]) -> Values:
        """What everybody is shown of the cohort; signatures only where clients check them."""
        signed = replies if self.rules.active_server else []
        return {
            "keys": np.stack([reply["keys"] for reply in replies]),
            "identities": _stack([reply["identity"] for reply in signed], KEY_BYTES),
            "signatures": _stack([reply["signature"] for reply in signed], SIGNATURE_BYTES),
        }

    def _confirmed(
        self, ask: Ask, survivors: list[str], place: Mapping[str, int], lists: Values
    ) -> tuple[list[str], Values]:
        """Who can be asked to unmask, and what they have signed: nothing for a trusted server."""
        if not self.rules.active_server:
            return survivors, {"signers": _ints(()), "signatures": _stack([], SIGNATURE_BYTES)}
        request = {name: lists[name] for name in ("number", "survivors")}
        replies = ask(CONFIRM, dict.fromkeys(survivors, request), {"signature": SIGNATURE_BYTES})
        signers = self.rules.enough(
            [c for c in survivors if c in replies], survivors, "have confirmed who is left"
        )
        return signers, {
            "signers": _ints(place[client] for client in signers),
            "signatures": _stack([replies[c]["signature"] for c in signers], SIGNATURE_BYTES),
        }

    def _join(
        self,
        members: list[str],
        holders: list[str],
        place: Mapping[str, int],
        opened: Mapping[str, Values],
        advertised: Mapping[str, Values],
        dropped: list[str],
    ) -> dict[str, bytes]:
        """The secrets that are opened, one of each member, which must fit what it has sent before.

        One holder of wrong shares is found by leaving out one after the other, where enough are
        left without it.
        """
        least = self.rules.min_survivors
        found: dict[str, bytes] = {}
        for left_out in (None, *holders[: min(least, MOST_TRIES)]):
            some = [c for c in holders if c != left_out][:least]
            misfits = [c for c in members if c not in found]
            if not misfits or len(some) < least:
                break
            rows = [members.index(client) for client in misfits]
            secrets_ = shamir.join(
                shamir.weights([place[client] + 1 for client in some]),
                np.stack([opened[client]["shares"][rows] for client in some]),
            )
            for client, secret in zip(misfits, secrets_, strict=True):
                if secret is not None and _fits(secret, advertised[client], client in dropped):
                    found[client] = secret
        for client in members:
            if client not in found:
                raise AggregationAborted(
                    f"the shares of the keys of {client} do not fit what it has sent before: it, "
                    "or clients that hold them, did not follow the protocol. No sum was opened, "
                    "and what was charged for it stays charged"
                )
        return found


def _sign(place: int, other: int) -> int:
    return 1 if place < other else -1


def _places(name: str, given: Ints, n: int) -> tuple[int, ...]:
    """Places in a cohort of n, which must be given in order and once."""
    places = tuple(int(place) for place in given)
    if list(places) != sorted(set(places)) or (places and places[-1] >= n):
        raise ProtocolError(f"field {name!r} does not give places in the cohort, in order and once")
    return places


def _left_over(
    found: Mapping[str, bytes],
    survivors: list[str],
    dropped: list[str],
    advertised: Mapping[str, Values],
    place: Mapping[str, int],
    context: bytes,
) -> Iterator[tuple[bytes, int]]:
    """Keys of the masks that do not cancel: survivors' own, and theirs with those that dropped."""
    for client in survivors:
        yield own_key(found[client], context), -1
    for client in dropped:
        key = X25519PrivateKey.from_private_bytes(found[client])
        for other in survivors:
            pair, theirs = (place[client], place[other]), _mask_key(advertised[other])
            yield pair_key(key, theirs, b"mask", context, pair), _sign(*pair)


def _fits(secret: bytes, advertised: Values, is_key: bool) -> bool:
    """Whether an opened secret is the seed, or the mask key, that fits what was advertised."""
    if is_key:
        return public_key(X25519PrivateKey.from_private_bytes(secret)) == _mask_key(advertised)
    return digest(secret) == bytes(advertised["commitment"].tobytes())


def _mask_key(advertised: Values) -> bytes:
    return bytes(advertised["keys"][KEY_BYTES:].tobytes())


def _parts(advertised: Values) -> list[bytes]:
    keys, identity = advertised["keys"].tobytes(), advertised["identity"].tobytes()
    return [keys[:KEY_BYTES], keys[KEY_BYTES:], *([identity] if identity else [])]


def _array(content: bytes) -> Bytes:
    return np.frombuffer(content, dtype=np.uint8)


def _stack(rows: list[Bytes], width: int) -> Bytes:
    return np.stack(rows) if rows else np.zeros((0, width), dtype=np.uint8)


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)
