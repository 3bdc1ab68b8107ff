"""Use cases of engines, through the service: what is checked, what is leased, what is credited."""

import dataclasses
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep_server.core.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    KVKeepError,
    NotFoundError,
)
from kvkeep_server.core.hints import Hints
from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import AckLevel, CommitStatus, GroupKind, MissReason, StateMode
from kvkeep_server.service import block_service
from kvkeep_server.service.commit_orders import CommitOrder
from kvkeep_server.service.spec import GroupSpec
from kvkeep_server.service.touch_ring import HEADER_NBYTES, NO_ROW
from kvkeep_server.tiering.manager import ReadOrder
from tests.fakes.core_harness import Harness, full, keys_of, spec

STAGING = 64 * 4096
EXTRA = "[limits]\nkeys_max = 64\n[sessions]\ntouch_records = 64\n"


@pytest.fixture
def core():
    with Harness(ram="4MiB", extra=EXTRA) as harness:
        yield harness
        harness.check_at_rest()


@pytest.fixture
def session(core):
    return core.session(STAGING)


@pytest.fixture
def opened(core, session):
    return core.open(session)


@pytest.fixture
def service(core):
    return core.core.service


def order(opened, keys, groups, **changes):
    values = {
        "set_index": opened.spaces.index,
        "rank": 0,
        "parent_key": b"",
        "keys": b"".join(keys),
        "groups": groups,
        "ack_level": AckLevel.RAM,
        "hints": Hints(),
    }
    return CommitOrder(**(values | changes))


def packed(*offsets):
    return struct.pack(f"<{len(offsets)}Q", *offsets)


# ---- commits that contradict themselves (B021)


@pytest.mark.parametrize(
    "offset",
    [
        1,
        63,
        4096 + 32,
        STAGING,
        STAGING - 4096 + 64,
        STAGING - 64,
        STAGING + 64,
        (1 << 64) - 64,
        (1 << 63),
        (1 << 63) + STAGING,
        (1 << 64) - 4096,
    ],
)
def test_an_offset_outside_staging_or_off_the_grid_is_refused(
    core, session, opened, service, offset
):
    for offsets in ([offset, 0], [0, offset]):
        wrong = order(opened, keys_of("a", 2), [(0, b"", packed(*offsets))])
        with pytest.raises(InvalidArgumentError) as refusal:
            core.run(core.seal(session, wrong))
        assert str(refusal.value).startswith(f"groups.staging_offsets is {offset}; allowed: ")
        assert f"0 to {STAGING - 4096}" in str(refusal.value)
    assert session.copies == 0


def test_the_last_place_in_staging_may_be_used(core, session, opened, service):
    last = STAGING - 4096
    session.staging.buffer[last:] = b"z" * 4096
    status = core.run(core.seal(session, order(opened, keys_of("a", 1), [(0, b"", packed(last))])))
    assert status.tolist() == [CommitStatus.STORED]
    assert core.bytes_of(core.acquire(session, opened, keys_of("a", 1))) == [b"z" * 4096]


def test_a_block_that_is_larger_than_staging_is_refused_with_what_to_do(core, service):
    small = core.session(4096)
    opened = core.open(small, spec(block_nbytes=8192))
    with pytest.raises(InvalidArgumentError, match="larger staging"):
        core.run(core.seal(small, order(opened, keys_of("a", 1), [(0, b"", packed(0))])))


@pytest.mark.parametrize("nbytes", [0, 7, 8, 15, 17, 24])
def test_offsets_must_be_one_a_key(core, session, opened, service, nbytes):
    wrong = order(opened, keys_of("a", 2), [(0, b"", bytes(nbytes))])
    with pytest.raises(InvalidArgumentError, match="allowed: 16 bytes"):
        core.run(core.seal(session, wrong))


def packed4(*positions):
    return struct.pack(f"<{len(positions)}I", *positions)


GROUP = (0, b"", packed(0, 4096))
TWO = (full("a"), full("b"))
STATE = GroupSpec("state", GroupKind.STATE, 512, 4096, 0, StateMode.REPLAYABLE)


