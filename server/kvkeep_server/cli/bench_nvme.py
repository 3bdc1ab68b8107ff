"""`kvkeep bench nvme`, the measuring: the nvme tier beside fio, on one directory.

What the rows mean
    prefix_read/SIZE   runs of 64 blocks of one chain, at random places; as many runs under way as
                       make 16 MiB, two at least
    random_read/SIZE   single blocks at random places, one a call, 16 calls under way
    write/SIZE         batches of 64 blocks, one at a time, each acknowledged when it is synced
    fio/...            the baseline: fio with libaio, O_DIRECT and 16 requests under way, at the
                       best of several sizes of request (the block, 1 MiB, 4 MiB), which a trial
                       chooses; for writes with an fdatasync for as many bytes as a batch has

A round of ours and a round of fio's take turns, and a ratio is the median over the rounds. fio
reads the segments of the log, and writes a file of its own beside them. All rates are of payload:
the header page of each record and what fills up its last page are on us.

What is inside the measured piece is what a daemon does below the index. A read is `NvmeTier.read`,
awaited on an event loop: from segments with O_DIRECT into slots of a pool, header and checksum of
each block verified. A write is `reserve`, `write` (headers, the bytes out of slots, fdatasync) and
`commit`. Not inside: the index, leases, clients, and the payload's checksum, which a commit takes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvkeep_server.cli.bench_fio import DEPTH, Fio, FioRun
from kvkeep_server.cli.bench_local import BATCH_BLOCKS, SEED, SIZES, GiB, MiB
from kvkeep_server.cli.bench_nvme_log import SEGMENT_NBYTES, MeasuredLog, Slots
from kvkeep_server.cli.bench_rows import Row, rate_row
from kvkeep_server.cli.bench_timing import Operation, Samples
from kvkeep_server.tiers.record import PAGE_NBYTES, record_pages

_UNDER_WAY_NBYTES = 16 * MiB
_MERGED_NBYTES = (MiB, 4 * MiB)


@dataclass(frozen=True, slots=True)
class NvmePlan:
    """How much is stored and measured.

    Attributes:
        stored_nbytes: Of each block size, at least; reads draw from all of it.
        round_nbytes: That a round reads, one batch at least.
        rounds: Of ours and of fio's, in turn.
        read_threads: Of the tier, as `nvme.read_threads`.
    """

    stored_nbytes: int = GiB
    round_nbytes: int = 256 * MiB
    rounds: int = 5
    read_threads: int = 8

    def batches_a_round(self, block_nbytes: int) -> int:
        """Batches that a round writes; with one trial round they store enough."""
        all_rounds = -(-self.stored_nbytes // (BATCH_BLOCKS * block_nbytes))
        return -(-all_rounds // (self.rounds + 1))

    def log_nbytes(self, block_nbytes: int) -> int:
        """The limit of the log of one block size: never reached."""
        batches = self.batches_a_round(block_nbytes) * (self.rounds + 1)
        record_nbytes = record_pages(block_nbytes) * PAGE_NBYTES
        return (batches * BATCH_BLOCKS * record_nbytes // SEGMENT_NBYTES + 4) * SEGMENT_NBYTES

    @property
    def disk_nbytes(self) -> int:
        """Most that a run takes on the disk: one log, and the file that fio writes."""
        logs = [self.log_nbytes(n) for n in SIZES.values()]
        written = [self.batches_a_round(n) * BATCH_BLOCKS * n for n in SIZES.values()]
        return max(logs) + max(written)

    @property
    def slots_nbytes(self) -> int:
        """Memory for what is under way at once."""
        return max(runs_at_once(nbytes) * BATCH_BLOCKS * nbytes for nbytes in SIZES.values())


def runs_at_once(block_nbytes: int) -> int:
    """Runs of 64 blocks of this size that are read at once."""
    return max(2, -(-_UNDER_WAY_NBYTES // (BATCH_BLOCKS * block_nbytes)))


class NvmeBench:
    """One run. `rows()` stores and measures everything and gives the report's rows as they come.

    Args:
        plan: See there.
        directory: An empty one, on the device.
        fio: Works in the same one.
        slots: For `plan.slots_nbytes`.
        progress: Gets a line when another part begins.

    Attributes:
        fio_nbytes: By row, the size of request at which fio was best.
    """

    def __init__(
        self,
        plan: NvmePlan,
        *,
        directory: Path,
        fio: Fio,
        slots: Slots,
        progress: Callable[[str], None],
    ) -> None:
        """See the class."""
        self.fio_nbytes: dict[str, int] = {}
        self._plan = plan
        self._directory = directory
        self._fio = fio
        self._slots = slots
        self._progress = progress
        self._random = np.random.default_rng(SEED)

    def rows(self) -> Iterator[Row]:
        """All rows, in the order of the report.

        Raises:
            FioError: fio did not do its part.
            WrongBytesError: The tier gave or took something else than what was stored.
        """
        for name, nbytes in SIZES.items():
            self._progress(f"blocks of {name}")
            path = self._directory / name
            with MeasuredLog(
                path,
                self._slots,
                max_nbytes=self._plan.log_nbytes(nbytes),
                read_threads=self._plan.read_threads,
                random=self._random,
            ) as log:
                yield from self._writes(log, name)
                log.seal()
                yield from self._reads(log, name, "prefix_read", BATCH_BLOCKS)
                yield from self._reads(log, name, "random_read", 1)
            for file in path.iterdir():
                file.unlink()

    def _writes(self, log: MeasuredLog, size: str) -> Iterator[Row]:
        block_nbytes = SIZES[size]
        times = self._plan.batches_a_round(block_nbytes)
        batch_nbytes = BATCH_BLOCKS * block_nbytes
        batch = log.fill(BATCH_BLOCKS, block_nbytes)
        ours = Operation(f"write/{size}", lambda _: log.write(batch, times))
        fio = FioRun("write", block_nbytes, times * batch_nbytes, sync_nbytes=batch_nbytes)
        yield from self._beside_fio(ours, fio, self._fio.write)

    def _reads(self, log: MeasuredLog, size: str, what: str, count: int) -> Iterator[Row]:
        block_nbytes = SIZES[size]
        at_once = DEPTH if count == 1 else runs_at_once(block_nbytes)
        calls = max(at_once, self._plan.round_nbytes // (count * block_nbytes))
        ours = Operation(
            f"{what}/{size}",
            lambda drawn: log.read(drawn, at_once),
            lambda: log.draw(calls, count),
        )
        pattern = "randread" if count == 1 else "read"
        nbytes = calls * count * block_nbytes
        files = log.full_segments()
        run = FioRun(pattern, block_nbytes, nbytes)
        yield from self._beside_fio(ours, run, lambda fio: self._fio.read(fio, files))

    def _beside_fio(
        self, ours: Operation, fio: FioRun, run: Callable[[FioRun], float]
    ) -> Iterator[Row]:
        """The rows of fio and of ours, which move the same number of bytes a round."""
        ours.once()
        trials = {one: run(one) for one in map(fio.at, self._requests(fio))}
        best = min(trials, key=trials.__getitem__)
        self.fio_nbytes[ours.name] = best.request_nbytes
        pairs = [(ours.once(), run(best)) for _ in range(self._plan.rounds)]
        own, baseline = (Samples(tuple((s,) for s in side)) for side in zip(*pairs, strict=True))
        name = f"fio/{ours.name}"
        yield rate_row(name, fio.nbytes, baseline)
        yield rate_row(ours.name, fio.nbytes, own, (name, baseline))

    @staticmethod
    def _requests(fio: FioRun) -> set[int]:
        """Sizes of request to try: the block's, and larger ones as far as a sync covers them."""
        most = fio.sync_nbytes or fio.nbytes
        return {fio.request_nbytes, *(min(nbytes, most) for nbytes in _MERGED_NBYTES)}
