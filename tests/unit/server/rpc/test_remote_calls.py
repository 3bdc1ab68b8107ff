"""Streams whose clients take nothing: what they hold of the daemon comes back."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.rpc import remote_calls
from kvkeep_server.rpc.remote_calls import RemoteCalls
from kvkeep_server.service.remote import RemoteService
from kvkeep_server.service.streams import StreamLimits, Streams
from tests.fakes.core_harness import Harness, keys_of

STALL_S = 0.05


class Context:
    """Of a call whose client takes so many messages, and then no more."""

    def __init__(self, takes):
        self.takes = takes
        self.sent = []
        self.ended = asyncio.get_running_loop().create_future()
        self.enough = asyncio.Event()
        self.over = asyncio.Event()

    async def write(self, message):
        if len(self.sent) >= self.takes:
            await self.over.wait()
        self.sent.append(message)
        if message.kind == pb.WatchResponse.KIND_RESYNC_DIGEST:
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
    streams = Streams(limits=StreamLimits(4, 2, 1.0), clock=core.clock)
    ram = SimpleNamespace(run=None)
    return RemoteCalls(
        RemoteService(service=core.core.service, sending=None, streams=streams, ram=ram)
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
