"""What a full queue left in ram only, or nvme did not take, is offered again when there is room.
What nvme let go of is not, unless it was used since: two tiers of one size would push each other's
blocks out for ever.

Nothing of it is remembered: the columns tell what is in ram and has no record. They are looked
through a slice at a time, from the lowest id on, whenever something was left out since the last
time. After a failure that begins a while later, and later each time that nvme takes nothing.
"""

import numpy as np

from kvkeep_server.core.clock import Clock
from kvkeep_server.tiering.columns import BlockColumns
from kvkeep_server.tiering.demotion import Demotion

# Looked through at once: 0.2 ms of the loop; and how many of them are offered at once: 5 ms.
_SLICE_IDS = 65536
_OFFERED_MAX = 128
# After a failure; doubled while nothing is written at all.
_PAUSE_MIN_S, _PAUSE_MAX_S = 1.0, 60.0


class LeftOut:
    """Event loop only.

    Args:
        columns: Of all blocks.
        demotion: Whose queue.
        clock: For pauses.
    """

    def __init__(self, *, columns: BlockColumns, demotion: Demotion, clock: Clock) -> None:
        """See the class."""
        self._columns = columns
        self._demotion = demotion
        self._clock = clock
        # Where the search goes on, None = there is none; blocks that had been left out before it.
        self._next: int | None = None
        self._dropped = 0
        # Blocks that had failed then, and that had been written; no search before this time.
        self._failed = self._written = 0
        self._pause_s = self._resume_s = 0.0

    def offer(self) -> None:
        """Goes on while nothing waits in the queue: what is stored now comes first. Call it now and
        then."""
        counts, now_s = self._demotion.counts, self._clock.monotonic_s()
        if counts.failed != self._failed:
            self._note_failure(now_s)
        if self._next is None and counts.dropped != self._dropped:
            self._next, self._dropped = 0, counts.dropped
        if self._next is None or self._demotion.queued_blocks or now_s < self._resume_s:
            return
        stop = min(self._next + _SLICE_IDS, self._columns.capacity)
        self._next = self._offer_between(self._next, stop)
        if self._next >= self._columns.capacity:
            self._next = None

    def _note_failure(self, now_s: float) -> None:
        counts = self._demotion.counts
        longer_s = min(2 * self._pause_s, _PAUSE_MAX_S) if counts.written == self._written else 0.0
        self._pause_s = max(_PAUSE_MIN_S, longer_s)
        self._failed, self._written = counts.failed, counts.written
        self._next, self._resume_s = 0, now_s + self._pause_s

    def _offer_between(self, start: int, stop: int) -> int:
        """The first id that was not looked at, because the queue is full or enough was offered."""
        columns = self._columns
        units = np.arange(start, stop)
        units = units[columns.in_ram[start:stop] & (columns.row[start:stop] >= 0)]
        units = units[~columns.recorded(units)]
        units = units[~columns.unwanted(units)]
        for offered, unit in enumerate(units.tolist()):
            one = np.array([unit])
            if offered == _OFFERED_MAX or not self._demotion.takes(one):
                return unit
            self._demotion.offer(one)
        return stop
