"""`kvkeep bench local`, the measuring: one daemon, one client, all that an engine does on a host.

What the rows mean
    memcpy/SIZE     the baseline: `np.copyto` of 64 blocks' bytes, moving source, fixed destination
    noop_rpc        the other one: `grpc.health.v1` Check, synchronous, on the daemon's unix socket
    read_copy/SIZE  look-up and copy (`read_into`) of 64 random stored blocks into one fixed buffer
    lookup/N        N keys of a random place of a random chain, in chain order, no call
    acquire/N       the same with a lease, one call; released after the round, without the clock
    commit/SIZE     64 blocks whose staging is filled; the time of Commit, level RAM; the pool has
                    grown before, without the clock
    store/SIZE      the same with making room and filling
    busy/*          beside a thread of the same process that computes in pure Python, over the loop
                    without that thread

On busy/* and busy_tight/*. Python takes the GIL from a thread 5 ms (the switch interval) after
another asked for it. A loop without a pause holds it all the time, so beside a busy thread it runs
5 ms, waits 5 ms, and so on, whatever its operation does: the call that is under way at the switch
takes 5 ms longer, and as soon as more than one in a hundred calls is, which is so for all that take
more than 50 us, p99 is over 5 ms by arithmetic. That says how the interpreter shares itself, not
how the operation behaves. An engine's thread calls now and then: it comes back from something that
gave the GIL up, gets a fresh switch interval, calls us. So `busy/*` pauses a moment before each
call, outside of the timed part, with and without the busy thread: an operation that keeps the GIL
is hardly slower then, one that gives it up pays 5 ms each time. `busy_tight/*` is the loop without
the pause, for information, without a bound.
"""

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

