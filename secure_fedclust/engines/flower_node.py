"""A client's end of a Flower federation: a node that answers with a function of this process.

Flower's own SuperNode would download the server's code and run it, for each message in a new
process. Here no code comes from the server, what the client knows stays in one process, and the
next message is looked for at once.

What is used of Flower here is not a part of its public interface; see `flower_link.VERSION`.
"""

import logging
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import TIMESTAMP_HEADER, ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supernode.fleet_http_client import FleetHttpClient

from secure_fedclust.engines.flower import FIELD, RECORD, packed
from secure_fedclust.errors import (
    NotAdmitted,
    ParameterError,
    ProtocolError,
    SecureFedClustError,
)

HEARTBEAT: Final = 10.0
"""Seconds; the server takes a node that was silent for two of them for gone."""

POLL: Final = 0.1
IDLE_POLL: Final = 1.0
"""Seconds between two looks for a message: while a run goes on, and when nothing came for long."""

IDLE_AFTER: Final = 120.0
MOST_WAIT: Final = 5.0
"""Seconds between two tries to connect, at most."""

TIMEOUT: Final = 30.0
"""Seconds that a call may take."""

FAREWELL: Final = 0.5
"""Seconds that a node stays after its last answer."""

_SKEW: Final = 4.0
"""Seconds that clocks may differ before it is corrected for; Flower takes five."""

_MOST_SKEW: Final = 20 * 366 * 86400.0
"""Beyond this it is not the clock that is wrong."""

_log = logging.getLogger(__name__)


