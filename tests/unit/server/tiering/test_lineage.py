"""Descendants and closed sets against the slow way."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_server.tiering.lineage import closed_part, deepest_first, descended


@st.composite
def forests(draw):
    """Parents of up to 30 ids, in any order, and some of the ids."""
    count = draw(st.integers(1, 30))
    order = draw(st.permutations(range(count)))
    parents = np.full(count, -1, np.int32)
    for place, one in enumerate(order):
        above = draw(st.integers(-1, place - 1))
        parents[one] = order[above] if above >= 0 else -1
    some = draw(st.sets(st.integers(0, count - 1), min_size=1))
    return parents, np.array(sorted(some), np.int64)


def ancestors(parents, one):
    while one >= 0:
        yield one
        one = parents[one]


@given(forests())
def test_descended(forest):
    parents, some = forest
    marked = np.zeros(len(parents), bool)
    marked[some] = True
    wanted = [any(marked[a] for a in ancestors(parents, one)) for one in range(len(parents))]
    assert descended(parents, marked).tolist() == wanted


@given(forests())
def test_deepest_first(forest):
    parents, some = forest
    marked = np.zeros(len(parents), bool)
    marked[some] = True
    trees = np.flatnonzero(descended(parents, marked))
    order = deepest_first(parents, trees).tolist()
    assert sorted(order) == trees.tolist()
    for place, one in enumerate(order):
        later = set(order[place + 1 :])
        assert not any(one in ancestors(parents, other) for other in later)


@given(forests())
def test_closed_part(forest):
    parents, some = forest
    children = np.bincount(parents[parents >= 0], minlength=len(parents))
    columns = SimpleNamespace(parent=parents, children=children)
    outside = set(range(len(parents))) - set(some.tolist())
    kept = {a for one in outside for a in ancestors(parents, one)}
    assert closed_part(columns, some).tolist() == [one for one in some.tolist() if one not in kept]
