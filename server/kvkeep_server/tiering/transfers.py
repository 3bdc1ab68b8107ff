"""Bounded copy jobs between a session's staging ring and the pool, in threads.

One job is a whole batch, because the cost of a job is its hand-over between threads. Blocks below
`_KEEP_GIL_NBYTES` are copied by slice assignment, which keeps the GIL: giving it up and getting it
back costs more than the copy. Larger ones go through numpy, which drops it, so that the event loop
keeps answering. The checksum is taken of the copy, never of the staging bytes: a client that writes
while the copy runs changes what is stored, not whether it is sealed.
"""

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvkeep_server.tiering.keyspaces import Keyspace

_KEEP_GIL_NBYTES = 256 * 1024
# Of 64 blocks of 2 MiB copy and checksum take 11.8 ms in such pieces, 13.6 in whole blocks, the
# copy alone 11.0.
_PIECE_NBYTES = 512 * 1024
# A batch above this is cut for several threads: below, a second hand-over costs more than it saves.
_SPLIT_NBYTES = 16 * 1024 * 1024
# Up to here the event loop copies itself: 4 MiB take it 0.4 ms, a hand-over to a thread and back
# 0.2, and a thread that keeps the GIL for its copies would hold the loop up all the same.
_INLINE_NBYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Blocks of one keyspace that lie in staging.

    Attributes:
        keyspace: Theirs.
        keys: The key of each block.
        source: The session's whole staging memory.
        offsets: Byte offset of each block in `source`.
        targets: The reserved slots, each `keyspace.block_nbytes` long.
    """

    keyspace: Keyspace
    keys: Sequence[bytes]
    source: memoryview
    offsets: Sequence[int]
    targets: Sequence[memoryview]


def copy_blocks(job: CopyIn, start: int, stop: int) -> list[int]:
    """Copies blocks start to stop and returns the bound checksums of the copies."""
    nbytes, whole, digest = job.keyspace.block_nbytes, job.source, xxhash.xxh3_64_intdigest
    seeds = job.keyspace.seeds(job.keys[start:stop])
    checksums = []
    for offset, target, seed in zip(
        job.offsets[start:stop], job.targets[start:stop], seeds, strict=True
    ):
        source = whole[offset : offset + nbytes]
        if nbytes < _KEEP_GIL_NBYTES:
            target[:] = source
            checksums.append(digest(target, seed))
        else:
            checksums.append(_copy_large(source, target, seed))
    return checksums


def _copy_large(source: memoryview, target: memoryview, seed: int) -> int:
    """Copies in pieces that are still in the core's cache when their checksum is taken."""
    hasher = xxhash.xxh3_64(seed=seed)
    taken, put = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    for start in range(0, len(taken), _PIECE_NBYTES):
        stop = start + _PIECE_NBYTES
        np.copyto(put[start:stop], taken[start:stop])
        hasher.update(target[start:stop])
    return hasher.intdigest()


class Transfers:
    """The copy threads.

    Args:
        threads: How many at most run at once.
    """

    def __init__(self, *, threads: int) -> None:
        """See the class."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvkeep-copy")

    async def copy_in(self, job: CopyIn) -> NDArray[np.uint64]:
        """Runs one job; returns the checksums, one a block.

        Not to be cancelled: the slots are written until it returns. The caller shields it.
        """
        count = len(job.offsets)
        nbytes = job.keyspace.block_nbytes
        if nbytes < _KEEP_GIL_NBYTES and count * nbytes <= _INLINE_NBYTES:
            return np.array(copy_blocks(job, 0, count), np.uint64)
        parts = self._threads if count * nbytes >= _SPLIT_NBYTES else 1
        bounds = [count * part // parts for part in range(parts + 1)]
        loop = asyncio.get_running_loop()
        running = [
            loop.run_in_executor(self._pool, copy_blocks, job, start, stop)
            for start, stop in itertools.pairwise(bounds)
        ]
        done = await asyncio.gather(*running, return_exceptions=True)
        checksums: list[int] = []
        for part in done:
            if isinstance(part, BaseException):
                raise part
            checksums += part
        return np.array(checksums, np.uint64)

    def close(self) -> None:
        """Waits for running jobs and ends the threads."""
        self._pool.shutdown(wait=True)
