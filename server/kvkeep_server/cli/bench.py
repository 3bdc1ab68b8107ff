"""`kvkeep bench`: what one host gives (`local`), and others of it (`remote`), and one device
(`nvme`), against baselines."""

import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import grpc
import numpy as np

import kvkeep
from kvkeep_server.cli.bench_daemon import DaemonProcess, NoOpRpc
from kvkeep_server.cli.bench_engine import EngineBench, EnginePlan
from kvkeep_server.cli.bench_fio import Fio
from kvkeep_server.cli.bench_index import IndexBench, IndexPlan
from kvkeep_server.cli.bench_local import (
    BATCH_BLOCKS,
    CHAIN_BLOCKS,
    SEED,
    LocalBench,
    Plan,
    host,
    machine,
)
from kvkeep_server.cli.bench_nvme import NvmeBench, NvmePlan
from kvkeep_server.cli.bench_nvme_log import Slots
from kvkeep_server.cli.bench_remote import RemotePlan
from kvkeep_server.cli.bench_remote import measure as measure_remote
from kvkeep_server.cli.bench_rows import (
    BOUNDS,
    ENGINE_BOUNDS,
    INDEX_BOUNDS,
    NVME_BOUNDS,
    Bound,
    Row,
    as_json,
    as_text,
    missed,
)
from kvkeep_server.cli.sizes import size_from
from kvkeep_server.core.errors import KVKeepError
from kvkeep_server.core.memory_limit import read_memory_limit
from kvkeep_server.core.process import SWITCH_INTERVAL_S
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
    return _report(facts, rows, BOUNDS if check else {}, as_machine=as_machine)


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


@bench.command()
@click.option("--json", "as_machine", is_flag=True, help="One JSON object instead of the table.")
@click.option("--check", is_flag=True, help="Exit code 1 when a bound is missed.")
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    default=Path(),
    show_default="the current one",
    help="On the device to measure; a folder is made in it, and removed.",
)
@click.option(
    "--stored",
    metavar="SIZE",
    callback=size_from(1 << 20),
    default=format_size(NvmePlan().stored_nbytes),
    show_default=True,
    help="Written of each block size, at least; the bounds are for the default.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=NvmePlan().rounds,
    show_default=True,
    help="Of ours and of fio's, in turn.",
)
def nvme(*, as_machine: bool, check: bool, directory: Path, stored: int, rounds: int) -> int:
    """Read and durably write blocks on a device, beside fio in the same directory.

    Needs fio on PATH (exit code 69 without). Takes about a minute, 3 GiB of the disk and half a
    GiB of memory with the defaults. The bounds are for a device that nobody else uses meanwhile.
    """
    plan = dataclasses.replace(
        NvmePlan(),
        stored_nbytes=stored,
        round_nbytes=min(stored, NvmePlan().round_nbytes),
        rounds=rounds,
    )
    _check_disk(plan, directory)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    facts, rows = _run_nvme(plan, directory)
    return _report(facts, rows, NVME_BOUNDS if check else {}, as_machine=as_machine)


@bench.command()
@click.option("--json", "as_machine", is_flag=True, help="One JSON object instead of the table.")
@click.option("--check", is_flag=True, help="Exit code 1 when a bound is missed.")
@click.option(
    "--blocks",
    type=click.IntRange(min=CHAIN_BLOCKS),
    default=IndexPlan().blocks,
    show_default=True,
    help="In the index; the bounds are for the default.",
)
def index(*, as_machine: bool, check: bool, blocks: int) -> int:
    """Fill an index, tell what a block of it weighs, and look keys up in it.

    Takes about a minute and 4 GiB of memory with the default.
    """
    plan = dataclasses.replace(IndexPlan(), blocks=blocks)
    _check_free(plan.memory_nbytes, "--blocks")
    with (
        tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as folder,
        DaemonProcess(Path(folder), {"ram": {"size": "64MiB"}}) as daemon,
    ):
        rpc = NoOpRpc(daemon.socket)
        try:
            rows = list(IndexBench(plan, rpc=rpc, progress=_progress).rows())
        finally:
            rpc.close()
    facts = {**host(), "blocks": blocks, "load_max": plan.load_max}
    return _report(facts, rows, INDEX_BOUNDS if check else {}, as_machine=as_machine)


