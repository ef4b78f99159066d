"""The server's end: who is let in, what is remembered of them, and what they are told."""

import dataclasses
import json

import numpy as np
import pytest

from secure_fedclust import FKM, KFed, PrivacySpec, __version__
from secure_fedclust.deployment.coordinator import Anchors, end, enrol
from secure_fedclust.deployment.offer import Ending, Offer, Reply, decode
from secure_fedclust.engines import InProcessEngine
from secure_fedclust.errors import LedgerError, NotAdmitted, ParameterError, ProtocolError
from secure_fedclust.messages import KEY_HOLDER
from secure_fedclust.protocols.federation import Federation

from .world import HOLDER, LENIENT, Parties, offered, participants, quietly

NONE = PrivacySpec.none(reason="test")
SPEC = PrivacySpec(epsilon=5.0, delta=1e-5, ranges=[(0, 1)] * 2, public_size=60)
MASKED = dataclasses.replace(SPEC, protection="masking")
NAMES = ("ada", "bob", "cy", "dee")


@pytest.fixture(scope="module")
def parties(tmp_path_factory):
    return Parties(tmp_path_factory.mktemp("parties"), NAMES)


def records():
    return {name: np.random.default_rng([3, i]).random((60, 2)) for i, name in enumerate(NAMES)}


def says(word="yes", anchor=None):
    """A party that answers every offer so."""

    def handle(data):
        return Reply(decode(data).run, word, anchor).encode()

    return handle


def head(digits):
    """The hash of a ledger's last row."""
    return digits * 32


def no_answer(data):
    raise ProtocolError("not now")


def engine(**handlers):
    others = {KEY_HOLDER: handlers.pop("holder")} if "holder" in handlers else None
    return InProcessEngine(dict.fromkeys(NAMES, says()) | handlers, others=others)


def enrolled(reached, spec=NONE, **options):
    return enrol(reached, FKM(2, privacy=spec), **{"run": "r", **options})


def refusal(*given, **options):
    with pytest.raises(NotAdmitted) as error:
        enrolled(*given, **options)
    return str(error.value)


def test_everybody_that_agrees_takes_part():
    found = enrolled(engine(), columns=["a", "b"])
    assert (found.clients, found.run, found.columns) == (list(NAMES), "r", ("a", "b"))


@pytest.mark.parametrize("word", ["version", "policy", "ledger", "configuration", "failed"])
def test_who_refuses_is_left_out(word, caplog):
    found = enrolled(engine(bob=says(word)))
    assert found.clients == ["ada", "cy", "dee"]
    assert found.parties == ("ada", "cy", "dee")
    assert "bob does not take part" in caplog.text


NO_ANCHORS = (
    *([], [3], [3, head("ab"), 0], [-1, head("ab")], [2**60, head("ab")], [True, head("ab")]),
    *([1.0, head("ab")], [3, "ab"], [3, head("AB")], [3, "\ud800" * 64], [3, "a" * 1_000_000]),
)
"""What a party must not have kept for it, and sent back."""


@pytest.mark.parametrize(
    ("handle", "said"),
    [
        (no_answer, "no answer"),
        (lambda data: b"", "cannot be read"),
        (lambda data: b"garbage", "cannot be read"),
        (lambda data: data, "something else"),
        (lambda data: Reply("another run", "yes", None).encode(), "something else"),
        (lambda data: Ending("r", None).encode(), "something else"),
        *((says(anchor=each), "something else") for each in NO_ANCHORS),
    ],
    ids=[
        *("silent", "empty", "garbage", "echo", "another run", "an ending"),
        *(f"anchor {i}" for i in range(len(NO_ANCHORS))),
    ],
)
def test_who_does_not_answer_an_offer_is_left_out(handle, said, caplog):
    assert enrolled(engine(bob=handle)).clients == ["ada", "cy", "dee"]
    assert said in caplog.text


def test_another_version_that_speaks_the_same_protocol_takes_part_and_is_named(caplog):
    caplog.set_level("INFO")

    def older(data):
        return Reply(decode(data).run, "yes", None, version="0.0.1").encode()

    assert enrolled(engine(bob=older)).clients == list(NAMES)
    assert f"bob has version 0.0.1, this is {__version__}" in caplog.text


