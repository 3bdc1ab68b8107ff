"""Time comes in by constructor, so that the whole service runs on a virtual clock in tests."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings of time, both in seconds."""

    def monotonic_s(self) -> float:
        """Time that never jumps; for ages, deadlines and leases."""
        ...

    def wall_s(self) -> float:
        """Time since the epoch; only for what outlives the process."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic_s(self) -> float:
        """See `Clock`."""
        return time.monotonic()

    def wall_s(self) -> float:
        """See `Clock`."""
        return time.time()  # noqa: TID251 - the one place that reads it


class Deadline:
    """An end that is not set yet, by a clock."""

    def __init__(self, clock: Clock) -> None:
        """See the class."""
        self._clock = clock
        self._at_s = float("inf")

    def begin(self, seconds: float) -> None:
        """It is so many seconds from now."""
        self._at_s = self._clock.monotonic_s() + seconds

    def left_s(self) -> float:
        """Seconds until then; endless before `begin`, 0 when it is over."""
        return max(0.0, self._at_s - self._clock.monotonic_s())
