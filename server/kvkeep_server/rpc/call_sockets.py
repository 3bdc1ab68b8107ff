"""Call sockets: the unary calls of a session without gRPC, on a socketpair that its welcome brings.

A call on gRPC takes 0.5 ms and several threads on both sides; the same message on a stream socket
takes 20 us and none. The frames are those of `proto/kvkeep/v1/shared_memory.md`, section 1. What
comes is untrusted: a frame is bounded, a turn of the loop serves one client for a bounded time, and
who does not read its replies is not read from.
"""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError, Message

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1 import session_pb2
from kvkeep_server.core.errors import KVKeepError
from kvkeep_server.rpc import convert
from kvkeep_server.rpc.block_calls import BlockCalls
from kvkeep_server.rpc.interceptors import CallMeter
from kvkeep_server.service.session_memory import FdKind, FdOffer
from kvkeep_server.service.sessions import FdSender, HelloFacts, Session, Sessions, Welcome

# A request is: bytes of the payload, method, 0, 0, call id. A reply: bytes, status, 0, ms until a
# retry makes sense, call id.
HEADER = struct.Struct("<IHHII")
# Calls of one client that wait are served for so long, then others have their turn.
_TURN_S = 0.002
_UNSENT_NBYTES_MAX = 1 << 20
_BUFFER_NBYTES = 1 << 20


class _Call(NamedTuple):
    """A call under way.

    Attributes:
        name: Of its method; empty = there is no such method.
        call_id: The client's.
        began_s: When the daemon took it up.
    """

    name: str
    call_id: int
    began_s: float


Render = Callable[[Any, Any], Message]
# By number: the name of each method and its request message.
METHODS: dict[int, tuple[str, type[Message]]] = {
    session_pb2.CALL_METHOD_OPEN_NAMESPACE: ("OpenNamespace", pb.OpenNamespaceRequest),
    session_pb2.CALL_METHOD_LOOKUP: ("Lookup", pb.LookupRequest),
    session_pb2.CALL_METHOD_ACQUIRE: ("Acquire", pb.AcquireRequest),
    session_pb2.CALL_METHOD_RELEASE: ("Release", pb.ReleaseRequest),
    session_pb2.CALL_METHOD_RENEW: ("Renew", pb.RenewRequest),
    session_pb2.CALL_METHOD_COMMIT: ("Commit", pb.CommitRequest),
    session_pb2.CALL_METHOD_REMOVE: ("Remove", pb.RemoveRequest),
}


class CallSockets:
    """All call sockets. Wraps how sessions begin and end, so that each has one. Event loop only.

    Implements `SessionOpener` for the fd socket, and `FdSender` for the sessions.

    Args:
        calls: Do the work.
        sessions: Begun and ended here.
        meter: Counts calls.
        message_nbytes_max: Of a request.
    """

    def __init__(
        self, *, calls: BlockCalls, sessions: Sessions, meter: CallMeter, message_nbytes_max: int
    ) -> None:
        """See the class."""
        self.calls = calls
        self.sessions = sessions
        self.message_nbytes_max = message_nbytes_max
        self.sender: FdSender | None = None
        self.meter = meter
        self.served: dict[str, Callable[[Session, Any], Message | Awaitable[Message]]] = {
            "OpenNamespace": calls.open_namespace,
            "Lookup": calls.lookup,
            "Acquire": calls.acquire,
            "Release": calls.release,
            "Renew": calls.renew,
        }
        self.begun: dict[str, tuple[Callable[[Session, Any], Awaitable[Any]], Render]] = {
            "Commit": (calls.begin_commit, convert.commit_message),
            "Remove": (calls.remove, convert.removed_message),
        }
        # Tasks that nothing else refers to must be, to live.
        self.running: set[asyncio.Future[Any]] = set()
        self._connections: dict[int, _Connection] = {}

    async def open(self, facts: HelloFacts) -> Welcome:
        """Begins a session, and gives it a call socket.

        Raises:
            KVKeepError: As `Sessions.open`.
            OSError: No descriptors.
        """
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        connection = _Connection(self)
        try:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: connection, sock=own)
            welcome = await self.sessions.open(facts)
        except BaseException:
            theirs.close()
            own.close() if connection.transport is None else connection.close()
            raise
        # No await from here on: the welcome says what there is now, and events that come before
        # the fd socket knows the session would be lost.
        session = connection.session = self.sessions.get(welcome.token)
        self._connections[session.session_id] = connection
        offer = FdOffer(FdKind.CALLS, 0, 0, theirs.detach())
        return replace(welcome, fds=[*welcome.fds, offer])

    def end(self, session_id: int, reason: str) -> None:
        """Ends a session. Idempotent."""
        self._drop(session_id)
        self.sessions.end(session_id, reason)

    def send(self, session_id: int, sequence: int, fds: list[FdOffer]) -> None:
        """See `FdSender`."""
        assert self.sender is not None
        self.sender.send(session_id, sequence, fds)

    def hang_up(self, session_id: int) -> None:
        """See `FdSender`: the session ended otherwise than by EOF."""
        self._drop(session_id)
        assert self.sender is not None
        self.sender.hang_up(session_id)

    def _drop(self, session_id: int) -> None:
        connection = self._connections.pop(session_id, None)
        if connection is not None:
            connection.close()


