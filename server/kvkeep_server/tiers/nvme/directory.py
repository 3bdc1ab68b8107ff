"""One directory of the tier: its segments, its health, and what its jobs share."""

import asyncio
import contextlib
import errno
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.results import MissReason
from kvkeep_server.tiers.nvme.files import Files
from kvkeep_server.tiers.nvme.scratch import ScratchPool
from kvkeep_server.tiers.nvme.segment_format import NUMBER_MAX
from kvkeep_server.tiers.nvme.segments import Segment, SegmentTable
from kvkeep_server.tiers.record import Rows

T = TypeVar("T")
U64 = NDArray[np.uint64]
# Room for headers and ends of 256 records: what one system call writes or reads.
OP_RECORDS_MAX = 256
OP_NBYTES_MAX = 8 << 20
_PAIR_NBYTES = 2 * 4096
# A file system without room, or a quota of it.
FULL = {errno.ENOSPC, errno.EDQUOT}


class RecordOwner(Protocol):
    """Who knows which records are still wanted: the tier asks and tells, on the event loop.

    Rows are `tiers.record.RECORD` arrays; `location` and `record_seq` in them are what `Blocks`
    calls location and stamp. None of these calls may raise or block.
    """

    def wanted(self, rows: Rows) -> NDArray[np.bool_]:
        """Which records of a segment that is about to go shall be written again at the head.

        What is not wanted is gone after the call. Never asked about tombstones.
        """
        ...

    def moved(self, rows: Rows, locations: U64, stamps: U64) -> None:
        """Records lie elsewhere from now on, safe on the medium; the old places are gone soon."""
        ...

    def dropped(self, locations: U64, stamps: U64, reason: MissReason) -> None:
        """Records that were readable are not any more. CORRUPT: wrong, lost in a failed sync, or
        with a file that was cut. EVICTED: wanted, without room to write them again."""
        ...

    def segment_lost(self, number: int) -> None:
        """Nothing that lay in this segment (location >> 32) can be read: its file vanished, or does
        not say any more what it holds."""
        ...


@dataclass(slots=True)
class Counts:
    """What happened since the start; only ever grows. Event loop only.

    Attributes:
        user_nbytes: Payload that callers wrote.
        disk_nbytes: Written to the medium, all told: by `user_nbytes`, the write amplification.
        reinserted: Records that were written again.
        reclaimed: Segments that were given back.
        tombstones: Records of removals.
        tombstones_lost: That found no room, so that what they removed may come back at a restart.
        syncs: fdatasync calls for records.
        corrupt: Records whose bytes were wrong.
        lost: Records that were written and lost before their sync.
        reinsert_failed: Records that were wanted and found no room, or were unreadable.
        read_errors: Records that could not be read, for errors of the system.
        write_errors: Jobs that failed.
        throttled: Blocks turned away for want of room or because too much was queued.
        quarantined: Segments.
        vanished: Segments whose file somebody else removed, or cut while it was written to.
        unlink_errors: Files that could not be removed, each try.
        recovered: Records found again.
    """

    user_nbytes: int = 0
    disk_nbytes: int = 0
    reinserted: int = 0
    reclaimed: int = 0
    tombstones: int = 0
    tombstones_lost: int = 0
    syncs: int = 0
    corrupt: int = 0
    lost: int = 0
    reinsert_failed: int = 0
    read_errors: int = 0
    write_errors: int = 0
    throttled: int = 0
    quarantined: int = 0
    vanished: int = 0
    unlink_errors: int = 0
    recovered: int = 0


class RecordSequence:
    """Numbers of segments and of records, which all directories draw from.

    A process begins at `first segment number << 32`, so its records follow all that earlier ones
    wrote, and nothing has to be read before the first write.
    """

    def __init__(self) -> None:
        """See the class; `begin_after` comes first."""
        self._number = 1
        self._seq = 1 << 32
        self._named: frozenset[int] = frozenset()

    def begin_after(self, number: int, named: Iterable[int] = ()) -> None:
        """All segments so far are at most `number`; `named` are those of all files, ours or not."""
        self._named = frozenset(named)
        self._number = number + 1
        self._pass_names()
        # Where no segment is left, none is written; its number must fit all the same.
        self._seq = min(self._number, NUMBER_MAX) << 32

    def raise_above(self, record_seq: int) -> None:
        """A record of this number was found."""
        self._seq = max(self._seq, record_seq + 1)

    def take_number(self) -> int:
        """For a new segment.

        Raises:
            OverflowError: after 2^32 segments.
        """
        if self._number > NUMBER_MAX:
            msg = "segment numbers are used up: begin with empty directories"
            raise OverflowError(msg)
        number = self._number
        self._number += 1
        self._pass_names()
        return number

    def _pass_names(self) -> None:
        while self._number in self._named:
            self._number += 1

    def take_seqs(self, count: int) -> U64:
        """For new records."""
        first = self._seq
        self._seq += count
        return np.arange(first, first + count, dtype=np.uint64)


