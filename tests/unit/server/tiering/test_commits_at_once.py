"""Commits while others look, commit, go away, or write into their staging."""

import asyncio
import random

import pytest

from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.core.results import CommitStatus
from tests.fakes.core_harness import Gate, Harness, block_of, keys_of

STORED = CommitStatus.STORED
ALREADY = CommitStatus.ALREADY_STORED
ORPHAN = CommitStatus.REFUSED_ORPHAN

# B018 (a late commit of an earlier try completes a newer one) cannot occur: there is no reservation
# that outlives a call. A commit names staging offsets of its own session; it reserves, copies and
# seals inside the one call, and what it reserved is given back when it fails.


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


def blocks_of(keys, salt=b""):
    return [block_of(key, 4096, salt) for key in keys]


def read(core, session, opened, keys):
    """What can be read of the chain."""
    grant = core.acquire(session, opened, keys)
    if grant.lease is None:
        return []
    got = core.bytes_of(grant)
    core.release(session, grant)
    return got


# ---- visible only after commit


@pytest.mark.promise("P03", gate=50, nightly=5000, unit="look-ups during a copy")
def test_nobody_sees_a_block_that_is_still_copied(core, session, opened, promise_count):
    """B003."""
    keys = keys_of("a", 8)
    core.put(session, opened, keys[:2])

    async def work():
        gate = Gate(core.core)
        storing = asyncio.ensure_future(core.store(session, opened, keys, blocks_of(keys)))
        await gate.reached()
        for _ in range(promise_count):
            assert core.lookup(session, opened, keys).blocks == 2
            assert (await core.ask(session, opened, keys)).leased == 2
            core.check()
            await asyncio.sleep(0)
        gate.open()
        assert await storing == [ALREADY] * 2 + [STORED] * 6

    # What `put` stored has its salt, what `store` brings now has none.
    core.run(work())
    got = read(core, session, opened, keys)
    assert got == blocks_of(keys[:2], salt=b"0/0") + blocks_of(keys[2:])
    core.core.sessions.end(session.session_id, "gives the leases back")


def test_what_is_committed_is_the_copy(core, session, opened):
    """B007: the client writes staging while the commit runs and after it."""
    keys = keys_of("a", 4)
    late = block_of(b"late")

    async def work():
        gate = Gate(core.core)
        storing = asyncio.ensure_future(core.store(session, opened, keys, blocks_of(keys)))
        await gate.reached()
        session.staging.buffer[:4096] = late  # it was told not to
        gate.open()
        return await storing

    assert core.run(work()) == [STORED] * 4
    core.check_checksums()
    wanted = [late, *blocks_of(keys[1:])]
    assert read(core, session, opened, keys) == wanted
    session.staging.buffer[: 4 * 4096] = block_of(b"later", 4 * 4096)
    assert read(core, session, opened, keys) == wanted
    core.check_checksums()


# ---- commits that meet


