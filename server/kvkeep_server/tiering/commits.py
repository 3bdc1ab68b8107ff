"""Sealing blocks: find what is new, reserve, copy, checksum, make visible. One `Commit` of one rank
at a time is one batch.

Steps and what each may refuse, per block:

1. meet:    a block that another commit is storing is waited for;
2. sort:    what is there already, what collides, what has no parent;
3. admit:   the admission policy;
4. reserve: slots of the ram tier, by growth, then eviction; no room refuses the tail of the chain;
5. copy:    in threads, from staging to the slots, checksum of the copy;
6. publish: generations even, rows into the index, all groups of the batch together.

Until 6 nothing is visible, and leaving early (an error, a failed copy) gives the slots back.
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.hints import Hints
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import CommitStatus
from kvkeep_server.index.table import TableFullError
from kvkeep_server.policies.admission import AdmissionPolicy
from kvkeep_server.tiering.keyspaces import Keyspace, KeyspaceSet
from kvkeep_server.tiering.residency import PARENT_BEFORE, PARENT_NONE, Residency, Sealed
from kvkeep_server.tiering.room import RoomMaker
from kvkeep_server.tiering.transfers import CopyIn, Transfers
from kvkeep_server.tiers.ram.tier import Reservation

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]


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
    """

    spaces: KeyspaceSet
    parent_key: KeyBatch
    keys: KeyBatch
    groups: Sequence[StagedGroup]
    staging: memoryview
    hints: Hints


@dataclass(slots=True)
class CommitCounts:
    """Commits and their blocks since the start."""

    commits: int = 0
    stored: int = 0
    already_stored: int = 0
    refused: int = 0
    failed: int = 0
    stored_nbytes: int = 0


