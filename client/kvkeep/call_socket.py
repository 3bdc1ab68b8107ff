"""Calls to the daemon of this host on the session's call socket; no gRPC.

The frames are those of proto/kvkeep/v1/shared_memory.md, section 1. Two facts shape this module:

- A call takes 20 to 150 us, less than it costs a thread to sleep and be woken. So the caller looks
  for its reply a while before it sleeps.
- In an engine other Python threads are always busy, and a thread that gives the GIL up gets it back
  only after a switch interval of 5 ms. So sending and looking keep the GIL; only sleeping drops it.

Sending never waits: what the daemon does not take at once is kept, and goes out with whatever is
done next. So a call can be begun in a loop that must not be held up, and its reply taken later
(`take`); who can wait, waits (`wait`). Whoever waits first reads for all who wait.
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
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.breaker import PROBE_S, Breaker
from kvkeep.errors import DeadlineError, SessionLostError, UnavailableError
from kvkeep.v1.session_pb2 import CallMethod
from kvkeep.waking import NAP_S, EventFd, release

if TYPE_CHECKING:
    from collections.abc import Callable

# Bytes of the payload, method or status, 0 or _MORE, ms until a retry makes sense, call id.
_HEADER: Final = struct.Struct("<IHHII")
_MORE: Final = 1
# Who posts more than this to a daemon that takes nothing, posts in vain.
_POSTS_UNSENT_MAX: Final = 1 << 16
_READ_NBYTES: Final = 1 << 18
_CALL_IDS: Final = (1 << 32) - 1
# How long one naps while another is just taking replies.
_TURN_MS: Final = 0.5
# poll() takes no more than 2^31 milliseconds.
_SLEEP_MAX_S: Final = 3600.0
SILENT: Final = "the daemon does not answer; nothing is asked of it until it answers a probe"
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
        more: Another reply to the same call follows.
    """

    status: int
    retry_after_s: float
    payload: bytes
    more: bool = False


class PendingCall:
    """A call that was begun.

    Attributes:
        method: A CallMethod.
        what: Its name, for messages.
        until_s: Its deadline, monotonic seconds.
        asked_s: When it was begun, monotonic seconds.
        reply: The last one, or None.
        left: Nobody waits for it any more.
    """

    __slots__ = (
        "asked_s",
        "asleep",
        "begun",
        "call_id",
        "frame",
        "left",
        "look_s",
        "method",
        "on_reply",
        "reply",
        "until_s",
        "wake",
        "what",
    )

    def __init__(
        self,
        method: int,
        what: str,
        until_s: float,
        *,
        quick: bool = True,
        on_reply: Callable[[Reply | None], None] | None = None,
    ) -> None:
        """For `CallSocket.begin`.

        `quick`: its reply is worth looking for before who waits for it sleeps. `on_reply` gets
        each reply, in the thread that happens to read it, also when nobody waits any more; None
        when it turns out that the call never went out. It must be short, and raise nothing.
        """
        self.method = method
        self.what = what
        self.until_s = until_s
        self.look_s = _LOOK_S if quick else 0.0
        self.on_reply = on_reply
        self.asked_s = 0.0
        self.call_id = 0
        self.frame: bytes | None = None  # what did not go out yet; None before it is begun
        self.begun = False  # some of it did
        self.left = False
        self.reply: Reply | None = None
        self.wake: threading.Lock | None = None  # released when there is news for its sleeper
        self.asleep = False  # on the socket itself


