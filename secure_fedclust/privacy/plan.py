"""What a private run will release, known before any data are touched."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from secure_fedclust.privacy.accounting import Limit, epsilon_of
from secure_fedclust.privacy.ckks_parameters import PRESETS, Parameters, Preset
from secure_fedclust.privacy.graph import SPARSE_FROM
from secure_fedclust.privacy.grid import SumNeeds
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.privacy.terms import MAX_EPSILON

_DRAWS_PER_SECOND = 50_000
_REPLY_OVERHEAD = 270
_SUM_OVERHEAD = 690
_SIGNED_BYTES = 230
_PAIR_BYTES = 208
"""What clients send each other through the server for one sum, for each other client."""


@dataclass(frozen=True)
class PlannedRelease:
    """Releases of one kind.

    Attributes
    ----------
    message : str
        The stage that asks for it.
    times : int
        How often each client makes it.
    share : float
        Of mu squared, for all times together.
    coordinates : int
        Noisy numbers in one release.
    replies : int or None
        How many of the times the numbers are sent; always, if None. What a client uses for its own
        next step is charged, but not sent.
    others : int
        Further numbers in such a reply, computed from released ones.
    summed : bool
        Whether nothing but the sum over clients is seen, and they share the noise.
    averaged : bool
        Whether nothing but the sum over clients is seen, of what each has noised for itself.
    """

    message: str
    times: int
    share: float
    coordinates: int
    replies: int | None = None
    others: int = 0
    summed: bool = False
    averaged: bool = False


@dataclass(frozen=True)
class Feasibility:
    """Whether the signal stands out from the noise.

    Attributes
    ----------
    signal : float
        Records times mu over clusters times the root of the number of features, or what takes its
        place for the system; see docs/privacy.md.
    poor, good : float
        Below `poor` centres are mostly noise; from `good` on they are close to those without
        privacy.
    records : int
        Records a client that would give a good signal, all else equal; or clients, if they are
        what counts.
    epsilon : float or None
        Epsilon that would; None where no reasonable one does.
    counted : str
        What `records` counts.
    """

    signal: float
    poor: float
    good: float
    records: int
    epsilon: float | None
    counted: str = "records a client"

    @classmethod
    def of(
        cls,
        signal: float,
        n_records: int,
        limit: Limit,
        *,
        poor: float,
        good: float,
        counted: str = "records a client",
    ) -> "Feasibility":
        """Work out what would do, for a signal that grows with records and with mu."""
        short = good / signal
        # A little more, because part of a budget is set aside for what the noise is not exact in.
        epsilon = _rounded_up(1.001 * epsilon_of(limit.delta, limit.mu * short))
        within = epsilon if epsilon <= MAX_EPSILON else None
        return cls(signal, poor, good, math.ceil(n_records * short), within, counted)

    @property
    def verdict(self) -> str:
        """One word: good, partial or poor."""
        return (
            "good"
            if self.signal >= self.good
            else "partial"
            if self.signal >= self.poor
            else "poor"
        )

    def __str__(self) -> str:
        text = f"signal {self.signal:.3g} ({self.verdict}; good from {self.good:.3g})"
        if self.verdict == "good":
            return text
        epsilon = "" if self.epsilon is None else f", or epsilon {self.epsilon:g},"
        return f"{text}; {self.records} {self.counted}{epsilon} would do"


@dataclass(frozen=True)
class Plan:
    """The releases of a run, their cost, and whether it can work.

    Attributes
    ----------
    guarantee : str
    limit : Limit
    releases : sequence of PlannedRelease
    n_clients : int
    feasibility : Feasibility or None
        None where nobody said how many records clients hold, or nobody knows what they must be.
    spec : PrivacySpec
    fallback : str or None
        What is left of the guarantee if fewer clients are honest than it assumes.
    n_records : int or None
        About how many records a client holds, if that was said.
    """

    guarantee: str
    limit: Limit
    releases: Sequence[PlannedRelease]
    n_clients: int
    feasibility: Feasibility | None
    spec: PrivacySpec
    fallback: str | None = None
    n_records: int | None = None

    @property
    def exchanges(self) -> int:
        """How often each client is asked."""
        asked = sum(
            _replies(release)
            * (release.averaged + (self.spec.exchanges_per_sum if _in_a_sum(release) else 1))
            for release in self.releases
        )
        return asked + len(set(self._presets()))  # keys are taken once

    @property
    def draws(self) -> int:
        """Noisy numbers that one client draws."""
        return sum(release.times * release.coordinates for release in self.releases)

    @property
    def kilobytes_up(self) -> float:
        """Sent by one client, about."""
        return sum(_replies(release) * self._bytes(release) for release in self.releases) / 1000

    def _bytes(self, release: PlannedRelease) -> int:
        """Sent by one client for one answer, about."""
        numbers = 8 * (release.coordinates + release.others)
        if not _in_a_sum(release):
            return numbers + _REPLY_OVERHEAD
        if release.averaged and self.spec.protection == "ckks":
            return math.ceil(release.coordinates / PRESETS[0].used) * PRESETS[0].usual_bytes
        if self.spec.protection == "ckks":
            preset = self._preset(release)
            return math.ceil(release.coordinates / preset.used) * preset.usual_bytes
        signed = _SIGNED_BYTES if self.spec.active_server else 0
        return numbers + _SUM_OVERHEAD + signed + _PAIR_BYTES * self.n_clients

    def _presets(self) -> list[Preset]:
        """Parameters of encryption, one for each sum."""
        encrypted = self.spec.protection == "ckks"
        return [self._preset(r) for r in self.releases if encrypted and r.summed]

    def _preset(self, release: PlannedRelease) -> Preset:
        needs = _needs(release, self.spec, self.limit, self.n_clients)
        return Parameters(release.coordinates, self.n_clients, needs.usual).preset

    def rows(self) -> list[dict[str, Any]]:
        """One row for each kind of release, for printing."""
        return [
            {
                "message": release.message,
                "times": release.times,
                "share of mu^2": release.share,
                "mu each": self.limit.mu * math.sqrt(release.share / release.times),
                "noise / sensitivity": math.sqrt(release.times / release.share) / self.limit.mu,
                "values each": release.coordinates,
                "seen": "sum" if _in_a_sum(release) else "each",
            }
            for release in self.releases
        ]

    def notes(self) -> list[str]:
        """What there is to say besides the rows."""
        seconds = self.n_clients * self.draws / _DRAWS_PER_SECOND
        unknown = "unknown; say how many records there are"
        if self.n_records is not None:
            unknown = "unknown; there is no rule for this system, docs/results.md has figures"
        return [
            f"total mu {self.limit.mu:.4g}; {self.exchanges} exchanges, about "
            f"{self.kilobytes_up:.3g} KB from each of {self.n_clients} clients, about "
            f"{seconds:.1g} s of secure sampling in all",
            f"feasibility: {self.feasibility or unknown}",
            *([] if self.fallback is None else [self.fallback]),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        feasibility = None
        if self.feasibility is not None:
            feasibility = {**vars(self.feasibility), "verdict": self.feasibility.verdict}
        return {
            "guarantee": self.guarantee,
            "fallback": self.fallback,
            "mu": self.limit.mu,
            "clients": self.n_clients,
            "releases": self.rows(),
            "kilobytes_up": self.kilobytes_up,
            "feasibility": feasibility,
        }

    def __str__(self) -> str:
        rows = self.rows()
        cells = [list(rows[0])] + [
            [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        table = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in cells
        ]
        return "\n".join([self.guarantee, *table, *self.notes()])


def check_room(
    releases: Sequence[PlannedRelease], spec: PrivacySpec, limit: Limit, n_clients: int
) -> None:
    """Refuse a run with a sum that could be too large to be encrypted, before it spends anything.

    Other protections have room for whatever has a grid.
    """
    if spec.protection == "ckks":
        for release in releases:
            if release.summed:
                worst = _needs(release, spec, limit, n_clients).worst
                Parameters(release.coordinates, n_clients, worst)


def _needs(release: PlannedRelease, spec: PrivacySpec, limit: Limit, n_clients: int) -> SumNeeds:
    share = release.share / release.times
    return SumNeeds.of(release.coordinates, spec, limit, share, n_clients)


ALSO_SEEN = "; the server also sees each client's answers, with noise enough by itself"
"""What a guarantee about sums adds, where not all is sums."""

_BESIDES = (
    "assume besides that clients on the server's side keep to the protocol, too, and hold but for "
    "a probability of 2^-40 each"
)

MANY = f"; sums over {SPARSE_FROM} clients or more {_BESIDES}"
"""What it adds where clients under masks do not share keys with all others."""

MANY_ELSEWHERE = f"; if other runs had sums over {SPARSE_FROM} clients or more, these {_BESIDES}"
"""The same about other runs on a ledger, which does not say how many clients they had."""


def on_sums(spec: PrivacySpec, n_clients: int, each: bool) -> str:
    """What a guarantee adds to that of its spec, where there are sums.

    Parameters
    ----------
    spec : PrivacySpec
    n_clients : int
        Clients that are asked.
    each : bool
        Whether the server sees answers of each client, too.
    """
    passive = spec.protection == "masking" and not spec.active_server
    return MANY * (passive and n_clients >= SPARSE_FROM) + ALSO_SEEN * each


def fallback(spec: PrivacySpec, limit: Limit, local: float, sums: float) -> str | None:
    """What is left if the noise of no other honest client is in the sums.

    Parameters
    ----------
    spec : PrivacySpec
    limit : Limit
    local, sums : float
        Shares of mu squared in what the server sees of each client, and in sums.
    """
    if spec.protection == "none":
        return None
    honest = spec.honest_survivors
    side, more = "the server's side", ""
    if spec.protection == "ckks":
        side = "the server's or the key holder's side"
        more = (
            " (how many there are is the server's word), these two do not work together, and the "
            "key holder takes nothing but whole numbers from what it opens"
        )
    alone = math.sqrt(local + honest * sums) * (spec.records_per_person or 1)
    # One client's noise is smaller, and departs more from the Gaussian it stands for.
    epsilon = limit.group_epsilon(alone) + 2 * (honest - 1) * limit.slack
    left = f"about (epsilon={epsilon:.3g}, delta={limit.delta:g})"
    return (
        f"assumed: in every sum there is the noise of {honest} or more clients that are not on "
        f"{side}{more}; if a client's own noise were the only one, there would be left of this "
        "run's guarantee " + (left if math.isfinite(epsilon) else "nothing worth the name")
    )


def _rounded_up(value: float) -> float:
    """To two significant digits."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.6g}")


def _in_a_sum(release: PlannedRelease) -> bool:
    return release.summed or release.averaged


def _replies(release: PlannedRelease) -> int:
    return release.times if release.replies is None else release.replies
