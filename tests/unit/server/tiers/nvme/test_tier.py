"""The nvme tier as a whole: group commit, limits, reclaim, what goes on behind."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvkeep_server.core.errors import InvalidArgumentError, TierUnavailableError
from kvkeep_server.core.results import TierId
from kvkeep_server.tiers.base import ReadStatus
from kvkeep_server.tiers.nvme.files import DiskFiles
from kvkeep_server.tiers.nvme.segments import SegmentState
from tests.fakes.faulty_files import FaultyFiles
from tests.fakes.nvme_blocks import blocks_of, named, slots
from tests.fakes.nvme_tier import (
    MIB,
    NBYTES,
    IndexOwner,
    all_hits,
    disk_nbytes,
    get,
    keys_of,
    put,
    started,
    stop,
    store,
    until,
)


def test_it_is_the_nvme_tier(make):
    assert make().tier_id == TierId.NVME


# --- writing --------------------------------------------------------------------------------------


def test_one_sync_serves_all_who_wait(make, owner):
    tier = make(max_nbytes=16 * MIB, segment_nbytes=8 * MIB)

    async def run():
        await started(tier, owner)
        await store(tier, owner, 1, 100)
        before = tier.stats().counts.syncs
        stored = await asyncio.gather(*(store(tier, owner, 2, seed) for seed in range(20)))
        syncs = tier.stats().counts.syncs - before
        for part in stored:
            assert await all_hits(tier, owner, part)
        await tier.close()
        return syncs

    assert asyncio.run(run()) <= 2


def test_blocks_of_one_batch_lie_next_to_each_other_in_chain_order(make, owner):
    tier = make(max_nbytes=64 * MIB, segment_nbytes=16 * MIB)

    async def run():
        await started(tier, owner)
        await asyncio.gather(*(store(tier, owner, 16, seed) for seed in range(4)))
        for seed in range(4):
            keys = keys_of(blocks_of(16, nbytes=NBYTES, seed=seed)[0])
            pages = np.array([owner.places[key][0] for key in keys])
            assert (np.diff(pages) == 16).all()
        await tier.close()

    asyncio.run(run())


def test_a_run_is_read_with_one_call(make, owner):
    files = FaultyFiles()
    tier = make(files=files, max_nbytes=64 * MIB, segment_nbytes=16 * MIB)

    async def run():
        await started(tier, owner)
        stored = await store(tier, owner, 30, 1)
        reads = []
        files.plan = lambda name, _number: reads.append(name) or 0
        assert await all_hits(tier, owner, stored)
        await tier.close()
        return reads.count("preadv")

    assert asyncio.run(run()) == 1


@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize("nbytes", [512, 4096, 58_368, 113_920, 131_072])
def test_sources_and_targets_of_any_alignment(make, owner, nbytes, shift):
    tier = make()

    async def run():
        await started(tier, owner)
        blocks, contents = blocks_of(3, nbytes=nbytes)
        sources = slots(3, nbytes, shift=shift)
        for source, data in zip(sources, contents, strict=True):
            source[:] = data
        await put(tier, owner, blocks, contents, sources=sources)
        places = np.array([owner.places[key] for key in keys_of(blocks)], np.uint64)
        targets = slots(3, nbytes, shift=shift)
        where = replace(blocks, locations=places[:, 0].copy(), stamps=places[:, 1].copy())
        assert (await tier.read(where, targets) == ReadStatus.HIT).all()
        assert [bytes(target) for target in targets] == contents
        await tier.close()

    asyncio.run(run())


def test_the_slot_behind_a_block_is_not_touched(make, owner):
    """The last page of a payload goes through memory of our own: a slot may be the block's size."""
    tier = make()
    region = memoryview(bytearray(b"#" * 3 * 8192))

    async def run():
        await started(tier, owner)
        stored = await store(tier, owner, 1, 1, nbytes=5000)
        ((key, data),) = stored.items()
        place = owner.places[key]
        blocks = named(key, 5000, *(np.array([value], np.uint64) for value in place))
        for start in range(4096):
            await tier.read(blocks, [region[start : start + 5000]])
            assert region[start : start + 5000] == data
            assert region[start + 5000] == ord("#")
            region[start : start + 5000] = b"#" * 5000
        await tier.close()

    asyncio.run(run())


