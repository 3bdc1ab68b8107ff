"""WINDOW and STATE groups on a core: what is stored at a boundary, found, leased, kept and lost."""

import asyncio
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import (
    AckLevel,
    CommitStatus,
    GroupKind,
    MissReason,
    RemovalStatus,
    StateMode,
    TierId,
)
from kvkeep_server.service.spec import GroupSpec
from tests.fakes import prefix_oracle
from tests.fakes.core_harness import MIB, Harness, full, keys_of, spec
from tests.fakes.nvme_tier import fast_directory

STORED, ALREADY = CommitStatus.STORED, CommitStatus.ALREADY_STORED
REMOVED, ABSENT, KEPT = RemovalStatus.REMOVED, RemovalStatus.ABSENT, RemovalStatus.KEPT
# Of 16 tokens a key: a window of 3 blocks; states at every second and at every fourth key.
SWA = GroupSpec("swa", GroupKind.WINDOW, 16, 8192, 40)
REPLAYABLE = GroupSpec("state", GroupKind.STATE, 32, 4096, 0, StateMode.REPLAYABLE)
EXACT = GroupSpec("mamba", GroupKind.STATE, 64, 12288, 0, StateMode.EXACT)


@pytest.fixture
def core():
    with Harness(ram="8MiB") as harness:
        yield harness
        harness.check_at_rest()


@pytest.fixture
def session(core):
    return core.session()


@pytest.fixture
def directory():
    with fast_directory() as path:
        yield path


def both(path):
    extra = f'[nvme]\ndirectories = ["{path}/kv"]\nmax = "64MiB"\nsegment = "4MiB"\nfree_min = "0B"'
    return Harness(ram="4MiB", slab="256KiB", extra=extra, ack=AckLevel.NVME)


def evict_all(core):
    while core.core.residency.evict(100):
        pass


def put(core, session, opened, keys, *positions, **options):
    """The first group everywhere, the others at these positions."""
    return core.put_at(session, opened, keys, [range(len(keys)), *positions], **options)


def ended(prefix):
    return prefix.blocks, prefix.ended


# --- look-ups


def test_a_window_needs_its_last_blocks_only(core, session):
    opened, keys = core.open(session, spec(groups=(full(), SWA))), keys_of("a", 10)
    assert put(core, session, opened, keys, [5, 6, 7]) == [STORED] * 10
    found = core.lookup(session, opened, keys)
    assert ended(found) == (8, MissReason.NEVER_SEEN)
    assert found.groups == (10, 8)
    assert ended(core.lookup(session, opened, keys[:8])) == (8, MissReason.UNSPECIFIED)
    assert ended(core.lookup(session, opened, keys[:7])) == (0, MissReason.NEVER_SEEN)
    core.put_at(session, opened, keys, [[], [8, 9]])
    assert ended(core.lookup(session, opened, keys)) == (10, MissReason.UNSPECIFIED)


def test_a_window_is_whole_where_the_chain_begins(core, session):
    opened, keys = core.open(session, spec(groups=(full(), SWA))), keys_of("a", 2)
    put(core, session, opened, keys, [0, 1])
    assert [core.lookup(session, opened, keys[:n]).blocks for n in (1, 2)] == [1, 2]


def test_an_exact_state_is_needed_at_the_end_and_a_replayable_one_is_not(core, session):
    groups = (full(), REPLAYABLE, EXACT)
    opened, keys = core.open(session, spec(groups=groups)), keys_of("a", 12)
    put(core, session, opened, keys, [1, 3], [3, 7])
    found = core.lookup(session, opened, keys)
    assert ended(found) == (8, MissReason.NEVER_SEEN)
    assert found.groups == (12, 4, 8)
    assert found.replayed == 4
    assert core.lookup(session, opened, keys[:7]).blocks == 4
    assert core.lookup(session, opened, keys[:4]).replayed == 0
    assert core.lookup(session, opened, keys[:3]).blocks == 0


