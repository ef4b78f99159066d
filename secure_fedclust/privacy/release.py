"""A client's only way out: a bounded answer, charged first, then noised."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from secure_fedclust.arrays import Floats
from secure_fedclust.errors import BudgetExceeded, LedgerError, ParameterError, ProtocolError
from secure_fedclust.parameters import check_counts
from secure_fedclust.privacy.accounting import Limit, epsilon_of, slack_of
from secure_fedclust.privacy.bulk_noise import NOISE
from secure_fedclust.privacy.grid import SumGrid
from secure_fedclust.privacy.ledger import IN_A_SUM, Anchor, Charge, Ledger
from secure_fedclust.privacy.mechanism import (
    MIN_CLIENT_NOISE,
    Bounded,
    Noisy,
    Sampler,
    SamplerName,
    noise,
    noise_level,
    sampler_named,
)
from secure_fedclust.privacy.queries import Query, clip_message
from secure_fedclust.privacy.sensitivity import Sensitivity
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.privacy.subsampled import (
    Sampling,
    Training,
    charge_of,
    tail_rate,
    trained,
)


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
    sums_only : bool
        Whether the server is to see nothing of this client but as a part of sums.
    """

    client: str
    spec: PrivacySpec
    ledger: Ledger
    sampler: SamplerName = "secure"
    sums_only: bool = False
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

    def require_room(self, resumed: str | None = None) -> None:
        """Refuse to begin a run that could not be finished, before it spends anything.

        Parameters
        ----------
        resumed : str, optional
            A run that is gone on with: what it has spent is part of its plan.
        """
        lifetime, before = self.ledger.limit, self.ledger.totals(self.client)
        own = 0.0 if resumed is None else self.ledger.totals(self.client, resumed).squared_mu
        after = before.squared_mu + max(0.0, self.limit.mu**2 - own)
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
        _check_share(share)
        if self.spec.unit == "client":
            raise ProtocolError(
                f"{message}: this client's data as a whole are protected, and its own noise is for "
                "one record; it answers as part of a sum only"
            )
        if self.sums_only:
            raise ProtocolError(f"{message}: this client answers as part of a sum only")
        mu = self.limit.mu * math.sqrt(share)
        adjacency = self.spec.adjacency
        exponent = query.exponent(adjacency, mu)
        exact = query.answer(X, adjacency, exponent)
        sigma, slack = noise_level(exact, mu)
        self._charge(exact, sigma, slack, {}, run=run, step=step, message=message)
        return noise(exact, sigma, self._sampler())

    def contribute(
        self,
        query: Query,
        X: Floats,
        share: float,
        *,
        n_clients: int,
        run: str,
        step: int,
        message: str,
    ) -> Noisy:
        """Answer a query with a part of the noise, for a sum that nobody sees the terms of.

        The part is what this client's own spec says: the noise of `honest_survivors` such answers
        is as much as that of one release. What is charged is that worst case, however many
        clients' noise there will be in the sum, and whether or not it is opened.

        Privacy unit: a record of this client, or all of its data.
        Sensitivity: that of the query, or ``message``, docs/proofs/sensitivity.md.
        Who sees it: nobody; the sum over clients is seen by whoever opens it.
        """
        _check_share(share)
        grid = SumGrid.of(query, self.spec, self.limit, share, n_clients)
        exact = exact_sum(query, X, self.spec, grid)
        sigma, slack = noise_level(exact, self.limit.mu * math.sqrt(share))
        # From what is charged, so that the two cannot part.
        part = sigma / math.sqrt(self.spec.honest_survivors)
        if part < MIN_CLIENT_NOISE:
            raise ParameterError(
                f"min_survivors={self.spec.min_survivors}: each client's noise would be "
                f"{part:.3g} grid steps, at least {MIN_CLIENT_NOISE} are needed"
            )
        quorum = {
            "min_survivors": float(self.spec.min_survivors or 0),
            "colluders": float(self.spec.colluders),
            "active_server": float(self.spec.active_server),
            "key_holder": float(self.spec.protection == "ckks"),
        }
        self._charge(
            exact, sigma, slack, quorum, run=run, step=step, message=f"{message}{IN_A_SUM}"
        )
        return replace(noise(exact, part, self._sampler()), reach=grid.client_reach)

    def pay_for_training(
        self,
        samplings: Sequence[Sampling],
        share: float,
        *,
        clip: float,
        numbers: int,
        run: str,
        step: int,
        message: str,
    ) -> list[Training]:
        """Pay for noisy training on parts of the records, none of which is in two of them.

        Each part gets the noise that makes it cost the same, at its own public rate.

        Privacy unit: a record of this client.
        Sensitivity: ``dp_sgd``, docs/proofs/training.md.
        Who sees it: whoever gets the trained weights, or what is computed from them.

        Parameters
        ----------
        samplings : sequence of Sampling
            One a part.
        share : float
            Of the run's mu squared, for all parts together: a record is in one.
        clip : float
            Norm that the gradient of a record is shortened to.
        numbers : int
            Noisy numbers in one step of one part.
        run, step, message : str, int, str
        """
        _check_share(share)
        if self.spec.unit == "client" or self.spec.adjacency != "add_remove":
            raise ProtocolError(
                f"{message}: noisy training protects single records that are added or removed "
                "(unit='record', adjacency='add_remove')"
            )
        check_counts(numbers=numbers)
        records = self.spec.records_per_person or 1
        rate_of_tails = tail_rate([self.limit, self.ledger.limit], records)
        mu = self.limit.mu * math.sqrt(share)
        trainings = [trained(sampling, mu, rate_of_tails) for sampling in samplings]
        cost = charge_of(trainings, clip, rate_of_tails, records)
        # A record is in one part, and what is drawn for others is the same with and without it.
        drawn = numbers * max(sampling.steps for sampling in samplings)
        slack = slack_of(NOISE, drawn)
        self._pay(cost, drawn, float(NOISE), slack, run=run, step=step, message=message)
        return trainings

    def _sampler(self) -> Sampler:
        return sampler_named(self.sampler)

    def _charge(
        self,
        exact: Bounded,
        sigma: float,
        slack: float,
        quorum: Mapping[str, float],
        *,
        run: str,
        step: int,
        message: str,
    ) -> None:
        found = exact.sensitivity
        cost = Sensitivity(found.value, found.formula, {**found.inputs, **quorum})
        self._pay(cost, exact.coordinates, sigma, slack, run=run, step=step, message=message)

    def _pay(
        self,
        cost: Sensitivity,
        coordinates: int,
        sigma: float,
        slack: float,
        *,
        run: str,
        step: int,
        message: str,
    ) -> None:
        charge = Charge(
            client=self.client,
            run=run,
            step=step,
            message=message,
            formula=cost.formula,
            inputs=cost.inputs,
            sensitivity=cost.value,
            sigma=sigma,
            mu=cost.value / sigma,
            slack=slack,
            coordinates=coordinates,
        )
        self.anchor = self.ledger.charge(charge, plan=self.limit)

    def sent(self, run: str, step: int, request: bytes) -> bytes | None:
        """What was sent for this very request before, by an earlier process perhaps."""
        return self.ledger.sent(self.client, run, step, request)

    def keep(self, run: str, step: int, request: bytes, reply: bytes) -> None:
        """Remember a reply before it is sent."""
        self.ledger.keep(self.client, run, step, request, reply)


