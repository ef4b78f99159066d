"""What the parameters of encryption promise: room for every sum, and errors that are rounded away.

Errors are looked at here as they are before rounding, which nobody but the key holder sees.
"""

import math

import numpy as np
import pytest
import tenseal as ts
import tenseal.sealapi as sealapi
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy import stats

from secure_fedclust.errors import AggregationAborted, ParameterError
from secure_fedclust.privacy.ckks import Aggregator, KeyHolder, keyless
from secure_fedclust.privacy.ckks_parameters import (
    PRESETS,
    REACH,
    TOLERANCE,
    Parameters,
    Preset,
)

from .test_ckks import World

SMALLEST, LARGEST = PRESETS[0], PRESETS[-1]
SLOTS = SMALLEST.slots
UNLIKELY = 1e-7
"""How often a statistical test may fail although all is well."""

each_preset = pytest.mark.parametrize("preset", PRESETS, ids=str)
WORLD = World()
cohorts = st.integers(1, 2000) | st.sampled_from([1, 2, 1000, 10**6, 10**9, 2**64])


@st.composite
def magnitudes(draw, most_bits=64):
    """Whole numbers of all sizes alike, and those next to a power of two in particular."""
    power = 1 << draw(st.integers(0, most_bits))
    near = st.sampled_from([power - 1, power, power + 1])
    return max(1, draw(near | st.integers(power, 2 * power)))


# Room, in numbers.


def modulus(preset):
    """What numbers are computed modulo, by the primes that the library takes."""
    primes = sealapi.CoeffModulus.Create(preset.degree, list(preset.moduli))[:-1]
    return math.prod(prime.value() for prime in primes)


@given(n_clients=cohorts, reach=magnitudes())
@example(n_clients=1, reach=2**46)
@example(n_clients=1, reach=2**46 + 1)
@example(n_clients=1, reach=2**41)
@example(n_clients=1, reach=2**41 + 1)
def test_a_sum_is_accepted_with_the_room_it_needs_or_refused(n_clients, reach):
    fitting = [each for each in PRESETS if n_clients * reach <= each.capacity(n_clients)]
    if not fitting:
        with pytest.raises(ParameterError, match=f"{n_clients} vectors .* up to {reach} needs"):
            Parameters(7, n_clients, reach)
        return
    parameters = Parameters(7, n_clients, reach)
    assert parameters.preset == fitting[0]
    assert parameters.largest == n_clients * reach
    deviation = parameters.preset.degree / 6 * math.sqrt(n_clients) / parameters.scale
    assert REACH * deviation <= TOLERANCE
    # A sum at the bound takes at most half of the room, and more than a quarter of it: the scale
    # is the largest power of two that leaves the other half to sums that are too large.
    room = modulus(parameters.preset) / 2
    taken = parameters.largest * parameters.scale
    assert math.frexp(parameters.scale)[0] == 0.5
    assert taken <= 0.5001 * room
    assert taken > 0.2499 * room or parameters.largest == 1


@given(n_clients=cohorts, reach=magnitudes(), length=st.integers(1, 10**6))
def test_numbers_up_to_almost_twice_the_bound_are_told_from_smaller_ones(n_clients, reach, length):
    assume(n_clients * reach <= LARGEST.capacity(n_clients))
    parameters = Parameters(length, n_clients, reach)
    # No wrapping: what is beyond the bound comes out beyond it. Primes are a little smaller than
    # the powers of two that they are named after.
    beyond = 1.999 * parameters.largest
    assert beyond * parameters.scale < modulus(parameters.preset) / 2


@given(length=st.integers(1, 10**6), reach=magnitudes(46))
def test_the_length_changes_the_number_of_ciphertexts_and_nothing_else(length, reach):
    assume(reach <= LARGEST.capacity(1))
    parameters, single = Parameters(length, 1, reach), Parameters(1, 1, reach)
    used = parameters.preset.used
    assert (parameters.chunks - 1) * used < length <= parameters.chunks * used
    assert (parameters.preset, parameters.scale) == (single.preset, single.scale)
    assert parameters.most_bytes == parameters.chunks * single.most_bytes


