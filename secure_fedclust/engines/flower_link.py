"""The server's end of a Flower federation: a SuperLink in this process, and the grid on it.

Of everything that a SuperLink serves only what nodes need can be reached from outside. The rest of
it, by which whoever connects could register nodes and start runs, is answered with 404: nodes are
registered here, by the keys that the operator has, and no code that anybody uploads is ever run.

What is used of Flower here is not a part of its public interface; `VERSION` says for which version
it was written.
"""

import logging
import ssl
import threading
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import (
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
    TIMESTAMP_HEADER,
    TRANSPORT_TYPE_GRPC_RERE,
)
from flwr.serverapp import Grid
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    FLWR_IN_MEMORY_DB_NAME,
    NOOP_FEDERATION_ID,
    TaskType,
)
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import (
    bytes_to_public_key,
    public_key_to_bytes,
    verify_signature,
)
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app

from secure_fedclust.errors import ParameterError

VERSION = "1.41"
NODES_ONLY = "/v1/fleet/"
"""Where nodes are served; nothing else is."""

MOST_BYTES = 1 << 28
"""Of one request of a node."""

_DEPTH = 3
"""A message, its record and what is in it."""

_HEARTBEAT_SECONDS = 5.0
_STARTING_SECONDS = 30.0

Store = Callable[[Message, Any, str], tuple[bool, list[str]]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class SuperLink:
    """Flower's SuperLink, for nodes whose keys are registered; used within ``with``.

    Parameters
    ----------
    host, port : str, int
        Where it listens; port 0 takes a free one.
    certificate, key : path, optional
        The server's, in PEM. Without them nothing is encrypted, and nodes are not authenticated.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
    ) -> None:
        for name in ("flwr", "uvicorn.error"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what matters is logged here
        if certificate is not None:
            _check_pair(certificate, key)
        self._secure = certificate is not None
        config = SuperLinkLifespanConfig(
            control_address="",
            health_server_address=None,
            host=host,
            port=port,
            insecure=not self._secure,
            certificates=None,
            superexec_auth_secret=None,
            authn_plugin=NoOpControlAuthnPlugin(),
            event_log_plugin=None,
            fleet_event_log_plugin=None,
            enable_event_log=False,
            artifact_provider=None,
            enable_supernode_auth=self._secure,
            fleet_api_type=TRANSPORT_TYPE_GRPC_RERE,
            fleet_api_address=None,
            simulation=False,
            ssl_ca_certfile=None,
            ssl_certfile=None,
            ssl_keyfile=None,
            database=FLWR_IN_MEMORY_DB_NAME,
            isolation="process",  # nobody is started to run what is uploaded
            runtime_dependency_install=False,
        )
        app = create_app(config, SuperLinkLifespan)
        self._state = app.state.linkstate_factory.state()
        _let_back_in(self._state)
        self._store = _take_replies_only(self._state, self._secure)
        self._known: dict[bytes, int] = {}
        self._server = uvicorn.Server(
            uvicorn.Config(
                _NodesOnly(app, self._known if self._secure else None),
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                ssl_certfile=certificate,
                ssl_keyfile=None if key is None else str(key),
                ws="none",
                timeout_graceful_shutdown=1,
            )
        )
        self._address = host, port
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._over = threading.Event()

    def _serve(self) -> None:
        with suppress(SystemExit):  # it could not listen, which `__enter__` finds out
            self._server.run()

    def __enter__(self) -> Self:
        self._thread.start()
        until = time.monotonic() + _STARTING_SECONDS
        while not self._server.started and self._thread.is_alive() and time.monotonic() < until:
            time.sleep(0.02)
        if not self._server.started:
            host, port = self._address
            raise ParameterError(
                f"{host}:{port} cannot be listened on: it is not this machine's, or another server "
                "is there; give another address"
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.should_exit = True
        self._thread.join(timeout=10)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    def register(self, key: ec.EllipticCurvePublicKey) -> int:
        """Let the owner of a key in; the node's id."""
        public = public_key_to_bytes(key)
        node = int(self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public, 0))
        self._known[public] = node
        return node

    def grid(self) -> Grid:
        """Begin a run, and give the way to its nodes."""
        run = self._state.create_run(
            fab_id=None,
            fab_version=None,
            fab_hash=None,
            override_config={},
            federation_id=NOOP_FEDERATION_ID,
            federation_config=None,
            flwr_aid=NOOP_FLWR_AID,
            primary_task_type=TaskType.SERVER_APP,
        )
        info = self._state.get_run_info(run_ids=[run])[0]
        self._state.claim_task(info.primary_task_id)
        self._state.activate_task(info.primary_task_id)
        threading.Thread(target=self._keep_alive, args=(info.primary_task_id,), daemon=True).start()
        return _LocalGrid(self._state, info, self._store)

    def _keep_alive(self, task: int) -> None:
        while not self._over.wait(_HEARTBEAT_SECONDS):
            self._state.acknowledge_task_heartbeat(task)


