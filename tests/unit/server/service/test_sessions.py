"""Who is attached: limits, tokens, silence, events, and memory that comes back."""

import asyncio
import gc
import os
import random
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
from kvkeep_server.service import sessions as sessions_module
from kvkeep_server.service.session_memory import FdKind, FdOffer, SessionMemory
from kvkeep_server.service.sessions import SessionLimits, Sessions
from tests.fakes.core_harness import FakeClock, close_offers, hello
from tests.fakes.waiting import wait_until

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


class Sender:
    """The fd socket's sending side, which takes everything."""

    def __init__(self):
        self.sent = []
        self.hung_up = []

    def send(self, session_id, sequence, fds):
        self.sent.append((session_id, sequence, [offer.kind for offer in fds]))
        for offer in fds:
            os.close(offer.fd)

    def hang_up(self, session_id):
        self.hung_up.append(session_id)


class Table:
    """Offers one descriptor; may be told to fail."""

    def __init__(self):
        self.error = None

    def offers(self):
        if self.error is not None:
            raise self.error
        return [FdOffer(FdKind.INDEX, 1, PAGE, os.open("/dev/null", os.O_RDONLY))]


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def table():
    return Table()


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def ended():
    return []


@pytest.fixture
def sessions(clock, table, ended, executor):
    sessions = Sessions(
        limits=LIMITS,
        clock=clock,
        source=random.Random(1),
        server_epoch=9,
        memory=SessionMemory(
            touch_records=64,
            offers=table.offers,
            huge_pages=HugePages(executor, wanted=True),
            executor=executor,
        ),
        on_end=ended.append,
    )
    yield sessions
    for session in sessions:
        sessions.end(session.session_id, "test is over")


async def attached_to(sessions, staging_nbytes=0, **changes):
    welcome = close_offers(await sessions.open(hello(staging_nbytes, **changes)))
    return sessions.get(welcome.token)


def attach(sessions, staging_nbytes=0, **changes):
    return asyncio.run(attached_to(sessions, staging_nbytes, **changes))


def open_fds():
    return set(os.listdir("/proc/self/fd"))


def shmem_nbytes():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssShmem"))
    return int(line.split()[1]) * 1024


# ---- opening


def test_a_welcome_brings_staging_ring_and_what_is_offered(sessions):
    welcome = asyncio.run(sessions.open(hello(3 * PAGE)))
    assert [offer.kind for offer in welcome.fds] == [
        FdKind.STAGING,
        FdKind.TOUCH_RING,
        FdKind.INDEX,
    ]
    for offer in welcome.fds[:2]:
        assert os.fstat(offer.fd).st_size == offer.nbytes
    assert welcome.server_epoch == 9
    assert sessions.get(welcome.token).session_id == welcome.session_id
    close_offers(welcome)


def test_tokens_are_long_and_differ_and_ids_count_up(sessions):
    opened = [attach(sessions) for _ in range(3)]
    assert len({session.token for session in opened}) == 3
    assert {len(session.token) for session in opened} == {32}
    assert [session.session_id for session in opened] == [1, 2, 3]


@pytest.mark.parametrize("token", [b"", b"\0" * 32, b"x" * 31, b"x" * 10_000])
def test_an_unknown_token_is_refused(sessions, token):
    attach(sessions)
    with pytest.raises(SessionUnknownError, match="attach again"):
        sessions.get(token)


def test_the_token_of_an_ended_session_is_unknown(sessions):
    session = attach(sessions)
    sessions.end(session.session_id, "test")
    with pytest.raises(SessionUnknownError):
        sessions.get(session.token)


def test_staging_defaults_and_is_rounded_up_to_pages(sessions):
    assert attach(sessions).staging.nbytes == LIMITS.staging_nbytes
    assert attach(sessions, PAGE + 1).staging.nbytes == 2 * PAGE
    assert sessions.staging_nbytes == 10 * PAGE


