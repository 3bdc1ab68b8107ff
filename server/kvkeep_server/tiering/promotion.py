"""Brings blocks from nvme into ram, for those who want to read them: one flight a unit.

A flight reads straight into slots that are reserved as those of commits are. What is read is
published a piece at a time, root to tail, so that whoever cannot wait for the whole gets its
beginning. A block that nvme does not give ends the flight: what is behind it is of no use.
"""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.errors import KVKeepError
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.results import MissReason
from kvkeep_server.tiering.residency import Residency
from kvkeep_server.tiering.room import Need, RoomMaker
from kvkeep_server.tiering.sealed import Slots
from kvkeep_server.tiers.base import ReadStatus
from kvkeep_server.tiers.nvme.tier import NvmeTier
from kvkeep_server.tiers.ram.tier import Reservation

I64 = NDArray[np.int64]
# Of each flight: why not all of it arrived, None = all did.
Flights: TypeAlias = asyncio.Future[list[MissReason | BaseException | None]]
Mask = NDArray[np.bool_]

# Of one reading: long enough for several threads, short enough that its beginning comes early.
_PIECE_NBYTES = 16 << 20


@dataclass(slots=True)
class PromotionCounts:
    """Blocks since the start.

    Attributes:
        read: That came into ram.
        nbytes: Their payload.
        corrupt: Whose bytes were wrong.
        missed: That nvme did not have any more.
        refused: That found no room in ram, or nvme too busy or too sick to read them.
    """

    read: int = 0
    nbytes: int = 0
    corrupt: int = 0
    missed: int = 0
    refused: int = 0


