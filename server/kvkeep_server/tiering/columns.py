"""What the daemon keeps of each block beside the shared row: columns by dense block id.

An id names one stored block (one rank, one group). Blocks of one key of a namespace set form a
*unit*, whose id is that of its first block; eviction, pins and parent links are the unit's. Ids are
reused; a free id has `row` -1.
"""

import copy
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

_FIRST_CAPACITY = 1024
_KEY_WORDS_FIRST = 4

# name -> (dtype, value of a free id)
_COLUMNS: dict[str, tuple[type[np.generic], int]] = {
    "row": (np.int32, -1),
    "unit": (np.int32, -1),
    "next_shard": (np.int32, -1),
    "parent": (np.int32, -1),
    "children": (np.int32, 0),
    "pins": (np.int32, 0),
    "keyspace": (np.uint16, 0),
    "address": (np.uint64, 0),
    "generation": (np.uint64, 0),
    "checksum": (np.uint64, 0),
    "nvme": (np.uint64, 0),
    "stamp": (np.uint64, 0),
    "last_used_s": (np.float64, 0),
    "in_ram": (np.bool_, 0),
}
_OF_A_SNAPSHOT = (
    "row",
    "unit",
    "next_shard",
    "parent",
    "children",
    "pins",
    "keyspace",
    "address",
    "nvme",
    "in_ram",
)