@pytest.mark.parametrize(
    ("groups", "staged"),
    [
        ((full(),), []),
        ((full(),), [GROUP, GROUP]),
        (TWO, [GROUP]),
        (TWO, [GROUP, GROUP]),
        (TWO, [GROUP, (1, packed4(0), packed(0))]),
        ((full(),), [GROUP, (1, b"", packed(0, 4096))]),
        ((full(), STATE), [GROUP, (1, packed4(0), packed(0)), (1, packed4(1), packed(0))]),
        ((full(),), [(7, b"", packed(0, 4096))]),
    ],
)
def test_each_group_is_committed_once_and_full_ones_together(
    core, session, service, groups, staged
):
    opened = core.open(session, spec(groups=groups))
    with pytest.raises(InvalidArgumentError, match="groups"):
        core.run(core.seal(session, order(opened, keys_of("a", 2), staged)))


def test_a_refusal_fits_a_header_whatever_was_sent(core, session, service):
    opened = core.open(session, spec(tp_size=1000))
    many = [(number, b"", b"") for number in range(50_000)]
    for wrong in (order(opened, [], many), order(opened, [], [], rank=5000)):
        with pytest.raises(KVKeepError) as refusal:
            core.run(core.seal(session, wrong))
        assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize(
    "raw", [packed4(1, 0), packed4(0, 2), packed4(0, 1, 2), packed4(0, 0), b"\0\0\0\0\0", b"\0"]
)
def test_positions_ascend_within_the_keys(core, session, opened, service, raw):
    wrong = order(opened, keys_of("a", 2), [(0, raw, packed(0, 4096))])
    with pytest.raises(InvalidArgumentError, match=r"groups\.positions"):
        core.run(core.seal(session, wrong))
    right = order(opened, keys_of("a", 2), [(0, struct.pack("<2I", 0, 1), packed(0, 4096))])
    assert core.run(core.seal(session, right)).tolist() == [CommitStatus.STORED] * 2


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"ack_level": AckLevel.NVME}, (FailedPreconditionError, "NVME.*use RAM")),
        ({"ack_level": AckLevel.REMOTE}, (FailedPreconditionError, "REMOTE.*use RAM")),
        ({"rank": 1}, (InvalidArgumentError, r"rank is 1; allowed: one of \[0\]")),
        ({"rank": 1 << 31}, (InvalidArgumentError, "rank is")),
        ({"parent_key": b"short"}, (InvalidArgumentError, "parent_key is '5 bytes'.*32 bytes")),
        ({"parent_key": bytes(64)}, (InvalidArgumentError, "parent_key is '64 bytes'")),
        ({"keys": bytes(33)}, (InvalidArgumentError, "keys is '33 bytes'.*key_nbytes = 32")),
        ({"set_index": 1}, (NotFoundError, "OpenNamespace")),
        ({"set_index": 1 << 31}, (NotFoundError, "OpenNamespace")),
    ],
)
def test_what_is_wrong_with_a_commit_is_said_by_name(
    core, session, opened, service, changes, refusal
):
    error, names = refusal
    wrong = order(opened, keys_of("a", 1), [(0, b"", packed(0))])
    wrong = dataclasses.replace(wrong, **changes)
    with pytest.raises(error, match=names):
        core.run(core.seal(session, wrong))
    assert session.copies == 0


def test_ram_is_what_an_unspecified_ack_level_means(core, session, opened, service):
    plain = order(opened, keys_of("a", 1), [(0, b"", packed(0))], ack_level=AckLevel.UNSPECIFIED)
    assert core.run(core.seal(session, plain)).tolist() == [CommitStatus.STORED]


def test_a_handle_of_another_session_is_not_open_here(core, session, opened, service):
    stranger = core.session(4096)
    with pytest.raises(NotFoundError):
        service.lookup(stranger, opened.spaces.index, keys_of("a", 1)[0], Hints())
    with pytest.raises(NotFoundError):
        core.acquire(stranger, opened, keys_of("a", 1))


