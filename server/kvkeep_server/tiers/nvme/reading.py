"""What a reader thread does: read records, and verify every one. Blocks; any thread."""

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

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
    record_pages,
)

# Looked up once: an enum's attribute costs more than a comparison.
_HIT, _MISS = int(ReadStatus.HIT), int(ReadStatus.MISS)
_CORRUPT, _THROTTLED = int(ReadStatus.CORRUPT), int(ReadStatus.THROTTLED)
# What a medium says of a place that it cannot give back; anything else may be over in a moment.
UNREADABLE = {errno.EIO, errno.EILSEQ, errno.ENODATA}


@dataclass(slots=True, eq=False)
class Call:
    """What one caller asked for: blocks of one namespace, group and size. A block is named by its
    place, its position here; jobs and runs are lists of places, so that nothing is copied for them.

    Lists, not arrays: most calls are for few blocks, and numpy gives the GIL up where a comparison
    is over sooner than it comes back.

    Attributes:
        namespace_id: Of all blocks.
        group: Of all.
        nbytes: Of each block.
        seed: `checksum_seed` of these three.
        key_nbytes: Of each key.
        keys: One behind the other.
        locations: Of each.
        stamps: Of each.
        into: Where each goes, `nbytes` long.
        status: A `ReadStatus` each, MISS at first; each place is written by one thread.
        errors: Of places that the system could not read, what it said.
    """

    namespace_id: bytes
    group: int
    nbytes: int
    seed: int
    key_nbytes: int
    keys: bytes
    locations: list[int]
    stamps: list[int]
    into: Sequence[memoryview]
    status: bytearray
    errors: dict[int, OSError] = field(default_factory=dict)

    def key(self, place: int) -> bytes:
        """Of one block."""
        begin = place * self.key_nbytes
        return self.keys[begin : begin + self.key_nbytes]

    @property
    def record_pages(self) -> int:
        """Pages of each record."""
        return record_pages(self.nbytes)

    def runs(self, places: list[int], nbytes_max: int) -> list[list[int]]:
        """Cuts places, by ascending location, into neighbours that are read with one system call
        each."""
        if len(places) == 1:
            return [places]
        step = self.record_pages
        longest = min(OP_RECORDS_MAX, max(1, nbytes_max // (step * PAGE_NBYTES)))
        runs, expected = [places[:1]], self.locations[places[0]] + step
        for place in places[1:]:
            if self.locations[place] != expected or len(runs[-1]) == longest:
                runs.append([])
            runs[-1].append(place)
            expected = self.locations[place] + step
        return runs

    def say(self, places: list[int], status: int) -> None:
        """The same of several blocks."""
        for place in places:
            self.status[place] = status


@dataclass(slots=True, eq=False)
class Job:
    """What is read from one segment.

    Attributes:
        segment: Which, held.
        call: Whose.
        places: Which of its blocks, by ascending location.
    """

    segment: Segment
    call: Call
    places: list[int]

    @property
    def nbytes(self) -> int:
        """Of all its blocks."""
        return len(self.places) * self.call.nbytes


def read_blocks(
    files: Files, workers: Workers, jobs: Sequence[Job]
) -> list[int | FileNotFoundError]:
    """Reads and verifies blocks: neighbours with one system call, and several of those at once. The
    answers are in `Call.status`.

    Returns:
        Of each job, how many blocks could not be read for errors of the system; FileNotFoundError
        where the segment's file is gone.
    """
    results: list[int | FileNotFoundError] = []
    runs: list[_Run] = []
    for number, job in enumerate(jobs):
        call = job.call
        try:
            fd = job.segment.opened(files)
        except FileNotFoundError as error:
            results.append(error)
        except OSError as error:
            call.say(job.places, _THROTTLED)
            call.errors.update(dict.fromkeys(job.places, error))
            results.append(len(job.places))
        else:
            results.append(0)
            runs += [_Run(number, fd, call, some) for some in call.runs(job.places, OP_NBYTES_MAX)]
    for group in _groups(runs):
        for run, errors in _read_group(files, workers, group):
            sofar = results[run.job]
            assert not isinstance(sofar, FileNotFoundError)
            results[run.job] = sofar + errors
    return results


@dataclass(slots=True, eq=False)
class _Run:
    """Neighbours in a file; `job` is the number of the job that wants them."""

    job: int
    fd: int
    call: Call
    places: list[int]

    @property
    def into(self) -> list[memoryview]:
        """Where its blocks go."""
        into = self.call.into
        return [into[place] for place in self.places]

    @property
    def offset(self) -> int:
        """Of its first record in the file."""
        return (self.call.locations[self.places[0]] & PAGE_MAX) * PAGE_NBYTES


def _groups(runs: list[_Run]) -> Iterator[list[_Run]]:
    """In order, as many at a time as find room in one scratch buffer."""
    group: list[_Run] = []
    records = 0
    for run in runs:
        count = len(run.places)
        if group and records + count > OP_RECORDS_MAX:
            yield group
            group, records = [], 0
        group.append(run)
        records += count
    if group:
        yield group


# Runs, and how many of each one's blocks could not be read for errors of the system.
_Errors = Iterator[tuple[_Run, int]]


def _read_group(files: Files, workers: Workers, runs: list[_Run]) -> _Errors:
    """Whole pages go straight to where they are wanted."""
    targets = [run.into for run in runs]
    if not all(map(is_aligned, chain.from_iterable(targets))):
        for run in runs:
            yield run, _read_bounced(files, workers, run)
        return
    scratch = workers.read_pairs.take(0)
    try:
        flat = scratch.data
        parts, ops, begin = [], [], 0
        for run, into in zip(runs, targets, strict=True):
            end = begin + 2 * len(into) * PAGE_NBYTES
            part = flat[begin:end]
            parts.append(part)
            ops.append(ReadOp(run.fd, interleave(part, into), run.offset))
            begin = end
        for run, part, got in zip(runs, parts, files.read_many(ops), strict=True):
            if isinstance(got, OSError):
                yield run, _one_by_one(files, workers, run, got)
            else:
                _direct(run, part, got)
                yield run, 0
    finally:
        workers.read_pairs.give(scratch)


def _direct(run: _Run, flat: memoryview, got: int) -> None:
    """Brings the ends of payloads to where they belong, and verifies."""
    rest = run.call.nbytes % PAGE_NBYTES
    if rest:
        end, into = PAGE_NBYTES, run.call.into
        for place in run.places:
            into[place][-rest:] = flat[end : end + rest]
            end += 2 * PAGE_NBYTES
    _verify(run, flat, 2 * PAGE_NBYTES, got)


def _one_by_one(files: Files, workers: Workers, run: _Run, error: OSError) -> int:
    """After an error: a read for each block, so that only bad places suffer."""
    if len(run.places) == 1:
        run.call.errors[run.places[0]] = error
        run.call.say(run.places, _CORRUPT if error.errno in UNREADABLE else _THROTTLED)
        return 1
    ones = [replace(run, places=[place]) for place in run.places]
    return sum(failed for one in ones for _, failed in _read_group(files, workers, [one]))


def _read_bounced(files: Files, workers: Workers, run: _Run) -> int:
    """For callers' memory that is not aligned."""
    call, count = run.call, len(run.places)
    stride = call.record_pages * PAGE_NBYTES
    scratch = workers.bounce.take(count * stride)
    try:
        flat = scratch.data[: count * stride]
        [got] = files.read_many([ReadOp(run.fd, [flat], run.offset)])
        if isinstance(got, OSError):
            return _one_by_one(files, workers, run, got)
        begin = PAGE_NBYTES
        for target in run.into:
            target[:] = flat[begin : begin + call.nbytes]
            begin += stride
        _verify(run, flat, stride, got)
        return 0
    finally:
        workers.bounce.give(scratch)


def _verify(run: _Run, flat: memoryview, stride: int, got: int) -> None:
    """Whether headers and payloads are those of the blocks: HIT; of another block, which is what a
    caller with old news gets: MISS; anything else is CORRUPT.

    Args:
        run: The blocks.
        flat: Where their header pages are.
        stride: Bytes from one header page to the next.
        got: Bytes that came from the file: what the file does not have is no record. A payload that
            is not all there fails its checksum.
    """
    call, begin = run.call, 0
    left = -(-(got // PAGE_NBYTES) // call.record_pages)
    for place in run.places:
        page = flat[begin : begin + PAGE_NBYTES]
        call.status[place] = _status(call, place, page) if left > 0 else _CORRUPT
        begin += stride
        left -= 1


def _status(call: Call, place: int, page: memoryview) -> int:
    found = check_block(page, call.namespace_id, call.group, call.nbytes)
    if found is None:
        return _CORRUPT
    location, seq, key, checksum = found
    if location == 0:
        return _MISS
    if location != call.locations[place]:
        return _CORRUPT
    own = call.key(place)
    if seq != call.stamps[place] or key != own.ljust(KEY_NBYTES_MAX, b"\0"):
        return _MISS
    digest = xxhash.xxh3_64_intdigest(call.into[place], key_seed(call.seed, own))
    return _HIT if digest == checksum else _CORRUPT
