"""The segments of one directory: their lives, their files, and the bytes that they take.

Event loop only, but for `Segment.opened`, which worker threads call.
"""

import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from kvkeep_server.core.quantities import show_size
from kvkeep_server.tiers.nvme.epoch_format import UNFINISHED_NAME, number_of
from kvkeep_server.tiers.nvme.files import Files, Found
from kvkeep_server.tiers.nvme.segment_format import FIRST_PAGE, PAGE_MAX, table_pages
from kvkeep_server.tiers.record import PAGE_NBYTES

# No record number is so large: it starts at a segment number << 32.
SEQ_NONE = (1 << 64) - 1
# More than any file system has: nobody asked it yet.
_UNKNOWN_NBYTES = 1 << 62
# The lock and the files of epochs: a page each, and nobody counts them one by one.
_ASIDE_NBYTES = 4 * PAGE_NBYTES
LOCK_NAME = "kvkeep.lock"
_OTHER_NAMES = (LOCK_NAME, UNFINISHED_NAME)
_NAME = re.compile(r"([0-9a-f]{8})\.kvks")


class SegmentState(IntEnum):
    """What may be done with a segment."""

    FOUND = 1  # was there at the start and is not recovered yet: readable if somebody knows where
    ACTIVE = 2  # records go in
    SEALED = 3
    QUARANTINED = 4  # an error on write: nothing more goes in; what was synced is readable
    SKIPPED = 5  # damaged or of a newer version: its bytes count, nothing of it is used
    RECLAIMED = 6  # gone, or goes with its last reader


class SegmentEvent(IntEnum):
    """What happens to a segment."""

    RECOVER = 1
    SKIP = 2
    SEAL = 3
    QUARANTINE = 4
    RECLAIM = 5


_NEXT = {
    (SegmentState.FOUND, SegmentEvent.RECOVER): SegmentState.SEALED,
    (SegmentState.FOUND, SegmentEvent.SKIP): SegmentState.SKIPPED,
    (SegmentState.FOUND, SegmentEvent.RECLAIM): SegmentState.RECLAIMED,
    (SegmentState.ACTIVE, SegmentEvent.SEAL): SegmentState.SEALED,
    (SegmentState.ACTIVE, SegmentEvent.QUARANTINE): SegmentState.QUARANTINED,
    (SegmentState.ACTIVE, SegmentEvent.RECLAIM): SegmentState.RECLAIMED,
    (SegmentState.ACTIVE, SegmentEvent.SKIP): SegmentState.SKIPPED,
    (SegmentState.SEALED, SegmentEvent.RECLAIM): SegmentState.RECLAIMED,
    (SegmentState.QUARANTINED, SegmentEvent.RECLAIM): SegmentState.RECLAIMED,
}
# Up to here its blocks may be read. A comparison: to look an enum up in a set takes four times as
# long, and every read asks.
_READABLE_MAX = int(SegmentState.QUARANTINED)


