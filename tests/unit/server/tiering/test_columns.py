"""Dense ids and what stands beside them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep_server.tiering.columns import _COLUMNS, BlockColumns


def in_use(columns, ids):
    columns.row[ids] = ids  # what makes an id used


def test_low_ids_come_first_and_a_peek_tells_which():
    columns = BlockColumns()
    assert columns.peek(3).tolist() == [0, 1, 2]
    assert columns.allocate(3).tolist() == [0, 1, 2]
    assert columns.allocate(2).tolist() == [3, 4]
    assert columns.used == 5


def test_freed_ids_are_empty_and_come_again():
    columns = BlockColumns()
    ids = columns.allocate(4)
    in_use(columns, ids)
    columns.pins[ids] = 3
    columns.generation[ids] = 9
    columns.free(ids[1:3])
    assert columns.in_use().tolist() == [0, 3]
    for name, (_, empty) in _COLUMNS.items():
        assert set(getattr(columns, name)[[1, 2]].tolist()) == {empty}
    assert sorted(columns.allocate(2).tolist()) == [1, 2]


def test_growing_keeps_what_is_there():
    columns = BlockColumns()
    first = columns.capacity
    ids = columns.allocate(first)
    in_use(columns, ids)
    columns.address[ids] = ids + 7
    columns.key_words[ids] = ids[:, None]
    before = columns.nbytes
    more = columns.allocate(1)
    assert more.tolist() == [first]
    assert columns.capacity == 2 * first
    assert columns.nbytes == 2 * before
    assert (columns.address[ids] == ids + 7).all()
    assert (columns.key_words[ids] == ids[:, None]).all()
    assert columns.row[more] == -1


def test_keys_widen_and_never_narrow():
    columns = BlockColumns()
    columns.key_words[5] = 1
    columns.widen_keys(8)
    columns.widen_keys(2)
    assert columns.key_words.shape == (columns.capacity, 8)
    assert columns.key_words[5].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1500), st.randoms(use_true_random=False))))
def test_ids_are_never_given_twice(steps):
    columns, held = BlockColumns(), set()
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
