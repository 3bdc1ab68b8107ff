"""Bytes of a stream find their places in staging, whatever the chunks; all others are refused."""

import asyncio
import itertools
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_server.core.errors import InvalidArgumentError, TierUnavailableError
from kvkeep_server.service import writing as writing_module
from kvkeep_server.service.writing import CHUNK_NBYTES_MAX, Writing

STAGING_NBYTES = 1 << 16
CRC32 = 77


def batch_of(*groups):
    """A commit's groups as (block_nbytes, offsets), and its staging."""
    return SimpleNamespace(
        groups=[
            SimpleNamespace(
                keyspace=SimpleNamespace(block_nbytes=nbytes), offsets=np.array(offsets, np.int64)
            )
            for nbytes, offsets in groups
        ],
        staging=memoryview(bytearray(STAGING_NBYTES)),
    )


async def at_once(work):
    work()


def send(writing, chunks):
    async def run():
        at = 0
        for data in chunks:
            await writing.take(at, data, zlib.crc32(data, CRC32))
            at += len(data)
        await writing.finish()

    asyncio.run(run())


@given(st.data())
def test_the_bytes_lie_where_the_commit_says(data):
    places = data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=20, unique=True))
    split = data.draw(st.integers(0, len(places)))
    groups = [(1000, [at * 1024 for at in places[:split]])]
    groups += [(700, [at * 1024 for at in places[split:]])]
    batch = batch_of(*groups)
    writing = Writing(batch, at_once, CRC32)
    payload = np.random.default_rng(1).bytes(writing.nbytes)
    assert writing.nbytes == 1000 * split + 700 * (len(places) - split)
    edges = sorted(data.draw(st.sets(st.integers(1, max(1, len(payload) - 1)), max_size=30)))
    edges = [0, *(edge for edge in edges if edge < len(payload)), len(payload)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing_module, "_BATCH_NBYTES", data.draw(st.integers(1, 9000)))
        send(writing, [payload[a:b] for a, b in itertools.pairwise(edges)])
    at = 0
    for nbytes, offsets in groups:
        for offset in offsets:
            assert batch.staging[offset : offset + nbytes] == payload[at : at + nbytes]
            at += nbytes


@pytest.mark.parametrize(
    ("chunks", "field"),
    [
        ([(0, b"a" * 500)], "data"),
        ([(0, b"a" * 1000), (1000, b"a" * 1000), (2000, b"a")], "data"),
        ([(0, b"a" * 1000), (0, b"a" * 1000)], "offset"),
        ([(1000, b"a" * 1000)], "offset"),
        ([(0, b"")], "data"),
        ([(0, b"a" * (CHUNK_NBYTES_MAX + 1))], "data"),
    ],
    ids=["too little", "too much", "twice", "out of order", "empty", "too large"],
)
def test_a_stream_that_is_not_the_blocks_is_refused(chunks, field):
    writing = Writing(batch_of((1000, [0, 4096])), at_once, CRC32)

    async def run():
        for offset, data in chunks:
            await writing.take(offset, data, zlib.crc32(data, CRC32))
        await writing.finish()

    with pytest.raises(InvalidArgumentError) as refused:
        asyncio.run(run())
    assert refused.value.field == field


def test_damaged_bytes_are_refused():
    writing = Writing(batch_of((1000, [0, 4096])), at_once, CRC32)

    async def run():
        await writing.take(0, b"a" * 1000, zlib.crc32(b"a" * 1000, CRC32))
        await writing.take(1000, b"b" * 1000, zlib.crc32(b"a" * 1000, CRC32))
        await writing.finish()

    with pytest.raises(TierUnavailableError, match="from 1000 on"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("ours", "theirs", "meet"),
    [
        ([], [0], False),
        ([0], [], False),
        ([0], [0], True),
        ([0], [10], False),
        ([0], [9], True),
        ([10], [0], False),
        ([9], [0], True),
        ([40, 0], [20, 30, 10], False),
        ([40, 0], [20, 49, 10], True),
        ([25, 40, 0], [60, 34], True),
    ],
)
def test_places_that_meet(ours, theirs, meet):
    first, second = (Writing(batch_of((10, places)), at_once, CRC32) for places in (ours, theirs))
    assert first.meets(second) is second.meets(first) is meet
