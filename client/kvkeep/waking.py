"""Waiting for another thread where an exception may come out of any line.

A signal's handler may raise in the middle of `threading.Condition` or `threading.Event`, which are
written in Python, and leave their lock held for ever. Here nothing is held.

`os.eventfd_write` gives the GIL up, and beside a busy thread it comes back 5 ms later: here it is
kept.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from typing import Final

# PyDLL keeps the GIL.
_libc: Final = ctypes.PyDLL(None, use_errno=True)
_write: Final = _libc.write
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_read: Final = _libc.read
_read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_ONE: Final = (1).to_bytes(8, "little")

# A sleeper looks again after so long, also when no bell rang: who should have rung it may have been
# interrupted, or have rung just before.
NAP_S: Final = 0.1


class Bell:
    """Wakes all who nap. Any thread may call."""

    def __init__(self) -> None:
        """Nobody naps yet."""
        self._sleepers: list[threading.Lock] = []

    def nap(self, seconds: float) -> None:
        """Sleep until the bell rings, but no longer than so, or NAP_S."""
        wake = threading.Lock()
        wake.acquire()
        try:
            self._sleepers.append(wake)
            wake.acquire(timeout=max(0.0, min(seconds, NAP_S)))
        finally:
            with suppress(ValueError):
                self._sleepers.remove(wake)

    def ring(self) -> None:
        """Wake all who nap now."""
        for wake in list(self._sleepers):
            release(wake)


class EventFd:
    """An eventfd that never makes its caller wait. Any thread may call."""

    def __init__(self) -> None:
        """Not rung."""
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Readable while it is rung."""
        return self._fd

    def ring(self) -> None:
        """Idempotent until the next `hush`."""
        _write(self._fd, _ONE, len(_ONE))

    def hush(self) -> None:
        """Idempotent."""
        _read(self._fd, ctypes.create_string_buffer(len(_ONE)), len(_ONE))

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        with suppress(AttributeError):
            self.close()


def release(wake: threading.Lock) -> None:
    """A word to who sleeps on it; one is enough."""
    with suppress(RuntimeError):
        wake.release()