def test_without_full_groups_the_last_state_counts(core, session):
    opened, keys = core.open(session, spec(groups=(EXACT,))), keys_of("a", 9)
    assert core.put_at(session, opened, keys, [[2, 6]]) == [
        *([ALREADY] * 2),
        STORED,
        *([ALREADY] * 3),
        STORED,
        *([ALREADY] * 2),
    ]
    assert core.lookup(session, opened, keys).blocks == 7
    grant = core.acquire(session, opened, keys)
    assert (grant.leased, grant.columns[0].positions.tolist()) == (7, [6])
    core.verify(grant, keys)
    core.release(session, grant)
    assert core.remove(session, opened, keys).units == 2
    assert core.lookup(session, opened, keys).blocks == 0


def test_a_rank_without_its_shard_shortens(core, session):
    opened, keys = core.open(session, spec(groups=(full(), SWA), tp_size=2)), keys_of("a", 6)
    put(core, session, opened, keys, [3, 4, 5], rank=0)
    put(core, session, opened, keys, [2, 3, 4], rank=1)
    assert core.lookup(session, opened, keys).blocks == 0
    core.put_at(session, opened, keys, [[], [2, 5]], rank=0)
    assert core.lookup(session, opened, keys).blocks == 5
    core.put_at(session, opened, keys, [[], [5]], rank=1)
    assert core.lookup(session, opened, keys).blocks == 6
    grant = core.acquire(session, opened, keys)
    core.verify(grant, keys)
    assert [needed.keyspace.rank for needed in grant.columns] == [0, 1, 0, 1]
    core.release(session, grant)


def test_look_ups_and_acquires_agree_with_the_rule(core, session):
    """Random commits, any order, several ranks and groups; every prefix is asked for."""
    groups = (full(), SWA, REPLAYABLE, EXACT)
    for seed in range(30):
        source = random.Random(seed)
        opened = core.open(session, spec(groups=groups, tp_size=2, tenant=f"t{seed}"))
        keys = keys_of(seed, 8)
        present = [[[False] * 8 for _ in range(2)] for _ in groups]
        for _ in range(source.randrange(8)):
            rank, whole = source.randrange(2), source.randrange(9)
            at = [range(whole)]
            at += [sorted(source.sample(range(8), source.randrange(4))) for _ in groups[1:]]
            core.put_at(session, opened, keys, at, rank=rank)
            for number, positions in enumerate(at):
                for position in positions:
                    present[number][rank][position] = True
        rules = [(0, 1, True), (3, 1, True), (1, 2, False), (1, 4, True)]
        case = tuple(
            prefix_oracle.Group(*rule, tuple(map(tuple, ranks)))
            for rule, ranks in zip(rules, present, strict=True)
        )
        for length in range(1, 9):
            wanted = prefix_oracle.usable(case, length)
            found = core.lookup(session, opened, keys[:length])
            assert found.blocks == wanted
            replayed = wanted - prefix_oracle.without_replay(case, wanted)
            assert found.replayed == replayed
            grant = core.acquire(session, opened, keys[:length])
            assert (grant.prefix.blocks, grant.leased) == (wanted, wanted)
            core.verify(grant, keys)
            if grant.lease is not None:
                core.release(session, grant)


# --- leases


def test_what_a_prefix_needs_is_leased_and_nothing_else(core, session):
    groups = (full(), SWA, REPLAYABLE, EXACT)
    opened, keys = core.open(session, spec(groups=groups)), keys_of("a", 9)
    put(core, session, opened, keys, range(9), [1, 3, 5], [3, 7])
    grant = core.acquire(session, opened, keys)
    assert (grant.prefix.blocks, grant.leased) == (8, 8)
    at = [needed.positions for needed in grant.columns]
    assert at[0] is None
    assert [own.tolist() for own in at[1:]] == [[5, 6, 7], [5], [7]]
    core.verify(grant, keys)
    blocks = 8 + 3 + 1 + 1
    assert len(grant.lease.blocks) == blocks
    assert grant.lease.nbytes == 8 * 4096 + 3 * 8192 + 4096 + 12288
    evict_all(core)
    core.verify(grant, keys)
    assert core.core.residency.held[TierId.RAM].blocks == blocks
    core.release(session, grant)


