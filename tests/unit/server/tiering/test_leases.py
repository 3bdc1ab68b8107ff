"""Leases: who may read until when, and what a reader that comes late is told."""

import random

import pytest

from kvkeep_server.core.errors import ResourceExhaustedError
from kvkeep_server.core.results import CommitStatus, RenewStatus
from kvkeep_server.tiering import leases as leases_module
from tests.fakes.core_harness import Harness, keys_of, spec

TTL_S = 30.0


@pytest.fixture
def core():
    with Harness(
        ram="4MiB", extra='[leases]\nttl = "30s"\nleases_max = 20\nremembered_max = 8'
    ) as h:
        yield h


@pytest.fixture
def session(core):
    return core.session()


@pytest.fixture
def opened(core, session):
    return core.open(session)


@pytest.fixture
def keys(core, session, opened):
    keys = keys_of("chain", 8)
    assert set(core.put(session, opened, keys)) == {CommitStatus.STORED}
    return keys


def live(core):
    return len(core.core.leases)


def pinned(core):
    return int((core.core.residency.columns.pins > 0).sum())


def evict_all(core):
    while core.core.residency.evict(100):
        pass


def wait(core, seconds):
    core.clock.advance(seconds)
    core.core.leases.expire()


# ---- giving and taking back


def test_a_lease_pins_until_it_is_released(core, session, opened, keys):
    grant = core.acquire(session, opened, keys)
    assert (live(core), pinned(core)) == (1, 8)
    evict_all(core)
    core.verify(grant, keys)
    assert core.release(session, grant) == 1
    assert (live(core), pinned(core), core.core.leases.leased_nbytes) == (0, 0, 0)
    evict_all(core)
    assert core.acquire(session, opened, keys).lease is None


def test_releasing_twice_or_after_the_end_is_no_error(core, session, opened, keys):
    """B027: idempotent, and no count goes below zero."""
    grant = core.acquire(session, opened, keys)
    other = core.acquire(session, opened, keys[:3])
    assert core.release(session, grant) == 1
    assert core.release(session, grant) == 0
    assert pinned(core) == 3
    wait(core, TTL_S + 1)
    assert core.release(session, other) == 0
    assert core.release(session, other) == 0
    assert pinned(core) == 0
    assert core.core.leases.leased_nbytes == 0
    core.check()


def test_unknown_ids_and_repetitions_in_one_call_are_no_error(core, session, opened, keys):
    lease_id = core.acquire(session, opened, keys).lease.lease_id
    assert core.core.service.release(session, [lease_id, lease_id, 0, 1, (1 << 64) - 1]) == 1
    assert pinned(core) == 0


def test_a_lease_of_somebody_else_cannot_be_released(core, session, opened, keys):
    grant = core.acquire(session, opened, keys)
    stranger = core.session()
    assert core.release(stranger, grant) == 0
    assert live(core) == 1


def test_leases_on_the_same_blocks_are_counted(core, session, opened, keys):
    grants = [core.acquire(session, opened, keys[: n + 1]) for n in range(8)]
    random.Random(1).shuffle(grants)
    for left, grant in reversed(list(enumerate(grants))):
        core.release(session, grant)
        core.check()
        assert live(core) == left
    assert pinned(core) == 0


def test_a_chain_with_repetitions_is_pinned_once_and_leased_as_asked(core, session, opened, keys):
    """No sane engine asks for one; a hostile one must not unbalance the pins."""
    asked = [keys[0], keys[1], keys[0], keys[1], keys[2]]
    grant = core.acquire(session, opened, asked)
    assert grant.leased == 5
    core.verify(grant, asked)
    core.check()
    core.release(session, grant)
    assert pinned(core) == 0


def test_ids_are_random_and_never_zero(core, session, opened, keys):
    ids = [core.acquire(session, opened, keys[:1]).lease.lease_id for _ in range(20)]
    assert len(set(ids)) == 20
    assert 0 not in ids
    assert max(ids) > 1 << 60


# ---- time


@pytest.mark.parametrize(
    ("asked", "given"), [(0.0, 30.0), (-1.0, 30.0), (5.0, 5.0), (30.0, 30.0), (1e9, 30.0)]
)
def test_the_life_of_a_lease_has_a_default_and_an_upper_limit(core, asked, given):
    assert core.core.leases.life_s(asked) == given


