"""The index layout against the vectors that both sides are held to."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_server.core.keys import KeyBatch
from kvkeep_server.index import layout
from kvkeep_server.index.layout import Geometry, Multipliers, encode_header, home_buckets

VECTORS = json.loads(
    (Path(__file__).parents[4] / "proto/kvkeep/v1/shared_memory_vectors.json").read_text()
)
SETS = VECTORS["fingerprints"]


def number(text: str) -> int:
    return int(text, 16)


def multipliers(vectors) -> Multipliers:
    return Multipliers(tuple(map(number, vectors["a"])), tuple(map(number, vectors["b"])))


def fingerprint(m: Multipliers, namespace_id: bytes, group: int, key: bytes) -> tuple[int, int]:
    words = KeyBatch.unpack(key, len(key)).words
    h, s = m.start(namespace_id, group, len(key))
    tags, checks = m.fingerprints(words, np.uint64(h), np.uint64(s))
    return int(tags[0]), int(checks[0])


@pytest.mark.parametrize("vectors", SETS, ids=["first", "second"])
def test_fingerprints_and_home_buckets_are_those_of_the_vectors(vectors):
    m = multipliers(vectors)
    for case in vectors["cases"]:
        namespace_id, key = bytes.fromhex(case["namespace_id"]), bytes.fromhex(case["key"])
        tag, check = fingerprint(m, namespace_id, case["group"], key)
        assert (tag, check) == (number(case["tag"]), number(case["check"]))
        for buckets, home in case["home_buckets"].items():
            assert home_buckets(np.array([tag], np.uint64), int(buckets))[0] == home


@pytest.mark.parametrize("vectors", SETS, ids=["first", "second"])
def test_a_batch_gives_what_each_key_gives_alone(vectors):
    m = multipliers(vectors)
    by_length: dict[int, list] = {}
    for case in vectors["cases"]:
        by_length.setdefault(len(case["key"]) // 2, []).append(case)
    for nbytes, cases in by_length.items():
        keys = KeyBatch.unpack(b"".join(bytes.fromhex(case["key"]) for case in cases), nbytes)
        starts = [
            m.start(bytes.fromhex(case["namespace_id"]), case["group"], nbytes) for case in cases
        ]
        h, s = (np.array(column, np.uint64) for column in zip(*starts, strict=True))
        tags, checks = m.fingerprints(keys.words, h, s)
        assert tags.tolist() == [number(case["tag"]) for case in cases]
        assert checks.tolist() == [number(case["check"]) for case in cases]


def test_header_is_that_of_the_vectors():
    vectors = VECTORS["index_table"]
    fields = vectors["fields"]
    header = bytes.fromhex(vectors["header"])
    m = Multipliers(*(tuple(_u64s(header[at : at + 128])) for at in (128, 256)))
    geometry = Geometry.for_rows(fields["rows"])
    assert (geometry.buckets, geometry.nbytes) == (fields["buckets"], fields["nbytes"])
    assert list(geometry.offsets) == fields["offsets"]
    encoded = encode_header(
        geometry=geometry,
        multipliers=m,
        server_epoch=number(fields["server_epoch"]),
        table_id=fields["table_id"],
        state=fields["state"],
    )
    assert encoded == header


def _u64s(raw: bytes) -> list[int]:
    return [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]


def test_entries_of_the_vectors_have_the_fingerprints_of_their_rows():
    vectors = VECTORS["index_table"]
    header = bytes.fromhex(vectors["header"])
    m = Multipliers(*(tuple(_u64s(header[at : at + 128])) for at in (128, 256)))
    tags = _u64s(bytes.fromhex(vectors["columns"]["tag"]))
    checks = _u64s(bytes.fromhex(vectors["columns"]["check"]))
    for entry in vectors["entries"]:
        namespace_id = bytes.fromhex(vectors["namespace_id"])
        key = bytes.fromhex(entry["key"])
        tag, check = fingerprint(m, namespace_id, vectors["group"], key)
        if entry["found"]:
            assert (tags[entry["row"]], checks[entry["row"]]) == (tag, check)
        else:
            assert (tag, check) not in set(zip(tags, checks, strict=True))


@given(rows=st.integers(1, 1 << 40))
def test_geometry_has_room_for_every_column(rows):
    geometry = Geometry.for_rows(rows)
    assert rows <= geometry.rows < rows + 2 * layout.BUCKET_ROWS
    assert geometry.buckets % 2 == 1
    ends = [
        offset + geometry.rows // rows_each * np.dtype(kind).itemsize
        for offset, (_, kind, rows_each) in zip(geometry.offsets, layout.COLUMNS, strict=True)
    ]
    assert geometry.offsets[0] >= 384  # behind the header
    assert all(offset % layout.PAGE_NBYTES == 0 for offset in geometry.offsets)
    nexts = [*geometry.offsets[1:], geometry.nbytes]
    assert all(end <= following for end, following in zip(ends, nexts, strict=True))


@given(tag=st.integers(2, (1 << 64) - 1), buckets=st.integers(1, 1 << 31))
def test_home_bucket_is_a_bucket(tag, buckets):
    assert 0 <= home_buckets(np.array([tag], np.uint64), buckets)[0] < buckets


def test_a_seed_is_odd_and_differs_from_the_next_one():
    source = random.Random(1)
    first, second = Multipliers.draw(source), Multipliers.draw(source)
    assert all(x & 1 for m in (first, second) for x in (*m.a, *m.b))
    assert first != second


def test_the_lowest_tag_is_reserved_for_empty_rows():
    zero = Multipliers((0,) * 16, (0,) * 16)
    assert fingerprint(zero, bytes(16), 0, bytes(16))[0] == layout.TAG_FIRST


@given(
    one=st.tuples(st.binary(min_size=16, max_size=16), st.integers(0, 15), st.binary(min_size=16)),
    seed=st.integers(),
)
def test_every_part_of_a_name_changes_the_fingerprint(one, seed):
    """128 bits: an equal pair would be a broken mix, not bad luck."""
    namespace_id, group, key = one
    key = key[:64]
    m = Multipliers.draw(random.Random(seed))
    flipped = bytes([namespace_id[0] ^ 1]) + namespace_id[1:]
    names = [(namespace_id, group, key), (flipped, group, key), (namespace_id, group + 1, key)]
    names.append((namespace_id, group, key[:-1] + bytes([key[-1] ^ 128])))
    if len(key) < 64:
        names.append((namespace_id, group, key + b"\0"))  # only the length tells them apart
    assert len({fingerprint(m, *name) for name in names}) == len(names)