@pytest.mark.parametrize("versions", [(), (0,), (1, 3)])
def test_a_client_of_another_layout_is_refused(sessions, versions):
    with pytest.raises(FailedPreconditionError, match="same release"):
        asyncio.run(sessions.open(hello(layout_versions=versions)))
    close_offers(asyncio.run(sessions.open(hello(PAGE, layout_versions=(7, 2)))))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"client_name": "n" * 257}, "client_name"),
        ({"client_name": "\u00e9" * 129}, "client_name"),
        ({"staging_nbytes": 64 * PAGE + 1}, "staging_nbytes"),
        ({"staging_nbytes": (1 << 64) - 1}, "staging_nbytes"),
    ],
)
def test_a_wrong_hello_is_refused_by_field_and_leaves_nothing(sessions, changes, field):
    before = open_fds()
    with pytest.raises(InvalidArgumentError) as refusal:
        asyncio.run(sessions.open(hello(**changes)))
    assert refusal.value.field == field
    assert open_fds() == before
    assert len(sessions) == 0


def test_sessions_are_limited_in_number(sessions):
    opened = [attach(sessions, PAGE) for _ in range(LIMITS.sessions_max)]
    with pytest.raises(ResourceExhaustedError, match=r"sessions\.sessions_max = 4") as refusal:
        asyncio.run(sessions.open(hello(PAGE)))
    assert refusal.value.retry_after_s > 0
    sessions.end(opened[0].session_id, "test")
    attach(sessions, PAGE)


def test_staging_of_all_sessions_is_limited(sessions):
    first = attach(sessions, 60 * PAGE)
    with pytest.raises(ResourceExhaustedError, match=r"sessions\.staging_total_max"):
        asyncio.run(sessions.open(hello(41 * PAGE)))
    attach(sessions, 40 * PAGE)
    sessions.end(first.session_id, "test")
    attach(sessions, 60 * PAGE)


@pytest.mark.parametrize("failing", ["staging", "ring", "staging fd", "ring fd", "offers"])
def test_a_hello_that_fails_half_way_leaves_nothing(sessions, table, monkeypatch, failing):
    """P14: no descriptor, no memory, no session that nobody has."""
    if failing == "offers":
        table.error = OSError(24, "Too many open files")
    elif failing == "ring":
        monkeypatch.setattr(session_memory, "TouchRing", _raise)
    elif failing == "staging":
        monkeypatch.setattr(session_memory, "create_sealed", _raise)
    else:
        calls = 1 if failing == "staging fd" else 2
        real = session_memory.Memfd.client_fd

        def client_fd(memfd):
            nonlocal calls
            calls -= 1
            return _raise() if calls == 0 else real(memfd)

        monkeypatch.setattr(session_memory.Memfd, "client_fd", client_fd)
    before = open_fds()
    with pytest.raises(ResourceExhaustedError, match="Too many open files") as refusal:
        asyncio.run(sessions.open(hello(PAGE)))
    assert refusal.value.retry_after_s > 0
    monkeypatch.undo()
    assert open_fds() == before
    assert len(sessions) == 0
    assert sessions.staging_nbytes == 0


def _raise(*_, **__):
    raise OSError(24, "Too many open files")


# ---- ending


def test_an_end_comes_once_and_gives_everything_back(sessions, ended):
    before, memory = open_fds(), shmem_nbytes()
    session = attach(sessions, 64 * PAGE)
    session.staging.buffer[:] = b"x" * (64 * PAGE)
    assert shmem_nbytes() >= memory + 64 * PAGE
    sessions.end(session.session_id, "eof")
    sessions.end(session.session_id, "silent as well")
    sessions.end(12345, "never was")
    assert ended == [session]
    assert sessions.ended_total == 1
    assert len(sessions) == 0
    assert sessions.staging_nbytes == 0
    wait_until(lambda: open_fds() == before, 5, "staging is given back by a thread")
    gc.collect()
    assert shmem_nbytes() < memory + 32 * PAGE


