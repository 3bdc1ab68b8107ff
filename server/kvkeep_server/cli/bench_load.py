"""What the benchmark stores: random keys, bytes that tell whose they are, a namespace a size."""

import time
from collections.abc import Iterator
from threading import Event

import numpy as np
from numpy.typing import NDArray

import kvkeep
from kvkeep_server.core.errors import KVKeepError

KEY_NBYTES = 32
GROWTH_S = 30.0
SETTLED_S = 2.0
# Part of it is in slabs of other sizes.
GROWTH_MARGIN_NBYTES = 192 << 20
STEP = 2654435761  # spreads the blocks of a batch over the source (Knuth's multiplier)


class WrongBytesError(KVKeepError):
    """A measured call gave something else than what was stored: no figure of the run counts."""


class NoRoomError(KVKeepError):
    """The daemon has no memory for what the benchmark stores."""


class Source:
    """Random bytes that blocks are filled from; where a block's begin tells which block it is."""

    def __init__(self, nbytes: int, random: np.random.Generator) -> None:
        """`nbytes` is a multiple of 64."""
        self.memory: NDArray[np.uint8] = np.frombuffer(random.bytes(nbytes), np.uint8)
        self._words = self.memory.view(np.uint64)

    def offsets(self, blocks: NDArray[np.int64], block_nbytes: int) -> NDArray[np.int64]:
        """Where the bytes of these blocks begin, multiples of 64."""
        room = (self.memory.nbytes - block_nbytes) // 64
        return blocks * STEP % room * 64

    def block(self, number: int, block_nbytes: int) -> NDArray[np.uint8]:
        """The bytes of one block, a view."""
        first = int(self.offsets(np.array([number]), block_nbytes)[0])
        return self.memory[first : first + block_nbytes]

    def check(self, blocks: NDArray[np.int64], read: NDArray[np.uint8]) -> None:
        """Compares the first and the last 8 bytes of each block.

        Args:
            blocks: Numbers, shape (n,).
            read: What was read, shape (n, block_nbytes).

        Raises:
            WrongBytesError: One differs.
        """
        words = read.view(np.uint64)
        first = self.offsets(blocks, read.shape[1]) // 8
        wrong = words[:, 0] != self._words[first]
        wrong |= words[:, -1] != self._words[first + words.shape[1] - 1]
        if wrong.any():
            raise WrongBytesError(f"{int(wrong.sum())} of {len(blocks)} blocks had wrong bytes")


class GrownPool:
    """Waits for room that the daemon's pool grows ahead of need.

    A daemon lets a commit wait for a new chunk for a moment only and then evicts; neither the wait
    nor the eviction is what the benchmark measures, and what it stored shall stay.
    """

    def __init__(self, client: kvkeep.Client) -> None:
        """`client` is asked for the pool's figures."""
        self._client = client
        self._pause = Event()

    def wait_for(self, nbytes: int) -> None:
        """Returns when `nbytes` more fit.

        Raises:
            NoRoomError: The pool did not grow for half a minute.
        """
        began = time.monotonic()
        while (free := self._free_nbytes()) < nbytes + GROWTH_MARGIN_NBYTES:
            waited = time.monotonic() - began
            if free >= nbytes and waited > SETTLED_S:
                return  # enough, and the daemon sees no need to grow
            if waited > GROWTH_S:
                raise NoRoomError(
                    f"the daemon's pool did not grow by {nbytes} bytes within {GROWTH_S:.0f} s:"
                    " free memory, or store less"
                )
            self._pause.wait(0.02)

    def wait_for_huge_pages(self) -> None:
        """Returns when the daemon has made its huge pages, or does not get on with them.

        They are made once, behind the work, and hold up who reads meanwhile: not what a daemon
        does that has run for a minute.
        """
        made, deadline = -1, time.monotonic() + GROWTH_S
        while time.monotonic() < deadline:
            pool = self._client.stats().pool
            if pool.huge_chunks == pool.chunks:
                return
            if pool.huge_chunks > made:
                made, deadline = pool.huge_chunks, time.monotonic() + GROWTH_S
            self._pause.wait(0.1)

    def _free_nbytes(self) -> int:
        pool = self._client.stats().pool
        return int(pool.chunk_nbytes - pool.slot_nbytes_used)


