"""Secure aggregation by double masking (Bonawitz et al. 2017), on a complete or a sparse graph.

Each client adds to its vector one mask of its own and one for every neighbour, which that client
subtracts; in the sum only the clients' own masks are left. The server gets the own masks of clients
whose vectors arrived, and the pair masks of those whose did not, never both of one client, from
shares that neighbours hold of each other's keys. All others are neighbours, or, where clients are
many, some (`graph.py`). All of it lasts one round: four exchanges, or five where the server is not
trusted to keep to the protocol.

1. *Advertise*: every client makes two key pairs, one for messages to other clients and one for
   masks, and a seed for its own mask.
2. *Share*: it gets the keys of its circle, that is its neighbours and itself, and sends shares of
   its mask key and of its seed to them, encrypted.
3. *Mask*: it gets the shares for it, and the question; it sends its vector under masks.
4. *Confirm*, if the server is not trusted: it signs who has sent a vector, and the question.
5. *Unmask*: for each of its circle it reveals one share: of the seed if the client's vector has
   arrived, of the mask key if not.

The masks of clients that were told another question, spec or cohort do not cancel, since all of
it goes into the derivation of keys. Who is protected from whom: docs/threat_model.md; thresholds:
docs/proofs/masking.md.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from secure_fedclust.arrays import Ints
from secure_fedclust.errors import AggregationAborted, ParameterError
from secure_fedclust.messages import Bounds, Values
from secure_fedclust.privacy.cohort import SMALLEST_COHORT, Rules
from secure_fedclust.privacy.graph import Graph
from secure_fedclust.privacy.identity import SIGNATURE_BYTES, is_signed
from secure_fedclust.privacy.masking_opening import Flags, Opening
from secure_fedclust.privacy.masking_stages import (
    ADVERTISE,
    CONFIRM,
    MASK,
    SEALED_BYTES,
    SHARE,
    UNMASK,
    Bytes,
    advertised_text,
    as_bytes,
    cohort_digest,
    context_of,
    roll_digest,
    roster_digest,
)
from secure_fedclust.privacy.masks import KEY_BYTES, add_masks, digest, is_usable
from secure_fedclust.privacy.secure_sum import Ask, Question, SecureSum, Total, check_range


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
        Graph.of(len(clients), self.rules)
        round_ = {"number": question.number}

        advertised = self._advertised(ask, clients, question)
        self.rules.enough(
            list(advertised),
            clients,
            "have sent keys that others can use",
            charged=False,
            smallest=SMALLEST_COHORT,
        )
        cohort = self._cohort(advertised)
        graph, n, place = cohort.graph, cohort.graph.n_clients, cohort.place
        roster = roster_digest(cohort.keys, cohort.identities)
        told: Values = round_ | {"n_clients": n, "roster": as_bytes(roster)}
        members, sealed = self._shared(ask, cohort, told)

        member = cohort.flags(members)
        roll = roll_digest(np.flatnonzero(member))
        told = {
            "n_members": len(members),
            "roll": as_bytes(roll),
            "question": as_bytes(question.text),
        }
        requests = {}
        for client in members:
            here, others = cohort.those(member, graph.start(place[client]))
            passed_on = sealed[others, graph.index(others, place[client])]
            requests[client] = round_ | told | {"members": here, "sealed": passed_on}
        del sealed
        steps = np.zeros(question.length, dtype=np.uint64)

        def add(_: str, reply: Values) -> None:
            np.add(steps, reply["masked"], out=steps)

        masked = ask(MASK, requests, {"length": question.length}, add)
        del requests

        survivors = self.rules.enough(
            [c for c in members if c in masked], members, "have sent a vector"
        )
        alive = cohort.flags(survivors)
        if not graph.hangs_together(alive):
            raise AggregationAborted(
                "those that have sent a vector share keys in groups apart from each other. No sum "
                "was opened, and what was charged for it stays charged: run again"
            )
        ready, signatures = self._confirmed(ask, survivors, place, round_)
        told = round_ | signatures | {"n_survivors": len(survivors)}
        opening = Opening(graph, cohort.names, cohort.keys, cohort.commitments, member, alive)
        requests = cohort.to_each(
            ready,
            lambda start: (
                told
                | {"survivors": cohort.those(alive, start)[0]}
                | {"dropped": cohort.those(member & ~alive, start)[0]}
            ),
        )
        opened = ask(
            UNMASK,
            requests,
            {"shares": (0, graph.size), "share": KEY_BYTES},
            lambda client, reply: opening.keep(place[client], reply["shares"]),
        )

        self.rules.enough([c for c in ready if c in opened], ready, "have sent shares that open it")
        seen = cohort_digest(question.run, question.number, self.rules, n, roster)
        add_masks(steps, opening.left_over(context_of(seen, roll, question.text)))
        total = steps.view(np.int64)
        check_range(total, question.largest(n))
        return Total(total, n, tuple(survivors))

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

    def _cohort(self, advertised: Mapping[str, Values]) -> "_Cohort":
        """Everybody at a place, and what they have advertised in the order of places."""
        try:
            graph = Graph.of(len(advertised), self.rules)
        except ParameterError as error:
            raise AggregationAborted(
                f"{error}. This sum was not begun, and costs nothing; what others cost stays "
                "charged"
            ) from error
        place = dict(zip(advertised, graph.order(), strict=True))
        names = sorted(place, key=place.__getitem__)
        signed = [advertised[name] for name in names] if self.rules.active_server else []
        return _Cohort(
            graph,
            place,
            names,
            np.stack([advertised[name]["keys"] for name in names]),
            np.stack([advertised[name]["commitment"] for name in names]),
            _stack([reply["identity"] for reply in signed], KEY_BYTES),
            _stack([reply["signature"] for reply in signed], SIGNATURE_BYTES),
        )

    def _shared(self, ask: Ask, cohort: "_Cohort", told: Values) -> tuple[list[str], Bytes]:
        """Who has sent shares, and what they have sealed for each of their circles."""
        clients, graph = list(cohort.place), cohort.graph
        sealed = np.zeros((graph.n_clients, graph.size, SEALED_BYTES), dtype=np.uint8)

        def keep(client: str, reply: Values) -> None:
            sealed[cohort.place[client]] = reply["sealed"]

        requests = cohort.to_each(clients, lambda start: told | cohort.shown(start))
        found = ask(SHARE, requests, {"sealed": SEALED_BYTES}, keep)
        members = [client for client in clients if client in found]
        return self.rules.enough(members, clients, "have sent shares", charged=False), sealed

    def _confirmed(
        self, ask: Ask, survivors: list[str], place: Mapping[str, int], round_: Values
    ) -> tuple[list[str], Values]:
        """Who can be asked to unmask, and what they have signed: nothing for a trusted server."""
        if not self.rules.active_server:
            return survivors, {"signers": _ints(()), "signatures": _stack([], SIGNATURE_BYTES)}
        request = round_ | {"survivors": _ints(place[client] for client in survivors)}
        replies = ask(CONFIRM, dict.fromkeys(survivors, request), {"signature": SIGNATURE_BYTES})
        signers = self.rules.enough(
            [c for c in survivors if c in replies], survivors, "have confirmed who is left"
        )
        return signers, {
            "signers": _ints(place[client] for client in signers),
            "signatures": _stack([replies[c]["signature"] for c in signers], SIGNATURE_BYTES),
        }


@dataclass(frozen=True)
class _Cohort:
    """Who stands where on the ring, and what each has advertised, in the order of places.

    Identities and signatures are there only where clients check them.
    """

    graph: Graph
    place: dict[str, int]
    names: list[str]
    keys: Bytes
    commitments: Bytes
    identities: Bytes
    signatures: Bytes

    def shown(self, start: int) -> Values:
        """What is shown of a circle."""
        circle = self.graph.circle(start)
        signed = circle[: len(self.identities)]
        return {
            "start": start,
            "keys": self.keys[circle],
            "identities": self.identities[signed],
            "signatures": self.signatures[signed],
        }

    def to_each(
        self, clients: Sequence[str], request: Callable[[int], Values]
    ) -> dict[str, Values]:
        """A request for each, by where its circle starts; one and the same for all of a circle."""
        once = cache(request)
        return {client: once(self.graph.start(self.place[client])) for client in clients}

    def flags(self, clients: Iterable[str]) -> Flags:
        """Whether the client at each place is one of these."""
        found = np.zeros(self.graph.n_clients, dtype=np.bool_)
        found[[self.place[client] for client in clients]] = True
        return found

    def those(self, flags: Flags, start: int) -> tuple[Ints, Ints]:
        """Where in a circle those with a flag stand, and their places on the ring."""
        circle = self.graph.circle(start)
        here = np.flatnonzero(flags[circle])
        return here, circle[here]


def _parts(advertised: Values) -> list[bytes]:
    keys, identity = advertised["keys"].tobytes(), advertised["identity"].tobytes()
    return [keys[:KEY_BYTES], keys[KEY_BYTES:], *([identity] if identity else [])]


def _stack(rows: list[Bytes], width: int) -> Bytes:
    return np.stack(rows) if rows else np.zeros((0, width), dtype=np.uint8)


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)
