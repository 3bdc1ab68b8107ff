"""Every metric: its name, type, meaning and labels. What is not here cannot be exposed.

Label values come from enums and fixed lists only, so the number of series is bounded whoever calls
and whatever they send; `series_max` is that bound. Names of models, tenants or namespaces are never
labels.
"""

from collections.abc import Mapping
from enum import StrEnum

from kvkeep_server.core.histogram import AGE_BOUNDS_S, DURATION_BOUNDS_S
from kvkeep_server.core.results import CommitStatus, MissReason, NamespaceMode, TierId
from kvkeep_server.metrics.hint_values import Foreseen, Prefetched
from kvkeep_server.metrics.metric import Label, Metric, MetricKind, label_of
from kvkeep_server.metrics.rpc_names import RPC_CODES, RPC_METHODS
from kvkeep_server.tiering.manager import ReadCall


class PoolState(StrEnum):
    """What a byte of the pool's memory is; each is one of them."""

    USED = "used"
    FREE = "free"
    UNCUT = "uncut"
    TAIL = "tail"
    HEADER = "header"


class RowState(StrEnum):
    """What a row of the index is."""

    LIVE = "live"
    FREE = "free"


class Demoted(StrEnum):
    """What became of blocks on their way to nvme; names as in `tiering.demotion`."""

    WRITTEN = "written"
    DROPPED = "dropped"
    FAILED = "failed"


class Promoted(StrEnum):
    """What became of blocks on their way from nvme; names as in `tiering.promotion`."""

    READ = "read"
    CORRUPT = "corrupt"
    MISSED = "missed"
    REFUSED = "refused"


class LogEvent(StrEnum):
    """What happened in the logs of the nvme tier; names as in `tiers.nvme.directory`."""

    REINSERTED = "reinserted"
    RECLAIMED = "reclaimed"
    TOMBSTONES = "tombstones"
    TOMBSTONES_LOST = "tombstones_lost"
    SYNCS = "syncs"
    CORRUPT = "corrupt"
    LOST = "lost"
    REINSERT_FAILED = "reinsert_failed"
    READ_ERRORS = "read_errors"
    WRITE_ERRORS = "write_errors"
    THROTTLED = "throttled"
    QUARANTINED = "quarantined"
    VANISHED = "vanished"
    UNLINK_ERRORS = "unlink_errors"
    RECOVERED = "recovered"


class SegmentKind(StrEnum):
    """What a segment of the nvme tier is; names as in `tiers.nvme.segments`."""

    FOUND = "found"
    ACTIVE = "active"
    SEALED = "sealed"
    QUARANTINED = "quarantined"
    SKIPPED = "skipped"


_CALL = label_of("call", ReadCall)
_TIER = label_of("tier", (tier for tier in TierId if tier is not TierId.UNSPECIFIED))
_REASON = label_of("reason", MissReason)
_STATUS = label_of("status", (s for s in CommitStatus if s is not CommitStatus.UNSPECIFIED))
_METHOD = Label("method", RPC_METHODS)
_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

_DAEMON = (
    Metric(
        "kvkeep_build_info",
        _GAUGE,
        "Always 1; which release runs, on which Python.",
        (Label("version", ()), Label("python", ())),
    ),
    Metric(
        "kvkeep_config_info",
        _GAUGE,
        "Always 1; the settings that name something.",
        (Label("policy", ()), Label("admission", ()), Label("huge_pages", ())),
    ),
    Metric(
        "kvkeep_serving", _GAUGE, "1 while the daemon takes calls, 0 while it starts or drains."
    ),
    Metric(
        "kvkeep_event_loop_lag_seconds",
        _HISTOGRAM,
        "How late the event loop woke from a sleep of 50 ms: what every call waits beside its own"
        " work.",
        bounds=DURATION_BOUNDS_S,
    ),
    Metric(
        "kvkeep_snapshot_age_seconds",
        _GAUGE,
        "Age of the figures on this page. Above 2 s the event loop does not answer, and the page"
        " repeats the last it gave.",
    ),
    Metric(
        "kvkeep_scrapes_dropped_total",
        _COUNTER,
        "Connections to this endpoint that were closed unanswered: too slow, too long, or pushed"
        " out by newer ones.",
    ),
    Metric(
        "kvkeep_memory_limit_bytes",
        _GAUGE,
        "Memory that the daemon may use: the smallest limit of its cgroups and the host, at its"
        " start.",
    ),
    Metric(
        "kvkeep_process_anonymous_bytes",
        _GAUGE,
        "Resident memory that is neither pool, index nor staging: what the daemon itself takes.",
    ),
    Metric(
        "process_resident_memory_bytes",
        _GAUGE,
        "Resident memory, the shared pool included.",
    ),
    Metric("process_virtual_memory_bytes", _GAUGE, "Addresses in use."),
    Metric("process_cpu_seconds_total", _COUNTER, "Processor time, user and system."),
    Metric("process_start_time_seconds", _GAUGE, "Start of the process since the epoch."),
    Metric("process_open_fds", _GAUGE, "Open descriptors; a session takes a handful."),
    Metric("process_max_fds", _GAUGE, "Most descriptors that may be open."),
)

