"""Calls of one session, however they came: parse, call, render. Errors are listed at each call in
`block_cache.proto`."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep.v1 import block_cache_pb2 as pb
from kvkeep_server.rpc import convert
from kvkeep_server.service.block_service import BlockService
from kvkeep_server.service.sessions import Session
from kvkeep_server.tiering.manager import Grant, ReadOrder
from kvkeep_server.tiering.prefetching import PrefetchOrder
from kvkeep_server.tiering.removal import Removed


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What a client is told when it opens a namespace; names as in the configuration."""

    keys_max: int
    block_nbytes_max: int
    staging_nbytes_max: int
    lease_ttl_s: float
    session_timeout_s: float
    message_nbytes_max: int


class BlockCalls:
    """Thin: one method a call; each raises KVKeepError.

    Args:
        service: Does the work.
        limits: Told to clients that open a namespace.
        server_epoch: Of this daemon.
    """

    def __init__(self, *, service: BlockService, limits: ClientLimits, server_epoch: int) -> None:
        """See the class."""
        self.service = service
        self._limits = _message(limits)
        self._server_epoch = server_epoch

    def open_namespace(
        self, session: Session, request: pb.OpenNamespaceRequest
    ) -> pb.OpenNamespaceResponse:
        """OpenNamespace."""
        spec = convert.spec_of(request.spec)
        self.service.check_layout(request.layout_version)
        opened = self.service.open_namespace(session, spec, request.local_ranks)
        near = self.service.namespaces.near_misses(opened.namespace_set.spec)
        slots = [self.service.slot_nbytes(group.block_nbytes) for group in spec.groups]
        mode = self.service.control.mode_of(opened.namespace_set)
        return convert.opened_message(opened, near, self._limits, self._server_epoch, slots, mode)

    def lookup(self, session: Session, request: pb.LookupRequest) -> pb.LookupResponse:
        """Lookup."""
        index, keys = request.set_index, request.keys
        if request.peek:
            opened, prefix = self.service.peek(session, index, keys)
        else:
            hints = convert.hints_of(request.hints)
            opened, prefix = self.service.lookup(session, index, keys, hints)
        return convert.lookup_message(opened, prefix)

    def acquire(
        self, session: Session, request: pb.AcquireRequest
    ) -> pb.AcquireResponse | Awaitable[pb.AcquireResponse]:
        """Acquire: at once, unless blocks have to be brought into ram."""
        life_s = self.service.manager.leases.life_s(request.lease_ttl_ms / 1000)
        order = ReadOrder(
            session.session_id,
            life_s,
            request.byte_budget,
            request.skip_blocks,
            convert.hints_of(request.hints),
            request.wait_ms / 1000,
        )
        grant, asked = self.service.acquire(
            session, request.set_index, request.keys, request.groups, order
        )
        if isinstance(grant, Grant):
            return convert.grant_message(grant, asked, self.service.manager.residency, life_s)
        return self._late(grant, asked, life_s)

    async def _late(
        self, coming: Awaitable[Grant], asked: int, life_s: float
    ) -> pb.AcquireResponse:
        grant = await coming
        return convert.grant_message(grant, asked, self.service.manager.residency, life_s)

    async def arrivals(
        self, session: Session, request: pb.AwaitRequest
    ) -> AsyncIterator[pb.AwaitResponse]:
        """Await."""
        residency = self.service.manager.residency
        async for arrived in self.service.arrivals(session, request.lease_id):
            yield convert.arrived_message(arrived, residency)

    def release(self, session: Session, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        """Release."""
        released = self.service.release(session, request.lease_ids)
        return pb.ReleaseResponse(released=released, unknown=len(request.lease_ids) - released)

    def renew(self, session: Session, request: pb.RenewRequest) -> pb.RenewResponse:
        """Renew."""
        status, life_s = self.service.renew(session, request.lease_ids, request.lease_ttl_ms / 1000)
        return pb.RenewResponse(status=bytes(status), lease_ttl_ms=round(life_s * 1000))

    def begin_commit(
        self, session: Session, request: pb.CommitRequest
    ) -> asyncio.Task[NDArray[np.uint8]]:
        """Commit; see `BlockService.begin_commit`. `convert.commit_message` renders its result."""
        return self.service.begin_commit(session, convert.order_of(request))

    def prefetch(self, session: Session, request: pb.PrefetchRequest) -> pb.PrefetchResponse:
        """Prefetch."""
        hints = convert.hints_of(request.hints)
        order = PrefetchOrder(request.deadline_ms / 1000, request.byte_budget, hints)
        planned = self.service.prefetch(session, request.set_index, request.keys, order)
        return pb.PrefetchResponse(planned_blocks=planned)

    def pin(self, session: Session, request: pb.PinRequest) -> pb.PinResponse:
        """Pin."""
        pinned = self.service.pin(session, request.set_index, request.keys, request.keep_for_s)
        return pb.PinResponse(
            pin_id=pinned.pin_id,
            pinned_blocks=pinned.blocks,
            budget_left_nbytes=self.service.manager.pins.left_nbytes,
            keep_for_s=math.floor(pinned.keep_for_s),
        )

    def unpin(self, session: Session, request: pb.UnpinRequest) -> pb.UnpinResponse:
        """Unpin."""
        unpinned = self.service.unpin(session, request.pin_ids)
        return pb.UnpinResponse(unpinned=unpinned, unknown=len(request.pin_ids) - unpinned)

    async def remove(self, session: Session, request: pb.RemoveRequest) -> Removed:
        """Remove. `convert.removed_message` renders the result."""
        return await self.service.remove(
            session,
            request.set_index,
            request.keys,
            with_descendants=request.with_descendants,
        )


def _message(limits: ClientLimits) -> pb.Limits:
    return pb.Limits(
        keys_max=limits.keys_max,
        block_nbytes_max=limits.block_nbytes_max,
        staging_nbytes_max=limits.staging_nbytes_max,
        lease_ttl_ms=round(limits.lease_ttl_s * 1000),
        session_timeout_ms=round(limits.session_timeout_s * 1000),
        message_nbytes_max=limits.message_nbytes_max,
    )
