"""What a run with noisy training claims, worked out anew from its ledger by dp_accounting.

None of our own accounting is used but the limit that the run was held to.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from _table import Bar
from scipy.stats import norm
from tqdm import tqdm

from secure_fedclust.neural import NeuralClusterer
from secure_fedclust.privacy.accounting import Limit


@dataclass(frozen=True)
class Sampled:
    """Sampled Gaussian steps, as a row of the ledger names them."""

    rate: float
    steps: int
    noise: float

    def distribution(self) -> Any:
        """What the steps give away, by dp_accounting."""
        return _distribution(self)

    def least_mu(self, tail: float) -> float:
        """The least mu whose curve is above that of the steps, but for a tail of so much mu^2."""
        return _least_mu(self, tail)


@cache
def _distribution(sampled: Sampled) -> Any:
    from dp_accounting.pld import privacy_loss_distribution

    one = privacy_loss_distribution.from_gaussian_mechanism(
        sampled.noise, sampling_prob=sampled.rate, value_discretization_interval=2e-4
    )
    return one.self_compose(sampled.steps)


@cache
def _least_mu(sampled: Sampled, tail: float) -> float:
    distribution = _distribution(sampled)
    low, high = 1e-3, math.sqrt(sampled.steps) / sampled.noise
    last = distribution.get_epsilon_for_delta(tail * low**2)
    epsilons = np.linspace(0, last if math.isfinite(last) else 50.0, 3000)
    deltas = np.asarray(distribution.get_delta_for_epsilon(list(epsilons)))
    for _ in range(40):
        mu = (low + high) / 2
        second = np.exp(epsilons + norm.logcdf(-mu / 2 - epsilons / mu))
        gaussian = norm.cdf(mu / 2 - epsilons / mu) - second
        rest = tail * mu**2
        above = (deltas <= rest + (1 - rest) * gaussian).all()
        low, high = (low, mu) if above else (mu, high)
    return high


@dataclass(frozen=True)
class Claim:
    """What a run claims, beside what its ledger says.

    Attributes
    ----------
    name : str
    epsilon : float
        That is claimed.
    rows : mapping of client to the rows of its ledger
    ratios : sequence of float
        For each training, what was charged over what it costs by our own reckoning.
    used : float
        The largest mu of a client over the limit's, trainings by our own reckoning.
    found : float
        The largest epsilon of a client, all releases together.
    """

    name: str
    epsilon: float
    rows: Mapping[str, Sequence[Any]]
    ratios: Sequence[float]
    used: float
    found: float

    @classmethod
    def of(cls, name: str, model: NeuralClusterer) -> "Claim":
        """The claim of a model that was fitted in a ledger of its own."""
        epsilon, delta = model.privacy.target()
        rows = {client: model.ledger_.rows(client) for client in model.client_names_}
        ratios, mus, epsilons = [], [], []
        for own in tqdm(rows.values(), f"ledger of {name}", leave=False):
            squared, total = 0.0, None
            for charge in (row.charge for row in own):
                mu, parts = charge.sensitivity / charge.sigma, trainings(charge)
                if parts:
                    least = max(part.least_mu(charge.inputs["tail"]) for part in parts)
                    ratios.append(mu / least)
                    mu = least
                    worst = max(
                        parts, key=lambda part: part.distribution().get_epsilon_for_delta(delta)
                    )
                    one = worst.distribution()
                else:
                    one = Sampled(1.0, 1, 1 / mu).distribution()
                squared += mu**2
                total = one if total is None else total.compose(one)
            mus.append(math.sqrt(squared))
            epsilons.append(total.get_epsilon_for_delta(delta))
        used = max(mus) / Limit.of(epsilon, delta).mu
        return cls(name, epsilon, rows, ratios, used, max(epsilons))

    @property
    def cells(self) -> list[str]:
        """What is printed."""
        releases = max(map(len, self.rows.values()))
        low, high = min(self.ratios), max(self.ratios)
        return [
            self.name,
            f"{len(self.rows)}",
            f"{releases}",
            f"{len(self.ratios)}",
            f"{low:.4f} to {high:.4f}",
            f"{self.used:.6f}",
            f"{self.found:.3f} of {self.epsilon:g}",
        ]

    @property
    def bars(self) -> list[Bar]:
        """The ledger must not charge less than it has to, nor the run spend more than it may.

        As parts beyond what is right, because bars are rounded as they are printed. That the curve
        of all releases together, by PLD, leaves some epsilon over is no fault: a charge in mu has
        to cover the whole curve of a training.
        """
        return [
            Bar(f"{self.name}, charged too little by", beyond(1, min(self.ratios)), at_most=1e-3),
            Bar(f"{self.name}, charged too much by", beyond(max(self.ratios), 1), at_most=0.02),
            Bar(f"{self.name}, mu beyond the limit by", beyond(self.used, 1), at_most=0),
            Bar(f"{self.name}, mu left over", beyond(1, self.used), at_most=0.01),
            Bar(f"{self.name}, epsilon by PLD too much by", self._excess, at_most=0),
        ]

    @property
    def _excess(self) -> float:
        return beyond(self.found / self.epsilon, 1)


def beyond(figure: float, limit: float) -> float:
    """How far a figure is above a limit, 0 if it is not."""
    return max(0.0, figure - limit)


def trainings(charge: Any) -> list[Sampled]:
    """The trainings that a charge is for; none, if it is for a Gaussian release."""
    inputs, found = charge.inputs, []
    while f"rate {len(found)}" in inputs:
        i = len(found)
        found.append(Sampled(inputs[f"rate {i}"], int(inputs[f"steps {i}"]), inputs[f"noise {i}"]))
    return found


def rates(claim: Claim) -> tuple[str, list[str], list[list[str]]]:
    """The public rates of one client's clusters: that with the most different ones."""

    def different(client: str) -> int:
        return max(len(trainings(row.charge)) for row in claim.rows[client])

    client = max(claim.rows, key=different)
    rows = []
    for row in claim.rows[client]:
        tail = row.charge.inputs.get("tail", 0.0)
        rows += [
            [
                row.charge.message,
                f"{part.rate:.4f}",
                f"{part.steps}",
                f"{part.noise:.3f}",
                f"{part.least_mu(tail):.4f}",
                f"{row.charge.mu:.4f}",
            ]
            for part in trainings(row.charge)
        ]
    header = ["release", "rate", "steps", "noise over clip", "our own mu", "charged"]
    title = f"Public rates of the clusters of {client}, {claim.name}; equal ones in one line"
    return title, header, rows
