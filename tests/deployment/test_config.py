"""The TOML files of the two ends: what they may say, and that what is wrong is named."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from secure_fedclust import PrivacySpec
from secure_fedclust.config import PlanConfig
from secure_fedclust.datasets import read_client
from secure_fedclust.deployment.config import (
    ClientConfig,
    Region,
    ServerConfig,
    address_of,
    is_loopback,
)
from secure_fedclust.errors import DataError, ParameterError

SERVER = {
    "": {"algorithm": "FKM"},
    "parameters": {"n_clusters": 3},
    "privacy": {"epsilon": 1.0, "delta": 1e-5, "ranges": [[0, 1], [0, 2]]},
    "data": {"columns": ["age", "bmi"]},
    "server": {
        "address": "127.0.0.1:8443",
        "keys": "keys",
        "clients": ["ada", "bob"],
        "key_holder": "notary",
        "min_clients": 2,
        "wait": 5,
        "timeout": 60.5,
        "patience": 3,
        "state": "kept",
    },
}
CLIENT = {
    "": {
        "server": "hub.example.org:8443",
        "certificate": "ca.pem",
        "keys": "keys",
        "policy": "policy.toml",
        "ledger": "ledger.sqlite",
        "state": "kept",
        "key_holder": "notary",
    },
    "data": {"columns": ["age", "bmi"], "person_column": "who"},
    "data.ranges": {"age": [0, 120], "bmi": [10, 60]},
}
READ = {"server": (ServerConfig, SERVER), "client": (ClientConfig, CLIENT)}


def toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(each)}" for name, each in value.items()) + "}"
    return f"'{value}'" if isinstance(value, str) else repr(value)


def with_changes(content, table, **changes):
    """What the file says with values changed, or left out where they are None."""
    held = content.get(table, {}) | changes
    return content | {table: {name: value for name, value in held.items() if value is not None}}


def written(folder, content):
    lines = []
    for table, held in content.items():
        lines += [f"[{table}]"] if table else []
        lines += [f"{name} = {toml(value)}" for name, value in held.items()]
    path = folder / "end.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def read(folder, which, table, **changes):
    kind, content = READ[which]
    return kind.read(written(folder, with_changes(content, table, **changes)))


def test_a_servers_file_is_read_as_it_was_written(tmp_path):
    found = read(tmp_path, "server", "server")
    assert (found.host, found.port) == ("127.0.0.1", 8443)
    assert (found.clients, found.key_holder) == (["ada", "bob"], "notary")
    assert (found.min_clients, found.wait, found.timeout, found.patience) == (2, 5.0, 60.5, 3.0)
    assert found.columns == ["age", "bmi"]
    assert found.model.n_clusters == 3
    assert found.model.privacy.ranges == ((0.0, 1.0), (0.0, 2.0))


def test_a_clients_file_is_read_as_it_was_written(tmp_path):
    found = read(tmp_path, "client", "")
    assert (found.server, found.key_holder) == ("hub.example.org:8443", "notary")
    assert (found.columns, found.person_column) == (["age", "bmi"], "who")
    assert found.region == Region({"age": (0.0, 120.0), "bmi": (10.0, 60.0)}, None, None)


def test_paths_are_from_the_files_folder(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    server, client = read(tmp_path, "server", "server"), read(tmp_path, "client", "")
    assert (server.keys, server.state) == (tmp_path / "keys", tmp_path / "kept")
    for name in ("certificate", "keys", "policy", "ledger", "state"):
        file = CLIENT[""][name]
        assert getattr(client, name) == tmp_path / file


def test_a_path_from_the_root_stays_what_it_is(tmp_path):
    assert read(tmp_path, "client", "", keys="/etc/keys").keys == Path("/etc/keys")
    assert read(tmp_path, "server", "server", keys="/etc/keys").keys == Path("/etc/keys")


def test_what_a_server_need_not_say(tmp_path):
    content = SERVER | {"server": {"address": "127.0.0.1:0", "keys": "keys"}}
    del content["data"]
    found = ServerConfig.read(written(tmp_path, content))
    assert (found.clients, found.key_holder, found.min_clients) == (None, None, None)
    assert (found.patience, found.columns) == (None, None)
    assert found.state == tmp_path / "state"


def test_what_a_client_need_not_say(tmp_path):
    few = {"server": "127.0.0.1:1", "keys": "keys", "policy": "policy.toml"}
    found = ClientConfig.read(written(tmp_path, {"": few}))
    assert (found.certificate, found.ledger, found.key_holder) == (None, None, None)
    assert found.region == Region(None, None, None)
    assert found.state == tmp_path / "state"


KEYS = [
    (which, table, name)
    for which, (_, content) in READ.items()
    for table, held in content.items()
    if table != "data.ranges"
    for name in held
]


@pytest.mark.parametrize(("which", "table", "name"), KEYS)
def test_a_misspelt_key_is_named(tmp_path, which, table, name):
    changes = {name: None, f"{name}x": READ[which][1][table][name]}
    with pytest.raises(ParameterError) as error:
        read(tmp_path, which, table, **changes)
    known = {"algorithm": "algorithmx", "server": "serverx"}
    assert known.get(name, f"{name}x") in str(error.value)


@pytest.mark.parametrize("which", READ)
@pytest.mark.parametrize("table", ["server2", "Data", "ledgers"])
def test_a_table_that_there_is_not_is_named(tmp_path, which, table):
    with pytest.raises(ParameterError, match=f"unknown {table}; there are"):
        read(tmp_path, which, table, x=1)


def test_a_server_has_no_ledger(tmp_path):
    with pytest.raises(ParameterError, match="unknown ledger"):
        read(tmp_path, "server", "", ledger="ledger.sqlite")


@pytest.mark.parametrize(
    ("which", "table", "name"),
    [
        ("server", "", "algorithm"),
        ("server", "server", "address"),
        ("server", "server", "keys"),
        ("client", "", "server"),
        ("client", "", "keys"),
        ("client", "", "policy"),
    ],
)
def test_a_missing_key_is_named(tmp_path, which, table, name):
    with pytest.raises(ParameterError, match=name):
        read(tmp_path, which, table, **{name: None})


@pytest.mark.parametrize("table", ["server", "privacy"])
def test_a_missing_table_is_named(tmp_path, table):
    content = {name: held for name, held in SERVER.items() if name != table}
    with pytest.raises(ParameterError, match=rf"table \[{table}\]"):
        ServerConfig.read(written(tmp_path, content))


WRONG = {
    ("server", ""): {"algorithm": ["fkm", 3, ["FKM"]], "privacy": [3], "server": [3, [1]]},
    ("server", "server"): {
        "address": [8443, "localhost", "localhost:", ":8443", "a:b", "a:65536", "a:-1", "", True],
        "keys": [3, True, ["keys"]],
        "state": [3, False],
        "clients": ["ada", [], [3], ["ada", "ada"], True],
        "key_holder": [3, ["notary"], True],
        "min_clients": [0, -1, 2.0, True, "2"],
        "wait": [-1, "5", True, float("nan"), float("inf"), 1e9, [5]],
        "timeout": [-1, "5", True, float("nan"), float("inf")],
        "patience": [-1, "5", False, float("nan"), float("inf")],
    },
    ("server", "data"): {"columns": ["age", [], [3], ["age", "age"]]},
    ("server", "privacy"): {"epsilon": ["1", True, float("nan"), 0], "delta": [2.0, "x"]},
    ("client", ""): {
        "server": [8443, "hub", "hub:", ":1", "hub:99999", True],
        "certificate": [3, True],
        "keys": [3, ["keys"]],
        "policy": [3, True],
        "ledger": [3, False],
        "state": [3],
        "key_holder": [3, ["notary"]],
    },
    ("client", "data"): {"columns": ["age", [], [3], ["age", "age"]], "person_column": [3, True]},
}


@pytest.mark.parametrize(
    ("which", "table", "name", "value"),
    [(*place, name, v) for place, held in WRONG.items() for name, vs in held.items() for v in vs],
)
def test_a_wrong_value_is_named(tmp_path, which, table, name, value):
    kind, content = READ[which]
    if table == "" and name in content:  # a value in the place of a table
        content = {key: held for key, held in content.items() if key != name}
    with pytest.raises(ParameterError, match=name):
        kind.read(written(tmp_path, with_changes(content, table, **{name: value})))


@pytest.mark.parametrize(
    "given",
    [5, [0], [0, 1, 2], ["0", 1], [1, 0], [1, 1], [True, 2], [0, float("inf")]],
    ids=str,
)
def test_a_range_that_is_none_is_refused(tmp_path, given):
    with pytest.raises(ParameterError, match="ranges"):
        read(tmp_path, "client", "data.ranges", age=given)


def test_ranges_are_a_line_for_each_column(tmp_path):
    content = {"": CLIENT[""], "data": {"ranges": [[0, 1]]}}
    with pytest.raises(ParameterError, match=r"\[data.ranges\]"):
        ClientConfig.read(written(tmp_path, content))


def test_columns_are_those_that_have_ranges(tmp_path):
    with pytest.raises(ParameterError, match="different columns"):
        read(tmp_path, "client", "data", columns=["age"])
    with pytest.raises(ParameterError, match="different columns"):
        read(tmp_path, "client", "data", columns=["age", "bmi", "size"])


def test_columns_follow_from_ranges(tmp_path):
    assert read(tmp_path, "client", "data", columns=None).columns == ["age", "bmi"]


@pytest.mark.parametrize(
    "held", [{"bound": -1.0}, {"bound": "1"}, {"bound": True}, {"bound": float("inf")}]
)
def test_a_bound_that_is_none_is_refused(tmp_path, held):
    with pytest.raises(ParameterError, match="bound"):
        ClientConfig.read(written(tmp_path, {"": CLIENT[""], "data": held}))


def test_a_center_that_is_none_is_refused(tmp_path):
    held = {"bound": 1.0, "center": "here"}
    with pytest.raises(ParameterError, match="center"):
        ClientConfig.read(written(tmp_path, {"": CLIENT[""], "data": held}))


@pytest.mark.parametrize("columns", [{}, {"columns": ["age"]}], ids=["no names", "too few"])
def test_a_center_belongs_to_columns_with_names(tmp_path, columns):
    held = {"bound": 1.0, "center": [3.0, 4.0]}
    with pytest.raises(ParameterError, match="name as many columns"):
        ClientConfig.read(written(tmp_path, {"": CLIENT[""], "data": held | columns}))
    held["columns"] = ["age", "bmi"]
    found = ClientConfig.read(written(tmp_path, {"": CLIENT[""], "data": held}))
    assert found.region == Region(None, 1.0, {"age": 3.0, "bmi": 4.0})


def test_ranges_and_a_bound_are_too_much(tmp_path):
    with pytest.raises(ParameterError, match="both ranges and a bound"):
        read(tmp_path, "client", "data", bound=1.0)


@pytest.mark.parametrize("which", READ)
@pytest.mark.parametrize("content", [b"\xff", b"a =", b"[a\n"])
def test_a_file_that_is_no_toml_is_refused(tmp_path, which, content):
    (tmp_path / "end.toml").write_bytes(content)
    with pytest.raises(ParameterError, match=r"end\.toml is not valid TOML"):
        READ[which][0].read(tmp_path / "end.toml")


@pytest.mark.parametrize("which", READ)
def test_a_file_that_is_not_there_is_named(tmp_path, which):
    with pytest.raises(ParameterError, match=r"gone\.toml cannot be read"):
        READ[which][0].read(tmp_path / "gone.toml")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("hub.example.org:65535", ("hub.example.org", 65535)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_an_address_is_a_host_and_a_port(given, found):
    assert address_of(given, "server") == found


@given(st.text(st.characters(max_codepoint=127)) | st.none() | st.integers() | st.booleans())
def test_an_address_is_read_or_refused(given):
    try:
        host, port = address_of(given, "server")
    except ParameterError as error:
        assert str(error).startswith("server = ")
        return
    assert host
    assert 0 <= port <= 65535


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
    ],
)
def test_only_this_machine_is_this_machine(host, expected):
    assert is_loopback(host) is expected


RANGED = Region({"age": (0.0, 120.0), "bmi": (10.0, 60.0)}, None, None)
BALL = Region(None, 2.0, {"age": 1.0, "bmi": 3.0})


def spec(**region):
    return PrivacySpec(epsilon=1.0, delta=1e-5, **region)


def test_a_run_with_the_same_ranges_is_allowed():
    RANGED.check(spec(ranges=[(0, 120), (10, 60)]), ["age", "bmi"])


def test_ranges_are_compared_in_the_order_of_the_runs_columns():
    RANGED.check(spec(ranges=[(10, 60), (0, 120)]), ["bmi", "age"])
    with pytest.raises(ParameterError, match="agree on one"):
        RANGED.check(spec(ranges=[(0, 120), (10, 60)]), ["bmi", "age"])


def test_a_run_on_some_columns_has_their_ranges():
    RANGED.check(spec(ranges=[(10, 60)]), ["bmi"])


@pytest.mark.parametrize(
    "ranges", [[(0, 121), (10, 60)], [(-1, 120), (10, 60)], [(0, 120)], [(0, 120)] * 3]
)
def test_a_run_with_other_ranges_is_refused(ranges):
    with pytest.raises(ParameterError, match="this client's are") as error:
        RANGED.check(spec(ranges=ranges), ["age", "bmi"])
    assert "60.0" in str(error.value)


def test_a_column_without_a_range_is_named():
    with pytest.raises(ParameterError, match=r"\[data.ranges\] has no range of size"):
        RANGED.check(spec(ranges=[(0, 120), (1, 2)]), ["age", "size"])


def test_a_run_with_the_same_ball_is_allowed():
    BALL.check(spec(bound=2, center=[1, 3]), ["age", "bmi"])
    BALL.check(spec(bound=2, center=[3, 1]), ["bmi", "age"])
    Region(None, 2.0, None).check(spec(bound=2.0), None)


@pytest.mark.parametrize(
    "region",
    [
        {"bound": 2.1, "center": [1, 3]},
        {"bound": 2.0, "center": [3, 1]},
        {"bound": 2.0, "center": [1]},
        {"bound": 2.0},
    ],
    ids=str,
)
def test_a_run_with_another_ball_is_refused(region):
    with pytest.raises(ParameterError, match=r"bound .* and center .*this client's are 2\.0"):
        BALL.check(spec(**region), ["age", "bmi"])


@pytest.mark.parametrize("region", [RANGED, Region(None, None, None)], ids=["ranges", "nothing"])
def test_a_ball_is_refused_where_there_is_none(region):
    with pytest.raises(ParameterError, match="bound 2"):
        region.check(spec(bound=2.0), None)


@pytest.mark.parametrize("region", [BALL, Region(None, None, None)], ids=["ball", "nothing"])
def test_ranges_are_refused_where_there_are_none(region):
    with pytest.raises(ParameterError, match="this client's are None"):
        region.check(spec(ranges=[(0, 1)]), None)


def test_a_run_without_privacy_needs_no_region():
    Region(None, None, None).check(PrivacySpec.none(reason="test"), None)


AGE, BMI = np.array([30.0, 50.5, 41.0]), np.array([20.0, 25.0, 31.25])


@pytest.fixture(params=["csv", "csv in another order", "npz", "npz in another order", "X", "X in"])
def data(request, tmp_path):
    """The same records in files that differ."""
    kind, turned = request.param.split()[0], " " in request.param
    columns = {"bmi": BMI, "age": AGE} if turned else {"age": AGE, "bmi": BMI}
    path = tmp_path / f"records.{'csv' if kind == 'csv' else 'npz'}"
    if kind == "csv":
        rows = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
        path.write_text("\n".join([",".join(columns), *rows]) + "\n", encoding="utf-8")
    elif kind == "npz":
        np.savez(path, **columns)
    else:
        np.savez(path, X=np.column_stack(list(columns.values())), columns=list(columns))
    return path


@pytest.mark.parametrize("columns", [["age", "bmi"], ["bmi", "age"], ["bmi"]])
def test_records_are_the_same_in_whatever_order_a_file_has_them(data, columns):
    found = read_client(data, "ada", columns)
    wanted = np.column_stack([{"age": AGE, "bmi": BMI}[name] for name in columns])
    np.testing.assert_array_equal(found["ada"], wanted)


def test_a_column_that_a_file_lacks_is_named(data):
    with pytest.raises((DataError, ParameterError), match="size"):
        read_client(data, "ada", ["age", "size"])


def test_an_npz_file_without_names_is_refused(tmp_path):
    np.savez(tmp_path / "records.npz", X=np.zeros((3, 2)))
    with pytest.raises(DataError, match="no named columns"):
        read_client(tmp_path / "records.npz", "ada")


def test_a_run_between_organisations_can_be_planned_from_the_servers_file(tmp_path):
    found = PlanConfig.read(written(tmp_path, READ["server"][1]))
    assert type(found.estimator).__name__ == "FKM"
    assert (found.n_clients, found.n_features) == (2, 2)
