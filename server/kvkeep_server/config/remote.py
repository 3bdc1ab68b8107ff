"""Settings of clients on other hosts."""

from dataclasses import dataclass

from kvkeep_server.config.keys import PAGE_NBYTES, TiB, setting
from kvkeep_server.core.settings_kinds import AUTO, Duration, Flag, Listen, Size, Whole


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """Clients on other hosts: gRPC over TCP, the bytes in it."""

    listen: str = setting(
        "listen",
        Listen(),
        "",
        "Where the daemon listens for them; empty: nowhere. Whoever reaches it may read and store:"
        " there is no encryption and no authentication yet.",
    )
    insecure_beyond_loopback: bool = setting(
        "insecure_beyond_loopback",
        Flag(),
        False,  # noqa: FBT003 - a default
        "Whether `remote.listen` may be an address that other hosts reach, in plain text. For"
        " networks that only trusted hosts are in.",
    )
    sessions_max: int = setting(
        "sessions_max",
        Whole(1, 65536),
        64,
        "Of `sessions.sessions_max`, those that clients on other hosts may have.",
    )
    staging_total_nbytes_max: int = setting(
        "staging_total_max",
        Size(PAGE_NBYTES, TiB, PAGE_NBYTES, auto="half of sessions.staging_total_max"),
        AUTO,
        "Of `sessions.staging_total_max`, what their staging rings may take, which lie here.",
    )
    streams_max: int = setting(
        "streams_max",
        Whole(1, 256),
        16,
        "`Read` and `Write` streams at a time, of all of them; each holds up to 4 MiB beside the"
        " staging rings. Who asks for more than a fair share is told to come again; the last"
        " quarter is for clients that have none.",
    )
    session_streams_max: int = setting(
        "session_streams_max", Whole(1, 256), 4, "Of these, streams of one client."
    )
    stall_timeout_s: float = setting(
        "stall_timeout",
        Duration(0.5, 60),
        "10s",
        "A client that takes or sends nothing on an open stream for so long is ended; after 3 s if"
        " others wait for a stream.",
    )
