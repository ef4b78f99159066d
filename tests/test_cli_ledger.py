import json
import shutil

import pytest

from secure_fedclust.cli import EXIT_CODES, main
from secure_fedclust.errors import BudgetExceeded, LedgerError
from secure_fedclust.privacy.accounting import epsilon_of
from secure_fedclust.privacy.ledger import Charge, Ledger


def charge_of(client, step=0, mu=0.1):
    inputs = {"bound": 1.0}
    return Charge(
        client, "run 1", step, "fkm/sums", "ball sums", inputs, 4096.0, 4096.0 / mu, mu, 1e-9, 30
    )


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger.create(path, epsilon=1.0, delta=1e-5, dataset="ward 7") as ledger:
        ledger.charge([charge_of("oslo"), charge_of("bergen", mu=0.2), charge_of("oslo", 1)])
    return path


@pytest.fixture
def result(path, tmp_path):
    """A result that saw the ledger after its second and its last row."""
    with Ledger.open(path) as ledger:
        rows = ledger.rows()
    anchors = {"bergen": [2, rows[1].hash], "oslo": [3, rows[2].hash]}
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"anchors": anchors}))
    return file


def test_init_fixes_a_budget_and_prints_where_the_ledger_stands(tmp_path, capsys):
    path = tmp_path / "ledger.sqlite"
    fixed = ["--unit", "client", "--adjacency", "replace_one", "--dataset", "ward 7"]
    arguments = ["ledger", "init", str(path), "--epsilon", "2", "--delta", "1e-6", *fixed]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert (
        "epsilon 2, delta 1e-06, unit client, adjacency replace_one, data set 'ward 7'" in printed
    )
    with Ledger.open(path) as ledger:
        assert (ledger.limit.epsilon, ledger.limit.delta) == (2.0, 1e-6)
        assert (ledger.unit, ledger.adjacency, ledger.dataset) == (
            "client",
            "replace_one",
            "ward 7",
        )
        assert f"anchor: 0:{ledger.anchor().head}" in printed
    before = path.read_bytes()
    assert main(arguments) == 6
    assert "is there already" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("epsilon", "delta", "message"),
    [("0", "1e-5", "epsilon=0.0"), ("1", "1", "delta=1.0"), ("nan", "1e-5", "epsilon=nan")],
)
def test_init_refuses_a_budget_that_makes_no_sense(tmp_path, capsys, epsilon, delta, message):
    path = tmp_path / "ledger.sqlite"
    assert main(["ledger", "init", str(path), "--epsilon", epsilon, "--delta", delta]) == 2
    assert message in capsys.readouterr().err
    assert not path.exists()


def test_a_budget_has_to_be_given(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["ledger", "init", str(tmp_path / "ledger.sqlite"), "--epsilon", "1"])
    assert caught.value.code == 2
    assert "--delta" in capsys.readouterr().err


def test_show_prints_what_each_client_spent_and_has_left(path, capsys):
    assert main(["ledger", "show", str(path)]) == 0
    budget, anchor, header, *clients = capsys.readouterr().out.splitlines()
    assert "epsilon 1, delta 1e-05" in budget and "ward 7" in budget
    assert anchor.startswith("anchor: 3:")
    assert "epsilon spent" in header and "epsilon left" in header
    oslo, bergen = (line.split() for line in clients)
    assert oslo[:3] == ["oslo", "2", f"{epsilon_of(1e-5, 0.1 * 2**0.5):.4g}"]
    assert bergen[:3] == ["bergen", "1", f"{epsilon_of(1e-5, 0.2):.4g}"]


def test_what_show_says_is_left_can_be_charged_and_no_more(path, capsys):
    assert main(["ledger", "show", str(path), "--json"]) == 0
    oslo, _ = json.loads(capsys.readouterr().out)["clients"]
    assert 0 < oslo["epsilon left"] < 1
    with Ledger.open(path) as ledger:
        with pytest.raises(BudgetExceeded):
            ledger.charge(charge_of("oslo", 2, oslo["mu left"] * 1.001))
        ledger.charge(charge_of("oslo", 2, oslo["mu left"]))
    assert main(["ledger", "show", str(path), "--json"]) == 0
    oslo, _ = json.loads(capsys.readouterr().out)["clients"]
    assert oslo["epsilon left"] == pytest.approx(0, abs=1e-3)
    assert oslo["epsilon spent"] == pytest.approx(1, abs=1e-3)


