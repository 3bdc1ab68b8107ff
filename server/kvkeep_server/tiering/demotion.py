"""Write-through: what was committed goes to nvme, straight from its slots in ram.

A bounded queue of units, pinned meanwhile, so that their slots stay; when it is full, units are
left out and counted: they live in ram only, until a later unit of their chain takes them along or
the queue is empty (`left_out`); so do those that nvme did not take. One batch at a time is written
and synced, so whoever has a location in the index is on the medium. What is written is
prefix-closed: a unit counts only when its parent does.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.errors import KVKeepError
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.tiering.keyspaces import Keyspace
from kvkeep_server.tiering.residency import Residency
from kvkeep_server.tiers.base import BlockFacts, Blocks, WriteStatus
from kvkeep_server.tiers.nvme.batch import NvmeBatch
from kvkeep_server.tiers.nvme.tier import NvmeTier
from kvkeep_server.tiers.ram.tier import RamTier
from kvkeep_server.tiers.record import PAGE_NBYTES, record_pages

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Mask = NDArray[np.bool_]

RETENTION_CLASS = "default"
# Of a batch: what a small part of a segment holds, because the records of a unit lie apart by so
# much, and it goes with the first of them; not more than this, because readers wait for it.
_BATCH_NBYTES_MAX = 16 << 20
_BATCHES_A_SEGMENT = 4
# A disk without room is asked again after a while, a few times: reclaim is at it.
_RETRY_S = 0.05
_TRIES_MAX = 20


@dataclass(frozen=True, slots=True)
class DemotionLimits:
    """Of the queue, all units in it together.

    Attributes:
        blocks_max: Blocks.
        nbytes_max: Their payload.
        segment_nbytes: Of the smallest segments that they go into.
    """

    blocks_max: int
    nbytes_max: int
    segment_nbytes: int

    @property
    def batch_nbytes(self) -> int:
        """Written and synced at once, at most; a sync costs as much as 1 to 4 MiB of writing."""
        return min(self.segment_nbytes // _BATCHES_A_SEGMENT, _BATCH_NBYTES_MAX)


@dataclass(slots=True)
class DemotionCounts:
    """Blocks since the start.

    Attributes:
        written: On nvme now, or once.
        dropped: That the full queue left out.
        failed: That nvme did not take, each time.
    """

    written: int = 0
    dropped: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Queued:
    """Units of one commit, root to tail; pinned.

    Attributes:
        units: Ids.
        nbytes: Payload of all their blocks.
        blocks: Number of those.
        done: Set when they are written, or given up.
    """

    units: I64
    nbytes: int
    blocks: int
    done: asyncio.Future[None]


class Demotion:
    """Event loop only; `run` goes on in a task.

    Args:
        residency: Whose units.
        ram: Where their bytes are.
        nvme: Where they go.
        note: Told of blocks, locations and stamps that are on the medium.
        limits: Of the queue.
    """

    def __init__(
        self,
        *,
        residency: Residency,
        ram: RamTier,
        nvme: NvmeTier,
        note: Callable[[I64, U64, U64], None],
        limits: DemotionLimits,
    ) -> None:
        """See the class."""
        self._residency = residency
        self._ram = ram
        self._nvme = nvme
        self._note = note
        self.limits = limits
        self._queue: deque[_Queued] = deque()
        self._queued_units: set[int] = set()
        self._newest: asyncio.Future[None] | None = None
        self._work = asyncio.Event()
        self._ending: asyncio.Future[None] | None = None
        self.counts = DemotionCounts()
        self.queued_blocks = 0
        self.queued_nbytes = 0

    # --- in

    def offer(self, units: I64) -> "asyncio.Future[None]":
        """Takes units of a chain, root to tail, those that are there already left out; and before
        them their ancestors that an earlier full queue left out.

        Returns:
            Done when they are written, or never will be; `recorded` of the columns tells. Others
            may have it too: to be waited for, not to be cancelled.
        """
        units = self._missing(units)
        if not len(units) and self._newest is not None:
            # They are queued already: done when all that is queued is.
            return self._newest
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not len(units):
            done.set_result(None)
            return done
        blocks = self._residency.columns.blocks_of(units)
        nbytes = self._residency.nbytes_of(blocks)
        if not self._has_room(len(blocks), nbytes):
            self.counts.dropped += len(blocks)
            done.set_result(None)
            return done
        self._enqueue(_Queued(units, nbytes, len(blocks), done))
        return done

    async def offer_in_time(self, units: I64, wait_s: float) -> None:
        """As `offer`, for who waits for the medium: also for room in the queue. Returns when they
        are written, or never will be, or the time is over."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        # What left while it waits would have its ids taken by others.
        self._residency.pin(units)
        try:
            await self._offer_until(units, until)
        finally:
            self._residency.unpin(units)

    async def _offer_until(self, units: I64, until: float) -> None:
        loop = asyncio.get_running_loop()
        while not self.takes(units) and loop.time() < until:
            if self._ending is None:
                self._ending = loop.create_future()
            await asyncio.wait([self._ending], timeout=until - loop.time())
        await asyncio.wait([self.offer(units)], timeout=max(0.0, until - loop.time()))

    def takes(self, units: I64) -> bool:
        """Whether there is room for all of them."""
        blocks = self._residency.columns.blocks_of(self._missing(units))
        return self._has_room(len(blocks), self._residency.nbytes_of(blocks))

    def _enqueue(self, entry: _Queued) -> None:
        self._residency.pin(entry.units)
        self._queued_units.update(entry.units.tolist())
        self._queue.append(entry)
        self._newest = entry.done
        self.queued_blocks += entry.blocks
        self.queued_nbytes += entry.nbytes
        self._work.set()

    async def settle(self) -> None:
        """Waits until all that is queued now is written, or given up."""
        await asyncio.wait([self.offer(np.empty(0, np.int64))])

    def _has_room(self, blocks: int, nbytes: int) -> bool:
        if not self._queue:
            return True
        return (
            self.queued_blocks + blocks <= self.limits.blocks_max
            and self.queued_nbytes + nbytes <= self.limits.nbytes_max
        )

    def _missing(self, units: I64) -> I64:
        """Those in ram that have no record and are not queued, with ancestors of the first."""
        queued = self._queued_units
        if len(units):
            units = np.concatenate((self._unrecorded_above(int(units[0]), queued), units))
        wanted = self._writable(units)
        wanted &= ~self._residency.ram_only(units)
        wanted &= np.array([unit not in queued for unit in units.tolist()], bool)
        return units[wanted]

    def _unrecorded_above(self, unit: int, known: Container[int]) -> I64:
        """Ancestors from the root on, down from one that has a record or is known."""
        columns = self._residency.columns
        above: list[int] = []
        at = int(columns.parent[unit])
        while at >= 0 and at not in known and len(above) < self.limits.blocks_max:
            if columns.recorded(np.array([at]))[0]:
                break
            above.append(at)
            at = int(columns.parent[at])
        return np.array(above[::-1], np.int64)

    def _writable(self, units: I64) -> Mask:
        """Which units have something in ram that is not on nvme, and nothing that is nowhere: such
        a unit is lost, and about to leave."""
        columns = self._residency.columns
        writable = (columns.row[units] >= 0) & columns.in_ram[units]
        return writable & ~columns.recorded(units) & columns.placed(units)

    # --- out

    async def run(self) -> None:
        """Writes what is queued, until it is cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            await self.flush()

    async def flush(self) -> None:
        """Writes all that is queued now. One call at a time."""
        while self._queue:
            entries = list(self._take())
            try:
                await self._write(np.concatenate([entry.units for entry in entries]))
            finally:
                for entry in entries:
                    self._end(entry)

    def _take(self) -> Iterator[_Queued]:
        """The next commits, up to a batch."""
        nbytes, most = 0, self.limits.batch_nbytes
        while self._queue and (not nbytes or nbytes + self._queue[0].nbytes <= most):
            nbytes += self._queue[0].nbytes
            yield self._queue.popleft()

    def _end(self, entry: _Queued) -> None:
        if self._ending is not None:
            self._ending.set_result(None)
            self._ending = None
        self.queued_blocks -= entry.blocks
        self.queued_nbytes -= entry.nbytes
        self._queued_units.difference_update(entry.units.tolist())
        self._residency.unpin(entry.units)
        if not entry.done.done():
            entry.done.set_result(None)

    async def _write(self, units: I64) -> None:
        """Units root to tail, in pieces: what one refuses is not tried with the next. All of them
        are looked at anew for each piece: a unit that was written may have another shard now."""
        columns, tries = self._residency.columns, 0
        while tries < _TRIES_MAX:
            todo = self._todo(units)
            if not len(todo):
                break  # written, removed while they waited, or about to leave
            try:
                written = await self._write_piece(todo[: self._fitting(todo)])
            except (KVKeepError, OSError):
                break
            if not written:
                tries += 1
                await asyncio.sleep(_RETRY_S)
                continue
            tries = 0
        units = units[(columns.row[units] >= 0) & ~columns.recorded(units)]
        self.counts.failed += len(columns.blocks_of(units))

    def _todo(self, units: I64) -> I64:
        """What is to be written now for these units, root to tail, so that they count: also
        ancestors that got another shard, which waits behind them in the queue."""
        columns = self._residency.columns
        units = units[self._writable(units)]
        parents = columns.parent[units].astype(np.int64)
        cut = (parents >= 0) & ~columns.recorded(np.maximum(parents, 0))
        cut &= ~np.isin(parents, units)
        if not cut.any():
            return units
        known = set(units.tolist())
        above = [np.empty(0, np.int64)]
        for unit in units[cut].tolist():
            above.append(self._unrecorded_above(unit, known))
            known.update(above[-1].tolist())
        units = np.concatenate([*above, units])
        units = units[self._writable(units)]
        own = columns.blocks_of(units)
        return self._closed(units, lambda ids: (columns.nvme[ids] != 0) | np.isin(ids, own))

    def _fitting(self, units: I64) -> int:
        """How many units make a batch, at least one."""
        blocks, places = self._residency.columns.by_chain(units)
        ends = np.cumsum(record_pages(self._residency.sizes_of(blocks))) * PAGE_NBYTES
        over = np.flatnonzero(ends > self.limits.batch_nbytes)
        return max(1, int(places[over[0]])) if len(over) else len(units)

    def _reserve(self, units: I64, held: ExitStack) -> list[tuple[NvmeBatch, I64]]:
        """Room for all blocks of as many of these units as it is there for, a batch a keyspace.

        What is written without the rest of its unit would be in vain, and in the way of what is
        there: a full log gives up a segment for it.
        """
        columns = self._residency.columns
        while len(units):
            # Root to tail in each keyspace: a prefix is read back in few calls.
            blocks, _ = columns.by_chain(units)
            blocks = blocks[columns.nvme[blocks] == 0]
            with ExitStack() as claimed:
                running = []
                for own in self._residency.by_keyspace(blocks):
                    nbytes = self._residency.keyspace_of(int(own[0])).block_nbytes
                    batch = claimed.enter_context(self._nvme.reserve(nbytes, len(own)))
                    running.append((batch, own))
                if all(len(batch.locations) == len(own) for batch, own in running):
                    held.enter_context(claimed.pop_all())
                    return running
            units = units[: len(units) // 2]
        return []

    async def _write_piece(self, units: I64) -> int:
        """One batch a keyspace, all synced; makes those units known that are written whole, behind
        parents that are. Returns their number. A shard that comes meanwhile undoes nothing: it is
        written next."""
        columns = self._residency.columns
        parents = columns.parent[units].astype(np.int64)
        known = columns.blocks_of(np.union1d(units, parents[parents >= 0]))
        with ExitStack() as held:
            # Those who are queued are pinned; ancestors may not be.
            self._residency.pin(units)
            held.callback(self._residency.unpin, units)
            running = self._reserve(units, held)
            if not running:
                return 0
            jobs = [self._write_batch(batch, own) for batch, own in running]
            statuses = await asyncio.gather(*jobs, return_exceptions=True)
            parts = []
            for (_, own), status in zip(running, statuses, strict=True):
                if isinstance(status, BaseException):
                    raise status
                parts.append(own[status == WriteStatus.WRITTEN])
            written = np.concatenate(parts)
            missing = np.setdiff1d(known, written)
            kept = self._closed(
                units, lambda ids: (columns.nvme[ids] != 0) | ~np.isin(ids, missing)
            )
            kept_blocks = np.intersect1d(columns.blocks_of(kept), written)
            for batch, own in running:
                self._commit(batch, own, np.isin(own, kept_blocks))
        self.counts.written += len(kept_blocks)
        return len(kept)

    async def _write_batch(self, batch: NvmeBatch, blocks: I64) -> NDArray[np.uint8]:
        columns = self._residency.columns
        if not len(blocks):
            return np.empty(0, np.uint8)
        keyspace = self._residency.keyspace_of(int(blocks[0]))
        views = [
            self._ram.view(address, keyspace.block_nbytes)
            for address in columns.address_of(blocks).tolist()
        ]
        return await batch.write(self._named(keyspace, blocks), views)

    def _closed(self, units: I64, has: Callable[[I64], Mask]) -> I64:
        """Of the units, root to tail: those in the index that have all of their blocks, as `has`
        tells, and such a parent."""
        columns = self._residency.columns
        whole = columns.whole(units, has) & (columns.row[units] >= 0)
        parents = columns.parent[units].astype(np.int64)
        there = (parents < 0) | columns.whole(np.maximum(parents, 0), has)
        kept: dict[int, None] = {}
        rows = zip(units.tolist(), parents.tolist(), whole.tolist(), there.tolist(), strict=True)
        for unit, parent, is_whole, is_there in rows:
            if is_whole and (is_there or parent in kept):
                kept[unit] = None
        return np.array(list(kept), np.int64)

    def _commit(self, batch: NvmeBatch, blocks: I64, kept: Mask) -> None:
        stamps = batch.commit(kept)
        if len(stamps):
            self._note(blocks[kept], batch.locations[kept], stamps)

    def _named(self, keyspace: Keyspace, blocks: I64) -> Blocks:
        """What is written beside the blocks."""
        columns, residency = self._residency.columns, self._residency
        units = columns.unit_of(blocks)
        parents = columns.parent[units]
        width = -(-keyspace.key_nbytes // 8)
        now_ms = self._nvme.now_ms()
        ages_ms = (residency.now_s() - columns.last_used_s(units)) * 1000
        facts = BlockFacts(
            parents=KeyBatch(columns.key_words[parents][:, :width], keyspace.key_nbytes),
            has_parent=parents >= 0,
            checksums=columns.checksum[blocks],
            created_ms=np.full(len(blocks), now_ms, np.uint64),
            last_used_ms=np.maximum(now_ms - ages_ms, 0).astype(np.uint64),
            retention_class=RETENTION_CLASS,
            boundary_id=keyspace.boundary_id,
            boundary_members=keyspace.members,
            boundary_member=keyspace.member,
        )
        return replace(residency.named(blocks), facts=facts)
