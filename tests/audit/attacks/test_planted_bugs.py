"""Every mistake that is planted is caught, by the check that it is meant for."""

import numpy as np
import pytest

from secure_fedclust import FKM
from secure_fedclust.audit.attacks.game import distinguish, ordinary_noise
from secure_fedclust.audit.attacks.noise import judge_noise
from secure_fedclust.audit.attacks.pairs import worst_pair
from secure_fedclust.audit.attacks.structure import inspect

from .planted_bugs import BUGS, GAME

TRIALS = 1600
"""At epsilon 8: enough for noise that is too small by the root of two."""

CONFIDENCE = 0.95
SEEN_IN_THE_GAME = [bug for bug in BUGS if bug.detectors[0] == GAME]


@pytest.fixture(scope="module")
def one_release(rehearsed):
    """A run with a release of six numbers a round, which can be played often."""

    def make(adjacency, rounds=1):
        return rehearsed(FKM(2, seeding="public", n_rounds=rounds), adjacency=adjacency)

    return make


def games(rehearsal, trials=TRIALS):
    rng = np.random.default_rng()
    game, noise = distinguish(rehearsal, worst_pair(rehearsal, rng), trials, CONFIDENCE, 1)
    return [game, *judge_noise(noise.plus(ordinary_noise(rehearsal, rng)))]


def checks(rehearsal):
    rng = np.random.default_rng()
    return inspect(rehearsal, worst_pair(rehearsal, rng), rng)


def verdicts(findings):
    return {finding.name: finding.verdict for finding in findings}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_the_bug_is_caught(bug, rehearsed, one_release, monkeypatch):
    twice, once = rehearsed(adjacency=bug.adjacency), one_release(bug.adjacency, bug.rounds)
    bug.plant(monkeypatch)
    found = {}
    if bug.kind == "statistical":
        found = verdicts(games(once, TRIALS if GAME in bug.detectors else TRIALS // 4))
    if not found.keys() >= set(bug.detectors):
        found |= verdicts(checks(twice))
    missed = [name for name in bug.detectors if found[name] != "FAIL"]
    assert not missed, f"{bug.name} was not noticed by {missed}"


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_nothing_is_called_a_failure_without_a_bug(adjacency, rehearsed, one_release):
    assert set(verdicts(checks(rehearsed(adjacency=adjacency))).values()) == {"PASS"}
    # The game may be wrong once in twenty times: a second look makes that once in four hundred.
    found = verdicts(games(one_release(adjacency)))
    if "FAIL" in found.values():
        found = verdicts(games(one_release(adjacency)))
    assert set(found.values()) == {"PASS"}


@pytest.mark.slow
@pytest.mark.parametrize("bug", SEEN_IN_THE_GAME, ids=lambda bug: bug.name.replace(" ", "-"))
def test_the_game_sees_the_bug_in_45_of_50_audits(bug, one_release, monkeypatch):
    rehearsal = one_release(bug.adjacency)
    bug.plant(monkeypatch)
    found = [games(rehearsal)[0].verdict for _ in range(50)]
    print(f"{bug.name}: {found.count('FAIL')} of 50 with {TRIALS} trials")
    assert found.count("FAIL") >= 45


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_at_most_21_of_200_audits_of_correct_code_fail(adjacency, one_release):
    found = [games(one_release(adjacency), 400)[0].verdict for _ in range(200)]
    print(f"{adjacency}: {found.count('FAIL')} of 200")
    assert found.count("FAIL") <= 21
