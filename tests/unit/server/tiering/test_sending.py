"""Bytes of leased blocks for clients that do not map the pool."""

import zlib

import pytest

from kvkeep_server.core.errors import InvalidArgumentError, NotFoundError
from kvkeep_server.core.results import BlockStatus
from kvkeep_server.tiering import sending as sending_module
from kvkeep_server.tiering.sending import CHUNK_NBYTES_MAX, Sending, SendOrder
from tests.fakes.core_harness import Harness, block_of, keys_of, salt_of, spec

NBYTES = 5000
COUNT = 12
CRC32 = 77


@pytest.fixture
def harness():
    with Harness() as harness:
        yield harness


@pytest.fixture
def leased(harness):
    """A harness whose session leases COUNT blocks; the lease, the keyspace, the keys."""
    session = harness.session()
    opened = harness.open(session, spec(block_nbytes=NBYTES))
    keys = keys_of("a", COUNT)
    harness.put(session, opened, keys)
    grant = harness.acquire(session, opened, keys)
    return grant, opened.namespace_set.keyspaces[0, 0], keys


def sent(harness, grant, keyspace, lives=lambda: None, **order):
    """All chunks of an order."""
    core = harness.core
    sending = Sending(residency=core.residency, ram=core.ram, removal=core.service.manager.removal)
    facts = {"first": 0, "blocks": 0, "offset": 0, "nbytes": 0, "crc32": CRC32, **order}
    wanted = SendOrder(grant.lease.lease_id, 0, 0, **facts)

    async def collect():
        return [chunk async for chunk in sending.chunks(grant.lease, keyspace, wanted, lives)]

    return harness.run(collect())


def payload(chunks, size=NBYTES):
    """The bytes of chunks that follow each other."""
    data, first = b"", chunks[0].block
    for chunk in chunks:
        assert chunk.status is BlockStatus.READY
        assert (chunk.block - first) * size + chunk.offset == len(data)
        assert zlib.crc32(chunk.data, CRC32) == chunk.crc32
        assert 0 < len(chunk.data) <= CHUNK_NBYTES_MAX
        data += chunk.data
    return data


def blocks(keys):
    return [block_of(key, NBYTES, salt_of(0, 0)) for key in keys]


@pytest.mark.parametrize("batch", [1, 3000, 5000, 12_345, 1 << 21])
def test_all_bytes_come_in_order_whatever_is_copied_at_once(harness, leased, batch, monkeypatch):
    monkeypatch.setattr(sending_module, "_BATCH_NBYTES", max(batch, 500))
    monkeypatch.setattr(sending_module, "CHUNK_NBYTES_MAX", max(batch // 2, 300))
    grant, keyspace, keys = leased
    assert payload(sent(harness, grant, keyspace)) == b"".join(blocks(keys))
    some = sent(harness, grant, keyspace, first=3, blocks=2)
    assert some[0].block == 3
    assert payload(some) == b"".join(blocks(keys[3:5]))


def test_a_range_of_each_block(harness, leased):
    grant, keyspace, keys = leased
    wanted = b"".join(block[100:164] for block in blocks(keys))
    assert payload(sent(harness, grant, keyspace, offset=100, nbytes=64), 64) == wanted
    wanted = b"".join(block[4990:] for block in blocks(keys))
    assert payload(sent(harness, grant, keyspace, offset=4990), 10) == wanted


@pytest.mark.parametrize(
    "order",
    [
        {"first": COUNT + 1},
        {"first": 1, "blocks": COUNT},
        {"offset": NBYTES},
        {"offset": 1, "nbytes": NBYTES},
    ],
)
def test_what_the_lease_has_not_is_refused(harness, leased, order):
    with pytest.raises(InvalidArgumentError):
        sent(harness, *leased[:2], **order)


@pytest.mark.parametrize("damaged", range(COUNT))
def test_a_damaged_block_ends_it_and_leaves(harness, leased, damaged, monkeypatch):
    """P25: exactly the blocks before it come, and its bytes never do."""
    monkeypatch.setattr(sending_module, "_BATCH_NBYTES", 12_000)
    grant, keyspace, keys = leased
    address = harness.core.residency.columns.address_of(grant.columns[0].ids)[damaged]
    harness.core.ram.view(int(address), NBYTES)[17] ^= 1
    chunks = sent(harness, grant, keyspace)
    assert (chunks[-1].block, chunks[-1].status) == (damaged, BlockStatus.CORRUPT)
    if damaged:
        assert payload(chunks[:-1]) == b"".join(blocks(keys[:damaged]))
    assert harness.core.service.manager.removal.counts.corrupt == COUNT - damaged
    harness.core.ram.view(int(address), NBYTES)[17] ^= 1


def test_a_lease_that_ends_meanwhile_ends_it(harness, leased, monkeypatch):
    monkeypatch.setattr(sending_module, "_BATCH_NBYTES", 10_000)
    copies = []

    def lives():
        copies.append(1)
        if len(copies) == 3:
            raise NotFoundError("over")

    with pytest.raises(NotFoundError):
        sent(harness, *leased[:2], lives=lives)
    assert len(copies) == 3
