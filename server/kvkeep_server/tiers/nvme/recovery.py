"""What lies in a segment that this process did not write, or writes no more.

A sealed segment has a table of its records. Any other is walked from header to header, and every
payload is verified: what follows the first thing that is no record is a torn tail. The walk never
searches for headers, since a payload may hold bytes that look like one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.tiers.nvme.directory import Directory
from kvkeep_server.tiers.nvme.files import Files
from kvkeep_server.tiers.nvme.scratch import Scratch, ScratchPool
from kvkeep_server.tiers.nvme.segment_format import (
    FIRST_PAGE,
    PAGE_MASK,
    SEGMENT_VERSION,
    Footer,
    SegmentHeader,
    decode_footer,
    decode_segment_header,
    decode_table,
    segment_version_of,
    table_pages,
)
from kvkeep_server.tiers.nvme.segments import SEQ_NONE, Segment, SegmentEvent, SegmentState
from kvkeep_server.tiers.nvme.writing import seal_segment
from kvkeep_server.tiers.record import (
    HEADER_NBYTES,
    MAGIC,
    PAGE_NBYTES,
    RECORD,
    Rows,
    is_block,
    is_void,
    rows_in_pages,
    stored_checksums_match,
    stored_pages,
)

# Where in a header its lengths lie.
_STORED_NBYTES_AT = RECORD.fields["stored_nbytes"][1]  # type: ignore[index]
_ROWS_NBYTES_MAX = 1 << 30
# What `inspect` says of a file that is no damage but of a later release begins so.
NEWER = "format version"


@dataclass(frozen=True, slots=True)
class Content:
    """What a segment holds.

    Attributes:
        header: Of the segment.
        rows: Its records, tombstones and voids among them, in the order of their pages. Of a sealed
            one as its table says, else those whose payload is right.
        end_page: Behind the last record.
        sealed: Has a table and a footer.
        corrupt: Records that are left out, because their payload is wrong.
        torn: Something that is no record follows the last one.
    """

    header: SegmentHeader
    rows: Rows
    end_page: int
    sealed: bool
    corrupt: int = 0
    torn: bool = False


def inspect(files: Files, pool: ScratchPool, segment: Segment) -> Content | str:
    """Reads what a segment holds. Blocks; any thread, while the segment is held.

    Returns:
        The content; or in words why nothing of this file can be used.

    Raises:
        OSError: the file cannot be read.
    """
    fd = segment.opened(files)
    pages = files.size(fd) // PAGE_NBYTES
    scratch = pool.take(0)
    try:
        header = _header(files, fd, pool, segment, _page(files, fd, scratch, 0))
        if not isinstance(header, SegmentHeader):
            return header
        footer = decode_footer(_page(files, fd, scratch, pages - 1))
        if footer is not None and footer.number == segment.number:
            rows = _table(files, fd, pool, footer, pages)
            if rows is not None:
                return Content(header, rows, footer.table_page, sealed=True)
        return _walk(files, fd, pool, header, pages)
    finally:
        pool.give(scratch)


def _header(
    files: Files, fd: int, pool: ScratchPool, segment: Segment, first: memoryview
) -> SegmentHeader | Content | str:
    """What the first page says; or what there is to say without it."""
    header = decode_segment_header(first)
    if header is not None and header.number != segment.number:
        return f"is a copy of segment {header.number}"
    if header is not None:
        return header
    if not any(first) and _is_zero(files, fd, pool, FIRST_PAGE):
        # Its maker died between making the file and writing its first page: nothing was ever in it.
        none = SegmentHeader(segment.number, segment.pages, 0, "")
        return Content(none, np.empty(0, RECORD), FIRST_PAGE, sealed=False)
    return _why_no_header(first) if segment.pages else "shorter than its header"


def _why_no_header(page: memoryview) -> str:
    version = segment_version_of(page)
    if version > SEGMENT_VERSION:
        return f"{NEWER} {version} is newer than {SEGMENT_VERSION}"
    return "its header is damaged"


def _page(files: Files, fd: int, scratch: Scratch, page: int) -> memoryview:
    """One page, in the scratch; zeros where the file ends before."""
    view = scratch.data[:PAGE_NBYTES]
    got = files.preadv(fd, [view], page * PAGE_NBYTES)
    view[got:] = bytes(PAGE_NBYTES - got)
    return view


def _table(files: Files, fd: int, pool: ScratchPool, footer: Footer, pages: int) -> Rows | None:
    """The table that a footer names, copied; None if it is not whole."""
    count = table_pages(footer.records)
    if footer.table_page + count + 1 != pages or count * PAGE_NBYTES > _ROWS_NBYTES_MAX:
        return None
    scratch = pool.take(count * PAGE_NBYTES)
    try:
        view = scratch.data[: count * PAGE_NBYTES]
        if count and files.preadv(fd, [view], footer.table_page * PAGE_NBYTES) != len(view):
            return None
        rows = decode_table(footer, view[: footer.records * HEADER_NBYTES])
        return None if rows is None else rows.copy()
    finally:
        pool.give(scratch)


# --- without a table ------------------------------------------------------------------------------


def _walk(files: Files, fd: int, pool: ScratchPool, header: SegmentHeader, pages: int) -> Content:
    page, corrupt, torn = FIRST_PAGE, 0, False
    found: list[Rows] = []
    window_nbytes = pool.nbytes
    while page < pages:
        nbytes = min(window_nbytes, (pages - page) * PAGE_NBYTES)
        scratch = pool.take(nbytes)
        try:
            got = files.preadv(fd, [scratch.data[:nbytes]], page * PAGE_NBYTES)
            window = scratch[: got // PAGE_NBYTES * PAGE_NBYTES]
            starts, needed = _records_in(window)
            rows, good = _verified(window, starts, header.number, page)
        finally:
            pool.give(scratch)
        found.append(rows[good])
        corrupt += len(rows) - int(good.sum())
        page += int(stored_pages(rows).sum())
        if len(rows) < len(starts) or not needed or needed > (pages - page) * PAGE_NBYTES:
            # The first page that is no record, or one that goes on behind the end of the file.
            torn = len(rows) < len(starts) or needed > 0 or not _is_zero(files, fd, pool, page)
            break
        window_nbytes = max(pool.nbytes, needed)
    rows = np.concatenate(found) if found else np.empty(0, RECORD)
    return Content(header, rows, page, sealed=False, corrupt=corrupt, torn=torn)


def _is_zero(files: Files, fd: int, pool: ScratchPool, page: int) -> bool:
    scratch = pool.take(0)
    try:
        return not any(_page(files, fd, scratch, page))
    finally:
        pool.give(scratch)


def _records_in(window: Scratch) -> tuple[list[int], int]:
    """Where records begin that lie wholly in the window, if their lengths are right; and how many
    bytes from there on the next one needs, 0 = there is none."""
    flat = window.data
    magic = MAGIC.to_bytes(8, "little")
    starts: list[int] = []
    position = 0
    while position < len(flat):
        if flat[position : position + 8] != magic:
            return starts, 0
        at = position + _STORED_NBYTES_AT
        stored = int.from_bytes(flat[at : at + 8], "little")
        nbytes = PAGE_NBYTES - (-stored // PAGE_NBYTES) * PAGE_NBYTES
        if position + nbytes > len(flat):
            return starts, nbytes
        starts.append(position)
        position += nbytes
    return starts, PAGE_NBYTES


def _verified(
    window: Scratch, starts: list[int], number: int, first_page: int
) -> tuple[Rows, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """The headers up to the first that is none, copied, and which of them have a right payload."""
    if not starts:
        return np.empty(0, RECORD), np.empty(0, np.bool_)
    places = np.array(starts)
    pages = window.reshape(-1, PAGE_NBYTES)[places // PAGE_NBYTES]
    rows, ok = rows_in_pages(pages)
    at = first_page + places // PAGE_NBYTES
    ok &= rows["location"] == (np.uint64(number) << np.uint64(32)) | at.astype(np.uint64)
    count = len(ok) if ok.all() else int(np.argmin(ok))
    rows = rows[:count]
    flat = window.data
    sizes = rows["stored_nbytes"].tolist()
    begins = [start + PAGE_NBYTES for start in starts[:count]]
    stored = [flat[begin : begin + n] for begin, n in zip(begins, sizes, strict=True)]
    return rows, stored_checksums_match(rows, stored) | ~is_block(rows)


# --- taking it in ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sifted:
    """Records of a segment, without those that never counted and without voids.

    Attributes:
        rows: Blocks and tombstones.
        never_pages: Where the records begin that never counted.
        voided: Locations of all records that are known never to have counted.
        newest_ms: The last use of any of `rows`, 0 = there are none.
    """

    rows: Rows
    never_pages: list[int]
    voided: NDArray[np.uint64]
    newest_ms: int


def sift(rows: Rows, voided: NDArray[np.uint64]) -> Sifted:
    """Applies voids, those of these records among them. Any thread."""
    voids = is_void(rows)
    voided = np.append(voided, rows["target"][voids])
    never = np.isin(rows["location"], voided)
    pages = (rows["location"][never] & PAGE_MASK).tolist()
    rows = rows[~never & ~voids]
    newest_ms = int(rows["last_used_ms"].max()) if len(rows) else 0
    return Sifted(rows, pages, voided, newest_ms)


async def recover_segment(directory: Directory, segment: Segment) -> Rows:
    """Takes in one segment that was there at the start. Event loop only.

    What cannot be used is noted in the table, and its file is left alone. A tail that was not
    sealed is cut and sealed, so that it is walked only once.

    Returns:
        Its records, tombstones and voids among them; none where it cannot be used.
    """
    table = directory.table
    table.hold(segment)
    try:
        found = await directory.run(
            lambda: inspect(directory.files, directory.workers.bounce, segment)
        )
        if isinstance(found, Content) and segment.state == SegmentState.FOUND:
            await _take_in(directory, segment, found)
            return found.rows
        if segment.state == SegmentState.FOUND:
            table.skip(segment, str(found))
    except FileNotFoundError:
        if segment.state == SegmentState.FOUND:
            directory.counts.vanished += 1
            table.retire(segment)
    except OSError as error:
        directory.read_failed(error)
        table.skip(segment, f"cannot be read: {error.strerror}")
    finally:
        table.release(segment)
    return np.empty(0, RECORD)


async def _take_in(directory: Directory, segment: Segment, found: Content) -> None:
    counts, table, rows = directory.counts, directory.table, found.rows
    segment.advance(SegmentEvent.RECOVER)
    segment.retention_class = found.header.retention_class
    segment.end_page, segment.records = found.end_page, len(rows)
    data = rows["record_seq"][is_block(rows)]
    segment.seq_min = int(data.min()) if len(data) else SEQ_NONE
    segment.seq_max = int(rows["record_seq"].max()) if len(rows) else 0
    directory.sequence.raise_above(segment.seq_max)
    counts.corrupt += found.corrupt
    counts.recovered += len(data)
    if found.sealed:
        return
    if not len(rows) and not found.corrupt and not found.torn:
        table.retire(segment)
        return
    try:
        nbytes = await directory.run(lambda: _seal_again(directory, segment, rows))
    except OSError:
        # It stays as it is and is walked again at the next start.
        counts.write_errors += 1
    else:
        table.resize(segment, nbytes)


def _seal_again(directory: Directory, segment: Segment, rows: Rows) -> int:
    files = directory.files
    fd = files.open(segment.path, write=True)
    try:
        return seal_segment(files, fd, segment.number, segment.end_page, rows)
    finally:
        files.close(fd)
