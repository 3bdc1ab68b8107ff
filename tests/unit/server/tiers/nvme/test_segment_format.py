"""Segment header, table and footer: against the vectors, flipped bytes, any bytes."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_server.tiers.nvme import segment_format as form
from kvkeep_server.tiers.nvme.segments import Segment, SegmentState
from kvkeep_server.tiers.record import HEADER_NBYTES, PAGE_NBYTES

VECTORS = json.loads(
    (Path(__file__).parents[5] / "proto/kvkeep/v1/record_vectors.json").read_text()
)["segment"]
HEADER = form.SegmentHeader(VECTORS["number"], VECTORS["pages"], 1_700_000_000_000, "global")
TABLE = b"".join(bytes.fromhex(case["header"]) for case in VECTORS["records"])
FOOTER = form.Footer(
    VECTORS["number"], VECTORS["table_page"], len(VECTORS["records"]), form.table_checksum(TABLE)
)


def test_a_segment_is_that_of_the_vectors():
    header, footer = form.encode_segment_header(HEADER), form.encode_footer(FOOTER)
    assert header[:72].hex() == VECTORS["header"]
    assert footer[:56].hex() == VECTORS["footer"]
    whole = header
    for case in VECTORS["records"]:
        payload = bytes.fromhex(case["payload"])
        whole += bytes.fromhex(case["header"]).ljust(PAGE_NBYTES, b"\0")
        whole += payload + bytes(-len(payload) % PAGE_NBYTES)
    assert len(whole) == VECTORS["table_page"] * PAGE_NBYTES
    whole += TABLE.ljust(form.table_pages(FOOTER.records) * PAGE_NBYTES, b"\0") + footer
    assert hashlib.sha256(whole).hexdigest() == VECTORS["sha256"]


def test_what_was_encoded_is_decoded():
    assert form.decode_segment_header(form.encode_segment_header(HEADER)) == HEADER
    assert form.decode_footer(form.encode_footer(FOOTER)) == FOOTER
    rows = form.decode_table(FOOTER, memoryview(TABLE))
    assert rows is not None
    assert rows.tobytes() == TABLE


@given(st.integers(0, PAGE_NBYTES - 1), st.integers(1, 255))
def test_any_changed_byte_of_header_and_footer_is_noticed(position, change):
    for encoded, decode in (
        (form.encode_segment_header(HEADER), form.decode_segment_header),
        (form.encode_footer(FOOTER), form.decode_footer),
    ):
        changed = bytearray(encoded)
        changed[position] ^= change
        assert decode(changed) is None


@given(st.integers(0, len(TABLE) - 1), st.integers(1, 255))
def test_any_changed_byte_of_a_table_is_noticed(position, change):
    changed = bytearray(TABLE)
    changed[position] ^= change
    assert form.decode_table(FOOTER, memoryview(changed)) is None


@given(st.binary(max_size=PAGE_NBYTES), st.booleans())
def test_any_bytes_are_taken(data, whole):
    page = data.ljust(PAGE_NBYTES, b"\0") if whole else data
    assert form.decode_segment_header(page) is None
    assert form.decode_footer(page) is None
    form.segment_version_of(page)
    assert form.decode_table(FOOTER, memoryview(page)) is None


@given(
    st.sampled_from([form.SEGMENT_MAGIC, form.FOOTER_MAGIC, b"otherwise"[:8]]),
    st.integers(0, 3),
    st.binary(min_size=52, max_size=52),
)
def test_any_fields_under_a_right_checksum_are_taken(magic, version, rest):
    body = magic + version.to_bytes(4, "little") + rest
    form.decode_segment_header(form._sealed_page(body))
    form.decode_footer(form._sealed_page(body[:48]))


@pytest.mark.parametrize(
    "footer",
    [
        form.Footer(8, FOOTER.table_page, FOOTER.records, FOOTER.table_checksum),
        form.Footer(7, FOOTER.table_page - 1, FOOTER.records, FOOTER.table_checksum),
        form.Footer(7, FOOTER.table_page, FOOTER.records + 1, FOOTER.table_checksum),
    ],
    ids=["another segment", "records into the table", "more rows than there are"],
)
def test_a_table_that_does_not_fit_its_footer_is_none(footer):
    assert form.decode_table(footer, memoryview(TABLE)) is None


def test_rows_that_overlap_are_no_table():
    size = HEADER_NBYTES
    swapped = TABLE[size : 2 * size] + TABLE[:size] + TABLE[2 * size :]
    footer = form.Footer(7, FOOTER.table_page, FOOTER.records, form.table_checksum(swapped))
    assert form.decode_table(footer, memoryview(swapped)) is None


def test_a_newer_version_is_told_apart():
    page = bytearray(form.encode_segment_header(HEADER))
    page[8] = 9
    assert form.segment_version_of(page) == 9
    assert form.segment_version_of(bytes(PAGE_NBYTES)) == 0


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(0, 900), st.integers(0, 50)
)
def test_what_fits_leaves_room_for_table_and_footer(pages, free, records):
    fit = form.records_that_fit(np.array(pages), free, records)

    def needed(count):
        return sum(pages[:count]) + form.table_pages(records + count) + 1

    assert fit == 0 or needed(fit) <= free
    assert fit == len(pages) or needed(fit + 1) > free


@given(st.integers(1, 40), st.integers(2, 900), st.integers(0, 50))
def test_room_is_what_fits(record_pages, pages, records):
    segment = Segment(1, "", 0, pages, "", SegmentState.ACTIVE, records=records)
    many = np.full(1000, record_pages)
    assert segment.room(record_pages) == form.records_that_fit(many, segment.free_pages, records)
