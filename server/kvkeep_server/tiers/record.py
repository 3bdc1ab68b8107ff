"""The encoded block: one record format for segments on disk and for values in Redis. No I/O.

`proto/kvkeep/v1/record.md` says it to the byte. A record is a header of `HEADER_NBYTES` and the
stored bytes; on disk both are filled up with zeros to whole pages. Headers are rows of a numpy
structured array, `RECORD`, so that batches cost a few numpy calls, and a million rows of a table
are read as they lie.

Checksums of payloads are bound to (namespace, group, key, length): bytes of another block, or of
another length, never pass for this one.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvkeep_server.core.keys import KEY_NBYTES_MAX, KEY_NBYTES_MIN, KeyBatch
from kvkeep_server.tiers.base import Blocks

PAGE_NBYTES = 4096
HEADER_NBYTES = 320
VERSION = 1
# Where the checksum of a header lies: over all bytes before it.
_CHECKED_NBYTES = HEADER_NBYTES - 8
MAGIC = int.from_bytes(b"KVKRECD1", "little")
# What a record is that is no block: the key was removed; or the record at `target` never counted.
TOMBSTONE = 1
VOID = 2
CLASS_NBYTES_MAX = 24
_KEY_WORDS = KEY_NBYTES_MAX // 8

RECORD = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("group", "<u4"),
        ("namespace_id", "<u8", 2),
        ("boundary_id", "<u8", 2),
        ("boundary_members", "<u2"),
        ("boundary_member", "<u2"),
        ("key_nbytes", "u1"),
        ("parent_nbytes", "u1"),
        ("codec", "<u2"),
        ("payload_nbytes", "<u8"),
        ("stored_nbytes", "<u8"),
        ("checksum", "<u8"),
        ("stored_checksum", "<u8"),
        ("record_seq", "<u8"),
        ("location", "<u8"),
        ("created_ms", "<u8"),
        ("last_used_ms", "<u8"),
        ("retention_class", f"S{CLASS_NBYTES_MAX}"),
        ("key", "<u8", _KEY_WORDS),
        ("parent", "<u8", _KEY_WORDS),
        ("target", "<u8"),
        ("reserved", "<u8", 4),
        ("header_checksum", "<u8"),
    ]
)
assert RECORD.itemsize == HEADER_NBYTES

# One-dimensional array of dtype RECORD.
Rows = NDArray[np.void]
Count = TypeVar("Count", int, NDArray[np.int64])
U64 = NDArray[np.uint64]
Mask = NDArray[np.bool_]

# Of a key's word `w`, in a key of `n` bytes: the bits that may be set.
_KEY_MASKS = np.array(
    [
        [(1 << 8 * min(8, max(0, nbytes - 8 * word))) - 1 for word in range(_KEY_WORDS)]
        for nbytes in range(256)
    ],
    np.uint64,
)


# Of a header: magic to namespace id; codec to location; where the key begins; what fills the page.
_START = struct.Struct("<QHHI16s")
_MIDDLE = struct.Struct("<HQQ8xQQQ")
_KEY_AT = 144
_FILL = bytes(PAGE_NBYTES - HEADER_NBYTES)


class CodecId(IntEnum):
    """How the stored bytes are made from the payload."""

    RAW = 0


# --- checksums ------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def checksum_seed(namespace_id: bytes, group: int, payload_nbytes: int) -> int:
    """What all payload checksums of these blocks are bound to, beside their keys."""
    bound = namespace_id + group.to_bytes(4, "little") + payload_nbytes.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(bound)


def key_seed(seed: int, key: bytes) -> int:
    """Seed of one block's xxh3-64: `seed` is that of `checksum_seed`."""
    return xxhash.xxh3_64_intdigest(key, seed)


def stored_checksums_match(rows: Rows, stored: Sequence[memoryview]) -> Mask:
    """Whether the stored bytes of each record are those that its header names."""
    seeds: dict[tuple[bytes, int, int], int] = {}
    keys, wanted = keys_of(rows), rows["stored_checksum"].tolist()
    spaces = rows["namespace_id"]
    same = np.zeros(len(rows), np.bool_)
    columns = zip(rows["group"].tolist(), rows["payload_nbytes"].tolist(), stored, strict=True)
    for i, (group, payload_nbytes, data) in enumerate(columns):
        space = (spaces[i].tobytes(), group, payload_nbytes)
        seed = seeds.get(space)
        if seed is None:
            seed = seeds[space] = checksum_seed(*space)
        same[i] = xxhash.xxh3_64_intdigest(data, key_seed(seed, keys[i])) == wanted[i]
    return same


# --- fields ---------------------------------------------------------------------------------------


def id_words(id_bytes: bytes) -> U64:
    """A 16-byte id as it lies in `RECORD`: two words.

    Raises:
        ValueError: it has another length.
    """
    return np.frombuffer(id_bytes, "<u8").reshape(2)


