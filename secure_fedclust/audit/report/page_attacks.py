"""The section about attacks: what they found, beside what the claim allows."""

from collections.abc import Mapping, Sequence
from typing import Any

from secure_fedclust.audit.report.drawing import bar_chart, line_chart
from secure_fedclust.audit.report.page_parts import figure, paragraph, status, table

Content = Mapping[str, Any]


def attacks(content: Content) -> str:
    """Findings about the run, and apart from them what leaks where nothing protects."""
    audit = content["audit"]
    if audit is None and content["verdict"] != "DP CLAIM":
        return paragraph("There is no claim that attacks could refute.")
    if audit is None:
        return paragraph(
            "This kind of run was not attacked. The claim rests on proofs, and on code that was "
            "not put to the test for this report: secure-fedclust audit does that, but for systems "
            "that train networks."
        )
    parts = [
        paragraph(
            "Attacks were played on made-up data, with the same code, parameters and privacy spec. "
            "A lower bound never certifies: it can refute a claim, never prove it. A bound near "
            "zero says only that the test was weak."
        )
    ]
    found = audit["findings"]
    parts.append(_findings("What attacks found, against what the claim allows", found))
    bounds = [f for f in found if f["interval"] is not None and f["ceiling"] is not None]
    for measure in dict.fromkeys(f["measure"] for f in bounds):
        chosen = [f for f in bounds if f["measure"] == measure]
        parts.append(
            figure(
                bar_chart(
                    name=f"bars-{len(parts)}",
                    title=f"{measure}: measured against the ceiling",
                    description="; ".join(
                        f"{f['name']}: {f['figure']:.3g} of at most {f['ceiling']:.3g}"
                        for f in chosen
                    ),
                    bars=[
                        (
                            f["name"],
                            f["figure"],
                            None if f["interval"] is None else (f["interval"][0], f["interval"][1]),
                            f["ceiling"],
                        )
                        for f in chosen
                    ],
                ),
                f"{measure}: bars are what was measured, thin lines where it may truly be (an "
                "arrow: no upper end is known), dashed lines what the claim allows.",
            )
        )
    parts += [_curve(f, content) for f in found if f["curve"]]
    parts.append(_more(found))
    if audit["exhibits"]:
        parts.append("<h3>For comparison: what leaks where nothing protects</h3>")
        parts.append(paragraph("These say nothing about this run."))
        parts.append(_findings("Exhibits", audit["exhibits"], verdicts=False))
    return "".join(parts)


def _findings(caption: str, findings: Sequence[Content], *, verdicts: bool = True) -> str:
    header = ["Attack or check", *(["Verdict"] if verdicts else []), "What it means"]
    header += ["What the attacker knows", "Measured", *(["Ceiling"] if verdicts else []), "Trials"]
    return table(
        caption,
        header,
        [
            [
                f["name"],
                *([status(f["verdict"])] if verdicts else []),
                f["words"],
                f["threat"],
                _measured(f),
                *([f["ceiling"]] if verdicts else []),
                f["trials"],
            ]
            for f in findings
        ],
    )


def _measured(finding: Content) -> str:
    measure, value = finding["measure"], finding["figure"]
    if finding["interval"] is None:
        return f"{measure} {value:.4g}"
    low, high = finding["interval"]
    confidence = finding["confidence"]
    sure = "" if confidence is None else f", with {100 * confidence:.4g}% confidence"
    if high is not None:
        return f"{measure} {value:.4g} ({low:.4g} to {high:.4g}{sure})"
    if value == low:
        return f"{measure} at least {low:.4g}{sure}"
    return f"{measure} {value:.4g} (at least {low:.4g}{sure})"


def _more(findings: Sequence[Content]) -> str:
    """Further figures of each finding, where there are any."""
    rows = [[f["name"], name, value] for f in findings for name, value in f["more"].items()]
    if not rows:
        return ""
    starts = [i for i, row in enumerate(rows) if i == 0 or rows[i - 1][0] != row[0]]
    caption = "Further figures of these attacks"
    return table(caption, ["Attack or check", "Figure", "Value"], rows, kind="plain", marked=starts)


def _curve(finding: Content, content: Content) -> str:
    measured = [(float(x), float(y)) for x, y in sorted(finding["curve"])]
    lines: list[tuple[str, str, list[tuple[float, float]]]] = [
        ("guessing", "chance", [(0.0, 0.0), (1.0, 1.0)])
    ]
    words = "The dotted line is guessing."
    if content["meaning"] is not None:
        ceiling = [(float(x), float(y)) for x, y in content["meaning"]["curve"]]
        lines.append(("the most that the claim allows", "curve", ceiling))
        words = "The dashed line is the most that the claim allows, the dotted line guessing."
    lines += [("measured", "measured", measured), ("measured", "dots", measured)]
    return figure(
        line_chart(
            name="curve-" + "".join(c if c.isalnum() else "-" for c in finding["name"]),
            title=f"{finding['name']}: members found against false alarms",
            description=f"{len(measured)} measured points. {words}",
            across="false alarms",
            up="members found",
            lines=lines,
            largest=(1.0, 1.0),
        ),
        f"{finding['name']}: each dot is a threshold that the attacker could have chosen. {words} "
        "Dots have errors of their own; what counts is the verdict in the table.",
    )