_READS = (
    Metric(
        "kvkeep_reads_total",
        _COUNTER,
        "Look-ups (in shared memory or by call) and acquires. An engine that looks up and then"
        " acquires is counted under both.",
        (_CALL,),
    ),
    Metric(
        "kvkeep_blocks_asked_total",
        _COUNTER,
        "Blocks that reads asked for: hit + missed + failed, at any time.",
        (_CALL,),
    ),
    Metric(
        "kvkeep_blocks_hit_total",
        _COUNTER,
        "Of them: in the usable prefix, by the tier that has them.",
        (_CALL, _TIER),
    ),
    Metric(
        "kvkeep_blocks_missed_total",
        _COUNTER,
        "Of them: behind the usable prefix, by the reason why it ended. `unspecified`: the client"
        " looked in shared memory, where no reason is known. `no_room`: ram had none for it.",
        (_CALL, _REASON),
    ),
    Metric(
        "kvkeep_blocks_failed_total",
        _COUNTER,
        "Of them: in calls that ended in an error.",
        (_CALL,),
    ),
    Metric(
        "kvkeep_block_reuse_age_seconds",
        _HISTOGRAM,
        "Time since its last use of a block that is used again. A look-up and the acquire after it"
        " are two uses.",
        (_TIER,),
        AGE_BOUNDS_S,
    ),
)

_COMMITS = (
    Metric("kvkeep_commits_total", _COUNTER, "Commits that ended."),
    Metric(
        "kvkeep_commit_blocks_total",
        _COUNTER,
        "Blocks that commits brought, by what became of each.",
        (_STATUS,),
    ),
    Metric("kvkeep_commit_stored_bytes_total", _COUNTER, "Payload bytes that were stored."),
    Metric("kvkeep_commits_running", _GAUGE, "Commits that run now."),
    Metric("kvkeep_commits_running_limit", _GAUGE, "`limits.commits_running_max`."),
)

_TIERS = (
    Metric(
        "kvkeep_block_age_at_eviction_seconds",
        _HISTOGRAM,
        "Time since its last use of a block that was evicted to make room: each of its tier's"
        " `kvkeep_blocks_left_total`, in ram those that stay on nvme too. Below the retention that"
        " you want: buy memory.",
        (_TIER,),
        AGE_BOUNDS_S,
    ),
    Metric(
        "kvkeep_blocks_left_total",
        _COUNTER,
        "Blocks that were in the tier and are not any more, by why: evicted, removed, corrupt,"
        " namespace_mismatch (their epoch is over).",
        (_TIER, _REASON),
    ),
    Metric("kvkeep_tier_blocks", _GAUGE, "Blocks in the tier.", (_TIER,)),
    Metric("kvkeep_tier_payload_bytes", _GAUGE, "What clients stored in it.", (_TIER,)),
    Metric(
        "kvkeep_tier_used_bytes", _GAUGE, "Room that its blocks take, padding included.", (_TIER,)
    ),
    Metric("kvkeep_tier_limit_bytes", _GAUGE, "Most that it may take.", (_TIER,)),
    Metric(
        "kvkeep_pool_bytes",
        _GAUGE,
        "Memory of the ram tier: slots in use, slots that are free, slabs never cut, ends of slabs,"
        " headers. Their sum is what the pool has taken.",
        (label_of("state", PoolState),),
    ),
    Metric(
        "kvkeep_pool_padding_bytes", _GAUGE, "Bytes of used slots that their blocks do not fill."
    ),
    Metric("kvkeep_pool_chunks", _GAUGE, "Chunks of the pool."),
    Metric("kvkeep_pool_huge_chunks", _GAUGE, "Of them: backed by huge pages."),
    Metric(
        "kvkeep_pool_growth_refused",
        _GAUGE,
        "1 if the pool is below its limit and the last try to grow found no memory.",
    ),
)

