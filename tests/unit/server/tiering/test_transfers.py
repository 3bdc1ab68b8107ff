"""Copies from staging, and checksums of the copy."""

import asyncio
import random
import threading
from types import SimpleNamespace

import pytest
import xxhash

from kvkeep_server.core.results import GroupKind
from kvkeep_server.tiering import transfers as transfers_module
from kvkeep_server.tiering.keyspaces import Keyspace
from kvkeep_server.tiering.transfers import CopyIn, Transfers, copy_blocks
from tests.fakes.core_harness import keys_of

PAGE = 4096


def keyspace(nbytes):
    seed = Keyspace.seed(b"n" * 16, 0, nbytes)
    return Keyspace(0, b"n" * 16, 0, 0, GroupKind.FULL, 32, nbytes, seed, b"s" * 16, 1, 0)


def job(nbytes, count):
    source = memoryview(bytearray(random.Random(nbytes).randbytes(nbytes * count)))
    offsets = [nbytes * i for i in reversed(range(count))]
    targets = [memoryview(bytearray(nbytes)) for _ in range(count)]
    return CopyIn(keyspace(nbytes), keys_of(nbytes, count), source, offsets, targets)


def run(work):
    return asyncio.run(asyncio.wait_for(work, 20))


@pytest.fixture
def transfers():
    transfers = Transfers(threads=3)
    yield transfers
    transfers.close()


@pytest.mark.parametrize("inline_nbytes", [0, 1 << 22])
@pytest.mark.parametrize(
    ("nbytes", "count"),
    [(1, 3), (890, 7), (57 * 1024, 5), (256 * 1024, 3), (1_000_001, 2), (2 << 20, 11)],
)
def test_bytes_and_checksums_are_those_of_the_blocks(
    transfers, monkeypatch, nbytes, count, inline_nbytes
):
    """Odd sizes, both ways to copy, on the loop, in one thread and in several."""
    monkeypatch.setattr(transfers_module, "_INLINE_NBYTES", inline_nbytes)
    work = job(nbytes, count)
    checksums = run(transfers.copy_in(work))
    for i, target in enumerate(work.targets):
        wanted = work.source[work.offsets[i] : work.offsets[i] + nbytes]
        assert target == wanted
        assert checksums[i] == work.keyspace.checksum(work.keys[i], wanted)


@pytest.mark.parametrize("nbytes", [890, 300 * 1024, 2 << 20])
def test_the_checksum_is_that_of_the_copy(nbytes, monkeypatch):
    """B007: a client that writes while the copy runs changes what is stored, never whether the
    checksum fits."""
    work = job(nbytes, 1)
    before = bytes(work.source)

    def meddle():
        work.source[:] = b"\xff" * len(work.source)

    def intdigest(payload, seed):
        meddle()
        return xxhash.xxh3_64_intdigest(payload, seed)

    class Hasher:
        def __init__(self, seed):
            self._real = xxhash.xxh3_64(seed=seed)
            self.intdigest = self._real.intdigest

        def update(self, piece):
            meddle()
            self._real.update(piece)

    meddling = SimpleNamespace(xxh3_64_intdigest=intdigest, xxh3_64=Hasher)
    monkeypatch.setattr(transfers_module, "xxhash", meddling)
    (checksum,) = copy_blocks(work, 0, 1)
    assert work.source == b"\xff" * len(work.source)
    assert checksum == keyspace(nbytes).checksum(work.keys[0], work.targets[0])
    assert bytes(work.targets[0][:890]) == before[:890]


def test_a_failure_is_told_only_when_every_part_has_stopped(transfers, monkeypatch):
    """The slots are given back then: nobody may write into them any more."""
    monkeypatch.setattr(transfers_module, "_SPLIT_NBYTES", 1)
    monkeypatch.setattr(transfers_module, "_INLINE_NBYTES", 0)
    running, stopped = threading.Event(), []

    def copy(_, start, __):
        if start == 0:
            running.wait(5)
            raise OSError(5, "Input/output error")
        running.set()
        stopped.append(start)
        return [0]

    monkeypatch.setattr(transfers_module, "copy_blocks", copy)
    with pytest.raises(OSError, match="Input/output"):
        run(transfers.copy_in(job(PAGE, 3)))
    assert len(stopped) == 2


def test_at_most_so_many_copies_run_at_once(transfers, monkeypatch):
    now, most, lock = 0, 0, threading.Lock()
    gate = threading.Semaphore(0)

    def copy(*_):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        gate.acquire(timeout=5)
        with lock:
            now -= 1
        return [1]

    monkeypatch.setattr(transfers_module, "copy_blocks", copy)
    monkeypatch.setattr(transfers_module, "_INLINE_NBYTES", 0)

    async def work():
        copies = [asyncio.ensure_future(transfers.copy_in(job(PAGE, 1))) for _ in range(8)]
        for _ in range(8):
            await asyncio.sleep(0)
            gate.release()
        await asyncio.gather(*copies)

    run(work())
    assert 1 <= most <= 3
