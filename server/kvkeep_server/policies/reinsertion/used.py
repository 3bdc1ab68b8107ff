"""Keeps what was used since it was written, the most recent first, up to a share."""

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.policies import BlockIds, BlockMask
from kvkeep_server.policies.block_tree import grown


class UsedReinsertion:
    """Implements `ReinsertionPolicy`; 8 bytes an id.

    Args:
        share: Of a batch that is chosen, at most.
    """

    def __init__(self, *, share: float = 0.5) -> None:
        """See the class."""
        self._share = share
        self._written_s: NDArray[np.float64] = np.zeros(1024, np.float64)

    def choose(self, ids: BlockIds, last_used_s: NDArray[np.float64], now: float) -> BlockMask:
        """See `ReinsertionPolicy`."""
        del now
        self._make_room(ids)
        chosen = last_used_s > self._written_s[ids]
        count = int(len(ids) * self._share)
        if np.count_nonzero(chosen) > count:
            recent = np.argsort(np.where(chosen, last_used_s, -np.inf), kind="stable")
            chosen[recent[: len(ids) - count]] = False
        return chosen

    def written(self, ids: BlockIds, now: float) -> None:
        """See `ReinsertionPolicy`."""
        self._make_room(ids)
        self._written_s[ids] = now

    def _make_room(self, ids: BlockIds) -> None:
        if len(ids) and int(ids.max()) >= len(self._written_s):
            capacity = 1 << int(ids.max()).bit_length()
            self._written_s = grown(self._written_s, capacity)