_NVME = (
    Metric(
        "kvkeep_blocks_demoted_total",
        _COUNTER,
        "Blocks that left ram and are on nvme still. Those that left altogether are in"
        " `kvkeep_blocks_left_total`.",
    ),
    Metric("kvkeep_demotion_queue_blocks", _GAUGE, "Blocks that wait to be written to nvme."),
    Metric("kvkeep_demotion_queue_bytes", _GAUGE, "Their payload."),
    Metric("kvkeep_demotion_queue_limit_bytes", _GAUGE, "`nvme.queue`."),
    Metric(
        "kvkeep_demotion_blocks_total",
        _COUNTER,
        "Blocks that were to be written to nvme. `dropped`: the queue was full, so they are in ram"
        " only, until it is empty; many mean that the device is too slow for what is stored."
        " `failed`: nvme did not take them; they are offered again later.",
        (Label("demoted", tuple(Demoted)),),
    ),
    Metric(
        "kvkeep_promotion_blocks_total",
        _COUNTER,
        "Blocks that acquires wanted from nvme. `refused`: no room in ram, or nvme too busy or too"
        " sick.",
        (Label("promoted", tuple(Promoted)),),
    ),
    Metric("kvkeep_promotion_bytes_total", _COUNTER, "Payload that came from nvme into ram."),
    Metric("kvkeep_promotion_units", _GAUGE, "Keys whose blocks are on their way into ram."),
    Metric(
        "kvkeep_prefetch_keys_total",
        _COUNTER,
        "Keys that hints named and that were not in ram. `refused`: too many hints wait; those that"
        " were planned were brought in the end, or failed, or expired.",
        (Label("prefetched", tuple(Prefetched)),),
    ),
    Metric(
        "kvkeep_prefetch_foreseen_total",
        _COUNTER,
        "Keys that hints brought into ram: used later, or gone from there before. Many that are"
        " wasted: hints are wrong or too early; `nvme.prefetch` turns them off.",
        (Label("foreseen", tuple(Foreseen)),),
    ),
    Metric("kvkeep_prefetch_queue_bytes", _GAUGE, "Blocks that wait to be brought for hints."),
    Metric("kvkeep_prefetch_queue_limit_bytes", _GAUGE, "`nvme.prefetch_max`."),
    Metric(
        "kvkeep_nvme_payload_bytes_total",
        _COUNTER,
        "Payload of blocks that came to nvme, again when they had been let go.",
    ),
    Metric(
        "kvkeep_nvme_written_bytes_total",
        _COUNTER,
        "Bytes that went to the devices, all told: by the payload, the write amplification.",
    ),
    Metric(
        "kvkeep_nvme_events_total",
        _COUNTER,
        "What happened in the log: records, segments (reclaimed, quarantined, vanished) or jobs.",
        (Label("event", tuple(LogEvent)),),
    ),
    Metric(
        "kvkeep_nvme_segments",
        _GAUGE,
        "Segment files. `quarantined` after an error of the device, `skipped` because nothing of"
        " them can be used.",
        (Label("segment", tuple(SegmentKind)),),
    ),
    Metric("kvkeep_nvme_sick_directories", _GAUGE, "Directories that take no writes now."),
    Metric(
        "kvkeep_nvme_recovering",
        _GAUGE,
        "1 while what an earlier daemon left is put into the index.",
    ),
)

_INDEX = (
    Metric("kvkeep_index_rows", _GAUGE, "Rows of the index.", (label_of("row_state", RowState),)),
    Metric("kvkeep_index_bytes", _GAUGE, "Memory of the index and of what policies keep."),
    Metric("kvkeep_index_rebuilds_total", _COUNTER, "Times that the index moved to a new table."),
    Metric(
        "kvkeep_index_collisions_total",
        _COUNTER,
        "Keys whose fingerprint another key has; each was a miss. Nearly always 0.",
    ),
)

