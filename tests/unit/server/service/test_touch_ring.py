"""The daemon's end of a touch ring: whatever a client writes into it, at any time."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep_server.service.touch_ring import HEADER_NBYTES, RECORD, TouchRing

RECORDS = 16
VECTORS = json.loads(
    (Path(__file__).parents[4] / "proto/kvkeep/v1/shared_memory_vectors.json").read_text()
)["touch_ring"]


class Writer:
    """A client, written from shared_memory.md."""

    def __init__(self, ring):
        self.buffer = ring.memfd.buffer
        self.written = 0

    def place(self, number):
        return HEADER_NBYTES + number % RECORDS * 64

    def set_head(self, head):
        struct.pack_into("<Q", self.buffer, 64, head)

    def write(self, asked=1):
        number = self.written + 1
        fields = (number, 1, 2, asked, 3, 4, 5, 6, 7, 2, 1, 1, 0, 9, number)
        struct.pack_into("<QIIIIIIQIBBBBQQ", self.buffer, self.place(self.written), *fields)
        self.written = number
        self.set_head(number)


@pytest.fixture
def ring():
    ring = TouchRing(records=RECORDS)
    yield ring
    ring.close()


@pytest.fixture
def client(ring):
    return Writer(ring)


def asked(drained):
    return drained.records["asked"].tolist()


def test_header_and_record_are_those_of_the_vectors():
    ring = TouchRing(records=VECTORS["records"])
    header = bytes.fromhex(VECTORS["header"])
    fields = VECTORS["fields"]
    assert bytes(ring.memfd.buffer[:64]) == header[:64]
    ring.memfd.buffer[: len(header)] = header
    start = VECTORS["record_offset"]
    ring.memfd.buffer[start : start + 64] = bytes.fromhex(VECTORS["record"])
    ring._tail = fields["number"]
    drained = ring.drain(10)
    assert (len(drained.records), drained.lost, drained.torn) == (1, 0, 0)
    (record,) = drained.records
    names = {
        "set_index": "set_index",
        "group": "group",
        "asked": "blocks_asked",
        "found": "blocks_found",
        "row": "row",
        "version": "version",
        "engine_hit_tokens": "engine_hit_tokens",
        "output_tokens": "output_tokens",
        "stop_reason": "stop_reason",
        "sub_agent": "sub_agent",
        "was_read": "blocks_read",
    }
    assert {ours: int(record[ours]) for ours in names} == {
        ours: int(fields[theirs]) for ours, theirs in names.items()
    }
    assert int(record["number"]) == fields["number"] + 1
    assert int(record["session_hint"]).to_bytes(8, "little").hex() == fields["session"]
    ring.close()


def test_records_come_once_and_in_order(ring, client):
    for number in range(5):
        client.write(asked=number)
    assert asked(ring.drain(100)) == [0, 1, 2, 3, 4]
    assert asked(ring.drain(100)) == []
    client.write(asked=9)
    assert asked(ring.drain(100)) == [9]


def test_what_is_above_the_slice_waits(ring, client):
    for number in range(7):
        client.write(asked=number)
    assert [asked(ring.drain(3)) for _ in range(4)] == [[0, 1, 2], [3, 4, 5], [6], []]


def test_a_full_ring_is_read_whole_and_wraps(ring, client):
    for round_ in range(5):
        for number in range(RECORDS):
            client.write(asked=round_ * 100 + number)
        drained = ring.drain(100)
        assert asked(drained) == [round_ * 100 + number for number in range(RECORDS)]
        assert (drained.lost, drained.torn) == (0, 0)


def test_what_was_overwritten_is_counted_as_lost(ring, client):
    for number in range(RECORDS + 5):
        client.write(asked=number)
    drained = ring.drain(100)
    assert asked(drained) == list(range(5, RECORDS + 5))
    assert (drained.lost, drained.torn) == (5, 0)


@pytest.mark.parametrize("end", [0, 56], ids=["front", "back"])
def test_a_torn_record_is_counted_and_skipped(ring, client, end):
    for number in range(3):
        client.write(asked=number)
    struct.pack_into("<Q", ring.memfd.buffer, client.place(1) + end, 77)
    drained = ring.drain(100)
    assert asked(drained) == [0, 2]
    assert (drained.lost, drained.torn) == (0, 1)


def test_a_head_that_runs_ahead_brings_nothing_that_was_not_written(ring, client):
    client.write(asked=1)
    client.set_head(6)
    drained = ring.drain(100)
    assert asked(drained) == [1]
    assert drained.torn == 5
    assert asked(ring.drain(100)) == []


@pytest.mark.parametrize("head", [0, 1, (1 << 64) - 1, 1 << 63, 1 << 48, 1 << 25])
def test_a_head_from_nowhere_starts_anew(ring, client, head):
    for number in range(3):
        client.write(asked=number)
    ring.drain(100)
    client.set_head(head)
    drained = ring.drain(100)
    assert (asked(drained), drained.lost, drained.torn) == ([], 0, 1)
    assert asked(ring.drain(100)) == []
    if head < 1 << 62:
        client.written = head
        client.write(asked=9)
        assert asked(ring.drain(100)) == [9]


def test_numbers_at_the_end_of_u64_do_no_harm(ring, client):
    client.set_head((1 << 64) - 4)
    ring.drain(100)
    client.set_head((1 << 64) - 1)
    drained = ring.drain(100)
    assert (asked(drained), drained.torn) == ([], 3)
    client.set_head(2)
    assert ring.drain(100).torn == 1


def test_a_copy_is_taken_before_it_is_checked(ring, client):
    client.write(asked=5)
    records = ring.drain(100).records
    ring.memfd.buffer[HEADER_NBYTES:][:64] = b"\xff" * 64
    assert records["asked"].tolist() == [5]


HEADS = st.one_of(st.integers(0, 40), st.integers(0, (1 << 64) - 1))


@settings(max_examples=200)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("head"), HEADS),
            st.tuples(st.just("bytes"), st.integers(0, RECORDS * 64 - 1), st.binary(max_size=200)),
            st.tuples(st.just("header"), st.integers(0, 100), st.binary(max_size=30)),
            st.tuples(st.just("write"), st.integers(0, 30)),
            st.tuples(st.just("drain"), st.integers(1, 20)),
        ),
        max_size=20,
    )
)
def test_no_bytes_of_a_client_break_the_daemon(steps):
    ring = TouchRing(records=RECORDS)
    client = Writer(ring)
    for step in steps:
        match step:
            case ("head", head):
                client.set_head(head)
            case ("bytes", at, garbage):
                at += HEADER_NBYTES
                garbage = garbage[: len(ring.memfd.buffer) - at]
                ring.memfd.buffer[at : at + len(garbage)] = garbage
            case ("header", at, garbage):
                ring.memfd.buffer[at : at + len(garbage)] = garbage
            case ("write", count):
                for number in range(count):
                    client.write(asked=number)
            case ("drain", at_most):
                check(ring.drain(at_most), at_most)
    check(ring.drain(RECORDS), RECORDS)
    ring.close()


def check(drained, at_most):
    records = drained.records
    assert records.dtype == RECORD
    assert len(records) <= min(at_most, RECORDS)
    assert (records["number"] == records["number_again"]).all()
    assert (np.diff(records["number"].astype(object)) > 0).all()
    assert drained.lost >= 0
    assert drained.torn >= 0
