"""What `kvkeep replay` says: while it runs, at its end, and to a machine."""

from kvkeep_server.cli.replay_totals import STEPS, Latencies, Totals
from kvkeep_server.core.quantities import show_size

_PERCENTILES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (1.0, "max"))
_COUNTS = (
    "requests",
    "blocks_asked",
    "blocks_hit",
    "blocks_from_nvme",
    "blocks_missed",
    "blocks_verified",
    "blocks_unchecked",
    "blocks_wrong",
    "blocks_stored",
    "blocks_refused",
    "leases_lost",
    "calls_refused",
    "deadlines_missed",
    "tokens_saved",
    "nbytes_read",
    "nbytes_stored",
)
_TEXT = """\
requests    {totals.requests:,} in {seconds:.1f} s; {totals.calls_refused:,} met a limit, \
{totals.deadlines_missed:,} a deadline, {totals.leases_lost:,} lost their lease
asked       {totals.blocks_asked:,} blocks
hit         {totals.blocks_hit:,} as a prefix ({totals.hit_ratio:.1%}): \
{totals.tokens_saved:,} tokens saved; {totals.blocks_from_nvme:,} came from nvme
missed      {totals.blocks_missed:,}
stored      {totals.blocks_stored:,}; {totals.blocks_refused:,} refused
bytes       {read} read, {stored} stored
checked     {totals.blocks_verified:,} blocks, {totals.blocks_wrong:,} wrong; \
{totals.blocks_unchecked:,} not checked"""


def rows(totals: Totals) -> list[tuple[str, str]]:
    """For the table that is shown while it runs."""
    return [
        ("hit ratio", f"{totals.hit_ratio:.1%}"),
        ("tokens saved", f"{totals.tokens_saved:,}"),
        ("blocks asked", f"{totals.blocks_asked:,}"),
        ("hit", f"{totals.blocks_hit:,}"),
        ("of them from nvme", f"{totals.blocks_from_nvme:,}"),
        ("stored", f"{totals.blocks_stored:,}"),
        ("refused", f"{totals.blocks_refused:,}"),
        ("read", show_size(totals.nbytes_read)),
        ("wrong", f"{totals.blocks_wrong:,} blocks"),
        *(
            (f"{step} p50 / p99", _pair(totals.latencies[step]))
            for step in STEPS
            if totals.latencies[step].count
        ),
    ]


def as_text(totals: Totals, seconds: float) -> str:
    """The report for a reader."""
    head = _TEXT.format(
        totals=totals,
        seconds=seconds,
        read=show_size(totals.nbytes_read),
        stored=show_size(totals.nbytes_stored),
    )
    return "\n".join([head, *(_line(step, totals.latencies[step]) for step in STEPS)])


def as_dict(totals: Totals, seconds: float) -> dict[str, object]:
    """The report for a machine; latencies in milliseconds."""
    return {
        **{name: getattr(totals, name) for name in _COUNTS},
        "seconds": round(seconds, 3),
        "hit_ratio": round(totals.hit_ratio, 6),
        "latency_ms": {step: _milliseconds(totals.latencies[step]) for step in STEPS},
    }


def _line(step: str, latencies: Latencies) -> str:
    values = "  ".join(
        f"{name} {latencies.percentile_s(share) * 1000:.2f} ms" for share, name in _PERCENTILES
    )
    return f"{step:<12}{values}  ({latencies.count:,} times)"


def _pair(latencies: Latencies) -> str:
    half, most = latencies.percentile_s(0.5), latencies.percentile_s(0.99)
    return f"{half * 1000:.2f} / {most * 1000:.2f} ms"


def _milliseconds(latencies: Latencies) -> dict[str, float]:
    values = {name: round(latencies.percentile_s(share) * 1000, 4) for share, name in _PERCENTILES}
    return {"count": latencies.count, **values}
