"""Leaf-first LRU: of the blocks without a resident child, the least recently used one leaves.

A touch writes stamps, the tail's the oldest, and nothing else. Order is made when somebody has to
leave, and only as much as is needed. Ids that may be leaves lie in one of two places, each id once:

    near   heap of (stamp, id): all that were put there with a stamp up to `near_until`
    far    unsorted ids: all whose stamp is later

Stamps only grow, so an entry of `near` is a lower bound: the one on top is the oldest leaf of all,
or it is out of date, and then the id moves to `far` (touched since) or goes (pinned, has a child,
left). When `near` is empty, the oldest part of `far` moves there. So a touch costs no heap
operation, neither place outgrows the number of blocks however often they are touched, and no call
puts more than a small part of the leaves in order.
"""

import heapq
from array import array

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.growth import column, extended
from kvkeep_server.core.hints import Hints
from kvkeep_server.policies import NO_PARENT, BlockIds, BlockMask, ClassId
from kvkeep_server.policies.block_tree import BlockTree
from kvkeep_server.policies.parents import Parents

# An entry of the heap is `stamp << 32 | id`: one integer compares faster than a pair and takes a
# third of its room.
_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1
_ENTRY_NBYTES = 40
# `near` gets one part in this many of the leaves. More parts: `far` is looked through more often.
# Fewer: one call may have to skip a longer run of touched leaves.
_NEAR_SHARE = 32


