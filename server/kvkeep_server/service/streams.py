"""Read and Write streams of clients on other hosts: how many at a time, and whose turn it is."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.service.sessions import Session

# Who was refused and does not come again within this time does not want to any more.
_WANTED_S = 1.0
_RETRY_AFTER_S = 0.02
# For so long a client may take or send nothing while others wait for a turn.
HURRIED_S = 3.0
# Of all places, those that only who has none gets.
_KEPT_SHARE = 4


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


class Place:
    """One stream's. Made by `Streams.entered`."""

    def __init__(self, streams: "Streams") -> None:
        """See the class."""
        self._streams = streams
        self._limit: asyncio.Timeout | None = None
        self.since_s = 0.0

    @asynccontextmanager
    async def patient(self) -> AsyncIterator[None]:
        """Around what the client has to do its part of.

        Raises:
            TimeoutError: It did nothing for `stall_timeout_s`, or `HURRIED_S` while others wait.
        """
        async with asyncio.timeout(self._streams.limits.stall_timeout_s) as limit:
            self._limit, self.since_s = limit, self._streams.now_s()
            try:
                yield
            finally:
                self._limit = None

    @property
    def idle(self) -> bool:
        """Whether its client is to do something."""
        return self._limit is not None

    def hurry(self) -> None:
        """The client has had its time."""
        limit, self._limit = self._limit, None
        if limit is not None:
            limit.reschedule(asyncio.get_running_loop().time())

    def give_up(self) -> None:
        """Its turn is over, though it stays open, until its client takes the answer or its deadline
        comes. What is held for it then is a chunk; there may be as many as streams."""
        self._streams.hold(self)


class Streams:
    """Lets streams in. Event loop only.

    Fair: while several sessions have streams, or wanted one a moment ago, each has its share of
    them, at least one, and the last quarter is for those that have none. So who has many waits for
    who has none; and who does nothing, while others wait, is ended after a while.

    Args:
        limits: See `StreamLimits`.
        clock: For how long a refused session is waited for.

    Attributes:
        held: Streams that are open only because their client does not take the answer.
    """

    def __init__(self, *, limits: StreamLimits, clock: Clock) -> None:
        """See the class."""
        self.limits = limits
        self.counts = StreamCounts()
        self._clock = clock
        self._places: dict[Place, int] = {}
        self._wanting: dict[int, float] = {}
        self.held = 0

    @property
    def running(self) -> int:
        """Streams that have their turn now."""
        return len(self._places)

    def now_s(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic_s()

    @contextmanager
    def entered(self, session: Session) -> Iterator[Place]:
        """One stream of a session.

        Raises:
            ResourceExhaustedError: It has its share, or there are too many.
        """
        number = session.session_id
        own, share = self._own(number), self._share(number)
        full = self.running >= self.limits.streams_max
        if full or own >= share or (own and self._left <= 0):
            if full:
                self._hurry_one()
            self.counts.refused += 1
            self._wanting[number] = self.now_s() + _WANTED_S
            msg = (
                f"{self.running} streams are open, {own} of them this client's; "
                f"remote.streams_max = {self.limits.streams_max} and "
                f"remote.session_streams_max = {self.limits.session_streams_max}; try again"
            )
            raise ResourceExhaustedError(msg, retry_after_s=_RETRY_AFTER_S)
        self._wanting.pop(number, None)
        place = Place(self)
        self._places[place] = number
        try:
            yield place
        finally:
            if self._places.pop(place, None) is None:
                self.held -= 1

    def hold(self, place: Place) -> None:
        """See `Place.give_up`."""
        if place in self._places and self.held < self.limits.streams_max:
            del self._places[place]
            self.held += 1

    def _hurry_one(self) -> None:
        before_s = self.now_s() - HURRIED_S
        idle = [one for one in self._places if one.idle and one.since_s <= before_s]
        if idle:
            min(idle, key=lambda one: one.since_s).hurry()

    def _own(self, number: int) -> int:
        return sum(number == one for one in self._places.values())

    @property
    def _left(self) -> int:
        """Places for those who have one already."""
        most = self.limits.streams_max
        return most - most // _KEPT_SHARE - self.running

    def _share(self, number: int) -> int:
        """Streams that a session may have now."""
        now_s = self.now_s()
        self._wanting = {one: until for one, until in self._wanting.items() if until > now_s}
        others = len(({*self._places.values()} | self._wanting.keys()) - {number})
        fair = self.limits.streams_max // (others + 1)
        return max(1, min(self.limits.session_streams_max, fair))
