"""Which pages of the pool hold a slot. Numbers only: no memory, no I/O.

A chunk is a run of slabs of equal size, the last one as long as what is left. A slab is cut into
equal slots of whole pages when the first slot of a size is asked for, and cut anew for another size
once it is empty. Free slots of one size form one stack, so that a batch costs a handful of numpy
calls whatever the number of slabs it touches: 64 slots take about 20 us, 8,000 about 0.4 ms.

Inside, a page has a flat number: slab number * pages a slab + page in the slab. Addresses are those
of `proto/kvkeep/v1/shared_memory.md`, section 2.
"""

import copy
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.memfd import PAGE_NBYTES

SLAB_NBYTES_MIN = 1 << 20
SLAB_NBYTES_MAX = 64 << 20

_U32 = np.uint64(32)
_PAGE_MASK = np.uint64(0xFFFFFFFF)

Flat = NDArray[np.int64]


def auto_slab_nbytes(pool_nbytes: int) -> int:
    """The slab size for a pool: a sixteenth of it within 1 to 64 MiB, whole pages."""
    nbytes = min(max(pool_nbytes // 16, SLAB_NBYTES_MIN), SLAB_NBYTES_MAX)
    return nbytes // PAGE_NBYTES * PAGE_NBYTES


def slot_pages_of(nbytes: int) -> int:
    """Pages of a slot for a block of this size."""
    return max(1, -(-nbytes // PAGE_NBYTES))


def _recut_nothing(_chunk_id: int, _first_page: int, _pages: int) -> None:
    raise AssertionError("a snapshot was allocated from")


class _Stack:
    """Flat page numbers of the free slots of one size; grows by doubling."""

    def __init__(self) -> None:
        self.items: Flat = np.empty(64, np.int64)
        self.top = 0

    def push(self, flat: Flat) -> None:
        top = self.top + len(flat)
        if top > len(self.items):
            items: Flat = np.empty(max(top, 2 * len(self.items)), np.int64)
            items[: self.top] = self.items[: self.top]
            self.items = items
        self.items[self.top : top] = flat
        self.top = top

    def pop(self, count: int) -> Flat:
        self.top -= count
        return self.items[self.top : self.top + count]

    def keep(self, wanted: NDArray[np.bool_]) -> None:
        left = self.items[: self.top][wanted]
        self.items[: len(left)] = left
        self.top = len(left)


class SlabAllocator:
    """Slots of any size out of chunks. One owner: the event loop.

    Broken use (freeing what is not in use) is an AssertionError: going on would hand one slot to
    two blocks.

    Args:
        slab_nbytes: Size of a slab, a multiple of 4096; also the largest block.
        on_recut: Called with (chunk id, first page, pages) before a slab that held slots is cut
            anew.
    """

    def __init__(self, *, slab_nbytes: int, on_recut: Callable[[int, int, int], None]) -> None:
        """See the class."""
        assert slab_nbytes > 0
        assert slab_nbytes % PAGE_NBYTES == 0
        self.slab_pages = slab_nbytes // PAGE_NBYTES
        self._on_recut = on_recut
        self._stacks: dict[int, _Stack] = {}
        self._uncut: list[int] = []  # slab numbers, the next one to cut last
        self._in_use_pages = 0
        self._padding_nbytes = 0
        # By chunk id: flat number minus page, and the chunk's range of pages.
        self._flat_minus_page: Flat = np.empty(0, np.int64)
        self._first_page: Flat = np.empty(0, np.int64)
        self._end_page: Flat = np.empty(0, np.int64)
        # By slab: address minus flat number, its pages, pages of its slots (0 = uncut), slots in
        # use.
        self._address_minus_flat: Flat = np.empty(0, np.int64)
        self._pages: Flat = np.empty(0, np.int64)
        self._slot_pages: Flat = np.empty(0, np.int64)
        self._used: Flat = np.empty(0, np.int64)
        # By flat page number: 0, or 1 + the unused bytes of the slot in use that begins there.
        self._state: NDArray[np.uint16] = np.zeros(0, np.uint16)

    # --- room -------------------------------------------------------------------------------------

    @property
    def used_nbytes(self) -> int:
        """Bytes of the slots in use, padding included."""
        return self._in_use_pages * PAGE_NBYTES

    @property
    def padding_nbytes(self) -> int:
        """Bytes of the slots in use that their blocks do not fill."""
        return self._padding_nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes of the slots that are cut and free."""
        pages = sum(slot_pages * stack.top for slot_pages, stack in self._stacks.items())
        return pages * PAGE_NBYTES

    @property
    def uncut_nbytes(self) -> int:
        """Bytes of the slabs that were never cut."""
        return int(self._pages[self._uncut].sum()) * PAGE_NBYTES

    @property
    def tail_nbytes(self) -> int:
        """Bytes at the ends of cut slabs that are too short for another slot."""
        cut = self._slot_pages > 0
        return int((self._pages[cut] % self._slot_pages[cut]).sum()) * PAGE_NBYTES

    def has_room(self, nbytes: int, count: int) -> bool:
        """Whether `room` is at least `count`; nearly free when the slots are cut already."""
        stack = self._stacks.get(slot_pages_of(nbytes))
        return (stack is not None and stack.top >= count) or self.room(nbytes) >= count

    def room(self, nbytes: int) -> int:
        """How many blocks of this size `allocate` would find room for now."""
        slot_pages = slot_pages_of(nbytes)
        stack = self._stacks.get(slot_pages)
        fresh = int((self._pages[self._uncut] // slot_pages).sum())
        empty = int((self._pages[self._empty_slabs(slot_pages)] // slot_pages).sum())
        return (stack.top if stack is not None else 0) + fresh + empty

    def add_chunk(self, chunk_id: int, first_page: int, pages: int) -> None:
        """Takes a range of a chunk's pages in. Chunk ids come in order, without a gap."""
        assert chunk_id == len(self._first_page), f"chunk {chunk_id} out of order"
        assert pages > 0
        assert first_page > 0, "page 0 is the chunk's header"
        first_slab = len(self._pages)
        slabs = -(-pages // self.slab_pages)
        flat_minus_page = first_slab * self.slab_pages - first_page
        self._flat_minus_page = np.append(self._flat_minus_page, flat_minus_page)
        self._first_page = np.append(self._first_page, first_page)
        self._end_page = np.append(self._end_page, first_page + pages)
        sizes = np.full(slabs, self.slab_pages, np.int64)
        sizes[-1] = pages - (slabs - 1) * self.slab_pages
        shift = np.full(slabs, (chunk_id << 32) - flat_minus_page, np.int64)
        self._pages = np.concatenate([self._pages, sizes])
        self._address_minus_flat = np.concatenate([self._address_minus_flat, shift])
        self._slot_pages = np.concatenate([self._slot_pages, np.zeros(slabs, np.int64)])
        self._used = np.concatenate([self._used, np.zeros(slabs, np.int64)])
        self._uncut = [*range(first_slab + slabs - 1, first_slab - 1, -1), *self._uncut]
        self._grow_state((first_slab + slabs) * self.slab_pages)

    # --- slots ------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, count: int) -> NDArray[np.uint64]:
        """Slots for blocks of one size.

        Args:
            nbytes: Size of one block; its slot is rounded up to whole pages.
            count: Slots wanted.

        Returns:
            At most `count` addresses, ascending within a slab; fewer when there is no more room.
        """
        slot_pages = slot_pages_of(nbytes)
        stack = self._stacks.get(slot_pages)
        if stack is None:
            stack = self._stacks[slot_pages] = _Stack()
        if stack.top < count:
            self._refill(stack, slot_pages, count)
        take = min(count, stack.top)
        flat = np.sort(stack.pop(take))
        slabs = flat // self.slab_pages
        padding = slot_pages * PAGE_NBYTES - nbytes
        self._state[flat] = padding + 1
        np.add.at(self._used, slabs, 1)
        self._in_use_pages += take * slot_pages
        self._padding_nbytes += take * padding
        return (flat + self._address_minus_flat[slabs]).view(np.uint64)

    def free(self, addresses: NDArray[np.uint64]) -> None:
        """Gives slots back, in any order and of any sizes.

        Raises:
            AssertionError: an address is not that of a slot in use, or comes twice. Nothing was
                changed.
        """
        if not len(addresses):
            return
        flat = np.sort(self._flat(addresses))
        state = self._state[flat]
        assert state.all(), "freed a slot that is not in use"
        assert (flat[1:] != flat[:-1]).all(), "freed a slot twice in one call"
        slabs = flat // self.slab_pages
        slot_pages = self._slot_pages[slabs]
        self._state[flat] = 0
        np.subtract.at(self._used, slabs, 1)
        self._in_use_pages -= int(slot_pages.sum())
        self._padding_nbytes -= int(state.sum(dtype=np.int64)) - len(flat)
        descending = flat[::-1]  # the stack's top is its end: the lowest page leaves first
        size = int(slot_pages[0])
        if (slot_pages == size).all():
            self._stacks[size].push(descending)
            return
        for size in np.unique(slot_pages).tolist():
            self._stacks[size].push(descending[slot_pages[::-1] == size])

    def in_use(self, addresses: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Whether a slot in use begins at each address; any u64 is a legal question."""
        chunks = addresses >> _U32
        known = chunks < len(self._first_page)
        answer = np.zeros(len(addresses), np.bool_)
        chunk = chunks[known].view(np.int64)
        page = (addresses[known] & _PAGE_MASK).view(np.int64)
        inside = (page >= self._first_page[chunk]) & (page < self._end_page[chunk])
        flat = (page + self._flat_minus_page[chunk])[inside]
        known[known] = inside
        answer[known] = self._state[flat] > 0
        return answer

    def slot_nbytes(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Size of the slot at each address, in bytes. The addresses are those of slots in use."""
        sizes: NDArray[np.int64] = self._slot_pages[self._flat(addresses) // self.slab_pages]
        return sizes * PAGE_NBYTES

    def steal_candidate(
        self, nbytes: int, pinned: Callable[[NDArray[np.uint64]], NDArray[np.bool_]]
    ) -> NDArray[np.uint64] | None:
        """The slab to empty when a size has no room and no slots of its own to evict.

        Args:
            nbytes: Size of the blocks that need room.
            pinned: Tells which of these slots must stay.

        Returns:
            Addresses in use of the least occupied slab of another size that holds no pinned slot,
            or None. The caller evicts them; `allocate` cuts the slab anew.
        """
        slot_pages = slot_pages_of(nbytes)
        other = (self._slot_pages > 0) & (self._slot_pages != slot_pages)
        candidates = np.flatnonzero(other & (self._used > 0) & (self._pages >= slot_pages))
        occupied = self._used[candidates] * self._slot_pages[candidates]
        order = candidates[np.argsort(occupied, kind="stable")]
        start, batch = 0, 4
        while start < len(order):  # few calls: `pinned` may look at everything that is resident
            slots = [self._used_slots_of(slab) for slab in order[start : start + batch].tolist()]
            held = pinned(np.concatenate(slots))
            ends = np.cumsum([len(addresses) for addresses in slots])
            for addresses, mask in zip(slots, np.split(held, ends[:-1]), strict=True):
                if not mask.any():
                    return addresses
            start, batch = start + batch, 4 * batch
        return None

    def snapshot(self) -> "SlabAllocator":
        """A copy to look at, in any thread; it recuts nothing."""
        return copy.deepcopy(self, {id(self._on_recut): _recut_nothing})

    def check(self) -> None:
        """Audits everything against everything.

        Raises:
            AssertionError: an invariant is broken.
        """
        occupied = np.zeros(len(self._state), np.bool_)
        in_use_pages = 0
        for slab in range(len(self._pages)):
            slots = self._slots_of(slab)
            used = self._state[slots] > 0
            assert int(used.sum()) == self._used[slab], f"slab {slab}: count of used slots is wrong"
            in_use_pages += int(used.sum() * self._slot_pages[slab])
            occupied[slots[used]] = True
        assert (occupied == (self._state > 0)).all(), "a slot in use is not one of its slab's"
        assert in_use_pages == self._in_use_pages, "pages in use are counted wrong"
        padding = int(self._state[occupied].sum(dtype=np.int64) - occupied.sum())
        assert padding == self._padding_nbytes, "padding is counted wrong"
        uncut = np.flatnonzero(self._slot_pages == 0).tolist()
        assert sorted(self._uncut) == uncut, "list of uncut slabs is wrong"
        for size, stack in self._stacks.items():
            slabs = np.flatnonzero(self._slot_pages == size).tolist()
            slots = np.concatenate([np.empty(0, np.int64), *map(self._slots_of, slabs)])
            free = np.sort(stack.items[: stack.top])
            expected = np.sort(slots[~occupied[slots]])
            assert np.array_equal(free, expected), f"free slots of {size} pages are wrong"

    # --- inside -----------------------------------------------------------------------------------

    def _flat(self, addresses: NDArray[np.uint64]) -> Flat:
        chunk = (addresses >> _U32).view(np.int64)
        page = (addresses & _PAGE_MASK).view(np.int64)
        assert int(chunk.max(initial=-1)) < len(self._first_page), "address in an unknown chunk"
        inside = (page >= self._first_page[chunk]) & (page < self._end_page[chunk])
        assert inside.all(), "address outside its chunk's data"
        flat: Flat = page + self._flat_minus_page[chunk]
        return flat

    def _slots_of(self, slab: int) -> Flat:
        slot_pages = int(self._slot_pages[slab])
        if slot_pages == 0:
            return np.empty(0, np.int64)
        slots = int(self._pages[slab]) // slot_pages
        return slab * self.slab_pages + np.arange(slots, dtype=np.int64) * slot_pages

    def _used_slots_of(self, slab: int) -> NDArray[np.uint64]:
        """Addresses of a slab's slots in use."""
        flat = self._slots_of(slab)
        flat = flat[self._state[flat] > 0]
        addresses: NDArray[np.uint64] = (flat + self._address_minus_flat[slab]).view(np.uint64)
        return addresses

    def _empty_slabs(self, slot_pages: int) -> Flat:
        """Slabs of other sizes without a slot in use, long enough for one of this size."""
        other = (self._slot_pages > 0) & (self._slot_pages != slot_pages)
        empty: Flat = np.flatnonzero(other & (self._used == 0) & (self._pages >= slot_pages))
        return empty

    def _refill(self, stack: _Stack, slot_pages: int, count: int) -> None:
        """Cuts slabs until the stack holds `count` slots or nothing is left to cut."""
        wanted = count - stack.top
        taken = []
        for slab in reversed(self._uncut):
            if wanted <= 0:
                break
            slots = int(self._pages[slab]) // slot_pages
            if slots:
                taken.append(slab)
                wanted -= slots
        if taken:
            chosen = set(taken)
            self._uncut = [slab for slab in self._uncut if slab not in chosen]
        if wanted > 0:
            empty = self._empty_slabs(slot_pages)
            enough = np.cumsum(self._pages[empty] // slot_pages) - self._pages[empty] // slot_pages
            recut = empty[enough < wanted].tolist()
            self._uncut_again(recut)
            taken.extend(recut)
        for slab in reversed(taken):  # the first slab on top: batches ascend through the pool
            self._slot_pages[slab] = slot_pages
            stack.push(self._slots_of(slab)[::-1])

    def _uncut_again(self, slabs: list[int]) -> None:
        if not slabs:
            return
        leaving = np.zeros(len(self._pages), np.bool_)
        leaving[slabs] = True
        for size in np.unique(self._slot_pages[slabs]).tolist():
            stack = self._stacks[size]
            stack.keep(~leaving[stack.items[: stack.top] // self.slab_pages])
        for slab in slabs:
            address = slab * self.slab_pages + int(self._address_minus_flat[slab])
            self._on_recut(address >> 32, address & 0xFFFFFFFF, int(self._pages[slab]))

    def _grow_state(self, pages: int) -> None:
        if pages > len(self._state):
            # zeros are not memory until written, so doubling is cheap
            state = np.zeros(max(pages, 2 * len(self._state)), np.uint16)
            state[: len(self._state)] = self._state
            self._state = state
