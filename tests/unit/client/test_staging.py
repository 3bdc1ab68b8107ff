"""Places in the staging memory: never given twice, always given back whole."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvkeep.errors import InvalidArgumentError, ResourceExhaustedError, SessionLostError
from kvkeep.staging import Staging

KiB = 1024


def test_places_are_aligned_and_follow_each_other():
    staging = Staging(memoryview(bytearray(64 * KiB)))
    assert staging.allocate(5000, 3, 0) == [0, 8192, 16384]
    assert staging.free_nbytes == 40 * KiB


def test_more_than_there_is_can_never_be_had():
    staging = Staging(memoryview(bytearray(60 * KiB)))
    with pytest.raises(InvalidArgumentError, match="store_blocks"):
        staging.allocate(8 * KiB, 8, 0)
    assert len(staging.allocate(8 * KiB, 7, 0)) == 7


def test_without_room_it_waits_until_the_deadline():
    staging = Staging(memoryview(bytearray(64 * KiB)))
    staging.allocate(4096, 10, 0)
    with pytest.raises(ResourceExhaustedError) as failure:
        staging.allocate(4096, 7, 0.01)
    assert failure.value.retry_after_s > 0
    assert len(staging.allocate(4096, 6, 0)) == 6


def test_room_that_comes_back_wakes_who_waits():
    staging = Staging(memoryview(bytearray(64 * KiB)))
    held = staging.allocate(4096, 16, 0)
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.extend(staging.allocate(4096, 4, 30)))
    waiter.start()
    staging.free(held[:3], 4096)
    waiter.join(0.05)
    assert not got
    staging.free(held[5:6], 4096)
    waiter.join(30)
    assert got == [0, 4096, 8192, 5 * 4096]


def test_giving_back_twice_is_a_bug():
    staging = Staging(memoryview(bytearray(64 * KiB)))
    held = staging.allocate(4096, 4, 0)
    staging.free(held, 4096)
    with pytest.raises(AssertionError):
        staging.free(held[1:2], 4096)


class StagingAgainstASet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.staging = Staging(memoryview(bytearray(256 * KiB)))
        self.held: list[tuple[list[int], int]] = []

    @rule(nbytes=st.integers(1, 40_000), count=st.integers(0, 12))
    def allocate(self, nbytes, count):
        try:
            offsets = self.staging.allocate(nbytes, count, 0)
        except (ResourceExhaustedError, InvalidArgumentError):
            return
        assert len(offsets) == count
        self.held.append((offsets, nbytes))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        self.staging.free(*self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def nothing_overlaps(self):
        pages = [
            page
            for offsets, nbytes in self.held
            for offset in offsets
            for page in range(offset // 4096, -(-(offset + nbytes) // 4096))
        ]
        assert len(pages) == len(set(pages))
        assert all(0 <= page < 64 for page in pages)
        assert self.staging.free_nbytes == 256 * KiB - 4096 * len(pages)

    def teardown(self):
        for offsets, nbytes in self.held:
            self.staging.free(offsets, nbytes)
        assert self.staging._free == [(0, 256 * KiB)]


StagingAgainstASet.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
test_any_order_of_allocations = StagingAgainstASet.TestCase


def test_who_waits_for_room_is_told_that_the_session_is_over():
    staging = Staging(memoryview(bytearray(64 * KiB)))
    staging.allocate(64 * KiB, 1, 0.0)
    threading.Timer(0.05, staging.close).start()
    with pytest.raises(SessionLostError):
        staging.allocate(4 * KiB, 1, 30.0)
    with pytest.raises(SessionLostError):
        staging.allocate(4 * KiB, 1, 0.0)
