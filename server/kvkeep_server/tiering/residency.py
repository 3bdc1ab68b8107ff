"""Which blocks are where: the only writer of the shared index, and the daemon's own view of it.

Runs on the event loop. Blocks come in with `insert` (sealed, so visible at once), leave with
`remove`, and are held by pins. What leaves is named by the eviction policy; here it is only carried
out, units whole.
"""

import random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.histogram import AGE_BOUNDS_S, Histogram
from kvkeep_server.core.results import MissReason, TierId
from kvkeep_server.index.layout import PAGE_NBYTES, STATE_MOVED, STATE_STOPPED, places_of
from kvkeep_server.policies.eviction import EvictionPolicy
from kvkeep_server.tiering.arrivals import Arrivals
from kvkeep_server.tiering.audit import Audit
from kvkeep_server.tiering.lineage import closed_part, descended
from kvkeep_server.tiering.rebuild import PreparedTable, TableMaker, TableSettings
from kvkeep_server.tiering.sealed import Slots
from kvkeep_server.tiers.ram.tier import RamTier

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
NO_HINTS = Hints()


class Retainer(Protocol):
    """Keeps units by pins of its own."""

    def keeps(self, units: I64) -> NDArray[np.bool_]:
        """Which of these it keeps."""
        ...

    def leaving(self, units: I64) -> None:
        """These are about to leave the index: takes its pins of them back."""
        ...


