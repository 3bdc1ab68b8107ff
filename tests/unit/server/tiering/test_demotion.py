"""Demotion while others commit: what is on its way to nvme may get another shard, also above."""

import asyncio
import random
import time
from contextlib import ExitStack

import pytest

from kvkeep_server.core.results import AckLevel, CommitStatus, GroupKind, StateMode, TierId
from kvkeep_server.service.spec import GroupSpec
from kvkeep_server.tiers.nvme.files import DiskFiles
from tests.fakes.core_harness import MIB, Harness, block_of, full, keys_of, salt_of, spec
from tests.fakes.nvme_tier import fast_directory, until

STORED = CommitStatus.STORED
NBYTES = 4096


WINDOW = GroupSpec("swa", GroupKind.WINDOW, 16, 3000, 40)
REPLAYABLE = GroupSpec("state", GroupKind.STATE, 16, 5000, 0, StateMode.REPLAYABLE)
EXACT = GroupSpec("mamba", GroupKind.STATE, 32, 2000, 0, StateMode.EXACT)


@pytest.fixture
def core_on():
    """Makes a core over files of a kind."""
    with fast_directory() as path, ExitStack() as made:
        extra = (
            f'[nvme]\ndirectories = ["{path}/kv"]\nmax = "64MiB"\nsegment = "4MiB"\n'
            'free_min = "0B"\nqueue = "32MiB"'
        )
        yield lambda files: made.enter_context(
            Harness(ram="32MiB", slab="256KiB", extra=extra, files=files)
        )


@pytest.fixture
def core(core_on):
    return core_on(DiskFiles)


class Held:
    """Holds what demotion writes, until it is opened."""

    def __init__(self, demotion, after=0):
        self.begun, self.opened = asyncio.Event(), asyncio.Event()
        self._passing = after
        self._write = demotion._write_batch
        demotion._write_batch = self._hold

    async def _hold(self, batch, blocks):
        self._passing -= 1
        if self._passing < 0:
            self.begun.set()
            await self.opened.wait()
        return await self._write(batch, blocks)


async def stored(core, session, opened, keys, **how):
    rank, parent, ack = how["rank"], how.get("parent", b""), how.get("ack", AckLevel.RAM)
    core.ack = ack
    blocks = [block_of(key, NBYTES, salt_of(rank, 0)) for key in keys]
    groups = core.lay(session, opened, [blocks])
    return await core.commit(session, opened, keys, groups, parent=parent, rank=rank)


@pytest.mark.parametrize("waits", [AckLevel.NVME, AckLevel.RAM])
def test_ancestors_that_get_a_shard_meanwhile_do_not_fail_their_descendants(core, waits):
    """Their shard was queued behind who waited for it, and who waited tried in vain for a second:
    both failed. One client does that: one rank's tail, then the other rank's head."""

    async def story():
        one, other = await core.attach(MIB), await core.attach(MIB)
        wanted, keys = spec(tp_size=2), keys_of("a", 10)
        opened = core.open(one, wanted)
        core.open(other, wanted)
        status = await stored(core, one, opened, keys[:8], rank=0, ack=AckLevel.NVME)
        assert status == [STORED] * 8
        held = Held(core.core.nvme.demotion)
        parent = keys[7]
        tail = asyncio.create_task(
            stored(core, one, opened, keys[8:], rank=0, parent=parent, ack=waits)
        )
        await held.begun.wait()
        head = asyncio.create_task(stored(core, other, opened, keys[:8], rank=1, ack=AckLevel.NVME))
        await blocks_in_ram(core, 18)
        held.opened.set()
        assert await tail == [STORED] * 2
        assert await head == [STORED] * 8

    core.run(story())
    columns, counts = core.core.residency.columns, core.core.nvme.demotion.counts
    core.run(core.core.nvme.demotion.settle())
    assert columns.recorded(columns.in_use()).all()
    assert (counts.written, counts.failed) == (18, 0)
    core.check_at_rest()


def test_a_shard_that_comes_while_its_unit_is_written_undoes_nothing(core):
    """Two ranks of one host store the same keys at once, as a rule."""

    async def story():
        one, other = await core.attach(MIB), await core.attach(MIB)
        wanted, keys = spec(tp_size=2), keys_of("a", 8)
        opened = core.open(one, wanted)
        core.open(other, wanted)
        held = Held(core.core.nvme.demotion)
        first = asyncio.create_task(stored(core, one, opened, keys, rank=0, ack=AckLevel.NVME))
        await held.begun.wait()
        second = asyncio.create_task(stored(core, other, opened, keys, rank=1, ack=AckLevel.NVME))
        await blocks_in_ram(core, 16)
        held.opened.set()
        assert await first == await second == [STORED] * 8

    core.run(story())
    assert core.core.nvme.demotion.counts.written == 16
    assert core.core.nvme.tier.stats().counts.user_nbytes == 16 * NBYTES
    core.check_at_rest()


