"""Removal by key: what leaves, what stays, and what leases, commits and look-ups see of it."""

import asyncio
import random
import time

import numpy as np
import pytest

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import CommitStatus, MissReason, RemovalStatus, RenewStatus
from kvkeep_server.tiering import removal
from tests.fakes.core_harness import Gate, Harness, block_of, full, keys_of, spec

STORED, ORPHAN = CommitStatus.STORED, CommitStatus.REFUSED_ORPHAN
REMOVED, ABSENT, KEPT = RemovalStatus.REMOVED, RemovalStatus.ABSENT, RemovalStatus.KEPT


@pytest.fixture
def core():
    with Harness(ram="4MiB") as harness:
        yield harness
        harness.check_at_rest()


@pytest.fixture
def session(core):
    return core.session()


@pytest.fixture
def opened(core, session):
    return core.open(session)


def status_of(removed):
    return [RemovalStatus(one) for one in removed.status.tolist()]


def test_what_is_removed_is_a_miss_that_says_so(core, session, opened):
    keys = keys_of("a", 6)
    core.put(session, opened, keys)
    removed = core.remove(session, opened, keys[3:])
    assert status_of(removed) == [REMOVED] * 3
    assert removed.units == 3
    found = core.lookup(session, opened, keys)
    assert (found.blocks, found.ended) == (3, MissReason.REMOVED)
    assert core.core.service.manager.removal.counts.removed == 3
    assert core.core.residency.evicted_total == 0
    assert core.put(session, opened, keys) == [CommitStatus.ALREADY_STORED] * 3 + [STORED] * 3


def test_what_is_absent_is_said_to_be(core, session, opened):
    keys = keys_of("a", 2)
    core.put(session, opened, keys)
    removed = core.remove(session, opened, [keys_of("b", 1)[0], keys[1], keys[1]])
    assert status_of(removed) == [ABSENT, REMOVED, REMOVED]
    assert removed.units == 1
    assert status_of(core.remove(session, opened, keys[1:])) == [ABSENT]
    assert status_of(core.remove(session, opened, [])) == []


@pytest.mark.parametrize("slice_units", [1, 3, 4096])
def test_descendants_leave_too(core, session, opened, monkeypatch, slice_units):
    monkeypatch.setattr(removal, "_SLICE_UNITS", slice_units)
    stem, other = keys_of("stem", 4), keys_of("other", 3)
    core.put(session, opened, stem)
    core.put(session, opened, other)
    for name in ("x", "y"):
        core.put(session, opened, keys_of(name, 5), parent=stem[-1])
    removed = core.remove(session, opened, [stem[1]])
    assert status_of(removed) == [REMOVED]
    assert removed.units == 3 + 2 * 5
    assert core.lookup(session, opened, stem).blocks == 1
    assert core.lookup(session, opened, other).blocks == 3


def test_every_other_key_of_a_chain(core, session, opened):
    keys = keys_of("a", 60)
    core.put(session, opened, keys)
    core.put(session, opened, keys_of("twig", 2), parent=keys[-1])
    removed = core.remove(session, opened, keys[10::2])
    assert status_of(removed) == [REMOVED] * 25
    assert removed.units == 50 + 2
    assert core.lookup(session, opened, keys).blocks == 10


def test_without_descendants_a_key_that_has_some_is_kept(core, session, opened):
    stem, twig = keys_of("stem", 4), keys_of("twig", 2)
    core.put(session, opened, stem)
    core.put(session, opened, twig, parent=stem[1])
    removed = core.remove(session, opened, stem[:1] + stem[2:], with_descendants=False)
    assert status_of(removed) == [KEPT, REMOVED, REMOVED]
    assert core.lookup(session, opened, stem).blocks == 2
    # Named together they may leave, in any order.
    removed = core.remove(session, opened, [twig[0], *stem[:2], twig[1]], with_descendants=False)
    assert status_of(removed) == [REMOVED] * 4


def test_all_ranks_and_groups_of_a_key_leave(core, session):
    wanted = spec(tp_size=2, groups=(full("a", 4096), full("b", 8192)))
    opened = core.open(session, wanted)
    keys = keys_of("a", 3)
    for rank in (0, 1):
        core.put(session, opened, keys, rank=rank)
    # A session that has one rank only removes the other's shards too: half a unit is of no use.
    half = core.open(session, wanted, ranks=[1])
    assert core.remove(session, half, keys[2:]).units == 1
    assert core.core.residency.table.live_rows == 2 * 2 * 2
    assert core.lookup(session, opened, keys).ended == MissReason.REMOVED


# ---- leases