def test_keys_of_a_call_are_limited_by_name(core, session, opened, service):
    many = keys_of("a", 65)
    for call in (
        lambda: core.lookup(session, opened, many),
        lambda: core.acquire(session, opened, many),
        lambda: service.release(session, list(range(65))),
        lambda: service.renew(session, list(range(65)), 1),
    ):
        with pytest.raises(KVKeepError, match=r"limits\.keys_max = 64"):
            call()
    assert core.lookup(session, opened, many[:64]).blocks == 0


@settings(max_examples=100)
@given(
    keys=st.binary(max_size=200),
    parent=st.one_of(st.just(b""), st.binary(min_size=32, max_size=32), st.binary(max_size=40)),
    groups=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.one_of(st.just(b""), st.binary(max_size=24)),
            st.one_of(
                st.binary(max_size=64),
                st.lists(st.integers(0, 70)).map(lambda at: packed(*[4096 * i for i in at])),
            ),
        ),
        max_size=3,
    ),
    rank=st.integers(0, 3),
    set_index=st.integers(0, 2),
)
def test_no_order_breaks_the_service(keys, parent, groups, rank, set_index):
    """P24: it is done or refused on purpose."""
    with Harness(ram="4MiB", extra=EXTRA) as core:
        session = core.session(STAGING)
        opened = core.open(session)
        core.open(session, spec(groups=TWO, tp_size=2))
        wild = order(opened, [keys], groups, parent_key=parent, rank=rank, set_index=set_index)
        try:
            core.run(core.seal(session, wild))
        except KVKeepError:
            assert core.core.residency.columns.used == 0
        core.check_at_rest()


# ---- acquire


def test_a_budget_shortens_the_lease_and_not_the_hit(core, session, opened):
    """B043: a hit of 40 blocks with room for 20 of them is a hit of 40."""
    keys = keys_of("a", 40)
    core.put(session, opened, keys)
    grant = core.acquire(session, opened, keys, byte_budget=20 * 4096 + 100)
    assert (grant.prefix.blocks, grant.first, grant.leased) == (40, 0, 20)
    assert grant.prefix.ended == MissReason.UNSPECIFIED
    core.verify(grant, keys)
    core.release(session, grant)
    rest = core.acquire(session, opened, keys, byte_budget=20 * 4096, skip=20)
    assert (rest.prefix.blocks, rest.first, rest.leased) == (40, 20, 20)
    core.verify(rest, keys)


def test_a_budget_below_one_boundary_leases_nothing(core, session):
    opened = core.open(session, spec(groups=TWO, tp_size=2))
    keys = keys_of("a", 3)
    for rank in range(2):
        core.put(session, opened, keys, rank=rank)
    grant = core.acquire(session, opened, keys, byte_budget=4 * 4096 - 1)
    assert (grant.prefix.blocks, grant.leased, grant.lease) == (3, 0, None)
    assert core.acquire(session, opened, keys, byte_budget=4 * 4096).leased == 1
    core.core.sessions.end(session.session_id, "gives the lease back")


@pytest.mark.parametrize(("skip", "leased"), [(0, 3), (2, 1), (3, 0), (5, 0), (1 << 31, 0)])
def test_what_the_caller_has_is_used_and_not_leased(core, session, opened, skip, leased):
    keys = keys_of("a", 3)
    core.put(session, opened, keys)
    core.clock.advance(5)
    grant = core.acquire(session, opened, [*keys, *keys_of("b", 2)], skip=skip)
    assert (grant.prefix.blocks, grant.leased) == (3, leased)
    assert grant.first == min(skip, 3)
    core.verify(grant, keys)
    columns = core.core.residency.columns
    assert set(columns.last_used_s(columns.in_use()).tolist()) == {core.clock.now_s}
    core.core.sessions.end(session.session_id, "gives the lease back")


