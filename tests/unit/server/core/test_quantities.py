"""Sizes and durations as people write them."""

import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_server.core.quantities import (
    SIZE_UNITS,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    show_size,
    show_size_up,
    size_at_most,
)


@given(st.integers(0, 10**15 - 1))
def test_size_reads_back(nbytes):
    # 12 digits are read before the point: above it only sizes that have a larger unit.
    spelled = format_size(nbytes)
    assert parse_size(spelled) in ({nbytes} if nbytes < 10**12 else {nbytes, None})


@given(st.integers(0, 10**15))
def test_shown_size_is_rounded_down(nbytes):
    amount, unit = re.fullmatch("([0-9.]+)([A-Za-z]+)", show_size(nbytes)).groups()
    assert 0.9 * nbytes <= Decimal(amount) * SIZE_UNITS[unit] <= nbytes


@given(st.integers(4 << 20, 10**15), st.sampled_from([1, 1 << 12, 1 << 21]))
def test_a_size_to_set_is_near_and_reads_back(nbytes, multiple):
    spelled = parse_size(size_at_most(nbytes, multiple))
    assert 0.99 * nbytes - multiple <= spelled <= nbytes
    assert spelled % multiple == 0


@given(st.integers(0, 10**15))
def test_a_size_rounded_up_is_no_less(nbytes):
    amount, unit = re.fullmatch("([0-9.]+)([A-Za-z]+)", show_size_up(nbytes)).groups()
    assert nbytes <= Decimal(amount) * SIZE_UNITS[unit] <= max(nbytes + 1, 1.1 * nbytes)


@given(st.integers(0, 10**11))
def test_duration_reads_back(milliseconds):
    assert parse_duration(format_duration(milliseconds / 1000)) == milliseconds / 1000


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0B", 0), ("1KiB", 1024), ("1.5GiB", 3 << 29), ("2 MiB", 2 << 20), ("1TiB", 1 << 40)],
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "1", "1GB", "1gib", "-1GiB", "1e3MiB", "0.1B", "\u0661GiB", "1GiB "]
)
def test_not_sizes(text):
    assert parse_size(text) is None


@pytest.mark.parametrize("text", ["", "30", "30sec", "-1s", "1S", "nan s", "1h30m"])
def test_not_durations(text):
    assert parse_duration(text) is None
