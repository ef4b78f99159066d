"""Ways to break the shipped release path on purpose, each with what must notice it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from secure_fedclust.privacy import domain, mechanism, queries, release, sensitivity
from secure_fedclust.privacy.mechanism import Noisy, noise_level


@dataclass(frozen=True)
class PlantedBug:
    """One mistake.

    `detectors` are the findings that must FAIL; the first is the one that the bug is meant for.
    """

    name: str
    kind: str
    detectors: tuple[str, ...]
    plant: Callable
    adjacency: str = "add_remove"


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
)
