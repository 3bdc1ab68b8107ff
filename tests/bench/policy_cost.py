"""What an eviction policy costs: us a block touched, us a victim named and removed, bytes a block.

    python tests/bench/policy_cost.py [--policy lru] [--blocks 1048576]

Two shapes: chains of 64 blocks, and single blocks, where every block is a leaf (WINDOW and STATE
groups; the worst case for order). The baseline is a dict in order of use, which knows no chains:
`OrderedDict.move_to_end` and `popitem`. Exits with 1 if a limit of `EvictionPolicy` is exceeded.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from time import thread_time

import numpy as np

from kvkeep_server.core.hints import Hints
from kvkeep_server.policies import BlockIds, BlockMask
from kvkeep_server.policies.eviction import EvictionPolicy
from kvkeep_server.policies.registry import eviction_policy

SEED = 20260101
BATCH = 64
CALLS = 3000
HINTS = Hints()


def timed(calls: Iterable[Callable[[], object]]) -> list[float]:
    """Seconds a call, of this thread's CPU: what others do on the machine does not count."""
    seconds = []
    for call in calls:
        started = thread_time()
        call()
        seconds.append(thread_time() - started)
    return seconds


class Report:
    """Prints a line a measurement, and remembers whether a limit was exceeded."""

    def __init__(self) -> None:
        self.exceeded = False

    def show(
        self,
        name: str,
        calls_s: Sequence[float],
        blocks_a_call: int = BATCH,
        *,
        limit_us: float | None = None,
        baseline_us: float | None = None,
    ) -> float:
        each_us = np.array(calls_s) * 1e6 / blocks_a_call
        mean_us = float(each_us.mean())
        line = (
            f"  {name:<32} mean {mean_us:7.3f} us a block, p99 {np.percentile(each_us, 99):7.3f},"
            f" longest call {max(calls_s) * 1e3:6.2f} ms"
        )
        if baseline_us is not None:
            line += f", {mean_us / baseline_us:.2f} x baseline"
        if limit_us is not None:
            exceeded = mean_us > limit_us
            self.exceeded |= exceeded
            line += f", {'OVER' if exceeded else 'within'} the limit of {limit_us:g} us"
        print(line)
        return mean_us


def fill(policy: EvictionPolicy, ids: BlockIds, chain_blocks: int) -> list[float]:
    """Inserts the ids, one row a call, as chains of `chain_blocks`."""
    parents = np.where(ids % chain_blocks == 0, -1, ids - 1)
    return timed(
        lambda row=row: policy.insert(ids[row], parents[row], 0, HINTS, 0.0)
        for row in range(len(ids))
    )


def evict(policy: EvictionPolicy, resident: BlockMask, calls: int) -> list[float]:
    """Names and removes a batch a call, and takes it out of `resident`."""

    def once() -> None:
        named = policy.victims(BATCH, 0.0)
        policy.remove(named)
        resident[named] = False

    return timed(once for _ in range(calls))


def measure(
    report: Report, name: str, blocks: int, chain_blocks: int, baseline_us: tuple[float, float]
) -> None:
    source = np.random.default_rng(SEED)
    policy = eviction_policy(name)()
    ids = np.arange(blocks).reshape(-1, BATCH)
    print(f"policy {name}, {blocks} blocks, chains of {chain_blocks}")
    report.show("insert, 64 a call", fill(policy, ids, chain_blocks))
    some = ids[source.integers(0, len(ids), CALLS)]
    report.show("touch, 1 a call", timed(touches(policy, some[:, :1])), 1)
    report.show(
        "touch, 64 a call",
        timed(touches(policy, some)),
        limit_us=3.0,
        baseline_us=baseline_us[0],
    )
    some = ids[source.permutation(len(ids))[:CALLS]]
    report.show("pin, 64 a call", timed(lambda row=row: policy.pin(row) for row in some))
    report.show("unpin, 64 a call", timed(lambda row=row: policy.unpin(row) for row in some))
    resident = np.ones(blocks, np.bool_)
    calls_s = evict(policy, resident, CALLS)
    report.show("evict, 64 a call", calls_s, limit_us=10.0, baseline_us=baseline_us[1])
    # Whatever order was made is out of date in each call: not a rate that lasts, but a pause.
    calls_s = []
    for _ in range(20):
        policy.touch(np.flatnonzero(resident), HINTS, 0.0)
        calls_s += evict(policy, resident, 1)
    report.show("evict, all touched before", calls_s)
    policy.check()


def touches(policy: EvictionPolicy, rows: BlockIds) -> Iterable[Callable[[], object]]:
    return (lambda row=row: policy.touch(row, HINTS, 0.0) for row in rows)


def measure_baseline(report: Report, blocks: int) -> tuple[float, float]:
    print(f"baseline OrderedDict, {blocks} blocks")
    order = OrderedDict.fromkeys(range(blocks))
    source = np.random.default_rng(SEED)
    rows = [source.integers(0, blocks, BATCH).tolist() for _ in range(CALLS)]

    def touch(row: list[int]) -> None:
        for block in row:
            order.move_to_end(block)

    def leave() -> None:
        for _ in range(BATCH):
            order.popitem(last=False)

    touch_us = report.show("touch, 64 a call", timed(lambda row=row: touch(row) for row in rows))
    return touch_us, report.show("evict, 64 a call", timed(leave for _ in range(CALLS)))


def measure_memory(name: str, blocks: int, chain_blocks: int) -> None:
    ids = np.arange(blocks).reshape(-1, BATCH)
    tracemalloc.start()
    policy = eviction_policy(name)()
    fill(policy, ids, chain_blocks)
    policy.victims(BATCH, 0.0)
    held_nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"  chains of {chain_blocks:<4} {held_nbytes / blocks:5.1f} bytes a block")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--blocks", type=int, default=1 << 20)
    arguments = parser.parse_args()
    blocks = max(arguments.blocks // BATCH, 2 * CALLS) * BATCH
    print(
        f"{platform.system()} {platform.release()}, {platform.machine()},"
        f" Python {platform.python_version()}, numpy {np.__version__}, seed {SEED}"
    )
    report = Report()
    baseline_us = measure_baseline(report, blocks)
    for chain_blocks in (BATCH, 1):
        measure(report, arguments.policy, blocks, chain_blocks, baseline_us)
    print("memory, with arrays that are full")
    for chain_blocks in (BATCH, 1):
        measure_memory(arguments.policy, 1 << 18, chain_blocks)
    return int(report.exceeded)


if __name__ == "__main__":
    sys.exit(main())
