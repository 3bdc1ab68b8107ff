"""Blocks that are ready to become visible: what commits hand to the residency."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.index.table import IndexTable
from kvkeep_server.tiering.keyspaces import Keyspace

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

PARENT_NONE = -1
PARENT_BEFORE = -2


@dataclass(frozen=True, slots=True)
class Marks:
    """Fingerprints of keys in one index table.

    Attributes:
        table: Which.
        tags: One a key.
        checks: One a key.
    """

    table: IndexTable
    tags: U64
    checks: U64

    def select(self, positions: I64) -> "Marks":
        """Those of some of the keys."""
        return Marks(self.table, self.tags[positions], self.checks[positions])


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots in ram that hold sealed blocks.

    Attributes:
        addresses: One a block.
        generations: Even ones.
        checksums: Bound to the keys.
    """

    addresses: U64
    generations: U64
    checksums: U64


@dataclass(frozen=True, slots=True)
class Sealed:
    """Blocks of one keyspace that are ready to become visible; arrays of one length.

    Attributes:
        keyspace: Theirs.
        keys: Theirs, no two equal, none resident.
        parents: Unit of the block before each, PARENT_NONE = first of its chain, PARENT_BEFORE =
            the one before it in this batch.
        slots: Where they lie.
        marks: Of the keys; worthless when the index moved since.
    """

    keyspace: Keyspace
    keys: KeyBatch
    parents: I64
    slots: Slots
    marks: Marks
