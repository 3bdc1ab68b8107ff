"""What there is of one chain of keys, in all groups and ranks; which prefixes are usable."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.tiering.boundaries import usable
from kvkeep_server.tiering.columns import BlockColumns
from kvkeep_server.tiering.finding import BlockFinder
from kvkeep_server.tiering.keyspaces import BoundaryGroup, Keyspace, KeyspaceSet

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Needed:
    """Blocks of one keyspace that a prefix needs.

    Attributes:
        keyspace: Theirs.
        ids: Of the blocks.
        positions: Of their keys, ascending; None = every key from `start` on.
        start: Position of the first key that counts.
    """

    keyspace: Keyspace
    ids: I64
    positions: I64 | None = None
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Their payload."""
        return len(self.ids) * self.keyspace.block_nbytes

    def cut(self, start: int, stop: int) -> "Needed":
        """Only those of the keys from `start` to `stop`."""
        if self.positions is None:
            ids = self.ids[start - self.start : stop - self.start]
            return Needed(self.keyspace, ids, None, start)
        low, high = np.searchsorted(self.positions, (start, stop))
        return Needed(self.keyspace, self.ids[low:high], self.positions[low:high], start)

    def at(self) -> I64:
        """Positions of the keys, ascending."""
        if self.positions is None:
            return np.arange(self.start, self.start + len(self.ids))
        return self.positions


class _GroupFound:
    """A boundary group's blocks of a chain: ids of each rank, -1 where one is absent."""

    def __init__(self, group: BoundaryGroup, ids: Sequence[I64]) -> None:
        """See the class."""
        self.group = group
        self.ids = ids
        there = ids[0] >= 0
        for of_rank in ids[1:]:
            there = there & (of_rank >= 0)
        self.present = there.tobytes()
        self.judged = group.rule, group.rule.split(self.present)

    def needed(self, boundary: int) -> I64:
        """Positions, ascending; none where a prefix without them can be replayed."""
        rule = self.group.rule
        if not self.group.shortens:
            boundary = rule.largest(self.judged[1], boundary)
        return np.array(rule.needed(boundary)[::-1], np.int64)

    def only(self, keep: Sequence[Mask]) -> "_GroupFound":
        """Less what is not kept."""
        ids = [np.where(kept, own, -1) for own, kept in zip(self.ids, keep, strict=True)]
        return _GroupFound(self.group, ids)


