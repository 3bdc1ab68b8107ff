"""How sealed blocks come into the index: ids, units and their parents, the policy, and at last the
rows that clients see."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.results import GroupKind, TierId
from kvkeep_server.index.table import IndexTable
from kvkeep_server.policies import NO_PARENT
from kvkeep_server.policies.eviction import EvictionPolicy
from kvkeep_server.tiering.finding import BlockFinder
from kvkeep_server.tiering.foresight import Foresight
from kvkeep_server.tiering.held import Held
from kvkeep_server.tiering.keyspaces import Keyspace, KeyspaceSet
from kvkeep_server.tiering.sealed import PARENT_BEFORE, Marks, Sealed

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


class Onlooker(Protocol):
    """Hears what comes into tiers and leaves them. Must not raise, nor change anything."""

    def came(self, tier: TierId, blocks: I64) -> None:
        """These blocks, in the index, are in the tier from now on."""
        ...

    def went(self, tier: TierId, blocks: I64) -> None:
        """These, whose ids are theirs still, are not any more."""
        ...


@dataclass(frozen=True, slots=True)
class _Entered:
    """Blocks of a commit that form units together.

    Attributes:
        of_batch: Their ids, a batch each.
        units: Of each key.
        new: Those of them that begin here.
        parents: Units before the new ones, -1 = none.
    """

    of_batch: Sequence[I64]
    units: I64
    new: I64
    parents: I64


def _together(sealed: Sequence[Sealed]) -> int:
    """How many of the leading batches have blocks that form units together."""
    boundary_id = sealed[0].keyspace.boundary_id
    others = (n for n, batch in enumerate(sealed) if batch.keyspace.boundary_id != boundary_id)
    return next(others, len(sealed))


class Arrivals(BlockFinder):
    """The part of `Residency` that blocks come in by. Event loop only.

    Args:
        table: As of `BlockFinder`.
        policy: Told of everything that comes.
        clock: For ages.
        ghost_places: As of `BlockFinder`.

    Attributes:
        held: Blocks and bytes of each tier.
        foresight: What became of units that were prefetched.
        onlooker: Who hears of it; None = nobody.
    """

    def __init__(
        self, *, table: IndexTable, policy: EvictionPolicy, clock: Clock, ghost_places: int
    ) -> None:
        """See the class."""
        super().__init__(
            table=table, parents=policy.parents, clock=clock, ghost_places=ghost_places
        )
        self._policy = policy
        self.foresight = Foresight()
        self.onlooker: Onlooker | None = None
        self.held = {TierId.RAM: Held(), TierId.NVME: Held()}

    def now_s(self) -> float:
        """Monotonic seconds, the time of every age here."""
        return self._clock.monotonic_s()

    def insert(self, sealed: Sequence[Sealed], spaces: KeyspaceSet, hints: Hints) -> list[I64]:
        """Makes sealed blocks visible, all batches together or, where it fails, none of them.

        The batches are those of one commit, each in a keyspace of its own; those whose blocks form
        units together follow each other and have the same keys. Room in the table must have been
        made (`index_room`).

        Returns:
            The ids of each batch.

        Raises:
            TableFullError: Bad luck with the table's seed.
        """
        columns = self.columns
        with ExitStack() as undo:
            ids = columns.allocate(sum(len(batch.keys) for batch in sealed))
            undo.callback(columns.free, ids)
            edges = np.cumsum([len(batch.keys) for batch in sealed[:-1]])
            of_batch = np.split(ids, edges) if len(sealed) > 1 else [ids]
            entered, stop = [], 0
            while stop < len(sealed):
                start, stop = stop, stop + _together(sealed[stop:])
                family = of_batch[start:stop]
                entered.append(self._enter(sealed[start:stop], family, spaces, hints, undo))
            rows = self._show(sealed, ids)
            undo.pop_all()
        columns.row[ids] = rows
        for entry in entered:
            for own in entry.of_batch:
                columns.join(own, entry.units)
            columns.parent[entry.new] = entry.parents
            columns.add_children(entry.parents[entry.parents >= 0])
        self.came(TierId.RAM, ids)
        return of_batch

    def came(self, tier: TierId, blocks: I64) -> None:
        """Counts blocks that are in a tier from now on."""
        self.held[tier].add(len(blocks), self.nbytes_of(blocks))
        if self.onlooker is not None:
            self.onlooker.came(tier, blocks)

    def went(self, tier: TierId, blocks: I64) -> None:
        """Counts blocks that are not in a tier any more."""
        self.held[tier].add(-len(blocks), -self.nbytes_of(blocks))
        if self.onlooker is not None:
            self.onlooker.went(tier, blocks)

    def _enter(
        self,
        sealed: Sequence[Sealed],
        of_batch: Sequence[I64],
        spaces: KeyspaceSet,
        hints: Hints,
        undo: ExitStack,
    ) -> _Entered:
        """Batches whose blocks form units together: columns and policy, all but the links."""
        columns, first = self.columns, sealed[0]
        units = self._units_of(first, spaces.siblings_of(first.keyspace), of_batch[0])
        parents = first.parents.copy()
        before = np.flatnonzero(parents == PARENT_BEFORE)
        parents[before] = units[before - 1]
        for batch, own in zip(sealed, of_batch, strict=True):
            self._fill(batch, own)
        now = self._clock.monotonic_s()
        self._use(units, now)
        fresh = units == of_batch[0]
        entry = _Entered(of_batch, units, units[fresh], parents[fresh])
        # The last boundary of blocks without ancestors is the first in this order, that of use.
        order = slice(None, None, 1 if first.keyspace.kind == GroupKind.FULL else -1)
        if not fresh.all():
            self._policy.touch(units[~fresh & columns.in_ram[units]][order], hints, now)
            parents = np.where(fresh, parents, columns.parent[units])
        entering = ~columns.in_ram[units]
        self._enter_ram(units[entering][order], parents[entering][order], hints)
        undo.callback(self._leave_policy, units[entering])
        return entry

    def _enter_ram(self, units: I64, parents: I64, hints: Hints) -> None:
        """Tells the policy of units in chain order; it knows of no parent that is not in ram."""
        columns = self.columns
        columns.in_ram[units] = True
        linked = (parents >= 0) & columns.in_ram[parents]
        now = self._clock.monotonic_s()
        try:
            self._policy.insert(units, np.where(linked, parents, NO_PARENT), 0, hints, now)
        except BaseException:
            columns.in_ram[units] = False
            raise
        pinned = units[columns.pins[units] > 0]
        if len(pinned):
            self._policy.pin(pinned)

    def _leave_policy(self, units: I64) -> None:
        units = units[self.columns.in_ram[units]]
        self.foresight.leave(units)
        self._policy.unpin(units[self.columns.pins[units] > 0])
        self._policy.remove(units)
        self.columns.in_ram[units] = False

    def _units_of(self, batch: Sealed, siblings: Sequence[Keyspace], ids: I64) -> I64:
        """The unit that each block joins; a block without resident siblings begins its own."""
        units = ids.copy()
        if len(siblings) > 1:
            alone = np.ones(len(ids), bool)
            for keyspace in siblings:
                if keyspace.index != batch.keyspace.index and alone.any():
                    others = self.find(keyspace, batch.keys)
                    joins = alone & (others >= 0)
                    units[joins] = self.columns.unit_of(others[joins])
                    alone &= ~joins
        return units

    def _fill(self, batch: Sealed, ids: I64) -> None:
        columns = self.columns
        columns.keyspace[ids] = batch.keyspace.index
        columns.key_words[ids] = 0
        columns.key_words[ids, : batch.keys.words.shape[1]] = batch.keys.words
        columns.checksum[ids] = batch.slots.checksums

    def _show(self, sealed: Sequence[Sealed], ids: I64) -> I64:
        """Rows of all blocks, batch after batch: clients see them from here on."""
        marks = [self._marks_now(batch) for batch in sealed]
        return self.table.insert(
            _joined([mark.tags for mark in marks]),
            _joined([mark.checks for mark in marks]),
            _joined([batch.slots.addresses for batch in sealed]),
            ids.astype(np.int32),
        )

    def _marks_now(self, batch: Sealed) -> Marks:
        if batch.marks.table is self.table:
            return batch.marks
        return Marks(self.table, *self.fingerprints(batch.keyspace, batch.keys))

    def _use(self, units: I64, now: float) -> None:
        self.columns.set_last_used(units, now)
        self.columns.reused[units] = True


def _joined(parts: list[U64]) -> U64:
    return np.concatenate(parts) if len(parts) > 1 else parts[0]
