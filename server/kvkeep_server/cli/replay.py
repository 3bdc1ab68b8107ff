"""`kvkeep replay`: a recorded stream of requests against a daemon that runs, every byte checked."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import click
from rich.console import Console

import kvkeep
from kvkeep_server.cli.admin_calls import AdminCalls, NoDaemonError
from kvkeep_server.cli.progress import Progress
from kvkeep_server.cli.replay_clients import ReplayClients, ReplayPlan
from kvkeep_server.cli.replay_report import as_dict, as_text, rows
from kvkeep_server.cli.runtime_dir import runtime_dir_option, runtime_dir_or_default
from kvkeep_server.cli.sizes import size_from
from kvkeep_server.core.clock import SystemClock
from kvkeep_server.core.errors import KVKeepError
from kvkeep_server.sim.mooncake import read_mooncake
from kvkeep_server.sim.trace import TRACE_BLOCK_TOKENS, TraceRequest, read_trace

EXIT_WRONG = 1
_POLL_S = 0.1


def _tokens(_context: click.Context, _option: click.Parameter, value: int) -> int:
    if TRACE_BLOCK_TOKENS % value:
        raise click.BadParameter(f"{value} does not divide {TRACE_BLOCK_TOKENS}, a trace's block")
    return value


@click.command()
@click.argument(
    "trace", metavar="TRACE", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@runtime_dir_option
@click.option(
    "--clients",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Engines side by side, a thread and a session each.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    help="So many times as fast as it was recorded; none: as fast as it goes.",
)
@click.option("--requests", type=click.IntRange(1), help="Stop after so many; none: all.")
@click.option(
    "--tokens-per-block",
    type=click.IntRange(1, TRACE_BLOCK_TOKENS),
    default=128,
    show_default=True,
    callback=_tokens,
    help="A divisor of 512.",
)
@click.option(
    "--block-size",
    metavar="SIZE",
    default="113920B",
    show_default=True,
    callback=size_from(1),
    help="Bytes of a block of one rank.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Shards of each block, all on this host.",
)
@click.option(
    "--namespace",
    metavar="NAME",
    default="replay",
    show_default=True,
    help="The model's name: other names share nothing.",
)
@click.option(
    "--check-one-in",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Check the bytes of one hit block in so many.",
)
@click.option("--json", "as_machine", is_flag=True, help="Print one JSON object at the end.")
def replay(
    *, trace: Path, runtime_dir: str, requests: int | None, as_machine: bool, **options: object
) -> int:
    """Replay TRACE against a running daemon, with real bytes that are checked when they come back.

    TRACE is an .npz of this project or a .jsonl of Mooncake's. For every request: look up, lease
    and check what is stored, "compute" and store the rest. Exit code 1 when a byte was wrong.
    """
    directory = runtime_dir_or_default(runtime_dir)
    stream, count = _requests(trace)
    if requests is not None:
        stream, count = islice(stream, requests), min(requests, count or requests)
    plan = ReplayPlan(runtime_dir=directory, **options)  # type: ignore[arg-type] # click's
    clock = SystemClock()
    console = Console(soft_wrap=True, highlight=False, markup=False, stderr=as_machine)
    try:
        with ReplayClients(plan, stream, clock) as clients:
            with Progress(
                console, clock, count=count, rows=lambda: rows(clients.totals())
            ) as progress:
                while clients.running(_POLL_S):
                    progress.update(clients.totals().requests)
                progress.update(clients.totals().requests)
            totals, seconds = clients.totals(), clients.seconds
    except kvkeep.UnavailableError as error:
        if _serves(directory):
            raise
        raise NoDaemonError(directory, str(error)) from error
    click.echo(json.dumps(as_dict(totals, seconds)) if as_machine else as_text(totals, seconds))
    return EXIT_WRONG if totals.blocks_wrong else 0


def _serves(directory: str) -> bool:
    """Whether a daemon is there: one that refuses a session is."""
    with AdminCalls(directory) as admin:
        try:
            admin.stats()
        except NoDaemonError:
            return False
        except KVKeepError:
            return True  # and it does not answer, or in its own words
    return True


def _requests(trace: Path) -> tuple[Iterator[TraceRequest], int | None]:
    """The requests of a file, and how many there are, as far as that is known beforehand."""
    if trace.suffix == ".npz":
        read = read_trace(trace)
        return read.requests(), len(read)
    if trace.suffix == ".jsonl":
        return read_mooncake(trace), None
    raise click.UsageError(f"{trace} is neither an .npz nor a .jsonl")
