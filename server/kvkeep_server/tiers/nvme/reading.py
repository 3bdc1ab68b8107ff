"""What a reader thread does: read records, and verify every one. Blocks; any thread."""

import errno
from dataclasses import dataclass

import xxhash

from kvkeep_server.core.keys import KEY_NBYTES_MAX
from kvkeep_server.tiers.base import ReadStatus
from kvkeep_server.tiers.nvme.directory import OP_NBYTES_MAX, OP_RECORDS_MAX, Workers
from kvkeep_server.tiers.nvme.files import Files
from kvkeep_server.tiers.nvme.scratch import interleave, is_aligned
from kvkeep_server.tiers.nvme.segment_format import PAGE_MAX
from kvkeep_server.tiers.nvme.segments import Segment
from kvkeep_server.tiers.record import (
    PAGE_NBYTES,
    check_block,
    key_seed,
)

# A `ReadStatus` each.
Statuses = bytearray
# Statuses, and how many blocks could not be read for errors of the system.
Read = tuple[Statuses, int]
# Looked up once: an enum's attribute costs more than a comparison.
_HIT, _MISS = int(ReadStatus.HIT), int(ReadStatus.MISS)
_CORRUPT, _THROTTLED = int(ReadStatus.CORRUPT), int(ReadStatus.THROTTLED)
# What a medium says of a place that it cannot give back; anything else may be over in a moment.
UNREADABLE = {errno.EIO, errno.EILSEQ, errno.ENODATA}


@dataclass(slots=True)
class Asked:
    """Blocks of one namespace, group and size that lie in one segment, by ascending location.

    Lists, not arrays: most calls are for few blocks, and numpy gives the GIL up where a comparison
    is over sooner than it comes back.

    Attributes:
        namespace_id: Theirs.
        group: Theirs.
        nbytes: Of each block.
        seed: `checksum_seed` of these three.
        keys: Of each block.
        locations: Of each.
        stamps: Of each.
        into: Where each goes, `nbytes` long.
    """

    namespace_id: bytes
    group: int
    nbytes: int
    seed: int
    keys: list[bytes]
    locations: list[int]
    stamps: list[int]
    into: list[memoryview]

    def part(self, start: int, stop: int) -> "Asked":
        """Blocks start to stop (exclusive)."""
        return Asked(
            self.namespace_id,
            self.group,
            self.nbytes,
            self.seed,
            self.keys[start:stop],
            self.locations[start:stop],
            self.stamps[start:stop],
            self.into[start:stop],
        )

    @property
    def record_pages(self) -> int:
        """Pages of each record."""
        return 1 + -(-self.nbytes // PAGE_NBYTES)

    def runs(self, nbytes_max: int) -> list[tuple[int, int]]:
        """Bounds of neighbours that are read with one system call each."""
        if len(self.keys) == 1:
            return [(0, 1)]
        step = self.record_pages
        longest = min(OP_RECORDS_MAX, max(1, nbytes_max // (step * PAGE_NBYTES)))
        runs, start = [], 0
        for i in range(1, len(self.keys) + 1):
            apart = i == len(self.keys) or self.locations[i] != self.locations[i - 1] + step
            if apart or i - start == longest:
                runs.append((start, i))
                start = i
        return runs


def read_blocks(files: Files, workers: Workers, segment: Segment, asked: Asked) -> Read:
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
        return bytearray([_THROTTLED]) * count, count
    status, errors = bytearray(), 0
    runs = asked.runs(OP_NBYTES_MAX)
    if len(runs) == 1:
        return _read_run(files, workers, fd, asked)
    for start, stop in runs:
        some, failed = _read_run(files, workers, fd, asked.part(start, stop))
        status += some
        errors += failed
    return status, errors


def _read_run(files: Files, workers: Workers, fd: int, asked: Asked) -> Read:
    """One system call; where it fails one for each block, so that only bad places suffer."""
    read = _read_direct if all(map(is_aligned, asked.into)) else _read_bounced
    try:
        return read(files, workers, fd, asked), 0
    except OSError as error:
        count = len(asked.keys)
        if count == 1:
            bad = error.errno in UNREADABLE
            return bytearray([_CORRUPT if bad else _THROTTLED]), 1
    parts = [_read_run(files, workers, fd, asked.part(i, i + 1)) for i in range(count)]
    statuses = bytearray().join(status for status, _ in parts)
    return statuses, sum(failed for _, failed in parts)


def _read_direct(files: Files, workers: Workers, fd: int, asked: Asked) -> Statuses:
    """Whole pages go straight to where they are wanted."""
    rest = asked.nbytes % PAGE_NBYTES
    scratch = workers.read_pairs.take(0)
    try:
        flat = scratch.data
        got = files.preadv(fd, interleave(scratch, asked.into), _offset(asked))
        if rest:
            end = PAGE_NBYTES
            for target in asked.into:
                target[-rest:] = flat[end : end + rest]
                end += 2 * PAGE_NBYTES
        return _verify(asked, flat, 2 * PAGE_NBYTES, got)
    finally:
        workers.read_pairs.give(scratch)


def _read_bounced(files: Files, workers: Workers, fd: int, asked: Asked) -> Statuses:
    """For callers' memory that is not aligned."""
    stride = asked.record_pages * PAGE_NBYTES
    scratch = workers.bounce.take(len(asked.keys) * stride)
    try:
        flat = scratch.data[: len(asked.keys) * stride]
        got = files.preadv(fd, [flat], _offset(asked))
        begin = PAGE_NBYTES
        for target in asked.into:
            target[:] = flat[begin : begin + asked.nbytes]
            begin += stride
        return _verify(asked, flat, stride, got)
    finally:
        workers.bounce.give(scratch)


def _headers_in(got: int, asked: Asked) -> int:
    """How many headers so many bytes hold: what the file does not have is no record. A payload that
    is not all there fails its checksum."""
    return -(-(got // PAGE_NBYTES) // asked.record_pages)


def _offset(asked: Asked) -> int:
    return (asked.locations[0] & PAGE_MAX) * PAGE_NBYTES


def _verify(asked: Asked, flat: memoryview, stride: int, got: int) -> Statuses:
    """Whether headers and payloads are those of the blocks: HIT; of another block, which is what a
    caller with old news gets: MISS; anything else is CORRUPT.

    Args:
        asked: The blocks.
        flat: Where their header pages are.
        stride: Bytes from one header page to the next.
        got: Bytes that came from the file.
    """
    there = _headers_in(got, asked)
    statuses = bytearray([_CORRUPT]) * len(asked.keys)
    for i in range(min(there, len(statuses))):
        statuses[i] = _status(asked, i, flat[i * stride : i * stride + PAGE_NBYTES])
    return statuses


def _status(asked: Asked, i: int, page: memoryview) -> int:
    found = check_block(page, asked.namespace_id, asked.group, asked.nbytes)
    if found is None:
        return _CORRUPT
    location, seq, key, checksum = found
    if location == 0:
        return _MISS
    if location != asked.locations[i]:
        return _CORRUPT
    if seq != asked.stamps[i] or key != asked.keys[i].ljust(KEY_NBYTES_MAX, b"\0"):
        return _MISS
    digest = xxhash.xxh3_64_intdigest(asked.into[i], key_seed(asked.seed, asked.keys[i]))
    return _HIT if digest == checksum else _CORRUPT
