"""Await: what becomes of leased blocks that were not in ram when the lease was given."""

import asyncio

import numpy as np
import pytest

from kvkeep_server.core.hints import Hints
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import (
    AckLevel,
    BlockStatus,
    GroupKind,
    MissReason,
    RenewStatus,
    StateMode,
)
from kvkeep_server.service.spec import GroupSpec
from kvkeep_server.tiering import promotion
from kvkeep_server.tiering.manager import Arrived, ReadOrder
from tests.fakes.core_harness import Harness, block_of, full, keys_of, salt_of, spec
from tests.fakes.nvme_tier import fast_directory

READY, CORRUPT, DOWN, MISS = (
    BlockStatus.READY,
    BlockStatus.CORRUPT,
    BlockStatus.TIER_DOWN,
    BlockStatus.MISS,
)
EXACT = GroupSpec("mamba", GroupKind.STATE, 64, 12288, 0, StateMode.EXACT)
KEYS = keys_of("a", 40)


@pytest.fixture
def core(monkeypatch):
    # Pieces of four blocks, so that they come one after the other.
    monkeypatch.setattr(promotion, "_PIECE_NBYTES", 4 * 4096)
    with fast_directory() as path:
        extra = f'[nvme]\ndirectories = ["{path}/kv"]\nmax = "64MiB"\nsegment = "4MiB"\n'
        extra += 'free_min = "0B"'
        with Harness(ram="4MiB", slab="256KiB", extra=extra, ack=AckLevel.NVME) as harness:
            harness.wait_s = 0.0
            yield harness
            harness.run(harness.core.nvme.promotion.finish())
            harness.check_at_rest()


@pytest.fixture
def session(core):
    return core.session()


def on_nvme_only(core, session, opened, *, count=40, others=()):
    core.put_at(session, opened, KEYS[:count], [range(count), *others])
    while core.core.residency.evict(100):
        pass


def told(core, session, grant):
    """All answers of one Await."""

    async def collect():
        lease_id = grant.lease.lease_id
        return [one async for one in core.core.service.arrivals(session, lease_id)]

    return core.run(collect())


def statuses(answers):
    return [BlockStatus(one) for answer in answers for one in answer.status]


def check_bytes(core, answers):
    """What is told to be ready holds its bytes, at its positions."""
    found = {}
    for answer in answers:
        for needed in answer.columns:
            space = needed.keyspace
            addresses = core.core.residency.columns.address_of(needed.ids).tolist()
            for at, address in zip(needed.at().tolist(), addresses, strict=True):
                assert answer.first <= at < answer.first + len(answer.status)
                payload = bytes(core.core.ram.view(address, space.block_nbytes))
                salt = salt_of(space.rank, space.group)
                assert payload == block_of(KEYS[at], space.block_nbytes, salt)
                found.setdefault((space.rank, space.group), []).append(at)
    return found


def test_blocks_are_told_as_they_come(core, session):
    opened = core.open(session)
    on_nvme_only(core, session, opened)
    grant = core.acquire(session, opened, KEYS)
    assert (grant.leased, grant.pending) == (0, 40)
    assert len(grant.lease.blocks) == 40
    answers = told(core, session, grant)
    assert len(answers) > 1
    assert [answer.first for answer in answers] == sorted(answer.first for answer in answers)
    assert statuses(answers) == [READY] * 40
    assert check_bytes(core, answers) == {(0, 0): list(range(40))}
    assert statuses(told(core, session, grant)) == [READY] * 40
    while core.core.residency.evict(100):
        pass
    assert check_bytes(core, told(core, session, grant)) == {(0, 0): list(range(40))}
    core.release(session, grant)


def test_nothing_leaves_before_the_acquire_has_its_turn(core, session):
    """It goes on in a task, and others may have theirs first."""
    opened = core.open(session)
    on_nvme_only(core, session, opened)
    core.wait_s = 30.0
    core.release(session, core.acquire(session, opened, KEYS[:10]))

    async def raced():
        order = ReadOrder(session.session_id, 10, 0, 0, Hints(), 30.0)
        coming, _ = core.core.service.acquire(
            session, opened.spaces.index, b"".join(KEYS), (), order
        )
        assert core.core.residency.evict(100) == 0
        removing = core.core.service.remove(
            session, opened.spaces.index, KEYS[20], with_descendants=True
        )
        return await asyncio.gather(coming, removing)

    grant, removed = core.run(raced())
    assert removed.units == 20
    assert grant.leased <= 20
    core.verify(grant, KEYS)
    core.release(session, grant)
    columns = core.core.residency.columns
    assert not columns.pins[columns.in_use()].any()


