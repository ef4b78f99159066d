"""Ranges of features that nobody knows, from two noisy histograms.

The first has bins whose edges double in size from a tiny to the largest value that is possible,
and finds where the records roughly are; the second divides that evenly. Both are added up over
clients. A range leaves out the ends that hold less than a small part of the records.
"""

import math
import warnings
from typing import Any

import numpy as np

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import PrivacyWarning
from secure_fedclust.messages import Array, private_stage, steps
from secure_fedclust.privacy.queries import Histograms
from secure_fedclust.protocols.client import PrivateClient, answers
from secure_fedclust.protocols.session import Session

DOUBLINGS = 40
LINEAR_BINS = 64
TAKEN_BACK = 4
ENOUGH = 120
"""Records over the noise of a count, from which ranges could be relied on in our trials."""

HISTOGRAMS = private_stage(
    "ranges/histograms",
    request={"edges": Array(("d", "edges"))},
    reply={"counts": steps("d", "bins")},
    additive=True,
)


class RangesClient(PrivateClient):
    """Answers with noisy histograms of its features.

    Privacy unit: a record of the client.
    Sensitivity: ``histogram`` in docs/proofs/sensitivity.md.
    Who sees it: the server.
    """

    @answers(HISTOGRAMS, after=(None, HISTOGRAMS))
    def histograms(self, edges: Floats, share: float) -> dict[str, Any]:
        return self.reply(self.release(Histograms(np.sort(edges, axis=1)), share))


def run(session: Session, coverage: float) -> Floats:
    """The server's side: low and high end of each feature, in working coordinates."""
    d = session.domain.n_features
    positive = np.ldexp(1.0, np.arange(-DOUBLINGS, 1))
    coarse = np.tile(np.concatenate([-positive[::-1], [0.0], positive]), (d, 1))
    counts, sigma = _ask(session, coarse)
    if counts.sum(axis=1).min() < ENOUGH * sigma:
        warnings.warn(
            "too few records for this much noise: the ranges may leave out many records, or "
            "be far too wide; give more epsilon",
            PrivacyWarning,
            stacklevel=3,
        )
    rough = _occupied(coarse, counts, sigma)
    fine = np.linspace(rough[:, 0], rough[:, 1], LINEAR_BINS + 1, axis=1)
    return _covering(fine, *_ask(session, fine), coverage)


def _ask(session: Session, edges: Floats) -> tuple[Floats, float]:
    query = Histograms(edges)
    sizes = {"d": len(edges), "bins": edges.shape[1] - 1}
    parts = session.ask_sum(HISTOGRAMS, query, 0.5, sizes, query.read, edges=edges).parts
    return np.sum([counts for counts, _ in parts], axis=0), math.hypot(*(s for _, s in parts))


def _occupied(edges: Floats, counts: Floats, sigma: float) -> Floats:
    """From the first to the last bin that stands out from the noise, and one more on each side."""
    bins = counts.shape[1]
    ends = np.empty((len(edges), 2))
    for j, row in enumerate(counts):
        found = np.flatnonzero(row > 4.5 * sigma)
        # Where nothing stands out, say no more than was known before.
        low, high = (found[0] - 1, found[-1] + 2) if len(found) else (0, bins)
        ends[j] = edges[j, [max(low, 0), min(high, bins)]]
    return ends


def _covering(edges: Floats, counts: Floats, sigma: float, coverage: float) -> Floats:
    """Leave out bins from both ends while what they hold is little, or no more than noise.

    Some are taken back in: a range that is a little too wide does less harm than one too narrow.
    """
    bins = counts.shape[1]
    noise = 3 * sigma * np.sqrt(np.arange(1, bins + 1))
    ends = np.empty((len(edges), 2))
    for j, row in enumerate(counts):
        allowed = np.maximum((1 - coverage) / 2 * max(row.sum(), 0.0), noise)
        low = int(np.argmax(np.append(np.cumsum(row) > allowed, True)))
        high = bins - int(np.argmax(np.append(np.cumsum(row[::-1]) > allowed, True)))
        if low >= high:
            low, high = 0, bins
        ends[j] = edges[j, [max(low - TAKEN_BACK, 0), min(high + TAKEN_BACK, bins)]]
    return ends
