"""How far one record, or one client, can move what is released: L2 sensitivities.

Every function takes lengths in one unit of the caller's choice and returns a `Sensitivity` that
names its formula; docs/proofs/sensitivity.md has the proofs under the same names. Results are
rounded up. Adjacency is ``add_remove`` (one record more or less) or ``replace_one`` (one record
changed).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from secure_fedclust.errors import ParameterError
from secure_fedclust.parameters import check_choice
from secure_fedclust.privacy.terms import ADJACENCIES, Adjacency


@dataclass(frozen=True)
class Sensitivity:
    """An upper bound on how far neighbouring data sets are apart.

    Attributes
    ----------
    value : float
    formula : str
        Name of the formula, as in docs/proofs/sensitivity.md.
    inputs : mapping
        What the formula was given.
    """

    value: float
    formula: str
    inputs: Mapping[str, float]


def sums(radius: float, adjacency: Adjacency) -> Sensitivity:
    """Sums by cluster of vectors no longer than `radius`; each record counts for one in all."""
    value = {"add_remove": radius, "replace_one": 2 * radius}
    return _sensitivity("sums", value, adjacency, radius=radius)


def sums_and_counts(radius: float, count_weight: float, adjacency: Adjacency) -> Sensitivity:
    """The same sums together with counts times `count_weight`.

    Under ``replace_one`` counts up to a weight of `radius` are free.
    """
    both = math.hypot(radius, count_weight)
    value = {"add_remove": both, "replace_one": max(2 * radius, math.sqrt(2) * both)}
    return _sensitivity(
        "sums_and_counts", value, adjacency, radius=radius, count_weight=count_weight
    )


def best_count_weight(radius: float, offset: float, n_features: int, adjacency: Adjacency) -> float:
    """The weight of counts that gives means the least error.

    Parameters
    ----------
    radius : float
    offset : float
        Typical length of a mean, seen from the point that sums are taken about.
    n_features : int
    adjacency : {"add_remove", "replace_one"}
    """
    if adjacency == "replace_one":
        return radius
    return math.sqrt(radius * offset / math.sqrt(n_features))


def synopsis(
    radius: float, count_weight: float, square_weight: float, adjacency: Adjacency
) -> Sensitivity:
    """Sums v, counts, and squared lengths ||v||^2 - radius^2 / 2 times `square_weight`, by cell.

    Taking half of the largest square off makes the contribution of a square half as long.
    """
    if square_weight * radius > 1 + 1e-9:
        raise ParameterError(
            f"square_weight={square_weight}: give at most 1 / radius = {1 / radius:g}"
        )
    one = math.hypot(count_weight, radius, square_weight * radius * radius / 2)
    value = {"add_remove": one, "replace_one": max(2 * radius, math.sqrt(2) * one)}
    return _sensitivity(
        "synopsis",
        value,
        adjacency,
        radius=radius,
        count_weight=count_weight,
        square_weight=square_weight,
    )


def moments(
    bound: float,
    count_weight: float,
    sum_weight: float,
    square_weight: float,
    adjacency: Adjacency,
) -> Sensitivity:
    """Count, sum and second-moment matrix of vectors no longer than `bound`, weighted.

    The matrix is released as its upper triangle, with what is off the diagonal times sqrt(2).
    """
    one = math.hypot(count_weight, sum_weight * bound, square_weight * bound * bound)
    two = 2 * sum_weight * bound
    if sum_weight < math.sqrt(2) * square_weight * bound:
        steepness = (sum_weight / square_weight) ** 2 / 2
        two = math.sqrt(2) * math.hypot(
            sum_weight * bound, square_weight * bound * bound, square_weight * steepness
        )
    return _sensitivity(
        "moments",
        {"add_remove": one, "replace_one": two},
        adjacency,
        bound=bound,
        count_weight=count_weight,
        sum_weight=sum_weight,
        square_weight=square_weight,
    )


def floor_mean(radius: float, floor: float, adjacency: Adjacency) -> Sensitivity:
    """Means with a floor, sum / max(weight, floor), of all clusters together.

    Vectors are no longer than `radius`; the floor must be enforced on every data set.
    """
    _check_floor(floor)
    value = {
        "add_remove": 2 * radius / (floor + 1),
        "replace_one": max(2 * math.sqrt(2) * radius / (floor + 1), 2 * radius / floor),
    }
    return _sensitivity("floor_mean", value, adjacency, radius=radius, floor=floor)


def theorem9(radius: float, floor: float, n_clusters: int, adjacency: Adjacency) -> Sensitivity:
    """FedGEM's printed bound for the same means, which holds where the floor is enforced."""
    _check_floor(floor)
    value = math.sqrt(n_clusters) * (3 + 2 / floor) * radius / floor
    return _sensitivity(
        "theorem9",
        dict.fromkeys(ADJACENCIES, value),
        adjacency,
        radius=radius,
        floor=floor,
        n_clusters=n_clusters,
    )


def histogram(weight: float, adjacency: Adjacency, n_histograms: int = 1) -> Sensitivity:
    """Counts times `weight`; each record counts once in each of so many histograms."""
    one = weight * math.sqrt(n_histograms)
    value = {"add_remove": one, "replace_one": math.sqrt(2) * one}
    return _sensitivity("histogram", value, adjacency, weight=weight, n_histograms=n_histograms)


def marks(weight: float, n_marks: int, adjacency: Adjacency) -> Sensitivity:
    """Counts by cell times `weight`, and sums by cell of marks of half a weight, either sign."""
    one = weight * math.sqrt(n_marks / 4 + 1)
    value = {
        "add_remove": one,
        # In one cell only marks can differ, each by a whole weight.
        "replace_one": max(weight * math.sqrt(n_marks), math.sqrt(2) * one),
    }
    return _sensitivity("marks", value, adjacency, weight=weight, n_marks=n_marks)


def cost(cap: float, count_weight: float, adjacency: Adjacency) -> Sensitivity:
    """A sum of numbers between 0 and `cap`, each less cap / 2, and a weighted count."""
    value = {"add_remove": math.hypot(cap / 2, count_weight), "replace_one": cap}
    return _sensitivity("cost", value, adjacency, cap=cap, count_weight=count_weight)


def message(norm: float, adjacency: Adjacency) -> Sensitivity:
    """A whole message clipped to `norm`, for the unit ``client``.

    ``add_remove`` replaces the client's data by none: its message becomes zero.
    """
    value = {"add_remove": norm, "replace_one": 2 * norm}
    return _sensitivity("message", value, adjacency, norm=norm)


def _check_floor(floor: float) -> None:
    if not floor >= 1:
        raise ParameterError(
            f"floor={floor}: the bound on means is proved for floors of at least 1; without a "
            "floor one record can move an empty cluster across the whole domain"
        )


def _sensitivity(
    formula: str, value: Mapping[str, float], adjacency: Adjacency, **inputs: float
) -> Sensitivity:
    check_choice("adjacency", adjacency, ADJACENCIES)
    for name, given in inputs.items():
        if not 0 <= given < math.inf:
            raise ParameterError(f"{name}={given}: give a finite number of at least 0")
    rounded = float(np.nextafter(value[adjacency] * (1 + 1e-14), np.inf))
    return Sensitivity(rounded, f"{formula}/{adjacency}", inputs)
