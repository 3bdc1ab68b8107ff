"""The record format: against the vectors that no product code made, flipped bytes, any bytes."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import GroupKind
from kvkeep_server.tiering.keyspaces import Keyspace
from kvkeep_server.tiers import record
from kvkeep_server.tiers.base import Blocks
from kvkeep_server.tiers.record import HEADER_NBYTES, PAGE_NBYTES, RECORD
from tests.fakes.nvme_blocks import blocks_of, facts_of
from tests.vectors.make_vectors import render_record

FILE = Path(__file__).parents[4] / "proto/kvkeep/v1/record_vectors.json"
CASES = json.loads(FILE.read_text())["segment"]["records"]


def number(text):
    return int(text, 16)


def row_of(fields):
    """A row of RECORD with the fields of a vector."""
    rows = np.zeros(1, RECORD)
    for name in ("flags", "group", "boundary_members", "boundary_member"):
        rows[name] = fields[name]
    for name in ("created_ms", "last_used_ms"):
        rows[name] = fields[name]
    for name in ("record_seq", "location", "target"):
        rows[name] = number(fields[name])
    for name in ("namespace_id", "boundary_id"):
        rows[name] = record.id_words(bytes.fromhex(fields[name]))
    rows["payload_nbytes"] = rows["stored_nbytes"] = fields["payload_nbytes"]
    rows["checksum"] = rows["stored_checksum"] = number(fields["checksum"])
    rows["retention_class"] = fields["retention_class"].encode()
    for name in ("key", "parent"):
        key = bytes.fromhex(fields[name])
        if key:
            record.put_keys(rows, KeyBatch.unpack(key, len(key)), name)
    return rows


def test_the_file_is_what_the_generator_writes():
    assert FILE.read_text() == render_record()


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["fields"]["payload_nbytes"]))
def test_headers_are_those_of_the_vectors(case):
    rows = row_of(case["fields"])
    assert record.seal_headers(rows).tobytes().hex() == case["header"]
    decoded = record.decode(bytes.fromhex(case["header"]))
    assert decoded is not None
    assert decoded.tobytes() == rows.tobytes()
    assert record.keys_of(decoded) == [bytes.fromhex(case["fields"]["key"])]
    if case["payload"]:
        payload = memoryview(bytes.fromhex(case["payload"]))
        assert record.stored_checksums_match(decoded, [payload]).all()


def test_checksums_are_those_of_the_keyspace():
    """What the daemon takes of a copy in ram is what a record holds: no second pass."""
    for case in CASES[:3]:
        fields = case["fields"]
        namespace_id, key = bytes.fromhex(fields["namespace_id"]), bytes.fromhex(fields["key"])
        group, nbytes = fields["group"], fields["payload_nbytes"]
        seed = Keyspace.seed(namespace_id, group, nbytes)
        space = Keyspace(
            0, namespace_id, 0, group, GroupKind.FULL, len(key), nbytes, seed, b"s" * 16, 1, 0
        )
        payload = memoryview(bytes.fromhex(case["payload"]))
        assert space.checksum(key, payload) == number(fields["checksum"])


def encoded(count=3, nbytes=5000, key_nbytes=32, seed=0):
    """Headers of some blocks, sealed, and their payloads."""
    blocks, contents = blocks_of(count, nbytes=nbytes, key_nbytes=key_nbytes, seed=seed)
    rows = record.rows_of(blocks)
    rows["record_seq"] = np.arange(1, count + 1)
    record.seal_headers(rows)
    return rows, contents


@given(
    st.integers(0, HEADER_NBYTES + 40),
    st.integers(1, 255),
    st.sampled_from([16, 17, 32, 33, 64]),
)
def test_any_changed_byte_of_a_header_is_noticed(position, change, key_nbytes):
    rows, _ = encoded(1, key_nbytes=key_nbytes)
    page = bytearray(rows.tobytes().ljust(PAGE_NBYTES, b"\0"))
    assert record.decode(page) is not None
    page[position] ^= change
    assert record.decode(page) is None
    assert not record.rows_in_pages(np.frombuffer(page, np.uint8)[None, :])[1].any()


@pytest.mark.promise("P01", gate=320 + 5000, unit="flipped bytes noticed")
def test_every_flipped_byte_of_header_and_payload_is_noticed():
    rows, contents = encoded(1)
    header = rows.tobytes()
    for position in range(HEADER_NBYTES):
        flipped = bytearray(header)
        flipped[position] ^= 1 << position % 8
        assert record.decode(flipped) is None
    flipped = np.tile(np.frombuffer(contents[0], np.uint8), (len(contents[0]), 1))
    flipped[np.arange(len(flipped)), np.arange(len(flipped))] ^= 1
    copies = [memoryview(payload) for payload in flipped]
    assert not record.stored_checksums_match(np.repeat(rows, len(copies)), copies).any()


@given(st.binary(max_size=600))
def test_decode_takes_any_bytes(data):
    assert record.decode(data) is None
    assert record.version_of(data) == 0


@given(st.binary(min_size=312, max_size=312), st.booleans())
def test_decode_takes_any_header_with_a_right_checksum(body, magic):
    """What holds together by checksum only is still no record unless its fields do."""
    start = b"KVKRECD1\x01\0\0\0" if magic else body[:12]
    rows = np.frombuffer(bytearray(start + body[12:] + bytes(8)), np.uint8).view(RECORD)
    rows["header_checksum"] = record._header_checksums(record.raw_of(rows))
    decoded = record.decode(rows.tobytes())
    assert (decoded is not None) == bool(record.sane(rows)[0])


def changed(**fields):
    rows, _ = encoded(1)
    for name, value in fields.items():
        rows[name] = value
    rows["header_checksum"] = record._header_checksums(record.raw_of(rows))
    return rows.tobytes()


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 2},
        {"flags": 3},
        {"flags": 2, "payload_nbytes": 0, "stored_nbytes": 0, "checksum": 0, "stored_checksum": 0},
        {"target": 1},
        {"flags": 1},
        {"payload_nbytes": 0, "stored_nbytes": 0},
        {"stored_nbytes": 4999},
        {"stored_checksum": 1},
        {"stored_nbytes": 1 << 45, "payload_nbytes": 1 << 45},
        {"key_nbytes": 15},
        {"key_nbytes": 65},
        {"parent_nbytes": 16},
        {"boundary_members": 0},
        {"boundary_member": 1},
        {"key_nbytes": 24},
        {"reserved": 1},
    ],
    ids=str,
)
def test_fields_that_contradict_each_other_are_no_record(fields):
    assert record.decode(changed()) is not None
    assert record.decode(changed(**fields)) is None


def test_a_newer_version_is_told_apart():
    assert record.version_of(changed(version=2)) == 2
    assert record.version_of(changed()) == record.VERSION
    assert record.version_of(bytes(PAGE_NBYTES)) == 0


def test_a_zero_page_is_no_record():
    assert record.decode(bytes(PAGE_NBYTES)) is None


def test_payloads_are_bound_to_namespace_group_key_and_length():
    rows, contents = encoded(1)
    payload = [memoryview(contents[0])]
    assert record.stored_checksums_match(rows, payload).all()
    for name in ("namespace_id", "group", "key", "payload_nbytes"):
        other = rows.copy()
        other[name] += 1
        assert not record.stored_checksums_match(other, payload).any(), name


def test_rows_say_what_the_blocks_said():
    blocks, contents = blocks_of(3, key_nbytes=20)
    facts = facts_of(blocks, contents, has_parent=np.array([False, True, True]))
    rows = record.rows_of(Blocks(**{**_fields(blocks), "facts": facts}))
    assert record.keys_of(rows) == [blocks.keys.pack()[i * 20 : i * 20 + 20] for i in range(3)]
    assert rows["parent_nbytes"].tolist() == [0, 20, 20]
    assert not rows["parent"][0].any()
    assert rows["retention_class"].tolist() == [b"global"] * 3
    assert record.stored_checksums_match(rows, [memoryview(data) for data in contents]).all()
    rows["location"] = [5, 6, 7]
    stones, voids = record.tombstones_of(blocks, 1000), record.voids_of(rows)
    for marks in (stones, voids):
        record.seal_headers(marks)
        assert record.keys_of(marks) == record.keys_of(rows)
    assert record.is_tombstone(stones).all()
    assert record.is_void(voids).all()
    assert voids["target"].tolist() == [5, 6, 7]
    assert record.is_block(rows).all()


def _fields(blocks):
    return {name: getattr(blocks, name) for name in Blocks.__slots__}


def test_blocks_without_facts_are_refused():
    blocks, _ = blocks_of(1)
    with pytest.raises(AssertionError, match="facts"):
        record.rows_of(Blocks(**{**_fields(blocks), "facts": None}))
