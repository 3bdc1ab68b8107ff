"""The demo's replay against a namespace in a dict: what it stores, checks and counts."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from kvkeep import chain_hash
from kvkeep_server.cli import demo_replay
from kvkeep_server.cli.demo_replay import (
    BLOCK_NBYTES,
    BLOCK_TOKENS,
    BlockBytes,
    Replay,
    TraceKeys,
)
from kvkeep_server.sim.trace import Trace


class CountingClock:
    """Each reading is one second later."""

    def __init__(self):
        self._now_s = 0.0

    def monotonic_s(self):
        self._now_s += 1.0
        return self._now_s

    def wall_s(self):
        raise AssertionError("the demo needs no wall clock")


class DictNamespace:
    """Keeps at most `limit` blocks, never evicts, and forgets on request."""

    def __init__(self, limit=10_000):
        self.blocks = {}
        self.limit = limit
        self.parents = []

    def _leading(self, keys):
        split = [keys[at : at + 32] for at in range(0, len(keys), 32)]
        count = next((i for i, key in enumerate(split) if key not in self.blocks), len(split))
        return split, count

    def lookup(self, keys):
        return SimpleNamespace(blocks=self._leading(keys)[1])

    @contextmanager
    def acquire(self, keys):
        split, count = self._leading(keys)
        views = [memoryview(self.blocks[key]).toreadonly() for key in split[:count]]
        yield SimpleNamespace(blocks=count, views=lambda: views)

    @contextmanager
    def store(self, keys, *, parent_key=None):
        self.parents.append(parent_key)
        split, _ = self._leading(keys)
        new = [i for i, key in enumerate(split) if key not in self.blocks]
        buffers = [bytearray(BLOCK_NBYTES) for _ in new]

        def commit():
            room = self.limit - len(self.blocks)
            for i, buffer in list(zip(new, buffers, strict=True))[:room]:
                self.blocks[split[i]] = buffer
            stored = min(room, len(new))
            return SimpleNamespace(stored=stored, refused=len(new) - stored)

        yield SimpleNamespace(new=new, views=[memoryview(b) for b in buffers], commit=commit)


def small_trace():
    # 0-1-2, then 0-1-3 (two of three seen), then 0-1-2 again, then 4 alone.
    leaves = np.array([2, 3, 2, 4])
    zeros = np.zeros(4, dtype=np.int64)
    parents = np.array([-1, 0, 1, 1, -1])
    return Trace(parents, leaves, np.arange(4.0), zeros, zeros, zeros)


@pytest.fixture
def namespace():
    return DictNamespace()


@pytest.fixture
def replay(namespace):
    return Replay(
        namespace=namespace,
        trace=small_trace(),
        hasher=chain_hash.KvkeepBlake2b(BLOCK_TOKENS),
        content=BlockBytes(1),
        clock=CountingClock(),
    )


def run_all(replay):
    for request in small_trace().requests():
        replay.run(request)
    return replay.totals


def test_totals_of_a_trace_that_fits(replay, namespace):
    totals = run_all(replay)
    assert totals.requests == 4
    assert totals.blocks_asked == 4 * (3 + 3 + 3 + 1)
    assert totals.blocks_verified == 4 * (0 + 2 + 3 + 0) == totals.blocks_seen_before
    assert totals.blocks_wrong == 0
    assert totals.blocks_stored == 4 * 5 == len(namespace.blocks)
    assert totals.hit_ratio == totals.hit_ratio_unlimited == 0.5
    assert (totals.lookup_s, totals.read_s, totals.store_s) == (4.0, 4.0, 4.0)


def test_a_pool_that_is_full_costs_hits_not_correctness(replay, namespace):
    namespace.limit = 6
    totals = run_all(replay)
    assert totals.blocks_stored == 6
    assert totals.blocks_refused == 6 + 6 + 6 + 4
    assert totals.blocks_verified == 6 + 6
    assert totals.hit_ratio < totals.hit_ratio_unlimited


@pytest.mark.parametrize("at", [0, 1, 56_960, BLOCK_NBYTES - 1])
def test_a_wrong_byte_is_counted(replay, namespace, at):
    requests = list(small_trace().requests())
    replay.run(requests[0])
    key = list(namespace.blocks)[2]
    namespace.blocks[key][at] ^= 0x10
    replay.run(requests[2])
    assert replay.totals.blocks_wrong == 1
    assert replay.totals.blocks_verified == 11
    assert replay.totals.blocks_hit == 12


def test_swapped_blocks_are_both_wrong(replay, namespace):
    requests = list(small_trace().requests())
    replay.run(requests[0])
    first, second = list(namespace.blocks)[:2]
    blocks = namespace.blocks
    blocks[first], blocks[second] = blocks[second], blocks[first]
    replay.run(requests[2])
    assert replay.totals.blocks_wrong == 2


def test_long_requests_are_stored_in_pieces_with_their_parents(replay, namespace, monkeypatch):
    monkeypatch.setattr(demo_replay, "BLOCKS_PER_COMMIT", 5)
    replay.run(next(small_trace().requests()))
    keys = list(namespace.blocks)
    assert len(keys) == 12
    assert namespace.parents == [None, keys[4], keys[9]]


def test_block_bytes_depend_on_the_whole_key_the_place_and_the_seed():
    content, other_seed = BlockBytes(1), BlockBytes(2)
    block = memoryview(bytearray(BLOCK_NBYTES))
    key = bytes(range(32))
    content.fill(key, block)
    assert content.is_exact(key, block)
    assert not other_seed.is_exact(key, block)
    for at in range(32):
        changed = key[:at] + bytes((key[at] ^ 1,)) + key[at + 1 :]
        assert not content.is_exact(changed, block)
    assert not content.is_exact(key, block[:-8])
    words = np.frombuffer(block, dtype=np.uint64)
    assert len(np.unique(words)) == len(words), "a shifted block would not be seen"


def test_keys_of_a_trace_are_those_of_its_tokens():
    trace = small_trace()
    hasher = chain_hash.KvkeepBlake2b(BLOCK_TOKENS)
    keys = TraceKeys(hasher, trace.parents.tolist())
    tokens = [*range(512), *range(512, 1024), *range(3 * 512, 4 * 512)]
    assert keys.of([0, 1, 3]) == hasher.keys(tokens)
    assert keys.of([0, 1, 2])[: 8 * 32] == keys.of([0, 1, 3])[: 8 * 32]
    assert keys.of([4]) == hasher.keys(range(4 * 512, 5 * 512))
