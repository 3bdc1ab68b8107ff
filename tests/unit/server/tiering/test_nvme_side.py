"""A core with both tiers: what leaves ram stays on nvme, comes back when asked for, and is there
after a restart."""

import errno
from pathlib import Path

import numpy as np
import pytest

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import AckLevel, BlockStatus, CommitStatus, MissReason, TierId
from kvkeep_server.rpc import convert
from kvkeep_server.service.checking import CheckOrder
from kvkeep_server.tiers import record
from kvkeep_server.tiers.nvme.files import DiskFiles
from tests.fakes.core_harness import MIB, Harness, full, keys_of, spec
from tests.fakes.faulty_files import FaultyFiles, SmallDisk
from tests.fakes.nvme_tier import fast_directory

STORED, ALREADY = CommitStatus.STORED, CommitStatus.ALREADY_STORED


@pytest.fixture
def directory():
    with fast_directory() as path:
        yield path


def nvme(path, *, size="64MiB", segment="4MiB", queue="32MiB"):
    return (
        f'[nvme]\ndirectories = ["{path}/kv"]\nmax = "{size}"\nsegment = "{segment}"\n'
        f'free_min = "0B"\nqueue = "{queue}"'
    )


def both(path, more="", files=DiskFiles, **options):
    extra = nvme(path, **options) + more
    return Harness(ram="4MiB", slab="256KiB", extra=extra, ack=AckLevel.NVME, files=files)


def evict_all(core):
    while core.core.residency.evict(100):
        pass


def held(core, tier):
    return core.core.residency.held[tier].blocks


def test_what_leaves_ram_stays_on_nvme_and_comes_back(directory):
    with both(directory) as core:
        session = core.session()
        opened, keys = core.open(session), keys_of("a", 50)
        assert core.put(session, opened, keys) == [STORED] * 50
        core.check()
        evict_all(core)
        core.check_at_rest()
        assert (held(core, TierId.RAM), held(core, TierId.NVME)) == (0, 50)
        found = core.lookup(session, opened, keys)
        assert (found.blocks, found.runs) == (50, ((TierId.NVME, 50),))
        grant = core.acquire(session, opened, keys)
        assert (grant.leased, grant.pending, grant.prefix.blocks) == (50, 0, 50)
        core.verify(grant, keys)
        core.check()
        assert core.core.residency.held[TierId.RAM].demoted == 50
        core.release(session, grant)
        core.check_at_rest()


def test_a_restart_finds_them_again(directory):
    keys = keys_of("a", 50)
    with both(directory) as core:
        session = core.session()
        assert core.put(session, core.open(session), keys) == [STORED] * 50
    with both(directory) as core:
        session = core.session()
        opened = core.open(session)
        core.run(core.core.nvme.recovery.settled())
        core.check()
        assert core.core.nvme.recovery.counts.blocks == 50
        grant = core.acquire(session, opened, keys)
        assert grant.leased == 50
        core.verify(grant, keys)
        assert core.put(session, opened, keys) == [ALREADY] * 50


def test_the_room_of_a_namespace_that_was_found_comes_back(directory):
    keys = keys_of("a", 5)
    with both(directory) as core:
        session = core.session()
        core.put(session, core.open(session), keys)
    with both(directory, more="\n[limits]\nnamespaces_max = 1") as core:
        core.run(core.core.nvme.recovery.settled())
        session = core.session()
        core.remove(session, core.open(session), keys)
        core.core.sessions.end(session.session_id, "test")
        core.clock.advance(1.0)
        (space,) = core.open(core.session(), spec(model="other")).spaces.local
        assert space.index == 0, "its number as well"


def test_ranks_and_groups_are_found_again_together(directory):
    keys = keys_of("a", 9)
    wanted = spec(groups=(full("a", 4096), full("b", 3 * 4096)), tp_size=2)
    with both(directory) as core:
        session = core.session()
        opened = core.open(session, wanted)
        for rank in (0, 1):
            assert core.put(session, opened, keys, rank=rank) == [STORED] * 9
        core.check()
    with both(directory) as core:
        core.run(core.core.nvme.recovery.settled())
        core.check()
        session = core.session()
        opened = core.open(session, wanted)
        grant = core.acquire(session, opened, keys)
        assert grant.leased == 9
        core.verify(grant, keys)
        core.release(session, grant)
        core.check_at_rest()
        evict_all(core)
        core.check_at_rest()


