"""Client programs of the reuse hammer: one refills the pool, the others read without leases."""

import random

import numpy as np

import kvkeep
import kvkeep.copying
from tests.fakes.client_process import Wire
from tests.fakes.generated_blocks import KEY_NBYTES, blocks_of, chain_keys, place_of, spec

BLOCK_NBYTES = 4096
BLOCKS = 256
# A pool of 4 MiB holds four of them.
CHAINS = 6
PLACE = place_of("")


def contents() -> list[tuple[bytes, np.ndarray]]:
    """(keys, bytes) of every chain."""
    chains = [chain_keys(chain, BLOCKS) for chain in range(CHAINS)]
    return [(keys, blocks_of(PLACE, keys, BLOCK_NBYTES).reshape(-1)) for keys in chains]


def refill(wire: Wire, runtime_dir: str) -> None:
    """Stores one chain after the other, far more than fit, until told to end."""
    with kvkeep.connect(runtime_dir, timeout_s=10.0) as client:
        namespace = client.open_namespace(spec(BLOCK_NBYTES))
        chains = contents()
        stored = 0
        wire.tell("ready")
        while not wire.asked():
            for keys, content in chains:
                with namespace.store(keys) as store:
                    for position, view in zip(store.new, store.views, strict=True):
                        at = position * BLOCK_NBYTES
                        view[:] = content[at : at + BLOCK_NBYTES].data
                assert store.result is not None
                stored += store.result.stored
        wire.tell(stored)


class CheckedReads:
    """Stands around the client's check of the generations and counts what it refuses.

    Attributes:
        copied: Blocks that were copied since `begin`.
        detected: Blocks whose slot had been reused, of all reads.
    """

    def __init__(self) -> None:
        self.copied = self.detected = 0
        self._unchanged = kvkeep.copying.unchanged
        kvkeep.copying.unchanged = self._counted  # type: ignore[assignment]

    def begin(self) -> None:
        self.copied = 0

    def _counted(self, chunks, addresses, generations):
        exact = self._unchanged(chunks, addresses, generations)
        self.copied += len(addresses)
        self.detected += len(addresses) - exact
        return exact


def read(wire: Wire, runtime_dir: str, seed: int, into: str, reads_min: int | None) -> None:
    """Reads until `reads_min` blocks came back as exact, or until told to end.

    Tells (reads, wrong, detected, spoiled). `into` one buffer, or one a block. `spoiled` are blocks
    that the check refused and whose bytes were indeed others.
    """
    source = random.Random(seed)
    counted = CheckedReads()
    reads = wrong = spoiled = 0
    with kvkeep.connect(runtime_dir, timeout_s=10.0) as client:
        namespace = client.open_namespace(spec(BLOCK_NBYTES))
        chains = contents()
        buffer = np.zeros(BLOCKS * BLOCK_NBYTES, np.uint8)
        separate = [memoryview(buffer)[at : at + BLOCK_NBYTES] for at in _starts(BLOCKS)]
        wire.tell("ready")
        wire.hear()
        while not wire.asked() if reads_min is None else reads < reads_min:
            keys, content = chains[source.randrange(CHAINS)]
            blocks = source.choice((BLOCKS, BLOCKS, source.randrange(1, BLOCKS)))
            keys = keys[: blocks * KEY_NBYTES]
            one = into == "one buffer"
            targets = buffer[: blocks * BLOCK_NBYTES] if one else separate[:blocks]
            counted.begin()
            exact = namespace.read_into(keys, targets)
            reads += exact
            wrong += _differing(buffer, content, 0, exact)
            spoiled += _differing(buffer, content, exact, max(exact, counted.copied))
    wire.tell((reads, wrong, counted.detected, spoiled))


def _starts(blocks: int) -> range:
    return range(0, blocks * BLOCK_NBYTES, BLOCK_NBYTES)


def _differing(buffer: np.ndarray, content: np.ndarray, start: int, stop: int) -> int:
    """Blocks with a byte that is not the generated one."""
    found = buffer[start * BLOCK_NBYTES : stop * BLOCK_NBYTES].view(np.uint64)
    expected = content[start * BLOCK_NBYTES : stop * BLOCK_NBYTES].view(np.uint64)
    if np.array_equal(found, expected):
        return 0
    differing = (found != expected).reshape(-1, BLOCK_NBYTES // 8)
    return int(differing.any(axis=1).sum())