class CallSocket:
    """One session's calls. Any thread may call; `close` wakes all who wait.

    An exception may come out of any line, since a signal's handler may raise: nothing is held
    across a call but by a `with` of a plain lock or under a `finally`, and whoever is interrupted
    while it takes bytes from the stream or puts them there closes it, because half a frame makes
    nonsense of all that follow.

    The descriptor goes with the last reference, never under a thread that is using it.

    Attributes:
        breaker: Whether the daemon answers.
        unattended: Calls that nobody waits for, whose replies matter all the same.
    """

    def __init__(
        self, fd: int, *, probe_s: float = PROBE_S, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """Takes `fd` over. `probe_s`: see `Breaker`. `on_change`: `breaker`, `unattended` or
        `unsent` has news."""
        self._socket = socket.socket(fileno=fd)
        self._fd = fd
        self._ids = itertools.count()
        self._waiting: dict[int, PendingCall] = {}
        self._sleepers: dict[int, PendingCall] = {}
        self._outbox: deque[PendingCall] = deque()
        self.unattended: set[int] = set()
        self.breaker = Breaker(
            send_probe=self._send_probe, take=self.take, on_change=on_change, probe_s=probe_s
        )
        self._on_change = on_change
        # Guards the turns, and `PendingCall.wake`.
        self._lock = threading.Lock()
        self._sending = False
        self._reading = False
        self._taking = False
        # Bytes are on their way into or out of the stream.
        self._putting = False
        self._torn = False
        self._congested = False
        self._buffer = ctypes.create_string_buffer(_READ_NBYTES)
        self._view = memoryview(self._buffer).cast("B")
        self._unread = bytearray()
        self._nudge = EventFd()
        self._lost = ""
        # What could still arrive is of no use.
        self._deaf = False

    def fileno(self) -> int:
        """For polling."""
        return self._fd

    @property
    def lost(self) -> bool:
        """Nothing comes from it any more."""
        return bool(self._lost)

    @property
    def unsent(self) -> int:
        """Calls that wait for the daemon to take more."""
        return len(self._outbox)

    def begin(self, pending: PendingCall, payload: bytes) -> PendingCall:
        """Send a call, or as much of it as the daemon takes now. Never waits.

        Errors: SessionLostError, UnavailableError (the daemon does not answer). `leave` it then.
        """
        self.require_answers(pending.what)
        self._begin(pending, payload)
        if self._lost:
            raise self.failure(pending.what)
        return pending

    def require_answers(self, what: str) -> None:
        """Errors: UnavailableError (the daemon does not answer: nothing is to be asked of it)."""
        self.breaker.check()
        if self.breaker.open:
            raise UnavailableError(f"{what}: {SILENT}")

    def _begin(self, pending: PendingCall, payload: bytes) -> None:
        pending.call_id = call_id = 1 + next(self._ids) % _CALL_IDS  # 0 is for posts
        self._waiting[call_id] = pending
        pending.asked_s = time.monotonic()
        pending.frame = _HEADER.pack(len(payload), pending.method, 0, 0, call_id) + payload
        self._outbox.append(pending)
        self.flush()

    def post(self, method: int, payload: bytes) -> None:
        """Send a call whose reply does not matter, whether the daemon answers now or not."""
        pending = PendingCall(method, "", 0.0)
        pending.frame = _HEADER.pack(len(payload), method, 0, 0, 0) + payload
        if len(self._outbox) < _POSTS_UNSENT_MAX:
            self._outbox.append(pending)
        # Takes what earlier ones left, too.
        self.take()

    def _send_probe(self) -> None:
        probe = PendingCall(CallMethod.CALL_METHOD_RELEASE, "", 0.0, on_reply=self._on_probe)
        self._begin(probe, b"")
        self._attend(probe)

    def _on_probe(self, reply: Reply | None) -> None:
        if reply is not None:
            self.breaker.probed()

    def wait(self, pending: PendingCall) -> Reply:
        """The reply to a call. Errors: DeadlineError, SessionLostError."""
        mine = False
        try:
            while pending.reply is None:
                with self._lock:
                    if not self._reading:
                        self._reading = mine = True
                    elif pending.wake is None:
                        pending.wake = threading.Lock()
                        self._sleepers[pending.call_id] = pending
                if mine:
                    self._read_until(pending)
                else:
                    self._sleep(pending)
        finally:
            if mine:
                self._reading = False
            self._sleepers.pop(pending.call_id, None)
            self.leave(pending)
            self._pass_on()
        return pending.reply

    def leave(self, pending: PendingCall) -> None:
        """Nobody waits for this call any more; its `on_reply` still hears of it. Idempotent."""
        pending.left = True
        with self._lock:
            # While another sends, nobody knows.
            never = not (pending.begun or self._sending or pending.frame == b"")
            if never:
                pending.frame = b""
        if never or pending.reply is not None or pending.on_reply is None:
            self._waiting.pop(pending.call_id, None)
            if never and pending.on_reply is not None:
                pending.on_reply(None)
        elif pending.call_id in self._waiting:
            self._attend(pending)

    def _attend(self, pending: PendingCall) -> None:
        self.unattended.add(pending.call_id)
        if pending.call_id not in self._waiting:
            self.unattended.discard(pending.call_id)  # its reply came in between
        else:
            self._on_change()

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
        self._nudge.close()

    def __del__(self) -> None:
        with suppress(AttributeError):
            self._socket.close()

    # --- sending

    def flush(self) -> None:
        """Send what waits, as far as the daemon takes it. Never waits."""
        # Once more after each turn: what was added at its end was left to it.
        while self._outbox and not self._lost:
            mine = False
            try:
                with self._lock:
                    if not self._sending:
                        self._sending = mine = True
                if not mine or not self._send_turn():
                    break
            finally:
                if mine:
                    if self._putting:
                        self.close()
                    self._putting = self._sending = False
        if self._lost:
            self._outbox.clear()
        elif self._outbox:
            self._say_unsent()

    def _say_unsent(self) -> None:
        """Who sleeps on the socket is to wait for room as well; the keeper, if nobody does."""
        if self._reading:
            self._nudge.ring()
        elif not self._congested:
            self._congested = True
            self._on_change()

    def _send_turn(self) -> bool:
        """Whether everything went out."""
        outbox = self._outbox
        while outbox:
            pending = outbox[0]
            frame = pending.frame or b""
            self._putting = True
            # A frame is empty when its caller left before any of it went out.
            sent = _send(self._fd, frame, len(frame), _SEND_FLAGS) if frame else 0
            if sent == len(frame):
                pending.frame = b""
                outbox.popleft()
            elif sent > 0:
                pending.begun, pending.frame = True, frame[sent:]
            elif ctypes.get_errno() not in _AGAIN:
                self._lost = self._lost or _HUNG_UP
            self._putting = False
            if sent < 0:
                return False
        self._congested = False
        return True

    def _poll(self, timeout_s: float) -> None:
        """Sleep until there is something to do, at most for a while."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        poll.register(self._nudge.fileno(), select.POLLIN)
        poll.poll(min(timeout_s, _SLEEP_MAX_S) * 1000)
        self._nudge.hush()

    # --- receiving

    def _sleep(self, pending: PendingCall) -> None:
        """Another reads: wait for its word, that the reply is here or that it is our turn.

        Not for long: who was interrupted may have given no word.
        """
        left_s = pending.until_s - time.monotonic()
        if left_s <= 0:
            raise self._overdue(pending)
        wake = pending.wake
        assert wake is not None
        if pending.reply is None:
            wake.acquire(timeout=min(left_s, NAP_S))

    def _pass_on(self) -> None:
        """One of those who sleep is to read from now on."""
        with self._lock:
            if self._reading:
                return
            for other in list(self._sleepers.values()):
                if other.wake is not None and other.reply is None:
                    release(other.wake)
                    return

    def _read_until(self, pending: PendingCall) -> None:
        """Read for all until this reply is here."""
        look_until_s = time.monotonic() + pending.look_s
        while pending.reply is None:
            took = self.take()
            if took or pending.reply is not None:
                continue
            now_s = time.monotonic()
            if took is not None and self._lost:
                raise self.failure(pending.what)
            if now_s >= pending.until_s:
                raise self._overdue(pending)
            if took is None:
                select.poll().poll(_TURN_MS)  # no event tells when another's turn ends
            elif now_s >= look_until_s:
                self._read_asleep(pending, pending.until_s - now_s)

    def _read_asleep(self, pending: PendingCall, left_s: float) -> None:
        # Another may take our reply just before we sleep: it looks at this mark, after it has put
        # the reply there, and we look for the reply after we have set it.
        pending.asleep = True
        if pending.reply is None:
            self._poll(left_s)
        pending.asleep = False

    def _overdue(self, pending: PendingCall) -> DeadlineError:
        self.breaker.timed_out(pending.asked_s)
        why = "the daemon takes no calls" if pending.frame else "no answer in time"
        return DeadlineError(f"{pending.what}: {why}")

    def take(self) -> bool | None:
        """Take the replies that are here, for all who wait; never waits.

        Whether there were any; None when another is just taking them. At the end `lost` is set, but
        only when all that came before has been taken: the daemon answers before it hangs up.
        """
        if self._outbox:
            self.flush()
        mine = False
        try:
            with self._lock:
                if not self._taking:
                    self._taking = mine = True
            return self._take_turn() if mine else None
        finally:
            if mine:
                if self._torn:
                    # Interrupted within: the thread of the stream is lost.
                    self._deaf = True
                    self.close()
                self._torn = self._taking = False

    def _take_turn(self) -> bool:
        if self._deaf:
            return False
        self._torn = True
        got = _recv(self._fd, self._buffer, _READ_NBYTES, socket.MSG_DONTWAIT)
        if got > 0:
            self._deliver(got)
        elif got == 0 or ctypes.get_errno() not in _AGAIN:
            self._lost, self._deaf = self._lost or _HUNG_UP, True
        self._torn = False
        return bool(got > 0)

    def _deliver(self, got: int) -> None:
        """Hand replies to who waits for them; those that nobody waits for are dropped."""
        unread = self._unread
        unread += self._view[:got]
        at = 0
        while len(unread) >= at + _HEADER.size:
            nbytes, status, flags, retry_after_ms, call_id = _HEADER.unpack_from(unread, at)
            start, end = at + _HEADER.size, at + _HEADER.size + nbytes
            if len(unread) < end:
                break
            at = end
            pending = self._waiting.get(call_id)
            if pending is not None:
                payload = bytes(memoryview(unread)[start:end])
                more = bool(flags & _MORE)
                self._hand_over(pending, Reply(status, retry_after_ms / 1000, payload, more))
        del unread[:at]

    def _hand_over(self, pending: PendingCall, reply: Reply) -> None:
        if not reply.more and pending.on_reply is not None:
            self._waiting.pop(pending.call_id, None)
            self.unattended.discard(pending.call_id)
        if pending.on_reply is not None:
            pending.on_reply(reply)
        pending.reply = reply
        if pending.wake is not None:
            release(pending.wake)
        if pending.asleep:
            self._nudge.ring()

    def failure(self, what: str) -> SessionLostError:
        """Of calls when this is `lost`."""
        return SessionLostError(f"{what}: {self._lost}")
