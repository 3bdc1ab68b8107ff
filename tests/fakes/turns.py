"""How long the event loop computes without a pause."""

import asyncio
import resource

import pytest


class Turns:
    """Measures what the loop's thread computes without looking at anything else. What other
    processes take from it does not count, nor what the kernel does for it: the same 3,000 pages of
    new memory cost 4 ms or 40, as the host of a virtual machine has them at hand or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest_s = 0.0
        run = asyncio.events.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            began_s = _computed_s()
            run(handle)
            self.longest_s = max(self.longest_s, _computed_s() - began_s)

        monkeypatch.setattr(asyncio.events.Handle, "_run", timed)


def _computed_s() -> float:
    """Of this thread, in user mode."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_utime
