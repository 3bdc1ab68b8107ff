"""Settings of what clients meet."""

from dataclasses import dataclass

from kvkeep_server.config.keys import PAGE_NBYTES, GiB, KiB, MiB, TiB, setting
from kvkeep_server.core.settings_kinds import AUTO, Directory, Duration, Size, SocketMode, Whole


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where the daemon listens."""

    runtime_dir: str = setting(
        "runtime_dir",
        Directory(),
        "",
        "Directory of the sockets, made with mode 0700 where it is missing. Empty:"
        " `$XDG_RUNTIME_DIR/kvkeep`, else `/tmp/kvkeep-<uid>`.",
    )
    socket_mode: int = setting(
        "socket_mode",
        SocketMode(),
        "0660",
        "Permissions of both sockets. Who may connect may read and store, and call Admin.",
    )
    drain_timeout_s: float = setting(
        "drain_timeout",
        Duration(0, 3600),
        "5s",
        "After SIGTERM, SIGINT or SIGHUP: for calls that are under way, then for blocks that are in"
        " ram only to reach nvme. The process ends a second later at most.",
    )


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Attached clients."""

    timeout_s: float = setting(
        "timeout",
        Duration(0.5, 3600),
        "30s",
        "A client that is silent for so long is ended. One that died is noticed at once.",
    )
    staging_nbytes: int = setting(
        "staging",
        Size(PAGE_NBYTES, 64 * GiB, PAGE_NBYTES, auto="64MiB, at most staging_max"),
        AUTO,
        "Staging ring of a session that asks for none in particular.",
    )
    staging_nbytes_max: int = setting(
        "staging_max",
        Size(PAGE_NBYTES, 64 * GiB, PAGE_NBYTES, auto="1GiB, at most staging_total_max"),
        AUTO,
        "Largest staging ring of one session.",
    )
    sessions_max: int = setting("sessions_max", Whole(1, 65536), 256, "Sessions at a time.")
    staging_total_nbytes_max: int = setting(
        "staging_total_max",
        Size(
            PAGE_NBYTES,
            TiB,
            PAGE_NBYTES,
            share=True,
            auto="half of what pool, index and process leave of the memory limit, at most 4GiB",
        ),
        AUTO,
        "Staging rings of all sessions together.",
    )
    touch_records: int = setting(
        "touch_records",
        Whole(64, 1 << 20, power_of_two=True),
        4096,
        "Look-ups that a session's touch ring holds until the daemon drains it (64 bytes each).",
    )


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Leases."""

    ttl_s: float = setting(
        "ttl", Duration(0.1, 86400), "30s", "Life of a lease that asks for none."
    )
    leases_max: int = setting(
        "leases_max", Whole(1, 1 << 24), 65536, "Leases at a time, of all sessions."
    )
    remembered_max: int = setting(
        "remembered_max",
        Whole(0, 1 << 24),
        16384,
        "Expired leases that are remembered, so that a late Renew can tell renewed from lost.",
    )


@dataclass(frozen=True, slots=True)
class PinSettings:
    """Retention pins: chains that clients want kept."""

    nbytes_max: int = setting(
        "max",
        Size(0, 16 * TiB, auto="1/4 of the pool"),
        AUTO,
        "Room in ram that pinned blocks of all clients may take; above it a pin is refused. More"
        " than the pool has leaves none for others.",
    )
    pins_max: int = setting("pins_max", Whole(0, 1 << 20), 4096, "Pins at a time.")
    keep_max_s: float = setting(
        "keep_max",
        Duration(1, 366 * 86400),
        "72h",
        "How long a pin holds at most, and if it names no time. Pins end with the daemon.",
    )


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """Bounds of single calls."""

    keys_max: int = setting("keys_max", Whole(1, 1 << 20), 32768, "Keys in one call.")
    namespaces_max: int = setting(
        "namespaces_max",
        Whole(1, 65536),
        4096,
        "Namespace sets at a time. Where room is short, those leave that no client has open and"
        " that have no blocks.",
    )
    session_namespaces_max: int = setting(
        "session_namespaces_max", Whole(1, 65536), 256, "Namespace sets of one client."
    )
    session_shards_max: int = setting(
        "session_shards_max",
        Whole(1, 65536),
        2048,
        "Local ranks times FULL groups, of all namespace sets of one client. There may be 65536 of"
        " all clients.",
    )
    block_nbytes_max: int = setting(
        "block_max",
        Size(PAGE_NBYTES, 256 * MiB, auto="64MiB, at most one slab"),
        AUTO,
        "Largest block of one group and one rank.",
    )
    message_nbytes_max: int = setting(
        "message_max", Size(64 * KiB, 256 * MiB), "4MiB", "Largest gRPC message, in and out."
    )
    commits_running_max: int = setting(
        "commits_running_max",
        Whole(1, 4096),
        64,
        "Commits at a time; above it: RESOURCE_EXHAUSTED.",
    )
    calls_running_max: int = setting(
        "calls_running_max",
        Whole(1, 1 << 20),
        4096,
        "Calls on gRPC at a time; above it: RESOURCE_EXHAUSTED. Attach is not counted: "
        "there may be two for each of sessions_max.",
    )
    session_calls_running_max: int = setting(
        "session_calls_running_max",
        Whole(1, 1 << 20),
        1024,
        "Of them: of one client. On its call socket 256 run, and more wait there.",
    )
    copy_threads: int = setting("copy_threads", Whole(1, 64), 2, "Threads that copy and checksum.")
    watchers_max: int = setting("watchers_max", Whole(1, 1024), 16, "Watch streams at a time.")
    watch_blocks_max: int = setting(
        "watch_blocks",
        Whole(1, 1 << 24),
        262_144,
        "Changes, in blocks, that are kept for watchers, 100 bytes each while anyone watches. Who"
        " is further behind is told all that there is once more.",
    )
