"""Keys and cards: whose they are, who may read them, and what is refused."""

import dataclasses
import ipaddress
import json
import stat

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from secure_fedclust.deployment.keys import SERVER, Card, Keys, check_name
from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.identity import Identity, is_signed

PRIVATE = {"client": ["node.key", "identity.key"], "server": ["ca.key", "server.key"]}
PRIVATE["server"].append("identity.key")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Keys that no test changes."""
    folder = tmp_path_factory.mktemp("keys")
    server = Keys.create_server(folder / "server", ["127.0.0.1", "::1", "hub.example.org"])
    return {"client": Keys.create(folder / "ada", "ada"), "server": server}


@pytest.fixture
def ada(tmp_path):
    return Keys.create(tmp_path / "ada", "ada")


@pytest.fixture
def bob(tmp_path):
    return Keys.create(tmp_path / "bob", "bob")


def card_of(keys):
    return keys.folder / f"{keys.card.name}.card"


def changed(tmp_path, keys, **changes):
    """A card of these keys with something changed."""
    path = tmp_path / "changed.card"
    path.write_text(json.dumps(json.loads(keys.card.to_json()) | changes), encoding="utf-8")
    return path


def pem_on(curve):
    public = ec.generate_private_key(curve).public_key()
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def test_keys_are_for_one_server(ada):
    for _ in range(2):
        ada.bind("0123 4567")
        Keys.read(ada.folder).bind("0123 4567")
    with pytest.raises(ParameterError, match="whose authority is 0123 4567, this is 89ab"):
        Keys.read(ada.folder).bind("89ab")
    (ada.folder / "authority").unlink()
    ada.bind("89ab")


@pytest.mark.parametrize("who", PRIVATE)
def test_private_parts_are_for_their_owner_only(made, who):
    folder = made[who].folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in PRIVATE[who]:
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600, name


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
@pytest.mark.parametrize(("name", "use"), [("node.key", "node_key"), ("identity.key", "identity")])
def test_a_private_part_that_others_can_read_is_refused(ada, name, use, mode):
    (ada.folder / name).chmod(mode)
    with pytest.raises(ParameterError, match=name):
        getattr(ada, use)


def test_who_has_an_identity_that_others_can_read_is_told_what_to_do(ada):
    (ada.folder / "identity.key").chmod(0o644)
    with pytest.raises(ParameterError, match=r"identity\.key can be read by others.*chmod 600"):
        _ = ada.identity


@pytest.mark.parametrize(("name", "use"), [("node.key", "node_key"), ("identity.key", "identity")])
def test_a_private_part_that_is_gone_is_named(ada, name, use):
    (ada.folder / name).unlink()
    with pytest.raises(ParameterError, match=name):
        getattr(ada, use)


@pytest.mark.parametrize(("name", "use"), [("node.key", "node_key"), ("identity.key", "identity")])
@pytest.mark.parametrize("what", ["somebody else's", "the other one", "cut short", "empty"])
def test_a_key_file_that_does_not_belong_to_the_card_is_refused(ada, bob, name, use, what):
    other = "identity.key" if name == "node.key" else "node.key"
    own = (ada.folder / name).read_bytes()
    content = {
        "somebody else's": (bob.folder / name).read_bytes(),
        "the other one": (ada.folder / other).read_bytes(),
        "cut short": own[: len(own) // 2],
        "empty": b"",
    }[what]
    (ada.folder / name).write_bytes(content)
    with pytest.raises(ParameterError, match=f"{name} does not belong to its card"):
        getattr(ada, use)


def test_keys_are_read_as_they_were_made(made):
    found = Keys.read(made["client"].folder)
    assert found.card == made["client"].card
    assert is_signed(found.card.identity, found.identity.sign(b"x"), b"x")
    assert found.node_key.public_key() == found.card.node_key()


def test_a_server_has_an_identity_and_no_node_key(made):
    found = Keys.read(made["server"].folder)
    assert found.card.name == SERVER
    assert found.identity.public == found.card.identity
    with pytest.raises(ParameterError, match="no node key"):
        found.card.node_key()


@pytest.mark.parametrize("who", PRIVATE)
def test_a_card_is_read_as_it_was_written(made, who):
    assert Card.read(card_of(made[who])) == made[who].card


@pytest.mark.parametrize("who", PRIVATE)
def test_no_private_part_is_in_what_is_shown(made, who):
    keys = made[who]
    shown = repr(keys) + repr(keys.identity) + card_of(keys).read_text(encoding="utf-8")
    assert "PRIVATE" not in shown
    for name in PRIVATE[who]:
        for line in (keys.folder / name).read_text(encoding="utf-8").splitlines()[1:-1]:
            assert line not in shown, name
    assert keys.identity._key.private_bytes_raw().hex() not in shown


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"3", b"null", b"\xff\xfe", b'{"format": "x"}', b'{"format":']
)
def test_a_file_that_is_no_card_is_refused(tmp_path, content):
    path = tmp_path / "no.card"
    path.write_bytes(content)
    with pytest.raises(ParameterError, match=r"no\.card is no card"):
        Card.read(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": 5},
        {"identity": "zz"},
        {"identity": "ab" * 31},
        {"identity": "ab" * 33},
        {"node": 5},
        {"node": "no key"},
        {"node": "\u00e4"},
        {"node": ""},
        {"name": 5},
        {"name": ""},
        {"name": None},
        {"format": "secure_fedclust card 2"},
    ],
    ids=str,
)
def test_a_damaged_card_is_refused(tmp_path, made, changes):
    with pytest.raises(ParameterError, match="is no card"):
        Card.read(changed(tmp_path, made["client"], **changes))


@pytest.mark.parametrize("name", ["format", "name", "identity", "node"])
def test_a_card_without_one_of_its_lines_is_refused(tmp_path, made, name):
    content = json.loads(made["client"].card.to_json())
    del content[name]
    path = tmp_path / "less.card"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ParameterError, match=f"is no card \\('{name}'\\)"):
        Card.read(path)


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP521R1()], ids=lambda c: c.name)
def test_a_node_key_on_another_curve_is_refused(tmp_path, made, curve):
    path = changed(tmp_path, made["client"], node=pem_on(curve))
    with pytest.raises(ParameterError, match="P-384"):
        Card.read(path)


def test_a_card_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ParameterError, match=r"gone\.card cannot be read"):
        Card.read(tmp_path / "gone.card")


def test_a_fingerprint_changes_with_either_key(made):
    card = made["client"].card
    others = [
        dataclasses.replace(card, identity=Identity().public),
        dataclasses.replace(card, node=pem_on(ec.SECP384R1()).encode()),
    ]
    assert len({each.fingerprint for each in (card, *others)}) == 3
    assert dataclasses.replace(card, name="bob").fingerprint == card.fingerprint


def test_a_registered_card_is_in_the_roster(ada, bob):
    assert ada.register(card_of(bob)) == bob.card
    assert Keys.read(ada.folder).roster == {"bob": bob.card}


def test_a_card_can_be_registered_again(ada, bob):
    ada.register(card_of(bob))
    ada.register(card_of(bob))
    assert list(ada.roster) == ["bob"]


def test_a_registered_name_with_other_keys_is_refused(tmp_path, ada, bob):
    ada.register(card_of(bob))
    other = Keys.create(tmp_path / "other", "bob")
    with pytest.raises(ParameterError, match="bob is registered with other keys") as error:
        ada.register(card_of(other))
    assert bob.card.fingerprint in str(error.value)
    assert ada.roster["bob"] == bob.card


@pytest.mark.parametrize("part", ["identity", "node"])
def test_one_new_key_under_a_registered_name_is_refused(tmp_path, ada, bob, part):
    ada.register(card_of(bob))
    new = Identity().public.hex() if part == "identity" else pem_on(ec.SECP384R1())
    with pytest.raises(ParameterError, match="other keys"):
        ada.register(changed(tmp_path, bob, **{part: new}))


@pytest.mark.parametrize("kept", ["identity", "node", "both"])
def test_registered_keys_under_another_name_are_refused(tmp_path, ada, bob, kept):
    ada.register(card_of(bob))
    changes = {"name": "eve"}
    if kept == "node":
        changes["identity"] = Identity().public.hex()
    if kept == "identity":
        changes["node"] = pem_on(ec.SECP384R1())
    with pytest.raises(ParameterError, match="keys of bob, under another name"):
        ada.register(changed(tmp_path, bob, **changes))
    assert list(ada.roster) == ["bob"]


def test_a_card_with_ones_own_name_is_refused(tmp_path, ada):
    other = Keys.create(tmp_path / "other", "ada")
    with pytest.raises(ParameterError, match="own name, 'ada'"):
        ada.register(card_of(other))
    assert ada.roster == {}


@pytest.mark.parametrize(
    "name", ["", "a/b", "../a", "..", ".a", "-a", "a b", "a\n", "a\\b", "\u00e4", "a" * 65, None, 5]
)
def test_a_name_that_could_not_be_a_files_is_refused(tmp_path, name):
    with pytest.raises(ParameterError, match="name"):
        Keys.create(tmp_path / "new", name)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["a", "Oslo-2", "a.b_c", "9", "a" * 64])
def test_an_ordinary_name_is_taken(name):
    assert check_name(name) == name


def test_a_card_cannot_leave_the_roster_by_its_name(tmp_path, ada, bob):
    with pytest.raises(ParameterError, match="is no card"):
        ada.register(changed(tmp_path, bob, name="../bob"))
    assert not list(ada.folder.glob("bob*"))


def test_a_client_cannot_be_called_server(tmp_path):
    with pytest.raises(ParameterError, match="cannot be called 'server'"):
        Keys.create(tmp_path / "new", "server")


@pytest.mark.parametrize("make", [Keys.create, Keys.create_server], ids=["client", "server"])
def test_a_folder_with_something_in_it_is_left_as_it_is(tmp_path, make):
    (tmp_path / "something").write_text("mine", encoding="utf-8")
    with pytest.raises(ParameterError, match="is not empty"):
        make(tmp_path, "ada" if make == Keys.create else ["localhost"])
    assert [each.name for each in tmp_path.iterdir()] == ["something"]


def test_keys_are_not_made_in_the_place_of_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ParameterError, match="cannot be made"):
        Keys.create(tmp_path / "file", "ada")


def test_a_folder_without_keys_is_refused(tmp_path):
    with pytest.raises(ParameterError, match="has 0 cards"):
        Keys.read(tmp_path)


def test_a_folder_with_two_cards_is_refused(ada, bob):
    (ada.folder / "bob.card").write_text(bob.card.to_json(), encoding="utf-8")
    with pytest.raises(ParameterError, match="has 2 cards"):
        Keys.read(ada.folder)


def certificate(keys, name):
    return x509.load_pem_x509_certificate((keys.folder / name).read_bytes())


def test_the_certificate_is_valid_for_the_hosts_given_and_no_other(made):
    served = certificate(made["server"], "server.pem")
    names = served.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = [ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")]
    assert names.get_values_for_type(x509.IPAddress) == addresses
    assert names.get_values_for_type(x509.DNSName) == ["hub.example.org"]
    assert len(list(names)) == 3


def test_the_certificate_is_signed_by_the_authority(made, tmp_path):
    served, root = (certificate(made["server"], name) for name in ("server.pem", "ca.pem"))
    served.verify_directly_issued_by(root)
    other = Keys.create_server(tmp_path / "other", ["127.0.0.1"])
    with pytest.raises(InvalidSignature):
        served.verify_directly_issued_by(certificate(other, "ca.pem"))


def test_the_certificate_cannot_make_others(made):
    for name, is_authority in (("server.pem", False), ("ca.pem", True)):
        held = certificate(made["server"], name).extensions
        assert held.get_extension_for_class(x509.BasicConstraints).value.ca is is_authority


def test_a_server_needs_a_host(tmp_path):
    with pytest.raises(ParameterError, match="--host"):
        Keys.create_server(tmp_path / "new", [])
    assert not (tmp_path / "new").exists()


def test_a_host_that_is_no_name_is_refused(tmp_path):
    with pytest.raises(ParameterError, match="neither an address nor a name"):
        Keys.create_server(tmp_path / "new", ["ex\u00e4mple.org"])
    assert not (tmp_path / "new").exists()
