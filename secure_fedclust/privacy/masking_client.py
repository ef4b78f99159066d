"""A client's end of masking: what it answers, and what it refuses.

The protocol: `masking.py`.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from secure_fedclust.arrays import Ints
from secure_fedclust.errors import ParameterError, ProtocolError
from secure_fedclust.messages import Stage, Values
from secure_fedclust.privacy import shamir
from secure_fedclust.privacy.cohort import Rules
from secure_fedclust.privacy.graph import Graph
from secure_fedclust.privacy.identity import Identity, is_signed
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
    as_bytes,
    cohort_digest,
    confirmed_text,
    context_of,
    roll_digest,
    roster_digest,
)
from secure_fedclust.privacy.masks import (
    KEY_BYTES,
    add_masks,
    digest,
    own_key,
    pair_key,
    pair_sign,
    public_key,
    seal,
    unseal,
)
from secure_fedclust.privacy.secure_sum import Contribute, Summand

_NO_GRAPH = Graph(0, -1, 0, 0)


@dataclass
class _Round:
    """A client's state in one round: what only it may know, and what it was shown.

    Others are known by where they stand in its circle, counted from 0; it stands at `me`.
    """

    run: str
    number: int
    channel: X25519PrivateKey = field(repr=False)
    mask: X25519PrivateKey = field(repr=False)
    seed: bytes = field(repr=False)
    answered: Stage = ADVERTISE
    graph: Graph = _NO_GRAPH
    keys: list[bytes] = field(default_factory=list)
    identities: list[bytes] = field(default_factory=list)
    start: int = 0
    me: int = -1
    cohort: bytes = b""
    channels: dict[int, bytes] = field(default_factory=dict, repr=False)
    held: dict[int, shamir.Shares] = field(default_factory=dict, repr=False)
    members: tuple[int, ...] = ()
    context: bytes = b""
    survivors: tuple[int, ...] | None = None

    @property
    def public(self) -> bytes:
        return public_key(self.channel) + public_key(self.mask)

    def place(self, member: int) -> int:
        """Where on the ring of all clients one of the circle stands."""
        return (self.start + member) % self.graph.n_clients


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
            "keys": as_bytes(round_.public),
            "commitment": as_bytes(digest(seed)),
            "agreement": as_bytes(digest(self.rules.agreement)),
            "identity": as_bytes(identity),
            "signature": as_bytes(signature),
        }

    def _share(
        self,
        round_: _Round,
        n_clients: int,
        roster: Bytes,
        start: int,
        keys: Bytes,
        identities: Bytes,
        signatures: Bytes,
    ) -> Values:
        rows = [row.tobytes() for row in keys]
        graph = self._check_circle(round_, n_clients, start, rows)
        self._check_identities(round_, rows, identities, signatures)
        everybody = roster.tobytes()
        if graph.is_complete and everybody != roster_digest(keys, identities):
            raise ProtocolError("the roster is not that of the keys that this client was shown")
        cohort = cohort_digest(round_.run, round_.number, self.rules, n_clients, everybody)
        me = rows.index(round_.public)
        round_.graph, round_.start, round_.me = graph, start, me
        channels = {
            other: pair_key(
                round_.channel,
                row[:KEY_BYTES],
                b"channel",
                cohort,
                (round_.place(me), round_.place(other)),
            )
            for other, row in enumerate(rows)
            if other != me
        }
        secret = round_.mask.private_bytes_raw() + round_.seed
        shares = shamir.split(secret, graph.size, graph.threshold)
        sealed = np.zeros((graph.size, SEALED_BYTES), dtype=np.uint8)
        for other, key in channels.items():
            text = shares[other].astype("<u2").tobytes()
            sealed[other] = as_bytes(seal(key, round_.place(me), round_.place(other), text))
        round_.keys, round_.cohort = rows, cohort
        round_.identities = [row.tobytes() for row in identities]
        round_.channels, round_.held = channels, {me: shares[me]}
        return {"sealed": sealed}

    def _mask(
        self,
        round_: _Round,
        n_members: int,
        roll: Bytes,
        members: Ints,
        sealed: Bytes,
        question: Bytes,
        contribute: Contribute,
    ) -> Values:
        graph, me = round_.graph, round_.me
        present = _places("members", members, graph.size)
        if me not in present:
            raise ProtocolError("this client is not among the members of the round")
        self._check_number(graph, len(present), n_members)
        everybody = roll.tobytes()
        if graph.is_complete and everybody != roll_digest(members):
            raise ProtocolError("the roll is not that of the members that this client was shown")
        held, asked = dict(round_.held), question.tobytes()
        context = context_of(round_.cohort, everybody, asked)
        masks = [(own_key(round_.seed, context), 1)]
        for other, envelope in zip(present, sealed, strict=True):
            if other != me:
                pair = round_.place(me), round_.place(other)
                text = unseal(round_.channels[other], pair[1], pair[0], envelope.tobytes())
                held[other] = np.frombuffer(text, dtype="<u2").astype(np.uint16)
                if (held[other] >= shamir.PRIME).any():
                    raise ProtocolError(f"what member {pair[1]} sent are no shares")
                theirs = round_.keys[other][KEY_BYTES:]
                key = pair_key(round_.mask, theirs, b"mask", context, pair)
                masks.append((key, pair_sign(*pair)))
        given = contribute(asked, graph.n_clients)
        masked = given.vector.astype(np.int64).view(np.uint64)
        add_masks(masked, masks)
        round_.members, round_.held, round_.context = present, held, context
        return {"masked": masked, **given.anchor}

    def _confirm(self, round_: _Round, survivors: Ints) -> Values:
        round_.survivors = self._survivors(round_, survivors, len(survivors))
        if self._identity is None:
            raise ProtocolError("this client has no identity to sign with")
        text = confirmed_text(round_.context, round_.survivors)
        return {"signature": as_bytes(self._identity.sign(text))}

    def _unmask(
        self,
        round_: _Round,
        n_survivors: int,
        survivors: Ints,
        dropped: Ints,
        signers: Ints,
        signatures: Bytes,
    ) -> Values:
        alive = self._survivors(round_, survivors, n_survivors)
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

    def _survivors(self, round_: _Round, survivors: Ints, n_survivors: int) -> tuple[int, ...]:
        alive = _places("survivors", survivors, len(round_.keys))
        if round_.me not in alive or not set(alive) <= set(round_.members):
            raise ProtocolError("survivors are members of the round, this client among them")
        if round_.survivors is not None and alive != round_.survivors:
            raise ProtocolError("these are not the survivors that this client has confirmed")
        self._check_number(round_.graph, len(alive), n_survivors)
        return alive

    def _check_number(self, graph: Graph, seen: int, told: int) -> None:
        """Refuse to go on with too few, of the circle and of all: of those it is only told."""
        for number, least in ((seen, graph.least), (told, self.rules.min_survivors)):
            if number < least:
                raise ProtocolError(
                    f"{number} clients are left, this one goes on from {least} only"
                )
        if not seen <= told <= seen + graph.n_clients - graph.size:
            raise ProtocolError(
                f"{told} clients are said to be left, of whom this one sees {seen} in a circle of "
                f"{graph.size}, in a cohort of {graph.n_clients}: that cannot be"
            )

    def _check_circle(self, round_: _Round, n_clients: int, start: int, rows: list[bytes]) -> Graph:
        """The graph of such a cohort, if this client was shown its circle on it."""
        try:
            graph = Graph.of(n_clients, self.rules)
        except ParameterError as error:
            raise ProtocolError(str(error)) from error
        if len(rows) != graph.size:
            raise ProtocolError(
                f"the keys of {len(rows)} clients were shown to this one, which shares with "
                f"{graph.degree} of {n_clients}, and itself: {graph.size} are expected"
            )
        halves = {half for row in rows for half in (row[:KEY_BYTES], row[KEY_BYTES:])}
        if len(halves) != 2 * len(rows):
            raise ProtocolError("two clients of the cohort have one key")
        if round_.public not in rows:
            raise ProtocolError("the keys that this client has sent are not in the cohort")
        if start != graph.start((start + rows.index(round_.public)) % n_clients):
            raise ProtocolError("these are not the neighbours of this client: it is off its place")
        return graph

    def _check_identities(
        self, round_: _Round, rows: list[bytes], identities: Bytes, signatures: Bytes
    ) -> None:
        if not self.rules.active_server:
            return
        known = [row.tobytes() for row in identities]
        if not len(rows) == len(known) == len(set(known)):
            raise ProtocolError("the cohort needs a different identity for each client")
        own = known[rows.index(round_.public)]
        if self._identity is None or own != self._identity.public:
            raise ProtocolError("the keys of this client stand under another identity")
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
        self._check_number(round_.graph, len(who), len(who))
        text = confirmed_text(round_.context, alive)
        for member, signature in zip(who, signatures, strict=True):
            if not is_signed(round_.identities[member], signature.tobytes(), text):
                raise ProtocolError(
                    f"member {member} has not confirmed these survivors, question and cohort"
                )


def _places(name: str, given: Ints, n: int) -> tuple[int, ...]:
    """Places in a cohort of n, which must be given in order and once."""
    places = tuple(int(place) for place in given)
    if list(places) != sorted(set(places)) or (places and places[-1] >= n):
        raise ProtocolError(f"field {name!r} does not give places in the cohort, in order and once")
    return places
