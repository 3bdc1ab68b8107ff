"""When to stop, and how fast: after the first signal work is ended, after the second it is left."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

# SIGHUP is what a terminal that closes sends. Settings are not read again: restart for that.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopping:
    """Event loop only.

    Attributes:
        wanted: Set by the first of SIGNALS.
        hurried: Set by the second.
    """

    def __init__(self) -> None:
        """See the class; `listen` does the work."""
        self.wanted = asyncio.Event()
        self.hurried = asyncio.Event()

    def listen(self) -> None:
        """From now on signals end nothing by themselves."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        (self.hurried if self.wanted.is_set() else self.wanted).set()

    async def last(self, work: Coroutine[Any, Any, None], limit_s: float) -> None:
        """Something to do before the end: it is cancelled after so many seconds, or in a hurry.

        Raises:
            Exception: What the work raised.
        """
        task, hurried = asyncio.create_task(work), asyncio.create_task(self.hurried.wait())
        try:
            await asyncio.wait(
                (task, hurried), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            hurried.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        if not task.cancelled():
            task.result()
