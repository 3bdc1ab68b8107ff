"""Waiting for another thread where an exception may come out of any line.

A signal's handler may raise in the middle of `threading.Condition` or `threading.Event`, which are
written in Python, and leave their lock held for ever. Here nothing is held.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Final

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


def release(wake: threading.Lock) -> None:
    """A word to who sleeps on it; one is enough."""
    with suppress(RuntimeError):
        wake.release()
