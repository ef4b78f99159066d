"""What an attacker sees of made-up records, through the way out that clients have."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.audit.attacks.ceilings import claimed_mu, least_honest
from secure_fedclust.audit.attacks.rehearsal import Outlets
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.grid import SumGrid
from secure_fedclust.privacy.mechanism import Noisy, squared_lengths
from secure_fedclust.privacy.queries import Cells, CellSums
from secure_fedclust.privacy.release import exact_sum
from secure_fedclust.privacy.spec import PrivacySpec

MESSAGE = "attack"


@dataclass(frozen=True)
class View:
    """Sums and counts of cells as they were released, beside what they would be without noise.

    Attributes
    ----------
    query : CellSums
    noisy : Noisy
    exact : mapping of name to int64 array
    due : float
        Noise that sums should have, in real terms, by the claim alone: nothing that the release
        says of itself goes into it.
    """

    query: CellSums
    noisy: Noisy
    exact: dict[str, Ints]
    due: float

    def released(self) -> Cells:
        """What is seen, in real terms."""
        return self.query.read(self.noisy)

    def without_noise(self) -> Cells:
        """What would be seen of exact sums."""
        return self.query.read(Noisy(self.exact, self.noisy.exponent, 0.0))

    def imagined(self, part: float, rng: np.random.Generator) -> Cells:
        """What would be seen of a mechanism that has only a part of the noise it should have."""
        exact, sigma = self.without_noise(), part * self.due
        count_sigma = sigma / (self.query.radius * self.query.count_weight)
        return replace(
            exact,
            sums=exact.sums + rng.normal(0, sigma, exact.sums.shape),
            counts=exact.counts + rng.normal(0, count_sigma, exact.counts.shape),
            sum_sigma=sigma,
            count_sigma=count_sigma,
        )


See = Callable[[View], Cells]
"""What an attacker gets to see of a view."""


def power(refuted: Callable[[See], bool], rng: np.random.Generator, repeats: int = 20) -> float:
    """How often an attack would refute a mechanism that has half the noise it should have."""
    return sum(refuted(lambda view: view.imagined(0.5, rng)) for _ in range(repeats)) / repeats


def due_noise(query: CellSums, spec: PrivacySpec, share: float) -> float:
    """Standard deviation that the noise of sums should have, in real terms.

    Worked out anew, and not from what a query says of its sensitivity, which may be wrong.
    """
    one = query.radius * math.hypot(1.0, query.count_weight)
    farthest = {
        ("record", "add_remove"): one,
        ("client", "add_remove"): one,
        ("record", "replace_one"): max(2 * query.radius, math.sqrt(2) * one),
        ("client", "replace_one"): 2 * one,
    }[spec.unit, spec.adjacency]
    return farthest / (claimed_mu(spec) * math.sqrt(share))


def look(outlets: Outlets, query: CellSums, parts: Sequence[Floats], share: float = 1.0) -> View:
    """What is seen of some clients' records, charged, bounded and noised.

    Where sums are protected, they have the least noise that the spec promises: that of
    `honest_survivors` clients. Any other clients' own noise is left out, since server and colluders
    may know it.

    Parameters
    ----------
    outlets : Outlets
    query : CellSums
    parts : sequence of arrays of shape (n, d)
        Records of one client each. Without a protection they are all the records of one client.
    share : float
        Of the budget of a run.
    """
    spec = outlets.spec
    if spec.protection == "none":
        X = np.concatenate(list(parts))
        noisy = outlets.fresh().release(query, X, share, run=MESSAGE, step=0, message=MESSAGE)
        exact = query.answer(X, spec.adjacency, noisy.exponent)
        return View(query, noisy, dict(exact.fields), due_noise(query, spec, share))
    honest = least_honest(spec)
    n_clients = max(len(parts), honest + spec.colluders)
    nothing = np.zeros((0, query.centers.shape[1]))
    grid = SumGrid.of(query, spec, Limit.of(*spec.target()), share, n_clients)
    noisy = Noisy({}, grid.exponent, 0.0)
    total: dict[str, Ints] = {}
    seen: dict[str, Ints] = {}
    for i in range(n_clients):
        X = parts[i] if i < len(parts) else nothing
        fields = exact_sum(query, X, spec, grid).fields
        _add(total, fields)
        if i < honest:
            noisy = outlets.fresh().contribute(
                query, X, share, n_clients=n_clients, run=MESSAGE, step=0, message=MESSAGE
            )
            fields = noisy.fields
        _add(seen, fields)
    noisy = replace(noisy, fields=seen, sigma=noisy.sigma * math.sqrt(honest))
    return View(query, noisy, total, due_noise(query, spec, share))


def _add(total: dict[str, Ints], fields: Mapping[str, Ints]) -> None:
    for name, numbers in fields.items():
        total[name] = total[name] + numbers if name in total else numbers


def look_at_clusters(
    outlets: Outlets, members: Floats, count_weight: float, share: float = 1.0
) -> list[View]:
    """Release clusters that have nothing to do with each other, several at once.

    Each record touches one cluster, so that each is protected as if there were no other.

    Parameters
    ----------
    outlets : Outlets
    members : array of shape (n_clusters, size, d)
        Records about the origin, no longer than `sqrt(d)`. For the unit ``client`` each is all the
        data of a client.
    count_weight, share : float
    """
    n, _, d = members.shape
    whole = outlets.spec.unit == "client"
    at_once = 10 if whole else 50
    radius = math.sqrt(d)
    views = []
    for start in range(0, n, at_once):
        placed = members[start : start + at_once]
        query = CellSums(apart(len(placed), d, radius), radius, count_weight)
        records = (placed + query.centers[:, None]).reshape(-1, d)
        parts = np.split(records, len(records)) if whole and len(records) else [records]
        views.append(look(outlets, query, parts, share))
    return views


def apart(n_cells: int, n_features: int, radius: float) -> Floats:
    """Centres so far apart that every record within `radius` of one belongs to it."""
    centers = np.zeros((n_cells, n_features))
    centers[:, 0] = 4 * radius * np.arange(n_cells)
    return centers


def anywhere(n: int, n_features: int, rng: np.random.Generator) -> Floats:
    """Records that are anywhere in the region with equal probability, in working coordinates."""
    direction = rng.normal(size=(n, n_features))
    length = n_features**0.5 * rng.random(n) ** (1 / n_features)
    return np.asarray(direction * (length / np.sqrt(squared_lengths(direction)))[:, None])
