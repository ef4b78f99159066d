"""What an audit finds: one figure after another, each beside what the claim allows."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from secure_fedclust.errors import ParameterError
from secure_fedclust.result import UNREADABLE

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]
Kind = Literal["statistical", "structural", "exhibit"]

AUDIT_FORMAT = "secure_fedclust audit 1"

GAME = "distinguishing game"
"""Findings whose attacker knows everything but the record in question begin with this."""

CHECKS = (
    "noise as charged",
    "shape of noise",
    "independent noise",
    "sensitivity",
    "order of charging",
    "answers to repeated requests",
    "source of noise",
    "fresh noise",
    "noise on every number",
    "nothing else leaves",
)
"""Findings that an audit needs besides, to pass: what looks at how a client works."""


@dataclass(frozen=True)
class Finding:
    """What came of one attack or check.

    Attributes
    ----------
    name : str
        E.g. ``"distinguishing game"``.
    kind : {"statistical", "structural", "exhibit"}
        Whether figures come from chance, or from looking at what the code does. An exhibit shows
        what leaks where nothing protects it, and says nothing about the run.
    threat : str
        What the attacker knows and sees, in one sentence.
    measure : str
        What the figure is: ``"epsilon"``, ``"AUC"``, ``"records found"``, ``"violations"``.
    figure : float
        What was measured. An epsilon is a lower bound.
    interval : (float, float or None) or None
        With probability `confidence` the true figure is in it. A lower bound leaves its end open:
        None.
    ceiling : float or None
        The most that the claim allows; None where nothing is claimed.
    verdict : {"PASS", "FAIL", "INCONCLUSIVE"}
        FAIL: beyond the ceiling, by more than chance. PASS: not, though a mechanism with half the
        noise would have been. INCONCLUSIVE: neither could be said.
    words : str
        What it means, in one or two sentences.
    trials : int
    confidence : float or None
    more : mapping of str to number or text
        Further figures, by name.
    curve : sequence of (float, float)
        Rates of false alarms and of right alarms, where an attacker could choose between them.
    """

    name: str
    kind: Kind
    threat: str
    measure: str
    figure: float
    interval: tuple[float, float | None] | None
    ceiling: float | None
    verdict: Verdict
    words: str
    trials: int
    confidence: float | None = None
    more: Mapping[str, float | str] = field(default_factory=dict)
    curve: tuple[tuple[float, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return vars(self) | {
            "interval": None if self.interval is None else list(self.interval),
            "more": dict(self.more),
            "curve": [list(point) for point in self.curve],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Read what `to_dict` gave."""
        interval = content["interval"]
        return cls(
            **{
                **content,
                "interval": None if interval is None else _ends(*interval),
                "curve": tuple((float(x), float(y)) for x, y in content["curve"]),
            }
        )


@dataclass(frozen=True)
class Audit:
    """All findings about one kind of run.

    No record of anybody is in it: every attack is played on made-up data.

    Attributes
    ----------
    algorithm : str
    parameters : mapping
    privacy : mapping
        The spec, as `PrivacySpec.from_dict` reads it.
    n_clients, n_features : int
    trials : int
        Runs of a client in the distinguishing game, in both worlds together.
    findings : tuple of Finding
    versions : mapping of package to version
    """

    algorithm: str
    parameters: Mapping[str, Any]
    privacy: Mapping[str, Any]
    n_clients: int
    n_features: int
    trials: int
    findings: tuple[Finding, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """FAIL if anything about the run fails; PASS if nothing does, and what decides passes.

        That is what looks at how a client works, and the distinguishing games: nobody knows more
        than their attacker, so that an attack that knows less adds nothing by being inconclusive.
        """
        found = [f for f in self.findings if f.kind != "exhibit"]
        if any(f.verdict == "FAIL" for f in found):
            return "FAIL"
        deciding = [f for f in found if f.name.startswith(GAME) or f.name in CHECKS]
        complete = {GAME, *CHECKS} <= {f.name for f in deciding}
        passed = all(f.verdict == "PASS" for f in deciding)
        return "PASS" if complete and passed else "INCONCLUSIVE"

    def rows(self) -> list[dict[str, Any]]:
        """One row a finding, for printing; exhibits have no verdict about the run."""
        return [
            {
                "finding": finding.name,
                "kind": finding.kind,
                "measured": f"{finding.measure} {finding.figure:.4g}{_between(finding.interval)}",
                "at most": "" if finding.ceiling is None else f"{finding.ceiling:.4g}",
                "verdict": finding.verdict,
            }
            if finding.kind != "exhibit"
            else {
                "finding": finding.name,
                "kind": finding.kind,
                "measured": f"{finding.measure} {finding.figure:.4g}",
                "at most": "",
                "verdict": "not of this run",
            }
            for finding in self.findings
        ]

    def __str__(self) -> str:
        lines = [", ".join(str(cell) for cell in row.values() if cell) for row in self.rows()]
        return "\n".join([f"{self.verdict}: {self.algorithm}, {self.n_clients} clients", *lines])

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "format": AUDIT_FORMAT,
            **vars(self),
            "verdict": self.verdict,
            "parameters": dict(self.parameters),
            "privacy": dict(self.privacy),
            "versions": dict(self.versions),
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        content = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        Path(path).write_text(content, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            found = content.pop("format")
            if found != AUDIT_FORMAT:
                raise ParameterError(
                    f"{path} is not an audit that this version can read: its format is "
                    f"{str(found)[:60]!r}, and this version reads {AUDIT_FORMAT!r}"
                )
            content.pop("verdict")  # it follows from the findings
            findings = tuple(Finding.from_dict(finding) for finding in content.pop("findings"))
            return cls(findings=findings, **content)
        except ParameterError:
            raise
        except UNREADABLE as error:
            raise ParameterError(f"{path} is not an audit that this version can read") from error


def structural(name: str, threat: str, problems: Iterable[str], fine: str, trials: int) -> Finding:
    """A check in which chance has no part: any problem makes it fail."""
    found = list(dict.fromkeys(problems))
    return Finding(
        name=name,
        kind="structural",
        threat=threat,
        measure="violations",
        figure=float(len(found)),
        interval=None,
        ceiling=0.0,
        verdict="FAIL" if found else "PASS",
        words=f"{'; '.join(found).capitalize()}." if found else fine,
        trials=trials,
    )


def _between(interval: tuple[float, float | None] | None) -> str:
    if interval is None:
        return ""
    low, high = interval
    return " or more" if high is None else f" ({low:.4g} to {high:.4g})"


def _ends(low: float, high: float | None) -> tuple[float, float | None]:
    return float(low), None if high is None else float(high)