@dataclass
class FlowerNode:
    """Connects to a SuperLink, and answers what comes until it is told to stop.

    Parameters
    ----------
    address : str
        ``host:port`` of the server.
    key : private key on an elliptic curve
        By which the server knows the node.
    root_certificate : path, optional
        Of the authority that the server's certificate must be from. Without one nothing is
        encrypted, and the server lets in whoever it likes.
    """

    address: str
    key: ec.EllipticCurvePrivateKey
    root_certificate: Path | None = None

    def __post_init__(self) -> None:
        self._public = public_key_to_bytes(self.key.public_key())
        self._signing = _Signing(self.key, self._public)
        self._node = Node()
        self._reply: Message | None = None
        self._stop = threading.Event()

    def serve(
        self,
        handle: Callable[[bytes], bytes],
        on_connect: Callable[[], None],
        on_sent: Callable[[], object] = lambda: None,
    ) -> None:
        """Answer requests by `handle` until `stop` is called; `on_sent` comes after each reply.

        A server that cannot be reached, or that goes away, is tried again. An error of this package
        that `handle` raises is logged, and the server is told that there is no answer.

        Raises
        ------
        NotAdmitted
            When the server does not know the key, or is not the one that the certificate is for.
        """
        wait, told, was_there = POLL, "", False
        while not self._stop.is_set():
            try:
                with self._client() as client:
                    self._activate(client)
                    on_connect()
                    wait, told, was_there = POLL, "", True
                    self._work(client, handle, on_sent)
            except httpx.HTTPError as error:
                self._check_certificate(error)
                if self._stop.is_set():
                    break  # the server was faster, which is no harm
                if told != _reason(error):
                    told = _reason(error)
                    # A server that has done its run goes away.
                    level = logging.INFO if was_there else logging.WARNING
                    _log.log(level, "no connection to %s: %s; waiting for it", self.address, told)
                self._stop.wait(wait)
                wait = min(2 * wait, MOST_WAIT)

    def stop(self) -> None:
        """End `serve`, after the message that is being answered."""
        self._stop.set()

    def _client(self) -> FleetHttpClient:
        verify: ssl.SSLContext | bool = False
        if self.root_certificate is not None:
            try:
                verify = ssl.create_default_context(cafile=str(self.root_certificate))
            except OSError as error:
                raise ParameterError(f"{self.root_certificate} cannot be read: {error}") from error
        return _Client(
            f"{'http' if self.root_certificate is None else 'https'}://{self.address}",
            verify,
            [self._signing],
        )

    def _activate(self, client: FleetHttpClient) -> None:
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT)
        try:
            found = client.ActivateNode(request)
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in _NOT_LET_IN:
                raise
            raise NotAdmitted(
                f"{self.address} does not let this node in: its key is not registered there. "
                "Give your card to the server's operator, who registers it"
            ) from error
        self._node = Node(node_id=found.node_id)

    def _check_certificate(self, error: httpx.HTTPError) -> None:
        """Raise what trying again would not mend."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise NotAdmitted(
                    f"{self.address} is not the server that {self.root_certificate} is for: "
                    f"{cause.verify_message.rstrip('.')}. Nothing was sent; ask its operator for "
                    "ca.pem, and by which name it is reached"
                ) from error
            cause = cause.__cause__ or cause.__context__

    def _work(
        self,
        client: FleetHttpClient,
        handle: Callable[[bytes], bytes],
        on_sent: Callable[[], object],
    ) -> None:
        over = threading.Event()
        beating = threading.Thread(target=self._beat, args=(over,), daemon=True)
        beating.start()
        heard = time.monotonic()
        try:
            self._deliver(client, on_sent)
            while not self._stop.is_set():
                found = client.PullMessages(PullMessagesRequest(node=self._node))
                if found.messages_list:
                    self._reply = self._answer(client, handle, found)
                    self._deliver(client, on_sent)
                    heard = time.monotonic()
                else:
                    idle = time.monotonic() - heard > IDLE_AFTER
                    self._stop.wait(IDLE_POLL if idle else POLL)
            # What a node has answered counts for nothing once it is gone: let the server look.
            time.sleep(FAREWELL)
        finally:
            over.set()
        client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))

    def _beat(self, over: threading.Event) -> None:
        """Tell the server that this node is there, however long an answer takes."""
        with self._client() as client:
            while not over.wait(HEARTBEAT / 3):
                self._beat_once(client)

    def _beat_once(self, client: FleetHttpClient) -> bool:
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT)
        try:
            return bool(client.SendNodeHeartbeat(request).success)
        except httpx.HTTPError as error:
            _log.debug("no heartbeat: %s", _reason(error))
            return False

    def _answer(
        self, client: FleetHttpClient, handle: Callable[[bytes], bytes], found: Any
    ) -> Message | None:
        """The reply to a message; None where it is no request."""
        try:
            head, asked = self._request(client, found)
        except httpx.TransportError:
            raise
        except Exception as error:  # there is no end of what a server could send
            _log.warning("a message that is no request was not answered: %s", _kind(error))
            return None
        try:
            reply: RecordDict | Error = packed(handle(asked))
        except SecureFedClustError as error:
            _log.warning("not answered: %s", error)
            reply = _REFUSED
        except Exception:
            _log.exception("not answered, because of an error in this program")
            reply = _REFUSED
        return _reply(reply, head)

    def _deliver(self, client: FleetHttpClient, on_sent: Callable[[], object]) -> None:
        """Send the last reply; where the connection breaks it is kept, and sent by the next one."""
        if self._reply is None:
            return
        try:
            self._push(client, self._reply)
        except httpx.HTTPStatusError as error:
            _log.warning("the server did not take a reply: %s", _reason(error))
        self._reply = None
        on_sent()

    def _request(self, client: FleetHttpClient, found: Any) -> tuple[Message, bytes]:
        """A message, and the bytes in it."""
        head = message_from_proto(found.messages_list[0])
        number, run = head.metadata.message_id, head.metadata.run_id
        contents = {}
        for each in iterate_object_tree(found.message_object_trees[0]):
            contents[each.object_id] = self._object(client, run, each.object_id)
        message = inflate_object_from_contents(number, contents)
        asked = message.content[RECORD][FIELD]  # type: ignore[attr-defined]
        if type(asked) is not bytes:
            raise ProtocolError("the request is not bytes")
        return head, asked

    def _object(self, client: FleetHttpClient, run: int, number: str) -> bytes:
        """A part of a message, which may come a moment after it."""
        request = PullObjectRequest(node=self._node, run_id=run, object_id=number)
        until = time.monotonic() + TIMEOUT
        while not (found := client.PullObject(request)).object_available:
            if not found.object_found or time.monotonic() > until:
                raise ProtocolError("a part of the request is missing")
            time.sleep(POLL)
        return bytes(found.object_content)

    def _push(self, client: FleetHttpClient, message: Message) -> None:
        message.metadata.__dict__["_message_id"] = message.object_id
        with no_object_id_recompute():
            tree, objects = get_object_tree(message), get_all_nested_objects(message)
            found = client.PushMessages(
                PushMessagesRequest(
                    node=self._node,
                    messages_list=[message_to_proto(remove_content_from_message(message))],
                    message_object_trees=[tree],
                )
            )
            for number in set(found.objects_to_push) & set(objects):
                client.PushObject(
                    PushObjectRequest(
                        node=self._node,
                        run_id=message.metadata.run_id,
                        session_id=found.session_id,
                        object_id=number,
                        object_content=objects[number].deflate(),
                    )
                )


class _Client(FleetHttpClient):
    """Flower's, which would go wherever the server sends it, unencrypted if need be.

    Without encryption it does not go by way of a proxy either. And it does not compare versions of
    Flower: a server could end this process by that, and have Flower's makers told of it.
    """

    def __init__(self, url: str, verify: ssl.SSLContext | bool, interceptors: list[Any]) -> None:
        super().__init__(url, verify=verify, interceptors=interceptors)
        self._client.close()
        self._client = httpx.Client(
            verify=verify, timeout=TIMEOUT, follow_redirects=False, trust_env=bool(verify)
        )

    def _unary_unary(self, **call: Any) -> Any:
        try:
            return super()._unary_unary(**call)
        except ValueError as error:
            raise httpx.DecodingError("its answer cannot be read") from error


class _Signing:
    """Signs each call with the node's key, by the server's clock."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, public: bytes) -> None:
        self._key = key
        self._public = b64encode(public).decode()
        self._ahead = timedelta()

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        """Add what Flower's node authentication asks for, once more if it is for the clock."""
        ahead = self._ahead
        self._sign(context.request, ahead)
        response = call_next(context)
        if response.status_code == httpx.codes.UNAUTHORIZED and self._correct(ahead, response):
            self._sign(context.request, self._ahead)
            response = call_next(context)
        return response

    def _sign(self, request: httpx.Request, ahead: timedelta) -> None:
        signed_at = (datetime.now(UTC) + ahead).isoformat()
        signature = sign_message(self._key, signed_at.encode("ascii"))
        request.headers.update(
            {
                FLEET_HTTP_PUBLIC_KEY_HEADER: self._public,
                TIMESTAMP_HEADER: signed_at,
                FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode(),
            }
        )

    def _correct(self, ahead: timedelta, refused: httpx.Response) -> bool:
        """Go by the server's clock from now on; say whether it is not the one that was signed by.

        Heartbeats are signed in another thread, which may have found it out already.
        """
        try:
            theirs = parsedate_to_datetime(refused.headers["date"])
            found = theirs - datetime.now(UTC)
        except (KeyError, ValueError, TypeError):
            return False
        if abs((found - ahead).total_seconds()) < _SKEW:
            return False
        if abs(found.total_seconds()) > _MOST_SKEW:
            return False
        if abs((found - self._ahead).total_seconds()) >= _SKEW:
            self._ahead = found
            _log.warning(
                "this machine's clock is %.0f s off the server's: going by the server's; set the "
                "clock",
                -found.total_seconds(),
            )
        return True


_NOT_LET_IN = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.PRECONDITION_FAILED)
_REFUSED = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "no answer")


def _reply(content: RecordDict | Error, asked: Message) -> Message:
    message = Message(content, reply_to=asked)
    # Valid for as long as the request is, by whatever clock that was set.
    message.metadata.__dict__["_created_at"] = asked.metadata.created_at
    message.metadata.ttl = asked.metadata.ttl
    return message


def _kind(error: Exception) -> str:
    return str(error) if isinstance(error, SecureFedClustError) else type(error).__name__


def _reason(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"{error.response.status_code}"
    if isinstance(error, httpx.RemoteProtocolError):
        return f"{error} Is one end --insecure, and the other not?"
    return str(error) or type(error).__name__
