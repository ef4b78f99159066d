"""Averages of networks in sums: the same under every protection, and nobody's own in the open."""

import warnings

import numpy as np
import pytest

from secure_fedclust import (
    AggregationAborted,
    FederationWarning,
    PrivacySpec,
    ProtocolError,
    TrainingError,
)
from secure_fedclust.engines import Fault, InProcessEngine
from secure_fedclust.privacy.release import ExactSums
from secure_fedclust.privacy.secure_sum import PlainSum, PlainSummand
from secure_fedclust.privacy.updates import LARGEST_WEIGHT, WeightGrid
from secure_fedclust.protocols import averages
from secure_fedclust.protocols.averages import AVERAGE, Held, ask_averages
from secure_fedclust.protocols.client import PrivateClient, answers
from secure_fedclust.protocols.session import Session
from secure_fedclust.protocols.sums import Ends, ends_for, with_quorum

from .neural_world import asked

P, N_GROUPS = 7, 3
NAMES = ("ada", "bob", "cy", "dee")
PLAIN = "plain"
each_protection = pytest.mark.parametrize("protection", ["masking", "ckks"])


class Holder(PrivateClient):
    """Holds networks, and knows nothing else."""

    held: Held

    @answers(AVERAGE, after=(None, AVERAGE))
    def average(self, first, n_groups, n_numbers):
        return self.held.part(self.weight_grid(), first, n_groups, n_numbers)


def held_by(place, size=2):
    """Two networks of a client, in different groups, of unequal weight."""
    rng = np.random.default_rng([3, place])
    groups = np.array([place % N_GROUPS, (place + 1) % N_GROUPS])[:size]
    return Held(rng.normal(size=(size, P)), rng.uniform(0.1, 0.5, size), groups)


def federation(protection, holders=None, faults=(), min_survivors=None):
    """A session over clients that hold networks, and what they hold."""
    kind = "masking" if protection == PLAIN else protection
    spec = PrivacySpec(
        epsilon=1.0,
        delta=1e-5,
        ranges=[(0, 1)] * 2,
        protection=kind,
        min_survivors=min_survivors,
    )
    spec = with_quorum(spec, len(NAMES))
    ends = ends_for(spec, NAMES)
    if protection == PLAIN:
        ends = Ends(PlainSum(), {name: PlainSummand(len(NAMES)) for name in NAMES})
    holders = holders or {name: held_by(place) for place, name in enumerate(NAMES)}
    clients = {}
    for name in NAMES:
        clients[name] = Holder(
            np.zeros((1, 2)), spec, np.random.default_rng(0), ExactSums(spec), ends.clients[name]
        )
        clients[name].held = holders[name]
    handlers = {name: client.handle for name, client in clients.items()}
    engine = InProcessEngine(handlers, others=ends.others, faults=faults)
    return Session(engine, spec, 2, ends.server), clients


def averaged(protection, before=None, **options):
    session, _ = federation(protection, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FederationWarning)
        before = np.full((N_GROUPS, P), 9.0) if before is None else before
        return ask_averages(session, before), session


def expected(names=NAMES):
    """The average on the grid, written down again."""
    grid = WeightGrid.of(len(NAMES))
    total, weight = np.zeros((N_GROUPS, P), dtype=np.int64), np.zeros(N_GROUPS, dtype=np.int64)
    for name in names:
        held = held_by(NAMES.index(name))
        for weights, share, group in zip(held.weights, held.shares, held.groups, strict=True):
            total[group] += np.rint(share * weights / 2.0**grid.exponent).astype(np.int64)
            weight[group] += int(np.rint(share / 2.0**grid.exponent))
    return total * 2.0**grid.exponent / (weight * 2.0**grid.exponent)[:, None]


@pytest.mark.parametrize("protection", [PLAIN, "masking", "ckks"])
def test_averages_are_those_of_the_plain_sum_bit_for_bit(protection):
    found, session = averaged(protection)
    np.testing.assert_array_equal(found, expected())
    assert [opened.survivors for opened in session.sums] == [NAMES]
    true = np.zeros((N_GROUPS, P))
    weight = np.zeros(N_GROUPS)
    for place in range(len(NAMES)):
        held = held_by(place)
        np.add.at(true, held.groups, held.shares[:, None] * held.weights)
        np.add.at(weight, held.groups, held.shares)
    np.testing.assert_allclose(found, true / weight[:, None], atol=1e-7)


