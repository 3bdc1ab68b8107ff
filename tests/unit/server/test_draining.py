"""P16: what is left of the time for draining bounds what nvme gets of it."""

import asyncio
import time

import pytest

from kvkeep_server.core.clock import Deadline, SystemClock
from kvkeep_server.core.stopping import Stopping
from kvkeep_server.tiering.nvme_side import nvme_at_work


class Side:
    """An nvme side whose drain takes `drain_s`."""

    def __init__(self, drain_s):
        self.seen = []
        self.drain_s = drain_s

    async def start(self):
        self.seen.append("start")

    async def run(self):
        await asyncio.Event().wait()

    async def drain(self):
        self.seen.append("drain")
        await asyncio.sleep(self.drain_s)
        self.seen.append("drained")

    async def close(self):
        self.seen.append("close")


def stopped(side, left_s):
    async def serve():
        async with nvme_at_work(side, Stopping(), lambda: left_s):
            await asyncio.sleep(0)

    began_s = time.monotonic()
    asyncio.run(serve())
    return time.monotonic() - began_s


def test_a_drain_that_ends_in_time_is_waited_for():
    side = Side(0.05)
    stopped(side, 30.0)
    assert side.seen == ["start", "drain", "drained", "close"]


@pytest.mark.parametrize("left_s", [0.0, 0.2])
def test_a_drain_that_does_not_end_is_cut_off_and_the_directories_are_closed(left_s):
    side = Side(3600.0)
    assert left_s <= stopped(side, left_s) < left_s + 1.0
    assert side.seen[-1] == "close"
    assert "drained" not in side.seen


def test_a_deadline_is_endless_until_it_begins():
    deadline = Deadline(SystemClock())
    assert deadline.left_s() == float("inf")
    deadline.begin(60.0)
    assert 0 < deadline.left_s() <= 60.0
    deadline.begin(0.0)
    assert deadline.left_s() == 0.0
