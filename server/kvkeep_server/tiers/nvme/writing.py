"""What a writer thread does: encode headers, gather buffers, write, sync. Blocks; any thread."""

import contextlib
import errno
import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.tiers.nvme.directory import OP_NBYTES_MAX, OP_RECORDS_MAX, Workers
from kvkeep_server.tiers.nvme.files import Files
from kvkeep_server.tiers.nvme.scratch import interleave, is_aligned
from kvkeep_server.tiers.nvme.segment_format import (
    PAGE_MASK,
    Footer,
    SegmentHeader,
    encode_footer,
    encode_segment_header,
    table_checksum,
    table_pages,
)
from kvkeep_server.tiers.nvme.segments import DirectorySettings
from kvkeep_server.tiers.record import (
    HEADER_NBYTES,
    PAGE_NBYTES,
    Rows,
    raw_of,
    seal_headers,
    stored_pages,
)

# Of one system call that takes bytes where they lie. The deeper the queue, the faster the device:
# batches of 128 MiB took 54 ms in one call, 106 ms in calls of 8 MiB.
_GATHERED_NBYTES_MAX = 128 << 20


_ZEROS = memoryview(bytes(PAGE_NBYTES))


class GoneError(OSError):
    """The file that was written and synced is not there any more, or was cut: no system call says
    so."""


def create_segment(
    files: Files, settings: DirectorySettings, path: str, header: SegmentHeader
) -> int:
    """Makes a segment's file, its room taken, its first page and its name on the medium.

    Returns:
        The descriptor.

    Raises:
        OSError: it did not work; a file may be left.
    """
    fd = files.create(path)
    try:
        files.allocate(fd, settings.segment_nbytes)
        files.pwritev(fd, [_aligned(encode_segment_header(header))], 0)
        files.fdatasync(fd)
        files.sync_directory(settings.path)
    except BaseException:
        with contextlib.suppress(OSError):
            files.close(fd)
        raise
    return fd


def look_after(files: Files, fd: int, nbytes: int) -> None:
    """Whether the file of an active segment is still what a later process would find.

    Raises:
        GoneError: It is not.
        OSError: Nobody knows.
    """
    if not files.links(fd):
        raise GoneError(errno.ENOENT, "somebody removed the segment that is written to")
    if files.size(fd) < nbytes:
        raise GoneError(errno.ENODATA, "somebody cut the segment that is written to")


def seal_segment(files: Files, fd: int, number: int, end_page: int, rows: Rows) -> int:
    """Writes table and footer behind the records, syncs, and cuts the file there.

    Returns:
        The file's size now.

    Raises:
        OSError: it did not work; the segment may have no table.
    """
    encoded = raw_of(np.ascontiguousarray(rows)).tobytes()
    footer = Footer(number, end_page, len(rows), table_checksum(encoded))
    padded = encoded.ljust(table_pages(len(rows)) * PAGE_NBYTES, b"\0")
    tail = _aligned(padded + encode_footer(footer))
    files.pwritev(fd, [tail], end_page * PAGE_NBYTES)
    files.fdatasync(fd)
    nbytes = end_page * PAGE_NBYTES + len(tail)
    files.truncate(fd, nbytes)
    return nbytes


def write_records(
    files: Files,
    workers: Workers,
    fd: int,
    rows: Rows,
    sources: Sequence[memoryview],
    *,
    sync: bool,
) -> None:
    """Writes records one behind the other, then syncs if asked to. Fills in the rows' checksums.

    Raises:
        OSError: it did not work; nobody knows what of it lies on the medium.
    """
    raw = seal_headers(rows)
    pages = stored_pages(rows)
    aligned = all(not source or is_aligned(source) for source in sources)
    write = _write_gathered if aligned else _write_bounced
    op_nbytes = _GATHERED_NBYTES_MAX if aligned else OP_NBYTES_MAX
    start = 0
    while start < len(rows):
        stop = _op_end(pages, start, op_nbytes)
        offset = int(rows["location"][start] & PAGE_MASK) * PAGE_NBYTES
        write(files, workers, fd, offset, raw[start:stop], sources[start:stop])
        start = stop
    if sync:
        files.fdatasync(fd)


def _op_end(pages: NDArray[np.int64], start: int, nbytes_max: int) -> int:
    """Behind the last record of the system call that begins with this one."""
    ends = np.cumsum(pages[start : start + OP_RECORDS_MAX])
    count = int(np.searchsorted(ends, nbytes_max // PAGE_NBYTES, side="right"))
    return start + max(1, count)


def _write_gathered(
    files: Files,
    workers: Workers,
    fd: int,
    offset: int,
    raw: NDArray[np.uint8],
    sources: Sequence[memoryview],
) -> None:
    scratch = workers.write_pairs.take(0)
    try:
        pairs = scratch[: 2 * len(raw) * PAGE_NBYTES].reshape(len(raw), 2, PAGE_NBYTES)
        pairs[:, 0, :HEADER_NBYTES] = raw
        flat = scratch.data
        for i, source in enumerate(sources):
            rest = len(source) % PAGE_NBYTES
            if rest:
                end = (2 * i + 1) * PAGE_NBYTES
                flat[end : end + rest] = source[-rest:]
                flat[end + rest : end + PAGE_NBYTES] = _ZEROS[rest:]
        files.pwritev(fd, interleave(scratch.data, sources), offset)
    finally:
        workers.write_pairs.give(scratch)


def _write_bounced(
    files: Files,
    workers: Workers,
    fd: int,
    offset: int,
    raw: NDArray[np.uint8],
    sources: Sequence[memoryview],
) -> None:
    sizes = [-(-len(source) // PAGE_NBYTES) * PAGE_NBYTES for source in sources]
    nbytes = len(raw) * PAGE_NBYTES + sum(sizes)
    scratch = workers.bounce.take(nbytes)
    try:
        position = 0
        for header, source, size in zip(raw, sources, sizes, strict=True):
            record = scratch[position : position + PAGE_NBYTES + size]
            record[:HEADER_NBYTES] = header
            record[HEADER_NBYTES:PAGE_NBYTES] = 0
            record[PAGE_NBYTES : PAGE_NBYTES + len(source)] = np.frombuffer(source, np.uint8)
            record[PAGE_NBYTES + len(source) :] = 0
            position += len(record)
        files.pwritev(fd, [scratch.data[:nbytes]], offset)
    finally:
        workers.bounce.give(scratch)


def _aligned(data: bytes) -> memoryview:
    """A copy that O_DIRECT takes."""
    region = mmap.mmap(-1, len(data))
    region[:] = data
    return memoryview(region)
