"""Every system call of the tier fails once: nothing wrong is read, nothing acknowledged is lost,
and it heals by itself."""

import asyncio
import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvkeep_server.core.errors import KVKeepError, TierUnavailableError
from kvkeep_server.tiers.base import ReadStatus, WriteStatus
from kvkeep_server.tiers.nvme import files as module
from kvkeep_server.tiers.nvme.segment_format import (
    NUMBER_MAX,
    SegmentHeader,
    encode_segment_header,
)
from kvkeep_server.tiers.nvme.segments import SegmentState
from tests.fakes.faulty_files import SHORT_WRITE, FaultyFiles
from tests.fakes.nvme_blocks import blocks_of, named
from tests.fakes.nvme_tier import MIB, IndexOwner, fast_directory, get, nvme_tier, put, started

NBYTES = 30_000
EFFECTS = {
    "EIO": lambda _name: errno.EIO,
    "ENOSPC": lambda _name: errno.ENOSPC,
    "EROFS": lambda _name: errno.EROFS,
    "EMFILE": lambda _name: errno.EMFILE,
    "short write": lambda name: SHORT_WRITE if name == "pwritev" else 0,
}


class StillClock:
    """A clock that moves when it is told to."""

    def __init__(self):
        self.now_s = 1000.0

    def monotonic_s(self):
        return self.now_s

    def wall_s(self):
        return self.now_s + 1e9


class Story:
    """What one process does with the tier, and what it was promised."""

    def __init__(self, path, files):
        self.files = files
        self.clock = StillClock()
        self.owner = IndexOwner()
        self.threads = ThreadPoolExecutor(1)
        self.tier = nvme_tier(
            [path], self.threads, owner=self.owner, files=files, clock=self.clock, open_max=1
        )
        self.contents = {}  # key -> bytes of every key that ever was committed
        self.acked = set()  # durable and not removed

    async def store(self, seed, count, *, durable, retention_class="global"):
        blocks, contents = blocks_of(
            count, nbytes=NBYTES, seed=seed, retention_class=retention_class
        )
        keys = split(blocks)
        self.contents |= dict(zip(keys, contents, strict=True))
        try:
            status = await put(self.tier, self.owner, blocks, contents, durable=durable)
        except TierUnavailableError:
            return np.array([WriteStatus.FAILED])
        if durable:
            written = zip(keys, status.tolist(), strict=False)
            self.acked |= {key for key, answer in written if answer == WriteStatus.WRITTEN}
        return status

    async def remove(self, key):
        place = self.owner.forget(key)
        if place is not None:
            self.acked.discard(key)
            blocks = named(key, NBYTES, *(np.array([value], np.uint64) for value in place))
            try:
                await self.tier.remove(blocks)
            except TierUnavailableError:
                return

    async def read_all(self):
        got = await get(self.tier, self.owner, list(self.contents), NBYTES)
        for key, answer in got.items():
            if answer is not None and answer[0] == ReadStatus.HIT:
                assert answer[1] == self.contents[key], "wrong bytes"
        return got

    async def play(self):
        await started(self.tier, self.owner)
        await self.store(1, 8, durable=True)
        await self.store(2, 4, durable=False)
        await self.tier.seal()
        await self.store(3, 8, durable=True, retention_class="pinned")
        await self.store(4, 5, durable=True)
        await self.remove(next(iter(self.contents)))
        await self.read_all()
        self.tier._logs[0]._appenders["global"].begin_sync()
        await self.tier._logs[0]._appenders["global"].drain()
        await self.tier.reclaim_oldest()
        await self.store(5, 6, durable=True)
        await self.read_all()


def split(blocks):
    packed = blocks.keys.pack()
    return [packed[i : i + 32] for i in range(0, len(packed), 32)]


