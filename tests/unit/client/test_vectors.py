"""The client against proto/kvkeep/v1/shared_memory_vectors.json, which no product code made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvkeep import call_socket
from kvkeep.shared_index import IndexTable, Words
from kvkeep.shared_memory import Chunk, RegionError, TouchRing
from kvkeep.spec import Hints, StopReason
from kvkeep_server.rpc import call_sockets
from tests.vectors.make_vectors import render

FILE = Path(__file__).parents[3] / "proto/kvkeep/v1/shared_memory_vectors.json"
VECTORS = json.loads(FILE.read_text())
CASES = [
    pytest.param(vectors, case, id=f"set{i}-{case['namespace_id'][:4]}-{len(case['key']) // 2}")
    for i, vectors in enumerate(VECTORS["fingerprints"])
    for case in vectors["cases"]
]


def table_of(*, a: list[int], b: list[int], buckets: int) -> IndexTable:
    """An empty table with these multipliers."""
    columns = [4096 + 4096 * i for i in range(5)]
    region = bytearray(4096 * 6)
    header = [1, 42, 1, buckets, 8 * buckets, len(region), *columns]
    region[:8] = b"KVKINDX1"
    region[8:12] = (2).to_bytes(4, "little")
    region[12:16] = header[0].to_bytes(4, "little")
    region[16:96] = np.array(header[1:], dtype=np.uint64).tobytes()
    region[128:384] = np.array(a + b, dtype=np.uint64).tobytes()
    return IndexTable(memoryview(region), table_id=1, server_epoch=42)


def test_the_file_is_what_the_generator_writes():
    assert FILE.read_text() == render()


@pytest.mark.parametrize("vector", VECTORS["call_frames"], ids=lambda vector: vector["what"])
@pytest.mark.parametrize(
    "header", [call_socket._HEADER, call_sockets.HEADER], ids=["client", "daemon"]
)
def test_call_frame(vector, header):
    payload = bytes.fromhex(vector["payload"])
    number, retry = vector["method_or_status"], vector["retry_after_ms"]
    frame = header.pack(len(payload), number, 0, retry, vector["call_id"]) + payload
    assert frame.hex() == vector["frame"]


@pytest.mark.parametrize(("vectors", "case"), CASES)
def test_fingerprint(vectors, case):
    a, b = ([int(x, 16) for x in vectors[name]] for name in "ab")
    table = table_of(a=a, b=b, buckets=1)
    key = bytes.fromhex(case["key"])
    seed = table.seed(bytes.fromhex(case["namespace_id"]), case["group"], len(key))
    scratch = table._borrow()
    # Among others, so that a mistake in the padding of one shows in its neighbour.
    words = Words(key[::-1] + key + bytes(len(key)), len(key)).piece(0, 3)
    scratch.cut(3)
    table._fingerprint(seed, words, scratch)
    assert int(scratch.tag[1]) == int(case["tag"], 16)
    assert int(scratch.check[1]) == int(case["check"], 16)


@pytest.mark.parametrize(("vectors", "case"), CASES[::7])
def test_home_bucket(vectors, case):
    a, b = ([int(x, 16) for x in vectors[name]] for name in "ab")
    table = table_of(a=a, b=b, buckets=1)
    key = bytes.fromhex(case["key"])
    seed = table.seed(bytes.fromhex(case["namespace_id"]), case["group"], len(key))
    for buckets, home in case["home_buckets"].items():
        table._buckets_constant = np.array(int(buckets), dtype=np.uint64)
        table._buckets_of_tags = AnyBucket(int(buckets))
        scratch = table._borrow()
        table._probe_home(seed, Words(key, len(key)).piece(0, 1), scratch)
        assert int(scratch.home[0]) == home


class AnyBucket:
    """Tags of a table too large for a test: every bucket is empty."""

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets

    def __getitem__(self, index):
        assert (index >= 0).all()
        assert (index < self._buckets).all()
        return np.zeros(len(index), dtype="V64")


def index_region() -> bytearray:
    vector = VECTORS["index_table"]
    region = bytearray(vector["fields"]["nbytes"])
    header = bytes.fromhex(vector["header"])
    region[: len(header)] = header
    offsets = vector["fields"]["offsets"]
    for offset, column in zip(offsets, vector["columns"].values(), strict=True):
        data = bytes.fromhex(column)
        region[offset : offset + len(data)] = data
    return region


def test_index_table():
    vector = VECTORS["index_table"]
    table = IndexTable(memoryview(index_region()), table_id=3, server_epoch=42)
    for entry in vector["entries"]:
        key = bytes.fromhex(entry["key"])
        seed = table.seed(bytes.fromhex(vector["namespace_id"]), vector["group"], len(key))
        found = table.find(seed, Words(key, len(key)), 1)
        rows = table.find_rows(seed, Words(key, len(key)), 1, lambda addresses: addresses * 2)
        on_nvme = table.find_on_nvme(seed, Words(key, len(key)), 1)
        assert found.blocks == int(entry["found"])
        assert rows.found == found
        if entry["found"]:
            assert (found.last_row, found.last_version) == (entry["row"], entry["version"])
            ((address, generation),) = rows.places
            assert address.tolist() == [int(entry["address"], 16)]
            assert generation.tolist() == [2 * int(entry["address"], 16)]
        assert on_nvme == entry["on_nvme"]


def test_chunk_header():
    vector = VECTORS["chunk_header"]
    fields = vector["fields"]
    # A chunk of a GiB is not made for a header: the size that it names is patched.
    region = bytearray(fields["data_offset"] + 4096)
    encoded = bytes.fromhex(vector["encoded"])
    region[: len(encoded)] = encoded
    epoch = int(fields["server_epoch"], 16)
    with pytest.raises(RegionError, match="another chunk"):
        Chunk(memoryview(region), chunk_id=fields["chunk_id"], server_epoch=epoch)
    assert int.from_bytes(region[24:32], "little") == fields["nbytes"]
    region[24:32] = len(region).to_bytes(8, "little")
    chunk = Chunk(memoryview(region), chunk_id=fields["chunk_id"], server_epoch=epoch)
    assert chunk.data_offset == fields["data_offset"]


def test_touch_record():
    vector = VECTORS["touch_ring"]
    fields = vector["fields"]
    region = bytearray(4096 + 64 * vector["records"])
    header = bytes.fromhex(vector["header"])
    region[: len(header)] = header
    region[64:72] = fields["number"].to_bytes(8, "little")  # so many were written before
    hints = Hints(
        stop_reason=StopReason(fields["stop_reason"]),
        output_tokens=fields["output_tokens"],
        sub_agent=bool(fields["sub_agent"]),
        session_id=bytes.fromhex(fields["session"]) + b"further bytes",
        engine_hit_tokens=fields["engine_hit_tokens"],
    )
    TouchRing(memoryview(region)).append(
        *(fields["set_index"], fields["group"], fields["blocks_asked"], fields["blocks_found"]),
        *(fields["row"], fields["version"]),
        *hints.touch_fields(blocks_read=bool(fields["blocks_read"])),
    )
    at = vector["record_offset"]
    assert region[at : at + 64].hex() == vector["record"]
    assert region[: len(header)].hex() == vector["header"]


@pytest.mark.parametrize("vector", VECTORS["addresses"], ids=lambda v: v["address"])
def test_address(vector):
    address = int(vector["address"], 16)
    assert (address & 0xFFFFFFFF, address >> 32) == (vector["page"], vector["chunk"])
