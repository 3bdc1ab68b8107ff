"""Gives room back, a segment at a time, the oldest first; what is still wanted is written again.

Numbers of the new records are taken at the moment that the owner is asked. So whatever removes or
rewrites a block afterwards has a higher number, and wins also when the process dies in between.
"""

from collections.abc import Awaitable, Callable

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.results import MissReason
from kvkeep_server.tiers.base import WriteStatus
from kvkeep_server.tiers.nvme.appender import Append
from kvkeep_server.tiers.nvme.directory import OP_NBYTES_MAX, Directory
from kvkeep_server.tiers.nvme.reading import UNREADABLE
from kvkeep_server.tiers.nvme.recovery import Content, inspect
from kvkeep_server.tiers.nvme.scratch import Scratch
from kvkeep_server.tiers.nvme.segment_format import NUMBER_SHIFT, PAGE_MASK
from kvkeep_server.tiers.nvme.segments import SEQ_NONE, Segment, SegmentState
from kvkeep_server.tiers.record import (
    PAGE_NBYTES,
    Rows,
    is_block,
    is_tombstone,
    is_void,
    stored_checksums_match,
    stored_pages,
)

U64 = NDArray[np.uint64]


class Reclaimer:
    """Of one directory. Event loop only.

    Args:
        directory: Whose segments.
        append: Writes records of a retention class into it.
    """

    def __init__(
        self, *, directory: Directory, append: Callable[[str, Append], Awaitable[None]]
    ) -> None:
        """See the class."""
        self._directory = directory
        self._append = append
        self._busy = False

    async def reclaim_oldest(self) -> bool:
        """Gives back the segment whose newest record is the oldest.

        Returns:
            False when there is none, when another call is at it, or when its wanted records could
            not be written (nothing is lost then).
        """
        if self._busy:
            return False
        self._busy = True
        try:
            return await self._reclaim_oldest()
        finally:
            self._busy = False

    async def _reclaim_oldest(self) -> bool:
        table = self._directory.table
        candidates = table.of_states(SegmentState.SEALED, SegmentState.QUARANTINED)
        candidates = [segment for segment in candidates if not segment.pending]
        if not candidates or table.of_states(SegmentState.FOUND):
            return False
        segment = min(candidates, key=lambda segment: segment.seq_max)
        table.hold(segment)
        try:
            done = await self._empty(segment)
        finally:
            table.release(segment)
        if done:
            self._directory.counts.reclaimed += 1
            table.retire(segment)
            await self._directory.unlink_retired()
        return done

    async def _empty(self, segment: Segment) -> bool:
        """Writes again what is wanted of a segment; False when that failed."""
        directory = self._directory
        try:
            found = await directory.run(
                lambda: inspect(directory.files, directory.workers.bounce, segment)
            )
        except FileNotFoundError:
            directory.counts.vanished += 1
            found = ""
        except OSError as error:
            directory.read_failed(error)
            if error.errno not in UNREADABLE:
                return False
            found = ""
        if not isinstance(found, Content):
            directory.owner.segment_lost(segment.number)
            return True
        if not await self._keep_marks(segment, found.rows):
            return False
        rows = found.rows[is_block(found.rows)]
        start = 0
        while start < len(rows):
            ends = np.cumsum(stored_pages(rows[start:]))
            fit = int(np.searchsorted(ends, OP_NBYTES_MAX // PAGE_NBYTES, side="right"))
            stop = start + max(1, fit)
            if not await self._reinsert(segment, rows[start:stop]):
                return False
            start = stop
        return True

    async def _keep_marks(self, segment: Segment, rows: Rows) -> bool:
        """Writes again what other segments still need said.

        A tombstone goes with the last segment that may hold an older record than itself. It keeps
        its number: with a new one it would win over later records of its key. A void goes with the
        segment of the record that it names.
        """
        everywhere = [s for table in self._directory.tables for s in table.segments.values()]
        others = [s for s in everywhere if s is not segment and s.readable]
        oldest = min((s.seq_min for s in others), default=SEQ_NONE)
        needed = is_tombstone(rows) & (rows["record_seq"] > np.uint64(oldest))
        numbers = np.array([s.number for s in others], np.uint64)
        needed |= is_void(rows) & np.isin(rows["target"] >> NUMBER_SHIFT, numbers)
        marks = rows[needed]
        if not len(marks):
            return True
        sources = [memoryview(b"")] * len(marks)
        append = Append.of(marks, sources, durable=True, for_reclaim=True)
        await self._append(segment.retention_class, append)
        # Without room (a limit that was lowered), keeping them would keep everything.
        lost = append.status == WriteStatus.THROTTLED
        self._directory.counts.tombstones_lost += int(lost.sum())
        return not (append.status == WriteStatus.FAILED).any()

    async def _reinsert(self, segment: Segment, rows: Rows) -> bool:
        """Writes again what is wanted of neighbouring records."""
        directory = self._directory
        rows = rows[self._alive(segment, rows)]
        if not len(rows):
            return True
        wanted = directory.owner.wanted(rows)
        seqs = directory.sequence.take_seqs(int(wanted.sum()))
        rows = rows[wanted]
        if not len(rows):
            return True
        scratch = directory.workers.bounce.take(_span(rows)[1])
        try:
            good, failed = await directory.run(lambda: self._load(segment, rows, scratch))
        except OSError as error:
            directory.read_failed(error)
            directory.workers.bounce.give(scratch)
            return False
        try:
            directory.counts.corrupt += int((~good).sum()) - len(failed)
            if failed:
                directory.read_failed(failed[-1], len(failed))
            self._drop(segment, rows[~good], MissReason.CORRUPT)
            old = rows[good]
            new = old.copy()
            new["record_seq"] = seqs[good]
            append = Append.of(new, _payloads(old, rows, scratch), durable=True, for_reclaim=True)
            await self._append(segment.retention_class, append)
            return self._note(segment, old, append)
        finally:
            directory.workers.bounce.give(scratch)

    def _load(
        self, segment: Segment, rows: Rows, scratch: Scratch
    ) -> tuple[NDArray[np.bool_], list[OSError]]:
        """Reads all from the first to the last of these records, and verifies them. In a thread.

        Where the medium fails, one by one, so that only bad places suffer.

        Returns:
            Which are right; and of those that are not for the medium's sake, what it said.

        Raises:
            OSError: it may be over in a moment.
        """
        first_page, nbytes = _span(rows)
        files = self._directory.files
        fd = segment.opened(files)
        failed: list[OSError] = []
        good = np.ones(len(rows), np.bool_)
        try:
            files.preadv(fd, [scratch.data[:nbytes]], first_page * PAGE_NBYTES)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            starts = (rows["location"] & PAGE_MASK).astype(np.int64) - first_page
            pieces = zip(starts.tolist(), stored_pages(rows).tolist(), strict=True)
            for place, (start, pages) in enumerate(pieces):
                part = scratch.data[start * PAGE_NBYTES : (start + pages) * PAGE_NBYTES]
                part[:] = bytes(len(part))
                try:
                    files.preadv(fd, [part], (first_page + start) * PAGE_NBYTES)
                except OSError as one:
                    good[place] = False
                    failed.append(one)
        return good & stored_checksums_match(rows, _payloads(rows, rows, scratch)), failed

    def _note(self, segment: Segment, old: Rows, append: Append) -> bool:
        """Tells the owner what moved and what is lost; False when to try again later."""
        directory = self._directory
        written = append.status == WriteStatus.WRITTEN
        alive = self._alive(segment, old)
        moved = written & alive
        # Removed while they were copied: the tombstone's number is higher, so they stay dead.
        for location in append.rows["location"][written & ~alive].tolist():
            target = directory.table.segments.get(location >> 32)
            if target is not None:
                target.dead.add(location & int(PAGE_MASK))
        directory.counts.reinserted += int(moved.sum())
        if moved.any():
            new = append.rows[moved]
            directory.owner.moved(old[moved], new["location"], new["record_seq"])
            # From here on only the new places count, also if this segment is tried again.
            segment.dead.update((old["location"][moved] & PAGE_MASK).tolist())
        if (append.status == WriteStatus.FAILED).any():
            return False
        no_room = ~written & alive
        directory.counts.reinsert_failed += int(no_room.sum())
        self._drop(segment, old[no_room], MissReason.EVICTED)
        return True

    def _drop(self, segment: Segment, rows: Rows, reason: MissReason) -> None:
        self._directory.lose(segment, rows["location"], rows["record_seq"], reason)

    def _alive(self, segment: Segment, rows: Rows) -> NDArray[np.bool_]:
        if not segment.dead:
            return np.ones(len(rows), np.bool_)
        pages = (rows["location"] & PAGE_MASK).astype(np.int64)
        return ~np.isin(pages, np.fromiter(segment.dead, np.int64))


def _span(rows: Rows) -> tuple[int, int]:
    """First page, and bytes from there to behind the last record."""
    pages = (rows["location"] & PAGE_MASK).astype(np.int64)
    first = int(pages[0])
    return first, int(pages[-1] + stored_pages(rows[-1:])[0] - first) * PAGE_NBYTES


def _payloads(rows: Rows, loaded: Rows, scratch: Scratch) -> list[memoryview]:
    """Stored bytes of some records of those that were loaded."""
    first_page, _ = _span(loaded)
    pages = (rows["location"] & PAGE_MASK).astype(np.int64) - first_page + 1
    flat, sizes = scratch.data, rows["stored_nbytes"].tolist()
    starts = (pages * PAGE_NBYTES).tolist()
    return [flat[start : start + n] for start, n in zip(starts, sizes, strict=True)]
