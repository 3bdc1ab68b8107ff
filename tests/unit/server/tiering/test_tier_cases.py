"""Cases of public bug reports, and promises, on a core with both tiers."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import AckLevel, BlockStatus, CommitStatus, MissReason, TierId
from kvkeep_server.rpc import convert
from kvkeep_server.tiers import record
from tests.fakes.core_harness import MIB, FakeClock, Harness, full, keys_of, spec
from tests.fakes.nvme_tier import fast_directory

STORED = CommitStatus.STORED
DAY_S = 86_400.0
NBYTES = 40_000
SPEC = spec(block_nbytes=NBYTES)


@pytest.fixture
def directory():
    with fast_directory() as path:
        yield path


def both(path, *, size="64MiB", segment="2MiB", **options):
    extra = (
        f'[nvme]\ndirectories = ["{path}/kv"]\nmax = "{size}"\nsegment = "{segment}"\n'
        'free_min = "0B"\nqueue = "32MiB"'
    )
    return Harness(ram="4MiB", slab="256KiB", extra=extra, ack=AckLevel.NVME, **options)


def evict_all(core):
    while core.core.residency.evict(100):
        pass


def ids_of(core, opened, keys, column=0):
    batch = KeyBatch.unpack(b"".join(keys), 32)
    return core.core.residency.find(opened.spaces.local[column], batch)


# --- P25: whatever fails at block k of n, the prefix ends there, and each buffer given is filled


@pytest.mark.promise("P25", gate=12, unit="slots that ram has left for a prefix")
def test_a_promotion_gets_as_far_as_there_are_slots(promise_count):
    """Leases hold all of ram but k slots: k blocks come, whole, and the rest is said to be there,
    and not to be had now."""
    count = promise_count
    for room in range(count):
        with fast_directory() as path, both(path) as core:
            session = core.session(8 * MIB)
            opened, keys = core.open(session, SPEC), keys_of("wanted", count)
            core.put(session, opened, keys)
            evict_all(core)
            held = leave(core, session, opened, room)
            grant = core.acquire(session, opened, keys)
            assert grant.leased == room
            core.verify(grant, keys)
            message = convert.grant_message(grant, count, core.core.residency, 1.0)
            assert message.status.count(BlockStatus.READY) == room
            assert grant.prefix.ended is MissReason.NO_ROOM
            core.check()
            for lease in held:
                core.release(session, lease)
            again = core.acquire(session, opened, keys)
            assert again.leased == count
            core.verify(again, keys)
            core.check_at_rest()


def test_who_awaits_what_finds_no_room_is_told_so(directory):
    with both(directory) as core:
        session = core.session(8 * MIB)
        opened, keys = core.open(session, SPEC), keys_of("wanted", 12)
        core.put(session, opened, keys)
        evict_all(core)
        held = leave(core, session, opened, 3)
        core.wait_s = 0.0
        grant = core.acquire(session, opened, keys)
        assert grant.pending == 12

        async def told():
            answers = core.core.service.arrivals(session, grant.lease.lease_id)
            return [status async for one in answers for status in one.status]

        status = [BlockStatus.READY] * 3 + [BlockStatus.NO_ROOM] + [BlockStatus.MISS] * 8
        assert core.run(told()) == status
        for lease in [grant, *held]:
            core.release(session, lease)
        core.check_at_rest()


def leave(core, session, opened, room):
    """Fills ram with leased blocks, and gives `room` slots back; the leases."""
    singles = [keys_of(("single", i), 1) for i in range(room)]
    for keys in singles:
        core.put(session, opened, keys)
    freed = [core.acquire(session, opened, keys) for keys in singles]
    held, number = [], 0
    core.ack = AckLevel.RAM
    while True:
        keys = keys_of(("held", number), 1)
        if core.put(session, opened, keys) != [STORED]:
            break
        held.append(core.acquire(session, opened, keys))
        number += 1
    core.run(core.core.nvme.demotion.settle())
    for grant in freed:
        core.release(session, grant)
    core.ack = AckLevel.NVME
    return held


@pytest.mark.promise(
    "P25", gate=12, unit="positions of a record whose segment is gone or unreadable"
)
def test_an_unreadable_record_ends_the_prefix(promise_count):
    """The header of block k is another's; the medium says so only when it is read."""
    for at in range(promise_count):
        with fast_directory() as path, both(path) as core:
            session = core.session(8 * MIB)
            opened, keys = core.open(session, SPEC), keys_of("a", promise_count)
            core.put(session, opened, keys)
            evict_all(core)
            location = int(core.core.residency.columns.nvme[ids_of(core, opened, keys)[at]])
            overwrite(path, location, bytes(4096))
            grant = core.acquire(session, opened, keys)
            assert (grant.leased, grant.prefix.blocks) == (at, at)
            core.verify(grant, keys)
            core.run(core.core.nvme.removal.of_lost())
            core.check_at_rest()


def overwrite(directory, location, data, at=0):
    """Bytes of the record there, from its header page on."""
    (file,) = Path(directory).rglob(f"{location >> 32:08x}.kvks")
    with file.open("r+b") as segment:
        segment.seek((location & 0xFFFFFFFF) * 4096)
        assert record.decode(segment.read(4096)) is not None
        segment.seek((location & 0xFFFFFFFF) * 4096 + at)
        segment.write(data)


# --- P18: the wall clock jumps


@dataclass(slots=True)
class JumpingClock(FakeClock):
    """Its wall clock is set by hand."""

    jump_s: float = 0.0

    def wall_s(self):
        return 1.7e9 + self.now_s + self.jump_s


@pytest.mark.promise("P18", gate=4, unit="jumps of the wall clock under a running daemon")
def test_a_jump_of_the_wall_clock_ends_nothing(directory, promise_count):
    clock = JumpingClock()
    with both(directory, clock=clock) as core:
        session = core.session(8 * MIB)
        opened, keys = core.open(session, SPEC), keys_of("a", 20)
        core.put(session, opened, keys)
        lease = core.acquire(session, opened, keys[:5], ttl_s=10.0)
        for number in range(promise_count):
            clock.jump_s += (-4 if number % 2 else 4) * (1 + number // 2) * DAY_S
            clock.advance(0.5)
            core.core.service.sweep()
            core.put(session, opened, keys_of(("more", number), 5))
            assert len(core.core.leases) == 1
            assert len(core.core.sessions) == 1
        core.release(session, lease)
        evict_all(core)
        assert core.acquire(session, opened, keys).leased == 20
        assert core.core.residency.held[TierId.NVME].blocks == 20 + 5 * promise_count


@pytest.mark.promise("P18", gate=1, unit="restarts after a step of the wall clock")
@pytest.mark.parametrize("days", [-3, 0, 3])
def test_how_long_ago_a_block_was_used_survives_a_restart(directory, days):
    """Within a minute; a step back makes nothing younger than it is, and one forward looks like
    time that passed."""
    clock = JumpingClock()
    with both(directory, clock=clock) as core:
        session = core.session(8 * MIB)
        opened = core.open(session, SPEC)
        core.put(session, opened, keys_of("old", 5))
        clock.advance(50 * 3600)
        core.put(session, opened, keys_of("new", 5))
    clock.advance(10)
    clock.jump_s += days * DAY_S
    with both(directory, clock=clock) as core:
        core.run(core.core.nvme.recovery.settled())
        opened = core.open(core.session(), SPEC)
        columns = core.core.residency.columns
        for name, age_s in (("old", 50 * 3600 + 10), ("new", 10)):
            last_used_s = columns.last_used_s(ids_of(core, opened, keys_of(name, 5)))
            ages_s = clock.monotonic_s() - last_used_s
            assert np.abs(ages_s - age_s - max(0, days) * DAY_S).max() <= 60


# --- cases


def test_what_was_demoted_last_does_not_leave_first(directory):
    """B039: a block that has just come to nvme is the newest there, whatever its history says."""
    with both(directory, size="16MiB") as core:
        session = core.session(8 * MIB)
        opened, number = core.open(session, SPEC), 0
        while not core.core.nvme.tier.stats().counts.reclaimed:
            core.put(session, opened, keys_of(number, 20))
            core.clock.advance(60.0)
            number += 1
        evict_all(core)
        found = [core.lookup(session, opened, keys_of(i, 20)).blocks for i in range(number)]
        assert found[0] < 20
        assert found[-5:] == [20] * 5
        ages = core.core.residency.held[TierId.NVME].evicted_ages.value()
        assert ages.total / sum(ages.counts) > 60.0 * (number - 5)


@pytest.mark.parametrize("removed", range(0, 20, 3))
def test_a_parent_that_leaves_while_its_children_are_on_their_way(directory, removed):
    """B041: nothing is found behind it, no slot is given back twice."""
    with both(directory) as core:
        session = core.session(8 * MIB)
        opened, keys = core.open(session, SPEC), keys_of("a", 20)
        core.put(session, opened, keys)
        evict_all(core)
        core.wait_s = 0.0
        assert core.acquire(session, opened, keys).pending == 20
        core.remove(session, opened, keys[removed : removed + 1])
        assert core.lookup(session, opened, keys).blocks == removed
        core.run(core.core.nvme.promotion.finish())
        assert core.lookup(session, opened, keys).blocks == removed
        core.check_at_rest()
        assert core.put(session, opened, keys)[removed:] == [STORED] * (20 - removed)
        grant = core.acquire(session, opened, keys)
        core.verify(grant, keys)
        core.check()


def test_a_block_is_all_of_its_groups_or_nothing(directory):
    """B020: of three groups one lost its record of block 4."""
    groups = (full("kv", 8192), full("index", 4096), full("scales", 12_345))
    facts = spec(groups=groups)
    with both(directory) as core:
        session = core.session(8 * MIB)
        opened, keys = core.open(session, facts), keys_of("a", 10)
        assert core.put(session, opened, keys) == [STORED] * 10
        block = int(ids_of(core, opened, keys, column=1)[4])
        location = int(core.core.residency.columns.nvme[block])
    overwrite(directory, location, b"x", at=4096)
    with both(directory) as core:
        core.run(core.core.nvme.recovery.settled())
        session = core.session(8 * MIB)
        opened = core.open(session, facts)
        grant = core.acquire(session, opened, keys)
        assert (grant.leased, len(grant.columns)) == (4, 3)
        core.verify(grant, keys)
        core.release(session, grant)
        core.run(core.core.nvme.removal.of_lost())
        assert core.lookup(session, opened, keys).blocks == 4
        assert core.put(session, opened, keys)[4:] == [STORED] * 6
        core.check()


def test_a_full_pool_and_full_staging_do_not_starve_reads_from_nvme(directory):
    """B077: staging is memory of its own, and what nobody holds makes room."""
    with both(directory) as core:
        session = core.session(8 * MIB)
        opened, cold = core.open(session, SPEC), keys_of("cold", 20)
        core.put(session, opened, cold)
        evict_all(core)
        for number in range(10):
            core.put(session, opened, keys_of(("hot", number), 20))
        assert core.core.ram.stats().free_nbytes < 20 * NBYTES
        session.staging.buffer[:] = b"\xaa" * len(session.staging.buffer)
        grant = core.acquire(session, opened, cold)
        assert grant.leased == 20
        core.verify(grant, cold)
        core.release(session, grant)
        core.check()


def test_a_lease_on_what_came_from_nvme_outlives_its_time(directory):
    """B030: the engine queued longer than its lease: renewed while all is there, and after that a
    clean answer."""
    with both(directory) as core:
        session = core.session(8 * MIB)
        opened, keys = core.open(session, SPEC), keys_of("a", 10)
        core.put(session, opened, keys)
        evict_all(core)
        grant = core.acquire(session, opened, keys, ttl_s=1.0)
        core.clock.advance(3.0)
        core.core.service.sweep()
        assert core.renew(session, grant, ttl_s=1.0).name == "RENEWED"
        core.verify(grant, keys)
        core.clock.advance(3.0)
        core.core.service.sweep()
        evict_all(core)
        core.put(session, opened, keys_of("b", 80))
        assert core.renew(session, grant).name == "LOST"
        again = core.acquire(session, opened, keys)
        assert again.leased == 10
        core.verify(again, keys)
