"""Copies are exact or not counted, whatever the buffers are and whatever changes meanwhile."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from typing import Self

import numpy as np
import pytest

from kvkeep.copying import copy_blocks, targets_of, unchanged, view_blocks
from kvkeep.errors import InvalidArgumentError
from kvkeep.shared_memory import Chunk, RegionError, map_region
from kvkeep.store import sources_of
from tests.fakes.regions import FakeChunk

MiB = 1 << 20


class Pool:
    """Fake chunks and their read-only maps."""

    def __init__(self, *sizes: int) -> None:
        self.fakes = [FakeChunk(number, nbytes) for number, nbytes in enumerate(sizes)]
        self.chunks: dict[int, Chunk] = {}
        for fake in self.fakes:
            fd = fake.client_fd()
            region = map_region(fd, fake.nbytes)
            os.close(fd)
            self.chunks[fake.chunk_id] = Chunk(region, chunk_id=fake.chunk_id, server_epoch=42)

    def store(self, blocks: list[bytes], *, gap: int = 0) -> tuple[list[int], list[int]]:
        """Addresses and generations; the chunks take turns, `gap` pages are left between."""
        addresses, generations = [], []
        for number, block in enumerate(blocks):
            fake = self.fakes[number % len(self.fakes)]
            page = fake.allocate(len(block))
            fake.next_page += gap
            generations.append(fake.write(page, block))
            addresses.append(fake.address(page))
        return addresses, generations

    def copy(self, addresses: list[int], generations: list[int], nbytes: int, into) -> int:
        """In two pieces, as look-ups of many keys give them."""
        half = len(addresses) // 2
        parts = [(addresses[:half], generations[:half]), (addresses[half:], generations[half:])]
        places = [
            (np.array(a, dtype=np.uint64), np.array(g, dtype=np.uint64)) for a, g in parts if a
        ]
        return copy_blocks(self.chunks, places, nbytes, -(-nbytes // 4096) * 4096, into)


def shifted(nbytes: int, shift: int) -> np.ndarray:
    """A buffer of its own that begins `shift` bytes after a page."""
    memory = np.zeros(nbytes + 8192, np.uint8)
    first = -memory.ctypes.data % 4096 + shift
    return memory[first : first + nbytes]


@pytest.mark.parametrize("nbytes", [1, 890, 4096, 5000, 58_368, 65_536, 262_144 + 512, 2 * MiB])
@pytest.mark.parametrize("shift", [0, 1, 16, 31, 32, 4095])
@pytest.mark.parametrize("gap", [0, 1])
def test_one_buffer(nbytes, shift, gap):
    rng = np.random.default_rng(nbytes)
    blocks = [rng.bytes(nbytes) for _ in range(5)]
    pool = Pool(16 * MiB)
    into = shifted(5 * nbytes, shift)
    places = pool.store(blocks, gap=gap)
    assert pool.copy(*places, nbytes, targets_of(into, 5, nbytes)) == 5
    assert into.tobytes() == b"".join(blocks)


@pytest.mark.parametrize("nbytes", [890, 4096, 58_368])
@pytest.mark.parametrize("shift", [0, 16])
def test_a_buffer_for_each_block(nbytes, shift):
    rng = np.random.default_rng(nbytes)
    blocks = [rng.bytes(nbytes) for _ in range(5)]
    pool = Pool(MiB, MiB)
    into = [shifted(nbytes, shift) for _ in blocks]
    assert pool.copy(*pool.store(blocks), nbytes, targets_of(into, 5, nbytes)) == 5
    assert [one.tobytes() for one in into] == blocks


def test_long_runs_are_cut_and_joined_without_a_gap():
    rng = np.random.default_rng(1)
    blocks = [rng.bytes(4096) for _ in range(700)]
    pool = Pool(8 * MiB)
    into = shifted(700 * 4096, 16)
    assert pool.copy(*pool.store(blocks), 4096, targets_of(into, 700, 4096)) == 700
    assert into.tobytes() == b"".join(blocks)


@pytest.mark.parametrize("changed", range(6))
@pytest.mark.parametrize("kind", ["reused", "being written"])
@pytest.mark.parametrize("many", [False, True], ids=["one buffer", "many"])
def test_a_changed_slot_ends_what_is_exact(changed, kind, many):
    blocks = [bytes([i]) * 5000 for i in range(6)]
    pool = Pool(MiB, MiB)
    addresses, generations = pool.store(blocks)
    fake, page = pool.fakes[changed % 2], addresses[changed] & 0xFFFFFFFF
    if kind == "reused":
        fake.write(page, b"x" * 5000)
    else:
        fake.reuse(page)
    into = [bytearray(5000) for _ in blocks] if many else bytearray(30_000)
    exact = pool.copy(addresses, generations, 5000, targets_of(into, 6, 5000))
    assert exact == changed
    assert b"".join(into if many else [into])[: 5000 * exact] == b"".join(blocks[:exact])


@pytest.mark.parametrize("many", [False, True], ids=["one buffer", "many"])
@pytest.mark.parametrize(
    "address",
    [1 << 32 | 300, 0, 1, 255, 2**32 - 1],
    ids=["unmapped chunk", "header", "generations", "runs out of the chunk", "far outside"],
)
def test_an_address_outside_of_what_is_mapped_is_a_miss(address, many):
    pool = Pool(MiB)
    (good,), (generation,) = pool.store([b"a" * 5000])
    into = [bytearray(5000) for _ in range(3)] if many else bytearray(15_000)
    places = [good, address, good], [generation, 2, generation]
    assert pool.copy(*places, 5000, targets_of(into, 3, 5000)) == 1
    with pytest.raises(RegionError):
        view_blocks(pool.chunks, np.array([address], dtype=np.uint64), 5000)


def test_views_are_read_only_and_show_the_pool():
    pool = Pool(MiB)
    addresses, generations = pool.store([b"a" * 5000, b"b" * 5000])
    columns = np.array(addresses, dtype=np.uint64), np.array(generations, dtype=np.uint64)
    views = view_blocks(pool.chunks, columns[0], 5000)
    assert [bytes(view) for view in views] == [b"a" * 5000, b"b" * 5000]
    assert all(view.readonly for view in views)
    assert unchanged(pool.chunks, *columns) == 2


@pytest.mark.parametrize(
    ("buffers", "match"),
    [
        (bytearray(9999), "9999 bytes.*10000 writable"),
        (bytes(10_000), "read-only"),
        ([bytearray(5000)], "1 buffers.*2, one a key"),
        ([bytearray(5000), bytearray(4999)], r"buffers\[1\] is '4999 bytes"),
        (7, "contiguous buffer"),
        (np.zeros((100, 200), np.uint8)[:, :100], "contiguous"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(buffers, match):
    with pytest.raises(InvalidArgumentError, match=match):
        targets_of(buffers, 2, 5000)


@pytest.mark.parametrize("nbytes", [512, 4096, 8192])
@pytest.mark.parametrize("step", [2, -1, -2])
@pytest.mark.parametrize("many", [False, True], ids=["one buffer", "many"])
@pytest.mark.parametrize("take", [targets_of, sources_of])
def test_strided_memory_is_refused_in_words(nbytes, step, many, take):
    strided = np.zeros(nbytes * 2 * abs(step), np.uint8)[::step]
    assert strided.nbytes == 2 * nbytes
    buffers = [strided[:nbytes], strided[nbytes:]] if many else strided
    with pytest.raises(InvalidArgumentError, match=r"^buffers.*contiguous"):
        take(buffers, 2, nbytes)


class Pointers(ctypes.Structure):
    _fields_ = (("O", ctypes.c_int), ("b", ctypes.py_object))


ADDRESSES = {
    "objects": np.zeros(1250, object),
    "an object": np.zeros((), object),
    "objects in rows": np.zeros((2, 625), object),
    "objects in records": np.zeros(500, [("a", "i4"), ("b", object)]),
    "objects deep in records": np.zeros(500, [("a", [("b", object, 2), ("c", "i4")])]),
    "objects of ctypes": (ctypes.py_object * 4)(),
    "structures": (Pointers * 4)(),
    "strings of C": (ctypes.c_char_p * 4)(),
    "wide strings of C": (ctypes.c_wchar_p * 4)(),
    "addresses": (ctypes.c_void_p * 4)(),
    "pointers": (ctypes.POINTER(ctypes.c_int) * 4)(),
    "functions": (ctypes.CFUNCTYPE(None) * 4)(),
}


@pytest.mark.parametrize("name", ADDRESSES)
@pytest.mark.parametrize("many", [False, True], ids=["one buffer", "many"])
@pytest.mark.parametrize("take", [targets_of, sources_of])
def test_memory_that_holds_addresses_is_refused(name, many, take):
    buffer = ADDRESSES[name]
    nbytes = memoryview(buffer).nbytes
    with pytest.raises(InvalidArgumentError, match=r"^buffers.*plain data, no addresses"):
        take([buffer] if many else buffer, 1, nbytes)


@pytest.mark.parametrize(
    "dtype",
    ["u1", "i8", ">i4", "?", "f2", "c16", "c8", "V16", "S16", [("O", "i4"), ("P&z", "c16")]],
)
@pytest.mark.parametrize("take", [targets_of, sources_of])
def test_plain_data_of_any_type_is_taken(dtype, take):
    buffer = np.zeros((4, 5), dtype)
    assert len(take([buffer], 1, buffer.nbytes)[0]) == buffer.nbytes


def test_buffers_of_any_element_type_fit():
    into = np.zeros((2, 1250), np.float32)
    pool = Pool(MiB)
    blocks = [bytes(5000), b"\1" * 5000]
    assert pool.copy(*pool.store(blocks), 5000, targets_of(into, 2, 5000)) == 2
    assert into.tobytes() == b"".join(blocks)


class Refiller:
    """Reuses slots all the time, in a thread; each block's bytes are its generation."""

    nbytes = 16_384

    def __init__(self, fake: FakeChunk) -> None:
        self.fake = fake
        self.pages = [fake.allocate(self.nbytes) for _ in range(8)]
        self._words = fake.bytes.view(np.uint64)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _write(self, page: int) -> None:
        self.fake.reuse(page)
        self._words[page * 512 : page * 512 + self.nbytes // 8] = self.fake._counter + 2
        self.fake.seal(page)

    def _run(self) -> None:
        rng = np.random.default_rng(0)
        while not self._stop.is_set():
            self._write(self.pages[int(rng.integers(8))])

    def __enter__(self) -> Self:
        for page in self.pages:
            self._write(page)
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        sys.setswitchinterval(self._interval)
        self._stop.set()
        self._thread.join()


def test_no_reuse_of_a_slot_goes_unnoticed():
    pool = Pool(2 * MiB)
    into = np.zeros(Refiller.nbytes // 8, np.uint64)
    refused = 0
    with Refiller(pool.fakes[0]) as refiller:
        # By time and not by number: how often the writer gets in between is the scheduler's choice.
        deadline, number = time.monotonic() + 30, 0
        while refused <= 200 and time.monotonic() < deadline:
            number += 1
            page = refiller.pages[number % 8]
            generation = int(refiller.fake.generations[page])
            if number % 16 == 0:
                time.sleep(0)
            place = [refiller.fake.address(page)], [generation]
            if pool.copy(*place, Refiller.nbytes, memoryview(into).cast("B")):
                assert generation % 2 or (into == generation).all()
            else:
                refused += 1
    assert refused
