"""The settings as plain values, for the parts that the daemon builds."""

import importlib.metadata
import platform

from kvkeep_server.config import Settings
from kvkeep_server.config.disks import nvme_directories
from kvkeep_server.core.memory_limit import read_memory_limit
from kvkeep_server.metrics.readings import Facts
from kvkeep_server.policies.registry import prefetch_policy
from kvkeep_server.rpc.call_limit import CallLimits
from kvkeep_server.service.namespaces import NamespaceLimits
from kvkeep_server.service.sessions import SessionLimits
from kvkeep_server.service.streams import StreamLimits
from kvkeep_server.tiering.demotion import DemotionLimits
from kvkeep_server.tiering.leases import LeaseLimits
from kvkeep_server.tiering.nvme_side import NvmeFacts, NvmeMeans
from kvkeep_server.tiering.prefetching import PrefetchFacts
from kvkeep_server.tiering.retention_pins import PinLimits
from kvkeep_server.tiering.watching import WatchLimits
from kvkeep_server.tiers.nvme.tier import NvmeSettings
from kvkeep_server.tiers.ram.pool import PoolSettings

_READING_MAX_NBYTES = 256 << 20
_WRITING_MIN_NBYTES = 64 << 20
_SYNC_INTERVAL_S = 1.0
_PROBE_INTERVAL_S = 1.0


def pool_settings(settings: Settings, server_epoch: int) -> PoolSettings:
    """Of the ram tier's pool."""
    return PoolSettings(
        limit_nbytes=settings.ram.size_nbytes,
        chunk_nbytes_max=settings.ram.chunk_nbytes,
        chunk_nbytes_min=settings.ram.slab_nbytes,
        server_epoch=server_epoch,
    )


def lease_limits(settings: Settings) -> LeaseLimits:
    """Of leases."""
    leases = settings.leases
    return LeaseLimits(leases.ttl_s, leases.leases_max, leases.remembered_max)


def call_limits(settings: Settings) -> CallLimits:
    """Of calls on gRPC."""
    limits = settings.limits
    # While a stream takes over from another of its session, there are two.
    attached_max = 2 * settings.sessions.sessions_max
    return CallLimits(limits.calls_running_max, limits.session_calls_running_max, attached_max)


def pin_limits(settings: Settings) -> PinLimits:
    """Of retention pins."""
    pins = settings.pins
    return PinLimits(pins.nbytes_max, pins.pins_max, pins.keep_max_s)


def watch_limits(settings: Settings) -> WatchLimits:
    """Of watchers."""
    return WatchLimits(settings.limits.watchers_max, settings.limits.watch_blocks_max)


def namespace_limits(settings: Settings, block_nbytes_max: int) -> NamespaceLimits:
    """Of namespaces; the ram tier has a largest block too."""
    limits = settings.limits
    return NamespaceLimits(
        namespaces_max=limits.namespaces_max,
        session_namespaces_max=limits.session_namespaces_max,
        session_shards_max=limits.session_shards_max,
        block_nbytes_max=min(limits.block_nbytes_max, block_nbytes_max),
    )


def session_limits(settings: Settings) -> SessionLimits:
    """Of sessions."""
    sessions = settings.sessions
    return SessionLimits(
        timeout_s=sessions.timeout_s,
        staging_nbytes=sessions.staging_nbytes,
        staging_max_nbytes=sessions.staging_nbytes_max,
        staging_total_max_nbytes=sessions.staging_total_nbytes_max,
        sessions_max=sessions.sessions_max,
        remote_max=settings.remote.sessions_max,
        remote_staging_max_nbytes=settings.remote.staging_total_nbytes_max,
    )


def stream_limits(settings: Settings) -> StreamLimits:
    """Of streams of clients on other hosts."""
    remote = settings.remote
    return StreamLimits(remote.streams_max, remote.session_streams_max, remote.stall_timeout_s)


def nvme_facts(settings: Settings, server_epoch: int, means: NvmeMeans) -> NvmeFacts | None:
    """What the nvme tier is made with; None = there is none.

    Raises:
        FailedPreconditionError: As `nvme_directories`; `check_disks` says what else there may be.
    """
    nvme, directories = settings.nvme, nvme_directories(settings)
    if not directories:
        return None
    tier = NvmeSettings(
        directories=directories,
        reading_max_nbytes=_READING_MAX_NBYTES,
        writing_max_nbytes=max(nvme.queue_nbytes, _WRITING_MIN_NBYTES),
        sync_interval_s=_SYNC_INTERVAL_S,
        probe_interval_s=_PROBE_INTERVAL_S,
        server_epoch=server_epoch,
    )
    queue = DemotionLimits(
        blocks_max=nvme.queue_blocks_max,
        nbytes_max=nvme.queue_nbytes,
        segment_nbytes=nvme.segment_nbytes,
    )
    prefetch = PrefetchFacts(prefetch_policy(nvme.prefetch)(), nvme.prefetch_nbytes_max)
    return NvmeFacts(tier, queue, nvme.read_threads, prefetch, means)


def metric_facts(settings: Settings) -> Facts:
    """What the metrics say of this release and its settings."""
    limits = {
        "kvkeep_memory_limit_bytes": read_memory_limit().nbytes,
        "kvkeep_commits_running_limit": settings.limits.commits_running_max,
        "kvkeep_sessions_limit": settings.sessions.sessions_max,
        "kvkeep_staging_limit_bytes": settings.sessions.staging_total_nbytes_max,
        "kvkeep_namespaces_limit": settings.limits.namespaces_max,
        "kvkeep_leases_limit": settings.leases.leases_max,
        "kvkeep_pins_limit": settings.pins.pins_max,
        "kvkeep_watchers_limit": settings.limits.watchers_max,
        "kvkeep_pinned_limit_bytes": settings.pins.nbytes_max,
        "kvkeep_remote_sessions_limit": settings.remote.sessions_max,
        "kvkeep_remote_streams_limit": settings.remote.streams_max,
    }
    ram = settings.ram
    return Facts(
        build=(importlib.metadata.version("kvkeep"), platform.python_version()),
        config=(ram.policy, ram.admission, str(ram.huge_pages).lower()),
        limits=limits,
    )
