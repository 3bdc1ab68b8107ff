"""Makes room: slots in the ram tier by growth, then by eviction; rows in the index by rebuilding
it.

The order is what the operator configured: memory up to the limit is there to be used, so the pool
grows before anything is thrown away. When blocks of one size crowd out those of another, a whole
slab changes hands.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.index.table import IndexTable
from kvkeep_server.tiering.residency import Residency
from kvkeep_server.tiers.ram.tier import RamTier, Reservation

# Victims are asked for in batches: the policy's cost a victim falls with the batch, the overshoot
# grows with it.
_BATCH_MIN = 16
# Of a client's default deadline of 2 s. On an idle host a chunk of 1 GiB takes 0.5 s.
_GROWTH_WAIT_S = 0.5


class RoomMaker:
    """Event loop only.

    Args:
        ram: Whose slots.
        residency: What may leave.
        publish_table: Tells clients of a new index table.
    """

    def __init__(
        self, *, ram: RamTier, residency: Residency, publish_table: Callable[[IndexTable], None]
    ) -> None:
        """See the class."""
        self._ram = ram
        self._residency = residency
        self._publish_table = publish_table
        self._rebuilding: asyncio.Task[None] | None = None
        self._growing: asyncio.Task[bool] | None = None

    async def reserve(self, sizes: Sequence[int], count: int) -> list[Reservation]:
        """Reserves up to `count` slots of each size: the same number of each, 0 when nothing may
        leave.

        The caller commits or aborts them all.

        Raises:
            ResourceExhaustedError: No memory for a larger index.
        """
        if not self._fits(sizes, count):
            await self._grow(sizes, count)
        await self.index_rows(count * len(sizes))
        while True:
            # No await from here on: what is evicted for this commit must not go to another one.
            with contextlib.ExitStack() as held:
                reserved: list[Reservation] = []
                for nbytes in sizes:
                    self._evict_for(nbytes, count)
                    reserved.append(held.enter_context(self._ram.reserve(nbytes, count)))
                got = [len(slots.addresses) for slots in reserved]
                if min(got) == max(got):
                    held.pop_all()
                    return reserved
            # Sizes that share slots cannot all have what one of them found: try what they share.
            count = sum(got) // len(got)

    def grow_ahead(self) -> None:
        """Begins to grow the pool before commits need it. Call it now and then."""
        slabs, chunk_nbytes = self._ram.slabs, self._ram.pool.settings.chunk_nbytes_max
        scarce = 2 * (slabs.free_nbytes + slabs.uncut_nbytes) < chunk_nbytes
        if scarce and self._ram.pool.can_grow and self._growing is None:
            self._growing = asyncio.create_task(self._ram.grow())
            self._growing.add_done_callback(self._grown)

    def _grown(self, task: asyncio.Task[bool]) -> None:
        self._growing = None
        if not task.cancelled():
            task.result()

    async def _grow(self, sizes: Sequence[int], count: int) -> None:
        """Waits for growth, but not for long: a chunk may take seconds on a busy host, and a commit
        can do with eviction instead. The growth itself goes on.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GROWTH_WAIT_S):
                while await self._ram.grow() and not self._fits(sizes, count):
                    pass

    def _fits(self, sizes: Sequence[int], count: int) -> bool:
        """Whether `count` slots of each size are free, all at once."""
        if len(sizes) == 1:
            return self._ram.slabs.has_room(sizes[0], count)
        with contextlib.ExitStack() as tried:
            got = [tried.enter_context(self._ram.reserve(nbytes, count)) for nbytes in sizes]
            return all(len(slots.addresses) == count for slots in got)

    def give_back(self, addresses: NDArray[np.uint64]) -> None:
        """Slots of a committed reservation whose blocks did not become resident."""
        self._ram.free(addresses)

    def _evict_for(self, nbytes: int, count: int) -> None:
        """Evicts until `count` slots of this size are free, or nothing more may leave.

        First who was not used for longest, whatever its size. When that was in vain, because others
        of that size live on in every slab, a slab is taken or blocks of this size have to go.
        """
        evicted = 0
        while not self._ram.slabs.has_room(nbytes, count):
            short = count - self._ram.slabs.room(nbytes)
            if evicted < 2 * count + _BATCH_MIN:
                named = self._residency.evict(max(short, _BATCH_MIN) if evicted else short)
                evicted += named
                if named:
                    continue
            if not self._take_slab(nbytes) and not self._take_oldest(nbytes, short):
                return

    def _take_slab(self, nbytes: int) -> bool:
        """Empties a slab of another block size, so that it can be cut anew; False if there is none
        to take."""
        addresses = self._ram.steal_candidate(nbytes, self._residency.pinned_addresses)
        if addresses is None:
            return False
        before = self._ram.slabs.room(nbytes)
        self._residency.evict_addresses(addresses)
        return self._ram.slabs.room(nbytes) > before

    def _take_oldest(self, nbytes: int, count: int) -> bool:
        """Evicts blocks of this size; False if none may leave."""
        addresses = self._residency.oldest_addresses(nbytes, count)
        self._residency.evict_addresses(addresses)
        return len(addresses) > 0

    async def index_rows(self, rows: int) -> None:
        """Waits for a rebuild that runs, and begins one when fewer than `rows` rows are free.

        Raises:
            ResourceExhaustedError: No memory for a larger index.
        """
        while True:
            await self.index_at_rest()
            if self._residency.index_room() >= rows:
                return
            self._rebuilding = asyncio.create_task(self._rebuild(rows))

    async def index_at_rest(self) -> None:
        """Waits for a rebuild that runs: until then nothing may come in or leave."""
        # Who wakes first may have begun the next one already.
        while self._rebuilding is not None:
            await asyncio.shield(self._rebuilding)

    async def _rebuild(self, rows: int) -> None:
        """Builds in a thread, so that look-ups and leases go on; commits wait in `index_rows`."""
        table = self._residency.table
        wanted = max(2 * table.geometry.rows, 2 * (table.live_rows + rows))
        if table.removed_rows > table.live_rows:
            wanted = table.geometry.rows
        try:
            prepared = await asyncio.to_thread(self._residency.build_table, wanted)
        except OSError as error:
            msg = f"index table of {wanted} rows: {error}; lower ram.size"
            raise ResourceExhaustedError(msg, retry_after_s=1.0) from error
        finally:
            self._rebuilding = None
        self._residency.adopt_table(prepared)
        self._publish_table(prepared.table)
