"""Blocks with bytes, checksums and facts, for tiers whose blocks outlive the process."""

import mmap

import numpy as np
import xxhash

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.tiers import record
from kvkeep_server.tiers.base import BlockFacts, Blocks

NAMESPACE_ID = bytes(range(16))


def content(seed, nbytes):
    return np.random.default_rng(seed).bytes(nbytes)


def checksums(blocks, contents):
    seed = record.checksum_seed(blocks.namespace_id, blocks.group, blocks.nbytes)
    packed, size = blocks.keys.pack(), blocks.keys.key_nbytes
    keys = [packed[i * size : (i + 1) * size] for i in range(len(blocks))]
    return np.array(
        [
            xxhash.xxh3_64_intdigest(data, record.key_seed(seed, key))
            for key, data in zip(keys, contents, strict=True)
        ],
        np.uint64,
    )


def facts_of(blocks, contents, *, has_parent=None, retention_class="global", used_ms=1000):
    count = len(blocks)
    return BlockFacts(
        parents=blocks.keys,
        has_parent=np.zeros(count, np.bool_) if has_parent is None else has_parent,
        checksums=checksums(blocks, contents),
        created_ms=np.full(count, used_ms, np.uint64),
        last_used_ms=np.full(count, used_ms, np.uint64),
        retention_class=retention_class,
        boundary_id=bytes(16),
        boundary_members=1,
        boundary_member=0,
    )


def named(keys, nbytes, locations=None, stamps=None, facts=None):
    """Blocks of packed keys of 32 bytes, or of a KeyBatch."""
    batch = KeyBatch.unpack(keys, 32) if isinstance(keys, bytes) else keys
    zeros = np.zeros(len(batch), np.uint64)
    return Blocks(
        namespace_id=NAMESPACE_ID,
        group=0,
        keys=batch,
        nbytes=nbytes,
        locations=zeros if locations is None else locations,
        stamps=zeros if stamps is None else stamps,
        facts=facts,
    )


def with_facts(blocks, contents, **options):
    return named(
        blocks.keys,
        blocks.nbytes,
        blocks.locations,
        blocks.stamps,
        facts_of(blocks, contents, **options),
    )


def blocks_of(count, *, nbytes=5000, key_nbytes=32, seed=0, **options):
    """Blocks with facts, not stored yet, and their contents."""
    contents = [content([seed, i], nbytes) for i in range(count)]
    keys = KeyBatch.unpack(content([seed, 1 << 30], count * key_nbytes), key_nbytes)
    return with_facts(named(keys, nbytes), contents, **options), contents


def slots(count, nbytes, *, shift=0):
    """Writable buffers as slots of the pool are: page-aligned, unless shifted."""
    stride = -(-nbytes // 4096) * 4096
    region = memoryview(mmap.mmap(-1, count * stride + 4096))
    return [region[shift + i * stride :][:nbytes] for i in range(count)]
