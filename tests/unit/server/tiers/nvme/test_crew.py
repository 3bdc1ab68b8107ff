"""Threads that read: results in order, errors, cancellations, several loops, the end."""

import asyncio
import os
import threading

import pytest

from kvkeep_server.tiers.nvme.crew import ReadingCrew


@pytest.fixture
def crew():
    crew = ReadingCrew(3)
    yield crew
    crew.close()


def test_results_come_in_the_order_of_the_jobs(crew):
    async def run():
        orders = [[lambda i=i, j=j: (i, j) for j in range(i)] for i in range(40)]
        return await asyncio.gather(*(crew.run(jobs) for jobs in orders))

    assert asyncio.run(run()) == [[(i, j) for j in range(i)] for i in range(40)]


def test_what_a_job_raises_is_its_result_and_the_others_go_on(crew):
    def broken():
        raise FileNotFoundError("gone")

    first, error, last = asyncio.run(crew.run([lambda: 1, broken, lambda: 3]))
    assert (first, last) == (1, 3)
    assert isinstance(error, FileNotFoundError)


def test_as_many_jobs_run_at_once_as_there_are_threads(crew):
    together = threading.Barrier(3)
    assert asyncio.run(crew.run([lambda: together.wait(10) >= 0] * 3)) == [True] * 3


@pytest.mark.parametrize("times", [1, 3])
def test_a_cancelled_caller_waits_for_the_end_of_its_jobs(crew, times):
    begun, gate, ended = threading.Event(), threading.Event(), []

    def job():
        begun.set()
        gate.wait(10)
        ended.append(1)

    async def run():
        task = asyncio.create_task(crew.run([job, job]))
        await asyncio.to_thread(begun.wait, 10)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [1, 1]

    asyncio.run(run())


def test_a_thread_keeps_nothing_of_a_job_that_is_over(crew):
    room = bytearray(8)

    def filled(view):
        view[:] = b"abcdefgh"

    async def run():
        view = memoryview(room)
        await crew.run([lambda: filled(view)])

    asyncio.run(run())
    room.append(0)  # raises BufferError while somebody still holds a view of it


def test_one_loop_follows_another(crew):
    for number in range(3):
        assert asyncio.run(crew.run([lambda n=number: n])) == [number]


def test_nothing_to_do_needs_no_thread():
    crew = ReadingCrew(2)
    assert asyncio.run(crew.run([])) == []
    assert not crew._threads
    crew.close()


def test_its_end_leaves_no_thread_and_no_descriptor():
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    crew = ReadingCrew(3)

    async def run():
        await crew.run([lambda: 1] * 9)
        crew.close()

    asyncio.run(run())
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_many_callers_never_miss_their_end(crew):
    """The bell is rung once for many ends: none may fall between two of its rings."""

    async def caller(number):
        for turn in range(200):
            assert await crew.run([lambda turn=turn: number + turn]) == [number + turn]

    async def run():
        async with asyncio.timeout(30):
            await asyncio.gather(*(caller(number) for number in range(16)))

    asyncio.run(run())
