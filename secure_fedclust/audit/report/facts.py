"""What a report is made from, once it is known that its parts belong together."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from secure_fedclust.audit.attacks.ceilings import STRONG
from secure_fedclust.audit.findings import CHECKS, GAME, Audit, Finding
from secure_fedclust.audit.report.agreement import (
    NO_CLAIM,
    check_result,
    check_rows,
    quorum_in,
    run_of,
    sentence,
    stated_ending,
)
from secure_fedclust.audit.report.agreement import (
    participants as participants,
)
from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.accounting import Limit, epsilon_of
from secure_fedclust.privacy.charges import Totals
from secure_fedclust.privacy.ledger import Anchor, Ledger, Quorum, Row
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.protocols.sums import with_quorum
from secure_fedclust.result import FedClustResult
from secure_fedclust.run import EXPERIMENTS, NO_LEDGER, OWN_LEDGERS, on_the_ledger

Kept = Literal["verified", "in memory", "by the clients", "none"]


@dataclass(frozen=True)
class LedgerFacts:
    """A ledger of which every row was checked.

    Attributes
    ----------
    limit : Limit
    unit, adjacency, dataset : str
    rows : sequence of Row
    anchor : Anchor
    n_anchors : int
        Anchors of the result that it was checked against.
    run : str or None
        What the run is called in it; None if it was charged nothing.
    """

    limit: Limit
    unit: str
    adjacency: str
    dataset: str
    rows: Sequence[Row]
    anchor: Anchor
    n_anchors: int
    run: str | None

    def totals(self) -> dict[str, Totals]:
        """What each client has spent over all runs."""
        return {row.charge.client: row.client_totals for row in self.rows}


@dataclass(frozen=True)
class Facts:
    """A result, with what belongs to it.

    Attributes
    ----------
    result : FedClustResult
    spec : PrivacySpec
    clients : tuple of str
        That took part in the run.
    kept : str
        Where the ledger is.
    ledger : LedgerFacts or None
    audit : Audit or None
    ending : str
        How the claim ends, by the ledger as it is now; empty where there is none.
    """

    result: FedClustResult
    spec: PrivacySpec
    clients: tuple[str, ...]
    kept: Kept
    ledger: LedgerFacts | None
    audit: Audit | None
    ending: str

    @property
    def rows(self) -> list[Row]:
        """The ledger's rows of this run."""
        if self.ledger is None:
            return []
        return [row for row in self.ledger.rows if row.charge.run == self.ledger.run]

    @property
    def claims(self) -> bool:
        """Whether the run itself makes a claim."""
        return not self.result.guarantee.startswith(NO_CLAIM)

    @property
    def own_ledgers(self) -> bool:
        """Whether each client keeps its own ledger, and others' rows cannot be here."""
        return self.ending == OWN_LEDGERS

    @property
    def claim(self) -> str:
        """What the run claims, put together anew: no word of it is the result's."""
        return sentence(self.result, self.spec) + self.ending

    @property
    def limit(self) -> Limit | None:
        """What the run may spend; None without differential privacy."""
        return Limit.of(*self.spec.target()) if self.spec.is_private else None

    def run_totals(self) -> dict[str, Totals]:
        """What each client has spent in this run, as the ledger says."""
        return {row.charge.client: row.run_totals for row in self.rows}


def gather(
    result: FedClustResult,
    ledger: Ledger | str | Path | None,
    audit: Audit | None,
) -> Facts:
    """Check that result, ledger and audit hold and are of one run.

    Raises
    ------
    ParameterError
        If they are not.
    LedgerError
        If the ledger was changed, or lacks rows that the result has seen.
    """
    if not isinstance(result, FedClustResult):
        raise ParameterError(f"result: give a FedClustResult, not {type(result).__name__}")
    spec = PrivacySpec.from_dict(result.privacy)
    check_result(result, spec)
    clients = participants(result)
    ending = stated_ending(result, spec)
    kept = _kept(ending, spec, ledger)
    checked = None
    if ledger is not None:
        opened = (
            nullcontext(ledger)
            if isinstance(ledger, Ledger)
            else Ledger.open(ledger, read_only=True)
        )
        with opened as book:
            checked = _check_ledger(book, result, spec, one_of_many=ending == OWN_LEDGERS)
            if ending not in ("", NO_LEDGER, OWN_LEDGERS):
                ending = _ending_now(ending, book, checked, result, spec)
        kept = "verified"
    if audit is not None:
        check_findings(audit)
        check_same_kind(audit, result)
        check_verdicts(audit)
    return Facts(result, spec, clients, kept, checked, audit, ending)


