"""What one commit has to do: which of its blocks are new, and behind which parents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.hints import Hints
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import CommitStatus, GroupKind
from kvkeep_server.tiering.finding import BlockFinder
from kvkeep_server.tiering.keyspaces import Keyspace, KeyspaceSet
from kvkeep_server.tiering.sealed import PARENT_BEFORE, PARENT_NONE, Marks

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Mask = NDArray[np.bool_]
_UNSPECIFIED = np.uint8(CommitStatus.UNSPECIFIED)
_ALREADY_STORED = np.uint8(CommitStatus.ALREADY_STORED)
_PARENT_MISSING = -3


@dataclass(frozen=True, slots=True)
class StagedGroup:
    """Blocks of one group in staging.

    Attributes:
        keyspace: Of the rank and group.
        offsets: Byte offset of each block in the session's staging memory.
        positions: Of the keys that have a block, ascending; None = every key.
    """

    keyspace: Keyspace
    offsets: I64
    positions: I64 | None = None

    def cut(self, start: int, stop: int) -> "StagedGroup":
        """Only the blocks of the keys from `start` to `stop`, whose positions begin there."""
        if self.positions is None:
            return StagedGroup(self.keyspace, self.offsets[start:stop])
        low, high = np.searchsorted(self.positions, (start, stop))
        return StagedGroup(self.keyspace, self.offsets[low:high], self.positions[low:high] - start)

    @property
    def chained(self) -> bool:
        """Whether its blocks have parents."""
        return self.keyspace.kind == GroupKind.FULL


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """What one `Commit` asks for, checked.

    Attributes:
        spaces: The namespace set.
        parent_key: One key or none.
        keys: In chain order.
        groups: FULL groups first: all of them or none, with blocks for the same keys.
        staging: The session's whole staging memory.
        hints: For the policies.
        nvme_wait_s: How long to wait until the blocks are on nvme; None = not at all.
    """

    spaces: KeyspaceSet
    parent_key: KeyBatch
    keys: KeyBatch
    groups: Sequence[StagedGroup]
    staging: memoryview
    hints: Hints
    nvme_wait_s: float | None = None

    def cut(self, keys: int) -> "Iterator[CommitBatch]":
        """The same in parts of at most so many keys, each behind the one before; one that is
        refused takes the next ones with it."""
        for start in range(0, max(1, len(self.keys)), keys):
            stop = start + keys
            if not start and stop >= len(self.keys):
                yield self
                return
            groups = [group.cut(start, stop) for group in self.groups]
            yield replace(
                self,
                parent_key=self.keys.slice(start - 1, start) if start else self.parent_key,
                keys=self.keys.slice(start, min(stop, len(self.keys))),
                groups=[group for group in groups if len(group.offsets)],
            )


@dataclass(frozen=True, slots=True)
class Offered:
    """One group of a commit.

    Attributes:
        group: What was staged.
        new: For each key of the commit, whether it has a block here that is not stored yet.
        marks: Fingerprints, one a staged block.
    """

    group: StagedGroup
    new: Mask
    marks: Marks

    def blocks(self, positions: I64) -> I64:
        """Which of the staged blocks those of these keys are, of which each has one."""
        staged = self.group.positions
        return positions if staged is None else np.searchsorted(staged, positions)


@dataclass(slots=True)
class Plan:
    """One commit on its way.

    Attributes:
        batch: What it is asked.
        offered: Its groups.
        status: A `CommitStatus` for each key; UNSPECIFIED for those to do.
        todo: Positions that are still to be stored.
        parents: Of each of them: a unit, PARENT_BEFORE or PARENT_NONE.
        first: Position at which each key comes first; its own, in every sane chain.
        keys: The keys of `todo` when the commit was announced, one by one.
    """

    batch: CommitBatch
    offered: list[Offered]
    status: U8
    todo: I64
    parents: I64
    first: I64
    keys: list[bytes] = field(default_factory=list)

    def keys_at(self, positions: I64) -> KeyBatch:
        """The keys at these positions, ascending."""
        keys = self.batch.keys
        return keys if len(positions) == len(keys) else keys.select(positions)

    def to_store(self, offered: Offered) -> I64:
        """Which of `todo` have a new block in this group."""
        return np.flatnonzero(offered.new[self.todo])

    def nbytes_to_do(self) -> I64:
        """Payload that is to be stored of each of `todo`."""
        nbytes = np.zeros(len(self.todo), np.int64)
        for offered in self.offered:
            nbytes += offered.new[self.todo] * offered.group.keyspace.block_nbytes
        return nbytes

    def settle_repetitions(self) -> None:
        """A key that came before in the batch is there if that one is."""
        own = np.arange(len(self.first))
        if np.array_equal(self.first, own):
            return
        repeated = np.flatnonzero(self.first != own)
        status = self.status[self.first[repeated]]
        status[status == CommitStatus.STORED] = CommitStatus.ALREADY_STORED
        self.status[repeated] = status

    def refuse_from(self, first: int, status: CommitStatus) -> None:
        """Of the positions to do, refuses the one at `first`; those behind it have lost their
        parent."""
        if first < len(self.todo):
            self.status[self.todo[first]] = status
            self.status[self.todo[first + 1 :]] = CommitStatus.REFUSED_ORPHAN
            self.todo = self.todo[:first]
            self.parents = self.parents[:first]


class _Sorting:
    """Finds what a commit has to do."""

    def __init__(self, batch: CommitBatch, finder: BlockFinder) -> None:
        self._batch = batch
        self._finder = finder
        count = len(batch.keys)
        self._own = np.arange(count)
        self._first = self._own
        self._collides = np.zeros(count, bool)
        # Ids of the parent, if one was named, and of the keys, in the first FULL group.
        self._chain = np.full(len(batch.parent_key) + count, -1, np.int64)

    def plan(self) -> Plan:
        batch, asked = self._batch, self._batch.keys
        lead = len(batch.parent_key)
        if lead:
            # Looked up in the same batch: a look-up of one key costs nearly that of 64.
            words = np.concatenate([batch.parent_key.words, batch.keys.words])
            asked = KeyBatch(words, batch.keys.key_nbytes)
        chained = [self._chained(group, asked, lead) for group in batch.groups if group.chained]
        offered = chained + [self._others(group) for group in batch.groups if not group.chained]
        new = np.zeros(len(batch.keys), bool)
        for one in offered:
            new |= one.new
        status = np.where(new, _UNSPECIFIED, _ALREADY_STORED)
        todo = np.flatnonzero(new & (self._first == self._own))
        parents = np.full(len(todo), PARENT_NONE, np.int64)
        if chained:
            linked = np.flatnonzero(chained[0].new[todo])
            parents[linked] = self._parents(todo[linked], lead)
        plan = Plan(batch, offered, status, todo, parents, self._first)
        self._refuse(plan)
        return plan

    def _refuse(self, plan: Plan) -> None:
        refused = np.flatnonzero(self._collides[plan.todo])
        if len(refused):
            plan.refuse_from(int(refused[0]), CommitStatus.REFUSED_COLLISION)
        orphans = np.flatnonzero(plan.parents == _PARENT_MISSING)
        if len(orphans):
            plan.refuse_from(int(orphans[0]), CommitStatus.REFUSED_ORPHAN)

    def _chained(self, group: StagedGroup, asked: KeyBatch, lead: int) -> Offered:
        """A FULL group: its keys are found also where it offers no block, for their children."""
        ids, tags, checks, collided = self._finder.find_or_collide(group.keyspace, asked)
        if self._chain.max(initial=-1) < 0:
            self._chain = ids
        if collided is not None:
            self._collides |= collided[lead:]
        marks = Marks(self._finder.table, tags[lead:], checks[lead:])
        repeated = _repeated(self._batch.keys, marks)
        if repeated is not None:
            self._first, clashes = repeated
            self._collides |= clashes
        new = ids[lead:] < 0
        if group.positions is None:
            return Offered(group, new, marks)
        offers = np.zeros(len(new), bool)
        offers[group.positions] = True
        return Offered(group, new & offers, marks.select(group.positions))

    def _others(self, group: StagedGroup) -> Offered:
        """A WINDOW or STATE group: nothing but what it offers counts."""
        positions = self._own if group.positions is None else group.positions
        keys = self._batch.keys.select(positions)
        ids, tags, checks, collided = self._finder.find_or_collide(group.keyspace, keys)
        marks, absent = Marks(self._finder.table, tags, checks), ids < 0
        if collided is not None:
            self._collides[positions] |= collided
        repeated = _repeated(keys, marks)
        if repeated is not None:
            first, clashes = repeated
            self._collides[positions] |= clashes
            again = first != np.arange(len(keys))
            absent &= ~again
            if self._first is self._own:
                self._first = self._own.copy()
            self._first[positions[again]] = positions[first[again]]
        new = np.zeros(len(self._own), bool)
        new[positions] = absent
        return Offered(group, new, marks)

    def _parents(self, todo: I64, lead: int) -> I64:
        """Of each of these positions: a unit, PARENT_BEFORE, PARENT_NONE, or _PARENT_MISSING.

        Args:
            todo: Positions of keys whose FULL blocks are new.
            lead: 1 if a parent was named, else 0.
        """
        parents = np.full(len(todo), PARENT_BEFORE, np.int64)
        # Where the position before is not to do: the first one always, others after a gap.
        starts = [0, *(np.flatnonzero(todo[1:] != todo[:-1] + 1) + 1).tolist()]
        for i in starts if len(todo) else ():
            before = int(todo[i]) + lead - 1
            if before < 0:
                parents[i] = PARENT_NONE
            elif self._chain[before] >= 0:
                parents[i] = self._finder.unit(int(self._chain[before]))
            else:
                parents[i] = _PARENT_MISSING
        return parents


def plan_of(batch: CommitBatch, finder: BlockFinder) -> Plan:
    """Splits the keys into those to store and those with an answer already."""
    return _Sorting(batch, finder).plan()


def _repeated(keys: KeyBatch, marks: Marks) -> tuple[I64, Mask] | None:
    """The position at which each key comes first, and where another key before it has the same tag;
    None = no tag comes twice."""
    ordered = np.sort(marks.tags)
    if not (ordered[1:] == ordered[:-1]).any():
        return None
    _, first, group = np.unique(marks.tags, return_index=True, return_inverse=True)
    differs: Mask = (keys.words != keys.words[first[group]]).any(axis=1)
    return np.where(differs, np.arange(len(keys)), first[group]), differs
