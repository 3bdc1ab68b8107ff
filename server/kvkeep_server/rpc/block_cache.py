# ruff: noqa: N802, D102 - the methods have the names of the wire, and are documented there
"""The BlockCache service on gRPC: finds the session of the token; the rest is `BlockCalls`."""

import asyncio
from collections.abc import AsyncIterator

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1 import block_cache_pb2_grpc as pb_grpc
from kvkeep_server.rpc import convert
from kvkeep_server.rpc.block_calls import BlockCalls
from kvkeep_server.rpc.calls import Context, session_of, streamed, token_of, unary
from kvkeep_server.rpc.remote_calls import RemoteCalls
from kvkeep_server.service.sessions import Session


class BlockCacheServicer(pb_grpc.BlockCacheServicer):
    """Thin: one method a call.

    Args:
        calls: Do the work.
        remote: Do that for clients on other hosts.
    """

    def __init__(self, calls: BlockCalls, remote: RemoteCalls) -> None:
        """See the class."""
        self._calls = calls
        self._remote = remote
        self._service = calls.service

    def _session(self, context: Context) -> Session:
        return session_of(self._service.sessions, context)

    @unary
    async def OpenNamespace(
        self, request: pb.OpenNamespaceRequest, context: Context
    ) -> pb.OpenNamespaceResponse:
        return self._calls.open_namespace(self._session(context), request)

    @streamed
    async def Attach(
        self, request: AsyncIterator[pb.AttachRequest], context: Context
    ) -> AsyncIterator[pb.AttachEvent]:
        # No receiver before it is clear that something is received: Python complains of one that is
        # never awaited.
        known = None if token_of(context) is None else self._session(context)
        beats = aiter(request)
        session = known or await self._remote.greet(beats, context.peer())
        heartbeats = asyncio.create_task(self._heartbeats(beats, session))
        try:
            async for event in self._service.sessions.listen(session):
                yield convert.event_message(event)
        finally:
            heartbeats.cancel()
            if session.remote:
                self._service.sessions.end(session.session_id, "its Attach stream ended")

    async def _heartbeats(self, request: AsyncIterator[pb.AttachRequest], session: Session) -> None:
        async for beat in request:
            if isinstance(beat, pb.AttachRequest):  # or it was refused
                self._service.sessions.hear(session, beat.heartbeat)

    @unary
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        return self._calls.lookup(self._session(context), request)

    @unary
    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:
        answer = self._calls.acquire(self._session(context), request)
        return answer if isinstance(answer, pb.AcquireResponse) else await answer

    @streamed
    async def Await(
        self, request: pb.AwaitRequest, context: Context
    ) -> AsyncIterator[pb.AwaitResponse]:
        async for answer in self._calls.arrivals(self._session(context), request):
            yield answer

    @unary
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        return self._calls.release(self._session(context), request)

    @unary
    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        return self._calls.renew(self._session(context), request)

    @unary
    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        running = self._calls.begin_commit(self._session(context), request)
        # A cancelled call does not stop it.
        return convert.commit_message(request, await asyncio.shield(running))

    @unary
    async def Remove(self, request: pb.RemoveRequest, context: Context) -> pb.RemoveResponse:
        removed = await self._calls.remove(self._session(context), request)
        return convert.removed_message(request, removed)

    @unary
    async def AdvanceEpoch(
        self, request: pb.AdvanceEpochRequest, context: Context
    ) -> pb.AdvanceEpochResponse:
        epoch = await self._service.advance_epoch(
            self._session(context), request.set_index, request.expected_epoch
        )
        return pb.AdvanceEpochResponse(namespace_epoch=epoch)

    @unary
    async def Prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchResponse:
        return self._calls.prefetch(self._session(context), request)

    @unary
    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        return self._calls.pin(self._session(context), request)

    @unary
    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        return self._calls.unpin(self._session(context), request)

    # These write by themselves, to see when a client takes nothing.

    @unary
    async def Watch(  # type: ignore[override]
        self, request: pb.WatchRequest, context: Context
    ) -> None:
        await self._remote.watch(self._session(context), request, context)

    @unary
    async def Read(  # type: ignore[override]
        self, request: pb.ReadRequest, context: Context
    ) -> None:
        await self._remote.read(self._session(context), request, context)

    @unary
    async def Write(
        self, request: AsyncIterator[pb.WriteRequest], context: Context
    ) -> pb.WriteResponse:
        return await self._remote.write(self._session(context), request, context)
