"""The public region that records are brought into before anything is computed from them."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.mechanism import squared_lengths
from secure_fedclust.privacy.spec import PrivacySpec


@dataclass(frozen=True)
class Domain:
    """Working coordinates, (x - center) / scale, in which no record is longer than sqrt(d).

    Parameters
    ----------
    center, scale : arrays of shape (d,)
    box : bool
        Whether every coordinate is also held between -1 and 1, because ranges were given.
    """

    center: Floats
    scale: Floats
    box: bool

    @classmethod
    def of(cls, spec: PrivacySpec, n_features: int) -> Self:
        """The region that a spec states, for records of so many features."""
        for name in ("ranges", "center"):
            given = getattr(spec, name)
            if given is not None and len(given) != n_features:
                raise ParameterError(
                    f"{name}: {len(given)} given, the records have {n_features} features; give "
                    "one for each, in the order of the columns"
                )
        if spec.ranges is not None:
            low, high = np.asarray(spec.ranges, dtype=np.float64).T
            return cls((low + high) / 2, (high - low) / 2, True)
        if spec.bound is None:
            raise ParameterError("the spec has no bound: give ranges, or bound")
        center = np.zeros(n_features) if spec.center is None else np.asarray(spec.center)
        scale = np.full(n_features, spec.bound / math.sqrt(n_features))
        return cls(center.astype(np.float64), scale, False)

    @property
    def n_features(self) -> int:
        """Number of features."""
        return len(self.center)

    @property
    def bound(self) -> float:
        """No record is longer than this, in working coordinates."""
        return math.sqrt(self.n_features)

    def enter(self, X: Floats) -> tuple[Floats, float]:
        """Records in working coordinates, clipped, and the share of them that had to be.

        The share is computed from records without noise: it is for the client's eyes.
        """
        working = (X - self.center) / self.scale
        clipped = self.hold(working)
        moved = (clipped != working).any(axis=1)
        return np.ascontiguousarray(clipped), float(moved.mean()) if len(X) else 0.0

    def leave(self, points: Floats) -> Floats:
        """Points of working coordinates as the caller's."""
        return np.asarray(points * self.scale + self.center)

    def hold(self, points: Floats) -> Floats:
        """Points of working coordinates, brought into the region."""
        if self.box:
            return np.clip(points, -1.0, 1.0)
        length = np.sqrt(squared_lengths(points))
        outside = length > self.bound
        held = points.copy()
        held[outside] *= (self.bound / length[outside])[:, None]
        return held