def _check_pair(certificate: str | Path, key: str | Path | None) -> None:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        raise ParameterError(
            f"{certificate} and {key} are no certificate and its key: {error}"
        ) from error


def _let_back_in(state: Any) -> None:
    """Let in a node that counts as connected, and give it again what it has not answered.

    The process that was it was killed, or its connection broke. Flower would have it wait until it
    counts as gone, and what it has pulled before would be lost.
    """
    activate, pull = state.activate_node, state.get_message_ins

    def activate_node(node_id: int, heartbeat_interval: float) -> bool:
        with state.lock:
            for reply in list(state.message_res_store.values()):
                if reply.metadata.src_node_id == node_id and not _is_whole(state, reply):
                    del state.message_res_store[reply.metadata.message_id]
                    answered = reply.metadata.reply_to_message_id
                    state.message_ins_id_to_message_res_id.pop(answered, None)
            for message in state.message_ins_store.values():
                if message.metadata.dst_node_id == node_id:
                    message.metadata.delivered_at = ""
        return bool(
            activate(node_id, heartbeat_interval)
            or state.acknowledge_node_heartbeat(node_id, heartbeat_interval)
        )

    def get_message_ins(*args: Any, **options: Any) -> list[Message]:
        answered = state.message_ins_id_to_message_res_id
        return [each for each in pull(*args, **options) if each.metadata.message_id not in answered]

    state.activate_node, state.get_message_ins = activate_node, get_message_ins


def _parts(state: Any, reply: Message) -> dict[str, bytes]:
    """What belongs to a reply and comes after it: nothing yet, or not all, or all."""
    try:
        tree = state.object_store.get_object_tree(reply.metadata.message_id)
    except Exception:  # one of Flower's own, where there is none
        return {reply.metadata.message_id: b""}
    run = reply.metadata.run_id
    return {
        each.object_id: state.get_object(run, each.object_id) or b""
        for each in iterate_object_tree(tree)
    }


def _is_whole(state: Any, reply: Message) -> bool:
    return reply.has_error() or all(_parts(state, reply).values())


_asking: ContextVar[int | None] = ContextVar("_asking", default=None)
"""The node whose request is being handled, where nodes are authenticated."""


def _take_replies_only(state: Any, authenticated: bool) -> Store:
    """Have nodes push nothing but their own replies that look as ours do; give what takes anything.

    Flower takes requests from nodes as well, in the server's name, takes a reply for whose it says
    it is, and has nodes register whatever objects they like.
    """
    store: Store = state.store_message_and_object_tree

    def store_reply(message: Message, tree: Any, session: str) -> tuple[bool, list[str]]:
        said = message.metadata
        if (
            not said.reply_to_message_id
            or (authenticated and said.src_node_id != _asking.get())
            or tree.object_id != said.message_id
            or not _is_plain(tree)
        ):
            return False, []
        return store(message, tree, session)

    state.store_message_and_object_tree = store_reply
    return store


def _is_plain(tree: Any) -> bool:
    """Whether it is a message with one record of one kind, or with an error."""
    depth = 1
    while len(tree.children) == 1 and depth < _DEPTH:
        tree, depth = tree.children[0], depth + 1
    return not tree.children


