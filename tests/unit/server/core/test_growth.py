"""Columns grow where they are as long as addresses are reserved, and are copied then."""

import numpy as np
import pytest

from kvkeep_server.core.growth import RESERVED_FIRST, column, extended, reserved


def place_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("kind", [np.bool_, np.uint16, np.int32, np.float64])
def test_what_is_there_stays_and_the_rest_is_zero(kind):
    grown, copies = column(10, kind), 0
    grown[:] = 1
    for count in (11, 1024, 1025, 5000, 16_384, 16_385):
        longer = extended(grown, count)
        copies += place_of(longer) != place_of(grown)
        assert longer.dtype == kind
        assert len(longer) == count
        assert np.count_nonzero(longer) == len(grown)
        longer[:] = 1
        grown = longer
    assert copies == 2


def test_rows_of_several_words_grow_too():
    first = extended(np.ones((10, 4), np.uint64), 20)
    assert (first[:10] == 1).all()
    assert not first[10:].any()
    second = extended(first, 900)
    assert place_of(second) == place_of(first)
    assert second.shape == (900, 4)


def test_an_array_of_somebody_else_is_copied():
    mine = np.ones(100, np.int32)
    longer = extended(mine, 200)
    longer[:] = 7
    assert (mine == 1).all()


def test_reserves_reach_far_and_grow_in_few_steps():
    assert [reserved(count) for count in (0, 1024, 1025, 16_385, 262_145, 16_777_217)] == [
        RESERVED_FIRST,
        1024,
        16_384,
        262_144,
        1 << 24,
        1 << 25,
    ]
