"""What encrypted sums take: against TenSEAL alone, NVFlare's parameters, and in whole runs.

    python benchmarks/ckks.py [--repeats 3] [--quick] [--check]

A client's part begins with a vector of whole numbers, noise inside, and ends with the bytes of its
message. The server's part is what it does for one client: authenticate, check, deserialise, add,
with and without decoding the message before that. TenSEAL alone encrypts and serialises, or
deserialises and adds, without any check, and begins with floats. Every client has a vector and
ciphertexts of its own, so that nobody works from a warm cache only. Times that are compared are
taken in turns, client by client, and medians are compared. Every sum is opened and compared with
the plain one.

On two cores all takes about two minutes.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tenseal as ts
from _table import Bar, in_turns, print_bars, print_table
from tqdm import tqdm

from secure_fedclust import FKM, PrivacySpec
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.messages import KEY_HOLDER, Bounds, Stage, Values
from secure_fedclust.privacy.ckks import Aggregator, Encryptor, KeyHolder, keyless
from secure_fedclust.privacy.ckks_parameters import Parameters, Preset
from secure_fedclust.privacy.ckks_round import Ckks, CkksClient, KeyHolding, OneKeyHolder
from secure_fedclust.privacy.ckks_stages import ENCRYPT, OPEN
from secure_fedclust.privacy.cohort import Rules
from secure_fedclust.privacy.identity import Identity
from secure_fedclust.privacy.secure_sum import Contribution, Question

VALUES = 2_048
SUM_BITS = 30
LARGE_SUM_BITS = 42
"""More than the first parameters have room for."""

USUAL = "TenSEAL alone, [54, 54]"
NVFLARE = "TenSEAL alone, NVFlare's"

OVER_TENSEAL_AT_MOST = 1.3
MESSAGE_KB_AT_MOST = 66
NVFLARE_TIME_AT_LEAST = 2
NVFLARE_BYTES_AT_LEAST = 3
SERVER_SECONDS = 1
MESSAGES_AT_MOST = 0.2
"""That a client after the first adds to the server's memory: none, but freed memory has gaps."""
FKM_SECONDS = 5

PEAK = Path("/proc/self/clear_refs")
"""Where 5 is written to measure the peak of memory from here on."""

ENCRYPTION = (
    (Encryptor, "__init__"),
    (Encryptor, "encrypt"),
    (Aggregator, "__init__"),
    (Aggregator, "add"),
    (Aggregator, "total"),
    (KeyHolder, "public_key"),
    (KeyHolder, "open"),
)
"""What encryption is in a run: keys, and all that is done with ciphertexts."""

RUN = "benchmark"
NO_LEDGER = {"ledger_rows": 0, "ledger_head": "0" * 64}
HEADER = ("what", "how", "measured", "ratio", "asked")
NOTE = """
The server has a bar where it authenticates, checks, deserialises and adds, against TenSEAL alone
with [54, 54], scale 2^22, the parameters usually taken for sums of this size. Decoding the message
comes on top, and with our parameters TenSEAL alone is faster than with these, as their bytes do not
compress and there is nothing to decompress: these ratios have no bar, and are as measured. Sums to
2^42 need our larger parameters, with two ciphertexts for these vectors; they are shown without
bars. NVFlare's parameters are 8192, [60, 40, 40], scale 2^40."""

Send = Callable[[str], bytes]
"""A client makes its message."""
Receive = Callable[[str, bytes], float]
"""The server decodes a client's message and adds it; gives the seconds without decoding."""


@dataclass(frozen=True)
class Line:
    """A line of the table, and what is asked of it: a ratio, or a figure in some unit."""

    what: str
    how: str
    measured: str
    ratio: str = ""
    bar: Bar | None = None
    unit: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """What is printed."""
        asked = ""
        if self.bar is not None:
            least, most = self.bar.at_least, self.bar.at_most
            asked = f"at most {most:g}" if np.isfinite(most) else f"at least {least:g}"
            asked += self.unit
        return self.what, self.how, self.measured, self.ratio, asked


