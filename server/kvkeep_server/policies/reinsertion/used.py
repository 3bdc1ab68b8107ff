"""Keeps what was used since it was written, the most recent first, up to a share."""

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.policies import BlockMask


class UsedReinsertion:
    """Implements `ReinsertionPolicy`; it keeps nothing of a block.

    Args:
        share: Of a batch that is chosen, at most.
    """

    def __init__(self, *, share: float = 0.5) -> None:
        """See the class."""
        self._share = share

    def choose(self, reused: BlockMask, last_used_s: NDArray[np.float64]) -> BlockMask:
        """See `ReinsertionPolicy`."""
        chosen = reused.copy()
        count = int(len(chosen) * self._share)
        if np.count_nonzero(chosen) > count:
            recent = np.argsort(np.where(chosen, last_used_s, -np.inf), kind="stable")
            chosen[recent[: len(chosen) - count]] = False
        return chosen
