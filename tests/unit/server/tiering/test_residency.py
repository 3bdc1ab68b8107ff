"""Which blocks are where: chains, what clients report, and why something is not here."""

import numpy as np
import pytest

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import MissReason
from kvkeep_server.service.touch_ring import NO_ROW
from kvkeep_server.tiering.lineage import chain_to
from tests.fakes.core_harness import Harness, full, keys_of, spec


@pytest.fixture
def core():
    with Harness(ram="4MiB") as harness:
        yield harness
        harness.check_at_rest()


@pytest.fixture
def residency(core):
    return core.core.residency


@pytest.fixture
def session(core):
    return core.session(8 << 20)


@pytest.fixture
def opened(core, session):
    return core.open(session)


def batch(keys):
    return KeyBatch.unpack(b"".join(keys), len(keys[0]))


def find(residency, opened, keys, column=0):
    return residency.find(opened.spaces.local[column], batch(keys)).tolist()


def where(residency, opened, key):
    """Row and version of a block, as a client would report it."""
    (block,) = find(residency, opened, [key])
    row = int(residency.columns.row[block])
    return row, residency.table.version_of(row)


def resident(core, session, opened, chains):
    return [core.lookup(session, opened, keys).blocks for keys in chains]


# ---- finding


def test_a_key_is_found_in_its_own_keyspace_only(core, residency, session):
    opened = core.open(session, spec(groups=(full("a"), full("b")), tp_size=2))
    keys = keys_of("a", 3)
    core.put(session, opened, keys, rank=0)
    core.put(session, opened, keys[:1], rank=1)
    found = [find(residency, opened, keys, column) for column in range(4)]
    assert all(block >= 0 for block in found[0] + found[1])
    assert [block >= 0 for block in found[2]] == [True, False, False]
    assert len({block for column in found for block in column if block >= 0}) == 8


def test_a_prefix_ends_at_the_first_gap_of_any_keyspace(core, residency, session):
    opened = core.open(session, spec(tp_size=2))
    keys = keys_of("a", 5)
    core.put(session, opened, keys, rank=0)
    core.put(session, opened, keys[:3], rank=1)
    first, second = residency.prefix(opened.spaces.local, batch([*keys, *keys_of("b", 1)]))
    assert len(first) == len(second) == 3
    assert residency.units_of(first).tolist() == residency.units_of(second).tolist()


def test_units_keep_their_order_and_come_once(core, residency, session, opened):
    keys = keys_of("a", 4)
    core.put(session, opened, keys)
    ids = np.array(find(residency, opened, keys))
    assert residency.units_of(ids).tolist() == ids.tolist()
    twice = np.array([ids[2], ids[0], ids[2], ids[3], ids[0]])
    assert residency.units_of(twice).tolist() == [ids[2], ids[0], ids[3]]
    assert residency.units_of(ids[:0]).tolist() == []


# ---- leaving