def test_how_large_sums_may_be_is_as_documented():
    bits = {n: [each.capacity(n).bit_length() - 1 for each in PRESETS] for n in (1, 30, 1000)}
    assert bits == {1: [41, 46], 30: [39, 46], 1000: [36, 46]}
    assert Parameters(1, 1000, 2**30 // 1000).preset == SMALLEST


@given(first=cohorts, second=cohorts)
def test_more_clients_never_have_more_room(first, second):
    for preset in PRESETS:
        few, many = sorted((first, second))
        assert preset.capacity(many) <= preset.capacity(few)
        assert preset.scale_bits(many) >= preset.scale_bits(few)


def test_the_tail_that_is_left_out_is_as_small_as_documented():
    # What is proved (docs/proofs/ckks.md): Markov's inequality at the best t, in deviations.
    t = np.linspace(0, math.sqrt(2), 10_000, endpoint=False)
    exponents = 1.5 * t**2 / SMALLEST.degree - np.log1p(-(t**2) / 2) - t * REACH
    assert 2 * math.exp(exponents.min()) < 2.0**-58
    # What is believed.
    assert stats.laplace(scale=0.5**0.5).sf(REACH) * 2 < 2.0**-65
    # These are not the tails of a Gaussian, where 9.4 deviations would do.
    assert stats.norm.sf(9.4) * 2 < 2.0**-65


@each_preset
def test_presets_are_as_large_as_security_allows_and_no_larger(preset):
    assert sum(preset.moduli) == 109
    more = [*preset.moduli[:-1], preset.moduli[-1] + 1]
    with pytest.raises(ValueError, match="not set correctly"):
        ts.context(ts.SCHEME_TYPE.CKKS, preset.degree, coeff_mod_bit_sizes=more)


@pytest.mark.parametrize("name", ["length", "n_clients", "reach"])
@pytest.mark.parametrize("value", [0, -1, -(2**70)])
def test_numbers_below_one_are_refused_by_name(name, value):
    with pytest.raises(ParameterError, match=f"^{name}={value}: give at least 1"):
        Parameters(**{"length": 3, "n_clients": 3, "reach": 3} | {name: value})


@pytest.mark.parametrize("bits", [84, 90, 3000])
def test_absurd_cohorts_are_refused_like_any_that_does_not_fit(bits):
    with pytest.raises(ParameterError):
        Parameters(1, 2**bits, 1)


@given(numbers=st.tuples(magnitudes(20), st.integers(1, 999), magnitudes(30)), more=st.data())
def test_parameters_that_differ_are_never_described_alike(numbers, more):
    other = list(numbers)
    other[more.draw(st.integers(0, 2))] += more.draw(st.integers(1, 10))
    assert Parameters(*numbers).text() != Parameters(*other).text()
    assert Parameters(*numbers).text() == Parameters(*numbers).text()


# Sizes.


@each_preset
def test_what_is_encrypted_is_never_refused_for_its_size(preset):
    world = World()
    least, most = preset.ciphertext_bytes
    n = 20
    length = preset.used
    parameters = Parameters(length, n, preset.capacity(n) // n)
    assert parameters.preset == preset
    rng = np.random.default_rng(0)
    bound = parameters.reach
    vectors = [
        *(np.full(length, value) for value in (0, bound, -bound)),
        *(rng.integers(-bound, bound, length) for _ in range(n - 3)),
    ]
    adder = Aggregator(parameters, keyless(preset))
    for i, vector in enumerate(vectors):
        [data] = world.encrypt(parameters, vector)
        assert least <= len(data) <= most
        adder.add(str(i), [data])
        assert least <= len(adder.total()[0]) <= most
        assert len(data) == pytest.approx(preset.usual_bytes, rel=0.1)


@each_preset
def test_no_public_key_is_refused_for_its_size(preset):
    least, most = preset.key_bytes
    for _ in range(5):
        assert least <= len(KeyHolder("run 1").public_key(preset)) <= most


# Errors, before they are rounded away.


def errors(world, parameters, vectors):
    """What is left of an opened sum when the true one is taken off."""
    adder = world.added(parameters, vectors)
    values = world.decrypted(parameters, adder.total())
    return adder, values - np.sum(vectors, axis=0, dtype=np.int64)


def deviation(parameters, n_vectors):
    """As documented, in grid steps."""
    return parameters.preset.degree / 6 * math.sqrt(n_vectors) / parameters.scale


def zeros(parameters, n_vectors):
    """What a fresh key opens where all numbers of all vectors are zero."""
    world = World()
    context = world.encryptor(parameters.preset)._context
    total = ts.ckks_vector(context, np.zeros(SLOTS), parameters.scale)
    for _ in range(n_vectors - 1):
        total += ts.ckks_vector(context, np.zeros(SLOTS), parameters.scale)
    private = world.holder._contexts[parameters.preset]
    return np.array(ts.ckks_vector_from(private, total.serialize()).decrypt())


CLIENTS = 1000
SUMS = {
    "smallest preset": (SMALLEST.capacity(CLIENTS), 1),
    "smallest preset, negative": (SMALLEST.capacity(CLIENTS), -1),
    "30 bits": (2**30, 1),
    "largest preset": (LARGEST.capacity(CLIENTS), 1),
    "largest preset, negative": (LARGEST.capacity(CLIENTS), -1),
}
# Each takes some seconds. The first has the least room of all.
THOUSANDS = [
    pytest.param(*each, id=name, marks=[pytest.mark.slow] * (name != "smallest preset"))
    for name, each in SUMS.items()
]


@pytest.mark.parametrize(("largest", "sign"), THOUSANDS)
def test_a_thousand_constant_vectors_at_the_bound_are_summed_exactly(largest, sign):
    world = World()
    preset = SMALLEST if largest <= SMALLEST.capacity(CLIENTS) else LARGEST
    parameters = Parameters(preset.used, CLIENTS, largest // CLIENTS)
    assert parameters.preset == preset
    vector = np.full(preset.used, sign * parameters.reach)
    # A thousand encryptions, rather than one that is added a thousand times: see below.
    adder, off = errors(world, parameters, [vector] * CLIENTS)
    opened = world.opened(parameters, adder.total())
    np.testing.assert_array_equal(opened, CLIENTS * vector)
    assert np.abs(off).max() < TOLERANCE / 4
    if preset == SMALLEST:  # In the other one double precision errs more.
        # 6 deviations of what is estimated from the slots of one key; 10% from many keys, below.
        assert off.std() == pytest.approx(deviation(parameters, CLIENTS), rel=0.16)


def test_one_ciphertext_added_a_thousand_times_errs_far_more_than_a_thousand():
    # Its error is the same every time, and grows with the number of clients instead of its root.
    world = World()
    parameters = Parameters(SLOTS, CLIENTS, 2**20)
    once = world.encrypt(parameters, np.zeros(SLOTS, dtype=np.int64))
    adder = Aggregator(parameters, keyless(parameters.preset))
    for i in range(CLIENTS):
        adder.add(str(i), once)
    off = world.decrypted(parameters, adder.total())
    coherent = math.sqrt(CLIENTS) * deviation(parameters, CLIENTS)
    assert off.std() == pytest.approx(coherent, rel=0.16)


@each_preset
@pytest.mark.parametrize("n_vectors", [1, 12])
def test_errors_are_as_large_as_documented_and_have_the_tails_of_laplace(preset, n_vectors):
    # Each slot's error is Gaussian, with a variance that the key decides: over the slots of a key
    # it is exponentially distributed, and so errors are Laplace. All numbers are zero: others, and
    # those that fill up what is not used, are rounded in double precision, and hide it.
    reach = 2**20 if preset == SMALLEST else 2 * SMALLEST.capacity(1)
    parameters = Parameters(SLOTS, n_vectors, reach)
    assert parameters.preset == preset
    off = np.concatenate([zeros(parameters, n_vectors) for _ in range(12)])
    off /= deviation(parameters, n_vectors)
    assert off.std() == pytest.approx(1, rel=0.1)
    assert abs(off.mean()) < 0.05
    assert 4.2 < stats.kurtosis(off, fisher=False) < 9
    assert stats.kstest(off, stats.laplace(scale=0.5**0.5).cdf).pvalue > UNLIKELY
    assert stats.kstest(off, stats.norm.cdf).pvalue < UNLIKELY


WORST = {
    "constant": np.ones(SLOTS),
    "negative": -np.ones(SLOTS),
    "alternating": np.where(np.arange(SLOTS) % 2, 1, -1),
    "halves": np.where(np.arange(SLOTS) < SLOTS // 2, 1, -1),
    "one": np.arange(SLOTS) == 5,
    "signs": np.random.default_rng(0).choice([-1, 1], SLOTS),
}


@each_preset
@pytest.mark.parametrize("shape", WORST)
@pytest.mark.parametrize("n_vectors", [1, 3])
def test_sums_at_the_bound_of_a_preset_are_exact_whatever_their_shape(preset, shape, n_vectors):
    parameters = Parameters(SLOTS, n_vectors, preset.capacity(n_vectors) // n_vectors)
    assert parameters.preset == preset
    vectors = [(WORST[shape] * parameters.reach).astype(np.int64)] * n_vectors
    adder, off = errors(WORLD, parameters, vectors)
    assert np.abs(off).max() < TOLERANCE / 2
    opened = WORLD.opened(parameters, adder.total())
    np.testing.assert_array_equal(opened, n_vectors * vectors[0])


# Overflow.


def test_the_library_says_nothing_when_a_number_is_too_large():
    context = ts.context(ts.SCHEME_TYPE.CKKS, SMALLEST.degree, coeff_mod_bit_sizes=[60, 49])
    scale = 2.0**40
    half = modulus(SMALLEST) / 2 / scale

    def added(value):
        part = ts.ckks_vector(context, np.full(SLOTS, value / 4), scale)
        return np.array((part + part + part + part).decrypt())

    np.testing.assert_allclose(added(half * 0.999), half * 0.999, rtol=1e-6)
    np.testing.assert_allclose(added(half * 1.001), -half * 0.999, rtol=1e-6)
    np.testing.assert_allclose(added(half * 1.8), -half * 0.2, rtol=1e-6)
    # It does say something of a single vector that fills more than half of its room: this is
    # why a number at the bound must fit in that half.
    np.testing.assert_allclose(added(half * 1.99), -half * 0.01, rtol=1e-6)
    with pytest.raises(ValueError, match="too large"):
        ts.ckks_vector(context, np.full(SLOTS, half * 0.51), scale)


def test_random_numbers_hide_an_overflow():
    # Why the bound is tested with constant vectors: these overflow by far more, and do no harm.
    context = ts.context(ts.SCHEME_TYPE.CKKS, SMALLEST.degree, coeff_mod_bit_sizes=[60, 49])
    scale = 2.0**40
    signs = np.random.default_rng(0).choice([-1.0, 1.0], SLOTS)
    numbers = signs * 4 * modulus(SMALLEST) / 2 / scale
    found = np.array(ts.ckks_vector(context, numbers, scale).decrypt())
    np.testing.assert_allclose(found, numbers, rtol=1e-6)


@each_preset
@pytest.mark.parametrize("times", [1.0001, 1.5, 1.99, -1.0001, -1.99])
def test_a_sum_beyond_the_bound_is_not_given_out(preset, times):
    n_clients = 4
    parameters = Parameters(6, n_clients, preset.capacity(n_clients) // n_clients)
    assert parameters.preset == preset
    too_large = np.rint(np.full(SLOTS, times * parameters.largest))
    forged = WORLD.unchecked(parameters, too_large)
    values = WORLD.decrypted(parameters, forged)
    assert np.abs(values - too_large[: len(values)]).max() < TOLERANCE  # It did not wrap.
    with pytest.raises(AggregationAborted, match="too large") as caught:
        WORLD.opened(parameters, forged)
    assert str(int(abs(too_large[0]))) not in str(caught.value)


@each_preset
def test_one_number_beyond_the_bound_is_enough(preset):
    parameters = Parameters(6, 4, preset.capacity(4) // 4)
    numbers = np.zeros(SLOTS)
    numbers[5] = parameters.largest
    assert WORLD.opened(parameters, WORLD.unchecked(parameters, numbers))[5] == numbers[5]
    numbers[5] += 1
    with pytest.raises(AggregationAborted):
        WORLD.opened(parameters, WORLD.unchecked(parameters, numbers))


def test_a_number_that_is_off_by_the_whole_room_is_noticed_by_nobody():
    # Why an encryptor has to refuse what is out of reach: there is no telling afterwards.
    parameters = Parameters(6, 4, 2**20)
    whole = 2.0**SMALLEST.bits / parameters.scale
    assert whole > 3 * parameters.largest
    forged = WORLD.unchecked(parameters, np.full(SLOTS, whole))
    np.testing.assert_array_equal(WORLD.opened(parameters, forged), np.zeros(6))


def test_presets_are_told_apart_in_messages():
    assert str(Preset(4096, (60, 49))) == "(4096, [60, 49])"
    assert len({str(each) for each in PRESETS}) == len(PRESETS)
