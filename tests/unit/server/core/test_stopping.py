"""The first signal lets work end, the second does not."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from kvkeep_server.cli.serve import serve
from kvkeep_server.config import KEYS
from kvkeep_server.core.stopping import SIGNALS, Stopping

README = Path(__file__).parents[4] / "README.md"


async def for_ever(ended):
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(True)


def test_what_ends_the_daemon_is_said_where_one_looks():
    assert set(SIGNALS) == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    for number in SIGNALS:
        assert number.name in serve.help
        assert number.name in KEYS["server.drain_timeout"].meaning
        assert number.name in README.read_text()


@pytest.mark.parametrize("number", SIGNALS)
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