import kvkeep
from kvkeep_server.cli.bench_daemon import NoOpRpc
from kvkeep_server.cli.bench_load import BlockSet, GrownPool, Source, WrongBytesError, open_set
from kvkeep_server.cli.bench_rows import Row, busy_rows, rate_row, time_row
from kvkeep_server.cli.bench_timing import (
    BusyThread,
    Operation,
    Samples,
    interleaved,
    loop,
    memcpy,
)
from kvkeep_server.core.memory_limit import read_memory_limit
from kvkeep_server.core.quantities import format_size

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
BATCH_BLOCKS = 64
SIZES: Mapping[str, int] = {"57KiB": 57 * KiB, "128KiB": 128 * KiB, "2MiB": 2 * MiB}
INDEX_BLOCK_NBYTES = 4 * KiB  # the smallest slot; blocks that are only looked up
CHAIN_BLOCKS = 8192  # of those: a prompt of a million tokens at 128 tokens a block
KEYS = (64, 1000, 8000)
RATE_ONLY = "57KiB"  # the one size whose commit is held against the RPC
NOOP_RPC = "noop_rpc"
SEED = 11
PAUSE_S = 0.0002


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is stored and measured.

    Attributes:
        resident_nbytes: Of each block size, at least; reads draw from all of it.
        index_blocks: Further blocks of 4 KiB, so that the index is as large as a real one.
        source_nbytes: Random bytes that memcpy and the fills move over.
        rounds: Interleaved rounds; a ratio is the median over them.
        round_s: About how long each operation runs in a round, in seconds.
        busy_s: Length of the loops beside a busy thread, in seconds.
    """

    resident_nbytes: int = 3 * GiB // 2
    index_blocks: int = 1 << 20
    source_nbytes: int = 384 * MiB
    rounds: int = 7
    round_s: float = 0.12
    busy_s: float = 2.0

    @property
    def index_rows(self) -> int:
        """Rows of the daemon's table, so that it is about half full and need not move."""
        return 2 * (self.index_blocks + sum(self.blocks(size) for size in SIZES.values()))

    def blocks(self, block_nbytes: int) -> int:
        """Blocks of one size: whole batches, the same number a round."""
        batches = -(-self.resident_nbytes // (block_nbytes * BATCH_BLOCKS))
        # Three batches at least in a round: two commits and one store.
        per_round = max(3, -(-batches // self.rounds))
        return per_round * self.rounds * BATCH_BLOCKS

    @property
    def pool_nbytes(self) -> int:
        """Of the daemon: everything stays resident."""
        payload = sum(size * self.blocks(size) for size in SIZES.values())
        index = INDEX_BLOCK_NBYTES * self.index_blocks
        # Slabs are cut for one slot size each, a chunk has its header, a pool its last remainder.
        return (payload + index) * 17 // 16 + 512 * MiB

    @property
    def staging_nbytes(self) -> int:
        """Of the client: two of the largest batches."""
        return 2 * BATCH_BLOCKS * max(SIZES.values())

    def daemon_tables(self) -> dict[str, dict[str, str | int | float | bool]]:
        """The settings of the daemon, as TOML tables."""
        staging = format_size(self.staging_nbytes)
        return {
            "ram": {"size": format_size(-(-self.pool_nbytes // (2 * MiB)) * 2 * MiB)},
            "index": {"rows_initial": self.index_rows},
            "sessions": {"staging_max": staging, "staging_total_max": staging},
        }


class LocalBench:
    """One run. `rows()` stores and measures everything and gives the report's rows as they come."""

    def __init__(
        self,
        plan: Plan,
        *,
        client: kvkeep.Client,
        rpc: NoOpRpc,
        progress: Callable[[str], None],
    ) -> None:
        """`progress` gets a line when another part begins."""
        self._plan = plan
        self._client = client
        self._progress = progress
        self._random = np.random.default_rng(SEED)
        self._noop = Operation(NOOP_RPC, lambda _: rpc())
        self._pool = GrownPool(client)
        self._source: Source
        self._sets: dict[str, BlockSet] = {}
        self._index: BlockSet

    def rows(self) -> Iterator[Row]:
        """All rows, in the order of the report.

        Raises:
            WrongBytesError: A call returned something else than what was stored.
        """
        self._prepare()
        commits: list[Row] = []
        for name in SIZES:
            self._progress(f"commit and store, {name}")
            commits += self._commit_rows(name)
        self._pool.wait_for_huge_pages()
        self._progress("reads")
        for name in SIZES:
            yield from self._read_rows(name)
        self._progress("look-ups and leases")
        yield from self._key_rows()
        yield from commits
        for operation in self._busy_operations():
            self._progress(f"{operation.name} beside a busy thread")
            yield from self._busy_rows(operation)

    def _prepare(self) -> None:
        plan = self._plan
        self._progress("random bytes")
        self._source = Source(plan.source_nbytes, self._random)
        sizes = {**SIZES, "index": INDEX_BLOCK_NBYTES}
        for name, nbytes in sizes.items():
            blocks = plan.index_blocks if name == "index" else plan.blocks(nbytes)
            self._sets[name] = open_set(
                self._client, nbytes, blocks, source=self._source, random=self._random
            )
        self._index = self._sets.pop("index")
        self._progress(f"{plan.index_blocks:,} blocks of 4 KiB into the index")
        self._index.store_all(CHAIN_BLOCKS, self._pool)
        self._grow_pool()

    def _grow_pool(self) -> None:
        """Has all memory of the pool in use once: its growth and its huge pages come once in a
        daemon's life, behind the work, and take the work a core meanwhile."""
        nbytes = max(SIZES.values())
        payload = sum(size * self._plan.blocks(size) for size in SIZES.values())
        self._progress(f"{payload / GiB:.1f} GiB once, so that the pool is as large as it will be")
        filler = open_set(
            self._client,
            nbytes,
            payload // nbytes // BATCH_BLOCKS * BATCH_BLOCKS,
            source=self._source,
            random=self._random,
            name="filler",
        )
        filler.store_all(BATCH_BLOCKS, self._pool)
        self._pool.wait_for_huge_pages()
        filler.remove_all(BATCH_BLOCKS)

    # ---- commit and store ------------------------------------------------------------------------

    def _commit_rows(self, name: str) -> list[Row]:
        """Fills the set of one size, on the clock: two batches of three by commit, one by store."""
        blocks = self._sets[name]
        commit, store = self._commit(name), self._store(name)
        copy = memcpy(self._source.memory, BATCH_BLOCKS * blocks.block_nbytes, f"memcpy/{name}")
        a_round = blocks.blocks // BATCH_BLOCKS // self._plan.rounds
        stores = a_round // 3
        turns = [
            (copy, max(3, stores)),
            (self._noop, 30),
            (commit, a_round - stores),
            (store, stores),
        ]
        samples = interleaved(turns, self._plan.rounds)
        nbytes = BATCH_BLOCKS * blocks.block_nbytes
        by_copy = (copy.name, samples[copy.name])
        stored = rate_row(store.name, nbytes, samples[store.name], by_copy)
        if name == RATE_ONLY:
            by_rpc = (NOOP_RPC, samples[NOOP_RPC])
            return [time_row(commit.name, samples[commit.name], by_rpc), stored]
        return [rate_row(commit.name, nbytes, samples[commit.name], by_copy), stored]

    def _commit(self, name: str) -> Operation:
        blocks = self._sets[name]

        def prepare() -> kvkeep.Store:
            numbers, keys = self._batch(blocks)
            store = blocks.store(keys)
            blocks.fill(store, numbers)
            return store

        def finish(_given: kvkeep.Store, result: kvkeep.CommitResult) -> None:
            blocks.committed(result, BATCH_BLOCKS)

        return Operation(f"commit/{name}", lambda store: store.commit(), prepare, finish)

    def _store(self, name: str) -> Operation:
        blocks = self._sets[name]

        def run(batch: tuple[NDArray[np.int64], bytes]) -> kvkeep.CommitResult:
            numbers, keys = batch
            store = blocks.store(keys)
            blocks.fill(store, numbers)
            return store.commit()

        def finish(_given: object, result: kvkeep.CommitResult) -> None:
            blocks.committed(result, BATCH_BLOCKS)

        return Operation(f"store/{name}", run, lambda: self._batch(blocks), finish)

    def _batch(self, blocks: BlockSet) -> tuple[NDArray[np.int64], bytes]:
        self._pool.wait_for(BATCH_BLOCKS * blocks.block_nbytes)
        return next(blocks.batches(BATCH_BLOCKS))

    # ---- reads, look-ups, leases -----------------------------------------------------------------

    def _read_rows(self, name: str) -> list[Row]:
        read = self._read(name)
        nbytes = BATCH_BLOCKS * SIZES[name]
        copy = memcpy(self._source.memory, nbytes, f"memcpy/{name}")
        samples = self._turns([copy, read])
        by_copy = (copy.name, samples[copy.name])
        return [
            rate_row(copy.name, nbytes, samples[copy.name]),
            rate_row(read.name, nbytes, samples[read.name], by_copy),
        ]

    def _read(self, name: str) -> Operation:
        blocks = self._sets[name]
        into = np.ones(BATCH_BLOCKS * blocks.block_nbytes, np.uint8)

        def run(drawn: tuple[NDArray[np.int64], bytes]) -> int:
            return blocks.namespace.read_into(drawn[1], into)

        def finish(drawn: tuple[NDArray[np.int64], bytes], read: int) -> None:
            _expect(read, BATCH_BLOCKS, f"read_into of stored blocks of {name}")
            blocks.check(drawn[0], into)

        return Operation(f"read_copy/{name}", run, lambda: blocks.draw(BATCH_BLOCKS), finish)

    def _key_rows(self) -> Iterator[Row]:
        operations = [self._lookup(keys) for keys in KEYS] + [self._acquire(keys) for keys in KEYS]
        samples = self._turns([self._noop, *operations])
        yield time_row(NOOP_RPC, samples[NOOP_RPC])
        for operation in operations:
            by_rpc = (NOOP_RPC, samples[NOOP_RPC])
            yield time_row(operation.name, samples[operation.name], by_rpc)

    def _lookup(self, keys: int) -> Operation:
        blocks = self._index

        def finish(_given: object, found: kvkeep.Lookup) -> None:
            _expect(found.blocks, keys, "a look-up of stored keys")

        return Operation(
            f"lookup/{keys}",
            blocks.namespace.lookup,
            lambda: blocks.draw_chain(keys, CHAIN_BLOCKS),
            finish,
        )

    def _acquire(self, keys: int) -> Operation:
        blocks = self._index
        held: list[kvkeep.Acquired] = []

        def finish(_given: object, acquired: kvkeep.Acquired) -> None:
            held.append(acquired)
            _expect(acquired.blocks, keys, "an acquire of stored keys")

        def settle() -> None:
            # The client gives leases back behind its caller's back: not beside the timed calls,
            # as nothing runs beside the no-op RPC.
            for acquired in held:
                acquired.release()
            held.clear()
            while self._client.stats().leases:
                pass

        return Operation(
            f"acquire/{keys}",
            blocks.namespace.acquire,
            lambda: blocks.draw_chain(keys, CHAIN_BLOCKS),
            finish,
            settle,
        )

    def _turns(self, operations: Sequence[Operation]) -> dict[str, Samples]:
        """Interleaved rounds; an operation's number of calls follows from a few trial calls."""
        turns = []
        for operation in operations:
            trial = sorted(operation.once() for _ in range(5))[2]
            operation.settle()
            calls = int(self._plan.round_s / trial)
            turns.append((operation, max(3, min(calls, 400))))
        return interleaved(turns, self._plan.rounds)

    # ---- beside a busy thread --------------------------------------------------------------------

    def _busy_operations(self) -> list[Operation]:
        reads = [self._read(name) for name in SIZES]
        return [self._lookup(64), self._lookup(1000), *reads, self._acquire(64)]

    def _busy_rows(self, operation: Operation) -> Iterator[Row]:
        for prefix, pause_s in (("busy", PAUSE_S), ("busy_tight", 0.0)):
            alone = loop(operation, self._plan.busy_s, pause_s=pause_s)
            with BusyThread():
                # Twice as long: with the pause every call waits for the busy thread's 5 ms.
                busy = loop(operation, 2 * self._plan.busy_s, pause_s=pause_s)
            yield from busy_rows(prefix, operation.name, alone, busy)


def host() -> dict[str, object]:
    """The machine and the versions that every figure depends on."""
    limit = read_memory_limit()
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_nbytes": limit.nbytes,
        "memory_free_nbytes": limit.free_nbytes,
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "seed": SEED,
    }


def machine(plan: Plan, stats: Mapping[str, Any]) -> dict[str, object]:
    """What the figures depend on: the host, the sizes of this run."""
    return {
        **host(),
        "grpcio": grpc.__version__,
        "resident_nbytes_each_size": plan.resident_nbytes,
        "batch_blocks": BATCH_BLOCKS,
        "source_nbytes": plan.source_nbytes,
        "rounds": plan.rounds,
        "busy_loop_s": plan.busy_s,
        **stats,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _expect(got: int, wanted: int, what: str) -> None:
    if got != wanted:
        raise WrongBytesError(f"{what} found {got} of {wanted}")
