"""The calls of one session: on its call socket, and on gRPC what that does not carry.

Together with `remote_channel` the only module that imports grpc.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import kvkeep.forking  # noqa: F401 - chooses gRPC's poller

# isort: split
import grpc

from kvkeep.call_socket import PendingCall, Reply
from kvkeep.checksums import seal
from kvkeep.errors import (
    DeadlineError,
    InvalidArgumentError,
    KVKeepError,
    NotSupportedError,
    ResourceExhaustedError,
    SessionLostError,
    UnavailableError,
)
from kvkeep.v1.admin_pb2 import StatsRequest, StatsResponse
from kvkeep.v1.admin_pb2_grpc import AdminStub
from kvkeep.v1.block_cache_pb2 import (
    AcquireRequest,
    AcquireResponse,
    AdvanceEpochRequest,
    AdvanceEpochResponse,
    AttachEvent,
    AttachRequest,
    LookupRequest,
    LookupResponse,
    OpenNamespaceRequest,
    OpenNamespaceResponse,
    PinRequest,
    PinResponse,
    PrefetchRequest,
    PrefetchResponse,
    ReleaseRequest,
    RemoteHello,
    RemoveRequest,
    RemoveResponse,
    RenewRequest,
    RenewResponse,
    UnpinRequest,
    UnpinResponse,
    WatchRequest,
    WatchResponse,
)
from kvkeep.v1.block_cache_pb2_grpc import BlockCacheStub
from kvkeep.v1.session_pb2 import CallMethod

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from google.protobuf.message import Message

    from kvkeep.call_socket import CallSocket, Reply

Response = TypeVar("Response")
# Room for the answer to limits.keys_max keys of a few ranks and groups: 16 bytes a block of each.
MESSAGE_NBYTES_MAX: Final = 64 * 1024 * 1024
_FIRST_HEARTBEAT_S: Final = 0.5
_ATTACH_AGAIN_S: Final = 0.2
OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_NBYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_NBYTES_MAX),
    # A call that fails is the caller's to repeat or to do without; it must fail at once.
    ("grpc.enable_retries", 0),
    ("grpc.http2.ping_timeout_ms", 2000),
    # A connection of its own: a new session does not wait out the back-off of an old one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.enable_http_proxy", 0),
)
# To another host: a connection that died without a word is given up after some 4 s, idle or not.
# The daemon permits a ping each half a second.
REMOTE_OPTIONS: Final = (
    *OPTIONS,
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
# Heartbeats to another host without an answer: so many are a session timeout.
_UNHEARD_MAX: Final = 3
# A commit copies, a removal may take long: looking for the reply would take a core from the daemon.
_UNHURRIED: Final = frozenset(
    {
        CallMethod.CALL_METHOD_COMMIT,
        CallMethod.CALL_METHOD_REMOVE,
    }
)
_NAMES: Final = {
    method: CallMethod.Name(method).removeprefix("CALL_METHOD_").title().replace("_", "")
    for method in CallMethod.values()
}
_SESSION_METADATA: Final = "kvkeep-session-bin"
_RETRY_AFTER_METADATA: Final = "kvkeep-retry-after-ms"


def _error(number: int, message: str, retry_after_s: float) -> KVKeepError:
    """From a status, numbered as gRPC does."""
    if number == _RESOURCE_EXHAUSTED:
        return ResourceExhaustedError(message, retry_after_s)
    return _ERRORS.get(number, KVKeepError)(message)


def _converted(error: grpc.RpcError, what: str) -> KVKeepError:
    code = error.code()
    return _error(code.value[0], f"{what}: {error.details() or code.name}", retry_after_of(error))


_RESOURCE_EXHAUSTED: Final[int] = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
# The one table from status codes to exceptions.
_BY_CODE: Final[dict[grpc.StatusCode, type[KVKeepError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.CANCELLED: UnavailableError,
    grpc.StatusCode.ABORTED: UnavailableError,
    grpc.StatusCode.UNAUTHENTICATED: SessionLostError,
    # What is not found is a namespace set or a lease, and both live in a session.
    grpc.StatusCode.NOT_FOUND: SessionLostError,
    grpc.StatusCode.FAILED_PRECONDITION: NotSupportedError,
    grpc.StatusCode.UNIMPLEMENTED: NotSupportedError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
}
# How gRPC reads the status 403 or 404 of HTTP, and that the service is not there.
_OF_NO_DAEMON: Final = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)
_ERRORS: Final[dict[int, type[KVKeepError]]] = {
    code.value[0]: kind for code, kind in _BY_CODE.items()
}


def _attach_failed(error: grpc.RpcError) -> KVKeepError:
    """As `_converted`; what a proxy or another service says to it is the word of no daemon."""
    if error.code() in _OF_NO_DAEMON:
        return UnavailableError(f"Attach: what answers is no kvkeep daemon: {error.details()}")
    return _converted(error, "Attach")


def call_failed(error: grpc.RpcError, what: str) -> KVKeepError:
    """As `_converted`, of a call that only closing the channel cancels."""
    if error.code() is grpc.StatusCode.CANCELLED:
        return SessionLostError(f"{what}: the session was closed")
    return _converted(error, what)


def retry_after_of(error: grpc.RpcError) -> float:
    """Seconds after which another try makes sense; 0 = the daemon does not say."""
    for datum in error.trailing_metadata() or ():
        if datum.key == _RETRY_AFTER_METADATA and datum.value.isdigit():
            return int(datum.value) / 1000
    return 0.0


def payload_of(reply: Reply, what: str) -> bytes:
    """The response message. Errors: what the daemon answered instead."""
    if reply.status:
        message = f"{what}: {reply.payload.decode(errors='replace')}"
        raise _error(reply.status, message, reply.retry_after_s)
    return reply.payload


def metadata_of(session_token: bytes) -> tuple[tuple[str, bytes], ...]:
    """What goes with each call; nothing without a token."""
    return ((_SESSION_METADATA, session_token),) if session_token else ()


class _Answers(Protocol):
    """A stream of gRPC's."""

    def __next__(self) -> WatchResponse: ...

    def cancel(self) -> object: ...


