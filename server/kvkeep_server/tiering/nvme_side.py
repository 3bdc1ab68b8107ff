"""All that a daemon with an nvme tier has beside one without: wired, started, drained."""

import asyncio
import contextlib
import logging
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kvkeep_server.core.clock import Clock
from kvkeep_server.core.errors import FailedPreconditionError, KVKeepError
from kvkeep_server.core.stopping import Stopping
from kvkeep_server.policies.reinsertion.used import UsedReinsertion
from kvkeep_server.tiering.demotion import Demotion, DemotionLimits
from kvkeep_server.tiering.epochs import Epochs
from kvkeep_server.tiering.keyspaces import KeyspaceBook
from kvkeep_server.tiering.left_out import LeftOut
from kvkeep_server.tiering.lineage import deepest_first
from kvkeep_server.tiering.prefetching import PrefetchFacts, Prefetching
from kvkeep_server.tiering.promotion import Promotion
from kvkeep_server.tiering.records import Records
from kvkeep_server.tiering.recovery import Recovery
from kvkeep_server.tiering.removal import Removal
from kvkeep_server.tiering.residency import Residency
from kvkeep_server.tiering.room import RoomMaker
from kvkeep_server.tiers.nvme.epoch_files import EpochFiles
from kvkeep_server.tiers.nvme.files import Files
from kvkeep_server.tiers.nvme.stats import DirectoryStats
from kvkeep_server.tiers.nvme.tier import NvmeSettings, NvmeTier
from kvkeep_server.tiers.ram.tier import RamTier

_WRITE_THREADS = 4
_SWEEP_S = 0.05
# Offered to the queue at once while draining.
_DRAINED_UNITS = 256
# Of each directory, in the log.
_NAMED_MAX = 20
_READS_TOLD_S = 60.0
_SICK, _WELL = "nvme: a directory takes no writes", "nvme: a directory takes writes again"
_SHORT = "nvme: the file system has less room than nvme.max allows; the oldest blocks go for it"
_ROOMY = "nvme: the file system has the room that nvme.max allows again"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NvmeMeans:
    """What it takes from the world: file systems, time, chance."""

    files: Files
    clock: Clock
    source: random.Random


@dataclass(frozen=True, slots=True)
class NvmeFacts:
    """What it is made with.

    Attributes:
        settings: Of the tier.
        queue: Of demotion.
        read_threads: That read from it.
        prefetch: Of hints.
        means: See there.
    """

    settings: NvmeSettings
    queue: DemotionLimits
    read_threads: int
    prefetch: PrefetchFacts
    means: NvmeMeans


