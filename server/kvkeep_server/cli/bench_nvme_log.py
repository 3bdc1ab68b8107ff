"""What `kvkeep bench nvme` measures: a log of blocks of one size, between a device and slots of a
pool."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvkeep_server.cli.bench_load import KEY_NBYTES, WrongBytesError
from kvkeep_server.core.clock import SystemClock
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.memory_limit import read_memory_limit
from kvkeep_server.core.results import MissReason
from kvkeep_server.tiers.base import BlockFacts, Blocks, ReadStatus, WriteStatus
from kvkeep_server.tiers.nvme.files import DiskFiles
from kvkeep_server.tiers.nvme.segments import DirectorySettings
from kvkeep_server.tiers.nvme.tier import NvmeSettings, NvmeTier
from kvkeep_server.tiers.ram.pool import Pool, PoolSettings
from kvkeep_server.tiers.record import PAGE_NBYTES, Rows, checksum_seed, key_seed

MIB = 1 << 20
SEGMENT_NBYTES = 256 * MIB
_NAMESPACE_ID = bytes(range(16))
_CREATED_MS = 1_000
# As the daemon's.
_WRITE_THREADS = 4
U64 = NDArray[np.uint64]


class Slots:
    """Page-aligned places for blocks in a chunk of a pool, as a daemon's are.

    Args:
        nbytes: Of all of them.
    """

    def __init__(self, nbytes: int) -> None:
        """See the class."""
        # Room for the chunk's header and generations, in whole huge pages.
        whole = -(-(nbytes + nbytes // 256 + MIB) // (2 * MIB)) * 2 * MIB
        self._pool = Pool(
            settings=PoolSettings(whole, whole, MIB, server_epoch=1),
            memory_limit=read_memory_limit,
            on_chunk=lambda _: None,
        )
        chunk = self._pool.make_chunk()
        self._pool.adopt(chunk)
        chunk.memfd.collapse(0, chunk.nbytes)
        self._first_page = chunk.data_page

    def views(self, first: int, count: int, block_nbytes: int) -> list[memoryview]:
        """`count` slots of this size from the `first` on, one behind the other."""
        pages = -(-block_nbytes // PAGE_NBYTES)
        begin = self._first_page + first * pages
        addresses = np.arange(begin, begin + count * pages, pages, dtype=np.uint64)
        return self._pool.views(addresses, block_nbytes)

    def close(self) -> None:
        """Gives the memory back."""
        self._pool.close()


class _NobodysRecords:
    """Implements `RecordOwner`: nothing is reclaimed, and what is lost is noticed by its read."""

    def wanted(self, rows: Rows) -> NDArray[np.bool_]:
        """All."""
        return np.ones(len(rows), np.bool_)

    def moved(self, rows: Rows, locations: U64, stamps: U64) -> None:
        """Not here."""

    def dropped(self, locations: U64, stamps: U64, reason: MissReason) -> None:
        """Not here."""

    def segment_lost(self, number: int) -> None:
        """Not here."""


class MeasuredLog:
    """A tier over one directory, and batches of the same blocks, again and again, in its log.

    Args:
        directory: Where it lies.
        slots: Where blocks are read to and written from.
        max_nbytes: Of the log.
        read_threads: Of the tier.
        random: Draws keys, bytes, and what is read.
    """

    def __init__(
        self,
        directory: Path,
        slots: Slots,
        *,
        max_nbytes: int,
        read_threads: int,
        random: np.random.Generator,
    ) -> None:
        """See the class."""
        self._directory = directory
        self._slots = slots
        self._random = random
        self._loop = asyncio.Runner()
        self._writers = ThreadPoolExecutor(_WRITE_THREADS)
        self._batches: list[Blocks] = []
        one = DirectorySettings(str(directory), max_nbytes, SEGMENT_NBYTES, 0, open_max=256)
        self._tier = NvmeTier(
            settings=NvmeSettings(
                directories=(one,),
                reading_max_nbytes=max_nbytes,
                writing_max_nbytes=max_nbytes,
                sync_interval_s=1.0,
                probe_interval_s=1.0,
                server_epoch=1,
            ),
            files=DiskFiles(),
            clock=SystemClock(),
            read_threads=read_threads,
            writers=self._writers,
            owner=_NobodysRecords(),
        )

    def __enter__(self) -> Self:
        """Starts it."""
        self._loop.run(self._tier.start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends it; the directory is the caller's to remove."""
        try:
            self._loop.run(self._tier.close())
        finally:
            self._loop.close()
            self._writers.shutdown()

    def fill(self, count: int, block_nbytes: int) -> Blocks:
        """Random bytes into the first slots: a batch to write."""
        sources = self._slots.views(0, count, block_nbytes)
        for source in sources:
            source[:] = self._random.bytes(block_nbytes)
        return _batch(self._random.bytes(count * KEY_NBYTES), block_nbytes, sources)

    def write(self, batch: Blocks, times: int) -> None:
        """Writes a batch of `fill` so many times, each synced before the next begins.

        Raises:
            WrongBytesError: The tier did not take it.
        """
        sources = self._slots.views(0, len(batch), batch.nbytes)
        self._loop.run(self._write(batch, sources, times))

    async def _write(self, batch: Blocks, sources: list[memoryview], times: int) -> None:
        for _ in range(times):
            with self._tier.reserve(batch.nbytes, len(batch)) as room:
                if len(room.locations) < len(batch):
                    raise WrongBytesError("the nvme tier has no room for a batch")
                status = await room.write(batch, sources)
                if (status != WriteStatus.WRITTEN).any():
                    raise WrongBytesError("the nvme tier did not write a batch")
                stamps = room.commit()
            self._batches.append(replace(batch, locations=room.locations, stamps=stamps))

    def seal(self) -> None:
        """Ends the segment that is written, so that all are files of records and nothing else."""
        self._loop.run(self._tier.seal())

    def full_segments(self) -> list[Path]:
        """Files of the log, but for those that are much smaller than the largest."""
        sizes = {file: file.stat().st_size for file in self._directory.glob("*.kvks")}
        return sorted(file for file in sizes if sizes[file] > max(sizes.values()) // 2)

    def draw(self, calls: int, count: int) -> list[Blocks]:
        """What so many calls read: `count` neighbours of a random batch each."""
        drawn = []
        for number in self._random.integers(len(self._batches), size=calls).tolist():
            batch = self._batches[number]
            first = int(self._random.integers(len(batch) - count + 1))
            stop = first + count
            drawn.append(
                replace(
                    batch,
                    keys=batch.keys.slice(first, stop),
                    locations=batch.locations[first:stop],
                    stamps=batch.stamps[first:stop],
                    facts=None,
                )
            )
        return drawn

    def read(self, drawn: Sequence[Blocks], at_once: int) -> None:
        """Reads what was drawn, so many calls under way, each into slots of its own.

        Raises:
            WrongBytesError: A block was not what had been written.
        """
        self._loop.run(self._read(drawn, at_once))

    async def _read(self, drawn: Sequence[Blocks], at_once: int) -> None:
        waiting = list(drawn)
        count, nbytes = len(drawn[0]), drawn[0].nbytes
        # Compared as bytes: an array call costs as much as a tenth of reading a block.
        hits = bytes([ReadStatus.HIT]) * count

        async def reader(into: list[memoryview]) -> None:
            while waiting:
                status = await self._tier.read(waiting.pop(), into)
                if status.tobytes() != hits:
                    raise WrongBytesError("the nvme tier read something else than was written")

        places = range(0, at_once * count, count)
        views = self._slots.views
        await asyncio.gather(*(reader(views(first, count, nbytes)) for first in places))


def _batch(packed: bytes, nbytes: int, sources: Sequence[memoryview]) -> Blocks:
    """Blocks of these keys with the facts that are written beside them."""
    keys, count = KeyBatch.unpack(packed, KEY_NBYTES), len(sources)
    seed = checksum_seed(_NAMESPACE_ID, 0, nbytes)
    each = [packed[i * KEY_NBYTES : (i + 1) * KEY_NBYTES] for i in range(count)]
    digests = [
        xxhash.xxh3_64_intdigest(source, key_seed(seed, key))
        for source, key in zip(sources, each, strict=True)
    ]
    facts = BlockFacts(
        parents=keys,
        has_parent=np.zeros(count, np.bool_),
        checksums=np.array(digests, np.uint64),
        created_ms=np.full(count, _CREATED_MS, np.uint64),
        last_used_ms=np.full(count, _CREATED_MS, np.uint64),
        retention_class="default",
        boundary_id=_NAMESPACE_ID,
        boundary_members=1,
        boundary_member=0,
    )
    nowhere = np.zeros(count, np.uint64)
    return Blocks(_NAMESPACE_ID, 0, keys, nbytes, nowhere, nowhere, facts)
