"""Retention pins: what they keep, what they cannot keep, and that they wedge nothing."""

import random

import pytest

from kvkeep_server.core.errors import KVKeepError, NotFoundError, ResourceExhaustedError
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import AckLevel, CommitStatus, NamespaceMode
from tests.fakes.core_harness import MIB, Harness, full, keys_of, spec

NO_ROOM, STORED = CommitStatus.REFUSED_NO_ROOM, CommitStatus.STORED
KEYS = keys_of("a", 8)
EXTRA = '[pins]\nmax = "64KiB"\npins_max = 4\nkeep_max = "1h"\n'


@pytest.fixture
def core():
    with Harness(ram="4MiB", slab="256KiB", extra=EXTRA) as harness:
        yield harness
        harness.check_at_rest()


@pytest.fixture
def session(core):
    return core.session(4 * MIB)


@pytest.fixture
def opened(core, session):
    opened = core.open(session)
    core.put(session, opened, KEYS)
    return opened


def pin(core, session, opened, keys, keep_for_s=0.0):
    return core.core.service.pin(session, opened.spaces.index, b"".join(keys), keep_for_s)


def pins(core):
    return core.core.service.manager.pins


def flood(core, session, opened, chains=100, blocks=32):
    """More than the pool holds; how many blocks were refused."""
    refused = 0
    for number in range(chains):
        status = core.put(session, opened, keys_of(("flood", number), blocks))
        refused += sum(one is not STORED for one in status)
    return refused


def test_what_is_pinned_outlives_a_flood_and_then_leaves(core, session, opened):
    given = pin(core, session, opened, KEYS)
    assert (given.blocks, given.keep_for_s) == (8, 3600.0)
    assert pins(core).nbytes == 8 * 4096
    assert flood(core, session, opened) == 0
    core.verify(core.acquire(session, opened, KEYS), KEYS)
    core.core.leases.end_session(session.session_id)
    assert core.core.service.unpin(session, [given.pin_id, given.pin_id, 77]) == 1
    assert pins(core).nbytes == 0
    flood(core, session, opened, 60)
    flood(core, session, core.open(session, spec(model="other")), 60)
    assert core.lookup(session, opened, KEYS).blocks == 0


def test_without_a_pin_it_does_not(core, session, opened):
    flood(core, session, opened)
    assert core.lookup(session, opened, KEYS).blocks == 0


def test_only_what_is_there_is_pinned(core, session, opened):
    assert pin(core, session, opened, [*KEYS, *keys_of("none", 3)]).blocks == 8
    nothing = pin(core, session, opened, keys_of("none", 3))
    assert (nothing.pin_id, nothing.blocks) == (0, 0)
    assert len(pins(core)) == 1


def test_over_budget_nothing_is_pinned(core, session, opened):
    core.put(session, opened, keys_of("b", 16))
    pin(core, session, opened, KEYS)
    with pytest.raises(ResourceExhaustedError, match=r"65536 bytes more.*pins\.max = 65536"):
        pin(core, session, opened, keys_of("b", 16))
    assert pins(core).nbytes == 8 * 4096
    assert pins(core).counts.refused == 1
    # A block counts once, however often it is pinned.
    more = pin(core, session, opened, KEYS)
    assert pins(core).nbytes == 8 * 4096
    assert pins(core).left_nbytes == 8 * 4096
    assert pin(core, session, opened, keys_of("b", 8)).blocks == 8
    assert core.core.service.unpin(session, [more.pin_id]) == 1
    assert pins(core).nbytes == 16 * 4096


def test_too_many_pins_are_refused(core, session, opened):
    for _ in range(4):
        pin(core, session, opened, KEYS[:1])
    with pytest.raises(ResourceExhaustedError, match=r"pins\.pins_max = 4"):
        pin(core, session, opened, KEYS[:1])


def test_a_pin_ends_by_time_and_outlives_its_session(core, session, opened):
    pin(core, session, opened, KEYS, 10.0)
    pin(core, session, opened, KEYS[:2], 1e9)
    core.core.sessions.end(session.session_id, "test")
    assert len(pins(core)) == 2
    core.clock.advance(10.5)
    core.core.service.sweep()
    assert (len(pins(core)), pins(core).nbytes) == (1, 2 * 4096)
    core.clock.advance(3600)
    core.core.service.sweep()
    assert (len(pins(core)), pins(core).nbytes) == (0, 0)
    assert pins(core).counts.expired == 2


def test_others_take_back_only_what_is_of_a_set_that_they_have_open(core, session, opened):
    given = pin(core, session, opened, KEYS)
    other = core.session()
    assert core.core.service.unpin(other, [given.pin_id]) == 0
    core.open(other)
    assert core.core.service.unpin(other, [given.pin_id]) == 1


def test_a_removal_goes_before_a_pin(core, session, opened):
    given = pin(core, session, opened, KEYS)
    assert core.remove(session, opened, KEYS[4:]).units == 4
    assert pins(core).nbytes == 4 * 4096
    assert core.lookup(session, opened, KEYS).blocks == 4
    core.check_at_rest()
    # Their ids are others' now.
    core.put(session, opened, keys_of("c", 4))
    assert core.core.service.unpin(session, [given.pin_id]) == 1
    assert pins(core).nbytes == 0