def test_a_lease_ends_by_time(core, session, opened, keys):
    core.acquire(session, opened, keys, ttl_s=10)
    wait(core, 9.9)
    assert live(core) == 1
    wait(core, 0.2)
    assert (live(core), pinned(core)) == (0, 0)
    assert core.core.leases.expired_total == 1


def test_expired_but_resident_is_renewed(core, session, opened, keys):
    """P10, B030."""
    grant = core.acquire(session, opened, keys)
    wait(core, TTL_S + 1)
    assert core.renew(session, grant) == RenewStatus.RENEWED
    assert pinned(core) == 8
    evict_all(core)
    core.verify(grant, keys)
    wait(core, 9)
    assert live(core) == 1
    core.release(session, grant)
    assert pinned(core) == 0


def test_an_expired_lease_whose_slot_was_used_anew_is_lost_and_stays_lost(
    core, session, opened, keys
):
    """P10: also for the second worker that asks, and for a call that is sent again."""
    grant = core.acquire(session, opened, keys)
    wait(core, TTL_S + 1)
    core.core.residency.evict(1)  # the tail
    assert core.renew(session, grant) == RenewStatus.LOST
    assert core.renew(session, grant) == RenewStatus.LOST
    assert pinned(core) == 0
    core.put(session, opened, keys)
    assert core.renew(session, grant) == RenewStatus.LOST, "the same bytes in another slot"


def test_lost_also_when_ids_and_slots_were_given_to_others(core, session, opened, keys):
    grant = core.acquire(session, opened, keys)
    wait(core, TTL_S + 1)
    evict_all(core)
    others = keys_of("other", 8)
    core.put(session, opened, others)
    columns = core.core.residency.columns
    assert set(grant.lease.blocks.tolist()) == set(columns.in_use().tolist()), "ids are reused"
    assert core.renew(session, grant) == RenewStatus.LOST


def test_renewing_extends_and_never_shortens(core, session, opened, keys):
    grant = core.acquire(session, opened, keys, ttl_s=10)
    wait(core, 9)
    assert core.renew(session, grant, ttl_s=10) == RenewStatus.RENEWED
    wait(core, 9)
    assert live(core) == 1
    core.renew(session, grant, ttl_s=20)
    core.renew(session, grant, ttl_s=1)
    wait(core, 19)
    assert live(core) == 1
    wait(core, 2)
    assert live(core) == 0


def test_what_was_never_given_or_released_is_unknown(core, session, opened, keys):
    grant = core.acquire(session, opened, keys)
    core.release(session, grant)
    assert core.renew(session, grant) == RenewStatus.UNKNOWN
    status, life_s = core.core.service.renew(session, [0, 7, (1 << 64) - 1], 5)
    assert set(status) == {RenewStatus.UNKNOWN}
    assert life_s == 5


def test_released_after_it_expired_is_forgotten(core, session, opened, keys):
    grant = core.acquire(session, opened, keys)
    wait(core, TTL_S + 1)
    core.release(session, grant)
    assert core.renew(session, grant) == RenewStatus.UNKNOWN


# ---- several sessions


def test_a_worker_joins_the_lease_of_its_scheduler(core, session, opened, keys):
    grant = core.acquire(session, opened, keys)
    worker = core.session()
    core.open(worker)
    assert core.renew(worker, grant) == RenewStatus.RENEWED
    assert core.release(session, grant) == 1
    assert live(core) == 1, "it ends with the last that holds it"
    assert core.release(session, grant) == 0
    assert core.release(worker, grant) == 1
    assert pinned(core) == 0


def test_a_worker_of_other_ranks_of_the_set_joins_too(core, session):
    whole = core.open(session, spec(tp_size=2, model="m"), [0])
    keys = keys_of("ranks", 2)
    core.put(session, whole, keys)
    grant = core.acquire(session, whole, keys)
    worker = core.session()
    core.open(worker, spec(tp_size=2, model="m"), [0, 1])
    assert core.renew(worker, grant) == RenewStatus.RENEWED


@pytest.mark.parametrize("expired", [False, True])
def test_who_has_not_opened_the_set_cannot_join(core, session, opened, keys, expired):
    grant = core.acquire(session, opened, keys)
    stranger = core.session()
    core.open(stranger, spec(kv_dtype="fp8"))
    if expired:
        wait(core, TTL_S + 1)
    assert core.renew(stranger, grant) == RenewStatus.UNKNOWN
    assert core.renew(session, grant) == RenewStatus.RENEWED