class Residency(Arrivals):
    """The blocks of this host's local tiers.

    A unit lives as long as any tier has its blocks. It is in ram as soon as one of its blocks is:
    then the eviction policy knows it. What nvme has is prefix-closed, so a unit that leaves ram
    stays on nvme only if its parent is there as well.

    Args:
        ram: The tier whose slots the rows point to; `remove` frees them there.
        policy: Told of everything that comes, is used, and leaves.
        clock: For ages.
        source: Seeds the index tables.
        settings: Of the tables.

    Attributes:
        retainer: Who keeps units for a while; None = nobody.
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
        self._tables = TableMaker(source, settings)
        super().__init__(
            table=self._tables.first(),
            policy=policy,
            clock=clock,
            ghost_places=settings.ghost_places,
        )
        self._ram = ram
        self.retainer: Retainer | None = None
        # While the next table is built: the blocks that moved between tiers meanwhile.
        self._moved: list[I64] | None = None
        self.evicted_total = 0
        # Since the last use, of units that are used again.
        self.reuse_ages = Histogram(AGE_BOUNDS_S)
        self.rebuilds_total = 0

    @property
    def payload_nbytes(self) -> int:
        """Payload bytes of the blocks in ram."""
        return self.held[TierId.RAM].nbytes

    @property
    def index_nbytes(self) -> int:
        """Bytes of the table, the columns and what the policy keeps; full keys not counted."""
        return self.table.nbytes + self.columns.nbytes + self._policy.nbytes

    @property
    def left(self) -> dict[MissReason, int]:
        """Blocks that left ram and did not stay on nvme, by reason."""
        return self.held[TierId.RAM].left

    # --- use and pins

    def slots_of(self, blocks: I64) -> tuple[U64, U64]:
        """Addresses of the slots in which blocks lie, and their generations; 0 = not in ram."""
        addresses = self.columns.address_of(blocks)
        there = addresses != 0
        if there.all():
            return addresses, self._ram.generations(addresses)
        generations = np.zeros(len(blocks), np.uint64)
        generations[there] = self._ram.generations(addresses[there])
        return addresses, generations

    def generations_of(self, blocks: I64) -> U64:
        """The second half of `slots_of`."""
        return self.slots_of(blocks)[1]

    def touch(self, units: I64, hints: Hints) -> None:
        """A request used these units, which differ from each other, in chain order."""
        if len(units):
            now = self._clock.monotonic_s()
            self.foresight.use(units)
            self.reuse_ages.add(now - self.columns.last_used_s(units))
            self._use(units, now)
            self._policy.touch(units[self.columns.in_ram[units]], hints, now)

    def pin(self, units: I64) -> None:
        """Forbids eviction until the matching `unpin`. The units differ from each other."""
        if len(units):
            idle = units[(self.columns.pins[units] == 0) & self.columns.in_ram[units]]
            if len(idle):
                self._policy.pin(idle)
            self.columns.add_pins(units)

    def unpin(self, units: I64) -> None:
        """Takes one pin of each back."""
        if len(units):
            pins = self.columns.pins[units]
            assert (pins > 0).all(), "unpin without pin"
            self.columns.pins[units] = pins - 1
            idle = units[pins == 1]
            withdrawn = self.columns.row[idle] < 0
            if withdrawn.any():
                blocks = self.columns.blocks_of(idle[withdrawn])
                self._free(blocks, self.columns.address_of(blocks))
                idle = idle[~withdrawn]
            idle = idle[self.columns.in_ram[idle]]
            if len(idle):
                self._policy.unpin(idle)

    # --- go

    def remove(self, units: I64, reason: MissReason) -> int:
        """Takes whole units out of the index and the ram tier; returns the number of blocks.

        The units must be unpinned and differ from each other.
        """
        assert not self.columns.pins[units].any(), "a pinned unit may not leave"
        return self.withdraw(units, reason)

    def withdraw(self, units: I64, reason: MissReason) -> int:
        """As `remove`, of pinned units too: nobody finds them any more, and the slots of those go
        back with their last pin. Every resident child of a unit leaves with it."""
        if self.retainer is not None:
            self.retainer.leaving(units)
        columns, pinned = self.columns, self.columns.pins[units] > 0
        blocks = columns.blocks_of(units)
        rows = columns.row[blocks].astype(np.int64)
        addresses = columns.address_of(blocks)
        last_used_s = columns.last_used_s(columns.unit_of(blocks))
        self.ghosts.remember(self.table.tag_of(rows), last_used_s, reason)
        self.table.remove(rows)
        parents = columns.parent[units]
        columns.drop_children(parents[parents >= 0])
        self._leave_policy(units)
        self._count_out(TierId.RAM, blocks[addresses != 0], reason)
        self._count_out(TierId.NVME, blocks[columns.nvme[blocks] != 0], reason)
        columns.row[blocks] = -1
        columns.parent[units] = -1
        for unit in units.tolist() if self.lost else ():
            self.lost.pop(unit, None)
        if pinned.any():
            stays = np.isin(columns.unit_of(blocks), units[pinned])
            columns.withdraw(blocks[stays], addresses[stays])
            self._free(blocks[~stays], addresses[~stays])
        else:
            self._free(blocks, addresses)
        return len(blocks)

    def _count_out(self, tier: TierId, blocks: I64, reason: MissReason) -> None:
        self.went(tier, blocks)
        self.held[tier].left[reason] += len(blocks)
        if reason is MissReason.EVICTED:
            self._note_ages(tier, blocks)

    def _note_ages(self, tier: TierId, blocks: I64) -> None:
        """Blocks make room in a tier."""
        last_used_s = self.columns.last_used_s(self.columns.unit_of(blocks))
        self.held[tier].evicted_ages.add(self._clock.monotonic_s() - last_used_s)

    def _free(self, blocks: I64, addresses: U64) -> None:
        """Slots and ids of blocks that are in the index no more."""
        self._ram.free(addresses[addresses != 0])
        self.columns.free(blocks)

    # --- between the tiers

    def record(self, blocks: I64, locations: U64, stamps: U64) -> None:
        """Records of these blocks, which had none, or have others from now on, lie on nvme."""
        new = blocks[self.columns.nvme[blocks] == 0]
        self.came(TierId.NVME, new)
        self.columns.set_record(blocks, locations, stamps)
        self.columns.reused[self.columns.unit_of(blocks)] = False
        self._move(blocks, self.columns.address_of(blocks))

    def forget(self, blocks: I64, reason: MissReason) -> None:
        """The records of these blocks are no more. Units that no tier has whole are `lost`.

        Of those that left the index all of that is done: who read them may not know yet.
        """
        blocks = blocks[(self.columns.nvme[blocks] != 0) & (self.columns.row[blocks] >= 0)]
        self._count_out(TierId.NVME, blocks, reason)
        units = np.unique(self.columns.unit_of(blocks))
        if reason is MissReason.EVICTED:
            self.columns.let_go(blocks)
            self.columns.reused[units] = False
        else:
            self.columns.set_record(blocks, 0, np.zeros(len(blocks), np.uint64))
        self._move(blocks, self.columns.address_of(blocks))
        self._note_lost(units, reason)

    def _note_lost(self, units: I64, reason: MissReason) -> None:
        for unit in units[~self.columns.placed(units)].tolist():
            self.lost.setdefault(unit, reason)

    def promote(self, blocks: I64, slots: Slots, hints: Hints) -> None:
        """Blocks of whole units, in chain order within a keyspace, lie in ram as well."""
        columns = self.columns
        self._move(blocks, slots.addresses)
        self.came(TierId.RAM, blocks)
        units = self.units_of(blocks)
        units = units[~columns.in_ram[units]]
        self._enter_ram(units, columns.parent[units].astype(np.int64), hints)

    def _leave_ram(self, units: I64) -> None:
        """Unpinned units leave ram: what nvme has stays there, the rest leaves altogether. Where
        others descend from such a unit, it is lost, and they leave with it a little later."""
        columns = self.columns
        if not self.held[TierId.NVME].ever:
            self.evicted_total += self.remove(units, MissReason.EVICTED)
            return
        parents = columns.parent[units]
        stays = columns.recorded(units)
        stays &= (parents < 0) | columns.recorded(np.maximum(parents, 0).astype(np.int64))
        if not stays.all():
            others = np.sort(units[~stays])
            leaving = closed_part(columns, others)
            self.evicted_total += self.remove(leaving, MissReason.EVICTED)
            lost = np.setdiff1d(others, leaving)
            if len(lost):
                blocks = self._vacate(lost)
                self.evicted_total += blocks
                self.held[TierId.RAM].left[MissReason.EVICTED] += blocks
                self.forget(columns.blocks_of(lost), MissReason.EVICTED)
                self._note_lost(lost, MissReason.EVICTED)
        if stays.any():
            self.held[TierId.RAM].demoted += self._vacate(units[stays])

    def _vacate(self, units: I64) -> int:
        """Gives the slots of units back; the number of blocks."""
        columns = self.columns
        blocks = columns.blocks_of(units)
        addresses = columns.address_of(blocks)
        blocks, addresses = blocks[addresses != 0], addresses[addresses != 0]
        self._note_ages(TierId.RAM, blocks)
        self.went(TierId.RAM, blocks)
        self._move(blocks, np.zeros(len(blocks), np.uint64))
        self._leave_policy(units)
        self._ram.free(addresses)
        return len(blocks)

    def _move(self, blocks: I64, addresses: U64) -> None:
        """Lets clients see where blocks are in ram, and whether nvme has them; not of those that
        left the index."""
        rows = self.columns.row[blocks].astype(np.int64)
        here = rows >= 0
        if self._moved is not None:
            self._moved.append(blocks[here])
        places = places_of(addresses[here], self.columns.nvme[blocks[here]] != 0)
        self.table.move(rows[here], places)

    # --- who leaves ram

    def evict(self, count: int) -> int:
        """Lets the policy name up to `count` units, which leave ram; returns how many."""
        victims = self._policy.victims(count, self._clock.monotonic_s())
        if len(victims):
            self._leave_ram(victims)
        return len(victims)

    def evict_addresses(self, addresses: U64) -> None:
        """Takes the units whose blocks lie at these addresses out of ram, and all in ram that
        descend from them."""
        columns = self.columns
        ids = columns.in_use()
        units = np.zeros(columns.capacity, bool)
        units[columns.unit_of(ids[np.isin(columns.address_of(ids), addresses)])] = True
        units = descended(columns.parent, units)
        leaving = np.flatnonzero(units & columns.in_ram)
        if not columns.pins[leaving].any():
            self._leave_ram(leaving)

    def slot_nbytes_of(self, blocks: I64) -> I64:
        """Bytes of the slot that each block takes in ram, or would."""
        return -(-self.sizes_of(blocks) // PAGE_NBYTES) * PAGE_NBYTES

    def kept(self, units: I64) -> NDArray[np.bool_]:
        """Which units somebody wants kept."""
        if self.retainer is None:
            return np.zeros(len(units), bool)
        return self.retainer.keeps(units)

    def pinned_addresses(self, addresses: U64) -> NDArray[np.bool_]:
        """Which of these slots must stay: those of a pinned unit, or of one with a pinned
        descendant, and those of no block, which a commit is about to fill."""
        ids = self.columns.not_held()
        return ~np.isin(addresses, self.columns.address_of(ids))

    def oldest_addresses(self, nbytes: int, count: int) -> U64:
        """Slots for blocks of this size whose units were not used for longest and may leave."""
        columns, ids = self.columns, self.columns.not_held()
        sizes = self._ram.slabs.slot_nbytes(columns.address_of(ids))
        ids = ids[sizes == self._ram.slot_nbytes(nbytes)]
        order = np.argsort(columns.last_used_s(columns.unit_of(ids)), kind="stable")
        return columns.address_of(ids[order[:count]])

    # --- the table

    def index_room(self) -> int:
        """Rows that may still be inserted before the table must be rebuilt."""
        return self.table.room(self._tables.settings.load_max)

    def rows_wanted(self, more: int) -> int:
        """Rows of the next table, so that `more` of them may be inserted, and some again."""
        return self._tables.settings.rows_for(self.table.live_rows + more)

    def build_table(self, rows: int) -> PreparedTable:
        """A new table of another seed with all that is in the present one.

        May run in a thread while the loop goes on reading; nothing may be inserted or removed
        meanwhile.

        Raises:
            OSError: No memory for it.
        """
        self._moved = []
        try:
            return self._tables.next(self.columns, self.keyspaces, rows)
        except BaseException:
            self._moved = None
            raise

    def adopt_table(self, prepared: PreparedTable) -> None:
        """Makes a built table the index. The caller has told clients of it before or does so right
        after."""
        old, table = self.table, prepared.table
        # Blocks may have moved between tiers while it was built.
        moved = np.unique(np.concatenate([np.empty(0, np.int64), *(self._moved or ())]))
        self._moved = None
        places = old.places(self.columns.row[moved].astype(np.int64))
        self.columns.row[: len(prepared.rows)] = prepared.rows
        table.move(self.columns.row[moved].astype(np.int64), places)
        self.columns.table = table
        self._starts = prepared.starts
        self.ghosts.clear()
        self.rebuilds_total += 1
        old.set_state(STATE_MOVED)
        old.close()

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
            keyspaces=self.keyspaces,
            find=self.find,
            held={tier: (held.blocks, held.nbytes) for tier, held in self.held.items()},
            lost=frozenset(self.lost),
        )
