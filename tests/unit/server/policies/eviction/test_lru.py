"""Leaf-first LRU against a slow, obvious model, and what its inner order promises."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvkeep_server.core.hints import Hints
from kvkeep_server.policies.eviction.lru import LruEviction

HINTS = Hints()


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def insert_chain(lru: LruEviction, *chain: int, parent: int = -1) -> None:
    lru.insert(ids(*chain), ids(parent, *chain[:-1]), 0, HINTS, 0.0)


def touch(lru: LruEviction, *chain: int) -> None:
    lru.touch(ids(*chain), HINTS, 0.0)


def victims(lru: LruEviction, count: int) -> list[int]:
    return lru.victims(count, 0.0).tolist()


@dataclass
class Block:
    parent: int | None
    used: int
    pinned: bool = False


class SlowLru:
    """Looks at every block for every victim."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self._used = 0

    def insert(self, chain: list[int], parents: list[int]) -> None:
        for block, parent in zip(chain, parents, strict=True):
            self.blocks[block] = Block(None if parent == -1 else parent, 0)
        self.touch(chain)

    def touch(self, chain: list[int]) -> None:
        for block in reversed(chain):
            self._used += 1
            self.blocks[block].used = self._used

    def remove(self, gone: list[int]) -> None:
        for block in gone:
            del self.blocks[block]
        for block in self.blocks.values():
            if block.parent in gone:
                block.parent = None

    def victims(self, count: int) -> list[int]:
        left = dict(self.blocks)
        named: list[int] = []
        while len(named) < count:
            parents = {block.parent for block in left.values()}
            leaves = [
                (block.used, number)
                for number, block in left.items()
                if not block.pinned and number not in parents
            ]
            if not leaves:
                break
            named.append(min(leaves)[1])
            del left[named[-1]]
        return named


class LruAgainstAModel(RuleBasedStateMachine):
    """Every call of the protocol, in any order that its contract allows, over 30 ids."""

    data = st.data()

    @initialize(near_min=st.sampled_from([1, 3, 1024]))
    def start(self, near_min: int) -> None:
        self.lru = LruEviction(near_min=near_min)
        self.model = SlowLru()

    def some(self, draw: st.DataObject, pool: list[int]) -> list[int]:
        return draw.draw(st.lists(st.sampled_from(pool), unique=True, max_size=8)) if pool else []

    def resident(self, *, pinned: bool | None = None) -> list[int]:
        return [
            number
            for number, block in self.model.blocks.items()
            if pinned is None or block.pinned == pinned
        ]

    @rule(draw=data)
    def insert(self, draw: st.DataObject) -> None:
        chain = self.some(draw, [number for number in range(30) if number not in self.resident()])
        parents = []
        for position in range(len(chain)):
            known = [-1, *chain[:position], *self.resident()]
            usual = chain[position - 1] if position else -1
            parents.append(draw.draw(st.just(usual) | st.sampled_from(known)))
        self.lru.insert(ids(*chain), ids(*parents), 0, HINTS, 0.0)
        self.model.insert(chain, parents)

    @rule(draw=data)
    def touch_any(self, draw: st.DataObject) -> None:
        blocks = self.some(draw, self.resident())
        touch(self.lru, *blocks)
        self.model.touch(blocks)

    @precondition(lambda self: self.model.blocks)
    @rule(draw=data)
    def touch_chain(self, draw: st.DataObject) -> None:
        block: int | None = draw.draw(st.sampled_from(self.resident()))
        chain: list[int] = []
        while block is not None:
            chain.insert(0, block)
            block = self.model.blocks[block].parent
        touch(self.lru, *chain)
        self.model.touch(chain)

    @rule(draw=data)
    def pin(self, draw: st.DataObject) -> None:
        blocks = self.some(draw, self.resident(pinned=False))
        self.lru.pin(ids(*blocks))
        for block in blocks:
            self.model.blocks[block].pinned = True

    @rule(draw=data)
    def unpin(self, draw: st.DataObject) -> None:
        blocks = self.some(draw, self.resident(pinned=True))
        self.lru.unpin(ids(*blocks))
        for block in blocks:
            self.model.blocks[block].pinned = False

    @rule(draw=data)
    def remove(self, draw: st.DataObject) -> None:
        blocks = self.some(draw, self.resident(pinned=False))
        self.lru.remove(ids(*blocks))
        self.model.remove(blocks)

    @rule(count=st.integers(0, 3) | st.integers(0, 35), keep=st.integers(0, 3))
    def evict(self, count: int, keep: int) -> None:
        """Not all that was named has to leave."""
        named = victims(self.lru, count)
        assert named == self.model.victims(count)
        gone = named[: max(0, len(named) - keep)]
        self.lru.remove(ids(*gone))
        self.model.remove(gone)

    @invariant()
    def audits(self) -> None:
        self.lru.check()

    def teardown(self) -> None:
        if hasattr(self, "lru"):
            assert victims(self.lru, 100) == self.model.victims(100)


