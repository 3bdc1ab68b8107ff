"""Call sockets: the calls of a session without gRPC, on a socketpair that its welcome brings.

A call on gRPC takes 0.5 ms and several threads on both sides; the same message on a stream socket
takes 20 us and none. The frames are those of `proto/kvkeep/v1/shared_memory.md`, section 1. What
comes is untrusted: a frame is bounded by what its call can need, and what arrives in pieces by
`FrameRoom`; a turn of the loop serves one client for a bounded time, and who does not read its
replies or has too many calls under way is not read from.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1 import session_pb2
from kvkeep_server.core.errors import KVKeepError, ResourceExhaustedError
from kvkeep_server.rpc import convert
from kvkeep_server.rpc.block_calls import BlockCalls
from kvkeep_server.rpc.frame_room import Claim, FrameRoom
from kvkeep_server.rpc.interceptors import CallMeter
from kvkeep_server.rpc.request_limits import RequestLimits, no_message
from kvkeep_server.service.session_memory import FdKind, FdOffer
from kvkeep_server.service.sessions import FdSender, HelloFacts, Session, Sessions, Welcome

# A request is: bytes of the payload, method, 0, 0, call id. A reply: bytes, status, flags, ms until
# a retry makes sense, call id.
HEADER = struct.Struct("<IHHII")
_MORE = 1
# Calls of one client that wait are served for so long, then others have their turn.
_TURN_S = 0.002
_UNSENT_NBYTES_MAX = 1 << 20
_BUFFER_NBYTES = 1 << 20
# Of one client. Who has more threads that wait, waits a little longer.
_RUNNING_MAX = 256
# Of one client, as many as its leases may be with blocks on their way; more is no use of them.
_STREAMS_MAX = 8192
_STREAM_RETRY_S = 0.05
# What a client may leave half without asking for room, and what is read at once.
_FREE_NBYTES = 64 << 10
_READ_NBYTES = 256 << 10
# For who left a call half sent: those who waited have come and gone by then.
_RETRY_AFTER_S = 0.1
# Of all clients together, if one request is not larger.
_ROOM_NBYTES = 16 << 20


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
    session_pb2.CALL_METHOD_AWAIT: ("Await", pb.AwaitRequest),
}


class CallSockets:
    """All call sockets. Wraps how sessions begin and end, so that each has one. Event loop only.

    Implements `SessionOpener` for the fd socket, and `FdSender` for the sessions.

    Args:
        calls: Do the work.
        sessions: Begun and ended here.
        meter: Counts calls.
        limits: Of requests.
    """

    def __init__(
        self, *, calls: BlockCalls, sessions: Sessions, meter: CallMeter, limits: RequestLimits
    ) -> None:
        """See the class."""
        self.calls = calls
        self.sessions = sessions
        self.limits = limits
        self.room = FrameRoom(max(_ROOM_NBYTES, HEADER.size + limits.message_nbytes_max))
        # What a socket gave is taken out before another is read.
        self.scratch = memoryview(bytearray(_READ_NBYTES))
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
        self.streamed: dict[str, Callable[[Session, Any], AsyncIterator[Message]]] = {
            "Await": calls.arrivals,
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


class _Connection(asyncio.BufferedProtocol):
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
        self._to_skip = 0
        self._claim: Claim | None = None
        self._has_room = True
        self._overdue = 0
        self._next_turn: asyncio.Handle | None = None
        self._turn_over = False
        self._unsent = False
        self._running = 0
        self._streams = 0

    # --- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=_UNSENT_NBYTES_MAX)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Never more than the request that has room, or than needs none."""
        wanted = _READ_NBYTES if self._to_skip else _FREE_NBYTES
        if self._claim is not None:
            wanted = self._claim.nbytes - len(self._unread)
        return self._sockets.scratch[:wanted]

    def buffer_updated(self, nbytes: int) -> None:
        self._unread += self._sockets.scratch[:nbytes]
        if self._next_turn is None:
            self._serve()

    def pause_writing(self) -> None:
        self._unsent = True
        self._read_or_pause()

    def resume_writing(self) -> None:
        self._unsent = False
        self._serve_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._end("the call socket was closed")

    def _end(self, reason: str) -> None:
        if self.session is not None:
            self._sockets.end(self.session.session_id, reason)

    def close(self) -> None:
        """Lets go; what is in the kernel's hands still arrives."""
        self._give_room_back()
        if self._next_turn is not None:
            self._next_turn.cancel()
        transport, self.transport = self.transport, None
        if transport is not None:
            # Who does not read must not keep it open.
            unsent = transport.get_write_buffer_size() > 0
            (transport.abort if unsent else transport.close)()

    # --- calls

    def _serve_soon(self) -> None:
        if self._next_turn is None and self.transport is not None:
            self._next_turn = self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        """Serves what has arrived whole, for one turn."""
        self._next_turn, self._turn_over = None, False
        until_s, at = self._loop.time() + _TURN_S, 0
        while self.transport is not None and not self._unsent and self._running < _RUNNING_MAX:
            end = self._serve_one(at)
            if end == at:
                break
            at = end
            if self._turn_over or self._loop.time() > until_s:
                self._serve_soon()
                break
        del self._unread[:at]
        self._read_or_pause()

    def _serve_one(self, at: int) -> int:
        """Serves the frame that begins here, or passes over one that is refused. Where the next one
        begins: here, as long as this one is not whole."""
        unread, limits = self._unread, self._sockets.limits
        if self._to_skip:
            skipped = min(self._to_skip, len(unread) - at)
            self._to_skip -= skipped
            return at + skipped
        if len(unread) < at + HEADER.size:
            return at
        nbytes: int
        nbytes, method, _, _, call_id = HEADER.unpack_from(unread, at)
        if nbytes > limits.message_nbytes_max:
            self._end(f"sent a call of {nbytes} bytes")
            return at
        start, end = at + HEADER.size, at + HEADER.size + nbytes
        name, kind = METHODS.get(method, ("", Message))
        call = _Call(name, call_id, self._loop.time())
        if not name or limits.too_large(name, nbytes) is not None:
            self._pass_over(call, method, nbytes)
            return start
        if len(unread) < end:
            self._claim_room(end - at)
            return at
        self._give_room_back()
        self._call(call, kind, bytes(memoryview(unread)[start:end]))
        return end

    def _pass_over(self, call: _Call, method: int, nbytes: int) -> None:
        """Answers by the header alone; the payload is dropped as it comes."""
        self._to_skip = nbytes
        refused = self._sockets.limits.too_large(call.name, nbytes)
        if call.name and refused is not None:
            self._refuse(call, refused)
        else:
            sentence = f"call {method}: not one of CallMethod in session.proto"
            self._reply(call, grpc.StatusCode.UNIMPLEMENTED, sentence.encode())

    def _claim_room(self, nbytes: int) -> None:
        """For the rest of a frame; it is not read before there is room."""
        if self._claim is None and nbytes > _FREE_NBYTES:
            self._claim = Claim(nbytes, self._on_room, self._on_overdue, self._overdue)
            self._has_room = self._sockets.room.claim(self._claim)

    def _on_room(self) -> None:
        self._has_room = True
        self._read_or_pause()

    def _on_overdue(self) -> None:
        """The rest of the call is passed over when it comes."""
        self._overdue += 1
        nbytes, method, _, _, call_id = HEADER.unpack_from(self._unread)
        self._to_skip = nbytes - (len(self._unread) - HEADER.size)
        self._unread.clear()
        self._give_room_back()
        name, _ = METHODS[method]
        sentence = f"{name}: {nbytes} bytes came half while others waited for room; send it again"
        error = ResourceExhaustedError(sentence, retry_after_s=_RETRY_AFTER_S)
        self._refuse(_Call(name, call_id, self._loop.time()), error)

    def _give_room_back(self) -> None:
        claim, self._claim, self._has_room = self._claim, None, True
        if claim is not None:
            self._sockets.room.give_back(claim)

    def _read_or_pause(self) -> None:
        if self.transport is not None:
            busy = self._unsent or self._running >= _RUNNING_MAX
            if busy or self._next_turn is not None or not self._has_room:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _call(self, call: _Call, kind: type[Message], payload: bytes) -> None:
        session, name = self.session, call.name
        assert session is not None, "the client got its end before the session was open"
        self._sockets.sessions.alive(session)
        try:
            refused = self._sockets.limits.refusal(name, payload)
            if refused is not None:
                raise refused
            if name in self._sockets.streamed:
                answers = self._sockets.streamed[name](session, kind.FromString(payload))
                self._begin_stream(call, answers)
                return
            if name in self._sockets.begun:
                begin, render = self._sockets.begun[name]
                request = kind.FromString(payload)
                self._go_on(call, begin(session, request), partial(render, request))
                return
            answer = self._sockets.served[name](session, kind.FromString(payload))
            if isinstance(answer, Message):
                self._reply(call, grpc.StatusCode.OK, answer.SerializeToString())
            else:
                self._go_on(call, answer, _as_it_is)
        except DecodeError:
            self._refuse(call, no_message(name, len(payload)))
        except KVKeepError as error:
            self._refuse(call, error)

    def _go_on(self, call: _Call, work: Awaitable[Any], render: Callable[[Any], Message]) -> None:
        """Answers when the work is done. It begins in a turn of its own, before others of this
        client: what many of them do together would hold up the loop."""
        self._turn_over = True
        self._running += 1
        self._follow(work, partial(self._done, call, render))

    def _follow(self, work: Awaitable[Any], then: Callable[[asyncio.Future[Any]], None]) -> None:
        running = asyncio.ensure_future(work)
        self._sockets.running.add(running)
        running.add_done_callback(self._sockets.running.discard)
        running.add_done_callback(then)

    def _done(
        self, call: _Call, render: Callable[[Any], Message], done: asyncio.Future[Any]
    ) -> None:
        self._running -= 1
        if self._running == _RUNNING_MAX - 1:
            self._serve_soon()
        self._answer(call, render, done)

    def _answer(
        self, call: _Call, render: Callable[[Any], Message], done: asyncio.Future[Any]
    ) -> None:
        error = done.exception()
        if isinstance(error, KVKeepError):
            self._refuse(call, error)
        elif error is not None:
            # A bug, which the loop logs; the client learns by EOF.
            self._end(f"{call.name} failed")
            raise error
        else:
            self._reply(call, grpc.StatusCode.OK, render(done.result()).SerializeToString())

    def _begin_stream(self, call: _Call, answers: AsyncIterator[Message]) -> None:
        """Does not count as a call under way: it waits for disks, and others shall not."""
        if self._streams >= _STREAMS_MAX:
            msg = f"{_STREAMS_MAX} calls of {call.name} of this session are under way"
            raise ResourceExhaustedError(msg, retry_after_s=_STREAM_RETRY_S)
        self._streams += 1
        self._follow(self._stream(call, answers), partial(self._stream_done, call))

    def _stream_done(self, call: _Call, done: asyncio.Future[Any]) -> None:
        self._streams -= 1
        self._answer(call, _as_it_is, done)

    async def _stream(self, call: _Call, answers: AsyncIterator[Message]) -> Message:
        """Sends all answers but the end, which is an empty one."""
        async for answer in answers:
            self._send(call, grpc.StatusCode.OK, answer.SerializeToString(), flags=_MORE)
        return Empty()

    def _refuse(self, call: _Call, error: KVKeepError) -> None:
        code, retry_after_ms = convert.status_code(error), convert.retry_after_ms(error)
        self._reply(call, code, str(error).encode(), retry_after_ms)

    def _reply(
        self, call: _Call, code: grpc.StatusCode, payload: bytes, retry_after_ms: int = 0
    ) -> None:
        if call.name:
            took_s = self._loop.time() - call.began_s
            self._sockets.meter.note(f"BlockCache/{call.name}", code.name, took_s)
        self._send(call, code, payload, retry_after_ms)

    def _send(
        self,
        call: _Call,
        code: grpc.StatusCode,
        payload: bytes,
        retry_after_ms: int = 0,
        flags: int = 0,
    ) -> None:
        if self.transport is not None:
            number: int = code.value[0]
            header = HEADER.pack(len(payload), number, flags, retry_after_ms, call.call_id)
            self.transport.write(header + payload)


def _as_it_is(answer: Message) -> Message:
    return answer
