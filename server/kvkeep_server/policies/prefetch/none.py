"""Prefetches nothing: every promotion is a demand read. The control for other policies."""

import numpy as np

from kvkeep_server.core.hints import Hints
from kvkeep_server.policies import BlockIds


class NoPrefetch:
    """The plan is always empty."""

    def plan(self, chain: BlockIds, matched: int, hints: Hints, now: float) -> BlockIds:
        """Shape (0,)."""
        return np.empty(0, np.int64)