TestLruAgainstAModel = LruAgainstAModel.TestCase
TestLruAgainstAModel.settings = settings(max_examples=150, stateful_step_count=40)


def test_the_least_recently_used_chain_leaves_first_from_its_tail():
    lru = LruEviction()
    insert_chain(lru, 0, 1, 2)
    insert_chain(lru, 3, 4)
    touch(lru, 0, 1, 2)
    assert victims(lru, 5) == [4, 3, 2, 1, 0]


def test_a_shared_head_outlives_its_branches():
    lru = LruEviction()
    insert_chain(lru, 0, 1)
    insert_chain(lru, 2, 3, parent=1)
    insert_chain(lru, 4, 5, parent=1)
    touch(lru, 0, 1, 2, 3)
    assert victims(lru, 6) == [5, 4, 3, 2, 1, 0]


def test_a_child_inserted_after_its_parent_was_touched():
    lru = LruEviction()
    insert_chain(lru, 0)
    insert_chain(lru, 1)
    insert_chain(lru, 2, parent=0)
    # 0 is the least recently used of all, but has a child until 2 left.
    assert victims(lru, 3) == [1, 2, 0]


def test_an_unpinned_block_has_the_standing_of_its_last_use():
    lru = LruEviction(near_min=1)
    for block in range(4):
        insert_chain(lru, block)
    lru.pin(ids(0, 2))
    assert victims(lru, 4) == [1, 3]
    touch(lru, 2)
    lru.unpin(ids(0, 2))
    assert victims(lru, 4) == [0, 1, 3, 2]


def test_a_touch_counts_after_the_order_was_made():
    lru = LruEviction()
    for block in range(4):
        insert_chain(lru, block)
    assert victims(lru, 1) == [0]
    touch(lru, 1)
    touch(lru, 0)
    assert victims(lru, 4) == [2, 3, 1, 0]


def test_touches_do_not_make_it_grow():
    lru = LruEviction(near_min=2)
    for block in range(50):
        insert_chain(lru, block)
    for turn in range(400):
        touch(lru, turn * 7 % 50, turn * 11 % 50 if turn % 2 else 49 - turn * 7 % 50)
        lru.pin(ids(turn % 50))
        lru.unpin(ids(turn % 50))
        victims(lru, 2)
    assert len(lru._near) + len(lru._far) + len(lru._named) <= 50
    lru.check()


def test_ids_of_removed_blocks_do_not_pile_up():
    lru = LruEviction(near_min=2)
    for turn in range(400):
        insert_chain(lru, *range(turn % 3 * 10, turn % 3 * 10 + 10))
        if turn >= 2:
            lru.remove(lru.victims(10, 0.0))
    assert len(lru._near) + len(lru._far) <= 30
    lru.check()


def break_stamp(lru: LruEviction) -> None:
    lru._stamps[1] = lru._stamps[2]


def break_clock(lru: LruEviction) -> None:
    lru._stamp_next = 2


def break_queued(lru: LruEviction) -> None:
    lru._queued[3] = False


def break_far(lru: LruEviction) -> None:
    lru._far.append(lru._near[0] & 0xFFFF)


def lose_leaf(lru: LruEviction) -> None:
    lru._queued[lru._far.pop()] = False


def age_far(lru: LruEviction) -> None:
    lru._near_until = lru._stamp_next - 1


def raise_bound(lru: LruEviction) -> None:
    lru._near_until = 0


def future_entry(lru: LruEviction) -> None:
    lru._near[0] += 1 << 32
    lru._near_until += 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (break_stamp, "one stamp"),
        (break_clock, "not given"),
        (break_queued, "each once"),
        (break_far, "each once"),
        (lose_leaf, "never named"),
        (age_far, "belongs in near"),
        (raise_bound, "belongs in far"),
        (future_entry, "lower bound"),
    ],
)
def test_check_sees_a_broken_invariant(fault, words):
    lru = LruEviction(near_min=3)
    for block in range(8):
        insert_chain(lru, block)
    victims(lru, 1)
    lru.check()
    fault(lru)
    with pytest.raises(AssertionError, match=words):
        lru.check()


def test_order_is_kept_when_stamps_outgrow_32_bits():
    lru = LruEviction(near_min=2)
    lru._stamp_next = (1 << 32) - 5
    ids = np.arange(12)
    for block in ids.tolist():
        lru.insert(ids[block : block + 1], np.array([-1]), 0, Hints(), 0.0)
    lru.check()
    lru.touch(ids[[3, 2]], Hints(), 0.0)
    assert lru.victims(12, 0.0).tolist() == [0, 1, *range(4, 12), 2, 3]
