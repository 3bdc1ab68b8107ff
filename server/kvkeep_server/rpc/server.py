"""The gRPC server as a whole: our two services, and the stock ones for health and reflection."""

import asyncio
import logging
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from kvkeep.v1 import admin_pb2, admin_pb2_grpc, block_cache_pb2, block_cache_pb2_grpc
from kvkeep_server.core.errors import FailedPreconditionError
from kvkeep_server.core.settings_kinds import listen_address
from kvkeep_server.rpc.block_cache import BlockCacheServicer
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
# What gRPC buffers of a stream that nobody reads: without these, up to 16 MiB. A connection of
# which nothing is heard ends after half a minute.
_BOUNDED_CONNECTIONS = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.max_concurrent_streams", 4096),
    # Or streams that are answered but not yet freed count too, and gRPC resets some at random.
    ("grpc.http.overload_protection", 0),
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Clients may ping as well, idle ones too. By default gRPC sends away who does so more than
    # every five minutes.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Front:
    """What servers are made of.

    Attributes:
        blocks: Of engines.
        admin: Of operators.
        meter: Counts the calls of `METHODS`.
        limits: Of requests.
        running: How many calls at a time.
    """

    blocks: BlockCacheServicer
    admin: admin_pb2_grpc.AdminServicer
    meter: CallMeter
    limits: RequestLimits
    running: CallLimits


class Server:
    """Serves on one unix socket, or on one TCP port.

    Args:
        front: See there.
        remote: Its clients are on other hosts.
    """

    def __init__(self, front: Front, *, remote: bool) -> None:
        """See the class. Needs a running loop, as grpc.aio does."""
        options = [
            ("grpc.max_receive_message_length", front.limits.message_nbytes_max),
            ("grpc.max_send_message_length", _SENT_NBYTES_MAX),
            ("grpc.server.max_pending_requests", _PENDING_MAX),
            ("grpc.server.max_pending_requests_hard_limit", _PENDING_MAX),
            ("grpc.so_reuseport", 0),
            *_BOUNDED_CONNECTIONS,
        ]
        guard = RequestGuard(methods=METHODS, limits=front.limits, summed=remote)
        limit = CallLimit(methods=METHODS, limits=front.running)
        interceptors = [front.meter, limit, guard]
        self._server = grpc.aio.server(options=options, interceptors=interceptors)
        block_cache_pb2_grpc.add_BlockCacheServicer_to_server(front.blocks, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(front.admin, self._server)
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflected = (*_SERVICES, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, self._server)

    async def start(self, path: Path, mode: int) -> None:
        """Listens on a unix socket with these permissions."""
        self._server.add_insecure_port(f"unix:{path}")
        await self._server.start()
        os.chmod(path, mode)

    async def start_remote(self, host: str, port: int) -> int:
        """Listens on TCP, in plain text; the port.

        Raises:
            RuntimeError: It cannot.
        """
        address = f"[{host}]" if ":" in host else host
        bound = self._server.add_insecure_port(f"{address}:{port}")
        await self._server.start()
        return bound

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


def _try_listening(host: str, port: int) -> None:
    """Ahead of gRPC, which writes lines of its own where it cannot.

    Raises:
        OSError: It cannot be.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host, port), family=family).close()


class Servers:
    """All that listens with gRPC: the unix socket, and TCP for other hosts where that is wanted.

    Args:
        front: Of the unix socket.
        remote_admin: What operators' calls do on TCP, instead.
        remote_listen: Address and port; empty = no TCP.
        beyond_loopback: Whether others than this host may reach that.
    """

    def __init__(
        self,
        front: Front,
        *,
        remote_admin: admin_pb2_grpc.AdminServicer,
        remote_listen: str,
        beyond_loopback: bool,
    ) -> None:
        """See the class. Needs a running loop."""
        self._local, self._remote = Server(front, remote=False), None
        if remote_listen:
            self._remote = Server(replace(front, admin=remote_admin), remote=True)
        self._remote_listen = remote_listen
        self._beyond_loopback = beyond_loopback
        self._all = [self._local] if self._remote is None else [self._local, self._remote]

    async def start(self, path: Path, mode: int) -> None:
        """Listens.

        Raises:
            FailedPreconditionError: Not on TCP.
            RuntimeError: Not on the unix socket.
        """
        await self._local.start(path, mode)
        if self._remote is not None:
            host, port = listen_address(self._remote_listen)
            try:
                _try_listening(host, port)
                bound = await self._remote.start_remote(host, port)
            except (OSError, RuntimeError) as error:
                number = getattr(error, "errno", None)
                why = os.strerror(number) if number else "taken, or not of this host"
                msg = f"remote.listen is {self._remote_listen}: {why}"
                raise FailedPreconditionError(f"{msg}; name another address or port") from error
            _log.info("remote", extra={"host": host, "port": bound})
            if self._beyond_loopback:
                _log.warning("remote: plain text, and open to all who reach it")

    async def say_serving(self) -> None:
        """See `Server`."""
        for server in self._all:
            await server.say_serving()

    async def say_nvme(self, *, well: bool) -> None:
        """See `Server`."""
        for server in self._all:
            await server.say_nvme(well=well)

    async def say_draining(self) -> None:
        """See `Server`."""
        for server in self._all:
            await server.say_draining()

    async def stop(self, grace_s: float) -> None:
        """See `Server`."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._all))
