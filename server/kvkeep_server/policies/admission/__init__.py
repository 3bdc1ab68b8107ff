"""What may enter a tier. One policy a file; this one holds the contract."""

from typing import Protocol

from kvkeep_server.core.hints import Hints
from kvkeep_server.policies import BlockIds, BlockMask, NBytes

__all__ = ["AdmissionPolicy"]


class AdmissionPolicy(Protocol):
    """Says which candidates are worth their room, and their wear of the device.

    `tests/contract/test_admission_policy.py` holds every member to this page.

    **The caller guarantees**: ids that differ from each other and are not resident in the tier, in
    the order of `EvictionPolicy`: FULL chains root to tail. It stores nothing behind the first
    refused block of a FULL chain, since nobody could reach it.

    **The implementer MUST** answer for each candidate alone, keep nothing under the id of a
    candidate (it becomes resident only with `EvictionPolicy.insert`, or is given to another block),
    and neither keep nor change the arrays it is given. One object may be the tier's eviction policy
    too, and compare candidates with its next victims.

    **Threads**: the event loop only; does not block. **Errors**: none. **Cost**: at most 1 us a
    candidate in a batch of 64.
    """

    def admit(self, ids: BlockIds, nbytes: NBytes, hints: Hints, now: float) -> BlockMask:
        """Which of these may enter.

        Args:
            ids: Shape (n,): candidates.
            nbytes: Shape (n,): bytes that each would write.
            hints: Of the request that brings them.
            now: Monotonic seconds.

        Returns:
            Shape (n,): True = admitted.
        """
