"""Noise under masking: what differences of sums hide, and the share that each client adds."""

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from scipy.stats import chi2

from secure_fedclust import Ledger, ProtocolError
from secure_fedclust.errors import AggregationAborted
from secure_fedclust.privacy import mechanism
from secure_fedclust.privacy.accounting import Limit
from secure_fedclust.privacy.grid import SumGrid
from secure_fedclust.privacy.masking import ADVERTISE, MASK, SHARE, UNMASK
from secure_fedclust.privacy.queries import CellSums
from secure_fedclust.privacy.release import Releases, exact_sum
from secure_fedclust.privacy.secure_sum import Contribution

from .masking_federation import RUN, UNLIKELY, X_SPEC, Federation

# Noise that protects the difference of two sums.

CENTERS = np.random.default_rng(7).uniform(-1, 1, (150, 2))
CELL_QUERY = CellSums(CENTERS, 1.0, 0.7)
SHARE_OF_BUDGET = 0.25


class Noisy:
    """A federation whose vectors are real contributions, charged to a ledger."""

    def __init__(self, n, spec=X_SPEC, sampler="secure"):
        self.spec = spec
        self.federation = Federation(
            n, spec.min_survivors, colluders=spec.colluders, length=CELL_QUERY.coordinates
        )
        self.ledger = Ledger.create(None, epsilon=10.0, delta=1e-6)
        self.records, self.exact, self.noise = {}, {}, {}
        rng = np.random.default_rng(3)
        for name in self.federation.names:
            self.records[name] = rng.uniform(-1, 1, (20, 2))
            outlet = Releases(name, spec, self.ledger, sampler)
            self.federation.contributors[name] = self.contributor(name, outlet)

    def contributor(self, name, outlet):
        def contribute(question, n_clients):
            number = self.federation.number
            noisy = outlet.contribute(
                CELL_QUERY,
                self.records[name],
                SHARE_OF_BUDGET,
                n_clients=n_clients,
                run=RUN,
                step=number,
                message="cells",
            )
            grid = self.grid(n_clients)
            exact = flat(exact_sum(CELL_QUERY, self.records[name], self.spec, grid).fields)
            self.exact[number, name] = exact * 2.0**grid.exponent
            self.noise[number, name] = (flat(noisy.fields) - exact) * 2.0**grid.exponent
            anchor = outlet.anchor
            stands = {"ledger_rows": anchor.rows, "ledger_head": anchor.head}
            return Contribution(flat(noisy.fields), noisy.reach, stands)

        return contribute

    def grid(self, n_clients):
        limit = Limit.of(*self.spec.target())
        return SumGrid.of(CELL_QUERY, self.spec, limit, SHARE_OF_BUDGET, n_clients)

    def opened(self, lost=()):
        """One round: its sum in real terms, its survivors, and the noise that is claimed."""
        self.federation.lost = list(lost)
        total = self.federation.total(largest=1 << 62)
        grid = self.grid(total.n_clients)
        return total.steps * 2.0**grid.exponent, total.survivors, grid.sigma * 2.0**grid.exponent


def flat(fields):
    return np.concatenate([np.ravel(field) for field in fields.values()])


def same_noise_every_time(noisy):
    """A sampler that gives each client the noise it had before; clients come in order."""
    known = {}

    def sampler(sigma, size):
        name = noisy.federation.asked_of[-1][0]
        if name not in known:
            known[name] = np.random.default_rng(len(known)).normal(0, 1, size)
        return np.rint(sigma * known[name]).astype(np.int64)

    return mock.patch.object(mechanism, "secure_noise", sampler)


@pytest.mark.parametrize("stage", [ADVERTISE, SHARE, MASK], ids=lambda stage: stage.name)
def test_two_sums_that_differ_by_one_client_hide_it_behind_the_claimed_noise(stage):
    noisy = Noisy(10)
    everybody, _, sigma = noisy.opened()
    gone = noisy.federation.names[4]
    others, survivors, sigma_again = noisy.opened([(stage, gone)])
    assert set(survivors) == set(noisy.federation.names) - {gone}
    assert sigma_again == pytest.approx(sigma, rel=1e-2)
    exact = noisy.exact[0, gone]
    difference = everybody - others
    # What the server knows best is still as far off as one release would be, and more.
    spread = np.std(difference - exact)
    assert spread >= sigma
    assert spread == pytest.approx(sigma * math.sqrt((10 + 9) / 8), rel=0.2)


def test_the_same_noise_in_both_rounds_would_give_the_client_away():
    """The control: a third of the noise would be left, that of the client itself."""
    noisy = Noisy(10)
    gone = noisy.federation.names[4]
    with same_noise_every_time(noisy):
        everybody, _, sigma = noisy.opened()
        others, *_ = noisy.opened([(MASK, gone)])
    spread = np.std(everybody - others - noisy.exact[0, gone])
    assert spread == pytest.approx(0.354 * sigma, rel=0.2)


