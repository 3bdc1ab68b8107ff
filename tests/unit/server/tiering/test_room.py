"""Making room: growth before eviction, sizes that compete, and an index that moves meanwhile."""

import asyncio
import time

import pytest

from kvkeep_server.core.errors import PoolExhaustedError, ResourceExhaustedError
from kvkeep_server.core.results import CommitStatus
from kvkeep_server.index import table as table_module
from kvkeep_server.index.layout import STATE_LIVE, STATE_MOVED, Multipliers
from kvkeep_server.tiering import rebuild as rebuild_module
from kvkeep_server.tiers.ram.pool import Pool
from tests.fakes.core_harness import Gate, Harness, block_of, full, keys_of, spec

STORED = CommitStatus.STORED
NO_ROOM = CommitStatus.REFUSED_NO_ROOM
SMALL, LARGE = 4096, 256 * 1024
SLOTS = 1021  # of one page in 4 MiB


@pytest.fixture
def core():
    with Harness(ram="4MiB") as harness:
        yield harness
        harness.check_at_rest()


@pytest.fixture
def session(core):
    return core.session(16 << 20)


@pytest.fixture
def small(core, session):
    return core.open(session, spec(block_nbytes=SMALL, model="small"))


@pytest.fixture
def large(core, session):
    return core.open(session, spec(block_nbytes=LARGE, model="large"))


def evicted(core):
    return core.core.residency.evicted_total


# ---- growth


def test_memory_up_to_the_limit_is_used_before_anything_leaves():
    with Harness(ram="12MiB", extra='chunk = "4MiB"') as core:
        session = core.session(16 << 20)
        opened = core.open(session)
        assert core.core.ram.stats().chunks == 1
        for number in range(3):
            assert set(core.put(session, opened, keys_of(number, 1000))) == {STORED}
        assert (core.core.ram.stats().chunks, evicted(core)) == (3, 0)
        core.put(session, opened, keys_of("more", 1000))
        assert evicted(core) > 0


def test_groups_of_one_commit_grow_the_pool_for_all_of_them():
    """Each alone would fit."""
    with Harness(ram="12MiB", extra='chunk = "4MiB"') as core:
        session = core.session(16 << 20)
        opened = core.open(session, spec(groups=(full("a"), full("b"), full("c", 2 * SMALL))))
        core.put(session, opened, keys_of("first", 100))
        assert set(core.put(session, opened, keys_of("a", 450))) == {STORED}
        assert evicted(core) == 0


def test_the_pool_grows_ahead_of_need():
    with Harness(ram="12MiB", extra='chunk = "4MiB"') as core:
        session = core.session(16 << 20)
        opened = core.open(session)
        core.put(session, opened, keys_of("a", 400))

        async def upkeep():
            core.core.room.grow_ahead()
            core.core.room.grow_ahead()
            while (growing := core.core.room._growing) is not None:
                await growing

        core.run(upkeep())
        assert core.core.ram.stats().chunks == 1
        core.put(session, opened, keys_of("b", 400))
        core.run(upkeep())
        assert core.core.ram.stats().chunks == 2


def test_a_pool_without_a_chunk_refuses_and_recovers(monkeypatch):
    """The first one could not be made either."""

    def fail(_pool):
        raise PoolExhaustedError("no memory", retry_after_s=0.0)

    keys = keys_of("a", 40)
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "make_chunk", fail)
        core = Harness(ram="4MiB")
        session = core.session(16 << 20)
        opened = core.open(session)
        status = core.put(session, opened, keys)
        assert (status[0], set(status[1:])) == (NO_ROOM, {CommitStatus.REFUSED_ORPHAN})
        assert core.core.ram.stats().chunks == 0
    with core:
        assert set(core.put(session, opened, keys)) == {STORED}


# ---- sizes that compete


@pytest.mark.parametrize("first", ["small", "large"])
def test_a_size_without_slots_takes_slabs_of_another(core, session, small, large, first):
    one, other = (small, 400), (large, 8)
    if first == "large":
        one, other = other, one
    opened, count = one
    for number in range(4):
        core.put(session, opened, keys_of(number, count))
    before = evicted(core)
    other, count = other
    for number in range(6):
        keys = keys_of(f"other {number}", count)
        assert core.put(session, other, keys) == [STORED] * count
        core.verify(grant := core.acquire(session, other, keys), keys)
        core.release(session, grant)
        core.check_at_rest()
    assert evicted(core) > before


