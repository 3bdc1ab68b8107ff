"""Who is whose parent, who is pinned, who may leave: the part of eviction without a choice.

Arrays by block id, 3 bytes an id; parents lie in a column that may be shared with the caller. A
block may leave when it is resident, not pinned, and no resident block is its child.
"""

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.growth import column, extended
from kvkeep_server.policies import NO_PARENT, BlockIds, BlockMask
from kvkeep_server.policies.parents import Parents

_CAPACITY_FIRST = 1024
_CAPACITY_STEP = 65536
_CHILDREN_NARROW_MAX = (1 << 16) - 1
_ABSENT, _RESIDENT, _PINNED = 0, 1, 3
_STATE_BITS = 3
# Beside a state: counted among the children of its parent, which was resident when it came.
_LINKED = 4


class BlockTree:
    """Resident blocks and their links. Arguments and guarantees are those of `EvictionPolicy`.

    Attributes:
        parents: May be shared with somebody who has the same there, or nothing yet.
    """

    def __init__(self) -> None:
        """See the class."""
        self.parents = Parents()
        self._state: NDArray[np.uint8] = column(_CAPACITY_FIRST, np.uint8)
        # Wider as soon as a block has more children than that.
        self._children: NDArray[np.uint16] | NDArray[np.uint32] = column(_CAPACITY_FIRST, np.uint16)

    @property
    def capacity(self) -> int:
        """Ids below this have a place in the arrays."""
        return len(self._state)

    @property
    def nbytes(self) -> int:
        """Of the arrays, parents not counted."""
        return self._state.nbytes + self._children.nbytes

    @property
    def _parents(self) -> NDArray[np.int32]:
        return self.parents.of

    def insert(self, ids: BlockIds, parents: BlockIds) -> None:
        """Adds blocks, unpinned and without children."""
        if len(ids) == 0:
            return
        capacity = int(ids.max()) + 1
        if capacity > self.capacity:
            self._grow(capacity)
        self.parents.reserve(capacity)
        assert not self._state[ids].any(), "insert of a resident block"
        has = parents >= 0
        self._state[ids] = np.where(has, _RESIDENT | _LINKED, _RESIDENT)
        linked = parents[has]
        self._parents[ids[has]] = linked
        assert self._state[linked].all(), "a parent that is not resident"
        if int(self._children[linked].max(initial=0)) + len(linked) > _CHILDREN_NARROW_MAX:
            self._children = self._children.astype(np.uint32)
        np.add.at(self._children, linked, self._children.dtype.type(1))

    def pin(self, ids: BlockIds) -> None:
        """Pins blocks that are not pinned."""
        state = self._state[ids]
        assert state.all(), "pin of an absent block"
        assert (state & _STATE_BITS == _RESIDENT).all(), "pin of a pinned block"
        self._state[ids] = state | _PINNED

    def unpin(self, ids: BlockIds) -> None:
        """Unpins blocks that are pinned."""
        state = self._state[ids]
        assert (state & _STATE_BITS == _PINNED).all(), "unpin of a block that is not pinned"
        self._state[ids] = state ^ (_PINNED ^ _RESIDENT)

    def remove(self, ids: BlockIds) -> BlockIds:
        """Takes blocks out.

        Returns:
            Resident parents that lost children, each once.
        """
        state = self._state[ids]
        assert state.all(), "removal of an absent block"
        assert (state & _STATE_BITS == _RESIDENT).all(), "removal of a pinned block"
        self._state[ids] = _ABSENT
        parents = self._parents[ids[state >= _LINKED]].astype(np.int64)
        np.subtract.at(self._children, parents, self._children.dtype.type(1))
        if self._children[ids].any():
            self._orphan_children_of(ids)
        return np.unique(parents[self._state[parents] != _ABSENT])

    def resident(self, ids: BlockIds) -> BlockMask:
        """Which of these are here."""
        here: BlockMask = self._state[ids] != _ABSENT
        return here

    def evictable(self, ids: BlockIds) -> BlockMask:
        """Which of these may leave now. Ids that are not resident may be asked for."""
        leaves: BlockMask = self._children[ids] == 0
        leaves &= self._state[ids] & _STATE_BITS == _RESIDENT
        return leaves

    def is_evictable(self, block: int) -> bool:
        """`evictable` of one id, without the cost of an array."""
        if self._children.item(block):
            return False
        return self._state.item(block) & _STATE_BITS == _RESIDENT

    def is_pinned(self, block: int) -> bool:
        """Whether this block is pinned."""
        return self._state.item(block) & _STATE_BITS == _PINNED

    def parent(self, block: int) -> int:
        """The block before this one, -1 = none that was resident when this one came."""
        return self._parents.item(block) if self._state.item(block) >= _LINKED else NO_PARENT

    def child_count(self, block: int) -> int:
        """Resident blocks whose parent this is."""
        return self._children.item(block)

    def resident_ids(self) -> BlockIds:
        """All blocks, ascending."""
        return np.flatnonzero(self._state)

    def check(self) -> None:
        """Counts everything again.

        Raises:
            AssertionError: An invariant is broken.
        """
        states = np.bincount(self._state, minlength=256)
        known = (_ABSENT, _RESIDENT, _PINNED, _RESIDENT | _LINKED, _PINNED | _LINKED)
        assert states[list(known)].sum() == len(self._state), "a state that there is not"
        linked = self._parents[np.flatnonzero(self._state >= _LINKED)]
        assert ((linked >= 0) & (linked < self.capacity)).all(), "a parent that is no id"
        assert self._state[linked].all(), "a child of an absent block"
        counts = np.bincount(linked, minlength=self.capacity)
        assert (self._children == counts).all(), "child counts"

    def _orphan_children_of(self, ids: BlockIds) -> None:
        """Makes roots of the children of these. O(capacity), but too rare to keep lists for."""
        gone = np.zeros(self.capacity, np.bool_)
        gone[ids] = True
        linked = np.flatnonzero(self._state >= _LINKED)
        self._state[linked[gone[self._parents[linked]]]] &= _STATE_BITS
        self._children[ids] = 0

    def _grow(self, capacity: int) -> None:
        step = min(self.capacity, _CAPACITY_STEP)
        capacity = -(-capacity // step) * step
        self._state = extended(self._state, capacity)
        self._children = extended(self._children, capacity)
