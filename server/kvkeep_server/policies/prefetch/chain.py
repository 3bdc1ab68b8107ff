"""Prefetches all of a chain that is hinted at: who hints knows best. The caller bounds bytes."""

from kvkeep_server.core.hints import Hints
from kvkeep_server.policies import BlockIds


class WholeChain:
    """The plan is what is not in ram, to the end."""

    def plan(self, chain: BlockIds, matched: int, hints: Hints, now: float) -> BlockIds:
        """Shape (n - matched,)."""
        return chain[matched:].copy()
