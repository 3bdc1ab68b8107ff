"""Huge pages behind the work: memory is used from the start, and collapsed bit by bit meanwhile.

Nobody waits for it, since that takes 0.25 to 3 s a GiB, by how fragmented the host's memory is.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from kvkeep_server.core.memfd import Memfd

# A thread of the executor is taken for so long at a time: 8 to 100 ms.
_AT_ONCE_NBYTES = 32 * 1024 * 1024


class HugePages:
    """Event loop only. Best effort: a kernel that refuses leaves the memory as it is.

    Args:
        executor: Runs the kernel's work, one part at a time.
        wanted: Whether to make any at all.
    """

    def __init__(self, executor: Executor, *, wanted: bool) -> None:
        """See the class."""
        self._wanted = wanted
        self._executor = executor
        self._waiting: deque[tuple[Memfd, Callable[[], None]]] = deque()
        self._working: asyncio.Task[None] | None = None
        self._holds = 0
        self._free = asyncio.Event()
        self._free.set()

    def make(self, memfd: Memfd, done: Callable[[], None] = lambda: None) -> None:
        """Queues a whole file; `done` is called when all of it was collapsed.

        A file that is closed meanwhile is left alone.
        """
        if not self._wanted:
            return
        self._waiting.append((memfd, done))
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
            while self._waiting:
                memfd, done = self._waiting.popleft()
                if await self._collapse(memfd):
                    done()
        finally:
            self._working = None

    async def _collapse(self, memfd: Memfd) -> bool:
        loop = asyncio.get_running_loop()
        for start in range(0, memfd.nbytes, _AT_ONCE_NBYTES):
            await self._free.wait()
            began_s = loop.time()
            part = (start, _AT_ONCE_NBYTES)
            if not await loop.run_in_executor(self._executor, memfd.collapse, *part):
                return False
            # Half of one core at most.
            await asyncio.sleep(loop.time() - began_s)
        return True

    def close(self) -> None:
        """Ends the work; what is collapsed already stays so."""
        self._waiting.clear()
        if self._working is not None:
            self._working.cancel()