async def heals(story):
    """With sane files and the pause over, it takes writes again and its books are right."""
    story.files.plan = lambda _name, _number: 0
    story.clock.now_s += 100
    for seed in range(50, 53):
        # The first may be the probe of one class; room may have to be made first.
        status = await story.store(seed, 1, durable=True)
        if (status == WriteStatus.WRITTEN).all():
            break
        await story.tier.reclaim_oldest()
        story.clock.now_s += 100
    else:
        pytest.fail(f"does not heal: {story.tier.stats()}")
    await story.read_all()
    await story.tier._logs[0].directory.unlink_retired()
    story.tier.check()
    used = story.tier.stats().directories[0].used_nbytes
    assert used <= 4 * MIB


def live(path, files):
    """One life with faults, then healed and closed; what it was promised and told."""
    story = Story(path, files)

    async def run():
        try:
            await story.play()
        except (OSError, KVKeepError):
            assert not story.contents, "only the start may fail"
            return
        await heals(story)
        await story.tier.close()

    asyncio.run(run())
    story.threads.shutdown()
    return story


def afterlife(path, before):
    """The next process: every acknowledged block that nobody was told was lost is there. What it
    found."""
    story = Story(path, FaultyFiles())
    story.contents = before.contents

    async def run():
        await started(story.tier, story.owner)
        got = await story.read_all()
        story.tier.check()
        await story.tier.close()
        return got

    got = asyncio.run(run())
    story.threads.shutdown()
    lost = {key for key in before.acked if (got[key] or (0,))[0] != ReadStatus.HIT}
    told = {key for key in before.acked if key not in before.owner.places}
    assert lost <= told, f"{len(lost)} acknowledged blocks lost without a word"
    return {key: answer for key, answer in got.items() if answer}


@pytest.fixture
def fast_path():
    with fast_directory() as path:
        yield Path(path)


@pytest.mark.promise("P06", gate=1, unit="kinds of failure, at every call")
@pytest.mark.promise("P03", gate=1, unit="kinds of failure, at every call")
@pytest.mark.parametrize("effect", EFFECTS)
def test_every_call_fails_once(fast_path, effect):
    calls = []

    def note(name, _number):
        calls.append(name)
        return 0

    clean = live(fast_path / "clean", FaultyFiles(note))
    assert len(clean.acked) >= 27
    assert {"create", "pwritev", "fdatasync", "unlink", "preadv"} <= set(calls)
    for nth, name in enumerate(calls, start=1):
        code = EFFECTS[effect](name)
        if not code:
            continue
        path = fast_path / f"{nth}-{name}"
        files = FaultyFiles(lambda _name, number, nth=nth, code=code: code if number == nth else 0)
        story = live(path, files)
        afterlife(path, story)
        shutil.rmtree(path)


@pytest.mark.promise("P06", gate=1, unit="failed syncs")
def test_a_failed_sync_is_never_called_good(tmp_path):
    files = FaultyFiles()
    story = Story(tmp_path, files)

    async def run():
        await started(story.tier, story.owner)
        await story.store(1, 2, durable=True)
        await story.store(2, 3, durable=False)
        unsynced = set(story.owner.places) - story.acked
        files.plan = lambda name, _number: errno.EIO if name == "fdatasync" else 0
        assert (await story.store(3, 2, durable=True) == WriteStatus.FAILED).all()
        # Told of those that were readable and are lost with the segment's sync.
        assert not unsynced & set(story.owner.places)
        assert len(story.owner.dropped_places) == 3
        files.plan = lambda _name, _number: 0
        with pytest.raises(TierUnavailableError, match="Input/output error"):
            await story.tier.reserve(NBYTES, 1).write(blocks_of(1, nbytes=NBYTES)[0], [b""])
        story.clock.now_s += 1
        assert (await story.store(4, 2, durable=True) == WriteStatus.WRITTEN).all()
        directory = story.tier.stats().directories[0]
        assert directory.segments == {SegmentState.QUARANTINED: 1, SegmentState.ACTIVE: 1}
        assert story.tier.stats().counts.quarantined == 1
        got = await story.read_all()
        assert {key for key, answer in got.items() if answer} == story.acked
        await story.tier.close()

    asyncio.run(run())
    story.threads.shutdown()