_CLIENTS = (
    Metric("kvkeep_sessions", _GAUGE, "Attached clients."),
    Metric("kvkeep_sessions_limit", _GAUGE, "`sessions.sessions_max`."),
    Metric("kvkeep_sessions_opened_total", _COUNTER, "Sessions that began."),
    Metric("kvkeep_sessions_ended_total", _COUNTER, "Sessions that ended, for whatever reason."),
    Metric("kvkeep_staging_bytes", _GAUGE, "Staging rings of all sessions."),
    Metric("kvkeep_staging_limit_bytes", _GAUGE, "`sessions.staging_total_max`."),
    Metric("kvkeep_namespaces", _GAUGE, "Open namespace sets."),
    Metric("kvkeep_namespaces_limit", _GAUGE, "`limits.namespaces_max`."),
    Metric(
        "kvkeep_namespaces_restricted",
        _GAUGE,
        "Namespace sets that are read-only or bypassed: `kvkeep namespace-mode`.",
        (label_of("mode", (NamespaceMode.READ_ONLY, NamespaceMode.BYPASS)),),
    ),
    Metric(
        "kvkeep_epochs_advanced_total",
        _COUNTER,
        "Times that the weights of a namespace set were replaced in place (AdvanceEpoch).",
    ),
    Metric("kvkeep_leases", _GAUGE, "Live leases."),
    Metric("kvkeep_leases_limit", _GAUGE, "`leases.leases_max`."),
    Metric(
        "kvkeep_leased_bytes", _GAUGE, "Payload under live leases; a block counts once a lease."
    ),
    Metric("kvkeep_leases_expired_total", _COUNTER, "Leases that ended by time, not by release."),
    Metric("kvkeep_pins", _GAUGE, "Retention pins."),
    Metric("kvkeep_pins_limit", _GAUGE, "`pins.pins_max`."),
    Metric("kvkeep_pinned_bytes", _GAUGE, "Room in ram that pinned blocks take or would take."),
    Metric("kvkeep_pinned_limit_bytes", _GAUGE, "`pins.max`."),
    Metric("kvkeep_pins_refused_total", _COUNTER, "Pins that would have passed a limit."),
    Metric("kvkeep_pins_expired_total", _COUNTER, "Pins that ended by time, not by Unpin."),
    Metric("kvkeep_watchers", _GAUGE, "Watch streams."),
    Metric("kvkeep_watchers_limit", _GAUGE, "`limits.watchers_max`."),
    Metric(
        "kvkeep_watch_gaps_total",
        _COUNTER,
        "Times that a watcher read too slowly and was told everything again: raise"
        " `limits.watch_blocks`.",
    ),
    Metric(
        "kvkeep_touch_records_lost_total",
        _COUNTER,
        "Look-ups in shared memory whose record was overwritten before it was read: raise"
        " `sessions.touch_records`.",
    ),
    Metric(
        "kvkeep_touch_records_invalid_total",
        _COUNTER,
        "Records that were torn or cannot be. A few are normal, many are a broken client.",
    ),
    Metric(
        "kvkeep_handovers_refused_total",
        _COUNTER,
        "Clients that were told why they cannot attach (version, limit, memory).",
    ),
    Metric(
        "kvkeep_handovers_dropped_total",
        _COUNTER,
        "Connections to the fd socket that were closed because they said no hello in time.",
    ),
)

_REMOTE = (
    Metric("kvkeep_remote_sessions", _GAUGE, "Attached clients on other hosts."),
    Metric("kvkeep_remote_sessions_limit", _GAUGE, "`remote.sessions_max`."),
    Metric("kvkeep_remote_streams", _GAUGE, "Their open `Read` and `Write` streams."),
    Metric(
        "kvkeep_remote_streams_held",
        _GAUGE,
        "Streams beside them that were ended, and stay open until a client that takes nothing takes"
        " the answer, or until their deadline.",
    ),
    Metric("kvkeep_remote_streams_limit", _GAUGE, "`remote.streams_max`."),
    Metric(
        "kvkeep_remote_streams_refused_total",
        _COUNTER,
        "Streams that were told to come again, because of the limits of `[remote]`.",
    ),
    Metric(
        "kvkeep_remote_streams_stalled_total",
        _COUNTER,
        "Streams that were ended because the client took or sent nothing.",
    ),
    Metric("kvkeep_remote_read_bytes_total", _COUNTER, "Payload that went to other hosts."),
    Metric("kvkeep_remote_written_bytes_total", _COUNTER, "Payload that came from other hosts."),
)

_RPC = (
    Metric(
        "kvkeep_rpc_requests_total",
        _COUNTER,
        "Calls that ended, by status code. A code appears with its first call.",
        (_METHOD, Label("code", RPC_CODES)),
    ),
    Metric(
        "kvkeep_rpc_duration_seconds",
        _HISTOGRAM,
        "Time in the daemon of calls without streams, those that ended with OK and others apart.",
        (_METHOD, Label("outcome", ("ok", "error"))),
        DURATION_BOUNDS_S,
    ),
)

# In the order of the reference and of the page.
CATALOG: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        *_DAEMON,
        *_READS,
        *_COMMITS,
        *_TIERS,
        *_NVME,
        *_INDEX,
        *_CLIENTS,
        *_REMOTE,
        *_RPC,
    )
}


def series_max() -> int:
    """Series that a daemon can ever expose."""
    return sum(metric.series_max for metric in CATALOG.values())
