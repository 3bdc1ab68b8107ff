"""Reads every figure of the catalogue off the running parts, at one moment of the event loop.

Nothing is kept here: gauges are recomputed at each reading, so none can drift or go negative, and
counters are the parts' own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvkeep_server.core.histogram import Histogram
from kvkeep_server.core.results import CommitStatus, MissReason, TierId
from kvkeep_server.metrics.catalog import PoolState, RowState
from kvkeep_server.metrics.hint_values import Foreseen
from kvkeep_server.metrics.metric import Reading, value_of
from kvkeep_server.metrics.nvme_readings import nvme_readings
from kvkeep_server.service.block_service import BlockService
from kvkeep_server.service.streams import Streams
from kvkeep_server.tiering.nvme_side import LocalTiers
from kvkeep_server.tiers.ram.tier import RamStats


class HandoverCounts(Protocol):
    """What the fd socket counts."""

    @property
    def refused_total(self) -> int:
        """Clients that were told why not."""
        ...

    @property
    def dropped_total(self) -> int:
        """Connections without a hello."""
        ...


class CallCounts(Protocol):
    """What the gRPC server counts."""

    @property
    def ended(self) -> Mapping[tuple[str, str], int]:
        """Calls by method and status code."""
        ...

    @property
    def durations(self) -> Mapping[tuple[str, bool], Histogram]:
        """By method, and whether it ended well."""
        ...


@dataclass(frozen=True, slots=True)
class Doors:
    """By which clients come in.

    Attributes:
        calls: Of the gRPC servers.
        handover: The fd socket.
        streams: Of clients on other hosts.
    """

    calls: CallCounts
    handover: HandoverCounts
    streams: Streams


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change while the daemon runs.

    Attributes:
        build: Values of the labels of `kvkeep_build_info`.
        config: Values of the labels of `kvkeep_config_info`.
        limits: By name of the metric.
    """

    build: tuple[str, ...]
    config: tuple[str, ...]
    limits: Mapping[str, int]