def put_keys(rows: Rows, keys: KeyBatch, field: str = "key") -> None:
    """Writes keys into the rows: `field` is "key" or "parent"; sets its length too."""
    rows[field][:, : keys.words.shape[1]] = keys.words
    rows[f"{field}_nbytes"] = keys.key_nbytes


def rows_of(blocks: Blocks) -> Rows:
    """Headers of blocks as they are stored raw; `record_seq` and `location` are 0.

    Raises:
        AssertionError: the blocks come without facts.
    """
    facts = blocks.facts
    assert facts is not None, "blocks without facts cannot outlive the process"
    rows = np.zeros(len(blocks), RECORD)
    name_rows(rows, blocks)
    put_keys(rows, facts.parents, "parent")
    rows["parent"][~facts.has_parent] = 0
    rows["parent_nbytes"][~facts.has_parent] = 0
    rows["payload_nbytes"] = rows["stored_nbytes"] = blocks.nbytes
    rows["checksum"] = rows["stored_checksum"] = facts.checksums
    rows["created_ms"] = facts.created_ms
    rows["last_used_ms"] = facts.last_used_ms
    rows["retention_class"] = facts.retention_class.encode()
    rows["boundary_id"] = id_words(facts.boundary_id)
    rows["boundary_members"] = facts.boundary_members
    rows["boundary_member"] = facts.boundary_member
    return rows


def tombstones_of(blocks: Blocks, now_ms: int) -> Rows:
    """Headers that say that these blocks were removed; `record_seq` and `location` are 0."""
    rows = np.zeros(len(blocks), RECORD)
    name_rows(rows, blocks)
    rows["flags"] = TOMBSTONE
    rows["boundary_members"] = 1
    rows["created_ms"] = rows["last_used_ms"] = now_ms
    return rows


def voids_of(rows: Rows) -> Rows:
    """Headers that say that these very records count for nothing, whatever else there is of their
    keys; `record_seq` and `location` are 0."""
    voids = np.zeros(len(rows), RECORD)
    for name in ("namespace_id", "group", "key", "key_nbytes", "created_ms", "last_used_ms"):
        voids[name] = rows[name]
    voids["flags"] = VOID
    voids["target"] = rows["location"]
    voids["boundary_members"] = 1
    return voids


def name_rows(rows: Rows, blocks: Blocks) -> None:
    """Writes what names the blocks into the rows."""
    rows["namespace_id"] = id_words(blocks.namespace_id)
    rows["group"] = blocks.group
    put_keys(rows, blocks.keys)


def keys_of(rows: Rows) -> list[bytes]:
    """The key of each record."""
    packed = np.ascontiguousarray(rows["key"]).tobytes()
    starts = range(0, len(packed), KEY_NBYTES_MAX)
    lengths = rows["key_nbytes"].tolist()
    return [packed[start : start + n] for start, n in zip(starts, lengths, strict=True)]


def stored_pages(rows: Rows) -> NDArray[np.int64]:
    """Pages on disk of each record: header and stored bytes."""
    return record_pages(rows["stored_nbytes"].astype(np.int64))


