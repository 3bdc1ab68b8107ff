"""The log of one directory: an appender for each retention class, and what goes on behind."""

import asyncio
import contextlib

from kvkeep_server.tiers.nvme.appender import Append, Appender
from kvkeep_server.tiers.nvme.directory import Directory
from kvkeep_server.tiers.nvme.reclaim import Reclaimer
from kvkeep_server.tiers.nvme.segment_format import FIRST_PAGE, PAGE_MASK, table_pages
from kvkeep_server.tiers.nvme.segments import Segment, SegmentState
from kvkeep_server.tiers.record import PAGE_NBYTES, Rows, record_pages, voids_of

# Each has an active segment.
CLASSES_MAX = 64
# Tombstones of blocks in a segment whose class is not known yet.
_CLASS_UNKNOWN = "default"


class Log:
    """Event loop only.

    Args:
        directory: Where.
    """

    def __init__(self, *, directory: Directory) -> None:
        """See the class."""
        self.directory = directory
        self.claimed_nbytes = 0
        self._claimed_pages = 0
        self._appenders: dict[str, Appender] = {}
        self._reclaimer = Reclaimer(directory=directory, append=self.append)

    # --- room -------------------------------------------------------------------------------------

    @property
    def block_nbytes_max(self) -> int:
        """The largest block that fits an empty segment."""
        pages = self.directory.table.settings.segment_nbytes // PAGE_NBYTES
        return (pages - FIRST_PAGE - 1 - table_pages(1) - 1) * PAGE_NBYTES

    def room(self, nbytes: int) -> int:
        """How many blocks of this size find room now, in whatever class."""
        table = self.directory.table
        settings = table.settings
        # Where there never is room, whoever writes is told so at once, and does not wait for it.
        limit = settings.max_nbytes if table.is_hopeless else table.user_limit_nbytes
        if table.used_nbytes > limit:
            return 0
        needed = record_pages(nbytes)
        free = (limit - table.used_nbytes) // settings.segment_nbytes
        pages = settings.segment_nbytes // PAGE_NBYTES
        empty = Segment(0, "", 0, pages, "", SegmentState.ACTIVE)
        actives = [appender.active for appender in self._appenders.values()]
        count = free * empty.room(needed)
        count += sum(active.room(needed) for active in actives if active is not None)
        return max(0, count - -(-self._claimed_pages // needed))

    def claim(self, nbytes: int, count: int) -> None:
        """Blocks of this size are about to be written."""
        self.claimed_nbytes += nbytes * count
        self._claimed_pages += record_pages(nbytes) * count

    def unclaim(self, nbytes: int, count: int) -> None:
        """They are written, or will not be."""
        self.claim(nbytes, -count)

    # --- writing ----------------------------------------------------------------------------------

    async def append(self, retention_class: str, append: Append) -> None:
        """See `Appender.append`."""
        await self._appender(retention_class).append(append)

    def discard(self, rows: Rows) -> None:
        """Forgets records that were written and are not wanted.

        That they never counted is written behind the work, so that they do not come back at a
        restart. A tombstone would take an earlier record of the key with it.
        """
        rows = rows[rows["location"] > 0]
        if not len(rows):
            return
        directory = self.directory
        for location in rows["location"].tolist():
            segment = directory.table.segments.get(location >> 32)
            if segment is not None:
                segment.dead.add(location & int(PAGE_MASK))
        voids = voids_of(rows)
        voids["record_seq"] = directory.sequence.take_seqs(len(voids))
        empty = [memoryview(b"")] * len(voids)
        append = Append.of(voids, empty, durable=False, for_reclaim=True)
        self._appender(rows["retention_class"][0].decode()).enqueue(append)

    def _appender(self, retention_class: str) -> Appender:
        name = retention_class or _CLASS_UNKNOWN
        appender = self._appenders.get(name)
        if appender is None:
            assert len(self._appenders) < CLASSES_MAX, "too many retention classes"
            appender = Appender(directory=self.directory, retention_class=name)
            self._appenders[name] = appender
        return appender

    async def seal(self) -> None:
        """Ends the active segments."""
        for appender in list(self._appenders.values()):
            await appender.seal()

    async def close(self) -> None:
        """Writes what is queued and ends the active segments; nobody appends any more."""
        for appender in list(self._appenders.values()):
            await appender.drain()
            await appender.seal()

    # --- behind -----------------------------------------------------------------------------------

    async def sync_behind(self, interval_s: float) -> None:
        """Syncs what nobody waits for, and tries again to remove what could not be removed."""
        while True:
            await asyncio.sleep(interval_s)
            for appender in list(self._appenders.values()):
                appender.begin_sync()
            await self.directory.unlink_retired()

    async def reclaim_behind(self, retry_s: float) -> None:
        """Keeps room for one more segment; waits a while after one that gave nothing back."""
        needed, table = self.directory.room_needed, self.directory.table
        while True:
            # While nothing is written, others may fill the file system: it is asked when a segment
            # was made, or until it has room again.
            if needed.is_set() or table.is_limited:
                await self.directory.measure()
            needed.clear()
            while self._needs_room():
                used_nbytes = table.used_nbytes
                if not await self.reclaim_oldest() or table.used_nbytes >= used_nbytes:
                    break
                await self.directory.measure()
            # Not `wait_for`: in Python 3.11 it loses a cancellation that meets the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(retry_s):
                    await needed.wait()

    def _needs_room(self) -> bool:
        return self.directory.starved.is_set() or self.directory.table.gives_back

    async def reclaim_oldest(self) -> bool:
        """See `Reclaimer.reclaim_oldest`; where every segment is active, they end first."""
        states = (SegmentState.FOUND, SegmentState.SEALED, SegmentState.QUARANTINED)
        if not self.directory.table.of_states(*states):
            await self.seal()
        self.directory.starved.clear()
        return await self._reclaimer.reclaim_oldest()

    def vanished(self, segment: Segment) -> None:
        """Somebody removed the file of a segment."""
        self.directory.table.retire(segment)
        self.directory.room_needed.set()

    def check(self) -> None:
        """Audits appenders and claims.

        Raises:
            AssertionError: an invariant is broken.
        """
        assert self.claimed_nbytes >= 0
        assert self._claimed_pages >= 0
        active = {
            appender.active.number
            for appender in self._appenders.values()
            if appender.active is not None
        }
        table = self.directory.table
        assert active == {s.number for s in table.of_states(SegmentState.ACTIVE)}, "lost actives"
