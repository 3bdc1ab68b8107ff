"""An nvme tier in a directory of a test, and an owner of its records: an index in a dict."""

import asyncio
import os
import tempfile
from collections import Counter
from dataclasses import replace

import numpy as np

from kvkeep_server.core.clock import SystemClock
from kvkeep_server.tiers import record
from kvkeep_server.tiers.base import ReadStatus, WriteStatus
from kvkeep_server.tiers.nvme.files import DiskFiles
from kvkeep_server.tiers.nvme.segments import DirectorySettings
from kvkeep_server.tiers.nvme.tier import NvmeSettings, NvmeTier
from tests.fakes.nvme_blocks import blocks_of, named, slots

MIB = 1 << 20
NBYTES = 58_368


class IndexOwner:
    """What tiering will be: knows where the newest record of each key lies.

    `keep` decides which of the current records are wanted; all by default.
    """

    def __init__(self):
        self.places = {}  # key -> (location, stamp)
        self.newest = {}  # key -> highest record_seq seen, tombstones included
        self.moves = {}  # old location -> (location, stamp)
        self.dropped_places = []
        self.dropped_for = Counter()
        self.segments_lost = []
        self.keep = lambda _key: True

    def learn(self, rows):
        """Rows of recovery: the highest record_seq of a key wins."""
        columns = zip(
            record.keys_of(rows),
            rows["record_seq"].tolist(),
            rows["location"].tolist(),
            record.is_tombstone(rows).tolist(),
            strict=True,
        )
        for key, seq, location, removed in columns:
            if seq > self.newest.get(key, 0):
                self.newest[key] = seq
                if removed:
                    self.places.pop(key, None)
                else:
                    self.places[key] = (location, seq)

    def store(self, key, location, stamp):
        self.places[key] = (int(location), int(stamp))
        self.newest[key] = int(stamp)

    def forget(self, key):
        return self.places.pop(key, None)

    def wanted(self, rows):
        assert not record.is_tombstone(rows).any()
        columns = zip(record.keys_of(rows), rows["location"].tolist(), strict=True)
        return np.array(
            [
                self.places.get(key, (0, 0))[0] == location and self.keep(key)
                for key, location in columns
            ],
            np.bool_,
        )

    def moved(self, rows, locations, stamps):
        new = zip(locations.tolist(), stamps.tolist(), strict=True)
        olds = zip(record.keys_of(rows), rows["location"].tolist(), new, strict=True)
        for key, old, place in olds:
            self.moves[old] = place
            if self.places.get(key, (0, 0))[0] == old:
                self.places[key] = place

    def dropped(self, locations, stamps, reason):
        gone = set(zip(locations.tolist(), stamps.tolist(), strict=True))
        self.dropped_places += gone
        self.dropped_for[reason] += len(gone)
        self.places = {key: place for key, place in self.places.items() if place not in gone}

    def segment_lost(self, number):
        self.segments_lost.append(number)
        kept = {key: place for key, place in self.places.items() if place[0] >> 32 != number}
        self.places = kept


def directory_settings(path, **changes):
    base = DirectorySettings(
        path=str(path),
        max_nbytes=4 * MIB,
        segment_nbytes=MIB,
        free_min_nbytes=0,
        open_max=8,
    )
    return replace(base, **changes)


def nvme_tier(
    paths, executor, *, owner=None, files=None, clock=None, settings=None, **directory_changes
):
    """A tier over these directories; not started."""
    limits = NvmeSettings(
        directories=tuple(directory_settings(path, **directory_changes) for path in paths),
        reading_max_nbytes=64 * MIB,
        writing_max_nbytes=64 * MIB,
        sync_interval_s=0.01,
        probe_interval_s=0.05,
        server_epoch=1,
    )
    return NvmeTier(
        settings=replace(limits, **(settings or {})),
        files=files or DiskFiles(),
        clock=clock or SystemClock(),
        read_threads=3,
        writers=executor,
        owner=owner if owner is not None else IndexOwner(),
    )


async def started(tier, owner):
    """Starts and recovers into the owner."""
    await tier.start()
    async for rows in tier.recover():
        owner.learn(rows)
    return tier


async def put(tier, owner, blocks, contents, *, durable=True, sources=None):
    """Reserves, writes and commits what was written; the status of each block that found room."""
    with tier.reserve(blocks.nbytes, len(blocks)) as batch:
        count = len(batch.locations)
        some = cut(blocks, count)
        views = sources or [memoryview(data) for data in contents]
        status = await batch.write(some, views[:count], durable=durable)
        written = status == WriteStatus.WRITTEN
        stamps = batch.commit(written)
    places = batch.locations[written]
    keys = record.keys_of(record.rows_of(some))
    for key, location, stamp in zip(np.array(keys, object)[written], places, stamps, strict=True):
        owner.store(key, location, stamp)
    return status


async def get(tier, owner, keys, nbytes):
    """Status and bytes of each key (32 bytes each) that the owner knows; None = it does not."""
    known = [key for key in keys if key in owner.places]
    places = np.array([owner.places[key] for key in known], np.uint64).reshape(-1, 2)
    blocks = named(b"".join(known), nbytes, places[:, 0].copy(), places[:, 1].copy())
    buffers = slots(len(known), nbytes)
    status = await tier.read(blocks, buffers)
    got = {
        key: (int(answer), bytes(buffer))
        for key, answer, buffer in zip(known, status, buffers, strict=True)
    }
    return {key: got.get(key) for key in keys}


def cut(blocks, count):
    """The first blocks of a batch."""
    facts = blocks.facts
    if facts is not None:
        facts = replace(
            facts,
            parents=facts.parents.slice(0, count),
            has_parent=facts.has_parent[:count],
            checksums=facts.checksums[:count],
            created_ms=facts.created_ms[:count],
            last_used_ms=facts.last_used_ms[:count],
        )
    return replace(
        blocks,
        keys=blocks.keys.slice(0, count),
        locations=blocks.locations[:count],
        stamps=blocks.stamps[:count],
        facts=facts,
    )


async def settle(tier):
    """Seals and reclaims every segment, and again what tombstones kept alive, until only what is
    wanted is there, in active segments."""
    for _ in range(3):
        await tier.seal()
        for _ in range(sum(tier.stats().directories[0].segments.values())):
            await tier.reclaim_oldest()


def keys_of(blocks):
    packed = blocks.keys.pack()
    return [packed[i : i + 32] for i in range(0, len(packed), 32)]


async def store(tier, owner, count, seed, *, nbytes=NBYTES, durable=True, **facts):
    """Keys and contents of what was written."""
    blocks, contents = blocks_of(count, nbytes=nbytes, seed=seed, **facts)
    status = await put(tier, owner, blocks, contents, durable=durable)
    kept = [i for i, answer in enumerate(status) if answer == WriteStatus.WRITTEN]
    keys = keys_of(blocks)
    return {keys[i]: contents[i] for i in kept}


async def all_hits(tier, owner, stored, nbytes=NBYTES):
    got = await get(tier, owner, list(stored), nbytes)
    return all(got[key] == (ReadStatus.HIT, data) for key, data in stored.items())


def disk_nbytes(path):
    """Size of all segments in the directories below."""
    return sum(file.stat().st_size for file in path.glob("*/*.kvks"))


async def until(holds):
    """Looks again and again; the caller bounds the time."""
    for _ in range(20_000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("never came true")


async def stop(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def fast_directory():
    """A directory where a sync costs nothing, for tests of what the tier does and not of a disk."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    return tempfile.TemporaryDirectory(prefix="nvme-tier-of-a-test-", dir=memory)
