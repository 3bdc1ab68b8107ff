"""Packed keys and their words."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_server.core.errors import InvalidArgumentError
from kvkeep_server.core.keys import KEY_NBYTES_MAX, KEY_NBYTES_MIN, KeyBatch

LENGTHS = st.integers(KEY_NBYTES_MIN, KEY_NBYTES_MAX)


@st.composite
def packed_keys(draw):
    nbytes, count = draw(LENGTHS), draw(st.integers(0, 8))
    return draw(st.binary(min_size=nbytes * count, max_size=nbytes * count)), nbytes


@given(packed_keys())
def test_words_are_little_endian_and_filled_up_with_zeros(case):
    packed, nbytes = case
    batch = KeyBatch.unpack(packed, nbytes)
    width = -(-nbytes // 8)
    assert batch.words.shape == (len(packed) // nbytes, width)
    for i, words in enumerate(batch.words.tolist()):
        key = packed[i * nbytes : (i + 1) * nbytes].ljust(width * 8, b"\0")
        assert words == [int.from_bytes(key[j : j + 8], "little") for j in range(0, len(key), 8)]


@given(packed_keys())
def test_packing_takes_unpacking_back(case):
    packed, nbytes = case
    batch = KeyBatch.unpack(packed, nbytes)
    assert batch.pack() == packed
    assert len(batch) == len(packed) // nbytes


@given(packed_keys(), st.data())
def test_slices_and_selections_are_those_keys(case, data):
    packed, nbytes = case
    batch = KeyBatch.unpack(packed, nbytes)
    single = [packed[i * nbytes : (i + 1) * nbytes] for i in range(len(batch))]
    start = data.draw(st.integers(0, len(batch)))
    stop = data.draw(st.integers(start, len(batch)))
    assert batch.slice(start, stop).pack() == b"".join(single[start:stop])
    positions = data.draw(st.permutations(range(len(batch))))[:3]
    selected = batch.select(np.array(positions, np.int64))
    assert selected.pack() == b"".join(single[i] for i in positions)


@given(LENGTHS, st.integers(1, 1000))
def test_a_broken_key_is_refused_by_name(nbytes, extra):
    if extra % nbytes == 0:
        extra += 1
    with pytest.raises(InvalidArgumentError, match=f"parent_key is '{extra} bytes'.*{nbytes}"):
        KeyBatch.unpack(bytes(extra), nbytes, "parent_key")


def test_whole_words_are_not_copied():
    packed = bytes(range(64))
    assert np.shares_memory(KeyBatch.unpack(packed, 32).words, np.frombuffer(packed, np.uint8))
