"""Makes room: slots in the ram tier by growth, then by eviction; rows in the index by rebuilding
it.

The order is what the operator configured: memory up to the limit is there to be used, so the pool
grows before anything is thrown away. When blocks of one size crowd out those of another, a whole
slab changes hands.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.index.table import IndexTable
from kvkeep_server.tiering.residency import Residency
from kvkeep_server.tiers.ram.tier import RamTier, Reservation

I64 = NDArray[np.int64]

# Victims are asked for in batches: the policy's cost a victim falls with the batch, the overshoot
# grows with it.
_BATCH_MIN = 16
# Of a client's default deadline of 2 s. On an idle host a chunk of 1 GiB takes 0.5 s.
_GROWTH_WAIT_S = 0.5


@dataclass(frozen=True, slots=True)
class Need:
    """Slots of one size that the keys of a commit need.

    Attributes:
        nbytes: Of a block.
        slots: Shape (keys + 1,): how many the leading 0, 1, 2 ... keys need.
    """

    nbytes: int
    slots: I64

    @classmethod
    def of(cls, nbytes: int, wants: NDArray[np.bool_]) -> "Need":
        """Of keys of which these want one slot each."""
        slots = np.zeros(len(wants) + 1, np.int64)
        np.cumsum(wants, out=slots[1:])
        return cls(nbytes, slots)

    @property
    def total(self) -> int:
        """Slots for all keys."""
        return int(self.slots[-1])

    def fitting(self, slots: int) -> int:
        """For how many leading keys so many slots suffice."""
        return int(np.searchsorted(self.slots, slots, "right")) - 1


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

    async def reserve(self, needs: Sequence[Need]) -> tuple[list[Reservation], int]:
        """Reserves slots for as many of the leading keys as possible: for fewer than all only when
        nothing more may leave. There may be slots to spare.

        The caller commits or aborts them all.

        Returns:
            The slots of each need, and the number of keys that they suffice for.

        Raises:
            ResourceExhaustedError: No memory for a larger index.
        """
        keys = len(needs[0].slots) - 1
        if not self._fits(needs):
            await self._grow(needs)
        await self.index_rows(sum(need.total for need in needs))
        while True:
            # No await from here on: what is evicted for this commit must not go to another one.
            with contextlib.ExitStack() as held:
                reserved: list[Reservation] = []
                for need in needs:
                    count = int(need.slots[keys])
                    self._evict_for(need.nbytes, count)
                    reserved.append(held.enter_context(self._ram.reserve(need.nbytes, count)))
                got = [len(slots.addresses) for slots in reserved]
                fitting = min(need.fitting(slots) for need, slots in zip(needs, got, strict=True))
                # Sizes that share slots cannot all have what one of them found: try what they
                # share.
                wanted = sum(need.slots[: keys + 1] for need in needs)
                shared = int(np.searchsorted(wanted, sum(got), "right")) - 1
                if len(needs) == 1 or fitting >= min(shared, keys):
                    held.pop_all()
                    return reserved, min(fitting, keys)
            keys = min(shared, keys - 1)

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

    async def _grow(self, needs: Sequence[Need]) -> None:
        """Waits for growth, but not for long: a chunk may take seconds on a busy host, and a commit
        can do with eviction instead. The growth itself goes on.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GROWTH_WAIT_S):
                while await self._ram.grow() and not self._fits(needs):
                    pass

    def _fits(self, needs: Sequence[Need]) -> bool:
        """Whether all slots are free, all at once."""
        if len(needs) == 1:
            return self._ram.slabs.has_room(needs[0].nbytes, needs[0].total)
        with contextlib.ExitStack() as tried:
            got = [
                tried.enter_context(self._ram.reserve(need.nbytes, need.total)) for need in needs
            ]
            return all(
                len(slots.addresses) == need.total for slots, need in zip(got, needs, strict=True)
            )

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
        wanted = self._residency.rows_wanted(rows)
        try:
            prepared = await asyncio.to_thread(self._residency.build_table, wanted)
        except OSError as error:
            msg = f"index table of {wanted} rows: {error}; lower ram.size"
            raise ResourceExhaustedError(msg, retry_after_s=1.0) from error
        finally:
            self._rebuilding = None
        self._residency.adopt_table(prepared)
        self._publish_table(prepared.table)
