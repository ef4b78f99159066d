"""``secure-fedclust server``, ``client`` and ``keys``: the ends of a real federation."""

import argparse
import logging
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fedclust.commands.printing import make_folder
from secure_fedclust.errors import ParameterError

if TYPE_CHECKING:
    from secure_fedclust.result import FedClustResult


def add(commands: Any) -> None:
    """Add the commands."""
    server = commands.add_parser(
        "server", help="wait for the clients of a federation, and run what a TOML file describes"
    )
    server.add_argument("config", type=Path, metavar="CONFIG.toml")
    server.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for results")
    server.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="folder that keeps a run of FedCRef or DeepFeCA: the same command goes on with it",
    )
    _ends(server)
    server.set_defaults(command=_server)

    client = commands.add_parser(
        "client", help="take part in a federation with the records in a file"
    )
    client.add_argument("--data", type=Path, metavar="FILE", help="CSV or npz with named columns")
    client.add_argument("--config", type=Path, required=True, metavar="CLIENT.toml")
    client.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for results, and for this client's labels"
    )
    client.add_argument("--once", action="store_true", help="stop after one run")
    _ends(client)
    client.set_defaults(command=_client)

    keys = commands.add_parser("keys", help="make keys, and register those of others")
    actions = keys.add_subparsers(required=True, metavar="ACTION")
    init = actions.add_parser("init", help="make the keys of a client, a key holder or a server")
    init.add_argument("folder", type=Path, metavar="DIR")
    who = init.add_mutually_exclusive_group(required=True)
    who.add_argument("--name", help="of the client or key holder")
    who.add_argument(
        "--host",
        action="append",
        help="for a server: a name or an address that it is reached by; may be given again",
    )
    init.set_defaults(command=_init)
    register = actions.add_parser("register", help="trust the keys on somebody's card")
    register.add_argument("card", type=Path, nargs="+", metavar="CARD")
    register.add_argument("--keys", type=Path, required=True, metavar="DIR")
    register.set_defaults(command=_register)


def _ends(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--insecure", action="store_true", help="no encryption; on 127.0.0.1 only, to try things"
    )
    parser.add_argument("--quiet", action="store_true", help="log warnings and errors only")


def _server(arguments: argparse.Namespace) -> None:
    from secure_fedclust.audit.report.folder import write_report, write_run
    from secure_fedclust.deployment.config import ServerConfig

    run_server = _ready("run_server", arguments.quiet)
    config = ServerConfig.read(arguments.config)
    make_folder(arguments.out)
    result = arguments.out / "result.json"
    if result.exists():
        raise ParameterError(f"{result} is there: give a new folder, or remove it first")
    model = run_server(
        config,
        insecure=arguments.insecure,
        checkpoint=arguments.checkpoint,
        on_listening=lambda port: logging.getLogger("secure_fedclust").info(
            "listening on %s:%d%s", config.host, port, " WITHOUT ENCRYPTION" * arguments.insecure
        ),
        on_result=lambda model: _save(model.result_, result),
    )
    # The folder has a result now, and is refused.
    command = ["secure-fedclust", "server", str(arguments.config), "--out", "NEW_FOLDER"]
    if arguments.checkpoint is not None:
        command += ["--checkpoint", str(arguments.checkpoint)]
    command += ["--insecure"] * arguments.insecure
    write_run(arguments.out, command=shlex.join(command))
    print(model.guarantee_)
    print(f"report: {write_report(arguments.out)}")


def _save(found: "FedClustResult", path: Path) -> None:
    """Write a result, or nothing."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        found.save(partial)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ParameterError(f"{path} cannot be written: {error.strerror}; it is lost") from error


def _client(arguments: argparse.Namespace) -> None:
    from secure_fedclust.deployment.config import ClientConfig

    take_part = _ready("take_part", arguments.quiet)
    if arguments.out is not None:
        make_folder(arguments.out)
    take_part(
        ClientConfig.read(arguments.config),
        arguments.data,
        out=arguments.out,
        insecure=arguments.insecure,
        once=arguments.once,
    )


def _init(arguments: argparse.Namespace) -> None:
    from secure_fedclust.deployment.keys import Keys, fingerprint_of

    if arguments.name is not None:
        keys = Keys.create(arguments.folder, arguments.name)
    else:
        keys = Keys.create_server(arguments.folder, arguments.host)
    card = keys.folder / f"{keys.card.name}.card"
    print(f"keys of {keys.card.name} in {keys.folder}; fingerprint {keys.card.fingerprint}")
    print(f"give to the others: {card}")
    if arguments.host is not None:
        authority = keys.folder / "ca.pem"
        print(f"give to clients: {authority}; fingerprint {fingerprint_of(authority)}")


def _register(arguments: argparse.Namespace) -> None:
    from secure_fedclust.deployment.keys import Keys

    keys = Keys.read(arguments.keys)
    for path in arguments.card:
        card = keys.register(path)
        print(f"registered {card.name}, fingerprint {card.fingerprint}: compare it with its owner")


_LONGEST = 4000


class _Lines(logging.Formatter):
    """A line for each record, whatever the other end has put into it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        if len(line) > _LONGEST:
            line = f"{line[:_LONGEST]}... ({len(line)} characters)"
        return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


def _ready(name: str, quiet: bool) -> Any:
    """One of the two ends, if Flower is there; what they do is logged."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(_Lines("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[lines])
    logging.getLogger("secure_fedclust").setLevel(logging.WARNING if quiet else logging.INFO)
    try:
        import flwr  # noqa: F401
    except ModuleNotFoundError as error:
        raise ParameterError(
            "real federations need Flower: where the project's files are, pip install -c "
            "constraints.txt '.[flower]'"
        ) from error
    from secure_fedclust.deployment import ends

    return getattr(ends, name)