@pytest.mark.parametrize("harm", ["removed", "cut", "cut a little"])
@pytest.mark.parametrize("ending", ["write", "seal"])
def test_an_active_segment_that_somebody_harms_takes_nothing_more(fast_path, harm, ending):
    """Commits were acknowledged into it, and gone with the process; so were removals."""
    story = Story(fast_path, FaultyFiles())

    async def run():
        await started(story.tier, story.owner)
        await story.store(1, 8, durable=True)
        await story.tier.seal()
        removed, kept = list(story.contents)[:2]
        await story.store(2, 2, durable=True)
        await story.remove(removed)
        place = max(fast_path.glob("*.kvks"))
        if harm == "removed":
            place.unlink()
        else:
            os.truncate(place, 0 if harm == "cut" else MIB - 4096)
        if ending == "write":
            assert (await story.store(3, 2, durable=True) == WriteStatus.WRITTEN).all()
        else:
            await story.tier.seal()
        assert story.owner.segments_lost == [int(place.stem, 16)]
        counts = story.tier.stats().counts
        assert (counts.vanished, counts.quarantined) == (1, 1)
        assert not story.tier.stats().directories[0].sick
        assert (await story.store(4, 2, durable=True) == WriteStatus.WRITTEN).all()
        await story.tier._logs[0].directory.unlink_retired()
        story.tier.check()
        # The process dies here; nobody closes the tier.
        story.tier._logs[0].directory.table.close_all()
        return removed, kept

    removed, kept = asyncio.run(run())
    for lock in story.tier._locks:
        lock.release()
    story.threads.shutdown()
    again = afterlife(fast_path, story)
    assert removed not in again
    assert again.keys() >= {kept} | set(list(story.contents)[10:])


@pytest.mark.parametrize("removal", [False, True])
def test_what_is_on_its_way_into_a_segment_that_vanishes_goes_into_the_next(fast_path, removal):
    """Also what was written before, of the same batch: that is not there any more."""
    story = Story(fast_path, FaultyFiles())

    async def run():
        await started(story.tier, story.owner)
        await story.store(1, 2, durable=True)
        await story.tier.seal()
        await story.store(2, 1, durable=True)
        syncs = iter(range(100))

        def vanish(name, _number):
            if name == "fdatasync" and next(syncs) == 0:
                max(fast_path.glob("*.kvks")).unlink()
            return 0

        story.files.plan = vanish
        first = next(iter(story.contents))
        if removal:
            await story.remove(first)
        else:
            await story.store(3, 40, durable=True)
        story.tier._logs[0].directory.table.close_all()
        return first

    first = asyncio.run(run())
    for lock in story.tier._locks:
        lock.release()
    story.threads.shutdown()
    assert story.tier.stats().counts.vanished == 1
    again = afterlife(fast_path, story)
    assert (first in again) is not removal


def test_one_probe_at_intervals(tmp_path):
    """A directory that stays sick is asked once an interval, whoever wants to write."""
    files = FaultyFiles(lambda name, _number: errno.EROFS if name == "create" else 0)
    story = Story(tmp_path, files)

    async def run():
        await started(story.tier, story.owner)
        for _ in range(5):
            before = len(files.failed)
            story.clock.now_s += 1
            await asyncio.gather(*(story.store(i, 1, durable=True) for i in range(10)))
            assert len(files.failed) == before + 1
        files.plan = lambda _name, _number: 0
        story.clock.now_s += 1
        assert (await story.store(20, 1, durable=True) == WriteStatus.WRITTEN).all()
        assert not story.tier.stats().directories[0].sick
        await story.tier.close()

    asyncio.run(run())
    story.threads.shutdown()


