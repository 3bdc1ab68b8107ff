"""Whose turn it is among the streams of clients on other hosts."""

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
        assert [enter(streams, held, number, 9) for number in range(3)] == [4, 4, 0]
        assert (streams.running, streams.counts.refused) == (8, 3)
        with pytest.raises(ResourceExhaustedError) as full, streams.entered(client(9)):
            pass
        assert full.value.retry_after_s > 0
    assert streams.running == 0


def test_who_was_refused_comes_before_who_has_many(streams):
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    others = contextlib.ExitStack()
    with first, second, others:
        assert enter(streams, first, 1, 9) == enter(streams, second, 2, 9) == 4
        assert enter(streams, others, 3, 1) == 0
        first.close()
        # Eight streams among three that want them: two each.
        assert enter(streams, first, 1, 9) == 2
        assert enter(streams, others, 3, 9) == 2


def test_who_does_not_come_again_is_not_waited_for(streams, clock):
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        assert enter(streams, first, 1, 9) == enter(streams, second, 2, 4) == 4
        assert enter(streams, second, 3, 1) == 0
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
