"""Questions about a client's records whose answers are bounded, record by record.

A query says how sensitive its answer is before it sees a record, and answers in whole grid steps.
Each record's contribution is computed from that record alone, shortened, and truncated towards
zero; only then are contributions added up, exactly.

Records are in working coordinates, in which they are no longer than `sqrt(d)` (see `Domain`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy import sensitivity as formulas
from secure_fedclust.privacy.mechanism import (
    FINE_BITS,
    LARGEST_RADIUS,
    Bounded,
    Noisy,
    add_up,
    clip_rows,
    exponent_for,
)
from secure_fedclust.privacy.sensitivity import Sensitivity
from secure_fedclust.privacy.terms import Adjacency

Bools = NDArray[np.bool_]

_CELLS_AT_ONCE = 1 << 21
_SHARE_BITS = 16


class Query(ABC):
    """What every query can do."""

    fine_bits: ClassVar[int] = FINE_BITS
    extra_bits: ClassVar[int] = 0

    @abstractmethod
    def sensitivity(self, adjacency: Adjacency, exponent: int | None = None) -> Sensitivity:
        """How far a record moves the answer: in grid steps, or in real terms without a grid."""

    @property
    @abstractmethod
    def coordinates(self) -> int:
        """How many numbers the answer has."""

    @abstractmethod
    def answer(self, X: Floats, adjacency: Adjacency, exponent: int) -> Bounded:
        """The exact answer, in grid steps."""

    def exponent(self, adjacency: Adjacency, mu: float) -> int:
        """Exponent of the grid step of a release that costs `mu`."""
        real = self.sensitivity(adjacency).value
        return exponent_for(real, mu, self.fine_bits) - self.extra_bits


@dataclass(frozen=True)
class CellSums(Query):
    """For each cell of a partition: count, sum of residuals, and, if asked for, squared lengths.

    A record belongs to the cell of the nearest centre. Its residual from that centre is shortened
    to `radius`.

    Parameters
    ----------
    centers : array of shape (k, d)
        Public, or computed from what was released.
    radius : float
    count_weight : float
        Weight of counts against sums, in units of `radius`.
    square_weight : float
        Weight of squared lengths, from 0 (not released) to 1.
    scale : array of shape (d,), optional
        What working coordinates are multiplied by to find the nearest centre; 1 if not given.
    """

    centers: Floats
    radius: float
    count_weight: float
    square_weight: float = 0.0
    scale: Floats | None = None

    def sensitivity(self, adjacency: Adjacency, exponent: int | None = None) -> Sensitivity:
        radius = in_steps(self.radius, exponent)
        count_weight = in_steps(self.radius * self.count_weight, exponent)
        if not self.square_weight:
            return formulas.sums_and_counts(radius, count_weight, adjacency)
        square_weight = self.square_weight / radius
        found = formulas.synopsis(radius, count_weight, square_weight, adjacency)
        return _allow_truncation(found, 1, adjacency, exponent)

    @property
    def coordinates(self) -> int:
        k, d = self.centers.shape
        return int(k * (d + (2 if self.square_weight else 1)))

    def answer(self, X: Floats, adjacency: Adjacency, exponent: int) -> Bounded:
        sensitivity = self.sensitivity(adjacency, exponent)
        radius = int(in_steps(self.radius, exponent))
        count_weight = int(in_steps(self.radius * self.count_weight, exponent))
        k = len(self.centers)
        cells = self._cells_of(X)
        residuals = clip_rows(np.ldexp(X - self.centers[cells], -exponent), radius)
        fields = {
            "sums": add_up(residuals, cells, k),
            "counts": count_weight * np.bincount(cells, minlength=k),
        }
        if self.square_weight:
            squared = np.zeros(len(X))
            for column in residuals.T:
                squared += np.square(column / radius)
            squares = np.trunc(self.square_weight * radius * (np.minimum(squared, 1) - 0.5))
            fields["squares"] = add_up(squares.astype(np.int64)[:, None], cells, k)[:, 0]
        return Bounded(fields, sensitivity, exponent)

    def _cells_of(self, X: Floats) -> Ints:
        scale = 1.0 if self.scale is None else self.scale
        return nearest(X * scale, self.centers * scale)

    def read(self, noisy: Noisy) -> "Cells":
        """The noisy answer in real terms."""
        step = math.ldexp(1.0, noisy.exponent)
        steps = in_steps(self.radius * self.count_weight, noisy.exponent)
        counts = noisy.fields["counts"] / steps
        squares = None
        square_sigma = 0.0
        if self.square_weight:
            scale = step * self.radius / self.square_weight
            squares = noisy.fields["squares"] * scale + counts * self.radius**2 / 2
            square_sigma = noisy.sigma * scale
        return Cells(
            self.centers,
            counts,
            np.asarray(noisy.fields["sums"] * step),
            squares,
            noisy.sigma / steps,
            noisy.sigma * step,
            square_sigma,
        )


@dataclass(frozen=True, kw_only=True)
class AssignedSums(CellSums):
    """The same, for cells that records are assigned to by something other than distance.

    Parameters
    ----------
    cells_of : function
        Cell of each record, from that record and public values alone, bit for bit.
    """

    cells_of: Callable[[Floats], Ints]

    def _cells_of(self, X: Floats) -> Ints:
        return self.cells_of(X)


@dataclass(frozen=True)
class Marks(Query):
    """For each cell: how many records it has, and how many of them carry each of some marks.

    Parameters
    ----------
    n_cells, n_marks : int
    marks_of : function
        Cell of each record, and which marks it carries as a bool array of shape (n, n_marks): both
        from that record and public values alone, bit for bit.
    """

    n_cells: int
    n_marks: int
    marks_of: Callable[[Floats], tuple[Ints, Bools]]

    def sensitivity(self, adjacency: Adjacency, exponent: int | None = None) -> Sensitivity:
        return formulas.marks(2 * in_steps(0.5, exponent), self.n_marks, adjacency)

    @property
    def coordinates(self) -> int:
        return self.n_cells * (1 + self.n_marks)

    def answer(self, X: Floats, adjacency: Adjacency, exponent: int) -> Bounded:
        half = int(in_steps(0.5, exponent))
        cells, marks = self.marks_of(X)
        fields = {
            "counts": 2 * half * np.bincount(cells, minlength=self.n_cells),
            "marks": half * add_up(np.where(marks, 1, -1), cells, self.n_cells),
        }
        return Bounded(fields, self.sensitivity(adjacency, exponent), exponent)

    def read(self, noisy: Noisy) -> tuple[Floats, Floats, float]:
        """Noisy counts, noisy numbers of records that carry each mark, and the counts' noise."""
        half = in_steps(0.5, noisy.exponent)
        counts = noisy.fields["counts"] / (2 * half)
        marks = (noisy.fields["marks"] / half + counts[:, None]) / 2
        return counts, marks, noisy.sigma / (2 * half)


