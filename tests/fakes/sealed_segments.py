"""Sealed segments of blocks that nobody wrote: tables in sparse files, a million records a second."""

import numpy as np

from kvkeep_server.tiers import record
from kvkeep_server.tiers.nvme import segment_format as form

PAYLOAD_NBYTES = 4096
PER_SEGMENT = 31_000
CHAIN = 64
SEGMENT_NBYTES = 256 << 20


def write_segments(directory, records, seed=1):
    """Segments of chains of `CHAIN` blocks of one namespace, each chain in one segment."""
    directory.mkdir(parents=True)
    source = np.random.default_rng(seed)
    for number, start in enumerate(range(0, records, PER_SEGMENT), 1):
        count = min(PER_SEGMENT, records - start)
        write_segment(directory / f"{number:08x}.kvks", number, rows_of(number, count, source))


def rows_of(number, count, source):
    rows = np.zeros(count, record.RECORD)
    rows["key"][:, :4] = source.integers(1, 1 << 62, (count, 4))
    rows["key_nbytes"], rows["boundary_members"] = 32, 1
    rows["namespace_id"], rows["boundary_id"] = [3, 5], [7, 9]
    linked = np.arange(count) % CHAIN > 0
    rows["parent"][1:] = rows["key"][:-1]
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