def test_nothing_is_told_of_what_was_there(core, session):
    opened = core.open(session)
    core.put(session, opened, KEYS)
    grant = core.acquire(session, opened, KEYS)
    assert (grant.leased, grant.pending) == (40, 0)
    assert told(core, session, grant) == []
    core.release(session, grant)


def test_only_what_was_pending_is_told(core, session):
    opened = core.open(session)
    on_nvme_only(core, session, opened)
    core.wait_s = 30.0
    core.release(session, core.acquire(session, opened, KEYS[:10]))
    core.wait_s = 0.0
    grant = core.acquire(session, opened, KEYS, skip=3)
    assert (grant.first, grant.leased, grant.pending) == (3, 7, 30)
    core.verify(grant, KEYS)
    answers = told(core, session, grant)
    assert answers[0].first == 10
    assert statuses(answers) == [READY] * 30
    assert check_bytes(core, answers) == {(0, 0): list(range(10, 40))}
    core.release(session, grant)


def test_states_come_with_their_key_and_only_wanted_groups_are_told(core, session):
    opened = core.open(session, spec(groups=(full(), EXACT), tp_size=2))
    for rank in range(2):
        core.put_at(session, opened, KEYS[:8], [range(8), [3, 7]], rank=rank)
    while core.core.residency.evict(100):
        pass
    for groups, wanted in (((), (0, 1)), ((1,), (1,))):
        grant = core.acquire(session, opened, KEYS[:8], groups=groups)
        answers = told(core, session, grant) if grant.pending else [grant_as_answer(grant)]
        found = check_bytes(core, answers)
        assert {group for _, group in found} == set(wanted)
        assert found[0, 1] == found[1, 1] == [7]
        core.release(session, grant)
        while core.core.residency.evict(100):
            pass


def grant_as_answer(grant):
    return Arrived(grant.first, bytes([READY]) * grant.leased, grant.columns)


@pytest.mark.parametrize("spoiled", [0, 5, 39])
def test_a_block_that_nvme_does_not_give_is_told_at_last(core, session, spoiled):
    opened = core.open(session)
    on_nvme_only(core, session, opened)
    batch = KeyBatch.unpack(b"".join(KEYS), 32)
    block = core.core.residency.find(opened.spaces.local[0], batch)[spoiled]
    core.core.residency.forget(np.array([block]), MissReason.CORRUPT)
    core.core.residency.lost.clear()  # as if it were found so while it is read
    grant = core.acquire(session, opened, KEYS)
    answers = told(core, session, grant)
    assert statuses(answers) == [READY] * spoiled + [CORRUPT] + [MISS] * (39 - spoiled)
    assert check_bytes(core, answers).get((0, 0), []) == list(range(spoiled))
    core.release(session, grant)
    core.core.residency.lost[core.core.residency.unit(int(block))] = MissReason.CORRUPT
    core.run(core.core.nvme.removal.of_lost())


@pytest.mark.parametrize("removed", [0, 5, 39])
def test_what_will_not_come_is_told_at_last(core, session, removed):
    opened = core.open(session)
    on_nvme_only(core, session, opened)
    grant = core.acquire(session, opened, KEYS)
    core.remove(session, opened, KEYS[removed : removed + 1])
    answers = told(core, session, grant)
    got = statuses(answers)
    assert len(got) == 40
    # What had come before it was removed can be read until the lease ends.
    ready = got.count(READY)
    assert got[:ready] == [READY] * ready
    assert got[ready : ready + 1] in ([CORRUPT], [DOWN], [])
    assert got[ready + 1 :] == [MISS] * max(0, 39 - ready)
    assert check_bytes(core, answers).get((0, 0), []) == list(range(ready))
    core.release(session, grant)


def test_a_lease_that_ends_ends_the_waiting(core, session):
    opened = core.open(session)
    on_nvme_only(core, session, opened)
    grant = core.acquire(session, opened, KEYS)
    core.clock.advance(60)
    core.core.service.sweep()
    with pytest.raises(Exception, match="acquire again"):
        told(core, session, grant)
    assert core.renew(session, grant) in (RenewStatus.LOST, RenewStatus.RENEWED)


def test_an_expired_lease_is_renewed_only_when_all_of_it_had_come(core, session):
    opened = core.open(session)
    on_nvme_only(core, session, opened)
    grant = core.acquire(session, opened, KEYS)
    told(core, session, grant)
    core.clock.advance(60)
    core.core.service.sweep()
    assert core.renew(session, grant) is RenewStatus.RENEWED
    core.release(session, grant)
