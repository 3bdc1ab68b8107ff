"""Whose turn it is among the streams of clients on other hosts."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.service.streams import StreamLimits, Streams
from tests.fakes.core_harness import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def streams(clock):
    return Streams(limits=StreamLimits(8, 4, 1.0), clock=clock)


def client(number):
    return SimpleNamespace(session_id=number)


def enter(streams, held, number, wanted):
    """How many streams a session gets of so many that it wants."""
    got = 0
    with contextlib.suppress(ResourceExhaustedError):
        while got < wanted:
            held.enter_context(streams.entered(client(number)))
            got += 1
    return got


def test_a_session_has_a_limit_and_all_have_one(streams):
    with contextlib.ExitStack() as held:
        assert [enter(streams, held, number, 9) for number in range(3)] == [4, 2, 1]
        assert enter(streams, held, 3, 1) == 1
        assert (streams.running, streams.counts.refused) == (8, 3)
        with pytest.raises(ResourceExhaustedError) as full, streams.entered(client(9)):
            pass
        assert full.value.retry_after_s > 0
    assert streams.running == 0


def test_who_was_refused_comes_before_who_has_many(streams):
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    others = contextlib.ExitStack()
    with first, second, others:
        assert enter(streams, first, 1, 9) == 4
        assert [enter(streams, second, number, 1) for number in (2, 3, 4, 5)] == [1] * 4
        assert enter(streams, others, 6, 1) == 0
        first.close()
        # Eight streams among six that want them: one each.
        assert enter(streams, first, 1, 9) == 1
        assert enter(streams, others, 6, 9) == 1


def test_who_does_not_come_again_is_not_waited_for(streams, clock):
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        assert enter(streams, first, 1, 9) == 4
        assert [enter(streams, second, number, 1) for number in (2, 3, 4, 5)] == [1] * 4
        assert enter(streams, second, 6, 1) == 0
        first.close()
        second.close()
        clock.advance(2.0)
        assert enter(streams, first, 1, 9) == 4


def test_everybody_gets_one_however_many_there_are(streams):
    with contextlib.ExitStack() as held:
        assert [enter(streams, held, number, 1) for number in range(9)] == [1] * 8 + [0]


def test_an_error_gives_the_place_back(streams):
    with pytest.raises(ZeroDivisionError), streams.entered(client(1)):
        raise ZeroDivisionError
    assert streams.running == 0


def test_who_has_one_leaves_the_last_quarter_to_who_has_none(streams):
    """However many clients take all that they get, the next one finds a place."""
    with contextlib.ExitStack() as held:
        assert sum(enter(streams, held, number, 9) for number in (1, 2)) == 6
        assert [enter(streams, held, number, 9) for number in (3, 4, 5)] == [1, 1, 0]


def test_what_is_held_for_who_takes_nothing_is_no_turn(streams):
    with contextlib.ExitStack() as held:
        places = [held.enter_context(streams.entered(client(number))) for number in range(8)]
        for place in places:
            place.give_up()
        assert (streams.running, streams.held) == (0, 8)
        others = [held.enter_context(streams.entered(client(number))) for number in range(8, 16)]
        # Bounded: as many as there may be streams.
        others[0].give_up()
        assert (streams.running, streams.held) == (8, 8)
        with pytest.raises(ResourceExhaustedError), streams.entered(client(99)):
            pass
    assert (streams.running, streams.held) == (0, 0)


async def stalled(streams, clock, number, ends):
    """A stream whose client does nothing from now on."""
    with streams.entered(client(number)) as place:
        try:
            async with place.patient():
                await asyncio.sleep(10.0)
        except TimeoutError:
            ends.append(number)


def test_who_waits_ends_who_does_nothing(clock):
    """The one that did nothing for the longest time, and only after a few seconds."""

    async def run():
        streams = Streams(limits=StreamLimits(2, 2, 20.0), clock=clock)
        ends, tasks = [], []
        for number in (1, 2):
            tasks.append(asyncio.create_task(stalled(streams, clock, number, ends)))
            await asyncio.sleep(0)
            clock.advance(1.0)
        for wait_s, so_far in ((0.5, []), (1.0, [1]), (0.0, [1]), (1.0, [1, 2])):
            clock.advance(wait_s)
            await ask(streams)
            assert ends == so_far
        for task in tasks:
            await task

    async def ask(streams):
        held = contextlib.ExitStack()
        with contextlib.suppress(ResourceExhaustedError), held:
            for number in (3, 4, 5):
                held.enter_context(streams.entered(client(number)))
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(run())


def test_nobody_is_hurried_while_there_is_room_or_who_goes_on(clock):
    async def run():
        streams = Streams(limits=StreamLimits(4, 2, 20.0), clock=clock)
        ends = []
        task = asyncio.create_task(stalled(streams, clock, 1, ends))
        await asyncio.sleep(0)
        clock.advance(15.0)
        with contextlib.ExitStack() as held:
            # Its own limit is no reason to end others.
            assert enter(streams, held, 2, 9) == 2
            place = held.enter_context(streams.entered(client(3)))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            held.enter_context(streams.entered(client(4)))
            async with place.patient():
                clock.advance(1.0)
            clock.advance(30.0)
            with pytest.raises(ResourceExhaustedError), streams.entered(client(5)):
                pass
            await asyncio.sleep(0)
        assert ends == []

    asyncio.run(run())
