"""`kvkeep demo`: a recorded hour of coding agents, a daemon of its own, every byte checked."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from itertools import islice
from pathlib import Path

import click
from rich.console import Console

import kvkeep
from kvkeep_server.cli.bench_daemon import DaemonProcess
from kvkeep_server.cli.progress import Progress
from kvkeep_server.cli.replay_engine import Replay, replay_spec
from kvkeep_server.cli.replay_totals import Totals
from kvkeep_server.core.clock import SystemClock
from kvkeep_server.sim.trace import TRACE_BLOCK_TOKENS, Trace, TraceRequest, read_trace

BLOCK_TOKENS = 128
BLOCK_NBYTES = BLOCK_TOKENS * 890  # the global KV of DeepSeek-V4.1-Flash: 890 bytes a token
CALL_S = 60.0  # a busy machine is slow, and that is not what the demo shows

INTRODUCTION = """\
Before a language model can answer, its engine computes keys and values (KV) for every token of the
prompt: the "prefill". Most prompts begin like an earlier one: a coding agent sends its whole
conversation again at each step. kvkeep keeps that KV outside the engine, in blocks named by a hash
of all tokens up to their end. The engine asks how much of a prompt is there, copies that, and
computes only the rest.
"""
SETTING = """\
Here: {requests} recorded requests of {sessions} coding agents ({minutes:.0f} minutes of traffic, \
replayed as fast as it goes)
against a daemon with {ram} of RAM. Blocks are as large as DeepSeek-V4.1-Flash's: {tokens} tokens,
{nbytes:,} bytes. Their bytes are generated from their names, so each one that is read back can
be checked. For every request: look up, read and check what is stored, "compute" and store the rest.
"""
SUMMARY = """
Prefill saved   {hit_ratio:.1%} of all prompt tokens were found: {hit_tokens:,} of {asked_tokens:,}.
                At {rate:,} tokens a second an accelerator would need {spared} for them,
                and needs {rest} for the rest. (--prefill-rate sets this assumption.)
Speed           A look-up took {lookup_ms:.2f} ms and no call to the daemon. One thread read and
                checked {read_gbs:.1f} GB/s, and generated and stored {store_gbs:.1f} GB/s.
RAM is finite   {evicted:,} blocks were evicted for others. A cache that never evicts would have
                found {unlimited:.1%}: {lost_tokens:,} tokens more. (--ram sets the size.)
Not shown here  This daemon has RAM only, so a restart forgets all. With `[nvme] directories`
                in its settings blocks outlive RAM and restarts; Redis comes next.