def test_what_the_caller_has_is_not_leased(core, session):
    opened, keys = core.open(session, spec(groups=(full(), SWA))), keys_of("a", 8)
    put(core, session, opened, keys, range(8))
    grant = core.acquire(session, opened, keys, skip=6)
    assert (grant.first, grant.leased) == (6, 2)
    assert grant.columns[1].positions.tolist() == [6, 7]
    core.verify(grant, keys)
    core.release(session, grant)


@pytest.mark.parametrize("budget", range(1, 130_000, 4000))
def test_within_a_byte_budget_the_leased_prefix_is_usable(core, session, budget):
    groups = (full(), SWA, EXACT)
    opened, keys = core.open(session, spec(groups=groups)), keys_of("a", 12)
    put(core, session, opened, keys, range(12), [3, 7, 11])
    grant = core.acquire(session, opened, keys, byte_budget=budget)
    fits = [n for n in (0, 4, 8, 12) if (n * 4096 + min(n, 3) * 8192 + (n > 0) * 12288 <= budget)]
    assert (grant.prefix.blocks, grant.leased) == (12, max(fits))
    if grant.lease is not None:
        core.verify(grant, keys)
        core.release(session, grant)


# --- commits


def test_what_is_offered_of_a_key_comes_whole_or_not_at_all(core, session):
    """No room for the fourth state: its key is refused, and those behind it."""
    big = GroupSpec("state", GroupKind.STATE, 16, MIB, 0, StateMode.EXACT)
    opened, keys = core.open(core.session(16 * MIB), spec(groups=(full(), big))), keys_of("a", 12)
    with_room = core.session(16 * MIB)
    core.open(with_room, spec(groups=(full(), big)))
    status = put(core, with_room, opened, keys, range(12))
    stored = status.count(STORED)
    assert 0 < stored < 12
    assert status == [STORED] * stored + [
        CommitStatus.REFUSED_NO_ROOM,
        *([CommitStatus.REFUSED_ORPHAN] * (11 - stored)),
    ]
    assert core.lookup(with_room, opened, keys).blocks == stored
    assert core.lookup(with_room, opened, keys).groups == (stored, stored)


def test_a_state_may_come_later_or_before(core, session):
    opened, keys = core.open(session, spec(groups=(full(), EXACT))), keys_of("a", 4)
    assert put(core, session, opened, keys, []) == [STORED] * 4
    assert core.lookup(session, opened, keys).blocks == 0
    assert core.put_at(session, opened, keys[3:], [[], [0]]) == [STORED]
    assert core.lookup(session, opened, keys).blocks == 4
    assert put(core, session, opened, keys, [3]) == [ALREADY] * 4
    assert put(core, session, opened, keys, [1, 3]) == [ALREADY, STORED, ALREADY, ALREADY]
    assert core.lookup(session, opened, keys[:2]).blocks == 2
    other = keys_of("b", 4)
    core.put_at(session, opened, other[3:], [[], [0]])
    assert core.lookup(session, opened, other).blocks == 0
    assert put(core, session, opened, other, []) == [STORED] * 4
    assert core.lookup(session, opened, other).blocks == 4


def test_full_blocks_of_the_last_keys_only(core, session):
    """Where a state is stored anew at a key whose FULL block is there, and new keys follow."""
    opened, keys = core.open(session, spec(groups=(full(), EXACT))), keys_of("a", 8)
    put(core, session, opened, keys[:5], [])
    assert core.put_at(session, opened, keys[3:], [[2, 3, 4], [0, 4]]) == [
        STORED,
        ALREADY,
        STORED,
        STORED,
        STORED,
    ]
    assert core.lookup(session, opened, keys).blocks == 8
    assert core.lookup(session, opened, keys[:4]).blocks == 4
    units = core.core.residency.columns
    assert (units.parent[units.in_use()] >= 0).sum() == 7