def _kept(ending: str, spec: PrivacySpec, ledger: Any) -> Kept:
    """Where the ledger must be, by how the guarantee ends."""
    if not ending:
        if ledger is not None and getattr(ledger, "path", ledger) is not None:
            raise ParameterError(
                "a run with NO DP CLAIM is charged to no ledger: leave the ledger out of its report"
            )
        return "in memory" if spec.is_private else "none"
    if ending == OWN_LEDGERS:
        return "by the clients"
    if ending == NO_LEDGER:
        return "in memory"
    if ledger is None:
        raise ParameterError(
            "the run was charged to a ledger, which is not here: give it with --ledger FILE "
            "(in Python ledger=...)"
        )
    return "verified"


def _ending_now(
    stated: str, ledger: Ledger, facts: LedgerFacts, result: FedClustResult, spec: PrivacySpec
) -> str:
    """How the claim ends by what is on the ledger now, where later runs may have come.

    What the result says must be what could be said when the run ended, or at some time since.
    """
    known: set[Quorum] = set()
    n_clients = len(participants(result))
    possible = {EXPERIMENTS}
    last = max(rows for rows, _ in result.anchors.values())
    for row in facts.rows:
        quorum = quorum_in(row)
        new = quorum is not None and quorum not in known
        known |= set() if quorum is None else {quorum}
        if row.number == last or (new and row.number > last):
            possible.add(on_the_ledger(spec, facts.limit, known, n_clients))
    if stated not in possible:
        raise ParameterError(
            f"the result's guarantee ends {stated[:400]!r}, which is not what its ledger says: one "
            "of the two was edited"
        )
    if ledger.has_experiments or stated == EXPERIMENTS:
        return EXPERIMENTS
    return on_the_ledger(spec, facts.limit, known, n_clients)


def _check_ledger(
    ledger: Ledger, result: FedClustResult, spec: PrivacySpec, *, one_of_many: bool
) -> LedgerFacts:
    for name in ("unit", "adjacency"):
        ours, theirs = getattr(spec, name), getattr(ledger, name)
        if ours != theirs:
            raise ParameterError(
                f"the ledger is for {name}={theirs!r}, the result for {name}={ours!r}: give the "
                "ledger that the run was charged to"
            )
    anchors = {client: Anchor(*anchor) for client, anchor in result.anchors.items()}
    if one_of_many:  # where each client has its own, only that client's anchor is from here
        here = set(ledger.clients())
        anchors = {client: anchor for client, anchor in anchors.items() if client in here}
    if not anchors:
        raise ParameterError(
            "the result has no anchor of this ledger: give the one that the run was charged to"
        )
    ledger.verify(anchors.values())
    rows = ledger.rows()
    facts = LedgerFacts(
        ledger.limit,
        ledger.unit,
        ledger.adjacency,
        ledger.dataset,
        rows,
        ledger.anchor(),
        len(anchors),
        run_of(rows, anchors, result, whole=not one_of_many),
    )
    check_rows([row for row in rows if row.charge.run == facts.run], result, spec)
    _check_spending(facts, result, spec, exact=not one_of_many)
    return facts


def _check_spending(
    ledger: LedgerFacts, result: FedClustResult, spec: PrivacySpec, *, exact: bool
) -> None:
    """Refuse a result that says less than its ledger."""
    limit = Limit.of(*spec.target())
    totals = {
        row.charge.client: row.run_totals for row in ledger.rows if row.charge.run == ledger.run
    }
    for client, spent in totals.items():
        if client not in result.spent:
            raise ParameterError(
                f"the ledger has rows of {client!r} in this run, and the result does not know it"
            )
        if not limit.allows(*spent):
            raise ParameterError(
                f"the result promises epsilon {limit.epsilon:g}, and the ledger has "
                f"{epsilon_of(limit.delta, spent.mu):.4g} for {client!r} in this run: one of the "
                "two is of another run"
            )
    for client, stated in result.spent.items():
        if not exact and client not in totals:
            continue
        booked = epsilon_of(limit.delta, totals.get(client, Totals()).mu)
        close = math.isclose(stated, booked, rel_tol=1e-6, abs_tol=1e-9)
        # Where clients keep their own ledgers it is what they were asked to spend.
        if not close and (exact or stated < booked):
            raise ParameterError(
                f"the result says that {client!r} spent epsilon {stated:.4g} in this run, and the "
                f"ledger {booked:.4g}: one of the two is of another run"
            )


def check_findings(audit: Audit) -> None:
    """Refuse an audit that could not be shown as it is."""
    if not isinstance(audit, Audit):
        raise ParameterError(f"audit: give an Audit, not {type(audit).__name__}")
    for finding in audit.findings:
        if problem := _problem(finding):
            raise ParameterError(f"the audit's finding {finding.name!r}: {problem}")
    drawn = [f for f in audit.findings if f.kind == "statistical" and f.measure == "epsilon"]
    if drawn and not any(f.curve for f in audit.findings if f.kind == "statistical"):
        raise ParameterError(
            "the audit has no curve of false and right alarms to draw: make it anew"
        )


def check_verdicts(audit: Audit) -> None:
    """Refuse an audit that contradicts itself."""
    spec = PrivacySpec.from_dict(audit.privacy)
    for finding in audit.findings:
        if problem := _contradiction(finding, spec):
            raise ParameterError(f"the audit's finding {finding.name!r}: {problem}")


def _problem(finding: Finding) -> str | None:
    if finding.verdict not in ("PASS", "FAIL", "INCONCLUSIVE"):
        return f"verdict {finding.verdict!r} is none"
    if finding.kind not in ("statistical", "structural", "exhibit"):
        return f"kind {finding.kind!r} is none"
    low, high = finding.interval or (None, None)
    if finding.interval is not None and low is None:
        return "its interval has no lower end"
    numbers = [n for n in (low, high, finding.ceiling) if n is not None] + [finding.figure]
    if not all(_is_number(number) for number in numbers):
        return "a figure is not a finite number"
    for point in finding.curve:
        if len(point) != 2 or not all(_is_number(rate) and 0 <= rate <= 1 for rate in point):
            return f"its curve has {list(point)!r}, which are no two rates from 0 to 1"
    least = finding.figure if finding.interval is None else finding.interval[0]
    beyond = finding.ceiling is not None and least > finding.ceiling * (1 + 1e-9)
    if finding.kind != "exhibit" and finding.verdict == "PASS" and beyond:
        return f"PASS, though {least:g} is beyond the ceiling of {finding.ceiling:g}"
    return None


def _contradiction(finding: Finding, spec: PrivacySpec) -> str | None:
    """What a finding says about itself that cannot be so, or not at once."""
    decides = finding.name.startswith(GAME) or finding.name in CHECKS
    if finding.kind == "exhibit":
        return "an exhibit cannot have that name" if decides else None
    if finding.trials < 1:
        return "it was not played"
    epsilon, _ = spec.target()
    if finding.measure == "epsilon" and finding.ceiling != epsilon:
        return f"the ceiling is not the claim's epsilon of {epsilon:g}"
    if finding.verdict != "PASS":
        return None
    if finding.kind == "structural" and finding.ceiling is None:
        return "PASS without a ceiling"
    high = None if finding.interval is None else finding.interval[1]
    if finding.name == "noise as charged" and (high is None or high < 0.99):
        return "PASS, though the noise is smaller than charged"
    if finding.name.startswith(GAME):
        more = finding.more
        strength = more.get("would have refuted half the noise")
        if not isinstance(strength, int | float) or strength < STRONG:
            return "PASS, though the game was too weak to tell"
        if any(
            isinstance(value, int | float) and value > epsilon * (1 + 1e-9)
            for name, value in more.items()
            if name.startswith("epsilon at least")
        ):
            return "PASS, though one of its bounds is beyond the claim"
    return None


def check_same_kind(audit: Audit, result: FedClustResult) -> None:
    """Refuse an audit that is not of runs like this one."""
    spec, n_clients = PrivacySpec.from_dict(result.privacy), len(participants(result))
    theirs = with_quorum(PrivacySpec.from_dict(audit.privacy), n_clients)
    pairs: Iterable[tuple[str, Any, Any]] = (
        ("algorithm", audit.algorithm, result.algorithm),
        ("parameters", _comparable(audit.parameters), _comparable(result.parameters)),
        ("privacy spec", theirs.agreement(), spec.agreement()),
        ("number of clients", audit.n_clients, n_clients),
        ("number of features", audit.n_features, result.centers.shape[1]),
    )
    for name, found, wanted in pairs:
        if found != wanted:
            raise ParameterError(
                f"the audit is of another kind of run: its {name} differs from the result's; "
                "audit this run, or leave the audit out"
            )


def _comparable(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters without what does not matter: the seed, and what clients are called."""
    return {
        name: sorted(value.values()) if isinstance(value, Mapping) else _as_list(value)
        for name, value in parameters.items()
        if name != "random_state"
    }


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
