"""The shared index, read beside a plain dict of what the fake daemon put into it."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.shared_index import NOTHING, PIECE_KEYS, IndexTable, Words
from kvkeep.shared_memory import NO_ROW, map_region
from tests.fakes.regions import FakeIndex
from tests.vectors.make_vectors import fingerprint, home_bucket

NAMESPACE = bytes(range(16))
GROUP = 2


class Setup:
    """A fake table, its mapped reader, and shortcuts."""

    def __init__(self, buckets: int, key_nbytes: int = 32) -> None:
        self.fake = FakeIndex(buckets)
        fd = self.fake.client_fd()
        self.table = IndexTable(map_region(fd, self.fake.nbytes), table_id=1, server_epoch=42)
        os.close(fd)
        self.key_nbytes = key_nbytes
        self.seed = self.table.seed(NAMESPACE, GROUP, key_nbytes)
        self._random = random.Random(buckets)
        self.generations: dict[int, int] = {}

    def keys(self, count: int) -> list[bytes]:
        return [self._random.randbytes(self.key_nbytes) for _ in range(count)]

    def keys_of_bucket(self, bucket: int, count: int) -> list[bytes]:
        """Keys whose home is this bucket."""
        found: list[bytes] = []
        while len(found) < count:
            (key,) = self.keys(1)
            tag, _ = fingerprint(self.fake.a, self.fake.b, NAMESPACE, GROUP, key)
            if home_bucket(tag, self.fake.buckets) == bucket:
                found.append(key)
        return found

    def insert(self, key: bytes, address: int = 5, generation: int = 2) -> int:
        self.generations[address] = generation
        return self.fake.insert(NAMESPACE, GROUP, key, address)

    def generations_of(self, addresses: np.ndarray) -> np.ndarray:
        values = [self.generations.get(address, 1) for address in addresses.tolist()]
        return np.array(values, dtype=np.uint64)

    def find(self, keys: list[bytes]):
        words = Words(b"".join(keys), self.key_nbytes)
        return self.table.find(self.seed, words, words.count)

    def rows(self, keys: list[bytes]):
        words = Words(b"".join(keys), self.key_nbytes)
        rows = self.table.find_rows(self.seed, words, words.count, self.generations_of)
        addresses = [int(a) for piece, _ in rows.places for a in piece]
        generations = [int(g) for _, piece in rows.places for g in piece]
        return rows.found, addresses, generations


@pytest.mark.parametrize("key_nbytes", [16, 17, 20, 31, 32, 40, 63, 64])
@pytest.mark.parametrize("count", [1, 7, 62, 63, 64, 124, 125, 248, 249, 480, 481, 1500])
def test_a_prefix_of_any_length_is_found(key_nbytes, count):
    setup = Setup(buckets=count // 4 + 2, key_nbytes=key_nbytes)
    keys = setup.keys(count + 1)
    places = [(8 + 14 * i, 2 * i + 2) for i in range(count)]
    inserted = [setup.insert(key, *place) for key, place in zip(keys[:-1], places, strict=True)]
    found, addresses, generations = setup.rows(keys)
    assert found == setup.find(keys)
    assert (found.blocks, found.last_row, found.last_version) == (count, inserted[-1], 2)
    assert list(zip(addresses, generations, strict=True)) == places


@pytest.mark.parametrize("missing", [0, 1, 63, 64, 479, 480, 481, 959, 960, 999])
def test_the_prefix_ends_at_the_first_key_that_is_missing(missing):
    setup = Setup(buckets=300)
    keys = setup.keys(1000)
    inserted = {key: setup.insert(key) for i, key in enumerate(keys) if i != missing}
    found = setup.find(keys)
    assert found.blocks == missing
    assert found.last_row == (inserted[keys[missing - 1]] if missing else NO_ROW)
    assert setup.rows(keys)[0] == found


def test_no_keys_are_nothing():
    assert Setup(buckets=2).find([]) == NOTHING


def test_other_namespace_group_or_length_is_a_miss():
    setup = Setup(buckets=16)
    (key,) = setup.keys(1)
    setup.insert(key)
    table = setup.table
    assert table.find(table.seed(NAMESPACE, GROUP, 32), Words(key, 32), 1).blocks == 1
    assert table.find(table.seed(NAMESPACE, GROUP + 1, 32), Words(key, 32), 1).blocks == 0
    assert table.find(table.seed(NAMESPACE[::-1], GROUP, 32), Words(key, 32), 1).blocks == 0
    # A key and the same key with a zero byte more have equal words.
    short = Setup(buckets=16, key_nbytes=31)
    assert Words(key[:31], 31).piece(0, 1).tolist() != Words(key, 32).piece(0, 1).tolist()
    long_key = key[:31] + b"\0"
    short.insert(key[:31])
    assert short.find([key[:31]]).blocks == 1
    seed = short.table.seed(NAMESPACE, GROUP, 32)
    assert short.table.find(seed, Words(long_key, 32), 1).blocks == 0


def test_a_full_bucket_overflows_into_others_and_around_the_end():
    setup = Setup(buckets=5)
    keys = setup.keys_of_bucket(3, 20)
    rows = [setup.insert(key) for key in keys]
    assert {row // 8 for row in rows} > {3}
    assert any(row // 8 < 3 for row in rows)
    assert setup.find(keys).blocks == 20
    for home in range(5):
        for key in setup.keys_of_bucket(home, 3):
            assert setup.find([key]).blocks == 0


def test_a_completely_full_table_ends_a_search():
    setup = Setup(buckets=3)
    keys = setup.keys(24)
    for key in keys:
        setup.insert(key)
    assert setup.find(keys).blocks == 24
    assert setup.find(setup.keys(1)).blocks == 0


def test_removed_entries_do_not_end_a_search():
    setup = Setup(buckets=4)
    keys = setup.keys_of_bucket(1, 9)
    for key in keys:
        setup.insert(key)
    for key in keys[:8]:
        setup.fake.remove(NAMESPACE, GROUP, key)
    assert setup.find([keys[8]]).blocks == 1
    assert setup.find([keys[0]]).blocks == 0


def test_another_check_is_a_miss():
    setup = Setup(buckets=16)
    keys = setup.keys(3)
    row = [setup.insert(key) for key in keys][1]
    setup.fake.check[row] += 1
    assert setup.find(keys).blocks == 1
    assert setup.rows(keys)[1] == [5]


def test_a_tag_that_is_shown_twice_names_a_row_inside_the_table():
    """A reader can see a bucket before and after a move; the last bucket has no rows behind it."""
    setup = Setup(buckets=4)
    (key,) = setup.keys_of_bucket(3, 1)
    setup.insert(key)
    tags = setup.fake.tag[24:32]
    tags[6] = tags[7] = tags[0]
    assert setup.find([key]).blocks in {0, 1}


def test_a_block_that_is_not_in_ram_is_found_but_not_read():
    setup = Setup(buckets=16)
    keys = setup.keys(3)
    for key, address in zip(keys, (5, 0, 6), strict=True):
        setup.insert(key, address)
    assert setup.find(keys).blocks == 3
    found, addresses, _ = setup.rows(keys)
    assert (found.blocks, addresses) == (1, [5])


def test_a_row_that_is_changing_is_a_miss():
    setup = Setup(buckets=16)
    keys = setup.keys(3)
    row = [setup.insert(key) for key in keys][1]
    setup.fake.version[row] += 1
    assert setup.rows(keys)[1] == [5]
    setup.fake.version[row] += 1
    assert setup.rows(keys)[1] == [5, 5, 5]


class Flickering:
    """A version column that changes between the reads of one attempt, `times` times."""

    def __init__(self, times: int) -> None:
        self.reads = 0
        self._times = times

    def __getitem__(self, rows):
        self.reads += 1
        changed = min(self.reads // 2, self._times)
        return np.full(len(rows), 2 * changed, dtype=np.uint32)


@pytest.mark.parametrize(("times", "found"), [(0, 1), (1, 1), (2, 1), (3, 0)])
def test_a_row_that_changed_while_it_was_read_is_read_again_three_times(times, found):
    setup = Setup(buckets=16)
    (key,) = setup.keys(1)
    setup.insert(key)
    setup.table._version = Flickering(times)
    assert len(setup.rows([key])[1]) == found


def test_a_generation_is_read_between_two_looks_at_its_row():
    """The block leaves and its slot is used anew while the generation is read."""
    setup = Setup(buckets=16)
    keys = setup.keys(3)
    for at, key in enumerate(keys):
        setup.insert(key, 8 + at, 2)
    reads = []

    def generations_of(addresses):
        reads.append(addresses.tolist())
        if len(reads) == 1:
            setup.fake.remove(NAMESPACE, GROUP, keys[1])
            setup.generations[9] = 4
            setup.insert(setup.keys(1)[0], 9, 4)
        return setup.generations_of(addresses)

    words = Words(b"".join(keys), 32)
    rows = setup.table.find_rows(setup.seed, words, 3, generations_of)
    ((addresses, generations),) = rows.places
    assert (addresses.tolist(), generations.tolist()) == ([8], [2])
    assert len(reads) >= 2, "a row that changed is read again"


@pytest.mark.parametrize("state", [2, 3])
def test_a_table_that_moves_while_generations_are_read_gives_no_places(state):
    """Nobody writes to it any more: its rows would seem not to change."""
    setup = Setup(buckets=16)
    keys = setup.keys(3)
    for key in keys:
        setup.insert(key)

    def generations_of(addresses):
        setup.fake.state = state
        return setup.generations_of(addresses)

    words = Words(b"".join(keys), 32)
    assert setup.table.find_rows(setup.seed, words, 3, generations_of) == (NOTHING, [])


def test_a_slot_that_is_being_written_or_not_mapped_is_a_miss():
    setup = Setup(buckets=16)
    keys = setup.keys(3)
    for at, key in enumerate(keys):
        setup.insert(key, 8 + at, 2)
    setup.generations[10] = 5
    assert setup.rows(keys)[1] == [8, 9]
    del setup.generations[8]
    assert setup.rows(keys)[1] == []


@pytest.mark.parametrize("state", [0, 2, 3])
def test_a_table_that_is_not_live_answers_nothing(state):
    setup = Setup(buckets=16)
    keys = setup.keys(3)
    for key in keys:
        setup.insert(key)
    setup.fake.state = state
    assert not setup.table.live
    assert setup.find(keys) == NOTHING
    assert setup.rows(keys) == (NOTHING, [], [])
    setup.fake.state = 1
    assert setup.find(keys).blocks == 3


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 39)), max_size=150), st.integers(8, 20))
def test_any_order_of_inserts_and_removes(operations, buckets):
    setup = Setup(buckets)
    keys = setup.keys(40)
    stored: dict[bytes, int] = {}
    for insert, number in operations:
        key = keys[number]
        if insert and key not in stored:
            stored[key] = setup.insert(key, number + 1)
        elif not insert and key in stored:
            setup.fake.remove(NAMESPACE, GROUP, key)
            del stored[key]
    for number, key in enumerate(keys):
        found, addresses, _ = setup.rows([key])
        assert addresses == ([number + 1] if key in stored else [])
        assert found.last_row == stored.get(key, NO_ROW)
    prefix = next((i for i, key in enumerate(keys) if key not in stored), len(keys))
    assert setup.find(keys).blocks == prefix


def test_threads_do_not_share_scratch():
    setup = Setup(buckets=1000)
    chains = [setup.keys(count) for count in (3, 64, 481, 700)]
    for chain in chains:
        for key in chain:
            setup.insert(key, len(chain))
    wrong: list[object] = []

    def look_up(chain: list[bytes]) -> None:
        for _ in range(200):
            found, addresses, _ = setup.rows(chain)
            if found.blocks != len(chain) or set(addresses) != {len(chain)}:
                wrong.append(found)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=look_up, args=(chain,)) for chain in chains]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@pytest.mark.parametrize("count", [64, 1000, 8000])
@pytest.mark.parametrize("read", [False, True], ids=["find", "find_rows"])
def test_a_look_up_keeps_the_gil_beside_a_busy_thread(count, read):
    """Giving it up once would cost a whole switch interval, which is long here."""
    setup = Setup(buckets=2500)
    packed = b"".join(setup.keys(count))
    fill(setup, packed)
    words = Words(packed, 32)
    generations = np.arange(0, 20_000, 2, dtype=np.uint64)

    def look_up(*asked):
        if read:
            return setup.table.find_rows(*asked, lambda at: generations[at.view(np.int64)])
        return setup.table.find(*asked)

    interval = sys.getswitchinterval()
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            pass

    busy = threading.Thread(target=compute)
    took_s = []
    sys.setswitchinterval(0.05)
    busy.start()
    try:
        for _ in range(7):
            time.sleep(0.001)  # comes back with a fresh interval, as an engine's thread does
            start = time.perf_counter()
            look_up(setup.seed, words, count)
            took_s.append(time.perf_counter() - start)
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        busy.join()
    assert median(took_s) < 0.025


def fill(setup: Setup, packed: bytes) -> None:
    """Insert many keys at once."""
    words = Words(packed, 32)
    scratch = setup.table._borrow()
    tags, checks = [], []
    for start in range(0, words.count, PIECE_KEYS):
        piece = words.piece(start, min(start + PIECE_KEYS, words.count))
        scratch.cut(len(piece))
        setup.table._fingerprint(setup.seed, piece, scratch)
        tags.append(scratch.tag.copy())
        checks.append(scratch.check.copy())
    numbers = np.arange(1, words.count + 1, dtype=np.uint64)
    setup.fake.fill(np.concatenate(tags), np.concatenate(checks), numbers)
    assert setup.table.find(setup.seed, words, words.count).blocks == words.count


@pytest.mark.parametrize("missing", [0, 1, 479, 480, 481, 999])
def test_what_is_on_nvme_ends_at_the_first_key_that_is_not(missing):
    setup = Setup(buckets=300)
    keys = setup.keys(1000)
    for at, key in enumerate(keys):
        address = 0 if at % 2 else 5
        setup.fake.insert(NAMESPACE, GROUP, key, address, on_nvme=at != missing)
    setup.generations[5] = 2
    words = Words(b"".join(keys), 32)
    assert setup.table.find_on_nvme(setup.seed, words, 1000) == missing
    assert setup.table.find_on_nvme(setup.seed, words, missing // 2) == missing // 2
    # Stored, wherever: a look-up counts them all. A copy needs ram.
    assert setup.find(keys).blocks == 1000
    assert setup.rows(keys)[0].blocks == 1


@pytest.mark.parametrize("buckets", [1, 2, 40, 400])
def test_presence_is_told_of_each_key(buckets):
    """Also in buckets that overflow, and where another key has the tag."""
    setup = Setup(buckets)
    keys = setup.keys(min(1000, 5 * buckets))
    source = random.Random(buckets)
    stored = {key for key in keys if source.random() < 0.5}
    for key in sorted(stored):
        setup.insert(key)
    words = Words(b"".join(keys), 32)
    for limit in (0, 1, len(keys) // 2, len(keys)):
        wanted = bytes(key in stored for key in keys[:limit])
        assert setup.table.present(setup.seed, words, limit) == wanted
    for position in (0, len(keys) // 2, len(keys) - 1):
        found = setup.table.find_at(setup.seed, words, position)
        assert found.blocks == (keys[position] in stored)
        if found.blocks:
            row = setup.fake.row_of(NAMESPACE, GROUP, keys[position])
            assert (found.last_row, found.last_version) == (row, 2)


def test_a_table_that_moved_has_nothing():
    setup = Setup(4)
    (key,) = setup.keys(1)
    setup.insert(key)
    setup.fake.state = 2
    words = Words(key, 32)
    assert setup.table.present(setup.seed, words, 1) == b"\0"
    assert setup.table.find_at(setup.seed, words, 0) == NOTHING
