"""The SEQPACKET socket that hands descriptors to clients: SO_PEERCRED, token, SCM_RIGHTS.

gRPC cannot carry descriptors. The protocol is section 1 of `proto/kvkeep/v1/shared_memory.md`. A
session is a connection here: EOF ends it. Whoever may connect is untrusted all the same: nothing
blocks, and what waits is bounded in number and in time.
"""

import asyncio
import errno
import logging
import math
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError

from kvkeep.v1 import session_pb2
from kvkeep_server.core.errors import KVKeepError
from kvkeep_server.index.layout import LAYOUT_VERSION
from kvkeep_server.service.session_memory import FdOffer
from kvkeep_server.service.sessions import HelloFacts, Welcome

HELLO_NBYTES_MAX = 4096
FDS_A_PACKET_MAX = 64

_ACCEPTED_AT_ONCE = 8
_ACCEPT_PAUSE_S = 0.1
# One line of the log a minute, however long it lasts.
_TOLD_EVERY_S = 60.0
_SEND_AGAIN_S = 0.02
# The socket is full, the kernel is short of memory, or too many descriptors are under way.
_SEND_LATER = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS}
_NOT_READING = "does not read its descriptors"
_PEERCRED = struct.Struct("=iII")  # pid, uid, gid

_log = logging.getLogger(__name__)