def test_a_shard_that_comes_to_a_unit_of_a_piece_that_was_written(core, monkeypatch):
    """A long commit is written in pieces; the first one is not looked at for the last time then."""
    monkeypatch.setattr("kvkeep_server.tiering.demotion._BATCH_NBYTES_MAX", 8 * NBYTES)

    async def story():
        one, other = await core.attach(MIB), await core.attach(MIB)
        wanted, keys = spec(tp_size=2), keys_of("a", 12)
        opened = core.open(one, wanted)
        core.open(other, wanted)
        held = Held(core.core.nvme.demotion, after=2)
        first = asyncio.create_task(stored(core, one, opened, keys, rank=0, ack=AckLevel.NVME))
        await held.begun.wait()
        assert core.core.residency.held[TierId.NVME].blocks == 8
        second = asyncio.create_task(
            stored(core, other, opened, keys[:4], rank=1, ack=AckLevel.NVME)
        )
        await blocks_in_ram(core, 16)
        held.opened.set()
        assert await first == [STORED] * 12
        assert await second == [STORED] * 4

    core.run(story())
    core.check_at_rest()


def test_what_waits_for_room_in_the_queue_stays(core, monkeypatch):
    """Nothing but its place in ram had it, and eviction took that."""
    demotion = core.core.nvme.demotion
    monkeypatch.setattr(demotion, "_has_room", lambda *_: False)

    async def story():
        session = await core.attach(MIB)
        opened, keys = core.open(session, spec()), keys_of("a", 8)
        waiting = asyncio.create_task(
            stored(core, session, opened, keys, rank=0, ack=AckLevel.NVME)
        )
        await blocks_in_ram(core, 8)
        for _ in range(3):
            await asyncio.sleep(0)
        core.core.residency.evict(100)
        monkeypatch.undo()
        # Another store ends, and who waits is woken.
        late = keys_of("b", 1)
        assert await stored(core, session, opened, late, rank=0, ack=AckLevel.NVME) == [STORED]
        assert await waiting == [STORED] * 8

    core.run(story())
    core.check_at_rest()


async def blocks_in_ram(core, count):
    await until(lambda: core.core.residency.held[TierId.RAM].blocks == count)


class SlowToSync(DiskFiles):
    """As a disk of a rented machine."""

    def fdatasync(self, fd):
        time.sleep(0.03)
        super().fdatasync(fd)


@pytest.mark.parametrize("seed", [6, 11])
def test_random_stores_of_one_client_on_a_slow_disk(core_on, seed):
    """Ranks, groups and ack levels in any order for the same keys: nothing fails."""
    core, source = core_on(SlowToSync), random.Random(seed)
    session = core.session(8 * MIB)
    opened = core.open(session, spec(groups=(full(), WINDOW, REPLAYABLE, EXACT), tp_size=2))
    for _ in range(60):
        core.ack = source.choice([AckLevel.RAM, AckLevel.RAM, AckLevel.NVME])
        keys = keys_of(source.randrange(6), 40)[: source.randrange(1, 41)]
        rank = source.randrange(2)
        counts = [min(len(keys), source.randrange(4)) for _ in range(3)]
        others = [sorted(source.sample(range(len(keys)), count)) for count in counts]
        status = core.put_at(session, opened, keys, [range(len(keys)), *others], rank=rank)
        assert set(status) <= {STORED, CommitStatus.ALREADY_STORED}
        core.check()
    core.run(core.core.nvme.demotion.settle())
    assert core.core.nvme.demotion.counts.failed == 0


def test_an_offer_of_nothing_queues_nothing(core):
    """Who waits for what is queued already waits for that."""
    demotion = core.core.nvme.demotion

    async def story():
        session = await core.attach(MIB)
        opened, keys = core.open(session, spec()), keys_of("a", 4)
        held = Held(demotion)
        await stored(core, session, opened, keys, rank=0)
        await held.begun.wait()
        units = core.core.residency.columns.in_use()
        again = [demotion.offer(units), demotion.offer(units[:0])]
        assert not demotion._queue
        assert not any(one.done() for one in again)
        held.opened.set()
        await asyncio.wait(again)
        assert core.core.residency.columns.recorded(units).all()
        assert demotion.offer(units).done()

    core.run(story())