def test_leased_and_pinned_and_removed(core, session, opened):
    grant = core.acquire(session, opened, KEYS)
    pin(core, session, opened, KEYS)
    core.remove(session, opened, KEYS)
    core.verify(grant, KEYS)
    core.release(session, grant)
    assert core.core.ram.slabs.used_nbytes == 0


def test_an_epoch_that_is_over_keeps_nothing(core, session, opened):
    pin(core, session, opened, KEYS)
    core.run(core.core.service.advance_epoch(session, opened.spaces.index, 0))
    assert pin(core, session, opened, KEYS).pin_id == 0
    assert flood(core, session, core.open(session)) == 0
    assert pins(core).nbytes == 0


def test_what_is_bypassed_cannot_be_pinned(core, session, opened):
    set_id = opened.namespace_set.set_id
    core.core.service.control.set_mode(set_id, NamespaceMode.BYPASS)
    assert pin(core, session, opened, KEYS).pin_id == 0
    with pytest.raises(NotFoundError):
        core.core.service.pin(session, 99, b"", 0.0)


def test_a_chain_that_names_a_key_twice(core, session, opened):
    assert pin(core, session, opened, [KEYS[0], KEYS[0], KEYS[0]]).blocks >= 1
    assert pins(core).nbytes == 4096


def test_all_shards_of_a_key_count(core, session):
    wide = core.open(session, spec(tp_size=2, groups=(full(), full("v", 512))))
    for rank in (0, 1):
        core.put(session, wide, KEYS[:2], rank=rank)
    assert pin(core, session, wide, KEYS).blocks == 2
    assert pins(core).nbytes == 2 * 4 * 4096


def test_a_pool_that_is_pinned_whole_refuses_and_goes_on():
    with Harness(ram="4MiB", slab="256KiB", extra='[pins]\nmax = "1GiB"\n') as core:
        session = core.session(4 * MIB)
        opened = core.open(session)
        stored = 0
        for number in range(100):
            keys = keys_of(number, 32)
            stored += sum(one is STORED for one in core.put(session, opened, keys))
            pin(core, session, opened, keys)
        assert core.core.ram.slabs.used_nbytes == pins(core).nbytes == stored * 4096
        assert core.put(session, opened, keys_of("late", 2))[0] is NO_ROOM
        assert core.lookup(session, opened, keys_of(0, 32)).blocks == 32
        large = core.open(session, spec(block_nbytes=20000))
        assert core.put(session, large, keys_of("large", 1)) == [NO_ROOM]


@pytest.mark.parametrize("seed", range(5))
def test_random_histories(seed):
    source = random.Random(seed)
    with Harness(ram="4MiB", slab="256KiB", extra='[pins]\nmax = "256KiB"\n') as core:
        session, held = core.session(4 * MIB), []
        opened = core.open(session)
        for _ in range(150):
            keys = keys_of(source.randrange(40), 1 + source.randrange(30))
            act = source.choice(["put", "put", "pin", "unpin", "remove", "lease", "time"])
            if act == "put":
                core.put(session, opened, keys)
            elif act == "pin":
                try:
                    held.append(pin(core, session, opened, keys, source.choice([1, 5, 60])))
                except KVKeepError:
                    assert pins(core).left_nbytes < 256 * 1024
            elif act == "unpin" and held:
                core.core.service.unpin(session, [source.choice(held).pin_id])
            elif act == "remove":
                core.remove(session, opened, keys)
            elif act == "lease":
                core.verify(core.acquire(session, opened, keys), keys)
            else:
                core.clock.advance(source.random())
                core.core.service.sweep()
            core.check()


# ---- with nvme


@pytest.mark.parametrize("kept", [True, False])
def test_reclaim_keeps_what_is_pinned(tmp_path, kept):
    extra = f'[nvme]\ndirectories = ["{tmp_path}"]\nmax = "14MiB"\nsegment = "1MiB"\n'
    with Harness(
        ram="4MiB", slab="256KiB", extra=extra + 'free_min = "1MiB"\n', ack=AckLevel.NVME
    ) as core:
        session = core.session(4 * MIB)
        opened = core.open(session)
        chain = keys_of("chain", 20)
        core.put(session, opened, chain)
        columns = core.core.residency.columns
        for number in range(30):
            units = core.core.residency.find(opened.spaces.local[0], _batch(chain))
            if number == 11:
                assert not columns.in_ram[units].any()
                assert columns.recorded(units).all()
                if kept:
                    assert pin(core, session, opened, chain).blocks == 20
            core.put(session, opened, keys_of(("flood", number), 100))
            # Reclaim leaves a segment that gave nothing back alone for a second.
            core.clock.advance(2.0)
        found = core.acquire(session, opened, chain)
        assert found.leased == (20 if kept else 0)
        core.verify(found, chain)


def _batch(keys):
    return KeyBatch.unpack(b"".join(keys), 32)
