"""Bytes of leased blocks for clients that do not map the pool.

What is sent is copied in threads, a bounded piece at a time, and each block is held against its
checksum before the first byte of it leaves. Between two copies only the lease protects the blocks:
a client that does not take them keeps nothing but what it leased.
"""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.errors import InvalidArgumentError
from kvkeep_server.core.results import BlockStatus
from kvkeep_server.tiering.keyspaces import Keyspace
from kvkeep_server.tiering.leases import Lease
from kvkeep_server.tiering.removal import Removal
from kvkeep_server.tiering.residency import Residency
from kvkeep_server.tiers.ram.tier import RamTier

I64 = NDArray[np.int64]

CHUNK_NBYTES_MAX = 1 << 20
# Copied at a time: a hand-over to a thread costs less than a tenth of that copy.
_BATCH_NBYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class SendOrder:
    """What is wanted of a lease.

    Attributes:
        lease_id: The lease.
        rank: Of the column.
        group: Of the column.
        first: Number of the first block in the column.
        blocks: How many; 0 = all from there on.
        offset: First byte of each block.
        nbytes: Bytes of each; 0 = to its end.
        crc32: What those of its chunks go on from.
    """

    lease_id: int
    rank: int
    group: int
    first: int
    blocks: int
    offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of blocks that lie one behind the other.

    Attributes:
        block: Number in the column of the one that they begin in, or that the status is of.
        offset: Where in that block's range.
        data: The bytes; empty where there is a status.
        crc32: Of the bytes, behind the order's.
        status: READY, or why the block does not come.
    """

    block: int
    offset: int
    data: bytes = b""
    crc32: int = 0
    status: BlockStatus = BlockStatus.READY


@dataclass(slots=True)
class _Copy:
    """One copy, for a thread.

    Attributes:
        views: Of all blocks that it touches, whole.
        sums: Their checksums, None where a block was held against its own before.
        first: Number of the first of them.
        ranges: Bytes wanted of each, as (offset, bytes).
        start: First byte, counted from the first block's range.
        stop: Behind the last.
        crc32: What those of the chunks go on from.
        chunks: What came of it.
    """

    keyspace: Keyspace
    views: Sequence[memoryview]
    keys: Sequence[bytes]
    sums: Sequence[int | None]
    first: int
    ranges: tuple[int, int]
    start: int
    stop: int
    crc32: int
    chunks: list[Chunk]

    def run(self) -> None:
        """Fills `chunks`; the first block that is not what was stored ends them."""
        offset, nbytes = self.ranges
        good = next((at for at in range(len(self.views)) if not self._right(at)), len(self.views))
        stop = min(self.stop, good * nbytes)
        for start in range(self.start, stop, CHUNK_NBYTES_MAX):
            end = min(start + CHUNK_NBYTES_MAX, stop)
            data = b"".join(self._parts(start, end, offset, nbytes))
            block, where = divmod(start, nbytes)
            crc32 = zlib.crc32(data, self.crc32)
            self.chunks.append(Chunk(self.first + block, where, data, crc32))
        if good < len(self.views):
            self.chunks.append(Chunk(self.first + good, 0, status=BlockStatus.CORRUPT))

    def _right(self, at: int) -> bool:
        wanted = self.sums[at]
        return wanted is None or self.keyspace.checksum(self.keys[at], self.views[at]) == wanted

    def _parts(self, start: int, end: int, offset: int, nbytes: int) -> list[memoryview]:
        parts = []
        while start < end:
            block, where = divmod(start, nbytes)
            count = min(nbytes - where, end - start)
            parts.append(self.views[block][offset + where : offset + where + count])
            start += count
        return parts


class Sending:
    """Event loop only.

    Args:
        residency: Where blocks are.
        ram: Their bytes, and the threads that copy them.
        removal: Takes out what is corrupt.
    """

    def __init__(self, *, residency: Residency, ram: RamTier, removal: Removal) -> None:
        """See the class."""
        self._residency = residency
        self._ram = ram
        self._removal = removal

    async def chunks(
        self, lease: Lease, keyspace: Keyspace, order: SendOrder, lives: Callable[[], None]
    ) -> AsyncGenerator[Chunk, None]:
        """The bytes that were ordered, in order. The first block that cannot be given is the last
        chunk, with its status.

        Args:
            lease: A live one.
            keyspace: Of its namespace set.
            order: What is wanted.
            lives: Raises when the lease is over; asked before each copy.

        Raises:
            InvalidArgumentError: Names the field.
        """
        ids = self._wanted(lease, keyspace, order)
        size = _size_of(order, keyspace.block_nbytes)
        total = len(ids) * size
        spans = [
            (start, min(start + _BATCH_NBYTES, total), size)
            for start in range(0, total, _BATCH_NBYTES)
        ]
        ahead: asyncio.Task[list[Chunk]] | None = None
        try:
            for at in range(len(spans) + 1):
                chunks = await ahead if ahead is not None else []
                ahead, broken = None, chunks and chunks[-1].status is not BlockStatus.READY
                if at < len(spans) and not broken:
                    # The next copy is made while this one is sent.
                    lives()
                    work = self._copied(lease, keyspace, order, ids, spans[at])
                    ahead = asyncio.create_task(work)
                for chunk in chunks:
                    yield chunk
                if broken:
                    return
        finally:
            if ahead is not None:
                ahead.cancel()

    def _wanted(self, lease: Lease, keyspace: Keyspace, order: SendOrder) -> I64:
        own: I64 = lease.blocks[self._residency.columns.keyspace[lease.blocks] == keyspace.index]
        stop = order.first + order.blocks if order.blocks else len(own)
        if not 0 <= order.first <= stop <= len(own):
            raise InvalidArgumentError(
                "first_block and blocks",
                (order.first, order.blocks),
                f"blocks 0 to {len(own)} of that column of the lease",
                "ask for what the lease has",
            )
        wanted: I64 = own[order.first : stop]
        return wanted

    async def _copied(
        self,
        lease: Lease,
        keyspace: Keyspace,
        order: SendOrder,
        ids: I64,
        span: tuple[int, int, int],
    ) -> list[Chunk]:
        """Chunks of the bytes from start to stop, of blocks of so many bytes each."""
        start, stop, size = span
        low, high = start // size, -(-stop // size)
        number, columns = order.first + low, self._residency.columns
        blocks = ids[low:high]
        addresses = columns.address_of(blocks)
        absent = np.flatnonzero(addresses == 0)
        if len(absent):
            blocks = blocks[: absent[0]]
        packed = columns.key_words[blocks].tobytes()
        stride = columns.key_words.shape[1] * 8
        sums: list[int | None] = list(columns.checksum[blocks].tolist())
        if start % size and sums:
            sums[0] = None  # it began in the copy before
        generations = self._residency.generations_of(blocks)
        job = _Copy(
            keyspace=keyspace,
            views=[
                self._ram.view(address, keyspace.block_nbytes)
                for address in addresses[: len(blocks)].tolist()
            ],
            keys=[
                packed[at * stride : at * stride + keyspace.key_nbytes] for at in range(len(blocks))
            ],
            sums=sums,
            first=number,
            ranges=(order.offset, size),
            start=start - low * size,
            stop=stop - low * size,
            crc32=order.crc32,
            chunks=[],
        )
        self._residency.pin(lease.units)
        try:
            await self._ram.run(job.run)
        finally:
            self._residency.unpin(lease.units)
        if job.chunks and job.chunks[-1].status is BlockStatus.CORRUPT:
            bad = job.chunks[-1].block - number
            await self._removal.of_blocks(blocks[bad : bad + 1], generations[bad : bad + 1])
        elif len(absent):
            status = BlockStatus.PENDING if lease.coming is not None else BlockStatus.MISS
            job.chunks.append(Chunk(number + len(blocks), 0, status=status))
        return job.chunks


def _size_of(order: SendOrder, block_nbytes: int) -> int:
    """Bytes wanted of each block."""
    nbytes = order.nbytes or max(0, block_nbytes - order.offset)
    if not nbytes or order.offset + nbytes > block_nbytes:
        raise InvalidArgumentError(
            "range_offset and range_nbytes",
            (order.offset, order.nbytes),
            f"bytes inside a block of {block_nbytes}",
            "leave both out for whole blocks",
        )
    return nbytes
