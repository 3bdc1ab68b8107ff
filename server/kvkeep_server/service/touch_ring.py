"""The daemon's end of a touch ring: look-ups that clients answered by themselves.

Layout in `proto/kvkeep/v1/shared_memory.md`, section 6. The client can write whatever it likes into
it at any time, so a record is copied first, then checked, and counts only if it fits.
"""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.memfd import Memfd, create_sealed
from kvkeep_server.index.layout import LAYOUT_VERSION

MAGIC = b"KVKTUCH1"
HEADER_NBYTES = 4096
NO_ROW = 0xFFFFFFFF
_HEAD_OFFSET = 64
# No client writes so many records between two drains: its head is garbage.
_BEHIND_MAX = 1 << 24

RECORD = np.dtype(
    [
        ("number", "<u8"),
        ("set_index", "<u4"),
        ("group", "<u4"),
        ("asked", "<u4"),
        ("found", "<u4"),
        ("row", "<u4"),
        ("version", "<u4"),
        ("engine_hit_tokens", "<u8"),
        ("output_tokens", "<u4"),
        ("stop_reason", "u1"),
        ("sub_agent", "u1"),
        ("was_read", "u1"),
        ("reserved", "u1"),
        ("session_hint", "<u8"),
        ("number_again", "<u8"),
    ]
)
assert RECORD.itemsize == 64


@dataclass(frozen=True, slots=True)
class Drained:
    """What one drain found.

    Attributes:
        records: Whole records in order, dtype `RECORD`.
        lost: Records that were overwritten before they were drained.
        torn: Records that were being written, or are garbage.
    """

    records: NDArray[np.void]
    lost: int
    torn: int


class TouchRing:
    """One session's ring.

    Args:
        records: Its length, a power of two.
    """

    def __init__(self, *, records: int) -> None:
        """See the class. Allocates the memory."""
        self._records = records
        self.memfd: Memfd = create_sealed(
            "kvkeep-touch", HEADER_NBYTES + records * RECORD.itemsize, future_write_seal=False
        )
        self.memfd.buffer[:16] = struct.pack("<8sII", MAGIC, LAYOUT_VERSION, records)
        self._head = np.frombuffer(self.memfd.buffer, np.uint64, 1, _HEAD_OFFSET)
        self._ring = np.frombuffer(self.memfd.buffer, RECORD, records, HEADER_NBYTES)
        self._tail = 0

    def drain(self, at_most: int) -> Drained:
        """The records since the last call, oldest first; more than `at_most` wait for the next
        one."""
        head = int(self._head[0])
        behind = head - self._tail
        if not 0 <= behind <= _BEHIND_MAX:
            # The client moved its head backwards or far ahead: start anew from there.
            self._tail = head
            return Drained(np.empty(0, RECORD), 0, 1)
        lost = max(0, behind - self._records)
        start = self._tail + lost
        count = min(head - start, at_most)
        numbers = np.arange(start, start + count, dtype=np.uint64)
        # An overwriting client may be in any of them: the copy decides.
        records = self._ring[(numbers & np.uint64(self._records - 1)).view(np.int64)]
        whole = (records["number"] == numbers + np.uint64(1)) & (
            records["number_again"] == records["number"]
        )
        self._tail = start + count
        return Drained(records[whole], lost, int(count - np.count_nonzero(whole)))

    def close(self) -> None:
        """Gives the memory back."""
        del self._head, self._ring
        self.memfd.close()