class ChangeStream:
    """A Watch under way. One thread reads; any may close."""

    def __init__(self, call: _Answers) -> None:
        """Made by `Transport.watch`."""
        self._call = call
        self._closed = False

    def next(self) -> WatchResponse | None:
        """The next answer; None = closed, or there is nothing more to watch.

        Errors: as of `Transport`.
        """
        try:
            return next(self._call)
        except StopIteration:
            return None
        except grpc.RpcError as error:
            if self._closed:
                return None
            raise call_failed(error, "Watch") from error

    def close(self) -> None:
        """Ends it."""
        self._closed = True
        self._call.cancel()


class Transport:
    """The calls of one session. Any thread may call.

    Attributes:
        calls: Those that are under way on the call socket.

    Every call takes its deadline in seconds and raises a KVKeepError: InvalidArgumentError,
    DeadlineError, UnavailableError, SessionLostError, NotSupportedError, ResourceExhaustedError.
    """

    def __init__(
        self, *, target: str, session_token: bytes, calls: CallSocket, quick: bool = True
    ) -> None:
        """Opens nothing: the channel connects with the first call.

        `target` is where the daemon listens, as gRPC writes it. Without a token it is on another
        host, and `Attach` brings one: see `use_token`. `quick`: replies are worth looking for,
        since nobody in this process has to run for them.
        """
        self._quick = quick
        self.calls = calls
        options = OPTIONS if session_token else REMOTE_OPTIONS
        self._channel = grpc.insecure_channel(target, options=options)
        self._stub: BlockCacheStub = BlockCacheStub(self._channel)
        self._admin: AdminStub = AdminStub(self._channel)
        self._metadata = metadata_of(session_token)

    def use_token(self, session_token: bytes) -> None:
        """For all calls from now on."""
        self._metadata = metadata_of(session_token)

    def pending(
        self,
        method: CallMethod.ValueType,
        timeout_s: float,
        on_reply: Callable[[Reply | None], None] | None = None,
    ) -> PendingCall:
        """A call to be sent with `send`. `on_reply`: see `PendingCall`."""
        until_s = time.monotonic() + timeout_s
        quick = self._quick and method not in _UNHURRIED
        return PendingCall(method, _NAMES[method], until_s, quick=quick, on_reply=on_reply)

    def send(self, pending: PendingCall, request: Message) -> None:
        """Send it, without waiting. However this ends, `on_reply` hears of it."""
        try:
            self.calls.begin(pending, request.SerializeToString())
        except BaseException:
            self.calls.leave(pending)
            raise

    def result(self, pending: PendingCall) -> bytes:
        """Wait for the response message of a call that was begun."""
        return payload_of(self.calls.wait(pending), pending.what)

    def _call(self, method: CallMethod.ValueType, request: Message, timeout_s: float) -> bytes:
        pending = self.pending(method, timeout_s)
        self.send(pending, request)
        return self.result(pending)

    def open_namespace(
        self, request: OpenNamespaceRequest, timeout_s: float
    ) -> OpenNamespaceResponse:
        """OpenNamespace."""
        method = CallMethod.CALL_METHOD_OPEN_NAMESPACE
        return OpenNamespaceResponse.FromString(self._call(method, request, timeout_s))

    def lookup(self, request: LookupRequest, timeout_s: float) -> LookupResponse:
        """Lookup."""
        method = CallMethod.CALL_METHOD_LOOKUP
        return LookupResponse.FromString(self._call(method, request, timeout_s))

    def acquire(
        self, request: AcquireRequest, timeout_s: float, give_back: Callable[[int], None]
    ) -> AcquireResponse:
        """Acquire. `give_back` gets the lease that comes when nobody waits for it any more."""

        def on_reply(reply: Reply | None) -> None:
            if pending.left and reply is not None and not reply.status:
                give_back(AcquireResponse.FromString(reply.payload).lease_id)

        method = CallMethod.CALL_METHOD_ACQUIRE
        pending = self.pending(method, timeout_s, on_reply)
        self.send(pending, request)
        return AcquireResponse.FromString(self.result(pending))

    def renew(self, request: RenewRequest, timeout_s: float) -> RenewResponse:
        """Renew."""
        method = CallMethod.CALL_METHOD_RENEW
        return RenewResponse.FromString(self._call(method, request, timeout_s))

    def release(self, lease_ids: list[int]) -> None:
        """Release, without waiting for the answer. Raises nothing: leases expire by themselves."""
        request = ReleaseRequest(lease_ids=lease_ids)
        self.calls.post(CallMethod.CALL_METHOD_RELEASE, request.SerializeToString())

    def remove(self, request: RemoveRequest, timeout_s: float) -> RemoveResponse:
        """Remove."""
        method = CallMethod.CALL_METHOD_REMOVE
        return RemoveResponse.FromString(self._call(method, request, timeout_s))

    def stats(self, timeout_s: float) -> StatsResponse:
        """Admin.Stats."""
        return self._on_grpc(self._admin.Stats, StatsRequest(), timeout_s, "Stats")

    def advance_epoch(self, request: AdvanceEpochRequest, timeout_s: float) -> AdvanceEpochResponse:
        """AdvanceEpoch."""
        return self._on_grpc(
            self._stub.AdvanceEpoch, seal("AdvanceEpoch", request), timeout_s, "AdvanceEpoch"
        )

    def prefetch(self, request: PrefetchRequest, timeout_s: float) -> PrefetchResponse:
        """Prefetch."""
        return self._on_grpc(self._stub.Prefetch, seal("Prefetch", request), timeout_s, "Prefetch")

    def pin(self, request: PinRequest, timeout_s: float) -> PinResponse:
        """Pin."""
        return self._on_grpc(self._stub.Pin, seal("Pin", request), timeout_s, "Pin")

    def unpin(self, request: UnpinRequest, timeout_s: float) -> UnpinResponse:
        """Unpin."""
        return self._on_grpc(self._stub.Unpin, seal("Unpin", request), timeout_s, "Unpin")

    def _on_grpc(
        self, call: Callable[..., Response], request: Message, timeout_s: float, what: str
    ) -> Response:
        """A call that is made too seldom for the call socket."""
        self.calls.require_answers(what)
        asked_s = time.monotonic()
        try:
            return call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.calls.breaker.timed_out(asked_s)
            raise call_failed(error, what) from error
        except ValueError as error:
            # grpc says so when the channel is closed.
            raise SessionLostError(f"{what}: the session was closed") from error

    def watch(self, request: WatchRequest) -> ChangeStream:
        """Watch. Errors: SessionLostError."""
        try:
            return ChangeStream(self._stub.Watch(seal("Watch", request), metadata=self._metadata))
        except ValueError as error:
            raise SessionLostError("Watch: the session was closed") from error

    def attach(self, beats: Iterator[AttachRequest]) -> Iterator[AttachEvent]:
        """The event stream. Errors: ValueError when the channel is closed."""
        return self._stub.Attach(beats, metadata=self._metadata)

    def close(self) -> None:
        """Ends every call under way."""
        self._channel.close()


