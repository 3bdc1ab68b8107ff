"""What an eviction policy costs: us a block touched, us a victim named and removed, bytes a block.

    python tests/bench/policy_cost.py [--policy lru] [--blocks 1000000]

Two shapes: chains of 64 blocks, and single blocks, where every block is a leaf (WINDOW and STATE
groups; the worst case for order). The baseline is a dict in order of use, which knows no chains:
`OrderedDict.move_to_end` and `popitem`. Limits are those of `EvictionPolicy`.
"""

from __future__ import annotations

import argparse
import gc
import platform
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from time import thread_time

import numpy as np

from kvkeep_server.core.hints import Hints
from kvkeep_server.policies import BlockIds, BlockMask
from kvkeep_server.policies.eviction import EvictionPolicy
from kvkeep_server.policies.registry import eviction_policy

SEED = 20260101
EVICT_BATCH = 64
CALLS = 3000
HINTS = Hints()
LIMITS_US = {"touch": 3.0, "evict": 10.0}


def timed(call: Callable[[], object]) -> float:
    """Seconds of this thread's CPU: what others do on the machine does not count."""
    started = thread_time()
    call()
    return thread_time() - started


def show(
    name: str, calls_s: list[float], blocks_a_call: int, limit_us: float | None = None
) -> None:
    each_us = np.array(calls_s) * 1e6 / blocks_a_call
    limit = f"limit {limit_us:.0f}" if limit_us else ""
    print(
        f"  {name:<32} mean {each_us.mean():8.3f} us a block, median {np.median(each_us):8.3f},"
        f" p99 {np.percentile(each_us, 99):8.3f}"
        f"   longest call {max(calls_s) * 1e3:7.2f} ms   {limit}"
    )


def fill(policy: EvictionPolicy, chains: BlockIds) -> list[float]:
    """Inserts one chain a row."""
    parents = np.empty_like(chains)
    parents[:, 0] = -1
    parents[:, 1:] = chains[:, :-1]
    return [
        timed(lambda row=row: policy.insert(chains[row], parents[row], 0, HINTS, 0.0))
        for row in range(len(chains))
    ]


def measure(name: str, blocks: int, chain_blocks: int) -> None:
    source = np.random.default_rng(SEED)
    policy = eviction_policy(name)()
    chains = np.arange(blocks // chain_blocks * chain_blocks).reshape(-1, chain_blocks)
    print(f"chains of {chain_blocks}, {chains.size} blocks")
    gc.disable()
    show("insert, a chain a call", fill(policy, chains), chain_blocks)
    for batch in sorted({1, chain_blocks, 64, 1000}):
        rows = source.integers(0, len(chains), (CALLS, -(-batch // chain_blocks)))
        batches = [np.unique(chains[row].ravel()[:batch]) for row in rows]
        calls_s = [timed(lambda ids=ids: policy.touch(ids, HINTS, 0.0)) for ids in batches]
        limit = LIMITS_US["touch"] if batch > 1 else None
        show(f"touch, {batch} a call", calls_s, batch, limit)
    pins = [chains[row] for row in source.permutation(len(chains))[:CALLS]]
    show(
        "pin, a chain a call",
        [timed(lambda ids=ids: policy.pin(ids)) for ids in pins],
        chain_blocks,
    )
    show("unpin", [timed(lambda ids=ids: policy.unpin(ids)) for ids in pins], chain_blocks)
    resident = np.ones(chains.size, np.bool_)
    calls_s = evict(policy, resident, CALLS)
    show("evict, nothing touched between", calls_s, EVICT_BATCH, LIMITS_US["evict"])
    # Whatever was put in order is out of date.
    calls_s = []
    for _ in range(20):
        policy.touch(np.flatnonzero(resident), HINTS, 0.0)
        calls_s += evict(policy, resident, 1)
    show("evict, all touched between", calls_s, EVICT_BATCH)
    gc.enable()
    policy.check()


def evict(policy: EvictionPolicy, resident: BlockMask, calls: int) -> list[float]:
    """Names and removes a batch a call, and takes it out of `resident`."""

    def once() -> None:
        named = policy.victims(EVICT_BATCH, 0.0)
        policy.remove(named)
        resident[named] = False

    return [timed(once) for _ in range(calls)]


def measure_memory(name: str, blocks: int, chain_blocks: int) -> None:
    chains = np.arange(blocks // chain_blocks * chain_blocks).reshape(-1, chain_blocks)
    tracemalloc.start()
    policy = eviction_policy(name)()
    fill(policy, chains)
    policy.victims(EVICT_BATCH, 0.0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"  chains of {chain_blocks}: {held / chains.size:.1f} bytes a block")


def measure_baseline(blocks: int) -> None:
    print(f"baseline: OrderedDict, {blocks} blocks")
    order = OrderedDict.fromkeys(range(blocks))
    source = np.random.default_rng(SEED)
    batches = [source.integers(0, blocks, 64).tolist() for _ in range(CALLS)]

    def touch(batch: list[int]) -> None:
        for block in batch:
            order.move_to_end(block)

    def leave() -> None:
        for _ in range(EVICT_BATCH):
            order.popitem(last=False)

    show("touch, 64 a call", [timed(lambda batch=batch: touch(batch)) for batch in batches], 64)
    show("evict", [timed(leave) for _ in range(CALLS)], EVICT_BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--blocks", type=int, default=1 << 20)
    arguments = parser.parse_args()
    blocks = max(arguments.blocks, 2 * CALLS * EVICT_BATCH)
    print(
        f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__},"
        f" policy {arguments.policy}, seed {SEED}, evictions in batches of {EVICT_BATCH}"
    )
    for chain_blocks in (64, 1):
        measure(arguments.policy, blocks, chain_blocks)
    measure_baseline(blocks)
    print("memory, arrays at their full capacity")
    for chain_blocks in (64, 1):
        measure_memory(arguments.policy, blocks, chain_blocks)


if __name__ == "__main__":
    main()
