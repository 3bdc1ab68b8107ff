"""How long the event loop computes without a pause."""

import asyncio
import time

import pytest


class Turns:
    """Measures what the loop's thread computes without looking at anything else; what other
    processes take from it does not count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest_s = 0.0
        run = asyncio.events.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            began_s = time.thread_time()
            run(handle)
            self.longest_s = max(self.longest_s, time.thread_time() - began_s)

        monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