def test_only_the_groups_that_were_asked_for_are_given(core, session, service):
    opened = core.open(session, spec(groups=TWO))
    keys = keys_of("a", 2)
    core.put(session, opened, keys)
    asked = ReadOrder(session.session_id, 5, 0, 0, Hints())
    grant, count = service.acquire(session, opened.spaces.index, b"".join(keys), [1], asked)
    assert count == 2
    assert [needed.keyspace.group for needed in grant.columns] == [1]
    core.verify(grant, keys)
    for wrong in ([2], [0, 5]):
        with pytest.raises(InvalidArgumentError, match="indices of groups"):
            service.acquire(session, opened.spaces.index, b"".join(keys), wrong, asked)


def test_a_lease_must_be_held_to_be_waited_for(core, session, opened, service):
    core.put(session, opened, keys_of("a", 1))
    grant = core.acquire(session, opened, keys_of("a", 1))
    assert service.arrivals(session, grant.lease.lease_id) is not None
    for asked, lease_id in ((core.session(4096), grant.lease.lease_id), (session, 5)):
        with pytest.raises(NotFoundError, match="acquire again"):
            service.arrivals(asked, lease_id)


def test_only_this_layout_is_spoken(service):
    service.check_layout(2)
    for version in (0, 1, 3):
        with pytest.raises(FailedPreconditionError, match="same release"):
            service.check_layout(version)


def test_asked_is_hit_plus_missed(core, session, opened, service):
    keys = keys_of("a", 4)
    core.put(session, opened, keys[:3])
    core.lookup(session, opened, keys)
    core.acquire(session, opened, keys)
    core.lookup(session, opened, keys_of("b", 2))
    counts = service.manager.counts
    assert (counts.answered, counts.hit, counts.missed) == (10, 6, 4)
    assert (counts.lookup.calls, counts.acquire.calls) == (2, 1)


# ---- look-ups that clients answered by themselves


class Ring:
    """Writes touch records as a client does."""

    def __init__(self, session):
        self.buffer = session.ring.memfd.buffer
        self.written = 0

    def write(self, *, set_index=0, asked=1, found=1, row=NO_ROW, version=0, stop=0):
        n = self.written + 1
        fields = (n, set_index, 0, asked, found, row, version, 0, 0, stop, 0, 0, 0, 0, n)
        place = HEADER_NBYTES + self.written % 64 * 64
        struct.pack_into("<QIIIIIIQIBBBBQQ", self.buffer, place, *fields)
        self.written = n
        struct.pack_into("<Q", self.buffer, 64, n)


def where(core, opened, key):
    residency = core.core.residency
    (block,) = residency.find(opened.spaces.local[0], KeyBatch.unpack(key, 32))
    row = int(residency.columns.row[block])
    return {"row": row, "version": residency.table.version_of(row)}


def test_a_record_counts_and_credits_its_chain(core, session, opened, service):
    keys, cold = keys_of("a", 5), keys_of("cold", 5)
    core.put(session, opened, keys)
    core.put(session, opened, cold)
    core.clock.advance(50)
    Ring(session).write(asked=7, found=5, **where(core, opened, keys[4]))
    service.drain_touches()
    counts = service.manager.counts
    assert (counts.answered, counts.hit, counts.missed, counts.lookup.calls) == (7, 5, 2, 1)
    core.core.residency.evict(5)
    assert core.lookup(session, opened, keys).blocks == 5
    assert core.lookup(session, opened, cold).blocks == 0


def test_only_what_was_found_is_credited(core, session, opened, service):
    keys = keys_of("a", 5)
    core.put(session, opened, keys)
    core.clock.advance(50)
    Ring(session).write(asked=2, found=2, **where(core, opened, keys[4]))
    service.drain_touches()
    columns = core.core.residency.columns
    used_s = columns.last_used_s(columns.in_use())
    assert sorted(used_s.tolist()) == [1000.0] * 3 + [1050.0] * 2