class Promotion:
    """Event loop only.

    Args:
        residency: Whose units.
        room: Finds slots.
        nvme: Where they are.
        flights_max: At once: bounds slots that are reserved and not filled.
    """

    def __init__(
        self, *, residency: Residency, room: RoomMaker, nvme: NvmeTier, flights_max: int = 8
    ) -> None:
        """See the class."""
        self._residency = residency
        self._room = room
        self._nvme = nvme
        self._turn = asyncio.Semaphore(flights_max)
        self._flying: dict[int, asyncio.Task[MissReason | None]] = {}
        self._tasks: set[asyncio.Task[MissReason | None]] = set()
        self._landing: asyncio.Future[None] | None = None
        self.counts = PromotionCounts()

    @property
    def in_flight(self) -> int:
        """Units that are being read, or wait for it."""
        return len(self._flying)

    def begin(self, units: I64, hints: Hints) -> Flights:
        """Begins to bring those of the units, root to tail, that are not whole in ram.

        Returns:
            Done when all of them are there or will not come. To be shielded: others wait for it.
        """
        wanted = [unit for unit in units.tolist() if unit not in self._flying]
        own = self._not_in_ram(np.array(wanted, np.int64))
        if len(own):
            # Now, not when the task has its turn: nothing may leave meanwhile.
            self._residency.pin(own)
            task = asyncio.create_task(self._fly(own, hints))
            task.add_done_callback(lambda _: self._residency.unpin(own))
            self._tasks.add(task)
            self._flying.update(dict.fromkeys(own.tolist(), task))
            task.add_done_callback(self._tasks.discard)
        # Root to tail, each once.
        flights = dict.fromkeys(
            self._flying[unit] for unit in units.tolist() if unit in self._flying
        )
        return asyncio.gather(*flights, return_exceptions=True)

    @staticmethod
    def why_not(flights: Flights) -> MissReason:
        """Why what flights that are over did not bring is not to be had now."""
        ends = [end for end in flights.result() if end is not None]
        return ends[0] if ends and isinstance(ends[0], MissReason) else MissReason.TIER_DOWN

    async def landing(self, flights: Flights) -> None:
        """Until something else has come into ram, or these flights are over."""
        if self._landing is None:
            self._landing = asyncio.get_running_loop().create_future()
        either: list[asyncio.Future[Any]] = [self._landing, flights]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    async def quiet(self) -> None:
        """Until nothing is on its way."""
        while self._flying:
            if self._landing is None:
                self._landing = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._landing])

    def _landed(self) -> None:
        if self._landing is not None:
            self._landing.set_result(None)
            self._landing = None

    def _not_in_ram(self, units: I64) -> I64:
        return units[~self._residency.columns.wholly_in_ram(units)]

    async def _fly(self, units: I64, hints: Hints) -> MissReason | None:
        landed, reason = 0, None
        try:
            async with self._turn:
                while landed < len(units):
                    count = self._fitting(units[landed:])
                    piece = units[landed : landed + count]
                    reason = await self._bring(piece, hints)
                    for unit in piece.tolist():
                        del self._flying[unit]
                    landed += count
                    self._landed()
                    if reason is not None:
                        break
        finally:
            for unit in units[landed:].tolist():
                self._flying.pop(unit, None)
            self._landed()
        return reason

    def _fitting(self, units: I64) -> int:
        """How many units make a piece, at least one."""
        columns, total = self._residency.columns, 0
        for place, unit in enumerate(units.tolist()):
            total += self._residency.nbytes_of(columns.blocks_of(np.array([unit])))
            if place and total > _PIECE_NBYTES:
                return place
        return len(units)

    async def _bring(self, units: I64, hints: Hints) -> MissReason | None:
        """One piece, all keyspaces; why not all of it arrived, None = all did."""
        columns = self._residency.columns
        if (columns.row[units] < 0).any():
            return MissReason.TIER_DOWN  # removed meanwhile
        # Root to tail in each keyspace: neighbours on nvme are read in one call.
        blocks, _ = columns.by_chain(units)
        blocks = blocks[columns.address_of(blocks) == 0]
        parts = self._residency.by_keyspace(blocks)
        with ExitStack() as held:
            reserved = []
            for own in parts:
                nbytes = self._residency.keyspace_of(int(own[0])).block_nbytes
                [slots], _ = await self._room.reserve([Need.of(nbytes, np.ones(len(own), bool))])
                reserved.append(held.enter_context(slots))
            parts = [own[: len(s.addresses)] for own, s in zip(parts, reserved, strict=True)]
            readings = [self._read(own, slots) for own, slots in zip(parts, reserved, strict=True)]
            results = await asyncio.gather(*readings)
            await self._room.index_at_rest()
            read = [own[hits] for own, hits in zip(parts, results, strict=True)]
            arrived = np.concatenate([np.empty(0, np.int64), *read])
            count = self._leading(units, arrived)
            kept = columns.blocks_of(units[:count])
            for own, slots in zip(parts, reserved, strict=True):
                self._publish(own, slots, np.isin(own, kept), hints)
        short = len(blocks) - sum(map(len, parts))
        self.counts.refused += short
        if count == len(units):
            return None
        read_all = all(hits.all() for hits in results)
        return MissReason.NO_ROOM if short and read_all else MissReason.TIER_DOWN

    def _leading(self, units: I64, arrived: I64) -> int:
        """How many units, root to tail, are whole in ram with these blocks, and not removed."""
        columns = self._residency.columns
        whole = columns.whole(
            units, lambda ids: (columns.address_of(ids) != 0) | np.isin(ids, arrived)
        )
        whole &= columns.row[units] >= 0
        return len(units) if whole.all() else int(whole.argmin())

    def _publish(self, blocks: I64, slots: Reservation, kept: Mask, hints: Hints) -> None:
        generations = slots.commit(kept)
        blocks, addresses = blocks[kept], slots.addresses[: len(kept)][kept]
        if len(blocks):
            checksums = self._residency.columns.checksum[blocks]
            self._residency.promote(blocks, Slots(addresses, generations, checksums), hints)
            self.counts.read += len(blocks)
            self.counts.nbytes += self._residency.nbytes_of(blocks)

    async def _read(self, blocks: I64, slots: Reservation) -> Mask:
        """Which blocks of one keyspace are in their slots. Reclaim may move a record while it is
        read: then it is read once more, from its new place."""
        hits, buffers = np.zeros(len(blocks), bool), slots.buffers
        for _ in range(2):
            todo = np.flatnonzero(~hits)
            if not len(todo):
                break
            asked = self._residency.columns.nvme[blocks[todo]].copy()
            try:
                into = [buffers[place] for place in todo.tolist()]
                status = await self._nvme.read(self._residency.named(blocks[todo]), into)
            except (KVKeepError, OSError):
                self.counts.refused += len(todo)
                break
            hits[todo] = status == ReadStatus.HIT
            self.counts.corrupt += int(np.count_nonzero(status == ReadStatus.CORRUPT))
            gone = status == ReadStatus.MISS
            moved = self._residency.columns.nvme[blocks[todo]] != asked
            self._lose(blocks[todo[gone & ~moved]])
            if not (gone & moved).any():
                self.counts.refused += int(np.count_nonzero(status == ReadStatus.THROTTLED))
                break
        return hits

    def _lose(self, blocks: I64) -> None:
        self.counts.missed += len(blocks)
        self._residency.forget(blocks, MissReason.CORRUPT)

    async def verify(self, blocks: I64) -> NDArray[np.uint8]:
        """Reads records of blocks of one keyspace, at least one, and holds them against their
        checksums; a `ReadStatus` each. What is corrupt is forgotten."""
        nbytes = self._residency.keyspace_of(int(blocks[0])).block_nbytes
        room = memoryview(bytearray(len(blocks) * nbytes))
        into = [room[at : at + nbytes] for at in range(0, len(room), nbytes)]
        return await self._nvme.read(self._residency.named(blocks), into)

    async def finish(self) -> None:
        """Waits for the flights that are on their way."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
