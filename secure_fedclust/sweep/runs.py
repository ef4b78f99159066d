"""One run of a sweep: its model, its privacy, and what is kept of it."""

import math
import sys
import textwrap
import warnings
from typing import Any

import numpy as np

from secure_fedclust.base import FederatedClusterer
from secure_fedclust.config import ALGORITHMS
from secure_fedclust.errors import FederationWarning, ParameterError, PrivacyWarning
from secure_fedclust.messages import KEY_HOLDER
from secure_fedclust.metrics import adjusted_rand, normalized_mutual_info
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.protocols.sums import with_quorum
from secure_fedclust.result import FedClustResult
from secure_fedclust.sweep.baselines import check_baseline, run_baseline
from secure_fedclust.sweep.cells import Cell
from secure_fedclust.sweep.config import AUTO, CENTRAL, DATA, TRUTH, SweepConfig
from secure_fedclust.sweep.data import Federation, LabelledData

Outcome = dict[str, Any]
"""What is kept of a run: figures by name, and ``error``, which is None or says what went wrong."""

FIGURES = (
    "ari",
    "nmi",
    "n_clusters",
    "bytes_up",
    "bytes_down",
    "exchanges",
    "seconds",
)
NO_CLAIM = "NO DP CLAIM"
LIMITS = {"ari": (-1.0, 1.0), "nmi": (0.0, 1.0)}
"""Of figures that are not just at least 0."""

WHOLE = ("n_clusters", "exchanges")
OF_MESSAGES = ("bytes_up", "bytes_down", "exchanges")
"""Figures that a baseline in one place does not have."""

REASON = "run of a sweep on labelled data"
SUMS_ONLY = ("colluders", "min_survivors", "active_server")
"""What a spec says about sums, and only where these are protected."""


def model_for(cell: Cell, config: SweepConfig, federation: Federation) -> FederatedClusterer:
    """The system of a run, without its privacy."""
    parameters = dict(config.parameters[cell.algorithm])
    if parameters.get("n_clusters") == TRUTH:
        parameters["n_clusters"] = len(np.unique(np.concatenate(federation.truth)))
    if parameters.get("n_local_clusters") == TRUTH:
        held = federation.held
        parameters["n_local_clusters"] = held if cell.algorithm == "FedGEM" else max(held)
    if cell.rounds is not None:
        parameters["n_rounds"] = None if cell.rounds == AUTO else cell.rounds
    if cell.calibration is not None:
        parameters["calibration"] = cell.calibration
    kind = ALGORITHMS[cell.algorithm]
    model = kind()
    model.set_params(**parameters, sampler=config.sampler, random_state=cell.seed)
    return model


def spec_for(
    cell: Cell, config: SweepConfig, data: LabelledData, federation: Federation
) -> PrivacySpec:
    """The promise of a run."""
    given = dict(config.privacy)
    sums = {name: given.pop(name) for name in SUMS_ONLY if name in given}
    if cell.protection == "none":
        sums = {}
    elif cell.protection != "masking":
        sums.pop("active_server", None)
    if cell.epsilon is None:
        return PrivacySpec.none(reason=REASON, **_protected(cell), **sums)
    if given.get("ranges") == DATA:
        given["ranges"] = data.ranges()
    if given.get("public_size") == DATA:
        given["public_size"] = federation.mean_size
    spec = PrivacySpec.from_dict({"epsilon": cell.epsilon, **_protected(cell), **given, **sums})
    scale = config.scale[cell.algorithm]
    if scale == 1:
        return spec
    content = spec.to_dict()
    if "ranges" in content:
        content["ranges"] = [(low / scale, high / scale) for low, high in content["ranges"]]
    if "bound" in content:
        content["bound"] /= scale
    if "center" in content:
        content["center"] = [value / scale for value in content["center"]]
    return PrivacySpec.from_dict(content)


def check_run(cell: Cell, config: SweepConfig, data: LabelledData, seen: set[Any]) -> None:
    """Raise where a run could not be made, by the rules of the system itself.

    `seen` has what was found good before, of which there is no need to ask again.
    """
    if cell.algorithm in CENTRAL:
        check_baseline(cell, config, data)
        return
    federation = data.federation(cell)
    alike = (cell.setting, federation.mean_size, federation.largest, tuple(federation.held))
    if alike in seen:
        return
    seen.add(alike)
    model = model_for(cell, config, federation)
    spec = spec_for(cell, config, data, federation)
    _check_numbers(model, federation)
    if spec.is_private:
        model.plan(spec, n_clients=len(federation.clients), n_features=data.n_features)
    else:
        model._check_parameters()
        model._check_unprotected(spec)
        with_quorum(spec, len(federation.clients))
    model._clusters_to_tell_apart([f"client {i}" for i in range(len(federation.clients))])