def test_those_that_are_left_go_on(parties, tmp_path):
    strict = dataclasses.replace(LENIENT, without_privacy=False)
    policy = dict.fromkeys(NAMES, LENIENT) | {"bob": strict}
    found = participants(parties, records(), NONE, tmp_path, policy=policy)
    reached = InProcessEngine({name: found[name].handle for name in NAMES})
    model = FKM(2, privacy=NONE, random_state=0, n_rounds=2)
    with quietly():
        federation = offered(reached, parties, model)
        model.fit(federation)
    assert federation.clients == ["ada", "cy", "dee"]
    assert all("bob" not in each.asked for each in model.result_.history)


def test_too_few_are_named_with_their_reasons():
    said = refusal(engine(ada=says("policy"), bob=no_answer, cy=says("ledger")), min_clients=2)
    assert "1 of 4 clients take part, 2 are needed" in said
    for each in ("ada: policy", "bob: no answer", "cy: ledger"):
        assert each in said
    assert "dee" not in said


def test_who_has_refused_a_run_need_not_be_told_of_its_end():
    with pytest.raises(NotAdmitted) as error:
        enrolled(engine(ada=says("policy"), bob=no_answer, cy=lambda data: b""), min_clients=2)
    # Who has answered something else may take part for all that anybody knows.
    assert error.value.refused == ("ada",)


def test_nobody_is_too_few():
    said = refusal(InProcessEngine(dict.fromkeys(NAMES, says("policy"))))
    assert "0 of 4 clients take part, 1 are needed" in said


def test_a_sum_needs_its_quorum():
    assert enrolled(engine(bob=says("policy")), MASKED).clients == ["ada", "cy", "dee"]
    said = refusal(engine(ada=says("policy"), bob=says("policy")), MASKED)
    assert "2 of 4 clients take part, 3 are needed" in said


def test_encrypted_sums_need_a_key_holder():
    spec = dataclasses.replace(SPEC, protection="ckks")
    with pytest.raises(ParameterError, match="needs a key holder"):
        enrolled(engine(), spec)
    said = refusal(engine(holder=says("policy")), spec, key_holder=HOLDER)
    assert "and a key holder (key holder: policy)" in said
    found = enrolled(engine(holder=says()), spec, key_holder=HOLDER)
    assert KEY_HOLDER in found.parties
    assert KEY_HOLDER not in found.clients


def test_a_key_holder_is_not_asked_where_nothing_is_encrypted():
    def fail(data):
        pytest.fail("it was asked")

    enrolled(engine(holder=fail), key_holder=HOLDER)


def asked_of(spec=SPEC, **options):
    """The offers that clients get."""
    offers = {}

    def note(name):
        def handle(data):
            offers[name] = decode(data)
            return says()(data)

        return handle

    model = FKM(2, privacy=spec, random_state=5)
    enrol(InProcessEngine({name: note(name) for name in NAMES}), model, run="r", **options)
    return offers


def test_an_offer_is_for_whom_it_is_for():
    offers = asked_of(columns=["a", "b"])
    for name, found in offers.items():
        assert isinstance(found, Offer)
        assert (found.party, found.role, found.n_clients) == (name, "client", 4)
        assert found.columns == ["a", "b"]
        assert PrivacySpec.from_dict(found.privacy) == SPEC
    assert len({tuple(found.seed) for found in offers.values()}) == 4


def test_what_is_no_business_of_clients_is_not_sent():
    for found in asked_of().values():
        assert not {"random_state", "sampler", "ledger", "privacy"} & set(found.parameters)


def test_a_client_is_told_its_own_anchor_only():
    offers = asked_of(anchors={"ada": (3, "ab"), "eve": (9, "ef")})
    assert offers["ada"].anchor == [3, "ab"]
    assert all(offers[name].anchor is None for name in NAMES if name != "ada")


def test_without_privacy_no_anchor_is_sent():
    assert asked_of(NONE, anchors={"ada": (3, "ab")})["ada"].anchor is None


