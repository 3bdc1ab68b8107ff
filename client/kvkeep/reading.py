"""Reads of leased blocks from a daemon on another host, held against the CRC-32 of each chunk,
which goes on from that of the request: so it tells of which blocks they are, too."""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.checksums import seal
from kvkeep.errors import DeadlineError, KVKeepError, ResourceExhaustedError
from kvkeep.results import BlockStatus
from kvkeep.v1.block_cache_pb2 import ReadRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.remote_channel import RemoteChannel
    from kvkeep.v1.block_cache_pb2 import ReadResponse

# The daemon takes no stream of more than a minute.
STREAM_MAX_S: Final = 55.0
_LEFT_MIN_S: Final = 0.001


class Wanted(NamedTuple):
    """Blocks of a column of a lease, from number `first` on."""

    lease_id: int
    rank: int
    group: int
    blocks: int
    block_nbytes: int
    first: int = 0


class Came(NamedTuple):
    """How many of them came, and why not the next one; READY where all did."""

    blocks: int
    why: BlockStatus


def read_blocks(
    channel: RemoteChannel, wanted: Wanted, put: Callable[[int, bytes], None], until_s: float
) -> Came:
    """Read blocks in order; `put` gets each piece, and where it begins in all of their bytes.

    Raises nothing for a daemon that does not give them. A stream that finds no turn is asked for
    again, as long as there is time.
    """
    reading = _Reading(channel, wanted, put)
    why: BlockStatus | None = None
    while why is None:
        left_s = min(until_s - time.monotonic(), STREAM_MAX_S)
        if left_s < _LEFT_MIN_S:
            why = BlockStatus.TIMEOUT
            break
        try:
            why = reading.run(left_s)
        except ResourceExhaustedError as error:
            channel.pause(min(error.retry_after_s, until_s - time.monotonic()))
        except DeadlineError:
            why = BlockStatus.TIMEOUT
        except KVKeepError:
            why = BlockStatus.TIER_DOWN
    return Came(reading.blocks, why)


class _Reading:
    """Streams of one column, until all of it is here."""

    def __init__(
        self, channel: RemoteChannel, wanted: Wanted, put: Callable[[int, bytes], None]
    ) -> None:
        self._channel = channel
        self._wanted = wanted
        self._put = put
        self._got = 0

    @property
    def blocks(self) -> int:
        """Leading blocks that are here."""
        return self._got // self._wanted.block_nbytes

    def run(self, timeout_s: float) -> BlockStatus:
        """One stream for what is missing; why it ended. Errors: as `Transport`."""
        wanted, first = self._wanted, self.blocks
        self._got = first * wanted.block_nbytes
        if first == wanted.blocks:
            return BlockStatus.READY
        request = ReadRequest(
            lease_id=wanted.lease_id,
            rank=wanted.rank,
            group=wanted.group,
            first_block=wanted.first + first,
            blocks=wanted.blocks - first,
        )
        crc32 = seal("Read", request).message_crc32
        for response in self._channel.read(request, timeout_s):
            status = _status(response.status)
            if status is not BlockStatus.READY:
                return status
            if not self._take(response, crc32):
                return BlockStatus.CORRUPT
        return BlockStatus.READY if self.blocks == wanted.blocks else BlockStatus.TIER_DOWN

    def _take(self, response: ReadResponse, crc32: int) -> bool:
        """Whether a chunk is what comes next, and whole."""
        wanted, data = self._wanted, response.data
        begins = (response.block - wanted.first) * wanted.block_nbytes + response.offset
        most = wanted.blocks * wanted.block_nbytes
        if begins != self._got or self._got + len(data) > most:
            return False
        if zlib.crc32(data, crc32) != response.crc32:
            return False
        self._put(self._got, data)
        self._got += len(data)
        return True


def _status(number: int) -> BlockStatus:
    known = number in {int(status) for status in BlockStatus}
    return BlockStatus(number) if known else BlockStatus.TIER_DOWN


def put_into(
    target: memoryview | list[memoryview], block_nbytes: int
) -> Callable[[int, bytes], None]:
    """A `put` for one buffer of all blocks, or one a block."""
    if isinstance(target, memoryview):
        whole = target

        def put(at: int, data: bytes) -> None:
            whole[at : at + len(data)] = data

        return put
    each = target

    def put_each(at: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            block, start = divmod(at, block_nbytes)
            count = min(len(rest), block_nbytes - start)
            each[block][start : start + count] = rest[:count]
            rest, at = rest[count:], at + count

    return put_each
