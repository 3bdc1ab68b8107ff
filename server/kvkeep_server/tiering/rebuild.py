"""Makes index tables, and moves the shared index to another one, with another seed and more
rows."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.index.layout import Multipliers
from kvkeep_server.index.table import IndexTable, TableFullError
from kvkeep_server.tiering.columns import BlockColumns
from kvkeep_server.tiering.keyspaces import Keyspace

I64 = NDArray[np.int64]
# Of the blocks of a table that is full, so many are there when the next one is. Twice as many would
# cost 13 bytes a block more on the average and rebuild a third as often; a rebuild takes 0.5 s a
# million blocks, in a thread.
_GROWTH = 1.25
# Blocks that are moved at once: with more, what is needed on the way would take more memory than
# the table.
_SLICE_BLOCKS = 1 << 16


@dataclass(frozen=True, slots=True)
class TableSettings:
    """How index tables are made.

    Attributes:
        server_epoch: Of this daemon.
        rows_initial: Rows of the first table.
        load_max: Share of used rows above which a table is rebuilt.
        ghost_places: Of the ghost table, a power of two.
    """

    server_epoch: int
    rows_initial: int
    load_max: float
    ghost_places: int = 65536

    def rows_for(self, blocks: int) -> int:
        """Rows of a table that shall hold so many blocks, and some more."""
        return int(blocks * _GROWTH / self.load_max) + 1


@dataclass(frozen=True, slots=True)
class PreparedTable:
    """A table that holds what the present one holds.

    Attributes:
        table: The table.
        starts: Where keyspaces begin in it, by their index.
        rows: The row of each id, -1 = none; shape (ids,).
    """

    table: IndexTable
    starts: dict[int, tuple[np.uint64, np.uint64]]
    rows: NDArray[np.int32]


class TableMaker:
    """Draws a seed for each table.

    Args:
        source: Of seeds.
        settings: Of the tables.
    """

    def __init__(self, source: random.Random, settings: TableSettings) -> None:
        """See the class."""
        self._source = source
        self.settings = settings

    def first(self) -> IndexTable:
        """The first table of a daemon.

        Raises:
            OSError: No memory for it.
        """
        return self._table(self.settings.rows_initial, table_id=1)

    def next(
        self, columns: BlockColumns, keyspaces: Sequence[Keyspace], rows: int
    ) -> PreparedTable:
        """A table of another seed with all that is in the present one.

        Raises:
            OSError: No memory for it.
        """
        while True:
            table = self._table(rows, table_id=columns.table.table_id + 1)
            try:
                return fill_table(table, columns, keyspaces)
            except TableFullError:
                rows *= 2
                table.close()
            except BaseException:
                table.close()
                raise

    def _table(self, rows: int, *, table_id: int) -> IndexTable:
        return IndexTable(
            rows=rows,
            multipliers=Multipliers.draw(self._source),
            server_epoch=self.settings.server_epoch,
            table_id=table_id,
        )


def fill_table(
    table: IndexTable, columns: BlockColumns, keyspaces: Sequence[Keyspace]
) -> PreparedTable:
    """Puts all blocks into an empty table.

    Raises:
        TableFullError: Bad luck with its seed.
    """
    starts: dict[int, tuple[np.uint64, np.uint64]] = {}
    used = columns.in_use().astype(np.int32)
    order = used[np.argsort(columns.keyspace[used], kind="stable")]
    rows = np.full(columns.capacity, -1, np.int32)
    spaces = columns.keyspace[order]
    ends = np.append(np.flatnonzero(spaces[1:] != spaces[:-1]) + 1, len(order)).tolist()
    first = 0
    for end in ends if len(order) else ():
        keyspace = keyspaces[int(spaces[first])]
        h, s = table.multipliers.start(keyspace.namespace_id, keyspace.group, keyspace.key_nbytes)
        starts[keyspace.index] = (np.uint64(h), np.uint64(s))
        width = -(-keyspace.key_nbytes // 8)
        for at in range(first, end, _SLICE_BLOCKS):
            ids = order[at : min(at + _SLICE_BLOCKS, end)]
            words = columns.key_words[ids][:, :width]
            tags, checks = table.multipliers.fingerprints(words, np.uint64(h), np.uint64(s))
            places = columns.table.places(columns.row[ids].astype(np.int64))
            rows[ids] = table.insert(tags, checks, places, ids)
        first = end
    return PreparedTable(table, starts, rows)
