"""The gRPC server as a whole: our two services, and the stock ones for health and reflection."""

import os
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from kvkeep.v1 import admin_pb2, admin_pb2_grpc, block_cache_pb2, block_cache_pb2_grpc
from kvkeep_server.rpc.admin import AdminServicer
from kvkeep_server.rpc.block_cache import BlockCacheServicer
from kvkeep_server.rpc.block_calls import BlockCalls
from kvkeep_server.rpc.call_limit import CallLimit, CallLimits
from kvkeep_server.rpc.interceptors import CallMeter
from kvkeep_server.rpc.request_limits import RequestGuard, RequestLimits

_DESCRIPTORS = (
    block_cache_pb2.DESCRIPTOR.services_by_name["BlockCache"],
    admin_pb2.DESCRIPTOR.services_by_name["Admin"],
)
_SERVICES = tuple(service.full_name for service in _DESCRIPTORS)
# Every call of ours by its full name; the stock services are not ours.
METHODS = tuple(
    f"/{service.full_name}/{method.name}" for service in _DESCRIPTORS for method in service.methods
)
# Names of the health service beside ours and the overall one (the empty name).
_RAM, _NVME = "kvkeep.tier.ram", "kvkeep.tier.nvme"
# Of an answer: 16 bytes for each key, rank and group of an Acquire, which `BlockService` bounds.
_SENT_NBYTES_MAX = 64 << 20
# gRPC's own limit sheds calls with CANCELLED; we refuse with RESOURCE_EXHAUSTED instead.
_PENDING_MAX = 1 << 20


class Server:
    """Serves on one unix socket.

    Args:
        calls: Of engines.
        admin: Of operators.
        meter: Counts the calls of `METHODS`.
        limits: Of requests.
        running: How many calls at a time.
    """

    def __init__(
        self,
        *,
        calls: BlockCalls,
        admin: AdminServicer,
        meter: CallMeter,
        limits: RequestLimits,
        running: CallLimits,
    ) -> None:
        """See the class. Needs a running loop, as grpc.aio does."""
        options = [
            ("grpc.max_receive_message_length", limits.message_nbytes_max),
            ("grpc.max_send_message_length", _SENT_NBYTES_MAX),
            ("grpc.server.max_pending_requests", _PENDING_MAX),
            ("grpc.server.max_pending_requests_hard_limit", _PENDING_MAX),
            ("grpc.so_reuseport", 0),
        ]
        guard = RequestGuard(methods=METHODS, limits=limits)
        limit = CallLimit(methods=METHODS, limits=running)
        self._server = grpc.aio.server(options=options, interceptors=[meter, limit, guard])
        block_cache_pb2_grpc.add_BlockCacheServicer_to_server(
            BlockCacheServicer(calls), self._server
        )
        admin_pb2_grpc.add_AdminServicer_to_server(admin, self._server)
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflected = (*_SERVICES, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, self._server)

    async def start(self, path: Path, mode: int) -> None:
        """Listens on a unix socket with these permissions."""
        self._server.add_insecure_port(f"unix:{path}")
        await self._server.start()
        os.chmod(path, mode)

    async def say_serving(self) -> None:
        """Health: SERVING."""
        for name in ("", *_SERVICES, _RAM):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def say_nvme(self, *, well: bool) -> None:
        """Health of the nvme tier: NOT_SERVING while no directory takes writes. What is overall
        does not change: ram serves."""
        answer = health_pb2.HealthCheckResponse
        await self._health.set(_NVME, answer.SERVING if well else answer.NOT_SERVING)

    async def say_draining(self) -> None:
        """Health: NOT_SERVING, from now on."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, waits for running ones, ends the rest."""
        await self._server.stop(grace_s)
