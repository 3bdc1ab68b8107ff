"""Regions are refused before they can fault, and unmapped when the last view is gone."""

from __future__ import annotations

import fcntl
import gc
import os
import struct

import numpy as np
import pytest

from kvkeep.shared_index import IndexTable
from kvkeep.shared_memory import Chunk, RegionError, TouchRing, map_region
from tests.fakes.regions import F_SEAL_FUTURE_WRITE, FakeChunk, FakeIndex, FakeRegion, FakeTouchRing
from tests.unit.client.conftest import mapped

MiB = 1 << 20


def mapping(region: FakeRegion, **more):
    fd = region.client_fd()
    try:
        return map_region(fd, region.nbytes, **more)
    finally:
        os.close(fd)


def test_a_region_shows_what_the_daemon_writes():
    region = FakeRegion(3 * MiB)
    view = mapping(region)
    region.buffer[5:8] = b"abc"
    assert bytes(view[5:8]) == b"abc"
    assert view.readonly
    assert np.frombuffer(view, np.uint8).ctypes.data % (2 * MiB) == 0


def test_a_read_only_region_cannot_be_mapped_for_writing():
    with pytest.raises(RegionError, match="mmap"):
        mapping(FakeRegion(MiB), writable=True)


def test_a_writable_region_reaches_the_daemon():
    region = FakeRegion(MiB, client_writes=True)
    view = mapping(region, writable=True)
    view[:3] = b"xyz"
    assert region.buffer[:3] == b"xyz"


@pytest.mark.parametrize("announced", [0, -4096, 4096, 2 * MiB, MiB + 1])
def test_another_size_than_announced_is_refused(announced):
    region = FakeRegion(MiB)
    fd = region.client_fd()
    with pytest.raises(RegionError, match="announced"):
        map_region(fd, announced)
    os.close(fd)


def test_a_file_without_seals_is_refused():
    with pytest.raises(RegionError, match="SHRINK, GROW, SEAL, FUTURE_WRITE"):
        mapping(FakeRegion(MiB, seal=False))


SEALS = {
    "SHRINK": fcntl.F_SEAL_SHRINK,
    "GROW": fcntl.F_SEAL_GROW,
    "SEAL": fcntl.F_SEAL_SEAL,
    "FUTURE_WRITE": F_SEAL_FUTURE_WRITE,
}


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("missing", SEALS)
def test_every_seal_of_the_layout_is_needed(missing, writable):
    region = FakeRegion(MiB, client_writes=writable, seal=False)
    unneeded = {missing, "FUTURE_WRITE"} if writable else {missing}
    for name in SEALS.keys() - unneeded - {"SEAL"}:
        fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, SEALS[name])
    if missing != "SEAL":
        fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    if writable and missing == "FUTURE_WRITE":
        mapping(region, writable=True)
        return
    with pytest.raises(RegionError, match=f"lacks the seals {missing}:"):
        mapping(region, writable=writable)


def test_the_map_lives_as_long_as_its_last_view():
    view = mapping(FakeRegion(MiB))
    address = np.frombuffer(view, np.uint8).ctypes.data
    array = np.frombuffer(view[4096:], np.uint8)
    del view
    gc.collect()
    assert mapped(address)
    assert array[0] == 0
    del array
    gc.collect()
    assert not mapped(address)


def test_a_refused_map_leaves_no_address_space():
    region = FakeRegion(64 * MiB)

    def virtual_pages() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0])

    before = virtual_pages()
    for _ in range(5):
        with pytest.raises(RegionError):
            mapping(region, writable=True)
    assert virtual_pages() - before < 64 * MiB // 4096


def test_maps_stay_out_of_core_dumps():
    view = mapping(FakeRegion(MiB))
    address = np.frombuffer(view, np.uint8).ctypes.data
    with open("/proc/self/smaps") as smaps:
        text = smaps.read()
    start = text.index(f"{address:08x}-")
    flags = text[text.index("VmFlags:", start) :].partition("\n")[0]
    assert " dd" in flags


def patched(region: FakeRegion, offset: int, form: str, value: object) -> memoryview:
    copy = bytearray(region.buffer)
    struct.pack_into(form, copy, offset, value)
    return memoryview(copy)


@pytest.mark.parametrize(
    ("offset", "form", "value", "match"),
    [
        (0, "8s", b"KVKINDX1", "begins with"),
        (8, "<I", 1, "layout version 1"),
        (12, "<I", 1, "another chunk"),
        (16, "<Q", 43, "another chunk"),
        (24, "<Q", 2 * MiB, "another chunk"),
        (32, "<Q", 8192, "offsets"),
        (40, "<Q", 4096, "offsets"),
        (40, "<Q", 8200, "offsets"),
        (40, "<Q", MiB, "offsets"),
        (40, "<Q", 2**63, "offsets"),
    ],
)
def test_a_chunk_that_contradicts_itself_is_refused(offset, form, value, match):
    view = patched(FakeChunk(0, MiB), offset, form, value)
    with pytest.raises(RegionError, match=match):
        Chunk(view, chunk_id=0, server_epoch=42)


@pytest.mark.parametrize(
    ("offset", "form", "value", "match"),
    [
        (0, "8s", b"KVKCHNK1", "begins with"),
        (8, "<I", 9, "layout version 9"),
        (16, "<Q", 41, "another table"),
        (24, "<Q", 2, "another table"),
        (32, "<Q", 0, "buckets"),
        (32, "<Q", 2**40, "buckets"),
        (40, "<Q", 7, "rows"),
        (48, "<Q", 1, "another table"),
        (56, "<Q", 0, "column"),
        (64, "<Q", 4097, "column"),
        (88, "<Q", 2**62, "column"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(offset, form, value, match):
    view = patched(FakeIndex(16), offset, form, value)
    with pytest.raises(RegionError, match=match):
        IndexTable(view, table_id=1, server_epoch=42)


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [(0, "8s", b"KVKCHNK1"), (8, "<I", 1), (12, "<I", 0), (12, "<I", 63), (12, "<I", 128)],
)
def test_a_touch_ring_that_contradicts_itself_is_refused(offset, form, value):
    with pytest.raises(RegionError):
        TouchRing(patched(FakeTouchRing(64), offset, form, value))


def test_the_touch_ring_wraps_around():
    region = FakeTouchRing(4)
    ring = TouchRing(mapping(region, writable=True))
    for number in range(6):
        ring.append(number, *[0] * 12)
    assert region.head == 6
    sets = [struct.unpack_from("<QI", region.record(n)) for n in range(2, 6)]
    assert sets == [(3, 2), (4, 3), (5, 4), (6, 5)]


def test_a_session_id_of_any_bytes_fits_a_record():
    ring = TouchRing(mapping(FakeTouchRing(4), writable=True))
    ring.append(*[2**32 - 1] * 6, 2**64 - 1, 2**32 - 1, 255, 1, 1, 0, 2**64 - 1)