@pytest.mark.parametrize(
    "record",
    [
        {"set_index": 1},
        {"set_index": (1 << 32) - 1},
        {"asked": 3, "found": 4},
        {"asked": (1 << 24) + 1, "found": 1},
        {"asked": (1 << 32) - 1, "found": (1 << 32) - 1},
    ],
)
def test_a_record_that_cannot_be_is_counted_and_skipped(core, session, opened, service, record):
    core.open(core.session(4096), spec(model="of somebody else"))
    ring = Ring(session)
    ring.write(**record)
    ring.write(asked=1, found=0)
    service.drain_touches()
    assert service.touches.invalid == 1
    assert service.manager.counts.lookup.asked == 1
    core.check()


def test_rows_that_are_nobodys_are_counted_and_credit_nobody(core, session, opened, service):
    other = core.open(session, spec(model="other"))
    core.put(session, other, keys_of("a", 1))
    core.clock.advance(50)
    ring = Ring(session)
    ring.write(**where(core, other, keys_of("a", 1)[0]))
    ring.write(row=1 << 20)
    ring.write(stop=255)
    service.drain_touches()
    assert service.manager.counts.lookup.calls == 3
    columns = core.core.residency.columns
    assert columns.last_used_s(columns.in_use()).tolist() == [1000.0]


def test_what_a_client_overwrote_is_counted(core, session, opened, service):
    ring = Ring(session)
    for _ in range(70):
        ring.write(found=0)
    service.drain_touches()
    assert service.touches.lost == 6
    assert service.manager.counts.lookup.calls == 64


def test_look_ups_of_a_session_that_ends_count(core, session, opened, service):
    """A client that looks up once and goes was never seen: its ring went before the next drain."""
    keys = keys_of("a", 5)
    core.put(session, opened, keys)
    core.clock.advance(50)
    ring = Ring(session)
    ring.write(asked=7, found=5, **where(core, opened, keys[4]))
    ring.write(asked=3, found=0)
    core.core.sessions.end(session.session_id, "EOF")
    service.drain_touches()
    counts = service.manager.counts
    assert (counts.answered, counts.hit, counts.missed, counts.lookup.calls) == (10, 5, 5, 2)
    columns = core.core.residency.columns
    assert columns.last_used_s(columns.in_use()).tolist() == [1050.0] * 5
    core.check()


def test_sessions_that_end_leave_no_more_than_so_many_look_ups(core, service, monkeypatch):
    monkeypatch.setattr(block_service, "_PARTING_TOUCHES_MAX", 5)
    for _ in range(3):
        session = core.session(4096)
        core.open(session)
        ring = Ring(session)
        for _ in range(3):
            ring.write(found=0)
        core.core.sessions.end(session.session_id, "EOF")
    service.drain_touches()
    assert (service.manager.counts.lookup.calls, service.touches.lost) == (5, 4)


@settings(max_examples=50)
@given(st.binary(min_size=64, max_size=64 * 20), st.integers(0, (1 << 64) - 1))
def test_garbage_in_a_ring_breaks_nothing(garbage, head):
    with Harness(ram="4MiB", extra=EXTRA) as core:
        session = core.session(4096)
        opened = core.open(session)
        core.put(session, opened, keys_of("a", 1))
        buffer = session.ring.memfd.buffer
        for number in range(len(garbage) // 64):
            raw = bytearray(garbage[number * 64 : number * 64 + 64])
            raw[:8] = raw[56:] = struct.pack("<Q", number + 1)  # whole, so that it is looked at
            raw[8:12] = struct.pack("<I", raw[8] % 2)
            place = HEADER_NBYTES + number * 64
            buffer[place : place + 64] = bytes(raw)
        for value in (len(garbage) // 64, head, 3):
            struct.pack_into("<Q", buffer, 64, value)
            core.core.service.drain_touches()
            core.check()


# ---- upkeep


def test_the_sweep_ends_what_is_over(core, session, opened, service):
    core.put(session, opened, keys_of("a", 2))
    core.acquire(session, opened, keys_of("a", 2), ttl_s=5)
    core.clock.advance(6)
    service.sweep()
    assert len(core.core.leases) == 0
    assert len(core.core.sessions) == 1
    core.clock.advance(30)
    service.sweep()
    assert len(core.core.sessions) == 0
    assert service.uptime_s == 36
