"""Sealing blocks: find what is new, reserve, copy, checksum, make visible. One `Commit` of one rank
at a time is one batch.

Steps and what each may refuse, per block:

1. meet:    a block that another commit is storing is waited for;
2. sort:    what is there already, what collides, what has no parent;
3. admit:   the admission policy;
4. reserve: slots of the ram tier, by growth, then eviction; no room refuses the tail of the chain;
5. copy:    in threads, from staging to the slots, checksum of the copy;
6. publish: generations even, rows into the index, all groups of the batch together;
7. demote:  queued for nvme; who asked for that level waits for it, but not for longer than he said.

Until 6 nothing is visible, and leaving early (an error, a failed copy) gives the slots back.
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.hints import Hints
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import CommitStatus
from kvkeep_server.index.table import TableFullError
from kvkeep_server.policies.admission import AdmissionPolicy
from kvkeep_server.tiering.demotion import Demotion
from kvkeep_server.tiering.keyspaces import Keyspace, KeyspaceSet
from kvkeep_server.tiering.residency import Residency
from kvkeep_server.tiering.room import RoomMaker
from kvkeep_server.tiering.sealed import PARENT_BEFORE, PARENT_NONE, Marks, Sealed, Slots
from kvkeep_server.tiering.transfers import CopyIn, Transfers
from kvkeep_server.tiers.ram.tier import Reservation

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Found = tuple[I64, NDArray[np.uint64], NDArray[np.uint64], NDArray[np.bool_] | None]
_UNSPECIFIED = np.uint8(CommitStatus.UNSPECIFIED)
_ALREADY_STORED = np.uint8(CommitStatus.ALREADY_STORED)


@dataclass(frozen=True, slots=True)
class StagedGroup:
    """Blocks of one group in staging.

    Attributes:
        keyspace: Of the rank and group.
        offsets: Byte offset of the block of each key in the session's staging memory.
    """

    keyspace: Keyspace
    offsets: I64


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """What one `Commit` asks for, checked.

    Attributes:
        spaces: The namespace set.
        parent_key: One key or none.
        keys: In chain order.
        groups: FULL groups, each with a block for every key.
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


@dataclass(slots=True)
class CommitCounts:
    """Commits since the start, and what became of their blocks.

    Attributes:
        commits: That ended, well or not.
        by_status: Blocks by `CommitStatus`; all blocks that were offered.
        stored_nbytes: Payload bytes that were stored.
    """

    commits: int = 0
    by_status: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(len(CommitStatus), np.int64)
    )
    stored_nbytes: int = 0

    def add(self, status: U8) -> None:
        """One commit with a status for each of its blocks."""
        self.commits += 1
        self.by_status += np.bincount(status, minlength=len(CommitStatus))

    def add_failed(self, blocks: int) -> None:
        """One commit that ended in an error."""
        self.commits += 1
        self.by_status[CommitStatus.FAILED] += blocks

    @property
    def stored(self) -> int:
        """Blocks that are new."""
        return int(self.by_status[CommitStatus.STORED])

    @property
    def already_stored(self) -> int:
        """Blocks that were there."""
        return int(self.by_status[CommitStatus.ALREADY_STORED])

    @property
    def refused(self) -> int:
        """Blocks that were refused, for whatever reason."""
        return int(self.by_status[CommitStatus.REFUSED_NO_ROOM : CommitStatus.FAILED].sum())

    @property
    def failed(self) -> int:
        """Blocks that were lost to an error."""
        return int(self.by_status[CommitStatus.FAILED])


@dataclass(slots=True)
class _Plan:
    """One commit on its way.

    Attributes:
        batch: What it is asked.
        status: A `CommitStatus` for each key; UNSPECIFIED for those to do.
        todo: Positions that are still to be stored.
        parents: Of each of them: a unit, PARENT_BEFORE or PARENT_NONE.
        first: Position at which each key comes first; its own, in every sane chain.
        marks: Fingerprints of all keys, a group each.
        keys: The keys of `todo` when the commit was announced, one by one.
    """

    batch: CommitBatch
    status: U8
    todo: I64
    parents: I64
    first: I64
    marks: list[Marks]
    keys: list[bytes] = field(default_factory=list)

    def keys_to_do(self) -> KeyBatch:
        """The keys of `todo`."""
        keys = self.batch.keys
        return keys if len(self.todo) == len(keys) else keys.select(self.todo)

    def marks_to_do(self, marks: Marks) -> Marks:
        """The fingerprints of `todo`."""
        return marks if len(self.todo) == len(marks.tags) else marks.select(self.todo)

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