def test_repeated_keys_in_a_group_without_parents(core, session):
    opened, key = core.open(session, spec(groups=(EXACT,))), keys_of("a", 1)[0]
    assert core.put_at(session, opened, [key, key, key], [[0, 2]]) == [STORED, ALREADY, ALREADY]


# --- who leaves


def test_older_boundaries_go_first(core, session):
    opened, keys = core.open(session, spec(groups=(full(), EXACT))), keys_of("a", 8)
    put(core, session, opened, keys, [1, 3, 5, 7])
    core.lookup(session, opened, keys)
    left = []
    for _ in range(12):
        core.core.residency.evict(1)
        spaces = opened.spaces.groups[0].local
        ids = core.core.residency.find(spaces[0], _batch(keys))
        left.append(np.flatnonzero(ids >= 0).tolist())
    states = [own for at, own in enumerate(left) if at == 0 or own != left[at - 1]]
    assert states[-1] == []
    for earlier, later in pairwise(states):
        assert later == [position for position in earlier if position in later]
        assert not later or max(later) == 7


def _batch(keys):
    return KeyBatch.unpack(b"".join(keys), 32)


def test_a_state_is_evicted_without_its_chain(core, session):
    """What is replayable shortens nothing when it goes."""
    opened, keys = core.open(session, spec(groups=(full(), REPLAYABLE))), keys_of("a", 4)
    put(core, session, opened, keys, [3])
    assert core.lookup(session, opened, keys).replayed == 0
    core.core.service.manager.residency.remove(
        core.core.residency.columns.unit_of(
            core.core.residency.find(opened.spaces.groups[0].local[0], _batch(keys))[3:]
        ),
        MissReason.EVICTED,
    )
    found = core.lookup(session, opened, keys)
    assert (found.blocks, found.replayed) == (4, 4)


# --- removal


def test_removal_takes_all_groups_of_a_key_and_of_its_descendants(core, session):
    groups = (full(), SWA, EXACT)
    opened, keys = core.open(session, spec(groups=groups, tp_size=2)), keys_of("a", 8)
    for rank in range(2):
        put(core, session, opened, keys, range(8), [3, 7], rank=rank)
    removed = core.remove(session, opened, keys[4:5])
    assert removed.status.tolist() == [REMOVED]
    assert removed.units == 4
    residency = core.core.residency
    for group in opened.spaces.groups:
        for space in group.local:
            assert (residency.find(space, _batch(keys[4:])) == -1).all()
            assert (residency.find(space, _batch(keys[:4])) >= 0).any()
    assert core.remove(session, opened, keys[2:3], with_descendants=False).status.tolist() == [KEPT]
    assert core.lookup(session, opened, keys).blocks == 4
    core.remove(session, opened, keys)
    assert residency.held[TierId.RAM].blocks == 0


# --- nvme


def test_window_and_exact_state_stay_on_nvme_and_come_back(directory):
    groups = (full(), SWA, REPLAYABLE, EXACT)
    keys = keys_of("a", 8)
    with both(directory) as core:
        session = core.session()
        opened = core.open(session, spec(groups=groups, tp_size=2))
        for rank in range(2):
            assert put(core, session, opened, keys, range(8), [1, 7], [3, 7], rank=rank) == (
                [STORED] * 8
            )
        core.check()
        assert core.core.residency.held[TierId.NVME].blocks == 2 * (8 + 8 + 2)
        evict_all(core)
        found = core.lookup(session, opened, keys)
        assert (found.blocks, found.replayed) == (8, 8)
        assert found.runs == ((TierId.NVME, 8),)
        grant = core.acquire(session, opened, keys)
        assert (grant.leased, grant.pending) == (8, 0)
        core.verify(grant, keys)
        core.release(session, grant)
        core.check_at_rest()
    with both(directory) as core:
        session = core.session()
        opened = core.open(session, spec(groups=groups, tp_size=2))
        core.run(core.core.nvme.recovery.settled())
        core.check()
        assert core.core.nvme.recovery.counts.blocks == 2 * (8 + 8 + 2)
        assert core.lookup(session, opened, keys[:4]).blocks == 4
        grant = core.acquire(session, opened, keys)
        assert grant.leased == 8
        core.verify(grant, keys)
        core.release(session, grant)
        assert core.remove(session, opened, keys[6:]).units == 2
    with both(directory) as core:
        session = core.session()
        opened = core.open(session, spec(groups=groups, tp_size=2))
        core.run(core.core.nvme.recovery.settled())
        assert core.lookup(session, opened, keys).blocks == 4
        core.check()


