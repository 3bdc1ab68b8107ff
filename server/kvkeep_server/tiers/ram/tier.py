"""The ram tier: reserve, fill, commit over the pool's slots; grows by chunks until the limit."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.errors import InvalidArgumentError, PoolExhaustedError
from kvkeep_server.core.huge_pages import HugePages
from kvkeep_server.core.memfd import PAGE_NBYTES
from kvkeep_server.core.results import TierId
from kvkeep_server.tiers.base import Blocks, Presence, ReadStatus, RemoveStatus, WriteStatus
from kvkeep_server.tiers.ram.pool import Pool, data_page_of
from kvkeep_server.tiers.ram.slabs import SlabAllocator

Addresses = NDArray[np.uint64]
_ONE = np.uint64(1)


@dataclass(frozen=True, slots=True)
class RamStats:
    """Where the pool's bytes are. `nbytes` is the sum of used, free, uncut, tail and header bytes.

    Attributes:
        limit_nbytes: What the pool may take.
        nbytes: What it has taken: all chunks.
        chunks: Their number.
        huge_chunks: Those that were collapsed into huge pages.
        used_nbytes: Slots in use, padding included.
        padding_nbytes: Bytes of slots in use that their blocks do not fill.
        free_nbytes: Slots that are cut and free.
        uncut_nbytes: Slabs that were never cut.
        tail_nbytes: Ends of cut slabs, too short for another slot.
        header_nbytes: Headers and generations.
        growth_refused: Why the last attempt to grow failed; empty = it did not.
    """

    limit_nbytes: int
    nbytes: int
    chunks: int
    huge_chunks: int
    used_nbytes: int
    padding_nbytes: int
    free_nbytes: int
    uncut_nbytes: int
    tail_nbytes: int
    header_nbytes: int
    growth_refused: str

    def check(self, slabs: SlabAllocator) -> None:
        """Audits the slots of that moment, and these numbers.

        Raises:
            AssertionError: an invariant is broken.
        """
        slabs.check()
        parts = self.used_nbytes + self.free_nbytes + self.uncut_nbytes + self.tail_nbytes
        assert parts + self.header_nbytes == self.nbytes, "bytes of the pool do not add up"
        assert self.nbytes <= self.limit_nbytes, "the pool is above its limit"


class Reservation:
    """Slots of one size, claimed and not yet visible; a `WriteBatch`.

    Their generations are odd already, so the bytes may be written at once.

    Attributes:
        addresses: One a slot.
        nbytes: Size of each block.
    """

    def __init__(self, tier: "RamTier", addresses: Addresses, nbytes: int) -> None:
        """Use `RamTier.reserve`."""
        self.addresses = addresses
        self.nbytes = nbytes
        self._tier = tier
        self._open = True

    @property
    def locations(self) -> Addresses:
        """The addresses."""
        return self.addresses

    @property
    def buffers(self) -> list[memoryview]:
        """The slots' bytes, writable, `nbytes` each. Made anew by each call."""
        return self._tier.pool.views(self.addresses, self.nbytes)

    async def write(
        self,
        blocks: Blocks,
        sources: Sequence[memoryview],
        *,
        durable: bool = True,
    ) -> NDArray[np.uint8]:
        """See `WriteBatch`: copies in a thread."""
        assert self._open
        assert len(blocks) == len(self.addresses) == len(sources)
        targets = self.buffers

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

        await self._tier.run(copy)
        return np.full(len(targets), WriteStatus.WRITTEN, np.uint8)

    def commit(self, kept: NDArray[np.bool_] | None = None) -> NDArray[np.uint64]:
        """Makes the generations even and returns them; the slots that are not kept go back."""
        assert self._open, "committed or aborted before"
        self._open = False
        addresses = self.addresses
        if kept is not None:
            self._tier.free(addresses[~kept])
            addresses = addresses[kept]
        return self._tier.pool.set_even(addresses)

    def abort(self) -> None:
        """Gives the slots back. Idempotent; nothing happens after `commit`."""
        if self._open:
            self._open = False
            self._tier.free(self.addresses)

    def __enter__(self) -> Self:
        """The reservation itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        """Aborts unless committed."""
        self.abort()


class RamTier:
    """Blocks in the shared pool. A location is an address, a stamp is a generation.

    Args:
        pool: Its chunks; nobody else adopts into it.
        slab_nbytes: Size of a slab, which is also the largest block.
        executor: Runs the copies of `read` and `write`, and the allocation of chunks.
        clock: For the pause after a refused growth.
        huge_pages: Collapses chunks once they are in use.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        slab_nbytes: int,
        executor: Executor,
        clock: Clock,
        huge_pages: HugePages,
    ) -> None:
        """See the class."""
        self.pool = pool
        self.slabs = SlabAllocator(slab_nbytes=slab_nbytes, on_recut=pool.retire_pages)
        self._executor = executor
        self._clock = clock
        self._growing: asyncio.Task[bool] | None = None
        self._huge_pages = huge_pages
        self._growth_refused = ""
        self._grow_after_s = float("-inf")

    @property
    def tier_id(self) -> TierId:
        """RAM."""
        return TierId.RAM

    @property
    def block_nbytes_max(self) -> int:
        """The largest block that fits a slab of a full chunk."""
        settings = self.pool.settings
        pages = min(settings.chunk_nbytes_max, settings.limit_nbytes) // PAGE_NBYTES
        data_pages = pages - data_page_of(pages * PAGE_NBYTES)
        return min(self.slabs.slab_pages, max(0, data_pages)) * PAGE_NBYTES

    # --- slots ------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, count: int) -> Reservation:
        """Claims slots: all, or fewer when there is no more room. Does not grow the pool:
        `grow` does.

        Raises:
            InvalidArgumentError: a block of this size never fits.
        """
        self._check_size(nbytes)
        addresses = self.slabs.allocate(nbytes, count)
        if len(addresses):
            self.pool.set_odd(addresses)
        return Reservation(self, addresses, nbytes)

    def free(self, addresses: Addresses) -> None:
        """Gives slots back. Their generations stay until they are used anew, so a late reader still
        reads right.

        Raises:
            AssertionError: a slot is not in use, or comes twice.
        """
        self.slabs.free(addresses)

    def view(self, address: int, nbytes: int) -> memoryview:
        """The bytes at an address, writable."""
        return self.pool.view(address, nbytes)

    def generations(self, addresses: Addresses) -> NDArray[np.uint64]:
        """The generation of each address."""
        return self.pool.gather_generations(addresses)

    def slot_nbytes(self, nbytes: int) -> int:
        """Bytes that a block of this size takes in the pool."""
        return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES

    def steal_candidate(
        self, nbytes: int, pinned: Callable[[Addresses], NDArray[np.bool_]]
    ) -> Addresses | None:
        """See `SlabAllocator.steal_candidate`."""
        return self.slabs.steal_candidate(nbytes, pinned)

    # --- growing ----------------------------------------------------------------------------------

    async def grow(self) -> bool:
        """Adds one chunk, in a thread; calls that meet share it.

        False at the limit, or where memory is short: `stats().growth_refused` says why.
        """
        if self._growing is None:
            if not self.pool.can_grow or self._clock.monotonic_s() < self._grow_after_s:
                return False
            self._growing = asyncio.create_task(self._grow())
        return await asyncio.shield(self._growing)

    async def _grow(self) -> bool:
        try:
            loop = asyncio.get_running_loop()
            with self._huge_pages.held():
                chunk = await loop.run_in_executor(self._executor, self.pool.make_chunk)
        except PoolExhaustedError as error:
            self._growth_refused = str(error)
            self._grow_after_s = self._clock.monotonic_s() + error.retry_after_s
            return False
        else:
            self._growth_refused = ""
            self.pool.adopt(chunk)
            pages = chunk.nbytes // PAGE_NBYTES - chunk.data_page
            self.slabs.add_chunk(chunk.chunk_id, chunk.data_page, pages)
            self._huge_pages.make(chunk.memfd, self._count_huge)
            return True
        finally:
            self._growing = None

    def _count_huge(self) -> None:
        self.pool.huge_chunks += 1

    # --- the rest of the Tier protocol ------------------------------------------------------------

    def resident(self, blocks: Blocks) -> NDArray[np.uint8]:
        """See `Tier`: YES where the slot is in use and still holds the generation."""
        answer = np.full(len(blocks), Presence.NO, np.uint8)
        answer[self._holds(blocks)] = Presence.YES
        return answer

    async def read(self, blocks: Blocks, into: Sequence[memoryview]) -> NDArray[np.uint8]:
        """See `Tier`: a slot that is used anew meanwhile is a MISS."""
        assert len(into) == len(blocks)
        held = np.flatnonzero(self._holds(blocks))
        sources = self.pool.views(blocks.locations[held], blocks.nbytes)
        targets = [into[position] for position in held.tolist()]

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

        await self.run(copy)
        status = np.full(len(blocks), ReadStatus.MISS, np.uint8)
        unchanged = self.pool.gather_generations(blocks.locations[held]) == blocks.stamps[held]
        status[held[unchanged]] = ReadStatus.HIT
        return status

    async def remove(self, blocks: Blocks) -> NDArray[np.uint8]:
        """See `Tier`: frees the slots that still hold these blocks."""
        held = np.flatnonzero(self._holds(blocks))
        _, first = np.unique(blocks.locations[held], return_index=True)
        held = held[first]
        self.free(blocks.locations[held])
        status = np.full(len(blocks), RemoveStatus.ABSENT, np.uint8)
        status[held] = RemoveStatus.REMOVED
        return status

    async def run(self, work: Callable[[], None]) -> None:
        """Runs work in the executor; a cancelled caller waits for its end: it touches buffers."""
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                try:
                    await asyncio.wait([running])
                except asyncio.CancelledError:
                    continue
            raise

    # --- looking in -------------------------------------------------------------------------------

    def stats(self) -> RamStats:
        """Where the bytes are now."""
        slabs, chunks = self.slabs, self.pool.chunks.values()
        return RamStats(
            limit_nbytes=self.pool.settings.limit_nbytes,
            nbytes=self.pool.nbytes,
            chunks=len(chunks),
            huge_chunks=self.pool.huge_chunks,
            used_nbytes=slabs.used_nbytes,
            padding_nbytes=slabs.padding_nbytes,
            free_nbytes=slabs.free_nbytes,
            uncut_nbytes=slabs.uncut_nbytes,
            tail_nbytes=slabs.tail_nbytes,
            header_nbytes=sum(chunk.data_page for chunk in chunks) * PAGE_NBYTES,
            growth_refused=self._growth_refused,
        )

    def check(self) -> None:
        """Audits slots against chunks.

        Raises:
            AssertionError: an invariant is broken.
        """
        self.stats().check(self.slabs)

    def _holds(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Where the slot is in use and holds the sealed block of that stamp."""
        held = self.slabs.in_use(blocks.locations)
        places = np.flatnonzero(held)
        stamps = blocks.stamps[places]
        same = self.pool.gather_generations(blocks.locations[places]) == stamps
        held[places] = same & ((stamps & _ONE) == 0)
        return held

    def _check_size(self, nbytes: int) -> None:
        if not 0 < nbytes <= self.block_nbytes_max:
            raise InvalidArgumentError(
                "block_nbytes",
                nbytes,
                f"1 to {self.block_nbytes_max} (one slab of the ram tier)",
                "raise ram.slab, or store smaller blocks",
            )