def test_what_is_removed_stays_away(directory):
    keys = keys_of("a", 20)
    with both(directory) as core:
        session = core.session()
        opened = core.open(session)
        core.put(session, opened, keys)
        evict_all(core)
        assert core.remove(session, opened, keys[5:6]).units == 15
        core.check_at_rest()
        assert core.lookup(session, opened, keys).blocks == 5
    with both(directory) as core:
        core.run(core.core.nvme.recovery.settled())
        session = core.session()
        opened = core.open(session)
        assert core.lookup(session, opened, keys).blocks == 5
        core.check()


@pytest.mark.promise("P25", gate=10, nightly=10, unit="positions of a bad record")
def test_a_corrupt_block_ends_the_prefix_in_front_of_it(promise_count):
    for at in range(promise_count):
        with fast_directory() as directory, both(directory) as core:
            one_is_corrupt(core, directory, at, promise_count)


def one_is_corrupt(core, directory, at, count):
    keys, session = keys_of("a", count), core.session()
    opened = core.open(session)
    core.put(session, opened, keys)
    evict_all(core)
    columns = core.core.residency.columns
    batch = KeyBatch.unpack(b"".join(keys), 32)
    block = int(core.core.residency.find(opened.spaces.local[0], batch)[at])
    spoil(directory, int(columns.nvme[block]))
    grant = core.acquire(session, opened, keys)
    assert (grant.leased, grant.prefix.blocks) == (at, at)
    assert grant.prefix.ended is MissReason.CORRUPT
    core.verify(grant, keys)
    core.run(core.core.nvme.removal.of_lost())
    core.check()
    assert core.put(session, opened, keys)[at:] == [STORED] * (count - at)
    core.check()


def spoil(directory, location):
    """Changes a byte of the payload there."""
    for path in Path(directory).rglob("*.kvks"):
        with path.open("r+b") as file:
            page = file.seek((location & 0xFFFFFFFF) * 4096)
            header = file.read(320)
            if len(header) == 320 and record.decode(header) is not None:
                found = int(record.decode(header)["location"][0])
                if found == location:
                    file.seek(page + 4096 + 100)
                    file.write(b"spoiled")
                    return
    raise AssertionError("no such record")


def test_what_leaves_with_others_that_are_lost_is_not_looked_for(directory):
    """Units that are lost for one reason took those with them that were for another, and what is
    done behind the work, on which everything rests, ended with an error."""
    with both(directory) as core:
        session = core.session()
        opened, keys = core.open(session), keys_of("a", 6)
        core.put(session, opened, keys)
        evict_all(core)
        residency = core.core.residency
        ids = residency.find(opened.spaces.local[0], KeyBatch.unpack(b"".join(keys), 32))
        residency.forget(ids[2:3], MissReason.EVICTED)
        residency.forget(ids[4:5], MissReason.CORRUPT)
        assert len(set(residency.lost.values())) == 2
        core.run(core.core.nvme.removal.of_lost())
        assert not residency.lost
        assert core.lookup(session, opened, keys).blocks == 2
        core.check_at_rest()


def test_what_is_removed_while_it_waits_to_be_written_is_not_written(directory):
    with both(directory) as core:
        session = core.session()
        opened, keys = core.open(session), keys_of("a", 5)
        core.ack = AckLevel.RAM
        core.put(session, opened, keys)
        core.remove(session, opened, keys[:1])
        core.run(core.core.nvme.demotion.settle())
        core.check_at_rest()
        assert held(core, TierId.NVME) == 0
        # What comes later is written all the same.
        core.ack = AckLevel.NVME
        assert core.put(session, opened, keys) == [STORED] * 5


def test_a_check_reads_both_tiers(directory):
    with both(directory) as core:
        session = core.session()
        opened, keys = core.open(session), keys_of("a", 10)
        core.put(session, opened, keys)
        order = CheckOrder(verify=True, nbytes_max=0, nbytes_per_s=0)
        report = core.run(core.core.service.checker.run(order))
        assert (report.findings, report.blocks_verified) == ([], 20)
        evict_all(core)
        spoil(directory, int(core.core.residency.columns.nvme.max()))
        report = core.run(core.core.service.checker.run(order))
        assert report.findings == ["wrong bytes on nvme: 1 blocks, taken out there"]
        assert (report.blocks_verified, report.blocks_corrupt, report.blocks_removed) == (9, 1, 1)
        assert core.lookup(session, opened, keys).blocks == 9
        core.check_at_rest()


