"""Whether clusters can stand out from the noise: rules of thumb, measured, not proved.

docs/privacy.md says where they come from.
"""

import math

from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.plan import Feasibility

POOR, GOOD = 7.0, 35.0
"""Records times mu over clusters times the root of the number of features: below the first figure
sums of all clients are of no use, above the second they give nearly the centres without privacy."""

CLIENT_GOOD = 60.0
"""Records of one client times mu, over a power of the number of features, that a summary needs to
be of use by itself."""

_CLIENT_POWER = 1.1


def pooled_feasibility(
    limit: Limit,
    *,
    n_clients: int,
    n_clusters: int,
    n_features: int,
    n_records: int,
    noise_terms: float,
    whole_clients: bool = False,
) -> Feasibility:
    """For systems that add up what clients send, with the noise of so many releases.

    Where whole clients are protected each counts for one record, and more clients are what helps.
    """
    mu = limit.mu / math.sqrt(noise_terms)
    signal = n_clients * n_records * mu / (n_clusters * math.sqrt(n_features))
    if whole_clients:
        return Feasibility.of(signal, n_clients, limit, poor=POOR, good=GOOD, counted="clients")
    return Feasibility.of(signal, n_records, limit, poor=POOR, good=GOOD)


def client_feasibility(limit: Limit, n_features: int, n_records: int) -> Feasibility:
    """For systems whose server looks at each client's summary."""
    needed = CLIENT_GOOD * n_features**_CLIENT_POWER
    signal = n_records * limit.mu
    return Feasibility.of(signal, n_records, limit, poor=needed / 2, good=needed)
