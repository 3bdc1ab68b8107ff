"""Threads that read: they take jobs from one queue, and tell the event loop of many ends at once.

An executor costs 60 to 150 us a job: a future with a lock on each side, and a wake-up of the loop
for every end. The reading of one block takes less than that.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """A job."""

    @property
    def nbytes(self) -> int:
        """That it reads."""
        ...


J = TypeVar("J", bound=Sized)
T = TypeVar("T")
# Small jobs that come together go to one thread together, up to this: it waits for all of them at
# once. With more it would verify them while the device has nothing to do.
_TOGETHER_NBYTES = 512 << 10
_NEVER_RAN = RuntimeError("a job that never ran")


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


# Jobs of one thread: of whom, which of theirs, and what.
_Batch = list[tuple[_Order[T], int, J]]


class ReadingCrew(Generic[J, T]):
    """For one event loop at a time; `close` ends the threads.

    Args:
        threads: How many. They begin with the first jobs.
        work: Does jobs in a thread; a result each.
    """

    def __init__(self, threads: int, work: Callable[[Sequence[J]], Sequence[T]]) -> None:
        """See the class."""
        self._count = threads
        self._work = work
        self._threads: list[threading.Thread] = []
        # What came in this turn of the loop.
        self._waiting: _Batch[T, J] = []
        self._queue: SimpleQueue[_Batch[T, J] | None] = SimpleQueue()
        # Appended to by threads, emptied by the loop. A thread that finds that the bell was rung
        # leaves it at that: the loop takes the word back before it looks.
        self._over: deque[_Order[T]] = deque()
        self._rung = False
        # `call_soon_threadsafe` takes a lock, two calls of the system more, and 8 us.
        self._bell = -1
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, jobs: Sequence[J]) -> list[T | Exception]:
        """Runs jobs in the threads; the result of each, or what the work raised.

        Returns, also when it is cancelled, when all are over: they touch buffers.
        """
        if not jobs:
            return []
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._listen(loop)
        order: _Order[T] = _Order(loop.create_future(), len(jobs), [_NEVER_RAN] * len(jobs))
        if not self._waiting:
            loop.call_soon(self._hand_out)
        self._waiting += [(order, place, job) for place, job in enumerate(jobs)]
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

    def _hand_out(self) -> None:
        """To as few threads as do it well."""
        waiting, self._waiting = self._waiting, []
        for batch in _batches(waiting):
            if len(self._threads) < self._count:
                self._begin()
            self._queue.put(batch)

    def _begin(self) -> None:
        name = f"kvkeep-read-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while True:
            batch = self._queue.get()
            if batch is None:
                return
            results: Sequence[T | Exception]
            try:
                results = self._work([job for _, _, job in batch])
            except Exception as error:  # noqa: BLE001 - goes to who waits for it
                results = [error] * len(batch)
            orders = _noted(batch, results)
            # First: it holds views of the callers' buffers, who may do with them what they like
            # when they hear.
            del batch, results
            self._over.extend(orders)
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


def _noted(batch: _Batch[T, J], results: Sequence[T | Exception]) -> list[_Order[T]]:
    """Writes the results where they are looked for; whose they are, once a job."""
    orders = []
    for (order, place, _), result in zip(batch, results, strict=True):
        order.results[place] = result
        orders.append(order)
    return orders


def _batches(waiting: _Batch[T, J]) -> Iterator[_Batch[T, J]]:
    batch: _Batch[T, J] = []
    nbytes = 0
    for entry in waiting:
        more = entry[2].nbytes
        if batch and nbytes + more > _TOGETHER_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(entry)
        nbytes += more
    yield batch
