"""Whether what a result says of itself fits together, and fits its ledger."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from secure_fedclust.errors import ParameterError
from secure_fedclust.messages import KEY_HOLDER
from secure_fedclust.privacy.accounting import Limit, epsilon_of
from secure_fedclust.privacy.ledger import IN_A_SUM, Anchor, Quorum, Row
from secure_fedclust.privacy.plan import fallback, on_sums
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.result import MEANING, Exchange, FedClustResult, OpenedSum
from secure_fedclust.run import ALL_RUNS, EXPERIMENTS, NO_LEDGER, OWN_LEDGERS, quorum_of

NO_CLAIM = "NO DP CLAIM"
"""Begins the guarantee of a run that has none."""

_EDITED = "one of the two was edited"
_IN_SUMS = ("masked", "encrypted")
_FORMS = {
    "none": {"plain", "noisy", "receipt"},
    "masking": {"plain", "noisy", "receipt", "masked", "sealed", "key", "share"},
    "ckks": {"plain", "noisy", "receipt", "encrypted", "key", "opened"},
}
_CLOSE = 1e-6
_HASH = re.compile("[0-9a-f]{64}")


def participants(result: FedClustResult) -> tuple[str, ...]:
    """The clients of a run, in the order in which they were asked."""
    asked = (client for exchange in result.history for client in exchange.asked)
    found = dict.fromkeys([*result.spent, *result.anchors, *asked])
    if result.privacy.get("protection") == "ckks":
        found.pop(KEY_HOLDER, None)
    return tuple(found or (result.client_clusters or {}))


def sentence(result: FedClustResult, spec: PrivacySpec) -> str:
    """What a run claims, but for how it ends: of the spec, and of what the server saw."""
    each = spec.protection != "none" and any(e.form == "noisy" for e in result.history)
    return spec.describe() + on_sums(spec, len(participants(result)), each)


def stated_ending(result: FedClustResult, spec: PrivacySpec) -> str:
    """How the result's guarantee ends; empty where it makes no claim.

    Raises
    ------
    ParameterError
        If it does not begin as the spec says, or ends in a way that no guarantee does.
    """
    says, begins = result.guarantee, sentence(result, spec)
    if says.startswith(NO_CLAIM) and spec.is_private:
        return ""
    ending = says.removeprefix(begins)
    if spec.is_private:
        known = ending in (NO_LEDGER, OWN_LEDGERS, EXPERIMENTS) or ending.startswith(ALL_RUNS)
    else:
        known = ending == ""
    if not says.startswith(begins) or not known:
        raise ParameterError(
            "the result's guarantee is not what its privacy spec and its history say: "
            f"{_EDITED}; it reads {says[:400]!r}"
        )
    return ending


def check_result(result: FedClustResult, spec: PrivacySpec) -> None:
    """Refuse a result that contradicts itself.

    Raises
    ------
    ParameterError
        Says which part does.
    """
    for problem in _wrong_types(result):
        raise ParameterError(f"the result's {problem}")
    for check in (_check_forms, _check_clients, _check_sums, _check_costs):
        check(result, spec)


def check_rows(rows: Sequence[Row], result: FedClustResult, spec: PrivacySpec) -> None:
    """Refuse a result whose spec or costs are not those that its rows were charged for."""
    own = quorum_of(spec)
    local: dict[str, float] = defaultdict(float)
    sums: dict[str, float] = defaultdict(float)
    for row in rows:
        summed = quorum_in(row)
        (local if summed is None else sums)[row.charge.client] += row.charge.mu**2
        if summed is None:
            continue
        if spec.protection == "none":
            raise ParameterError(
                f"row {row.number} of the ledger is of a release in a sum, and the result's spec "
                f"has protection='none': {_EDITED}"
            )
        for name, booked, stated in zip(Quorum._fields, summed, own, strict=True):
            if booked != stated:
                raise ParameterError(
                    f"row {row.number} of the ledger was charged for {name}={booked}, and the "
                    f"result's spec has {stated}: {_EDITED}"
                )
    if spec.protection == "none":
        return
    for name, squares in (("local", local), ("sums", sums)):
        most = math.sqrt(max(squares.values(), default=0.0))
        if most > result.costs[name] * (1 + _CLOSE):
            raise ParameterError(
                f"the result's costs have mu {result.costs[name]:.4g} in {name!r}, and the ledger "
                f"{most:.4g}: {_EDITED}"
            )


def quorum_in(row: Row) -> Quorum | None:
    """What a row assumes; None if its release is not in a sum."""
    if not row.charge.message.endswith(IN_A_SUM):
        return None
    inputs = row.charge.inputs
    return Quorum(
        int(inputs.get("min_survivors", 0)),
        int(inputs.get("colluders", 0)),
        inputs.get("active_server", 0) > 0,
        inputs.get("key_holder", 0) > 0,
    )


def run_of(
    rows: Sequence[Row], anchors: Mapping[str, Anchor], result: FedClustResult, *, whole: bool
) -> str | None:
    """What the run is called: a client's anchor is the row of its own last release.

    Parameters
    ----------
    rows : sequence of Row
        All of the ledger's.
    anchors : mapping of client to Anchor
        Those that are of this ledger, which has them.
    result : FedClustResult
    whole : bool
        Whether all clients of the run are on this ledger.
    """
    charged = _charged(result)
    if whole and (missing := sorted(charged - set(anchors))):
        raise ParameterError(f"{missing[0]!r} answered, and the result has no anchor of it")
    runs = set()
    for client, anchor in anchors.items():
        if anchor.rows == 0:
            if client in charged:
                raise ParameterError(
                    f"{client!r} answered, and its anchor says that nothing was charged: the "
                    "result was edited"
                )
            continue
        charge = rows[anchor.rows - 1].charge
        if charge.client != client:
            raise ParameterError(
                f"the anchor of {client!r} is row {anchor.rows} of the ledger, which is of "
                f"{charge.client!r}: the result was edited"
            )
        runs.add(charge.run)
    if len(runs) > 1:
        raise ParameterError("the result's anchors are of several runs: it was put together")
    if not runs and (whole or charged & set(anchors)):
        raise ParameterError(
            "the result's anchors say that nothing was charged, and there was a run: it was edited"
        )
    return runs.pop() if runs else None


def _charged(result: FedClustResult) -> set[str]:
    """Clients of which an answer was taken that has noise in it."""
    return {
        client
        for exchange in result.history
        if exchange.form in ("noisy", *_IN_SUMS)
        for client in exchange.up
        if client not in exchange.rejected
    }


def _check_forms(result: FedClustResult, spec: PrivacySpec) -> None:
    for i, exchange in enumerate(result.history):
        if exchange.form not in _FORMS[spec.protection]:
            raise ParameterError(
                f"exchange {i} of the result's history ({exchange.stage}) has the form "
                f"{exchange.form!r}, and its spec has protection={spec.protection!r}: {_EDITED}"
            )


def _check_clients(result: FedClustResult, spec: PrivacySpec) -> None:
    asked = {client for exchange in result.history for client in exchange.asked}
    if spec.protection == "ckks":
        asked.discard(KEY_HOLDER)
    if not spec.is_private:
        return
    # On a synopsis that was released before nobody is asked.
    wanted = asked if result.history else set(result.anchors)
    if wanted - set(result.spent) or (result.history and set(result.spent) - asked):
        one = sorted(set(result.spent) ^ wanted)[0]
        raise ParameterError(
            f"the result's spent is not about the clients that were asked: {one!r} is among the "
            "ones, and not among the others"
        )
    if stranger := sorted(set(result.anchors) - set(result.spent)):
        raise ParameterError(f"the result has an anchor of {stranger[0]!r}, who was not asked")


def _check_sums(result: FedClustResult, spec: PrivacySpec) -> None:
    sums, history = result.sums, result.history
    if spec.protection == "none":
        if sums:
            raise ParameterError(
                f"the result has sums that were opened ({sums[0].stage}), and its spec has "
                f"protection='none': {_EDITED}"
            )
        return
    if not sums:
        raise ParameterError(
            f"the result's spec has protection={spec.protection!r}, and no sum is said to have "
            f"been opened: {_EDITED}"
        )
    starts = [opened.exchange for opened in sums]
    if starts != sorted(set(starts)) or not all(0 <= start < len(history) for start in starts):
        raise ParameterError("the result's sums are not at places of its history, in its order")
    ends = [*starts[1:], len(history)]
    for opened, end in zip(sums, ends, strict=True):
        if problem := _problem_of_sum(opened, history[opened.exchange : end]):
            raise ParameterError(f"the result's sum {opened.stage}: {problem}")


def _problem_of_sum(opened: OpenedSum, exchanges: Sequence[Exchange]) -> str | None:
    """What cannot be so about a sum, given the exchanges of its round and what followed."""
    asked = {client for exchange in exchanges for client in exchange.asked}
    sent = {c for exchange in exchanges if exchange.form in _IN_SUMS for c in exchange.up}
    survivors = opened.survivors
    if len(set(survivors)) < len(survivors):
        return f"{Counter(survivors).most_common(1)[0][0]!r} is in it more than once"
    if strangers := sorted(set(survivors) - asked):
        return f"{strangers[0]!r} is said to be in it, and was not asked"
    if silent := sorted(set(survivors) - sent):
        return f"{silent[0]!r} is said to be in it, and has sent nothing"
    if not len(survivors) <= opened.n_clients <= len(asked):
        return f"{opened.n_clients} clients are said to have taken part, of {len(asked)}"
    return None


def _check_costs(result: FedClustResult, spec: PrivacySpec) -> None:
    """What the run was planned to cost, and what is left if clients are not honest."""
    costs = result.costs
    if not spec.is_private or spec.protection == "none":
        if costs or result.fallback is not None:
            raise ParameterError(
                "the result has costs or a fallback, which only a private run with protected sums "
                f"has: {_EDITED}"
            )
        return
    each = any(exchange.form == "noisy" for exchange in result.history)
    if set(costs) != {"local", "sums"} or (costs["local"] > 0) != each or not costs["sums"] > 0:
        raise ParameterError(
            f"the result's costs are {dict(costs)!r}, which is not what its history says: {_EDITED}"
        )
    limit = Limit.of(*spec.target())
    most = epsilon_of(limit.delta, math.hypot(costs["local"], costs["sums"]))
    for client, spent in result.spent.items():
        if spent > most * (1 + _CLOSE) + 1e-9:
            raise ParameterError(
                f"the result says that {client!r} spent epsilon {spent:.4g}, which is more than "
                f"the {most:.4g} of its costs: {_EDITED}"
            )
    shares = ((costs[name] / limit.mu) ** 2 for name in ("local", "sums"))
    expected = fallback(spec, limit, *shares)
    if result.fallback != expected:
        raise ParameterError(
            f"the result's fallback is not what its spec and its costs give, {expected!r}: "
            f"{_EDITED}"
        )


def _wrong_types(result: FedClustResult) -> Iterator[str]:
    for name in ("algorithm", "guarantee"):
        if not isinstance(getattr(result, name), str):
            yield f"{name} is no text"
    for name in ("parameters", "spent", "anchors", "costs", "client_clusters"):
        if not isinstance(getattr(result, name), Mapping) and (
            name != "client_clusters" or result.client_clusters is not None
        ):
            yield f"{name} is no mapping"
    for name in ("spent", "costs"):
        for key, value in getattr(result, name).items():
            if not isinstance(key, str) or not _is_amount(value):
                yield f"{name} has {value!r} for {key!r}: give a finite number of at least 0"
    for client, anchor in result.anchors.items():
        if not isinstance(client, str) or not _is_anchor(anchor):
            yield f"anchors have {anchor!r} for {client!r}: give a number of rows, and a hash"
    for i, exchange in enumerate(result.history):
        if not _is_exchange(exchange):
            yield f"history has something at {i} that is no exchange"
    for i, opened in enumerate(result.sums):
        counts = (opened.exchange, opened.n_clients, opened.numbers)
        texts = (opened.stage, *opened.survivors)
        if not (
            all(map(_is_count, counts))
            and all(isinstance(text, str) for text in texts)
            and isinstance(opened.noisy, bool)
            and _is_amount(opened.share)
        ):
            yield f"sums have something at {i} that is no sum"
    names = result.feature_names
    if names is not None and (isinstance(names, str) or len(names) != result.centers.shape[1]):
        yield "feature_names are not one for each feature"


def _is_exchange(exchange: Exchange) -> bool:
    parts = (exchange.absent, exchange.rejected, exchange.down, exchange.up)
    return (
        isinstance(exchange.stage, str)
        and isinstance(exchange.form, str)
        and exchange.form in MEANING
        and all(isinstance(part, Mapping) for part in parts[1:])
        and all(isinstance(client, str) for part in (exchange.asked, *parts) for client in part)
        and all(set(part) <= set(exchange.asked) for part in parts)
        and all(_is_count(size) for part in (exchange.down, exchange.up) for size in part.values())
    )


def _is_anchor(anchor: Any) -> bool:
    if not isinstance(anchor, list | tuple) or len(anchor) != 2:
        return False
    rows, head = anchor
    return _is_count(rows) and isinstance(head, str) and bool(_HASH.fullmatch(head))


def _is_amount(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
