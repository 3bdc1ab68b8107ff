"""The contract of `policies.eviction.EvictionPolicy`, for every registered member, and for broken
ones that it must reject.

A rule is a function of a class of policies. It drives one through `Caller`, which keeps the
caller's side of the contract, knows the truth, and holds every answer to it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvkeep_server.core.hints import Hints
from kvkeep_server.core.results import StopReason
from kvkeep_server.policies import BlockIds
from kvkeep_server.policies.eviction import EvictionPolicy
from kvkeep_server.policies.registry import EVICTION
from tests.fakes.broken_eviction import (
    AppliesLater,
    BlindForPins,
    DislikesEmpty,
    FixedSize,
    HandsOutItsOwn,
    HeadFirst,
    KeepsAnOldParent,
    LeavesOldLinks,
    LinksOnlyChains,
    NamesEachBlockOnce,
    NeverUnpins,
    OneTooMany,
    ParentFirst,
    RefusesInnerBlocks,
    RemovesWhatItNames,
    SortsItsArgument,
    TossesCoins,
    TrustsHints,
)

Make = Callable[[], EvictionPolicy]
RULES: dict[str, Callable[[Make], None]] = {}


def rule(function: Callable[[Make], None]) -> Callable[[Make], None]:
    RULES[function.__name__] = function
    return function


def batch(ids: Sequence[int]) -> BlockIds:
    """Read-only, so that a policy that writes into it fails."""
    array = np.array(ids, np.int64)
    array.flags.writeable = False
    return array


class Caller:
    """Keeps the caller's guarantees, and checks each answer against what it knows."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.parents: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.now = 0.0

    def insert(
        self,
        ids: Sequence[int],
        parents: Sequence[int],
        retention_class: int = 0,
        hints: Hints = Hints(),  # noqa: B008 - immutable
    ) -> None:
        self.now += 1.0
        self.policy.insert(batch(ids), batch(parents), retention_class, hints, self.now)
        self.parents.update(zip(ids, parents, strict=True))
        self.policy.check()

    def insert_chain(self, ids: Sequence[int], parent: int = -1) -> None:
        self.insert(ids, [parent, *ids[:-1]][: len(ids)])

    def touch(self, ids: Sequence[int], hints: Hints = Hints()) -> None:  # noqa: B008 - immutable
        self.now += 1.0
        self.policy.touch(batch(ids), hints, self.now)
        self.policy.check()

    def pin(self, ids: Sequence[int]) -> None:
        self.policy.pin(batch(ids))
        self.pinned.update(ids)
        self.policy.check()

    def unpin(self, ids: Sequence[int]) -> None:
        self.policy.unpin(batch(ids))
        self.pinned.difference_update(ids)
        self.policy.check()

    def remove(self, ids: Sequence[int]) -> None:
        self.policy.remove(batch(ids))
        for block in ids:
            del self.parents[block]
        for block, parent in self.parents.items():
            if parent in ids:
                self.parents[block] = -1
        self.policy.check()

    def may_leave(self) -> set[int]:
        """All blocks that are neither pinned nor above a pinned one."""
        held = set()
        for pinned in self.pinned:
            block = pinned
            while block >= 0:
                held.add(block)
                block = self.parents[block]
        return set(self.parents) - held

    def victims(self, count: int) -> list[int]:
        answer = self.policy.victims(count, self.now)
        assert answer.dtype == np.int64, "ids are int64"
        assert answer.ndim == 1, "a flat array"
        named = answer.tolist()
        assert len(set(named)) == len(named), "a block named twice"
        assert set(named) <= set(self.parents), "an absent block named"
        assert not self.pinned & set(named), "a pinned block named"
        assert len(named) == min(count, len(self.may_leave())), "as many as asked for, if there are"
        left = set(self.parents)
        for block in named:
            left.discard(block)
            assert all(self.parents[other] != block for other in left), "a parent before its child"
        self.policy.check()
        return named

    def evict(self, count: int) -> list[int]:
        named = self.victims(count)
        self.remove(named)
        return named


@rule
def children_leave_before_their_parents(make: Make) -> None:
    caller = Caller(make())
    caller.insert_chain([0, 1, 2, 3])
    caller.insert_chain([4, 5], parent=1)
    caller.insert_chain([6, 7], parent=1)
    caller.touch([0, 1, 4, 5])
    for count in (1, 2, 3, 8, 100):
        caller.victims(count)
    while caller.parents:
        caller.evict(3)


@rule
def count_is_a_limit(make: Make) -> None:
    caller = Caller(make())
    assert caller.victims(5) == []
    caller.insert_chain([0, 1, 2])
    assert caller.victims(0) == []
    assert caller.victims(1) == [2]
    assert caller.victims(100) == [2, 1, 0]