def test_the_end_of_a_session_ends_what_only_it_holds(core, session, opened, keys):
    """P09."""
    alone = core.acquire(session, opened, keys)
    shared = core.acquire(session, opened, keys[:3])
    worker = core.session()
    core.open(worker)
    core.renew(worker, shared)
    core.core.sessions.end(session.session_id, "eof")
    assert (live(core), pinned(core)) == (1, 3)
    assert core.renew(worker, alone) == RenewStatus.UNKNOWN
    assert core.release(worker, shared) == 1
    assert pinned(core) == 0


def test_one_that_releases_after_expiry_does_not_speak_for_the_others(core, session, opened, keys):
    grant = core.acquire(session, opened, keys)
    worker = core.session()
    core.open(worker)
    core.renew(worker, grant)
    wait(core, TTL_S + 1)
    core.release(session, grant)
    assert core.renew(worker, grant) == RenewStatus.RENEWED


def test_a_frozen_clients_leases_come_back_with_its_session(core, session, opened, keys):
    """P09: silent for sessions.timeout."""
    core.acquire(session, opened, keys, ttl_s=TTL_S)
    core.clock.advance(core.core.sessions.limits.timeout_s + 1)
    core.core.service.sweep()
    assert len(core.core.sessions) == 0
    assert pinned(core) == 0


# ---- bounds


def test_leases_are_limited_and_time_makes_room(core, session, opened, keys):
    for _ in range(20):
        core.acquire(session, opened, keys[:1], ttl_s=5)
    with pytest.raises(ResourceExhaustedError, match=r"leases\.leases_max = 20") as refusal:
        core.acquire(session, opened, keys[:1])
    assert 0 < refusal.value.retry_after_s <= 1
    assert pinned(core) == 1
    core.clock.advance(6)  # nobody swept
    assert core.acquire(session, opened, keys[:1]).lease is not None
    assert live(core) == 1


def test_leased_blocks_are_limited_too(core, session, opened, keys, monkeypatch):
    """P14: a lease costs memory by the block."""
    monkeypatch.setattr(leases_module, "_BLOCKS_MIN", 20)
    monkeypatch.setattr(leases_module, "_BLOCKS_A_LEASE", 1)
    grants = [core.acquire(session, opened, keys) for _ in range(2)]
    with pytest.raises(ResourceExhaustedError, match="16 blocks are leased"):
        core.acquire(session, opened, keys)
    core.acquire(session, opened, keys[:4])
    core.release(session, grants[0])
    core.acquire(session, opened, keys)


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first(core, session, opened, keys):
    grants = []
    for _ in range(12):
        grants.append(core.acquire(session, opened, keys[:1], ttl_s=1))
        wait(core, 2)
    status = [core.renew(session, grant) for grant in grants]
    assert status == [RenewStatus.UNKNOWN] * 4 + [RenewStatus.RENEWED] * 8


def test_what_is_remembered_is_bounded_in_blocks(core, session, opened, keys, monkeypatch):
    monkeypatch.setattr(leases_module, "_BLOCKS_MIN", 20)
    monkeypatch.setattr(leases_module, "_BLOCKS_A_LEASE", 1)
    grants = []
    for _ in range(5):
        grants.append(core.acquire(session, opened, keys, ttl_s=1))
        wait(core, 2)
    status = [core.renew(session, grant) for grant in grants]
    assert status == [RenewStatus.UNKNOWN] * 3 + [RenewStatus.RENEWED] * 2


def test_renewing_for_ever_does_not_pile_up(core, session, opened, keys):
    grant = core.acquire(session, opened, keys)
    for _ in range(50):
        core.core.service.renew(session, [grant.lease.lease_id] * 100, 30)
        core.core.leases.expire()
    assert len(core.core.leases._due) < 1200


def test_sessions_that_are_gone_leave_nothing(core, keys):
    for _ in range(5):
        session = core.session()
        opened = core.open(session)
        for _ in range(3):
            core.acquire(session, opened, keys)
        core.core.sessions.end(session.session_id, "eof")
    assert core.core.leases._of_session == {}
    assert live(core) == 0
