"""What the nvme tier and the ways to and from it say, as readings; all 0 where there is none."""

from collections.abc import Iterator

from kvkeep_server.core.results import MissReason, TierId
from kvkeep_server.metrics.catalog import Demoted, LogEvent, Promoted, SegmentKind
from kvkeep_server.metrics.hint_values import Prefetched
from kvkeep_server.metrics.metric import Reading, value_of
from kvkeep_server.tiering.held import Held
from kvkeep_server.tiering.nvme_side import NvmeSide
from kvkeep_server.tiers.nvme.directory import Counts
from kvkeep_server.tiers.nvme.segments import SegmentState

_TIER = (value_of(TierId.NVME),)


def nvme_readings(side: NvmeSide | None, held: Held) -> Iterator[Reading]:
    """Everything of this tier; `held` is what it holds."""
    ages = held.evicted_ages.value()
    yield Reading("kvkeep_block_age_at_eviction_seconds", _TIER, ages)
    for reason, blocks in held.left.items():
        if reason is not MissReason.UNSPECIFIED:
            yield Reading("kvkeep_blocks_left_total", (*_TIER, value_of(reason)), blocks)
    yield Reading("kvkeep_tier_blocks", _TIER, held.blocks)
    yield Reading("kvkeep_tier_payload_bytes", _TIER, held.nbytes)
    yield from _ways(side)
    yield from _log(side)


def _ways(side: NvmeSide | None) -> Iterator[Reading]:
    demotion, promotion = (side.demotion, side.promotion) if side else (None, None)
    yield Reading("kvkeep_demotion_queue_blocks", (), demotion.queued_blocks if demotion else 0)
    yield Reading("kvkeep_demotion_queue_bytes", (), demotion.queued_nbytes if demotion else 0)
    limit = demotion.limits.nbytes_max if demotion else 0
    yield Reading("kvkeep_demotion_queue_limit_bytes", (), limit)
    for demoted in Demoted:
        count = getattr(demotion.counts, demoted) if demotion else 0
        yield Reading("kvkeep_demotion_blocks_total", (demoted,), count)
    for promoted in Promoted:
        count = getattr(promotion.counts, promoted) if promotion else 0
        yield Reading("kvkeep_promotion_blocks_total", (promoted,), count)
    nbytes = promotion.counts.nbytes if promotion else 0
    yield Reading("kvkeep_promotion_bytes_total", (), nbytes)
    yield Reading("kvkeep_promotion_units", (), promotion.in_flight if promotion else 0)
    prefetching = side.prefetching if side else None
    for prefetched in Prefetched:
        keys = getattr(prefetching.counts, prefetched) if prefetching else 0
        yield Reading("kvkeep_prefetch_keys_total", (prefetched,), keys)
    nbytes = prefetching.queued_nbytes if prefetching else 0
    yield Reading("kvkeep_prefetch_queue_bytes", (), nbytes)
    limit = prefetching.facts.nbytes_max if prefetching else 0
    yield Reading("kvkeep_prefetch_queue_limit_bytes", (), limit)


def _log(side: NvmeSide | None) -> Iterator[Reading]:
    stats = side.tier.stats() if side else None
    counts, directories = (stats.counts, stats.directories) if stats else (Counts(), ())
    yield Reading("kvkeep_tier_used_bytes", _TIER, sum(d.used_nbytes for d in directories))
    yield Reading("kvkeep_tier_limit_bytes", _TIER, sum(d.max_nbytes for d in directories))
    yield Reading("kvkeep_nvme_payload_bytes_total", (), counts.user_nbytes)
    yield Reading("kvkeep_nvme_written_bytes_total", (), counts.disk_nbytes)
    for event in LogEvent:
        yield Reading("kvkeep_nvme_events_total", (event,), getattr(counts, event))
    for kind in SegmentKind:
        state = SegmentState[kind.name]
        number = sum(d.segments.get(state, 0) for d in directories)
        yield Reading("kvkeep_nvme_segments", (kind,), number)
    yield Reading("kvkeep_nvme_sick_directories", (), sum(bool(d.sick) for d in directories))
    yield Reading("kvkeep_nvme_recovering", (), int(side is not None and not side.recovery.done))
