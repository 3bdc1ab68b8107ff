"""What the daemon keeps of each block beside the shared row: columns by dense block id.

An id names one stored block (one rank, one group). Blocks of one key of a namespace set form a
*unit*, whose id is that of its first block; eviction, pins and parent links are the unit's. Ids are
reused; a free id has `row` -1. Where a block lies in ram says its row alone (`address_of`).

Bytes an id count here: 10 million blocks are what the nvme tier of one host holds. So columns are
as narrow as they can be, two of them grow wider only where somebody needs that, and those of units
of several blocks are made when there is one.
"""

import copy
import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.growth import column, extended
from kvkeep_server.index.table import IndexTable
from kvkeep_server.policies.parents import Parents

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Mask = NDArray[np.bool_]
_Narrow = NDArray[np.uint16] | NDArray[np.uint32]

_CAPACITY_FIRST = 1024
_CAPACITY_STEP_MAX = 65536
_KEY_WORDS_FIRST = 4
# Last uses are kept in these ticks: 31 bits of them are four years before and after the start of
# the host's clock.
# In place of a record's number where there is no record.
_LET_GO = 1
_TICKS_A_SECOND = 16
_TICKS_MIN, _TICKS_MAX = -(1 << 31), (1 << 31) - 1
_NARROW_MAX = (1 << 16) - 1
_U32_BITS = np.uint64(32)
_U32_MASK = np.uint64((1 << 32) - 1)

# name -> (dtype, value of a free id)
_COLUMNS: dict[str, tuple[type[np.generic], int]] = {
    "row": (np.int32, -1),
    "children": (np.uint16, 0),
    "pins": (np.uint16, 0),
    "keyspace": (np.uint16, 0),
    "checksum": (np.uint64, 0),
    "nvme": (np.uint64, 0),
    "_stamp_low": (np.uint32, 0),
    "_stamp_high": (np.uint16, 0),
    "_last_used": (np.int32, 0),
    "in_ram": (np.bool_, 0),
    "reused": (np.bool_, 0),
}
_PLACES = "places of the table"
_NOT_IN_A_SNAPSHOT = ("checksum", "_stamp_low", "_stamp_high", "_last_used", "reused")