"""


@click.command()
@click.option(
    "--requests", type=click.IntRange(1), help="Stop after so many requests; none: replay all."
)
@click.option("--ram", default="1GiB", show_default=True, help="The daemon's ram.size.")
@click.option(
    "--prefill-rate",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="Prompt tokens that an accelerator computes in a second, for the summary.",
)
def demo(requests: int | None, ram: str, prefill_rate: int) -> int:
    """Show what kvkeep is for: a real trace, a daemon, every byte checked."""
    with as_file(files("kvkeep_server.cli") / "demo_data" / "coding_agents.npz") as path:
        trace = read_trace(path)
    count = min(requests or len(trace), len(trace))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(INTRODUCTION)
    console.print(
        SETTING.format(
            requests=count,
            sessions=len(set(trace.sessions[:count].tolist())),
            minutes=float(trace.arrival_s[count - 1]) / 60,
            ram=ram,
            tokens=BLOCK_TOKENS,
            nbytes=BLOCK_NBYTES,
        )
    )
    with _client(ram) as client:
        totals, unlimited, evicted = _replay(client, trace, count, console)
    console.print(_summary(totals, unlimited, evicted, prefill_rate))
    console.print(f"{totals.blocks_verified} blocks verified, {totals.blocks_wrong} wrong")
    return 1 if totals.blocks_wrong or not totals.blocks_verified else 0


@contextmanager
def _client(ram: str) -> Iterator[kvkeep.Client]:
    """A client of a daemon that lives as long as the context."""
    tables = {
        "ram": {"size": ram},
        "sessions": {"staging_total_max": "128MiB"},  # one client: not more than 2 GiB in all
        "log": {"level": "warning"},
    }
    with (
        tempfile.TemporaryDirectory(prefix="kvkeep-demo-") as directory,
        DaemonProcess(Path(directory), tables),
        kvkeep.connect(directory, client_name="kvkeep demo", timeout_s=CALL_S) as client,
    ):
        yield client


@dataclass(slots=True)
class Unlimited:
    """What a cache that never evicts would have found.

    Attributes:
        asked: Blocks of the trace, of 512 tokens.
        found: Of them, those that came before: equal ids are equal whole prefixes.
    """

    seen: set[int] = field(default_factory=set)
    asked: int = 0
    found: int = 0

    def add(self, request: TraceRequest) -> None:
        """One more request."""
        self.asked += len(request.blocks)
        self.found += sum(block in self.seen for block in request.blocks)
        self.seen.update(request.blocks)


def _replay(
    client: kvkeep.Client, trace: Trace, count: int, console: Console
) -> tuple[Totals, Unlimited, int]:
    """Replays the first `count` requests; returns what was found, what could have been, and the
    number of evicted blocks."""
    hasher = kvkeep.chain_hash.KvkeepBlake2b(BLOCK_TOKENS)
    spec = replay_spec(
        hasher=hasher, block_nbytes=BLOCK_NBYTES, ranks=1, names=("demo", "DeepSeek-V4.1-Flash")
    )
    clock, unlimited = SystemClock(), Unlimited()
    namespace = client.open_namespace(spec)
    replay = Replay(namespace=namespace, ranks=1, hasher=hasher, clock=clock, check_one_in=1)
    totals = replay.totals
    with Progress(console, clock, count=count, rows=lambda: _rows(client, totals)) as progress:
        for request in islice(trace.requests(), count):
            replay.run(request)
            unlimited.add(request)
            progress.update(totals.requests)
    return totals, unlimited, client.stats().blocks_evicted_total


def _rows(client: kvkeep.Client, totals: Totals) -> list[tuple[str, str]]:
    stats = client.stats()
    return [
        ("hit ratio", f"{totals.hit_ratio:.1%}"),
        ("prefill tokens saved", f"{totals.tokens_saved:,}"),
        ("read and verified", _gigabytes(totals.blocks_verified)),
        ("wrong", f"{totals.blocks_wrong} blocks"),
        ("stored", _gigabytes(totals.blocks_stored)),
        ("evicted", f"{stats.blocks_evicted_total:,} blocks"),
        ("in RAM", _gigabytes(stats.pool.blocks)),
    ]


def _summary(totals: Totals, unlimited: Unlimited, evicted: int, prefill_rate: int) -> str:
    hit_tokens = totals.tokens_saved
    asked_tokens = totals.blocks_asked * BLOCK_TOKENS
    seconds = {step: latencies.total_s for step, latencies in totals.latencies.items()}
    return SUMMARY.format(
        hit_tokens=hit_tokens,
        asked_tokens=asked_tokens,
        hit_ratio=totals.hit_ratio,
        rate=prefill_rate,
        spared=_duration(hit_tokens / prefill_rate),
        rest=_duration((asked_tokens - hit_tokens) / prefill_rate),
        lookup_ms=1000 * seconds["lookup"] / max(1, totals.requests),
        read_gbs=_rate(totals.blocks_hit, seconds["acquire"] + seconds["read"]),
        store_gbs=_rate(totals.blocks_stored, seconds["store"]),
        evicted=evicted,
        unlimited=unlimited.found / max(1, unlimited.asked),
        lost_tokens=unlimited.found * TRACE_BLOCK_TOKENS - hit_tokens,
    )


def _gigabytes(blocks: int) -> str:
    return f"{blocks * BLOCK_NBYTES / 1e9:.2f} GB"


def _rate(blocks: int, seconds: float) -> float:
    return blocks * BLOCK_NBYTES / 1e9 / max(seconds, 1e-9)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