class NvmeSide:
    """Event loop only. `start`, then `run` in a task until it is cancelled, then `close`.

    Args:
        facts: See there.
        residency: Whose blocks.
        ram: Where they come from and go to.
        room: Makes it there.
        book: Knows keyspaces by name.
        epochs: Which are over.
    """

    def __init__(
        self,
        facts: NvmeFacts,
        residency: Residency,
        ram: RamTier,
        room: RoomMaker,
        book: KeyspaceBook,
        epochs: Epochs,
    ) -> None:
        """See the class."""
        files, clock, source = facts.means.files, facts.means.clock, facts.means.source
        self._residency = residency
        self._book = book
        self._epochs = epochs
        self._clock = clock
        self._sick: dict[str, str] = {}
        self._short: dict[str, str] = {}
        # Of each directory: read errors that were told, and when more of them may be.
        self._reads_told: dict[str, tuple[int, float]] = {}
        self._writers = ThreadPoolExecutor(_WRITE_THREADS, thread_name_prefix="kvkeep-write")
        self.records = Records(
            residency=residency, policy=UsedReinsertion(), keyspace_of=book.by_name
        )
        self.tier = NvmeTier(
            settings=facts.settings,
            files=files,
            clock=clock,
            read_threads=facts.read_threads,
            writers=self._writers,
            owner=self.records,
        )
        directories = [directory.path for directory in facts.settings.directories]
        epochs.files = EpochFiles(directories=directories, files=files, writers=self._writers)
        self.demotion = Demotion(
            residency=residency,
            ram=ram,
            nvme=self.tier,
            note=self.records.note,
            limits=facts.queue,
        )
        self._left_out = LeftOut(columns=residency.columns, demotion=self.demotion, clock=clock)
        self.promotion = Promotion(residency=residency, room=room, nvme=self.tier)
        self.prefetching = Prefetching(
            residency=residency, promotion=self.promotion, clock=clock, facts=facts.prefetch
        )
        self.recovery = Recovery(
            residency=residency,
            room=room,
            nvme=self.tier,
            records=self.records,
            adopt=book.find_or_adopt,
            source=source,
        )
        self.removal = Removal(
            residency=residency, room=room, nvme=self.tier, settled=self.recovery.settled
        )

    async def start(self) -> None:
        """Takes the directories; see `NvmeTier.start`.

        Raises:
            FailedPreconditionError: A directory is another's, or not to be used.
            OSError: A directory cannot be read.
        """
        await self.tier.start()
        try:
            await self._epochs.load()
        except BaseException:
            await self.tier.close()
            raise

    async def run(self) -> None:
        """Recovers, writes through, syncs, reclaims, prefetches, and takes out what is lost."""
        async with asyncio.TaskGroup() as tasks:
            for work in (
                self.tier.run(),
                self.demotion.run(),
                self.prefetching.run(),
                self._recover(),
                self._sweep(),
            ):
                tasks.create_task(work)

    async def _recover(self) -> None:
        try:
            await self.recovery.run()
        except (KVKeepError, OSError) as error:
            # It serves what it has; the rest stays on the disk for the next start.
            _log.exception("nvme: not everything was recovered", extra={"reason": str(error)})
        else:
            counts = self.recovery.counts
            extra = {"records": counts.records, "blocks": counts.blocks, "useless": counts.useless}
            _log.info("nvme: recovered", extra=extra)
            self._name_unused()
        finally:
            self._book.recovered()

    def _name_unused(self) -> None:
        """Files that take room and are of no use are named, some of them."""
        for directory in self.tier.stats().directories:
            for path, reason in list(directory.skipped.items())[:_NAMED_MAX]:
                _log.warning("nvme: of no use", extra={"path": path, "reason": reason})
            for name in directory.foreign[:_NAMED_MAX]:
                _log.info("nvme: not ours", extra={"path": f"{directory.path}/{name}"})

    async def _sweep(self) -> None:
        while True:
            if self._residency.lost:
                await self.removal.of_lost()
            self._left_out.offer()
            self._tell_of_directories()
            await asyncio.sleep(_SWEEP_S)

    def _tell_of_directories(self) -> None:
        """Logs it when a directory takes no writes any more, or its file system has less room than
        it may take, and when that is over."""
        stats = self.tier.stats().directories
        sick = {one.path: one.sick for one in stats if one.sick}
        # Where nothing can be written the same reason was told.
        short = {one.path: one.shortage for one in stats if one.shortage}
        short = {path: short[path] for path in short if path in self._short or path not in sick}
        self._tell_of_reads(stats)
        _tell_changes(self._sick, sick, _SICK, _WELL)
        _tell_changes(self._short, short, _SHORT, _ROOMY)
        self._sick, self._short = sick, short

    def _tell_of_reads(self, stats: Sequence[DirectoryStats]) -> None:
        now_s = self._clock.monotonic_s()
        for one in stats:
            told, next_s = self._reads_told.get(one.path, (0, now_s))
            if one.read_errors > told and now_s >= next_s:
                more = one.read_errors - told
                extra = {"directory": one.path, "reason": one.read_reason, "records": more}
                _log.warning("nvme: reads fail", extra=extra)
                self._reads_told[one.path] = (one.read_errors, now_s + _READS_TOLD_S)

    async def drain(self) -> None:
        """Queues what is in ram only, and waits until all is written. Cancel it when the time is
        over: what was written then is there."""
        columns = self._residency.columns
        units = np.flatnonzero(columns.in_ram & (columns.row >= 0))
        units = units[~columns.recorded(units)]
        units = deepest_first(columns.parent, units)[::-1]
        # An empty queue takes any batch.
        await self.demotion.settle()
        for start in range(0, len(units), _DRAINED_UNITS):
            await asyncio.wait([self.demotion.offer(units[start : start + _DRAINED_UNITS])])

    async def close(self) -> None:
        """After `run` was cancelled: ends flights, seals, gives directories and threads back."""
        await self.promotion.finish()
        await self.tier.close()
        self._writers.shutdown()


@dataclass(frozen=True, slots=True)
class LocalTiers:
    """The pool, and nvme if there is one: for those who tell of them."""

    ram: RamTier
    nvme: NvmeSide | None


@contextlib.asynccontextmanager
async def nvme_at_work(
    nvme: NvmeSide | None, stopping: Stopping, drain_left_s: Callable[[], float]
) -> AsyncIterator[None]:
    """Begins to serve at once and recovers behind; at the end writes what is in ram only, as far as
    the time goes that is left then, or until a second signal.

    Raises:
        FailedPreconditionError: A directory is another daemon's, or not to be used.
    """
    if nvme is None:
        yield
        return
    try:
        await nvme.start()
    except OSError as error:
        msg = f"nvme.directories: {error}; make it readable and writable, or name another"
        raise FailedPreconditionError(msg) from error
    work = asyncio.create_task(nvme.run())
    work.add_done_callback(_stop_when_broken)
    try:
        yield
        await stopping.last(nvme.drain(), drain_left_s())
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await nvme.close()


def _tell_changes(before: dict[str, str], now: dict[str, str], began: str, ended: str) -> None:
    """Logs of which directories something is true that was not, with the reason, and no more."""
    for path in now.keys() - before.keys():
        _log.warning(began, extra={"directory": path, "reason": now[path]})
    for path in before.keys() - now.keys():
        _log.info(ended, extra={"directory": path})


def _stop_when_broken(work: asyncio.Task[None]) -> None:
    """It ends by a broken invariant only: then it is better not to serve at all."""
    if not work.cancelled():
        _log.critical("nvme: broken", exc_info=work.exception())
        signal.raise_signal(signal.SIGTERM)
