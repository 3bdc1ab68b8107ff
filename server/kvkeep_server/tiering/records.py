"""The owner of nvme's records: tells which are wanted, and notes what moved and what was lost."""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import MissReason
from kvkeep_server.policies.reinsertion import ReinsertionPolicy
from kvkeep_server.tiering.keyspaces import Keyspace
from kvkeep_server.tiering.lineage import children_on_nvme, closed_part
from kvkeep_server.tiering.residency import Residency
from kvkeep_server.tiers.record import Rows, is_tombstone

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Mask = NDArray[np.bool_]
_NUMBER_SHIFT = np.uint64(32)
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Unsettled(Protocol):
    """Records that recovery read and has not put into the index yet."""

    def moved(self, old: U64, locations: U64, stamps: U64) -> None:
        """They lie elsewhere now."""

    def gone(self, locations: U64) -> None:
        """They are no more."""

    def segment_lost(self, number: int) -> None:
        """All of this segment are no more."""


class Records:
    """Implements `tiers.nvme.directory.RecordOwner`. Event loop only.

    Args:
        residency: Where blocks are.
        policy: Which of the records that nobody needs are worth another writing.
        keyspace_of: (namespace id, group) -> keyspace, None = unknown.

    Attributes:
        unsettled: As long as recovery goes on.
    """

    def __init__(
        self,
        *,
        residency: Residency,
        policy: ReinsertionPolicy,
        keyspace_of: Callable[[bytes, int], Keyspace | None],
    ) -> None:
        """See the class."""
        self._residency = residency
        self._policy = policy
        self._keyspace_of = keyspace_of
        self._decided = -1
        self.unsettled: Unsettled | None = None

    # --- RecordOwner

    def wanted(self, rows: Rows) -> Mask:
        """See `RecordOwner`. What others descend from is wanted always, else they were lost with
        it; of the rest the policy takes its share. A record whose unit is not whole on nvme is
        forgotten, and written anew with the others."""
        if self.unsettled is not None:
            return np.ones(len(rows), np.bool_)
        number = int(rows["location"][0]) >> 32
        if number != self._decided:
            self._decide(number)
        columns, blocks = self._residency.columns, self._current(rows)
        wanted: Mask = columns.recorded(columns.unit_of(blocks)) & (blocks >= 0)
        left = blocks[(blocks >= 0) & ~wanted]
        if len(left):
            self._residency.forget(left, MissReason.EVICTED)
        return wanted

    def _decide(self, number: int) -> None:
        """Forgets the records of a segment that are not worth another writing, all at once: in
        parts, the head of a chain would be kept for its tail, which then goes."""
        self._decided = number
        columns = self._residency.columns
        units = np.unique(columns.unit_of(self._of_segment(number)))
        units = units[columns.recorded(units)]
        last_used_s = columns.last_used_s(units)
        chosen = self._policy.choose(columns.reused[units], last_used_s)
        chosen |= self._residency.kept(units)
        leaving = self._closed(units[~chosen])
        self._residency.forget(columns.blocks_of(leaving), MissReason.EVICTED)

    def _closed(self, units: I64) -> I64:
        """Those without which all others can still be found: on nvme, and in ram. A unit that ram
        has is found there, so what descends from it in ram only does not need its record."""
        columns = self._residency.columns
        children = columns.children[units].astype(np.int64)
        spare = (children > 0) & columns.wholly_in_ram(units)
        if spare.any():
            children[spare] = children_on_nvme(columns, units[spare])
        return closed_part(columns, units, children)

    def _of_segment(self, number: int) -> I64:
        columns = self._residency.columns
        there = (columns.nvme >> _NUMBER_SHIFT == np.uint64(number)) & (columns.row >= 0)
        return np.flatnonzero(there)

    def note(self, blocks: I64, locations: U64, stamps: U64) -> None:
        """Records of these blocks are on the medium."""
        self._residency.record(blocks, locations, stamps)

    def moved(self, rows: Rows, locations: U64, stamps: U64) -> None:
        """See `RecordOwner`."""
        blocks = self._current(rows)
        there = blocks >= 0
        self.note(blocks[there], locations[there], stamps[there])
        if self.unsettled is not None:
            self.unsettled.moved(rows["location"][~there], locations[~there], stamps[~there])

    def dropped(self, locations: U64, stamps: U64, reason: MissReason) -> None:
        """See `RecordOwner`. Rare, so it may look at every block."""
        columns = self._residency.columns
        found = np.flatnonzero(np.isin(columns.nvme, locations) & (columns.row >= 0))
        same = np.isin(columns.stamp_of(found), stamps)
        self._residency.forget(found[same], reason)
        if self.unsettled is not None:
            self.unsettled.gone(locations)

    def segment_lost(self, number: int) -> None:
        """See `RecordOwner`. Rare, so it may look at every block."""
        self._residency.forget(self._of_segment(number), MissReason.CORRUPT)
        if self.unsettled is not None:
            self.unsettled.segment_lost(number)

    # --- inside

    def _current(self, rows: Rows) -> I64:
        """The block whose record each is, -1 where it is not the last word on its key."""
        blocks = np.full(len(rows), -1, np.int64)
        for keyspace, places in by_keyspace(rows, lambda *name: self._keyspace_of(*name[:2])):
            words = np.ascontiguousarray(rows["key"][places][:, : -(-keyspace.key_nbytes // 8)])
            blocks[places] = self._residency.find(keyspace, KeyBatch(words, keyspace.key_nbytes))
        columns = self._residency.columns
        same = (columns.nvme[blocks] == rows["location"]) & ~is_tombstone(rows)
        same &= columns.stamp_of(blocks) == rows["record_seq"]
        return np.where(same & (blocks >= 0), blocks, -1)


def by_keyspace(
    rows: Rows, keyspace_of: Callable[[bytes, int, int], Keyspace | None]
) -> Iterator[tuple[Keyspace, I64]]:
    """The keyspaces of records, and the positions of those of each.

    Args:
        rows: Of any.
        keyspace_of: (namespace id, group, first position) -> keyspace, None = of no use.
    """
    if not len(rows):
        return
    names, group = rows["namespace_id"], rows["group"].astype(np.uint64)
    # One word a row sorts ten times as fast as three; ids are digests, so words of two differ.
    mixed = (names[:, 0] * _MIX + names[:, 1]) * _MIX + group
    if (mixed == mixed[0]).all():
        firsts, which = np.zeros(1, np.int64), np.zeros(len(rows), np.int64)
    else:
        _, firsts, which = np.unique(mixed, return_index=True, return_inverse=True)
    for number, first in enumerate(firsts.tolist()):
        keyspace = keyspace_of(names[first].tobytes(), int(group[first]), first)
        if keyspace is not None:
            places = np.flatnonzero(which == number)
            same = rows["key_nbytes"][places] == keyspace.key_nbytes
            same &= (names[places] == names[first]).all(axis=1) & (group[places] == group[first])
            yield keyspace, places[same]
