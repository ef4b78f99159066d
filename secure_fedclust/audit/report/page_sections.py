"""The sections of a report's page, in the order in which they are read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from secure_fedclust.audit.report.drawing import line_chart
from secure_fedclust.audit.report.formulas import described
from secure_fedclust.audit.report.page_attacks import attacks
from secure_fedclust.audit.report.page_parts import (
    Markup,
    code,
    figure,
    items,
    numbers,
    paragraph,
    sentence,
    small,
    status,
    table,
    text,
)

Content = Mapping[str, Any]
MOST_ROWS = 200
"""Rows of a ledger that are shown."""

MOST_LINES = 12
"""Clients that have a line of their own in a picture."""


def _meaning(content: Content) -> str:
    means = content["meaning"]
    if means is None:
        return paragraph(
            "Nothing is claimed, so nothing limits what somebody who saw this run can find out "
            "about a record. An epsilon is not given, because it would mean nothing."
        )
    epsilon = "beyond 100" if means["epsilon"] is None else means["epsilon"]
    parts = [
        *(paragraph(words) for words in means["words"]),
        numbers(
            [
                (f"epsilon, for each {means['unit']}", epsilon),
                ("delta", means["delta"]),
                (
                    f"found at {means['false_alarms']:.0%} false alarms, at most",
                    _percent(means["found"]),
                ),
                ("told apart, at most", _percent(means["auc"])),
            ]
        ),
        paragraph(
            f"In mathematics: {means['mu']:.4g}-Gaussian differential privacy, with a slack for "
            "noise on a grid; of its bound and that of (epsilon, delta) the smaller is given. "
            "Small figures are good: at epsilon 0 an attacker can only guess.",
            "small",
        ),
    ]
    if means["records_per_person"]:
        parts.append(
            paragraph(
                f"These figures are for a person with up to {means['records_per_person']} records "
                f"at one client. One record by itself costs epsilon {means['record_epsilon']:.4g}."
            )
        )
    return "".join(parts)


def _saw(content: Content) -> str:
    trust = content["trust"]
    rows = content["saw"]
    marked = [i for i, row in enumerate(rows) if i == 0 or rows[i - 1]["party"] != row["party"]]
    parts = [
        paragraph(trust["words"]),
        paragraph("What has to be trusted:"),
        items(trust["needs"]),
        table(
            "Who saw which messages, and in what form",
            ["Who", "Message", "Form", "In words", "From", "Messages", "Bytes"],
            [
                [
                    row["party"],
                    row["message"],
                    row["form"],
                    row["meaning"],
                    row["from"],
                    row["messages"],
                    row["bytes"],
                ]
                for row in rows
            ],
            marked=marked,
        ),
    ]
    if content["sums"]:
        parts.append(
            table(
                "Sums that were opened",
                ["Sum", "Numbers", "Clients in it", "Asked", "At least", "Noise inside"],
                [
                    [
                        *(s[name] for name in ("stage", "numbers", "in_it", "asked", "least")),
                        "as each client adds it" if s["noisy"] else "NONE",
                    ]
                    for s in content["sums"]
                ],
                kind="plain",
            )
        )
    return "".join(parts)


def _clients(content: Content) -> str:
    clients = content["clients"]
    rows = clients["clients"]
    if not rows:
        return paragraph("Nothing is claimed for any client, and nothing was charged.")
    with_persons = any(row["person_spent"] is not None for row in rows)
    header = ["Client", "Epsilon claimed", "Delta", "Epsilon spent", "mu spent", "mu at most"]
    header += ["Spent, for a person"] if with_persons else []
    words = (
        "The claim is what could be spent: a limit that was enforced. What was spent is "
        f"information. The most that this run has cost a client: epsilon "
        f"{clients['largest_spent']:.4g}, mu {clients['largest_mu']:.4g}."
    )
    if content["verdict"] != "DP CLAIM":
        words = (
            "There is NO DP CLAIM. These are the figures that the run was planned with; they "
            "limit nothing."
        )
    parts = [paragraph(words)]
    if clients["colluders"] is not None:
        local, sums = clients["costs"].get("local", 0.0), clients["costs"].get("sums", 0.0)
        parts.append(
            paragraph(
                f"Clients that may be on the other side: {clients['colluders']}. Of the "
                f"cost, mu {local:.3g} is in answers of single clients and mu {sums:.3g} in sums "
                "(their squares add up)."
            )
        )
    parts.append(
        table(
            "Each client",
            header,
            [
                [
                    row["client"],
                    row["epsilon"],
                    row["delta"],
                    row["spent"],
                    row["mu"],
                    row["mu_limit"],
                ]
                + ([row["person_spent"]] if with_persons else [])
                for row in rows
            ],
            kind="plain",
        )
    )
    if not clients["names_shown"]:
        parts.append(paragraph("Clients are numbered; their names were left out.", "small"))
    return "".join(parts)


def _ledger(content: Content) -> str:
    ledger, book = content["ledger"], content["ledger"]["book"]
    parts = [paragraph(ledger["words"])]
    if book is None:
        anchors = [(c["client"], c["anchor"]) for c in content["clients"]["clients"] if c["anchor"]]
        if anchors and ledger["kept"] == "by the clients":
            parts.append(
                table(
                    "Anchors: where each client's ledger stood",
                    ["Client", "Anchor"],
                    [[client, code(anchor)] for client, anchor in anchors],
                    kind="plain",
                )
            )
        return "".join(parts)
    of = f" of the data set {book['dataset']}" if book["dataset"] else ""
    parts += [
        paragraph(
            f"Lifetime budget{of}, for each client: epsilon {book['epsilon']:g}, delta "
            f"{small(book['delta'])} (mu {book['mu']:.4g}), unit {book['unit']}, adjacency "
            f"{book['adjacency']}. {book['runs']} run{'s' * (book['runs'] != 1)} so far."
        ),
        paragraph(_what_is_left(book["lifetime"])),
        paragraph(Markup(f"<b>Verified:</b> {text(book['verified'])}.")),
        paragraph(Markup(f"Anchor: {code(book['anchor'])}")),
        table(
            "Lifetime spending, over all runs on this ledger",
            ["Client", "Epsilon spent", "Epsilon left", "mu spent", "mu left"],
            [[c["client"], c["spent"], c["left"], c["mu"], c["mu_left"]] for c in book["lifetime"]],
            kind="plain",
        ),
        figure(
            _spending(book),
            "What each client has spent so far, release by release: it may "
            "not rise above the dashed line. The figures are in the table below.",
        ),
        _rows(book["rows"]),
    ]
    return "".join(parts)


def _spending(book: Content) -> str:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in book["rows"]:
        line = lines.setdefault(row["client"], [(0.0, 0.0)])
        line.append((line[-1][0] + 1, line[-1][1]))
        line.append((line[-1][0], row["cumulative_mu"]))
    most = sorted(lines.items(), key=lambda pair: -pair[1][-1][1])[:MOST_LINES]
    for _, line in most:
        line.append((line[-1][0] + 0.5, line[-1][1]))
    spent = max((line[-1][1] for _, line in most), default=0.0)
    return line_chart(
        name="spending",
        title="Cumulative mu of each client against the limit",
        description=f"The largest total so far is {spent:.4g}, the limit {book['mu']:.4g}.",
        across="releases of a client",
        up="mu so far",
        lines=[(client, "measured", line) for client, line in most],
        whole=True,
        level=(f"limit: mu {book['mu']:.4g}", book["mu"]),
    )


def _what_is_left(lifetime: Sequence[Content]) -> str:
    left = [client["left"] for client in lifetime]
    if max(left, default=0.0) < 0.01:
        return "Nothing is left: a further run of these clients on this ledger will be refused."
    return f"Left for further runs: epsilon {min(left):.3g} or more for each client."


def _rows(rows: Sequence[Content]) -> str:
    shown, caption = list(rows), f"All {len(rows)} rows of the ledger"
    if len(rows) > MOST_ROWS:
        half = MOST_ROWS // 2
        shown = [*rows[:half], *rows[-half:]]
        caption = (
            f"The first {half} and the last {half} of {len(rows)} rows; all are in report.json"
        )
    header = ["Row", "This run", "Round", "Client", "Message", "Formula and inputs"]
    header += ["Sensitivity", "Noise (sigma)", "mu", "mu so far", "Hash"]
    return table(
        f"{caption}. Sensitivity and noise are in steps of the grid.",
        header,
        [
            [
                row["row"],
                row["this_run"],
                row["round"],
                row["client"],
                row["message"],
                described(row["formula"], row["inputs"]),
                row["sensitivity"],
                row["sigma"],
                row["mu"],
                row["cumulative_mu"],
                code(row["hash"]),
            ]
            for row in shown
        ],
        kind="rows",
        wrapped=(5,),
    )


def _assumptions(content: Content) -> str:
    order = {"violated": 0, "assumed": 1, "enforced": 2}
    lines = sorted(content["assumptions"], key=lambda line: order[line["status"]])
    parts = [
        paragraph(
            "The claim holds if all of these do. Enforced: the program sees to it. Assumed: "
            "somebody has to vouch for it, because no program can. Violated: it is known not to be "
            "so, and then there is no claim."
        ),
        table(
            "What the claim rests on",
            ["Condition", "Status", "How that is known"],
            [[line["statement"], status(line["status"]), sentence(line["why"])] for line in lines],
        ),
    ]
    if content["fallback"]:
        parts.append("<h3>If too few of the others are honest</h3>")
        parts.append(paragraph(sentence(content["fallback"])))
    return "".join(parts)


def _accountants(content: Content) -> str:
    checked = content["accountants"]
    if not checked["checked"]:
        return paragraph(checked["words"])
    clients = checked["clients"]
    trained = any("trainings" in each for each in clients.values())
    header = ["Client", "Releases", "Exact composition", checked["other"]]
    header += ["Opacus, RDP"] if trained else []
    rows = [
        [client, each["releases"], f"{each['exact']:.6g}", f"{each['pld']:.6g}"]
        + ([_rdp(each)] if trained else [])
        for client, each in clients.items()
    ]
    less = f"{checked['tolerance']:.0%} less"
    if trained:
        less = "less than the releases cost that are no training"
    return (
        paragraph(checked["words"])
        + paragraph(
            f"The two differ by at most {checked['largest_difference']:.2g} in epsilon. Had the "
            f"other one found more, or {less}, there would be no report."
        )
        + table(
            f"Epsilon of this run at delta {small(checked['delta'])}, by "
            f"{'three' if trained else 'two'} accountants",
            header,
            rows,
            kind="plain",
        )
    )


def _rdp(client: Content) -> str:
    rdp = client.get("rdp")
    return "not installed" if rdp is None else f"{rdp:.6g}"


def _unnoised(content: Content) -> str:
    return paragraph("What came out of the run without noise, and where it went:") + table(
        "Outputs without noise",
        ["Output", "Seen by", "What became of it"],
        [[line["what"], line["seen_by"], line["words"]] for line in content["unnoised"]],
    )


def _limits(content: Content) -> str:
    return paragraph("Whatever the claim says, it does not cover these:") + items(content["limits"])


def _reproduce(content: Content) -> str:
    again, run = content["reproduce"], content["run"]
    parts = []
    if again["command"]:
        parts.append(paragraph("The run, again:") + f"<pre>{code(again['command'])}</pre>")
    elif again["left_out"]:
        parts.append(paragraph(f"The command of the run was {again['left_out']}."))
    parts.append(paragraph(again["noise"]))
    if again["verify"]:
        parts.append(
            paragraph("The ledger, checked by yourself (FILE is where its owner keeps it):")
            + f"<pre>{code(again['verify'])}</pre>"
        )
    given = {**run["parameters"]}
    spec = content["privacy"]
    features = run["feature_names"] or [f"feature {i + 1}" for i in range(run["n_features"])]
    parts.append(
        paragraph(
            "The files result.json and audit.json are not signed: whoever could write them could "
            "change them. What was checked is that they, and the ledger where there is one, fit "
            "together."
        )
    )
    parts += [
        table(
            f"{run['algorithm']}: parameters, and the privacy spec",
            ["Name", "Value"],
            [
                [name, Markup(text(_plain(value)))]
                for name, value in [*given.items(), *spec.items()]
            ],
            kind="plain",
        ),
        table(
            "The centres that were released",
            ["Cluster", *features],
            [[str(i), *center] for i, center in enumerate(run["centers"])],
            kind="rows",
        ),
        table(
            "Versions",
            ["Package", "Version"],
            [[name, version] for name, version in again["versions"].items()],
            kind="plain",
        ),
    ]
    return "".join(parts)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plain(item)}" for name, item in value.items())
    if isinstance(value, list):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


SECTIONS: Sequence[tuple[str, str, Callable[[Content], str]]] = (
    ("meaning", "What the claim means", _meaning),
    ("saw", "Whom it trusts, and who saw what", _saw),
    ("assumptions", "What it rests on", _assumptions),
    ("clients", "What it cost each client", _clients),
    ("ledger", "The ledger", _ledger),
    ("accountants", "Two accountants", _accountants),
    ("attacks", "Attacks", attacks),
    ("unnoised", "Outputs without noise", _unnoised),
    ("limits", "What it does not cover", _limits),
    ("reproduce", "How to check and repeat it", _reproduce),
)
