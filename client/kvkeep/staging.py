"""The session's staging memory: where blocks to be stored are written.

proto/kvkeep/v1/shared_memory.md, section 5. What lies where is this side's business.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from kvkeep.errors import ResourceExhaustedError, SessionLostError
from kvkeep.spec import invalid
from kvkeep.waking import Bell

if TYPE_CHECKING:
    from collections.abc import Iterable

# A block begins where a slot of the pool does, so that the daemon copies runs of blocks at once.
ALIGNMENT_NBYTES: Final = 4096
_RETRY_AFTER_S: Final = 0.01


class Staging:
    """Gives out places for blocks. Any thread may call.

    The lowest places are given first: they are warm in the cache.
    """

    def __init__(self, region: memoryview) -> None:
        """`region` is the whole writable map."""
        self.region = region
        self.nbytes = len(region)
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]
        self._lock = threading.Lock()
        self._freed = Bell()
        self._over = False

    @staticmethod
    def stride(block_nbytes: int) -> int:
        """Bytes that one block takes here."""
        return -(-block_nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES

    def allocate(self, block_nbytes: int, count: int, timeout_s: float) -> list[int]:
        """Byte offsets for `count` blocks, ascending; waits up to `timeout_s` for room.

        Errors: InvalidArgumentError (more than the staging memory has), ResourceExhaustedError
        (others held it for too long), SessionLostError.
        """
        stride = self.stride(block_nbytes)
        if count > self.nbytes // stride:
            raise invalid(
                "keys",
                f"{count} new blocks of {block_nbytes} bytes",
                f"what fits the session's staging memory of {self.nbytes} bytes",
                "store fewer at once, use store_blocks(), or connect with more staging_nbytes",
            )
        until_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._over:
                    raise SessionLostError("the session that this belongs to has ended")
                if self._room(stride) >= count:
                    return self._take(stride, count)
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise ResourceExhaustedError(
                    f"no room for {count} blocks of {block_nbytes} bytes in the staging memory of "
                    f"{self.nbytes} bytes for {timeout_s} s: commit or leave the stores that hold "
                    "it, or connect with more staging_nbytes",
                    _RETRY_AFTER_S,
                )
            self._freed.nap(left_s)

    def free(self, offsets: Iterable[int], block_nbytes: int) -> None:
        """Give places back."""
        stride = self.stride(block_nbytes)
        with self._lock:
            start = end = -1
            for offset in offsets:
                if offset != end:
                    self._give(start, end)
                    start = offset
                end = offset + stride
            self._give(start, end)
        self._freed.ring()

    def close(self) -> None:
        """The session is over: who waits for room is told."""
        self._over = True
        self._freed.ring()

    @property
    def free_nbytes(self) -> int:
        """Bytes that are not given out."""
        with self._lock:
            return sum(end - start for start, end in self._free)

    def _room(self, stride: int) -> int:
        return sum((end - start) // stride for start, end in self._free)

    def _take(self, stride: int, count: int) -> list[int]:
        offsets: list[int] = []
        left: list[tuple[int, int]] = []
        for start, end in self._free:
            taken = min((end - start) // stride, count - len(offsets))
            offsets += range(start, start + taken * stride, stride)
            if start + taken * stride < end:
                left.append((start + taken * stride, end))
        self._free = left
        return offsets

    def _give(self, start: int, end: int) -> None:
        if start < 0:
            return
        at = bisect_left(self._free, (start, end))
        assert at == 0 or self._free[at - 1][1] <= start, "staging given back twice"
        assert at == len(self._free) or end <= self._free[at][0], "staging given back twice"
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            start = self._free.pop(at - 1)[0]
            at -= 1
        self._free.insert(at, (start, end))
