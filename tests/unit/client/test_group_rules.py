"""The client's half of the rule of usable prefixes, held against the rule spelled out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.group_rules import BoundaryRule, longest_usable, tokens_of_a_key
from kvkeep.spec import Group, StateMode
from tests.fakes import prefix_oracle


def spec_of(group):
    if not group.blocks:
        return Group.full("f", tokens_per_block=16, block_nbytes=1)
    tokens = 16 * group.stride
    if group.shortens:
        # Not a whole number of blocks: the last one is needed for a part.
        window = group.blocks * tokens - tokens // 2
        return Group.window("w", tokens_per_block=tokens, block_nbytes=1, window_tokens=window)
    return Group.state("s", tokens_per_block=tokens, block_nbytes=1)


def check(groups, keys):
    full = tuple(group for group in groups if not group.blocks)
    limit = prefix_oracle.usable(full, keys)
    needs = []
    for group in groups:
        if group.blocks:
            rule = BoundaryRule(spec_of(group), 16)
            assert (rule.stride, rule.shortens) == (group.stride, group.shortens)
            present = bytes(all(rank[key] for rank in group.present) for key in range(keys))
            needs.append((rule, present))
            alone = prefix_oracle.without_replay((group,), limit)
            assert rule.longest(present, limit) == alone
    shortening = [need for need in needs if need[0].shortens]
    blocks = longest_usable(shortening, limit)
    assert blocks == prefix_oracle.usable(groups, keys)
    assert longest_usable(needs, blocks) == prefix_oracle.without_replay(groups, blocks)


@pytest.mark.promise("P25", gate=100_000, nightly=1_000_000, unit="random presences")
def test_the_usable_prefix_is_the_longest_that_every_group_allows(promise_count):
    for seed in range(promise_count):
        check(*prefix_oracle.random_case(random.Random(seed)))


@given(st.randoms(use_true_random=False))
def test_the_usable_prefix_by_examples_that_shrink(source):
    check(*prefix_oracle.random_case(source))


def test_a_key_stands_for_a_full_block_or_for_the_smallest_one():
    state = Group.state("s", tokens_per_block=64, block_nbytes=1, state_mode=StateMode.EXACT)
    window = Group.window("w", tokens_per_block=32, block_nbytes=1, window_tokens=100)
    full = Group.full("f", tokens_per_block=16, block_nbytes=1)
    assert tokens_of_a_key([state, window]) == 32
    assert tokens_of_a_key([state, window, full]) == 16
