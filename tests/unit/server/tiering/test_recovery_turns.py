"""Recovery goes on behind the work: it gives the event loop back before anybody notices."""

import asyncio
import time

import pytest

from tests.fakes.core_harness import Harness
from tests.fakes.sealed_segments import write_segments

TURN_S = 0.05


class Turns:
    """Measures what the loop's thread computes without looking at anything else; what other
    processes take from it does not count."""

    def __init__(self, monkeypatch):
        self.longest_s = 0.0
        run = asyncio.events.Handle._run

        def timed(handle):
            began_s = time.thread_time()
            run(handle)
            self.longest_s = max(self.longest_s, time.thread_time() - began_s)

        monkeypatch.setattr(asyncio.events.Handle, "_run", timed)


@pytest.mark.parametrize(("records", "members"), [(200_000, 1), (200_000, 16)])
def test_no_turn_of_the_loop_is_long(tmp_path, monkeypatch, records, members):
    write_segments(tmp_path / "nvme", records, members=members)
    extra = f'[nvme]\ndirectories = ["{tmp_path}/nvme"]\nmax = "8GiB"\nfree_min = "0B"\n'
    turns = Turns(monkeypatch)
    harness = Harness(extra=extra)
    try:
        harness.run(harness.core.nvme.recovery.settled())
        assert harness.core.nvme.recovery.counts.blocks > 0.99 * records
        assert turns.longest_s < TURN_S
        harness.core.residency.check()
    finally:
        harness.close()
