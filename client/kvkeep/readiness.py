"""One descriptor for a loop that waits on many: readable when `Client.poll` has something to do.

An epoll of the call socket, a timer for the next deadline and an eventfd for what other threads
did, so that no thread has to wake up only to wake another.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvkeep.waking import EventFd

if TYPE_CHECKING:
    from kvkeep.call_socket import CallSocket

# PyDLL keeps the GIL; this interpreter has no timerfd of its own before 3.13.
_libc: Final = ctypes.PyDLL(None, use_errno=True)
_CLOCK_MONOTONIC: Final = 1
_FLAGS: Final = os.O_CLOEXEC | os.O_NONBLOCK
_ABSOLUTE: Final = 1
# struct itimerspec: interval, then value, each in seconds and nanoseconds.
_TIMER: Final = struct.Struct("@qqqq")
_NS: Final = 1_000_000_000


class Readiness:
    """For `Tickets`, under its lock; `ring` may come from any thread."""

    def __init__(self) -> None:
        """Errors: OSError (no descriptors)."""
        self._bell = EventFd()
        self._epoll = select.epoll()
        timer = _libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._timer: int = timer
        self._armed_s = 0.0
        self._watched: dict[CallSocket, int] = {}
        for fd in (self._bell.fileno(), self._timer):
            self._epoll.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        """The descriptor."""
        return self._epoll.fileno()

    def ring(self) -> None:
        """Readable until the next `hush`."""
        self._bell.ring()

    def hush(self) -> None:
        """What rang has been seen to."""
        self._bell.hush()

    def watch(self, calls: CallSocket) -> None:
        """Readable when replies are there, or when the daemon takes more of what is unsent."""
        events = select.EPOLLIN | (select.EPOLLOUT if calls.unsent else 0)
        known = self._watched.get(calls)
        if known == events or calls.lost:
            return
        if known is None:
            self._epoll.register(calls.fileno(), events)
        else:
            self._epoll.modify(calls.fileno(), events)
        self._watched[calls] = events

    def forget(self, calls: CallSocket) -> None:
        """Idempotent."""
        if self._watched.pop(calls, None) is not None:
            with suppress(OSError):
                self._epoll.unregister(calls.fileno())

    def wake_at(self, until_s: float) -> None:
        """Readable from then on, in monotonic seconds; 0 = never."""
        if until_s == self._armed_s and not 0 < until_s <= time.monotonic():
            return
        self._armed_s = until_s
        value = _TIMER.pack(0, 0, *divmod(int(until_s * _NS), _NS))
        _libc.timerfd_settime(self._timer, _ABSOLUTE, value, None)

    def close(self) -> None:
        """Idempotent."""
        self._bell.close()
        self._epoll.close()
        timer, self._timer = self._timer, -1
        if timer >= 0:
            os.close(timer)

    def __del__(self) -> None:
        with suppress(AttributeError):
            self.close()
