"""Appends records to the active segment of one class in one directory, in order, in batches.

One job writes and syncs at a time, so the log has no holes: when a record is there, so is all
before it, and one fdatasync serves everybody who waits (group commit). A segment whose write or
sync failed takes nothing any more: a failed fdatasync is never tried again and called good.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.tiers.base import WriteStatus
from kvkeep_server.tiers.nvme.directory import FULL, Directory, finish
from kvkeep_server.tiers.nvme.segment_format import (
    FIRST_PAGE,
    NUMBER_SHIFT,
    SegmentHeader,
    records_that_fit,
)
from kvkeep_server.tiers.nvme.segments import Segment, SegmentEvent
from kvkeep_server.tiers.nvme.writing import (
    GoneError,
    create_segment,
    look_after,
    seal_segment,
    write_records,
)
from kvkeep_server.tiers.record import PAGE_NBYTES, RECORD, Rows, is_block, stored_pages

U64 = NDArray[np.uint64]
# Of one job: group commit takes what waits, but nobody waits for more than this before its own.
_JOB_NBYTES_MAX = 128 << 20


@dataclass(slots=True, eq=False)
class Append:
    """Records on their way into the log, in order.

    Attributes:
        rows: Their headers; `record_seq` is set, `location` gets set (0 = not written).
        sources: The stored bytes of each; empty for a tombstone.
        durable: Wait for fdatasync.
        for_reclaim: May take the one segment that users leave.
        held: Segments that must stay until `release`, because their records are not committed;
            None = nobody commits these.
        status: A `WriteStatus` each, when `done`.
        placed: Leading records that are decided or on their way.
        ended: Leading records whose status is known.
    """

    rows: Rows
    sources: Sequence[memoryview]
    durable: bool
    for_reclaim: bool
    held: set[Segment] | None
    status: NDArray[np.uint8]
    done: asyncio.Future[None]
    placed: int = 0
    ended: int = 0

    @classmethod
    def of(
        cls,
        rows: Rows,
        sources: Sequence[memoryview],
        *,
        durable: bool,
        for_reclaim: bool = False,
        hold: bool = False,
    ) -> "Append":
        """Of records that are not placed."""
        assert len(rows) == len(sources)
        status = np.full(len(rows), WriteStatus.FAILED, np.uint8)
        done = asyncio.get_running_loop().create_future()
        held: set[Segment] | None = set() if hold else None
        return cls(rows, sources, durable, for_reclaim, held, status, done)

    def hold(self, segment: Segment) -> None:
        """Keeps a segment that takes some of the records."""
        if self.held is not None and segment not in self.held:
            self.held.add(segment)
            segment.pending += 1

    def release(self) -> None:
        """The records are committed, or never will be."""
        for segment in self.held or ():
            segment.pending -= 1
        self.held = None

    def end(self, count: int, status: WriteStatus) -> None:
        """The next `count` records ended so."""
        stop = self.ended + count
        self.status[self.ended : stop] = status
        if status != WriteStatus.WRITTEN:
            self.rows["location"][self.ended : stop] = 0
        self.ended = stop
        self.placed = max(self.placed, stop)
        if self.ended == len(self.rows) and not self.done.done():
            self.done.set_result(None)


@dataclass(slots=True)
class _Job:
    """What one call of a writer thread does: records that lie one behind the other, then a sync."""

    first_page: int
    pieces: list[tuple[Append, int]] = field(default_factory=list)  # and how many of its records
    rows: list[Rows] = field(default_factory=list)
    sources: list[memoryview] = field(default_factory=list)
    nbytes: int = 0
    sync: bool = False


class Appender:
    """Event loop only.

    Args:
        directory: Where.
        retention_class: Of the records.
    """

    def __init__(self, *, directory: Directory, retention_class: str) -> None:
        """See the class."""
        self.active: Segment | None = None
        self.retention_class = retention_class
        self._directory = directory
        self._queue: deque[Append] = deque()
        self._task: asyncio.Task[None] | None = None
        # Headers of the active segment's records, for its table.
        self._table: list[Rows] = []
        # Those that no sync covers.
        self._unsynced: list[Rows] = []
        self._job: _Job | None = None
        self._sync_due = False
        # Whoever waits for the end of the active segment.
        self._sealed: asyncio.Future[None] | None = None

    async def append(self, append: Append) -> None:
        """Returns when all records have their status.

        Cancelled before a thread has them, they are taken back; later, it waits for their end.
        """
        if not len(append.rows):
            return
        self.enqueue(append)
        try:
            await asyncio.shield(append.done)
        except asyncio.CancelledError:
            if not append.placed and append in self._queue:
                self._queue.remove(append)
            elif not append.done.done():
                await finish(append.done)
            raise

    def enqueue(self, append: Append) -> None:
        """Queues records; at least one."""
        self._queue.append(append)
        self._start()

    def begin_sync(self) -> None:
        """Syncs what no sync covers, with the next job."""
        if self._unsynced:
            self._sync_due = True
            self._start()

    async def seal(self) -> None:
        """Ends the active segment; what is queued goes into the next one."""
        if self.active is not None:
            if self._sealed is None:
                self._sealed = asyncio.get_running_loop().create_future()
            sealed = self._sealed
            self._start()
            await finish(sealed)

    async def drain(self) -> None:
        """Returns when nothing is queued: for the end, when nobody appends any more."""
        while self._task is not None:
            await finish(self._task)

    def _start(self) -> "asyncio.Task[None]":
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return self._task

    async def _work(self) -> None:
        try:
            while self._queue or self._sealed or (self._sync_due and self._unsynced):
                await self._step()
        except Exception as error:
            self._give_up(error)
            raise
        finally:
            self._sync_due = False
            self._task = None
            self._end_sealing()

    async def _step(self) -> None:
        """One thing at a time: nothing is written into a segment while it is sealed."""
        if self._sealed is not None:
            if self.active is not None:
                await self._seal()
            self._end_sealing()
            return
        self._job = self._collect()
        if self._job is not None:
            await self._run(self._job)
            self._job = None
        else:
            await self._make_room()

    def _end_sealing(self) -> None:
        sealed, self._sealed = self._sealed, None
        if sealed is not None and not sealed.done():
            sealed.set_result(None)

    def _give_up(self, error: Exception) -> None:
        """A bug: whoever waits is told, and nothing more goes in."""
        waiting = {append for append, _ in self._job.pieces} if self._job else set()
        for append in waiting.union(self._queue):
            if not append.done.done():
                append.done.set_exception(error)
        self._queue.clear()
        self._job = None
        if self.active is not None:
            self._quarantine(error)

    # --- one job ----------------------------------------------------------------------------------

    def _collect(self) -> _Job | None:
        """The next job for the active segment; None when the first record that waits does not fit
        into it."""
        segment = self.active
        if segment is None:
            return None
        job = _Job(segment.end_page, sync=self._sync_due)
        for append in list(self._queue):
            if not append.for_reclaim and self._directory.table.is_over:
                break
            while append.placed < len(append.rows) and job.nbytes < _JOB_NBYTES_MAX:
                if not self._place(segment, append, job):
                    return job if job.pieces or job.sync else None
            if append.placed < len(append.rows):
                break
            self._queue.popleft()
        return job if job.pieces or job.sync else None

    def _place(self, segment: Segment, append: Append, job: _Job) -> bool:
        """Gives places to the records of one append that fit; False when the next one does not."""
        start = append.placed
        pages = stored_pages(append.rows[start:])
        budget_pages = -(-(_JOB_NBYTES_MAX - job.nbytes) // PAGE_NBYTES)
        ends = np.cumsum(pages)
        affordable = int(np.searchsorted(ends, budget_pages, side="left")) + 1
        count = min(affordable, records_that_fit(pages, segment.free_pages, segment.records))
        if not count:
            return False
        rows = append.rows[start : start + count]
        starts = segment.end_page + ends[:count] - pages[:count]
        rows["location"] = (np.uint64(segment.number) << NUMBER_SHIFT) | starts.astype(np.uint64)
        seqs, data = rows["record_seq"], is_block(rows)
        if data.any():
            segment.seq_min = min(segment.seq_min, int(seqs[data].min()))
        segment.seq_max = max(segment.seq_max, int(seqs.max()))
        segment.end_page += int(ends[count - 1])
        segment.records += count
        append.hold(segment)
        job.pieces.append((append, count))
        job.rows.append(rows)
        job.sources += append.sources[start : start + count]
        job.nbytes += int(ends[count - 1]) * PAGE_NBYTES
        job.sync |= append.durable
        append.placed += count
        return True

    async def _run(self, job: _Job) -> None:
        segment, directory = self.active, self._directory
        assert segment is not None
        rows = np.concatenate(job.rows) if job.rows else np.empty(0, RECORD)
        directory.table.hold(segment)
        files, workers = directory.files, directory.workers

        def work() -> None:
            write_records(files, workers, segment.fd, rows, job.sources, sync=job.sync)
            if job.sync:
                look_after(files, segment.fd, segment.nbytes)

        try:
            await directory.run(work)
        except GoneError as error:
            self._again(job)
            self._quarantine(error)
        except OSError as error:
            self._quarantine(error)
            for append, count in job.pieces:
                append.end(count, WriteStatus.FAILED)
        else:
            self._count(job, rows)
            for append, count in job.pieces:
                append.end(count, WriteStatus.WRITTEN)
        finally:
            directory.table.release(segment)

    def _count(self, job: _Job, rows: Rows) -> None:
        counts = self._directory.counts
        self._directory.health.worked()
        if len(rows):
            self._table.append(rows)
            self._unsynced.append(rows)
        if job.sync:
            self._unsynced.clear()
            self._sync_due = False
            counts.syncs += 1
        counts.disk_nbytes += job.nbytes
        for append, count in job.pieces:
            if not append.for_reclaim:
                stored = append.rows["payload_nbytes"][append.ended : append.ended + count]
                counts.user_nbytes += int(stored.sum())

    def _quarantine(self, error: Exception) -> None:
        """Nothing more goes in, and what no sync covered is lost."""
        segment, directory = self.active, self._directory
        assert segment is not None
        directory.counts.write_errors += 1
        directory.counts.quarantined += 1
        segment.advance(SegmentEvent.QUARANTINE)
        unsynced, self._unsynced = self._unsynced, []
        table, self._table = self._table, []
        self.active, self._sync_due = None, False
        if isinstance(error, GoneError):
            self._gone(segment, table)
            return
        directory.health.failed(error)
        if unsynced:
            lost = np.concatenate(unsynced)
            lost = lost[is_block(lost)]
            directory.counts.lost += len(lost)
            directory.lose(segment, lost["location"], lost["record_seq"])

    def _gone(self, segment: Segment, table: list[Rows]) -> None:
        """Somebody removed or cut its file: all in it is lost, and the device is well.

        What removals wrote there is needed as long as older records lie elsewhere. Of who waits
        still, records that were written there are not any more.
        """
        directory = self._directory
        directory.counts.vanished += 1
        directory.table.retire(segment)
        directory.owner.segment_lost(segment.number)
        rows = np.concatenate(table) if table else np.empty(0, RECORD)
        marks = rows[~is_block(rows)]
        if len(marks):
            empty = [memoryview(b"")] * len(marks)
            self._queue.appendleft(Append.of(marks, empty, durable=True, for_reclaim=True))
        waiting = {append for append, _ in self._job.pieces} if self._job else set()
        for append in waiting.union(self._queue):
            places = append.rows["location"][: append.ended]
            there = np.flatnonzero(places >> NUMBER_SHIFT == np.uint64(segment.number))
            append.status[there], places[there] = WriteStatus.FAILED, 0

    def _again(self, job: _Job) -> None:
        """What a job did not bring onto the medium goes into the next segment, in its order."""
        for append, count in reversed(job.pieces):
            append.placed -= count
            if append not in self._queue:
                self._queue.appendleft(append)

    # --- segments ---------------------------------------------------------------------------------

    async def _make_room(self) -> None:
        """A segment that takes the first record that waits; or that append ends without one."""
        table = self._directory.table
        was_over = table.is_over
        await self._directory.measure()
        if not self._queue or was_over > table.is_over:
            return  # who waited has gone, or fits into the segment that there is
        append = self._queue[0]
        over = table.is_over and not append.for_reclaim
        if over or not table.may_create(for_reclaim=append.for_reclaim):
            self._turn_away(append, WriteStatus.THROTTLED)
        elif not self._may_try(append):
            self._turn_away(append, WriteStatus.FAILED)
        else:
            if self.active is not None:
                await self._seal()
            status = await self._create()
            # While it was made, who waited may have gone.
            if status != WriteStatus.WRITTEN and self._queue and self._queue[0] is append:
                self._turn_away(append, status)

    def _may_try(self, append: Append) -> bool:
        """What is sick for want of room gets well by reclaim, so that need not wait."""
        health = self._directory.health
        return health.may_try() or (append.for_reclaim and health.is_full)

    def _turn_away(self, append: Append, status: WriteStatus) -> None:
        self._queue.popleft()
        rest = len(append.rows) - append.ended
        if status == WriteStatus.THROTTLED:
            self._directory.counts.throttled += rest
            self._directory.room_needed.set()
        append.end(rest, status)

    async def _create(self) -> WriteStatus:
        """A new active segment; anything but WRITTEN says what becomes of who waits for it."""
        directory = self._directory
        try:
            number = directory.sequence.take_number()
        except OverflowError as error:
            directory.health.failed(error)
            return WriteStatus.FAILED
        segment = directory.table.begin(number, self.retention_class)
        header = SegmentHeader(number, segment.pages, directory.wall_ms(), self.retention_class)
        settings = directory.table.settings
        try:
            segment.fd = await directory.run(
                lambda: create_segment(directory.files, settings, segment.path, header)
            )
        except OSError as error:
            directory.health.failed(error)
            directory.counts.write_errors += 1
            if isinstance(error, FileExistsError):
                directory.table.skip(segment, "another process made it")
            else:
                directory.table.retire(segment)
                await directory.unlink_retired()
            full = error.errno in FULL
            if full:
                directory.starved.set()
                directory.room_needed.set()
            return WriteStatus.THROTTLED if full else WriteStatus.FAILED
        directory.health.worked()
        directory.counts.disk_nbytes += PAGE_NBYTES
        directory.room_needed.set()
        self.active = segment
        self._table, self._unsynced = [], []
        return WriteStatus.WRITTEN

    async def _seal(self) -> None:
        segment, directory = self.active, self._directory
        assert segment is not None
        if segment.end_page == FIRST_PAGE:
            self.active = None
            directory.table.retire(segment)
            await directory.unlink_retired()
            return
        rows, files = np.concatenate(self._table), directory.files
        directory.table.hold(segment)

        def work() -> int:
            look_after(files, segment.fd, segment.nbytes)
            return seal_segment(files, segment.fd, segment.number, segment.end_page, rows)

        try:
            nbytes = await directory.run(work)
        except OSError as error:
            self._quarantine(error)
        else:
            directory.counts.disk_nbytes += nbytes - segment.end_page * PAGE_NBYTES
            directory.table.resize(segment, nbytes)
            segment.advance(SegmentEvent.SEAL)
            self.active, self._table, self._unsynced = None, [], []
        finally:
            directory.table.release(segment)
