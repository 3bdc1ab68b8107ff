"""What `kvkeep stats` prints: the daemon's numbers as lines of text, or as one JSON object."""

from collections.abc import Sequence

from kvkeep.v1 import admin_pb2 as pb
from kvkeep.v1 import block_cache_pb2
from kvkeep.v1.namespace_pb2 import NAMESPACE_MODE_NORMAL, NAMESPACE_MODE_UNSPECIFIED
from kvkeep_server.cli.namespace_mode import mode_name
from kvkeep_server.core.quantities import show_size

_NORMAL = (NAMESPACE_MODE_NORMAL, NAMESPACE_MODE_UNSPECIFIED)
Since = tuple[float, pb.StatsResponse]
# A look-up in shared memory does not tell the daemon which key it missed.
_NOT_TOLD = "unknown"
_NAMESPACES_SHOWN = 20
_TEXT = """\
kvkeep {stats.version}, up {up}, {where}
ram         {pool.blocks:,} blocks, {payload} stored
            {used} of {limit} in use ({share:.0%}), {taken} taken in {pool.chunks} chunks{nvme}
index       {index.rows:,} rows, {index_size}, {index.rebuilds} rebuilds
leases      {stats.leases:,} live, {leased} leased; {stats.leases_expired_total:,} expired
pins        {stats.pins:,} hold {pinned} of {pinned_limit} that may be pinned
sessions    {stats.sessions:,} attached, {stats.sessions_ended_total:,} ended
asked       {stats.blocks_asked_total:,} blocks in {stats.lookups_total:,} look-ups \
and {stats.acquires_total:,} acquires
hit         {stats.blocks_hit_total:,} ({hit_ratio:.1%})
missed      {stats.blocks_missed_total:,}{misses}
stored      {stats.blocks_stored_total:,} blocks, {stored}; \
{stats.blocks_already_stored_total:,} were there, {stats.blocks_refused_total:,} refused, \
{stats.blocks_failed_total:,} failed
left        {stats.blocks_evicted_total:,} evicted, {stats.blocks_removed_total:,} removed, \
{stats.blocks_corrupt_total:,} corrupt"""
_RATES = """\
a second    {asked:,.0f} blocks asked, {hit_ratio:.1%} hit, {blocks:,.0f} stored ({nbytes}), \
{evicted:,.0f} evicted"""


def as_text(
    runtime_dir: str,
    stats: pb.StatsResponse,
    namespaces: Sequence[pb.NamespaceInfo],
    since: Since | None = None,
) -> str:
    """Lines for a reader.

    Args:
        runtime_dir: Where the daemon serves.
        stats: Now.
        namespaces: All; the largest are shown.
        since: Seconds since an earlier look, and what it saw: adds a line of rates.
    """
    pool, index = stats.pool, stats.index
    text = _TEXT.format(
        stats=stats,
        pool=pool,
        index=index,
        where=runtime_dir,
        nvme=_nvme(stats),
        up=_duration(stats.uptime_ms / 1000),
        payload=show_size(pool.payload_nbytes),
        used=show_size(pool.slot_nbytes_used),
        limit=show_size(pool.limit_nbytes),
        share=pool.slot_nbytes_used / max(1, pool.limit_nbytes),
        taken=show_size(pool.chunk_nbytes),
        leased=show_size(pool.leased_nbytes),
        pinned=show_size(stats.pinned_nbytes),
        pinned_limit=show_size(stats.pinned_limit_nbytes),
        index_size=show_size(index.nbytes),
        hit_ratio=stats.blocks_hit_total / max(1, stats.blocks_asked_total),
        misses=_misses(stats),
        stored=show_size(stats.bytes_stored_total),
    )
    parts = [text, *_odd_lines(stats), *(_rate_lines(stats, since) if since else ())]
    return "\n".join([*parts, *_namespace_lines(namespaces)])


def _nvme(stats: pb.StatsResponse) -> str:
    if not stats.HasField("nvme"):
        return ""
    nvme = stats.nvme
    odd = {
        "recovering": nvme.recovering,
        f"{nvme.sick_directories} directories take no writes": nvme.sick_directories,
        f"{nvme.blocks_dropped_total:,} not written for want of room": nvme.blocks_dropped_total,
    }
    said = "".join(f"; {words}" for words, so in odd.items() if so)
    return (
        f"\nnvme        {nvme.blocks:,} blocks, {show_size(nvme.payload_nbytes)} stored\n"
        f"            {show_size(nvme.used_nbytes)} of {show_size(nvme.limit_nbytes)} in use, "
        f"{nvme.blocks_hit_total:,} hits, {nvme.queued_blocks:,} waiting{said}"
    )