class _NodesOnly:
    """Lets through what nodes ask for, and looks at who signs before anything is read."""

    def __init__(self, app: Any, known: dict[bytes, int] | None) -> None:
        self._app = app
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        refused = 0
        if scope["type"] != "http" or not scope["path"].startswith(NODES_ONLY):
            refused = 404
        elif not length.isdigit() or int(length) > MOST_BYTES:
            refused = 413
        elif self._known is not None:
            node = _signed_by(headers, self._known)
            _asking.set(node)
            refused = 401 if node is None else 0
        if not refused:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": refused, "headers": []})
            await send({"type": "http.response.body", "body": b""})


def _signed_by(headers: dict[bytes, bytes], known: dict[bytes, int]) -> int | None:
    """The node whose key a request is signed with, if it is registered; Flower looks at when."""
    try:
        public, signature = (
            b64decode(headers[name.lower().encode()], validate=True)
            for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
        )
        signed = headers[TIMESTAMP_HEADER.lower().encode()]
        node = known[public]
        return node if verify_signature(bytes_to_public_key(public), signed, signature) else None
    except (KeyError, ValueError):
        return None


class _LocalGrid(Grid):
    """Flower's grid for whoever has the SuperLink in the same process."""

    def __init__(self, state: Any, run: Run, store: Store) -> None:
        self._state = state
        self._run = run
        self._store = store
        self._asked: set[str] = set()
        TaskIdentity.run_id = run.run_id
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        TaskIdentity.task_id = run.primary_task_id or 0

    def set_run(self, run: Run) -> None:
        """Not needed: the run is the one that the grid was made for."""

    @property
    def run(self) -> Run:
        """The run."""
        return self._run

    def create_message(self, *_: Any, **__: Any) -> Message:
        """Not there; Flower has deprecated it."""
        raise NotImplementedError("make a flwr.app.Message")

    def get_node_ids(self) -> Iterable[int]:
        """Nodes that are connected."""
        return list(self._state.get_nodes(self._run.run_id))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; their numbers, and nothing for those that could not be sent.

        Whoever has not answered what was sent before is not to do so any more.
        """
        self._forget(set(self._asked))
        numbers = []
        for message in messages:
            message.metadata.__dict__["_run_id"] = self._run.run_id
            session = self._state.start_session(self._run.run_id)
            message.metadata.__dict__["_message_id"] = message.object_id
            with no_object_id_recompute():
                tree, objects = get_object_tree(message), get_all_nested_objects(message)
                stored, missing = self._store(remove_content_from_message(message), tree, session)
                for number in missing:
                    content = objects[number].deflate()
                    self._state.store_object(self._run.run_id, session, number, content)
            numbers.append(message.metadata.message_id if stored else "")
        self._asked = {number for number in numbers if number}
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies that have come, and all that belongs to them."""
        with self._state.lock:  # a reply may begin to come at any time
            wanted = {number for number in message_ids if not self._is_coming(number)}
            found = self._state.get_message_res(message_ids=wanted, run_id=self._run.run_id)
        replies = [self._read(each) for each in found]
        self._forget({each.metadata.reply_to_message_id for each in replies})
        return replies

    def _is_coming(self, number: str) -> bool:
        """Whether there is a reply to a message, of which something is missing still."""
        state = self._state
        reply = state.message_res_store.get(state.message_ins_id_to_message_res_id.get(number))
        return reply is not None and not _is_whole(state, reply)

    def _forget(self, numbers: set[str]) -> None:
        """Drop messages, and the replies to them."""
        self._state.delete_messages(message_ins_ids=numbers)
        for number in numbers:
            self._state.object_store.delete(number)
        self._asked -= numbers

    def _read(self, message: Message) -> Message:
        """A reply with what it holds."""
        if message.has_error():
            return message
        number = message.metadata.message_id
        try:
            contents = _parts(self._state, message)
            # What it says of itself in there is not looked at: it is the reply to what it was
            # stored as a reply to.
            message.content = inflate_object_from_contents(number, contents).content  # type: ignore[attr-defined]
        except Exception:  # there is no end of what a node could send
            message.content = RecordDict()
        self._state.object_store.delete(number)
        return message

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Not there: `FlowerEngine` looks more often than it would."""
        raise NotImplementedError("push messages, and pull the replies")
