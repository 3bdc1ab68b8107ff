"""`kvkeep bench local`: what one host gives, against memcpy and against a no-op RPC."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import grpc

import kvkeep
from kvkeep_server.cli.bench_daemon import DaemonProcess, NoOpRpc
from kvkeep_server.cli.bench_local import CHAIN_BLOCKS, LocalBench, Plan, machine
from kvkeep_server.cli.bench_rows import Row, as_json, as_text, missed
from kvkeep_server.cli.sizes import size_from
from kvkeep_server.core.errors import KVKeepError
from kvkeep_server.core.memory_limit import read_memory_limit
from kvkeep_server.core.quantities import format_size, show_size

EXIT_MISSED = 1
# A daemon that stops by itself drains first.
DAEMON_END_S = 8.0
# Beside the pool: staging, the source, destinations, both processes.
MARGIN_NBYTES = 3 << 29


@click.group()
def bench() -> None:
    """Measure this machine."""


@bench.command()
@click.option("--json", "as_machine", is_flag=True, help="One JSON object instead of the table.")
@click.option("--check", is_flag=True, help="Exit code 1 when a bound is missed.")
@click.option(
    "--resident",
    metavar="SIZE",
    callback=size_from(1 << 20),
    default=format_size(Plan().resident_nbytes),
    show_default=True,
    help="Stored of each block size, at least; the bounds are for the default.",
)
@click.option(
    "--index-blocks",
    type=click.IntRange(min=CHAIN_BLOCKS),
    default=Plan().index_blocks,
    show_default=True,
    help="Further blocks of 4 KiB, so that the index is as large as a real one.",
)
@click.option(
    "--busy-seconds",
    type=click.FloatRange(min=0.05),
    default=Plan().busy_s,
    show_default=True,
    help="Length of the loops beside a busy thread.",
)
def local(
    *, as_machine: bool, check: bool, resident: int, index_blocks: int, busy_seconds: float
) -> int:
    """Store, look up, lease and read on this host, with a daemon of its own.

    Takes about three minutes and 11 GiB of memory with the defaults; less with smaller ones.
    """
    plan = dataclasses.replace(
        Plan(), resident_nbytes=resident, index_blocks=index_blocks, busy_s=busy_seconds
    )
    _check_memory(plan)
    facts, rows = _run(plan)
    click.echo(as_json(facts, rows) if as_machine else as_text(facts, rows))
    sentences = missed(rows) if check else []
    for sentence in sentences:
        click.echo(f"missed: {sentence}", err=True)
    return EXIT_MISSED if sentences else 0


def _run(plan: Plan) -> tuple[dict[str, object], Sequence[Row]]:
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as folder:
        directory = Path(folder)
        _progress("starting a daemon")
        with (
            DaemonProcess(directory, plan.daemon_tables()) as daemon,
            kvkeep.connect(
                str(directory), staging_nbytes=plan.staging_nbytes, timeout_s=60.0
            ) as client,
        ):
            rpc = NoOpRpc(daemon.socket)
            try:
                rows = list(LocalBench(plan, client=client, rpc=rpc, progress=_progress).rows())
                facts = machine(plan, _index_facts(client))
            except (kvkeep.KVKeepError, KVKeepError, grpc.RpcError) as error:
                # A daemon that gave up explains more than what its client saw of it.
                daemon.check(DAEMON_END_S)
                raise KVKeepError(f"the bench ended early: {error}") from error
            finally:
                rpc.close()
    return facts, rows


def _index_facts(client: kvkeep.Client) -> dict[str, int]:
    stats = client.stats()
    return {
        "index_rows": stats.index.rows,
        "index_blocks": stats.index.blocks,
        "pool_nbytes": stats.pool.chunk_nbytes,
    }


def _check_memory(plan: Plan) -> None:
    needed = plan.pool_nbytes + plan.staging_nbytes + plan.source_nbytes + MARGIN_NBYTES
    free = read_memory_limit().free_nbytes
    if needed > free:
        raise click.UsageError(
            f"this run needs about {show_size(needed)} of memory and {show_size(free)} is free;"
            " take a smaller --resident or --index-blocks (the bounds are for the defaults)"
        )


def _progress(line: str) -> None:
    click.echo(f"... {line}", err=True)