@dataclass(slots=True)
class _Plan:
    """One commit on its way.

    Attributes:
        batch: What it is asked.
        status: A `CommitStatus` for each key; UNSPECIFIED for those to do.
        todo: Positions that are still to be stored.
        parents: Of each of them: a unit, PARENT_BEFORE or PARENT_NONE.
        first: Position at which each key comes first; its own, in every sane chain.
    """

    batch: CommitBatch
    status: U8
    todo: I64
    parents: I64
    first: I64

    def settle_repetitions(self) -> None:
        """A key that came before in the batch is there if that one is."""
        repeated = np.flatnonzero(self.first != np.arange(len(self.first)))
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
        now: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        residency: Residency,
        room: RoomMaker,
        transfers: Transfers,
        admission: AdmissionPolicy,
    ) -> None:
        """See the class."""
        self._residency = residency
        self._room = room
        self._transfers = transfers
        self._admission = admission
        self._in_flight: dict[tuple[int, bytes], asyncio.Future[None]] = {}
        self.counts = CommitCounts()

    @property
    def in_flight(self) -> int:
        """Blocks that are being stored now."""
        return len(self._in_flight)

    async def run(self, batch: CommitBatch) -> U8:
        """Stores the batch; returns one `CommitStatus` a key."""
        await self._meet(batch)
        plan = self._sort(batch)
        self._admit(plan)
        with ExitStack() as held:
            self._hold_ancestors(plan, held)
            if len(plan.todo):
                self._announce(plan, held)
                await self._store(plan, held)
        plan.settle_repetitions()
        self._count(plan)
        return plan.status

    # --- 1 meet

    async def _meet(self, batch: CommitBatch) -> None:
        """Waits until no other commit stores one of these blocks or the parent of the first."""
        while self._in_flight:
            names = _names(batch.groups, batch.keys) + _names(batch.groups, batch.parent_key)
            running = [self._in_flight[name] for name in names if name in self._in_flight]
            if not running:
                return
            await asyncio.wait(running)

    def _announce(self, plan: _Plan, held: ExitStack) -> None:
        """Lets others wait for what this commit is about to store, until it is done."""
        done = asyncio.get_running_loop().create_future()
        names = _names(plan.batch.groups, plan.batch.keys.select(plan.todo))
        for name in names:
            self._in_flight[name] = done

        def over() -> None:
            for name in names:
                del self._in_flight[name]
            done.set_result(None)

        held.callback(over)

    # --- 2 sort, 3 admit

    def _sort(self, batch: CommitBatch) -> _Plan:
        """Splits the keys into those to store and those with an answer already."""
        count = len(batch.keys)
        there = np.ones(count, bool)
        collides = np.zeros(count, bool)
        first = np.arange(count)
        for group in batch.groups:
            ids, tags, _, collided = self._residency.find_or_collide(group.keyspace, batch.keys)
            there &= ids >= 0
            collides |= collided
            first, clashes = _first_places(batch.keys, tags)
            collides |= clashes
        status = np.where(there, CommitStatus.ALREADY_STORED, CommitStatus.UNSPECIFIED).astype(
            np.uint8
        )
        todo = np.flatnonzero(~there & (first == np.arange(count)))
        plan = _Plan(batch, status, todo, self._parents(batch, todo), first)
        refused = np.flatnonzero(collides[todo])
        if len(refused):
            plan.refuse_from(int(refused[0]), CommitStatus.REFUSED_COLLISION)
        orphans = np.flatnonzero(plan.parents == _PARENT_MISSING)
        if len(orphans):
            plan.refuse_from(int(orphans[0]), CommitStatus.REFUSED_ORPHAN)
        return plan

    def _parents(self, batch: CommitBatch, todo: I64) -> I64:
        """Of each position to do: a unit, PARENT_BEFORE, PARENT_NONE, or _PARENT_MISSING."""
        parents = np.full(len(todo), PARENT_BEFORE, np.int64)
        previous = np.empty(len(todo), np.int64)
        previous[:1] = -2
        previous[1:] = todo[:-1]
        keyspace = batch.groups[0].keyspace
        for i in np.flatnonzero(previous != todo - 1):
            at = int(todo[i])
            if at == 0 and not len(batch.parent_key):
                parents[i] = PARENT_NONE
                continue
            key = batch.keys.slice(at - 1, at) if at else batch.parent_key
            ids = self._residency.find(keyspace, key)
            parents[i] = self._residency.columns.unit[ids[0]] if ids[0] >= 0 else _PARENT_MISSING
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
        parents = np.unique(plan.parents[plan.parents >= 0])
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
            self._publish(plan, reserved, checksums)
        except (OSError, TableFullError):
            plan.status[plan.todo] = CommitStatus.FAILED

    def _publish(
        self, plan: _Plan, reserved: Sequence[Reservation], checksums: Sequence[NDArray[np.uint64]]
    ) -> None:
        keys = plan.batch.keys.select(plan.todo)
        with ExitStack() as undo:
            sealed = []
            for group, slots, sums in zip(plan.batch.groups, reserved, checksums, strict=True):
                # A commit ends the reservation, also when it fails: now the slots are ours.
                undo.callback(self._room.give_back, slots.addresses)
                generations = slots.commit()
                sealed.append(
                    Sealed(group.keyspace, keys, plan.parents, slots.addresses, generations, sums)
                )
            self._residency.insert(sealed, plan.batch.spaces, plan.batch.hints)
            undo.pop_all()
        plan.status[plan.todo] = CommitStatus.STORED
        self.counts.stored_nbytes += len(keys) * sum(
            batch.keyspace.block_nbytes for batch in sealed
        )

    def _count(self, plan: _Plan) -> None:
        number = np.bincount(plan.status, minlength=len(CommitStatus))
        self.counts.commits += 1
        self.counts.stored += int(number[CommitStatus.STORED])
        self.counts.already_stored += int(number[CommitStatus.ALREADY_STORED])
        self.counts.failed += int(number[CommitStatus.FAILED])
        self.counts.refused += int(number[CommitStatus.REFUSED_NO_ROOM : CommitStatus.FAILED].sum())


_PARENT_MISSING = -3


def _first_places(keys: KeyBatch, tags: NDArray[np.uint64]) -> tuple[I64, NDArray[np.bool_]]:
    """The position at which each key comes first in the batch, and where another key before it has
    the same tag."""
    own = np.arange(len(tags))
    ordered = np.sort(tags)
    if not (ordered[1:] == ordered[:-1]).any():
        return own, np.zeros(len(tags), bool)
    _, first, group = np.unique(tags, return_index=True, return_inverse=True)
    clashes = (keys.words != keys.words[first[group]]).any(axis=1)
    return np.where(clashes, own, first[group]), clashes


def _names(groups: Sequence[StagedGroup], keys: KeyBatch) -> list[tuple[int, bytes]]:
    """(keyspace, key) of every block, for the table of commits in flight."""
    packed, nbytes = keys.pack(), keys.key_nbytes
    single = [packed[i * nbytes : (i + 1) * nbytes] for i in range(len(keys))]
    return [(group.keyspace.index, key) for group in groups for key in single]


def _copy_job(plan: _Plan, group: StagedGroup, slots: Reservation) -> CopyIn:
    packed, nbytes = plan.batch.keys.select(plan.todo).pack(), plan.batch.keys.key_nbytes
    return CopyIn(
        keyspace=group.keyspace,
        keys=[packed[i * nbytes : (i + 1) * nbytes] for i in range(len(plan.todo))],
        source=plan.batch.staging,
        offsets=group.offsets[plan.todo].tolist(),
        targets=slots.buffers,
    )
