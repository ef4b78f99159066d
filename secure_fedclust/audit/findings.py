"""What an audit finds: one figure after another, each beside what the claim allows."""

import json
from collections.abc import Mapping
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
    interval : (float, float) or None
        With probability `confidence` the true figure is in it.
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
    interval: tuple[float, float] | None
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
                "interval": None if interval is None else (float(interval[0]), float(interval[1])),
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
        In each of the two worlds of a distinguishing game.
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

        That is all that is structural, and the distinguishing games: nobody knows more than their
        attacker, so that an attack that knows less adds nothing by being inconclusive.
        """
        found = {f.verdict for f in self.findings if f.kind != "exhibit"}
        deciding = {
            f.verdict for f in self.findings if f.kind == "structural" or f.name.startswith(GAME)
        }
        return "FAIL" if "FAIL" in found else "PASS" if deciding == {"PASS"} else "INCONCLUSIVE"

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        content = {
            "format": AUDIT_FORMAT,
            **vars(self),
            "parameters": dict(self.parameters),
            "privacy": dict(self.privacy),
            "versions": dict(self.versions),
            "findings": [finding.to_dict() for finding in self.findings],
        }
        Path(path).write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")

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
            findings = tuple(Finding.from_dict(finding) for finding in content.pop("findings"))
            return cls(findings=findings, **content)
        except ParameterError:
            raise
        except UNREADABLE as error:
            raise ParameterError(f"{path} is not an audit that this version can read") from error