@each_protection
@pytest.mark.parametrize("piece", [1, P, P + 1, 2 * P, 3 * P])
def test_averages_in_pieces_are_the_same(protection, piece, monkeypatch):
    monkeypatch.setattr(averages, "PIECE", piece)
    found, session = averaged(protection)
    np.testing.assert_array_equal(found, expected())
    assert len(session.sums) == -(-N_GROUPS // max(1, piece // P))


@each_protection
def test_clients_that_drop_out_of_the_sum_do_not_count(protection):
    place = 2  # masking: the vectors; ckks: those of the first sum
    found, session = averaged(protection, faults=[Fault("bob", place, "drop")], min_survivors=3)
    left = ("ada", "cy", "dee")
    assert session.sums[0].survivors == left
    np.testing.assert_array_equal(found, expected(left))


@each_protection
def test_too_few_clients_open_nothing(protection):
    faults = [Fault(name, place, "drop") for name in ("bob", "cy") for place in range(9)]
    with pytest.raises(AggregationAborted, match="at least 3"):
        averaged(protection, faults=faults, min_survivors=3)


@each_protection
def test_a_group_of_which_nobody_is_left_stays_as_it_was(protection):
    holders = {name: held_by(place, 1) for place, name in enumerate(NAMES)}
    for held in holders.values():
        held.groups = np.minimum(held.groups, 1)
    before = np.arange(N_GROUPS * P, dtype=float).reshape(N_GROUPS, P)
    found, _ = averaged(protection, holders=holders, before=before)
    np.testing.assert_array_equal(found[2], before[2])
    assert (found[:2] != before[:2]).all()


def test_a_client_that_holds_nothing_adds_nothing():
    grid = WeightGrid.of(4)
    part = Held(np.zeros((0, 0)), np.zeros(0), np.zeros(0, dtype=np.int64)).part(grid, 0, 2, 5)
    assert not part["weights"].any() and not part["shares"].any()
    assert part["weights"].shape == (2, 5)


@pytest.mark.parametrize("asks", [{"first": 1}, {"first": 5}, {"n_numbers": P + 1}])
def test_only_what_was_asked_for_is_added(asks):
    held = Held(np.ones((1, P)), np.ones(1), np.zeros(1, dtype=np.int64))
    given = {"first": 0, "n_groups": 2, "n_numbers": P} | asks
    part = held.part(WeightGrid.of(4), **given)
    assert not part["weights"].any() and not part["shares"].any()


@pytest.mark.parametrize("weight", [LARGEST_WEIGHT * (1 + 1e-12), 1e6, np.inf, np.nan])
def test_weights_of_a_network_gone_astray_are_not_added_up(weight):
    held = Held(np.full((1, P), weight), np.ones(1), np.zeros(1, dtype=np.int64))
    with pytest.raises(TrainingError, match="beyond 16 are not added up"):
        held.part(WeightGrid.of(4), 0, 1, P)


@each_protection
def test_a_client_whose_network_has_gone_astray_is_a_client_less(protection):
    holders = {name: held_by(place) for place, name in enumerate(NAMES)}
    holders["bob"].weights[0, 0] = 1e3
    found, session = averaged(protection, holders=holders, min_survivors=3)
    assert session.sums[0].survivors == ("ada", "cy", "dee")
    np.testing.assert_array_equal(found, expected(("ada", "cy", "dee")))


def test_nobody_can_be_asked_for_its_own_part():
    _, clients = federation("masking")
    with pytest.raises(ProtocolError, match="as part of a sum only"):
        asked(clients["ada"], AVERAGE, 0, first=0, n_groups=N_GROUPS, n_numbers=P)


def test_without_a_protection_there_is_no_sum():
    session, _ = federation("masking")
    session._secure_sum = None
    with pytest.raises(ProtocolError, match="no protection for sums"):
        ask_averages(session, np.zeros((N_GROUPS, P)))
