"""``secure-fedclust ledger``: make, show or verify a privacy ledger."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fedclust.commands.printing import print_table
from secure_fedclust.errors import LedgerError, ParameterError

if TYPE_CHECKING:
    from secure_fedclust.privacy.ledger import Anchor, Ledger


def add(commands: Any) -> None:
    """Add the command."""
    ledger = commands.add_parser("ledger", help="make, show or verify a privacy ledger")
    actions = ledger.add_subparsers(required=True, metavar="ACTION")

    init = actions.add_parser("init", help="make a ledger, and fix the lifetime budget in it")
    init.add_argument("file", type=Path, metavar="FILE")
    init.add_argument("--epsilon", type=float, required=True, help="lifetime budget of a client")
    init.add_argument("--delta", type=float, required=True)
    init.add_argument("--unit", choices=["record", "client"], default="record")
    init.add_argument("--adjacency", choices=["add_remove", "replace_one"], default="add_remove")
    init.add_argument("--dataset", default="", metavar="NAME", help="a name for the data")
    init.set_defaults(command=_init)

    show = actions.add_parser("show", help="print what was spent and what is left")
    show.add_argument("file", type=Path, metavar="FILE")
    show.add_argument("--rows", action="store_true", help="print each release too")
    show.add_argument("--json", action="store_true", help="print it as JSON")
    show.set_defaults(command=_show)

    verify = actions.add_parser("verify", help="check every row, and against what others saw")
    verify.add_argument("file", type=Path, metavar="FILE")
    verify.add_argument(
        "--anchor",
        action="append",
        default=[],
        metavar="ROWS:HEAD",
        help="number of rows and hash of the last, as in a report; may be repeated",
    )
    verify.add_argument(
        "--against",
        action="append",
        default=[],
        type=Path,
        metavar="RESULT.json",
        help="the anchors in a result; may be repeated",
    )
    verify.add_argument(
        "--client",
        action="append",
        metavar="NAME",
        help="of those, only this client's, where each client has its own ledger; may be repeated",
    )
    verify.set_defaults(command=_verify)


def _init(arguments: argparse.Namespace) -> None:
    from secure_fedclust.privacy.ledger import Ledger

    with Ledger.create(
        arguments.file,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        unit=arguments.unit,
        adjacency=arguments.adjacency,
        dataset=arguments.dataset,
    ) as ledger:
        print(_budget(ledger))
        print(_standing(ledger.anchor()))


def _show(arguments: argparse.Namespace) -> None:
    from secure_fedclust.privacy.ledger import Ledger
    from secure_fedclust.privacy.plan import MANY
    from secure_fedclust.privacy.spec import adversary

    with Ledger.open(arguments.file, read_only=True) as ledger:
        rows, anchor = ledger.rows(), ledger.anchor()
        clients = [_spending(ledger, client) for client in ledger.clients()]
        releases = [
            {"row": row.number, **vars(row.charge), "cumulative mu": row.cumulative_mu}
            | {"previous": row.previous, "hash": row.hash}
            for row in rows
        ]
        if arguments.json:
            content: dict[str, Any] = {
                "epsilon": ledger.limit.epsilon,
                "delta": ledger.limit.delta,
                "mu": ledger.limit.mu,
                "unit": ledger.unit,
                "adjacency": ledger.adjacency,
                "dataset": ledger.dataset,
                "rows": anchor.rows,
                "head": anchor.head,
                "sums": [quorum._asdict() for quorum in sorted(ledger.quorums())],
                "clients": clients,
            }
            print(
                json.dumps(content | ({"releases": releases} if arguments.rows else {}), indent=1)
            )
            return
        print(_budget(ledger))
        print(_standing(anchor))
        for quorum in sorted(ledger.quorums()):
            print(
                f"some releases are in sums over {quorum.min_survivors} clients or more, and hold "
                f"against {adversary(*quorum[1:])}" + MANY * quorum.trusts_server
            )
        if clients:
            print_table(list(clients[0]), [list(client.values()) for client in clients])
        if arguments.rows and releases:
            hidden = ("inputs", "previous", "hash")
            names = [name for name in releases[0] if name not in hidden]
            print_table(
                [*names, "hash"],
                [[*(row[name] for name in names), row["hash"][:12]] for row in releases],
            )


def _verify(arguments: argparse.Namespace) -> None:
    from secure_fedclust.privacy.ledger import Ledger

    anchors = [_parse_anchor(text) for text in arguments.anchor]
    for path in arguments.against:
        anchors += _anchors_of(path, arguments.client)
    with Ledger.open(arguments.file, read_only=True) as ledger:
        try:
            ledger.verify(anchors)
        except LedgerError as error:
            names = {row.charge.client for row in ledger.rows()}
            if arguments.client and names and not names & set(arguments.client):
                raise LedgerError(
                    f"{error} (it has releases of {', '.join(sorted(names))} only, and --client is "
                    f"{', '.join(arguments.client)})"
                ) from error
            if not arguments.against or arguments.client or len(names) != 1:
                raise
            raise LedgerError(
                f"{error} (if it is a ledger of {names.pop()} alone, compare it with what was "
                "seen of that client: --client NAME)"
            ) from error
        number = len(anchors)
        print(f"every row holds, and {number} {'anchor' if number == 1 else 'anchors'}")
        print(_standing(ledger.anchor()))


def _budget(ledger: "Ledger") -> str:
    of = f", data set {ledger.dataset!r}" if ledger.dataset else ""
    return (
        f"budget of each client: epsilon {ledger.limit.epsilon:g}, delta {ledger.limit.delta:g}, "
        f"unit {ledger.unit}, adjacency {ledger.adjacency}{of}"
    )


def _standing(anchor: "Anchor") -> str:
    return f"anchor: {anchor.rows}:{anchor.head}"


def _spending(ledger: "Ledger", client: str) -> dict[str, Any]:
    """What a client spent; what is left is what one more run could have at the same delta."""
    from secure_fedclust.privacy.accounting import epsilon_of

    limit, totals = ledger.limit, ledger.totals(client)
    left = math.sqrt(max(0.0, limit.mu**2 - totals.squared_mu))
    return {
        "client": client,
        "rows": len(ledger.rows(client)),
        "epsilon spent": epsilon_of(limit.delta, totals.mu),
        "epsilon left": epsilon_of(limit.delta, left),
        "mu spent": totals.mu,
        "mu left": left,
        "slack spent": totals.slack,
        "slack left": max(0.0, limit.slack - totals.slack),
    }


def _parse_anchor(text: str) -> "Anchor":
    from secure_fedclust.privacy.ledger import Anchor

    rows, _, head = text.partition(":")
    if not rows.isdecimal():
        raise ParameterError(f"--anchor {text}: give ROWS:HEAD, e.g. 12 and 64 hexadecimal digits")
    return Anchor(int(rows), head)


def _anchors_of(path: Path, clients: Sequence[str] | None) -> "list[Anchor]":
    """The anchors that a result holds: of all clients, or of those named."""
    from secure_fedclust.privacy.ledger import Anchor

    try:
        anchors = json.loads(path.read_text(encoding="utf-8"))["anchors"]
        found = {client: Anchor(*anchor) for client, anchor in anchors.items()}
    except OSError as error:
        raise ParameterError(f"--against {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ParameterError(f"--against {path} is not a result with anchors") from error
    if not found:
        raise ParameterError(
            f"--against {path}: it has no anchors. A run without a ledger has none, nor has the "
            "copy of a result that a client is given: take the server's"
        )
    for client in clients or ():
        if client not in found:
            raise ParameterError(f"--client {client}: {path} has no anchor of that name")
    return [found[client] for client in clients or found]