@rule
def pins_hold_blocks_and_their_ancestors(make: Make) -> None:
    caller = Caller(make())
    caller.insert_chain([0, 1, 2, 3])
    caller.insert_chain([4, 5], parent=0)
    caller.pin([2])
    assert set(caller.victims(100)) == {3, 4, 5}
    caller.pin([3, 0, 5])
    assert caller.victims(100) == []
    caller.unpin([2])
    assert caller.victims(100) == []


@rule
def unpinned_blocks_may_be_named_again(make: Make) -> None:
    caller = Caller(make())
    caller.insert_chain([0, 1, 2])
    caller.insert([3], [-1])
    caller.pin([2, 3])
    assert caller.victims(100) == []
    caller.unpin([3])
    assert caller.victims(100) == [3]
    caller.unpin([2])
    assert set(caller.victims(100)) == {0, 1, 2, 3}
    caller.pin([1])
    caller.remove([2])
    caller.unpin([1])
    assert set(caller.victims(100)) == {0, 1, 3}


@rule
def naming_changes_nothing(make: Make) -> None:
    caller = Caller(make())
    caller.insert_chain([0, 1, 2])
    caller.insert_chain([3, 4])
    assert set(caller.victims(100)) == set(caller.victims(100))
    caller.victims(3)
    caller.pin([2])
    caller.touch([3, 4])
    caller.insert([5], [4])
    assert set(caller.victims(100)) == {3, 4, 5}
    caller.unpin([2])
    caller.remove([5, 2])
    assert set(caller.victims(100)) == {0, 1, 3, 4}


@rule
def any_block_can_be_removed(make: Make) -> None:
    caller = Caller(make())
    caller.insert_chain([0, 1, 2, 3, 4])
    caller.remove([2])
    caller.victims(100)
    caller.remove([0, 4, 3])
    assert caller.victims(100) == [1]
    caller.insert_chain([5, 6, 7], parent=1)
    caller.remove([6, 1, 7])
    assert caller.victims(100) == [5]


@rule
def a_reused_id_is_another_block(make: Make) -> None:
    caller = Caller(make())
    caller.insert_chain([0, 1, 2])
    caller.pin([2])
    caller.unpin([2])
    caller.remove([1])
    # 1 had 0 above it and 2 below: the new 1 has neither.
    caller.insert([1], [-1])
    caller.insert([3], [1])
    caller.remove([2])
    caller.victims(100)
    caller.remove([3, 0, 1])
    caller.insert_chain([2, 1, 0])
    assert caller.victims(100) == [0, 1, 2]


@rule
def a_batch_may_hold_any_links(make: Make) -> None:
    caller = Caller(make())
    caller.insert([9, 3, 5, 7], [-1, 9, 9, 3])
    caller.touch([9, 3])
    # Below a block that was in no batch since.
    caller.insert([1, 2, 0], [5, 5, -1])
    caller.victims(100)
    caller.pin([5])
    assert set(caller.victims(100)) == {0, 1, 2, 3, 7}
    caller.unpin([5])
    caller.evict(4)
    caller.evict(100)
    assert not caller.parents


@rule
def the_last_of_a_call_leaves_first(make: Make) -> None:
    caller = Caller(make())
    # Boundaries of a WINDOW group: no ancestors, the newest first.
    caller.insert([3, 2, 1, 0], [-1] * 4)
    assert caller.victims(100) == [0, 1, 2, 3]
    caller.touch([0, 1, 2, 3])
    assert caller.victims(100) == [3, 2, 1, 0]


@rule
def empty_calls_are_fine(make: Make) -> None:
    caller = Caller(make())
    for _ in range(2):
        caller.insert([], [])
        caller.touch([])
        caller.pin([])
        caller.unpin([])
        caller.remove([])
        caller.victims(1)
        if not caller.parents:
            caller.insert_chain([0, 1])


@rule
def arrays_are_neither_changed_nor_kept(make: Make) -> None:
    # That they are not changed is seen in every rule: `batch` is read-only.
    policy = make()
    ids = np.array([0, 1, 2], np.int64)
    parents = np.array([-1, 0, 1], np.int64)
    policy.insert(ids, parents, 0, Hints(), 1.0)
    parents[:] = -1
    policy.touch(ids, Hints(), 2.0)
    ids[:] = 99
    named = policy.victims(3, 2.0)
    assert named.tolist() == [2, 1, 0]
    named[:] = 0
    policy.check()
    assert policy.victims(3, 2.0).tolist() == [2, 1, 0]


@rule
def ids_may_be_large(make: Make) -> None:
    caller = Caller(make())
    chain = list(range(20_000, 23_000))
    caller.insert_chain(chain)
    caller.insert([70_000], [-1])
    caller.touch(chain)
    caller.pin([chain[-1]])
    assert caller.victims(4000) == [70_000]
    caller.unpin([chain[-1]])
    caller.policy.remove(batch(chain[1000:]))
    caller.policy.check()


