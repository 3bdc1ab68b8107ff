"""What the ram tier adds to the Tier contract: odd and even, growth, steals, figures."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvkeep_server.core.errors import InvalidArgumentError
from kvkeep_server.core.huge_pages import HugePages
from kvkeep_server.core.memory_limit import MemoryLimit
from kvkeep_server.tiers.ram.pool import Pool, PoolSettings
from kvkeep_server.tiers.ram.tier import RamTier

PAGE = 4096
MIB = 1 << 20


class ManualClock:
    def __init__(self):
        self.now = 100.0

    def monotonic_s(self):
        return self.now

    def wall_s(self):
        return self.now


class Memory:
    def __init__(self):
        self.free_nbytes = 32 << 30

    def __call__(self):
        return MemoryLimit(64 << 30, self.free_nbytes, "memory of a test")


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def told():
    return []


@pytest.fixture
def tier(clock, memory, told):
    pool = Pool(
        settings=PoolSettings(8 * MIB, 2 * MIB, MIB, 1), memory_limit=memory, on_chunk=told.append
    )
    with ThreadPoolExecutor(1) as executor:
        huge_pages = HugePages(executor, wanted=True)
        tier = RamTier(
            pool=pool, slab_nbytes=MIB, executor=executor, clock=clock, huge_pages=huge_pages
        )
        yield tier
        tier.check()
        pool.close()


def grown(tier, chunks=1):
    async def grow():
        for _ in range(chunks):
            assert await tier.grow()

    asyncio.run(grow())
    return tier


def test_generations_are_odd_from_reserve_to_commit(tier):
    grown(tier)
    with tier.reserve(PAGE, 3) as slots:
        assert (tier.generations(slots.addresses) % 2 == 1).all()
        for buffer in slots.buffers:
            buffer[:] = b"k" * PAGE
        given = slots.commit()
    assert (given % 2 == 0).all()
    assert (tier.generations(slots.addresses) == given).all()


def test_a_freed_slot_keeps_its_generation_until_it_is_reserved_again(tier):
    grown(tier)
    with tier.reserve(PAGE, 1) as slots:
        given = slots.commit()
    tier.free(slots.addresses)
    assert (tier.generations(slots.addresses) == given).all()
    with tier.reserve(PAGE, 1) as again:
        assert again.addresses.tolist() == slots.addresses.tolist()
        assert (tier.generations(slots.addresses) != given).all()


def test_commit_of_some_gives_the_others_back(tier):
    grown(tier)
    with tier.reserve(PAGE, 4) as slots:
        given = slots.commit(np.array([True, False, True, False]))
    kept = slots.addresses[[0, 2]]
    assert (tier.generations(kept) == given).all()
    assert tier.stats().used_nbytes == 2 * PAGE
    tier.free(kept)


def test_leaving_without_commit_gives_the_room_back(tier):
    grown(tier)
    with pytest.raises(RuntimeError), tier.reserve(PAGE, 4) as slots:
        raise RuntimeError
    assert tier.stats().used_nbytes == 0
    assert (tier.generations(slots.addresses) % 2 == 1).all()
    slots.abort()


def test_a_second_commit_is_a_bug(tier):
    grown(tier)
    slots = tier.reserve(PAGE, 1)
    slots.commit()
    with pytest.raises(AssertionError):
        slots.commit()


def test_reserve_gives_fewer_when_full(tier):
    assert len(tier.reserve(PAGE, 3).addresses) == 0, "no chunk yet"
    grown(tier)
    # a chunk of 2 MiB: header page, one page of generations, a slab of 1 MiB and one of 1016 KiB
    assert len(tier.reserve(MIB, 3).addresses) == 1


@pytest.mark.parametrize("nbytes", [0, -1, MIB + 1])
def test_a_block_that_never_fits_is_refused(tier, nbytes):
    with pytest.raises(InvalidArgumentError, match=rf"block_nbytes is {nbytes}; .* 1 to {MIB} "):
        tier.reserve(nbytes, 1)


def test_it_grows_to_its_limit_and_no_further(tier, told):
    async def run():
        for chunks in range(1, 5):
            assert await tier.grow()
            assert len(told) == chunks
        assert not await tier.grow()

    asyncio.run(run())
    assert len(told) == 4
    assert tier.stats().nbytes == 8 * MIB
    assert not tier.pool.can_grow


def test_growth_is_one_flight(tier, told):
    async def run():
        await asyncio.gather(*(tier.grow() for _ in range(10)))

    asyncio.run(run())
    assert len(told) == 1


def test_a_cancelled_waiter_does_not_stop_the_growth(tier, told, monkeypatch):
    release = threading.Event()
    real = tier.pool.make_chunk

    def slow():
        assert release.wait(10)
        return real()

    monkeypatch.setattr(tier.pool, "make_chunk", slow)

    async def run():
        first = asyncio.create_task(tier.grow())
        second = asyncio.create_task(tier.grow())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        release.set()
        assert await second

    asyncio.run(run())
    assert len(told) == 1


def test_a_refused_growth_is_reported_and_tried_again_later(tier, memory, clock, told):
    memory.free_nbytes = 0
    asked = []
    real = tier.pool.make_chunk
    tier.pool.make_chunk = lambda: (asked.append(1), real())[1]

    async def run():
        assert not await tier.grow()
        assert "lower ram.size" in tier.stats().growth_refused
        memory.free_nbytes = 32 << 30
        assert not await tier.grow(), "not at once again"
        assert len(asked) == 1
        clock.now += 2.0
        assert await tier.grow()

    asyncio.run(run())
    assert tier.stats().growth_refused == ""
    assert len(told) == 1


def test_recut_slots_are_odd_for_late_readers(tier):
    grown(tier)
    with tier.reserve(PAGE, 256) as slots:
        slots.commit()
    with tier.reserve(PAGE, 200) as rest:
        rest.commit()
    tier.free(slots.addresses)
    assert len(tier.reserve(MIB, 1).addresses) == 1, "the empty slab is cut anew"
    assert (tier.generations(slots.addresses) % 2 == 1).all()
    assert (tier.generations(rest.addresses) % 2 == 0).all()


def test_a_slab_is_stolen_from_another_size(tier):
    grown(tier)
    with tier.reserve(PAGE, 400) as slots:
        slots.commit()
    assert len(tier.reserve(MIB, 1).addresses) == 0
    pinned = slots.addresses[:1]
    assert tier.steal_candidate(MIB, lambda asked: np.isin(asked, pinned)) is None
    victims = tier.steal_candidate(MIB, lambda asked: np.zeros(len(asked), bool))
    tier.free(victims)
    assert len(tier.reserve(MIB, 1).addresses) == 1


def test_figures_add_up_and_padding_is_reported(tier):
    # B075: the pool takes what was configured; what an odd block size costs is in the figures.
    grown(tier, chunks=4)
    nbytes = 100_001
    count = tier.slabs.room(nbytes)
    slots = tier.reserve(nbytes, count)
    stats = tier.stats()
    assert stats.nbytes == stats.limit_nbytes == 8 * MIB
    assert stats.padding_nbytes == count * (tier.slot_nbytes(nbytes) - nbytes)
    assert count * nbytes + stats.padding_nbytes == stats.used_nbytes
    assert stats.header_nbytes == 4 * 2 * PAGE
    tier.check()
    slots.abort()
    assert tier.stats().padding_nbytes == 0


def test_view_is_what_the_buffers_are(tier):
    grown(tier)
    with tier.reserve(100, 2) as slots:
        slots.buffers[1][:] = b"b" * 100
        assert tier.view(int(slots.addresses[1]), 100) == b"b" * 100
        assert tier.view(int(slots.addresses[0]), 100) == bytes(100)