class AttachStream:
    """Keeps Attach open in a thread of its own: heartbeats up, events down.

    Losing the stream alone ends nothing, so it is opened again until `close`. A session that began
    with a `hello` on it ends with it, and when nothing answers its heartbeats any more.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        on_event: Callable[[AttachEvent], None],
        on_unknown_session: Callable[[], None],
        hello: RemoteHello | None = None,
    ) -> None:
        """Both callbacks run in the stream's thread. `hello`: of a client on another host."""
        self._transport = transport
        self._on_event = on_event
        self._on_unknown_session = on_unknown_session
        self._hello = hello
        self._interval_s = _FIRST_HEARTBEAT_S
        self._unheard = 0
        self._attached = threading.Event()
        self._closed = threading.Event()
        self._failure: KVKeepError | None = None
        self._thread = threading.Thread(target=self._run, name="kvkeep-attach", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Begin, and wait until the daemon says "attached".

        Errors: UnavailableError, DeadlineError.
        """
        self._thread.start()
        attached = self._attached.wait(timeout_s)
        if self._failure is not None:
            raise self._failure
        if not attached:
            raise DeadlineError(f"Attach: no answer in {timeout_s} s")

    def close(self) -> None:
        """Stop; the thread ends when the transport is closed too."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            over = threading.Event()
            try:
                for event in self._transport.attach(self._beats(over)):
                    self._handle(event)
            except grpc.RpcError as error:
                self._note(_attach_failed(error))
            except ValueError:
                return
            finally:
                over.set()
            if self._hello is not None:
                self._note(SessionLostError("Attach: the daemon is gone, and the session with it"))
                return
            self._closed.wait(_ATTACH_AGAIN_S)

    def _note(self, failure: KVKeepError) -> None:
        if not self._attached.is_set():
            self._failure = failure
            self._closed.set()
            self._attached.set()
        elif isinstance(failure, SessionLostError) and not self._closed.is_set():
            self._on_unknown_session()
            self._closed.set()

    def _handle(self, event: AttachEvent) -> None:
        self._unheard = 0
        self._on_event(event)
        if event.HasField("attached"):
            self._interval_s = max(0.05, event.attached.session_timeout_ms / 3000)
            self._attached.set()

    def _beats(self, over: threading.Event) -> Iterator[AttachRequest]:
        number = 0
        while not over.is_set() and not self._closed.is_set():
            number += 1
            yield AttachRequest(heartbeat=number, hello=self._hello if number == 1 else None)
            over.wait(self._interval_s)
            # Counted, not timed: a process that stood still itself has heard nothing yet.
            self._unheard += 1
            if self._hello is not None and self._unheard > _UNHEARD_MAX:
                self._note(SessionLostError("Attach: heartbeats are not answered any more"))
