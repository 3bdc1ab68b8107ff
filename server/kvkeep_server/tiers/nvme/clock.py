"""The log's clock: wall time for records, without the wall clock's jumps."""

from kvkeep_server.core.clock import Clock


class LogClock:
    """Begins at the wall clock, goes on monotonically, and is never behind a record of the log.

    So a step of the wall clock while the process runs moves nothing, and one back between two runs
    makes no record younger than it is by more than the time between them.
    """

    def __init__(self, clock: Clock) -> None:
        """See the class; `begin` comes first."""
        self._clock = clock
        self._offset_s = 0.0

    def begin(self) -> None:
        """Takes the wall clock's reading, once."""
        self._offset_s = self._clock.wall_s() - self._clock.monotonic_s()

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return max(0, int((self._clock.monotonic_s() + self._offset_s) * 1000))

    def raise_to(self, time_ms: int) -> None:
        """A record of this time was found."""
        ahead_ms = time_ms - self.now_ms()
        if ahead_ms > 0:
            self._offset_s += ahead_ms / 1000