def _misses(stats: pb.StatsResponse) -> str:
    return "".join(
        f"\n            {one.blocks:,} {_reason(one.reason)}"
        for one in sorted(stats.misses, key=lambda one: -one.blocks)
    )


def _odd_lines(stats: pb.StatsResponse) -> list[str]:
    odd = {
        "key collisions": stats.collisions_total,
        "touch records lost": stats.touch_records_lost_total,
        "touch records invalid": stats.touch_records_invalid_total,
    }
    named = ", ".join(f"{count:,} {name}" for name, count in odd.items() if count)
    return [f"odd         {named}"] if named else []


def _rate_lines(now: pb.StatsResponse, since: Since) -> list[str]:
    seconds, before = since
    if before.server_epoch != now.server_epoch:
        return ["a second    the daemon was restarted"]

    def rate(name: str) -> float:
        return float(getattr(now, name) - getattr(before, name)) / max(1e-9, seconds)

    asked = rate("blocks_asked_total")
    line = _RATES.format(
        asked=asked,
        hit_ratio=rate("blocks_hit_total") / max(1e-9, asked),
        blocks=rate("blocks_stored_total"),
        nbytes=show_size(int(rate("bytes_stored_total"))),
        evicted=rate("blocks_evicted_total"),
    )
    return [line]


def _namespace_lines(namespaces: Sequence[pb.NamespaceInfo]) -> list[str]:
    largest = sorted(namespaces, key=lambda one: -one.payload_nbytes)
    lines = [f"namespaces  {len(namespaces)}, the largest first"]
    for one in largest[:_NAMESPACES_SHOWN]:
        spec = one.spec
        # Names come from clients: what is not printable must not reach a terminal.
        name = "/".join(filter(None, (spec.tenant, spec.model, spec.engine, spec.kv_dtype)))
        shown = "".join(c if c.isprintable() else "?" for c in name)
        size = show_size(one.payload_nbytes)
        held = f"{size:>9} {one.blocks:>12,} blocks {len(one.ranks):>3} ranks"
        odd = "" if one.mode in _NORMAL else f"  [{mode_name(one.mode)}]"
        lines.append(f"  {one.set_id.hex()[:12]} {held}  {shown}{odd}")
    if len(largest) > _NAMESPACES_SHOWN:
        lines.append(f"  and {len(largest) - _NAMESPACES_SHOWN} more: --json lists all")
    return lines


def _reason(reason: "block_cache_pb2.MissReason.ValueType") -> str:
    if reason == block_cache_pb2.MISS_REASON_UNSPECIFIED:
        return _NOT_TOLD
    name: str = block_cache_pb2.MissReason.Name(reason)
    return name.removeprefix("MISS_REASON_").lower().replace("_", " ")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def as_dict(stats: pb.StatsResponse, namespaces: Sequence[pb.NamespaceInfo]) -> dict[str, object]:
    """All numbers, with the names that they have in `admin.proto`; `hit_ratio` beside them."""
    plain: dict[str, object] = {
        field.name: getattr(stats, field.name)
        for field in stats.DESCRIPTOR.fields
        if field.name not in {"pool", "index", "misses", "nvme"}
    }
    for name in ("pool", "index", *(("nvme",) if stats.HasField("nvme") else ())):
        part = getattr(stats, name)
        plain[name] = {field.name: getattr(part, field.name) for field in part.DESCRIPTOR.fields}
    plain["misses"] = {_reason(one.reason): one.blocks for one in stats.misses}
    plain["hit_ratio"] = stats.blocks_hit_total / max(1, stats.blocks_asked_total)
    plain["namespaces"] = [
        {
            "set_id": one.set_id.hex(),
            "tenant": one.spec.tenant,
            "model": one.spec.model,
            "engine": one.spec.engine,
            "kv_dtype": one.spec.kv_dtype,
            "namespace_epoch": one.spec.namespace_epoch,
            "ranks": list(one.ranks),
            "blocks": one.blocks,
            "payload_nbytes": one.payload_nbytes,
            "mode": mode_name(one.mode),
        }
        for one in namespaces
    ]
    return plain