def test_show_prints_rows_when_asked(path, capsys):
    assert main(["ledger", "show", str(path)]) == 0
    assert "fkm/sums" not in capsys.readouterr().out
    assert main(["ledger", "show", str(path), "--rows"]) == 0
    assert capsys.readouterr().out.count("fkm/sums") == 3
    assert main(["ledger", "show", str(path), "--rows", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["rows"], content["epsilon"], content["unit"]) == (3, 1.0, "record")
    assert [row["client"] for row in content["releases"]] == ["oslo", "bergen", "oslo"]
    assert content["releases"][-1]["hash"] == content["head"]
    assert content["releases"][0]["inputs"] == {"bound": 1.0}


def test_an_empty_ledger_can_be_shown(tmp_path, capsys):
    path = tmp_path / "empty.sqlite"
    Ledger.create(path, epsilon=1.0, delta=1e-5).close()
    assert main(["ledger", "show", str(path), "--rows"]) == 0
    assert "anchor: 0:" in capsys.readouterr().out


def test_verify_holds_against_anchors_and_results(path, result, capsys):
    with Ledger.open(path) as ledger:
        rows, head = ledger.anchor()
    command = ["ledger", "verify", str(path)]
    assert main(command) == 0
    assert "every row holds, and 0 anchors" in capsys.readouterr().out
    assert main([*command, "--anchor", f"{rows}:{head}", "--against", str(result)]) == 0
    assert "and 3 anchors" in capsys.readouterr().out


def test_verify_finds_an_older_copy_and_another_ledger(path, result, tmp_path, capsys):
    copy = tmp_path / "copy.sqlite"
    shutil.copy(path, copy)
    with Ledger.open(path) as ledger:
        rows, head = ledger.charge(charge_of("oslo", 2))
    command = ["ledger", "verify", str(copy)]
    assert main([*command, "--against", str(result)]) == 0
    assert main([*command, "--anchor", f"{rows}:{head}"]) == 6
    assert "row 4 does not hold, an anchor saw 4 rows" in capsys.readouterr().err
    other = tmp_path / "other.sqlite"
    with Ledger.create(other, epsilon=1.0, delta=1e-5) as ledger:
        ledger.charge([charge_of("oslo")] * 3)
    assert main(["ledger", "verify", str(other), "--against", str(result)]) == 6
    assert "row 2 does not hold, an anchor saw another one" in capsys.readouterr().err


def test_verify_can_be_told_whose_anchors_are_meant(path, result, capsys):
    anchors = json.loads(result.read_text())
    anchors["anchors"]["elsewhere"] = [1, "0" * 64]
    result.write_text(json.dumps(anchors))
    command = ["ledger", "verify", str(path), "--against", str(result)]
    assert main(command) == 6
    assert main([*command, "--client", "oslo", "--client", "bergen"]) == 0
    assert "and 2 anchors" in capsys.readouterr().out
    assert main([*command, "--client", "nobody"]) == 2
    assert "--client nobody" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["3", "x:" + "0" * 64, "3:abc", "-1:" + "0" * 64, ":"])
def test_an_anchor_that_cannot_be_one_is_refused(path, capsys, text):
    assert main(["ledger", "verify", str(path), f"--anchor={text}"]) == 2
    assert "64 hexadecimal digits" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"anchors": 3}', '{"anchors": {"oslo": [1, 2, 3]}}', "\udcff"]
)
def test_a_result_without_anchors_is_refused(path, tmp_path, capsys, content):
    file = tmp_path / "result.json"
    file.write_text(content, errors="surrogateescape")
    assert main(["ledger", "verify", str(path), "--against", str(file)]) == 2
    assert "is not a result with anchors" in capsys.readouterr().err
    assert main(["ledger", "verify", str(path), "--against", str(tmp_path / "absent")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["show", "verify"])
def test_what_is_not_a_ledger_exits_with_six(tmp_path, capsys, action):
    assert main(["ledger", action, str(tmp_path / "absent")]) == 6
    assert "there is no ledger" in capsys.readouterr().err
    (tmp_path / "garbage").write_bytes(b"garbage" * 1000)
    assert main(["ledger", action, str(tmp_path / "garbage")]) == 6
    assert "not a ledger" in capsys.readouterr().err


def test_every_error_about_budgets_and_ledgers_has_its_own_exit_code():
    assert EXIT_CODES[BudgetExceeded] == 5
    assert EXIT_CODES[LedgerError] == 6
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
