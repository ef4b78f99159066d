"""What a report says besides figures: outputs without noise, and what no claim covers."""

from typing import Any

from secure_fedclust.audit.report.facts import Facts
from secure_fedclust.audit.report.pseudonyms import Names


def unnoised(facts: Facts, called: Names, labels: bool) -> list[dict[str, Any]]:
    """What came out of the run without noise, who could see it, and what became of it."""
    result, private = facts.result, facts.spec.is_private
    history = result.history
    clients = set(facts.clients)
    absent = {c for exchange in history for c in exchange.absent} & clients
    aside = {c for exchange in history for c in exchange.rejected} & clients
    who = f"{len(facts.clients)} clients were asked"
    if refused := (result.federation or {}).get("refused"):
        words = ", ".join(sorted({str(word) for word in refused.values()}))
        who += f", and {len(refused)} more that did not take part ({words})"
    for found, what in ((absent, "did not always answer"), (aside, "gave an answer set aside")):
        if found:
            called_here = ", ".join(called(c) for c in facts.clients if c in found)
            who += f"; {called_here} {what}"
    return [
        _line(
            "labels",
            "The cluster of each record",
            "the client" if not labels else "whoever can read the folder",
            "Computed from the records themselves. They stay with the client and are in no result "
            "and no report."
            if not labels
            else "Computed from the records themselves, and written to the folder labels next to "
            "this report: it belongs to the clients, and must not be passed on with it.",
        ),
        _line(
            "timings",
            "How long clients took",
            "the server",
            "They depend on how many records there are. Left out of the result and of this report; "
            "whoever runs the server sees them."
            if private
            else "They depend on how many records there are, and are in the result's file.",
        ),
        _line(
            "lengths",
            "Lengths of messages",
            "the server and the network",
            "Public: they follow from the parameters, not from the records."
            if private
            else "They may depend on the records.",
        ),
        _line("part", "Who took part", "the server", f"Visible: {who}."),
        _line(
            "errors",
            "Errors",
            "the client",
            "What is wrong with records is said in the client's own log, before the run. No error "
            "that others see depends on records."
            if private
            else "Others may see errors that depend on records.",
        ),
        _line(
            "warnings",
            "Warnings on the client's screen",
            "the client",
            "How many records lay outside the stated region, and how many of a person's were left "
            "out. Not private, and neither in the result nor in this report.",
        ),
        _line(
            "metrics",
            "Scores",
            "whoever computes them",
            "Scores of a clustering, such as silhouettes, that are computed from records are not "
            "private. There are none in the result, and none in this report.",
        ),
        _line(
            "standing",
            "Where each client's ledger stands",
            "the server",
            "A number of rows and a hash, which say how often data were used, and nothing else.",
        ),
    ]


def limits(facts: Facts, called: Names) -> list[str]:
    """What the claim does not cover, whatever it says."""
    found = [
        "Facts about the population. If smoking causes illness, that a person smokes says "
        "something about them, whether or not their record was used. No protection of records "
        "changes that.",
        "Records that go together: what is known about g of them at once is protected with g times "
        "mu, not with mu.",
        "A person at several clients: with local noise c clients mean sqrt(c) times mu; inside a "
        "sum with shared noise they mean c times mu.",
        "Accuracy. Noise has a price: centres are off by more, the fewer the records and the "
        "smaller epsilon. This report says nothing about how good the clusters are.",
        "Whether to publish. A small epsilon is no permission; it says how much one record can "
        "matter.",
    ]
    if not called.shown:
        found.append(
            "Names. Clients are numbered here, but the hash of a row covers its client's name: "
            "whoever has a guess can confirm it."
        )
    if not facts.spec.is_private:
        return found[:1] + found[3:]
    if facts.spec.unit == "client":
        found[1] = "That a client takes part. What is protected is what its data say."
    return found


def _line(name: str, what: str, who: str, words: str) -> dict[str, Any]:
    return {"name": name, "what": what, "seen_by": who, "words": words}
