"""Holds index, columns and pool against each other: what `check()` of the residency asserts."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.index.table import IndexTable
from kvkeep_server.tiering.columns import BlockColumns

U64 = NDArray[np.uint64]


def audit(columns: BlockColumns, table: IndexTable, generations: Callable[[U64], U64]) -> None:
    """Looks at every block.

    Args:
        columns: What the daemon keeps of each.
        table: The index.
        generations: Those of slots now.

    Raises:
        AssertionError: They disagree.
    """
    ids = columns.in_use()
    table.check()
    withdrawn = columns.withdrawn()
    assert len(ids) == table.live_rows == columns.used - len(withdrawn), "rows and ids"
    rows = columns.row[ids].astype(np.int64)
    assert (table.ids[rows] == ids).all(), "row and id point to each other"
    assert (table.address_of(rows) == columns.address[ids]).all(), "addresses"
    assert (table.generation_of(rows) == columns.generation[ids]).all(), "generations of rows"
    assert (generations(columns.address[ids]) == columns.generation[ids]).all(), "of slots"
    assert not (columns.generation[ids] & np.uint64(1)).any(), "a visible block is not sealed"
    held = np.concatenate((ids, withdrawn))
    assert len(np.unique(columns.address[held])) == len(held), "two blocks in one slot"
    assert (columns.pins[columns.unit[withdrawn]] > 0).all(), "withdrawn and held by nobody"
    _audit_units(columns, ids)


def _audit_units(columns: BlockColumns, ids: NDArray[np.int64]) -> None:
    units = ids[columns.unit[ids] == ids]
    assert np.isin(columns.unit[ids], units).all(), "a block of no unit"
    chained, at = 0, units
    while len(at):
        chained += len(at)
        following = columns.next_shard[at]
        at = following[following >= 0].astype(np.int64)
    assert chained == len(ids), "shards hang together"
    parents = columns.parent[units]
    assert np.isin(parents[parents >= 0], units).all(), "a reachable child without its parent"
    children = np.bincount(parents[parents >= 0], minlength=columns.capacity)
    assert (children[units] == columns.children[units]).all(), "child counts"
    assert (columns.pins >= 0).all(), "pins"
