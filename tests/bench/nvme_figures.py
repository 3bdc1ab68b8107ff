"""The nvme tier against raw system calls on the same directory.

Run: python -m tests.bench.nvme_figures DIRECTORY [GiB]. It makes and removes a directory of its own
there. Each row: what, the tier's GB/s, that of raw O_DIRECT calls from as many threads in the same
round (medians), and two ratios: the median of the rounds', and that of the best rounds, which says
more where neighbours share the device.
"""

import asyncio
import mmap
import os
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvkeep_server.tiers import record
from kvkeep_server.tiers.base import ReadStatus, WriteStatus
from kvkeep_server.tiers.nvme import segment_format as form
from tests.fakes.nvme_blocks import named, slots, with_facts
from tests.fakes.nvme_tier import MIB, IndexOwner, nvme_tier

SEED = 20261130
ROUNDS = 5
RUN = 64
SEGMENT_NBYTES = 256 * MIB
THREADS = 16
KINDS = (("prefix", 1), ("prefix", 4), ("scattered", 1), ("single", 16))


def show(what, ours, raw):
    ratios = [a / b for a, b in zip(ours, raw, strict=True)]
    print(
        f"{what:<58} {statistics.median(ours):6.2f} {statistics.median(raw):6.2f} GB/s"
        f"   {statistics.median(ratios):5.2f}  {max(ours) / max(raw):5.2f} x"
    )


def timed(work, *args):
    begun = time.perf_counter()
    work(*args)
    return time.perf_counter() - begun


