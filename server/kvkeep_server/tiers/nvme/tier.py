"""The nvme tier: `tiers.base.Tier` over the logs of several directories.

A location is segment number << 32 | page, a stamp is a record's number. What a block's record holds
is known only on disk: the tier remembers of a segment its bounds and what died in it, so a block
costs it no memory. Its owner (`RecordOwner`) knows which records are wanted.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.errors import InvalidArgumentError, TierUnavailableError
from kvkeep_server.core.ownership import Ownership
from kvkeep_server.core.results import TierId
from kvkeep_server.tiers.base import Blocks, Presence, ReadStatus, RemoveStatus, WriteStatus
from kvkeep_server.tiers.nvme.appender import Append
from kvkeep_server.tiers.nvme.batch import NvmeBatch
from kvkeep_server.tiers.nvme.clock import LogClock
from kvkeep_server.tiers.nvme.crew import ReadingCrew
from kvkeep_server.tiers.nvme.directory import (
    Counts,
    Directory,
    Health,
    RecordOwner,
    RecordSequence,
    Workers,
)
from kvkeep_server.tiers.nvme.files import Files
from kvkeep_server.tiers.nvme.log import Log
from kvkeep_server.tiers.nvme.numbering import last_number, leave_copies_out
from kvkeep_server.tiers.nvme.reading import Call, Job, read_blocks
from kvkeep_server.tiers.nvme.recovery import recover_segment, sift
from kvkeep_server.tiers.nvme.segment_format import PAGE_MAX
from kvkeep_server.tiers.nvme.segments import (
    DirectorySettings,
    Segment,
    SegmentState,
    SegmentTable,
)
from kvkeep_server.tiers.nvme.stats import NvmeStats, directory_stats
from kvkeep_server.tiers.record import (
    Rows,
    checksum_seed,
    tombstones_of,
)

# A batch of reads is cut into pieces of this size, so that several threads read and verify it.
_PIECE_NBYTES = 2 << 20
_PIECE_CALLS = 8
_CORRUPT, _MISS = int(ReadStatus.CORRUPT), int(ReadStatus.MISS)


@dataclass(frozen=True, slots=True)
class NvmeSettings:
    """What the tier is allowed.

    Attributes:
        directories: Where it may write what.
        reading_max_nbytes: Of blocks that are being read; above, reads are THROTTLED.
        writing_max_nbytes: Of blocks that are claimed or being written; above, none are reserved.
        sync_interval_s: How long a record may wait for the sync that nobody asked for.
        probe_interval_s: How long a directory is left alone after an error on write, and reclaim
            after a segment that gave nothing back.
        server_epoch: Written into the lock of each directory.
    """

    directories: tuple[DirectorySettings, ...]
    reading_max_nbytes: int
    writing_max_nbytes: int
    sync_interval_s: float
    probe_interval_s: float
    server_epoch: int


class NvmeTier:
    """Event loop only. `start` comes first, `close` last; `run` goes on in between, in a task.

    Args:
        settings: See there.
        files: The file systems.
        clock: See `core.clock`.
        read_threads: How many threads read blocks; they are the tier's own.
        writers: Threads for everything else that blocks: a hung write must not take those of reads.
        owner: Of the records.
    """

    def __init__(
        self,
        *,
        settings: NvmeSettings,
        files: Files,
        clock: Clock,
        read_threads: int,
        writers: Executor,
        owner: RecordOwner,
    ) -> None:
        """See the class."""
        self._sequence = RecordSequence()
        self._settings = settings
        self._files = files
        self._log_clock = LogClock(clock)
        self._counts = Counts()
        self._reading_nbytes = 0
        workers = Workers.make(
            writers, kept_max=max(read_threads, 2 * len(settings.directories) + 2)
        )
        self._readers = ReadingCrew(read_threads, partial(read_blocks, files, workers))
        tables = [SegmentTable(settings=one, files=files) for one in settings.directories]
        self._logs = [
            Log(
                directory=Directory(
                    table=table,
                    tables=tables,
                    files=files,
                    health=Health(clock=clock, probe_interval_s=settings.probe_interval_s),
                    counts=self._counts,
                    sequence=self._sequence,
                    workers=workers,
                    owner=owner,
                    wall_ms=self._log_clock.now_ms,
                )
            )
            for table in tables
        ]
        self._workers = workers
        self._owner = owner
        self._locks = [
            Ownership(
                Path(directory.path),
                server_epoch=settings.server_epoch,
                instead="name another directory in nvme.directories",
            )
            for directory in settings.directories
        ]

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Takes the directories and looks what lies there; serves from then on, and recovers later.

        Raises:
            FailedPreconditionError: a directory is another's, or not to be used, or not together
                with the others.
            OSError: a directory cannot be read.
        """
        self._log_clock.begin()
        try:
            await self._take_directories()
        except BaseException:
            for lock in self._locks:
                lock.release()
            raise

    async def _take_directories(self) -> None:
        named: set[int] = set()
        for log, lock in zip(self._logs, self._locks, strict=True):
            directory = log.directory
            await directory.run(lock.acquire)
            path = directory.table.settings.path
            found = await directory.run(partial(self._files.listing, path))
            named |= directory.table.load(found)
            await directory.measure()
        await self._logs[0].directory.run(partial(self._number, named))

    def _number(self, named: set[int]) -> None:
        """Prepares the numbers of segments to come; `named` are those of all files. In a thread."""
        tables = [log.directory.table for log in self._logs]
        segments = [segment for table in tables for segment in table.segments.values()]
        files, pool = self._files, self._workers.bounce
        self._sequence.begin_after(last_number(files, pool, segments), named)
        leave_copies_out(files, pool, tables)

    async def recover(self) -> AsyncIterator[Rows]:
        """Finds again what earlier processes wrote: call it once, behind the work.

        Yields:
            Records of a segment, tombstones among them, the newest segment first; times are never
            ahead of `now_ms`. Of the records of a key (namespace, group, key) the one with the
            highest `record_seq` counts, in all that is ever yielded or written; if that is a
            tombstone, there is none.
        """
        found = [
            (segment.number, log.directory, segment)
            for log in self._logs
            for segment in log.directory.table.of_states(SegmentState.FOUND)
        ]
        voided = np.empty(0, np.uint64)
        # A void lies in a later segment than the record that it names, or behind it in its own.
        for _, directory, segment in sorted(found, key=lambda entry: -entry[0]):
            rows = await recover_segment(directory, segment)
            sifted = await directory.run(partial(sift, rows, voided))
            voided = sifted.voided
            segment.dead.update(sifted.never_pages)
            if len(sifted.rows):
                self._log_clock.raise_to(sifted.newest_ms)
                yield sifted.rows
        for log in self._logs:
            await log.directory.unlink_retired()
            log.directory.room_needed.set()

    async def run(self) -> None:
        """Syncs and reclaims behind the work, until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for log in self._logs:
                tasks.create_task(log.sync_behind(self._settings.sync_interval_s))
                tasks.create_task(log.reclaim_behind(self._settings.probe_interval_s))

    async def close(self) -> None:
        """Writes what is queued, seals the active segments, gives the directories back.

        Nobody may call anything afterwards.
        """
        self._readers.close()
        for log, lock in zip(self._logs, self._locks, strict=True):
            try:
                await log.close()
                await log.directory.unlink_retired()
            finally:
                log.directory.table.close_all()
                lock.release()

    async def reclaim_oldest(self) -> bool:
        """Gives back the oldest segment of each directory; whether there was any."""
        return any([await log.reclaim_oldest() for log in self._logs])

    async def seal(self) -> None:
        """Ends the active segments, so that they can be reclaimed."""
        for log in self._logs:
            await log.seal()

    def now_ms(self) -> int:
        """What to call now in `BlockFacts`: wall time in milliseconds that never goes back."""
        return self._log_clock.now_ms()

    # --- Tier -------------------------------------------------------------------------------------

    @property
    def tier_id(self) -> TierId:
        """NVME."""
        return TierId.NVME

    @property
    def block_nbytes_max(self) -> int:
        """The largest block that fits a segment of every directory."""
        return min(log.block_nbytes_max for log in self._logs)

    def resident(self, blocks: Blocks) -> NDArray[np.uint8]:
        """See `Tier`: YES where a record of that number may lie, as far as memory tells."""
        status = np.full(len(blocks), Presence.NO, np.uint8)
        for _, _, places in self._held(blocks.locations.tolist(), blocks.stamps.tolist()):
            status[places] = Presence.YES
        return status

    async def read(self, blocks: Blocks, into: Sequence[memoryview]) -> NDArray[np.uint8]:
        """See `Tier`. Into buffers of any alignment; page-aligned ones are read without a copy."""
        count = len(into)
        assert count == len(blocks)
        nbytes = count * blocks.nbytes
        if self._reading_nbytes and self._reading_nbytes + nbytes > (
            self._settings.reading_max_nbytes
        ):
            self._counts.throttled += count
            there = self.resident(blocks) == Presence.YES
            return np.where(there, ReadStatus.THROTTLED, ReadStatus.MISS).astype(np.uint8)
        call = _call(blocks, into)
        self._reading_nbytes += nbytes
        try:
            await self._read_all(call)
        finally:
            self._reading_nbytes -= nbytes
        return np.frombuffer(call.status, np.uint8)

    def reserve(self, nbytes: int, count: int) -> NvmeBatch:
        """See `Tier`: room in one directory, so that a chain lies together.

        Raises:
            InvalidArgumentError: a block of this size never fits.
        """
        if not 0 < nbytes <= self.block_nbytes_max:
            raise InvalidArgumentError(
                "block_nbytes",
                nbytes,
                f"1 to {self.block_nbytes_max} (one segment of the nvme tier)",
                "raise nvme.segment, or store smaller blocks",
            )
        well = [log for log in self._logs if log.directory.admits] or self._logs
        rooms = [log.room(nbytes) for log in well]
        # A chain stays together where the whole of it fits; new ones go where most room is.
        best = int(np.argmax(rooms))
        left = max(0, self._settings.writing_max_nbytes - self._writing_nbytes)
        queueable = left // nbytes if self._writing_nbytes else max(1, left // nbytes)
        granted = min(count, rooms[best], queueable)
        if granted < min(count, rooms[best]):
            self._counts.throttled += count - granted
        return NvmeBatch(well[best], nbytes, granted)

    async def remove(self, blocks: Blocks) -> NDArray[np.uint8]:
        """See `Tier`: REMOVED when the tombstones are on the medium.

        Raises:
            TierUnavailableError: the blocks are gone, but a tombstone could not be written, so they
                may come back at a restart.
        """
        status = np.full(len(blocks), RemoveStatus.ABSENT, np.uint8)
        appends: list[tuple[Log, str, Append]] = []
        locations = blocks.locations.tolist()
        for log, segment, places in self._held(locations, blocks.stamps.tolist()):
            once = list({locations[place]: place for place in places}.values())
            status[once] = RemoveStatus.REMOVED
            segment.dead.update(locations[place] & PAGE_MAX for place in once)
            some = replace(blocks, keys=blocks.keys.select(np.array(once)))
            appends.append((log, segment.retention_class, self._tombstones(some)))
        await self._bury(appends)
        return status

    # --- looking in -------------------------------------------------------------------------------

    def stats(self) -> NvmeStats:
        """What happened, and what there is now."""
        return NvmeStats(
            counts=replace(self._counts),
            directories=tuple(directory_stats(log.directory) for log in self._logs),
            reading_nbytes=self._reading_nbytes,
            writing_nbytes=self._writing_nbytes,
        )

    def check(self) -> None:
        """Audits the accounting against the files; looks at the directories, so it blocks a little.

        For quiet moments: not while a segment is made, sealed or removed.

        Raises:
            AssertionError: an invariant is broken.
        """
        assert self._reading_nbytes >= 0
        for log in self._logs:
            table = log.directory.table
            log.check()
            table.check(self._files.listing(table.settings.path))

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _writing_nbytes(self) -> int:
        return sum(log.claimed_nbytes for log in self._logs)

    def _held(
        self, locations: list[int], stamps: list[int]
    ) -> list[tuple[Log, Segment, list[int]]]:
        """The readable segments in which blocks may lie, and the positions of those blocks."""
        places_of: dict[int, list[int]] = {}
        for place, location in enumerate(locations):
            places_of.setdefault(location >> 32, []).append(place)
        held = []
        for number, places in places_of.items():
            for log in self._logs:
                segment = log.directory.table.segments.get(number)
                if segment is not None and segment.readable:
                    may = segment.may_hold
                    there = [i for i in places if may(locations[i], stamps[i])]
                    if there:
                        held.append((log, segment, there))
        return held

    async def _read_all(self, call: Call) -> None:
        """Writes its answers into `call.status`."""
        parts = [
            (log, Job(segment, call, piece))
            for log, segment, places in self._held(call.locations, call.stamps)
            for piece in _pieces(call, places)
        ]
        for log, job in parts:
            log.directory.table.hold(job.segment)
        try:
            answers = await self._readers.run([job for _, job in parts])
        finally:
            for log, job in parts:
                log.directory.table.release(job.segment)
        for (log, job), answer in zip(parts, answers, strict=True):
            if isinstance(answer, FileNotFoundError):
                self._vanished(log, job.segment)
            elif isinstance(answer, Exception):
                raise answer
            else:
                if answer:
                    errors = call.errors
                    failed = [errors[place] for place in job.places if place in errors]
                    log.directory.read_failed(failed[-1], answer)
                self._note(log, job)

    def _note(self, log: Log, job: Job) -> None:
        """Counts, and corrects the answers by what happened meanwhile."""
        call, segment = job.call, job.segment
        if segment.dead or _CORRUPT in call.status:
            for place in job.places:
                location = call.locations[place]
                if call.status[place] == _CORRUPT:
                    self._counts.corrupt += place not in call.errors
                    self._give_up(log, segment, location, call.stamps[place])
                elif (location & PAGE_MAX) in segment.dead:
                    call.status[place] = _MISS  # removed meanwhile

    def _give_up(self, log: Log, segment: Segment, location: int, stamp: int) -> None:
        """Drops a record whose bytes are wrong or that the medium does not give; the first who
        finds out tells its owner."""
        if location & PAGE_MAX not in segment.dead:
            one = np.array([[location], [stamp]], np.uint64)
            log.directory.lose(segment, one[0], one[1])

    def _vanished(self, log: Log, segment: Segment) -> None:
        """Somebody removed the file of a segment: its blocks and its bytes are gone."""
        if segment.number in log.directory.table.segments:
            self._counts.vanished += 1
            log.vanished(segment)
            self._owner.segment_lost(segment.number)

    def _tombstones(self, blocks: Blocks, *, durable: bool = True) -> Append:
        rows = tombstones_of(blocks, self.now_ms())
        rows["record_seq"] = self._sequence.take_seqs(len(rows))
        self._counts.tombstones += len(rows)
        return Append.of(rows, [memoryview(b"")] * len(rows), durable=durable, for_reclaim=True)

    async def _bury(self, appends: Sequence[tuple[Log, str, Append]]) -> None:
        await asyncio.gather(*(log.append(name, append) for log, name, append in appends))
        for log, _, append in appends:
            if (append.status != WriteStatus.WRITTEN).any():
                reason = log.directory.sick or "no room"
                raise TierUnavailableError(f"nvme: removed, but not on the medium: {reason}")


def _call(blocks: Blocks, into: Sequence[memoryview]) -> Call:
    return Call(
        blocks.namespace_id,
        blocks.group,
        blocks.nbytes,
        checksum_seed(blocks.namespace_id, blocks.group, blocks.nbytes),
        blocks.keys.key_nbytes,
        blocks.keys.pack(),
        blocks.locations.tolist(),
        blocks.stamps.tolist(),
        into,
        bytearray([_MISS]) * len(into),
    )


def _pieces(call: Call, places: list[int]) -> list[list[int]]:
    """Cuts what lies in one segment for several threads: of neighbours not too many bytes, of
    scattered blocks not too many calls."""
    if len(places) == 1:
        return [places]
    pieces: list[list[int]] = []
    piece: list[int] = []
    calls = 0
    for run in call.runs(sorted(places, key=call.locations.__getitem__), _PIECE_NBYTES):
        calls += 1
        piece += run
        if len(run) * call.nbytes >= _PIECE_NBYTES // 2 or calls == _PIECE_CALLS:
            pieces.append(piece)
            piece, calls = [], 0
    return [*pieces, piece] if piece else pieces