def trust_of(cell: Cell, config: SweepConfig) -> str:
    """Who is trusted with what, which follows from the protection."""
    if cell.epsilon is None:
        return "none"
    if cell.algorithm in CENTRAL:
        return "central"
    if cell.protection == "none":
        return "local"
    one_shot = config.parameters[cell.algorithm].get("one_shot", False)
    probe = ALGORITHMS[cell.algorithm]()
    if one_shot:
        probe.set_params(one_shot=True)
    return "distributed" if probe._sums_only() else "local+distributed"


def run_cell(cell: Cell, config: SweepConfig, data: LabelledData) -> Outcome:
    """Run, score, and keep figures; an error is an outcome, too."""
    outcome: Outcome = dict.fromkeys(FIGURES)
    outcome |= {"claim": NO_CLAIM, "error": None}
    try:
        with warnings.catch_warnings():
            # What they say is seen in the figures of the table.
            warnings.simplefilter("ignore", PrivacyWarning)
            warnings.simplefilter("ignore", FederationWarning)
            found = outcome | _figures(cell, config, data)
            check_outcome(cell, found)
            return found
    except Exception as error:
        # One run in a thousand that fails should not take the others with it.
        return outcome | {"error": f"{type(error).__name__}: {error}"}


def check_outcome(cell: Cell, outcome: Any) -> None:
    """Raise where something is not what `run_cell` gives.

    Raises
    ------
    ParameterError
        Which says what is wrong, as a part of a sentence.
    """
    names = {*FIGURES, "claim", "error"}
    if not isinstance(outcome, dict):
        raise ParameterError(f"its outcome is {_short(outcome)}")
    if wrong := sorted(names ^ set(outcome)):
        missing = [name for name in wrong if name in names]
        word, those = ("lacks", missing) if missing else ("has also", wrong)
        raise ParameterError(f"its outcome {word} {', '.join(map(repr, those))}")
    error = outcome["error"]
    if not isinstance(outcome["claim"], str) or not isinstance(error, str | None):
        raise ParameterError("claim or error of its outcome is no text")
    for name in FIGURES:
        absent = error is not None or (cell.algorithm in CENTRAL and name in OF_MESSAGES)
        if not _is_figure(name, outcome[name], absent):
            raise ParameterError(f"its outcome has {name} = {_short(outcome[name])}")


def _short(value: Any) -> str:
    return textwrap.shorten(repr(value), 60)


def _is_figure(name: str, value: Any, absent: bool) -> bool:
    if absent:
        return value is None
    kinds = int if name in WHOLE else int | float
    if isinstance(value, bool) or not isinstance(value, kinds):
        return False
    low, high = LIMITS.get(name, (0.0, sys.float_info.max))
    # Scores may be a rounding error above 1. No comparison with NaN holds.
    return low - 1e-9 <= value <= high + 1e-9


def _figures(cell: Cell, config: SweepConfig, data: LabelledData) -> Outcome:
    if cell.algorithm in CENTRAL:
        labels, seconds = run_baseline(cell, config, data)
        return _scores(data.y, labels) | {"n_clusters": len(np.unique(labels)), "seconds": seconds}
    federation = data.federation(cell)
    model = model_for(cell, config, federation)
    model.set_params(privacy=spec_for(cell, config, data, federation))
    scale = config.scale[cell.algorithm]
    model.fit([X / scale for X in federation.clients])
    result = model.result_
    truth, labels = np.concatenate(federation.truth), np.concatenate(model.labels_)
    claims = not result.guarantee.startswith(NO_CLAIM)
    # The system cannot know that what it was told as public is not.
    claims = claims and not config.taken_from_data(cell.algorithm)
    return {
        **_scores(truth, labels),
        **_traffic(result, len(federation.clients)),
        "n_clusters": result.n_clusters,
        "exchanges": len(result.history),
        "seconds": result.seconds,
        "claim": result.guarantee.split("-differential")[0] if claims else NO_CLAIM,
    }


def _scores(truth: Any, labels: Any) -> Outcome:
    ari, nmi = adjusted_rand(truth, labels), normalized_mutual_info(truth, labels)
    return {"ari": ari, "nmi": nmi}


def _traffic(result: FedClustResult, n_clients: int) -> Outcome:
    """Bytes to and from a client, on average; those of a key holder do not count."""
    up, down = (
        math.fsum(
            number
            for exchange in result.history
            for party, number in getattr(exchange, way).items()
            if party != KEY_HOLDER
        )
        for way in ("up", "down")
    )
    return {"bytes_up": up / n_clients, "bytes_down": down / n_clients}


def _protected(cell: Cell) -> dict[str, Any]:
    return {"protection": cell.protection}


def _check_numbers(model: FederatedClusterer, federation: Federation) -> None:
    """Refuse more clusters than there are records to be in them."""
    sizes = list(map(len, federation.clients))
    limits = {
        "n_clusters": (sum(sizes), "there are"),
        "n_local_clusters": (federation.largest, "the largest client has"),
    }
    for name, (limit, words) in limits.items():
        value = getattr(model, name, None)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and number > limit:
                raise ParameterError(f"{name}={number}: {words} {limit} records; give fewer")
