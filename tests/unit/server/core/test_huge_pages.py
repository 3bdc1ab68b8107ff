"""Huge pages behind the work: all of a file, in parts, never while somebody waits for memory."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvkeep_server.core.huge_pages import HugePages
from kvkeep_server.core.memfd import create_sealed

MIB = 1 << 20


class File:
    """Stands for a memfd; notes what is collapsed."""

    def __init__(self, nbytes, works=lambda start: True):
        self.nbytes = nbytes
        self.parts = []
        self.closed = False
        self._works = works

    def collapse(self, start, nbytes):
        self.parts.append((start, nbytes))
        return self._works(start)


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def until(condition):
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


def test_files_one_after_the_other_in_parts(executor):
    files, done = [File(70 * MIB), File(2 * MIB)], []

    async def go():
        pages = HugePages(executor, wanted=True)
        for number, file in enumerate(files):
            pages.make(file, lambda number=number: done.append(number))
        await until(lambda: len(done) == 2)

    asyncio.run(go())
    assert done == [0, 1]
    assert files[0].parts == [(0, 32 * MIB), (32 * MIB, 32 * MIB), (64 * MIB, 32 * MIB)]
    assert files[1].parts == [(0, 32 * MIB)]


def test_what_the_kernel_refuses_is_tried_again_behind_the_others(executor):
    busy = {32 * MIB: 2}  # start -> refusals

    def works(start):
        busy[start] = busy.get(start, 0) - 1
        return busy[start] < 0

    refused, after, done = File(96 * MIB, works), File(MIB), []

    async def go():
        pages = HugePages(executor, wanted=True, again_after_s=0.01)
        pages.make(refused, lambda: done.append("refused"))
        pages.make(after, lambda: done.append("after"))
        await until(lambda: len(done) == 2)

    asyncio.run(go())
    assert done == ["after", "refused"]
    starts = [start // MIB for start, _ in refused.parts]
    assert starts == [0, 32, 64, 32, 32]


@pytest.mark.parametrize("closed", [False, True])
def test_what_the_kernel_refuses_for_good_is_not_counted(executor, closed):
    refused, done = File(64 * MIB, lambda start: start < 32 * MIB), []
    refused.closed = closed

    async def go():
        pages = HugePages(executor, wanted=True, again_after_s=0.001)
        pages.make(refused, lambda: done.append("refused"))
        await until(lambda: len(refused.parts) == (2 if closed else 6))
        await asyncio.sleep(0.05)

    asyncio.run(go())
    assert not done
    assert len(refused.parts) == (2 if closed else 6)


def test_nothing_while_somebody_waits_for_memory(executor):
    file = File(64 * MIB)

    async def go():
        pages = HugePages(executor, wanted=True)
        with pages.held(), pages.held():
            pages.make(file)
            await asyncio.sleep(0.02)
            assert file.parts == []
        await until(lambda: len(file.parts) == 2)
        pages.close()

    asyncio.run(go())


def test_nothing_when_it_is_not_wanted(executor):
    file = File(64 * MIB)

    async def go():
        HugePages(executor, wanted=False).make(file)
        await asyncio.sleep(0.02)

    asyncio.run(go())
    assert file.parts == []


def test_closing_ends_it(executor):
    file = File(1 << 40)

    async def go():
        pages = HugePages(executor, wanted=True)
        pages.make(file)
        await until(lambda: file.parts)
        pages.close()
        await asyncio.sleep(0.01)
        count = len(file.parts)
        await asyncio.sleep(0.05)
        assert len(file.parts) == count

    asyncio.run(go())


def test_a_real_file_keeps_its_bytes_and_a_closed_one_is_left_alone():
    memfd = create_sealed("test", 5 * MIB, future_write_seal=False, touch=True)
    memfd.buffer[:] = bytes(range(256)) * (5 * MIB // 256)
    memfd.collapse(0, 1 << 40)  # whether it works is the kernel's affair
    assert memfd.buffer == bytes(range(256)) * (5 * MIB // 256)
    assert not memfd.collapse(5 * MIB, MIB)
    memfd.close()
    assert not memfd.collapse(0, MIB)