class Bench:
    def __init__(self, path, nbytes_max):
        self.path = Path(path)
        self.nbytes_max = nbytes_max
        self.rng = np.random.default_rng(SEED)
        self.threads = ThreadPoolExecutor(THREADS)
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(self.threads)

    def do(self, work):
        return self.loop.run_until_complete(work)

    def tier(self, name):
        tier = nvme_tier(
            [self.path / name],
            self.threads,
            owner=IndexOwner(),
            segment_nbytes=SEGMENT_NBYTES,
            max_nbytes=self.nbytes_max + 2 * SEGMENT_NBYTES,
            open_max=64,
            settings={"reading_max_nbytes": 4 << 30, "writing_max_nbytes": 4 << 30},
        )
        self.do(tier.start())
        return tier

    def writes(self, nbytes):
        """Fills a tier with durable batches of RUN blocks, each round against the same bytes in raw
        calls; the tier and its batches."""
        tier = self.tier(f"tier-{nbytes}")
        buffers = slots(RUN, nbytes)
        for buffer in buffers:
            buffer[:] = self.rng.bytes(nbytes)
        keys = self.rng.bytes(32 * RUN)
        blocks = with_facts(named(keys, nbytes), buffers)
        stride = -(-nbytes // 4096) * 4096
        whole = memoryview(mmap.mmap(-1, RUN * stride))
        fd = os.open(self.path / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        per_round = max(1, min(self.nbytes_max, 2 << 30) // ROUNDS // (RUN * nbytes))
        os.posix_fallocate(fd, 0, per_round * ROUNDS * RUN * stride)
        batches, ours, raw = [], [], []

        async def one():
            with tier.reserve(nbytes, RUN) as batch:
                status = await batch.write(blocks, buffers)
                assert (status == WriteStatus.WRITTEN).all()
                stamps = batch.commit()
                batches.append(named(keys, nbytes, batch.locations, stamps))

        async def some():
            for _ in range(per_round):
                await one()

        def raw_some(round_number):
            for i in range(per_round):
                os.pwritev(fd, [whole], (round_number * per_round + i) * RUN * stride)
                os.fdatasync(fd)

        amount = per_round * RUN * nbytes / 1e9
        for round_number in range(ROUNDS):
            ours.append(amount / timed(self.do, some()))
            raw.append(amount / timed(raw_some, round_number))
        os.close(fd)
        os.unlink(self.path / "raw")
        show(f"durable writes, batches of {RUN} x {nbytes}, one at a time", ours, raw)
        self.do(tier.seal())
        return tier, batches

    def reads(self, nbytes, tier, batches, *, kind, at_once):
        """Calls for neighbours, for one block, or for as many scattered ones, `at_once` at a time.

        The raw side reads each run with one call, and scattered blocks from THREADS threads.
        """
        count = 1 if kind == "single" else RUN
        asks = max(at_once, min(60 * at_once, (1 << 30) // nbytes // count // ROUNDS))
        targets = [slots(count, nbytes) for _ in range(at_once)]
        stride = -(-nbytes // 4096) * 4096 + 4096
        spans = THREADS if kind == "scattered" else at_once
        spans = [memoryview(mmap.mmap(-1, count * stride)) for _ in range(spans)]
        files, ours, raw = {}, [], []
        for _ in range(ROUNDS):
            asked = [self._pick(batches, count, kind) for _ in range(asks)]
            amount = asks * count * nbytes / 1e9
            ours.append(amount / timed(self.do, self._ours(tier, asked, targets)))
            places = [place for blocks in asked for place in blocks.locations.tolist()]
            step = count if kind == "prefix" else 1
            pieces = [span[: step * stride] for span in spans]
            raw.append(amount / timed(self._raw, tier, places[::step], pieces, files))
        for fd in files.values():
            os.close(fd)
        show(f"{kind} reads of {count} x {nbytes}, {at_once} at a time", ours, raw)

    def _pick(self, batches, count, kind):
        """Blocks of one call; neighbours are of one batch that did not fall into two segments."""
        while True:
            batch = batches[self.rng.integers(len(batches))]
            at = int(self.rng.integers(RUN - count + 1))
            if kind == "scattered":
                chosen = [batches[i] for i in self.rng.integers(len(batches), size=count)]
                places = np.array([one.locations[i] for i, one in enumerate(chosen)])
                stamps = np.array([one.stamps[i] for i, one in enumerate(chosen)])
                return named(batch.keys, batch.nbytes, places, stamps)
            places = batch.locations[at : at + count]
            if places[0] >> np.uint64(32) == places[-1] >> np.uint64(32):
                keys = batch.keys.slice(at, at + count)
                stamps = batch.stamps[at : at + count]
                return named(keys, batch.nbytes, places, stamps)

    async def _ours(self, tier, asked, targets):
        queue = list(asked)

        async def worker(into):
            while queue:
                status = await tier.read(queue.pop(), into)
                assert (status == ReadStatus.HIT).all()

        await asyncio.gather(*(worker(into) for into in targets))

    def _raw(self, tier, places, spans, files):
        queue = list(places)
        directory = Path(tier.stats().directories[0].path)

        def worker(span):
            while True:
                try:
                    number, page = divmod(queue.pop(), 1 << 32)
                except IndexError:
                    return
                fd = files.get(number)
                if fd is None:
                    fd = os.open(directory / f"{number:08x}.kvks", os.O_RDONLY | os.O_DIRECT)
                    files[number] = fd
                os.preadv(fd, [span], page * 4096)

        for job in [self.threads.submit(worker, span) for span in spans]:
            job.result()

    def recovery(self, records):
        """Tables only, as after a clean stop: sparse files without payloads."""
        per_segment = 31_000
        path = self.path / "recovery"
        path.mkdir()
        for number in range(1, records // per_segment + 2):
            write_table(path / f"{number:08x}.kvks", number, per_segment)
        tier = self.tier("recovery")

        async def recover():
            found = 0
            async for rows in tier.recover():
                found += len(rows)
            return found

        found = 0

        def work():
            nonlocal found
            found = self.do(recover())

        took_s = timed(work)
        print(f"recovery of {found:,} records from tables: {took_s:.2f} s")
        self.do(tier.close())

    def headers(self):
        rows = np.zeros(RUN, record.RECORD)
        rows["key_nbytes"], rows["boundary_members"] = 32, 1
        rows["payload_nbytes"] = rows["stored_nbytes"] = 4096
        encode = min(timed(record.seal_headers, rows) for _ in range(200))
        check = min(timed(record.valid, rows) for _ in range(200))
        encode_us, check_us = encode / RUN * 1e6, check / RUN * 1e6
        print(f"{RUN} headers: encode {encode_us:.2f} us, check {check_us:.2f} us each")


def write_table(path, number, count):
    """A sealed segment of records that nobody wrote: its table and nothing else."""
    rows = np.zeros(count, record.RECORD)
    rows["key"][:, :4] = np.random.default_rng(number).integers(1, 1 << 62, (count, 4))
    rows["key_nbytes"], rows["boundary_members"] = 32, 1
    rows["payload_nbytes"] = rows["stored_nbytes"] = 4096
    rows["record_seq"] = np.arange(count) + (number << 32)
    rows["location"] = (number << 32) + 1 + 2 * np.arange(count)
    encoded = record.seal_headers(rows).tobytes()
    end = 1 + 2 * count
    footer = form.Footer(number, end, count, form.table_checksum(encoded))
    header = form.SegmentHeader(number, SEGMENT_NBYTES // 4096, 1000, "global")
    with path.open("wb") as file:
        file.write(form.encode_segment_header(header))
        file.seek(end * 4096)
        file.write(encoded.ljust(form.table_pages(count) * 4096, b"\0"))
        file.write(form.encode_footer(footer))


def main(arguments):
    gib = float(arguments[1]) if arguments[1:] else 2.0
    sys.setswitchinterval(0.0002)  # as the daemon does
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"seed {SEED}, {ROUNDS} rounds, {gib} GiB of each size, segments of 256 MiB")
    print(f"{'':<58} {'ours':>6} {'raw':>6}        median   best")
    with tempfile.TemporaryDirectory(dir=arguments[0], prefix="kvkeep-bench-") as path:
        bench = Bench(path, int(gib * (1 << 30)))
        bench.headers()
        for nbytes in (58_368, 131_072, 2 << 20):
            tier, batches = bench.writes(nbytes)
            for kind, at_once in KINDS:
                bench.reads(nbytes, tier, batches, kind=kind, at_once=at_once)
            bench.do(tier.close())
        bench.recovery(1_000_000)
        bench.threads.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
