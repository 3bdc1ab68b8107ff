"""Who leaves when room is needed. One policy a file; this one holds the contract."""

from typing import Protocol

from kvkeep_server.core.hints import Hints
from kvkeep_server.policies import BlockIds, ClassId
from kvkeep_server.policies.parents import Parents

__all__ = ["EvictionPolicy"]


class EvictionPolicy(Protocol):
    """Ranks the blocks that compete for the same room, and names those that leave first.

    `tests/contract/test_eviction_policy.py` holds every member to this page.

    **The caller guarantees**, in every verb:

    - Ids of one call differ from each other; an empty call is fine. Only `insert` takes ids that
      are not resident (not inserted, or removed since), every other verb only ids that are. A
      parent is resident, or comes in the same call.
    - The order inside a call means something: of blocks that are alike otherwise, **the last one of
      the call leaves first**. Blocks of a FULL group are given in chain order, root to tail, so the
      tail leaves before its head. WINDOW and STATE blocks have no ancestors: they are inserted with
      parent -1 and given newest boundary first, so an older boundary leaves before a newer one.
    - A touch names the whole resident prefix that a request used, not its tail only.
    - The caller counts pins: `pin` gets blocks that are not pinned, `unpin` and `remove` are told
      the truth.

    **The implementer MUST**:

    - name as a victim only what is resident and not pinned and has no resident child that is not
      named before it, so that carrying out the victims in order never leaves a child without its
      parent;
    - name all such blocks if `count` asks for that many: a pin, or a guess about the future, delays
      nobody else;
    - decide nothing by itself: what was named stays known until `remove`, and may be touched,
      pinned or get children instead;
    - accept the removal of any block, also of one in the middle of a chain; its children are first
      in their chains from then on;
    - forget at `remove` what it knows under that id, because the next block with this id is another
      one. A policy that learns from what comes back takes by constructor a function from ids to
      lasting identities, and remembers those;
    - take chance from a generator given by constructor, so that equal calls give equal victims;
    - neither keep nor change the arrays it is given; what it returns is the caller's.

    **Threads**: the event loop only; no verb blocks or awaits. **Errors**: AssertionError when the
    caller broke its guarantee and the policy noticed, which it need not; nothing else.

    **Cost**: at most 3 us a block touched in a batch, and 10 us a victim named and removed in
    batches of 64, at a million blocks. `pin` and `unpin` cost what their batch costs, however much
    is pinned. `check` and the removal of a block that has children may look at every block.
    """

    def insert(
        self,
        ids: BlockIds,
        parents: BlockIds,
        retention_class: ClassId,
        hints: Hints,
        now: float,
    ) -> None:
        """These blocks became resident, and count as used now.

        Args:
            ids: Shape (n,).
            parents: Shape (n,): the block before each, which may be one of `ids`, or -1.
            retention_class: Of all of them.
            hints: Of the request that stored them.
            now: Monotonic seconds.
        """

    def touch(self, ids: BlockIds, hints: Hints, now: float) -> None:
        """A request used these blocks."""

    def pin(self, ids: BlockIds) -> None:
        """Until `unpin`, neither these nor their ancestors may be named. Their history is kept."""

    def unpin(self, ids: BlockIds) -> None:
        """These may be named again, with the standing they would have had unpinned."""

    def remove(self, ids: BlockIds) -> None:
        """These blocks left, for whatever reason. In any order within the call; none is pinned."""

    def victims(self, count: int, now: float) -> BlockIds:
        """Names who should leave next: at most `count`, in the order in which they may be removed.

        Returns:
            Shape (m,), m <= count. Shorter only if nothing else may leave.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of what the policy keeps, parents not counted."""

    @property
    def parents(self) -> Parents:
        """What the policy was made with, or made for itself: the parents by id. Written to by
        `insert` where it gets a parent; who shares it keeps the same there until `remove`."""

    def check(self) -> None:
        """Audits what the policy keeps.

        Raises:
            AssertionError: An invariant is broken.
        """
