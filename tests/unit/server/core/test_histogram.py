"""Histograms: every value in its bucket, batches and single values alike."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_server.core.histogram import AGE_BOUNDS_S, DURATION_BOUNDS_S, Histogram

BOUNDS = (0.5, 1.0, 10.0)
VALUES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 10.0, 10.5, 1e9]))


def by_hand(values: list[float]) -> tuple[int, ...]:
    edges = [float("-inf"), *BOUNDS, float("inf")]
    return tuple(
        sum(low < value <= high for value in values) for low, high in itertools.pairwise(edges)
    )


@given(st.lists(st.tuples(st.booleans(), VALUES)))
def test_counts_are_those_by_hand(batches):
    histogram, all_values = Histogram(BOUNDS), []
    for single, values in batches:
        all_values += values
        if single:
            for value in values:
                histogram.add_one(value)
        else:
            histogram.add(np.array(values, np.float64))
    found = histogram.value()
    assert found.bounds == BOUNDS
    assert found.counts == by_hand(all_values)
    assert found.total == sum(all_values)


def test_a_value_is_of_its_moment():
    histogram = Histogram(BOUNDS)
    before = histogram.value()
    histogram.add_one(1.0)
    assert sum(before.counts) == 0
    assert sum(histogram.value().counts) == 1


def test_the_bounds_ascend_and_hold_the_target():
    assert 72 * 3600.0 in AGE_BOUNDS_S
    for bounds in (AGE_BOUNDS_S, DURATION_BOUNDS_S):
        assert list(bounds) == sorted(set(bounds))
