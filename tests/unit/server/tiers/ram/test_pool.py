"""Chunks to the byte, growth and its refusals, generations."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep_server.core.errors import InvalidArgumentError, PoolExhaustedError
from kvkeep_server.core.memory_limit import MemoryLimit
from kvkeep_server.tiers.ram.pool import HEADROOM_NBYTES, Pool, PoolSettings, data_page_of

PAGE = 4096
MIB = 1 << 20
EPOCH = 0x1122334455667788


def make(limit=4 * MIB, chunk=2 * MIB, chunk_min=MIB, memory=None):
    told = []
    pool = Pool(
        settings=PoolSettings(limit, chunk, chunk_min, EPOCH),
        memory_limit=lambda: memory or MemoryLimit(64 << 30, 32 << 30, "memory of a test"),
        on_chunk=told.append,
    )
    return pool, told


def grow(pool):
    chunk = pool.make_chunk()
    pool.adopt(chunk)
    return chunk


def address(chunk_id, page):
    return np.uint64((chunk_id << 32) | page)


def test_header_to_the_byte():
    pool, _ = make()
    grow(pool)
    chunk = grow(pool)
    header = struct.unpack("<8sIIQQQQ", chunk.buffer[:48])
    data_offset = PAGE + PAGE  # 512 generations fill one page
    assert header == (b"KVKCHNK1", 2, 1, EPOCH, 2 * MIB, PAGE, data_offset)
    assert chunk.data_page == data_offset // PAGE
    assert bytes(chunk.buffer[48:]) == bytes(2 * MIB - 48)


@pytest.mark.parametrize(("nbytes", "page"), [(MIB, 2), (2 * MIB, 2), (2 * MIB + PAGE, 3)])
def test_data_begins_behind_the_generations(nbytes, page):
    assert data_page_of(nbytes) == page
    assert (page - 1) * PAGE >= nbytes // PAGE * 8


def test_grows_to_the_limit_and_not_beyond():
    pool, told = make(limit=5 * MIB + 123, chunk=2 * MIB)
    sizes = []
    while pool.can_grow:
        sizes.append(grow(pool).nbytes)
    assert sizes == [2 * MIB, 2 * MIB, MIB]
    assert pool.nbytes == sum(sizes) <= pool.settings.limit_nbytes
    assert [chunk.chunk_id for chunk in told] == [0, 1, 2]
    with pytest.raises(PoolExhaustedError, match=r"limit of 5\S*MiB; fix: raise ram.size"):
        pool.make_chunk()


def test_a_remainder_too_small_for_a_chunk_is_left():
    pool, _ = make(limit=3 * MIB - PAGE, chunk=2 * MIB)
    grow(pool)
    assert not pool.can_grow


def test_a_growth_that_memory_does_not_allow_says_so():
    memory = MemoryLimit(64 * MIB, 10 * MIB, "memory limit of the cgroup at /somewhere")
    pool, told = make(limit=256 * MIB, chunk=128 * MIB, memory=memory)
    with pytest.raises(PoolExhaustedError) as caught:
        pool.make_chunk()
    sentence = str(caught.value)
    for part in ("128MiB", "10MiB", "/somewhere", "64MiB", "lower ram.size"):
        assert part in sentence
    assert caught.value.retry_after_s > 0
    assert not pool.chunks
    assert not told


def test_growth_takes_a_smaller_chunk_where_only_that_is_free():
    # After a restart engines still map the old chunks: begin with what is free, then grow.
    memory = MemoryLimit(64 << 30, HEADROOM_NBYTES + 5 * MIB + 1, "memory of a test")
    pool, _ = make(limit=32 * MIB, chunk=16 * MIB, memory=memory)
    assert grow(pool).nbytes == 5 * MIB
    assert pool.can_grow


def test_growth_does_not_take_crumbs():
    memory = MemoryLimit(64 << 30, HEADROOM_NBYTES + MIB - 1, "memory of a test")
    pool, _ = make(limit=32 * MIB, chunk=16 * MIB, memory=memory)
    with pytest.raises(PoolExhaustedError):
        pool.make_chunk()


def test_an_allocation_that_the_kernel_refuses_is_an_error(monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("kvkeep_server.tiers.ram.pool.create_sealed", refuse)
    pool, _ = make()
    with pytest.raises(PoolExhaustedError, match="Cannot allocate memory; 32GiB are free; fix"):
        pool.make_chunk()


def test_a_limit_above_the_memory_limit_is_refused_at_start():
    # B066, without the cgroup: tests/e2e/test_memory_limits.py has the real one.
    memory = MemoryLimit(64 * MIB, 40 * MIB, "memory limit of the cgroup at /somewhere")
    pool, _ = make(limit=256 * MIB, memory=memory)
    with pytest.raises(InvalidArgumentError) as caught:
        pool.check_fits()
    for part in ("ram.size", "256MiB", "40MiB of it free", "/somewhere", "fix: lower ram.size"):
        assert part in str(caught.value)


def test_a_limit_below_one_slab_is_refused_at_start():
    pool, _ = make(limit=MIB - 1)
    with pytest.raises(InvalidArgumentError, match="at least 1MiB"):
        pool.check_fits()


def test_a_limit_that_fits_is_not_refused():
    make()[0].check_fits()


def test_view_and_views_reach_the_right_bytes_in_every_chunk():
    pool, _ = make(limit=6 * MIB)
    chunks = [grow(pool) for _ in range(3)]
    places = [(2, 5), (0, 2), (1, 511)]
    addresses = np.array([address(*place) for place in places])
    for (chunk_id, page), view in zip(places, pool.views(addresses, 100), strict=True):
        view[:] = bytes([page % 256]) * 100
        assert bytes(chunks[chunk_id].buffer[page * PAGE : page * PAGE + 100]) == bytes(view)
        assert bytes(pool.view(int(address(chunk_id, page)), 100)) == bytes(view)
        assert chunks[chunk_id].buffer[page * PAGE - 1] == 0


def test_generations_lie_where_the_layout_says():
    pool, _ = make()
    chunks = [grow(pool), grow(pool)]
    given = pool.set_odd(np.array([address(1, 7)]))
    raw = chunks[1].buffer[PAGE + 7 * 8 : PAGE + 8 * 8]
    assert int.from_bytes(raw, "little") == int(given[0]) == chunks[1].generations[7]
    assert int(given[0]) >> 48 == 1
    assert chunks[0].generations.sum() == 0


def test_generations_of_many_chunks_in_one_call():
    pool, _ = make(limit=6 * MIB)
    for _ in range(3):
        grow(pool)
    addresses = np.array([address(chunk, page) for page in range(2, 60) for chunk in (2, 0, 1)])
    even = pool.set_even(addresses)
    assert (even % 2 == 0).all()
    assert (even >> np.uint64(48) == addresses >> np.uint64(32)).all()
    order = np.random.default_rng(1).permutation(len(addresses))
    assert (pool.gather_generations(addresses[order]) == even[order]).all()
    odd = pool.set_odd(addresses[order])
    assert (odd % 2 == 1).all()
    assert (pool.gather_generations(addresses[order]) == odd).all()


def test_retired_pages_are_odd_and_their_neighbours_untouched():
    pool, _ = make()
    chunk = grow(pool)
    pool.set_even(np.array([address(0, page) for page in range(2, 40)]))
    before = chunk.generations.copy()
    pool.retire_pages(0, 10, 8)
    assert (chunk.generations[10:18] % 2 == 1).all()
    assert (chunk.generations[:10] == before[:10]).all()
    assert (chunk.generations[18:] == before[18:]).all()


def test_nothing_to_stamp_is_fine():
    pool, _ = make()
    grow(pool)
    assert len(pool.set_odd(np.empty(0, np.uint64))) == 0


BATCH = st.lists(st.tuples(st.integers(0, 1), st.integers(2, 30)), unique=True, max_size=12)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), BATCH), max_size=30))
def test_a_generation_never_comes_twice_and_only_rises(steps):
    pool, _ = make(limit=2 * MIB, chunk=MIB)
    chunks = [grow(pool), grow(pool)]
    seen = set()
    for odd, places in steps:
        addresses = np.array([address(*place) for place in places], np.uint64)
        before = pool.gather_generations(addresses)
        given = pool.set_odd(addresses) if odd else pool.set_even(addresses)
        assert (given % 2 == odd).all()
        assert (given > before).all()
        assert not seen & set(given.tolist())
        seen |= set(given.tolist())
        assert len(set(given.tolist())) == len(places)
    pool.close()
    assert all(chunk.memfd.fd == -1 for chunk in chunks)


def test_the_counter_does_not_wrap():
    pool, _ = make()
    grow(pool)
    pool._counters[0] = (1 << 48) - 2
    with pytest.raises(AssertionError, match="used up"):
        pool.set_odd(np.array([address(0, 2)]))
