"""One suite over every Tier: what `kvkeep_server.tiers.base` promises, whoever implements it."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from kvkeep_server.core.clock import SystemClock
from kvkeep_server.core.errors import InvalidArgumentError
from kvkeep_server.core.huge_pages import HugePages
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.memory_limit import MemoryLimit
from kvkeep_server.core.results import TierId
from kvkeep_server.tiers.base import Blocks, Presence, ReadStatus, RemoveStatus, Tier, WriteStatus
from kvkeep_server.tiers.nvme.tier import NvmeTier
from kvkeep_server.tiers.ram.pool import Pool, PoolSettings
from kvkeep_server.tiers.ram.tier import RamTier
from tests.fakes.nvme_blocks import facts_of
from tests.fakes.nvme_tier import IndexOwner, settle
from tests.fakes.nvme_tier import nvme_tier as make_nvme_tier
from tests.fakes.tier import FakeTier

NBYTES = 5000
MIB = 1 << 20
NVME = {"segment_nbytes": 2 * MIB, "max_nbytes": 7 * MIB}


class KeepsAll(IndexOwner):
    """Whatever is not removed is wanted: the suite keeps no index."""

    def wanted(self, rows):
        return np.ones(len(rows), np.bool_)


def ram_tier(executor, _path) -> Tier:
    memory = MemoryLimit(64 << 30, 32 << 30, "memory of a test")
    pool = Pool(
        settings=PoolSettings(4 * MIB, 2 * MIB, MIB, 1),
        memory_limit=lambda: memory,
        on_chunk=lambda _: None,
    )
    tier = RamTier(
        pool=pool,
        slab_nbytes=MIB,
        executor=executor,
        clock=SystemClock(),
        huge_pages=HugePages(executor, wanted=False),
    )

    async def grow():
        while await tier.grow():
            pass

    asyncio.run(grow())
    return tier


def fake_tier(_executor, _path) -> Tier:
    return FakeTier(blocks_max=300, nbytes_max=MIB)


def nvme_tier(executor, path) -> Tier:
    tier = make_nvme_tier([path / "nvme"], executor, owner=KeepsAll(), **NVME)
    asyncio.run(tier.start())
    return tier


@pytest.fixture
def executor():
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(params=[ram_tier, nvme_tier, fake_tier], ids=lambda make: make.__name__)
def tier(request, executor, tmp_path):
    tier = request.param(executor, tmp_path)
    yield tier
    tier.check()
    if isinstance(tier, NvmeTier):
        asyncio.run(tier.close())


def content(seed, nbytes=NBYTES):
    return np.random.default_rng(seed).bytes(nbytes)


def named(count, locations=None, stamps=None, nbytes=NBYTES):
    """Blocks with these locations and stamps; both 0 while they are not known."""
    zeros = np.zeros(count, np.uint64)
    keys = KeyBatch.unpack(content(count, 32 * count), 32)
    return Blocks(
        namespace_id=bytes(16),
        group=0,
        keys=keys,
        nbytes=nbytes,
        locations=zeros if locations is None else locations,
        stamps=zeros if stamps is None else stamps,
    )


async def write(batch, contents):
    """Writes and returns the blocks, placed but not committed."""
    blocks = named(len(contents), nbytes=len(contents[0]) if contents else NBYTES)
    blocks = replace(blocks, facts=facts_of(blocks, contents))
    status = await batch.write(blocks, [memoryview(data) for data in contents])
    assert (status == WriteStatus.WRITTEN).all()
    return replace(blocks, locations=batch.locations)


def store(tier, contents):
    """Reserves, writes and commits; returns the blocks."""

    async def run():
        with tier.reserve(len(contents[0]), len(contents)) as batch:
            blocks = await write(batch, contents)
            return replace(blocks, stamps=batch.commit())

    return asyncio.run(run())


def read(tier, blocks):
    """The status of each block, and its bytes."""
    buffers = [bytearray(blocks.nbytes) for _ in range(len(blocks))]
    status = asyncio.run(tier.read(blocks, [memoryview(buffer) for buffer in buffers]))
    return status.tolist(), [bytes(buffer) for buffer in buffers]


def current(tier, blocks):
    """The blocks where a reclaim that `room` made has put them."""
    if not isinstance(tier, NvmeTier):
        return blocks
    places = list(zip(blocks.locations.tolist(), blocks.stamps.tolist(), strict=True))
    while any(place[0] in tier._owner.moves for place in places):
        places = [tier._owner.moves.get(place[0], place) for place in places]
    locations, stamps = np.array(places, np.uint64).T.copy()
    return replace(blocks, locations=locations, stamps=stamps)


async def room_now(tier):
    """How many blocks find room, now and in a log after it was reclaimed."""
    if isinstance(tier, NvmeTier):
        await settle(tier)
    with tier.reserve(NBYTES, 100_000) as batch:
        return len(batch.locations)


def room(tier):
    return asyncio.run(room_now(tier))


def test_what_was_written_is_read(tier):
    contents = [content(seed) for seed in range(7)]
    blocks = store(tier, contents)
    assert read(tier, blocks) == ([ReadStatus.HIT] * 7, contents)
    assert (tier.resident(blocks) == Presence.YES).all()


@pytest.mark.parametrize("nbytes", [1, 4096, 113_920, MIB])
def test_any_size_up_to_the_limit(tier, nbytes):
    contents = [content(seed, nbytes) for seed in range(2)]
    blocks = store(tier, contents)
    assert read(tier, blocks) == ([ReadStatus.HIT] * 2, contents)


def test_buffers_of_any_alignment(tier):
    data = content(1)
    blocks = store(tier, [memoryview(b"x" + data)[1:]])
    buffer = bytearray(NBYTES + 3)
    status = asyncio.run(tier.read(blocks, [memoryview(buffer)[3:]]))
    assert status.tolist() == [ReadStatus.HIT]
    assert buffer[3:] == data


def test_an_empty_batch_is_fine(tier):
    blocks = named(0)
    assert len(tier.resident(blocks)) == 0
    assert read(tier, blocks) == ([], [])
    assert len(asyncio.run(tier.remove(blocks))) == 0
    with tier.reserve(NBYTES, 0) as batch:
        assert len(asyncio.run(write(batch, []))) == 0
        assert len(batch.commit()) == 0


def test_an_uncommitted_block_is_never_readable(tier):
    async def run():
        with tier.reserve(NBYTES, 1) as batch:
            blocks = await write(batch, [content(1)])
            buffer = bytearray(NBYTES)
            assert (await tier.read(blocks, [memoryview(buffer)])).tolist() == [ReadStatus.MISS]
            assert tier.resident(blocks)[0] != Presence.YES
            return blocks

    blocks = asyncio.run(run())
    assert read(tier, blocks)[0] == [ReadStatus.MISS], "nor after the abort"


def test_an_unknown_block_is_a_miss(tier):
    stored = store(tier, [content(1)])
    wrong = [
        named(1),
        named(1, np.array([(1 << 64) - 1], np.uint64)),
        replace(stored, stamps=stored.stamps + np.uint64(2)),
        replace(stored, stamps=stored.stamps + np.uint64(1)),
    ]
    for blocks in wrong:
        assert read(tier, blocks)[0] == [ReadStatus.MISS]
        assert tier.resident(blocks)[0] != Presence.YES
        assert asyncio.run(tier.remove(blocks)).tolist() == [RemoveStatus.ABSENT]
    assert read(tier, stored)[0] == [ReadStatus.HIT]


def test_each_block_has_its_own_status(tier):
    contents = [content(seed) for seed in range(4)]
    blocks = store(tier, contents)
    locations = blocks.locations.copy()
    locations[[1, 3]] = 0
    status, got = read(tier, replace(blocks, locations=locations))
    assert status == [ReadStatus.HIT, ReadStatus.MISS, ReadStatus.HIT, ReadStatus.MISS]
    assert (got[0], got[2]) == (contents[0], contents[2])


def test_removed_is_gone_and_removing_again_is_fine(tier):
    blocks = store(tier, [content(seed) for seed in range(3)])
    keys = blocks.keys.slice(1, 2)
    one = replace(blocks, keys=keys, locations=blocks.locations[1:2], stamps=blocks.stamps[1:2])
    assert asyncio.run(tier.remove(one)).tolist() == [RemoveStatus.REMOVED]
    assert asyncio.run(tier.remove(one)).tolist() == [RemoveStatus.ABSENT]
    assert read(tier, blocks)[0] == [ReadStatus.HIT, ReadStatus.MISS, ReadStatus.HIT]


def test_removing_one_block_twice_in_a_call(tier):
    blocks = store(tier, [content(1)])
    twice = named(2, np.repeat(blocks.locations, 2), np.repeat(blocks.stamps, 2))
    status = sorted(asyncio.run(tier.remove(twice)).tolist())
    assert status == [RemoveStatus.REMOVED, RemoveStatus.ABSENT]


def test_the_room_of_removed_blocks_comes_back(tier):
    before = room(tier)
    blocks = store(tier, [content(1)] * 5)
    assert room(tier) == before - 5
    asyncio.run(tier.remove(current(tier, blocks)))
    assert room(tier) == before


def test_reserve_gives_fewer_when_full_and_locations_differ(tier):
    async def run():
        with tier.reserve(NBYTES, 100_000) as batch:
            count = len(batch.locations)
            assert 0 < count < 100_000
            assert await room_now(tier) == 0
            blocks = await write(batch, [content(1)] * count)
            assert len(set(blocks.locations.tolist())) == count

    asyncio.run(run())


def test_a_reused_location_does_not_answer_for_the_block_before(tier):
    before = room(tier)
    old = store(tier, [content(1)] * before)
    asyncio.run(tier.remove(old))
    assert room(tier) == before
    new = store(tier, [content(2)] * before)
    # A log never uses a place again.
    used_again = set() if isinstance(tier, NvmeTier) else set(new.locations.tolist())
    assert set(old.locations.tolist()) & set(new.locations.tolist()) == used_again
    assert read(tier, old)[0] == [ReadStatus.MISS] * before
    assert (tier.resident(old) != Presence.YES).all()
    assert (asyncio.run(tier.remove(old)) == RemoveStatus.ABSENT).all()
    assert read(tier, new)[0] == [ReadStatus.HIT] * before


@pytest.mark.parametrize("leave", ["abort", "exception", "neither"])
def test_without_commit_the_room_comes_back(tier, leave):
    before = room(tier)

    async def run():
        with tier.reserve(NBYTES, 3) as batch:
            assert await room_now(tier) == before - 3
            await write(batch, [content(1)] * 3)
            if leave == "abort":
                batch.abort()
                batch.abort()
            if leave == "exception":
                raise ZeroDivisionError

    if leave == "exception":
        with pytest.raises(ZeroDivisionError):
            asyncio.run(run())
    else:
        asyncio.run(run())
    assert room(tier) == before


def test_commit_of_some(tier):
    before = room(tier)
    contents = [content(seed) for seed in range(3)]
    kept = np.array([True, False, True])

    async def run():
        with tier.reserve(NBYTES, 3) as batch:
            blocks = await write(batch, contents)
            return blocks, batch.commit(kept)

    blocks, stamps = asyncio.run(run())
    assert len(stamps) == 2
    keys = blocks.keys.select(np.flatnonzero(kept))
    some = replace(blocks, keys=keys, locations=blocks.locations[kept], stamps=stamps)
    assert read(tier, some) == ([ReadStatus.HIT] * 2, [contents[0], contents[2]])
    assert room(tier) == before - 2


def test_a_second_commit_is_a_bug(tier):
    async def run():
        with tier.reserve(NBYTES, 1) as batch:
            await write(batch, [content(1)])
            batch.commit()
            batch.abort()  # nothing happens
            batch.commit()

    with pytest.raises(AssertionError):
        asyncio.run(run())


@pytest.mark.parametrize("nbytes", [0, -5, 1 << 40])
def test_a_size_that_never_fits_is_refused(tier, nbytes):
    with pytest.raises(InvalidArgumentError, match=str(nbytes)):
        tier.reserve(nbytes, 1)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_cancelled_call_is_over_when_it_ends(tier, executor, verb):
    """Nothing touches the caller's buffers any more, and no room is left behind."""
    before = room(tier) - 8
    stored = store(tier, [content(9)] * 8)
    release = threading.Event()
    for _ in range(2):  # both threads are busy, so a tier that copies in them has not begun
        executor.submit(release.wait, 10)

    async def read_all():
        await tier.read(stored, [memoryview(buffer) for buffer in buffers])

    async def write_all():
        with tier.reserve(NBYTES, 8) as batch:
            await batch.write(blocks, [memoryview(buffer) for buffer in buffers])

    buffers = [bytearray(NBYTES) for _ in range(8)]
    blocks = named(8)
    blocks = replace(blocks, facts=facts_of(blocks, buffers))

    async def run():
        task = asyncio.create_task(read_all() if verb == "read" else write_all())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        asyncio.get_running_loop().call_later(0.05, release.set)
        await asyncio.gather(task, return_exceptions=True)
        return [bytes(buffer) for buffer in buffers]

    seen = asyncio.run(run())
    release.set()
    executor.submit(lambda: None).result(10)
    assert [bytes(buffer) for buffer in buffers] == seen
    for buffer in buffers:
        buffer.append(0)  # raises BufferError while somebody still holds a view of it
    assert read(tier, stored)[0] == [ReadStatus.HIT] * 8
    assert room(tier) == before


def test_it_says_which_tier_it_is(tier):
    assert isinstance(tier.tier_id, TierId)
