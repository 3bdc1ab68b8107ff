"""What is written again when the oldest part of a log goes. The contract of policies."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.policies import BlockMask

__all__ = ["ReinsertionPolicy"]


class ReinsertionPolicy(Protocol):
    """Chooses among blocks whose records are about to go; called in batches, on the event loop.

    Whoever carries it out also keeps what chosen blocks, or blocks elsewhere, descend from; so a
    policy need not know of chains. It MUST leave some of every batch of more than one, or nothing
    was given back.
    """

    def choose(self, reused: BlockMask, last_used_s: NDArray[np.float64]) -> BlockMask:
        """Which of these blocks shall be written again.

        Args:
            reused: Whether each was used since it was written, shape (n,).
            last_used_s: When each was used last, monotonic seconds, shape (n,).
        """
