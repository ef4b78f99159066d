"""A key holder, and everybody's part in its rounds, for the tests of the roles."""

import base64
import json
import traceback
from functools import lru_cache
from itertools import count

import numpy as np
import pytest
import tenseal as ts

from secure_fedclust.errors import AggregationAborted, ProtocolError
from secure_fedclust.privacy import ckks
from secure_fedclust.privacy.ckks import Aggregator, Encryptor, KeyHolder, keyless
from secure_fedclust.privacy.ckks_parameters import PRESETS, Parameters

SMALL = Parameters(length=20, n_clients=3, reach=1000)
LARGE = Parameters(length=20, n_clients=3, reach=2**44)
assert (SMALL.preset, LARGE.preset) == PRESETS
SLOTS = SMALL.preset.slots
LONG = Parameters(length=2 * SLOTS + 1, n_clients=3, reach=1000)
RUN = "run 1"

each_size = pytest.mark.parametrize("parameters", [SMALL, LARGE], ids=["small", "large"])


class World:
    """A key holder whose rounds have rising numbers, and everybody's part in them."""

    def __init__(self):
        self.holder = KeyHolder(RUN)
        self._numbers = count()

    def number(self):
        """Of a round that was not opened yet."""
        return next(self._numbers)

    def encryptor(self, preset):
        return Encryptor(self.holder.public_key(preset), preset)

    def encrypt(self, parameters, vector):
        return self.encryptor(parameters.preset).encrypt(parameters, vector)

    def unchecked(self, parameters, numbers):
        """As clients could encrypt that go around their encryptors.

        Four quarters, because the library refuses to encode what fills its room by itself.
        """
        context = self.encryptor(parameters.preset)._context
        parts = [ts.ckks_vector(context, numbers / 4, parameters.scale) for _ in range(4)]
        return [(parts[0] + parts[1] + parts[2] + parts[3]).serialize()]

    def added(self, parameters, vectors):
        """An aggregator that has been given these vectors."""
        adder = Aggregator(parameters, keyless(parameters.preset))
        encryptor = self.encryptor(parameters.preset)
        for i, vector in enumerate(vectors):
            adder.add(f"client {i}", encryptor.encrypt(parameters, vector))
        return adder

    def opened(self, parameters, ciphertexts):
        """Open a sum. Keys that are thrown away with it are put back, as only a test can do it."""
        self.holder.public_key(parameters.preset)
        keys = self.holder._contexts
        try:
            return self.holder.open(self.number(), parameters, ciphertexts)
        except AggregationAborted:
            assert self.holder.has_forgotten
            self.holder._contexts, self.holder.has_forgotten = keys, False
            raise

    def decrypted(self, parameters, ciphertexts):
        """What the key holder sees before it rounds."""
        self.holder.public_key(parameters.preset)
        context = self.holder._contexts[parameters.preset]
        used = parameters.preset.used
        parts = [ts.ckks_vector_from(context, data).decrypt()[:used] for data in ciphertexts]
        return np.concatenate(parts)[: parameters.length]


def ones(parameters):
    return np.ones(parameters.length, dtype=np.int64)


def filled(world, parameters):
    """An aggregator with one vector of ones in it, and room for more."""
    return world.added(parameters, [ones(parameters)])


def refuses(adder, client, ciphertexts, match=""):
    """Whether a client's vector is refused in its name, and the sum stays what it was."""
    before = adder.total(), list(adder.clients)
    with pytest.raises(ProtocolError, match=f"^{client}: .*{match}") as caught:
        adder.add(client, ciphertexts)
    assert type(caught.value) is ProtocolError
    assert (adder.total(), adder.clients) == before


def key_in(path, preset):
    """The serialised secret key in a key file."""
    return base64.b64decode(json.loads(path.read_text())["keys"][str(PRESETS.index(preset))])


def contexts(preset):
    """Contexts of a preset, by the keys in them."""
    context = ckks._new_context(preset)
    return {
        "public key": ckks._serialized(context, public=True),
        "secret key": ckks._serialized(context, secret=True),
        "nothing but the secret key": context.serialize(False, True, False, False),
        "no key": ckks._serialized(context),
    }


def flipped(data, bit):
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def assert_has_forgotten(holder, honest):
    """That there are no keys any more, and none are made."""
    assert (holder.has_forgotten, holder._contexts) == (True, {})
    for parameters, parts in honest.items():
        with pytest.raises(ProtocolError, match=r"^key holder: the keys of run .* thrown away"):
            holder.open(99, parameters, parts)
        with pytest.raises(ProtocolError, match=r"^key holder: the keys of run .* thrown away"):
            holder.public_key(parameters.preset)
    assert holder._contexts == {}


def encrypted(holder, parameters):
    key = holder.public_key(parameters.preset)
    return Encryptor(key, parameters.preset).encrypt(parameters, ones(parameters))


def leaked(error, secret):
    """Pieces of a secret in an error, its traceback, its causes, or what they carry."""
    chain, texts = [error], []
    for each in chain:
        texts += [str(each), repr(each), *map(str, each.args), str(vars(each))]
        texts += [str(getattr(each, name, "")) for name in ("doc", "object", "__notes__")]
        chain += [more for more in (each.__cause__,) if more is not None]
    texts += traceback.format_exception(error)
    return pieces("\n".join(texts), secret)


PIECE = 12


def pieces(text, secret):
    """Pieces of a text that are in a secret."""
    found = {text[i : i + PIECE] for i in range(len(text) - PIECE + 1)} & all_pieces(secret)
    return sorted(piece for piece in found if len(set(piece)) > PIECE // 2)


@lru_cache(maxsize=4)
def all_pieces(secret):
    """Pieces of a secret: as it is, in base 64, or as Python shows it."""
    public = 200  # Parameters and names come first.
    ways = secret.decode("latin-1"), base64.b64encode(secret).decode(), repr(secret)
    return {way[i : i + PIECE] for way in ways for i in range(public, len(way) - PIECE, PIECE)}
