"""Keys of the parties of a federation, and the cards by which they know each other.

Every party has a folder. A client's, or a key holder's, has

- ``node.key``: by which the server lets it in (ECDSA, P-384, as Flower asks for);
- ``identity.key``: by which other parties know what it has signed (Ed25519);
- ``NAME.card``: the public parts of both. It is given to the others, by a way that they trust;
- ``roster/``: the cards of the others.

The server's has a certificate authority of its own (``ca.pem``, ``ca.key``), a certificate
(``server.pem``, ``server.key``) and an identity. Private parts are readable by their owner only.
"""

import datetime
import hashlib
import ipaddress
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from secure_fedclust.errors import ParameterError
from secure_fedclust.privacy.identity import KEY_BYTES, Identity
from secure_fedclust.protocols.checkpoint import replace_file

FORMAT: Final = "secure_fedclust card 1"
SERVER: Final = "server"
ROSTER: Final = "roster"
AUTHORITY: Final = "authority"
CERTIFICATE_DAYS: Final = 825
AUTHORITY_DAYS: Final = 3650

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Card:
    """What others know a party by.

    Attributes
    ----------
    name : str
    identity : bytes
        The public part of its identity.
    node : bytes or None
        The public part of its node key, as PEM; None for the server.
    """

    name: str
    identity: bytes
    node: bytes | None

    @property
    def fingerprint(self) -> str:
        """A few words' worth of digits, to compare by telephone."""
        return _in_words(self.identity + (self.node or b""))

    def to_json(self) -> str:
        """The card as a file holds it."""
        node = None if self.node is None else self.node.decode("ascii")
        content = {
            "format": FORMAT,
            "name": self.name,
            "identity": self.identity.hex(),
            "node": node,
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a card, or raise an error that says what is wrong with it."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
            name, identity, node = content["name"], content["identity"], content["node"]
            card = cls(
                check_name(name),
                bytes.fromhex(identity),
                None if node is None else node.encode("ascii"),
            )
            if len(card.identity) != KEY_BYTES:
                raise ValueError("its identity is not 64 hexadecimal digits")
            if card.node is not None:
                card.node_key()
        except OSError as error:
            raise ParameterError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ParameterError(
                f"{path} is no card ({error}): give a file that `keys init` has made, NAME.card"
            ) from error
        return card

    def node_key(self) -> ec.EllipticCurvePublicKey:
        """The public part of the node key."""
        if self.node is None:
            raise ParameterError(f"the card of {self.name} has no node key: it is the server's")
        try:
            key = load_pem_public_key(self.node)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ValueError("its node key cannot be read") from error
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(
            key.curve, ec.SECP384R1
        ):
            raise ValueError("its node key is not on the curve P-384")
        return key


@dataclass(frozen=True)
class Keys:
    """The keys of one party, from its folder."""

    folder: Path
    card: Card

    @classmethod
    def create(cls, folder: str | Path, name: str) -> Self:
        """Make the keys of a client or of a key holder."""
        if check_name(name) == SERVER:
            raise ParameterError(f"a client cannot be called {SERVER!r}: give it another name")
        place, identity = _new_folder(folder), Identity()
        key = ec.generate_private_key(ec.SECP384R1())
        _write_secret(place / "node.key", _pem(key))
        _write_secret(place / "identity.key", identity.to_pem())
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return cls._with_card(place, Card(name, identity.public, public))

    @classmethod
    def create_server(cls, folder: str | Path, hosts: Sequence[str]) -> Self:
        """Make the keys of a server that is reached by these names or addresses."""
        if not hosts:
            raise ParameterError("a server is reached by some host: give --host NAME_OR_ADDRESS")
        names = [_general_name(host) for host in hosts]
        place, identity = _new_folder(folder), Identity()
        authority, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
        issuer = _named("secure_fedclust authority")
        root = (
            _certificate(issuer, issuer, authority.public_key(), AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(authority, hashes.SHA384())
        )
        served = (
            _certificate(_named("secure_fedclust server"), issuer, key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(authority, hashes.SHA384())
        )
        _write_secret(place / "ca.key", _pem(authority))
        _write_secret(place / "server.key", _pem(key))
        _write_secret(place / "identity.key", identity.to_pem())
        (place / "ca.pem").write_bytes(root.public_bytes(Encoding.PEM))
        (place / "server.pem").write_bytes(served.public_bytes(Encoding.PEM))
        return cls._with_card(place, Card(SERVER, identity.public, None))

    @classmethod
    def _with_card(cls, folder: Path, card: Card) -> Self:
        (folder / ROSTER).mkdir()
        (folder / f"{card.name}.card").write_text(card.to_json(), encoding="utf-8")
        return cls(folder, card)

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """The keys in a folder, which must have been made by ``keys init``."""
        place = Path(folder)
        cards = sorted(place.glob("*.card"))
        if len(cards) != 1:
            found = f"has {len(cards)} cards" if place.is_dir() else "is no folder"
            raise ParameterError(
                f"{place} {found}: give the folder that `secure-fedclust keys init` has made"
            )
        return cls(place, Card.read(cards[0]))

    @property
    def identity(self) -> Identity:
        """The identity, its private part included."""
        content = self.secret("identity.key")
        try:
            identity = Identity.from_pem(content)
        except ValueError:
            identity = None
        if identity is None or identity.public != self.card.identity:
            raise ParameterError(f"{self.folder}/identity.key does not belong to its card")
        return identity

    @property
    def node_key(self) -> ec.EllipticCurvePrivateKey:
        """The key by which the server lets this party in."""
        content = self.secret("node.key")
        try:
            key = load_pem_private_key(content, None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            key = None
        if (
            not isinstance(key, ec.EllipticCurvePrivateKey)
            or key.public_key() != self.card.node_key()
        ):
            raise ParameterError(f"{self.folder}/node.key does not belong to its card")
        return key

    @property
    def roster(self) -> dict[str, Card]:
        """The cards of the others, by name."""
        cards = [Card.read(path) for path in sorted((self.folder / ROSTER).glob("*.card"))]
        return {card.name: card for card in cards}

    def register(self, path: str | Path) -> Card:
        """Take another party's card into the roster.

        A name that is there already with other keys is refused: whoever trusts it would trust
        somebody else from then on.
        """
        card = Card.read(path)
        if card.name == self.card.name:
            raise ParameterError(f"{path} has this party's own name, {card.name!r}")
        known = self.roster
        if card.name in known and known[card.name] != card:
            raise ParameterError(
                f"{card.name} is registered with other keys ({known[card.name].fingerprint}): ask "
                f"it whether it has new ones, and remove {self.folder / ROSTER / card.name}.card"
            )
        for other in known.values():
            if other.name != card.name and (
                other.identity == card.identity or (card.node and other.node == card.node)
            ):
                raise ParameterError(f"{path} has the keys of {other.name}, under another name")
        target = self.folder / ROSTER / f"{card.name}.card"
        target.write_text(card.to_json(), encoding="utf-8")
        return card

    def bind(self, authority: str) -> None:
        """Use these keys with one server only, known by the fingerprint of its authority.

        What a node signs names no server: one could pass it on to another, and be this party there.
        """
        path = self.folder / AUTHORITY
        try:
            if not path.exists():
                replace_file(path, authority.encode() + b"\n")
            known = path.read_text(encoding="ascii", errors="backslashreplace").strip()
        except OSError as error:
            raise ParameterError(f"{path} cannot be kept: {error.strerror}") from error
        if known != authority:
            raise ParameterError(
                f"the keys in {self.folder} are for a server whose authority is {known}, this is "
                f"{authority}: make keys for each server; if it is the same one and has told you "
                f"of a new certificate, remove {path}"
            )

    def secret(self, name: str) -> bytes:
        """The content of a file that nobody else may read."""
        path = self.folder / name
        try:
            if path.stat().st_mode & 0o077:
                raise ParameterError(
                    f"{path} can be read by others than its owner: chmod 600 {path}, and think of "
                    "new keys"
                )
            return path.read_bytes()
        except OSError as error:
            raise ParameterError(f"{path} cannot be read: {error.strerror}") from error


def fingerprint_of(certificate: Path) -> str:
    """What the operator of a server and its clients compare: of the authority's certificate."""
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
    except OSError as error:
        raise ParameterError(f"{certificate} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ParameterError(f"{certificate} is no certificate: ask for the server's") from error
    return _in_words(found.public_bytes(Encoding.DER))


def _in_words(content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()[:32]
    return " ".join(digest[i : i + 4] for i in range(0, 32, 4))


def check_name(name: Any) -> str:
    """A name that can be a part of a file's name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ParameterError(
            f"name {str(name)[:80]!r}: give up to 64 letters, digits, dots, dashes or underscores"
        )
    return name


def _new_folder(folder: str | Path) -> Path:
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        taken = any(place.iterdir())
    except OSError as error:
        raise ParameterError(f"{place} cannot be made: {error.strerror}") from error
    if taken:
        raise ParameterError(f"{place} is not empty: keys are not overwritten; give a new folder")
    place.chmod(0o700)
    return place


def _write_secret(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    if not host:
        raise ParameterError("host '' is neither an address nor a name")
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ParameterError(f"host {host!r} is neither an address nor a name") from error


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: int = CERTIFICATE_DAYS,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Clocks differ, and a certificate must not be from tomorrow.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )
