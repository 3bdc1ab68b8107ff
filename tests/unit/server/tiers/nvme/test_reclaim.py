"""Room given back: what stays, what goes, tombstones, readers of what goes."""

import asyncio
import threading

import numpy as np

from kvkeep_server.core.results import MissReason
from kvkeep_server.tiers.base import ReadStatus
from kvkeep_server.tiers.nvme.files import DiskFiles
from tests.fakes.nvme_blocks import blocks_of, named, with_facts
from tests.fakes.nvme_tier import (
    MIB,
    NBYTES,
    IndexOwner,
    all_hits,
    get,
    keys_of,
    nvme_tier,
    put,
    settle,
    started,
    store,
)


def test_what_is_wanted_is_written_again_with_its_times(make, owner):
    tier = make()

    async def run():
        await started(tier, owner)
        stored = await store(tier, owner, 10, 1, used_ms=123_456)
        old = dict(owner.places)
        kept = list(stored)[::2]
        for key in stored:
            if key not in kept:
                owner.forget(key)
        await tier.seal()
        assert await tier.reclaim_oldest()
        counts = tier.stats().counts
        assert (counts.reinserted, counts.reclaimed) == (5, 1)
        assert all(owner.places[key] > old[key] for key in kept)
        assert await all_hits(tier, owner, {key: stored[key] for key in kept})
        await tier.close()
        found = IndexOwner()
        again = make()
        await again.start()
        async for rows in again.recover():
            assert set(rows["last_used_ms"].tolist()) == {123_456}
            assert set(rows["created_ms"].tolist()) == {123_456}
            found.learn(rows)
        assert set(found.places) == set(kept)
        await again.close()

    asyncio.run(run())


def test_the_oldest_goes_first_whatever_class_it_is(make, owner):
    tier = make(max_nbytes=8 * MIB)

    async def run():
        await started(tier, owner)
        parts = []
        for seed, name in enumerate(["a", "b", "a", "c"]):
            parts.append(await store(tier, owner, 2, seed, retention_class=name))
            await tier.seal()
        owner.keep = lambda _key: False
        for gone in range(4):
            await tier.reclaim_oldest()
            for i, part in enumerate(parts):
                assert await all_hits(tier, owner, part) == (i > gone)
        await tier.close()

    asyncio.run(run())


def test_a_corrupt_record_is_not_written_again(make, owner, tmp_path):
    tier = make()

    async def run():
        await started(tier, owner)
        stored = await store(tier, owner, 4, 1)
        await tier.seal()
        (path,) = tmp_path.glob("0/*.kvks")
        image = bytearray(path.read_bytes())
        image[3 * 4096] ^= 1
        path.write_bytes(image)
        keys = list(stored)
        place = owner.places[keys[0]]
        await tier.reclaim_oldest()
        assert owner.dropped_places == [place]
        assert owner.dropped_for == {MissReason.CORRUPT: 1}
        assert keys[0] not in owner.places
        assert await all_hits(tier, owner, {key: stored[key] for key in keys[1:]})
        await tier.close()

    asyncio.run(run())


def test_what_finds_no_room_again_is_evicted_and_not_called_corrupt(make, owner, tmp_path, threads):
    """A limit was lowered: what is wanted cannot stay, and its bytes are as right as ever."""
    tier = make()

    async def run():
        await started(tier, owner)
        for seed in range(3):
            await store(tier, owner, 15, seed)
            await tier.seal()
        await tier.close()
        less = nvme_tier([tmp_path / "0"], threads, owner=owner, max_nbytes=MIB)
        await started(less, owner)
        while less.stats().directories[0].used_nbytes > MIB:
            assert await less.reclaim_oldest()
        assert less.stats().counts.reinsert_failed == len(owner.dropped_places) > 0
        assert owner.dropped_for == {MissReason.EVICTED: len(owner.dropped_places)}
        await less.close()

    asyncio.run(run())