def test_a_second_commit_of_the_same_keys_waits_for_the_first(core, session, opened):
    keys = keys_of("a", 4)
    other = core.session()
    core.open(other)

    async def work():
        gate = Gate(core.core)
        first = asyncio.ensure_future(core.store(session, opened, keys, blocks_of(keys)))
        await gate.reached()
        second = asyncio.ensure_future(core.store(other, opened, keys, blocks_of(keys)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert gate.waiting == 1
        assert not second.done()
        gate.open()
        return await first, await second

    assert core.run(work()) == ([STORED] * 4, [ALREADY] * 4)
    assert core.core.ram.stats().used_nbytes == 4 * 4096


def test_a_second_commit_takes_over_when_the_first_fails(core, session, opened, monkeypatch):
    keys = keys_of("a", 2)
    copy_in = core.core.transfers.copy_in

    async def work():
        begun = asyncio.Event()
        fail = asyncio.Event()

        async def failing(_):
            begun.set()
            await fail.wait()
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(core.core.transfers, "copy_in", failing)
        first = asyncio.ensure_future(core.store(session, opened, keys, blocks_of(keys)))
        await begun.wait()
        second = asyncio.ensure_future(core.store(session, opened, keys, blocks_of(keys)))
        await asyncio.sleep(0)
        monkeypatch.setattr(core.core.transfers, "copy_in", copy_in)
        fail.set()
        return await first, await second

    assert core.run(work()) == ([CommitStatus.FAILED] * 2, [STORED] * 2)


def test_a_child_waits_for_its_parent_in_flight(core, session, opened):
    keys = keys_of("a", 4)
    other = core.session()
    core.open(other)

    async def work():
        gate = Gate(core.core)
        parent = asyncio.ensure_future(core.store(session, opened, keys[:2], blocks_of(keys[:2])))
        await gate.reached()
        child = asyncio.ensure_future(
            core.store(other, opened, keys[2:], blocks_of(keys[2:]), parent=keys[1])
        )
        for _ in range(20):
            await asyncio.sleep(0)
        assert not child.done()
        gate.open()
        return await parent, await child

    assert core.run(work()) == ([STORED] * 2, [STORED] * 2)


def test_commits_of_other_chains_run_side_by_side(core, opened):
    """Also when one of them begins a chain, so that its parent is nobody."""

    async def work():
        gate = Gate(core.core)
        storing = []
        for number in range(5):
            session, keys = await core.attach(), keys_of(number, 3)
            core.open(session)
            storing.append(
                asyncio.ensure_future(core.store(session, opened, keys, blocks_of(keys)))
            )
            await gate.reached()
        gate.open()
        return await asyncio.gather(*storing)

    assert core.run(work()) == [[STORED] * 3] * 5


@pytest.mark.parametrize("seed", range(3))
def test_many_commits_of_overlapping_chains_agree(core, seed):
    source = random.Random(seed)
    sessions = [core.session() for _ in range(6)]
    opened, *_ = [core.open(session) for session in sessions]
    chains = [keys_of(f"{seed}/{n}", 12) for n in range(3)]

    async def client(session):
        for _ in range(12):
            keys = source.choice(chains)
            begin = source.randrange(6)
            end = source.randrange(begin, 12) + 1
            status = await core.store(
                session,
                opened,
                keys[begin:end],
                blocks_of(keys[begin:end]),
                parent=keys[begin - 1] if begin else b"",
            )
            assert set(status) <= {STORED, ALREADY, ORPHAN}
            core.check()

    async def work():
        await asyncio.gather(*map(client, sessions))

    core.run(work())
    for keys in chains:
        found = core.lookup(sessions[0], opened, keys).blocks
        assert read(core, sessions[0], opened, keys) == blocks_of(keys[:found])
    assert core.core.service.commits.counts.stored == core.core.residency.columns.used


def test_commits_at_a_time_are_limited(core):
    with Harness(ram="4MiB", extra="[limits]\ncommits_running_max = 2") as limited:
        opened = limited.open(limited.session())

        async def work():
            gate = Gate(limited.core)
            storing = []
            for number in range(2):
                session, keys = await limited.attach(), keys_of(number, 1)
                limited.open(session)
                storing.append(
                    asyncio.ensure_future(limited.store(session, opened, keys, blocks_of(keys)))
                )
                await gate.reached()
            third = await limited.attach()
            limited.open(third)
            key = keys_of("third", 1)
            with pytest.raises(ResourceExhaustedError, match="commits_running_max = 2"):
                await limited.store(third, opened, key, blocks_of(key))
            gate.open()
            await asyncio.gather(*storing)
            return await limited.store(third, opened, key, blocks_of(key))

        assert limited.run(work()) == [STORED]


# ---- callers that go away


def test_a_cancelled_caller_does_not_stop_its_commit(core, session, opened):
    keys = keys_of("a", 3)

    async def work():
        gate = Gate(core.core)
        storing = asyncio.ensure_future(core.store(session, opened, keys, blocks_of(keys)))
        await gate.reached()
        storing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await storing
        assert core.core.service.commits_running == 1
        assert core.lookup(session, opened, keys).blocks == 0
        gate.open()
        await core.core.service.finish()

    core.run(work())
    assert read(core, session, opened, keys) == blocks_of(keys)


def test_a_session_that_ends_leaves_its_staging_to_the_copy(core, session, opened):
    """P09 in its hardest phase: killed in commit."""
    keys = keys_of("a", 3)
    reader = core.session()
    core.open(reader)

    async def work():
        gate = Gate(core.core)
        storing = asyncio.ensure_future(core.store(session, opened, keys, blocks_of(keys)))
        await gate.reached()
        core.core.sessions.end(session.session_id, "killed")
        assert core.core.sessions.staging_nbytes == 2 << 20
        gate.open()
        return await storing

    assert core.run(work()) == [STORED] * 3
    assert core.core.sessions.staging_nbytes == 1 << 20
    assert read(core, reader, opened, keys) == blocks_of(keys)
