"""The audit of a daemon that serves: index, accounting, pool, leases; on request every byte.

Nothing here holds the event loop for long. Blocks are looked at a slice at a time, with a pause
after each; what must be seen at one moment is copied and judged in a thread; bytes are read in a
thread, at a rate. What it finds is a sentence in the report. A block whose bytes are wrong is taken
out, with all that follows it: better a miss than a wrong answer.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.errors import ResourceExhaustedError, TierUnavailableError
from kvkeep_server.tiering.manager import TierManager
from kvkeep_server.tiering.promotion import Promotion
from kvkeep_server.tiering.scrub import BytesBatch
from kvkeep_server.tiers.base import ReadStatus

I64 = NDArray[np.int64]

# 3 ms of the loop, then as long for everybody else; and so are these keyspaces, whose blocks are
# looked up one keyspace after the other.
_SLICE_IDS = 16384
_SLICE_SPACES = 32
_PAUSE_S = 0.003
_BATCH_NBYTES = 4 * 1024 * 1024
_FINDINGS_MAX = 100

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CheckReport:
    """What a check saw.

    Attributes:
        findings: What is wrong, a sentence each; at most 100.
        blocks_checked: Blocks that were held against index, slot and key.
        blocks_verified: Blocks of which every byte was held against the checksum.
        nbytes_verified: Their bytes.
        blocks_corrupt: Those with wrong bytes.
        blocks_removed: Blocks taken out for that, those that followed them included.
        longest_step_s: For how long the event loop was held at most.
    """

    findings: list[str] = field(default_factory=list)
    blocks_checked: int = 0
    blocks_verified: int = 0
    nbytes_verified: int = 0
    blocks_corrupt: int = 0
    blocks_removed: int = 0
    longest_step_s: float = 0.0

    def note(self, finding: str) -> None:
        """Adds a finding, while there is room for it."""
        if len(self.findings) < _FINDINGS_MAX:
            self.findings.append(finding)


@dataclass(frozen=True, slots=True)
class CheckOrder:
    """What a check is to do.

    Attributes:
        verify: Whether bytes are read.
        nbytes_max: So many at most, 0 = all.
        nbytes_per_s: So many a second, 0 = as fast as one thread reads.
    """

    verify: bool
    nbytes_max: int
    nbytes_per_s: int


class Checker:
    """Event loop only; one check at a time.

    Args:
        manager: Whose blocks.
        clock: For the rate, and for how long a step took.
    """

    def __init__(self, *, manager: TierManager, clock: Clock) -> None:
        """See the class."""
        self._manager = manager
        self._clock = clock
        self._running = False

    async def run(self, order: CheckOrder) -> CheckReport:
        """One check. A caller that goes away ends it.

        Raises:
            ResourceExhaustedError: One is running.
        """
        if self._running:
            msg = "a check is running already; wait for its end"
            raise ResourceExhaustedError(msg, retry_after_s=1.0)
        self._running = True
        try:
            report = CheckReport()
            await self._rows(report)
            await self._moment(report)
            if order.verify:
                began_s = self._clock.monotonic_s()
                await self._bytes(report, order, began_s)
                if self._manager.promotion is not None:
                    await self._records(report, order, began_s, self._manager.promotion)
        finally:
            self._running = False
        for finding in report.findings:
            _log.error("check", extra={"finding": finding})
        return report

    def _step(self, report: CheckReport, where: str, look: Callable[[], None]) -> None:
        """Looks, and notes what is found and how long it took."""
        began_s = self._clock.monotonic_s()
        try:
            look()
        except AssertionError as error:
            report.note(f"{where}: {error}")
        report.longest_step_s = max(report.longest_step_s, self._clock.monotonic_s() - began_s)

    async def _rows(self, report: CheckReport) -> None:
        residency = self._manager.residency

        def look(start: int, spaces: NDArray[np.uint16]) -> None:
            report.blocks_checked += residency.audit().rows(start, start + _SLICE_IDS, spaces)

        # What comes meanwhile is not looked at: somebody is at it just now.
        for start in range(0, residency.columns.capacity, _SLICE_IDS):
            spaces = residency.audit().spaces(start, start + _SLICE_IDS)
            for at in range(0, len(spaces), _SLICE_SPACES):
                own = partial(look, start, spaces[at : at + _SLICE_SPACES])
                self._step(report, f"blocks {start} to {start + _SLICE_IDS - 1}", own)
                await asyncio.sleep(_PAUSE_S)
            await asyncio.sleep(0)

    async def _moment(self, report: CheckReport) -> None:
        """One copy after the other, each judged in a thread."""
        residency, leases = self._manager.residency, self._manager.leases
        room = await asyncio.to_thread(residency.columns.blank)
        takes: dict[str, Callable[[], Callable[[], None]]] = {
            "blocks, units and pool": lambda: residency.audit().moment(room),
            "eviction policy": lambda: residency.audit().policy_moment(),
            "leases": leases.moment,
        }
        for where, take in takes.items():
            judges: list[Callable[[], None]] = []
            self._step(report, where, partial(_keep, judges, take))
            for judge in judges:
                await asyncio.to_thread(self._judge, report, where, judge)
        self._step(report, "index", residency.table.check_counts)
        self._step(report, "counts", self._manager.check_counts)

    def _judge(self, report: CheckReport, where: str, judge: Callable[[], None]) -> None:
        """In a thread, while nothing else writes to the report."""
        try:
            judge()
        except AssertionError as error:
            report.note(f"{where}: {error}")

    async def _records(
        self, report: CheckReport, order: CheckOrder, began_s: float, promotion: Promotion
    ) -> None:
        """Every record on nvme, whether the block is in ram too or not."""
        removal = self._manager.removal
        before = removal.counts.corrupt
        corrupt = await self._read_records(report, order, began_s, promotion)
        if corrupt:
            await removal.of_lost()
            report.blocks_corrupt += corrupt
            report.blocks_removed += removal.counts.corrupt - before
            report.note(f"wrong bytes on nvme: {corrupt} blocks, taken out there")

    async def _read_records(
        self, report: CheckReport, order: CheckOrder, began_s: float, promotion: Promotion
    ) -> int:
        residency, start, corrupt = self._manager.residency, 0, 0
        while start < residency.columns.capacity:
            nvme = residency.columns.nvme[start : start + _SLICE_IDS]
            for own in residency.by_keyspace(start + np.flatnonzero(nvme != 0)):
                step = max(1, _BATCH_NBYTES // residency.keyspace_of(int(own[0])).block_nbytes)
                for at in range(0, len(own), step):
                    if order.nbytes_max and report.nbytes_verified >= order.nbytes_max:
                        return corrupt
                    corrupt += await self._verify(report, promotion, own[at : at + step])
                    await asyncio.sleep(self._ahead_s(report, order, began_s))
            start += _SLICE_IDS
        return corrupt

    async def _verify(self, report: CheckReport, promotion: Promotion, blocks: I64) -> int:
        """Reads some records; how many are corrupt."""
        columns = self._manager.residency.columns
        blocks = blocks[(columns.row[blocks] >= 0) & (columns.nvme[blocks] != 0)]
        if not len(blocks):
            return 0
        try:
            status = await promotion.verify(blocks)
        except TierUnavailableError as error:
            report.note(f"nvme: {error}")
            return 0
        read = blocks[status == ReadStatus.HIT]
        report.blocks_verified += len(read)
        report.nbytes_verified += self._manager.residency.nbytes_of(read)
        return int(np.count_nonzero(status == ReadStatus.CORRUPT))

    async def _bytes(self, report: CheckReport, order: CheckOrder, began_s: float) -> None:
        residency, start = self._manager.residency, 0
        left = order.nbytes_max or float("inf")
        while start < residency.columns.capacity and left > 0:
            batch = BytesBatch.take(residency.audit(), start, min(_BATCH_NBYTES, left))
            wrong = await asyncio.to_thread(batch.wrong)
            report.blocks_verified += len(batch.ids)
            report.nbytes_verified += batch.nbytes
            await self._drop(report, batch, wrong)
            left -= batch.nbytes
            start = batch.stop
            await asyncio.sleep(self._ahead_s(report, order, began_s))

    def _ahead_s(self, report: CheckReport, order: CheckOrder, began_s: float) -> float:
        if not order.nbytes_per_s:
            return 0.0
        due_s = report.nbytes_verified / order.nbytes_per_s
        return max(0.0, began_s + due_s - self._clock.monotonic_s())

    async def _drop(self, report: CheckReport, batch: BytesBatch, wrong: I64) -> None:
        """Takes out what is still the block that was read: a slot that is used anew is no fault."""
        columns = self._manager.residency.columns
        ids, generations = batch.ids[wrong], batch.generations[wrong]
        same = columns.row[ids] >= 0
        same &= self._manager.residency.generations_of(ids) == generations
        ids, generations = ids[same], generations[same]
        if not len(ids):
            return
        before = self._manager.removal.counts.corrupt
        await self._manager.removal.of_blocks(ids, generations)
        report.blocks_corrupt += len(ids)
        report.blocks_removed += self._manager.removal.counts.corrupt - before
        report.note(f"wrong bytes: {len(ids)} blocks, taken out with what follows them")


def _keep(judges: list[Callable[[], None]], take: Callable[[], Callable[[], None]]) -> None:
    judges.append(take())