class Health:
    """Whether a directory takes writes. One probe at a time, at intervals, finds out that it does
    again.

    Attributes:
        reason: Why it does not; "" = it does.
        is_full: It does not because there is no room.
    """

    def __init__(self, *, clock: Clock, probe_interval_s: float) -> None:
        """See the class."""
        self.reason = ""
        self.is_full = False
        self._clock = clock
        self._interval_s = probe_interval_s
        self._next_probe_s = 0.0
        self._probing = False

    def may_try(self) -> bool:
        """Whether to write now; while it is sick, True makes the caller the probe: `worked` or
        `failed` must follow."""
        if not self.reason:
            return True
        if not self.probe_is_due:
            return False
        self._probing = True
        return True

    @property
    def probe_is_due(self) -> bool:
        """Whether a sick directory may be tried."""
        return not self._probing and self._clock.monotonic_s() >= self._next_probe_s

    @property
    def admits(self) -> bool:
        """Whether a write has a chance now."""
        return not self.reason or self.probe_is_due

    def failed(self, error: Exception) -> None:
        """A write did not work."""
        self.reason = str(error) or type(error).__name__
        self.is_full = isinstance(error, OSError) and error.errno in FULL
        self._probing = False
        self._next_probe_s = self._clock.monotonic_s() + self._interval_s

    def worked(self) -> None:
        """A write worked."""
        self.reason = ""
        self.is_full = False
        self._probing = False


@dataclass(slots=True)
class ReadTrouble:
    """Of one directory.

    Attributes:
        errors: Records that could not be read, for errors of the system.
        reason: What it said the last time.
    """

    errors: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Workers:
    """Threads and what they share.

    Attributes:
        writers: Runs all that blocks but reads of blocks, which have threads of their own.
        pairs: Header page and last page of each record of one system call. Header pages lie at even
            pages and nothing else is ever written there, so that their fill stays zero.
        bounce: Whole records, where the caller's memory is not aligned.
    """

    writers: Executor
    write_pairs: ScratchPool
    read_pairs: ScratchPool
    bounce: ScratchPool

    @classmethod
    def make(cls, writers: Executor, *, kept_max: int) -> "Workers":
        """With scratch memory of which so many buffers of each kind stay."""
        pairs_nbytes = OP_RECORDS_MAX * _PAIR_NBYTES
        return cls(
            writers,
            ScratchPool(nbytes=pairs_nbytes, kept_max=kept_max),
            ScratchPool(nbytes=pairs_nbytes, kept_max=kept_max),
            ScratchPool(nbytes=OP_NBYTES_MAX, kept_max=kept_max),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Directory:
    """What all jobs of one directory share. Event loop only.

    Attributes:
        table: Its segments.
        tables: Those of all directories of the tier: a key may have older records in any.
        files: Its file system.
        health: Of writes.
        counts: Of the whole tier.
        sequence: Of the whole tier.
        workers: Of the whole tier.
        owner: Of the records.
        wall_ms: The log's clock: wall time that never goes back.
        reads: What fails of them.
        room_needed: Set when a segment was made or somebody was turned away: time to reclaim.
        starved: Set when the file system had no room, whatever it had said of itself: a quota, or
            somebody was faster.
    """

    table: SegmentTable
    tables: Sequence[SegmentTable]
    files: Files
    health: Health
    counts: Counts
    sequence: RecordSequence
    workers: Workers
    owner: RecordOwner
    wall_ms: Callable[[], int]
    reads: ReadTrouble = field(default_factory=ReadTrouble)
    room_needed: asyncio.Event = field(default_factory=asyncio.Event)
    starved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def sick(self) -> str:
        """Why it takes no writes; "" = it does."""
        return self.health.reason or (self.table.shortage() if self.table.is_hopeless else "")

    @property
    def admits(self) -> bool:
        """Whether a write has a chance now."""
        return self.health.admits and not self.table.is_hopeless

    def read_failed(self, error: OSError, records: int = 1) -> None:
        """The system could not read so many records: their bytes may be right all the same."""
        self.counts.read_errors += records
        self.reads.errors += records
        self.reads.reason = str(error)

    async def measure(self) -> None:
        """Asks the file system what it has free; where it does not say, its last answer counts."""
        path = self.table.settings.path
        with contextlib.suppress(OSError):
            self.table.note_free(await self.run(partial(self.files.free_nbytes, path)))

    async def run(self, work: Callable[[], T]) -> T:
        """Runs blocking work in a writer thread, to its end also when the caller is cancelled."""
        return await finish(asyncio.get_running_loop().run_in_executor(self.workers.writers, work))

    def lose(
        self,
        segment: Segment,
        locations: U64,
        stamps: U64,
        reason: MissReason = MissReason.CORRUPT,
    ) -> None:
        """Makes records of a segment unreadable and tells their owner why."""
        segment.dead.update((locations & np.uint64(NUMBER_MAX)).tolist())
        if len(locations):
            self.owner.dropped(locations, stamps, reason)

    async def unlink_retired(self) -> None:
        """Removes the files of reclaimed segments that nobody reads any more.

        Their going is on the medium before anything is decided on it: a tombstone may go when no
        older record is left.
        """
        gone = self.table.take_unlinkable()
        for place, segment in enumerate(gone):
            try:
                await self.run(partial(self.files.unlink, segment.path))
            except FileNotFoundError:
                self.table.unlinked(segment)
            except OSError:
                self.counts.unlink_errors += 1
                self.table.unlink_failed(segment)
            except BaseException:
                # Cancelled: whether this file has gone, another try tells.
                for left in gone[place:]:
                    self.table.unlink_failed(left)
                raise
            else:
                self.table.unlinked(segment)
        if gone:
            with contextlib.suppress(OSError):
                await self.run(partial(self.files.sync_directory, self.table.settings.path))


async def finish(running: "asyncio.Future[T]") -> T:
    """Waits for a job's end, also when the caller is cancelled: it touches buffers."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue
        raise
