"""Page-aligned memory for worker threads: what O_DIRECT wants where the caller's is not."""

import ctypes
import mmap
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.tiers.record import PAGE_NBYTES

Scratch = NDArray[np.uint8]


class ScratchPool:
    """Lends buffers of one size; any thread. Larger ones are made for the occasion.

    Args:
        nbytes: Of each buffer.
        kept_max: So many stay when nobody uses them. Those in use are bounded by the threads.
    """

    def __init__(self, *, nbytes: int, kept_max: int) -> None:
        """See the class."""
        self.nbytes = nbytes
        # A deque's append and pop are atomic.
        self._free: deque[Scratch] = deque(maxlen=kept_max)

    def take(self, nbytes: int) -> Scratch:
        """A buffer of at least so many bytes, zero or dirty, for this caller alone."""
        if nbytes <= self.nbytes:
            try:
                return self._free.pop()
            except IndexError:
                pass
        size = max(nbytes, self.nbytes)
        return np.frombuffer(mmap.mmap(-1, -(-size // PAGE_NBYTES) * PAGE_NBYTES), np.uint8)

    def give(self, buffer: Scratch) -> None:
        """Takes a buffer back that nothing touches any more."""
        if len(buffer) == self.nbytes:
            self._free.append(buffer)


def is_aligned(view: memoryview) -> bool:
    """Whether O_DIRECT takes whole pages from the beginning of this memory."""
    if view.readonly:
        address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    else:  # a quarter of the time
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return address % PAGE_NBYTES == 0


def interleave(flat: memoryview, payloads: Sequence[memoryview]) -> list[memoryview]:
    """The buffers of records that lie one behind the other in a file, for one system call.

    Of each record `i` the header is page `2 i` of the scratch memory `flat`, and the last, broken
    page of its payload is page `2 i + 1`; the whole pages are where the payload lies. The end of a
    record and the header of the next are neighbours in the scratch, as in the file.
    """
    buffers: list[memoryview] = []
    begin = end = 0
    for i, payload in enumerate(payloads):
        whole = len(payload) // PAGE_NBYTES * PAGE_NBYTES
        end = 2 * i + 1
        if whole:
            buffers += [flat[begin * PAGE_NBYTES : end * PAGE_NBYTES], payload[:whole]]
            begin = end
        if whole < len(payload):
            end += 1
            continue
        if begin < end:
            buffers.append(flat[begin * PAGE_NBYTES : end * PAGE_NBYTES])
        begin = 2 * i + 2
    if begin < end:
        buffers.append(flat[begin * PAGE_NBYTES : end * PAGE_NBYTES])
    return buffers
