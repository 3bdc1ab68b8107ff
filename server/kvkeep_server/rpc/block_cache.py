# ruff: noqa: N802, D102 - the methods have the names of the wire, and are documented there
"""The BlockCache service: parse, call, render. Errors are listed at each call in
`block_cache.proto`."""

import asyncio
from collections.abc import AsyncIterator

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep.v1 import block_cache_pb2_grpc as pb_grpc
from kvkeep_server.rpc import convert
from kvkeep_server.rpc.calls import Context, not_served, session_of, streamed, unary
from kvkeep_server.service.block_service import BlockService
from kvkeep_server.service.sessions import Session
from kvkeep_server.tiering.manager import ReadOrder


class BlockCacheServicer(pb_grpc.BlockCacheServicer):
    """Thin: one method a call.

    Args:
        service: Does the work.
        limits: Told to clients that open a namespace.
        server_epoch: Of this daemon.
    """

    def __init__(self, *, service: BlockService, limits: pb.Limits, server_epoch: int) -> None:
        """See the class."""
        self._service = service
        self._limits = limits
        self._server_epoch = server_epoch

    def _session(self, context: Context) -> Session:
        return session_of(self._service.sessions, context)

    @unary
    async def OpenNamespace(
        self, request: pb.OpenNamespaceRequest, context: Context
    ) -> pb.OpenNamespaceResponse:
        spec = convert.spec_of(request.spec)
        session = self._session(context)
        self._service.check_layout(request.layout_version)
        opened = self._service.open_namespace(session, spec, request.local_ranks)
        near = self._service.namespaces.near_misses(spec)
        slots = [self._service.slot_nbytes(group.block_nbytes) for group in spec.groups]
        return convert.opened_message(opened, near, self._limits, self._server_epoch, slots)

    @streamed
    async def Attach(
        self, request: AsyncIterator[pb.AttachRequest], context: Context
    ) -> AsyncIterator[pb.AttachEvent]:
        session = self._session(context)
        heartbeats = asyncio.create_task(self._heartbeats(request, session))
        try:
            async for event in self._service.sessions.listen(session):
                yield convert.event_message(event)
        finally:
            heartbeats.cancel()

    async def _heartbeats(self, request: AsyncIterator[pb.AttachRequest], session: Session) -> None:
        async for _ in request:
            self._service.sessions.alive(session)

    @unary
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        session = self._session(context)
        hints = convert.hints_of(request.hints)
        opened, prefix = self._service.lookup(session, request.set_index, request.keys, hints)
        return convert.lookup_message(opened, prefix)

    @unary
    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:
        session = self._session(context)
        life_s = self._service.manager.leases.life_s(request.lease_ttl_ms / 1000)
        order = ReadOrder(
            session.session_id,
            life_s,
            request.byte_budget,
            request.skip_blocks,
            convert.hints_of(request.hints),
        )
        grant, asked = self._service.acquire(
            session, request.set_index, request.keys, request.groups, order
        )
        columns = self._service.manager.residency.columns
        return convert.grant_message(grant, asked, columns, life_s)

    @streamed
    async def Await(
        self, request: pb.AwaitRequest, context: Context
    ) -> AsyncIterator[pb.AwaitResponse]:
        self._service.require_lease(self._session(context), request.lease_id)
        # Everything that the ram tier leases is ready at once: nothing is ever pending here.
        nothing: tuple[pb.AwaitResponse, ...] = ()
        for response in nothing:
            yield response

    @unary
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        released = self._service.release(self._session(context), request.lease_ids)
        return pb.ReleaseResponse(released=released, unknown=len(request.lease_ids) - released)

    @unary
    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        status, life_s = self._service.renew(
            self._session(context), request.lease_ids, request.lease_ttl_ms / 1000
        )
        return pb.RenewResponse(status=bytes(status), lease_ttl_ms=round(life_s * 1000))

    @unary
    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        status = await self._service.commit(self._session(context), convert.order_of(request))
        return convert.commit_message(status)

    @unary
    async def Remove(self, request: pb.RemoveRequest, context: Context) -> pb.RemoveResponse:
        removed = await self._service.remove(
            self._session(context),
            request.set_index,
            request.keys,
            with_descendants=request.with_descendants,
        )
        return convert.removed_message(removed)

    Read = not_served("Read: bytes for clients on other hosts")
    Write = not_served("Write: bytes from clients on other hosts")
    Prefetch = not_served("Prefetch: hints of what will be read")
    Pin = not_served("Pin: retention pins")
    Unpin = not_served("Unpin: retention pins")
    AdvanceEpoch = not_served(
        "AdvanceEpoch: new weights in place (open with a higher namespace_epoch instead)"
    )
    Watch = not_served("Watch: events for routers")
