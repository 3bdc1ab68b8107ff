"""Chunks: the sealed memory that blocks lie in, and the generations that tell when a slot is used
anew.

Layout and seals: `proto/kvkeep/v1/shared_memory.md`, sections 2 and 3. All chunks of a pool are
mapped into one range of addresses, so that generations and bytes of blocks in different chunks are
reached with one numpy call.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkeep_server.core.errors import InvalidArgumentError, PoolExhaustedError
from kvkeep_server.core.memfd import (
    HUGE_PAGE_NBYTES,
    PAGE_NBYTES,
    AddressRange,
    Memfd,
    create_sealed,
    round_up,
)
from kvkeep_server.core.memory_limit import MemoryLimit
from kvkeep_server.core.quantities import show_size
from kvkeep_server.index.layout import LAYOUT_VERSION

MAGIC = b"KVKCHNK1"
GENERATIONS_OFFSET = PAGE_NBYTES
CHUNKS_MAX = 1 << 16
# Left to the daemon itself when the pool grows: a pool that takes the last page has the daemon
# killed.
HEADROOM_NBYTES = 32 << 20
# Where only part of a full chunk is free, the pool grows by smaller ones, down to this part of a
# full one.
_PART_MIN = 16
_GROWTH_RETRY_S = 1.0

_HEADER = struct.Struct("<8sIIQQQQ")
_U32 = np.uint64(32)
_U48 = np.uint64(48)
_PAGE_MASK = np.uint64(0xFFFFFFFF)
_COUNTER_MAX = 1 << 48

Addresses = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What a pool is allowed.

    Attributes:
        limit_nbytes: Of all chunks together, headers and generations included.
        chunk_nbytes_max: Of one chunk.
        chunk_nbytes_min: A remainder below this is left unused.
        server_epoch: Written into every chunk.
    """

    limit_nbytes: int
    chunk_nbytes_max: int
    chunk_nbytes_min: int
    server_epoch: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sealed memfd of the pool.

    Attributes:
        chunk_id: Counts from 0; never used again in a server epoch.
        nbytes: Size of the file.
        data_page: First page that may hold a slot.
        memfd: File and map; `memfd.client_fd()` is what a client gets.
        generations: Shape (pages of the file,), a view into the file.
    """

    chunk_id: int
    nbytes: int
    data_page: int
    memfd: Memfd
    generations: NDArray[np.uint64]

    @property
    def buffer(self) -> memoryview:
        """The whole file, writable."""
        return self.memfd.buffer


def data_page_of(nbytes: int) -> int:
    """First data page of a chunk of this size: header and generations come before it."""
    pages = nbytes // PAGE_NBYTES
    return 1 + -(-pages * 8 // PAGE_NBYTES)


class Pool:
    """The chunks of one trust domain. Owned by the event loop; only `make_chunk` runs in a thread.

    Args:
        settings: See there.
        memory_limit: Reads what the process may use and what is free.
        on_chunk: Told of every chunk that came in, before a slot of it is used.
    """

    def __init__(
        self,
        *,
        settings: PoolSettings,
        memory_limit: Callable[[], MemoryLimit],
        on_chunk: Callable[[Chunk], None],
    ) -> None:
        """See the class."""
        self.settings = settings
        self.chunks: dict[int, Chunk] = {}
        self.nbytes = 0
        self.huge_chunks = 0
        self._memory_limit = memory_limit
        self._on_chunk = on_chunk
        self._range: AddressRange | None = None
        # The whole range as bytes and as words, and by chunk id where its bytes and generations
        # begin in them.
        self._bytes = memoryview(b"")
        self._words: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._byte_base: NDArray[np.int64] = np.empty(0, np.int64)
        self._word_base: NDArray[np.int64] = np.empty(0, np.int64)
        self._counters: NDArray[np.uint64] = np.empty(0, np.uint64)

    # --- growing ----------------------------------------------------------------------------------

    @property
    def can_grow(self) -> bool:
        """Whether the limit leaves room for another chunk."""
        return self._next_nbytes() > 0

    def check_fits(self) -> None:
        """For the daemon's start.

        Raises:
            InvalidArgumentError: the limit is smaller than one chunk, or above what the process may
                ever use.
        """
        limit = self.settings.limit_nbytes
        if limit < self.settings.chunk_nbytes_min:
            minimum = show_size(self.settings.chunk_nbytes_min)
            raise InvalidArgumentError(
                "ram.size", show_size(limit), f"at least {minimum} (one slab)", "raise ram.size"
            )
        memory = self._memory_limit()
        if limit + HEADROOM_NBYTES > memory.nbytes:
            raise InvalidArgumentError(
                "ram.size",
                show_size(limit),
                f"at most {show_size(max(0, memory.nbytes - HEADROOM_NBYTES))} ({memory.source} is "
                f"{show_size(memory.nbytes)}, {show_size(memory.free_nbytes)} of it free, "
                f"{show_size(HEADROOM_NBYTES)} stay for the daemon)",
                "lower ram.size or raise the limit",
            )

    def make_chunk(self) -> Chunk:
        """Makes the next chunk, allocated and touched. Blocks for 0.5 s a GiB: use a thread.

        One call at a time, followed by `adopt` before the next.

        Raises:
            PoolExhaustedError: the limit is reached, or memory is short; names size, free, fix.
        """
        nbytes = self._next_nbytes()
        if not nbytes:
            limit = show_size(self.settings.limit_nbytes)
            raise PoolExhaustedError(f"the pool is at its limit of {limit}; fix: raise ram.size")
        nbytes = self._affordable(nbytes)
        try:
            if self._range is None:
                self._range = AddressRange.reserve(self._range_nbytes())
            return self._format(self._create(nbytes, self._range))
        except OSError as error:
            raise PoolExhaustedError(
                f"the pool cannot grow by {show_size(nbytes)}: {error.strerror}; "
                f"{show_size(self._memory_limit().free_nbytes)} are free; "
                "fix: free memory or lower ram.size",
                _GROWTH_RETRY_S,
            ) from error

    def adopt(self, chunk: Chunk) -> None:
        """Takes a chunk of `make_chunk` in and tells of it."""
        assert chunk.chunk_id == len(self.chunks)
        assert self._range is not None
        if not self.chunks:
            self._bytes = self._range.view
            self._words = np.frombuffer(self._bytes[: len(self._bytes) // 8 * 8], np.uint64)
        base = chunk.memfd.offset
        self._byte_base = np.append(self._byte_base, base)
        self._word_base = np.append(self._word_base, (base + GENERATIONS_OFFSET) // 8)
        self._counters = np.append(self._counters, np.uint64(0))
        self.chunks[chunk.chunk_id] = chunk
        self.nbytes += chunk.nbytes
        self._on_chunk(chunk)

    def close(self) -> None:
        """Closes the descriptors. The memory goes when the last view of it does."""
        for chunk in self.chunks.values():
            chunk.memfd.close()
        self.chunks.clear()
        self._bytes = memoryview(b"")
        self._words = np.empty(0, np.uint64)
        self._range = None

    # --- bytes and generations --------------------------------------------------------------------

    def view(self, address: int, nbytes: int) -> memoryview:
        """The bytes at an address, writable."""
        start = int(self._byte_base[address >> 32]) + (address & 0xFFFFFFFF) * PAGE_NBYTES
        return self._bytes[start : start + nbytes]

    def views(self, addresses: Addresses, nbytes: int) -> list[memoryview]:
        """`view` of each address."""
        pages = (addresses & _PAGE_MASK).view(np.int64)
        starts = self._byte_base[(addresses >> _U32).view(np.int64)] + pages * PAGE_NBYTES
        whole = self._bytes
        return [whole[start : start + nbytes] for start in starts.tolist()]

    def gather_generations(self, addresses: Addresses) -> NDArray[np.uint64]:
        """The generation of each address."""
        found: NDArray[np.uint64] = self._words[self._word_of(addresses)]
        return found

    def set_odd(self, addresses: Addresses) -> NDArray[np.uint64]:
        """Says that these slots are about to change, before their first byte does.

        Returns:
            The new generations.
        """
        return self._stamp(addresses, 1)

    def set_even(self, addresses: Addresses) -> NDArray[np.uint64]:
        """Says that these slots hold sealed blocks, after their last byte.

        Returns:
            The new generations.
        """
        return self._stamp(addresses, 2)

    def retire_pages(self, chunk_id: int, first_page: int, pages: int) -> None:
        """Makes all generations of a range odd, because its slots are cut anew."""
        first = (chunk_id << 32) + first_page
        self.set_odd(np.arange(first, first + pages, dtype=np.uint64))

    def _stamp(self, addresses: Addresses, first: int) -> NDArray[np.uint64]:
        """Writes new generations of one parity.

        Every chunk of the batch skips the count of the whole batch, so that chunks need no loop.
        48 bits last for decades all the same, at any rate that memory allows.
        """
        count = len(addresses)
        chunks = (addresses >> _U32).view(np.int64)
        counters = self._counters[chunks]
        steps = np.arange(first, first + 2 * count, 2, dtype=np.uint64)
        values: NDArray[np.uint64] = (chunks.view(np.uint64) << _U48) | (counters + steps)
        last = int(counters.max(initial=0)) + 2 * count
        assert last < _COUNTER_MAX, "generations are used up"
        self._counters[chunks] = counters + np.uint64(2 * count)
        self._words[self._word_of(addresses)] = values
        return values

    def _word_of(self, addresses: Addresses) -> NDArray[np.int64]:
        pages = (addresses & _PAGE_MASK).view(np.int64)
        words: NDArray[np.int64] = self._word_base[(addresses >> _U32).view(np.int64)] + pages
        return words

    # --- inside -----------------------------------------------------------------------------------

    def _next_nbytes(self) -> int:
        """Size of the next chunk by the limit alone; 0 = none."""
        left = self.settings.limit_nbytes - self.nbytes
        nbytes = min(left, self.settings.chunk_nbytes_max) // PAGE_NBYTES * PAGE_NBYTES
        if nbytes < self.settings.chunk_nbytes_min or len(self.chunks) == CHUNKS_MAX:
            return 0
        return nbytes

    def _part_min(self) -> int:
        full = min(self.settings.chunk_nbytes_max, self.settings.limit_nbytes)
        return max(round_up(full // _PART_MIN, PAGE_NBYTES), self.settings.chunk_nbytes_min)

    def _affordable(self, nbytes: int) -> int:
        """What of it the free memory allows: all, or a smaller chunk."""
        memory = self._memory_limit()
        free = max(0, memory.free_nbytes - HEADROOM_NBYTES) // PAGE_NBYTES * PAGE_NBYTES
        if free >= nbytes:
            return nbytes
        if free >= self._part_min():
            return free
        raise PoolExhaustedError(
            f"the pool cannot grow by {show_size(nbytes)}: {show_size(memory.free_nbytes)} are "
            f"free, of which {show_size(HEADROOM_NBYTES)} stay for the daemon ({memory.source} is "
            f"{show_size(memory.nbytes)}); fix: free memory, raise that limit, or lower ram.size",
            _GROWTH_RETRY_S,
        )

    def _range_nbytes(self) -> int:
        """Addresses for the limit, however many chunks it comes in."""
        limit = self.settings.limit_nbytes
        chunks = limit // self._part_min() + 2
        return round_up(limit, PAGE_NBYTES) + chunks * HUGE_PAGE_NBYTES

    def _create(self, nbytes: int, within: AddressRange) -> Memfd:
        """A file of which every page is there and mapped."""
        name = f"kvkeep-chunk-{len(self.chunks)}"
        return create_sealed(
            name,
            nbytes,
            future_write_seal=True,
            within=within,
            touch=True,
        )

    def _format(self, memfd: Memfd) -> Chunk:
        chunk_id = len(self.chunks)
        data_page = data_page_of(memfd.nbytes)
        header = (MAGIC, LAYOUT_VERSION, chunk_id, self.settings.server_epoch, memfd.nbytes)
        _HEADER.pack_into(memfd.buffer, 0, *header, GENERATIONS_OFFSET, data_page * PAGE_NBYTES)
        pages = memfd.nbytes // PAGE_NBYTES
        generations = np.frombuffer(memfd.buffer, np.uint64, pages, GENERATIONS_OFFSET)
        return Chunk(chunk_id, memfd.nbytes, data_page, memfd, generations)
