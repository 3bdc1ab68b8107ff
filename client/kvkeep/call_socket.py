"""Calls to the daemon of this host on the session's call socket; no gRPC.

The frames are those of proto/kvkeep/v1/shared_memory.md, section 1. Two facts shape this module:

- A call takes 20 to 150 us, less than it costs a thread to sleep and be woken. So the caller looks
  for its reply a while before it sleeps.
- In an engine other Python threads are always busy, and a thread that gives the GIL up gets it back
  only after a switch interval of 5 ms. So sending and looking keep the GIL; only sleeping drops it.

Whoever waits first reads for all who wait.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.errors import DeadlineError, SessionLostError

if TYPE_CHECKING:
    from google.protobuf.message import Message

# Bytes of the payload, method or status, 0, ms until a retry makes sense, call id.
_HEADER: Final = struct.Struct("<IHHII")
_READ_NBYTES: Final = 1 << 18
_CALL_IDS: Final = 1 << 32
# poll() takes no more than 2^31 milliseconds.
_SLEEP_MAX_S: Final = 3600.0
_HUNG_UP: Final = "the daemon hung up: the session is over"
# Longer than the daemon takes for a call that copies nothing. On one core it could not answer.
_LOOK_S: Final = 0.0006 if len(os.sched_getaffinity(0)) > 1 else 0.0

# PyDLL keeps the GIL.
_libc: Final = ctypes.PyDLL(None, use_errno=True)
_send: Final = _libc.send
_send.restype = ctypes.c_ssize_t
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_recv: Final = _libc.recv
_recv.restype = ctypes.c_ssize_t
_recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_AGAIN: Final = (errno.EAGAIN, errno.EINTR)
_SEND_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Reply(NamedTuple):
    """What the daemon answered.

    Attributes:
        status: As gRPC numbers them; 0 = OK.
        retry_after_s: With RESOURCE_EXHAUSTED.
        payload: The response message, or a sentence.
    """

    status: int
    retry_after_s: float
    payload: bytes


class PendingCall:
    """A call that was sent."""

    __slots__ = ("call_id", "look_s", "reply", "until_s", "what")

    def __init__(self, call_id: int, what: str, until_s: float, look_s: float) -> None:
        """Made by `CallSocket.begin`."""
        self.call_id = call_id
        self.what = what
        self.until_s = until_s
        self.look_s = look_s
        self.reply: Reply | None = None


class CallSocket:
    """One session's calls. Any thread may call; `close` wakes all who wait.

    The descriptor goes with the last reference, never under a thread that is using it.
    """

    def __init__(self, fd: int) -> None:
        """Takes `fd` over."""
        self._socket = socket.socket(fileno=fd)
        self._fd = fd
        self._ids = itertools.count(1)
        self._waiting: dict[int, PendingCall] = {}
        self._send_lock = threading.Lock()
        # Guards `_reading` and wakes who waits while another reads.
        self._changed = threading.Condition(threading.Lock())
        self._reading = False
        self._sleepers = 0
        self._buffer = ctypes.create_string_buffer(_READ_NBYTES)
        self._view = memoryview(self._buffer).cast("B")
        self._unread = bytearray()
        self._lost = ""

    def begin(
        self, method: int, request: Message, timeout_s: float, what: str, *, quick: bool = True
    ) -> PendingCall:
        """Send a call. `quick`: its reply is worth looking for before the caller sleeps.

        Errors: DeadlineError, SessionLostError.
        """
        until_s = time.monotonic() + timeout_s
        payload = request.SerializeToString()
        call_id = next(self._ids) % _CALL_IDS
        pending = PendingCall(call_id, what, until_s, _LOOK_S if quick else 0.0)
        self._waiting[call_id] = pending
        try:
            with self._send_lock:
                self._send(_HEADER.pack(len(payload), method, 0, 0, call_id) + payload, pending)
        except BaseException:
            self._waiting.pop(call_id, None)
            raise
        return pending

    def wait(self, pending: PendingCall) -> Reply:
        """The reply to a call. Errors: as `begin`."""
        try:
            while pending.reply is None:
                if self._take_turn(pending):
                    try:
                        self._read_until(pending)
                    finally:
                        self._end_turn()
        finally:
            self._waiting.pop(pending.call_id, None)
        return pending.reply

    def close(self) -> None:
        """Calls under way and later ones raise SessionLostError. Idempotent."""
        self._lost = self._lost or "the session was closed"
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """In a forked child: let go without a word, for the parent goes on using it."""
        self._lost = "the session is the parent's"
        self._socket.close()

    def __del__(self) -> None:
        with suppress(AttributeError):
            self._socket.close()

    # --- sending

    def _send(self, frame: bytes, pending: PendingCall) -> None:
        begun = False
        while frame:
            if self._lost:
                raise self._failure(pending.what)
            sent = _send(self._fd, frame, len(frame), _SEND_FLAGS)
            if sent > 0:
                begun, frame = True, frame[sent:]
            elif ctypes.get_errno() in _AGAIN:
                self._wait_to_send(pending, begun=begun)
            else:
                self._lost = self._lost or _HUNG_UP

    def _wait_to_send(self, pending: PendingCall, *, begun: bool) -> None:
        """The daemon reads on when its replies are read, so that is done meanwhile."""
        left_s = pending.until_s - time.monotonic()
        if left_s <= 0:
            if begun:
                # Half a frame is out: nothing that follows would be understood.
                self.close()
            raise DeadlineError(f"{pending.what}: the daemon takes no calls")
        if self._poll(select.POLLOUT | select.POLLIN, left_s) & select.POLLIN and self._try_turn():
            try:
                self._read(pending.what)
            finally:
                self._end_turn()

    def _poll(self, events: int, timeout_s: float) -> int:
        """Sleep until one of the events, at most for a while; those that came."""
        poll = select.poll()
        poll.register(self._fd, events)
        ready = poll.poll(min(timeout_s, _SLEEP_MAX_S) * 1000)
        return ready[0][1] if ready else 0

    # --- receiving

    def _try_turn(self) -> bool:
        with self._changed:
            if self._reading:
                return False
            self._reading = True
            return True

    def _take_turn(self, pending: PendingCall) -> bool:
        """Wait for the reply, or to be who reads: True. Errors: DeadlineError."""
        with self._changed:
            while pending.reply is None and self._reading:
                self._sleepers += 1
                left_s = pending.until_s - time.monotonic()
                try:
                    if left_s <= 0 or not self._changed.wait(left_s):
                        raise DeadlineError(f"{pending.what}: no answer in time")
                finally:
                    self._sleepers -= 1
            if pending.reply is not None:
                return False
            self._reading = True
            return True

    def _end_turn(self) -> None:
        with self._changed:
            self._reading = False
            if self._sleepers:
                self._changed.notify_all()

    def _read_until(self, pending: PendingCall) -> None:
        """Read for all until this reply is here."""
        look_until_s = time.monotonic() + pending.look_s
        while pending.reply is None:
            if self._read(pending.what):
                continue
            now_s = time.monotonic()
            if now_s < look_until_s:
                continue
            if now_s >= pending.until_s:
                raise DeadlineError(f"{pending.what}: no answer in time")
            self._poll(select.POLLIN, pending.until_s - now_s)

    def _read(self, what: str) -> bool:
        """Take what is there; whether there was anything. Errors: those of a lost session."""
        if self._lost:
            raise self._failure(what)
        got = _recv(self._fd, self._buffer, _READ_NBYTES, socket.MSG_DONTWAIT)
        if got > 0:
            self._deliver(got)
            return True
        if got < 0 and ctypes.get_errno() in _AGAIN:
            return False
        self._lost = self._lost or _HUNG_UP
        raise self._failure(what)

    def _deliver(self, got: int) -> None:
        """Hand replies to who waits for them; those that nobody waits for are dropped."""
        unread = self._unread
        unread += self._view[:got]
        at, others = 0, False
        while len(unread) >= at + _HEADER.size:
            nbytes, status, _, retry_after_ms, call_id = _HEADER.unpack_from(unread, at)
            start, end = at + _HEADER.size, at + _HEADER.size + nbytes
            if len(unread) < end:
                break
            at = end
            pending = self._waiting.get(call_id)
            if pending is not None:
                payload = bytes(memoryview(unread)[start:end])
                pending.reply = Reply(status, retry_after_ms / 1000, payload)
                others = True
        del unread[:at]
        if others and self._sleepers:
            with self._changed:
                self._changed.notify_all()

    def _failure(self, what: str) -> SessionLostError:
        return SessionLostError(f"{what}: {self._lost}")
