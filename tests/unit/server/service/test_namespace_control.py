"""Modes of namespace sets: what is refused, what is hidden, who is told."""

import pytest

from kvkeep_server.core.errors import InvalidArgumentError, NotFoundError
from kvkeep_server.core.results import CommitStatus, MissReason, NamespaceMode
from tests.fakes.core_harness import Harness, full, keys_of, spec

NORMAL, READ_ONLY, BYPASS = NamespaceMode.NORMAL, NamespaceMode.READ_ONLY, NamespaceMode.BYPASS
KEYS = keys_of("a", 4)


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
    core.put(session, opened, KEYS)
    return opened


def turn(core, opened, mode):
    return core.core.service.control.set_mode(opened.namespace_set.set_id, mode)


def events(session):
    return [(event.name, event.values) for event in session.events]


def test_read_only_finds_and_refuses_with_a_status(core, session, opened):
    assert turn(core, opened, READ_ONLY) is NORMAL
    status = core.put(session, opened, keys_of("b", 3))
    assert status == [CommitStatus.REFUSED_READ_ONLY] * 3
    assert core.lookup(session, opened, KEYS).blocks == 4
    with_lease = core.acquire(session, opened, KEYS)
    core.verify(with_lease, KEYS)
    core.release(session, with_lease)
    counts = core.core.service.commits.counts
    assert counts.refused == 3
    assert counts.failed == 0


def test_bypass_finds_nothing_says_why_and_keeps_what_is_there(core, session, opened):
    before = core.acquire(session, opened, KEYS)
    assert turn(core, opened, BYPASS) is NORMAL
    prefix = core.lookup(session, opened, KEYS)
    assert (prefix.blocks, prefix.ended) == (0, MissReason.BYPASSED)
    grant = core.acquire(session, opened, KEYS)
    assert (grant.lease, grant.leased, grant.prefix.ended) == (None, 0, MissReason.BYPASSED)
    assert core.put(session, opened, keys_of("b", 1)) == [CommitStatus.REFUSED_READ_ONLY]
    core.verify(before, KEYS)
    counts = core.core.service.manager.counts
    counts.lookup.check()
    assert counts.missed_by() == {MissReason.BYPASSED: 8}
    assert turn(core, opened, NORMAL) is BYPASS
    assert core.lookup(session, opened, KEYS).blocks == 4
    assert core.core.service.control.count() == {READ_ONLY: 0, BYPASS: 0}
    core.release(session, before)


def test_other_sets_are_left_alone(core, session, opened):
    other = core.open(session, spec(model="other"))
    turn(core, opened, BYPASS)
    assert core.put(session, other, KEYS) == [CommitStatus.STORED] * 4
    assert core.lookup(session, other, KEYS).blocks == 4


def test_who_has_it_open_is_told_by_every_handle(core, session, opened):
    wide = spec(tp_size=2, groups=(full(),))
    one, two = core.open(session, wide, (0,)), core.open(session, wide, (1,))
    stranger = core.session()
    turn(core, one, READ_ONLY)
    told = {"set_index": one.spaces.index, "mode": 2}, {"set_index": two.spaces.index, "mode": 2}
    assert events(session) == [("namespace_mode_changed", values) for values in told]
    assert not stranger.events


def test_it_holds_for_other_epochs_and_for_who_opens_it_later(core, session, opened):
    turn(core, opened, BYPASS)
    later = core.open(core.session(), spec(namespace_epoch=5))
    control = core.core.service.control
    assert later.namespace_set.set_id != opened.namespace_set.set_id
    assert control.mode_of(later.namespace_set) is BYPASS


def test_what_is_no_mode_or_no_set_is_refused(core, session, opened):
    with pytest.raises(InvalidArgumentError, match=r"mode is 0.*2 READ_ONLY"):
        turn(core, opened, NamespaceMode.UNSPECIFIED)
    for set_id in (b"", b"x" * 16, b"x" * 4000):
        with pytest.raises(NotFoundError, match="kvkeep stats"):
            core.core.service.control.set_mode(set_id, BYPASS)
    assert not session.events
