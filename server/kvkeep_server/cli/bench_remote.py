"""`kvkeep bench remote`, the measuring: one daemon and two clients, on its host and over TCP.

Both run on this machine, so the network is the loopback and the processors are shared: what is
measured is what the protocol costs.

What the rows mean
    local/read/SIZE     `read_into` of 64 random stored blocks through shared memory; the baseline
    remote/read/SIZE    the same of the client over TCP
    remote/acquire/SIZE the same under a lease: until all blocks are in this process
    local/store/SIZE    64 blocks: room, filling, commit; removed after each call, not on the clock
    remote/store/SIZE   the same of the client over TCP
    local/lookup/64     64 keys; remote/lookup/64 is a call
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kvkeep
from kvkeep_server.cli.bench_daemon import DaemonProcess, Value
from kvkeep_server.cli.bench_load import BlockSet, GrownPool, Source, WrongBytesError, open_set
from kvkeep_server.cli.bench_rows import Row, rate_row, time_row
from kvkeep_server.cli.bench_timing import Operation, Samples, interleaved
from kvkeep_server.core.quantities import format_size

KiB, MiB = 1 << 10, 1 << 20
BATCH_BLOCKS = 64
SIZES: Mapping[str, int] = {"57KiB": 57 * KiB, "2MiB": 2 * MiB}
KEYS = 64
_SEED = 11
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RemotePlan:
    """How much is stored and measured.

    Attributes:
        batches: Stored of each block size, of 64 blocks each; reads draw from all of it.
        calls: Of each operation in a round.
        rounds: Interleaved rounds; a ratio is the median over them.
    """

    batches: int = 4
    calls: int = 3
    rounds: int = 5

    @property
    def source_nbytes(self) -> int:
        """Random bytes that the blocks are made of."""
        return 2 * BATCH_BLOCKS * max(SIZES.values())

    @property
    def staging_nbytes(self) -> int:
        """Of each client: one of the largest batches."""
        return BATCH_BLOCKS * max(SIZES.values())

    @property
    def pool_nbytes(self) -> int:
        """Of the daemon: everything stays resident, with two batches more."""
        payload = (self.batches + 2) * BATCH_BLOCKS * sum(SIZES.values())
        return -(-(payload * 17 // 16 + 768 * MiB) // (2 * MiB)) * 2 * MiB

    def daemon_tables(self, address: str) -> dict[str, dict[str, Value]]:
        """The settings of the daemon, as TOML tables."""
        one, both = format_size(self.staging_nbytes), format_size(2 * self.staging_nbytes)
        return {
            # A daemon grows its pool a chunk ahead: one that a batch fits into.
            "ram": {"size": format_size(self.pool_nbytes), "chunk": "256MiB"},
            "sessions": {"staging_max": one, "staging_total_max": both},
            "remote": {"listen": address},
        }


def measure(plan: RemotePlan, directory: Path, progress: Callable[[str], None]) -> list[Row]:
    """All rows; `progress` gets a line when another part begins.

    Raises:
        WrongBytesError: A call returned something else than what was stored.
    """
    address = _free_address()
    staging_nbytes = plan.staging_nbytes
    progress("starting a daemon")
    with (
        DaemonProcess(directory, plan.daemon_tables(address)),
        kvkeep.connect(
            str(directory), staging_nbytes=staging_nbytes, timeout_s=_TIMEOUT_S
        ) as local,
        kvkeep.connect(
            address=address, staging_nbytes=staging_nbytes, timeout_s=_TIMEOUT_S
        ) as remote,
    ):
        return list(_Bench(plan, {"local": local, "remote": remote}, progress).rows())


def _free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


class _Bench:
    """One run."""

    def __init__(
        self,
        plan: RemotePlan,
        clients: Mapping[str, kvkeep.Client],
        progress: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._clients = clients
        self._progress = progress
        self._random = np.random.default_rng(_SEED)

    def rows(self) -> Iterator[Row]:
        plan = self._plan
        source = Source(plan.source_nbytes, self._random)
        pool = GrownPool(self._clients["local"])
        for name, nbytes in SIZES.items():
            self._progress(f"blocks of {name}")
            blocks = plan.batches * BATCH_BLOCKS
            stored = open_set(
                self._clients["local"], nbytes, blocks, source=source, random=self._random
            )
            stored.store_all(BATCH_BLOCKS, pool)
            pool.wait_for(BATCH_BLOCKS * nbytes)
            pool.wait_for_huge_pages()
            yield from self._size_rows(name, stored)
        yield from self._lookup_rows(stored)

    def _size_rows(self, name: str, stored: BlockSet) -> Iterator[Row]:
        spaces = {
            way: client.open_namespace(stored.namespace.spec)
            for way, client in self._clients.items()
        }
        reads = [self._read(f"{way}/read/{name}", stored, of) for way, of in spaces.items()]
        acquire = self._acquire(f"remote/acquire/{name}", stored, spaces["remote"])
        stores = [self._store(f"{way}/store/{name}", stored, of) for way, of in spaces.items()]
        nbytes = BATCH_BLOCKS * stored.block_nbytes
        for operations in ([*reads, acquire], stores):
            samples = self._samples(operations)
            first, *others = operations
            yield rate_row(first.name, nbytes, samples[first.name])
            for operation in others:
                by = first.name, samples[first.name]
                yield rate_row(operation.name, nbytes, samples[operation.name], by)

    def _samples(self, operations: Sequence[Operation]) -> dict[str, Samples]:
        """Interleaved rounds, after a call of each that does not count."""
        for operation in operations:
            operation.once()
            operation.settle()
        turns = [(operation, self._plan.calls) for operation in operations]
        return interleaved(turns, self._plan.rounds)

    @staticmethod
    def _read(name: str, stored: BlockSet, namespace: kvkeep.Namespace) -> Operation:
        into = np.ones(BATCH_BLOCKS * stored.block_nbytes, np.uint8)

        def finish(drawn: tuple[NDArray[np.int64], bytes], read: int) -> None:
            _expect(read, BATCH_BLOCKS, name)
            stored.check(drawn[0], into)

        return Operation(
            name,
            lambda drawn: namespace.read_into(drawn[1], into),
            lambda: stored.draw(BATCH_BLOCKS),
            finish,
        )

    @staticmethod
    def _acquire(name: str, stored: BlockSet, namespace: kvkeep.Namespace) -> Operation:
        def finish(drawn: tuple[NDArray[np.int64], bytes], acquired: kvkeep.Acquired) -> None:
            with acquired:
                _expect(acquired.leased, BATCH_BLOCKS, name)
                for number, view in zip(drawn[0], acquired.views(), strict=True):
                    stored.check(np.array([number]), np.frombuffer(view, np.uint8))

        return Operation(
            name,
            lambda drawn: namespace.acquire(drawn[1]),
            lambda: stored.draw(BATCH_BLOCKS),
            finish,
        )

    def _store(self, name: str, stored: BlockSet, namespace: kvkeep.Namespace) -> Operation:
        numbers = np.arange(BATCH_BLOCKS)

        def run(keys: bytes) -> kvkeep.CommitResult:
            store = namespace.store(keys)
            stored.fill(store, numbers)
            return store.commit()

        def finish(keys: bytes, result: kvkeep.CommitResult) -> None:
            _expect(result.stored, BATCH_BLOCKS, name)
            namespace.remove(keys)

        key_nbytes = namespace.spec.key_nbytes
        return Operation(name, run, lambda: self._random.bytes(BATCH_BLOCKS * key_nbytes), finish)

    def _lookup_rows(self, stored: BlockSet) -> Iterator[Row]:
        operations = []
        for way, client in self._clients.items():
            namespace = client.open_namespace(stored.namespace.spec)
            operations.append(
                Operation(
                    f"{way}/lookup/{KEYS}",
                    namespace.lookup,
                    lambda: stored.draw(KEYS)[1],
                    lambda _, found: _expect(found.blocks, KEYS, "a look-up of stored keys"),
                )
            )
        samples = interleaved([(one, 50) for one in operations], self._plan.rounds)
        local, remote = (one.name for one in operations)
        yield time_row(local, samples[local])
        yield time_row(remote, samples[remote], (local, samples[local]))


def _expect(got: int, wanted: int, what: str) -> None:
    if got != wanted:
        raise WrongBytesError(f"{what}: {got} of {wanted} blocks")
