"""Takes named blocks out, on request or because they are damaged.

What leaves takes its descendants along, because a child without its parent can be found by nobody.
Leased units leave the index at once, and their slots are given back with the last lease: whoever
reads them under a lease reads them right.

Who descends from a unit is a question to all units, so it is asked in a thread of a copy of the
columns (0.2 s for a million). Meanwhile others commit and evict; therefore a unit leaves only if it
is still the one that was copied, and all its children leave with it. What got a new child meanwhile
is tried again.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.errors import TierUnavailableError
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import MissReason, RemovalStatus
from kvkeep_server.tiering.keyspaces import BoundaryGroup, Keyspace, KeyspaceSet
from kvkeep_server.tiering.lineage import closed_part, deepest_first, descended
from kvkeep_server.tiering.residency import Residency
from kvkeep_server.tiering.room import RoomMaker
from kvkeep_server.tiers.base import Blocks
from kvkeep_server.tiers.nvme.tier import NvmeTier

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]

# Units that leave without a pause: 10 to 15 ms of the loop.
_SLICE_UNITS = 4096
# Somebody who stores below what is being removed can make a removal fail, not last.
_ROUNDS_MAX = 8
_REMOVED = np.uint8(RemovalStatus.REMOVED)
_KEPT = np.uint8(RemovalStatus.KEPT)


@dataclass(slots=True)
class RemovalCounts:
    """Blocks that were taken out since the start, of all ranks and groups."""

    removed: int = 0
    corrupt: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """What became of a removal.

    Attributes:
        status: A `RemovalStatus` for each that was named.
        units: Units that left, descendants included.
    """

    status: U8
    units: int


class Removal:
    """Event loop only.

    Args:
        residency: Where the blocks are.
        room: Nothing may leave while it rebuilds the index.
        nvme: Where records are, None = nowhere.
        settled: Waits until what lies there is in the index: what nobody knows cannot be removed.
    """

    def __init__(
        self,
        *,
        residency: Residency,
        room: RoomMaker,
        nvme: NvmeTier | None = None,
        settled: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """See the class."""
        self._residency = residency
        self._room = room
        self._nvme = nvme
        self._settled = settled
        self.counts = RemovalCounts()
        # Each search takes a thread and 20 bytes a block: one at a time, however many ask.
        self._searching = asyncio.Lock()

    async def of_keys(
        self, spaces: KeyspaceSet, keys: KeyBatch, *, with_descendants: bool
    ) -> Removed:
        """Takes out the units of these keys: all ranks and groups.

        Args:
            spaces: The namespace set.
            keys: In any order.
            with_descendants: Whether blocks that follow one of the keys leave too; without, a key
                that has such blocks is KEPT, unless they are named as well.

        Raises:
            TierUnavailableError: They are gone, but nvme could not write that down: they may come
                back at a restart.
        """

        if self._settled is not None:
            await self._settled()
        removed = await self._take_out(
            lambda: self._units_of(spaces.siblings, keys),
            MissReason.REMOVED,
            rounds=_ROUNDS_MAX if with_descendants else 1,
            groups=spaces.groups,
        )
        return await self._others_out(spaces, keys, removed)

    def _units_of(self, siblings: Sequence[Keyspace], keys: KeyBatch) -> I64:
        """The unit of each key, -1 = none."""
        units = np.full(len(keys), -1, np.int64)
        for keyspace in siblings:
            blocks = self._residency.find(keyspace, keys)
            there = blocks >= 0
            units[there] = self._residency.columns.unit_of(blocks[there])
        return units

    async def _others_out(self, spaces: KeyspaceSet, keys: KeyBatch, removed: Removed) -> Removed:
        """Takes out WINDOW and STATE blocks of keys, unless those are KEPT."""
        status, alone = removed.status, np.zeros(len(keys), bool)
        for group in spaces.groups:
            await self._room.index_at_rest()
            units = self._units_of(group.siblings, keys)
            units[status == _KEPT] = -1
            there = units >= 0
            await self._withdraw(np.unique(units[there]), MissReason.REMOVED)
            alone |= there & (status == RemovalStatus.ABSENT)
        status[alone] = _REMOVED
        return Removed(status, removed.units + int(np.count_nonzero(alone)))

    async def of_blocks(self, blocks: I64, generations: U64) -> Removed:
        """Takes out the units of damaged blocks and their descendants, unless they left meanwhile.

        Args:
            blocks: Ids, shape (n,).
            generations: Of their slots when they were found damaged, shape (n,).
        """
        columns = self._residency.columns

        def find() -> I64:
            same = columns.row[blocks] >= 0
            same &= self._residency.generations_of(blocks) == generations
            return np.where(same, columns.unit_of(blocks), -1)

        with contextlib.suppress(TierUnavailableError):
            return await self._take_out(find, MissReason.CORRUPT, rounds=_ROUNDS_MAX)
        return Removed(np.full(len(blocks), _REMOVED), len(blocks))

    async def of_keyspaces(self, numbers: Collection[int]) -> int:
        """Takes out all units of these keyspaces, leased ones too, a slice at a time; returns how
        many. nvme is told nothing: of what it has of theirs nobody will ask.

        The numbers must stay theirs meanwhile.
        """
        if self._settled is not None:
            await self._settled()
        columns, removed = self._residency.columns, 0
        await self._room.index_at_rest()
        async with self._searching:
            rows, parents = columns.row.copy(), columns.parent.copy()
            spaces = columns.keyspace.copy()
            units = await asyncio.to_thread(_units_within, rows, parents, spaces, numbers)
        wanted = np.array(sorted(numbers), np.uint16)
        for start in range(0, len(units), _SLICE_UNITS):
            await self._room.index_at_rest()
            some = units[start : start + _SLICE_UNITS]
            # Ids may be others' by now.
            same = (columns.row[some] >= 0) & (columns.unit_of(some) == some)
            some = some[same & np.isin(columns.keyspace[some], wanted)]
            leaving = closed_part(columns, np.sort(some))
            if len(leaving):
                self._residency.withdraw(leaving, MissReason.NAMESPACE_MISMATCH)
            removed += len(leaving)
            await asyncio.sleep(0)
        return removed

    async def of_lost(self) -> None:
        """Takes out the units that no tier has any more, and their descendants."""
        residency = self._residency
        for reason in set(residency.lost.values()):
            # None, if they left with those of another reason.
            named = [unit for unit, why in residency.lost.items() if why is reason]
            units = np.array(named, np.int64)

            def find(units: I64 = units) -> I64:
                lost = (residency.columns.row[units] >= 0) & ~residency.columns.placed(units)
                return np.where(lost, units, -1)

            await self._take_out(find, reason, rounds=_ROUNDS_MAX)

    async def _take_out(
        self,
        find: Callable[[], I64],
        reason: MissReason,
        *,
        rounds: int,
        groups: Sequence[BoundaryGroup] = (),
    ) -> Removed:
        """One round takes out what has no descendants but those named; between two, the others
        leave with theirs, and with their blocks of `groups`."""
        removed, status = 0, np.zeros(0, np.uint8)
        for left in range(rounds - 1, -1, -1):
            await self._room.index_at_rest()
            units = find()
            if not len(status):
                status = np.full(len(units), RemovalStatus.ABSENT, np.uint8)
            status[(units < 0) & (status == _KEPT)] = _REMOVED
            there = (units >= 0) & (status != _REMOVED)
            status[there] = _KEPT
            named = np.unique(units[there])
            leaving = closed_part(self._residency.columns, named)
            removed += await self._withdraw(leaving, reason)
            status[there & np.isin(units, leaving)] = _REMOVED
            if len(leaving) == len(named) or not left:
                break
            removed += await self._trees_out(np.setdiff1d(named, leaving), reason, groups)
        return Removed(status, removed)

    async def _trees_out(
        self, units: I64, reason: MissReason, groups: Sequence[BoundaryGroup]
    ) -> int:
        """Takes out these and what descends from them, leaves first, a slice at a time."""
        columns = self._residency.columns
        async with self._searching:
            # Of the key and the bytes: who has the id later has another one.
            parents, checksums = columns.parent.copy(), columns.checksum.copy()
            trees = await asyncio.to_thread(_trees, parents, units)
        removed = 0
        for start in range(0, len(trees), _SLICE_UNITS):
            await self._room.index_at_rest()
            some = trees[start : start + _SLICE_UNITS]
            same = (columns.row[some] >= 0) & (columns.checksum[some] == checksums[some])
            leaving = closed_part(columns, np.sort(some[same]))
            # In one step with those of other groups: what was found before a pause may be gone.
            others = self._of_same_keys(leaving, groups)
            await self._withdraw(np.concatenate([leaving, others]), reason)
            removed += len(leaving)
            await asyncio.sleep(0)
        return removed

    def _of_same_keys(self, units: I64, groups: Sequence[BoundaryGroup]) -> I64:
        """The units of these groups that have the keys of units of the same namespace set."""
        found = [np.empty(0, np.int64)]
        if groups and len(units):
            keys = self._residency.named(units).keys
            found += [self._units_of(group.siblings, keys) for group in groups]
        others = np.concatenate(found)
        return np.unique(others[others >= 0])

    async def _withdraw(self, units: I64, reason: MissReason) -> int:
        """Out of the index at once; then nvme is told, unless its records may come back. The units
        must have been found since the last pause."""
        records: list[Blocks] = []
        if len(units) and self._nvme is not None and reason is not MissReason.EVICTED:
            blocks_of = self._residency.columns.blocks_of(units)
            there = blocks_of[self._residency.columns.nvme[blocks_of] != 0]
            records = [self._residency.named(own) for own in self._residency.by_keyspace(there)]
        if len(units):
            blocks = self._residency.withdraw(units, reason)
            if reason == MissReason.CORRUPT:
                self.counts.corrupt += blocks
            elif reason == MissReason.REMOVED:
                self.counts.removed += blocks
        for one in records:
            assert self._nvme is not None
            await self._nvme.remove(one)
        return len(units)


def _units_within(
    rows: NDArray[np.int32],
    parents: NDArray[np.int32],
    spaces: NDArray[np.uint16],
    numbers: Collection[int],
) -> I64:
    """What is resident of these keyspaces, leaves first: units, and blocks that are none. Runs in a
    thread."""
    wanted = np.zeros(1 << 16, bool)
    wanted[list(numbers)] = True
    return deepest_first(parents, np.flatnonzero(wanted[spaces] & (rows >= 0)))


def _trees(parents: NDArray[np.int32], units: I64) -> I64:
    """These and all that descends from them, leaves first. Runs in a thread."""
    marked = np.zeros(len(parents), bool)
    marked[units] = True
    return deepest_first(parents, np.flatnonzero(descended(parents, marked)))
