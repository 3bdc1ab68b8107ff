"""Sessions of clients on other hosts: how they begin, their limits, and what a half one leaves."""

import asyncio
import gc
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvkeep_server.core.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SessionUnknownError,
)
from kvkeep_server.core.huge_pages import HugePages
from kvkeep_server.service import session_memory
from kvkeep_server.service.session_memory import SessionMemory
from kvkeep_server.service.sessions import SessionLimits, Sessions
from tests.fakes.core_harness import FakeClock, close_offers, hello

PAGE = 4096
LIMITS = SessionLimits(
    timeout_s=30.0,
    staging_nbytes=8 * PAGE,
    staging_max_nbytes=64 * PAGE,
    staging_total_max_nbytes=100 * PAGE,
    sessions_max=4,
    remote_max=2,
    remote_staging_max_nbytes=20 * PAGE,
)


@pytest.fixture
def sessions():
    with ThreadPoolExecutor(1) as executor:
        memory = SessionMemory(
            touch_records=64,
            offers=list,
            huge_pages=HugePages(executor, wanted=False),
            executor=executor,
        )
        sessions = Sessions(
            limits=LIMITS,
            clock=FakeClock(),
            source=random.Random(1),
            server_epoch=9,
            memory=memory,
            on_end=lambda _: None,
        )
        yield sessions
        for session in sessions:
            sessions.end(session.session_id, "test is over")


def open_fds():
    return set(os.listdir("/proc/self/fd"))


def test_each_end_is_told_once_with_its_reason(sessions, caplog):
    caplog.set_level("INFO", "kvkeep_server")
    welcome = close_offers(asyncio.run(sessions.open(hello(PAGE))))
    far = asyncio.run(sessions.open_remote(hello(PAGE))).session_id
    for session, reason in ((far, "silent"), (welcome.session_id, "closed"), (far, "closed")):
        sessions.end(session, reason)
    ended = [one for one in caplog.records if one.message == "session ended"]
    assert [(one.session, one.remote, one.reason) for one in ended] == [
        (far, True, "silent"),
        (welcome.session_id, False, "closed"),
    ]


def test_heartbeats_from_another_host_are_answered(sessions):
    async def run():
        session = await sessions.open_remote(hello(PAGE))
        events = sessions.listen(session)
        await anext(events)
        for number in (2, 3):
            sessions.hear(session, number)
            told = await anext(events)
            assert (told.name, told.values) == ("heard", {"heartbeat": number})
        sessions.end(session.session_id, "closed")
        sessions.hear(session, 4)
        assert [told async for told in events] == []

    asyncio.run(run())


def test_a_remote_session_is_told_its_token_and_its_staging(sessions):
    async def run():
        session = await sessions.open_remote(hello(3 * PAGE))
        assert (session.remote, session.ring, session.staging.nbytes) == (True, None, 3 * PAGE)
        assert sessions.get(session.token) is session
        told = await anext(sessions.listen(session))
        assert told.name == "attached"
        assert told.values["session_token"] == session.token
        assert told.values["staging_nbytes"] == 3 * PAGE
        return session

    session = asyncio.run(run())
    assert (sessions.remote, sessions.staging_nbytes) == (1, 3 * PAGE)
    sessions.end(session.session_id, "client closed")
    assert (sessions.remote, sessions.staging_nbytes, len(sessions)) == (0, 0, 0)
    with pytest.raises(SessionUnknownError):
        sessions.get(session.token)


def test_remote_sessions_have_limits_of_their_own(sessions):
    async def run():
        first = await sessions.open_remote(hello(15 * PAGE))
        with pytest.raises(ResourceExhaustedError, match=r"remote\.staging_total_max"):
            await sessions.open_remote(hello(6 * PAGE))
        await sessions.open_remote(hello(5 * PAGE))
        with pytest.raises(ResourceExhaustedError, match=r"remote\.sessions_max = 2"):
            await sessions.open_remote(hello(PAGE))
        # Those on this host have more.
        close_offers(await sessions.open(hello(50 * PAGE)))
        # Its room is back when the copies that run from it are done.
        sessions.begin_copy(first)
        sessions.end(first.session_id, "client closed")
        with pytest.raises(ResourceExhaustedError):
            await sessions.open_remote(hello(PAGE))
        sessions.end_copy(first)
        assert sessions.remote == 1
        await sessions.open_remote(hello(PAGE))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"layout_versions": (1,)}, FailedPreconditionError),
        ({"client_name": "x" * 257}, InvalidArgumentError),
        ({"staging_nbytes": 65 * PAGE}, InvalidArgumentError),
    ],
)
def test_a_remote_hello_that_is_refused_takes_nothing(sessions, changes, error):
    with pytest.raises(error):
        asyncio.run(sessions.open_remote(hello(**{"staging_nbytes": PAGE, **changes})))
    assert (sessions.remote, sessions.staging_nbytes, sessions.opened_total) == (0, 0, 0)


def test_a_remote_session_without_memory_is_none(sessions, monkeypatch):
    def make(*_, **__):
        raise OSError(24, "too many")

    monkeypatch.setattr(session_memory, "create_sealed", make)
    with pytest.raises(ResourceExhaustedError, match="too many"):
        asyncio.run(sessions.open_remote(hello(PAGE)))
    assert (sessions.remote, sessions.staging_nbytes) == (0, 0)


@pytest.mark.parametrize("kind", ["open", "open_remote"])
@pytest.mark.parametrize("cancels", [1, 3])
def test_who_leaves_while_its_memory_is_made_leaves_nothing(sessions, monkeypatch, kind, cancels):
    """Memory that is being made counts until it is gone, or who only says hello gets any amount."""
    made, may_go_on = threading.Event(), threading.Event()
    create = session_memory.create_sealed

    def make(*arguments, **options):
        memory = create(*arguments, **options)
        made.set()
        may_go_on.wait(20.0)
        return memory

    monkeypatch.setattr(session_memory, "create_sealed", make)
    before = open_fds()

    async def run():
        task = asyncio.create_task(getattr(sessions, kind)(hello(4 * PAGE)))
        await asyncio.to_thread(made.wait, 20.0)
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert sessions.staging_nbytes == 4 * PAGE
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    gc.collect()
    assert open_fds() == before
    assert (sessions.remote, sessions.staging_nbytes, len(sessions)) == (0, 0, 0)


def test_memory_goes_back_without_threads_too(sessions):
    before = open_fds()
    session = asyncio.run(sessions.open_remote(hello(PAGE)))
    sessions._memory._executor.shutdown()
    sessions.end(session.session_id, "daemon stops")
    assert open_fds() == before
