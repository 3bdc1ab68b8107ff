"""Sealing blocks: what each may be answered, and when others see them."""

import asyncio
import random

import pytest

from kvkeep_server.core.results import CommitStatus, MissReason
from kvkeep_server.index.layout import Multipliers
from tests.fakes.core_harness import Gate, Harness, block_of, full, keys_of, spec

STORED = CommitStatus.STORED
ALREADY = CommitStatus.ALREADY_STORED
ORPHAN = CommitStatus.REFUSED_ORPHAN
COLLISION = CommitStatus.REFUSED_COLLISION
NO_ROOM = CommitStatus.REFUSED_NO_ROOM
SLOTS = 1021  # of one page: 4 MiB without header and generations


@pytest.fixture
def core():
    with Harness(ram="4MiB") as harness:
        yield harness
        harness.check_at_rest()


@pytest.fixture
def session(core):
    return core.session(8 << 20)


@pytest.fixture
def opened(core, session):
    return core.open(session)


def blocks_of(keys, nbytes=4096, salt=b""):
    return [block_of(key, nbytes, salt) for key in keys]


def evict_all(core):
    while core.core.residency.evict(100):
        pass


# ---- what there is to do


def test_a_chain_is_stored_and_read_back(core, session, opened):
    keys = keys_of("a", 20)
    assert core.put(session, opened, keys) == [STORED] * 20
    core.verify(core.acquire(session, opened, keys), keys)
    counts = core.core.service.commits.counts
    assert (counts.commits, counts.stored, counts.stored_nbytes) == (1, 20, 20 * 4096)


def test_storing_again_is_idempotent(core, session, opened):
    keys = keys_of("a", 5)
    core.put(session, opened, keys)
    before = core.core.ram.stats().used_nbytes
    assert core.put(session, opened, keys) == [ALREADY] * 5
    assert core.core.ram.stats().used_nbytes == before


def test_other_bytes_under_a_stored_key_change_nothing(core, session, opened):
    keys = keys_of("a", 2)
    core.put(session, opened, keys)
    core.run(core.store(session, opened, keys, blocks_of(keys, salt=b"other")))
    core.verify(core.acquire(session, opened, keys), keys)


def test_a_longer_chain_continues_where_it_was(core, session, opened):
    keys = keys_of("a", 9)
    assert core.put(session, opened, keys[:4]) == [STORED] * 4
    assert core.put(session, opened, keys[:6]) == [ALREADY] * 4 + [STORED] * 2
    assert core.put(session, opened, keys[6:], parent=keys[5]) == [STORED] * 3
    core.verify(core.acquire(session, opened, keys), keys)
    columns = core.core.residency.columns
    assert columns.parent[columns.in_use()].tolist() == [-1, 0, 1, 2, 3, 4, 5, 6, 7]


def test_a_commit_of_nothing_is_fine(core, session, opened):
    assert core.put(session, opened, []) == []
    assert core.lookup(session, opened, []).blocks == 0
    assert core.acquire(session, opened, []).lease is None


def test_blocks_without_a_resident_parent_are_orphans(core, session, opened):
    keys = keys_of("a", 4)
    assert core.put(session, opened, keys[1:], parent=keys[0]) == [ORPHAN] * 3
    assert core.lookup(session, opened, keys).blocks == 0
    assert core.core.ram.stats().used_nbytes == 0


def test_a_key_that_comes_twice_in_a_batch_is_stored_once(core, session, opened):
    """No hash of a chain repeats; a hostile one may."""
    a, b, c = keys_of("a", 3)
    keys = [a, b, a, b, c]
    first = core.run(core.store(session, opened, keys, blocks_of(keys)))
    assert first == [STORED, STORED, ALREADY, ALREADY, ORPHAN]
    assert core.put(session, opened, [a, a]) == [ALREADY] * 2
    core.check()


def test_a_repeated_key_is_not_there_when_its_first_one_was_refused(core, session, opened):
    """An acknowledged block is readable."""
    core.put(session, opened, pinned := keys_of("pinned", SLOTS))
    core.acquire(session, opened, pinned)
    key = keys_of("a", 1)
    assert core.put(session, opened, key * 3) == [NO_ROOM] * 3


def test_every_commit_is_counted(core, session, opened):
    keys = keys_of("a", 4)
    core.put(session, opened, keys[:2])
    core.put(session, opened, keys[:3])
    core.put(session, opened, keys_of("orphan", 2), parent=keys_of("nobody", 1)[0])
    counts = core.core.service.commits.counts
    assert (counts.commits, counts.stored, counts.already_stored) == (3, 3, 2)
    assert (counts.refused, counts.failed) == (2, 0)


@pytest.mark.parametrize("key_nbytes", [16, 17, 31, 32, 33, 63, 64])
def test_keys_of_every_length(core, session, key_nbytes):
    opened = core.open(session, spec(key_nbytes=key_nbytes))
    keys = keys_of("a", 5, key_nbytes)
    assert core.put(session, opened, keys) == [STORED] * 5
    core.verify(core.acquire(session, opened, keys), keys)
    almost = [key[:-1] + bytes([key[-1] ^ 1]) for key in keys]
    assert core.lookup(session, opened, almost).blocks == 0


@pytest.mark.parametrize("nbytes", [1, 64, 4095, 4097, 57 * 1024, 262_144, 1_000_001])
def test_blocks_of_odd_sizes(core, nbytes):
    session = core.session(8 << 20)
    opened = core.open(session, spec(block_nbytes=nbytes))
    keys = keys_of(nbytes, 2)
    assert core.put(session, opened, keys) == [STORED] * 2
    core.verify(core.acquire(session, opened, keys), keys)


# ---- identity


def test_ranks_do_not_collide(core, session):
    """B012: one token hash, two shards, each its own bytes."""
    opened = core.open(session, spec(pp_size=2))
    keys = keys_of("a", 3)
    for rank in range(2):
        assert core.put(session, opened, keys, rank=rank) == [STORED] * 3
    core.verify(core.acquire(session, opened, keys), keys)


