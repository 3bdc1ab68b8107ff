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