def test_a_full_unit_that_lost_a_shard_is_not_made_whole_by_a_state(directory):
    """Records of one key in several groups: members are counted by boundary."""
    groups = (full("a"), full("b"), EXACT)
    keys = keys_of("a", 2)
    with both(directory) as core:
        session = core.session()
        opened = core.open(session, spec(groups=groups))
        core.put_at(session, opened, keys, [range(2), range(2), [1]])
        space = opened.spaces.local[1]
        second = core.core.residency.find(space, _batch(keys))[1:]
        named = core.core.residency.named(second)
        core.run(core.core.nvme.tier.remove(named))
    with both(directory) as core:
        session = core.session()
        opened = core.open(session, spec(groups=groups))
        core.run(core.core.nvme.recovery.settled())
        assert core.core.nvme.recovery.counts.blocks == 3
        assert core.lookup(session, opened, keys).groups == (1, 1, 0)
        core.check()


def test_without_time_the_prefix_is_pending_up_to_its_state(directory):
    with both(directory) as core:
        session = core.session()
        opened, keys = core.open(session, spec(groups=(full(), EXACT))), keys_of("a", 8)
        put(core, session, opened, keys, [3, 7])
        evict_all(core)
        core.wait_s = 0.0
        grant = core.acquire(session, opened, keys)
        assert (grant.prefix.blocks, grant.leased, grant.pending) == (8, 0, 8)
        core.wait_s = 30.0
        grant = core.acquire(session, opened, keys)
        assert (grant.leased, grant.pending) == (8, 0)
        core.verify(grant, keys)
        core.release(session, grant)


def test_a_state_that_nvme_does_not_give_ends_the_prefix_at_the_one_before(directory):
    with both(directory) as core:
        session = core.session()
        opened, keys = core.open(session, spec(groups=(full(), EXACT))), keys_of("a", 8)
        put(core, session, opened, keys, [3, 7])
        evict_all(core)
        space = opened.spaces.groups[0].local[0]
        last = core.core.residency.find(space, _batch(keys))[7]
        location = int(core.core.residency.columns.nvme[last])
        path = max(Path(directory).rglob("*"), key=lambda at: at.is_file() and at.stat().st_size)
        with path.open("r+b") as segment:
            segment.seek((location & 0xFFFFFFFF) * 4096 + 4096)
            segment.write(b"\xff" * 64)
        grant = core.acquire(session, opened, keys)
        assert grant.prefix.blocks in (4, 0)
        again = core.acquire(session, opened, keys)
        assert (again.prefix.blocks, again.leased) == (4, 4)
        core.verify(again, keys)
        for one in (grant, again):
            if one.lease is not None:
                core.release(session, one)


def test_two_removals_of_one_chain_at_once(directory):
    """Each pauses to tell nvme; what the other one took out meanwhile is left alone."""
    with both(directory) as core:
        session = core.session()
        opened = core.open(session, spec(groups=(full(), SWA, EXACT)))
        service = core.core.service
        for turn in range(10):
            keys = keys_of(turn, 32)
            put(core, session, opened, keys, range(32), range(3, 32, 4))

            async def twice(keys=keys):
                def removal(of):
                    packed = b"".join(of)
                    return service.remove(
                        session, opened.spaces.index, packed, with_descendants=True
                    )

                return await asyncio.gather(removal(keys[:1]), removal(keys), removal(keys[4:]))

            core.run(twice())
            core.check()
            assert core.core.residency.held[TierId.NVME].blocks == 0
