"""Sealed segments of blocks that nobody wrote: tables in sparse files."""

import numpy as np

from kvkeep_server.tiers import record
from kvkeep_server.tiers.nvme import segment_format as form

PAYLOAD_NBYTES = 4096
PER_SEGMENT = 31_000
CHAIN = 64
SEGMENT_NBYTES = 256 << 20


def write_segments(directory, records, *, members=1, seed=1):
    """Segments of chains of `CHAIN` units, each chain in one segment. A unit has a block in each of
    so many groups."""
    directory.mkdir(parents=True)
    source = np.random.default_rng(seed)
    for number, start in enumerate(range(0, records, PER_SEGMENT), 1):
        units = min(PER_SEGMENT, records - start) // members
        rows = rows_of(number, units, members, source)
        write_segment(directory / f"{number:08x}.kvks", number, rows)


def rows_of(number, units, members, source):
    count = units * members
    rows = np.zeros(count, record.RECORD)
    rows["key"][:, :4] = np.repeat(source.integers(1, 1 << 62, (units, 4)), members, axis=0)
    rows["key_nbytes"], rows["boundary_members"] = 32, members
    rows["group"] = rows["boundary_member"] = np.arange(count) % members
    rows["namespace_id"], rows["boundary_id"] = [3, 5], [7, 9]
    linked = np.arange(count) // members % CHAIN > 0
    rows["parent"][members:] = rows["key"][:-members]
    rows["parent"][~linked] = 0
    rows["parent_nbytes"][linked] = 32
    rows["payload_nbytes"] = rows["stored_nbytes"] = PAYLOAD_NBYTES
    rows["record_seq"] = np.arange(count) + (number << 32)
    rows["location"] = (number << 32) + 1 + 2 * np.arange(count)
    rows["last_used_ms"] = rows["created_ms"] = 1000
    rows["retention_class"] = b"default"
    return rows


def write_segment(path, number, rows):
    encoded = record.seal_headers(rows).tobytes()
    end = 1 + 2 * len(rows)
    footer = form.Footer(number, end, len(rows), form.table_checksum(encoded))
    header = form.SegmentHeader(number, SEGMENT_NBYTES // 4096, 1000, "default")
    with path.open("wb") as file:
        file.write(form.encode_segment_header(header))
        file.seek(end * 4096)
        file.write(encoded.ljust(form.table_pages(len(rows)) * 4096, b"\0"))
        file.write(form.encode_footer(footer))