def test_staging_stays_until_the_copies_from_it_are_over(sessions):
    session = attach(sessions, 4 * PAGE)
    sessions.begin_copy(session)
    sessions.begin_copy(session)
    sessions.end(session.session_id, "killed")
    assert sessions.staging_nbytes == 4 * PAGE
    session.staging.buffer[:3] = b"yes"
    sessions.end_copy(session)
    assert sessions.staging_nbytes == 4 * PAGE
    sessions.end_copy(session)
    assert sessions.staging_nbytes == 0
    wait_until(lambda: session.staging.fd == -1, 10.0, "a thread gives the memory back")


def test_copies_that_end_before_the_session_free_nothing(sessions):
    session = attach(sessions, 4 * PAGE)
    sessions.begin_copy(session)
    sessions.end_copy(session)
    assert sessions.staging_nbytes == 4 * PAGE
    session.staging.buffer[:3] = b"yes"


def test_staging_of_ended_sessions_with_copies_counts_for_the_limit(sessions):
    session = attach(sessions, 60 * PAGE)
    sessions.begin_copy(session)
    sessions.end(session.session_id, "killed")
    with pytest.raises(ResourceExhaustedError):
        asyncio.run(sessions.open(hello(60 * PAGE)))
    sessions.end_copy(session)
    attach(sessions, 60 * PAGE)


def test_silence_is_measured_from_the_last_sign_of_life(sessions, clock):
    quiet, calling, beating = (attach(sessions, PAGE) for _ in range(3))
    clock.advance(LIMITS.timeout_s - 1)
    sessions.get(calling.token)
    sessions.alive(beating)
    assert sessions.silent() == []
    clock.advance(2)
    assert sessions.silent() == [quiet]
    clock.advance(LIMITS.timeout_s)
    assert sessions.silent() == [quiet, calling, beating]


def test_who_ends_otherwise_is_hung_up_on(sessions):
    """A frozen client that thaws must notice."""
    sessions.sender = sender = Sender()
    session = attach(sessions)
    sessions.end(session.session_id, "silent")
    assert sender.hung_up == [session.session_id]


# ---- hellos that meet


def test_hellos_that_meet_cannot_pass_a_limit_together(sessions):
    """Memory is made in a thread: what it will take is claimed before."""

    async def work():
        hellos = [sessions.open(hello(41 * PAGE)) for _ in range(3)]
        return await asyncio.gather(*hellos, return_exceptions=True)

    answers = asyncio.run(work())
    welcomed = [close_offers(answer) for answer in answers if not isinstance(answer, Exception)]
    refused = [answer for answer in answers if isinstance(answer, ResourceExhaustedError)]
    assert len(welcomed) + len(refused) == 3
    assert refused
    assert sessions.staging_nbytes == 41 * PAGE * len(welcomed)


# ---- events


def run(work):
    return asyncio.run(asyncio.wait_for(work, 10))


async def take(stream, count):
    return [await anext(stream) for _ in range(count)]


def test_a_stream_begins_with_attached_and_carries_what_is_told(sessions):
    async def work():
        session = await attached_to(sessions)
        stream = sessions.listen(session)
        (attached,) = await take(stream, 1)
        assert attached.name == "attached"
        assert attached.values == {"server_epoch": 9, "session_timeout_ms": 30_000}
        sessions.tell_all("draining", {"grace_ms": 5})
        sessions.tell(session, "index_moved", {"table_id": 2})
        events = await take(stream, 2)
        assert [event.name for event in events] == ["draining", "index_moved"]
        sessions.end(session.session_id, "test")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(work())


def test_sequences_count_up_on_the_stream_also_for_what_came_before_it(sessions, table):
    """They are the numbers of the descriptors' packets, which were sent at once."""

    async def work():
        sessions.sender = sender = Sender()
        session = await attached_to(sessions)
        sessions.tell_all("chunk_added", {"chunk_id": 1, "nbytes": 2}, table.offers)
        stream = sessions.listen(session)
        events = await take(stream, 2)
        sessions.tell_all("index_moved", {"table_id": 2}, table.offers)
        events += await take(stream, 1)
        assert [event.sequence for event in events] == [1, 2, 3]
        numbers = {event.name: event.sequence for event in events}
        assert sender.sent == [
            (session.session_id, numbers["chunk_added"], [FdKind.INDEX]),
            (session.session_id, numbers["index_moved"], [FdKind.INDEX]),
        ]
        await stream.aclose()

    run(work())


