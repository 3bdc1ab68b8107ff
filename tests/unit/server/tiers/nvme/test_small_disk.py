"""A file system with less room than the limit allows: the log gives its oldest back, as at the
limit, and says who wants it so."""

import asyncio
import contextlib

import numpy as np
import pytest

from kvkeep_server.core.errors import TierUnavailableError
from tests.fakes.faulty_files import SmallDisk
from tests.fakes.nvme_blocks import named
from tests.fakes.nvme_tier import (
    MIB,
    IndexOwner,
    nvme_tier,
    started,
    stop,
    until,
)
from tests.fakes.nvme_tier import all_hits as hits_of
from tests.fakes.nvme_tier import store as store_of

# Four fit a segment.
NBYTES = 240_000
COUNT = 4
PAUSE_S = 0.02


@pytest.fixture
def disk(tmp_path):
    return SmallDisk(tmp_path / "0", 10 * MIB)


@pytest.fixture
def small(make, disk):
    """Makes a tier that may take far more than the disk has."""

    def build(**options):
        return make(files=disk, max_nbytes=60 * MIB, **options)

    return build


@contextlib.asynccontextmanager
async def at_work(tier, owner):
    await started(tier, owner)
    behind = asyncio.create_task(tier.run())
    try:
        yield tier
    finally:
        await stop(behind)
    tier.check()
    await tier.close()


async def store(tier, owner, count, seed):
    return await store_of(tier, owner, count, seed, nbytes=NBYTES)


async def all_hits(tier, owner, stored):
    return await hits_of(tier, owner, stored, NBYTES)


async def store_all(tier, owner, seed, count=COUNT):
    """One block after the other, each as often as it takes."""
    stored = {}
    for number in range(count):
        for _ in range(200):
            with contextlib.suppress(TierUnavailableError):
                done = await store(tier, owner, 1, 1000 * seed + number)
                stored |= done
                if done:
                    break
            await asyncio.sleep(PAUSE_S)
    return stored


def sick(tier):
    return tier.stats().directories[0].sick


async def remove(tier, owner, key):
    place = owner.forget(key)
    await tier.remove(named(key, NBYTES, *(np.array([one], np.uint64) for one in place)))


@pytest.mark.parametrize("free_min", [0, 3 * MIB])
def test_a_full_file_system_gives_the_oldest_back(small, owner, disk, free_min):
    """It took no writes any more, for good."""
    tier = small(free_min_nbytes=free_min)
    owner.keep = lambda _key: False

    async def run():
        async with at_work(tier, owner):
            for seed in range(30):
                stored = await store_all(tier, owner, seed)
                assert len(stored) == COUNT, (seed, sick(tier))
                assert await all_hits(tier, owner, stored)
                assert not sick(tier)
            assert tier.stats().counts.reclaimed > 15
            assert "free_min" in tier.stats().directories[0].shortage
            assert free_min <= disk.least_nbytes < free_min + 2 * MIB

    asyncio.run(asyncio.wait_for(run(), 120))


def test_what_is_wanted_stays_there(small, owner):
    """Users leave the segment that reclaim needs to write it again."""
    tier = small()

    async def run():
        async with at_work(tier, owner):
            hot = await store_all(tier, owner, 1)
            owner.keep = hot.__contains__
            for seed in range(2, 30):
                await store_all(tier, owner, seed)
            assert await all_hits(tier, owner, hot)
            assert tier.stats().counts.reinserted >= COUNT
            assert tier.stats().counts.reinsert_failed == 0

    asyncio.run(asyncio.wait_for(run(), 120))


def test_others_that_fill_the_file_system(small, owner, disk, tmp_path, threads):
    """Below `free_min`: it gives back what it needs, and removals are on the medium."""
    tier = small(free_min_nbytes=2 * MIB)

    async def run():
        async with at_work(tier, owner):
            await store_all(tier, owner, 1)
            gone = await store_all(tier, owner, 2, 3)
            await store_all(tier, owner, 3, 3 * COUNT)
            await tier.seal()
            used = tier.stats().directories[0].used_nbytes
            disk.others_nbytes = 10 * MIB - used - MIB
            for key in gone:
                await remove(tier, owner, key)
            owner.keep = lambda _key: False
            assert len(await store_all(tier, owner, 4)) == COUNT
            assert tier.stats().counts.tombstones_lost == 0
            assert disk._left() >= 2 * MIB
            return gone

    gone = asyncio.run(asyncio.wait_for(run(), 120))

    async def again():
        found = IndexOwner()
        later = nvme_tier([tmp_path / "0"], threads, owner=found, max_nbytes=60 * MIB)
        await started(later, found)
        assert not gone.keys() & found.places.keys()
        await later.close()

    asyncio.run(again())


def test_more_to_be_left_free_than_there_is(small, owner, disk):
    """Nothing is given up for what cannot be had; it says so at once, and goes on by itself."""

    async def fill():
        async with at_work(small(), owner) as tier:
            return await store_all(tier, owner, 1, 2 * COUNT)

    stored = asyncio.run(fill())
    tier = small(free_min_nbytes=20 * MIB)

    async def run():
        await started(tier, owner)
        assert "nvme.free_min keeps 20MiB" in sick(tier)
        behind = asyncio.create_task(tier.run())
        with pytest.raises(TierUnavailableError, match=r"nvme\.free_min"):
            await store(tier, owner, 1, 99)
        await asyncio.sleep(0.3)
        assert tier.stats().counts.reclaimed == 0
        assert await all_hits(tier, owner, stored)
        await remove(tier, owner, next(iter(stored)))
        disk.nbytes = 40 * MIB
        await until(lambda: not sick(tier))
        assert await store(tier, owner, 1, 99)
        await stop(behind)
        tier.check()
        await tier.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_room_that_is_said_to_be_there_and_is_not(small, owner, disk):
    """As with a quota: one segment goes for each that was refused."""
    tier = small()
    owner.keep = lambda _key: False

    async def run():
        async with at_work(tier, owner):
            disk.hidden_nbytes = 5 * MIB
            for seed in range(12):
                stored = await store_all(tier, owner, seed)
                assert len(stored) == COUNT, (seed, sick(tier))
                assert await all_hits(tier, owner, stored)

    asyncio.run(asyncio.wait_for(run(), 120))
