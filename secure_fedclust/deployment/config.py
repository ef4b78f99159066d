"""The two ends of a federation as TOML files describe them; docs/deployment.md shows both."""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from secure_fedclust.base import FederatedClusterer
from secure_fedclust.config import RUN_KEYS, model_of, read_toml, refuse_unknown, table_of
from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.spec import PrivacySpec

_SERVER = {"address", "keys", "clients", "key_holder", "min_clients", "wait", "timeout"}
_SERVER |= {"patience", "state"}
_CLIENT = {"server", "certificate", "keys", "policy", "ledger", "state", "key_holder", "data"}
_DATA = {"columns", "person_column", "ranges", "bound", "center"}


@dataclass(frozen=True)
class ServerConfig:
    """A run, and where and with whom it takes place.

    Attributes
    ----------
    model : FederatedClusterer
    host, port : str, int
        Where the server listens.
    keys, state : Path
        Folders: keys and roster; what the server remembers of clients from run to run.
    clients : sequence of str, or None
        Who is asked, in this order; everybody in the roster but the key holder if None.
    key_holder : str or None
    min_clients : int or None
        With fewer that take part there is no run.
    wait : float
        Seconds to wait for clients to connect.
    timeout : float
        Seconds that an exchange may take.
    patience : float or None
        Seconds that are left to the others once `min_clients` have answered.
    columns : sequence of str, or None
    """

    model: FederatedClusterer
    host: str
    port: int
    keys: Path
    state: Path
    clients: Sequence[str] | None
    key_holder: str | None
    min_clients: int | None
    wait: float
    timeout: float
    patience: float | None
    columns: Sequence[str] | None

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file, or raise an error that names what to change."""
        place = Path(path)
        content = read_toml(place, RUN_KEYS - {"ledger"} | {"server"})
        server = table_of(content, "server")
        refuse_unknown(server, _SERVER, "[server]")
        data = table_of(content, "data") if "data" in content else {}
        refuse_unknown(data, {"columns"}, "[data]")
        host, port = address_of(server.get("address"), "[server] address")
        clients = server.get("clients")
        return cls(
            model=model_of(content, place.parent),
            host=host,
            port=port,
            keys=place.parent / _text(server, "keys", "[server]"),
            state=place.parent / _text(server, "state", "[server]", "state"),
            clients=None if clients is None else _texts(clients, "[server] clients"),
            key_holder=_text(server, "key_holder", "[server]", None),
            min_clients=_whole(server, "min_clients", "[server]"),
            wait=_seconds(server, "wait", 600.0),
            timeout=_seconds(server, "timeout", 600.0, above=0.0),
            patience=None if "patience" not in server else _seconds(server, "patience", 0.0),
            columns=None if "columns" not in data else _texts(data["columns"], "[data] columns"),
        )


@dataclass(frozen=True)
class Region:
    """Where a client's records may lie, as its owner says.

    Attributes
    ----------
    ranges : mapping of column to (low, high), or None
    bound : float or None
    center : mapping of column to float, or None
    """

    ranges: Mapping[str, tuple[float, float]] | None
    bound: float | None
    center: Mapping[str, float] | None

    def check(self, spec: PrivacySpec, columns: Sequence[str]) -> None:
        """Refuse a run on these columns whose privacy spec has another region."""
        if not spec.is_private:
            return
        if spec.ranges is not None:
            ours = None
            if self.ranges is not None:
                if missing := [name for name in columns if name not in self.ranges]:
                    raise ParameterError(f"[data.ranges] has no range of {', '.join(missing)}")
                ours = tuple(self.ranges[name] for name in columns)
            if ours != spec.ranges:
                raise ParameterError(
                    f"the run has the ranges {spec.ranges}, this client's are {ours}: agree on one"
                )
            return
        center = None if spec.center is None else tuple(spec.center)
        own = None if self.center is None else tuple(map(self.center.get, columns))
        if (spec.bound, center) != (self.bound, own):
            raise ParameterError(
                f"the run has bound {spec.bound} and center {center}, this client's are "
                f"{self.bound} and {own}: agree on one"
            )


@dataclass(frozen=True)
class ClientConfig:
    """A party, and where its server is.

    Attributes
    ----------
    server : str
        ``host:port``.
    certificate : Path or None
        Of the authority that the server's certificate must be from.
    keys, state, policy : Path
    ledger : Path or None
    key_holder : str or None
        Whose keys are taken where sums are encrypted. The party of this name is the key holder.
    columns : sequence of str, or None
        The features that there may be runs on.
    person_column : str or None
    region : Region
    """

    server: str
    certificate: Path | None
    keys: Path
    state: Path
    policy: Path
    ledger: Path | None
    key_holder: str | None
    columns: Sequence[str] | None
    person_column: str | None
    region: Region

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file, or raise an error that names what to change."""
        place = Path(path)
        content = read_toml(place, _CLIENT)
        where = str(place)
        address_of(content.get("server"), f"{where}: server")
        data = table_of(content, "data") if "data" in content else {}
        refuse_unknown(data, _DATA, "[data]")
        columns = list(_texts(data["columns"], "[data] columns")) if "columns" in data else None
        region = _region(data, columns)
        if region.ranges is not None:
            if columns is not None and set(columns) != set(region.ranges):
                raise ParameterError("[data] columns and [data.ranges] name different columns")
            columns = columns or list(region.ranges)
        certificate = _text(content, "certificate", where, None)
        ledger = _text(content, "ledger", where, None)
        return cls(
            server=content["server"],
            certificate=None if certificate is None else place.parent / certificate,
            keys=place.parent / _text(content, "keys", where),
            state=place.parent / _text(content, "state", where, "state"),
            policy=place.parent / _text(content, "policy", where),
            ledger=None if ledger is None else place.parent / ledger,
            key_holder=_text(content, "key_holder", where, None),
            columns=columns,
            person_column=_text(data, "person_column", "[data]", None),
            region=region,
        )


