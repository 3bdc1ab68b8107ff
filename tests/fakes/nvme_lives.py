"""Lives of an nvme tier, one after the other: one writes, the next reads back."""

import asyncio

from kvkeep_server.tiers.base import ReadStatus
from kvkeep_server.tiers.nvme.tier import NvmeTier
from tests.fakes.nvme_blocks import blocks_of
from tests.fakes.nvme_tier import get, put, started

NBYTES = 10_000


def write(made, *, count=20, seed=1, close=True, durable=True, **facts):
    """One life that stores some blocks; (their keys, their contents)."""
    tier, owner = made
    blocks, contents = blocks_of(count, nbytes=NBYTES, seed=seed, **facts)

    async def run():
        await started(tier, owner)
        await put(tier, owner, blocks, contents, durable=durable)
        await (tier.close() if close else crash(tier))

    asyncio.run(run())
    packed = blocks.keys.pack()
    return [packed[i : i + 32] for i in range(0, len(packed), 32)], contents


async def crash(tier: NvmeTier):
    for log, lock in zip(tier._logs, tier._locks, strict=True):
        log.directory.table.close_all()
        lock.release()


def read_back(made, keys):
    """The next life: status and bytes of each key, and the stats before it closed."""
    tier, owner = made

    async def run():
        await started(tier, owner)
        got = await get(tier, owner, keys, NBYTES)
        tier.check()
        stats = tier.stats()
        await tier.close()
        return [got[key] for key in keys], stats

    return asyncio.run(run())


def hits(contents):
    return [(ReadStatus.HIT, data) for data in contents]
