import numpy as np
import pytest

from secure_fedclust.audit.attacks.noise import Noise, apart, as_charged, judge_noise, shape

SIGMA = 4096.0


def seen(draw, plays=200, releases=2):
    noise = Noise()
    for _ in range(plays):
        noise.note("worst", [(SIGMA, draw()) for _ in range(releases)])
    return noise


def normal(rng):
    return lambda: {
        "sums": np.rint(rng.normal(0, SIGMA, (4, 2))).astype(np.int64),
        "counts": np.rint(rng.normal(0, SIGMA, 4)).astype(np.int64),
    }


def test_noise_that_is_as_it_should_be_is_seldom_called_a_failure():
    rng = np.random.default_rng(0)
    found = [judge_noise(seen(normal(rng), 60), 0.95) for _ in range(150)]
    for findings in zip(*found, strict=True):
        failed = sum(finding.verdict == "FAIL" for finding in findings)
        assert failed <= 19, findings[0].name  # 7.5 in the long run; 19 is four deviations more


@pytest.mark.parametrize("judge", [as_charged, shape, apart])
def test_two_halves_are_as_good_as_the_whole(judge):
    rng = np.random.default_rng(1)
    first, second = seen(normal(rng), 50), seen(normal(rng), 50)
    both = first.plus(second)
    assert both.numbers == first.numbers + second.numbers
    assert judge(both, 0.99).verdict == "PASS"


def test_too_little_noise_in_one_field_is_named():
    draw = normal(np.random.default_rng(2))
    noise = seen(lambda: draw() | {"counts": draw()["counts"] // 2})
    found = as_charged(noise, 0.95)
    assert found.verdict == "FAIL" and "'counts'" in found.words
    assert found.figure == pytest.approx(0.5, abs=0.05)


def test_more_noise_than_charged_is_no_failure():
    draw = normal(np.random.default_rng(3))
    assert as_charged(seen(lambda: {n: 3 * x for n, x in draw().items()}), 0.95).verdict == "PASS"


def test_tails_that_are_cut_off_are_seen():
    draw = normal(np.random.default_rng(4))
    limit = int(3.5 * SIGMA)
    cut = seen(lambda: {n: np.clip(x, -limit, limit) for n, x in draw().items()}, plays=3000)
    assert shape(cut, 0.95).verdict == "FAIL"


def test_noise_that_is_the_same_in_every_run_is_seen():
    draw = normal(np.random.default_rng(5))
    kept = draw()["counts"]
    found = apart(seen(lambda: draw() | {"counts": kept}), 0.95)
    assert found.verdict == "FAIL" and found.figure == 1.0


def test_a_few_runs_cannot_tell_whether_noise_is_shared():
    assert apart(seen(normal(np.random.default_rng(6)), plays=8), 0.95).verdict == "INCONCLUSIVE"