class Commits:
    """Event loop only; `run` is a coroutine that must not be cancelled while it copies (shield it).

    Args:
        residency: Made visible in.
        room: Finds slots and index rows.
        transfers: Copy threads.
        admission: May a block enter the ram tier?
        demotion: Takes what is stored to nvme; None = there is none.
    """

    def __init__(
        self,
        *,
        residency: Residency,
        room: RoomMaker,
        transfers: Transfers,
        admission: AdmissionPolicy,
        demotion: Demotion | None = None,
    ) -> None:
        """See the class."""
        self._demotion = demotion
        self._residency = residency
        self._room = room
        self._transfers = transfers
        self._admission = admission
        # By keyspace and key.
        self._in_flight: dict[int, dict[bytes, asyncio.Future[None]]] = {}
        self.counts = CommitCounts()

    @property
    def writes_through(self) -> bool:
        """Whether there is an nvme tier."""
        return self._demotion is not None

    @property
    def in_flight(self) -> int:
        """Blocks that are being stored now."""
        return sum(map(len, self._in_flight.values()))

    async def run(self, batch: CommitBatch) -> U8:
        """Stores the batch; returns one `CommitStatus` a key.

        Raises:
            ResourceExhaustedError: No memory for a larger index.
        """
        try:
            status = await self._run(batch)
        except BaseException:
            self.counts.add_failed(len(batch.keys))
            raise
        self.counts.add(status)
        return status

    async def _run(self, batch: CommitBatch) -> U8:
        await self._meet(batch)
        plan = self._sort(batch)
        self._admit(plan)
        with ExitStack() as held:
            self._hold_ancestors(plan, held)
            if len(plan.todo):
                plan.keys = _single(plan.keys_to_do())
                self._announce(plan, held)
                await self._store(plan, held)
        plan.settle_repetitions()
        if self._demotion is not None:
            await self._demote(self._demotion, plan)
        return plan.status

    # --- 1 meet

    async def _meet(self, batch: CommitBatch) -> None:
        """Waits until no other commit stores one of these blocks or the parent of the first."""
        while self._in_flight:
            keys = [*_single(batch.keys), *_single(batch.parent_key)]
            running = {
                table[key]
                for group in batch.groups
                if (table := self._in_flight.get(group.keyspace.index))
                for key in keys
                if key in table
            }
            if not running:
                return
            await asyncio.wait(running)

    def _announce(self, plan: _Plan, held: ExitStack) -> None:
        """Lets others wait for what this commit is about to store, until it is done."""
        done = asyncio.get_running_loop().create_future()
        spaces = [group.keyspace.index for group in plan.batch.groups]
        for space in spaces:
            self._in_flight.setdefault(space, {}).update(dict.fromkeys(plan.keys, done))

        def over() -> None:
            for space in spaces:
                table = self._in_flight[space]
                for key in plan.keys:
                    del table[key]
                if not table:
                    del self._in_flight[space]
            done.set_result(None)

        held.callback(over)

    # --- 2 sort, 3 admit

    def _sort(self, batch: CommitBatch) -> _Plan:
        """Splits the keys into those to store and those with an answer already."""
        lead = len(batch.parent_key)
        asked = batch.keys
        if lead:
            # Looked up in the same batch: a look-up of one key costs nearly that of 64.
            words = np.concatenate([batch.parent_key.words, batch.keys.words])
            asked = KeyBatch(words, batch.keys.key_nbytes)
        found = [self._residency.find_or_collide(group.keyspace, asked) for group in batch.groups]
        table = self._residency.table
        marks = [Marks(table, tags[lead:], checks[lead:]) for _, tags, checks, _ in found]
        places = _places(batch, marks)
        chain = found[0][0]
        if places is None and all(_is_new(ids, collided, lead) for ids, _, _, collided in found):
            own = np.arange(len(batch.keys))
            status = np.zeros(len(own), np.uint8)
            plan = _Plan(batch, status, own, self._parents(own, chain, lead), own, marks)
        else:
            plan = self._sort_mixed(batch, found, marks, places)
        orphans = np.flatnonzero(plan.parents == _PARENT_MISSING)
        if len(orphans):
            plan.refuse_from(int(orphans[0]), CommitStatus.REFUSED_ORPHAN)
        return plan

    def _sort_mixed(
        self,
        batch: CommitBatch,
        found: Sequence[Found],
        marks: list[Marks],
        places: tuple[I64, NDArray[np.bool_]] | None,
    ) -> _Plan:
        """`_sort` where some keys are there, collide or come twice."""
        count, lead = len(batch.keys), len(batch.parent_key)
        first, collides = places or (np.arange(count), np.zeros(count, bool))
        there = np.ones(count, bool)
        for ids, _, _, collided in found:
            there &= ids[lead:] >= 0
            if collided is not None:
                collides |= collided[lead:]
        status = np.where(there, _ALREADY_STORED, _UNSPECIFIED)
        todo = np.flatnonzero(~there & (first == np.arange(count)))
        parents = self._parents(todo, found[0][0], lead)
        plan = _Plan(batch, status, todo, parents, first, marks)
        refused = np.flatnonzero(collides[todo])
        if len(refused):
            plan.refuse_from(int(refused[0]), CommitStatus.REFUSED_COLLISION)
        return plan

    def _parents(self, todo: I64, chain: I64, lead: int) -> I64:
        """Of each position to do: a unit, PARENT_BEFORE, PARENT_NONE, or _PARENT_MISSING.

        Args:
            todo: Positions of keys.
            chain: Ids of the parent, if one was named, and of the keys; -1 = not resident.
            lead: 1 if a parent was named, else 0.
        """
        parents = np.full(len(todo), PARENT_BEFORE, np.int64)
        # Where the position before is not to do: the first one always, others after a gap.
        starts = [0, *(np.flatnonzero(todo[1:] != todo[:-1] + 1) + 1).tolist()]
        for i in starts if len(todo) else ():
            before = int(todo[i]) + lead - 1
            if before < 0:
                parents[i] = PARENT_NONE
            elif chain[before] >= 0:
                parents[i] = self._residency.columns.unit[chain[before]]
            else:
                parents[i] = _PARENT_MISSING
        return parents

    def _admit(self, plan: _Plan) -> None:
        if len(plan.todo):
            nbytes = sum(group.keyspace.block_nbytes for group in plan.batch.groups)
            verdicts = self._admission.admit(
                self._residency.columns.peek(len(plan.todo)),
                np.full(len(plan.todo), nbytes, np.int64),
                plan.batch.hints,
                self._residency.now_s(),
            )
            refused = np.flatnonzero(~verdicts)
            if len(refused):
                plan.refuse_from(int(refused[0]), CommitStatus.REFUSED_NOT_ADMITTED)

    # --- 4 reserve to 6 publish

    def _hold_ancestors(self, plan: _Plan, held: ExitStack) -> None:
        """Pins the parents, so that making room cannot take them (their own ancestors are safe
        behind them)."""
        parents = plan.parents[plan.parents >= 0]
        if len(parents):
            parents = np.unique(parents)
            self._residency.pin(parents)
            held.callback(self._residency.unpin, parents)

    async def _store(self, plan: _Plan, held: ExitStack) -> None:
        groups = plan.batch.groups
        reserved = await self._room.reserve(
            [group.keyspace.block_nbytes for group in groups], len(plan.todo)
        )
        for slots in reserved:
            held.enter_context(slots)
        plan.refuse_from(len(reserved[0].addresses), CommitStatus.REFUSED_NO_ROOM)
        if not len(plan.todo):
            return
        try:
            checksums = [
                await self._transfers.copy_in(_copy_job(plan, group, slots))
                for group, slots in zip(groups, reserved, strict=True)
            ]
            await self._room.index_rows(len(plan.todo) * len(groups))
            self._refuse_orphans(plan)
            if len(plan.todo):
                self._publish(plan, reserved, checksums)
        except (OSError, TableFullError):
            plan.status[plan.todo] = CommitStatus.FAILED

    def _refuse_orphans(self, plan: _Plan) -> None:
        """A pin keeps a parent from eviction, not from being removed by name."""
        parents = np.maximum(plan.parents, 0)
        gone = (plan.parents >= 0) & (self._residency.columns.row[parents] < 0)
        if gone.any():
            plan.refuse_from(int(gone.argmax()), CommitStatus.REFUSED_ORPHAN)

    def _publish(
        self, plan: _Plan, reserved: Sequence[Reservation], checksums: Sequence[NDArray[np.uint64]]
    ) -> None:
        keys, count = plan.keys_to_do(), len(plan.todo)
        parents, hints = plan.parents, plan.batch.hints
        with ExitStack() as undo:
            sealed = []
            for group, slots, sums, marks in zip(
                plan.batch.groups, reserved, checksums, plan.marks, strict=True
            ):
                # A commit ends the reservation, also when it fails: now the slots are ours.
                addresses = slots.addresses[:count]
                undo.callback(self._room.give_back, addresses)
                generations = slots.commit(np.arange(len(slots.addresses)) < count)
                slot = Slots(addresses, generations, sums[:count])
                sealed.append(Sealed(group.keyspace, keys, parents, slot, plan.marks_to_do(marks)))
            self._residency.insert(sealed, plan.batch.spaces, hints)
            undo.pop_all()
        plan.status[plan.todo] = CommitStatus.STORED
        self.counts.stored_nbytes += len(keys) * sum(
            batch.keyspace.block_nbytes for batch in sealed
        )

    # --- 7 demote

    async def _demote(self, demotion: Demotion, plan: _Plan) -> None:
        wait_s, status = plan.batch.nvme_wait_s, plan.status
        wanted = status == CommitStatus.STORED
        if wait_s is not None:
            wanted |= status == CommitStatus.ALREADY_STORED
        units = self._units(plan, np.flatnonzero(wanted))
        if not len(units):
            return
        done = demotion.offer(units)
        if wait_s is not None:
            await asyncio.wait([done], timeout=wait_s)
            self._fail_what_is_not_on_nvme(plan, np.flatnonzero(wanted))

    def _units(self, plan: _Plan, positions: I64) -> I64:
        """Units of keys that are in the index still."""
        ids = self._residency.find(plan.batch.groups[0].keyspace, plan.batch.keys)[positions]
        return self._residency.units_of(ids[ids >= 0])

    def _fail_what_is_not_on_nvme(self, plan: _Plan, positions: I64) -> None:
        """They are in ram all the same."""
        for group in plan.batch.groups:
            ids = self._residency.find(group.keyspace, plan.batch.keys)[positions]
            failed = (ids < 0) | (self._residency.columns.nvme[ids] == 0)
            plan.status[positions[failed]] = CommitStatus.FAILED