class Readings:
    """Event loop only.

    Args:
        service: Reads, commits, sessions, leases, index.
        tiers: See `LocalTiers`.
        doors: See `Doors`.
        loop_lag: How late the loop wakes.
        facts: See `Facts`.

    Attributes:
        serving: Told by who starts and drains.
        loop_lag: As given; whoever wakes up late adds to it.
    """

    def __init__(
        self,
        *,
        service: BlockService,
        tiers: LocalTiers,
        doors: Doors,
        loop_lag: Histogram,
        facts: Facts,
    ) -> None:
        """See the class."""
        self.serving = False
        self._service = service
        self._ram = tiers.ram
        self._nvme = tiers.nvme
        self._doors = doors
        self.loop_lag = loop_lag
        self._facts = facts

    def take(self) -> list[Reading]:
        """All figures of now. They belong together: nothing runs in between."""
        return [
            *self._daemon(),
            *self._reads(),
            *self._commits(),
            *self._tier(self._ram.stats()),
            *nvme_readings(self._nvme, self._service.manager.residency.held[TierId.NVME]),
            *self._foreseen(),
            *self._index(),
            *self._clients(),
            *self._remote(),
            *self._rpc(),
        ]

    def _daemon(self) -> Iterator[Reading]:
        facts = self._facts
        yield Reading("kvkeep_build_info", facts.build, 1)
        yield Reading("kvkeep_config_info", facts.config, 1)
        for name, limit in facts.limits.items():
            yield Reading(name, (), limit)
        yield Reading("kvkeep_serving", (), int(self.serving))
        yield Reading("kvkeep_event_loop_lag_seconds", (), self.loop_lag.value())

    def _reads(self) -> Iterator[Reading]:
        for call, counts in self._service.manager.counts.by_call().items():
            name = value_of(call)
            yield Reading("kvkeep_reads_total", (name,), counts.calls)
            yield Reading("kvkeep_blocks_asked_total", (name,), counts.asked)
            for tier, blocks in counts.hits.items():
                yield Reading("kvkeep_blocks_hit_total", (name, value_of(tier)), blocks)
            for reason, blocks in counts.misses.items():
                yield Reading("kvkeep_blocks_missed_total", (name, value_of(reason)), blocks)
            yield Reading("kvkeep_blocks_failed_total", (name,), counts.failed)

    def _commits(self) -> Iterator[Reading]:
        counts = self._service.commits.counts
        yield Reading("kvkeep_commits_total", (), counts.commits)
        for status in CommitStatus:
            if status is not CommitStatus.UNSPECIFIED:
                blocks = int(counts.by_status[status])
                yield Reading("kvkeep_commit_blocks_total", (value_of(status),), blocks)
        yield Reading("kvkeep_commit_stored_bytes_total", (), counts.stored_nbytes)
        yield Reading("kvkeep_commits_running", (), self._service.commits_running)

    def _tier(self, pool: RamStats) -> Iterator[Reading]:
        residency = self._service.manager.residency
        tier = (value_of(self._ram.tier_id),)
        ages = residency.held[TierId.RAM].evicted_ages.value()
        reuse = residency.reuse_ages.value()
        yield Reading("kvkeep_block_age_at_eviction_seconds", tier, ages)
        yield Reading("kvkeep_block_reuse_age_seconds", tier, reuse)
        for reason, blocks in residency.left.items():
            if reason is not MissReason.UNSPECIFIED:
                yield Reading("kvkeep_blocks_left_total", (*tier, value_of(reason)), blocks)
        yield Reading("kvkeep_blocks_demoted_total", (), residency.held[TierId.RAM].demoted)
        yield Reading("kvkeep_tier_blocks", tier, residency.held[TierId.RAM].blocks)
        yield Reading("kvkeep_tier_payload_bytes", tier, residency.payload_nbytes)
        yield Reading("kvkeep_tier_used_bytes", tier, pool.used_nbytes)
        yield Reading("kvkeep_tier_limit_bytes", tier, pool.limit_nbytes)
        for state, nbytes in (
            (PoolState.USED, pool.used_nbytes),
            (PoolState.FREE, pool.free_nbytes),
            (PoolState.UNCUT, pool.uncut_nbytes),
            (PoolState.TAIL, pool.tail_nbytes),
            (PoolState.HEADER, pool.header_nbytes),
        ):
            yield Reading("kvkeep_pool_bytes", (value_of(state),), nbytes)
        yield Reading("kvkeep_pool_padding_bytes", (), pool.padding_nbytes)
        yield Reading("kvkeep_pool_chunks", (), pool.chunks)
        yield Reading("kvkeep_pool_huge_chunks", (), pool.huge_chunks)
        yield Reading("kvkeep_pool_growth_refused", (), int(bool(pool.growth_refused)))

    def _foreseen(self) -> Iterator[Reading]:
        foresight = self._service.manager.residency.foresight
        for foreseen in Foreseen:
            keys = getattr(foresight, foreseen)
            yield Reading("kvkeep_prefetch_foreseen_total", (foreseen,), keys)

    def _index(self) -> Iterator[Reading]:
        residency = self._service.manager.residency
        table = residency.table
        for state, rows in (
            (RowState.LIVE, table.live_rows),
            (RowState.FREE, table.geometry.rows - table.live_rows),
        ):
            yield Reading("kvkeep_index_rows", (value_of(state),), rows)
        yield Reading("kvkeep_index_bytes", (), residency.index_nbytes)
        yield Reading("kvkeep_index_rebuilds_total", (), residency.rebuilds_total)
        yield Reading("kvkeep_index_collisions_total", (), residency.collisions_total)

    def _clients(self) -> Iterator[Reading]:
        service, handover = self._service, self._doors.handover
        sessions, leases = service.sessions, service.manager.leases
        yield Reading("kvkeep_sessions", (), len(sessions))
        yield Reading("kvkeep_sessions_opened_total", (), sessions.opened_total)
        yield Reading("kvkeep_sessions_ended_total", (), sessions.ended_total)
        yield Reading("kvkeep_staging_bytes", (), sessions.staging_nbytes)
        yield Reading("kvkeep_namespaces", (), len(service.namespaces))
        for mode, sets in service.control.count().items():
            yield Reading("kvkeep_namespaces_restricted", (value_of(mode),), sets)
        advanced = service.namespaces.epochs.advanced_total
        yield Reading("kvkeep_epochs_advanced_total", (), advanced)
        yield Reading("kvkeep_leases", (), len(leases))
        yield Reading("kvkeep_leased_bytes", (), leases.leased_nbytes)
        yield Reading("kvkeep_leases_expired_total", (), leases.expired_total)
        yield from self._pins()
        changes = service.manager.changes
        yield Reading("kvkeep_watchers", (), changes.watchers)
        yield Reading("kvkeep_watch_gaps_total", (), changes.gaps_total)
        yield Reading("kvkeep_touch_records_lost_total", (), service.touches.lost)
        yield Reading("kvkeep_touch_records_invalid_total", (), service.touches.invalid)
        yield Reading("kvkeep_handovers_refused_total", (), handover.refused_total)
        yield Reading("kvkeep_handovers_dropped_total", (), handover.dropped_total)

    def _pins(self) -> Iterator[Reading]:
        pins = self._service.manager.pins
        yield Reading("kvkeep_pins", (), len(pins))
        yield Reading("kvkeep_pinned_bytes", (), pins.nbytes)
        yield Reading("kvkeep_pins_refused_total", (), pins.counts.refused)
        yield Reading("kvkeep_pins_expired_total", (), pins.counts.expired)

    def _remote(self) -> Iterator[Reading]:
        counts = self._doors.streams.counts
        yield Reading("kvkeep_remote_sessions", (), self._service.sessions.remote)
        yield Reading("kvkeep_remote_streams", (), self._doors.streams.running)
        yield Reading("kvkeep_remote_streams_held", (), self._doors.streams.held)
        yield Reading("kvkeep_remote_streams_refused_total", (), counts.refused)
        yield Reading("kvkeep_remote_streams_stalled_total", (), counts.stalled)
        yield Reading("kvkeep_remote_read_bytes_total", (), counts.read_nbytes)
        yield Reading("kvkeep_remote_written_bytes_total", (), counts.written_nbytes)

    def _rpc(self) -> Iterator[Reading]:
        for (method, code), calls in self._doors.calls.ended.items():
            yield Reading("kvkeep_rpc_requests_total", (method, code), calls)
        for (method, ok), seconds in self._doors.calls.durations.items():
            outcome = "ok" if ok else "error"
            yield Reading("kvkeep_rpc_duration_seconds", (method, outcome), seconds.value())