def test_a_tombstone_lives_as_long_as_an_older_record_can(make, owner, tmp_path, threads):
    """The old record lies in a segment that goes later than that of the tombstone."""
    tier = make(max_nbytes=8 * MIB)

    async def run():
        await started(tier, owner)
        stored = await store(tier, owner, 2, 1, retention_class="slow")
        key = next(iter(stored))
        # A newer version in another class, which is the one that gets removed.
        blocks, contents = blocks_of(2, nbytes=NBYTES, seed=1)
        await put(tier, owner, with_facts(blocks, contents, retention_class="fast"), contents)
        place = owner.forget(key)
        columns = [np.array([value], np.uint64) for value in place]
        await tier.remove(named(key, NBYTES, *columns))
        await tier._logs[0]._appenders["fast"].seal()
        await store(tier, owner, 1, 3, retention_class="slow")
        # The segment with the tombstone goes while the first version is still there.
        assert await tier.reclaim_oldest()
        await tier.close()
        found = IndexOwner()
        again = nvme_tier([tmp_path / "0"], threads, owner=found, max_nbytes=8 * MIB)
        await started(again, found)
        assert key not in found.places
        assert len(found.places) == 2
        # With every older record gone, it goes too.
        await settle(again)
        await again.close()
        last = IndexOwner()
        final = nvme_tier([tmp_path / "0"], threads, owner=last, max_nbytes=8 * MIB)
        await started(final, last)
        assert key not in last.newest
        assert len(last.places) == 2
        await final.close()

    asyncio.run(run())


class SlowReads(DiskFiles):
    """Reads wait until they are let go."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()

    def preadv(self, fd, into, offset):
        self.waiting.set()
        self.gate.wait(30)
        return super().preadv(fd, into, offset)


def test_a_segment_that_goes_while_it_is_read_keeps_its_file_until_then(make, owner, tmp_path):
    """B017: a slow read of what is reclaimed meanwhile gets the right bytes."""
    files = SlowReads()
    tier = make(files=files)

    async def run():
        await started(tier, owner)
        stored = await store(tier, owner, 4, 1)
        await tier.seal()
        files.gate.clear()
        files.waiting.clear()
        reading = asyncio.create_task(get(tier, owner, list(stored), NBYTES))
        await asyncio.to_thread(files.waiting.wait, 30)
        (segment,) = tier._logs[0].directory.table.segments.values()
        tier._logs[0].directory.table.retire(segment)
        await tier._logs[0].directory.unlink_retired()
        assert list(tmp_path.glob("0/*.kvks")), "somebody reads it"
        assert tier.stats().directories[0].waiting_to_go == 1
        tier.check()
        files.gate.set()
        got = await reading
        assert all(got[key] == (ReadStatus.HIT, data) for key, data in stored.items())
        await tier._logs[0].directory.unlink_retired()
        assert not list(tmp_path.glob("0/*.kvks"))
        assert tier.stats().directories[0].used_nbytes == 0
        assert await get(tier, owner, list(stored)[:1], NBYTES) == {
            next(iter(stored)): (ReadStatus.MISS, bytes(NBYTES))
        }
        await tier.close()

    asyncio.run(run())


def test_a_file_that_somebody_removed_is_a_miss_and_its_owner_is_told(make, owner, tmp_path):
    tier = make(open_max=0)

    async def run():
        await started(tier, owner)
        stored = await store(tier, owner, 3, 1)
        await tier.seal()
        tier._logs[0].directory.table.close_all()
        (path,) = tmp_path.glob("0/*.kvks")
        path.unlink()
        got = await get(tier, owner, list(stored), NBYTES)
        assert {answer[0] for answer in got.values()} == {ReadStatus.MISS}
        assert owner.segments_lost == [int(path.stem, 16)]
        await tier._logs[0].directory.unlink_retired()
        tier.check()
        assert tier.stats().directories[0].used_nbytes == 0
        await tier.close()

    asyncio.run(run())


def test_few_files_are_open_at_a_time(make, owner):
    tier = make(open_max=2, max_nbytes=16 * MIB)

    async def run():
        await started(tier, owner)
        parts = []
        for seed in range(10):
            parts.append(await store(tier, owner, 2, seed))
            await tier.seal()
        for part in parts * 2:
            assert await all_hits(tier, owner, part)
            table = tier._logs[0].directory.table
            assert sum(segment.fd >= 0 for segment in table.segments.values()) <= 2
        await tier.close()

    asyncio.run(run())


def test_a_batch_keeps_its_segment_until_it_is_committed(make, owner):
    tier = make()

    async def run():
        await started(tier, owner)
        blocks, contents = blocks_of(2, nbytes=NBYTES)
        with tier.reserve(NBYTES, 2) as batch:
            await batch.write(blocks, [memoryview(data) for data in contents])
            await tier.seal()
            assert not await tier.reclaim_oldest(), "nobody knows yet that it is wanted"
            stamps = batch.commit()
        for key, location, stamp in zip(keys_of(blocks), batch.locations, stamps, strict=True):
            owner.store(key, location, stamp)
        assert await tier.reclaim_oldest()
        assert await all_hits(tier, owner, dict(zip(keys_of(blocks), contents, strict=True)))
        await tier.close()

    asyncio.run(run())