def test_sizes_that_take_turns_never_get_stuck(core, session, small, large):
    for number in range(25):
        assert set(core.put(session, small, keys_of(f"s{number}", 60))) == {STORED}
        assert set(core.put(session, large, keys_of(f"l{number}", 3))) == {STORED}
        core.check_at_rest()


def one_pin_a_slab(core, session, small):
    """Fills the pool with small blocks and leases one of each slab."""
    residency = core.core.residency
    number = 0
    while core.core.ram.slabs.room(SMALL):
        core.put(session, small, keys_of(f"s{number}", 1))
        number += 1
    ids = residency.columns.in_use()
    ids = ids[residency.columns.keyspace[ids] == small.spaces.local[0].index]
    slabs = {}
    for block, address in zip(
        ids.tolist(), residency.columns.address_of(ids).tolist(), strict=True
    ):
        slabs[(address - 3) // 256] = residency.columns.key_words[block].tobytes()[:32]
    return [core.acquire(session, small, [key]) for key in slabs.values()]


def test_slabs_with_a_pinned_block_stay_and_the_cache_is_not_emptied_in_vain(
    core, session, small, large
):
    grants = one_pin_a_slab(core, session, small)
    before = core.core.residency.columns.used
    assert core.put(session, large, keys_of("l", 2)) == [NO_ROOM, CommitStatus.REFUSED_ORPHAN]
    assert before - core.core.residency.columns.used <= 2 * 2 + 2 * 16
    for grant in grants:
        assert core.bytes_of(grant)
    core.release(session, grants[0])
    assert core.put(session, large, keys_of("l", 2)) == [STORED] * 2


def test_blocks_of_the_own_size_go_when_no_slab_can(core, session, small, large):
    """Though others were not used for longer."""
    chains = [keys_of(f"l{number}", 2) for number in range(4)]
    for keys in chains:
        assert core.put(session, large, keys) == [STORED] * 2
    grants = one_pin_a_slab(core, session, small)
    assert len(grants) == 2, "two slabs of large ones, two of small ones"
    assert evicted(core) == 0
    for keys in chains:
        core.clock.advance(1)
        assert core.lookup(session, large, keys).blocks == 2
    new = keys_of("new", 2)
    assert core.put(session, large, new) == [STORED] * 2
    found = [core.lookup(session, large, keys).blocks for keys in (*chains, new)]
    assert found == [0, 2, 2, 2, 2]
    assert evicted(core) <= 2 + 2 * 2 + 2 * 16
    core.core.sessions.end(session.session_id, "gives the leases back")


def test_slots_that_a_commit_is_filling_are_left_to_it(core, session, small, large):
    """They have no block yet: their slab must not be chosen, for it would not become empty."""
    others = core.session(8 << 20)
    core.open(others, spec(block_nbytes=SMALL, model="small"))
    for number in range(4):
        core.put(session, small, keys_of(number, 255))

    async def work():
        gate = Gate(core.core)
        keys = keys_of("filling", 200)
        blocks = [block_of(key, SMALL) for key in keys]
        filling = asyncio.ensure_future(core.store(others, small, keys, blocks))
        await gate.reached()
        new = keys_of("large", 2)
        storing = asyncio.ensure_future(
            core.store(session, large, new, [block_of(key, LARGE) for key in new])
        )
        await gate.reached()
        core.check()
        gate.open()
        return await filling, await storing

    filled, stored = core.run(work())
    assert (set(filled), set(stored)) == ({STORED}, {STORED})
    core.check_checksums()


def test_groups_of_one_size_share_what_is_left(core, session):
    opened = core.open(session, spec(groups=(full("a"), full("b"))))
    held = core.open(session, spec(model="held"))
    pinned = keys_of("held", SLOTS - 10)
    core.put(session, held, pinned)
    core.acquire(session, held, pinned)
    status = core.put(session, opened, keys_of("a", 9))
    assert status == [STORED] * 5 + [NO_ROOM] + [CommitStatus.REFUSED_ORPHAN] * 3
    core.core.sessions.end(session.session_id, "gives the lease back")


# ---- everything pinned


@pytest.mark.promise("P28", gate=20, nightly=1000, unit="commits with everything pinned")
@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_with_everything_pinned_a_commit_answers_at_once(core, session, nbytes, promise_count):
    """P28: <= 50 ms, no spin."""
    opened = core.open(session, spec(block_nbytes=SMALL, model="small"))
    pinned = keys_of("pinned", SLOTS)
    core.put(session, opened, pinned)
    core.acquire(session, opened, pinned)
    other = core.open(session, spec(block_nbytes=nbytes, model="other"))
    took = []
    for number in range(promise_count):
        keys = keys_of(number, 8)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        status = core.put(session, other, keys)
        took.append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
        assert status == [NO_ROOM] + [CommitStatus.REFUSED_ORPHAN] * 7
    assert sorted(wall_s for wall_s, _ in took)[len(took) // 2] < 0.05
    assert sum(cpu_s for _, cpu_s in took) / len(took) < 0.05
    assert evicted(core) == 0
    core.core.sessions.end(session.session_id, "gives the lease back")


# ---- the index moves


@pytest.fixture
def tiny():
    with Harness(ram="4MiB", extra="[index]\nrows_initial = 64") as harness:
        yield harness
        harness.check_at_rest()


def test_the_index_grows_with_what_is_stored(tiny):
    session = tiny.session(8 << 20)
    opened = tiny.open(session)
    chains = [keys_of(number, 40) for number in range(20)]
    for keys in chains:
        assert tiny.put(session, opened, keys) == [STORED] * 40
        tiny.check_at_rest()
    assert tiny.core.residency.rebuilds_total >= 3
    for keys in chains:
        tiny.verify(grant := tiny.acquire(session, opened, keys), keys)
        tiny.release(session, grant)
    table = tiny.core.residency.table
    assert 0.5 * table.geometry.rows <= table.live_rows <= 0.85 * table.geometry.rows
    assert table.table_id == 1 + tiny.core.residency.rebuilds_total


def test_clients_are_told_and_the_old_table_says_that_it_moved(tiny):
    session = tiny.session(8 << 20)
    opened = tiny.open(session)
    old = tiny.core.residency.table
    state = old._state
    assert int(state[0]) == STATE_LIVE
    tiny.put(session, opened, keys_of("a", 70))
    assert int(state[0]) == STATE_MOVED
    events = [(event.name, event.values) for event in session.events]
    assert ("index_moved", {"table_id": 2}) in events


def test_a_table_whose_blocks_come_and_go_stays_as_it_is(tiny):
    session = tiny.session(8 << 20)
    opened = tiny.open(session)
    residency = tiny.core.residency
    tiny.put(session, opened, keys_of("a", 300))
    table = residency.table
    for number in range(100):
        while residency.evict(100):
            pass
        tiny.put(session, opened, keys_of(number, 300))
    assert residency.table is table
    assert not table._passed.any() or residency.columns.used


def test_look_ups_and_leases_go_on_while_the_index_moves(tiny, monkeypatch):
    """And commits wait, so that nothing is inserted that the new table would not have."""
    session, other = tiny.session(8 << 20), tiny.session(8 << 20)
    opened = tiny.open(session)
    tiny.open(other)
    old = keys_of("old", 40)
    tiny.put(session, opened, old)
    loop = tiny.loop
    fill = rebuild_module.fill_table

    async def work():
        begun, go = asyncio.Event(), asyncio.Event()

        def slow(*args):
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go.wait(), loop).result(10)
            return fill(*args)

        monkeypatch.setattr("kvkeep_server.tiering.rebuild.fill_table", slow)
        one, two = keys_of("one", 30), keys_of("two", 3)
        first = asyncio.ensure_future(tiny.store(session, opened, one, blocks(one)))
        await begun.wait()
        second = asyncio.ensure_future(tiny.store(other, opened, two, blocks(two)))
        for round_ in range(20):
            grant = await tiny.ask(session, opened, old)
            tiny.verify(grant, old)
            assert tiny.renew(session, grant) == 1
            assert tiny.lookup(session, opened, old[:round_]).blocks == round_
            tiny.core.service.sweep()
            tiny.release(session, grant)
            await asyncio.sleep(0)
        tiny.open(other, spec(model="opened meanwhile", key_nbytes=64))
        assert not first.done()
        assert not second.done()
        go.set()
        return await first, await second

    first, second = tiny.run(work())
    assert (set(first), set(second)) == ({STORED}, {STORED})
    tiny.check_at_rest()
    assert tiny.lookup(session, opened, old).blocks == 40


def test_a_copy_that_ends_while_the_index_moves_waits_for_it(tiny, monkeypatch):
    """Its rows would not be in the new table."""
    session, other = tiny.session(8 << 20), tiny.session(8 << 20)
    opened = tiny.open(session)
    tiny.open(other)
    room, loop, fill = tiny.core.room, tiny.loop, rebuild_module.fill_table
    one, two = keys_of("one", 20), keys_of("two", 100)

    async def work():
        begun, go = asyncio.Event(), asyncio.Event()

        def slow(*args):
            prepared = fill(*args)
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go.wait(), loop).result(10)
            return prepared

        monkeypatch.setattr("kvkeep_server.tiering.rebuild.fill_table", slow)
        gate = Gate(tiny.core)
        first = asyncio.ensure_future(tiny.store(session, opened, one, blocks(one)))
        await gate.reached()
        second = asyncio.ensure_future(tiny.store(other, opened, two, blocks(two)))
        await begun.wait()
        gate.open()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not first.done()
        assert room._rebuilding is not None
        go.set()
        return await first, await second

    first, second = tiny.run(work())
    assert (set(first), set(second)) == ({STORED}, {STORED})
    tiny.check_at_rest()


