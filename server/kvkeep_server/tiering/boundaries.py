"""What a usable prefix needs of WINDOW and STATE groups: the rule of `shared_memory.md`, section 8.

Presence is bytes, one a key, 1 = there: their searches cost nanoseconds a key, and clients judge
presence in the same way beside busy threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BoundaryRule:
    """A prefix of n keys needs the block of key n - 1, that of `stride` keys before, and so on:
    `blocks` of them, or all down to the beginning of the chain.

    Attributes:
        blocks: At least 1; 1 for STATE.
        stride: Keys that one block covers, at least 1.
    """

    blocks: int
    stride: int

    def needed(self, boundary: int) -> range:
        """Positions of the keys whose blocks a prefix of this many keys needs, the last one
        first."""
        last = boundary - 1
        return range(last, max(-1, last - self.blocks * self.stride), -self.stride)

    def split(self, present: bytes) -> list[bytes]:
        """Presence as `largest` takes it: of the keys at each remainder of `stride`."""
        if self.stride == 1:
            return [present]
        return [present[first :: self.stride] for first in range(min(self.stride, len(present)))]

    def largest(self, split: Sequence[bytes], limit: int) -> int:
        """The longest prefix of at most `limit` keys that has what it needs; `limit` is at most the
        number of keys that `split` tells of."""
        boundary = limit
        while boundary > 0:
            row, remainder = divmod(boundary - 1, self.stride)
            absent = split[remainder].rfind(0, 0, row + 1)
            if row - absent >= min(self.blocks, row + 1):
                break
            # With a stride of 1, every prefix down to the absent key lacks that one too.
            boundary = absent if self.stride == 1 else boundary - 1
        return boundary


def usable(groups: Sequence[tuple[BoundaryRule, Sequence[bytes]]], limit: int) -> int:
    """The longest prefix of at most `limit` keys that has what it needs of every group; presence as
    of `BoundaryRule.split`."""
    boundary = limit
    while boundary > 0:
        lowest = boundary
        for rule, split in groups:
            lowest = rule.largest(split, lowest)
        if lowest == boundary:
            break
        boundary = lowest
    return boundary
