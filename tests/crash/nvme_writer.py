"""A process that writes into an nvme tier until it is killed, and says what it was promised.

Lines on the standard output, each before or after the fact: `W i...` blocks are durable, `r i` is
about to be removed, `R i` is removed durably, `F i` is not wanted any more.
"""

import asyncio
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvkeep_server.tiers.base import WriteStatus
from tests.fakes.nvme_blocks import content, named, with_facts
from tests.fakes.nvme_tier import MIB, IndexOwner, nvme_tier, put, started

SIZES = (3000, 20_000, 70_000)
WANTED_MAX = 40
LIMITS = {"segment_nbytes": MIB, "max_nbytes": 6 * MIB, "open_max": 2}


def key_of(index):
    return index.to_bytes(8, "little") + content([3, index], 24)


def index_of(key):
    return int.from_bytes(key[:8], "little")


def nbytes_of(index):
    return SIZES[index // 1000 % len(SIZES)]


def say(kind, *indices):
    sys.stdout.write(" ".join([kind, *map(str, indices)]) + "\n")
    sys.stdout.flush()


def blocks_at(indices):
    contents = [content([7, i], nbytes_of(i)) for i in indices]
    blocks = named(b"".join(map(key_of, indices)), nbytes_of(indices[0]))
    retention_class = "pinned" if indices[0] // 1000 % 2 else "global"
    return with_facts(blocks, contents, retention_class=retention_class), contents


async def forget_oldest(owner, wanted):
    while len(wanted) > WANTED_MAX:
        index = wanted.pop(0)
        say("F", index)
        owner.forget(key_of(index))


async def remove(tier, owner, index):
    place = owner.forget(key_of(index))
    if place is None:
        return
    say("r", index)
    columns = [np.array([value], np.uint64) for value in place]
    await tier.remove(named(key_of(index), nbytes_of(index), *columns))
    say("R", index)


async def write(tier, owner, wanted, first, count):
    indices = list(range(first, first + count))
    blocks, contents = blocks_at(indices)
    status = await put(tier, owner, blocks, contents, durable=True)
    written = [
        index
        for index, answer in zip(indices, status.tolist(), strict=False)
        if answer == WriteStatus.WRITTEN
    ]
    if written:
        say("W", *written)
    wanted += written


async def main(path, first, seed):
    source = random.Random(seed)
    owner = IndexOwner()
    tier = nvme_tier([Path(path)], ThreadPoolExecutor(3), owner=owner, **LIMITS)
    await started(tier, owner)
    wanted = sorted(index_of(key) for key in owner.places)
    behind = asyncio.create_task(tier.run())
    say("S")
    for step in range(100_000):
        base = first + step * 30
        if base // 1000 != (base + 30) // 1000:
            continue
        # Two at once, so that they share a sync.
        await asyncio.gather(
            write(tier, owner, wanted, base, source.randint(1, 8)),
            write(tier, owner, wanted, base + 10, source.randint(1, 8)),
        )
        await forget_oldest(owner, wanted)
        if wanted and source.random() < 0.3:
            await remove(tier, owner, wanted.pop(source.randrange(len(wanted))))
        if behind.done():
            behind.result()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