def blocks(keys, nbytes=SMALL):
    return [block_of(key, nbytes) for key in keys]


def test_who_needs_little_does_not_slip_in_before_the_next_move(tiny, monkeypatch):
    """Of those that wait for a move, the first to wake may begin another one; what the others then
    inserted or evicted would be lost in it."""
    session = tiny.session(8 << 20)
    tiny.put(session, tiny.open(session), keys_of("a", 40))
    room, loop, fill = tiny.core.room, tiny.loop, rebuild_module.fill_table

    async def work():
        begun, go = asyncio.Semaphore(0), asyncio.Semaphore(0)

        def slow(*args):
            loop.call_soon_threadsafe(begun.release)
            asyncio.run_coroutine_threadsafe(go.acquire(), loop).result(10)
            return fill(*args)

        monkeypatch.setattr("kvkeep_server.tiering.rebuild.fill_table", slow)
        first = asyncio.create_task(room.index_rows(30))
        await begun.acquire()
        much, little = (asyncio.create_task(room.index_rows(rows)) for rows in (5000, 1))
        await asyncio.sleep(0)
        go.release()
        await begun.acquire()  # `much` has begun the next one
        for _ in range(10):
            await asyncio.sleep(0)
        assert not little.done()
        go.release()
        await asyncio.gather(first, much, little)

    tiny.run(work())
    assert tiny.core.residency.rebuilds_total == 2
    assert tiny.core.residency.index_room() >= 5000


