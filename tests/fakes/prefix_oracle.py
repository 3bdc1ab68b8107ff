"""The rule of usable prefixes, spelled out for one boundary at a time; and random cases of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Group:
    """One group and who has what of it: `present[rank][key]`. `blocks` 0 = FULL."""

    blocks: int
    stride: int
    shortens: bool
    present: tuple[tuple[bool, ...], ...]

    def allows(self, boundary: int) -> bool:
        """Whether a prefix of so many keys has what it needs of this group, in every rank."""
        if not self.blocks:
            return all(rank[key] for rank in self.present for key in range(boundary))
        needed = [boundary - 1 - nth * self.stride for nth in range(self.blocks)]
        return all(rank[key] for rank in self.present for key in needed if key >= 0)


def usable(groups: tuple[Group, ...], limit: int) -> int:
    """The longest prefix of at most `limit` keys that every group that shortens allows."""
    shortening = [group for group in groups if group.shortens]
    return next(
        boundary
        for boundary in range(limit, -1, -1)
        if all(group.allows(boundary) for group in shortening)
    )


def without_replay(groups: tuple[Group, ...], limit: int) -> int:
    """The same when each group counts."""
    return usable(tuple(replace(group, shortens=True) for group in groups), limit)


def random_case(source: random.Random) -> tuple[tuple[Group, ...], int]:
    """Groups, FULL ones first, and the number of keys. Some have none, some are sparse."""
    keys, ranks = source.randrange(0, 24), source.choice((1, 1, 2, 3))
    kinds = ["full"] * source.choice((0, 1, 1, 1, 2))
    kinds += [source.choice(("window", "exact", "replayable")) for _ in range(source.randrange(4))]
    groups = []
    for kind in kinds or ["exact"]:
        blocks = {"full": 0, "window": source.choice((1, 2, 3, 5, 40))}.get(kind, 1)
        stride = 1 if kind == "full" else source.choice((1, 1, 2, 3, 7))
        there = source.choice((0.3, 0.8, 0.95, 1.0))
        present = tuple(
            tuple(
                source.random() < there and (not blocks or (key + 1) % stride == 0)
                for key in range(keys)
            )
            for _ in range(ranks)
        )
        groups.append(Group(blocks, stride, kind != "replayable", present))
    return tuple(groups), keys