@dataclass
class ExactSums:
    """In place of `Releases` where there is no differential privacy: only sums get out.

    Parameters
    ----------
    spec : PrivacySpec
    """

    spec: PrivacySpec
    anchor: Anchor = field(default=Anchor(0, "0" * 64), init=False)

    def release(
        self, query: Query, X: Floats, share: float, *, run: str, step: int, message: str
    ) -> Noisy:
        """Refuse: without noise nothing leaves this client but under masks."""
        raise ProtocolError(f"{message} without noise is given as part of a sum only")

    def contribute(
        self,
        query: Query,
        X: Floats,
        share: float,
        *,
        n_clients: int,
        run: str,
        step: int,
        message: str,
    ) -> Noisy:
        """Answer a query exactly, for a sum that nobody sees the terms of.

        Privacy unit: none, the sum is exact.
        Sensitivity: unbounded.
        Who sees it: nobody; the sum over clients is seen by whoever opens it.
        """
        grid = SumGrid.of(query, self.spec, None, share, n_clients)
        exact = exact_sum(query, X, self.spec, grid)
        return Noisy(exact.fields, grid.exponent, 0.0, grid.client_reach)

    def sent(self, run: str, step: int, request: bytes) -> bytes | None:
        """Nothing is kept."""
        return None

    def keep(self, run: str, step: int, request: bytes, reply: bytes) -> None:
        """Nothing is kept."""


def exact_sum(query: Query, X: Floats, spec: PrivacySpec, grid: SumGrid) -> Bounded:
    """What a client adds to a sum, before noise."""
    exact = query.answer(X, spec.adjacency, grid.exponent)
    if spec.unit == "client":
        norm = query.sensitivity("add_remove", grid.exponent).value
        exact = clip_message(exact, math.floor(norm), spec.adjacency)
    return exact.held(grid.client_largest)


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ParameterError(f"share={share}: give a part of the budget, above 0 and up to 1")
