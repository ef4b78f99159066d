"""The noise itself: as large as charged, of the right shape, and each number by itself.

Whoever knows the data knows the exact answers, and so sees the noise. Its size is compared with
what the ledger was charged for, field by field: noise that is too small in one and too large in
another adds up to the right amount, and protects nobody.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import chi2, kurtosistest
from scipy.stats import t as student

from secure_fedclust.arrays import Ints
from secure_fedclust.audit.findings import Finding, Verdict

_MOST = 300
"""Numbers of a run whose dependence on each other is looked at."""

_MANY = 1_000_000
_ROUNDING = 1e-3
_SEEN = "looks at the noise itself, beside what the ledger was charged for"

Key = tuple[str, int, str]
"""On which data, in which release of the run, and in which field."""


@dataclass
class Noise:
    """What was seen of the noise of many runs.

    Attributes
    ----------
    sizes : mapping of key to (float, int)
        Sum of squares, in units of what was charged, and how many numbers that is of.
    rows : list of arrays
        The first numbers of each run, in the same units.
    largest : float
        The farthest from zero, in the same units.
    """

    sizes: dict[Key, tuple[float, int]] = field(default_factory=dict)
    rows: list[NDArray[np.float32]] = field(default_factory=list, repr=False)
    largest: float = 0.0

    @property
    def numbers(self) -> int:
        """How many there were."""
        return sum(n for _, n in self.sizes.values())

    def note(self, data: str, run: Iterable[tuple[float, Mapping[str, Ints]]]) -> None:
        """Add a run: for each release the noise charged, and what was added to each field."""
        kept = []
        releases = list(run)
        for i, (sigma, fields) in enumerate(releases):
            for name, drawn in fields.items():
                unit = np.ravel(drawn) / sigma
                squares, n = self.sizes.get((data, i, name), (0.0, 0))
                self.sizes[data, i, name] = squares + float(unit @ unit), n + unit.size
                self.largest = max(self.largest, float(np.abs(unit).max(initial=0.0)))
                kept.append(unit[: max(1, _MOST // (len(releases) * len(fields)))])
        self.rows.append(np.concatenate(kept).astype(np.float32))

    def plus(self, other: "Noise") -> "Noise":
        """Both together."""
        sizes = dict(self.sizes)
        for key, (squares, n) in other.sizes.items():
            before = sizes.get(key, (0.0, 0))
            sizes[key] = before[0] + squares, before[1] + n
        return Noise(sizes, self.rows + other.rows, max(self.largest, other.largest))


SURE = 1 - 1e-6
"""Confidence of what looks at the noise itself: there is so much of it that no bug needs less."""


def judge_noise(noise: Noise, confidence: float = SURE) -> list[Finding]:
    """What was seen of the noise, beside what it should be."""
    return [as_charged(noise, confidence), shape(noise, confidence), apart(noise, confidence)]


def as_charged(noise: Noise, confidence: float) -> Finding:
    """Whether the noise of every field is as large as what was charged for it.

    The sum of squares of standard normal numbers is chi-squared.
    """
    alpha = (1 - confidence) / 2 / len(noise.sizes)
    found = {
        key: (
            math.sqrt(squares / n),
            math.sqrt(squares / chi2.ppf(1 - alpha, n)),
            math.sqrt(squares / chi2.ppf(alpha, n)),
        )
        for key, (squares, n) in noise.sizes.items()
    }
    (_, release, name), (figure, low, high) = min(found.items(), key=lambda item: item[1][2])
    # Rounding to a grid moves the ratio by less than this.
    verdict: Verdict = "FAIL" if high < 1 - _ROUNDING else "PASS" if low > 0.5 else "INCONCLUSIVE"
    return Finding(
        name="noise as charged",
        kind="statistical",
        threat=_SEEN,
        measure="noise over noise charged",
        figure=figure,
        interval=(low, high),
        ceiling=None,
        verdict=verdict,
        words=(
            f"The noise of {name!r} in release {release + 1} is smaller than what was charged."
            if verdict == "FAIL"
            else "The noise of every field is as large as charged; the least of them is shown."
        ),
        trials=noise.numbers,
        confidence=confidence,
        more={"at least": 1.0, "fields": len(found)},
    )


def shape(noise: Noise, confidence: float) -> Finding:
    """Whether the noise is Gaussian in shape: neither short of tails nor lumpy.

    By the test of Anscombe and Glynn for the fourth moment, and by the largest number: noise that
    is cut off gives a world away for certain, however seldom.
    """
    numbers = np.concatenate(noise.rows)[:_MANY].astype(np.float64)
    test = kurtosistest(numbers)
    alpha = (1 - confidence) / 2
    # The largest of so many is no larger than this with so small a probability.
    cut = -ndtri(-math.expm1(math.log(alpha) / noise.numbers) / 2)
    fails = float(test.pvalue) < alpha or noise.largest < cut
    return Finding(
        name="shape of noise",
        kind="statistical",
        threat=_SEEN,
        measure="fourth moment over that of a Gaussian",
        figure=float(np.mean((numbers / numbers.std()) ** 4) / 3),
        interval=None,
        ceiling=None,
        verdict="FAIL" if fails else "PASS",
        words=(
            "The noise is not Gaussian: its tails are too short, or too heavy."
            if fails
            else "The noise has the tails of a Gaussian, as far out as so many numbers reach."
        ),
        trials=noise.numbers,
        confidence=confidence,
        more={"largest, in standard deviations": noise.largest, "at least": cut},
    )


def apart(noise: Noise, confidence: float) -> Finding:
    """Whether numbers of a run have their noise each by itself, over fields and rounds."""
    table = np.stack(noise.rows).astype(np.float64)
    table -= table.mean(axis=0)
    length = np.sqrt(np.square(table).sum(axis=0))
    same = length <= 1e-9  # the same in every run
    products = table.T @ table / np.maximum(np.outer(length, length), 1e-300)
    products[same] = products[:, same] = 1.0
    np.fill_diagonal(products, 0.0)
    figure = float(np.abs(products).max()) if not same.any() else 1.0
    n, k = table.shape
    pairs = max(1, k * (k - 1) // 2)
    # A correlation of independent normal numbers, times a factor, is Student's t.
    extreme = float(student.isf((1 - confidence) / 2 / pairs, max(1, n - 2)))
    ceiling = extreme / math.sqrt(max(1, n - 2) + extreme**2)
    verdict: Verdict = "FAIL" if figure > ceiling else "PASS" if ceiling < 0.5 else "INCONCLUSIVE"
    return Finding(
        name="independent noise",
        kind="statistical",
        threat="takes numbers of a run from each other, scaled as he likes",
        measure="largest correlation",
        figure=figure,
        interval=None,
        ceiling=ceiling,
        verdict=verdict,
        words=(
            "Two numbers of a run share noise, which cancels in their difference."
            if verdict == "FAIL"
            else "No two numbers of a run, of the same round or of two, have noise in common."
        ),
        trials=n,
        confidence=confidence,
        more={"numbers compared": k},
    )