@dataclass(frozen=True)
class Cells:
    """Noisy counts, residual sums and squared lengths of cells, with their noise.

    The noise of `squares` given is that of the squared lengths alone; they were centred with the
    noisy counts.
    """

    centers: Floats
    counts: Floats
    sums: Floats
    squares: Floats | None
    count_sigma: float
    sum_sigma: float
    square_sigma: float = 0.0


@dataclass(frozen=True)
class SoftSums(Query):
    """For each component: its total responsibility, and the sum of residuals weighted with it.

    Responsibilities are those of Gaussians of unit covariance, in coordinates that are the working
    ones times `scale`; they are rounded down to multiples of 2^-16, so that they never add up to
    more than one. Products of whole numbers are exact.
    """

    extra_bits: ClassVar[int] = _SHARE_BITS

    centers: Floats
    scale: Floats
    radius: float
    count_weight: float

    def sensitivity(self, adjacency: Adjacency, exponent: int | None = None) -> Sensitivity:
        # The exponent is that of products; residuals are whole in steps 2^16 times as large.
        finer = None if exponent is None else exponent + _SHARE_BITS
        radius = in_steps(self.radius, finer)
        count_weight = in_steps(self.radius * self.count_weight, finer)
        if exponent is not None:
            radius, count_weight = radius * 2**_SHARE_BITS, count_weight * 2**_SHARE_BITS
        return formulas.sums_and_counts(radius, count_weight, adjacency)

    @property
    def coordinates(self) -> int:
        k, d = self.centers.shape
        return int(k * (d + 1))

    def answer(self, X: Floats, adjacency: Adjacency, exponent: int) -> Bounded:
        sensitivity = self.sensitivity(adjacency, exponent)
        sums, shares = self.exact(X, exponent + _SHARE_BITS)
        count_weight = int(in_steps(self.radius * self.count_weight, exponent + _SHARE_BITS))
        # Holding a total below a limit brings neighbouring totals no farther apart.
        fields = {"sums": _held(sums), "counts": _held(count_weight * shares)}
        return Bounded(fields, sensitivity, exponent)

    def exact(self, X: Floats, exponent: int) -> tuple[Any, Any]:
        """Exact sums and total responsibilities, both in units of 2^-16 of a step.

        Those of a block fit into 64 bits; their totals are Python's numbers, which have no limit.
        """
        k, d = self.centers.shape
        radius = int(in_steps(self.radius, exponent))
        sums, shares = np.zeros((k, d), dtype=object), np.zeros(k, dtype=object)
        for rows in _blocks(len(X), k):
            block = X[rows]
            parts = responsibilities(block * self.scale, self.centers * self.scale)
            for j in range(k):
                residuals = clip_rows(np.ldexp(block - self.centers[j], -exponent), radius)
                sums[j] += parts[:, j] @ residuals
            shares += parts.sum(axis=0)
        return sums, shares

    def read(self, noisy: Noisy) -> Cells:
        """The noisy answer in real terms."""
        step = math.ldexp(1.0, noisy.exponent)
        steps = in_steps(self.radius * self.count_weight, noisy.exponent + _SHARE_BITS)
        steps *= 2**_SHARE_BITS
        return Cells(
            self.centers,
            noisy.fields["counts"] / steps,
            np.asarray(noisy.fields["sums"] * step),
            None,
            noisy.sigma / steps,
            noisy.sigma * step,
        )


