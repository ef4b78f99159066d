"""Questions about what clients make of their records, instead of the records themselves."""

import math
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.messages import Digest, Stage, Values, stage
from secure_fedclust.privacy.domain import Domain


@dataclass(frozen=True)
class FeatureSpace:
    """The region of features, which have length one: a ball about the origin.

    Parameters
    ----------
    n_features : int
    made_by : str, optional
        Digest of what makes features of records. Questions for sums then name it: clients that were
        told different things have masks that do not cancel.
    """

    n_features: int
    made_by: str | None = None

    @property
    def domain(self) -> Domain:
        """Working coordinates of features."""
        scale = np.full(self.n_features, 1 / math.sqrt(self.n_features))
        return Domain(np.zeros(self.n_features), scale, False)

    def within(self, asked: Stage, request: Values) -> tuple[Stage, Values]:
        """The same question, about what is made of records."""
        if self.made_by is None:
            return asked, request
        return of_features(asked), {**request, "made_by": self.made_by}


def of_features(asked: Stage) -> Stage:
    """The same question, which names what features are made by."""
    return stage(
        f"{asked.name}/features",
        request={**asked.request.fields, "made_by": Digest()},
        reply=asked.reply.fields,
        form=asked.form,
        additive=asked.additive,
    )


def digest(shape: tuple[object, ...], *arrays: Floats) -> str:
    """Tells what makes features, numbers and arrays, from everything else."""
    named = repr((*shape, *(array.shape for array in arrays)))
    parts = (array.astype("<f8").tobytes() for array in arrays)
    return sha256(b"".join([named.encode(), *parts])).hexdigest()