@rule
def no_hint_breaks_it(make: Make) -> None:
    caller = Caller(make())
    odd = [
        Hints(),
        Hints(
            stop_reason=StopReason.TOOL_USE,
            output_tokens=2**32 - 1,
            sub_agent=True,
            session_id=b"\xff" * 64,
            engine_hit_tokens=2**64 - 1,
            return_expected_s=4.3e6,
            ttl_s=4.3e6,
        ),
        Hints(stop_reason=StopReason.OTHER, return_expected_s=1e-9, ttl_s=1e-9),
    ]
    for block, hints in enumerate(odd):
        caller.insert([block, block + 10], [-1, block], block, hints)
        caller.touch([block, block + 10], odd[-block])
    caller.now += 1e7
    caller.victims(100)
    caller.evict(3)


@rule
def equal_calls_give_equal_victims(make: Make) -> None:
    one, other = (walk(Caller(make()), random.Random(5), steps=300) for _ in range(2))
    assert one == other, "other victims for the same calls"


@rule
def a_long_life_holds_no_surprise(make: Make) -> None:
    for seed in range(4):
        walk(Caller(make()), random.Random(seed), steps=150)


def walk(caller: Caller, source: random.Random, *, steps: int) -> list[int]:
    """Random calls over 60 ids, each legal; returns all that was named."""
    named = []
    for _ in range(steps):
        resident = sorted(caller.parents)
        free = sorted(set(range(60)) - set(resident))
        some = source.sample(resident, min(len(resident), source.randrange(8)))
        unpinned = [block for block in some if block not in caller.pinned]
        match source.choice(("insert", "insert", "touch", "pin", "unpin", "remove", "evict")):
            case "insert":
                chain = source.sample(free, min(len(free), source.randrange(8)))
                caller.insert_chain(chain, parent=source.choice([-1, *resident]))
            case "touch":
                caller.touch(some)
            case "pin":
                caller.pin(unpinned[:3])
            case "unpin":
                caller.unpin([block for block in some if block in caller.pinned])
            case "remove":
                caller.remove(unpinned[:2])
            case "evict":
                named += caller.victims(source.randrange(10))
                named += caller.evict(source.randrange(10))
    return named


@pytest.mark.parametrize("keeps", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", EVICTION)
def test_member_keeps_the_contract(name, keeps):
    keeps(EVICTION[name])


# --- the suite itself: each broken policy is refused by the rule that is about its fault, and why


FAULTS = [
    (ParentFirst, "children_leave_before_their_parents", "a parent before its child"),
    (OneTooMany, "count_is_a_limit", "as many as asked for"),
    (BlindForPins, "pins_hold_blocks_and_their_ancestors", "a pinned block named"),
    (NeverUnpins, "unpinned_blocks_may_be_named_again", "as many as asked for"),
    (RemovesWhatItNames, "naming_changes_nothing", "as many as asked for"),
    (NamesEachBlockOnce, "naming_changes_nothing", "as many as asked for"),
    (RefusesInnerBlocks, "any_block_can_be_removed", "not that one"),
    (KeepsAnOldParent, "a_reused_id_is_another_block", "a parent before its child"),
    (LeavesOldLinks, "a_reused_id_is_another_block", "as many as asked for"),
    (LinksOnlyChains, "a_batch_may_hold_any_links", "as many as asked for"),
    (HeadFirst, "the_last_of_a_call_leaves_first", r"\[3, 2, 1, 0\]"),
    (DislikesEmpty, "empty_calls_are_fine", "zero-size"),
    (SortsItsArgument, "children_leave_before_their_parents", "read-only"),
    (AppliesLater, "arrays_are_neither_changed_nor_kept", "touch of an absent block"),
    (HandsOutItsOwn, "arrays_are_neither_changed_nor_kept", r"\[0, 0, 0\] =="),
    (FixedSize, "ids_may_be_large", "too large"),
    (TrustsHints, "no_hint_breaks_it", "so long an output"),
    (TossesCoins, "equal_calls_give_equal_victims", "other victims"),
    (BlindForPins, "a_long_life_holds_no_surprise", "a pinned block named"),
]


@pytest.mark.parametrize(
    ("broken", "by", "words"), FAULTS, ids=[f"{broken.__name__}-{by}" for broken, by, _ in FAULTS]
)
def test_suite_rejects_a_broken_policy(broken, by, words):
    with pytest.raises((AssertionError, ValueError), match=words):
        RULES[by](broken)


def test_every_rule_rejects_something():
    assert {by for _, by, _ in FAULTS} == set(RULES)