class BlockSet:
    """The blocks of one size: a namespace, a key each, what is stored so far.

    Blocks are stored in chains, a batch each; `draw` takes any that are stored, since a read asks
    only whether the keys are there.
    """

    def __init__(
        self,
        namespace: kvkeep.Namespace,
        block_nbytes: int,
        blocks: int,
        *,
        source: Source,
        random: np.random.Generator,
    ) -> None:
        """Makes the keys of `blocks` blocks; stores none."""
        self.namespace = namespace
        self.block_nbytes = block_nbytes
        self.blocks = blocks
        self.stored = 0
        self._source = source
        self._random = random
        self._keys = np.frombuffer(random.bytes(blocks * KEY_NBYTES), f"V{KEY_NBYTES}")

    def draw(self, count: int) -> tuple[NDArray[np.int64], bytes]:
        """Numbers and packed keys of `count` different stored blocks, at random."""
        numbers = self._random.choice(self.stored, count, replace=False)
        return numbers, self._keys[numbers].tobytes()

    def draw_chain(self, count: int, chain_blocks: int) -> bytes:
        """Packed keys of `count` consecutive blocks of a random chain, from a random place of it.

        The chains are the batches of `store_all(chain_blocks)`.
        """
        chain = int(self._random.integers(self.stored // chain_blocks)) * chain_blocks
        first = chain + int(self._random.integers(chain_blocks - count + 1))
        return self._keys[first : first + count].tobytes()

    def batches(self, blocks: int) -> Iterator[tuple[NDArray[np.int64], bytes]]:
        """The next batches to store, `blocks` each, until the set is full."""
        while self.stored + blocks <= self.blocks:
            numbers = np.arange(self.stored, self.stored + blocks)
            yield numbers, self._keys[self.stored : self.stored + blocks].tobytes()

    def store(self, keys: bytes) -> kvkeep.Store:
        """Staging room for a batch of `batches`."""
        return self.namespace.store(keys)

    def fill(self, store: kvkeep.Store, numbers: NDArray[np.int64]) -> None:
        """Copies the blocks' bytes into the staging views."""
        size, memory = self.block_nbytes, self._source.memory
        offsets = self._source.offsets(numbers, size).tolist()
        for view, first in zip(store.views, offsets, strict=True):
            np.copyto(np.frombuffer(view, np.uint8), memory[first : first + size])

    def committed(self, result: kvkeep.CommitResult, blocks: int) -> None:
        """Counts a batch as stored.

        Raises:
            WrongBytesError: Some of it was not.
        """
        if result.stored != blocks:
            raise WrongBytesError(
                f"a commit of {blocks} new blocks of {self.block_nbytes} bytes"
                f" stored {result.stored} and refused {result.refused}"
            )
        self.stored += blocks

    def store_all(self, batch_blocks: int, pool: GrownPool) -> None:
        """Stores what is left, without a clock."""
        for numbers, keys in self.batches(batch_blocks):
            pool.wait_for(batch_blocks * self.block_nbytes)
            store = self.store(keys)
            self.fill(store, numbers)
            self.committed(store.commit(), len(numbers))

    def remove_all(self, batch_blocks: int) -> None:
        """Takes everything out again."""
        for start in range(0, self.stored, batch_blocks):
            self.namespace.remove(self._keys[start : start + batch_blocks].tobytes())
        self.stored = 0

    def check(self, numbers: NDArray[np.int64], read: NDArray[np.uint8]) -> None:
        """See `Source.check`; `read` is what one read of the blocks gave, any shape."""
        self._source.check(numbers, read.reshape(len(numbers), self.block_nbytes))


def open_set(
    client: kvkeep.Client,
    block_nbytes: int,
    blocks: int,
    *,
    source: Source,
    random: np.random.Generator,
    name: str = "blocks",
) -> BlockSet:
    """Opens the namespace of one block size."""
    spec = kvkeep.NamespaceSpec(
        tenant="bench",
        model=f"{name} of {block_nbytes} bytes",
        weights_fingerprint="none",
        engine="bench",
        layout_version="1",
        kv_dtype="uint8",
        hash_algorithm="random",
        key_nbytes=KEY_NBYTES,
        groups=[kvkeep.Group.full("kv", tokens_per_block=16, block_nbytes=block_nbytes)],
    )
    namespace = client.open_namespace(spec)
    return BlockSet(namespace, block_nbytes, blocks, source=source, random=random)
