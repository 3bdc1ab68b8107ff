"""What a full queue left in ram only is offered again when the queue has room.

Nothing of it is remembered: the columns tell what is in ram and has no record. They are looked
through a slice at a time, from the lowest id on, whenever something was left out since the last
time.
"""

import numpy as np

from kvkeep_server.tiering.columns import BlockColumns
from kvkeep_server.tiering.demotion import Demotion

# Looked through at once: 0.2 ms of the loop; and how many of them are offered at once: 5 ms.
_SLICE_IDS = 65536
_OFFERED_MAX = 128


class LeftOut:
    """Event loop only.

    Args:
        columns: Of all blocks.
        demotion: Whose queue.
    """

    def __init__(self, *, columns: BlockColumns, demotion: Demotion) -> None:
        """See the class."""
        self._columns = columns
        self._demotion = demotion
        # Where the search goes on, None = there is none; blocks that had been left out before it.
        self._next: int | None = None
        self._dropped = 0

    def offer(self) -> None:
        """Goes on while nothing waits in the queue: what is stored now comes first. Call it now and
        then."""
        dropped = self._demotion.counts.dropped
        if self._next is None and dropped != self._dropped:
            self._next, self._dropped = 0, dropped
        if self._next is None or self._demotion.queued_blocks:
            return
        stop = min(self._next + _SLICE_IDS, self._columns.capacity)
        self._next = self._offer_between(self._next, stop)
        if self._next >= self._columns.capacity:
            self._next = None

    def _offer_between(self, start: int, stop: int) -> int:
        """The first id that was not looked at, because the queue is full or enough was offered."""
        columns = self._columns
        units = np.arange(start, stop)
        units = units[columns.in_ram[start:stop] & (columns.row[start:stop] >= 0)]
        units = units[~columns.recorded(units)]
        for offered, unit in enumerate(units.tolist()):
            one = np.array([unit])
            if offered == _OFFERED_MAX or not self._demotion.takes(one):
                return unit
            self._demotion.offer(one)
        return stop
