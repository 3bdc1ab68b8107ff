"""Dense ids and what stands beside them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep_server.index.layout import Multipliers
from kvkeep_server.index.table import IndexTable
from kvkeep_server.policies.parents import Parents
from kvkeep_server.tiering.columns import _COLUMNS, BlockColumns

TABLE = IndexTable(
    rows=8, multipliers=Multipliers((1,) * 16, (1,) * 16), server_epoch=1, table_id=1
)


def in_use(columns, ids):
    columns.row[ids] = ids  # what makes an id used


def test_low_ids_come_first_and_a_peek_tells_which():
    columns = BlockColumns(TABLE, Parents())
    assert columns.peek(3).tolist() == [0, 1, 2]
    assert columns.allocate(3).tolist() == [0, 1, 2]
    assert columns.allocate(2).tolist() == [3, 4]
    assert columns.used == 5


def test_freed_ids_are_empty_and_come_again():
    columns = BlockColumns(TABLE, Parents())
    ids = columns.allocate(4)
    in_use(columns, ids)
    columns.pins[ids] = 3
    columns.checksum[ids] = 9
    columns.join(ids, ids[[0, 0, 0, 3]])
    columns.free(ids[1:3])
    assert columns.in_use().tolist() == [0, 3]
    for name, (_, empty) in _COLUMNS.items():
        assert set(getattr(columns, name)[[1, 2]].tolist()) == {empty}
    assert columns.unit_of(ids).tolist() == [0, 1, 2, 3]
    assert sorted(columns.allocate(2).tolist()) == [1, 2]


def test_growing_keeps_what_is_there():
    columns = BlockColumns(TABLE, Parents())
    first = columns.capacity
    ids = columns.allocate(first)
    in_use(columns, ids)
    columns.checksum[ids] = ids + 7
    columns.key_words[ids] = ids[:, None]
    before = columns.nbytes
    more = columns.allocate(1)
    assert more.tolist() == [first]
    assert columns.capacity == 2 * first
    assert columns.nbytes == 2 * before
    assert (columns.checksum[ids] == ids + 7).all()
    assert (columns.key_words[ids] == ids[:, None]).all()
    assert columns.row[more] == -1


def test_keys_widen_and_never_narrow():
    columns = BlockColumns(TABLE, Parents())
    columns.key_words[5] = 1
    columns.widen_keys(8)
    columns.widen_keys(2)
    assert columns.key_words.shape == (columns.capacity, 8)
    assert columns.key_words[5].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1500), st.randoms(use_true_random=False))))
def test_ids_are_never_given_twice(steps):
    columns, held = BlockColumns(TABLE, Parents()), set()
    for take, count, source in steps:
        if take:
            ids = columns.peek(count)
            assert columns.allocate(count).tolist() == ids.tolist()
            assert len(set(ids.tolist())) == count
            assert not held & set(ids.tolist())
            held |= set(ids.tolist())
            in_use(columns, ids)
        else:
            leaving = source.sample(sorted(held), min(count, len(held)))
            columns.free(np.array(leaving, np.int64))
            held -= set(leaving)
        assert columns.used == len(held)
        assert columns.in_use().tolist() == sorted(held)


def test_growing_a_large_column_copies_nothing():
    columns = BlockColumns(TABLE, Parents())
    columns.allocate(300_000)
    before, address = columns.nbytes, columns.nvme.__array_interface__["data"][0]
    columns.allocate(300_000)
    assert columns.nvme.__array_interface__["data"][0] == address
    assert before < columns.nbytes < 2.2 * before
    assert (columns.row[300_000:] == -1).all()
    assert not columns.nvme[300_000:].any()


def test_units_of_several_blocks_are_made_when_there_is_one():
    columns = BlockColumns(TABLE, Parents())
    ids = columns.allocate(6)
    alone = columns.nbytes
    assert columns.unit_of(ids).tolist() == columns.blocks_of(ids).tolist() == ids.tolist()
    assert columns.by_chain(ids)[1].tolist() == [0, 1, 2, 3, 4, 5]
    columns.join(ids[3:], ids[:3])
    assert columns.nbytes == alone + 8 * columns.capacity
    assert columns.unit_of(ids).tolist() == [0, 1, 2, 0, 1, 2]
    blocks, places = columns.by_chain(ids[:3])
    assert (blocks.tolist(), places.tolist()) == ([0, 3, 1, 4, 2, 5], [0, 0, 1, 1, 2, 2])
    columns.allocate(columns.capacity)
    assert columns.unit_of(np.array([5, 9, 1025])).tolist() == [2, 9, 1025]


@pytest.mark.parametrize("name", ["pins", "children"])
def test_a_count_beyond_16_bits_is_kept(name):
    columns = BlockColumns(TABLE, Parents())
    ids = columns.allocate(3)
    getattr(columns, name)[ids[1]] = 65_534
    for count in (65_535, 65_536, 65_537):
        if name == "pins":
            columns.add_pins(ids[1:])
        else:
            columns.add_children(np.array([1, 2], np.int32))
        assert getattr(columns, name)[ids].tolist() == [0, count, count - 65_534]
    columns.drop_children(np.array([1], np.int32) if name == "children" else ids[:0])
    assert columns.children[1] == (65_536 if name == "children" else 0)


@given(st.lists(st.integers(1, 2**48 - 1), min_size=1, max_size=20))
def test_numbers_of_records_have_48_bits(numbers):
    columns = BlockColumns(TABLE, Parents())
    ids, stamps = columns.allocate(len(numbers)), np.array(numbers, np.uint64)
    columns.set_record(ids, stamps * np.uint64(3), stamps)
    assert columns.stamp_of(ids).tolist() == numbers
    columns.set_record(ids, 0, stamps * np.uint64(0))
    assert not columns.stamp_of(ids).any()


@pytest.mark.parametrize("now_s", [-4e9, -7.03, 0.0, 1.5, 3.99, 1e6 + 0.4, 4e9])
def test_last_uses_are_kept_to_a_sixteenth_of_a_second_and_never_lie_ahead(now_s):
    columns = BlockColumns(TABLE, Parents())
    ids = columns.allocate(1)
    columns.set_last_used(ids, now_s)
    kept = columns.last_used_s(ids)[0]
    if abs(now_s) < 1e8:
        assert now_s - 1 / 16 < kept <= now_s
    else:
        assert np.sign(kept) == np.sign(now_s), "clipped, not wrapped"


def test_a_block_that_left_the_index_keeps_its_address_until_its_id_is_free():
    columns = BlockColumns(TABLE, Parents())
    ids = columns.allocate(3)
    columns.withdraw(ids[1:], np.array([8, 9], np.uint64))
    assert columns.withdrawn().tolist() == [1, 2]
    assert columns.address_of(ids).tolist() == [0, 8, 9]
    columns.free(ids[:2])
    assert columns.address_of(ids).tolist() == [0, 0, 9]