class LruEviction:
    """Implements `EvictionPolicy`; hints, classes and the time of day do not count.

    12 bytes an id, and about 10 a leaf. The longest call is a `victims` that has to look through
    `far`: 1 to 2 ms with 16 thousand leaves, 20 to 50 ms with a million, once in so many victims as
    it then puts in order.

    Args:
        near_min: Leaves that are put in order at once, at least.
    """

    def __init__(self, *, near_min: int = 1024) -> None:
        """See the class."""
        self._near_min = near_min
        self._tree = BlockTree()
        # 32 bits would have to be dealt out anew every hour or so, with all blocks in order; 48, in
        # two columns, make a victim cost 1.3 times as much.
        self._stamps: NDArray[np.int64] = column(self._tree.capacity, np.int64)
        self._stamp_next = 1
        # Whether the id has an entry in near or far. It may be out of date, but there is only one.
        self._queued: BlockMask = column(self._tree.capacity, np.bool_)
        self._near: list[int] = []
        self._near_until = 0
        self._far = array("q")
        # What the last call of `victims` named. Usually gone by the next call, so put back no
        # sooner than then.
        self._named: list[int] = []

    @property
    def parents(self) -> Parents:
        """See `EvictionPolicy`."""
        return self._tree.parents

    @property
    def nbytes(self) -> int:
        """See `EvictionPolicy`."""
        arrays = self._tree.nbytes + self._stamps.nbytes + self._queued.nbytes
        return arrays + len(self._far) * self._far.itemsize + len(self._near) * _ENTRY_NBYTES

    def insert(
        self,
        ids: BlockIds,
        parents: BlockIds,
        retention_class: ClassId,
        hints: Hints,
        now: float,
    ) -> None:
        """See `EvictionPolicy`."""
        self._tree.insert(ids, parents)
        capacity = self._tree.capacity
        if capacity > len(self._queued):
            self._stamps = extended(self._stamps, capacity)
            self._queued = extended(self._queued, capacity)
        self._stamp(ids)
        self._queue(ids)

    def touch(self, ids: BlockIds, hints: Hints, now: float) -> None:
        """See `EvictionPolicy`."""
        assert self._tree.resident(ids).all(), "touch of an absent block"
        self._stamp(ids)

    def pin(self, ids: BlockIds) -> None:
        """See `EvictionPolicy`."""
        self._tree.pin(ids)

    def unpin(self, ids: BlockIds) -> None:
        """See `EvictionPolicy`."""
        self._tree.unpin(ids)
        self._queue(ids)

    def remove(self, ids: BlockIds) -> None:
        """See `EvictionPolicy`."""
        self._queue(self._tree.remove(ids))

    def victims(self, count: int, now: float) -> BlockIds:
        """See `EvictionPolicy`."""
        self._queue(np.array(self._named, np.int64))
        named: list[int] = []
        freed: list[int] = []  # heap of parents that are leaves once `named` has left
        children_left: dict[int, int] = {}
        while len(named) < count:
            block = self._pop_oldest(freed)
            if block == NO_PARENT:
                break
            named.append(block)
            parent = self._tree.parent(block)
            if parent == NO_PARENT:
                continue
            left = children_left.get(parent, self._tree.child_count(parent)) - 1
            children_left[parent] = left
            if left == 0 and not self._tree.is_pinned(parent):
                heapq.heappush(freed, self._entry(parent))
        self._named = named
        return np.array(named, np.int64)

    def check(self) -> None:
        """See `EvictionPolicy`."""
        self._tree.check()
        ids = self._tree.resident_ids()
        stamps = self._stamps[ids]
        assert ((stamps > 0) & (stamps < self._stamp_next)).all(), "a stamp that was not given"
        # np.unique would keep the GIL for 0.3 s of a million, and a daemon is audited in a thread.
        ordered = np.sort(stamps)
        assert (ordered[1:] != ordered[:-1]).all(), "two blocks with one stamp"
        near = np.array([entry & _ID_MASK for entry in self._near], np.int64)
        far = np.array(self._far, np.int64)
        places = np.bincount(np.concatenate((near, far)), minlength=len(self._queued))
        assert (places == self._queued).all(), "queued ids are those in near or far, each once"
        waiting = self._queued.copy()
        waiting[self._named] = True
        assert waiting[ids[self._tree.evictable(ids)]].all(), "a leaf that is never named"
        bounds = np.array([entry >> _ID_BITS for entry in self._near], np.int64)
        assert (bounds <= self._near_until).all(), "near holds what belongs in far"
        live = self._tree.resident(near)
        assert (bounds[live] <= self._stamps[near[live]]).all(), "an entry is no lower bound"
        far = far[self._tree.resident(far)]
        assert (self._stamps[far] > self._near_until).all(), "far holds what belongs in near"

    def _stamp(self, ids: BlockIds) -> None:
        """Makes these the most recently used ones, the last one the oldest of them."""
        end = self._stamp_next + len(ids)
        self._stamps[ids] = np.arange(end - 1, self._stamp_next - 1, -1)
        self._stamp_next = end

    def _entry(self, block: int) -> int:
        return self._stamps.item(block) << _ID_BITS | block

    def _queue(self, ids: BlockIds) -> None:
        """Gives each of these that may leave its place, if it has none."""
        if len(ids) == 0:
            return
        ids = ids[self._tree.evictable(ids) & ~self._queued[ids]]
        self._queued[ids] = True
        for block in ids.tolist():
            entry = self._entry(block)
            if entry >> _ID_BITS <= self._near_until:
                heapq.heappush(self._near, entry)
            else:
                self._far.append(block)

    def _pop_oldest(self, freed: list[int]) -> int:
        """Takes the oldest block that may leave out of `near` or `freed`; -1 = there is none."""
        self._settle()
        if freed and (not self._near or freed[0] < self._near[0]):
            return heapq.heappop(freed) & _ID_MASK
        if not self._near:
            return NO_PARENT
        block = heapq.heappop(self._near) & _ID_MASK
        self._queued[block] = False
        return block

    def _settle(self) -> None:
        """Brings the oldest leaf of the tree to the top of `near`; if there is none, empties it."""
        while self._near or self._refill():
            entry = self._near[0]
            block = entry & _ID_MASK
            if not self._tree.is_evictable(block):
                self._queued[block] = False
            elif self._stamps.item(block) != entry >> _ID_BITS:
                self._far.append(block)
            else:
                return
            heapq.heappop(self._near)

    def _refill(self) -> bool:
        """Moves the oldest leaves of `far` to `near`, which is empty; False if there were none."""
        if not self._far:
            return False
        ids = np.array(self._far, np.int64)
        leaves = self._tree.evictable(ids)
        self._queued[ids[~leaves]] = False
        ids = ids[leaves]
        stamps = self._stamps[ids]
        count = max(self._near_min, len(ids) // _NEAR_SHARE)
        if count < len(ids):
            self._near_until = int(np.partition(stamps, count - 1)[count - 1])
        else:
            self._near_until = self._stamp_next - 1
        moves = stamps <= self._near_until
        self._far = array("q", ids[~moves].tobytes())
        # A sorted list is a heap.
        self._near = sorted(map(self._entry, ids[moves].tolist()))
        return bool(self._near)