_PARENT_MISSING = -3


def _is_new(ids: I64, collided: NDArray[np.bool_] | None, lead: int) -> bool:
    """Whether none of the keys behind the parent is there or collides."""
    if collided is None:
        return True
    return bool(ids[lead:].max(initial=-1) < 0) and not collided.any()


def _places(batch: CommitBatch, marks: Sequence[Marks]) -> tuple[I64, NDArray[np.bool_]] | None:
    """The position at which each key comes first in the batch, and where another key before it has
    the same tag in any group; None = no tag comes twice."""
    places, clashes = None, np.zeros(len(batch.keys), bool)
    words = batch.keys.words
    for mark in marks:
        ordered = np.sort(mark.tags)
        if (ordered[1:] == ordered[:-1]).any():
            _, first, group = np.unique(mark.tags, return_index=True, return_inverse=True)
            differs = (words != words[first[group]]).any(axis=1)
            clashes |= differs
            if places is None:
                places = np.where(differs, np.arange(len(words)), first[group])
    return None if places is None else (places, clashes)


def _single(keys: KeyBatch) -> list[bytes]:
    """Each key by itself."""
    packed, nbytes = keys.pack(), keys.key_nbytes
    return [packed[at : at + nbytes] for at in range(0, len(packed), nbytes)]


def _copy_job(plan: _Plan, group: StagedGroup, slots: Reservation) -> CopyIn:
    return CopyIn(
        keyspace=group.keyspace,
        keys=plan.keys,
        source=plan.batch.staging,
        offsets=group.offsets[plan.todo].tolist(),
        targets=slots.buffers,
    )
