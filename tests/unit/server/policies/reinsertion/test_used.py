"""What was used since it was written stays, but never all of it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_server.policies.reinsertion.used import UsedReinsertion


@given(
    used=st.lists(st.tuples(st.booleans(), st.floats(0, 100)), min_size=1, max_size=40),
    share=st.floats(0.1, 0.9),
)
def test_it_takes_the_most_recent_ones_up_to_its_share(used, share):
    since, last_used_s = (np.array(column) for column in zip(*used, strict=True))
    chosen = UsedReinsertion(share=share).choose(since, last_used_s)
    assert not (chosen & ~since).any()
    assert np.count_nonzero(chosen) == min(np.count_nonzero(since), int(len(used) * share))
    left_out = last_used_s[since & ~chosen]
    if len(left_out) and chosen.any():
        assert left_out.max() <= last_used_s[chosen].min()
