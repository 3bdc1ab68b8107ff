"""Moves the shared index to another table, with another seed and more rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.index.table import IndexTable, Places
from kvkeep_server.tiering.columns import BlockColumns
from kvkeep_server.tiering.keyspaces import Keyspace

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PreparedTable:
    """A table that holds what the present one holds.

    Attributes:
        table: The table.
        starts: Where keyspaces begin in it, by their index.
        ids: Ids of all blocks.
        rows: The row of each of `ids`.
    """

    table: IndexTable
    starts: dict[int, tuple[np.uint64, np.uint64]]
    ids: I64
    rows: I64


def fill_table(
    table: IndexTable, columns: BlockColumns, keyspaces: Sequence[Keyspace]
) -> PreparedTable:
    """Puts all blocks into an empty table.

    Raises:
        TableFullError: Bad luck with its seed.
    """
    starts: dict[int, tuple[np.uint64, np.uint64]] = {}
    used = columns.in_use()
    order = used[np.argsort(columns.keyspace[used], kind="stable")]
    placed = [np.empty(0, np.int64)]
    for ids in np.split(order, np.flatnonzero(np.diff(columns.keyspace[order])) + 1):
        if not len(ids):
            continue
        keyspace = keyspaces[int(columns.keyspace[ids[0]])]
        h, s = table.multipliers.start(keyspace.namespace_id, keyspace.group, keyspace.key_nbytes)
        starts[keyspace.index] = (np.uint64(h), np.uint64(s))
        words = columns.key_words[ids][:, : -(-keyspace.key_nbytes // 8)]
        tags, checks = table.multipliers.fingerprints(words, np.uint64(h), np.uint64(s))
        places = Places(columns.address[ids], columns.generation[ids], columns.nvme[ids])
        placed.append(table.insert(tags, checks, places, ids.astype(np.int32)))
    return PreparedTable(table, starts, order, np.concatenate(placed))