@pytest.mark.promise("P25", gate=12, unit="positions of the bad block")
def test_whichever_block_is_bad_each_has_its_own_status(make, owner, tmp_path):
    """Block k of n: never a buffer called filled that is not."""
    tier = make()

    async def run():
        await started(tier, owner)
        stored = await store(tier, owner, 12, 1)
        places = dict(owner.places)
        (path,) = tmp_path.glob("0/*.kvks")
        good = path.read_bytes()
        (segment,) = tier._logs[0].directory.table.segments.values()
        for bad in stored:
            image = bytearray(good)
            image[(places[bad][0] & 0xFFFFFFFF) * 4096 + 4096 + 100] ^= 1
            path.write_bytes(image)
            owner.places = dict(places)
            segment.dead.clear()
            got = await get(tier, owner, list(stored), NBYTES)
            assert got.pop(bad)[0] == ReadStatus.CORRUPT
            assert all(got[key] == (ReadStatus.HIT, stored[key]) for key in got)
        await tier.close()

    asyncio.run(run())


def test_more_than_may_be_queued_is_turned_away(make, owner):
    tier = make(settings={"writing_max_nbytes": 3 * NBYTES, "reading_max_nbytes": 3 * NBYTES})

    async def run():
        await started(tier, owner)
        with tier.reserve(NBYTES, 10) as first, tier.reserve(NBYTES, 10) as second:
            assert len(first.locations) == 3
            assert len(second.locations) == 0
        stored = await store(tier, owner, 3, 1)
        blocks = named(
            b"".join(stored),
            NBYTES,
            *np.array([owner.places[key] for key in stored], np.uint64).T.copy(),
        )
        both = await asyncio.gather(
            *(tier.read(blocks, slots(3, NBYTES)) for _ in range(2)),
        )
        assert sorted(set(np.concatenate(both).tolist())) == [ReadStatus.HIT, ReadStatus.THROTTLED]
        assert tier.stats().counts.throttled == 7 + 10 + 3
        await tier.close()

    asyncio.run(run())


def test_a_block_above_a_segment_is_refused_by_name(make):
    tier = make()
    with pytest.raises(InvalidArgumentError, match="one segment of the nvme tier"):
        tier.reserve(tier.block_nbytes_max + 1, 1)


def test_the_largest_block_fits(make, owner):
    tier = make()

    async def run():
        await started(tier, owner)
        stored = await store(tier, owner, 1, 1, nbytes=tier.block_nbytes_max)
        assert await all_hits(tier, owner, stored, tier.block_nbytes_max)
        await tier.close()

    asyncio.run(run())


def test_what_is_not_durable_is_synced_behind(make, owner):
    tier = make()

    async def run():
        await started(tier, owner)
        behind = asyncio.create_task(tier.run())
        stored = await store(tier, owner, 3, 1, durable=False)
        assert await all_hits(tier, owner, stored)
        await until(lambda: tier.stats().counts.syncs)
        await stop(behind)
        await tier.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_sealing_meets_writing(make, owner):
    """A segment that is sealed takes nothing: what comes meanwhile goes into the next."""
    tier = make(max_nbytes=32 * MIB)

    async def run():
        await started(tier, owner)
        stored = {}
        for seed in range(12):
            parts = await asyncio.gather(
                store(tier, owner, 2, 3 * seed),
                tier.seal(),
                store(tier, owner, 2, 3 * seed + 1),
                tier.seal(),
                store(tier, owner, 2, 3 * seed + 2),
            )
            for part in parts:
                stored |= part or {}
        assert len(stored) == 72
        assert await all_hits(tier, owner, stored)
        await tier.close()
        found = IndexOwner()
        again = make(max_nbytes=32 * MIB)
        await started(again, found)
        assert found.places == owner.places
        await again.close()

    asyncio.run(run())


# --- limits ---------------------------------------------------------------------------------------


async def store_all(tier, owner, count, seed):
    """Stores, and tries again while reclaim has to make room first."""
    for _ in range(500):
        stored = await store(tier, owner, count, seed)
        if len(stored) == count:
            return stored
        await asyncio.sleep(0.01)
    raise AssertionError("no room ever")


class MostTaken(DiskFiles):
    """Knows the most that a directory ever took, all files in it together."""

    def __init__(self):
        super().__init__()
        self.most_nbytes = 0

    def allocate(self, fd, nbytes):
        super().allocate(fd, nbytes)
        place = Path(os.readlink(f"/proc/self/fd/{fd}")).parent
        taken = sum(one.disk_nbytes for one in self.listing(str(place)))
        self.most_nbytes = max(self.most_nbytes, taken)