class SessionOpener(Protocol):
    """What a connection becomes."""

    async def open(self, facts: HelloFacts, /) -> Welcome:
        """Begins a session.

        Raises:
            KVKeepError: It may not; the sentence goes to the client.
            OSError: No descriptors, no memory.
        """
        ...

    def end(self, session_id: int, reason: str, /) -> None:
        """Ends it. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class HandoverLimits:
    """What clients may make the daemon hold.

    Attributes:
        pending_max: Connections that have not said hello; above it the oldest is closed.
        opening_max: Sessions that are being opened at a time. Who said hello meanwhile waits, and
            nobody else is accepted before.
        hello_timeout_s: Until a connection must have said hello.
        unsent_packets_max: Packets that wait because a client does not read; above it its session
            ends.
        unsent_timeout_s: Until a client must have read what waits.
        backlog: Of the listener.
    """

    pending_max: int = 128
    opening_max: int = 4
    hello_timeout_s: float = 2.0
    unsent_packets_max: int = 64
    unsent_timeout_s: float = 10.0
    backlog: int = 1024


class _Connection:
    """One client's socket and what waits to be sent on it. Owns socket and unsent descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.unsent: deque[tuple[bytes, list[int]]] = deque()
        self.deadline: asyncio.TimerHandle | None = None
        self.retry: asyncio.TimerHandle | None = None

    def flush(self) -> bool:
        """Sends what the kernel takes; True when nothing is left.

        Raises:
            OSError: The client is gone.
        """
        while self.unsent:
            payload, fds = self.unsent[0]
            try:
                socket.send_fds(self.sock, [payload], fds, socket.MSG_NOSIGNAL)
            except OSError as error:
                if error.errno in _SEND_LATER:
                    return False
                raise
            self.unsent.popleft()
            _close_fds(fds)
        return True

    def hung_up(self) -> bool:
        """Whether the client is gone by now."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def drop_timers(self) -> None:
        for timer in (self.deadline, self.retry):
            if timer is not None:
                timer.cancel()
        self.deadline = self.retry = None

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.sock)
        self.drop_timers()
        self.sock.close()
        while self.unsent:
            _close_fds(self.unsent.popleft()[1])


class FdHandover:
    """The listener and its connections. Event loop only.

    Args:
        path: Of the socket; nothing may lie there (see `core.ownership`).
        mode: Of the socket's file: who may connect.
        opener: Turns hellos into sessions.
        limits: See `HandoverLimits`.
    """

    def __init__(
        self,
        *,
        path: Path,
        mode: int,
        opener: SessionOpener,
        limits: HandoverLimits = HandoverLimits(),
    ) -> None:
        """See the class."""
        self.limits = limits
        self.refused_total = 0
        self.dropped_total = 0
        self._path = path
        self._mode = mode
        self._opener = opener
        self._listener: socket.socket | None = None
        self._resume: asyncio.TimerHandle | None = None
        self._told_s = -math.inf
        self._pending: dict[_Connection, None] = {}  # in the order of their arrival
        self._sessions: dict[int, _Connection] = {}
        # Said hello and wait for their turn, with what they said.
        self._said: deque[tuple[_Connection, bytes]] = deque()
        self._opening: set[asyncio.Task[None]] = set()

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Binds and listens.

        Raises:
            OSError: The path is taken, or cannot be written.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(str(self._path))
            # Before listen(), so that nobody connects under the mode that the umask gave.
            self._path.chmod(self._mode)
            listener.listen(self.limits.backlog)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def stop_listening(self) -> None:
        """Takes no new clients; those that are attached stay. Idempotent."""
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in list(self._pending):
            self._drop(connection)
        while self._said:
            self._said.popleft()[0].close()

    def close(self) -> None:
        """Closes everything; attached clients see EOF. Idempotent."""
        self.stop_listening()
        for task in list(self._opening):
            task.cancel()
        for session_id in list(self._sessions):
            self._end(session_id, "daemon stops")

    def hang_up(self, session_id: int) -> None:
        """Closes the connection of a session that ended otherwise. Unknown ids are ignored."""
        connection = self._sessions.pop(session_id, None)
        if connection is not None:
            connection.close()

    # --- accept -----------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Takes what waits, a bounded number at a time, so that a storm does not stop the loop."""
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._listener is None:
                return
            if self._said:
                asyncio.get_running_loop().remove_reader(self._listener)
                return
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in {errno.ECONNABORTED, errno.EINTR, errno.EPROTO}:
                    continue
                self._pause(error)
                return
            self._welcome_later(sock)

    def _pause(self, error: OSError) -> None:
        """Out of descriptors or memory: the listener stays readable, so trying on would spin."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._told_s + _TOLD_EVERY_S:
            _log.warning("accept paused", extra={"error": str(error)})
            self._told_s = loop.time()
        assert self._listener is not None
        loop.remove_reader(self._listener)
        self._resume = loop.call_later(_ACCEPT_PAUSE_S, self._listen_again)

    def _listen_again(self) -> None:
        self._resume = None
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _welcome_later(self, sock: socket.socket) -> None:
        sock.settimeout(0.0)
        connection = _Connection(sock)
        if len(self._pending) >= self.limits.pending_max:
            self._drop(next(iter(self._pending)))
        self._pending[connection] = None
        loop = asyncio.get_running_loop()
        connection.deadline = loop.call_later(self.limits.hello_timeout_s, self._drop, connection)
        loop.add_reader(sock, self._hello, connection)
        self._hello(connection)  # most clients have said it by now

    def _drop(self, connection: _Connection) -> None:
        """Closes a connection that did not say hello."""
        del self._pending[connection]
        self.dropped_total += 1
        connection.close()

    # --- hello ------------------------------------------------------------------------------------

    def _hello(self, connection: _Connection) -> None:
        try:
            packet, _, flags, _ = connection.sock.recvmsg(HELLO_NBYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        if not packet:
            self._drop(connection)  # EOF
            return
        del self._pending[connection]
        if flags & socket.MSG_TRUNC:
            self._refuse(connection, f"a SideHello has at most {HELLO_NBYTES_MAX} bytes")
            return
        asyncio.get_running_loop().remove_reader(connection.sock)
        connection.drop_timers()
        self._said.append((connection, packet))
        self._open_next()

    def _open_next(self) -> None:
        """Opens sessions for those who said hello, a few at a time."""
        loop = asyncio.get_running_loop()
        while self._said and len(self._opening) < self.limits.opening_max:
            connection, packet = self._said.popleft()
            if connection.hung_up():
                self.dropped_total += 1
                connection.close()
                continue
            task = loop.create_task(self._open_or_close(connection, packet))
            self._opening.add(task)
            task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[None]) -> None:
        """Opened or refused: the next one has its turn; where nobody waits, others may come."""
        self._opening.discard(task)
        self._open_next()
        if not self._said and self._resume is None:
            self._listen_again()

    async def _open_or_close(self, connection: _Connection, packet: bytes) -> None:
        try:
            await self._open(connection, packet)
        except BaseException:
            connection.close()
            raise

    async def _open(self, connection: _Connection, packet: bytes) -> None:
        try:
            facts = _facts(connection.sock, packet)
            welcome = await self._opener.open(facts)
        except DecodeError:
            self._refuse(
                connection,
                "the first packet is not a SideHello (proto/kvkeep/v1/session.proto); "
                "connect with a kvkeep client",
            )
            return
        except KVKeepError as error:
            self._refuse(connection, str(error))
            return
        except OSError as error:
            self._refuse(connection, f"the daemon cannot open a session ({error}); try again")
            return
        session_id = welcome.session_id
        self._sessions[session_id] = connection
        asyncio.get_running_loop().add_reader(connection.sock, self._after_hello, session_id)
        _log.info(
            "session opened",
            extra={"session": session_id, "client": facts.client_name, "pid": facts.pid},
        )
        connection.unsent.extend(_packets(welcome.fds, sequence=0, welcome=welcome))
        self._flush(session_id)

    def _refuse(self, connection: _Connection, sentence: str) -> None:
        """Answers with a sentence, best effort, and closes."""
        self.refused_total += 1
        _log.warning("hello refused", extra={"reason": sentence})
        answer = session_pb2.SidePacket(error=sentence, layout_version=LAYOUT_VERSION)
        connection.unsent.append((answer.SerializeToString(), []))
        try:
            connection.flush()
        except OSError:
            _log.debug("refused client is gone")
        connection.close()

    def _after_hello(self, session_id: int) -> None:
        """EOF, or a client that breaks the protocol."""
        connection = self._sessions[session_id]
        try:
            packet = connection.sock.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(session_id, f"connection lost: {error.strerror}")
            return
        self._end(session_id, "sent more than a hello" if packet else "client closed")

    def _end(self, session_id: int, reason: str) -> None:
        self._sessions.pop(session_id).close()
        self._opener.end(session_id, reason)

    # --- descriptors ------------------------------------------------------------------------------

    def send(self, session_id: int, sequence: int, fds: list[FdOffer]) -> None:
        """Sends descriptors of an event, and closes them here. Never blocks.

        A client that does not read is closed and its session ended. A session that is not connected
        (any more) gets nothing.

        Args:
            session_id: Of the `Welcome`.
            sequence: Of the event, from 1.
            fds: Theirs; owned by this object from now on.
        """
        connection = self._sessions.get(session_id)
        if connection is None:
            _close_fds([offer.fd for offer in fds])
            return
        connection.unsent.extend(_packets(fds, sequence=sequence, welcome=None))
        self._flush(session_id)
        if len(connection.unsent) > self.limits.unsent_packets_max:
            self._end(session_id, _NOT_READING)

    def _flush(self, session_id: int) -> None:
        """Sends what waits. The rest follows soon, or the session ends."""
        connection = self._sessions[session_id]
        try:
            done = connection.flush()
        except OSError as error:
            self._end(session_id, f"connection lost: {error.strerror}")
            return
        if done:
            connection.drop_timers()
            return
        loop = asyncio.get_running_loop()
        if connection.retry is not None:
            connection.retry.cancel()
        connection.retry = loop.call_later(_SEND_AGAIN_S, self._flush, session_id)
        if connection.deadline is None:
            connection.deadline = loop.call_later(
                self.limits.unsent_timeout_s, self._end, session_id, _NOT_READING
            )


def _facts(sock: socket.socket, packet: bytes) -> HelloFacts:
    """What the client says, and what the kernel says of it.

    Raises:
        DecodeError: Not a SideHello.
        OSError: The kernel does not say.
    """
    hello = session_pb2.SideHello.FromString(packet)
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    pid, uid, gid = _PEERCRED.unpack(raw)
    return HelloFacts(
        client_name=hello.client_name,
        layout_versions=tuple(hello.layout_versions),
        staging_nbytes=hello.staging_nbytes,
        credential=hello.credential,
        uid=uid,
        gid=gid,
        pid=pid,
    )


def _packets(
    offers: Sequence[FdOffer], *, sequence: int, welcome: Welcome | None
) -> list[tuple[bytes, list[int]]]:
    """SidePackets of one sequence, at most 64 descriptors each."""
    packets = []
    for start in range(0, max(len(offers), 1), FDS_A_PACKET_MAX):
        part = offers[start : start + FDS_A_PACKET_MAX]
        packet = session_pb2.SidePacket(
            sequence=sequence,
            layout_version=LAYOUT_VERSION,
            more=start + FDS_A_PACKET_MAX < len(offers),
        )
        if welcome is not None:
            packet.session_token = welcome.token
            packet.server_epoch = welcome.server_epoch
        for offer in part:
            packet.fds.add(
                kind=session_pb2.FdKind.ValueType(offer.kind), id=offer.id, nbytes=offer.nbytes
            )
        packets.append((packet.SerializeToString(), [offer.fd for offer in part]))
    return packets


def _close_fds(fds: Sequence[int]) -> None:
    for fd in fds:
        socket.close(fd)
