"""Which blocks are where: the only writer of the shared index, and the daemon's own view of it.

Runs on the event loop. Blocks come in with `insert` (sealed, so visible at once), leave with
`remove`, and are held by pins. What leaves is named by the eviction policy; here it is only carried
out, units whole.
"""

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.histogram import AGE_BOUNDS_S, Histogram
from kvkeep_server.core.results import MissReason, TierId
from kvkeep_server.index.layout import STATE_MOVED, STATE_STOPPED, Multipliers
from kvkeep_server.index.table import IndexTable, TableFullError
from kvkeep_server.policies.eviction import EvictionPolicy
from kvkeep_server.tiering.arrivals import Arrivals
from kvkeep_server.tiering.audit import Audit
from kvkeep_server.tiering.lineage import closed_part, descended
from kvkeep_server.tiering.rebuild import PreparedTable, fill_table
from kvkeep_server.tiering.sealed import Slots
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
        self._source = source
        self._settings = settings
        table = self._new_table(settings.rows_initial, table_id=1)
        super().__init__(
            table=table, policy=policy, clock=clock, ghost_places=settings.ghost_places
        )
        self._ram = ram
        self.evicted_total = 0
        # Since the last use, blocks: of those that left ram, and units: of those used again.
        self.evicted_ages = Histogram(AGE_BOUNDS_S)
        self.reuse_ages = Histogram(AGE_BOUNDS_S)
        self.rebuilds_total = 0

    @property
    def payload_nbytes(self) -> int:
        """Payload bytes of the blocks in ram."""
        return self.held[TierId.RAM].nbytes

    @property
    def left(self) -> dict[MissReason, int]:
        """Blocks that left ram and did not stay on nvme, by reason."""
        return self.held[TierId.RAM].left

    # --- use and pins

    def touch(self, units: I64, hints: Hints) -> None:
        """A request used these units, which differ from each other, in chain order."""
        if len(units):
            now = self._clock.monotonic_s()
            self.reuse_ages.add(now - self.columns.last_used_s[units])
            self.columns.last_used_s[units] = now
            self._policy.touch(units[self.columns.in_ram[units]], hints, now)

    def pin(self, units: I64) -> None:
        """Forbids eviction until the matching `unpin`. The units differ from each other."""
        if len(units):
            pins = self.columns.pins[units]
            idle = units[(pins == 0) & self.columns.in_ram[units]]
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
                self._free(self.columns.blocks_of(idle[withdrawn]))
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
        columns, pinned = self.columns, self.columns.pins[units] > 0
        blocks = columns.blocks_of(units)
        rows = columns.row[blocks].astype(np.int64)
        last_used_s = columns.last_used_s[columns.unit[blocks]]
        self.ghosts.remember(self.table.tag_of(rows), last_used_s, reason)
        if reason is MissReason.EVICTED:
            was_in_ram = columns.address[blocks] != 0
            self.evicted_ages.add(self._clock.monotonic_s() - last_used_s[was_in_ram])
        self.table.remove(rows)
        parents = columns.parent[units]
        parents = parents[parents >= 0]
        np.subtract.at(columns.children, parents, 1)
        self._leave_policy(units)
        self._count_out(TierId.RAM, blocks[columns.address[blocks] != 0], reason)
        self._count_out(TierId.NVME, blocks[columns.nvme[blocks] != 0], reason)
        columns.row[blocks] = -1
        columns.parent[units] = -1
        for unit in units.tolist() if self.lost else ():
            self.lost.pop(unit, None)
        self._free(blocks if not pinned.any() else columns.blocks_of(units[~pinned]))
        return len(blocks)

    def _count_out(self, tier: TierId, blocks: I64, reason: MissReason) -> None:
        held = self.held[tier]
        held.add(-len(blocks), -self.nbytes_of(blocks))
        held.left[reason] += len(blocks)

    def _free(self, blocks: I64) -> None:
        """Slots and ids of blocks that are in the index no more."""
        addresses = self.columns.address[blocks]
        self._ram.free(addresses[addresses != 0])
        self.columns.free(blocks)

    # --- between the tiers

    def record(self, blocks: I64, locations: U64, stamps: U64) -> None:
        """Records of these blocks, which had none, or have others from now on, lie on nvme."""
        new = blocks[self.columns.nvme[blocks] == 0]
        self.held[TierId.NVME].add(len(new), self.nbytes_of(new))
        self.columns.nvme[blocks] = locations
        self.columns.stamp[blocks] = stamps
        self._publish(blocks)

    def forget(self, blocks: I64, reason: MissReason) -> None:
        """The records of these blocks are no more. Units that no tier has whole are `lost`.

        Of those that left the index all of that is done: who read them may not know yet.
        """
        blocks = blocks[(self.columns.nvme[blocks] != 0) & (self.columns.row[blocks] >= 0)]
        self._count_out(TierId.NVME, blocks, reason)
        self.columns.nvme[blocks] = 0
        self.columns.stamp[blocks] = 0
        self._publish(blocks)
        units = np.unique(self.columns.unit[blocks]).astype(np.int64)
        self._note_lost(units, reason)

    def _note_lost(self, units: I64, reason: MissReason) -> None:
        for unit in units[~self.columns.placed(units)].tolist():
            self.lost.setdefault(unit, reason)

    def promote(self, blocks: I64, slots: Slots, hints: Hints) -> None:
        """Blocks of whole units, in chain order within a keyspace, lie in ram as well."""
        columns = self.columns
        columns.address[blocks] = slots.addresses
        columns.generation[blocks] = slots.generations
        self._publish(blocks)
        self.held[TierId.RAM].add(len(blocks), self.nbytes_of(blocks))
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
                self._vacate(lost)
                self.forget(columns.blocks_of(lost), MissReason.EVICTED)
                self._note_lost(lost, MissReason.EVICTED)
        if stays.any():
            self.held[TierId.RAM].demoted += self._vacate(units[stays])

    def _vacate(self, units: I64) -> int:
        """Gives the slots of units back; the number of blocks."""
        columns = self.columns
        blocks = columns.blocks_of(units)
        blocks = blocks[columns.address[blocks] != 0]
        addresses = columns.address[blocks]
        self.evicted_ages.add(self._clock.monotonic_s() - columns.last_used_s[columns.unit[blocks]])
        self.held[TierId.RAM].add(-len(blocks), -self.nbytes_of(blocks))
        columns.address[blocks] = 0
        columns.generation[blocks] = 0
        self._publish(blocks)
        self._leave_policy(units)
        self._ram.free(addresses)
        return len(blocks)

    def _publish(self, blocks: I64) -> None:
        """Lets clients see where blocks are; not of those that left the index."""
        blocks = blocks[self.columns.row[blocks] >= 0]
        self.table.move(self.columns.row[blocks].astype(np.int64), self._places(blocks))

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
        units[columns.unit[ids[np.isin(columns.address[ids], addresses)]]] = True
        units = descended(columns.parent, units)
        leaving = np.flatnonzero(units & columns.in_ram)
        if not columns.pins[leaving].any():
            self._leave_ram(leaving)

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
                return fill_table(table, self.columns, self.keyspaces)
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
        ids, rows, table = prepared.ids, prepared.rows, prepared.table
        self.columns.row[ids] = rows
        # Blocks may have moved between tiers while it was built.
        places = self._places(ids)
        moved = table.address_of(rows) != places.addresses
        moved |= table.generation_of(rows) != places.generations
        moved |= table.nvme_of(rows) != places.nvme
        self.table = table
        self._publish(ids[moved])
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
            keyspaces=self.keyspaces,
            find=self.find,
            held={tier: (held.blocks, held.nbytes) for tier, held in self.held.items()},
            lost=frozenset(self.lost),
        )
