"""Keys that left: bounded, and never a lie about another key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_server.core.results import MissReason
from kvkeep_server.tiering.ghosts import Ghosts

REASONS = [MissReason.EVICTED, MissReason.REMOVED, MissReason.EXPIRED]


def remember(ghosts, tags, last_used_s, reason=MissReason.EVICTED):
    ghosts.remember(np.array(tags, np.uint64), np.array(last_used_s, np.float64), reason)


def test_a_key_that_left_is_recalled_with_when_and_why():
    ghosts = Ghosts(places=64)
    remember(ghosts, [2, 3, (1 << 64) - 1], [10.0, 11.0, 12.0])
    remember(ghosts, [4], [13.0], MissReason.REMOVED)
    assert ghosts.recall(3) == (MissReason.EVICTED, 11.0)
    assert ghosts.recall((1 << 64) - 1) == (MissReason.EVICTED, 12.0)
    assert ghosts.recall(4) == (MissReason.REMOVED, 13.0)
    assert ghosts.recall(5) == (MissReason.NEVER_SEEN, 0.0)


def test_nothing_is_remembered_at_first_and_after_clearing():
    ghosts = Ghosts(places=8)
    assert ghosts.recall(2) == (MissReason.NEVER_SEEN, 0.0)
    remember(ghosts, [2], [1.0])
    ghosts.clear()
    assert ghosts.recall(2) == (MissReason.NEVER_SEEN, 0.0)


@pytest.mark.parametrize("batch", [True, False])
def test_a_newer_one_takes_the_place_of_an_older_one(batch):
    ghosts = Ghosts(places=8)
    if batch:
        remember(ghosts, [3, 11], [1.0, 2.0])
    else:
        remember(ghosts, [3], [1.0])
        remember(ghosts, [11], [2.0])
    assert ghosts.recall(3) == (MissReason.NEVER_SEEN, 0.0)
    assert ghosts.recall(11) == (MissReason.EVICTED, 2.0)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(2, (1 << 64) - 1), max_size=20),
            st.floats(1, 1e9),
            st.sampled_from(REASONS),
        )
    )
)
def test_what_is_recalled_is_the_last_that_was_said_of_that_key(batches):
    ghosts, said = Ghosts(places=16), {}
    for tags, when, reason in batches:
        remember(ghosts, tags, [when] * len(tags), reason)
        said |= dict.fromkeys(tags, (reason, when))
    for tag, wanted in said.items():
        assert ghosts.recall(tag) in (wanted, (MissReason.NEVER_SEEN, 0.0))
