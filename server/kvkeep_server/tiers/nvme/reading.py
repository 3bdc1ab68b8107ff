"""What a reader thread does: read records, and verify every one. Blocks; any thread."""

import errno
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvkeep_server.tiers.base import ReadStatus
from kvkeep_server.tiers.nvme.directory import OP_NBYTES_MAX, OP_RECORDS_MAX, Workers
from kvkeep_server.tiers.nvme.files import Files
from kvkeep_server.tiers.nvme.scratch import interleave, is_aligned
from kvkeep_server.tiers.nvme.segment_format import PAGE_MASK
from kvkeep_server.tiers.nvme.segments import Segment
from kvkeep_server.tiers.record import (
    HEADER_NBYTES,
    PAGE_NBYTES,
    CodecId,
    Rows,
    is_block,
    key_seed,
    rows_in_pages,
)

U64 = NDArray[np.uint64]
Statuses = NDArray[np.uint8]
# What a medium says of a place that it cannot give back; anything else may be over in a moment.
UNREADABLE = {errno.EIO, errno.EILSEQ, errno.ENODATA}


@dataclass(frozen=True, slots=True)
class Asked:
    """Blocks of one namespace, group and size that lie in one segment, by ascending location.

    Attributes:
        namespace_words: Of the namespace id.
        group: Theirs.
        nbytes: Of each block.
        seed: `checksum_seed` of these three.
        keys: Of each block.
        key_words: The same as words, as wide as in a record.
        locations: Of each.
        stamps: Of each.
        into: Where each goes, `nbytes` long.
    """

    namespace_words: U64
    group: int
    nbytes: int
    seed: int
    keys: Sequence[bytes]
    key_words: U64
    locations: U64
    stamps: U64
    into: Sequence[memoryview]

    def part(self, start: int, stop: int) -> "Asked":
        """Blocks start to stop (exclusive)."""
        return Asked(
            self.namespace_words,
            self.group,
            self.nbytes,
            self.seed,
            self.keys[start:stop],
            self.key_words[start:stop],
            self.locations[start:stop],
            self.stamps[start:stop],
            self.into[start:stop],
        )

    @property
    def record_pages(self) -> int:
        """Pages of each record."""
        return 1 + -(-self.nbytes // PAGE_NBYTES)


def read_blocks(
    files: Files, workers: Workers, segment: Segment, asked: Asked
) -> tuple[Statuses, int]:
    """Reads and verifies blocks: neighbours with one system call.

    Returns:
        A `ReadStatus` each, and how many could not be read for errors of the system.

    Raises:
        FileNotFoundError: the segment's file is gone.
    """
    try:
        fd = segment.opened(files)
    except FileNotFoundError:
        raise
    except OSError:
        count = len(asked.keys)
        return np.full(count, ReadStatus.THROTTLED, np.uint8), count
    status = np.empty(len(asked.keys), np.uint8)
    errors = 0
    for start, stop in _runs(asked):
        status[start:stop], failed = _read_run(files, workers, fd, asked.part(start, stop))
        errors += failed
    return status, errors


def _runs(asked: Asked) -> list[tuple[int, int]]:
    """Bounds of what is read with one system call each."""
    step = asked.record_pages
    breaks = np.flatnonzero(np.diff(asked.locations) != step) + 1
    longest = min(OP_RECORDS_MAX, max(1, OP_NBYTES_MAX // (step * PAGE_NBYTES)))
    bounds = [0, *breaks.tolist(), len(asked.keys)]
    return [
        (start, min(start + longest, bounds[i + 1]))
        for i in range(len(bounds) - 1)
        for start in range(bounds[i], bounds[i + 1], longest)
    ]


def _read_run(files: Files, workers: Workers, fd: int, asked: Asked) -> tuple[Statuses, int]:
    """One system call; where it fails one for each block, so that only bad places suffer."""
    read = _read_direct if all(map(is_aligned, asked.into)) else _read_bounced
    try:
        return read(files, workers, fd, asked), 0
    except OSError as error:
        count = len(asked.keys)
        if count == 1:
            bad = error.errno in UNREADABLE
            answer = ReadStatus.CORRUPT if bad else ReadStatus.THROTTLED
            return np.array([answer], np.uint8), 1
    parts = [_read_run(files, workers, fd, asked.part(i, i + 1)) for i in range(count)]
    return np.concatenate([status for status, _ in parts]), sum(failed for _, failed in parts)


def _read_direct(files: Files, workers: Workers, fd: int, asked: Asked) -> Statuses:
    """Whole pages go straight to where they are wanted."""
    count, rest = len(asked.keys), asked.nbytes % PAGE_NBYTES
    scratch = workers.read_pairs.take(0)
    try:
        pairs = scratch[: 2 * count * PAGE_NBYTES].reshape(count, 2, PAGE_NBYTES)
        got = files.preadv(fd, interleave(scratch, asked.into), _offset(asked))
        pairs[_headers_in(got, asked) :, 0, :HEADER_NBYTES] = 0
        if rest:
            for pair, target in zip(pairs, asked.into, strict=True):
                target[-rest:] = pair[1, :rest].data
        return _verify(asked, pairs[:, 0])
    finally:
        workers.read_pairs.give(scratch)


def _read_bounced(files: Files, workers: Workers, fd: int, asked: Asked) -> Statuses:
    """For callers' memory that is not aligned."""
    count, stride = len(asked.keys), asked.record_pages * PAGE_NBYTES
    scratch = workers.bounce.take(count * stride)
    try:
        records = scratch[: count * stride].reshape(count, stride)
        got = files.preadv(fd, [scratch.data[: count * stride]], _offset(asked))
        records[_headers_in(got, asked) :, :HEADER_NBYTES] = 0
        for record, target in zip(records, asked.into, strict=True):
            target[:] = record[PAGE_NBYTES : PAGE_NBYTES + asked.nbytes].data
        return _verify(asked, records)
    finally:
        workers.bounce.give(scratch)


def _headers_in(got: int, asked: Asked) -> int:
    """How many headers so many bytes hold: what the file does not have is no record. A payload that
    is not all there fails its checksum."""
    return -(-(got // PAGE_NBYTES) // asked.record_pages)


def _offset(asked: Asked) -> int:
    return int(asked.locations[0] & PAGE_MASK) * PAGE_NBYTES


def _verify(asked: Asked, pages: NDArray[np.uint8]) -> Statuses:
    """Whether headers and payloads are those of the blocks: HIT; of another block, which is what a
    caller with old news gets: MISS; anything else is CORRUPT."""
    rows, good = rows_in_pages(pages)
    good &= rows["location"] == asked.locations
    same = _is_asked(rows, asked)
    status = np.where(good, ReadStatus.MISS, ReadStatus.CORRUPT).astype(np.uint8)
    wanted = rows["stored_checksum"].tolist()
    for i in np.flatnonzero(good & same).tolist():
        digest = xxhash.xxh3_64_intdigest(asked.into[i], key_seed(asked.seed, asked.keys[i]))
        status[i] = ReadStatus.HIT if digest == wanted[i] else ReadStatus.CORRUPT
    return status


def _is_asked(rows: Rows, asked: Asked) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = rows["record_seq"] == asked.stamps
    same &= (rows["namespace_id"] == asked.namespace_words).all(axis=1)
    same &= (rows["group"] == asked.group) & (rows["payload_nbytes"] == asked.nbytes)
    same &= (rows["key"] == asked.key_words).all(axis=1)
    same &= (rows["codec"] == CodecId.RAW) & is_block(rows)
    return same
