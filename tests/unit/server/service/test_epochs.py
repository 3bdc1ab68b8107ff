"""The epoch of a namespace set ends: what is found, refused and emptied, and who is told."""

import asyncio
import errno

import pytest

from kvkeep_server.core.errors import FailedPreconditionError, TierUnavailableError
from kvkeep_server.core.results import AckLevel, CommitStatus, GroupKind, MissReason, StateMode
from kvkeep_server.service.spec import GroupSpec
from tests.fakes.core_harness import MIB, Gate, Harness, full, keys_of, spec
from tests.fakes.faulty_files import FaultyFiles

KEYS = keys_of("a", 4)
STORED = CommitStatus.STORED
WITH_STATE = spec(
    groups=(full(), GroupSpec("s", GroupKind.STATE, 16, 512, state_mode=StateMode.EXACT))
)


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
    opened = core.open(session)
    assert core.put(session, opened, KEYS) == [STORED] * 4
    return opened


def advance(core, session, opened, expected=0):
    work = core.core.service.advance_epoch(session, opened.spaces.index, expected)
    return core.run(work)


def emptied(core):
    async def wait():
        await asyncio.gather(*core.core.service.control._purges.values())

    core.run(wait())


def events(session):
    return [(event.name, event.values) for event in session.events]


def blocks(core):
    return len(core.core.residency.columns.in_use())


def test_what_was_stored_is_found_by_nobody(core, session, opened):
    assert advance(core, session, opened) == 1
    prefix = core.lookup(session, opened, KEYS)
    assert (prefix.blocks, prefix.ended) == (0, MissReason.NAMESPACE_MISMATCH)
    assert core.acquire(session, opened, KEYS).lease is None
    again = core.open(session)
    assert again.namespace_set.spec.namespace_epoch == 1
    assert again.spaces.index != opened.spaces.index
    assert core.lookup(session, again, KEYS).blocks == 0
    assert core.put(session, again, KEYS) == [STORED] * 4
    assert core.lookup(session, again, KEYS).blocks == 4
    assert core.put(session, opened, KEYS) == [CommitStatus.REFUSED_EPOCH] * 4


def test_who_has_it_open_is_told_once(core, session, opened):
    other, stranger = core.session(), core.session()
    theirs = core.open(other)
    advance(core, session, opened)
    told = {"set_index": theirs.spaces.index, "namespace_epoch": 1}
    assert events(other) == [("namespace_epoch_changed", told)]
    again = core.open(other)
    assert core.run(core.core.service.advance_epoch(other, again.spaces.index, 1)) == 2
    assert [values["namespace_epoch"] for _, values in events(other)] == [1, 2]
    assert not stranger.events
    # Handles of earlier epochs do not add up.
    assert other.opened == {again.spaces.index}


def test_of_many_that_call_one_goes_forward(core, session, opened):
    async def all_at_once():
        call = core.core.service.advance_epoch
        return await asyncio.gather(*(call(session, opened.spaces.index, 0) for _ in range(10)))

    assert core.run(all_at_once()) == [1] * 10
    assert core.core.service.namespaces.epochs.advanced_total == 1


def test_an_epoch_that_is_yet_to_come_is_refused(core, session, opened):
    with pytest.raises(FailedPreconditionError, match=r"expected_epoch is 3, the present one 0"):
        advance(core, session, opened, 3)
    assert core.lookup(session, opened, KEYS).blocks == 4


def test_an_epoch_that_was_named_goes_on_from_there(core, session, opened):
    seventh = core.open(session, spec(namespace_epoch=7))
    assert advance(core, session, seventh, 7) == 8
    for named in (0, 7, 8):
        assert core.open(session, spec(namespace_epoch=named)).namespace_set.spec == spec(
            namespace_epoch=8
        )
    assert core.open(session, spec(namespace_epoch=9)).namespace_set.spec.namespace_epoch == 9
    assert {values["set_index"] for _, values in events(session)} == {
        opened.spaces.index,
        seventh.spaces.index,
    }


def test_old_blocks_leave_in_the_background_and_a_lease_holds(core, session):
    opened = core.open(session, WITH_STATE)
    core.put(session, opened, KEYS)
    core.put(session, opened, keys_of("b", 9))
    leased = core.acquire(session, opened, KEYS)
    advance(core, session, opened)
    emptied(core)
    assert blocks(core) == 0
    core.verify(leased, KEYS)
    core.release(session, leased)
    assert core.core.ram.slabs.used_nbytes == 0
    left = core.core.residency.left
    assert left[MissReason.NAMESPACE_MISMATCH] == 26
    assert left[MissReason.REMOVED] == 0


