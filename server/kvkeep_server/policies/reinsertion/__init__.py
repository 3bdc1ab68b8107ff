"""What is written again when the oldest part of a log goes. The contract of policies."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.policies import BlockIds, BlockMask

__all__ = ["ReinsertionPolicy"]


class ReinsertionPolicy(Protocol):
    """Chooses among blocks whose records are about to go; called in batches, on the event loop.

    Whoever carries it out also keeps what chosen blocks, or blocks elsewhere, descend from; so a
    policy need not know of chains. It MUST leave some of every batch of more than one, or nothing
    was given back.
    """

    def choose(self, ids: BlockIds, last_used_s: NDArray[np.float64], now: float) -> BlockMask:
        """Which of these shall be written again.

        Args:
            ids: Shape (n,).
            last_used_s: Of each, monotonic seconds.
            now: Monotonic seconds.
        """

    def written(self, ids: BlockIds, now: float) -> None:
        """Records of these blocks are written now, for the first time or again."""