def test_a_leased_block_is_out_of_the_index_at_once_and_readable_to_the_end(core, session, opened):
    keys = keys_of("a", 4)
    core.put(session, opened, keys)
    grants = [core.acquire(session, opened, keys) for _ in range(2)]
    used = core.core.ram.stats().used_nbytes
    assert status_of(core.remove(session, opened, keys)) == [REMOVED] * 4
    assert core.lookup(session, opened, keys).blocks == 0
    assert core.core.residency.payload_nbytes == 0
    assert core.core.ram.stats().used_nbytes == used
    # Pressure takes none of their slots, and the same keys can be stored anew beside them.
    core.put(session, opened, keys_of("other", 250))
    assert core.put(session, opened, keys) == [STORED] * 4
    core.check_at_rest()
    for grant in grants:
        assert core.renew(session, grant) == RenewStatus.RENEWED
        core.verify(grant, keys)
        core.release(session, grant)
    assert len(core.core.residency.columns.withdrawn()) == 0


def test_a_lease_that_expired_on_removed_blocks_is_lost(core, session, opened):
    keys = keys_of("a", 2)
    core.put(session, opened, keys)
    late, other = (core.acquire(session, opened, keys, ttl_s=ttl) for ttl in (5.0, 10.0))
    core.remove(session, opened, keys)
    core.clock.advance(6.0)
    core.core.service.sweep()
    # Another lease holds the slots: what the late one read is right still.
    assert core.renew(session, late, 3.0) == RenewStatus.RENEWED
    core.clock.advance(5.0)
    core.core.service.sweep()
    assert core.renew(session, late) == RenewStatus.LOST
    assert core.renew(session, other) == RenewStatus.LOST


def test_a_session_that_ends_gives_removed_slots_back(core, session, opened):
    other = core.session()
    keys = keys_of("a", 4)
    core.put(session, opened, keys)
    core.acquire(other, core.open(other), keys)
    core.remove(session, opened, keys)
    core.core.sessions.end(other.session_id, "eof")
    assert core.core.ram.stats().used_nbytes == 0


def test_a_touch_of_a_removed_block_is_nothing(core, session, opened):
    keys = keys_of("a", 2)
    core.put(session, opened, keys)
    residency, space = core.core.residency, opened.spaces.local[0]
    block = int(residency.find(space, KeyBatch.unpack(keys[1], 32))[0])
    row = int(residency.columns.row[block])
    version = residency.table.version_of(row)
    core.remove(session, opened, keys)
    assert residency.unit_at(row, version, opened.spaces) == -1


# ---- races


def removed_meanwhile(core, by, named, commit, *, parent=b""):
    """Removes `named` while `commit` is copied; the statuses of both."""
    session, opened = by

    async def work():
        gate = Gate(core.core)
        blocks = [block_of(key) for key in commit]
        storing = asyncio.ensure_future(core.store(session, opened, commit, blocks, parent=parent))
        await gate.reached()
        index = opened.spaces.index
        removed = await core.core.service.remove(
            session, index, b"".join(named), with_descendants=True
        )
        core.core.service.check()
        gate.open()
        return status_of(removed), await storing

    return core.run(work())


def test_a_block_whose_parent_is_removed_while_it_is_copied_is_an_orphan(core, session, opened):
    keys = keys_of("a", 6)
    core.put(session, opened, keys[:3])
    named, stored = removed_meanwhile(core, (session, opened), [keys[2]], keys[3:], parent=keys[2])
    assert named == [REMOVED]
    assert stored == [ORPHAN] * 3
    assert core.lookup(session, opened, keys).blocks == 2


def test_of_a_batch_with_holes_the_part_before_the_lost_parent_is_stored(core, session, opened):
    """Two chains in one commit: only the one whose parent left is refused."""
    a, b = keys_of("a", 3), keys_of("b", 3)
    core.put(session, opened, a[:1])
    core.put(session, opened, b[:1])
    named, stored = removed_meanwhile(core, (session, opened), b[:1], [*a, *b])
    assert named == [REMOVED]
    assert (
        stored
        == [CommitStatus.ALREADY_STORED, STORED, STORED, CommitStatus.ALREADY_STORED]
        + [CommitStatus.REFUSED_ORPHAN] * 2
    )
    assert core.lookup(session, opened, a).blocks == 3
    assert core.lookup(session, opened, b).blocks == 0


def test_a_block_that_is_being_stored_is_absent_and_then_there(core, session, opened):
    keys = keys_of("a", 2)
    named, stored = removed_meanwhile(core, (session, opened), keys, keys)
    assert named == [ABSENT] * 2
    assert stored == [STORED] * 2
    assert core.lookup(session, opened, keys).blocks == 2


