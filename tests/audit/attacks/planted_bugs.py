"""Ways to break the shipped release path on purpose, each with what must notice it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from secure_fedclust.privacy import (
    accounting,
    domain,
    ledger,
    mechanism,
    queries,
    release,
    sensitivity,
)
from secure_fedclust.privacy.mechanism import Noisy, noise_level
from secure_fedclust.protocols import client


@dataclass(frozen=True)
class PlantedBug:
    """One mistake.

    `detectors` are the findings that must FAIL; the first is the one that the bug is meant for.
    `rounds` are those of the run that shows it.
    """

    name: str
    kind: str
    detectors: tuple[str, ...]
    plant: Callable
    adjacency: str = "add_remove"
    rounds: int = 1


def _halve_noise(patch):
    add = mechanism.noise
    for module in (mechanism, release):
        patch.setattr(
            module,
            "noise",
            lambda exact, sigma, sampler: add(exact, sigma, lambda s, n: sampler(s / 2, n)),
        )


def _halve_sensitivity(patch):
    state = sensitivity._sensitivity

    def half(*given, **inputs):
        found = state(*given, **inputs)
        return replace(found, value=found.value / 2)

    patch.setattr(sensitivity, "_sensitivity", half)


def _same_noise_in_all_fields(patch):
    def noise(bounded, sigma, sampler):
        drawn = sampler(sigma, bounded.coordinates)
        fields = {
            name: exact + drawn[: exact.size].reshape(exact.shape)
            for name, exact in bounded.fields.items()
        }
        return Noisy(fields, bounded.exponent, sigma)

    patch.setattr(release, "noise", noise)


def _same_noise_in_all_rounds(patch):
    kept = {}

    def sampler(sigma, size):
        if (sigma, size) not in kept:
            kept[sigma, size] = mechanism.secure_noise(sigma, size)
        return kept[sigma, size]

    patch.setattr(release, "sampler_named", lambda name: sampler)


def _no_clipping(patch):
    patch.setattr(domain.Domain, "hold", lambda self, points: points.copy())
    patch.setattr(
        queries, "clip_rows", lambda rows, radius: np.trunc(np.nan_to_num(rows)).astype(np.int64)
    )


def _empty_clusters_bare(patch):
    add = mechanism.noise

    def noise(bounded, sigma, sampler):
        noisy = add(bounded, sigma, sampler)
        fields = {
            name: np.where(exact == 0, 0, noisy.fields[name])
            for name, exact in bounded.fields.items()
        }
        return replace(noisy, fields=fields)

    patch.setattr(release, "noise", noise)


def _charge_after_release(patch):
    def release_first(self, query, X, share, *, run, step, message):
        mu = self.limit.mu * math.sqrt(share)
        exact = query.answer(X, self.spec.adjacency, query.exponent(self.spec.adjacency, mu))
        sigma, slack = noise_level(exact, mu)
        noisy = release.noise(exact, sigma, self._sampler())
        self._charge(exact, sigma, slack, {}, run=run, step=step, message=message)
        return noisy

    patch.setattr(release.Releases, "release", release_first)


def _no_charge(patch):
    patch.setattr(release.Releases, "_charge", lambda self, *given, **more: None)


def _wrong_adjacency(patch):
    def wrong(self, query, X, share, *, run, step, message):
        mu = self.limit.mu * math.sqrt(share)
        exact = query.answer(X, "add_remove", query.exponent("add_remove", mu))
        sigma, slack = noise_level(exact, mu)
        self._charge(exact, sigma, slack, {}, run=run, step=step, message=message)
        return release.noise(exact, sigma, self._sampler())

    patch.setattr(release.Releases, "release", wrong)


def _seeded_sampler(patch):
    rng = np.random.default_rng(7)
    patch.setattr(
        mechanism,
        "secure_noise",
        lambda sigma, size: np.rint(rng.normal(0, sigma, size)).astype(np.int64),
    )


def _sampler_seeded_every_time(patch):
    patch.setattr(
        mechanism,
        "secure_noise",
        lambda sigma, size: np.rint(np.random.default_rng(7).normal(0, sigma, size)).astype(int),
    )


def _other_noise_when_asked_again(patch):
    patch.setattr(release.Releases, "sent", lambda self, *given: None)
    patch.setattr(release.Releases, "keep", lambda self, *given: None)


def _exact_replies(patch):
    draw = client.PrivateClient.release

    def answer(self, query, share):
        noisy = draw(self, query, share)
        exact = query.answer(self.X, self.spec.adjacency, noisy.exponent)
        return replace(noisy, fields=exact.fields)

    patch.setattr(client.PrivateClient, "release", answer)


def _exact_number_beside_the_noise(patch):
    fields = client.PrivateClient.reply
    patch.setattr(
        client.PrivateClient,
        "reply",
        lambda self, noisy, **more: (
            fields(self, noisy, **more) | {"sigma": noisy.sigma + len(self.X)}
        ),
    )


def _noise_where_it_is_cheap(patch):
    add = mechanism.noise

    def noise(bounded, sigma, sampler):
        noisy = add(bounded, sigma, sampler)
        # As much noise in all as there should be, but hardly any for counts.
        parts = {"sums": 1.22, "counts": 0.2}
        fields = {
            name: exact + np.rint((noisy.fields[name] - exact) * parts[name]).astype(np.int64)
            for name, exact in bounded.fields.items()
        }
        return replace(noisy, fields=fields)

    patch.setattr(release, "noise", noise)


def _one_draw_a_cluster(patch):
    add = mechanism.noise

    def noise(bounded, sigma, sampler):
        noisy = add(bounded, sigma, sampler)
        fields = {
            name: exact + (noisy.fields[name] - exact)[:, :1]
            if exact.ndim == 2
            else noisy.fields[name]
            for name, exact in bounded.fields.items()
        }
        return replace(noisy, fields=fields)

    patch.setattr(release, "noise", noise)


def _same_noise_scaled(patch):
    add, kept = mechanism.noise, {}

    def noise(bounded, sigma, sampler):
        noisy = add(bounded, sigma, sampler)
        # Each second release has the noise of the one before, as large as it should be.
        before = kept.pop(bounded.coordinates, None)
        unit = {n: (noisy.fields[n] - exact) / sigma for n, exact in bounded.fields.items()}
        if before is None:
            kept[bounded.coordinates] = unit
            return noisy
        fields = {
            name: exact + np.rint(before[name] * sigma).astype(np.int64)
            for name, exact in bounded.fields.items()
        }
        return replace(noisy, fields=fields)

    patch.setattr(release, "noise", noise)


def _no_tails(patch):
    add = mechanism.noise
    wide = math.sqrt(3)

    def noise(bounded, sigma, sampler):
        rng = np.random.default_rng()
        return add(
            bounded,
            sigma,
            lambda s, n: np.rint(rng.uniform(-wide * s, wide * s, n)).astype(np.int64),
        )

    patch.setattr(release, "noise", noise)


def _less_noise_for_many_records(patch):
    add, sizes = mechanism.noise, []
    answer = queries.CellSums.answer

    def counted(self, X, adjacency, exponent):
        sizes.append(max(1, len(X)))
        return answer(self, X, adjacency, exponent)

    def noise(bounded, sigma, sampler):
        part = math.sqrt(sizes[-1])
        return add(bounded, sigma, lambda s, n: sampler(s / part, n))

    patch.setattr(queries.CellSums, "answer", counted)
    patch.setattr(release, "noise", noise)


def _wrong_accounting(patch):
    right = accounting.mu_of
    patch.setattr(accounting, "mu_of", lambda epsilon, delta: 2 * right(epsilon, delta))


def _fast_sampler(patch):
    patch.setattr(release.Releases, "_sampler", lambda self: mechanism.fast_noise)


def _no_lifetime_budget(patch):
    allows = accounting.Limit.allows
    lifetime = []

    def charge(self, charge, *, plan=None):
        lifetime.append(self.limit)
        try:
            return book(self, charge, plan=plan)
        finally:
            lifetime.pop()

    book = ledger.Ledger.charge
    patch.setattr(ledger.Ledger, "charge", charge)
    patch.setattr(
        accounting.Limit,
        "allows",
        lambda self, *spent: (bool(lifetime) and self is lifetime[-1]) or allows(self, *spent),
    )


GAME = "distinguishing game"

BUGS = (
    PlantedBug("noise halved", "statistical", (GAME, "noise as charged"), _halve_noise),
    PlantedBug("sensitivity halved", "statistical", (GAME, "sensitivity"), _halve_sensitivity),
    PlantedBug("no clipping", "statistical", (GAME, "sensitivity"), _no_clipping),
    PlantedBug(
        "empty clusters bare", "statistical", (GAME, "noise on every number"), _empty_clusters_bare
    ),
    PlantedBug(
        "wrong adjacency", "statistical", (GAME, "sensitivity"), _wrong_adjacency, "replace_one"
    ),
    PlantedBug(
        "same noise in all fields", "structural", ("fresh noise",), _same_noise_in_all_fields
    ),
    PlantedBug(
        "same noise in all rounds", "structural", ("fresh noise",), _same_noise_in_all_rounds
    ),
    PlantedBug("charge after release", "structural", ("order of charging",), _charge_after_release),
    PlantedBug("no charge", "structural", ("order of charging",), _no_charge),
    PlantedBug("seeded sampler", "structural", ("source of noise",), _seeded_sampler),
    PlantedBug(
        "sampler seeded every time",
        "structural",
        ("source of noise", "fresh noise"),
        _sampler_seeded_every_time,
    ),
    PlantedBug(
        "other noise when asked again",
        "structural",
        ("answers to repeated requests",),
        _other_noise_when_asked_again,
    ),
    PlantedBug("exact replies", "structural", ("nothing else leaves",), _exact_replies),
    PlantedBug(
        "exact number beside the noise",
        "structural",
        ("nothing else leaves",),
        _exact_number_beside_the_noise,
    ),
    PlantedBug("fast sampler", "structural", ("source of noise",), _fast_sampler),
    PlantedBug("no lifetime budget", "structural", ("order of charging",), _no_lifetime_budget),
    PlantedBug("wrong accounting", "statistical", (GAME, "sensitivity"), _wrong_accounting),
    PlantedBug(
        "noise where it is cheap", "statistical", ("noise as charged",), _noise_where_it_is_cheap
    ),
    PlantedBug(
        "less noise for many records",
        "statistical",
        ("noise as charged",),
        _less_noise_for_many_records,
    ),
    PlantedBug("one draw a cluster", "statistical", ("independent noise",), _one_draw_a_cluster),
    PlantedBug("no tails", "statistical", ("shape of noise",), _no_tails),
    PlantedBug(
        "same noise scaled", "statistical", ("independent noise",), _same_noise_scaled, rounds=2
    ),
)
