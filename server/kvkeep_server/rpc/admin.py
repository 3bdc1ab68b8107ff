# ruff: noqa: N802, D102 - the methods have the names of the wire, and are documented there
"""The Admin service: parse, call, render. Errors are listed at each call in `admin.proto`."""

import importlib.metadata

from kvkeep.v1 import admin_pb2 as pb
from kvkeep.v1 import admin_pb2_grpc as pb_grpc
from kvkeep_server.core.errors import InvalidArgumentError
from kvkeep_server.core.results import TierId
from kvkeep_server.rpc import convert
from kvkeep_server.rpc.calls import Context, not_served, session_of, unary
from kvkeep_server.service.block_service import BlockService
from kvkeep_server.service.sessions import Sessions
from kvkeep_server.tiering.nvme_side import LocalTiers, NvmeSide

_PAGE_SIZE = 100
_PAGE_SIZE_MAX = 1000
_TOKEN_MAX = 10


class AdminServicer(pb_grpc.AdminServicer):
    """Thin: one method a call.

    Args:
        service: Answers.
        tiers: For their sizes.
        server_epoch: Of this daemon.
    """

    def __init__(self, *, service: BlockService, tiers: LocalTiers, server_epoch: int) -> None:
        """See the class."""
        self._service = service
        self._ram = tiers.ram
        self._nvme = tiers.nvme
        self._server_epoch = server_epoch
        self._version = importlib.metadata.version("kvkeep")

    @unary
    async def Stats(self, request: pb.StatsRequest, _context: Context) -> pb.StatsResponse:
        return self.stats(request)

    def stats(self, _request: pb.StatsRequest) -> pb.StatsResponse:
        service = self._service
        service.drain_touches()
        reads, commits, leases = (
            service.manager.counts,
            service.commits.counts,
            service.manager.leases,
        )
        residency = service.manager.residency
        return pb.StatsResponse(
            server_epoch=self._server_epoch,
            uptime_ms=round(service.uptime_s * 1000),
            pool=self._pool(),
            index=self._index(),
            sessions=len(service.sessions),
            leases=len(leases),
            blocks_asked_total=reads.answered,
            blocks_hit_total=reads.hit,
            blocks_missed_total=reads.missed,
            lookups_total=reads.lookup.calls,
            acquires_total=reads.acquire.calls,
            commits_total=commits.commits,
            blocks_stored_total=commits.stored,
            blocks_already_stored_total=commits.already_stored,
            blocks_refused_total=commits.refused,
            blocks_failed_total=commits.failed,
            blocks_evicted_total=residency.evicted_total,
            leases_expired_total=leases.expired_total,
            sessions_ended_total=service.sessions.ended_total,
            touch_records_lost_total=service.touches.lost,
            touch_records_invalid_total=service.touches.invalid,
            bytes_stored_total=commits.stored_nbytes,
            collisions_total=residency.collisions_total,
            version=self._version,
            blocks_removed_total=service.manager.removal.counts.removed,
            blocks_corrupt_total=service.manager.removal.counts.corrupt,
            misses=convert.miss_counts(reads.missed_by()),
            pins=len(service.manager.pins),
            pinned_nbytes=service.manager.pins.nbytes,
            pinned_limit_nbytes=service.manager.pins.limits.nbytes_max,
            nvme=None if self._nvme is None else self._nvme_stats(self._nvme),
        )

    def _nvme_stats(self, nvme: NvmeSide) -> pb.NvmeStats:
        manager, directories = self._service.manager, nvme.tier.stats().directories
        held = manager.residency.held[TierId.NVME]
        by_call = manager.counts.by_call().values()
        return pb.NvmeStats(
            limit_nbytes=sum(directory.max_nbytes for directory in directories),
            used_nbytes=sum(directory.used_nbytes for directory in directories),
            blocks=held.blocks,
            payload_nbytes=held.nbytes,
            blocks_hit_total=sum(counts.hits[TierId.NVME] for counts in by_call),
            blocks_dropped_total=nvme.demotion.counts.dropped,
            queued_blocks=nvme.demotion.queued_blocks,
            recovering=not nvme.recovery.done,
            sick_directories=sum(bool(directory.sick) for directory in directories),
        )

    def _pool(self) -> pb.PoolStats:
        stats = self._ram.stats()
        return pb.PoolStats(
            limit_nbytes=stats.limit_nbytes,
            chunk_nbytes=stats.nbytes,
            slot_nbytes_used=stats.used_nbytes,
            slot_nbytes_free=stats.free_nbytes,
            payload_nbytes=self._service.manager.residency.payload_nbytes,
            leased_nbytes=self._service.manager.leases.leased_nbytes,
            chunks=stats.chunks,
            huge_chunks=stats.huge_chunks,
            blocks=self._service.manager.residency.held[TierId.RAM].blocks,
        )

    def _index(self) -> pb.IndexStats:
        residency = self._service.manager.residency
        table = residency.table
        return pb.IndexStats(
            rows=table.geometry.rows,
            blocks=table.live_rows,
            rebuilds=residency.rebuilds_total,
            nbytes=residency.index_nbytes,
        )

    @unary
    async def ListNamespaces(
        self, request: pb.ListNamespacesRequest, _context: Context
    ) -> pb.ListNamespacesResponse:
        size = min(request.page_size or _PAGE_SIZE, _PAGE_SIZE_MAX)
        token = request.page_token
        if token and not (token.isascii() and token.isdecimal() and len(token) <= _TOKEN_MAX):
            raise InvalidArgumentError(
                "page_token",
                request.page_token,
                "next_page_token of the page before",
                "begin without one",
            )
        start = int(token or 0)
        known = list(self._service.namespaces)
        page = known[start : start + size]
        more = start + size < len(known)
        return pb.ListNamespacesResponse(
            namespaces=[
                convert.namespace_message(
                    known_set, *held, self._service.control.mode_of(known_set)
                )
                for known_set, held in zip(page, self._service.held(page), strict=True)
            ],
            next_page_token=str(start + size) if more else "",
        )

    @unary
    async def SetNamespaceMode(
        self, request: pb.SetNamespaceModeRequest, _context: Context
    ) -> pb.SetNamespaceModeResponse:
        mode = convert.mode_of(request.mode)
        previous = self._service.control.set_mode(request.set_id, mode)
        return pb.SetNamespaceModeResponse(previous=convert.mode_message(previous))

    Explain = not_served("Explain: why a chain misses (Lookup says why its first block does)")
    Purge = not_served("Purge: emptying a tenant or a namespace set")
    SetQuota = not_served("SetQuota: bytes of a tenant")
    Drain = not_served("Drain: draining by call (send SIGTERM instead)")

    @unary
    async def Check(self, request: pb.CheckRequest, _context: Context) -> pb.CheckResponse:
        report = await self._service.checker.run(convert.check_order_of(request))
        return convert.check_message(report)


class RemoteAdminServicer(pb_grpc.AdminServicer):
    """What clients on other hosts get of it: the figures, and only with a session.

    Args:
        admin: Answers.
        sessions: Who may ask.
    """

    def __init__(self, admin: AdminServicer, sessions: Sessions) -> None:
        """See the class."""
        self._admin = admin
        self._sessions = sessions

    @unary
    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        session_of(self._sessions, context)
        return self._admin.stats(request)

    ListNamespaces = not_served("ListNamespaces on TCP (use the unix socket)")
    SetNamespaceMode = not_served("SetNamespaceMode on TCP (use the unix socket)")
    Explain = not_served("Explain on TCP (use the unix socket)")
    Purge = not_served("Purge on TCP (use the unix socket)")
    SetQuota = not_served("SetQuota on TCP (use the unix socket)")
    Drain = not_served("Drain on TCP (use the unix socket)")
    Check = not_served("Check on TCP (use the unix socket)")
