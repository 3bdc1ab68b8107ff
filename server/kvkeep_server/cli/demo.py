"""`kvkeep demo`: a recorded hour of coding agents, a daemon of its own, every byte checked."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from itertools import islice
from pathlib import Path
from typing import Self

import click
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

import kvkeep
from kvkeep_server.cli.bench_daemon import DaemonProcess
from kvkeep_server.cli.demo_replay import (
    BLOCK_NBYTES,
    BLOCK_TOKENS,
    BlockBytes,
    Replay,
    Totals,
)
from kvkeep_server.core.clock import Clock, SystemClock
from kvkeep_server.sim.trace import Trace, read_trace

SEED = 2026
TERMINAL_INTERVAL_S = 0.5
LINES_INTERVAL_S = 5.0
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
Not yet here    Blocks lie in RAM only, so a restart of the daemon forgets them. Tiers that
                keep them for days, on NVMe and in Redis, come next.
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
        totals, evicted = _replay(client, trace, count, console)
    console.print(_summary(totals, evicted, prefill_rate))
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


def _replay(
    client: kvkeep.Client, trace: Trace, count: int, console: Console
) -> tuple[Totals, int]:
    """Replays the first `count` requests; returns the totals and the number of evicted blocks."""
    hasher = kvkeep.chain_hash.KvkeepBlake2b(BLOCK_TOKENS)
    spec = kvkeep.NamespaceSpec(
        tenant="demo",
        model="DeepSeek-V4.1-Flash",
        weights_fingerprint="generated bytes",
        engine="kvkeep demo",
        layout_version="1",
        kv_dtype="fp4",
        hash_algorithm=hasher.algorithm,
        hash_root=hasher.root,
        key_nbytes=hasher.key_nbytes,
        groups=[
            kvkeep.Group.full("global", tokens_per_block=BLOCK_TOKENS, block_nbytes=BLOCK_NBYTES)
        ],
    )
    clock = SystemClock()
    replay = Replay(
        namespace=client.open_namespace(spec),
        trace=trace,
        hasher=hasher,
        content=BlockBytes(SEED),
        clock=clock,
    )
    with _Progress(client, replay.totals, count, console, clock) as progress:
        for request in islice(trace.requests(), count):
            replay.run(request)
            progress.update()
    return replay.totals, client.stats().blocks_evicted_total


class _Progress:
    """A live table on a terminal, a line now and then elsewhere."""

    def __init__(
        self, client: kvkeep.Client, totals: Totals, count: int, console: Console, clock: Clock
    ) -> None:
        self._client = client
        self._totals = totals
        self._count = count
        self._console = console
        self._clock = clock
        self._shown_s = clock.monotonic_s()
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        """Shows the empty table."""
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the last state on the screen."""
        if self._live:
            self._live.update(self._table(), refresh=True)
            self._live.stop()

    def update(self) -> None:
        """Shows the totals, at most once an interval, and at the end."""
        interval_s = TERMINAL_INTERVAL_S if self._live else LINES_INTERVAL_S
        now_s = self._clock.monotonic_s()
        if now_s - self._shown_s < interval_s and self._totals.requests < self._count:
            return
        self._shown_s = now_s
        if self._live:
            self._live.update(self._table(), refresh=True)
        else:
            self._console.print(
                f"{self._totals.requests:>4}/{self._count} requests: "
                + ", ".join(f"{name} {value}" for name, value in self._rows())
            )

    def _rows(self) -> list[tuple[str, str]]:
        totals, stats = self._totals, self._client.stats()
        return [
            ("hit ratio", f"{totals.hit_ratio:.1%}"),
            ("prefill tokens saved", f"{totals.blocks_hit * BLOCK_TOKENS:,}"),
            ("read and verified", _gigabytes(totals.blocks_verified)),
            ("wrong", f"{totals.blocks_wrong} blocks"),
            ("stored", _gigabytes(totals.blocks_stored)),
            ("evicted", f"{stats.blocks_evicted_total:,} blocks"),
            ("in RAM", _gigabytes(stats.index.blocks)),
        ]

    def _table(self) -> Group:
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        table.add_row("requests", f"{self._totals.requests} of {self._count}")
        for name, value in self._rows():
            table.add_row(name, value)
        return Group(ProgressBar(self._count, self._totals.requests, width=60), table)


def _summary(totals: Totals, evicted: int, prefill_rate: int) -> str:
    hit_tokens = totals.blocks_hit * BLOCK_TOKENS
    asked_tokens = totals.blocks_asked * BLOCK_TOKENS
    lost_blocks = totals.blocks_seen_before - totals.blocks_hit
    return SUMMARY.format(
        hit_tokens=hit_tokens,
        asked_tokens=asked_tokens,
        hit_ratio=totals.hit_ratio,
        rate=prefill_rate,
        spared=_duration(hit_tokens / prefill_rate),
        rest=_duration((asked_tokens - hit_tokens) / prefill_rate),
        lookup_ms=1000 * totals.lookup_s / max(1, totals.requests),
        read_gbs=_rate(totals.blocks_hit, totals.read_s),
        store_gbs=_rate(totals.blocks_stored, totals.store_s),
        evicted=evicted,
        unlimited=totals.hit_ratio_unlimited,
        lost_tokens=lost_blocks * BLOCK_TOKENS,
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
