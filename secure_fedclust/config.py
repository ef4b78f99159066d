"""Runs described in a TOML file, whose format docs/configuration.md shows."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from secure_fedclust import datasets, estimators
from secure_fedclust.arrays import Ints
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
        path = Path(path)
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ParameterError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ParameterError(f"{path} is not valid TOML: {error}") from error
        _refuse_unknown(content, {"algorithm", "parameters", "privacy", "data"}, str(path))
        estimator = _estimator(content)
        clients, truth = _data(_table(content, "data"), path.parent, data_dir)
        return cls(estimator, clients, truth)


def _estimator(content: Mapping[str, Any]) -> FederatedClusterer:
    name = content.get("algorithm")
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise ParameterError(f"algorithm = {name!r}: give one of {', '.join(ALGORITHMS)}")
    privacy = content.get("privacy")
    if not isinstance(privacy, dict) or set(privacy) != {"none"} or not privacy["none"]:
        raise ParameterError(
            '[privacy] must say none = "why this run needs no differential privacy"; '
            "this version has no private protocols"
        )
    parameters = _table(content, "parameters") if "parameters" in content else {}
    estimator = ALGORITHMS[name](privacy=PrivacySpec.none(reason=privacy["none"]))
    _refuse_unknown(parameters, set(estimator.get_params()) - {"privacy"}, "[parameters]")
    estimator.set_params(**parameters)
    return estimator


def _data(
    table: Mapping[str, Any], folder: Path, data_dir: str | Path | None
) -> tuple[Clients, dict[str, Ints] | None]:
    if ("source" in table) == ("benchmark" in table):
        raise ParameterError(
            f"[data] needs either source or benchmark; it has {', '.join(table) or 'nothing'}"
        )
    if "source" in table:
        _refuse_unknown(table, {"source", "client_column", "columns"}, "[data]")
        names = _texts(table, "source")
        paths = [folder / name for name in names]
        columns = _texts(table, "columns") if "columns" in table else None
        source = paths if isinstance(table["source"], list) else paths[0]
        return datasets.read_clients(source, table.get("client_column"), columns), None
    arguments = dict(table)
    benchmark = datasets.load_benchmark(arguments.pop("benchmark"), data_dir)
    name = arguments.pop("partition", "iid")
    if not isinstance(name, str) or name not in PARTITIONS:
        raise ParameterError(f"partition = {name!r}: give one of {', '.join(PARTITIONS)}")
    arguments = {"n_clients": 10, "seed": 0} | arguments
    n_clients = arguments.pop("n_clients")
    try:
        parts = PARTITIONS[name](benchmark.X, benchmark.y, n_clients, **arguments)
    except SecureFedClustError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ParameterError(f"[data] partition = {name!r}: {error}") from error
    names = [f"client {i}" for i in range(len(parts))]
    records = {client: benchmark.X[part] for client, part in zip(names, parts, strict=True)}
    truth = {client: benchmark.y[part] for client, part in zip(names, parts, strict=True)}
    return Clients(records), truth


def _texts(table: Mapping[str, Any], name: str) -> list[str]:
    value = table[name]
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(item, str) for item in values):
        raise ParameterError(f"[data] {name} = {value!r}: give text, or a list of texts")
    return values


def _table(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = content.get(name)
    if not isinstance(table, dict):
        raise ParameterError(f"the file needs a table [{name}]")
    return table


def _refuse_unknown(table: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(table) - known):
        raise ParameterError(
            f"{where}: unknown {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )
