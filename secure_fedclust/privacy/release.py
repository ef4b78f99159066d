"""A client's only way out: a bounded answer, charged first, then noised."""

import math
from dataclasses import dataclass, field

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import BudgetExceeded, LedgerError, ParameterError
from secure_fedclust.privacy.accounting import Limit, epsilon_of
from secure_fedclust.privacy.ledger import Anchor, Charge, Ledger
from secure_fedclust.privacy.mechanism import (
    Noisy,
    SamplerName,
    noise,
    noise_level,
    sampler_named,
)
from secure_fedclust.privacy.queries import Query
from secure_fedclust.privacy.spec import PrivacySpec


@dataclass
class Releases:
    """The releases of one client in one run.

    Parameters
    ----------
    client : str
    spec : PrivacySpec
        Its epsilon and delta are the most that the run may spend.
    ledger : Ledger
        The lifetime budget of the client's data, in which the run takes place.
    sampler : {"secure", "fast"}
    """

    client: str
    spec: PrivacySpec
    ledger: Ledger
    sampler: SamplerName = "secure"
    limit: Limit = field(init=False)
    anchor: Anchor = field(init=False)

    def __post_init__(self) -> None:
        for name in ("unit", "adjacency"):
            ours, theirs = getattr(self.spec, name), getattr(self.ledger, name)
            if ours != theirs:
                raise LedgerError(
                    f"the ledger is for {name}={theirs!r}, the run for {name}={ours!r}: use the "
                    "ledger's, or another ledger"
                )
        self.limit = Limit.of(*self.spec.target())
        self.anchor = self.ledger.anchor()

    def require_room(self) -> None:
        """Refuse to begin a run that could not be finished, before it spends anything."""
        lifetime, before = self.ledger.limit, self.ledger.totals(self.client)
        after = before.squared_mu + self.limit.mu**2
        both = epsilon_of(lifetime.delta, after**0.5)
        if not lifetime.allows(after, before.slack, before.coordinates):
            spent = epsilon_of(lifetime.delta, before.mu)
            asked = epsilon_of(lifetime.delta, self.limit.mu)
            raise BudgetExceeded(
                f"{self.client}: the ledger has spent epsilon {spent:.4g} of {lifetime.epsilon:g}, "
                f"and the run may spend {asked:.4g}, together {both:.4g}, all at delta "
                f"{lifetime.delta:g}. Nothing was charged: ask for less, or let the owner of the "
                "data decide about a new ledger"
            )

    def release(
        self, query: Query, X: Floats, share: float, *, run: str, step: int, message: str
    ) -> Noisy:
        """Answer a query about the records with noise, for a share of the run's mu squared.

        Privacy unit: a record of this client.
        Sensitivity: that of the query, docs/proofs/sensitivity.md.
        Who sees it: whoever gets the reply; the ledger's row is written before noise is drawn.

        Raises
        ------
        BudgetExceeded
            When the run's plan or the ledger's lifetime budget does not allow it. Nothing is
            computed from noise, and nothing is charged.
        """
        if not 0 < share <= 1:
            raise ParameterError(f"share={share}: give a part of the budget, above 0 and up to 1")
        mu = self.limit.mu * math.sqrt(share)
        adjacency = self.spec.adjacency
        exponent = query.exponent(adjacency, mu)
        exact = query.answer(X, adjacency, exponent)
        sigma, slack = noise_level(exact, mu)
        charge = Charge(
            client=self.client,
            run=run,
            step=step,
            message=message,
            formula=exact.sensitivity.formula,
            inputs=exact.sensitivity.inputs,
            sensitivity=exact.sensitivity.value,
            sigma=sigma,
            mu=exact.sensitivity.value / sigma,
            slack=slack,
            coordinates=exact.coordinates,
        )
        self.anchor = self.ledger.charge(charge, plan=self.limit)
        return noise(exact, sigma, sampler_named(self.sampler))