def test_children_that_come_during_the_search_leave_too(core, session, opened, monkeypatch):
    stem, twig, late = keys_of("stem", 2), keys_of("twig", 3), keys_of("late", 2)
    core.put(session, opened, stem)
    core.put(session, opened, twig, parent=stem[1])
    search = removal._trees

    def and_somebody_commits(parents, units):
        found = search(parents, units)
        loop = core.loop
        blocks = [block_of(key) for key in late]
        storing = core.store(session, opened, late, blocks, parent=twig[-1])
        future = asyncio.run_coroutine_threadsafe(storing, loop)
        assert future.result(20) in ([STORED] * 2, [CommitStatus.ALREADY_STORED] * 2, [ORPHAN] * 2)
        return found

    monkeypatch.setattr(removal, "_trees", and_somebody_commits)
    removed = core.remove(session, opened, stem[:1])
    # At each round somebody stores behind the tail: the rest is kept, or all is gone at last.
    left = core.core.residency.table.live_rows
    assert status_of(removed) == [REMOVED] if left == 0 else [KEPT]
    core.check()
    monkeypatch.setattr(removal, "_trees", search)
    core.remove(session, opened, stem[:1])
    assert core.core.residency.table.live_rows == 0


def test_one_search_at_a_time(core, session, opened, monkeypatch):
    chains = [keys_of(number, 5) for number in range(6)]
    for keys in chains:
        core.put(session, opened, keys)
    search, running = removal._trees, []

    def watched(parents, units):
        running.append(len(running))
        time.sleep(0.01)
        assert running.pop() == 0, "two searches at once"
        return search(parents, units)

    monkeypatch.setattr(removal, "_trees", watched)
    index = opened.spaces.index

    async def all_at_once():
        remove = core.core.service.remove
        return await asyncio.gather(
            *(remove(session, index, keys[0], with_descendants=True) for keys in chains)
        )

    assert [removed.units for removed in core.run(all_at_once())] == [5] * 6


def test_nothing_leaves_while_the_index_is_rebuilt(session, core, opened, monkeypatch):
    keys = keys_of("a", 4)
    core.put(session, opened, keys)
    room, rebuilding = core.core.room, []

    async def work():
        async def rebuild():
            await asyncio.sleep(0.01)
            room._rebuilding = None
            rebuilding.append(core.core.residency.table.live_rows)

        room._rebuilding = asyncio.create_task(rebuild())
        await core.core.service.remove(
            session, opened.spaces.index, b"".join(keys), with_descendants=True
        )

    core.run(work())
    assert rebuilding == [4]
    assert core.core.residency.table.live_rows == 0


@pytest.mark.parametrize("seed", range(3))
def test_workers_that_store_read_and_remove_at_once(core, session, opened, seed):
    """B040: 8 workers over 50 keys; every audit after every turn."""
    chains = [keys_of(f"{seed}/{number}", 10) for number in range(5)]
    source = random.Random(seed)

    async def worker():
        own = await core.attach()
        of = core.open(own)
        for _ in range(25):
            keys = source.choice(chains)
            first, last = sorted(source.sample(range(11), 2))
            what = source.choice(["store", "read", "remove", "remove", "look"])
            if what == "store":
                parent = keys[first - 1] if first else b""
                blocks = [block_of(key, 4096, b"0/0") for key in keys[first:last]]
                await core.store(own, of, keys[first:last], blocks, parent=parent)
            elif what == "remove":
                await core.core.service.remove(
                    own,
                    of.spaces.index,
                    b"".join(keys[first:last]),
                    with_descendants=source.random() < 0.5,
                )
            elif what == "read":
                grant = await core.ask(own, of, keys)
                await asyncio.sleep(0)
                if grant.lease is not None:
                    core.verify(grant, keys)
                    core.release(own, grant)
            else:
                core.lookup(own, of, keys)
            core.check()
            await asyncio.sleep(0)

    async def all_of_them():
        await asyncio.gather(*(worker() for _ in range(8)))

    core.run(all_of_them())


# ---- damaged blocks


def test_damaged_blocks_leave_with_their_descendants_unless_they_left_before(core, session, opened):
    keys, other = keys_of("a", 4), keys_of("b", 2)
    core.put(session, opened, keys)
    core.put(session, opened, other)
    space = opened.spaces.local[0]
    ids = np.concatenate(
        [core.core.residency.find(space, KeyBatch.unpack(key, 32)) for key in (keys[1], other[0])]
    )
    generations = core.core.residency.generations_of(ids)
    generations[1] += np.uint64(2)  # another block by now
    removed = core.run(core.core.service.manager.removal.of_blocks(ids, generations))
    assert status_of(removed) == [REMOVED, ABSENT]
    assert core.core.service.manager.removal.counts.corrupt == 3
    assert core.lookup(session, opened, keys).ended == MissReason.CORRUPT
    assert core.lookup(session, opened, other).blocks == 2
