"""A report's page: one HTML file without scripts, made of a report's plain values alone."""

from collections.abc import Mapping
from typing import Any

from secure_fedclust.audit.report.content import FORMAT
from secure_fedclust.audit.report.page_parts import (
    Markup,
    items,
    paragraph,
    section,
    sentence,
    small,
    text,
)
from secure_fedclust.audit.report.page_sections import SECTIONS
from secure_fedclust.audit.report.page_style import STYLE
from secure_fedclust.errors import ParameterError

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_AUDITED = {
    "PASS": (
        "good",
        "Attacked: PASS",
        "No attack got beyond what the claim allows. That is no proof.",
    ),
    "FAIL": ("bad", "Attacked: FAIL", "An attack got beyond what the claim allows."),
    "INCONCLUSIVE": (
        "wait",
        "Attacked: INCONCLUSIVE",
        "No attack got beyond what the claim allows, but not all were strong enough to tell.",
    ),
    "not audited": ("wait", "Not audited", "No attacks were tried on this kind of run."),
}


def render(content: Mapping[str, Any]) -> str:
    """The page of a report.

    Parameters
    ----------
    content : mapping
        What `report_of` gave, or what is in a ``report.json``.
    """
    if content.get("format") != FORMAT:
        raise ParameterError(
            f"a report of format {content.get('format')!r}: this version draws {FORMAT!r}"
        )
    run = content["run"]
    subject = f"{run['algorithm']} over {run['n_clients']} clients"
    parts = [(name, title, make(content)) for name, title, make in SECTIONS]
    contents = items(
        (Markup(f'<a href="#{name}">{text(title)}</a>') for name, title, _ in parts), "ol"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{text(content['verdict'])}: privacy report, {text(subject)}</title>"
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head><body>'
        f"<header><h1>Privacy report: {text(subject)}</h1>"
        f"{paragraph(_made(content), 'small')}{_lead(content)}</header>"
        f'<nav aria-label="Contents"><b>In this report</b>{contents}</nav><main>'
        + "".join(section(name, title, body) for name, title, body in parts)
        + f'</main><footer class="small">{text(content["format"])}. This page has no scripts and '
        "loads nothing. The same figures, all of them, are in report.json.</footer></body></html>\n"
    )


def _made(content: Mapping[str, Any]) -> str:
    """When, and of which data."""
    book = content["ledger"]["book"]
    of = f", on the data set {book['dataset']}" if book and book["dataset"] else ""
    return f"Made on {content['made']}{of}."


def _lead(content: Mapping[str, Any]) -> str:
    """Verdict and claim, and whether anybody tried to break it."""
    verdict = content["verdict"]
    claimed = verdict == "DP CLAIM"
    kind, title, words = _AUDITED[content["audited"]]
    if claimed:
        delta = text(small(content["meaning"]["delta"]))
        shown = text(f"\N{CHECK MARK} {_headline(content)}")
        shown = shown.replace(delta, f'<span class="whole">{delta}</span>', 1)
    else:
        shown = "\N{MULTIPLICATION X} NO DP CLAIM"
        if content["audit"] is None:
            words = "There is no claim that attacks could refute."
    reasons = ""
    if content["reasons"]:
        reasons = paragraph("Why there is none:") + items(
            Markup(f"<b>Not fulfilled:</b> {text(_reason(reason, content['claim']))}")
            for reason in content["reasons"]
        )
    return (
        f'<div class="lead"><div class="box {"good" if claimed else "bad"}">'
        f'<p id="verdict" data-verdict="{text(verdict)}">{shown}</p>'
        f'<p id="claim">{text(sentence(content["claim"]))}</p>{reasons}</div>'
        f'<div class="box {kind}" id="audited" data-audited="{text(content["audited"])}">'
        f"{paragraph(title, 'big')}{paragraph(words)}"
        f"{paragraph(_counted(content), 'small')}</div></div>"
    )


def _reason(reason: Mapping[str, Any], claim: str) -> str:
    """A condition that does not hold, and why, unless the claim has said so."""
    if reason["why"] in claim:
        return str(reason["statement"])
    return f"{reason['statement']} {sentence(reason['why'])}"


def _headline(content: Mapping[str, Any]) -> str:
    means = content["meaning"]
    epsilon = "beyond 100" if means["epsilon"] is None else f"{means['epsilon']:.4g}"
    return (
        f"Differential privacy: epsilon {epsilon}, delta {small(means['delta'])} for each "
        f"{means['unit']}"
    )


def _counted(content: Mapping[str, Any]) -> str:
    """How many assumptions are of each kind."""
    states = [line["status"] for line in content["assumptions"]]
    if content["verdict"] != "DP CLAIM":
        return f"Of {len(states)} conditions, {states.count('violated')} not fulfilled."
    return (
        f"The claim rests on {len(states)} conditions: {states.count('enforced')} enforced, "
        f"{states.count('assumed')} assumed, {states.count('violated')} violated."
    )
