"""Which prefixes are usable: held against the rule spelled out."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.core.results import GroupKind
from kvkeep_server.tiering.boundaries import BoundaryRule
from kvkeep_server.tiering.chain import Chain
from kvkeep_server.tiering.keyspaces import BoundaryGroup, Keyspace, KeyspaceSet
from tests.fakes import prefix_oracle


def keyspace(index, rank, group, kind):
    return Keyspace(index, bytes(16), rank, group, kind, 32, 1, 0, bytes([group] * 16), 1, 0)


@dataclass
class Presence:
    """What a `BlockFinder` knows of a chain: ids by keyspace, -1 = absent."""

    ids: dict[int, np.ndarray]

    def find_placed(self, space, keys):
        return self.ids[space.index][: len(keys)]

    def prefix(self, spaces, keys):
        count = len(keys)
        for space in spaces:
            absent = self.ids[space.index][:count] < 0
            count = int(absent.argmax()) if absent.any() else count
        return [self.ids[space.index][:count] for space in spaces]


def chain_of(groups, keys):
    """A chain with that presence; block ids are 1000 a keyspace, plus the position."""
    ids, local, others = {}, [], []
    for number, group in enumerate(groups):
        spaces = []
        for rank, present in enumerate(group.present):
            kind = GroupKind.WINDOW if group.blocks else GroupKind.FULL
            spaces.append(keyspace(len(ids), rank, number, kind))
            own = np.where(np.array(present, bool), np.arange(keys) + 1000 * len(ids), -1)
            ids[len(ids)] = own.astype(np.int64)
        if group.blocks:
            rule = BoundaryRule(group.blocks, group.stride)
            others.append(BoundaryGroup(number, rule, group.shortens, tuple(spaces), spaces))
        else:
            local += spaces
    batch = KeyBatch(np.zeros((keys, 4), np.uint64), 32)
    return Chain.of(
        Presence(ids), KeyspaceSet(0, bytes(16), tuple(local), local, tuple(others)), batch
    )


def check(groups, keys, limit):
    chain = chain_of(groups, keys)
    full = tuple(group for group in groups if not group.blocks)
    assert chain.full == prefix_oracle.usable(full, keys)
    assert chain.blocks == prefix_oracle.usable(groups, keys)
    assert chain.blocks - chain.replayed == prefix_oracle.without_replay(groups, chain.blocks)
    limit = min(limit, chain.full)
    assert chain.usable(limit) == prefix_oracle.usable(groups, limit)
    for number, group in enumerate(groups):
        alone = prefix_oracle.without_replay((group,), chain.full)
        assert chain.of_group(number) == (alone if group.blocks else chain.full)
    for needed in chain.needed(chain.blocks):
        assert (needed.ids >= 0).all()
        at = range(chain.blocks) if needed.positions is None else needed.positions.tolist()
        assert (needed.ids % 1000).tolist() == list(at)
    if chain.blocks < keys:
        spaces, position = chain.missing()
        absent = [not groups[s.group].present[s.rank][position] for s in spaces]
        assert any(absent) or chain.blocks < chain.full


@pytest.mark.promise("P25", gate=100_000, nightly=1_000_000, unit="random presences")
def test_the_usable_prefix_is_the_longest_that_every_group_allows(promise_count):
    for seed in range(promise_count):
        source = random.Random(seed)
        groups, keys = prefix_oracle.random_case(source)
        check(groups, keys, source.randrange(0, 25))


@given(st.randoms(use_true_random=False), st.integers(0, 24))
def test_the_usable_prefix_by_examples_that_shrink(source, limit):
    check(*prefix_oracle.random_case(source), limit)
