"""What an Acquire or an Await on another host gave, brought here: its answer then speaks of a chunk
that was fetched, and of what came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.fetched import FetchedChunk
from kvkeep.reading import Came, Wanted, put_into, read_blocks
from kvkeep.results import BlockStatus, MissReason
from kvkeep.shared_memory import PAGE_NBYTES
from kvkeep.v1 import block_cache_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.remote_channel import RemoteChannel

_ADDRESS_NBYTES: Final = 8
_WHY_ENDED: Final = {
    BlockStatus.CORRUPT: MissReason.CORRUPT,
    BlockStatus.TIMEOUT: MissReason.TIMEOUT,
}


class RemoteLease:
    """A lease whose blocks are fetched as they become readable.

    Attributes:
        lease_id: The lease.
        over_s: Monotonic seconds of its end, if nobody renews it.
        chunk_ids: Chunks that were fetched for it.
    """

    def __init__(
        self, lease_id: int, over_s: float, sizes: Sequence[int], full: frozenset[int]
    ) -> None:
        """`sizes` are the bytes of a block of each group, `full` the FULL groups."""
        self.lease_id = lease_id
        self.over_s = over_s
        self.chunk_ids: list[int] = []
        self._sizes = sizes
        self._full = full
        # Of each (rank, group): blocks that were readable so far.
        self._seen: dict[tuple[int, int], int] = {}

    def fetch(
        self,
        channel: RemoteChannel,
        columns: Sequence[pb.LeasedColumn],
        chunk: FetchedChunk,
        until_s: float,
    ) -> list[Came]:
        """The blocks of these columns, as far as they come in time, an answer each; the columns'
        addresses then name their places in the chunk."""
        page, all_came = chunk.data_offset // PAGE_NBYTES, []
        for column in columns:
            count, nbytes = len(column.addresses) // _ADDRESS_NBYTES, self._sizes[column.group]
            each = _pages(nbytes)
            own = range(page, page + count * each, each)
            views = [chunk.region[at * PAGE_NBYTES :][:nbytes] for at in own]
            key = column.rank, column.group
            first = self._seen.get(key, 0)
            wanted = Wanted(self.lease_id, *key, count, nbytes, first)
            all_came.append(read_blocks(channel, wanted, put_into(views, nbytes), until_s))
            addresses = np.array(own, np.uint64) | np.uint64(chunk.chunk_id << 32)
            column.addresses = addresses.tobytes()
            column.generations = bytes(len(column.addresses))
            page += count * each
            self._seen[key] = first + count
        self.chunk_ids.append(chunk.chunk_id)
        return all_came

    def pages(self, columns: Iterable[pb.LeasedColumn]) -> int:
        """Pages that the blocks of these columns take in a chunk."""
        return sum(
            len(column.addresses) // _ADDRESS_NBYTES * _pages(self._sizes[column.group])
            for column in columns
        )

    def cut(self, columns: Sequence[pb.LeasedColumn], came: Sequence[Came]) -> Came:
        """How many keys came whole, and why no more; the columns are cut to them.

        A prefix needs all of its blocks in FULL groups, and in other groups its last ones: what
        these had at the end of the longer prefix says nothing of a shorter one.
        """
        missing = [one for one in came if one.why is not BlockStatus.READY]
        keys = 0
        if all(column.group in self._full for column in columns):
            keys = min(one.blocks for one in came)
        if missing:
            for column in columns:
                nbytes = keys * _ADDRESS_NBYTES if column.group in self._full else 0
                column.addresses = column.addresses[:nbytes]
                column.generations, column.positions = bytes(nbytes), b""
        why = next((one.why for one in missing if one.blocks >= keys), BlockStatus.READY)
        return Came(keys, why)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES)


def _status(ready: int, why: BlockStatus, length: int) -> bytes:
    head = bytes([BlockStatus.READY]) * ready + bytes([why])
    return head.ljust(length, bytes([BlockStatus.MISS]))


def cut_acquired(response: pb.AcquireResponse, came: Came) -> None:
    """Make the answer speak of the prefix that came."""
    if came.why is BlockStatus.READY:
        return
    skipped = response.status.count(BlockStatus.READY) - response.leased_blocks
    ready = skipped + came.blocks
    response.status = _status(ready, came.why, len(response.status))
    response.leased_blocks = came.blocks
    response.prefix_blocks = ready
    response.ended = pb.MissReason.ValueType(_WHY_ENDED.get(came.why, MissReason.TIER_DOWN))


def cut_arrived(response: pb.AwaitResponse, came: Came) -> None:
    """Make the answer speak of the blocks that came."""
    if came.why is not BlockStatus.READY:
        response.status = _status(came.blocks, came.why, len(response.status))