class Parties:
    """Server, key holder and clients of encrypted sums, in one process.

    Parameters
    ----------
    n_clients, length : int
    bits : int
        No number of a sum is beyond two to the power of it.
    """

    def __init__(self, n_clients: int, length: int, bits: int) -> None:
        self.reach = 2**bits // n_clients
        self.parameters = Parameters(length, n_clients, self.reach)
        rng = np.random.default_rng(0)
        drawn = rng.integers(-self.reach, self.reach, (n_clients, length), endpoint=True)
        self.vectors: dict[str, Ints] = {f"client {i}": each for i, each in enumerate(drawn)}
        self.plain_sum = drawn.sum(axis=0)
        self.opening_seconds: list[float] = []
        """The key holder's time for each sum: checks what it is asked, opens it, encodes it."""
        rules = Rules(min_survivors=2 * n_clients // 3 + 1, colluders=1)
        holder = Identity()
        self._clients = {
            name: CkksClient(rules, Identity(), [holder.public]) for name in self.vectors
        }
        self._holding = KeyHolding(rules, holder)
        self._server = Ckks(rules, OneKeyHolder(Identity()))
        self._numbers = count()

    def sum(self, work: Callable[[Send, Receive], None]) -> None:
        """One sum, compared with the plain one.

        Parameters
        ----------
        work : function
            Has every client send its vector, and the server receive it.
        """

        def ask(
            stage: Stage,
            requests: Mapping[str, Values],
            bounds: Bounds,
            read: Callable[[str, Values], Any] | None = None,
        ) -> dict[str, Any]:
            if KEY_HOLDER in requests:
                return {KEY_HOLDER: self._held(stage, requests[KEY_HOLDER])}

            def send(name: str) -> bytes:
                given = Contribution(self.vectors[name], self.reach, NO_LEDGER)
                answer = self._clients[name].answer
                reply = answer(stage, RUN, requests[name], lambda question, n_clients: given)
                return stage.reply.encode(reply, run=RUN, step=0)

            def receive(name: str, message: bytes) -> float:
                reply, _ = stage.reply.decode(message, run=RUN, step=0, bounds=bounds)
                start = time.perf_counter()
                read(name, reply)
                return time.perf_counter() - start

            if stage is ENCRYPT:
                work(send, receive)
            else:
                for name in requests:
                    receive(name, send(name))
            return dict.fromkeys(requests)

        question = Question(
            RUN,
            next(self._numbers),
            b"benchmark",
            self.parameters.length,
            reach=lambda n: self.reach,
            largest=lambda n: n * self.reach,
        )
        total = self._server.total(ask, list(self.vectors), question)
        np.testing.assert_array_equal(total.steps, self.plain_sum)

    def _held(self, stage: Stage, request: Values) -> Values:
        start = time.perf_counter()
        reply = self._holding.answer(stage, RUN, request)
        stage.reply.encode(reply, run=RUN, step=0)
        if stage is OPEN:
            self.opening_seconds.append(time.perf_counter() - start)
        return reply


class TenSeal:
    """TenSEAL alone: no checks, no messages, one ciphertext a vector.

    Parameters
    ----------
    degree : int
    moduli : sequence of int
    scale : float
    """

    def __init__(self, degree: int, moduli: Sequence[int], scale: float) -> None:
        self._secret = ts.context(ts.SCHEME_TYPE.CKKS, degree, coeff_mod_bit_sizes=list(moduli))
        self._public, self._keyless = (
            ts.context_from(
                self._secret.serialize(
                    save_public_key=public,
                    save_secret_key=False,
                    save_galois_keys=False,
                    save_relin_keys=False,
                )
            )
            for public in (True, False)
        )
        self._scale = scale
        self._sum: Any = None
        self.sent: list[bytes] = []

    def encrypt(self, vector: Floats) -> None:
        """What a client does."""
        self.sent.append(ts.ckks_vector(self._public, vector, self._scale).serialize())

    def add(self, ciphertext: bytes) -> None:
        """What the server does for one client."""
        loaded = ts.ckks_vector_from(self._keyless, ciphertext)
        if self._sum is None:
            self._sum = loaded
        else:
            self._sum.add_(loaded)

    def total(self) -> bytes:
        """The encrypted sum; the next one begins from nothing."""
        total, self._sum, self.sent = bytes(self._sum.serialize()), None, []
        return total

    def open(self, ciphertext: bytes) -> Floats:
        """What whoever has the secret key does."""
        return np.array(ts.ckks_vector_from(self._secret, ciphertext).decrypt())


def one_ciphertext(bits: int, n_clients: int, repeats: int) -> list[Line]:
    """Client, message and server where a vector is one ciphertext, for sums of so many bits."""
    parties = Parties(n_clients, VALUES, bits)
    preset = parties.parameters.preset
    same = alone_with(preset)
    schemes = {same: TenSeal(preset.degree, preset.moduli, parties.parameters.scale)}
    if bits == SUM_BITS:
        schemes[USUAL] = TenSeal(4096, (54, 54), 2.0**22)
    schemes[NVFLARE] = TenSeal(8192, (60, 40, 40), 2.0**40)
    alone = schemes.values()
    floats = [vector.astype(float) for vector in parties.vectors.values()]
    what = f"{VALUES:,} values, sums to 2^{bits}"
    clients, sizes, servers, adding = [], [], [], []

    def work(send: Send, receive: Receive) -> None:
        messages: list[bytes] = []
        without_decoding: list[float] = []
        seconds = in_turns(
            f"clients, {what}",
            n_clients,
            one_by_one(lambda name: messages.append(send(name)), parties.vectors),
            *(one_by_one(scheme.encrypt, floats) for scheme in alone),
        )
        clients.append(seconds)
        sent = [messages, *(scheme.sent for scheme in alone)]
        sizes.append([statistics.fmean(map(len, each)) for each in sent])
        seconds = in_turns(
            f"server, {what}",
            n_clients,
            one_by_one(
                lambda *given: without_decoding.append(receive(*given)), parties.vectors, messages
            ),
            *(one_by_one(scheme.add, scheme.sent) for scheme in alone),
        )
        servers.append(seconds)
        adding.append([statistics.median(without_decoding), *seconds[1:]])
        for scheme in alone:
            opened = scheme.open(scheme.total())[:VALUES]
            np.testing.assert_allclose(opened, parties.plain_sum, rtol=0, atol=0.25)

    for _ in range(repeats):
        parties.sum(work)

    def medians(figures: Sequence[Sequence[float]]) -> dict[str, float]:
        return dict(zip(["ours", *schemes], np.median(figures, axis=0).tolist(), strict=True))

    kb = {name: size / 1e3 for name, size in medians(sizes).items()}
    lines = [
        *beside_ours(
            f"client, {what}",
            medians(clients),
            at_most={same: OVER_TENSEAL_AT_MOST, USUAL: OVER_TENSEAL_AT_MOST},
            nvflare_at_least=NVFLARE_TIME_AT_LEAST,
        ),
        *beside_ours(
            f"kB of a client, {what}",
            kb,
            own=Bar(f"kB of a client, {what}", kb["ours"], at_most=MESSAGE_KB_AT_MOST),
            nvflare_at_least=NVFLARE_BYTES_AT_LEAST,
        ),
        *beside_ours(
            f"server, no decoding, {what}",
            medians(adding),
            at_most={USUAL: OVER_TENSEAL_AT_MOST},
        ),
        *beside_ours(f"server, decoding too, {what}", medians(servers)),
    ]
    return lines if bits == SUM_BITS else [replace(line, bar=None) for line in lines]


def beside_ours(
    what: str,
    figures: Mapping[str, float],
    *,
    own: Bar | None = None,
    at_most: Mapping[str, float] | None = None,
    nvflare_at_least: float | None = None,
) -> list[Line]:
    """Lines for ours and for TenSEAL alone.

    Parameters
    ----------
    what : str
    figures : mapping of name to float
        Seconds, or kB where `own` is given.
    own : Bar, optional
        What is asked of ours by itself.
    at_most : mapping of name to float, optional
        What ours may be over that of TenSEAL alone.
    nvflare_at_least : float, optional
        What NVFlare's must be over ours.
    """
    shown = in_units if own is None else "{:.1f} kB".format
    ours = figures["ours"]
    lines = [Line(what, "ours", shown(ours), bar=own, unit=" kB")]
    for name, figure in figures.items():
        if name == "ours":
            continue
        bar = None
        if name == NVFLARE:
            ratio = f"{figure / ours:.2f} x ours"
            if nvflare_at_least is not None:
                bar = Bar(f"NVFlare's over ours: {what}", figure / ours, nvflare_at_least)
        else:
            ratio = f"ours {ours / figure:.2f} x it"
            if at_most and name in at_most:
                bar = Bar(f"ours over {name}: {what}", ours / figure, at_most=at_most[name])
        lines.append(Line(what, name, shown(figure), ratio, bar))
    return lines


def opening(bits: int, n_clients: int, repeats: int) -> list[Line]:
    """The key holder opens a sum of one ciphertext, against deserialise and decrypt."""
    parameters = Parameters(VALUES, n_clients, 2**bits // n_clients)
    preset, vector = parameters.preset, np.full(VALUES, parameters.reach)
    holder = KeyHolder(RUN)
    encryptor = Encryptor(holder.public_key(preset), preset)
    aggregator = Aggregator(parameters, keyless(preset))
    alone = TenSeal(preset.degree, preset.moduli, parameters.scale)
    for i in range(n_clients):
        aggregator.add(f"client {i}", encryptor.encrypt(parameters, vector))
        alone.encrypt(vector.astype(float))
        alone.add(alone.sent[-1])
    numbers, total, total_alone = count(), aggregator.total(), alone.total()
    steps = holder.open(next(numbers), parameters, total)
    np.testing.assert_array_equal(steps, n_clients * vector)
    what = f"key holder, {VALUES:,} values, sums to 2^{bits}"
    ours, theirs = in_turns(
        what,
        10 * repeats,
        lambda: holder.open(next(numbers), parameters, total),
        lambda: alone.open(total_alone),
    )
    return beside_ours(what, {"ours": ours, alone_with(preset): theirs})


def many_ciphertexts(n_clients: int, n_features: int, n_clusters: int, repeats: int) -> list[Line]:
    """A sum of centres and sizes in many features; messages are made one at a time."""
    length = n_clusters * (n_features + 1)
    parties = Parties(n_clients, length, SUM_BITS)
    what = f"{length:,} values, {n_clients} clients"
    sizes: list[int] = []
    sending: list[float] = []
    servers: list[tuple[float, float]] = []

    def work(send: Send, receive: Receive) -> None:
        received = with_decoding = 0.0
        for name in tqdm(parties.vectors, what, file=sys.stderr):
            start = time.perf_counter()
            message = send(name)
            sent = time.perf_counter()
            received += receive(name, message)
            with_decoding += time.perf_counter() - sent
            sending.append(sent - start)
            sizes.append(len(message))
        servers.append((with_decoding, received))

    for _ in range(repeats):
        parties.sum(work)
    lines = [
        Line(what, "client, each", in_units(statistics.median(sending))),
        Line(what, "bytes of a client", f"{statistics.fmean(sizes) / 1e6:.2f} MB"),
    ]
    for how, seconds in zip(
        ("decoding too", "no decoding"), zip(*servers, strict=True), strict=True
    ):
        figure = statistics.median(seconds)
        bar = Bar(f"seconds of the server, {how}, {what}", figure, at_most=SERVER_SECONDS)
        lines.append(Line(what, f"server in all, {how}", in_units(figure), bar=bar, unit=" s"))
    opened = statistics.median(parties.opening_seconds)
    return [*lines, Line(what, "key holder", in_units(opened))]


def server_memory(n_clients: int, n_features: int, n_clusters: int) -> list[Line]:
    """How far the process grows while the server decodes and adds, by clients so far.

    Messages are made one at a time, and what was there with the first of them is not counted. What
    clients have freed is used again, so that figures for few clients are low; a running sum is
    there from the second on. If the server kept what it was sent, every client would add a message.
    """
    if not os.access(PEAK, os.W_OK):
        print("the server's memory is left out: it is known on Linux only", file=sys.stderr)
        return []
    length = n_clusters * (n_features + 1)
    parties = Parties(n_clients, length, SUM_BITS)
    what = f"memory of the server, {length:,} values"
    peaks: list[int] = []
    sizes: list[int] = []

    def work(send: Send, receive: Receive) -> None:
        before = None
        for name in tqdm(parties.vectors, what, file=sys.stderr):
            message = send(name)
            before = before or resident("VmRSS")
            # Else the peak could be the client's.
            PEAK.write_text("5")
            receive(name, message)
            peaks.append(resident("VmHWM") - before)
            sizes.append(len(message))

    parties.sum(work)
    so_far = np.maximum.accumulate(peaks)
    lines = [
        Line(what, f"after {n} of {n_clients} clients", f"{so_far[n - 1] / 1e6:.1f} MB")
        for n in sorted({1, 2, n_clients // 10, n_clients})
    ]
    more = (so_far[-1] - so_far[0]) / sum(sizes[1:])
    bar = Bar(f"messages that a client adds to the {what}", more, at_most=MESSAGES_AT_MOST)
    return [*lines[:-1], replace(lines[-1], ratio=f"{more:.2f} messages a client", bar=bar)]


def fkm_run(n_rounds: int, repeats: int) -> list[Line]:
    """Private FKM, 20 clients x 500 records x 2 features, 15 clusters, secure noise."""
    rng = np.random.default_rng(0)
    clusters = rng.uniform(-8, 8, (15, 2))
    clients = [clusters[rng.integers(0, 15, 500)] + rng.normal(0, 0.5, (500, 2)) for _ in range(20)]
    encryption: list[float] = []

    def fit(protection: str) -> None:
        spec = PrivacySpec(epsilon=1.0, delta=1e-5, ranges=[(-10, 10)] * 2, protection=protection)
        model = FKM(15, n_rounds=n_rounds, privacy=spec, sampler="secure", random_state=0)
        model.fit(clients)

    def encrypted() -> None:
        with clocked(*ENCRYPTION) as seconds:
            fit("ckks")
        encryption.append(sum(seconds))

    what = f"FKM, 20 clients, K=15, d=2, {n_rounds} rounds, epsilon 1"
    ckks, masking = in_turns(what, repeats, encrypted, partial(fit, "masking"))
    part = statistics.median(encryption)
    return [
        Line(
            what,
            "encrypted",
            in_units(ckks),
            f"{ckks / masking:.2f} x masking",
            Bar(f"seconds of {what}", ckks, at_most=FKM_SECONDS),
            " s",
        ),
        Line(what, "of it encryption", in_units(part), f"{part / ckks:.0%} of it"),
        Line(what, "masking", in_units(masking)),
    ]


@contextmanager
def clocked(*methods: tuple[type, str]) -> Iterator[list[float]]:
    """Seconds of each call of some methods."""
    taken: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            found = function(*given, **named)
            taken.append(time.perf_counter() - start)
            return found

        return call

    with ExitStack() as stack:
        for owner, name in methods:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield taken


def alone_with(preset: Preset) -> str:
    """What TenSEAL with our parameters is called."""
    return f"TenSEAL alone, {list(preset.moduli)}"


def one_by_one(function: Callable[..., object], *given: Iterable[Any]) -> Callable[[], object]:
    """A job that takes the next of what is given whenever it is called."""
    calls = zip(*given, strict=True)
    return lambda: function(*next(calls))


def resident(what: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at the most since the peak was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return 1024 * int(line.split()[1])
    raise LookupError(what)


def in_units(seconds: float) -> str:
    """Seconds or milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if a bar is missed under --check."""
    parser = argparse.ArgumentParser(description="What encrypted sums take.")
    parser.add_argument("--repeats", type=int, default=3, help="how often to measure (default 3)")
    parser.add_argument(
        "--quick", action="store_true", help="few clients and features; bars are for more"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is not met")
    given = parser.parse_args(arguments)
    if given.repeats < 1:
        parser.error(f"--repeats {given.repeats}: at least 1")
    n_clients, n_features, n_rounds = (10, 60, 1) if given.quick else (100, 784, 10)
    # First, as the others leave free memory that the server would use.
    memory = server_memory(n_clients, n_features, 100)
    lines = [
        *one_ciphertext(SUM_BITS, n_clients, given.repeats),
        *one_ciphertext(LARGE_SUM_BITS, n_clients, given.repeats),
        *opening(SUM_BITS, n_clients, given.repeats),
        *opening(LARGE_SUM_BITS, n_clients, given.repeats),
        *many_ciphertexts(n_clients, n_features, 100, given.repeats),
        *memory,
        *fkm_run(n_rounds, given.repeats),
    ]
    title = f"Encrypted sums, TenSEAL {ts.__version__}"
    print_table(title, HEADER, [line.cells for line in lines])
    print(NOTE)
    all_met = print_bars([line.bar for line in lines if line.bar is not None])
    return 1 if given.check and not all_met else 0


if __name__ == "__main__":
    sys.exit(main())
