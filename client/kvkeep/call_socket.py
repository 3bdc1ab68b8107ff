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
from kvkeep.waking import NAP_S, release

if TYPE_CHECKING:
    from google.protobuf.message import Message

# Bytes of the payload, method or status, 0, ms until a retry makes sense, call id.
_HEADER: Final = struct.Struct("<IHHII")
_READ_NBYTES: Final = 1 << 18
_CALL_IDS: Final = 1 << 32
# How long a sender naps while another sends.
_TURN_S: Final = 0.0005
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

    __slots__ = ("call_id", "look_s", "reply", "until_s", "wake", "what")

    def __init__(self, call_id: int, what: str, until_s: float, look_s: float) -> None:
        """Made by `CallSocket.begin`."""
        self.call_id = call_id
        self.what = what
        self.until_s = until_s
        self.look_s = look_s
        self.reply: Reply | None = None
        self.wake: threading.Lock | None = None  # released when there is news for its sleeper


class CallSocket:
    """One session's calls. Any thread may call; `close` wakes all who wait.

    An exception may come out of any line, since a signal's handler may raise: nothing is held
    across a call but by a `with` of a plain lock or under a `finally`, and whoever is interrupted
    while it takes bytes from the stream or puts them there closes it, because half a frame makes
    nonsense of all that follow.

    The descriptor goes with the last reference, never under a thread that is using it.
    """

    def __init__(self, fd: int) -> None:
        """Takes `fd` over."""
        self._socket = socket.socket(fileno=fd)
        self._fd = fd
        self._ids = itertools.count(1)
        self._waiting: dict[int, PendingCall] = {}
        # Guards the two turns, and `PendingCall.wake`.
        self._lock = threading.Lock()
        self._sending = False
        self._reading = False
        # Bytes are on their way into or out of the stream.
        self._putting = False
        self._taking = False
        self._buffer = ctypes.create_string_buffer(_READ_NBYTES)
        self._view = memoryview(self._buffer).cast("B")
        self._unread = bytearray()
        self._lost = ""
        # What could still arrive is of no use.
        self._deaf = False

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
        mine = sent = False
        try:
            while not mine:
                with self._lock:
                    if not self._sending:
                        self._sending = mine = True
                if not mine:
                    self._wait_for_turn(pending)
            self._send(_HEADER.pack(len(payload), method, 0, 0, call_id) + payload, pending)
            sent = True
        finally:
            if mine:
                if self._putting:
                    self.close()
                self._putting = self._sending = False
            if not sent:
                self._waiting.pop(call_id, None)
        return pending

    def wait(self, pending: PendingCall) -> Reply:
        """The reply to a call. Errors: as `begin`."""
        mine = False
        try:
            while pending.reply is None:
                with self._lock:
                    if not self._reading:
                        self._reading = mine = True
                    elif pending.wake is None:
                        pending.wake = threading.Lock()
                if mine:
                    self._read_until(pending)
                else:
                    self._sleep(pending)
        finally:
            if mine:
                self._stop_reading()
            self._waiting.pop(pending.call_id, None)
            self._pass_on()
        return pending.reply

    def close(self) -> None:
        """Calls under way, unless their reply is here, and later ones raise SessionLostError.

        Idempotent.
        """
        self._lost = self._lost or "the session was closed"
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """In a forked child: let go without a word, for the parent goes on using it."""
        self._lost, self._deaf = "the session is the parent's", True
        self._socket.close()

    def __del__(self) -> None:
        with suppress(AttributeError):
            self._socket.close()

    # --- sending

    def _wait_for_turn(self, pending: PendingCall) -> None:
        """Another sends: a matter of microseconds, unless the daemon takes nothing."""
        if time.monotonic() >= pending.until_s:
            raise DeadlineError(f"{pending.what}: the daemon takes no calls")
        self._poll(select.POLLOUT, _TURN_S)

    def _send(self, frame: bytes, pending: PendingCall) -> None:
        begun = False
        while frame:
            if self._lost:
                raise self._failure(pending.what)
            self._putting = True
            sent = _send(self._fd, frame, len(frame), _SEND_FLAGS)
            if sent > 0:
                begun, frame = True, frame[sent:]
            elif ctypes.get_errno() in _AGAIN:
                self._putting = begun
                self._wait_to_send(pending)
            else:
                self._lost = self._lost or _HUNG_UP
        self._putting = False

    def _wait_to_send(self, pending: PendingCall) -> None:
        """The daemon reads on when its replies are read, so that is done meanwhile."""
        left_s = pending.until_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(f"{pending.what}: the daemon takes no calls")
        if not self._poll(select.POLLOUT | select.POLLIN, left_s) & select.POLLIN:
            return
        mine = False
        try:
            with self._lock:
                if not self._reading:
                    self._reading = mine = True
            if mine:
                self._read(pending.what)
        finally:
            if mine:
                self._stop_reading()
                self._pass_on()

    def _poll(self, events: int, timeout_s: float) -> int:
        """Sleep until one of the events, at most for a while; those that came."""
        poll = select.poll()
        poll.register(self._fd, events)
        ready = poll.poll(min(timeout_s, _SLEEP_MAX_S) * 1000)
        return ready[0][1] if ready else 0

    # --- receiving

    def _sleep(self, pending: PendingCall) -> None:
        """Another reads: wait for its word, that the reply is here or that it is our turn.

        Not for long: who was interrupted may have given no word.
        """
        left_s = pending.until_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(f"{pending.what}: no answer in time")
        wake = pending.wake
        assert wake is not None
        if pending.reply is None:
            wake.acquire(timeout=min(left_s, NAP_S))

    def _pass_on(self) -> None:
        """One of those who sleep is to read from now on."""
        with self._lock:
            if self._reading:
                return
            for other in list(self._waiting.values()):
                if other.wake is not None and other.reply is None:
                    release(other.wake)
                    return

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

    def _stop_reading(self) -> None:
        """The turn is over; who was interrupted within it has lost the thread of the stream."""
        if self._taking:
            self._deaf = True
            self.close()
        self._taking = self._reading = False

    def _read(self, what: str) -> bool:
        """Take what is there; whether there was anything. Errors: those of a lost session.

        Also at the end: the daemon answers before it hangs up, and others may know of that first.
        """
        if self._deaf:
            raise self._failure(what)
        self._taking = True
        got = _recv(self._fd, self._buffer, _READ_NBYTES, socket.MSG_DONTWAIT)
        if got > 0:
            self._deliver(got)
        self._taking = False
        if got > 0:
            return True
        if got < 0 and ctypes.get_errno() in _AGAIN and not self._lost:
            return False
        self._lost = self._lost or _HUNG_UP
        raise self._failure(what)

    def _deliver(self, got: int) -> None:
        """Hand replies to who waits for them; those that nobody waits for are dropped."""
        unread = self._unread
        unread += self._view[:got]
        at = 0
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
                if pending.wake is not None:
                    release(pending.wake)
        del unread[:at]

    def _failure(self, what: str) -> SessionLostError:
        return SessionLostError(f"{what}: {self._lost}")
