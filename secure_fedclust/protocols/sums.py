"""Which secure aggregation a privacy spec asks for: the server's end, and one for each client."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.identity import Identity
from secure_fedclust.privacy.masking import Masking, MaskingClient
from secure_fedclust.privacy.masking_stages import Rules, check_cohort
from secure_fedclust.privacy.secure_sum import SecureSum, Summand
from secure_fedclust.privacy.spec import PrivacySpec

QUORUM = 2 / 3
"""Part of the clients that must survive, unless the spec says how many."""


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


def identities_for(spec: PrivacySpec, names: Sequence[str]) -> dict[str, Identity]:
    """Fresh identities for clients that sign, in a simulation; none where they do not."""
    return {name: Identity() for name in names} if spec.active_server else {}


def server_end(
    spec: PrivacySpec, identities: Mapping[str, Identity] | None = None
) -> SecureSum | None:
    """How the server learns sums; None where it sees every client's answer."""
    return None if spec.protection == "none" else Masking(_rules(spec), _publics(identities))


def client_ends(
    spec: PrivacySpec, names: Sequence[str], identities: Mapping[str, Identity] | None = None
) -> dict[str, Summand | None]:
    """Each client's end; where clients sign, they know each other's identities."""
    if spec.protection == "none":
        return dict.fromkeys(names)
    known = identities_for(spec, names) if identities is None else identities
    rules, registered = _rules(spec), frozenset(_publics(known).values())
    return {name: MaskingClient(rules, known.get(name), registered) for name in names}


def _publics(identities: Mapping[str, Identity] | None) -> dict[str, bytes]:
    return {name: identity.public for name, identity in (identities or {}).items()}


def _least_honest(spec: PrivacySpec) -> int:
    # Without noise, the vector of one honest client must not be alone in a sum.
    return 1 if spec.is_private else 2


def _rules(spec: PrivacySpec) -> Rules:
    if spec.protection != "masking":
        raise ParameterError(
            f"protection={spec.protection!r} is not available in this version: use 'masking'"
        )
    survivors = spec.honest_survivors + spec.colluders
    return Rules(
        survivors, spec.colluders, spec.agreement(), spec.active_server, _least_honest(spec)
    )
