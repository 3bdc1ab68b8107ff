"""Puts what an earlier daemon left on nvme into the index, while this one serves.

Rows of all segments are kept as a few columns, judged at once in a thread when the last is read
(`recovered`), and put into the index in slices. What was committed meanwhile wins.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import GroupKind, MissReason, TierId
from kvkeep_server.index.layout import places_of
from kvkeep_server.index.table import TableFullError
from kvkeep_server.tiering.keyspaces import Keyspace
from kvkeep_server.tiering.records import Records, by_keyspace
from kvkeep_server.tiering.recovered import Found, Judged, Mixer, judged
from kvkeep_server.tiering.residency import Residency
from kvkeep_server.tiering.room import RoomMaker
from kvkeep_server.tiers.nvme.tier import NvmeTier
from kvkeep_server.tiers.record import Rows, is_tombstone

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Mask = NDArray[np.bool_]

# How long blocks enter the index without a pause, and how many at first and at most.
_SLICE_S = 0.005
_SLICE_BLOCKS_FIRST = 256
_SLICE_BLOCKS_MAX = 8192
# Rows whose keyspaces are found without a pause: 3 ms.
_NAMED_ROWS = 4096
_SHIFT = np.uint64(32)


@dataclass(slots=True)
class RecoveryCounts:
    """Since the start.

    Attributes:
        records: Read.
        blocks: That came into the index.
        useless: Blocks without their boundary or their parent, or of no known shape.
    """

    records: int = 0
    blocks: int = 0
    useless: int = 0


class Recovery:
    """Once in a daemon's life, in a task. Event loop only. Implements `records.Unsettled`.

    Args:
        residency: Gets the blocks.
        room: Makes rows in the index.
        nvme: Reads the records.
        records: Learns here what changes meanwhile.
        adopt: The keyspace that records name, None = of no use; see `KeyspaceBook.find_or_adopt`.
        source: Draws what names are mixed with.
    """

    def __init__(
        self,
        *,
        residency: Residency,
        room: RoomMaker,
        nvme: NvmeTier,
        records: Records,
        adopt: Callable[[Keyspace], Keyspace | None],
        source: random.Random,
    ) -> None:
        """See the class."""
        self._residency = residency
        self._room = room
        self._nvme = nvme
        self._records = records
        self._adopt = adopt
        self._mixer = Mixer.draw(source)
        self._moves: dict[int, tuple[int, int]] = {}
        self._gone: set[int] = set()
        self._segments_lost: set[int] = set()
        self._settled = asyncio.Event()
        self.counts = RecoveryCounts()

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self._settled.is_set()

    async def settled(self) -> None:
        """Waits for the end."""
        await self._settled.wait()

    # --- Unsettled

    def moved(self, old: U64, locations: U64, stamps: U64) -> None:
        """See `Unsettled`."""
        new = zip(locations.tolist(), stamps.tolist(), strict=True)
        self._moves.update(zip(old.tolist(), new, strict=True))

    def gone(self, locations: U64) -> None:
        """See `Unsettled`."""
        self._gone.update(locations.tolist())

    def segment_lost(self, number: int) -> None:
        """See `Unsettled`."""
        self._segments_lost.add(number)

    # --- the work

    async def run(self) -> None:
        """Reads, judges, and fills the index.

        Raises:
            OSError: A directory cannot be read.
            ResourceExhaustedError: No memory for a larger index.
        """
        self._records.unsettled = self
        try:
            parts = [part async for part in self._parts()]
            if parts:
                found = await asyncio.to_thread(judged, parts)
                self.counts.useless = found.useless
                await self._enter(found)
        finally:
            self._records.unsettled = None
            self._settled.set()

    async def _parts(self) -> AsyncIterator[Found]:
        async for rows in self._nvme.recover():
            self.counts.records += len(rows)
            numbers = []
            for start in range(0, len(rows), _NAMED_ROWS):
                numbers.append(self._keyspaces_of(rows[start : start + _NAMED_ROWS]))
                await asyncio.sleep(0)
            yield await asyncio.to_thread(self._mixer.kept, rows, np.concatenate(numbers))

    def _keyspaces_of(self, rows: Rows) -> NDArray[np.int32]:
        """The number of each block's keyspace, -1 for tombstones and where there can be none."""
        numbers = np.full(len(rows), -1, np.int32)
        places = np.flatnonzero(~is_tombstone(rows))

        def adopted(namespace_id: bytes, group: int, first: int) -> Keyspace | None:
            row = rows[places[first]]
            return self._adopt(
                Keyspace(
                    index=-1,
                    namespace_id=namespace_id,
                    rank=-1,
                    group=group,
                    kind=GroupKind.FULL,
                    key_nbytes=int(row["key_nbytes"]),
                    block_nbytes=int(row["payload_nbytes"]),
                    checksum_seed=0,
                    boundary_id=row["boundary_id"].tobytes(),
                    members=int(row["boundary_members"]),
                    member=int(row["boundary_member"]),
                )
            )

        for keyspace, at in by_keyspace(rows[places], adopted):
            same = rows["payload_nbytes"][places[at]] == keyspace.block_nbytes
            numbers[places[at[same]]] = keyspace.index
        return numbers

    async def _enter(self, found: Judged) -> None:
        """Units parents first, as many at a time as the loop can do without."""
        loop = asyncio.get_running_loop()
        ids = np.full(found.units, -1, np.int64)
        starts = np.append(found.starts, len(found.rows))
        # Once, in a thread, instead of at each doubling.
        await self._room.index_rows(len(found.rows))
        start, blocks = 0, _SLICE_BLOCKS_FIRST
        while start < found.units:
            stop = int(np.searchsorted(starts, starts[start] + blocks, side="right")) - 1
            stop = min(max(stop, start + 1), found.units)
            some = np.arange(starts[start], starts[stop])
            await self._room.index_rows(len(some))
            began_s = loop.time()
            self._enter_slice(found, some, ids)
            fast = loop.time() - began_s < _SLICE_S
            blocks = min(2 * blocks, _SLICE_BLOCKS_MAX) if fast else max(blocks // 2, 1)
            start = stop
            await asyncio.sleep(0)

    def _enter_slice(self, found: Judged, at: I64, ids_of_units: I64) -> None:
        """Blocks at these positions, whole units; `ids_of_units` is filled in for them."""
        columns, rows = self._residency.columns, found.rows
        there = self._find(rows[at], "key")
        known = there >= 0
        ids_of_units[found.unit[at[known]]] = columns.unit_of(there[known])
        at = at[~known]
        if not len(at):
            return
        # Looked up again: the units of an earlier slice may have left.
        parents = self._parents(found, at)
        ids = columns.allocate(len(at))
        unit = found.unit[at]
        first = np.append(True, unit[1:] != unit[:-1])
        begins = first & (ids_of_units[unit] < 0)
        joins = first & ~begins
        ids_of_units[unit[begins]] = ids[begins]
        above = found.parent[unit[begins]]
        parent = np.where(parents[begins] >= 0, parents[begins], -1)
        same_slice = (above >= 0) & (parent < 0)
        parent[same_slice] = ids_of_units[above[same_slice]]
        in_slice = np.isin(parent, ids) | (parents[begins] >= 0)
        parent[~in_slice] = -1
        orphans = ids[begins][(above >= 0) & (parent < 0)]
        self._fill(rows[at], ids, ids_of_units[unit])
        try:
            self._show(ids)
        except TableFullError:
            ids_of_units[unit[begins]] = -1
            columns.free(ids)
            self.counts.useless += len(ids)
            return
        if not begins.all():
            self._link_shards(ids, ids_of_units[unit], first, joins)
        columns.parent[ids[begins]] = parent
        columns.add_children(parent[parent >= 0])
        self._residency.came(TierId.NVME, ids)
        self.counts.blocks += len(ids)
        self._catch_up(ids, orphans)

    def _link_shards(self, ids: I64, units: I64, first: Mask, joins: Mask) -> None:
        """Blocks of units, unit after unit: `first` of theirs here, and `joins` where the unit was
        there before."""
        unit, following = self._residency.columns.shards()
        unit[ids] = units
        following[ids[:-1][~first[1:]]] = ids[1:][~first[1:]]
        ends = ids[np.append(first[1:], True)][joins[first]]
        following[ends] = following[units[joins]]
        following[units[joins]] = ids[joins]

    def _find(self, rows: Found, field: str) -> I64:
        """Ids of the keys in a field, -1 where there is none."""
        ids = np.full(len(rows), -1, np.int64)
        for number in np.unique(rows["keyspace"]).tolist():
            places = np.flatnonzero(rows["keyspace"] == number)
            keyspace = self._residency.keyspaces[number]
            words = rows[field][places][:, : -(-keyspace.key_nbytes // 8)]
            batch = KeyBatch(np.ascontiguousarray(words), keyspace.key_nbytes)
            ids[places] = self._residency.find(keyspace, batch)
        return ids

    def _parents(self, found: Judged, at: I64) -> I64:
        """Units in the index that are the parents of these blocks' units, else -1."""
        above = found.parent[found.unit[at]]
        linked = np.flatnonzero(above >= 0)
        parents = np.full(len(at), -1, np.int64)
        heads = self._find(found.rows[found.starts[above[linked]]], "key")
        there = heads >= 0
        parents[linked[there]] = self._residency.columns.unit_of(heads[there])
        return parents

    def _fill(self, rows: Found, ids: I64, units: I64) -> None:
        columns, width = self._residency.columns, self._residency.columns.key_words.shape[1]
        columns.keyspace[ids] = rows["keyspace"]
        columns.key_words[ids] = rows["key"][:, :width]
        columns.checksum[ids] = rows["checksum"]
        columns.set_record(ids, rows["location"], rows["stamp"])
        age_s = (self._nvme.now_ms() - rows["last_used_ms"].astype(np.float64)) / 1000
        begins = ids == units
        columns.set_last_used(ids[begins], self._residency.now_s() - age_s[begins])

    def _show(self, ids: I64) -> None:
        columns, residency = self._residency.columns, self._residency
        tags, checks = np.empty(len(ids), np.uint64), np.empty(len(ids), np.uint64)
        for number in np.unique(columns.keyspace[ids]).tolist():
            own = columns.keyspace[ids] == number
            keyspace = residency.keyspaces[number]
            words = columns.key_words[ids[own]][:, : -(-keyspace.key_nbytes // 8)]
            batch = KeyBatch(np.ascontiguousarray(words), keyspace.key_nbytes)
            tags[own], checks[own] = residency.fingerprints(keyspace, batch)
        places = places_of(np.zeros(len(ids), np.uint64), np.ones(len(ids), np.bool_))
        columns.row[ids] = residency.table.insert(tags, checks, places, ids.astype(np.int32))

    def _catch_up(self, ids: I64, orphans: I64) -> None:
        """What happened to these records since they were read."""
        columns = self._residency.columns
        for block, location in zip(ids.tolist(), columns.nvme[ids].tolist(), strict=True):
            if not self._moves:
                break
            if location in self._moves:
                new = np.array([self._moves[location]], np.uint64)
                self._residency.record(np.array([block]), new[:, 0], new[:, 1])
        gone = np.isin(columns.nvme[ids], np.array(sorted(self._gone), np.uint64))
        gone |= np.isin(columns.nvme[ids] >> _SHIFT, np.array(sorted(self._segments_lost)))
        gone |= np.isin(columns.unit_of(ids), orphans)
        self._residency.forget(ids[gone], MissReason.CORRUPT)