def record_pages(stored_nbytes: Count) -> Count:
    """Pages on disk of a record of so many stored bytes, or of each of them: a header page, and
    what the bytes take."""
    return 1 + -(-stored_nbytes // PAGE_NBYTES)


def is_tombstone(rows: Rows) -> Mask:
    """Which records say that their key was removed."""
    removed: Mask = rows["flags"] == TOMBSTONE
    return removed


def is_void(rows: Rows) -> Mask:
    """Which records say that another record never counted."""
    void: Mask = rows["flags"] == VOID
    return void


def is_block(rows: Rows) -> Mask:
    """Which records hold a block."""
    block: Mask = rows["flags"] == 0
    return block


# --- encoding -------------------------------------------------------------------------------------


def seal_headers(rows: Rows) -> NDArray[np.uint8]:
    """Fills in magic, version and checksum of each header, the last thing before it is written.

    Returns:
        The encoded headers, shape (records, HEADER_NBYTES); shares memory with `rows`.
    """
    rows["magic"] = MAGIC
    rows["version"] = VERSION
    raw = raw_of(rows)
    rows["header_checksum"] = _header_checksums(raw)
    assert sane(rows).all(), "a header that no reader would take"
    return raw


def raw_of(rows: Rows) -> NDArray[np.uint8]:
    """The bytes of rows that lie without gaps, shape (records, HEADER_NBYTES), not copied."""
    assert rows.flags.c_contiguous
    return rows.view(np.uint8).reshape(len(rows), HEADER_NBYTES)


def _header_checksums(raw: NDArray[np.uint8]) -> list[int]:
    whole = raw.reshape(-1).data
    return [
        xxhash.xxh3_64_intdigest(whole[start : start + _CHECKED_NBYTES])
        for start in range(0, len(whole), HEADER_NBYTES)
    ]


# --- decoding -------------------------------------------------------------------------------------


def sane(rows: Rows) -> Mask:
    """Which rows hold together, whatever their checksums say. One pass over columns."""
    key_nbytes, parent_nbytes = rows["key_nbytes"], rows["parent_nbytes"]
    raw = rows["codec"] == CodecId.RAW
    same = rows["payload_nbytes"] == rows["stored_nbytes"]
    same &= rows["checksum"] == rows["stored_checksum"]
    bare = (rows["payload_nbytes"] == 0) & (rows["stored_nbytes"] == 0) & raw
    held = (rows["payload_nbytes"] > 0) & (rows["stored_nbytes"] > 0)
    ok: Mask = (rows["magic"] == MAGIC) & (rows["version"] == VERSION) & (rows["flags"] <= VOID)
    ok &= np.where(is_block(rows), held & (same | ~raw), bare)
    ok &= is_void(rows) == (rows["target"] != 0)
    # Up to 1 << 44: no sum of pages overflows, whatever the bytes are.
    ok &= np.maximum(rows["stored_nbytes"], rows["payload_nbytes"]) <= np.uint64(1 << 44)
    ok &= (key_nbytes >= KEY_NBYTES_MIN) & (key_nbytes <= KEY_NBYTES_MAX)
    ok &= (parent_nbytes == 0) | (parent_nbytes == key_nbytes)
    ok &= rows["boundary_member"] < rows["boundary_members"]
    ok &= ((rows["key"] & ~_KEY_MASKS[key_nbytes]) == 0).all(axis=1)
    ok &= ((rows["parent"] & ~_KEY_MASKS[parent_nbytes]) == 0).all(axis=1)
    ok &= (rows["reserved"] == 0).all(axis=1)
    return ok


def valid(rows: Rows) -> Mask:
    """Which rows are headers as they were written: sane, and with the right checksum."""
    rows = np.ascontiguousarray(rows)
    ok = sane(rows)
    if ok.any():
        ok &= rows["header_checksum"] == np.array(_header_checksums(raw_of(rows)), np.uint64)
    return ok


def rows_in_pages(pages: NDArray[np.uint8]) -> tuple[Rows, Mask]:
    """Headers at the beginning of pages.

    Args:
        pages: Shape (records, at least PAGE_NBYTES); the rest of each row is ignored.

    Returns:
        The headers, copied, and which of them are valid; the fill of the page must be zero.
    """
    rows = np.ascontiguousarray(pages[:, :HEADER_NBYTES]).view(RECORD).reshape(len(pages))
    return rows, valid(rows) & ~pages[:, HEADER_NBYTES:PAGE_NBYTES].any(axis=1)


def check_block(
    page: memoryview, namespace_id: bytes, group: int, payload_nbytes: int
) -> tuple[int, int, bytes, int] | None:
    """Whether a page is the header of a block of this identity that is stored raw; for the path of
    reads, where an array call costs more than a few comparisons of bytes.

    Returns:
        Its location, record number, key (filled up) and checksum of the stored bytes. Location 0: a
        right header, of something else. None: no header.
    """
    # Copied, since a view is compared element by element: 30 us for the fill of a page.
    header = bytes(page)
    digest = xxhash.xxh3_64_intdigest(header[:_CHECKED_NBYTES])
    if digest.to_bytes(8, "little") != header[_CHECKED_NBYTES:HEADER_NBYTES]:
        return None
    if not header.endswith(_FILL):
        return None
    start = _START.pack(MAGIC, VERSION, 0, group, namespace_id)
    codec, payload, stored, stored_checksum, seq, location = _MIDDLE.unpack_from(header, 54)
    known = (codec, payload, stored) == (CodecId.RAW, payload_nbytes, payload_nbytes)
    if not known or not header.startswith(start):
        location = 0
    return location, seq, header[_KEY_AT : _KEY_AT + KEY_NBYTES_MAX], stored_checksum


def decode(header: bytes | bytearray | memoryview) -> Rows | None:
    """One header, as a row array of length 1; bytes behind it must be zero (fill of a page).

    Never raises.

    Returns:
        None for anything that is not a header of this version.
    """
    if len(header) < HEADER_NBYTES:
        return None
    rows = np.frombuffer(header, np.uint8, HEADER_NBYTES).view(RECORD)
    if not valid(rows)[0] or np.frombuffer(header, np.uint8)[HEADER_NBYTES:].any():
        return None
    return rows


def version_of(header: bytes | bytearray | memoryview) -> int:
    """Format version that bytes claim; 0 = they are no header of any version."""
    if len(header) < 10 or int.from_bytes(header[:8], "little") != MAGIC:
        return 0
    return int.from_bytes(header[8:10], "little")