@pytest.mark.parametrize(
    "change",
    [
        {"weights_fingerprint": "sha256:2"},
        {"layout_version": "2"},
        {"kv_dtype": "fp8"},
        {"block_nbytes": 2048},
        {"tp_size": 2},
        {"layout_switches": ("A=1",)},
        {"namespace_epoch": 1},
        {"tenant": "other"},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.promise("P02", gate=1, unit="fields that differ")
def test_who_differs_in_identity_misses(core, session, opened, change):
    """B010, B013: same keys, same model name."""
    keys = keys_of("a", 3)
    core.put(session, opened, keys)
    other = core.open(session, spec(**change))
    assert core.lookup(session, other, keys).blocks == 0
    assert core.acquire(session, other, keys).lease is None
    assert core.put(session, other, keys) == [STORED] * 3
    for rank in other.ranks[1:]:
        core.put(session, other, keys, rank=rank)
    core.verify(core.acquire(session, opened, keys), keys)
    core.verify(core.acquire(session, other, keys), keys)


@pytest.mark.parametrize("same_check", [True, False], ids=["all 128 bits", "the tag"])
def test_a_key_with_the_fingerprint_of_another_is_refused(core, session, opened, same_check):
    """Never the other one's bytes."""
    zero = (0,) * 16
    real = Multipliers.draw(random.Random(3))
    core.core.residency.table.multipliers = Multipliers(zero, zero if same_check else real.b)
    mine, others = keys_of("mine", 3), keys_of("others", 3)
    assert core.put(session, opened, mine[:1]) == [STORED]
    assert core.put(session, opened, others) == [COLLISION, ORPHAN, ORPHAN]
    assert core.put(session, opened, mine) == [ALREADY, COLLISION, ORPHAN]
    assert core.lookup(session, opened, others).blocks == 0
    assert core.acquire(session, opened, others).lease is None
    core.verify(core.acquire(session, opened, mine[:1]), mine[:1])
    assert core.core.residency.collisions_total > 0


@pytest.mark.parametrize("same_check", [True, False], ids=["all 128 bits", "the tag"])
def test_two_new_keys_of_one_fingerprint_are_not_both_stored(core, session, opened, same_check):
    zero = (0,) * 16
    real = Multipliers.draw(random.Random(3))
    core.core.residency.table.multipliers = Multipliers(zero, zero if same_check else real.b)
    keys = keys_of("a", 3)
    assert core.put(session, opened, keys) == [STORED, COLLISION, ORPHAN]
    core.verify(core.acquire(session, opened, keys[:1]), keys[:1])


# ---- units


def test_several_groups_are_one_unit(core, session):
    groups = (full("a", 4096), full("b", 1000), full("c", 8192))
    opened = core.open(session, spec(groups=groups))
    keys = keys_of("a", 5)
    assert core.put(session, opened, keys) == [STORED] * 5
    core.verify(core.acquire(session, opened, keys), keys)
    core.core.sessions.end(session.session_id, "gives the lease back")
    residency = core.core.residency
    assert residency.columns.used == 15
    assert residency.evict(2) == 2
    assert residency.columns.used == 9, "units go whole"
    core.check_at_rest()


def test_a_hit_needs_every_rank_and_a_unit_goes_whole(core, session):
    opened = core.open(session, spec(tp_size=3))
    keys = keys_of("a", 4)
    for rank, count in ((0, 4), (2, 3), (1, 2)):
        core.put(session, opened, keys[:count], rank=rank)
    assert core.lookup(session, opened, keys).blocks == 2
    core.verify(core.acquire(session, opened, keys), keys)
    core.core.sessions.end(session.session_id, "gives the lease back")
    columns = core.core.residency.columns
    units = columns.unit_of(columns.in_use())
    assert len(set(units.tolist())) == 4
    for left in (3, 2, 1, 0):
        assert core.core.residency.evict(1) == 1
        assert len(set(columns.unit_of(columns.in_use()).tolist())) == left
        core.check_at_rest()


def test_ranks_that_are_not_here_do_not_count(core, session):
    here = core.open(session, spec(tp_size=2), [1])
    keys = keys_of("a", 3)
    core.put(session, here, keys, rank=1)
    core.verify(core.acquire(session, here, keys), keys)
    assert core.lookup(session, core.open(session, spec(tp_size=2)), keys).blocks == 0


def test_a_rank_that_comes_after_the_eviction_begins_a_unit_of_its_own(core, session):
    opened = core.open(session, spec(tp_size=2))
    keys = keys_of("a", 3)
    other = core.session()
    core.open(other, spec(tp_size=2))

    async def work():
        assert await core.store(session, opened, keys, blocks_of(keys), rank=0) == [STORED] * 3
        gate = Gate(core.core)
        second = asyncio.ensure_future(core.store(other, opened, keys, blocks_of(keys), rank=1))
        await gate.reached()
        evict_all(core)
        gate.open()
        return await second

    assert core.run(work()) == [STORED] * 3
    assert core.lookup(session, opened, keys).blocks == 0
    core.run(core.store(session, opened, keys, blocks_of(keys), rank=0))
    assert core.lookup(session, opened, keys).blocks == 3


# ---- room


def test_five_times_the_capacity_stays_within_bounds(core, session, opened):
    """B037. The newest chain is there, whole."""
    for number in range(20):
        keys = keys_of(number, 256)
        assert core.put(session, opened, keys) == [STORED] * 256
        core.verify(grant := core.acquire(session, opened, keys), keys)
        core.release(session, grant)
        core.check_at_rest()
    stats = core.core.ram.stats()
    assert stats.nbytes <= stats.limit_nbytes == 4 << 20
    assert core.core.residency.evicted_total > 4000


def test_refused_for_room_then_stored_once(core, session, opened):
    """B038."""
    held = keys_of("held", SLOTS)
    assert set(core.put(session, opened, held)) == {STORED}
    grant = core.acquire(session, opened, held)
    keys = keys_of("a", 3)
    assert core.put(session, opened, keys) == [NO_ROOM, ORPHAN, ORPHAN]
    assert core.lookup(session, opened, keys).blocks == 0
    core.check_at_rest()
    core.release(session, grant)
    assert core.put(session, opened, keys) == [STORED] * 3
    assert core.put(session, opened, keys) == [ALREADY] * 3


def test_what_finds_room_of_a_chain_is_its_head(core, session, opened):
    held = keys_of("held", SLOTS - 2)
    core.put(session, opened, held)
    core.acquire(session, opened, held)
    keys = keys_of("a", 5)
    assert core.put(session, opened, keys) == [STORED, STORED, NO_ROOM, ORPHAN, ORPHAN]
    assert core.lookup(session, opened, keys).blocks == 2


def test_a_commit_never_evicts_its_own_parent(core, session, opened):
    parent = keys_of("parent", 2)
    core.put(session, opened, parent)
    core.put(session, opened, keys_of("newer", SLOTS - 2))
    children = keys_of("child", SLOTS)
    status = core.put(session, opened, children, parent=parent[1])
    assert status == [STORED] * (SLOTS - 2) + [NO_ROOM, ORPHAN]
    assert core.lookup(session, opened, parent).blocks == 2
    core.check_at_rest()


def test_a_hit_that_vanishes_is_a_clean_miss(core, session, opened):
    """B042: look-up without a lease, eviction, load."""
    keys = keys_of("a", 3)
    core.put(session, opened, keys)
    assert core.lookup(session, opened, keys).blocks == 3
    core.clock.advance(7200)
    evict_all(core)
    grant = core.acquire(session, opened, keys)
    assert (grant.lease, grant.leased, grant.prefix.blocks) == (None, 0, 0)
    assert grant.prefix.ended == MissReason.EVICTED
    assert grant.prefix.evicted_age_s == 7200
    assert core.lookup(session, opened, keys_of("b", 1)).ended == MissReason.NEVER_SEEN


@pytest.mark.parametrize("cycles", [300])
def test_replacing_the_same_keys_for_ever_costs_no_memory(core, session, opened, cycles):
    """B033."""
    keys = keys_of("a", 100)

    def state():
        residency = core.core.residency
        return (
            residency.columns.capacity,
            residency.table.geometry.rows,
            core.core.ram.stats().nbytes,
            len(core.core.leases._due),
            len(residency._policy._near),
            len(residency._policy._far),
        )

    for cycle in range(cycles):
        assert core.put(session, opened, keys) == [STORED] * 100
        evict_all(core)
        if cycle == 10:
            early = state()
    assert state() == early
