"""What the numbers of the segments that were there at the start mean for those to come.

All directories of a tier draw from one sequence. Blocks; any thread.
"""

from collections.abc import Iterable, Iterator, Sequence

from kvkeep_server.core.errors import FailedPreconditionError
from kvkeep_server.tiers.nvme.files import Files
from kvkeep_server.tiers.nvme.scratch import ScratchPool
from kvkeep_server.tiers.nvme.segment_format import (
    SEGMENT_VERSION,
    decode_footer,
    decode_segment_header,
    segment_version_of,
)
from kvkeep_server.tiers.nvme.segments import Segment, SegmentTable
from kvkeep_server.tiers.record import PAGE_NBYTES

Ends = tuple[int, bytes, bytes]


def last_number(files: Files, pool: ScratchPool, segments: Iterable[Segment]) -> int:
    """The highest number of a segment that may ever be read, 0 = there is none.

    A file whose header is none, or another segment's, has its number from somebody else: only the
    name is taken. What cannot be read now, or by this release, may be another time.
    """
    for segment in sorted(segments, key=lambda segment: -segment.number):
        try:
            _, first, _ = _ends(files, pool, segment)
        except OSError:
            return segment.number
        if _is_own(first, segment.number) or segment_version_of(first) > SEGMENT_VERSION:
            return segment.number
    return 0


def twins(
    files: Files, pool: ScratchPool, tables: Sequence[SegmentTable]
) -> Iterator[tuple[SegmentTable, Segment, Segment, bool]]:
    """Segments that have the number of one in an earlier directory.

    Yields:
        Its table; it; the other; whether it is a whole copy of the other, which may be left out.
    """
    seen: dict[int, Segment] = {}
    for table in tables:
        for segment in table.segments.values():
            other = seen.setdefault(segment.number, segment)
            if other is segment:
                continue
            ends, others = _readable(files, pool, segment), _readable(files, pool, other)
            if ends is None:
                continue
            if others is None:
                seen[segment.number] = segment
            else:
                yield table, segment, other, ends == others and _is_sealed(ends)


def leave_copies_out(files: Files, pool: ScratchPool, tables: Sequence[SegmentTable]) -> None:
    """Sees to it that each number is that of one segment that counts.

    Raises:
        FailedPreconditionError: Two that differ have one number. Of two daemons' directories nobody
            knows which record of a block is the last word, nor what was removed.
    """
    for table, segment, other, is_copy in twins(files, pool, tables):
        if not is_copy:
            msg = (
                f"nvme.directories: {other.path} and {segment.path} are two segments of one number,"
                " as those of two daemons: they cannot be used together; name one of these"
                " directories, or remove the segments of the other"
            )
            raise FailedPreconditionError(msg)
        table.skip(segment, f"is a copy of {other.path}")


def _readable(files: Files, pool: ScratchPool, segment: Segment) -> Ends | None:
    """None of what recovery takes nothing from."""
    try:
        ends = _ends(files, pool, segment)
    except OSError:
        return None
    return ends if _is_own(ends[1], segment.number) else None


def _is_own(first: bytes, number: int) -> bool:
    header = decode_segment_header(first)
    return header is not None and header.number == number


def _is_sealed(ends: Ends) -> bool:
    # The footer has a checksum of the table, which has one of each record.
    return decode_footer(ends[2]) is not None


def _ends(files: Files, pool: ScratchPool, segment: Segment) -> Ends:
    """Size, first page and last page."""
    scratch = pool.take(0)
    fd = files.open(segment.path)
    try:
        nbytes, view = files.size(fd), scratch.data[:PAGE_NBYTES]
        offsets = (0, max(0, nbytes // PAGE_NBYTES - 1) * PAGE_NBYTES)
        first, last = (bytes(view[: files.preadv(fd, [view], offset)]) for offset in offsets)
        return nbytes, first, last
    finally:
        files.close(fd)
        pool.give(scratch)
