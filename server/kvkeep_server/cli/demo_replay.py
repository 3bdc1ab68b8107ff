"""What `kvkeep demo` does with a daemon: replays a trace as an engine would, and checks every byte.

The trace has no tokens and no KV. Both are derived from the ids of its blocks, so that everything
that is read back can be checked against what it must be.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import kvkeep
from kvkeep_server.core.clock import Clock
from kvkeep_server.sim.trace import TRACE_BLOCK_TOKENS, Trace, TraceRequest

BLOCK_TOKENS = 128
BLOCK_NBYTES = BLOCK_TOKENS * 890  # the global KV of DeepSeek-V4.1-Flash: 890 bytes a token
BLOCKS_PER_TRACE_BLOCK = TRACE_BLOCK_TOKENS // BLOCK_TOKENS
BLOCKS_PER_COMMIT = 256  # 28 MiB: two fit into the default staging ring
_BLOCK_WORDS = BLOCK_NBYTES // 8
_ROTATIONS = 65536

Words = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Totals:
    """What happened so far. Blocks are those of 128 tokens."""

    requests: int = 0
    blocks_asked: int = 0
    blocks_verified: int = 0
    blocks_wrong: int = 0
    blocks_stored: int = 0
    blocks_refused: int = 0
    blocks_seen_before: int = 0  # what a cache without limit would have found
    lookup_s: float = 0.0
    read_s: float = 0.0
    store_s: float = 0.0

    @property
    def blocks_hit(self) -> int:
        """Blocks that were found and read."""
        return self.blocks_verified + self.blocks_wrong

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt tokens that were found, 0 to 1."""
        return self.blocks_hit / max(1, self.blocks_asked)

    @property
    def hit_ratio_unlimited(self) -> float:
        """What a cache that never evicts would have had, 0 to 1."""
        return self.blocks_seen_before / max(1, self.blocks_asked)


class BlockBytes:
    """The bytes that the block of a key must have.

    A long random string, entered at a place and masked with a word that both come from a digest of
    the whole key: 80 bits, so no two blocks agree, and a block in the wrong place is seen.
    """

    def __init__(self, seed: int) -> None:
        """The string depends on the seed only."""
        words = np.random.default_rng(seed).integers(
            0, 1 << 64, size=_BLOCK_WORDS + _ROTATIONS, dtype=np.uint64
        )
        self._words: Words = words
        self._scratch = np.empty(_BLOCK_WORDS, dtype=np.uint64)

    def fill(self, key: bytes, block: memoryview) -> None:
        """Writes the key's bytes into a block of 113,920 bytes."""
        source, mask = self._source(key)
        np.bitwise_xor(source, mask, out=np.frombuffer(block, dtype=np.uint64))

    def is_exact(self, key: bytes, block: memoryview) -> bool:
        """True when every byte of the block is the key's."""
        if block.nbytes != BLOCK_NBYTES:
            return False
        source, mask = self._source(key)
        np.bitwise_xor(source, np.frombuffer(block, dtype=np.uint64), out=self._scratch)
        return bool((self._scratch == mask).all())

    def _source(self, key: bytes) -> tuple[Words, np.uint64]:
        digest = hashlib.blake2b(key, digest_size=16).digest()
        first = int.from_bytes(digest[:8], "little") % _ROTATIONS
        mask = np.uint64(int.from_bytes(digest[8:], "little"))
        return self._words[first : first + _BLOCK_WORDS], mask


class TraceKeys:
    """Chain hashes for the blocks of a trace: four of 128 tokens for each of 512.

    Args:
        hasher: Names the blocks.
        parents: Of the trace.
    """

    def __init__(self, hasher: "kvkeep.chain_hash.Hasher", parents: Sequence[int]) -> None:
        """See the class."""
        self._hasher = hasher
        self._parents = parents
        self._keys: dict[int, bytes] = {}

    def of(self, blocks: Sequence[int]) -> bytes:
        """Returns the packed keys of a request. Equal prefixes are hashed once."""
        return b"".join([self._keys.get(block) or self._derive(block) for block in blocks])

    def _derive(self, block: int) -> bytes:
        parent = self._keys.get(self._parents[block], b"")
        first = block * TRACE_BLOCK_TOKENS  # a token id that no other block has
        keys = self._hasher.keys(
            range(first, first + TRACE_BLOCK_TOKENS), parent=parent[-self._hasher.key_nbytes :]
        )
        self._keys[block] = keys
        return keys


class Replay:
    """Sends the requests of a trace through the public client, one at a time.

    Args:
        namespace: Open, with one group of `BLOCK_NBYTES`.
        trace: The requests.
        hasher: Names the blocks.
        content: The bytes of each block.
        clock: For the durations in `totals`.
    """

    def __init__(
        self,
        *,
        namespace: kvkeep.Namespace,
        trace: Trace,
        hasher: "kvkeep.chain_hash.Hasher",
        content: BlockBytes,
        clock: Clock,
    ) -> None:
        """See the class."""
        self.totals = Totals()
        self._namespace = namespace
        self._key_nbytes = hasher.key_nbytes
        self._keys = TraceKeys(hasher, trace.parents.tolist())
        self._content = content
        self._clock = clock
        self._seen: set[int] = set()

    def run(self, request: TraceRequest) -> None:
        """One request: use what is stored, compute and store the rest.

        Raises:
            kvkeep.KVKeepError: The daemon went away, or a lease was lost.
        """
        keys = self._keys.of(request.blocks)
        begin_s = self._clock.monotonic_s()
        found = self._namespace.lookup(keys)
        found_s = self._clock.monotonic_s()
        # The lease is held until the rest is stored, so that the new blocks' parents stay.
        with self._namespace.acquire(keys[: found.blocks * self._key_nbytes]) as acquired:
            self._verify(keys, acquired.views())
            read_s = self._clock.monotonic_s()
            self._store(keys, acquired.blocks)
        self.totals.lookup_s += found_s - begin_s
        self.totals.read_s += read_s - found_s
        self.totals.store_s += self._clock.monotonic_s() - read_s
        self.totals.requests += 1
        self.totals.blocks_asked += len(request.blocks) * BLOCKS_PER_TRACE_BLOCK
        self._count_seen(request.blocks)

    def _verify(self, keys: bytes, views: Sequence[memoryview]) -> None:
        for at, view in enumerate(views):
            key = keys[at * self._key_nbytes : (at + 1) * self._key_nbytes]
            if self._content.is_exact(key, view):
                self.totals.blocks_verified += 1
            else:
                self.totals.blocks_wrong += 1

    def _store(self, keys: bytes, hit_blocks: int) -> None:
        step = BLOCKS_PER_COMMIT * self._key_nbytes
        for at in range(hit_blocks * self._key_nbytes, len(keys), step):
            piece = keys[at : at + step]
            parent = keys[at - self._key_nbytes : at] if at else None
            with self._namespace.store(piece, parent_key=parent) as store:
                for position, view in zip(store.new, store.views, strict=True):
                    first = position * self._key_nbytes
                    self._content.fill(piece[first : first + self._key_nbytes], view)
                result = store.commit()
            self.totals.blocks_stored += result.stored
            self.totals.blocks_refused += result.refused

    def _count_seen(self, blocks: Sequence[int]) -> None:
        # Equal ids are equal whole prefixes, so those seen before are the leading ones.
        self.totals.blocks_seen_before += BLOCKS_PER_TRACE_BLOCK * sum(
            block in self._seen for block in blocks
        )
        self._seen.update(blocks)
