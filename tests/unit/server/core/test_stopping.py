"""The first signal lets work end, the second does not."""

import asyncio
import os
import signal

import pytest

from kvkeep_server.core.stopping import Stopping


async def for_ever(ended):
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_two_signals(number):
    async def run():
        stopping, ended = Stopping(), []
        stopping.listen()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stopping.wanted.wait(), 5)
        assert not stopping.hurried.is_set()
        last = asyncio.create_task(stopping.last(for_ever(ended), 60))
        await asyncio.sleep(0)
        os.kill(os.getpid(), number)
        await asyncio.wait_for(last, 5)
        assert ended == [True]
        # In a hurry nothing more is begun that would wait.
        await asyncio.wait_for(stopping.last(for_ever(ended), 60), 5)

    asyncio.run(run())


def test_work_ends_by_itself_by_its_time_or_by_its_error():
    async def run():
        stopping, ended = Stopping(), []
        await stopping.last(for_ever(ended), 0.01)
        assert ended == [True]
        await stopping.last(asyncio.sleep(0), 60)

        async def fails():
            raise AssertionError("broken")

        with pytest.raises(AssertionError, match="broken"):
            await stopping.last(fails(), 60)

    asyncio.run(run())


def test_who_waits_and_is_cancelled_takes_the_work_along():
    async def run():
        ended = []
        last = asyncio.create_task(Stopping().last(for_ever(ended), 60))
        await asyncio.sleep(0.01)
        last.cancel()
        with pytest.raises(asyncio.CancelledError):
            await last
        assert ended == [True]

    asyncio.run(run())
