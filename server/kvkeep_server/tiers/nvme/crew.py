"""Threads that read: they take jobs from one queue, and tell the event loop of many ends at once.

An executor costs 60 to 150 us a job: a future with a lock on each side, and a wake-up of the loop
for every end. The reading of one block takes less than that.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Order(Generic[T]):
    """What one caller waits for.

    Attributes:
        ended: Done when all jobs are over; another one after a cancellation.
        left: Jobs that are not over.
        results: Of each job.
    """

    ended: asyncio.Future[None]
    left: int
    results: list[T | Exception]


class ReadingCrew(Generic[T]):
    """For one event loop at a time; `close` ends the threads.

    Args:
        threads: How many. They begin with the first jobs.
    """

    def __init__(self, threads: int) -> None:
        """See the class."""
        self._count = threads
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[tuple[_Order[T], int, Callable[[], T]] | None] = SimpleQueue()
        # Appended to by threads, emptied by the loop. A thread that finds that the bell was rung
        # leaves it at that: the loop takes the word back before it looks.
        self._over: deque[_Order[T]] = deque()
        self._rung = False
        # `call_soon_threadsafe` takes a lock, two calls of the system more, and 8 us.
        self._bell = -1
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, jobs: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """Runs jobs in the threads; the result of each, or what it raised.

        Returns, also when it is cancelled, when all are over: they touch buffers.
        """
        if not jobs:
            return []
        if len(self._threads) < self._count:
            self._begin(len(jobs))
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._listen(loop)
        unknown: list[T | Exception] = [RuntimeError("a job that never ran")] * len(jobs)
        order = _Order(loop.create_future(), len(jobs), unknown)
        for place, job in enumerate(jobs):
            self._queue.put((order, place, job))
        try:
            await order.ended
        except asyncio.CancelledError:
            await self._outlast(order)
            raise
        return order.results

    @staticmethod
    async def _outlast(order: _Order[T]) -> None:
        """Waits for the end of jobs whose caller is cancelled, however often."""
        while order.left:
            order.ended = asyncio.get_running_loop().create_future()
            try:
                await order.ended
            except asyncio.CancelledError:
                continue

    def close(self) -> None:
        """Ends the threads when they have nothing to do. Nobody may call `run` any more."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._bell >= 0:
            self._leave()
            os.close(self._bell)
            self._bell = -1

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._bell < 0:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._leave()
        self._loop = loop
        loop.add_reader(self._bell, self._hear)

    def _leave(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._bell)

    def _begin(self, jobs: int) -> None:
        """One more thread a job, until there are all."""
        for _ in range(min(jobs, self._count - len(self._threads))):
            number = len(self._threads)
            thread = threading.Thread(target=self._work, name=f"kvkeep-read-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        take = self._queue.get
        while True:
            job = take()
            if job is None:
                return
            order, place, work = job
            try:
                order.results[place] = work()
            except Exception as error:  # noqa: BLE001 - goes to who waits for it
                order.results[place] = error
            # Not kept until the next job: it holds views of the caller's buffers.
            del job, work
            self._over.append(order)
            del order
            if not self._rung:
                self._rung = True
                os.eventfd_write(self._bell, 1)

    def _hear(self) -> None:
        os.eventfd_read(self._bell)
        self._rung = False
        over = self._over
        while over:
            order = over.popleft()
            order.left -= 1
            if not order.left and not order.ended.done():
                order.ended.set_result(None)
