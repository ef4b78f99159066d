"""Which secure aggregation a privacy spec asks for, and everybody's end of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from secure_fedclust.errors import ParameterError
from secure_fedclust.messages import KEY_HOLDER
from secure_fedclust.privacy.cohort import Rules, check_cohort
from secure_fedclust.privacy.identity import Identity
from secure_fedclust.privacy.masking import Masking, MaskingClient
from secure_fedclust.privacy.secure_sum import SecureSum, Summand
from secure_fedclust.privacy.spec import PrivacySpec

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
    check_cohort(n_clients)
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
    _rules(spec).check(n_clients)
    return spec


def server_end(spec: PrivacySpec) -> SecureSum | None:
    """The server's end where clients, and a key holder, are reached by an engine."""
    if spec.protection == "none":
        return None
    if spec.protection == "masking":
        return Masking(_rules(spec))
    # TenSEAL is imported only where sums are encrypted.
    from secure_fedclust.privacy.ckks_round import Ckks, OneKeyHolder

    return Ckks(_rules(spec), OneKeyHolder(Identity()))


def ends_for(spec: PrivacySpec, names: Sequence[str]) -> Ends:
    """Everybody's end in a simulation, in which all know each other's identities."""
    if spec.protection == "none":
        return Ends(None, dict.fromkeys(names))
    return (_masking_ends if spec.protection == "masking" else _ckks_ends)(spec, names)


def _masking_ends(spec: PrivacySpec, names: Sequence[str]) -> Ends:
    identities = {name: Identity() for name in names} if spec.active_server else {}
    rules, publics = _rules(spec), _publics(identities)
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
    rules, server, holder = _rules(spec), Identity(), Identity()
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


def _rules(spec: PrivacySpec) -> Rules:
    survivors = spec.honest_survivors + spec.colluders
    return Rules(
        survivors, spec.colluders, spec.agreement(), spec.active_server, _least_honest(spec)
    )
