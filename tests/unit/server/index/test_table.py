"""The index table against a dict, and what a client sees of it while it changes."""

import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvkeep_server.index.layout import (
    BUCKET_ROWS,
    PROBED_BUCKETS_MAX,
    STATE_LIVE,
    STATE_MOVED,
    TAG_EMPTY,
    Multipliers,
    places_of,
)
from kvkeep_server.index.table import IndexTable, TableFullError


def make_table(rows: int) -> IndexTable:
    return IndexTable(
        rows=rows, multipliers=Multipliers.draw(random.Random(1)), server_epoch=5, table_id=3
    )


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def tag_at(table: IndexTable, home: int, number: int) -> int:
    """A tag whose probing begins in bucket `home`."""
    buckets = table.geometry.buckets
    upper = -(-(home << 32) // buckets)
    # The number is not in the lowest bits, which tell how far a step is: to the next bucket here.
    return (upper << 32) + (1 + number << 4)


def insert(table: IndexTable, tags: list[int], first_id: int = 0) -> np.ndarray:
    values = u64(*tags)
    ids = np.arange(first_id, first_id + len(tags), dtype=np.int32)
    places = places_of(address_for(values), values % u64(3) == 0)
    return table.insert(values, values ^ u64(7), places, ids)


def address_for(values: np.ndarray) -> np.ndarray:
    return (values + u64(1)) & u64(2**48 - 1)


def find(table: IndexTable, tags: list[int]) -> list[int]:
    rows, collides = table.find(u64(*tags), u64(*tags) ^ u64(7))
    assert collides is None or not collides.any()
    assert (collides is None) == (rows < 0).all()
    return rows.tolist()


@pytest.fixture
def table():
    table = make_table(64)
    yield table
    table.close()


def test_what_was_inserted_is_found_until_it_is_removed(table):
    tags = [tag_at(table, home, n) for home in range(8) for n in range(3)]
    rows = insert(table, tags, first_id=100)
    assert find(table, tags) == rows.tolist()
    assert table.ids[rows].tolist() == list(range(100, 124))
    assert table.address_of(rows).tolist() == address_for(u64(*tags)).tolist()
    assert table.on_nvme(rows).tolist() == [tag % 3 == 0 for tag in tags]
    assert table.tag_of(rows).tolist() == tags
    table.check()
    table.remove(rows[::2])
    found = find(table, tags)
    assert found[1::2] == rows[1::2].tolist()
    assert set(found[::2]) == {-1}
    table.check()


def test_nothing_is_found_in_an_empty_table_and_an_empty_batch_is_fine(table):
    assert find(table, [tag_at(table, 0, 0)]) == [-1]
    assert find(table, []) == []
    assert insert(table, []).tolist() == []
    table.remove(np.empty(0, np.int64))
    table.check()


def test_a_tag_with_another_check_is_a_collision(table):
    tag = tag_at(table, 1, 0)
    (row,) = insert(table, [tag])
    rows, collides = table.find(u64(tag, tag + 1), u64(99, 99))
    assert rows.tolist() == [row, -1]
    assert collides.tolist() == [True, False]


def test_a_full_bucket_overflows_into_the_next_and_the_last_into_the_first(table):
    last = table.geometry.buckets - 1
    tags = [tag_at(table, last, n) for n in range(BUCKET_ROWS + 2)]
    rows = insert(table, tags)
    assert sorted((rows // BUCKET_ROWS).tolist()) == [0, 0] + [last] * BUCKET_ROWS
    assert find(table, tags) == rows.tolist()
    table.check()


def test_what_ran_over_stays_in_reach_when_its_home_bucket_is_emptied(table):
    tags = [tag_at(table, 2, n) for n in range(2 * BUCKET_ROWS + 1)]
    rows = insert(table, tags)
    table.remove(rows[:BUCKET_ROWS])  # all of the home bucket
    assert find(table, tags[:BUCKET_ROWS]) == [-1] * BUCKET_ROWS
    assert find(table, tags[BUCKET_ROWS:]) == rows[BUCKET_ROWS:].tolist()
    table.check()
    again = insert(table, tags[:BUCKET_ROWS])
    assert sorted(again.tolist()) == sorted(rows[:BUCKET_ROWS].tolist()), "the same rows"
    table.check()


def test_a_table_that_was_emptied_is_as_good_as_new(table):
    new = bytes(table.memfd.buffer)[: table.geometry.offsets[1]], table._passed.tolist()
    for start in range(0, 400, 40):
        tags = [tag_at(table, n % 3, start + n) for n in range(40)]
        rows = insert(table, tags)
        assert table.room(0.75) == table.geometry.rows * 3 // 4 - 40
        assert find(table, tags) == rows.tolist()
        table.remove(rows)
    assert (bytes(table.memfd.buffer)[: table.geometry.offsets[1]], table._passed.tolist()) == new
    assert table.room(0.5) == table.geometry.rows // 2


@pytest.mark.parametrize("wrong", [1, -1])
def test_an_audit_counts_again_who_ran_over(table, wrong):
    insert(table, [tag_at(table, 2, n) for n in range(BUCKET_ROWS + 2)])
    table._passed[2] += np.array(wrong).astype(np.uint16)
    with pytest.raises(AssertionError, match="passed"):
        table.check()


def everything(table: IndexTable) -> tuple:
    return bytes(table.memfd.buffer), table.ids.tobytes(), table.live_rows


@pytest.mark.parametrize("buckets", [1, 3, 9, PROBED_BUCKETS_MAX + 9])
def test_a_batch_that_does_not_fit_leaves_no_trace(buckets):
    """P03: no byte that a client can see changes, so not even for an instant was a part of it
    visible."""
    table = make_table(buckets * BUCKET_ROWS)
    room = min(buckets, PROBED_BUCKETS_MAX) * BUCKET_ROWS
    rows = insert(table, [tag_at(table, 0, n) for n in range(room - 4)])
    table.remove(rows[:3])
    before = everything(table)
    written = []
    table._write = lambda *args: written.append(args)
    with pytest.raises(TableFullError, match=str(table.geometry.rows)):
        insert(table, [tag_at(table, 0, 1000 + n) for n in range(8)], first_id=2000)
    del table._write
    assert not written
    assert everything(table) == before
    table.check()
    insert(table, [tag_at(table, 0, 1000 + n) for n in range(7)], first_id=2000)
    table.check()
    table.close()


@pytest.mark.parametrize("buckets", [3, 101])
def test_every_last_row_can_be_used(buckets):
    table = make_table(buckets * BUCKET_ROWS)
    source = random.Random(buckets)
    tags = []
    while len(tags) < table.geometry.rows:
        tag = source.getrandbits(64) | 2
        try:
            insert(table, [tag], first_id=len(tags))
        except TableFullError:
            continue
        tags.append(tag)
    assert table.live_rows == table.geometry.rows
    assert sorted(find(table, tags)) == list(range(table.geometry.rows))
    table.check()
    table.close()


def test_state_is_published(table):
    assert int.from_bytes(table.memfd.buffer[12:16], "little") == STATE_LIVE
    table.set_state(STATE_MOVED)
    assert int.from_bytes(table.memfd.buffer[12:16], "little") == STATE_MOVED


def test_the_memory_goes_with_the_table():
    table = make_table(8)
    table.close()
    assert table.memfd.fd == -1


# Few homes and few tags, so that buckets run over, and are emptied again.
HOMES = st.integers(0, 4)
TAGS = st.tuples(HOMES, st.integers(0, 40))


class TableAgainstADict(RuleBasedStateMachine):
    @initialize(buckets=st.integers(1, 9))
    def start(self, buckets):
        self.table = make_table(buckets * BUCKET_ROWS)
        self.rows: dict[int, int] = {}  # tag -> id
        self.next_id = 0

    def tags(self, picks):
        tags = {tag_at(self.table, home % self.table.geometry.buckets, n) for home, n in picks}
        return sorted(tags)

    @rule(picks=st.lists(TAGS, max_size=24))
    def insert(self, picks):
        new = [tag for tag in self.tags(picks) if tag not in self.rows]
        before = everything(self.table)
        try:
            insert(self.table, new, self.next_id)
        except TableFullError:
            assert everything(self.table) == before
            assert len(new) > self.table.geometry.rows - len(self.rows)
            return
        self.rows |= {tag: self.next_id + i for i, tag in enumerate(new)}
        self.next_id += len(new)

    @rule(picks=st.lists(TAGS, max_size=24))
    def find(self, picks):
        tags = self.tags(picks)
        for tag, row in zip(tags, find(self.table, tags), strict=True):
            assert (row >= 0) == (tag in self.rows)
            if row >= 0:
                assert self.table.ids[row] == self.rows[tag]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def remove(self, data):
        picked = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        self.table.remove(np.array(find(self.table, picked), np.int64))
        for tag in picked:
            del self.rows[tag]

    @invariant()
    def audit(self):
        if hasattr(self, "table"):
            self.table.check()
            assert self.table.live_rows == len(self.rows)
            tags = sorted(self.rows)
            rows = find(self.table, tags)
            assert self.table.ids[rows].tolist() == [self.rows[tag] for tag in tags]

    def teardown(self):
        if hasattr(self, "table"):
            self.table.close()


TestTableAgainstADict = TableAgainstADict.TestCase
TestTableAgainstADict.settings = settings(max_examples=60, stateful_step_count=25)


# A client, written from shared_memory.md alone. Every row that the parent ever writes has
# check = tag ^ n and address = n << 8 | low byte of tag, where n counts up.
READER = """
import mmap, struct, sys
fd, seconds = int(sys.argv[1]), float(sys.argv[2])
import time
view = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
rows, nbytes = struct.unpack_from("<QQ", view, 40)
offsets = struct.unpack_from("<5Q", view, 56)
tag, check, place = (view[at : at + 8 * rows].cast("Q") for at in offsets[:3])
version = view[offsets[3] : offsets[3] + 4 * rows].cast("I")
seen = torn = mixed = 0
end = time.monotonic() + seconds
print("ready", flush=True)
while time.monotonic() < end:
    for row in range(rows):
        before = version[row]
        if before & 1:
            torn += 1
            continue
        t, c, p = tag[row], check[row], place[row]
        if version[row] != before:
            torn += 1
        elif t == 0:
            mixed += p != 0
        else:
            seen += 1
            mixed += c != t ^ (p >> 8) or p & 255 != t & 255
print(seen, torn, mixed)
"""


@pytest.mark.parametrize("spread", [3, 40], ids=["runs over", "few"])
def test_a_reader_in_another_process_never_sees_a_mixed_row(spread):
    """P10: what the row version is for."""
    table = make_table(64)
    fd = table.memfd.client_fd()
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(fd), "0.7"],
        pass_fds=[fd],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout.readline() == "ready\n"
    source, n = random.Random(spread), 0
    while reader.poll() is None:
        n += 1
        tags = list(
            {tag_at(table, source.randrange(8), source.randrange(spread)) for _ in "x" * 30}
        )
        values = u64(*tags)
        steps = u64(*([n % 2**40] * len(tags)))
        rows = table.insert(
            values,
            values ^ steps,
            (steps << u64(8)) | (values & u64(255)),
            np.arange(len(tags), dtype=np.int32),
        )
        table.remove(rows[: len(rows) // 2])
        table.remove(rows[len(rows) // 2 :])
    seen, _, mixed = map(int, reader.stdout.read().split())
    reader.stdout.close()
    assert mixed == 0
    assert seen > 1000
    assert n > 100
    table.close()


def test_the_tag_of_a_row_that_is_free_is_that_of_the_layout(table):
    rows = insert(table, [tag_at(table, 0, n) for n in range(BUCKET_ROWS)])
    table.remove(rows[:1])
    raw = np.frombuffer(
        table.memfd.buffer, np.uint64, table.geometry.rows, table.geometry.offsets[0]
    )
    assert (raw[rows[1:]] != TAG_EMPTY).all()
    assert raw[rows[0]] == TAG_EMPTY
    assert (raw[BUCKET_ROWS:] == TAG_EMPTY).all()
