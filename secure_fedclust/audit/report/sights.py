"""Who saw what of a run, in a table: party, message, form."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from secure_fedclust.audit.report.facts import Facts
from secure_fedclust.audit.report.pseudonyms import Names
from secure_fedclust.messages import KEY_HOLDER
from secure_fedclust.result import MEANING

_TO_CLIENTS = {
    "masking/advertise": ("request", "that a round begins"),
    "masking/share": ("key", "the other clients' public keys"),
    "masking/mask": ("sealed", "shares that others have sealed for this client, and the question"),
    "masking/confirm": ("request", "which clients have survived"),
    "masking/unmask": ("request", "which clients' masks to open, and signatures"),
    "ckks/take": ("key", "the key holder's public key"),
    "fedcref/project": (
        "released",
        "directions to see records from: at first none in particular, then those that were found "
        "in the clients' noisy moments",
    ),
    "fedcref/noisy_scores": ("released", "all other clients' local models, as released"),
    "fedcref/start": ("request", "how many clusters to begin with, and which network"),
    "fedcref/local": ("request", "random weights to start from"),
    "fedcref/group": ("released", "the models of this client's groups"),
    "fedcref/refine": ("released", "the models of all groups"),
    "fedcref/means": ("request", "that means of groups are asked for"),
    "fedcref/begin": ("released", "clusters to begin with, found in what this client has released"),
    "deepfeca/moments": ("released", "the network; at first random"),
    "deepfeca/centers": ("released", "how to whiten features"),
    "deepfeca/train": ("released", "centroids of features, and a random head"),
    "deepfeca/whiten": ("released", "how to whiten features, found in noisy moments"),
    "fedcref/scores": ("released", "all other clients' local models"),
    "fedcref/noisy_local": ("request", "random weights to start from"),
    "fedcref/noisy_group": ("released", "the models of this client's groups, as released"),
    "fedcref/noisy_refine": ("released", "the models of all groups, as released"),
    "deepfeca/see": ("released", "the network, as released; at first random"),
    "deepfeca/noisy_train": ("released", "centroids of features, as released, and a random head"),
}
"""What clients are sent at each stage, where it is not a question about their records."""

_INSIDE = {True: "with the clients' noise inside", False: "EXACT, without noise"}

_FORMS = MEANING | {
    "request": "what to do next; nothing about records",
    "released": "computed from what the server had seen before",
    "encrypted sum": "an encrypted sum, which it opens: the sum with its noise",
}


def sights(facts: Facts, *, claimed: bool) -> list[dict[str, Any]]:
    """All that was seen, by party.

    Parameters
    ----------
    facts : Facts
    claimed : bool
        Whether there is a claim: noise is enough for one only then.
    """
    rows = [*_server(facts), *_key_holder(facts), *_clients(facts), *_public(facts, claimed)]
    forms = _FORMS if claimed else _FORMS | {"noisy": "with noise, for which nothing is claimed"}
    return [row | {"meaning": row.get("meaning", forms[row["form"]])} for row in rows]


def opened(facts: Facts, names: Names) -> list[dict[str, Any]]:
    """The sums that were opened."""
    return [
        {
            "stage": each.stage,
            "numbers": each.numbers,
            "asked": each.n_clients,
            "in_it": len(each.survivors),
            "survivors": [names(client) for client in each.survivors],
            "least": facts.spec.min_survivors,
            "noisy": each.noisy,
            "share": each.share,
        }
        for each in facts.result.sums
    ]


def trust(facts: Facts, *, claimed: bool) -> dict[str, Any]:
    """Who is trusted with what."""
    found = _trust(facts)
    if not claimed and facts.spec.is_private:
        found["words"] = (
            f"NO DP CLAIM: this is what the run was set up for, and not what it kept. "
            f"{found['words']}"
        )
    return found


def _trust(facts: Facts) -> dict[str, Any]:
    spec = facts.spec
    if not spec.is_private and spec.protection == "none":
        return {
            "model": "none",
            "words": "The server is trusted with everything that clients send, as it is.",
            "needs": ["the server, with all of it"],
        }
    if spec.protection == "none":
        return {
            "model": "local",
            "words": "The server sees each client's answers, and each of them has noise enough by "
            "itself. Nobody outside a client has to be trusted.",
            "needs": ["no other party; each client trusts its own computer and its own program"],
        }
    mixed = any(exchange.form == "noisy" for exchange in facts.result.history)
    noise = "in which clients share the noise" if spec.is_private else "which are exact"
    words = f"The server sees sums over clients, {noise}."
    if mixed:
        words = (
            "The server sees each client's answers, with noise enough by themselves, and then sums "
            f"over clients, {noise}."
        )
    needs = [
        "the server to keep to the protocol"
        if not spec.active_server
        else "the way in which clients' signing keys were exchanged"
    ]
    if spec.protection == "ckks":
        needs = ["server and key holder to keep to the protocol, and not to work together"]
    needs.append(f"{_few(spec.colluders)} to be on the other side")
    if spec.is_private:
        needs.append("the other clients to add their share of the noise")
    return {
        "model": "local and distributed" if mixed else "distributed",
        "words": words,
        "needs": needs,
    }


def _few(colluders: int) -> str:
    """So many clients, in words."""
    return {0: "no client", 1: "no more than one client"}.get(
        colluders, f"no more than {colluders} clients"
    )


def _row(party: str, message: str, form: str, sender: str, n: int, size: int) -> dict[str, Any]:
    return {
        "party": party,
        "message": message,
        "form": form,
        "from": sender,
        "messages": n,
        "bytes": size,
    }


def _server(facts: Facts) -> Iterator[dict[str, Any]]:
    for sight in facts.result.server_view().saw:
        clients = len(sight.senders - {KEY_HOLDER}) or 0
        sender = f"{clients} client{'s' * (clients != 1)}"
        if facts.spec.protection == "ckks" and sight.senders == {KEY_HOLDER}:
            sender = "the key holder"
        yield _row("server", sight.stage, sight.form, sender, sight.messages, sight.bytes)
    sums = Counter(
        (each.stage, len(each.survivors), each.noisy, each.numbers) for each in facts.result.sums
    )
    for (stage, clients, noisy, numbers), times in sums.items():
        row = _row(
            "server",
            f"{stage}, summed over {clients} clients",
            "noisy" if noisy else "plain",
            "put together from the above",
            times,
            8 * numbers * times,
        )
        yield row | {"meaning": f"{numbers} numbers, {_INSIDE[noisy]}"}


def _key_holder(facts: Facts) -> Iterator[dict[str, Any]]:
    view = facts.result.key_holder_view()
    for sight in () if view is None else view.saw:
        form = "encrypted sum" if sight.form == "opened" else "request"
        yield _row(KEY_HOLDER, sight.stage, form, "the server", sight.messages, sight.bytes)


def _clients(facts: Facts) -> Iterator[dict[str, Any]]:
    found: dict[str, list[int]] = {}
    for exchange in facts.result.history:
        sent = [size for client, size in exchange.down.items() if client in facts.clients]
        if sent:
            total = found.setdefault(exchange.stage, [0, 0])
            total[0] += len(sent)
            total[1] += sum(sent)
    for stage, (messages, size) in found.items():
        form, meaning = _TO_CLIENTS.get(
            stage, ("released", "the question: centres and shares of the budget, as released")
        )
        row = _row("every client", stage, form, "the server", messages, size)
        yield row | {"meaning": meaning}


def _public(facts: Facts, claimed: bool) -> Iterator[dict[str, Any]]:
    result = facts.result
    row = _row(
        "public",
        f"{result.n_clusters} centres" + (", and networks" if result.networks else ""),
        "released",
        "the server",
        1,
        8 * (result.centers.size + sum(each.size for each in (result.networks or {}).values())),
    )
    noise = "what the server has seen, noise included"
    if not claimed:
        noise = "what the server has seen; no protection is claimed for them"
    yield row | {"meaning": f"if they are published: computed from {noise}"}
