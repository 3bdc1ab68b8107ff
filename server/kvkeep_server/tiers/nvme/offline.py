"""What lies in the directories of a tier that nobody runs, held against itself. Changes nothing.

One pass, the newest segment first, so that a void is met before the record that it names. A sealed
segment's table is held against the header of each record; on request also every byte against its
checksum, as those of a segment without a table are in any case: that is how its end is found.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.quantities import show_size
from kvkeep_server.tiers.nvme.directory import OP_NBYTES_MAX
from kvkeep_server.tiers.nvme.epoch_files import ENOUGH, NOT_OURS, look
from kvkeep_server.tiers.nvme.epoch_format import file_name
from kvkeep_server.tiers.nvme.files import Files
from kvkeep_server.tiers.nvme.numbering import twins
from kvkeep_server.tiers.nvme.recovery import NEWER, Content, inspect
from kvkeep_server.tiers.nvme.scratch import Scratch, ScratchPool
from kvkeep_server.tiers.nvme.segment_format import PAGE_MASK
from kvkeep_server.tiers.nvme.segments import DirectorySettings, Segment, SegmentTable
from kvkeep_server.tiers.record import (
    PAGE_NBYTES,
    Rows,
    is_block,
    is_void,
    raw_of,
    rows_in_pages,
    stored_checksums_match,
    stored_pages,
)

_SENTENCES_MAX = 100
_HEADERS_AT_ONCE = 256
# A daemon never removes what it cannot read: somebody may have a use for it.
_UNUSED = "nothing of it is used, its bytes count until you remove it"

Mask = NDArray[np.bool_]


@dataclass(slots=True)
class OfflineReport:
    """What was seen.

    Attributes:
        findings: What is wrong, a sentence each; at most 100.
        notes: What is not, and worth a look; at most 100.
        disks: Of each directory: path, bytes taken, bytes allowed.
        segments: That could be read.
        blocks_checked: Blocks whose header was held against its place and, if there is one, against
            the segment's table.
        blocks_verified: Blocks of which every byte was held against the checksum.
        nbytes_verified: Their bytes.
        blocks_corrupt: Blocks of sealed segments with a wrong header or wrong bytes.
    """

    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    disks: list[tuple[str, int, int]] = field(default_factory=list)
    segments: int = 0
    blocks_checked: int = 0
    blocks_verified: int = 0
    nbytes_verified: int = 0
    blocks_corrupt: int = 0

    def find(self, finding: str) -> None:
        """Adds a finding, while there is room for it."""
        if len(self.findings) < _SENTENCES_MAX:
            self.findings.append(finding)

    def note(self, note: str) -> None:
        """Adds a note, while there is room for it."""
        if len(self.notes) < _SENTENCES_MAX:
            self.notes.append(note)


class OfflineCheck:
    """One check; blocks. The caller keeps daemons out of the directories meanwhile.

    Args:
        directories: Of one tier, all of them: their segments are numbered together.
        files: The file systems.
        clock: For the rate.
        nbytes_per_s: None = bytes of sealed segments are not read; else so many a second at most.
    """

    def __init__(
        self,
        *,
        directories: Sequence[DirectorySettings],
        files: Files,
        clock: Clock,
        nbytes_per_s: int | None,
    ) -> None:
        """See the class."""
        self._tables = [SegmentTable(settings=one, files=files) for one in directories]
        self._files = files
        self._clock = clock
        self._nbytes_per_s = nbytes_per_s
        self._pool = ScratchPool(nbytes=OP_NBYTES_MAX, kept_max=2)
        self._voided = np.empty(0, np.uint64)
        self._copies: set[str] = set()
        self._seqs = [np.empty(0, np.uint64)]
        self._pause = Event()
        self._began_s = 0.0
        self.report = OfflineReport()

    def run(self) -> OfflineReport:
        """Looks at everything.

        Raises:
            OSError: A directory cannot be read.
        """
        self._began_s = self._clock.monotonic_s()
        for table in self._tables:
            table.load(self._files.listing(table.settings.path))
            self._directory(table)
            self._epochs(table.settings.path)
        found = [(table, one) for table in self._tables for one in table.segments.values()]
        self._numbers()
        found = [(table, one) for table, one in found if one.path not in self._copies]
        for table, segment in sorted(found, key=lambda entry: -entry[1].number):
            try:
                self._segment(segment)
            except OSError as error:
                self.report.find(f"{segment.path}: cannot be read: {error.strerror}")
            finally:
                table.close(segment)
        seqs = np.concatenate(self._seqs)
        twice = len(seqs) - len(np.unique(seqs))
        if twice:
            self.report.find(f"{twice} record numbers were given out twice")
        return self.report

    def _directory(self, table: SegmentTable) -> None:
        report, settings = self.report, table.settings
        report.disks.append((settings.path, table.used_nbytes, settings.max_nbytes))
        for name in sorted(table.foreign):
            report.note(f"{settings.path}/{name} is not ours: its bytes count, nobody touches it")
        if table.used_nbytes > settings.max_nbytes:
            report.find(
                f"{settings.path} takes {show_size(table.used_nbytes)}, more than the"
                f" {show_size(settings.max_nbytes)} allowed; a daemon gives back what is over"
            )

    def _epochs(self, directory: str) -> None:
        found, report = look(self._files, self._pool, directory), self.report
        for number in found.foreign:
            report.note(f"{directory}/{file_name(number)} {NOT_OURS}")
        if found.refused:
            report.find(f"a daemon does not start: {found.refused}")
            return
        for path, why in found.damaged.items():
            report.find(f"{path} {why}; {ENOUGH}")

    def _numbers(self) -> None:
        for _, segment, other, is_copy in twins(self._files, self._pool, self._tables):
            if is_copy:
                self.report.find(f"{segment.path} is a copy of {other.path}; {_UNUSED}")
                self._copies.add(segment.path)
            else:
                self.report.find(
                    f"{segment.path} has the number of {other.path}, and is another segment: a"
                    " daemon does not start with both directories"
                )

    def _segment(self, segment: Segment) -> None:
        report = self.report
        found = inspect(self._files, self._pool, segment)
        if isinstance(found, str):
            say = report.note if found.startswith(NEWER) else report.find
            say(f"{segment.path}: {found}; {_UNUSED}")
            return
        report.segments += 1
        rows = found.rows
        self._voided = np.append(self._voided, rows["target"][is_void(rows)])
        self._seqs.append(rows["record_seq"].copy())
        blocks = rows[is_block(rows) & ~np.isin(rows["location"], self._voided)]
        report.blocks_checked += len(blocks)
        if (blocks["retention_class"] != found.header.retention_class.encode()).any():
            report.find(f"{segment.path}: blocks of another class than the segment's")
        if found.sealed:
            self._sealed(segment, blocks)
        else:
            self._unsealed(segment, found, blocks)

    def _unsealed(self, segment: Segment, found: Content, blocks: Rows) -> None:
        """As a daemon leaves it that was killed, or whose sync failed: with a tail of any kind."""
        self._verified(blocks)
        tail = f"; {found.corrupt} records with wrong bytes" if found.corrupt else ""
        tail += "; behind its last record lies what is none" if found.torn else ""
        if segment.nbytes != found.header.pages * PAGE_NBYTES:
            self.report.find(
                f"{segment.path}: {show_size(segment.nbytes)} without a right table; it was cut, or"
                f" its end is damaged; {len(blocks)} blocks are whole{tail}"
            )
        else:
            self.report.note(
                f"{segment.path}: not sealed, its daemon was killed or could not write;"
                f" {len(blocks)} blocks are whole{tail}"
            )

    def _sealed(self, segment: Segment, blocks: Rows) -> None:
        read = self._bytes if self._nbytes_per_s is not None else self._headers
        wrong: list[int] = []
        fd = segment.opened(self._files)
        for some, good in read(fd, blocks):
            wrong += (some["location"][~good] & PAGE_MASK).tolist()
        self.report.blocks_corrupt += len(wrong)
        if wrong:
            self.report.find(
                f"{segment.path}: {len(wrong)} blocks are not what its table says, the first of"
                f" them at page {wrong[0]}"
            )

    def _headers(self, fd: int, blocks: Rows) -> Iterator[tuple[Rows, Mask]]:
        """Blocks, some at a time, and which of them have the header that the table says."""
        for start in range(0, len(blocks), _HEADERS_AT_ONCE):
            some = blocks[start : start + _HEADERS_AT_ONCE]
            scratch = self._pool.take(0)
            for place, page in enumerate((some["location"] & PAGE_MASK).tolist()):
                self._read(fd, scratch, place * PAGE_NBYTES, PAGE_NBYTES, page)
            yield some, _same_headers(scratch, np.arange(len(some)), some)
            self._pool.give(scratch)

    def _bytes(self, fd: int, blocks: Rows) -> Iterator[tuple[Rows, Mask]]:
        """As `_headers`, and which of them have right bytes too."""
        for some in _neighbours(blocks):
            pages = (some["location"] & PAGE_MASK).astype(np.int64)
            count = int(pages[-1] + stored_pages(some[-1:])[0] - pages[0])
            scratch = self._pool.take(count * PAGE_NBYTES)
            self._read(fd, scratch, 0, count * PAGE_NBYTES, int(pages[0]))
            good = _same_headers(scratch, pages - pages[0], some)
            begins = ((pages - pages[0] + 1) * PAGE_NBYTES).tolist()
            sizes = some["stored_nbytes"].tolist()
            flat = scratch.data
            stored = [flat[at : at + size] for at, size in zip(begins, sizes, strict=True)]
            good &= stored_checksums_match(some, stored)
            self._verified(some)
            yield some, good
            del flat, stored
            self._pool.give(scratch)

    def _read(self, fd: int, scratch: Scratch, at: int, nbytes: int, page: int) -> None:
        """Into the scratch; zeros where the file ends before."""
        into = scratch.data[at : at + nbytes]
        got = self._files.preadv(fd, [into], page * PAGE_NBYTES)
        into[got:] = bytes(nbytes - got)

    def _verified(self, blocks: Rows) -> None:
        """Counts, and waits as the rate demands."""
        self.report.blocks_verified += len(blocks)
        self.report.nbytes_verified += int(blocks["stored_nbytes"].sum())
        if self._nbytes_per_s:
            due_s = self._began_s + self.report.nbytes_verified / self._nbytes_per_s
            self._pause.wait(max(0.0, due_s - self._clock.monotonic_s()))


def _same_headers(scratch: Scratch, places: NDArray[np.int64], rows: Rows) -> Mask:
    """Which rows are, byte for byte, the valid header page at their place in the scratch."""
    headers, valid = rows_in_pages(scratch.reshape(-1, PAGE_NBYTES)[places])
    same: Mask = (raw_of(headers) == raw_of(np.ascontiguousarray(rows))).all(axis=1)
    return valid & same


def _neighbours(blocks: Rows) -> Iterator[Rows]:
    """Blocks of a segment in runs that are read at once: one, or up to some megabytes of it."""
    pages = (blocks["location"] & PAGE_MASK).astype(np.int64)
    ends = pages + stored_pages(blocks)
    start = 0
    while start < len(blocks):
        limit = pages[start] + OP_NBYTES_MAX // PAGE_NBYTES
        stop = max(start + 1, int(np.searchsorted(ends, limit, side="right")))
        yield blocks[start:stop]
        start = stop