@pytest.mark.promise("P15", gate=40, unit="batches into a tier of 8 segments")
@pytest.mark.parametrize("directories", [1, 2])
def test_usage_stays_below_the_limit_and_equals_the_disk(make, owner, tmp_path, directories):
    files, limit = MostTaken(), 8 * MIB // directories
    tier = make(directories, max_nbytes=limit, files=files)

    async def run():
        await started(tier, owner)
        behind = asyncio.create_task(tier.run())
        wanted = {}
        for seed in range(40):
            stored = await store_all(tier, owner, 8, seed)
            # Of each batch one block is wanted for ever, the others are soon forgotten.
            for key in list(stored)[1:] if seed < 36 else ():
                owner.forget(key)
                del stored[key]
            wanted |= stored
            used = sum(one.used_nbytes for one in tier.stats().directories)
            assert used <= 8 * MIB
            assert disk_nbytes(tmp_path) <= 8 * MIB
        await stop(behind)
        assert limit - MIB < files.most_nbytes <= limit
        assert await all_hits(tier, owner, wanted)
        for log in tier._logs:
            await log.close()
            await log.directory.unlink_retired()
        tier.check()
        used = sum(one.used_nbytes for one in tier.stats().directories)
        assert used == disk_nbytes(tmp_path)
        counts = tier.stats().counts
        await tier.close()
        return counts

    counts = asyncio.run(asyncio.wait_for(run(), 100))
    assert counts.reclaimed > 5
    assert counts.reinserted > 20
    assert counts.disk_nbytes > counts.user_nbytes >= 320 * NBYTES


@pytest.mark.promise("P15", gate=3, unit="restarts with smaller limits")
def test_it_shrinks_behind_after_a_restart_with_a_smaller_limit(make, owner, tmp_path):
    async def fill():
        tier = make(max_nbytes=8 * MIB)
        await started(tier, owner)
        for seed in range(15):
            await store(tier, owner, 8, seed)
        await tier.close()

    async def shrink(segments):
        tier = make(max_nbytes=segments * MIB)
        await started(tier, owner)
        behind = asyncio.create_task(tier.run())
        await until(lambda: tier.stats().directories[0].used_nbytes <= segments * MIB)
        await stop(behind)
        await tier._logs[0].close()
        await tier._logs[0].directory.unlink_retired()
        assert disk_nbytes(tmp_path) <= segments * MIB
        tier.check()
        await tier.close()

    asyncio.run(fill())
    before = disk_nbytes(tmp_path)
    assert before > 6 * MIB
    for segments in (5, 3, 2):
        asyncio.run(asyncio.wait_for(shrink(segments), 60))


def test_the_file_system_keeps_its_reserve(make, owner):
    class Small(DiskFiles):
        def free_nbytes(self, directory):
            return 3 * MIB

    tier = make(files=Small(), free_min_nbytes=2 * MIB + 1)

    async def run():
        await started(tier, owner)
        assert "nvme.free_min" in tier.stats().directories[0].sick
        with pytest.raises(TierUnavailableError, match=r"nvme\.free_min"):
            await store(tier, owner, 1, 1)
        tier.check()
        await tier.close()

    asyncio.run(run())


# --- several directories --------------------------------------------------------------------------


def test_a_sick_directory_leaves_the_work_to_the_others(make, owner, tmp_path):
    class OneSick(DiskFiles):
        def pwritev(self, fd, buffers, offset):
            path = f"/proc/self/fd/{fd}"
            if "/0/" in os.readlink(path):
                raise OSError(5, "Input/output error")
            super().pwritev(fd, buffers, offset)

    tier = make(2, files=OneSick(), max_nbytes=8 * MIB, settings={"probe_interval_s": 1000})

    async def run():
        await started(tier, owner)
        stored = {}
        for seed in range(6):
            stored |= await store(tier, owner, 2, seed)
        assert len(stored) >= 10, "one batch found out"
        assert await all_hits(tier, owner, stored)
        sick = [bool(one.sick) for one in tier.stats().directories]
        assert sick == [True, False]
        await tier.close()

    asyncio.run(run())


def test_stats_are_a_value(make, owner):
    tier = make()

    async def run():
        await started(tier, owner)
        before = tier.stats()
        await store(tier, owner, 2, 1)
        assert before.counts.user_nbytes == 0
        after = tier.stats()
        assert after.counts.user_nbytes == 2 * NBYTES
        assert after.directories[0].segments == {SegmentState.ACTIVE: 1}
        await tier.close()

    asyncio.run(run())
