"""What was used since it was written stays, but never all of it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_server.policies.reinsertion.used import UsedReinsertion


@given(
    used=st.lists(st.floats(0, 100), min_size=1, max_size=40),
    written_s=st.floats(0, 100),
    share=st.floats(0.1, 0.9),
)
def test_it_takes_the_most_recent_ones_up_to_its_share(used, written_s, share):
    policy, ids = UsedReinsertion(share=share), np.arange(len(used)) * 777
    policy.written(ids, written_s)
    last_used_s = np.array(used)
    chosen = policy.choose(ids, last_used_s, 200.0)
    since = last_used_s > written_s
    assert not (chosen & ~since).any()
    assert np.count_nonzero(chosen) == min(np.count_nonzero(since), int(len(used) * share))
    left_out = last_used_s[since & ~chosen]
    if len(left_out) and chosen.any():
        assert left_out.max() <= last_used_s[chosen].min()


def test_written_again_it_has_to_be_used_again():
    policy, ids = UsedReinsertion(share=1.0), np.array([3, 5])
    policy.written(ids, 10.0)
    assert policy.choose(ids, np.array([20.0, 5.0]), 30.0).tolist() == [True, False]
    policy.written(ids[:1], 30.0)
    assert policy.choose(ids, np.array([20.0, 5.0]), 40.0).tolist() == [False, False]