@dataclass(frozen=True)
class FloorMeans(Query):
    """For each component: the mean of its residuals, with a floor under its weight.

    Parameters
    ----------
    soft : SoftSums
        Centres, scale and radius.
    floor : float
        At least 1.
    printed_bound : bool
        Calibrate with FedGEM's Theorem 9 instead of the exact constant.
    enforced : bool
        If false, the floor is in the formula but not under the weights, as in the paper, and the
        sensitivity that this query states is wrong: to show that, and for nothing else.
    """

    # A floor makes the sensitivity many times smaller than the radius, which must fit as well.
    fine_bits: ClassVar[int] = 16

    soft: SoftSums
    floor: float
    printed_bound: bool = False
    enforced: bool = True

    def sensitivity(self, adjacency: Adjacency, exponent: int | None = None) -> Sensitivity:
        radius = in_steps(self.soft.radius, exponent)
        floor = math.floor(self.floor * 2**_SHARE_BITS) / 2**_SHARE_BITS
        k, d = self.soft.centers.shape
        if self.printed_bound:
            found = formulas.theorem9(radius, floor, k, adjacency)
        else:
            found = formulas.floor_mean(radius, floor, adjacency)
        # Means are rounded to the grid at the end, which can part any of them by one more step.
        return _allow_truncation(found, k * d, "replace_one", exponent)

    @property
    def coordinates(self) -> int:
        return self.soft.centers.size

    def answer(self, X: Floats, adjacency: Adjacency, exponent: int) -> Bounded:
        sensitivity = self.sensitivity(adjacency, exponent)
        sums, shares = self.soft.exact(X, exponent)
        floor = math.floor(self.floor * 2**_SHARE_BITS) if self.enforced else 1
        weights = np.maximum(shares, floor)
        fields = {"means": (sums // weights[:, None]).astype(np.int64)}
        return Bounded(fields, sensitivity, exponent)

    def read(self, noisy: Noisy) -> tuple[Floats, float]:
        """Noisy means of residuals and their noise."""
        step = math.ldexp(1.0, noisy.exponent)
        return np.asarray(noisy.fields["means"] * step), noisy.sigma * step


@dataclass(frozen=True)
class Moments(Query):
    """Number of records, their sum, and their second-moment matrix.

    Parameters
    ----------
    n_features : int
    shares : tuple of three floats
        Of the squared sensitivity, for number, sum and matrix.
    """

    n_features: int
    shares: tuple[float, float, float] = (0.1, 0.3, 0.6)

    @property
    def _bound(self) -> float:
        return math.sqrt(self.n_features)

    def _weights(self, exponent: int | None) -> tuple[float, float, float]:
        # Contributions are weight, sum_weight * x and matrix_weight * x x^T, each no longer than
        # the bound times the root of its share.
        bound = in_steps(self._bound, exponent)
        count, sums, matrix = (math.sqrt(share / sum(self.shares)) for share in self.shares)
        return math.floor(bound * count) if exponent is not None else bound * count, sums, matrix

    def sensitivity(self, adjacency: Adjacency, exponent: int | None = None) -> Sensitivity:
        bound = in_steps(self._bound, exponent)
        count_weight, sum_weight, matrix_weight = self._weights(exponent)
        found = formulas.moments(bound, count_weight, sum_weight, matrix_weight / bound, adjacency)
        width = self.n_features * (self.n_features + 3) // 2
        return _allow_truncation(found, width, adjacency, exponent)

    @property
    def coordinates(self) -> int:
        return 1 + self.n_features + self.n_features * (self.n_features + 1) // 2

    def answer(self, X: Floats, adjacency: Adjacency, exponent: int) -> Bounded:
        sensitivity = self.sensitivity(adjacency, exponent)
        bound = int(in_steps(self._bound, exponent))
        count_weight, sum_weight, matrix_weight = self._weights(exponent)
        rows, columns = np.triu_indices(self.n_features)
        weight = np.where(rows == columns, matrix_weight, math.sqrt(2) * matrix_weight)
        # Products of floats are rounded: keep their length below the bound all the same.
        weight *= 1 - 1e-12
        sums = np.zeros(self.n_features, dtype=np.int64)
        squares = np.zeros(len(rows), dtype=np.int64)
        for block in _blocks(len(X), len(rows)):
            short = clip_rows(np.ldexp(X[block], -exponent), bound)
            sums += np.trunc(sum_weight * (1 - 1e-12) * short).astype(np.int64).sum(axis=0)
            unit = short / bound
            products = np.trunc(unit[:, rows] * unit[:, columns] * weight * bound)
            squares += products.astype(np.int64).sum(axis=0)
        fields = {
            "count": np.array([int(count_weight) * len(X)]),
            "sums": sums,
            "squares": squares,
        }
        return Bounded(fields, sensitivity, exponent)

    def totals(self, noisy: Noisy) -> tuple[float, float, Floats, Floats]:
        """Noisy number of records and its variance, their sum, and the sum of their squares."""
        bound = in_steps(self._bound, noisy.exponent)
        count_weight, sum_weight, matrix_weight = self._weights(noisy.exponent)
        step = math.ldexp(1.0, noisy.exponent)
        rows, columns = np.triu_indices(self.n_features)
        weight = np.where(rows == columns, matrix_weight, math.sqrt(2) * matrix_weight)
        squares = np.zeros((self.n_features, self.n_features))
        squares[rows, columns] = noisy.fields["squares"] * step / weight * (bound * step)
        squares[columns, rows] = squares[rows, columns]
        sums = np.asarray(noisy.fields["sums"] * (step / sum_weight))
        count = float(noisy.fields["count"][0]) / count_weight
        return count, (noisy.sigma / count_weight) ** 2, sums, squares

    @staticmethod
    def mean_and_covariance(
        count: float, count_variance: float, sums: Floats, squares: Floats
    ) -> tuple[Floats, Floats]:
        """Mean and covariance from totals, which may be sums over clients."""
        n = max(count, math.sqrt(count_variance), 1.0)
        mean = sums / n
        return mean, squares / n - np.outer(mean, mean)


@dataclass(frozen=True)
class Histograms(Query):
    """One histogram a feature, over public edges.

    Parameters
    ----------
    edges : array of shape (d, m + 1)
        Ascending in each row. Records below the first or above the last edge count in the first or
        the last bin.
    """

    edges: Floats

    def sensitivity(self, adjacency: Adjacency, exponent: int | None = None) -> Sensitivity:
        if self.edges.shape[1] < 2:
            raise ParameterError(f"edges: {self.edges.shape[1]} given, a bin has two")
        return formulas.histogram(in_steps(1.0, exponent), adjacency, len(self.edges))

    @property
    def coordinates(self) -> int:
        return int(len(self.edges) * (self.edges.shape[1] - 1))

    def answer(self, X: Floats, adjacency: Adjacency, exponent: int) -> Bounded:
        sensitivity = self.sensitivity(adjacency, exponent)
        d, m = len(self.edges), self.edges.shape[1] - 1
        counts = np.empty((d, m), dtype=np.int64)
        for j in range(d):
            bins = np.searchsorted(self.edges[j], X[:, j], side="right") - 1
            counts[j] = np.bincount(np.clip(bins, 0, m - 1), minlength=m)
        fields = {"counts": int(in_steps(1.0, exponent)) * counts}
        return Bounded(fields, sensitivity, exponent)

    def read(self, noisy: Noisy) -> tuple[Floats, float]:
        """Noisy counts and their noise."""
        one = in_steps(1.0, noisy.exponent)
        return noisy.fields["counts"] / one, noisy.sigma / one


@dataclass(frozen=True)
class Cost(Query):
    """How far records are from their nearest centre: sum of squares up to `cap`, and a count.

    Distances are those of working coordinates times `scale`.
    """

    centers: Floats
    scale: Floats
    cap: float
    count_weight: float = 0.25

    def sensitivity(self, adjacency: Adjacency, exponent: int | None = None) -> Sensitivity:
        cap = in_steps(self.cap, exponent)
        count_weight = in_steps(self.cap * self.count_weight, exponent)
        found = formulas.cost(cap, count_weight, adjacency)
        return _allow_truncation(found, 1, adjacency, exponent)

    @property
    def coordinates(self) -> int:
        return 2

    def answer(self, X: Floats, adjacency: Adjacency, exponent: int) -> Bounded:
        sensitivity = self.sensitivity(adjacency, exponent)
        cap = int(in_steps(self.cap, exponent))
        count_weight = int(in_steps(self.cap * self.count_weight, exponent))
        squared = np.full(len(X), np.inf)
        centers = self.centers * self.scale
        for rows in _blocks(len(X), len(centers)):
            squared[rows] = cdist(X[rows] * self.scale, centers, "sqeuclidean").min(axis=1)
        steps = np.trunc(np.fmin(np.ldexp(squared, -exponent), cap) - cap / 2)
        fields = {
            "cost": np.array([steps.astype(np.int64).sum()]),
            "count": np.array([count_weight * len(X)]),
        }
        return Bounded(fields, sensitivity, exponent)

    def read(self, noisy: Noisy) -> tuple[float, float, float, float]:
        """Noisy sum and its noise, noisy number of records and its noise."""
        step = math.ldexp(1.0, noisy.exponent)
        cap = in_steps(self.cap, noisy.exponent) * step
        steps = in_steps(self.cap * self.count_weight, noisy.exponent)
        count = float(noisy.fields["count"][0]) / steps
        total = float(noisy.fields["cost"][0]) * step + count * cap / 2
        return total, noisy.sigma * step, count, noisy.sigma / steps


def clip_message(bounded: Bounded, norm: int, adjacency: Adjacency) -> Bounded:
    """A client's whole message shortened to `norm` grid steps, for the unit ``client``."""
    flat = np.concatenate([field.ravel() for field in bounded.fields.values()])
    short = clip_rows(flat[None].astype(np.float64), norm)[0]
    ends = np.cumsum([field.size for field in bounded.fields.values()])[:-1]
    parts = np.split(short, ends)
    clipped = {
        name: part.reshape(field.shape)
        for (name, field), part in zip(bounded.fields.items(), parts, strict=True)
    }
    return Bounded(clipped, formulas.message(norm, adjacency), bounded.exponent)


def nearest(X: Floats, centers: Floats) -> Ints:
    """Nearest centre of each record, which does not depend on what other records there are."""
    cells = np.empty(len(X), dtype=np.int64)
    for rows in _blocks(len(X), len(centers)):
        # Unlike products of matrices, this computes every distance by itself.
        cells[rows] = cdist(X[rows], centers, "sqeuclidean").argmin(axis=1)
    return cells


def responsibilities(X: Floats, centers: Floats) -> Ints:
    """Responsibilities of unit Gaussians of equal weight, in units of 2^-16, rounded down."""
    logits = cdist(X, centers, "sqeuclidean")
    logits *= -0.5
    logits -= logits.max(axis=1, keepdims=True)
    np.exp(logits, out=logits)
    total = np.zeros(len(X))
    for column in logits.T:
        total += column
    # A little less than the true share, lest rounding make the shares of a record exceed one.
    shares = np.floor(logits / total[:, None] * (2**_SHARE_BITS * (1 - 1e-12)))
    return np.asarray(np.nan_to_num(shares), dtype=np.int64)


def _blocks(n: int, width: int) -> Iterator[slice]:
    """Rows in blocks, so that room for `width` numbers a row does not grow with their number."""
    size = min(max(1, _CELLS_AT_ONCE // width), 1 << 14)
    return (slice(start, start + size) for start in range(0, n, size))


def _held(totals: Any) -> Ints:
    limit = 1 << 60
    return np.asarray(np.clip(totals, -limit, limit), dtype=np.int64)


def in_steps(length: float, exponent: int | None) -> float:
    """A length in whole grid steps, rounded down, or as it is where there is no grid.

    What does not fit is refused here, before any record is looked at: a refusal must not tell
    whether there are any.
    """
    if exponent is None:
        return length
    steps = length / 2.0**exponent
    if not 1 <= steps <= LARGEST_RADIUS:
        raise ParameterError(
            f"a radius, weight or cap of {length:g} is {steps:.3g} grid steps, which must be from "
            f"1 to {LARGEST_RADIUS}: bring it closer to the others"
        )
    return float(math.floor(steps))


def _allow_truncation(
    found: Sensitivity, width: int, adjacency: Adjacency, exponent: int | None
) -> Sensitivity:
    """Widen a bound on a difference: truncating both sides can part each coordinate by a step."""
    if exponent is None or adjacency == "add_remove":
        return found
    return Sensitivity(found.value + math.sqrt(width), found.formula, found.inputs)