class _Connection(asyncio.Protocol):
    """The daemon's end of one call socket.

    Attributes:
        session: Whose; None until it is open.
        transport: None before and after.
    """

    def __init__(self, sockets: CallSockets) -> None:
        self.session: Session | None = None
        self.transport: asyncio.Transport | None = None
        self._sockets = sockets
        self._loop = asyncio.get_running_loop()
        self._unread = bytearray()
        self._next_turn: asyncio.Handle | None = None
        self._unsent = False

    # --- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=_UNSENT_NBYTES_MAX)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if self._next_turn is None:
            self._serve()

    def pause_writing(self) -> None:
        self._unsent = True
        self._read_or_pause()

    def resume_writing(self) -> None:
        self._unsent = False
        if self._next_turn is None:
            self._serve()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._end("the call socket was closed")

    def _end(self, reason: str) -> None:
        if self.session is not None:
            self._sockets.end(self.session.session_id, reason)

    def close(self) -> None:
        """Lets go; what is in the kernel's hands still arrives."""
        if self._next_turn is not None:
            self._next_turn.cancel()
        transport, self.transport = self.transport, None
        if transport is not None:
            # Who does not read must not keep it open.
            unsent = transport.get_write_buffer_size() > 0
            (transport.abort if unsent else transport.close)()

    # --- calls

    def _serve(self) -> None:
        """Serves what has arrived whole, for one turn."""
        self._next_turn = None
        until_s = self._loop.time() + _TURN_S
        unread, at = self._unread, 0
        while self.transport is not None and len(unread) >= at + HEADER.size:
            nbytes, method, _, _, call_id = HEADER.unpack_from(unread, at)
            if nbytes > self._sockets.message_nbytes_max:
                self._end(f"sent a call of {nbytes} bytes")
                return
            start, end = at + HEADER.size, at + HEADER.size + nbytes
            if len(unread) < end:
                break
            at = end
            self._call(method, call_id, bytes(memoryview(unread)[start:end]))
            if self._unsent:
                break
            if self._loop.time() > until_s:
                self._next_turn = self._loop.call_soon(self._serve)
                break
        del unread[:at]
        self._read_or_pause()

    def _read_or_pause(self) -> None:
        if self.transport is not None:
            if self._unsent or self._next_turn is not None:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _call(self, method: int, call_id: int, payload: bytes) -> None:
        session = self.session
        assert session is not None, "the client got its end before the session was open"
        self._sockets.sessions.alive(session)
        name, kind = METHODS.get(method, ("", Message))
        call = _Call(name, call_id, self._loop.time())
        try:
            if name in self._sockets.begun:
                begin, render = self._sockets.begun[name]
                request = kind.FromString(payload)
                self._go_on(call, begin(session, request), partial(render, request))
            elif name:
                answer = self._sockets.served[name](session, kind.FromString(payload))
                if isinstance(answer, Message):
                    self._reply(call, grpc.StatusCode.OK, answer.SerializeToString())
                else:
                    self._go_on(call, answer, _as_it_is)
            else:
                sentence = f"call {method}: not one of CallMethod in session.proto"
                self._reply(call, grpc.StatusCode.UNIMPLEMENTED, sentence.encode())
        except DecodeError:
            sentence = f"{name}: the payload is not its request message"
            self._reply(call, grpc.StatusCode.INVALID_ARGUMENT, sentence.encode())
        except KVKeepError as error:
            self._refuse(call, error)

    def _go_on(self, call: _Call, work: Awaitable[Any], render: Callable[[Any], Message]) -> None:
        """Answers when the work is done."""
        running = asyncio.ensure_future(work)
        self._sockets.running.add(running)
        running.add_done_callback(partial(self._done, call, render))

    def _done(
        self, call: _Call, render: Callable[[Any], Message], done: asyncio.Future[Any]
    ) -> None:
        self._sockets.running.discard(done)
        error = done.exception()
        if isinstance(error, KVKeepError):
            self._refuse(call, error)
        elif error is not None:
            # A bug, which the loop logs; the client learns by EOF.
            self._end(f"{call.name} failed")
            raise error
        else:
            self._reply(call, grpc.StatusCode.OK, render(done.result()).SerializeToString())

    def _refuse(self, call: _Call, error: KVKeepError) -> None:
        code, retry_after_ms = convert.status_code(error), convert.retry_after_ms(error)
        self._reply(call, code, str(error).encode(), retry_after_ms)

    def _reply(
        self, call: _Call, code: grpc.StatusCode, payload: bytes, retry_after_ms: int = 0
    ) -> None:
        if call.name:
            took_s = self._loop.time() - call.began_s
            self._sockets.meter.note(f"BlockCache/{call.name}", code.name, took_s)
        if self.transport is not None:
            number: int = code.value[0]
            header = HEADER.pack(len(payload), number, 0, retry_after_ms, call.call_id)
            self.transport.write(header + payload)


def _as_it_is(answer: Message) -> Message:
    return answer
