"""Shared regions as the daemon would make them, written from shared_memory.md alone.

Slow and simple, except `FakeIndex.fill`, which benchmarks use to make tables of a million rows.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import struct

import numpy as np
from numpy.typing import NDArray

from tests.vectors.make_vectors import LAYOUT_VERSION, fingerprint, home_bucket

F_SEAL_FUTURE_WRITE = 0x10
MADV_COLLAPSE = 25
PAGE = 4096


class FakeRegion:
    """A sealed memfd and the daemon's own writable map of it."""

    def __init__(self, nbytes: int, *, client_writes: bool = False, seal: bool = True) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("fake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        os.posix_fallocate(self.fd, 0, nbytes)
        self.buffer = mmap.mmap(self.fd, nbytes)
        self._client_writes = client_writes
        if seal:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            seals |= 0 if client_writes else F_SEAL_FUTURE_WRITE
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)

    def client_fd(self) -> int:
        """A descriptor to hand over; the receiver owns it."""
        mode = os.O_RDWR if self._client_writes else os.O_RDONLY
        return os.open(f"/proc/self/fd/{self.fd}", mode | os.O_CLOEXEC)

    def column(self, offset: int, count: int, dtype: str = "<u8") -> NDArray[np.uint64]:
        return np.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset)

    def close(self) -> None:
        """Only the descriptor: arrays still look into the map."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class FakeChunk(FakeRegion):
    """A chunk whose slots the test hands out by page number."""

    def __init__(self, chunk_id: int, nbytes: int, *, server_epoch: int = 42) -> None:
        super().__init__(nbytes)
        self.chunk_id = chunk_id
        generations_nbytes = -(-(nbytes // PAGE) * 8 // PAGE) * PAGE
        self.data_offset = PAGE + generations_nbytes
        header = struct.pack(
            "<8sIIQQQQ",
            b"KVKCHNK1",
            LAYOUT_VERSION,
            chunk_id,
            server_epoch,
            nbytes,
            PAGE,
            self.data_offset,
        )
        self.buffer[: len(header)] = header
        self.generations = self.column(PAGE, nbytes // PAGE)
        self.bytes = np.frombuffer(self.buffer, dtype=np.uint8)
        self._counter = chunk_id << 48
        self.next_page = self.data_offset // PAGE

    def write(self, page: int, data: bytes | memoryview) -> int:
        """Seal `data` at `page`; the slot's new generation."""
        self.reuse(page)
        self.buffer[page * PAGE : page * PAGE + len(data)] = bytes(data)
        return self.seal(page)

    def reuse(self, page: int) -> None:
        """As the daemon before it writes: the generation becomes odd."""
        self._counter += 2
        self.generations[page] = self._counter + 1

    def seal(self, page: int) -> int:
        self._counter += 2
        self.generations[page] = self._counter
        return self._counter

    def allocate(self, nbytes: int) -> int:
        """The next free page; tests do not free."""
        page = self.next_page
        self.next_page += -(-nbytes // PAGE)
        assert self.next_page * PAGE <= self.nbytes, "the fake chunk is full"
        return page

    def address(self, page: int) -> int:
        return page | self.chunk_id << 32


class FakeIndex(FakeRegion):
    """An index table with the daemon's order of writes."""

    def __init__(
        self, buckets: int, *, table_id: int = 1, server_epoch: int = 42, seed: int = 1
    ) -> None:
        rng = random.Random(seed)
        self.table_id = table_id
        buckets |= 1
        self.buckets, self.rows = buckets, 8 * buckets
        self.a = [rng.getrandbits(64) | 1 for _ in range(16)]
        self.b = [rng.getrandbits(64) | 1 for _ in range(16)]
        offsets, offset = [], PAGE
        for width in (64, 64, 64, 32, 2):
            offsets.append(offset)
            offset += -(-buckets * width // PAGE) * PAGE
        super().__init__(offset)
        header = struct.pack(
            "<8sIIQQQQQ5Q",
            *(b"KVKINDX1", LAYOUT_VERSION, 1, server_epoch, table_id, buckets, self.rows, offset),
            *offsets,
        )
        self.buffer[: len(header)] = header
        self.buffer[128:384] = struct.pack("<32Q", *self.a, *self.b)
        self.tag, self.check, self.place = (self.column(at, self.rows) for at in offsets[:3])
        self.version = self.column(offsets[3], self.rows, "<u4")
        self.passed = self.column(offsets[4], buckets, "<u2")

    @property
    def state(self) -> int:
        return int.from_bytes(self.buffer[12:16], "little")

    @state.setter
    def state(self, value: int) -> None:
        self.buffer[12:16] = value.to_bytes(4, "little")

    def row_of(self, namespace_id: bytes, group: int, key: bytes) -> int | None:
        tag, check = fingerprint(self.a, self.b, namespace_id, group, key)
        home = home_bucket(tag, self.buckets)
        for step in range(min(64, self.buckets)):
            first = (home + (step << (tag & 15))) % self.buckets * 8
            tags = self.tag[first : first + 8].tolist()
            if tag in tags:
                row = first + tags.index(tag)
                return row if self.check[row] == check else None
            if not self.passed[first // 8]:
                return None
        return None

    def insert(
        self, namespace_id: bytes, group: int, key: bytes, address: int, *, on_nvme: bool = False
    ) -> int:
        """The row that it took."""
        tag, check = fingerprint(self.a, self.b, namespace_id, group, key)
        row = self.row_of(namespace_id, group, key)
        if row is None:
            row = self._free_row(tag)
            self._pass_by(tag, row, 1)
        self.version[row] += 1
        self.check[row], self.place[row] = check, address | on_nvme << 63
        self.tag[row] = tag
        self.version[row] += 1
        return row

    def _free_row(self, tag: int) -> int:
        for step in range(min(64, self.buckets)):
            first = (home_bucket(tag, self.buckets) + (step << (tag & 15))) % self.buckets * 8
            for row in range(first, first + 8):
                if not self.tag[row]:
                    return row
        raise AssertionError("the fake index is full")

    def remove(self, namespace_id: bytes, group: int, key: bytes) -> None:
        row = self.row_of(namespace_id, group, key)
        assert row is not None
        tag = int(self.tag[row])
        self.version[row] += 1
        self.tag[row] = self.check[row] = self.place[row] = 0
        self.version[row] += 1
        self._pass_by(tag, row, -1)

    def _pass_by(self, tag: int, row: int, change: int) -> None:
        bucket = home_bucket(tag, self.buckets)
        while bucket != row // 8:
            self.passed[bucket] += change
            bucket = (bucket + (1 << (tag & 15))) % self.buckets

    def fill(
        self,
        tag: NDArray[np.uint64],
        check: NDArray[np.uint64],
        address: NDArray[np.uint64],
    ) -> None:
        """Many new rows at once into an empty table."""
        bucket = ((tag >> 32) * np.uint64(self.buckets) >> 32).astype(np.int64)
        used = (self.tag.reshape(-1, 8) != 0).sum(axis=1)
        pending = np.arange(len(tag))
        while len(pending):
            ordered = pending[np.argsort(bucket[pending], kind="stable")]
            of = bucket[ordered]
            starts = np.r_[True, of[1:] != of[:-1]]
            place = np.arange(len(of))
            place -= np.maximum.accumulate(np.where(starts, place, 0))
            fits = used[of] + place < 8
            now, row = ordered[fits], of[fits] * 8 + used[of[fits]] + place[fits]
            self.tag[row], self.check[row] = tag[now], check[now]
            self.place[row] = address[now]
            self.version[row] += 2
            np.add.at(used, of[fits], 1)
            pending = ordered[~fits]
            np.add.at(self.passed, bucket[pending], 1)
            steps = np.left_shift(1, (tag[pending] & np.uint64(15)).astype(np.int64))
            bucket[pending] = (bucket[pending] + steps) % self.buckets


class FakeTouchRing(FakeRegion):
    """The ring as its reader sees it."""

    def __init__(self, records: int = 64) -> None:
        super().__init__(PAGE + records * 64, client_writes=True)
        self.records = records
        self.buffer[:16] = struct.pack("<8sII", b"KVKTUCH1", LAYOUT_VERSION, records)

    @property
    def head(self) -> int:
        return int.from_bytes(self.buffer[64:72], "little")

    def record(self, number: int) -> bytes:
        start = PAGE + number % self.records * 64
        return self.buffer[start : start + 64]
