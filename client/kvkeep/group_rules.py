"""What a usable prefix needs of WINDOW and STATE groups.

The rule is proto/kvkeep/v1/shared_memory.md, section 8. Presence is bytes, one a key, 1 = stored:
their searches keep the GIL and cost nanoseconds a key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.spec import GroupKind, StateMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.spec import Group


class BoundaryRule:
    """Of one WINDOW or STATE group.

    Attributes:
        blocks: A prefix of n keys needs the block of key n - 1 and those `stride` keys apart before
            it, so many in all, as far as the chain reaches.
        stride: Keys that one block covers.
        shortens: Whether a prefix without them is of no use.
    """

    def __init__(self, group: Group, tokens_per_key: int) -> None:
        """Of a group in a namespace whose keys stand for so many tokens each."""
        tokens = group.tokens_per_block
        self.blocks = -(-(group.window_tokens or tokens) // tokens)
        self.stride = tokens // tokens_per_key
        self.shortens = group.state_mode is not StateMode.REPLAYABLE

    def longest(self, present: bytes, limit: int) -> int:
        """The longest prefix of at most `limit` keys that has what it needs."""
        lanes: dict[int, bytes] = {}
        while limit > 0:
            row, lane = divmod(limit - 1, self.stride)
            if lane not in lanes:
                lanes[lane] = present[lane :: self.stride]
            gap = lanes[lane].rfind(0, 0, row + 1)
            if row - gap >= min(self.blocks, row + 1):
                return limit
            limit = gap if self.stride == 1 else limit - 1
        return 0


def longest_usable(needs: Sequence[tuple[BoundaryRule, bytes]], limit: int) -> int:
    """The longest prefix of at most `limit` keys that every group allows."""
    before = -1
    while before != limit:
        before = limit
        for rule, present in needs:
            limit = rule.longest(present, limit)
    return limit


def tokens_of_a_key(groups: Sequence[Group]) -> int:
    """Tokens that one key stands for: those of a FULL block, else of the smallest block."""
    full = [group for group in groups if group.kind is GroupKind.FULL]
    return min(group.tokens_per_block for group in full or groups)
