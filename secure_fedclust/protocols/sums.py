"""Which secure aggregation a privacy spec asks for: the server's end, and one for each client."""

import math
from collections.abc import Sequence
from dataclasses import replace

from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.identity import Identity
from secure_fedclust.privacy.masking import Masking, MaskingClient, Rules
from secure_fedclust.privacy.secure_sum import SecureSum, Summand
from secure_fedclust.privacy.spec import PrivacySpec

QUORUM = 2 / 3
"""Part of the clients that must survive, unless the spec says how many."""


def with_quorum(spec: PrivacySpec, n_clients: int) -> PrivacySpec:
    """The spec with `min_survivors`, which must be one that such a cohort can have."""
    if spec.protection == "none":
        return spec
    # Without noise, the vector of one honest client must not be alone in a sum.
    alone = spec.colluders + (1 if spec.is_private else 2)
    if spec.min_survivors is None:
        least = max(math.ceil(QUORUM * n_clients), alone, 2)
        if spec.active_server:
            least = max(least, (n_clients + spec.colluders) // 2 + 1)
        spec = replace(spec, min_survivors=least)
    _rules(spec).check(n_clients)
    if spec.honest_survivors + spec.colluders < alone:
        raise ParameterError(
            f"min_survivors={spec.min_survivors} without differential privacy: with "
            f"{spec.colluders} colluders one client's vector could be seen; give at least {alone}"
        )
    return spec


def server_end(spec: PrivacySpec) -> SecureSum | None:
    """How the server learns sums; None where it sees every client's answer."""
    return None if spec.protection == "none" else Masking(_rules(spec))


def client_ends(spec: PrivacySpec, names: Sequence[str]) -> dict[str, Summand | None]:
    """Each client's end, with identities that know each other where clients sign."""
    if spec.protection == "none":
        return dict.fromkeys(names)
    rules = _rules(spec)
    if not spec.active_server:
        return {name: MaskingClient(rules) for name in names}
    identities = {name: Identity() for name in names}
    registered = frozenset(identity.public for identity in identities.values())
    return {name: MaskingClient(rules, identities[name], registered) for name in names}


def _rules(spec: PrivacySpec) -> Rules:
    if spec.protection != "masking":
        raise ParameterError(
            f"protection={spec.protection!r} is not available in this version: use 'masking'"
        )
    survivors = spec.honest_survivors + spec.colluders
    return Rules(survivors, spec.colluders, spec.agreement(), spec.active_server)