def test_a_table_that_finds_no_memory_is_a_refusal_with_a_reason(tiny, monkeypatch):
    session = tiny.session(8 << 20)
    opened = tiny.open(session)
    tiny.put(session, opened, keys_of("a", 40))

    def no_memory(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(table_module, "create_sealed", no_memory)
    with pytest.raises(ResourceExhaustedError, match=r"index table of 148 rows.*lower ram\.size"):
        tiny.put(session, opened, keys_of("b", 60))
    assert tiny.lookup(session, opened, keys_of("a", 40)).blocks == 40
    tiny.check_at_rest()
    monkeypatch.undo()
    assert tiny.put(session, opened, keys_of("b", 60)) == [STORED] * 60


def test_an_unlucky_seed_means_a_larger_table(tiny, monkeypatch):
    """With these multipliers all tags are alike, so all but 512 find no place."""
    session = tiny.session(8 << 20)
    opened = tiny.open(session)
    draw, unlucky = Multipliers.draw, [True]

    def draw_once(source):
        lucky = draw(source)
        return Multipliers((0,) * 16, lucky.b) if unlucky and unlucky.pop() else lucky

    keys = keys_of("a", 40)
    tiny.put(session, opened, keys)
    monkeypatch.setattr(Multipliers, "draw", draw_once)
    monkeypatch.setattr(table_module, "PROBED_BUCKETS_MAX", 2)
    assert set(tiny.put(session, opened, keys_of("b", 40))) == {STORED}
    assert not unlucky
    tiny.check_at_rest()
    tiny.verify(tiny.acquire(session, opened, keys), keys)
    tiny.core.sessions.end(session.session_id, "gives the lease back")
