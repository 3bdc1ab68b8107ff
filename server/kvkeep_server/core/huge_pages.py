"""Huge pages behind the work: memory is used from the start, and collapsed bit by bit meanwhile.

Nobody waits for it, since that takes 0.25 to 3 s a GiB, by how fragmented the host's memory is.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass

from kvkeep_server.core.memfd import Memfd

# A thread of the executor is taken for so long at a time: 8 to 100 ms.
_AT_ONCE_NBYTES = 32 * 1024 * 1024
# The kernel refuses a page that is being written to or that somebody reads in: later it does not.
_AGAIN_AFTER_S = 1.0
_TRIES = 5


@dataclass(slots=True)
class _File:
    """A file on its way.

    Attributes:
        memfd: The file.
        done: Called when all of it was collapsed.
        starts: Of the parts that were not.
        tries: Passes over them that are left.
    """

    memfd: Memfd
    done: Callable[[], None]
    starts: list[int]
    tries: int = _TRIES


class HugePages:
    """Event loop only. Best effort: a kernel that refuses leaves the memory as it is.

    Args:
        executor: Runs the kernel's work, one part at a time.
        wanted: Whether to make any at all.
        again_after_s: Until parts that the kernel refused are tried again.
    """

    def __init__(
        self, executor: Executor, *, wanted: bool, again_after_s: float = _AGAIN_AFTER_S
    ) -> None:
        """See the class."""
        self._wanted = wanted
        self._executor = executor
        self._again_after_s = again_after_s
        self._waiting: deque[_File] = deque()
        self._refused: deque[_File] = deque()
        self._working: asyncio.Task[None] | None = None
        self._holds = 0
        self._free = asyncio.Event()
        self._free.set()

    def make(self, memfd: Memfd, done: Callable[[], None] = lambda: None) -> None:
        """Queues a whole file; `done` is called when all of it was collapsed. Parts that the kernel
        refuses are tried again, a few times.

        A file that is closed meanwhile is left alone.
        """
        if not self._wanted:
            return
        starts = list(range(0, memfd.nbytes, _AT_ONCE_NBYTES))
        self._waiting.append(_File(memfd, done, starts))
        if self._working is None:
            self._working = asyncio.create_task(self._work())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps the kernel free inside: somebody waits for memory."""
        self._holds += 1
        self._free.clear()
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self._free.set()

    async def _work(self) -> None:
        try:
            while self._waiting or self._refused:
                if not self._waiting:
                    await asyncio.sleep(self._again_after_s)
                    self._waiting, self._refused = self._refused, self._waiting
                await self._pass_over(self._waiting.popleft())
        finally:
            self._working = None

    async def _pass_over(self, file: _File) -> None:
        file.starts = [start for start in file.starts if not await self._collapse(file, start)]
        file.tries -= 1
        if not file.starts:
            file.done()
        elif file.tries and not file.memfd.closed:
            self._refused.append(file)

    async def _collapse(self, file: _File, start: int) -> bool:
        loop = asyncio.get_running_loop()
        await self._free.wait()
        began_s = loop.time()
        part = (start, _AT_ONCE_NBYTES)
        made = await loop.run_in_executor(self._executor, file.memfd.collapse, *part)
        # Half of one core at most.
        await asyncio.sleep(loop.time() - began_s)
        return made

    def close(self) -> None:
        """Ends the work; what is collapsed already stays so."""
        self._waiting.clear()
        self._refused.clear()
        if self._working is not None:
            self._working.cancel()
