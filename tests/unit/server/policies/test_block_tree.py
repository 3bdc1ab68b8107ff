"""Links between blocks, and that `check` sees broken ones."""

from __future__ import annotations

import numpy as np
import pytest

from kvkeep_server.policies.block_tree import BlockTree


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@pytest.fixture
def tree() -> BlockTree:
    """0 - 1 - 2 and 1 - 3."""
    tree = BlockTree()
    tree.insert(ids(0, 1, 2, 3), ids(-1, 0, 1, 1))
    return tree


def leaves(tree: BlockTree) -> list[int]:
    resident = tree.resident_ids()
    mask = tree.evictable(resident)
    assert mask.tolist() == [tree.is_evictable(block) for block in resident.tolist()]
    return resident[mask].tolist()


def test_only_leaves_may_leave(tree):
    assert leaves(tree) == [2, 3]
    assert tree.remove(ids(2)).tolist() == [1]
    assert leaves(tree) == [3]
    assert tree.remove(ids(3)).tolist() == [1]
    assert leaves(tree) == [1]
    tree.check()


def test_parents_that_leave_too_are_not_reported(tree):
    assert tree.remove(ids(1, 3, 2)).tolist() == [0]
    assert leaves(tree) == [0]
    tree.check()


def test_a_parent_is_reported_once(tree):
    assert tree.remove(ids(2, 3)).tolist() == [1]


def test_children_of_a_removed_block_become_first_in_their_chains(tree):
    tree.remove(ids(1))
    assert [tree.parent(block) for block in (2, 3)] == [-1, -1]
    assert leaves(tree) == [0, 2, 3]
    tree.insert(ids(1), ids(-1))
    tree.remove(ids(2))
    assert leaves(tree) == [0, 1, 3]
    tree.check()


def test_pinned_blocks_stay(tree):
    tree.pin(ids(3, 0))
    assert tree.is_pinned(3)
    assert leaves(tree) == [2]
    tree.unpin(ids(3))
    assert leaves(tree) == [2, 3]
    tree.check()


def test_arrays_grow(tree):
    tree.pin(ids(3))
    tree.insert(ids(5000), ids(2))
    assert tree.capacity > 5000
    assert leaves(tree) == [5000]
    assert tree.is_pinned(3)
    tree.check()


@pytest.mark.parametrize(
    ("broken_call", "words"),
    [
        (lambda tree: tree.insert(ids(2), ids(-1)), "resident"),
        (lambda tree: tree.insert(ids(9), ids(8)), "not resident"),
        (lambda tree: tree.pin(ids(9)), "absent"),
        (lambda tree: tree.pin(ids(0)) or tree.pin(ids(0)), "pinned"),
        (lambda tree: tree.unpin(ids(0)), "not pinned"),
        (lambda tree: tree.remove(ids(9)), "absent"),
        (lambda tree: tree.pin(ids(2)) or tree.remove(ids(2)), "pinned"),
    ],
)
def test_a_broken_guarantee_is_noticed(tree, broken_call, words):
    with pytest.raises(AssertionError, match=words):
        broken_call(tree)


@pytest.mark.parametrize(
    ("array", "block", "value", "words"),
    [
        ("_children", 1, 1, "child counts"),
        ("_children", 700, 1, "child counts"),
        ("_parents", 2, 600, "child of an absent block"),
        ("_parents", 2, -7, "no id"),
        ("_state", 1, 0, "child of an absent block"),
        ("_state", 700, 2, "a state"),
    ],
)
def test_check_sees_a_broken_invariant(tree, array, block, value, words):
    tree.check()
    getattr(tree, array)[block] = value
    with pytest.raises(AssertionError, match=words):
        tree.check()


def test_a_block_with_more_children_than_16_bits_count_is_no_leaf():
    tree = BlockTree()
    count = 65_537
    tree.insert(np.array([0]), np.array([-1]))
    children = np.arange(1, count + 1)
    for start in range(0, count, 4096):
        some = children[start : start + 4096]
        tree.insert(some, np.zeros(len(some), np.int64))
    assert tree.child_count(0) == count
    tree.check()
    assert tree.remove(children[:-1]).tolist() == [0]
    assert tree.child_count(0) == 1
    assert not tree.is_evictable(0)
    tree.remove(children[-1:])
    assert tree.is_evictable(0)
    tree.check()