def address_of(given: Any, where: str) -> tuple[str, int]:
    """Host and port of an address."""
    host, _, port = given.rpartition(":") if isinstance(given, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    usable = re.fullmatch(r"[A-Za-z0-9_.:%-]{1,253}", host)
    if not usable or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ParameterError(f'{where} = {given!r}: give "host:port", e.g. "127.0.0.1:8443"')
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether an address is one that nobody else can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _region(data: Mapping[str, Any], columns: Sequence[str] | None) -> Region:
    ranges = data.get("ranges")
    if ranges is not None:
        if not isinstance(ranges, dict) or not all(
            isinstance(each, list) and len(each) == 2 for each in ranges.values()
        ):
            raise ParameterError("[data.ranges]: give a line for each column, e.g. age = [0, 120]")
        pairs = PrivacySpec(epsilon=1.0, delta=0.1, ranges=list(ranges.values())).ranges or ()
        ranges = dict(zip(ranges, pairs, strict=True))
    bound, center = data.get("bound"), data.get("center")
    if bound is not None:
        if ranges is not None:
            raise ParameterError("[data] has both ranges and a bound: give one of them")
        spec = PrivacySpec(epsilon=1.0, delta=0.1, bound=bound, center=center)
        bound = spec.bound
        if spec.center is not None:
            if len(columns or ()) != len(spec.center):
                raise ParameterError(
                    f"[data] center has {len(spec.center)} numbers: name as many columns, in "
                    "columns, to which they belong"
                )
            center = dict(zip(columns or (), spec.center, strict=True))
    return Region(ranges, bound, center)


_REQUIRED: Any = object()


def _text(table: Mapping[str, Any], name: str, where: str, default: Any = _REQUIRED) -> Any:
    value = table.get(name, default)
    if value is _REQUIRED:
        raise ParameterError(f"{where}: {name} is missing")
    if not isinstance(value, str) and value is not default:
        raise ParameterError(f"{where}: {name} = {value!r}: give text")
    return value


def _texts(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ParameterError(f"{where} = {value!r}: give a list of texts")
    if len(set(value)) != len(value):
        raise ParameterError(f"{where} = {value!r}: each once")
    return value


def _whole(table: Mapping[str, Any], name: str, where: str) -> int | None:
    value = table.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise ParameterError(f"{where}: {name} = {value!r}: give a whole number from 1")
    return value


def _seconds(
    table: Mapping[str, Any], name: str, default: float, above: float | None = None
) -> float:
    value = table.get(name, default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < 1e9 or value == above:
        raise ParameterError(f"[server]: {name} = {value!r}: give a number of seconds")
    return float(value)