class BlockColumns:
    """The columns, as numpy arrays of equal length that grow by doubling.

    Attributes:
        row: Row in the index table.
        unit: Id of the unit's first block.
        next_shard: Next block of the unit, -1 at its end.
        parent: Unit of the block before in the chain, -1 for a first one. Valid at unit ids.
        children: Units whose parent this is. Valid at unit ids.
        pins: Leases and commits that forbid eviction. Valid at unit ids.
        keyspace: Number of the keyspace.
        address: Of the slot in ram, 0 = not in ram.
        generation: Of that slot.
        checksum: Bound xxh3-64 of the payload.
        nvme: Location of its record on nvme, 0 = none.
        stamp: Number of that record.
        last_used_s: Monotonic seconds. Valid at unit ids.
        in_ram: Whether the unit has a block in ram, so that the eviction policy knows it. Valid at
            unit ids.
        key_words: Shape (capacity, words of the longest key seen), the full keys.
    """

    row: NDArray[np.int32]
    unit: NDArray[np.int32]
    next_shard: NDArray[np.int32]
    parent: NDArray[np.int32]
    children: NDArray[np.int32]
    pins: NDArray[np.int32]
    keyspace: NDArray[np.uint16]
    address: NDArray[np.uint64]
    generation: NDArray[np.uint64]
    checksum: NDArray[np.uint64]
    nvme: NDArray[np.uint64]
    stamp: NDArray[np.uint64]
    last_used_s: NDArray[np.float64]
    in_ram: NDArray[np.bool_]

    def __init__(self) -> None:
        """See the class."""
        for name, (kind, empty) in _COLUMNS.items():
            setattr(self, name, np.full(_FIRST_CAPACITY, empty, kind))
        self.key_words = np.zeros((_FIRST_CAPACITY, _KEY_WORDS_FIRST), np.uint64)
        self._free: I64 = np.arange(_FIRST_CAPACITY - 1, -1, -1)
        self._free_count = _FIRST_CAPACITY

    @property
    def capacity(self) -> int:
        """Ids that exist, used and free."""
        return len(self.row)

    @property
    def used(self) -> int:
        """Ids in use."""
        return self.capacity - self._free_count

    @property
    def nbytes(self) -> int:
        """Bytes of all columns, without the full keys."""
        columns: list[NDArray[np.generic]] = [getattr(self, name) for name in _COLUMNS]
        return sum(column.nbytes for column in columns) + self._free.nbytes

    def allocate(self, count: int) -> I64:
        """Takes ids, low ones first."""
        ids = self.peek(count)
        self._free_count -= count
        return ids

    def peek(self, count: int) -> I64:
        """The ids that `allocate` would take now."""
        while self._free_count < count:
            self._grow()
        return self._free[self._free_count - count : self._free_count][::-1].copy()

    def free(self, ids: I64) -> None:
        """Gives ids back and empties their columns."""
        for name, (_, empty) in _COLUMNS.items():
            getattr(self, name)[ids] = empty
        self._free[self._free_count : self._free_count + len(ids)] = ids[::-1]
        self._free_count += len(ids)

    def blank(self) -> dict[str, NDArray[np.generic]]:
        """Room for a `snapshot`, touched, so that filling it takes no page faults. Any thread."""
        return {name: np.full_like(getattr(self, name), 1) for name in _OF_A_SNAPSHOT}

    def snapshot(self, room: Mapping[str, NDArray[np.generic]]) -> "BlockColumns":
        """A copy of what links blocks with each other and with slots, to look at in any thread; the
        other columns are as they are now. `room` is that of `blank`."""
        if len(room["row"]) != self.capacity:
            room = self.blank()
        twin = copy.copy(self)
        for name, column in room.items():
            np.copyto(column, getattr(self, name))
            setattr(twin, name, column)
        return twin

    def widen_keys(self, words: int) -> None:
        """Makes room for keys of so many u64 words."""
        have = self.key_words.shape[1]
        if words > have:
            wider = np.zeros((self.capacity, words), np.uint64)
            wider[:, :have] = self.key_words
            self.key_words = wider

    def in_use(self) -> I64:
        """All ids of blocks in the index, ascending."""
        return np.flatnonzero(self.row >= 0)

    def withdrawn(self) -> I64:
        """Blocks that left the index and whose slots are pinned still, ascending."""
        return np.flatnonzero((self.row < 0) & (self.unit >= 0))

    def blocks_of(self, units: I64) -> I64:
        """All blocks of these units."""
        parts, at = [], units
        while len(at):
            parts.append(at)
            following = self.next_shard[at]
            at = following[following >= 0].astype(np.int64)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def whole(self, units: I64, has: Callable[[I64], Mask]) -> Mask:
        """Which units have something in all of their blocks: `has` tells it of ids."""
        told, at, places = has(units), units, np.arange(len(units))
        while len(at):
            following = self.next_shard[at]
            goes_on = following >= 0
            at, places = following[goes_on].astype(np.int64), places[goes_on]
            told[places] &= has(at)
        return told

    def recorded(self, units: I64) -> Mask:
        """Which units have a record of each of their blocks on nvme."""
        return self.whole(units, lambda ids: self.nvme[ids] != 0)

    def wholly_in_ram(self, units: I64) -> Mask:
        """Which units have each of their blocks in ram."""
        return self.whole(units, lambda ids: self.address[ids] != 0)

    def placed(self, units: I64) -> Mask:
        """Which units have each of their blocks somewhere."""
        return self.whole(units, lambda ids: (self.nvme[ids] != 0) | (self.address[ids] != 0))

    def by_chain(self, units: I64) -> tuple[I64, I64]:
        """All blocks of units, in the order of the units, and the position of the unit of each."""
        blocks, order = self.blocks_of(units), np.argsort(units)
        places = order[np.searchsorted(units, self.unit[blocks], sorter=order)]
        sort = np.argsort(places, kind="stable")
        return blocks[sort], places[sort]

    def not_held(self) -> I64:
        """Blocks in ram whose unit is not pinned and has no pinned descendant."""
        held = self.pins > 0
        # Leases pin whole prefixes, so few pinned units have a parent that is not.
        for unit in np.unique(self.parent[held]).tolist():
            up = unit
            while up >= 0 and not held[up]:
                held[up] = True
                up = int(self.parent[up])
        ids = self.in_use()
        free: I64 = ids[~held[self.unit[ids]] & (self.address[ids] != 0)]
        return free

    def _grow(self) -> None:
        old = self.capacity
        for name, (kind, empty) in _COLUMNS.items():
            longer = np.full(2 * old, empty, kind)
            longer[:old] = getattr(self, name)
            setattr(self, name, longer)
        keys = np.zeros((2 * old, self.key_words.shape[1]), np.uint64)
        keys[:old] = self.key_words
        self.key_words = keys
        free = np.empty(2 * old, np.int64)
        free[:old] = np.arange(2 * old - 1, old - 1, -1)
        free[old : old + self._free_count] = self._free[: self._free_count]
        self._free = free
        self._free_count += old