def test_a_bad_place_on_the_medium_costs_only_its_own_block(tmp_path):
    """Neighbours are read with one call; where it fails, they are read one by one."""
    files = FaultyFiles()
    story = Story(tmp_path, files)

    async def run():
        await started(story.tier, story.owner)
        await story.store(1, 6, durable=True)
        keys = list(story.contents)
        reads = iter(range(100))
        files.plan = lambda name, _number: (
            errno.EIO if name == "preadv" and next(reads) in {0, 3} else 0
        )
        got = await story.read_all()
        assert got[keys[2]][0] == ReadStatus.CORRUPT
        assert all(got[key][0] == ReadStatus.HIT for key in keys if key != keys[2])
        counts = story.tier.stats().counts
        assert (counts.read_errors, counts.corrupt) == (1, 0)
        assert "[Errno 5]" in story.tier.stats().directories[0].read_reason
        assert keys[2] not in story.owner.places, "its owner is told"
        files.plan = lambda name, _number: errno.EMFILE if name in {"open", "preadv"} else 0
        got = await story.read_all()
        assert {answer[0] for answer in got.values() if answer} == {ReadStatus.THROTTLED}
        files.plan = lambda _name, _number: 0
        got = await story.read_all()
        assert [answer[0] for answer in got.values() if answer] == [ReadStatus.HIT] * 5
        await story.tier.close()

    asyncio.run(run())
    story.threads.shutdown()


def test_a_place_that_reclaim_cannot_read_is_no_corrupt_record(tmp_path):
    files = FaultyFiles()
    story = Story(tmp_path, files)

    async def run():
        await started(story.tier, story.owner)
        await story.store(1, 6, durable=True)
        await story.tier.seal()
        reads = iter(range(100))
        # After header and footer and table: all, then one by one.
        files.plan = lambda name, _number: (
            errno.EIO if name == "preadv" and next(reads) in {3, 5} else 0
        )
        assert await story.tier.reclaim_oldest()
        stats = story.tier.stats()
        assert (stats.counts.read_errors, stats.counts.corrupt) == (1, 0)
        assert stats.counts.reinserted == 5
        assert len(story.owner.places) == 5
        assert stats.directories[0].read_errors == 1
        await story.tier.close()

    asyncio.run(run())
    story.threads.shutdown()


def test_without_direct_and_fallocate_it_still_works(tmp_path, monkeypatch):
    """File systems that refuse both: counted, and the books stay right."""
    open_file = module.os.open

    def refusing_open(path, flags, mode=0o777):
        if flags & module.os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return open_file(path, flags, mode)

    class NoAllocate:
        def fallocate(self, *_args):
            module.ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(module.os, "open", refusing_open)
    monkeypatch.setattr(module, "_libc", NoAllocate())
    files = module.DiskFiles()
    story = Story(tmp_path, files)

    async def run():
        await started(story.tier, story.owner)
        await story.store(1, 6, durable=True)
        got = await story.read_all()
        assert [answer[0] for answer in got.values()] == [ReadStatus.HIT] * 6
        story.tier.check()
        await story.tier.close()

    asyncio.run(run())
    story.threads.shutdown()
    assert files.opened_buffered >= 1
    assert files.allocated_sparse == 1


def test_when_segment_numbers_are_used_up_nothing_is_written_and_it_is_said():
    """It was an error of the daemon itself, and the client that stored lost its session."""

    async def story(path):
        last = encode_segment_header(SegmentHeader(NUMBER_MAX, 256, 0, "standard"))
        (Path(path) / "ffffffff.kvks").write_bytes(last)
        played = Story(path, FaultyFiles(lambda _name, _number: 0))
        await started(played.tier, played.owner)
        assert (await played.store(1, 4, durable=True) == WriteStatus.FAILED).all()
        assert "used up" in played.tier.stats().directories[0].sick
        await played.tier.close()
        played.threads.shutdown()

    with fast_directory() as path:
        asyncio.run(story(path))