def test_noise_that_can_be_predicted_is_refused():
    with pytest.raises(ParameterError, match="sampler='fast'"):
        enrol(engine(), FKM(2, privacy=SPEC, sampler="fast"), run="r")


def test_anchors_of_those_that_take_part_are_known():
    found = enrolled(
        engine(ada=says(anchor=[4, head("ab")]), bob=says("policy", [9, head("ee")])), SPEC
    )
    assert found.anchors == {"ada": (4, head("ab"))}


def test_a_client_with_an_older_ledger_is_left_out(caplog):
    found = enrolled(
        engine(ada=says(anchor=[4, head("ab")])), SPEC, anchors={"ada": (5, head("cd"))}
    )
    assert "ada" not in found.clients
    assert "its ledger has 4 rows, and had 5" in caplog.text


def test_of_each_client_the_later_anchor_is_kept(tmp_path):
    anchors = Anchors(tmp_path / "anchors.json")
    assert anchors.read() == {}
    anchors.keep({"ada": (3, head("a3")), "bob": (5, head("b5"))})
    anchors.keep({"ada": (2, head("a2")), "bob": (6, head("b6")), "cy": (1, head("c1"))})
    wanted = {"ada": (3, head("a3")), "bob": (6, head("b6")), "cy": (1, head("c1"))}
    assert Anchors(tmp_path / "anchors.json").read() == wanted


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b'{"ada": 3}', b'{"ada": ["x", "y"]}', b'{"ada": [1, "y"]}', b"\xff"],
)
def test_damaged_anchors_are_refused_and_not_replaced(tmp_path, content):
    path = tmp_path / "anchors.json"
    path.write_bytes(content)
    for use in (Anchors(path).read, lambda: Anchors(path).keep({"ada": (1, "a")})):
        with pytest.raises(LedgerError, match=r"anchors\.json cannot be read"):
            use()
    assert path.read_bytes() == content


def ended(model, names, parties=()):
    """What each party is told of a run."""
    told = {}

    def note(name):
        def handle(data):
            told[name] = decode(data)
            return Reply("r", "yes", None).encode()

        return handle

    reached = InProcessEngine(
        {name: note(name) for name in names}, others={KEY_HOLDER: note(KEY_HOLDER)}
    )
    end(Federation(reached, names, "r", parties=(*names, *parties)), model)
    return told


@pytest.mark.parametrize("kind", [FKM, KFed])
def test_a_client_is_told_nothing_of_the_others(kind):
    data = records()
    spec = NONE if kind is KFed else SPEC
    with quietly():
        model = kind(2, privacy=spec, random_state=0).fit(data)
    result = dataclasses.replace(
        model.result_,
        anchors={name: (1, "ab") for name in NAMES},
        client_clusters={name: (0, 1) for name in NAMES},
        networks={"shared": np.zeros(2)} | {f"models of {name}": np.ones(2) for name in NAMES},
        spent=dict.fromkeys(NAMES, 1.0),
    )
    model.result_ = result
    told = ended(model, NAMES, (KEY_HOLDER,))
    for name in NAMES:
        text = json.dumps(told[name].result)
        assert told[name].run == "r"
        assert not [other for other in NAMES if other != name and f'"{other}"' in text]
        assert not [other for other in NAMES if other != name and f"models of {other}" in text]
        assert set(told[name].result["networks"]) == {"shared", f"models of {name}"}
        assert set(told[name].result["client_clusters"]) == {name}
        assert not told[name].result.get("anchors")
        np.testing.assert_array_equal(told[name].result["centers"], result.centers)
    assert told[KEY_HOLDER] == Ending("r", {})


def test_a_run_that_is_given_up_is_ended_for_all():
    told = ended(None, NAMES, (KEY_HOLDER,))
    assert told == dict.fromkeys((*NAMES, KEY_HOLDER), Ending("r", None))


def test_who_cannot_be_told_of_the_end_is_named(caplog):
    end(Federation(engine(bob=no_answer), NAMES, "r", parties=NAMES), None)
    assert "bob has not said that it knows of the end of the run" in caplog.text
    assert "ada has not said" not in caplog.text
