"""What every protocol returns, and how replies of many clients are put together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.messages import Values


@dataclass(frozen=True)
class Clustering:
    """Global centres and, where the system knows it, the clusters that each client holds.

    `n_records` is the noisy number of records of a client, on average, where a private run knows;
    `weights` the noisy numbers of records that each client has of each cluster. Systems that train
    networks have them in `networks`, as named arrays, and FedCRef the graph of clusters in
    `association`, as plain values.
    """

    centers: Floats
    client_clusters: Mapping[str, list[int]] | None = None
    n_records: float | None = None
    weights: Mapping[str, Floats] | None = None
    networks: Mapping[str, Any] | None = None
    association: Mapping[str, Any] | None = None


def stack(replies: Mapping[str, Values], name: str) -> Any:
    """One array of all replies, one client after the other."""
    return np.concatenate([reply[name] for reply in replies.values()])


def owners_of(replies: Mapping[str, Values], name: str) -> Ints:
    """Position of the client that each row of the stacked field came from."""
    return np.repeat(np.arange(len(replies)), [len(reply[name]) for reply in replies.values()])
