"""Threads that read: results in order, errors, cancellations, several loops, the end."""

import asyncio
import os
import threading
from dataclasses import dataclass

import pytest

from kvkeep_server.tiers.nvme.crew import _TOGETHER_NBYTES, ReadingCrew


@dataclass
class Job:
    call: object
    nbytes: int = 1


def together(jobs):
    return [job.call() for job in jobs]


def jobs_of(*calls, nbytes=_TOGETHER_NBYTES):
    """Each large enough for a thread of its own, unless a test says otherwise."""
    return [Job(call, nbytes) for call in calls]


@pytest.fixture
def crew():
    crew = ReadingCrew(3, together)
    yield crew
    crew.close()


@pytest.mark.parametrize("nbytes", [1, _TOGETHER_NBYTES // 3, 2 * _TOGETHER_NBYTES])
def test_results_come_in_the_order_of_the_jobs(crew, nbytes):
    async def run():
        orders = [
            jobs_of(*(lambda i=i, j=j: (i, j) for j in range(i)), nbytes=nbytes) for i in range(40)
        ]
        return await asyncio.gather(*(crew.run(jobs) for jobs in orders))

    assert asyncio.run(run()) == [[(i, j) for j in range(i)] for i in range(40)]


def test_small_jobs_of_one_turn_go_to_one_thread_together():
    seen = []
    crew = ReadingCrew(3, lambda jobs: seen.append(len(jobs)) or together(jobs))

    async def run():
        some = [jobs_of(lambda: 1, nbytes=_TOGETHER_NBYTES // 8) for _ in range(12)]
        await asyncio.gather(*(crew.run(jobs) for jobs in some))

    asyncio.run(run())
    crew.close()
    assert sorted(seen) == [4, 8]


def test_what_the_work_raises_is_the_result_of_its_jobs_and_the_others_go_on(crew):
    def broken():
        raise ValueError("bad")

    first, error, last = asyncio.run(crew.run(jobs_of(lambda: 1, broken, lambda: 3)))
    assert (first, last) == (1, 3)
    assert isinstance(error, ValueError)


def test_as_many_jobs_run_at_once_as_there_are_threads(crew):
    meeting = threading.Barrier(3)
    jobs = jobs_of(*[lambda: meeting.wait(10) >= 0] * 3)
    assert asyncio.run(crew.run(jobs)) == [True] * 3


@pytest.mark.parametrize("times", [1, 3])
def test_a_cancelled_caller_waits_for_the_end_of_its_jobs(crew, times):
    begun, gate, ended = threading.Event(), threading.Event(), []

    def job():
        begun.set()
        gate.wait(10)
        ended.append(1)

    async def run():
        task = asyncio.create_task(crew.run(jobs_of(job, job)))
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


@pytest.mark.parametrize("count", [1, 3])
def test_a_thread_keeps_nothing_of_a_job_that_is_over(crew, count):
    room = bytearray(8)

    async def run():
        view = memoryview(room)
        await crew.run(jobs_of(*[lambda: bytes(view)] * count, nbytes=1))

    asyncio.run(run())
    room.append(0)  # raises BufferError while somebody still holds a view of it


def test_one_loop_follows_another(crew):
    for number in range(3):
        assert asyncio.run(crew.run(jobs_of(lambda n=number: n))) == [number]


def test_nothing_to_do_needs_no_thread():
    crew = ReadingCrew(2, together)
    assert asyncio.run(crew.run([])) == []
    assert not crew._threads
    crew.close()


def test_its_end_leaves_no_thread_and_no_descriptor():
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    crew = ReadingCrew(3, together)

    async def run():
        await crew.run(jobs_of(*[lambda: 1] * 9))
        crew.close()

    asyncio.run(run())
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_many_callers_never_miss_their_end(crew):
    """The bell is rung once for many ends: none may fall between two of its rings."""

    async def caller(number):
        for turn in range(200):
            jobs = jobs_of(lambda turn=turn: number + turn, nbytes=1 + turn % 2 * _TOGETHER_NBYTES)
            assert await crew.run(jobs) == [number + turn]

    async def run():
        async with asyncio.timeout(30):
            await asyncio.gather(*(caller(number) for number in range(16)))

    asyncio.run(run())
