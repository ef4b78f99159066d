"""Which secure aggregation a privacy spec asks for, and everybody's end of it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from secure_fedclust.errors import ParameterError
from secure_fedclust.messages import KEY_HOLDER
from secure_fedclust.privacy.cohort import (
    LARGEST_COHORT,
    LARGEST_FEDERATION,
    Rules,
    check_cohort,
)
from secure_fedclust.privacy.graph import Graph
from secure_fedclust.privacy.identity import Identity
from secure_fedclust.privacy.masking import Masking
from secure_fedclust.privacy.masking_client import MaskingClient
from secure_fedclust.privacy.secure_sum import SecureSum, Summand
from secure_fedclust.privacy.spec import PrivacySpec

if TYPE_CHECKING:
    from secure_fedclust.protocols.key_holder import KeyHolderParty

QUORUM = 2 / 3
"""Part of the clients that must survive, unless the spec says how many."""


@dataclass(frozen=True)
class Ends:
    """Everybody's end of a secure aggregation.

    Attributes
    ----------
    server : SecureSum or None
        How the server learns sums; None where it sees every client's answer.
    clients : mapping of client to Summand or None
    others : mapping of name to function
        Parties that are no clients, which answer requests.
    """

    server: SecureSum | None
    clients: Mapping[str, Summand | None]
    others: Mapping[str, Callable[[bytes], bytes]] = field(default_factory=dict)


def with_quorum(spec: PrivacySpec, n_clients: int) -> PrivacySpec:
    """The spec with `min_survivors`, which must be one that such a cohort can have."""
    if spec.protection == "none":
        return spec
    masking = spec.protection == "masking"
    largest = LARGEST_FEDERATION if masking else LARGEST_COHORT
    check_cohort(n_clients, largest, spec.active_server)
    honest = _least_honest(spec)
    if n_clients < spec.colluders + honest:
        raise ParameterError(
            f"colluders={spec.colluders} of {n_clients} clients: give at most {n_clients - honest}"
        )
    if spec.min_survivors is None:
        # Two clients that share the noise, where there are so many.
        least = max(math.ceil(QUORUM * n_clients), min(spec.colluders + 2, n_clients))
        if spec.active_server:
            least = max(least, (n_clients + spec.colluders) // 2 + 1)
        spec = replace(spec, min_survivors=least)
    rules = _rules(spec)
    if masking:
        Graph.of(n_clients, rules)
    else:
        rules.check(n_clients)
    return spec


def server_end(
    spec: PrivacySpec,
    identity: Identity | None = None,
    registered: Mapping[str, bytes] | None = None,
) -> SecureSum | None:
    """The server's end where clients, and a key holder, are reached by an engine.

    Parameters
    ----------
    spec : PrivacySpec
    identity : Identity, optional
        The server's, where a key holder knows it.
    registered : mapping of client to bytes, optional
        The public parts of the clients' identities, where they are known.
    """
    if spec.protection == "none":
        return None
    if spec.protection == "masking":
        return Masking(_rules(spec), registered)
    # TenSEAL is imported only where sums are encrypted.
    from secure_fedclust.privacy.ckks_round import Ckks, OneKeyHolder

    return Ckks(_rules(spec), OneKeyHolder(identity or Identity()), registered)


def client_end(
    spec: PrivacySpec,
    n_clients: int,
    identity: Identity,
    others: Iterable[bytes],
    key_holder: bytes | None,
) -> Summand | None:
    """One client's end, far from the others.

    Parameters
    ----------
    spec : PrivacySpec
    n_clients : int
        Clients that are asked to take part.
    identity : Identity
    others : iterable of bytes
        The public parts of the other clients' identities.
    key_holder : bytes, optional
        That of the key holder's.
    """
    if spec.protection == "none":
        return None
    if spec.protection == "masking":
        rules = _rules(spec, n_clients)
        return MaskingClient(rules, identity, frozenset({identity.public, *others}))
    from secure_fedclust.privacy.ckks_round import CkksClient

    if key_holder is None:
        raise ParameterError(
            "protection='ckks': no key_holder is named, or its card is not registered"
        )
    return CkksClient(_rules(spec, n_clients), identity, [key_holder])


def key_holder_end(
    spec: PrivacySpec, n_clients: int, identity: Identity, server: bytes, path: Path
) -> "KeyHolderParty":
    """The key holder's end, which keeps its keys in a file during the run."""
    from secure_fedclust.privacy.ckks_round import KeyHolding
    from secure_fedclust.protocols.key_holder import KeyHolderParty

    return KeyHolderParty(KeyHolding(_rules(spec, n_clients), identity, server, path))


def ends_for(spec: PrivacySpec, names: Sequence[str]) -> Ends:
    """Everybody's end in a simulation, in which all know each other's identities."""
    if spec.protection == "none":
        return Ends(None, dict.fromkeys(names))
    return (_masking_ends if spec.protection == "masking" else _ckks_ends)(spec, names)


def _masking_ends(spec: PrivacySpec, names: Sequence[str]) -> Ends:
    identities = {name: Identity() for name in names} if spec.active_server else {}
    rules, publics = _rules(spec, len(names)), _publics(identities)
    registered = frozenset(publics.values())
    return Ends(
        Masking(rules, publics),
        {name: MaskingClient(rules, identities.get(name), registered) for name in names},
    )


def _ckks_ends(spec: PrivacySpec, names: Sequence[str]) -> Ends:
    from secure_fedclust.privacy.ckks_round import Ckks, CkksClient, KeyHolding, OneKeyHolder
    from secure_fedclust.protocols.key_holder import KeyHolderParty

    check_names(names)
    identities = {name: Identity() for name in names}
    rules, server, holder = _rules(spec, len(names)), Identity(), Identity()
    party = KeyHolderParty(KeyHolding(rules, holder, server.public))
    return Ends(
        Ckks(rules, OneKeyHolder(server), _publics(identities)),
        {
            name: CkksClient(rules, identity, [holder.public])
            for name, identity in identities.items()
        },
        {KEY_HOLDER: party.handle},
    )


def check_names(clients: Sequence[str]) -> None:
    """Refuse a client that has the key holder's name."""
    if KEY_HOLDER in clients:
        raise ParameterError(f"a client has the name {KEY_HOLDER!r}: give it another one")


def _publics(identities: Mapping[str, Identity]) -> dict[str, bytes]:
    return {name: identity.public for name, identity in identities.items()}


def _least_honest(spec: PrivacySpec) -> int:
    # Without noise, the vector of one honest client must not be alone in a sum.
    return 1 if spec.is_private else 2


def _rules(spec: PrivacySpec, most_clients: int = LARGEST_FEDERATION) -> Rules:
    return Rules(
        min_survivors=spec.honest_survivors + spec.colluders,
        colluders=spec.colluders,
        agreement=spec.agreement(),
        active_server=spec.active_server,
        least_honest=_least_honest(spec),
        most_clients=most_clients,
    )
