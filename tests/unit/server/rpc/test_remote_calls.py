"""Streams whose clients take nothing: what they hold of the daemon comes back."""

import asyncio
import contextlib
import zlib

import grpc
import numpy as np
import pytest

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.rpc import remote_calls
from kvkeep_server.rpc.remote_calls import RemoteCalls
from kvkeep_server.service.remote import RemoteService
from kvkeep_server.service.streams import StreamLimits, Streams
from kvkeep_server.tiering.sending import Sending
from tests.fakes.core_harness import Harness, block_of, hello, keys_of, spec

STALL_S = 0.05


class Context:
    """Of a call whose client takes so many messages, and then no more."""

    def __init__(self, takes):
        self.takes = takes
        self.sent = []
        self.ended = asyncio.get_running_loop().create_future()
        self.enough = asyncio.Event()
        self.over = asyncio.Event()

    @staticmethod
    def time_remaining():
        return 20.0

    async def write(self, message):
        await asyncio.sleep(0)
        if len(self.sent) >= self.takes:
            await self.over.wait()
        self.sent.append(message)
        if getattr(message, "kind", None) == pb.WatchResponse.KIND_RESYNC_DIGEST:
            self.enough.set()

    async def abort(self, code, details, _trailing=()):
        self.ended.set_result((code, details))
        await self.over.wait()


@pytest.fixture
def core():
    with Harness(extra="[limits]\nwatchers_max = 1") as harness:
        yield harness


@pytest.fixture
def calls(core):
    parts, removal = core.core, core.core.service.manager.removal
    return RemoteCalls(
        RemoteService(
            service=parts.service,
            sending=Sending(residency=parts.residency, ram=parts.ram, removal=removal),
            streams=Streams(limits=StreamLimits(8, 4, 1.0), clock=core.clock),
            ram=parts.ram,
        )
    )


@pytest.mark.parametrize("takes", [0, 1])
def test_who_watches_and_takes_nothing_watches_no_more(core, calls, monkeypatch, takes):
    """One that never reads kept a place of `limits.watchers_max` as long as it was connected."""
    monkeypatch.setattr(remote_calls, "WATCH_STALL_S", STALL_S)
    session = core.session()
    opened = core.open(session)
    core.put(session, opened, keys_of("a", 3))
    changes = core.core.service.manager.changes

    async def run():
        idle = Context(takes)
        watch = calls.watch(session, pb.WatchRequest(), idle)
        task = asyncio.create_task(watch)
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhaustedError):
            await calls.watch(session, pb.WatchRequest(), Context(9))
        code, details = await asyncio.wait_for(idle.ended, 10.0)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "watch anew" in details
        assert changes.watchers == 0
        other = Context(9)
        following = asyncio.create_task(calls.watch(session, pb.WatchRequest(), other))
        await asyncio.wait_for(other.enough.wait(), 10.0)
        for one in (task, following):
            one.cancel()
        await asyncio.gather(task, following, return_exceptions=True)
        assert changes.watchers == 0

    core.run(run())


def test_a_watcher_that_is_cancelled_anywhere_leaves_its_place(core, calls):
    session = core.session()
    core.put(session, core.open(session), keys_of("a", 3))
    changes = core.core.service.manager.changes

    async def run(steps):
        task = asyncio.create_task(calls.watch(session, pb.WatchRequest(), Context(9)))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert changes.watchers == 0

    for steps in range(30):
        core.run(run(steps))


NBYTES, COUNT = 50_000, 60
STRIDE = 4096 * 13


