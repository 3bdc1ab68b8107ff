"""`kvkeep bench index`, the measuring: what the index costs when it is as large as a host's disks.

What the rows mean
    bytes_a_block          index table, daemon-only columns and eviction policy, over the blocks, at
                           the end; full keys and ghosts not counted
    bytes_a_block/PART     the same of one part
    bytes_a_block/moved    what it is right after the table moved to the next one, its largest
    rebuild_peak           bytes a block that a move of the table takes for as long as it lasts
    insert                 blocks a second into table, columns and policy, in commits of 8,192 keys,
                           fingerprints included, moves of the table not
    insert/with_moves      the same with the moves of a table that grew from its first size
    record                 blocks a second whose place on nvme is noted
    rebuild                blocks a second that a move of the table carries
    adopt                  how long the event loop stands still at its end
    noop_rpc               `grpc.health.v1` Check, synchronous, on a daemon's unix socket
    lookup/N               N keys of a random place of a random chain, in chain order, no call: the
                           client's half, on the table that was filled

The daemon's own objects are filled, in this process: what a block weighs does not depend on its
bytes, so there are none, and addresses are made up.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvkeep.shared_index import IndexTable as ClientTable
from kvkeep.shared_index import Words
from kvkeep.shared_memory import map_region
from kvkeep_server.cli.bench_daemon import NoOpRpc
from kvkeep_server.cli.bench_load import WrongBytesError
from kvkeep_server.cli.bench_local import CHAIN_BLOCKS, KEYS, NOOP_RPC, SEED
from kvkeep_server.cli.bench_rows import Row, time_row
from kvkeep_server.cli.bench_timing import Operation, interleaved
from kvkeep_server.core.clock import SystemClock
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.huge_pages import HugePages
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.memory_limit import read_memory_limit
from kvkeep_server.core.results import GroupKind
from kvkeep_server.policies.eviction import EvictionPolicy
from kvkeep_server.policies.registry import eviction_policy
from kvkeep_server.tiering.keyspaces import Keyspace, KeyspaceSet
from kvkeep_server.tiering.rebuild import TableSettings
from kvkeep_server.tiering.residency import Residency
from kvkeep_server.tiering.sealed import PARENT_BEFORE, PARENT_NONE, Marks, Sealed, Slots
from kvkeep_server.tiers.ram.pool import Pool, PoolSettings
from kvkeep_server.tiers.ram.tier import RamTier

I64 = NDArray[np.int64]
BUDGET_NBYTES = 96
MILLION = 10**6
KEY_NBYTES = 32
EPOCH = 1
_MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """How much is filled and measured.

    Attributes:
        blocks: In the index, whole chains of 8,192.
        rows_initial: Of the first table, as `index.rows_initial`; not its default, so that most of
            the time is spent with a table as large as it becomes.
        load_max: As `index.load_max`.
        rounds: Interleaved rounds of look-ups; a ratio is the median over them.
        calls: Of each in a round.
    """

    blocks: int = 10 * MILLION
    rows_initial: int = 1 << 22
    load_max: float = 0.85
    rounds: int = 7
    calls: int = 60

    @property
    def chains(self) -> int:
        """Chains of 8,192 blocks."""
        return -(-self.blocks // CHAIN_BLOCKS)

    @property
    def memory_nbytes(self) -> int:
        """What a run takes, two tables and the keys twice included."""
        return self.chains * CHAIN_BLOCKS * (2 * BUDGET_NBYTES + 2 * KEY_NBYTES) + 512 * _MiB


class IndexBench:
    """One run. `rows()` fills and measures everything and gives the report's rows as they come."""

    def __init__(self, plan: IndexPlan, *, rpc: NoOpRpc, progress: Callable[[str], None]) -> None:
        """`progress` gets a line when another part begins."""
        self._plan = plan
        self._rpc = rpc
        self._progress = progress
        self._random = np.random.default_rng(SEED)
        self._policy: EvictionPolicy = eviction_policy("lru")()
        self._keys = np.empty((0, KEY_NBYTES // 8), np.uint64)

    def rows(self) -> Iterator[Row]:
        """All rows, in the order of the report.

        Raises:
            WrongBytesError: A look-up found something else than what was stored.
            OSError: Not enough memory.
        """
        with ExitStack() as held:
            executor = held.enter_context(ThreadPoolExecutor(1))
            residency = self._residency(executor)
            held.callback(_close, residency)
            blocks = self._plan.chains * CHAIN_BLOCKS
            self._progress(f"{blocks:,} blocks into the index")
            speeds = list(self._fill(residency))
            yield from self._sizes(residency, blocks)
            self._progress("the table moves")
            yield from self._move(residency, blocks)
            yield from speeds
            self._progress("look-ups")
            yield from self._look_ups(residency)

    def _residency(self, executor: ThreadPoolExecutor) -> Residency:
        pool = Pool(
            settings=PoolSettings(2 * _MiB, 2 * _MiB, 2 * _MiB, EPOCH),
            memory_limit=read_memory_limit,
            on_chunk=lambda _: None,
        )
        clock = SystemClock()
        ram = RamTier(
            pool=pool,
            slab_nbytes=_MiB,
            executor=executor,
            clock=clock,
            huge_pages=HugePages(executor, wanted=False),
        )
        return Residency(
            ram=ram,
            policy=self._policy,
            clock=clock,
            source=random.Random(SEED),  # noqa: S311 - figures that can be had again
            settings=TableSettings(EPOCH, self._plan.rows_initial, self._plan.load_max),
        )

    # ---- filling ---------------------------------------------------------------------------------

    def _fill(self, residency: Residency) -> Iterator[Row]:
        """Chain after chain, into ram and noted on nvme."""
        self._space = space = _keyspace()
        residency.add_keyspace(space)
        spaces = KeyspaceSet(0, bytes(16), (space,), (space,))
        self._keys = self._random.integers(
            0, 1 << 63, (self._plan.chains * CHAIN_BLOCKS, KEY_NBYTES // 8), np.uint64
        )
        parents = np.full(CHAIN_BLOCKS, PARENT_BEFORE, np.int64)
        parents[0] = PARENT_NONE
        spent = {"insert": 0.0, "move": 0.0, "record": 0.0}
        for start in range(0, len(self._keys), CHAIN_BLOCKS):
            began = time.perf_counter()
            if residency.index_room() < CHAIN_BLOCKS:
                rows = residency.rows_wanted(CHAIN_BLOCKS)
                residency.adopt_table(residency.build_table(rows))
            moved = time.perf_counter()
            keys = KeyBatch(self._keys[start : start + CHAIN_BLOCKS], KEY_NBYTES)
            marks = Marks(residency.table, *residency.fingerprints(space, keys))
            numbers = np.arange(start + 1, start + 1 + CHAIN_BLOCKS, dtype=np.uint64)
            sealed = Sealed(space, keys, parents, Slots(numbers, numbers, numbers), marks)
            [ids] = residency.insert([sealed], spaces, Hints())
            inserted = time.perf_counter()
            residency.record(ids, numbers << np.uint64(32), numbers)
            spent["move"] += moved - began
            spent["insert"] += inserted - moved
            spent["record"] += time.perf_counter() - inserted
        count = len(self._keys)
        yield _rate("insert", count, spent["insert"])
        yield _rate("insert/with_moves", count, spent["insert"] + spent["move"])
        yield _rate("record", count, spent["record"])

    # ---- memory ----------------------------------------------------------------------------------

    def _sizes(self, residency: Residency, blocks: int) -> Iterator[Row]:
        table = residency.table
        parts = {
            "table": table.nbytes,
            "columns": residency.columns.nbytes,
            "policy": self._policy.nbytes,
        }
        yield _bytes("bytes_a_block", residency.index_nbytes / blocks, budget=True)
        for name, nbytes in parts.items():
            yield _bytes(f"bytes_a_block/{name}", nbytes / blocks)

    def _move(self, residency: Residency, blocks: int) -> Iterator[Row]:
        """One move of the table, with all blocks in it."""
        before = _resident_nbytes(peak=True)
        began = time.perf_counter()
        prepared = residency.build_table(residency.rows_wanted(0))
        built = time.perf_counter()
        peak = _resident_nbytes() - before
        began_adoption = time.perf_counter()
        residency.adopt_table(prepared)
        adopted = time.perf_counter()
        yield _bytes("bytes_a_block/moved", residency.index_nbytes / blocks, budget=True)
        yield _bytes("rebuild_peak", peak / blocks)
        yield _rate("rebuild", blocks, built - began)
        yield Row("adopt", (adopted - began_adoption) * 1e3, (adopted - began_adoption) * 1e3, "ms")

    # ---- look-ups --------------------------------------------------------------------------------

    def _look_ups(self, residency: Residency) -> Iterator[Row]:
        table = residency.table
        fd = table.memfd.client_fd()
        region = map_region(fd, table.geometry.nbytes)
        os.close(fd)
        mapped = ClientTable(region, table_id=table.table_id, server_epoch=EPOCH)
        noop = Operation(NOOP_RPC, lambda _: self._rpc())
        operations = [self._look_up(mapped, count) for count in KEYS]
        turns = [(operation, self._plan.calls) for operation in (noop, *operations)]
        samples = interleaved(turns, self._plan.rounds)
        yield time_row(NOOP_RPC, samples[NOOP_RPC])
        for operation in operations:
            by_rpc = (NOOP_RPC, samples[NOOP_RPC])
            yield time_row(operation.name, samples[operation.name], by_rpc)

    def _look_up(self, table: ClientTable, count: int) -> Operation:
        seed = table.seed(self._space.namespace_id, self._space.group, KEY_NBYTES)

        def draw() -> bytes:
            chain = int(self._random.integers(self._plan.chains)) * CHAIN_BLOCKS
            first = chain + int(self._random.integers(CHAIN_BLOCKS - count + 1))
            return self._keys[first : first + count].tobytes()

        def run(packed: bytes) -> int:
            words = Words(packed, KEY_NBYTES)
            return table.find(seed, words, words.count).blocks

        def finish(_given: object, found: int) -> None:
            if found != count:
                raise WrongBytesError(f"a look-up of {count} stored keys found {found}")

        return Operation(f"lookup/{count}", run, draw, finish)


def _close(residency: Residency) -> None:
    """Whichever table is the last one."""
    residency.table.close()


def _keyspace() -> Keyspace:
    return Keyspace(
        index=0,
        namespace_id=bytes(range(16)),
        rank=0,
        group=0,
        kind=GroupKind.FULL,
        key_nbytes=KEY_NBYTES,
        block_nbytes=4096,
        checksum_seed=0,
        boundary_id=bytes(16),
        members=1,
        member=0,
    )


def _bytes(name: str, nbytes: float, *, budget: bool = False) -> Row:
    if budget:
        return Row(name, nbytes, nbytes, "B", f"{BUDGET_NBYTES} B", nbytes / BUDGET_NBYTES)
    return Row(name, nbytes, nbytes, "B")


def _rate(name: str, blocks: int, seconds: float) -> Row:
    rate = blocks / seconds / MILLION
    return Row(name, rate, rate, "M/s", "1 M/s", rate)


def _resident_nbytes(*, peak: bool = False) -> int:
    """The most memory that this process had since the last call with `peak`, which forgets it."""
    if peak:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    return 0
