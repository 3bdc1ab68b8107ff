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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import CommitStatus
from kvkeep_server.index.table import TableFullError
from kvkeep_server.policies.admission import AdmissionPolicy
from kvkeep_server.tiering.commit_plan import CommitBatch, Offered, Plan, StagedGroup, plan_of
from kvkeep_server.tiering.demotion import Demotion
from kvkeep_server.tiering.residency import Residency
from kvkeep_server.tiering.room import Need, RoomMaker
from kvkeep_server.tiering.sealed import PARENT_NONE, Sealed, Slots
from kvkeep_server.tiering.transfers import CopyIn, Transfers
from kvkeep_server.tiers.ram.tier import Reservation

# Of a commit: so many new keys take the event loop a few ms, and others have their turn between.
_KEYS_AT_ONCE = 512

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Mask = NDArray[np.bool_]


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
        good = self.stored + self.already_stored
        return int(self.by_status.sum()) - good - self.failed

    @property
    def failed(self) -> int:
        """Blocks that were lost to an error."""
        return int(self.by_status[CommitStatus.FAILED])


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
        until_s = asyncio.get_running_loop().time() + (batch.nvme_wait_s or 0.0)
        parts = [np.empty(0, np.uint8)]
        try:
            for part in batch.cut(_KEYS_AT_ONCE):
                if len(parts) > 1:
                    await asyncio.sleep(0)
                left_s = max(0.0, until_s - asyncio.get_running_loop().time())
                wait_s = None if batch.nvme_wait_s is None else left_s
                parts.append(await self._run(replace(part, nvme_wait_s=wait_s)))
        except BaseException:
            self.counts.add_failed(len(batch.keys))
            raise
        status = np.concatenate(parts)
        self.counts.add(status)
        return status

    async def refuse(self, batch: CommitBatch, status: CommitStatus) -> U8:
        """Stores nothing of the batch, for this reason; as `run`."""
        refused = np.full(len(batch.keys), status, np.uint8)
        self.counts.add(refused)
        return refused

    async def _run(self, batch: CommitBatch) -> U8:
        await self._meet(batch)
        plan = plan_of(batch, self._residency)
        self._admit(plan)
        with ExitStack() as held:
            self._hold_ancestors(plan, held)
            if len(plan.todo):
                plan.keys = _single(plan.keys_at(plan.todo))
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

    def _announce(self, plan: Plan, held: ExitStack) -> None:
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

    # --- 3 admit

    def _admit(self, plan: Plan) -> None:
        if len(plan.todo):
            verdicts = self._admission.admit(
                self._residency.columns.peek(len(plan.todo)),
                plan.nbytes_to_do(),
                plan.batch.hints,
                self._residency.now_s(),
            )
            refused = np.flatnonzero(~verdicts)
            if len(refused):
                plan.refuse_from(int(refused[0]), CommitStatus.REFUSED_NOT_ADMITTED)

    # --- 4 reserve to 6 publish

    def _hold_ancestors(self, plan: Plan, held: ExitStack) -> None:
        """Pins the parents, so that making room cannot take them (their own ancestors are safe
        behind them)."""
        parents = plan.parents[plan.parents >= 0]
        if len(parents):
            parents = np.unique(parents)
            self._residency.pin(parents)
            held.callback(self._residency.unpin, parents)

    async def _store(self, plan: Plan, held: ExitStack) -> None:
        reserved, fitting = await self._room.reserve(
            [
                Need.of(offered.group.keyspace.block_nbytes, offered.new[plan.todo])
                for offered in plan.offered
            ]
        )
        for slots in reserved:
            held.enter_context(slots)
        plan.refuse_from(fitting, CommitStatus.REFUSED_NO_ROOM)
        if not len(plan.todo):
            return
        try:
            checksums = [
                await self._transfers.copy_in(_copy_job(plan, offered, slots))
                for offered, slots in zip(plan.offered, reserved, strict=True)
            ]
            await self._room.index_rows(sum(map(len, checksums)))
            self._refuse_orphans(plan)
            if len(plan.todo):
                self._publish(plan, reserved, checksums)
        except (OSError, TableFullError):
            plan.status[plan.todo] = CommitStatus.FAILED

    def _refuse_orphans(self, plan: Plan) -> None:
        """A pin keeps a parent from eviction, not from being removed by name."""
        parents = np.maximum(plan.parents, 0)
        gone = (plan.parents >= 0) & (self._residency.columns.row[parents] < 0)
        if gone.any():
            plan.refuse_from(int(gone.argmax()), CommitStatus.REFUSED_ORPHAN)

    def _publish(
        self, plan: Plan, reserved: Sequence[Reservation], checksums: Sequence[NDArray[np.uint64]]
    ) -> None:
        with ExitStack() as undo:
            sealed = []
            for offered, slots, sums in zip(plan.offered, reserved, checksums, strict=True):
                own = plan.to_store(offered)
                # A commit ends the reservation, also when it fails: now the slots are ours.
                addresses = slots.addresses[: len(own)]
                undo.callback(self._room.give_back, addresses)
                generations = slots.commit(np.arange(len(slots.addresses)) < len(own))
                if len(own):
                    slot = Slots(addresses, generations, sums[: len(own)])
                    sealed.append(_sealed(plan, offered, own, slot))
            self._residency.insert(sealed, plan.batch.spaces, plan.batch.hints)
            undo.pop_all()
        plan.status[plan.todo] = CommitStatus.STORED
        self.counts.stored_nbytes += sum(
            len(batch.keys) * batch.keyspace.block_nbytes for batch in sealed
        )

    # --- 7 demote

    async def _demote(self, demotion: Demotion, plan: Plan) -> None:
        wait_s, status = plan.batch.nvme_wait_s, plan.status
        wanted = status == CommitStatus.STORED
        if wait_s is not None:
            wanted |= status == CommitStatus.ALREADY_STORED
        units = self._units(plan, wanted)
        if not len(units):
            return
        if wait_s is None:
            demotion.offer(units)
        else:
            await demotion.offer_in_time(units, wait_s)
            self._fail_what_is_not_on_nvme(plan, wanted)

    def _of_nvme(self, plan: Plan, wanted: Mask) -> Iterator[tuple[StagedGroup, I64, I64]]:
        """Of each group that goes to nvme: the positions of the wanted keys that have a block, and
        the ids of those blocks, -1 = not in the index any more."""
        positions = np.flatnonzero(wanted)
        for group in plan.batch.groups:
            if not group.keyspace.ram_only:
                own = positions
                if group.positions is not None:
                    own = group.positions[wanted[group.positions]]
                yield group, own, self._residency.find(group.keyspace, plan.keys_at(own))

    def _units(self, plan: Plan, wanted: Mask) -> I64:
        """Units of keys that are in the index still: of the chain, root to tail, then others."""
        units: dict[bytes, I64] = {}
        for group, _, ids in self._of_nvme(plan, wanted):
            if group.keyspace.boundary_id not in units:
                units[group.keyspace.boundary_id] = self._residency.units_of(ids[ids >= 0])
        return np.concatenate([np.empty(0, np.int64), *units.values()])

    def _fail_what_is_not_on_nvme(self, plan: Plan, wanted: Mask) -> None:
        """They are in ram all the same."""
        for _, own, ids in self._of_nvme(plan, wanted):
            failed = (ids < 0) | (self._residency.columns.nvme[ids] == 0)
            plan.status[own[failed]] = CommitStatus.FAILED


def _single(keys: KeyBatch) -> list[bytes]:
    """Each key by itself."""
    packed, nbytes = keys.pack(), keys.key_nbytes
    return [packed[at : at + nbytes] for at in range(0, len(packed), nbytes)]


def _copy_job(plan: Plan, offered: Offered, slots: Reservation) -> CopyIn:
    own = plan.to_store(offered)
    return CopyIn(
        keyspace=offered.group.keyspace,
        keys=[plan.keys[at] for at in own.tolist()],
        source=plan.batch.staging,
        offsets=offered.group.offsets[offered.blocks(plan.todo[own])].tolist(),
        targets=slots.buffers,
    )


def _sealed(plan: Plan, offered: Offered, own: I64, slots: Slots) -> Sealed:
    """The blocks of one group: `own` of the positions to do."""
    positions = plan.todo[own]
    keys, blocks = plan.keys_at(positions), offered.blocks(positions)
    marks = offered.marks
    if len(blocks) < len(marks.tags):
        marks = marks.select(blocks)
    parents = plan.parents[own]
    if not offered.group.chained:
        parents = np.full(len(own), PARENT_NONE, np.int64)
    return Sealed(offered.group.keyspace, keys, parents, slots, marks)
