"""What a reader thread does: read records, and verify every one. Blocks; any thread."""

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import xxhash

from kvkeep_server.core.keys import KEY_NBYTES_MAX
from kvkeep_server.tiers.base import ReadStatus
from kvkeep_server.tiers.nvme.aio import ReadOp
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

    def parts(self, nbytes_max: int) -> list["Asked"]:
        """Each run by itself."""
        runs = self.runs(nbytes_max)
        return [self] if len(runs) == 1 else [self.part(*run) for run in runs]

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


@dataclass(slots=True)
class Job:
    """What is read from one segment.

    Attributes:
        segment: Which, held.
        asked: Its blocks.
    """

    segment: Segment
    asked: Asked

    @property
    def nbytes(self) -> int:
        """Of all its blocks."""
        return len(self.asked.keys) * self.asked.nbytes


def read_blocks(
    files: Files, workers: Workers, jobs: Sequence[Job]
) -> list[Read | FileNotFoundError]:
    """Reads and verifies blocks: neighbours with one system call, and several of those at once.

    Returns:
        Of each job; FileNotFoundError where the segment's file is gone.
    """
    results: list[Read | FileNotFoundError] = []
    runs: list[_Run] = []
    for number, job in enumerate(jobs):
        try:
            fd = job.segment.opened(files)
        except FileNotFoundError as error:
            results.append(error)
        except OSError:
            count = len(job.asked.keys)
            results.append((bytearray([_THROTTLED]) * count, count))
        else:
            results.append((bytearray(), 0))
            runs += [_Run(number, fd, part) for part in job.asked.parts(OP_NBYTES_MAX)]
    for group in _groups(runs):
        for run, (status, errors) in zip(group, _read_group(files, workers, group), strict=True):
            sofar = results[run.job]
            assert not isinstance(sofar, FileNotFoundError)
            results[run.job] = sofar[0] + status, sofar[1] + errors
    return results


@dataclass(slots=True)
class _Run:
    """Neighbours in a file; `job` is the number of the job that wants them."""

    job: int
    fd: int
    asked: Asked


def _groups(runs: list[_Run]) -> Iterator[list[_Run]]:
    """In order, as many at a time as find room in one scratch buffer."""
    group: list[_Run] = []
    records = 0
    for run in runs:
        count = len(run.asked.keys)
        if group and records + count > OP_RECORDS_MAX:
            yield group
            group, records = [], 0
        group.append(run)
        records += count
    if group:
        yield group


def _read_group(files: Files, workers: Workers, runs: list[_Run]) -> list[Read]:
    """Whole pages go straight to where they are wanted."""
    if not all(is_aligned(target) for run in runs for target in run.asked.into):
        return [_read_bounced(files, workers, run) for run in runs]
    scratch = workers.read_pairs.take(0)
    try:
        parts, ops, begin = [], [], 0
        for run in runs:
            end = begin + 2 * len(run.asked.keys) * PAGE_NBYTES
            part = scratch[begin:end]
            parts.append(part.data)
            ops.append(ReadOp(run.fd, interleave(part, run.asked.into), _offset(run.asked)))
            begin = end
        reads = []
        for run, flat, got in zip(runs, parts, files.read_many(ops), strict=True):
            if isinstance(got, OSError):
                reads.append(_one_by_one(files, workers, run, got))
            else:
                reads.append((_direct(run.asked, flat, got), 0))
        return reads
    finally:
        workers.read_pairs.give(scratch)


def _direct(asked: Asked, flat: memoryview, got: int) -> Statuses:
    """Brings the ends of payloads to where they belong, and verifies."""
    rest = asked.nbytes % PAGE_NBYTES
    if rest:
        end = PAGE_NBYTES
        for target in asked.into:
            target[-rest:] = flat[end : end + rest]
            end += 2 * PAGE_NBYTES
    return _verify(asked, flat, 2 * PAGE_NBYTES, got)


def _one_by_one(files: Files, workers: Workers, run: _Run, error: OSError) -> Read:
    """After an error: a read for each block, so that only bad places suffer."""
    count = len(run.asked.keys)
    if count == 1:
        return bytearray([_CORRUPT if error.errno in UNREADABLE else _THROTTLED]), 1
    statuses, errors = bytearray(), 0
    for i in range(count):
        one = replace(run, asked=run.asked.part(i, i + 1))
        [(status, failed)] = _read_group(files, workers, [one])
        statuses += status
        errors += failed
    return statuses, errors


def _read_bounced(files: Files, workers: Workers, run: _Run) -> Read:
    """For callers' memory that is not aligned."""
    asked = run.asked
    stride = asked.record_pages * PAGE_NBYTES
    scratch = workers.bounce.take(len(asked.keys) * stride)
    try:
        flat = scratch.data[: len(asked.keys) * stride]
        [got] = files.read_many([ReadOp(run.fd, [flat], _offset(asked))])
        if isinstance(got, OSError):
            return _one_by_one(files, workers, run, got)
        begin = PAGE_NBYTES
        for target in asked.into:
            target[:] = flat[begin : begin + asked.nbytes]
            begin += stride
        return _verify(asked, flat, stride, got), 0
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
