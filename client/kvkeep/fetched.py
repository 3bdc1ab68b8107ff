"""Blocks of a daemon on another host, fetched into memory of this process."""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np

from kvkeep.shared_memory import ELEMENT_NBYTES, PAGE_NBYTES, Chunk

# An address of 0 is none.
_DATA_OFFSET: Final = PAGE_NBYTES


class FetchedChunk(Chunk):
    """What one lease shows, in the shape of a chunk of the pool: views and addresses work alike.

    Nobody else has this memory, so what it shows never changes: all its generations are 0. It goes
    with the last view.
    """

    def __init__(self, chunk_id: int, pages: int) -> None:
        """Room for so many pages of slots; `region` is the writable side of `buffer`."""
        self.chunk_id = chunk_id
        self.nbytes = _DATA_OFFSET + pages * PAGE_NBYTES
        self.region = memoryview(mmap.mmap(-1, self.nbytes))
        self.buffer = self.region.toreadonly()
        self.data_offset = _DATA_OFFSET
        self.elements = np.frombuffer(self.buffer, dtype=f"V{ELEMENT_NBYTES}")
        self.generations = np.zeros(1, dtype=np.uint64)
        self._last_page = np.array(0)
