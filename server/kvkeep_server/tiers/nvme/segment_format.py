"""How a segment looks: header page, records, table, footer page. No I/O.

`proto/kvkeep/v1/record.md` says it to the byte. The footer is the last page of the file, and there
is one only in a sealed segment; it says where the table begins, which is where the records end.
"""

import struct
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvkeep_server.tiers.record import (
    CLASS_NBYTES_MAX,
    HEADER_NBYTES,
    PAGE_NBYTES,
    RECORD,
    Rows,
    sane,
    stored_pages,
)

SEGMENT_VERSION = 1
SEGMENT_MAGIC = b"KVKSEGM1"
FOOTER_MAGIC = b"KVKFOOT1"
FIRST_PAGE = 1
# A location is segment number << 32 | page.
NUMBER_MAX = (1 << 32) - 1
NUMBER_SHIFT = np.uint64(32)
PAGE_MAX = NUMBER_MAX
PAGE_MASK = np.uint64(PAGE_MAX)

_HEADER = struct.Struct(f"<8sIIQQQ{CLASS_NBYTES_MAX}s")
_FOOTER = struct.Struct("<8sIIQQQQ")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What the first page of a segment says.

    Attributes:
        number: Of the segment.
        pages: Of the file when it was made.
        created_ms: Wall time, milliseconds.
        retention_class: Of all its records.
    """

    number: int
    pages: int
    created_ms: int
    retention_class: str


@dataclass(frozen=True, slots=True)
class Footer:
    """What the last page of a sealed segment says.

    Attributes:
        number: Of the segment.
        table_page: Where the table begins and the records end.
        records: Rows of the table.
        table_checksum: xxh3-64 of the rows.
    """

    number: int
    table_page: int
    records: int
    table_checksum: int


def table_pages(records: int) -> int:
    """Pages of a table of so many rows."""
    return -(-records * HEADER_NBYTES // PAGE_NBYTES)


def records_that_fit(pages: NDArray[np.int64], free_pages: int, records: int) -> int:
    """How many of the next records a segment can take.

    Args:
        pages: Of each record, in order.
        free_pages: Of the file behind its last record.
        records: That the segment holds; their rows and the footer need room too.
    """
    counts = records + np.arange(1, len(pages) + 1)
    table = -(-counts * HEADER_NBYTES // PAGE_NBYTES)
    return int(np.searchsorted(np.cumsum(pages) + table + 1, free_pages, side="right"))


def encode_segment_header(header: SegmentHeader) -> bytes:
    """The first page."""
    name = header.retention_class.encode()
    assert 0 < len(name) <= CLASS_NBYTES_MAX
    return _sealed_page(
        _HEADER.pack(
            SEGMENT_MAGIC,
            SEGMENT_VERSION,
            0,
            header.number,
            header.pages,
            header.created_ms,
            name,
        )
    )


def decode_segment_header(page: bytes | memoryview) -> SegmentHeader | None:
    """None for anything that is not the first page of a segment of this version. Never raises."""
    body = _checked(page, _HEADER.size)
    if body is None:
        return None
    magic, version, zero, number, pages, created_ms, name = _HEADER.unpack(body)
    name = name.rstrip(b"\0")
    if (magic, version, zero) != (SEGMENT_MAGIC, SEGMENT_VERSION, 0) or not name.isascii():
        return None
    return SegmentHeader(number, pages, created_ms, name.decode()) if name else None


def segment_version_of(page: bytes | memoryview) -> int:
    """Format version that a first page claims; 0 = it is none of any version."""
    if len(page) < 12 or bytes(page[:8]) != SEGMENT_MAGIC:
        return 0
    return int.from_bytes(page[8:12], "little")


def encode_footer(footer: Footer) -> bytes:
    """The last page."""
    return _sealed_page(
        _FOOTER.pack(
            FOOTER_MAGIC,
            SEGMENT_VERSION,
            0,
            footer.number,
            footer.table_page,
            footer.records,
            footer.table_checksum,
        )
    )


def decode_footer(page: bytes | memoryview) -> Footer | None:
    """None for anything that is not the last page of a sealed segment. Never raises."""
    body = _checked(page, _FOOTER.size)
    if body is None:
        return None
    magic, version, zero, *fields = _FOOTER.unpack(body)
    if (magic, version, zero) != (FOOTER_MAGIC, SEGMENT_VERSION, 0):
        return None
    return Footer(*fields)


def table_checksum(encoded: bytes | memoryview) -> int:
    """Of a table's rows, without the fill of their last page."""
    return xxhash.xxh3_64_intdigest(encoded)


def decode_table(footer: Footer, encoded: memoryview) -> Rows | None:
    """The rows of a sealed segment; None if they are not those that were written. Never raises."""
    if len(encoded) != footer.records * HEADER_NBYTES:
        return None
    if table_checksum(encoded) != footer.table_checksum:
        return None
    rows = np.frombuffer(encoded, np.uint8).view(RECORD)
    if not sane(rows).all():
        return None
    starts = (rows["location"] & PAGE_MASK).astype(np.int64)
    ends = starts + stored_pages(rows)
    bounds = np.append(starts, footer.table_page)
    fit = (ends <= bounds[1:]).all() and (len(starts) == 0 or starts[0] >= FIRST_PAGE)
    own = (rows["location"] >> NUMBER_SHIFT) == footer.number
    return rows if fit and own.all() else None


def _sealed_page(body: bytes) -> bytes:
    checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))
    return (body + checksum).ljust(PAGE_NBYTES, b"\0")


def _checked(page: bytes | memoryview, nbytes: int) -> bytes | None:
    """The first bytes of a page whose checksum and fill are right."""
    if len(page) != PAGE_NBYTES:
        return None
    body, end = bytes(page[:nbytes]), nbytes + _CHECKSUM.size
    right = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)) == bytes(page[nbytes:end])
    return body if right and not any(bytes(page[end:])) else None
