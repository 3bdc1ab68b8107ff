"""Which blocks are where: the only writer of the shared index, and the daemon's own view of it.

Runs on the event loop. Blocks come in with `insert` (sealed, so visible at once), leave with
`remove`, and are held by pins. What leaves is named by the eviction policy; here it is only carried
out, units whole.
"""

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.histogram import AGE_BOUNDS_S, Histogram
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import MissReason
from kvkeep_server.index.layout import STATE_MOVED, STATE_STOPPED, Multipliers
from kvkeep_server.index.table import IndexTable, TableFullError
from kvkeep_server.policies.eviction import EvictionPolicy
from kvkeep_server.tiering.audit import Audit
from kvkeep_server.tiering.columns import BlockColumns
from kvkeep_server.tiering.ghosts import Ghosts
from kvkeep_server.tiering.keyspaces import Keyspace, KeyspaceSet
from kvkeep_server.tiering.lineage import descended
from kvkeep_server.tiering.rebuild import PreparedTable, fill_table
from kvkeep_server.tiering.sealed import PARENT_BEFORE, Marks, Sealed
from kvkeep_server.tiers.ram.tier import RamTier

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class TableSettings:
    """How index tables are made.

    Attributes:
        server_epoch: Of this daemon.
        rows_initial: Rows of the first table.
        load_max: Share of used rows above which a table is rebuilt.
        ghost_places: Of the ghost table, a power of two.
    """

    server_epoch: int
    rows_initial: int
    load_max: float
    ghost_places: int = 65536


