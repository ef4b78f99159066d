"""Questions about what clients make of their records, instead of the records themselves."""

from dataclasses import dataclass

import numpy as np

from secure_fedclust.messages import Stage, Values
from secure_fedclust.privacy.domain import Domain


@dataclass(frozen=True)
class FeatureSpace:
    """The region that features are brought into: a ball about the origin.

    Parameters
    ----------
    n_features : int
    scale : float
        Features are shortened to this times the root of their number.
    """

    n_features: int
    scale: float = 1.0

    @property
    def domain(self) -> Domain:
        """Working coordinates of features."""
        return Domain(np.zeros(self.n_features), np.full(self.n_features, self.scale), False)

    def within(self, asked: Stage, request: Values) -> tuple[Stage, Values]:
        """The same question: clients know what they were told to make of their records."""
        return asked, request
