"""Who is whose parent, who is pinned, who may leave: the part of eviction without a choice.

Arrays by block id that grow by doubling, 10 bytes an id. A block may leave when it is resident, not
pinned, and no resident block is its child.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.policies import NO_PARENT, BlockIds, BlockMask

_CAPACITY_FIRST = 1024
_Item = TypeVar("_Item", bound=np.generic)


class BlockTree:
    """Resident blocks and their links. Arguments and guarantees are those of `EvictionPolicy`."""

    def __init__(self) -> None:
        """See the class."""
        # Zeroed arrays: the unused half after a doubling costs no memory until it is written.
        self._resident: BlockMask = np.zeros(_CAPACITY_FIRST, np.bool_)
        self._pinned: BlockMask = np.zeros(_CAPACITY_FIRST, np.bool_)
        self._parents: NDArray[np.int32] = np.zeros(_CAPACITY_FIRST, np.int32)
        self._children: NDArray[np.int32] = np.zeros(_CAPACITY_FIRST, np.int32)

    @property
    def capacity(self) -> int:
        """Ids below this have a place in the arrays."""
        return len(self._resident)

    def insert(self, ids: BlockIds, parents: BlockIds) -> None:
        """Adds blocks, unpinned and without children."""
        if len(ids) == 0:
            return
        capacity = int(ids.max()) + 1
        if capacity > self.capacity:
            self._grow(capacity)
        assert not self._resident[ids].any(), "insert of a resident block"
        self._resident[ids] = True
        self._parents[ids] = parents
        linked = parents[parents >= 0]
        assert self._resident[linked].all(), "a parent that is not resident"
        np.add.at(self._children, linked, 1)

    def pin(self, ids: BlockIds) -> None:
        """Pins blocks that are not pinned."""
        assert self._resident[ids].all(), "pin of an absent block"
        assert not self._pinned[ids].any(), "pin of a pinned block"
        self._pinned[ids] = True

    def unpin(self, ids: BlockIds) -> None:
        """Unpins blocks that are pinned."""
        assert self._pinned[ids].all(), "unpin of a block that is not pinned"
        self._pinned[ids] = False

    def remove(self, ids: BlockIds) -> BlockIds:
        """Takes blocks out.

        Returns:
            Resident parents that lost children, each once.
        """
        assert self._resident[ids].all(), "removal of an absent block"
        assert not self._pinned[ids].any(), "removal of a pinned block"
        self._resident[ids] = False
        parents = self._parents[ids].astype(np.int64)
        parents = parents[parents >= 0]
        np.subtract.at(self._children, parents, 1)
        if self._children[ids].any():
            self._orphan_children_of(ids)
        return np.unique(parents[self._resident[parents]])

    def resident(self, ids: BlockIds) -> BlockMask:
        """Which of these are here."""
        return self._resident[ids]

    def evictable(self, ids: BlockIds) -> BlockMask:
        """Which of these may leave now. Ids that are not resident may be asked for."""
        leaves: BlockMask = self._children[ids] == 0
        return leaves & self._resident[ids] & ~self._pinned[ids]

    def is_evictable(self, block: int) -> bool:
        """`evictable` of one id, without the cost of an array."""
        if self._children.item(block) > 0 or self._pinned.item(block):
            return False
        return bool(self._resident.item(block))

    def is_pinned(self, block: int) -> bool:
        """Whether this block is pinned."""
        return self._pinned.item(block)

    def parent(self, block: int) -> int:
        """The block before this one, -1 = none."""
        return self._parents.item(block)

    def child_count(self, block: int) -> int:
        """Resident blocks whose parent this is."""
        return self._children.item(block)

    def resident_ids(self) -> BlockIds:
        """All blocks, ascending."""
        return np.flatnonzero(self._resident)

    def check(self) -> None:
        """Counts everything again.

        Raises:
            AssertionError: An invariant is broken.
        """
        ids = self.resident_ids()
        parents = self._parents[ids]
        linked = parents[parents != NO_PARENT]
        assert ((linked >= 0) & (linked < self.capacity)).all(), "a parent that is no id"
        assert self._resident[linked].all(), "a child of an absent block"
        counts = np.bincount(linked, minlength=self.capacity)
        assert (self._children == counts).all(), "child counts"
        assert self._resident[self._pinned].all(), "an absent block is pinned"

    def _orphan_children_of(self, ids: BlockIds) -> None:
        """Makes roots of the children of these. O(capacity), but too rare to keep lists for."""
        gone = np.zeros(self.capacity, np.bool_)
        gone[ids] = True
        orphans = self._resident & (self._parents >= 0) & gone[self._parents]
        self._parents[orphans] = NO_PARENT
        self._children[ids] = 0

    def _grow(self, capacity: int) -> None:
        capacity = 1 << (capacity - 1).bit_length()
        self._resident = grown(self._resident, capacity)
        self._pinned = grown(self._pinned, capacity)
        self._parents = grown(self._parents, capacity)
        self._children = grown(self._children, capacity)


def grown(array: NDArray[_Item], capacity: int) -> NDArray[_Item]:
    """A copy that is `capacity` long, with zeros at its end."""
    longer = np.zeros(capacity, array.dtype)
    longer[: len(array)] = array
    return longer