class Chain:
    """Ids of the blocks of a chain's leading keys, as they are now.

    Attributes:
        full: Leading keys that are there in every FULL group and rank.
        blocks: Leading keys of the longest usable prefix.
    """

    def __init__(
        self, spaces: KeyspaceSet, ids: Sequence[I64], groups: Sequence[_GroupFound]
    ) -> None:
        """`ids` of every FULL keyspace, equally long; `groups` are as long or longer."""
        self._spaces = spaces
        self._ids = ids
        self._groups = groups
        self.full = len(ids[0]) if ids else len(groups[0].present)
        self.blocks = self.usable(self.full)

    @classmethod
    def of(cls, finder: BlockFinder, spaces: KeyspaceSet, keys: KeyBatch) -> "Chain":
        """What there is of these keys."""
        ids = finder.prefix(spaces.local, keys)
        if not spaces.groups:
            return cls(spaces, ids, ())
        if ids:
            keys = keys.slice(0, len(ids[0]))
        groups = [
            _GroupFound(group, [finder.find_placed(space, keys) for space in group.local])
            for group in spaces.groups
        ]
        return cls(spaces, ids, groups)

    def in_ram(self, columns: BlockColumns) -> "Chain":
        """What of it lies in ram."""
        ids = self._ids
        if ids:
            there = _in_ram(columns, ids)
            full = len(there) if there.all() else int(there.argmin())
            ids = [own[:full] for own in ids]
        groups = [
            group.only([(own >= 0) & (columns.address_of(own) != 0) for own in group.ids])
            for group in self._groups
        ]
        return Chain(self._spaces, ids, groups)

    def usable(self, limit: int) -> int:
        """The longest usable prefix of at most `limit` keys; `limit` is at most `full`."""
        if not self._groups:
            return limit
        return usable([found.judged for found in self._groups if found.group.shortens], limit)

    @property
    def replayed(self) -> int:
        """Keys that `blocks` has only with a replay."""
        if not self._groups:
            return 0
        return self.blocks - usable([found.judged for found in self._groups], self.blocks)

    def of_group(self, group: int) -> int:
        """The longest prefix of `full` keys that this group alone allows."""
        for found in self._groups:
            if found.group.group == group:
                return found.group.rule.largest(found.judged[1], self.full)
        return self.full

    def missing(self) -> tuple[Sequence[Keyspace], int]:
        """Why the usable prefix ends before the keys do: keyspaces to ask, and the position of the
        key that one of them lacks."""
        if self.full == self.blocks:
            return self._spaces.local, self.full
        for found in self._groups:
            if found.group.shortens and self.of_group(found.group.group) < self.full:
                needed = found.group.rule.needed(self.full)
                lacking = next(at for at in needed if not found.present[at])
                return found.group.local, lacking
        # Each group alone allows it, all together do not.
        return [space for group in self._spaces.groups for space in group.local], self.blocks

    def needed(self, boundary: int) -> list[Needed]:
        """The blocks that a prefix of so many keys needs, an entry a keyspace."""
        needed = [
            Needed(space, ids[:boundary])
            for space, ids in zip(self._spaces.local, self._ids, strict=True)
        ]
        for found in self._groups:
            positions = found.needed(boundary)
            needed += [
                Needed(space, ids[positions], positions)
                for space, ids in zip(found.group.local, found.ids, strict=True)
            ]
        return needed

    def keys_in_ram(self, columns: BlockColumns, boundary: int) -> Mask:
        """Of which keys all blocks that a prefix of so many needs are in ram; shape (boundary,)."""
        if not self._groups:
            return _in_ram(columns, self._ids)[:boundary]
        there = np.ones(boundary, bool)
        for needed in self.needed(boundary):
            in_ram = columns.address_of(needed.ids) != 0
            if needed.positions is None:
                there &= in_ram
            else:
                there[needed.positions] &= in_ram
        return there

    def units(self, finder: BlockFinder, span: range) -> tuple[I64, list[I64]]:
        """The units that the prefix up to the end of `span` needs, less those of the chain in front
        of it: of the chain, root to tail; and of each boundary group, the last boundary first."""
        chain = np.empty(0, np.int64)
        if self._ids:
            chain = finder.units_of(self._ids[0][span.start : span.stop])
        others = [
            finder.units_of(found.ids[0][found.needed(span.stop)[::-1]]) for found in self._groups
        ]
        return chain, others

    def key_nbytes(self) -> int:
        """Payload of one key of the FULL groups, all ranks."""
        return sum(space.block_nbytes for space in self._spaces.local)


def at_boundary(finder: BlockFinder, spaces: KeyspaceSet, chain: I64) -> list[I64]:
    """The units that a prefix needs of each WINDOW and STATE group, the last boundary first, when
    the units of its FULL groups are `chain`, root to tail; fewer where `chain` is cut short."""
    others = []
    for group in spaces.groups if len(chain) else ():
        needed = group.rule.needed(len(chain))
        ids = finder.find_placed(group.local[0], finder.named(chain[list(needed)]).keys)
        others.append(finder.units_of(ids[ids >= 0]))
    return others


def _in_ram(columns: BlockColumns, ids: Sequence[I64]) -> Mask:
    """Which keys have all of their blocks in ram."""
    there: Mask = columns.address_of(ids[0]) != 0
    for own in ids[1:]:
        there &= columns.address_of(own) != 0
    return there
