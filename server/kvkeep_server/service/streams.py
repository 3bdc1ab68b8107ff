"""Read and Write streams of clients on other hosts: how many at a time, and whose turn it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.service.sessions import Session

# Who was refused and does not come again within this time does not want to any more.
_WANTED_S = 1.0
_RETRY_AFTER_S = 0.02


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits of streams; names as in the configuration's `[remote]`."""

    streams_max: int
    session_streams_max: int
    stall_timeout_s: float


@dataclass(slots=True)
class StreamCounts:
    """Since the start.

    Attributes:
        read_nbytes: Payload bytes that went to clients on other hosts.
        written_nbytes: That came from them.
        refused: Streams that were told to come again.
        stalled: Streams that were ended because their client took or sent nothing.
    """

    read_nbytes: int = 0
    written_nbytes: int = 0
    refused: int = 0
    stalled: int = 0


class Streams:
    """Lets streams in. Event loop only.

    Fair: while several sessions have streams, or wanted one a moment ago, each has its share of
    them, at least one. So who has many waits for who has none.

    Args:
        limits: See `StreamLimits`.
        clock: For how long a refused session is waited for.
    """

    def __init__(self, *, limits: StreamLimits, clock: Clock) -> None:
        """See the class."""
        self.limits = limits
        self.counts = StreamCounts()
        self._clock = clock
        self._running: dict[int, int] = {}
        self._wanting: dict[int, float] = {}

    @property
    def running(self) -> int:
        """Streams that are open now."""
        return sum(self._running.values())

    @contextmanager
    def entered(self, session: Session) -> Iterator[None]:
        """One stream of a session.

        Raises:
            ResourceExhaustedError: It has its share, or there are too many.
        """
        number = session.session_id
        if self.running >= self.limits.streams_max or self._own(number) >= self._share(number):
            self.counts.refused += 1
            self._wanting[number] = self._clock.monotonic_s() + _WANTED_S
            msg = (
                f"{self.running} streams are open, {self._own(number)} of them this client's; "
                f"remote.streams_max = {self.limits.streams_max} and "
                f"remote.session_streams_max = {self.limits.session_streams_max}; try again"
            )
            raise ResourceExhaustedError(msg, retry_after_s=_RETRY_AFTER_S)
        self._wanting.pop(number, None)
        self._running[number] = self._own(number) + 1
        try:
            yield
        finally:
            self._running[number] -= 1
            if not self._running[number]:
                del self._running[number]

    def _own(self, number: int) -> int:
        return self._running.get(number, 0)

    def _share(self, number: int) -> int:
        """Streams that a session may have now."""
        now_s = self._clock.monotonic_s()
        self._wanting = {one: until for one, until in self._wanting.items() if until > now_s}
        others = len((self._running.keys() | self._wanting.keys()) - {number})
        fair = self.limits.streams_max // (others + 1)
        return max(1, min(self.limits.session_streams_max, fair))
