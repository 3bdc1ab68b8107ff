"""What recovery read, judged: the last word on each key, whole boundaries, chains from their roots.

Numbers only, for any thread. Names are mixed to 64 bits with random multipliers: two that meet cost
a block, no more, since every look-up compares full keys.
"""

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.keys import KEY_NBYTES_MAX
from kvkeep_server.tiering.lineage import deepest_first, descended
from kvkeep_server.tiers.record import Rows, is_tombstone

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
Mask = NDArray[np.bool_]

_WORDS = KEY_NBYTES_MAX // 8
# Of a record, 139 bytes: mixed names of (namespace, group, key), (set, key), (set, parent; 0 =
# none), (namespace, set, key); and what the index keeps.
_KEPT = np.dtype(
    [
        ("name", "<u8"),
        ("unit", "<u8"),
        ("above", "<u8"),
        ("boundary", "<u8"),
        ("location", "<u8"),
        ("stamp", "<u8"),
        ("checksum", "<u8"),
        ("last_used_ms", "<u8"),
        ("key", "<u8", _WORDS),
        ("keyspace", "<i4"),
        ("members", "<u2"),
        ("removed", "?"),
    ]
)
# One-dimensional array of dtype _KEPT.
Found = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Mixer:
    """Makes names of 64 bits.

    Attributes:
        multipliers: Odd, random.
    """

    multipliers: tuple[int, ...]

    @classmethod
    def draw(cls, source: random.Random) -> "Mixer":
        """Random ones."""
        return cls(tuple(source.getrandbits(64) | 1 for _ in range(_WORDS + 4)))

    def mix(self, *columns: U64) -> U64:
        """One name a row, never 0; columns of shape (n,) or (n, words)."""
        name = np.zeros(len(columns[0]), np.uint64)
        words = [c for column in columns for c in column.reshape(len(column), -1).T]
        for word, multiplier in zip(words, self.multipliers, strict=False):
            name = (name ^ word) * np.uint64(multiplier)
            name ^= name >> np.uint64(32)
        return np.maximum(name, np.uint64(1))

    def kept(self, rows: Rows, keyspaces: NDArray[np.int32]) -> Found:
        """What is kept of records; `keyspaces` are the numbers of theirs, -1 = none."""
        found = np.zeros(len(rows), _KEPT)
        group = rows["group"].astype(np.uint64)
        found["name"] = self.mix(rows["namespace_id"], group, rows["key"])
        found["unit"] = self.mix(rows["boundary_id"], rows["key"])
        found["above"] = self.mix(rows["boundary_id"], rows["parent"])
        found["above"][rows["parent_nbytes"] == 0] = 0
        found["boundary"] = self.mix(rows["namespace_id"], rows["boundary_id"], rows["key"])
        for name in ("location", "checksum", "last_used_ms", "key"):
            found[name] = rows[name]
        found["stamp"] = rows["record_seq"]
        found["keyspace"] = keyspaces
        found["members"] = rows["boundary_members"]
        found["removed"] = is_tombstone(rows)
        return found


@dataclass(frozen=True, slots=True)
class Judged:
    """Blocks that are of use.

    Attributes:
        rows: In the order of their units, those of a unit together.
        unit: Number of the unit of each, ascending from 0: parents before their children.
        starts: Position of the first block of each unit.
        parent: Unit above each unit, -1 = none.
        useless: Blocks that were left out.
    """

    rows: Found
    unit: I64
    starts: I64
    parent: I64
    useless: int

    @property
    def units(self) -> int:
        """How many."""
        return len(self.starts)


def judged(parts: list[Found]) -> Judged:
    """Leaves out what is not the last word, removed, incomplete, or without its parent."""
    rows = _last_words(np.concatenate(parts))
    blocks = len(rows)
    rows = _whole(rows)
    names, heads, unit = np.unique(rows["unit"], return_index=True, return_inverse=True)
    above = rows["above"][heads]
    place = np.minimum(np.searchsorted(names, above), max(0, len(names) - 1))
    found = (above != 0) & (names[place] == above) if len(names) else np.zeros(0, bool)
    parent = np.where(found, place, -1)
    # Whose parent is not there, or who has no root: with all behind them.
    orphans = ((above != 0) & ~found) | ~_rooted(parent)
    parent[orphans] = -1
    useless = descended(parent.astype(np.int32), orphans)
    used = np.flatnonzero(~useless)
    order = deepest_first(parent.astype(np.int32), used)[::-1]
    number = np.full(len(names), -1, np.int64)
    number[order] = np.arange(len(order))
    of_rows = number[unit.reshape(-1)]
    rows, of_rows = rows[of_rows >= 0], of_rows[of_rows >= 0]
    sort = np.argsort(of_rows, kind="stable")
    rows, of_rows = rows[sort], of_rows[sort]
    starts = np.flatnonzero(np.append(True, of_rows[1:] != of_rows[:-1])[: len(of_rows)])
    up = parent[order]
    up = np.where(up >= 0, number[up], -1)
    return Judged(rows, of_rows, starts, up, blocks - len(rows))


def _rooted(parent: I64) -> Mask:
    """Which chains end. Records of several lives of their keys can form a circle."""
    up = parent.copy()
    # Pointer doubling: after k rounds it stands 2^k ancestors above.
    for _ in range(len(parent).bit_length() + 1):
        on_way = np.flatnonzero(up >= 0)
        if not len(on_way):
            break
        up[on_way] = up[up[on_way]]
    rooted: Mask = up < 0
    return rooted


def _last_words(rows: Found) -> Found:
    """Of each name the record with the highest number, unless that is a tombstone."""
    rows = rows[np.lexsort((rows["stamp"], rows["name"]))]
    last = np.append(rows["name"][1:] != rows["name"][:-1], True)[: len(rows)]
    words: Found = rows[last & ~rows["removed"]]
    return words


def _whole(rows: Found) -> Found:
    """Those whose boundary has all members, and whose keyspace is known."""
    rows = rows[rows["keyspace"] >= 0]
    _, which, counts = np.unique(rows["boundary"], return_inverse=True, return_counts=True)
    whole: Found = rows[counts[which.reshape(-1)] >= rows["members"]]
    return whole
