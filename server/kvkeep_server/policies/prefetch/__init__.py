"""What to promote before anybody asks for it. One policy a file; this one holds the contract."""

from typing import Protocol

from kvkeep_server.core.hints import Hints
from kvkeep_server.policies import BlockIds

__all__ = ["PrefetchPolicy"]


class PrefetchPolicy(Protocol):
    """Plans promotions for one chain.

    `tests/contract/test_prefetch_policy.py` holds every member to this page.

    **The caller guarantees**: ids of one chain, root to tail, each resident in some tier of this
    host. It promotes what is planned in the order of the plan, as far as the byte budget goes, and
    never ahead of a demand read.

    **The implementer MUST** plan only blocks of `chain[matched:]`, none twice, in chain order,
    since a block is of no use before its ancestors; and neither keep nor change the arrays it is
    given.

    **Threads**: the event loop only; does not block. **Errors**: none. **Cost**: at most 1 us a
    block of the chain.
    """

    def plan(self, chain: BlockIds, matched: int, hints: Hints, now: float) -> BlockIds:
        """Which blocks to promote.

        Args:
            chain: Shape (n,): what is known of the chain that a request follows, or is expected to.
            matched: Leading blocks that are in ram, 0 <= matched <= n.
            hints: Of that request.
            now: Monotonic seconds.

        Returns:
            Shape (m,), m <= n - matched.
        """