@dataclass(slots=True, eq=False)
class Segment:
    """One file of the log.

    Attributes:
        number: Never used again while the directory lives.
        path: Of the file.
        nbytes: That count as used.
        pages: Of the file; behind `end_page` there is nothing, or the table.
        retention_class: Of its records; "" until recovered.
        state: See there.
        end_page: Behind the last record.
        records: In it.
        seq_min: Lowest record_seq of its records that are no tombstones; 0 until recovered,
            SEQ_NONE when it has none.
        seq_max: Highest record_seq.
        dead: Pages where records begin that are removed, corrupt or never became good.
        readers: Jobs that use the file now.
        pending: Batches with records in it that are neither committed nor aborted: until then it
            must not be reclaimed.
        fd: -1 while closed.
    """

    number: int
    path: str
    nbytes: int
    pages: int
    retention_class: str
    state: SegmentState
    end_page: int = FIRST_PAGE
    records: int = 0
    seq_min: int = SEQ_NONE
    seq_max: int = 0
    dead: set[int] = field(default_factory=set)
    readers: int = 0
    pending: int = 0
    fd: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def advance(self, event: SegmentEvent) -> None:
        """Takes the next state.

        Raises:
            KeyError: that must not happen to a segment in this state.
        """
        self.state = _NEXT[self.state, event]

    @property
    def readable(self) -> bool:
        """Whether blocks may be read from it."""
        return self.state <= _READABLE_MAX

    @property
    def free_pages(self) -> int:
        """Behind the last record; the table and the footer need some of them."""
        return self.pages - self.end_page

    def may_hold(self, location: int, stamp: int) -> bool:
        """Whether a block of that number may begin there, as far as memory tells."""
        page = location & PAGE_MAX
        lowest = min(self.seq_min, self.seq_max)
        return (
            0 < page < self.end_page and lowest <= stamp <= self.seq_max and page not in self.dead
        )

    def room(self, record_pages: int) -> int:
        """How many more records of so many pages it takes."""
        free = self.free_pages - 1
        count = max(0, free // record_pages)
        while count and count * record_pages + table_pages(self.records + count) > free:
            count -= 1
        return count

    def opened(self, files: Files) -> int:
        """The descriptor; opens the file where it is closed. Any thread, while `readers` > 0.

        Raises:
            OSError: it cannot be opened.
        """
        with self._lock:
            if self.fd < 0:
                self.fd = files.open(self.path)
            return self.fd


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    """What one directory of the tier is allowed.

    Attributes:
        path: Where the segments lie; made where it is missing.
        max_nbytes: Of all files in it, at any moment; at least four segments.
        segment_nbytes: Of one segment, a multiple of 4096.
        free_min_nbytes: Left free on the file system: by users always, by reclaim and by removals
            as far as others left it.
        open_max: Segments whose files are open at a time.
    """

    path: str
    max_nbytes: int
    segment_nbytes: int
    free_min_nbytes: int
    open_max: int


class SegmentTable:
    """All segments of one directory.

    What bounds it is the limit, or the file system if that has less: then it gives its oldest
    segments back as at the limit.

    Args:
        settings: See there.
        files: Its file system.

    Attributes:
        segments: By number.
        foreign: Names that are not ours.
        skipped: Files of which nothing is used, and why.
        used_nbytes: What counts.
        is_limited: The file system has less than the limit allows, and that was felt.
    """

    def __init__(self, *, settings: DirectorySettings, files: Files) -> None:
        """See the class."""
        self.settings = settings
        self.segments: dict[int, Segment] = {}
        self.foreign: list[str] = []
        self.skipped: dict[str, str] = {}
        self.used_nbytes = 0
        self.is_limited = False
        # What the file system has for this directory, used or free, when it was last asked.
        self._disk_nbytes = _UNKNOWN_NBYTES
        self._foreign_nbytes = 0
        self._skipped_nbytes = 0
        self._files = files
        # Of reclaimed segments whose file is still there.
        self._leaving: set[Segment] = set()
        self._unlinkable: list[Segment] = []
        # Segments whose file may be open, the least recently used first.
        self._recent: dict[Segment, None] = {}

    def load(self, found: Iterable[Found]) -> set[int]:
        """Takes in what lies in the directory at the start; the numbers that have a name there.

        Names that are not ours are noted, counted as used, and never touched.
        """
        named = set()
        for entry in found:
            match = _NAME.fullmatch(entry.name)
            if match is not None:
                named.add(int(match[1], 16))
            if match is None or not entry.regular or not int(match[1], 16):
                if entry.name not in _OTHER_NAMES and number_of(entry.name) is None:
                    self.foreign.append(entry.name)
                    self._foreign_nbytes += entry.disk_nbytes
                continue
            number = int(match[1], 16)
            pages = entry.nbytes // PAGE_NBYTES
            segment = Segment(
                number, self._path(number), entry.nbytes, pages, "", SegmentState.FOUND
            )
            segment.end_page, segment.seq_min, segment.seq_max = pages, 0, SEQ_NONE
            self._add(segment)
        self.used_nbytes += self._foreign_nbytes
        return named

    def note_free(self, free_nbytes: int) -> None:
        """The file system has so much free for us, `free_min` included."""
        self._disk_nbytes = self.used_nbytes + free_nbytes
        if self._of_disk_nbytes >= self._of_limit_nbytes:
            self.is_limited = False
        elif self.is_short:
            self.is_limited = True

    @property
    def user_limit_nbytes(self) -> int:
        """What may be used with what users write; reclaim needs a segment more."""
        return min(self._of_limit_nbytes, self._of_disk_nbytes)

    @property
    def _of_limit_nbytes(self) -> int:
        return self.settings.max_nbytes - _ASIDE_NBYTES - self.settings.segment_nbytes

    @property
    def _of_disk_nbytes(self) -> int:
        settings = self.settings
        return self._disk_nbytes - settings.free_min_nbytes - settings.segment_nbytes

    def may_create(self, *, for_reclaim: bool = False) -> bool:
        """Whether there is room for another segment.

        Args:
            for_reclaim: The one that users leave is for what is reinserted: room comes back at its
                end.
        """
        limit = self.user_limit_nbytes
        if for_reclaim:
            limit = min(self.settings.max_nbytes - _ASIDE_NBYTES, self._disk_nbytes)
        return self.used_nbytes + self.settings.segment_nbytes <= limit

    @property
    def is_over(self) -> bool:
        """Whether more is used than users may: nothing may be written for them."""
        return self.used_nbytes > self.user_limit_nbytes

    @property
    def is_short(self) -> bool:
        """Whether the file system has no room for another segment of users."""
        return self.used_nbytes + self.settings.segment_nbytes > self._of_disk_nbytes

    @property
    def is_hopeless(self) -> bool:
        """Whether it would not have it either if all that may go had gone."""
        stays_nbytes = self._foreign_nbytes + self._skipped_nbytes
        return stays_nbytes + self.settings.segment_nbytes > self._of_disk_nbytes

    @property
    def gives_back(self) -> bool:
        """Whether a segment is to go: at the limit, or where the file system has room then."""
        within = self.used_nbytes + self.settings.segment_nbytes <= self._of_limit_nbytes
        return not within or (self.is_short and not self.is_hopeless)

    def shortage(self) -> str:
        """What the file system lacks, and what to do about it."""
        settings = self.settings
        free = show_size(max(0, self._disk_nbytes - self.used_nbytes))
        kept = show_size(settings.free_min_nbytes)
        needed = show_size(2 * settings.segment_nbytes)
        return (
            f"the file system of {settings.path} has {free} free; nvme.free_min keeps {kept} of it"
            f" for others, and two segments need {needed}: make room on it, lower nvme.free_min or"
            " nvme.segment, or name another directory"
        )

    def begin(self, number: int, retention_class: str) -> Segment:
        """A new active segment, counted as used from now on; its file is the caller's to make."""
        nbytes = self.settings.segment_nbytes
        pages = nbytes // PAGE_NBYTES
        path = self._path(number)
        segment = Segment(number, path, nbytes, pages, retention_class, SegmentState.ACTIVE)
        self._add(segment)
        return segment

    def resize(self, segment: Segment, nbytes: int) -> None:
        """Notes a new size of a segment's file."""
        self.used_nbytes += nbytes - segment.nbytes
        segment.nbytes, segment.pages = nbytes, nbytes // PAGE_NBYTES

    def skip(self, segment: Segment, reason: str) -> None:
        """Uses nothing of a segment; its bytes go on counting."""
        segment.advance(SegmentEvent.SKIP)
        self.skipped[segment.path] = reason
        self._skipped_nbytes += segment.nbytes

    def of_states(self, *states: SegmentState) -> list[Segment]:
        """Segments in one of these states, oldest number first."""
        return [self.segments[n] for n in sorted(self.segments) if self.segments[n].state in states]

    # --- files in use -----------------------------------------------------------------------------

    def hold(self, segment: Segment) -> None:
        """One more job uses the file: it stays there and open until `release`."""
        segment.readers += 1
        self._recent.pop(segment, None)
        self._recent[segment] = None

    def release(self, segment: Segment) -> None:
        """A job ended."""
        segment.readers -= 1
        assert segment.readers >= 0
        if segment in self._leaving and not segment.readers:
            self._unlinkable.append(segment)
            self._leaving.remove(segment)
        elif len(self._recent) > self.settings.open_max:
            self._close_idle()

    def _close_idle(self) -> None:
        idle = [s for s in self._recent if not s.readers and s.state != SegmentState.ACTIVE]
        for segment in idle[: len(self._recent) - self.settings.open_max]:
            self.close(segment)

    def close(self, segment: Segment) -> None:
        """Closes a file that nobody uses."""
        assert not segment.readers
        self._recent.pop(segment, None)
        if segment.fd >= 0:
            fd, segment.fd = segment.fd, -1
            self._files.close(fd)

    # --- going ------------------------------------------------------------------------------------

    def retire(self, segment: Segment) -> None:
        """Takes a segment out: its blocks are gone, its file goes when its last reader ends."""
        segment.advance(SegmentEvent.RECLAIM)
        del self.segments[segment.number]
        if segment.readers:
            self._leaving.add(segment)
        else:
            self._unlinkable.append(segment)

    def take_unlinkable(self) -> list[Segment]:
        """Segments whose files nobody uses any more: unlink each, then call `unlinked`, or
        `unlink_failed`."""
        taken, self._unlinkable = self._unlinkable, []
        for segment in taken:
            self.close(segment)
        return taken

    def unlinked(self, segment: Segment) -> None:
        """The file is gone: its bytes are free."""
        self.used_nbytes -= segment.nbytes

    def unlink_failed(self, segment: Segment) -> None:
        """The file is still there, and still counts: another try comes later."""
        self._unlinkable.append(segment)

    @property
    def waiting_to_go(self) -> int:
        """Reclaimed segments whose files are still there."""
        return len(self._leaving) + len(self._unlinkable)

    def close_all(self) -> None:
        """At the end: closes what is open. Nobody may use it any more."""
        for segment in [*self.segments.values(), *self._leaving, *self._unlinkable]:
            self.close(segment)

    def check(self, found: Iterable[Found]) -> None:
        """Audits the table against the directory.

        Raises:
            AssertionError: they differ.
        """
        gone = [*self._leaving, *self._unlinkable]
        ours = {segment.path: segment for segment in [*self.segments.values(), *gone]}
        assert len(ours) == len(self.segments) + len(gone), "two segments of one name"
        sizes = {
            f"{self.settings.path}/{entry.name}": entry.nbytes
            for entry in found
            if _NAME.fullmatch(entry.name) and entry.name not in self.foreign
        }
        for path, nbytes in sizes.items():
            assert path in ours, f"{path} leaked out of the accounting"
            assert nbytes == ours[path].nbytes, f"{path} has {nbytes} bytes"
        assert set(ours) <= set(sizes), f"files are gone: {sorted(set(ours) - set(sizes))[:3]}"
        total = sum(segment.nbytes for segment in ours.values())
        assert self.used_nbytes == total + self._foreign_nbytes, "bytes do not add up"
        for segment in self.segments.values():
            assert segment.end_page <= segment.pages or not segment.pages, "records behind the end"
            assert segment.readers >= 0

    def _add(self, segment: Segment) -> None:
        self.segments[segment.number] = segment
        self.used_nbytes += segment.nbytes

    def _path(self, number: int) -> str:
        return f"{self.settings.path}/{number:08x}.kvks"