def test_the_coldest_tail_leaves_first_and_never_a_parent_before_its_child(
    core, residency, session, opened
):
    cold, warm = keys_of("cold", 4), keys_of("warm", 4)
    core.put(session, opened, warm)
    core.put(session, opened, cold)
    core.lookup(session, opened, warm)
    left = []
    while residency.evict(1):
        core.check()
        left.append(
            (
                len([b for b in find(residency, opened, cold) if b >= 0]),
                len([b for b in find(residency, opened, warm) if b >= 0]),
            )
        )
    assert left == [(3, 4), (2, 4), (1, 4), (0, 4), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_a_branch_keeps_the_stem(core, residency, session, opened):
    stem, left, right = keys_of("stem", 2), keys_of("left", 2), keys_of("right", 2)
    core.put(session, opened, stem + left)
    core.put(session, opened, right, parent=stem[-1])
    core.lookup(session, opened, stem + left)
    residency.evict(2)
    assert resident(core, session, opened, [stem + left, stem + right]) == [4, 2]
    core.check()


def test_what_lies_behind_a_pinned_block_may_leave_but_not_what_is_before_it(
    core, residency, session, opened
):
    keys = keys_of("a", 6)
    core.put(session, opened, keys)
    grant = core.acquire(session, opened, keys[2:4])
    assert grant.leased == 2
    residency.evict(100)
    assert resident(core, session, opened, [keys]) == [4]
    core.release(session, grant)


def test_taking_addresses_takes_all_that_hangs_on_them(core, residency, session, opened):
    stem, left, right = keys_of("stem", 3), keys_of("left", 3), keys_of("right", 3)
    core.put(session, opened, stem + left)
    core.put(session, opened, right, parent=stem[1])
    (block,) = find(residency, opened, [stem[2]])
    residency.evict_addresses(residency.columns.address_of(np.array([block])))
    assert resident(core, session, opened, [stem + left, stem[:2] + right]) == [2, 5]
    core.check_at_rest()


def test_long_chains_are_taken_whole(core, residency, session, opened):
    keys = keys_of("a", 1000)
    core.put(session, opened, keys)
    (block,) = find(residency, opened, keys[7:8])
    residency.evict_addresses(residency.columns.address_of(np.array([block])))
    assert resident(core, session, opened, [keys]) == [7]
    core.check_at_rest()


def test_pins_hold_their_ancestors_addresses_too(core, residency, session, opened):
    keys, other = keys_of("a", 5), keys_of("b", 2)
    core.put(session, opened, keys)
    core.put(session, opened, other)
    grant = core.acquire(session, opened, keys[3:4])
    addresses = residency.columns.address_of(find(residency, opened, keys + other))
    held = residency.pinned_addresses(addresses).tolist()
    assert held == [True] * 4 + [False] * 3
    residency.evict_addresses(addresses[:1])
    assert resident(core, session, opened, [keys]) == [5], "nothing, rather than a part"
    core.release(session, grant)
    residency.evict_addresses(addresses[:1])
    assert resident(core, session, opened, [keys, other]) == [0, 2]


def test_addresses_without_a_block_are_held(core, residency, session, opened):
    with core.core.ram.reserve(4096, 3) as slots:
        assert residency.pinned_addresses(slots.addresses).all()


def test_an_unpin_without_a_pin_is_a_bug(core, residency, session, opened):
    core.put(session, opened, keys_of("a", 1))
    with pytest.raises(AssertionError, match="unpin without pin"):
        residency.unpin(np.array([0]))


def test_a_pinned_unit_may_not_be_removed(core, residency, session, opened):
    core.put(session, opened, keys_of("a", 1))
    grant = core.acquire(session, opened, keys_of("a", 1))
    with pytest.raises(AssertionError, match="pinned"):
        residency.remove(np.array([0]), MissReason.EVICTED)
    core.release(session, grant)


# ---- why not


def test_an_evicted_key_is_told_apart_from_one_never_seen(core, residency, session, opened):
    keys = keys_of("a", 2)
    core.put(session, opened, keys)
    core.clock.advance(100)
    core.lookup(session, opened, keys[:1])
    core.clock.advance(60)
    residency.evict(2)
    prefix = core.lookup(session, opened, keys)
    assert (prefix.blocks, prefix.ended, prefix.evicted_age_s) == (0, MissReason.EVICTED, 60.0)
    (space,) = opened.spaces.local
    assert residency.why_absent(space, batch(keys), 1) == (MissReason.EVICTED, 160.0)
    new = core.lookup(session, opened, keys_of("b", 1))
    assert (new.ended, new.evicted_age_s) == (MissReason.NEVER_SEEN, 0.0)
    whole = core.lookup(session, opened, [])
    assert whole.ended == MissReason.UNSPECIFIED


def test_of_several_ranks_the_one_that_knows_tells(core, residency, session):
    opened = core.open(session, spec(tp_size=2))
    keys = keys_of("a", 2)
    core.put(session, opened, keys, rank=1)
    assert core.lookup(session, opened, keys).ended == MissReason.NEVER_SEEN
    residency.evict(2)
    assert core.lookup(session, opened, keys).ended == MissReason.EVICTED


# ---- what clients report


def test_a_reported_row_names_its_unit(core, residency, session, opened):
    keys = keys_of("a", 4)
    core.put(session, opened, keys)
    unit = residency.unit_at(*where(residency, opened, keys[3]), opened.spaces)
    assert unit == find(residency, opened, keys)[3]
    assert chain_to(residency.columns, unit, 100).tolist() == find(residency, opened, keys)
    assert chain_to(residency.columns, unit, 2).tolist() == find(residency, opened, keys)[2:]
    assert chain_to(residency.columns, -1, 100).tolist() == []


def test_a_row_that_changed_or_is_not_theirs_names_nobody(core, residency, session, opened):
    keys = keys_of("a", 2)
    core.put(session, opened, keys)
    row, version = where(residency, opened, keys[1])
    other = core.open(session, spec(model="other"))
    assert residency.unit_at(row, version, other.spaces) == -1
    assert residency.unit_at(row, version + 2, opened.spaces) == -1
    for nowhere in (-1, residency.table.geometry.rows, NO_ROW, 1 << 40):
        assert residency.unit_at(nowhere, version, opened.spaces) == -1
    residency.evict(1)
    assert residency.unit_at(row, version, opened.spaces) == -1
    now = residency.table.version_of(row)
    assert residency.unit_at(row, now, opened.spaces) == -1


# ---- bytes


def test_payload_is_counted_without_padding(core, residency, session):
    opened = core.open(session, spec(groups=(full("a", 1000), full("b", 5000))))
    core.put(session, opened, keys_of("a", 3))
    assert residency.payload_nbytes == 3 * 6000
    stats = core.core.ram.stats()
    assert stats.used_nbytes == 3 * (4096 + 8192)
    assert stats.padding_nbytes == stats.used_nbytes - residency.payload_nbytes
    residency.evict(1)
    assert residency.payload_nbytes == 2 * 6000
    assert core.core.service.held([opened.namespace_set]) == [(4, 2 * 6000)]


def test_blocks_that_move_between_tiers_while_a_table_is_built_are_there_in_it(
    core, residency, session, opened
):
    keys = keys_of("a", 5)
    core.put(session, opened, keys)
    blocks = np.array(find(residency, opened, keys))
    prepared = residency.build_table(256)
    numbers = np.arange(1, 4, dtype=np.uint64)
    residency.record(blocks[:3], numbers << np.uint64(32), numbers)
    residency.forget(blocks[:1], MissReason.CORRUPT)
    residency.adopt_table(prepared)
    rows = residency.columns.row[blocks].astype(np.int64)
    assert residency.table.on_nvme(rows).tolist() == [False, True, True, False, False]
    core.check()
    assert find(residency, opened, keys) == blocks.tolist()