def test_far_more_than_ram_holds_is_kept_and_read_right(directory):
    with both(directory) as core:
        session = core.session(8 * MIB)
        opened = core.open(session, spec(block_nbytes=40_000))
        chains = [keys_of(name, 20) for name in range(20)]
        for keys in chains:
            assert core.put(session, opened, keys) == [STORED] * 20
        assert held(core, TierId.NVME) == 400
        for keys in chains:
            grant = core.acquire(session, opened, keys)
            assert grant.leased == 20
            core.verify(grant, keys)
            core.release(session, grant)
        core.check_at_rest()


def test_a_log_that_is_full_gives_the_oldest_back_and_keeps_what_was_used(directory):
    with both(directory, size="16MiB", segment="2MiB") as core:
        session = core.session(8 * MIB)
        opened = core.open(session, spec(block_nbytes=40_000))
        hot = keys_of("hot", 10)
        core.put(session, opened, hot)
        for name in range(60):
            keys = keys_of(name, 20)
            core.put(session, opened, keys)
            core.clock.advance(1.0)
            grant = core.acquire(session, opened, hot)
            assert grant.leased == 10, name
            core.verify(grant, hot)
            core.release(session, grant)
        core.run(core.core.nvme.removal.of_lost())
        core.check()
        assert core.core.nvme.tier.stats().counts.reclaimed > 10
        nbytes = sum(d.used_nbytes for d in core.core.nvme.tier.stats().directories)
        assert nbytes <= 16 * MIB


def test_nobody_waits_longer_than_he_said(directory):
    with both(directory) as core:
        session = core.session()
        opened, keys = core.open(session), keys_of("a", 20)
        core.put(session, opened, keys)
        evict_all(core)
        core.wait_s = 0.0
        grant = core.acquire(session, opened, keys)
        assert (grant.leased, grant.pending) == (0, 20)
        message = convert.grant_message(grant, 20, core.core.residency, 1.0)
        assert set(message.status) == {BlockStatus.PENDING}
        core.run(core.core.nvme.promotion.finish())
        core.wait_s = 0.0
        grant = core.acquire(session, opened, keys)
        assert (grant.leased, grant.pending) == (20, 0)
        core.verify(grant, keys)


def test_all_that_ask_at_once_share_one_flight(directory):
    with both(directory) as core:
        session = core.session()
        opened, keys = core.open(session), keys_of("a", 20)
        core.put(session, opened, keys)
        evict_all(core)
        core.wait_s = 0.0
        for _ in range(5):
            core.acquire(session, opened, keys)
        core.run(core.core.nvme.promotion.finish())
        assert core.core.nvme.promotion.counts.read == 20
        core.core.sessions.end(session.session_id, "over")
        assert np.count_nonzero(core.core.residency.columns.pins) == 0
        core.check_at_rest()


def test_a_shard_without_its_sister_is_not_left_pointing_at_a_segment_that_goes(directory):
    """Its unit is in ram still, but not whole on nvme, so nobody writes its record again."""
    with both(directory) as core:
        session = core.session()
        opened = core.open(session, spec(tp_size=2))
        keys = keys_of("a", 8)
        for rank in range(2):
            assert core.put(session, opened, keys, rank=rank) == [STORED] * 8
        batch = KeyBatch.unpack(b"".join(keys), 32)
        other = core.core.residency.find(opened.spaces.local[1], batch)
        core.core.residency.forget(other[4:], MissReason.EVICTED)
        core.run(core.core.nvme.tier.reclaim_oldest())
        core.check()
        assert core.core.residency.held[TierId.RAM].blocks == 16
        evict_all(core)
        core.check()
        grant = core.acquire(session, opened, keys)
        assert core.core.service.manager.removal.counts.corrupt == 0
        core.verify(grant, keys)


def test_a_unit_with_a_shard_that_is_nowhere_is_not_written(directory):
    """It is about to leave: there are no bytes of it to write, at address 0 or elsewhere."""
    with both(directory) as core:
        core.ack = AckLevel.RAM
        session = core.session()
        opened = core.open(session, spec(tp_size=2))
        keys = keys_of("a", 4)
        for rank in range(2):
            core.put(session, opened, keys, rank=rank)
        core.run(core.core.nvme.demotion.settle())
        evict_all(core)
        batch = KeyBatch.unpack(b"".join(keys), 32)
        first, other = (core.core.residency.find(space, batch) for space in opened.spaces.local)
        grant = core.acquire(session, opened, keys)
        core.release(session, grant)
        columns, residency = core.core.residency.columns, core.core.residency
        # One shard of the last key has lost its record and its place in ram.
        last = np.array([other[3]])
        residency.forget(np.array([first[3], other[3]]), MissReason.EVICTED)
        row = columns.row[last].astype(np.int64)
        address = columns.address_of(last)
        residency.table.move(row, np.zeros(1, np.uint64))
        written = core.core.nvme.demotion.counts.written
        core.run(demoted(core, residency.units_of(first)))
        assert core.core.nvme.demotion.counts.written == written
        residency.table.move(row, address)
        core.check()


