"""Groups of a specification: units, rules and tokens that belong together."""

import pytest

from kvkeep_server.core.errors import InvalidArgumentError
from kvkeep_server.core.results import GroupKind, StateMode
from kvkeep_server.service.keyspace_numbers import KeyspaceNumbers
from kvkeep_server.service.namespaces import NamespaceLimits, Namespaces
from kvkeep_server.service.spec import GroupSpec
from kvkeep_server.tiering.epochs import Epochs
from tests.fakes.core_harness import full, spec

STATE = GroupSpec("state", GroupKind.STATE, 512, 4096, 0, StateMode.REPLAYABLE)
EXACT = GroupSpec("mamba", GroupKind.STATE, 64, 4096, 0, StateMode.EXACT)
SWA = GroupSpec("swa", GroupKind.WINDOW, 32, 4096, 100)


@pytest.fixture
def keyspaces():
    return []


@pytest.fixture
def namespaces(keyspaces):
    limits = NamespaceLimits(64, 64, 4096, 1 << 20)
    return Namespaces(limits=limits, numbers=KeyspaceNumbers(keyspaces.append), epochs=Epochs())


def test_each_window_and_state_group_forms_units_of_its_own(namespaces, keyspaces):
    opened = namespaces.open(spec(groups=(STATE, full(), SWA, EXACT), tp_size=2), [])
    spaces = opened.spaces
    assert [(space.rank, space.group) for space in spaces.local] == [(0, 1), (1, 1)]
    assert len(keyspaces) == len(spaces.everywhere) == 8
    state, window, exact = spaces.groups
    assert [group.group for group in spaces.groups] == [0, 2, 3]
    assert (state.rule.blocks, state.rule.stride, state.shortens) == (1, 32, False)
    assert (window.rule.blocks, window.rule.stride, window.shortens) == (4, 2, True)
    assert (exact.rule.blocks, exact.rule.stride, exact.shortens) == (1, 4, True)
    assert [[space.rank for space in group.local] for group in spaces.groups] == [[0, 1]] * 3
    ids = {space.boundary_id for space in keyspaces}
    assert len(ids) == 4
    assert opened.namespace_set.set_id in ids
    assert [space.ram_only for space in keyspaces[:4]] == [True, False, False, False]
    for group in (None, *spaces.groups):
        own = (group or spaces).local
        assert list(spaces.siblings_of(own[0])) == list(own)
        assert all(spaces.has(space.index) for space in own)
    assert not spaces.has(8)


def test_without_full_groups_a_key_stands_for_the_smallest_block(namespaces):
    of = spec(groups=(SWA, EXACT))
    spaces = namespaces.open(of, []).spaces
    assert of.tokens_per_key == 32
    assert (spaces.local, [group.rule.stride for group in spaces.groups]) == ((), [1, 2])


@pytest.mark.parametrize(
    ("groups", "refusal"),
    [
        ((full("a"), full("b", tokens=32)), r"groups\['b'\].tokens_per_block is 32.*16, as the"),
        (
            (full(), GroupSpec("w", GroupKind.WINDOW, 24, 1, 9)),
            r"groups\['w'\].tokens_per_block is 24.*multiple of 16",
        ),
        (
            (full(), GroupSpec("s", GroupKind.STATE, 8, 1, 0, StateMode.EXACT)),
            r"groups\['s'\].tokens_per_block is 8.*multiple of 16",
        ),
    ],
)
def test_blocks_cover_whole_keys(namespaces, groups, refusal):
    with pytest.raises(InvalidArgumentError, match=refusal):
        namespaces.open(spec(groups=groups), [])