@bench.command()
@click.option("--json", "as_machine", is_flag=True, help="One JSON object instead of the table.")
@click.option("--check", is_flag=True, help="Exit code 1 when a bound is missed.")
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=EnginePlan().requests,
    show_default=True,
    help="Of a daemon that answers; beside one that does not there are about a third more.",
)
def engine(*, as_machine: bool, check: bool, requests: int) -> int:
    """Ask from a loop that is always busy, as an engine's scheduler is, with submit and poll.

    Also beside a daemon that is frozen, slow or killed. Takes about a minute and a half and half a
    GiB of memory with the default.
    """
    plan = dataclasses.replace(EnginePlan(), requests=requests)
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as folder:
        _progress("starting a daemon")
        with (
            DaemonProcess(Path(folder), {"ram": {"size": "256MiB"}}) as daemon,
            kvkeep.connect(folder) as client,
        ):
            bench_of = EngineBench(plan, client=client, daemon=daemon, progress=_progress)
            rows = list(bench_of.rows())
            counts = dict(sorted(bench_of.loop.counts.items()))
    facts = {**host(), "requests": bench_of.requests, "counts": counts}
    return _report(facts, rows, ENGINE_BOUNDS if check else {}, as_machine=as_machine)


@bench.command()
@click.option("--json", "as_machine", is_flag=True, help="One JSON object instead of the table.")
@click.option(
    "--batches",
    type=click.IntRange(min=1),
    default=RemotePlan().batches,
    show_default=True,
    help="Stored of each block size, of 64 blocks each.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=RemotePlan().rounds,
    show_default=True,
    help="Interleaved rounds.",
)
def remote(*, as_machine: bool, batches: int, rounds: int) -> int:
    """Read and store as a client on another host does, beside one on this host.

    Over the loopback, with a daemon of its own. Takes about half a minute and 2 GiB of memory.
    """
    plan = RemotePlan(batches=batches, rounds=rounds)
    _check_free(plan.pool_nbytes + 4 * plan.staging_nbytes + MARGIN_NBYTES // 4, "--batches")
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as folder:
        rows = measure_remote(plan, Path(folder), _progress)
    facts = {**host(), "grpcio": grpc.__version__, "batches": batches, "rounds": rounds}
    return _report(facts, rows, {}, as_machine=as_machine)


def _report(
    facts: Mapping[str, object],
    rows: Sequence[Row],
    bounds: Mapping[str, Bound],
    *,
    as_machine: bool,
) -> int:
    """Prints it; the exit code: whether the bounds hold."""
    click.echo(as_json(facts, rows) if as_machine else as_text(facts, rows))
    sentences = missed(rows, bounds) if bounds else []
    for sentence in sentences:
        click.echo(f"missed: {sentence}", err=True)
    return EXIT_MISSED if sentences else 0


def _run_nvme(plan: NvmePlan, directory: Path) -> tuple[dict[str, object], Sequence[Row]]:
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-", dir=directory) as folder:
        path = Path(folder)
        fio = Fio(path, np.random.default_rng(SEED))
        slots = Slots(plan.slots_nbytes)
        try:
            bench_of = NvmeBench(plan, directory=path, fio=fio, slots=slots, progress=_progress)
            rows = list(bench_of.rows())
        finally:
            slots.close()
    facts = {
        **host(),
        "fio": fio.version,
        "fio_request_nbytes": bench_of.fio_nbytes,
        "stored_nbytes_each_size": plan.stored_nbytes,
        "round_nbytes": plan.round_nbytes,
        "rounds": plan.rounds,
        "batch_blocks": BATCH_BLOCKS,
        "read_threads": plan.read_threads,
    }
    return facts, rows


def _check_disk(plan: NvmePlan, directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if plan.disk_nbytes > free:
        raise click.UsageError(
            f"this run needs about {show_size(plan.disk_nbytes)} in {directory} and"
            f" {show_size(free)} is free; take a smaller --stored or another --directory"
        )


def _index_facts(client: kvkeep.Client) -> dict[str, int]:
    stats = client.stats()
    return {
        "index_rows": stats.index.rows,
        "index_blocks": stats.index.blocks,
        "pool_nbytes": stats.pool.chunk_nbytes,
    }


def _check_memory(plan: Plan) -> None:
    needed = plan.pool_nbytes + plan.staging_nbytes + plan.source_nbytes + MARGIN_NBYTES
    _check_free(needed, "--resident or --index-blocks")


def _check_free(needed_nbytes: int, options: str) -> None:
    free = read_memory_limit().free_nbytes
    if needed_nbytes > free:
        raise click.UsageError(
            f"this run needs about {show_size(needed_nbytes)} of memory and {show_size(free)} is"
            f" free; take a smaller {options} (the bounds are for the defaults)"
        )


def _progress(line: str) -> None:
    click.echo(f"... {line}", err=True)
