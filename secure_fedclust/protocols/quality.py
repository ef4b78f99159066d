"""How well centres fit, as one noisy figure: the mean squared distance to the nearest centre."""

import math
import warnings
from typing import Any

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import PrivacyWarning
from secure_fedclust.messages import Array, Real, private_stage, steps
from secure_fedclust.privacy.queries import Cost
from secure_fedclust.protocols.client import PrivateClient, answers
from secure_fedclust.protocols.session import Session

FEW = 5
"""Standard deviations of the noise below which a number of records is too small to divide by."""

COST = private_stage(
    "quality/cost",
    request={"centers": Array(("k", "d")), "cap": Real(1e-30, 1e80)},
    reply={"cost": steps("one"), "count": steps("one")},
    additive=True,
)


class QualityClient(PrivateClient):
    """Answers with the noisy sum of capped squared distances, and the noisy number of records.

    Privacy unit: a record of the client.
    Sensitivity: ``cost`` in docs/proofs/sensitivity.md.
    Who sees it: the server.
    """

    @answers(COST, after=(None,))
    def cost(self, centers: Floats, cap: float, share: float) -> dict[str, Any]:
        return self.reply(self.release(Cost(centers, self.domain.scale, cap), share))


def run(session: Session, centers: Floats, cap: float) -> tuple[float, float]:
    """The server's side: the figure and its standard error, in the caller's coordinates."""
    domain = session.domain
    working = (centers - domain.center) / domain.scale
    query = Cost(working, domain.scale, cap)

    request = {"centers": working, "cap": cap}
    parts = session.ask_sum(COST, query, 1.0, {"one": 1}, query.read, **request).parts
    total = sum(part[0] for part in parts)
    count = sum(part[2] for part in parts)
    if count < FEW * math.hypot(*(part[3] for part in parts)):
        warnings.warn(
            "too few records for this much noise: the figure means nothing; give more epsilon",
            PrivacyWarning,
            stacklevel=3,
        )
    count = max(count, 1.0)
    figure = min(max(total / count, 0.0), cap)
    # The total was centred with the noisy count, so that their noise is partly the same.
    noise = math.hypot(*(part[1] for part in parts))
    count_noise = math.hypot(*(part[3] for part in parts)) * abs(cap / 2 - figure)
    return figure, math.hypot(noise, count_noise) / count