class BlockColumns:
    """The columns, as numpy arrays of equal length.

    Args:
        table: The index, for what stands in the rows.
        parents: A column that the eviction policy sees too.

    Attributes:
        table: The present one.
        row: Row in the index table.
        parent: Unit of the block before in the chain, -1 for a first one. Valid at unit ids.
        children: Units whose parent this is. Valid at unit ids.
        pins: Leases and commits that forbid eviction. Valid at unit ids.
        keyspace: Number of the keyspace.
        checksum: Bound xxh3-64 of the payload.
        nvme: Location of its record on nvme, 0 = none.
        in_ram: Whether the unit has a block in ram, so that the eviction policy knows it. Valid at
            unit ids.
        reused: Whether the unit was used since its record was written, or given up. Valid at unit
            ids.
        key_words: Shape (capacity, words of the longest key seen), the full keys.
    """

    row: NDArray[np.int32]
    parent: NDArray[np.int32]
    children: _Narrow
    pins: _Narrow
    keyspace: NDArray[np.uint16]
    checksum: NDArray[np.uint64]
    nvme: NDArray[np.uint64]
    in_ram: NDArray[np.bool_]
    reused: NDArray[np.bool_]
    _stamp_low: NDArray[np.uint32]
    _stamp_high: _Narrow
    _last_used: NDArray[np.int32]

    def __init__(self, table: IndexTable, parents: Parents) -> None:
        """See the class."""
        self.table = table
        self._parents = parents
        parents.reserve(_CAPACITY_FIRST)
        self.parent = parents.of
        for name, (kind, empty) in _COLUMNS.items():
            first = column(_CAPACITY_FIRST, kind)
            first[:] = empty
            setattr(self, name, first)
        self.key_words = np.zeros((_CAPACITY_FIRST, _KEY_WORDS_FIRST), np.uint64)
        # Of units of several blocks: the unit of each block, itself as a rule; and the next block
        # of the unit, -1 at its end.
        self._unit: NDArray[np.int32] | None = None
        self._next_shard: NDArray[np.int32] | None = None
        # Ids that were given back lie on a stack; from `_fresh` on, none was ever taken.
        self._freed = column(0, np.int32)
        self._freed_count = 0
        self._fresh = 0
        self._withdrawn: dict[int, int] = {}  # id -> address

    @property
    def capacity(self) -> int:
        """Ids that exist, used and free."""
        return len(self.row)

    @property
    def used(self) -> int:
        """Ids in use."""
        return self._fresh - self._freed_count

    @property
    def nbytes(self) -> int:
        """Bytes of all columns, without the full keys."""
        columns: list[NDArray[np.generic]] = [getattr(self, name) for name in self._names()]
        return sum(column.nbytes for column in columns) + self._freed.nbytes

    def _names(self) -> list[str]:
        shards = [] if self._unit is None else ["_unit", "_next_shard"]
        return [*_COLUMNS, "parent", *shards]

    # --- ids

    def allocate(self, count: int) -> I64:
        """Takes ids, low ones first."""
        ids = self.peek(count)
        freed = min(count, self._freed_count)
        self._freed_count -= freed
        self._fresh += count - freed
        return ids

    def peek(self, count: int) -> I64:
        """The ids that `allocate` would take now."""
        freed = min(count, self._freed_count)
        fresh = np.arange(self._fresh, self._fresh + count - freed)
        if self._fresh + len(fresh) > self.capacity:
            self._grow(self._fresh + len(fresh))
        if not freed:
            return fresh
        again = self._freed[self._freed_count - freed : self._freed_count][::-1]
        return np.concatenate((again, fresh))

    def free(self, ids: I64) -> None:
        """Gives ids back and empties their columns."""
        for name, (_, empty) in _COLUMNS.items():
            getattr(self, name)[ids] = empty
        self.parent[ids] = -1
        if self._unit is not None and self._next_shard is not None:
            self._unit[ids] = ids
            self._next_shard[ids] = -1
        for block in ids.tolist() if self._withdrawn else ():
            self._withdrawn.pop(block, None)
        count = self._freed_count + len(ids)
        if count > len(self._freed):
            self._freed = extended(self._freed, count)
        self._freed[self._freed_count : count] = ids[::-1]
        self._freed_count = count

    def _grow(self, ids: int) -> None:
        old = self.capacity
        step = min(old, _CAPACITY_STEP_MAX)
        capacity = old + -(-(ids - old) // step) * step
        self._parents.reserve(capacity)
        for name in self._names():
            longer = extended(getattr(self, name), capacity)
            if name in _COLUMNS and _COLUMNS[name][1]:
                longer[old:] = _COLUMNS[name][1]
            setattr(self, name, longer)
        self.parent = self._parents.of
        if self._unit is not None and self._next_shard is not None:
            self._unit[old:] = np.arange(old, capacity)
            self._next_shard[old:] = -1
        self.key_words = extended(self.key_words, capacity)

    def widen_keys(self, words: int) -> None:
        """Makes room for keys of so many u64 words."""
        have = self.key_words.shape[1]
        if words > have:
            wider = np.zeros((self.capacity, words), np.uint64)
            wider[:, :have] = self.key_words
            self.key_words = wider

    # --- copies for an audit

    def blank(self) -> dict[str, NDArray[np.generic]]:
        """Room for a `snapshot`, touched, so that filling it takes no page faults. Any thread."""
        names = self._names_of_a_snapshot()
        room = {name: np.full_like(getattr(self, name), 1) for name in names}
        return {_PLACES: self.table.blank(), **room}

    def snapshot(self, room: Mapping[str, NDArray[np.generic]]) -> "BlockColumns":
        """A copy of what links blocks with each other and with slots, to look at in any thread; the
        other columns are as they are now. `room` is that of `blank`."""
        twin = copy.copy(self)
        twin.table = self.table.snapshot(room[_PLACES])
        twin.__dict__["_withdrawn"] = self._withdrawn.copy()
        for name in self._names_of_a_snapshot():
            now, into = getattr(self, name), room.get(name)
            if into is None or (into.dtype, into.shape) != (now.dtype, now.shape):
                into = np.empty_like(now)
            np.copyto(into, now)
            setattr(twin, name, into)
        return twin

    def _names_of_a_snapshot(self) -> list[str]:
        return [name for name in self._names() if name not in _NOT_IN_A_SNAPSHOT]

    # --- one column

    def address_of(self, ids: I64) -> U64:
        """Address in ram of each block, 0 = not in ram or no block."""
        rows = self.row[ids]
        addresses = self.table.address_of(rows)
        if rows.min(initial=0) < 0:
            gone = rows < 0
            held = [self._withdrawn.get(block, 0) for block in ids[gone].tolist()]
            addresses[gone] = held
        return addresses

    def stamp_of(self, ids: I64) -> U64:
        """Number of each block's record on nvme."""
        high: U64 = self._stamp_high[ids].astype(np.uint64)
        return (high << _U32_BITS) | self._stamp_low[ids]

    def set_record(self, ids: I64, locations: U64 | int, stamps: U64) -> None:
        """Where the records of blocks lie, and their numbers; 0 = none."""
        self.nvme[ids] = locations
        self._stamp_low[ids] = stamps & _U32_MASK
        high = stamps >> _U32_BITS
        # From 65,536 segments on: they begin at a segment's number << 32.
        if self._stamp_high.dtype == np.uint16 and high.max(initial=0) > _NARROW_MAX:
            self._stamp_high = _wider(self._stamp_high)
        self._stamp_high[ids] = high

    def let_go(self, ids: I64) -> None:
        """nvme gave up the records of blocks to make room for others."""
        self.set_record(ids, 0, np.full(len(ids), _LET_GO, np.uint64))

    def unwanted(self, units: I64) -> Mask:
        """Which units nvme let go of, and nobody used since."""
        kept = self.whole(
            units, lambda ids: (self.nvme[ids] != 0) | (self.stamp_of(ids) != _LET_GO)
        )
        return ~kept & ~self.reused[units]

    def last_used_s(self, units: I64) -> NDArray[np.float64]:
        """Monotonic seconds of the last use of units, to a sixteenth."""
        seconds: NDArray[np.float64] = self._last_used[units] / _TICKS_A_SECOND
        return seconds

    def set_last_used(self, units: I64, seconds: float | NDArray[np.float64]) -> None:
        """When units were used last, monotonic seconds."""
        if isinstance(seconds, float):
            # As below, in a twentieth of the time: nearly all calls name the present.
            ticks = math.floor(seconds * _TICKS_A_SECOND)
            self._last_used[units] = min(max(ticks, _TICKS_MIN), _TICKS_MAX)
            return
        self._last_used[units] = np.clip(
            np.floor(seconds * _TICKS_A_SECOND), _TICKS_MIN, _TICKS_MAX
        )

    def add_pins(self, units: I64) -> None:
        """One pin more for each of these units, which differ."""
        if self.pins[units].max(initial=0) == _NARROW_MAX:
            self.pins = _wider(self.pins)
        self.pins[units] += 1

    def add_children(self, parents: I64 | NDArray[np.int32]) -> None:
        """One child more for each of these units, as often as they come."""
        if not len(parents):
            return
        if int(self.children[parents].max()) + len(parents) > _NARROW_MAX:
            self.children = _wider(self.children)
        np.add.at(self.children, parents, self.children.dtype.type(1))

    def drop_children(self, parents: I64 | NDArray[np.int32]) -> None:
        """One child less for each of these units, as often as they come."""
        np.subtract.at(self.children, parents, self.children.dtype.type(1))

    # --- which blocks

    def in_use(self) -> I64:
        """All ids of blocks in the index, ascending."""
        return np.flatnonzero(self.row[: self._fresh] >= 0)

    def withdraw(self, blocks: I64, addresses: U64) -> None:
        """Keeps blocks that left the index, and where they lie in ram, until they are
        freed."""
        self._withdrawn.update(zip(blocks.tolist(), addresses.tolist(), strict=True))

    def withdrawn(self) -> I64:
        """Blocks that left the index and whose slots are pinned still, ascending."""
        return np.array(sorted(self._withdrawn), np.int64)

    # --- units

    def shards(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The unit of each block, and the next block of its unit (-1: none): to write to."""
        if self._unit is None or self._next_shard is None:
            count = self.capacity
            self._unit, self._next_shard = column(count, np.int32), column(count, np.int32)
            self._unit[:] = np.arange(count)
            self._next_shard[:] = -1
        return self._unit, self._next_shard

    def unit_of(self, blocks: I64) -> I64:
        """Ids of the first blocks of their units. Of -1: anything."""
        return blocks if self._unit is None else self._unit[blocks].astype(np.int64)

    def join(self, blocks: I64, units: I64) -> None:
        """Puts blocks that do not begin a unit of their own behind the first one of theirs; the
        units differ."""
        joins = blocks != units
        if joins.any():
            unit, following = self.shards()
            joined, heads = blocks[joins], units[joins]
            unit[joined] = heads
            following[joined] = following[heads]
            following[heads] = joined

    def _following(self, blocks: I64) -> I64:
        """The next block of each one's unit, -1 = none."""
        if self._next_shard is None:
            return np.full(len(blocks), -1, np.int64)
        return self._next_shard[blocks].astype(np.int64)

    def blocks_of(self, units: I64) -> I64:
        """All blocks of these units."""
        if self._next_shard is None:
            return units
        parts, at = [], units
        while len(at):
            parts.append(at)
            following = self._following(at)
            at = following[following >= 0]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def summed(self, units: I64, of_blocks: Callable[[I64], I64]) -> I64:
        """The sum of what `of_blocks` gives for the blocks of each of these units, which differ."""
        if self._unit is None:
            return of_blocks(units)
        blocks, order = self.blocks_of(units), np.argsort(units)
        place = order[np.searchsorted(units[order], self.unit_of(blocks))]
        sums = np.bincount(place, weights=of_blocks(blocks), minlength=len(units))
        return sums.astype(np.int64)

    def whole(self, units: I64, has: Callable[[I64], Mask]) -> Mask:
        """Which units have something in all of their blocks: `has` tells it of ids."""
        told = has(units)
        if self._next_shard is None:
            return told
        at, places = units, np.arange(len(units))
        while len(at):
            following = self._following(at)
            goes_on = following >= 0
            at, places = following[goes_on], places[goes_on]
            told[places] &= has(at)
        return told

    def recorded(self, units: I64) -> Mask:
        """Which units have a record of each of their blocks on nvme."""
        return self.whole(units, lambda ids: self.nvme[ids] != 0)

    def wholly_in_ram(self, units: I64) -> Mask:
        """Which units have each of their blocks in ram."""
        return self.whole(units, lambda ids: self.address_of(ids) != 0)

    def placed(self, units: I64) -> Mask:
        """Which units have each of their blocks somewhere."""
        return self.whole(units, lambda ids: (self.nvme[ids] != 0) | (self.address_of(ids) != 0))

    def by_chain(self, units: I64) -> tuple[I64, I64]:
        """All blocks of units, in the order of the units, and the position of the unit of each."""
        if self._unit is None:
            return units, np.arange(len(units))
        blocks, order = self.blocks_of(units), np.argsort(units)
        places = order[np.searchsorted(units, self._unit[blocks], sorter=order)]
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
        ids = ids[~held[self.unit_of(ids)]]
        in_ram: I64 = ids[self.address_of(ids) != 0]
        return in_ram


def _wider(narrow: _Narrow) -> NDArray[np.uint32]:
    """Where 65,535 are not enough; 3 ms a million ids, and hardly ever."""
    wide = column(len(narrow), np.uint32)
    wide[:] = narrow
    return wide
