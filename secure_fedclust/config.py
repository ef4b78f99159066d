"""Runs described in a TOML file, whose format docs/configuration.md shows."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from secure_fedclust import datasets, estimators
from secure_fedclust.arrays import Floats, Ints
from secure_fedclust.base import FederatedClusterer
from secure_fedclust.errors import ParameterError, SecureFedClustError
from secure_fedclust.privacy.spec import PrivacySpec
from secure_fedclust.records import Clients

ALGORITHMS: dict[str, type[FederatedClusterer]] = {
    "FKM": estimators.FKM,
    "KFed": estimators.KFed,
    "FeCA": estimators.FeCA,
    "FedGEM": estimators.FedGEM,
    "GOLD": estimators.GOLD,
    **{name: estimators.class_named(name) for name in estimators.NEURAL},
}
PARTITIONS: dict[str, Callable[..., list[Ints]]] = {
    "iid": datasets.iid_partition,
    "dirichlet": datasets.dirichlet_partition,
    "distance": datasets.distance_partition,
    "cluster_subset": datasets.cluster_subset_partition,
    "non_icd": datasets.non_icd_partition,
}


@dataclass(frozen=True)
class RunConfig:
    """A run, ready to fit.

    Attributes
    ----------
    estimator : FederatedClusterer
    clients : Clients
        Records by client.
    truth : mapping of client to array, or None
        True labels, where the data are a benchmark set.
    """

    estimator: FederatedClusterer
    clients: Clients
    truth: Mapping[str, Ints] | None = field(repr=False)

    @classmethod
    def read(cls, path: str | Path, data_dir: str | Path | None = None) -> Self:
        """Read a file, its data included, or raise an error that names what to change."""
        content = read_toml(Path(path), RUN_KEYS)
        estimator = model_of(content, Path(path).parent)
        clients, truth = _data(table_of(content, "data"), Path(path).parent, data_dir)
        return cls(estimator, clients, truth)


@dataclass(frozen=True)
class PlanConfig:
    """A private run as a file describes it, without its data.

    Attributes
    ----------
    estimator : FederatedClusterer
    n_clients, n_features : int or None
        Where the file says so.
    """

    estimator: FederatedClusterer
    n_clients: int | None
    n_features: int | None

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file without touching the data that it names."""
        content = read_toml(Path(path), RUN_KEYS | {"server"})
        estimator = model_of(content, Path(path).parent)
        data = table_of(content, "data") if "data" in content else {}
        n_clients = None
        if isinstance(data.get("source"), list):
            n_clients = len(data["source"])
        elif "benchmark" in data:
            n_clients = data.get("n_clients", N_CLIENTS)
        elif "server" in content:
            named = table_of(content, "server").get("clients")
            n_clients = len(named) if isinstance(named, list) else None
        n_features = None if estimator.privacy is None else estimator.privacy.n_features
        if n_features is None and isinstance(data.get("columns"), list):
            n_features = len(data["columns"])
        return cls(estimator, n_clients, n_features)


N_CLIENTS = 10
"""Clients that a benchmark set is divided among, unless the file says otherwise."""

RUN_KEYS = {"algorithm", "parameters", "privacy", "data", "ledger"}


def read_toml(path: Path, known: set[str]) -> dict[str, Any]:
    """A file that has no other keys than these."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ParameterError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ParameterError(f"{path} is not valid TOML: {error}") from error
    refuse_unknown(content, known, str(path))
    return content


def model_of(content: Mapping[str, Any], folder: Path) -> FederatedClusterer:
    """The model that a file describes; paths are from its folder."""
    parameters = table_of(content, "parameters") if "parameters" in content else {}
    kind = algorithm_of(content.get("algorithm"))
    estimator = kind(privacy=_privacy(content.get("privacy")))
    refuse_unknown(parameters, parameter_names(kind), "[parameters]")
    estimator.set_params(**parameters)
    if "ledger" in content:
        if not isinstance(content["ledger"], str):
            raise ParameterError(f"ledger = {content['ledger']!r}: give the path of a ledger")
        estimator.set_params(ledger=str(folder / content["ledger"]))
    return estimator


def algorithm_of(name: Any) -> type[FederatedClusterer]:
    """The class of that name."""
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ParameterError(f"algorithm = {name!r}: give one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def parameter_names(kind: type[FederatedClusterer]) -> set[str]:
    """What a table of parameters may have; privacy and ledger have places of their own."""
    return set(kind().get_params()) - {"privacy", "ledger"}


def _privacy(table: Any) -> PrivacySpec:
    if not isinstance(table, dict) or not table:
        raise ParameterError(
            "the file needs a table [privacy] with epsilon, delta and ranges or bound, or with "
            'none = "why this run needs no differential privacy"'
        )
    if "none" in table:
        known = {"none", "protection", "colluders", "min_survivors", "active_server"}
        refuse_unknown(table, known, '[privacy] with none = "..."')
        rest = {name: value for name, value in table.items() if name != "none"}
        return PrivacySpec.none(reason=table["none"], **rest)
    return PrivacySpec.from_dict(table)


def _data(
    table: Mapping[str, Any], folder: Path, data_dir: str | Path | None
) -> tuple[Clients, dict[str, Ints] | None]:
    if ("source" in table) == ("benchmark" in table):
        raise ParameterError(
            f"[data] needs either source or benchmark; it has {', '.join(table) or 'nothing'}"
        )
    if "source" in table:
        known = {"source", "client_column", "person_column", "columns"}
        refuse_unknown(table, known, "[data]")
        names = _texts(table, "source")
        paths = [folder / name for name in names]
        columns = _texts(table, "columns") if "columns" in table else None
        source = paths if isinstance(table["source"], list) else paths[0]
        clients = datasets.read_clients(
            source, table.get("client_column"), columns, table.get("person_column")
        )
        return clients, None
    arguments = dict(table)
    benchmark = datasets.load_benchmark(arguments.pop("benchmark"), data_dir)
    name = arguments.pop("partition", "iid")
    arguments = {"n_clients": N_CLIENTS, "seed": 0} | arguments
    return divide(benchmark.X, benchmark.y, name, arguments)


def divide(
    X: Floats, y: Ints, partition: Any, arguments: Mapping[str, Any]
) -> tuple[Clients, dict[str, Ints]]:
    """Records and true labels by client; the arguments are those of the partition's function."""
    if not isinstance(partition, str) or partition not in PARTITIONS:
        raise ParameterError(f"partition = {partition!r}: give one of {', '.join(PARTITIONS)}")
    try:
        parts = PARTITIONS[partition](X, y, **arguments)
    except SecureFedClustError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ParameterError(f"[data] partition = {partition!r}: {error}") from error
    names = [f"client {i}" for i in range(len(parts))]
    records = {client: X[part] for client, part in zip(names, parts, strict=True)}
    truth = {client: y[part] for client, part in zip(names, parts, strict=True)}
    return Clients(records), truth


def _texts(table: Mapping[str, Any], name: str) -> list[str]:
    value = table[name]
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(item, str) for item in values):
        raise ParameterError(f"[data] {name} = {value!r}: give text, or a list of texts")
    return values


def table_of(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table of the file, which must be there."""
    table = content.get(name)
    if not isinstance(table, dict):
        raise ParameterError(f"the file needs a table [{name}]")
    return table


def refuse_unknown(table: Mapping[str, Any], known: set[str], where: str) -> None:
    """Raise an error that names the keys there are, if a table has others."""
    if unknown := sorted(set(table) - known):
        raise ParameterError(
            f"{where}: unknown {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )
