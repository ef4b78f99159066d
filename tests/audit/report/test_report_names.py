"""Names of clients, and what users have written: what is hidden, and what must stay."""

import json
import unicodedata

import pytest

from secure_fedclust import FKM, FedGEM, PrivacySpec
from secure_fedclust.audit.report.content import report_of
from secure_fedclust.audit.report.page import render
from secure_fedclust.audit.report.pseudonyms import Names

from .report_world import SITES, audit_of, finding, fit, fitted, new_ledger, sites, spec

BIDI = [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))]


def named(*names):
    return dict(zip(names, sites().values(), strict=True))


def fit_named(*names, model=None, privacy=None, ledger=None):
    return fit(model or FKM(2), privacy or spec(), ledger, named(*names))


def test_names_are_shown_if_asked_for_and_hidden_otherwise():
    model = fit(FedGEM(dict.fromkeys(SITES, 2)), spec())
    command = "secure-fedclust run Bergen.toml --out aachen"
    hidden = report_of(model.result_, ledger=model.ledger_, command=command)
    text = (json.dumps(hidden) + render(hidden)).casefold()
    assert not any(site.casefold() in text for site in SITES)
    assert hidden["run"]["parameters"]["n_local_clusters"] == {
        f"client {i}": 2 for i in range(1, 6)
    }
    assert [c["client"] for c in hidden["clients"]["clients"]] == [
        f"client {i}" for i in range(1, 6)
    ]
    assert {row["client"] for row in hidden["ledger"]["book"]["rows"]} == {
        f"client {i}" for i in range(1, 6)
    }
    assert hidden["reproduce"]["command"] is None
    assert "left out, because it names clients; --names shows it" in render(hidden)
    shown = report_of(model.result_, command=command, names=True)
    assert shown["reproduce"]["command"] == command
    assert "because it names clients" not in render(shown)
    assert [c["client"] for c in shown["clients"]["clients"]] == list(SITES)
    assert "Bergen" in render(shown) and "names were left out" not in render(shown)


def test_names_of_clients_of_earlier_runs_on_the_ledger_are_hidden_too(tmp_path):
    path = new_ledger(tmp_path / "l.sqlite", epsilon=20)
    clients = sites()
    fit(FKM(2), spec(), path, {"Zagreb": clients["Aachen"], "Ypern": clients["Como"]})
    model = fit(FKM(2), spec(), path, clients)
    content = report_of(model.result_, ledger=path)
    text = json.dumps(content) + render(content)
    assert "Zagreb" not in text and "Ypern" not in text and "client 7" in text


def test_names_that_are_words_of_the_program_change_neither_spec_nor_parameters():
    plain = report_of(fitted("FKM").result_)
    for names in (
        ("add", "record", "none", "public", "secure"),
        ("epsilon", "delta", "private", "ranges", "unit"),
    ):
        content = report_of(fit_named(*names).result_)
        assert content["privacy"] == plain["privacy"]
        assert content["run"]["parameters"] == plain["run"]["parameters"]
        assert content["run"]["sampler"] == "secure" and "seeding" in render(content)


def test_parameters_by_client_have_their_names_taken_out_and_nothing_else():
    names = ("seeding", "private", "synopsis", "n_rounds", "floor")
    model = FedGEM(dict(zip(names, (2, 2, 2, 2, 3), strict=True)))
    found = report_of(fit_named(*names, model=model).result_)["run"]["parameters"]
    assert found["n_local_clusters"] == {f"client {i}": 2 + (i == 5) for i in range(1, 6)}
    assert found["seeding"] == "private" and found["calibration"] == "synopsis"


def test_the_reason_for_no_privacy_loses_its_names():
    privacy = PrivacySpec.none(reason="data of AACHEN2 are public")
    content = report_of(fit(FKM(2), privacy).result_)
    assert content["privacy"]["reason"] == "data of [client 1]2 are public"
    assert "data of [client 1]2 are public" in content["claim"]


@pytest.mark.parametrize(
    ("name", "written", "hidden"),
    [
        ("Bergen", "/srv/aachen/BergenClinic.csv", "/srv/aachen/[client 1]Clinic.csv"),
        ("Bergen", "bergen_x", "client 1_x"),
        ("Malmö", unicodedata.normalize("NFD", "Malmö.csv"), "client 1.csv"),
        ("Malmö", "MALMO", "client 1"),
        (unicodedata.normalize("NFD", "Malmö"), "malmö", "client 1"),
        ("Straße", "at STRASSE", "at client 1"),
        ("New York", "new_york, NewYork", "client 1, client 1"),
        ("Ulm", "helmut, ulm, Ulmen", "helmut, client 1, Ulmen"),
        ("\uff2f\uff53\uff4c\uff4f", "oslo", "client 1"),
        ("?!", "what ?!", "what client 1"),
        ("Bergen", "ﬁne", "ﬁne"),
    ],
)
def test_a_name_is_found_however_it_is_written(name, written, hidden):
    assert Names([name]).text(written) == hidden
    assert Names([name], shown=True).text(written) == written


def test_two_names_that_cannot_be_told_apart_are_both_hidden():
    names = Names(["Malmo", "Malmö"])
    assert names("Malmö") == "client 2" and names.text("malmo") == "a client"


def test_figures_of_an_attack_are_no_names():
    names = Names(["5", "100", "Oslo"])
    assert names.words("100 of 5.0 at Oslo, Oslogate") == "100 of 5.0 at client 3, Oslogate"
    model = fit_named("5", "100", "9", "2000", "4")
    words = "100 of 2000 guesses were right, so epsilon is at least 5.00; 4 is claimed."
    found = report_of(model.result_, audit=audit_of(model, finding(words=words)))
    assert found["audit"]["findings"][0]["words"] == words


@pytest.mark.parametrize(
    "command",
    [
        "run /srv/aachen2/BergenClinic.csv",
        "run --data delft_x",
        unicodedata.normalize("NFD", "run /data/Malmö.csv"),
        "run siteA1.csv",
        "run new-york.toml",
    ],
)
def test_a_command_that_could_name_a_client_is_left_out(command):
    model = fit_named("Bergen", "Delft", "Malmö", "A1", "New York")
    content = report_of(model.result_, command=command)
    assert content["reproduce"]["command"] is None
    assert "--names shows it" in content["reproduce"]["left_out"]
    assert command not in render(content)
    assert report_of(model.result_, command=command, names=True)["reproduce"]["command"] == command
    assert report_of(model.result_, command="run x.toml")["reproduce"]["command"] == "run x.toml"


def test_names_of_features_and_data_sets_lose_those_of_clients(tmp_path):
    import pandas as pd

    path = new_ledger(tmp_path / "l.sqlite", dataset="Bergen2024")
    frame = pd.concat(
        pd.DataFrame(X, columns=["age at aachen", "y"]).assign(site=site)
        for site, X in sites().items()
    )
    model = fit(FKM(2), spec(), path, frame, client_column="site")
    content = report_of(model.result_, ledger=path)
    assert content["run"]["feature_names"] == ["age at client 1", "y"]
    assert content["ledger"]["book"]["dataset"] == "[client 2]2024"
    assert "bergen" not in (json.dumps(content) + render(content)).casefold()


def test_marks_that_turn_text_around_are_shown_as_what_they_are():
    words = "a" + "".join(BIDI) + "b"
    model = fitted("FKM")
    content = report_of(
        model.result_,
        command=words,
        audit=audit_of(model, finding(words=words, measure=words, threat=words)),
    )
    content["run"]["feature_names"] = [words, "y"]
    page = render(content)
    assert not any(mark in page for mark in BIDI)
    assert page.count("a" + "".join(f"\\u{ord(mark):04x}" for mark in BIDI) + "b") >= 5
