"""Holds the bytes of resident blocks against their checksums."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.tiering.audit import Audit
from kvkeep_server.tiering.keyspaces import Keyspace

I64 = NDArray[np.int64]
# Looked through at a time for blocks in use.
_IDS = 4096


@dataclass(frozen=True, slots=True)
class BytesBatch:
    """Some blocks in ram, as they were when the batch was taken.

    Nothing is pinned: whoever finds a difference compares generations again.

    Attributes:
        ids: Of the blocks, ascending.
        generations: Of their slots.
        checksums: What was taken of their bytes when they were stored.
        keyspaces: Of each.
        keys: Of each.
        views: The bytes of each, in the pool.
        nbytes: Of all of them.
        stop: Ids below this, from where the batch began, were looked at.
    """

    ids: I64
    generations: NDArray[np.uint64]
    checksums: list[int]
    keyspaces: list[Keyspace]
    keys: list[bytes]
    views: list[memoryview]
    nbytes: int
    stop: int

    @classmethod
    def take(cls, audit: Audit, start: int, nbytes_max: float) -> "BytesBatch":
        """The blocks from id `start` on, at least one if there is any, up to so many bytes or the
        end of a stretch of ids. Event loop only."""
        columns = audit.columns
        stop = min(start + _IDS, columns.capacity)
        ids = start + np.flatnonzero(columns.row[start:stop] >= 0)
        addresses = columns.address_of(ids)
        ids, addresses = ids[addresses != 0], addresses[addresses != 0]
        spaces = [audit.keyspaces[number] for number in columns.keyspace[ids].tolist()]
        ends = np.cumsum([space.block_nbytes for space in spaces])
        count = max(1, int(np.searchsorted(ends, nbytes_max, side="right")))
        if count < len(ids):
            stop = int(ids[count])
            ids, addresses, spaces = ids[:count], addresses[:count], spaces[:count]
        packed = columns.key_words[ids].tobytes()
        stride = columns.key_words.shape[1] * 8
        return cls(
            ids=ids,
            generations=audit.ram.generations(addresses),
            checksums=columns.checksum[ids].tolist(),
            keyspaces=spaces,
            keys=[packed[i * stride : i * stride + s.key_nbytes] for i, s in enumerate(spaces)],
            views=[
                audit.ram.view(address, space.block_nbytes)
                for address, space in zip(addresses.tolist(), spaces, strict=True)
            ],
            nbytes=int(ends[len(ids) - 1]) if len(ids) else 0,
            stop=stop,
        )

    def wrong(self) -> I64:
        """Positions of the blocks whose bytes are not those that were stored. Any thread."""
        rows = zip(self.keyspaces, self.keys, self.views, self.checksums, strict=True)
        differs = [space.checksum(key, view) != wanted for space, key, view, wanted in rows]
        return np.flatnonzero(np.array(differs, bool))