def write_of(opened, name, *, at=0, pause=None):
    """A Write of blocks that lie from `at` on; it waits for `pause` before the bytes."""
    keys = keys_of(name, COUNT)
    offsets = at + np.arange(COUNT, dtype="<u8") * STRIDE
    group = pb.StagedGroup(staging_offsets=offsets.tobytes())
    header = pb.CommitRequest(set_index=opened.spaces.index, keys=b"".join(keys), groups=[group])

    async def messages():
        yield pb.WriteRequest(header=header)
        if pause is not None:
            await pause.wait()
        payload = b"".join(block_of(key, NBYTES) for key in keys)
        for start in range(0, len(payload), 700_000):
            data = payload[start : start + 700_000]
            await asyncio.sleep(0)
            yield pb.WriteRequest(data=data, offset=start, crc32=zlib.crc32(data))

    return messages()


def begin_remote(core, staging_nbytes=STRIDE * COUNT):
    session = core.run(core.core.sessions.open_remote(hello(staging_nbytes)))
    return session, core.open(session, spec(block_nbytes=NBYTES))


async def cancelled_after(steps, work):
    task = asyncio.create_task(work)
    for step in range(steps):
        await asyncio.sleep(0.001 if step % 4 == 3 else 0)
        if task.done():
            break
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
        return True
    return False


@pytest.mark.parametrize("ends", [False, True])
def test_a_write_that_is_cancelled_anywhere_leaves_nothing(core, calls, ends):
    """P23 for the streams: also where its session ends in the same moment."""
    service, finished = core.core.service, []
    for steps in range(0, 60, 2):
        session, opened = begin_remote(core)

        async def run(session=session, opened=opened, steps=steps):
            write = calls.write(session, write_of(opened, f"{ends} {steps}"), Context(0))
            finished.append(await cancelled_after(steps, write))
            if ends:
                core.core.sessions.end(session.session_id, "client closed")
            if service._running:
                await asyncio.wait(set(service._running))

        core.run(run())
        assert calls._streams.running == session.copies == 0
        core.core.sessions.end(session.session_id, "test is over")
        assert (core.core.sessions.staging_nbytes, core.core.sessions.remote) == (0, 0)
        core.check_at_rest()
    assert {True, False} == set(finished)


@pytest.mark.parametrize("ends", [False, True])
def test_a_read_that_is_cancelled_anywhere_leaves_nothing(core, calls, ends):
    finished = []
    for steps in range(0, 40, 2):
        session, opened = begin_remote(core)
        core.run(written(calls, session, opened))
        grant = core.acquire(session, opened, keys_of("a", COUNT))

        async def run(session=session, grant=grant, steps=steps):
            request = pb.ReadRequest(lease_id=grant.lease.lease_id)
            read = calls.read(session, request, Context(1000))
            finished.append(await cancelled_after(steps, read))
            if ends:
                core.core.sessions.end(session.session_id, "client closed")

        core.run(run())
        core.core.sessions.end(session.session_id, "test is over")
        core.run(asyncio.sleep(0.01))
        assert calls._streams.running == 0
        assert not core.core.residency.columns.pins.any()
        core.check_at_rest()
    assert {True, False} == set(finished)


async def written(calls, session, opened):
    await calls.write(session, write_of(opened, "a"), Context(0))


def test_bytes_are_not_laid_where_others_are_being_sealed(core, calls):
    """A client that takes its staging for free too early must not get wrong bytes sealed."""
    session, opened = begin_remote(core, 2 * STRIDE * COUNT)

    async def run():
        pause = asyncio.Event()
        first = calls.write(session, write_of(opened, "a", pause=pause), Context(0))
        first = asyncio.create_task(first)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for at in (0, 4096, STRIDE * (COUNT - 1)):
            with pytest.raises(ResourceExhaustedError, match="staging") as busy:
                await calls.write(session, write_of(opened, "b", at=at), Context(0))
            assert busy.value.retry_after_s > 0
        beside = await calls.write(session, write_of(opened, "c", at=STRIDE * COUNT), Context(0))
        pause.set()
        stored = [beside.commit.stored, (await first).commit.stored]
        again = await calls.write(session, write_of(opened, "b"), Context(0))
        assert [*stored, again.commit.stored] == [COUNT] * 3

    core.run(run())
