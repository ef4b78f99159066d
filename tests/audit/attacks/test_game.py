"""The distinguishing game, on the worst pairs that are known."""

from dataclasses import replace

import numpy as np
import pytest

from secure_fedclust import FKM, FedGEM, KFed, PrivacySpec
from secure_fedclust.audit.attacks.game import distinguish, judge, play, release_once
from secure_fedclust.audit.attacks.noise import as_charged
from secure_fedclust.audit.attacks.pairs import floor_pair, worst_pair
from secure_fedclust.audit.attacks.rehearsal import Outlets, flat
from secure_fedclust.privacy import mechanism, release
from secure_fedclust.privacy.accounting import Limit

RELATIONS = ["add_remove", "replace_one"]


def spec(adjacency="add_remove", epsilon=4.0):
    ranges = [(-1, 1)] * 2
    return PrivacySpec(epsilon=epsilon, delta=1e-5, ranges=ranges, adjacency=adjacency)


@pytest.mark.parametrize("adjacency", RELATIONS)
@pytest.mark.parametrize("floor", [5, 20, 100])
def test_the_pair_for_floors_is_as_far_apart_as_the_theorem_allows(adjacency, floor):
    query, without, present = floor_pair(floor, 1.0, adjacency)
    exponent = query.exponent(adjacency, 0.2)
    first, second = (
        flat(query.answer(X, adjacency, exponent).fields).astype(float) for X in (without, present)
    )
    allowed = query.sensitivity(adjacency, exponent).value
    assert 0.999 < np.linalg.norm(second - first) / allowed <= 1
    assert len(present) - len(without) == (adjacency == "add_remove")


def test_without_the_floor_the_same_noise_is_refuted():
    query, _, present = floor_pair(20, 1.0, "add_remove")
    broken = replace(query, enforced=False)
    alone = release_once(broken, present[:0], present[-1:], spec(), 60)
    found = judge(*alone, spec(), 0.95, attained=1.0, name="game", threat="")
    assert found.verdict == "FAIL"
    fine = release_once(query, present[:0], present[-1:], spec(), 60)
    assert judge(*fine, spec(), 0.95, attained=1.0, name="game", threat="").verdict != "FAIL"


@pytest.mark.parametrize("adjacency", RELATIONS)
def test_scores_on_the_floor_are_worth_the_claim_and_not_more(adjacency):
    query, without, present = floor_pair(20, 1.0, adjacency)
    given = spec(adjacency)
    mu = Limit.of(*given.target()).mu
    trials = 700
    scores = release_once(query, without, present, given, trials)
    found = judge(*scores, given, 0.99, attained=mu, name="game", threat="")
    assert found.verdict == "PASS"
    assert 0 < found.figure <= 4
    # Normal with mu for a spread and its square for a distance, each to six deviations.
    apart = scores[1].mean() - scores[0].mean()
    assert apart == pytest.approx(mu**2, abs=6 * mu * np.sqrt(2 / trials))
    for each in scores:
        assert each.std() == pytest.approx(mu, rel=6 / np.sqrt(2 * trials))


def test_a_long_game_finds_most_of_the_claim_and_not_more():
    mu = Limit.of(*spec().target()).mu
    rng = np.random.default_rng(1)
    scores = (rng.normal(sign * mu**2 / 2, mu, 3000) for sign in (-1, 1))
    found = judge(*scores, spec(), 0.99, attained=mu, name="game", threat="")
    assert found.verdict == "PASS"
    assert 0.6 * 4 < found.figure <= 4
    assert found.more["epsilon at least (Clopper-Pearson, any mechanism)"] < found.figure


@pytest.mark.parametrize(
    ("model", "least", "more"),
    [
        (FKM(4), 0.99, {}),
        (FKM(4), 0.95, {"adjacency": "replace_one"}),
        (KFed(4), 0.99, {}),
        (FedGEM(3), 0.9, {"protection": "masking"}),
        (FKM(4), 0.99, {"protection": "ckks"}),
        (FKM(4), 0.99, {"protection": "masking", "unit": "client"}),
    ],
    ids=["FKM", "FKM-replace", "KFed", "FedGEM-masked", "FKM-encrypted", "client"],
)
def test_two_worlds_are_found_that_are_worth_nearly_all_of_the_claim(model, least, more, rehearsed):
    rehearsal = rehearsed(model, **more)
    pair = worst_pair(rehearsal, np.random.default_rng(2))
    claimed = Limit.of(*rehearsal.spec.target()).mu
    assert least * claimed < pair.mu <= claimed * (1 + 1e-9)
    assert pair.excess <= 1 + 1e-9


@pytest.mark.parametrize("protection", ["none", "masking"])
def test_scores_are_normal_with_the_mu_that_the_pair_is_worth(protection, rehearsed):
    rehearsal = rehearsed(FKM(2, seeding="public", n_rounds=1), protection=protection)
    pair = worst_pair(rehearsal, np.random.default_rng(3))
    without, present = (play(rehearsal, pair, world, 250).ratios for world in (False, True))
    spread = np.concatenate([without - without.mean(), present - present.mean()]).std()
    # A log-likelihood ratio of Gaussians: mean half of its variance, either way.
    assert spread == pytest.approx(pair.mu, rel=0.15)
    assert present.mean() - without.mean() == pytest.approx(pair.mu**2, abs=5 * pair.mu / 11)


def test_noise_of_others_in_a_sum_is_not_taken_for_granted(rehearsed, monkeypatch):
    rehearsal = rehearsed(FKM(2, seeding="public", n_rounds=1), protection="masking")
    pair = worst_pair(rehearsal, np.random.default_rng(4))
    add = mechanism.noise
    monkeypatch.setattr(
        release, "noise", lambda exact, sigma, draw: add(exact, sigma, lambda s, n: 0 * draw(s, n))
    )
    game, noise = distinguish(rehearsal, pair, 400, 0.95, 1)
    assert as_charged(noise, 0.95).verdict == "FAIL"
    assert game.trials == 400


def test_every_outlet_has_a_whole_budget_of_its_own():
    outlets = Outlets(spec())
    query, without, _ = floor_pair(5, 1.0, "add_remove")
    for _ in range(3):
        outlets.fresh().release(query, without, 1.0, run="r", step=0, message="m")


def test_a_game_that_is_too_short_is_inconclusive(rehearsed):
    rehearsal = rehearsed(FKM(2, seeding="public", n_rounds=1), epsilon=0.5)
    pair = worst_pair(rehearsal, np.random.default_rng(5))
    game, _ = distinguish(rehearsal, pair, 100, 0.95, 1)
    assert game.verdict == "INCONCLUSIVE"
    assert "play more" in game.words