async def demoted(core, units):
    await core.core.nvme.demotion.offer(units)


def test_segment_numbers_of_more_than_sixteen_bits(directory):
    """Records begin at a segment's number << 32."""
    Path(directory, "kv").mkdir(mode=0o700)
    Path(directory, "kv", "00010000.kvks").write_bytes(b"short")
    keys = keys_of("a", 50)
    for stored in (STORED, ALREADY):
        with both(directory) as core:
            session = core.session()
            opened = core.open(session)
            core.run(core.core.nvme.recovery.settled())
            assert core.put(session, opened, keys) == [stored] * 50
            evict_all(core)
            grant = core.acquire(session, opened, keys)
            assert grant.leased == 50
            core.verify(grant, keys)
            core.release(session, grant)


def test_a_directory_that_takes_no_writes_is_logged_once_and_again_when_it_does(directory, caplog):
    with both(directory) as core:
        health = core.core.nvme.tier._logs[0].directory.health
        caplog.set_level("INFO", "kvkeep_server")
        health.failed(OSError(28, "No space left on device"))
        for _ in range(3):
            core.core.nvme._tell_of_directories()
        health.worked()
        for _ in range(3):
            core.core.nvme._tell_of_directories()
    told = [record for record in caplog.records if "writes" in record.message]
    assert [(record.levelname, record.message) for record in told] == [
        ("WARNING", "nvme: a directory takes no writes"),
        ("INFO", "nvme: a directory takes writes again"),
    ]
    assert "No space left" in told[0].reason


def test_a_full_file_system_is_as_a_full_log_and_is_logged_once(directory, caplog):
    """No commit was acknowledged on nvme any more, for good, and nobody was told what to do."""
    disk = SmallDisk(f"{directory}/kv", 12 * MIB)
    caplog.set_level("INFO", "kvkeep_server")
    with both(directory, files=lambda: disk, segment="1MiB") as core:
        session = core.session(4 * MIB)
        opened = core.open(session, spec(block_nbytes=40_000))
        for name in range(60):
            assert core.put(session, opened, keys_of(name, 20)) == [STORED] * 20
        core.run(core.core.nvme.removal.of_lost())
        core.check()
        assert held(core, TierId.NVME) > 100
        assert core.core.nvme.tier.stats().counts.reclaimed > 20
        core.core.nvme._tell_of_directories()
    told = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.message for record in told] == [
        "nvme: the file system has less room than nvme.max allows; the oldest blocks go for it"
    ]
    assert "nvme.free_min keeps 0B of it" in told[0].reason


def test_reads_that_fail_are_logged_once_a_minute(directory, caplog):
    """Nobody was told; blocks left, as if their bytes had been wrong."""
    files = FaultyFiles()
    with both(directory, files=lambda: files) as core:
        session = core.session()
        opened, keys = core.open(session), keys_of("a", 20)
        core.put(session, opened, keys)
        evict_all(core)
        files.plan = lambda name, _number: errno.EIO if name == "preadv" else 0
        for _ in range(3):
            core.acquire(session, opened, keys)
            core.core.nvme._tell_of_directories()
        assert core.core.nvme.tier.stats().counts.corrupt == 0
        files.plan = lambda _name, _number: 0
        other = keys_of("b", 5)
        for _ in range(2):
            core.put(session, opened, other)
            evict_all(core)
            files.plan = lambda name, _number: errno.EIO if name == "preadv" else 0
            core.acquire(session, opened, other)
            files.plan = lambda _name, _number: 0
            core.core.nvme._tell_of_directories()
            core.clock.advance(61.0)
        core.core.nvme._tell_of_directories()
        total = core.core.nvme.tier.stats().counts.read_errors
    told = [one for one in caplog.records if one.message == "nvme: reads fail"]
    assert len(told) == 2
    assert sum(one.records for one in told) == total
    assert "[Errno 5]" in told[0].reason
    assert told[0].directory == f"{directory}/kv"