def test_others_stay(core, session, opened):
    other = core.open(session, spec(model="other"))
    core.put(session, other, KEYS)
    advance(core, session, opened)
    emptied(core)
    assert core.lookup(session, other, KEYS).blocks == 4


def test_a_commit_under_way_lands_in_the_old_epoch_and_is_emptied(core, session, opened):
    gate, keys = Gate(core.core), keys_of("late", 3)

    async def work():
        groups = core.lay(session, opened, [[bytes(4096)] * 3])
        running = asyncio.create_task(core.commit(session, opened, keys, groups))
        await gate.reached()
        assert await core.core.service.advance_epoch(session, opened.spaces.index, 0) == 1
        await asyncio.sleep(0.2)
        again = core.open(session)
        gate.open()
        assert await running == [STORED] * 3
        return again

    again = core.run(work())
    for handle in (opened, again):
        assert core.lookup(session, handle, keys).blocks == 0
    emptied(core)
    assert blocks(core) == 0


def test_the_old_set_is_forgotten_when_its_room_is_wanted(core, session, opened):
    for epoch in range(20):
        handle = core.open(session)
        core.put(session, handle, KEYS)
        assert advance(core, session, handle, epoch) == epoch + 1
    emptied(core)
    core.clock.advance(10)
    core.core.service._forget_idle()
    assert len(core.core.service.namespaces) <= 2


def test_sessions_may_advance_more_often_than_they_may_open(core):
    with Harness(extra="[limits]\nsession_namespaces_max = 2\n") as few:
        session = few.session()
        for epoch in range(5):
            assert advance(few, session, few.open(session), epoch) == epoch + 1


# ---- with nvme


def nvme(tmp_path, files=None):
    extra = f'[nvme]\ndirectories = ["{tmp_path}"]\nmax = "64MiB"\nsegment = "1MiB"\n'
    facts = {} if files is None else {"files": files}
    return Harness(extra=extra + 'free_min = "1MiB"\n', ack=AckLevel.NVME, **facts)


def recovered(core):
    core.run(core.core.nvme.recovery.settled())


def test_a_restart_goes_back_to_no_earlier_epoch(tmp_path):
    with nvme(tmp_path) as core:
        session = core.session(4 * MIB)
        opened = core.open(session, WITH_STATE)
        assert core.put(session, opened, KEYS) == [STORED] * 4
        assert advance(core, session, opened) == 1
        again = core.open(session, WITH_STATE)
        assert core.put(session, again, keys_of("new", 3)) == [STORED] * 3
    with nvme(tmp_path) as core:
        recovered(core)
        assert blocks(core) == 6, "of the present epoch only"
        session = core.session()
        opened = core.open(session, WITH_STATE)
        assert opened.namespace_set.spec.namespace_epoch == 1
        assert core.lookup(session, opened, KEYS).blocks == 0
        assert core.lookup(session, opened, keys_of("new", 3)).blocks == 3
        assert not core.core.nvme.tier.stats().directories[0].foreign


def test_what_is_not_written_down_is_over_all_the_same_and_told(tmp_path):
    broken = [False]

    def plan(name, _):
        return errno.EIO if broken[0] and name == "sync_directory" else 0

    with nvme(tmp_path, lambda: FaultyFiles(plan)) as core:
        session = core.session()
        opened = core.open(session)
        core.put(session, opened, KEYS)
        broken[0] = True
        with pytest.raises(TierUnavailableError, match="not on the medium"):
            advance(core, session, opened)
        assert core.lookup(session, opened, KEYS).blocks == 0
        assert len(session.events) == 1
        with pytest.raises(TierUnavailableError):
            advance(core, session, opened)
        broken[0] = False
        assert advance(core, session, opened) == 1
        assert len(session.events) == 1
    with nvme(tmp_path) as core:
        opened = core.open(core.session())
        assert opened.namespace_set.spec.namespace_epoch == 1


def test_records_of_an_epoch_that_is_over_are_not_written_again(tmp_path):
    with nvme(tmp_path) as core:
        session = core.session(4 * MIB)
        opened = core.open(session)
        core.put(session, opened, KEYS)
        advance(core, session, opened)
        emptied(core)
        records = core.core.nvme.records
        assert not (core.core.residency.columns.nvme != 0).any()
        assert records.unsettled is None