def test_a_retry_after_an_abort_draws_new_noise_and_is_charged_again():
    noisy = Noisy(10)
    names = noisy.federation.names
    with pytest.raises(AggregationAborted):
        noisy.opened([(UNMASK, name) for name in names[:2]])
    rows = noisy.ledger.rows()
    assert [row.charge.client for row in rows] == names
    gone = names[4]
    others, *_ = noisy.opened([(MASK, gone)])
    after = noisy.ledger.rows()
    assert [row.hash for row in after[:10]] == [row.hash for row in rows]
    assert len(after) == 20
    mu = Limit.of(*X_SPEC.target()).mu
    for name in names:
        assert noisy.ledger.totals(name).mu == pytest.approx(mu * math.sqrt(2 * SHARE_OF_BUDGET))
        one, other = (noisy.noise[number, name] for number in range(2))
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.3
    # Even if the aborted round's vectors were known in full, but for their noise.
    aborted = sum(noisy.exact[0, name] + noisy.noise[0, name] for name in names)
    sigma = noisy.grid(10).sigma * 2.0 ** noisy.grid(10).exponent
    assert np.std(aborted - others - noisy.exact[0, gone]) >= sigma


# Shares of the noise.


@pytest.mark.parametrize(("n", "least", "colluders"), [(6, 4, 1), (5, 4, 0), (7, 5, 3)])
def test_the_fewest_survivors_less_the_colluders_carry_the_claimed_noise(n, least, colluders):
    spec = replace(X_SPEC, min_survivors=least, colluders=colluders)
    noisy = Noisy(n, spec, sampler="secure" if colluders == 1 else "fast")
    names = noisy.federation.names
    left = []
    for number in range(3):
        found, survivors, sigma = noisy.opened([(MASK, name) for name in names[least:]])
        assert len(survivors) == least
        known = sum(noisy.exact[number, name] for name in survivors)
        known = known + sum(noisy.noise[number, name] for name in survivors[:colluders])
        left.append((found - known) / sigma)
    squares = np.square(left).sum()
    assert squares >= chi2.ppf(UNLIKELY, np.size(left))
    assert squares <= chi2.isf(UNLIKELY, np.size(left))


def test_a_client_finds_its_noise_from_its_own_spec_whatever_the_server_sends():
    """In units of the sensitivity; the grid is all that the size of the cohort can change."""
    used = []

    def sampler(sigma, size):
        used.append(sigma)
        return np.zeros(size, dtype=np.int64)

    limit = Limit.of(*X_SPEC.target())
    X = np.random.default_rng(0).uniform(-1, 1, (20, 2))
    with mock.patch.object(mechanism, "secure_noise", sampler):
        for n_clients in (3, 9, 100, 4096):
            for radius in (0.01, 1.0, 50.0):
                for share in (0.01, 0.1):
                    for step in (0, 7, 1 << 40):
                        ledger = Ledger.create(None, epsilon=10.0, delta=1e-6)
                        outlet = Releases("a", X_SPEC, ledger)
                        query = CellSums(CENTERS[:3], radius, 0.7)
                        noisy = outlet.contribute(
                            query, X, share, n_clients=n_clients, run=RUN, step=step, message="m"
                        )
                        real = query.sensitivity("add_remove").value
                        wanted = real / (limit.mu * math.sqrt(share * 8))
                        found = math.ldexp(used[-1], noisy.exponent)
                        assert found == pytest.approx(wanted, rel=2e-3)
                        assert noisy.sigma == used[-1]
                        [row] = ledger.rows()
                        assert row.charge.sigma == pytest.approx(math.sqrt(8) * used[-1])
                        assert row.charge.inputs["min_survivors"] == 9
                        assert row.charge.inputs["colluders"] == 1


def test_nothing_that_a_masking_round_says_changes_a_clients_noise():
    """Number, members, and how many take part: the question's grid may change, the noise not."""
    found = []
    for n, number, lost in ((9, 0, ()), (12, 5, (3,)), (30, 1 << 40, (2, 3, 20))):
        noisy = Noisy(n, sampler="fast")
        f = noisy.federation
        f.number = number
        noisy.opened([(SHARE, f.names[i]) for i in lost])
        name = f.names[0]
        [row] = noisy.ledger.rows(name)
        grid = noisy.grid(n)
        found.append(math.ldexp(row.charge.sigma, grid.exponent))
        assert row.charge.inputs["min_survivors"] == 9
    assert found == pytest.approx(found[:1] * 3, rel=2e-3)


def test_a_charge_stands_when_noise_cannot_be_drawn():
    noisy = Noisy(10)
    fails = mock.Mock(side_effect=ProtocolError("no randomness"))
    with mock.patch.object(mechanism, "secure_noise", fails), pytest.raises(AggregationAborted):
        noisy.opened()
    assert [row.charge.client for row in noisy.ledger.rows()] == noisy.federation.names
    assert fails.call_count == 10


def test_the_charge_comes_before_the_noise():
    noisy, order = Noisy(10, sampler="fast"), []
    real_charge, real_noise = noisy.ledger.charge, mechanism.fast_noise
    noisy.ledger.charge = lambda *a, **k: order.append("charge") or real_charge(*a, **k)
    with mock.patch.object(
        mechanism, "fast_noise", lambda s, n: order.append("noise") or real_noise(s, n)
    ):
        noisy.opened()
    assert order == ["charge", "noise"] * 10


def test_nothing_is_charged_before_all_else_is_in_order():
    """Bad envelopes, too few members: refused before anything is drawn."""
    noisy = Noisy(10)
    f = noisy.federation

    def on_request(stage, name, request):
        if stage is MASK:
            sealed = request["sealed"].copy()
            sealed[3, 3] ^= 1
            sealed[4, 3] ^= 1
            return {**request, "sealed": sealed}
        return request

    f.on_request = on_request
    with pytest.raises(AggregationAborted):
        noisy.opened()
    assert not noisy.ledger.rows()