def test_the_end_of_a_session_ends_a_stream_that_waits_but_not_before_it_told_all(sessions):
    async def work():
        session = await attached_to(sessions)
        stream = sessions.listen(session)
        await take(stream, 1)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        sessions.tell(session, "draining", {"grace_ms": 5})
        sessions.end(session.session_id, "daemon stops")
        assert (await waiting).name == "draining"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(work())


def test_a_newer_stream_takes_over_at_once_and_no_event_is_lost(sessions):
    async def work():
        session = await attached_to(sessions)
        old = sessions.listen(session)
        await take(old, 1)
        waiting = asyncio.ensure_future(anext(old))
        await asyncio.sleep(0)
        new = sessions.listen(session)
        assert [event.name for event in await take(new, 1)] == ["attached"]
        with pytest.raises(FailedPreconditionError, match="took over"):
            await waiting
        for number in range(3):
            sessions.tell(session, "index_moved", {"table_id": number})
        events = await take(new, 3)
        assert [event.values["table_id"] for event in events] == [0, 1, 2]
        await new.aclose()

    run(work())


def test_losing_the_stream_ends_nothing(sessions):
    async def work():
        session = await attached_to(sessions)
        stream = sessions.listen(session)
        await take(stream, 1)
        await stream.aclose()
        assert sessions.get(session.token) is session
        sessions.tell(session, "draining", {"grace_ms": 5})
        again = sessions.listen(session)
        assert [event.name for event in await take(again, 2)] == ["draining", "attached"]
        await again.aclose()

    run(work())


def test_a_session_that_takes_no_events_is_ended_and_nobody_else(sessions, ended):
    deaf, other = attach(sessions), attach(sessions)

    async def work():
        stream = sessions.listen(other)
        for number in range(sessions_module._EVENTS_QUEUED_MAX + 1):
            sessions.tell_all("index_moved", {"table_id": number})
            await take(stream, 1)
        await stream.aclose()

    run(work())
    assert ended == [deaf]
    assert sessions.get(other.token) is other


def test_a_session_without_descriptors_for_it_is_ended(sessions, table, ended):
    """P07's EMFILE: it would miss that chunk for ever; whoever tells must not fail."""
    session = attach(sessions)
    table.error = OSError(24, "Too many open files")
    sessions.tell_all("chunk_added", {"chunk_id": 1, "nbytes": 2}, table.offers)
    assert ended == [session]


def test_descriptors_are_closed_when_nobody_can_send_them(sessions, table):
    attach(sessions)
    before = open_fds()
    sessions.tell_all("chunk_added", {"chunk_id": 1, "nbytes": 2}, table.offers)
    assert open_fds() == before


def test_telling_may_end_sessions_meanwhile(sessions, table, ended):
    """The fd socket ends a session whose client is gone, in the middle of `tell_all`."""

    class Breaking(Sender):
        def send(self, session_id, sequence, fds):
            super().send(session_id, sequence, fds)
            for session in list(sessions):
                sessions.end(session.session_id, "gone")

    sessions.sender = Breaking()
    for _ in range(3):
        attach(sessions, PAGE)
    sessions.tell_all("chunk_added", {"chunk_id": 1, "nbytes": 2}, table.offers)
    assert len(ended) == 3
    assert len(sessions) == 0


def test_no_secret_is_shown_when_a_session_is(sessions):
    welcome = close_offers(asyncio.run(sessions.open(hello(PAGE, credential="hunter2"))))
    shown = repr(welcome) + repr(sessions.get(welcome.token))
    assert repr(welcome.token) not in shown
    assert "hunter2" not in shown
