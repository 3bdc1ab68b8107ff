"""Blocks of a commit on their way over the network into the staging of a session.

The bytes of a stream follow each other without gaps, in the order in which the commit names its
groups and places. They are laid there in threads, several chunks at a time.
"""

import zlib
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from itertools import accumulate

import numpy as np

from kvkeep_server.core.errors import InvalidArgumentError, TierUnavailableError
from kvkeep_server.tiering.commit_plan import CommitBatch

CHUNK_NBYTES_MAX = 1 << 20
# Laid at a time; so much of a stream waits in memory at most, and one chunk.
_BATCH_NBYTES = 2 << 20


class Writing:
    """One stream. Event loop only.

    Args:
        batch: The commit.
        run: Runs work in a thread; a cancelled caller waits for its end.
        crc32: What those of its chunks go on from.

    Attributes:
        batch: As given.
        nbytes: Of all blocks.
        received: That came.
        begins: Where its places in the staging begin, ascending.
        stops: Where all of them up to each one have ended.
    """

    def __init__(
        self,
        batch: CommitBatch,
        run: Callable[[Callable[[], None]], Awaitable[None]],
        crc32: int,
    ) -> None:
        """See the class."""
        places = [
            (int(offset), group.keyspace.block_nbytes)
            for group in batch.groups
            for offset in group.offsets
        ]
        spans = [(at, at + nbytes) for at, nbytes in places]
        begins, stops = np.array(spans, np.int64).reshape(-1, 2).T
        order = np.argsort(begins)
        self.begins, self.stops = begins[order], np.maximum.accumulate(stops[order])
        self._offsets = [offset for offset, _ in places]
        self._starts = list(accumulate((nbytes for _, nbytes in places), initial=0))
        self.nbytes = self._starts[-1]
        self.received = 0
        self.batch = batch
        self._run = run
        self._crc32 = crc32
        self._waiting: list[tuple[int, bytes, int]] = []
        self._waiting_nbytes = 0

    def meets(self, other: "Writing") -> bool:
        """Whether some byte of the staging is a place of both."""
        # The first place of the other that ends behind the beginning of each of ours.
        at = np.searchsorted(other.stops, self.begins, side="right")
        there = at < len(other.begins)
        return bool((other.begins[at[there]] < self.stops[there]).any())

    async def take(self, offset: int, data: bytes, crc32: int) -> None:
        """The next chunk.

        Raises:
            InvalidArgumentError: It is not what comes next, too large, too much, or damaged.
        """
        if offset != self.received:
            raise InvalidArgumentError(
                "offset", offset, f"{self.received}, the bytes before", "send each chunk once"
            )
        if not 0 < len(data) <= CHUNK_NBYTES_MAX:
            raise InvalidArgumentError(
                "data", f"{len(data)} bytes", f"1 to {CHUNK_NBYTES_MAX}", "cut it into chunks"
            )
        if self.received + len(data) > self.nbytes:
            raise self._not_all(self.received + len(data))
        self._waiting.append((offset, data, crc32))
        self._waiting_nbytes += len(data)
        self.received += len(data)
        if self._waiting_nbytes >= _BATCH_NBYTES:
            await self._lay()

    async def finish(self) -> None:
        """No more comes.

        Raises:
            InvalidArgumentError: Bytes are missing, or damaged.
        """
        if self.received < self.nbytes:
            raise self._not_all(self.received)
        await self._lay()

    def _not_all(self, nbytes: int) -> InvalidArgumentError:
        return InvalidArgumentError(
            "data",
            f"{nbytes} bytes in all",
            f"{self.nbytes}, those of the blocks that the header names",
            "send exactly them",
        )

    async def _lay(self) -> None:
        chunks, self._waiting = self._waiting, []
        self._waiting_nbytes = 0
        damaged: list[int] = []

        def lay() -> None:
            for offset, data, crc32 in chunks:
                if zlib.crc32(data, self._crc32) != crc32:
                    damaged.append(offset)
                    return
                self._put(offset, memoryview(data))

        await self._run(lay)
        if damaged:
            raise TierUnavailableError(
                f"the bytes from {damaged[0]} on came damaged: their CRC-32 is another; store "
                "again, and look at the network"
            )

    def _put(self, offset: int, data: memoryview) -> None:
        at = bisect_right(self._starts, offset) - 1
        while data:
            into = offset - self._starts[at]
            count = min(len(data), self._starts[at + 1] - offset)
            place = self._offsets[at] + into
            self.batch.staging[place : place + count] = data[:count]
            data, offset, at = data[count:], offset + count, at + 1