class Residency:
    """The blocks of this host's local tiers.

    Args:
        ram: The tier whose slots the rows point to; `remove` frees them there.
        policy: Told of everything that comes, is used, and leaves.
        clock: For ages.
        source: Seeds the index tables.
        settings: Of the tables.
    """

    def __init__(
        self,
        *,
        ram: RamTier,
        policy: EvictionPolicy,
        clock: Clock,
        source: random.Random,
        settings: TableSettings,
    ) -> None:
        """See the class."""
        self._ram = ram
        self._policy = policy
        self._clock = clock
        self._source = source
        self._settings = settings
        self.columns = BlockColumns()
        self._scratch = np.zeros(0, np.int32)
        self.ghosts = Ghosts(places=settings.ghost_places)
        self.table = self._new_table(settings.rows_initial, table_id=1)
        self._starts: dict[int, tuple[np.uint64, np.uint64]] = {}
        self._keyspaces: list[Keyspace] = []
        self.payload_nbytes = 0
        self.evicted_total = 0
        # Since the last use, blocks: of those evicted, and units: of those used again.
        self.evicted_ages = Histogram(AGE_BOUNDS_S)
        self.left = dict.fromkeys(MissReason, 0)
        self.reuse_ages = Histogram(AGE_BOUNDS_S)
        self.rebuilds_total = 0
        self.collisions_total = 0

    # --- keyspaces and fingerprints

    def add_keyspace(self, keyspace: Keyspace) -> None:
        """Keyspaces are added in the order of their index."""
        assert keyspace.index == len(self._keyspaces)
        self._keyspaces.append(keyspace)
        self.columns.widen_keys(-(-keyspace.key_nbytes // 8))

    def fingerprints(self, keyspace: Keyspace, keys: KeyBatch) -> tuple[U64, U64]:
        """Tags and checks of keys in the present table."""
        start = self._starts.get(keyspace.index)
        if start is None:
            h, s = self.table.multipliers.start(
                keyspace.namespace_id, keyspace.group, keyspace.key_nbytes
            )
            start = self._starts[keyspace.index] = (np.uint64(h), np.uint64(s))
        return self.table.multipliers.fingerprints(keys.words, *start)

    # --- look-up

    def find(self, keyspace: Keyspace, keys: KeyBatch) -> I64:
        """Block ids, -1 where a key is not resident. Full keys are compared."""
        return self._identify(keyspace, keys, *self.fingerprints(keyspace, keys))[0]

    def find_or_collide(
        self, keyspace: Keyspace, keys: KeyBatch
    ) -> tuple[I64, U64, U64, NDArray[np.bool_] | None]:
        """Ids (-1: absent), tags, checks, and where another key holds the tag; None there = all
        are absent."""
        tags, checks = self.fingerprints(keyspace, keys)
        ids, collides = self._identify(keyspace, keys, tags, checks)
        return ids, tags, checks, collides

    def _identify(
        self, keyspace: Keyspace, keys: KeyBatch, tags: U64, checks: U64
    ) -> tuple[I64, NDArray[np.bool_] | None]:
        rows, collides = self.table.find(tags, checks)
        if collides is None:
            return rows, None
        ids = self.table.ids[rows].astype(np.int64)
        absent = rows < 0
        if absent.any():
            ids[absent] = -1
        differs = self._differ(keyspace, keys, ids)
        if differs is not None:
            collides |= differs & ~absent
        if collides.any():
            self.collisions_total += int(np.count_nonzero(collides))
            ids[collides] = -1
        return ids, collides

    def _differ(self, keyspace: Keyspace, keys: KeyBatch, ids: I64) -> NDArray[np.bool_] | None:
        """Where the block of an id is not (keyspace, key); None = nowhere. At id -1: anything."""
        spaces = self.columns.keyspace[ids]
        stored = self.columns.key_words[ids]
        width = keys.words.shape[1]
        # Nearly always all are equal, which one pass over the whole array tells.
        same_width = width == stored.shape[1]
        differs: NDArray[np.bool_] = spaces != keyspace.index
        if same_width and np.array_equal(stored, keys.words) and not differs.any():
            return None
        for i in range(width):
            differs |= stored[:, i] != keys.words[:, i]
        return differs

    def prefix(self, keyspaces: Sequence[Keyspace], keys: KeyBatch) -> list[I64]:
        """The leading blocks that are resident in every keyspace: one array of ids each, equally
        long."""
        found: list[I64] = []
        for keyspace in keyspaces:
            ids = self.find(keyspace, keys)
            absent = ids < 0
            if absent.any():
                keys = keys.slice(0, int(absent.argmax()))
            found.append(ids)
        return [ids[: len(keys)] for ids in found]

    def units_of(self, blocks: I64) -> I64:
        """The units of a chain's blocks, without repetitions, in chain order.

        A sane chain has no key twice; a hostile one may.
        """
        units = self.columns.unit[blocks].astype(np.int64)
        place = np.arange(len(units), dtype=np.int32)
        if len(self._scratch) < self.columns.capacity:
            self._scratch = np.zeros(self.columns.capacity, np.int32)
        self._scratch[units] = place
        if (self._scratch[units] == place).all():
            return units
        _, first = np.unique(units, return_index=True)
        return units[np.sort(first)]

    def why_absent(
        self, keyspace: Keyspace, keys: KeyBatch, position: int
    ) -> tuple[MissReason, float]:
        """Why the key at this position is not resident, and seconds since its last use (EVICTED
        only)."""
        tags, _ = self.fingerprints(keyspace, keys.slice(position, position + 1))
        reason, last_used_s = self.ghosts.recall(int(tags[0]))
        return reason, max(0.0, self._clock.monotonic_s() - last_used_s) if last_used_s else 0.0

    def unit_at(self, row: int, version: int, spaces: KeyspaceSet) -> int:
        """Unit of the block in this row, -1 unless it is one of `spaces` and the row did not change
        since.

        For what clients report; nothing of it is trusted.
        """
        if not 0 <= row < self.table.geometry.rows or self.table.version_of(row) != version:
            return -1
        block = int(self.table.ids[row])
        if block < 0:
            return -1
        keyspace = int(self.columns.keyspace[block])
        if not any(space.index == keyspace for space in spaces.local):
            return -1
        return int(self.columns.unit[block])

    # --- use and pins

    def now_s(self) -> float:
        """Monotonic seconds, the time of every age here."""
        return self._clock.monotonic_s()

    def touch(self, units: I64, hints: Hints) -> None:
        """A request used these units, which differ from each other, in chain order."""
        if len(units):
            now = self._clock.monotonic_s()
            self.reuse_ages.add(now - self.columns.last_used_s[units])
            self.columns.last_used_s[units] = now
            self._policy.touch(units, hints, now)

    def pin(self, units: I64) -> None:
        """Forbids eviction until the matching `unpin`. The units differ from each other."""
        if len(units):
            pins = self.columns.pins[units]
            idle = units[pins == 0]
            if len(idle):
                self._policy.pin(idle)
            self.columns.pins[units] = pins + 1

    def unpin(self, units: I64) -> None:
        """Takes one pin of each back."""
        if len(units):
            pins = self.columns.pins[units]
            assert (pins > 0).all(), "unpin without pin"
            self.columns.pins[units] = pins - 1
            idle = units[pins == 1]
            withdrawn = self.columns.row[idle] < 0
            if withdrawn.any():
                self._free(self._blocks_of(idle[withdrawn]))
                idle = idle[~withdrawn]
            if len(idle):
                self._policy.unpin(idle)

    # --- come and go

    def insert(self, sealed: Sequence[Sealed], siblings: KeyspaceSet, hints: Hints) -> list[I64]:
        """Makes sealed blocks visible, all batches together or, where it fails, none of them.

        The batches are those of one commit: the same keys, each in a keyspace of its own. Room in
        the table must have been made (`index_room`).

        Returns:
            The ids of each batch.

        Raises:
            TableFullError: Bad luck with the table's seed.
        """
        columns, first = self.columns, sealed[0]
        with ExitStack() as undo:
            ids = columns.allocate(len(first.keys) * len(sealed))
            undo.callback(columns.free, ids)
            of_batch = np.split(ids, len(sealed)) if len(sealed) > 1 else [ids]
            units = self._units_of(first, siblings, of_batch[0])
            parents = first.parents.copy()
            before = np.flatnonzero(parents == PARENT_BEFORE)
            parents[before] = units[before - 1]
            for batch, own in zip(sealed, of_batch, strict=True):
                self._fill(batch, own, units)
            now = self._clock.monotonic_s()
            columns.last_used_s[units] = now
            new, new_parents = units, parents
            fresh = units == of_batch[0]
            if not fresh.all():
                self._policy.touch(units[~fresh], hints, now)
                new, new_parents = units[fresh], parents[fresh]
            self._policy.insert(new, new_parents, 0, hints, now)
            undo.callback(self._policy.remove, new)
            rows = self._show(sealed, ids)
            undo.pop_all()
        columns.row[ids] = rows
        if len(ids) > len(new):
            for own in of_batch:
                self._join(own, units)
        columns.parent[new] = new_parents
        # Keys of a commit differ, so their parents do.
        columns.children[new_parents[new_parents >= 0]] += 1
        boundary_nbytes = sum(batch.keyspace.block_nbytes for batch in sealed)
        self.payload_nbytes += len(first.keys) * boundary_nbytes
        return of_batch

    def _units_of(self, batch: Sealed, siblings: KeyspaceSet, ids: I64) -> I64:
        """The unit that each block joins; a block without resident siblings begins its own."""
        units = ids.copy()
        if len(siblings.siblings) > 1:
            alone = np.ones(len(ids), bool)
            for keyspace in siblings.siblings:
                if keyspace.index != batch.keyspace.index and alone.any():
                    others = self.find(keyspace, batch.keys)
                    joins = alone & (others >= 0)
                    units[joins] = self.columns.unit[others[joins]]
                    alone &= ~joins
        return units

    def _fill(self, batch: Sealed, ids: I64, units: I64) -> None:
        columns = self.columns
        columns.keyspace[ids] = batch.keyspace.index
        columns.key_words[ids] = 0
        columns.key_words[ids, : batch.keys.words.shape[1]] = batch.keys.words
        columns.address[ids] = batch.slots.addresses
        columns.generation[ids] = batch.slots.generations
        columns.checksum[ids] = batch.slots.checksums
        columns.unit[ids] = units

    def _show(self, sealed: Sequence[Sealed], ids: I64) -> I64:
        """Rows of all blocks, batch after batch: clients see them from here on."""
        marks = [self._marks_now(batch) for batch in sealed]
        return self.table.insert(
            _joined([mark.tags for mark in marks]),
            _joined([mark.checks for mark in marks]),
            _joined([batch.slots.addresses for batch in sealed]),
            _joined([batch.slots.generations for batch in sealed]),
            ids.astype(np.int32),
        )

    def _marks_now(self, batch: Sealed) -> Marks:
        if batch.marks.table is self.table:
            return batch.marks
        return Marks(self.table, *self.fingerprints(batch.keyspace, batch.keys))

    def _join(self, ids: I64, units: I64) -> None:
        """Puts blocks that do not begin a unit of their own behind the first one of theirs."""
        joins = ids != units
        joined, heads = ids[joins], units[joins]
        self.columns.next_shard[joined] = self.columns.next_shard[heads]
        self.columns.next_shard[heads] = joined

    def remove(self, units: I64, reason: MissReason) -> int:
        """Takes whole units out of the index and the ram tier; returns the number of blocks.

        The units must be unpinned and differ from each other.
        """
        assert not self.columns.pins[units].any(), "a pinned unit may not leave"
        return self.withdraw(units, reason)

    def withdraw(self, units: I64, reason: MissReason) -> int:
        """As `remove`, of pinned units too: nobody finds them any more, and the slots of those go
        back with their last pin. Every resident child of a unit leaves with it."""
        columns, pinned = self.columns, self.columns.pins[units] > 0
        self._policy.unpin(units[pinned])
        blocks = self._blocks_of(units)
        rows = columns.row[blocks].astype(np.int64)
        tags = self.table.tag_of(rows)
        last_used_s = columns.last_used_s[columns.unit[blocks]]
        self.ghosts.remember(tags, last_used_s, reason)
        if reason is MissReason.EVICTED:
            self.evicted_ages.add(self._clock.monotonic_s() - last_used_s)
        self.left[reason] += len(blocks)
        self.table.remove(rows)
        parents = columns.parent[units]
        parents = parents[parents >= 0]
        np.subtract.at(columns.children, parents, 1)
        self._policy.remove(units)
        for keyspace, count in zip(
            *np.unique(columns.keyspace[blocks], return_counts=True), strict=True
        ):
            self.payload_nbytes -= int(count) * self._keyspaces[int(keyspace)].block_nbytes
        columns.row[blocks] = -1
        columns.parent[units] = -1
        self._free(blocks if not pinned.any() else self._blocks_of(units[~pinned]))
        return len(blocks)

    def _free(self, blocks: I64) -> None:
        """Slots and ids of blocks that are in the index no more."""
        self._ram.free(self.columns.address[blocks])
        self.columns.free(blocks)

    def _blocks_of(self, units: I64) -> I64:
        """All blocks of these units."""
        parts, at = [], units
        while len(at):
            parts.append(at)
            following = self.columns.next_shard[at]
            at = following[following >= 0].astype(np.int64)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def evict(self, count: int) -> int:
        """Lets the policy name up to `count` units and removes them; returns how many."""
        victims = self._policy.victims(count, self._clock.monotonic_s())
        if len(victims):
            self.evicted_total += self.remove(victims, MissReason.EVICTED)
        return len(victims)

    def evict_addresses(self, addresses: U64) -> None:
        """Removes the units whose blocks lie at these addresses and all their descendants."""
        columns = self.columns
        ids = columns.in_use()
        units = np.zeros(columns.capacity, bool)
        units[columns.unit[ids[np.isin(columns.address[ids], addresses)]]] = True
        units = descended(columns.parent, units)
        leaving = np.flatnonzero(units & (columns.unit == np.arange(columns.capacity)))
        if not columns.pins[leaving].any():
            self.evicted_total += self.remove(leaving, MissReason.EVICTED)

    def pinned_addresses(self, addresses: U64) -> NDArray[np.bool_]:
        """Which of these slots must stay: those of a pinned unit, or of one with a pinned
        descendant, and those of no block, which a commit is about to fill."""
        ids = self.columns.not_held()
        return ~np.isin(addresses, self.columns.address[ids])

    def oldest_addresses(self, nbytes: int, count: int) -> U64:
        """Slots for blocks of this size whose units were not used for longest and may leave."""
        columns, ids = self.columns, self.columns.not_held()
        sizes = self._ram.slabs.slot_nbytes(columns.address[ids])
        ids = ids[sizes == self._ram.slot_nbytes(nbytes)]
        order = np.argsort(columns.last_used_s[columns.unit[ids]], kind="stable")
        oldest: U64 = columns.address[ids[order[:count]]]
        return oldest

    # --- the table

    def index_room(self) -> int:
        """Rows that may still be inserted before the table must be rebuilt."""
        return self.table.room(self._settings.load_max)

    def build_table(self, rows: int) -> PreparedTable:
        """A new table of another seed with all that is in the present one.

        May run in a thread while the loop goes on reading; nothing may be inserted or removed
        meanwhile.

        Raises:
            OSError: No memory for it.
        """
        while True:
            table = self._new_table(rows, table_id=self.table.table_id + 1)
            try:
                return fill_table(table, self.columns, self._keyspaces)
            except TableFullError:
                rows *= 2
                table.close()
            except BaseException:
                table.close()
                raise

    def adopt_table(self, prepared: PreparedTable) -> None:
        """Makes a built table the index. The caller has told clients of it before or does so right
        after."""
        old = self.table
        self.columns.row[prepared.ids] = prepared.rows
        self.table = prepared.table
        self._starts = prepared.starts
        self.ghosts.clear()
        self.rebuilds_total += 1
        old.set_state(STATE_MOVED)
        old.close()

    def _new_table(self, rows: int, *, table_id: int) -> IndexTable:
        return IndexTable(
            rows=rows,
            multipliers=Multipliers.draw(self._source),
            server_epoch=self._settings.server_epoch,
            table_id=table_id,
        )

    def stop(self) -> None:
        """Tells clients that nobody keeps the index any more."""
        self.table.set_state(STATE_STOPPED)

    def check(self) -> None:
        """Audits index, columns, pool and policy against each other.

        Raises:
            AssertionError: They disagree.
        """
        self.audit().whole()

    def audit(self) -> Audit:
        """What `check` looks at, for those who look at it piece by piece."""
        return Audit(
            columns=self.columns,
            table=self.table,
            ram=self._ram,
            policy=self._policy,
            keyspaces=self._keyspaces,
            find=self.find,
            payload_nbytes=self.payload_nbytes,
        )


def _joined(parts: list[U64]) -> U64:
    return np.concatenate(parts) if len(parts) > 1 else parts[0]
